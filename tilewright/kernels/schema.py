"""A schema: one way of computing regions of some kinds, from recognising them to their kernels.

Other stages use only its `Schema`: they depend neither on its schedule's class, nor on its name, nor on the columns of its candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.ir.problem import Problem
from tilewright.ir.region import REGISTERS, TILE, Lowered, Unsuitable, Ways
from tilewright.kernels.columns import Columns
from tilewright.kernels.counts import Counted

Facts = TypeVar("Facts")
Parts = TypeVar("Parts")
Schedule = TypeVar("Schedule")
Known = TypeVar("Known", covariant=True)


@dataclass(frozen=True)
class Numerics:
    """The kinds of rounding that a caller allows.

    atomics: parts of a sum may be added by atomic operations, in no fixed order (on a GPU).
    winograd: sums may be computed by transforms of blocks of the input, whose rounding errors depend on the largest value of a block; so do those of
    libraries' Fourier transforms, whose block is an image.
    vendor: sums may be computed by library kernels, in the order and with the algorithms that the library chooses.
    tf32: float32 factors of sums of products may be rounded to TF32, with 10 bits of mantissa, for tensor cores (on a GPU).
    tf32_pairs: they may be split into two such numbers, and sums of three products then be as accurate as in float32.
    f16_pairs: of these, first factors may be below 65,520 and be split into two numbers of float16."""

    atomics: bool = False
    winograd: bool = True
    vendor: bool = False
    tf32: bool = False
    tf32_pairs: bool = False
    f16_pairs: bool = False

    def at(self, precision: str) -> Numerics:
        """The same, with what a precision (`partition.precision.PRECISIONS`) allows of float32 factors: where one of 16 bits keeps them, TF32 is at
        least as accurate."""
        f16_pairs = precision == "fp32-tensor-fp16"
        return replace(self, tf32=precision in ("tf32", "fp16", "bf16"), tf32_pairs=f16_pairs or precision == "fp32-tensor", f16_pairs=f16_pairs)


USUAL = Numerics()
"""Deterministic, with transforms of blocks, without libraries."""


@dataclass(frozen=True)
class Options:
    """The caller's options. threads: threads of a CPU. numerics: how results may be rounded."""

    threads: int = 1
    numerics: Numerics = USUAL


class Predicted(Protocol):
    """A schedule with its predicted seconds and their named terms."""

    @property
    def schedule(self) -> Any: ...
    @property
    def seconds(self) -> float: ...
    @property
    def terms(self) -> Mapping[str, float]: ...


@dataclass(frozen=True)
class JoinDecision:
    """Whether to join two regions, and why (or why not). `ways`: the times of both ways, where these decide and nothing else does."""

    joins: bool
    reason: str
    ways: Ways | None = None


@dataclass(frozen=True)
class Form(Generic[Facts, Parts]):
    """A problem as a schema sees it. facts: the sizes that determine the schedules and their costs. parts: what lowering needs in addition, such as
    roles of axes, and addresses."""

    facts: Facts
    parts: Parts


class KnowsFacts(Protocol[Known]):
    """What lowering needs, the facts included."""

    @property
    def facts(self) -> Known: ...


@dataclass(frozen=True)
class Matching:
    """The `match` of a schema for which `find` does all the work, on any machine. Raises Unsuitable like `find`."""

    find: Callable[[Problem], KnowsFacts[Any]]

    def __call__(self, problem: Problem, machine: Machine) -> Form[Any, Any]:
        found = self.find(problem)
        return Form(found.facts, found)


@dataclass(frozen=True, eq=False)
class Schema(Generic[Facts, Parts, Schedule, Counted]):
    """The functions of one way of computing a region; those of candidates work on whole columns.

    name: its name in reasons and tables.
    kinds: the kinds of region that it may serve.
    schedule: the type of its schedules, a frozen dataclass of integers, booleans and strings that no other schema has for the same kind.
    match: the form of a problem. Raises Unsuitable, with the reason, if the schema does not suit the problem or the machine.
    space: the feasible candidates, one column per axis, and the number of others rejected for each reason.
    counts: operations, bytes by memory level, and whatever else `estimate`, `bound` and `features` need; made once for a set of candidates.
    estimate: predicted seconds, as named terms.
    lower: kernels, calls and storage of the problem, whose form is given, under a schedule. Raises Unsuitable for a schedule that does not fit it.
    made: the schedule of a candidate's axes; by default the schedule type is called with them.
    bound: lower bounds in seconds, given the fraction of the distinct bytes that goes through memory; None: no bound.
    variants: the feasible variants of the code of given candidates, as columns with further axes, whose default is 0, and the position of the
        candidate that each one varies; None: the schema has none.
    features: inputs of learned models besides counts and estimate, by name. None, or a result of None: the models do not cover these candidates.
    joins: for a sum of products followed by reductions of its result, a number of threads, and a function that gives the schema's best candidate for
        some facts: whether one kernel is faster than two.
    within: where a schedule's kernel keeps what its steps pass each other, at farthest (`ir.region.WITHIN`): sums for an epilogue, rows that
        are reduced, weights of attention, transforms; not the parts of one sum that threads or blocks share.
    transforms: computes sums by transforms of blocks (Winograd's algorithm, Fourier): outliers, infinities and NaN affect all results of a block.
    unordered: whether a schedule adds the parts of a sum in no fixed order, so that results differ in their last bits from run to run.
    alone: if it has any candidates, no later schema is asked.
    sums: its kernels set sums in registers to zero, then only add to them, and then store what follows from them: the addition may run for several
        parts of the factors (`partition.tile_kernel`).
    unit: what multiplies in its kernels, if not the core's vectors: to measured data a core with it is another machine.
    scored: scores of compiled code (`selection.code_score`) order its candidates better than the models do. Without it they decide only between
            one of its candidates and one of a schema that has it."""

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
    variants: Callable[[Facts, Columns, Machine], tuple[Columns, np.ndarray]] | None = None
    joins: Callable[[Problem, Machine, int, Callable[[Facts], Predicted]], JoinDecision] | None = None
    unordered: Callable[[Schedule], bool] = lambda schedule: False
    within: Callable[[Facts, Schedule], str] = lambda facts, schedule: REGISTERS
    transforms: bool = False
    alone: bool = False
    sums: bool = False
    unit: str = ""
    scored: bool = False

    def schedule_of(self, axes: Mapping[str, int], machine: Machine) -> Schedule:
        """The schedule of one candidate."""
        return self.made(axes, machine) if self.made is not None else self.schedule(**axes)


def in_tile_if(passes: Callable[[Facts, Schedule], object]) -> Callable[[Facts, Schedule], str]:
    """The `within` of a schema whose kernels pass something in a tile where the function says so."""
    return lambda facts, schedule: TILE if passes(facts, schedule) else REGISTERS


AnySchema: TypeAlias = Schema[Any, Any, Any, Any]


def form_of(schema: Schema[Facts, Parts, Schedule, Counted], problem: Problem, machine: Machine) -> Form[Facts, Parts] | Unsuitable:
    """The problem's form, or why it has none. It is found once for each problem, for both ranking and lowering, and where it depends on the machine
    for each machine; schemas with the same `match` share it."""
    known = problem.found.get(schema.match)
    if known is None or known[0] is not machine and not isinstance(schema.match, Matching):
        form: Form[Facts, Parts] | Unsuitable
        try:
            form = schema.match(problem, machine)
        except Unsuitable as reason:
            form = reason.with_traceback(None)
        known = problem.found[schema.match] = (machine, form)
    result: Form[Facts, Parts] | Unsuitable = known[1]
    return result
