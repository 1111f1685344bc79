"""Building a graph node by node, for front ends and decompositions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from types import MappingProxyType
from typing import Any

import torch

from tilewright.graph import table
from tilewright.ir.computation import LARGEST_SPACE
from tilewright.ir.dtypes import ELEMENT_TYPES, FLOAT32, of_torch, within_float32
from tilewright.ir.graph import Graph, Node, Value

MOST_JOINED = 64
"""Maximum number of parts that one operator concatenates."""
Scalar = int | float | bool
Operand = Value | Scalar


def identifier(name: str) -> str:
    """A name made of letters, digits and underscores, usable in C."""
    text = re.sub(r"\W", "_", name) or "value"
    return f"v{text}" if text[0].isdigit() else text


def _value(name: str, shape: tuple[int, ...], dtype: str) -> Value:
    """A value. Raises ValueError for a negative extent or a shape larger than any machine's memory."""
    if any(extent < 0 for extent in shape) or prod(shape) > LARGEST_SPACE:
        raise ValueError(f"a tensor of shape {'x'.join(map(str, shape))}")
    return Value(name, shape, dtype)


class GraphBuilder:
    """Collects nodes, values and constants; shapes and dtypes follow from the operator table as nodes are added."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.values: dict[str, Value] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.inputs: list[str] = []
        self._used: set[str] = set()
        self._next: dict[str, int] = {}
        self._label = "node"
        self._place = ""
        self.expected: tuple[tuple[tuple[int, ...], str], ...] = ()

    @classmethod
    def resume(cls, graph: Graph) -> GraphBuilder:
        """A builder that holds a graph's values, constants and inputs but none of its nodes, which passes copy or replace one by one."""
        builder = cls()
        builder.values.update(graph.values)
        builder.constants.update(graph.constants)
        builder.inputs.extend(graph.inputs)
        builder._used.update(graph.values)
        builder._used.update(node.name for node in graph.nodes)
        return builder

    @contextmanager
    def at(self, label: str, place: str, expected: Sequence[tuple[tuple[int, ...], str]] = ()) -> Iterator[None]:
        """Nodes added inside are named after `label` and carry `place`, their origin in the user's model. `expected` holds the (shape, dtype) of the
        results as far as the front end knows them: decompositions read the result's type from it."""
        saved = self._label, self._place, self.expected
        self._label, self._place, self.expected = identifier(label), place, tuple(expected)
        try:
            yield
        finally:
            self._label, self._place, self.expected = saved

    def unique(self, name: str) -> str:
        name = identifier(name)
        candidate = name
        while candidate in self._used:
            self._next[name] = self._next.get(name, 0) + 1
            candidate = f"{name}_{self._next[name]}"
        self._used.add(candidate)
        return candidate

    def input(self, name: str, shape: Sequence[int], dtype: str) -> Value:
        value = _value(self.unique(name), tuple(int(s) for s in shape), dtype)
        self.values[value.name] = value
        self.inputs.append(value.name)
        return value

    def constant(self, tensor: torch.Tensor, name: str = "constant") -> Value:
        """A constant of the model. The tensor is stored without a copy: callers pass a detached copy of any tensor that may change."""
        value = Value(self.unique(name), tuple(tensor.shape), of_torch(tensor.dtype))
        self.values[value.name] = value
        self.constants[value.name] = tensor
        return value

    def emit(self, operator: str, *inputs: Value, **attributes: Any) -> tuple[Value, ...]:
        """Adds a node of the operator table. Raises ValueError if the shapes do not fit."""
        results = table.infer(operator, inputs, attributes)
        return self.structural(operator, inputs, results, attributes)

    def structural(
        self, operator: str, inputs: Sequence[Value], results: Sequence[tuple[Sequence[int], str]], attributes: dict[str, Any]
    ) -> tuple[Value, ...]:
        """Adds a node with given result types (operators `scan` and `torch`, whose types do not follow from steps)."""
        name = self.unique(self._label if self._label not in self._used else f"{self._label}_{operator}")
        names = (name, *(f"{name}.{i}" for i in range(1, len(results))))
        outputs = tuple(_value(n, tuple(shape), dtype) for n, (shape, dtype) in zip(names, results, strict=True))
        node = Node(name, operator, tuple(v.name for v in inputs), names, MappingProxyType(dict(attributes)), self._place)
        self.nodes.append(node)
        self.values.update((v.name, v) for v in outputs)
        return outputs

    def op(self, operator: str, *inputs: Value, **attributes: Any) -> Value:
        """Like `emit`, but returns the first result."""
        return self.emit(operator, *inputs, **attributes)[0]

    def pointwise(self, operator: str, *operands: Operand, dtype: str | None = None) -> Value:
        """An elementwise operator over values and Python numbers; `dtype` is the type of the computation (default: the first value's). Numbers beyond
        float32 are infinite in narrower types too, with which PyTorch computes as float32."""
        values = [o for o in operands if isinstance(o, Value)]
        computed = dtype or values[0].dtype
        rounded = within_float32 if ELEMENT_TYPES[computed].computed or computed == FLOAT32 else lambda number: number
        scalars = tuple((i, rounded(o)) for i, o in enumerate(operands) if not isinstance(o, Value))
        attributes: dict[str, Any] = {"dtype": computed}
        if scalars:
            attributes["scalars"] = scalars
        return self.op(operator, *values, **attributes)

    def finish(self, outputs: Sequence[Value]) -> Graph:
        return Graph(
            tuple(self.nodes),
            tuple(self.inputs),
            tuple(v.name for v in outputs),
            MappingProxyType(dict(self.values)),
            MappingProxyType(dict(self.constants)),
        )

    # --- views and maps used by many decompositions; each returns its operand if there is nothing to do -----------------

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """Like `torch.reshape`; one extent may be -1."""
        shape = tuple(int(s) for s in shape)
        if shape.count(-1) == 1:
            rest = prod(s for s in shape if s != -1)
            shape = tuple(x.elements // max(rest, 1) if s == -1 else s for s in shape)
        return x if shape == x.shape else self.op("reshape", x, shape=shape)

    def permute(self, x: Value, axes: Sequence[int]) -> Value:
        rank = len(x.shape)
        axes = tuple(a + rank if -rank <= a < 0 else a for a in axes)
        return x if axes == tuple(range(rank)) else self.op("permute", x, axes=axes)

    def transpose(self, x: Value, first: int, second: int) -> Value:
        axes = list(range(len(x.shape)))
        if not axes:
            return x
        axes[first], axes[second] = axes[second], axes[first]
        return self.permute(x, axes)

    def slice(self, x: Value, axis: int, start: int, stop: int, step: int = 1) -> Value:
        """x[start:stop:step] along an axis; bounds are clamped, negative ones count from the end."""
        extent = x.shape[axis]
        start, stop, step = slice(start, stop, step).indices(extent)
        length = len(range(start, stop, step))
        if (start, length, step) == (0, extent, 1):
            return x
        return self.op("slice", x, axis=axis % len(x.shape), start=start, length=length, step=step)

    def expand(self, x: Value, shape: Sequence[int]) -> Value:
        shape = tuple(shape)
        return x if shape == x.shape else self.op("expand", x, shape=shape)

    def unsqueeze(self, x: Value, axis: int) -> Value:
        axis %= len(x.shape) + 1
        return self.reshape(x, (*x.shape[:axis], 1, *x.shape[axis:]))

    def cast(self, x: Value, dtype: str) -> Value:
        return x if x.dtype == dtype else self.op("cast", x, dtype=dtype)

    def concatenate(self, parts: Sequence[Value], axis: int) -> Value:
        """Joins parts along an axis. Many parts are joined in groups first, because one operator compares its position with the start of each of its
        parts."""
        while len(parts) > MOST_JOINED:
            groups = [parts[start : start + MOST_JOINED] for start in range(0, len(parts), MOST_JOINED)]
            parts = [self.concatenate(group, axis) for group in groups]
        return parts[0] if len(parts) == 1 else self.op("concatenate", *parts, axis=axis)

    def full(self, shape: Sequence[int], value: Scalar, dtype: str) -> Value:
        """A small constant (one element) expanded to a shape; a number beyond a floating-point type is infinite."""
        kind = getattr(torch, ELEMENT_TYPES[dtype].torch)
        element = torch.full((), value, dtype=torch.float64 if kind.is_floating_point else kind).to(kind)
        return self.expand(self.constant(element, "scalar"), shape)
