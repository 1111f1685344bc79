"""Number of configurations of each layer: generated, rejected by reason, feasible; and the time to choose among them (CNNOpt's table 3).

    python -m bench.configurations [--target h200]

Counts are of the space that the compiler ranks, one schema after the other; a rejected candidate counts for the first reason that holds. The paper's
numbers are for its own two schemas on other machines. Milliseconds: the median of generating, pruning, predicting and ranking a layer's whole space
as a compilation does, learned part included, without stored choices. `beyond`: how many of the first thirty are direct kernels with more threads a
block than any that a model was trained with.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common import write_results
from bench.layers import LAYERS, layer
from tilewright.hardware import identified_machine
from tilewright.kernels.columns import length
from tilewright.kernels.gpu.direct.schedule import BANKS, DirectSchedule
from tilewright.selection.choice import rank
from tilewright.selection.ranking import Ranking
from tilewright.tuning.dataset import layer_problem

PAPER = MappingProxyType({
    "D1": 842, "D2": 2494, "D3": 2300, "D4": 708, "D5": 708, "D6": 708, "Y0": 368, "Y2": 321, "Y4": 1387, "Y8": 802, "Y12": 321, "Y18": 52,
    "R1": 423, "R2": 2429, "R4": 1398, "R6": 2161, "R7": 876, "R9": 1017, "R10": 150, "R12": 159,
})  # fmt: skip
"""CNNOpt (PACT 2022), table 3."""

TRAINED_THREADS = 256
"""Most threads a block of the direct kernels in the training data."""


def counts(ranking: Ranking) -> dict[str, dict[str, Any]]:
    """For each schema the numbers generated, rejected by reason, and feasible."""
    feasible = Counter({part.schema.name: length(part.candidates) for part in ranking.parts})
    return {
        name: {"generated": feasible[name] + sum(reasons.values()), "feasible": feasible[name], "rejected": dict(reasons)}
        for name, reasons in ranking.rejections.items()
    }


def beyond(ranking: Ranking, first: int = 30) -> int:
    """How many of the first are direct kernels with more than `TRAINED_THREADS` threads a block."""
    schedules = (choice.schedule for choice in islice(ranking, first))
    blocks = (schedule for schedule in schedules if isinstance(schedule, DirectSchedule))
    return sum(BANKS * block.block_k * block.block_y * block.block_x > TRAINED_THREADS for block in blocks)


def measured(shape: Mapping[str, Any], target: str, repeats: int) -> dict[str, Any]:
    """Counts and milliseconds of one layer."""
    machine, problem = identified_machine(target), layer_problem(shape)
    space, ranking = rank(problem, machine, learned=False), rank(problem, machine)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        rank(problem, machine).first()
        times.append(time.perf_counter() - start)
    return {
        "layer": shape["name"], "schemas": counts(space), "paper": PAPER[str(shape["name"])], "beyond": beyond(ranking),
        "milliseconds": statistics.median(times) * 1e3,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="h200")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--name", default="", help="of the result file; default: configurations_TARGET")
    options = parser.parse_args()
    results = [measured(layer(name), options.target, options.repeats) for name in options.layers.split(",")]
    print(write_results(options.name or f"configurations_{options.target}", vars(options), results))
    console = Console(width=170)
    console.print(layer_table(results))
    console.print(reason_table(results))


def layer_table(results: list[dict[str, Any]]) -> Table:
    """One row per layer: feasible of generated, by schema and in total."""
    schemas = list(dict.fromkeys(name for result in results for name in result["schemas"]))
    table = Table(title="feasible of generated")
    for heading in ("layer", *schemas, "in all", "paper", "ms"):
        table.add_column(heading, justify="left" if heading == "layer" else "right")
    for result in results:
        found = result["schemas"]
        cells = [f"{found[name]['feasible']:,} of {found[name]['generated']:,}" if name in found else "-" for name in schemas]
        total = [sum(entry[kind] for entry in found.values()) for kind in ("feasible", "generated")]
        table.add_row(result["layer"], *cells, f"{total[0]:,} of {total[1]:,}", f"{result['paper']:,}", f"{result['milliseconds']:.1f}")
    return table


def reason_table(results: list[dict[str, Any]]) -> Table:
    """Candidates rejected for each reason, over all layers."""
    total: Counter[tuple[str, str]] = Counter()
    for result in results:
        for name, entry in result["schemas"].items():
            total.update({(name, reason): count for reason, count in entry["rejected"].items()})
    table = Table("schema", "rejected because", title="rejected, all layers")
    table.add_column("candidates", justify="right")
    for (name, reason), count in sorted(total.items(), key=lambda item: (item[0][0], -item[1])):
        table.add_row(name, reason, f"{count:,}")
    return table


if __name__ == "__main__":
    main()
