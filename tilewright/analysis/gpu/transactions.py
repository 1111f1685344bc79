"""Static analysis of a GPU kernel: executed instructions, transactions, resources, occupancy and waves, and their cost in cycles.

    instructions    from the PTX (`ptx`, `ptx_flow`), by class, executed by all warps, and by one thread
    transactions    from the kernel IR (`warps`)
    resources       registers, spills and shared memory as the assembler reports them (`toolchain.binary`)
    occupancy       blocks that a processor holds; waves: rounds in which all processors work through the grid

Cost of an instruction (Tuna, equation 3): the cycles for which a warp's instruction of the class occupies its execution lanes.
Source: Tuna (2021), section III.B; CUDA C++ Programming Guide, table "Throughput of Native Arithmetic Instructions"; NVIDIA's whitepapers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from types import MappingProxyType

from tilewright.analysis.gpu.chains import alone_cycles, latencies_of
from tilewright.analysis.gpu.ptx import parse
from tilewright.analysis.gpu.ptx_flow import Flow, flow_of
from tilewright.analysis.gpu.warps import MOST_BLOCKS, SECTOR_BYTES, Transactions, transactions_of
from tilewright.codegen.cuda import dynamic_shared_bytes, print_cuda
from tilewright.errors import KernelFailed
from tilewright.hardware import documents
from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.ir.dtypes import size_of
from tilewright.ir.kernel import Kernel
from tilewright.ir.region import Lowered
from tilewright.toolchain.binary import Resources, SourceFile, parse_resources
from tilewright.toolchain.compilers import NvrtcCompiler

INTEGER_LANES = 64
"""Results per cycle and processor of 32-bit integer additions, multiplications, shifts, logic, comparisons and conversions, equal from compute
capability 7.0 to 9.0 (`documents.ARITHMETIC`) and assumed equal for later ones."""
LOAD_STORE_LANES: Mapping[tuple[int, int], int] = MappingProxyType(
    {(7, 0): 32, (7, 2): 32, (7, 5): 16, (8, 0): 32, (8, 6): 16, (8, 7): 16, (8, 9): 16, (9, 0): 32, (10, 0): 32, (10, 3): 32, (12, 0): 16}
)
"""Load/store lanes per processor."""
SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "INTEGER_LANES": f"{documents.ARITHMETIC}; from 10.0 on assumed: the same",
        "LOAD_STORE_LANES": f"7.0 from {documents.V100_PAPER}; 7.5 from {documents.TURING_PAPER}; 8.0 from {documents.A100_PAPER}; "
        f"8.6 from {documents.GA102_PAPER}; 8.9 from {documents.ADA_PAPER}; 9.0 from {documents.H100_PAPER}; others assumed: as their relatives",
    }
)
ARITHMETIC = ("integer", "compare", "convert", "move")
LOADS_AND_STORES = ("global load", "global store", "shared load", "shared store", "copy", "atomic", "other load")


@dataclass(frozen=True)
class KernelAnalysis:
    """One launch of a kernel. `instructions`: of all warps by class (`ptx.CLASSES`); `of_a_thread`: the same for one thread on average; `trips`: trip
    counts of the PTX's loops, outer ones first; `resident`: resident blocks per processor."""

    name: str
    blocks: int
    threads: int
    instructions: Mapping[str, float]
    of_a_thread: Mapping[str, float]
    trips: tuple[float, ...]
    transactions: Transactions
    resources: Resources
    shared_bytes: int
    resident: int
    waves: int
    distinct_bytes: int
    """Distinct bytes of the buffers that it reads and writes."""
    alone: float
    """Cycles of one warp alone on a processor, with global loads of zero latency (`chains`)."""
    waits: float
    """Additional cycles that it waits when global loads have the latency of memory."""


def analysed(lowered: Lowered, machine: Machine, most_blocks: int = MOST_BLOCKS) -> tuple[KernelAnalysis, ...]:
    """Analyses of the kernels of a region lowered for a GPU, in the order of its calls. At most `most_blocks` of a grid are evaluated.

    Raises:
        KernelFailed: if a kernel does not compile.
        CompilerMissing: if NVRTC is not installed.
        NotStatic: if branches or addresses depend on data.
    """
    kernels = {kernel.name: kernel for kernel in lowered.kernels}
    source = SourceFile("analysis", print_cuda(list(kernels.values())), "cuda", tuple(kernels))
    outcome, ptx, _ = NvrtcCompiler.find(machine).translated(source)
    if not outcome.succeeded:
        raise KernelFailed(f"the kernels of {lowered.region.name} do not compile: {outcome.log[:2000]}", "report this as a defect")
    resources, functions = parse_resources(outcome.log), parse(ptx)
    found: dict[str, KernelAnalysis] = {}
    for name, kernel in kernels.items():
        assert kernel.launch is not None
        flow = flow_of(functions[name], kernel.launch, most_blocks)
        blocks, threads = prod(kernel.launch.grid), prod(kernel.launch.block)
        shared = resources[name].shared_bytes + dynamic_shared_bytes(kernel)
        resident = int(resident_blocks(machine, threads, resources[name].registers, shared))
        found[name] = KernelAnalysis(
            name,
            blocks,
            threads,
            flow.instructions(),
            flow.instructions(of_a_thread=True),
            flow.trips,
            transactions_of(kernel, most_blocks, flow.memory("shared load")),
            resources[name],
            shared,
            resident,
            ceil(blocks / (resident * machine.processors)),
            _bytes_of(kernel),
            *_alone_and_waits(flow, machine),
        )
    return tuple(found[call.kernel] for call in lowered.calls)


