"""Convolutions of few channels over folded images: their meaning, the decision by prediction, and results of kernels against PyTorch in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from random import Random

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.draws import draws
from tests.stand_ins import deciding, merges_of
from tests.test_gpu_half import any_schedule, check
from tests.test_gpu_half import planned as planned_in_half
from tests.test_gpu_precision import ERRORS, computed, planned, products_of
from tests.test_gpu_warpgroup import with_schedule
from tests.test_half_modules import TYPES, in_type
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.graph.reference import evaluate
from tilewright.graph.table import computation
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.graph import Graph
from tilewright.ir.problem import Problem
from tilewright.ir.region import Program, Region, Unsuitable
from tilewright.kernels.gpu.tensor_cores.schema import TENSOR_CORES
from tilewright.kernels.gpu.warpgroup.form import factors_form, warpgroup_form
from tilewright.kernels.gpu.warpgroup.schema import WARPGROUP
from tilewright.kernels.gpu.warpgroup_patch.schema import WARPGROUP_PATCH
from tilewright.kernels.schema import AnySchema
from tilewright.partition import folded_images
from tilewright.partition.folded_images import FOLDED, fold_images
from tilewright.partition.merges import Timed
from tilewright.partition.plan import plan_program
from tilewright.partition.siblings import Merged
from tilewright.selection.choice import choose
from tilewright.selection.ranking import Choice

H200, A100, V100, CPU = machine("h200"), machine("a100"), machine("v100"), machine("epyc-9655")
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class First(nn.Module):
    """A convolution with a bias, a residual and an activation after it."""

    def __init__(self, convolution: nn.Module) -> None:
        super().__init__()
        self.convolution = convolution

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(self.convolution(x) + y)


def drawn(random: Random, pixels: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A first layer of random sizes, whose images have up to so many pixels along the last dimension."""
    rank = random.choice([1, 2, 2, 3])
    taps = [random.randint(1, 7 if rank < 3 else 3) for _ in range(rank)]
    strides = [random.randint(1, 4) for _ in range(rank)]
    padding = [random.randint(0, min(3, k // 2 + 1)) for k in taps]
    sizes = [random.randint(max(k, 2), max(k, 2) + (pixels if dim == rank - 1 else 4)) for dim, k in enumerate(taps)]
    channels, outputs = random.choice([1, 3, 3, 4, 5]), random.choice([8, 16, 24, 33])
    convolution = CONVOLUTIONS[rank](channels, outputs, tuple(taps), tuple(strides), tuple(padding))  # type: ignore[arg-type]
    image = torch.randn(random.choice([1, 2]), channels, *sizes)
    return First(convolution).eval(), (image, torch.randn_like(convolution(image)).detach())


def graph_of(module: nn.Module, inputs: Sequence[Tensor]) -> Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return simplify(import_module(module, inputs).graph)[0]


def folded_by(graph: Graph, seconds: Callable[[bool], float], lanes: int = 8) -> Merged:
    """What is folded if each region takes so many seconds, given whether the graph has a folded image."""

    def regions(graph: Graph) -> list[Region]:
        steps = (computation(node, graph.values).steps for node in graph.nodes)
        return [Region(node.name, "map", (node,), each, node.inputs, node.outputs) for node, each in zip(graph.nodes, steps, strict=True)]

    def predict(graph: Graph, concerns: Callable[[Region], bool]) -> list[Timed]:
        one = seconds(any(name.endswith(FOLDED) for name in graph.values))
        return [Timed(region, one) for region in regions(graph) if concerns(region)]

    return fold_images(graph, regions, predict, lambda graph, region: lanes)


def is_folded(program: Program) -> bool:
    return any(name.endswith(FOLDED) for name in program.storage)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every image is folded that can be."""
    monkeypatch.setattr(folded_images, "compared", deciding(True))


@given(seed=st.integers(0, 2**31), lanes=st.sampled_from([4, 8]))
@settings(max_examples=draws(40), deadline=None)
def test_folded_images_mean_the_same(seed: int, lanes: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, inputs = drawn(Random(seed), 9)
    graph = graph_of(module, inputs)
    folded = folded_by(graph, lambda folded: 0.0 if folded else 1.0, lanes).graph
    possible = inputs[0].shape[1] % lanes != 0
    assert any(node.operator == "space_to_depth" for node in folded.nodes) == possible
    for node in folded.nodes:
        if node.operator == "convolution" and possible:
            assert node.attributes["stride"][-1] % lanes == 0 and set(node.attributes["stride"][:-1]) <= {1}
    (found,) = evaluate(folded, inputs)
    expected = module.double()(*(x.double() for x in inputs)).detach().numpy()
    assert abs(found - expected).max() <= 1e-5 * max(abs(expected).max(), 1)


@given(seed=st.integers(0, 2**31), dtype=st.sampled_from(TYPES), target=st.sampled_from([H200, A100]))
@settings(max_examples=draws(8), deadline=None)
def test_any_schedule_is_as_good_as_pytorch(seed: int, dtype: torch.dtype, target: Machine) -> None:
    random = Random(seed)
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        patch.setattr(folded_images, "compared", deciding(True))
        torch.manual_seed(seed)
        module, inputs = drawn(random, 7)
        module, inputs = module.to(dtype), in_type(inputs, dtype)  # type: ignore[assignment]
        program = planned_in_half(module, inputs, target, any_schedule(random, target))
    assume(all(lowered.region.kind != "window" for lowered in program.regions))  # a layer of a few pixels is no product
    assert is_folded(program)
    check(module, inputs, program)


@pytest.mark.in_turns(2)
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("schema", [TENSOR_CORES, WARPGROUP, WARPGROUP_PATCH], ids=lambda schema: schema.name)
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(3, 24, 7, 2, 3), (2, 3, 15, 18)),
        (nn.Conv2d(3, 16, 3, 1, 1), (1, 3, 9, 8)),
        (nn.Conv1d(5, 16, 5, 3, 2), (2, 5, 41)),
        (nn.Conv3d(1, 16, 3, (1, 2, 2), 1), (1, 1, 3, 9, 10)),
    ],
    ids=["7x7", "3x3", "1-D", "3-D"],
)
def test_all_schemas_of_tensor_cores(layer: nn.Module, shape: tuple[int, ...], schema: AnySchema) -> None:
    torch.manual_seed(0)
    module, inputs = nn.Sequential(layer, nn.ReLU()).half().eval(), (torch.randn(shape).half(),)
    used: list[object] = []
    program = planned_in_half(module, inputs, H200, with_schedule(lambda count: count // 2, used, schema=schema))
    # a filter along one dimension reads one run of memory: there are no taps that a patch could serve; im2col maps of pixels that overlap have not run
    assert is_folded(program) and bool(used) == (schema is TENSOR_CORES or schema is WARPGROUP_PATCH and len(shape) > 3)
    check(module, inputs, program)


@pytest.mark.in_turns(2)
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
def test_precisions_of_float32_modules(precision: str) -> None:
    torch.manual_seed(0)
    module, inputs = nn.Sequential(nn.Conv2d(3, 32, 5, 2, 2), nn.BatchNorm2d(32), nn.ReLU()).eval(), (torch.randn(16, 3, 13, 12),)
    program = planned(module, inputs, precision)
    assert is_folded(program) and products_of(program)
    (image,) = (storage for name, storage in program.storage.items() if name.endswith(FOLDED) and storage.source is None)
    assert image.value.dtype == {"tf32": "f32", "fp16": "f16", "bf16": "bf16"}[precision]
    assert image.value.shape == (16, 1, 9, 8 * (12 if precision == "tf32" else 16))
    expected = module.double()(inputs[0].double())
    (found,) = computed(module.float(), inputs, program)
    assert (found - expected).abs().max() <= ERRORS[precision] * expected.abs().max()


class Several(nn.Module):
    """Two convolutions of one image that is normalised before; a padded image; and one whose channels are innermost."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 5, 2), nn.Conv2d(3, 8, 3, 2, 1)
        self.third, self.fourth = nn.Conv2d(2, 8, 3, 2), nn.Conv2d(3, 8, 4, 4)

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        x = (x - 0.5) / 0.25
        return self.first(x), self.second(x), self.third(nn.functional.pad(y, (1, 2, 0, 1))), self.fourth(z.permute(0, 3, 1, 2))


@pytest.mark.usefixtures("always")
def test_what_comes_before_is_computed_in_the_map() -> None:
    torch.manual_seed(0)
    inputs = tuple(torch.randn(shape).half() for shape in ((1, 3, 11, 12), (1, 2, 9, 10), (1, 9, 8, 3)))
    module = Several().half().eval()
    program = planned_in_half(module, inputs, H200)
    maps = [lowered.region for lowered in program.regions if lowered.region.outputs[0].endswith(FOLDED)]
    assert len(maps) == 4 and not any(name.endswith(".padded") for name in program.storage)
    assert sorted(node.operator for region in maps[2:] for node in region.nodes) == ["pad", "permute", "space_to_depth", "space_to_depth"]
    check(module, inputs, program)


class Ended(nn.Module):
    """A convolution whose last windows end with so many zeros."""

    def __init__(self, zeros: int) -> None:
        super().__init__()
        self.convolution, self.zeros = nn.Conv1d(1, 16, 48, 16), zeros

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.convolution(nn.functional.pad(x, (0, self.zeros)))
        return result


@pytest.mark.parametrize("zeros", [0, 20])
def test_windows_of_a_row_end_inside_of_it(zeros: int) -> None:
    """Behind the end of a row is the next one, not zeros."""
    torch.manual_seed(0)
    module, inputs = Ended(zeros).half().eval(), (torch.randn(3, 1, 176).half(),)
    found: list[str] = []

    def chooser(problem: Problem, machine: Machine, threads: int) -> Choice:
        if problem.region.kind == "contraction":
            try:
                factors_form(problem, machine)
            except Unsuitable as reason:
                found.append(str(reason))
            with pytest.raises(Unsuitable):
                warpgroup_form(problem, machine)
        return choose(problem, machine, threads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folded_images, "compared", deciding(False))
        program = planned_in_half(module, inputs, H200, chooser)
    assert len(found) == (1 if zeros else 0) and not is_folded(program)
    check(module, inputs, program)


def reasons_of(program: Program) -> list[str]:
    return [reason for lowered in program.regions for reason in lowered.region.reasons if reason.startswith("blocks of ")]


def test_it_is_decided_by_prediction() -> None:
    module, inputs = nn.Conv2d(3, 16, (5, 3), (2, 1)), (torch.zeros(1, 3, 9, 9),)
    graph = graph_of(module, inputs)
    taken = folded_by(graph, lambda folded: 1e-6 if folded else 1e-3)
    refused = folded_by(graph, lambda folded: 1e-3 if folded else 1e-6)
    (told,), (other,) = taken.decisions.values(), refused.decisions.values()
    blocks, with_map = "blocks of 2x1 pixels of input", "predicted with the map that folds them"
    assert told.taken and told.text == f"{blocks} are channels: 2 us {with_map}, 1 ms without"
    assert not other.taken and other.text == f"{blocks} would be slower as channels: 2 ms {with_map}, 1 us without"
    assert refused.graph is graph and taken.graph is not graph
    assert folded_by(graph, lambda folded: 1.0, lanes=0).decisions == {}  # no tensor cores


def test_both_times_are_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """ResNet's first layer is predicted faster by the models alone; the sums of what is predicted decide."""
    module, inputs = nn.Conv2d(3, 64, 7, 2, 3).half(), (torch.zeros(64, 3, 224, 224).half(),)
    program = planned_in_half(module, inputs, H200)
    assert is_folded(program) and len(program.regions) == 2
    ((reason,), (decision,)) = reasons_of(program), merges_of(program)
    assert reason == decision.text and decision.taken and "predicted with the map that folds them" in reason
    stated = sum(lowered.predicted_seconds for lowered in program.regions)
    assert f": {1e6 * stated:.3g} us predicted" in reason
    monkeypatch.setattr(folded_images, "compared", deciding(False))
    plain = planned_in_half(module, inputs, H200)
    ((reason,), (decision,)) = reasons_of(plain), merges_of(plain)
    assert not is_folded(plain) and not decision.taken and "would be slower as channels" in reason
    apart = sum(lowered.predicted_seconds for lowered in plain.regions)
    assert reason.endswith(f"{1e6 * apart:.3g} us without") and stated < 0.8 * apart


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("target", "dtype"), [(H200, torch.float32), (V100, torch.float16), (CPU, torch.float32), (CPU, torch.bfloat16)])
def test_nothing_changes_without_tensor_cores(target: Machine, dtype: torch.dtype) -> None:
    module, inputs = nn.Conv2d(3, 16, 3, 2, 1).to(dtype), (torch.zeros(1, 3, 9, 9, dtype=dtype),)
    graph = graph_of(module, inputs)
    program = plan_program(graph, target, 1)
    assert program.graph is graph and not merges_of(program) and not reasons_of(program)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("layer", "channels"),
    [
        (nn.Conv2d(4, 16, 3, groups=2), 4),
        (nn.Conv2d(3, 16, 3, dilation=2), 3),
        (nn.Conv2d(8, 16, 3, 2), 8),
        (nn.Conv2d(20, 16, 3, 2), 20),
    ],
    ids=["groups", "dilation", "whole vectors", "many channels"],
)
def test_what_is_not_folded(layer: nn.Module, channels: int) -> None:
    inputs = (torch.zeros(1, channels, 9, 9).half(),)
    graph = graph_of(layer.half(), inputs)
    assert plan_program(graph, H200, 1).graph is graph
