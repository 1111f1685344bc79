"""Scalar expressions: the value of one element of a result, and its position in a buffer.

Grammar::

    Expr  = Const(value, dtype)
          | Var(name, extent, dtype)              a loop index, 0 <= value < extent
          | Load(buffer, index, dtype, lanes)     one element (or `lanes` adjacent ones) of a buffer
          | Apply(operation, args, dtype, lanes)  an operation of `ir.scalar.OPERATIONS`

The same nodes serve two levels. In a `Step` (see `ir.computation`) a load's index has one expression for each logical dimension of the
value; in a kernel (see `ir.kernel`) it is a single flat offset. Expressions are DAGs: traversals memoise by identity.

One operation has a side effect: `checked(index, least, extent, site)` makes an index that is data safe. Its value is a position in a dimension of
`extent` elements; an index outside least..extent - 1 gives 0 and is reported as a fault of `site` (see `ir.kernel`). Like a load, it must stay under
the condition that guards it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, TypeAlias, Union

from tilewright.ir.dtypes import FLOAT32, is_float, within_float32
from tilewright.ir.scalar import REAL

INDEX = "i64"


class _Hashed:
    """Caches what is asked of expressions again and again, as they are deeply nested: the structural hash (they are dictionary keys everywhere), the
    variables, and whether they have neither loads nor checked indices (`_is_plain`)."""

    __slots__ = ()

    dtype: str
    _hash: int

    def __hash__(self) -> int:
        return self._hash

    # Arithmetic, so that operator definitions and lowerings read like the mathematics.
    def __add__(self, other: Operand) -> Expr:
        return add(self, other)

    def __radd__(self, other: Operand) -> Expr:
        return add(other, self)

    def __sub__(self, other: Operand) -> Expr:
        return sub(self, other)

    def __rsub__(self, other: Operand) -> Expr:
        return sub(other, self)

    def __mul__(self, other: Operand) -> Expr:
        return mul(self, other)

    def __rmul__(self, other: Operand) -> Expr:
        return mul(other, self)

    def __floordiv__(self, other: Operand) -> Expr:
        return floordiv(self, other)

    def __mod__(self, other: Operand) -> Expr:
        return mod(self, other)

    def __truediv__(self, other: Operand) -> Expr:
        return binary("div", self, other)

    def __rtruediv__(self, other: Operand) -> Expr:
        return binary("div", other, self)

    def __neg__(self) -> Expr:
        return sub(0, self) if self.dtype == INDEX else unary("neg", self)  # type: ignore[arg-type]

    def __lt__(self, other: Operand) -> Expr:
        return compare("lt", self, other)

    def __le__(self, other: Operand) -> Expr:
        return compare("le", self, other)

    def __gt__(self, other: Operand) -> Expr:
        return compare("gt", self, other)

    def __ge__(self, other: Operand) -> Expr:
        return compare("ge", self, other)

    def equals(self, other: Operand) -> Expr:
        """Elementwise comparison (`==` itself compares expressions structurally)."""
        return compare("eq", self, other)


@dataclass(frozen=True, slots=True, eq=True)
class Const(_Hashed):
    """A float32 constant beyond the type's range is infinite."""

    value: float | int | bool
    dtype: str
    lanes: int = 1
    _hash: int = field(init=False, repr=False, compare=False)

    _variables: ClassVar[frozenset[Var]] = frozenset()
    _is_plain: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.dtype == FLOAT32:
            object.__setattr__(self, "value", within_float32(self.value))
        # repr distinguishes 0.0 from -0.0 and makes NaN equal to itself as a key
        object.__setattr__(self, "_hash", hash(("const", repr(self.value), self.dtype)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and self.dtype == other.dtype and repr(self.value) == repr(other.value)

    __hash__ = _Hashed.__hash__


@dataclass(frozen=True, slots=True)
class Var(_Hashed):
    """A loop index with 0 <= value < extent; the extent is None if unknown."""

    name: str
    extent: int | None = None
    dtype: str = INDEX
    lanes: int = 1
    _hash: int = field(init=False, repr=False, compare=False)

    _is_plain: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(("var", self.name, self.extent, self.dtype, self.lanes)))

    @property
    def _variables(self) -> frozenset[Var]:
        return _alone(self)  # not kept in it, which would be a cycle of references

    __hash__ = _Hashed.__hash__


@dataclass(frozen=True, slots=True)
class Load(_Hashed):
    buffer: str
    index: tuple[Expr, ...]
    dtype: str
    lanes: int = 1
    _hash: int = field(init=False, repr=False, compare=False)
    _variables: frozenset[Var] = field(init=False, repr=False, compare=False)

    _is_plain: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(("load", self.buffer, self.index, self.dtype, self.lanes)))
        object.__setattr__(self, "_variables", _variables_of(self.index))

    __hash__ = _Hashed.__hash__


