"""Measures about 60 candidates of three convolution layers on the GPU present, and fails on anything that is wrong.

    python scripts/trials_smoke.py [--devices 0] [--candidates 20] [--target cuda]

Prints each layer's best candidates, the time per trial, and how much a second, interleaved measurement differs from the first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tilewright.hardware import machine as find_machine
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.selection.choice import rank
from tilewright.tuning.problems import convolution_problem
from tilewright.tuning.trials import Job, Outcome, Timing, Trials

LAYERS = {"R6": (128, 128, 28, 28, 3, 1), "R12": (512, 512, 7, 7, 3, 1), "D1": (32, 3, 108, 108, 3, 1)}


def tied(first: Timing, second: Timing) -> bool:
    """Whether the medians differ by no more than the wider of the two spreads, so that the measurements do not tell which is faster."""
    return abs(first.median - second.median) <= max(first.spread, second.spread)


def jobs_of(name: str, problem: Problem, machine: Machine, count: int) -> Iterator[Job]:
    """Half of the candidates from the top of the ranking, the others at increasing distances."""
    ranking = rank(problem, machine)
    top = count // 2
    wanted = {*range(top), *(int(top * (ranking.candidates / top) ** (k / (count - top))) for k in range(1, count - top + 1))}
    for position, choice in enumerate(ranking):
        if position in wanted:
            yield Job(problem, choice.schedule, (name, position, choice.seconds))
        if position >= max(wanted):
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="0")
    parser.add_argument("--candidates", type=int, default=20, help="of each layer")
    parser.add_argument("--target", default="cuda")
    options = parser.parse_args()
    machine = find_machine(options.target)
    problems = {name: convolution_problem(*layer) for name, layer in LAYERS.items()}
    jobs = [job for name, problem in problems.items() for job in jobs_of(name, problem, machine, options.candidates)]
    start = time.perf_counter()
    first, outcomes = 0.0, []
    with Trials(machine, [int(index) for index in options.devices.split(",")]) as trials:
        for outcome in trials.measure(jobs):
            first = first or time.perf_counter()
            outcomes.append(outcome)
        spent = time.perf_counter() - first
        print(f"{len(outcomes)} trials: first after {first - start:.1f} s, then {1e3 * spent / max(len(outcomes) - 1, 1):.1f} ms a trial")
        if outcomes:
            print(f"environment: {dict(outcomes[-1].environment)}")
        start = time.perf_counter()
        list(trials.measure(jobs[: options.candidates]))
        print(f"again, processes running: {1e3 * (time.perf_counter() - start) / options.candidates:.1f} ms a trial, compiling included")
        for name in LAYERS:
            own = sorted((o for o in outcomes if o.job.key[0] == name and o.timing), key=lambda o: o.seconds)  # type: ignore[index]
            if own:
                report(name, own, trials)
    bad = [outcome for outcome in outcomes if outcome.status != "measured"]
    for outcome in bad:
        print(f"FAILED {outcome.job.key}: {outcome.status}: {outcome.reason}: {outcome.schedule}")
    return 1 if bad or len(outcomes) != len(jobs) else 0


def report(name: str, own: list[Outcome], trials: Trials) -> None:
    """The best candidates of a layer, measured again cold (interleaved) and warm."""
    best = own[:6]
    again = trials.remeasure([outcome.job for outcome in best])
    warm = trials.remeasure([outcome.job for outcome in best], mode="warm")
    print(f"{name}: cold us (spread) | in turns (spread) | warm | predicted | rank")
    for outcome, second, third in zip(best, again, warm, strict=True):
        if not (outcome.timing and second.timing and third.timing):
            print(f"  FAILED to measure again: {second.reason} {third.reason}")
            continue
        print(
            f"  {1e6 * outcome.seconds:8.2f} ({1e6 * outcome.timing.spread:5.2f}) | "
            f"{1e6 * second.seconds:8.2f} ({1e6 * second.timing.spread:5.2f}) | {1e6 * third.seconds:8.2f} | "
            f"{1e6 * outcome.job.key[2]:8.2f} | {outcome.job.key[1]:6} {outcome.schedule}"  # type: ignore[index]
        )
    times = [second.timing for second in again if second.timing]
    if times:
        fastest = min(times, key=lambda timing: timing.median)
        print(f"  {sum(tied(fastest, timing) for timing in times) - 1} tied with the best in turns")
        differences = [abs(o.seconds / s.seconds - 1) for o, s in zip(best, again, strict=True)]
        print(f"  first and second measurement differ by {100 * statistics.median(differences):.1f} % (median)")
    errors = [outcome.relative_error for outcome in own if outcome.relative_error is not None]
    print(f"  slowest measured {1e6 * own[-1].seconds:.1f} us; {sum(o.stopped for o in own)} stopped early; largest relative error {max(errors):.1e}")


if __name__ == "__main__":
    sys.exit(main())
