"""Convolution layers against cuDNN and Inductor on the GPU present: CNNOpt's tables 4 and 5.

    python -m bench.layer_speed [--layers R2,R12] [--trials 10] [--known bench/data/h200_layers.jsonl.gz] [--name layer_speed_h200]

Everything is timed in one process as replays of CUDA graphs, with one call for each of enough sets of buffers that inputs and weights come from
memory; contenders are interleaved, and the median over rounds counts. cuDNN is the best over NCHW and NHWC, PyTorch's benchmark mode and each
algorithm alone, TF32 off; its result without the algorithms that save multiplications (Winograd, FFT) is given separately, and so is ours without
Winograd. Ours reads the channels-last input with the zeroed halo that the previous layer would have stored. Three of ours are timed: the models'
choice, the best of the first `--trials` in their order, and the best of the file `--known`. Results are compared with float64 before anything is
timed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.common import relative_error, write_results
from bench.cudnn import ALGORITHMS, FEWER_MULTIPLICATIONS, Convolution, Unsupported
from bench.layers import LAYERS, NETWORKS, layer
from tilewright.hardware import identified_machine
from tilewright.ir.problem import Problem
from tilewright.kernels.gpu.winograd.schema import WINOGRAD
from tilewright.kernels.gpu.winograd_fused.schema import WINOGRAD_FUSED
from tilewright.selection.choice import rank
from tilewright.selection.ranking import Ranking
from tilewright.tuning import compile_worker, dataset, serialisation, trial_worker

ROTATED_BYTES = 250e6
MOST_SETS = 200
TOLERANCE = 1e-4
"""Relative to the largest absolute value of the result: errors of Winograd's F(4x4) in both libraries are below."""

Call = Callable[[int], torch.Tensor]
"""Computes the layer with the buffers of one set; returns the output as [1, K, height, width]."""


