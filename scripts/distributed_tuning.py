"""Tuning over Dask on a machine with several GPUs: with one worker, with a worker for each GPU, and with one that is killed halfway.

    python scripts/distributed_tuning.py [--network resnet18] [--trials 10] [--gpus 2]     writes bench/results/distributed_tuning_h200x2.json

Each worker sees one GPU. All regions must be measured, even if a worker is lost, and best times with two workers must be close to those with one (the
median and the largest of their ratios are reported). Exits with 1 if regions or measurements are missing.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.common import write_results
from tilewright.tuning.records import Records

PORT = 8786


def started(arguments: list[str], **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "dask", *arguments]
    return subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and everything that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tuned(options: argparse.Namespace, gpus: int, lost: bool, folder: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """Tunes; returns a summary, and the best seconds by problem."""
    address = f"tcp://127.0.0.1:{PORT}"
    scheduler = started(["scheduler", "--host", "127.0.0.1", "--port", str(PORT), "--no-dashboard"])
    worker = ["worker", address, "--nthreads", "1", "--no-dashboard", "--memory-limit", "0", "--local-directory", str(folder)]
    workers = [started(worker, CUDA_VISIBLE_DEVICES=str(number)) for number in range(gpus)]
    records = folder / f"{gpus}{'lost' if lost else ''}.sqlite"
    try:
        command = [sys.executable, "-m", "tilewright", "tune", options.network, "--target", options.target, "--trials", str(options.trials)]
        start = time.perf_counter()
        with subprocess.Popen([*command, "--scheduler", address, "--records", str(records)], stdout=subprocess.PIPE, text=True) as process:
            if lost:
                time.sleep(options.lost_after)
                stop(workers[-1])
            said, _ = process.communicate()
        seconds = time.perf_counter() - start
    finally:
        for one in (*workers, scheduler):
            stop(one)
    best: dict[str, float] = {}
    with Records(records) as found:
        for entry in found.all():
            if entry.status == "measured":
                best[entry.region] = min(best.get(entry.region, float("inf")), entry.seconds)
        count = len(found)
    row = {"workers": gpus, "one killed": lost, "seconds": seconds, "status": process.returncode, "problems": len(best), "records": count}
    print(row, said.strip().splitlines()[-1:], flush=True)
    return row, best


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--network", default="zoo:resnet18")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--lost-after", type=float, default=12.0, metavar="SECONDS")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    bests: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="tilewright-distributed-") as folder:
        for gpus, lost in ((1, False), (options.gpus, False), (options.gpus, True)):
            row, best = tuned(options, gpus, lost, Path(folder))
            ratios = [best[problem] / bests[0][problem] for problem in best if bests and problem in bests[0]]
            if ratios:
                row |= {"median of best / best of one worker": statistics.median(ratios), "largest": max(ratios), "least": min(ratios)}
            rows.append(row)
            bests.append(best)
    print(write_results("distributed_tuning_h200x2", {**vars(options), "gpu": torch.cuda.get_device_name()}, rows))
    complete = all(row["status"] == 0 and set(best) == set(bests[0]) for row, best in zip(rows, bests, strict=True))
    return 0 if complete and bests[0] else 1


if __name__ == "__main__":
    sys.exit(main())
