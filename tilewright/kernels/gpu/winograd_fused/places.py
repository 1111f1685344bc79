"""Where the threads of a block of `winograd fused` are, and what they read of shared memory."""

from __future__ import annotations

from tilewright.ir.expr import Expr, Var, index_const
from tilewright.kernels.gpu.shared_access import SharedLoads, offsets_of
from tilewright.kernels.gpu.winograd_fused.space import PADDING, FusedWinogradSchedule

WARP = 32


def place_of(thread: Expr, schedule: FusedWinogradSchedule) -> tuple[Expr, Expr, Expr]:
    """A thread's point, and its position in the grid of threads of that point."""
    columns = schedule.outputs // schedule.thread_n
    group = schedule.tiles // schedule.thread_m * columns
    return thread // group, thread % group // columns, thread % columns


def spread(index: Expr | int, thread: Expr, per_thread: int, size: int) -> Expr:
    """The position of a thread's element `index` among `size`: a thread's next vector of four follows after those of all threads."""
    width = min(4, per_thread)
    index = index_const(index) if isinstance(index, int) else index
    return index // width * (size // (per_thread // width)) + thread * width + index % width


def product_loads(schedule: FusedWinogradSchedule) -> tuple[SharedLoads, ...]:
    """What the first warp reads for the products of one channel: transformed inputs, and filters. Further channels and vectors are at distances that
    are equal in all lanes."""
    lane = Var("lane", WARP)
    point, thread_m, thread_n = place_of(lane, schedule)
    loads = []
    for count, thread, size, pitch in (
        (schedule.thread_m, thread_m, schedule.tiles, schedule.tiles + PADDING),
        (schedule.thread_n, thread_n, schedule.outputs, schedule.outputs),
    ):
        width = min(4, count)
        offset = point * (schedule.channels * pitch) + spread(0, thread, count, size)
        loads.append(SharedLoads(offsets_of(offset, lane), width, count // width))
    return tuple(loads)
