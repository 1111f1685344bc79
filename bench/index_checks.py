"""The cost of checking indices: models compiled with and without the checks, called alternately in one process.

    python -m bench.index_checks --target native
    python -m bench.index_checks --target cuda

DLRM and BERT of the zoo, and two models that only read rows or elements by indices. Both builds read the same constants in the same memory: two
builds of one DLRM with separate constants differ by up to 10 % on a CPU, depending on the location of their pages. Working memory is that of `COPIES`
clones, one after another. A round times three blocks of calls of each, alternately; its ratio is that of the sums of each one's two fastest blocks.
Reported are the median and the quartiles of the rounds' ratios, and the median over the clones of the ratio of their fastest blocks, which other
processes disturb least. On a GPU a block is calls until the GPU is done ("calls", which includes host time), and replays of a CUDA graph into
which a call was captured ("kernels"). `apart` is the same comparison of two executables without checks: the resolution of the method.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import tilewright
from bench.common import relative_error, write_results
from tilewright import zoo
from tilewright.graph.index_checks import IndexChecks
from tilewright.ir.expr import Apply, Expr, constants, select
from tilewright.runtime.executable import Executable

Call = Callable[[], object]
COPIES = 5
"""Clones of an executable, each with working memory of its own."""


class Rows(nn.Module):
    """Rows of 64 elements by index, as stored."""

    def forward(self, table: Tensor, index: Tensor) -> Tensor:
        return nn.functional.embedding(index, table)


class Elements(nn.Module):
    """Single elements by index."""

    def forward(self, table: Tensor, index: Tensor) -> Tensor:
        return table.gather(1, index)


def models() -> Iterator[tuple[str, nn.Module, tuple[Tensor, ...]]]:
    """Name, module, inputs."""
    for name, batch in (("dlrm", 1), ("dlrm", 256), ("bert_base", 1)):
        module, _ = zoo.build(name, batch)
        torch.manual_seed(1)
        yield f"{name}, batch {batch}", module, zoo.NETWORKS[name].example_inputs(batch)
    torch.manual_seed(1)
    yield "rows of 64", Rows(), (torch.randn(20000, 64), torch.randint(20000, (8192,)))
    yield "elements", Elements(), (torch.randn(64, 4096), torch.randint(4096, (64, 4096)))


@contextmanager
def without_checks() -> Iterator[None]:
    """Models compiled inside do not check indices."""

    def settled(self: IndexChecks, part: Expr, *_: object) -> Expr:
        if not (isinstance(part, Apply) and part.operation == "checked"):
            return part
        index, (least, extent, _site) = part.args[0], constants(part.args[1:])
        return select(index < 0, index + extent, index) if least else index

    with mock.patch.object(IndexChecks, "settled", settled):
        yield


def captured(executable: Executable, inputs: Sequence[Tensor]) -> Call:
    executable(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = executable(*inputs)

    def replay(kept: object = (executable, results)) -> None:  # the graph uses their memory
        graph.replay()

    return replay


def block_seconds(call: Call, count: int, wait: Call) -> float:
    """Seconds per call in a block of `count` calls."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    wait()
    return (time.perf_counter() - start) / count


@dataclass(frozen=True)
class Ratios:
    """Each round's ratio and seconds of a call with checks; `of_least` is the median over clones of the ratio of the fastest blocks with and without
    checks."""

    rounds: list[float]
    seconds: list[float]
    of_least: float


def copies(executable: Executable, constants: Executable) -> list[Executable]:
    """Clones of the first executable that read the constants of the second, which must be equal."""
    own, other = (run._engine.buffers for run in (executable, constants) if run._engine is not None)
    if any(not torch.equal(own.constants[name], other.constants[name]) for name in {*own.constants, *other.constants}):
        raise SystemExit("the two executables have other constants")
    own.constants = other.constants
    return [executable.clone() for _ in range(COPIES)]


