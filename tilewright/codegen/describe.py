"""The text of kernel headers: the problem, the schedule, the parameters, and the predicted time. It names no values, as equal layers share
kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.graph.contraction import anchor
from tilewright.ir.computation import Step
from tilewright.ir.expr import Var
from tilewright.ir.kernel import Buffer
from tilewright.ir.layout import Layout
from tilewright.ir.problem import Problem


def extents(axes: Sequence[Var]) -> str:
    """`56 x 56`; a single 1 if all extents are 1."""
    return " x ".join(str(axis.extent) for axis in axes if axis.extent != 1) or "1"


def described(problem: Problem) -> str:
    """One line: a contraction by its M, N and reduction extents (`m 56 x 56, n 64, r 3 x 3 x 64`), other steps by what they compute."""
    problem = problem.one or problem
    region = problem.region
    found = anchor(region.steps, problem.constants) if region.kind == "contraction" else None
    if found is None:
        return f"{region.kind}: {', then '.join(_step(step) for step in region.steps)}"
    batch = f"batch {extents(found.batch)}, " if any(axis.extent != 1 for axis in found.batch) else ""
    product = f"out[m, n] = sum over r of A[m, r] B[r, n]: {batch}m {extents(found.m)}, n {extents(found.n)}, r {extents(found.r)}"
    return ", then ".join((f"contraction {product}", *(_step(step) for step in region.steps[1:])))


def _step(step: Step) -> str:
    if step.kind == "map":
        return f"a map of {extents(step.axes)}"
    reduced = f"{step.combiner} over {extents(step.reduction)}"
    return f"{reduced} for each of {extents(step.axes)}" if step.kind == "reduce" else f"running {reduced} in {extents(step.axes)}"


def parameter(buffer: Buffer, layout: Layout, role: str) -> str:
    """`in0: B, 3 x 3 x 64 x 64 f32 stored as d3 d0 d1 d2 d3:32`: dimensions outermost first; `d3:32` is d3 mod 32."""
    shape = " x ".join(map(str, layout.shape)) or "scalar"
    stored = "" if layout.is_row_major else f" stored as {layout}"
    return f"{buffer.name}: {role + ', ' if role else ''}{shape} {buffer.dtype}{stored}"


def prediction(seconds: float, terms: Mapping[str, float], kernels: int) -> str:
    """`predicted 739 us: arithmetic 723 us, L2 to registers 109 us, ...`, longest term first, for all kernels of a region together."""
    ordered = sorted(terms.items(), key=lambda term: -term[1])
    parts = ", ".join(f"{name} {1e6 * value:.3g} us" for name, value in ordered if value)
    shared = f" for the {kernels} kernels of the region" if kernels > 1 else ""
    return f"predicted {1e6 * seconds:.3g} us{shared}: {parts}"
