"""Host time of a call of an executable besides its kernels: for a program of one tiny kernel, for a chain of them, and for one of operators that run
through PyTorch.

    python -m bench.call_overhead

Every round times a block of calls of each contender in turn and takes the block's mean; minimum, median and quartiles are over the rounds. On a GPU
only the host is timed: the GPU catches up between blocks. "kernel alone" is the same kernels launched through the driver as one CUDA graph (on a CPU:
called) with prepared arguments; "fresh outputs" keeps each result, so that the next has another address. Other load on the machine shows in the upper
quartile and the load average; the minimum is closest to the cost of a call.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewright
from bench.common import write_results
from tilewright.runtime.cpu import CpuEngine
from tilewright.runtime.executable import Executable
from tilewright.runtime.gpu import GpuEngine

ELEMENTS = 256
KEPT = 256
OPERATORS = 10


class Tiny(nn.Module):
    """One kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x * 2 + 1)


class Line(nn.Module):
    """A chain of kernels that cannot be fused."""

    def __init__(self, kernels: int) -> None:
        super().__init__()
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.kernels):
            x = F.softmax(x, -1) + x
        return x


class Foreign(nn.Module):
    """A chain of operators that the operator table lacks, each of which runs through PyTorch."""

    def __init__(self, operators: int) -> None:
        super().__init__()
        self.operators = operators

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.operators):
            x = torch.special.bessel_j0(x)
        return x


class KernelAlone:
    """The kernels of an executable of their own, with the arguments of one call."""

    def __init__(self, executable: Executable, x: Tensor) -> None:
        self.executable, self.kept = executable, executable(x)  # the kernels keep using its memory and writing this result
        engine = executable._engine
        if isinstance(engine, CpuEngine):
            (cpu_segment,) = engine._segments.values()
            assert engine.library.runner is not None
            self.call: Callable[[], object] = partial(engine.library.runner, cpu_segment.address)
        else:
            assert isinstance(engine, GpuEngine)
            (gpu_segment,) = engine._segments.values()
            self.call = partial(engine._launch, gpu_segment.executable, engine._stream)


def keeping(call: Callable[[], object]) -> Callable[[], object]:
    """The call, with its latest results kept alive."""
    kept: list[object] = []

    def keep() -> None:
        if len(kept) == KEPT:
            kept.clear()
        kept.append(call())

    return keep


def rounds_of(contenders: Mapping[str, Callable[[], object]], rounds: int, calls: int, device: str) -> dict[str, list[float]]:
    """Microseconds per call, by contender and round; the order rotates."""
    names = list(contenders)
    result: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            call = contenders[name]
            for _ in range(10):
                call()
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            result[name].append((time.perf_counter() - start) / calls * 1e6)
            if device == "cuda":
                torch.cuda.synchronize()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--calls", type=int, default=100, help="calls of a block")
    parser.add_argument("--kernels", type=int, default=30, help="kernels of the chain")
    parser.add_argument("--name", help="the result file's name in bench/results")
    options = parser.parse_args()
    options.name = options.name or f"call_overhead_{options.device}"
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    results = []
    programs: dict[str, nn.Module] = {
        "one kernel": Tiny(), f"{options.kernels} kernels": Line(options.kernels), f"{OPERATORS} through PyTorch": Foreign(OPERATORS),
    }  # fmt: skip
    for program, module in programs.items():
        x = torch.randn(1, ELEMENTS, device=options.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            executable = tilewright.compile(module.eval(), (x,), threads=1)
        torch.testing.assert_close(executable(x).double(), module(x.double()), rtol=1e-4, atol=1e-4)

        def eager(module: nn.Module = module, x: Tensor = x) -> object:
            with torch.no_grad():
                return module(x)

        alone = None if isinstance(module, Foreign) else KernelAlone(executable.clone(), x)
        contenders: dict[str, Callable[[], object]] = {} if alone is None else {"kernel alone": alone.call}
        contenders |= {
            "call": partial(executable, x),
            "call, fresh outputs": keeping(partial(executable, x)),
            "eager": eager,
        }
        base: float | None = None
        for name, values in rounds_of(contenders, options.rounds, options.calls, options.device).items():
            lower, median, upper = statistics.quantiles(values, n=4)
            base = median if name == "kernel alone" else base
            results.append(
                {
                    "program": program, "contender": name, "median_us": median, "quartiles_us": [lower, upper],
                    "minimum_us": min(values), "over_kernel_alone_us": None if base is None else median - base,
                }
            )  # fmt: skip
            print(f"{program:18} {name:20} median {median:7.2f} us, quartiles {lower:.2f} to {upper:.2f}, minimum {min(values):.2f}")
    write_results(options.name, {**vars(options), "load_average_before": load}, results)


if __name__ == "__main__":
    main()
