"""Instructions as data: machine operations beyond scalar and vector arithmetic, and their meaning.

    Intrinsic   = name, scope, operands, meaning, text (by language), key, requires, order, engine
    Operand     = name, storage, access, dtype, shape, strides, lanes, guard, swizzle
    Text        = line, function, source
    Context     = name, text (by language)
    ContextText = enter, leave, names, source

Kernel IR applies an instruction by `ir.kernel.Invoke`, inside an `ir.kernel.With` if it needs a set-up. No code that walks kernel IR knows an
instruction by name: printers print its text, the interpreter runs its meaning on the contents of its operands, and analyses follow the places of its
operands. The instructions themselves are in `codegen/intrinsics`.
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
"""Maps the operands that are read or updated, in order, to the one that is written, updated or begun. Each is an array [lanes of the scope, *shape];
bfloat16 is represented by its bits, as uint16."""

LANES: Final[Mapping[str, int]] = MappingProxyType({"thread": 1, "warp": 32, "warpgroup": 128})
"""Threads that perform an instruction together, by scope. The other scopes, "block", "cluster" and "grid", are only for barriers."""

STORAGE: Final = frozenset({"fragment", "shared", "global", "memory", "value", "barrier", "map"})
ACCESS: Final = frozenset({"read", "write", "update", "begin", "address"})
ORDER: Final = frozenset({"", "commit", "await", "arrive", "barrier", "initialise", "signal", "wait", "publish"})
ENGINES: Final = frozenset({"", "copies", "stores", "products"})

SWIZZLES: Final = (0, 32, 64, 128)
"""Bytes of shared memory among which pieces of 16 are permuted: the 1, 2 or 3 bits of a byte's address above its lowest four are XORed with those
three places higher (PTX ISA, "Swizzling Modes")."""


@dataclass(frozen=True)
class Operand:
    """What one lane passes to an instruction or receives from it.

    `storage`: "fragment" (registers of the lane), "shared" or "global" memory, "memory" (anything with an address, on a CPU), "barrier" (in shared
    memory, see `codegen.intrinsics.mbarrier`), "map" (a tensor map, `ir.tensor_map`) or "value" (an expression). `access`: "read", "write", "update"
    (both), "begin" (written at some time before the thread's group of copies has been awaited) or "address" (neither read nor written: it may lie
    beyond the buffer). `shape` is that of the elements (empty for a scalar); they are stored at multiples of `strides` from the place's offset.
    Without strides they are dense, in at most two dimensions. `swizzle`: how they are permuted in shared memory (`SWIZZLES`). `lanes`: how many lanes
    of the scope, from the first, give an address (0: all); the places of the others are not touched. `guard`: name of the operand that is the
    condition; if it is false, nothing is read and the elements are zeros.
    """

    name: str
    storage: str
    access: str = "read"
    dtype: str = FLOAT32
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    lanes: int = 0
    guard: str = ""
    swizzle: int = 0

    def __post_init__(self) -> None:
        assert self.storage in STORAGE and self.access in ACCESS and (self.strides or len(self.shape) <= 2), self
        assert len(self.strides) in (0, len(self.shape)) and self.swizzle in SWIZZLES, self

    @property
    def reads(self) -> bool:
        return self.access in ("read", "update")

    @property
    def writes(self) -> bool:
        return self.access in ("write", "update", "begin")

    @property
    def size(self) -> int:
        """Elements per lane."""
        return prod(self.shape)

    @property
    def row(self) -> int:
        """Adjacent elements."""
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        return self.size // self.row

    @property
    def row_stride(self) -> int:
        return self.strides[0] if self.strides else self.row


INTERPRETER = "interpreter"


@dataclass(frozen=True)
class Text:
    """An instruction in one language: a statement with operand names in braces, and the function that it calls. An operand in a buffer is printed as
    its address, or in a context's buffer as the context's name for it. The function's source is printed ahead of the kernels.

    In the language `INTERPRETER`, C for the interpreter, an operand is an array [lanes][elements]. Such a text computes what the meaning does, and is
    used instead: where threads perform an instruction one by one, calls of Python would take most of the time."""

    line: str
    function: str = ""
    source: str = ""


@dataclass(frozen=True)
class Intrinsic:
    """An instruction. Two instructions of the same name are equal.

    `scope`: the threads that perform it together, without divergence: "thread", "warp", "warpgroup", "block", "cluster" or "grid". `meaning`: None if
    no operand is written. `key`: its name in the tables of latency and throughput. `requires`: machine features that it needs, as names of
    `Machine.isa` ("amx_tile") or the lowest architecture of a GPU ("sm_80"). `order`: its effect on the order of other instructions, "commit" (the
    thread's writes begun since the last commit form a group, which may be empty), "await" (until at most the youngest n groups are incomplete, where
    n is its first operand), "barrier" (all threads of the scope meet) or "arrive" (what precedes it is ordered before what follows the scope's next
    barrier, and what is between them with neither). Of a barrier in memory, its operand: "initialise" (its first value is the number of arrivals of a
    phase), "signal" (an arrival, before which its value, if any, is added to the bytes that the phase waits for) or "wait" (until the phase of the
    parity that is its first value has completed). "publish": what the thread wrote before may be accessed by engines.

    `engine`: "" if its threads perform it themselves. "copies": the copy engine accesses the operands at some time until the phase of its barrier
    operand, to which it reports the bytes, has completed. "stores": the copy engine reads and writes the operands at some time until the group that a
    commit of the same engine makes of the thread's instructions before it was awaited; the wait is for its reads alone. "products": tensor cores
    access them at some time until the group that a commit of its scope makes of the instructions before it was awaited; those of one scope run in
    order.
    """

    name: str
    scope: str
    operands: tuple[Operand, ...] = field(default=(), compare=False)
    meaning: Meaning | None = field(default=None, compare=False, repr=False)
    text: Mapping[str, Text] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)
    key: str = field(default="", compare=False)
    requires: tuple[str, ...] = field(default=(), compare=False)
    order: str = field(default="", compare=False)
    engine: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        assert self.order in ORDER and self.engine in ENGINES and (self.scope in LANES or self.order in ("arrive", "barrier")), self
        assert (self.meaning is None) == (not any(operand.writes for operand in self.operands)), self


@dataclass(frozen=True)
class ContextText:
    """A context in one language: lines before and after its statements, the name of each of its buffers in instructions, and the source that these
    instructions need, printed ahead of the kernels."""

    enter: tuple[str, ...]
    leave: tuple[str, ...]
    names: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True)
class Context:
    """What a thread sets up before some instructions and releases after them, such as registers whose shapes are all set at once. The interpreter
    ignores it and treats the context's buffers like any others."""

    name: str
    text: Mapping[str, ContextText] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)


def moved(source: Array) -> Array:
    """The meaning of a copy: it writes what it reads."""
    return source
