"""What is read of one compiled GPU kernel: resources, occupancy, executed instructions, loops, transactions, traffic, and the cycles that they cost.

    resources       registers, spills and shared memory as the assembler reports them (`toolchain.binary`)
    occupancy       blocks that a processor holds, and what limits them
    instructions    from the PTX (`ptx`, `ptx_flow`), by class, executed by all warps, and by one thread; for each loop, in one iteration
    movement        from the kernel IR: transactions (`warps`), and traffic between the caches (`traffic`)
    busy cycles     of the busiest processor, by resource

A warp's instruction costs the cycles for which it occupies the execution lanes of its class (Tuna, equation 3).
Source: Tuna (2021), section III.B; CUDA C++ Programming Guide, table "Throughput of Native Arithmetic Instructions"; NVIDIA's whitepapers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from types import MappingProxyType

from tilewright.analysis.gpu.chains import alone_cycles, latencies_of
from tilewright.analysis.gpu.ptx import Function, parse
from tilewright.analysis.gpu.ptx_flow import Flow, flow_of
from tilewright.analysis.gpu.traffic import Traffic, traffic_of
from tilewright.analysis.gpu.warps import MOST_BLOCKS, SECTOR_BYTES, Transactions, transactions_of
from tilewright.codegen.cuda import print_cuda
from tilewright.errors import KernelFailed
from tilewright.hardware import documents
from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import block_limits
from tilewright.ir.kernel import Kernel, Launch
from tilewright.ir.region import Lowered
from tilewright.runtime.loadable import LoadableKernel, loadable_kernel
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
class Translation:
    """What NVRTC makes of one source file: PTX and the assembler's figures by kernel, and the cubin."""

    functions: Mapping[str, Function]
    resources: Mapping[str, Resources]
    cubin: bytes


def translated(source: SourceFile, machine: Machine) -> Translation:
    """Compiles a source file for its PTX.

    Raises:
        KernelFailed: if it does not compile.
        CompilerMissing: if NVRTC is not installed, or does not know the machine.
    """
    outcome, ptx, cubin = NvrtcCompiler.find(machine).translated(source)
    if not outcome.succeeded:
        raise KernelFailed(f"{source.name} does not compile: {outcome.log[:2000]}", "report this as a defect")
    return Translation(parse(ptx), parse_resources(outcome.log), cubin)


@dataclass(frozen=True)
class Occupancy:
    """How a kernel's blocks fit a processor: shared memory per block, the blocks that each resource admits (`occupancy.block_limits`), and the rounds
    in which all processors work through the grid."""

    shared_bytes: int
    admitted: Mapping[str, int]
    waves: int

    @property
    def resident(self) -> int:
        """Blocks that a processor holds."""
        return max(min(self.admitted.values()), 1)

    @property
    def limits(self) -> tuple[str, ...]:
        """The resources that admit no more blocks."""
        return tuple(name for name, blocks in self.admitted.items() if blocks <= self.resident)


def occupancy_of(kernel: LoadableKernel, resources: Resources, machine: Machine) -> Occupancy:
    """The occupancy of a kernel with these resources."""
    shared = resources.shared_bytes + kernel.shared_bytes
    admitted = {name: int(blocks) for name, blocks in block_limits(machine, prod(kernel.block), resources.registers, shared).items()}
    found = Occupancy(shared, admitted, 0)
    return Occupancy(shared, admitted, ceil(prod(kernel.grid) / (found.resident * machine.processors)))


@dataclass(frozen=True)
class LoopReading:
    """A natural loop of the PTX. `depth` is 0 for the outermost loops, `is_innermost` says that it contains no other. `trips`: iterations each time
    that it is entered; `iterations`: of one thread on average; `instructions`: by class, in one iteration of the blocks in no inner loop."""

    depth: int
    is_innermost: bool
    trips: float
    iterations: float
    instructions: Mapping[str, float]


@dataclass(frozen=True)
class Movement:
    """Memory accesses of one launch, read of the kernel IR."""

    transactions: Transactions
    traffic: Traffic


@dataclass(frozen=True)
class KernelReading:
    """One launch of a kernel. `alone`: cycles of one warp alone on a processor, with global loads of zero latency (`chains`); `waits`: additional
    cycles that it waits when global loads have the latency of memory. `movement` is None if the kernel IR is not known."""

    kernel: LoadableKernel
    machine: Machine
    resources: Resources
    occupancy: Occupancy
    flow: Flow
    alone: float
    waits: float
    movement: Movement | None

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return prod(self.kernel.grid)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return prod(self.kernel.block)

    @cached_property
    def instructions(self) -> Mapping[str, float]:
        """Instructions that all warps execute, by class (`ptx.CLASSES`)."""
        return self.flow.instructions()

    @cached_property
    def of_a_thread(self) -> Mapping[str, float]:
        """The same for one thread on average."""
        return self.flow.instructions(of_a_thread=True)

    @cached_property
    def loops(self) -> tuple[LoopReading, ...]:
        """The loops that are executed, those that contain others before them."""
        function, found = self.flow.function, []
        for loop, trips in zip(function.loops, self.flow.trips, strict=True):
            inner = [other for other in function.loops if other.blocks < loop.blocks]
            around = sum(1 for other in function.loops if loop.blocks < other.blocks)
            times = self.flow.threads[loop.header]
            counts: dict[str, float] = {}
            for number in loop.blocks.difference(*(other.blocks for other in inner)) if times else ():
                for kind, count in function.blocks[number].classes.items():
                    counts[kind] = counts.get(kind, 0.0) + count * self.flow.threads[number] / times
            if times:
                found.append((min(loop.blocks), LoopReading(around, not inner, trips, times, counts)))
        return tuple(entry for _, entry in sorted(found, key=lambda pair: (pair[0], pair[1].depth)))