@dataclass(frozen=True, slots=True, init=False)
class Apply(_Hashed):
    operation: str
    args: tuple[Expr, ...]
    dtype: str
    lanes: int
    _hash: int = field(init=False, repr=False, compare=False)
    _variables: frozenset[Var] = field(init=False, repr=False, compare=False)
    _is_plain: bool = field(init=False, repr=False, compare=False)
    _contents: Contents | None = field(init=False, repr=False, compare=False)

    def __init__(self, operation: str, args: tuple[Expr, ...], dtype: str, lanes: int = 1) -> None:
        """In one function, as planning makes hundreds of thousands of them."""
        put = object.__setattr__
        put(self, "operation", operation)
        put(self, "args", args)
        put(self, "dtype", dtype)
        put(self, "lanes", lanes)
        put(self, "_contents", None)
        put(self, "_hash", hash(("apply", operation, args, dtype, lanes)))
        found: frozenset[Var] = frozenset()
        plain = operation != "checked"
        for arg in args:
            own = arg._variables
            if own is not found and not own <= found:  # the set of one of them if that has all
                found = own if found <= own else found | own
            plain = plain and arg._is_plain
        put(self, "_variables", found)
        put(self, "_is_plain", plain)

    def __eq__(self, other: object) -> bool:
        """Structural equality that compares shared operands once: written out, an expression of n operations may have 2^n nodes."""
        pairs: list[tuple[object, object]] = [(self, other)]
        seen: set[tuple[int, int]] = set()
        while pairs:
            a, b = pairs.pop()
            if a is b or (id(a), id(b)) in seen:
                continue
            if not isinstance(a, Apply) or not isinstance(b, Apply):
                if isinstance(a, Apply) or isinstance(b, Apply) or a != b:
                    return False
            elif (a._hash, a.operation, a.dtype, a.lanes, len(a.args)) != (b._hash, b.operation, b.dtype, b.lanes, len(b.args)):
                return False
            else:
                seen.add((id(a), id(b)))
                pairs.extend(zip(a.args, b.args, strict=True))
        return True

    __hash__ = _Hashed.__hash__


Expr: TypeAlias = Const | Var | Load | Apply
Operand: TypeAlias = Union[Const, Var, Load, Apply, int, float, bool, "_Hashed"]


@lru_cache(maxsize=4096)
def _alone(var: Var) -> frozenset[Var]:
    return frozenset((var,))


def _variables_of(exprs: Sequence[Expr]) -> frozenset[Var]:
    """Those of any of the expressions; the set of one of them if that has all."""
    found: frozenset[Var] = frozenset()
    for expr in exprs:
        own = expr._variables
        if own is not found and not own <= found:
            found = own if found <= own else found | own
    return found


# --- building ---------------------------------------------------------------------------------------------------------


def const(value: float | int | bool, dtype: str) -> Const:
    if dtype == INDEX:
        return index_const(int(value))
    if is_float(dtype):
        return Const(float(value), dtype)
    return Const(bool(value) if dtype == "bool" else int(value), dtype)


@lru_cache(maxsize=4096, typed=True)
def index_const(value: int) -> Const:
    """An integer as an index constant, the same object for small and frequent ones: equal objects are found in dictionaries without a comparison."""
    return Const(value, INDEX)


def wrap(value: Operand, like: str = INDEX) -> Expr:
    """A Python number becomes a constant of type `like`; an expression is returned unchanged."""
    if isinstance(value, _Hashed):
        return value  # type: ignore[return-value]
    return const(value, like)


def _pair(a: Operand, b: Operand) -> tuple[Expr, Expr]:
    if isinstance(a, _Hashed):
        return a, b if isinstance(b, _Hashed) else const(b, a.dtype)  # type: ignore[return-value]
    return (const(a, b.dtype), b) if isinstance(b, _Hashed) else (const(a, INDEX), const(b, INDEX))  # type: ignore[return-value]


