"""Faults found by random graphs, each with the smallest model that shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewright
from tests.compiled import Bundle, Case, check_native
from tests.interpreted import check_interpreted, run_program
from tests.operator_cases import randomised
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.ir.expr import binary, loads
from tilewright.ir.region import Program, Unsuitable
from tilewright.partition.plan import plan_program
from tilewright.partition.strips import cut
from tilewright.tuning.tuning import distinct_problems


class Before(nn.Module):
    """A part after an interpolation."""

    def __init__(self, factor: int, *parts: nn.Module) -> None:
        super().__init__()
        self.factor, self.parts = factor, nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(F.interpolate(x, scale_factor=self.factor))


def program_of(module: nn.Module, inputs: tuple[Tensor, ...], target: str) -> Program:
    graph, _ = simplify(import_module(module.eval(), inputs).graph)
    return plan_program(graph, machine(target), 1)


def upsampled() -> list[Case]:
    """A factor of a product whose adjacent elements along the sum are the same element in memory: they cannot be copied to shared memory as
    vectors."""
    return [
        Case("width", Before(2, nn.Linear(56, 17)), (torch.randn(3, 32, 1, 28),)),
        Case("by three", Before(3, nn.Linear(12, 17)), (torch.randn(3, 32, 1, 4),)),
        Case("by four", Before(4, nn.Linear(16, 20)), (torch.randn(2, 32, 1, 4),)),
        Case("expanded", Expanded(), (torch.randn(64, 8, 1), torch.randn(32, 20))),
    ]


class Expanded(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.expand(64, 8, 4).reshape(64, 32) @ y


def divided_rows() -> list[Case]:
    """Sums over 75 pixels of an interpolated image, whose pixels are divided by the factor, with a map after each sum that reads it."""
    convolutions = (nn.Conv2d(3, 1, 5, padding=2), nn.Conv2d(1, 1, 5, 2, 2))
    return [
        Case("convolutions to one channel", Before(3, *convolutions), (torch.randn(2, 3, 5, 5),)),
        Case("softmax", Softmaxed(), (torch.randn(2, 3, 4, 30),)),
    ]


class Softmaxed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(F.interpolate(x, scale_factor=(3, 1)), -1) * 2


def windows_of_one() -> list[Case]:
    """Sums over one element after a product: neither reductions of its rows nor their first elements."""
    return [
        Case("pool", nn.Sequential(nn.Linear(16, 5), nn.AvgPool1d(1)), (torch.randn(2, 3, 16),)),
        Case("mean", Function(lambda x: F.linear(x, x[0, :, :9]).reshape(4, 6, 1, 6).mean(2)), (torch.randn(4, 6, 9),)),
        Case("channels", Function(lambda x: F.conv2d(x, x[:, :, :1, :1]).mean(3)), (torch.randn(2, 3, 7, 1),)),
    ]


def integers_and_truth_values() -> list[Case]:
    """Non-float results of sums: vectors of sums are not vectors of the results' type."""
    return [
        Case("rounded product", Function(lambda x: torch.round(F.linear(x, x[:17]) * 2).long()), (torch.randn(33, 19),)),
        Case("truncated convolution", Function(lambda x: torch.trunc(F.conv2d(x, x[:, :, :2, :2])).int()), (torch.randn(2, 5, 9, 9),)),
        Case("truncated window", Function(lambda x: torch.trunc(torch.log(x.exp().sum(1)) * 3).long()), (torch.randn(2, 3, 20),)),
        Case("rounded pool", Function(lambda x: torch.floor(F.avg_pool2d(x, 2) * 5).long()), (torch.randn(2, 16, 8, 34),)),
        Case(
            "compared convolution",
            Function(lambda x: F.conv2d(x, x[:, :, :2, :5].repeat(8, 1, 1, 1), padding=(0, 2)) > 0.6),
            (torch.randn(2, 17, 17, 9),),
        ),
        Case("positions", Function(lambda x: F.conv1d(x, x[:, :, :2]).argmax(1) * 3 + torch.arange(18)), (torch.randn(3, 4, 19),)),
    ]


