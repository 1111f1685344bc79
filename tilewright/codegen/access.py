"""From logical to flat accesses: the preparation of a region's steps before a lowering builds loops.

A step loads logical elements (`x[n, c, y, x]`). Here layouts turn these into flat offsets, padding guards that a halo makes unnecessary are removed,
axes that are contiguous in every access are merged, and axes that the index arithmetic divides are split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

from tilewright.ir.computation import Step
from tilewright.ir.dtypes import FLOAT32, NARROW_FLOATS
from tilewright.ir.expr import (
    INDEX,
    TRUE,
    Apply,
    Const,
    Expr,
    Linear,
    Load,
    Var,
    children,
    coefficient,
    combined,
    floordiv,
    linear,
    loads,
    mod,
    range_of,
    rebuild,
    rewrite,
    substitute,
    variables,
    walk,
)
from tilewright.ir.kernel import Let
from tilewright.ir.layout import Layout

VECTOR_TYPES = frozenset({FLOAT32})
"""Types whose loads and stores may be vectors."""


def flatten(expr: Expr, layouts: Mapping[str, Layout]) -> Expr:
    """Turns logical loads of stored values into loads of one flat offset. Loads of names without a layout (results inside the kernel) are kept.

    `select(in bounds, x[i], 0)` becomes `x[i]` if the halo of x covers every i that can occur (the halo is zero)."""

    def visit(node: Expr) -> Expr:
        if isinstance(node, Apply) and node.operation == "select":
            guarded, other = node.args[1], node.args[2]
            if isinstance(guarded, Load) and guarded.buffer in layouts and isinstance(other, Const) and other.value == 0:
                layout = layouts[guarded.buffer]
                if covers(layout, guarded.index) and is_bounds_check(node.args[0], guarded.index, layout.shape):
                    return guarded
        return node

    def flat(node: Expr) -> Expr:
        if isinstance(node, Load) and node.buffer in layouts:
            return Load(node.buffer, (layouts[node.buffer].offset(node.index),), node.dtype)
        return node

    return rewrite(rewrite(expr, visit, plain=False), flat, plain=False)


def margin(condition: Expr) -> Linear | None:
    """What is at least 0 where a comparison of two indices holds; None for any other condition."""
    if not (isinstance(condition, Apply) and condition.operation in ("lt", "le", "gt", "ge") and condition.args[0].dtype == INDEX):
        return None
    less, greater = condition.args if condition.operation in ("lt", "le") else reversed(condition.args)
    return combined(((greater, 1), (less, -1)), -1 if condition.operation in ("lt", "gt") else 0)


def is_bounds_check(condition: Expr, index: Sequence[Expr], shape: Sequence[int]) -> bool:
    """Whether the condition only says that the index lies within the shape: each conjunct is 0 <= index[d] or index[d] < shape[d]."""
    conjuncts: list[Expr] = [condition]
    allowed = {linear(position) for position in index}
    allowed |= {combined(((position, -1),), extent - 1) for position, extent in zip(index, shape, strict=True)}
    known = {frozenset(form.terms): set[int]() for form in allowed}
    for form in allowed:
        known[frozenset(form.terms)].add(form.constant)
    while conjuncts:
        part = conjuncts.pop()
        if isinstance(part, Apply) and part.operation == "and":
            conjuncts.extend(part.args)
            continue
        least = margin(part)
        if least is None or least.constant not in known.get(frozenset(least.terms), ()):
            return False
    return True


def covers(layout: Layout, index: Sequence[Expr]) -> bool:
    """Whether the layout has a halo and its storage, including the halo, exists for every value that the index can take."""
    if not any(map(any, layout.halo)):
        return False
    for position, extent, (before, after) in zip(index, layout.shape, layout.halo, strict=True):
        low, high = range_of(position)
        if low < -before or high > extent - 1 + after:
            return False
    return True


def needed_halo(expr: Expr, buffer: str, shape: Sequence[int]) -> tuple[tuple[int, int], ...] | None:
    """The halo that makes the guards of all zero-guarded loads of `buffer` unnecessary; None if there is no such load or no bound."""
    halo = [(0, 0)] * len(shape)
    found = False
    for node in walk(expr):
        if not (isinstance(node, Apply) and node.operation == "select" and isinstance(node.args[1], Load)):
            continue
        load, other = node.args[1], node.args[2]
        if load.buffer != buffer or not (isinstance(other, Const) and other.value == 0):
            continue
        if not is_bounds_check(node.args[0], load.index, shape):
            return None
        for dim, (position, extent) in enumerate(zip(load.index, shape, strict=True)):
            low, high = range_of(position)
            if low == -inf or high == inf:
                return None
            halo[dim] = (max(halo[dim][0], int(-low), 0), max(halo[dim][1], int(high) - extent + 1, 0))
            found = True
    return tuple(halo) if found and any(map(any, halo)) else None


def split_divided_axes(step: Step) -> Step:
    """Splits each axis v that occurs as v // c or v mod c (c divides its extent) into two, v = v_outer * c + v_inner, so that every index is linear
    again: reshapes and channel groups then need no division in the loops."""
    return _split(step)[0]


def split_divided_sum(step: Step, constants: frozenset[str]) -> Step:
    """A sum of products whose reduced axes are split like this where a view has permuted the parts of one: where both v // c and v mod c occur. What
    varies fastest in memory comes last, also if the view has exchanged the parts (a shuffle of channels). Other factors can be packed in any order if
    they are among the `constants`."""
    seen = {
        (node.operation, node.args[0], node.args[1])
        for node in walk(*step.bodies)
        if isinstance(node, Apply) and node.operation in ("floordiv", "mod") and node.args[0] in step.reduction
    }
    divided = {axis for operation, axis, divisor in seen if operation == "mod" and ("floordiv", axis, divisor) in seen}
    split, _ = _split(step, {axis for axis in step.reduction if axis in divided})
    order = list(split.reduction)
    for outer, inner in pairwise(split.reduction):
        strides = [
            (coefficient(position, outer), coefficient(position, inner))
            for load in loads(*split.bodies)
            if load.buffer not in constants
            for position in load.index
        ]
        if outer not in step.reduction and inner not in step.reduction and any(low == 1 and high and high > 1 for low, high in strides):
            at = order.index(outer)
            order[at : at + 2] = [inner, outer]
    return replace(split, reduction=tuple(order))


def split_divided_rows(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Applies `split_divided_axes` to each of a region's steps. If a step's own axis is split, later steps read its result with the split indices."""
    result: list[Step] = []
    splits: dict[str, list[tuple[int, int]]] = {}

    def at_parts(node: Expr) -> Expr:
        if not isinstance(node, Load):
            return node
        index = list(node.index)
        for position, divisor in splits.get(node.buffer, ()):
            index[position : position + 1] = [floordiv(index[position], divisor), mod(index[position], divisor)]
        return replace(node, index=tuple(index))

    for step in steps:
        fresh, own = _split(replace(step, bodies=tuple(rewrite(body, at_parts) for body in step.bodies)) if any(splits.values()) else step)
        splits.update({name: own for name in step.names})
        result.append(fresh)
    return tuple(result)


