"""The ONNX front end: ONNX's own operator tests, networks exported by PyTorch, and models that are damaged or not supported."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import random
import string
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import tilewright
from bench.common import earlier_results
from bench.onnx_node_tests import OURS, PARTLY, REFUSED, WRONG, cases, run_case
from tests.onnx_models import evaluated
from tilewright import zoo
from tilewright.errors import InvalidModel, UnsupportedOperator
from tilewright.frontend.imported import Imported
from tilewright.frontend.onnx_import import import_onnx
from tilewright.graph.reference import evaluate

# --- ONNX's own tests of each operator --------------------------------------------------------------------------------


@functools.cache
def recorded() -> dict[str, str]:
    """Outcomes by case, as the benchmark found them for compiled models."""
    document = earlier_results("onnx_node_tests")
    assert document is not None
    return {result["case"]: result["outcome"] for result in document["results"]}


@pytest.mark.parametrize("letter", string.ascii_lowercase)
def test_operators_as_onnx_defines_them(letter: str) -> None:
    """No case is computed wrongly, and none is computed by less of ours than the benchmark records."""
    better = (WRONG, REFUSED, PARTLY, OURS)
    failures = []
    for name, case in cases().items():
        if name.startswith(f"test_{letter}"):
            run = run_case(case, evaluated)
            if run.kind == WRONG or better.index(run.kind) < better.index(recorded().get(name, REFUSED)):
                failures.append(f"{name}: {run.kind}, recorded {recorded().get(name)}: {run.detail}")
    assert not failures, "\n".join(failures)


def test_the_share_of_onnx_cases_that_our_kernels_compute() -> None:
    counted = [recorded()[name] for name, case in cases().items() if case.is_counted and name in recorded()]
    assert len(counted) > 1400 and counted.count(WRONG) == 0
    assert counted.count(OURS) >= 0.97 * len(counted)
    assert counted.count(OURS) + counted.count(PARTLY) >= 0.98 * len(counted)


# --- recurrent networks beyond ONNX's cases, against PyTorch ----------------------------------------------------------


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("constant", [False, True])
def test_recurrent_layers(kind: str, bidirectional: bool, constant: bool) -> None:
    """Weights in ONNX's gate order, made from PyTorch's, as constants or as inputs of the model."""
    torch.manual_seed(3)
    size, hidden, length, batch, directions = 5, 4, 6, 2, 2 if bidirectional else 1
    layer = getattr(torch.nn, kind)(size, hidden, bidirectional=bidirectional).double()
    order = {"LSTM": [0, 3, 1, 2], "GRU": [1, 0, 2], "RNN": [0]}[kind]  # ONNX's gates in terms of PyTorch's

    def gates(name: str) -> torch.Tensor:
        suffixes = ("_l0", "_l0_reverse")[:directions]
        parts = [getattr(layer, name + suffix).detach() for suffix in suffixes]
        return torch.stack([torch.cat([p.chunk(len(order))[k] for k in order]) for p in parts])

    weights = {"W": gates("weight_ih"), "R": gates("weight_hh"), "B": torch.cat([gates("bias_ih"), gates("bias_hh")], 1)}
    extra: dict[str, Any] = {"linear_before_reset": 1} if kind == "GRU" else {}
    way = "bidirectional" if bidirectional else "forward"
    node = helper.make_node(kind, ["X", "W", "R", "B"], ["Y", "H"], hidden_size=hidden, direction=way, **extra)
    x = torch.randn(length, batch, size, dtype=torch.float64)
    inputs = {"X": x, **({} if constant else weights)}
    model = model_of([node], {name: v for name, v in inputs.items()}, ["Y", "H"], weights if constant else {})
    y, h = evaluated(model, list(inputs.values()))[0](*inputs.values())
    want, final = layer(x)
    final = final[0] if kind == "LSTM" else final
    want = want.reshape(length, batch, directions, hidden).transpose(1, 2)
    np.testing.assert_allclose(y, want.detach().numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(h, final.detach().numpy(), rtol=1e-9, atol=1e-12)


def model_of(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, Any],
    outputs: list[str],
    constants: dict[str, torch.Tensor] | None = None,
    opset: int = 20,
    **more: Any,
) -> onnx.ModelProto:
    """A model; inputs are given as tensors, or as shapes of float32 tensors."""
    infos = []
    for name, value in inputs.items():
        kind = helper.np_dtype_to_tensor_dtype(value.numpy().dtype) if isinstance(value, torch.Tensor) else TensorProto.FLOAT
        infos.append(helper.make_tensor_value_info(name, kind, list(value.shape) if isinstance(value, torch.Tensor) else value))
    results = [onnx.ValueInfoProto(name=name) for name in outputs]
    for result in results:
        result.type.tensor_type.elem_type = TensorProto.DOUBLE if any(getattr(v, "dtype", None) == torch.float64 for v in inputs.values()) else 1
    stored = [numpy_helper.from_array(v.numpy(), name) for name, v in (constants or {}).items()]
    graph = helper.make_graph(nodes, "test", infos, results, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10, **more)


# --- networks ---------------------------------------------------------------------------------------------------------

SMALLER = {"mobilenet_v2": (3, 64, 64), "resnet18": (3, 64, 64), "densenet121": (3, 64, 64)}
FAST = ("lenet5",)
NETWORKS = [
    n if n in FAST else pytest.param(n, marks=pytest.mark.slow)
    for n in (*FAST, "mobilenet_v2", "resnet18", "densenet121", "dlrm", "bert_base", "attention_rnn")
]


def exported(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], **keywords: Any) -> onnx.ModelProto:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(module, inputs, dynamo=True, verbose=False, **keywords)
    assert program is not None
    return program.model_proto


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_exported_by_pytorch(name: str) -> None:
    torch.manual_seed(1)
    network = zoo.NETWORKS[name]
    module = network.build().eval()
    inputs = (torch.randn(1, *SMALLER[name]),) if name in SMALLER else network.example_inputs(1)
    executable = tilewright.compile(exported(module, inputs), inputs, "native")
    got = executable(*inputs)
    with torch.no_grad():
        want = copy.deepcopy(module).double()(*(v.double() if v.is_floating_point() else v for v in inputs))
    for a, b in zip([got] if isinstance(got, torch.Tensor) else got, [want] if isinstance(want, torch.Tensor) else want, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b).abs().max() <= 1e-4 * b.abs().max()


class Shapes(torch.nn.Module):
    """A reshape whose sizes are computed from the input's shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        return torch.softmax(x.reshape(n, c, h * w).transpose(1, 2) @ x.reshape(n, c, -1) / c**0.5, -1)


