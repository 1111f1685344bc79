"""Lowering of loops: one kernel for all steps of a recurrence, or the kernels of one step, repeated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, MergeDecision, Region, Storage, Unsuitable, Ways
from tilewright.ir.space import SpaceCounts
from tilewright.kernels.registry import library
from tilewright.partition.context import Chooser, Context
from tilewright.partition.joining import RowJudge
from tilewright.partition.layouts import LaidOut
from tilewright.partition.lowering import lower_region
from tilewright.partition.merges import WHOLE
from tilewright.partition.recurrence import whole_body
from tilewright.partition.regions import lay_out
from tilewright.partition.scans import Loop, unfold, without_copies
from tilewright.selection.choice import choose
from tilewright.selection.ranking import Choice

LOOP = "loop"
"""The kind of merges of all steps of a loop."""


def lower_loop(region: Region, context: Context, laid_out: LaidOut) -> list[Lowered]:
    """Lowers a loop to regions before it, one region for all steps, and regions after it. The steps are one kernel if its body is a recurrence for
    which a schema predicts that to be faster than the kernels of one step, repeated. What is decided, about joins in the body too, is added to what
    the context considered."""
    possible = ways_of(region, context, laid_out)
    apart = possible.apart
    for joined in possible.joined:  # the body's names are its own
        context.considered.append(replace(joined, results=tuple(f"{region.nodes[0].name}.{name}" for name in joined.results)))
    repeated = apart.repeated(region)
    try:
        if isinstance(possible.together, str):
            raise Unsuitable(possible.together)
        together = possible.together
        (steps,) = together.steps()
    except Unsuitable as reason:
        why = f"kernels for each step: {reason}"
        context.considered.append(MergeDecision(region.outputs, False, f"{region.name} has {why}", LOOP))
        return apart.around(with_reasons(repeated, why))
    one, each = (f"{1e6 * way.predicted_seconds:.4g} us" for way in (steps, repeated))
    times = f"predicted {one} for all steps in one kernel, {each} for kernels of one step"
    decided = context.policy.about(LOOP, region.outputs)
    taken = steps.predicted_seconds < repeated.predicted_seconds if decided is None else decided
    times = times if decided is None else f"{times}; {WHOLE}"
    ways = Ways((steps.predicted_seconds, repeated.predicted_seconds))
    context.considered.append(MergeDecision(region.outputs, taken, f"{region.name} {times}", LOOP, ways))
    if not taken:
        return apart.around(with_reasons(repeated, times))
    steps = replace(steps, region=region, schedule=f"{together.loop.length} steps in one kernel: {steps.schedule}")
    return together.around(with_reasons(steps, times))


@dataclass(frozen=True)
class _Unfolded:
    """A decomposed loop, and the context that its regions are lowered in, extended by its values."""

    loop: Loop
    outside: Context

    @cached_property
    def context(self) -> Context:
        values = MappingProxyType({**self.outside.values, **self.loop.values})
        layouts = MappingProxyType({**self.outside.layouts, **self.loop.layouts})
        return replace(self.outside, values=values, layouts=layouts, choose=_with_kernels(self.outside), lowered={})

    @property
    def storage(self) -> dict[str, Storage]:
        return {name: Storage(self.loop.values[name], layout) for name, layout in self.loop.layouts.items()}

    def steps(self) -> list[Lowered]:
        return [lower_region(part, self.context) for part in self.loop.body]

    def repeated(self, region: Region) -> Lowered:
        """The regions of one step as one region that repeats."""
        steps = self.steps()
        storage = self.storage
        for part in steps:
            storage |= part.storage
        kernels = {kernel.name: kernel for part in steps for kernel in part.kernels}
        return Lowered(
            region,
            f"{self.loop.length} steps of: " + "; ".join(f"{part.region.kind} ({part.schedule})" for part in steps),
            tuple(kernels.values()),
            tuple(call for part in steps for call in part.calls),
            MappingProxyType(storage),
            self.loop.length * sum(part.predicted_seconds for part in steps),
            MappingProxyType({}),
            self.loop.length,
            sum((part.space for part in steps), SpaceCounts()),
            checks=MappingProxyType({name: checks for part in steps for name, checks in part.checks.items()}),
        )

    def around(self, steps: Lowered) -> list[Lowered]:
        """The lowered regions before the steps, the steps, and the regions after them."""
        storage = MappingProxyType(self.storage)
        before = [replace(lower_region(part, self.context), storage=storage) for part in self.loop.before]
        steps = replace(steps, storage=MappingProxyType({**storage, **steps.storage}))
        return [*before, steps, *(lower_region(part, self.context) for part in self.loop.after)]


@dataclass(frozen=True)
class LoopWays:
    """A loop by kernels of one step, and by one kernel, or why that is not possible. `joined`: what was decided about joins in its body."""

    apart: _Unfolded
    together: _Unfolded | str
    joined: tuple[MergeDecision, ...]


def ways_of(region: Region, context: Context, laid_out: LaidOut) -> LoopWays:
    """Both ways of computing a loop, not yet lowered."""
    node = without_copies(region.nodes[0])
    read = {name for other in laid_out.regions for name in other.inputs} | set(context.graph.outputs)
    body = node.attributes["body"]
    laid_out_body = lay_out(body, RowJudge(context.machine, context.threads, frozenset(body.constants)), in_place=False)

    def unfolded(body: LaidOut) -> _Unfolded:
        return _Unfolded(unfold(node, context.graph, body, read, context.values), context)

    apart = unfolded(laid_out_body)
    if not context.persistent:
        return LoopWays(apart, f"a barrier of all blocks was not measured on {context.machine.name}", laid_out_body.considered)
    try:
        together = unfolded(whole_body(body))
    except Unsuitable as reason:
        return LoopWays(apart, str(reason), laid_out_body.considered)
    copies = len(together.loop.body) > 1
    return LoopWays(apart, "its body copies what it passes through" if copies else together, laid_out_body.considered)


def with_reasons(lowered: Lowered, *reasons: str) -> Lowered:
    return replace(lowered, region=replace(lowered.region, reasons=(*lowered.region.reasons, *reasons)))


def _with_kernels(context: Context) -> Chooser:
    """The context's chooser inside a loop, whose steps are kernel calls: libraries are not called there, and the models choose instead."""

    def chosen(problem: Problem, machine: Machine, threads: int) -> Choice:
        choice = context.choose(problem, machine, threads)
        return choice if choice.schema is not library(machine) else choose(problem, machine, threads)

    return chosen
