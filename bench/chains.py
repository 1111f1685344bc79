"""Regions in one kernel, by strips, against separate kernels on this CPU: what the models predict of merging them, and what it gains.

    python -m bench.chains --random 100 --seed 101 --threads 2 --name chains_fitted_2     what the constants are fitted to
    python -m bench.chains --fit bench/results/chains_fitted_1.json bench/results/chains_fitted_2.json
    python -m bench.chains --random 100 --seed 811780 --threads 2 --name chains_sealed_2  drawn after everything was frozen
    python -m bench.chains --threads 2 --name chains_2                                    the chains of networks in `LITERATURE`

Each chain is compiled twice, as one kernel with the strips predicted fastest and as separate kernels, checked against PyTorch in float64, and timed
in interleaved turns. What surrounds it (a layer that produces its input and one that reads its result) is the same in both and is timed with it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import tilewright
from bench.common import double_precision_outputs, earlier_results, interleaved_seconds, relative_error, write_results
from tilewright.compile import read
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.hardware.calibration import CpuChains
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Region
from tilewright.partition import chains
from tilewright.partition.chains import Search
from tilewright.partition.merges import LEAST_GAIN
from tilewright.partition.paths import Section, sections
from tilewright.partition.plan import plan_program
from tilewright.partition.strip_judge import Parts, StripJudge, Strips
from tilewright.partition.tile_judge import TileJudge, Tiles
from tilewright.tuning import serialisation

LARGEST_ERROR = 1e-3
NOISE = 0.03
"""Share of the time below which a measured gain or loss may be noise."""


@dataclass(frozen=True)
class Layer:
    """A convolution with a ReLU. `groups`: 1, or the channels for a depthwise one."""

    outputs: int
    size: int = 1
    stride: int = 1
    depthwise: bool = False

    def module(self, channels: int) -> nn.Module:
        groups = channels if self.depthwise else 1
        return nn.Sequential(nn.Conv2d(channels, self.outputs, self.size, self.stride, self.size // 2, groups=groups), nn.ReLU())


@dataclass(frozen=True)
class Links:
    """Layers to be merged, on images of `batch` x `channels` x `extent` x `extent`."""

    channels: int
    extent: int
    layers: tuple[Layer, ...]
    batch: int = 1

    def module(self) -> nn.Module:
        """The layers, between a layer that produces their input and one that reads their result."""
        parts: list[nn.Module] = [nn.Conv2d(8, self.channels, 1)]
        channels = self.channels
        for layer in self.layers:
            parts.append(layer.module(channels))
            channels = layer.outputs
        return nn.Sequential(*parts, nn.Conv2d(channels, 8, 1)).eval()

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return (torch.randn(self.batch, 8, self.extent, self.extent),)

    def __str__(self) -> str:
        layers = (f"{'dw' if x.depthwise else ''}{x.size}x{x.size}{'/2' if x.stride == 2 else ''} {x.outputs}" for x in self.layers)
        batch = f"{self.batch} x " if self.batch > 1 else ""
        return f"{batch}{self.channels} x {self.extent} x {self.extent}: " + ", ".join(layers)


def inverted(channels: int, wide: int, outputs: int, extent: int, stride: int = 1, size: int = 3) -> Links:
    """Pointwise, depthwise, pointwise (MobileNetV2)."""
    return Links(channels, extent, (Layer(wide), Layer(wide, size, stride, True), Layer(outputs)))


def separable(channels: int, outputs: int, extent: int, stride: int = 1, size: int = 3) -> Links:
    """Depthwise, pointwise (MobileNet)."""
    return Links(channels, extent, (Layer(channels, size, stride, True), Layer(outputs)))


def expanded(channels: int, wide: int, extent: int, stride: int = 1, size: int = 3) -> Links:
    """Pointwise, depthwise (EfficientNet, before squeeze and excitation)."""
    return Links(channels, extent, (Layer(wide), Layer(wide, size, stride, True)))


LITERATURE: Mapping[str, Links] = MappingProxyType(
    {
        "MobileNetV1 2": separable(32, 64, 112),
        "MobileNetV1 3": separable(64, 128, 112, 2),
        "MobileNetV1 4": separable(128, 128, 56),
        "MobileNetV1 6": separable(256, 256, 28),
        "MobileNetV1 8": separable(512, 512, 14),
        "MobileNetV2 1": separable(32, 16, 112),
        "MobileNetV2 2": inverted(16, 96, 24, 112, 2),
        "MobileNetV2 3": inverted(24, 144, 24, 56),
        "MobileNetV2 4": inverted(24, 144, 32, 56, 2),
        "MobileNetV2 5": inverted(32, 192, 32, 28),
        "MobileNetV2 7": inverted(32, 192, 64, 28, 2),
        "MobileNetV2 8": inverted(64, 384, 64, 14),
        "MobileNetV2 12": inverted(96, 576, 96, 14),
        "MobileNetV2 15": inverted(160, 960, 160, 7),
        "EfficientNet-B0 2": expanded(16, 96, 112, 2),
        "EfficientNet-B0 3": expanded(24, 144, 56),
        "EfficientNet-B0 5": expanded(40, 240, 28, 1, 5),
        "EfficientNet-B0 9": expanded(80, 480, 14, 1, 5),
        "ResNet-50 2a": Links(256, 56, (Layer(64), Layer(64, 3), Layer(256))),
        "ResNet-50 3b": Links(512, 28, (Layer(128), Layer(128, 3), Layer(512))),
        "ResNet-18 2": Links(64, 56, (Layer(64, 3), Layer(64, 3))),
        "DenseNet-121 2": Links(64, 56, (Layer(128), Layer(32, 3))),
        "Xception 2": separable(128, 128, 147),
        "SqueezeNet 2": Links(96, 55, (Layer(16), Layer(64))),
        "U-Net 1": Links(32, 128, (Layer(32, 3), Layer(32, 3))),
    }
)
"""Chains of networks that others fuse: FCM (arXiv 2404.19331) has those of MobileNets and Xception."""


def drawn(seed: int, count: int) -> Iterator[Links]:
    """Random chains of two or three layers, none of them in `LITERATURE`."""
    source = random.Random(seed)
    known = set(LITERATURE.values())
    while count:
        extent = source.choice([7, 10, 14, 19, 20, 28, 33, 38, 40, 48, 56, 64, 75, 80, 96, 112, 130])
        channels = 8 * source.randint(1, max(1, 2000 // extent // 8))
        layers: list[Layer] = []
        inside = channels
        for _ in range(source.choice([2, 2, 3])):
            kind = source.choice(["pointwise", "depthwise", "depthwise", "square"])
            stride = source.choice([1, 1, 1, 2]) if kind != "pointwise" else 1
            size = 1 if kind == "pointwise" else source.choice([3, 3, 5])
            wide = inside if kind == "depthwise" else min(8 * source.randint(1, 40), 8 * max(1, 6 * channels // 8))
            layers.append(Layer(wide, size, stride, kind == "depthwise"))
            inside = wide
        links = Links(channels, extent, tuple(layers), source.choice([1, 1, 1, 4]))
        operations = sum(x.outputs * x.size**2 * links.extent**2 * links.batch for x in layers) * channels
        if links not in known and operations < 2e9:
            known.add(links)
            count -= 1
            yield links


def taken(chain: float, apart: float) -> bool:
    """Whether predicted seconds of a chain gain enough over those of separate kernels."""
    return chain < (1 - LEAST_GAIN) * apart


@contextmanager
def merging(
    count: int, merges: bool, seen: dict[str, Any], rows: int = 0, judging: type[StripJudge] | type[TileJudge] = StripJudge
) -> Iterator[None]:
    """Inside the context the layers after the first, `count` of them, are one kernel, or all separate, whatever was measured. `seen` gets what the
    models predict, of strips of `rows` rows if that is given."""

    whole = tuple(range(count))

    def middle(*given: Any) -> list[Section]:
        paths = (section.regions for section in sections(*given) if len(section.regions) == count + 2)
        return [Section(path[1 : 1 + count], (whole,), tuple((1 << number) - 1 for number in whole)) for path in paths]

    def best(judge: Any, problem: Problem, alone: Sequence[float], most: float, before: object = None) -> Strips | Tiles | str:
        ranked = judge.ranked(problem, alone)
        found = ranked if isinstance(ranked, str) else next((way for way in ranked if not rows or way.schedule.rows == rows), "no such strips")
        if not isinstance(found, str):
            seen.update(way=found.schedule.described, schedule=asdict(found.schedule), chain=found.seconds, parts=asdict(found.parts))
            if isinstance(found, Strips):
                seen["rows"] = found.schedule.rows
        else:
            seen["reason"] = found
        return replace(found, seconds=0.0) if merges and not isinstance(found, str) else "separate"

    def partitioned(search: Search, section: Section) -> list[tuple[Region, ...]]:
        seen["apart"] = sum(search.predict(region, True) for region in section.regions)
        search.measured = None
        return split(search, section)

    split = Search.partitioned
    with (
        mock.patch.object(chains, "sections", middle),
        mock.patch.multiple(judging, best=best, least=lambda judge, problem, alone: 0.0),
        mock.patch.object(Search, "partitioned", partitioned),
    ):
        yield


def measured(links: Links, threads: int, rounds: int) -> dict[str, Any]:
    """Predicted and measured seconds of one chain. Raises RuntimeError for a wrong result."""
    module, inputs = links.module(), links.inputs()
    reference = double_precision_outputs(module, inputs)
    ways, seen = {}, dict[str, Any]()
    for name, merges in (("separate", False), ("merged", True)):
        with merging(len(links.layers), merges, seen), warnings.catch_warnings():
            warnings.simplefilter("error")
            ways[name] = tilewright.compile(module, inputs, "native", threads=threads)
        chained = sum(region.kind == "chain" for region in ways[name].image.program.regions)
        if chained != (merges and "rows" in seen):
            raise RuntimeError(f"{links}: {chained} chains where it is to be {name}")
        if (error := relative_error([ways[name](*inputs)], reference)) > LARGEST_ERROR:
            raise RuntimeError(f"{links}: {name} is wrong by {error:.1e}")
    row: dict[str, Any] = {"chain": str(links), "threads": threads, "predicted": seen}
    if "rows" not in seen:
        return row
    calls = {name: partial(run, *inputs) for name, run in ways.items()}
    seconds = interleaved_seconds(calls, rounds, 0.01)
    row["seconds"] = {name: statistics.median(found) for name, found in seconds.items()}
    row["faster_in_halves"] = [_median(seconds["merged"], half) < _median(seconds["separate"], half) for half in (0, 1)]
    row["quartiles"] = {name: tuple(np.quantile(found, (0.25, 0.75))) for name, found in seconds.items()}
    row["taken"] = taken(seen["chain"], seen["apart"])
    return row


def _median(seconds: Sequence[float], half: int) -> float:
    """Of the calls of the first or the second half of the turns."""
    middle = len(seconds) // 2
    return statistics.median(seconds[middle:] if half else seconds[: max(middle, 1)])


def forecast(entry: Mapping[str, Any], links: Links, facts: Machine) -> dict[str, Any]:
    """A measured row with what the models predict now of the strips that were measured, on the machine with these facts."""
    threads, seen = entry["threads"], dict[str, Any]()
    graph = simplify(read(links.module(), links.inputs()).graph)[0]
    with merging(len(links.layers), False, seen, entry["predicted"]["rows"]):
        plan_program(graph, facts, threads)
    return {**entry, "predicted": seen, "taken": "chain" in seen and taken(seen["chain"], seen["apart"])}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How well gains are predicted: the share of chains whose predicted gain has the sign of the measured one, of all and of those where the measured
    gain or loss is beyond `NOISE`; the share whose measured sign is the same in both halves of the turns; the first two of decisions, which take
    gains from 1 % on; the correlation of ranks; and the geometric mean of the gains of the chains that are taken."""
    found = [row for row in rows if "seconds" in row]
    predicted = np.array([row["predicted"]["chain"] - row["predicted"]["apart"] for row in found])
    gained = np.array([row["seconds"]["merged"] - row["seconds"]["separate"] for row in found])
    shares = gained / np.array([row["seconds"]["separate"] for row in found])
    merged = np.array([row["taken"] for row in found])
    clear, sign, decision = np.abs(shares) > NOISE, (predicted < 0) == (gained < 0), merged == (gained < 0)
    repeated = [len(set(row["faster_in_halves"])) == 1 for row in found if "faster_in_halves" in row]
    order = np.corrcoef(np.argsort(np.argsort(predicted)), np.argsort(np.argsort(gained)))[0, 1]
    ratios = np.array([row["seconds"]["separate"] / row["seconds"]["merged"] for row in found])
    return {
        "chains": len(found),
        "taken": int(merged.sum()),
        "sign right": float(np.mean(sign)),
        **({"sign repeated": float(np.mean(repeated))} if repeated else {}),
        "beyond noise": int(clear.sum()),
        "sign right beyond noise": float(np.mean(sign[clear])),
        "decision right": float(np.mean(decision)),
        "decision right beyond noise": float(np.mean(decision[clear])),
        "rank correlation": float(order),
        "gain of taken": float(np.exp(np.mean(np.log(ratios[merged])))) if merged.any() else 1.0,
        "wrongly taken": int(np.sum(merged & (gained > 0))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--random", type=int, default=0, metavar="COUNT", help="random chains instead of those of networks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every N-th chain; parts after the first are added to the file")
    parser.add_argument("--name", help="name of the result file")
    parser.add_argument("--fit", nargs="+", type=Path, metavar="FILE", help="fit the constants to results of random chains instead of measuring")
    options = parser.parse_args()
    if options.fit:
        found = []
        for document in (json.loads(file.read_text()) for file in options.fit):
            chosen = {str(links): links for links in drawn(document["settings"]["seed"], document["settings"]["random"])}
            facts = serialisation.decode(document["settings"]["facts"])
            again = [forecast(row, chosen[row["chain"]], facts) for row in document["results"] if "seconds" in row]
            found.append([row for row in again if "chain" in row["predicted"]])
        Console().print(*fitted([row for rows in found for row in rows]), *map(summary, found))
        return
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    problems = [("", links) for links in drawn(options.seed, options.random)] if options.random else list(LITERATURE.items())
    part, parts = map(int, options.part.split("/"))
    earlier = earlier_results(options.name) if options.name and part > 1 else None
    console, rows = Console(), earlier["results"] if earlier is not None else []
    for name, links in problems[part - 1 :: parts]:
        rows.append({"name": name, **measured(links, options.threads, options.rounds)})
        console.print(_line(rows[-1]))
    order = [str(links) for _, links in problems]
    rows.sort(key=lambda row: order.index(row["chain"]))
    said = summary(rows)
    table = Table("figure", "value")
    for key, value in said.items():
        table.add_row(key, f"{value:.3g}")
    console.print(table)
    if options.name:
        console.print(f"wrote {write_results(options.name, {**vars(options), **said, 'facts': serialisation.encode(machine('native'))}, rows)}")


def _line(row: Mapping[str, Any]) -> str:
    told = row["predicted"]
    if "seconds" not in row:
        return f"{row['name']} {row['chain']}: {told.get('reason', '')}"
    apart, merged = row["seconds"]["separate"], row["seconds"]["merged"]
    sizes = f"{1e6 * apart:.0f} -> {1e6 * merged:.0f} us, {apart / merged:.2f}"
    predicted = f"predicted {1e6 * told['apart']:.0f} -> {1e6 * told['chain']:.0f}"
    return f"{row['name']} {row['chain']}: {sizes}; {predicted}, {'taken' if row['taken'] else 'refused'}"


GRID = {"stored": tuple(x / 20 for x in range(17)), "start_cycles": tuple(500.0 * x for x in range(13))}
"""Values that are tried for the constants."""
MOST_ERROR = 0.1
"""Most that a chain counts when they are fitted: it may be predicted badly for other reasons."""


def fitted(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], float]:
    """The constants of `hardware.calibration.CpuChains` with the least mean error of predicted gains, as a share of the time of separate kernels; no
    chain counts more than `MOST_ERROR`. The second result is this mean."""
    separate, merged = (np.array([row["seconds"][name] for row in rows]) for name in ("separate", "merged"))
    apart = np.array([row["predicted"]["apart"] for row in rows])
    parts = [Parts(**row["predicted"]["parts"]) for row in rows]
    best: tuple[float, dict[str, float]] = (np.inf, {})
    for values in itertools.product(*GRID.values()):
        predicted = np.array([each.seconds(CpuChains(*values)) for each in parts])
        error = np.abs((apart - predicted) - (separate - merged)) / separate
        found = float(np.mean(np.minimum(error, MOST_ERROR)))
        if found < best[0]:
            best = found, dict(zip(GRID, values, strict=True))
    return best[1], best[0]


if __name__ == "__main__":
    main()
