"""The transforms of a tiled Fourier convolution with filters of r x r, and the products between them as real ones (the Gauss-FFT of Zlateski et al.,
FFT Convolutions are Faster than Winograd on Modern CPUs, Here is Why, 2018).

A tile of n x n elements of the input gives m x m outputs, m = n - r + 1: the part of a periodic correlation into which nothing wraps around. Down
the columns the correlation is periodic (x^n - 1), along the rows it changes sign (x^n + 1), which does not matter to that part. So no frequency is
real: a row of n real elements has n / 2 complex frequencies, (4 j + 1) / (2 n) cycles for j = 0 .. n / 2 - 1, and those of the columns are k / n.

    rows       z[t] = (d[t] + i d[t + n/2]) exp(pi i t / n), D[j] = sum over t < n / 2 of z[t] exp(2 pi i j t / (n/2))
    columns    D[k, j] = sum over rows of D[row, j] exp(2 pi i k row / n)

(The former is the odd discrete transform of real signals by one of half its length: Vernet, Real Signals Fast Fourier Transform, Proceedings of the
IEEE 59, 1971.) Each of the n^2 / 2 complex products D H, where H is the conjugate of the filter's transform, is three real ones:

    (Re D + Im D) Re H,  Re D (Im H - Re H),  Im D (Re H + Im H)

whose first less third is the real part, and whose sum of the first two is the imaginary part. So a tile has 3 n^2 / 2 points, of which each is a
product over the input channels as in Winograd's algorithm. Unlike that algorithm's, the transforms are orthogonal up to a scale: errors grow with the
logarithm of n, so large tiles are as exact as small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import cos, pi, sin, sqrt
from typing import TypeAlias

import numpy as np

from tilewright.ir.expr import Expr, Var, index_const, variables
from tilewright.ir.kernel import Let, Statement
from tilewright.kernels.transform_pass import LoadElement, LoadPoint, Matrix, Pass, StorePoint, StoreRows, Values
from tilewright.kernels.winograd_transform import Shape, combination

SPANS = (12, 16, 24)
"""Values of n: products of 2 and 3, even."""
LEAST_FILTER = 5
"""Smallest filters: Winograd's algorithm takes about as few products for smaller ones."""
LEAST_SHARE = 0.25
"""Smallest part m / n of a tile's rows that are results."""
Complex: TypeAlias = tuple[Expr, Expr]
"""Real and imaginary part."""


def spans(filter_size: int) -> tuple[int, ...]:
    """The values of n for filters of this size."""
    return tuple(n for n in SPANS if filter_size >= LEAST_FILTER and n - filter_size + 1 >= LEAST_SHARE * n)


@lru_cache(maxsize=8)
def filter_matrix(span: int, filter_size: int) -> Matrix:
    """[3 n^2 / 2, r^2]: maps the taps of a filter, row-major, to its points: real factors of the conjugate of its transform, over n^2 / 2."""
    n, half = span, span // 2
    taps = np.arange(filter_size)
    rows = np.exp(-2j * pi * np.outer(np.arange(half) * 2 + 0.5, taps) / n)  # [j, tap x]
    columns = np.exp(-2j * pi * np.outer(np.arange(n), taps) / n)  # [k, tap y]
    whole = np.einsum("ky,jx->jkyx", columns, rows).reshape(half * n, filter_size**2) / (n * half)
    factors = np.concatenate([whole.real, whole.imag - whole.real, whole.real + whole.imag])
    return tuple(tuple(map(float, row)) for row in factors)


