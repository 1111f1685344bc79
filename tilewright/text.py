"""Numbers and tables as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from textwrap import wrap

WIDTH = 80
"""Columns of tables where nothing says how wide a terminal is."""


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
        if abs(seconds) >= factor:
            return f"{seconds / factor:.3g} {unit}" if abs(seconds) < 999.5 * factor else f"{seconds / factor:.0f} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def number_of(count: int, what: str) -> str:
    """`1 region`, `3 regions`"""
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def counts_text(counts: Mapping[str, float]) -> str:
    """Counts by name, largest first, without zeros: "1,024 loads, 12.5 stores". Equal counts keep their order."""
    found = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{count:,.4g} {name}" if count < 1000 else f"{count:,.0f} {name}" for name, count in found if count)


def clipped(text: str, width: int) -> str:
    """The text, its end replaced by an ellipsis if it is longer than `width`."""
    return text if len(text) <= width else text[: max(width - 3, 0)].rstrip() + "..."


def folded(line: str, width: int | None, indent: int) -> list[str]:
    """The line, continued on further ones that begin with `indent` spaces if it is longer than `width`."""
    if width is None or len(line) <= width:
        return [line]
    return wrap(line, width, subsequent_indent=" " * indent, break_on_hyphens=False)


def aligned(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: Sequence[str],
    width: int | None = None,
    flexible: Mapping[str, float] | None = None,
    folded: bool = False,
) -> Iterator[str]:
    """A table as lines: a line of headings, and one for each row. Columns with a heading in `left` begin at the same place, others end there. If the
    lines would be longer than `width`, the columns in `flexible` share what the others leave, in these proportions, and longer cells are clipped, or
    continued on further lines if `folded`."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    wanted = {heading: length for heading, length in zip(headings, widths, strict=True) if heading in (flexible or {})}
    if width is not None and flexible:
        room = width - 2 * (len(widths) - 1) - (sum(widths) - sum(wanted.values()))
        given = _divided(max(room, 0), wanted, flexible)
        widths = [given.get(heading, length) for heading, length in zip(headings, widths, strict=True)]
    for row in (headings, *rows):
        parts = [wrap(cell, max(length, 1)) if folded else [clipped(cell, length)] for cell, length in zip(row, widths, strict=True)]
        for line in zip_longest(*parts, fillvalue=""):
            placed = zip(line, widths, headings, strict=True)
            yield "  ".join(cell.ljust(length) if heading in left else cell.rjust(length) for cell, length, heading in placed).rstrip()


def stacked(headings: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str], width: int | None, keys: int) -> Iterator[str]:
    """A table of many columns as lines (`aligned`). If they would be longer than `width`, it is several tables, one below another, each with the
    first `keys` columns and as many of the others as fit, at least one; only a column that alone is too wide is clipped."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    groups: list[list[int]] = [[]]
    for column in range(keys, len(headings)):
        needed = sum(widths[place] + 2 for place in (*range(keys), *groups[-1])) + widths[column]
        if width is not None and groups[-1] and needed > width:
            groups.append([])
        groups[-1].append(column)
    for number, group in enumerate(groups):
        shown = [*range(keys), *group]
        parts = [[line[place] for place in shown] for line in (headings, *rows)]
        if number:
            yield ""
        yield from aligned(parts[0], parts[1:], left, width, {parts[0][-1]: 1.0} if len(group) == 1 else None)


def _divided(room: int, wanted: Mapping[str, int], proportions: Mapping[str, float]) -> dict[str, int]:
    """The width of each column: what it wants if that is no more than its share, and a share of the rest otherwise."""
    given: dict[str, int] = {}
    while len(given) < len(wanted):
        rest = {name: proportions[name] for name in wanted if name not in given}
        free = room - sum(given.values())
        content = [name for name in rest if wanted[name] <= free * rest[name] / sum(rest.values())]
        given |= {name: wanted[name] for name in content} or {name: int(free * share / sum(rest.values())) for name, share in rest.items()}
    return given
