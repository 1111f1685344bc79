"""Stand-ins for the processes of `tilewright.runtime.trials`: `fake_workers.py compile` and `fake_workers.py measure [FAULTS] --device N`.

Times follow from the schedule's text alone. FAULTS is JSON: {part of a schedule's text: "hang" | "crash" | "fatal" | "wrong" | "refuse"}.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tilewright.runtime.workers import Fatal, serve


def seconds(schedule: str) -> float:
    """Between 10 and 20 us, the same for the same text."""
    return 1e-5 * (1 + int(hashlib.sha256(schedule.encode()).hexdigest()[:6], 16) / 16**6)


def compiler(message: dict[str, Any]) -> dict[str, Any]:
    if message["do"] == "machine":
        return {"compiler": "fake compiler"}
    if message["do"] == "problem":
        return {}
    fault = fault_of(message["schedule"])
    if fault == "refuse":
        return {"error": "does not compile: error: made up"}
    if fault == "kill compiler":
        os._exit(7)
    Path(message["folder"]).mkdir()
    return {"code": "code_" + message["schedule"], "schedule": message["schedule"], "program": {"schedule": message["schedule"]}, "resources": {}}


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
    return {"times": [time_of * (1 + 0.001 * k) for k in range(4)], "relative_error": 1e-7}


def fault_of(schedule: str) -> str:
    return next((fault for part, fault in FAULTS.items() if part in schedule), "")


def log(message: dict[str, Any]) -> None:
    if "log" in FAULTS:
        with open(FAULTS["log"], "a") as file:
            file.write(message["do"] + "\n")


if __name__ == "__main__":
    role = sys.argv[1]
    FAULTS = json.loads(sys.argv[2]) if len(sys.argv) > 2 and not sys.argv[2].startswith("--") else {}
    serve(compiler if role == "compile" else measurer)