@dataclass(frozen=True)
class Fourier:
    """Tiles of `output_tile` x `output_tile` results of filters of `filter_size` x `filter_size`. A transform is two passes, of rows and of columns.
    Factor `part` of the three at frequency j of the rows and k of the columns is point part * n^2 / 2 + j * n + k."""

    output_tile: int
    filter_size: int

    @property
    def filter_shape(self) -> Shape:
        return self.filter_size, self.filter_size

    @property
    def tile(self) -> Shape:
        """Rows and columns of results."""
        return self.output_tile, self.output_tile

    @property
    def span(self) -> Shape:
        """Rows and columns of a tile of the input."""
        return self.length, self.length

    @property
    def length(self) -> int:
        """n."""
        return self.output_tile + self.filter_size - 1

    @property
    def half(self) -> int:
        """Frequencies of a row."""
        return self.length // 2

    @property
    def points(self) -> int:
        """Products of a tile."""
        return 3 * self.length * self.half

    @property
    def scratch(self) -> int:
        """Values that pass between passes: complex numbers [row, frequency]."""
        return self.length**2

    @property
    def filter_matrix(self) -> Matrix:
        return filter_matrix(self.length, self.filter_size)

    @property
    def growth(self) -> float:
        """Times the largest element of a tile of the input, which its points do not exceed: sums of real and imaginary parts."""
        return 2**0.5 * self.length**2

    def input_passes(self, values: Values, load: LoadElement, store: StorePoint) -> tuple[Pass, ...]:
        """The points of a tile of the input: a piece of the first pass is a row, one of the second a frequency of the rows."""
        n, half = self.length, self.half

        def rows(row: Expr) -> list[Statement]:
            code = _Code(values, "a")
            given = [code.named(load(row, index_const(t))) for t in range(n)]
            turned = [code.turned((given[t], given[t + half]), t, 2 * n) for t in range(half)]
            return code.storing(_transform(turned, 1, code), lambda j, part: self._place(row, index_const(j)) + part, values.put)

        def columns(j: Expr) -> list[Statement]:
            code = _Code(values, "b")
            given = [(code.named(values.get(at)), code.named(values.get(at + 1))) for at in (self._place(index_const(row), j) for row in range(n))]
            results = _transform(given, 1, code)
            stores = [
                store(self._point(part, j, k), value)
                for k, (real, imaginary) in enumerate(results)
                for part, value in enumerate((code.named(real + imaginary), real, imaginary))
            ]
            return [*code.lets, *stores]

        return Pass(n, rows), Pass(half, columns)

    def output_passes(self, values: Values, load: LoadPoint, store: StoreRows) -> tuple[Pass, ...]:
        """The results of a tile: a piece of the first pass is a frequency of the rows, one of the second a row of results."""
        n, half, size = self.length, self.half, self.output_tile

        def columns(j: Expr) -> list[Statement]:
            code = _Code(values, "c")
            given: list[Complex] = []
            for k in range(n):
                first, second, third = (code.named(load(self._point(part, j, k))) for part in range(3))
                given.append((code.named(first - third), code.named(first + second)))
            results = _transform(given, -1, code)[:size]
            return code.storing(results, lambda row, part: self._place(index_const(row), j) + part, values.put)

        def rows(row: Expr) -> list[Statement]:
            code = _Code(values, "e")
            places = [self._place(row, index_const(j)) for j in range(half)]
            results = _transform([(code.named(values.get(at)), code.named(values.get(at + 1))) for at in places], -1, code)
            turned = [code.turned(value, -t, 2 * n) for t, value in enumerate(results)]
            line = [part for parts in zip(*turned, strict=True) for part in parts][:size]
            return [*code.needed(line), *store(row, [line])]

        return Pass(half, columns), Pass(size, rows)

    def _place(self, row: Expr, j: Expr) -> Expr:
        """The number of the real part of a scratch value; the imaginary part follows."""
        return row * self.length + j * 2

    def _point(self, part: int, j: Expr, k: int) -> Expr:
        return j * self.length + (part * self.length * self.half + k)

    def __str__(self) -> str:
        m, r = self.output_tile, self.filter_size
        return f"fourier F({m}x{m},{r}x{r})"


