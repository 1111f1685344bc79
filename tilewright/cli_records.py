"""``tilewright records``: what tuning has measured, and forgetting some of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeVar

from tilewright.cli_options import amount, path
from tilewright.cli_output import progress_bar
from tilewright.errors import UnsupportedOption
from tilewright.text import aligned, number_of, seconds_text

if TYPE_CHECKING:
    from rich.console import Console

    from tilewright.tuning.measurement import Measurement
    from tilewright.tuning.records import Records

Key = TypeVar("Key")
DESCRIPTION = "show or forget what tuning has measured"
LONGEST_PAST = 36500
"""Days that a date may lie back."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("action", choices=("show", "forget"), nargs="?", default="show")
    parser.add_argument("--records", type=path, metavar="FILE", help="the file of records (default: the user's, in the cache folder)")
    parser.add_argument("--machine", metavar="NAME", help="only of machines whose names begin so; show: their regions")
    parser.add_argument("--region", metavar="KEY", help="only of regions whose keys begin so; show: their candidates")
    parser.add_argument("--older-than", type=amount, metavar="DAYS", help="forget: only what was measured before that")
    parser.add_argument("--failed", action="store_true", help="forget: only candidates that failed, so that they are tried again")
    parser.add_argument("--all", action="store_true", help="forget: everything")


def run(options: argparse.Namespace, console: Console) -> int:
    """Runs the chosen action.

    Raises:
        UnsupportedOption: for options without meaning, and `forget` without a condition.
        CacheError: for records that cannot be read or written.
    """
    with progress_bar("loading PyTorch"):
        from tilewright.tuning.records import Records
    conditions = bool(options.machine or options.region or options.failed or options.older_than is not None)
    if options.action == "show" and (options.older_than is not None or options.failed or options.all):
        raise UnsupportedOption("--older-than, --failed and --all have no meaning with `records show`", "use them with `records forget`")
    if options.action == "forget" and conditions == options.all:
        what = "--all and a condition contradict each other" if options.all else "forget what?"
        raise UnsupportedOption(what, "give --machine, --region, --older-than or --failed, or --all alone")
    machine, region = options.machine or "", options.region or ""
    with Records(options.records, write=options.action == "forget") as records:
        if options.action == "forget":
            removed = records.forget(machine, region, _before(options.older_than), options.failed)
            console.print(f"{number_of(removed, 'measurement')} forgotten, {len(records)} left in {records.path}", soft_wrap=True)
            return 0
        show = _candidates if region else _regions if machine else _machines
        found = [entry for entry in records.all() if entry.machine.startswith(machine) and entry.region.startswith(region)]
        for line in show(found, records, console.width) if found else ():
            console.print(line, soft_wrap=True)
        console.print(f"{number_of(len(found), 'measurement')} in {records.path}", soft_wrap=True)
    return 0


def _before(days: float | None) -> str:
    """The date that many days ago, in the format of measurements; empty without days."""
    if days is None:
        return ""
    return (datetime.now(UTC) - timedelta(days=min(days, LONGEST_PAST))).isoformat(timespec="milliseconds")


def _machines(found: list[Measurement], records: Records, width: int) -> Iterator[str]:
    """A line for each machine."""
    rows = []
    for machine, own in _grouped(found, lambda entry: entry.machine):
        counts = (len({entry.region for entry in own}), len(own), _count(own, "failed"), _count(own, "wrong"))
        rows.append((machine, *map(str, counts), own[0].date[:10], own[-1].date[:10]))
    yield from aligned(("machine", "regions", "measurements", "failed", "wrong", "first", "last"), rows, ("machine",), width, {"machine": 1.0})


def _regions(found: list[Measurement], records: Records, width: int) -> Iterator[str]:
    """For each machine a line for each region: its best candidate."""
    for machine, own in _grouped(found, lambda entry: entry.machine):
        rows = []
        for region, _ in _grouped(own, lambda entry: entry.region):
            standing = records.standing(region, machine)
            best = next((entry for entry in standing if entry.status == "measured"), None)
            times = (best.description, seconds_text(best.seconds), str(best.count)) if best is not None else ("-", "-", "-")
            rows.append((region[:12], own[0].kind if best is None else best.kind, str(len(standing)), *times))
        yield machine
        headings = ("region", "kind", "candidates", "best", "time", "replays")
        yield from aligned(headings, rows, ("region", "kind", "best"), width, {"best": 1.0})


def _candidates(found: list[Measurement], records: Records, width: int) -> Iterator[str]:
    """For each region on each machine a line for each candidate, fastest first."""
    for (machine, region), own in _grouped(found, lambda entry: (entry.machine, entry.region)):
        yield f"{region[:12]} ({own[0].kind}) on {machine}"
        rows = [
            (entry.description, seconds_text(entry.seconds), str(entry.count), entry.date[:10])
            if entry.status == "measured"
            else (entry.description, entry.status, "-", entry.date[:10])
            for entry in records.standing(region, machine)
        ]
        yield from aligned(("schedule", "time", "replays", "date"), rows, ("schedule",), width, {"schedule": 1.0})


def _count(own: Iterable[Measurement], status: str) -> int:
    return sum(entry.status == status for entry in own)


def _grouped(found: Iterable[Measurement], key: Callable[[Measurement], Key]) -> list[tuple[Key, list[Measurement]]]:
    """The measurements by a key, in the order of its first occurrence."""
    groups: dict[Key, list[Measurement]] = {}
    for entry in found:
        groups.setdefault(key(entry), []).append(entry)
    return list(groups.items())
