"""Recognising attention by its axes and the algebra of its steps: a sum of products whose first factor is the softmax of another sum of products.

    scores[row, n]  = sum over r of q[row, r] * k[row, n, r]
    greatest[row]   = max over n of z(scores[row, n])
    total[row]      = sum over n of exp(z(scores[row, n]) - greatest[row])
    out[row, d]     = sum over n of exp(z(scores[row, n]) - greatest[row]) / total[row] * v[row, n, d]

z is any expression of the score and of the place: scale, masks, biases. A weight may also be 0 in rows whose `greatest` is minus infinity. Axes of
the rows that index K or V are batch axes, also if they do so divided (heads that share a key); the others are queries. Like contractions, this form
is found by axes, never by an operator's name. A map may follow, as the epilogue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.graph.contraction import MULTIPLIED
from tilewright.ir.computation import Step, lowest
from tilewright.ir.expr import ZERO, Apply, Const, Expr, Load, Var, checks, compare, loads, rewrite, select, substitute, unary, variables


@dataclass(frozen=True)
class Attention:
    """Steps that compute attention. `logit` is z over a load of the scores at the rows and `n`. `zeroed`: rows whose logits are all minus infinity
    have weights of 0, instead of NaN."""

    scores: Step
    greatest: Step
    total: Step
    product: Step
    q: Expr
    k: Load
    v: Load
    logit: Expr
    n: Var
    r: tuple[Var, ...]
    d: tuple[Var, ...]
    zeroed: bool

    @property
    def rows(self) -> tuple[Var, ...]:
        return self.greatest.axes

    @property
    def batch(self) -> tuple[Var, ...]:
        """Axes of rows that index K or V."""
        shared = variables(*self.k.index, *self.v.index)
        return tuple(axis for axis in self.rows if axis in shared)

    @property
    def m(self) -> tuple[Var, ...]:
        """Axes of rows that index only queries."""
        return tuple(axis for axis in self.rows if axis not in self.batch)

    @property
    def dtype(self) -> str:
        return self.product.dtypes[0]


def attention(steps: Sequence[Step]) -> Attention | None:
    """The form of a region's steps, as `attention_steps` makes them, or None."""
    if len(steps) not in (4, 5) or [step.combiner for step in steps[:4]] != ["sum", "max", "sum", "sum"]:
        return None
    scores, greatest, total, product = steps[:4]
    rows, n = greatest.axes, greatest.reduction[0]
    d = tuple(axis for axis in product.axes if axis not in rows)
    logit = greatest.bodies[0]
    factors = _factors(scores, n), _factors(product, n)
    held = Load(greatest.name, rows, greatest.dtypes[0])
    exponential = unary("exp", logit - held)
    weights = _weights(exponential, held, Load(total.name, rows, total.dtypes[0]))
    if not d or not scores.reduction or total.bodies[0] != exponential:
        return None
    for q, k in factors[0]:
        for weight, v in factors[1]:
            if isinstance(k, Load) and isinstance(v, Load) and weight in weights and n not in variables(q):
                return Attention(scores, greatest, total, product, q, k, v, logit, n, scores.reduction, d, weight == weights[1])
    return None


def attention_steps(product: Step, known: Mapping[str, Step]) -> tuple[Step, ...] | str | None:
    """The steps of attention that end with a sum of products, in the frame of the axes of that sum. `known` has the steps that compute what it reads,
    by name. None if they are no attention; or why they are one that has no such form."""
    reduced = [axis for axis in product.reduction if axis.extent != 1]
    if product.combiner != "sum" or product.dtypes[0] not in MULTIPLIED or len(reduced) != 1:
        return None
    n = Var("n", reduced[0].extent)
    product = _in_frame(product, {reduced[0]: n}, (n,))
    for weight, v in _factors(product, n):
        weight = _inlined(weight, known)
        parts = _parts(weight)
        if parts is None or not {parts[1].buffer, parts[2].buffer} <= known.keys():
            continue
        logit, greatest, total = parts
        d = tuple(axis for axis in product.axes if axis not in variables(weight))
        rows = tuple(axis for axis in product.axes if axis not in d)
        scores = {load.buffer: load for load in loads(logit) if load.buffer in known and known[load.buffer].combiner == "sum"}
        if len(scores) != 1 or known[greatest.buffer].combiner != "max" or known[total.buffer].combiner != "sum":
            continue
        (score,) = scores.values()
        made = _at(known[greatest.buffer], greatest, rows, (n,), known), _at(known[total.buffer], total, rows, (n,), known)
        first = _at(known[score.buffer], score, (*rows, n), None, known)
        if first is None or None in made:
            return f"{score.buffer} is read in another order than its axes"
        at_rows = {
            score: Load(score.buffer, (*rows, n), score.dtype),
            greatest: Load(greatest.buffer, rows, greatest.dtype),
            total: Load(total.buffer, rows, total.dtype),
        }

        def moved(expr: Expr, at_rows: Mapping[Load, Load] = at_rows) -> Expr:
            return rewrite(expr, lambda node: at_rows.get(node, node) if isinstance(node, Load) else node)

        steps = (
            first,
            *(replace(step, bodies=tuple(map(moved, step.bodies))) for step in made if step is not None),
            replace(product, bodies=(Apply("mul", (moved(weight), v), product.dtypes[0]),)),
        )
        if attention(steps) is None:
            return "the rows of its weights are not those of a softmax"
        if any(checks(*step.bodies) for step in steps):
            return "its indices are checked at run time"
        return steps
    return None


