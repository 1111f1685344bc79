"""The ONNX front end: ONNX's own operator tests, networks exported by PyTorch, and models that are damaged or not supported."""

from __future__ import annotations

import copy
import fnmatch
import functools
import io
import random
import string
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import tilewright
from tilewright import zoo
from tilewright.errors import InvalidModel, UnsupportedOperator
from tilewright.frontend.imported import Imported
from tilewright.frontend.onnx_import import import_onnx
from tilewright.graph.reference import evaluate
from tilewright.ir.dtypes import BY_TORCH_NAME, COMPUTED

# --- ONNX's own tests of each operator --------------------------------------------------------------------------------

# Operands that are constants in models but inputs in the tests: they are made constants.
CONSTANT_OPERANDS = {
    "AffineGrid": (1,), "BlackmanWindow": (0,), "CenterCropPad": (1,), "ConstantOfShape": (0,), "CumProd": (1,), "CumSum": (1,), "Dropout": (1, 2),
    "Expand": (1,), "GRU": (4,), "HammingWindow": (0,), "HannWindow": (0,), "LSTM": (4,), "OneHot": (1,), "Pad": (1, 2, 3), "RNN": (4,),
    "Range": (0, 1, 2), "Reshape": (1,), "Resize": (1, 2, 3), "ReverseSequence": (1,), "Slice": (1, 2, 3, 4), "Split": (1,), "Squeeze": (1,),
    "Tile": (1,), "TopK": (1,), "Trilu": (1,), "Unsqueeze": (1,),
}  # fmt: skip

# Unsupported operators: data-dependent shapes, sequences, strings, random numbers, signal processing, quantised products.
OUTSIDE = frozenset(
    "BitCast Col2Im Compress ConvInteger DFT DeformConv FlexAttention ImageDecoder Loop MatMulInteger MaxUnpool MelWeightMatrix NonMaxSuppression "
    "NonZero OptionalGetElement OptionalHasElement QLinearConv QLinearMatMul RandomUniformLike Bernoulli RoiAlign STFT Scan Scatter LinearAttention "
    "SequenceInsert SequenceMap SplitToSequence TensorScatter TfIdfVectorizer Unique Upsample".split()
)
# Uses of supported operators that are not supported.
UNSUPPORTED_CASES = (
    "test_affine_grid_3d_align_corners_expanded",  # `If` over a condition on the data's shape, through a function's own inputs
    "test_dequantizelinear_blocked",
    "test_quantizelinear_blocked_*",
    "test_lstm_with_peepholes",
    "test_maxpool_with_argmax_2d_precomputed_strides",  # positions in column-major order
    "test_resize_*_antialias",
    "test_scatternd_multiply",
    "test_scatternd_max*",
    "test_scatternd_min*",
)


@functools.cache
def cases() -> dict[str, Any]:
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, about overflow in the expected results
        return {case.name: case for case in load_model_tests(kind="node")}


def array(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value


def is_computed(value: Any) -> bool:
    return isinstance(value, (np.ndarray, np.generic)) and BY_TORCH_NAME.get(value.dtype.name) in COMPUTED


def constant_names(case: Any) -> set[str]:
    """Inputs that are made constants: operands of the case's operator, or of the operator whose expanded definition the case is."""
    nodes = [*case.model.graph.node, *cases().get(case.name.partition("_expanded")[0], case).model.graph.node]
    names = set()
    for node in nodes:
        positions = (1,) if node.op_type.startswith("Reduce") else CONSTANT_OPERANDS.get(node.op_type, ())
        names |= {node.input[p] for p in positions if p < len(node.input) and node.input[p]}
    return names


def with_constants(case: Any, inputs: list[Any]) -> tuple[onnx.ModelProto, list[torch.Tensor]]:
    """The model with the operands of CONSTANT_OPERANDS as constants, and the inputs that remain. Operators whose definition is the same in operator
    set 13 are read in that set."""
    model, constants = copy.deepcopy(case.model), constant_names(case)
    version = model.opset_import[0].version
    if len(model.opset_import) == 1 and model.opset_import[0].domain == "" and version < 13:
        schemas = [[onnx.defs.get_schema(n.op_type, v, "").since_version for v in (version, 13)] for n in model.graph.node]
        if all(old == new for old, new in schemas):
            model.opset_import[0].version = 13
    rest = []
    for info, value in zip(list(model.graph.input), inputs, strict=False):
        if info.name in constants:
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), info.name))
            model.graph.input.remove(info)
        else:
            rest.append(torch.from_numpy(np.array(value)) if is_computed(value) else torch.zeros(0))
    return model, rest


