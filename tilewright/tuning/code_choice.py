"""Choosing by compiled code: if the models predict nearly the same time for a CPU contraction's first candidates, the score of their code decides.

The cheap stage, the models over the whole space in NumPy, passes its first candidates to the expensive one (`selection/search.py::rescored`). The
spaces of CPU contractions have at most some ten thousand candidates, so all are ranked and no evolutionary search is needed. Separate processes
compile and read code, and leave the chosen kernel in the kernel cache. Where the learned model (`selection/learned/cpu.py`) was trained on
measurements of this core and these vectors, it decides alone. If code cannot be read (no objdump for the target, data-dependent control flow), the
models decide.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from tilewright import settings
from tilewright.analysis.cpu.assembly import disassembler
from tilewright.errors import CompilerMissing
from tilewright.hardware.machine import Machine
from tilewright.hardware.pipelines import PIPELINES
from tilewright.ir.problem import Problem
from tilewright.selection.code_score import MODELS, coefficients_of, linear
from tilewright.selection.ranking import Choice, Ranking
from tilewright.selection.search import rescored
from tilewright.toolchain.compilers import CCompiler, identity_of
from tilewright.tuning import serialisation
from tilewright.tuning.trial_processes import Child
from tilewright.tuning.workers import Message, WorkerLost

FAVOURITES = 2
"""Maximum number of candidates to compile and score. This and `CLOSE` are the fewest with which choices of measured problems are as good as with more
(`bench.code_choices`)."""
CLOSE = 0.05
"""Fraction by which a candidate's predicted time may exceed that of the models' first to be compiled and scored."""
MARGIN = 0.05
"""Fraction by which another score must be better to replace the models' first choice."""
WORTH_SECONDS = 3e-5
"""Predicted time below which a region is left to the models: a better choice would save less than a kernel call costs."""
SCORER = ("-m", "tilewright.tuning.score_worker")
SCORE_SECONDS = 60.0
"""Time without an answer after which a process counts as hung."""


def reads_code(machine: Machine) -> bool:
    """Whether choosing by code is possible and enabled: for a CPU with a pipeline table and coefficients for its architecture."""
    return settings.read_code() and not machine.is_gpu and machine.pipeline in PIPELINES and (MODELS / f"cpu_{machine.architecture}.json").exists()


def tools(machine: Machine) -> str:
    """The programs that compile and read the code of candidates, with versions; missing programs are named as missing."""
    identities: tuple[Callable[[], str], ...] = (lambda: CCompiler.find(machine).identity, lambda: identity_of(disassembler(machine)))
    found = []
    for identity in identities:
        try:
            found.append(identity())
        except (CompilerMissing, OSError):
            found.append("none")
    return ", ".join(found)


class ScoringProcess(Child):
    """Compiles and reads one candidate after another."""

    def refuse(self, words: str) -> None:
        raise WorkerLost(words)

    def terms(self, problem: Problem, choice: Choice, threads: int) -> Message:
        """The answer for a candidate; see `score_worker`."""
        worker, wrong = self.prepared(problem, {"do": "machine", "machine": serialisation.encode(self.machine)}, {})
        if wrong:
            return {"error": wrong}
        question = {"do": "score", "schedule": serialisation.schedule_text(choice.schedule), "threads": threads}
        return worker.ask({**question, "seconds": choice.seconds, "terms": dict(choice.terms)}, SCORE_SECONDS)


class CodeScores:
    """Processes that score candidates by their code, started when first needed; a context manager that ends them."""

    def __init__(self, machine: Machine, workers: int | None = None, command: Sequence[str] = SCORER) -> None:
        count = workers or min(FAVOURITES, settings.available_cores())
        self._machine = machine
        self._processes = [ScoringProcess(machine, command) for _ in range(count)]
        self._idle: queue.SimpleQueue[ScoringProcess] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="tilewright-score")

    def __enter__(self) -> CodeScores:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:  # on any exception, including an interrupt, no answer is awaited
            for process in self._processes:
                process.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.close()

    def best(self, problem: Problem, ranking: Ranking, threads: int, count: int = FAVOURITES) -> tuple[Choice, bool]:
        """The candidate with the best score among those of the ranking's first `count` whose predictions are close. The ranking's first is kept if
        no other is close, if its score is within `MARGIN` of the best, if it has no score, if the region is too short, or if all are of schemas whose
        candidates scores do not order. A learned model, which corrects only cores and vectors that it was trained on, ranks better and decides alone.
        The second result is False if a process hung or was lost, so that the choice may not be reproducible.

        Raises:
            Unsuitable: if no candidate is feasible.
        """
        favourite = ranking.first()
        if ranking.predicted is not None or favourite.seconds < WORTH_SECONDS:
            return favourite, True
        close = [choice for choice in islice(ranking, count) if choice.seconds <= (1 + CLOSE) * favourite.seconds]
        if len(close) < 2 or not any(choice.schema.scored for choice in close):
            return favourite, True
        coefficients = coefficients_of(self._machine.architecture)
        lost = threading.Event()

        def score(schedule: Any) -> float:
            choice = ranking.find(schedule)
            process = self._idle.get()
            try:
                answer = process.terms(problem, choice, threads) if choice is not None else {}
            except WorkerLost:
                answer = {"hung": True}
            finally:
                self._idle.put(process)
            if answer.get("hung"):
                lost.set()
            return linear(answer["terms"], coefficients) if "terms" in answer else float("inf")

        found = rescored(ranking, score, len(close), self._pool)
        its = next((entry.score for entry in found if entry.choice.schedule == favourite.schedule), None)
        chosen = found[0].choice if its is not None and found[0].score < (1 - MARGIN) * its else favourite
        return chosen, not lost.is_set()