def _split(step: Step, allowed: set[Var] | None = None) -> tuple[Step, list[tuple[int, int]]]:
    """The step without divided axes (of those `allowed`), and the (position, divisor) of each split of one of its own axes, in the order in which
    they were made."""
    splits: list[tuple[int, int]] = []
    for _ in range(8):
        divided = _divided_axis(step, allowed)
        if divided is None:
            break
        axis, divisor = divided
        assert axis.extent is not None
        outer = Var(axis.name + "o", axis.extent // divisor)
        inner = Var(axis.name + "i", divisor)
        whole = outer * divisor + inner
        mapping: dict[Var, Expr] = {axis: whole}
        if allowed is not None:
            allowed = {*allowed, outer, inner}
        if axis in step.axes:
            splits.append((step.axes.index(axis), divisor))

        def expand(axes: tuple[Var, ...], axis: Var = axis, outer: Var = outer, inner: Var = inner) -> tuple[Var, ...]:
            return tuple(part for a in axes for part in ((outer, inner) if a == axis else (a,)))

        step = replace(
            step,
            axes=expand(step.axes),
            reduction=expand(step.reduction),
            bodies=tuple(substitute(body, mapping) for body in step.bodies),
            index=tuple(substitute(i, mapping) for i in step.index),
        )
    return step, splits


def _divided_axis(step: Step, allowed: set[Var] | None = None) -> tuple[Var, int] | None:
    own = set(step.axes) | set(step.reduction) if allowed is None else set(allowed)
    if step.scan is not None:
        own -= {step.scan, *step.reduction}
    for node in walk(*step.bodies, *step.index):
        if isinstance(node, Apply) and node.operation in ("floordiv", "mod") and node.dtype == INDEX and isinstance(node.args[1], Const):
            form = linear(node.args[0])
            divisor = int(node.args[1].value)
            for atom, scale in form.terms:
                if isinstance(atom, Var) and atom in own and atom.extent and divisor % abs(scale) == 0:
                    part = divisor // abs(scale)
                    if 1 < part < atom.extent and atom.extent % part == 0:
                        return atom, part
    return None


def storage_order(axes: Sequence[Var], offset: Expr) -> tuple[Var, ...]:
    """The axes by their stride in a flat offset, largest first; axes on which the offset does not depend, or not linearly, come first."""
    strides = {axis: coefficient(offset, axis) for axis in axes}
    return tuple(sorted(axes, key=lambda axis: -abs(strides[axis] or (1 << 62))))


def mergeable(outer: Var, inner: Var, offsets: Iterable[Expr]) -> bool:
    """Whether every offset treats (outer, inner) as one axis: linear in both, with outer's stride = inner's stride * inner's extent."""
    for offset in offsets:
        c_outer, c_inner = coefficient(offset, outer), coefficient(offset, inner)
        if c_outer is None or c_inner is None or c_outer != c_inner * (inner.extent or 0):
            return False
    return True


def merge_axes(
    axes: Sequence[Var], expressions: Sequence[Expr], may_merge: Callable[[Var, Var], bool] = lambda outer, inner: True
) -> tuple[tuple[Var, ...], tuple[Expr, ...]]:
    """Merges neighbouring axes (outermost first) that are contiguous in all flat offsets in the expressions, and drops axes of extent 1.

    Expressions contain flat loads (or are bare offsets, such as that of the store). An axis used outside an offset, in a guard or as a value, is not
    merged."""
    mapping: dict[Var, Expr] = {axis: Const(0, INDEX) for axis in axes if axis.extent == 1}
    axes = [axis for axis in axes if axis.extent != 1]
    expressions = [substitute(e, mapping) for e in expressions] if mapping else list(expressions)
    position = len(axes) - 2
    while position >= 0:
        outer, inner = axes[position], axes[position + 1]
        offsets, loose = _index_uses(expressions)
        involved = [o for o in offsets if {outer, inner} & variables(o)]
        if may_merge(outer, inner) and not ({outer, inner} & loose) and mergeable(outer, inner, involved):
            merged = Var(f"{outer.name}{inner.name}", (outer.extent or 0) * (inner.extent or 0))
            # linear with matching strides: replacing inner by merged and outer by 0 gives the same offset
            swap: dict[Var, Expr] = {outer: Const(0, INDEX), inner: merged}
            expressions = [substitute(e, swap) for e in expressions]
            axes[position : position + 2] = [merged]
        position -= 1
    return tuple(axes), tuple(expressions)


def _index_uses(expressions: Sequence[Expr]) -> tuple[list[Expr], set[Var]]:
    """All flat offsets, and the variables that occur elsewhere (as values or in conditions)."""
    offsets: list[Expr] = []
    loose: set[Var] = set()
    for root in expressions:
        if root.dtype == INDEX:
            offsets.append(root)
            continue
        stack: list[Expr] = [root]
        seen: set[int] = set()
        while stack:
            node = stack.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, Load):
                if any(isinstance(part, Load) for part in walk(*node.index)):
                    loose |= variables(*node.index)
                offsets.extend(node.index)
            elif isinstance(node, Var):
                loose.add(node)
            else:
                stack.extend(children(node))
    return offsets, loose


