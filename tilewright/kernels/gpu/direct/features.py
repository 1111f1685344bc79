"""What learned models read of candidates of direct convolution besides counts."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.direct.schedule import DirectProblem
from tilewright.kernels.gpu.features import described

NUMBER = 1


def direct_features(problem: DirectProblem, rows: Columns) -> dict[str, np.ndarray]:
    sizes = {entry.name: getattr(problem, entry.name) for entry in fields(problem)}
    sizes["height"] = problem.height * problem.images * problem.groups
    return described(NUMBER, rows, sizes)
