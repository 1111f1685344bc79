"""Tuning that is killed (SIGKILL) again and again: `python -m bench.tuning_kills --kills 200`.

A process tunes two small layers, whose candidates stand-ins compile and measure in processes of their own, notes each measurement that it has
recorded, and is killed at a random moment, every other one soon after a measurement; the next one goes on with the same records, until one comes to
its end, and another file is begun. After each kill the file is sound, holds every measurement that was noted and all from before, and no process is
left; one that comes to its end has measured each candidate once, and what was known before not again.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sqlite3
import tempfile
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from bench.common import write_results
from tilewright.hardware import machine
from tilewright.runtime import plain
from tilewright.runtime.measurement import Measurement
from tilewright.runtime.problems import Problem, convolution_problem
from tilewright.runtime.records import Records
from tilewright.runtime.trials import Outcome, Trials
from tilewright.runtime.tuning import tune

TRIALS = 4
STAND_IN = """
import sys, time
from tilewright.runtime.workers import serve
def answer(message):
    time.sleep(0.02)
    if message["do"] == "trial":
        return {"times": [1e-5, 1.1e-5, 1.2e-5], "relative_error": 0.0}
    if message["do"] == "remeasure":
        return {"times": [[1e-5] * message["rounds"] for _ in message["programs"]]}
    return {"code": "some", "program": {}, "resources": {}}
serve(answer)
"""
"""A process as those of trials, without what takes them seconds to start: what is killed here is the process that tunes."""
PATIENCE = 300.0
"""Seconds after which a process hangs, or an orphan stays."""
MARK = "TILEWRIGHT_TUNING_KILLS"


def problems() -> list[Problem]:
    return [convolution_problem(16, 8, 6, 5, 3), convolution_problem(8, 8, 5, 4, 1)]


def _tune(folder: Path, mark: str) -> None:
    """In a process of its own: tunes, and notes what was recorded after it was."""
    os.environ[MARK] = mark  # what this process starts has it, and can be found
    os.environ["TILEWRIGHT_CACHE"] = str(folder / "cache")
    native, command = machine("native"), ("-c", STAND_IN)

    def stand_ins() -> Trials:
        return Trials(native, compile_workers=2, threads=1, compiler=command, measurer=command)

    def note(done: int, total: int, outcome: Outcome | None) -> None:
        if outcome is not None:
            line = f"{outcome.job.problem.key} {plain.schedule_text(outcome.job.schedule)}\n"
            with open(folder / "noted", "ab", buffering=0) as file:
                file.write(line.encode())

    with Records(folder / "records.sqlite") as records:
        tuned = tune(problems(), native, TRIALS, records, threads=1, report=note, start=stand_ins)
    (folder / "ended").write_text(f"{tuned.known} {tuned.measured} {tuned.failed} {tuned.hopeless}")


def marked(mark: str) -> list[int]:
    """The processes that carry the mark, and were not reaped."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError):
                if f"{MARK}={mark}\0".encode() in Path(f"/proc/{entry}/environ").read_bytes():
                    found.append(int(entry))
    return found


def noted(folder: Path) -> list[str]:
    """What the processes say that they have recorded."""
    return (folder / "noted").read_text().splitlines() if (folder / "noted").exists() else []


def killed_once(folder: Path, mark: str, seconds: float, measurements: int | None) -> bool:
    """Starts tuning and kills it after so many seconds, counted from when it has noted so many measurements; whether it was still running then."""
    already = len(noted(folder))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _tune(folder, mark)
            code = 0
        finally:
            os._exit(code)
    end = time.monotonic() + (seconds if measurements is None else PATIENCE)
    while time.monotonic() < end:
        if measurements is not None and len(noted(folder)) >= already + measurements:
            measurements, end = None, time.monotonic() + seconds
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if status:
                raise RuntimeError(f"tuning that nobody killed ended with status {status}")
            return False
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def faults_of(folder: Path, before: set[Measurement], mark: str) -> list[str]:
    """What is wrong with the records and processes that are left."""
    faults = []
    deadline = time.monotonic() + PATIENCE
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        faults.append(f"{len(left)} processes are left")
    path = folder / "records.sqlite"
    if not path.exists():
        return faults
    with closing(sqlite3.connect(path)) as connection:
        (said,) = connection.execute("PRAGMA integrity_check").fetchone()
    if said != "ok":
        return [*faults, f"the file is not sound: {said}"]
    with Records(path) as records:
        found = set(records.all())
    there = {f"{entry.region} {entry.schedule}" for entry in found}
    if lost := before - found:
        faults.append(f"{len(lost)} measurements from before are lost")
    if missing := set(noted(folder)) - there:
        faults.append(f"{len(missing)} measurements that were recorded are not there")
    if again := [line for line, count in Counter(noted(folder)).items() if count > 1]:
        faults.append(f"{len(again)} measurements were made again")
    return faults


def killed(kills: int, seed: int = 0) -> dict[str, Any]:
    """Kills tuning so many times, or fewer where it is interrupted; counts, and what is wrong, which should be nothing."""
    counts: Counter[str] = Counter()
    faults: list[str] = []
    with suppress(KeyboardInterrupt):
        _kill(kills, seed, counts, faults)
    return {"counts": dict(counts), "faults": faults}


def _kill(kills: int, seed: int, counts: Counter[str], faults: list[str]) -> None:
    random_numbers = random.Random(seed)
    whole: float | None = None
    while counts["kills"] < kills:
        with tempfile.TemporaryDirectory() as name:
            folder, before, ended = Path(name), set[Measurement](), False
            while not ended and counts["kills"] < kills or whole is None:
                mark = f"{os.getpid()}-{counts.total()}"
                begin = time.monotonic()
                if whole is None:
                    was_killed = killed_once(folder, mark, PATIENCE, None)
                elif random_numbers.random() < 0.5:
                    was_killed = killed_once(folder, mark, random_numbers.uniform(0, whole), None)
                else:
                    was_killed = killed_once(folder, mark, random_numbers.uniform(0, 0.1), random_numbers.randint(1, 3))
                ended = not was_killed
                counts["kills" if was_killed else "ends"] += 1
                faults.extend(faults_of(folder, before, mark))
                if (folder / "records.sqlite").exists():
                    with Records(folder / "records.sqlite") as records:
                        new = set(records.all()) - before
                    before |= new
                    counts["measurements"] += len(new)
                    counts["kills that left measurements"] += bool(was_killed and new)
                if ended:
                    known, measured, failed, hopeless = map(int, (folder / "ended").read_text().split())
                    if known + measured + failed + hopeless != TRIALS * len(problems()) or failed:
                        faults.append(f"{known} known, {measured} measured, {failed} failed, {hopeless} hopeless")
                    whole = min(whole or PATIENCE, time.monotonic() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    parser.add_argument("--name", help="write bench/results/NAME.json")
    options = parser.parse_args()
    result = killed(options.kills, options.seed)
    print(result)
    if options.name:
        write_results(options.name, {"kills": options.kills, "seed": options.seed}, [result])
    raise SystemExit(bool(result["faults"]))


if __name__ == "__main__":
    main()
