"""Stages of a compilation: how far it is, and how long each took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]
"""Called as progress(stage, done, total), with total 0 while it is not known."""
STAGES = ("export", "simplify", "partition", "choice", "code generation", "measure", "partitions", "compile", "packing")
"""Stages in their order: reading the model as a graph, simplifying it, deciding what runs together, choosing schedules (counted: candidates), making
kernels of them, measuring candidates (counted: those), comparing partitions of the whole graph (counted: those), compiling kernels (counted: those),
and laying out constants and memory."""


class Stages:
    """The stages of one compilation. `seconds`: by stage, each without the stages inside it. For one thread."""

    def __init__(self, progress: Progress | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress or (lambda stage, done, total: None)
        self._running: list[str] = []
        self._since = 0.0
        self._candidates = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """The block is a stage, or a part of one that began before."""
        assert name in STAGES, name
        self._charge()
        self._running.append(name)
        try:
            yield
        finally:
            self._charge()
            self._running.pop()

    def _charge(self) -> None:
        """Adds the time since the last change to the stage that runs."""
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running[-1]] = self.seconds.get(self._running[-1], 0.0) + now - self._since
        self._since = now

    def report(self, stage: str, done: int = 0, total: int = 0) -> None:
        """Says how far a stage is."""
        self._progress(stage, done, total)

    def ranked(self, count: int) -> None:
        """Says that more candidates have been ranked."""
        self._candidates += count
        self._progress("choice", self._candidates, 0)
