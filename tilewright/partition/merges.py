"""Merges: what is predicted and measured of both ways, what planning remembers of them, and how a machine's chains are predicted."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from tilewright.ir.graph import Value
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, MergeKey, Region, Ways
from tilewright.ir.space import Candidate, Comparison
from tilewright.text import seconds_text

LEAST_GAIN = 0.01
"""Share of the time that a merge must gain: a larger kernel takes longer to compile."""
MEASURED_LOSS = 0.1
"""Share of the time that a merge may lose by prediction and still be measured by trials, or decided by what they measured; regions that are no chain
are measured both ways if that loses or gains at most as much."""
KEPT = 0.05
"""Share of the time by which what was chosen for another size may be slower than the best and be chosen again, since its kernels may be compiled
already: predictions that differ by less do not order candidates (`tuning.code_choice.CLOSE`)."""


CHAIN = "chain"
"""The kind of merges of successive regions."""
LIBRARY = "library layer"
"""The kind of merges of all regions of a layer by a library's operator, whose time nothing predicts."""
WHOLE = "decided by the time of the whole network"
"""Said of a merge about which a `Policy` decides."""


@dataclass(frozen=True)
class Policy:
    """What a partition of a graph has instead of what the times of each merge decide: the merges that are `taken` or `refused`, where both ways are
    possible; and whether predictions decide about the others, even where trials measured both ways (`predicted`)."""

    taken: frozenset[MergeKey] = frozenset()
    refused: frozenset[MergeKey] = frozenset()
    predicted: bool = False

    def about(self, kind: str, results: tuple[str, ...]) -> bool | None:
        """Whether the merge is taken; None if its times decide."""
        key = (kind, results)
        return True if key in self.taken else False if key in self.refused else None

    def as_kept(self, kind: str, merges: Iterable[tuple[str, ...]], kept: Container[tuple[str, ...]]) -> frozenset[tuple[str, ...]]:
        """Those of some merges of a kind, by their results, that are as they were decided for another size: all about which this policy says nothing,
        if those are `kept`; none where predictions decide."""
        own = frozenset(results for results in merges if self.about(kind, results) is None)
        return own if not self.predicted and all(results in kept for results in own) else frozenset()


BY_MERGES = Policy()
"""The times of each merge decide, as far as both were measured, otherwise predicted."""


@dataclass(frozen=True)
class Timed:
    """A region by itself, and its predicted seconds. `measure` finds the seconds that trials measured, or asks trials for them: None if there are
    none yet. `share`: the part of both that counts."""

    region: Region
    predicted: float
    measure: Callable[[], float | None] = lambda: None
    share: float = 1.0

    @property
    def seconds(self) -> float:
        """The predicted seconds that count."""
        return self.share * self.predicted

    def with_copy(self, copy: Timed) -> Timed:
        """The region, with the time of a region that copies its result."""

        def measure() -> float | None:
            both = self.measure(), copy.measure()
            return None if None in both else sum(seconds or 0.0 for seconds in both)

        return replace(self, predicted=self.predicted + copy.predicted, measure=measure)


@dataclass(frozen=True)
class Compared:
    """Predicted seconds of a merge, together and apart, and the measured ones of both if their predictions are close and trials measured all.
    `decided`: whether a policy has it; None: its times decide, the predicted ones with `by_prediction`."""

    together: float
    apart: float
    measured: tuple[float, float] | None = None
    decided: bool | None = None
    by_prediction: bool = False

    @property
    def taken(self) -> bool:
        """Whether the merge gains enough, measured or predicted, unless that was decided otherwise."""
        if self.decided is not None:
            return self.decided
        return gains(*((None if self.by_prediction else self.measured) or (self.together, self.apart)))

    @property
    def ways(self) -> Ways:
        """The times of both ways."""
        return Ways((self.together, self.apart), self.measured)

    def text(self, one: str, other: str) -> str:
        """Both times, of which the words name the ways."""
        said = f"{seconds_text(self.together)} predicted {one}, {seconds_text(self.apart)} {other}"
        if self.measured is not None:
            said += f"; measured {seconds_text(self.measured[0])} and {seconds_text(self.measured[1])}"
        return said if self.decided is None else f"{said}; {WHOLE}"


def gains(together: float, apart: float) -> bool:
    """Whether seconds together are enough less than those apart."""
    return together < (1 - LEAST_GAIN) * apart


