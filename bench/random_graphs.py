"""Random graphs of two to nine operators, compiled and compared with float64: how many are right.

    python -m bench.random_graphs --target native --count 20000 --seconds 540 --json random_graphs_native
    python -m bench.random_graphs --target h200 --count 500                    # no GPU: planned for one, kernels interpreted
    python -m bench.random_graphs --target native --seed 1234                  # one graph, printed, and shrunk if it fails
    python -m bench.random_graphs --merge a.json b.json --json random_graphs_native

`tests/random_graphs.py` makes the graph of a seed. Eight at a time form one program, since exporting eight costs little more than one; if any of them
fails, each is run alone. Everything runs in worker processes, one per core, so that a crash or a hanging graph is a result.
Outcomes: right; wrong; refused (a TilewrightError); raised (any other exception); fell back (a region ran through PyTorch because of an internal
fault or a kernel that did not compile; results are right); crashed; hung; wrong together (only together with the seven others).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOGETHER = 8
SECONDS_ALONE = 60.0
"""A graph that takes longer counts as hanging."""
LIFETIME = 400
"""Graphs that one process compiles: PyTorch's exporter leaks some memory for each."""


# --- the worker -------------------------------------------------------------------------------------------------------


def outcomes(seeds: Sequence[int], target: str) -> list[dict[str, Any]]:
    """The outcome of each graph, all compiled as one program."""
    from tests.random_graphs import random_case
    from tests.random_runs import compiled_faults, interpreted_faults
    from tilewright.errors import TilewrightError

    cases = [random_case(seed) for seed in seeds]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if target in ("native", "cuda"):
                faults = compiled_faults(cases, target, threads=1 + seeds[0] // TOGETHER % 2)
            else:
                faults = interpreted_faults(cases, target)
        except TilewrightError as error:
            return [{"seed": seed, "outcome": "refused", "detail": f"{type(error).__name__}: {error}"[:2000]} for seed in seeds]
        except Exception as error:
            said = "".join(traceback.format_exception(error, limit=-4))[-2000:]
            return [{"seed": seed, "outcome": "raised", "detail": said} for seed in seeds]
    lost = [str(w.message) for w in caught if "through PyTorch" in str(w.message) or type(w.message).__name__ == "InternalFault"]
    results = []
    for seed, own in zip(seeds, faults, strict=True):
        outcome = "wrong" if own else "fell back" if lost else "right"
        results.append({"seed": seed, "outcome": outcome, "detail": "\n".join(own or lost)[:2000]})
    return results


def serve(target: str, core: int) -> None:
    """The worker's side: answers ranges of seeds, on one core, with a kernel cache of its own that is emptied after each."""
    import torch

    from tilewright.tuning.workers import serve as answer_all

    sys.path.insert(0, str(ROOT))
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[core % len(cores)]})
    torch.set_num_threads(1)

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"results": outcomes(message["seeds"], target)}
        finally:
            shutil.rmtree(Path(os.environ["TILEWRIGHT_CACHE"]) / "kernels", ignore_errors=True)

    answer_all(answer)


# --- the parent -------------------------------------------------------------------------------------------------------


class Campaign:
    """Distributes ranges of seeds to workers and collects the outcomes."""

    def __init__(self, target: str, first: int, count: int, seconds: float, together: int) -> None:
        self.target, self.together = target, together
        self.deadline = time.monotonic() + seconds
        self.waiting = [range(seed, min(seed + together, first + count)) for seed in range(first, first + count, together)][::-1]
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.others: list[dict[str, Any]] = []
        self.done: list[range] = []

    def next(self) -> range | None:
        with self.lock:
            return self.waiting.pop() if self.waiting and time.monotonic() < self.deadline else None

    def keep(self, seeds: range, results: Sequence[dict[str, Any]]) -> None:
        with self.lock:
            self.done.append(seeds)
            for result in results:
                self.counts[result["outcome"]] += 1
                if result["outcome"] != "right":
                    self.others.append(result)
                    print(f"seed {result['seed']}: {result['outcome']}\n{result['detail']}", file=sys.stderr, flush=True)

    def work(self, core: int, folder: Path) -> None:
        """Runs one worker process after another until no seeds are left."""
        from tilewright.tuning.workers import Worker, WorkerLost

        worker: Worker | None = None
        asked = 0

        def ask(seeds: Sequence[int]) -> list[dict[str, Any]]:
            nonlocal worker, asked
            if worker is not None and (asked > LIFETIME or not worker.alive):
                worker.close()
                worker = None
            if worker is None:
                command = ["-m", "bench.random_graphs", "--serve", str(core), "--target", self.target, "--cache", str(folder / str(core))]
                worker, asked = Worker(command), 0
            asked += len(seeds)
            try:
                answer = worker.ask({"seeds": list(seeds)}, SECONDS_ALONE * (1 if len(seeds) == 1 else 3))
            except WorkerLost as lost:
                worker.close()
                worker = None
                outcome = "hung" if "no answer" in str(lost) else "crashed"
                return [{"seed": seed, "outcome": outcome, "detail": str(lost)} for seed in seeds]
            if "error" in answer:
                return [{"seed": seed, "outcome": "raised", "detail": answer["error"]} for seed in seeds]
            results: list[dict[str, Any]] = answer["results"]
            return results

        while (seeds := self.next()) is not None:
            results = ask(seeds)
            if len(seeds) > 1 and any(result["outcome"] != "right" for result in results):
                alone = [one for seed in seeds for one in ask([seed])]
                if all(one["outcome"] == "right" for one in alone):
                    alone = [{**one, "outcome": f"{one['outcome']} together"} if one["outcome"] != "right" else one for one in results]
                results = alone
            self.keep(seeds, results)
        if worker is not None:
            worker.close()


