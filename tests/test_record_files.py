"""Files of records that are damaged, foreign or locked: consequences, and files that must not be moved."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tilewright
from tests.stand_ins import H200, OTHER, SMALL, database, filled, sample
from tilewright.cli import main
from tilewright.cli_output import quiet
from tilewright.errors import CacheError
from tilewright.ir.problem import Problem
from tilewright.tuning import record_file
from tilewright.tuning.measurement import COLUMNS
from tilewright.tuning.record_file import SCHEMA, VERSION, Damaged, set_aside
from tilewright.tuning.records import Records, default_path
from tilewright.tuning.tuning import chooser_for

OURS = f"PRAGMA user_version={VERSION}"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()


def overwrite(path: Path, start: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(data)


def without_not_null(path: Path, column: str, value: str) -> None:
    """A table of untyped columns, with one of our rows in which one column is the value of an expression."""
    filled(path.with_name("source"), 1)
    database(
        path, f"ATTACH '{path.with_name('source')}' AS other", f"CREATE TABLE measurements (identity, {', '.join(COLUMNS)})",
        "INSERT INTO measurements SELECT * FROM other.measurements", f"UPDATE measurements SET {column} = {value}", SCHEMA["of_a_region"],
        OURS,
    )  # fmt: skip


def hostile(path: Path, *more: str) -> None:
    database(path, *SCHEMA.values(), *more, OURS)


DAMAGED: dict[str, Callable[[Path], Any]] = {
    "text": lambda path: path.write_text("these are no records " * 400),
    "its header alone": lambda path: (filled(path), os.truncate(path, 100)),  # type: ignore[func-returns-value]
    "half of it": lambda path: (filled(path), os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)),  # type: ignore[func-returns-value]
    "an overwritten root page": lambda path: (filled(path), overwrite(path, 4096, b"\x5a" * 4096)),  # type: ignore[func-returns-value]
    "a stranger's tables": lambda path: database(path, "CREATE TABLE music (name TEXT)"),
    "tables of an older version": lambda path: database(path, *SCHEMA.values(), f"PRAGMA user_version={VERSION - 1}"),
    "a stranger's tables of our version": lambda path: database(path, "CREATE TABLE music (name TEXT)", OURS),
    "no tables of our version": lambda path: database(path, OURS),
    "columns of other types": lambda path: without_not_null(path, "count", "'many'"),
    "a view of our table's name": lambda path: database(
        path, f"CREATE VIEW measurements AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT {', '.join('x AS ' + c for c in COLUMNS)} FROM n",
        OURS,
    ),
    "a trigger": lambda path: hostile(path, "CREATE TRIGGER t AFTER INSERT ON measurements BEGIN DELETE FROM measurements; END"),
    "a trigger of our index's name": lambda path: database(
        path, SCHEMA["measurements"], "CREATE TRIGGER of_a_region AFTER INSERT ON measurements BEGIN DELETE FROM measurements; END", SCHEMA["of_a_region"],
        OURS,
    ),
    "one index more": lambda path: hostile(path, "CREATE INDEX more ON measurements (abs(count))"),
    "a virtual table": lambda path: hostile(path, "CREATE VIRTUAL TABLE f USING fts5(a)"),
    "a generated column": lambda path: database(
        path, SCHEMA["measurements"].replace("reason TEXT NOT NULL", "reason TEXT AS (zeroblob(1000000000)) NOT NULL"), SCHEMA["of_a_region"], OURS
    ),
    "a schema that is no text": lambda path: (
        filled(path), path.write_bytes(path.read_bytes().replace(b"CREATE INDEX of_a_region ON measurements", b"CREATE INDEX of_a_region ON \xff\xfe\xff\xc7urements"))
    ),
    "a malformed schema": lambda path: hostile(
        path, "PRAGMA writable_schema=ON", "UPDATE sqlite_master SET sql = 'CREATE TABLE measurements (' WHERE name = 'measurements'"
    ),
}  # fmt: skip


@pytest.fixture(params=DAMAGED)
def damage(request: pytest.FixtureRequest) -> Callable[[Path], Any]:
    return DAMAGED[request.param]


def chosen(*problems: Problem) -> list[tuple[Any, float | None]]:
    """Choices made with the user's records."""
    with chooser_for(H200, None) as (chooser, _):
        found = [chooser(p, H200, 1) for p in problems or (SMALL,)]
    return [(choice.schedule, choice.measured_seconds) for choice in found]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and not path.name.endswith(("-shm", "-wal"))}


