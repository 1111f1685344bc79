"""Disassembled kernels as functions of basic blocks, the same for every instruction set.

The text is the output of `objdump -d` for a linked kernel: exactly the code that runs, including the assembler's padding.

The effect of an instruction on control flow is described by a few operations on 64-bit registers, memory and flags; floating-point and vector
instructions are only counted. Operations, with registers and temporaries as strings and constants as integers::

    ("set", register, width, source)               register = source (width bytes, zero-extended)
    ("apply", name, register, width, a, b)         register = a name b; name: one of `EXACT`, or a linear one (add, sub, mul, shl)
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

An address is (base, index, scale, displacement); a symbolic base is ("symbol", name). Two more operations: ("wide", name, width, source), x86's
multiplication into and division of a pair of registers; ("vector_words", register, ((register, word or None), ...)), a vector register composed of
parts of others.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from tilewright import settings
from tilewright.analysis.cpu import assembly_aarch64, assembly_x86
from tilewright.analysis.cpu.instructions import InstructionCounts
from tilewright.errors import CompilerMissing, KernelFailed
from tilewright.hardware.machine import Machine
from tilewright.system.programs import ProgramHung, run_program

Operation: TypeAlias = tuple[Any, ...]
DECODERS = MappingProxyType({"x86-64": assembly_x86.decode, "aarch64": assembly_aarch64.decode})


@dataclass(frozen=True)
class Instruction:
    """One line: mnemonic and operands as written; code addresses are symbols or hexadecimal numbers."""

    mnemonic: str
    operands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.mnemonic} {', '.join(self.operands)}"


@dataclass(frozen=True)
class BasicBlock:
    """A maximal sequence of instructions that are executed together. `ending`: ("jump", label), ("branch", condition, label), ("zero", register,
    width, is_zero, label), ("bit", register, number, is_zero, label), ("return",), ("indirect",) or ("fall",); `successors` are block numbers, the
    target of a taken branch first."""

    number: int
    function: str
    instructions: tuple[Instruction, ...]
    operations: tuple[Operation, ...]
    counts: InstructionCounts
    ending: tuple[Any, ...]
    successors: tuple[int, ...]


@dataclass(frozen=True)
class Assembly:
    """The functions of a binary: its blocks by number, and the first block and the address of each function."""

    architecture: str
    blocks: tuple[BasicBlock, ...]
    entries: Mapping[str, int]
    addresses: Mapping[str, int]

    def of(self, function: str) -> list[BasicBlock]:
        return [block for block in self.blocks if block.function == function]


LISTING_BYTES = 1 << 28
"""Upper limit on the size of a listing."""
_FUNCTION = re.compile(r"^([0-9a-f]+) <([^>]+)>:$")
_LINE = re.compile(r"^\s*([0-9a-f]+):\t(.+)$")
_REFERENCE = re.compile(r"\b([0-9a-f]+) <([^>]+)>$")
_RELATIVE = re.compile(r"-?(?:0x)?[0-9a-f]*\(%rip\)")
_PREFIXES = ("cs ", "data16 ", "notrack ", "bnd ", "ds ")


def disassembler(machine: Machine) -> str:
    """The path of objdump for a machine's code.

    Raises:
        CompilerMissing: if there is none.
    """
    found = shutil.which(f"{machine.target_triple}-objdump") or shutil.which("objdump")
    if found is None:
        raise CompilerMissing(f"no objdump for {machine.target_triple}", "install binutils for it")
    return found


def disassembled(binary: Path, machine: Machine) -> str:
    """The disassembled code of a binary linked for the machine.

    Raises:
        CompilerMissing: if there is no objdump for that machine.
        KernelFailed: if objdump cannot read the binary or does not terminate.
    """
    found = disassembler(machine)
    try:
        done = run_program([found, "-d", "--no-show-raw-insn", str(binary)], settings.compile_seconds(), output_bytes=LISTING_BYTES)
    except (OSError, ProgramHung) as error:
        raise KernelFailed(f"the code of {binary} cannot be read: {error}", "check objdump", hung=isinstance(error, ProgramHung)) from error
    if done.status or done.cut:
        words = "it is too long" if done.cut else done.errors.strip() or f"objdump ended with status {done.status}"
        raise KernelFailed(f"the code of {binary} cannot be read: {words}", "check objdump and the file")
    return done.output


def lines_of(text: str) -> dict[tuple[int, str], dict[int, Instruction]]:
    """Instructions by address, for each function (address, name)."""
    functions: dict[tuple[int, str], dict[int, Instruction]] = {}
    current: dict[int, Instruction] = {}
    for raw in text.splitlines():
        head = _FUNCTION.match(raw)
        if head:
            current = functions.setdefault((int(head[1], 16), head[2]), {})
        line = _LINE.match(raw)
        if line:
            current[int(line[1], 16)] = instruction_of(line[2])
    return functions


def instruction_of(text: str) -> Instruction:
    """Parses one line of code without its address; a comment that names the operand's symbol replaces the number."""
    content, _, comment = text.split("//")[0].partition(" # ")
    content = content.strip()
    while content.startswith(_PREFIXES):
        content = content.split(" ", 1)[1]
    symbol = _REFERENCE.search(comment.strip())
    if symbol:
        content = _RELATIVE.sub(lambda _: symbol[2] + "(%rip)", content)
    mnemonic, rest = re.match(r"((?:rep\w* )?\S+)\s*(.*)", content, re.DOTALL).groups()  # type: ignore[union-attr]
    operands = split_operands(rest)
    if operands:
        target = _REFERENCE.search(operands[-1])
        if target:
            name = target[2].removesuffix("@plt")
            operands = (*operands[:-1], name if mnemonic in ("call", "bl") else target[1])
    return Instruction(mnemonic, operands)


