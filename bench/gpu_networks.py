"""Zoo networks on the GPU present: Tilewright, PyTorch eager (both layouts) and Inductor, all as CUDA graphs, in one process.

    python -m bench.gpu_networks --seconds 540 --resume --name gpu_workloads_h100_1   the 32 workloads of FIGURE, by what is fused
    python -m bench.gpu_networks resnet18 resnet50 --batch 1 --against eager,eager_cl,inductor
    python -m bench.gpu_networks mobilenet_v2 --against tuned_apart,tuned         chains where trials measured them to be faster

Every contender computes in float32 (TF32 off, cuDNN in benchmark mode), is checked against PyTorch in float64 before it is timed, and is left out
with the reason if it fails or is wrong. Before each timed call a buffer larger than the L2 cache is overwritten, so that weights and inputs come from
device memory; the events around the call exclude that.

Without networks, the workloads are those of figures 5 to 7 of DeepCuts (Jung et al., PLDI 2021) with other large batches, and the contenders its
ablation: `none` fuses nothing, `tilewright` (always there) in registers, `chains` in shared memory too; `vendor` may use cuDNN and cuBLAS, by trials,
whose records stay in the cache folder. In `late` no kernel begins before those that it depends on have ended; in `ahead` constants are copied before
that; in `unfetched` no constants are brought to level 2 ahead; in `reused` branches share memory, so that they run one after another; in `stored` no
contraction computes a map that it reads (`partition.prologues`), in `unpooled` none pools its results (`partition.poolings`); `tensor` and `tensor16`
multiply float32 by pairs of TF32 and of float16 (`precision="fp32-tensor"`, `"fp32-tensor-fp16"`). Rows have the time to prepare a contender
(figure 7), and two workloads for eager PyTorch and ours the time of kernels by kind (figure 6).

The rows of a workload that have the same `run` were measured in turns; figures of different runs are not to be compared. `--resume` leaves out the
workloads of which the result file has a run of this commit with all these contenders, so that the table can be made in slices of `--seconds`. With
`--compile-for h200` a machine without a GPU fills the kernel cache beforehand; `prepare_seconds` then say little.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tilewright
from bench import common
from bench.common import Contender, Outcome, Run, Unavailable, compare
from bench.cpu_networks import OURS, VENDOR, cell, with_libraries
from bench.fusion import fusing
from tilewright import zoo
from tilewright.graph.table import OPERATORS
from tilewright.ir.library import Attention, LibraryCall, Pooling, Product, Recurrent
from tilewright.kernels.gpu import early
from tilewright.runtime import buffers
from tilewright.runtime import gpu as gpu_engine
from tilewright.runtime.executable import Executable
from tilewright.runtime.memory_plan import plan_memory
from tilewright.selection.bounds import is_claim

FLUSHED_BYTES = 256 << 20
BATCHES = (1, 16, 64, 128)
FIGURE: Mapping[str, tuple[int, ...]] = MappingProxyType({
    **dict.fromkeys(("resnet50", "densenet121", "inception_v3", "mobilenet_v2", "deepspeech2", "attention_rnn"), BATCHES),
    "dlrm": (1, 64, 512, 2048), "bert_base": BATCHES,
})  # fmt: skip
"""The batches of each network in the figure. The recommendation model has larger ones, since it does little for each sample."""
KINDS = ("complex", "complex fused", "simple", "simple fused")
"""Kinds of kernels in the paper's figure 6: with a sum of products or without, of one operator or of several."""
COMPLEX = frozenset({"convolution", "transposed_convolution", "linear", "matmul", "scan"})
COMPLEX_IN_ATEN = ("convolution", "mm", "attention", "rnn")
"""Operators of the table, and parts of the names of PyTorch's, that are complex."""
BY_KIND = (("resnet50", 1), ("bert_base", 1))
"""The workloads of figure 6."""
PROFILED_CALLS, BUSY_CYCLES = 10, 200_000_000
"""Calls of which the kernels are timed by kind, and how long a GPU idles before each of eager PyTorch's: 0.1 s, in which the host enqueues all."""
TRIALS = 8
"""Candidates of each region and chain that the contenders `tuned` and `tuned_apart` measure."""


