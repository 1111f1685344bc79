"""Measuring whole programs: each is stored as an artifact while one child process loads it, which checks and times all of them in turns.

A program that hangs or faults costs the process, and nothing else: another one is started, which loads those that were right again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType

from tilewright.errors import CacheError, InvalidArtifact
from tilewright.hardware.machine import Machine
from tilewright.runtime.artifact import save
from tilewright.runtime.executable import Image
from tilewright.system.scratch import Scratch
from tilewright.tuning import serialisation
from tilewright.tuning.trial_processes import PROBLEM_SECONDS, START_SECONDS
from tilewright.tuning.trials import ROUNDS, Timing
from tilewright.tuning.workers import FATAL, Message, Worker, WorkerLost

MEASURER = ("-m", "tilewright.tuning.partition_worker")


@dataclass(frozen=True)
class WholeOutcome:
    """The outcome of a program. `status`: "measured", "wrong" or "failed", as in `trials.Outcome`; `reason` says why; `environment`: "gpu",
    "driver"."""

    status: str
    reason: str = ""
    timing: Timing | None = None
    relative_error: float | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Measurer:
    """How the process is started: for which machine, with how many threads of a CPU or on which GPU. `tf32`: whether factors may be rounded so.
    `command` is replaced in tests; `seconds`: time without an answer after which the process counts as hung."""

    machine: Machine
    threads: int
    tf32: bool = False
    device: int = 0
    seed: int = 0
    command: Sequence[str] = MEASURER
    seconds: float = PROBLEM_SECONDS


def measured(images: Sequence[Image | str], measurer: Measurer, tell: Callable[[int], object] = lambda done: None) -> list[WholeOutcome]:
    """The outcomes of programs that compute the same (or why there is none), timed in turns. The others are compared with the first: without that,
    none is timed. `tell` is called with the number of programs checked so far.

    Raises:
        CacheError: if there is no folder for them.
    """
    try:
        scratch = Scratch()
    except OSError as error:
        raise CacheError(f"there is no folder for programs: {error}", "set TMPDIR to a folder that can be written") from error
    with scratch as folder, _Process(measurer, folder) as process:
        outcomes: dict[int, WholeOutcome] = {}
        for number, image in enumerate(images):
            if 0 in outcomes:
                outcomes[number] = WholeOutcome("failed", "there is no time to compare it with")
                continue
            answer: Message = {"error": image} if isinstance(image, str) else process.load(number, image)
            if "error" in answer:
                outcomes[number] = _failed(answer, process)
            tell(number + 1)
        right = [number for number in range(len(images)) if number not in outcomes]
        answer = process.ask({"do": "time", "rounds": ROUNDS}) if right else {}
        for place, number in enumerate(right):
            if "error" in answer:
                outcomes[number] = _failed(answer, process)
            elif answer["wrong"][place]:
                outcomes[number] = _failed({"error": answer["wrong"][place], "wrong": True}, process)
            else:
                outcomes[number] = WholeOutcome("measured", "", Timing.of(answer["times"][place]), process.errors[place], process.facts)
    return [outcomes[number] for number in range(len(images))]


def _failed(answer: Message, process: _Process) -> WholeOutcome:
    return WholeOutcome("wrong" if answer.get("wrong") else "failed", answer["error"], environment=process.facts)


class _Process:
    """The process, started when it is needed, and again after a loss; a context manager that ends it. `folder`: for the artifact that it loads.
    `errors`: the relative errors of the programs that it has loaded."""

    def __init__(self, measurer: Measurer, folder: Path) -> None:
        self._measurer, self._folder = measurer, folder
        self._worker: Worker | None = None
        self._right: list[tuple[int, Image]] = []
        self.errors: list[float] = []
        self.facts: dict[str, str] = {}

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._worker is not None:
            self._worker.close()

    def load(self, number: int, image: Image) -> Message:
        """The answer for one more program."""
        answer = self._answer(lambda worker: self._loaded(worker, number, image))
        if "error" not in answer:
            self._right.append((number, image))
            self.errors.append(answer["relative_error"])
        return answer

    def ask(self, message: Message) -> Message:
        """The answer to a request about the programs that were right."""
        return self._answer(lambda worker: worker.ask(message, self._measurer.seconds))

    def _answer(self, ask: Callable[[Worker], Message]) -> Message:
        """The answer of the process; its loss gives one too."""
        try:
            answer = ask(self._started())
        except WorkerLost as error:
            return {"error": f"while measuring {error}"}
        if FATAL in answer:
            answer["error"] = f"a kernel failed: {answer['error']}"
        return answer

    def _loaded(self, worker: Worker, number: int, image: Image) -> Message:
        path = self._folder / str(number)
        try:
            save(image, path)
            return worker.ask({"do": "load", "path": str(path), "seed": self._measurer.seed, "tf32": self._measurer.tf32}, self._measurer.seconds)
        except InvalidArtifact as error:
            return {"error": f"it cannot be stored for the process that measures: {error.cause}"}
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def _started(self) -> Worker:
        """The process with the programs that were right. Raises WorkerLost if it cannot be started, or does not load them."""
        if self._worker is not None and self._worker.alive:
            return self._worker
        if self._worker is not None:
            self._worker.close()
        measurer = self._measurer
        self._worker = Worker((*measurer.command, "--device", str(measurer.device), "--threads", str(measurer.threads)))
        answer = self._worker.ask({"do": "start", "machine": serialisation.encode(measurer.machine)}, START_SECONDS)
        self.facts = {name: str(fact) for name, fact in answer.items()}
        for number, image in self._right:
            answer = answer if "error" in answer else self._loaded(self._worker, number, image)
        if "error" in answer:
            self._worker.kill()
            raise WorkerLost(str(answer["error"]))
        return self._worker
