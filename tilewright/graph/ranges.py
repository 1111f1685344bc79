"""A graph that serves a range of sizes: made for the largest of them, and told by an input how many entries of it count.

Inputs are padded along a dimension to its extent, and results are cut. That is right if no entry that counts depends on one that does not, which
follows from how each operator passes the dimension on: it may keep it, move it, or merge it with others and split it off again, but mixes entries of
it only in the operators that are listed here. These get operands in which the other entries are neutral::

    softmax(x) along the dimension  ->  softmax(where(position < count, x, -inf))
    x @ y over the dimension        ->  where(position < count, x, 0) @ y        unless x is such a softmax

Other operators are accepted if nothing that they read or make has the dimension. Attributes and constants that depend on the size in another way
show up as a difference to the graph for another size.

Entries that do not count must be finite where they are multiplied by 0. `Frame.padded` repeats the last entry of each input: they are copies of
what counts until a value depends on positions ("placed"). A placed value that may not be finite ("wild") has its rows that do not count set to 0
before a softmax, of which a window may leave them nothing that counts, and is masked as the second factor of a product. Constants and literals
beyond 2^30 and operators outside `_TAME` make values wild; of products that would overflow only in padding nothing is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.graph.builder import GraphBuilder
from tilewright.graph.operators import pointwise
from tilewright.ir.graph import Graph, Node, Value

Dim = tuple[int, ...]
"""The extents that a dimension merges, outermost first, without those of one; `FREE` for the one that is free."""
Dims = tuple[Dim, ...]
FREE = -1
_POINTWISE = frozenset(operator.name for operator in pointwise.OPERATORS)
_TAME = frozenset(
    "sin cos tanh erf floor ceil round trunc abs neg sign erfc add sub mul maximum minimum clamp eq ne lt le gt ge logical_and logical_or "
    "logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not where relu sigmoid silu gelu gelu_tanh hardsigmoid hardswish "
    "leaky_relu cast copy".split()
)
"""Pointwise operators whose results are finite for finite operands, unless products overflow."""
_HUGE = 2.0**30
_AXIS = "softmax safe_softmax log_softmax slice select index_select concatenate".split()
"""Operators that mix entries along one dimension, their attribute `axis`."""


class NotServed(Exception):
    """The reason why one graph cannot serve a range of sizes."""


@dataclass(frozen=True)
class Frame:
    """How a graph for `extent` entries is called with fewer: `inputs` and `outputs` have for each input and result the dimensions along which it is
    padded or cut."""

    extent: int
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]

    def fits(self, inputs: Sequence[Any], count: int) -> bool:
        """Whether the inputs have that number of entries in their dimensions."""
        pairs = zip(inputs, self.inputs, strict=True)
        return all(isinstance(x, torch.Tensor) and dim < x.dim() and x.shape[dim] == count for x, dims in pairs for dim in dims)

    def padded(self, inputs: Sequence[Any], count: int) -> list[Any]:
        """Inputs that fit, with their last entry repeated up to the extent, and the count, on their device (where no call waits for its copy)."""
        device = next((x.device for x, dims in zip(inputs, self.inputs, strict=True) if dims), None)
        counted = torch.full((), count, dtype=torch.int64, device=device)
        return [*(self._wide(x, dims, count) for x, dims in zip(inputs, self.inputs, strict=True)), counted]

    def _wide(self, x: Any, dims: Sequence[int], count: int) -> Any:
        for dim in dims if count < self.extent else ():
            x = torch.cat([x, x.narrow(dim, count - 1, 1).expand(*x.shape[:dim], self.extent - count, *x.shape[dim + 1 :])], dim)
        return x

    def cut(self, outputs: Sequence[Any], count: int) -> list[Any]:
        """Results without the entries that do not count."""
        return [self._narrow(x, dims, count) for x, dims in zip(outputs, self.outputs, strict=True)]

    def _narrow(self, x: Any, dims: Sequence[int], count: int) -> Any:
        for dim in dims if count < self.extent else ():
            x = x.narrow(dim, 0, count)
        return x.contiguous() if dims else x


def framed(graph: Graph, other: Graph, extent: int, fewer: int) -> tuple[Graph, Frame]:
    """The graph that serves up to `extent` entries, with one more input, how many count, and its frame.

    `graph` and `other` are the same simplified model for `extent` and for `fewer` entries, where all sizes and numbers of the model are affine in
    the number of entries, so that two graphs determine the others. Raises NotServed if entries that count may depend on others, or the graphs differ
    in more than extents."""
    return _Framing(graph, other, extent, fewer).run()


class _Framing:
    def __init__(self, graph: Graph, other: Graph, extent: int, fewer: int) -> None:
        self.graph, self.other, self.extent, self.fewer = graph, other, extent, fewer
        self.builder = GraphBuilder.resume(graph)
        self.dims: dict[str, Dims] = {}
        self.zeroed: set[tuple[str, int]] = set()
        """Values that are 0 along a dimension where entries do not count."""
        self.placed: set[str] = set()
        """Values whose entries depend on where they are in the free dimension, so that those that do not count are no copies of the last."""
        self.wild: set[str] = set()
        """Values that may be infinite or NaN."""

    def run(self) -> tuple[Graph, Frame]:
        graph, other = self.graph, self.other
        if graph.inputs != other.inputs or graph.outputs != other.outputs or len(graph.nodes) != len(other.nodes):
            raise NotServed("the model has other operators for other sizes")
        for name in (*graph.inputs, *graph.constants):
            self._set(name, self._given(name))
        self.count = self.builder.input("entries", (), "i64")
        for node, twin in zip(graph.nodes, other.nodes, strict=True):
            self._node(node, twin)
        cuts = tuple(self._whole(name) for name in graph.outputs)
        outputs = [self.builder.values[name] for name in graph.outputs]
        ins = tuple(self._whole(name) for name in graph.inputs)
        return self.builder.finish(outputs), Frame(self.extent, ins, cuts)

    def _given(self, name: str) -> Dims:
        """The dimensions of an input or a constant."""
        shape, twin = self.graph.values[name].shape, self.other.values.get(name, Value(name, (), "")).shape
        dims: list[Dim] = []
        for size, less in zip(shape, twin, strict=False):
            free = size != less
            if (size, less) != ((self.extent, self.fewer) if free else (size, size)):
                raise NotServed(f"{name} has a size that depends on the free one")
            dims.append((FREE,) if free else _plain(size))
        if name in self.graph.constants:
            self._check_constant(name, tuple(k for k, dim in enumerate(dims) if FREE in dim))
        return tuple(dims)

    def _check_constant(self, name: str, free: Sequence[int]) -> None:
        tensor, twin = self.graph.constants[name], self.other.constants.get(name)
        for dim in free:
            tensor = tensor.narrow(dim, 0, self.fewer)
        if twin is None or (tensor is not twin and not torch.equal(tensor, twin)):
            raise NotServed(f"the constant {name} depends on the size")
        if free:
            self.placed.add(name)
        constant = self.graph.constants[name]
        if not bool((constant.double().abs() <= _HUGE).all()):
            self.wild.add(name)

    def _set(self, name: str, dims: Dims) -> None:
        """Notes the dimensions of a value, and checks that both graphs have them."""
        for graph, count in ((self.graph, self.extent), (self.other, self.fewer)):
            value = graph.values.get(name)
            if value is None or value.shape != tuple(math.prod(count if factor == FREE else factor for factor in dim) for dim in dims):
                raise NotServed(f"{name} has a size that depends on the free one")
        self.dims[name] = dims

    def _whole(self, name: str) -> tuple[int, ...]:
        """The dimensions of a value that are the free one."""
        if any(FREE in dim and dim != (FREE,) for dim in self.dims[name]):
            raise NotServed(f"{name} merges the free size with others")
        return tuple(k for k, dim in enumerate(self.dims[name]) if FREE in dim)

    # --- operators ----------------------------------------------------------------------------------------------------

    def _node(self, node: Node, twin: Node) -> None:
        same = (node.operator, node.inputs, node.outputs) == (twin.operator, twin.inputs, twin.outputs)
        differing = {name for name in {*node.attributes, *twin.attributes} if node.attributes.get(name) != twin.attributes.get(name)}
        if not same or differing - {"shape"}:
            raise NotServed(f"{node.described} depends on the size")
        operands = [self.dims[name] for name in node.inputs]
        if not any(FREE in dim for dims in operands for dim in dims) and not differing:
            for name in node.outputs:
                self._set(name, tuple(map(_plain, self.graph.values[name].shape)))
            self.builder.nodes.append(node)
            return
        self._follow(node)
        node, dims = self._passed_on(node, operands)
        self._set(node.outputs[0], dims)
        self.builder.nodes.append(node)

    def _follow(self, node: Node) -> None:
        """Notes what is known of the entries of the node's result that do not count."""
        result, constants = node.outputs[0], self.graph.constants
        placed = [name for name in node.inputs if name in self.placed]
        if placed or node.operator in ("triangle", "causal_mask"):
            self.placed.add(result)
        divided = node.operator == "div" and node.inputs[-1] in constants and bool((constants[node.inputs[-1]] != 0).all())
        untamed = node.operator == "causal_mask" or (node.operator in _POINTWISE and node.operator not in _TAME and not divided)
        squared = len(placed) > 1 and node.operator in ("mul", "matmul") and node.inputs[0] not in {name for name, _ in self.zeroed}
        literal = any(isinstance(value, float) and not abs(value) <= _HUGE for value in node.attributes.values())
        if untamed or squared or literal or any(name in self.wild for name in node.inputs):
            self.wild.add(result)

    def _exposed(self, name: str) -> bool:
        """Whether entries of a value that do not count may be infinite or NaN although those that count are not."""
        return name in self.placed and name in self.wild

    def _passed_on(self, node: Node, operands: Sequence[Dims]) -> tuple[Node, Dims]:
        """The node, with masked operands where it needs them, and the dimensions of its result."""
        kind, attributes, first = node.operator, node.attributes, operands[0]
        if kind in _POINTWISE or (kind in ("triangle", "causal_mask") and all(dim == (FREE,) or FREE not in dim for dim in first[-2:])):
            return node, _broadcast(operands, node)
        if kind == "permute":
            return node, tuple(first[axis] for axis in attributes["axes"])
        if kind == "reshape":
            return node, _regrouped(first, self.graph.values[node.outputs[0]].shape, self.extent, node)
        if kind == "expand":
            return node, self._expanded(first, node)
        if kind in ("layer_norm", "rms_norm") and not any(FREE in dim for dim in first[len(first) - attributes["rank"] :]):
            return node, first
        if kind == "linear" and not any(FREE in dim for dim in (first[-1], *operands[1])):
            return node, (*first[:-1], operands[1][0])
        if kind == "matmul":
            return self._product(node, operands)
        if kind in ("softmax", "safe_softmax") and first[attributes["axis"]] == (FREE,):
            self.zeroed.add((node.outputs[0], attributes["axis"]))
            return self._softmax(node, first), first
        if kind in _AXIS and not any(FREE in dims[attributes["axis"]] for dims in operands[: len(operands) if kind == "concatenate" else 1]):
            return self._chosen(node, operands), self._along(node, operands, attributes["axis"])
        raise NotServed(f"{node.described} may mix entries of the free dimension")

    def _chosen(self, node: Node, operands: Sequence[Dims]) -> Node:
        """The node, with indices that exist for entries that do not count: positions beyond the last may be outside of a table."""
        if node.operator != "index_select" or node.inputs[1] not in self.placed:
            return node
        for k, dim in enumerate(operands[1]):
            if FREE in dim:
                if dim != (FREE,):
                    raise NotServed(f"{node.described} has indices of merged dimensions")
                node = replace(node, inputs=(node.inputs[0], self._mask(node, 1, k, 0)))
        return node

    def _along(self, node: Node, operands: Sequence[Dims], axis: int) -> Dims:
        first, shape = operands[0], self.graph.values[node.outputs[0]].shape
        if node.operator == "index_select":
            return (*first[:axis], *operands[1], *first[axis + 1 :])
        if node.operator == "select":
            return (*first[:axis], *first[axis + 1 :])
        if node.operator == "concatenate" and any(dims[:axis] + dims[axis + 1 :] != first[:axis] + first[axis + 1 :] for dims in operands):
            raise NotServed(f"{node.described} joins different dimensions")
        return tuple(_plain(shape[axis]) if k == axis else dim for k, dim in enumerate(first))

    def _expanded(self, source: Dims, node: Node) -> Dims:
        sizes, less = (graph.values[node.outputs[0]].shape for graph in (self.graph, self.other))
        wide = tuple((FREE,) if (size, few) == (self.extent, self.fewer) else _plain(size) for size, few in zip(sizes, less, strict=True))
        return _broadcast([source, wide], node)

    def _softmax(self, node: Node, dims: Dims) -> Node:
        axis = node.attributes["axis"]
        rows = [k for k, dim in enumerate(dims) if FREE in dim and k != axis]
        if self._exposed(node.inputs[0]) and all(dims[k] == (FREE,) for k in rows):
            for row in rows:
                node = replace(node, inputs=(self._mask(node, 0, row, 0.0),))
            self.wild.discard(node.outputs[0])
        return replace(node, inputs=(self._mask(node, 0, axis, float("-inf")),))

    def _product(self, node: Node, operands: Sequence[Dims]) -> tuple[Node, Dims]:
        x, y = operands
        if FREE in x[-1] or FREE in y[-2]:
            if x[-1] != (FREE,) or y[-2] != (FREE,):
                raise NotServed(f"{node.described} sums over merged dimensions")
            if (node.inputs[0], len(x) - 1) not in self.zeroed:
                node = replace(node, inputs=(self._mask(node, 0, len(x) - 1, 0.0), node.inputs[1]))
            if self._exposed(node.inputs[1]):
                node = replace(node, inputs=(node.inputs[0], self._mask(node, 1, len(y) - 2, 0.0)))
        return node, (*_broadcast([x[:-2], y[:-2]], node), x[-2], y[-1])

    def _mask(self, node: Node, operand: int, axis: int, neutral: float | int) -> str:
        """The operand with a neutral value along an axis where entries do not count."""
        g, value = self.builder, self.builder.values[node.inputs[operand]]
        with g.at(f"{node.name}_counted", node.place):
            positions = torch.arange(self.extent).reshape([self.extent if k == axis else 1 for k in range(len(value.shape))])
            counts = g.pointwise("lt", g.constant(positions, "positions"), self.count)
            return g.pointwise("where", counts, value, neutral, dtype=value.dtype).name


