"""Attention in flat form, for the schemas of both back ends: merged axes, flat loads, and the expressions before and after the products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilewright.codegen.access import flatten, margin, merge_axes, storage_order
from tilewright.codegen.common import bytes_touched, expression_flops, extent_of, vectors_fit, widest
from tilewright.graph.attention import attention
from tilewright.ir.computation import lowest
from tilewright.ir.dtypes import DEFAULT_FLOAT, computed_in, size_of
from tilewright.ir.expr import Apply, Const, Expr, Load, Var, compare, index_const, replace_loads, select, substitute
from tilewright.ir.layout import Layout
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.ir.scalar import OPERATIONS
from tilewright.kernels.columns import ceil_divided

SCORE, SUM = "score", "weighted"
"""Names by which `AttentionForm.logit` loads the score, and `AttentionForm.element` the weighted sum of values."""


SOFTMAX_FLOPS = 3 + OPERATIONS["exp"].flops
"""Operations per score besides the products: maximum, difference, exponential, sum."""


@dataclass(frozen=True)
class AttentionFacts:
    """Sizes: `m` queries and `n` keys for each of `batch`, `r` elements of a key and `d` of a value.

    `q_vector`, `k_vector`, `v_vector`: the widest loads along r, r and d; `store_vector`: the widest stores along d. `q_bytes`, `k_bytes`, `v_bytes`,
    `other_bytes` (masks, epilogue): distinct bytes that are read. `logit_flops`: operations between a score and its exponential; `q_flops`: those of
    an element of a query; `epilogue_flops`: those of a result. `shift`: query m sees only keys up to m + shift (a causal mask); None: all.
    `stored_bytes`: bytes of one element of keys and values in memory."""

    batch: int
    m: int
    n: int
    r: int
    d: int
    q_vector: int
    k_vector: int
    v_vector: int
    store_vector: int
    q_bytes: int
    k_bytes: int
    v_bytes: int
    other_bytes: int
    bytes_written: int
    logit_flops: float = 0.0
    q_flops: float = 0.0
    epilogue_flops: float = 0.0
    element_bytes: int = size_of(DEFAULT_FLOAT)
    shift: int | None = None
    stored_bytes: int = size_of(DEFAULT_FLOAT)

    @property
    def read_bytes(self) -> int:
        return self.q_bytes + self.k_bytes + self.v_bytes + self.other_bytes

    def passes(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Tiles of `keys` keys over which a tile of `queries` queries passes: the mean over all tiles of queries."""
        tiles = ceil_divided(self.m, queries)
        last = (np.arange(tiles.max(initial=1))[:, None] + 1) * queries + (self.n if self.shift is None else self.shift)
        each = np.minimum(ceil_divided(last, keys), ceil_divided(self.n, keys)) * (np.arange(tiles.max(initial=1))[:, None] < tiles)
        mean: np.ndarray = each.sum(0) / tiles
        return mean

    @property
    def flops(self) -> float:
        """Operations of the two products and of the softmax between them."""
        one = np.ones(1, dtype=np.int64)
        return float(self.batch * self.m * self.passes(one, one)[0]) * (2 * self.r + 2 * self.d + self.logit_flops + SOFTMAX_FLOPS)


@dataclass(frozen=True)
class AttentionForm:
    """Flat loads q[batch, m, r], k[batch, n, r] and v[batch, n, d]; `logit` over a load of SCORE at (batch, m, n); `element`, over a load of SUM, is
    stored at `offset` of `output`. Axes are in loop order, fastest last. `zeroed`: rows whose logits are all minus infinity give zeros. `seen`: the
    logits of the keys that a causal mask (`AttentionFacts.shift`) leaves; without one, all. `stored`: the types of keys and of values in memory."""

    output: str
    dtype: str
    batch: tuple[Var, ...]
    m: tuple[Var, ...]
    n: Var
    r: tuple[Var, ...]
    d: tuple[Var, ...]
    q: Expr
    k: Load
    v: Load
    logit: Expr
    element: Expr
    offset: Expr
    zeroed: bool
    seen: Expr
    stored: tuple[str, str]
    layouts: Mapping[str, Layout]
    facts: AttentionFacts

    def bound(self, mapping: Mapping[Var, Expr]) -> AttentionForm:
        """The form with some axes given."""
        q, logit, seen, element, offset = (substitute(e, mapping) for e in (self.q, self.logit, self.seen, self.element, self.offset))
        k, v = (replace(load, index=tuple(substitute(position, mapping) for position in load.index)) for load in (self.k, self.v))
        return replace(self, q=q, k=k, v=v, logit=logit, seen=seen, element=element, offset=offset)


