"""Generates tables of the documentation from the result files that they cite.

    python -m bench.tables            # rewrites every generated table
    python -m bench.tables --check    # lists tables that differ from their files; exit status 1 if there are any

A generated table is between the lines `<!-- table NAME -->` and `<!-- end -->` of a page. `TABLES` maps each name to a function that returns rows of
cells, the header first, or None where that cannot be known, so that the page keeps what it has. Figures are rounded only there.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from bench.cells import Rows
from bench.cpu_tables import CPU_TABLES
from bench.gpu_tables import GPU_TABLES
from bench.gpu_time_tables import GPU_TIME_TABLES
from bench.history import absent_commits
from bench.pair_errors import pair_errors
from bench.tensor_core_tables import TENSOR_CORE_TABLES

ROOT = Path(__file__).resolve().parents[1]
PAGES = (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md")
BLOCK = re.compile(r"<!-- table (?P<name>[a-z0-9_]+) -->\n(?P<body>.*?)<!-- end -->", re.DOTALL)
TABLES: Mapping[str, Callable[[], Rows | None]] = MappingProxyType(
    {made.__name__: made for made in (*GPU_TABLES, *GPU_TIME_TABLES, *TENSOR_CORE_TABLES, *CPU_TABLES, pair_errors, absent_commits)}
)


def markdown(rows: Rows) -> str:
    """The rows as a Markdown table, the header first."""
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def rewritten(text: str) -> tuple[str, list[str]]:
    """A page with all its tables regenerated, and the names of those that differed.

    Raises:
        SystemExit: for an unknown table.
    """
    differing: list[str] = []

    def made(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in TABLES:
            raise SystemExit(f"no table {name}: known are {', '.join(TABLES)}")
        rows = TABLES[name]()
        if rows is None:
            return match[0]
        table = markdown(rows)
        if table != match["body"]:
            differing.append(name)
        return f"<!-- table {name} -->\n{table}<!-- end -->"

    return BLOCK.sub(made, text), differing


def differences(write: bool = False) -> Iterator[str]:
    """Tables that differ from their result files, as "page: name"; rewritten on request."""
    for page in PAGES:
        text, names = rewritten(page.read_text())
        yield from (f"{page.relative_to(ROOT)}: {name}" for name in names)
        if write and names:
            page.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where a table differs from its file")
    options = parser.parse_args()
    found = list(differences(write=not options.check))
    for name in found:
        print(name)
    sys.exit(bool(found and options.check))


if __name__ == "__main__":
    main()
