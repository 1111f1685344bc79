"""Records: every measurement of a candidate with all that it depends on, in one SQLite file.

A measurement is never changed; measuring again adds another. Files of JSON lines carry records from one machine to another.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilewright import settings
from tilewright.errors import CacheError
from tilewright.hardware.machine import Machine
from tilewright.runtime import plain
from tilewright.runtime.problems import generator
from tilewright.runtime.trials import MODES, TUNING_MODE, Outcome

VERSION = 1
"""Of the table's and the lines' form."""
STATUSES = ("measured", "wrong", "failed")
ERRORS_SHOWN = 5


@dataclass(frozen=True)
class Measurement:
    """One measurement of one candidate. `region` is `Problem.key`, `schedule` the text of `plain.schedule_text`; `problem` and `description`
    say the same for people. `code` names the generated code, `generator` what made it (`problems.generator`); `resources` is the compiler's
    report by kernel, as JSON. Times are seconds of a call, None unless `status` is "measured"; `stopped`: timed once only. `date` is UTC."""

    region: str
    kind: str
    problem: str
    schedule: str
    description: str
    machine: str
    gpu: str
    driver: str
    compiler: str
    mode: str
    code: str
    generator: str
    status: str
    reason: str
    median: float | None
    lower: float | None
    upper: float | None
    count: int
    stopped: bool
    relative_error: float | None
    resources: str
    date: str

    @property
    def identity(self) -> str:
        """A digest of everything: equal measurements are stored once."""
        return hashlib.sha256(json.dumps(list(asdict(self).values())).encode()).hexdigest()[:32]

    @property
    def seconds(self) -> float:
        return self.median if self.median is not None else math.inf


_COLUMNS = tuple(field.name for field in fields(Measurement))
_TYPES = {"count": "INTEGER", "stopped": "INTEGER", **dict.fromkeys(("median", "lower", "upper", "relative_error"), "REAL")}
_OPTIONAL = frozenset(("median", "lower", "upper", "relative_error"))


def measurement_of(outcome: Outcome, machine: Machine, name: str, date: str | None = None) -> Measurement:
    """The record of an outcome; `date` as `now` writes it."""
    problem, timing, known = outcome.job.problem, outcome.timing, outcome.environment
    return Measurement(
        region=problem.key,
        kind=problem.region.kind,
        problem=problem.text,
        schedule=plain.schedule_text(outcome.job.schedule),
        description=outcome.schedule,
        machine=name,
        gpu=known.get("gpu", ""),
        driver=known.get("driver", ""),
        compiler=known.get("compiler", ""),
        mode=outcome.mode,
        code=outcome.code,
        generator=generator(machine),
        status=outcome.status,
        reason=outcome.reason,
        median=timing.median if timing else None,
        lower=timing.lower if timing else None,
        upper=timing.upper if timing else None,
        count=timing.count if timing else 0,
        stopped=outcome.stopped,
        relative_error=outcome.relative_error,
        resources=json.dumps({name: dict(found) for name, found in outcome.resources.items()}, sort_keys=True),
        date=date or now(),
    )


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def default_path() -> Path:
    """The user's records."""
    return settings.cache_directory() / "records.sqlite"


