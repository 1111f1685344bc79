"""Errors of transforms of blocks against direct sums: for usual inputs, around outliers, and the spread of infinities.

    python -m bench.winograd_numerics --name winograd_numerics
    python -m bench.winograd_numerics --filter 7 --name fourier_numerics
    python -m bench.winograd_numerics --tiles --name winograd_errors

A convolution (3x3, or `--filter`) of 64 to 64 channels on 56 x 56 pixels of normal numbers, by our kernels for this CPU and by PyTorch, against
float64. An error is the largest difference over the largest magnitude of the compared results. Around an outlier these are the results within eight
pixels (of larger filters 24, the largest tile) that do not read it; the worst of sixteen positions of the outlier relative to the tiles counts.

With `--tiles`: the root mean square error of single tiles by Winograd's algorithm in float32 with NumPy, over that of the results, for filters of all
shapes that it serves.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
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
from tilewright.kernels.block_transforms import Transform, transforms_of
from tilewright.kernels.winograd_transform import Shape, Winograd
from tilewright.partition.plan import plan_program
from tilewright.runtime.executable import executable_of
from tilewright.selection.choice import rank
from tilewright.selection.ranking import Choice

CHANNELS, SIZE = 64, 56
PLACES = tuple((row, column) for row in range(26, 30) for column in range(26, 30))
OUTLIERS = (1e2, 1e4, 1e6)
Run = Callable[[torch.Tensor], torch.Tensor]


def run_by(module: nn.Module, x: torch.Tensor, wanted: Callable[[Choice], bool], threads: int = 1) -> Run:
    """The module compiled for the GPU of its input, or for this many threads, with the models' first choice among the wanted candidates for its
    contraction."""
    here = machine("cuda" if x.is_cuda else "native")
    imported = read(module, (x,))

    def chosen(problem: Problem, machine: Machine, threads: int) -> Choice:
        choices = iter(rank(problem, machine, threads))
        return next(choice for choice in choices if problem.region.kind != "contraction" or wanted(choice))

    planned = plan_program(simplify(imported.graph)[0], here, threads, chosen)
    if any(lowered.region.kind == "torch" for lowered in planned.regions):
        raise RuntimeError("a region runs through PyTorch")
    program, binaries = build(planned, here, lambda stage, done, total: None)
    executable = executable_of(program, imported, here, binaries, {}, module, ("input",), threads, {}, False)
    return lambda given: executable(given)


def transformed(transform: Transform | None) -> Callable[[Choice], bool]:
    """Selects candidates with the given transform, or of direct sums (None)."""
    return lambda choice: (choice.schedule.transform if choice.schema.transforms else None) == transform


def ways_of(filter_shape: Shape) -> dict[str, Transform | None]:
    """Direct sums and the transforms for a filter, by the names in tables. Those of columns are those of rows."""
    down, across = sorted(filter_shape) if 1 in filter_shape else filter_shape
    names = {transform: str(transform).removeprefix("winograd ") for transform in transforms_of((down, across))}
    return {"direct sums": None, **{name: transform for transform, name in names.items()}}


def errors(run: Run, module: nn.Conv2d, x: torch.Tensor) -> dict[str, Any]:
    """Errors for usual inputs and beside each outlier, and the number of results that one infinity spoils although they do not read it."""
    exact = copy.deepcopy(module).double()(x.double()).detach()
    own, reach = module.kernel_size[0] // 2, 8 if module.kernel_size[0] == 3 else 24
    usual = (run(x).double() - exact).abs().max() / exact.abs().max()
    beside, spoilt = dict.fromkeys((f"{size:.0e}" for size in OUTLIERS), 0.0), 0
    for row, column in PLACES:
        near = torch.zeros(SIZE, SIZE, dtype=torch.bool)
        near[row - reach : row + reach + 1, column - reach : column + reach + 1] = True
        near[row - own : row + own + 1, column - own : column + own + 1] = False
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


def error_of_tiles(transform: Winograd, channels: int = CHANNELS, tiles: int = 2000) -> float:
    """The root mean square error of tiles of normal inputs, over the root mean square of the results."""
    generator = np.random.default_rng(0)
    (rows, columns), (height, width), (down, across) = transform.sides, transform.tile, transform.filter_shape
    d = generator.standard_normal((channels, tiles, *transform.span)).astype(np.float32)
    g = generator.standard_normal((channels, down, across)) / (channels * down * across) ** 0.5
    (b, c), (a, e) = (([np.array(getattr(side, name), np.float32) for side in (rows, columns)]) for name in ("inputs", "outputs"))
    u = (g.reshape(channels, -1) @ np.array(transform.filter_matrix).T).astype(np.float32).reshape(channels, *transform.span)
    sums = np.zeros((tiles, *transform.span), np.float32)
    for values, filters in zip(b @ d @ c.T, u, strict=True):
        sums += values * filters
    found = a @ sums @ e.T
    windows = np.lib.stride_tricks.sliding_window_view(d.astype(np.float64), (down, across), (2, 3))[:, :, :height, :width]
    exact = np.einsum("ctyxij,cij->tyx", windows, g)
    return float((((found - exact) ** 2).mean() / (exact**2).mean()) ** 0.5)


def errors_of_tiles() -> list[dict[str, Any]]:
    """By filters and results of a tile along each dimension. F(8, 3) is not served."""
    shapes = ((3, 3), (3, 5), (5, 5), (1, 3), (1, 5), (1, 7))
    found = [transform for shape in shapes for transform in transforms_of(shape) if isinstance(transform, Winograd)]
    return [
        {"filter": transform.filter_shape, "results": transform.output_tile, "error": error_of_tiles(transform)}
        for transform in (*found, Winograd(8, (1, 3)))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--name", help="write bench/results/NAME.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--filter", type=int, default=3, help="rows and columns of the filters, odd")
    parser.add_argument("--tiles", action="store_true", help="errors of single tiles of every shape")
    options = parser.parse_args()
    if options.tiles:
        rows = errors_of_tiles()
        Console().print(*(f"{entry['filter']} {entry['results']}: {entry['error']:.2e}" for entry in rows), sep="\n")
        if options.name:
            write_results(options.name, {"channels": CHANNELS}, rows)
        return
    torch.manual_seed(options.seed)
    module, x = nn.Conv2d(CHANNELS, CHANNELS, options.filter, padding=options.filter // 2).eval(), torch.randn(1, CHANNELS, SIZE, SIZE)
    with torch.no_grad():
        runs: dict[str, Run] = {name: run_by(module, x, transformed(way)) for name, way in ways_of((options.filter, options.filter)).items()}
        runs["PyTorch"] = module
        results = [{"way": name, **errors(run, module, x)} for name, run in runs.items()]
    table = Table("", "usual", *(f"beside {size:.0e}" for size in OUTLIERS), "pixels spoilt")
    for row in results:
        beside = [f"{error:.1e}" for error in row["beside an outlier of"].values()]
        table.add_row(row["way"], f"{row['usual']:.1e}", *beside, str(row["pixels spoilt by an infinity"]))
    Console().print(table)
    if options.name:
        write_results(options.name, {"seed": options.seed, "channels": CHANNELS, "size": SIZE, "filter": options.filter}, results)


if __name__ == "__main__":
    main()