def results_without_dimensions() -> list[Case]:
    return [
        Case("mean of a vector", nn.Sequential(nn.Linear(9, 2), Function(lambda x: x.mean(0))), (torch.randn(9),)),
        Case("mean of two rows", nn.Sequential(nn.Linear(28, 1), Function(lambda x: F.mish(x.mean()))), (torch.randn(2, 28),)),
        Case("times a number", Function(lambda x: (x.sum() * x[0, :1, :1]) @ x[1]), (torch.randn(2, 1, 8),)),
        Case("a row by its number", Function(lambda x: x.index_select(1, x.argmax().reshape(-1) % 4) @ x.mT), (torch.randn(2, 4, 8),)),
    ]


class Padded(nn.Module):
    """Sums over windows of values computed with constants, beyond whose ends the padding reads."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.one = nn.Parameter(torch.randn(1, 5, 18, 2)), nn.Parameter(torch.randn(2, 5, 18, 2))
        self.depthwise = nn.Conv2d(5, 5, 3, (1, 3), 2, (1, 2), groups=5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.depthwise(x + self.wide), F.max_pool2d(x + self.one, 2, 2, 1), F.avg_pool2d(x * self.wide, 3, 1, 1)


def padding_of_constants() -> list[Case]:
    return [Case("padded", Padded(), (torch.randn(2, 5, 18, 2),))]


def cancelled_epilogues() -> list[Case]:
    """Integer maps after a reduction that simplify to a constant when fused with it, the first map or only the second."""
    wide = torch.randn(2, 5, 3, 8, 4)
    return [
        Case("position modulo one", Function(lambda x: x.argmax() % 1), (wide,)),
        Case("a table of one row", Function(lambda x: F.embedding(x.argmax() % 1, x[:1, 0, 0, 0])), (wide,)),
        Case("positions", Function(lambda x: x.argmax(-1) % 6 // 6 + 3), (torch.randn(4, 100),)),
        Case("product", Function(lambda x: (x @ x.mT).long() % 1), (torch.randn(24, 40),)),
        Case("positions in a product", Function(lambda x: (x @ x.mT).argmax(-1) % 1), (torch.randn(24, 40),)),
        Case("window", Function(lambda x: x.long().sum(-1) % 1), (torch.randn(9, 20) * 4,)),
    ]


class Placed(nn.Module):
    """Where the maxima are, in the order of columns."""

    def forward(self, x: Tensor) -> Tensor:
        _, places = F.max_pool2d(x, 2, return_indices=True)
        return places % x.shape[-1] * x.shape[-2] + places // x.shape[-1]


def places_in_tiles() -> list[Case]:
    """Integers that depend on the place of a row: a strip has another one."""
    return [Case("places of maxima", Placed(), (torch.randn(1, 1, 5, 5),))]


def triangles_of_tiles() -> list[Case]:
    """Epilogues whose condition is constant for some pixels of a register tile, which leaves a constant instead of a vector: stored by pixels, by
    channels, in a partial last panel, by Winograd's algorithm, in a depthwise convolution and after a product."""

    def triangle(name: str, *modules: nn.Module, shape: tuple[int, ...], diagonal: int = -2) -> Case:
        return Case(name, nn.Sequential(*modules, Function(lambda x: x.tril(diagonal))), (torch.randn(shape),))

    return [
        triangle("pixels", nn.Conv2d(3, 32, 7, padding=2), shape=(2, 3, 6, 51)),
        triangle("panels", nn.Conv2d(3, 37, 5, padding=2), shape=(1, 3, 9, 40)),
        triangle("channels", Function(lambda x: x.mT), nn.Linear(48, 64), Function(lambda x: x.mT), shape=(3, 48, 33), diagonal=1),
        triangle("winograd", nn.Conv2d(32, 64, 3, padding=1), shape=(1, 32, 28, 28)),
        triangle("depthwise", nn.Conv2d(32, 32, 3, padding=1, groups=32), shape=(1, 32, 20, 20)),
        triangle("product", nn.Linear(64, 96), shape=(2, 24, 64)),
        triangle("window", nn.MaxPool2d(3, 1, 1), shape=(1, 32, 16, 16)),
    ]


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


