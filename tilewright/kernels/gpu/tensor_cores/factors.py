"""The type of the factors that tensor cores multiply, which the facts of all schemas of `mma.sync` have."""

from __future__ import annotations

from tilewright.codegen.intrinsics.async_copy import REQUIRES
from tilewright.codegen.intrinsics.mma import FIRST, SHAPES, Shape
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import size_of
from tilewright.ir.region import Unsuitable


class Factors:
    """`kind`: the type of the factors, a key of `mma.SHAPES`."""

    kind: str

    @property
    def shape(self) -> Shape:
        return SHAPES[self.kind]

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of a factor."""
        return size_of(self.shape.stored)


def check_multiplies(machine: Machine, kind: str) -> None:
    """Raises Unsuitable if the machine has no `mma.sync` of such factors with float32 sums."""
    if not machine.has(FIRST[kind]):
        raise Unsuitable(f"{machine.name} has no mma.sync of {kind} with float32 sums, which needs {FIRST[kind]}")


def copies_asynchronously(machine: Machine) -> bool:
    """Whether the machine copies to shared memory asynchronously."""
    return machine.has(REQUIRES[0])
