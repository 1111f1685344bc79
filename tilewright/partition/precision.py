"""Types in which values are stored between kernels, decided by a precision for each value before it gets a layout.

Inputs and outputs of the model, and values that PyTorch nodes read or write keep their types, on CPUs those of loops too, and so do constants,
except for the weights of products on GPUs. Of a loop's states those that its products multiply are stored in the type of their weights
(`partition.scans`). Where 16 bits do not pay, predictions decide otherwise (`partition.type_choice`). Kernels compute in float32 where values are
16-bit floats: a load from a narrow buffer is widened, and a store to it is rounded. On CPUs loops of products load their factors one element at a
time, again for each panel of channels, so that widening there costs more than the traffic that it saves: unless products have instructions for a
16-bit type, their factors are stored in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import TypeAlias

from tilewright.codegen.intrinsics.amx import FACTOR
from tilewright.errors import UnsupportedOption
from tilewright.graph.attention import attention
from tilewright.graph.contraction import anchor
from tilewright.graph.loop_products import loop_products
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import Step
from tilewright.ir.dtypes import FLOAT32, NARROW_FLOATS, computed_in
from tilewright.ir.expr import Expr, Load, Var, cast, loads, rewrite
from tilewright.ir.graph import Graph, Value
from tilewright.ir.layout import Layout, permuted, row_major
from tilewright.ir.region import Region, readers_of
from tilewright.kernels.cpu.few_queries.space import MOST_QUERIES
from tilewright.kernels.cpu.tile_attention.form import fills_tiles, has_tiles

ElementTypes: TypeAlias = Callable[[Region, Value], str]
"""Maps a region and a value to the type in which the region wants it stored. The region stores the value, or reads it as a factor: the first of a sum
of products, keys or values of attention. The given value has its type in the graph."""


@dataclass(frozen=True)
class Precision:
    """stored: the type of each value between kernels; where all readers of a factor want another type than the region that stores it, theirs.
    whole_rows: row reductions may join the contraction before them; False for tile registers, which cannot hold whole rows.
    attention: products with a softmax between them may become one region, whose products are in float32.
    both: second factors of products are stored as `stored` says too, float32 constants among them; otherwise kernels read them as they are. So are
    the weights of loops, and what loops read and write.
    by_region: whether predictions decide which regions have other factors than `stored` says (`partition.type_choice`)."""

    stored: ElementTypes
    whole_rows: bool = True
    attention: bool = True
    both: bool = False
    by_region: bool = False

    def factors(self, region: Region, constants: frozenset[str]) -> tuple[str, ...]:
        """The values that the region wants in a type of its own: those that its products load one element at a time, not the keys and values of few
        queries, which are loaded as vectors."""
        read: Sequence[Load] = ()
        if region.kind == "contraction" and (product := anchor(region.steps, constants)) is not None:
            read = (*loads(product.a), product.b) if self.both else loads(product.a)
        elif region.kind == "attention" and (found := attention(region.steps)) is not None:
            if prod(axis.extent or 0 for axis in found.m) <= MOST_QUERIES:
                return ()
            read = (*loads(found.k), *loads(found.v))
        elif region.kind == "loop" and self.both:
            return tuple(dict.fromkeys(product.weight for product in loop_products(region.nodes[0]) if product.weight in constants))
        return tuple(dict.fromkeys(load.buffer for load in read if self.both or load.buffer not in constants))

    def except_for(self, results: frozenset[str]) -> Precision:
        """The precision, but the regions with these results want factors in the types that they have in the graph."""
        if not results:
            return self

        def stored(region: Region, value: Value) -> str:
            factor = value.name not in region.outputs
            return value.dtype if factor and not results.isdisjoint(region.outputs) else self.stored(region, value)

        return replace(self, stored=stored)


def _as_computed(region: Region, value: Value) -> str:
    return value.dtype


def _in(dtype: str) -> ElementTypes:
    return lambda region, value: dtype if value.dtype == FLOAT32 else value.dtype


def _multiplied_in_float32(region: Region, value: Value) -> str:
    return value.dtype if value.name in region.outputs else computed_in(value.dtype)


def _multiplied_in_bfloat16(tiles: bool) -> ElementTypes:
    """With tile registers (`tiles`) those of attention too, where they suit it; vectors multiply its factors in float32."""

    def stored(region: Region, value: Value) -> str:
        found = attention(region.steps) if region.kind == "attention" else None
        narrow = region.kind != "attention" or tiles and found is not None and fills_tiles(found)
        return value.dtype if value.dtype == FACTOR and narrow else _multiplied_in_float32(region, value)

    return stored


AS_COMPUTED = Precision(_as_computed)
PRECISIONS = ("fp32", "fp32-tensor", "fp32-tensor-fp16", "tf32", "fp16", "bf16")
NARROW = MappingProxyType({"fp16": "f16", "bf16": "bf16"})
"""The types in which values are stored, by precision."""
FP32 = 'use precision="fp32"'
BFLOAT16_ISA = ("avx512_bf16",)
"""Products of bfloat16 in vectors; every processor with tile registers has them too."""


def precision_of(name: str, graph: Graph, machine: Machine) -> Precision:
    """The precision of this name for a graph. Raises UnsupportedOption like `check_precision`."""
    check_precision(name, machine)
    if name in NARROW:
        stored = _in(NARROW[name])
        return Precision(stored, both=True, by_region=True) if machine.is_gpu else Precision(stored, whole_rows=False, attention=False)
    types = {value.dtype for value in graph.values.values()}
    if machine.is_gpu or not types & NARROW_FLOATS:
        return AS_COMPUTED
    if FACTOR in types and set(BFLOAT16_ISA) <= set(machine.isa):
        return Precision(_multiplied_in_bfloat16(has_tiles(machine)), whole_rows=False)
    return Precision(_multiplied_in_float32)


def check_precision(precision: str, machine: Machine | None = None) -> None:
    """Raises UnsupportedOption if there is no such precision, or the machine has no instructions for it."""
    if precision not in PRECISIONS:
        raise UnsupportedOption(f"precision {precision!r} is not supported", f"use one of {', '.join(PRECISIONS)}")
    if machine is None or precision == "fp32":
        return
    if machine.is_gpu:
        if precision not in NARROW and not machine.has("sm_80"):
            lacks = f"needs the tensor cores of sm_80 or newer, and {machine.name} is {machine.architecture}"
            raise UnsupportedOption(f"precision {precision!r} {lacks}", FP32)
        return
    if precision != "bf16":
        raise UnsupportedOption(f"precision {precision!r} is for GPUs, and {machine.name} is a CPU", FP32)
    missing = [name for name in BFLOAT16_ISA if name not in machine.isa]
    if missing:
        raise UnsupportedOption(f"precision 'bf16' needs AVX512-BF16, and {machine.name} is a CPU without {', '.join(missing)}", FP32)


def with_types(
    regions: Sequence[Region],
    values: Mapping[str, Value],
    fixed: set[str],
    constants: frozenset[str],
    precision: Precision,
    rounding: frozenset[str] = frozenset(),
) -> tuple[list[Region], dict[str, Value], dict[str, Layout]]:
    """The regions, the values with the types in which they are stored, and the layouts of copies. `fixed` values keep their types. A region that has
    a factor stored in another type than it wants reads a copy; the copy's region comes before it, and that of a first factor is contiguous along the
    summed dimension. The regions with results in `rounding` round such first factors where they read them instead. A constant is stored in the type
    that products want instead, unless a node of PyTorch's or a loop reads it too, other than as the weight of a product."""
    wanted: dict[str, set[str]] = {}
    for region in regions:
        for name in precision.factors(region, constants):
            wanted.setdefault(name, set()).add(precision.stored(region, values[name]))
    typed, result = dict(values), list[Region]()
    outside = {name for region in regions if region.kind in ("torch", "loop") for name in {*region.inputs} - {*precision.factors(region, constants)}}
    for name, types in wanted.items():
        if name in constants - outside and len(types) == 1:
            typed[name] = replace(typed[name], dtype=next(iter(types)))
    layouts: dict[str, Layout] = {}
    scores = _scores(regions, values)

    def copy_of(name: str, dtype: str, region: Region) -> str:
        copy = f"{name}.{dtype}"
        if copy not in typed:
            value = values[name]
            typed[copy] = replace(value, name=copy, dtype=dtype)
            layouts[copy] = _along_the_sum(region, name, value, constants) if region.kind == "contraction" else row_major(value.shape)
            axes = tuple(Var(f"i{dim}", extent) for dim, extent in enumerate(value.shape))
            step = Step(copy, value.shape, axes, (Load(name, axes, computed_in(value.dtype)),))
            kept = "keeps its type" if name in fixed else f"is stored as {typed[name].dtype}"
            why = f"{dtype}: {name} {kept}, and is copied once for the products that read it"
            result.append(Region(copy, "map", (), (step,), (name,), (copy,), (why,)))
        return copy

    for region in regions:
        for name in precision.factors(region, constants):
            own = precision.stored(region, values[name])
            if own == typed[name].dtype or region.kind == "loop":  # a loop that wants another type than others of its weights takes theirs
                continue
            if not rounding.isdisjoint(region.outputs) and own in NARROW_FLOATS and rounds(region, name, constants):
                region = _rounding(region, name, own)
            else:
                region = reading(region, name, copy_of(name, own, region))
        for name in region.outputs:
            if name not in fixed:
                own = computed_in(values[name].dtype) if name in scores else precision.stored(region, values[name])
                others = wanted.get(name, set())
                typed[name] = replace(typed[name], dtype=next(iter(others)) if len(others) == 1 else own)
        result.append(region)
    return result, typed, layouts