SMALL = (
    upsampled,
    divided_rows,
    windows_of_one,
    integers_and_truth_values,
    results_without_dimensions,
    padding_of_constants,
    places_in_tiles,
    cancelled_epilogues,
    triangles_of_tiles,
)


@pytest.mark.parametrize("cases", SMALL)
def test_small_models(cases: Callable[[], list[Case]]) -> None:
    torch.manual_seed(0)
    check_native(cases())
    check_interpreted(cases(), machine("h200"))


def test_an_upsampled_factor_is_a_tiled_product() -> None:
    """For the first of these the schema that copies to shared memory is chosen, without vector copies."""
    (case, *_) = upsampled()
    (lowered,) = program_of(case.module, case.inputs, "h200").regions
    assert lowered.region.kind == "contraction" and "stages=1" in lowered.schedule


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "layer norm of two": lambda x: F.layer_norm(x, x.shape[-2:]),
    "group norm": lambda x: F.group_norm(x, 2),
    "instance norm": lambda x: F.instance_norm(x),
    "variance": lambda x: x.var(-1),
    "deviation": lambda x: x.std((-2, -1), correction=0),
    "deviation of channels": lambda x: x.std(1),
    "norm of a sum": lambda x: F.layer_norm(x * 2 + x.flip(0), x.shape[-1:]),
    "norm across": lambda x: F.layer_norm(x.transpose(1, 2), x.shape[1:2]),
}


class Norms(nn.Module):
    """Normalisations of the input, and of a linear layer's constant rows."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(columns, 40)
        nn.init.zeros_(self.linear.weight)
        nn.init.constant_(self.linear.bias, 0.1)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [*(norm(x) for norm in NORMS.values()), F.layer_norm(self.linear(x), (40,))]


@pytest.mark.parametrize(("columns", "value"), [(3, 0.1), (130, 1000.1)])
def test_constant_rows_have_no_deviation(columns: int, value: float) -> None:
    """The deviation is exactly zero, although the sum is rounded: 3 * 0.1 and 130 * 1000.1 are not floats."""
    x = torch.full((4, 6, columns), value)
    module = Norms(columns).eval()
    with tilewright.compile(module, (x,), target="native", threads=1) as executable:
        for name, result in zip([*NORMS, "norm of a product"], executable(x), strict=True):
            assert torch.equal(result, torch.zeros_like(result)), name
    program = program_of(module, (x,), "h200")
    results, faults = run_program(program, {program.graph.inputs[0]: x.numpy()})
    assert not faults
    for name, found in zip([*NORMS, "norm of a product"], (results[output] for output in program.graph.outputs), strict=True):
        assert not found.any(), name


def test_the_norm_of_a_product_still_joins_it() -> None:
    """On both kinds of machine: the first element of a row is read from the tile."""
    part = nn.Sequential(nn.Linear(40, 32), nn.LayerNorm(32))
    for target in ("h200", "x86-avx2"):
        regions = program_of(part, (torch.randn(64, 40),), target).regions
        assert len(regions) == 1, target


def test_rows_far_from_zero_keep_their_digits() -> None:
    """Deviations are computed from a row's first element, not from its rounded mean: with 1000 added, only the input's own rounding error remains."""
    torch.manual_seed(0)
    x = torch.randn(5, 200) + 1000
    case = Case("far", nn.LayerNorm(200), (x,), tolerance=2e-6, fixed=True)
    check_native([case])
    check_interpreted([case], machine("h200"))


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)


def test_the_mean_is_a_quotient() -> None:
    """49 * (1 / 49) is not 1 in float32; 49 / 49 is."""
    for columns in (49, 103, 107):
        x = torch.ones(4, columns)
        with tilewright.compile(Bundle([Case("mean", Mean(), (x,))]).eval(), (x,), target="native", threads=1) as executable:
            assert not executable(x)[0].any()
        program = program_of(Mean(), (x,), "h200")
        results, _ = run_program(program, {program.graph.inputs[0]: x.numpy()})
        assert not results[program.graph.outputs[0]].any()


def test_functions_of_reals_take_no_integers() -> None:
    """An operator that PyTorch rejects when called runs through PyTorch, which raises, instead of failing in a printer."""
    x = torch.randint(5, (3, 4))
    with pytest.warns(UserWarning, match="exp of i64 values"):
        executable = tilewright.compile(Function(lambda x: torch.softmax(x, -1)), (x,), target="native", threads=1)
    with executable, pytest.raises(NotImplementedError, match="softmax"):
        executable(x)


def test_the_softmax_of_a_grouped_convolution_is_no_attention() -> None:
    """Its result has fewer dimensions than the axes by which the softmax reads it."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv1d(8, 2, 3, groups=2), nn.Softmax(1), nn.Conv1d(2, 14, 1))
    check_native([Case("groups", module, (torch.randn(1, 8, 12),))])
    program_of(module, (torch.randn(1, 8, 12),), "h200")