def unary(operation: str, a: Expr, dtype: str | None = None) -> Expr:
    """Applies a unary operation. Raises ValueError if a floating-point function is applied to another type."""
    if operation in REAL and not is_float(a.dtype):
        raise ValueError(f"{operation} of {a.dtype} values")
    return Apply(operation, (a,), dtype or a.dtype, a.lanes)


def binary(operation: str, a: Operand, b: Operand) -> Expr:
    a, b = _pair(a, b)
    return Apply(operation, (a, b), a.dtype, max(a.lanes, b.lanes))


def compare(operation: str, a: Operand, b: Operand) -> Expr:
    a, b = _pair(a, b)
    if a.dtype == INDEX:
        known = _decide(operation, range_of(sub(a, b)))
        if known is not None:
            return TRUE if known else FALSE
    return Apply(operation, (a, b), "bool", max(a.lanes, b.lanes))


def add(a: Operand, b: Operand) -> Expr:
    a, b = _pair(a, b)
    if a.dtype == INDEX:
        return simplify_shallow("add", a, b)
    return binary("add", a, b)


def sub(a: Operand, b: Operand) -> Expr:
    a, b = _pair(a, b)
    if a.dtype == INDEX:
        return simplify_shallow("sub", a, b)
    return binary("sub", a, b)


def mul(a: Operand, b: Operand) -> Expr:
    a, b = _pair(a, b)
    if a.dtype == INDEX:
        return simplify_shallow("mul", a, b)
    return binary("mul", a, b)


def floordiv(a: Operand, b: Operand) -> Expr:
    a, b = _pair(a, b)
    return simplify_shallow("floordiv", a, b) if a.dtype == INDEX else binary("floordiv", a, b)


def mod(a: Operand, b: Operand) -> Expr:
    a, b = _pair(a, b)
    return simplify_shallow("mod", a, b) if a.dtype == INDEX else binary("mod", a, b)


def logical_and(*conditions: Expr) -> Expr:
    """Conjunction without the conditions that are known to hold."""
    result: Expr = TRUE
    for condition in conditions:
        if condition == FALSE:
            return FALSE
        if condition != TRUE:
            result = condition if result == TRUE else Apply("and", (result, condition), "bool", max(result.lanes, condition.lanes))
    return result


def select(condition: Expr, a: Operand, b: Operand) -> Expr:
    """`a` if the condition holds, else `b`. Only the chosen side is evaluated, so a guarded load reads nothing. A scalar beside a vector is
    broadcast, even if the condition is decided and only that scalar remains."""
    a, b = _pair(a, b)
    lanes = max(condition.lanes, a.lanes, b.lanes)
    if condition == TRUE:
        return as_lanes(a, lanes)
    if condition == FALSE:
        return as_lanes(b, lanes)
    return Apply("select", (condition, a, b), a.dtype, lanes)


def as_lanes(expr: Expr, lanes: int) -> Expr:
    """A scalar is broadcast to `lanes` lanes; a vector is returned unchanged."""
    if lanes == 1 or expr.lanes == lanes:
        return expr
    return Apply("broadcast", (expr,), expr.dtype, lanes)


def cast(a: Expr, dtype: str) -> Expr:
    if a.dtype == dtype:
        return a
    if isinstance(a, Const):
        if dtype == "bool":
            return const(bool(a.value), dtype)
        if is_float(dtype) or not is_float(a.dtype):
            return const(a.value, dtype)
    return Apply("cast", (a,), dtype, a.lanes)


def checked(index: Expr, extent: int, negative: bool, site: int = 0) -> Expr:
    """The position that `index` means in a dimension of `extent` elements; if `negative`, negative indices count from the end. An index out of range
    gives 0 and a fault of `site`; no check is emitted if the known range of the index rules that out."""
    least = -extent if negative else 0
    low, high = range_of(index)
    if least <= low and high < extent:
        return index if low >= 0 else select(compare("lt", index, 0), index + extent, index)
    return Apply("checked", (index, index_const(least), index_const(extent), index_const(site)), INDEX)


def checks(*roots: Expr) -> tuple[Apply, ...]:
    """The distinct checked indices in the expressions, children before parents."""
    return tuple(dict.fromkeys(check for root in roots for check in contents(root).checks))


TRUE: Expr = Const(True, "bool")
FALSE: Expr = Const(False, "bool")
ZERO: Expr = index_const(0)


# --- index arithmetic -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Linear:
    """sum(coefficient * atom) + constant; atoms are variables, loads, or divisions that did not simplify."""

    terms: tuple[tuple[Expr, int], ...]
    constant: int