def replays(call: Call, sets: int) -> Callable[[], float]:
    """A function that times one replay of a graph with one call per set, in microseconds per call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        for number in range(min(sets, 3)):
            call(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        for number in range(sets):
            call(number)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replay() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds * 1e3 / sets

    replay()
    return replay


def on_set(call: Callable[..., torch.Tensor], images: list[torch.Tensor], weights: list[torch.Tensor], number: int) -> torch.Tensor:
    return call(images[number], weights[number])


def library_calls(x: torch.Tensor, w: torch.Tensor, stride: int, padding: int, sets: int) -> dict[str, Call]:
    """PyTorch's convolution and Inductor's in both layouts, and every cuDNN algorithm that supports the layer."""
    calls: dict[str, Call] = {}

    def convolve(image: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(image, weight, None, stride, padding)

    torch._dynamo.reset()  # every layer is a function of its own, not another shape of one function
    compiled = torch.compile(convolve, dynamic=False)
    for name, layout in (("nchw", torch.contiguous_format), ("nhwc", torch.channels_last)):
        images = [x.clone().to(memory_format=layout) for _ in range(sets)]
        weights = [w.clone().to(memory_format=layout) for _ in range(sets)]
        calls[f"cudnn {name} benchmark"] = partial(on_set, convolve, images, weights)
        calls[f"inductor {name}"] = partial(on_set, compiled, images, weights)
        out = convolve(images[0], weights[0])
        outputs = [torch.empty_like(out) for _ in range(sets)]
        for algorithm in ALGORITHMS:
            try:
                convolution = Convolution(images[0], weights[0], outputs[0], stride, padding, algorithm, layout)
                convolution(images[0], weights[0], outputs[0])
            except Unsupported:
                continue

            def call(
                n: int,
                convolution: Convolution = convolution,
                images: list[torch.Tensor] = images,
                weights: list[torch.Tensor] = weights,
                outputs: list[torch.Tensor] = outputs,
            ) -> torch.Tensor:
                convolution(images[n], weights[n], outputs[n])
                return outputs[n]

            calls[f"cudnn {name} {algorithm}"] = call
    return calls


def compare(
    calls: Mapping[str, Call],
    expected: torch.Tensor,
    sets: int,
    rounds: int,
    checked: Mapping[str, tuple[Callable[[], float], float]],
    tolerance: float = TOLERANCE,
) -> list[dict[str, Any]]:
    """Errors, and times of the contenders that are right: medians and quartiles over interleaved rounds. `checked` holds timers and errors of
    contenders that were already found right."""
    entries: list[dict[str, Any]] = [{"contender": name, "median_us": None, "relative_error": error} for name, (_, error) in checked.items()]
    timers: dict[str, Callable[[], float]] = {name: timer for name, (timer, _) in checked.items()}
    for name, call in calls.items():
        entry: dict[str, Any] = {"contender": name, "median_us": None}
        entries.append(entry)
        with torch.no_grad():
            error = relative_error([call(0)], [expected])
        entry["relative_error"] = error
        if not error < tolerance:
            entry["rejected"] = "wrong result"
            continue
        try:
            timers[name] = replays(call, sets)
        except (RuntimeError, Unsupported) as problem:
            entry["rejected"] = str(problem).splitlines()[0]
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            times[name].append(timer())
    for entry in entries:
        if entry["contender"] in times:
            values = times[entry["contender"]]
            low, _, high = statistics.quantiles(values, n=4)
            entry |= {"median_us": statistics.median(values), "quartiles_us": [low, high]}
    return entries


def best(entries: list[dict[str, Any]], wanted: Callable[[str], bool]) -> dict[str, Any] | None:
    measured = [entry for entry in entries if entry["median_us"] is not None and wanted(entry["contender"])]
    return min(measured, key=lambda entry: entry["median_us"], default=None)


def is_plain(name: str) -> bool:
    """Whether the contender is a cuDNN algorithm that saves no multiplications."""
    return name.startswith("cudnn") and not name.endswith("benchmark") and name.split()[-1] not in FEWER_MULTIPLICATIONS


# --- ours --------------------------------------------------------------------------------------------------------------


class Ours:
    """Our candidates of one problem, compiled (into the folder) and measured in this process."""

    def __init__(self, problem: Problem, ranking: Ranking, server: trial_worker.Server, compiler: compile_worker.Server, folder: Path) -> None:
        self.problem, self.ranking = problem, ranking
        self._server, self._compiler, self._folder = server, compiler, folder
        data = serialisation.encode(self.problem)
        self._server({"do": "problem", "problem": data, "seed": 0})
        self._compiler({"do": "problem", "problem": data})
        self._programs: dict[str, dict[str, Any]] = {}

    def program(self, schedule: str) -> dict[str, Any]:
        """The compiled candidate of a schedule, given as text."""
        self.prepare([schedule])
        return self._programs[schedule]

    def prepare(self, schedules: Sequence[str]) -> None:
        """Compiles candidates in parallel."""
        new = [schedule for schedule in dict.fromkeys(schedules) if schedule not in self._programs]
        folders = [str(self._folder / str(len(self._programs) + number)) for number in range(len(new))]
        with ThreadPoolExecutor() as pool:
            questions = [{"do": "compile", "schedule": schedule, "folder": folder} for schedule, folder in zip(new, folders, strict=True)]
            for schedule, answer in zip(new, pool.map(self._compiler, questions), strict=True):
                if "error" in answer:
                    raise RuntimeError(f"{schedule}: {answer['error']}")
                self._programs[schedule] = answer["program"]

    def seconds(self, schedule: str) -> float:
        """The time in a short trial; infinite if the candidate is wrong."""
        answer = self._server({"do": "trial", "program": self.program(schedule), "mode": "cold"})
        return statistics.median(answer["times"]) if answer.get("times") else math.inf

    def first(self, count: int, wanted: Callable[[str], bool]) -> list[str]:
        """The first candidates of the ranking whose schema is wanted."""
        texts = (serialisation.schedule_text(choice.schedule) for choice in self.ranking)
        return list(itertools.islice((text for text in texts if wanted(text)), count))

    def timer(self, schedule: str, early: bool = False) -> tuple[Callable[[], float], float]:
        """A function that times one replay (microseconds per call), and the candidate's relative error. `early`: kernels begin before those ahead of
        them have ended, as in a program."""
        answer = self._server({"do": "trial", "program": self.program(schedule), "mode": "cold"})
        if not answer.get("times"):
            raise RuntimeError(f"{schedule}: {answer.get('error')}")
        loaded = self._server.load(self.program(schedule), "cold")
        self._server.early = early
        try:
            replay = self._server.replay(loaded, statistics.median(answer["times"]), trial_worker.FINE_SECONDS)
        finally:
            self._server.early = False
        return (lambda: self._server.seconds(replay, True) * 1e6), answer["relative_error"]


def is_not_winograd(schedule: str) -> bool:
    return type(serialisation.schedule_of(schedule)) not in (WINOGRAD.schedule, WINOGRAD_FUSED.schedule)


def our_candidates(ours: Ours, trials: int, known: Mapping[str, float]) -> dict[str, str]:
    """Schedules by contender's name: chosen by the models alone, best of `trials`, best known; each with and without Winograd."""
    found: dict[str, str] = {}
    for kind, wanted in (("all schemas", lambda text: True), ("no winograd", is_not_winograd)):
        first = ours.first(max(trials, 1), wanted)
        found[f"ours, {kind}, 0 trials"] = first[0]
        if trials:
            ours.prepare(first)
            found[f"ours, {kind}, {trials} trials"] = min(first, key=ours.seconds)
        good = {text: seconds for text, seconds in known.items() if wanted(text)}
        if good:
            found[f"ours, {kind}, best known"] = min(good, key=lambda text: (good[text], text))
    return found


