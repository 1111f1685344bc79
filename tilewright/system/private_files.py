"""Files and folders private to this user: made with mode 0700, and read only if no other user can have written them.

Below a root folder everything must belong to the effective user and be writable by nobody else, and nothing may be a link. The root itself may be
reached through links. The superuser counts as another user: a cache is written by the user who uses it.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path


class NotPrivate(OSError):
    """A file or folder that another user may have written; `place` is its path."""

    def __init__(self, place: Path, why: str) -> None:
        super().__init__(f"{place} {why}")
        self.place = place


def make_folder(folder: Path) -> None:
    """Makes a folder and its missing parents with mode 0700 whatever the umask; existing folders are not changed.

    Raises:
        OSError: if it cannot be made, or is not a folder.
    """
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for part in reversed(missing):
        try:
            os.mkdir(part, 0o700)
        except FileExistsError:  # another process was faster, or it is not a folder
            if not part.is_dir():
                raise
        else:
            os.chmod(part, 0o700)


def require_private(path: Path, root: Path) -> None:
    """Raises NotPrivate if the path, the root or anything between them may have been written by another user, OSError if it is missing."""
    _require(root, os.stat(root))
    place = root
    for part in path.relative_to(root).parts:
        place = place / part
        _require(place, os.lstat(place))


def _require(place: Path, found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise NotPrivate(place, "is a link")
    if found.st_uid != os.geteuid():
        raise NotPrivate(place, f"belongs to another user ({found.st_uid})")
    if found.st_mode & 0o022:
        raise NotPrivate(place, f"can be written by other users (mode {found.st_mode & 0o777:o})")


def read_private(path: Path, root: Path) -> bytes:
    """The contents of a regular file below the root.

    Raises:
        NotPrivate: if another user may have written it.
        OSError: if it is missing or not a regular file.
    """
    require_private(path.parent, root)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        _require(path, found)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is no regular file")
        return file.read()


def write_private(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all, into a folder that only this user can write and that is made if it is missing.

    Raises:
        NotPrivate: if another user may write to the folder.
        OSError: if the file cannot be written.
    """
    make_folder(path.parent)
    require_private(path.parent, path.parent)
    descriptor, partial = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