def test_shape_computations_disappear() -> None:
    x = torch.randn(2, 3, 4, 5)
    dynamic = {0: torch.export.Dim("batch"), 2: torch.export.Dim("height", min=2)}
    imported = import_onnx(exported(Shapes(), (x,), dynamic_shapes=(dynamic,)), [x])
    assert {"matmul", "softmax"} <= {node.operator for node in imported.graph.nodes}
    assert not any(v.dtype == "i64" for v in imported.graph.values.values())
    np.testing.assert_allclose(evaluate(imported.graph, [x])[0], Shapes()(x).numpy(), rtol=1e-5, atol=1e-6)


MODULES = {
    "lstm": (torch.nn.LSTM(5, 4, 2, bidirectional=True, batch_first=True), (2, 6, 5)),
    "gru": (torch.nn.GRU(5, 4, 2, bidirectional=True), (6, 2, 5)),
    "rnn": (torch.nn.RNN(5, 4, nonlinearity="relu"), (6, 2, 5)),
    "transformer": (torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), (2, 5, 16)),
    "transposed": (torch.nn.ConvTranspose2d(3, 4, 3, 2, 1, output_padding=1), (1, 3, 5, 6)),
    "bilinear": (torch.nn.Upsample(scale_factor=2, mode="bilinear"), (1, 2, 4, 5)),
    "aligned": (torch.nn.Upsample(size=(7, 9), mode="bilinear", align_corners=True), (1, 2, 4, 5)),
    "nearest": (torch.nn.Upsample(scale_factor=1.5), (1, 2, 4, 6)),
    "cubic": (torch.nn.Upsample(scale_factor=2, mode="bicubic"), (1, 2, 4, 5)),
    "group": (torch.nn.GroupNorm(2, 4), (2, 4, 5)),
    "response": (torch.nn.LocalResponseNorm(3), (1, 5, 3, 3)),
    "shuffle": (torch.nn.PixelShuffle(2), (1, 8, 3, 3)),
    "ceil": (torch.nn.AvgPool2d(3, 2, 1, ceil_mode=True), (1, 2, 8, 8)),
}


