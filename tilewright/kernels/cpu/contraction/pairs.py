"""Factors of products of pairs of bfloat16 (tile registers, AVX512-BF16): steps of the reduction are taken two at a time.

A is read as it is stored, so that the innermost axes of the reduction must be adjacent in it. B is packed, with pairs of its elements innermost: at
compile time if it is constant, otherwise by a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from tilewright.codegen.access import storage_order
from tilewright.codegen.intrinsics import pairs
from tilewright.codegen.intrinsics.amx import FACTOR
from tilewright.codegen.operand import operand_view
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import Step
from tilewright.ir.expr import Expr, Load, Var, coefficient, linear
from tilewright.ir.graph import Value
from tilewright.ir.layout import Layout
from tilewright.ir.problem import Problem
from tilewright.ir.region import Region, Storage, Unsuitable
from tilewright.kernels.cpu.contraction.nest import Nest
from tilewright.kernels.cpu.contraction.second_factor import SecondFactor
from tilewright.kernels.cpu.loops.map import lower_map
from tilewright.kernels.cpu.loops.space import LoopSchedule


@dataclass(frozen=True)
class PairedNest:
    """A contraction whose factor A is stored in bfloat16 at the flat offset `at` of `source`. Of its reduction axes in the order of storage,
    `ordered`, the innermost ones make up `depth` adjacent elements, an even number; `reduced` are the others."""

    nest: Nest
    source: str
    at: Expr
    ordered: tuple[Var, ...]
    reduced: tuple[Var, ...]
    depth: int

    @property
    def steps(self) -> int:
        """Pairs that a sum adds."""
        return prod(axis.extent or 0 for axis in self.reduced) * self.depth // 2


def paired(problem: Problem, nest: Nest, machine: Machine) -> PairedNest:
    """The nest with what products of pairs need.

    Raises:
        Unsuitable: if the machine has no AVX512-BF16, or A is not stored in bfloat16 or not adjacent along the reduction.
    """
    if not set(pairs.REQUIRES) <= set(machine.isa) or machine.vector_lanes() != pairs.LANES:
        raise Unsuitable(f"{machine.name} has no AVX512-BF16")
    a = nest.a
    if not isinstance(a, Load) or problem.values[a.buffer].dtype != FACTOR or a.buffer not in problem.layouts:
        raise Unsuitable("A is no value stored in bfloat16")
    (at,) = a.index
    if not all(isinstance(atom, Var) for atom, _ in linear(at).terms) or not nest.found.r:
        raise Unsuitable("A's offset is not linear")
    ordered = storage_order(nest.found.r, at)
    reduced, depth = adjacent(ordered, at, problem.layouts[a.buffer])
    if depth % 2:
        raise Unsuitable(f"{depth} adjacent elements of the reduction are no even number")
    return PairedNest(nest, a.buffer, at, tuple(ordered), reduced, depth)


def adjacent(ordered: Sequence[Var], at: Expr, layout: Layout) -> tuple[tuple[Var, ...], int]:
    """The outer reduction axes, and the number of adjacent elements that the innermost ones make up. An odd extent is rounded up if A has a border of
    zeros there; the extra element is zero in both factors.

    Raises:
        Unsuitable: if elements along the innermost axis are not adjacent.
    """
    *outside, inner = ordered
    depth = inner.extent or 0
    if coefficient(at, inner) != 1:
        raise Unsuitable("A is not adjacent along the reduction")
    dim, factor = layout.order[-1]
    if depth % 2 and factor == 0 and layout.shape[dim] == depth and layout.halo[dim][1]:
        depth += 1
    while outside and coefficient(at, outside[-1]) == depth and depth % 2 == 0:
        depth *= outside.pop().extent or 0
    return tuple(outside), depth


def packed_pairs(problem: Problem, b: Load, axes: Sequence[Var], leading: int, panel: int, lanes: int) -> SecondFactor:
    """B over these axes, of which the first `leading` are outside of the panels and the last is N, whose `panel` neighbours make up one. Dimensions
    (leading..., reduced..., n) are stored as (leading, n / panel, reduced except the last, last / 2, n mod panel, last mod 2). A kernel with vectors
    of `lanes` packs it unless it is constant."""
    name, n = f"{b.buffer}@{problem.region.name}", len(axes) - 1
    sizes = tuple(axis.extent or 0 for axis in axes)
    order = (*((d, 0) for d in range(leading)), (n, 0), *((d, 0) for d in range(leading, n)), (n, panel), (n - 1, 2))
    layout, value = Layout(sizes, order), Value(name, sizes, FACTOR)
    factor = SecondFactor(name, layout.offset(tuple(axes)), FACTOR, layout)
    view = operand_view(b, problem.values[b.buffer].shape, tuple(axes)) if b.buffer in problem.constants else None
    if view is not None:
        return replace(factor, storage={name: Storage(value, layout, b.buffer, view)})
    storage = {name: Storage(value, layout)}
    copy = Region(name, "map", (), (Step(name, sizes, tuple(axes), (b,)),), (b.buffer,), (name,))
    lowered = lower_map(replace(problem.with_storage(storage), region=copy), LoopSchedule(lanes))
    return replace(factor, storage=storage, kernels=lowered.kernels, calls=lowered.calls)
