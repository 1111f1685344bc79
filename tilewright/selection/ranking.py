"""The candidates of a region in their predicted order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from math import isfinite
from types import MappingProxyType
from typing import Any

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.ir.region import Unsuitable
from tilewright.ir.space import Candidate, Comparison, SpaceCounts
from tilewright.kernels.columns import Columns, length, row, take
from tilewright.kernels.counts import Counts, taken
from tilewright.kernels.schema import AnySchema, Options

NEGLIGIBLE = 1e-9
"""A correction of less than this part of the time is none."""


@dataclass(frozen=True)
class Choice:
    """One candidate of a schema with its prediction. `rejected` counts infeasible candidates by reason, `candidates` the feasible ones.
    `measured_seconds`: from records, if there are any. `seconds` is infinite for a candidate of a library, which has no prediction. `notes`: what
    else is to be said about the choice. `comparison`: the best of the other candidates. `flops`: operations of one
    call."""

    schema: AnySchema
    schedule: Any
    seconds: float
    terms: Mapping[str, float]
    rejected: Mapping[str, int]
    candidates: int
    measured_seconds: float | None = None
    notes: tuple[str, ...] = ()
    comparison: Comparison = field(default_factory=Comparison)
    flops: float = 0.0

    @property
    def space(self) -> SpaceCounts:
        return SpaceCounts(self.candidates, self.rejected)

    @property
    def predicted(self) -> float:
        """The predicted seconds; 0 without a prediction."""
        return self.seconds if isfinite(self.seconds) else 0.0

    @property
    def candidate(self) -> Candidate:
        """The choice as explanations of another one show it."""
        return Candidate(self.schema.name, str(self.schedule), self.predicted or None, self.terms, self.measured_seconds)


@dataclass(frozen=True)
class Part:
    """The candidates of one schema for a problem with these facts, their counts and their estimate."""

    schema: AnySchema
    facts: Any
    candidates: Columns
    counts: Counts
    estimate: Estimate


def estimated(schema: AnySchema, facts: object, candidates: Columns, machine: Machine, options: Options) -> Part:
    """The candidates of a schema with their counts and estimates."""
    counts = schema.counts(facts, candidates, machine)
    return Part(schema, facts, candidates, counts, schema.estimate(facts, candidates, counts, machine, options))


def variants_of(part: Part, which: np.ndarray, machine: Machine) -> tuple[Part, np.ndarray, np.ndarray] | None:
    """The variants of the candidates at positions of a part, for each the index in `which` of the candidate that it varies, and its predicted time
    over that candidate's, both by the analytical model; None if there are none."""
    if part.schema.variants is None or not len(which):
        return None
    rows, origins = part.schema.variants(part.facts, take(part.candidates, which), machine)
    if not len(origins):
        return None
    found = estimated(part.schema, part.facts, rows, machine, Options())
    return found, origins, found.estimate.seconds / part.estimate.seconds[which][origins]


def rows_of(part: Part, which: np.ndarray) -> Part:
    """The part with some of its candidates."""
    shape = part.estimate.seconds.shape
    estimate = replace(part.estimate, terms={name: np.broadcast_to(term, shape)[which] for name, term in part.estimate.terms.items()})
    return replace(part, candidates=take(part.candidates, which), counts=taken(part.counts, which), estimate=estimate)


