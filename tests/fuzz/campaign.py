"""Many mutated files of each kind: ``python -m tests.fuzz.campaign [SUBJECT ...] --cases 20000 --name fuzz``.

The cases are divided over as many processes as cores. Writes counts of the outcomes to bench/results/NAME.json, keeps the files of the first faults
of each kind below ``--keep``, and exits with 1 if there is any fault. ``--merge FILE ...`` merges the result files of several runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from rich.console import Console

from bench.common import write_results
from tests.fuzz.harness import SUBJECTS, Case, Outcome, Server, keep
from tilewright import settings as tilewright_settings

KEPT = 20
"""Maximum number of a subject's faults whose files are kept."""
BATCH = 250
"""Cases per seed: hypothesis remembers all its examples and slows down."""


def share(subject: str, cases: int, start: int, kept: Path, end: float) -> dict[str, Any]:
    """Runs `cases` cases of a subject with the seeds from `start` on; starts no further seed after the time `end`."""
    verdicts: Counter[str] = Counter()
    faults: list[dict[str, str]] = []
    strategy = importlib.import_module(f"tests.fuzz.{subject}").cases()
    began = time.perf_counter()

    def note(case: Case, outcome: Outcome) -> None:
        verdicts[outcome.verdict] += 1
        if outcome.fault and len(faults) < KEPT:
            folder = keep(case, kept / subject / f"{start}-{len(faults)}")
            faults.append({"verdict": outcome.verdict, "detail": outcome.detail, "kept": str(folder.relative_to(kept))})

    with Server(subject) as server:
        number = start
        while verdicts.total() < cases and time.time() < end:

            @seed(number)
            @settings(
                max_examples=min(BATCH, cases - verdicts.total()), deadline=None, database=None, phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            @given(strategy)
            def check(case: Case) -> None:
                note(case, server.run(case))

            check()
            number += 1
    return {"subject": subject, "cases": verdicts.total(), "verdicts": dict(verdicts), "faults": faults, "seconds": time.perf_counter() - began}


def campaign(subject: str, cases: int, start: int, kept: Path, workers: int, end: float) -> dict[str, Any]:
    """Runs `cases` cases of a subject in processes, each with its own seeds from `start` on."""
    batches = -(-cases // BATCH)
    shares = [range(batches * i // workers, batches * (i + 1) // workers) for i in range(workers)]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        sizes = [min(len(own) * BATCH, cases - own.start * BATCH) for own in shares]
        asked = [pool.submit(share, subject, size, start + own.start, kept, end) for own, size in zip(shares, sizes, strict=True) if own]
        return together([future.result() for future in asked])


def together(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums of results of one subject; the seconds are the maximum."""
    verdicts = sum((Counter(result["verdicts"]) for result in results), Counter[str]())
    faults = [fault for result in results for fault in result["faults"]]
    seconds = max(result["seconds"] for result in results)
    return {"subject": results[0]["subject"], "cases": verdicts.total(), "verdicts": dict(verdicts), "faults": faults, "seconds": seconds}


def merged(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The results of several files by subject. The files must be from one commit and from disjoint seeds."""
    contents = [json.loads(path.read_text()) for path in files]
    if len({content["commit"] for content in contents}) > 1:
        raise SystemExit("these files are of several commits")
    runs: dict[str, list[dict[str, Any]]] = {}
    taken: dict[str, set[int]] = {}
    for content in contents:
        for result in content["results"]:
            first = content["settings"]["seed"]
            seeds = set(range(first, first - (-result["cases"] // BATCH)))
            if seeds & taken.setdefault(result["subject"], set()):
                raise SystemExit(f"these files share seeds of {result['subject']}")
            taken[result["subject"]] |= seeds
            runs.setdefault(result["subject"], []).append(result)
    return [together(results) for results in runs.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("subjects", nargs="*", default=list(SUBJECTS), help=f"of {', '.join(SUBJECTS)}; all if none is named")
    parser.add_argument("--cases", type=int, default=20_000, help="of each subject (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first cases (default: %(default)s)")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-faults"), help="folder for the files of faults (default: %(default)s)")
    parser.add_argument("--name", help="write bench/results/NAME.json")
    parser.add_argument("--workers", type=int, default=tilewright_settings.available_cores(), help="processes (default: %(default)s, the cores)")
    parser.add_argument("--seconds", type=float, default=1e9, help="no batch begins later (default: until all cases are done)")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="result files of this program, of one commit")
    options = parser.parse_args()
    if options.merge:
        results = merged(options.merge)
    else:
        end = time.time() + options.seconds
        results = [campaign(subject, options.cases, options.seed, options.keep, options.workers, end) for subject in options.subjects]
    console = Console()
    for result in results:
        console.print(result["subject"], result["verdicts"], f"{result['seconds']:.0f} s")
        for fault in result["faults"][:3]:
            console.print(fault["kept"], fault["verdict"], fault["detail"][-800:], markup=False)
    if options.name:
        asked = {"cases": options.cases, "seed": options.seed}
        write_results(options.name, {"merged": [path.stem for path in options.merge]} if options.merge else asked, results)
    sys.exit(any(result["faults"] for result in results))


if __name__ == "__main__":
    main()
