"""How the elements of a value are stored: one type for NCHW, NHWC, blocked, packed and padded layouts.

A layout is an ordered list of (dimension, factor) pairs, outermost first. A dimension that occurs only once, with factor 0, is stored whole. A
dimension that is split occurs once with factor 0 (the outer part) and again with its inner factors; its extent is rounded up to their
product. `halo` adds zeroed elements before and after a dimension, so that a convolution can read its padding.

Worked example, K x C weights of a matrix product packed in panels of 32 columns: `Layout((K, C), ((0, 0), (1, 0), (0, 32)))` stores
element (k, c) at ((k // 32) * C + c) * 32 + k mod 32, and ceil(K / 32) * C * 32 elements in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tilewright.ir.expr import INDEX, Const, Expr, add, floordiv, mod, mul


@dataclass(frozen=True)
class Layout:
    """Storage of a value of logical `shape`; see the module docstring. Raises ValueError for an inconsistent order."""

    shape: tuple[int, ...]
    order: tuple[tuple[int, int], ...]
    halo: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.halo:
            object.__setattr__(self, "halo", ((0, 0),) * len(self.shape))
        outer = sorted(dim for dim, factor in self.order if factor == 0)
        if outer != list(range(len(self.shape))):
            raise ValueError(f"layout order {self.order} does not hold each of {len(self.shape)} dimensions once with factor 0")

    @property
    def extents(self) -> tuple[int, ...]:
        """Physical extent of each entry of `order`."""
        inner = {dim: prod(f for d, f in self.order if d == dim and f) for dim in range(len(self.shape))}
        return tuple(
            factor or -(-(self.shape[dim] + sum(self.halo[dim])) // inner[dim]) for dim, factor in self.order
        )

    @property
    def strides(self) -> tuple[int, ...]:
        """Element stride of each entry of `order`."""
        extents = self.extents
        return tuple(prod(extents[i + 1 :]) for i in range(len(extents)))

    @property
    def size(self) -> int:
        """Elements of storage, including halo and rounding."""
        return prod(self.extents)

    @property
    def is_padded(self) -> bool:
        return self.size != prod(self.shape)

    @property
    def is_row_major(self) -> bool:
        return self == row_major(self.shape)

    def offset(self, index: Sequence[Expr | int]) -> Expr:
        """Flat element offset of a logical index."""
        result: Expr = Const(0, INDEX)
        remaining = {dim: prod(f for d, f in self.order if d == dim and f) for dim in range(len(self.shape))}
        for (dim, factor), stride in zip(self.order, self.strides, strict=True):
            position = add(index[dim], self.halo[dim][0])
            if factor == 0:
                part = floordiv(position, remaining[dim])
            else:
                part = mod(floordiv(position, remaining[dim] // factor), factor)
                remaining[dim] //= factor
            result = add(result, mul(part, stride))
        return result

    def with_halo(self, halo: Sequence[tuple[int, int]]) -> Layout:
        return Layout(self.shape, self.order, tuple(halo))

    def dense_strides(self) -> tuple[int, ...] | None:
        """Element stride of each logical dimension, or None if a dimension is split."""
        if any(factor for _, factor in self.order):
            return None
        by_dim = {dim: stride for (dim, _), stride in zip(self.order, self.strides, strict=True)}
        return tuple(by_dim[dim] for dim in range(len(self.shape)))

    def start(self) -> int:
        """Offset of logical element (0, ..., 0): above 0 if there is a halo."""
        value = self.offset([0] * len(self.shape))
        assert isinstance(value, Const)
        return int(value.value)

    def __str__(self) -> str:
        text = " ".join(f"d{dim}" + (f":{factor}" if factor else "") for dim, factor in self.order)
        return text + (f" halo {self.halo}" if any(map(any, self.halo)) else "")


def row_major(shape: Sequence[int]) -> Layout:
    """C order: elements along the last dimension are adjacent."""
    return Layout(tuple(shape), tuple((dim, 0) for dim in range(len(shape))))


def permuted(shape: Sequence[int], order: Sequence[int]) -> Layout:
    """Unsplit dimensions in the given order, outermost first."""
    return Layout(tuple(shape), tuple((dim, 0) for dim in order))


def channels_last(shape: Sequence[int]) -> Layout:
    """N, spatial dimensions, C: the order that convolutions read and write. Row-major below three dimensions."""
    if len(shape) < 3:
        return row_major(shape)
    return permuted(shape, (0, *range(2, len(shape)), 1))