@dataclass(frozen=True)
class Ranking:
    """Every feasible candidate of a region. Iteration yields them by predicted time, with ties in the order of the space.

    `parts`: one for each schema that has a feasible candidate, and those of variants (`selection.variants`) behind them. `rejections`: for each
    schema that was asked, by name, the number of candidates rejected for each reason. `predicted`: seconds of all candidates, if they are not the
    estimates: a learned model has corrected these, or variants follow what they vary. `library`: candidates without a
    prediction, which have no place in the order: only measured times can choose them. `unsuitable`: why other schemas have no candidates, by name."""

    machine: Machine
    parts: tuple[Part, ...] = ()
    rejections: Mapping[str, Mapping[str, int]] = field(default_factory=lambda: MappingProxyType({}))
    predicted: np.ndarray | None = None
    library: tuple[Choice, ...] = ()
    unsuitable: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def rejected(self) -> Mapping[str, int]:
        """The number of candidates rejected for each reason; except for the first schema, the reason starts with the schema's name."""
        first = next(iter(self.rejections), None)
        return {
            reason if name == first else f"{name}: {reason}": count for name, reasons in self.rejections.items() for reason, count in reasons.items()
        }

    @property
    def candidates(self) -> int:
        return sum(length(part.candidates) for part in self.parts)

    @property
    def starts(self) -> np.ndarray:
        """The position of each part's first candidate, followed by the number of all candidates."""
        return np.cumsum([0, *(length(part.candidates) for part in self.parts)])

    @property
    def seconds(self) -> np.ndarray:
        """Predicted seconds of all candidates."""
        if self.predicted is not None:
            return self.predicted
        return np.concatenate([np.zeros(0), *(part.estimate.seconds for part in self.parts)])

    def with_part(self, part: Part, rejected: Mapping[str, int]) -> Ranking:
        """Adds the candidates of another schema, if there are any, and its rejections. Predictions are then those of the analytical models."""
        parts = (*self.parts, part) if length(part.candidates) else self.parts
        return Ranking(self.machine, parts, {**self.rejections, part.schema.name: rejected})

    def without(self, terms: frozenset[str]) -> Ranking:
        """The candidates as the analytical models rank them without some terms of their estimates."""
        parts = tuple(replace(part, estimate=part.estimate.without(terms)) for part in self.parts)
        return Ranking(self.machine, parts, self.rejections)

    def __iter__(self) -> Iterator[Choice]:
        for position in np.argsort(self.seconds, kind="stable"):
            yield self.choice(int(position))

    def schedules(self) -> Iterator[Any]:
        """The schedules of all candidates in the order of the space, without their predictions."""
        for part in self.parts:
            for at in range(length(part.candidates)):
                yield part.schema.schedule_of(row(part.candidates, at), self.machine)

    def first(self) -> Choice:
        """The candidate with the shortest predicted time; among ties, the first in the order of the space.

        Raises:
            Unsuitable: if no candidate is feasible.
        """
        if not self.candidates:
            raise Unsuitable("no schedule is feasible: " + ", ".join(f"{reason} ({count})" for reason, count in self.rejected.items()))
        return self.choice(int(np.argmin(self.seconds)))

    def place(self, position: int) -> tuple[int, int]:
        """The part of the candidate at a position of the space, and its position there."""
        starts = self.starts
        number = int(np.searchsorted(starts, position, side="right")) - 1
        return number, int(position - starts[number])

    def choice(self, position: int) -> Choice:
        """The candidate at a position of the space (that of `seconds`)."""
        number, at = self.place(position)
        part = self.parts[number]
        seconds = float(part.estimate.seconds[at])
        terms = {name: float(term[at]) for name, term in part.estimate.terms.items()}
        if self.predicted is not None:
            correction, seconds = float(self.predicted[position]) - seconds, float(self.predicted[position])
            if abs(correction) > NEGLIGIBLE * seconds:
                terms["learned correction"] = correction
        schedule = part.schema.schedule_of(row(part.candidates, at), self.machine)
        flops = float(part.counts.flops[at])
        return Choice(part.schema, schedule, seconds, MappingProxyType(terms), self.rejected, self.candidates, flops=flops)

    def compared(self, chosen: Choice) -> Choice:
        """The choice with the best candidates that it was compared with: of every schema the first, and the second of all."""
        seconds, starts = self.seconds, self.starts
        places = {int(begin + np.argmin(seconds[begin:end])) for begin, end in pairwise(starts)}
        if len(seconds) > 1:
            places.add(int(np.argmin(np.where(np.arange(len(seconds)) == np.argmin(seconds), np.inf, seconds))))
        found = [self.choice(place) for place in sorted(places, key=lambda place: (seconds[place], place))]
        others = tuple(choice.candidate for choice in (*found, *self.library) if choice.schedule != chosen.schedule)
        empty = {name: "no schedule is feasible: " + _most(reasons) for name, reasons in self.rejections.items() if not self._has(name)}
        return replace(chosen, comparison=Comparison(chosen.schema.name, others, MappingProxyType({**self.unsuitable, **empty})))

    def _variant(self, part: Part, at: int, origin: Choice, schedule: Any) -> Choice | None:
        """The variant of a candidate that is this schedule, predicted as fast as the analytical models relate both; None if there is none."""
        found = variants_of(part, np.array([at]), self.machine)
        if found is None:
            return None
        variants, _, ratio = found
        for position in range(length(variants.candidates)):
            if part.schema.schedule_of(row(variants.candidates, position), self.machine) == schedule:
                alone = Ranking(self.machine, (variants,), predicted=origin.seconds * ratio)
                return replace(alone.choice(position), rejected=self.rejected, candidates=self.candidates)
        return None

    def _has(self, name: str) -> bool:
        return any(part.schema.name == name for part in self.parts)

    def find(self, schedule: Any) -> Choice | None:
        """The candidate with a schedule, be it predicted or a library's; None if there is none."""
        start = 0
        for part in self.parts:
            count = length(part.candidates)
            if part.schema.schedule is type(schedule):
                # an axis may be an index of a name in the schedule; a parameter for which the space has no axis must have its default value
                axes = {name: getattr(schedule, name) for name in part.candidates if isinstance(getattr(schedule, name, None), int)}
                usual = {entry.name: entry.metadata["omitted"] for entry in fields(schedule) if "omitted" in entry.metadata}
                equal = {name: part.candidates[name] == value for name, value in axes.items()}
                plain = {name: part.candidates[name] == usual[name] for name in axes.keys() & usual.keys()}
                same, origins = (np.all(list(columns.values()), axis=0) for columns in (equal, {**equal, **plain}))
                for position in dict.fromkeys((*np.flatnonzero(same), *np.flatnonzero(origins))):
                    choice = self.choice(start + int(position))
                    if choice.schedule == schedule:
                        return choice
                    varied = self._variant(part, int(position), choice, schedule)
                    if varied is not None:
                        return varied
            start += count
        return next((choice for choice in self.library if choice.schedule == schedule), None)


def _most(reasons: Mapping[str, int]) -> str:
    """The reason that rejects most candidates."""
    return max(reasons, key=lambda reason: reasons[reason], default="its space is empty")
