"""ATen's sorts and selections of the first elements in terms of the operator table."""

from __future__ import annotations

from tilewright.frontend.handlers import Handlers
from tilewright.frontend.sorting import first_sorted
from tilewright.graph.builder import GraphBuilder
from tilewright.ir.graph import Value

HANDLERS = Handlers()


def _axis(x: Value, axis: int) -> int:
    return axis % max(len(x.shape), 1)


def _extent(x: Value, axis: int) -> int:
    return x.shape[_axis(x, axis)] if x.shape else 1


@HANDLERS.handles("topk.default")
def topk(g: GraphBuilder, x: Value, count: int, axis: int, largest: bool, _: bool = True) -> tuple[Value, Value]:
    """Sorted, also where any order is allowed. Of equal elements the first ones are taken, which PyTorch leaves open."""
    return first_sorted(g, x, _axis(x, axis), count, largest)


@HANDLERS.handles("sort.default")
def sort(g: GraphBuilder, x: Value, axis: int, descending: bool) -> tuple[Value, Value]:
    return first_sorted(g, x, _axis(x, axis), _extent(x, axis), descending)


@HANDLERS.handles("sort.stable")
def stable_sort(g: GraphBuilder, x: Value, _: bool | None, axis: int, descending: bool) -> tuple[Value, Value]:
    return sort(g, x, axis, descending)


@HANDLERS.handles("argsort.default")
def argsort(g: GraphBuilder, x: Value, axis: int, descending: bool) -> Value:
    return sort(g, x, axis, descending)[1]


@HANDLERS.handles("argsort.stable")
def stable_argsort(g: GraphBuilder, x: Value, _: bool, axis: int, descending: bool) -> Value:
    return argsort(g, x, axis, descending)


@HANDLERS.handles("msort.default")
def msort(g: GraphBuilder, x: Value) -> Value:
    return sort(g, x, 0, False)[0]
