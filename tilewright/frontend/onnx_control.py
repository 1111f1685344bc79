"""ONNX's control flow: `If` over a known condition takes a branch; `Loop` with a known number of iterations is unrolled, or becomes a loop over a
body graph if it is long and all iterations are alike; `Scan` becomes such a loop.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np
import onnx

from tilewright.frontend.handlers import Unsupported
from tilewright.frontend.onnx_node import axis_of
from tilewright.frontend.onnx_proto import attributes_of
from tilewright.frontend.onnx_tail import Later
from tilewright.frontend.reading import check_computed
from tilewright.graph.builder import GraphBuilder
from tilewright.ir.graph import Graph, Value

Environment = MutableMapping[str, Any]
"""Tensors by name: a Value, an array of known elements, None where an optional one is absent, a tensor of the tail, or a mark for results of
unsupported nodes."""


_MOST_RUN = 10_000_000
"""Nodes of all iterations of a loop that ONNX's runtimes are given, which takes them seconds: more are a damaged file."""
_MOST_UNROLLED = 128
"""Nodes of all iterations of a loop that is unrolled without trying whether all are alike. Those of few nodes gain by it: indices are known."""
_MOST_KEPT = 1 << 26
"""Elements of all iterations' states, which a loop over a body graph stores."""

Made = TypeVar("Made")


class Reader(Protocol):
    """What control flow needs of the importer."""

    builder: GraphBuilder

    @property
    def in_body(self) -> bool: ...
    def attempted(self, make: Callable[[], Made]) -> Made | None: ...
    def results_of(self, graph: onnx.GraphProto, environment: Environment, opsets: Mapping[str, int], depth: int) -> list[Any]: ...
    def inside(self, builder: GraphBuilder, origins: Mapping[str, Value]) -> Reader: ...
    def materialise(self, array: np.ndarray) -> Value: ...
    def specialise(self, operand: Value, what: str) -> Unsupported: ...
    def specialise_flag(self, operand: Value, what: str) -> Unsupported: ...
    def count_inlined(self, nodes: int, finite: bool) -> None: ...


def control(
    reader: Reader, node: onnx.NodeProto, operands: Sequence[Any], environment: Environment, opsets: Mapping[str, int], depth: int
) -> Sequence[Any]:
    """The results of an `If`, a `Loop` or a `Scan`. Raises Unsupported if which nodes they run depends on data."""
    bodies = {attribute.name: attribute.g for attribute in node.attribute if attribute.HasField("g")}
    if node.op_type == "If":
        return _branch(reader, operands[0], bodies, environment, opsets, depth)
    if node.op_type == "Loop":
        return _loop(reader, operands, bodies["body"], environment, opsets, depth)
    return _scan(reader, node, operands, bodies["body"], environment, opsets, depth)


def _branch(
    reader: Reader, condition: Any, bodies: Mapping[str, onnx.GraphProto], environment: Environment, opsets: Mapping[str, int], depth: int
) -> Sequence[Any]:
    """The branch that a known condition chooses."""
    taken = "then_branch" if _holds(reader, condition) else "else_branch"
    return reader.results_of(bodies[taken], ChainMap({}, environment), opsets, depth)


def _holds(reader: Reader, condition: Any) -> bool:
    return bool(_known(condition, "its condition", reader.specialise_flag).all())


def _known(operand: Any, what: str, specialise: Callable[[Value, str], Unsupported]) -> np.ndarray:
    if isinstance(operand, Value):
        raise specialise(operand, what)
    if isinstance(operand, Later):
        raise Unsupported(f"{what} is computed from a tensor whose shape depends on data")
    if not isinstance(operand, np.ndarray):
        raise Unsupported(f"{what} is computed by a node that is not supported")
    return operand


def _loop(
    reader: Reader, operands: Sequence[Any], body: onnx.GraphProto, environment: Environment, opsets: Mapping[str, int], depth: int
) -> Sequence[Any]:
    """A loop over a body graph if that may be, or else every iteration's nodes."""
    most = None if operands[0] is None else max(int(_known(operands[0], "its number of iterations", reader.specialise).reshape(-1)[0]), 0)
    nodes = max(len(body.node), 1)
    if most is not None and _MOST_UNROLLED < most * nodes <= _MOST_RUN and not reader.in_body:
        repeated = reader.attempted(lambda: _repeated(reader, operands, most, body, environment, opsets, depth))
        if repeated is not None:
            return repeated
    return _unrolled(reader, operands, most, body, environment, opsets, depth)


