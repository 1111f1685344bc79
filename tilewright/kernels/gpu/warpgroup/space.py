"""Schedules of products by warpgroups: the tile of a block and the stages of its pipeline.

C[batch, m, n] = sum over taps and channels of A[batch, m, tap, channel] * B[batch, n, tap, channel]. One warpgroup copies, each of `consumers` others
multiplies 64 rows by block_n columns.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from tilewright.codegen.intrinsics.wgmma import M
from tilewright.hardware.machine import Machine
from tilewright.ir.intrinsic import LANES
from tilewright.kernels.columns import Columns, ceil_divided, product_of, reject
from tilewright.kernels.gpu.warpgroup.form import WarpgroupFacts

BARRIER_BYTES = 8


@dataclass(frozen=True)
class WarpgroupSchedule:
    """One candidate. A block computes 64 * consumers x block_n elements; `stages` parts of the reduction are in shared memory at once."""

    block_n: int
    consumers: int
    stages: int

    @property
    def block_m(self) -> int:
        return M * self.consumers

    @property
    def threads(self) -> int:
        return LANES["warpgroup"] * (self.consumers + 1)

    def __str__(self) -> str:
        return f"warpgroups block={self.block_m}x{self.block_n} stages={self.stages}"


AXES = {
    "block_n": (16, 32, 48, 64, 96, 128, 160, 192, 224, 256),
    "consumers": (1, 2),
    "stages": (2, 3, 4, 6),
}


def warpgroup_space(facts: WarpgroupFacts, machine: Machine, tf32: bool) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The candidates, and the number rejected for each reason. `tf32`: whether float32 factors may be rounded to TF32."""
    if facts.kind == "tf32" and not tf32:
        return {entry.name: np.zeros(0, np.int64) for entry in fields(WarpgroupSchedule)}, {"float32 may not be rounded to TF32": 1}
    candidates = product_of(AXES)
    bn, stages = candidates["block_n"], candidates["stages"]
    bm, product = M * candidates["consumers"], facts.product
    return reject(
        candidates,
        [
            ("shared memory exceeds a block's", shared_bytes_of(facts, candidates) > machine.shared_bytes_per_block),
            ("tile of m is more than twice the extent", (bm >= 2 * max(product.m, M)) & (bm > M)),
            ("tile of n is more than twice the extent", (bn >= 2 * max(product.n, 16)) & (bn > 16)),
            ("more stages than steps", (stages > 2) & (stages > facts.steps)),
        ],
    )


def shared_bytes_of(facts: WarpgroupFacts, candidates: Columns) -> np.ndarray:
    """Bytes of shared memory per block: tiles, and two barriers a stage."""
    rows = M * candidates["consumers"] + candidates["block_n"]
    needed: np.ndarray = candidates["stages"] * (rows * facts.row_bytes + 2 * BARRIER_BYTES) + 1024  # the tiles are aligned to as much
    return needed


def blocks_of(facts: WarpgroupFacts, candidates: Columns) -> np.ndarray:
    """Blocks of the grid."""
    product = facts.product
    return product.batch * ceil_divided(product.m, M * candidates["consumers"]) * ceil_divided(product.n, candidates["block_n"])
