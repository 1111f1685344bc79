"""Signals that ask a program to end: it ends in order, soon, and with everything that it has started."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_SECONDS = 10.0
"""After so long a process that was told to end is ended, whatever it is doing: a library may hold the main thread, or swallow the exception."""
WATCH_SECONDS = 0.5
WORDS = "tilewright: interrupted"


class Interruption:
    """While it is installed, the first of `SIGNALS` raises KeyboardInterrupt in the main thread, and later ones are ignored, so that none
    disturbs what is cleaned up because of the first. `code` is the exit code that says so, None where none has come."""

    def __init__(self) -> None:
        self.code: int | None = None

    def install(self) -> None:
        """To be called once, in the main thread. A signal that this process was started to ignore stays ignored."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # is written to when a signal comes, also while no Python code runs
        threading.Thread(target=self._watch, args=(reader,), name="interruption", daemon=True).start()
        for number in SIGNALS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, self._first)

    def _first(self, number: int, frame: FrameType | None) -> None:
        if self.code is None:
            self.code = 128 + number
            raise KeyboardInterrupt

    def _watch(self, reader: int) -> None:
        number = next((number for number in iter(lambda: os.read(reader, 1)[0], None) if number in SIGNALS), signal.SIGINT)
        time.sleep(GRACE_SECONDS)
        with suppress(Exception):
            print(WORDS, file=sys.stderr, flush=True)
        leave_at_once(128 + number)

    def leave(self) -> None:
        """From now on a signal ends the process at once: there is nothing left to clean up."""
        for number in SIGNALS:
            if signal.getsignal(number) == self._first:
                signal.signal(number, lambda number, frame: os._exit(128 + number))


def leave_at_once(code: int) -> None:
    """Ends this process, whatever it is doing, and all that it has started."""
    for child in descendants(os.getpid()):
        with suppress(OSError):
            os.kill(child, signal.SIGKILL)
    os._exit(code)


def leave_with_parent() -> None:
    """From now on this process ends soon after the one that started it, whatever it is doing then: a candidate that hangs reads no input."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        leave_at_once(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def descendants(ancestor: int) -> list[int]:
    """The processes that a process has started, and theirs, as far as none between has ended."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError):
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()[1])
    found = [ancestor]
    for parent in found:
        found += [process for process, started_by in parents.items() if started_by == parent]
    return found[1:]
