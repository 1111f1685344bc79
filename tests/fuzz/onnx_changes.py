"""ONNX models that pass the first checks: `grown` node by node with fitting shapes, or `changed` in one place to something of the same kind."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
UNARY = tuple(
    "Relu Sigmoid Tanh Exp Neg Abs Erf Sin Cos Tan Asin Acos Atan Sinh Cosh Asinh Softplus Softsign HardSigmoid HardSwish Elu LeakyRelu Selu Celu Mish "
    "ThresholdedRelu Floor Ceil Sign Round Sqrt Log Reciprocal Identity".split()
)
BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "Mean", "Sum")
POOLS = ("MaxPool", "AveragePool", "LpPool")
REDUCTIONS = tuple(f"Reduce{name}" for name in "Sum Mean Max Min Prod L1 L2 SumSquare LogSum LogSumExp".split())
FAMILIES = (UNARY, BINARY, POOLS, REDUCTIONS, ("Softmax", "LogSoftmax", "Hardmax"), ("GlobalAveragePool", "GlobalMaxPool"), ("ArgMax", "ArgMin"))
"""Operators that may replace each other."""
ODD = (0, -1, 3, 7, -7, 31, 1 << 31, 1 << 40, -(1 << 63), (1 << 63) - 1)


class Growing:
    """A model under construction: `values` have known shapes and types."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[TensorProto] = []
        shape = chance.choice(((1, 3, 8, 8), (2, 4, 5, 5), (1, 8, 4, 4), (2, 3, 4), (3, 5), (4, 8), (7,), (2, 3, 1, 4), (1, 16, 3, 3)))
        self.input = helper.make_tensor_value_info("x", FLOAT, shape)
        self.values: dict[str, tuple[int, ...]] = {"x": tuple(shape)}
        self.integers: dict[str, tuple[int, ...]] = {}

    def odd(self, value: int) -> int:
        return self.chance.choice(ODD) if self.chance.random() < 0.03 else value

    def axis(self, shape: tuple[int, ...]) -> int:
        return self.odd(self.chance.randrange(-len(shape), len(shape)) if shape else 0)

    def floats(self, *shape: int) -> str:
        numbers = np.random.default_rng(self.chance.randrange(1 << 30)).normal(size=shape)
        special = self.chance.choice((0.0, -1.0, 1e-40, 1e30, np.inf, np.nan))
        if self.chance.random() < 0.05 and numbers.size:
            numbers.flat[0] = special
        return self._weight(numbers.astype(np.float32))

    def ints(self, *values: int) -> str:
        return self._weight(np.array([max(min(self.odd(value), (1 << 63) - 1), -(1 << 63)) for value in values], np.int64))

    def _weight(self, array: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(array, f"w{len(self.weights)}"))
        return self.weights[-1].name

    def add(self, operator: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        names = [f"v{len(self.nodes)}{'abc'[i]}" for i in range(outputs)]
        self.nodes.append(helper.make_node(operator, inputs, names, **attributes))
        return names[0]

    def model(self, outputs: list[str]) -> onnx.ModelProto:
        infos = [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "g", [self.input], infos, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)

    def infer(self) -> None:
        """Infers the results of the last nodes."""
        try:
            inferred = onnx.shape_inference.infer_shapes(self.model([]))
        except Exception:  # an odd parameter somewhere, which the reader must handle
            return
        for info in inferred.graph.value_info:
            kind = info.type.tensor_type
            if all(d.HasField("dim_value") for d in kind.shape.dim) and kind.HasField("shape"):
                shape = tuple(d.dim_value for d in kind.shape.dim)
                if min(shape, default=0) < 0 or prod(max(extent, 1) for extent in shape) >= 1 << 14:
                    continue
                if kind.elem_type == FLOAT:
                    self.values[info.name] = shape
                elif kind.elem_type == INT64:
                    self.integers[info.name] = shape


def grown(chance: random.Random) -> onnx.ModelProto:
    """A model of two to nine nodes, some with odd parameters."""
    g = Growing(chance)
    last = "x"
    for _ in range(chance.randrange(2, 10)):
        value = chance.choice([last, last, last, *g.values])
        shape = g.values.get(value, ())
        kinds = [kind for kind, fits in _KINDS if fits(len(shape))]
        made = chance.choice(kinds)(g, chance, value, shape)
        g.infer()
        last = made if made in g.values else last
    unread = [name for node in g.nodes for name in node.output if name in g.values] or ["x"]
    outputs = list(dict.fromkeys([last if last != "x" else unread[-1], *(chance.choice(unread) for _ in range(chance.choice((0, 0, 1))))]))
    if outputs == ["x"]:
        outputs = [g.add("Relu", "x")]
    return g.model(outputs)


Kind = Callable[[Growing, random.Random, str, tuple[int, ...]], str]


def _unary(g: Growing, c: random.Random, v: str, s: tuple[int, ...]) -> str:
    return g.add(c.choice(UNARY), v)


def _binary(g: Growing, c: random.Random, v: str, s: tuple[int, ...]) -> str:
    alike = [name for name, shape in g.values.items() if shape == s]
    few = tuple(1 if c.random() < 0.4 else extent for extent in s[c.randrange(len(s) + 1) :])
    pair = [v, c.choice(alike) if c.random() < 0.5 else g.floats(*few)]
    c.shuffle(pair)
    return g.add(c.choice(BINARY), *pair)


def _chosen(g: Growing, c: random.Random, v: str, s: tuple[int, ...]) -> str:
    return g.add("Where", g.add(c.choice(("Less", "Greater", "GreaterOrEqual", "Equal")), v, g.floats(*s[-1:])), v, g.floats())


def _transpose(g: Growing, c: random.Random, v: str, s: tuple[int, ...]) -> str:
    return g.add("Transpose", v, perm=c.sample(range(len(s)), len(s)))


def _reshape(g: Growing, c: random.Random, v: str, s: tuple[int, ...]) -> str:
    cut = c.randrange(len(s) + 1)
    return g.add("Reshape", v, g.ints(*c.choice(((-1,), (*s, 1), (prod(s[:cut]), prod(s[cut:])), (*(0 for _ in s[:cut]), -1), tuple(reversed(s))))))


def _reduction(g: Growing, c: random.Random, v: str, s: tuple[int, ...]) -> str:
    axes = g.ints(*c.sample(range(len(s)), c.randrange(1, len(s) + 1)))
    if (operator := c.choice(REDUCTIONS)) == "ReduceSum" or c.random() < 0.8:
        return g.add(operator, v, axes, keepdims=c.randrange(2))
    return g.add(operator, v, keepdims=c.randrange(2))


def _along(g: Growing, c: random.Random, v: str, s: tuple[int, ...]) -> str:
    axis = g.axis(s)
    way = c.randrange(9)
    if way == 0:
        return g.add("CumSum", v, g.ints(axis), exclusive=c.randrange(2), reverse=c.randrange(2))
    if way == 1:
        return g.add("Concat", v, c.choice((v, g.floats(*s))), axis=axis)
    if way == 2:
        return g.add("Split", v, outputs=2, axis=axis, num_outputs=2)
    if way == 3:
        extent = s[axis] if -len(s) <= axis < len(s) else 1
        return g.add("Gather", v, g.ints(*(c.randrange(-extent, extent) for _ in range(c.randrange(1, 4))) if extent else (0,)), axis=axis)
    if way == 4:
        return g.add("TopK", v, g.ints(1 + c.randrange(2)), outputs=2, axis=axis, largest=c.randrange(2))
    if way == 5:
        return g.add("Cast", g.add(c.choice(("ArgMax", "ArgMin")), v, axis=axis, keepdims=c.randrange(2)), to=FLOAT)
    if way == 6:
        return g.add("LayerNormalization", v, g.floats(*s[-1:]), axis=-1, epsilon=c.choice((1e-5, 0.0, 1.0)))
    if way == 7:
        return g.add("LpNormalization", v, axis=axis, p=c.choice((1, 2)))
    return g.add(c.choice(("Softmax", "LogSoftmax", "Hardmax")), v, axis=axis)


def _slice(g: Growing, c: random.Random, v: str, s: tuple[int, ...]) -> str:
    axis, step = c.randrange(len(s)), c.choice((1, 1, 2, -1, -2))
    first, last = sorted((c.randrange(-1, s[axis] + 2) for _ in range(2)), reverse=step < 0)
    return g.add("Slice", v, g.ints(first), g.ints(last), g.ints(axis), g.ints(step))


def _sized(g: Growing, c: random.Random, v: str, s: tuple[int, ...]) -> str:
    way = c.randrange(6)
    if way == 0:
        return g.add("Expand", v, g.ints(*(c.choice((1, 2)), *s)))
    if way == 1:
        return g.add("Tile", v, g.ints(*(c.choice((1, 2, 0)) for _ in s)))
    if way == 2:
        return g.add("Unsqueeze", v, g.ints(c.randrange(len(s) + 1)))
    if way == 3:
        return g.add("Squeeze", v)
    if way == 4:
        return g.add("Flatten", v, axis=g.axis(s))
    pads = g.ints(*(c.choice((0, 0, 1, 2, -1)) for _ in range(2 * len(s))))
    mode = c.choice(("constant", "reflect", "edge", "wrap"))
    return g.add("Pad", v, pads, *((g.floats(),) if mode == "constant" and c.random() < 0.5 else ()), mode=mode)


def _typed(g: Growing, c: random.Random, v: str, s: tuple[int, ...]) -> str:
    kind = c.choice((TensorProto.DOUBLE, TensorProto.INT32, INT64, TensorProto.BOOL, TensorProto.FLOAT16, TensorProto.UINT8, TensorProto.BFLOAT16))
    inner = g.add("Cast", v, to=kind)
    if kind in (TensorProto.DOUBLE, TensorProto.INT32, INT64):
        inner = g.add(c.choice(("Neg", "Abs", "Identity")), inner)
    return g.add("Cast", inner, to=FLOAT)


def _shaped(g: Growing, c: random.Random, v: str, s: tuple[int, ...]) -> str:
    """Reshapes to a computed shape."""
    shape = g.add("Shape", v)
    return g.add(
        "Reshape",
        v,
        g.add("Concat", g.ints(*c.choice(((1,), (-1,), (s[0],)))), g.add("Slice", shape, g.ints(c.randrange(2)), g.ints(len(s))), axis=0),
    )


def _matmul(g: Growing, c: random.Random, v: str, s: tuple[int, ...]) -> str:
    width = c.choice((1, 3, 8, 17))
    if len(s) == 2 and c.random() < 0.5:
        across, turned = c.randrange(2), c.randrange(2)
        inner = s[0] if across else s[1]
        return g.add("Gemm", v, g.floats(*((width, inner) if turned else (inner, width))), g.floats(width), transA=across, transB=turned, alpha=0.5)
    return g.add("MatMul", v, g.floats(*c.choice(((s[-1], width), (s[-1],), (*s[:-2], s[-1], width)))))


def _einsum(g: Growing, c: random.Random, v: str, s: tuple[int, ...]) -> str:
    letters = "abcd"[: len(s)]
    return g.add("Einsum", v, g.floats(s[-1], 3), equation=f"{letters},{letters[-1]}z->{c.choice((letters[:-1], letters))}z")


def _scattered(g: Growing, c: random.Random, v: str, s: tuple[int, ...]) -> str:
    axis = c.randrange(len(s))
    if not 0 < prod(s) < 512:
        return _unary(g, c, v, s)
    index = g._weight(np.array([c.randrange(-s[axis], s[axis]) + (c.random() < 0.002) * 99 for _ in range(prod(s))], np.int64).reshape(s))
    if c.random() < 0.5:
        return g.add("GatherElements", v, index, axis=axis)
    return g.add("ScatterElements", v, index, g.floats(*s), axis=axis, reduction=c.choice(("none", "add", "mul", "max")))


def _convolution(g: Growing, c: random.Random, v: str, s: tuple[int, ...]) -> str:
    spatial, channels = len(s) - 2, s[1]
    groups = c.choice([k for k in (1, 1, 1, 2, channels) if k and channels % k == 0] or [1])
    outputs, kernel = groups * c.choice((1, 2, 5)), [min(c.choice((1, 2, 3, 3)), extent + 2) for extent in s[2:]]
    options: dict[str, Any] = {
        "strides": [g.odd(c.choice((1, 1, 2))) for _ in kernel],
        "pads": [g.odd(c.choice((0, 1, 1, 2))) for _ in (*kernel, *kernel)],
        "dilations": [c.choice((1, 1, 2)) for _ in kernel],
    }
    if c.random() < 0.2:
        options = {"auto_pad": c.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))}
    bias = (g.floats(outputs),) if c.random() < 0.5 else ()
    if c.random() < 0.2 and spatial:
        return g.add("ConvTranspose", v, g.floats(channels, max(outputs // groups, 1), *kernel), group=groups, **options)
    return g.add("Conv", v, g.floats(outputs, channels // groups, *kernel), *bias, group=groups, **options)


def _pooled(g: Growing, c: random.Random, v: str, s: tuple[int, ...]) -> str:
    way = c.randrange(6)
    if way == 0:
        return g.add(c.choice(("GlobalAveragePool", "GlobalMaxPool")), v)
    if way == 1:
        several = [g.floats(s[1]) for _ in range(3)]
        return g.add("BatchNormalization", v, *several, g._weight(np.full(s[1], 1.5, np.float32)))
    if way == 2:
        return g.add("InstanceNormalization", v, g.floats(s[1]), g.floats(s[1]))
    if way == 3:
        mode = c.choice(("nearest", "linear", "cubic"))
        transform = c.choice(("asymmetric", "half_pixel", "align_corners", "pytorch_half_pixel"))
        sizes = g.ints(*s[:2], *(c.choice((extent, 2 * extent, extent + 3, max(extent // 2, 1))) for extent in s[2:]))
        return g.add("Resize", v, "", "", sizes, mode=mode, coordinate_transformation_mode=transform)
    kernel = [min(c.choice((1, 2, 3)), extent) for extent in s[2:]]
    options: dict[str, Any] = {"strides": [g.odd(c.choice((1, 2))) for _ in kernel], "ceil_mode": c.randrange(2)}
    if c.random() < 0.5:
        options["pads"] = [c.randrange(max(k, 1)) for k in (*kernel, *kernel)]
    return g.add(c.choice(POOLS[:2]), v, kernel_shape=kernel, **options)


def _recurrent(g: Growing, c: random.Random, v: str, s: tuple[int, ...]) -> str:
    kind, hidden = c.choice((("LSTM", 4), ("GRU", 3), ("RNN", 1))), c.choice((1, 3, 4))
    way = c.choice(("forward", "reverse", "bidirectional"))
    ways, gates = (2 if way == "bidirectional" else 1), kind[1] * hidden
    return g.add(kind[0], v, g.floats(ways, gates, s[2]), g.floats(ways, gates, hidden), hidden_size=hidden, direction=way)


_KINDS: tuple[tuple[Kind, Callable[[int], bool]], ...] = (
    (_unary, lambda rank: True),
    (_unary, lambda rank: True),
    (_binary, lambda rank: True),
    (_binary, lambda rank: True),
    *(
        (kind, lambda rank: rank >= 1)
        for kind in (_chosen, _transpose, _reshape, _reduction, _along, _along, _slice, _sized, _typed, _shaped, _scattered)
    ),
    *((kind, lambda rank: rank >= 2) for kind in (_matmul, _einsum)),
    *((kind, lambda rank: rank >= 3) for kind in (_convolution, _convolution, _pooled, _pooled)),
    (_recurrent, lambda rank: rank == 3),
)


def changed(model: onnx.ModelProto, chance: random.Random) -> None:
    """One small change: an operator of the same arity, an attribute, a constant's content, an edge, a size, a type."""
    graph = model.graph
    node = chance.choice(graph.node)
    way = chance.randrange(8)
    if way == 0:
        for family in FAMILIES:
            if node.op_type in family:
                node.op_type = chance.choice(family)
                return
        return
    if way == 1 and node.attribute:
        attribute = chance.choice(node.attribute)
        if attribute.type == onnx.AttributeProto.INT:
            attribute.i = max(min(attribute.i + chance.choice((1, -1, 2)), 1 << 62), -(1 << 62))
        elif attribute.type == onnx.AttributeProto.INTS and attribute.ints:
            position = chance.randrange(len(attribute.ints))
            attribute.ints[position] = max(min(attribute.ints[position] + chance.choice((1, -1, 2)), 1 << 62), -(1 << 62))
        elif attribute.type == onnx.AttributeProto.FLOAT:
            attribute.f = chance.choice((0.0, -1.0, 0.5, 1e-30, 1e30, float("inf"), float("nan")))
        return
    if way in (2, 3) and graph.initializer:
        tensor = chance.choice(graph.initializer)
        array = numpy_helper.to_array(tensor).copy() if tensor.data_location != TensorProto.EXTERNAL else np.zeros(0)
        if array.size and array.dtype.kind in "fi":
            where = chance.randrange(array.size)
            now = array.flat[where]
            if array.dtype.kind == "f":
                array.flat[where] = chance.choice((0, 1, -1, 1e30, np.inf, np.nan, 1e-40))
            else:
                limits = np.iinfo(array.dtype)
                array.flat[where] = max(min(chance.choice((0, 1, -1, 2, 3, int(now) + 1, int(now) - 1)), limits.max), limits.min)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
        return
    if way == 4:  # an edge, to an earlier value
        position = chance.randrange(len(graph.node))
        before = ["x", *(name for other in list(graph.node)[:position] for name in other.output)]
        target = graph.node[position]
        if target.input:
            target.input[chance.randrange(min(len(target.input), 2))] = chance.choice(before)
        return
    if way == 5:
        dims = graph.input[0].type.tensor_type.shape.dim
        if dims:
            chance.choice(dims).dim_value = chance.choice((0, 1, 2, 3, 5, 8, 16))
        return
    if way == 6:
        name = chance.choice([name for other in graph.node for name in other.output] or ["x"])
        if name not in {o.name for o in graph.output}:
            graph.output.append(helper.make_tensor_value_info(name, FLOAT, None))
        return
    position = chance.randrange(len(graph.node))
    target = graph.node[position]
    if target.input and target.input[0]:
        between = helper.make_node(chance.choice(UNARY), [target.input[0]], [f"between{position}"])
        target.input[0] = between.output[0]
        graph.node.insert(position, between)
