"""Recognising sums of products (convolution, matrix product and anything else of that form) by their axes alone.

out[batch, m, n] = sum over r of A[batch, m, r] * B[batch, n, r]: an axis that indexes only A belongs to M (pixels), one that indexes only B to N
(output channels), one that indexes both to the batch (channel groups). Later stages use this form, never an operator's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tilewright.graph.windows import pooling_of
from tilewright.ir.computation import Step
from tilewright.ir.dtypes import FLOAT32
from tilewright.ir.expr import Apply, Expr, Load, Var, loads, variables

MULTIPLIED = frozenset({FLOAT32})
"""Types in which sums of products have schemas of their own; in other types they are ordinary reductions."""


@dataclass(frozen=True)
class Contraction:
    """A `sum` step seen as a matrix product. Axes keep the order of the step; reduced axes of extent 1 are left out."""

    step: Step
    batch: tuple[Var, ...]
    m: tuple[Var, ...]
    n: tuple[Var, ...]
    r: tuple[Var, ...]
    a: Expr
    b: Load

    @property
    def dtype(self) -> str:
        """The type of the factors when multiplied, of the products, and of the sum."""
        return self.step.dtypes[0]

    @property
    def size_m(self) -> int:
        return prod(axis.extent or 0 for axis in self.m)

    @property
    def size_n(self) -> int:
        return prod(axis.extent or 0 for axis in self.n)

    @property
    def size_r(self) -> int:
        return prod(axis.extent or 0 for axis in self.r)

    @property
    def size_batch(self) -> int:
        return prod(axis.extent or 0 for axis in self.batch)

    @property
    def flops(self) -> int:
        return 2 * self.size_batch * self.size_m * self.size_n * self.size_r


def contraction(step: Step, constants: frozenset[str] | set[str] = frozenset()) -> Contraction | None:
    """The step as a contraction, or None if it is not one: another combiner or type, a reduced axis that does not index both factors, no axis that
    indexes only B (depthwise convolution, dot products), a second factor that is computed rather than loaded, or one row of A by a B of which each
    result sums a window (depthwise filters by an image without padding): as products these would be columns of B, copied for each of its places.

    If either factor could be B, constants (weights) are preferred: they can be packed at compile time."""
    if step.combiner != "sum" or step.scan is not None or len(step.bodies) != 1:
        return None
    body = step.bodies[0]
    if body.dtype not in MULTIPLIED or not (isinstance(body, Apply) and body.operation == "mul"):
        return None
    first, second = body.args
    found = [c for c in (_with_factors(step, first, second), _with_factors(step, second, first)) if c is not None]
    return max(found, key=lambda c: (c.b.buffer in constants, c.b is second), default=None)


def anchor(steps: Sequence[Step], constants: frozenset[str] | set[str] = frozenset()) -> Contraction | None:
    """The contraction that a region's steps begin with. If row reductions follow, the factors are ordered so that these reduce N, unless a sum
    over pixels, or a pooling, follows that reduces M of the preferred factors."""
    rows = next((step.reduction for step in steps[1:] if step.reduction), ())
    step = steps[0]
    found = contraction(step, constants)
    if found is None or not rows or set(rows) <= set(found.n) or sums_pixels(steps, found) or pooling_of(steps) is not None:
        return found
    body = step.bodies[0]
    assert isinstance(body, Apply)
    first, second = body.args
    both = (_with_factors(step, first, second), _with_factors(step, second, first))
    return next((c for c in both if c is not None and set(rows) <= set(c.n)), None)


def sums_pixels(steps: Sequence[Step], found: Contraction) -> bool:
    """Whether the steps are [sum of products, sum over some of its M axes, map?], the form of global average pooling after a convolution."""
    return len(steps) > 1 and bool(steps[1].reduction) and set(steps[1].reduction) <= set(found.m)


def _with_factors(step: Step, a: Expr, b: Expr) -> Contraction | None:
    if not isinstance(b, Load) or not loads(a) or any(loads(part) for part in b.index):
        return None
    in_a, in_b = variables(a), variables(b)
    r = tuple(axis for axis in step.reduction if axis.extent != 1)
    if any(axis not in in_a or axis not in in_b for axis in r):
        return None
    batch = tuple(axis for axis in step.axes if axis in in_a and axis in in_b)
    n = tuple(axis for axis in step.axes if axis in in_b and axis not in in_a)
    m = tuple(axis for axis in step.axes if axis not in in_b)
    if prod(axis.extent or 0 for axis in n) <= 1:
        return None
    found = Contraction(step, batch, m, n, r, a, b)
    in_windows = {axis for used in map(variables, b.index) if not used.isdisjoint(n) for axis in used}
    return None if found.size_m == 1 and r and in_windows.issuperset(r) else found
