"""Registration of handlers of ONNX operators. A handler turns one `NodeCall` into nodes of the operator table.

It returns the result, or a tuple of results with None for those that are never used. A result may also be a NumPy array: a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tilewright.frontend.handlers import Unsupported, torch_dtype
from tilewright.frontend.torch_call import call_recipe
from tilewright.graph import reference
from tilewright.graph.builder import GraphBuilder
from tilewright.ir.dtypes import BY_TORCH_NAME, ELEMENT_TYPES
from tilewright.ir.graph import Node as GraphNode
from tilewright.ir.graph import Value


class Unspecialised(Unsupported):
    """A node needs the value of an operand, which an example of the model's inputs would tell."""


Known = Value | np.ndarray  # a tensor of the graph, or one whose elements are known at import
Results = Known | tuple[Known | None, ...]
NodeHandler = Callable[["NodeCall"], Results]


@dataclass
class NodeCall:
    """One ONNX node: its operands (None where an optional one is absent), attributes, and which of its outputs are used."""

    g: GraphBuilder
    operator: str
    opset: int
    inputs: Sequence[Known | None]
    attributes: Mapping[str, Any]
    used: Sequence[bool]
    materialise: Callable[[np.ndarray], Value] = field(repr=False)
    specialise: Callable[[Value, str], Unsupported] = field(repr=False)  # asks for an operand's value; returns why this reading has none
    read: set[str] = field(default_factory=set)  # attributes that the handler has read

    def has(self, position: int) -> bool:
        return position < len(self.inputs) and self.inputs[position] is not None

    def value(self, position: int) -> Value:
        """An operand as a value of the graph; constants become constants of the graph."""
        operand = self.inputs[position] if position < len(self.inputs) else None
        if operand is None:
            raise Unsupported(f"input {position} is absent")
        return operand if isinstance(operand, Value) else self.materialise(operand)

    def optional(self, position: int) -> Value | None:
        return self.value(position) if self.has(position) else None

    def constant(self, position: int, what: str) -> np.ndarray:
        """An operand whose elements must be known at import. If it depends on inputs of the model that may be specialised, the model is read again
        with their example values.

        Raises Unsupported if it is not known in this reading."""
        operand = self.inputs[position]
        if not isinstance(operand, np.ndarray):
            assert operand is not None
            raise self.specialise(operand, f"its {what} (input {position})")
        return operand

    def integers(self, position: int, what: str) -> list[int] | None:
        """A constant operand as Python integers; None if it is absent."""
        return [int(v) for v in self.constant(position, what).reshape(-1)] if self.has(position) else None

    def operands(self) -> list[Value | int | float | bool]:
        """All operands; one-element constants as Python numbers if that does not change the rank of the result."""
        rank = max((len(v.shape) for v in self.inputs if isinstance(v, Value)), default=0)
        result: list[Value | int | float | bool] = []
        for position, operand in enumerate(self.inputs):
            if isinstance(operand, np.ndarray) and operand.size == 1 and operand.ndim <= rank and operand.dtype.kind in "fiub":
                result.append(operand.reshape(-1)[0].item())
            else:
                result.append(self.value(position))
        return result

    def attribute(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return self.attributes.get(name, default)

    def kind(self) -> str:
        """The element type of the first operand that is present."""
        return next(dtype_of(v) for v in self.inputs if v is not None)


class NodeHandlers:
    """Handlers of one family, filled while its module is imported."""

    def __init__(self) -> None:
        self.table: dict[str, NodeHandler] = {}

    def handles(self, *operators: str) -> Callable[[NodeHandler], NodeHandler]:
        """Decorator: the handler serves these operators of ONNX's default domain."""

        def register(handler: NodeHandler) -> NodeHandler:
            self.table.update((name, handler) for name in operators)
            return handler

        return register


def dtype_of(operand: Known) -> str:
    return operand.dtype if isinstance(operand, Value) else dtype_of_numpy(operand.dtype)


def dtype_of_numpy(dtype: np.dtype) -> str:
    """The name of a NumPy element type. Raises Unsupported for types that the compiler does not have."""
    name = BY_TORCH_NAME.get(dtype.name)
    if name is None:
        raise Unsupported(f"the element type {dtype.name}")
    return name


def shape_of(operand: Known) -> tuple[int, ...]:
    return tuple(operand.shape)


def axis_of(axis: int, rank: int) -> int:
    """The axis as a non-negative number. Raises ValueError if it is out of range."""
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} of a tensor of rank {rank}")
    return axis % rank


def through_torch(g: GraphBuilder, target: str, arguments: Sequence[Any], keywords: Mapping[str, Any] | None = None) -> tuple[Value, ...]:
    """A node that runs through PyTorch: `target` names the ATen operator ("aten.topk.default"). Result types come from a run on PyTorch's
    meta device."""
    inputs, call = call_recipe(arguments, keywords or {})
    attributes = {"target": target, "call": call, "reason": "no definition in the operator table"}
    node = GraphNode("probe", "torch", (), (), attributes)
    meta = [torch.empty(v.shape, dtype=torch_dtype(v.dtype), device="meta") for v in inputs]
    results = [(tuple(r.shape), BY_TORCH_NAME[str(r.dtype).removeprefix("torch.")]) for r in reference.call_torch(node, meta)]
    return g.structural("torch", inputs, results, attributes)


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ELEMENT_TYPES[name].numpy)
