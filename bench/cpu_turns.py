"""Schedules of random products of many rows, timed in turns in one process: for a CPU on which others work, too.

    python -m bench.cpu_turns --random 40 --seed 94000 [--instructions x86-avx2] [--seconds S] --data FILE
    python -m bench.cpu_turns --random 16 --seed 95000 --forests OLD.npz --name cpu_turns

Other work on a machine can only add to the time of a call. So candidates are called one after another, in a new random order each time, and a
candidate's time is the LOW quantile of its single calls: one call of a few milliseconds often is alone where a replay of `bench.cpu_choice`, of 10
ms or more, never is. Activations are rewritten before each call, and weights come from beyond the caches, as in mode "network" of trials.

Measured are the favourites of the models, of the package's forest, and of those of `--forests`, with an even sample of the rest. `--data` stores the
times as `bench.cpu_choice` does, to train with (`bench.cpu_learned`); printed, and written with `--name`, is what the first choice of each loses
against the best that was measured. A seed is either for training or for judging.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf, log2
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bench.common import write_results
from bench.cpu_choice import lines, problem, with_instructions_of
from tilewright.files import written
from tilewright.hardware import identified_machine
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.selection.choice import rank
from tilewright.selection.learned.cpu import MODEL, predicted, trained
from tilewright.selection.ranking import Ranking
from tilewright.tuning import compile_worker, serialisation
from tilewright.tuning.cpu_trial_worker import CpuServer, Loaded
from tilewright.tuning.sampling import evenly
from tilewright.tuning.workloads import FP32

ROWS, CHANNELS = (100, 4000), (64, 1024)
"""Ranges of rows and channels."""
IMAGE_TOKENS = 197
"""Rows for each image in the vision transformers on which we are judged: no draw has a multiple of it."""
LEAST_WORK, MOST_WORK = 8e6, 6e8
"""Operations: below them calls are too short, above them no call is alone on a busy machine."""
FEWEST_ROUNDS, MOST_ROUNDS, LOW = 24, 240, 0.04
MODE = "network"


def drawn_names(count: int, seed: int) -> list[str]:
    """Random linear layers, with an odd number of rows and the channels multiples of 16, half of them of 64: logarithms are uniform."""
    draw = random.Random(seed)

    def between(least: float, most: float) -> float:
        return float(2 ** draw.uniform(log2(least), log2(most)))

    names: list[str] = []
    while len(names) < count:
        rows = int(between(*ROWS)) | 1
        reduced, columns = (each * round(between(*CHANNELS) / each) for each in (draw.choice((16, 64)), draw.choice((16, 64))))
        name = f"linear:{rows},{reduced},{columns},{draw.choice((0, 1, 2))}"
        if rows % IMAGE_TOKENS and LEAST_WORK < 2 * rows * reduced * columns < MOST_WORK and name not in names:
            names.append(name)
    return names


class Turns:
    """Times candidates of one problem after another in this process, on one thread."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._compiling, self._calling = compile_worker.Server(), CpuServer(1)
        for server, request in ((self._compiling, "machine"), (self._calling, "start")):
            server({"do": request, "machine": serialisation.encode(machine)})

    def seconds(self, found: Problem, schedules: Sequence[Any], limit: float) -> np.ndarray:
        """Seconds of a call of each schedule, NaN if it does not compile; as many rounds as `limit` seconds allow, at least FEWEST_ROUNDS."""
        message = {"do": "problem", "problem": serialisation.encode(found), "seed": 1}
        self._compiling(message)
        self._calling(message)
        with TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:

            def built(number: int) -> dict[str, Any]:
                return dict(self._compiling.compile(serialisation.schedule_text(schedules[number]), Path(folder) / str(number)))

            answers = list(pool.map(built, range(len(schedules))))
            loaded = {number: self._calling.load(each["program"], MODE) for number, each in enumerate(answers) if "error" not in each}
        times: dict[int, list[float]] = {number: [] for number in loaded}
        order, end, rounds = np.random.default_rng(1), time.perf_counter() + limit, 0
        while rounds < FEWEST_ROUNDS or (rounds < MOST_ROUNDS and time.perf_counter() < end):
            for number in map(int, order.permutation(sorted(loaded))):
                times[number].append(_seconds_of_call(loaded[number], rounds))
            rounds += 1
        result = np.full(len(schedules), np.nan)
        for number, spent in times.items():
            result[number] = np.quantile(spent, LOW)
        return result


