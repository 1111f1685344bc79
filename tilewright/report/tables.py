"""Tables for the terminal: a program's plan, and the result of a verification."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from tilewright.ir.graph import Node
from tilewright.report.units import scaled, seconds_text
from tilewright.report.work import program_work, region_work
from tilewright.runtime.executable import Image
from tilewright.runtime.verify import Verification
from tilewright.tuning.measure import Outcome


def plan_table(image: Image, title: str = "") -> Table:
    """One row per region, and the totals; "candidates" is the number of feasible schedules from which one was chosen."""
    program = image.program
    table = Table(title=title or None, show_footer=True)
    total = program_work(program)
    predicted = sum(region.predicted_seconds for region in program.regions)
    table.add_column("", str(len(program.regions)), justify="right")
    table.add_column("kind", "regions")
    table.add_column("operators", overflow="fold", ratio=2)
    table.add_column("schedule", overflow="fold", ratio=3)
    table.add_column("candidates", f"{sum(region.space.feasible for region in program.regions):,}", justify="right", no_wrap=True)
    table.add_column("flop", scaled(total.flops, ""), justify="right", no_wrap=True)
    table.add_column("predicted", seconds_text(predicted), justify="right", no_wrap=True)
    measured = any(region.measured_seconds is not None for region in program.regions)
    if measured:
        table.add_column("measured", justify="right", no_wrap=True)
    for number, region in enumerate(program.regions, 1):
        operators = ", ".join(_operator(program.nodes[name]) for name in region.nodes)
        flops = region_work(program, region).flops
        work = scaled(flops, "") if flops else "-"
        candidates = f"{region.space.feasible:,}" if region.space.generated else "-"
        cells = (str(number), region.kind, operators or region.name, region.schedule, candidates, work, seconds_text(region.predicted_seconds))
        table.add_row(*cells)
    return table


def _operator(node: Node) -> str:
    return str(node.attributes["target"]) if node.operator == "torch" else node.operator


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str]) -> Iterator[str]:
    """A table of many columns as lines, which a pager can scroll: a line of headings, and one for each row. Columns with a heading in `left` begin at
    the same place, others end there."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, *rows):
        cells = (cell.ljust(width) if heading in left else cell.rjust(width) for cell, width, heading in zip(row, widths, headings, strict=True))
        yield "  ".join(cells).rstrip()


def verification_table(verification: Verification, limit: int | None = None) -> Table:
    """Stored values, worst first, at most `limit` of them."""
    table = Table("region", "value", "shape", "dtype")
    for heading in ("relative error", "absolute error", "tolerance"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for value in verification.worst[:limit]:
        table.add_row(
            value.region,
            value.value,
            "x".join(map(str, value.shape)) or "scalar",
            value.dtype,
            f"{value.relative_error:.2e}",
            f"{value.absolute_error:.2e}",
            f"{value.tolerance:.0e}",
            "ok" if value.passed else Text("wrong", "bold red"),
        )
    return table


def outcome_table(outcomes: Sequence[Outcome], title: str) -> Table:
    """One row per contender. Times are medians with half the interquartile range; the last ratio is the contender's median over that of the first."""
    table = Table("contender", title=title)
    for heading in ("median ms", "least ms", "calls", "relative error", "ready in s", "times ours"):
        table.add_column(heading, justify="right")
    table.add_column("remark", overflow="fold")
    own = outcomes[0].median_seconds
    for outcome in outcomes:
        median, quartiles, least = outcome.median_seconds, outcome.quartile_seconds, outcome.minimum_seconds
        if median is None or quartiles is None or least is None:
            table.add_row(outcome.contender, *("-",) * 6, f"{outcome.status}: {outcome.reason}")
            continue
        table.add_row(
            outcome.contender,
            f"{median * 1e3:.3f} ± {(quartiles[1] - quartiles[0]) / 2 * 1e3:.3f}",
            f"{least * 1e3:.3f}",
            str(outcome.calls),
            f"{outcome.relative_error or 0.0:.1e}",
            f"{outcome.preparation_seconds or 0.0:.1f}",
            f"{median / own:.2f}" if own else "-",
            "",
        )
    return table
