"""What a warp of an implicit GEMM reads of shared memory, from the addresses of the code."""

from __future__ import annotations

from functools import lru_cache

from tilewright.ir.dtypes import FLOAT32
from tilewright.ir.expr import Const, Expr, Var, index_const
from tilewright.ir.kernel import Let
from tilewright.kernels.gpu.gemm.lower import DEEP, WARP, fetched, thread_grid
from tilewright.kernels.gpu.gemm.space import ContractionFacts, ContractionSchedule, Operand
from tilewright.kernels.gpu.gemm.tile import Tile
from tilewright.kernels.gpu.shared_access import SharedLoads, offsets_of


def shared_loads(facts: ContractionFacts, schedule: ContractionSchedule) -> tuple[SharedLoads, ...]:
    """What the first warp reads in one step: of both tiles, in vectors along k of a deep tile, and otherwise along m or n."""
    return tuple(
        _of_tile(schedule, fetched(operand, schedule), number, operand.element_bytes if schedule.copies else facts.element_bytes)
        for number, operand in enumerate((facts.a, facts.b))
    )


@lru_cache(maxsize=1024)
def _of_tile(schedule: ContractionSchedule, operand: Operand, number: int, element_bytes: int) -> SharedLoads:
    size, count = ((schedule.block_m, schedule.thread_m), (schedule.block_n, schedule.thread_n))[number]
    tile = Tile("", Const(0.0, FLOAT32), (), operand, size, schedule.block_k, schedule.threads, schedule.copies, FLOAT32, schedule.layout)
    lane = Var("lane", WARP)
    *_, lets = thread_grid(lane, schedule.block_m // schedule.thread_m, schedule.block_n // schedule.thread_n)
    thread = lets[number]
    assert isinstance(thread, Let)
    width = DEEP if tile.deep else min(4, count)
    step, vectors = (DEEP, count) if tile.deep else (1, count // width)
    k, vector = Var("k", schedule.block_k // step), Var("vector", vectors)
    own: Expr = vector if tile.deep else vector * width
    place = tile.at(tile.spread(own, thread.value, count), k * index_const(step))
    return SharedLoads(offsets_of(place, lane, k, vector), width, 1.0, element_bytes)
