"""ONNX models with results whose shapes depend on data: these nodes, and those that read them, run through ONNX's runtimes after the program."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
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
from tests.sample_artifacts import rewrite_manifest
from tilewright.errors import InvalidArtifact, InvalidInput, InvalidModel, NotCompiled, UnsupportedOperator
from tilewright.report.explanation import explanation
from tilewright.tuning.measure import double_precision_outputs
from tilewright.tuning.onnx_module import OnnxModule

pytestmark = pytest.mark.filterwarnings("ignore::tilewright.errors.NotCompiled")

TYPES = {"float": TensorProto.FLOAT, "int64": TensorProto.INT64, "bool": TensorProto.BOOL}


def model_of(nodes: list[Any], outputs: dict[str, str], constants: dict[str, Any] | None = None, shape: Any = (1, 3, 8, 8)) -> Any:
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()]
    results = [helper.make_tensor_value_info(name, TYPES[kind], None) for name, kind in outputs.items()]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)], results, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def detector(shape: Any = (1, 3, 8, 8)) -> Any:
    """Boxes of a convolution, of which non-maximum suppression picks some."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("Reshape", ["c", "rows"], ["b"]),
        helper.make_node("Sigmoid", ["b"], ["boxes"]),
        helper.make_node("ReduceMax", ["boxes"], ["best"], axes=[2], keepdims=0),
        helper.make_node("Unsqueeze", ["best", "one"], ["scores"]),
        helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "overlap", "least"], ["chosen"], name="suppression"),
        helper.make_node("Gather", ["chosen", "two"], ["numbers"], axis=1),
        helper.make_node("Squeeze", ["boxes", "zero"], ["flat"]),
        helper.make_node("Gather", ["flat", "numbers"], ["picked"], axis=0),
        helper.make_node("MatMul", ["picked", "head"], ["classes"]),
        helper.make_node("Shape", ["picked"], ["count"]),
        helper.make_node("Relu", ["c"], ["features"]),
    ]
    random = np.random.default_rng(0)
    constants = {
        "w": random.standard_normal((4, 3, 3, 3)).astype(np.float32), "rows": np.array([1, -1, 4]), "one": np.array([1]), "zero": np.array([0]),
        "most": np.array([5]), "overlap": np.array([0.5], np.float32), "least": np.array([0.3], np.float32), "two": np.array(2),
        "head": random.standard_normal((4, 700)).astype(np.float32),
    }  # fmt: skip
    return model_of(nodes, {"classes": "float", "count": "int64", "features": "float", "chosen": "int64"}, constants, shape)


def check(model: Any, executable: Any, x: torch.Tensor) -> list[np.ndarray]:
    """The results, which are those of ONNX's reference evaluator, or, since that joins what the iterations of a loop return along an axis that there is,
    of ONNX Runtime for the whole model."""
    if any(node.op_type == "Loop" for node in model.graph.node):
        expected = pytest.importorskip("onnxruntime").InferenceSession(model.SerializeToString()).run(None, {"x": x.numpy()})
    else:
        expected = ReferenceEvaluator(model).run(None, {"x": x.numpy()})
    got = executable(x)
    got = [got] if isinstance(got, torch.Tensor) else got
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape and one.numpy().dtype == other.dtype
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-4, atol=1e-5)
    return [one.numpy() for one in got]


def test_the_results_have_the_shapes_of_each_call() -> None:
    with pytest.warns(NotCompiled) as caught:
        executable = tilewright.compile(detector(), torch.ones(1, 3, 8, 8), "native")
    (warning,) = (str(each.message) for each in caught)
    assert "onnx.NonMaxSuppression at suppression: no definition" in warning
    assert "computes it and the 4 nodes that read its result, after the program" in warning
    counts = set()
    for scale in (0.01, 0.3, 1.0, 3.0, -1.0):
        _, count, *_ = check(detector(), executable, scale * torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1)))
        counts.add(tuple(count))
    check(detector(), executable, torch.zeros(1, 3, 8, 8))
    assert all(node.operator != "torch" for node in executable.image.program.graph.nodes)
    assert "with results whose shapes depend on data: NonMaxSuppression, 2 Gather, MatMul, Shape." in " ".join(explanation(executable.image).split())
    assert executable.verify(torch.randn(1, 3, 8, 8)).passed