def _factors(step: Step, n: Var) -> list[tuple[Expr, Expr]]:
    """The factors of a sum of products, in both orders if the second may be the one that is loaded; empty if it is none."""
    body = step.bodies[0]
    if step.combiner != "sum" or len(step.bodies) != 1 or not (isinstance(body, Apply) and body.operation == "mul"):
        return []
    first, second = body.args
    return [(a, b) for a, b in ((first, second), (second, first)) if isinstance(b, Load) and n in variables(*b.index)]


def _weights(exponential: Expr, greatest: Load, total: Load) -> tuple[Expr, Expr]:
    """The element of a softmax, and of one that is 0 in rows whose logits are all minus infinity."""
    plain = exponential / total
    return plain, select(compare("eq", greatest, lowest(greatest.dtype)), Const(0.0, plain.dtype), plain)


def _parts(weight: Expr) -> tuple[Expr, Load, Load] | None:
    """z, the maximum and the total of exp(z - maximum) / total, perhaps behind a condition; None for any other expression."""
    if isinstance(weight, Apply) and weight.operation == "select":
        weight = weight.args[2]
    if not (isinstance(weight, Apply) and weight.operation == "div"):
        return None
    numerator, total = weight.args
    difference = numerator.args[0] if isinstance(numerator, Apply) and numerator.operation == "exp" else None
    if not (isinstance(difference, Apply) and difference.operation == "sub"):
        return None
    logit, greatest = difference.args
    return (logit, greatest, total) if isinstance(greatest, Load) and isinstance(total, Load) else None


def _bound(step: Step, index: Sequence[Expr]) -> dict[Var, Expr] | None:
    """The axes of a step at which it stores the element with this index; None if its places are no plain axes, as those of a grouped convolution,
    whose result later steps read by its axes."""
    if len(index) != len(step.shape):
        return None
    found: dict[Var, Expr] = {axis: ZERO for axis in step.axes if axis.extent == 1}
    for place, position, extent in zip(step.index, index, step.shape, strict=True):
        if extent == 1:
            continue
        if not isinstance(place, Var) or found.setdefault(place, position) != position:
            return None
    return found if set(step.axes) <= found.keys() else None


def _inlined(expr: Expr, known: Mapping[str, Step]) -> Expr:
    """The expression with all maps computed in place, and index 0 along dimensions of extent 1."""

    def visit(node: Expr) -> Expr:
        step = known.get(node.buffer) if isinstance(node, Load) else None
        if step is None or not isinstance(node, Load) or len(node.index) != len(step.shape):
            return node
        index = tuple(ZERO if extent == 1 else position for position, extent in zip(node.index, step.shape, strict=True))
        bound = _bound(step, index) if step.kind == "map" else None
        return replace(node, index=index) if bound is None else _inlined(substitute(step.bodies[0], bound), known)

    return rewrite(expr, visit)


def _at(step: Step, load: Load, axes: tuple[Var, ...], reduction: tuple[Var, ...] | None, known: Mapping[str, Step]) -> Step | None:
    """The reduction that computes a loaded element, over the axes of the load: None if its places are no plain axes. `reduction`: what it reduces in
    the load's frame; None: axes of its own."""
    bound = _bound(step, load.index)
    own = tuple(axis for axis in step.reduction if axis.extent != 1)
    fresh = tuple(Var(f"r{i}", axis.extent) for i, axis in enumerate(own)) if reduction is None else reduction
    if bound is None or [axis.extent for axis in own] != [axis.extent for axis in fresh]:
        return None
    mapping: dict[Var, Expr] = {**{axis: ZERO for axis in step.reduction}, **bound, **dict(zip(own, fresh, strict=True))}
    body = _inlined(substitute(step.bodies[0], mapping), known)
    shape = tuple(axis.extent or 0 for axis in axes)
    return Step(step.name, shape, axes, (body,), fresh, step.combiner) if variables(body) <= {*axes, *fresh} else None


def _in_frame(step: Step, mapping: Mapping[Var, Expr], reduction: tuple[Var, ...]) -> Step:
    """The step with some axes replaced, and no axes of extent 1 in its body."""
    unit = {axis: ZERO for axis in (*step.axes, *step.reduction) if axis.extent == 1}
    axes = tuple(axis for axis in step.axes if axis.extent != 1)
    return replace(
        step,
        axes=axes,
        bodies=tuple(substitute(body, {**unit, **mapping}) for body in step.bodies),
        reduction=reduction,
        index=tuple(substitute(position, unit) for position in step.index),
    )