@pytest.mark.in_turns
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("opset", [7, 9, 11, 13, 17, None])
def test_modules_exported_by_pytorch(name: str, opset: int | None) -> None:
    """Operator sets 7 to 17 by the older exporter (those before 13 are converted on reading), the newest by the current one."""
    module, shape = MODULES[name]
    module, x = module.eval(), torch.randn(shape)
    if opset == 7 and isinstance(module, torch.nn.RNNBase):
        pytest.skip("PyTorch writes ConstantFill, an experimental operator that ONNX has removed")
    if opset is None:
        model = exported(module, (x,))
    else:
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                torch.onnx.export(module, (x,), file, opset_version=opset, dynamo=False)  # type: ignore[arg-type]
            except Exception as error:
                pytest.skip(f"PyTorch does not export it: {str(error).splitlines()[0]}")
        model = onnx.load_from_string(file.getvalue())
    with torch.no_grad():
        want = module(x)
    if (name, opset) == ("bilinear", 9):  # PyTorch writes Upsample 9, which cannot place pixels as the module does
        runtime = pytest.importorskip("onnxruntime")
        want = torch.from_numpy(runtime.InferenceSession(model.SerializeToString()).run(None, {model.graph.input[0].name: x.numpy()})[0])
    got = evaluate(import_onnx(model).graph, [x])[0]
    np.testing.assert_allclose(got, (want[0] if isinstance(want, tuple) else want).numpy(), rtol=1e-4, atol=1e-5)


# --- files and their contents -----------------------------------------------------------------------------------------


def relu(**more: Any) -> onnx.ModelProto:
    return model_of([helper.make_node("Relu", ["x"], ["y"], name="rectify")], {"x": [2, 3]}, ["y"], **more)


def test_a_file_a_path_and_a_model_give_the_same(tmp_path: Path) -> None:
    model, x = relu(), torch.randn(2, 3)
    onnx.save(model, tmp_path / "model.onnx")
    for source in (model, tmp_path / "model.onnx", str(tmp_path / "model.onnx")):
        np.testing.assert_array_equal(evaluate(import_onnx(source).graph, [x])[0], x.relu().numpy())


def test_several_outputs_are_a_tuple_in_order() -> None:
    nodes = [helper.make_node("Neg", ["x"], ["a"]), helper.make_node("Abs", ["x"], ["b"])]
    x = torch.randn(2, 3)
    executable = tilewright.compile(model_of(nodes, {"x": [2, 3]}, ["b", "a", "x"]), (x,), "native")
    b, a, same = executable(x)
    assert torch.equal(b, x.abs()) and torch.equal(a, -x) and torch.equal(same, x) and same is not x


def external(tmp_path: Path, location: str = "data.bin", data: bytes | None = None) -> Path:
    """A model file whose weight is stored in another file."""
    weight = torch.randn(3, 4)
    model = model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [2, 3]}, ["y"], {"w": weight})
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "48")):
        tensor.external_data.add(key=key, value=value)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    target = folder / location
    if data is None and not Path(location).is_absolute():
        target.write_bytes(weight.numpy().tobytes())
    elif data:
        target.write_bytes(data)
    return folder / "model.onnx"


def test_external_data_in_the_models_folder_is_read(tmp_path: Path) -> None:
    path = external(tmp_path)
    weight = np.frombuffer((path.parent / "data.bin").read_bytes(), np.float32).reshape(3, 4)
    x = torch.randn(2, 3)
    np.testing.assert_allclose(evaluate(import_onnx(path).graph, [x])[0], x.numpy() @ weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("location", ["../data.bin", "/etc/hostname", "sub/../../data.bin"])
def test_external_data_elsewhere_is_refused(tmp_path: Path, location: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "sub").mkdir()
    (tmp_path / "model").rename(tmp_path / "made")
    path = external(tmp_path, location, b"")
    with pytest.raises(InvalidModel, match="outside its folder"):
        import_onnx(path)


def test_external_data_behind_a_link_is_refused(tmp_path: Path) -> None:
    path = external(tmp_path)
    (path.parent / "data.bin").rename(tmp_path / "data.bin")
    (path.parent / "data.bin").symlink_to(tmp_path / "data.bin")
    with pytest.raises(InvalidModel, match="link"):
        import_onnx(path)


def test_external_data_that_is_missing_or_short_is_refused(tmp_path: Path) -> None:
    path = external(tmp_path)
    data = path.parent / "data.bin"
    data.write_bytes(data.read_bytes()[:40])
    with pytest.raises(InvalidModel, match="shorter"):
        import_onnx(path)
    data.unlink()
    with pytest.raises(InvalidModel, match="missing"):
        import_onnx(path)


@pytest.mark.parametrize("content", [b"", b"not a model", bytes(range(256)) * 4])
def test_a_file_of_another_format_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(InvalidModel, match="model.onnx"):
        import_onnx(path)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9, 0.99])
def test_a_truncated_file_is_refused(tmp_path: Path, fraction: float) -> None:
    model = model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [2, 3]}, ["y"], {"w": torch.randn(3, 50)})
    data = model.SerializeToString()
    path = tmp_path / "model.onnx"
    path.write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises((InvalidModel, UnsupportedOperator)):
        import_onnx(path)


def test_damaged_bytes_never_do_more_than_refuse(tmp_path: Path) -> None:
    """A file with changed bytes is either read, or refused with one of our errors."""
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("MaxPool", ["c"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Shape", ["p"], ["s"], start=0, end=1),
        helper.make_node("Concat", ["s", "m"], ["t"], axis=0),
        helper.make_node("Reshape", ["p", "t"], ["f"]),
        helper.make_node("Softmax", ["f"], ["y"]),
    ]
    constants = {"w": torch.randn(2, 3, 3, 3), "b": torch.randn(2), "m": torch.tensor([-1])}
    data = model_of(nodes, {"x": [1, 3, 8, 8]}, ["y"], constants).SerializeToString()
    generator, path, refused = random.Random(5), tmp_path / "model.onnx", 0
    for _ in range(400):
        changed = bytearray(data)
        for _ in range(generator.choice([1, 2, 4])):
            changed[generator.randrange(len(changed))] = generator.randrange(256)
        path.write_bytes(changed)
        try:
            import_onnx(path)
        except (InvalidModel, UnsupportedOperator):
            refused += 1
    assert 50 < refused < 400


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="not a file"):
        import_onnx(tmp_path / "none.onnx")


@pytest.mark.parametrize(("opset", "hint"), [(6, "oldest"), (99, "newest")])
def test_other_operator_sets_are_refused(opset: int, hint: str) -> None:
    with pytest.raises(InvalidModel, match=hint):
        import_onnx(relu(opset=opset))


def test_a_graph_that_is_not_valid_is_refused() -> None:
    with pytest.raises(InvalidModel, match="not valid ONNX"):
        import_onnx(model_of([helper.make_node("Relu", ["nowhere"], ["y"])], {"x": [2, 3]}, ["y"]))


def test_every_unsupported_node_is_named_at_once() -> None:
    nodes = [
        helper.make_node("RandomUniformLike", ["x"], ["a"], name="draw"),
        helper.make_node("Cast", ["a"], ["b"], to=TensorProto.FLOAT),
        helper.make_node("Multinomial", ["x"], ["c"], name="toss"),
        helper.make_node("Concat", ["b", "b"], ["d"], axis=0),
    ]
    with pytest.raises(UnsupportedOperator) as caught:
        import_onnx(model_of(nodes, {"x": [2, 3]}, ["d", "c"]))
    assert "RandomUniformLike at draw" in str(caught.value) and "Multinomial at toss" in str(caught.value)
    assert caught.value.cause.startswith("2 nodes are")


