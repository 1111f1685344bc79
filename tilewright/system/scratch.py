"""Folders for temporary files that disappear with the process that made them, at the latest when the next one is made. A folder is locked (flock)
exactly as long as its process lives: the kernel drops the lock of a process that is killed. Making a folder first removes this user's unlocked ones
in the same place. Process numbers are not used, because they are reused.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType

PREFIX = "tilewright-scratch-"


class Scratch:
    """A new folder for this user alone, in `parent` or the system's temporary folder; a context manager that gives its path and removes it.

    Raises:
        OSError: if it cannot be made.
    """

    def __init__(self, parent: str | None = None) -> None:
        place = Path(parent or tempfile.gettempdir())
        for abandoned in place.glob(f"{PREFIX}*"):
            _remove(abandoned)
        self._lock: int | None = None
        while self._lock is None:  # another process may find the folder before it is locked
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
            self._lock = _locked(self.path)

    def close(self) -> None:
        """Removes the folder and its contents; a second call does nothing."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _locked(folder: Path) -> int | None:
    """Descriptor of the folder, which holds the lock; None if the folder no longer exists."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    with suppress(OSError):  # on a file system without locks no process treats the folder as abandoned
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    if folder.exists():
        return descriptor
    os.close(descriptor)
    return None


def _remove(folder: Path) -> None:
    """Removes a folder of this user whose process has ended."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
        finally:
            os.close(descriptor)
