"""CNNOpt (PACT 2022) as published, for comparison: its kernel variants and its analytical model."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.gpu.counts import WORD, TileCounts
from tilewright.kernels.gpu.direct.counts import Variant

PUBLISHED = Variant(channels_last=False, staged_result=True, spare_registers=2)
"""CNNOpt's kernels. Their script limits the compiler's registers to equation 2 (3) plus one and two more, so that occupancy follows the equation."""


def printed_cost(volumes: TileCounts, machine: Machine) -> Estimate:
    """CNNOpt's analytical model as in its section 4.3 and its artifact, for comparison: the maximum of the two data movements, transactions of 128
    bytes over bandwidth. Global: fills of shared memory, filters read through the read-only path, stored results. Shared: reads of the input slice
    (and filters of the S kernel) and the staging of results."""
    v = volumes
    rounds = v.blocks * v.steps
    wide = 32 * WORD
    into_shared = rounds * (v.step_fill + v.warps * v.step_cached_loads) + v.blocks * v.store_instructions
    from_shared = rounds * v.warps * v.step_shared_loads + v.blocks * v.drain_wavefronts
    global_seconds = wide * into_shared / machine.memory_bandwidth
    shared_seconds = wide * from_shared / (machine.shared_bytes_per_cycle * machine.clock_hz * machine.processors)
    return Estimate({"global": global_seconds, "shared": shared_seconds}, overlapped=("global", "shared"))
