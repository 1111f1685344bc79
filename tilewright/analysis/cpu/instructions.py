"""Executed instructions by class: the classes, and sums over blocks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

CLASSES = ("fma", "multiply", "add", "arithmetic", "load", "store", "move", "integer", "branch")
"""The class of an instruction is the main thing that it does."""


@dataclass(frozen=True)
class InstructionCounts:
    """Numbers of executed instructions. Each instruction counts in the class of its main effect. `loads` and `stores` count every instruction that
    reads or writes memory, including those that compute with what they read, and `spills` those among them that address the stack. Fractions come
    from branches that depend on data; `undecided` counts executions of such branches. Without them the numbers are exact."""

    fma: float = 0
    multiply: float = 0
    add: float = 0
    arithmetic: float = 0
    load: float = 0
    store: float = 0
    move: float = 0
    integer: float = 0
    branch: float = 0
    loads: float = 0
    stores: float = 0
    spills: float = 0
    undecided: float = 0

    @property
    def total(self) -> float:
        """Number of all instructions."""
        return float(sum(getattr(self, name) for name in CLASSES))

    def __add__(self, other: InstructionCounts) -> InstructionCounts:
        return InstructionCounts(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def times(self, count: float) -> InstructionCounts:
        return InstructionCounts(*(getattr(self, field.name) * count for field in fields(self)))


@dataclass(frozen=True)
class Effect:
    """How one instruction is counted: its class, whether it reads or writes memory, and whether that is the stack."""

    kind: str
    reads: bool = False
    writes: bool = False
    stack: bool = False

    def counts(self) -> InstructionCounts:
        memory = {"loads": int(self.reads), "stores": int(self.writes), "spills": int(self.stack and (self.reads or self.writes))}
        return InstructionCounts(**{self.kind: 1, **memory})


_X86 = (
    (r"vfn?m(add|sub)(add|sub)?\d", "fma"),
    (r"vmul[ps][sd]|vpmull|vpmulu?dq", "multiply"),
    (r"v(add|sub)[ps][sd]|vh(add|sub)p[sd]|vp(add|sub)[bwdq]", "add"),
    (r"vp?broadcast|vperm|vshuf|vpshuf|vunpck|vpunpck|vp?insert|vp?extract|vpinsr|vpextr|vmov|vp?blend|vzero|kmov|vpmov|vpalignr|valign", "move"),
    (r"v|k", "arithmetic"),
    (r"j|call|ret|leave", "branch"),
    (r"movz|movs[bwl][wlq]|cltq|cqto|cltd", "integer"),
    (r"mov|cmov|push|pop", "move"),
    (r"", "integer"),
)
_AARCH64 = (
    (r"fn?m(add|sub|la|ls)", "fma"),
    (r"fn?mul", "multiply"),
    (r"fadd|fsub|faddp", "add"),
    (r"f(mov|csel)$|dup$|ins$|movi$|mvni$|ext$|zip|uzp|trn|tbl$|umov$|smov$|rev64$|xtn", "move"),
    (r"f|scvtf|ucvtf|bsl|bif|bit$|cm(eq|gt|ge|hi|hs|tst)", "arithmetic"),
    (r"b$|b\.|b(eq|ne|cs|cc|mi|pl|vs|vc|hi|ls|ge|lt|gt|le|hs|lo|l|lr|r|any|none|first|last)$|ret|cbn?z|tbn?z", "branch"),
    (r"mov$|movz|movn|movk", "move"),
    (r"", "integer"),
)


def x86_kind(mnemonic: str) -> str:
    """The class of an x86-64 instruction that computes; `assembly_x86` handles moves between memory and registers."""
    return next(kind for pattern, kind in _X86 if re.match(pattern, mnemonic))


def aarch64_kind(mnemonic: str, vector: bool) -> str:
    """The class of an AArch64 instruction that is neither a load nor a store; `vector`: its operands are vectors."""
    if vector and mnemonic in ("add", "sub", "and", "orr", "eor", "bic", "orn", "shl", "sshr", "ushr", "neg", "mul", "mla", "abs", "smax", "smin"):
        return {"add": "add", "sub": "add", "mul": "multiply"}.get(mnemonic, "arithmetic")
    if vector and mnemonic == "mov":
        return "move"
    return next(kind for pattern, kind in _AARCH64 if re.match(pattern, mnemonic))


def total(executions: Mapping[int, float], each: Mapping[int, InstructionCounts], undecided: float = 0) -> InstructionCounts:
    """The sum over blocks of each block's executions times its counts."""
    sums = dict.fromkeys((field.name for field in fields(InstructionCounts)), 0.0)
    for block, count in executions.items():
        for name in sums:
            sums[name] += count * getattr(each[block], name)
    sums["undecided"] = undecided
    return InstructionCounts(**sums)
