"""The second factor of a contraction as a matrix of its own: strided views of constants, packed into panels when compiling."""

from __future__ import annotations

from typing import Sequence

from ..ir.expr import Load, Var, linear
from ..ir.layout import Layout, row_major


def operand_view(load: Load, shape: Sequence[int], axes: Sequence[Var]) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """(sizes, strides, offset) of the view of a row-major tensor of `shape` whose dimensions are `axes` (as torch.as_strided takes them);
    None where the load's offset is not linear in the axes or knows other variables."""
    form = linear(row_major(shape).offset(load.index))
    strides = {axis: 0 for axis in axes}
    for atom, coefficient in form.terms:
        if not isinstance(atom, Var) or atom not in strides:
            return None
        strides[atom] = coefficient
    if any(stride < 0 for stride in strides.values()):
        return None
    return tuple(axis.extent or 0 for axis in axes), tuple(strides.values()), form.constant


def packed_panels(sizes: Sequence[int], batch: int, panel: int) -> Layout:
    """Panels of `panel` neighbouring elements of the last dimension: (batch..., last / panel, reduced..., last mod panel). `batch` counts the
    leading dimensions that stay outermost. The last dimension is padded to a multiple of the panel."""
    last = len(sizes) - 1
    middle = range(batch, last)
    order = (*((d, 0) for d in range(batch)), (last, 0), *((d, 0) for d in middle), (last, panel))
    return Layout(tuple(sizes), order)