def _repeated(
    reader: Reader, operands: Sequence[Any], most: int, body: onnx.GraphProto, environment: Environment, opsets: Mapping[str, int], depth: int
) -> Sequence[Any]:
    """A loop over a graph of one iteration, to which its number is data. Raises Unsupported if the condition may change, or an iteration depends on
    its number or on the states in more than what it computes."""
    if operands[1] is not None and not (isinstance(operands[1], np.ndarray) and operands[1].all()):
        raise Unsupported("a loop whose condition is not known to hold")
    number, condition, *infos = body.input
    states = _values(reader, operands[2:])
    if most * sum(state.elements for state in states) > _MOST_KEPT:
        raise Unsupported("a loop with large states of many iterations")
    numbers = reader.materialise(np.arange(most, dtype=np.int64))
    reader.count_inlined(max(len(body.node), 1), finite=True)
    around: Environment = ChainMap({condition.name: np.array(True)}, environment)
    graph, outer = _body(reader, body, [*infos, number], states, [numbers], around, opsets, depth, conditional=True)
    return _iterated(reader, graph, states, [numbers], outer)


def _values(reader: Reader, operands: Sequence[Any]) -> list[Value]:
    values = [reader.materialise(operand) if isinstance(operand, np.ndarray) else operand for operand in operands]
    if not all(isinstance(value, Value) for value in values):
        raise Unsupported("a loop over what is no tensor")
    return values


def _unrolled(
    reader: Reader, operands: Sequence[Any], most: int | None, body: onnx.GraphProto, environment: Environment, opsets: Mapping[str, int], depth: int
) -> Sequence[Any]:
    """Every iteration's nodes one after another. States may change their shapes, and the number of iterations may depend on known states."""
    condition = np.array(True) if operands[1] is None else operands[1]
    states, count = list(operands[2:]), len(operands) - 2
    stacked: list[list[Any]] = [[] for _ in body.output[1 + count :]]
    iteration, nodes = 0, max(len(body.node), 1)
    finite = most is not None and most * nodes <= _MOST_RUN
    if finite and most is not None and _goes_on(body):
        reader.count_inlined(most * nodes, finite)
        nodes = 0  # they are counted
    while (most is None or iteration < most) and _holds(reader, condition):
        reader.count_inlined(nodes, finite)
        given = [np.array(iteration, np.int64), condition, *states]
        inner: Environment = ChainMap(dict(zip((i.name for i in body.input), given, strict=True)), environment)
        condition, *results = reader.results_of(body, inner, opsets, depth)
        states = results[:count]
        for rows, row in zip(stacked, results[count:], strict=True):
            rows.append(row)
        iteration += 1
    return [*states, *(_stacked(reader, rows) for rows in stacked)]


def _goes_on(body: onnx.GraphProto) -> bool:
    """Whether the condition after an iteration is the one before it."""
    sources = {output: node for node in body.node for output in node.output}
    name: str = body.output[0].name
    while name in sources and sources[name].op_type == "Identity":
        name = sources[name].input[0]
    return bool(name == body.input[1].name)


def _stacked(reader: Reader, rows: Sequence[Any]) -> Any:
    """One result of all iterations along a new first axis."""
    if not rows:
        raise Unsupported("a loop without iterations, whose results have no shape")
    if all(isinstance(row, np.ndarray) for row in rows):
        check_computed(sum(row.size for row in rows))
        return np.stack(rows)
    if not all(isinstance(row, (np.ndarray, Value)) for row in rows):
        raise Unsupported("a loop whose results are no tensors")
    values = [reader.materialise(row) if isinstance(row, np.ndarray) else row for row in rows]
    if len({(value.shape, value.dtype) for value in values}) > 1:
        raise Unsupported("a loop whose iterations have results of different shapes")
    return reader.builder.concatenate([reader.builder.unsqueeze(value, 0) for value in values], 0)


class _Captured(MutableMapping[str, Any]):
    """The names that a body sees: its own, and those around it, whose values become inputs of the body when they are read."""

    def __init__(self, own: dict[str, Any], around: Environment, builder: GraphBuilder) -> None:
        self.own, self.around, self.builder = own, around, builder
        self.outer: dict[str, Value] = {}  # input of the body -> the value around it
        self._inputs: dict[str, Value] = {}

    def __getitem__(self, name: str) -> Any:
        if name in self.own:
            return self.own[name]
        found = self.around[name]
        if not isinstance(found, Value):
            return found
        if found.name not in self._inputs:
            inner = self.builder.input(found.name, found.shape, found.dtype)
            self._inputs[found.name] = inner
            self.outer[inner.name] = found
        return self._inputs[found.name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.own[name] = value

    def __delitem__(self, name: str) -> None:
        del self.own[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**dict.fromkeys(self.around), **self.own})

    def __len__(self) -> int:
        return len({*self.around, *self.own})


