"""The first elements of sorted rows: each element and its position become one integer, of which all are distinct, and the greatest is found again and
again. A few passes over a row, in vectors, take less time than a sort.
"""

from __future__ import annotations

import torch

from tilewright.frontend.handlers import Unsupported
from tilewright.graph.builder import GraphBuilder
from tilewright.ir.dtypes import ELEMENT_TYPES, FLOAT32, is_float
from tilewright.ir.expr import INDEX
from tilewright.ir.graph import Value

MOST_PASSES = 16
MOST_STEPS = 1 << 15
"""Elements of a row, times passes, up to which a sort, or a selection in one pass, is not faster."""
_SIGN, _NAN = 0x7FFFFFFF, 0x7FFFFFFF


def first_sorted(g: GraphBuilder, x: Value, axis: int, count: int, descending: bool) -> tuple[Value, Value]:
    """The first `count` elements along an axis in sorted order, and their positions (i64). Of equal elements the one with the lower position comes
    first; NaN is greater than every number. Raises Unsupported for float64, for long rows of 64-bit integers, and for many passes."""
    if not x.shape:
        values, positions = first_sorted(g, g.reshape(x, (1,)), 0, count, descending)
        return g.reshape(values, ()), g.reshape(positions, ())
    extent, last = x.shape[axis], len(x.shape) - 1
    if count > MOST_PASSES or count * extent > MOST_STEPS:
        raise Unsupported(f"{count} passes over rows of {extent} elements take longer than a sort")
    wide = ELEMENT_TYPES[x.dtype].bytes > 4
    if wide and (is_float(x.dtype) or extent * extent > MOST_STEPS):
        raise Unsupported(f"a sort of {extent} elements of {x.dtype}, which fill 64 bits")
    if not (x.elements and count):
        raise Unsupported("a sort of nothing")
    rows = g.permute(x, (*(k for k in range(last + 1) if k != axis), axis))
    bits = (extent - 1).bit_length()
    order = _smaller(g, rows) if wide else g.cast(_order(g, rows), INDEX)
    order = order if descending else g.pointwise("bitwise_not", order)
    first = g.constant(torch.arange(extent - 1, -1, -1), "positions")  # of equal elements the greatest
    greatest = g.op("largest", g.pointwise("bitwise_or", g.pointwise("shift_left", order, bits), first), count=count)
    back = g.pointwise("minimum", g.pointwise("remainder", greatest, 1 << bits), extent - 1)  # which proves the range of positions
    positions = g.pointwise("sub", extent - 1, back, dtype="i64")
    values = g.op("gather", rows, positions, axis=last)
    turned = (*range(axis), last, *range(axis, last))
    return g.permute(values, turned), g.permute(positions, turned)


def _smaller(g: GraphBuilder, x: Value) -> Value:
    """For each element of a row how many are smaller, where elements leave no bits for their positions."""
    *rows, extent = x.shape
    pairs = g.pointwise("lt", g.reshape(x, (*rows, 1, extent)), g.reshape(x, (*rows, extent, 1)))
    return g.op("sum", g.cast(pairs, INDEX), axes=(len(rows) + 1,))


def _order(g: GraphBuilder, x: Value) -> Value:
    """Integers in the order of numbers: of floats their bits, those below a negative sign inverted; zeros are equal, and all NaN."""
    if not is_float(x.dtype):
        return x
    number = g.cast(x, FLOAT32)
    bits = g.op("bit_cast", number, dtype="i32")
    order = g.pointwise("where", g.pointwise("lt", bits, 0), g.pointwise("bitwise_xor", bits, _SIGN), bits, dtype="i32")
    order = g.pointwise("where", g.pointwise("eq", number, 0), 0, order, dtype="i32")
    return g.pointwise("where", g.pointwise("isnan", number), _NAN, order, dtype="i32")
