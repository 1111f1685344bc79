"""Updates in place: where a call replaces an input by a value that differs from it in some elements, only these are stored, in the input's memory.

Writing to a tensor arrives as a map that selects between what is written and the old value, `out[i] = select(condition, value, old[i])`, whose result
is copied to the input after the call. If nothing reads the old value after that, the region stores `value` where the condition holds, and its result
is the input (`Program.aliases`). Values that depend on old ones (`index_add`) are computed by a region before.
A condition that an axis equals an index (one position of a cache) determines that axis, which then is no loop:

    out[b, p, c] = select(index[0] = p, value[b, c], old[b, p, c])   ->   out[b, index[0], c] = value[b, c]

Several updates of one input, one after the other, are stored in turns. Everything else is copied; the region that does says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from tilewright.ir.computation import Step
from tilewright.ir.expr import INDEX, TRUE, Apply, Expr, Load, Var, checks, compare, constants, loads, logical_and, select, substitute, variables
from tilewright.ir.graph import Graph, Value
from tilewright.ir.layout import row_major
from tilewright.ir.region import Region
from tilewright.partition.concatenation import Slice
from tilewright.partition.layouts import LaidOut


class _Copied(Exception):
    """An input is not updated in place, for the reason in the text."""


@dataclass(frozen=True)
class _Write:
    """`value` is stored at `index`, for all `axes`, where the guards hold."""

    axes: tuple[Var, ...]
    index: tuple[Expr, ...]
    guards: tuple[Expr, ...]
    value: Expr


@dataclass(frozen=True)
class _Link:
    """The region, by its position, that makes `new` of `old` by writes, no two of them of one element. Their values may depend on `old`."""

    position: int
    old: str
    new: str
    writes: tuple[_Write, ...]


def in_place(graph: Graph, laid_out: LaidOut, updates: Sequence[tuple[str, str]]) -> LaidOut:
    """The partition with updates in place as far as possible. `updates` are pairs of a result of the graph and the input that it replaces after a
    call; both are row-major."""
    for output, given in updates:
        position = next((at for at, region in enumerate(laid_out.regions) if output in region.outputs), None)
        if position is None:
            continue
        try:
            laid_out = _updated(laid_out, _links(graph, laid_out, output, given), given)
        except _Copied as reason:
            region = laid_out.regions[position]
            why = replace(region, reasons=(*region.reasons, f"{output} is stored apart from {given} and copied after the call: {reason}"))
            laid_out = replace(laid_out, regions=(*laid_out.regions[:position], why, *laid_out.regions[position + 1 :]))
    return laid_out


def _links(graph: Graph, laid_out: LaidOut, output: str, given: str) -> list[_Link]:
    """The regions that lead from the input to the result, in order. Raises _Copied if they may not write to the input."""
    kept = {*graph.inputs, *graph.outputs, *graph.constants}
    if given in graph.outputs:
        raise _Copied(f"{given} is a result too")
    made = {name: at for at, region in enumerate(laid_out.regions) for name in region.outputs}
    links: list[_Link] = []
    name = output
    while name != given:
        if name not in made or (name in kept and name != output):
            raise _Copied(f"it is not made of {given} alone")
        links.append(_link(laid_out, made[name], name, given))
        name = links[-1].old
    links.reverse()
    placed = {*laid_out.slices, *(place.buffer for place in laid_out.slices.values())}
    for link in links:
        if laid_out.values[link.new].dtype != laid_out.values[given].dtype:
            raise _Copied(f"{link.new} is stored as {laid_out.values[link.new].dtype}")
        if link.new in placed or link.old in placed:
            raise _Copied("it shares its memory with other values")
        for later in laid_out.regions[link.position + 1 :]:
            if link.old in _read(later):
                raise _Copied(f"{later.outputs[0]} reads {link.old} afterwards")
    return links


def _link(laid_out: LaidOut, position: int, name: str, given: str) -> _Link:
    region = laid_out.regions[position]
    step = region.steps[-1] if region.steps else None
    if step is None or region.outputs != (name,) or step.name != name or step.kind != "map" or not step.identity_index or region.stages:
        raise _Copied(f"{name} is computed as a whole")
    same = {load.buffer for load in _chosen(step.bodies[0]) if load.index == step.axes}
    shape = laid_out.values[given].shape
    old = [other for other in same if other in laid_out.values and laid_out.values[other].shape == shape]
    for other in sorted(old, key=lambda other: other != given):
        writes = tuple(_placed(step, *write) for write in _writes(step.bodies[0], Load(other, step.axes, step.dtypes[0]), TRUE))
        rest = [expr for write in writes for expr in (*write.index, *write.guards)]
        rest += [body for earlier in region.steps[:-1] for body in earlier.bodies]
        if all(load.buffer != other for load in loads(*rest)):
            return _Link(position, other, name, writes)
    raise _Copied(f"which elements of {name} change depends on the old value" if old else f"every element of {name} is computed")


def _chosen(body: Expr) -> Iterator[Load]:
    """The loads that the body may be."""
    if isinstance(body, Load):
        yield body
    elif isinstance(body, Apply) and body.operation == "select":
        for side in body.args[1:]:
            yield from _chosen(side)


def _writes(body: Expr, old: Load, condition: Expr) -> Iterator[tuple[Expr, Expr]]:
    """The conditions under which the body is not the old element, and what it is then."""
    if body == old:
        return
    if isinstance(body, Apply) and body.operation == "select" and old in _chosen(body):
        yield from _writes(body.args[2], old, logical_and(condition, _negated(body.args[0])))
        yield from _writes(body.args[1], old, logical_and(condition, body.args[0]))
    else:
        yield condition, body


def _negated(condition: Expr) -> Expr:
    return condition.args[0] if isinstance(condition, Apply) and condition.operation == "not" else Apply("not", (condition,), "bool")


def _read(region: Region) -> set[str]:
    """What a region reads, however it runs."""
    return {*region.inputs, *(name for node in region.nodes for name in node.inputs)} if region.kind in ("torch", "loop") else {*region.inputs}


def _updated(laid_out: LaidOut, links: Sequence[_Link], given: str) -> LaidOut:
    """The partition with the links' regions storing to the input what they write."""
    values, layouts, slices = dict(laid_out.values), dict(laid_out.layouts), dict(laid_out.slices)
    shape = values[given].shape
    start, stored = (0,) * len(shape), {}
    for link in links:
        layouts[link.new] = row_major(shape)
        slices[link.new] = Slice(given, start)
        regions = _stored(laid_out.regions[link.position], link, given, values)
        stored[link.position] = regions
        for name in (name for region in regions for name in region.outputs if name != link.new):
            layouts[name] = row_major(values[name].shape)
            if values[name].shape == shape:
                slices[name] = Slice(link.new, start)
    regions = tuple(part for at, region in enumerate(laid_out.regions) for part in stored.get(at, (region,)))
    return replace(laid_out, regions=regions, values=MappingProxyType(values), slices=MappingProxyType(slices)).with_layouts(layouts)


