"""Concatenations in place: results against PyTorch in float64, what is copied and why, and that slices stay apart."""

from __future__ import annotations

import warnings
from dataclasses import replace
from importlib import import_module as import_module_by_name
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tilewright
from tests.compiled import Case, check_native, compare
from tests.draws import IN_THIRDS, draws
from tests.interpreted import check_interpreted, run_program
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.ir.expr import Const
from tilewright.ir.graph import Graph
from tilewright.ir.layout import Layout, boxes_overlap, channels_last, row_major
from tilewright.ir.region import Program
from tilewright.partition.canonical import canonical
from tilewright.partition.joining import RowJudge
from tilewright.partition.layouts import LaidOut
from tilewright.partition.plan import plan_program
from tilewright.partition.regions import lay_out
from tilewright.partition.without_kernels import through_torch
from tilewright.runtime.buffers import Buffers
from tilewright.runtime.gpu import _Segment
from tilewright.runtime.loadable import loadable
from tilewright.runtime.memory_plan import lifetimes, plan_memory
from tilewright.tuning import serialisation
from tilewright.tuning.problems import convolution_problem, key_of
from tilewright.zoo.densenet import DenseLayer, densenet121
from tilewright.zoo.inception import inception_v3


class Net(nn.Module):
    """A function of an input and of layers, which are made when they are first asked for."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.layers, self.used = function, nn.ModuleList(), 0

    def layer(self, make: Any) -> nn.Module:
        if self.used == len(self.layers):
            self.layers.append(make())
        self.used += 1
        return self.layers[self.used - 1]

    def conv(self, x: Tensor, channels: int, size: int = 1, relu: bool = True) -> Tensor:
        layer = self.layer(lambda: nn.Conv2d(x.shape[1], channels, size, padding=size // 2))
        y: Tensor = layer(x)
        return F.relu(y) if relu else y

    def forward(self, *inputs: Tensor) -> Any:
        self.used = 0
        return self.function(self, *inputs)


def case(name: str, function: Any, *shape: int) -> Case:
    net, x = Net(function), torch.randn(shape or (2, 8, 6, 7))
    with torch.no_grad():
        net.eval()(x)  # makes the layers
    return Case(name, net, (x,))


def graph_of(module: nn.Module, inputs: tuple[Tensor, ...]) -> Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return simplify(import_module(module.eval(), list(inputs)).graph)[0]


def planned(module: nn.Module, inputs: tuple[Tensor, ...], target: str = "h200") -> Program:
    return plan_program(graph_of(module, inputs), machine(target), 2)


def laid_out(module: nn.Module, inputs: tuple[Tensor, ...], target: str = "h200") -> LaidOut:
    """The plan without schedules."""
    graph = graph_of(module, inputs)
    return lay_out(graph, RowJudge(machine(target), 2, frozenset(graph.constants)))


def copies(found: LaidOut) -> list[str]:
    """Names of the regions that store a part of a concatenation, or all of it, as maps of their own."""
    return [region.name for region in found.regions if region.kind == "map" and "concatenate" in [node.operator for node in region.nodes]]


# What is planned


def simple(n: Net, x: Tensor) -> Any:
    return n.conv(torch.cat([n.conv(x, 8), n.conv(x, 12, 3), n.conv(x, 8)], 1), 8, 3)


def nested(n: Net, x: Tensor) -> Any:
    x = n.conv(x, 16)
    for _ in range(3):
        x = torch.cat([x, n.conv(F.relu(x * 0.5), 8, 3)], 1)
    return n.conv(x, 8)


def listed(n: Net, x: Tensor) -> Any:
    """A dense block as torchvision writes it: every layer concatenates all features so far."""
    features = [n.conv(x, 16)]
    for _ in range(3):
        features.append(n.conv(F.relu(torch.cat(features, 1) * 0.5) if len(features) > 1 else features[0], 8, 3))
    return n.conv(torch.cat(features, 1), 8)


def direct(n: Net, x: Tensor) -> Any:
    """Convolutions that read a slice of the buffer that they store another slice of."""
    x = n.conv(x, 16)
    for _ in range(2):
        x = torch.cat([x, n.conv(x, 8, 3)], 1)
    return n.conv(x, 8, 3)


def twice(n: Net, x: Tensor) -> Any:
    y = n.conv(x, 8)
    return n.conv(torch.cat([y, n.conv(x, 8), y], 1), 8)


def two_places(n: Net, x: Tensor) -> Any:
    y, z = n.conv(x, 8), n.conv(x, 8, 3)
    return n.conv(torch.cat([y, z], 1), 8), n.conv(torch.cat([z, n.conv(x, 16), y], 1), 8)


def with_input(n: Net, x: Tensor) -> Any:
    return n.conv(torch.cat([x, n.conv(x, 8), torch.ones(2, 8, 6, 7).to(x.dtype)], 1), 8, 3)


def returned(n: Net, x: Tensor) -> Any:
    y = n.conv(x, 8)
    return torch.cat([y, n.conv(x, 8)], 1), y


def inner_returned(n: Net, x: Tensor) -> Any:
    y = torch.cat([n.conv(x, 8), n.conv(x, 16)], 1)
    return n.conv(torch.cat([y, n.conv(y, 8)], 1), 8), y


def rows(n: Net, x: Tensor) -> Any:
    y = torch.cat([n.conv(x, 8), n.conv(x, 8, 3)], 2)
    z = torch.cat([y, n.conv(y, 8)], 3)
    return n.conv(z, 8, 3), n.conv(z * 2, 8)


def batches(n: Net, x: Tensor) -> Any:
    return n.conv(torch.cat([n.conv(x, 8), n.conv(x, 8, 3)], 0), 8, 3)


def two_axes(n: Net, x: Tensor) -> Any:
    y = torch.cat([n.conv(x, 8), n.conv(x, 8, 3)], 1)
    return n.conv(torch.cat([y, n.conv(x, 16)], 2), 8)


def unaligned(n: Net, x: Tensor) -> Any:
    """Slices at channels that are no multiples of a vector, one of which is also read elsewhere."""
    y, z = n.conv(x, 11), n.conv(x, 12)
    return n.conv(torch.cat([y, z, n.conv(x, 9)], 1), 8, 3), n.conv(z, 8, 3)


def narrow(n: Net, x: Tensor) -> Any:
    return n.conv(torch.cat([n.conv(x, 3), n.conv(x, 16)], 1), 8)


def halos(n: Net, x: Tensor) -> Any:
    """Readers of the whole and of a part that need halos of different widths, along other axes than the concatenation's, and along it."""
    y, z = n.conv(x, 8), n.conv(x, 8)
    whole = torch.cat([y, z], 1)
    stacked = torch.cat([n.conv(x, 8, 3), y], 2)
    return n.conv(whole, 8, 3), n.conv(y, 8, 5), n.conv(stacked, 8, 3), n.conv(F.pad(z, (0, 0, 0, 0, 2, 1)), 4, 3)


