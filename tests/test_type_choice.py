"""Types by prediction: which regions are asked, what they gain, and results of plans where factors are rounded as they are read or stay float32."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.draws import draws
from tests.interpreted import returned, run_program
from tests.test_gpu_precision import ERRORS, computed, layers, planned, products_of
from tests.test_recurrence import KINDS, loops
from tilewright.compile import source_files
from tilewright.frontend.torch_import import import_module
from tilewright.graph.loop_products import LoopProduct, loop_products
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.ir.expr import Apply, walk
from tilewright.ir.graph import Graph
from tilewright.ir.region import Program, Region
from tilewright.kernels.schema import USUAL
from tilewright.partition.layout_choice import Judge
from tilewright.partition.layouts import LaidOut, Storing, assign_layouts
from tilewright.partition.merges import Timed
from tilewright.partition.plan import plan_program
from tilewright.partition.precision import precision_of
from tilewright.partition.regions import regions_of
from tilewright.partition.type_choice import Types, choose_types
from tilewright.partition.without_kernels import through_torch
from tilewright.runtime.loadable import loadable_kernel
from tilewright.selection.choice import choose
from tilewright.toolchain.binary import Binary
from tilewright.toolchain.build import compile_kernels

H200 = machine("h200")
NARROW = ("fp16", "bf16")
EACH = pytest.mark.parametrize("precision", NARROW)


class Branches(nn.Module):
    """A first layer of three channels, a chain of maps between results that are float32, and a tiny last layer."""

    def __init__(self, width: int = 16, classes: int = 3) -> None:
        super().__init__()
        self.first, self.middle = nn.Conv2d(3, width, 3, 2, 1), nn.Conv2d(width, width, 3, padding=1)
        self.last = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = torch.relu(self.middle(torch.relu(self.first(x))))
        scaled = x * 2 + 1
        return self.last(found.mean((2, 3))), scaled, torch.tanh(scaled) * x


class Line(nn.Module):
    """Products one after another, of one input."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def graph_of(module: nn.Module, *inputs: Tensor) -> Graph:
    return simplify(import_module(module.eval(), inputs).graph)[0]


def everywhere(module: nn.Module, inputs: Sequence[Tensor], precision: str) -> Program:
    """The plan, without chains, in which the precision holds for all regions."""
    graph, numerics = graph_of(module, *inputs), USUAL.at(precision)
    typed = replace(precision_of(precision, graph, H200), by_region=False)
    return plan_program(graph, H200, 1, partial(choose, numerics=numerics), typed, numerics, chains=False)


def seconds_of(program: Program) -> float:
    return sum(lowered.predicted_seconds * (1 if lowered.region.kind == "loop" else lowered.repeat) for lowered in program.regions)