def attention_form(problem: Problem) -> AttentionForm:
    """The form of a region of kind attention.

    Raises:
        Unsuitable: if a factor is computed where it would be loaded, or its element type has no vectors.
    """
    region = problem.region
    found = attention(region.steps)
    if found is None:
        raise Unsuitable(f"region {region.name} is not attention")
    last, layouts, values = region.steps[-1], problem.layouts, problem.values
    held = {found.scores.name: Load(SCORE, (index_const(0),), found.dtype), found.product.name: Load(SUM, (index_const(0),), found.dtype)}
    element = held[found.product.name] if last is found.product else last.bodies[0]
    output = region.outputs[0]
    flat = [replace_loads(flatten(e, layouts), held) for e in (found.q, found.k, found.v, found.logit, element)]
    unit: dict[Var, Expr] = {axis: index_const(0) for axis in last.axes if axis.extent == 1}
    expressions: tuple[Expr, ...] = tuple(substitute(e, unit) for e in (*flat, layouts[output].offset(last.index)))
    merged: list[tuple[Var, ...]] = []
    for axes in (found.batch, found.m, found.d):
        own, expressions = merge_axes(storage_order(axes, expressions[-1]), expressions)
        merged.append(own)
    r, expressions = merge_axes(found.r, expressions)
    batch, m, d = merged
    q, k, v, logit, element, offset = expressions
    if not (isinstance(k, Load) and isinstance(v, Load) and k.dtype == v.dtype == q.dtype == found.dtype):
        raise Unsuitable("keys or values are not loaded as they are multiplied")
    stored = values[k.buffer].dtype, values[v.buffer].dtype
    if any(computed_in(dtype) != found.dtype for dtype in stored):
        raise Unsuitable("keys or values are stored in another type than they are multiplied")
    causal = _causal(logit, m, found.n)
    every = (*batch, *m, found.n, *r, *d)
    facts = AttentionFacts(
        extent_of(batch),
        extent_of(m),
        found.n.extent or 0,
        extent_of(r),
        extent_of(d),
        loaded_width(q, r, layouts),
        loaded_width(k, r, layouts),
        loaded_width(v, d, layouts),
        widest(element, d[-1], layouts, offset),
        bytes_touched([q], every, values),
        bytes_touched([k], every, values),
        bytes_touched([v], every, values),
        bytes_touched([logit], (*batch, *m, found.n), values) + bytes_touched([element], (*batch, *m, *d), values),
        values[output].bytes,
        expression_flops(logit),
        expression_flops(q),
        expression_flops(element),
        size_of(found.dtype),
        causal[0] if causal is not None else None,
        max(map(size_of, stored)),
    )
    seen = causal[1] if causal is not None else logit
    return AttentionForm(output, found.dtype, batch, m, found.n, r, d, q, k, v, logit, element, offset, found.zeroed, seen, stored, layouts, facts)


def _causal(logit: Expr, m: Sequence[Var], n: Var) -> tuple[int, Expr] | None:
    """(shift, other logits) if the logits of all keys beyond query + shift are minus infinity, with a shift of at least 0; otherwise None."""
    if not (isinstance(logit, Apply) and logit.operation == "select" and logit.args[2] == lowest(logit.dtype)) or len(m) != 1:
        return None
    condition, seen, _ = logit.args
    form = margin(condition)
    return (form.constant, seen) if form is not None and dict(form.terms) == {m[0]: 1, n: -1} and form.constant >= 0 else None


def loaded_width(expr: Expr, axes: Sequence[Var], layouts: Mapping[str, Layout], most: int = 4) -> int:
    """The widest vectors, of up to `most` elements, in which the expression is loaded along the last axis."""
    lanes = widest(expr, axes[-1], layouts, most=most)
    vector = vectors_fit(expr, axes[-1], lanes, layouts)
    return lanes if vector is not None and vector.lanes == lanes else 1


def finite(greatest: Expr) -> Expr:
    """The greatest logit, or 0 for minus infinity: as long as no logit of the row is above minus infinity, differences from it are then minus
    infinity instead of NaN, and their exponentials 0."""
    return select(compare("eq", greatest, lowest(greatest.dtype)), Const(0.0, greatest.dtype), greatest)


def inverse(total: Expr, zeroed: bool) -> Expr:
    """What turns the sum of a row into its result. A total of 0 means that all logits are minus infinity: the result is then NaN, or the sum itself,
    of values times 0, if such rows are `zeroed`."""
    quotient = 1.0 / total
    return select(compare("eq", total, 0.0), 1.0, quotient) if zeroed else quotient


def scale_apart(form: AttentionForm) -> tuple[AttentionForm, float, bool]:
    """The form with queries as they are loaded, without a constant that multiplies them; a scale; and whether its logits are bare: scores, which are
    to be multiplied by the scale, a positive constant, or minus infinity where they are masked. Otherwise they have the scale, and it is 1."""
    q, scale = without_scale(form.q)
    bare = scale > 0 and _is_bare(form.logit)
    scaled = {} if bare else {SCORE: Load(SCORE, (index_const(0),), form.dtype) * scale}
    logit, seen = (replace_loads(expr, scaled) for expr in (form.logit, form.seen))
    facts = replace(form.facts, logit_flops=0.0 if bare and isinstance(seen, Load) else expression_flops(logit))
    return replace(form, q=q, logit=logit, seen=seen, facts=facts), scale if bare else 1.0, bare


def without_scale(q: Expr) -> tuple[Expr, float]:
    """A load times a constant as both; any other factor, and 1."""
    if isinstance(q, Apply) and q.operation == "mul":
        for load, scale in (q.args, q.args[::-1]):
            if isinstance(load, Load) and isinstance(scale, Const):
                return load, float(scale.value)
    return q, 1.0


def _is_bare(logit: Expr) -> bool:
    """Whether the logit is the score, or minus infinity where it is masked."""
    if isinstance(logit, Apply) and logit.operation == "select":
        return any(_is_bare(one) and other == lowest(other.dtype) for one, other in (logit.args[1:], logit.args[:0:-1]))
    return isinstance(logit, Load) and logit.buffer == SCORE
