"""Mutated ONNX files: models that are grown or slightly changed (`onnx_changes`), and arbitrary ones: fields of a valid model, at any depth, removed,
repeated, exchanged or given values that no exporter writes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from tests.fuzz.harness import Case
from tests.fuzz.onnx_changes import changed, grown
from tests.fuzz.planning import prepare, read_and_plan

__all__ = ["cases", "prepare", "run"]

INTEGERS = (0, 1, -1, 2, 3, 7, -7, 31, 99, 255, 1 << 16, 1 << 31, 1 << 40, (1 << 62) + 1, -(1 << 63), (1 << 63) - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-40, 3e38, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "x", "w", "y", "\0", "..", "../../etc/passwd", "/etc/passwd", "data", "*/\n#error", "%s%n", "é" * 300, "Relu", "ai.onnx", "9" * 40, "-1")


def run() -> None:
    read_and_plan("model.onnx")


def _weight(name: str, *shape: int) -> TensorProto:
    return numpy_helper.from_array(np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape), name)


def _integers(name: str, *values: int) -> TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def _model(nodes: list[Any], shape: list[int], weights: list[TensorProto], functions: list[Any] | None = None) -> onnx.ModelProto:
    inputs, outputs = helper.make_tensor_value_info("x", 1, shape), helper.make_tensor_value_info("y", 1, None)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    graph = helper.make_graph(nodes, "g", [inputs], [outputs], weights)
    return helper.make_model(graph, opset_imports=opsets, functions=functions or [], ir_version=9)


@cache
def _seeds() -> tuple[onnx.ModelProto, ...]:
    node = helper.make_node
    images = _model(
        [
            node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1], strides=[1, 1], kernel_shape=[3, 3]),
            node("BatchNormalization", ["c", "b", "b", "b", "s"], ["n"]),
            node("Relu", ["n"], ["r"]),
            node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
            node("Resize", ["p", "", "", "sizes"], ["z"], mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
            node("Pad", ["z", "pads"], ["q"]),
            node("GlobalAveragePool", ["q"], ["a"]),
            node("Flatten", ["a"], ["f"]),
            node("Gemm", ["f", "v"], ["y"], transB=1),
        ],
        [1, 3, 8, 8],
        [_weight("w", 4, 3, 3, 3), _weight("b", 4), numpy_helper.from_array(np.ones(4, np.float32), "s"), _weight("v", 5, 4),
         _integers("sizes", 1, 4, 8, 8), _integers("pads", 0, 0, 1, 1, 0, 0, 1, 1)],
    )  # fmt: skip
    rows = _model(
        [
            node("Shape", ["x"], ["shape"]),
            node("Gather", ["shape", "i"], ["batch"], axis=0),
            node("Concat", ["batch", "rest"], ["wanted"], axis=0),
            node("LayerNormalization", ["x", "scale"], ["n"]),
            node("MatMul", ["n", "w"], ["m"]),
            node("Reshape", ["m", "wanted"], ["h"]),
            node("Transpose", ["h"], ["t"], perm=[0, 2, 1, 3]),
            node("Softmax", ["t"], ["s"], axis=-1),
            node("Slice", ["s", "one", "four", "one"], ["l"]),
            node("ReduceMean", ["l", "one"], ["r"], keepdims=0),
            node("Split", ["r"], ["a", "b"], axis=1, num_outputs=2),
            node("Add", ["a", "a"], ["d"]),
            node("Cast", ["d"], ["y"], to=1),
        ],
        [2, 4, 6],
        [_integers("i", 0), _integers("rest", 4, 2, 3), _weight("scale", 6), _weight("w", 6, 6), _integers("one", 1), _integers("four", 4)],
    )
    branch = helper.make_graph([node("Tanh", ["x"], ["t"])], "then", [], [helper.make_tensor_value_info("t", 1, None)])
    other = helper.make_graph([node("Neg", ["x"], ["e"])], "else", [], [helper.make_tensor_value_info("e", 1, None)])
    body = [node("Mul", ["a", "a"], ["s"]), node("HardSigmoid", ["s"], ["b"], alpha=0.3)]
    function = helper.make_function("own", "Twice", ["a"], ["b"], body, [helper.make_opsetid("", 18)])
    control = _model(
        [
            node("If", ["c"], ["i"], then_branch=branch, else_branch=other),
            node("Twice", ["i"], ["f"], domain="own"),
            node("LSTM", ["f", "W", "R"], ["l", "last"], hidden_size=2),
            node("Squeeze", ["last", "zero"], ["q"]),
            node("Range", ["start", "limit", "delta"], ["g"]),
            node("Expand", ["g", "wide"], ["e"]),
            node("Cast", ["e"], ["k"], to=1),
            node("Add", ["q", "k"], ["o"]),
            node("Einsum", ["o", "o"], ["m"], equation="ij,ij->i"),
            node("Sqrt", ["m"], ["y"]),
        ],
        [3, 2, 4],
        [numpy_helper.from_array(np.array(True), "c"), _weight("W", 1, 8, 4), _weight("R", 1, 8, 2), _integers("zero", 0),
         *(numpy_helper.from_array(np.array(v, np.int64), n) for n, v in (("start", 0), ("limit", 2), ("delta", 1))), _integers("wide", 2, 2)],
        [function],
    )  # fmt: skip
    outside = onnx.ModelProto()
    outside.CopyFrom(images)
    for tensor, offset in ((outside.graph.initializer[0], 0), (outside.graph.initializer[3], 432)):
        length = len(tensor.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "data"), ("offset", str(offset)), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)
    return images, rows, control, outside


def _messages(message: Any) -> Iterator[Any]:
    yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if field.is_repeated else (value,):
                yield from _messages(inner)


def _hostile(field: FieldDescriptor, chance: random.Random) -> Any:
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return chance.choice(FLOATS)
    if field.type == FieldDescriptor.TYPE_STRING:
        return chance.choice(TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return chance.choice((b"", b"\xff" * 7, b"\0" * 48, b"linear", b"ij,jk->ik", chance.randbytes(16)))
    if field.type == FieldDescriptor.TYPE_ENUM:
        return chance.choice(field.enum_type.values).number
    value = chance.choice(INTEGERS)
    narrow = field.type in (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_SINT32)
    if field.type in (FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_UINT32):
        return abs(value) & 0xFFFFFFFF
    return (value + (1 << 31)) % (1 << 32) - (1 << 31) if narrow else value


def _mutate(model: onnx.ModelProto, chance: random.Random) -> None:
    """One change of one field of one message."""
    message = chance.choice([m for m in _messages(model) if m.ListFields()])
    field, value = chance.choice(message.ListFields())
    if not field.is_repeated:
        if field.type == FieldDescriptor.TYPE_MESSAGE or chance.random() < 0.2:
            message.ClearField(field.name)
        else:
            setattr(message, field.name, _hostile(field, chance))
        return
    position, way = chance.randrange(len(value)), chance.randrange(4)
    if way == 0:
        del value[position]
    elif way == 1:
        copies = [value[position]] * chance.choice((1, 1, 2, 40))
        value.extend(copies)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        other = chance.randrange(len(value))
        held = type(value[position])()
        held.CopyFrom(value[position])
        value[position].CopyFrom(value[other])
        if way == 2:
            value[other].CopyFrom(held)
    else:
        value[position] = chance.choice(list(value)) if way == 2 else _hostile(field, chance)


def _added(model: onnx.ModelProto, chance: random.Random) -> None:
    """Adds a node before the last: any operator of the standard, with existing operands and hostile attribute values."""
    schema = chance.choice(_schemas())
    names = ["x", "", *(t.name for t in model.graph.initializer), *(o for n in model.graph.node[:-1] for o in n.output)]
    node = helper.make_node(schema.name, [chance.choice(names) for _ in range(chance.randrange(1, 5))], ["added"])
    for name, attribute in schema.attributes.items():
        if chance.random() < 0.5:
            kind = str(attribute.type).rpartition(".")[2]
            few = range(chance.randrange(1, 5))
            made = {
                "INT": lambda: chance.choice(INTEGERS), "INTS": lambda: [chance.choice(INTEGERS) for _ in few], "FLOAT": lambda: chance.choice(FLOATS),
                "FLOATS": lambda: [chance.choice(FLOATS) for _ in few], "STRING": lambda: chance.choice(TEXTS),
            }.get(kind)  # fmt: skip
            if made is not None:
                node.attribute.append(helper.make_attribute(name, made()))
    last = model.graph.node[-1]
    model.graph.node.insert(len(model.graph.node) - 1, node)
    if last.input:
        model.graph.node[-1].input[chance.randrange(len(last.input))] = "added"


@cache
def _schemas() -> tuple[Any, ...]:
    known = (schema for schema in onnx.defs.get_all_schemas() if schema.domain == "" and schema.since_version <= 18)
    return tuple(sorted(known, key=lambda schema: str(schema.name)))


def _wild(model: onnx.ModelProto, chance: random.Random) -> None:
    if chance.random() < 0.3:
        _added(model, chance)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8)) if chance.random() < 0.9 else 0):
        _mutate(model, chance)


def _case(which: int, number: int) -> Case:
    """Two thirds mostly pass the first checks; the rest is changed arbitrarily in fields or bytes."""
    chance = random.Random(number)
    kind = chance.random()
    model = onnx.ModelProto()
    model.CopyFrom(_seeds()[which] if kind > 0.45 else grown(chance))
    if kind > 0.65:
        _wild(model, chance)
    else:
        for _ in range(chance.choice((0, 0, 1)) if kind <= 0.45 else chance.choice((1, 1, 2))):
            changed(model, chance)
    data = bytearray(model.SerializeToString())
    if chance.random() < 0.03:
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    if chance.random() < 0.01:
        del data[chance.randrange(len(data)) :]
    return {"model.onnx": bytes(data), "data": _weight("data", 128).raw_data}


def cases() -> st.SearchStrategy[Case]:
    return st.builds(_case, st.integers(0, 3), st.integers(0, (1 << 48) - 1))
