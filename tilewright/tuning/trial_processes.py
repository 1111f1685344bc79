"""The parent's side of the trial processes: starts them when needed, restarts them after a loss, and sends them the problem when it changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewright.errors import CompilerMissing, KernelFailed
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.tuning import serialisation
from tilewright.tuning.problems import key_of
from tilewright.tuning.workers import FATAL, Message, Worker, WorkerLost

START_SECONDS, PROBLEM_SECONDS, COMPILE_SECONDS = 180.0, 300.0, 120.0
"""Times without an answer after which a process counts as hung."""


class Child:
    """A process that is started when needed and restarted after a loss; it receives the problem when that changes."""

    def __init__(self, machine: Machine, command: Sequence[str]) -> None:
        self.machine = machine
        self.command = command
        self.facts: dict[str, str] = {}
        self._worker: Worker | None = None
        self._problem = ""
        self._ended = False

    def kill(self) -> None:
        """Ends the process permanently."""
        self._ended = True
        if self._worker is not None:
            self._worker.kill()

    def close(self) -> None:
        """Ends the process and releases its pipes."""
        self.kill()
        if self._worker is not None:
            self._worker.close()

    def prepared(self, problem: Problem, first: Message, more: Message) -> tuple[Worker, str]:
        """The process, started with the message `first`, with the problem set; and an error about the problem, if any."""
        if self._worker is None or not self._worker.alive:
            if self._ended:
                raise WorkerLost("the measuring was ended")
            if self._worker is not None:
                self._worker.close()
            self._worker, self._problem = Worker(self.command), ""
            try:
                answer = self._worker.ask(first, START_SECONDS)
            except WorkerLost as error:
                answer = {"error": str(error)}
            if "error" in answer:
                self.refuse(answer["error"])
            self.facts = {name: str(fact) for name, fact in answer.items()}
        if self._problem != key_of(problem):
            answer = self._worker.ask({"do": "problem", "problem": serialisation.encode(problem), **more}, PROBLEM_SECONDS)
            if "error" in answer:
                return self._worker, f"the problem cannot be set up: {answer['error']}"
            self._problem = key_of(problem)
        return self._worker, ""

    def refuse(self, words: str) -> None:
        """Raises the error for a process that cannot start."""
        raise NotImplementedError


class CompilingProcess(Child):
    """Compiles one candidate after another."""

    def refuse(self, words: str) -> None:
        raise CompilerMissing(f"no process can compile candidates: {words}", "see `tilewright targets` for what the target needs")

    def compile(self, problem: Problem, schedule: Any, folder: Path) -> Message:
        """The answer for a candidate; see `compile_worker`. Raises WorkerLost if there is none."""
        worker, wrong = self.prepared(problem, {"do": "machine", "machine": serialisation.encode(self.machine)}, {})
        if wrong:
            return {"error": wrong}
        question = {"do": "compile", "schedule": serialisation.schedule_text(schedule), "folder": str(folder)}
        return {**worker.ask(question, COMPILE_SECONDS), "compiler": self.facts.get("compiler", "")}


class MeasuringProcess(Child):
    """Checks and times candidates on one GPU; `trial_seconds` is the time limit for one."""

    def __init__(self, machine: Machine, index: int, command: Sequence[str], seed: int, trial_seconds: float) -> None:
        super().__init__(machine, (*command, "--device", str(index)))
        self.index, self.seed, self.trial_seconds = index, seed, trial_seconds
        self._refused: dict[str, str] = {}

    def refuse(self, words: str) -> None:
        raise KernelFailed(f"no process can measure on GPU {self.index}: {words}", "check the GPU, its driver, and that PyTorch sees it")

    def trial(self, problem: Problem, program: Any, mode: str, limit: float) -> Message:
        """The answer for a compiled candidate; see `trial_worker`. Loss of the process also gives an answer."""
        question = {"do": "trial", "program": program, "mode": mode, "limit": limit if limit != float("inf") else None}
        return self._answer(problem, question, self.trial_seconds)

    def remeasure(self, problem: Problem, programs: Sequence[Any], rounds: int, mode: str) -> Message:
        """The answer for several candidates measured in turns."""
        question = {"do": "remeasure", "programs": list(programs), "rounds": rounds, "mode": mode}
        return self._answer(problem, question, self.trial_seconds * max(len(programs), 1))

    def _answer(self, problem: Problem, question: Message, seconds: float) -> Message:
        if key_of(problem) in self._refused:
            return {"error": self._refused[key_of(problem)]}
        try:
            worker, wrong = self.prepared(problem, {"do": "start", "machine": serialisation.encode(self.machine)}, {"seed": self.seed})
            if wrong:
                self._refused[key_of(problem)] = wrong
                return {"error": wrong}
            answer = worker.ask(question, seconds)
        except WorkerLost as error:
            return {"error": f"while measuring {error}"}
        if FATAL in answer:
            answer["error"] = f"the kernel failed: {answer['error']}"
        return answer