def in_float64(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    with torch.no_grad():
        found: list[Tensor] = tree_leaves(copy.deepcopy(module).double()(*(x.double() for x in inputs)))
    return found


def assert_accurate(found: Sequence[Tensor], exact: Sequence[Tensor], tolerance: float) -> None:
    for ours, wanted in zip(found, exact, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - wanted).abs().max() <= tolerance * wanted.abs().max()


# --- what is decided ----------------------------------------------------------------------------------------------------


def chosen(graph: Graph, seconds: Callable[[Region, LaidOut], float], precision: str = "fp16") -> tuple[Types, LaidOut]:
    """What is decided if regions take these seconds, and the partition that follows."""
    typed, parts = precision_of(precision, graph, H200), regions_of(graph)

    def laid(storing: Storing) -> LaidOut:
        return assign_layouts(graph, parts, typed, storing=storing)

    def predict(laid_out: LaidOut, regions: Sequence[Region]) -> list[Timed]:
        return [Timed(region, seconds(region, laid_out)) for region in regions]

    types = choose_types(graph, laid, Judge(predict, gpu=True), typed)
    return types, types.laid(laid)(Storing())


def is_rounding(region: Region) -> bool:
    return any(isinstance(part, Apply) and part.dtype in ("f16", "bf16") for body in region.steps[0].bodies for part in walk(body))


def types_of(laid_out: LaidOut, region: str) -> dict[str, str]:
    (found,) = (one for one in laid_out.regions if one.name == region)
    return {name: laid_out.values[name].dtype for name in (*found.inputs, *found.outputs)}


def names(laid_out: LaidOut) -> list[str]:
    return [region.name for region in laid_out.regions]


def test_a_copy_that_costs_more_than_rounding() -> None:
    """The first product rounds its input where it reads it; its results, and those of the others, are of 16 bits."""
    graph = graph_of(Line([32, 48, 64, 16]), torch.randn(9, 32))
    types, laid_out = chosen(graph, lambda region, laid_out: 1.0)
    first, second, third = (region for region in laid_out.regions)
    assert types.storing.rounding == {first.name} and not types.storing.wide
    assert is_rounding(first) and not is_rounding(second)
    assert types_of(laid_out, first.name)["x"] == "f32" and laid_out.values[first.name].dtype == "f16"
    assert laid_out.values[second.name].dtype == "f16" and laid_out.values[third.name].dtype == "f32"
    (said,) = (text for text in first.reasons if "are rounded where" in text)
    assert "1 s predicted so, 2 s from copies" in said.replace("1e+06 us", "1 s").replace("2e+06 us", "2 s")


def test_conversion_that_costs_more_than_it_gains() -> None:
    """The first and the last product are faster in float32, so the second is asked, which is not."""
    graph = graph_of(Line([32, 48, 64, 16]), torch.randn(9, 32))
    first, second, third = names(chosen(graph, lambda region, laid_out: 1.0)[1])

    def seconds(region: Region, laid_out: LaidOut) -> float:
        weight = next((name for name in region.inputs if "weight" in name), "")
        wide = bool(weight) and laid_out.values[weight].dtype == "f32"
        return 1.0 if wide == (region.name in (first, third)) else 2.0

    types, laid_out = chosen(graph, seconds)
    assert types.storing.wide == {first, third} and {one.value for one in types.decisions} == {first, second, third}
    assert names(laid_out) == [first, second, third]
    found = [laid_out.values[name].dtype for name in (*graph.constants, first, second, third) if "bias" not in name]
    # the second product's factor is stored in 16 bits by the first, and its result in float32 for the third
    assert found == ["f32", "f16", "f32", "f16", "f32", "f32"]


def test_regions_between_16_bits_are_not_asked() -> None:
    graph = graph_of(Line([32] * 7), torch.randn(9, 32))
    types, laid_out = chosen(graph, lambda region, laid_out: 2.0 if is_rounding(region) else 1.0)
    products = [region.name for region in laid_out.regions if region.kind == "contraction"]
    assert {one.value for one in types.decisions} == {products[0], products[-1]}


def test_a_line_becomes_float32_where_that_is_faster() -> None:
    graph = graph_of(Line([32] * 5), torch.randn(9, 32))
    _, laid_out = chosen(graph, lambda region, laid_out: float(sum(d != "f32" for d in types_of(laid_out, region.name).values())) + 1)
    assert {value.dtype for value in laid_out.values.values()} == {"f32"} and len(laid_out.regions) == 4


def test_equal_times_keep_the_precision() -> None:
    """A region of which both ways are as fast has the type that was asked for."""
    graph = graph_of(nn.Sequential(nn.ReLU(), nn.Linear(32, 8)), torch.randn(9, 32))
    types, _ = chosen(graph, lambda region, laid_out: 1.0)
    assert types.decisions and types.storing == Storing()


def test_other_precisions_decide_nothing() -> None:
    graph = graph_of(Line([32, 48]), torch.randn(9, 32))

    def never(region: Region, laid_out: LaidOut) -> float:
        raise AssertionError(region.name)

    for precision in ("fp32", "tf32", "fp32-tensor"):
        types, laid_out = chosen(graph, never, precision)
        assert not types.decisions and {value.dtype for value in laid_out.values.values()} == {"f32"}


def test_both_factors_of_an_input() -> None:
    """A second factor cannot be rounded where it is read, nor can a first one that is the second too."""

    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x.mT

    types, laid_out = chosen(graph_of(Square(), torch.randn(9, 9)), lambda region, laid_out: 1.0)
    assert not types.storing.rounding and types.storing.wide and len(laid_out.regions) == 1


# --- plans --------------------------------------------------------------------------------------------------------------


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "branches": lambda: (Branches(), (torch.randn(2, 3, 14, 12),)),
    "layers": layers,
    "tiny": lambda: (Line([64, 64, 3]), (torch.randn(8, 64),)),
    "odd": lambda: (Line([13, 37, 5]), (torch.randn(7, 13),)),
    "encoder": lambda: (nn.TransformerEncoderLayer(64, 2, 96, batch_first=True), (torch.randn(2, 16, 64),)),
}


@pytest.mark.in_turns(3)
@EACH
@pytest.mark.parametrize("name", CASES)
def test_plans_are_accurate_and_predicted_no_slower(name: str, precision: str) -> None:
    torch.manual_seed(len(name))
    module, inputs = CASES[name]()
    program, apart = (planned(module.eval(), inputs, precision, chains) for chains in (None, False))
    assert_accurate(computed(module, inputs, program), in_float64(module, *inputs), ERRORS[precision])
    # types are decided for separate kernels, before first layers are folded, which may cost a few thousandths
    assert seconds_of(apart) <= 1.01 * seconds_of(everywhere(module, inputs, precision))