def test_a_damaged_file_of_the_user_costs_the_records_and_is_kept(damage: Callable[[Path], Any]) -> None:
    path = default_path()
    damage(path)
    before = path.read_bytes()
    with pytest.warns(UserWarning) as caught:
        found = chosen()
    assert [schedule for schedule, seconds in found if seconds is None] == [schedule for schedule, _ in found]
    (told,) = [str(w.message) for w in caught]
    assert str(path) in told and "kept as records.sqlite.damaged-1" in told and "\n" not in told
    aside = path.with_name("records.sqlite.damaged-1")
    assert not path.exists() and aside.read_bytes() == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen() == found


def test_a_damaged_file_that_is_named_is_an_error_and_stays(damage: Callable[[Path], Any], tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    damage(folder / "named.sqlite")
    before = snapshot(folder)
    for write in (True, False):
        with pytest.raises(CacheError, match=r"named\.sqlite") as caught, Records(folder / "named.sqlite", write=write) as records:
            list(records.all())
        assert "\n" not in str(caught.value) and caught.value.remedy
    assert snapshot(folder) == before


def test_tuning_sets_the_users_damaged_file_aside_and_begins_another(damage: Callable[[Path], Any]) -> None:
    path = default_path()
    for number in (1, 2):
        damage(path)
        for name in ("source", "source-wal", "source-shm"):
            path.with_name(name).unlink(missing_ok=True)
        before = path.read_bytes()
        with pytest.warns(UserWarning, match=f"kept as records.sqlite.damaged-{number}"), Records() as records:
            assert len(records) == 0 and records.add([sample()]) == 1
        assert path.with_name(f"records.sqlite.damaged-{number}").read_bytes() == before
        with Records() as records:
            assert len(records) == 1
        path.unlink()


def test_the_command_warns_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lines.py").write_text("import torch\ndef linear():\n    return torch.nn.Linear(4, 4), torch.randn(1, 4)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    default_path().write_text("no records")
    assert main(["compile", "lines:linear"]) == 0
    out, err = capfd.readouterr()
    assert err.startswith("tilewright: warning: the records ") and err.count("\n") == 1 and "damaged-1" in err and "contraction" in out
    assert main(["compile", "lines:linear", "--records", str(tmp_path / "lines.py")]) == 2
    err = capfd.readouterr().err
    assert err.startswith(f"tilewright: error: the records {tmp_path / 'lines.py'} cannot be used: ") and err.count("\n") == 1
    assert (tmp_path / "lines.py").exists()
    with pytest.raises(ZeroDivisionError), quiet(False):
        Records(write=False).close()
        default_path().write_text("no records")
        Records(write=False).close()
        raise ZeroDivisionError
    assert "damaged-2" in capfd.readouterr().err  # even if an error follows


def test_names_are_no_markup(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "[bold").mkdir()
    place = tmp_path / "[bold" / "red]" / "[" / "x]"
    assert main(["tune", "--records", str(place / "records"), "--export", str(place / "lines")]) == 0
    out, err = capfd.readouterr()
    assert str(place / "lines") in out and err == ""


def test_damage_that_is_found_while_reading() -> None:
    """The schema of the database is sound, and so are the pages that the first region reads."""
    path, problems = default_path(), (SMALL, OTHER)
    with Records() as records:
        records.add([replace(sample(0, problem), date=f"2026-01-01T00:00:00.{k:06d}+00:00") for problem in problems for k in range(300)])
    size = path.stat().st_size
    overwrite(path, 3 * 4096, b"\x5a" * (size - 3 * 4096))
    with pytest.warns(UserWarning, match="kept as"):
        assert all(seconds is None for _, seconds in chosen(*problems))
    assert path.with_name("records.sqlite.damaged-1").stat().st_size == size and not path.exists()


NOT_READABLE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a folder": (lambda path: path.mkdir(), "directory"),
    "a pipe": (lambda path: os.mkfifo(path), "no regular file"),
    "a newer version": (lambda path: database(path, "CREATE TABLE later (a)", "PRAGMA user_version=7"), "its version is 7"),
    "a link to itself": (lambda path: path.symlink_to(path), "unable to open"),
}


@pytest.mark.parametrize("what", NOT_READABLE)
def test_what_is_not_damaged_is_ignored_and_stays(what: str) -> None:
    make, words = NOT_READABLE[what]
    make(default_path())
    before = default_path().lstat()
    if what != "a link to itself":  # which does not count as a file
        with pytest.warns(UserWarning, match=words):
            assert all(seconds is None for _, seconds in chosen())
    with pytest.raises(CacheError, match=words), pytest.warns(UserWarning, match=words):
        Records()
    assert default_path().lstat() == before and not list(default_path().parent.glob("*damaged*"))


def test_an_empty_file_holds_no_records() -> None:
    default_path().write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(seconds is None for _, seconds in chosen())
        assert default_path().read_bytes() == b""
        with Records() as records:
            assert len(records) == 0


LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA locking_mode=EXCLUSIVE")
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", LOCK, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        yield
        process.communicate()