def test_an_artifact_keeps_the_tail(tmp_path: Path) -> None:
    tilewright.compile(detector(), torch.ones(1, 3, 8, 8), "native").save(tmp_path / "m")
    loaded = tilewright.load(tmp_path / "m")
    check(detector(), loaded, torch.randn(1, 3, 8, 8))
    check(detector(), loaded.clone(), torch.randn(1, 3, 8, 8))


def test_it_may_be_refused() -> None:
    with pytest.raises(UnsupportedOperator, match="NonMaxSuppression at suppression"):
        tilewright.compile(detector(), torch.ones(1, 3, 8, 8), "native", unsupported="error")


def test_free_sizes() -> None:
    executable = tilewright.compile(detector(("batch", 3, "height", 8)), torch.ones(1, 3, 8, 8), "native", dynamic=True)
    for height in (8, 5, 11):
        check(detector(), executable, torch.randn(1, 3, height, 8))


def test_planned_for_an_absent_gpu() -> None:
    executable = tilewright.compile(detector(), torch.ones(1, 3, 8, 8), "h200")
    assert executable.image.signature.tail is not None


def branches(condition: list[Any]) -> Any:
    """`If` whose branches read results of the program, of the tail and of their own, under names that both branches use."""
    then = helper.make_graph(
        [helper.make_node("Gather", ["s", "i"], ["t"], axis=0), helper.make_node("Mul", ["t", "half"], ["y"])], "then",
        [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], [numpy_helper.from_array(np.array(0.5, np.float32), "half")],
    )  # fmt: skip
    inner = helper.make_graph([helper.make_node("Neg", ["t"], ["y2"])], "inner", [], [helper.make_tensor_value_info("y2", TensorProto.FLOAT, None)])
    same = helper.make_graph([helper.make_node("Abs", ["s"], ["y2"])], "same", [], [helper.make_tensor_value_info("y2", TensorProto.FLOAT, None)])
    other = helper.make_graph(
        [
            helper.make_node("Exp", ["s"], ["t"]),
            helper.make_node("If", ["sure"], ["y"], then_branch=inner, else_branch=same),
        ],
        "otherwise", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )  # fmt: skip
    nodes = [
        helper.make_node("Sin", ["x"], ["s"]),
        helper.make_node("ReduceSum", ["s"], ["total"], keepdims=0),
        helper.make_node("Greater", ["total", "nothing"], ["sure"]),
        *condition,
        helper.make_node("If", ["c"], ["z"], then_branch=then, else_branch=other),
        helper.make_node("Relu", ["z"], ["r"]),
    ]
    return model_of(nodes, {"r": "float", "s": "float"}, {"nothing": np.array(0, np.float32), "i": np.array([1, 1, 0])}, [4, 3])


def test_branches_of_a_computed_condition() -> None:
    model = branches([helper.make_node("Not", ["sure"], ["c"])])
    executable = tilewright.compile(model, torch.ones(4, 3), "native")
    shapes = {check(model, executable, sign * torch.rand(4, 3))[0].shape for sign in (1, -1)}
    assert shapes == {(4, 3), (3, 3)}


def test_branches_of_a_condition_that_the_tail_computes() -> None:
    greater = helper.make_node("Greater", ["x", "nothing"], ["g"])
    condition = [
        greater, helper.make_node("NonZero", ["g"], ["where"]), helper.make_node("Size", ["where"], ["n"]),
        helper.make_node("Cast", ["n"], ["c"], to=TensorProto.BOOL),
    ]  # fmt: skip
    model = branches(condition)
    executable = tilewright.compile(model, torch.ones(4, 3), "native")
    shapes = {check(model, executable, sign * torch.rand(4, 3))[0].shape for sign in (1, -1)}
    assert shapes == {(4, 3), (3, 3)}


