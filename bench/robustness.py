"""What is left when processes are killed, disks are full and many compile at once: `python -m bench.robustness --kills 200`.

| program | does | must hold |
|---|---|---|
| kills | kills a process (SIGKILL) at a random moment of compiling a model that the cache does not have | `cache check` finds nothing but folders "left by a process that was killed", `prune` removes them, and the next compilation of that model is right and meets no damaged entry |
| tuning_kills | the same with trials, whose records and processes are looked at too | the records are sound, no process is left |
| interrupts | the same with SIGINT | the process ends with a KeyboardInterrupt, leaves no process and no folder in the making |
| crowd | processes compile the same and different models in one fresh cache at once | every result is right, the cache sound |
| full | a model is compiled on file systems of several sizes, or with a limit on the size of files | the result is right (with a warning), or an error of ours; when there is room again, the cache is sound and the next result right |
| repeats | one process compiles many times | descriptors, threads, children, temporary folders, mappings and memory do not grow |

Processes are forked from one that has imported everything, so that a moment is a moment of compiling. Each program gives the counts of what was seen;
`faults` lists what must not be. The counts go to bench/results/robustness.json.
"""  # noqa: E501 - a table

from __future__ import annotations

import argparse
import glob
import logging
import multiprocessing
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tilewright
import tilewright.runtime.executable
from bench.common import write_results
from tilewright.errors import TilewrightError
from tilewright.runtime.records import Records
from tilewright.toolchain import KernelCache

RIGHT, REFUSED, WARNED, INTERRUPTED = 0, 2, 3, 130
"""Exit codes: the result is right; an error of ours; right, but a warning named damage; an interruption. 1: wrong, or something else was raised."""
PATIENCE = 300.0
"""Seconds after which a process hangs."""
ROOM = 1 << 26
BATCH = 10
"""Models of killed processes that one process compiles to the end."""
Report = dict[str, Any]
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["bench.robustness_server"])


def network(number: int) -> tuple[nn.Module, torch.Tensor]:
    """A small model of two kernels; each number has others."""
    torch.manual_seed(number)
    width = 8 + number
    layers = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 10))
    return layers.eval(), torch.randn(3, 6)


# What runs in the processes


class _Damage(logging.Handler):
    """Remembers whether anything was said of a damaged entry."""

    seen = False

    def emit(self, record: logging.LogRecord) -> None:
        self.seen |= "building it again" in record.getMessage()