def test_an_unknown_domain_is_refused() -> None:
    model = model_of([helper.make_node("Special", ["x"], ["y"], domain="com.example", name="mine")], {"x": [2, 3]}, ["y"])
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    with pytest.raises(UnsupportedOperator, match="com.example.Special at mine"):
        import_onnx(model)


def test_a_shape_that_an_example_would_tell_is_refused() -> None:
    model = model_of([helper.make_node("Reshape", ["x", "s"], ["y"])], {"x": [2, 3], "s": torch.tensor([3, 2])}, ["y"])
    with pytest.raises(UnsupportedOperator, match="shape"):
        import_onnx(model)


def test_a_dimension_without_a_size_is_taken_from_the_example() -> None:
    model = model_of([helper.make_node("Relu", ["x"], ["y"])], {"x": ["batch", 3]}, ["y"])
    with pytest.raises(InvalidModel, match=r"dimension 0 \(batch\) of the input x"):
        import_onnx(model)
    imported = import_onnx(model, [torch.randn(7, 3)])
    assert imported.graph.values["x"].shape == (7, 3)
    for wrong in ([torch.randn(7, 4)], [torch.randn(7)], [torch.randn(7, 3).double()], [], [torch.randn(7, 3)] * 2):
        with pytest.raises(InvalidModel):
            import_onnx(model, wrong)


def test_a_shape_that_the_file_leaves_out_is_taken_from_the_example() -> None:
    model = relu()
    model.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(InvalidModel, match="the input x has no shape"):
        import_onnx(model)
    assert import_onnx(model, [torch.randn(4, 5)]).graph.values["x"].shape == (4, 5)
    assert not model.graph.input[0].type.tensor_type.HasField("shape")


def test_functions_of_the_model_are_inlined() -> None:
    body = [helper.make_node("Mul", ["a", "a"], ["t"]), helper.make_node("LeakyRelu", ["t"], ["r"])]
    body[1].attribute.add(name="alpha", type=onnx.AttributeProto.FLOAT, ref_attr_name="slope")
    function = helper.make_function("own", "Square", ["a"], ["r"], body, [helper.make_opsetid("", 20)], ["slope"])
    node = helper.make_node("Square", ["x"], ["y"], domain="own", slope=0.5)
    model = model_of([node], {"x": [2, 3]}, ["y"], functions=[function])
    model.opset_import.append(helper.make_opsetid("own", 1))
    x = torch.randn(2, 3)
    np.testing.assert_allclose(evaluate(import_onnx(model).graph, [x])[0], (x * x).numpy(), rtol=1e-6)


def test_a_branch_over_a_known_condition_is_taken() -> None:
    def branch(operator: str) -> onnx.GraphProto:
        return helper.make_graph([helper.make_node(operator, ["x"], ["r"])], operator, [], [helper.make_tensor_value_info("r", 1, [2, 3])])

    x = torch.randn(2, 3)
    for condition, want in ((True, -x), (False, x.abs())):
        node = helper.make_node("If", ["c"], ["y"], then_branch=branch("Neg"), else_branch=branch("Abs"))
        model = model_of([node], {"x": [2, 3]}, ["y"], {"c": torch.tensor(condition)})
        np.testing.assert_array_equal(evaluate(import_onnx(model).graph, [x])[0], want.numpy())


# --- older operator sets ----------------------------------------------------------------------------------------------


def old(operator: str, opset: int, *more: str, **attributes: Any) -> onnx.ModelProto:
    node = helper.make_node(operator, ["x", *more], ["y"], **attributes)
    return model_of([node], {"x": [2, 3, 4]}, ["y"], {"two": torch.tensor([1.0, 2.0, 2.0])}, opset=opset)


