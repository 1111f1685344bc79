"""How the elements of a value are stored: one type for NCHW, NHWC, blocked, packed and padded layouts.

A layout is an ordered list of (dimension, factor) pairs, outermost first. A dimension that occurs only once, with factor 0, is stored whole. A
dimension that is split occurs once with factor 0 (the outer part) and again with its inner factors; its extent is rounded up to their
product. `halo` adds zeroed elements before and after a dimension, so that a convolution can read its padding. `around` adds elements of other
values: the value is a slice of a larger buffer (`part`), such as the buffer of a concatenation.

Worked example, K x C weights of a matrix product packed in panels of 32 columns: `Layout((K, C), ((0, 0), (1, 0), (0, 32)))` stores
element (k, c) at ((k // 32) * C + c) * 32 + k mod 32, and ceil(K / 32) * C * 32 elements in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd, prod
from typing import TypeAlias

from tilewright.ir.expr import Const, Expr, add, floordiv, mod, weighted_sum

BASE_ELEMENTS = 16
"""Alignment, in elements, of the address that kernels receive for a slice: a cache line of float32, and the widest vectors of every other type."""


Box: TypeAlias = tuple[tuple[int, int], ...]
"""A part of a buffer: (first, end) along each dimension."""


@dataclass(frozen=True)
class Layout:
    """Storage of a value of logical `shape`; see the module docstring. Raises ValueError for an inconsistent order."""

    shape: tuple[int, ...]
    order: tuple[tuple[int, int], ...]
    halo: tuple[tuple[int, int], ...] = ()
    around: tuple[tuple[int, int], ...] = field(default=(), metadata={"omitted": ()})
    """Elements of other values before and after each dimension, outside the halo; empty unless the value is a slice."""

    def __post_init__(self) -> None:
        if not self.halo:
            object.__setattr__(self, "halo", ((0, 0),) * len(self.shape))
        if not any(map(any, self.around)):
            object.__setattr__(self, "around", ())
        elif len(self.around) != len(self.shape) or any(factor for _, factor in self.order):
            raise ValueError(f"a slice of {len(self.shape)} dimensions, none of them split, has {self.around} around it")
        outer = sorted(dim for dim, factor in self.order if factor == 0)
        if outer != list(range(len(self.shape))):
            raise ValueError(f"layout order {self.order} does not hold each of {len(self.shape)} dimensions once with factor 0")

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """Physical extent of each entry of `order`."""
        inner = {dim: prod(f for d, f in self.order if d == dim and f) for dim in range(len(self.shape))}
        return tuple(factor or -(-(self.shape[dim] + sum(self.halo[dim]) + sum(self.outside(dim))) // inner[dim]) for dim, factor in self.order)

    def outside(self, dim: int) -> tuple[int, int]:
        """Elements of other values before and after a dimension: 0 unless the value is a slice."""
        return self.around[dim] if self.around else (0, 0)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Element stride of each entry of `order`."""
        extents = self.extents
        return tuple(prod(extents[i + 1 :]) for i in range(len(extents)))

    @property
    def size(self) -> int:
        """Elements of storage, including halo and rounding; for a slice up to its last element, whatever follows."""
        following = sum(after * stride for (_, after), stride in zip(self.around, self.dense_strides() or (), strict=True)) if self.around else 0
        return prod(self.extents) - following

    @property
    def own_size(self) -> int:
        """Elements of storage without those of other values."""
        return replace(self, around=()).size

    @property
    def is_padded(self) -> bool:
        return self.size != prod(self.shape)

    @cached_property
    def is_row_major(self) -> bool:
        return self == row_major(self.shape)

    def offset(self, index: Sequence[Expr | int]) -> Expr:
        """Flat element offset of a logical index."""
        parts: list[tuple[Expr, int]] = []
        remaining = {dim: prod(f for d, f in self.order if d == dim and f) for dim in range(len(self.shape))}
        for (dim, factor), stride in zip(self.order, self.strides, strict=True):
            position = add(index[dim], self.halo[dim][0] + self.outside(dim)[0])
            if factor == 0:
                part = floordiv(position, remaining[dim])
            else:
                part = mod(floordiv(position, remaining[dim] // factor), factor)
                remaining[dim] //= factor
            parts.append((part, stride))
        return weighted_sum(parts)

    def with_halo(self, halo: Sequence[tuple[int, int]]) -> Layout:
        return replace(self, halo=tuple(halo))

    def part(self, shape: Sequence[int], start: Sequence[int]) -> Layout:
        """The layout, in the same storage, of the slice of this shape whose first element is at `start`. It shares the halo along dimensions that it
        covers."""
        halo, around = [], []
        for dim, (extent, first) in enumerate(zip(shape, start, strict=True)):
            (before, after), outside = self.halo[dim], self.outside(dim)
            whole = extent == self.shape[dim]
            halo.append((before, after) if whole else (0, 0))
            more = (0, 0) if whole else (before + first, after + self.shape[dim] - extent - first)
            around.append((outside[0] + more[0], outside[1] + more[1]))
        return Layout(tuple(shape), self.order, tuple(halo), tuple(around))

    @property
    def base(self) -> int:
        """Elements between the start of the storage and the address that kernels receive for a slice, a multiple of BASE_ELEMENTS; 0 for a value that
        is no slice. Slices of one shape and alignment at several places have the same kernels."""
        return sum(skipped * stride for skipped, stride in self._skipped())

    def from_base(self, whole: Layout | None = None) -> Layout:
        """The layout relative to `base`, or to that of another slice of the same storage, `whole`, which contains this one."""
        skipped = (whole or self)._skipped()
        if not skipped:
            return self
        return replace(self, around=tuple((before - skip, after + skip) for (before, after), (skip, _) in zip(self.around, skipped, strict=True)))

    def _skipped(self) -> list[tuple[int, int]]:
        """For each dimension of a slice, how many of its elements `base` skips, and its stride."""
        strides = (self.dense_strides() or ()) if self.around else ()
        return [
            (before - before % (BASE_ELEMENTS // gcd(BASE_ELEMENTS, stride)), stride)
            for (before, _), stride in zip(self.around, strides, strict=True)
        ]

    def box(self) -> Box:
        """The storage that a value with unsplit dimensions occupies, halo included: (first, end) along each dimension of the buffer."""
        outside = (self.outside(dim)[0] for dim in range(len(self.shape)))
        return tuple((first, first + sum(halo) + extent) for first, halo, extent in zip(outside, self.halo, self.shape, strict=True))

    def dense_strides(self) -> tuple[int, ...] | None:
        """Element stride of each logical dimension, or None if a dimension is split."""
        return self._dense_strides

    @cached_property
    def _dense_strides(self) -> tuple[int, ...] | None:
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
        text += f" halo {self.halo}" if any(map(any, self.halo)) else ""
        return text + (f" in a buffer with {self.around} around it" if self.around else "")


def contains(a: Box, b: Box) -> bool:
    """Whether all elements of the second part of a buffer are in the first."""
    return all(start <= other_start and other_end <= end for (start, end), (other_start, other_end) in zip(a, b, strict=True))


def boxes_overlap(a: Box, b: Box) -> bool:
    """Whether two parts of one buffer have an element in common."""
    return all(start < other_end and other_start < end for (start, end), (other_start, other_end) in zip(a, b, strict=True))


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
