"""``Plan``: what an executable does, region by region, and why. Everything that reports say of a program is taken from here, as text (`plan_text`,
`report.explanation`) or as data (`Plan.data`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from tilewright.hardware.machine import Machine
from tilewright.ir.region import MergeDecision
from tilewright.ir.space import Comparison, SpaceCounts
from tilewright.ir.stage import Flow
from tilewright.runtime.loadable import LoadableProgram, LoadableRegion
from tilewright.runtime.memory_plan import MemoryPlan
from tilewright.runtime.work import Work, region_work

WRONG_BY = 2.0
"""Ratio of predicted and measured time, either way round, from which a region counts as predicted wrong."""
LEARNED = "learned correction"
"""The term that a learned model adds to a prediction, which is no resource that could bind."""


@dataclass(frozen=True)
class PlanRow:
    """One region.

    number: its position in the program, from 1.
    nodes: (node name, operator, place in the user's model) of each; the operator of a PyTorch node is its name there.
    schedule: the chosen schedule as text; `comparison` has the candidates that it was compared with, and `space` counts all.
    reasons: why these operators are one region, and others not. `separate`: merges with other regions that were refused, with both predicted times.
    predicted_seconds, terms: of all its calls, and the named parts of the prediction, which may overlap.
    measured_seconds: from records of tuning, or what a profile measured (`Plan.with_times`).
    bounds: seconds, by what limits them.
    flow: what is computed one after another in the region, and where each stage leaves its result for others.
    kernels: the kernel of each call. repeat: how often the calls are made. has_library: whether a library's operator runs before them."""

    number: int
    name: str
    kind: str
    nodes: tuple[tuple[str, str, str], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    schedule: str
    reasons: tuple[str, ...]
    separate: tuple[str, ...]
    predicted_seconds: float
    terms: Mapping[str, float]
    kernels: tuple[str, ...]
    repeat: int
    space: SpaceCounts
    comparison: Comparison
    bounds: Mapping[str, float]
    work: Work
    measured_seconds: float | None = None
    has_library: bool = False
    flow: Flow = field(default_factory=Flow)

    @property
    def seconds(self) -> float:
        """The measured time where there is one, else the predicted."""
        return self.predicted_seconds if self.measured_seconds is None else self.measured_seconds

    @property
    def bound_by(self) -> str:
        """The longest term of the prediction; without terms, the nearest limit; empty without either."""
        terms = {name: seconds for name, seconds in self.terms.items() if name != LEARNED and seconds > 0}
        return max(terms, key=lambda name: terms[name], default=self.limit[0])

    @property
    def limit(self) -> tuple[str, float]:
        """The nearest limit, by name, and its seconds: the largest bound that the time does not undercut. ("", 0) without bounds."""
        below = {name: seconds for name, seconds in self.bounds.items() if seconds <= self.seconds} or self.bounds
        return max(below.items(), key=lambda item: item[1], default=("", 0.0))

    @property
    def is_mispredicted(self) -> bool:
        """Whether predicted and measured time differ by more than a factor of `WRONG_BY`."""
        if not self.measured_seconds or not self.predicted_seconds:
            return False
        ratio = self.measured_seconds / self.predicted_seconds
        return not 1 / WRONG_BY <= ratio <= WRONG_BY


@dataclass(frozen=True)
class Plan:
    """The regions in order of execution. kernels: number of distinct kernels. search: the merges of operators and regions that were considered.
    partitions: the whole graph's that trials compared."""

    target: str
    architecture: str
    rows: tuple[PlanRow, ...]
    kernels: int
    search: tuple[MergeDecision, ...] = ()
    partitions: tuple[MergeDecision, ...] = ()
    memory: MemoryPlan | None = field(default=None, compare=False)

    @property
    def calls(self) -> int:
        """Kernel calls of one call of the model."""
        return sum(len(row.kernels) * row.repeat for row in self.rows)

    @property
    def predicted_seconds(self) -> float:
        return sum(row.predicted_seconds for row in self.rows)

    @cached_property
    def seconds(self) -> float:
        """The sum of the regions' times, measured where they are, otherwise predicted."""
        return sum(row.seconds for row in self.rows)

    @property
    def measured(self) -> tuple[PlanRow, ...]:
        """The regions with a measured time."""
        return tuple(row for row in self.rows if row.measured_seconds is not None)

    @property
    def work(self) -> Work:
        return sum((row.work for row in self.rows), Work())

    def share(self, row: PlanRow) -> float:
        """The part of the program's time that a region takes, from 0 to 1."""
        return row.seconds / self.seconds if self.seconds else 0.0

    def hottest(self, count: int | None = None) -> tuple[PlanRow, ...]:
        """Regions by time, longest first; equal ones in order of execution."""
        return tuple(sorted((row for row in self.rows if row.seconds), key=lambda row: -row.seconds)[:count])

    def with_times(self, seconds: Mapping[int, float]) -> Plan:
        """The plan with the measured seconds of regions, by their numbers, in place of those from records."""
        return replace(self, rows=tuple(replace(row, measured_seconds=seconds.get(row.number, row.measured_seconds)) for row in self.rows))

    def data(self) -> dict[str, Any]:
        """The plan as values of JSON, with what follows from them: each row's `seconds`, `share`, `bound_by`, `limit` and `is_mispredicted`."""
        rows = [
            {**_plain(row), "seconds": row.seconds, "share": self.share(row), "bound_by": row.bound_by, "limit": list(row.limit),
             "is_mispredicted": row.is_mispredicted}
            for row in self.rows
        ]  # fmt: skip
        totals = {"calls": self.calls, "predicted_seconds": self.predicted_seconds, "seconds": self.seconds, "work": _plain(self.work)}
        return {**_plain(self), "rows": rows, **totals}

    def __str__(self) -> str:
        from tilewright.runtime.plan_text import plan_text

        return plan_text(self)


def _plain(value: Any) -> Any:
    """Dataclasses and mappings as dictionaries, sequences as lists."""
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def plan_of(program: LoadableProgram, machine: Machine, memory: MemoryPlan | None = None) -> Plan:
    """The plan of a program for a machine."""
    rows = tuple(_row(program, region, number) for number, region in enumerate(program.regions, 1))
    return Plan(program.target, machine.architecture, rows, len(program.kernels), program.search, program.partitions, memory)


def _row(program: LoadableProgram, region: LoadableRegion, number: int) -> PlanRow:
    nodes = [program.nodes[name] for name in region.nodes]
    own = {*region.outputs, *region.nodes}
    return PlanRow(
        number,
        region.name,
        region.kind,
        tuple((node.name, node.operator_name, node.place) for node in nodes),
        region.inputs,
        region.outputs,
        region.schedule,
        region.reasons,
        tuple(merge.text for merge in program.search if not merge.taken and own.intersection(merge.results) and not own.issuperset(merge.results)),
        region.predicted_seconds,
        MappingProxyType(dict(region.terms)),
        tuple(call.kernel for call in region.calls),
        region.repeat,
        region.space,
        region.comparison,
        region.bounds,
        region_work(program, region),
        region.measured_seconds,
        region.library is not None,
        region.flow,
    )