def _child(folder: Path, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Runs the work with cache and temporary files in the folder's `home`; its words go to a file, and what became of it is the exit code."""
    words = open(folder / f"words-{os.getpid()}", "w")  # noqa: SIM115 - until the process ends
    os.dup2(words.fileno(), 1)
    os.dup2(words.fileno(), 2)
    home = folder / "home"
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    os.environ.update(TILEWRIGHT_CACHE=str(home / "cache"), TMPDIR=str(home / "tmp"), OMP_NUM_THREADS="1", TILEWRIGHT_THREADS="1")
    tempfile.tempdir = None
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background without it
    damage = _Damage()
    logging.getLogger("tilewright").addHandler(damage)
    try:
        work(*arguments)
        code = WARNED if damage.seen else RIGHT
    except KeyboardInterrupt:
        code = INTERRUPTED
    except TilewrightError as error:
        print(type(error).__name__, error)
        code = REFUSED
    sys.exit(code)  # any other exception is 1


def compiles(*numbers: int, trials: int = 0) -> None:
    """Compiles models and compares them with PyTorch."""
    for number in numbers:
        module, x = network(number)
        records = Path(os.environ["TILEWRIGHT_CACHE"]) / "records.sqlite" if trials else None
        with tilewright.compile(module, x, trials=trials, records=records) as executable, torch.no_grad():
            torch.testing.assert_close(executable(x), module(x), rtol=1e-4, atol=1e-5)


def _tunes(number: int) -> None:
    compiles(number, trials=2)


def _in_a_crowd(barrier: Any, numbers: Sequence[int]) -> None:
    barrier.wait(PATIENCE)
    compiles(*numbers)


def _with_small_files(number: int, limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        compiles(number)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def start(folder: Path, work: Callable[..., None], *arguments: Any) -> Any:
    """A process that does the work."""
    process = context.Process(target=_child, args=(folder, work, arguments), daemon=False)
    process.start()
    return process


def ended(process: Any) -> int:
    """The exit code; a process that hangs is killed, with the code -999."""
    process.join(PATIENCE)
    if process.is_alive():
        process.kill()
        process.join()
        return -999
    code: int = process.exitcode
    return code


# What is looked at afterwards


def cache_of(folder: Path) -> KernelCache:
    return KernelCache(folder / "home" / "cache" / "kernels")


def damages(folder: Path) -> list[str]:
    """What is wrong with the cache but for folders that killed processes left."""
    return [line for line in cache_of(folder).check() if "left by a process that was killed" not in line]


def processes_of(folder: Path) -> list[int]:
    """Those that work for the folder: its name is in their environment."""
    found = []
    for entry in glob.glob("/proc/[0-9]*"):
        with suppress(OSError):
            if f"TILEWRIGHT_CACHE={folder}/home/".encode() in Path(entry, "environ").read_bytes():
                found.append(int(entry.rpartition("/")[2]))
    return found


def words_of(folder: Path) -> str:
    """The last that a process said."""
    files = sorted(folder.glob("words-*"), key=lambda path: path.stat().st_mtime)
    return files[-1].read_text()[-2000:] if files else ""


def _vanish(folder: Path) -> list[int]:
    """The processes that are still there after a while."""
    deadline = time.monotonic() + PATIENCE
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _whole_seconds(folder: Path, work: Callable[..., None], number: int) -> float:
    """Of a process that is not disturbed, with a cold cache; the first waits for the server that forks."""
    for each in (number, -1):
        begin = time.monotonic()
        code = ended(start(folder, work, each))
        if code != RIGHT:
            raise RuntimeError(f"an undisturbed process ends with status {code}: {words_of(folder)}")
    return time.monotonic() - begin


def _finish(folder: Path, faults: list[str]) -> Report:
    """Prunes; what `check` finds before and after."""
    cache = cache_of(folder)
    left = len(cache.check())
    cache.prune()
    after = cache.check()
    faults += [f"after pruning: {line}" for line in after]
    litter = Counter(path.name.rpartition("-")[0] or path.name for path in (folder / "home" / "tmp").iterdir())
    return {"abandoned_folders": left, "entries": len(cache.entries()), "temporary_files_left": dict(litter)}


# The programs


def kills(folder: Path, count: int, seed: int = 0, tuning: bool = False) -> Report:
    """Kills at random moments of compiling, or of tuning."""
    chance, faults, seen = random.Random(seed), [], Counter[str]()
    work = _tunes if tuning else compiles
    seconds = _whole_seconds(folder, work, 0)
    for number in range(1, count + 1):
        process = start(folder, work, number)
        time.sleep(chance.uniform(0, 1.1 * seconds))
        process.kill()
        code = ended(process)
        seen["killed" if code == -signal.SIGKILL else "had ended" if code == RIGHT else f"status {code}"] += 1
        faults += [f"{number}: status {code}: {words_of(folder)}"] if code not in (-signal.SIGKILL, RIGHT) else []
        seen["left a folder in the making"] += bool(list(cache_of(folder).root.glob("building-*")))
        faults += [f"{number}: {line}" for line in damages(folder)]
        if tuning:
            faults += [f"{number}: process {left} is still there" for left in _vanish(folder)]
            faults += [f"{number}: {line}" for line in _records_damage(folder / "home" / "cache" / "records.sqlite")]
        elif number % BATCH == 0 or number == count:
            code = ended(start(folder, work, *range(number - (number - 1) % BATCH, number + 1)))
            faults += [f"up to {number} again: status {code}: {words_of(folder)}"] if code != RIGHT else []
        cache_of(folder).prune()
    if tuning:
        code = ended(start(folder, work, 0))
        faults += [f"at the end: status {code}: {words_of(folder)}"] if code != RIGHT else []
    return {"seconds_undisturbed": round(seconds, 2), **seen, **_finish(folder, faults), "faults": faults}


def _records_damage(path: Path) -> list[str]:
    if not path.exists():
        return []
    with sqlite3.connect(path) as connection:
        (words,) = connection.execute("PRAGMA integrity_check").fetchone()
    try:
        with Records(path) as records:
            list(records.all())
    except TilewrightError as error:
        return [str(error)]
    return [] if words == "ok" else [words]


def interrupts(folder: Path, count: int, seed: int = 0) -> Report:
    """Ctrl-C at random moments of compiling."""
    chance, faults, seen = random.Random(seed), [], Counter[str]()
    seconds = _whole_seconds(folder, compiles, 0)
    for number in range(1, count + 1):
        process = start(folder, compiles, number)
        time.sleep(0.05 + chance.uniform(0, 1.1 * seconds))
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)
        code = ended(process)
        seen[{INTERRUPTED: "interrupted", RIGHT: "had ended"}.get(code, f"status {code}")] += 1
        faults += [f"{number}: status {code}: {words_of(folder)}"] if code not in (INTERRUPTED, RIGHT) else []
        faults += [f"{number}: process {left} is still there" for left in _vanish(folder)]
        faults += [f"{number}: {path} is left" for path in cache_of(folder).root.glob("building-*")]
        faults += [f"{number}: {line}" for line in cache_of(folder).check()]
        code = ended(start(folder, compiles, number))
        faults += [f"{number} again: status {code}: {words_of(folder)}"] if code != RIGHT else []
    if count > 10 and not seen["interrupted"]:
        faults.append("no process was interrupted")
    return {**seen, **_finish(folder, faults), "faults": faults}


def crowd(folder: Path, count: int = 6) -> Report:
    """So many processes at once, with two models in common and one of its own each."""
    barrier = context.Barrier(count)
    processes = [start(folder, _in_a_crowd, barrier, [0, 100 + number, 1]) for number in range(count)]
    codes = [ended(process) for process in processes]
    faults = [f"status {code}: {words_of(folder)}" for code in codes if code != RIGHT]
    faults += [*cache_of(folder).check(), *map(str, cache_of(folder).root.glob("building-*"))]
    return {"right": codes.count(RIGHT), **_finish(folder, faults), "faults": faults}


OUTCOMES = {RIGHT: "right", REFUSED: "refused"}


def full(folder: Path, sizes: Sequence[int]) -> Report:
    """Compiles on a file system of each size, which is mounted on the folder, with cache and temporary files there; then makes room."""
    faults, seen = [], {}
    home = str(folder / "home")
    os.mkdir(home)
    for number, size in enumerate(sizes):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", home], check=True)
        try:
            code = ended(start(folder, compiles, number))
            seen[size] = OUTCOMES.get(code, f"status {code}")
            faults += [f"{size} bytes: status {code}: {words_of(folder)}"] if code not in OUTCOMES else []
            subprocess.run(["mount", "-o", f"remount,size={ROOM}", home], check=True)
            faults += [f"{size} bytes: {line}" for line in cache_of(folder).check()]
            code = ended(start(folder, compiles, number))
            faults += [f"{size} bytes, with room: status {code}: {words_of(folder)}"] if code != RIGHT else []
        finally:
            subprocess.run(["umount", home], check=True)
    return {"sizes": seen, "faults": faults}


def small_files(folder: Path, sizes: Sequence[int]) -> Report:
    """The same with a limit on the size of files, which needs no permission to mount."""
    faults, seen = [], {}
    for number, size in enumerate(sizes):
        code = ended(start(folder, _with_small_files, number, size))
        seen[size] = OUTCOMES.get(code, f"status {code}")
        faults += [f"{size} bytes: status {code}: {words_of(folder)}"] if code not in OUTCOMES else []
        faults += [f"{size} bytes: {line}" for line in cache_of(folder).check()]
        code = ended(start(folder, compiles, number))
        faults += [f"{size} bytes, without the limit: status {code}: {words_of(folder)}"] if code != RIGHT else []
    return {"sizes": seen, "faults": faults}


def footprint() -> dict[str, int]:
    """What this process holds."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "children": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "kernel_mappings": sum("/memfd:" in line for line in maps),
        "mappings": len(maps),
        "temporary_files": len(os.listdir(tempfile.gettempdir())),
        "resident_kilobytes": int(status["VmRSS"].split()[0]),
    }


def _repeated(count: int, different: bool, leak: bool, result: Any) -> None:
    found = []
    for number in range(count):
        compiles(number if different else 0)
        if leak:
            os.dup(0)
        found.append(footprint())
    result.send(found)


def repeats(folder: Path, count: int, different: bool = False, leak: bool = False) -> Report:
    """One process compiles a model, or `different` ones, so many times; its footprint after a tenth of them and at the end. `leak`: it leaves a
    descriptor open each time, which has to be found."""
    receiver, sender = context.Pipe(duplex=False)
    process = start(folder, _repeated, count, different, leak, sender)
    sender.close()
    try:
        found = receiver.recv()
    except EOFError:
        found = []
    code = ended(process)
    if code != RIGHT or not found:
        return {"faults": [f"status {code}: {words_of(folder)}"]}
    first, last = found[max(count // 10, 1) - 1], found[-1]
    steady = ("descriptors", "threads", "children", "temporary_files", *(() if different else ("kernel_mappings",)))
    faults = [f"{name}: {first[name]}, then {last[name]}" for name in steady if last[name] > first[name]]
    allowed = 20_000 + 500 * count * different
    if last["resident_kilobytes"] > first["resident_kilobytes"] + allowed:
        faults.append(f"resident kilobytes: {first['resident_kilobytes']}, then {last['resident_kilobytes']}")
    return {"first": first, "last": last, "faults": faults}


SIZES = (0, 4 << 10, 12 << 10, 20 << 10, 32 << 10, 48 << 10, 64 << 10, 96 << 10, 128 << 10, 192 << 10, 256 << 10, 512 << 10)


def main() -> None:
    parser = argparse.ArgumentParser(description="Kills, interrupts, crowds and full disks; see the module's text.")
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="processes killed while they compile (default: 200)")
    parser.add_argument("--tuning-kills", type=int, default=40, metavar="N", help="processes killed while they tune (default: 40)")
    parser.add_argument("--interrupts", type=int, default=40, metavar="N", help="processes interrupted while they compile (default: 40)")
    parser.add_argument("--repeats", type=int, default=50, metavar="N", help="compilations in one process (default: 50)")
    parser.add_argument("--crowd", type=int, default=6, metavar="N", help="processes at once (default: 6)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    programs: dict[str, Callable[[Path], Report]] = {
        "kills": lambda folder: kills(folder, options.kills, options.seed),
        "tuning_kills": lambda folder: kills(folder, options.tuning_kills, options.seed, tuning=True),
        "interrupts": lambda folder: interrupts(folder, options.interrupts, options.seed),
        "crowd": lambda folder: crowd(folder, options.crowd),
        "small_files": lambda folder: small_files(folder, SIZES),
        "repeats": lambda folder: repeats(folder, options.repeats),
        "repeats_of_different_models": lambda folder: repeats(folder, options.repeats, different=True),
    }
    if os.geteuid() == 0:
        programs["full"] = lambda folder: full(folder, [size or 4096 for size in SIZES])
    results, faulty = [], 0
    for name, program in programs.items():
        with tempfile.TemporaryDirectory(prefix="robustness-") as folder:
            begin = time.monotonic()
            report = {"program": name, **program(Path(folder)), "seconds": round(time.monotonic() - begin)}
        print(report, flush=True)
        results.append(report)
        faulty += bool(report["faults"])
        path = write_results("robustness", vars(options), results)
    print(path)
    sys.exit(bool(faulty))


if __name__ == "__main__":
    main()
