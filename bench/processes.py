"""Processes that are ended at a chosen moment, and what they leave behind. They are forked from a process that has imported everything, so that the
moment falls within the work. A process works in a folder: `home/cache` is its kernel cache, `home/tmp` its temporary folder, and its output is in
`words-PID`.
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
"""Exit codes: the work was done; an error of ours; done, but with a warning about damage. 1: a wrong result or any other exception."""
HUNG = -999
PATIENCE = 300.0
"""Seconds after which a process counts as hanging, or an orphan as left behind."""
MARK = "TILEWRIGHT_WORKS_IN"
"""Environment variable that identifies the processes that a process started; nothing else reads it."""
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["bench.processes_server"])


class _Damage(logging.Handler):
    """Records whether any message mentions a damaged entry."""

    seen = False

    def emit(self, record: logging.LogRecord) -> None:
        self.seen |= "building it again" in record.getMessage()


def _child(folder: Path, work: Callable[..., int | None], arguments: tuple[Any, ...]) -> None:
    """Does the work; the exit code is its outcome."""
    home = folder / "home"
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    with open(folder / f"words-{os.getpid()}", "w") as words, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(words.fileno(), 2)
    os.environ[MARK] = str(folder)
    os.environ.update(TILEWRIGHT_CACHE=str(home / "cache"), TMPDIR=str(home / "tmp"), OMP_NUM_THREADS="1", TILEWRIGHT_THREADS="1")
    tempfile.tempdir = str(home / "tmp")
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores SIGINT in background processes
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
    """Work: a `tilewright` command, run as by its program."""
    from tilewright.__main__ import run

    sys.argv = ["tilewright", *arguments]
    return run()


def handles(process: Any, number: signal.Signals) -> bool:
    """Whether the process has installed a handler for the signal."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return False
    return any(line.startswith("SigCgt:") and bool(int(line.split()[1], 16) >> (number - 1) & 1) for line in lines)


def cache_of(folder: Path) -> KernelCache:
    return KernelCache(folder / "home" / "cache" / "kernels")


def damages(folder: Path) -> list[str]:
    """Problems of the cache, except for folders that killed processes left."""
    return [line for line in cache_of(folder).check() if "left by a process that was killed" not in line]


def processes_left(folder: Path) -> list[str]:
    """A line for each process started in the folder that still exists after a while."""
    end = time.monotonic() + PATIENCE
    while (found := processes_of(folder)) and time.monotonic() < end:
        time.sleep(0.05)
    return [f"process {number} is still there" for number in found]


def processes_of(folder: Path) -> list[int]:
    """Processes started by those in the folder, found by the mark in their environment."""
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
    """The last output of a process."""
    path = folder / f"words-{process.pid}"
    return path.read_text()[-2000:] if path.exists() else ""