def _plain(extent: int) -> Dim:
    return () if extent == 1 else (extent,)


def _merged(dim: Dim) -> Dim:
    """The dimension with neighbouring factors that are not free multiplied."""
    result: list[int] = []
    for factor in dim:
        if result and FREE not in (factor, result[-1]):
            result[-1] *= factor
        else:
            result.append(factor)
    return tuple(result)


def _broadcast(operands: Sequence[Dims], node: Node) -> Dims:
    rank = max(map(len, operands))
    result: list[Dim] = [()] * rank
    for dims in operands:
        for k, dim in enumerate(dims, rank - len(dims)):
            if dim and result[k] and _merged(dim) != _merged(result[k]):
                raise NotServed(f"{node.described} joins different dimensions")
            result[k] = dim or result[k]
    return tuple(result)


def _regrouped(source: Dims, shape: Sequence[int], extent: int, node: Node) -> Dims:
    """The dimensions of a reshaped value: factors in their order, those that are not free split and merged as the shape requires."""
    factors = [factor for dim in source for factor in dim]
    result: list[Dim] = []
    for size in shape:
        dim: list[int] = []
        while size > 1:
            if not factors:
                raise NotServed(f"{node.described} splits the free dimension")
            factor = factors.pop(0)
            actual = extent if factor == FREE else factor
            if size % actual == 0:
                dim.append(factor)
                size //= actual
            elif factor != FREE and actual % size == 0:
                dim.append(size)
                factors.insert(0, actual // size)
                size = 1
            else:
                raise NotServed(f"{node.described} splits the free dimension")
        result.append(tuple(dim))
    return tuple(result)
