"""Variants of the code of Winograd's algorithm in three kernels: those of its product (`gemm/variants.py`), without tables, since its offsets take no
divisions. The transforms hold a tile in registers and have one loop."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.block_transforms import of_each
from tilewright.kernels.columns import Columns, joined, take
from tilewright.kernels.gpu.gemm.variants import contraction_variants
from tilewright.kernels.gpu.winograd.space import VARIANT_AXES, WinogradFacts


def winograd_variants(facts: WinogradFacts, candidates: Columns, machine: Machine) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The feasible variants of candidates, with their columns and VARIANT_AXES, and for each the position of the candidate that it varies."""
    parts, origins = [], []
    for which, transform in of_each(candidates):
        rows, origin = contraction_variants(facts.products[facts.number(transform)], take(candidates, which), machine)
        parts.append({name: rows[name] for name in (*candidates, *VARIANT_AXES)})
        origins.append(np.flatnonzero(which)[origin])
    return joined(parts), np.concatenate(origins)
