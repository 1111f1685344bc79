"""Static analysis of GPU kernels against hardware counters.

    python -m bench.gpu_analysis [--blocks 1024] [--name gpu_analysis]

Takes the kernels of bench/results/transactions_h200.json (scripts/ncu_transactions.py), lowers each again from its schedule, and evaluates the
addresses of its warps (`tilewright.analysis.gpu.warps`). Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common import RESULTS, write_results
from bench.layers import layer
from bench.regions import ranking_of
from bench.transactions import pearson
from tilewright.analysis.gpu.reading import read_region
from tilewright.analysis.gpu.warps import SECTOR_BYTES
from tilewright.hardware import identified_machine
from tilewright.hardware.machine import Machine
from tilewright.ir.region import Lowered
from tilewright.kernels.columns import length, row
from tilewright.kernels.registry import lower
from tilewright.selection.ranking import Ranking
from tilewright.tuning import dataset

COUNTED = {
    "shared loads": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared stores": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "global loads": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "global stores": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "instructions": "smsp__inst_executed.sum",
    "level 2 reads": "lts__t_sectors_srcunit_tex_op_read.sum",
    "memory reads": "dram__bytes_read.sum",
}
"""Each evaluated quantity and its counter: wavefronts of shared memory (the third is the total, including asynchronous copies), sectors of global
memory, warp instructions (of PTX; the counter's are machine instructions), and sectors served by level 2 and by memory."""
UNITS = {"memory reads": SECTOR_BYTES}
"""Units of a counter per evaluated unit."""


def named_schedules(ranking: Ranking, texts: Iterable[str]) -> dict[str, Any]:
    """The candidates whose `str` is one of the texts."""
    wanted, found = set(texts), {}
    for part in ranking.parts:
        for at in range(length(part.candidates)):
            schedule = part.schema.schedule_of(row(part.candidates, at), ranking.machine)
            if str(schedule) in wanted:
                found[str(schedule)] = schedule
    return found


def evaluated(made: Lowered, machine: Machine, blocks: int) -> dict[str, float]:
    """The evaluated counts, summed over all calls, under the names of COUNTED."""
    kernels = read_region(made, machine, blocks)
    movements = [kernel.movement for kernel in kernels if kernel.movement is not None]
    found, beyond = [movement.transactions for movement in movements], [movement.traffic for movement in movements]
    return {
        "shared loads": sum(t.shared_loads for t in found),
        "shared stores": sum(t.shared_stores for t in found),
        "shared": sum(t.shared for t in found),
        "global loads": sum(t.global_loads for t in found),
        "global stores": sum(t.global_stores for t in found),
        "instructions": sum(sum(kernel.instructions.values()) for kernel in kernels),
        "level 2 reads": sum(t.level_2 for t in beyond),
        "memory reads": sum(t.memory for t in beyond),
    }


def counted_layer(entry: Mapping[str, Any], machine: Machine, blocks: int) -> list[dict[str, Any]]:
    """The kernels of one layer of the counters' file: predicted and counted transactions."""
    described = layer(entry["layer"])
    problem = dataset.layer_problem(described)
    schedules = named_schedules(ranking_of(described, machine), (candidate["schedule"] for candidate in entry["candidates"]))
    found = []
    for candidate in entry["candidates"]:
        if candidate["error"] or candidate["schedule"] not in schedules:
            found.append({"layer": entry["layer"], "schedule": candidate["schedule"], "absent": candidate["error"] or "no candidate today"})
            continue
        made = lower(problem, schedules[candidate["schedule"]], machine)
        start = time.perf_counter()
        predicted = evaluated(made, machine, blocks)
        seconds = time.perf_counter() - start
        counted = {name: candidate["values"][metric] / UNITS.get(name, 1) for name, metric in COUNTED.items()}
        found.append(
            {"layer": entry["layer"], "schedule": candidate["schedule"], "predicted": predicted, "counted": counted, "analysis seconds": seconds}
        )
    return found


def agreement(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each count: the kernels that have it, median and extremes of predicted / counted, the fraction within 1 % and 5 %, correlation."""
    result: dict[str, dict[str, Any]] = {}
    for name in COUNTED:
        pairs = [(r["predicted"][name], r["counted"][name]) for r in rows if "predicted" in r and r["counted"][name]]
        ratios = [predicted / counted for predicted, counted in pairs]
        result[name] = {
            "kernels": len(pairs),
            "median ratio": statistics.median(ratios),
            "least": min(ratios),
            "greatest": max(ratios),
            "exact": sum(predicted == counted for predicted, counted in pairs) / len(pairs),
            "within 1 %": sum(abs(ratio - 1) <= 0.01 for ratio in ratios) / len(ratios),
            "within 5 %": sum(abs(ratio - 1) <= 0.05 for ratio in ratios) / len(ratios),
            "correlation": pearson([p for p, _ in pairs], [c for _, c in pairs]),
        }
    return result


def table(summary: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = list(next(iter(summary.values())))
    shown = Table("predicted / counted", *columns)
    for name, figures in summary.items():
        shown.add_row(name, *(f"{figures[column]:.4g}" for column in columns))
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1024, help="blocks of a grid that are evaluated")
    parser.add_argument("--name", default="gpu_analysis", help="the result file's name in bench/results; empty for none")
    options = parser.parse_args()
    counters = json.loads((RESULTS / "transactions_h200.json").read_text())
    machine = identified_machine(counters["settings"]["target"])
    rows: list[dict[str, Any]] = []
    for entry in counters["results"]:
        rows += counted_layer(entry, machine, options.blocks)
    summary = agreement(rows)
    Console(width=140).print(table(summary))
    for item in rows:
        if "absent" in item:
            print(f"{item['layer']} {item['schedule']}: {item['absent']}")
    if options.name:
        settings = {"counters": "transactions_h200.json", "counters of commit": counters["commit"], "blocks": options.blocks, "agreement": summary}
        print(write_results(options.name, settings, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
