"""The effect of instructions on registers, stack and flags along a path, as far as branches depend on it.

The operations are those of `assembly`. Their results are `Value`s, which record how they depend on the path's start, or None if they depend on data.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tilewright.analysis.cpu import assembly_aarch64, assembly_x86
from tilewright.analysis.cpu.assembly import Assembly
from tilewright.analysis.cpu.loops_values import MASK, ZERO, Guard, Value, decided, signed
from tilewright.errors import TilewrightError

STACK, ARGUMENTS, SCALARS, SYMBOLS = 1 << 46, 1 << 45, (1 << 45) + (1 << 20), 1 << 44
_EXACT: Mapping[str, Callable[[int, int, int], int]] = MappingProxyType({
    "and": lambda a, b, w: a & b, "or": lambda a, b, w: a | b, "xor": lambda a, b, w: a ^ b, "shr": lambda a, b, w: a >> (b & (8 * w - 1)),
    "sar": lambda a, b, w: signed(a, w) >> (b & (8 * w - 1)), "umulh": lambda a, b, w: a * b >> 64,
    "smulh": lambda a, b, w: signed(a) * signed(b) >> 64,
    "udiv": lambda a, b, w: a // b if b else 0, "sdiv": lambda a, b, w: truncated(signed(a, w), signed(b, w)),
    "sign": lambda a, b, w: -1 if signed(a, w) < 0 else 0,
})  # fmt: skip


def truncated(a: int, b: int) -> int:
    """a / b rounded towards zero, and 0 if b is 0, as on AArch64."""
    return 0 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


class Unanalysable(TilewrightError):
    """The control flow of compiled code cannot be followed."""


@dataclass(frozen=True)
class Convention:
    """Calling convention: which registers a call reads and clobbers."""

    arguments: tuple[str, str]
    result: str
    stack: str
    clobbered: tuple[str, ...]
    pushes: bool


CONVENTIONS = MappingProxyType({
    "x86-64": Convention(("rdi", "rsi"), "rax", "rsp", assembly_x86.CALLER_SAVED, True),
    "aarch64": Convention(("x0", "x1"), "x0", "sp", assembly_aarch64.CALLER_SAVED, False),
})  # fmt: skip


@dataclass(frozen=True)
class Path:
    """One way from a loop's header back to it, or out of it (`leaves` is then the block outside): its requirements, effects and executed blocks."""

    symbols: Mapping[Hashable, int]
    unknown: frozenset[Hashable]
    guards: tuple[Guard, ...]
    effects: Mapping[Hashable, Value | None]
    executions: Mapping[Hashable, float]
    leaves: int | None


@dataclass
class Frame:
    """The state along a path: `state` holds everything written or read, `entry` the initial values."""

    parent: Frame | None
    state: dict[Hashable, Any] = field(default_factory=dict)
    entry: dict[Hashable, Value | None] = field(default_factory=dict)
    guards: dict[Guard, None] = field(default_factory=dict)
    executions: dict[Hashable, float] = field(default_factory=dict)
    weight: float = 1.0

    def read(self, location: Hashable) -> Any:
        if location in self.state:
            return self.state[location]
        if self.parent is None:
            return None
        outer = self.parent.read(location)
        if isinstance(outer, Value):
            value = Value(outer.number, {location: 1})
            self.entry[location] = self.state[location] = value
            return value
        self.entry[location] = self.state[location] = None
        return None

    def knows(self, location: Hashable) -> bool:
        return location in self.state or self.parent is not None and self.parent.knows(location)

    def require(self, guard: Guard) -> None:
        if not guard.is_constant():
            self.guards[guard] = None

    def fixed(self, value: Value) -> int:
        """The number itself; the path now requires that the value stays the same."""
        if value.terms:
            self.require(Guard("eq", value, Value(value.number)))
        return value.number

    def count(self, key: Hashable, times: float = 1) -> None:
        self.executions[key] = self.executions.get(key, 0) + times * self.weight


