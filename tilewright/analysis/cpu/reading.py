"""What is read of one compiled CPU kernel: its loops with their instructions, vector registers, cycles, and what limits the pipeline."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf

from tilewright.analysis.cpu.assembly import Assembly, BasicBlock
from tilewright.analysis.cpu.instructions import InstructionCounts, total
from tilewright.analysis.cpu.loops import Loop, natural_loops
from tilewright.analysis.cpu.loops_execution import PARALLEL, UNDECIDED, executions
from tilewright.analysis.cpu.loops_operations import Unanalysable
from tilewright.analysis.cpu.pipeline import KernelCycles, block_bounds, block_cycles, cycles, repeats, usage_of
from tilewright.hardware.machine import Machine
from tilewright.hardware.pipelines import PIPELINES
from tilewright.runtime.loadable import LoadableKernel

WAITING = 1.1
"""A block that takes this many times its largest bound is limited by latencies rather than by a resource."""
LATENCY = "latency"
_VECTOR = re.compile(r"v\d+")


@dataclass(frozen=True)
class Vectors:
    """Number of distinct vector registers that code names, and the bits of the widest vector that it computes, loads or stores (0: none)."""

    registers: int
    bits: int


@dataclass(frozen=True)
class LoopReading:
    """A natural loop of the code. `depth` is 0 for the outermost loops of a function, `is_innermost` says that it contains no other. `entries`: how
    often one thread enters it in one call; `iterations`: all its iterations (both 0 if that is unknown). The rest is of its own blocks, those in no
    inner loop, for one iteration; `limits` says in how many of the cycles each limit binds (see `limit_of`)."""

    function: str
    header: int
    depth: int
    is_innermost: bool
    entries: float
    iterations: float
    counts: InstructionCounts
    cycles: float
    limits: Mapping[str, float]
    vectors: Vectors

    @property
    def trips(self) -> float:
        """Iterations each time that it is entered, in the mean."""
        return self.iterations / self.entries if self.entries else 0.0


@dataclass(frozen=True)
class KernelReading:
    """One call of a kernel on its busiest thread: executions of its blocks (`loops_execution.executions`) and their cycles."""

    kernel: LoadableKernel
    code: Assembly
    machine: Machine
    executed: Mapping[object, float]
    cycles: KernelCycles

    @property
    def is_parallel(self) -> bool:
        """Whether the code has a parallel region."""
        return any(PARALLEL in name for name in self.code.entries)

    @cached_property
    def counts(self) -> InstructionCounts:
        """Executed instructions by class."""
        each = {block.number: block.counts for block in self.code.blocks}
        return total({number: count for number, (count, _) in self.cycles.blocks.items()}, each, self.executed.get(UNDECIDED, 0))

    @cached_property
    def limits(self) -> dict[str, float]:
        """Cycles by the limit that binds in them."""
        found: dict[str, float] = {}
        for number, (count, own) in self.cycles.blocks.items():
            name = limit_of(self.code.blocks[number], self.code.architecture, self.machine)
            found[name] = found.get(name, 0.0) + count * own.steady
        return found

    @cached_property
    def vectors(self) -> Vectors:
        """Of all blocks that are executed."""
        return vectors_of((self.code.blocks[number] for number in self.cycles.blocks), self.code.architecture)

    @cached_property
    def loops(self) -> tuple[LoopReading, ...]:
        """The loops that are executed, those that contain others before them."""
        return tuple(loop for loop in loops_of(self.code, self.machine, self.executed) if loop.iterations)


def read(kernel: LoadableKernel, code: Assembly, machine: Machine, threads: int = 1, comparisons: float = inf) -> KernelReading:
    """Follows one call of a kernel with its first thread, which has the largest share of every parallel loop, and all code outside of them.
    `comparisons` is as for `loops_execution.Execution`.

    Raises:
        Unanalysable: if the control flow cannot be followed, or the machine has no pipeline table, or the table lacks an instruction.
    """
    if machine.pipeline not in PIPELINES:
        raise Unanalysable(f"there is no table of the pipelines of {machine.name}")
    executed = executions(kernel, code, threads, comparisons=comparisons)
    try:
        return KernelReading(kernel, code, machine, executed, cycles(executed, code, machine))
    except KeyError as error:
        raise Unanalysable(str(error.args[0])) from error


def loops_of(code: Assembly, machine: Machine, executed: Mapping[object, float]) -> list[LoopReading]:
    """All loops of the code, function by function, those that contain others before them. Where nothing is known to be executed, each block counts
    once for each iteration of its innermost loop.

    Raises:
        KeyError: if the machine has no pipeline table, or the table lacks an instruction.
    """
    found = []
    for function, entry in code.entries.items():
        loops = natural_loops(entry, {block.number: block.successors for block in code.of(function)})
        children: dict[int | None, list[Loop]] = {}
        for loop in sorted(loops.values(), key=lambda loop: loop.header):
            children.setdefault(loop.parent, []).append(loop)
        waiting = [(loop, 0) for loop in reversed(children.get(None, []))]
        while waiting:
            loop, depth = waiting.pop()
            inner = children.get(loop.header, [])
            own = [code.blocks[number] for number in sorted(loop.blocks.difference(*(child.blocks for child in inner)))]
            found.append(_loop(loop, own, depth, not inner, code, machine, executed))
            waiting += [(child, depth + 1) for child in reversed(inner)]
    return found


def _loop(
    loop: Loop, own: list[BasicBlock], depth: int, is_innermost: bool, code: Assembly, machine: Machine, executed: Mapping[object, float]
) -> LoopReading:
    iterations = executed.get(loop.header, 0.0)
    counts, spent, limits = InstructionCounts(), 0.0, dict[str, float]()
    for block in own:
        weight = executed.get(block.number, 0.0) / iterations if iterations else 1.0
        each = weight * block_cycles(block.instructions, code.architecture, PIPELINES[machine.pipeline], repeats(block)).steady
        name = limit_of(block, code.architecture, machine)
        limits[name] = limits.get(name, 0.0) + each
        counts, spent = counts + block.counts.times(weight), spent + each
    vectors = vectors_of((block for block in own if not iterations or executed.get(block.number)), code.architecture)
    entries = executed.get(("entries", loop.header), 0.0)
    return LoopReading(own[0].function, loop.header, depth, is_innermost, entries, iterations, counts, spent, limits, vectors)


def limit_of(block: BasicBlock, architecture: str, machine: Machine) -> str:
    """What a block's cycles are spent for: a name of `pipeline.block_bounds`, or `LATENCY` if no resource needs nearly as many."""
    pipeline = PIPELINES[machine.pipeline]
    bounds = block_bounds(block.instructions, architecture, pipeline)
    name = max(bounds, key=lambda name: bounds[name])
    steady = block_cycles(block.instructions, architecture, pipeline, repeats(block)).steady
    return LATENCY if steady > WAITING * bounds[name] else name


def vectors_of(blocks: Iterable[BasicBlock], architecture: str) -> Vectors:
    """The vector registers of some blocks."""
    names, bits = set[str](), 0
    for block in blocks:
        for instruction in block.instructions:
            usage = usage_of(instruction, architecture)
            named = {name for name in (*usage.sources, *usage.targets, usage.accumulator) if _VECTOR.fullmatch(name)}
            names |= named
            bits = max([bits, *(part[1] for part in (usage.load, usage.compute, usage.store) if part is not None and named)])
    return Vectors(len(names), bits)
