"""Tables for the terminal: the results of a verification, of timing contenders, and two plans compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilewright.report.page.connections import matched
from tilewright.runtime.plan import Plan
from tilewright.runtime.plan_text import operators_of
from tilewright.runtime.verify import Verification
from tilewright.text import aligned, folded, seconds_text
from tilewright.tuning.measure import Outcome


def verification_lines(verification: Verification, limit: int | None, width: int) -> Iterator[str]:
    """Stored values, worst first, at most `limit` of them: errors relative to the largest magnitude, and absolute ones."""
    rows = [
        (
            value.region,
            value.value,
            "x".join(map(str, value.shape)) or "scalar",
            value.dtype,
            f"{value.relative_error:.2e}",
            f"{value.absolute_error:.2e}",
            f"{value.tolerance:.0e}",
            "ok" if value.passed else "wrong",
        )
        for value in verification.worst[:limit]
    ]
    headings = ("region", "value", "shape", "dtype", "relative", "absolute", "tolerance", "")
    yield from aligned(headings, rows, ("region", "value", "shape", "dtype", ""), width, {"region": 0.35, "value": 0.35, "shape": 0.3})


def outcome_lines(outcomes: Sequence[Outcome], title: str, width: int) -> Iterator[str]:
    """One line per contender. Times are milliseconds: medians with half the interquartile range, and the least; "error" is relative, "ready" the
    seconds of preparation, and the last column is the contender's median over that of the first. Then what was not measured, with the reason."""
    own = outcomes[0].median_seconds
    rows = []
    for outcome in outcomes:
        median, quartiles, least = outcome.median_seconds, outcome.quartile_seconds, outcome.minimum_seconds
        if median is None or quartiles is None or least is None:
            rows.append((outcome.contender, *("-",) * 6))
            continue
        spread = (quartiles[1] - quartiles[0]) / 2
        error, ready = outcome.relative_error or 0.0, outcome.preparation_seconds or 0.0
        times = f"{median * 1e3:.3f} ± {spread * 1e3:.3f}", f"{least * 1e3:.3f}"
        rows.append((outcome.contender, *times, str(outcome.calls), f"{error:.1e}", f"{ready:.1f}", f"{median / own:.2f}" if own else "-"))
    yield title
    headings = ("contender", "median ms", "least ms", "calls", "error", "ready s", "times ours")
    yield from aligned(headings, rows, ("contender",), width, {"contender": 1.0})
    yield from (f"{outcome.contender} {outcome.status}: {outcome.reason}" for outcome in outcomes if outcome.reason)


def comparison_lines(first: tuple[str, Plan], second: tuple[str, Plan], width: int) -> Iterator[str]:
    """Two plans, each after its name, region by region (`matched`), largest difference first: their times, measured where those of both are, and the
    first over the second."""
    (first_name, a), (second_name, b) = first, second
    matches = matched(a, b)
    totals = [sum(match.seconds[side] for match in matches) for side in (0, 1)]
    times = f"first {first_name}, {seconds_text(totals[0])}; second {second_name}, {seconds_text(totals[1])}"
    yield from folded(f"{times}; first / second {_ratio(*totals)}", width, 2)
    rows = []
    for match in sorted(matches, key=lambda match: -abs(match.seconds[0] - match.seconds[1])):
        sides = [a.rows[number - 1] for number in match.first], [b.rows[number - 1] for number in match.second]
        texts = (seconds_text(time) if side else "none" for side, time in zip(sides, match.seconds, strict=True))
        numbers = (", ".join(str(row.number) for row in side) for side in sides)
        operators = "; ".join(operators_of(row) for row in sides[0] or sides[1])
        rows.append((operators, *numbers, *texts, _ratio(*match.seconds), "measured" if match.measured else "predicted"))
    headings = ("operators", "regions", "of second", "first", "second", "ratio", "times")
    yield from aligned(headings, rows, ("operators", "times"), width, {"operators": 1.0})


def _ratio(first: float, second: float) -> str:
    return f"{first / second:.2f}" if first and second else "-"
