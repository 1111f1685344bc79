"""Variants of the code of a direct convolution: the plain loop, with one buffer (see `gemm/variants.py`).

Its other code variants are in the space (how filters are read) or follow from the tile (padding with the fewest bank conflicts, widest vectors).
"""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, take
from tilewright.kernels.gpu.direct.schedule import DirectFacts, steps_of
from tilewright.kernels.gpu.gemm.space import PLAIN


def direct_variants(facts: DirectFacts, candidates: Columns, machine: Machine) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The candidates with a plain loop, and the position of the one that each varies: those of at most two stages, which it ignores, and of several
    steps. They need no more of any resource than the candidates."""
    which = np.flatnonzero((candidates["stages"] <= 2) & (steps_of(facts, candidates) > 1))
    return {**take(candidates, which), "loop": np.full(len(which), PLAIN)}, which