def _scan(
    reader: Reader,
    node: onnx.NodeProto,
    operands: Sequence[Any],
    body: onnx.GraphProto,
    environment: Environment,
    opsets: Mapping[str, int],
    depth: int,
) -> Sequence[Any]:
    g, attributes = reader.builder, attributes_of(node)
    values = [reader.materialise(v) if isinstance(v, np.ndarray) else v for v in operands]
    scanned = attributes["num_scan_inputs"]
    count = len(values) - scanned
    states, sequences = values[:count], values[count:]
    results = len(body.output) - count
    axes, turned = (list(attributes.get(name) or [0] * scanned) for name in ("scan_input_axes", "scan_input_directions"))
    for k, (x, axis, backwards) in enumerate(zip(sequences, axes, turned, strict=True)):
        axis = axis_of(axis, len(x.shape))
        x = g.op("flip", x, axes=(axis,)) if backwards else x
        sequences[k] = g.permute(x, (axis, *(a for a in range(len(x.shape)) if a != axis)))
    length = sequences[0].shape[0]
    if not length or any(x.shape[0] != length for x in sequences):
        raise Unsupported("a scan over sequences of different lengths, or of none")
    graph, outer = _body(reader, body, body.input, states, sequences, environment, opsets, depth)
    made = _iterated(reader, graph, states, sequences, outer)
    axes, turned = (list(attributes.get(name) or [0] * results) for name in ("scan_output_axes", "scan_output_directions"))
    for k, (axis, backwards) in enumerate(zip(axes, turned, strict=True)):
        y = made[count + k]
        y = g.op("flip", y, axes=(0,)) if backwards else y
        order = list(range(1, len(y.shape)))
        order.insert(axis_of(axis, len(y.shape)), 0)
        made[count + k] = g.permute(y, order)
    return made


def _iterated(reader: Reader, graph: Graph, states: Sequence[Value], sequences: Sequence[Value], outer: Sequence[Value]) -> list[Value]:
    """The last states and the stacked results of a loop over a body graph. Raises Unsupported if a state changes its shape or type."""
    length, count = sequences[0].shape[0], len(states)
    types = [_type(graph, name) for name in graph.outputs]
    for state, (shape, dtype) in zip(states, types, strict=False):
        if (state.shape, state.dtype) != (shape, dtype):
            raise Unsupported("a scan whose state changes its shape or type")
    types[count:] = [((length, *shape), dtype) for shape, dtype in types[count:]]
    turned = (False,) * (len(sequences) + len(types) - count)
    recipe = {"body": graph, "states": count, "sequences": len(sequences), "length": length, "reverse": turned}
    return list(reader.builder.structural("scan", [*states, *sequences, *outer], types, recipe))


def _type(graph: Graph, name: str) -> tuple[tuple[int, ...], str]:
    return graph.values[name].shape, graph.values[name].dtype


def _body(
    reader: Reader,
    body: onnx.GraphProto,
    inputs: Sequence[onnx.ValueInfoProto],
    states: Sequence[Value],
    sequences: Sequence[Value],
    environment: Environment,
    opsets: Mapping[str, int],
    depth: int,
    conditional: bool = False,
) -> tuple[Graph, list[Value]]:
    """The graph of one iteration, with inputs (states, slices of the sequences, values from around), and those values. `inputs` are those of the body
    in this order. `conditional`: its first result says whether the loop goes on, and has to be known to say so."""
    b = GraphBuilder()
    own: dict[str, Any] = {"": None}
    for info, x in zip(inputs, (*states, *sequences), strict=True):
        shape = x.shape if len(own) <= len(states) else x.shape[1:]
        own[info.name] = b.input(info.name, shape, x.dtype)
    names = _Captured(own, environment, b)
    inside = reader.inside(b, MappingProxyType(names.outer))
    results = inside.results_of(body, names, opsets, depth)
    if conditional:
        condition, *results = results
        if not isinstance(condition, np.ndarray) or not condition.all():
            raise Unsupported("a loop whose condition changes")
    outputs: list[Value] = []
    for result in results:
        if not isinstance(result, (np.ndarray, Value)):
            raise Unsupported("a scan over a node that is not supported")
        value = inside.materialise(result) if isinstance(result, np.ndarray) else result
        if value.name in b.inputs or value.name in b.constants or value in outputs:
            value = b.op("copy", value)
        outputs.append(value)
    if any(node.operator == "scan" for node in b.nodes):
        raise Unsupported("a scan or a recurrent layer within a scan")
    return b.finish(outputs), list(names.outer.values())
