"""In which type values are stored between kernels: as the graph says, or (precision "bf16") float32 values in bfloat16.

What enters and leaves the model, constants, and what PyTorch nodes and loops read or write keep their types. Kernels compute in float32 either way:
a load from a bfloat16 buffer is widened, a store to it rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.errors import UnsupportedOption
from tilewright.graph.contraction import Contraction, anchor
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import Step
from tilewright.ir.dtypes import FLOAT32
from tilewright.ir.expr import Load, Var, loads
from tilewright.ir.graph import Graph, Value
from tilewright.ir.layout import Layout, permuted
from tilewright.ir.region import Region
from tilewright.partition.layouts import LaidOut, fixed_values, reading

PRECISIONS = ("fp32", "bf16")
BFLOAT16_ISA = ("amx_tile", "amx_bf16", "avx512_bf16")


def check_precision(precision: str, machine: Machine | None = None) -> None:
    """Raises UnsupportedOption where there is no such precision, or the machine has no instructions for it."""
    if precision not in PRECISIONS:
        raise UnsupportedOption(f"precision {precision!r} is not supported yet", 'use precision="fp32", or "bf16" on a CPU with AMX')
    if machine is None or precision == "fp32":
        return
    missing = [name for name in BFLOAT16_ISA if name not in machine.isa]
    if missing:
        what = "a GPU, and only kernels for CPUs are made in it" if machine.is_gpu else f"a CPU without {', '.join(missing)}"
        raise UnsupportedOption(f"precision 'bf16' needs AMX, and {machine.name} is {what}", 'use precision="fp32"')


def in_bfloat16(graph: Graph, laid_out: LaidOut) -> LaidOut:
    """The same with the float32 values between generated kernels stored in bfloat16.

    A contraction whose first factor keeps its type reads a copy of it. A value that a contraction sums along its innermost, odd extent gets a border
    of one zero there, so that pairs of neighbours are whole."""
    constants = frozenset(graph.constants)
    fixed = fixed_values(graph, laid_out.regions)
    copied = _with_copies(laid_out, fixed, constants)
    stored = {output for region in copied.regions for output in region.outputs} - fixed
    narrowed = {name for name in stored if copied.values[name].dtype == FLOAT32}
    values = {name: replace(value, dtype="bf16") if name in narrowed else value for name, value in copied.values.items()}
    layouts = dict(copied.layouts)
    for found in _contractions(copied.regions, constants):
        for load in loads(found.a):
            if load.buffer in narrowed:
                layouts[load.buffer] = _in_pairs(layouts[load.buffer], load, found.r)
    return LaidOut(copied.regions, MappingProxyType(values), MappingProxyType(layouts))


def _contractions(regions: Sequence[Region], constants: frozenset[str]) -> list[Contraction]:
    found = [anchor(region.steps, constants) for region in regions if region.kind == "contraction"]
    return [contraction for contraction in found if contraction is not None]


def _with_copies(laid_out: LaidOut, fixed: set[str], constants: frozenset[str]) -> LaidOut:
    """With copies of the fixed float32 values that are first factors, each once, adjacent along what is summed first."""
    values, layouts = dict(laid_out.values), dict(laid_out.layouts)
    regions: list[Region] = []
    for region in laid_out.regions:
        for found in _contractions([region], constants):
            for load in {load.buffer: load for load in loads(found.a)}.values():
                name, copy = load.buffer, f"{load.buffer}.bf16"
                if name not in fixed or name in constants or values[name].dtype != FLOAT32:
                    continue
                if copy not in values:
                    shape = values[name].shape
                    values[copy] = Value(copy, shape, FLOAT32)
                    summed = max((dim for dim, i in enumerate(load.index) if i in found.r), key=lambda dim: shape[dim], default=len(shape) - 1)
                    layouts[copy] = permuted(shape, [*(dim for dim in range(len(shape)) if dim != summed), summed])
                    axes = tuple(Var(f"i{dim}", extent) for dim, extent in enumerate(shape))
                    step = Step(copy, shape, axes, (Load(name, axes, FLOAT32),))
                    why = f"bf16: {name} keeps its type, and is copied once for the products that read it"
                    regions.append(Region(copy, "map", (), (step,), (name,), (copy,), (why,)))
                region = reading(region, name, copy)
        regions.append(region)
    return LaidOut(tuple(regions), MappingProxyType(values), MappingProxyType(layouts))


def _in_pairs(layout: Layout, load: Load, reduced: Sequence[Var]) -> Layout:
    dim, factor = layout.order[-1]
    if factor or layout.shape[dim] % 2 == 0 or layout.halo[dim] != (0, 0) or load.index[dim] not in reduced:
        return layout
    return layout.with_halo([(0, 1) if at == dim else pair for at, pair in enumerate(layout.halo)])
