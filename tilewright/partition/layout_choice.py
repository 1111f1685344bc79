"""Layouts by prediction: where regions want a value stored otherwise than the rules of `partition.layouts` have it, both ways are predicted.

The rules store for the region that computes a value, or for those that sum it. What else reads it may want another order: statistics over pixels read
planes, a normalisation of channels reads channels, a map whose result is row-major reads rows. So each value that some reader does not read along its
innermost dimension has an alternative, the order in which that reader would. Further alternatives: sums over an input of the model read a copy with
channels innermost; a result of the model is stored as any other value, for all that read it, and copied for the caller; and on a GPU the first sum
over an input compares bounds instead of reading a padded copy.

Values whose order follows others' follow them here too. Alternatives that change different regions are laid out together, and each is compared by the
regions that it changes. All of this is done for every partition that is predicted, so that siblings, folded images and prologues are compared as they
would be stored; and what is taken of that is compared again with the chains of regions that either way allows.

The estimates of maps on CPUs count neither bounds nor strides, and those of windows along rows too much for strides. There guards and rows of windows
are no alternatives, and where loops other than copies and windows that read channels would change, only measured times decide. So they do on a GPU
where bounds are compared: on an H100 one of 63 predictions of such alternatives failed by a factor of 2.6, while the 25 of 155 others that were
predicted to gain took 0.88 of the time, 1.01 at worst (`python -m bench.layouts --target cuda --convolutions 200`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from types import MappingProxyType

from tilewright.graph.operators.shape import SPACE_TO_DEPTH
from tilewright.ir.computation import Step
from tilewright.ir.expr import Load, loads, variables
from tilewright.ir.graph import Graph
from tilewright.ir.layout import Layout, channels_last, row_major
from tilewright.ir.region import MergeDecision, Region, readers_of
from tilewright.partition.layouts import BY_RULE, PADDED, STORED, LaidOut, Storing, fixed_values, preferred
from tilewright.partition.merges import LEAST_GAIN, Timed, compared
from tilewright.text import seconds_text

STORAGE = "storage"
"""The kind of these decisions."""
KINDS = frozenset({"contraction", "window", "map", "row reduction"})
"""Kinds of region that are asked how they want to read."""

Laid = Callable[[Storing], LaidOut]
Predict = Callable[[LaidOut, Sequence[Region]], Sequence[Timed]]
"""Predicts regions of a partition."""
Decided = Mapping[tuple[str, str], bool]
"""By value and description whether an alternative is taken."""


@dataclass(frozen=True, eq=False)
class Alternative:
    """Another way to store a value, or to read it if it is an input of the model, and what that is, after "is"; `usual`: the way that is otherwise
    taken."""

    value: str
    storing: Storing
    told: str
    usual: str = "by rule"

    @property
    def key(self) -> tuple[str, str]:
        """What the alternative has in common with that for another size of the model."""
        return self.value, self.told

    @property
    def names(self) -> tuple[str, ...]:
        """The value and what may be stored for it."""
        return self.value, self.value + PADDED, self.value + STORED


@dataclass(frozen=True)
class Group:
    """Alternatives that change the same regions: these, as they are and as they would be."""

    alternatives: tuple[Alternative, ...]
    before: tuple[Region, ...]
    after: tuple[Region, ...]


@dataclass(frozen=True)
class Judged:
    """Whether alternatives are taken, and the times of both ways."""

    taken: bool
    times: str


@dataclass(frozen=True)
class Judge:
    """Compares ways of storing on a machine. predict: the regions of a partition. gpu: whether it is one. measuring: whether trials measure both ways
    of a comparison that is close. chained: predicts all regions, chains among them, that the named ones may be chained with, as they are in two
    partitions; None if chains do not follow predictions. libraries: whether kernels of libraries may be chosen: they were
    measured for layouts by rule, and nothing predicts them for others. by_prediction: whether measured times decide nothing
    (`merges.Policy.predicted`)."""

    predict: Predict
    gpu: bool
    measuring: bool = False
    chained: Callable[[LaidOut, LaidOut, frozenset[str]], tuple[float, float]] | None = None
    libraries: bool = False
    by_prediction: bool = False

    def counts(self, region: Region, laid_out: LaidOut) -> bool:
        """Whether the predicted time of a partition's region decides, which must depend on how its values are stored. On a CPU that of a window does
        where it reads channels: along rows compilers also make vectors of some elements that are not adjacent."""
        if self.gpu or not region.nodes or region.kind in ("contraction", "attention"):
            return True
        return region.kind == "window" and _across_windows(region, laid_out)

    def compare(self, group: Group, before: LaidOut, after: LaidOut, alone: Callable[[], LaidOut]) -> Judged:
        """Whether the group is taken, of those that distinguish two partitions. `alone` makes the partition that it alone distinguishes from the
        first: other groups may be on the same path."""
        both = compared(self.predict(after, group.after), self.predict(before, group.before), by_prediction=self.by_prediction)
        ways = ((group.before, before), (group.after, after))
        counted = all(self.counts(region, laid_out) for regions, laid_out in ways for region in regions)
        counted &= not any(one.storing.guarded for one in group.alternatives)
        measured = both.measured is not None and not self.by_prediction
        taken, said = both.taken and (measured or counted), both.text("so", group.alternatives[0].usual)
        if taken and not measured and self.chained is not None:
            plain, other = self.chained(before, alone(), frozenset(region.name for region in (*group.before, *group.after)))
            taken = plain - other > LEAST_GAIN * both.apart
            if (plain, other) != (both.apart, both.together):
                said += f"; with the chains of these regions {seconds_text(other)} and {seconds_text(plain)}"
        elif both.taken and not taken:
            said += "; only measured times decide"
        return Judged(taken, said)


@dataclass(frozen=True)
class Chosen:
    """A partition with its layouts, and what was decided about alternatives by prediction."""

    laid_out: LaidOut
    decided: Decided = field(default_factory=lambda: MappingProxyType({}))


def choose_layouts(graph: Graph, laid: Laid, judge: Judge, pinned: frozenset[str] = frozenset(), earlier: Decided | None = None) -> Chosen:
    """The partition that `laid` makes, with the alternatives that are predicted, or were measured, to be faster than the rules. Partitions without
    alternatives cost nothing. `pinned`: results of the model that are stored as they are. `earlier`: what was decided for another size of the model
    decides without a prediction if it is about all alternatives."""
    plain = laid(BY_RULE)
    found = find_alternatives(graph, plain, judge, pinned)
    if not found:
        return Chosen(plain)
    if earlier is not None and all(one.key in earlier for one in found):
        return Chosen(laid(_joined(BY_RULE, [one for one in found if earlier[one.key]])))
    laid_out, _, decisions = decide(found, laid, judge, plain)
    return Chosen(told(laid_out, decisions), MappingProxyType({one.key: judged.taken for one, judged in decisions.items()}))


def decide(
    found: Sequence[Alternative], laid: Laid, judge: Judge, plain: LaidOut, chosen: Storing = BY_RULE
) -> tuple[LaidOut, Storing, dict[Alternative, Judged]]:
    """The partition with those of the alternatives that are faster, how its values are stored, and what was decided. `plain`: the partition as stored
    by `chosen`."""
    decisions: dict[Alternative, Judged] = {}
    batches = _batches(found, plain)
    while batches:
        batch, *batches = batches
        other = laid(_joined(chosen, batch))
        taken: list[Alternative] = []
        for group in groups(batch, plain, other):
            judged = judge.compare(group, plain, other, partial(laid, _joined(chosen, group.alternatives)))
            if not judged.taken and len(group.alternatives) > 1:
                batches += [[one] for one in group.alternatives]
                continue
            taken += group.alternatives if judged.taken else ()
            decisions |= dict.fromkeys(group.alternatives, judged)
        if taken:
            chosen = _joined(chosen, taken)
            plain = other if len(taken) == len(batch) else laid(chosen)
            stored = {one.value for one in taken}
            batches = [rest for batch in batches if (rest := [one for one in batch if one.value not in stored])]
    return plain, chosen, decisions


def find_alternatives(graph: Graph, laid_out: LaidOut, judge: Judge, pinned: frozenset[str] = frozenset()) -> list[Alternative]:
    """The alternatives to a partition's layouts, in the order of its regions; none where libraries take part."""
    if judge.libraries:
        return []
    fixed = fixed_values(graph, laid_out.regions)
    readers = readers_of(laid_out.regions)
    outside = {name for region in laid_out.regions if region.kind in ("torch", "loop") for name in (*region.inputs, *region.outputs)}
    kept = {*laid_out.slices, *(place.buffer for place in laid_out.slices.values())}
    kept |= {output for node in graph.nodes if node.operator == SPACE_TO_DEPTH for output in node.outputs}
    if not judge.measuring:
        kept |= {name for region in laid_out.regions if not judge.counts(region, laid_out) for name in (*region.inputs, *region.outputs)}
    found: list[Alternative] = []
    for name in graph.inputs:
        if name in outside or len(laid_out.layouts[name].shape) < 3 or _innermost(laid_out.layouts[name]) is None:
            continue
        copied = any(copy == name + PADDED for region in readers.get(name, []) for copy in region.outputs)
        summing = [region for region in readers.get(name, []) if region.kind == "contraction"]
        if copied and judge.gpu and judge.measuring:
            found.append(Alternative(name, Storing(guarded=frozenset({name})), "read where it is, by comparing bounds"))
        elif not copied and any(_wanted(region, name, laid_out, judge) for region in summing):
            found.append(Alternative(name, Storing(apart=frozenset({name})), "copied with channels innermost for the sums that read it"))
    for region in laid_out.regions:
        if region.kind not in KINDS or len(region.outputs) != 1:
            continue
        (name,) = region.outputs
        layout = laid_out.layouts[name]
        if name in kept or _innermost(layout) is None:
            continue
        if name not in fixed:
            wishes = [_wanted(reader, name, laid_out, judge) for reader in readers.get(name, [])]
            for dim in dict.fromkeys(dim for wish in wishes for dim in wish):
                order = _with_innermost(layout, dim)
                told = f"stored in the order {' '.join(f'd{each}' for each in order)}, in which a reader reads it"
                found.append(Alternative(name, Storing(orders=MappingProxyType({name: order})), told))
        elif (
            name in graph.outputs
            and name not in outside | pinned
            and name + STORED not in graph.values
            and region.kind != "map"
            and len(layout.shape) > 2
        ):
            free = preferred(region, laid_out.values[name], laid_out.layouts, graph)
            if _innermost(free) != _innermost(layout):
                told = "copied from where it is stored with channels innermost, for all that reads it"
                found.append(Alternative(name, Storing(apart=frozenset({name})), told))
    return found


