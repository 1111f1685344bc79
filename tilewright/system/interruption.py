"""Signals that ask a program to end: it ends cleanly and soon, together with everything that it started."""

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
"""Seconds after which a process that was told to end is killed, whatever it is doing: a library may hold the main thread or swallow the exception."""
WATCH_SECONDS = 0.5
WORDS = "tilewright: interrupted"


class Interruption:
    """While it is installed, the first of `SIGNALS` raises KeyboardInterrupt in the main thread, and later ones are ignored, so that they do not
    disturb the clean-up after the first. `code` is the resulting exit code, or None before the first signal."""

    def __init__(self) -> None:
        self.code: int | None = None

    def install(self) -> None:
        """Installs the handlers; called once, in the main thread. Signals that this process inherited as ignored stay ignored."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # written to by signals even while no Python code runs
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
                signal.signal(number, self._last)

    def _last(self, number: int, frame: FrameType | None) -> None:
        if self.code is None:
            os.write(2, f"{WORDS}\n".encode())
        os._exit(self.code or 128 + number)


def leave_at_once(code: int) -> None:
    """Ends this process, whatever it is doing, and all processes that it started."""
    for child in descendants(os.getpid()):
        with suppress(OSError):
            os.kill(child, signal.SIGKILL)
    os._exit(code)


def leave_with_parent() -> None:
    """From now on this process ends soon after its parent, whatever it is doing: a candidate that hangs reads no input."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        leave_at_once(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def descendants(ancestor: int) -> list[int]:
    """The child processes of a process, and theirs, as far as no process in between has ended."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError):
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()[1])
    found = [ancestor]
    for parent in found:
        found += [process for process, started_by in parents.items() if started_by == parent]
    return found[1:]
