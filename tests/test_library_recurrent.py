"""Recurrent layers as a library's operator: which are found, results against float64, the choice by the time of the whole network, artifacts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tilewright
from tests.compiled import poison, with_layers_by_libraries
from tests.draws import draws
from tests.sample_artifacts import manifest_of, put, signed
from tests.test_gpu_library import agree, fresh
from tests.test_library import check, libraries
from tests.test_onnx import model_of
from tests.test_partitions import took
from tilewright.compile import read
from tilewright.errors import InvalidArtifact
from tilewright.frontend.aten_recurrent import Cell, gru_step, lstm_step, one_direction, peephole_step, simple_step
from tilewright.frontend.onnx_recurrent import _gru_step_before
from tilewright.graph.builder import GraphBuilder
from tilewright.graph.passes import simplify
from tilewright.graph.reference import evaluate
from tilewright.hardware import machine
from tilewright.ir.graph import Graph
from tilewright.ir.library import RECURRENCES, LibraryCall, Recurrent, View
from tilewright.ir.region import Program
from tilewright.kernels.library.recurrent import layer_in, layers_of
from tilewright.kernels.schema import Numerics
from tilewright.partition.library_layers import with_layer
from tilewright.partition.merges import BY_MERGES, LIBRARY, Memory, Policy
from tilewright.partition.plan import plan_program
from tilewright.report.explanation import explanation
from tilewright.runtime.accesses import COOPERATION, WORKSPACE, Extent, accesses
from tilewright.runtime.executable import Executable
from tilewright.tuning.partition_trials import WholeOutcome
from tilewright.tuning.partitions import MOST, Network, Planning, alternatives, compared
from tilewright.tuning.records import Records

NATIVE = machine("native")
VENDOR = Numerics(vendor=True)


class Layers(nn.Module):
    """Recurrent layers between other operators, which return what is asked for: "all" results, the "last" step's, or final "states" only."""

    def __init__(self, layer: nn.RNNBase, wanted: str, given: bool) -> None:
        super().__init__()
        self.layer, self.wanted, self.given = layer, wanted, given
        self.head = nn.Linear(layer.hidden_size * (1 + layer.bidirectional), 3)

    def forward(self, x: Tensor, *states: Tensor) -> Any:
        first = (states if self.layer.mode == "LSTM" else states[0]) if self.given else None
        result, after = self.layer(torch.tanh(x), first)
        return {"all": lambda: (result, after), "last": lambda: self.head(result[:, -1]), "states": lambda: after}[self.wanted]()


KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": partial(nn.RNN, nonlinearity="relu"),
}


@st.composite
def layers(draw: st.DrawFn) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(draw(st.integers(0, 1 << 16)))
    kind, count, both = KINDS[draw(st.sampled_from(tuple(KINDS)))], draw(st.integers(1, 2)), draw(st.booleans())
    inputs, units, batch, steps = (draw(st.integers(1, most)) for most in (9, 9, 4, 6))
    layer = kind(inputs, units, count, bias=draw(st.booleans()), batch_first=draw(st.booleans()), bidirectional=both)
    given = draw(st.booleans())
    states = [torch.randn(count * (1 + both), batch, units) for _ in range(2 if layer.mode == "LSTM" else 1)] if given else []
    x = torch.randn(batch, steps, inputs) if layer.batch_first else torch.randn(steps, batch, inputs)
    return Layers(layer, draw(st.sampled_from(("all", "last", "states"))), given).eval(), (x, *states)


def compiled(module: nn.Module, inputs: tuple[Tensor, ...], target: str = "native") -> Executable:
    """The module with every layer by a library."""
    with with_layers_by_libraries():
        return tilewright.compile(module, inputs, target, vendor=True)


