"""Child processes that answer requests, one line of JSON each way; a child that does not answer in time is killed.

The child reads its standard input and answers on its standard output; `serve` is the child's side. A child exits when its input ends, or soon after
its parent has exited, even if it hangs.
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
"""Key of an answer after which the child exits, because the request has left its process unusable."""


def _scratch() -> IO[bytes]:
    """An unnamed temporary file, on disk if possible, otherwise in memory."""
    try:
        return tempfile.TemporaryFile()
    except OSError:
        return open(os.memfd_create("scratch"), "w+b")


class WorkerLost(Exception):
    """The child died, was killed for taking too long, or gave an invalid answer; the text says which."""


class Worker:
    """The parent's handle of one child; `command` is its command line after the Python interpreter."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors = _scratch()  # read after the child has exited
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=Path(__file__).parents[2],  # so that `-m` finds this package
            env=settings.child_environment(),
            start_new_session=True,  # interrupts go only to the parent, which ends its children itself
        )
        assert self._process.stdout is not None and self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._pending = b""
        self._lock = threading.Lock()

    def ask(self, message: Message, timeout: float) -> Message:
        """The answer to a message, within `timeout` seconds.

        Raises:
            WorkerLost: if there is none; the child has then been ended.
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
        """Writes to the child, even if it may not be reading."""
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
        """Ends the child and everything it has started; may be called repeatedly."""
        end_session(self._process)

    def close(self) -> None:
        """Ends the child and releases its pipes."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:  # data not yet sent to a child that has exited
                pass


class Fatal(Exception):
    """Raised by a child's `answer` if its process can answer no further requests."""


def serve(answer: Callable[[Message], Message]) -> None:
    """The child's side: answers each line of standard input until it ends. Other output of the process goes to standard error.

    An exception becomes the answer {"error": text}; after Fatal the process exits."""
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
    os._exit(0)  # an orderly exit can hang if a GPU's context is in an error state
