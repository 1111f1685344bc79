"""Reductions and scans over rows on CPUs, rows along or across the lanes of vectors: against PyTorch in float64, and what their estimates count."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.draws import draws
from tests.gpu_cases import Case, check, double, exp, make_case, random, tensor
from tilewright.codegen.assemble import assemble
from tilewright.hardware import machine
from tilewright.ir.computation import StepBuilder, Tensor
from tilewright.ir.expr import INDEX, ZERO, Load, cast, unary
from tilewright.ir.kernel import Allocate, Block, Buffer, Store, statements
from tilewright.ir.layout import channels_last, row_major
from tilewright.ir.region import Unsuitable
from tilewright.kernels.cpu.loops.lines import distinct_lines, lines_loaded
from tilewright.kernels.cpu.loops.space import ACROSS, RowSchedule
from tilewright.kernels.registry import lower
from tilewright.selection.choice import choose

NEON, AVX2, AVX512 = machine("neoverse-n1"), machine("x86-avx2"), machine("x86-avx512")


def at(index: tuple[Any, ...], dim: int, position: Any) -> tuple[Any, ...]:
    return (*index[:dim], position, *index[dim + 1 :])


def without(index: tuple[Any, ...], dim: int) -> tuple[Any, ...]:
    return (*index[:dim], *index[dim + 1 :])


def softmax(builder: StepBuilder, x: Tensor, dim: int) -> Tensor:
    rows, extent = without(x.shape, dim), x.shape[dim]

    def along(row: tuple[Any, ...], position: Any) -> tuple[Any, ...]:
        return (*row[:dim], position, *row[dim:])

    (most,) = builder.reduce("max", rows, (extent,), lambda *i: x(*along(i[:-1], i[-1])))
    (total,) = builder.reduce("sum", rows, (extent,), lambda *i: exp(x(*along(i[:-1], i[-1])) - most(*i[:-1])))
    return builder.map(x.shape, lambda *i: exp(x(*i) - most(*without(i, dim))) / total(*without(i, dim)))


def reduced(combiner: str) -> Callable[[StepBuilder, Tensor, int], Tensor]:
    def build(builder: StepBuilder, x: Tensor, dim: int) -> Tensor:
        (result,) = builder.reduce(combiner, without(x.shape, dim), (x.shape[dim],), lambda *i: x(*i[:dim], i[-1], *i[dim:-1]))
        return result

    return build


def norm(builder: StepBuilder, x: Tensor, dim: int) -> Tensor:
    (result,) = builder.reduce(
        "sum", without(x.shape, dim), (x.shape[dim],), lambda *i: x(*i[:dim], i[-1], *i[dim:-1]) * x(*i[:dim], i[-1], *i[dim:-1])
    )
    return builder.map(result.shape, lambda *i: unary("sqrt", result(*i)))


def argmax(builder: StepBuilder, x: Tensor, dim: int) -> Tensor:
    rows = without(x.shape, dim)
    _, where = builder.reduce("argmax", rows, (x.shape[dim],), lambda *i: (x(*i[:dim], i[-1], *i[dim:-1]), cast(i[-1], INDEX)))
    return builder.map(rows, lambda *i: where(*i))


def scanned(combiner: str) -> Callable[[StepBuilder, Tensor, int], Tensor]:
    return lambda builder, x, dim: builder.scan(combiner, x.shape, dim, lambda *i: x(*i))[0]


def doubled(builder: StepBuilder, x: Tensor) -> Tensor:
    return builder.map(x.shape, lambda *i: x(*i) * 2.0)


OPERATORS: Mapping[str, tuple[Callable[[StepBuilder, Tensor, int], Tensor], Callable[[torch.Tensor, int], torch.Tensor]]] = MappingProxyType({
    "softmax": (softmax, torch.softmax),
    "sum": (reduced("sum"), torch.sum),
    "max": (reduced("max"), torch.amax),
    "norm": (norm, lambda x, dim: torch.linalg.vector_norm(x, dim=dim)),
    "argmax": (argmax, torch.argmax),
    "cumsum": (scanned("sum"), torch.cumsum),
    "scaled cummax": (lambda builder, x, dim: doubled(builder, scanned("max")(builder, x, dim)), lambda x, dim: 2 * torch.cummax(x, dim).values),
})  # fmt: skip


def case_of(name: str, shape: tuple[int, ...], dim: int, last: bool = False, seed: int = 0) -> Case:
    """An operator over one dimension of an input that is stored row-major or with channels last, as is the result if it has the shape."""
    build, wanted = OPERATORS[name]
    builder, x = StepBuilder("out"), random(seed, *shape)
    result = build(builder, tensor("x", x), dim)
    expected = wanted(double(x), dim).numpy()
    stored = channels_last if last else row_major
    kind = "scan" if "cum" in name else "row reduction"
    return make_case(kind, builder, result, {"x": x}, expected, {"x": stored(shape)} | ({"out": stored(shape)} if result.shape == shape else {}))


@settings(max_examples=draws(60), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    target=st.sampled_from([NEON, AVX2, AVX512]),
    name=st.sampled_from(list(OPERATORS)),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 21), st.integers(1, 9), st.integers(1, 37)),
    dim=st.integers(0, 3),
    last=st.booleans(),
    across=st.sampled_from(ACROSS),
    seed=st.integers(0, 1000),
)
def test_random_rows(target: Any, name: str, shape: Any, dim: int, last: bool, across: int, seed: int) -> None:
    case = case_of(name, shape, dim, last, seed)
    schedule = RowSchedule(target.vector_lanes(), across)
    try:
        lowered = lower(case.problem, schedule, target)
    except Unsuitable:
        assert across, "rows one after the other are always possible"
        lowered = lower(case.problem, RowSchedule(target.vector_lanes()), target)
    check(case, lowered)


@pytest.mark.parametrize(("dim", "across"), [*product((0, 1, 2), ACROSS[1:]), (3, 0)])
@pytest.mark.parametrize("target", [AVX2, AVX512], ids=["avx2", "avx512"])
def test_rows_are_reduced_in_whole_vectors(target: Any, dim: int, across: int) -> None:
    """Also if neither rows nor their elements are a whole number of vectors."""
    case = case_of("softmax", (3, 5, 7, 37), dim)
    lowered = lower(case.problem, RowSchedule(target.vector_lanes(), across), target)
    kernel = lowered.kernels[0]
    (out,) = (buffer.name for buffer in kernel.parameters if buffer.writable)
    assert {s.value.lanes for s in statements(kernel.body) if isinstance(s, Store) and s.buffer == out} == {target.vector_lanes()}
    check(case, lowered)


def test_nothing_is_across_without_adjacent_rows() -> None:
    with pytest.raises(Unsuitable, match="not adjacent"):
        lower(case_of("sum", (4, 6, 8, 10), 3).problem, RowSchedule(8, 2), AVX2)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_adjacent_rows_are_chosen_across(dim: int) -> None:
    assert choose(case_of("softmax", (6, 24, 20, 64), dim).problem, AVX512, 1).schedule.across


def test_elements_of_rows_are_chosen_along() -> None:
    assert not choose(case_of("softmax", (6, 24, 20, 64), 3).problem, AVX512, 1).schedule.across


def test_lines_of_a_plane_after_another() -> None:
    """64 planes of 28 x 28, pixel by pixel: 16 pixels share the lines of all planes, where these are held."""
    nest = [(784, 64), (1, 784)]
    assert distinct_lines(nest[:1], 16) == 64
    assert distinct_lines(nest, 16) == 64 * 49
    assert lines_loaded(nest, 16, 10_000) == 64 * 49
    assert lines_loaded(nest, 16, 200) == 64 * 49
    assert lines_loaded(nest, 16, 100) == 64 * 784


@settings(max_examples=draws(100), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(nest=st.lists(st.tuples(st.sampled_from([0, 1, 3, 16, 40, 100]), st.integers(1, 12)), min_size=1, max_size=3), held=st.integers(1, 400))
def test_a_level_loads_between_all_lines_and_all_accesses(nest: list[tuple[int, int]], held: int) -> None:
    """Never fewer lines than there are, and never more than accesses, besides the lines that a run of unknown alignment may begin in; and no more with
    a larger cache."""
    positions = {sum(stride * i for (stride, _), i in zip(nest, index, strict=True)) for index in np.ndindex(*(extent for _, extent in nest))}
    accesses = int(np.prod([extent for _, extent in nest]))
    assert len({position // 16 for position in positions}) <= accesses
    loaded = lines_loaded(nest, 16, held)
    assert loaded >= distinct_lines(nest, 16) * 0.999 or loaded >= len({position // 16 for position in positions})
    assert loaded <= 2 * accesses + 1
    assert lines_loaded(nest, 16, 4 * held) <= loaded * 1.001


def test_a_buffer_with_the_name_of_a_value_is_a_fault() -> None:
    body = Block((Allocate(Buffer("x", "f32", 1, "register")), Store("out", ZERO, Load("x", (ZERO,), "f32"))))
    with pytest.raises(AssertionError, match="one name: x"):
        assemble("row reduction", body, case_of("sum", (3, 40), 1).problem, ("out",))