def split_operands(text: str) -> tuple[str, ...]:
    """The operands, separated at commas outside brackets."""
    result, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            result.append(text[start:position].strip())
            start = position + 1
    last = text[start:].strip()
    return tuple([*result, last] if last else result)


def parse(text: str, architecture: str) -> Assembly:
    """Parses the output of `disassembled` for this architecture ("x86-64" or "aarch64").

    Raises:
        KernelFailed: for an instruction that is not understood; compilers make none of kernels, but a binary may hold anything.
    """
    decode = DECODERS[architecture]
    raw: list[tuple[str, list[Instruction], list[Operation], InstructionCounts, tuple[Any, ...]]] = []
    place: dict[tuple[str, int], int] = {}
    entries: dict[str, int] = {}
    known: dict[Instruction, Any] = {}
    functions = lines_of(text)
    for (_, function), code in functions.items():
        for instruction in code.values():
            if instruction not in known:
                try:
                    operations, effect, ending = decode(instruction.mnemonic, instruction.operands)
                except (LookupError, ValueError, StopIteration) as error:
                    raise KernelFailed(f"the instruction {instruction} is not understood", "report this as a defect") from error
                known[instruction] = operations, effect.counts(), ending
        jumps = (known[instruction][2] for instruction in code.values())
        leaders = {int(ending[-1], 16) for ending in jumps if ending is not None and re.fullmatch("[0-9a-f]+", str(ending[-1]))}
        entries[function] = len(raw)
        block: list[Instruction] = []
        for address, instruction in code.items():
            if address in leaders:
                if block:
                    raw.append(_closed(function, block, ("fall",), known))
                    block = []
                place[function, address] = len(raw)
            block.append(instruction)
            ending = known[instruction][2]
            if ending is not None:
                raw.append(_closed(function, block, ending, known))
                block = []
        if block:
            raw.append(_closed(function, block, ("return",), known))
    blocks = []
    for number, (function, instructions, operations, counts, ending) in enumerate(raw):
        following = number + 1 if number + 1 < len(raw) and raw[number + 1][0] == function else None
        successors = _successors(function, ending, place, following)
        blocks.append(BasicBlock(number, function, tuple(instructions), tuple(operations), counts, ending, successors))
    addresses = {name: address for address, name in functions}
    return Assembly(architecture, tuple(blocks), MappingProxyType(entries), MappingProxyType(addresses))


def _closed(
    function: str, block: list[Instruction], ending: tuple[Any, ...], known: Mapping[Instruction, Any]
) -> tuple[str, list[Instruction], list[Operation], InstructionCounts, tuple[Any, ...]]:
    counts = sum((known[instruction][1] for instruction in block), InstructionCounts())
    return function, block, [operation for instruction in block for operation in known[instruction][0]], counts, ending


def _successors(function: str, ending: Sequence[Any], place: Mapping[tuple[str, int], int], following: int | None) -> tuple[int, ...]:
    """The successors of a block; none if the function returns or jumps to another function."""
    target = None
    if ending[0] in ("jump", "branch", "zero", "bit") and re.fullmatch("[0-9a-f]+", str(ending[-1])):
        target = place.get((function, int(ending[-1], 16)))
    behind = None if ending[0] in ("return", "jump", "indirect") else following
    return tuple(block for block in (target, behind) if block is not None)
