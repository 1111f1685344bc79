"""ONNX files that are damaged, require more than any machine has, or are long: a one-line error that names file and node, or a right result."""

from __future__ import annotations

import os
import resource
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import tilewright
from tests.limits import limited
from tilewright.errors import InvalidModel, TilewrightError
from tilewright.frontend.onnx_import import import_onnx
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.partition.plan import plan_program
from tilewright.runtime.loadable import loadable
from tilewright.runtime.memory_plan import plan_memory

HUGE = 1 << 40
X = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
IMAGE = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 6, 6])


def integers(name: str, *values: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def scalar(name: str, value: float, dtype: Any = np.int64) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(value, dtype), name)


def ones(name: str, *shape: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.ones(shape, np.float32), name)


def model_of(
    nodes: Sequence[Any], inputs: Sequence[Any] = (X,), weights: Sequence[Any] = (), output: int = TensorProto.FLOAT, opset: int = 17, **more: Any
) -> Any:
    graph = helper.make_graph(list(nodes), "g", list(inputs), [helper.make_tensor_value_info("y", output, None)], list(weights))
    own = [helper.make_opsetid("own", 1)] if "functions" in more else []
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset), *own], **more)


def node(operator: str, *inputs: str, output: str = "y", **attributes: Any) -> Any:
    return helper.make_node(operator, inputs or ("x",), [output], **attributes)