def _scores(regions: Sequence[Region], values: Mapping[str, Value]) -> set[str]:
    """Results of matrix products in float16 that only softmax reads. Between kernels they are float32, as they are where attention is one kernel:
    float16 ends at 65,504, and a softmax of infinity is NaN. Products of single rows are no contractions, but windows."""
    products = [region for region in regions if region.kind in ("contraction", "window") and any(node.operator == "matmul" for node in region.nodes)]
    made = {name for region in products for name in region.outputs if values[name].dtype == "f16"}
    readers = readers_of(regions)
    return {name for name in made & readers.keys() if all(map(_is_softmax, readers[name]))}


def _is_softmax(region: Region) -> bool:
    return region.kind == "row reduction" and any(node.operator in ("softmax", "safe_softmax") for node in region.nodes)


def rounds(region: Region, name: str, constants: frozenset[str]) -> bool:
    """Whether the region can round the value where it reads it: in the first factor of a sum of products alone."""
    found = anchor(region.steps, constants) if region.kind == "contraction" else None
    return found is not None and found.b.buffer != name and any(load.buffer == name for load in loads(found.a))


def _rounding(region: Region, name: str, dtype: str) -> Region:
    """The region, whose sum of products rounds what it reads of the value to the type."""

    def rounded(node: Expr) -> Expr:
        return cast(cast(node, dtype), node.dtype) if isinstance(node, Load) and node.buffer == name else node

    first, *others = region.steps
    return replace(region, steps=(replace(first, bodies=tuple(rewrite(body, rounded) for body in first.bodies)), *others))