def vectorise(expr: Expr, axis: Var, lanes: int, resident: Callable[[Load], bool] = lambda load: False) -> Expr | None:
    """The vector expression for `lanes` consecutive values of `axis`, starting at `axis`. None if that needs a gather, an index as a value, or a type
    without vectors here. Loads for which `resident` holds are vectors already."""
    done: dict[int, Expr] = {}
    for node in walk(expr):
        if isinstance(node, Const):
            done[id(node)] = node
        elif isinstance(node, Var):
            if node == axis and node.dtype != INDEX:
                return None
            done[id(node)] = node
        elif isinstance(node, Apply) and node.dtype == INDEX and all(arg.dtype == INDEX for arg in node.args):
            done[id(node)] = node
        elif isinstance(node, Load):
            if resident(node):
                done[id(node)] = replace(node, lanes=lanes)
            elif len(node.index) != 1 or (step := coefficient(node.index[0], axis)) not in (0, 1):
                return None
            elif step == 1:
                if node.dtype not in VECTOR_TYPES:
                    return None
                done[id(node)] = replace(node, lanes=lanes)
            else:
                done[id(node)] = node
        else:
            assert isinstance(node, Apply)
            args = tuple(done[id(arg)] for arg in node.args)
            if any(arg.dtype == INDEX and axis in variables(arg) for arg in args):
                return None
            width = max(arg.lanes for arg in args)
            types = {node.dtype, *(a.dtype for a in args)}
            if width > 1 and node.operation == "cast":
                if not types <= VECTOR_TYPES | NARROW_FLOATS:
                    return None
            elif width > 1 and (not types <= VECTOR_TYPES | {"bool"} or node.operation in ("pow", "fmod", "atan2")):
                return None
            done[id(node)] = Apply(node.operation, args, node.dtype, width)
    return None if expr.dtype == INDEX and axis in variables(expr) else done[id(expr)]