REFUSED: dict[str, tuple[Any, str]] = {
    "bits of float32": (
        model_of([node("BitwiseAnd", "x", "one")], (X,), [integers("one", 1)], opset=18),
        "bitwise_and is for integers and booleans, not for f32",
    ),
    "shifts of float32": (model_of([node("BitShift", "x", "x", direction="LEFT")]), "shift_left is for integers and booleans, not for f32"),
    "a range of 1e12": (model_of([node("Range", "a", "b", "c")], (), [scalar("a", 0), scalar("b", 10**12), scalar("c", 1)], 7), "1,000,000,000,000"),
    "a range in steps of zero": (model_of([node("Range", "a", "b", "c")], (), [scalar("a", 0), scalar("b", 5), scalar("c", 0)], 7), "a step of zero"),
    "a range that is computed": (
        model_of(
            [node("Pow", "w", "v", output="z"), node("Range", "a", "z", "b")], (), [scalar(n, v) for n, v in zip("wvab", (10, 18, 0, 1), strict=True)]
        ),
        "elements that the file does not hold",
    ),
    "more than a constant": (model_of([node("ConstantOfShape", "s")], (), [integers("s", HUGE, 2)]), "no tensor has the extents"),
    "a constant of a negative extent": (model_of([node("ConstantOfShape", "s")], (), [integers("s", -5)]), "no tensor has the extents -5"),
    "an expansion": (model_of([node("Expand", "x", "s")], weights=[integers("s", HUGE, 2, 3)]), "no tensor has"),
    "an expansion beyond 64 bits": (model_of([node("Expand", "x", "s")], weights=[integers("s", 1 << 62, 2, 3)]), "too large"),
    "repetition": (model_of([node("Tile", "x", "s")], weights=[integers("s", HUGE, 3)]), "no tensor has"),
    "negative repetition": (model_of([node("Tile", "x", "s")], weights=[integers("s", -1, 3)]), "no tensor has the extents -2"),
    "padding": (model_of([node("Pad", "x", "s")], weights=[integers("s", 0, 0, HUGE, 0)]), "no tensor has"),
    "cropping everything": (model_of([node("Pad", "x", "s")], weights=[integers("s", 0, 0, -9, 0)]), "no tensor has the extents -7"),
    "reflection without end": (model_of([node("Pad", "x", "s", mode="reflect")], weights=[integers("s", 0, HUGE, 0, 0)]), "elements that the file"),
    "another number of elements": (model_of([node("Reshape", "x", "s")], weights=[integers("s", 7, -1)]), "reshape of"),
    "negative extents": (model_of([node("Reshape", "x", "s")], weights=[integers("s", -2, -3)]), "no tensor has"),
    "two extents to be found": (model_of([node("Reshape", "x", "s")], weights=[integers("s", -1, -1)]), "reshape of|no tensor has"),
    "an axis twice in a permutation": (model_of([node("Transpose", perm=[0, 0])]), "no permutation"),
    "an axis outside in a permutation": (model_of([node("Transpose", perm=[0, 5])]), "no permutation"),
    "too few axes in a permutation": (model_of([node("Transpose", perm=[0])]), "no permutation"),
    "an axis outside": (model_of([node("Softmax", axis=HUGE)]), "axis"),
    "an axis to join along": (model_of([node("Concat", "x", "x", axis=9)]), "axis 9"),
    "an axis twice": (model_of([node("Unsqueeze", "x", "s")], weights=[integers("s", 0, 0)]), "twice"),
    "a negative part": (model_of([node("Split", "x", "s", axis=1)], weights=[integers("s", -1)]), "parts of"),
    "a step of zero": (model_of([node("Slice", "x", "a", "b", "a", "a")], weights=[integers("a", 0), integers("b", 5)]), "step"),
    "negative strides": (model_of([node("Conv", "x", "w", strides=[-1, 1])], (IMAGE,), [ones("w", 2, 4, 3, 3)]), "stride"),
    "no groups": (model_of([node("Conv", "x", "w", group=0)], (IMAGE,), [ones("w", 2, 4, 3, 3)]), "groups"),
    "dilation": (model_of([node("Conv", "x", "w", dilations=[HUGE, HUGE])], (IMAGE,), [ones("w", 2, 4, 3, 3)]), "no tensor has"),
    "padding of a convolution": (model_of([node("Conv", "x", "w", pads=[HUGE] * 4)], (IMAGE,), [ones("w", 2, 4, 3, 3)]), "no tensor has"),
    "an empty window": (model_of([node("MaxPool", kernel_shape=[0, 0])], (IMAGE,)), "windows of"),
    "statistics of other channels": (model_of([node("BatchNormalization", "x", *"wwww")], (IMAGE,), [ones("w", 3)]), "has the shape"),
    "resizing": (model_of([node("Resize", "x", "", "", "s")], (IMAGE,), [integers("s", 1, 4, HUGE, 6)]), "no tensor has|elements that"),
    "classes": (
        model_of([node("OneHot", "x", "d", "v")], (helper.make_tensor_value_info("x", 7, [4]),), [scalar("d", HUGE), ones("v", 2)]),
        "no tensor has",
    ),
    "an input": (model_of([node("Relu")], (helper.make_tensor_value_info("x", 1, [HUGE, HUGE]),)), "a tensor of shape"),
    "a name of lines": (
        model_of([node("Range", "a", "b", "c", name="*/\n#error\x1b[31m")], (), [scalar("a", 0), scalar("b", HUGE), scalar("c", 1)], 7),
        r"\*/\?#error\?",
    ),
    "text": (model_of([node("Add", "x", "w")], weights=[helper.make_tensor("w", TensorProto.STRING, [1], [b"a"])]), "type object"),  # type: ignore[list-item]
    "a name that nothing defines": (model_of([node("Add", "x", "w")]), "not valid ONNX"),
    "a cycle": (model_of([node("Add", "x", "b", output="a"), node("Relu", "a", output="b"), node("Relu", "b")]), "not valid ONNX"),
    "a name twice": (model_of([node("Relu"), node("Abs")]), "not valid ONNX"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_machine_computes_is_one_line(what: str, tmp_path: Path) -> None:
    model, words = REFUSED[what]
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(TilewrightError, match=words) as caught:
        import_onnx(tmp_path / "m.onnx")
    assert "m.onnx" in str(caught.value) and "\n" not in str(caught.value) and caught.value.remedy


def test_functions_do_not_multiply_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.frontend.onnx_import._MOST_INLINED", 1000)

    def function(k: int, nodes: Sequence[Any]) -> Any:
        return helper.make_function("own", f"F{k}", ["x"], ["y"], nodes, [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)])

    twice = [[node(f"F{k + 1}", output="t", domain="own"), node(f"F{k + 1}", "t", domain="own")] for k in range(19)]
    functions = [function(k, nodes) for k, nodes in enumerate([*twice, [node("Relu")]])]
    with pytest.raises(InvalidModel, match="1,000 nodes"):
        import_onnx(model_of([node("F0", domain="own")], functions=functions))
    itself = [function(0, [node("F0", domain="own")])]
    with pytest.raises(InvalidModel, match="not valid ONNX"):
        import_onnx(model_of([node("F0", domain="own")], functions=itself))


def test_products_of_constants_are_not_computed_while_reading() -> None:
    rows = numpy_helper.from_array(np.ones((60_000, 1), np.float32), "w")
    columns = numpy_helper.from_array(np.ones((1, 60_000), np.float32), "v")
    graph = import_onnx(model_of([node("Add", "w", "v", output="z"), node("ReduceSum", "z", keepdims=0)], (), [rows, columns])).graph
    assert max(tensor.numel() for tensor in simplify(graph)[0].constants.values()) <= 60_000


# External data


def external(folder: Path, **entries: str) -> Path:
    """A model whose weight w of 2x3 is stored in another file, given by the entries."""
    tensor = onnx.TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2, 3], data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    (folder / "m.onnx").write_bytes(model_of([node("Add", "x", "w")], weights=[tensor]).SerializeToString())
    return folder / "m.onnx"