def nearly_as_fast(ways: Ways, before: bool) -> bool:
    """Whether the way that was taken for another size takes at most `KEPT` longer than the other one, measured or predicted."""
    together, apart = ways.measured or ways.predicted
    return (together if before else apart) <= (1 + KEPT) * min(together, apart)


def compared(together: Sequence[Timed], apart: Sequence[Timed], decided: bool | None = None, by_prediction: bool = False) -> Compared:
    """The times of the regions of both ways. `decided`, `by_prediction`: as in `Compared`."""
    one, other = (sum(timed.seconds for timed in way) for way in (together, apart))
    if abs(one - other) > MEASURED_LOSS * other:
        return Compared(one, other, None, decided, by_prediction)
    found = [[(timed.share, timed.measure()) for timed in way] for way in (together, apart)]  # all are asked for, so that trials measure all
    if any(seconds is None for way in found for _, seconds in way):
        return Compared(one, other, None, decided, by_prediction)
    first, second = (sum(share * (seconds or 0.0) for share, seconds in way) for way in found)
    return Compared(one, other, (first, second), decided, by_prediction)


class ChainSchedule(Protocol):
    """How a chain is cut (`chain_kernel.StripSchedule`, `tile_kernel.TileSchedule`)."""

    @property
    def described(self) -> str: ...


class Way(Protocol):
    """How a chain is computed (`Strips`, `tile_judge.Tiles`), with the predicted seconds and their named terms."""

    @property
    def schedule(self) -> ChainSchedule: ...
    @property
    def seconds(self) -> float: ...
    @property
    def terms(self) -> Mapping[str, float]: ...


@dataclass(frozen=True)
class Measured:
    """What trials found: the fastest schedule of a chain with its seconds, and those of the kernels of its regions one after another."""

    schedule: ChainSchedule
    seconds: float
    apart: float


@dataclass(frozen=True)
class Merge:
    """A segment that was considered: the results of its regions, predicted seconds apart and in one kernel (None: it is not possible, for a
    reason), what was measured of both, whether the seconds apart have those measured of a library's kernels, whether it was taken, and the results
    besides the last that are needed outside too. `decided`, `by_prediction`: as in `Compared`. `least`: seconds that one kernel is certain to be
    predicted to take, if that is too much to predict it. `instead`: why it is not taken although it gains."""

    results: tuple[str, ...]
    apart: float
    way: Way | None
    reason: str = ""
    measured: Measured | None = None
    by_library: bool = False
    taken: bool = False
    stored: frozenset[str] = frozenset()
    decided: bool | None = None
    by_prediction: bool = False
    least: float | None = None
    instead: str = ""

    def __str__(self) -> str:
        results = " -> ".join(f"{name} (stored too)" if name in self.stored else name for name in self.results)
        if self.least is not None:
            return f"{results} gains too little: at least {seconds_text(self.least)} predicted in one kernel, {seconds_text(self.apart)} apart"
        if self.way is None:
            return f"{results} cannot be one kernel: {self.reason}"
        said = f"predicted {seconds_text(self.way.seconds)} {self.way.schedule.described}, {seconds_text(self.apart)} apart"
        said += ", with a library's kernel as measured" if self.by_library else ""
        if self.measured is not None:
            found = self.measured
            said += f"; measured {seconds_text(found.seconds)} {found.schedule.described}, {seconds_text(found.apart)} apart"
        if self.decided is not None:
            said += f"; {WHOLE}"
        elif self.saved > 0 and not self.taken:
            said += f"; {self.instead}" if self.gain else f"; gains less than {LEAST_GAIN:.0%}"
        return f"{results} {said}"

    @property
    def ways(self) -> Ways | None:
        """The times of both ways; None if one kernel is not possible."""
        if self.way is None:
            return None
        found = self.measured
        return Ways((self.way.seconds, self.apart), (found.seconds, found.apart) if found is not None else None)

    @property
    def schedule(self) -> ChainSchedule:
        """The schedule, measured or predicted."""
        found = self.measured or self.way
        assert found is not None
        return found.schedule

    @property
    def saved(self) -> float:
        """Seconds that one kernel saves, measured or predicted; negative where it is slower."""
        found = None if self.by_prediction else self.measured
        return 0.0 if self.way is None else (found or self).apart - (found or self.way).seconds

    def with_times(self, lowered: Lowered, schema: str) -> Lowered:
        """The kernel of the chain with its predicted and measured seconds, and those of its regions apart. `schema` names the way."""
        assert self.way is not None
        found = self.measured
        apart = Candidate("apart", f"{len(self.results)} kernels", self.apart, measured_seconds=found.apart if found is not None else None)
        seconds = found.seconds if found is not None else None
        return replace(
            lowered,
            predicted_seconds=self.way.seconds,
            terms=self.way.terms,
            measured_seconds=seconds,
            comparison=Comparison(schema, (apart,)),
        )

    @property
    def gain(self) -> float:
        """Seconds that one kernel saves; 0 where that is too little to be taken, or it is refused."""
        found = None if self.by_prediction else self.measured
        return self.saved if self.saved > LEAST_GAIN * (found or self).apart and self.decided is None else 0.0

    @property
    def is_required(self) -> bool:
        """Whether it is to be taken whatever it gains."""
        return self.way is not None and self.decided is True


