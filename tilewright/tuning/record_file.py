"""The SQLite file of the records: opened so that its content is only ever read as data, and set aside if it is damaged.

A file is used only if its schema text is exactly ours: no foreign view, trigger, virtual table or generated column is ever evaluated.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tilewright.errors import CacheError
from tilewright.files import regular
from tilewright.system.private_files import make_folder
from tilewright.tuning.measurement import COLUMNS, NUMBERS

VERSION = 2
"""Format version of the table and of exported lines."""
WRITE_SECONDS, READ_SECONDS = 60.0, 5.0
"""Maximum time to wait for a lock that another process holds."""
MOST_ROW_BYTES = 1 << 23
_TYPES = {"count": "INTEGER", "stopped": "INTEGER", **dict.fromkeys(NUMBERS, "REAL")}
_COLUMNS = ", ".join(f"{name} {_TYPES.get(name, 'TEXT')}{'' if name in NUMBERS else ' NOT NULL'}" for name in COLUMNS)
SCHEMA = {
    "measurements": f"CREATE TABLE measurements (identity TEXT PRIMARY KEY, {_COLUMNS}) WITHOUT ROWID",
    "of_a_region": "CREATE INDEX of_a_region ON measurements (region, machine, mode)",
}
_OF_THE_SYSTEM = frozenset(
    (
        sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOLFS, sqlite3.SQLITE_AUTH,
    )
)  # fmt: skip
"""Errors that do not mean a damaged file: a lock, the disk, permissions."""


class Damaged(CacheError):
    """The file is not a record file, or its records can no longer be read."""


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Converts SQLite's errors in the block to CacheErrors that name the file; Damaged if the file is at fault."""
    remedy = "name another file, or move this one away: it is measured again"
    try:
        yield
    except UnicodeDecodeError as error:  # in SQLite's own message, which may quote the file
        raise Damaged(f"the records {path} cannot be used: their schema is no text", remedy) from error
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_MISUSE) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise CacheError(f"the records {path} are locked by another process", "wait for it to end, or name another file") from error
        if code in _OF_THE_SYSTEM:
            raise CacheError(f"the records {path} cannot be used: {error}", "check permissions and free space, or name another file") from error
        raise Damaged(f"the records {path} cannot be used: {error}", remedy) from error


def connected(path: Path, write: bool) -> sqlite3.Connection | None:
    """A connection to a file of records; with `write`, the file is created if there is none. None for an empty file opened for reading.

    Raises:
        Damaged: if the file is not a record file.
        CacheError: if it has a newer version, or cannot be opened, read or written.
    """
    try:
        if write:
            make_folder(path.parent)
        if path.exists() or not write:
            regular(path)
    except (OSError, ValueError) as error:
        words = getattr(error, "strerror", None) or error
        raise CacheError(f"the records {path} cannot be opened: {words}", "name a file that can be read and written") from error
    with errors_of(path):
        place = f"{path.absolute().as_uri()}?mode={'rwc' if write else 'rw'}"  # rw, so that a killed process's transaction is recovered first
        connection = sqlite3.connect(place, timeout=WRITE_SECONDS if write else READ_SECONDS, isolation_level=None, uri=True)
        try:
            connection.text_factory = lambda data: data.decode(errors="surrogateescape")  # rows with such text are rejected
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_ROW_BYTES)
            connection.execute("PRAGMA trusted_schema=OFF")
            connection.execute("PRAGMA cell_size_check=ON")
            if not _has_tables(connection, path, write):
                connection.close()
                return None
            if write:
                _check_pages(connection, path)
                _write_ahead(connection)
                connection.execute("PRAGMA synchronous=NORMAL")
            else:
                connection.execute("PRAGMA query_only=ON")
        except BaseException:
            connection.close()
            raise
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Runs the block as a transaction: all of it takes effect, or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _has_tables(connection: sqlite3.Connection, path: Path, write: bool) -> bool:
    """Whether the file has our tables, which `write` creates in an empty file. Raises CacheError for any other content."""
    connection.execute("BEGIN")  # version and tables of the same moment: another process may be creating them
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    found = connection.execute("SELECT name, sql FROM sqlite_master").fetchall()  # with SQL, since a trigger may have an index's name
    connection.execute("COMMIT")
    if version == 0 and not found:
        if write:
            with transaction(connection):
                for name, sql in SCHEMA.items():  # another process may have created them already
                    connection.execute(sql.replace(f" {name} ", f" IF NOT EXISTS {name} ", 1))
                connection.execute(f"PRAGMA user_version={VERSION}")
        return write
    if version > VERSION:
        raise CacheError(
            f"{path} holds no records of version {VERSION} (its version is {version})",
            "name another file; `tilewright tune --export` with the version that wrote it carries them over",
        )
    if version != VERSION or sorted(found, key=str) != sorted(SCHEMA.items(), key=str):
        raise Damaged(f"{path} holds no records of version {VERSION} (its version is {version})", "name another file")
    return True


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Changes the file to a write-ahead log, if it has none. SQLite does not wait for the locks that this takes."""
    deadline = time.monotonic() + WRITE_SECONDS
    while connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _check_pages(connection: sqlite3.Connection, path: Path) -> None:
    (said,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if said != "ok":
        raise Damaged(f"the records {path} are damaged: {said.splitlines()[-1]}", "name another file")


@contextmanager
def staying(path: Path, seconds: float = WRITE_SECONDS, alone: bool = False) -> Iterator[None]:
    """Holds a lock on the file's folder, in which `set_aside` is `alone`: a file must not be renamed while another process opens it, for SQLite would
    apply the journal of the new file, which has its name, to the old one. Without such a folder there is nothing to rename.

    Raises:
        TimeoutError: if another process holds the lock for so many seconds.
        OSError: if the folder cannot be opened or locked.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        yield
        return
    deadline = time.monotonic() + seconds
    try:
        while True:
            try:
                fcntl.flock(folder, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, "its folder is locked by another process") from error
                time.sleep(0.01)
        yield
    finally:
        os.close(folder)


def set_aside(path: Path) -> Path | None:
    """Renames a damaged file, with SQLite's companion files, to the first free name ``NAME.damaged-N``. Returns that name, or None if the file turns
    out to be sound or gone. If several processes find the damage, only one renames the file: it checks again under a lock, so a new file that another
    process has created in the meantime stays in place.

    Raises:
        OSError: if its folder cannot be opened or locked, or it cannot be renamed.
    """
    with staying(path, alone=True):
        try:
            with errors_of(path):
                connection = connected(path, write=False)
                if connection is not None:
                    with closing(connection):
                        _check_pages(connection, path)
            return None
        except Damaged:
            pass
        except CacheError:  # the file is locked or gone
            return None
        number = 1
        while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
            number += 1
        for suffix in ("-wal", "-shm", "-journal", ""):
            if (part := path.with_name(path.name + suffix)).exists():
                os.rename(part, aside.with_name(aside.name + suffix))
        return aside