def test_external_data_is_read(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"\0" * 8 + np.arange(6, dtype=np.float32).tobytes())
    path = external(tmp_path, location="data", offset="8", length="24")
    torch.testing.assert_close(tilewright.compile(path)(torch.zeros(2, 3)), torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"location": "data", "offset": "-8"}, "gives no place"),
        ({"location": "data", "length": "-1"}, "gives no place"),
        ({"location": "data", "offset": "eight"}, "gives no place"),
        ({"location": "data", "offset": "9" * 5000}, "gives no place"),
        ({"location": "data", "offset": "²"}, "gives no place"),
        ({"location": "data", "offset": str(1 << 62), "length": "24"}, "shorter than"),
        ({"location": "data", "offset": "4"}, "shorter than"),
        ({"location": "data", "length": "25"}, "takes 25 bytes of 'data' for w, which has 24"),
        ({"location": "data", "length": "20"}, "takes 20 bytes of 'data' for w, which has 24"),
        ({"location": "data\0"}, "outside its folder"),
        ({"location": "da\nta"}, "outside its folder"),
        ({"location": ""}, "outside its folder"),
        ({}, "outside its folder"),
        ({"location": "../data"}, "outside its folder"),
        ({"location": "/etc/hostname"}, "outside its folder"),
        ({"location": "link"}, "link out of its folder"),
        ({"location": "folder"}, "missing"),
        ({"location": "fifo"}, "missing"),
        ({"location": "absent"}, "missing"),
        ({"location": "x" * 5000}, "m.onnx"),
    ],
)
def test_external_data_that_is_elsewhere(entries: dict[str, str], words: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "folder").mkdir(parents=True)
    for place in (tmp_path, model):
        (place / "data").write_bytes(np.ones(6, np.float32).tobytes())
    (model / "link").symlink_to(tmp_path / "data")
    os.mkfifo(model / "fifo")
    with pytest.raises(InvalidModel, match=words) as caught:
        import_onnx(external(model, **entries))
    assert "\n" not in str(caught.value)


