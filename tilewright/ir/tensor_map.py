"""Tensor maps: how the copy engine of a GPU (TMA, compute capability 9.0) reads or writes a tensor in global memory.

A map describes a parameter of a kernel. The host has the driver encode it, with the parameter's address, in 128 bytes that are another argument of
the kernel. Limits and meanings are those of cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tilewright.ir.dtypes import size_of
from tilewright.ir.intrinsic import SWIZZLES

MAP_BYTES = 128
"""Size of an encoded map."""
PIECE_BYTES = 16
"""What addresses, strides and rows of boxes are multiples of."""
MOST_DIMENSIONS = 5
MOST_IN_BOX = 256
"""Elements of a box along one dimension."""
MOST_PIXELS = 1024
MOST_STEP = 8
MOST_FILTER = {1: 65535, 2: 255, 3: 31}
"""Offset of a filter, by spatial dimensions; an offset is less."""


@dataclass(frozen=True)
class TensorMap:
    """A tensor in the parameter `buffer`, whose first element is `offset` elements behind the start, and the box that one copy moves. Dimensions are
    in the order of memory, innermost first; the innermost one is dense. `extents`; `strides` in elements, the first of which is 1.

    A tiled map copies the `box` at the coordinates of its first element. A map with `corners` copies columns of pixels (im2col) of a tensor of
    channels, one to three spatial dimensions, and images: `box` is (channels, pixels), and the pixels are those of the coordinates and the ones after
    it, in steps of `steps` along each spatial dimension, within the pixels from lower to extent + upper (excluded) for the pair (lower, upper) of
    each; offsets of the filter are added to each.

    Elements outside of the tensor are zeros. In shared memory a box is dense, in rows of its innermost dimension, of which a swizzled map permutes
    the pieces of 16 bytes (`ir.intrinsic.SWIZZLES`); with `swizzle` these rows have so many bytes.
    """

    name: str
    buffer: str
    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    offset: int = 0
    corners: tuple[tuple[int, int], ...] = ()
    steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        rank, size = len(self.extents), size_of(self.dtype)
        spatial = rank - 2
        if not 1 <= rank <= MOST_DIMENSIONS or len(self.strides) != rank or self.strides[0] != 1:
            raise ValueError(f"{self.name}: a tensor map has 1 to {MOST_DIMENSIONS} dimensions with strides, the first of which is 1")
        if any(stride * size % PIECE_BYTES or not 0 < stride * size < 1 << 40 for stride in self.strides[1:]) or self.offset * size % PIECE_BYTES:
            raise ValueError(f"{self.name}: strides {self.strides} and offset {self.offset} of {self.dtype} are no multiples of {PIECE_BYTES} bytes")
        if any(not 1 <= extent <= 1 << 32 for extent in self.extents):
            raise ValueError(f"{self.name}: extents {self.extents} are not from 1 to 2^32")
        row = self.box[0] * size
        if row % PIECE_BYTES or self.swizzle not in SWIZZLES or self.swizzle and row != self.swizzle:
            raise ValueError(f"{self.name}: rows of {row} bytes do not fit a swizzle of {self.swizzle} bytes")
        if self.corners:
            most = {1: 1 << 15, 2: 1 << 7, 3: 1 << 4}.get(spatial, 0)
            if len(self.corners) != spatial or len(self.steps) != spatial or any(not 1 <= step <= MOST_STEP for step in self.steps):
                raise ValueError(f"{self.name}: {spatial} spatial dimensions need as many corners, and steps from 1 to {MOST_STEP}")
            if any(not -most <= corner < most for pair in self.corners for corner in pair):
                raise ValueError(f"{self.name}: corners {self.corners} are not from {-most} to {most - 1}")
            if len(self.box) != 2 or not 1 <= self.box[0] <= MOST_IN_BOX or not 1 <= self.box[1] <= MOST_PIXELS:
                raise ValueError(f"{self.name}: a column is no box {self.box} of at most {MOST_IN_BOX} channels and {MOST_PIXELS} pixels")
        elif self.steps or len(self.box) != rank or any(not 1 <= count <= MOST_IN_BOX for count in self.box):
            raise ValueError(f"{self.name}: a box of {rank} dimensions has 1 to {MOST_IN_BOX} elements along each, not {self.box}")

    @property
    def bytes(self) -> int:
        """What one copy writes, zeros included."""
        return prod(self.box) * size_of(self.dtype)

    @property
    def coordinates(self) -> int:
        """Values that say where a copy begins: one per dimension, and for columns one offset of the filter per spatial dimension."""
        return len(self.extents) + len(self.corners)

    @property
    def end(self) -> int:
        """Elements of the buffer up to the tensor's last one."""
        return self.offset + 1 + sum((extent - 1) * stride for extent, stride in zip(self.extents, self.strides, strict=True))
