"""Features of maps for learned models, in addition to counts and estimate."""

from __future__ import annotations

import numpy as np

from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.map.space import MapFacts


def map_features(facts: MapFacts, candidates: Columns) -> dict[str, np.ndarray]:
    """How many positions along the fastest axis a block has."""
    return {"across": candidates["threads"] * candidates["items"] * candidates["vector_width"] / facts.inner}
