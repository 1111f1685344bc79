"""Transforms of convolutions by blocks: their statements against correlation in float64, errors in fp32, counts, and layers as compiled code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tilewright
from tests.compiled import Case, check_native
from tests.draws import draws
from tilewright.hardware import machine
from tilewright.ir.expr import Const, Expr, Load, Var, index_const
from tilewright.ir.kernel import Let, Statement, Store
from tilewright.kernels.block_transforms import (
    Transform,
    elements_of,
    of_each,
    points_of,
    tile_of,
    transform_axes,
    transform_of,
    transforms_of,
    works,
)
from tilewright.kernels.fourier_transform import Fourier
from tilewright.kernels.transform_pass import SCRATCH, Pass, Values
from tilewright.kernels.winograd_transform import Winograd
from tilewright.runtime.verify import TOLERANCES
from tilewright.selection.choice import rank
from tilewright.tuning.problems import convolution_problem

FILTERS = (*((size, size) for size in (3, 4, 5, 6, 7, 8, 9, 11, 13)), (1, 3), (1, 5), (1, 7), (3, 5), (5, 3))
EVERY = [transform for filter_shape in FILTERS for transform in transforms_of(filter_shape)]
OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative}


def value_of(expr: Expr, variables: Mapping[Var, Any], memory: Mapping[str, list[Any]]) -> Any:
    """The value of an expression whose variables and loaded elements are arrays."""
    if isinstance(expr, Const):
        return expr.value
    if isinstance(expr, Var):
        return variables[expr]
    if isinstance(expr, Load):
        return memory[expr.buffer][value_of(expr.index[0], variables, memory)]
    return OPERATIONS[expr.operation](*(value_of(arg, variables, memory) for arg in expr.args))


def execute(passes: Sequence[Pass], memory: dict[str, list[Any]]) -> None:
    """All pieces of each pass; a piece sees what earlier passes have put, and nothing that its own pass puts."""
    for one in passes:
        before = {**memory, SCRATCH: list(memory[SCRATCH])}
        memory[SCRATCH][:] = [None] * len(memory[SCRATCH])
        for piece in range(one.pieces):
            variables: dict[Var, Any] = {}
            for statement in one.body(index_const(piece)):
                if isinstance(statement, Let):
                    variables[statement.variable] = value_of(statement.value, variables, before)
                else:
                    assert isinstance(statement, Store)
                    place = value_of(statement.offset, variables, before)
                    assert memory[statement.buffer][place] is None, "stored twice"
                    memory[statement.buffer][place] = value_of(statement.value, variables, before)


def convolved(transform: Transform, tiles: np.ndarray, filters: np.ndarray) -> np.ndarray:
    """Tiles of results, [*transform.tile, tiles] of the type of `tiles` [*transform.span, channels, tiles], by filters [taps, channels] of float64."""
    (height, width), (_, row), kind = transform.tile, transform.span, tiles.dtype.type
    values = Values("f32", 1, lambda place: Load(SCRATCH, (place,), "f32"), lambda place, value: Store(SCRATCH, place, value))
    memory: dict[str, list[Any]] = {
        "tile": list(tiles.reshape(-1, *tiles.shape[2:])), SCRATCH: [None] * transform.scratch, "points": [None] * transform.points,
        "results": [None] * (height * width),
    }  # fmt: skip

    def rows(first: Expr, sums: Sequence[Sequence[Expr]]) -> list[Statement]:
        return [Store("results", (first + i) * width + j, value) for i, row in enumerate(sums) for j, value in enumerate(row)]

    execute(transform.input_passes(values, lambda i, j: Load("tile", (i * row + j,), "f32"), lambda at, value: Store("points", at, value)), memory)
    mapped = (np.array(transform.filter_matrix) @ filters).astype(kind)
    sums = []
    for point, u in zip(memory["points"], mapped, strict=True):
        total = np.zeros(tiles.shape[3], kind)
        for channel in range(tiles.shape[2]):
            total += point[channel] * u[channel]
        sums.append(total)
    memory |= {"sums": sums, SCRATCH: [None] * transform.scratch}
    execute(transform.output_passes(values, lambda at: Load("sums", (at,), "f32"), rows), memory)
    return np.array(memory["results"]).reshape(height, width, -1)


def correlated(transform: Transform, tiles: np.ndarray, filters: np.ndarray) -> np.ndarray:
    """The same by direct sums in the type of the tiles."""
    (height, width), (down, across) = transform.tile, transform.filter_shape
    total = np.zeros((height, width, tiles.shape[3]), tiles.dtype)
    for i in range(down):
        for j in range(across):
            for channel in range(tiles.shape[2]):
                total += tiles[i : i + height, j : j + width, channel] * tiles.dtype.type(filters[i * across + j, channel])
    return total


def drawn(transform: Transform, channels: int, seed: int, count: int = 4) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    tiles = generator.standard_normal((*transform.span, channels, count))
    taps = prod(transform.filter_shape)
    return tiles, generator.standard_normal((taps, channels)) / (taps * channels) ** 0.5


@pytest.mark.in_turns(12)
@pytest.mark.parametrize("transform", EVERY, ids=str)
def test_its_statements_correlate(transform: Transform) -> None:
    tiles, filters = drawn(transform, 3, 0)
    np.testing.assert_allclose(convolved(transform, tiles, filters), correlated(transform, tiles, filters), atol=1e-12)


@settings(max_examples=draws(20), deadline=None)
@given(member=st.sampled_from(EVERY), channels=st.sampled_from([1, 8, 64]), seed=st.integers(0, 10_000))
def test_errors_in_single_precision(member: Transform, channels: int, seed: int) -> None:
    """Relative to the largest result: those of Fourier transforms are below those of direct sums of many terms; all are far below the tolerance."""
    tiles, filters = drawn(member, channels, seed)
    tiles = tiles.astype(np.float32)
    exact = correlated(member, tiles.astype(np.float64), filters)
    scale = np.abs(exact).max()
    error = np.abs(convolved(member, tiles, filters) - exact).max() / scale
    assert error < TOLERANCES["f32"] / 10
    if isinstance(member, Fourier):
        assert error < 2e-6


def error_of(transform: Transform, channels: int) -> float:
    """The root mean square error over the root mean square of the results, of many tiles."""
    tiles, filters = drawn(transform, channels, 0, 400)
    tiles = tiles.astype(np.float32)
    exact = correlated(transform, tiles.astype(np.float64), filters)
    return float((((convolved(transform, tiles, filters) - exact) ** 2).mean() / (exact**2).mean()) ** 0.5)


@pytest.mark.parametrize("channels", [8, 96])
def test_filters_that_are_not_square_have_no_larger_errors_than_square_ones(channels: int) -> None:
    """F(m, r) at most those of F(4x4, r x r), and of F(4x4, 5x5) for larger r, whose next tile exceeds them; F(m x m, r x s) those of F(4x4, 5x5)."""
    largest = {size: error_of(Winograd(4, (size, size)), channels) for size in (3, 5)}
    for filter_shape in ((1, 3), (1, 5), (1, 7), (3, 5), (5, 3)):
        allowed = largest[3 if filter_shape == (1, 3) else 5]
        for transform in transforms_of(filter_shape):
            assert error_of(transform, channels) < 1.1 * allowed, transform
    assert error_of(Winograd(8, (1, 3)), channels) > 1.5 * largest[3]


def test_a_fourier_transform_is_far_from_an_outlier_s_size() -> None:
    """Unlike direct sums, a tile's results that do not read an outlier have errors relative to it."""
    transform = transforms_of((7, 7))[1]
    tiles, filters = drawn(transform, 1, 0, 1)
    tiles[0, 0] = 1e6
    narrow = tiles.astype(np.float32)
    exact = correlated(transform, narrow.astype(np.float64), filters)[1:, 1:]
    error = np.abs(convolved(transform, narrow, filters)[1:, 1:] - exact).max()
    assert 1e-3 < error / np.abs(exact).max() and error < 1e-6 * 1e6


