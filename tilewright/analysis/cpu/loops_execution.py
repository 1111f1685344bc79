"""How often each basic block is executed: control flow is followed exactly, and loops are counted in closed form.

Only what decides branches is computed: integers, addresses, the stack, the flags. Buffers have made-up addresses far apart, and values loaded from
them are unknown. One iteration of a loop is followed once (`Path`: guards, effect on registers and stack, executions of blocks) and then applied as
often as its guards hold, so that the time of the analysis does not depend on trip counts. This covers unrolling, peeling, remainders, run-time checks
for overlap and threads' shares of a parallel loop, however the compiler generated them. If a branch depends on data, both sides count half.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import inf

from tilewright.analysis.cpu.assembly import Assembly, BasicBlock
from tilewright.analysis.cpu.loops import Loop, natural_loops, post_dominators
from tilewright.analysis.cpu.loops_operations import ARGUMENTS, SCALARS, STACK, Frame, Operations, Path, Unanalysable
from tilewright.analysis.cpu.loops_values import UNLIMITED, ZERO, Guard, Value, signed
from tilewright.runtime.loadable import LoadableKernel

BUFFERS, BUFFER_DISTANCE = 1 << 40, 1 << 35
UNDECIDED = "undecided"
PARALLEL = "._omp_fn."
"""Part of the names of functions into which compilers put parallel loops."""
LIMIT = 200_000
"""Maximum number of blocks and loop iterations that are followed."""


def executions(
    kernel: LoadableKernel, assembly: Assembly, threads: int = 1, thread: int = 0, step: int = 0, comparisons: float = inf
) -> dict[object, float]:
    """How often a thread executes each block (by its number), enters each loop (("entries", header)), and reaches branches that depend on data
    (`UNDECIDED`). `step` is the value of every scalar parameter. Thread 0 executes all code outside parallel loops. `comparisons`: see `Execution`.

    Raises:
        Unanalysable: if the control flow cannot be followed.
    """
    addresses = [BUFFERS + BUFFER_DISTANCE * (number + 1) for number in range(len(kernel.writes))]
    found = Execution(assembly, threads, thread, comparisons=comparisons).run(kernel.name, addresses, [*[step] * kernel.scalars, kernel.trips])
    if thread == 0:
        return dict(found)
    return {key: count for key, count in found.items() if not isinstance(key, int) or PARALLEL in assembly.blocks[key].function}


class Execution(Operations):
    """Follows one kernel of an assembly file for one of `threads` threads; `executions` counts blocks by number. `comparisons` limits how often an
    iteration is compared with one followed before, which dominates the analysis time if iterations differ much."""

    def __init__(self, assembly: Assembly, threads: int = 1, thread: int = 0, limit: int = LIMIT, comparisons: float = inf) -> None:
        super().__init__(assembly)
        self.threads, self.thread, self.limit, self.comparisons = threads, thread, limit, comparisons
        self.loops: dict[str, dict[int, Loop]] = {}
        self.after: dict[str, dict[int, int]] = {}

    def run(self, function: str, arguments: Sequence[int], scalars: Sequence[int] = ()) -> dict[Hashable, float]:
        """Executions by block number of a kernel with buffers at the given addresses."""
        frame = Frame(None)
        for place, numbers in ((ARGUMENTS, arguments), (SCALARS, scalars)):
            frame.state |= {place + 8 * i: Value(number) for i, number in enumerate(numbers)}
        frame.state |= {self.convention.arguments[0]: Value(ARGUMENTS), self.convention.arguments[1]: Value(SCALARS)}
        frame.state |= {self.convention.stack: Value(STACK - 8 * self.convention.pushes), "zero": ZERO}
        self.function(function, frame)
        return frame.executions

    def function(self, name: str, frame: Frame) -> None:
        if name not in self.assembly.entries:
            raise Unanalysable(f"the binary has no symbol {name}")
        if name not in self.loops:
            blocks = self.assembly.of(name)
            successors = {block.number: block.successors for block in blocks}
            self.loops[name] = natural_loops(self.assembly.entries[name], successors)
            self.after[name] = post_dominators(self.assembly.entries[name], successors)
        entry = self.assembly.entries[name]
        self.walk(frame, name, None, entry, start=True)

    # --- paths ---

    def walk(self, frame: Frame, name: str, loop: Loop | None, block: int, stop: int | None = None, start: bool = False) -> tuple[str, int | None]:
        """Follows blocks from `block` to `stop`, the loop's header, a block outside the loop, or the end of the function."""
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
                raise Unanalysable(f"{name}: data decide when a loop ends: {'; '.join(map(str, code.instructions[-2:]))}")
            frame.state = before
            for location in {*states[0], *states[1]}:
                one, other = (state[location] if location in state else frame.read(location) for state in states)
                frame.state[location] = one if one == other else None
            if ends[0][0] != "stop":
                return ends[0]
            assert join is not None
            block = join

    def following(self, frame: Frame, code: BasicBlock) -> int | str | None:
        """The next block, "return", or None if that depends on data."""
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
        """Executes a loop from its header; returns the block after it."""
        known = self.paths.setdefault(loop.header, [])
        frame.count(("entries", loop.header))
        while True:
            place = next((place for place, path in enumerate(known) if self.fits(frame, path)), None)
            self.comparisons -= len(known) if place is None else place
            if place is None:
                inner = Frame(frame)
                end, target = self.walk(inner, name, loop, loop.header, start=True)
                if end == "return":
                    raise Unanalysable(f"{name}: a loop ends the function")
                path = self.path_of(inner, target)
            else:
                path = known.pop(place)
            known.insert(0, path)  # the path taken last is tried first
            self.limit -= 1
            if self.limit < 0 or self.comparisons < 0:
                raise Unanalysable(f"{name}: too many different iterations")
            self.take(frame, path)
            if path.leaves is not None:
                return path.leaves

    @staticmethod
    def path_of(frame: Frame, leaves: int | None) -> Path:
        effects = {place: value if isinstance(value, Value) else None for place, value in frame.state.items()}
        for place, value in frame.entry.items():  # a value that was only read is no effect
            if effects[place] == value:
                del effects[place]
        symbols = {place: value.number for place, value in frame.entry.items() if value is not None}
        unknown = frozenset(place for place, value in frame.entry.items() if value is None)
        return Path(symbols, unknown, tuple(frame.guards), effects, frame.executions, leaves)

    @staticmethod
    def moved(value: Value, path: Path, now: Mapping[Hashable, Value]) -> Value:
        """The path's value for a different start, in terms of the enclosing frame."""
        result = Value(value.number)
        for symbol, coefficient in value.terms.items():
            result = result.plus(now[symbol].add(-path.symbols[symbol]), coefficient)
        return result

    def fits(self, frame: Frame, path: Path) -> bool:
        difference = {}
        for place, before in path.symbols.items():
            value = frame.read(place)
            if not isinstance(value, Value):
                return False
            difference[place] = value.number - before
        if not all(guard.holds(difference) for guard in path.guards):
            return False
        return not any(isinstance(frame.read(place), Value) for place in path.unknown)

    def take(self, frame: Frame, path: Path) -> None:
        """Applies a path that fits, as many times in a row as its guards are certain to hold."""
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
        """The change of each symbol with every further application, or None if it is not always the same."""
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

    def call(self, frame: Frame, name: str) -> None:
        """Follows functions of the file and OpenMP's parallel regions; of other functions only the effect on registers is modelled."""
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
