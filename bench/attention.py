"""Attention in one kernel: candidates of the ranking, the plan without attention regions, and PyTorch's scaled_dot_product_attention.

    python -m bench.attention [SHAPE ...] [--target cuda] [--top 10] [--evenly 10] [--name attention_h200]
    python -m bench.attention 16x2048x64 16x4096x128 bert128 bert512x8 --precision fp16 --top 5 --evenly 5 --name attention_fp16_h200
    python -m bench.attention --target native --threads 2 --top 3 --evenly 0 --name attention_native
    python -m bench.attention --target native --precision bf16 --top 1 --evenly 0 --processor-time --name attention_bf16_native

For each shape every contender computes in float32 (TF32 off), or in the type or precision asked for, and is checked against PyTorch in float64 before
it is timed, in interleaved turns. On a GPU each is one CUDA graph (or Tilewright's own), and finds the level-2 cache full of other data.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.common import Contender, Run, compare, seconds_of_call, write_results
from bench.cpu_networks import cell
from bench.gpu_networks import FLUSHED_BYTES, captured, cold_seconds
from tilewright.compile import build, read, source_files
from tilewright.frontend.imported import Imported
from tilewright.graph.passes import simplify
from tilewright.hardware import machine as find_machine
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Program
from tilewright.kernels.schema import JoinDecision, Numerics
from tilewright.partition.joining import RowJudge
from tilewright.partition.plan import plan_program
from tilewright.runtime.executable import executable_of
from tilewright.selection.choice import choose, rank
from tilewright.selection.ranking import Choice
from tilewright.toolchain.build import compile_kernels


@dataclass(frozen=True)
class Shape:
    """`heads` query heads of which `heads / keys_heads` share one of K and V; `masked`: a boolean mask of padded sequences."""

    batch: int
    heads: int
    keys_heads: int
    queries: int
    keys: int
    size: int
    causal: bool = False
    masked: bool = False

    def module(self) -> nn.Module:
        return _Attention(self.causal, self.heads != self.keys_heads)

    def inputs(self, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        q = torch.randn(self.batch, self.heads, self.queries, self.size, device=device).to(dtype)
        k, v = (torch.randn(self.batch, self.keys_heads, self.keys, self.size, device=device).to(dtype) for _ in range(2))
        lengths = torch.randint(self.keys // 2, self.keys + 1, (self.batch, 1, 1, 1), device=device)
        return (q, k, v, torch.arange(self.keys, device=device) < lengths) if self.masked else (q, k, v)


class _Attention(nn.Module):
    def __init__(self, causal: bool, grouped: bool) -> None:
        super().__init__()
        self.causal, self.grouped = causal, grouped

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal, enable_gqa=self.grouped)


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "16x2048x64": Shape(1, 16, 16, 2048, 2048, 64),
        "16x4096x128": Shape(1, 16, 16, 4096, 4096, 128),
        "bert128": Shape(1, 12, 12, 128, 128, 64),
        "bert384": Shape(1, 12, 12, 384, 384, 64),
        "bert512": Shape(1, 12, 12, 512, 512, 64),
        "bert128x8": Shape(8, 12, 12, 128, 128, 64),
        "bert384x8": Shape(8, 12, 12, 384, 384, 64),
        "bert512x8": Shape(8, 12, 12, 512, 512, 64),
        "bert128x8 padded": Shape(8, 12, 12, 128, 128, 64, masked=True),
        "gpt2": Shape(1, 12, 12, 1024, 1024, 64, causal=True),
        "grouped": Shape(1, 32, 8, 1024, 1024, 128, causal=True),
        "vit": Shape(1, 6, 6, 197, 197, 64),
        "vitx8": Shape(8, 6, 6, 197, 197, 64),
        "decode": Shape(1, 32, 32, 1, 4096, 64),
        "decode, one head": Shape(1, 1, 1, 1, 4096, 64),
        "decode, grouped": Shape(1, 32, 8, 1, 1024, 128),
    }
)


def joining(joins: bool) -> AbstractContextManager[Any]:
    """Inside the context, attention becomes one region, or never does, whatever the models predict."""
    return mock.patch.object(RowJudge, "in_one", lambda *_: JoinDecision(joins, "as the benchmark asks"))


TYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""By precision: the type of the inputs."""
TOLERANCES = {"fp32": 1e-4, "tf32": 4e-3, "fp16": 4e-3, "bf16": 3e-2}
"""Largest errors relative to the largest output."""


