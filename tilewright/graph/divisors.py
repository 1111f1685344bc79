"""Integer division by a constant 0, which PyTorch and ONNX's runtimes reject, is an error that names the node. A computed divisor of 0 gives 0."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tilewright.errors import InvalidModel
from tilewright.ir.dtypes import ELEMENT_TYPES, is_float, size_of
from tilewright.ir.graph import Graph, Node

DIVISIONS = frozenset({"floor_divide", "trunc_divide", "remainder", "fmod"})
"""Operators of the table whose second operand is a divisor and which also accept integers."""


def check_divisor(graph: Graph, node: Node, constants: Mapping[str, torch.Tensor]) -> None:
    """Raises InvalidModel if a node divides integers by a constant that holds a 0 in the type of the computation."""
    if node.operator not in DIVISIONS or is_float(kind := node.attributes["dtype"]) or not graph.values[node.outputs[0]].elements:
        return
    scalars = dict(node.attributes.get("scalars", ()))
    if 1 in scalars:
        zero = int(scalars[1]) % (1 << 8 * size_of(kind)) == 0
    else:
        divisor = constants.get(node.inputs[-1])
        zero = divisor is not None and not bool(divisor.to(getattr(torch, ELEMENT_TYPES[kind].torch)).all())
    if zero:
        raise division_by_zero(node.described)


def division_by_zero(described: str) -> InvalidModel:
    """The error for a node of the user's model."""
    return InvalidModel(f"{described} divides integers by a constant 0", "correct the divisor: PyTorch and ONNX Runtime refuse it as well")
