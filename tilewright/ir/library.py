"""Calls of a library's operator through PyTorch, as data: strided views of buffers, and a few sizes.

    convolution      out[n, k, *p] = sum over c, *t of a[n, c + channels of earlier groups, *(p * stride + t * dilation)] * b[k, c, *t]
    fft_convolution  the same for stride and dilation 1, by Fourier transforms
    matmul           out[g, m, n] = sum over r of a[g, m, r] * b[g, r, n]
    linear           the same for a single g

A convolution has no padding: what it would add is stored around `a`. The second factor is constant, except for matmul, so that it may be reordered,
transformed or widened once. Elements are floats of 32 or 16 bits (`LibraryCall.check_types`), and results have the type of `a`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from tilewright.ir.dtypes import FLOAT32, computed_in

OPERATORS = ("convolution", "matmul", "linear", "fft_convolution")
"""What `LibraryCall.operator` may be."""


@dataclass(frozen=True)
class View:
    """Elements of a buffer, as for torch.as_strided; `offset` counts from the address that kernels receive for the buffer."""

    name: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """The number of elements from the buffer's address to the end of the view."""
        return 1 + self.offset + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))

    @property
    def is_injective(self) -> bool:
        """Whether the view's dimensions are nested in memory, so that its elements are separate."""
        dims = sorted((stride, size) for size, stride in zip(self.sizes, self.strides, strict=True) if size != 1)
        return all(size * stride <= outer for (stride, size), (outer, _) in pairwise(dims))


@dataclass(frozen=True)
class LibraryCall:
    """`operator` applied to the views `a` and `b`, stored in `out`. stride, dilation and groups are those of a convolution."""

    operator: str
    a: View
    b: View
    out: View
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1

    @property
    def reorders(self) -> bool:
        """Whether `b` is constant."""
        return self.operator != "matmul"

    @property
    def views(self) -> tuple[View, View, View]:
        return self.a, self.b, self.out

    def renamed(self, name: Callable[[str], str]) -> LibraryCall:
        """The call over buffers with other names."""
        a, b, out = (replace(view, name=name(view.name)) for view in self.views)
        return replace(self, a=a, b=b, out=out)

    def check(self) -> None:
        """Raises ValueError unless the views have the shapes of the operator's arguments and result, and elements, all separate in memory."""
        for view in self.views:
            if len(view.sizes) != len(view.strides) or min((*view.sizes, *view.strides, 1 + view.offset), default=0) < 1 or not view.is_injective:
                raise ValueError(f"{view} is no view of separate elements")
        if self.operator not in OPERATORS or self.out.sizes != self._result():
            raise ValueError(f"a library has no {self.operator!a} of {self.a.sizes} and {self.b.sizes} that makes {self.out.sizes}")

    def check_types(self, a: str, b: str) -> None:
        """Raises ValueError unless the operator takes factors of these types: the same, or a constant that is widened; transforms are of float32."""
        fits = a == b or (self.reorders and (a, computed_in(b)) == (FLOAT32, FLOAT32))
        if computed_in(a) != FLOAT32 or not fits or (self.operator == "fft_convolution" and a != FLOAT32):
            raise ValueError(f"a library has no {self.operator} of {a} and {b}")

    def _result(self) -> tuple[int, ...]:
        """The shape of the result; empty if the operator is not defined for these arguments."""
        a, b = self.a.sizes, self.b.sizes
        if self.operator in ("matmul", "linear"):
            fits = len(a) == len(b) == 3 and a[0] == b[0] and a[2] == b[1] and (self.stride, self.dilation, self.groups) == ((), (), 1)
            fits = fits and (self.operator == "matmul" or a[0] == 1)
            return (a[0], a[1], b[2]) if fits else ()
        rank = len(a) - 2
        fits = rank in (2, 3) and len(b) == len(a) and len(self.stride) == len(self.dilation) == rank and self.groups >= 1
        if self.operator == "fft_convolution" and {*self.stride, *self.dilation} != {1}:
            return ()
        if not fits or min((*self.stride, *self.dilation)) < 1 or b[0] % self.groups or a[1] != b[1] * self.groups:
            return ()
        return a[0], b[0], *((x - d * (t - 1) - 1) // s + 1 for x, t, s, d in zip(a[2:], b[2:], self.stride, self.dilation, strict=True))
