"""Features of direct convolution for learned models, in addition to counts."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.direct.schedule import DirectFacts
from tilewright.kernels.gpu.features import described

NUMBER = 1


def direct_features(facts: DirectFacts, candidates: Columns) -> dict[str, np.ndarray]:
    sizes = {entry.name: getattr(facts, entry.name) for entry in fields(facts)}
    sizes["height"] = facts.height * facts.images * facts.groups
    return described(NUMBER, candidates, sizes)
