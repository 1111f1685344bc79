"""Cycles of basic blocks, by list scheduling on a core's pipelines, and of whole kernels (Tuna, section III).

Instructions enter in program order, up to the issue width per cycle. Each micro-operation starts in the first cycle in which its operands and one of
its ports are ready, older instructions first. At most a window of them is in flight, and fewer of these may wait for operands. On an in-order core
none starts before its predecessor. A renamed register has its new value only for later instructions; the flags count as a register. Dependences
through memory are ignored: a kernel's loops read back only what they spilled to the stack at least a few cycles before, and its accumulators stay in
registers.

A loop of one block is scheduled for as many iterations as fill the window a few times, with the dependence chains that its registers carry from one
iteration to the next; its cost is the mean of the second half of these iterations. Any other block is assumed to overlap with similar blocks: it is
repeated, and the repetitions are independent. All accesses have the latency of the first-level cache; `caches.py` counts misses. Branches are assumed
to be predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any

from tilewright.analysis.cpu.assembly import Assembly, BasicBlock, Instruction
from tilewright.analysis.cpu.pipeline_operands import USAGES, Usage
from tilewright.hardware.machine import Machine
from tilewright.hardware.pipelines import PIPELINES, Cost, Pipeline

WINDOWS = 3
"""How many times the instructions scheduled for a loop fill the core's window."""
ITERATIONS = (4, 400)
"""Minimum and maximum number of iterations that are scheduled for a block."""
STEADY_INSTRUCTIONS = 400
"""Minimum number of instructions that are scheduled."""


@dataclass(frozen=True)
class BlockCycles:
    """Cycles of a basic block: `steady` is the cost of one more execution in a long series, `alone` the time of a single execution from its first
    instruction to its last result."""

    steady: float
    alone: float


@dataclass(frozen=True)
class KernelCycles:
    """Cycles of one thread for one call: `steady` for all blocks, and `starts`, the extra time of the first iterations of inner loops.

    `blocks`: executions and cycles of each block, by number."""

    steady: float
    starts: float
    blocks: Mapping[int, tuple[float, BlockCycles]]


@dataclass(frozen=True)
class _Compiled:
    """An instruction with its rows of the table and their kinds (of load, computation and store); registers are numbered."""

    kinds: tuple[str, ...]
    slots: int
    load: Cost | None
    compute: Cost | None
    store: Cost | None
    address: tuple[int, ...]
    sources: tuple[int, ...]
    accumulator: int
    targets: tuple[int, ...]
    updated: int
    latency: float


def block_cycles(instructions: Sequence[Instruction], architecture: str, pipeline: Pipeline, repeats: bool) -> BlockCycles:
    """Cycles of a block of instructions for an architecture ("x86-64" or "aarch64"); `repeats`: the block is a loop by itself."""
    return _cycles(tuple(instructions), architecture, pipeline.name, repeats)


def block_bounds(instructions: Sequence[Instruction], architecture: str, pipeline: Pipeline) -> dict[str, float]:
    """Cycles that each resource needs for one execution of a block, however its instructions are scheduled: "issue" for the issue slots, and for
    every set of ports that some instructions cannot avoid a name such as "ports 0 1 (fma)", with the kind of instruction that occupies them longest.
    A block that takes longer than the largest of them waits for results."""
    code, _ = _compiled([usage_of(instruction, architecture) for instruction in instructions], pipeline)
    taken: dict[frozenset[str], dict[str, int]] = {}
    for entry in code:
        for kind, cost in zip(entry.kinds, (entry.load, entry.compute, entry.store), strict=True):
            for ports, cycles in cost.uses if cost is not None else ():
                kinds = taken.setdefault(frozenset(ports), {})
                kinds[kind] = kinds.get(kind, 0) + cycles
    bounds = {"issue": sum(entry.slots for entry in code) / pipeline.issue_width}
    unions = set(taken)
    for one in taken:  # what must run on a union of sets of ports cannot run elsewhere (Hall's theorem)
        unions |= {one | other for other in unions}
    for union in sorted(unions, key=sorted):
        inside: dict[str, int] = {}
        for kinds in (kinds for own, kinds in taken.items() if own <= union):
            for kind, cycles in kinds.items():
                inside[kind] = inside.get(kind, 0) + cycles
        name = f"ports {' '.join(sorted(union))} ({max(inside, key=lambda kind: inside[kind])})"
        bounds[name] = sum(inside.values()) / len(union)
    return bounds


@lru_cache(maxsize=65536)
def usage_of(instruction: Instruction, architecture: str) -> Usage:
    """What an instruction reads, writes and occupies."""
    return USAGES[architecture](instruction.mnemonic, instruction.operands)