def pools(n: Net, x: Tensor) -> Any:
    y = torch.cat([n.conv(x, 8), F.max_pool2d(n.conv(x, 8), 3, 1, 1), F.avg_pool2d(x, 3, 1, 1)], 1)
    return y.mean((2, 3)), F.max_pool2d(y, 2), F.layer_norm(y, y.shape[-1:])


def products(n: Net, x: Tensor) -> Any:
    flat = x.flatten(1)
    parts = [n.layer(lambda: nn.Linear(flat.shape[1], 24))(flat), n.layer(lambda: nn.Linear(flat.shape[1], 8))(flat).softmax(1)]
    return n.layer(lambda: nn.Linear(32, 8))(torch.cat(parts, 1))


def computed(n: Net, x: Tensor) -> Any:
    """Parts that are maps, one of which reads its own buffer."""
    y = n.conv(x, 8)
    whole = torch.cat([x.sin(), y, y * 2, n.conv(y, 8), x.permute(0, 1, 3, 2).reshape(x.shape)], 1)
    return n.conv(whole, 8, 3)


def heads(n: Net, x: Tensor) -> Any:
    """A result of branches that nothing else reads."""
    return torch.cat([n.conv(x, 8), n.conv(x, 5, 3), F.max_pool2d(n.conv(x, 8), 3, 1, 1), n.conv(x, 7).softmax(1)], 1)


def levels(n: Net, x: Tensor) -> Any:
    """A detector's results: a concatenation of views of what each level predicts, which is copied, and a nested one."""
    first, second = n.conv(x, 12), n.conv(F.max_pool2d(x, 2), 12, 3)
    boxes = [level.flatten(2) for level in (first, second)]
    return torch.cat(boxes, 2), torch.cat([torch.cat([n.conv(x, 8), n.conv(x, 8)], 1), n.conv(x, 16)], 1)


def result_read(n: Net, x: Tensor) -> Any:
    """A result that other regions read as well, and a part of it that a convolution reads with a halo."""
    y = n.conv(x, 8)
    whole = torch.cat([y, n.conv(x, 8)], 1)
    return whole, n.conv(whole, 8), n.conv(y, 8, 3)


