"""Processes that are ended at a chosen moment, and what they leave: forked from one that has imported everything, so that a moment is one of work.

A process works in a folder: `home/cache` is its kernel cache, `home/tmp` its temporary folder, and what it says is in `words-PID`.
"""

from __future__ import annotations

import glob
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tilewright.errors import TilewrightError
from tilewright.toolchain import KernelCache

RIGHT, REFUSED, WARNED = 0, 2, 3
"""Exit codes: the work was done; an error of ours; done, but a warning named damage. 1: wrong, or something else was raised."""
HUNG = -999
PATIENCE = 300.0
"""Seconds after which a process hangs, or an orphan stays."""
MARK = "TILEWRIGHT_WORKS_IN"
"""Environment variable by which what a process has started is found; nothing else reads it."""
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["bench.processes_server"])


class _Damage(logging.Handler):
    """Remembers whether anything was said of a damaged entry."""

    seen = False

    def emit(self, record: logging.LogRecord) -> None:
        self.seen |= "building it again" in record.getMessage()


def _child(folder: Path, work: Callable[..., int | None], arguments: tuple[Any, ...]) -> None:
    """Does the work; what became of it is the exit code."""
    home = folder / "home"
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    with open(folder / f"words-{os.getpid()}", "w") as words, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(words.fileno(), 2)
    os.environ[MARK] = str(folder)
    os.environ.update(TILEWRIGHT_CACHE=str(home / "cache"), TMPDIR=str(home / "tmp"), OMP_NUM_THREADS="1", TILEWRIGHT_THREADS="1")
    tempfile.tempdir = str(home / "tmp")
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background without it
    damage = _Damage()
    logging.getLogger("tilewright").addHandler(damage)
    try:
        code = work(*arguments) or (WARNED if damage.seen else RIGHT)
    except TilewrightError as error:
        print(type(error).__name__, error, file=sys.stderr)
        code = REFUSED
    sys.exit(code)  # any other exception is 1


def start(folder: Path, work: Callable[..., int | None], *arguments: Any) -> Any:
    """A process that does the work."""
    process = context.Process(target=_child, args=(folder, work, arguments), daemon=False)
    process.start()
    return process


def ended(process: Any) -> int:
    """The exit code; a process that hangs is killed."""
    process.join(PATIENCE)
    if process.is_alive():
        process.kill()
        process.join()
        return HUNG
    code: int = process.exitcode
    return code


def command_line(folder: Path, *arguments: str) -> int:
    """Work: a command of `tilewright`, as its program runs it. When it begins there is a file `begun` in the folder."""
    from tilewright.__main__ import run

    sys.argv = ["tilewright", *arguments]
    (folder / "begun").touch()
    return run()


def cache_of(folder: Path) -> KernelCache:
    return KernelCache(folder / "home" / "cache" / "kernels")


def damages(folder: Path) -> list[str]:
    """What is wrong with the cache but for folders that killed processes left."""
    return [line for line in cache_of(folder).check() if "left by a process that was killed" not in line]


def processes_left(folder: Path) -> list[str]:
    """A line for each process started in the folder that is still there after a while."""
    end = time.monotonic() + PATIENCE
    while (found := processes_of(folder)) and time.monotonic() < end:
        time.sleep(0.05)
    return [f"process {number} is still there" for number in found]


def processes_of(folder: Path) -> list[int]:
    """What the processes in the folder have started, by the mark in its environment."""
    found = []
    for entry in glob.glob("/proc/[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={folder}\0".encode() in Path(entry, "environ").read_bytes():
                found.append(int(entry.rpartition("/")[2]))
    return found


def files_left(folder: Path) -> list[str]:
    """A line for each temporary file or folder."""
    return [f"{path.name} is left in the temporary folder" for path in (folder / "home" / "tmp").iterdir()]


def words_of(folder: Path, process: Any) -> str:
    """The last that a process said."""
    path = folder / f"words-{process.pid}"
    return path.read_text()[-2000:] if path.exists() else ""
