"""Whether to compute reductions of a product's result in its register tiles: whole rows in a tile, or the pixels of an image in one thread.

Tiles of whole rows, or whole images per thread, may be slower than the best tiles; storing the result and reading it back costs traffic and a
parallel region. The schema's own models predict both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from tilewright.graph.contraction import anchor, sums_pixels
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.columns import length
from tilewright.kernels.cpu.contraction.counts import contraction_counts
from tilewright.kernels.cpu.contraction.estimate import contraction_estimate, stored_between
from tilewright.kernels.cpu.contraction.lower import contraction_facts
from tilewright.kernels.cpu.contraction.nest import flat_nest
from tilewright.kernels.cpu.contraction.space import CpuContractionFacts, cpu_contraction_space, longest_row
from tilewright.kernels.schema import JoinDecision


def join_decision(problem: Problem, machine: Machine, threads: int) -> JoinDecision:
    """Whether a product and the reductions of its rows, or the sum over its pixels, become one kernel.

    Raises:
        Unsuitable: if the region does not have the form of a nest.
    """
    steps = problem.region.steps
    found = anchor(steps, problem.constants)
    assert found is not None
    if sums_pixels(steps, found):
        return _pixels(_facts(problem), prod(axis.extent or 0 for axis in steps[1].reduction), machine, threads)
    most = longest_row(machine)
    if found.size_n > most:
        return JoinDecision(False, f"a row of {found.size_n} does not fit one tile (at most {most})")
    return _rows(_facts(problem), found.size_n, machine, threads)


def _facts(problem: Problem) -> CpuContractionFacts:
    return contraction_facts(problem, flat_nest(problem))


def _rows(facts: CpuContractionFacts, row: int, machine: Machine, threads: int) -> JoinDecision:
    best, free = _best(facts, machine, threads), _best(replace(facts, whole_rows=False, row_operations=0), machine, threads)
    loss = best.seconds - best.terms["row reductions"] - free.seconds
    gains, costs = _stored(facts, machine, threads)
    compared = f"tiles of whole rows cost {1e6 * max(loss, 0.0):.1f} us more, a stored result costs {costs}"
    if loss > gains:
        return JoinDecision(False, f"a row of {row} fits one tile, but {compared}")
    return JoinDecision(True, f"one tile owns the row of {row}: {compared}")


def _pixels(facts: CpuContractionFacts, pixels: int, machine: Machine, threads: int) -> JoinDecision:
    best = _best(facts, machine, threads)
    panels = facts.images * -(-facts.n // best.panel)
    if panels < threads:
        return JoinDecision(False, f"{panels} panels for {threads} threads: a thread owns the {pixels} pixels of a panel of channels")
    free = _best(replace(facts, images=0, row_operations=0), machine, threads)
    loss = best.seconds - best.terms["pixel sums"] - free.seconds
    gains, costs = _stored(facts, machine, threads)
    compared = f"whole images a thread cost {1e6 * max(loss, 0.0):.1f} us more, a stored result costs {costs}"
    if loss > gains:
        return JoinDecision(False, f"{panels} panels for {threads} threads own {pixels} pixels each, but {compared}")
    return JoinDecision(True, f"one thread owns the {pixels} pixels of a panel ({panels} panels for {threads} threads): {compared}")


@dataclass(frozen=True)
class _Tiles:
    """The best register tiles: predicted seconds, their terms, and channels per panel."""

    seconds: float
    terms: Mapping[str, float]
    panel: int


def _best(facts: CpuContractionFacts, machine: Machine, threads: int) -> _Tiles:
    """The best register tiles. There is none only if a tile must hold whole rows and these are longer than `longest_row`."""
    candidates, rejected = cpu_contraction_space(facts, machine)
    if not length(candidates):
        raise Unsuitable("no schedule is feasible: " + ", ".join(f"{reason} ({count})" for reason, count in rejected.items()))
    estimate = contraction_estimate(facts, candidates, contraction_counts(facts, candidates, machine), machine, threads)
    at = int(np.argmin(estimate.seconds))
    terms = {name: float(term[at]) for name, term in estimate.terms.items()}
    return _Tiles(float(estimate.seconds[at]), terms, int(candidates["vectors"][at]) * machine.vector_lanes())


def _stored(facts: CpuContractionFacts, machine: Machine, threads: int) -> tuple[float, str]:
    """The cost of storing the result between two kernels, in seconds and in words."""
    saved = stored_between(facts, machine, threads)
    return sum(saved.values()), ", ".join(f"{name} {1e6 * value:.1f} us" for name, value in saved.items())