@pytest.mark.parametrize("computed", [False, True])
def test_entries_of_bfloat16_that_are_not_zero(computed: bool) -> None:
    """ONNX Runtime has no such NonZero; float32 holds the same numbers."""
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("NonZero", ["r" if computed else "x"], ["n"])]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.BFLOAT16, [3, 5])],
        [helper.make_tensor_value_info("n", TensorProto.INT64, None), helper.make_tensor_value_info("r", TensorProto.BFLOAT16, [3, 5])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    executable = tilewright.compile(model, torch.ones(3, 5, dtype=torch.bfloat16), "native")
    for seed in range(3):
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed)).bfloat16()
        x[1, 2], x[0, 0] = 0, torch.finfo(torch.bfloat16).smallest_normal
        found, rectified = executable(x)
        torch.testing.assert_close(rectified, x.relu(), rtol=0, atol=0)
        torch.testing.assert_close(found, (x.relu() if computed else x).nonzero().T, rtol=0, atol=0)


def test_the_file_as_a_module_for_comparisons(tmp_path: Path) -> None:
    torch.manual_seed(0)  # other scores may be so close that the reference in float32 orders them otherwise
    onnx.save(detector(), tmp_path / "d.onnx")
    module = OnnxModule(tmp_path / "d.onnx")
    assert copy.deepcopy(module) is module
    (x,) = module.inputs(lambda shape, dtype: torch.randn(shape, dtype=dtype))
    found = double_precision_outputs(module, (x,))
    assert [y.dtype for y in found] == [torch.float64, torch.int64, torch.float64, torch.int64]
    for one, other in zip(found, ReferenceEvaluator(detector()).run(None, {"x": x.numpy()}), strict=True):
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-4, atol=1e-5)


UNARY = ("Abs", "Neg", "Relu", "Sigmoid", "Exp")


@settings(max_examples=draws(25), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([*UNARY, "Compress", "Add"]), st.integers(0, 7), st.integers(0, 7)), min_size=2, max_size=9),
    st.integers(0, 99),
)
def test_random_models(steps: list[tuple[str, int, int]], seed: int) -> None:
    """Unary operators, additions of equal shapes, and selections, in any order: each value depends on all selections before it."""
    names, kinds, nodes = ["x"], [""], []
    for k, (operator, first, second) in enumerate(steps):
        a = first % len(names)
        b = next((n for n in range(second % len(names), -1, -1) if kinds[n] == kinds[a]), a)
        if operator == "Compress":
            nodes.append(helper.make_node("Greater", [names[a], "nothing"], [f"g{k}"]))
            nodes.append(helper.make_node("Reshape", [f"g{k}", "all"], [f"m{k}"]))
            nodes.append(helper.make_node("Compress", [names[a], f"m{k}"], [f"v{k}"]))
        else:
            nodes.append(helper.make_node(operator, [names[a], names[b]] if operator == "Add" else [names[a]], [f"v{k}"]))
        kinds.append(f"selected {k}" if operator == "Compress" else kinds[a])
        names.append(f"v{k}")
    model = model_of(
        nodes, {name: "float" for name in names[-3:] if name != "x"}, {"nothing": np.array(0.2, np.float32), "all": np.array([-1])}, [5, 4]
    )
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    check(model, tilewright.compile(model, x, "native"), x)


def body_of(nodes: list[Any], states: dict[str, str], outputs: dict[str, str]) -> Any:
    """The body of a loop: the number of the iteration `k` and the condition `go`, states, and results, the first of which is the next condition."""
    inputs = {"k": "int64", "go": "bool", **states}
    infos = [helper.make_tensor_value_info(name, TYPES[kind], [] if name in ("k", "go") else None) for name, kind in inputs.items()]
    return helper.make_graph(nodes, "body", infos, [helper.make_tensor_value_info(name, TYPES[kind], None) for name, kind in outputs.items()])


