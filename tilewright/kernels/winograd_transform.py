"""The transforms of Winograd's minimal filtering F(m, r) and F(m x m, r x s) as matrices, and products with them in few additions and
multiplications.

Y = A^T [(G g H^T) * (B^T d C)] D (Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016, section 4.1), with one transform for
rows (A, B, G) and one for columns (C, D, H); that of a filter of one row is the identity F(1, 1). The matrices follow from m + r - 2 points and
infinity by Toom and Cook's interpolation. The usual points for m + r - 1 = 6 are 0, 1, -1, 2, -2; ours are 0, 5/8, -5/8, 3/2, -3/2, which need the
same number of additions and whose matrices are also exact in fp32. Among the symmetric choices in eighths they had the smallest error: half the root
mean square error of the usual points, and a third to a quarter of their largest error. For m + r - 1 = 8 the usual points are the best of the
symmetric choices in eighths. For 10, which only filters of one row have, ours were found among 1001 symmetric choices from 1/4 to 4: they have a
third of the root mean square error of 0, 1/2, 1, 2, 4 and their negatives. On the effect of the choice see Barabasz et al., Error Analysis and
Improving the Accuracy of Winograd Convolution for Deep Neural Networks (ACM TOMS 2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import TypeAlias

from tilewright.ir.expr import Expr, Var, index_const
from tilewright.ir.kernel import Let, Statement
from tilewright.kernels.transform_pass import LoadElement, LoadPoint, Matrix, Pass, StorePoint, StoreRows, Values

Shape: TypeAlias = tuple[int, int]
"""Rows and columns."""
SQUARES: Mapping[int, tuple[int, ...]] = MappingProxyType({3: (2, 4), 5: (2, 4)})
"""Values of m in F(m x m, r x r) by r."""
LINES: Mapping[int, tuple[int, ...]] = MappingProxyType({3: (2, 4, 6), 5: (2, 4, 6), 7: (2, 4)})
"""Values of m in F(m, r) by r: those whose root mean square errors are at most those of the largest square, F(4x4, r x r), or F(4x4, 5x5) for larger
filters. F(8, 3) exceeds them, as F(6, 7) does with all symmetric points that were tried."""


def output_tiles(filter_shape: Shape) -> tuple[int, ...]:
    """Values of m for filters of this shape, of which those of one dimension are rows; empty if there are none."""
    rows, columns = filter_shape
    if rows == 1:
        return LINES.get(columns, ())
    return tuple(m for m in SQUARES.get(rows, ()) if m in SQUARES.get(columns, ()))


@dataclass(frozen=True)
class Transforms:
    """The matrices of a transform, where n = m + r - 1: `inputs` is B^T [n, n], `filters` G [n, r], `outputs` A^T [m, n]."""

    inputs: Matrix
    filters: Matrix
    outputs: Matrix


def interpolation(points: Sequence[Fraction], size: int, filter_size: int) -> Transforms:
    """The matrices of F(size, filter_size) for size + filter_size - 2 distinct points and infinity. With N_j the product of
    p_j - p_k over all k != j, column j of A^T is (1, p_j, .., p_j^(size - 1)), row j of G is (1, p_j, .., p_j^(filter_size - 1)) / N_j, and row j of
    B^T has the coefficients of the product of x - p_k over all k != j. For infinity these are (0, .., 1), (0, .., 1), and the coefficients of the
    product over all points."""

    def expanded(roots: Sequence[Fraction]) -> list[Fraction]:
        """Coefficients of the product of x - root over all roots, lowest power first."""
        result = [Fraction(1)]
        for root in roots:
            result = [low - root * high for low, high in zip([Fraction(0), *result], [*result, Fraction(0)], strict=True)]
        return result

    others = [[other for other in points if other != point] for point in points]
    inputs = [[*expanded(rest), Fraction(0)] for rest in others] + [expanded(points)]
    filters = [[point**i / _product_at(rest, point) for i in range(filter_size)] for point, rest in zip(points, others, strict=True)]
    outputs = [[*(point**i for point in points), Fraction(int(i == size - 1))] for i in range(size)]
    return Transforms(_matrix(inputs), _matrix([*filters, [Fraction(0)] * (filter_size - 1) + [Fraction(1)]]), _matrix(outputs))


def _product_at(roots: Sequence[Fraction], x: Fraction) -> Fraction:
    """The product of x - root over all roots."""
    return prod((x - root for root in roots), start=Fraction(1))


def _matrix(rows: Sequence[Sequence[Fraction]]) -> Matrix:
    return tuple(tuple(float(entry) for entry in row) for row in rows)


POINTS: Mapping[int, tuple[Fraction, ...]] = MappingProxyType(
    {
        1: (),
        4: tuple(map(Fraction, (0, 1, -1))),
        6: tuple(map(Fraction, ("0", "5/8", "-5/8", "3/2", "-3/2"))),
        8: tuple(map(Fraction, ("0", "1", "-1", "1/2", "-1/2", "2", "-2"))),
        10: tuple(map(Fraction, ("0", "3/8", "-3/8", "7/8", "-7/8", "5/4", "-5/4", "5/2", "-5/2"))),
    }
)
"""Points of interpolation by m + r - 1; each point is followed by its negative."""


@lru_cache(maxsize=16)
def transforms(size: int, filter_size: int) -> Transforms:
    """The matrices of F(size, filter_size)."""
    return interpolation(POINTS[size + filter_size - 1], size, filter_size)


@lru_cache(maxsize=16)
def filter_matrix(rows: Transforms, columns: Transforms) -> Matrix:
    """G (x) H: maps the taps of a filter to its points, both row-major."""
    return tuple(tuple(float(a * b) for a in left for b in right) for left in rows.filters for right in columns.filters)


def tile_shape(output_tile: int, filter_shape: Shape) -> Shape:
    """Results of a tile: `output_tile` along each dimension in which the filter has more than one tap, and one along others."""
    rows, columns = (output_tile if taps > 1 else 1 for taps in filter_shape)
    return rows, columns


@dataclass(frozen=True)
class Winograd:
    """F(m x m, r x s) with m = `output_tile` and r x s = `filter_shape`, or F(m, s) if r = 1: each transform is one pass that holds a tile in
    registers."""

    output_tile: int
    filter_shape: Shape

    @property
    def tile(self) -> Shape:
        """Results of a tile."""
        return tile_shape(self.output_tile, self.filter_shape)

    @property
    def span(self) -> Shape:
        """Elements of a tile of the input."""
        (rows, columns), (down, across) = self.tile, self.filter_shape
        return rows + down - 1, columns + across - 1

    @property
    def points(self) -> int:
        """Products of a tile."""
        return prod(self.span)

    @property
    def scratch(self) -> int:
        """Values that pass between passes."""
        return 0

    @property
    def filter_matrix(self) -> Matrix:
        return filter_matrix(*self.sides)

    @property
    def growth(self) -> float:
        """Times the largest element of a tile of the input, which its points do not exceed."""
        return prod(max(sum(map(abs, row)) for row in side.inputs) for side in self.sides)

    @property
    def sides(self) -> tuple[Transforms, Transforms]:
        """The transform of rows, and that of columns."""
        rows, columns = (transforms(size, taps) for size, taps in zip(self.tile, self.filter_shape, strict=True))
        return rows, columns

    def of_inputs(self, elements: Sequence[Sequence[Expr]], name: str = "") -> tuple[list[Let], list[list[Expr]]]:
        """B^T d C by row and column, and the statements that compute it, named after `name`."""
        rows, columns = self.sides
        return both_sides(rows.inputs, columns.inputs, elements, name)

    def of_sums(self, sums: Sequence[Sequence[Expr]]) -> tuple[list[Let], list[list[Expr]]]:
        """A^T M D by row and column, and the statements that compute it."""
        rows, columns = self.sides
        return both_sides(rows.outputs, columns.outputs, sums, "")

    def names(self, prefix: str) -> list[list[str]]:
        """A name for each point or element of a tile."""
        rows, columns = self.span
        return [[f"{prefix}{i}_{j}" for j in range(columns)] for i in range(rows)]

    def input_passes(self, values: Values, load: LoadElement, store: StorePoint) -> tuple[Pass, ...]:
        """B^T d C."""

        def body(piece: Expr) -> list[Statement]:
            held = [[values.variable(name) for name in row] for row in self.names("d")]
            reads = [Let(variable, load(index_const(i), index_const(j))) for i, row in enumerate(held) for j, variable in enumerate(row)]
            lets, rows = self.of_inputs(held)
            return [*reads, *lets, *(store(index_const(point), value) for point, value in enumerate(value for row in rows for value in row))]

        return (Pass(1, body),)

    def output_passes(self, values: Values, load: LoadPoint, store: StoreRows) -> tuple[Pass, ...]:
        """A^T M D."""

        def body(piece: Expr) -> list[Statement]:
            held = [[values.variable(name) for name in row] for row in self.names("m")]
            reads = [Let(variable, load(index_const(point))) for point, variable in enumerate(variable for row in held for variable in row)]
            lets, rows = self.of_sums(held)
            return [*reads, *lets, *store(index_const(0), rows)]

        return (Pass(1, body),)

    def __str__(self) -> str:
        return f"winograd {self.name}"

    @property
    def name(self) -> str:
        """F(m x m, r x s), or F(m, s)."""
        m, (r, s) = self.output_tile, self.filter_shape
        return f"F({m},{s})" if r == 1 else f"F({m}x{m},{r}x{s})"


def product(matrix: Matrix, values: Sequence[Expr], name: str) -> tuple[list[Let], list[Expr]]:
    """The entries of matrix * values, named `name`0.., and the statements that compute them.

    Two columns whose entries agree up to sign in every row are replaced by the sum and the difference of their values. Two rows that agree up to sign
    are computed as the sum and the difference of two parts: their common terms and the terms of opposite sign. So B^T of F(4x4) takes 12 additions
    instead of 16."""
    lets: list[Let] = []

    def named(value: Expr) -> Expr:
        variable = Var(f"{name}{len(lets)}", None, value.dtype, value.lanes)
        lets.append(Let(variable, value))
        return variable

    columns = [list(column) for column in zip(*matrix, strict=True)]
    factors = list(values)
    for first, second in _pairs(columns):
        left, right = columns[first], columns[second]
        total, difference = named(factors[first] + factors[second]), named(factors[first] - factors[second])
        same = [a if a == b else 0.0 for a, b in zip(left, right, strict=True)]
        columns[first], columns[second] = same, [a - s for a, s in zip(left, same, strict=True)]
        factors[first], factors[second] = total, difference
    rows = [list(row) for row in zip(*columns, strict=True)]
    results: dict[int, Expr] = {}
    for first, second in _pairs(rows):
        even = [a if a == b else 0.0 for a, b in zip(rows[first], rows[second], strict=True)]
        odd = [a - e for a, e in zip(rows[first], even, strict=True)]
        common, opposite = combination(even, factors), combination(odd, factors)
        common, opposite = (part if isinstance(part, Var) else named(part) for part in (common, opposite))
        results[first], results[second] = named(common + opposite), named(common - opposite)
    for number, row in enumerate(rows):
        if number not in results:
            value = combination(row, factors)
            results[number] = value if isinstance(value, Var) else named(value)
    return lets, [results[number] for number in range(len(rows))]


def both_sides(left: Matrix, right: Matrix, values: Sequence[Sequence[Expr]], name: str) -> tuple[list[Let], list[list[Expr]]]:
    """The entries of left * values * right^T by row and column, and the statements that compute them, named after `name`."""
    lets: list[Let] = []
    columns: list[list[Expr]] = []
    for j, column in enumerate(zip(*values, strict=True)):
        more, transformed = product(left, column, f"c{name}{j}_")
        lets += more
        columns.append(transformed)
    rows: list[list[Expr]] = []
    for i in range(len(left)):
        more, transformed = product(right, [column[i] for column in columns], f"r{name}{i}_")
        lets += more
        rows.append(transformed)
    return lets, rows


def _pairs(vectors: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Indices of neighbouring vectors with equal magnitudes everywhere, and both an entry with equal and one with opposite signs."""
    found = []
    for first in range(len(vectors) - 1):
        pair = [(a, b) for a, b in zip(vectors[first], vectors[first + 1], strict=True) if a or b]
        if all(abs(a) == abs(b) for a, b in pair) and any(a == b for a, b in pair) and any(a == -b for a, b in pair):
            found.append((first, first + 1))
    return found


def combination(coefficients: Sequence[float], values: Sequence[Expr]) -> Expr:
    """The sum of coefficient * value, positive terms first; factors of one are omitted."""
    terms = sorted(((c, v) for c, v in zip(coefficients, values, strict=True) if c), key=lambda term: term[0] < 0)
    result: Expr | None = None
    for scale, value in terms:
        term = value if abs(scale) == 1 else value * float(abs(scale))
        if result is None:
            result = term if scale > 0 else -term
        else:
            result = result + term if scale > 0 else result - term
    assert result is not None, "a row of zeros"
    return result
