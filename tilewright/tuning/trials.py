"""Measuring candidates: a pool of processes compiles ahead, one process per GPU checks and times, and failures are ordinary outcomes."""

from __future__ import annotations

import itertools
import queue
import shutil
import statistics
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from tilewright import settings
from tilewright.errors import CacheError, TargetNotPresent
from tilewright.hardware import is_present, planned_threads
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.library.schema import LibrarySchedule
from tilewright.partition.apart import Apart
from tilewright.system.scratch import Scratch
from tilewright.tuning.problems import key_of
from tilewright.tuning.trial_processes import CompilingProcess, MeasuringProcess
from tilewright.tuning.workers import Message, WorkerLost

GIVE_UP = 4.0
"""Ratio to the best time above which a candidate is timed only once."""
FINALISTS, NEAR = 4, 1.1
"""Maximum number of candidates of a problem that are measured again in turns, and their maximum time relative to the best."""
FAR = 2.0
"""A candidate is measured again if its measured time over its predicted one differs by more than this factor from what is usual in its region: models
are wrong alike for similar candidates, and other work on the machine delays one of them."""
ROUNDS = 9
AHEAD = 4
"""Maximum candidates per compiling process that are compiled but not yet measured."""
TRIAL_SECONDS = 30.0
"""Time after which a candidate counts as hung."""
MODES = ("cold", "network", "warm")
"""Modes, which determine where inputs and weights come from; see `tilewright.tuning.trial_worker`."""
TUNING_MODE = "network"
"""Mode of the measurements that decide between schedules of a network's regions."""
MEASURER = ("-m", "tilewright.tuning.trial_worker")
CPU_MEASURER = ("-m", "tilewright.tuning.cpu_trial_worker")
COMPILER = ("-m", "tilewright.tuning.compile_worker")


@dataclass(frozen=True)
class Job:
    """One candidate of a problem; `key` is for the caller's use. `predicted_seconds`: 0 without a prediction."""

    problem: Problem
    schedule: Any
    key: Hashable = None
    predicted_seconds: float = 0.0


@dataclass(frozen=True)
class Timing:
    """Seconds per call over several replays: median, quartiles, and the number of replays."""

    median: float
    lower: float
    upper: float
    count: int

    @classmethod
    def of(cls, times: Sequence[float]) -> Timing:
        if len(times) == 1:
            return cls(times[0], times[0], times[0], 1)
        lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
        return cls(median, lower, upper, len(times))

    @property
    def spread(self) -> float:
        return self.upper - self.lower


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job. `status`: "measured", "wrong" (incorrect result), or "failed" (to compile, load, run, or finish in time); `reason` says
    why.

    `code` names the generated code, `schedule` is readable text; `resources` are the compiler's figures by kernel (registers, shared_bytes, ...);
    `stopped`: timed only once, because it is far slower than the best; `final`: measured again, in turns with others near the best. `environment`:
    "gpu", "driver", "compiler"."""

    job: Job
    status: str
    reason: str = ""
    timing: Timing | None = None
    mode: str = "cold"
    code: str = ""
    schedule: str = ""
    resources: Mapping[str, Mapping[str, int]] = field(default_factory=lambda: MappingProxyType({}))
    relative_error: float | None = None
    stopped: bool = False
    final: bool = False
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def seconds(self) -> float:
        """The median; infinite if nothing was measured."""
        return self.timing.median if self.timing is not None else float("inf")


class Trials:
    """Processes that compile and measure for one machine; a context manager that ends them.

    `devices` are indices of GPUs, each with its own process; jobs of one problem go to one GPU, so they should be consecutive. On a CPU, `threads`
    threads run each kernel, and nothing is measured while anything is compiled. `measurer` and `compiler` are the commands of the child processes,
    replaced in tests. `trial_seconds`: time after which a candidate counts as hung.
    """

    def __init__(
        self,
        machine: Machine,
        devices: Sequence[int] = (0,),
        compile_workers: int | None = None,
        *,
        threads: int | None = None,
        seed: int = 0,
        trial_seconds: float = TRIAL_SECONDS,
        measurer: Sequence[str] | None = None,
        compiler: Sequence[str] = COMPILER,
    ) -> None:
        if measurer is None and not is_present(machine):
            raise TargetNotPresent(
                f"measuring candidates for {machine.name} needs that machine, and it is not here",
                "run there, or use trials=0: the models and existing records decide",
            )
        self._alone = not machine.is_gpu
        if self._alone:
            devices = (planned_threads(machine, threads),)
        measurer = measurer or (MEASURER if machine.is_gpu else CPU_MEASURER)
        try:
            self._scratch = Scratch()
        except OSError as error:
            raise CacheError(f"there is no folder for candidates: {error}", "set TMPDIR to a folder that can be written") from error
        count = compile_workers or settings.available_cores()
        self._compilers = [CompilingProcess(machine, compiler) for _ in range(count)]
        self._idle: queue.SimpleQueue[CompilingProcess] = queue.SimpleQueue()
        for handle in self._compilers:
            self._idle.put(handle)
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="tilewright-compile")
        self._devices = [MeasuringProcess(machine, device, measurer, seed, trial_seconds) for device in devices]
        self._numbers = itertools.count()  # `next` is atomic, also with several threads
        self.compiled: Callable[[], object] = lambda: None
        """Called by `measure` on a CPU whenever a candidate has been compiled, since it measures none before."""

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process."""
        self._kill()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for handle in (*self._compilers, *self._devices):
            handle.close()
        self._scratch.close()

    def _kill(self) -> None:
        for handle in (*self._compilers, *self._devices):
            handle.kill()

    def measure(self, jobs: Iterable[Job], mode: str = "cold", finals: bool = False) -> Iterator[Outcome]:
        """Outcomes in order of completion. `jobs` is read in the caller's thread, as far ahead as the compilers need work. With `finals`, candidates
        near the best of their problem, and those far from their predictions, have a second outcome, which is `final`.

        Raises:
            TargetNotPresent, KernelFailed, CompilerMissing: if a process cannot start.
        """
        if self._alone:
            yield from self._measure_alone(jobs, mode, finals)
            return
        results: queue.SimpleQueue[Outcome | BaseException] = queue.SimpleQueue()
        groups: queue.SimpleQueue[_Group | None] = queue.SimpleQueue()
        threads = [threading.Thread(target=_serve_groups, args=(device, groups, results, mode, finals), daemon=True) for device in self._devices]
        for thread in threads:
            thread.start()
        waiting, outstanding = iter(jobs), 0
        group: _Group | None = None
        more, finished = True, False
        try:
            while more or outstanding:
                while more and outstanding < AHEAD * len(self._compilers):
                    job = next(waiting, None)
                    if job is None:
                        more = False
                    if group is not None and (job is None or key_of(job.problem) != key_of(group.problem)):
                        group.close()
                        group = None
                    if job is not None:
                        if group is None:
                            group = _Group(job.problem)
                            groups.put(group)
                        group.add(job, self._pool.submit(self._compile, job))
                        outstanding += 1
                if outstanding:
                    result = _outcome_of(results.get())
                    outstanding -= not result.final
                    yield result
            for _ in threads:
                groups.put(None)
            for thread in threads:
                thread.join()
            while not results.empty():
                yield _outcome_of(results.get())
            finished = True
        finally:
            if not finished:  # interrupted: pending work is not awaited
                if group is not None:
                    group.close()
                for _ in threads:
                    groups.put(None)
                self._kill()

    def _measure_alone(self, jobs: Iterable[Job], mode: str, finals: bool) -> Iterator[Outcome]:
        """Like `measure`, one problem at a time: all its candidates are compiled before the first is measured."""
        for _, same in itertools.groupby(jobs, key=lambda job: key_of(job.problem)):
            own = list(same)
            group = _Group(own[0].problem)
            compiled = [self._pool.submit(self._compile, job) for job in own]
            for _ in as_completed(compiled):
                self.compiled()
            for job, future in zip(own, compiled, strict=True):
                group.add(job, future)
            group.close()
            yield from _served(self._devices[0], group, mode, finals)

    def remeasure(self, jobs: Sequence[Job], rounds: int = ROUNDS, mode: str = "cold") -> list[Outcome]:
        """Measures jobs of one problem again, in turns on the first GPU: each round times every candidate, so that drift affects all equally.

        Returns outcomes in the order of the jobs. Jobs that do not compile are failures; if the process is lost, all are.
        """
        if len({key_of(job.problem) for job in jobs}) > 1:
            raise ValueError("candidates of several problems cannot be measured in turns")
        compiled = [future.result() for future in [self._pool.submit(self._compile, job) for job in jobs]]
        ready = [answer for answer in compiled if "error" not in answer]
        device = self._devices[0]
        answer = device.remeasure(jobs[0].problem, [entry["program"] for entry in ready], rounds, mode) if ready else {"times": []}
        times = iter(answer.get("times", ()))
        outcomes = []
        for job, entry in zip(jobs, compiled, strict=True):
            if "error" in entry or "error" in answer:
                outcomes.append(_outcome(job, entry, entry if "error" in entry else answer, mode, device))
            else:
                outcomes.append(_outcome(job, entry, {"times": next(times)}, mode, device))
            shutil.rmtree(entry["folder"], ignore_errors=True)
        return outcomes

    def _compile(self, job: Job) -> Message:
        """The answer of the compiling process; errors are answers too."""
        handle = self._idle.get()
        folder = self._scratch.path / str(next(self._numbers))
        try:
            return {**handle.compile(job.problem, job.schedule, folder), "folder": str(folder)}
        except WorkerLost as error:
            return {"error": f"while compiling {error}", "folder": str(folder)}
        finally:
            self._idle.put(handle)


class _Group:
    """The jobs of one problem, as their binaries become ready."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.ready: queue.SimpleQueue[tuple[Job, Future[Message]] | int] = queue.SimpleQueue()
        self._count = 0

    def add(self, job: Job, compiled: Future[Message]) -> None:
        self._count += 1
        compiled.add_done_callback(lambda future: self.ready.put((job, future)))

    def close(self) -> None:
        """Signals that there are no further jobs."""
        self.ready.put(self._count)

    def __iter__(self) -> Iterator[tuple[Job, Future[Message]]]:
        total, seen = None, 0
        while total is None or seen < total:
            entry = self.ready.get()
            if isinstance(entry, int):
                total = entry
            else:
                seen += 1
                yield entry


def _outcome_of(result: Outcome | BaseException) -> Outcome:
    """The outcome; raises the exception with which a thread failed."""
    if isinstance(result, BaseException):
        raise result
    return result


def _serve_groups(device: MeasuringProcess, groups: Any, results: Any, mode: str, finals: bool) -> None:
    """Body of a GPU's thread: handles one problem after another, and its candidates as they are compiled."""
    try:
        while (group := groups.get()) is not None:
            for outcome in _served(device, group, mode, finals):
                results.put(outcome)
    except BaseException as error:  # re-raised in the caller's thread
        results.put(error)


def _served(device: MeasuringProcess, group: _Group, mode: str, finals: bool) -> Iterator[Outcome]:
    """The outcomes of a problem's candidates as they are compiled, and then those of the finalists."""
    measured: list[tuple[Outcome, Message]] = []
    best = float("inf")
    for job, future in group:
        if future.cancelled():
            return
        compiled = future.result()
        answer = compiled if "error" in compiled else device.trial(job.problem, compiled["program"], mode, GIVE_UP * best)
        outcome = _outcome(job, compiled, answer, mode, device)
        best = min(best, outcome.seconds)
        yield outcome
        if finals and outcome.timing:
            measured.append((outcome, compiled))
        else:
            shutil.rmtree(compiled["folder"], ignore_errors=True)
    finalists = _finalists(sorted(measured, key=lambda entry: entry[0].seconds))
    if finalists:
        answer = device.remeasure(group.problem, [compiled["program"] for _, compiled in finalists], ROUNDS, mode)
        for (outcome, _), times in zip(finalists, answer.get("times", ()), strict=False):
            yield replace(outcome, timing=Timing.of(times), stopped=False, final=True)
    for _, compiled in measured:
        shutil.rmtree(compiled["folder"], ignore_errors=True)


def _finalists(ranked: Sequence[tuple[Outcome, Message]]) -> list[tuple[Outcome, Message]]:
    """Those of some measured candidates, fastest first, that are measured again. If the first is a library's, or a chain's regions apart, the fastest
    of the others is among them, however slow: it is replaced only by what is faster in turns with it."""
    ours = next((place for place, (outcome, _) in enumerate(ranked) if not isinstance(outcome.job.schedule, (LibrarySchedule, Apart))), None)
    places = doubtful([outcome.seconds for outcome, _ in ranked], [outcome.job.predicted_seconds for outcome, _ in ranked])
    if ours:
        places = sorted({0, ours, *places})
    return [ranked[place] for place in places]


def doubtful(seconds: Sequence[float], predicted: Sequence[float]) -> list[int]:
    """Which candidates of a problem are to be measured again, in turns with the first: those near the first, if there are others, and those far from
    their predictions (`FAR`). The first is far also if it differs that much from its own prediction, since it decides. `seconds`: ascending;
    `predicted`: 0 where there is no prediction, which is never far."""
    near = [place for place, own in enumerate(seconds[:FINALISTS]) if own <= NEAR * seconds[0]]
    ratios = {place: own / expected for place, (own, expected) in enumerate(zip(seconds, predicted, strict=True)) if expected}
    usual = statistics.median(ratios.values()) if ratios else 1.0
    far = [place for place, ratio in ratios.items() if _differs(ratio, usual) or (place == 0 and _differs(ratio, 1.0))]
    return sorted({0, *far, *near}) if far or len(near) > 1 else []


def _differs(ratio: float, usual: float) -> bool:
    return not 1 / FAR <= ratio / usual <= FAR


def _outcome(job: Job, compiled: Message, answer: Message, mode: str, device: MeasuringProcess) -> Outcome:
    times = answer.get("times")
    status = "measured" if times else "wrong" if answer.get("wrong") else "failed"
    return Outcome(
        job,
        status,
        answer.get("error", ""),
        Timing.of(times) if times else None,
        mode,
        compiled.get("code", ""),
        compiled.get("schedule", str(job.schedule)),
        MappingProxyType(compiled.get("resources", {})),
        answer.get("relative_error"),
        bool(answer.get("stopped", False)),
        False,
        MappingProxyType({"compiler": compiled.get("compiler", ""), **device.facts}),
    )
