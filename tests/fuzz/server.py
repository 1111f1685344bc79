"""The server of children: ``python -m tests.fuzz.server SUBJECT SECONDS`` answers each case on its standard input with a line; see `harness`.
``python -m tests.fuzz.server SUBJECT --once FOLDER`` runs one kept case in this process, with its traceback.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from tests.fuzz.harness import MARK, Broken, Case, Outcome, keep
from tilewright.errors import TilewrightError

MEMORY = 6 << 30
"""Bytes of address space that a case may use beyond the server's."""


def received(stream: BinaryIO) -> Case | None:
    """The next case; None at the end."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    sizes = json.loads(stream.read(struct.unpack("<Q", head)[0]))
    return {name: stream.read(size) for name, size in sizes.items()}


def judged(subject: ModuleType) -> Outcome:
    """The outcome of reading the files of the current folder."""
    try:
        subject.run()
    except TilewrightError as error:
        return Outcome("several lines" if "\n" in str(error) else "refused", str(error))
    except Broken as error:
        return Outcome("broken promise", str(error))
    except BaseException:
        return Outcome("raw exception", traceback.format_exc())
    return Outcome("accepted")


def in_child(subject: ModuleType, folder: Path, answer: int, words: int) -> None:
    """Runs a case in the child process; never returns."""
    try:
        os.setsid()
        for stream in (1, 2):
            os.dup2(words, stream)
        faulthandler.enable(2)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(folder)
        outcome = judged(subject)
        os.write(answer, json.dumps({"verdict": outcome.verdict, "detail": outcome.detail[-4000:]}).encode())
    finally:
        os._exit(0)


def outcome_of(subject: ModuleType, case: Case, seconds: float) -> Outcome:
    """Runs the case in a child process, and ends all processes that it leaves."""
    scratch = Path(tempfile.mkdtemp(prefix="tilewright-fuzz-"))
    try:
        folder = keep(case, scratch / "case")
        reading, writing = os.pipe()
        with open(scratch / "words", "w+b") as words:
            child = os.fork()
            if child == 0:
                in_child(subject, folder, writing, words.fileno())
            os.close(writing)
            handle = os.pidfd_open(child)
            ended = bool(select.select([handle], [], [], seconds)[0])
            os.close(handle)
            try:
                os.killpg(child, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
            _, status = os.waitpid(child, 0)
            with os.fdopen(reading, "rb") as answers:
                answer = answers.read() if ended else b""
            words.seek(0)
            said = words.read()[-4000:].decode(errors="replace")
        if any(path.name.startswith(MARK) for path in folder.rglob("*")):
            return Outcome("foreign code", said)
        if not ended:
            return Outcome("hang", said)
        if os.WIFSIGNALED(status):
            return Outcome("crash", f"{signal.Signals(os.WTERMSIG(status)).name}\n{said}")
        return Outcome(**json.loads(answer)) if answer else Outcome("crash", f"no answer\n{said}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main() -> None:
    subject = importlib.import_module(f"tests.fuzz.{sys.argv[1]}")
    if hasattr(subject, "prepare"):
        subject.prepare()
    gc.collect()
    gc.freeze()  # children need not pass over what they share with this process, which would copy its pages
    if sys.argv[2] == "--once":
        os.chdir(sys.argv[3])
        outcome = judged(subject)
        print(f"{outcome.verdict}: {outcome.detail}")
        return
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a subject's output must not reach the answers
    while (case := received(sys.stdin.buffer)) is not None:
        outcome = outcome_of(subject, case, float(sys.argv[2]))
        print(json.dumps({"verdict": outcome.verdict, "detail": outcome.detail}), file=answers, flush=True)


if __name__ == "__main__":
    main()
