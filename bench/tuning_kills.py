"""Tuning that is killed again and again: records are sound and complete, no process is left, and what was measured is not measured again.

A process tunes two small layers, whose candidates stand-ins compile and measure in processes of their own, notes each measurement that it has
recorded, and is killed at a random moment, every other one soon after a measurement; the next one goes on with the same records, until one comes to
its end, and another file is begun. After each kill the file is sound, and holds every measurement that was noted and all from before; a process that
comes to its end has measured each candidate once, and the next one removes the temporary folders of those that were killed.
"""

from __future__ import annotations

import itertools
import random
import sqlite3
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from bench.processes import PATIENCE, RIGHT, ended, files_left, processes_left, start, words_of
from tilewright.hardware import machine
from tilewright.ir.problem import Problem
from tilewright.system.scratch import Scratch
from tilewright.tuning import serialisation
from tilewright.tuning.measurement import Measurement
from tilewright.tuning.problems import convolution_problem, key_of
from tilewright.tuning.records import Records
from tilewright.tuning.trials import Outcome, Trials
from tilewright.tuning.tuning import tune

TRIALS = 4
STAND_IN = """
import sys, time
from tilewright.tuning.workers import serve
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


def _problems() -> list[Problem]:
    return [convolution_problem(16, 8, 6, 5, 3), convolution_problem(8, 8, 5, 4, 1)]


def _tunes(folder: Path) -> None:
    """Work of a process: tunes, and notes what was recorded after it was."""
    native, command = machine("native"), ("-c", STAND_IN)

    def stand_ins() -> Trials:
        return Trials(native, compile_workers=2, threads=1, compiler=command, measurer=command)

    def note(done: int, total: int, outcome: Outcome | None) -> None:
        if outcome is not None:
            line = f"{key_of(outcome.job.problem)} {serialisation.schedule_text(outcome.job.schedule)}\n"
            with open(folder / "noted", "ab", buffering=0) as file:
                file.write(line.encode())

    with Records(folder / "records.sqlite") as records:
        tuned = tune(_problems(), native, TRIALS, records, threads=1, report=note, start=stand_ins)
    candidates = tuned.known + tuned.measured + tuned.failed + tuned.bounded_out
    assert tuned.failed == 0 and candidates == TRIALS * len(_problems()), tuned


def _noted(folder: Path) -> list[str]:
    """What the processes say that they have recorded."""
    return (folder / "noted").read_text().splitlines() if (folder / "noted").exists() else []


def _wait(folder: Path, process: Any, measurements: int, seconds: float) -> None:
    """Until so many more measurements were noted and then so many seconds have passed, or the process has ended."""
    wanted, end = len(_noted(folder)) + measurements, time.monotonic() + PATIENCE
    while len(_noted(folder)) < wanted and process.is_alive() and time.monotonic() < end:
        time.sleep(0.005)
    process.join(seconds)


def _faults(folder: Path, before: set[Measurement], found: set[Measurement]) -> list[str]:
    """What is wrong with the records, and which processes are left."""
    faults = processes_left(folder)
    if (folder / "records.sqlite").exists():
        with closing(sqlite3.connect(folder / "records.sqlite")) as connection:
            (said,) = connection.execute("PRAGMA integrity_check").fetchone()
        faults += [f"the file is not sound: {said}"] if said != "ok" else []
    noted = _noted(folder)
    for what, number in (
        ("measurements from before are lost", len(before - found)),
        ("measurements that were recorded are not there", len(set(noted) - {f"{entry.region} {entry.schedule}" for entry in found})),
        ("measurements were made again", len(noted) - len(set(noted))),
    ):
        faults += [f"{number} {what}"] if number else []
    return faults


def _measurements(path: Path) -> set[Measurement]:
    if not path.exists():
        return set()
    with Records(path) as records:
        return set(records.all())


def tuning_kills(folder: Path, count: int, seed: int = 0) -> dict[str, Any]:
    """Kills tuning so many times; counts, and what is wrong."""
    chance, seen, faults = random.Random(seed), Counter[str](), list[str]()
    ended(start(folder, _tunes, folder))  # once the server that forks runs, the next one shows how long one takes
    whole = PATIENCE
    for number in itertools.takewhile(lambda _: seen["killed"] < count, itertools.count()):
        place = folder / str(number)
        before, running = set[Measurement](), True
        place.mkdir()
        while running and seen["killed"] < count:
            begin = time.monotonic()
            process = start(place, _tunes, place)
            measurements = chance.randint(1, 3) if number and chance.random() < 0.5 else 0
            _wait(place, process, measurements, chance.uniform(0, 0.1 if measurements else whole) if number else whole)
            process.kill()
            running = (code := ended(process)) < 0
            found = _measurements(place / "records.sqlite")
            seen["killed" if running else "came to their end"] += 1
            seen["measurements"] += len(found - before)
            seen["kills that left measurements"] += running and found > before
            faults += _faults(place, before, found)
            before = found
            if not running:
                whole = whole if number else time.monotonic() - begin
                Scratch(str(place / "home" / "tmp")).close()
                faults += files_left(place)
                faults += [f"status {code}: {words_of(place, process)}"] if code != RIGHT else []
    return {**seen, "seconds_undisturbed": round(whole, 2), "faults": faults}
