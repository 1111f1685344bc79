"""Recurrent layers on the GPU present: all steps in one kernel, kernels of one step, and cuDNN, interleaved; and the times of barriers.

    python -m bench.gpu_recurrent
    python -m bench.gpu_recurrent "LSTM 512" --name recurrent_lstm
    python -m bench.gpu_recurrent many --name gpu_recurrent_many       16 and 64 sequences in float16
    python -m bench.gpu_recurrent both --name gpu_recurrent_both       both directions of a layer in one kernel and in two
    python -m bench.gpu_recurrent --check                 without a GPU: plans and compiles the same layers for --target

Each is one layer of 64 steps, by default at batch 1 in float32 (TF32 off), whose inputs are as wide as its states, with initial states of zeros and
all its results: the outputs of all steps and the final states. All are checked against PyTorch in float64 before they are timed, and find the level-2
cache full of other data. cuDNN is PyTorch's module as a CUDA graph, or where that cannot be captured by ordinary calls, whose name then says so.

`barrier_seconds` is the time of one of many barriers of a grid with nothing between them, with a block for each processor, and
`cluster_barrier_seconds` that of a cluster of eight blocks: the constants that the models of `kernels.gpu.recurrence` need (part "recurrent" of the
machine's calibration file). `predicted_seconds` is what the file's constants give, or where it has none the assumed ones.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bench.common import Contender, Run, compare, write_results
from bench.cpu_networks import OURS, cell
from bench.gpu_networks import FLUSHED_BYTES, captured, cold_seconds
from bench.recurrent import APART, BY_STEPS, DIRECTIONS, JOINED, Workload, layer
from tilewright.codegen.cuda import print_cuda
from tilewright.codegen.intrinsics.barriers import COUNTER, cluster_barrier, grid_barrier
from tilewright.compile import build, read, source_files
from tilewright.frontend.imported import Imported
from tilewright.graph.passes import simplify
from tilewright.hardware import identified_machine
from tilewright.hardware.machine import Machine
from tilewright.ir.expr import ZERO, Var, index_const
from tilewright.ir.kernel import Buffer, For, Kernel, Launch, Place
from tilewright.ir.region import Program
from tilewright.kernels.gpu.recurrence.space import CLUSTERS
from tilewright.partition.joint_loops import JOINT, decided, find_pairs
from tilewright.partition.plan import plan_program
from tilewright.runtime.driver import system_driver
from tilewright.runtime.executable import executable_of
from tilewright.runtime.gpu_kernels import GpuLibrary, ParameterBlock, node_params
from tilewright.runtime.loadable import loadable_kernel
from tilewright.toolchain.binary import Binary, SourceFile
from tilewright.toolchain.build import compile_kernels

STEPS = 64
LAYERS = (("LSTM", nn.LSTM), ("GRU", nn.GRU))


def in_float16(made: Callable[[], Workload]) -> Callable[[], Workload]:
    """The same workload with weights and inputs in float16."""

    def halved() -> Workload:
        module, *inputs = made()
        example, fresh = (tuple(x.half() for x in given) for given in inputs)
        return module.half(), example, fresh

    return halved


SHAPES: Mapping[str, Callable[[], Workload]] = MappingProxyType(
    {f"{name} {hidden}": layer(kind, hidden, STEPS) for name, kind in LAYERS for hidden in (128, 256, 512, 1024)}
)
OF_MANY: Mapping[str, Callable[[], Workload]] = MappingProxyType({
    f"{name} {hidden}, {batch} sequences": in_float16(layer(kind, hidden, STEPS, batch))
    for name, kind in LAYERS for hidden in (256, 512, 1024) for batch in (16, 64)
})  # fmt: skip
OF_BOTH: Mapping[str, Callable[[], Workload]] = MappingProxyType({
    **{
        f"{name} {hidden}, {DIRECTIONS}": layer(kind, hidden, STEPS, bidirectional=True)
        for name, kind in LAYERS for hidden in (128, 256, 512, 800)
        if (name, hidden) != ("LSTM", 800)  # whose weights do not fit twice
    },
    **{
        f"{name} {hidden}, {batch} sequences, {DIRECTIONS}": in_float16(layer(kind, hidden, STEPS, batch, bidirectional=True))
        for name, kind in LAYERS for hidden in (256, 512) for batch in (16, 64)
    },
})  # fmt: skip
TOLERANCE = 5e-3
"""Largest error of float16 relative to the largest output."""
MANY, BOTH = "many", "both"
KNOWN: Mapping[str, Callable[[], Workload]] = MappingProxyType({**SHAPES, **OF_MANY, **OF_BOTH})
CUDNN = "cuDNN"
BARRIERS = 2000


@dataclass(frozen=True)
class Plans:
    """The programs of a layer by what is compared: of one direction with all steps in one kernel if that is predicted faster, and with kernels of one
    step; of both with one kernel for them, and with two."""

    machine: Machine
    imported: Imported
    programs: Mapping[str, Program]

    @classmethod
    def of(cls, workload: Workload, machine: Machine, device: torch.device) -> Plans:
        module, inputs, _ = workload
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            imported = read(module.to(device).eval(), tuple(x.to(device) for x in inputs))
        graph, _ = simplify(imported.graph)
        if find_pairs(graph):
            ways = {name: decided(graph, name == JOINED) for name in (JOINED, APART)}
            programs = {name: plan_program(graph, machine, 1, persistent=True, policy=policy) for name, policy in ways.items()}
        else:
            programs = {name: plan_program(graph, machine, 1, persistent=one) for name, one in ((OURS, True), (BY_STEPS, False))}
        return cls(machine, imported, programs)

    def predicted(self, name: str) -> dict[str, Any]:
        """What is predicted of the loop, or of the loops of both directions."""
        program = self.programs[name]
        loops = [lowered for lowered in program.regions if lowered.region.kind == "loop"]
        joint = next((decision.ways.predicted for decision in program.search if decision.ways is not None and decision.kind == JOINT), None)
        seconds = loops[0].predicted_seconds if joint is None else joint[0 if len(loops) == 1 else 1]
        return {"schedule": loops[0].schedule, "predicted_seconds": seconds, "terms": dict(loops[0].terms)}

    def contender(self, name: str) -> Contender:
        def prepare(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
            built, binaries = build(self.programs[name], self.machine, lambda *_: None)
            if any(lowered.region.kind == "torch" for lowered in built.regions):
                raise RuntimeError("a region runs through PyTorch")
            return executable_of(built, self.imported, self.machine, binaries, threads=1)

        return Contender(name, prepare)


def by_cudnn(module: nn.Module, inputs: tuple[Tensor, ...], captures: bool) -> Run:
    """PyTorch's module, which calls cuDNN; as a CUDA graph if that is asked for."""
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            part.flatten_parameters()

    def run(*given: Tensor) -> Any:
        with torch.inference_mode():
            return module(*given)

    return captured(run, inputs) if captures else run


