"""Ranking the schedules of a region, and choosing one, by the models alone."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.columns import Columns
from tilewright.kernels.registry import schemas
from tilewright.kernels.schema import USUAL, AnySchema, Numerics, Options, form_of
from tilewright.selection.learned import cpu, gpu
from tilewright.selection.ranking import Choice, Part, Ranking


def rank(problem: Problem, machine: Machine, threads: int = 1, numerics: Numerics = USUAL, learned: bool = True) -> Ranking:
    """Every candidate with its prediction; the same for the same arguments. `threads`: of a CPU. `numerics`: which ways
    of rounding are allowed. `learned`: where a model was trained for the machine, it corrects the estimates.

    Raises:
        Unsuitable: if no schema of this machine suits the problem, with the reason of each.
    """
    options = Options(threads, numerics)
    ranking = Ranking(machine)
    refusals: list[Unsuitable] = []
    for schema in schemas(machine, problem.region.kind):
        if schema.transforms and not numerics.winograd:
            refusals.append(Unsuitable("Winograd's algorithm is not allowed"))
            continue
        form = form_of(schema, problem, machine)
        if isinstance(form, Unsuitable):
            refusals.append(form)
            continue
        with_its = candidates(ranking, schema, form.facts, options)
        if not schema.alone:
            ranking = with_its
        elif with_its.candidates > ranking.candidates:
            ranking = with_its
            break
    if not ranking.parts and not ranking.rejections:
        reasons = "; ".join(dict.fromkeys(map(str, refusals)))
        raise Unsuitable(reasons or f"no schema of {machine.name} serves a region of kind {problem.region.kind}")
    if not learned:
        return ranking
    return gpu.refined(ranking, machine, gpu.model_of(machine.name)) if machine.is_gpu else cpu.corrected(ranking, machine, threads)


def candidates(ranking: Ranking, schema: AnySchema, facts: object, options: Options) -> Ranking:
    """The ranking with the candidates of one more schema for a problem of these facts, and their estimates."""
    candidates, rejected = schema.space(facts, ranking.machine, options)
    return ranking.with_part(estimated(schema, facts, candidates, ranking.machine, options), rejected)


def estimated(schema: AnySchema, facts: object, candidates: Columns, machine: Machine, options: Options) -> Part:
    """These candidates of a schema, counted and estimated."""
    counts = schema.counts(facts, candidates, machine)
    return Part(schema, facts, candidates, counts, schema.estimate(facts, candidates, counts, machine, options))


def choose(problem: Problem, machine: Machine, threads: int = 1, numerics: Numerics = USUAL) -> Choice:
    """The candidate with the least predicted time; arguments as for `rank`.

    Raises:
        Unsuitable: as `rank`, and where no candidate is feasible.
    """
    return rank(problem, machine, threads, numerics).first()
