"""The second factor B of a contraction, which the inner loop loads in vectors along N: packed at compile time, read in place, or copied first.

A constant is packed in panels at compile time. A computed B is read in place if its elements along N are adjacent and panels divide N; otherwise a
separate kernel copies it into panels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilewright.codegen.access import flatten
from tilewright.codegen.operand import operand_view
from tilewright.graph.contraction import Contraction
from tilewright.ir.computation import Step
from tilewright.ir.expr import Expr, Load, Var, coefficient, const, index_const, select, substitute, variables
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Kernel
from tilewright.ir.layout import Layout
from tilewright.ir.problem import Problem
from tilewright.ir.region import Call, Region, Storage
from tilewright.kernels.cpu.contraction.space import ACROSS_N, ALONG_N, CONSTANT, CpuContractionSchedule, CpuNarrowSchedule
from tilewright.kernels.cpu.loops.map import lower_map
from tilewright.kernels.cpu.loops.space import LoopSchedule


@dataclass(frozen=True)
class SecondFactor:
    """Where the kernel reads B: element `offset` of `buffer`, over the contraction's axes, stored as `dtype`. `layout` is given if the buffer is a
    new one in panels, which `kernels` and `calls` fill first (both empty for a constant)."""

    buffer: str
    offset: Expr
    dtype: str
    layout: Layout | None = None
    storage: Mapping[str, Storage] = field(default_factory=dict)
    kernels: tuple[Kernel, ...] = ()
    calls: tuple[Call, ...] = ()


def packed_panels(sizes: Sequence[int], batch: int, panel: int) -> Layout:
    """Panels of `panel` neighbouring elements of the last dimension: (batch..., last / panel, reduced..., last mod panel). `batch` counts the
    leading dimensions that stay outermost. The last dimension is padded to a multiple of the panel."""
    last = len(sizes) - 1
    order = (*((d, 0) for d in range(batch)), (last, 0), *((d, 0) for d in range(batch, last)), (last, panel))
    return Layout(tuple(sizes), order)


def how_b_lies(problem: Problem, found: Contraction, n: Var) -> str:
    """How B is stored: CONSTANT, ALONG_N or ACROSS_N."""
    if found.b.buffer in problem.constants:
        return CONSTANT
    flat = flatten(found.b, problem.layouts)
    return ALONG_N if isinstance(flat, Load) and coefficient(flat.index[0], n) == 1 else ACROSS_N


def second_factor(problem: Problem, found: Contraction, n: Var, leading: Sequence[Var], schedule: CpuContractionSchedule) -> SecondFactor:
    """B as the schedule's kernel reads it. `leading`: the axes of B other than the reduction axes and `n`, its innermost axis."""
    stored = problem.values[found.b.buffer].dtype
    dtype = stored if isinstance(schedule, CpuNarrowSchedule) else found.b.dtype
    extent, panel = n.extent or 0, schedule.panel
    if extent % panel == 0 and how_b_lies(problem, found, n) == ALONG_N:
        flat = flatten(found.b, problem.layouts)
        assert isinstance(flat, Load)
        unit_axes: dict[Var, Expr] = {axis: index_const(0) for axis in (*found.batch, *found.n) if axis.extent == 1}
        return SecondFactor(found.b.buffer, substitute(flat.index[0], unit_axes), stored)
    name = f"{found.b.buffer}@{problem.region.name}"
    axes = (*leading, *found.r, n)
    sizes = tuple(axis.extent or 0 for axis in axes)
    layout, value = packed_panels(sizes, len(leading), panel), Value(name, sizes, dtype)
    view = operand_view(found.b, problem.values[found.b.buffer].shape, axes) if found.b.buffer in problem.constants else None
    if view is not None:
        return SecondFactor(name, layout.offset(axes), dtype, layout, {name: Storage(value, layout, found.b.buffer, view)})
    number, lane = Var("panel", -(-extent // panel)), Var("lane", panel)
    place = number * panel + lane
    element = substitute(found.b, {n: place})
    if extent % panel:
        element = select(place < extent, element, const(0.0, found.b.dtype))
    step = Step(name, sizes, (*leading, number, *found.r, lane), (element,), index=(*leading, *found.r, place))
    copy = Region(name, "map", (), (step,), (found.b.buffer,), (name,))
    storage = {name: Storage(value, layout)}
    lowered = lower_map(replace(problem.with_storage(storage), region=copy), LoopSchedule(schedule.lanes))
    return SecondFactor(name, layout.offset(axes), dtype, layout, storage, lowered.kernels, lowered.calls)


def depends_on(found: Contraction, axes: Sequence[Var]) -> tuple[Var, ...]:
    """The axes that B depends on."""
    known = variables(found.b)
    return tuple(axis for axis in axes if axis in known)
