"""A parser of NVRTC's PTX: functions, basic blocks, natural loops, and classes of instructions. It reads only what the compiler prints for generated
kernels: one statement per line, labels at the beginning of a line, inline assembly between comments. Source: Tuna (2021), algorithm 3
(IDENTIFY-Loop-BB); PTX ISA, "Instruction Set".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

_ENTRY = re.compile(r"^\.(?:visible|weak)\s+\.entry\s+(\w+)", re.MULTILINE)
_STATEMENT = re.compile(r"^(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)(?:\s+(.*))?$", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_WIDTHS = {"8": 1, "16": 2, "32": 4, "64": 8}

INTEGER_TYPES = ("s16", "u16", "b16", "s32", "u32", "b32", "s64", "u64", "b64")
SPECIAL = ("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
CLASSES = (
    "fma", "float", "special", "integer", "convert", "move", "compare", "branch", "barrier", "copy", "atomic", "shared load", "shared store",
    "global load", "global store", "other load", "matrix", "other",
)  # fmt: skip
"""Classes of instructions: "float" is every floating-point operation except fused multiply-adds and the "special" functions; "compare" includes
selections and operations on predicates; "copy" is asynchronous; "other load" reads parameters, constants and local memory; "matrix" is a warp's
instructions for tensor cores."""


@dataclass(frozen=True)
class Instruction:
    """An instruction such as `@!%p1 add.s32 %r1, %r2, 4`: the guard, the opcode with its modifiers, and the operands, of which the first is the
    target."""

    opcode: str
    operands: tuple[str, ...] = ()
    predicate: str = ""
    negated: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.opcode.split("."))

    @property
    def bytes(self) -> int:
        """Bytes that a lane moves, for loads and stores."""
        parts = self.parts
        lanes = next((int(part[1:]) for part in parts if re.fullmatch(r"v[248]", part)), 1)
        width = re.search(r"(\d+)$", parts[-1])
        return lanes * _WIDTHS[width[1]] if width else 0

    @cached_property
    def kind(self) -> str:
        """One of CLASSES."""
        parts = self.parts
        base, kind = parts[0], parts[-1]
        if base == "cp" and parts[1] == "async":
            return "copy" if "shared" in parts else "barrier"
        if base in ("bar", "barrier", "membar", "fence"):
            return "barrier"
        if base in ("mma", "ldmatrix"):
            return "matrix"
        if base in ("atom", "red"):
            return "atomic"
        if base in ("ld", "st", "ldu"):
            space = next((part.partition("::")[0] for part in parts if part.startswith(("global", "shared"))), "")
            return f"{space} {'store' if base == 'st' else 'load'}" if space else "other load"
        if base in ("bra", "ret", "exit", "call", "brx"):
            return "branch"
        if base in ("setp", "set", "selp", "slct") or kind == "pred":
            return "compare"
        if base == "mov":
            return "move"
        if base in ("cvt", "cvta", "mapa"):
            return "convert"
        if base in SPECIAL:
            return "special"
        if base in ("fma", "mad") and kind in ("f32", "f64"):
            return "fma"
        if kind in ("f16", "f32", "f64", "bf16"):
            return "float"
        return "integer" if kind in INTEGER_TYPES else "other"


@dataclass(frozen=True)
class BasicBlock:
    """Instructions that run one after another; `successors` are numbers of blocks, the branch's target first."""

    label: str
    instructions: tuple[Instruction, ...]
    successors: tuple[int, ...]

    @cached_property
    def classes(self) -> Mapping[str, int]:
        """Number of instructions by class."""
        return Counter(instruction.kind for instruction in self.instructions)


@dataclass(frozen=True)
class Loop:
    """A natural loop: its header, all its blocks, and its latches."""

    header: int
    blocks: frozenset[int]
    latches: tuple[int, ...]


@dataclass(frozen=True)
class Function:
    """One kernel. Execution begins at block 0; a block without successors ends it."""

    name: str
    blocks: tuple[BasicBlock, ...]

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """Natural loops, outer ones first; back edges to one header are one loop."""
        dominators = _dominators(self.blocks)
        latches: dict[int, list[int]] = {}
        for number, block in enumerate(self.blocks):
            for successor in block.successors:
                if successor in dominators[number]:
                    latches.setdefault(successor, []).append(number)
        found = [Loop(header, _body(self.blocks, header, ends), tuple(ends)) for header, ends in latches.items()]
        return tuple(sorted(found, key=lambda loop: (-len(loop.blocks), loop.header)))


def parse(text: str) -> dict[str, Function]:
    """The kernels of a PTX file by name."""
    starts = [*_ENTRY.finditer(text)]
    ends = [match.start() for match in starts[1:]] + [len(text)]
    return {start[1]: _function(start[1], text[text.index("{", start.end()) : end]) for start, end in zip(starts, ends, strict=True)}


def _function(name: str, body: str) -> Function:
    labels: list[str] = [""]
    contents: list[list[Instruction]] = [[]]
    for line in re.sub(r"//[^\n]*", "", body).replace("\t", " ").split("\n"):
        for statement in line.split(";"):
            words = statement.strip().strip("{} ") if "%" not in statement else statement.strip()
            mark = re.match(r"(\$\w+):", words)
            if mark:
                if contents[-1] or labels[-1]:
                    labels.append("")
                    contents.append([])
                labels[-1] = mark[1]
                words = words[mark.end() :].strip()
            if not words or words.startswith((".", "(")):
                continue
            found = _STATEMENT.match(words)
            if found is None:
                raise ValueError(f"{name}: a line of PTX that is not understood: {words}")
            guard, predicate, opcode, operands = found.groups()
            contents[-1].append(Instruction(opcode, tuple(_OPERAND.findall(operands or "")), predicate or "", guard == "!"))
            if contents[-1][-1].kind == "branch":
                labels.append("")
                contents.append([])
    if not contents[-1] and not labels[-1]:
        labels.pop()
        contents.pop()
    numbers = {label: number for number, label in enumerate(labels) if label}
    blocks = []
    for number, (label, instructions) in enumerate(zip(labels, contents, strict=True)):
        last = instructions[-1] if instructions else None
        after = (number + 1,) if number + 1 < len(contents) else ()
        if last is not None and last.parts[0] == "bra":
            successors = (numbers[last.operands[0]], *(after if last.predicate else ()))
        elif last is not None and last.kind == "branch":
            successors = after if last.predicate else ()
        else:
            successors = after
        blocks.append(BasicBlock(label, tuple(instructions), successors))
    return Function(name, tuple(blocks))


def _dominators(blocks: tuple[BasicBlock, ...]) -> list[set[int]]:
    """For each block its dominators, including itself (iterated to the fixed point)."""
    everything = set(range(len(blocks)))
    before: list[list[int]] = [[] for _ in blocks]
    for number, block in enumerate(blocks):
        for successor in block.successors:
            before[successor].append(number)
    found = [{0}] + [set(everything) for _ in blocks[1:]]
    changed = True
    while changed:
        changed = False
        for number in range(1, len(blocks)):
            fresh = set.intersection(*(found[b] for b in before[number])) | {number} if before[number] else {number}
            if fresh != found[number]:
                found[number], changed = fresh, True
    return found


def _body(blocks: tuple[BasicBlock, ...], header: int, latches: list[int]) -> frozenset[int]:
    """The blocks from which a latch can be reached without passing the header."""
    inside, waiting = {header}, list(latches)
    while waiting:
        number = waiting.pop()
        if number not in inside:
            inside.add(number)
            waiting += [other for other, block in enumerate(blocks) if number in block.successors]
    return frozenset(inside)
