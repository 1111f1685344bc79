"""A subject that commits every fault that the harness must detect; the file ``do`` says which."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

from tests.fuzz.harness import MARK, Broken
from tilewright.errors import InvalidModel


def run() -> None:
    what = Path("do").read_text()
    if what == "refuse":
        raise InvalidModel("the file is bad", "write another")
    if what == "lines":
        raise InvalidModel("the file\nis bad")
    if what == "raise":
        raise KeyError("nothing")
    if what == "memory":
        bytearray(1 << 40)
    if what == "exit":
        raise SystemExit(3)
    if what == "crash":
        ctypes.string_at(8)
    if what == "vanish":
        os._exit(1)
    if what == "hang":
        time.sleep(600)
    if what == "break":
        raise Broken("a record is lost")
    if what == "payload":
        os.system(f"touch {MARK}-1")
