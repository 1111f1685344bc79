"""ONNX's If, Loop and Scan against NumPy, and loops that never end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import tilewright
from tests.draws import draws
from tests.onnx_models import evaluated
from tilewright.errors import InvalidModel, NotCompiled, TilewrightError, UnsupportedOperator
from tilewright.frontend.onnx_import import import_onnx

FLOAT = TensorProto.FLOAT


def info(name: str, shape: Any = None, kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def model_of(nodes: list[Any], inputs: list[Any], outputs: list[Any], **weights: np.ndarray) -> onnx.ModelProto:
    stored = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def scan(state: list[int], step: list[int], **attributes: Any) -> onnx.ModelProto:
    """h' = tanh(h + x w), with w from around the body; results h' and h' x."""
    body = helper.make_graph(
        [
            helper.make_node("Mul", ["x", "w"], ["p"]), helper.make_node("Add", ["h", "p"], ["q"]), helper.make_node("Tanh", ["q"], ["new"]),
            helper.make_node("Mul", ["new", "x"], ["out"]),
        ],
        "body", [info("h", state), info("x", step)], [info("new", state), info("out", step)],
    )  # fmt: skip
    node = helper.make_node("Scan", ["h0", "xs"], ["last", "ys"], body=body, num_scan_inputs=1, **attributes)
    double = helper.make_node("Add", ["v", "v"], ["w"])
    return model_of([double, node], [info("h0", state), info("xs", None), info("v", step)], [info("last", state), info("ys", None)])


@pytest.mark.parametrize("direction", [0, 1])
@given(axis=st.integers(-3, 2), out=st.integers(-3, 2), backwards=st.integers(0, 1), length=st.integers(1, 5))
@settings(max_examples=draws(15))
def test_scan(direction: int, axis: int, out: int, backwards: int, length: int) -> None:
    shape = [3, 4]
    generator = np.random.default_rng(length)
    xs = np.moveaxis(generator.standard_normal((length, *shape), np.float32), 0, axis)
    model = scan(shape, shape, scan_input_axes=[axis], scan_output_axes=[out], scan_input_directions=[direction], scan_output_directions=[backwards])
    v, state = generator.standard_normal(shape, np.float32), np.zeros(shape, np.float32)
    tensors = [torch.from_numpy(np.ascontiguousarray(x)) for x in (state, xs, v)]
    wanted = []
    for x in np.moveaxis(xs, axis, 0)[:: -1 if direction else 1]:  # the reference evaluator knows neither directions nor axes
        state = np.tanh(state + x * 2 * v)
        wanted.append(state * x)
    last, ys = evaluated(model, tensors)[0](*tensors)
    np.testing.assert_allclose(last, state, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ys, np.moveaxis(np.stack(wanted[:: -1 if backwards else 1]), 0, out), rtol=1e-5, atol=1e-6)


