"""Which queries, keys and columns of the values the threads of a block of attention have, and what they read of shared memory."""

from __future__ import annotations

from tilewright.ir.expr import Expr, Var, index_const
from tilewright.kernels.attention_form import AttentionFacts
from tilewright.kernels.gpu.attention.space import AttentionSchedule, key_pitch, key_vector
from tilewright.kernels.gpu.shared_access import SharedLoads, offsets_of

WARP = 32


def adjacent(count: int) -> int:
    """Elements of a thread's `count` that are adjacent in shared memory."""
    return 4 if count % 4 == 0 else 2 if count % 2 == 0 else 1


def place_of(thread: Expr, sharing: int) -> tuple[Expr, Expr]:
    """A thread's place among those of the block, along queries and keys. Adjacent threads alternate between two rows: of vector loads the hardware
    merges equal addresses only between lanes whose numbers differ in the lowest or the second bit."""
    if sharing == WARP:
        return thread // WARP, thread % WARP
    pair = 2 * sharing
    return thread // pair * 2 + thread % 2, thread % pair // 2


def row_of(i: Expr, thread: Expr, block_m: int, thread_m: int) -> Expr:
    """The query of the tile that is a thread's i-th: adjacent threads have adjacent vectors."""
    width = adjacent(thread_m)
    return i // width * (block_m // (thread_m // width)) + thread * width + i % width


def column_of(j: Expr, thread: Expr, sharing: int, columns: int) -> Expr:
    """The column of the values that is a thread's j-th of `columns`."""
    width = adjacent(columns)
    return j // width * (sharing * width) + thread * width + j % width


def shared_loads(facts: AttentionFacts, schedule: AttentionSchedule) -> tuple[tuple[SharedLoads, ...], tuple[SharedLoads, ...]]:
    """What the first warp reads for a tile of keys: of queries and keys for the scores, and of weights and values for the sums. Its further vectors
    are at distances that are equal in all lanes."""
    lane, zero = Var("lane", WARP), index_const(0)
    thread_m, thread_n = place_of(lane, schedule.sharing)
    columns, group = -(-facts.d // schedule.sharing), key_vector(facts)
    stored = facts.stored_bytes if schedule.stages else facts.element_bytes
    rows, across = adjacent(schedule.thread_m), adjacent(columns)
    row = offsets_of(row_of(zero, thread_m, schedule.block_m, schedule.thread_m), lane)
    keys = offsets_of(thread_n * key_pitch(facts), lane)
    values = offsets_of(column_of(zero, thread_n, schedule.sharing, columns), lane)

    def of_rows(lines: int) -> SharedLoads:
        return SharedLoads(row, rows, lines * schedule.thread_m / rows, facts.element_bytes)

    return (
        (of_rows(facts.r), SharedLoads(keys, group, facts.r // group * schedule.thread_n, stored)),
        (of_rows(schedule.block_n), SharedLoads(values, across, schedule.block_n * columns / across, stored)),
    )
