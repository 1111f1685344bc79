"""Time to load an artifact, as a directory and as a zip file, against another checkout of this repository.

    python -m bench.load_time [MODEL] --against PATH_OF_CHECKOUT

Each checkout compiles the model and saves it in its own format. Then processes of both alternate: each imports the package, loads once, which is the
reported time, and loads once more, with files cached and binaries mapped. Nothing is called. On a machine with other load compare processor times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.common import git_commit, write_results

HERE = Path(__file__).resolve().parents[1]
MAKE = """
import sys, warnings
warnings.simplefilter("ignore")
import tilewright
from tilewright.models import resolve
model = resolve(sys.argv[1], None, ())
executable = tilewright.compile(model.module, model.inputs(0), "native", threads=1)
for path in sys.argv[2:]:
    executable.save(path)
"""
LOAD = """
import sys, time
from tilewright.runtime.artifact import load
kept = []
for _ in range(2):
    start, used = time.perf_counter(), time.process_time()
    kept.append(load(sys.argv[1]))
    print(time.perf_counter() - start, time.process_time() - used)
"""


def output(checkout: Path, code: str, *arguments: str) -> str:
    """The output of Python running the code with the package of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True).stdout


def summary(values: list[float]) -> dict[str, Any]:
    """Milliseconds."""
    lower, median, upper = (1e3 * value for value in statistics.quantiles(values, n=4))
    return {"median_ms": median, "quartiles_ms": [lower, upper], "minimum_ms": 1e3 * min(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="zoo:resnet50")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout of this repository")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--name", help="write bench/results/NAME.json")
    options = parser.parse_args()
    checkouts = {"this": HERE, **({"against": options.against.resolve()} if options.against else {})}
    with tempfile.TemporaryDirectory() as folder:
        cases = []
        for name, checkout in checkouts.items():
            paths = {kind: f"{folder}/{name}{suffix}" for kind, suffix in (("directory", ""), ("zip", ".zip"))}
            output(checkout, MAKE, options.model, *paths.values())
            cases += [(name, checkout, kind, path) for kind, path in paths.items()]
        seconds: dict[tuple[str, ...], list[float]] = {}
        for number in range(options.rounds):
            for name, checkout, kind, path in cases if number % 2 else cases[::-1]:
                for which, line in zip(("first", "again"), output(checkout, LOAD, path).splitlines(), strict=True):
                    for clock, value in zip(("elapsed", "processor"), line.split(), strict=True):
                        seconds.setdefault((name, kind, which, clock), []).append(float(value))
    names = ("checkout", "artifact", "load", "clock")
    results = [{**dict(zip(names, key, strict=True)), **summary(values)} for key, values in sorted(seconds.items())]
    for row in results:
        print(json.dumps(row))
    if options.name:
        against = git_commit(options.against / "bench") if options.against else None
        write_results(options.name, {"model": options.model, "rounds": options.rounds, "against": against}, results)


if __name__ == "__main__":
    main()
