"""The operator table: every operator for which the compiler generates code, its computation, and its shape inference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from tilewright.graph.operators import convolution, indexing, matmul, normalisation, pointwise, pooling, reduction, resample, sampling, scatter, shape
from tilewright.graph.operators.definition import Operator
from tilewright.graph.widening import widened
from tilewright.ir.computation import Computation, Step, StepBuilder, Tensor
from tilewright.ir.expr import Apply, Expr, Load, Var, children, linear, range_of
from tilewright.ir.graph import Node, Value

__all__ = ["OPERATORS", "STRUCTURAL", "Operator", "computation", "infer"]

OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {
        operator.name: operator
        for family in (pointwise, shape, indexing, scatter, reduction, normalisation, convolution, matmul, pooling, resample, sampling)
        for operator in family.OPERATORS
    }
)

STRUCTURAL = frozenset({"scan", "torch"})  # node operators without steps: a loop over a body graph, and a call through PyTorch


class Typed(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


def _run(operator: str, builder: StepBuilder, inputs: Sequence[Tensor], attributes: Mapping[str, Any]) -> tuple[Tensor, ...]:
    result = OPERATORS[operator].define(builder, *inputs, **attributes)
    return (result,) if isinstance(result, Tensor) else tuple(result)


def infer(operator: str, inputs: Sequence[Typed], attributes: Mapping[str, Any]) -> tuple[tuple[tuple[int, ...], str], ...]:
    """(shape, dtype) of each result, from the operator's definition. Raises ValueError if shapes do not fit."""
    tensors = [Tensor(f"input{i}", tuple(v.shape), v.dtype) for i, v in enumerate(inputs)]
    builder = StepBuilder("infer")
    results = _run(operator, builder, tensors, attributes)
    _check_loads(operator, builder.steps, {tensor.name: tensor.shape for tensor in tensors})
    return tuple((r.shape, r.dtype) for r in results)


def _check_loads(operator: str, steps: Sequence[Step], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError if a definition reads an input outside its shape, because attributes or input shapes do not fit. Checks unguarded loads whose
    indices are linear in the axes."""
    for step in steps:
        if not all((*step.shape, *(axis.extent for axis in step.reduction))):
            continue
        for load in _unguarded(step.bodies):
            for position, extent in zip(load.index, shapes.get(load.buffer, ()), strict=False):
                if all(isinstance(atom, Var) for atom, _ in linear(position).terms):
                    low, high = range_of(position)
                    if low < 0 or high >= extent:
                        outside = high if low >= 0 else low
                        raise ValueError(f"{operator} of {shapes[load.buffer]} would read position {outside:g} of a dimension of {extent}")


def _unguarded(bodies: Sequence[Expr]) -> Iterator[Load]:
    """Loads that no condition guards."""
    stack, seen = list(bodies), set()
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Load):
            yield node
        stack.extend(node.args[:1] if isinstance(node, Apply) and node.operation == "select" else children(node))


def computation(node: Node, values: Mapping[str, Value]) -> Computation:
    """The node's steps over graph value names; temporaries are called `<node name>.s<number>`. Arithmetic on 16-bit floats is widened."""
    builder = StepBuilder(node.name)
    tensors = [Tensor(name, values[name].shape, values[name].dtype) for name in node.inputs]
    results = _run(node.operator, builder, tensors, node.attributes)
    return widened(builder.finish(results[: len(node.outputs)], node.outputs))
