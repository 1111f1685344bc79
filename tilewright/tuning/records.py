"""Records: every measurement of a candidate with everything that it depends on, in one SQLite file.

A measurement is never changed; measuring again adds another, and the latest counts. Files of JSON lines transfer records between machines.

Problems with the user's own file (`default_path`) never fail a compilation: if it is damaged it is renamed, and if it cannot be read it is ignored; a
warning says which. A file that was named explicitly is never moved, and any problem with it is an error.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from tilewright import settings
from tilewright.errors import CacheError
from tilewright.files import first_line, json_of, lines_of, reading, written
from tilewright.tuning.measurement import COLUMNS, Measurement, checked
from tilewright.tuning.record_file import READ_SECONDS, VERSION, WRITE_SECONDS, Damaged, connected, errors_of, set_aside, staying, transaction
from tilewright.tuning.trials import TUNING_MODE

ERRORS_SHOWN = 5
TRUTHS = {0: False, 1: True}


def default_path() -> Path:
    """The file of the user's records."""
    return settings.cache_directory() / "records.sqlite"


class Records:
    """The records in one file; a context manager that closes it. Several processes may read and write at once.

    Without a path, the user's records. `write=False` neither creates nor changes a file, and without a path raises no errors: unreadable records
    count as empty.

    Raises:
        CacheError: if the file is not a record file, has a newer version, or cannot be read or written.
    """

    def __init__(self, path: str | Path | None = None, *, write: bool = True) -> None:
        self.path = Path(path) if path is not None else default_path()
        self._optional = path is None and not write
        self._has_told = False
        self._connection: sqlite3.Connection | None = None
        if path is not None:
            self._connection = connected(self.path, write)
            return
        try:
            self._connection = self._opened(write)
        except CacheError as error:
            moved = self._give_up(error)
            if write and not moved:
                raise
            if write:
                self._connection = self._opened(write)

    def _opened(self, write: bool) -> sqlite3.Connection | None:
        """A connection to the user's own file, which others may be setting aside; None for reading if nothing was ever recorded."""
        try:
            if not write and not self.path.exists():
                return None
            with staying(self.path, WRITE_SECONDS if write else READ_SECONDS):
                return connected(self.path, write)
        except OSError as error:
            remedy = "wait for the other process, or check the permissions and the file system of the folder"
            raise CacheError(f"the records {self.path} cannot be opened: {error.strerror}", remedy) from error

    def _give_up(self, error: CacheError) -> bool:
        """Warns once why the user's records cannot be used, after setting a damaged file aside. Returns whether it was set aside."""
        self.close()
        aside, more = None, ""
        if isinstance(error, Damaged):
            try:
                aside = set_aside(self.path)
                more = f"; they are kept as {aside.name}" if aside else ""
            except OSError as other:
                more = f"; they cannot be set aside: {other.strerror}"
        warnings.warn(f"{error.cause}{more}; going on without what they knew", stacklevel=2)
        return isinstance(error, Damaged)

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __len__(self) -> int:
        if self._connection is None:
            return 0
        with errors_of(self.path):
            return int(self._connection.execute("SELECT count(*) FROM measurements").fetchone()[0])

    def add(self, measurements: Iterable[Measurement]) -> int:
        """Stores the measurements in one transaction. Returns the number of new ones."""
        places = ", ".join("?" * (len(COLUMNS) + 1))
        assert self._connection is not None
        with errors_of(self.path), transaction(self._connection):
            before = self._connection.total_changes
            self._connection.executemany(
                f"INSERT OR IGNORE INTO measurements VALUES ({places})", ((entry.identity, *asdict(entry).values()) for entry in measurements)
            )
            return self._connection.total_changes - before

    def forget(self, machine: str = "", region: str = "", before: str = "", failures: bool = False) -> int:
        """Deletes the measurements to which all that is given applies, and returns their number: of machines and of regions whose names begin so,
        older than a date in the format of `measurement.now`, and only those that failed or were wrong."""
        condition = "substr(machine, 1, length(?)) = ? AND substr(region, 1, length(?)) = ? AND (? = '' OR date < ?)"
        condition += " AND status != 'measured'" if failures else ""
        assert self._connection is not None
        with errors_of(self.path), transaction(self._connection):
            arguments = (machine, machine, region, region, before, before)
            return self._connection.execute(f"DELETE FROM measurements WHERE {condition}", arguments).rowcount

    def all(self) -> Iterator[Measurement]:
        """Every measurement, by date."""
        yield from self._select("ORDER BY date, identity")

    def of(self, region: str, machine: str, mode: str = TUNING_MODE) -> list[Measurement]:
        """All measurements of a region on a machine, by date."""
        return list(self._select("WHERE region = ? AND machine = ? AND mode = ? ORDER BY date, identity", region, machine, mode))

    def standing(self, region: str, machine: str, mode: str = TUNING_MODE) -> list[Measurement]:
        """One measurement for each schedule and code, fastest first: the latest, since what was measured again is measured with more replays."""
        kept: dict[tuple[str, str], Measurement] = {}
        for entry in sorted(self.of(region, machine, mode), key=lambda entry: (entry.date, entry.count)):
            kept[entry.schedule, entry.code] = entry
        return sorted(kept.values(), key=lambda entry: (entry.seconds, entry.schedule, entry.code))

    def _select(self, condition: str, *arguments: str) -> Iterator[Measurement]:
        """The rows that are valid measurements; others are skipped with a warning."""
        if self._connection is None:
            return
        try:
            with errors_of(self.path):
                for row in self._connection.execute(f"SELECT {', '.join(COLUMNS)} FROM measurements {condition}", arguments):
                    values = dict(zip(COLUMNS, row, strict=True))
                    try:
                        entry = checked({**values, "stopped": TRUTHS.get(values["stopped"])})
                    except ValueError as error:
                        self._tell_of_row(error)
                        continue
                    yield entry
        except CacheError as error:
            if not self._optional:
                raise
            self._give_up(error)

    def _tell_of_row(self, error: ValueError) -> None:
        if not self._has_told:
            warnings.warn(f"{self.path} holds rows that are no measurements, and these are ignored: {first_line(error)}", stacklevel=2)
            self._has_told = True

    def export_lines(self, path: str | Path) -> int:
        """Writes every measurement as a line of JSON, compressed if the name ends in .gz. Returns their number."""
        count = 0
        with written(path) as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if str(path).endswith(".gz") else raw as file:
            for entry in self.all():
                file.write(json.dumps({"version": VERSION, **asdict(entry)}).encode() + b"\n")
                count += 1
        return count

    def import_lines(self, path: str | Path) -> int:
        """Imports a file written by `export_lines`. Returns the number of new measurements.

        Raises:
            CacheError: if any line is not a valid measurement, naming the lines; nothing is stored then.
        """
        wrong: list[str] = []
        count = 0

        def found() -> Iterator[Measurement]:
            nonlocal count
            for number, line in lines_of(path):
                if not line.strip():
                    continue
                try:
                    yield _measurement(json_of(line))
                except ValueError as error:
                    count += 1
                    wrong.extend([f"line {number}: {first_line(error)}"] if count <= ERRORS_SHOWN else [])
            if wrong:
                shown = "; ".join(wrong) + (f"; and {count - ERRORS_SHOWN} more" if count > ERRORS_SHOWN else "")
                raise CacheError(f"{path} holds lines that are no measurements: {shown}", "correct or remove them; nothing was imported")

        with reading(path, CacheError, "name a file that `tilewright tune --export` wrote"):
            return self.add(found())


def _measurement(data: object) -> Measurement:
    """The measurement in a line's content. Raises ValueError if it is not valid."""
    if not isinstance(data, dict):
        raise ValueError("it is no JSON object")
    version = data.pop("version", None)
    if version != VERSION:
        raise ValueError(f"its version is {ascii(version)[:40]}, not {VERSION}")
    return checked(data)