class Records:
    """The records in one file; a context manager that closes it. Many processes may read and write at once.

    Raises:
        CacheError: where the file is no record store, of another version, or cannot be read or written.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path) if path is not None else default_path()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(self.path, timeout=60, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise CacheError(f"the records {self.path} cannot be opened: {error}", "name a file that can be written") from error
        try:
            self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        with self._errors():
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
            (version,) = self._connection.execute("PRAGMA user_version").fetchone()
            tables = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if version == 0 and not tables:
                columns = ", ".join(f"{name} {_TYPES.get(name, 'TEXT')}{'' if name in _OPTIONAL else ' NOT NULL'}" for name in _COLUMNS)
                with self._transaction():
                    self._connection.execute(f"CREATE TABLE IF NOT EXISTS measurements (identity TEXT PRIMARY KEY, {columns}) WITHOUT ROWID")
                    self._connection.execute("CREATE INDEX IF NOT EXISTS of_a_region ON measurements (region, machine, mode)")
                    self._connection.execute(f"PRAGMA user_version={VERSION}")
            elif version != VERSION:
                raise CacheError(
                    f"{self.path} holds no records of version {VERSION} (its version is {version})",
                    "name another file; `tilewright tune --export` with the version that wrote it carries them over",
                )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise CacheError(
                f"the records {self.path} cannot be used: {error}", "name another file, or remove this one: what it holds is measured again"
            ) from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def __len__(self) -> int:
        with self._errors():
            return int(self._connection.execute("SELECT count(*) FROM measurements").fetchone()[0])

    def add(self, measurements: Iterable[Measurement]) -> int:
        """Stores them in one transaction; how many were new."""
        places = ", ".join("?" * (len(_COLUMNS) + 1))
        with self._errors(), self._transaction():
            before = self._connection.total_changes
            self._connection.executemany(
                f"INSERT OR IGNORE INTO measurements VALUES ({places})", ((entry.identity, *asdict(entry).values()) for entry in measurements)
            )
            return self._connection.total_changes - before

    def all(self) -> Iterator[Measurement]:
        """Every measurement, by date."""
        yield from self._select("ORDER BY date, identity")

    def of(self, region: str, machine: str, mode: str = TUNING_MODE) -> list[Measurement]:
        """Everything measured of a region on a machine, by date."""
        return list(self._select("WHERE region = ? AND machine = ? AND mode = ? ORDER BY date, identity", region, machine, mode))

    def standing(self, region: str, machine: str, mode: str = TUNING_MODE) -> list[Measurement]:
        """One measurement for each schedule and code, the fastest first: of several the one of most replays, and of those the latest."""
        kept: dict[tuple[str, str], Measurement] = {}
        for entry in self.of(region, machine, mode):
            key = (entry.schedule, entry.code)
            if key not in kept or kept[key].count <= entry.count:
                kept[key] = entry
        return sorted(kept.values(), key=lambda entry: (entry.seconds, entry.schedule, entry.code))

    def _select(self, condition: str, *arguments: str) -> Iterator[Measurement]:
        with self._errors():
            for row in self._connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM measurements {condition}", arguments):
                values = dict(zip(_COLUMNS, row, strict=True))
                yield Measurement(**{**values, "stopped": bool(values["stopped"])})

    def export_lines(self, path: str | Path) -> int:
        """Writes every measurement as a line of JSON, compressed where the name ends in .gz; how many."""
        count = 0
        with _opened(path, "wt") as file:
            for entry in self.all():
                file.write(json.dumps({"version": VERSION, **asdict(entry)}) + "\n")
                count += 1
        return count

    def import_lines(self, path: str | Path) -> int:
        """Reads what `export_lines` wrote; how many measurements were new.

        Raises:
            CacheError: where any line is no measurement, naming the lines; then nothing is stored.
        """
        found: list[Measurement] = []
        wrong: list[str] = []
        try:
            with _opened(path, "rt") as file:
                for number, line in enumerate(file, 1):
                    if not line.strip():
                        continue
                    try:
                        found.append(_measurement(json.loads(line)))
                    except (ValueError, TypeError, KeyError) as error:
                        wrong.append(f"line {number}: {error}")
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise CacheError(f"{path} cannot be read: {error}", "name a file that `tilewright tune --export` wrote") from error
        if wrong:
            shown = "; ".join(wrong[:ERRORS_SHOWN]) + (f"; and {len(wrong) - ERRORS_SHOWN} more" if len(wrong) > ERRORS_SHOWN else "")
            raise CacheError(f"{path} holds lines that are no measurements: {shown}", "correct or remove them; nothing was imported")
        return self.add(found)


def _opened(path: str | Path, mode: str) -> Any:
    return gzip.open(path, mode, encoding="utf-8") if str(path).endswith(".gz") else open(path, mode, encoding="utf-8")


def _measurement(data: Any) -> Measurement:
    """A measurement of a line's content. Raises ValueError, TypeError or KeyError where it is none."""
    if not isinstance(data, dict):
        raise ValueError("it is no JSON object")
    version = data.pop("version", None)
    if version != VERSION:
        raise ValueError(f"its version is {version!r}, not {VERSION}")
    if set(data) != set(_COLUMNS):
        raise ValueError(f"fields missing or unknown: {', '.join(sorted(set(data) ^ set(_COLUMNS)))}")
    for name in _COLUMNS:
        _check_field(name, data[name])
    entry = Measurement(**data)
    if entry.status not in STATUSES or entry.mode not in MODES:
        raise ValueError(f"status {entry.status!r}, mode {entry.mode!r}")
    if "type" not in json.loads(entry.schedule) or not isinstance(json.loads(entry.resources), dict):
        raise ValueError("schedule or resources are malformed")
    datetime.fromisoformat(entry.date)
    times = (entry.lower, entry.median, entry.upper)
    if entry.status != "measured":
        if times != (None, None, None):
            raise ValueError("times of what was not measured")
    elif entry.lower is None or entry.median is None or entry.upper is None or not 0 < entry.lower <= entry.median <= entry.upper or entry.count < 1:
        raise ValueError(f"times {times} of {entry.count} replays")
    return entry


def _check_field(name: str, value: Any) -> None:
    kind = _TYPES.get(name, "TEXT")
    if name == "stopped":
        good = isinstance(value, bool)
    elif kind == "INTEGER":
        good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    elif kind == "REAL":
        good = value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value))
    else:
        good = isinstance(value, str)
    if not good:
        raise ValueError(f"{name} is {value!r}")