@dataclass(frozen=True)
class Plans:
    """The programs of a shape: with its attention region under some schedules, by the schedule's text, and without one (`apart`)."""

    shape: Shape
    machine: Machine
    threads: int
    imported: Imported
    choices: Mapping[str, Choice]
    candidates: Mapping[str, Program]
    apart: Program
    precision: str

    @classmethod
    def of(cls, shape: Shape, machine: Machine, device: torch.device, threads: int, top: int, evenly: int, precision: str) -> Plans:
        """The plans with the ranking's first `top` candidates, and with `evenly` others, as far apart in the ranking as possible."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            imported = read(shape.module().eval(), shape.inputs(device, TYPES[precision]))
        graph, _ = simplify(imported.graph)
        problems: list[Problem] = []
        numerics = Numerics(tf32=precision == "tf32")

        def plan(joins: bool, chooser: Callable[[Problem], Choice | None] = lambda problem: None) -> Program:
            with joining(joins):
                usual = partial(choose, numerics=numerics)
                return plan_program(graph, machine, threads, lambda problem, *rest: chooser(problem) or usual(problem, *rest), numerics=numerics)

        plan(True, lambda problem: problems.append(problem) if problem.region.kind == "attention" else None)
        (problem,) = problems
        every = list(rank(problem, machine, threads, numerics))
        rest = every[top:]
        others = [rest[len(rest) * place // evenly] for place in range(evenly)] if len(rest) >= evenly else rest
        choices = {str(choice.schedule): choice for choice in (*every[:top], *others)}
        chosen = {
            name: plan(True, lambda problem, choice=choice: choice if problem.region.kind == "attention" else None)  # type: ignore[misc]
            for name, choice in choices.items()
        }
        return cls(shape, machine, threads, imported, choices, chosen, plan(False), precision)

    def contender(self, name: str, program: Program) -> Contender:
        def prepare(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
            built, binaries = build(program, self.machine, lambda *_: None)
            if any(lowered.region.kind == "torch" for lowered in built.regions):
                raise RuntimeError("a region runs through PyTorch")
            return executable_of(built, self.imported, self.machine, binaries, threads=self.threads)

        return Contender(name, prepare)

    def contenders(self) -> list[Contender]:
        """Candidates named by their schedules, the plan without attention regions, and PyTorch."""
        own = [self.contender(name, program) for name, program in (*self.candidates.items(), ("apart", self.apart))]
        backends = {"torch": None, "torch math": SDPBackend.MATH}
        if self.machine.is_gpu:
            backends["torch efficient"] = SDPBackend.EFFICIENT_ATTENTION
            if TYPES[self.precision] in (torch.float16, torch.bfloat16) and not self.shape.masked:
                backends["torch flash"] = SDPBackend.FLASH_ATTENTION
        return own + [Contender(name, partial(by_torch, backend=backend)) for name, backend in backends.items()]


def processor_seconds_of_call(call: Callable[[], object]) -> float:
    """Seconds for which a processor worked on one synchronous call, in all threads of the process: on one thread what it takes by itself, but for the
    caches and memory that other processes use meanwhile."""
    start = time.process_time()
    call()
    return time.process_time() - start


def by_torch(module: nn.Module, inputs: tuple[Tensor, ...], backend: SDPBackend | None = None) -> Run:
    """PyTorch, by a backend or by the one that it prefers; on a GPU as a CUDA graph."""

    def run(*given: Tensor) -> Any:
        with torch.inference_mode():
            if backend is None:
                return module(*given)
            with sdpa_kernel(backend):
                return module(*given)

    return captured(run, inputs) if inputs[0].is_cuda else run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)}; all if none is named")
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--top", type=int, default=10, help="candidates of each shape")
    parser.add_argument("--evenly", type=int, default=10, help="candidates from the rest of each shape's ranking")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=2e-5, help="least time of one turn in one round")
    parser.add_argument("--processor-time", action="store_true", help="on one thread of a CPU: do not count time in which other processes run")
    parser.add_argument("--precision", choices=TYPES, default="fp32")
    parser.add_argument("--name", default="attention_h200", help="the result file's name in bench/results")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.precision == "tf32"
    torch.set_num_threads(options.threads)
    machine = find_machine(options.target)
    device = torch.device("cuda" if machine.is_gpu else "cpu")
    on_cpu = processor_seconds_of_call if options.processor_time else seconds_of_call
    seconds_of = partial(cold_seconds, scratch=torch.empty(FLUSHED_BYTES // 4, device=device)) if machine.is_gpu else on_cpu
    counts = options.threads, options.top, options.evenly
    planned = {name: Plans.of(SHAPES[name], machine, device, *counts, options.precision) for name in options.shapes or SHAPES}
    # all kernels of all shapes on all cores: what is built later comes from the cache
    programs = [program for plans in planned.values() for program in (*plans.candidates.values(), plans.apart)]
    compile_kernels([source for program in programs for source in source_files(program, machine)], machine)
    rows: list[dict[str, Any]] = []
    table = Table(
        "shape", "candidate", "ms", "predicted", "apart", "torch", "torch / candidate", title=f"attention on {machine.name}, {options.precision}"
    )
    for name, plans in planned.items():
        shape, choices = plans.shape, plans.choices
        inputs, tolerance = shape.inputs(device, TYPES[options.precision]), TOLERANCES[options.precision]
        outcomes = compare(name, shape.module(), inputs, inputs, plans.contenders(), tolerance, options.rounds, options.seconds, seconds_of)
        for outcome in outcomes:
            choice = choices.get(outcome.contender)
            predicted = {"predicted_seconds": choice.seconds, "terms": dict(choice.terms)} if choice else {}
            rows.append({**dataclasses.asdict(outcome), **predicted})
            if outcome.status != "measured":
                print(f"{name}, {outcome.contender}: {outcome.status}: {outcome.reason}", flush=True)
        by_name = {outcome.contender: outcome for outcome in outcomes}
        peers = [by_name[peer] for peer in by_name if peer.startswith("torch") and by_name[peer].median_seconds]
        best = min(peers, key=lambda outcome: outcome.median_seconds or 0.0, default=by_name["torch"])
        for label, choice in choices.items():
            own, theirs = by_name[label].median_seconds, best.median_seconds
            ratio = f"{theirs / own:.2f}" if own and theirs else ""
            measured = (cell(by_name[label]), f"{1e3 * choice.seconds:.3f}", cell(by_name["apart"]), f"{best.contender} {cell(best)}", ratio)
            table.add_row(name, label, *measured)
        write_results(options.name, vars(options), rows)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