def captured(module: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Run:
    """The module's call on exactly these input tensors as a CUDA graph."""
    with torch.inference_mode():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                module(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = module(*inputs)

    def run(*given: Tensor, kept: object = module) -> object:  # keeps the module alive, whose parameters the graph reads
        for mine, theirs in zip(inputs, given, strict=True):
            if mine.data_ptr() != theirs.data_ptr():
                mine.copy_(theirs)
        graph.replay()
        return outputs

    return run


def eager(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    return captured(module, inputs)


def eager_channels_last(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    if not any(parameter.dim() == 4 for parameter in module.parameters()):
        raise Unavailable("no two-dimensional convolutions")
    return captured(module.to(memory_format=torch.channels_last), inputs)  # type: ignore[call-overload]


def inductor(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """torch.compile in its default mode, captured as one CUDA graph."""
    torch._dynamo.reset()  # otherwise the second batch of a network would be compiled for all
    with torch.inference_mode():
        compiled = torch.compile(module)
        compiled(*inputs)
    return captured(compiled, inputs)


def ours(module: nn.Module, inputs: tuple[Tensor, ...], target: str | None = None, precision: str = "fp32") -> Run:
    """Tilewright's own kernels, no trials, no vendor library, no operator through PyTorch."""
    executable = tilewright.compile(module, inputs, target, precision=precision, unsupported="error")
    return executable


def with_graph(module: nn.Module, inputs: tuple[Tensor, ...], precision: str = "fp32") -> Run:
    """As `ours`, called once, which plans the memory and makes the CUDA graph."""
    executable = ours(module, inputs, precision=precision)
    executable(*inputs)
    return executable


def late(module: nn.Module, inputs: tuple[Tensor, ...], precision: str = "fp32") -> Run:
    """As `ours`, but every kernel begins when those that it depends on have ended."""
    with mock.patch.object(gpu_engine, "EARLY", False):
        return with_graph(module, inputs, precision)


def ahead(module: nn.Module, inputs: tuple[Tensor, ...], precision: str = "fp32") -> Run:
    """As `ours`, but kernels wait for others only when they need their results: filters are copied ahead."""
    with mock.patch.object(early, "AHEAD", True):
        return ours(module, inputs, precision=precision)


def unfetched(module: nn.Module, inputs: tuple[Tensor, ...], precision: str = "fp32") -> Run:
    """As `ours`, but constants are not brought to level 2 ahead of the kernels that read them."""
    with mock.patch.object(gpu_engine, "PREFETCH", False):
        return with_graph(module, inputs, precision)


def reused(module: nn.Module, inputs: tuple[Tensor, ...], precision: str = "fp32") -> Run:
    """As `ours`, but buffers share memory as if kernels ran one after another, so that some that could run concurrently do not."""
    with mock.patch.object(buffers, "plan_memory", lambda program, alignment, _: plan_memory(program, alignment)):
        return with_graph(module, inputs, precision)


def fused(way: str, module: nn.Module, inputs: tuple[Tensor, ...], target: str | None = None, precision: str = "fp32") -> Run:
    """Our own kernels where only so much is fused."""
    with fusing(way):
        return ours(module, inputs, target, precision)


def tuned(way: str | None, module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """Our own kernels with `TRIALS` trials, recorded in the user's file: with the chains that were measured to be faster, or where only so much is
    fused."""
    with fusing(way) if way is not None else nullcontext():
        executable = tilewright.compile(module, inputs, unsupported="error", trials=TRIALS)
    return executable


CONTENDERS = {
    OURS: Contender(OURS, ours),
    "late": Contender("late", late),
    "ahead": Contender("ahead", ahead),
    "reused": Contender("reused", reused),
    "unfetched": Contender("unfetched", unfetched),
    "stored": Contender("stored", partial(fused, "stored")),
    "unpooled": Contender("unpooled", partial(fused, "unpooled")),
    "none": Contender("none", partial(fused, "none")),
    "chains": Contender("chains", partial(fused, "chains")),
    "tensor": Contender("tensor", partial(ours, precision="fp32-tensor")),
    "tensor16": Contender("tensor16", partial(ours, precision="fp32-tensor-fp16")),
    "tuned": Contender("tuned", partial(tuned, None)),
    "tuned_apart": Contender("tuned_apart", partial(tuned, "registers")),
    VENDOR: with_libraries(),
    "eager": Contender("eager", eager),
    "eager_cl": Contender("eager_cl", eager_channels_last),
    "inductor": Contender("inductor", inductor),
}


def cold_seconds(call: Callable[[], object], scratch: Tensor, clean: bool = False) -> float:
    """Seconds between two events around one call that finds the L2 cache full of other data. They were written, so that the call's first loads also
    wait for their way to memory, or, `clean`, only read."""
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if clean:
        scratch.amax()
    else:
        scratch.zero_()
    before.record()
    call()
    after.record()
    after.synchronize()
    milliseconds: float = before.elapsed_time(after)
    return milliseconds / 1e3


def facts(executable: Executable) -> dict[str, Any]:
    """What a row says of one of ours: its regions; the operations of the model, and of those a library's; and the sum over the regions, except for
    those of libraries, of what no kernel of their schedules can beat (`selection.bounds`, without DeepCuts' limit)."""
    program, rows = executable.image.program, executable.plan.rows
    calls = [region.library for region in program.regions if region.library is not None]
    own = [[seconds for name, seconds in row.bounds.items() if not is_claim(name)] for row in rows]
    return {
        "regions": sum(bool(row.kernels) or row.has_library for row in rows),
        "chains": sum(row.kind == "chain" for row in rows),
        "libraries": len(calls),
        "flops": executable.plan.work.flops,
        "library_flops": sum(map(flops_of, calls)),
        "bound_seconds": sum(max(each, default=0.0) for each in own),
    }


def flops_of(call: LibraryCall) -> int:
    """Operations of a library call: two for each product of its sums, or one for each element of a window."""
    sizes = [view.sizes for view in call.inputs]
    if isinstance(call.operator, Pooling):
        return prod(call.outs[0].sizes) * prod(call.operator.window)
    if isinstance(call.operator, Recurrent):
        return 2 * prod(sizes[0][:2]) * sum(prod(each) for each in sizes[call.operator.constants] if len(each) == 2)
    if isinstance(call.operator, Attention):
        return 2 * prod(sizes[0][:3]) * sizes[1][2] * (sizes[0][3] + sizes[2][3])
    summed = sizes[0][2] if isinstance(call.operator, Product) else prod(sizes[1][1:])
    return 2 * prod(call.outs[0].sizes) * summed


def kind_of(operators: Sequence[str], region: str) -> str:
    """Which of `KINDS` a region of operators of the table is, views not counted. Depthwise convolutions (of kind window) are simple in the paper."""
    own = [name for name in operators if name not in OPERATORS or not OPERATORS[name].view]
    return ("complex" if region != "window" and COMPLEX.intersection(own) else "simple") + (" fused" if len(own) > 1 else "")


def kernel_seconds(executable: Executable, inputs: tuple[Tensor, ...]) -> dict[str, float]:
    """Seconds of the regions of a call by kind."""
    found = dict.fromkeys(KINDS, 0.0)
    for region in executable.profile(*inputs, repetitions=PROFILED_CALLS).regions:
        found[kind_of(region.operators, region.kind)] += region.median_seconds
    return found


class Clocked(TorchDispatchMode):
    """Inside of this mode `spans` gets the name of each operator of PyTorch that runs, and the events before and after it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        result = func(*args, **kwargs or {})
        after.record()
        self.spans.append((func.name(), before, after))
        return result


def eager_kernel_seconds(module: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, float]:
    """Seconds of eager PyTorch's operators in a call by kind, from events around each, while the GPU has been kept busy until all were enqueued. No
    operator counts as fused. A profiler would slow the contenders that follow."""
    samples: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(PROFILED_CALLS):
        with torch.no_grad(), Clocked() as clocked:
            torch.cuda._sleep(BUSY_CYCLES)
            empty = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for event in empty:
                event.record()
            module(*inputs)
        torch.cuda.synchronize()
        clock = empty[0].elapsed_time(empty[1])
        found = dict.fromkeys(KINDS, 0.0)
        for name, before, after in clocked.spans:
            kind = "complex" if any(word in name for word in COMPLEX_IN_ATEN) else "simple"
            found[kind] += 1e-3 * max(before.elapsed_time(after) - clock, 0.0)
        for kind, seconds in found.items():
            samples[kind].append(seconds)
    return {kind: statistics.median(seconds) for kind, seconds in samples.items()}


def noting(contender: Contender, noted: dict[str, dict[str, Any]], by_kind: bool) -> Contender:
    """The contender, of which `noted` gets how long it took to prepare, the facts if it is one of ours, and, `by_kind`, the seconds of the kernels of
    ours and of eager PyTorch."""

    def prepare(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
        start = time.perf_counter()
        run = contender.prepare(module, inputs)
        found: dict[str, Any] = {"prepare_seconds": time.perf_counter() - start}
        noted[contender.name] = found
        try:
            if isinstance(run, Executable):
                found |= facts(run)
                if by_kind:
                    found["kernel_seconds"] = kernel_seconds(run, inputs)
            elif contender.name == "eager" and by_kind:
                found["kernel_seconds"] = eager_kernel_seconds(module, inputs)
        except Exception as error:  # what is said of a contender must not cost its figures
            found["unknown"] = f"{type(error).__name__}: {error}"[:300]
        return run

    return Contender(contender.name, prepare)


def release() -> None:
    """Gives memory back that nothing refers to."""
    gc.collect()
    torch.cuda.empty_cache()


def measured(name: str, batch: int, contenders: Sequence[Contender], options: argparse.Namespace, scratch: Tensor) -> list[dict[str, Any]]:
    """The rows of one workload."""
    noted: dict[str, dict[str, Any]] = {}
    try:
        module, inputs = zoo.build(name, batch, seed=1)
        inputs = tuple(x.cuda() for x in inputs)
        outcomes = compare(
            name, module.cuda(), inputs, inputs, [noting(each, noted, (name, batch) in BY_KIND) for each in contenders], options.tolerance,
            options.rounds, options.turn, partial(cold_seconds, scratch=scratch), release=release,
        )  # fmt: skip
    except Exception as error:  # a workload without figures must not take the others' with it
        reason = f"{type(error).__name__}: {error}"[:300]
        outcomes = [Outcome(name, contender.name, "failed", reason) for contender in contenders]
    for outcome in outcomes:
        print(f"{name} {batch} {outcome.contender}: {outcome.status} {outcome.reason} prepared in {outcome.preparation_seconds or 0:.1f} s, "
              f"error {outcome.relative_error}, {cell(outcome)} ms", flush=True)  # fmt: skip
    return [{**dataclasses.asdict(outcome), "batch": batch, **noted.get(outcome.contender, {})} for outcome in outcomes]


def known_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a result file of the same commit, measured in the same way."""
    return common.rows_to_resume(options.name, {name: vars(options)[name] for name in ("trials", "rounds", "turn", "tolerance")})


def is_known(rows: Sequence[Mapping[str, Any]], name: str, batch: int, contenders: Sequence[str]) -> bool:
    """Whether one run has all contenders of the workload."""
    runs: dict[int, set[str]] = {}
    for row in rows:
        if (row["network"], row["batch"]) == (name, batch):
            runs.setdefault(row["run"], set()).add(row["contender"])
    return any(found.issuperset(contenders) for found in runs.values())


def compile_all(workloads: Sequence[tuple[str, int]], names: Sequence[str], target: str) -> None:
    """Compiles our contenders without trials for a machine that need not be here. Says how long each took."""
    own: dict[str, Callable[..., Run]] = {OURS: ours, **{way: partial(fused, way) for way in ("none", "chains")}}
    for name, batch in workloads:
        module, inputs = zoo.build(name, batch, seed=1)
        for contender in (each for each in names if each in own):
            start = time.monotonic()
            own[contender](module, inputs, target)
            print(f"{name} {batch} {contender}: compiled in {time.monotonic() - start:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help="zoo networks; those of the figure if none is named")
    parser.add_argument("--against", default="none,chains,vendor,eager,eager_cl,inductor", help=f"of {','.join(CONTENDERS)}")
    parser.add_argument("--batch", help=f"such as 1,64; by default those of the figure, or {','.join(map(str, BATCHES))}")
    parser.add_argument("--trials", type=int, default=3, help="of each region, for `vendor`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn", type=float, default=0.02, metavar="SECONDS", help="least device time of one turn in one round")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest error relative to the largest output")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no workload is begun later")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--compile-for", metavar="TARGET", help="measure nothing: fill the kernel cache for a machine that need not be here")
    parser.add_argument("--name", default="gpu_networks", help="the result file's name in bench/results")
    options = parser.parse_args()
    names = list(dict.fromkeys([OURS, *filter(None, options.against.split(","))]))
    if unknown := sorted(set(names) - set(CONTENDERS)):
        parser.error(f"unknown contenders {', '.join(unknown)}; choose from {', '.join(CONTENDERS)}")
    known = {**CONTENDERS, VENDOR: with_libraries(options.trials)}
    contenders = [known[name] for name in names]
    asked = tuple(map(int, options.batch.split(","))) if options.batch else None
    workloads = [(name, batch) for name in options.networks or FIGURE for batch in asked or FIGURE.get(name, BATCHES)]
    if options.compile_for:
        compile_all(workloads, names, options.compile_for)
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    scratch = torch.empty(FLUSHED_BYTES // 4, device="cuda")
    rows = known_rows(options) if options.resume else []
    start = time.monotonic()
    for name, batch in workloads:
        if is_known(rows, name, batch, names) or time.monotonic() - start > options.seconds:
            continue
        run = max((row["run"] for row in rows), default=0) + 1
        found = measured(name, batch, contenders, options, scratch)
        try:
            release()
            torch.cuda.synchronize()
        except RuntimeError as error:  # every later contender would fail as well
            raise SystemExit(f"{name} at batch {batch} left the GPU unusable, and is not recorded: {error}") from error
        rows += [{**row, "run": run} for row in found]
        common.write_results(options.name, vars(options), rows)
        print(f"{name} {batch}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
