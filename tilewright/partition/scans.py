"""Loops: a `scan` node becomes one region whose kernels run once per step, with the step number as a scalar argument.

Each state has a history of length + 1 entries: step t reads entry t and writes entry t + 1, so nothing is copied or swapped between steps. Sequences
and stacked results are read and written in place, at the step's position. The body is partitioned like any graph; then its loads and stores of
states, sequences and results get the step as their leading index. A state that products multiply has the type of their weights, if that is of 16
bits: then they are factors of one type; other states, such as the cells of an LSTM, keep theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilewright.graph.loop_products import loop_products
from tilewright.ir.computation import Step
from tilewright.ir.dtypes import NARROW_FLOATS
from tilewright.ir.expr import INDEX, Const, Expr, Load, Var, rewrite
from tilewright.ir.graph import Graph, Node, Value
from tilewright.ir.layout import Layout, row_major
from tilewright.ir.region import Region
from tilewright.partition.layouts import LaidOut


@dataclass(frozen=True)
class Loop:
    """A decomposed scan: regions to run before, in every step, and after, and the values that they store in addition to the graph's."""

    before: tuple[Region, ...]
    body: tuple[Region, ...]
    after: tuple[Region, ...]
    length: int
    values: Mapping[str, Value]
    layouts: Mapping[str, Layout]


def unfold(node: Node, graph: Graph, body: LaidOut, wanted: set[str], stored: Mapping[str, Value]) -> Loop:
    """Decomposes a scan node. `body` is its partitioned body; `wanted` names the node's outputs that are read; `stored`: values outside of the loop,
    with the types in which they are stored."""
    inner: Graph = node.attributes["body"]
    states, sequences, length = node.attributes["states"], node.attributes["sequences"], node.attributes["length"]
    step = Var("t", max(length, 1))
    backwards = node.attributes["reverse"]

    def at(number: int) -> Expr:
        """Which element of a sequence, or of a stacked result, a step has."""
        return (length - 1) - step if backwards[number] else step

    # the outer value of each body value: (name, leading index)
    reads: dict[str, tuple[str, Expr | None]] = {}
    histories = [f"{node.name}.state{i}" for i in range(states)]
    for position, name in enumerate(inner.inputs):
        if position < states:
            reads[name] = (histories[position], step)
        elif position < states + sequences:
            reads[name] = (node.inputs[position], at(position - states))
        else:
            reads[name] = (node.inputs[position], None)
    values: dict[str, Value] = {}
    layouts: dict[str, Layout] = {}

    def declare(name: str, shape: tuple[int, ...], dtype: str, layout: Layout | None = None) -> None:
        values[name] = Value(name, shape, dtype)
        layouts[name] = layout or row_major(shape)

    factors: dict[int, set[str]] = {}
    for product in loop_products(node):
        factors.setdefault(product.state, set()).add(stored[product.weight].dtype)
    for number, (history, name) in enumerate(zip(histories, inner.inputs[:states], strict=True)):
        state, types = inner.values[name], factors.get(number, set())
        declare(history, (length + 1, *state.shape), types.pop() if len(types) == 1 and types <= NARROW_FLOATS else state.dtype)
    writes: dict[str, tuple[str, Expr]] = {}
    copies: list[Region] = []
    after: list[Region] = []
    for position, name in enumerate(inner.outputs):
        if position < states:
            target, where = histories[position], step + 1
        else:
            target, where = node.outputs[position], at(sequences + position - states)
            if target not in wanted:
                continue
        if name in reads:  # a body may pass an input through
            copies.append(_copy(inner.values[name], reads[name], (target, where), {**values, **graph.values}))
        elif name in writes and writes[name][0] in histories and position >= states:
            after.append(_stacked(values[writes[name][0]], graph.values[target], backwards[sequences + position - states]))
        elif name in writes:
            copies.append(_copy(inner.values[name], writes[name], (target, where), {**values, **graph.values}))
        else:
            writes[name] = (target, where)
    for name, layout in body.layouts.items():
        if name not in reads and name not in writes and name not in inner.constants:
            declare(f"{node.name}.{name}", body.values[name].shape, body.values[name].dtype, layout)
            reads[name] = (f"{node.name}.{name}", None)
    known = {**graph.values, **values}
    regions = tuple(_moved(region, reads, writes, known) for region in body.regions)
    before = tuple(_first(history, node.inputs[i], known) for i, history in enumerate(histories))
    after += [_last(history, node.outputs[i], known, length) for i, history in enumerate(histories) if node.outputs[i] in wanted]
    return Loop(before, (*regions, *copies), tuple(after), length, values, layouts)


