"""Global average pooling in the kernel of the contraction whose pixels it sums: what joins, what does not and why, and results of compiled
programs."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiled import Case, check_native
from tests.draws import IN_THIRDS
from tests.gpu_cases import make_case, random, tensor
from tests.interpreted import check_interpreted
from tests.operator_cases import Applied, after, randomised
from tests.stand_ins import merges_of
from tilewright.compile import read
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.ir.computation import StepBuilder
from tilewright.ir.region import Program, Region
from tilewright.kernels.cpu.loops.space import LoopSchedule
from tilewright.kernels.registry import lower
from tilewright.partition.plan import plan_program


class Tail(nn.Module):
    """The end of a residual network."""

    def __init__(self, channels: int, inner: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, inner, kernel, stride, kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(inner)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.last = nn.Linear(inner, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last(torch.flatten(self.pool(torch.relu(self.norm(self.convolution(x)) + y)), 1))


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape)


def tail(name: str, channels: int, inner: int, images: int, height: int, width: int, kernel: int = 3) -> Case:
    return Case(name, randomised(Tail(channels, inner, kernel)), (normal(images, channels, height, width), normal(images, inner, height, width)))


def mean(y: Tensor) -> Tensor:
    return y.mean((2, 3))


def cases() -> list[Case]:
    return [
        tail("tail", 16, 48, 2, 7, 7),
        tail("odd", 5, 37, 2, 9, 13),
        tail("one image", 8, 64, 1, 7, 7),
        tail("many panels", 4, 200, 3, 5, 3),
        tail("1x1", 24, 50, 2, 7, 7, 1),
        tail("long columns", 3, 19, 2, 3, 61, 1),
        Case("few channels", Applied(after(mean), nn.Conv2d(4, 6, 3)), (normal(1, 4, 9, 9),)),
        Case("sum", Applied(after(lambda y: y.sum((2, 3), keepdim=True)), nn.Conv2d(4, 33, 3, stride=2)), (normal(2, 4, 11, 9),)),
        Case("map behind", Applied(after(lambda y: torch.sigmoid(y.mean((2, 3)) * 2)), nn.Conv2d(4, 20, 3)), (normal(2, 4, 8, 9),)),
        Case("squares", Applied(after(lambda y: (y * y).mean((2, 3))), nn.Conv2d(4, 20, 3)), (normal(2, 4, 8, 9),)),
        Case("rows of an image", Applied(after(lambda y: y.mean(2)), nn.Conv2d(4, 20, 3)), (normal(2, 4, 8, 9),)),
        Case("tokens", Applied(after(lambda y: F.gelu(y).mean(1)), nn.Linear(12, 40)), (normal(3, 21, 12),)),
        Case("one axis", Applied(after(lambda y: y.mean(0)), nn.Linear(12, 40)), (normal(50, 12),)),
        Case("volume", Applied(after(lambda y: y.mean((2, 3, 4))), nn.Conv3d(3, 18, 3, padding=1)), (normal(2, 3, 5, 6, 7),)),
        Case("product", Applied(lambda q, k: (q @ k.transpose(-1, -2)).mean(-2)), (normal(2, 3, 13, 8), normal(2, 3, 21, 8))),
    ]  # fmt: skip


JOINING = {case.name: case for case in cases()}
APART = {
    "greatest": Case("greatest", Applied(after(lambda y: y.amax((2, 3))), nn.Conv2d(4, 6, 3)), (normal(1, 4, 9, 9),)),
    "read again": Case("read again", Applied(after(lambda y: F.softmax(y, 0)), nn.Linear(8, 20)), (normal(64, 8),)),
    "two readers": Case("two readers", Applied(after(lambda y: (y, mean(y))), nn.Conv2d(4, 6, 3)), (normal(1, 4, 9, 9),)),
    "channels too": Case("channels too", Applied(after(lambda y: y.mean((1, 2, 3))), nn.Conv2d(4, 6, 3)), (normal(2, 4, 9, 9),)),
    "windows": Case("windows", Applied(after(lambda y: F.avg_pool2d(y, 2)), nn.Conv2d(4, 6, 3)), (normal(1, 4, 9, 9),)),
    "groups": Case("groups", Applied(after(mean), nn.Conv2d(4, 12, 3, groups=2)), (normal(1, 4, 9, 9),)),
}
WHY = {
    "greatest": "with max over f32",
    "read again": "reads them again",
    "two readers": "is also a result",
    "channels too": "not whole images",
    "windows": "does not read",
    "groups": "stored in another order",
}


def planned(case: Case, target: str = "xeon-8124m", threads: int = 1) -> Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph, _ = simplify(read(case.module.eval(), case.inputs).graph)
    return plan_program(graph, machine(target), threads, chains=False)


def joined(program: Program) -> list[Region]:
    regions = [lowered.region for lowered in program.regions]
    return [region for region in regions if region.kind == "contraction" and any(step.kind == "reduce" for step in region.steps[1:])]


def reasons(program: Program) -> list[str]:
    return [text for lowered in program.regions for text in lowered.region.reasons]


@pytest.mark.parametrize("name", JOINING)
def test_one_kernel_computes_product_and_pixel_sums(name: str) -> None:
    program = planned(JOINING[name])
    (region,) = joined(program)
    assert not any(lowered.region.kind in ("row reduction", "window") for lowered in program.regions)
    assert any("one thread owns the" in text for text in region.reasons)
    (lowered,) = [lowered for lowered in program.regions if lowered.region is region]
    assert "pixel sums" in lowered.terms and "n outermost" in lowered.schedule
    (decision,) = merges_of(program)
    assert decision.taken and "us predicted in one kernel" in decision.text and "us with a stored result" in decision.text


@pytest.mark.parametrize("name", APART)
def test_what_does_not_join_says_why(name: str) -> None:
    program = planned(APART[name])
    assert not joined(program)
    assert any("not joined" in text and WHY[name] in text for text in reasons(program)), reasons(program)


def test_a_thread_without_a_panel_is_a_reason() -> None:
    assert joined(planned(JOINING["few channels"]))
    program = planned(JOINING["few channels"], threads=4)
    assert not joined(program)
    assert any("1 panels for 4 threads" in text for text in reasons(program))
    (decision,) = merges_of(program)
    assert not decision.taken and "1 panels for 4 threads" in decision.text
    assert joined(planned(tail("wide", 8, 512, 1, 7, 7), threads=4))


def test_a_block_owns_a_tile() -> None:
    program = planned(JOINING["tail"], "h200")
    assert not joined(program)
    assert any("a block owns one tile of pixels by channels" in text for text in reasons(program))


@pytest.mark.parametrize("target", ["xeon-8124m", pytest.param("x86-avx2", marks=pytest.mark.slow)])
@IN_THIRDS
def test_interpreted(target: str, third: int) -> None:
    check_interpreted([*JOINING.values()][third::3], machine(target))


@IN_THIRDS
def test_compiled(third: int) -> None:
    check_native([*JOINING.values(), *APART.values(), tail("wide", 8, 256, 2, 7, 7)][third::3], calls=2)


def test_long_chains_of_scalar_maxima_stay_loops() -> None:
    """A compiler takes many seconds for the 49 maxima here if they are unrolled."""
    (kernel,) = [kernel for name, kernel in planned(APART["greatest"]).kernels().items() if name.startswith("window")]
    assert "simd" in repr(kernel) and "unroll" not in repr(kernel)
    x = random(0, 16, 16)
    builder, image = StepBuilder("out"), tensor("x", x)
    (result,) = builder.reduce("sum", (8, 8), (2, 2), lambda y, z, a, b: image(y * 2 + a, z * 2 + b))
    windows = make_case("window", builder, result, {"x": x}, x.reshape(8, 2, 8, 2).sum((1, 3)))
    (kernel,) = lower(windows.problem, LoopSchedule(16), machine("x86-avx512")).kernels
    assert "unroll" in repr(kernel)