@dataclass(frozen=True)
class Known:
    """A canonical problem that was lowered: what equal problems have in common (`canonical.key_of`), the schedule, and the kernels."""

    problem: Problem
    key: object
    schedule: Any
    lowered: Lowered


@dataclass(frozen=True)
class Memory:
    """What planning finds out that helps for other sizes of a model, on the same machine with the same options."""

    near_seconds: dict[object, float] = field(default_factory=dict)
    """Predicted seconds of strips, which are of one image."""
    strips: dict[object, Lowered] = field(default_factory=dict)
    """Kernels of strips."""
    kernels: dict[object, tuple[Known, ...]] = field(default_factory=dict)
    """By form the problems that were lowered (`partition.reuse`)."""
    schedules: dict[tuple[str, ...], Any] = field(default_factory=dict)
    """The schedule chosen last for the region or chain with some results."""
    chains: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By its last result the results of each region or chain of a path."""
    siblings: dict[tuple[str, ...], frozenset[str]] = field(default_factory=dict)
    """By the results of siblings those of them that are merged."""
    prologues: dict[tuple[str, ...], bool] = field(default_factory=dict)
    """By the results of maps and of the contraction that reads them whether that computes them."""
    loops: dict[tuple[str, ...], bool] = field(default_factory=dict)
    """By the results of two loops whether these are one."""
    joins: dict[tuple[str, ...], bool] = field(default_factory=dict)
    """By the results of regions that a reduction or attention may join whether it does."""
    layouts: dict[tuple[str, str], bool] = field(default_factory=dict)
    """By value and description whether an alternative to its layout is taken."""

    def copied(self) -> Memory:
        """A memory to which plans add without changing this one."""
        return Memory(*(dict(getattr(self, part.name)) for part in fields(self)))

    def become(self, other: Memory) -> None:
        """Takes what another memory has in place of its own."""
        for part in fields(self):
            own = getattr(self, part.name)
            own.clear()
            own.update(getattr(other, part.name))


class Judging(Protocol):
    """Predicts chains for one machine (`StripJudge`, `TileJudge`): the best way of a canonical chain, whose regions take the seconds `alone` as
    separate kernels, and the kernel of one that was decided about; for both the reason if there is none. `least`: seconds that no way beats, 0 if
    nothing is known; it takes much less time than `best`. `most`: seconds from which on it does not matter what a chain takes, and which are the
    result if it is found to take longer. `before`: the chain's schedule for another size. `scales`: whether predictions are made of `alone`, which
    then is without Winograd's algorithm. `decides`: whether predictions may take a chain of these regions, which take
    `apart` seconds as separate kernels, if it was not measured. `lower` makes the kernel under a schedule, and `kernels` has those that a plan
    takes."""

    @property
    def scales(self) -> bool: ...
    @property
    def kernels(self) -> dict[object, Lowered | str]: ...
    def decides(self, regions: Sequence[Region], values: Mapping[str, Value], constants: frozenset[str], apart: float) -> bool: ...
    def least(self, problem: Problem, alone: Sequence[float]) -> float: ...
    def best(self, problem: Problem, alone: Sequence[float], most: float, before: Any = None) -> Way | float | str: ...
    def lowered(self, problem: Problem, merge: Merge) -> Lowered | str: ...
    def lower(self, problem: Problem, schedule: Any) -> Lowered: ...
