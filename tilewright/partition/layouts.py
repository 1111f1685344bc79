"""Layouts of stored values: channels innermost for convolutions, zeroed halos that avoid padding checks, and copies where needed.

Rules, in execution order: inputs and outputs of the model are row-major, as PyTorch passes them; a contraction stores its N axis (output channels)
innermost; what maps read in vectors of channels, at positions that are data, is stored channels last; everything else is stored in the order in which
it reads the largest input of its rank. A value that sums read with zero padding gets a halo as wide as they need; a graph input or other value that
cannot have one is copied once into a padded buffer, channels last unless all its readers are windows with row-major results. Folded images
(`partition.folded_images`) are row-major. Values that are concatenated are stored as slices of one buffer (`partition.concatenation`). Types of
values are decided earlier (`partition.precision`). Where another way of storing is predicted to be faster (`partition.layout_choice`), `Storing` says
so instead of these rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from tilewright.codegen.access import needed_halo
from tilewright.graph.contraction import anchor
from tilewright.graph.operators.shape import SPACE_TO_DEPTH
from tilewright.ir.computation import Step
from tilewright.ir.dtypes import NARROW_FLOATS, computed_in
from tilewright.ir.expr import Load, Var, loads, variables
from tilewright.ir.graph import Graph, Value
from tilewright.ir.layout import Layout, channels_last, permuted, row_major
from tilewright.ir.region import MergeDecision, Region
from tilewright.partition.concatenation import Slice, concatenations, in_place, order_of, with_slices
from tilewright.partition.fusion import Partition
from tilewright.partition.precision import AS_COMPUTED, Precision, reading, with_types


@dataclass(frozen=True)
class LaidOut:
    """A partition with a layout for every stored value. `slices` maps values to their places in the buffers of others; `considered`: see
    `fusion.Partition`."""

    regions: tuple[Region, ...]
    values: Mapping[str, Value]
    layouts: Mapping[str, Layout]
    slices: Mapping[str, Slice] = field(default_factory=lambda: MappingProxyType({}))
    considered: tuple[MergeDecision, ...] = ()

    def with_layouts(self, layouts: Mapping[str, Layout]) -> LaidOut:
        """The partition with other layouts; those of slices follow from their buffers'."""
        return replace(self, layouts=MappingProxyType(with_slices(layouts, self.slices)))


@dataclass(frozen=True)
class Storing:
    """How some values are stored, instead of by the rules. `orders`: their dimensions, outermost first. `guarded`: values whose readers compare
    bounds, so that they need neither a halo nor a copy. `apart`: inputs of the model that sums read from a copy also where nothing is padded, and
    results of the model that are stored as any other value, for all that read them, and then copied. `wide`: results of regions whose factors are
    stored in the types that they have in the graph, whatever the precision. `rounding`: results of contractions that round a factor of another type
    where they read it, instead of reading a copy."""

    orders: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    guarded: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()
    wide: frozenset[str] = frozenset()
    rounding: frozenset[str] = frozenset()

    def __or__(self, other: Storing) -> Storing:
        orders = MappingProxyType({**self.orders, **other.orders})
        return Storing(
            orders, self.guarded | other.guarded, self.apart | other.apart, self.wide | other.wide, self.rounding | other.rounding
        )  # fmt: skip


BY_RULE = Storing()
PADDED, STORED = ".padded", ".stored"
"""Suffixes of the copies of values that cannot have a halo, and of what results of the model are copied from."""


def in_graph(name: str) -> str:
    """The value of the graph that a stored value is: a result of the model, if that is copied from it."""
    return name.removesuffix(STORED)


