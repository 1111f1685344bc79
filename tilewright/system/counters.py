"""Counters of the processor and the kernel for this process: Linux's perf events.

Source: the manual page perf_event_open(2) and linux/perf_event.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType

_NUMBERS = {"x86_64": 298, "aarch64": 241}  # of the system call perf_event_open
_ATTRIBUTES = 64  # bytes of the first version of struct perf_event_attr, which every kernel takes
_INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6
_TIMES = 1 | 2  # a reading has the count, and how long the counter was wanted and running
_HARDWARE, _SOFTWARE, _CACHE = 0, 1, 3
_HIDDEN, _DENIED = "virtual machines mostly hide these counters", "sysctl kernel.perf_event_paranoid=2 allows them"
_HINTS = {
    **dict.fromkeys((errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP), _HIDDEN),
    errno.EACCES: _DENIED,
    errno.EPERM: f"{_DENIED}, or the container's policy",
}
_MISSED_READ = 1 << 16

EVENTS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "instructions": (_HARDWARE, 1),
        "cycles": (_HARDWARE, 0),
        "L1 misses": (_CACHE, _MISSED_READ | 0),
        "last-level misses": (_CACHE, _MISSED_READ | 2),
        "branch misses": (_HARDWARE, 5),
        "page faults": (_SOFTWARE, 2),
    }
)
"""Type and number of each event. Those of hardware are counted in user mode only; a virtual machine mostly has none."""


def is_hardware(event: str) -> bool:
    """Whether the processor counts it, and not the kernel of the system."""
    return EVENTS[event][0] != _SOFTWARE


@dataclass(frozen=True)
class _Counter:
    event: str
    file: int

    def read(self) -> float:
        """The count so far; if the processor has fewer counters than are wanted, it is extrapolated from the time in which this one ran."""
        count, wanted, running = struct.unpack("QQQ", os.read(self.file, 24))
        return float(count) if running == wanted else count * wanted / running if running else 0.0


class Counters:
    """Counts the events that this machine has, over all threads of the process and those that they start; a context manager.

    `missing` says why events are not counted, by event."""

    def __init__(self) -> None:
        self._counters: list[_Counter] = []
        self.missing: dict[str, str] = {}
        threads = _threads()
        for event in EVENTS:
            opened: list[_Counter] = []
            try:
                for thread in threads:
                    file = _open(event, thread)
                    if file is not None:
                        opened.append(_Counter(event, file))
            except OSError as error:
                self.missing[event] = f"{error.strerror}; {_HINTS[error.errno]}" if error.errno in _HINTS else str(error.strerror)
                _close(opened)
                continue
            self._counters += opened

    @property
    def events(self) -> tuple[str, ...]:
        return tuple(event for event in EVENTS if event not in self.missing)

    def read(self) -> dict[str, float]:
        """How often each event has occurred since the counters were opened."""
        found = dict.fromkeys(self.events, 0.0)
        for counter in self._counters:
            found[counter.event] += counter.read()
        return found

    def __enter__(self) -> Counters:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _close(self._counters)
        self._counters = []


def _threads() -> list[int]:
    try:
        return [int(entry.name) for entry in Path("/proc/self/task").iterdir()]
    except OSError:  # no Linux
        return [0]


def _open(event: str, thread: int) -> int | None:
    """The file of a counter of one thread; None if the thread has ended. Raises OSError if there is no such counter, or it is not allowed."""
    if not sys.platform.startswith("linux") or platform.machine() not in _NUMBERS:
        raise OSError(0, f"{sys.platform} on {platform.machine()} has no perf events")
    kind, number = EVENTS[event]
    flags = _INHERIT | _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR
    attributes = ctypes.create_string_buffer(struct.pack("IIQQQQQ", kind, _ATTRIBUTES, number, 0, 0, _TIMES, flags), _ATTRIBUTES)
    library = ctypes.CDLL(None, use_errno=True)
    file: int = library.syscall(_NUMBERS[platform.machine()], attributes, thread, -1, -1, 8)  # 8: not in programs that this one starts
    if file >= 0:
        return file
    code = ctypes.get_errno()
    if code == errno.ESRCH:
        return None
    raise OSError(code, os.strerror(code))


def _close(counters: list[_Counter]) -> None:
    for counter in counters:
        os.close(counter.file)