@pytest.mark.parametrize("operation", ("add", "mul"))
def test_integers_that_depend_on_the_place_of_a_row_are_not_cut(operation: str) -> None:
    graph, _ = simplify(import_module(Function(lambda x: x * 3), (torch.ones(4, 6, dtype=torch.int64),)).graph)
    (problem,) = distinct_problems(graph, machine("x86-avx2"), 1)
    (step,) = problem.region.steps
    cut(problem.region, [0], problem, frozenset())
    (load,) = loads(*step.bodies)
    placed = replace(step, bodies=(binary(operation, load, step.axes[0]),))
    with pytest.raises(Unsuitable, match="depends on the place of a row"):
        cut(replace(problem.region, steps=(placed,)), [0], problem, frozenset())


class ManyOperands(nn.Module):
    """Rows with so many operands that a value's canonical name, value10, is that of a reduction, value1, with a digit."""

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        result = F.layer_norm(x, x.shape[-1:])
        for other in others:
            result = result * other + 1
        return result


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("count", [6, 7, 8, 9, 10, 12])
def test_rows_of_many_operands(count: int) -> None:
    case = Case(f"{count} operands", ManyOperands(), (torch.randn(3, 5, 48), *(torch.randn(5, 1) for _ in range(count))))
    check_native([case])
    for target in ("x86-avx2", "h200"):
        check_interpreted([case], machine(target))


def test_networks_normalised_more_than_once() -> None:
    module = randomised(nn.Sequential(nn.InstanceNorm2d(8, affine=True), nn.BatchNorm2d(8), nn.BatchNorm2d(8)))
    check_native([Case("norms", module.eval(), (torch.randn(3, 8, 6, 8),))])


class BestPaths(nn.Module):
    """The greatest elements, which the next ones follow from, and their positions, for later: as in Viterbi's algorithm."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        best, positions = x[:, 0], []
        for i in range(1, x.shape[1]):
            greatest, at = (best[:, :, None] + self.steps).max(1)
            best = greatest + x[:, i]
            positions.append(at)
        return best, *positions


def test_both_results_of_a_reduction_are_stages_of_one_chain() -> None:
    """What one of them calls its inner results is no name of the other's; faults are errors in tests."""
    module, x = BestPaths().requires_grad_(False), torch.randn(2, 4, 5)
    with tilewright.compile(module, (x,), target="native", threads=1) as executable:
        for found, wanted in zip(executable(x), module(x), strict=True):
            torch.testing.assert_close(found, wanted)
