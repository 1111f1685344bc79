"""How often each basic block is executed: the flow of control followed exactly, with loops counted in closed form.

Only what decides branches is computed: integers, addresses, the stack, the flags. Buffers lie at made-up addresses far apart, and what is loaded
from them is not known. One iteration of a loop is followed once (`Path`: guards, effect on registers and stack, executions of blocks) and then
applied as often as its guards hold, so that the time does not depend on trip counts. This takes in unrolling, peeling, remainders, run-time
checks for overlap and threads' shares of a parallel loop, whatever the compiler made of them. Where a branch depends on data, both sides count half.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tilewright.analysis import assembly_aarch64, assembly_x86
from tilewright.analysis.assembly import Assembly, BasicBlock
from tilewright.analysis.loops import Loop, natural_loops, post_dominators
from tilewright.analysis.loops_values import MASK, UNLIMITED, ZERO, Guard, Value, decided, signed

STACK, ARGUMENTS, SCALARS, BUFFERS, SYMBOLS = 1 << 46, 1 << 45, (1 << 45) + (1 << 20), 1 << 40, 1 << 44
BUFFER_DISTANCE = 1 << 35
UNDECIDED = "undecided"
_EXACT: Mapping[str, Callable[[int, int, int], int]] = MappingProxyType({
    "and": lambda a, b, w: a & b, "or": lambda a, b, w: a | b, "xor": lambda a, b, w: a ^ b, "shr": lambda a, b, w: a >> (b & (8 * w - 1)),
    "sar": lambda a, b, w: signed(a, w) >> (b & (8 * w - 1)), "umulh": lambda a, b, w: a * b >> 64,
    "smulh": lambda a, b, w: signed(a) * signed(b) >> 64,
    "udiv": lambda a, b, w: a // b if b else 0, "sdiv": lambda a, b, w: truncated(signed(a, w), signed(b, w)),
    "sign": lambda a, b, w: -1 if signed(a, w) < 0 else 0,
})  # fmt: skip


def truncated(a: int, b: int) -> int:
    """a / b rounded to zero, and 0 where b is 0, as AArch64 divides."""
    return 0 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


class Unanalysable(Exception):
    """The flow of control cannot be followed; the message says why."""


@dataclass(frozen=True)
class Convention:
    """What calls do to registers."""

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
    """One way from a loop's header back to it, or out of it (`leaves` is the block there): what it needs, does and executes."""

    symbols: Mapping[Hashable, int]
    unknown: frozenset[Hashable]
    guards: tuple[Guard, ...]
    effects: Mapping[Hashable, Value | None]
    executions: Mapping[Hashable, float]
    leaves: int | None


@dataclass
class Frame:
    """The state along a path: `state` holds what was written or read, `entry` what it began with."""

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
        """The number, which the path from now on depends on."""
        if value.terms:
            self.require(Guard("eq", value, Value(value.number)))
        return value.number

    def count(self, key: Hashable, times: float = 1) -> None:
        self.executions[key] = self.executions.get(key, 0) + times * self.weight


