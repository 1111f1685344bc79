"""Mutated files against the readers of this package: every case runs in a child process, and every outcome has a name.

A *subject* is a module of this folder, one kind of file. It has

    cases() -> SearchStrategy[Case]     hypothesis strategy of mutated files, made from valid ones
    run() -> None                       reads the case's files in the current folder, as a user would

and may have ``prepare()``, which the server of children calls once before the first case (imports, caches). `run` raises `TilewrightError` for files
that it refuses and `Broken` if it finds a broken promise; anything else is a fault.

A payload of foreign code reveals itself by creating a file whose name starts with `MARK` in the current folder.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

HERE = Path(__file__).parent
SUBJECTS = tuple(sorted(path.stem for path in HERE.glob("*_files.py")))
"""Kinds of files: the modules of this folder whose names end in `_files`."""
MARK = "FOREIGN-CODE-RAN"
SECONDS = 60.0
"""A case that takes longer counts as hanging; normal cases take a hundredth of this."""
GOOD = ("accepted", "refused")
FAULTS = ("raw exception", "several lines", "broken promise", "foreign code", "crash", "hang")

Case: TypeAlias = Mapping[str, bytes]
"""Relative names and contents of files."""


class Broken(AssertionError):
    """A broken promise: lost data, a wrong result, a partially written file."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case: one of `GOOD` or `FAULTS`, and the message of any exception."""

    verdict: str
    detail: str = ""

    @property
    def fault(self) -> bool:
        return self.verdict in FAULTS


class Server:
    """The process that forks a child for each case; a context manager.

    Children are forked from a process that has imported everything and has no threads: a case costs milliseconds, and cannot harm the next one.
    """

    def __init__(self, subject: str, seconds: float = SECONDS) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TILEWRIGHT_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *sys.path]),
        }
        command = [sys.executable, "-m", "tests.fuzz.server", subject, str(seconds)]
        self._words = tempfile.TemporaryFile()
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words, env=environment)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        self._process.wait(timeout=SECONDS)
        self._process.stdout.close()
        self._words.close()

    def run(self, case: Case) -> Outcome:
        """Runs a case. Raises RuntimeError if the server itself has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        header = json.dumps({name: len(data) for name, data in case.items()}).encode()
        try:
            self._process.stdin.write(b"".join((struct.pack("<Q", len(header)), header, *case.values())))
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            self._words.seek(0)
            raise RuntimeError(f"the server of cases is gone:\n{self._words.read().decode(errors='replace')}")
        return Outcome(**json.loads(line))


def keep(case: Case, folder: Path) -> Path:
    """Writes a case's files to a folder of its own, to be run again by ``python -m tests.fuzz.server SUBJECT --once FOLDER``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in case.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder
