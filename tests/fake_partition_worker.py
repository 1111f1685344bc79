"""A stand-in for `tilewright.tuning.partition_worker`: `fake_partition_worker.py FAULTS --device N --threads T`.

FAULTS is JSON: {number of a program or a request: what goes wrong}, where "log" names a file that receives a line for each request. Program n takes
n + 1 seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tilewright.tuning.workers import Fatal, serve


class OutOfMemoryError(RuntimeError):
    """As PyTorch's."""


loaded: list[int] = []


def answer(message: dict[str, Any]) -> dict[str, Any]:
    number = Path(message.get("path", "none")).name
    if "log" in FAULTS:
        with open(FAULTS["log"], "a") as file:
            file.write(f"{message['do']} {number}\n")
    fault = FAULTS.get(number, FAULTS.get(message["do"], ""))
    if fault == "hang":
        time.sleep(60)
    if fault == "crash":
        os._exit(9)
    if fault == "fatal":
        raise Fatal("an illegal memory access")
    if fault == "memory":
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    if fault == "error":
        raise RuntimeError("made up")
    if fault == "wrong":
        return {"error": "wrong result: y has the relative error 1.00e+00 > 1e-04", "wrong": True}
    if message["do"] == "load":
        assert Path(message["path"]).exists()
        loaded.append(int(number))
        return {"relative_error": 1e-7}
    if message["do"] == "time":
        wrong = ["made up" if fault == "wrong later" and number == loaded[-1] else "" for number in loaded]
        return {"times": [[number + 1.0] * message["rounds"] for number in loaded], "wrong": wrong}
    return {"gpu": "fake", "driver": "0.0", "torch": "0"}


if __name__ == "__main__":
    FAULTS = json.loads(sys.argv[1])
    serve(answer)
