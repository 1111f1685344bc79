"""``Plan``: what an executable does, region by region, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.ir.space import SpaceCounts
from tilewright.runtime.loadable import LoadableProgram
from tilewright.runtime.memory_plan import MemoryPlan


@dataclass(frozen=True)
class PlanRow:
    """One region. `nodes` are (node name, operator, place in the user's model); `terms` are the named parts of the prediction, in seconds; `space`
    counts the candidates considered."""

    name: str
    kind: str
    nodes: tuple[tuple[str, str, str], ...]
    schedule: str
    reasons: tuple[str, ...]
    predicted_seconds: float
    terms: Mapping[str, float]
    kernels: tuple[str, ...]
    repeat: int
    space: SpaceCounts
    measured_seconds: float | None = None


@dataclass(frozen=True)
class Plan:
    """The regions in order of execution."""

    target: str
    rows: tuple[PlanRow, ...]
    memory: MemoryPlan | None = None

    @property
    def predicted_seconds(self) -> float:
        return sum(row.predicted_seconds for row in self.rows)

    def __str__(self) -> str:
        measured = any(row.measured_seconds is not None for row in self.rows)
        header = ("region", "kind", "nodes", "schedule", "predicted", *(("measured",) if measured else ()), "why")
        cells = [header]
        for row in self.rows:
            operators = ", ".join(operator for _, operator, _ in row.nodes)
            seconds = f"{row.predicted_seconds * 1e6:.1f} us" if row.predicted_seconds else "-"
            cells.append(
                (
                    row.name,
                    row.kind,
                    _clip(operators, 40),
                    _clip(row.schedule, 60),
                    seconds,
                    *((f"{row.measured_seconds * 1e6:.1f} us" if row.measured_seconds is not None else "-",) if measured else ()),
                    _clip("; ".join(row.reasons), 60),
                )
            )
        widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
        lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells]
        lines.insert(1, "  ".join("-" * width for width in widths))
        launches = sum(len(row.kernels) * row.repeat for row in self.rows)
        total = f"target {self.target}: {len(self.rows)} regions, {launches} kernel calls"
        if self.predicted_seconds:
            total += f", predicted {self.predicted_seconds * 1e6:.1f} us"
        return "\n".join([*lines, total, *([str(self.memory)] if self.memory else [])])


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def plan_of(program: LoadableProgram, memory: MemoryPlan | None = None) -> Plan:
    """The plan of a program."""
    rows = tuple(
        PlanRow(
            region.name,
            region.kind,
            tuple((name, program.nodes[name].operator, program.nodes[name].place) for name in region.nodes),
            region.schedule,
            region.reasons,
            region.predicted_seconds,
            region.terms,
            tuple(call.kernel for call in region.calls),
            region.repeat,
            region.space,
            region.measured_seconds,
        )
        for region in program.regions
    )
    return Plan(program.target, rows, memory)
