"""The files inside an artifact, a directory or a zip file, read within limits.

Only regular files count: a link could lead out of a directory, and a pipe or a device might never end. For a zip file, its directory is checked
before anything is inflated: the number of members, their declared sizes, and that none overlaps another.
"""

from __future__ import annotations

import os
import re
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

SAFE_NAME = re.compile(r"(sources/|binaries/)?[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")
FOLDERS = ("sources", "binaries")
MOST_MEMBERS = 1 << 17
MOST_BYTES = 1 << 37
"""Limit on the bytes of all members together."""
MOST_INFLATION = 200
"""Limit on the ratio of the members' total size to the zip file's: `save` stores members uncompressed, and weights hardly compress."""
SPARE_BYTES = 1 << 20
"""Total size that a small zip file may have beyond that ratio."""

Members = Mapping[str, Callable[[int], bytes]]
"""For every name, a function that reads the file if it has at most the given number of bytes. Raises ValueError or OSError."""


@contextmanager
def members(path: Path) -> Iterator[Members]:
    """The files of an artifact.

    Raises:
        FileNotFoundError: if there is nothing.
        ValueError: for anything except a directory, or a zip file whose members have safe names and are within the limits.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") if stat.S_ISREG(os.fstat(descriptor).st_mode) else _Directory(descriptor) as opened:
        if isinstance(opened, _Directory):
            yield opened.files()
            return
        try:
            archive = zipfile.ZipFile(opened)
        except (zipfile.BadZipFile, EOFError, NotImplementedError, OverflowError) as error:
            raise ValueError(f"it is no sound zip file ({error})") from error
        with archive:
            yield _packed(archive, os.fstat(descriptor).st_size)


def _packed(archive: zipfile.ZipFile, size: int) -> Members:
    entries = archive.infolist()
    if len(entries) > MOST_MEMBERS:
        raise ValueError(f"it has {len(entries)} members, more than {MOST_MEMBERS}")
    end = 0
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        if not SAFE_NAME.fullmatch(entry.filename):
            raise ValueError(f"it holds a file named {entry.filename!a}")
        if entry.flag_bits & 1 or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{entry.filename} is encrypted, or compressed in a way that artifacts are not")
        if entry.header_offset < end or entry.compress_size < 0 or entry.file_size < 0:
            raise ValueError(f"{entry.filename} overlaps another member")
        end = entry.header_offset + entry.compress_size
    total = sum(entry.file_size for entry in entries)
    if end > size or total > min(MOST_BYTES, MOST_INFLATION * size + SPARE_BYTES):
        raise ValueError(f"its members have {total} bytes, and the file {size}: no artifact is compressed so much")
    if len({entry.filename for entry in entries}) != len(entries):
        raise ValueError("it holds two files of one name")
    return {entry.filename: partial(_inflated, archive, entry) for entry in entries}


def _inflated(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, most: int) -> bytes:
    if entry.file_size > most:
        raise ValueError(f"it has {entry.file_size} bytes, more than {most}")
    try:
        return archive.read(entry)
    except (RuntimeError, NotImplementedError, EOFError, OverflowError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(str(error)) from error


class _Directory:
    """An open directory; links in it are not followed, and pipes are not waited for."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._folders: list[int] = []

    def __enter__(self) -> _Directory:
        if not stat.S_ISDIR(os.fstat(self._descriptor).st_mode):
            os.close(self._descriptor)
            raise ValueError("it is neither a directory nor a zip file")
        return self

    def __exit__(self, *_: object) -> None:
        for folder in (*self._folders, self._descriptor):
            os.close(folder)

    def files(self) -> Members:
        found: dict[str, Callable[[int], bytes]] = {}
        total = 0
        for prefix, folder in self._open_folders():
            for entry in sorted(os.listdir(folder)):
                if not prefix and entry in FOLDERS:
                    continue
                name = prefix + entry
                status = os.stat(entry, dir_fd=folder, follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    raise ValueError(f"{name!a} is a {'link' if stat.S_ISLNK(status.st_mode) else 'directory, pipe or device'}")
                total += status.st_size
                if len(found) >= MOST_MEMBERS or total > MOST_BYTES:
                    raise ValueError(f"it has more than {MOST_MEMBERS} files, or more than {MOST_BYTES} bytes")
                found[name] = partial(_read, folder, entry)
        return found

    def _open_folders(self) -> Iterator[tuple[str, int]]:
        yield "", self._descriptor
        for name in FOLDERS:
            try:
                folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._descriptor)
            except FileNotFoundError:
                continue
            except NotADirectoryError as error:
                raise ValueError(f"{name} is a link, or no directory") from error
            self._folders.append(folder)
            yield f"{name}/", folder


def _read(folder: int, entry: str, most: int) -> bytes:
    descriptor = os.open(entry, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            raise ValueError(f"it has {status.st_size} bytes, more than {most}")
        return file.read(status.st_size)
