"""Trains the learned part of the ranking on CPUs, and evaluates the resulting order on machines with and without data of their own.

    python -m bench.cpu_learned [--data FILE ...] [--judge FILE ...] [--write] [--folds 4] [--name cpu_learned]

A machine is here a core with the vectors for which kernels are compiled, or with its tile registers (AMX), whatever the number of threads. Every
file of --judge is evaluated four times: by the models alone; by a forest trained on all data ("models and forest"); by one trained on the data of all
other machines ("machine left out"); and by one trained on the data of all other cores, whatever their registers ("core left out"). Files are written
by `bench.cpu_choice --data`; training data in several runs, on two cores and on 16 (there with --beside 7):

    python -m bench.cpu_choice --random 200 --seed 31 --top 40 --evenly 25 --again 15 --data FILE

    python -m bench.cpu_choice --random 8 --seed N --top 8 --by-models 6 --evenly 10 --again 7 --instructions x86-avx2 --data FILE

    python -m bench.cpu_choice --random 16 --seed N --top 10 --by-models 10 --evenly 12 --again 8 [--threads 1] [--instructions x86-avx2] --data FILE

    python -m bench.cpu_choice --random 16 --seed N --top 6 --by-forest 6 --evenly 8 --again 5 [--threads 1] --data FILE

(the third for Zen 5, N from 81000 on, for AVX2 from 82000, for one thread from 83000 and 84000; the last for Zen 3, N from 85000 on, for one thread
from 86000, 8 at a time, when the forest had no data of it, and with 8, 8, 12 and 8 for the first N of both; the first 333 lines of cpu_random date
from when replays gave means and --again was 5; N of cpu_random_avx2 is 71000, 71008 ... 71040). Test data, not trained with (the third and fourth
for Zen 5, the fifth for Zen 3):

    python -m bench.cpu_choice --data FILE
    python -m bench.cpu_choice --top 6 --by-models 6 --evenly 5 --again 7 --instructions x86-avx2 --data FILE
    python -m bench.cpu_choice --top 16 --evenly 24 --again 10 --data FILE
    python -m bench.cpu_choice --top 10 --evenly 16 --again 8 --instructions x86-avx2 --data FILE
    python -m bench.cpu_choice --top 8 --by-forest 8 --evenly 12 --again 8 --data FILE
    python -m bench.cpu_choice D2 D3 D4 D5 D6 R2 R6 R9 R12 Y2 Y4 Y8 Y12 Y18 --only direct --data FILE

Products of many rows with AVX-512 on one thread, call by call, since others worked on the machine:

    python -m bench.cpu_turns --random 44 --seed 94000 --limit 4 --data FILE

Products in bfloat16 on tile registers, first random ones, then those to judge:

    python -m bench.cpu_choice --precision bf16 --random 60 --seed 87000 --top 8 --evenly 8 --again 6 --beside 4 --seconds S --resume --data FILE
    python -m bench.cpu_choice --precision bf16 --top 8 --evenly 8 --again 6 --beside 4 --seconds S --resume --data FILE

`--folds N` evaluates instead the random problems themselves, in N parts that are each left out once ("models and forest"), and by a forest without
their core ("core left out", with each of SHARES of its correction). Neither forest has seen the problem elsewhere: all measurements of a problem are
in one part, and measurements of the problems of a core are left out with it, whatever the core. `--write` puts the forest into the package. Loss is
the time of the first choice over the least measured time, less 1; first choices that were not measured have no loss and are counted.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common import write_results
from bench.cpu_choice import KINDS, MEASURES, WAYS, kind_of, lines, means, of_way, problem, ratios, winograd_rows
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.selection.choice import rank
from tilewright.selection.learned.cpu import MODEL, SHARE_ELSEWHERE, VERSION, Build, build_of, predicted, record, table, units_of
from tilewright.selection.learned.forest import Forest, fit, mean_of, save
from tilewright.selection.ranking import Ranking
from tilewright.tuning import serialisation
from tilewright.tuning.workloads import FP32

DATA = Path(__file__).parent / "data"
RANDOM = (
    "cpu_random.jsonl.gz", "cpu_random_avx2.jsonl.gz", "cpu_random_threads.jsonl.gz", "cpu_random_avx2_threads.jsonl.gz", "cpu_random_zen5.jsonl.gz",
    "cpu_random_zen5_avx2.jsonl.gz", "cpu_random_zen3.jsonl.gz", "cpu_random_turns.jsonl.gz",
)  # fmt: skip
JUDGED = (
    "cpu_layers.jsonl.gz", "cpu_layers_avx2.jsonl.gz", "cpu_layers_16_threads.jsonl.gz", "cpu_layers_zen5.jsonl.gz",
    "cpu_layers_zen5_avx2.jsonl.gz", "cpu_layers_zen3.jsonl.gz",
)  # fmt: skip
TILED_RANDOM, TILED_JUDGED = "cpu_random_amx.jsonl.gz", "cpu_layers_amx.jsonl.gz"
"""Of products in bfloat16 on tile registers."""
OPTIONS = {"max_iter": 300, "learning_rate": 0.08, "max_leaf_nodes": 31, "min_samples_leaf": 10, "l2_regularization": 1.0, "max_features": 0.4}
FORESTS = 2
SLOW_WEIGHT = 1.5
"""The weight of a kernel with twice the least time of its layer is 2**-SLOW_WEIGHT."""
SLOWEST = 3.0
"""Number of doublings of the least time beyond which weights stay constant."""
FASTEST_PART = 4
"""The fastest 1 / FASTEST_PART of the kernels determine the models' error for a whole layer; that part of the error does not affect the order and is
not learned."""
SHARES = (0.25, 0.5, 0.75, 1.0)
"""The shares of a correction by other cores that are compared over random problems (`SHARE_ELSEWHERE`)."""
EVERY = "all problems"
"""The kind of rows that are means over all problems, whatever their kind."""
UNDISTURBED_WEIGHT = 3.0
"""Weight of measurements on an otherwise idle machine: they have less noise and are from the test machine (a weight of 1 was slightly worse in
cross-validation)."""


@dataclass(frozen=True)
class Measured:
    """A problem's candidates as ranked without a learned part, and the measured seconds of each (NaN if not measured). `kind`: for evaluation.
    `undisturbed`: nothing else was measured on the machine's other cores at the same time (`bench.cpu_choice --beside`)."""

    name: str
    kind: str
    machine: Machine
    threads: int
    undisturbed: bool
    problem: Problem
    ranking: Ranking
    seconds: np.ndarray

    @property
    def unit(self) -> str:
        """What multiplies in the kernels, if not vectors."""
        return max(units_of(self.ranking))

    @property
    def build(self) -> Build:
        """What is a machine to the kernels."""
        return build_of(self.machine, self.unit)


