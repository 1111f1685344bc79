"""Errors of Winograd's algorithm against direct sums: for usual inputs, around outliers, and the spread of infinities.

    python -m bench.winograd_numerics --name winograd_numerics

A 3x3 convolution of 64 to 64 channels on 56 x 56 pixels of normal numbers, by our kernels for this CPU and by PyTorch, against float64. An error is
the largest difference over the largest magnitude of the compared results. Around an outlier these are the results within eight pixels that do not
read it; the worst of sixteen positions of the outlier relative to the tiles counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from bench.common import write_results
from tilewright.compile import build, read
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.partition.plan import plan_program
from tilewright.runtime.executable import executable_of
from tilewright.selection.choice import rank
from tilewright.selection.ranking import Choice

CHANNELS, SIZE, REACH = 64, 56, 8
PLACES = tuple((row, column) for row in range(26, 30) for column in range(26, 30))
OUTLIERS = (1e2, 1e4, 1e6)
Run = Callable[[torch.Tensor], torch.Tensor]


def run_by(module: nn.Module, x: torch.Tensor, wanted: Callable[[Choice], bool]) -> Run:
    """The module compiled with the models' first choice among the wanted candidates for its contraction."""
    here = machine("native")
    imported = read(module, (x,))

    def chosen(problem: Problem, machine: Machine, threads: int) -> Choice:
        choices = iter(rank(problem, machine, threads))
        return next(choice for choice in choices if problem.region.kind != "contraction" or wanted(choice))

    planned = plan_program(simplify(imported.graph)[0], here, 1, chosen)
    program, binaries = build(planned, here, lambda stage, done, total: None)
    executable = executable_of(program, imported, here, binaries, {}, module, ("input",), 1, {}, False)
    return lambda given: executable(given)


def transformed(tile: int | None) -> Callable[[Choice], bool]:
    """Selects candidates of Winograd's algorithm with the given output tile, or of direct sums (None)."""
    return lambda choice: choice.schema.transforms == (tile is not None) and (tile is None or choice.schedule.output_tile == tile)


def errors(run: Run, module: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    """Errors for usual inputs and beside each outlier, and the number of results that one infinity spoils although they do not read it."""
    exact_of = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1).double()
    exact_of.load_state_dict({name: value.double() for name, value in module.state_dict().items()})
    exact = exact_of(x.double()).detach()
    usual = (run(x).double() - exact).abs().max() / exact.abs().max()
    beside, spoilt = dict.fromkeys((f"{size:.0e}" for size in OUTLIERS), 0.0), 0
    for row, column in PLACES:
        near = torch.zeros(SIZE, SIZE, dtype=torch.bool)
        near[row - REACH : row + REACH + 1, column - REACH : column + REACH + 1] = True
        near[row - 1 : row + 2, column - 1 : column + 2] = False
        for size in (*OUTLIERS, torch.inf):
            large = x.clone()
            large[0, 5, row, column] = size
            found = run(large).double()[..., near]
            if size == torch.inf:
                spoilt = max(spoilt, int((~torch.isfinite(found)).any(dim=(0, 1)).sum()))
            else:
                error = float((found - exact[..., near]).abs().max() / exact[..., near].abs().max())
                beside[f"{size:.0e}"] = max(beside[f"{size:.0e}"], error)
    return {"usual": float(usual), "beside an outlier of": beside, "pixels spoilt by an infinity": spoilt}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--name", help="write bench/results/NAME.json")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    module, x = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1).eval(), torch.randn(1, CHANNELS, SIZE, SIZE)
    with torch.no_grad():
        ways = {"direct sums": None, "F(2x2,3x3)": 2, "F(4x4,3x3)": 4}
        runs: dict[str, Run] = {name: run_by(module, x, transformed(tile)) for name, tile in ways.items()}
        runs["PyTorch"] = module
        results = [{"way": name, **errors(run, module, x)} for name, run in runs.items()]
    table = Table("", "usual", *(f"beside {size:.0e}" for size in OUTLIERS), "pixels spoilt")
    for row in results:
        beside = [f"{error:.1e}" for error in row["beside an outlier of"].values()]
        table.add_row(row["way"], f"{row['usual']:.1e}", *beside, str(row["pixels spoilt by an infinity"]))
    Console().print(table)
    if options.name:
        write_results(options.name, {"seed": options.seed, "channels": CHANNELS, "size": SIZE}, results)


if __name__ == "__main__":
    main()