@lru_cache(maxsize=4096)
def _cycles(instructions: tuple[Instruction, ...], architecture: str, core: str, repeats: bool) -> BlockCycles:
    pipeline = PIPELINES[core]
    code, registers = _compiled([usage_of(instruction, architecture) for instruction in instructions], pipeline)
    if not code:
        return BlockCycles(0.0, 0.0)
    slots = sum(entry.slots for entry in code)
    wanted = max(WINDOWS * pipeline.window * repeats, STEADY_INSTRUCTIONS)
    least, most = ITERATIONS
    count = min(most, max(least, -(-wanted // max(slots, len(code)))))
    count += count % 2
    ends, alone = (_in_order if not pipeline.window else _out_of_order)(code, registers, pipeline, count, repeats)
    half = count // 2
    return BlockCycles((ends[-1] - ends[half - 1]) / (count - half), alone)


def _compiled(usages: Sequence[Usage], pipeline: Pipeline) -> tuple[list[_Compiled], int]:
    """The table rows of each instruction, where a comparison and its branch may be fused into one; and the number of registers."""
    numbers: dict[str, int] = {}

    def number(name: str) -> int:
        return numbers.setdefault(name, len(numbers))

    code: list[_Compiled] = []
    fused = False
    for at, usage in enumerate(usages):
        if fused:  # the branch was counted with the preceding instruction
            fused = False
            continue
        fused = pipeline.fuses and usage.decides and at + 1 < len(usages) and usages[at + 1].is_jump and bool(usages[at + 1].sources)
        kind = ("branch", 0) if fused else usage.compute
        load, compute, store = (pipeline.cost(*part) if part is not None else None for part in (usage.load, kind, usage.store))
        parts = [part for part in (load, compute, store) if part is not None]
        slots = sum(part.slots * (usage.count if part is not compute else 1) for part in parts)
        slots -= pipeline.fuses and load is not None and compute is not None
        load, store = (_times(part, usage.count) for part in (load, store))
        latency = compute.latency if compute is not None else 0.0
        code.append(
            _Compiled(
                tuple(part[0] if part is not None else "" for part in (usage.load, kind, usage.store)), slots,
                load, compute, store, tuple(map(number, usage.address)), tuple(map(number, usage.sources)),
                number(usage.accumulator) if usage.accumulator else -1, tuple(map(number, usage.targets)),
                number(usage.updated) if usage.updated else -1, latency,
            )
        )  # fmt: skip
    return code, len(numbers)


def _times(cost: Cost | None, count: int) -> Cost | None:
    return cost if cost is None or count == 1 else Cost(cost.latency, cost.uses * count, cost.slots * count)


class _Ports:
    """The busy cycles of each port, as the bits of a number, and how often each port was used, so that the least used free one is chosen."""

    def __init__(self, names: Sequence[str]) -> None:
        self.index = {name: number for number, name in enumerate(names)}
        self.busy = [0] * len(names)
        self.used = [0] * len(names)

    def first(self, ports: tuple[int, ...], cycles: int, ready: int) -> tuple[int, int]:
        """The first cycle from `ready` on in which one of the ports is free for `cycles` cycles, and that port."""
        best, chosen = -1, -1
        for port in ports:
            taken = self.busy[port] >> ready
            for _ in range(cycles - 1):
                taken |= taken >> 1
            start = ready + (~taken & (taken + 1)).bit_length() - 1
            if best < 0 or start < best or start == best and self.used[port] < self.used[chosen]:
                best, chosen = start, port
        return best, chosen

    def take(self, port: int, start: int, cycles: int) -> None:
        self.busy[port] |= ((1 << cycles) - 1) << start
        self.used[port] += cycles

    def run(self, uses: Any, ready: float) -> float:
        """Starts micro-operations no earlier than `ready`; returns the cycle in which the last one starts."""
        begun = ready
        for ports, cycles in uses:
            start, port = self.first(ports, cycles, int(-(-ready // 1)))
            self.take(port, start, cycles)
            begun = max(begun, start)
        return begun


def _numbered(cost: Cost | None, ports: _Ports) -> Any:
    return None if cost is None else tuple((tuple(ports.index[name] for name in names), cycles) for names, cycles in cost.uses)


def _out_of_order(code: Sequence[_Compiled], registers: int, pipeline: Pipeline, count: int, repeats: bool) -> tuple[list[float], float]:
    """For each iteration, the cycle in which all of its instructions have retired; and that of the first iteration again."""
    ports = _Ports(pipeline.ports)
    rows = [tuple(_numbered(part, ports) for part in (entry.load, entry.compute, entry.store)) for entry in code]
    width, window, scheduler = pipeline.issue_width, pipeline.window, pipeline.scheduler
    ready = [0.0] * registers
    early = [0.0] * registers  # ready time for use as an accumulator, which may precede the result of the multiply-add
    entered = under_way = 0  # issue slots that have passed, and those that instructions occupied
    retired: list[float] = []
    places: list[int] = []
    waiting: list[float] = []  # start times of instructions that have entered but not started
    done, oldest, ends = 0.0, 0, []
    for _ in range(count):
        if not repeats:
            ready, early = [0.0] * registers, [0.0] * registers
        for entry, (load, compute, store) in zip(code, rows, strict=True):
            under_way += entry.slots
            while oldest < len(places) and places[oldest] + window < under_way:
                entered = max(entered, int(retired[oldest]) * width)
                oldest += 1
            while waiting and waiting[0] * width <= entered:
                heappop(waiting)
            if len(waiting) >= scheduler:
                entered = max(entered, int(heappop(waiting)) * width)
            dispatched = entered // width
            entered += entry.slots
            at = float(dispatched)
            if load is not None:
                started = ports.run(load, max([at, *(ready[name] for name in entry.address)]))
                at = started + entry.load.latency  # type: ignore[union-attr]
            for name in entry.sources:
                if compute is not None or load is not None:
                    at = max(at, ready[name])
            if compute is not None:
                if entry.accumulator >= 0:
                    at = max(at, early[entry.accumulator])
                at = ports.run(compute, at)
            heappush(waiting, at)
            result = at + entry.latency
            finish = result
            if store is not None:
                data = max([result, *(ready[name] for name in entry.sources)])
                finish = max(ports.run(store, max([float(dispatched), data, *(ready[name] for name in entry.address)])) + 1, result)
            for name in entry.targets:
                ready[name] = result
                early[name] = at + (entry.compute.accumulate or entry.latency) if entry.compute is not None else result
            if entry.updated >= 0:
                ready[entry.updated] = max(float(dispatched), ready[entry.updated]) + 1
            done = max(done, finish)
            retired.append(done)
            places.append(under_way)
        ends.append(done)
    return ends, ends[0]


def _in_order(code: Sequence[_Compiled], registers: int, pipeline: Pipeline, count: int, repeats: bool) -> tuple[list[float], float]:
    """For each iteration, the cycle in which its last instruction starts; and the cycle in which the first iteration's results are ready."""
    ports = _Ports(pipeline.ports)
    rows = [
        [(uses, part) for uses, part in ((_numbered(part, ports), part) for part in (entry.load, entry.compute, entry.store)) if part is not None]
        for entry in code
    ]
    width = pipeline.issue_width
    ready, early = [0.0] * registers, [0.0] * registers
    cycle, taken, alone = 0, 0, 0.0
    ends: list[float] = []
    for _ in range(count):
        if not repeats:
            ready, early = [0.0] * registers, [0.0] * registers
        for entry, parts in zip(code, rows, strict=True):
            waits = [ready[name] for name in (*entry.address, *entry.sources)]
            if entry.accumulator >= 0:
                waits.append(early[entry.accumulator])
            need = int(-(-max([0.0, *waits]) // 1))
            start = max(cycle, need)
            while True:
                if start > cycle:
                    cycle, taken = start, 0
                # an instruction that does not fit into the rest of a cycle starts in the next one
                if taken and taken + min(entry.slots, width) > width:
                    start = cycle + 1
                    continue
                free = all(ports.first(names, cycles, start)[0] == start for uses, _ in parts for names, cycles in uses[:1])
                if free:
                    break
                start += 1
            begun = float(start)
            for uses, _ in parts:
                begun = max(begun, ports.run(uses, start))
            taken += entry.slots
            while taken >= width:
                cycle, taken = cycle + 1, taken - width
            latency = sum(part.latency for _, part in parts)
            for name in entry.targets:
                ready[name] = begun + latency
                early[name] = begun + (entry.compute.accumulate or latency) if entry.compute is not None else ready[name]
            if entry.updated >= 0:
                ready[entry.updated] = start + 1.0
            if not ends:
                alone = max(alone, begun + latency)
        ends.append(cycle + taken / width)
    return ends, max(alone, ends[0])


def cycles(executed: Mapping[object, float], code: Assembly, machine: Machine) -> KernelCycles:
    """Cycles of the thread whose executions of blocks these are (`loops_execution.executions`): those of each block times its executions.

    Raises:
        KeyError: for a machine without a pipeline table.
    """
    pipeline = PIPELINES[machine.pipeline]
    blocks: dict[int, tuple[float, BlockCycles]] = {}
    steady = starts = 0.0
    for number, count in executed.items():
        if not isinstance(number, int):
            continue
        block = code.blocks[number]
        loops = repeats(block)
        own = block_cycles(block.instructions, code.architecture, pipeline, loops)
        blocks[number] = count, own
        steady += count * own.steady
        if loops:
            starts += executed.get(("entries", number), 0.0) * max(0.0, own.alone - own.steady)
    return KernelCycles(steady, starts, blocks)


def repeats(block: BasicBlock) -> bool:
    """Whether the block is a loop by itself."""
    return block.number in block.successors