def without_copies(node: Node) -> Node:
    """The scan node without copies of computed values among its body's results. A state that is also a stacked result is taken from its history after
    the loop."""
    inner: Graph = node.attributes["body"]
    producers = inner.producers()
    outputs = []
    for name in inner.outputs:
        made = producers.get(name)
        copied = made is not None and made.operator == "copy" and made.inputs[0] in producers
        outputs.append(made.inputs[0] if made is not None and copied else name)
    read = {*outputs, *(name for other in inner.nodes for name in other.inputs)}
    body = replace(inner, nodes=tuple(n for n in inner.nodes if any(o in read for o in n.outputs)), outputs=tuple(outputs))
    return replace(node, attributes={**node.attributes, "body": body})


def _moved(
    region: Region, reads: Mapping[str, tuple[str, Expr | None]], writes: Mapping[str, tuple[str, Expr]], values: Mapping[str, Value]
) -> Region:
    """The region with its loads and its stores redirected to the values outside the body."""

    def load(node: Expr) -> Expr:
        if not isinstance(node, Load):
            return node
        name, leading = reads.get(node.buffer) or writes.get(node.buffer) or (node.buffer, None)
        return Load(name, node.index if leading is None else (leading, *node.index), node.dtype)

    results = set(region.outputs)
    inner = {name for step in region.steps for name in step.names} - results

    def outer(expression: Expr) -> Expr:
        return rewrite(expression, lambda n: n if isinstance(n, Load) and n.buffer in inner else load(n))

    def placed(step: Step) -> Step:
        step = replace(step, bodies=tuple(outer(body) for body in step.bodies))
        if step.name not in results:
            return step
        if step.name not in writes:
            return replace(step, name=reads[step.name][0])
        name, where = writes[step.name]
        return replace(step, name=name, shape=values[name].shape, index=(where, *step.index))

    outputs = tuple((writes.get(name) or reads[name])[0] for name in region.outputs)
    inputs = tuple(dict.fromkeys((reads.get(i) or writes.get(i) or (i, None))[0] for i in region.inputs))
    return replace(region, name=outputs[0], steps=tuple(map(placed, region.steps)), inputs=inputs, outputs=outputs)


def _axes(shape: tuple[int, ...]) -> tuple[Var, ...]:
    return tuple(Var(f"i{i}", extent) for i, extent in enumerate(shape))


def _map(name: str, shape: tuple[int, ...], axes: tuple[Var, ...], body: Expr, index: tuple[Expr, ...], source: str, why: str) -> Region:
    return Region(name, "map", (), (Step(name, shape, axes, (body,), index=index),), (source,), (name,), (why,))


def _copy(value: Value, source: tuple[str, Expr | None], target: tuple[str, Expr], values: Mapping[str, Value]) -> Region:
    axes = _axes(value.shape)
    name, leading = source
    body = Load(name, axes if leading is None else (leading, *axes), value.dtype)
    return _map(target[0], values[target[0]].shape, axes, body, (target[1], *axes), name, "the body passes it through")


def _first(history: str, source: str, values: Mapping[str, Value]) -> Region:
    axes = _axes(values[source].shape)
    body = Load(source, axes, values[source].dtype)
    return _map(history, values[history].shape, axes, body, (Const(0, INDEX), *axes), source, "the loop's initial state")


def _last(history: str, output: str, values: Mapping[str, Value], length: int) -> Region:
    axes = _axes(values[output].shape)
    body = Load(history, (Const(length, INDEX), *axes), values[output].dtype)
    return _map(output, values[output].shape, axes, body, axes, history, "the loop's final state")


def _stacked(history: Value, output: Value, reverse: bool) -> Region:
    """A region that copies the states after each step into the stacked result."""
    axes = _axes(output.shape)
    position = (output.shape[0] - axes[0]) if reverse else axes[0] + 1
    body = Load(history.name, (position, *axes[1:]), output.dtype)
    return _map(output.name, output.shape, axes, body, axes, history.name, "the stacked results are the states")
