"""Tables for the terminal: the results of a verification and of a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilewright.runtime.verify import Verification
from tilewright.text import aligned
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
