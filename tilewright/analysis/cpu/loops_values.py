"""Register values along a path: a number, and its linear dependence on the values at the start of the path.

A `Value` is a 64-bit number with coefficients of the *symbols* (registers and stack slots at the start of the path). Decisions on the way are kept as
`Guard`s: comparisons of two values. A path that was followed once is valid for any other start that satisfies its guards, so a loop's iterations can
be counted in closed form: all values change by constants from one iteration to the next, and each guard says for how many iterations it holds.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

MASK = (1 << 64) - 1
UNLIMITED = 1 << 62
NOTHING: Mapping[Hashable, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Value:
    """`number` (unsigned) with `terms`: its change with each symbol, modulo 2^64."""

    number: int
    terms: Mapping[Hashable, int] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.number, len(self.terms)))

    def plus(self, other: Value, factor: int = 1) -> Value:
        """self + factor * other"""
        number = (self.number + factor * other.number) & MASK
        if not other.terms:
            return Value(number, self.terms)
        terms = dict(self.terms)
        for symbol, coefficient in other.terms.items():
            new = (terms.get(symbol, 0) + factor * coefficient) & MASK
            if new:
                terms[symbol] = new
            else:
                terms.pop(symbol, None)
        return Value(number, terms)

    def times(self, factor: int) -> Value:
        return ZERO.plus(self, factor)

    def add(self, number: int) -> Value:
        return Value((self.number + number) & MASK, self.terms)


ZERO = Value(0)


def signed(number: int, width: int = 8) -> int:
    number &= (1 << 8 * width) - 1
    return number - (1 << 8 * width) if number >> (8 * width - 1) else number


@dataclass(frozen=True, slots=True)
class Guard:
    """A comparison that held: relation "eq", "ltu", "geu", "lt" or "ge" (the last two signed) between left and right."""

    relation: str
    left: Value
    right: Value

    def sides(self, difference: Mapping[Hashable, int] = NOTHING) -> tuple[int, int]:
        """The numbers that are compared, if the symbols differ so much from those at the start of the path."""
        left, right = (
            (side.number + sum(factor * difference[symbol] for symbol, factor in side.terms.items())) & MASK if difference else side.number
            for side in (self.left, self.right)
        )
        return (signed(left), signed(right)) if self.relation in ("lt", "ge") else (left, right)

    def holds(self, difference: Mapping[Hashable, int] = NOTHING) -> bool:
        """Whether it also holds for symbols that differ so much."""
        left, right = self.sides(difference)
        return left == right if self.relation == "eq" else left < right if self.relation in ("lt", "ltu") else left >= right

    def is_constant(self) -> bool:
        return not self.left.terms and not self.right.terms

    def repeats(self, left_step: int, right_step: int) -> int:
        """How many times in a row it holds, including this time, while the sides change by these steps; neither side wraps in between."""
        left, right = self.sides()
        if self.relation == "eq":
            return UNLIMITED if left_step == right_step else 1
        low, high = (-(1 << 63), (1 << 63) - 1) if self.relation in ("lt", "ge") else (0, MASK)
        limit = UNLIMITED
        for value, step in ((left, left_step), (right, right_step)):
            if step:
                limit = min(limit, ((high - value) // step if step > 0 else (value - low) // -step) + 1)
        room = right - left - 1 if self.relation in ("lt", "ltu") else left - right  # the guard holds while this is not negative
        slope = right_step - left_step if self.relation in ("lt", "ltu") else left_step - right_step
        return limit if slope >= 0 else min(limit, room // -slope + 1)


def decided(condition: str, kind: str, left: Value, right: Value, width: int) -> tuple[bool, list[Guard]] | None:
    """Whether a condition holds for the flags of `left - right` (kind "sub") or of a result (`left`; kinds "and", "result"), with the guards that
    decide it; None if these flags do not decide it."""
    if kind != "sub":
        if condition not in ("eq", "ne", "neg", "pos") and (kind != "and" or condition not in ("lt", "ge", "gt", "le")):
            return None
        right = ZERO
        condition = {"neg": "lt", "pos": "ge"}.get(condition, condition)
    elif condition in ("neg", "pos"):
        left, right, condition = left.plus(right, -1), ZERO, "lt" if condition == "neg" else "ge"
    if condition in ("eq", "ne"):
        difference = Value((left.number - right.number) & MASK, left.plus(right, -1).terms)
        if width < 8:
            difference = Value(signed(difference.number, width) & MASK, difference.terms)
        if difference.number == 0:
            return condition == "eq", [Guard("eq", difference, ZERO)]
        side = Guard("lt", difference, ZERO) if signed(difference.number) < 0 else Guard("ge", difference, Value(1))
        return condition == "ne", [side]
    is_signed = condition in ("lt", "ge", "gt", "le")
    base = condition.removesuffix("u")
    if base in ("gt", "le"):  # a > b is b < a
        left, right, base = right, left, "lt" if base == "gt" else "ge"
    if is_signed and width < 8:
        left, right = (Value(signed(side.number, width) & MASK, side.terms) for side in (left, right))
    if left.terms and right.terms and min(left.number, right.number) >= 1 << 40 and max(left.number, right.number) < 1 << 62:
        left, right, is_signed = left.plus(right, -1), ZERO, True  # both are pointers, and remain pointers
    less = (signed(left.number) < signed(right.number)) if is_signed else left.number < right.number
    relation = ("lt" if less else "ge") + ("" if is_signed else "u")
    return less == (base == "lt"), [Guard(relation, left, right)]
