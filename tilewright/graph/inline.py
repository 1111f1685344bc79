"""Inlining: a load of a map's result becomes the map's body at that index. All fusion consists of this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.ir.computation import Computation, Step
from tilewright.ir.expr import Expr, Load, Var, children, loads, rewrite, substitute, walk

# Maximum depth and total number of operations of a kernel's expression; beyond that, values are stored instead of joined.
# Networks stay far below. Without a limit, thousands of successive maps (`tests/test_hostile_onnx.py`) would become one expression.
DEEPEST, LARGEST = 100, 2000


def inline(expr: Expr, maps: Mapping[str, Step]) -> Expr:
    """The expression with every load of a result of `maps` replaced by that map's body; bodies may load other maps."""
    done: dict[Load, Expr] = {}

    def visit(node: Expr) -> Expr:
        if not isinstance(node, Load) or node.buffer not in maps:
            return node
        if node not in done:
            step = maps[node.buffer]
            done[node] = inline(substitute(step.bodies[0], dict(zip(step.axes, node.index, strict=True))), maps)
        return done[node]

    return rewrite(expr, visit)


def inline_step(step: Step, maps: Mapping[str, Step]) -> Step:
    return replace(step, bodies=tuple(inline(body, maps) for body in step.bodies))


def slice_for(computation: Computation, output: str) -> tuple[Step, ...]:
    """The steps that `output` needs, with maps between them inlined: reductions and scans, then at most one map that is the output.

    If `output` is one component of a reduction with several, a map is added that reads it, so that the last step always stores its only result. Inner
    reductions that are also outputs of the operator are renamed, since here they are not the stored values of those names, and by the output first,
    so that the names of their components (`Step.names`) differ between outputs too."""
    by_name = {name: step for step in computation.steps for name in step.names}
    final = by_name[output]
    maps = {step.name: step for step in computation.steps if step.kind == "map" and step.identity_index and step is not final}
    kept: list[Step] = []
    wanted = [final]
    seen: set[str] = set()
    while wanted:
        step = wanted.pop()
        if step.name in seen:
            continue
        seen.add(step.name)
        fresh = inline_step(step, maps)
        kept.append(fresh)
        wanted.extend(by_name[load.buffer] for load in loads(*fresh.bodies) if load.buffer in by_name)
    order = {step.name: i for i, step in enumerate(computation.steps)}
    kept.sort(key=lambda step: order[step.name])
    if len(final.bodies) > 1:
        axes = tuple(Var(f"i{i}", extent) for i, extent in enumerate(final.shape))
        component = final.bodies[final.names.index(output)]
        kept = _renamed(kept, {final.name: f"{output}@{final.name}"})
        inner = kept[-1].names[final.names.index(output)]
        kept.append(Step(output, final.shape, axes, (Load(inner, axes, component.dtype),)))
    public = {step.name: f"{output}@{step.name}" for step in kept[:-1] if set(step.names) & set(computation.outputs)}
    return tuple(_renamed(kept, public))


def _renamed(steps: Sequence[Step], names: Mapping[str, str]) -> list[Step]:
    """The steps with some of them renamed, including loads of their components."""
    fresh = [replace(step, name=names.get(step.name, step.name)) for step in steps]
    loaded = {old: new for before, after in zip(steps, fresh, strict=True) for old, new in zip(before.names, after.names, strict=True) if old != new}
    if not loaded:
        return list(steps)

    def fix(node: Expr) -> Expr:
        return replace(node, buffer=loaded[node.buffer]) if isinstance(node, Load) and node.buffer in loaded else node

    return [replace(step, bodies=tuple(rewrite(body, fix) for body in step.bodies)) for step in fresh]


def buffers(steps: Sequence[Step]) -> tuple[str, ...]:
    """Names of everything the steps read, including their own results."""
    return tuple(dict.fromkeys(load.buffer for step in steps for load in loads(*step.bodies)))


def too_long(reader: Sequence[Step], read: Sequence[Step]) -> str:
    """Why the steps of `read` cannot be inlined into those of `reader`; empty if the expression stays within its limits."""
    (deep, large), (more_deep, more_large) = _extent(reader), _extent(read)
    if deep + more_deep > DEEPEST or large + more_large > LARGEST:
        return f"one kernel computes at most {DEEPEST} operations in a row, and {LARGEST} in all"
    return ""


def _extent(steps: Sequence[Step]) -> tuple[int, int]:
    """The longest chain of operations in the bodies of the steps, and the number of distinct nodes."""
    depth: dict[int, int] = {}
    for node in walk(*(body for step in steps for body in step.bodies)):
        depth[id(node)] = 1 + max((depth[id(child)] for child in children(node)), default=0)
    return max(depth.values(), default=0), len(depth)
