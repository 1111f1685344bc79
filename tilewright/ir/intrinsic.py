"""Instructions as data: what a machine does beyond arithmetic on scalars and vectors, and what it means.

    Intrinsic   = name, scope, operands, meaning, text (by language), key, requires, order
    Operand     = name, storage, access, dtype, shape, strides, lanes, guard
    Text        = line, function, source
    Context     = name, text (by language)
    ContextText = enter, leave, names, source

Kernel IR applies one by `ir.kernel.Invoke`, within what `ir.kernel.With` sets up where it needs that. No walker of kernel IR knows an instruction
by name: printers print its text, the interpreter runs its meaning on what its operands hold, analyses follow the places of its operands. The
instructions themselves are in `codegen/intrinsics`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np

from tilewright.ir.dtypes import FLOAT32

Array: TypeAlias = "np.ndarray[Any, Any]"
Meaning: TypeAlias = Callable[..., Array]
"""From the operands that are read or updated, in their order, to the one that is written, updated or begun. Each is an array [lanes of the scope,
*shape]; bfloat16 is its bits, as uint16."""

LANES: Final[Mapping[str, int]] = MappingProxyType({"thread": 1, "warp": 32, "warpgroup": 128})
"""Threads that perform an instruction together, by its scope. The other scopes, "block" and "cluster", are those of barriers."""

STORAGE: Final = frozenset({"fragment", "shared", "global", "memory", "value"})
ACCESS: Final = frozenset({"read", "write", "update", "begin", "address"})
ORDER: Final = frozenset({"", "commit", "await", "barrier"})


@dataclass(frozen=True)
class Operand:
    """What one lane gives to an instruction, or gets from it.

    `storage`: "fragment" (registers of the lane), "shared" or "global" memory, "memory" (anything that has an address, on a CPU) or "value" (an
    expression). `access`: "read", "write", "update" (both), "begin" (written some time before its thread's group of copies has been awaited) or
    "address" (neither read nor written: it may lie beyond the buffer). Elements are `shape` (scalar: empty; at most two dimensions) at multiples of
    `strides` from the place's offset, of which the last is 1; without strides they are dense. `lanes`: how many lanes of the scope give an address,
    the first ones (0: all; the others' places are not touched). `guard`: the name of a truth value; where it does not hold, nothing is read and the
    elements are zeros.
    """

    name: str
    storage: str
    access: str = "read"
    dtype: str = FLOAT32
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    lanes: int = 0
    guard: str = ""

    def __post_init__(self) -> None:
        assert self.storage in STORAGE and self.access in ACCESS and len(self.shape) <= 2, self
        assert not self.strides or len(self.strides) == len(self.shape) and self.strides[-1] == 1, self

    @property
    def reads(self) -> bool:
        return self.access in ("read", "update")

    @property
    def writes(self) -> bool:
        return self.access in ("write", "update", "begin")

    @property
    def size(self) -> int:
        """Elements of one lane."""
        return prod(self.shape)

    @property
    def row(self) -> int:
        """Neighbouring elements."""
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        return self.size // self.row

    @property
    def row_stride(self) -> int:
        return self.strides[0] if self.strides else self.row


@dataclass(frozen=True)
class Text:
    """An instruction in one language: a statement with operands' names in braces (what is in a buffer is printed as its address, in a buffer of a
    context by the context's name for it), and the function that it calls, whose source is printed ahead of the kernels."""

    line: str
    function: str = ""
    source: str = ""


@dataclass(frozen=True)
class Intrinsic:
    """An instruction. Two of one name are the same.

    `scope`: which threads perform it together, with one flow of control: "thread", "warp", "warpgroup", "block" or "cluster". `meaning`: None where
    no operand is written. `key`: under which name tables of latency and throughput have it. `requires`: features of a machine without which
    it does not exist, names of `Machine.isa` ("amx_tile") or the least architecture of a GPU ("sm_80"). `order`: what it does to the order of
    others, "commit" (the thread's begun writes since the last one are a group, which may be empty), "await" (until at most as many groups as its
    first operand says, the youngest, are not complete) or "barrier" (all threads of the scope meet).
    """

    name: str
    scope: str
    operands: tuple[Operand, ...] = field(default=(), compare=False)
    meaning: Meaning | None = field(default=None, compare=False, repr=False)
    text: Mapping[str, Text] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)
    key: str = field(default="", compare=False)
    requires: tuple[str, ...] = field(default=(), compare=False)
    order: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        assert self.order in ORDER and (self.scope in LANES) == (self.order != "barrier"), self
        assert (self.meaning is None) == (not any(operand.writes for operand in self.operands)), self


@dataclass(frozen=True)
class ContextText:
    """A context in one language: lines at the beginning and at the end of its statements, how instructions name each of its buffers, and the source
    that these instructions need, printed ahead of the kernels."""

    enter: tuple[str, ...]
    leave: tuple[str, ...]
    names: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True)
class Context:
    """What a thread sets up before some instructions and releases behind them, such as registers whose shapes are set all at once. The interpreter
    needs nothing of it: there the context's buffers are like any others."""

    name: str
    text: Mapping[str, ContextText] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)


def moved(source: Array) -> Array:
    """The meaning of a copy: what is written is what is read."""
    return source
