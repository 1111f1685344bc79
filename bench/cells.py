"""Result files as cells of tables."""

from __future__ import annotations

import json
from typing import Any

from bench.common import RESULTS

Rows = list[list[str]]


def results_of(name: str, part: str = "results") -> Any:
    """The results in bench/results/NAME.json, or its settings, among which some benchmarks store a summary."""
    return json.loads((RESULTS / f"{name}.json").read_text())[part]


def percent(share: float | None, digits: int = 1) -> str:
    """A question mark for what was not measured."""
    return "?" if share is None else f"{100 * share:.{digits}f}"


def power(value: float) -> str:
    """A value as text such as 1.6e-6."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"