def result_of_inputs(n: Net, x: Tensor) -> Any:
    return torch.cat([x, n.conv(x, 8), n.conv(x, 8, 3)], 1)


def results_of_products(n: Net, x: Tensor) -> Any:
    """Parts of rows that are read elsewhere, at offsets that are no multiples of the alignment, and one that is computed."""
    flat = x.flatten(1)
    y, z = n.layer(lambda: nn.Linear(flat.shape[1], 20))(flat), n.layer(lambda: nn.Linear(flat.shape[1], 12))(flat)
    return torch.cat([y, z, z.exp()], 1), n.layer(lambda: nn.Linear(20, 8))(y)


# Functions, and the number of regions that copy parts of their concatenations.
CASES = [
    (simple, 0), (nested, 0), (listed, 0), (direct, 0), (twice, 1), (two_places, 1), (with_input, 2), (returned, 1), (inner_returned, 1), (rows, 0),
    (batches, 0), (two_axes, 0), (unaligned, 1), (narrow, 1), (halos, 2), (pools, 0), (products, 0), (computed, 2),
    (heads, 0), (levels, 1), (result_read, 1), (result_of_inputs, 1), (results_of_products, 1),
]  # fmt: skip


@pytest.mark.parametrize(("function", "count"), CASES)
def test_copies(function: Any, count: int) -> None:
    one = case(function.__name__, function)
    assert len(copies(laid_out(one.module, one.inputs))) == count


def test_the_reasons_say_why_a_part_is_copied() -> None:
    def why(function: Any) -> str:
        one = case("", function)
        return "\n".join(reason for region in laid_out(one.module, one.inputs).regions for reason in region.reasons)

    assert "stored in place, as 8 to 20 of cat" in why(simple)
    assert "is already stored in" in why(twice)
    assert "inputs_0 is an input of the model" in why(with_input) and "is a constant of the model" in why(with_input)
    assert "is a result of the model" in why(returned) and "stored in place, as 8 to 16 of cat" in why(returned)
    assert "stored as d0 d2 d3 d1, cat as d0 d1 d2 d3" in why(result_read)
    assert "vectors of 4 elements are not aligned in cat" in why(unaligned)
    assert "its rows of 12 B are shorter than a sector of memory" in why(narrow)
    assert "needs a zeroed halo where its neighbours are" in why(halos)


@pytest.mark.parametrize("target", ["h200", "x86-avx2"])
def test_a_dense_block_has_one_buffer_and_its_layers_one_kernel(target: str) -> None:
    block = nn.Sequential(nn.Conv2d(3, 32, 1), *(DenseLayer(32 + 16 * i, 16) for i in range(3)), nn.Conv2d(80, 8, 1))
    program = plan_program(graph_of(block, (torch.randn(1, 3, 8, 8),)), machine(target), 2, chains=False)
    assert {part.region.kind for part in program.regions if "concatenate" in [node.operator for node in part.region.nodes]} == {"contraction"}
    (buffer,) = set(program.aliases.values())
    assert program.storage[buffer].value.shape == (1, 80, 8, 8)
    growth = [part for part in program.regions if program.storage[part.region.outputs[0]].value.shape == (1, 16, 8, 8)]
    assert len(growth) == 3 and len({part.calls[0].kernel for part in growth}) == 1  # the offset is no part of a kernel


@pytest.mark.parametrize(
    "network",
    [pytest.param(lambda: densenet121(10, growth=8), marks=pytest.mark.slow), lambda: inception_v3(10)],
    ids=["densenet121", "inception_v3"],
)
def test_networks_copy_nothing(network: Any) -> None:
    graph = graph_of(network(), (torch.randn(1, 3, 75, 75),))
    assert sum(node.operator == "concatenate" for node in graph.nodes) >= 15
    for target in ("h200", "x86-avx2"):
        assert not copies(lay_out(graph, RowJudge(machine(target), 2, frozenset(graph.constants))))


# Results


@IN_THIRDS
def test_results_on_this_cpu(third: int) -> None:
    check_native([case(function.__name__, function) for function, _ in CASES[third::3]], calls=2)


@IN_THIRDS
@pytest.mark.parametrize("target", ["h200", "x86-avx512"])
def test_results_of_interpreted_kernels(target: str, third: int) -> None:
    """Of single regions: chains of concatenations are interpreted in test_concatenated_chains.py."""
    check_interpreted([case(function.__name__, function) for function, _ in CASES[third::3]], machine(target), chains=False)


