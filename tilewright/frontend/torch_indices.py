"""Checks of indices before operators that run through PyTorch. PyTorch checks them as well, but on a GPU by a device-side assertion, after which the
process cannot use that GPU any more. The indices listed here are checked by one of our kernels, like all other indices, and PyTorch receives valid
positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tilewright.graph.builder import GraphBuilder
from tilewright.ir.graph import Value

ALONG_A_DIMENSION: Mapping[str, bool] = MappingProxyType(
    {
        "scatter": False,
        "scatter_add": False,
        "scatter_reduce": False,
        "index_add": False,
        "index_copy": False,
        "index_reduce": False,
        "index_fill": True,
    }
)
"""ATen operators on (x, dimension, index, ...), and whether negative indices count from the end."""


def positions(g: GraphBuilder, index: Value, extent: int, negative: bool) -> Value:
    """The positions that indices denote, checked; masks and indices into an empty dimension are returned unchanged."""
    if index.dtype == "bool" or not extent:
        return index
    return g.op("indices", index, extent=extent, negative=negative)


def checked_arguments(g: GraphBuilder, target: str, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The positional arguments of an ATen operator ("aten.scatter.src") with its indices checked."""
    name = target.removeprefix("aten.").partition(".")[0]
    x, *rest = arguments if arguments else (None,)
    if not isinstance(x, Value) or not x.shape:
        return tuple(arguments)
    if name in ALONG_A_DIMENSION and len(rest) > 1 and isinstance(rest[1], Value):
        return x, rest[0], positions(g, rest[1], x.shape[rest[0]], ALONG_A_DIMENSION[name]), *rest[2:]
    if name == "put" and rest and isinstance(rest[0], Value):
        return x, positions(g, rest[0], x.elements, True), *rest[1:]
    if name == "index_put" and rest and isinstance(rest[0], (list, tuple)):
        return x, _of_dimensions(g, x, rest[0]), *rest[1:]
    return tuple(arguments)


def _of_dimensions(g: GraphBuilder, x: Value, indices: Sequence[Value | None]) -> list[Value | None]:
    """One index per leading dimension; a mask covers as many dimensions as its rank."""
    result: list[Value | None] = []
    axis = 0
    for index in indices:
        result.append(index if index is None else positions(g, index, x.shape[axis], True))
        axis += len(index.shape) if index is not None and index.dtype == "bool" else 1
    return result