def _across_windows(region: Region, laid_out: LaidOut) -> bool:
    """Whether the region's windows neither extend nor move along the innermost dimensions of the values in which they lie: that of the channels."""
    axes, summed = {*region.steps[0].axes}, {*region.steps[0].reduction}
    sliding = [load for load in loads(*region.steps[0].bodies) if any(axes & used and summed & used for used in map(variables, load.index))]
    inner = [(load, _innermost(laid_out.layouts[load.buffer])) for load in sliding]
    return bool(inner) and all(dim is not None and load.index[dim] in axes for load, dim in inner)


def _innermost(layout: Layout) -> int | None:
    """The dimension along which adjacent elements lie; None if at most one has more than one element."""
    dims = [dim for dim, _ in layout.order if layout.shape[dim] > 1]
    return dims[-1] if len(dims) > 1 and 0 not in layout.shape and not any(factor for _, factor in layout.order) else None


def _with_innermost(layout: Layout, dim: int) -> tuple[int, ...]:
    """Row-major, channels last, or else the layout's order with the dimension moved: the first that has it innermost."""
    dims = [each for each, _ in layout.order]
    moved = Layout(layout.shape, tuple((each, 0) for each in (*(each for each in dims if each != dim), dim)))
    usual = next((one for one in (row_major(layout.shape), channels_last(layout.shape)) if _innermost(one) == dim), moved)
    return tuple(each for each, _ in usual.order)


def _wanted(region: Region, name: str, laid_out: LaidOut, judge: Judge) -> list[int]:
    """The dimensions of a value along which a region would read it, where it does not along the one that is innermost."""
    if region.kind not in KINDS:
        return []
    current, wanted = _innermost(laid_out.layouts[name]), []
    for step in region.steps:
        for load in loads(*step.bodies):
            if load.buffer == name and current is not None:
                along = [dim for dim in _along(region, step, load, laid_out, judge) if laid_out.layouts[name].shape[dim] > 1]
                wanted += along[-1:] if current not in along else []
    return list(dict.fromkeys(wanted))


def _along(region: Region, step: Step, load: Load, laid_out: LaidOut, judge: Judge) -> list[int]:
    """The dimensions along which a load may run: those that are summed and nothing else, the rows of windows, or else that along which the result of
    the region is stored."""
    reading = [variables(position) for position in load.index]
    if region.kind in ("contraction", "row reduction") and step.reduction:
        return [dim for dim, found in enumerate(reading) if found and found <= {*step.reduction}]
    if region.kind == "window" and step.reduction:
        rows = [dim for dim, found in enumerate(reading) if found & {*step.reduction}]
        shape, inner = laid_out.layouts[load.buffer].shape, _innermost(laid_out.layouts[load.buffer])
        return rows if judge.gpu and rows and inner is not None and shape[rows[-1]] > shape[inner] else []
    inner = _innermost(laid_out.layouts[region.outputs[0]])
    if step is not region.steps[-1] or inner is None:
        return []
    fastest = variables(step.index[inner])
    return [dim for dim, found in enumerate(reading) if found & fastest]


