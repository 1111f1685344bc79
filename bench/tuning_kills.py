"""Repeatedly killed tuning: records stay sound and complete, no process is left, and nothing is measured twice.

A process tunes two small layers, whose candidates are compiled and measured by stand-in processes. It logs each measurement that it has recorded, and
is killed at a random moment, every second time soon after a measurement. The next process continues with the same records, until one finishes; then a
new file is begun. After each kill the file must be sound and hold every logged and every earlier measurement. A process that finishes has measured
each candidate once, and the next one removes the temporary folders of those that were killed.
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
"""A stand-in for a trial process without its start-up time of seconds: the process that is killed here is the one that tunes."""


def _problems() -> list[Problem]:
    return [convolution_problem(16, 8, 6, 5, 3), convolution_problem(8, 8, 5, 4, 1)]


def _tunes(folder: Path) -> None:
    """Work of a process: tunes, and logs each measurement after it was recorded."""
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
    """The measurements that the processes logged."""
    return (folder / "noted").read_text().splitlines() if (folder / "noted").exists() else []


def _wait(folder: Path, process: Any, measurements: int, seconds: float) -> None:
    """Waits until `measurements` more were logged and then `seconds` have passed, or the process has ended."""
    wanted, end = len(_noted(folder)) + measurements, time.monotonic() + PATIENCE
    while len(_noted(folder)) < wanted and process.is_alive() and time.monotonic() < end:
        time.sleep(0.005)
    process.join(seconds)


def _faults(folder: Path, before: set[Measurement], found: set[Measurement]) -> list[str]:
    """Problems of the records, and processes that are left."""
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
    """Kills tuning `count` times; returns counts and faults."""
    chance, seen, faults = random.Random(seed), Counter[str](), list[str]()
    ended(start(folder, _tunes, folder))  # starts the fork server; the next process shows how long one takes
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
