"""Features that several schemas share."""

from __future__ import annotations

import numpy as np

from tilewright.kernels.columns import ceil_divided


def balance(tasks: np.ndarray, threads: int) -> np.ndarray:
    """Mean divided by maximum number of tasks per thread, with `tasks` equal tasks."""
    share: np.ndarray = tasks / (ceil_divided(tasks, threads) * threads)
    return share


def read_by_thread(a_bytes: float, b_bytes: float, share_pixels: np.ndarray, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Binary logarithms of the bytes of both factors that each thread reads; threads share the pixels or else the channels."""
    return np.log2(np.where(share_pixels, a_bytes / threads, a_bytes)), np.log2(np.where(share_pixels, b_bytes, b_bytes / threads))