def run(target: str, first: int, count: int, processes: int, seconds: float, together: int = TOGETHER) -> dict[str, Any]:
    """One entry of the results: the completed seeds, the number of each outcome, and everything that was not right."""
    began = time.monotonic()
    campaign = Campaign(target, first, count, seconds, together)
    with tempfile.TemporaryDirectory(prefix="random-graphs-") as folder:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        threads = [threading.Thread(target=campaign.work, args=(core, Path(folder))) for core in range(processes)]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                next((thread for thread in threads if thread.is_alive()), threads[0]).join(timeout=60)
                print(f"{sum(campaign.counts.values())} of {count} after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        except KeyboardInterrupt:  # completed results count
            campaign.deadline = 0
        for thread in threads:
            thread.join()
    return {
        "target": target,
        "seeds": _joined(campaign.done),
        "graphs": sum(campaign.counts.values()),
        "counts": dict(campaign.counts),
        "seconds": round(time.monotonic() - began, 1),
        "processes": processes,
        "not_right": sorted(campaign.others, key=lambda result: result["seed"]),
    }


def _joined(ranges: Sequence[range]) -> list[list[int]]:
    """[first, last] of the runs of seeds that the ranges cover."""
    runs: list[list[int]] = []
    for one in sorted(ranges, key=lambda r: r.start):
        if runs and runs[-1][1] == one.start - 1:
            runs[-1][1] = one.stop - 1
        else:
            runs.append([one.start, one.stop - 1])
    return runs


def merged(paths: Sequence[Path]) -> dict[str, Any]:
    """Merges the documents of several runs: the facts of the first, the results of all. Raises ValueError if targets or commits differ."""
    documents = [json.loads(path.read_text()) for path in paths]
    if len({document["commit"] for document in documents}) > 1:
        raise ValueError("the files are of different commits")
    if len({entry["target"] for document in documents for entry in document["results"]}) > 1:
        raise ValueError("the files are of different targets")
    return {**documents[0], "results": [entry for document in documents for entry in document["results"]]}


def show(seed: int, target: str) -> int:
    """Prints one graph and its outcome, and if it is not right a smaller graph that also fails."""
    sys.path.insert(0, str(ROOT))
    from tests.random_graphs import random_case, shrunk
    from tests.random_runs import compiled_faults, interpreted_faults

    def faults(case: Any) -> list[str]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.filterwarnings("ignore", message=".*LeafSpec.*")
                warnings.filterwarnings("ignore", message="(?s).*operators? runs? through PyTorch")
                found: list[str] = (compiled_faults([case], target) if target in ("native", "cuda") else interpreted_faults([case], target))[0]
                return found
        except Exception as error:
            return ["".join(traceback.format_exception(error, limit=-4))]

    case = random_case(seed)
    found = faults(case)
    print(case)
    print("\n".join(found) if found else "right")
    if found:
        smaller = shrunk(case, lambda one: bool(faults(one)))
        print("\nsmaller:", smaller, *faults(smaller), sep="\n")
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="native", help="native, cuda, or the name of a GPU whose kernels are interpreted")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=1e9, help="no graph begins later")
    parser.add_argument("--json", help="write bench/results/NAME.json")
    parser.add_argument("--seed", type=int, help="run this graph alone, in this process")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="the results of several runs as one")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        os.environ |= {"TILEWRIGHT_CACHE": options.cache, "OMP_NUM_THREADS": "1"}
        serve(options.target, options.serve)
        return 0
    if options.seed is not None:
        return show(options.seed, options.target)
    from bench.common import RESULTS, write_results

    if options.merge:
        document = merged(options.merge)
        path = RESULTS / f"{options.json}.json"
        path.write_text(json.dumps(document, indent=1) + "\n")
        results = document["results"]
    else:
        result = run(options.target, options.first, options.count, options.processes, options.seconds)
        results = [result]
        if options.json:
            print(write_results(options.json, {"target": options.target, "together": TOGETHER, "seconds_alone": SECONDS_ALONE}, results))
    counts: Counter[str] = sum((Counter(result["counts"]) for result in results), Counter())
    total = sum(counts.values())
    print(f"{total} graphs on {results[0]['target']}: " + ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common()))
    print(f"{sum(result['seconds'] for result in results):.0f} s")
    return 0 if counts["right"] == total else 1


if __name__ == "__main__":
    sys.exit(main())
