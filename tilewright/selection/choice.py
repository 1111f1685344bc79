"""Ranking the schedules of a region, and choosing one, by the models alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from types import MappingProxyType

from tilewright.hardware.calibration import UNCONFIRMED_VARIANTS, gpu_variants
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.columns import length, row
from tilewright.kernels.registry import has_registered, library, schemas
from tilewright.kernels.schema import USUAL, AnySchema, Numerics, Options, form_of
from tilewright.selection.learned import cpu, gpu
from tilewright.selection.ranking import Choice, Ranking, estimated
from tilewright.selection.variants import with_variants


def facts_of(problem: Problem, machine: Machine) -> object:
    """What the predictions of a problem's candidates depend on besides the machine and the arguments of `rank`, without those of libraries and of
    transforms of blocks: problems with equal facts have equal rankings."""
    forms = [(schema.name, form_of(schema, problem, machine)) for schema in schemas(machine, problem.region.kind) if not schema.transforms]
    return tuple((name, form.facts) for name, form in forms if not isinstance(form, Unsuitable))


def rank(problem: Problem, machine: Machine, threads: int = 1, numerics: Numerics = USUAL, learned: bool = True) -> Ranking:
    """Every candidate with its prediction; equal arguments give equal results. `threads`: threads of a CPU. `numerics`: the kinds of rounding that
    are allowed. `learned`: whether a model trained for the machine, if there is one, corrects the estimates, and variants of the first follow them.

    Raises:
        Unsuitable: if no schema of this machine suits the problem, with the reason of each.
    """
    options = Options(threads, numerics)
    ranking = Ranking(machine)
    refusals: dict[str, str] = {}
    for schema in schemas(machine, problem.region.kind):
        if schema.transforms and not numerics.winograd:
            refusals[schema.name] = "transforms of blocks are not allowed"
            continue
        form = form_of(schema, problem, machine)
        if isinstance(form, Unsuitable):
            refusals[schema.name] = str(form)
            continue
        with_its = candidates(ranking, schema, form.facts, options)
        if not schema.alone:
            ranking = with_its
        elif with_its.candidates > ranking.candidates:
            ranking = with_its
            break
    if not ranking.parts and not ranking.rejections:
        reasons = "; ".join(dict.fromkeys(refusals.values()))
        raise Unsuitable(reasons or f"no schema of {machine.name} serves a region of kind {problem.region.kind}")
    if learned:
        ranking = gpu.corrected(ranking, machine) if machine.is_gpu else cpu.corrected(ranking, machine, threads)
        ranking = with_variants(ranking, gpu_variants(machine) or UNCONFIRMED_VARIANTS)
    found = library_choices(problem, ranking, options) if numerics.vendor else ()
    return replace(ranking, library=found, unsuitable=MappingProxyType(refusals))


def library_choices(problem: Problem, ranking: Ranking, options: Options) -> tuple[Choice, ...]:
    """The candidates of libraries for a problem, beside those of its ranking."""
    schema, machine = library(ranking.machine), ranking.machine
    form = form_of(schema, problem, machine) if problem.region.kind in schema.kinds else Unsuitable("of a kind that libraries do not compute")
    if isinstance(form, Unsuitable):
        return ()
    candidates, _ = schema.space(form.facts, machine, options)
    schedules = [schema.schedule_of(row(candidates, position), machine) for position in range(length(candidates))]
    return tuple(Choice(schema, schedule, inf, MappingProxyType({}), ranking.rejected, ranking.candidates) for schedule in schedules)


def candidates(ranking: Ranking, schema: AnySchema, facts: object, options: Options) -> Ranking:
    """Adds the candidates of another schema, for a problem with these facts, and their estimates."""
    candidates, rejected = schema.space(facts, ranking.machine, options)
    return ranking.with_part(estimated(schema, facts, candidates, ranking.machine, options), rejected)


def choose(problem: Problem, machine: Machine, threads: int = 1, numerics: Numerics = USUAL) -> Choice:
    """The candidate with the shortest predicted time, and what it was compared with; the arguments are those of `rank`.

    Raises:
        Unsuitable: like `rank`, and if no candidate is feasible.
    """
    ranking = rank(problem, machine, threads, numerics)
    return ranking.compared(ranking.first())


def choosing(numerics: Numerics = USUAL) -> Callable[[Problem, Machine, int], Choice]:
    """`choose`, which ranks once for all problems that every schema sees alike: such as layers that store their results in different places of a
    concatenation."""
    known: dict[object, Choice] = {}

    def chosen(problem: Problem, machine: Machine, threads: int) -> Choice:
        kind = problem.region.kind
        if has_registered(machine, kind):  # whose facts may be anything
            return choose(problem, machine, threads, numerics)
        asked = (*schemas(machine, kind), *([library(machine)] if numerics.vendor and kind in library(machine).kinds else []))
        forms = [form_of(schema, problem, machine) for schema in asked if numerics.winograd or not schema.transforms]
        key = (machine, kind, threads, *(str(form) if isinstance(form, Unsuitable) else form.facts for form in forms))
        if key not in known:
            known[key] = choose(problem, machine, threads, numerics)
        return known[key]

    return chosen
