"""Convolutions of every kind for the tests of the direct schema: hand-written regions and PyTorch's results in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tests.gpu_cases import Case, double, make_case, random, relu, tensor
from tilewright.ir.computation import Step, StepBuilder
from tilewright.ir.expr import Expr, Load, logical_and, select
from tilewright.ir.graph import Value
from tilewright.ir.layout import Layout, channels_last, row_major
from tilewright.ir.region import Region

Pair = tuple[int, int]


@dataclass(frozen=True)
class Convolution:
    """Sizes of a convolution in two dimensions; `last`: channels last; `epilogue`: bias, residual and ReLU after it."""

    channels: int
    outputs: int
    size: Pair
    filters: Pair = (3, 3)
    stride: Pair = (1, 1)
    dilation: Pair = (1, 1)
    padding: Pair = (1, 1)
    groups: int = 1
    batch: int = 1
    last: bool = True
    epilogue: bool = True
    seed: int = 0


def convolution(given: Convolution) -> Case:
    """The region with its input stored with a halo, and its expected result."""
    c, k, groups = given.channels // given.groups, given.outputs // given.groups, given.groups
    x = random(given.seed, given.batch, given.channels, *given.size)
    w = random(given.seed + 1, given.outputs, c, *given.filters)
    expected = F.conv2d(double(x), double(w), None, given.stride, given.padding, given.dilation, groups)
    shape = tuple(expected.shape)
    builder = StepBuilder("conv")
    tx, tw = tensor("x", x), tensor("w", w)
    (sy, sx), (dy, dx), (py, px) = given.stride, given.dilation, given.padding

    def body(n: Expr, g: Expr, o: Expr, oy: Expr, ox: Expr, fy: Expr, fx: Expr, i: Expr) -> Expr:
        at = oy * sy + fy * dy - py, ox * sx + fx * dx - px
        inside = logical_and(at[0] >= 0, at[0] < given.size[0], at[1] >= 0, at[1] < given.size[1])
        return select(inside, tx(n, g * c + i, *at), 0.0) * tw(g * k + o, i, fy, fx)

    (total,) = builder.reduce(
        "sum",
        shape,
        (*given.filters, c),
        body,
        axes=(given.batch, groups, k, *shape[2:]),
        index=lambda n, g, o, oy, ox: (n, g * k + o, oy, ox),
    )
    place = channels_last if given.last else row_major
    layouts: dict[str, Layout] = {"x": place(x.shape), "out": place(shape)}
    if py or px:
        # strided filters may not reach the last padding: the compiler stores a halo that covers everything that is read
        layouts["x"] = layouts["x"].with_halo(((0, 0), (0, 0), (py, py), (px, px)))
    case = make_case("contraction", builder, total, {"x": x, "w": w}, expected.numpy(), layouts, frozenset({"w", "bias"}))
    if not given.epilogue:
        return case
    bias, residual = random(given.seed + 2, given.outputs), random(given.seed + 3, *shape)
    step = case.region.steps[0]
    axes = step.axes
    final = relu(Load("sum", axes, "f32") + tensor("bias", bias)(axes[1] * k + axes[2]) + tensor("residual", residual)(*step.index))
    steps = (
        Step("sum", step.shape, axes, step.bodies, step.reduction, "sum", None, step.index),
        Step("out", step.shape, axes, (final,), index=step.index),
    )
    result = torch.relu(expected + double(bias)[None, :, None, None] + double(residual))
    values = dict(case.values) | {"bias": Value("bias", bias.shape, "f32"), "residual": Value("residual", shape, "f32")}
    placed = dict(case.layouts) | {"bias": row_major(bias.shape), "residual": place(shape)}
    region = Region("out", "contraction", (), steps, ("x", "w", "bias", "residual"), ("out",))
    return Case(region, placed, values, {"x": x, "w": w, "bias": bias, "residual": residual}, result.numpy(), case.constants)