def _stored(region: Region, link: _Link, given: str, values: dict[str, Value]) -> tuple[Region, ...]:
    """A region for each write, after one for what the steps before the last compute. `values` is extended by their results."""
    step, before = region.steps[-1], region.steps[:-1]
    result, writes = [], dict[str, _Write]()
    if before:
        wanted = {load.buffer for load in loads(*step.bodies)}
        types = {name: (one.shape, dtype) for one in before for name, dtype in zip(one.names, one.dtypes, strict=True) if name in wanted}
        values |= {name: Value(name, *kind) for name, kind in types.items()}
        if sum(values[name].bytes for name in types) >= values[given].bytes:
            raise _Copied(f"what says which elements change is as large as {given}")
        outputs = tuple(types)
        if len(outputs) != 1:
            raise _Copied(f"{len(outputs)} values say which elements change")
        result.append(replace(region, name=outputs[0], steps=before, inputs=_inputs(before), outputs=outputs, reasons=()))
    said = f"stored in place, in {given}: only the elements that change"
    for write in link.writes:
        name = link.new if len(writes) == len(link.writes) - 1 else f"{link.new}.{len(writes) + 1}"
        if any(load.buffer == link.old for load in loads(write.value)):  # it is computed before anything is stored
            steps = (Step(f"{name}.values", tuple(axis.extent or 0 for axis in write.axes), write.axes, (write.value,)),)
            values[steps[0].name] = Value(steps[0].name, steps[0].shape, write.value.dtype)
            if values[steps[0].name].bytes >= values[given].bytes:
                raise _Copied(f"the values that depend on old ones are as large as {given}")
            result.append(replace(region, name=steps[0].name, kind="map", steps=steps, inputs=_inputs(steps), outputs=(steps[0].name,), reasons=()))
            write = replace(write, value=Load(steps[0].name, write.axes, write.value.dtype))
        writes[name] = write
    for name, write in writes.items():
        values[name] = replace(values[link.new], name=name)
        body = select(logical_and(*write.guards), write.value, Load(name, write.index, write.value.dtype))
        steps = (Step(name, step.shape, write.axes, (body,), index=write.index),)
        result.append(replace(region, name=name, kind="map", steps=steps, inputs=_inputs(steps), outputs=(name,), reasons=(*region.reasons, said)))
    return tuple(result)


def _inputs(steps: Sequence[Step]) -> tuple[str, ...]:
    own = {name for step in steps for name in step.names}
    read = (load.buffer for step in steps for load in loads(*step.bodies, *step.index))
    return tuple(name for name in dict.fromkeys(read) if name not in own)


def _placed(step: Step, condition: Expr, value: Expr) -> _Write:
    """The write of a value where a condition holds. An index out of range, which has a valid position too, stores nothing."""
    index: list[Expr] = list(step.axes)
    guards: list[Expr] = []
    waiting = _conjuncts(condition)
    while waiting:
        part = waiting.pop(0)
        solved = _solved(part, [axis for axis in index if isinstance(axis, Var)])
        if solved is None:
            guards.append(part)
            continue
        axis, position = solved
        swap: Mapping[Var, Expr] = {axis: position}
        index, guards, waiting = ([substitute(expr, swap) for expr in exprs] for exprs in (index, guards, waiting))
        value = substitute(value, swap)
        guards += [compare("ge", position, 0), compare("lt", position, axis.extent or 0)]
    guards += [_is_valid(check) for check in checks(value, *index, *guards)]
    return _Write(tuple(axis for axis in step.axes if axis in index), tuple(index), tuple(guards), value)


def _conjuncts(condition: Expr) -> list[Expr]:
    if isinstance(condition, Apply) and condition.operation == "and":
        return [part for side in condition.args for part in _conjuncts(side)]
    return [] if condition == TRUE else [condition]


def _solved(condition: Expr, axes: Sequence[Var]) -> tuple[Var, Expr] | None:
    """The axis that the condition sets equal to an expression without it."""
    if isinstance(condition, Apply) and condition.operation == "eq" and condition.args[0].dtype == INDEX:
        for axis, position in (condition.args, condition.args[::-1]):
            if isinstance(axis, Var) and axis in axes and axis not in variables(position):
                return axis, position
    return None


def _is_valid(check: Apply) -> Expr:
    """Whether a checked index is in range: its position is that of the index, not the one that stands for indices out of range."""
    index, least = check.args[0], constants(check.args[1:2])[0]
    return Apply("eq", (check, select(compare("lt", index, 0), index + constants(check.args[2:3])[0], index) if least else index), "bool")
