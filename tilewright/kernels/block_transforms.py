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
from tilewright.kernels.winograd_transform import Shape, Winograd, output_tiles

Transform: TypeAlias = Winograd | Fourier
TRANSFORM_COLUMNS = ("output_tile", "filter_y", "filter_x", "fourier")
"""Columns of candidates, and fields of schedules, that name a transform."""


@lru_cache(maxsize=64)
def transforms_of(filter_shape: Shape) -> tuple[Transform, ...]:
    """The transforms for filters of this shape; empty if there are none."""
    winograd = (Winograd(m, filter_shape) for m in output_tiles(filter_shape))
    rows, columns = filter_shape
    spans = fourier_transform.spans(rows) if rows == columns else ()
    return (*winograd, *(Fourier(n - rows + 1, rows) for n in spans))


def transform_of(output_tile: int, filter_y: int, filter_x: int, fourier: int) -> Transform:
    """The transform of a schedule's fields."""
    return Fourier(output_tile, filter_x) if fourier else Winograd(output_tile, (filter_y, filter_x))


def tile_of(candidates: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the results of a tile, for candidates with the columns of a transform."""
    rows, columns = (np.where(candidates[name] > 1, candidates["output_tile"], 1) for name in ("filter_y", "filter_x"))
    return rows, columns


def elements_of(candidates: Columns) -> np.ndarray:
    """Elements of a tile of the input."""
    rows, columns = tile_of(candidates)
    elements: np.ndarray = (rows + candidates["filter_y"] - 1) * (columns + candidates["filter_x"] - 1)
    return elements


def points_of(candidates: Columns) -> np.ndarray:
    """Products of a tile."""
    elements = elements_of(candidates)
    points: np.ndarray = np.where(candidates["fourier"] == 1, 3 * elements // 2, elements)
    return points


def tiles_of(images: int, height: int, width: int, candidates: Columns) -> np.ndarray:
    """Tiles of all images."""
    rows, columns = tile_of(candidates)
    tiles: np.ndarray = images * -(-height // rows) * -(-width // columns)
    return tiles


def transform_axes(filter_shape: Shape) -> dict[str, np.ndarray]:
    """The columns of a transform: a row for each of `transforms_of`."""
    found = transforms_of(filter_shape)
    return {
        "output_tile": np.array([transform.output_tile for transform in found]),
        **{name: np.full(len(found), taps) for name, taps in zip(("filter_y", "filter_x"), filter_shape, strict=True)},
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