def test_a_file_that_another_process_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_file, "READ_SECONDS", 0.2)
    monkeypatch.setattr(record_file, "WRITE_SECONDS", 0.2)
    entries = filled(default_path(), 3)
    with locked(default_path()):
        with pytest.warns(UserWarning, match="locked by another process"):
            assert all(seconds is None for _, seconds in chosen())
        with pytest.raises(CacheError, match="locked by another process"), pytest.warns(UserWarning, match="locked"):
            Records()
    with Records() as records:
        assert sorted(records.all(), key=lambda e: e.identity) == sorted(entries, key=lambda e: e.identity)


def test_a_full_disk_costs_what_is_added(tmp_path: Path) -> None:
    entries = filled(tmp_path / "records.sqlite", 3)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Records(tmp_path / "records.sqlite") as records:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
        try:
            with pytest.raises(CacheError, match="cannot be used: .*check permissions and free space"):
                records.add(replace(entries[0], reason=f"{number}" * 1000) for number in range(500))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert len(records) == 3 and records.add([sample(3)]) == 1


def test_one_of_many_sets_a_damaged_file_aside() -> None:
    """Threads of one process stand in for processes, since the lock belongs to open files."""
    path = default_path()
    path.write_text("no records")
    start, found = threading.Barrier(8), []

    def open_and_add(number: int) -> None:
        start.wait()
        with Records() as records:
            found.append(records.add([replace(sample(), reason=str(number))]))

    threads = [threading.Thread(target=open_and_add, args=(number,)) for number in range(8)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [1] * 8
    with Records() as records:
        assert len(records) == 8
    assert [p.name for p in path.parent.glob("*damaged*")] == ["records.sqlite.damaged-1"]


def test_a_file_stays_while_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite would roll the journal of a new file of this name back into the old one."""
    path = default_path()
    path.write_text("no records")
    opening, going_on, moved = threading.Event(), threading.Event(), threading.Event()

    def slow(path: Path, write: bool) -> None:
        opening.set()
        assert going_on.wait(60)
        raise CacheError("not opened", "")

    def move() -> None:
        set_aside(path)
        moved.set()

    def open_slowly() -> None:
        with pytest.raises(CacheError, match="not opened"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Records()

    monkeypatch.setattr("tilewright.tuning.records.connected", slow)
    threads = [threading.Thread(target=open_slowly), threading.Thread(target=move)]
    threads[0].start()
    assert opening.wait(60)
    threads[1].start()
    assert not moved.wait(0.2) and path.exists()
    going_on.set()
    for thread in threads:
        thread.join()
    assert moved.is_set() and not path.exists()


def test_what_is_set_aside_replaces_nothing(tmp_path: Path) -> None:
    path, text = tmp_path / "records.sqlite", "no records" * 1000
    path.write_text(text)
    path.with_name("records.sqlite.damaged-1").write_text("earlier")
    path.with_name("records.sqlite.damaged-2").mkdir()
    aside = set_aside(path)
    assert aside is not None and aside.name == "records.sqlite.damaged-3" and aside.read_text() == text
    assert (tmp_path / "records.sqlite.damaged-1").read_text() == "earlier"
    assert not path.exists() and set_aside(path) is None
    filled(path, 2)
    assert set_aside(path) is None and path.exists()


def test_a_stranger_that_locks_the_folder_is_waited_for(tmp_path: Path) -> None:
    """The lock for setting a file aside is on the folder, and leaves no file of its own."""
    (tmp_path / "records.sqlite").write_text("no records")
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    done = threading.Thread(target=set_aside, args=(tmp_path / "records.sqlite",))
    done.start()
    done.join(0.3)
    assert done.is_alive() and (tmp_path / "records.sqlite").exists()
    os.close(folder)
    done.join()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["records.sqlite.damaged-1"]


def test_a_stranger_that_keeps_the_lock_costs_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    filled(default_path(), 2)
    monkeypatch.setattr("tilewright.tuning.records.READ_SECONDS", 0.05)
    monkeypatch.setattr("tilewright.tuning.records.WRITE_SECONDS", 0.05)
    folder = os.open(default_path().parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with pytest.warns(UserWarning, match="locked by another process; going on without"), Records(write=False) as records:
            assert len(records) == 0
        with pytest.raises(CacheError, match="locked by another process"), pytest.warns(UserWarning):
            Records()
    finally:
        os.close(folder)
    with Records() as records:
        assert len(records) == 2


def test_compiling_with_records_that_turn_bad(tmp_path: Path) -> None:
    default_path().write_text("no records")
    with pytest.warns(UserWarning, match="going on without"):
        executable = tilewright.compile(nn.Linear(3, 2).eval().requires_grad_(False), torch.ones(1, 3))
    assert executable(torch.ones(1, 3)).shape == (1, 2)
    assert issubclass(Damaged, CacheError)