def linear(expr: Expr) -> Linear:
    """An index expression as a linear form (exact: every non-linear part becomes an atom)."""
    terms: dict[Expr, int] = {}
    constant = _collect(expr, 1, terms)
    return Linear(tuple((a, c) for a, c in terms.items() if c), constant)


def _collect(expr: Expr, scale: int, terms: dict[Expr, int]) -> int:
    if isinstance(expr, Apply):
        if expr.dtype == INDEX:
            operation = expr.operation
            if operation == "add" or operation == "sub":
                a, b = expr.args
                return _collect(a, scale, terms) + _collect(b, scale if operation == "add" else -scale, terms)
            if operation == "mul":
                a, b = expr.args
                if isinstance(a, Const):
                    return _collect(b, scale * int(a.value), terms)
                if isinstance(b, Const):
                    return _collect(a, scale * int(b.value), terms)
    elif isinstance(expr, Const):
        return int(expr.value) * scale
    elif isinstance(expr, Var) and expr.extent == 1:
        return 0
    terms[expr] = terms.get(expr, 0) + scale
    return 0


def from_linear(form: Linear) -> Expr:
    """The expression of a linear form, largest coefficient first."""
    result: Expr | None = None
    for atom, coefficient in sorted(form.terms, key=lambda term: -abs(term[1])):
        magnitude = abs(coefficient)
        term = atom if magnitude == 1 else Apply("mul", (atom, index_const(magnitude)), INDEX)
        if result is None:
            result = term if coefficient > 0 else Apply("sub", (index_const(0), term), INDEX)
        else:
            result = Apply("add" if coefficient > 0 else "sub", (result, term), INDEX)
    if result is None:
        return index_const(form.constant)
    if form.constant:
        result = Apply("add" if form.constant > 0 else "sub", (result, index_const(abs(form.constant))), INDEX)
    return result


def range_of(expr: Expr) -> tuple[float, float]:
    """Lowest and highest value of an index expression (minus and plus infinity if unknown). Integers that are data may have any value and sums of
    them may wrap, so both bounds are then unknown."""
    form = linear(expr)
    if len(form.terms) == 1 and form.terms[0][1] == 1 and not form.constant:
        return _atom_range(form.terms[0][0])
    low: float = form.constant
    high: float = form.constant
    for atom, coefficient in form.terms:
        bounds = _atom_range(atom)
        products = (_scaled(bounds[0], coefficient), _scaled(bounds[1], coefficient))
        low, high = low + min(products), high + max(products)
    return (low, high) if -_LIMIT <= low and high < _LIMIT else (float("-inf"), float("inf"))


_LIMIT = 1 << 63


def _is_data(expr: Expr) -> bool:
    """Whether the value depends on an integer that is data and may have any value."""
    if isinstance(expr, Apply) and expr.operation == "checked":
        return False
    return isinstance(expr, Load) or any(_is_data(child) for child in children(expr))


def _scaled(bound: float, coefficient: int) -> float:
    return bound * coefficient if coefficient else 0


