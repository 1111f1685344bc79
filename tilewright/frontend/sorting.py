"""The first elements of a few short sorted rows, by counting for each element those that come before it: maps and sums, which take less time than a
call of PyTorch between kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilewright.graph.builder import GraphBuilder
from tilewright.ir.dtypes import is_float
from tilewright.ir.graph import Value

MOST_PAIRS = 1 << 12
"""Pairs of elements of a row, over all rows, up to which every pair is compared."""


def first_sorted(g: GraphBuilder, x: Value, axis: int, count: int, descending: bool, constant: Callable[[np.ndarray], Value]) -> tuple[Value, Value]:
    """The first `count` elements along an axis in sorted order, and their positions (i64). Of equal elements the one with the lower position comes
    first; NaN is greater than every number."""
    extent = x.shape[axis]
    rows = g.permute(x, (*(k for k in range(len(x.shape)) if k != axis), axis))
    one, other = g.unsqueeze(rows, -1), g.unsqueeze(rows, -2)  # x_i and x_j
    number = np.arange(extent, dtype=np.int64)
    i, j = constant(number.reshape(-1, 1)), constant(number)
    before = g.pointwise("gt" if descending else "lt", other, one)
    equal = g.pointwise("eq", other, one)
    if is_float(x.dtype):
        mine, its = g.pointwise("isnan", one), g.pointwise("isnan", other)
        wins, loses = (its, mine) if descending else (mine, its)
        before = g.pointwise("logical_or", before, g.pointwise("logical_and", wins, g.pointwise("logical_not", loses)))
        equal = g.pointwise("logical_or", equal, g.pointwise("logical_and", mine, its))
    before = g.pointwise("logical_or", before, g.pointwise("logical_and", equal, g.pointwise("lt", j, i)))
    rank = g.op("sum", g.cast(before, "i64"), axes=(len(rows.shape),), keepdim=False)  # of each element among its row
    chosen = g.pointwise("eq", g.unsqueeze(rank, -2), constant(np.arange(count, dtype=np.int64).reshape(-1, 1)))

    def taken(values: Value) -> Value:
        """The one element of a row that is chosen."""
        found = g.op("sum", g.pointwise("where", chosen, values, 0, dtype=values.dtype), axes=(len(rows.shape),), keepdim=False)
        last = len(rows.shape) - 1
        return g.permute(g.cast(found, values.dtype), (*range(axis), last, *range(axis, last)))

    return taken(g.unsqueeze(rows, -2)), taken(j)
