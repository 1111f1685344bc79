"""Features of products by warpgroups for learned models, in addition to counts and estimate."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.tensor_cores.features import of_product
from tilewright.kernels.gpu.warpgroup.estimate import warpgroup_counts
from tilewright.kernels.gpu.warpgroup.form import WarpgroupFacts
from tilewright.kernels.gpu.warpgroup.space import block_of, kind_of


def warpgroup_features(facts: WarpgroupFacts, candidates: Columns, machine: Machine) -> dict[str, np.ndarray]:
    """The features of all products on tensor cores, and the tile of a block."""
    bm, bn = block_of(candidates)
    depth = np.full(len(bm), facts.row_bytes // facts.element_bytes)
    tile = {"axis block_m": bm, "axis block_n": bn, "axis block_k": depth, "axis taps": np.full(len(bm), facts.taps)}
    return tile | of_product(facts.product, kind_of(facts, candidates), warpgroup_counts(facts, candidates, machine), machine)