def test_members_and_their_columns() -> None:
    assert [str(transform) for transform in transforms_of((3, 3))] == ["winograd F(2x2,3x3)", "winograd F(4x4,3x3)"]
    assert [str(transform) for transform in transforms_of((3, 5))] == ["winograd F(2x2,3x5)", "winograd F(4x4,3x5)"]
    assert [str(transform) for transform in transforms_of((1, 7))] == ["winograd F(2,7)", "winograd F(4,7)"]
    assert [type(transform).__name__ for transform in transforms_of((5, 5))] == ["Winograd", "Winograd", "Fourier", "Fourier", "Fourier"]
    assert not any(map(transforms_of, ((1, 1), (2, 2), (30, 30), (1, 2), (1, 9), (3, 7), (5, 7), (7, 9))))
    for filter_shape in FILTERS:
        columns = transform_axes(filter_shape)
        found = of_each(columns)
        assert {transform for _, transform in found} == set(transforms_of(filter_shape))
        for which, transform in found:
            assert which.sum() == 1 and points_of(columns)[which] == transform.points
            assert [int(extent[which][0]) for extent in tile_of(columns)] == list(transform.tile)
            assert elements_of(columns)[which] == prod(transform.span)
            assert transform_of(transform.output_tile, *filter_shape, int(isinstance(transform, Fourier))) == transform


