"""Maps shared objects from bytes, each content once per process. Nothing is mapped from a named file. The dynamic loader identifies libraries by name
and inode, so that loading a file rebuilt under the name of a mapped one would return the old library; and overwriting or truncating a mapped file
changes the code of a running process, or ends it (SIGBUS). Here the mapped bytes are those that were checked: they are in a sealed anonymous file,
independent of the cache and the artifact. `/proc/PID/maps`, and with it a profiler, shows the file as `/memfd:NAME`.
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
"""Numbers for unique library names in this process's dynamic loader."""


class Libraries:
    """The libraries that this process has mapped, by content. They stay mapped, since OpenMP worker threads may still run their code."""

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
            # File descriptors are reused and the loader compares names, so each name is new: it spells a number in binary, with "//" or "/./" as
            # digits.
            digits = "".join("/./" if digit == "1" else "//" for digit in f"{next(_NUMBERS):b}")
            library = ctypes.CDLL(f"/proc/self/fd{digits}{descriptor}")
        finally:
            os.close(descriptor)
        if any(library._handle == other._handle for other in self._known.values()):  # anonymous inode numbers have 32 bits and repeat
            raise OSError("the dynamic loader took it for another library")
        return library


def _anonymous_file(content: bytes, name: str) -> int:
    """Descriptor of an unnamed file that holds the bytes: in memory and sealed or, if Linux denies that (vm.memfd_noexec), on disk."""
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
    """The libraries of this process."""
    return Libraries()


def mapped(content: bytes, name: str) -> ctypes.CDLL:
    """The shared object of that content, mapped now unless it is already; `name` is what profilers show.

    Raises:
        OSError: if the loader refuses it. The loader does not check everything that it reads: check untrusted content before.
    """
    return _libraries().of(content, name)