@settings(max_examples=draws(30), deadline=None, phases=(Phase.generate,))
@given(layers())
def test_layers(case: tuple[nn.Module, tuple[Tensor, ...]]) -> None:
    module, inputs = case
    executable = compiled(module, inputs)
    layer: Any = module.layer
    assert [call.operator for call in libraries(executable)] == [Recurrent(operator_of(layer), layer.bidirectional)] * layer.num_layers
    assert all(row.kind != "torch" for row in executable.plan.rows)
    poison(executable)
    for own in (inputs, fresh(inputs)):  # the second call finds what the first left in memory
        agree(executable(*own), module, own)
    assert executable.verify(*inputs).passed


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_layers_of_onnx(kind: str, tmp_path: Path) -> None:
    """Directions are a dimension of the result; gates come in another order, which the importer changes."""
    rows, (steps, batch, inputs, units) = RECURRENCES[kind.lower() if kind != "RNN" else "rnn_tanh"].gates * 5, (4, 3, 6, 5)
    sizes = {"W": (2, rows, inputs), "R": (2, rows, units), "B": (2, 2 * rows)}
    extra: dict[str, Any] = {"linear_before_reset": 1} if kind == "GRU" else {}
    node = onnx.helper.make_node(kind, ["X", *sizes], ["Y"], hidden_size=units, direction="bidirectional", **extra)
    model = model_of([node], {"X": [steps, batch, inputs]}, ["Y"], {name: torch.randn(shape) for name, shape in sizes.items()})
    onnx.save(model, tmp_path / "model.onnx")
    x = torch.randn(steps, batch, inputs)
    with with_layers_by_libraries():
        executable = tilewright.compile(tmp_path / "model.onnx", (x,), "native", vendor=True)
    assert [call.operator.name for call in libraries(executable)] == [kind.lower() if kind != "RNN" else "rnn_tanh"]
    assert executable(x).shape == (steps, 2, batch, units) and executable.verify(x).passed


def operator_of(layer: nn.RNNBase) -> str:
    return layer.mode.lower()


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_16_bits(kind: str) -> None:
    module = Layers(KINDS[kind](6, 8, bidirectional=True), "all", False).to(torch.bfloat16)
    x = torch.randn(5, 3, 6).to(torch.bfloat16)
    executable = compiled(module.eval(), (x,))
    assert len(libraries(executable)) == 1
    for ours, exact in zip(*map(torch.utils._pytree.tree_leaves, (executable(x), module.double()(x.double()))), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=0.03, atol=0.03)


# Which are found


def graph_of(module: nn.Module, *inputs: Tensor) -> Graph:
    return simplify(read(module.eval(), inputs).graph)[0]


def with_cell(
    cell: Cell, states: int, gates: int, others: int = 0, backwards: bool = False, constant: bool = True, inner_bias: bool = False
) -> Graph:
    """A graph of one loop with a cell's body."""
    b = GraphBuilder()

    def weight(*sizes: int) -> Any:
        return b.constant(torch.randn(sizes)) if constant else b.input("w", sizes, "f32")

    x, start = b.input("x", (4, 2, 3), "f32"), [b.input("h", (2, 5), "f32") for _ in range(states)]
    weights = [weight(5 * gates, 3), weight(5 * gates, 5), weight(5 * gates), weight(5 * gates)]
    results = one_direction(b, cell, x, start, weights, backwards, inner_bias, [weight(5) for _ in range(others)])
    return simplify(b.finish(results))[0]


def other_lstm(b: GraphBuilder, states: Sequence[Any], x: Any, w: Any, bias: Any) -> tuple[Any, ...]:
    h, c = lstm_step(b, states, x, w, bias)
    return h, b.pointwise("tanh", c)


def of_both_directions(count: int, in_turn: bool) -> Graph:
    """A graph of pairs of loops that read one value in opposite directions, whose results are multiplied; with `in_turn` the second begins where the
    first ends."""
    b = GraphBuilder()
    x, start = b.input("x", (4, 2, 3), "f32"), b.input("h", (2, 5), "f32")
    results = []
    for _ in range(count):
        h = start
        for backwards in (False, True):
            weights = [b.constant(torch.randn(sizes)) for sizes in ((15, 3), (15, 5), (15,), (15,))]
            final, result = one_direction(b, gru_step, x, [h], weights, backwards, True)
            results.append(result)
            h = final if in_turn else start
    product = results[0]
    for result in results[1:]:
        product = b.pointwise("mul", product, result)
    return simplify(b.finish([product, h]))[0]


FOUND: dict[str, tuple[Callable[[], Graph], list[str]]] = {
    "lstm": (partial(with_cell, lstm_step, 2, 4), ["lstm"]),
    "gru": (partial(with_cell, gru_step, 1, 3, inner_bias=True), ["gru"]),
    "rnn_tanh": (partial(with_cell, simple_step("tanh"), 1, 1), ["rnn_tanh"]),
    "rnn_relu": (partial(with_cell, simple_step("relu"), 1, 1), ["rnn_relu"]),
    "another activation": (partial(with_cell, simple_step("sigmoid"), 1, 1), []),
    "gates that see the cell": (partial(with_cell, peephole_step, 2, 4, 3), []),
    "a reset gate before the product": (partial(with_cell, _gru_step_before, 1, 3), []),
    "another cell": (partial(with_cell, other_lstm, 2, 4), []),
    "a bias inside": (partial(with_cell, lstm_step, 2, 4, inner_bias=True), []),
    "backwards only": (partial(with_cell, lstm_step, 2, 4, backwards=True), []),
    "weights that are inputs": (partial(with_cell, lstm_step, 2, 4, constant=False), []),
    "both directions": (lambda: graph_of(nn.LSTM(3, 5, bidirectional=True), torch.randn(4, 2, 3)), ["lstm of both"]),
    "directions that are read apart": (partial(of_both_directions, 1, False), ["gru of both"]),
    "two layers of one value": (partial(of_both_directions, 2, False), ["gru of both", "gru of both"]),
    "directions one after another": (partial(of_both_directions, 1, True), ["gru"]),
}