def _seconds_of_call(loaded: Loaded, turn: int) -> float:
    """Seconds of one call, with the buffers of this turn, after its activations were rewritten."""
    for tensor in loaded.written_before:
        tensor.mul_(1)
    start = time.perf_counter()
    for function, arguments, scalars in loaded.calls:
        function(arguments[turn % len(arguments)], scalars)
    return time.perf_counter() - start


def orders(ranking: Ranking, machine: Machine, forests: Sequence[Path]) -> dict[str, np.ndarray]:
    """Predicted seconds of all candidates by the models, and by each forest; the package's is "forest"."""
    found = {"models": np.concatenate([part.estimate.seconds for part in ranking.parts])}
    for name, path in (("forest", MODEL), *((path.stem, path) for path in forests)):
        known = trained(path)
        times = predicted(known.forest, ranking, machine, 1) if known is not None else None
        if times is not None:
            found[name] = times
    return found


def losses(by: Mapping[str, np.ndarray], seconds: np.ndarray) -> dict[str, float]:
    """What the first choice of each order loses against the best measured time; first choices that do not compile have none."""
    best = np.nanmin(seconds)
    found = {name: float(seconds[np.argmin(times)] / best - 1) for name, times in by.items()}
    return {name: loss for name, loss in found.items() if np.isfinite(loss)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--random", type=int, default=16, metavar="N", help="number of problems")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--top", type=int, default=7, help="favourites of each order")
    parser.add_argument("--evenly", type=int, default=6, help="other candidates")
    parser.add_argument("--forests", type=Path, nargs="*", default=[], help="files of further forests, such as an earlier one")
    parser.add_argument("--instructions", metavar="TARGET", help="this CPU with the instructions of one of the catalogue, such as x86-avx2")
    parser.add_argument("--limit", type=float, default=5.0, metavar="S", help="seconds of calls for each problem, or FEWEST_ROUNDS")
    parser.add_argument("--seconds", type=float, default=inf, metavar="S", help="begin no problem later than this")
    parser.add_argument("--data", type=Path, help="a file of JSON lines, compressed, for training; problems that it has are left out")
    parser.add_argument("--name", help="of the file of results; none without it")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    machine = identified_machine("native")
    if options.instructions is not None:
        machine = with_instructions_of(machine, identified_machine(options.instructions))
    turns = Turns(machine)
    data = lines(options.data) if options.data and options.data.exists() else []
    rows: list[dict[str, Any]] = []
    for name in drawn_names(options.random, options.seed):
        if time.monotonic() > end or any(line["layer"] == name for line in data):
            continue
        found = problem(name, machine, 1)
        ranking = rank(found, machine, threads=1)
        by = orders(ranking, machine, options.forests)
        liked = [int(position) for times in by.values() for position in np.argsort(times, kind="stable")[: options.top]]
        positions = list(dict.fromkeys([*liked, *map(int, evenly(ranking, options.evenly, seed=1))]))
        schedules = [ranking.choice(position).schedule for position in positions]
        seconds = np.full(ranking.candidates, np.nan)
        seconds[positions] = turns.seconds(found, schedules, options.limit)
        best = int(np.nanargmin(seconds))
        chosen = {order: str(ranking.choice(int(np.argmin(times))).schedule) for order, times in by.items()}
        rows.append(
            {"layer": name, "loss": losses(by, seconds), "chosen": chosen, "best": str(ranking.choice(best).schedule), "best us": 1e6 * seconds[best]}
        )
        text = ", ".join(f"{order} {100 * loss:.1f} %" for order, loss in rows[-1]["loss"].items())
        print(f"{name}: {text}; best {rows[-1]['best']}, {1e6 * seconds[best]:.0f} us", flush=True)
        times = {
            serialisation.schedule_text(each): float(f"{seconds[at]:.5g}")
            for at, each in zip(positions, schedules, strict=True)
            if np.isfinite(seconds[at])
        }
        circumstances = {"beside": 1, "threads": 1, "mode": MODE, "only": None, "precision": FP32}
        data.append({"layer": name, "machine": serialisation.encode(machine), **circumstances, "times": times})
        if options.data:
            with written(options.data) as file:
                file.write(gzip.compress("".join(json.dumps(line) + "\n" for line in data).encode(), mtime=0))
    for order in dict.fromkeys(order for row in rows for order in row["loss"]):
        own = [100 * row["loss"][order] for row in rows if order in row["loss"]]
        print(f"{order}: mean {statistics.fmean(own):.1f} %, median {statistics.median(own):.1f} %, largest {max(own):.1f} % of {len(own)}")
    if options.name:
        write_results(options.name, {**vars(options), "forests": list(map(str, options.forests)), "data": str(options.data)}, rows)


if __name__ == "__main__":
    main()
