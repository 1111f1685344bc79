"""The operator table: every operator that the compiler generates code for, what it computes, and the shapes that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from tilewright.graph.operators import convolution, indexing, matmul, normalisation, pointwise, pooling, reduction, resample, shape
from tilewright.graph.operators.definition import Operator
from tilewright.ir.computation import Computation, StepBuilder, Tensor
from tilewright.ir.graph import Node, Value

__all__ = ["OPERATORS", "STRUCTURAL", "Operator", "computation", "infer"]

OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {
        operator.name: operator
        for family in (pointwise, shape, indexing, reduction, normalisation, convolution, matmul, pooling, resample)
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
    """(shape, dtype) of each result, from the operator's definition. Raises ValueError where shapes do not fit."""
    tensors = [Tensor(f"input{i}", tuple(v.shape), v.dtype) for i, v in enumerate(inputs)]
    return tuple((r.shape, r.dtype) for r in _run(operator, StepBuilder("infer"), tensors, attributes))


def computation(node: Node, values: Mapping[str, Value]) -> Computation:
    """The node's steps over graph value names; temporaries are called `<node name>.s<number>`."""
    builder = StepBuilder(node.name)
    tensors = [Tensor(name, values[name].shape, values[name].dtype) for name in node.inputs]
    results = _run(node.operator, builder, tensors, node.attributes)
    return builder.finish(results[: len(node.outputs)], node.outputs)
