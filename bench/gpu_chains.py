"""Regions in one kernel, by tiles in shared memory, against separate kernels and cuDNN on the GPU present: predicted and measured.

    python -m bench.gpu_chains                            30 random chains and 15 wide ones, the constants fitted to them, and the chains of networks
    python -m bench.gpu_chains --random 0 --wide 0 --name gpu_chains_judged     those of networks alone, with the constants of the calibration file
    python -m bench.gpu_chains --fit gpu_chains                            only fits the constants again, to the chains of a result file
    python -m bench.gpu_chains --type float16 --tiles 6 --part 1/1000 --name gpu_chains_float16_1     in 16 bits, for `bench.gpu_chain_model`
    python -m bench.gpu_chains --type float16 --random 0 --wide 0 --name gpu_chains_float16_judged
    python -m bench.gpu_chains --check                    without a GPU: plans and compiles the same chains

The chains of networks are those of `bench.chains.LITERATURE`, and those of `WIDE`, which have many channels in between, or images.

Each chain is compiled as separate kernels, and as one kernel with the tiles predicted fastest without and with chunks of channels (`whole`,
`chunks`), and of both those of which the blocks of a cluster exchange rows (`exchanged`, `exchanged chunks`), and checked against PyTorch in float64;
`merged` is that of the kernels which is predicted to be fastest. `--tiles N` adds up to N other tiles, drawn from those predicted to take at most
`DRAWN` times as long as the fastest. The time of a chain is that of its layers alone: the median time of a program up to its last layer, less that up
to the layer before the first, in interleaved turns that find the level-2 cache full of other data (`bench.gpu_regions`). `programs` are the times of
whole programs, as CUDA graphs in which kernels begin early, which is how networks run. Of chains of networks the time of layers alone is measured for
cuDNN too, of which PyTorch's modules in both layouts and its fused convolution with bias and ReLU take part, as CUDA graphs. The constants of
`hardware.calibration.GpuChains` are fitted to the random chains alone, before the others are compiled with them; chains of networks in 16 bits are
compiled with the learned model of the package, random ones always without. Kernels are compiled ahead on all cores. `--part K/N` measures every N-th
chain of networks; parts after the first measure no random ones, take the constants of the first, and are added to its file.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import exp, inf, log
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import tilewright
from bench import half
from bench.chains import LARGEST_ERROR, LITERATURE, Layer, Links, drawn, inverted, merging, separable, summary, taken
from bench.common import double_precision_outputs, earlier_results, interleaved_seconds, relative_error, write_results
from bench.fusion import fusing
from bench.gpu_half import OPERATOR_TOLERANCE
from bench.gpu_networks import FLUSHED_BYTES, captured, cold_seconds
from tilewright.hardware import identified_machine
from tilewright.hardware.calibration import UNFITTED_CHAINS, GpuChains, gpu_chains
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.partition import tile_judge
from tilewright.partition.canonical import key_of
from tilewright.partition.tile_judge import TileJudge, TileParts, Tiles
from tilewright.partition.tile_kernel import TileSchedule
from tilewright.runtime.executable import Executable
from tilewright.runtime.gpu import GpuEngine, gpu_engine

GRID = {"work": (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5, 1.8, 2.2), "turn": (0.0, 250.0, 500.0, 1000.0, 1500.0, 2000.0, 3000.0, 4000.0)}
"""Values that are tried for the constants."""
MERGED = {"whole": (False, False), "chunks": (True, False), "exchanged": (False, True), "exchanged chunks": (True, True)}
"""Ways of one kernel: whether tiles take chunks of channels, and whether the blocks of a cluster exchange rows."""
DRAWN = 2.0
"""Predicted time over that of the fastest tiles up to which others are drawn."""
PREDICTED: dict[object, list[Tiles]] = {}
"""All tiles of chains that were predicted, by problem and constants."""

WIDE: Mapping[str, Links] = MappingProxyType(
    {
        "MobileNetV2 3, batch 16": replace(inverted(24, 144, 24, 56), batch=16),
        "MobileNetV2 5, batch 16": replace(inverted(32, 192, 32, 28), batch=16),
        "MobileNetV2 8, batch 32": replace(inverted(64, 384, 64, 14), batch=32),
        "MobileNetV2 12, batch 32": replace(inverted(96, 576, 96, 14), batch=32),
        "EfficientNet-B0 6": inverted(40, 240, 40, 28, 1, 5),
        "EfficientNet-B0 10, batch 16": replace(inverted(80, 480, 80, 14, 1, 5), batch=16),
        "MobileNetV1 8, batch 16": replace(separable(512, 128, 14), batch=16),
        "ConvNeXt-T 1": Links(96, 56, (Layer(384), Layer(96))),
        "ConvNeXt-T 1, batch 8": Links(96, 56, (Layer(384), Layer(96)), 8),
        "ResNet-50 2a, batch 8": Links(256, 56, (Layer(64), Layer(64, 3), Layer(256)), 8),
    }
)
"""Chains of networks with many channels in between, of which tiles may take a chunk at a time."""


def drawn_wide(seed: int, count: int, batches: Sequence[int] = (1, 4, 8, 16)) -> Iterator[Links]:
    """Random chains whose last layer sums over many channels: inverted residuals of any filter and stride, and pairs of pointwise layers, of one of
    these numbers of images; none of them in `LITERATURE` or `WIDE`."""
    source = random.Random(f"wide {seed}")
    known = {*LITERATURE.values(), *WIDE.values()}
    while count:
        extent, channels = source.choice([7, 10, 14, 20, 28, 36, 48, 56]), 8 * source.randint(2, 12)
        wide, outputs = channels * source.choice([3, 4, 6, 8]), 8 * source.randint(2, 16)
        size, stride, batch = source.choice([1, 3, 3, 5]), source.choice([1, 1, 2]), source.choice(batches)
        links = inverted(channels, wide, outputs, extent, stride, size) if size > 1 else Links(channels, extent, (Layer(wide), Layer(outputs)))
        if links not in known and 2 * batch * extent**2 * wide * (channels + outputs) < 4e9:
            known.add(links)
            count -= 1
            yield replace(links, batch=batch)


def ways_of(tiles: int) -> tuple[str, ...]:
    """The ways in which a chain is compiled, with so many drawn tiles."""
    return ("separate", *MERGED, *(f"tiles {number}" for number in range(1, tiles + 1)))


def with_way(found: Sequence[Tiles], way: str, links: Links) -> list[Tiles]:
    """Those of all predicted tiles of a chain, fastest first, that are compiled in this way.

    Raises:
        Unsuitable: if there are none.
    """
    modes = [(tiles.schedule.chunk > 0, tiles.schedule.exchanged > 0) for tiles in found]
    if way in MERGED:
        chosen = [tiles for tiles, mode in zip(found, modes, strict=True) if mode == MERGED[way]]
    elif way == "separate":
        chosen = [*found]
    else:
        firsts = {modes.index(mode) for mode in set(modes)}
        others = [tiles for number, tiles in enumerate(found) if number not in firsts and tiles.seconds < DRAWN * found[0].seconds]
        number = int(way.split()[1])
        chosen = random.Random(f"tiles of {links}").sample(others, len(others))[number - 1 : number]
    if not chosen:
        raise Unsuitable(f"no tiles for {way}")
    return chosen


@contextmanager
def planned(links: Links, way: str, constants: GpuChains | None, seen: dict[str, Any]) -> Iterator[None]:
    """Inside the context the layers of the chain become one kernel, or separate ones, as predicted with constants, or else as by the package."""
    predicted = TileJudge.predicted

    def suitable(judge: TileJudge, problem: Problem, limit: float = inf, count: int | None = None) -> list[Tiles]:
        key = (key_of(problem), constants, limit)
        if key not in PREDICTED:  # once for all ways
            PREDICTED[key] = predicted(judge, problem, limit)
        return with_way(PREDICTED[key], way, links)

    with fusing("chains"), ExitStack() as stack, mock.patch.object(TileJudge, "predicted", suitable):
        if constants is not None:
            stack.enter_context(mock.patch.multiple(tile_judge, gpu_chains=lambda *_: constants, chain_model=lambda _: None))
        with merging(len(links.layers), way != "separate", seen, judging=TileJudge), warnings.catch_warnings():
            warnings.simplefilter("error")
            yield


def made(links: Links, dtype: str, device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The chain and what surrounds it in the type, with inputs, on the device."""
    torch.manual_seed(0)
    kind: torch.dtype = getattr(torch, dtype)
    return links.module().to(device, kind), tuple(x.to(device, kind) for x in links.inputs())


