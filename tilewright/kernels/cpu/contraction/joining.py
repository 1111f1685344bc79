"""Whether to compute reductions of a product's result in its register tiles: whole rows in a tile, or the pixels of an image in one thread.

Tiles of whole rows, or whole images per thread, may be slower than the best tiles; storing the result and reading it back costs traffic and a
parallel region. The schema's own models predict both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from tilewright.graph.contraction import anchor, sums_pixels
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.cpu.contraction.estimate import stored_between
from tilewright.kernels.cpu.contraction.lower import contraction_facts
from tilewright.kernels.cpu.contraction.nest import flat_nest
from tilewright.kernels.cpu.contraction.space import CpuContractionFacts, longest_row
from tilewright.kernels.schema import JoinDecision, Predicted
from tilewright.text import seconds_text

Best = Callable[[CpuContractionFacts], Predicted]


def join_decision(problem: Problem, machine: Machine, threads: int, best: Best) -> JoinDecision:
    """Whether a product and the reductions of its rows, or the sum over its pixels, become one kernel. `best` gives the best register tiles for some
    facts; there are none only if a tile must hold whole rows and these are longer than `longest_row`.

    Raises:
        Unsuitable: if the region does not have the form of a nest.
    """
    steps = problem.region.steps
    found = anchor(steps, problem.constants)
    assert found is not None
    if sums_pixels(steps, found):
        return _pixels(_facts(problem), prod(axis.extent or 0 for axis in steps[1].reduction), machine, threads, best)
    most = longest_row(machine)
    if found.size_n > most:
        return JoinDecision(False, f"a row of {found.size_n} does not fit one tile (at most {most})")
    return _rows(_facts(problem), found.size_n, machine, threads, best)


def _facts(problem: Problem) -> CpuContractionFacts:
    return contraction_facts(problem, flat_nest(problem))


def _rows(facts: CpuContractionFacts, row: int, machine: Machine, threads: int, best: Best) -> JoinDecision:
    joined, free = best(facts), best(replace(facts, whole_rows=False, row_operations=0))
    loss = joined.seconds - joined.terms["row reductions"] - free.seconds
    gains, costs = _stored(facts, machine, threads)
    compared = _compared(joined.seconds, loss, gains, costs)
    if loss > gains:
        return JoinDecision(False, f"a row of {row} fits one tile, but that is slower: {compared}")
    return JoinDecision(True, f"one tile owns the row of {row}: {compared}")


def _pixels(facts: CpuContractionFacts, pixels: int, machine: Machine, threads: int, best: Best) -> JoinDecision:
    joined = best(facts)
    panels = facts.images * -(-facts.n // joined.schedule.panel)
    if panels < threads:
        return JoinDecision(False, f"{panels} panels for {threads} threads: a thread owns the {pixels} pixels of a panel of channels")
    free = best(replace(facts, images=0, row_operations=0))
    loss = joined.seconds - joined.terms["pixel sums"] - free.seconds
    gains, costs = _stored(facts, machine, threads)
    compared = _compared(joined.seconds, loss, gains, costs)
    if loss > gains:
        return JoinDecision(False, f"{panels} panels for {threads} threads own {pixels} pixels each, but that is slower: {compared}")
    return JoinDecision(True, f"one thread owns the {pixels} pixels of a panel ({panels} panels for {threads} threads): {compared}")


def _compared(seconds: float, loss: float, gains: float, costs: str) -> str:
    """The predicted times of both ways, if one kernel takes `seconds`, its tiles `loss` seconds more than the best, and a stored result `gains`."""
    return f"{seconds_text(seconds)} predicted in one kernel, {seconds_text(seconds - loss + gains)} with a stored result, which costs {costs}"


def _stored(facts: CpuContractionFacts, machine: Machine, threads: int) -> tuple[float, str]:
    """The cost of storing the result between two kernels, in seconds and in words."""
    saved = stored_between(facts, machine, threads)
    return sum(saved.values()), ", ".join(f"{name} {1e6 * value:.1f} us" for name, value in saved.items())