class _Code:
    """The statements of one piece."""

    def __init__(self, values: Values, prefix: str) -> None:
        self.values, self.prefix = values, prefix
        self.lets: list[Let] = []

    def named(self, value: Expr) -> Expr:
        """A variable with this value."""
        if isinstance(value, Var):
            return value
        variable = self.values.variable(f"{self.prefix}{len(self.lets)}")
        self.lets.append(Let(variable, value))
        return variable

    def turned(self, value: Complex, steps: int, circle: int) -> Complex:
        """value * exp(2 pi i steps / circle)."""
        real, imaginary = value
        eighth, rest = divmod(8 * steps % (8 * circle), circle)
        if rest:
            c, s = cos(2 * pi * steps / circle), sin(2 * pi * steps / circle)
            return self.named(combination((c, -s), value)), self.named(combination((s, c), value))
        if eighth % 2:
            apart, both = self.named((real - imaginary) * sqrt(0.5)), self.named((real + imaginary) * sqrt(0.5))
            return ((apart, both), (-both, apart), (-apart, -both), (both, -apart))[eighth // 2]
        return (value, (-imaginary, real), (-real, -imaginary), (imaginary, -real))[eighth // 2]

    def needed(self, results: Sequence[Expr]) -> list[Let]:
        """The statements that these results depend on."""
        found: list[Let] = []
        wanted = set(variables(*results))
        for let in reversed(self.lets):
            if let.variable in wanted:
                found.append(let)
                wanted |= variables(let.value)
        return found[::-1]

    def storing(self, results: Sequence[Complex], place: Callable[[int, int], Expr], put: Callable[[Expr, Expr], Statement]) -> list[Statement]:
        """The statements that these results depend on, and those that store them."""
        lets = self.needed([part for result in results for part in result])
        return [*lets, *(put(place(number, part), value) for number, result in enumerate(results) for part, value in enumerate(result))]


def _transform(values: Sequence[Complex], sign: int, code: _Code) -> list[Complex]:
    """sum over t of values[t] exp(sign 2 pi i k t / n) for each k < n, by decimation in time with factors 4, 2 and 3."""
    n = len(values)
    if n == 1:
        return list(values)
    factor = next(factor for factor in (4, 2, 3) if n % factor == 0)
    parts = [_transform(values[start::factor], sign, code) for start in range(factor)]
    results: list[Complex] = [values[0]] * n
    for k in range(n // factor):
        terms = [code.turned(part[k], sign * k * start, n) for start, part in enumerate(parts)]
        for number, result in enumerate(_BUTTERFLIES[factor](terms, sign, code)):
            results[k + number * (n // factor)] = result
    return results


def _sum_and_difference(a: Complex, b: Complex, code: _Code) -> tuple[Complex, Complex]:
    return (code.named(a[0] + b[0]), code.named(a[1] + b[1])), (code.named(a[0] - b[0]), code.named(a[1] - b[1]))


def _of_two(terms: Sequence[Complex], sign: int, code: _Code) -> Sequence[Complex]:
    first, second = terms
    return _sum_and_difference(first, second, code)


def _of_three(terms: Sequence[Complex], sign: int, code: _Code) -> Sequence[Complex]:
    first, second, third = terms
    both, apart = _sum_and_difference(second, third, code)
    middle = code.named(first[0] - both[0] * 0.5), code.named(first[1] - both[1] * 0.5)
    across = code.named(apart[1] * (-sign * sqrt(0.75))), code.named(apart[0] * (sign * sqrt(0.75)))
    return (code.named(first[0] + both[0]), code.named(first[1] + both[1])), *_sum_and_difference(middle, across, code)


def _of_four(terms: Sequence[Complex], sign: int, code: _Code) -> Sequence[Complex]:
    evens, odds = _sum_and_difference(terms[0], terms[2], code), _sum_and_difference(terms[1], terms[3], code)
    first, third = _sum_and_difference(evens[0], odds[0], code)
    (real, imaginary), (x, y) = evens[1], odds[1]
    left, right = (code.named(real + y), code.named(imaginary - x)), (code.named(real - y), code.named(imaginary + x))
    return (first, left, third, right) if sign < 0 else (first, right, third, left)


_BUTTERFLIES = {2: _of_two, 3: _of_three, 4: _of_four}
"""The transforms of two, three and four terms."""
