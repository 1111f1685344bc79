"""Runs the command line, and sends itself a signal when a stage begins: ``interrupted.py SIGNAL TIMES MODULE:NAME COMMAND...``, or `command`.

NAME is a function or Class.method, before whose first call the signal is sent; ``MODULE:`` alone stands for the import of the module. TIMES signals
are sent, one at once and the others from a thread soon after; a line in the file `stage` marks that.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def send(number: signal.Signals, times: int) -> None:
    def more() -> None:
        for _ in range(times - 1):
            time.sleep(0.02)
            os.kill(os.getpid(), number)

    with open("stage", "a") as file:
        file.write("begins\n")
    threading.Thread(target=more, daemon=True).start()
    os.kill(os.getpid(), number)


class Hook(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Patches a function of a module when the module is imported, or sends the signal then."""

    def __init__(self, place: str, number: signal.Signals, times: int) -> None:
        self.module, self.name = place.split(":")
        self.signals = (number, times)
        self.loader: Any = None

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if not self.name:
            send(*self.signals)
        self.loader.exec_module(module)
        if self.name:
            self.patch(module)

    def patch(self, owner: Any) -> None:
        *owners, last = self.name.split(".")
        for part in owners:
            owner = getattr(owner, part)
        original = getattr(owner, last)
        sent: list[bool] = []

        def patched(*arguments: Any, **options: Any) -> Any:
            if not sent:
                sent.append(True)
                send(*self.signals)
            return original(*arguments, **options)

        setattr(owner, last, patched)


def interrupted(number: signal.Signals, times: int, where: str, arguments: Sequence[str]) -> int:
    hook = Hook(where, number, times)
    if hook.module in sys.modules:
        hook.patch(sys.modules[hook.module])
    sys.meta_path.insert(0, hook)
    sys.argv = ["tilewright", *arguments]

    from tilewright.__main__ import run

    return run()


def command(place: Path, environment: Mapping[str, str], arguments: Sequence[str], stage: tuple[signal.Signals, int, str] | None) -> int:
    """Work of a process of `bench.processes` that leads a process group, like a terminal's: runs a command in a folder, interrupted at a stage or
    from outside."""
    os.setpgid(0, 0)
    os.chdir(place)
    os.environ.update(environment)
    sys.path.insert(0, str(place))
    if stage is not None:
        return interrupted(*stage, arguments)

    from bench.processes import command_line

    return command_line(place, *arguments)


if __name__ == "__main__":
    sys.exit(interrupted(signal.Signals[sys.argv[1]], int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
