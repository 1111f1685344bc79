"""A child process that answers questions, one line of JSON each way; it is killed when it does not answer in time.

The child reads its standard input and answers on its standard output; `serve` is its side. It leaves when its input ends, or soon after its parent
has: none outlives it, not even one that hangs.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from tilewright import settings
from tilewright.system.interruption import leave_with_parent
from tilewright.system.programs import end_session

Message = dict[str, Any]
FATAL = "fatal"
"""Key of an answer after which the child ends: what it was asked has left its process unusable."""


def _scratch() -> IO[bytes]:
    """A file without a name: on the disk, else in memory."""
    try:
        return tempfile.TemporaryFile()
    except OSError:
        return open(os.memfd_create("scratch"), "w+b")


class WorkerLost(Exception):
    """The child died, was killed because it took too long, or answered nonsense; the text says which."""


class Worker:
    """The parent's handle of one child; `command` is what follows the Python interpreter."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors = _scratch()  # read when the child is gone
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=Path(__file__).parents[2],  # where `-m` finds this package
            env=settings.child_environment(),
            start_new_session=True,  # an interrupt is for the parent, which ends its children itself
        )
        assert self._process.stdout is not None and self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._pending = b""
        self._lock = threading.Lock()

    def ask(self, message: Message, timeout: float) -> Message:
        """The answer to a message, within `timeout` seconds.

        Raises:
            WorkerLost: if there is none; the child is gone then.
        """
        with self._lock:
            try:
                deadline = time.monotonic() + timeout
                self._send(json.dumps(message).encode() + b"\n", deadline, timeout)
                line = self._line(deadline, timeout)
                answer = json.loads(line)
                if not isinstance(answer, dict):
                    raise ValueError
            except (OSError, ValueError) as error:
                self.kill()
                said = self._last_words()
                raise WorkerLost(f"the process ended (status {self._process.poll()}){said and ': ' + said}") from error
            if FATAL in answer:
                self.kill()
            return answer

    def _send(self, data: bytes, deadline: float, timeout: float) -> None:
        """Writes to the child, which may not be reading."""
        assert self._process.stdin is not None
        descriptor, left = self._process.stdin.fileno(), memoryview(data)
        waiting = select.poll()
        waiting.register(descriptor, select.POLLOUT)
        while left:
            if not waiting.poll(1e3 * max(deadline - time.monotonic(), 0)):
                self.kill()
                raise WorkerLost(f"no answer within {timeout:g} s")
            left = left[os.write(descriptor, left) :]

    def _line(self, deadline: float, timeout: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        while b"\n" not in self._pending:
            if not waiting.poll(1e3 * max(deadline - time.monotonic(), 0)):
                self.kill()
                raise WorkerLost(f"no answer within {timeout:g} s")
            part = os.read(descriptor, 1 << 16)
            if not part:
                raise OSError("closed")
            self._pending += part
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read()[-2000:].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End the child and what it has started; twice is harmless."""
        end_session(self._process)

    def close(self) -> None:
        """End the child and release its pipes."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:  # what was not yet sent to a child that is gone
                pass


class Fatal(Exception):
    """Raised by a child's `answer` where its process can answer no further question."""


def serve(answer: Callable[[Message], Message]) -> None:
    """The child's side: answers each line of the standard input until it ends. What the process prints otherwise goes to standard error.

    An exception becomes the answer {"error": text}; after Fatal the process ends."""
    leave_with_parent()
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        result: Message
        try:
            result = answer(json.loads(line))
        except Fatal as error:
            result = {"error": str(error), FATAL: True}
        except Exception as error:
            traceback.print_exc()
            first = (str(error).strip() or "no message").splitlines()[0]
            result = {"error": f"{type(error).__name__}: {first}"[:500]}
        output.write(json.dumps(result) + "\n")
        output.flush()
        if FATAL in result:
            break
    output.flush()
    os._exit(0)  # a GPU's context in an error state can make an orderly end hang
