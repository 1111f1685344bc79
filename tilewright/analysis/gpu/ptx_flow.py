"""How often each basic block of PTX runs, from the registers on which its branches depend.

Tuna's algorithm 3 finds a loop's trip count from its counter's initial value, update and bound. Here these registers, and those of all other
branches, are evaluated from the beginning of the kernel to its end: the instructions on which a branch depends, and no others, are evaluated for all
threads of some blocks at once, as arrays. Divergent threads continue with the block that comes first in the text, so that they reconverge like those
of a warp. Loaded values and the kernel's pointers are unknown; a branch of a generated kernel needs them only if it depends on data.

Source: Tuna (2021), section III.B and algorithm 3; PTX ISA, "Integer Arithmetic Instructions" and "Comparison and Selection Instructions".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np

from tilewright.analysis.gpu.ptx import Function, Instruction
from tilewright.analysis.gpu.warps import MOST_BLOCKS, WARP, NotStatic, chosen_blocks
from tilewright.ir.kernel import Launch

MOST_STEPS = 2_000_000
"""Maximum number of basic blocks that are executed before giving up on a kernel."""
_WORD, _SIGN = 0xFFFFFFFF, 0x80000000
_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b, "lo": lambda a, b: a < b, "ls": lambda a, b: a <= b, "hi": lambda a, b: a > b, "hs": lambda a, b: a >= b,
}  # fmt: skip

Value: TypeAlias = Any
"""A register's value: an int or a bool if it is uniform over the threads, an array over the threads, or None if unknown. 32-bit registers hold
0 to 2^32 - 1, 64-bit ones a signed number."""


@dataclass(frozen=True)
class Flow:
    """`warps`: how often a warp runs each basic block, in the whole grid; `threads`: how often a thread does, on average; `trips`: iterations of
    each loop of the function (in its order) each time it is entered."""

    function: Function
    warps: tuple[float, ...]
    threads: tuple[float, ...]
    trips: tuple[float, ...]

    def instructions(self, of_a_thread: bool = False) -> Counter[str]:
        """Executed instructions by class: of all warps, or of one thread on average."""
        found: Counter[str] = Counter()
        for block, times in zip(self.function.blocks, self.threads if of_a_thread else self.warps, strict=True):
            for kind, count in block.classes.items():
                found[kind] += count * times  # type: ignore[assignment]
        return found

    def memory(self, kind: str) -> Counter[int]:
        """Executed instructions of all warps in a class of loads or stores, by the bytes that a lane moves."""
        found: Counter[int] = Counter()
        for block, times in zip(self.function.blocks, self.warps, strict=True):
            for instruction in block.instructions:
                if instruction.kind == kind:
                    found[instruction.bytes] += times  # type: ignore[assignment]
        return found


def flow_of(function: Function, launch: Launch, most_blocks: int = MOST_BLOCKS) -> Flow:
    """Executes the control flow of a kernel's threads.

    Raises:
        NotStatic: if a branch depends on data, or on an unsupported instruction.
    """
    return _Run(function, launch, most_blocks).flow()


class _Run:
    """The registers and positions of the threads of some blocks."""

    def __init__(self, function: Function, launch: Launch, most_blocks: int) -> None:
        self.function = function
        blocks = chosen_blocks(prod(launch.grid), most_blocks)
        threads = np.arange(-(-prod(launch.block) // WARP) * WARP)
        self.scale = prod(launch.grid) / len(blocks)
        self.count = len(blocks) * prod(launch.block)
        block, thread = (a.ravel() for a in np.meshgrid(blocks, threads, indexing="ij"))
        self.registers: dict[str, Value] = {}
        for name, extents, numbers in (("ctaid", launch.grid, block), ("tid", launch.block, thread)):
            where = (numbers % extents[0], numbers // extents[0] % extents[1], numbers // (extents[0] * extents[1]))
            for axis, values, extent in zip("xyz", where, extents, strict=True):
                self.registers[f"%{name}.{axis}"] = values.astype(np.int64)
                self.registers[f"%n{name}.{axis}"] = extent
        self.slice = [[(i, _operation(i)) for i in instructions] for instructions in _deciding(function)]
        self.end = len(function.blocks)
        self.at = np.where(thread < prod(launch.block), 0, self.end)

    def flow(self) -> Flow:
        blocks = self.function.blocks
        warps, threads = np.zeros(len(blocks)), np.zeros(len(blocks))
        edges: Counter[tuple[int, int]] = Counter()
        for _ in range(MOST_STEPS):
            current = int(self.at.min())
            if current == self.end:
                break
            active = self.at == current
            count = int(active.sum())
            warps[current] += active.reshape(-1, WARP).any(axis=1).sum()
            threads[current] += count
            for instruction, operation in self.slice[current]:
                self.run(instruction, operation, active, count == len(active))
            following = self.following(current)
            if isinstance(following, int):
                edges[current, following] += count
                self.at[active] = following
            else:
                taken = active & following
                edges[current, blocks[current].successors[0]] += int(taken.sum())
                self.at[taken] = blocks[current].successors[0]
                self.at[active & ~following] = self.otherwise(current)
        else:
            raise NotStatic(f"{self.function.name} does not end within {MOST_STEPS} basic blocks", "report this as a defect")
        trips = []
        for loop in self.function.loops:
            again = sum(edges[latch, loop.header] for latch in loop.latches)
            entered = threads[loop.header] - again
            trips.append(float(threads[loop.header] / entered) if entered else 0.0)
        return Flow(self.function, tuple(warps * self.scale), tuple(threads / self.count), tuple(trips))

    def otherwise(self, current: int) -> int:
        """The next block if the branch is not taken."""
        successors = self.function.blocks[current].successors
        last = self.function.blocks[current].instructions[-1]
        if last.parts[0] == "bra":
            return successors[1] if len(successors) > 1 else self.end
        return successors[0] if successors else self.end

    def following(self, current: int) -> int | np.ndarray:
        """The next block, or the mask of threads that take the branch."""
        block = self.function.blocks[current]
        last = block.instructions[-1] if block.instructions else None
        if last is None or last.kind != "branch":
            return block.successors[0] if block.successors else self.end
        if not last.predicate:
            return block.successors[0] if block.successors else self.end
        if last.parts[0] != "bra":
            raise NotStatic(f"{self.function.name} ends under a condition", "report this as a defect")
        holds = self.registers.get(last.predicate)
        if holds is None:
            raise NotStatic(f"data decide a branch of {self.function.name}", "its instructions are not known before it runs")
        if isinstance(holds, np.ndarray):
            return ~holds if last.negated else holds
        return block.successors[0] if bool(holds) != last.negated else self.otherwise(current)

    def run(self, instruction: Instruction, operation: Callable[..., Value], active: np.ndarray, everywhere: bool) -> None:
        target = instruction.operands[0]
        operands = [self.value(text) for text in instruction.operands[1:]]
        result = None if any(operand is None for operand in operands) else operation(*operands)
        if instruction.predicate:
            holds = self.registers.get(instruction.predicate)
            if holds is None:
                self.registers[target] = None
                return
            active = active & (holds != instruction.negated)
            everywhere = bool(active.all())
        if everywhere or result is None:
            self.registers[target] = result
        else:
            old = self.registers.get(target)
            nothing = False if target.startswith("%p") else 0
            self.registers[target] = np.where(active, result, nothing if old is None else old)

    def value(self, text: str) -> Value:
        if text.startswith("%"):
            return self.registers.get(text)
        try:
            return int(text, 0)
        except ValueError:  # a floating-point constant, an address
            return None


def _deciding(function: Function) -> list[list[Instruction]]:
    """The instructions of each block on which a branch depends, directly or indirectly."""
    wanted = {block.instructions[-1].predicate for block in function.blocks if block.instructions and block.instructions[-1].kind == "branch"}
    everything = [instruction for block in function.blocks for instruction in block.instructions]
    while True:
        more = {
            name
            for instruction in everything
            if instruction.operands and instruction.operands[0] in wanted
            for name in (*instruction.operands[1:], instruction.predicate)
            if name.startswith("%")
        }
        if more <= wanted:
            break
        wanted |= more
    return [[i for i in block.instructions if i.operands and i.operands[0] in wanted and i.kind != "branch"] for block in function.blocks]


# --- meanings of instructions -----------------------------------------------------------------------------------------


def _reader(kind: str) -> Callable[[Value], Value]:
    """Converts a register's number, or a constant, to its value in a type."""
    if kind.endswith("64"):
        return lambda value: value
    return (lambda value: ((value & _WORD) ^ _SIGN) - _SIGN) if kind == "s32" else lambda value: value & _WORD


