"""A hint that a cache line will be needed soon."""

from __future__ import annotations

from tilewright.ir.expr import Expr
from tilewright.ir.intrinsic import Intrinsic, Operand, Text
from tilewright.ir.kernel import Invoke, Place

_PREFETCH = Intrinsic(
    "prefetch", "thread", (Operand("place", "memory", "address"),), text={"C": Text("__builtin_prefetch({place});")}, key="prefetch"
)


def prefetch(buffer: str, offset: Expr) -> Invoke:
    """Prefetches the cache line at this offset of a buffer, which may lie beyond the buffer's end."""
    return Invoke(_PREFETCH, (Place(buffer, offset),))