def _always_evaluated(node: Expr) -> Sequence[Expr]:
    """The children that are evaluated whenever the node is: of a select and of an `and` the first alone."""
    if isinstance(node, Apply):
        return node.args[:1] if node.operation in ("select", "and") else node.args
    return node.index if isinstance(node, Load) else ()


def bind_shared(roots: Sequence[Expr], prefix: str = "v") -> tuple[list[Let], list[Expr]]:
    """Names each sub-expression that is used more than once and always evaluated, so that shared parts are neither printed nor computed twice.

    Sub-expressions on one side of a select or after an `and` are not moved: elsewhere their loads may be out of bounds."""
    uses: dict[Expr, int] = {}
    order: list[Expr] = []

    def visit(node: Expr) -> None:
        count = uses.get(node, 0)
        uses[node] = count + 1
        if count:
            return
        for part in _always_evaluated(node):
            visit(part)
        order.append(node)

    for root in roots:
        visit(root)
    lets: list[Let] = []
    names: dict[Expr, Expr] = {}

    def replaced(node: Expr, memo: dict[int, Expr]) -> Expr:
        for part in walk(node):
            if id(part) in memo:
                continue
            if part in names:
                memo[id(part)] = names[part]
            elif kids := children(part):
                memo[id(part)] = _same_or_rebuilt(part, [memo[id(kid)] for kid in kids])
            else:
                memo[id(part)] = part
        return memo[id(node)]

    for node in order:
        worthwhile = isinstance(node, Load) or (isinstance(node, Apply) and node.operation not in ("broadcast", "neg"))
        if uses[node] > 1 and worthwhile and not (node.dtype == INDEX and isinstance(node, Apply) and _cheap_index(node)):
            value = replaced(node, {})
            variable = Var(f"{prefix}{len(lets)}", None, node.dtype, node.lanes)
            lets.append(Let(variable, value))
            names[node] = variable
    return lets, [replaced(root, {}) for root in roots]


def _same_or_rebuilt(node: Expr, kids: list[Expr]) -> Expr:
    if all(a is b for a, b in zip(children(node), kids, strict=True)):
        return node
    return rebuild(node, kids) if node.lanes == 1 else replace(rebuild(node, kids), lanes=node.lanes)


def _cheap_index(node: Apply) -> bool:
    return all(isinstance(part, (Const, Var)) or (isinstance(part, Apply) and part.operation in ("add", "sub", "mul")) for part in walk(node))


def divide_linear(value: Expr, extents: Sequence[int]) -> list[Expr]:
    """The indices of a flat position in a space of the given extents, outermost first."""
    result: list[Expr] = []
    for position in range(len(extents) - 1, -1, -1):
        if position == 0:
            result.append(value)
        else:
            result.append(mod(value, extents[position]))
            value = floordiv(value, extents[position])
    return result[::-1]


__all__ = [
    "TRUE",
    "bind_shared",
    "covers",
    "divide_linear",
    "flatten",
    "is_bounds_check",
    "margin",
    "merge_axes",
    "mergeable",
    "needed_halo",
    "split_divided_axes",
    "split_divided_rows",
    "vectorise",
]