@settings(max_examples=draws(10), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    sizes=st.lists(st.sampled_from([3, 8, 16, 24, 40, 64, 129]), min_size=2, max_size=4), rows=st.sampled_from([1, 2, 7, 33]),
    precision=st.sampled_from(NARROW), seed=st.integers(0, 1000),
)  # fmt: skip
def test_random_lines(sizes: list[int], rows: int, precision: str, seed: int) -> None:
    torch.manual_seed(seed)
    module, x = Line(sizes).eval(), torch.randn(rows, sizes[0])
    program = planned(module, (x,), precision)
    # a ReLU after each layer: errors are those of the values before it, which are about as large as the weights' rows
    (found,), (exact,) = computed(module, (x,), program), in_float64(module, x)
    assert (found - exact).abs().max() <= ERRORS[precision] * max(1.0, float(exact.abs().max()))


@EACH
def test_rounding_where_a_product_reads_it(precision: str) -> None:
    """The product with an identity is its first factor, rounded as a copy would round it, on tensor cores. Its rows are no multiples of 16 bytes,
    so that warpgroups cannot multiply them in TF32 instead."""
    torch.manual_seed(0)
    module, x = nn.Linear(98, 98, bias=False), torch.randn(4096, 98)
    module.weight.data = torch.eye(98)
    program = planned(module.eval(), (x,), precision)
    (lowered,) = program.regions
    assert is_rounding(lowered.region) and products_of(program) == {{"fp16": "f16", "bf16": "bf16"}[precision]}
    (found,) = computed(module, (x,), program)
    assert torch.equal(found, x.to(getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}[precision])).float())


def test_numbers_beyond_float16() -> None:
    """What is rounded to float16 overflows, wherever that is done; what stays float32 does not."""
    x = torch.full((4096, 98), 1e5)
    module = nn.Linear(98, 98, bias=False).eval()
    module.weight.data = torch.eye(98)
    for precision, finite in (("fp16", False), ("bf16", True)):
        for plan in (planned, everywhere):
            (found,) = computed(module, (x,), plan(module, (x,), precision))
            assert bool(found.isfinite().all()) == finite
    both = Square2()
    program = planned(both, (torch.full((9, 24), 1e5), torch.full((24, 16), 1.0)), "fp16")
    assert {storage.value.dtype for storage in program.storage.values()} == {"f32"}
    (found,) = computed(both, (torch.full((9, 24), 1e5), torch.full((24, 16), 1.0)), program)
    assert bool(found.isfinite().all())


