"""Mutated files against the readers of this package: every case runs in a child process, and whatever happens there has a name.

A *subject* is a module of this folder, one kind of file. It has

    cases() -> SearchStrategy[Case]     hypothesis strategy of mutated files, made from valid ones
    run() -> None                       reads the case's files, which lie in the current folder, as a user would

and may have ``prepare()``, which the server of children calls once before the first case (imports, caches). `run` raises `TilewrightError` for
what it refuses, `Broken` where it finds that a promise of its own was not kept, and anything else by mistake.

What a payload of foreign code has to do to be found out: create a file of any name that starts with `MARK` in the current folder.
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
"""Kinds of files: the modules of this folder whose names end so."""
MARK = "FOREIGN-CODE-RAN"
SECONDS = 60.0
"""A case that takes longer hangs: a hundred times what one takes."""
GOOD = ("accepted", "refused")
FAULTS = ("raw exception", "several lines", "broken promise", "foreign code", "crash", "hang")

Case: TypeAlias = Mapping[str, bytes]
"""Relative names of files, and what is in them."""


class Broken(AssertionError):
    """A promise that was not kept: something lost, a wrong result, a file half written."""


@dataclass(frozen=True)
class Outcome:
    """What became of a case: one of `GOOD` or `FAULTS`, and the words of whatever was raised."""

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
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TILEWRIGHT_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *sys.path])}
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
        """Raises RuntimeError where the server itself is gone."""
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
    """Writes a case's files below a folder of its own, to be run again by ``python -m tests.fuzz.server SUBJECT --once FOLDER``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in case.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder
