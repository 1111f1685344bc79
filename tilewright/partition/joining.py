"""Joining reductions (softmax, normalisations, global average pooling) to the contraction whose result they reduce: the form for rows, the decision.

A reduction needs a whole row, so it joins only if one tile of the contraction's kernel can hold all output channels of its pixels. A schema with its
own criterion (`Schema.joins`) decides; otherwise the predictions for one kernel and for two are compared. `pixel_joining` has the form of sums over
pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

from tilewright.graph.contraction import anchor, contraction, sums_pixels
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import Step
from tilewright.ir.expr import INDEX, Const, Expr, Var, loads, substitute
from tilewright.ir.graph import Value
from tilewright.ir.layout import row_major
from tilewright.ir.problem import Problem
from tilewright.ir.region import Region, Unsuitable, Ways
from tilewright.kernels.cpu.rates import within_reach
from tilewright.kernels.registry import schemas
from tilewright.kernels.schema import USUAL, AnySchema, JoinDecision, Numerics, Options
from tilewright.partition.canonical import canonical, key_of
from tilewright.partition.merges import BY_MERGES, WHOLE, Policy, Timed, compared, nearly_as_fast
from tilewright.partition.precision import AS_COMPUTED, Precision
from tilewright.selection.choice import candidates, rank
from tilewright.selection.ranking import Choice, Ranking

JOIN = "join"
"""The kind of these merges."""
COMBINERS = ("sum", "prod", "max", "min")


def owns_rows(steps: Sequence[Step]) -> bool:
    """Whether reductions of its rows follow the contraction in its steps."""
    return any(step.kind == "reduce" for step in steps[1:])


def with_rows(host: tuple[Step, ...], name: str, steps: tuple[Step, ...], constants: frozenset[str]) -> tuple[Step, ...] | str:
    """The host's steps followed by `steps`, which reduce the host's result `name`, all over the axes of the contraction; or why that is not possible.
    A map at the end of the host remains a separate step, since its result is reduced. A step that takes each row's first element becomes a reduction
    over no axes."""
    found = contraction(host[0], constants)
    assert found is not None
    if owns_rows(host):
        return f"{name} ends with reductions already"
    wide = [axis for axis in found.n if axis.extent != 1]
    if len(wide) != 1:
        return f"the channels of {name} are {len(wide)} axes"
    last = host[-1]
    if last.dtypes[0] != found.dtype:
        return f"{name} is {last.dtypes[0]}, a tile holds {found.dtype}"
    unit: dict[Var, Expr] = {axis: Const(0, INDEX) for axis in last.axes if axis.extent == 1}
    places = tuple(substitute(position, unit) for position in last.index)
    if any(not isinstance(place, Var) for place, extent in zip(places, last.shape, strict=True) if extent != 1):
        return f"{name} is stored in another order than its axes"
    channel = wide[0]
    pixels = tuple(axis for axis in host[0].axes if axis != channel)
    reducers: dict[str, dict[Var, Expr]] = {}
    result: list[Step] = list(host)
    for step in steps:
        mapping: dict[Var, Expr] = {}
        first = () if any(axis.extent != 1 for axis in step.reduction) else step.reduction
        read = [load for load in loads(*step.bodies) if load.buffer == name or load.buffer in reducers]
        for load in read:
            inner = reducers.get(load.buffer)
            held_at = places if inner is None else tuple(inner.values())
            for position, target, extent in zip(load.index, held_at, last.shape if inner is None else [p.extent for p in inner], strict=True):
                if extent == 1 or (target == channel and position in first):
                    continue
                if not isinstance(position, Var) or mapping.setdefault(position, target) != target or position.extent != extent:
                    return f"does not read {name} row by row"
        if step.kind == "reduce":
            refusal = _refuse_reduction(step, found.dtype, mapping, channel, name, pixels)
            if refusal:
                return refusal
        targets = list(mapping.values())
        own = [axis for axis in step.axes if axis.extent != 1]
        needed = {axis for axis in pixels if axis.extent != 1}
        if len(set(targets)) != len(targets) or any(axis not in mapping for axis in own) or not needed <= set(targets):
            return f"does not read {name} row by row"
        mapping |= {axis: Const(0, INDEX) for axis in (*step.axes, *step.reduction) if axis.extent == 1}
        whole = step.kind == "map" and channel in targets
        moved = replace(
            step,
            axes=host[0].axes if whole else pixels,
            bodies=tuple(substitute(body, mapping) for body in step.bodies),
            reduction=(channel,) if step.kind == "reduce" and not first else (),
            index=tuple(substitute(position, mapping) for position in step.index),
        )
        reducers[step.name] = {axis: mapping[axis] for axis in step.axes}
        result.append(moved)
    return tuple(result)


def _refuse_reduction(step: Step, dtype: str, mapping: Mapping[Var, Expr], channel: Var, name: str, pixels: Sequence[Var]) -> str:
    reduced = [axis for axis in step.reduction if axis.extent != 1]
    if not step.identity_index:
        return f"does not reduce rows of {name}"
    if step.combiner not in COMBINERS or step.dtypes != (dtype,):
        return f"a tile does not reduce with {step.combiner} over {', '.join(step.dtypes)}"
    if not any(load.buffer == name for load in loads(*step.bodies)) or any(axis not in mapping for axis in reduced):
        return f"does not reduce rows of {name}"
    if any(mapping[axis] in pixels for axis in reduced):
        points = prod(axis.extent or 0 for axis in reduced if mapping[axis] in pixels)
        return f"reduces {points} pixels of {name}, and a tile holds whole rows of channels, not whole images"
    if [mapping[axis] for axis in reduced] != [channel] and (reduced or channel in mapping.values()):
        return f"does not reduce rows of {name}"
    return ""


def _best(schema: AnySchema, machine: Machine, options: Options, facts: object) -> Choice:
    """The schema's candidate with the shortest predicted time for some facts. Raises Unsuitable if no candidate is feasible."""
    return candidates(Ranking(machine), schema, facts, options).first()


