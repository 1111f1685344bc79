"""Calls of a library's operator through PyTorch, as data: strided views of buffers, and the operator with its parameters.

    convolution      out[n, k, *p] = sum over c, *t of a[n, c + channels of earlier groups, *(p * stride + t * dilation)] * b[k, c, *t]
    fft_convolution  the same for stride and dilation 1, by Fourier transforms
    matmul           out[g, m, n] = sum over r of a[g, m, r] * b[g, r, n]
    linear           the same for a single g and a constant b
    attention        out[b, h, m, d] = sum over n of softmax over n(z[b, h, m, n]) * v[b, g, n, d], with
                     z[b, h, m, n] = scale * (sum over r of q[b, h, m, r] * k[b, g, n, r]), plus mask[b, h, m, n] or minus infinity where it is false,
                     where g is h * (heads of k) // (heads of q), and the mask may have extent 1 along any dimension
    max_pooling      out[n, c, *p] = greatest over *t of a[n, c, *(p * stride + t * dilation - padding)]
    average_pooling  the same with a sum, divided by `divisor`, or by the number of its elements inside a, or inside a and its padding
    softmax          out[*i] = exp(a[*i]) / sum over the dimension `dim` of exp(a), without overflow
    log_softmax      its logarithm
    lstm, gru, rnn_tanh, rnn_relu
                     out[t, n, *] = the states of recurrent layers (`Recurrent`) that read a[t, n, *]

A convolution has no padding: what it would add is stored around `a`. Filters, the matrix of `linear`, and the weights of recurrent layers are
constant, so that they may be reordered, transformed or widened once. Elements are floats of 32 or 16 bits (`LibraryCall.check_types`), and results
have the type of the first input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite
from types import MappingProxyType
from typing import TypeAlias

from tilewright.ir.dtypes import FLOAT32, computed_in
from tilewright.ir.windows import pooled_extent


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


Shape: TypeAlias = tuple[int, ...]
NONE = slice(0, 0)
"""Of an operator without constants."""


@dataclass(frozen=True)
class Convolution:
    """`convolution` or `fft_convolution` of an image and constant filters. In two or three dimensions."""

    name: str
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    @property
    def constants(self) -> slice:
        return slice(1, 2)

    def results(self, *shapes: Shape) -> tuple[Shape, ...] | None:
        a, b = _exactly(2, shapes)
        rank = len(self.stride)
        if rank not in (2, 3) or {len(self.dilation), len(a) - 2, len(b) - 2} != {rank} or min(self.groups, *self.stride, *self.dilation) < 1:
            return None
        if b[0] % self.groups or a[1] != b[1] * self.groups or (self.name == "fft_convolution" and {*self.stride, *self.dilation} != {1}):
            return None
        return ((a[0], b[0], *((x - d * (t - 1) - 1) // s + 1 for x, t, s, d in zip(a[2:], b[2:], self.stride, self.dilation, strict=True))),)

    def fits(self, *dtypes: str) -> bool:
        a, b = dtypes
        return a == b or computed_in(b) == FLOAT32 == a if self.name == "convolution" else computed_in(b) == FLOAT32 == a


@dataclass(frozen=True)
class Product:
    """`matmul` or `linear`."""

    name: str

    @property
    def constants(self) -> slice:
        return slice(1, 2) if self.name == "linear" else NONE

    def results(self, *shapes: Shape) -> tuple[Shape, ...] | None:
        a, b = _exactly(2, shapes)
        fits = len(a) == len(b) == 3 and a[0] == b[0] and a[2] == b[1] and (self.name == "matmul" or a[0] == 1)
        return ((a[0], a[1], b[2]),) if fits else None

    def fits(self, *dtypes: str) -> bool:
        a, b = dtypes
        return a == b or (self.name == "linear" and computed_in(b) == FLOAT32 == a)


@dataclass(frozen=True)
class Attention:
    """`attention` of q, k, v, and a mask if there is one. `shift`: without a mask, z is minus infinity where n > m + shift; None: nowhere."""

    name: str
    scale: float
    shift: int | None = None

    @property
    def constants(self) -> slice:
        return NONE

    def results(self, *shapes: Shape) -> tuple[Shape, ...] | None:
        q, k, v, *masks = shapes
        if {len(shape) for shape in shapes} != {4} or len(masks) > 1 or (masks and self.shift is not None):
            return None
        if k[:3] != v[:3] or (q[0], q[3]) != (k[0], k[3]) or q[1] % k[1] or not isfinite(self.scale) or (self.shift or 0) < 0:
            return None
        rows = (*q[:3], k[2])
        if any(extent not in (1, whole) for mask in masks for extent, whole in zip(mask, rows, strict=True)):
            return None
        return ((*q[:3], v[3]),)

    def fits(self, *dtypes: str) -> bool:
        q, k, v, *masks = dtypes
        return q == k == v and all(mask in (q, "bool") for mask in masks)


@dataclass(frozen=True)
class Pooling:
    """`max_pooling` or `average_pooling` in two or three dimensions. `ceiling`: whether the number of outputs is rounded up, by windows that begin in
    the input or in the padding before it, and may end outside of both. `divisor`: of an average; None: the number of elements that are inside the
    input, or with `padded` also in its padding."""

    name: str
    window: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    ceiling: bool = False
    divisor: int | None = None
    padded: bool = False

    @property
    def constants(self) -> slice:
        return NONE

    def results(self, *shapes: Shape) -> tuple[Shape, ...] | None:
        (a,) = _exactly(1, shapes)
        rank = len(self.window)
        sizes = {len(self.stride), len(self.dilation), len(self.padding), len(a) - 2}
        if rank not in (2, 3) or sizes != {rank} or min(*self.window, *self.stride, *self.dilation) < 1 or min(self.padding) < 0:
            return None
        is_max, averages = self.name == "max_pooling", self.divisor is not None or self.padded
        if (is_max and averages) or (not is_max and {*self.dilation} != {1}) or not 0 < (self.divisor or 1) < 1 << 31:
            return None
        if any(2 * p > d * (t - 1) + 1 for p, d, t in zip(self.padding, self.dilation, self.window, strict=True)):
            return None  # PyTorch takes no wider padding
        each = zip(a[2:], self.window, self.stride, ((p, p) for p in self.padding), self.dilation, strict=True)
        return ((*a[:2], *(pooled_extent(*one, self.ceiling) for one in each)),)

    def fits(self, *dtypes: str) -> bool:
        return True


@dataclass(frozen=True)
class Softmax:
    """`softmax` or `log_softmax` along a dimension."""

    name: str
    dim: int

    @property
    def constants(self) -> slice:
        return NONE

    def results(self, *shapes: Shape) -> tuple[Shape, ...] | None:
        (a,) = _exactly(1, shapes)
        return (a,) if 0 <= self.dim < len(a) else None

    def fits(self, *dtypes: str) -> bool:
        return True


@dataclass(frozen=True)
class Recurrence:
    """Numbers of a kind of recurrent layer: gates, states, and biases where it has them."""

    gates: int
    states: int
    biases: int = 1


RECURRENCES: Mapping[str, Recurrence] = MappingProxyType(
    {"lstm": Recurrence(4, 2), "gru": Recurrence(3, 1, 2), "rnn_tanh": Recurrence(1, 1), "rnn_relu": Recurrence(1, 1)}
)


@dataclass(frozen=True)
class Recurrent:
    """A recurrent layer of one or both directions, with PyTorch's equations and order of gates. Its inputs are a [steps, sequences, inputs], then of
    each direction the states before its first step [sequences, units], h and the c of an `lstm`, then of each direction its weights: of the input
    [gates * units, inputs], of h [gates * units, units], and biases [gates * units] if it has any. A `gru` has a second bias, of the product with h.
    Its results are h of all steps [steps, sequences, directions * units], and of each direction the states after its last step."""

    name: str
    bidirectional: bool

    @property
    def directions(self) -> int:
        return 1 + self.bidirectional

    @property
    def states(self) -> int:
        """The number of states of all directions."""
        return self.directions * RECURRENCES[self.name].states

    @property
    def constants(self) -> slice:
        return slice(1 + self.states, None)

    def results(self, *shapes: Shape) -> tuple[Shape, ...] | None:
        kind, states, weights = RECURRENCES[self.name], shapes[1 : 1 + self.states], shapes[1 + self.states :]
        a, biases = shapes[0], len(weights) // self.directions - 2
        if len(a) != 3 or any(len(state) != 2 for state in states) or biases not in (0, kind.biases):
            return None
        (steps, sequences, inputs), units = a, states[0][1]
        rows = kind.gates * units
        each = ((rows, inputs), (rows, units), *((rows,) for _ in range(biases)))
        if {*states} != {(sequences, units)} or weights != each * self.directions:
            return None
        return (steps, sequences, self.directions * units), *states

    def fits(self, *dtypes: str) -> bool:
        return len({*dtypes}) == 1


Operator: TypeAlias = Convolution | Product | Attention | Pooling | Softmax | Recurrent
"""What a library computes. `constants`: which inputs have to be constant; `results`: the shapes of the results for inputs of these shapes, None if
the operator is not defined for them; of several, those behind the first need not be stored; `fits`: whether it takes inputs of these types, the first
of which is a float of 32 or 16 bits."""
OPERATORS: Mapping[str, type[Operator]] = MappingProxyType(
    {
        "convolution": Convolution,
        "matmul": Product,
        "linear": Product,
        "fft_convolution": Convolution,
        "attention": Attention,
        "max_pooling": Pooling,
        "average_pooling": Pooling,
        "softmax": Softmax,
        "log_softmax": Softmax,
        **dict.fromkeys(RECURRENCES, Recurrent),
    }
)
"""What operators are called, and the kind of each."""
INPUTS: Mapping[type[Operator], tuple[int, int]] = MappingProxyType(
    {Convolution: (2, 2), Product: (2, 2), Attention: (3, 4), Pooling: (1, 1), Softmax: (1, 1), Recurrent: (4, 11)}
)
"""The least and the greatest number of inputs of an operator."""


def _exactly(count: int, shapes: Sequence[Shape]) -> Sequence[Shape]:
    assert len(shapes) == count, "LibraryCall.check counts inputs"
    return shapes


@dataclass(frozen=True)
class LibraryCall:
    """An operator applied to views `inputs`, and its results, stored in `outs`: all of them, or the first."""

    operator: Operator
    inputs: tuple[View, ...]
    outs: tuple[View, ...]

    @property
    def constants(self) -> tuple[View, ...]:
        """The inputs that have to be constant."""
        return self.inputs[self.operator.constants]

    @property
    def views(self) -> tuple[View, ...]:
        return *self.inputs, *self.outs

    def renamed(self, name: Callable[[str], str]) -> LibraryCall:
        """The call over buffers with other names."""
        inputs, outs = (tuple(replace(view, name=name(view.name)) for view in views) for views in (self.inputs, self.outs))
        return replace(self, inputs=inputs, outs=outs)

    def check(self) -> None:
        """Raises ValueError unless the views have the shapes of the operator's arguments and results, and elements, all separate in memory."""
        for view in self.views:
            if len(view.sizes) != len(view.strides) or min((*view.sizes, *view.strides, 1 + view.offset), default=0) < 1 or not view.is_injective:
                raise ValueError(f"{view} is no view of separate elements")
        operator, shapes, made = self.operator, [view.sizes for view in self.inputs], tuple(view.sizes for view in self.outs)
        least, most = INPUTS[type(operator)]
        known = OPERATORS.get(operator.name) is type(operator) and least <= len(shapes) <= most
        results = operator.results(*shapes) if known else None
        if results is None or made not in (results, results[:1]):
            raise ValueError(f"a library has no {operator} of {' and '.join(map(str, shapes))} that makes {' and '.join(map(str, made))}")

    def check_types(self, *dtypes: str) -> None:
        """Raises ValueError unless the operator takes inputs of these types: the same, or a constant that is widened; transforms are of float32."""
        if computed_in(dtypes[0]) != FLOAT32 or not self.operator.fits(*dtypes):
            raise ValueError(f"a library has no {self.operator.name} of {' and '.join(dtypes)}")