def odd(n: Net, x: Tensor) -> Any:
    """Slices of 17 and 31 channels, and a reader of one of them. No two products are siblings."""
    y = n.conv(x, 17)
    return n.conv(torch.cat([y, n.conv(-x, 31)], 1), 8), n.conv(torch.cat([n.conv(x + 1, 16), n.conv(x * 2, 17)], 1), 8), n.conv(y, 8)


def test_results_in_bfloat16() -> None:
    """Tiles read adjacent channels in pairs, which must not reach into the next slice."""
    one = replace(case("bfloat16", odd), tolerance=0.03)
    graph = graph_of(one.module, one.inputs)
    program = plan_program(graph, machine("xeon-sapphire-rapids"), 1, precision="bf16")
    assert len(program.aliases) == 4 and {program.storage[name].value.dtype for name in program.aliases} == {"bf16"}
    assert any("needs a zeroed halo" in reason for part in program.regions for reason in part.region.reasons)
    results, faults = run_program(program, {graph.inputs[0]: one.inputs[0].numpy()})
    assert not faults
    compare(one, [torch.from_numpy(results[name]) for name in graph.outputs], one.inputs)


def random_net(seed: int) -> Case:
    """A network of a few layers over a growing list of features, about half of which are concatenations of others."""

    def function(n: Net, x: Tensor) -> Any:
        chance = Random(seed)
        features, results = [x, n.conv(x, chance.choice((8, 12)))], []
        for _ in range(chance.randint(3, 7)):
            y = chance.choice(features)
            kind = chance.choice(("concatenate", "concatenate", "concatenate", "conv", "conv", "pool", "map"))
            if kind == "concatenate":
                axis = chance.choice((1, 1, 1, 2, 0))
                fitting = [f for f in features if all(f.shape[d] == y.shape[d] for d in range(4) if d != axis)]
                y = torch.cat([y, *(chance.choice(fitting) for _ in range(chance.randint(1, 3)))], axis)
            elif kind == "conv":
                y = n.conv(y, chance.choice((4, 8, 9, 16)), chance.choice((1, 3)), chance.random() < 0.5)
            else:
                y = F.max_pool2d(y, 3, 1, 1) if kind == "pool" else y * 0.5 + 1
            features.append(y)
            if chance.random() < 0.2:
                results.append(y)
        return [*results, n.conv(features[-1], 4, 3)]

    return case(f"seed {seed}", function, 2, 8, 5, 6)


@settings(deadline=None, max_examples=2, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 1 << 30))
def test_random_graphs_on_this_cpu(seed: int) -> None:
    check_native([random_net(seed + number) for number in range(draws(3))])


@pytest.mark.slow
@settings(deadline=None, max_examples=2, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 1 << 30))
def test_random_graphs_of_interpreted_gpu_kernels(seed: int) -> None:
    check_interpreted([random_net(seed + number) for number in range(draws(3))], machine("h200"))


@pytest.mark.parametrize("name", ["cat.0", "cat.16", "relu"])
def test_parts_of_a_concatenation_can_run_through_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_one(*arguments: Any, **keywords: Any) -> Program:
        program = plan_program(*arguments, **{**keywords, "chains": False})
        return through_torch(program, {index: ["tried"] for index, part in enumerate(program.regions) if part.region.name == name})

    monkeypatch.setattr(import_module_by_name("tilewright.compile"), "plan_program", without_one)
    one = case("", with_input)
    executable = tilewright.compile(one.module, one.inputs, target="native", threads=2)
    assert [row.name for row in executable.plan.rows if row.kind == "torch"] == [name]
    for _ in range(2):
        inputs = one.fresh_inputs()
        compare(one, executable(*inputs), inputs)
    assert executable.verify(*inputs).passed


def test_verification_covers_concatenations_without_a_region() -> None:
    one = case("", listed)
    executable = tilewright.compile(one.module, one.inputs, target="native", threads=2)
    verified = executable.verify(*one.inputs)
    assert verified.passed
    joined = [value for value in verified.values if value.value.startswith("cat")]
    assert len(joined) == 3 and {value.region for value in joined} <= {row.name for row in executable.plan.rows}


# Around them