class Operations:
    """The operations, one method each, on the state of a frame; `loops_execution` implements calls."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.convention = CONVENTIONS[assembly.architecture]
        self.paths: dict[int, list[Path]] = {}
        self.held: set[tuple[str, int]] = set()

    def operand(self, frame: Frame, source: Any, width: int) -> Value | None:
        if isinstance(source, int):
            return Value(source & ((1 << 8 * width) - 1))
        if source == "zero":
            return ZERO
        value = frame.read(source)
        return self.cut(frame, value, width) if isinstance(value, Value) else None

    @staticmethod
    def cut(frame: Frame, value: Value, width: int) -> Value:
        """The low bytes of a value. It keeps its dependence on the path's start as long as they can hold it."""
        if width >= 8:
            return value
        low = Value(value.number & ((1 << 8 * width) - 1), value.terms)
        if low.terms:
            frame.require(Guard("ltu", low, Value(1 << 8 * width)))
        return low

    def write(self, frame: Frame, place: Hashable, value: Value | None, width: int = 8) -> None:
        if place != "zero":
            frame.state[place] = None if value is None else self.cut(frame, value, width)

    def set(self, frame: Frame, place: str, width: int, source: Any) -> None:
        self.write(frame, place, self.operand(frame, source, width))

    def forget(self, frame: Frame, place: str) -> None:
        self.write(frame, place, None)

    def apply(self, frame: Frame, name: str, place: str, width: int, a: Any, b: Any) -> None:
        left, right = self.operand(frame, a, width), self.operand(frame, b, width)
        if left is None or right is None:
            self.write(frame, place, None)
        elif name in ("add", "sub"):
            self.write(frame, place, left.plus(right, 1 if name == "add" else -1), width)
        elif name == "shl":
            self.write(frame, place, left.times(1 << (frame.fixed(right) & (8 * width - 1))), width)
        elif name == "mul":
            if left.terms and right.terms:
                right = Value(frame.fixed(right))
            left, right = (right, left) if right.terms else (left, right)
            self.write(frame, place, left.times(right.number), width)
        else:
            number = _EXACT[name](frame.fixed(left), frame.fixed(right), width)
            self.write(frame, place, Value(number & ((1 << 8 * width) - 1)))

    def wide(self, frame: Frame, name: str, width: int, source: Any) -> None:
        """x86's multiplication into, and division of, a pair of registers."""
        values = [self.operand(frame, place, width) for place in ("rax", "rdx", source)]
        if values[0] is None or values[2] is None or name in ("div", "idiv") and values[1] is None:
            low = high = None
        else:
            a, d, b = (0 if value is None else frame.fixed(value) for value in values)
            bits, mask = 8 * width, (1 << 8 * width) - 1
            if name in ("mul", "imul"):
                product = a * b if name == "mul" else signed(a, width) * signed(b, width)
                low, high = product & mask, product >> bits & mask
            else:
                dividend = d << bits | a if name == "div" else signed(d << bits | a, 2 * width)
                divisor = b if name == "div" else signed(b, width)
                low = truncated(dividend, divisor)
                low, high = low & mask, dividend - low * divisor & mask
        for place, number in (("rax", low), ("rdx", high)):
            self.write(frame, place, None if number is None else Value(number))

    def extend(self, frame: Frame, place: str, source: Any, size: int, width: int) -> None:
        value = self.operand(frame, source, size)
        if value is None:
            return self.write(frame, place, None)
        half = 1 << (8 * size - 1)
        if value.number >= half:
            if value.terms:
                frame.require(Guard("geu", value, Value(half)))
            value = value.add(-2 * half)
        elif value.terms:
            frame.require(Guard("ltu", value, Value(half)))
        return self.write(frame, place, value, width)

    def location(self, frame: Frame, address: tuple[Any, ...]) -> Value | None:
        base, index, scale, displacement = address
        if isinstance(base, tuple):
            known = self.assembly.addresses.get(base[1])
            return Value(SYMBOLS if known is None else known)
        value = Value(displacement & MASK)
        for part, factor in ((base, 1), (index, scale)):
            if part is not None:
                held = self.operand(frame, part, 8)
                if held is None:
                    return None
                value = value.plus(held, factor)
        return value

    def address(self, frame: Frame, place: str, address: tuple[Any, ...]) -> None:
        self.write(frame, place, self.location(frame, address))

    def slot(self, frame: Frame, address: tuple[Any, ...]) -> int | None:
        """The address if it is in the stack or the arguments, in which case the path depends on it; else None."""
        value = self.location(frame, address)
        if value is None or not ARGUMENTS <= value.number < STACK + (1 << 20):
            return None
        return frame.fixed(value)

    def load(self, frame: Frame, place: str, address: tuple[Any, ...], size: int, widened: int) -> None:
        slot = self.slot(frame, address)
        if slot is None or size < 4:
            return self.write(frame, place, None)
        value = frame.read(slot)
        self.write(frame, place, value if isinstance(value, Value) else None, size)
        return self.extend(frame, place, place, size, widened) if widened else None

    def store(self, frame: Frame, address: tuple[Any, ...], size: int, source: Any) -> None:
        slot = self.slot(frame, address)
        if slot is not None:
            frame.state[slot] = self.operand(frame, source, size)

    def vector_words(self, frame: Frame, place: str, words: tuple[tuple[str, int | None], ...]) -> None:
        made: list[Value | None] = []
        for source, word in words:
            if source.startswith("v"):
                made += [frame.read((source, number)) for number in (range(8) if word is None else (word,))]
            else:
                made.append(frame.read(source))
        self.put(frame, place, made)

    def put(self, frame: Frame, place: str, words: Sequence[Any]) -> None:
        """Stores a vector register's eight-byte words; words that never held an address are not tracked."""
        for number in range(8):
            value, key = words[number] if number < len(words) else None, (place, number)
            if isinstance(value, Value):
                if key not in self.held:
                    self.held.add(key)
                    for known in self.paths.values():  # paths followed so far did not track this word
                        known.clear()
                frame.state[key] = value
            elif key in self.held:
                frame.state[key] = None

    def vector_load(self, frame: Frame, places: tuple[str, ...], address: tuple[Any, ...], size: int) -> None:
        value = self.location(frame, address)
        words = []
        if value is not None and ARGUMENTS <= value.number < STACK + (1 << 20):
            slots = range(value.number, value.number + size, 8)
            words = [frame.read(slot) if frame.knows(slot) else None for slot in slots]
            if any(isinstance(word, Value) for word in words):
                frame.fixed(value)
        self.put(frame, places[0], words)

    def vector_store(self, frame: Frame, address: tuple[Any, ...], places: tuple[str, ...], size: int) -> None:
        value = self.location(frame, address)
        if value is None or not ARGUMENTS <= value.number < STACK + (1 << 20):
            return
        for i in range(size // 8):
            slot, key = value.number + 8 * i, (places[0], i)
            word = frame.read(key) if key in self.held else None
            if word is not None:
                frame.fixed(value)
            if word is not None or frame.knows(slot):
                frame.state[slot] = word

    def flags(self, frame: Frame, kind: str | None, a: Any, b: Any, width: int) -> None:
        left, right = (self.operand(frame, side, width) for side in (a, b)) if kind is not None else (None, None)
        if kind is None or left is None or right is None:
            frame.state["flags"] = None
        elif kind == "and" and a != b and not (left == right):
            both = Value(frame.fixed(left) & frame.fixed(right))
            frame.state["flags"] = ("and", Value(signed(both.number, width) & MASK), ZERO, 8)
        elif kind in ("and", "result"):
            frame.state["flags"] = (kind, Value(signed(left.number, width) & MASK, left.terms), ZERO, 8)
        else:
            frame.state["flags"] = (kind, left, right, width)

    def compare_if(self, frame: Frame, condition: str, a: Any, b: Any, width: int, otherwise: int) -> None:
        held = self.holds(frame, condition)
        if held is None:
            frame.state["flags"] = None
        elif held:
            self.flags(frame, "sub", a, b, width)
        else:
            frame.state["flags"] = ("bits", otherwise)

    def holds(self, frame: Frame, condition: str | None) -> bool | None:
        flags = frame.read("flags")
        if condition is None or not isinstance(flags, tuple):
            return None
        if flags[0] == "bits":
            n, z, c, v = (bool(flags[1] >> shift & 1) for shift in (3, 2, 1, 0))
            outcomes = {"eq": z, "neg": n, "geu": c, "gtu": c and not z, "ge": n == v, "gt": n == v and not z}
            opposite = {"ne": "eq", "pos": "neg", "ltu": "geu", "leu": "gtu", "lt": "ge", "le": "gt"}
            return outcomes[condition] if condition in outcomes else not outcomes[opposite[condition]]
        return self.decide(frame, condition, *flags)

    @staticmethod
    def decide(frame: Frame, condition: str, kind: str, left: Value, right: Value, width: int) -> bool | None:
        outcome = decided(condition, kind, left, right, width)
        if outcome is None:
            return None
        for guard in outcome[1]:
            frame.require(guard)
        return outcome[0]

    def choose(self, frame: Frame, place: str, width: int, condition: str | None, a: Any, b: Any) -> None:
        held = self.holds(frame, condition)
        if held is None:
            one, other = self.operand(frame, a, width), self.operand(frame, b, width)
            self.write(frame, place, one if one == other else None)
        else:
            self.write(frame, place, self.operand(frame, a if held else b, width))
