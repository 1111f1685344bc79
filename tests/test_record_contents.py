"""Rows, lines and schedules of records that Tilewright did not write: refused one by one, and never lowered."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.stand_ins import FAILURE, H200, OTHER, SMALL, database, filled, sample, stand_ins
from tilewright.cli import main
from tilewright.errors import CacheError
from tilewright.files import lines_of
from tilewright.selection.choice import rank
from tilewright.selection.ranking import Choice
from tilewright.tuning import serialisation
from tilewright.tuning.measurement import Measurement, checked
from tilewright.tuning.record_file import VERSION
from tilewright.tuning.records import Records, default_path
from tilewright.tuning.tuning import OUTSIDE, from_records, tune

# Rows


BAD_ROWS = {
    "an empty text": ("region", "''"), "bytes": ("schedule", "x'00ff'"), "text for a number": ("count", "'many'"), "a large count": ("count", "1e18"),
    "negative": ("median", "-1"), "infinity": ("upper", "9e999"), "nothing": ("median", "NULL"), "text for a time": ("lower", "'soon'"),
    "no UTF-8": ("reason", "CAST(x'ff41' AS TEXT)"), "an escape": ("description", "char(27) || '[2J'"), "a long text": ("reason", "hex(zeroblob(60000))"),
    "a schedule": ("schedule", "'{'"), "a deep schedule": ("schedule", "replace(hex(zeroblob(40000)), '0', '[')"), "a date": ("date", "'soon'"),
    "tile 0": ("schedule", "replace(schedule, ': 16', ': 0')"), "a status": ("status", "'good'"), "stopped": ("stopped", "7"), "a blob of zeros": ("code", "zeroblob(9)"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_ROWS)
def test_a_bad_row_costs_itself(what: str, tmp_path: Path) -> None:
    column, value = BAD_ROWS[what]
    path = tmp_path / "records.sqlite"
    good, bad = sample(1), replace(sample(), reason="bad", schedule=re.sub(r": \d+", ": 16", sample().schedule))
    with Records(path) as records:
        records.add([good, bad])
    database(path, f"UPDATE measurements SET {column} = {value} WHERE reason = 'bad'")
    with Records(path, write=False) as records:
        with pytest.warns(UserWarning, match="no measurements, and these are ignored"):
            assert list(records.all()) == [good]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # reported once
            assert list(records.all()) == [good]
    with Records(path) as records, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert records.export_lines(tmp_path / "lines") == 1
        with Records(tmp_path / "other.sqlite") as other:
            assert other.import_lines(tmp_path / "lines") == 1 and list(other.all()) == [good]


def test_a_row_too_long_for_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    path = default_path()
    filled(path, 3)
    database(path, "UPDATE measurements SET reason = hex(zeroblob(20000000)) WHERE identity = (SELECT min(identity) FROM measurements)")
    with pytest.warns(UserWarning):
        with Records(write=False) as records:
            assert len(list(records.all())) <= 3


# Lines


def lines_with(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    with Records(tmp_path / "source.sqlite") as records:
        records.add([sample(), sample(1)])
        records.export_lines(tmp_path / "lines.jsonl")
    first, second = (tmp_path / "lines.jsonl").read_text().splitlines()
    changed = change(json.loads(second))
    (tmp_path / "lines.jsonl").write_bytes(first.encode() + b"\n" + (changed if isinstance(changed, bytes) else json.dumps(changed).encode()) + b"\n")
    return tmp_path / "lines.jsonl"


def with_tile(value: Any) -> Callable[[dict[str, Any]], Any]:
    def change(line: dict[str, Any]) -> Any:
        schedule = json.loads(line["schedule"])
        return {**line, "schedule": json.dumps({**schedule, next(name for name in schedule if name != "type"): value})}

    return change


HOSTILE_LINES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a count of 2^70": lambda line: {**line, "count": 1 << 70},
    "a count as a float": lambda line: {**line, "count": 4.0},
    "a median of 10^400": lambda line: {**line, "median": 10**400},
    "a median of 1e400": lambda line: json.dumps(line).replace(f'"median": {line["median"]}', '"median": 1e400').encode(),
    "NaN": lambda line: json.dumps({**line, "median": float("nan")}).encode(),
    "a number of many digits": lambda line: json.dumps(line).replace(f'"median": {line["median"]}', f'"median": {"9" * 10000}').encode(),
    "a time of 30 years": lambda line: {**line, "upper": 1e9},
    "a lone surrogate": lambda line: {**line, "reason": "\ud800"},
    "a lone surrogate as a name": lambda line: {**line, "\udfff": 1},
    "a NUL": lambda line: {**line, "machine": "h200\0"},
    "an escape sequence": lambda line: {**line, "description": "\x1b[2J"},
    "no UTF-8": lambda line: b'{"version": %d, "reason": "\xff"}' % VERSION,
    "depth": lambda line: b"[" * 200_000,
    "depth in a text": lambda line: {**line, "schedule": "[" * 90_000},
    "depth in resources": lambda line: {**line, "resources": '{"a":' * 15_000},
    "a long text": lambda line: {**line, "reason": "a" * 200_000},
    "a tile of 0": with_tile(0),
    "a tile of -1": with_tile(-1),
    "a tile of 2^70": with_tile(1 << 70),
    "a tile of text in lists": with_tile([[]]),
    "a tile of 1.5": with_tile(1.5),
    "a tile of nothing": with_tile(None),
    "many tiles": with_tile([1] * 1000),
    "a schedule of many parameters": lambda line: {**line, "schedule": json.dumps({"type": "A", **{f"p{k}": 1 for k in range(1000)}})},
    "a region": lambda line: {**line, "region": "'; DROP TABLE measurements"},
    "a machine": lambda line: {**line, "machine": ""},
    "null": lambda line: {**line, "gpu": None},
    "a list": lambda line: {**line, "gpu": ["GPU"]},
    "an error below zero": lambda line: {**line, "relative_error": -1.0},
}


@pytest.mark.parametrize("how", HOSTILE_LINES)
def test_hostile_lines_are_refused_and_nothing_is_imported(how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = lines_with(tmp_path, HOSTILE_LINES[how])
    kept = filled(tmp_path / "records.sqlite", 3)
    with Records(tmp_path / "records.sqlite") as records:
        with pytest.raises(CacheError, match="line 2: ") as caught:
            records.import_lines(path)
        assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()
        assert sorted(e.identity for e in records.all()) == sorted(e.identity for e in kept)
    assert main(["tune", "--records", str(tmp_path / "records.sqlite"), "--import", str(path)]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "lines.jsonl" in err and "line 2" in err and "unexpected" not in err


def test_bombs_are_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gzip

    monkeypatch.setattr("tilewright.files.MOST_LINE_BYTES", 1 << 16)
    monkeypatch.setattr("tilewright.files.MOST_BYTES", 1 << 20)
    for name, content in (("line", b"a" * (1 << 22)), ("lines", b"\n" * (1 << 22))):
        (tmp_path / name).write_bytes(gzip.compress(content))
        with Records(tmp_path / "records.sqlite") as records, pytest.raises(CacheError, match=f"{name} cannot be read: more than"):
            records.import_lines(tmp_path / name)
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError):
            list(lines_of(place))


def test_every_candidate_of_ours_passes() -> None:
    """Including those of schemas and parameters of other releases."""
    for problem in (SMALL, OTHER):
        for choice in rank(problem, H200):
            serialisation.check_schedule_text(serialisation.schedule_text(choice.schedule))
    for text in ('{"type": "AbacusSchedule", "beads": 0}', '{"type": "ContractionSchedule", "colour": "red", "shape": [1, 2]}'):
        serialisation.check_schedule_text(text)


def test_an_interrupted_export_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "records.sqlite", 3)
    (tmp_path / "lines").write_text("before")

    def broken(entry: Measurement) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("tilewright.tuning.records.asdict", broken)
    with Records(tmp_path / "records.sqlite") as records, pytest.raises(KeyboardInterrupt):
        records.export_lines(tmp_path / "lines")
    assert (tmp_path / "lines").read_text() == "before" and len(list(tmp_path.glob(".lines*"))) == 0


# Strange schedules in plans and tuning


STRANGE = {
    "another type of number": {"block_m": True}, "text": {"block_m": "16"}, "huge": {"block_m": (1 << 31) - 1, "block_n": (1 << 31) - 1}, "odd": {"block_m": 7},
    "a list": {"stages": [1, 2]}, "many stages": {"stages": 1 << 20}, "an unknown parameter": {"colour": 1}, "another schema": {"type": "RowReductionSchedule"},
}  # fmt: skip


@lru_cache
def tiled() -> str:
    return next(serialisation.schedule_text(c.schedule) for c in rank(SMALL, H200) if type(c.schedule).__name__ == "ContractionSchedule")


def test_schedules_outside_the_space_are_never_lowered(tmp_path: Path) -> None:
    def choice_of(*entries: Measurement) -> Choice:
        with Records(tmp_path / f"{len(list(tmp_path.iterdir()))}.sqlite") as records:
            records.add(entries)
            return from_records(records)(SMALL, H200, 1)

    good = replace(sample(2), median=2e-6, lower=2e-6, upper=2e-6)
    everything = [good]
    for changes in STRANGE.values():
        text = json.dumps(json.loads(tiled()) | changes)
        strange = checked({**asdict(good), "schedule": text, "median": 1e-9, "lower": 1e-9, "upper": 1e-9})
        more = [strange, replace(strange, median=1.1e-9, upper=1.2e-9, code="", generator="other"), replace(strange, **{**FAILURE, "code": ""})]
        assert choice_of(good, *more).measured_seconds == 2e-6
        alone = choice_of(strange)
        assert alone.measured_seconds is None and alone.rejected[OUTSIDE] == 1 and alone.schedule == next(iter(rank(SMALL, H200))).schedule
        everything += more
    with Records(tmp_path / "all.sqlite") as records:
        records.add(everything)
        tuned = tune([SMALL], H200, 3, records, start=stand_ins)
        assert tuned.measured + tuned.known + tuned.bounded_out == 3 and tuned.failed == 0 and tuned.measured > 0
