"""What learned models read of candidates of Winograd's algorithm besides counts."""

from __future__ import annotations

import numpy as np

from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.gemm.features import of_product
from tilewright.kernels.gpu.winograd.space import WinogradProblem
from tilewright.kernels.winograd_transform import FILTER

NUMBER = 3


def winograd_features(problem: WinogradProblem, rows: Columns) -> dict[str, np.ndarray]:
    return of_product(NUMBER, rows, winograd_sizes(problem))


def winograd_sizes(problem: WinogradProblem) -> dict[str, int]:
    """The convolution's sizes by the names of `kernels.gpu.features.PROBLEM`."""
    return {
        "outputs": problem.outputs, "height": problem.images * problem.height, "width": problem.width, "channels": problem.channels,
        "filter_y": FILTER, "filter_x": FILTER,
    }  # fmt: skip
