"""Types in which values are stored between kernels, decided by a precision for each value before it gets a layout.

Inputs and outputs of the model, constants, and values that PyTorch nodes and loops read or write keep their types. Kernels always compute in the
graph's types: a load from a narrow buffer is widened, and a store to it is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

from tilewright.errors import UnsupportedOption
from tilewright.graph.contraction import anchor
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import Step
from tilewright.ir.dtypes import FLOAT32
from tilewright.ir.expr import Expr, Load, Var, loads, rewrite
from tilewright.ir.graph import Value
from tilewright.ir.layout import Layout, permuted
from tilewright.ir.region import Region

ElementTypes: TypeAlias = Callable[[Region, Value], str]
"""Maps a region and a value to the type in which the region wants it stored. The region stores the value, or reads it as the first factor of a sum of
products. The given value has the type in which the graph computes it."""


@dataclass(frozen=True)
class Precision:
    """stored: the type of each value between kernels.
    whole_rows: row reductions may join the contraction before them; False for tile registers, which cannot hold whole rows."""

    stored: ElementTypes
    whole_rows: bool = True


def _as_computed(region: Region, value: Value) -> str:
    return value.dtype


def _in_bfloat16(region: Region, value: Value) -> str:
    return "bf16" if value.dtype == FLOAT32 else value.dtype


AS_COMPUTED = Precision(_as_computed)
PRECISIONS: Mapping[str, Precision] = MappingProxyType({"fp32": AS_COMPUTED, "bf16": Precision(_in_bfloat16, whole_rows=False)})
BFLOAT16_ISA = ("amx_tile", "amx_bf16", "avx512_bf16")


def check_precision(precision: str, machine: Machine | None = None) -> None:
    """Raises UnsupportedOption if there is no such precision, or the machine has no instructions for it."""
    if precision not in PRECISIONS:
        raise UnsupportedOption(f"precision {precision!r} is not supported yet", 'use precision="fp32", or "bf16" on a CPU with AMX')
    if machine is None or precision == "fp32":
        return
    missing = [name for name in BFLOAT16_ISA if name not in machine.isa]
    if missing:
        what = "a GPU, and only kernels for CPUs are made in it" if machine.is_gpu else f"a CPU without {', '.join(missing)}"
        raise UnsupportedOption(f"precision 'bf16' needs AMX, and {machine.name} is {what}", 'use precision="fp32"')


def with_types(
    regions: Sequence[Region], values: Mapping[str, Value], fixed: set[str], constants: frozenset[str], precision: Precision
) -> tuple[list[Region], dict[str, Value], dict[str, Layout]]:
    """The regions, the values with the types in which they are stored, and the layouts of copies. `fixed` values keep their types. A contraction
    whose first factor is stored in another type than it wants reads a copy; the copy's region comes before it, and the copy is contiguous along the
    summed dimension."""
    typed, result = dict(values), list[Region]()
    layouts: dict[str, Layout] = {}

    def copy_of(name: str, dtype: str, region: Region) -> str:
        copy = f"{name}.{dtype}"
        if copy not in typed:
            value = values[name]
            typed[copy] = replace(value, name=copy, dtype=dtype)
            layouts[copy] = _along_the_sum(region, name, value, constants)
            axes = tuple(Var(f"i{dim}", extent) for dim, extent in enumerate(value.shape))
            step = Step(copy, value.shape, axes, (Load(name, axes, value.dtype),))
            kept = "keeps its type" if name in fixed else f"is stored as {typed[name].dtype}"
            why = f"{dtype}: {name} {kept}, and is copied once for the products that read it"
            result.append(Region(copy, "map", (), (step,), (name,), (copy,), (why,)))
        return copy

    for region in regions:
        found = anchor(region.steps, constants) if region.kind == "contraction" else None
        for name in dict.fromkeys(load.buffer for load in loads(found.a)) if found is not None else ():
            wanted = precision.stored(region, values[name])
            if name not in constants and wanted != typed[name].dtype:
                region = reading(region, name, copy_of(name, wanted, region))
        for name in region.outputs:
            if name not in fixed:
                typed[name] = replace(typed[name], dtype=precision.stored(region, values[name]))
        result.append(region)
    return result, typed, layouts


def _along_the_sum(region: Region, name: str, value: Value, constants: frozenset[str]) -> Layout:
    """The layout of the value with the dimension that the region sums over innermost; the largest if there are several."""
    found = anchor(region.steps, constants)
    assert found is not None
    load = next(load for load in loads(found.a) if load.buffer == name)
    dims = range(len(value.shape))
    summed = max((dim for dim in dims if load.index[dim] in found.r), key=lambda dim: value.shape[dim], default=dims[-1])
    return permuted(value.shape, [*(dim for dim in dims if dim != summed), summed])


def reading(region: Region, name: str, copy: str) -> Region:
    """The region with its anchor reading `copy` instead of `name`."""

    def renamed(node: Expr) -> Expr:
        return replace(node, buffer=copy) if isinstance(node, Load) and node.buffer == name else node

    first = region.steps[0]
    steps = (replace(first, bodies=tuple(rewrite(body, renamed) for body in first.bodies)), *region.steps[1:])
    still = any(load.buffer == name for step in steps for load in loads(*step.bodies))
    inputs = tuple(dict.fromkeys([*(i for i in region.inputs if i != name or still), copy]))
    return replace(region, steps=steps, inputs=inputs)