def _along_the_sum(region: Region, name: str, value: Value, constants: frozenset[str]) -> Layout:
    """The layout of the value with the dimension that the region sums over innermost, the largest if there are several; row-major for a second
    factor."""
    found = anchor(region.steps, constants)
    assert found is not None
    load = next((load for load in loads(found.a) if load.buffer == name), None)
    if load is None:
        return row_major(value.shape)
    dims = range(len(value.shape))
    summed = max((dim for dim in dims if load.index[dim] in found.r), key=lambda dim: value.shape[dim], default=dims[-1])
    return permuted(value.shape, [*(dim for dim in dims if dim != summed), summed])


def reading(region: Region, name: str, copy: str, all_steps: bool = False) -> Region:
    """The region with its anchor, or all of attention, reading `copy` instead of `name`; or with `all_steps` doing so."""

    def renamed(node: Expr) -> Expr:
        return replace(node, buffer=copy) if isinstance(node, Load) and node.buffer == name else node

    anchors = len(region.steps) if all_steps or region.kind == "attention" else 1
    moved = (replace(step, bodies=tuple(rewrite(body, renamed) for body in step.bodies)) for step in region.steps[:anchors])
    steps = (*moved, *region.steps[anchors:])
    still = any(load.buffer == name for step in steps for load in loads(*step.bodies))
    inputs = tuple(dict.fromkeys([*(i for i in region.inputs if i != name or still), copy]))
    return replace(region, steps=steps, inputs=inputs)