def assign_layouts(
    graph: Graph, partition: Partition, precision: Precision = AS_COMPUTED, slices: bool = True, storing: Storing = BY_RULE
) -> LaidOut:
    """Assigns every stored value its type and then its layout, inserts the copies that padding, types and `storing` require, and removes those of
    concatenations, unless `slices` is False."""
    constants, fixed = frozenset(graph.constants), fixed_values(graph, partition.regions)
    stored, values = _results_apart(partition.regions, dict(partition.values), storing)
    padded, values, copies = _pad_by_copy(stored, values, fixed, storing)
    exact = _exact_values(graph, partition.regions) if precision.both else fixed
    exact = exact | {name + STORED for name in storing.apart}  # what results are copied from is as exact as they are
    regions, values, converted = with_types(padded, values, exact, constants, precision.except_for(storing.wide), storing.rounding)
    joined = concatenations(regions, values) if slices else {}
    sampled = {name for region in regions for name in _sampled(region)}
    folded = {node.outputs[0] for node in graph.nodes if node.operator == SPACE_TO_DEPTH}
    layouts: dict[str, Layout] = {name: row_major(values[name].shape) for name in (*graph.inputs, *graph.constants)}
    for region in regions:
        for output in region.outputs:
            shape = values[output].shape
            if output in fixed or output in folded:
                layouts[output] = row_major(shape)
            elif output in converted:
                layouts[output] = converted[output]
            elif output in storing.orders:
                layouts[output] = permuted(shape, storing.orders[output])
            elif output in copies:
                layouts[output] = row_major(shape) if _along_rows(output, regions, fixed) else channels_last(shape)
            elif output in joined and (order := order_of(joined[output], layouts, fixed)) is not None:
                layouts[output] = Layout(shape, order)
            elif output in sampled and region.kind != "contraction":
                layouts[output] = channels_last(shape)
            else:
                layouts[output] = preferred(region, values[output], layouts, graph)
    for name, halo in _halos(regions, values).items():
        if name not in fixed and name not in storing.guarded:
            layouts[name] = layouts[name].with_halo(halo)
    for region in regions:
        found = anchor(region.steps, constants) if region.kind == "contraction" else None
        for load in loads(found.a) if found is not None else ():
            if found is not None and load.buffer not in fixed and values[load.buffer].dtype in NARROW_FLOATS:
                layouts[load.buffer] = _in_pairs(layouts[load.buffer], load, found.r)
    why = {name: _why_fixed(name, graph) for name in fixed}
    regions, places = in_place(regions, joined, values, layouts, why, _as_passed(graph, regions))
    return LaidOut(tuple(regions), MappingProxyType(values), layouts, MappingProxyType(places), partition.considered).with_layouts(layouts)


def fixed_values(graph: Graph, regions: Sequence[Region]) -> set[str]:
    """Values whose storage cannot be chosen: inputs and outputs of the model, constants, and values that PyTorch nodes and loops read or write."""
    fixed = {*graph.inputs, *graph.outputs, *graph.constants}
    for region in regions:
        if region.kind in ("torch", "loop"):
            fixed |= {*region.inputs, *region.outputs}
    return fixed


def _exact_values(graph: Graph, regions: Sequence[Region]) -> set[str]:
    """Values that keep their types although loops may read and write others: inputs and outputs of the model, constants, and what PyTorch nodes read
    or write."""
    outside = {name for region in regions if region.kind == "torch" for name in (*region.inputs, *region.outputs)}
    return {*graph.inputs, *graph.outputs, *graph.constants, *outside}


def _as_passed(graph: Graph, regions: Sequence[Region]) -> frozenset[str]:
    """Results of the model that no loop and no node of PyTorch's accesses: other regions may store parts of them."""
    others = {name for region in regions if region.kind in ("torch", "loop") for name in (*region.inputs, *region.outputs)}
    return frozenset({*graph.outputs} - {*graph.inputs, *graph.constants, *others})


def _why_fixed(name: str, graph: Graph) -> str:
    for names, what in ((graph.inputs, "an input"), (graph.constants, "a constant"), (graph.outputs, "a result")):
        if name in names:
            return f"{name} is {what} of the model, whose storage cannot be chosen"
    return f"PyTorch or a loop reads or writes {name}"


def _along_rows(name: str, regions: Sequence[Region], fixed: set[str]) -> bool:
    """Whether only windows whose results are row-major read the value: their vectors then lie along rows of the image, not along channels."""
    return all(region.kind == "window" and fixed.issuperset(region.outputs) for region in regions if name in region.inputs)


def _in_pairs(layout: Layout, load: Load, reduced: Sequence[Var]) -> Layout:
    """Adds a border of one zero after an odd innermost extent that is summed: instructions on narrow floats read adjacent elements in pairs."""
    dim, factor = layout.order[-1]
    if factor or layout.shape[dim] % 2 == 0 or layout.halo[dim] != (0, 0) or load.index[dim] not in reduced:
        return layout
    return layout.with_halo([(0, 1) if at == dim else pair for at, pair in enumerate(layout.halo)])


def _sampled(region: Region) -> set[str]:
    """Values of which a map reads the second dimension alone along its innermost axis, at positions of later dimensions that are data."""
    if region.kind != "map" or not region.steps[0].axes:
        return set()

    def in_vectors(load: Load) -> bool:
        moving = [dim for dim, position in enumerate(load.index) if region.steps[0].axes[-1] in variables(position)]
        return moving == [1] and any(loads(position) for position in load.index[2:])

    return {load.buffer for load in loads(*region.steps[0].bodies) if in_vectors(load)}


def preferred(region: Region, value: Value, layouts: Mapping[str, Layout], graph: Graph) -> Layout:
    """How the region that computes a value would store it, whose inputs have these layouts."""
    if region.kind == "contraction":
        found = anchor(region.steps, frozenset(graph.constants))
        assert found is not None
        innermost = [dim for dim, position in enumerate(region.steps[-1].index) if found.n[-1] in variables(position)]
        rest = [dim for dim in range(len(value.shape)) if dim not in innermost]
        return permuted(value.shape, (*rest, *innermost))
    sources = [
        name
        for name in region.inputs
        if name in layouts and name not in graph.constants and len(layouts[name].shape) == len(value.shape) and len(value.shape) > 2
    ]
    if not sources:
        return row_major(value.shape)
    largest = max(sources, key=lambda name: layouts[name].size)
    return Layout(value.shape, _order_as_read(region.steps, largest, layouts[largest]))


def _order_as_read(steps: Sequence[Step], name: str, layout: Layout) -> tuple[tuple[int, int], ...]:
    """The order of the result's dimensions in memory in which reading the value is sequential: that of the value if it is not permuted."""
    for step in reversed(steps):
        for load in loads(*step.bodies):
            if load.buffer != name or len(step.index) != len(load.index):
                continue
            stored = {axis: dim for dim, axis in enumerate(step.index) if isinstance(axis, Var)}
            places = [[stored[axis] for axis in variables(position) if axis in stored] for position in load.index]
            if sorted(dim for found in places for dim in found) == list(range(len(places))) and all(len(found) == 1 for found in places):
                return tuple((places[dim][0], factor) for dim, factor in layout.order)
    return layout.order


def _padded_reads(region: Region, values: Mapping[str, Value]) -> dict[str, tuple[tuple[int, int], ...] | None]:
    """Values that the region's sum reads under zero guards, with the halo that makes the guards unnecessary."""
    if region.kind not in ("contraction", "window") or region.steps[0].combiner != "sum":
        return {}
    body = region.steps[0].bodies[0]
    result: dict[str, tuple[tuple[int, int], ...] | None] = {}
    for name in dict.fromkeys(load.buffer for load in loads(body)):
        halo = needed_halo(body, name, values[name].shape)
        if halo is not None:
            result[name] = halo
    return result


def _halos(regions: list[Region], values: Mapping[str, Value]) -> dict[str, tuple[tuple[int, int], ...]]:
    result: dict[str, tuple[tuple[int, int], ...]] = {}
    for region in regions:
        for name, halo in _padded_reads(region, values).items():
            if halo is None:
                continue
            known = result.get(name, ((0, 0),) * len(halo))
            result[name] = tuple((max(a, c), max(b, d)) for (a, b), (c, d) in zip(known, halo, strict=True))
    return result


def _results_apart(regions: Sequence[Region], values: dict[str, Value], storing: Storing) -> tuple[list[Region], dict[str, Value]]:
    """Stores the results of the model that are to be apart as values of their own, which every other region reads, and copies them."""
    result: list[Region] = []
    for region in regions:
        if not region.steps:  # loops and nodes of PyTorch's read values by the names in the graph
            result.append(region)
            continue
        for name in region.inputs:
            if name in storing.apart and name + STORED in values:
                region = reading(region, name, name + STORED, all_steps=True)
        if storing.apart.isdisjoint(region.outputs):
            result.append(region)
            continue
        (name,) = region.outputs
        own = name + STORED
        values[own] = replace(values[name], name=own)
        result.append(replace(region, name=own, outputs=(own,), steps=(*region.steps[:-1], replace(region.steps[-1], name=own))))
        result.append(_copy(name, values[own], f"{name} is a result of the model, and copied from {own}"))
    return result, values


def _copy(name: str, source: Value, why: str) -> Region:
    """The region that stores a copy of a value under another name."""
    axes = tuple(Var(f"i{i}", extent) for i, extent in enumerate(source.shape))
    step = Step(name, source.shape, axes, (Load(source.name, axes, computed_in(source.dtype)),))
    return Region(name, "map", (), (step,), (source.name,), (name,), (why,))


def _pad_by_copy(
    regions: Sequence[Region], values: dict[str, Value], fixed: set[str], storing: Storing
) -> tuple[list[Region], dict[str, Value], frozenset[str]]:
    """Lets padded readers of a value that cannot have a halo, and all sums over inputs that are to be apart, read a copy that can. Returns the
    regions, the values, and the names of the copies."""
    copies: dict[str, str] = {}
    result: list[Region] = []
    for region in regions:
        halos = _padded_reads(region, values)
        padded = [name for name, halo in halos.items() if halo is not None and name in fixed and name not in storing.guarded]
        others = [load.buffer for load in loads(*region.steps[0].bodies)] if region.kind in ("contraction", "window") else []
        for name in dict.fromkeys((*padded, *(name for name in others if name in storing.apart and name in fixed))):
            if name not in copies:
                copies[name] = name + PADDED
                values[copies[name]] = replace(values[name], name=copies[name])
                why = f"padding: {name} is copied once, with a zeroed border, so that no tile checks bounds"
                result.append(_copy(copies[name], values[name], why if name in padded else f"{name} is copied once for the sums that read it"))
            region = reading(region, name, copies[name])
        result.append(region)
    return result, values, frozenset(copies.values())
