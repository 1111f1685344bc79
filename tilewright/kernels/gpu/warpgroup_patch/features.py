"""Features of convolutions by warpgroups over patches for learned models, in addition to counts and estimate."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.tensor_cores.features import of_product
from tilewright.kernels.gpu.warpgroup_patch.estimate import patch_counts
from tilewright.kernels.gpu.warpgroup_patch.form import PatchFacts
from tilewright.kernels.gpu.warpgroup_patch.space import channels_of, patch_rows, pixels_of


def patch_features(facts: PatchFacts, candidates: Columns, machine: Machine) -> dict[str, np.ndarray]:
    """The features of all products on tensor cores, the tile of a block, and how much of a patch the products of one tap read."""
    pixels, channels, base = pixels_of(candidates), channels_of(candidates), facts.base
    one = np.ones(len(pixels))
    tile = {
        "axis block_m": pixels,
        "axis block_n": channels,
        "axis block_k": one * (base.row_bytes // base.element_bytes),
        "axis taps": one * base.taps,
        "patch over pixels": patch_rows(facts, candidates) / pixels,
    }
    return tile | of_product(base.product, base.kind, patch_counts(facts, candidates, machine), machine)