def measure_layer(name: str, ours: Ours, trials: int, known: Mapping[str, float], rounds: int) -> dict[str, Any]:
    """Measures all contenders of one layer."""
    outputs, channels, size, filter_size, stride = LAYERS[name]
    padding = filter_size // 2
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(1, channels, size * stride, size * stride, device="cuda", generator=generator)
    w = torch.randn(outputs, channels, filter_size, filter_size, device="cuda", generator=generator)
    expected = torch.nn.functional.conv2d(x.double(), w.double(), None, stride, padding)
    sets = max(2, min(MOST_SETS, math.ceil(ROTATED_BYTES / (4 * (x.numel() + w.numel() + expected.numel())))))
    chosen = our_candidates(ours, trials, known)
    timers: dict[str, tuple[Callable[[], float], float]] = {}
    same: dict[str, str] = {}
    for contender, schedule in chosen.items():
        first = next((other for other in same if chosen[other] == schedule), None)
        same[contender] = first or contender
        if first is None:
            timers[contender] = ours.timer(schedule)
    entries = compare(library_calls(x, w, stride, padding, sets), expected, sets, rounds, timers)
    by_name = {entry["contender"]: entry for entry in entries}
    for contender, schedule in chosen.items():
        if same[contender] != contender:
            by_name[contender] = {**by_name[same[contender]], "contender": contender}
            entries.append(by_name[contender])
        by_name[contender]["schedule"] = schedule
    return {"layer": name, "sets": sets, "contenders": entries}


def summary(result: dict[str, Any], trials: int) -> dict[str, float]:
    """Microseconds of the library's best, with and without algorithms that save multiplications, of Inductor, and of ours."""
    entries = result["contenders"]
    wanted: dict[str, Callable[[str], bool]] = {
        "cudnn": lambda name: name.startswith("cudnn"),
        "cudnn gemm": is_plain,
        "inductor": lambda name: name.startswith("inductor"),
    }
    for kind in ("all schemas", "no winograd"):
        for how in ("0 trials", f"{trials} trials", "best known"):
            wanted[f"{kind}, {how}"] = f"ours, {kind}, {how}".__eq__
    found = {name: best(entries, test) for name, test in wanted.items()}
    return {name: entry["median_us"] for name, entry in found.items() if entry is not None}


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def speedups(results: list[dict[str, Any]], trials: int) -> list[dict[str, Any]]:
    """Geometric mean and minimum of cuDNN's (and Inductor's) time over ours, for the layers of each network and for all, for each way of choosing."""
    rows = []
    figures = {result["layer"]: result["summary"] for result in results}
    for letter, network in ("", "all layers"), *NETWORKS.items():
        layers = [name for name in figures if name.startswith(letter)]
        for ours in [name for name in next(iter(figures.values())) if "," in name]:
            for peer in ("cudnn", "cudnn gemm", "inductor"):
                ratios = [figures[name][peer] / figures[name][ours] for name in layers if ours in figures[name] and peer in figures[name]]
                if ratios:
                    rows.append(
                        {
                            "network": network, "ours": ours, "peer": peer, "layers": len(ratios), "geometric_mean": geometric_mean(ratios),
                            "least": min(ratios),
                        }
                    )  # fmt: skip
    return rows


def show(results: list[dict[str, Any]], rows: list[dict[str, Any]], console: Console) -> None:
    names = list(results[0]["summary"])
    table = Table("layer", *names, box=None, title="microseconds")
    for result in results:
        table.add_row(result["layer"], *(f"{result['summary'][name]:.1f}" if name in result["summary"] else "-" for name in names))
    console.print(table)
    means = Table("network", "ours", "over", "geometric mean", "least", box=None, title="speed-up")
    for row in rows:
        means.add_row(row["network"], row["ours"], row["peer"], f"{row['geometric_mean']:.2f}", f"{row['least']:.2f}")
    console.print(means)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--target", default="h200")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--known", type=Path, help="measured layers, for the best known schedule of each")
    parser.add_argument("--name", default="layer_speed_h200", help="the result file's name in bench/results")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    machine = identified_machine(options.target)
    known = {str(entry.layer["name"]): entry.times() for entry in dataset.read(options.known)} if options.known else {}
    server, compiler = trial_worker.Server(0), compile_worker.Server()
    server({"do": "start", "machine": serialisation.encode(machine)})
    compiler({"do": "machine", "machine": serialisation.encode(machine)})
    results: list[dict[str, Any]] = []
    settings = {**vars(options), "known": str(options.known), "cudnn": torch.backends.cudnn.version(), "rotated_bytes": ROTATED_BYTES}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.layers.split(","):
            problem = dataset.layer_problem(layer(name))
            ours = Ours(problem, rank(problem, machine), server, compiler, Path(folder) / name)
            result = measure_layer(name, ours, options.trials, known.get(name, {}), options.rounds)
            result["summary"] = summary(result, options.trials)
            results.append(result)
            print(name, {key: round(value, 1) for key, value in result["summary"].items()}, flush=True)
            write_results(options.name, settings, results)
    rows = speedups(results, options.trials)
    write_results(options.name, {**settings, "speedups": rows}, results)
    show(results, rows, Console(width=200))


if __name__ == "__main__":
    main()
