"""Many mutated files of each kind: ``python tests/fuzz/campaign.py [SUBJECT ...] --cases 20000 --name fuzz``.

Counts what became of them in bench/results/NAME.json, keeps the files of the first faults of each kind below ``--keep``, and exits with 1 if
there is any.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2])]

from harness import SUBJECTS, Case, Outcome, Server, keep  # noqa: E402
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from rich.console import Console  # noqa: E402

from bench.common import write_results  # noqa: E402

KEPT = 20
"""Faults of a subject whose files are kept."""
BATCH = 250
"""Cases of one seed: hypothesis remembers all that it has made, and slows down."""


def campaign(subject: str, cases: int, start: int, kept: Path) -> dict[str, Any]:
    """Runs so many cases of a subject, with the seeds from `start` on."""
    verdicts: Counter[str] = Counter()
    faults: list[dict[str, str]] = []
    strategy = importlib.import_module(subject).cases()
    began = time.perf_counter()

    def note(case: Case, outcome: Outcome) -> None:
        verdicts[outcome.verdict] += 1
        if outcome.fault and len(faults) < KEPT:
            folder = keep(case, kept / subject / f"{start}-{len(faults)}")
            faults.append({"verdict": outcome.verdict, "detail": outcome.detail, "kept": str(folder.relative_to(kept))})

    with Server(subject) as server:
        number = start
        while verdicts.total() < cases:

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
    return {"subject": subject, "verdicts": dict(verdicts), "faults": faults, "seconds": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("subjects", nargs="*", default=list(SUBJECTS), help=f"of {', '.join(SUBJECTS)}; all if none is named")
    parser.add_argument("--cases", type=int, default=20_000, help="of each subject (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first cases (default: %(default)s)")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-faults"), help="folder for the files of faults (default: %(default)s)")
    parser.add_argument("--name", help="write bench/results/NAME.json")
    options = parser.parse_args()
    results = [campaign(subject, options.cases, options.seed, options.keep) for subject in options.subjects]
    console = Console()
    for result in results:
        console.print(result["subject"], result["verdicts"], f"{result['seconds']:.0f} s")
        for fault in result["faults"][:3]:
            console.print(fault["kept"], fault["verdict"], fault["detail"][-800:], markup=False)
    if options.name:
        write_results(options.name, {"cases": options.cases, "seed": options.seed}, results)
    sys.exit(any(result["faults"] for result in results))


if __name__ == "__main__":
    main()