def undisturbed(line: Mapping[str, Any]) -> bool:
    """Whether nothing else was measured at the same time. Older lines do not say so, but were undisturbed on two cores only."""
    machine: Machine = serialisation.decode(line["machine"])
    return bool(line.get("beside", machine.processors // line["threads"]) == 1)


def core_name(layer: Measured) -> str:
    return f"{layer.machine.pipeline} ({layer.unit})" if layer.unit else layer.machine.pipeline


def machine_name(layer: Measured) -> str:
    registers = "" if layer.unit else f", {layer.machine.vector_bits} bits"
    return f"{core_name(layer)}{registers}, {layer.threads} threads"


def measured(line: Mapping[str, Any]) -> Measured:
    """The measurements of a line; schedules that are no longer candidates are left out."""
    machine: Machine = serialisation.decode(line["machine"])
    threads = line["threads"]
    found = problem(line["layer"], machine, threads, line.get("precision", FP32))
    only = line.get("only")
    ranking = of_way(rank(found, machine, threads, learned=False), only)
    seconds = np.full(ranking.candidates, np.nan)
    texts = {serialisation.schedule_text(schedule): position for position, schedule in enumerate(ranking.schedules())}
    for text, value in line["times"].items():
        if text in texts:
            seconds[texts[text]] = value
    return Measured(line["layer"], kind_of(line["layer"], only), machine, threads, undisturbed(line), found, ranking, seconds)


def rankings(path: Path) -> list[Measured]:
    """The measurements of each line that has schedules which are still candidates."""
    return [layer for layer in map(measured, lines(path)) if np.isfinite(layer.seconds).any()]


def trained(layers: Sequence[Measured]) -> Forest:
    """The forest trained with all measurements of the layers."""
    kept: list[tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]] = []
    for layer in layers:
        ranking, seconds = layer.ranking, layer.seconds
        off = np.log2(seconds / ranking.seconds)
        fastest = np.argsort(seconds)[: max(5, int(np.isfinite(seconds).sum()) // FASTEST_PART)]
        common, best = np.nanmean(off[fastest]), np.nanmin(seconds)
        for start, part in zip(ranking.starts, ranking.parts, strict=False):
            columns = record(part, layer.machine, layer.threads)
            own = np.s_[start : start + len(part.estimate.seconds)]
            known = np.isfinite(seconds[own])
            if columns is not None and known.any():
                slow = np.minimum(np.log2(seconds[own][known] / best), SLOWEST)
                weights = np.exp2(-SLOW_WEIGHT * slow) * (UNDISTURBED_WEIGHT if layer.undisturbed else 1.0)
                kept.append(({name: column[known] for name, column in columns.items()}, off[own][known] - common, weights))
    names = tuple(sorted({name for columns, _, _ in kept for name in columns}))
    features = np.concatenate([table(columns, names) for columns, _, _ in kept])
    goal, weights = (np.concatenate([entry[at] for entry in kept]) for at in (1, 2))
    return mean_of([fit("gradient_boosting", features, goal, weights, names, VERSION, OPTIONS, seed) for seed in range(FORESTS)])


def write(forest: Forest, layers: Sequence[Measured], path: Path) -> None:
    """Stores the forest that was trained with these layers, as the package reads it."""
    kernels = int(sum(np.isfinite(layer.seconds).sum() for layer in layers))
    machines = sorted(set(map(machine_name, layers)))
    builds = sorted({layer.build for layer in layers})
    save(forest, path, {"builds": builds, "machines": machines, "layers": len(layers), "kernels": kernels})


def judged(layer: Measured, expected: np.ndarray) -> list[dict[str, Any]]:
    """A row for the layer, for convolutions also one for the schedules of Winograd's algorithm alone."""
    order = np.argsort(expected, kind="stable")
    times = {int(position): float(layer.seconds[position]) for position in np.flatnonzero(np.isfinite(layer.seconds))}
    liked = [times[int(position)] for position in order if int(position) in times]
    best = min(liked)
    known = int(order[0]) in times
    row = {"layer": layer.name, "kind": layer.kind, "first measured": known, "loss of ten": min(liked[:10]) / best - 1}
    row |= {"loss": liked[0] / best - 1} if known else {}
    positions = [int(position) for position in order]
    return [row | ratios(times, positions), *winograd_rows(layer.name, layer.ranking, times, positions)]


def summary(rows: Sequence[Mapping[str, Any]], ranked: str) -> list[dict[str, Any]]:
    """Means for each kind and over all problems, and the number of first choices that were not measured."""
    every = [*rows, *({**row, "kind": EVERY} for row in rows if row["kind"] in KINDS)]
    unknown = Counter(row["kind"] for row in every if not row.get("first measured", True))
    return [{**mean, "ranked by": ranked, "first choices not measured": unknown[mean["kind"]]} for mean in means(every)]


def others_of(core: str, layers: Sequence[Measured]) -> list[Measured]:
    """The measurements on other cores, without problems that were also measured on this one."""
    seen = {layer.name for layer in layers if layer.machine.pipeline == core}
    return [layer for layer in layers if layer.machine.pipeline != core and layer.name not in seen]


def on_random_problems(layers: Sequence[Measured], folds: int) -> list[dict[str, Any]]:
    """Losses of the first choice among the measured candidates of random problems, each ranked by a forest that has not seen it."""
    problems = sorted({layer.name for layer in layers})
    part_of = dict(zip(problems, np.random.default_rng(0).integers(0, folds, len(problems)), strict=True))
    cores = sorted({layer.machine.pipeline for layer in layers})
    groups: list[tuple[str, list[Measured], list[Measured], tuple[float, ...]]] = [("models", list(layers), [], (0.0,))]
    for number in range(folds):
        inside = [layer for layer in layers if part_of[layer.name] == number]
        groups.append(("models and forest", inside, [layer for layer in layers if part_of[layer.name] != number], (1.0,)))
    for core in cores:
        inside = [layer for layer in layers if layer.machine.pipeline == core]
        others = others_of(core, layers)
        units = {layer.unit for layer in others}
        groups.append(("core left out", [layer for layer in inside if layer.unit in units], others, SHARES))
    losses: dict[tuple[str, str], list[float]] = {}
    for ranked, judged_on, taught, shares in groups:
        forest = trained(taught) if taught else None
        for layer, share in itertools.product(judged_on, shares):
            found = layer.ranking.seconds if forest is None else predicted(forest, layer.ranking, layer.machine, layer.threads, share)
            assert found is not None, "random problems have schemas with features"
            first = int(np.argmin(np.where(np.isfinite(layer.seconds), found, np.inf)))
            loss = float(layer.seconds[first] / np.nanmin(layer.seconds) - 1)
            way = f"{ranked}, {share} of the correction" if len(shares) > 1 else ranked
            for machine in (machine_name(layer), f"{core_name(layer)}, all"):
                losses.setdefault((machine, way), []).append(loss)
    return [
        {"machine": machine, "ranked by": ranked, "problems": len(found), "loss": float(np.mean(found)), "median loss": float(np.median(found))}
        for (machine, ranked), found in sorted(losses.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", default=[DATA / name for name in (*RANDOM, TILED_RANDOM)])
    parser.add_argument("--judge", type=Path, nargs="+", default=[DATA / name for name in (*JUDGED, TILED_JUDGED)])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--folds", type=int, default=0, metavar="N")
    parser.add_argument("--name", default="cpu_learned")
    options = parser.parse_args()
    for path in (*options.data, *options.judge):
        if not path.is_file():
            parser.error(f"there is no file {path}: bench.cpu_choice --data makes one")
    layers = [entry for path in options.data for entry in rankings(path)]
    if any(layer.kind in WAYS.values() for layer in layers):
        parser.error("lines of --only are for judging: they do not tell how much faster the other way is")
    if options.folds:
        found = on_random_problems(layers, options.folds)
        shown = Table("machine", "ranked by", "problems", "loss", "median", box=None)
        for row in found:
            shown.add_row(row["machine"], row["ranked by"], str(row["problems"]), f"{row['loss']:.3f}", f"{row['median loss']:.3f}")
        Console(width=100).print(shown)
        print(write_results(options.name, {"random problems": [path.name for path in options.data], "folds": options.folds}, found))
        return
    forest = trained(layers)
    forests: dict[object, Forest] = {}

    def without(layer: Measured, of: Callable[[Measured], object]) -> Forest | None:
        """The forest of the layers of other machines than this layer's; None if none of them multiplies with its unit."""
        kept_out = of(layer)
        others = [other for other in layers if of(other) != kept_out]
        if layer.unit not in {other.unit for other in others}:
            return None
        if kept_out not in forests:
            forests[kept_out] = trained(others)
        return forests[kept_out]

    own: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for layer in (layer for path in options.judge for layer in rankings(path)):
        left_out = {
            "machine left out": without(layer, lambda layer: layer.build),
            "core left out": without(layer, lambda layer: layer.machine.pipeline),
        }
        for ranked, its in {"models": None, "models and forest": forest, **left_out}.items():
            if ranked == "models" or its is not None:
                share = SHARE_ELSEWHERE if ranked in left_out else 1.0
                corrected = None if its is None else predicted(its, layer.ranking, layer.machine, layer.threads, share)
                rows = judged(layer, layer.ranking.seconds if corrected is None else corrected)
                own.setdefault((machine_name(layer), ranked), []).extend(rows)
    rows_of_kinds = [{"machine": machine, **mean} for (machine, ranked), rows in own.items() for mean in summary(rows, ranked)]
    every = [{"machine": machine, **row, "ranked by": ranked} for (machine, ranked), rows in own.items() for row in rows]
    shown = Table("machine", "kind", "ranked by", "layers", *MEASURES, "first not measured", box=None)
    for row in rows_of_kinds:
        cells = [f"{row[key]:.3f}" if key in row else "–" for key in MEASURES]
        shown.add_row(row["machine"], row["kind"], row["ranked by"], str(row["layers"]), *cells, str(row["first choices not measured"]))
    Console(width=150).print(shown)
    used = {"trained on": [path.name for path in options.data], "judged on": [path.name for path in options.judge]}
    settings = {**used, "measured on": sorted({f"{layer.machine.description}, {layer.machine.processors} cores" for layer in layers})}
    print(write_results(options.name, settings, [*rows_of_kinds, *every]))
    if options.write:  # last: the results are of a tree without changes
        write(forest, layers, MODEL)
        print(MODEL, MODEL.stat().st_size)


if __name__ == "__main__":
    main()