def test_a_scan_is_compiled() -> None:
    generator = np.random.default_rng(1)
    h, v = (generator.standard_normal((3, 40), np.float32) for _ in range(2))
    model, inputs = scan([3, 40], [3, 40]), (h, generator.standard_normal((7, 3, 40), np.float32), v)
    wanted = ReferenceEvaluator(model).run(None, dict(zip(("h0", "xs", "v"), inputs, strict=True)))
    tensors = tuple(map(torch.from_numpy, inputs))
    for got, want in zip(tilewright.compile(model, tensors, "native")(*tensors), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_constants_of_a_body_are_not_those_around_it() -> None:
    """Weights of a recurrence, and a constant that has the name of another one around the body."""
    generator = np.random.default_rng(3)
    weight, inner, outer = (generator.standard_normal(shape, np.float32) / 4 for shape in ((16, 16), (2, 16), (2, 16)))
    nodes = [
        helper.make_node("MatMul", ["h", "weight"], ["p"]), helper.make_node("Mul", ["x", "c"], ["s"]), helper.make_node("Add", ["p", "s"], ["q"]),
        helper.make_node("Tanh", ["q"], ["new"]), helper.make_node("Identity", ["new"], ["out"]),
    ]  # fmt: skip
    body = helper.make_graph(
        nodes, "body", [info("h", [2, 16]), info("x", [2, 16])], [info("new", [2, 16]), info("out", [2, 16])], [numpy_helper.from_array(inner, "c")]
    )
    scans = [helper.make_node("Add", ["h0", "c"], ["h1"]), helper.make_node("Scan", ["h1", "xs"], ["last", "ys"], body=body, num_scan_inputs=1)]
    inputs, outputs = [info("h0", [2, 16]), info("xs", [5, 2, 16])], [info("last", [2, 16]), info("ys", [5, 2, 16])]
    model = model_of(scans, inputs, outputs, weight=weight, c=outer)
    h, xs = (generator.standard_normal(s, np.float32) for s in ((2, 16), (5, 2, 16)))
    executable = tilewright.compile(model, (torch.from_numpy(h), torch.from_numpy(xs)), "native")
    assert "torch" not in {region.kind for region in executable.image.program.regions}
    last, ys = executable(torch.from_numpy(h), torch.from_numpy(xs))
    state, wanted = (h + outer).astype(np.float64), []
    for x in xs:
        state = np.tanh(state @ weight.astype(np.float64) + x * inner)
        wanted.append(state)
    np.testing.assert_allclose(last, state, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ys, np.stack(wanted), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("old", [1, 2], ids=["where it holds", "where it does not"])
def test_a_scan_whose_state_is_kept_by_a_condition(old: int) -> None:
    """As that of a sequence that has ended: the elements of the step before are elsewhere in memory, and have to be stored again."""
    chosen = ["c", "v", "v"]
    chosen[old] = "h"
    nodes = [helper.make_node("Less", ["x", "h"], ["c"]), helper.make_node("Add", ["h", "x"], ["v"]), helper.make_node("Where", chosen, ["new"]),
             helper.make_node("Identity", ["new"], ["out"])]  # fmt: skip
    body = helper.make_graph(nodes, "body", [info("h", [3, 4]), info("x", [3, 4])], [info("new", [3, 4]), info("out", [3, 4])])
    scan = helper.make_node("Scan", ["h0", "xs"], ["last", "ys"], body=body, num_scan_inputs=1)
    model = model_of([scan], [info("h0", [3, 4]), info("xs", [5, 3, 4])], [info("last", [3, 4]), info("ys", [5, 3, 4])])
    h, xs = torch.randn(3, 4), torch.randn(5, 3, 4)
    executable = tilewright.compile(model, (h, xs), "native")
    assert "loop" in {region.kind for region in executable.image.program.regions}
    last, ys = executable(h, xs)
    states = [h]
    for x in xs:
        before = states[-1]
        states.append(torch.where((x < before) == (old == 1), before, before + x))
    torch.testing.assert_close(last, states[-1])
    torch.testing.assert_close(ys, torch.stack(states[1:]))


def test_a_scan_in_a_scan() -> None:
    """ONNX's runtimes run it. The state of the outer one is that of the inner one after all of its steps; both have weights."""
    generator = np.random.default_rng(4)
    w, v = (generator.standard_normal((4, 4), np.float32) / 2 for _ in range(2))
    inner = helper.make_graph(
        [helper.make_node("MatMul", ["s", "w"], ["p"]), helper.make_node("Add", ["p", "e"], ["t"]), helper.make_node("Identity", ["t"], ["each"])],
        "inner", [info("s", [3, 4]), info("e", [3, 4])], [info("t", [3, 4]), info("each", [3, 4])],
    )  # fmt: skip
    body = helper.make_graph(
        [helper.make_node("MatMul", ["h", "v"], ["m"]), helper.make_node("Scan", ["m", "x"], ["next", "all"], body=inner, num_scan_inputs=1),
         helper.make_node("ReduceSum", ["all"], ["total"], keepdims=0)],
        "body", [info("h", [3, 4]), info("x", [2, 3, 4])], [info("next", [3, 4]), info("total", [])],
    )  # fmt: skip
    node = helper.make_node("Scan", ["h0", "xs"], ["last", "totals"], body=body, num_scan_inputs=1)
    model = model_of([node], [info("h0", [3, 4]), info("xs", [5, 2, 3, 4])], [info("last", [3, 4]), info("totals", [5])], w=w, v=v)
    h, xs = (generator.standard_normal(s, np.float32) for s in ((3, 4), (5, 2, 3, 4)))
    with pytest.warns(NotCompiled, match="a scan or a recurrent layer within a scan; .* computes it, after the program"):
        executable = tilewright.compile(model, (torch.from_numpy(h), torch.from_numpy(xs)), "native")
    last, totals = executable(torch.from_numpy(h), torch.from_numpy(xs))
    state, sums = h.astype(np.float64), []
    for x in xs:
        state, total = state @ v, 0.0
        for element in x:
            state = state @ w + element
            total += state.sum()
        sums.append(total)
    np.testing.assert_allclose(last, state, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(totals, sums, rtol=1e-4, atol=1e-5)


def loop(trip: int) -> onnx.ModelProto:
    """Rows that grow: s' = concat(s, x + i), until i + 1 == 4; results are s and the sums of x + i."""
    body = helper.make_graph(
        [
            helper.make_node("Cast", ["i"], ["f"], to=FLOAT), helper.make_node("Add", ["x", "f"], ["row"]),
            helper.make_node("Concat", ["s", "row"], ["grown"], axis=0), helper.make_node("ReduceSum", ["row"], ["total"], keepdims=0),
            helper.make_node("Less", ["i", "three"], ["on"]),
        ],
        "body", [info("i", [], TensorProto.INT64), info("c", [], TensorProto.BOOL), info("s", None)],
        [info("on", [], TensorProto.BOOL), info("grown", None), info("total", [])],
    )  # fmt: skip
    node = helper.make_node("Loop", ["m", "", "x"], ["y", "sums"], body=body)
    return model_of([node], [info("x", [1, 5])], [info("y", None), info("sums", None)], m=np.array(trip, np.int64), three=np.array(3, np.int64))


@pytest.mark.parametrize("trip", [1, 3, 100])
def test_a_loop_is_unrolled(trip: int) -> None:
    x = np.random.default_rng(trip).standard_normal((1, 5), np.float32)
    tensor = torch.from_numpy(x)
    y, sums = tilewright.compile(loop(trip), tensor, "native")(tensor) if trip == 3 else evaluated(loop(trip), [tensor])[0](tensor)
    rows = np.concatenate([x + i for i in range(min(trip, 4))])
    np.testing.assert_allclose(y, np.concatenate([x, rows]), rtol=1e-6)
    np.testing.assert_allclose(sums, rows.sum(1), rtol=1e-5)


POINTWISE = ("Tanh", "Sigmoid", "Sin", "Neg", "Abs")


def long_loop(steps: Sequence[tuple[str, int]], trip: int, states: int, goes_on: str, kept: int) -> onnx.ModelProto:
    """`trip` iterations over a few states: each of `steps` replaces one by a function of it, its neighbour, the iteration's number, a row of `xs` and
    a value from around. `goes_on`: the condition is passed on, is a constant, or there is none at first. The first `kept` states are results of every
    iteration, after which these change again."""
    nodes = [helper.make_node("Cast", ["i"], ["f"], to=FLOAT), helper.make_node("Mul", ["f", "hundredth"], ["n"])]
    nodes.append(helper.make_node("Gather", ["xs", "i"], ["row"], axis=0))
    names = [f"s{k}" for k in range(states)]
    for step, (function, k) in enumerate(steps):
        k %= states
        parts = [names[k], names[(k + 1) % states], "row", "n", "w"]
        nodes.append(helper.make_node(function, [names[k]], [f"a{step}"]))
        nodes.append(helper.make_node("Sum", [f"a{step}", *(parts[2:] if step % 2 else parts[1:4])], [f"b{step}"]))
        nodes.append(helper.make_node("Mul", [f"b{step}", "half"], [f"c{step}"]))
        names[k] = f"c{step}"
    nodes += [helper.make_node("Identity", ["c" if goes_on == "passed on" else "yes"], ["on"])]
    nodes += [helper.make_node("Identity", [name], [f"t{k}"]) for k, name in enumerate(names)]
    nodes += [helper.make_node("Exp", [f"t{k}"], [f"y{k}"]) for k in range(kept)]
    body = helper.make_graph(
        nodes, "body",
        [info("i", [], 7), info("c", [], 9), *(info(f"s{k}", [3]) for k in range(states))],
        [info("on", [], 9), *(info(f"t{k}", [3]) for k in range(states)), *(info(f"y{k}", [3]) for k in range(kept))],
    )  # fmt: skip
    made = [f"last{k}" for k in range(states)], [f"all{k}" for k in range(kept)]
    loop = helper.make_node("Loop", ["m", "" if goes_on == "none" else "yes", *["x"] * states], [*made[0], *made[1]], body=body)
    outputs = [info(name, [3]) for name in made[0]] + [info(name, [trip, 3]) for name in made[1]]
    weights = {"m": np.array(trip, np.int64), "yes": np.array(True), "half": np.array(0.5, np.float32), "hundredth": np.array(0.01, np.float32)}
    return model_of([helper.make_node("Abs", ["x"], ["w"]), loop], [info("x", [3]), info("xs", [trip, 3])], outputs, **weights)


@settings(max_examples=8, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(POINTWISE), st.integers(0, 2)), min_size=1, max_size=4), trip=st.integers(30, 60),
    states=st.integers(1, 3), goes_on=st.sampled_from(("passed on", "constant", "none")), kept=st.integers(0, 3),
)  # fmt: skip
def test_a_long_loop_is_a_loop_over_one_body(steps: list[tuple[str, int]], trip: int, states: int, goes_on: str, kept: int) -> None:
    model = long_loop(steps, trip, states, goes_on, min(kept, states))
    generator = np.random.default_rng(trip)
    arrays = {"x": generator.standard_normal(3, np.float32), "xs": generator.standard_normal((trip, 3), np.float32)}
    tensors = [torch.from_numpy(array) for array in arrays.values()]
    graph = import_onnx(model, tensors).graph
    assert [node.operator for node in graph.nodes].count("scan") == 1 and len(graph.nodes) < 10
    # without a condition the reference evaluator runs no iteration, where the standard has all of them run
    with_condition = long_loop(steps, trip, states, "constant" if goes_on == "none" else goes_on, min(kept, states))
    wanted = ReferenceEvaluator(with_condition).run(None, arrays)
    for got, reference in zip(evaluated(model, tensors)[0](*tensors), wanted, strict=True):
        np.testing.assert_allclose(got, reference, rtol=1e-4, atol=1e-5)


def test_a_long_loop_is_compiled() -> None:
    trip = 300
    model = long_loop([("Tanh", 0), ("Sin", 1), ("Abs", 0)], trip, 2, "constant", 1)
    x, xs = torch.randn(3), torch.randn(trip, 3)
    wanted = ReferenceEvaluator(model).run(None, {"x": x.numpy(), "xs": xs.numpy()})
    for got, reference in zip(tilewright.compile(model, (x, xs), "native")(x, xs), wanted, strict=True):
        np.testing.assert_allclose(got, reference, rtol=1e-4, atol=1e-5)


def test_long_loops_whose_iterations_differ_are_unrolled() -> None:
    """A state that grows, and a condition and a branch that the iteration's number decides."""
    x = np.random.default_rng(0).standard_normal((1, 5), np.float32)
    tensor = torch.from_numpy(x)
    graph = import_onnx(loop(100), [tensor]).graph
    assert "scan" not in {node.operator for node in graph.nodes}
    branches = {
        "then_branch": helper.make_graph([helper.make_node("Add", ["s", "v"], ["a"])], "then", [], [info("a", [4])]),
        "else_branch": helper.make_graph([helper.make_node("Sub", ["s", "v"], ["b"])], "else", [], [info("b", [4])]),
    }
    body = helper.make_graph(
        [helper.make_node("Less", ["i", "ten"], ["early"]), helper.make_node("If", ["early"], ["new"], **branches), helper.make_node("Identity", ["c"], ["on"])],
        "body", [info("i", [], 7), info("c", [], 9), info("s", [4])], [info("on", [], 9), info("new", [4])],
    )  # fmt: skip
    node = helper.make_node("Loop", ["m", "", "x"], ["y"], body=body)
    constants = {"m": np.array(60, np.int64), "ten": np.array(10, np.int64)}
    model = model_of([node], [info("x", [4]), info("v", [4])], [info("y", [4])], **constants)
    inputs = torch.randn(4), torch.randn(4)
    assert "scan" not in {node.operator for node in import_onnx(model, inputs).graph.nodes}
    (got,) = evaluated(model, inputs)[0](*inputs)
    torch.testing.assert_close(torch.as_tensor(got), inputs[0] - 40 * inputs[1], rtol=1e-4, atol=1e-4)


def test_a_long_loop_within_a_long_loop() -> None:
    """The inner one is unrolled within the outer one's body."""
    inner = helper.make_graph(
        [helper.make_node("Mul", ["t", "half"], ["u"]), helper.make_node("Add", ["u", "v"], ["q"]), helper.make_node("Identity", ["d"], ["go"])],
        "inner", [info("j", [], 7), info("d", [], 9), info("t", [4])], [info("go", [], 9), info("q", [4])],
    )  # fmt: skip
    body = helper.make_graph(
        [helper.make_node("Loop", ["m", "", "s"], ["r"], body=inner), helper.make_node("Tanh", ["r"], ["new"]), helper.make_node("Identity", ["c"], ["on"])],
        "body", [info("i", [], 7), info("c", [], 9), info("s", [4])], [info("on", [], 9), info("new", [4])],
    )  # fmt: skip
    node = helper.make_node("Loop", ["m", "", "x"], ["y"], body=body)
    count, half = np.array(50, np.int64), np.array(0.5, np.float32)
    model = model_of([node], [info("x", [4]), info("v", [4])], [info("y", [4])], m=count, half=half)
    inputs = torch.randn(4), torch.randn(4) * 0.1
    assert [node.operator for node in import_onnx(model, inputs).graph.nodes].count("scan") == 1
    wanted = inputs[0]
    for _ in range(50):
        for _ in range(50):
            wanted = wanted / 2 + inputs[1]
        wanted = wanted.tanh()
    (got,) = evaluated(model, inputs)[0](*inputs)
    torch.testing.assert_close(torch.as_tensor(got), wanted, rtol=1e-4, atol=1e-5)


def test_the_number_of_iterations_may_be_an_input() -> None:
    model = loop(2)
    del model.graph.initializer[0]
    model.graph.input.append(info("m", [], TensorProto.INT64))
    inputs = [torch.ones(1, 5), torch.tensor(3)]
    assert evaluated(model, inputs)[0](*inputs)[0].shape == (4, 5)
    with pytest.raises(UnsupportedOperator, match="its number of iterations depends on the values of the input m: pass example_inputs"):
        import_onnx(model)


def test_a_loop_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.frontend.onnx_import._MOST_INLINED", 500)
    body = helper.make_graph([], "body", [info("i", [], 7), info("c", [], 9), info("s", [3])], [info("c", [], 9), info("s", [3])])
    for first in ("m", ""):
        node = helper.make_node("Loop", [first, "", "x"], ["y"], body=body)
        with pytest.raises(TilewrightError, match="more than 500 nodes") as caught:
            import_onnx(model_of([node], [info("x", [3])], [info("y", [3])], m=np.array(1 << 62, np.int64)))
        assert isinstance(caught.value, InvalidModel) and "\n" not in str(caught.value)


def test_a_loop_whose_condition_is_computed_is_no_part_of_the_graph() -> None:
    body = helper.make_graph(
        [helper.make_node("ReduceSum", ["s"], ["t"], keepdims=0), helper.make_node("Less", ["t", "t"], ["on"])],
        "body", [info("i", [], 7), info("c", [], 9), info("s", [30])], [info("on", [], 9), info("s", [30])],
    )  # fmt: skip
    node = helper.make_node("Loop", ["m", "", "x"], ["y"], body=body)
    imported = import_onnx(model_of([node], [info("x", [30])], [info("y", [30])], m=np.array(3, np.int64)), [torch.ones(30)])
    assert imported.tail is not None and "its condition is computed from the model's inputs" in imported.tail.nodes[0].reason
    assert [node.operator for node in imported.graph.nodes] == ["copy"]
    x = torch.randn(30)
    torch.testing.assert_close(imported.tail.results(lambda number: x), [x])


def test_a_branch_in_a_loop_in_a_scan() -> None:
    """The branch is chosen by the iteration's number; the scan's body reads a value from around it."""
    branches = {
        "then_branch": helper.make_graph([helper.make_node("Add", ["s", "x"], ["a"])], "then", [], [info("a", [4])]),
        "else_branch": helper.make_graph([helper.make_node("Mul", ["s", "v"], ["b"])], "else", [], [info("b", [4])]),
    }
    inner = helper.make_graph(
        [helper.make_node("Equal", ["i", "one"], ["even"]), helper.make_node("If", ["even"], ["new"], **branches), helper.make_node("Identity", ["c"], ["on"])],
        "loop", [info("i", [], 7), info("c", [], 9), info("s", [4])], [info("on", [], 9), info("new", [4])],
    )  # fmt: skip
    body = helper.make_graph(
        [helper.make_node("Loop", ["three", "", "h"], ["next"], body=inner), helper.make_node("Identity", ["next"], ["out"])],
        "scan", [info("h", [4]), info("x", [4])], [info("next", [4]), info("out", [4])],
    )  # fmt: skip
    node = helper.make_node("Scan", ["h0", "xs"], ["last", "ys"], body=body, num_scan_inputs=1)
    constants = {"one": np.array(1, np.int64), "three": np.array(3, np.int64)}
    model = model_of([node], [info("h0", [4]), info("xs", [5, 4]), info("v", [4])], [info("last", [4]), info("ys", [5, 4])], **constants)
    generator = np.random.default_rng(2)
    h, xs, v = (generator.standard_normal(s, np.float32) for s in ((4,), (5, 4), (4,)))
    state, wanted = h, []
    for x in xs:
        for i in range(3):
            state = state + x if i == 1 else state * v
        wanted.append(state)
    tensors = [torch.from_numpy(a) for a in (h, xs, v)]
    last, ys = tilewright.compile(model, tuple(tensors), "native")(*tensors)
    np.testing.assert_allclose(last, state, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ys, np.stack(wanted), rtol=1e-5, atol=1e-6)