def _writer(kind: str) -> Callable[[Value], Value]:
    """Converts a value to a register's number in a type."""
    return (lambda value: value) if kind.endswith("64") or kind == "pred" else lambda value: value & _WORD


def _unknown(*_: Value) -> Value:
    return None


def _operation(instruction: Instruction) -> Callable[..., Value]:
    """The function from operands to the result; for an unsupported instruction one that returns None."""
    parts = instruction.parts
    base, kind = parts[0], parts[-1]
    if base == "setp" and len(parts) == 3 and kind[0] in "sub":
        compare, read = _COMPARISONS[parts[1]], _reader(kind)
        return lambda a, b: compare(read(a), read(b))
    if kind == "pred":
        logic: dict[str, Callable[..., Value]] = {
            "mov": lambda a: a != 0 if not isinstance(a, np.ndarray) else a.astype(bool),
            "and": lambda a, b: a & b,
            "or": lambda a, b: a | b,
            "xor": lambda a, b: a ^ b,
            "not": lambda a: ~a if isinstance(a, np.ndarray) else not a,
        }
        return logic.get(base, _unknown)
    if base == "cvt" and len(parts) == 3 and all(part[0] in "su" for part in parts[1:]):
        read, write = _reader(parts[2]), _writer(parts[1])
        return lambda a: write(read(a))
    if base == "selp" and kind[0] in "sub":
        return lambda a, b, holds: np.where(holds, a, b) if isinstance(holds, np.ndarray) else a if holds else b
    if kind[0] not in "sub" or kind not in ("s32", "u32", "b32", "s64", "u64", "b64"):
        return _unknown
    read, write = _reader(kind), _writer(kind)
    if base in ("mul", "mad") and parts[1] in ("lo", "wide", "hi"):
        if parts[1] == "wide":
            write = _writer("s64")
        high = 32 if parts[1] == "hi" else 0
        if high and kind not in ("s32",):
            read = _wide_unsigned
        if base == "mul":
            return lambda a, b: write(_number(read(a) * read(b) >> high))
        return lambda a, b, c: write(_number(read(a) * read(b) >> high) + (c if parts[1] == "wide" else read(c)))
    simple: dict[str, Callable[..., Value]] = {
        "mov": lambda a: a,
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "neg": lambda a: -a,
        "abs": abs,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "not": lambda a: ~a,
        "shl": lambda a, b: a << b,
        "shr": lambda a, b: a >> b,
        "min": lambda a, b: np.minimum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else min(a, b),
        "max": lambda a, b: np.maximum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else max(a, b),
        "div": _truncated,
        "rem": lambda a, b: a - b * _truncated(a, b),
    }
    if base not in simple or len(parts) != 2:
        return _unknown
    operation = simple[base]
    return lambda *operands: write(operation(*(read(operand) for operand in operands)))


def _wide_unsigned(value: Value) -> Value:
    value = value & _WORD
    return value.astype(np.uint64) if isinstance(value, np.ndarray) else value


def _number(value: Value) -> Value:
    """An array as int64, a scalar as a Python int."""
    return value.astype(np.int64) if isinstance(value, np.ndarray) else int(value)


def _truncated(a: Value, b: Value) -> Value:
    quotient = abs(a) // abs(b)
    return np.where((a < 0) != (b < 0), -quotient, quotient) if isinstance(a, np.ndarray) else -quotient if (a < 0) != (b < 0) else quotient
