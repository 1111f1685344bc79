"""Copies between row-major and channels-last storage, and transposed results of CPU contractions: against PyTorch in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.draws import draws
from tests.gpu_cases import Case, check, convolution_case, double, make_case, random, relu, tensor
from tilewright.hardware import machine
from tilewright.ir.computation import StepBuilder
from tilewright.ir.expr import Load, index_const
from tilewright.ir.kernel import Store, expressions, statements
from tilewright.ir.layout import channels_last, row_major
from tilewright.ir.region import Lowered
from tilewright.kernels.cpu.contraction.space import CpuContractionSchedule
from tilewright.kernels.cpu.loops.space import LoopSchedule
from tilewright.kernels.cpu.transposition import copied, transposed
from tilewright.kernels.registry import lower

NEON, AVX2, AVX512 = machine("neoverse-n1"), machine("x86-avx2"), machine("x86-avx512")


def interleavings(lowered: Lowered) -> int:
    return sum("zip_low" in str(value) for kernel in lowered.kernels for value in expressions(kernel.body))


@settings(max_examples=draws(25), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    target=st.sampled_from([NEON, AVX2, AVX512]),
    batch=st.sampled_from([1, 2]),
    channels=st.sampled_from([1, 3, 8]),
    outputs=st.sampled_from([4, 5, 16, 24, 33, 64]),
    size=st.tuples(st.integers(3, 12), st.integers(3, 21)),
    filter_size=st.sampled_from([1, 3]),
    stride=st.sampled_from([1, 2]),
    epilogue=st.booleans(),
    tile=st.tuples(st.integers(1, 3), st.integers(1, 17), st.integers(1, 3)),
    order=st.sampled_from(["n", "m"]),
    seed=st.integers(0, 1000),
)
def test_random_convolutions_with_row_major_results(
    target: Any, batch: int, channels: int, outputs: int, size: Any, filter_size: int, stride: int, epilogue: Any, tile: Any, order: Any, seed: int
) -> None:
    case = convolution_case(
        batch=batch, channels=channels, outputs=outputs, size=size, filter_size=filter_size, padding=filter_size // 2, stride=stride,
        epilogue=epilogue, seed=seed,
    )  # fmt: skip
    case = replace(case, layouts=dict(case.layouts) | {"out": row_major(case.values["out"].shape)})
    rows, columns, vectors = tile
    width = case.values["out"].shape[3]
    columns = min(columns, width)
    rows = rows if columns == width else 1
    schedule = CpuContractionSchedule(rows, columns, vectors, target.vector_lanes(), order)
    check(case, lower(case.problem, schedule, target))


@pytest.mark.parametrize("columns, straight", [(8, True), (7, False), (9, False)])
def test_whole_vectors_of_pixels_leave_straight(columns: int, straight: bool) -> None:
    case = convolution_case(channels=3, outputs=16, size=(6, 24))
    case = replace(case, layouts=dict(case.layouts) | {"out": row_major(case.values["out"].shape)})
    schedule = CpuContractionSchedule(1, columns, 2, 8, "n")
    lowered = lower(case.problem, schedule, AVX2)
    check(case, lowered)
    stored = [s for kernel in lowered.kernels for s in statements(kernel.body) if isinstance(s, Store) and s.buffer == "spill"]
    assert interleavings(lowered) and bool(stored) != straight


def test_channels_that_lie_side_by_side_are_not_transposed() -> None:
    case = convolution_case(channels=3, outputs=16, size=(6, 24))
    schedule = CpuContractionSchedule(1, 8, 2, 8, "n")
    assert not interleavings(lower(case.problem, schedule, AVX2))


@pytest.mark.parametrize("lanes", [2, 4, 8, 16])
def test_rounds_of_interleaving_transpose(lanes: int) -> None:
    """Evaluates the statements on NumPy rows."""
    turns, result = transposed("tile", "turned", lanes, "f32")
    matrix = np.arange(lanes * lanes).reshape(lanes, lanes)
    buffers = {"tile": matrix.copy(), "turned": np.zeros_like(matrix)}
    for loop in turns:
        source = loop.body.statements[0].value.args[0].buffer  # type: ignore[union-attr]
        target: Any = loop.body.statements[0].buffer  # type: ignore[union-attr]
        for i in range(lanes // 2):
            pair = np.stack((buffers[source][i], buffers[source][i + lanes // 2]), axis=-1).reshape(-1)
            buffers[target][2 * i], buffers[target][2 * i + 1] = pair[:lanes], pair[lanes:]
    np.testing.assert_array_equal(buffers[result], matrix.T)


@pytest.mark.parametrize("count, widths", [(14, [8, 4, 2]), (16, [16]), (33, [16, 16, 1]), (1, [1])])
def test_few_vectors_copy_a_row(count: int, widths: list[int]) -> None:
    copies = copied("y", index_const(5), "x", index_const(7), count, 16, "f32")
    assert [copy.value.lanes for copy in copies] == widths  # type: ignore[union-attr]
    reached: list[Any] = []
    for copy in copies:
        assert isinstance(copy, Store) and isinstance(copy.value, Load)
        start = int(copy.offset.value)  # type: ignore[union-attr]
        assert start - 5 == int(copy.value.index[0].value) - 7  # type: ignore[union-attr]
        reached += range(start, start + copy.value.lanes)
    assert reached == list(range(5, 5 + count))


def copy_case(shape: tuple[int, int, int, int], to_channels_last: bool, halo: tuple[int, int], scaled: bool, seed: int = 0) -> Case:
    """relu(x) (times a factor per channel) from row-major to channels-last storage, or back."""
    builder = StepBuilder("out")
    arrays = {"x": random(seed, *shape), "scale": random(seed + 1, shape[1])}
    x, scale = (tensor(name, array) for name, array in arrays.items())
    result = builder.map(shape, lambda n, c, y, z: relu(x(n, c, y, z)) * scale(c) if scaled else relu(x(n, c, y, z)))
    expected = double(arrays["x"]).clamp(min=0) * (double(arrays["scale"])[:, None, None] if scaled else 1)
    last = channels_last(shape).with_halo(((0, 0), (0, 0), halo, halo))
    inputs = arrays if scaled else {"x": arrays["x"]}
    return make_case("map", builder, result, inputs, expected.numpy(), {"out" if to_channels_last else "x": last})


@settings(max_examples=draws(40), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    target=st.sampled_from([NEON, AVX2, AVX512]),
    shape=st.tuples(st.integers(1, 2), st.sampled_from([1, 3, 4, 5, 8, 16, 19, 24, 32, 50]), st.integers(1, 9), st.integers(1, 37)),
    to_channels_last=st.booleans(),
    halo=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    scaled=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_random_copies(target: Any, shape: Any, to_channels_last: bool, halo: tuple[int, int], scaled: Any, seed: int) -> None:
    case = copy_case(shape, to_channels_last, halo, scaled, seed)
    check(case, lower(case.problem, LoopSchedule(target.vector_lanes()), target))


@pytest.mark.parametrize("to_channels_last", [True, False])
@pytest.mark.parametrize("target", [NEON, AVX2, AVX512], ids=["neon", "avx2", "avx512"])
def test_copies_are_transposed_in_whole_vectors(target: Any, to_channels_last: bool) -> None:
    """Also if neither axis is a whole number of vectors, and if threads divide the rows."""
    case = copy_case((1, 22, 24, 37), to_channels_last, (1, 1), True)
    lanes = target.vector_lanes()
    lowered = lower(case.problem, LoopSchedule(lanes), target)
    assert interleavings(lowered)
    stores = [s for kernel in lowered.kernels for s in statements(kernel.body) if isinstance(s, Store)]
    assert {store.value.lanes for store in stores} == {lanes}
    check(case, lowered)


@pytest.mark.parametrize("shape", [(1, 3, 24, 40), (1, 64, 3, 3)])
def test_short_axes_are_not_transposed(shape: tuple[int, int, int, int]) -> None:
    case = copy_case(shape, True, (1, 1), False)
    lowered = lower(case.problem, LoopSchedule(16), AVX512)
    assert not interleavings(lowered)
    check(case, lowered)
