"""Merges: what is predicted and measured of both ways, what planning remembers of them, and how a machine's chains are predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Region
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


@dataclass(frozen=True)
class Compared:
    """Predicted seconds of a merge, together and apart, and the measured ones of both if their predictions are close and trials measured all."""

    together: float
    apart: float
    measured: tuple[float, float] | None = None

    @property
    def taken(self) -> bool:
        """Whether the merge gains enough, measured or predicted."""
        together, apart = self.measured or (self.together, self.apart)
        return together < (1 - LEAST_GAIN) * apart

    def text(self, one: str, other: str) -> str:
        """Both times, of which the words name the ways."""
        said = f"{seconds_text(self.together)} predicted {one}, {seconds_text(self.apart)} {other}"
        if self.measured is not None:
            said += f"; measured {seconds_text(self.measured[0])} and {seconds_text(self.measured[1])}"
        return said


def compared(together: Sequence[Timed], apart: Sequence[Timed]) -> Compared:
    """The times of the regions of both ways."""
    one, other = (sum(timed.seconds for timed in way) for way in (together, apart))
    if abs(one - other) > MEASURED_LOSS * other:
        return Compared(one, other)
    found = [[(timed.share, timed.measure()) for timed in way] for way in (together, apart)]  # all are asked for, so that trials measure all
    if any(seconds is None for way in found for _, seconds in way):
        return Compared(one, other)
    first, second = (sum(share * (seconds or 0.0) for share, seconds in way) for way in found)
    return Compared(one, other, (first, second))


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
    besides the last that are needed outside too."""

    results: tuple[str, ...]
    apart: float
    way: Way | None
    reason: str = ""
    measured: Measured | None = None
    by_library: bool = False
    taken: bool = False
    stored: frozenset[str] = frozenset()

    def __str__(self) -> str:
        results = " -> ".join(f"{name} (stored too)" if name in self.stored else name for name in self.results)
        if self.way is None:
            return f"{results} cannot be one kernel: {self.reason}"
        said = f"predicted {seconds_text(self.way.seconds)} {self.way.schedule.described}, {seconds_text(self.apart)} apart"
        said += ", with a library's kernel as measured" if self.by_library else ""
        if self.measured is not None:
            found = self.measured
            said += f"; measured {seconds_text(found.seconds)} {found.schedule.described}, {seconds_text(found.apart)} apart"
        return f"{results} {said}"

    @property
    def schedule(self) -> ChainSchedule:
        """The schedule, measured or predicted."""
        found = self.measured or self.way
        assert found is not None
        return found.schedule

    @property
    def saved(self) -> float:
        """Seconds that one kernel saves, measured or predicted; negative where it is slower."""
        return 0.0 if self.way is None else (self.measured or self).apart - (self.measured or self.way).seconds

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
        """Seconds that one kernel saves; 0 where that is too little to be taken."""
        return self.saved if self.saved > LEAST_GAIN * (self.measured or self).apart else 0.0


@dataclass(frozen=True)
class Memory:
    """What planning finds out that helps for other sizes of a model, on the same machine with the same options: predicted seconds and kernels of
    strips, which are of one image; the schedule chosen last for the region with some results; by its last result the results of each region or chain
    of a path; by the results of siblings those of them that are merged; and by the results of maps whether a contraction computes them."""

    near_seconds: dict[object, float] = field(default_factory=dict)
    strips: dict[object, Lowered] = field(default_factory=dict)
    schedules: dict[tuple[str, ...], Any] = field(default_factory=dict)
    chains: dict[str, tuple[str, ...]] = field(default_factory=dict)
    siblings: dict[tuple[str, ...], frozenset[str]] = field(default_factory=dict)
    prologues: dict[tuple[str, ...], bool] = field(default_factory=dict)


class Judging(Protocol):
    """Predicts chains for one machine (`Judge`, `tile_judge.TileJudge`): the best way of a canonical chain, whose regions take the seconds `alone` as
    separate kernels, and the kernel of one that was decided about; for both the reason if there is none. `before`: the chain's schedule for another
    size. `scales`: whether predictions are made of `alone`, which then is without Winograd's algorithm. `lower` makes the kernel under a
    schedule, and `kernels` has those that a plan takes."""

    @property
    def scales(self) -> bool: ...
    @property
    def kernels(self) -> dict[object, Lowered | str]: ...
    def best(self, problem: Problem, alone: Sequence[float], before: Any = None) -> Way | str: ...
    def lowered(self, problem: Problem, merge: Merge) -> Lowered | str: ...
    def lower(self, problem: Problem, schedule: Any) -> Lowered: ...
