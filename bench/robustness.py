"""What processes leave behind when they are killed, disks are full, or many compile at once: `python -m bench.robustness`.

| row | does | must hold |
|---|---|---|
| kills_of_compiling | kills a process (SIGKILL) at a random moment of compiling a model that is not in the cache | `cache check` finds nothing but
folders "left by a process that was killed", `prune` removes them, no process is left, and the next compilation of that model is right and finds no
damaged entry |
| kills_of_tuning | the same while it tunes: see bench/tuning_kills.py | |
| interrupts | sends SIGINT or SIGTERM at a random moment of `tilewright compile` with a cold cache | the command ends with 130 or 143 and one line;
there is no artifact, or a whole one (the signal came between its last byte and the end of the process), no process, no temporary file and no partial
folder; the next command writes its artifact |
| crowd | processes compile the same and different models in one fresh cache at once | every result is right, the cache sound |
| full_file_systems, small_files | a model is compiled on file systems of several sizes (the superuser only), or with a limit on the size of files | the result is right (with a warning), or an error of ours; when there is room again, the cache is sound and the next result right |
| repeats, repeats_of_different_models | one process compiles many times | descriptors, threads, children, temporary files, mappings and memory do not grow |

Each row gives counts of what was observed; `faults` lists violations. They are written to bench/results/robustness.json.
"""  # noqa: E501 - a table

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tilewright
from bench.common import write_results
from bench.processes import (
    PATIENCE,
    REFUSED,
    RIGHT,
    cache_of,
    command_line,
    context,
    damages,
    ended,
    files_left,
    handles,
    processes_left,
    start,
    words_of,
)
from bench.tuning_kills import tuning_kills

ROOM = 1 << 26
BATCH = 10
"""Number of killed processes' models that one process compiles to the end."""
SIZES = (0, 4 << 10, 12 << 10, 20 << 10, 32 << 10, 48 << 10, 64 << 10, 96 << 10, 128 << 10, 192 << 10, 256 << 10, 512 << 10)
Report = dict[str, Any]


def network(number: int) -> tuple[nn.Module, torch.Tensor]:
    """A small model of two kernels, which differ for each number."""
    torch.manual_seed(number)
    width = 8 + number
    layers = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 10))
    return layers.eval(), torch.randn(3, 6)


def model() -> tuple[nn.Module, torch.Tensor]:
    """The model that the command line compiles."""
    return network(1)


# What runs in the processes


def compiles(*numbers: int) -> None:
    """Compiles models and compares them with PyTorch."""
    for number in numbers:
        module, x = network(number)
        with tilewright.compile(module, x) as executable, torch.no_grad():
            torch.testing.assert_close(executable(x), module(x), rtol=1e-4, atol=1e-5)


def loads(place: Path) -> None:
    """Loads an artifact of `model` and compares it with PyTorch."""
    module, x = model()
    with tilewright.load(place) as executable, torch.no_grad():
        torch.testing.assert_close(executable(x), module(x), rtol=1e-4, atol=1e-5)


def _in_a_crowd(barrier: Any, numbers: Sequence[int]) -> None:
    barrier.wait(PATIENCE)
    compiles(*numbers)