@dataclass(frozen=True)
class RowJudge:
    """Decides for one machine whether reductions join a contraction."""

    machine: Machine
    threads: int
    constants: frozenset[str]
    numerics: Numerics = USUAL
    precision: Precision = AS_COMPUTED
    known: dict[object, float] = field(default_factory=dict)
    """Predicted seconds by canonical problem: networks repeat layers."""
    measured: Callable[[Problem], float | None] = lambda problem: None
    """Seconds that trials measured of a canonical problem; they decide where predictions are close."""
    policy: Policy = BY_MERGES
    """Reductions and attention about which no time decides."""
    before: Mapping[tuple[str, ...], bool] = field(default_factory=dict)
    """What was decided for another size of the model, by the results of the regions, which is decided again if it is predicted nearly as fast."""

    def as_asked(self, results: tuple[str, ...], decision: JoinDecision, ways: Ways) -> JoinDecision:
        """The decision about these results, or the policy's, or that for another size if both ways are predicted nearly as fast."""
        decided, before = self.policy.about(JOIN, results), self.before.get(results)
        if decided is not None:
            return replace(decision, joins=decided, reason=f"{decision.reason}; {WHOLE}")
        if before is not None and before != decision.joins and nearly_as_fast(ways, before):
            return replace(decision, joins=before, reason=f"{decision.reason}; as for another size")
        return decision

    def __call__(self, steps: tuple[Step, ...], host: tuple[Step, ...], rows: tuple[Step, ...], values: Mapping[str, Value]) -> JoinDecision:
        """Whether the joined `steps` are faster than `host` and `rows` as separate kernels. `steps` is the result of `with_rows` or `with_pixels`.
        Compares the best tiles of whole rows (or images) with the best tiles plus a stored result. Layouts are not known yet, so all are assumed to
        be row-major."""
        if any(axis.extent == 0 for step in steps for axis in (*step.axes, *step.reduction)):
            return JoinDecision(False, "there is nothing to compute")
        if not self.precision.whole_rows:
            return JoinDecision(False, "tile registers hold no whole rows")
        found = anchor(steps, self.constants)
        assert found is not None
        schema = next((schema for schema in schemas(self.machine, "contraction") if schema.joins is not None), None)
        if schema is not None and schema.joins is not None:
            best = partial(_best, schema, self.machine, Options(self.threads, self.numerics))
            return schema.joins(self._problem("contraction", steps, values), self.machine, self.threads, best)
        if sums_pixels(steps, found):
            pixels = prod(axis.extent or 0 for axis in steps[1].reduction)
            owns = "a block owns one tile of pixels by channels, not whole images"
            return JoinDecision(False, f"reduces {pixels} pixels of {found.size_n} channels, and {owns}")
        return self._compared(steps, host, rows, values, found.size_n)

    def in_one(self, steps: tuple[Step, ...], parts: Sequence[tuple[str, tuple[Step, ...]]], values: Mapping[str, Value]) -> JoinDecision:
        """Whether `steps`, a region of kind attention, are faster in one kernel than in the regions `parts` (kind and steps of each, in order). What
        they store in between goes through memory, of which few threads of a large CPU reach a part only (`kernels.cpu.rates.within_reach`)."""
        if any(axis.extent == 0 for step in steps for axis in (*step.axes, *step.reduction)):
            return JoinDecision(False, "there is nothing to compute")
        try:
            whole, *apart = (self._timed(kind, part, values) for kind, part in (("attention", steps), *parts))
        except Unsuitable as reason:
            return JoinDecision(False, f"one kernel does not compute the attention: {reason}")
        both = compared([whole], apart, by_prediction=self.policy.predicted)
        return JoinDecision(both.taken, f"attention takes {both.text('in one kernel', 'with stored scores')}", both.ways)

    def _timed(self, kind: str, steps: tuple[Step, ...], values: Mapping[str, Value]) -> Timed:
        """Steps as a separate region, predicted by formulas: the learned models do not know all kinds of region."""
        problem = self._problem(kind, steps, values)
        same = canonical(problem).problem
        key = key_of(same)
        if key not in self.known:
            machine = self.machine if self.machine.is_gpu else within_reach(self.machine, self.threads)
            self.known[key] = rank(problem, machine, self.threads, self.numerics, learned=False).first().seconds
        return Timed(problem.region, self.known[key], partial(self.measured, same))

    def _compared(
        self, steps: tuple[Step, ...], host: tuple[Step, ...], rows: tuple[Step, ...], values: Mapping[str, Value], length: int
    ) -> JoinDecision:
        parts = (("contraction", steps), ("contraction", host), ("row reduction", rows))
        try:
            whole, *apart = (self._timed(kind, part, values) for kind, part in parts)
        except Unsuitable as reason:
            return JoinDecision(False, f"a row of {length} is not reduced in a block: {reason}")
        both = compared([whole], apart, by_prediction=self.policy.predicted)
        told = f"one block owns the row of {length}" if both.taken else f"a row of {length} fits one block, but that is slower"
        return JoinDecision(both.taken, f"{told}: {both.text('in one kernel', 'with a stored result')}", both.ways)

    def _problem(self, kind: str, steps: tuple[Step, ...], values: Mapping[str, Value]) -> Problem:
        """The steps as a separate region, with all values that it reads and stores in row-major order, and factors and results in the types that it
        wants."""
        inner = {name for step in steps for name in step.names}
        read = tuple(dict.fromkeys(load.buffer for step in steps for load in loads(*step.bodies) if load.buffer not in inner))
        region = Region(steps[-1].name, kind, (), steps, read, (steps[-1].name,))
        layouts = {name: row_major(values[name].shape) for name in (*region.inputs, *region.outputs)}
        typed = (*self.precision.factors(region, self.constants), *region.outputs)
        wanted = {name: replace(values[name], dtype=self.precision.stored(region, values[name])) for name in typed}
        return Problem(region, layouts, {**values, **wanted}, self.constants)


__all__ = ["RowJudge", "JoinDecision", "owns_rows", "with_rows"]