class NotPlanned(RuntimeError):
    """A chain is not planned as asked for."""


def compiled(links: Links, way: str, constants: GpuChains | None, seen: dict[str, Any], dtype: str, target: str) -> Executable:
    """The chain and what surrounds it, compiled for the target.

    Raises:
        NotPlanned: if it is not planned as asked for, such as with the next best tiles because these have no kernel.
    """
    module, inputs = made(links, dtype, "cpu")
    with planned(links, way, constants, seen):
        executable = tilewright.compile(module, inputs, identified_machine(target))
    chained = [row.schedule for row in executable.plan.rows if row.kind == "chain"]
    if len(chained) != (way != "separate" and "way" in seen):
        raise NotPlanned(f"{links}: {len(chained)} chains where {'none' if way == 'separate' else 'one'} is asked for")
    if chained and not chained[0].startswith(asked := str(TileSchedule(**seen["schedule"]))):
        raise NotPlanned(f"{links}: {chained[0]}, not {asked}")
    return executable


@dataclass(frozen=True)
class Ahead:
    """A chain that was compiled in all ways: what the models said of each, the artifacts of those that exist, and what went wrong."""

    known: Mapping[str, dict[str, Any]]
    artifacts: Mapping[str, Path]
    error: str = ""

    @property
    def reasons(self) -> dict[str, str]:
        """Why some ways do not exist."""
        return {name: known["reason"] for name, known in self.known.items() if name not in self.artifacts}