def _with_small_files(number: int, limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        compiles(number)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


# The rows


def _done(folder: Path, work: Callable[..., int | None], *arguments: Any) -> list[str]:
    """Runs an undisturbed process; returns the problem if it does not end with a right result."""
    process = start(folder, work, *arguments)
    code = ended(process)
    return [] if code == RIGHT else [f"undisturbed: status {code}: {words_of(folder, process)}"]


def _seconds(folder: Path, work: Callable[..., int | None], *arguments: Any) -> float:
    """Seconds of an undisturbed process with a cold cache, with the fork server already running."""
    if faults := _done(folder, compiles):
        raise RuntimeError(faults[0])
    begin = time.monotonic()
    if faults := _done(folder, work, *arguments):
        raise RuntimeError(faults[0])
    return time.monotonic() - begin


def kills_of_compiling(folder: Path, count: int, seed: int = 0) -> Report:
    chance, faults, seen, cache = random.Random(seed), list[str](), Counter[str](), cache_of(folder)
    seconds = _seconds(folder, compiles, 0)
    for number in range(1, count + 1):
        begin, process = time.monotonic(), start(folder, compiles, number)
        process.join(chance.uniform(0, seconds))
        process.kill()
        code = ended(process)
        seconds = min(seconds, time.monotonic() - begin) if code == RIGHT else seconds
        seen["killed" if code == -signal.SIGKILL else "had ended"] += 1
        faults += [f"status {code}: {words_of(folder, process)}"] if code not in (-signal.SIGKILL, RIGHT) else []
        faults += processes_left(folder)
        seen["left a folder in the making"] += any(cache.root.glob("building-*"))
        faults += damages(folder)
        if number % BATCH == 0 or number == count:
            faults += _done(folder, compiles, *range(number - (number - 1) % BATCH, number + 1))
        cache.prune()
        faults += cache.check()
    return {"seconds_undisturbed": round(seconds, 2), **seen, "entries": len(cache.entries()), "faults": faults + files_left(folder)}


def interrupts(folder: Path, count: int, seed: int = 0) -> Report:
    chance, faults, seen = random.Random(seed), list[str](), Counter[str]()

    def command(place: Path) -> tuple[Any, ...]:
        place.mkdir()
        return place, command_line, place, "compile", "bench.robustness:model", "-o", str(place / "model.zip")

    seconds = _seconds(*command(folder / "0"))
    for number in range(1, count + 1):
        place, *work = command(folder / str(number))
        process = start(place, *work)
        while not handles(process, signal.SIGTERM) and process.is_alive():  # SIGHUP may be ignored, as nohup does
            time.sleep(0.001)
        process.join(chance.uniform(0, seconds / (1 + number % 2)))  # every other in the first half: `seconds` may have been measured under load
        sent = chance.choice((signal.SIGINT, signal.SIGTERM))
        if process.is_alive():
            os.kill(process.pid, sent)
        code, words = ended(process), words_of(place, process)
        seen["interrupted" if code else "had ended"] += 1
        seen["left entries in the cache"] += bool(code and cache_of(place).entries())
        written = (place / "model.zip").exists()
        seen["interrupted after the artifact was written"] += bool(code and written)
        as_wanted = (128 + sent, "tilewright: interrupted\n") if code else (0, "")
        faults += [f"status, words: {(code, words)}"] if (code, words) != as_wanted else []
        faults += ["a command that ended well wrote no artifact"] if not code and not written else []
        faults += _done(place, loads, place / "model.zip") if written else []
        faults += [f"{path} is left" for path in (*place.glob("*model.zip?*"), *place.glob(".*"))]
        faults += [*processes_left(place), *files_left(place), *cache_of(place).check(), *_done(place, *work), *files_left(place)]
        faults += _done(place, loads, place / "model.zip")
    return {"seconds_undisturbed": round(seconds, 2), **seen, "faults": faults + ["none was interrupted"] * (not seen["interrupted"])}


def crowd(folder: Path, count: int = 6) -> Report:
    """Runs `count` processes at once, each compiling two shared models and one of its own."""
    barrier = context.Barrier(count)
    processes = [start(folder, _in_a_crowd, barrier, [0, 100 + number, 1]) for number in range(count)]
    codes = [ended(process) for process in processes]
    faults = [f"status {code}: {words_of(folder, process)}" for process, code in zip(processes, codes, strict=True) if code != RIGHT]
    faults += [*cache_of(folder).check(), *map(str, cache_of(folder).root.glob("building-*")), *files_left(folder)]
    return {"right": codes.count(RIGHT), "entries": len(cache_of(folder).entries()), "faults": faults}


OUTCOMES = {RIGHT: "right", REFUSED: "refused"}


def starved(folder: Path, sizes: Sequence[int], mounted: bool = False) -> Report:
    """Compiles with a limit on the size of each file, or on a file system of that size, which is `mounted` on the folder with cache and temporary
    files; then again with enough space."""
    faults, seen, home = list[str](), dict[int, str](), folder / "home"
    home.mkdir()
    for number, size in enumerate(sizes):
        if mounted:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", home], check=True)
        try:
            process = start(folder, compiles, number) if mounted else start(folder, _with_small_files, number, size)
            code = ended(process)
            seen[size] = OUTCOMES.get(code, f"status {code}")
            faults += [f"{size} bytes: status {code}: {words_of(folder, process)}"] if code not in OUTCOMES else []
            if mounted:
                subprocess.run(["mount", "-o", f"remount,size={ROOM}", home], check=True)
            faults += [f"{size} bytes: {line}" for line in (*cache_of(folder).check(), *_done(folder, compiles, number))]
        finally:
            if mounted:
                subprocess.run(["umount", home], check=True)
    return {"sizes": seen, "faults": faults}


def footprint() -> dict[str, int]:
    """The resources that this process holds."""
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
    """One process compiles a model, or `different` ones, `count` times; reports its footprint after a tenth of them and at the end. `leak`: it leaves
    a descriptor open each time, which must be detected."""
    receiver, sender = context.Pipe(duplex=False)
    process = start(folder, _repeated, count, different, leak, sender)
    sender.close()
    try:
        found = receiver.recv()
    except EOFError:
        found = []
    code = ended(process)
    if code != RIGHT or not found:
        return {"faults": [f"status {code}: {words_of(folder, process)}"]}
    first, last = found[max(count // 10, 1) - 1], found[-1]
    steady = ("descriptors", "threads", "children", "temporary_files", *(() if different else ("kernel_mappings",)))
    faults = [f"{name}: {first[name]}, then {last[name]}" for name in steady if last[name] > first[name]]
    allowed = 20_000 + 500 * count * different
    if last["resident_kilobytes"] > first["resident_kilobytes"] + allowed:
        faults.append(f"resident kilobytes: {first['resident_kilobytes']}, then {last['resident_kilobytes']}")
    return {"first": first, "last": last, "faults": faults}


def main() -> None:
    parser = argparse.ArgumentParser(description="Kills, interrupts, crowds and full disks; see the module's text.")
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="processes killed while they compile, and while they tune (default: 200)")
    parser.add_argument("--interrupts", type=int, default=50, metavar="N", help="commands interrupted while they compile (default: 50)")
    parser.add_argument("--repeats", type=int, default=50, metavar="N", help="compilations in one process (default: 50)")
    parser.add_argument("--crowd", type=int, default=6, metavar="N", help="processes at once (default: 6)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows: dict[str, Callable[[Path], Report]] = {
        "kills_of_compiling": lambda folder: kills_of_compiling(folder, options.kills, options.seed),
        "kills_of_tuning": lambda folder: tuning_kills(folder, options.kills, options.seed),
        "interrupts": lambda folder: interrupts(folder, options.interrupts, options.seed),
        "crowd": lambda folder: crowd(folder, options.crowd),
        "small_files": lambda folder: starved(folder, SIZES),
        "repeats": lambda folder: repeats(folder, options.repeats),
        "repeats_of_different_models": lambda folder: repeats(folder, options.repeats, different=True),
    }
    if os.geteuid() == 0:
        rows["full_file_systems"] = lambda folder: starved(folder, [size for size in SIZES if size], mounted=True)
    results = []
    for name, row in rows.items():
        with tempfile.TemporaryDirectory(prefix="robustness-") as folder:
            begin = time.monotonic()
            results.append({"row": name, **row(Path(folder)), "seconds": round(time.monotonic() - begin)})
        print(results[-1], flush=True)
    print(write_results("robustness", vars(options), results))
    sys.exit(any(result["faults"] for result in results))


if __name__ == "__main__":
    main()