def test_a_loop_in_the_tail() -> None:
    """Of a known number of iterations over a tensor whose shape depends on data."""
    nodes = [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Add", ["v", "v"], ["w"])]
    body = body_of(nodes, {"v": "int64"}, {"on": "bool", "w": "int64"})
    nodes = [helper.make_node("NonZero", ["x"], ["n"]), helper.make_node("Loop", ["times", "", "n"], ["y"], body=body)]
    model = model_of(nodes, {"y": "int64"}, {"times": np.array(3)}, [4, 3])
    executable = tilewright.compile(model, torch.ones(4, 3), "native")
    for x in (torch.ones(4, 3), torch.eye(4)[:, :3], torch.zeros(4, 3)):
        check(model, executable, x)


def test_a_loop_that_a_result_of_its_body_ends() -> None:
    """Its condition is computed from a tensor whose shape depends on data. What unrolling it began is taken back."""
    body = body_of(
        [helper.make_node("Sub", ["v", "one"], ["w"]), helper.make_node("Relu", ["w"], ["r"]), helper.make_node("NonZero", ["r"], ["n"]),
         helper.make_node("Size", ["n"], ["s"]), helper.make_node("Cast", ["s"], ["on"], to=TensorProto.BOOL)],
        {"v": "float"}, {"on": "bool", "w": "float"},
    )  # fmt: skip
    nodes = [helper.make_node("Abs", ["x"], ["a"]), helper.make_node("Loop", ["times", "", "a"], ["y"], body=body, name="descent")]
    model = model_of(nodes, {"y": "float"}, {"times": np.array(9), "one": np.array(1, np.float32)}, [4, 3])
    with pytest.warns(
        NotCompiled, match="onnx.Loop at descent: its condition is computed from a tensor whose shape depends on data; .* computes it,"
    ):
        executable = tilewright.compile(model, torch.ones(4, 3), "native")
    for scale in (0.5, 2.5, 20.0):
        check(model, executable, torch.full((4, 3), scale))
    assert "depend on data: Loop." in " ".join(explanation(executable.image).split())


def repeated() -> Any:
    """A loop whose condition is computed from the input. It reads a result of the program, a constant, and through a branch another result; `k` and `v`
    are names around it too."""
    then = helper.make_graph([helper.make_node("Add", ["w", "s"], ["u"])], "then", [], [helper.make_tensor_value_info("u", TensorProto.FLOAT, None)])
    other = helper.make_graph(
        [helper.make_node("Sub", ["w", "t"], ["u"])], "other", [], [helper.make_tensor_value_info("u", TensorProto.FLOAT, None)]
    )
    body = body_of(
        [
            helper.make_node("Mul", ["v", "factor"], ["w"]), helper.make_node("Greater", ["k", "two"], ["late"]),
            helper.make_node("If", ["late"], ["z"], then_branch=then, else_branch=other),
            helper.make_node("Concat", ["grown", "z"], ["longer"], axis=0),
            helper.make_node("ReduceSum", ["z"], ["total"], keepdims=0), helper.make_node("Less", ["total", "limit"], ["on"]),
        ],
        {"v": "float", "grown": "float"}, {"on": "bool", "z": "float", "longer": "float", "total": "float"},
    )  # fmt: skip
    nodes = [
        helper.make_node("Exp", ["x"], ["s"]), helper.make_node("Sin", ["x"], ["t"]), helper.make_node("ReduceMean", ["t"], ["mean"], keepdims=0),
        helper.make_node("Less", ["mean", "limit"], ["begin"]),
        helper.make_node("Loop", ["most", "begin", "s", "t"], ["last", "all", "totals"], body=body),
        helper.make_node("Relu", ["all"], ["y"]), helper.make_node("Neg", ["s"], ["negative"]),
    ]  # fmt: skip
    constants = {"factor": np.array(1.25, np.float32), "two": np.array(2), "limit": np.array(25, np.float32), "most": np.array(7)}
    return model_of(nodes, {"y": "float", "last": "float", "totals": "float", "negative": "float"}, constants, [4, 3])


def test_a_loop_that_data_decide(tmp_path: Path) -> None:
    model = repeated()
    executable = tilewright.compile(model, torch.ones(4, 3), "native")
    assert [node.operator for node in executable.image.program.graph.nodes].count("exp") == 1, "the program computes what it can"
    executable.save(tmp_path / "m")
    loaded = tilewright.load(tmp_path / "m")
    counts = set()
    for scale in (-3.0, -1.0, 0.2, 0.7, 2.0):
        x = scale * torch.rand(4, 3, generator=torch.Generator().manual_seed(2))
        counts.add(check(model, executable, x)[2].shape)
        check(model, loaded, x)
    assert len(counts) > 2


def test_a_loop_that_data_decide_for_free_sizes() -> None:
    """Also where the input has so few entries that they might be constants of the model."""
    model = repeated()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    executable = tilewright.compile(model, torch.ones(4, 3), "native", dynamic=True, wait=True)
    for rows in (4, 2, 1, 7):
        check(model, executable, torch.rand(rows, 3))


def test_why_a_loop_is_not_left_to_the_tail_is_not_said_of_others() -> None:
    """A function of the model is not passed to ONNX's runtimes; the reason is that of the loop."""
    function = helper.make_function("own", "G", ["a"], ["y"], [helper.make_node("Relu", ["a"], ["y"])], [helper.make_opsetid("", 13)])
    body = body_of(
        [helper.make_node("G", ["v"], ["w"], domain="own"), helper.make_node("ReduceSum", ["w"], ["s"], keepdims=0),
         helper.make_node("Less", ["s", "limit"], ["on"])],
        {"v": "float"}, {"on": "bool", "w": "float"},
    )  # fmt: skip
    nodes = [helper.make_node("Loop", ["most", "", "x"], ["y"], body=body)]
    model = model_of(nodes, {"y": "float"}, {"most": np.array(5), "limit": np.array(50, np.float32)}, [4, 3])
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.functions.append(function)
    with pytest.raises(UnsupportedOperator, match="its condition is computed from the model's inputs"):
        tilewright.compile(model, torch.ones(4, 3), "native")


@settings(max_examples=draws(10), deadline=None)
@given(st.integers(0, 5), st.floats(-20, 60), st.booleans(), st.integers(0, 99))
def test_random_loops(most: int, limit: float, endless: bool, seed: int) -> None:
    model = repeated()
    for tensor in model.graph.initializer:
        if tensor.name == "limit":
            tensor.CopyFrom(numpy_helper.from_array(np.array(limit, np.float32), "limit"))
        if tensor.name == "most":
            tensor.CopyFrom(numpy_helper.from_array(np.array(most + 1), "most"))
    if endless:
        (loop,) = (node for node in model.graph.node if node.op_type == "Loop")
        loop.input[1] = ""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    check(model, tilewright.compile(model, x, "native"), x)


def repeated_product(times: int, inner: int = 0) -> Any:
    """`times` iterations of v' = v w + x, or of `inner` such ones, and the sum of each v. The iteration's number decides whether it goes on."""
    step = [helper.make_node("Mul", ["v", "w"], ["p"]), helper.make_node("Add", ["p", "x"], ["q"])]
    within = body_of([*step, helper.make_node("Identity", ["go"], ["on"])], {"v": "float"}, {"on": "bool", "q": "float"})
    nodes = step if not inner else [helper.make_node("Loop", ["inner", "", "v"], ["q"], body=within)]
    nodes = [*nodes, helper.make_node("ReduceSum", ["q"], ["sum"], keepdims=0), helper.make_node("Less", ["k", "times"], ["on"])]
    body = body_of(nodes, {"v": "float"}, {"on": "bool", "q": "float", "sum": "float"})
    short = helper.make_node("Loop", ["two", "", "t"], ["short"], body=within)
    nodes = [helper.make_node("Loop", ["times", "", "x"], ["last", "sums"], body=body, name="long"), helper.make_node("Tanh", ["x"], ["t"]), short]
    constants = {"times": np.array(times), "inner": np.array(inner), "two": np.array(2), "w": np.array(0.75, np.float32)}
    return model_of(nodes, {"last": "float", "sums": "float", "short": "float"}, constants, [4, 3])


@pytest.mark.parametrize(("times", "inner"), [(400, 0), (30, 20)], ids=["one", "nested"])
def test_a_loop_that_is_too_long_to_be_unrolled(times: int, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one node of the tail, also if a loop in its body is what is too long; loops after it are unrolled as ever."""
    monkeypatch.setattr("tilewright.frontend.onnx_import._MOST_INLINED", 1000)
    model = repeated_product(times, inner)
    with pytest.warns(NotCompiled, match="1 operator runs .*\n  onnx.Loop at long: .* more than 1,000 nodes, .* computes it, after the program"):
        executable = tilewright.compile(model, torch.ones(4, 3), "native")
    for _ in range(3):
        check(model, executable, torch.randn(4, 3))


def test_a_loop_of_less_than_no_iterations_allows_no_more_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.frontend.onnx_import._MOST_INLINED", 1000)
    body = body_of(
        [helper.make_node("Neg", ["v"], ["q"]), helper.make_node("Identity", ["go"], ["on"])], {"v": "float"}, {"on": "bool", "q": "float"}
    )
    loops = [helper.make_node("Loop", [times, "", given], [made], body=body) for times, given, made in (("none", "x", "y"), ("many", "y", "z"))]
    model = model_of(loops, {"z": "float"}, {"none": np.array(-(2**40)), "many": np.array(10_000_001)}, [3])
    with pytest.raises(InvalidModel, match="more than 1,000 nodes"):
        tilewright.compile(model, torch.ones(3), "native")


@pytest.mark.parametrize("shape", [[], [1], [2, 3]], ids=str)
@pytest.mark.parametrize("kind", ["If", "Loop"])
def test_a_few_numbers_that_decide_are_data(kind: str, shape: list[int]) -> None:
    """A condition that is computed from an input of a few floating-point numbers: every call may have others."""
    if kind == "If":
        then, other = (
            helper.make_graph([helper.make_node(operator, ["x"], ["r"])], operator, [], [helper.make_tensor_value_info("r", TensorProto.FLOAT, None)])
            for operator in ("Neg", "Exp")
        )
        last = [helper.make_node("Greater", ["s", "two"], ["c"]), helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other)]
    else:
        halves = [helper.make_node("Mul", ["v", "half"], ["w"]), helper.make_node("ReduceSum", ["w"], ["t"], keepdims=0),
                  helper.make_node("Greater", ["t", "two"], ["on"])]  # fmt: skip
        body = body_of(halves, {"v": "float"}, {"on": "bool", "w": "float"})
        last = [helper.make_node("Greater", ["s", "two"], ["c"]), helper.make_node("Loop", ["", "c", "x"], ["y"], body=body)]
    nodes = [helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0), *last]
    model = model_of(nodes, {"y": "float"}, {"two": np.array(2, np.float32), "half": np.array(0.5, np.float32)}, shape)
    executable = tilewright.compile(model, torch.ones(shape), "native")
    for scale in (1.0, -1.0, 7.5, 40.0):
        check(model, executable, torch.full(shape, scale))


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("opset", [13, 27])
def test_a_range_is_no_loop_of_the_tail(opset: int, few: bool) -> None:
    """ONNX defines it by one, whose results have an axis more. A few numbers are specialised, for the shape; what is computed from data is not."""
    if opset > onnx.defs.onnx_opset_version():
        pytest.skip(f"this ONNX has no operator set {opset}")
    nodes = [helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0), helper.make_node("Range", ["zero", "s", "step"], ["y"])]
    constants = {"zero": np.array(0, np.float32), "step": np.array(0.5, np.float32)}
    model = model_of(nodes, {"y": "float"}, constants, [2 if few else 20])
    model.opset_import[0].version = opset
    x = torch.full((2,), 1.5) if few else torch.full((20,), 0.125)
    executable = tilewright.compile(model, x, "native")
    assert (executable.image.signature.tail is None) == few
    torch.testing.assert_close(executable(x), torch.arange(6 if few else 5) / 2)
    if not few:
        torch.testing.assert_close(executable(2 * x), torch.arange(10) / 2)


def test_tokens_that_decide_are_data_and_flags_are_not() -> None:
    """Inputs of one dimension and a few integers or truth values are specialised for conditions."""
    then, other = (
        helper.make_graph([helper.make_node(operator, ["f"], ["r"])], operator, [], [helper.make_tensor_value_info("r", TensorProto.FLOAT, None)])
        for operator in ("Neg", "Exp")
    )
    nodes = [
        helper.make_node("ReduceMax", ["tokens"], ["most"], keepdims=0), helper.make_node("Equal", ["most", "end"], ["c"]),
        helper.make_node("Cast", ["tokens"], ["f"], to=TensorProto.FLOAT), helper.make_node("If", ["flag"], ["z"], then_branch=then, else_branch=other),
        helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other),
    ]  # fmt: skip
    inputs = [helper.make_tensor_value_info("tokens", TensorProto.INT64, [1, 4]), helper.make_tensor_value_info("flag", TensorProto.BOOL, [1])]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "yz"]
    graph = helper.make_graph(nodes, "g", inputs, results, [numpy_helper.from_array(np.array(2), "end")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    flag = torch.tensor([True])
    executable = tilewright.compile(model, (torch.tensor([[0, 1, 0, 1]]), flag), "native")
    for tokens in (torch.tensor([[0, 1, 0, 1]]), torch.tensor([[0, 2, 0, 1]])):
        y, z = executable(tokens, flag)
        f = tokens.float()
        torch.testing.assert_close(y, -f if 2 in tokens else f.exp())
        torch.testing.assert_close(z, -f)
    with pytest.raises(InvalidInput, match="compiled for the constant"):
        executable(tokens, ~flag)


def test_a_scan_whose_body_has_shapes_that_depend_on_data() -> None:
    body = helper.make_graph(
        [helper.make_node("NonZero", ["row"], ["n"]), helper.make_node("Size", ["n"], ["c"]), helper.make_node("Add", ["count", "c"], ["next"]),
         helper.make_node("Mul", ["row", "t"], ["scaled"])], "body",
        [helper.make_tensor_value_info("count", TensorProto.INT64, []), helper.make_tensor_value_info("row", TensorProto.FLOAT, [3])],
        [helper.make_tensor_value_info("next", TensorProto.INT64, []), helper.make_tensor_value_info("scaled", TensorProto.FLOAT, [3])],
    )  # fmt: skip
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]), helper.make_node("ReduceMax", ["x"], ["t"], axes=[0], keepdims=0),
        helper.make_node("Scan", ["nothing", "r"], ["total", "rows"], body=body, num_scan_inputs=1),
    ]  # fmt: skip
    model = model_of(nodes, {"total": "int64", "rows": "float"}, {"nothing": np.array(0)}, [4, 3])
    executable = tilewright.compile(model, torch.ones(4, 3), "native")
    for seed in range(3):
        check(model, executable, torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)))


def test_a_loop_that_no_runtime_is_given_is_refused() -> None:
    """Random numbers, of which two readings would differ."""
    body = body_of(
        [helper.make_node("RandomNormalLike", ["v"], ["w"]), helper.make_node("ReduceSum", ["w"], ["t"], keepdims=0),
         helper.make_node("Greater", ["t", "zero"], ["on"])], {"v": "float"}, {"on": "bool", "w": "float"},
    )  # fmt: skip
    model = model_of(
        [helper.make_node("Loop", ["times", "", "x"], ["y"], body=body)], {"y": "float"}, {"times": np.array(3), "zero": np.array(0, np.float32)}
    )
    with pytest.raises(UnsupportedOperator, match="RandomNormalLike|Loop") as caught:
        tilewright.compile(model, torch.ones(1, 3, 8, 8), "native")
    assert "\n" not in str(caught.value)


def changed(change: Any) -> Any:
    """A change of an artifact's manifest: of its tail's model."""

    def of(manifest: dict[str, Any]) -> None:
        tail = manifest["signature"]["tail"]
        model = onnx.load_from_string(base64.b64decode(tail["model"]))
        change(model, tail)
        tail["model"] = base64.b64encode(model.SerializeToString()).decode()

    return of


SECRET = "secret.bin"


def outside(tensor: Any) -> None:
    """Makes a tensor one whose elements are in a file of the working directory."""
    tensor.CopyFrom(numpy_helper.from_array(np.zeros(2, np.float32), "secret"))
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", SECRET
    tensor.ClearField("raw_data")


def sparse(tensor: Any) -> None:
    """Makes a sparse tensor one whose values are in another file."""
    tensor.dims.append(2)
    outside(tensor.values)
    tensor.indices.CopyFrom(numpy_helper.from_array(np.arange(2)))


def constant(model: Any, tail: Any) -> None:
    """Adds a constant whose sparse values are in another file."""
    node = model.graph.node.add(op_type="Constant", output=["secret"])
    sparse(node.attribute.add(name="sparse_value", type=onnx.AttributeProto.SPARSE_TENSOR).sparse_tensor)


def texts(model: Any, tail: Any) -> None:
    """Adds a loop whose body splits text."""
    text = numpy_helper.from_array(np.array(["a b"], object), "text")
    nodes = [
        helper.make_node("Constant", [], ["text"], value=text), helper.make_node("StringSplit", ["text"], ["parts", "number"]),
        helper.make_node("Identity", ["go"], ["on"]),
    ]  # fmt: skip
    model.graph.node.append(helper.make_node("Loop", [], [], body=body_of(nodes, {}, {"on": "bool"})))


BAD = {
    "a loop without a body": changed(lambda model, tail: model.graph.node.append(helper.make_node("Loop", [], []))),
    "a loop over text": changed(texts),
    "text": changed(lambda model, tail: setattr(model.graph.node[0], "op_type", "TfIdfVectorizer")),
    "another domain": changed(lambda model, tail: setattr(model.graph.node[0], "domain", "com.microsoft")),
    "another file": changed(lambda model, tail: outside(model.graph.initializer.add())),
    "sparse weights in another file": changed(lambda model, tail: sparse(model.graph.sparse_initializer.add())),
    "a sparse constant in another file": changed(constant),
    "fewer inputs": changed(lambda model, tail: tail["inputs"].pop()),
    "an output that is not there": changed(lambda model, tail: tail["inputs"].__setitem__(0, 99)),
    "no model": lambda manifest: manifest["signature"]["tail"].update(model="?"),
    "no tail": lambda manifest: manifest["signature"].update(tail=None),
    "a result that is not there": lambda manifest: manifest["signature"]["outputs"][0].update(index=7),
}


@pytest.mark.parametrize("what", BAD)
def test_an_artifact_with_another_tail_is_refused(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / SECRET).write_bytes(bytes(8))
    tilewright.compile(detector(), torch.ones(1, 3, 8, 8), "native").save(tmp_path / "m")
    rewrite_manifest(tmp_path / "m", BAD[what])
    with pytest.raises(InvalidArtifact) as caught:
        tilewright.load(tmp_path / "m")
    assert "\n" not in str(caught.value)
    assert json.dumps(str(caught.value)).isascii()
