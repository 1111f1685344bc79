"""Choosing by the code of candidates: the models' favourites of a CPU's contraction are compiled, their code is read, and the best score is taken.

The cheap stage, the models over the whole space in numpy, feeds the expensive one with its first few (`selection/search.py::rescored`): the spaces of
CPU contractions have at most some ten thousand candidates, so all of them are ranked and no evolution is needed. Processes compile and read; what is
chosen is in the kernel cache then. Where a learned part has ranked (`selection/learned/cpu.py`), it decides. Where
code cannot be read (no objdump for the target, a flow of control that depends on data), the models do.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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

FAVOURITES = 8
"""Candidates whose code is read."""
MARGIN = 0.05
"""The models' first choice stands unless another's score is better by this share."""
WORTH_SECONDS = 3e-5
"""Regions that are predicted to take less are left to the models: a better choice would save less than calling a kernel costs."""
SCORER = ("-m", "tilewright.tuning.score_worker")
SCORE_SECONDS = 60.0
"""After so long without an answer a process counts as hanging."""


def reads_code(machine: Machine) -> bool:
    """Whether code for the machine can be read here, and is wanted: a CPU with a table of its pipelines and coefficients for its architecture."""
    return settings.read_code() and not machine.is_gpu and machine.pipeline in PIPELINES and (MODELS / f"cpu_{machine.architecture}.json").exists()


def tools(machine: Machine) -> str:
    """What compiles and reads the code of candidates, with versions; what is missing is said to be."""
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
        """The answer to a candidate; see `score_worker`."""
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
        if kind is not None:  # an interruption among them: no answer is waited for
            for process in self._processes:
                process.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.close()

    def best(self, problem: Problem, ranking: Ranking, threads: int, count: int = FAVOURITES) -> tuple[Choice, bool]:
        """The candidate with the best score among the ranking's first `count`, or the ranking's first where that is as good but for `MARGIN`, has no
        score, where the region is not worth it, or where the coefficients were not fitted to its schema. What was learned from measurements ranks
        better (`selection/learned/cpu.py`), so that it decides alone where there is any. The second result is False where something hung or was lost
        on the way, so that the choice may be another one another time.

        Raises:
            Unsuitable: if no candidate is feasible.
        """
        favourite = ranking.first()
        fitted = all(part.schema.scored for part in ranking.first_parts(count))
        if ranking.predicted is not None or favourite.seconds < WORTH_SECONDS or not fitted:
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

        found = rescored(ranking, score, count, self._pool)
        its = next((entry.score for entry in found if entry.choice.schedule == favourite.schedule), None)
        chosen = found[0].choice if its is not None and found[0].score < (1 - MARGIN) * its else favourite
        return chosen, not lost.is_set()