def ratios(checked: Sequence[Call], plain: Sequence[Call], rounds: int, block: float, wait: Call) -> Ratios:
    """Ratios of calls of each clone with checks to calls of the corresponding clone without."""
    for call in (*checked, *plain):
        block_seconds(call, 3, wait)
    count = max(1, int(block / block_seconds(plain[0], 10, wait)))
    found, seconds = [], []
    fastest: dict[Call, float] = {}
    for number in range(rounds):
        ours, theirs = checked[number % COPIES], plain[number % COPIES]
        spent: dict[Call, list[float]] = {ours: [], theirs: []}
        for call in (ours, theirs, theirs, ours, ours, theirs):
            spent[call].append(block_seconds(call, count, wait))
        least = {call: sum(sorted(times)[:2]) / 2 for call, times in spent.items()}
        found.append(least[ours] / least[theirs])
        seconds.append(least[ours])
        fastest |= {call: min(fastest.get(call, float("inf")), *times) for call, times in spent.items()}
    pairs = zip(checked, plain, strict=True)
    return Ratios(found, seconds, statistics.median(fastest[a] / fastest[b] for a, b in pairs if a in fastest))


def compared(name: str, module: nn.Module, inputs: tuple[Tensor, ...], options: argparse.Namespace) -> list[dict[str, Any]]:
    gpu = options.target == "cuda"
    if gpu:
        module, inputs = module.cuda(), tuple(x.cuda() for x in inputs)
    compiled = partial(tilewright.compile, module.eval(), inputs, options.target, threads=options.threads, unsupported="error")
    checked = compiled()
    with without_checks():
        plain, other = compiled(), compiled()
    if not checked.image.program.index_checks or plain.image.program.index_checks:
        raise SystemExit(f"{name}: the checks are not where they should be")
    results = [[x for x in torch.utils._pytree.tree_leaves(run(*inputs))] for run in (checked, plain)]
    if (error := relative_error(*results)) > 1e-4:
        raise SystemExit(f"{name}: results with and without checks differ by {error:.1e}")
    wait: Call = torch.cuda.synchronize if gpu else lambda: None
    ways: dict[str, Callable[[Executable], Call]] = {"calls": lambda run: partial(run, *inputs)}
    if gpu:
        ways["kernels"] = lambda run: captured(run, inputs)
    rows = []
    for way, made in ways.items():
        with_checks, without, twin = ([made(copy) for copy in copies(run, plain)] for run in (checked, plain, other))
        found, apart = (ratios(run, without, options.rounds, options.seconds, wait) for run in (with_checks, twin))
        rows.append(
            {
                "model": name,
                "timed": way,
                "checks": len(checked.image.program.index_checks),
                "seconds": statistics.median(found.seconds),
                **{
                    f"{key}{suffix}": value
                    for key, of in (("ratio", found), ("apart", apart))
                    for suffix, value in (
                        ("", statistics.median(of.rounds)),
                        ("_quartiles", statistics.quantiles(of.rounds, n=4)[::2]),
                        ("_of_least", of.of_least),
                    )
                },
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", choices=("native", "cuda"), default="native")
    parser.add_argument("--models", default="", help="those whose name begins so")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=0.05, help="of one block of calls")
    parser.add_argument("--name", help="the result file's name in bench/results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results: list[dict[str, Any]] = []
    with torch.no_grad():
        for name, module, inputs in models():
            if not name.startswith(options.models):
                continue
            results += compared(name, module, inputs, options)
    path = write_results(options.name or f"index_checks_{'h200' if options.target == 'cuda' else 'cpu'}", vars(options), results)
    table = Table("model", "timed", "checks", "us a call", "with / without checks", "without / without", title=options.target)
    for row in results:
        texts = (
            f"{row[key]:.4f} ({row[f'{key}_quartiles'][0]:.4f} to {row[f'{key}_quartiles'][1]:.4f}), least {row[f'{key}_of_least']:.4f}"
            for key in ("ratio", "apart")
        )
        table.add_row(row["model"], row["timed"], str(row["checks"]), f"{1e6 * row['seconds']:.1f}", *texts)
    Console(width=150).print(table)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
