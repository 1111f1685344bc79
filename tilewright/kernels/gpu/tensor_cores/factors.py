"""The type of the factors that tensor cores multiply, which the facts of all schemas of `mma.sync` have."""

from __future__ import annotations

from tilewright.codegen.intrinsics.mma import SHAPES, Shape
from tilewright.ir.dtypes import size_of


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
