"""``tilewright cache``: shows, checks or prunes the cache of compiled kernels."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tilewright.cli_options import WRONG_CODE, amount
from tilewright.errors import UnsupportedOption

if TYPE_CHECKING:
    from rich.console import Console

DESCRIPTION = "show, check or prune the cache of compiled kernels"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("action", choices=("show", "check", "prune"), nargs="?", default="show")
    parser.add_argument("--older-than", type=amount, metavar="DAYS", help="prune: entries older than this")
    parser.add_argument("--limit", type=amount, metavar="MB", help="prune: the oldest entries beyond this size")
    parser.add_argument("--all", action="store_true", help="prune: every entry")


def run(options: argparse.Namespace, console: Console) -> int:
    """Runs the chosen action; the exit code is WRONG_CODE if `check` finds a problem."""
    from rich.table import Table

    from tilewright.text import number_of, scaled
    from tilewright.toolchain import default_cache

    cache = default_cache()
    if options.action != "prune" and (options.older_than is not None or options.limit is not None or options.all):
        raise UnsupportedOption(f"--older-than, --limit and --all have no meaning with `cache {options.action}`", "use them with `cache prune`")
    if options.action == "check":
        problems = cache.check()
        for problem in problems:
            console.print(problem, soft_wrap=True)
        console.print(f"{number_of(len(problems), 'problem')} in {cache.root}", soft_wrap=True)
        return WRONG_CODE if problems else 0
    if options.action == "prune":
        size = None if options.limit is None else int(options.limit * 1e6)
        removed = cache.prune(options.older_than, size, options.all)
        console.print(f"removed {removed} kernels from {cache.root}", soft_wrap=True)
        return 0
    entries = cache.entries()
    table = Table("target", "kind", "kernels", "size")
    groups = sorted({(entry.target, entry.kind) for entry in entries})
    for target, kind in groups:
        own = [entry for entry in entries if (entry.target, entry.kind) == (target, kind)]
        table.add_row(target, kind, str(len(own)), scaled(sum(entry.bytes for entry in own), "B"))
    if groups:
        console.print(table)
    console.print(f"{number_of(len(entries), 'kernel')}, {scaled(sum(entry.bytes for entry in entries), 'B')} in {cache.root}", soft_wrap=True)
    return 0