OLDER: dict[str, tuple[onnx.ModelProto, Callable[[torch.Tensor], torch.Tensor]]] = {
    "softmax over all trailing dimensions": (old("Softmax", 11, axis=1), lambda x: x.flatten(1).softmax(1).reshape(x.shape)),
    "clip by attributes": (old("Clip", 7, min=-0.5, max=0.25), lambda x: x.clamp(-0.5, 0.25)),
    "axes as attributes": (old("Unsqueeze", 7, axes=[1]), lambda x: x[:, None]),
    "sums over an attribute": (old("ReduceSum", 11, axes=[0, 2], keepdims=0), lambda x: x.sum((0, 2))),
    "pads as attributes": (old("Pad", 7, pads=[0, 1, 0, 0, 0, 2], value=3.0), lambda x: torch.nn.functional.pad(x, (0, 2, 1, 0), value=3.0)),
    "bounds as attributes": (old("Slice", 9, starts=[1, -2], ends=[9, 9], axes=[1, 2]), lambda x: x[:, 1:, -2:]),
    "scales as an input": (old("Upsample", 9, "two", mode="nearest"), lambda x: x.repeat_interleave(2, 1).repeat_interleave(2, 2)),
    "parts as an attribute": (old("Split", 11, axis=1, split=[3]), lambda x: x),
    "an unchanged operator of the first set": (old("Softsign", 1), torch.nn.functional.softsign),
}


@pytest.mark.parametrize("what", OLDER)
def test_older_operator_sets_are_converted(what: str) -> None:
    model, meaning = OLDER[what]
    before, x = model.SerializeToString(), torch.randn(2, 3, 4)
    np.testing.assert_allclose(evaluate(import_onnx(model).graph, [x])[0], meaning(x).numpy(), rtol=1e-5, atol=1e-6)
    assert model.SerializeToString() == before, "the caller's model is not changed"


def test_a_model_that_cannot_be_converted_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no adapter\nand more")

    monkeypatch.setattr("onnx.version_converter.convert_version", fails)
    onnx.save(old("Softmax", 11, axis=1), tmp_path / "m.onnx")
    with pytest.raises(InvalidModel, match=r"m\.onnx uses operator set 11, which ONNX's version converter cannot convert") as caught:
        import_onnx(tmp_path / "m.onnx")
    assert "\n" not in str(caught.value) and "export it with" in caught.value.remedy


@pytest.mark.parametrize("attributes", [{}, {"axis": 1}, {"axis": 0}, {"axis": -2}], ids=str)
def test_an_old_hardmax_over_several_dimensions_is_refused(attributes: dict[str, int]) -> None:
    with pytest.raises(InvalidModel, match="Hardmax") as caught:
        import_onnx(old("Hardmax", 11, **attributes))
    assert "export it with" in caught.value.remedy


@pytest.mark.parametrize("axis", [2, -1])
def test_an_old_hardmax_over_the_last_dimension_is_read(axis: int) -> None:
    x = torch.randn(2, 3, 4)
    want = torch.nn.functional.one_hot(x.argmax(-1), 4).float()
    np.testing.assert_array_equal(evaluate(import_onnx(old("Hardmax", 11, axis=axis)).graph, [x])[0], want.numpy())


def test_functions_of_older_sets_are_refused() -> None:
    function = helper.make_function("own", "Soft", ["a"], ["r"], [helper.make_node("Softmax", ["a"], ["r"])], [helper.make_opsetid("", 11)])
    model = model_of([helper.make_node("Soft", ["x"], ["y"], domain="own")], {"x": [2, 3]}, ["y"], opset=11, functions=[function])
    model.opset_import.append(helper.make_opsetid("own", 1))
    with pytest.raises(InvalidModel, match="functions of the model's own") as caught:
        import_onnx(model)
    assert "export it with" in caught.value.remedy


def test_damaged_files_of_older_sets_never_do_more_than_refuse(tmp_path: Path) -> None:
    data = OLDER["softmax over all trailing dimensions"][0].SerializeToString()
    generator, path = random.Random(7), tmp_path / "model.onnx"
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(generator.choice([1, 2, 4])):
            changed[generator.randrange(len(changed))] = generator.randrange(256)
        path.write_bytes(changed)
        with contextlib.suppress(InvalidModel, UnsupportedOperator):
            import_onnx(path)


def test_parameters_are_listed() -> None:
    imported: Imported = import_onnx(model_of([helper.make_node("Add", ["x", "w"], ["y"])], {"x": [2, 3]}, ["y"], {"w": torch.randn(3)}))
    assert [p.name for p in imported.parameters] == ["w"]
