"""The closed form with which DeepGEMM chooses the tiles of matrix products on Hopper, as a baseline for the order of candidates on tensor cores.

deepseek-ai/DeepGEMM, csrc/jit_kernels/heuristics/sm90.hpp: cycles = max(bytes through level 1 at 128 bytes per cycle and processor, bytes through
level 2 at min(64 bytes per cycle and processor, 8 TB/s at 1.3 GHz)) / wave efficiency. Through level 2 go the factors' tiles and the results, through
level 1 these, and what tensor cores read of the tiles. Layouts with fewer than three stages, or four for tiles below 128 x 192, are left out; here
they follow the others, and a split reduction, which DeepGEMM lacks, counts as further blocks.
"""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.gpu.counts import TensorCounts
from tilewright.selection.ranking import Ranking

CLOSED_FORM = "closed form"
LEVEL_1_BYTES, LEVEL_2_BYTES, MOST_LEVEL_2_BYTES = 128, 64, 8e6 / 1.3e3
"""Bytes per cycle: the former two per processor, the last of the machine."""
LEAST_STAGES, SMALL_TILE = 3, 128 * 192


def closed_form_seconds(counts: TensorCounts, machine: Machine) -> np.ndarray:
    """Seconds by which DeepGEMM would order the candidates."""
    tiles, results = counts.blocks * counts.reuse_bytes, counts.written_bytes
    read = counts.blocks * counts.steps * counts.warps * counts.step_shared_loads * machine.shared_bytes_per_cycle
    through_1 = (tiles + read + results) / (LEVEL_1_BYTES * machine.processors)
    through_2 = (tiles + results) / min(LEVEL_2_BYTES * machine.processors, MOST_LEVEL_2_BYTES)
    efficiency = counts.blocks / (np.ceil(counts.blocks / machine.processors) * machine.processors)
    seconds: np.ndarray = np.maximum(through_1, through_2) / efficiency / machine.clock_hz
    tile = counts.accumulators * counts.warps * machine.warp_size
    needed = np.minimum(np.where(tile < SMALL_TILE, LEAST_STAGES + 1, LEAST_STAGES), counts.steps)
    return np.where(counts.stages < needed, seconds + seconds.max(), seconds)


def order(ranking: Ranking, machine: Machine) -> np.ndarray | None:
    """The positions of the ranking's candidates on tensor cores, those that the closed form prefers first; None if there are none."""
    starts = ranking.starts
    known = {number: part.counts for number, part in enumerate(ranking.parts) if isinstance(part.counts, TensorCounts)}
    if not known:
        return None
    positions = np.concatenate([np.arange(starts[number], starts[number + 1]) for number in known])
    seconds = np.concatenate([closed_form_seconds(counts, machine) for counts in known.values()])
    return positions[np.argsort(seconds, kind="stable")]