def _alone_and_waits(flow: Flow, machine: Machine) -> tuple[float, float]:
    alone = alone_cycles(flow, latencies_of(machine, 0.0))
    return alone, alone_cycles(flow, latencies_of(machine, machine.memory_latency_cycles)) - alone


def _bytes_of(kernel: Kernel) -> int:
    return sum(buffer.size * size_of(buffer.dtype) for buffer in kernel.parameters)


def warp_cycles(machine: Machine) -> Mapping[str, float]:
    """Cycles for which one warp's instruction of a class occupies its execution lanes; classes that are not listed cost only the issue slot."""
    cycles = dict.fromkeys(("fma", "float"), machine.warp_size / machine.fp32_lanes_per_processor)
    cycles |= {"special": machine.warp_size / machine.special_lanes_per_processor}
    cycles |= dict.fromkeys(ARITHMETIC, machine.warp_size / INTEGER_LANES)
    return cycles | dict.fromkeys(LOADS_AND_STORES, machine.warp_size / LOAD_STORE_LANES[machine.compute_capability])


def cycles_of_a_thread(analysis: KernelAnalysis, machine: Machine) -> float:
    """Sum over the classes of executed instructions times cost (Tuna, equation 3)."""
    issue = 1 / machine.schedulers_per_processor
    costs = warp_cycles(machine)
    return sum(count * costs.get(kind, issue) for kind, count in analysis.of_a_thread.items())


def busy_cycles(analyses: Sequence[KernelAnalysis], machine: Machine) -> dict[str, float]:
    """Cycles of the busiest processor by resource, summed over the kernels; they overlap to some degree.

    A processor works through ceil(blocks / processors) blocks. "fma", "arithmetic", "load and store": lanes; "issue": all instructions through the
    schedulers; "shared": wavefronts; "level 2": sectors; "barriers": those of one warp, times the rounds of resident blocks; "thread": the cycles of
    one thread (Tuna, equation 3), "alone" and "waits": of one warp alone, all times these rounds; "spills": bytes of spill code per thread; "memory":
    distinct bytes at the nominal bandwidth; "rounds": of resident blocks, each with a fill and a drain; "launches"."""
    costs = warp_cycles(machine)
    cache = machine.cache(2)
    assert cache is not None
    lanes_and_caches = ("fma", "arithmetic", "load and store", "issue", "shared", "level 2")
    total = dict.fromkeys((*lanes_and_caches, "barriers", "thread", "alone", "waits", "spills", "memory"), 0.0)
    total |= {"rounds": 0.0, "launches": float(len(analyses))}
    for one in analyses:
        share = ceil(one.blocks / machine.processors) / one.blocks
        rounds = ceil(ceil(one.blocks / machine.processors) / one.resident)

        def lanes(kinds: Sequence[str], one: KernelAnalysis = one, share: float = share) -> float:
            return share * sum(one.instructions.get(kind, 0.0) * costs[kind] for kind in kinds)

        moved = one.transactions
        total["fma"] += lanes(("fma", "float", "special"))
        total["arithmetic"] += lanes(ARITHMETIC)
        total["load and store"] += lanes(LOADS_AND_STORES)
        total["issue"] += share * sum(one.instructions.values()) / machine.schedulers_per_processor
        total["shared"] += share * moved.shared * machine.warp_size * 4 / machine.shared_bytes_per_cycle
        total["level 2"] += share * (moved.global_loads + moved.global_stores) * SECTOR_BYTES / cache.bandwidth
        total["barriers"] += rounds * one.of_a_thread.get("barrier", 0.0)
        total["thread"] += rounds * cycles_of_a_thread(one, machine)
        total["alone"] += rounds * one.alone
        total["waits"] += rounds * one.waits
        total["spills"] += share * one.blocks * one.resources.spill_bytes * one.threads / machine.warp_size
        total["memory"] += one.distinct_bytes / machine.memory_bandwidth * machine.clock_hz
        total["rounds"] += rounds
    return total
