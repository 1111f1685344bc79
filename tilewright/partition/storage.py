"""In which type values are stored between kernels: as the graph says, or (precision "bf16") float32 values in bfloat16.

What enters and leaves the model, constants, and what PyTorch nodes and loops read or write keep their types. Kernels compute in float32 either way:
a load from a bfloat16 buffer is widened, a store to it rounded.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from tilewright.errors import UnsupportedOption
from tilewright.graph.contraction import anchor
from tilewright.hardware.machine import Machine
from tilewright.ir.expr import Load
from tilewright.ir.graph import Graph
from tilewright.ir.layout import Layout
from tilewright.partition.layouts import LaidOut

PRECISIONS = ("fp32", "bf16")
BFLOAT16_ISA = ("amx_tile", "amx_bf16", "avx512_bf16")


def check_precision(precision: str, machine: Machine) -> None:
    """Raises UnsupportedOption where there is no such precision, or the machine has no instructions for it."""
    if precision not in PRECISIONS:
        raise UnsupportedOption(f"precision {precision!r} is not supported yet", 'use precision="fp32" or, on a CPU with AMX, "bf16"')
    missing = [name for name in BFLOAT16_ISA if name not in machine.isa]
    if precision == "bf16" and missing:
        what = "a GPU, and only kernels for CPUs are made in it" if machine.is_gpu else f"a CPU without {', '.join(missing)}"
        raise UnsupportedOption(f"precision 'bf16' needs AMX, and {machine.name} is {what}", 'use precision="fp32"')


def in_bfloat16(graph: Graph, laid_out: LaidOut) -> LaidOut:
    """The same with the float32 values between generated kernels stored in bfloat16. One that a contraction sums along its innermost, odd extent
    gets a border of one zero there, so that pairs of neighbours are whole."""
    fixed = {*graph.inputs, *graph.outputs, *graph.constants}
    for region in laid_out.regions:
        if region.kind in ("torch", "scan"):
            fixed |= {*region.inputs, *region.outputs}
    stored = {output for region in laid_out.regions for output in region.outputs} - fixed
    narrowed = {name for name in stored if laid_out.values[name].dtype == "f32"}
    values = {name: replace(value, dtype="bf16") if name in narrowed else value for name, value in laid_out.values.items()}
    layouts = dict(laid_out.layouts)
    for region in laid_out.regions:
        found = anchor(region.steps, frozenset(graph.constants)) if region.kind == "contraction" else None
        if found is not None and isinstance(found.a, Load) and found.a.buffer in narrowed:
            layouts[found.a.buffer] = _in_pairs(layouts[found.a.buffer], found.a, frozenset(axis.name for axis in found.r))
    return LaidOut(laid_out.regions, MappingProxyType(values), MappingProxyType(layouts))


def _in_pairs(layout: Layout, load: Load, reduced: frozenset[str]) -> Layout:
    dim, factor = layout.order[-1]
    position = load.index[dim]
    if factor or layout.shape[dim] % 2 == 0 or layout.halo[dim] != (0, 0) or getattr(position, "name", None) not in reduced:
        return layout
    return layout.with_halo([(0, 1) if at == dim else pair for at, pair in enumerate(layout.halo)])
