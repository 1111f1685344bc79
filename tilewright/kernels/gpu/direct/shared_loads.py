"""What a warp of a direct convolution reads of shared memory, from the addresses of the code."""

from __future__ import annotations

from tilewright.kernels.gpu.direct.patch_layout import lanes_of, lines_read_of, pitches_of
from tilewright.kernels.gpu.direct.schedule import SHARED, DirectFacts, DirectSchedule, columns_of
from tilewright.kernels.gpu.shared_access import SharedLoads


def shared_loads(facts: DirectFacts, schedule: DirectSchedule) -> tuple[SharedLoads, ...]:
    """What the first warp reads for one channel: its slices of the patch, in vectors and narrower remainders of lines, and its filters if they are
    staged, of which threads along k have adjacent vectors. Lines, taps and further vectors are at distances that are equal in all lanes."""
    pitches = pitches_of(facts, schedule)
    lines, run, together = (int(column[0]) for column in lines_read_of(facts, columns_of(schedule)))
    k, y, x = lanes_of(schedule.warp_k, schedule.warp_y, schedule.warp_x)
    slices = y * (schedule.register_y * facts.stride_y * pitches.row) + x * (schedule.register_x * facts.stride_x * pitches.column)
    rest = run % pitches.width
    found = [
        SharedLoads(slices[None, :], width, lines * number / together, facts.element_bytes)
        for width, number in ((pitches.width, run // pitches.width), (2, rest // 2), (1, rest % 2))
    ]
    if schedule.filters == SHARED:
        width = min(4, schedule.register_k)
        times = facts.filter_y * facts.filter_x * schedule.register_k / width
        found.append(SharedLoads(k[None, :] * width, width, times, facts.element_bytes))
    return tuple(found)
