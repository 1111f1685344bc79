"""The compiler's assembly as functions of basic blocks, the same for every instruction set.

What an instruction means for the flow of control is a few operations on 64-bit registers, memory and flags; floating-point and vector
instructions are only counted. Operations, with registers and temporaries as strings and constants as integers::

    ("set", register, width, source)               register = source (width bytes, zero-extended)
    ("apply", name, register, width, a, b)         register = a name b; names in `EXACT` and linear ones: add, sub, mul, shl
    ("extend", register, source, from, width)      sign extension of `from` bytes
    ("address", register, address)                 register = the address itself
    ("load", register, address, bytes, signed)     signed: width of a sign extension, or 0
    ("store", address, bytes, source)
    ("vector_load", registers, address, bytes)     of pointers, which compilers copy through vector registers
    ("vector_store", address, registers, bytes)
    ("forget", register)                           the value depends on data
    ("flags", kind, a, b, width)                   kind: sub, and, result; None: they depend on data
    ("compare_if", condition, a, b, width, nzcv)   flags of a - b if the condition holds, else the given ones
    ("choose", register, width, condition, a, b)   register = a if condition else b
    ("call", name)

An address is (base, index, scale, displacement) and may have a symbol as its base: ("symbol", name).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from tilewright.analysis import assembly_aarch64, assembly_x86
from tilewright.analysis.instructions import InstructionCounts

Operation: TypeAlias = tuple[Any, ...]
DECODERS = MappingProxyType({"x86-64": assembly_x86.decode, "aarch64": assembly_aarch64.decode})


@dataclass(frozen=True)
class Instruction:
    """One line: mnemonic and operands as written, and the line of the C source it came from (0: not known)."""

    mnemonic: str
    operands: tuple[str, ...]
    line: int = 0

    def __str__(self) -> str:
        return f"{self.mnemonic} {', '.join(self.operands)}"


@dataclass(frozen=True)
class BasicBlock:
    """Instructions that are executed together. `ending`: ("jump", label), ("branch", condition, label), ("zero", register, width, is_zero, label),
    ("bit", register, number, is_zero, label), ("return",), or ("fall",); `successors` are block numbers, that of a taken branch first."""

    number: int
    function: str
    instructions: tuple[Instruction, ...]
    operations: tuple[Operation, ...]
    counts: InstructionCounts
    ending: tuple[Any, ...]
    successors: tuple[int, ...]


@dataclass(frozen=True)
class Assembly:
    """The functions of a file: blocks by number, and the first block of each function."""

    architecture: str
    blocks: tuple[BasicBlock, ...]
    entries: Mapping[str, int]

    def of(self, function: str) -> list[BasicBlock]:
        return [block for block in self.blocks if block.function == function]


_LABEL = re.compile(r"^([.\w$]+):")


def lines_of(text: str) -> list[tuple[str, list[tuple[str, Instruction | None]]]]:
    """Functions with their labels ((label, None)) and instructions (("", instruction)) in order, from what `gcc -S` writes."""
    functions: list[tuple[str, list[tuple[str, Instruction | None]]]] = []
    names = set(re.findall(r"\.type\s+([\w.$]+), [@%]function", text))
    current: list[tuple[str, Instruction | None]] | None = None
    line = 0
    for raw in text.splitlines():
        label = _LABEL.match(raw)
        if label:
            if label[1] in names:
                current = []
                functions.append((label[1], current))
            elif current is not None:
                current.append((label[1], None))
            continue
        content = raw.split("//")[0].strip() if raw[:1].isspace() else ""
        if content.startswith(".loc "):
            line = int(content.split()[2])
        elif content.startswith((".size", ".section", ".text")):
            current = None if content.startswith(".size") else current
        elif content and content[0] not in ".#" and current is not None:
            mnemonic, _, rest = content.partition("\t") if "\t" in content else content.partition(" ")
            if mnemonic in ("rep", "lock", "repz"):
                mnemonic, rest = f"{mnemonic} {rest.strip()}", ""
            current.append(("", Instruction(mnemonic, split_operands(rest), line)))
    return functions


def split_operands(text: str) -> tuple[str, ...]:
    """Operands between commas that are not inside brackets."""
    result, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            result.append(text[start:position].strip())
            start = position + 1
    last = text[start:].strip()
    return tuple([*result, last] if last else result)


def parse(text: str, architecture: str) -> Assembly:
    """What `gcc -S` wrote for a machine of this architecture ("x86-64" or "aarch64")."""
    decode = DECODERS[architecture]
    raw: list[tuple[str, list[Instruction], list[Operation], InstructionCounts, tuple[Any, ...]]] = []
    place: dict[tuple[str, str], int] = {}
    entries: dict[str, int] = {}
    known: dict[tuple[str, tuple[str, ...]], Any] = {}
    for function, lines in lines_of(text):
        entries[function] = len(raw)
        instructions: list[Instruction] = []
        operations: list[Operation] = []
        counts = InstructionCounts()

        def close(ending: tuple[Any, ...], function: str = function) -> None:
            nonlocal instructions, operations, counts
            raw.append((function, instructions, operations, counts, ending))
            instructions, operations, counts = [], [], InstructionCounts()

        for label, instruction in lines:
            if instruction is None:
                if instructions:
                    close(("fall",))
                place[function, label] = len(raw)
                continue
            key = (instruction.mnemonic, instruction.operands)
            if key not in known:
                made, effect, end = decode(*key)
                known[key] = made, effect.counts(), end
            made, each, end = known[key]
            instructions.append(instruction)
            operations.extend(made)
            counts = counts + each
            if end is not None:
                close(end)
        if instructions or not raw or raw[-1][4][0] in ("fall", "branch", "zero", "bit"):
            close(("return",))
    blocks = []
    for number, (function, instructions, operations, counts, ending) in enumerate(raw):
        successors = _successors(number, function, ending, place, len(raw))
        blocks.append(BasicBlock(number, function, tuple(instructions), tuple(operations), counts, ending, successors))
    return Assembly(architecture, tuple(blocks), MappingProxyType(entries))


def _successors(number: int, function: str, ending: Sequence[Any], place: Mapping[tuple[str, str], int], count: int) -> tuple[int, ...]:
    if ending[0] == "return":
        return ()
    if ending[0] == "fall":
        return (number + 1,)
    target = place.get((function, ending[-1]))
    if ending[0] == "jump":
        return () if target is None else (target,)  # a jump to another function ends this one
    return ((target,) if target is not None else ()) + ((number + 1,) if number + 1 < count else ())
