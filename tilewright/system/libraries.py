"""Maps shared objects from bytes, each content once in a process.

Nothing is mapped from a file that has a name. The dynamic loader knows libraries by name and by inode, so that a file which was rebuilt under the
name of one that is mapped would give that one again; and a mapped file that is overwritten or cut changes the code of a running process, or ends it
(SIGBUS). Here the bytes that were checked are those that are mapped: they lie in an anonymous file that is sealed, and stay there whatever becomes
of the cache or the artifact. `/proc/PID/maps`, and with it a profiler, shows the file as `/memfd:NAME`.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import itertools
import os
import re
import tempfile
import threading
from functools import lru_cache

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


_NUMBERS = itertools.count(1)
"""Of the names of this process, which are the dynamic loader's."""


class Libraries:
    """What this process has mapped, by content; it stays mapped, since worker threads of OpenMP may still be inside."""

    def __init__(self) -> None:
        self._known: dict[bytes, ctypes.CDLL] = {}
        self._lock = threading.Lock()

    def of(self, content: bytes, name: str) -> ctypes.CDLL:
        """The shared object of that content; see `mapped`."""
        digest = hashlib.sha256(content).digest()
        with self._lock:
            if digest not in self._known:
                self._known[digest] = self._map(content, name)
            return self._known[digest]

    def _map(self, content: bytes, name: str) -> ctypes.CDLL:
        descriptor = _anonymous_file(content, name)
        try:
            # File descriptors are used again and the loader goes by names, so each name is new: it spells a number in binary, "//" or "/./" a digit.
            digits = "".join("/./" if digit == "1" else "//" for digit in f"{next(_NUMBERS):b}")
            library = ctypes.CDLL(f"/proc/self/fd{digits}{descriptor}")
        finally:
            os.close(descriptor)
        if any(library._handle == other._handle for other in self._known.values()):  # numbers of anonymous inodes have 32 bits, and repeat
            raise OSError("the dynamic loader took it for another library")
        return library


def _anonymous_file(content: bytes, name: str) -> int:
    """Descriptor of a file without a name that holds the bytes: in memory, sealed, or where Linux denies that (vm.memfd_noexec) on the disk."""
    try:
        descriptor = os.memfd_create(re.sub(r"[^\w.-]", "_", name[:200], flags=re.ASCII), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        with tempfile.TemporaryFile() as file:
            file.write(content)
            file.flush()
            return os.dup(file.fileno())
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@lru_cache(maxsize=1)
def _libraries() -> Libraries:
    """Those of this process."""
    return Libraries()


def mapped(content: bytes, name: str) -> ctypes.CDLL:
    """The shared object of that content, mapped now unless it is already; `name` is what profilers show.

    Raises:
        OSError: where the loader refuses it. It does not check all that it reads: check what may be damaged before.
    """
    return _libraries().of(content, name)