def run(model: onnx.ModelProto, inputs: list[torch.Tensor]) -> list[np.ndarray]:
    imported = import_onnx(model, inputs)
    values = evaluate(imported.graph, inputs)
    return [values[output.index] for output in imported.outputs]


def check_case(case: Any) -> None:
    """Raises if the case is refused; raises AssertionError if its result is wrong."""
    for inputs, outputs in case.data_sets:
        model, tensors = with_constants(case, [array(v) for v in inputs])
        got, wanted = run(model, tensors), [np.asarray(array(v)) for v in outputs]
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            np.testing.assert_allclose(a, b, rtol=case.rtol, atol=max(case.atol, 1e-6))


def may_be_refused(case: Any) -> bool:
    """Whether the case is outside the front end's promise."""
    flat = [array(v) for pair in case.data_sets for side in pair for v in side]
    nodes = case.model.graph.node
    versions = {entry.domain: entry.version for entry in case.model.opset_import}
    return (
        not all(is_computed(v) for v in flat)
        or any(node.op_type in OUTSIDE or node.domain for node in nodes)
        or versions.get("", 0) < 13
        or "training" in case.name
        or any(fnmatch.fnmatch(case.name, pattern) for pattern in UNSUPPORTED_CASES)
    )


@pytest.mark.parametrize("letter", string.ascii_lowercase)
def test_operators_as_onnx_defines_them(letter: str) -> None:
    """Every case is computed correctly; one outside the promise may be refused, but never computed wrongly."""
    failures = []
    for name, case in cases().items():
        if name.startswith(f"test_{letter}"):
            try:
                check_case(case)
            except (UnsupportedOperator, InvalidModel) as error:
                if not may_be_refused(case):
                    failures.append(f"{name}: {error}")
            except Exception as error:
                failures.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("operator", ["Conv", "Gemm", "LSTM", "Softmax", "ReduceMean", "Resize", "Slice", "Attention", "TopK"])
def test_the_cases_of_important_operators_exist(operator: str) -> None:
    """Without cases the test above would pass."""
    assert any(node.op_type == operator for case in cases().values() for node in case.model.graph.node)


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
    y, h = run(model, list(inputs.values()))
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
    n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in (*FAST, "mobilenet_v2", "resnet18", "densenet121", "dlrm", "bert_base", "attention_rnn")
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


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("opset", [13, 17, None])
def test_modules_exported_by_pytorch(name: str, opset: int | None) -> None:
    """Operator sets 13 and 17 by the older exporter, the newest by the current one."""
    module, shape = MODULES[name]
    module, x = module.eval(), torch.randn(shape)
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


@pytest.mark.parametrize(("opset", "hint"), [(12, "oldest"), (99, "newest")])
def test_other_operator_sets_are_refused(opset: int, hint: str) -> None:
    with pytest.raises(InvalidModel, match=hint):
        import_onnx(relu(opset=opset))


def test_a_graph_that_is_not_valid_is_refused() -> None:
    with pytest.raises(InvalidModel, match="not valid ONNX"):
        import_onnx(model_of([helper.make_node("Relu", ["nowhere"], ["y"])], {"x": [2, 3]}, ["y"]))


def test_every_unsupported_node_is_named_at_once() -> None:
    nodes = [
        helper.make_node("NonZero", ["x"], ["a"], name="find"),
        helper.make_node("Cast", ["a"], ["b"], to=TensorProto.FLOAT),
        helper.make_node("Unique", ["x"], ["c"], name="distinct"),
        helper.make_node("Concat", ["b", "b"], ["d"], axis=0),
    ]
    with pytest.raises(UnsupportedOperator) as caught:
        import_onnx(model_of(nodes, {"x": [2, 3]}, ["d", "c"]))
    assert "NonZero at find" in str(caught.value) and "Unique at distinct" in str(caught.value)
    assert caught.value.cause.startswith("2 nodes are")


def test_an_unknown_domain_is_refused() -> None:
    model = model_of([helper.make_node("Special", ["x"], ["y"], domain="com.example", name="mine")], {"x": [2, 3]}, ["y"])
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    with pytest.raises(UnsupportedOperator, match="com.example.Special at mine"):
        import_onnx(model)


def test_a_shape_that_depends_on_data_is_refused() -> None:
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


def test_parameters_are_listed() -> None:
    imported: Imported = import_onnx(model_of([helper.make_node("Add", ["x", "w"], ["y"])], {"x": [2, 3]}, ["y"], {"w": torch.randn(3)}))
    assert [p.name for p in imported.parameters] == ["w"]
