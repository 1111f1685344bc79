"""The transforms by which convolutions with stride 1 are computed from blocks of their input, and what each one takes.

All have one form, Y = A^T [(G g) * (B^T d)]: linear transforms of a tile of the input and of the filters, products of their points (sums over the
input channels), and a linear transform of these to a tile of the output.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

import numpy as np

from tilewright.ir.dtypes import FLOAT32
from tilewright.ir.expr import Load, index_const
from tilewright.ir.kernel import Store
from tilewright.kernels import fourier_transform
from tilewright.kernels.columns import Columns
from tilewright.kernels.fourier_transform import Fourier
from tilewright.kernels.transform_pass import Work, work_of
from tilewright.kernels.winograd_transform import OUTPUT_TILES, Winograd

Transform: TypeAlias = Winograd | Fourier
TRANSFORM_COLUMNS = ("output_tile", "filter_size", "fourier")
"""Columns of candidates, and fields of schedules, that name a transform."""


@lru_cache(maxsize=64)
def transforms_of(filter_size: int) -> tuple[Transform, ...]:
    """The transforms for filters of `filter_size` x `filter_size`; empty if there are none."""
    winograd = (Winograd(m, filter_size) for m in OUTPUT_TILES.get(filter_size, ()))
    return (*winograd, *(Fourier(n - filter_size + 1, filter_size) for n in fourier_transform.spans(filter_size)))


def transform_of(output_tile: int, filter_size: int, fourier: int) -> Transform:
    """The transform of a schedule's fields."""
    return Fourier(output_tile, filter_size) if fourier else Winograd(output_tile, filter_size)


def points_of(candidates: Columns) -> np.ndarray:
    """Products of a tile, for candidates with the columns of a transform."""
    span = candidates["output_tile"] + candidates["filter_size"] - 1
    points: np.ndarray = np.where(candidates["fourier"] == 1, 3 * span**2 // 2, span**2)
    return points


def transform_axes(filter_size: int) -> dict[str, np.ndarray]:
    """The columns of a transform: a row for each of `transforms_of`."""
    found = transforms_of(filter_size)
    return {
        "output_tile": np.array([transform.output_tile for transform in found]),
        "filter_size": np.full(len(found), filter_size),
        "fourier": np.array([int(isinstance(transform, Fourier)) for transform in found]),
    }


def of_each(candidates: Columns) -> list[tuple[np.ndarray, Transform]]:
    """The transforms of candidates with the columns of a transform, each with the mask of its candidates."""
    axes = np.stack([candidates[name] for name in TRANSFORM_COLUMNS], axis=1)
    return [(np.all(axes == own, axis=1), transform_of(*map(int, own))) for own in np.unique(axes, axis=0)]


@lru_cache(maxsize=64)
def works(transform: Transform) -> tuple[Work, Work]:
    """The work of the transforms of a tile of the input and of a tile of sums."""
    element = Load("elements", (index_const(0),), FLOAT32)
    inputs = work_of(lambda values: transform.input_passes(values, lambda i, j: element, lambda point, value: Store("points", point, value)), FLOAT32)
    outputs = work_of(
        lambda values: transform.output_passes(
            values, lambda point: element, lambda first, rows: [Store("results", first, value) for row in rows for value in row]
        ),
        FLOAT32,
    )
    return inputs, outputs