def barriers(count: int, blocks: int, cluster: bool) -> Kernel:
    """A kernel of nothing but barriers, of a grid or of one cluster."""
    step = Var("step", count)
    barrier = cluster_barrier() if cluster else grid_barrier(Place("counter", ZERO), (step + 1) * blocks)
    parameters, launch = (Buffer("counter", COUNTER, 1, writable=True),), Launch((blocks, 1, 1), (256, 1, 1))
    return Kernel(f"barriers_{count}", parameters, For(step, index_const(count), barrier), launch, cluster=blocks if cluster else 1)


def barrier_seconds(machine: Machine, rounds: int, blocks: int, cluster: bool) -> float:
    """Seconds of one barrier: the difference between a kernel with many of them and one with half as many."""
    kernels = [barriers(count, blocks, cluster) for count in (BARRIERS, BARRIERS // 2)]
    names = tuple(kernel.name for kernel in kernels)
    (binary,) = compile_kernels([SourceFile("barriers", print_cuda(kernels), "cuda", names)], machine)
    assert isinstance(binary, Binary), binary
    driver = system_driver()
    loadable = {kernel.name: loadable_kernel(kernel) for kernel in kernels}
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    library = GpuLibrary(driver, [binary], loadable, driver.primary_context(torch.cuda.current_device()))
    found: list[float] = []
    for _ in range(rounds):
        seconds = []
        for name in names:
            block = ParameterBlock([0], [counter.data_ptr()], [], ctypes.sizeof(ctypes.c_int))
            params = node_params(library.functions[name], loadable[name], block)
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            counter.zero_()
            before.record()
            driver.launch_kernel(params, torch.cuda.current_stream().cuda_stream, cooperative=not cluster)
            after.record()
            after.synchronize()
            seconds.append(before.elapsed_time(after) / 1e3)
        found.append((seconds[0] - seconds[1]) / (BARRIERS - BARRIERS // 2))
    return statistics.median(found)


def compile_all(plans: Mapping[str, Plans], machine: Machine) -> list[Binary]:
    """Compiles all kernels of all layers on all cores; what is built later comes from the cache."""
    sources = [source for each in plans.values() for program in each.programs.values() for source in source_files(program, machine)]
    return [built for built in compile_kernels(sources, machine) if isinstance(built, Binary)]


def check(shapes: Mapping[str, Callable[[], Workload]], target: str, console: Console) -> None:
    """Plans and compiles the layers, and prints both predictions and what the compiler says of the kernels of all steps."""
    machine = identified_machine(target)
    plans = {name: Plans.of(made(), machine, torch.device("cpu")) for name, made in shapes.items()}
    resources = {entry: found for binary in compile_all(plans, machine) for entry, found in binary.resources.items()}
    for name, each in plans.items():
        first, other = each.programs
        own, apart = (each.predicted(way) for way in each.programs)
        loop = next(lowered for lowered in each.programs[first].regions if lowered.region.kind == "loop")
        for kernel in loop.kernels[-1:]:
            console.print(f"{name}: {1e6 * own['predicted_seconds']:.4g} us, {other} {1e6 * apart['predicted_seconds']:.4g}; {loop.schedule}")
            console.print(f"    {resources.get(kernel.name)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(KNOWN)}, {MANY} or {BOTH}; the first eight if none is named")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1e-3, help="least time of one turn in one round")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest error relative to the largest output")
    parser.add_argument("--name", default="gpu_recurrent", help="the result file's name in bench/results")
    parser.add_argument("--check", action="store_true", help="plan and compile for --target, which need not be present")
    parser.add_argument("--target", default="h200", help="of --check")
    options = parser.parse_args()
    console = Console()
    console = console if console.is_terminal else Console(width=180)
    named = [name for given in options.shapes or SHAPES for name in (OF_MANY if given == MANY else OF_BOTH if given == BOTH else (given,))]
    if unknown := [name for name in named if name not in KNOWN]:
        parser.error(f"unknown: {', '.join(unknown)}")
    shapes = {name: KNOWN[name] for name in named}
    if options.check:
        check(shapes, options.target, console)
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    machine, device = identified_machine("cuda"), torch.device("cuda")
    torch.cuda.init()
    plans = {name: Plans.of(made(), machine, device) for name, made in shapes.items()}
    compile_all(plans, machine)
    settings = {**vars(options), "barrier_seconds": barrier_seconds(machine, options.rounds, machine.processors, False)}
    console.print(f"a barrier of {machine.processors} blocks: {1e6 * settings['barrier_seconds']:.3f} us")
    if machine.compute_capability >= (9, 0):
        settings["cluster_barrier_seconds"] = barrier_seconds(machine, options.rounds, max(CLUSTERS), True)
        console.print(f"a barrier of a cluster of {max(CLUSTERS)} blocks: {1e6 * settings['cluster_barrier_seconds']:.3f} us")
    # longer than the host takes to enqueue a call, so that no call waits for it
    seconds_of = partial(cold_seconds, scratch=torch.empty(2 * FLUSHED_BYTES // 4, device=device))
    columns = ("layer", OURS, "predicted", "other way", "predicted", CUDNN, "cuDNN / ours", "other way / ours")
    table = Table(*columns, caption="ms: median ± half interquartile range")
    rows: list[dict[str, Any]] = []
    ratios: list[float] = []
    path = None
    for name, each in plans.items():
        module, example, fresh = shapes[name]()
        example, fresh = (tuple(x.to(device) for x in given) for given in (example, fresh))
        ways = [each.contender(way) for way in each.programs]
        peers = [Contender(CUDNN, partial(by_cudnn, captures=True)), Contender(f"{CUDNN}, no graph", partial(by_cudnn, captures=False))]
        tolerance = TOLERANCE if example[0].dtype == torch.float16 else options.tolerance
        outcomes = compare(name, module.to(device), example, fresh, [*ways, *peers], tolerance, options.rounds, options.seconds, seconds_of)
        for outcome in outcomes:
            predicted = each.predicted(outcome.contender) if outcome.contender in each.programs else {}
            rows.append({**dataclasses.asdict(outcome), **predicted})
            if outcome.status != "measured":
                console.print(f"{name}, {outcome.contender}: {outcome.status}: {outcome.reason}")
        timed = [outcome for outcome in outcomes[2:] if outcome.median_seconds]
        peer = min(timed, key=lambda outcome: outcome.median_seconds or 0.0, default=outcomes[2])
        first, other = outcomes[:2]
        own = first.median_seconds
        told = [f"{slower.median_seconds / own:.2f}" if own and slower.median_seconds else "" for slower in (peer, other)]
        ratios += [peer.median_seconds / own] if own and peer.median_seconds else []
        times = [f"{1e3 * each.predicted(way)['predicted_seconds']:.3f}" for way in each.programs]
        table.add_row(name, cell(first), times[0], f"{other.contender} {cell(other)}", times[1], f"{peer.contender} {cell(peer)}", *told)
        path = write_results(options.name, settings, rows)  # after every layer: a crash loses little
    console.print(table)
    if ratios:
        ahead = sum(ratio >= 1.5 for ratio in ratios)
        console.print(f"at least 1.5 times cuDNN on {ahead} of {len(shapes)}; geometric mean {statistics.geometric_mean(ratios):.2f}")
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