@pytest.mark.parametrize("transform", [transform for transform in EVERY if isinstance(transform, Fourier)], ids=str)
def test_a_fourier_transform_takes_few_operations(transform: Fourier) -> None:
    """Fewer than 5 n log2(n) operations for each complex transform of n (that count is Cooley and Tukey's for powers of two), and the sums for three
    products instead of four; a result takes fewer products than there are taps."""
    n, half = transform.length, transform.half
    inputs, outputs = works(transform)
    assert transform.points == 3 * n * n // 2
    assert inputs.arithmetic < n * (5 * half * np.log2(half) + 6 * half) + half * (5 * n * np.log2(n) + n)
    assert outputs.arithmetic < inputs.arithmetic and inputs.fused < inputs.arithmetic
    assert inputs.scratch == 2 * n * n and outputs.scratch == 2 * n * transform.output_tile
    assert transform.points < transform.output_tile**2 * transform.filter_size**2


@pytest.mark.parametrize("target", ["h200", "x86-avx512"])
@pytest.mark.parametrize(
    "sizes, wanted", [((192, 64, 27, 27, 5), "winograd F(4x4,5x5)"), ((64, 64, 56, 56, 9), "fourier F("), ((96, 96, 68, 68, (1, 7)), "winograd")]
)
def test_the_models_choose_among_them(target: str, sizes: tuple[Any, ...], wanted: str) -> None:
    ranking = rank(convolution_problem(*sizes), machine(target))
    assert str(ranking.first().schedule).startswith(wanted)
    assert len(ranking.parts) > 1, "no direct sums to compare with"


def test_layers_as_compiled_code() -> None:
    """Layers by transforms after one another, with epilogues."""
    layers = (
        *(nn.Conv2d(3, 32, 7, padding=3), nn.ReLU(), nn.Conv2d(32, 48, 5, padding=2), nn.ReLU(), nn.Conv2d(48, 64, 9, padding=4), nn.Tanh()),
        *(nn.Conv2d(64, 64, (1, 7), padding=(0, 3)), nn.ReLU(), nn.Conv2d(64, 64, (7, 1), padding=(3, 0)), nn.ReLU()),
    )
    module, x = nn.Sequential(*layers).eval(), torch.randn(2, 3, 30, 41)
    for threads in (1, 2):
        with tilewright.compile(module, (x,), target="native", threads=threads) as executable:
            schedules = [region.schedule for region in executable.image.program.regions]
        assert sum(schedule.startswith(("winograd F", "fourier F")) for schedule in schedules) == 4, schedules
    check_native([Case("layers", module, (x,), 3e-5)])


def test_sequences_as_compiled_code() -> None:
    """Convolutions along one dimension, of which images have one other or none."""
    module, x = nn.Sequential(nn.Conv1d(32, 64, 5), nn.GELU(), nn.Conv1d(64, 32, 3, padding=1)).eval(), torch.randn(1, 32, 500)
    with tilewright.compile(module, (x,), target="native", threads=1) as executable:
        schedules = [region.schedule for region in executable.image.program.regions]
    assert any(schedule.startswith("winograd F(6,5)") for schedule in schedules), schedules
    check_native([Case("sequences", module, (x,), 3e-5)])
