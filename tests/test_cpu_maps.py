"""What the estimates of maps on CPUs count."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest

from tests.gpu_cases import Case, check, make_case, random, relu, tensor
from tilewright.hardware import machine
from tilewright.ir.computation import StepBuilder, Tensor
from tilewright.ir.expr import INDEX, Expr, Load, Var, binary, floordiv, index_const, mod
from tilewright.ir.layout import channels_last
from tilewright.kernels.cpu.loops.lines import mean_stride
from tilewright.kernels.registry import lower
from tilewright.selection.choice import choose

AVX2, AVX512 = machine("x86-avx2"), machine("x86-avx512")
SHAPE = (2, 6, 24, 52)


def mapped(shape: tuple[int, ...], body: Callable[..., Expr], expected: np.ndarray, x: np.ndarray, /, **layouts: Any) -> Case:
    builder, read = StepBuilder("out"), tensor("x", x)
    return make_case("map", builder, builder.map(shape, lambda *i: body(read, *i)), {"x": x}, expected, layouts)


def rotated(x: Tensor, n: Expr, c: Expr, y: Expr, z: Expr) -> Expr:
    return x(n, c, y, mod(z + 47, 52))


def copied(x: Tensor, *index: Expr) -> Expr:
    return relu(x(*index))


def enlarged(x: Tensor, n: Expr, c: Expr, y: Expr, z: Expr) -> Expr:
    return x(n, c, floordiv(y, 2), floordiv(z, 2))


@pytest.mark.parametrize("target", [AVX2, AVX512], ids=["avx2", "avx512"])
def test_remainders_along_vectors_cost_more_than_a_copy(target: Any) -> None:
    """The counts of 52 remainders a row, with five instructions each on the target's arithmetic ports."""
    x = random(0, *SHAPE)
    plain = mapped(SHAPE, copied, np.maximum(x, 0), x)
    turned = mapped(SHAPE, rotated, np.roll(x, 5, 3), x)
    ways = [choose(case.problem, target) for case in (plain, turned)]
    check(turned, lower(turned.problem, ways[1].schedule, target))
    cycles = ways[1].terms["arithmetic"] * target.clock_hz / prod(SHAPE)
    assert 5 / target.fma_ports <= cycles < 10
    assert ways[1].terms["arithmetic"] > 5 * ways[0].terms["arithmetic"]
    assert ways[1].seconds > ways[0].seconds


@pytest.mark.parametrize("target", [AVX2, AVX512], ids=["avx2", "avx512"])
def test_a_strided_copy_costs_more_than_one_in_the_order_of_memory(target: Any) -> None:
    """Channels are few, so that no squares are transposed: each element is loaded from another line than its neighbour."""
    shape = (1, 3, 64, 48)
    x = random(1, *shape)
    same = mapped(shape, copied, np.maximum(x, 0), x, x=channels_last(shape), out=channels_last(shape))
    other = mapped(shape, copied, np.maximum(x, 0), x, x=channels_last(shape))
    ways = [choose(case.problem, target) for case in (same, other)]
    check(other, lower(other.problem, ways[1].schedule, target))
    assert ways[1].terms["arithmetic"] > 1.5 * ways[0].terms["arithmetic"]


def test_an_enlarged_image_is_loaded_once() -> None:
    """Rows that are read twice count their lines once: an image of an eighth of the elements of level 1."""
    x = random(2, *SHAPE)
    shape = (*SHAPE[:2], 2 * SHAPE[2], 2 * SHAPE[3])
    case = mapped(shape, enlarged, x.repeat(2, axis=2).repeat(2, axis=3), x)
    choice = choose(case.problem, AVX512)
    check(case, lower(case.problem, choice.schedule, AVX512))
    lines = choice.terms["level 2"] * AVX512.clock_hz * AVX512.caches[1].bandwidth / 64
    # at least every line of both, and at most two whole lines more for each row of either
    rows = prod(SHAPE[:3])
    assert (x.size + 4 * x.size) / 16 * 0.99 <= lines <= 5 * x.size / 16 + 2 * 3 * rows


def test_mean_strides() -> None:
    row, column = Var("row", 96), Var("column", 52)
    assert mean_stride(row * 52 - column, column) == 1
    assert mean_stride(mod(column + 47, 52), column) == 1
    assert mean_stride(floordiv(row, 2) * 62, row) == pytest.approx(31, rel=0.1)
    assert mean_stride(binary("min", row + 1, index_const(95)) * 62, row) == 62
    assert mean_stride(Load("positions", (row,), INDEX) * 64 + column, row) == 64
    assert mean_stride(row * 52, column) == 0
