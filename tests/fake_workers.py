"""Stand-ins for the processes of `tilewright.tuning.trials`: `fake_workers.py compile [FAULTS]`, `fake_workers.py measure [FAULTS] --device N`.

The compiler lowers but does not compile. Times depend only on the schedule's text. FAULTS is JSON: {part of a schedule's text: what goes wrong},
where "log" names a file that receives a line for each request to the measuring process.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tilewright.hardware.machine import Machine
from tilewright.ir.region import Lowered
from tilewright.tuning.compile_worker import Server
from tilewright.tuning.workers import Fatal, serve


def seconds(schedule: str) -> float:
    """A time between 10 and 20 us, determined by the text."""
    return 1e-5 * (1 + int(hashlib.sha256(schedule.encode()).hexdigest()[:6], 16) / 16**6)


class Compiler(Server):
    """Lowers only."""

    def identity(self, machine: Machine) -> str:
        return "fake compiler"

    def compile(self, schedule: str, folder: Path) -> dict[str, Any]:
        fault = fault_of(schedule)
        if fault == "hang compiler":
            time.sleep(60)
        if fault == "kill compiler":
            os._exit(7)
        answer = super().compile(schedule, folder)
        if fault == "refuse":
            return {**answer, "error": "does not compile: error: made up"}
        return {**answer, "program": {"schedule": schedule}}

    def build(self, lowered: Lowered, machine: Machine, folder: Path) -> dict[str, Any]:
        folder.mkdir()
        return {"resources": {kernel.name: {"registers": 32} for kernel in lowered.kernels}}


def measurer(message: dict[str, Any]) -> dict[str, Any]:
    log(message)
    if message["do"] == "start":
        return {"gpu": "fake gpu", "driver": "0.0", "torch": "0"}
    if message["do"] == "problem":
        return {"sets": 2}
    if message["do"] == "remeasure":
        return {"times": [[seconds(program["schedule"])] * message["rounds"] for program in message["programs"]]}
    schedule = message["program"]["schedule"]
    fault = fault_of(schedule)
    if fault == "hang":
        time.sleep(60)
    if fault == "crash":
        print("made-up fault", file=sys.stderr, flush=True)
        os._exit(9)
    if fault == "fatal":
        raise Fatal("an illegal memory access")
    if fault == "wrong":
        return {"error": "wrong result: relative error 1.00e+00 > 1e-04", "wrong": True, "relative_error": 1.0}
    time_of = seconds(schedule)
    limit = message["limit"]
    if limit is not None and time_of > limit:
        return {"times": [time_of], "stopped": True, "relative_error": 1e-7}
    delay = 1000 if fault == "delay" else 1
    return {"times": [delay * time_of * (1 + 0.001 * k) for k in range(4)], "relative_error": 1e-7}


def fault_of(schedule: str) -> str:
    return next((fault for part, fault in FAULTS.items() if part in schedule), "")


def log(message: dict[str, Any]) -> None:
    if "log" in FAULTS:
        with open(FAULTS["log"], "a") as file:
            file.write(message["do"] + "\n")


if __name__ == "__main__":
    role = sys.argv[1]
    FAULTS = json.loads(sys.argv[2]) if len(sys.argv) > 2 and not sys.argv[2].startswith("--") else {}
    serve(Compiler() if role == "compile" else measurer)
