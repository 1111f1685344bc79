"""The time of one warp of a GPU kernel on its own: dependences between its instructions, latencies, barriers and waits for asynchronous copies.

The blocks of a loop that belong to no inner loop are followed for several iterations in textual order, with every instruction starting as soon as its
operands are ready: registers, guards, and the barriers and waits before it. The time that one more iteration adds is the loop's chain. The assembler
reorders instructions, so issue order is ignored; the limit of one instruction per cycle and warp is not.

Source: Tuna (2021), section III.A (dependence graph of a basic block, list scheduling), applied to PTX; PTX ISA, "cp.async.wait_group".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from tilewright.analysis.gpu.ptx import BasicBlock, Function, Instruction
from tilewright.analysis.gpu.ptx_flow import Flow
from tilewright.errors import TilewrightError
from tilewright.hardware import documents
from tilewright.hardware.machine import Machine

ARITHMETIC_CYCLES = 4.5
CONVERT_CYCLES = 14.0
SPECIAL_CYCLES = 18.0
BARRIER_CYCLES = 16.0
SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "ARITHMETIC_CYCLES": f"assumed: from a dependent addition's 4 cycles in {documents.AMPERE_CYCLES}, and one more of a multiplication",
        "CONVERT_CYCLES": "assumed: three times an addition's",
        "SPECIAL_CYCLES": "assumed: four times an addition's, whose lanes are as many times more",
        "BARRIER_CYCLES": "assumed: four times an addition's",
    }
)
ROUNDS = 8
"""Iterations for which a loop's blocks are followed; the second half is the steady state."""
OFTEN = 0.1
"""A block that runs in at least this fraction of a loop's iterations is on the slowest warp's path."""
_REGISTER = re.compile(r"%\w+")
Uses: TypeAlias = tuple[list[str], list[str]]
"""Registers that an instruction reads, and those that it writes."""


class UnknownLatency(TilewrightError):
    """A kernel has an instruction of unknown latency."""


@dataclass
class _Time:
    """The cycles at which values are ready while instructions are followed."""

    latencies: Mapping[str, float]
    ready: dict[str, float] = field(default_factory=dict)
    floor: float = 0.0
    issued: float = 0.0
    end: float = 0.0
    stored: float = 0.0
    copied: float = 0.0
    groups: list[float] = field(default_factory=list)

    def follow(self, instruction: Instruction, reads: Sequence[str], writes: Sequence[str]) -> None:
        kind = instruction.kind
        if kind == "matrix":
            raise UnknownLatency(f"no latency of {instruction.opcode} is known", "add it with its source, and its rate to reading.warp_cycles")
        self.issued += kind != "move"
        start = max(self.floor, *(self.ready.get(name, 0.0) for name in reads), 0.0)
        done = start + self.latencies.get(kind, 0.0)
        for name in writes:
            self.ready[name] = done
        if kind in ("shared store", "global store", "atomic"):
            self.stored = max(self.stored, start)
        elif kind == "copy":
            self.copied = max(self.copied, done)
        elif instruction.opcode.startswith("cp.async.commit_group"):
            self.groups.append(self.copied)
            self.copied, done = 0.0, start
        elif instruction.opcode.startswith("cp.async.wait"):
            left = int(instruction.operands[0]) if instruction.operands else 0
            waited = self.groups[: len(self.groups) - left] if left else [*self.groups, self.copied]
            self.floor = self.issued = done = max(self.floor, self.issued, *waited)
        elif kind == "barrier":
            self.floor = self.issued = done = max(self.floor, self.issued, self.stored) + self.latencies["barrier"]
        self.end = max(self.end, done, self.issued)


def latencies_of(machine: Machine, global_cycles: float) -> dict[str, float]:
    """Cycles from an instruction to one that uses its result, by class; for loads from global memory `global_cycles`."""
    first = machine.cache(1)
    assert first is not None
    fma = machine.fma_latency_cycles or 4.0
    found = dict.fromkeys(("fma", "float"), fma) | dict.fromkeys(("integer", "compare"), ARITHMETIC_CYCLES)
    found |= {"special": SPECIAL_CYCLES, "convert": CONVERT_CYCLES, "barrier": BARRIER_CYCLES, "shared load": first.latency_cycles}
    return found | dict.fromkeys(("global load", "copy"), global_cycles)


def alone_cycles(flow: Flow, latencies: Mapping[str, float]) -> float:
    """Cycles of one warp from the kernel's beginning to its end, with nothing else running; `latencies` are from `latencies_of`."""
    function = flow.function
    uses = _uses(function)
    total, inside = 0.0, set[int]()
    for loop in reversed(function.loops):  # inner loops first
        own = [number for number in sorted(loop.blocks) if number not in inside]
        inside |= loop.blocks
        times = flow.threads[loop.header]
        if times:
            total += times * _steady([n for n in own if flow.threads[n] >= OFTEN * times], function.blocks, uses, latencies)
    rest = [number for number in range(len(function.blocks)) if number not in inside and flow.threads[number] >= OFTEN]
    time = _Time(latencies)
    _follow(time, rest, function.blocks, uses)
    return total + time.end


def _steady(numbers: Sequence[int], blocks: Sequence[BasicBlock], uses: Sequence[Sequence[Uses]], latencies: Mapping[str, float]) -> float:
    """The cycles that one more iteration adds."""
    time, ends = _Time(latencies), []
    for _ in range(ROUNDS):
        _follow(time, numbers, blocks, uses)
        ends.append(time.end)
    return (ends[-1] - ends[ROUNDS // 2 - 1]) / (ROUNDS - ROUNDS // 2)


def _follow(time: _Time, numbers: Sequence[int], blocks: Sequence[BasicBlock], uses: Sequence[Sequence[Uses]]) -> None:
    for number in numbers:
        for instruction, (reads, writes) in zip(blocks[number].instructions, uses[number], strict=True):
            time.follow(instruction, reads, writes)


def _uses(function: Function) -> list[list[Uses]]:
    """The registers that each instruction reads, and those that it writes."""
    found = []
    for block in function.blocks:
        rows = []
        for instruction in block.instructions:
            texts = [_REGISTER.findall(operand) for operand in instruction.operands]
            stores = instruction.kind in ("shared store", "global store", "copy", "branch", "barrier")
            writes = texts[0] if texts and not stores else []
            reads = [name for operand in (texts if stores else texts[1:]) for name in operand]
            rows.append((reads + ([instruction.predicate] if instruction.predicate else []), writes))
        found.append(rows)
    return found
