"""Numbers formatted for people."""

from __future__ import annotations

from collections.abc import Mapping


def scaled(value: float, unit: str) -> str:
    """Three or four significant digits with a decimal prefix: 12,345,678 and "B" give "12.3 MB"."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}" if abs(value) < 999.5 * factor else f"{value / factor:.0f} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def percent(part: float, whole: float) -> str:
    """A fraction such as "41.2 %"; "<0.1 %" for small ones that are not zero."""
    value = 100 * part / whole if whole else 0.0
    return "<0.1 %" if 0 < value < 0.05 else f"{value:.1f} %"


def seconds_text(seconds: float) -> str:
    """A time such as "705 us"; "-" for zero."""
    if not seconds:
        return "-"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}" if seconds < 999.5 * factor else f"{seconds / factor:.0f} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def counts_text(counts: Mapping[str, float]) -> str:
    """Counts by name, largest first, without zeros: "1,024 loads, 12.5 stores". Equal counts keep their order."""
    found = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{count:,.4g} {name}" if count < 1000 else f"{count:,.0f} {name}" for name, count in found if count)