def test_producers_of_slices_run_concurrently_on_a_gpu() -> None:
    one = case("", simple)
    program = loadable(planned(one.module, one.inputs))
    calls = [call for region in program.regions for call in region.calls]
    slices, (root,) = set(program.aliases), set(program.aliases.values())
    buffers = Buffers(program, torch.device("cpu"), 256)
    engine: Any = SimpleNamespace(in_order=False, buffers=buffers)
    edges = _Segment._edges(engine, calls)
    stores = [number for number, call in enumerate(calls) if call.arguments[-1] in slices]
    reads = [number for number, call in enumerate(calls) if root in call.arguments[:-1]]
    assert len(stores) == 3 and reads
    assert not any(before in stores for number in stores for before in edges[number])
    assert all(set(stores) <= ancestors(edges, number) for number in reads)


def ancestors(edges: list[list[int]], number: int) -> set[int]:
    return set(edges[number]).union(*(ancestors(edges, before) for before in edges[number]))


def test_a_buffer_lives_as_long_as_its_slices() -> None:
    one = case("", listed)
    program = loadable(planned(one.module, one.inputs))
    (root,) = set(program.aliases.values())
    uses = [at for at, call in enumerate(c for r in program.regions for c in r.calls) if any(program.root(name) == root for name in call.arguments)]
    (life,) = lifetimes(program, [root])
    assert (life.first, life.last) == (uses[0], uses[-1])
    assert set(plan_memory(program).offsets).isdisjoint(program.aliases)


def test_digests_of_dense_problems_are_those_of_earlier_records() -> None:
    dense = convolution_problem(8, 8, 5, 5, 3)
    assert key_of(dense) == "85e3003f7fedf82d2fcc"
    out, wide = dense.region.outputs[0], channels_last((1, 48, 5, 5))

    def at(channel: int) -> str:
        sliced = replace(dense, layouts={**dense.layouts, out: wide.part((1, 8, 5, 5), (0, channel, 0, 0))})
        assert serialisation.decode(serialisation.encode(sliced)).layouts == sliced.layouts
        return key_of(canonical(sliced).problem)

    assert len({key_of(dense), at(0), at(4)}) == 3
    assert at(0) == at(16) == at(32) and at(4) == at(20)  # only the remainder by the alignment counts


# Layouts


def test_layout_of_a_slice() -> None:
    whole = channels_last((2, 24, 5, 6)).with_halo(((0, 0), (0, 4), (1, 1), (1, 2)))
    part = whole.part((2, 8, 5, 6), (0, 12, 0, 0))
    assert part.strides == whole.strides and part.around == ((0, 0), (12, 8), (0, 0), (0, 0)) and part.halo == ((0, 0), (0, 0), (1, 1), (1, 2))
    assert part.start() == whole.start() + 12 and part.own_size == 2 * 7 * 9 * 8
    assert part.base == 0 and part.size == whole.size - 8
    further = whole.part((2, 4, 5, 6), (0, 20, 0, 0))
    assert further.base == 16 and further.from_base().around[1] == (4, 4 + 16) and further.from_base().base == 0
    assert further.base + further.from_base().size == further.size == whole.size - 4
    assert whole.part(whole.shape, (0, 0, 0, 0)) == whole
    nested = part.part((2, 4, 5, 6), (0, 4, 0, 0))
    assert nested == whole.part((2, 4, 5, 6), (0, 16, 0, 0))
    with pytest.raises(ValueError, match="none of them split"):
        Layout((4, 8), ((0, 0), (1, 0), (1, 4)), (), ((1, 1), (0, 0)))


@given(st.data())
def test_slices_address_the_elements_of_their_buffer(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(*[st.integers(1, 5)] * 3))
    order = tuple((dim, 0) for dim in data.draw(st.permutations(range(3))))
    whole = Layout(shape, order, data.draw(st.tuples(*[st.tuples(st.integers(0, 2), st.integers(0, 2))] * 3)))
    start = [data.draw(st.integers(0, extent - 1)) for extent in shape]
    part = whole.part([data.draw(st.integers(1, extent - first)) for extent, first in zip(shape, start, strict=True)], start)
    index = [data.draw(st.integers(0, extent - 1)) for extent in part.shape]
    at = whole.offset([first + position for first, position in zip(start, index, strict=True)])
    assert part.offset(index) == at == part.from_base().offset(index) + part.base
    assert part.from_base().base == 0 and part.base % 16 == 0
    last = part.from_base().offset([extent - 1 for extent in part.shape])
    assert isinstance(last, Const) and last.value < part.from_base().size and part.base + part.from_base().size <= whole.size


def test_boxes() -> None:
    a = row_major((4, 8)).part((4, 3), (0, 2)).box()
    assert a == ((0, 4), (2, 5))
    assert boxes_overlap(a, ((3, 5), (4, 9))) and not boxes_overlap(a, ((0, 4), (5, 8)))