def compile_ahead(task: tuple[str, Links], folder: str, constants: GpuChains | None, dtype: str, target: str, tiles: int) -> Ahead:
    """Compiles a chain, with a name, in all ways; runs in a process of its own."""
    name, links = task
    known: dict[str, dict[str, Any]] = {way: {} for way in ways_of(tiles)}
    artifacts: dict[str, Path] = {}
    for way, seen in known.items():
        try:
            executable = compiled(links, way, constants, seen, dtype, target)
        except NotPlanned as error:
            seen["reason"] = str(error)
            continue
        except Exception as error:
            return Ahead(known, artifacts, f"{links}: {error}")
        if way == "separate" or "way" in seen:
            artifacts[way] = Path(folder) / f"{name} {way}.zip"
            executable.save(artifacts[way])
    return Ahead(known, artifacts)


def on_all_cores() -> ProcessPoolExecutor:
    """As many processes as there are cores, none of which has the GPU of this one."""
    return ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn"))


def all_ahead(
    chains: Mapping[str, Links], folder: str, constants: GpuChains | None, dtype: str, target: str, tiles: int
) -> Iterator[tuple[str, Links, Ahead]]:
    """Compiles chains on all cores; each is yielded with its name when it and those before it are ready."""
    work = partial(compile_ahead, folder=folder, constants=constants, dtype=dtype, target=target, tiles=tiles)
    with on_all_cores() as pool:
        yield from ((name, links, ahead) for (name, links), ahead in zip(chains.items(), pool.map(work, chains.items()), strict=True))


def prefixes(executable: Executable, inputs: tuple[Tensor, ...]) -> tuple[GpuEngine, Callable[[int], None]]:
    """An engine that runs a program's regions one after another, and a function that runs so many of them."""
    image = executable.image
    engine = gpu_engine(image.program, image.binaries, in_order=True)
    outputs = executable._allocate()
    pointers = [tensor.data_ptr() for tensor in (*executable._admission.admit(inputs), *outputs)]

    def run(count: int, kept: object = (outputs, inputs)) -> None:
        engine.bind(pointers)
        engine.run(0, count)
        engine.finish()

    return engine, run