def test_data_that_many_tensors_share_is_read_a_few_times_over(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(np.ones(600, np.float32).tobytes())

    def model(count: int) -> Path:
        weights = []
        for number in range(count):
            weights.append(onnx.TensorProto(name=f"w{number}", data_type=TensorProto.FLOAT, dims=[20, 30], data_location=TensorProto.EXTERNAL))
            weights[-1].external_data.add(key="location", value="data")
        (tmp_path / "m.onnx").write_bytes(model_of([node("Identity", "w0")], weights=weights).SerializeToString())
        return tmp_path / "m.onnx"

    import_onnx(model(4))
    with pytest.raises(InvalidModel, match=r"m\.onnx reads its data files more than 4 times over"):
        import_onnx(model(5))


def test_parts_of_sparse_tensors_are_no_way_out(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(np.ones(6, np.float32).tobytes())
    values = onnx.TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[6], data_location=TensorProto.EXTERNAL)
    values.external_data.add(key="location", value="../secret")
    sparse = helper.make_sparse_tensor(values, integers("i", *range(6)), [6])
    constant = helper.make_node("Constant", [], ["w"], sparse_value=sparse)
    (tmp_path / "model").mkdir()
    path = tmp_path / "model" / "m.onnx"
    path.write_bytes(model_of([constant, node("Relu", "w")]).SerializeToString())
    with pytest.raises(InvalidModel, match="outside its folder"):
        import_onnx(path)


# Damage, and unforeseen cases


def test_truncated_files(tmp_path: Path) -> None:
    data = model_of([node("Add", "x", "w")], weights=[ones("w", 2, 3)]).SerializeToString()
    for end in range(0, len(data), 7):
        (tmp_path / "m.onnx").write_bytes(data[:end])
        with pytest.raises(TilewrightError, match=r"m\.onnx"):
            import_onnx(tmp_path / "m.onnx")


def test_an_unexpected_exception_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    onnx.save(model_of([node("Relu")]), tmp_path / "m.onnx")
    torch.export.save(torch.export.export(torch.nn.ReLU(), (torch.ones(2),)), tmp_path / "m.pt2")

    def broken(*_: Any) -> Any:
        raise KeyError("nobody\nforesaw it")

    monkeypatch.setattr("tilewright.graph.builder.GraphBuilder.finish", broken)
    for name in ("m.onnx", "m.pt2"):
        with pytest.raises(InvalidModel, match=f"{name} cannot be read: KeyError") as caught:
            tilewright.compile(tmp_path / name)
        assert isinstance(caught.value.__cause__, KeyError) and "\n" not in str(caught.value)


NORMS = {
    "batch norm": ([node("BatchNormalization", "x", "short", "short", "short", "short")], (1, 4, 6, 6)),
    "layer norm": ([node("LayerNormalization", "x", "short", axis=-1)], (2, 6)),
    "instance norm": ([node("InstanceNormalization", "x", "short", "short")], (1, 4, 6, 6)),
    "longer": ([node("BatchNormalization", "x", "short", "short", "short", "short")], (1, 2, 6, 6)),
}


@pytest.mark.parametrize("name", NORMS)
def test_statistics_and_weights_of_other_shapes_are_refused(name: str) -> None:
    """They are read at each position of the shape to which they belong; longer ones are refused too."""
    nodes, shape = NORMS[name]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    with pytest.raises(TilewrightError, match="shape") as caught:
        tilewright.compile(model_of(nodes, [given], [ones("short", 3)]))
    assert "\n" not in str(caught.value)


# Long graphs


def chain(length: int, *operators: str) -> Any:
    nodes = [node(operators[k % len(operators)], f"t{k}" if k else "x", output=f"t{k + 1}") for k in range(length)]
    nodes[-1].output[0] = "y"
    return model_of(nodes)


def products(length: int) -> Any:
    nodes = [node("MatMul", f"t{k}" if k else "x", "w", output=f"t{k + 1}" if k < length - 1 else "y") for k in range(length)]
    return model_of(nodes, weights=[numpy_helper.from_array(np.eye(3, dtype=np.float32), "w")])


def planned(model: Any) -> Any:
    graph, _ = simplify(import_onnx(model).graph)
    return plan_program(graph, machine("x86-avx2"), 1)


def test_a_chain_of_1200_nodes_is_right() -> None:
    x = torch.rand(2, 3)
    ours = tilewright.compile(chain(1200, "Neg", "Abs", "Sqrt", "Sin"))(x)
    theirs = x
    for k in range(1200):
        theirs = (torch.neg, torch.abs, torch.sqrt, torch.sin)[k % 4](theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize(
    "model",
    [
        chain(1200, "Neg", "Abs"),
        chain(2000, "Transpose"),
        products(400),
        model_of([node("Sum", *["x"] * 1200)]),
        model_of([node("Concat", *["x"] * 1000, axis=0)]),
        model_of([node("Add", f"t{k}" if k else "x", f"t{k}" if k else "x", output=f"t{k + 1}" if k < 299 else "y") for k in range(300)]),
    ],
    ids=["maps", "views", "products", "a wide sum", "a wide concatenation", "doubling"],
)
def test_long_graphs_are_planned(model: Any) -> None:
    """Without a limit on the size of an expression these take hours or overflow the stack; the time limit guards against hangs."""
    began = time.monotonic()
    program = planned(model)
    assert time.monotonic() - began < 300
    deepest = max((len(region.region.nodes) for region in program.regions), default=0)
    assert deepest <= 2000


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("count", [1000, pytest.param(2500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["maps", "rows", "one value read by all"])
def test_thousands_of_nodes_are_planned(kind: str, count: int) -> None:
    """An algorithm that is quadratic in the number of nodes takes minutes for 2500."""
    operators, second = {"maps": (("Add", "Relu"), "w"), "rows": (("Softmax", "Sin"), ""), "one value read by all": (("Add",), "x")}[kind]
    nodes = []
    for k in range(count):
        operator, first = operators[k % len(operators)], f"t{k}" if k else "x"
        nodes.append(node(operator, *((first, second) if operator == "Add" else (first,)), output=f"t{k + 1}"))
    nodes[-1].output[0] = "y"
    with limited(120):
        program = planned(model_of(nodes, weights=[numpy_helper.from_array(np.ones(3, np.float32), "w")]))
        plan_memory(loadable(program))
    assert sum(len(region.region.nodes) for region in program.regions) == count


def test_a_model_beyond_two_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(chain(2, "Neg").SerializeToString())
    try:
        os.truncate(path, 3 << 30)
    except OSError as error:
        pytest.skip(f"no file of three gigabytes here: {error}")
    if path.stat().st_blocks * 512 > 1 << 30:
        pytest.skip("this filesystem has no sparse files")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidModel, match=r"m\.onnx has 3,221,225,472 bytes.*external data") as caught:
        tilewright.compile(path)
    assert "\n" not in str(caught.value) and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20


def test_every_node_that_is_not_supported_is_not_listed() -> None:
    nodes = [node("Det", output=f"d{k}") for k in range(500)]
    with pytest.raises(TilewrightError, match="and 480 more") as caught:
        import_onnx(model_of([*nodes, node("Sum", *(f"d{k}" for k in range(500)))]))
    assert len(str(caught.value)) < 5000


def test_a_chain_read_by_pytorch() -> None:
    class Long(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(50):
                x = (x * 0.5).sin().reshape(3, 2).reshape(2, 3)
            return x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = torch.rand(2, 3)
        torch.testing.assert_close(tilewright.compile(Long(), x)(x), Long()(x), rtol=1e-4, atol=1e-6)


def test_reading_does_not_need_pythons_stack() -> None:
    limit = sys.getrecursionlimit()
    planned(chain(1200, "Neg", "Abs"))
    assert sys.getrecursionlimit() == limit
