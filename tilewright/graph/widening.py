"""Arithmetic on 16-bit floats is done in float32.

A graph keeps the types of its model: a value of a float16 or bfloat16 module is a 16-bit value. The steps that compute it work in float32: loads
widen, and the store of a result rounds it. A value that stays inside a kernel is not rounded. An explicit cast to a 16-bit type rounds in any case:
*cast(x, bf16)* -> *cast(cast(x, bf16), f32)*.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.ir.computation import Computation
from tilewright.ir.dtypes import NARROW_FLOATS, computed_in
from tilewright.ir.expr import Apply, Const, Expr, Load, cast, rewrite


def widened(computation: Computation) -> Computation:
    """The computation with all arithmetic on narrow floats in the type that kernels compute with."""
    return replace(computation, steps=tuple(replace(step, bodies=tuple(rewrite(body, _wide) for body in step.bodies)) for step in computation.steps))


def _wide(part: Expr) -> Expr:
    if part.dtype not in NARROW_FLOATS:
        return part
    wide = computed_in(part.dtype)
    if isinstance(part, Apply) and part.operation == "cast":
        return cast(part, wide)
    assert isinstance(part, (Apply, Const, Load))
    return replace(part, dtype=wide)
