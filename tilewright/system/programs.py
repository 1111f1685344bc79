"""Runs other programs in a process group of their own, without input, for a limited time, and ends them with all that they started.

The group leader is a shell whose input is a pipe from this process; when the pipe closes, it kills the group. A program therefore does not outlive
the process that runs it, even if that process is killed. (PR_SET_PDEATHSIG would end only the compiler's driver, and as soon as the thread that
started it ends.)
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

OUTPUT_BYTES = 1 << 20
"""Bytes of each stream that are kept; further output is read and dropped."""
GUARD = ("/bin/sh", "-c", "read line; kill -KILL 0")
TICK_SECONDS = 0.05
"""Polling interval for the end of a program whose output another process still holds open."""


class ProgramHung(Exception):
    """The program did not end in time and was killed."""


class ProgramStopped(Exception):
    """The program was ended, or not started, because `Programs.stop` was called."""


@dataclass(frozen=True)
class Finished:
    """The result of a program. `cut`: it wrote more than was kept."""

    status: int
    output: str
    errors: str
    cut: bool


class Programs:
    """Programs run for one purpose, possibly on several threads, that can be stopped together."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._stopped = False
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Ends all of them and starts no more."""
        with self._lock:
            self._stopped = True
            for group in self._groups:
                _end_group(group)

    def run(
        self,
        command: Sequence[str],
        seconds: float,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        output_bytes: int = OUTPUT_BYTES,
    ) -> Finished:
        """Runs a program to its end, in the given folder and environment.

        Raises:
            ProgramHung: if it did not end within `seconds`.
            ProgramStopped: if `stop` was called.
            OSError: if it cannot be started.
        """
        with self._group() as group:
            with self._lock:
                if self._stopped:
                    raise ProgramStopped(f"{command[0]} was not started any more")
                process = subprocess.Popen(
                    command, cwd=folder, env=environment, process_group=group,
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )  # fmt: skip
            with process:
                try:
                    kept = _read(process, time.monotonic() + seconds, output_bytes)
                finally:
                    _end_group(group)
                if kept is None:
                    raise ProgramHung(f"{command[0]} did not end within {seconds:g} s")
        if self._stopped and process.returncode < 0:
            raise ProgramStopped(f"{command[0]} was stopped")
        output, errors = (bytes(part[:output_bytes]).decode(errors="replace") for part in kept)
        return Finished(process.returncode, output, errors, any(len(part) > output_bytes for part in kept))

    @contextmanager
    def _group(self) -> Iterator[int]:
        """The number of a process group, led by its guard; every process of the group is ended on exit."""
        guard = subprocess.Popen(GUARD, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0)
        with guard:
            with self._lock:
                self._groups.add(guard.pid)
            try:
                yield guard.pid
            finally:
                with self._lock:  # once the guard is reaped its number may be reused
                    self._groups.discard(guard.pid)
                    _end_group(guard.pid)


def run_program(
    command: Sequence[str], seconds: float, folder: Path | None = None, output_bytes: int = OUTPUT_BYTES, environment: Mapping[str, str] | None = None
) -> Finished:
    """Runs a single program; see `Programs.run`."""
    return Programs().run(command, seconds, folder, environment, output_bytes)


def _read(process: subprocess.Popen[bytes], deadline: float, limit: int) -> tuple[bytearray, bytearray] | None:
    """The output of the process until it ends, at most one byte more than the limit per stream; None if it does not end in time."""
    assert process.stdout is not None and process.stderr is not None
    kept = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    pause = 0.0005
    with selectors.DefaultSelector() as open_ones:
        for pipe in kept:
            os.set_blocking(pipe, False)
            open_ones.register(pipe, selectors.EVENT_READ)
        while True:
            ended = _has_ended(process)  # asked before reading, so that all output is available if it has
            left = deadline - time.monotonic()
            if open_ones.get_map():
                ready = open_ones.select(0 if ended else max(min(left, TICK_SECONDS), 0))
            else:  # it has closed its output and will end soon
                ready = []
                if not ended:
                    time.sleep(max(min(left, pause), 0))
                    pause = min(2 * pause, TICK_SECONDS)
            for key, _ in ready:
                part = os.read(key.fd, 1 << 16)
                if not part:
                    open_ones.unregister(key.fd)
                kept[key.fd] += part[: limit + 1 - len(kept[key.fd])]
            if ended and not ready:
                output, errors = kept.values()
                return output, errors
            if left <= 0:
                return None


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process has ended. It is not reaped, so that its number is not reused."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # this process ignores SIGCHLD
        return True


def _end_group(number: int) -> None:
    """Ends every process of a group whose leader is not reaped."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(number, signal.SIGKILL)


def end_session(leader: subprocess.Popen[bytes]) -> None:
    """Ends a process that was started in a session of its own, and every process of that session, whatever its group."""
    if leader.returncode is not None:
        return
    leader.kill()
    for _ in range(100):  # processes started while the list is read are in the next one
        members = [pid for pid in _session(leader.pid) if pid != leader.pid]
        for pid in members:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not members:
            break
    leader.wait()


def _session(number: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError):
                state, _, _, session = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()[:4]
                if int(session) == number and state not in (b"Z", b"X"):
                    found.append(int(entry))
    return found
