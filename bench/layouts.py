"""What storing values otherwise than by rule is predicted and measured to gain on this CPU, or on a GPU: each alternative by itself.

    python -m bench.layouts --threads 1 --name layouts_1
    python -m bench.layouts --threads 1 --windows 60 --name layouts_windows
    python -m bench.layouts --target cuda --convolutions 60 --seconds 200 --name layouts_h100

For each of a few modules, of random windows (depthwise convolutions and poolings), or of random convolutions with what follows them, and each
alternative that `partition.layout_choice` finds where trials may measure, of windows those that change them and also copies of what they read in
rows: predicted and measured seconds of the module with every value stored by rule, and with that alternative alone, in interleaved turns after both
were checked against PyTorch in float64. On a GPU each call finds level 2 full of other data.
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import geometric_mean
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import tilewright
from bench.common import Contender, compare, write_results
from bench.gpu_networks import FLUSHED_BYTES, cold_seconds
from tilewright.ir.graph import Graph
from tilewright.partition import predictions
from tilewright.partition.layout_choice import Alternative, Chosen, Judge, Laid, find_alternatives, groups
from tilewright.partition.layouts import BY_RULE, PADDED, LaidOut, Storing
from tilewright.partition.merges import gains

TOLERANCE, ROUNDS, SECONDS = 1e-4, 9, 0.01
"""Largest relative error; turns of each way, and seconds of a turn."""


class Classes(nn.Module):
    """Classes of pixels: a small network, its result enlarged, and a softmax over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 21, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.two(F.relu(self.one(x))), scale_factor=4, mode="bilinear").softmax(1)