class Square2(nn.Module):
    """A product of two inputs: two copies cost more than float32."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x @ y


def test_reasons_have_both_times() -> None:
    program = planned(*layers(), "fp16")
    (first,) = (lowered.region for lowered in program.regions if "gelu" in lowered.region.outputs)
    assert any("where it reads them" in text and "us predicted so" in text and "from copies" in text for text in first.reasons)
    assert any("float32 factors" in text and "from factors of 16 bits" in text for text in first.reasons)
    assert any(decision.results == first.outputs and "float32 factors" in decision.text for decision in program.search)


@pytest.mark.in_turns(1)
@EACH
def test_kernels_compile(precision: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    recurrent = nn.LSTM(128, 128).eval(), (torch.randn(6, 32, 128),)
    for module, inputs in (layers(), (Branches().eval(), (torch.randn(2, 3, 14, 12),)), recurrent):
        for built in compile_kernels(source_files(planned(module, inputs, precision), H200), H200):
            assert isinstance(built, Binary), built


# --- recurrent layers ---------------------------------------------------------------------------------------------------


def recurrent_plan(module: nn.Module, x: Tensor, precision: str, persistent: bool | None = True) -> Program:
    graph, numerics = graph_of(module, x), USUAL.at(precision)
    return plan_program(graph, H200, 1, partial(choose, numerics=numerics), precision, numerics, persistent=persistent)


def results_of(module: nn.Module, x: Tensor, program: Program) -> list[Tensor]:
    results, faults = run_program(program, {program.graph.inputs[0]: x.numpy()})
    assert not faults, "\n".join(faults)
    return tree_leaves(returned(import_module(module, (x,)), [results[name] for name in program.graph.outputs], (x,)))


def test_products_of_a_loop() -> None:
    for kind, states in (("LSTM", 2), ("GRU", 1)):
        (node,) = (node for node in graph_of(KINDS[kind](5, 32), torch.randn(3, 4, 5)).nodes if node.operator == "scan")
        assert loop_products(node) == (LoopProduct(0, "p_weight_hh_l0"),) and node.attributes["states"] == states


@settings(max_examples=draws(20), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    kind=st.sampled_from(list(KINDS)), hidden=st.sampled_from([7, 32, 64]), batch=st.sampled_from([1, 3, 16]), both=st.booleans(),
    deep=st.sampled_from([1, 2]), precision=st.sampled_from(NARROW), persistent=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_recurrent_layers(kind: str, hidden: int, batch: int, both: bool, deep: int, precision: str, persistent: bool, seed: int) -> None:
    torch.manual_seed(seed)
    module, x = KINDS[kind](24, hidden, num_layers=deep, bidirectional=both).eval(), torch.randn(5, batch, 24)
    program = recurrent_plan(module, x, precision, persistent)
    assert_accurate(results_of(module, x, program), in_float64(module, x), ERRORS[precision])


@pytest.mark.in_turns(1)
@EACH
def test_states_of_16_bits(precision: str) -> None:
    """Weights and the states that they multiply are of 16 bits, as is what passes between layers; cells and results of the model are float32."""
    torch.manual_seed(0)
    narrow = {"fp16": "f16", "bf16": "bf16"}[precision]
    module, x = nn.LSTM(512, 512, num_layers=2).eval(), torch.randn(20, 64, 512)
    program = recurrent_plan(module, x, precision)
    first, second = loops(program)
    assert all("tensor cores" in lowered.schedule for lowered in (first, second))
    for lowered in (first, second):
        name = lowered.region.nodes[0].name
        stored = {**program.storage, **lowered.storage}
        assert stored[f"{name}.state0"].value.dtype == narrow and stored[f"{name}.state1"].value.dtype == "f32"
        assert {s.value.dtype for s in lowered.storage.values() if s.source is not None} == {narrow}
    between = next(name for name in first.region.outputs if name.endswith(".2"))
    assert program.storage[between].value.dtype == narrow
    assert all(program.storage[name].value.dtype == "f32" for name in (*program.graph.inputs, *program.graph.outputs))
    single = recurrent_plan(nn.LSTM(512, 512).eval(), torch.randn(20, 64, 512), "fp32")
    assert all(s.value.dtype == "f32" for lowered in loops(single) for s in lowered.storage.values() if s.value.dtype[0] == "f")


def test_a_state_that_overflows() -> None:
    """States of a layer with ReLU are rounded to float16 in each step; bfloat16 holds them."""
    module, x = nn.RNN(16, 32, nonlinearity="relu").eval(), torch.full((4, 16, 16), 100.0)
    for weight in module.parameters():
        weight.data = torch.full_like(weight.data, 1.0)
    for precision, finite in (("fp16", False), ("bf16", True)):
        program = recurrent_plan(module, x, precision)
        assert loops(program)[0].storage[f"{loops(program)[0].region.nodes[0].name}.state0"].value.dtype != "f32"
        assert bool(results_of(module, x, program)[0].isfinite().all()) == finite


def test_float32_recurrences_do_not_change() -> None:
    module, x = nn.GRU(24, 32).eval(), torch.randn(5, 16, 24)
    program = recurrent_plan(module, x, "fp32")
    assert_accurate(results_of(module, x, program), in_float64(module, x), 1e-5)
    assert {s.value.dtype for s in program.storage.values()} == {"f32"}


def test_a_loop_that_runs_through_pytorch() -> None:
    """A loop whose kernel fails is a node of PyTorch's between values of 16 bits."""
    module, x = nn.LSTM(64, 64, num_layers=2).eval(), torch.randn(5, 32, 64)
    program = recurrent_plan(module, x, "fp16")
    position = program.regions.index(loops(program)[0])
    lost = through_torch(program, {position: ["for this test"]})
    (region,) = (lowered.region for lowered in lost.regions if lowered.region.kind == "torch")
    assert region.nodes[0].operator == "scan"


def test_kernels_that_round_to_tf32_are_known() -> None:
    """Their results are verified with the tolerance of TF32, although all that is stored is float32; pairs of TF32 are as accurate as float32. Regions
    to which a plan in 16 bits leaves factors of float32 are such too."""
    for precision in ("fp32", "fp32-tensor", "tf32", "fp16"):
        program = planned(*layers(), precision)
        expected = set()
        if precision in ("tf32", "fp16"):
            products = (lowered.region for lowered in program.regions if lowered.region.kind == "contraction")
            expected = {r.outputs[0] for r in products if all(program.storage[name].value.dtype == "f32" for name in r.inputs)}
            assert expected or precision == "fp16"
        found = {lowered.region.outputs[0] for lowered in program.regions for kernel in lowered.kernels if loadable_kernel(kernel).tf32}
        assert found == expected, precision