def _joined(storing: Storing, alternatives: Iterable[Alternative]) -> Storing:
    return reduce(lambda one, other: one | other.storing, alternatives, storing)


def _batches(alternatives: Sequence[Alternative], laid_out: LaidOut) -> list[list[Alternative]]:
    """Alternatives that concern no region in common, together."""
    concerned = {
        one: {region.name for region in laid_out.regions if not {*one.names}.isdisjoint((*region.inputs, *region.outputs))} for one in alternatives
    }
    batches: list[list[Alternative]] = []
    for one in alternatives:
        free = (batch for batch in batches if all(concerned[one].isdisjoint(concerned[other]) for other in batch))
        batch = next(free, None)
        if batch is None:
            batches.append([one])
        else:
            batch.append(one)
    return batches


def groups(alternatives: Sequence[Alternative], before: LaidOut, after: LaidOut) -> list[Group]:
    """The alternatives that distinguish two partitions, with the regions that each of them changes: directly, or through values whose order follows.
    Alternatives that change nothing have no group."""
    was, becomes = ({region.name: _stored(region, laid_out) for region in laid_out.regions} for laid_out in (before, after))
    differing = {name for name in {**was, **becomes} if was.get(name) != becomes.get(name)}
    changed = [[region for region in laid_out.regions if region.name in differing] for laid_out in (before, after)]
    names = {name for one in alternatives for name in one.names}
    names |= {name for name in {**before.layouts, **after.layouts} if _as_stored(name, before) != _as_stored(name, after)}
    leader = {name: name for name in names}

    def root(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    def concerned(region: Region) -> list[str]:
        return [root(name) for name in (*region.inputs, *region.outputs) if name in names]

    for some in (*(one.names for one in alternatives), *(concerned(region) for way in changed for region in way)):
        first, *others = [root(name) for name in some] or [""]
        leader.update(dict.fromkeys(others, first))
    together: dict[str, list[Alternative]] = {}
    for one in alternatives:
        together.setdefault(root(one.value), []).append(one)
    found = [
        Group(tuple(some), *(tuple(region for region in way if head in concerned(region)) for way in changed)) for head, some in together.items()
    ]
    return [group for group in found if group.after]


def _stored(region: Region, laid_out: LaidOut) -> object:
    """What distinguishes the problems of regions of one name."""
    names = (*region.inputs, *region.outputs)
    return region.steps, names, [_as_stored(name, laid_out) for name in names]


def _as_stored(name: str, laid_out: LaidOut) -> object:
    """The layout and type in which a value is stored; None if it is not."""
    return (laid_out.layouts.get(name), laid_out.values[name].dtype) if name in laid_out.values else None


def told(laid_out: LaidOut, decisions: Mapping[Alternative, Judged]) -> LaidOut:
    """The partition with the decisions, which the regions state that store the values, or that read the inputs."""
    notes: dict[str, list[str]] = {}
    considered = []
    for one, judged in decisions.items():
        text = f"{one.value} is {'' if judged.taken else 'not '}{one.told}: {judged.times}"
        considered.append(MergeDecision((one.value,), judged.taken, text, STORAGE))
        storing = [region.name for region in laid_out.regions if not {*one.names}.isdisjoint(region.outputs)]
        reading = [region.name for region in laid_out.regions if one.value in region.inputs]
        for name in (storing or reading)[:1]:
            notes.setdefault(name, []).append(text)
    regions = tuple(replace(region, reasons=(*region.reasons, *notes.get(region.name, ()))) for region in laid_out.regions)
    return replace(laid_out, regions=regions, considered=(*laid_out.considered, *considered))