def read(
    kernel: LoadableKernel, function: Function, resources: Resources, machine: Machine, body: Kernel | None = None, most_blocks: int = MOST_BLOCKS
) -> KernelReading:
    """Reads a kernel's PTX, and its IR, `body`, if that is known. At most `most_blocks` of a grid are evaluated.

    Raises:
        NotStatic: if branches or addresses depend on data.
        UnknownLatency: for an instruction whose latency is not known.
    """
    flow = flow_of(function, Launch(kernel.grid, kernel.block), most_blocks)
    occupancy = occupancy_of(kernel, resources, machine)
    alone = alone_cycles(flow, latencies_of(machine, 0.0))
    waits = alone_cycles(flow, latencies_of(machine, machine.memory_latency_cycles)) - alone
    movement = None
    if body is not None:
        transactions = transactions_of(body, most_blocks, flow.memory("shared load"))
        movement = Movement(transactions, traffic_of(body, machine, occupancy.resident, occupancy.shared_bytes))
    return KernelReading(kernel, machine, resources, occupancy, flow, alone, waits, movement)


def read_region(lowered: Lowered, machine: Machine, most_blocks: int = MOST_BLOCKS) -> tuple[KernelReading, ...]:
    """Readings of the kernels of a region lowered for a GPU, in the order of its calls. Raises as `translated` and `read`."""
    kernels = {kernel.name: kernel for kernel in lowered.kernels}
    made = translated(SourceFile(lowered.region.name, print_cuda(list(kernels.values())), "cuda", tuple(kernels)), machine)
    found = {
        name: read(loadable_kernel(kernel), made.functions[name], made.resources[name], machine, kernel, most_blocks)
        for name, kernel in kernels.items()
    }
    return tuple(found[call.kernel] for call in lowered.calls)


def warp_cycles(machine: Machine) -> Mapping[str, float]:
    """Cycles for which one warp's instruction of a class occupies its execution lanes; classes that are not listed cost only the issue slot."""
    cycles = dict.fromkeys(("fma", "float"), machine.warp_size / machine.fp32_lanes_per_processor)
    cycles |= {"special": machine.warp_size / machine.special_lanes_per_processor}
    cycles |= dict.fromkeys(ARITHMETIC, machine.warp_size / INTEGER_LANES)
    return cycles | dict.fromkeys(LOADS_AND_STORES, machine.warp_size / LOAD_STORE_LANES[machine.compute_capability])


def busy_cycles(one: KernelReading) -> dict[str, float]:
    """Cycles of the busiest processor by resource, which overlap to some degree; the largest binds.

    The busiest processor works through ceil(blocks / processors) blocks. "multiply-adds", "integers", "loads and stores": execution lanes; "issue":
    all instructions through the schedulers; "latency": a warp alone with its waits for memory, times the rounds of resident blocks. From the kernel
    IR: "shared memory": wavefronts; "level 2": sectors that level 1 does not serve, and stores; "memory": sectors that level 2 does not serve, and
    distinct sectors that are stored, at the nominal bandwidth of the whole machine."""
    machine, costs = one.machine, warp_cycles(one.machine)
    each = ceil(one.blocks / machine.processors)
    share = each / one.blocks

    def lanes(kinds: Sequence[str]) -> float:
        return share * sum(one.instructions.get(kind, 0.0) * costs[kind] for kind in kinds)

    found = {
        "multiply-adds": lanes(("fma", "float", "special")),
        "integers": lanes(ARITHMETIC),
        "loads and stores": lanes(LOADS_AND_STORES),
        "issue": share * sum(one.instructions.values()) / machine.schedulers_per_processor,
        "latency": ceil(each / one.occupancy.resident) * (one.alone + one.waits),
    }
    if one.movement is not None:
        transactions, traffic = one.movement.transactions, one.movement.traffic
        cache = machine.cache(2)
        assert cache is not None
        found["shared memory"] = share * transactions.shared * machine.warp_size * 4 / machine.shared_bytes_per_cycle
        found["level 2"] = share * (traffic.level_2 + transactions.global_stores) * SECTOR_BYTES / cache.bandwidth
        found["memory"] = (traffic.memory + traffic.written) * SECTOR_BYTES / machine.memory_bandwidth * machine.clock_hz
    return found
