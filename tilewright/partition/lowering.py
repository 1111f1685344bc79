"""Lowering: the kernels of a region under the schedule that is chosen for it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tilewright.codegen.describe import prediction
from tilewright.errors import contained
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Region, Unsuitable
from tilewright.kernels.registry import lower_for_images
from tilewright.partition.canonical import key_of, named
from tilewright.partition.context import Context, canonical_problem
from tilewright.partition.merges import KEPT
from tilewright.partition.reuse import kernels_of_images, lowered_once
from tilewright.selection.bounds import NO_BOUNDS, bounds_of
from tilewright.selection.choice import rank
from tilewright.selection.ranking import Choice

IN_NO_ORDER = "parts of its sums are added by atomic operations, in no fixed order (deterministic=False)"


def lower_region(region: Region, context: Context) -> Lowered:
    """Lowers the region under the schedule chosen for it, which may add to its reasons. Regions that differ only in names are lowered once."""
    if region.kind == "torch":
        return Lowered(region, "PyTorch", (), ())
    if any(0 in context.values[name].shape for name in region.outputs):
        return Lowered(region, "nothing to compute", (), ())
    problem, key, names = canonical_problem(region, context)
    if key not in context.lowered:
        context.lowered[key] = _lower(problem, context, region.outputs)
    lowered = context.lowered[key]
    reasons = (*region.reasons, *lowered.region.reasons)
    return named(lowered, replace(region, reasons=reasons), names)


def _lower(problem: Problem, context: Context, results: tuple[str, ...]) -> Lowered:
    if problem.region.kind == "chain":
        kernel = context.judge.kernels[key_of(problem)]
        assert not isinstance(kernel, str)
        return replace(kernel, region=replace(problem.region, reasons=()))
    if context.as_before:
        before = kernels_of_images(context.memory, problem)
        if before is None and (earlier := context.memory.schedules.get(results)) is not None:
            before = _possible(problem, earlier, context)
        if before is not None:
            return replace(before, region=replace(problem.region, reasons=("has the schedule of other sizes; not predicted for these",)))
    with context.stages.stage("choice"):
        choice = _as_before(problem, context.choose(problem, context.machine, context.threads), context, results)
        context.stages.ranked(choice.space.generated)
    lowered = _lowered(problem, choice.schedule, context)
    said = [prediction(choice.predicted, choice.terms, len(lowered.kernels))] if choice.predicted else [f"what follows {choice.schedule}"]
    if choice.measured_seconds is not None:
        said.append(f"measured {1e6 * choice.measured_seconds:.3g} us")
    kernels = tuple(replace(kernel, header="\n".join((kernel.header, *said))) for kernel in lowered.kernels)
    reasons = (*([IN_NO_ORDER] if choice.schema.unordered(choice.schedule) else ()), *choice.notes)
    return replace(
        lowered,
        region=replace(problem.region, reasons=reasons),
        kernels=kernels,
        predicted_seconds=choice.predicted,
        terms=choice.terms,
        space=choice.space,
        measured_seconds=choice.measured_seconds,
        bounds=contained(
            choice.schema.name, "no bounds are stated", partial(bounds_of, problem, choice, context.machine, context.threads), lambda _: NO_BOUNDS
        ),
        comparison=choice.comparison,
    )


def _lowered(problem: Problem, schedule: Any, context: Context) -> Lowered:
    """The problem's kernels under a schedule; on CPUs those of an equal problem of another size or program.

    Raises:
        Unsuitable: as `lower_for_images` does.
    """
    lower = partial(lower_for_images, problem, schedule, context.machine, context.sizes)
    return lower() if context.machine.is_gpu else lowered_once(context.memory, problem, schedule, lower)


def _possible(problem: Problem, schedule: Any, context: Context) -> Lowered | None:
    try:
        return _lowered(problem, schedule, context)
    except Unsuitable:
        return None


def _as_before(problem: Problem, best: Choice, context: Context, results: tuple[str, ...]) -> Choice:
    """The schedule that the region with these results has for another size, if it is predicted nearly as fast as the best; otherwise the best. Only
    where sizes share kernels, and unless the best was measured."""
    earlier = context.memory.schedules.get(results)
    context.memory.schedules[results] = best.schedule
    apart = context.machine.is_gpu and not context.sizes
    if earlier in (None, best.schedule) or apart or best.measured_seconds is not None:
        return best
    ranking = rank(problem, context.machine, context.threads, context.numerics)
    found = ranking.find(earlier)
    if found is None or found.seconds > (1 + KEPT) * best.seconds:
        return best
    context.memory.schedules[results] = earlier
    return ranking.compared(found)
