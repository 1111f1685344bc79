"""Problems with canonical names of their values, so that layers with the same steps and layouts are lowered once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from tilewright.codegen.access import split_divided_sum
from tilewright.ir.expr import Expr, Load, loads, rewrite
from tilewright.ir.kernel import FAULTS
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Region

_SHORT = re.compile(r"\bvalue\d+\b")


@dataclass(frozen=True)
class Canonical:
    """A problem whose values are named value0, value1, ... in the order in which they occur; `names` maps actual to canonical names."""

    problem: Problem
    names: Mapping[str, str]

    @property
    def actual(self) -> dict[str, str]:
        """Actual names by canonical ones."""
        return {short: name for name, short in self.names.items()}


def canonical(problem: Problem) -> Canonical:
    """The problem under canonical names: its region without nodes and reasons, and only the values and constants that the region uses. Slices lose
    their distance from the start of their buffers, except for its remainder by vectors (`Layout.base`); those that are in the memory of what a chain
    reads keep their distance from that. Sums of products get a reduced axis for each part of one that a view permuted (`split_divided_sum`)."""
    region = _split(problem.region, problem.constants)
    order: dict[str, None] = {}
    for step in region.steps:
        for load in loads(*step.bodies, *step.index):
            order.setdefault(load.buffer)
        order.setdefault(step.name)
    names = {name: f"value{i}" for i, name in enumerate(order)}
    for step in region.steps:  # further components are named after their step
        for component in step.names[1:]:
            names[component] = names[step.name] + component[len(step.name) :]

    stored = {name: short for name, short in names.items() if name in problem.layouts}
    same = Problem(
        _renamed(region, names),
        {short: problem.layouts[name].from_base(problem.layouts[region.memory_of(name)]) for name, short in stored.items()},
        {short: replace(problem.values[name], name=short) for name, short in stored.items()},
        frozenset(short for name, short in stored.items() if name in problem.constants),
    )
    return Canonical(same, MappingProxyType(names))


def with_names(text: str, actual: Mapping[str, str]) -> str:
    """A text about a canonical problem, such as why there is no kernel for it, with actual names (`actual`, by canonical ones)."""
    return _SHORT.sub(lambda match: actual.get(match[0], match[0]), text)


def _renamed(region: Region, names: Mapping[str, str]) -> Region:
    def short(node: Expr) -> Expr:
        return replace(node, buffer=names[node.buffer]) if isinstance(node, Load) else node

    def of(exprs: Sequence[Expr]) -> tuple[Expr, ...]:
        return tuple(rewrite(expr, short, plain=False) for expr in exprs)

    steps = tuple(replace(step, name=names[step.name], bodies=of(step.bodies), index=of(step.index)) for step in region.steps)
    outputs = tuple(names[name] for name in region.outputs)
    inputs = tuple(names[name] for name in region.inputs if name in names)
    stages = tuple(_renamed(stage, names) for stage in region.stages)
    wholes = tuple((names[name], names[whole]) for name, whole in region.wholes)
    return Region(outputs[0], region.kind, (), steps, inputs, outputs, stages=stages, wholes=wholes)


def key_of(problem: Problem) -> object:
    """What equal canonical problems have in common."""
    stored = ((name, layout, problem.values[name].dtype, name in problem.constants) for name, layout in problem.layouts.items())
    region = problem.region
    return (region.kind, tuple(stage.kind for stage in region.stages), region.steps, region.outputs, region.wholes, *stored)


def _split(region: Region, constants: frozenset[str]) -> Region:
    """The region with the sums of products split (`split_divided_sum`)."""
    if region.kind == "contraction":
        return replace(region, steps=(split_divided_sum(region.steps[0], constants), *region.steps[1:]))
    stages = tuple(_split(stage, constants) for stage in region.stages)
    return replace(region, stages=stages, steps=tuple(step for stage in stages for step in stage.steps)) if stages else region


def named(lowered: Lowered, region: Region, actual: Mapping[str, str]) -> Lowered:
    """Converts the lowering of a canonical region to the actual region. Storage that lowering added is named after actual values."""
    faults = f"{region.outputs[0]}.{FAULTS}"

    def name(text: str) -> str:
        if text == FAULTS:
            return faults
        return actual[text] if text in actual else _SHORT.sub(lambda match: actual[match[0]], text)

    storage = {
        name(key): replace(
            entry, value=replace(entry.value, name=name(entry.value.name)), source=None if entry.source is None else name(entry.source)
        )
        for key, entry in lowered.storage.items()
    }
    calls = tuple(replace(call, arguments=tuple(name(argument) for argument in call.arguments)) for call in lowered.calls)
    checks = MappingProxyType({faults: region.checks} if faults in storage else {})
    library = lowered.library.renamed(name) if lowered.library is not None else None
    unsuitable = {schema: with_names(why, actual) for schema, why in lowered.comparison.unsuitable.items()}
    comparison = replace(lowered.comparison, unsuitable=MappingProxyType(unsuitable))
    stored = MappingProxyType(storage)
    return replace(lowered, region=region, calls=calls, storage=stored, checks=checks, library=library, comparison=comparison)
