"""Recurrent layers and the attention RNN on the CPU: Tilewright, PyTorch eager, ONNX Runtime and OpenVINO, interleaved, on one and two threads.

    python -m bench.recurrent
    python -m bench.recurrent "LSTM 512, 64 steps" --threads 2

Each is checked against PyTorch in float64 before it is timed, as in `bench.cpu_networks`. A layer is timed with its initial states of zeros and all
its results: the outputs of all steps and the final states. "tilewright by steps" has kernels of one step where Tilewright would make one kernel of
all steps; "tilewright joined" and "tilewright apart" have both directions of a layer in one kernel and in two, whatever is predicted. For all of
them `predicted_seconds` is what the models predict for the loops.
"""

from __future__ import annotations

import argparse
import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bench.common import Contender, Outcome, Run, compare, write_results
from bench.cpu_networks import OURS, cell, speed_up
from tilewright import zoo
from tilewright.compile import build, read
from tilewright.graph.passes import simplify
from tilewright.hardware import identified_machine
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.partition.joint_loops import decided
from tilewright.partition.merges import BY_MERGES
from tilewright.partition.plan import plan_program
from tilewright.runtime.executable import executable_of
from tilewright.selection.choice import choose
from tilewright.selection.ranking import Choice
from tilewright.tuning.peers import PEERS

BY_STEPS, JOINED, APART = "tilewright by steps", "tilewright joined", "tilewright apart"
DIRECTIONS = "both directions"
Workload = tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...]]
"""A module, example inputs, and the inputs that are timed."""


class Layer(nn.Module):
    """A recurrent layer that returns a flat tuple: outputs, final states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outputs, states = self.layer(x)
        return outputs, *(states if isinstance(states, tuple) else (states,))


def layer(kind: Callable[..., nn.Module], hidden: int, steps: int, batch: int = 1, **options: Any) -> Callable[[], Workload]:
    """One layer whose inputs are as wide as its states."""

    def made() -> Workload:
        torch.manual_seed(0)
        module = Layer(kind(hidden, hidden, **options)).eval()
        return module, (torch.randn(steps, batch, hidden),), (torch.randn(steps, batch, hidden),)

    return made


def attention_rnn() -> Workload:
    module, inputs = zoo.build("attention_rnn", 1, 0)
    torch.manual_seed(1)
    return module, inputs, zoo.NETWORKS["attention_rnn"].example_inputs(1)


WORKLOADS: Mapping[str, Callable[[], Workload]] = MappingProxyType(
    {
        "LSTM 128, 64 steps": layer(nn.LSTM, 128, 64),
        "LSTM 256, 64 steps": layer(nn.LSTM, 256, 64),
        "LSTM 512, 64 steps": layer(nn.LSTM, 512, 64),
        "LSTM 1024, 32 steps": layer(nn.LSTM, 1024, 32),
        "LSTM 256, 100 steps, both directions": layer(nn.LSTM, 256, 100, bidirectional=True),
        "LSTM 128, 64 steps, both directions": layer(nn.LSTM, 128, 64, bidirectional=True),
        "GRU 256, 64 steps, both directions": layer(nn.GRU, 256, 64, bidirectional=True),
        "LSTM 512, 25 steps, batch 16": layer(nn.LSTM, 512, 25, 16),
        "GRU 128, 64 steps": layer(nn.GRU, 128, 64),
        "GRU 256, 64 steps": layer(nn.GRU, 256, 64),
        "GRU 512, 64 steps": layer(nn.GRU, 512, 64),
        "GRU 800, 50 steps": layer(nn.GRU, 800, 50),
        "GRU 512, 25 steps, batch 16": layer(nn.GRU, 512, 25, 16),
        "RNN 512, 64 steps": layer(nn.RNN, 512, 64),
        "attention RNN": attention_rnn,
    }
)


class Planned:
    """Tilewright's own kernels, no trials and no vendor library; by the name whether loops have kernels of one step, and pairs of them are joined."""

    def __init__(self, name: str, threads: int) -> None:
        self.name, self.threads = name, threads
        self.predicted_seconds = 0.0

    def contender(self) -> Contender:
        return Contender(self.name, self.prepare)

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
        target = identified_machine("native")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            imported = read(module.eval(), inputs)
        graph = simplify(imported.graph)[0]
        policy = decided(graph, self.name == JOINED) if self.name in (JOINED, APART) else BY_MERGES
        program = plan_program(graph, target, self.threads, self.choose, policy=policy)
        self.predicted_seconds = sum(lowered.predicted_seconds for lowered in program.regions if lowered.region.kind == "loop")
        program, binaries = build(program, target, lambda *_: None)
        return executable_of(program, imported, target, binaries, threads=self.threads)

    def choose(self, problem: Problem, target: Machine, threads: int) -> Choice:
        if self.name == BY_STEPS and problem.region.kind == "loop":
            raise Unsuitable("kernels of one step are measured")
        return choose(problem, target, threads)


def table_of(results: Sequence[tuple[int, Outcome]], names: Sequence[str]) -> Table:
    """One row per workload and number of threads, one column per contender."""
    table = Table("workload", "threads", *names, "best peer / ours", caption="ms: median ± half interquartile range")
    for threads, workload in dict.fromkeys((threads, outcome.network) for threads, outcome in results):
        row = [outcome for count, outcome in results if (count, outcome.network) == (threads, workload)]
        by_name = {outcome.contender: outcome for outcome in row}
        peers = speed_up([outcome for outcome in row if outcome.contender not in (BY_STEPS, JOINED, APART)])
        table.add_row(workload, str(threads), *(cell(by_name[name]) if name in by_name else "" for name in names), peers)
    return table


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {'; '.join(WORKLOADS)}; all if none is named")
    parser.add_argument("--against", default="eager,onnxruntime,openvino", help=f"of {','.join(PEERS)}")
    parser.add_argument("--threads", default="1,2", help="numbers of threads")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.2, help="least time of one turn in one round")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest error relative to the largest output")
    parser.add_argument("--name", default="recurrent", help="the result file's name in bench/results")
    parsed = parser.parse_args()
    parsed.against = parsed.against.split(",")
    parsed.threads = [int(count) for count in parsed.threads.split(",")]
    if unknown := [name for name in (*parsed.against, *parsed.workloads) if name not in {*PEERS, *WORKLOADS}]:
        parser.error(f"unknown: {', '.join(unknown)}")
    return parsed


def main() -> None:
    options = arguments()
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    results: list[tuple[int, Outcome]] = []
    rows: list[dict[str, Any]] = []
    path = None
    for threads in options.threads:
        torch.set_num_threads(threads)
        for name in options.workloads or WORKLOADS:
            module, example, fresh = WORKLOADS[name]()
            own = [Planned(way, threads) for way in (OURS, BY_STEPS, *((JOINED, APART) if DIRECTIONS in name else ()))]
            contenders = [*(way.contender() for way in own), *(PEERS[peer] for peer in options.against)]
            outcomes = compare(name, module, example, fresh, contenders, options.tolerance, options.rounds, options.seconds)
            predicted = {way.name: way.predicted_seconds for way in own}
            results += [(threads, outcome) for outcome in outcomes]
            rows += [
                {**dataclasses.asdict(outcome), "threads": threads, "predicted_seconds": predicted.get(outcome.contender)} for outcome in outcomes
            ]
            path = write_results(options.name, vars(options), rows)  # after every workload: a crash loses little
    console.print(table_of(results, [OURS, BY_STEPS, JOINED, APART, *options.against]))
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