def places(ways: Mapping[str, Executable]) -> dict[str, tuple[int, int]]:
    """For each way the regions of the chain, as (first, end)."""
    found = {}
    rows = {name: [row.name for row in way.plan.rows] for name, way in ways.items()}
    for name in ways.keys() - {"separate"}:
        (merged,) = [region for region in ways[name].plan.rows if region.kind == "chain"]
        end = rows[name].index(merged.name)
        before = rows[name][end - 1]  # the same in all programs
        found[name] = (end, end + 1)
        found["separate"] = (rows["separate"].index(before) + 1, rows["separate"].index(merged.name) + 1)
    return found


class FusedByCudnn(nn.Module):
    """cuDNN's convolution with bias and ReLU."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        own = self.layer
        assert not isinstance(own.padding, str)
        result: Tensor = torch.cudnn_convolution_relu(x, own.weight, own.bias, own.stride, own.padding, own.dilation, own.groups)
        return result


def cudnn_ways(links: Links, dtype: str, inputs: tuple[Tensor, ...]) -> dict[str, Callable[[], object]]:
    """PyTorch's ways of computing the layer before the chain, and of that and the chain, as CUDA graphs; those that work."""
    found: dict[str, Callable[[], object]] = {}
    for layout in (torch.contiguous_format, torch.channels_last):
        module = made(links, dtype, "cuda")[0].to(memory_format=layout)  # type: ignore[call-overload]
        assert isinstance(module, nn.Sequential)
        x = inputs[0].to(memory_format=layout)
        first, *layers = list(module)[:-1]
        fused = [FusedByCudnn(layer[0]) for layer in layers if isinstance(layer, nn.Sequential) and isinstance(layer[0], nn.Conv2d)]
        kind = "cl" if layout is torch.channels_last else "nchw"
        for name, parts in (("before", [first]), ("modules", [first, *layers]), ("fused", [first, *fused])):
            try:
                found[f"{name} {kind}"] = partial(captured(nn.Sequential(*parts).eval(), (x,)), x)
            except RuntimeError:  # cuDNN has no such kernel
                continue
    return found


def measured(links: Links, ahead: Ahead, dtype: str, rounds: int, scratch: Tensor, longest: float, with_peers: bool) -> dict[str, Any]:
    """Predicted and measured seconds of one chain, also of cuDNN if `with_peers`, and whether predictions take it, which they do below `longest`
    seconds apart. Raises RuntimeError if it was not compiled, or is wrong."""
    if ahead.error:
        raise RuntimeError(ahead.error)
    known, (module, inputs) = ahead.known, made(links, dtype, "cuda")
    torch.backends.cudnn.benchmark = False  # which takes seconds for each chain
    reference = double_precision_outputs(module, inputs)
    torch.backends.cudnn.benchmark = with_peers
    with ExitStack() as stack:
        ways = {name: stack.enter_context(tilewright.load(path)) for name, path in ahead.artifacts.items()}
        errors = {name: relative_error([run(*inputs)], reference) for name, run in ways.items()}
        if max(errors.values()) > (LARGEST_ERROR if dtype == "float32" else OPERATOR_TOLERANCE):
            raise RuntimeError(f"{links} is wrong: {errors}")
        merged = {name: known[name] for name in ways if name != "separate"}
        row: dict[str, Any] = {"predicted": {"apart": known["separate"]["apart"], "ways": merged}, "errors": errors}
        row["reasons"] = ahead.reasons
        if not merged:
            return row
        calls: dict[str, Callable[[], object]] = {}
        for name, (first, end) in places(ways).items():
            engine, run = prefixes(ways[name], inputs)
            stack.callback(engine.close)
            calls |= {f"{name} before": partial(run, first), f"{name} until": partial(run, end)}
        programs = {f"{name} program": partial(run, *inputs) for name, run in ways.items()}
        peers = cudnn_ways(links, dtype, inputs) if with_peers else {}
        found = interleaved_seconds({**calls, **programs, **peers}, rounds, 0.0005, partial(cold_seconds, scratch=scratch))
        medians = {name: statistics.median(seconds) for name, seconds in found.items()}
        row["calls"] = {name: (medians[name], *np.quantile(seconds, (0.25, 0.75))) for name, seconds in found.items()}
        row["seconds"] = {name: medians[f"{name} until"] - medians[f"{name} before"] for name in ways}
        row["programs"] = {name: medians[f"{name} program"] for name in ways}
        row["cudnn"] = {name: medians[name] - medians[f"before {name.split()[1]}"] for name in peers if not name.startswith("before")}
        fastest = min(merged, key=lambda name: merged[name]["chain"])
        row["seconds"]["merged"], row["predicted"]["chain"] = row["seconds"][fastest], merged[fastest]["chain"]
        apart = row["predicted"]["apart"]
        row["fastest"], row["taken"] = fastest, apart < longest and taken(merged[fastest]["chain"], apart)
        return row


