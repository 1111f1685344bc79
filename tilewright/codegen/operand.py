"""A constant operand as a strided view, from which it is packed at compile time."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.expr import Load, Var, coefficient, linear, range_of, variables
from tilewright.ir.layout import row_major


def operand_view(load: Load, shape: Sequence[int], axes: Sequence[Var]) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """(sizes, strides, offset) with which `torch.as_strided` turns the row-major constant of `shape` into an array indexed by `axes`.

    None if the load's flat offset is not linear in the axes or contains another variable, or if an index can leave the constant, as behind a
    guard."""
    if any(low < 0 or high >= extent for (low, high), extent in zip(map(range_of, load.index), shape, strict=True)):
        return None
    flat = row_major(shape).offset(load.index)
    strides = []
    for axis in axes:
        stride = coefficient(flat, axis)
        if stride is None or stride < 0 or axis.extent is None:
            return None
        strides.append(stride)
    if any(variable not in axes for variable in variables(flat)):
        return None
    form = linear(flat)
    if any(not isinstance(atom, Var) for atom, _ in form.terms):
        return None
    return tuple(int(axis.extent or 0) for axis in axes), tuple(strides), form.constant
