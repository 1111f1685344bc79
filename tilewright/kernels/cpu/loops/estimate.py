"""Predicted times of loop nests of one form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

import numpy as np

from tilewright.hardware.calibration import cpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import COMBINERS, Step, arithmetic
from tilewright.ir.dtypes import size_of
from tilewright.ir.estimate import Estimate
from tilewright.ir.expr import Expr, Load, Var, coefficient, loads
from tilewright.ir.problem import Problem
from tilewright.kernels.columns import Columns
from tilewright.kernels.counts import Counts
from tilewright.kernels.cpu.common import vector_width
from tilewright.kernels.cpu.loops.across import Across
from tilewright.kernels.cpu.loops.lines import HELD, Access, access, distinct_lines, innermost_first, lines_loaded
from tilewright.kernels.cpu.loops.row_reduction import Rows, block_of, kept_function, largest_offset
from tilewright.kernels.cpu.rates import reread_bandwidth


def loop_estimate(counts: Counts, machine: Machine, threads: int, scalars: int = 0) -> Estimate:
    """Seconds of a region without tiles (map, window). Each input is read from memory and the output written once, or
    from the threads' level 3 if it holds them, and the arithmetic runs at half the vector peak (no multiply-adds). Where loops load `scalars` one by
    one, these are operations too, and none has more than one lane.

    Worked example: adding two arrays of two million float32 moves 24 MB; at 100 GB/s that is 240 us, and the additions are hidden behind it."""
    supply = np.array([reread_bandwidth(machine, size, threads) for size in counts.memory_bytes])
    peak = machine.peak_flops["fp32"] / machine.processors * min(threads, machine.processors)
    operations = (counts.flops + scalars) * machine.vector_lanes() if scalars else counts.flops
    terms = {"memory": counts.memory_bytes / supply, "arithmetic": operations / (peak / 2)}
    return Estimate({**terms, "dispatch": np.full(len(counts), machine.dispatch_seconds)}, overlapped=("memory", "arithmetic"))


@dataclass(frozen=True, eq=False)
class RowFacts:
    """A problem and its rows."""

    problem: Problem
    rows: Rows

    @property
    def lane_extent(self) -> int:
        """Adjacent rows that may lie across lanes; 0 if none do."""
        return (self.rows.lane.extent or 0) if self.rows.lane is not None else 0


MOVES = 2
"""Instructions that move halves of a vector in each round of combining its lanes; one port executes them."""
WIDE = 2
"""Float32 in the space of an element for which there are no vectors here: mostly 64-bit indices of maxima."""


def row_estimate(facts: RowFacts, candidates: Columns, counts: Counts, machine: Machine, threads: int) -> Estimate:
    """Seconds of reductions and scans over rows.

    memory: as of other loops, with whole lines where only parts are used. arithmetic: operations on vectors, as many in a cycle as multiply-adds,
    lanes without a row or an element included, or the latency of few chains of them; rows along lanes also combine the lanes of their sums. level n:
    the lines that a cache loads from level n (`lines`), for every pass over the rows that it does not hold. They overlap as transfers of products do.

    Worked example, a softmax of 64 channels of 56 x 56 pixels in planes, with lines of 16 elements. Row by row, each channel is a load of one element
    from a line of its own. In blocks of 64 rows, four lines of each of 64 planes, 16 KB, stay in level 1 for all three passes."""
    base = loop_estimate(counts, machine, threads)
    workers = min(threads, machine.processors)
    found = [_counted(facts, int(across), machine) for across in candidates["across"]]
    per_second = machine.clock_hz * workers
    terms = {**base.terms, "arithmetic": np.array([cycles for cycles, _ in found]) / per_second}
    line = machine.caches[0].line_bytes
    for number, cache in enumerate(machine.caches[1:]):
        terms[f"level {cache.level}"] = np.array([lines[number] for _, lines in found]) * line / cache.bandwidth / per_second
    beyond = np.array([lines[min(1, len(lines) - 1)] for _, lines in found]) * line
    terms["memory"] = base.terms["memory"] * np.maximum(1.0, beyond / np.maximum(counts.memory_bytes, 1.0))
    exponent = cpu_calibration(machine).contraction.transfers
    return Estimate(terms, overlapped=tuple(name for name in terms if name != "dispatch"), exponent=exponent)


def _counted(facts: RowFacts, across: int, machine: Machine) -> tuple[float, list[float]]:
    """Cycles of operations, and lines that each level of cache loads from the next, of all threads together."""
    rows, lanes, line_bytes = facts.rows, machine.vector_lanes(), machine.caches[0].line_bytes
    block = block_of(rows, across, lanes) if across else None
    kept = kept_function(rows, block)
    cycles, levels, seen = 0.0, [0.0] * len(machine.caches), set[str]()
    for step in rows.steps:
        bodies, inside = rows.flat[step.name], rows.columns if step.kind == "map" else step.reduction
        offsets = {(load.buffer, load.index[0]) for load in loads(*bodies) if len(load.index) == 1}
        order = innermost_first(inside, largest_offset(bodies, inside))
        operations = arithmetic(*bodies) + (0 if step.kind == "map" else _combining(step))
        if kept is not None and step.kind == "map":
            operations -= arithmetic(kept)
        ports = max((operations + len(offsets)) / machine.fma_ports, len(offsets) / machine.load_ports)
        count, points = (prod(axis.extent or 1 for axis in axes) for axes in (rows.axes, inside))
        if block is not None:
            extent = block.lane.extent or 1
            of_block = block.vectors if block.width > 1 else ceil(block.rows / (lanes // WIDE))
            chain = 0.0 if step.kind == "map" else machine.fma_latency_cycles
            cycles += count // extent * ceil(extent / block.rows) * points * max(of_block * ports, chain)
        else:
            inner = (order[0].extent or 1) if order else 1
            adjacent = (
                bool(order) and all(coefficient(offset, order[0]) in (0, 1) for _, offset in offsets) and len(bodies) == 1 and step.kind != "scan"
            )
            width = vector_width(order[0], lanes) if adjacent else 1
            cycles += count * points // inner * ceil(inner / width) * ports
            if step.kind == "reduce":
                cycles += count * (width.bit_length() - 1) * (MOVES + _combining(step) / machine.fma_ports)
        for name, offset in offsets:
            nest, line = _nest(rows, offset, order, block), line_bytes // size_of(facts.problem.values[name].dtype)
            of_row = distinct_lines(nest[: len(order) + (block is not None)], line)
            for number, cache in enumerate(machine.caches):
                held = cache.bytes / cache.line_bytes
                if name not in seen or of_row > held * HELD:
                    levels[number] += lines_loaded(nest, line, held)
        seen |= {name for name, _ in offsets}
    return cycles, levels


def _combining(step: Step) -> int:
    """Operations that combine an element with what was reduced before."""
    names = [f"{part}{number}" for part in "ab" for number in range(len(step.dtypes))]
    elements = [Load(name, (), dtype) for name, dtype in zip(names, step.dtypes * 2, strict=True)]
    half = len(step.dtypes)
    return arithmetic(*COMBINERS[step.combiner or ""].combine(tuple(elements[:half]), tuple(elements[half:])))


def _nest(rows: Rows, offset: Expr, order: Sequence[Var], block: Across | None) -> Access:
    """The access in the loops of a step: the rows of a block, the elements of rows, blocks, and other rows."""
    outer = access(offset, list(reversed(rows.outer if block is not None else rows.axes)))
    if block is None:
        return [*access(offset, order), *outer]
    ((stride, extent),) = access(offset, [block.lane])
    return [(stride, block.rows), *access(offset, order), (stride * block.rows, ceil(extent / block.rows)), *outer]