Maker = Callable[[], tuple[nn.Module, Tensor]]
"""Makes a module and its input."""
MODULES: dict[str, Maker] = {
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


APART = 0.1
"""Shares of the time by which two ways differ clearly."""
LARGEST, SEED = 2**20, 15
"""Elements of an image of the random windows; what draws them if nothing else is said."""


def windows(number: int, seed: int = SEED) -> dict[str, Maker]:
    """Random windows of 3 to 7 places at strides 1 and 2, the model's last operator after a 1x1 convolution, its first before one, and alone."""
    drawn = random.Random(seed)
    made: dict[str, Maker] = {}
    while len(made) < 3 * number:
        batch, channels = drawn.choice([1, 1, 4]), drawn.choice([16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512])
        pixels, taps, stride = drawn.randint(7, 112), drawn.choice([3, 3, 5, 7]), drawn.choice([1, 2])
        kind, padding = drawn.choice(["depthwise", "depthwise", "max", "mean"]), drawn.choice([0, taps // 2])
        if batch * channels * pixels**2 > LARGEST:
            continue
        for where in ("result", "input", "both"):
            name = f"{kind} {taps}x{taps}, stride {stride}, padding {padding}, {batch} x {channels} x {pixels} x {pixels}, {where}"
            made[name] = partial(_window, kind, where, batch, channels, pixels, taps, stride, padding)
    return made


def _window(kind: str, where: str, batch: int, channels: int, pixels: int, taps: int, stride: int, padding: int) -> tuple[nn.Module, Tensor]:
    window: nn.Module
    if kind == "depthwise":
        window = nn.Conv2d(channels, channels, taps, stride, padding, groups=channels)
    else:
        window = (nn.MaxPool2d if kind == "max" else nn.AvgPool2d)(taps, stride, padding)
    if where == "result":
        return nn.Sequential(nn.Conv2d(32, channels, 1), window), torch.randn(batch, 32, pixels, pixels)
    x = torch.randn(batch, channels, pixels, pixels)
    return (nn.Sequential(window, nn.Conv2d(channels, 32, 1)) if where == "input" else window), x


def convolutions(number: int, seed: int = SEED) -> dict[str, Maker]:
    """Random convolutions whose result is the model's, or read by a softmax of channels, an instance normalisation, or both ways."""
    drawn = random.Random(seed)
    made: dict[str, Maker] = {}
    while len(made) < number:
        batch, pixels = drawn.choice([1, 1, 2, 4, 8, 16, 32, 64]), drawn.randint(7, 128)
        channels, outputs = (drawn.choice([3, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]) for _ in range(2))
        taps, stride, then = (
            drawn.choice([1, 3, 3, 5]),
            drawn.choice([1, 1, 2]),
            drawn.choice(["nothing", "relu", "softmax", "normalised", "two results"]),
        )
        if not 2**14 <= batch * max(channels, outputs) * pixels**2 <= 2**25:
            continue
        name = f"{taps}x{taps}, stride {stride}, {batch} x {channels} x {pixels} x {pixels} to {outputs}, then {then}"
        made[name] = partial(_convolution, batch, channels, outputs, pixels, taps, stride, then)
    return made


class TwoResults(nn.Module):
    """A convolution whose result is one of the model's, and read by another."""

    def __init__(self, first: nn.Module, channels: int) -> None:
        super().__init__()
        self.first, self.second = first, nn.Conv2d(channels, 32, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.relu(self.first(x))
        return y, self.second(y)


def _convolution(batch: int, channels: int, outputs: int, pixels: int, taps: int, stride: int, then: str) -> tuple[nn.Module, Tensor]:
    own, x = nn.Conv2d(channels, outputs, taps, stride, taps // 2), torch.randn(batch, channels, pixels, pixels)
    if then == "two results":
        return TwoResults(own, outputs), x
    more = {
        "nothing": (), "relu": (nn.ReLU(),), "softmax": (nn.Softmax(1),),
        "normalised": (nn.InstanceNorm2d(outputs, affine=True), nn.ReLU(), nn.Conv2d(outputs, 16, 1)),
    }[then]  # fmt: skip
    return nn.Sequential(own, *more), x


@dataclass(frozen=True)
class On:
    """Where modules run: a target, threads of a CPU, and, of a GPU, the memory that is overwritten before each call."""

    target: str
    threads: int
    scratch: Tensor | None

    @property
    def device(self) -> str:
        return "cpu" if self.scratch is None else "cuda"


@dataclass(frozen=True)
class Found:
    """An alternative of a module, whether its prediction decides, and predicted and measured seconds by rule and with it."""

    module: str
    told: str
    decides: bool
    predicted: tuple[float, float]
    seconds: tuple[float, float]


def window_inputs(graph: Graph, plain: LaidOut) -> list[Alternative]:
    """What the planner does not consider: windows of the model's input, or of its padded copy, that read a copy with channels innermost, and results
    of the model that are copied from what these store."""
    names = {*graph.inputs, *(name + PADDED for name in graph.inputs)}
    return [
        Alternative(
            region.outputs[0],
            Storing(apart=frozenset({*graph.inputs, *region.outputs}.intersection((*graph.inputs, *graph.outputs)))),
            "computed from a copy with channels innermost",
        )
        for region in plain.regions
        if region.kind == "window" and not names.isdisjoint(region.inputs)
    ]


def compiled(module: nn.Module, x: Tensor, on: On, number: int | None, kinds: Sequence[str] = ()) -> tuple[Any, dict[Alternative, bool]]:
    """The module with that one of its alternatives, or by rule, and all alternatives, or those that change regions of these kinds; with each whether
    its prediction decides."""
    known: dict[Alternative, bool] = {}

    def chosen(graph: Graph, laid: Laid, judge: Judge, *_: Any) -> Chosen:
        plain = laid(BY_RULE)
        for one in find_alternatives(graph, plain, replace(judge, measuring=True)) + (window_inputs(graph, plain) if kinds else []):
            other = laid(one.storing)
            found = groups([one], plain, other)
            changed = [(region, way) for group in found for regions, way in ((group.before, plain), (group.after, other)) for region in regions]
            if any(not kinds or region.kind in kinds for region, _ in changed):
                known[one] = all(judge.counts(region, way) for region, way in changed)
        return Chosen(plain if number is None else laid([*known][number].storing))

    with mock.patch.object(predictions, "choose_layouts", chosen):
        return tilewright.compile(module, (x,), on.target, threads=None if on.scratch is not None else on.threads), known


def measured(name: str, make: Maker, on: On, kinds: Sequence[str] = ()) -> list[Found]:
    """Each alternative of a module, or those that change regions of these kinds."""
    torch.manual_seed(0)
    module, x = make()
    module, x = module.eval().to(on.device), x.to(on.device)
    rule, alternatives = compiled(module, x, on, None, kinds)
    timed = () if on.scratch is None else (partial(cold_seconds, scratch=on.scratch),)
    found = []
    for number, (one, decides) in enumerate(alternatives.items()):
        other, _ = compiled(module, x, on, number, kinds)
        predicted = [sum(part.predicted_seconds for part in each.image.program.regions) for each in (rule, other)]
        ways = [Contender("rule", lambda *_: rule), Contender("alternative", lambda *_, other=other: other)]
        outcomes = compare(name, module, (x,), (torch.randn_like(x),), ways, TOLERANCE, ROUNDS, SECONDS, *timed)
        seconds = [outcome.median_seconds or float("nan") for outcome in outcomes]
        found.append(Found(name, f"{one.value} {one.told}", decides, (predicted[0], predicted[1]), (seconds[0], seconds[1])))
    return found


def summary(found: Sequence[Found]) -> str:
    """How often predictions that gain or lose 10 % have the sign that is measured, and what is measured where they gain."""
    ratios = [(one.predicted[1] / one.predicted[0], one.seconds[1] / one.seconds[0]) for one in found]
    right = [(predicted < 1) == (measured < 1) for predicted, measured in ratios if abs(predicted - 1) > APART]
    taken = [measured for one, (_, measured) in zip(found, ratios, strict=True) if gains(one.predicted[1], one.predicted[0])]
    said = f"{len(found)} alternatives: {sum(right)} of {len(right)} signs are right where {APART:.0%} are predicted"
    return said + (f"; {len(taken)} would be taken: {geometric_mean(taken):.2f} of the time, at worst {max(taken):.2f}" if taken else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--target", default="native", help="native, or cuda for the GPU present")
    parser.add_argument("--windows", type=int, help="number of random windows, instead of the modules")
    parser.add_argument("--convolutions", type=int, help="number of random convolutions, instead of the modules")
    parser.add_argument("--seed", type=int, default=SEED, help="of the random windows and convolutions")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no module is begun later")
    parser.add_argument("--name", help="writes bench/results/NAME.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    made, kinds = (windows(options.windows, options.seed), ("window",)) if options.windows else (MODULES, ())
    if options.convolutions:
        made = convolutions(options.convolutions, options.seed)
    scratch = torch.empty(FLUSHED_BYTES // 4, device="cuda") if options.target == "cuda" else None
    on, begin = On(options.target, options.threads, scratch), time.monotonic()
    found: list[Found] = []
    for name, make in made.items():
        if time.monotonic() - begin > options.seconds:
            break
        found += measured(name, make, on, kinds)
        if options.name:  # also if it is interrupted
            write_results(options.name, {**vars(options), "last": name}, [asdict(one) for one in found])
    table = Table("module", "alternative", "predicted, us", "ratio", "measured, us", "ratio")
    for one in found:
        (a, b), (c, d) = one.predicted, one.seconds
        table.add_row(one.module, one.told, f"{1e6 * a:.1f} -> {1e6 * b:.1f}", f"{b / a:.2f}", f"{1e6 * c:.1f} -> {1e6 * d:.1f}", f"{d / c:.2f}")
    console = Console(width=200)
    console.print(table)
    for decides, what in ((True, "predictions decide"), (False, "only measured times decide")):
        console.print(f"{what}: {summary([one for one in found if one.decides == decides])}")


if __name__ == "__main__":
    main()
