"""What storing values otherwise than by rule is predicted and measured to gain on this CPU: each alternative by itself.

    python -m bench.layouts --threads 1 --name layouts_1

For each of a few modules, and each alternative that `partition.layout_choice` finds where trials may measure: predicted and measured seconds of the
module with every value stored by rule, and with that alternative alone, in interleaved turns after both were checked against PyTorch in float64.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import tilewright
from bench.common import Contender, compare, write_results
from tilewright.ir.graph import Graph
from tilewright.partition import predictions
from tilewright.partition.layout_choice import Alternative, Chosen, Judge, Laid, find_alternatives
from tilewright.partition.layouts import BY_RULE

TOLERANCE, ROUNDS, SECONDS = 1e-4, 15, 0.05
"""Largest relative error; turns of each way, and seconds of a turn."""


class Classes(nn.Module):
    """Classes of pixels: a small network, its result enlarged, and a softmax over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 21, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.two(F.relu(self.one(x))), scale_factor=4, mode="bilinear").softmax(1)


MODULES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "3x3 of 64 channels, no padding": lambda: (nn.Conv2d(64, 32, 3), torch.randn(1, 64, 56, 56)),
    "1x1 of 64 channels": lambda: (nn.Conv2d(64, 32, 1), torch.randn(1, 64, 56, 56)),
    "3x3 of 64 channels, padded": lambda: (nn.Conv2d(64, 32, 3, padding=1), torch.randn(1, 64, 56, 56)),
    "3x3 of 128 channels, stride 2": lambda: (nn.Conv2d(128, 128, 3, 2), torch.randn(1, 128, 29, 29)),
    "instance normalisation": lambda: (
        nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.InstanceNorm2d(32, affine=True), nn.ReLU(), nn.Conv2d(32, 8, 1)),
        torch.randn(1, 16, 112, 112),
    ),
    "classes of pixels": lambda: (Classes(), torch.randn(1, 3, 64, 64)),
    "4x4 patches of an image": lambda: (nn.Conv2d(3, 96, 4, 4), torch.randn(1, 3, 224, 224)),
}


@dataclass(frozen=True)
class Found:
    """An alternative of a module, with predicted and measured seconds by rule and with it."""

    module: str
    told: str
    predicted: tuple[float, float]
    seconds: tuple[float, float]


def compiled(module: nn.Module, x: Tensor, threads: int, number: int | None) -> tuple[Any, list[Alternative]]:
    """The module with that one of its alternatives, or by rule, and all alternatives."""
    known: list[Alternative] = []

    def chosen(graph: Graph, laid: Laid, judge: Judge, *_: Any) -> Chosen:
        plain = laid(BY_RULE)
        known[:] = find_alternatives(graph, plain, replace(judge, measuring=True))
        return Chosen(plain if number is None else laid(known[number].storing))

    with mock.patch.object(predictions, "choose_layouts", chosen):
        return tilewright.compile(module, (x,), "native", threads=threads), known


def measured(name: str, threads: int) -> list[Found]:
    """Each alternative of a module."""
    torch.manual_seed(0)
    module, x = MODULES[name]()
    module.eval()
    rule, alternatives = compiled(module, x, threads, None)
    found = []
    for number, one in enumerate(alternatives):
        other, _ = compiled(module, x, threads, number)
        predicted = [sum(part.predicted_seconds for part in each.image.program.regions) for each in (rule, other)]
        ways = [Contender("rule", lambda *_: rule), Contender("alternative", lambda *_, other=other: other)]
        outcomes = compare(name, module, (x,), (torch.randn_like(x),), ways, TOLERANCE, ROUNDS, SECONDS)
        seconds = [outcome.median_seconds or float("nan") for outcome in outcomes]
        found.append(Found(name, f"{one.value} {one.told}", (predicted[0], predicted[1]), (seconds[0], seconds[1])))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", help="writes bench/results/NAME.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    found = [one for name in MODULES for one in measured(name, options.threads)]
    table = Table("module", "alternative", "predicted, us", "ratio", "measured, us", "ratio")
    for one in found:
        (a, b), (c, d) = one.predicted, one.seconds
        table.add_row(one.module, one.told, f"{1e6 * a:.1f} -> {1e6 * b:.1f}", f"{b / a:.2f}", f"{1e6 * c:.1f} -> {1e6 * d:.1f}", f"{d / c:.2f}")
    Console(width=200).print(table)
    if options.name:
        write_results(options.name, {"threads": options.threads}, [asdict(one) for one in found])


if __name__ == "__main__":
    main()