@pytest.mark.parametrize("name", FOUND)
def test_which_loops_are_layers(name: str) -> None:
    build, expected = FOUND[name]
    graph = build()
    found = layers_of(graph, graph.constants)
    assert [layer.operator.name + " of both" * layer.operator.bidirectional for layer in found] == expected
    assert any(node.operator == "scan" for node in graph.nodes)
    inputs = [torch.randn(graph.values[name].shape).double().numpy() for name in graph.inputs]
    changed = graph
    for layer in found:
        changed = with_layer(changed, layer)
    assert sum(layer_in(node, changed.constants) is not None for node in changed.nodes) == len(expected)
    for one, other in zip(evaluate(graph, inputs), evaluate(changed, inputs), strict=True):
        torch.testing.assert_close(torch.from_numpy(one), torch.from_numpy(other), rtol=1e-12, atol=1e-12)


def test_a_layer_as_a_loop_of_one_step_computes_the_same() -> None:
    """Also where its states are one value, and a result of its first direction is read before the second direction runs."""

    class Finals(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(3, 5, 2, bidirectional=True)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            result, (h, c) = self.layer(x)
            return result.sum(0), torch.relu(h) + c

    x = torch.randn(4, 2, 3)
    graph = graph_of(Finals(), x)
    changed = graph
    for layer in layers_of(graph, graph.constants):
        changed = with_layer(changed, layer)
    found = [layer_in(node, changed.constants) for node in changed.nodes]
    assert [layer.operator for layer in found if layer is not None] == [Recurrent("lstm", True)] * 2 and not layers_of(changed, changed.constants)
    assert len([node for node in changed.nodes if node.operator in ("scan", "linear")]) == 2
    for one, other in zip(evaluate(graph, [x.double().numpy()]), evaluate(changed, [x.double().numpy()]), strict=True):
        torch.testing.assert_close(torch.from_numpy(one), torch.from_numpy(other), rtol=1e-12, atol=1e-12)


# The choice

MODULE, INPUTS = Layers(nn.GRU(6, 8, batch_first=True, bidirectional=True), "last", False).eval(), (torch.randn(3, 5, 6),)


def decided(records: Records, here: Any, outcome: Callable[[Program], WholeOutcome] | None) -> Program:
    """The program of the module, where whole programs take what the function says; None: as recorded."""
    graph = graph_of(MODULE, *INPUTS)

    def plan(memory: Memory | None = None, policy: Policy = BY_MERGES) -> Program:
        return plan_program(graph, here, 1, numerics=VENDOR, memory=memory, policy=policy)

    measure = None if outcome is None else lambda programs: [outcome(program) for program in programs]
    network = Network(graph, here, 1, "fp32", VENDOR)
    return compared(network, plan(), Planning(plan, Memory(), Memory()), records, MOST, measure)


def by_library(program: Program) -> bool:
    return any(lowered.library is not None for lowered in program.regions)


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("here", [NATIVE, machine("h200")], ids=lambda here: here.name)
def test_only_a_measured_time_of_the_network_chooses_a_library(here: Any, tmp_path: Path) -> None:
    with Records(tmp_path / "records") as records:
        assert not by_library(decided(records, here, None))
        slower = decided(records, here, lambda program: took(2.0 if by_library(program) else 1.0))
        assert not by_library(slower)
        assert [partition.taken for partition in slower.partitions if "by a library" in partition.text] == [False]
        assert any("not predicted by a library" in decision.text and not decision.taken for decision in slower.search)
        records.forget()
        noisy = decided(records, here, lambda program: took(0.9, 0.2) if by_library(program) else took(1.0))
        assert not by_library(noisy)
        records.forget()
        faster = decided(records, here, lambda program: took(1.0 if by_library(program) else 2.0))
        assert by_library(faster) and by_library(decided(records, here, None))  # what was recorded decides
        (taken,) = [partition for partition in faster.partitions if partition.taken]
        assert taken.text.startswith("recurrent layers by a library: predicted ") and "without libraries' operators" in taken.text


def test_layers_that_take_little_are_left_out() -> None:
    graph = graph_of(MODULE, *INPUTS)
    search = plan_program(graph, NATIVE, 1, numerics=VENDOR).search
    (layer,) = [decision for decision in search if decision.kind == LIBRARY]
    assert layer.ways is not None
    seconds = layer.ways.predicted[1]
    assert [partition.policy for partition in alternatives((layer,), 10 * seconds, 3)] == [Policy(taken=frozenset({layer.key}))]
    assert alternatives((layer,), 1000 * seconds, 3) == []
    others = [layer, replace(layer, results=("other",), ways=replace(layer.ways, predicted=(float("inf"), 2 * seconds)))]
    found = [partition.policy.taken for partition in alternatives(others, 10 * seconds, 9)]
    assert [len(keys) for keys in found] == [2, 1, 1] and len({*found}) == 3


def test_without_libraries_nothing_is_said_of_them() -> None:
    search = plan_program(graph_of(MODULE, *INPUTS), NATIVE, 1).search
    assert not [decision for decision in search if decision.kind == LIBRARY]


@pytest.mark.slow
def test_trials_measure_layers_of_a_library(tmp_path: Path) -> None:
    """Both partitions are right, whichever is faster here."""
    executable = tilewright.compile(MODULE, INPUTS, "native", threads=1, vendor=True, trials=2, records=tmp_path / "records")
    texts = [partition.text for partition in executable.plan.partitions]
    assert len(texts) == 2 and all("measured" in text for text in texts) and texts[1].startswith("recurrent layers by a library")
    check(executable, MODULE, INPUTS)


# Artifacts


def test_artifacts_and_explanations(tmp_path: Path) -> None:
    executable = compiled(MODULE, INPUTS)
    executable.save(tmp_path / "artifact")
    loaded = tilewright.load(tmp_path / "artifact")
    assert libraries(loaded) == libraries(executable) and "gru of 5 x 3 x 6 and 3 x 8" in explanation(loaded.image)
    assert "library gru" in {row.schedule for row in loaded.plan.rows}
    check(loaded, MODULE, INPUTS)


CHANGES: dict[str, Callable[[Any], object]] = {
    "another operator": lambda call: call["operator"].update(name="rnn_tanh"),
    "an operator of other numbers": lambda call: call["operator"].update(name="lstm"),
    "one direction": lambda call: call["operator"].update(bidirectional=False),
    "no direction": lambda call: call["operator"].update(bidirectional=2),
    "a weight less": lambda call: call["inputs"].pop(),
    "a weight of another size": lambda call: call["inputs"][3]["sizes"].__setitem__(1, 5),
    "a weight that is not constant": lambda call: call["inputs"][4].update(name=call["inputs"][0]["name"]),
    "a state of another size": lambda call: call["inputs"][1]["sizes"].__setitem__(0, 2),
    "no result": lambda call: call["outs"].clear(),
    "some of the final states": lambda call: call["outs"].append(call["inputs"][1]),
    "the result twice": lambda call: call["outs"].extend(2 * call["outs"]),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("saved") / "artifact"
    compiled(MODULE, INPUTS).save(folder)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", CHANGES)
def test_false_statements_about_layers_are_refused(name: str, saved: dict[str, bytes], tmp_path: Path) -> None:
    manifest = manifest_of(saved)
    CHANGES[name](next(region["library"] for region in manifest["program"]["regions"] if region["library"] is not None))
    with pytest.raises(InvalidArtifact):
        tilewright.load(put(signed(saved, manifest), tmp_path / "artifact"))


def test_calls_of_layers_run_apart_from_kernels_that_need_all_processors() -> None:
    """cuDNN's kernels may wait for all their blocks, as ours do."""
    view = View("a", (1, 1, 1), (1, 1, 1), 0)
    found = accesses(None, [LibraryCall(Recurrent("gru", False), (view,), (view,))], lambda name: Extent(name, 0, 1))  # type: ignore[arg-type]
    assert found[0][1][:2] == [WORKSPACE, COOPERATION]


def test_numbers_of_operators() -> None:
    call = Recurrent("lstm", True)
    rows, (steps, batch, inputs, units) = RECURRENCES["lstm"].gates * 5, (4, 2, 3, 5)
    shapes = [(steps, batch, inputs), *[(batch, units)] * 4, *[(rows, inputs), (rows, units), (rows,)] * 2]
    assert call.results(*shapes) == ((steps, batch, 2 * units), *[(batch, units)] * 4)
    for wrong in range(len(shapes)):
        changed = [tuple(1 + size for size in shape) if at == wrong else shape for at, shape in enumerate(shapes)]
        assert call.results(*changed) is None
    assert call.results(*shapes[:-2]) is None