class Execution:
    """Follows one kernel of an assembly file for one thread of `threads`; `executions` counts blocks by number."""

    def __init__(self, assembly: Assembly, threads: int = 1, thread: int = 0, limit: int = 200_000) -> None:
        self.assembly, self.threads, self.thread, self.limit = assembly, threads, thread, limit
        self.convention = CONVENTIONS[assembly.architecture]
        self.loops: dict[str, dict[int, Loop]] = {}
        self.after: dict[str, dict[int, int]] = {}
        self.paths: dict[int, list[Path]] = {}
        self.held: set[tuple[str, int]] = set()

    def run(self, function: str, arguments: Sequence[int], scalars: Sequence[int] = ()) -> dict[Hashable, float]:
        """Executions by block number of a kernel whose buffers lie at the given addresses."""
        frame = Frame(None)
        for place, numbers in ((ARGUMENTS, arguments), (SCALARS, scalars)):
            frame.state |= {place + 8 * i: Value(number) for i, number in enumerate(numbers)}
        frame.state |= {self.convention.arguments[0]: Value(ARGUMENTS), self.convention.arguments[1]: Value(SCALARS)}
        frame.state |= {self.convention.stack: Value(STACK - 8 * self.convention.pushes), "zero": ZERO}
        self.function(function, frame)
        return frame.executions

    def function(self, name: str, frame: Frame) -> None:
        if name not in self.loops:
            blocks = self.assembly.of(name)
            successors = {block.number: block.successors for block in blocks}
            self.loops[name] = natural_loops(self.assembly.entries[name], successors)
            self.after[name] = post_dominators(self.assembly.entries[name], successors)
        entry = self.assembly.entries[name]
        self.walk(frame, name, None, entry, start=True)

    # --- paths ---

    def walk(self, frame: Frame, name: str, loop: Loop | None, block: int, stop: int | None = None, start: bool = False) -> tuple[str, int | None]:
        """Follows blocks from `block` until `stop`, the loop's header, a block outside of the loop, or the function's end."""
        loops = self.loops[name]
        while True:
            if not start:
                if block == stop:
                    return "stop", None
                if loop is not None and block == loop.header:
                    return "back", None
                if loop is not None and block not in loop.blocks:
                    return "leave", block
            if block in loops and (loop is None or block != loop.header):
                block, start = self.repeat(frame, name, loops[block]), False
                continue
            start = False
            self.limit -= 1
            if self.limit < 0:
                raise Unanalysable(f"{name}: too many different iterations")
            code = self.assembly.blocks[block]
            frame.count(block)
            for operation in code.operations:
                getattr(self, operation[0])(frame, *operation[1:])
            following = self.following(frame, code)
            if following == "return":
                return "return", None
            if isinstance(following, int):
                block = following
                continue
            frame.count(UNDECIDED)
            join = self.after[name].get(block)
            ends = []
            before, weight = dict(frame.state), frame.weight
            frame.weight = weight / 2
            states = []
            for target in code.successors:
                frame.state = dict(before)
                ends.append(("stop", None) if target == join else self.walk(frame, name, loop, target, join))
                states.append(frame.state)
            frame.weight = weight
            if ends[0] != ends[1]:
                raise Unanalysable(f"{name}: a loop ends as data decides: {code.instructions[-2:]}")
            frame.state = before
            for location in {*states[0], *states[1]}:
                one, other = (state[location] if location in state else frame.read(location) for state in states)
                frame.state[location] = one if one == other else None
            if ends[0][0] != "stop":
                return ends[0]
            assert join is not None
            block = join

    def following(self, frame: Frame, code: BasicBlock) -> int | str | None:
        """The next block, "return", or None where that depends on data."""
        kind = code.ending[0]
        if kind == "return" or not code.successors:
            if kind == "indirect":
                raise Unanalysable(f"{code.function}: an indirect jump")
            if kind == "jump":
                self.call(frame, code.ending[1])
            elif self.convention.pushes and kind == "return":
                self.apply(frame, "add", "rsp", 8, "rsp", 8)
            return "return"
        if len(code.successors) == 1:
            return code.successors[0]
        if kind == "branch":
            taken = self.holds(frame, code.ending[1])
        else:
            value = self.operand(frame, code.ending[1], code.ending[2] if kind == "zero" else 8)
            if value is None:
                return None
            if kind == "zero":
                outcome = self.decide(frame, "eq", "sub", value, ZERO, code.ending[2])
            else:
                outcome = frame.fixed(value) >> code.ending[2] & 1 == 0
            taken = outcome == code.ending[3]
        return None if taken is None else code.successors[0 if taken else 1]

    def repeat(self, frame: Frame, name: str, loop: Loop) -> int:
        """Executes a loop from its header; gives the block behind it."""
        known = self.paths.setdefault(loop.header, [])
        frame.count(("entries", loop.header))
        while True:
            path = next((path for path in known if self.fits(frame, path)), None)
            if path is None:
                inner = Frame(frame)
                end, target = self.walk(inner, name, loop, loop.header, start=True)
                if end == "return":
                    raise Unanalysable(f"{name}: a loop ends the function")
                path = self.path_of(inner, target)
                known.append(path)
            self.limit -= 1
            if self.limit < 0:
                raise Unanalysable(f"{name}: too many different iterations")
            self.take(frame, path)
            if path.leaves is not None:
                return path.leaves

    @staticmethod
    def path_of(frame: Frame, leaves: int | None) -> Path:
        effects = {place: value if isinstance(value, Value) else None for place, value in frame.state.items()}
        for place, value in frame.entry.items():  # what was only read is no effect
            if effects[place] == value:
                del effects[place]
        symbols = {place: value.number for place, value in frame.entry.items() if value is not None}
        unknown = frozenset(place for place, value in frame.entry.items() if value is None)
        return Path(symbols, unknown, tuple(frame.guards), effects, frame.executions, leaves)

    @staticmethod
    def moved(value: Value, path: Path, now: Mapping[Hashable, Value]) -> Value:
        """The path's value for another beginning, in terms of the frame around it."""
        result = Value(value.number)
        for symbol, coefficient in value.terms.items():
            result = result.plus(now[symbol].add(-path.symbols[symbol]), coefficient)
        return result

    def fits(self, frame: Frame, path: Path) -> bool:
        now = {place: frame.read(place) for place in path.symbols}
        if not all(isinstance(value, Value) for value in now.values()):
            return False
        if any(isinstance(frame.read(place), Value) for place in path.unknown):
            return False
        difference = {place: value.number - path.symbols[place] for place, value in now.items()}
        for guard in path.guards:
            sides = (
                Value((side.number + sum(c * difference[s] for s, c in side.terms.items())) & MASK) for side in (guard.left, guard.right)
            )
            if not Guard(guard.relation, *sides).holds():
                return False
        return True

    def take(self, frame: Frame, path: Path) -> None:
        """Applies a path that fits, as often in a row as it certainly does."""
        now = {place: frame.read(place) for place in path.symbols}
        guards = [Guard(g.relation, self.moved(g.left, path, now), self.moved(g.right, path, now)) for g in path.guards]
        new = {place: None if value is None else self.moved(value, path, now) for place, value in path.effects.items()}
        times, steps = 1, {}
        if path.leaves is None:
            found = self.steps(frame, path, now, new)
            if found is not None:
                steps = found
                times = min((g.repeats(*(signed(self.slope(side, steps).number) for side in (p.left, p.right)))
                             for g, p in zip(guards, path.guards, strict=True)), default=UNLIMITED)  # fmt: skip
                if times >= UNLIMITED:
                    raise Unanalysable("a loop without an end")
        for guard, pattern in zip(guards, path.guards, strict=True):
            frame.require(guard)
            if times > 1 and guard.relation != "eq":
                last = (side.plus(self.slope(p, steps), times - 1) for side, p in ((guard.left, pattern.left), (guard.right, pattern.right)))
                frame.require(Guard(guard.relation, *last))
        for place, value in new.items():
            pattern_value = path.effects[place]
            if value is not None and times > 1 and pattern_value is not None:
                value = value.plus(self.slope(pattern_value, steps), times - 1)
            frame.state[place] = value
        for key, count in path.executions.items():
            frame.count(key, count * times)

    @staticmethod
    def slope(value: Value, steps: Mapping[Hashable, Value]) -> Value:
        result = ZERO
        for symbol, coefficient in value.terms.items():
            step = steps[symbol]
            if step.number or step.terms:
                result = result.plus(step, coefficient)
        return result

    def steps(self, frame: Frame, path: Path, now: Mapping[Hashable, Value], new: Mapping[Hashable, Value | None]) -> dict[Hashable, Value] | None:
        """By how much each symbol changes in every further application, or None where that is not always the same."""
        steps: dict[Hashable, Value] = {}
        for place, value in now.items():
            after = new.get(place, value)
            if after is None:
                return None
            steps[place] = after.plus(value, -1)
        loose = []
        for place in now:
            pattern = path.effects.get(place)
            again = steps[place] if place not in path.effects or pattern is None else self.slope(pattern, steps)
            if again.number != steps[place].number:
                return None
            if again.terms != steps[place].terms:
                loose.append(place)
        for _ in loose[:1]:
            for value in steps.values():
                frame.fixed(value)
        return steps if not loose else {place: Value(value.number) for place, value in steps.items()}

    # --- operations ---

    def operand(self, frame: Frame, source: Any, width: int) -> Value | None:
        if isinstance(source, int):
            return Value(source & ((1 << 8 * width) - 1))
        if source == "zero":
            return ZERO
        value = frame.read(source)
        return self.cut(frame, value, width) if isinstance(value, Value) else None

    @staticmethod
    def cut(frame: Frame, value: Value, width: int) -> Value:
        """The low bytes; the value depends on its beginning as before as long as they hold it."""
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
        """x86's multiplications to and divisions of a pair of registers."""
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
        """The address if it is one of the stack or of the arguments; the path then depends on it."""
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
        """A vector register's words of eight bytes; of those that never held an address nothing need be known."""
        for number in range(8):
            value, key = words[number] if number < len(words) else None, (place, number)
            if isinstance(value, Value):
                if key not in self.held:
                    self.held.add(key)
                    for known in self.paths.values():  # what was followed before did not look at this word
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

    def call(self, frame: Frame, name: str) -> None:
        """Runs functions of the file and of OpenMP's parallel regions; of others only what they leave in registers."""
        convention = self.convention
        if name == "GOMP_parallel":
            target = frame.read(convention.arguments[0])
            addresses = self.assembly.addresses.items()
            called = next((symbol for symbol, place in addresses if isinstance(target, Value) and place == target.number), None)
            if called is None:
                raise Unanalysable("a parallel region of an unknown function")
            frame.state[convention.arguments[0]] = frame.read(convention.arguments[1])
            name = called
        if name in self.assembly.entries:
            if convention.pushes:
                self.apply(frame, "sub", "rsp", 8, "rsp", 8)
            self.function(name, frame)
        for place in convention.clobbered:
            frame.state[place] = None
        answers = {"omp_get_num_threads": self.threads, "omp_get_max_threads": self.threads, "omp_get_thread_num": self.thread}
        if name in answers:
            frame.state[convention.result] = Value(answers[name])