def fitted(rows: Sequence[Mapping[str, Any]], clock_hz: float) -> tuple[GpuChains, float]:
    """The constants with whose decisions the programs of these chains take the least time: the geometric mean over that of separate kernels, the
    second result. Among equal ones those whose predictions are closest."""
    found = [row for row in rows if "seconds" in row and min(row["seconds"].values()) > 0]
    ways = [
        [(TileParts(**way["parts"]), row["seconds"][name], row["programs"][name]) for name, way in row["predicted"]["ways"].items()] for row in found
    ]

    def judged(constants: GpuChains) -> tuple[float, float]:
        gains, errors = [], []
        for row, merged in zip(found, ways, strict=True):
            predicted = [(parts.seconds(constants, clock_hz), seconds, whole) for parts, seconds, whole in merged]
            errors += [log(chain / seconds) ** 2 for chain, seconds, _ in predicted]
            chain, _, whole = min(predicted)
            gains.append(log(whole / row["programs"]["separate"]) if taken(chain, row["predicted"]["apart"]) else 0.0)
        return statistics.fmean(gains), statistics.fmean(errors)

    best = min((GpuChains(*values) for values in itertools.product(*GRID.values())), key=judged)
    return best, exp(judged(best)[0])


def line(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return f"{row['name']} {row['chain']}: FAILED: {row['error']}"
    if "seconds" not in row:
        return f"{row['name']} {row['chain']}: {'; '.join(dict.fromkeys(row['reasons'].values()))}"
    told, apart = row["predicted"], 1e6 * row["seconds"]["separate"]
    peer = f", cuDNN {1e6 * min(row['cudnn'].values()):.1f}" if row["cudnn"] else ""
    text = f"{row['name']} {row['chain']}: separate {apart:.1f} us (predicted {1e6 * told['apart']:.1f}){peer}"
    for name, way in told["ways"].items():
        chosen = "" if name != row["fastest"] else ", taken" if row["taken"] else ", refused"
        seconds = 1e6 * row["seconds"][name]
        text += f"; {name} {seconds:.1f}, {apart / seconds:.2f} times as fast (predicted {1e6 * way['chain']:.1f} {way['way']}{chosen})"
    return text


def random_rows(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings of a result file, and the rows of random chains that were measured.

    Raises:
        ValueError: if there is no such file, or it has none.
    """
    if (file := earlier_results(name)) is None:
        raise ValueError(f"there are no results {name}")
    rows = [row for row in file["results"] if row.get("set") == "random" and "programs" in row]
    if not rows:
        raise ValueError(f"{name} has no random chains with times of whole programs")
    return file["settings"], rows


def random_chains(options: argparse.Namespace) -> dict[str, Links]:
    """The chains to which the constants are fitted."""
    plain = {f"random {number}": links for number, links in enumerate(drawn(options.seed, options.random))}
    return {**plain, **{f"wide {number}": links for number, links in enumerate(drawn_wide(options.seed, options.wide, options.batches))}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--random", type=int, default=30, metavar="COUNT", help="random chains to which the constants are fitted")
    parser.add_argument("--wide", type=int, default=15, metavar="COUNT", help="random chains with many channels in between, of the same use")
    parser.add_argument("--batches", type=lambda text: [*map(int, text.split(","))], default=[1, 4, 8, 16], help="of the wide chains")
    parser.add_argument("--tiles", type=int, default=0, metavar="N", help="other tiles that are drawn for each random chain")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every N-th chain of networks; parts after the first are added to the file")
    parser.add_argument("--type", default="float32", choices=("float32", *half.TYPES), help="of values; 16 bits are multiplied on tensor cores")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--name", default="gpu_chains", help="name of the result file")
    parser.add_argument("--fit", metavar="NAME", help="only fit the constants again, to the random chains of a result file")
    parser.add_argument("--check", action="store_true", help="plan and compile for --target, which need not be present")
    parser.add_argument("--target", default="h200", help="of --check and --fit")
    options = parser.parse_args()
    console = Console(width=180)
    part, parts = map(int, options.part.split("/"))
    chosen, networks = random_chains(options) if part == 1 else {}, dict(list({**LITERATURE, **WIDE}.items())[part - 1 :: parts])
    if options.fit is not None:
        try:
            _, found = random_rows(options.fit)
        except ValueError as error:
            parser.error(str(error))
        console.print(*fitted(found, identified_machine(options.target).clock_hz))
        return
    if options.check:
        with tempfile.TemporaryDirectory() as folder:
            every = chosen | networks
            for _, links, ahead in all_ahead(every, folder, UNFITTED_CHAINS, options.type, options.target, options.tiles):
                if text := ahead.error or "; ".join(f"{way}: {reason}" for way, reason in ahead.reasons.items()):
                    console.print(f"{links}: {text}")
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    scratch, target = torch.empty(FLUSHED_BYTES // 4, device="cuda"), identified_machine("cuda")
    in_half, rows = options.type != "float32", list[dict[str, Any]]()
    known = gpu_chains(target, in_half)
    constants = known if known is not None and not chosen else UNFITTED_CHAINS
    longest = known.longest if in_half and known is not None else inf
    earlier = earlier_results(options.name) if part > 1 else None
    if earlier is not None:
        constants, rows = GpuChains(**earlier["settings"]["constants"]), earlier["results"]
    for kind, problems in (("random", chosen), ("literature", networks)):
        with tempfile.TemporaryDirectory() as folder:
            judging = None if in_half and kind == "literature" else constants
            compiled_ones = all_ahead(problems, folder, judging, options.type, target.name, options.tiles if kind == "random" else 0)
            for name, links, ahead in list(compiled_ones):  # all before the first is timed
                row: dict[str, Any] = {"name": name, "set": kind, "chain": str(links)}
                try:
                    row |= measured(links, ahead, options.type, options.rounds, scratch, longest, with_peers=kind == "literature")
                except RuntimeError as error:  # said at the end as well; the other chains are still measured
                    row["error"] = str(error)
                rows.append(row)
                console.print(line(row))
                write_results(options.name, {**vars(options), "constants": vars(constants)}, rows)  # what an interrupted run has found
        if kind == "random" and any("seconds" in row for row in rows):
            constants, mean = fitted(rows, target.clock_hz)
            console.print(f"fitted: {constants}; decisions of these take {mean:.3f} of the time of separate kernels")
    said = {**summary([row for row in rows if row["set"] == "literature"]), "constants": vars(constants)}
    table = Table("figure", "value")
    for key, value in said.items():
        table.add_row(key, str(value) if key == "constants" else f"{value:.3g}")
    console.print(table)
    console.print(f"wrote {write_results(options.name, {**vars(options), **said}, rows)}")
    if failed := [row["name"] for row in rows if "error" in row]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
