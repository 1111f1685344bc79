"""The result of a product as a matrix in memory that the copy engine can store."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod

from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import linear, variables
from tilewright.ir.intrinsic import SWIZZLES
from tilewright.ir.tensor_map import PIECE_BYTES, TensorMap
from tilewright.kernels.gpu.gemm.form import ProductForm

ELEMENT_BYTES = 2
"""Of results that the copy engine stores."""


@dataclass(frozen=True)
class ResultMatrix:
    """The results of a product as a matrix [batch, m, n] with dense n: the buffer's name and type, its extents, the strides of batch and m in
    elements, and the first element."""

    buffer: str
    dtype: str
    extents: tuple[int, int, int]
    strides: tuple[int, int]
    offset: int

    def map(self, rows: int, row_bytes: int) -> TensorMap:
        """Boxes of so many rows, and of columns of so many bytes."""
        box = (row_bytes // size_of(self.dtype), rows, 1)
        return TensorMap("map_sent", self.buffer, self.dtype, self.extents[::-1], (1, *self.strides[::-1]), box, row_bytes, self.offset)

    def lines(self, outputs: tuple[int, ...], pixels: int, row_bytes: int) -> TensorMap:
        """Boxes of so many adjacent pixels of one line of an image, and of columns of so many bytes. Rows of the matrix are the positions `outputs`
        of each image."""
        pitches = [self.strides[1] * prod(outputs[dimension:]) for dimension in range(len(outputs) + 1)]
        images = self.extents[1] // prod(outputs)
        box = (row_bytes // size_of(self.dtype), pixels, *(1 for _ in outputs))
        extents, strides = (self.extents[2], *outputs[::-1], images), (1, *pitches[::-1])
        return TensorMap("map_sent", self.buffer, self.dtype, extents, strides, box, row_bytes, self.offset)


def result_matrix(product: ProductForm) -> ResultMatrix | None:
    """Where the copy engine can store the results; None if they are no such matrix of 16-bit values, or what follows the sum differs from row to row:
    threads that do not store adjacent results do not read adjacent elements either."""
    if not product.m or len(product.n) != 1 or len(product.batch) > 1 or product.facts.store_vector < 2:
        return None
    if size_of(product.types[product.output]) != ELEMENT_BYTES:
        return None
    form = linear(product.offset)
    strides = {axis: dict(form.terms).get(axis, 0) for axis in (*product.batch, *product.m, *product.n)}
    row, batch = strides[product.m[-1]], strides[product.batch[0]] if product.batch else PIECE_BYTES
    adjacent = all(strides[outer] == strides[inner] * (inner.extent or 1) for outer, inner in pairwise(product.m))
    if not variables(product.element).isdisjoint(product.m):
        return None
    if strides.keys() != dict(form.terms).keys() or strides[product.n[0]] != 1 or min(row, batch) <= 0 or not adjacent:
        return None
    extents = product.facts.batch, product.facts.m, product.facts.n
    found = ResultMatrix(product.output, product.types[product.output], extents, (batch, row), form.constant)
    try:
        found.map(8, SWIZZLES[1])
    except ValueError:  # places that are no multiples of 16 bytes
        return None
    return found
