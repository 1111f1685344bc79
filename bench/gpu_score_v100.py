"""Scores whose coefficients were fitted on the H200, used unchanged to rank the published kernels of a V100.

    python -m bench.gpu_score_v100 FOLDER [--ours bench/data/h200_train.jsonl.gz] [--name gpu_score_v100]

FOLDER is that of `bench.published_data`. Uses only terms that need no assembly: counts of `kernels.gpu.counts`, which the published kernels and ours
have in common. The coefficients are fitted only to our direct kernels of random layers on the H200: `terms` is `counted_cost` with constants fitted
from a neutral start without any knowledge of a V100, `linear` is a combination of the same terms' cycles (least squares of relative errors, no
coefficient negative). For comparison: `counted_cost` with constants fitted on the V100's own training files, and the model printed by CNNOpt. LoP@n:
the best time among the first n of a score over the layer's best, minus 1; means over the published layers, RS and S kernels of a layer together.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import nnls

from bench import published_data
from bench.cnnopt import printed_cost
from bench.common import write_results
from bench.fitting import fit_overheads, without_failures
from bench.transfer import direct, generally, layers_of
from tilewright.hardware import identified_machine
from tilewright.hardware.calibration import Overheads, gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.kernels.gpu.counted import busiest, counted_cost, step_cycles
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.selection.learned.hybrid import Samples, loss_of_performance
from tilewright.tuning import dataset
from tilewright.tuning.training import samples

TRIED = (1, 10, 30)
NEUTRAL = Overheads(
    multiply_add_share=0.8, step_instructions=20, fill_instructions=8, shared_cycles=1, cached_cycles=1, fill_cycles=1, overlap=3, latency=1,
    latency_ahead=0.5, multiply_add_latency=1, shared_latency=1, cached_latency=10, fill_latency=10, barrier_latency=10, hiding=3, wave_latency=1,
    drain_cycles=1, store_cycles=1, sector_cycles=1, write_factor=1, launch=1,
)  # fmt: skip
"""The starting point of the fit of `terms`: one, or a round guess, for every constant."""
Score = Callable[[TileCounts], np.ndarray]


def matrix(volumes: TileCounts, machine: Machine) -> np.ndarray:
    """[candidates, terms] in cycles of the busiest processor: multiply-adds, issue, shared memory and level 2 of all steps; one block's own chain,
    once per wave; waves; the code after the loop; memory; launches."""
    v = volumes
    cycles = step_cycles(v, machine, NEUTRAL)
    each, waves, _ = busiest(v, machine)
    through = [each * v.steps * cycles[name] for name in ("fma", "issue", "shared", "level2")]
    drain = each * (v.drain_wavefronts + v.store_instructions + v.store_sectors)
    memory = (v.distinct_bytes + v.written_bytes) / machine.memory_bandwidth * machine.clock_hz
    launch = np.full(len(v), machine.launch_seconds * machine.clock_hz)
    columns = [*through, waves * v.steps * cycles["alone"], waves * machine.memory_latency_cycles, drain, memory, launch]
    return np.stack(columns, axis=1)


TERMS = ("fma", "issue", "shared", "level 2", "alone", "waves", "drain", "memory", "launch")


def linear_coefficients(rows: Samples, machine: Machine) -> np.ndarray:
    cycles = rows.seconds * machine.clock_hz
    coefficients: np.ndarray = nnls(matrix(rows.counts, machine) / cycles[:, None], np.ones(len(rows)))[0]
    return coefficients


def judged(layers: Samples, score: Score) -> dict[str, Any]:
    """Means over the layers, and each layer's losses."""
    found = []
    for number in np.unique(layers.problem):
        rows = layers.where(layers.problem == number)
        found.append([loss_of_performance(rows.seconds, score(rows.counts), tried) for tried in TRIED])
    return {f"lop@{tried}": float(mean) for tried, mean in zip(TRIED, np.mean(found, axis=0), strict=True)} | {"layers": len(found)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ours", type=Path, nargs="+", default=[Path(__file__).parent / "data" / "h200_train.jsonl.gz"])
    parser.add_argument("--name", default="gpu_score_v100")
    options = parser.parse_args()
    there = identified_machine("v100")
    training, layers, _ = published_data.read_folder(options.folder, there)
    measured = dataset.read(*options.ours)
    here = identified_machine(measured[0].machine)
    ours = direct(generally(samples(measured, here)[0]))
    published = layers_of(layers)
    fitted = fit_overheads(ours, here, NEUTRAL, prior=0.001)
    native = fit_overheads(without_failures(training, there, gpu_calibration(there).counted), there, NEUTRAL, prior=0.001)
    coefficients = linear_coefficients(ours, here)
    scores: dict[str, Score] = {
        f"linear, fitted on the {here.name}": lambda v: matrix(v, there) @ coefficients,
        f"terms, fitted on the {here.name}": lambda v: counted_cost(v, there, fitted).seconds,
        "terms, not fitted": lambda v: counted_cost(v, there, NEUTRAL).seconds,
        f"terms, fitted on the {there.name}": lambda v: counted_cost(v, there, native).seconds,
        "as CNNOpt prints": lambda v: printed_cost(v, there).seconds,
    }
    results = [{"score": name, **judged(published, score)} for name, score in scores.items()]
    table = Table(*results[0])
    for row in results:
        table.add_row(*(f"{100 * cell:.2f} %" if isinstance(cell, float) else str(cell) for cell in row.values()))
    Console(width=120).print(table)
    if options.name:
        settings = {
            "fitted with": [str(path.name) for path in options.ours], "kernels": len(ours), "judged kernels": len(published),
            "constants of the terms": asdict(fitted), "linear coefficients": dict(zip(TERMS, map(float, coefficients), strict=True)),
        }  # fmt: skip
        print(write_results(options.name, settings, results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
