"""A plan as text for terminals: totals, the regions that take longest with what limits them, and a line for every region."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright.ir.graph import short_place
from tilewright.runtime.plan import WRONG_BY, Plan, PlanRow
from tilewright.text import WIDTH, aligned, clipped, folded, number_of, percent, scaled, seconds_text

HOTTEST = 5
"""Regions of the summary."""


def plan_text(plan: Plan, title: str = "", width: int = WIDTH) -> str:
    """The summary and the table of all regions, no line longer than `width` (at least 60)."""
    parts = [*summary_lines(plan, title, width), "", *_table(plan, width)]
    return "\n".join([*parts, *([clipped(f"memory: {plan.memory}", width)] if plan.memory else [])])


def summary_lines(plan: Plan, title: str = "", width: int = WIDTH) -> Iterator[str]:
    """Totals, and the regions that take longest, with their share of the time, what they are bound by, and their nearest limit."""
    named = f"{title} for {plan.target}" if title else plan.target
    yield clipped(f"{named} ({plan.architecture}): {_totals(plan)}", width)
    work = plan.work
    yield f"  {scaled(work.flops, 'flop')}, {scaled(work.bytes_read + work.bytes_written, 'B')} read and written by the regions"
    yield f"  predicted {seconds_text(plan.predicted_seconds)}{_without_prediction(plan)}"
    measured = plan.measured
    if measured:
        total, predicted = (sum(times) for times in zip(*((row.seconds, row.predicted_seconds) for row in measured), strict=True))
        yield f"  measured {seconds_text(total)} in {number_of(len(measured), 'region')}, predicted {seconds_text(predicted)}"
    if plan.partitions:
        chosen = next((partition.text for partition in plan.partitions if partition.taken), "")
        yield from folded(f"  of {number_of(len(plan.partitions), 'partition')} compared: {chosen}", width, 4)
    hottest = plan.hottest(HOTTEST)
    if hottest:
        yield f"  hottest: {percent(sum(row.seconds for row in hottest), plan.seconds)} of the time in {number_of(len(hottest), 'region')}"
        yield from (f"  {line}" for line in _hottest(plan, hottest, width - 2))
    wrong = [row for row in plan.rows if row.is_mispredicted]
    if wrong:
        yield f"  ! predicted wrong by more than {WRONG_BY:g} times: {_numbers(wrong)}"


def _totals(plan: Plan) -> str:
    counts = {"region": len(plan.rows), "kernel": plan.kernels, "kernel call": plan.calls}
    return ", ".join(number_of(count, what) for what, count in counts.items())


def _without_prediction(plan: Plan) -> str:
    missing = [row for row in plan.rows if (row.kernels or row.has_library) and not row.predicted_seconds]
    return f" (no prediction, counted as nothing: {number_of(len(missing), 'region')})" if missing and plan.predicted_seconds else ""


def _hottest(plan: Plan, rows: tuple[PlanRow, ...], width: int) -> Iterator[str]:
    measured = any(row.measured_seconds is not None for row in rows)
    headings = ("region", "predicted", *(("measured",) if measured else ()), "share", "bound by", "limit")
    cells = [
        (
            f"{row.number}. {_place(row)}: {operators_of(row)}",
            seconds_text(row.predicted_seconds),
            *((measured_text(row),) if measured else ()),
            percent(plan.share(row), 1.0),
            row.bound_by or "-",
            seconds_text(row.limit[1]),
        )
        for row in rows
    ]
    yield from aligned(headings, cells, ("region", "bound by"), width, {"region": 1.0})


def _table(plan: Plan, width: int) -> Iterator[str]:
    measured = any(row.measured_seconds is not None for row in plan.rows)
    headings = ("", "kind", "operators", "schedule", "predicted", *(("measured",) if measured else ()))
    cells = [
        (
            str(row.number),
            row.kind,
            operators_of(row),
            row.schedule,
            seconds_text(row.predicted_seconds),
            *((measured_text(row),) if measured else ()),
        )
        for row in plan.rows
    ]
    yield from aligned(headings, cells, ("kind", "operators", "schedule"), width, {"operators": 0.4, "schedule": 0.6})


def measured_text(row: PlanRow) -> str:
    """The measured time, marked if the prediction is far from it; "-" if there is none."""
    return "-" if row.measured_seconds is None else seconds_text(row.measured_seconds) + (" !" if row.is_mispredicted else "")


def _place(row: PlanRow) -> str:
    """Where the region's first operator is in the user's model; its kind if that is not known."""
    places = (short_place(place) for _, _, place in row.nodes)
    return next(filter(None, places), row.kind)


def operators_of(row: PlanRow) -> str:
    """The operators of a region; its name if it has none."""
    return ", ".join(operator for _, operator, _ in row.nodes) or row.name


def _numbers(rows: list[PlanRow]) -> str:
    shown = ", ".join(str(row.number) for row in rows[:HOTTEST])
    return f"region{'s' if len(rows) > 1 else ''} {shown}" + (f" and {len(rows) - HOTTEST} more" if len(rows) > HOTTEST else "")
