"""Attention as a library's operator, PyTorch's scaled_dot_product_attention: heads, queries and keys by the axes of `graph.attention`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.codegen.access import flatten, margin
from tilewright.graph.attention import Attention, attention
from tilewright.ir.computation import lowest
from tilewright.ir.dtypes import FLOAT32
from tilewright.ir.expr import Apply, Const, Expr, Load, Var, loads, rewrite, variables, walk
from tilewright.ir.layout import Layout
from tilewright.ir.library import Attention as Operator
from tilewright.ir.library import LibraryCall
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.attention_form import without_scale
from tilewright.kernels.library.views import Address, Operation, linear_address, merged_axes, target_of, view_of


@dataclass(frozen=True)
class Logit:
    """z of a score: `scale` * score, and what masks it: a load that is added (`mask` of a float type) or that says where the score counts (of
    booleans), or `shift`: only keys up to `query` + shift count."""

    scale: float
    mask: Load | None = None
    shift: int | None = None
    query: Var | None = None

    def scaled(self, factor: float) -> Logit:
        if self.mask is not None and self.mask.dtype != "bool":
            raise Unsuitable("what is added to a score is multiplied")
        return replace(self, scale=self.scale * factor)

    def masked(self, mask: Load | None = None, shift: int | None = None, query: Var | None = None) -> Logit:
        if self.mask is not None or self.shift is not None:
            raise Unsuitable("scores are masked twice")
        return replace(self, mask=mask, shift=shift, query=query)


def attention_operation(problem: Problem) -> Operation:
    """The region as the operator. Raises ValueError: Unsuitable, or because the operator is not defined for its views and types."""
    steps, layouts = problem.region.steps, problem.layouts
    found = attention(steps)
    if found is None or found.dtype != FLOAT32:
        raise Unsuitable("the region is no attention of float32")
    query, factor = without_scale(found.q)
    logit = _logit(found.logit, found, factor)
    if not isinstance(query, Load) or logit.scale <= 0:
        raise Unsuitable("queries are computed while they are read, or scores multiplied by a number that is not positive")
    if logit.mask is not None and not found.zeroed:
        raise Unsuitable("a row without unmasked keys gives NaN, and zeros by the operator")
    keys, values, divided = _with_heads(found)
    q, k, v = (_address(load, layouts) for load in (query, keys, values))
    mask = _address(logit.mask, layouts) if logit.mask is not None else None
    ways: list[tuple[Var | None, Var | None]] = [divided] if divided is not None else [(axis, axis) for axis in sorted(found.batch, key=q.stride)]
    if divided is None:  # or all heads share the same keys
        ways += [(axis, None) for axis in found.m if len(found.m) > 1] or [(None, None)] * (not ways)
    reasons = []
    for head, group in ways:
        others = [axis for axis in found.batch if axis != head]
        queries = [axis for axis in found.m if axis != head]
        order = (*others, *queries, *([head] if head is not None else []), *found.d)  # as PyTorch's operators on CPUs and on GPUs allocate it
        try:
            target = target_of(problem, found.product, steps[4:], problem.values[q.buffer].dtype, order)
            return target.operation(problem, _call(found, logit, Addresses(q, k, v, mask, target.address), others, queries, head, group))
        except ValueError as reason:
            reasons.append(str(reason))
    raise Unsuitable("; ".join(reasons))


def _logit(expr: Expr, found: Attention, factor: float) -> Logit:
    """The logit as a scaled and masked score, where the score itself is scaled by a factor."""
    if isinstance(expr, Load) and expr.buffer == found.scores.name:
        return Logit(factor)
    if isinstance(expr, Apply) and expr.operation in ("mul", "div", "add"):
        first, second = expr.args
        if expr.operation != "div" and found.scores.name in {load.buffer for load in loads(second)}:
            first, second = second, first
        inner = _logit(first, found, factor)
        if expr.operation == "add" and isinstance(second, Load):
            return inner.masked(second)
        if expr.operation != "add" and isinstance(second, Const) and float(second.value) != 0:
            return inner.scaled(float(second.value) if expr.operation == "mul" else 1 / float(second.value))
    if isinstance(expr, Apply) and expr.operation == "select" and expr.args[2] == lowest(expr.dtype):
        condition, inner = expr.args[0], _logit(expr.args[1], found, factor)
        form = margin(condition)
        for query in found.m:
            if form is not None and dict(form.terms) == {query: 1, found.n: -1} and form.constant >= 0:
                return inner.masked(shift=form.constant, query=query)
        if isinstance(condition, Load):
            return inner.masked(condition)
    raise Unsuitable("logits are more than scaled scores with one mask")


def _with_heads(found: Attention) -> tuple[Load, Load, tuple[Var, Var] | None]:
    """Keys and values. Where several heads share theirs, so that an axis h indexes them as h // c, they are indexed by an axis of their own, and both
    axes are returned."""
    shared = {
        node
        for node in walk(*found.k.index, *found.v.index)
        if isinstance(node, Apply) and node.operation == "floordiv" and node.args[0] in found.rows and isinstance(node.args[1], Const)
    }
    if not shared:
        return found.k, found.v, None
    if len(shared) > 1:
        raise Unsuitable("keys and values are shared in two ways")
    (quotient,) = shared
    head, divisor = quotient.args
    assert isinstance(head, Var) and isinstance(divisor, Const)
    if not head.extent or head.extent % int(divisor.value):
        raise Unsuitable("heads are not shared by equally many")
    group = Var("group", head.extent // int(divisor.value))

    def visit(node: Expr) -> Expr:
        return group if node == quotient else node

    keys, values = rewrite(found.k, visit), rewrite(found.v, visit)
    assert isinstance(keys, Load) and isinstance(values, Load)
    if head in variables(*keys.index, *values.index):
        raise Unsuitable("keys or values are shared by heads only in part")
    return keys, values, (head, group)


def _address(load: Load, layouts: Mapping[str, Layout]) -> Address:
    flat = flatten(load, layouts)
    if not isinstance(flat, Load) or flat.buffer not in layouts:
        raise Unsuitable("a factor or a mask is computed in the kernel")
    return linear_address(flat.buffer, flat.index[0])


@dataclass(frozen=True)
class Addresses:
    """Queries, keys, values, a mask if there is one, and results."""

    q: Address
    k: Address
    v: Address
    mask: Address | None
    out: Address


def _call(
    found: Attention, logit: Logit, at: Addresses, others: Sequence[Var], queries: Sequence[Var], head: Var | None, group: Var | None
) -> LibraryCall:
    """The call with an axis as that of heads, one as that of heads of keys, `others` as that of the batch, and the rest as that of queries."""
    if logit.query is not None and [*queries] != [logit.query]:
        raise Unsuitable("a causal mask is of one axis of queries")
    q, k, v, mask, out = at.q, at.k, at.v, at.mask, at.out
    batch, (q_b, k_b, v_b, out_b) = merged_axes(others, q, k, v, out)
    m, (q_m, out_m) = merged_axes(queries, q, out)
    r, (q_r, k_r) = merged_axes(found.r, q, k)
    d, (v_d, out_d) = merged_axes(found.d, v, out)
    heads, groups, n = (axis.extent or 1 if axis is not None else 1 for axis in (head, group, found.n))
    inputs = [
        view_of(q, (batch, heads, m, r), (q_b, q.stride(head) or 1, q_m, q_r)),
        view_of(k, (batch, groups, n, r), (k_b, k.stride(group) or 1, k.stride(found.n), k_r)),
        view_of(v, (batch, groups, n, d), (v_b, v.stride(group) or 1, v.stride(found.n), v_d)),
    ]
    if mask is not None:
        parts = [_broadcast(axes, q, mask) for axes in (others, [head] if head is not None else [], queries, [found.n])]
        inputs.append(view_of(mask, *zip(*parts, strict=True)))
    result = view_of(out, (batch, heads, m, d), (out_b, out.stride(head) or 1, out_m, out_d))
    return LibraryCall(Operator("attention", logit.scale, logit.shift), tuple(inputs), (result,))


def _broadcast(axes: Sequence[Var], like: Address, mask: Address) -> tuple[int, int]:
    """The extent and the stride of a mask along a dimension that consists of these axes elsewhere: 1 if none of them indexes it."""
    if not any(mask.stride(axis) for axis in axes):
        return 1, 1
    if len(axes) == 1:
        return axes[0].extent or 1, mask.stride(axes[0])
    extent, (_, stride) = merged_axes(axes, like, mask)
    return extent, stride