def _atom_range(atom: Expr) -> tuple[float, float]:
    if isinstance(atom, Var) and atom.extent is not None:
        return 0, max(atom.extent - 1, 0)
    if isinstance(atom, Apply) and len(atom.args) == 2 and isinstance(atom.args[1], Const) and atom.args[1].value > 0:
        divisor = int(atom.args[1].value)
        if atom.operation == "mod":
            return 0, divisor - 1
        if atom.operation == "floordiv":
            low, high = range_of(atom.args[0])
            return (low // divisor if low > float("-inf") else low, high // divisor if high < float("inf") else high)
    if isinstance(atom, Apply) and atom.operation == "checked":
        return 0, max(constants(atom.args[2:3])[0] - 1, 0)
    if isinstance(atom, Apply) and atom.operation in ("min", "max") and atom.dtype == INDEX:
        (low_a, high_a), (low_b, high_b) = range_of(atom.args[0]), range_of(atom.args[1])
        pick = min if atom.operation == "min" else max
        return pick(low_a, low_b), pick(high_a, high_b)
    if isinstance(atom, Apply) and atom.operation == "bitwise_xor" and atom.dtype == INDEX:
        (low_a, high_a), (low_b, high_b) = range_of(atom.args[0]), range_of(atom.args[1])
        if min(low_a, low_b) >= 0 and max(high_a, high_b) < _LIMIT:
            return 0, (1 << int(max(high_a, high_b)).bit_length()) - 1
    if isinstance(atom, Apply) and atom.operation == "select":
        (low_a, high_a), (low_b, high_b) = range_of(atom.args[1]), range_of(atom.args[2])
        return min(low_a, low_b), max(high_a, high_b)
    return float("-inf"), float("inf")


def constants(exprs: Sequence[Expr]) -> tuple[int, ...]:
    """The values of constant indices. Raises ValueError for anything else."""
    if not all(isinstance(expr, Const) for expr in exprs):
        raise ValueError("an expression stands where a constant has to")
    return tuple(int(expr.value) for expr in exprs if isinstance(expr, Const))


def _decide(operation: str, difference: tuple[float, float]) -> bool | None:
    """Whether `a operation b` holds, if the range of a - b decides it; else None."""
    low, high = difference
    verdicts: dict[str, tuple[bool, bool]] = {
        "lt": (high < 0, low >= 0),
        "le": (high <= 0, low > 0),
        "gt": (low > 0, high <= 0),
        "ge": (low >= 0, high < 0),
        "eq": (low == high == 0, low > 0 or high < 0),
        "ne": (low > 0 or high < 0, low == high == 0),
    }
    holds, fails = verdicts[operation]
    return True if holds else False if fails else None


def simplify_shallow(operation: str, a: Expr, b: Expr) -> Expr:
    """The simplified result of one index operation on simplified operands."""
    if operation in ("add", "sub"):
        return weighted_sum(((a, 1), (b, 1 if operation == "add" else -1)))
    if operation == "mul":
        for one, other in ((a, b), (b, a)):
            if isinstance(one, Const):
                form = linear(other)
                factor = int(one.value)
                return from_linear(Linear(tuple((t, c * factor) for t, c in form.terms if c * factor), form.constant * factor))
        return Apply("mul", (a, b), INDEX)
    if operation in ("floordiv", "mod") and isinstance(b, Const) and b.value > 0:
        return _divide(operation, a, int(b.value))
    return Apply(operation, (a, b), INDEX)


def weighted_sum(parts: Iterable[tuple[Expr, int]]) -> Expr:
    """The simplified sum of index expressions times integers."""
    return from_linear(combined(parts))


def combined(parts: Iterable[tuple[Expr, int]], constant: int = 0) -> Linear:
    """The simplified sum of index expressions times integers, and of a constant, as a linear form."""
    terms: dict[Expr, int] = {}
    for part, factor in parts:
        constant += _collect(part, factor, terms)
    return _recombine(Linear(tuple((t, c) for t, c in terms.items() if c), constant))


def _divide(operation: str, a: Expr, divisor: int) -> Expr:
    """floor(a / divisor) or a mod divisor. Terms that are multiples of the divisor move out of the division; the remainder needs no division if its
    range lies within one period."""
    if divisor == 1:
        return a if operation == "floordiv" else index_const(0)
    form = linear(a)
    if range_of(a)[0] == float("-inf") and any(map(_is_data, (t for t, _ in form.terms))):  # the sum may wrap before the division
        return Apply(operation, (a, index_const(divisor)), INDEX)
    whole = tuple((t, c) for t, c in form.terms if c % divisor == 0)
    rest_terms = tuple((t, c) for t, c in form.terms if c % divisor)
    whole_constant = form.constant // divisor * divisor
    rest = Linear(rest_terms, form.constant - whole_constant)
    quotient = Linear(tuple((t, c // divisor) for t, c in whole), whole_constant // divisor)
    rest_expr = from_linear(rest)
    low, high = range_of(rest_expr)
    if 0 <= low and high < divisor:
        return from_linear(quotient) if operation == "floordiv" else rest_expr
    # (g*x + r) // (g*d) = x // d if 0 <= r < g: divide by the common factor of the remaining coefficients
    common = _common_factor(rest, divisor)
    if common > 1:
        outer = from_linear(Linear(tuple((t, c // common) for t, c in rest.terms), rest.constant // common))
        inner_constant = rest.constant % common
        reduced = _divide(operation, outer, divisor // common)
        if operation == "floordiv":
            return simplify_shallow("add", from_linear(quotient), reduced)
        return simplify_shallow("add", simplify_shallow("mul", reduced, index_const(common)), index_const(inner_constant))
    split = _split_small(rest, divisor)
    if split is not None:
        big, common_big = split
        reduced = _divide("floordiv", from_linear(Linear(tuple((t, c // common_big) for t, c in big), 0)), divisor // common_big)
        if operation == "floordiv":
            return simplify_shallow("add", from_linear(quotient), reduced)
        return simplify_shallow("sub", rest_expr, simplify_shallow("mul", reduced, index_const(divisor)))
    if isinstance(rest_expr, Apply) and rest_expr.operation == "floordiv" and operation == "floordiv" and isinstance(rest_expr.args[1], Const):
        inner = _divide("floordiv", rest_expr.args[0], int(rest_expr.args[1].value) * divisor)
        return simplify_shallow("add", from_linear(quotient), inner)
    result: Expr = Apply(operation, (rest_expr, index_const(divisor)), INDEX)
    return simplify_shallow("add", from_linear(quotient), result) if operation == "floordiv" and (quotient.terms or quotient.constant) else result


def _common_factor(rest: Linear, divisor: int) -> int:
    import math

    common = divisor
    for _, coefficient in rest.terms:
        common = math.gcd(common, coefficient)
    return common


def _split_small(rest: Linear, divisor: int) -> tuple[tuple[tuple[Expr, int], ...], int] | None:
    """Terms that share a factor g > 1 of the divisor, if the sum of the other terms lies within [0, g) and so cannot carry."""
    import math

    factors = {math.gcd(abs(c), divisor) for _, c in rest.terms} - {1}
    for factor in sorted(factors, reverse=True):
        big = tuple((t, c) for t, c in rest.terms if c % factor == 0)
        small = Linear(tuple((t, c) for t, c in rest.terms if c % factor), rest.constant)
        low, high = range_of(from_linear(small))
        if big and 0 <= low and high < factor:
            return big, factor
    return None


def _recombine(form: Linear) -> Linear:
    """(x // d) * (d * s) + (x mod d) * s = x * s."""
    for atom, coefficient in form.terms:
        if isinstance(atom, Apply) and atom.operation == "mod" and isinstance(atom.args[1], Const):
            terms = dict(form.terms)
            divisor = int(atom.args[1].value)
            partner = Apply("floordiv", (atom.args[0], atom.args[1]), INDEX)
            if terms.get(partner) == coefficient * divisor:
                del terms[atom], terms[partner]
                constant = _collect(atom.args[0], coefficient, terms) + form.constant
                return _recombine(Linear(tuple((t, c) for t, c in terms.items() if c), constant))
    return form


def coefficient(expr: Expr, var: Var) -> int | None:
    """The d with expr = d * var + (something without var); None if expr is not linear in var."""
    result = 0
    for atom, c in linear(expr).terms:
        if atom == var:
            result += c
        elif var in variables(atom):
            return None
    return result


# --- traversal --------------------------------------------------------------------------------------------------------


def children(expr: Expr) -> tuple[Expr, ...]:
    if isinstance(expr, Apply):
        return expr.args
    return expr.index if isinstance(expr, Load) else ()


def walk(*roots: Expr) -> Iterator[Expr]:
    """Every distinct node, children before parents."""
    seen: set[int] = set()
    stack: list[Expr | None] = list(reversed(roots))
    while stack:
        node = stack.pop()
        if node is None:  # the children of what lies below are done
            done = stack.pop()
            assert done is not None
            yield done
        elif id(node) not in seen:
            seen.add(id(node))
            if kids := children(node):
                stack += (node, None, *reversed(kids))
            else:
                yield node


@dataclass(frozen=True, slots=True)
class Contents:
    """The distinct loads of an expression, those in an index before the load that they index, and its checked indices."""

    loads: tuple[Load, ...]
    checks: tuple[Apply, ...]


NOTHING = Contents((), ())


def contents(root: Expr) -> Contents:
    """What an expression contains; kept with operations, since planning asks for it again and again."""
    if root._is_plain:
        return NOTHING
    if not isinstance(root, Apply):
        return _gathered(root)
    if root._contents is None:
        object.__setattr__(root, "_contents", _gathered(root))
    assert root._contents is not None
    return root._contents


def _gathered(root: Expr) -> Contents:
    loads: dict[Load, None] = {}
    checks: dict[Apply, None] = {}
    seen: set[int] = set()
    stack: list[tuple[Expr, bool]] = [(root, False)]
    while stack:  # as `walk`, but for what is plain
        node, expanded = stack.pop()
        if expanded:
            if isinstance(node, Load):
                loads[node] = None
            elif isinstance(node, Apply) and node.operation == "checked":
                checks[node] = None
        elif not node._is_plain and id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((kid, False) for kid in reversed(children(node)))
    return Contents(tuple(loads), tuple(checks))


def loads(*roots: Expr) -> tuple[Load, ...]:
    """Every distinct load, those in an index before the load that they index."""
    if len(roots) == 1:
        return contents(roots[0]).loads
    return tuple(dict.fromkeys(load for root in roots for load in contents(root).loads))


def variables(*roots: Expr) -> frozenset[Var]:
    return roots[0]._variables if len(roots) == 1 else _variables_of(roots)


def rebuild(node: Expr, args: Sequence[Expr]) -> Expr:
    """The node with new children, folded and simplified as if newly built."""
    if isinstance(node, Load):
        return Load(node.buffer, tuple(args), node.dtype, node.lanes)
    assert isinstance(node, Apply)
    if node.dtype == INDEX and len(args) == 2 and node.operation in ("add", "sub", "mul", "floordiv", "mod"):
        return simplify_shallow(node.operation, args[0], args[1])
    if node.operation in ("lt", "le", "gt", "ge", "eq", "ne"):
        return compare(node.operation, args[0], args[1])
    if node.operation == "and":
        return logical_and(*args)
    if node.operation == "select":
        return select(args[0], args[1], args[2])
    if node.operation == "cast":
        return cast(args[0], node.dtype)
    if node.operation == "checked":
        least, extent, site = constants(args[1:])
        return checked(args[0], extent, least < 0, site)
    return Apply(node.operation, tuple(args), node.dtype, node.lanes)


def rewrite(root: Expr, visit: Callable[[Expr], Expr], plain: bool = True) -> Expr:
    """Bottom-up rewrite: children first, then `visit` on the node, which is rebuilt if a child changed. Shared nodes are visited once. A node that
    simplifies to one of its new children is not visited again. `plain`: whether parts without loads and checked indices are visited too."""
    done: dict[int, Expr] = {}
    try:
        return _changed(root, visit, plain, done)
    except RecursionError:  # an expression deeper than Python's stack
        for node in walk(root):
            done[id(node)] = _changed(node, visit, plain, done)
        return done[id(root)]


def _changed(node: Expr, visit: Callable[[Expr], Expr], plain: bool, done: dict[int, Expr]) -> Expr:
    """Not inside of its caller: functions there that call themselves are cycles of references, and keep what they saw until the collector comes."""
    if not plain and node._is_plain:
        return node
    known = done.get(id(node))
    if known is not None:
        return known
    kids = children(node)
    fresh = [_changed(kid, visit, plain, done) for kid in kids]
    if all(map(operator.is_, kids, fresh)):
        result = visit(node)
    else:
        rebuilt = rebuild(node, fresh)
        result = rebuilt if any(rebuilt is kid for kid in fresh) else visit(rebuilt)
    done[id(node)] = result
    return result


def substitute(root: Expr, mapping: Mapping[Var, Expr]) -> Expr:
    """The expression with variables replaced, all at once, and simplified: replacing y by y + 1 turns y - 1 into y."""
    replaced = frozenset(mapping)
    done: dict[int, Expr] = {}
    try:
        return _substituted(root, mapping, replaced, done)
    except RecursionError:  # an expression deeper than Python's stack
        for node in walk(root):
            done[id(node)] = _substituted(node, mapping, replaced, done)
        return done[id(root)]


def _substituted(node: Expr, mapping: Mapping[Var, Expr], replaced: frozenset[Var], done: dict[int, Expr]) -> Expr:
    if isinstance(node, Var):
        return mapping.get(node, node)
    if node._variables.isdisjoint(replaced):
        return node
    known = done.get(id(node))
    if known is None:
        fresh = [_substituted(kid, mapping, replaced, done) for kid in children(node)]
        done[id(node)] = known = node if all(map(operator.is_, children(node), fresh)) else rebuild(node, fresh)
    return known


def replace_loads(root: Expr, mapping: Mapping[str, Expr]) -> Expr:
    """The expression with every load of a named buffer, whatever its index, replaced by that buffer's expression."""
    if not mapping:
        return root
    return rewrite(root, lambda node: mapping.get(node.buffer, node) if isinstance(node, Load) else node, plain=False)
