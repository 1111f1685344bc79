"""Data-dependent loads: gather, index_select, advanced indexing, embedding."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.graph.operators.definition import Operator, broadcast, broadcast_load, unflatten
from tilewright.ir.computation import StepBuilder, Tensor
from tilewright.ir.expr import INDEX, Expr, cast, checked, compare, const, logical_and, select


def position(index: Expr, extent: int, negative: bool = True) -> Expr:
    """The position that an index denotes, checked if it depends on data; with `negative`, negative indices count from the end."""
    return checked(cast(index, INDEX), extent, negative)


def _require_elements(indices: Sequence[Tensor], *extents: int) -> None:
    """Raises ValueError if an indexed dimension has no elements: no index is valid then."""
    if 0 in extents and all(0 not in index.shape for index in indices):
        raise ValueError("a dimension without elements is indexed")


def _indices(b: StepBuilder, index: Tensor, *, extent: int, negative: bool) -> Tensor:
    """Indices converted to checked positions, for an operator that cannot check them itself."""
    return b.map(index.shape, lambda *i: position(index(*i), extent, negative))


def _gather(b: StepBuilder, x: Tensor, index: Tensor, *, axis: int, negative: bool = True) -> Tensor:
    """out[..., i, ...] = x[..., index[..., i, ...], ...] (torch.gather)"""
    _require_elements([index], x.shape[axis])
    return b.map(index.shape, lambda *i: x(*i[:axis], position(index(*i), x.shape[axis], negative), *i[axis + 1 :]))


def _index_select(b: StepBuilder, x: Tensor, index: Tensor, *, axis: int, negative: bool = True) -> Tensor:
    """x at the positions in a tensor of any rank, whose dimensions replace the axis."""
    _require_elements([index], x.shape[axis])
    stop = axis + index.rank
    shape = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
    return b.map(shape, lambda *i: x(*i[:axis], position(index(*i[axis:stop]), x.shape[axis], negative), *i[stop:]))


def _index(b: StepBuilder, x: Tensor, *indices: Tensor, axes: Sequence[int]) -> Tensor:
    """Advanced indexing: index tensors broadcast together and index `axes`. If these are adjacent, the broadcast dimensions replace them, else they
    come first."""
    _require_elements(indices, *(x.shape[axis] for axis in axes))
    common = broadcast(*(t.shape for t in indices))
    adjacent = list(axes) == list(range(axes[0], axes[0] + len(axes)))
    kept = [k for k in range(x.rank) if k not in axes]
    start = axes[0] if adjacent else 0
    shape = [x.shape[k] for k in kept]
    shape[start:start] = common

    def body(*i: Expr) -> Expr:
        where = i[start : start + len(common)]
        rest = iter((*i[:start], *i[start + len(common) :]))
        at = {axis: position(broadcast_load(t, where), x.shape[axis]) for axis, t in zip(axes, indices, strict=True)}
        return x(*(at[k] if k in at else next(rest) for k in range(x.rank)))

    return b.map(shape, body)


def _take(b: StepBuilder, x: Tensor, index: Tensor, *, negative: bool = True) -> Tensor:
    """Elements at flat positions."""
    size = 1
    for extent in x.shape:
        size *= extent
    _require_elements([index], size)
    return b.map(index.shape, lambda *i: x(*unflatten(position(index(*i), size, negative), x.shape)))


def _embedding_bag(b: StepBuilder, weight: Tensor, indices: Tensor, offsets: Tensor, *parameters: Tensor, mode: str, include_last: bool) -> Tensor:
    """Sum, mean or max of the rows `indices[offsets[i] : offsets[i + 1]]` for each bag i; the optional parameter holds weights of the rows."""
    _require_elements([indices], weight.shape[0])
    bags = offsets.shape[0] - (1 if include_last else 0)
    total = indices.shape[0]

    def stop(bag: Expr) -> Expr:
        if include_last:
            return cast(offsets(bag + 1), INDEX)
        return select(compare("lt", bag, bags - 1), cast(offsets(select(compare("lt", bag, bags - 1), bag + 1, 0)), INDEX), total)

    def body(bag: Expr, column: Expr, place: Expr) -> Expr:
        row = weight(position(indices(place), weight.shape[0], negative=False), column)
        if parameters:
            row = row * parameters[0](place)
        inside = logical_and(compare("ge", place, cast(offsets(bag), INDEX)), compare("lt", place, stop(bag)))
        return select(inside, row, const(float("-inf") if mode == "max" else 0, weight.dtype))

    shape = (bags, weight.shape[1])
    (result,) = b.reduce("max" if mode == "max" else "sum", shape, (total,), body)
    if mode == "sum":
        return result
    count = b.map((bags,), lambda bag: cast(stop(bag) - cast(offsets(bag), INDEX), weight.dtype))
    if mode == "max":
        return b.map(shape, lambda bag, column: select(compare("gt", count(bag), 0), result(bag, column), const(0, weight.dtype)))
    return b.map(shape, lambda bag, column: select(compare("gt", count(bag), 0), result(bag, column) / count(bag), const(0, weight.dtype)))


def _embedding_rows(b: StepBuilder, weight: Tensor, indices: Tensor, *parameters: Tensor, mode: str) -> Tensor:
    """Bags of equal length: indices [bags, length] -> [bags, columns]."""
    _require_elements([indices], weight.shape[0])
    bags, length = indices.shape

    def body(bag: Expr, column: Expr, place: Expr) -> Expr:
        row = weight(position(indices(bag, place), weight.shape[0], negative=False), column)
        return row * parameters[0](bag, place) if parameters else row

    (result,) = b.reduce("max" if mode == "max" else "sum", (bags, weight.shape[1]), (length,), body)
    return b.map(result.shape, lambda *i: result(*i) / float(max(length, 1))) if mode == "mean" else result


def _arange(b: StepBuilder, *, length: int, start: float | int, step: float | int, dtype: str) -> Tensor:
    if dtype == INDEX:
        return b.map((length,), lambda i: i * int(step) + int(start))
    return b.map((length,), lambda i: cast(i, dtype) * step + start)


def _one_hot(b: StepBuilder, index: Tensor, *, classes: int, dtype: str) -> Tensor:
    """1 where the position along a new last dimension equals the index, else 0; an index out of range (which ONNX allows) gives only zeros."""
    return b.map((*index.shape, classes), lambda *i: select(cast(index(*i[:-1]), INDEX).equals(i[-1]), const(1, dtype), const(0, dtype)))


OPERATORS: tuple[Operator, ...] = (
    Operator("indices", _indices),
    Operator("gather", _gather),
    Operator("index_select", _index_select),
    Operator("index", _index),
    Operator("take", _take),
    Operator("embedding_bag", _embedding_bag),
    Operator("embedding_rows", _embedding_rows),
    Operator("arange", _arange),
    Operator("one_hot", _one_hot),
)
