"""A schema: one way of computing regions of some kinds, from recognising them to their kernels. What other stages know of a schema stands in its
one `Schema`, and they ask nothing else: not its schedule's class, not its name, not which columns its candidates have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.kernels.columns import Columns
from tilewright.kernels.counts import Counted

Facts = TypeVar("Facts")
Parts = TypeVar("Parts")
Schedule = TypeVar("Schedule")


@dataclass(frozen=True)
class Numerics:
    """Which ways of rounding a caller allows.

    atomics: parts of a sum may be added by atomic operations, in no fixed order (on a GPU).
    winograd: sums may be computed by transforms of blocks of the input, whose rounding errors depend on the largest value of a block."""

    atomics: bool = False
    winograd: bool = True


USUAL = Numerics()
"""Deterministic, with Winograd's algorithm."""


@dataclass(frozen=True)
class Options:
    """What a caller decides. threads: of a CPU. numerics: how results may be rounded."""

    threads: int = 1
    numerics: Numerics = USUAL


@dataclass(frozen=True)
class JoinDecision:
    """Whether something joins, and why (or why not)."""

    joins: bool
    reason: str


@dataclass(frozen=True)
class Form(Generic[Facts, Parts]):
    """A problem as a schema sees it. facts: the sizes that decide which schedules there are and what they cost. parts: what lowering needs
    besides, such as roles of axes, and addresses."""

    facts: Facts
    parts: Parts


@dataclass(frozen=True, eq=False)
class Schema(Generic[Facts, Parts, Schedule, Counted]):
    """Functions of one way of computing a region, each over whole columns of candidates where it concerns candidates.

    name: by which reasons and tables name it.
    kinds: the kinds of region that it may serve.
    schedule: the type of its schedules, a frozen dataclass of integers, booleans and strings that no other schema has for the same kind.
    match: the form of a problem. Raises Unsuitable, with the reason, where the schema does not suit the problem or the machine.
    space: the feasible candidates, a column an axis, and how many others were rejected for which reason.
    counts: what their kernels do: operations, bytes by memory level, and what else the next three need; made once for a set of candidates.
    estimate: predicted seconds, as named terms.
    lower: kernels, calls and storage of the problem, whose form is given, under a schedule. Raises Unsuitable for a schedule that does not fit it.
    made: the schedule of a candidate's axes; where it is not given, its type is called with them.
    bound: seconds that no kernel can beat where so large a share of the distinct bytes comes through memory; None: no bound.
    features: what learned models read besides counts and estimate, by name; None, or a result that is None: they know no such candidates.
    joins: for a region in which reductions of its result follow a sum of products, on so many threads: whether one kernel is faster than two.
    transforms: computes sums by transforms of blocks (Winograd's algorithm): outliers, infinities and NaN reach all results of a block.
    unordered: whether a schedule adds the parts of a sum in no fixed order, so that results differ in their last bits from run to run.
    alone: where it has candidates, no schema after it is asked.
    scored: the coefficients that score compiled code (`selection.code_score`) were fitted to its kernels."""

    name: str
    kinds: tuple[str, ...]
    schedule: type[Schedule]
    match: Callable[[Problem, Machine], Form[Facts, Parts]]
    space: Callable[[Facts, Machine, Options], tuple[Columns, Mapping[str, int]]]
    counts: Callable[[Facts, Columns, Machine], Counted]
    estimate: Callable[[Facts, Columns, Counted, Machine, Options], Estimate]
    lower: Callable[[Problem, Form[Facts, Parts], Schedule, Machine], Lowered]
    made: Callable[[Mapping[str, int], Machine], Schedule] | None = None
    bound: Callable[[Facts, Columns, Counted, Machine, float], Estimate] | None = None
    features: Callable[[Facts, Columns, Machine, Options], dict[str, np.ndarray] | None] | None = None
    joins: Callable[[Problem, Machine, int], JoinDecision] | None = None
    unordered: Callable[[Schedule], bool] = lambda schedule: False
    transforms: bool = False
    alone: bool = False
    scored: bool = False

    def schedule_of(self, axes: Mapping[str, int], machine: Machine) -> Schedule:
        """The schedule of one candidate."""
        return self.made(axes, machine) if self.made is not None else self.schedule(**axes)


AnySchema: TypeAlias = Schema[Any, Any, Any, Any]


def form_of(schema: Schema[Facts, Parts, Schedule, Counted], problem: Problem, machine: Machine) -> Form[Facts, Parts] | Unsuitable:
    """The problem's form, or why it has none: found once for each problem and handed to ranking and lowering alike. Schemas with the same `match`
    share it."""
    known = problem.found.get(schema.match)
    if known is None or known[0] is not machine:
        form: Form[Facts, Parts] | Unsuitable
        try:
            form = schema.match(problem, machine)
        except Unsuitable as reason:
            form = reason.with_traceback(None)
        known = problem.found[schema.match] = (machine, form)
    result: Form[Facts, Parts] | Unsuitable = known[1]
    return result
