"""The work of all tilings of a chain on a GPU by a closed form, in columns: which are worth ranking with all schedules (`partition.tile_judge`).

    seconds = ceil(blocks / processors) * sum over the regions of (operations + wavefronts + sectors)
              + ceil(blocks / (processors * resident)) * parts of regions * 2 * latency of level 2

Of one tile, or of its chunks of channels one after another: operations at the rate of large matrix products, on tensor cores where factors have 16
bits or may be rounded to TF32; wavefronts: cycles of level 1 or of
shared memory for the loads of windows, whose warps read different words of the same banks if a tile has few of the channels; sectors of 32 bytes that
are read and stored outside the chain, at a processor's share of the rate of level 2. `resident` blocks hide latencies from one another: as many as
the storage of inner results leaves room for, at most four. Rows at borders that adjacent tiles both compute are in all of these.

Worked example: a depthwise 5x5 layer of 16 channels, stored innermost. In tiles of one channel adjacent threads have adjacent pixels, 16 words apart,
which lie in 2 of the 32 banks: a warp's load takes 16 cycles instead of one, and reads 32 sectors for 32 words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod

import numpy as np

from tilewright.graph.contraction import anchor
from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.hardware.tensor_cores import PEAKS, TENSOR_CORES, mma_flops
from tilewright.ir.dtypes import FLOAT32, size_of
from tilewright.ir.expr import loads, variables
from tilewright.ir.problem import Problem
from tilewright.ir.region import Region
from tilewright.kernels.gpu.counts import SECTOR_WORDS, WORD
from tilewright.kernels.gpu.gemv.space import GEMV_ROWS
from tilewright.kernels.gpu.window.space import BANKS, WARP
from tilewright.kernels.schema import USUAL, Numerics
from tilewright.partition.strips import Cut, readers_in
from tilewright.partition.tiles import in_use, windows_along

PASSING = ("contraction", "window")
"""Kinds of regions that every schema predicts to take at least as long as their bytes pass."""
MOST_RESIDENT = 4
"""Resident blocks beyond which latencies count as hidden."""


@dataclass(frozen=True)
class TileWork:
    """Tilings in columns. sizes: [tilings, axes]. seconds: by the closed form. least: [tilings, regions], seconds that the parts of each region in a
    tile are predicted to take at least on a processor, whatever their schedules: for their products (`product_seconds`), or, of PASSING regions, for
    the distinct bytes that they read and store, at the rates of shared memory and of level 2. latencies: [tilings, regions], seconds that products
    take besides, however many units of the processor they have (`product_latency`). shared_bytes: of the storage of inner results. results: elements
    of the last result."""

    sizes: np.ndarray
    seconds: np.ndarray
    least: np.ndarray
    latencies: np.ndarray
    shared_bytes: np.ndarray
    results: np.ndarray


def tile_work(
    problem: Problem,
    cuts: Sequence[Cut],
    sizes: Sequence[Sequence[int]],
    machine: Machine,
    chunked: bool = False,
    exchanged: int | None = None,
    numerics: Numerics = USUAL,
) -> TileWork:
    """The work of all combinations of the sizes along each axis. `chunked`, `exchanged`: see `Tiling`. `numerics`: the kinds of rounding that are
    allowed."""
    places = [place.reshape(-1) for place in np.indices([len(along) for along in sizes])]
    along = [[windows_along(cuts, axis, size, problem, axis == exchanged) for size in each] for axis, each in enumerate(sizes)]

    def column(region: int, axis: int, halo: bool = False) -> np.ndarray | None:
        """Rows of a region's result along an axis; None if it is not cut."""
        windows = [found[region] for found in along[axis]]
        if windows[0] is None:
            return None
        counts = np.array([window.count + (sum(window.halo) if halo else 0) for window in windows if window is not None], np.float64)
        return np.asarray(counts[places[axis]])

    def extents(region: int, name: str, read: bool, halo: bool = False, skipped: bool = True) -> dict[int, np.ndarray]:
        """By dimension along which a value is cut the rows of it that a tile of a region reads, or has. `skipped`: with those between windows."""
        found = {}
        for axis, rows in enumerate(cuts[region].spans.get(name, ())):
            count = column(region, axis, halo)
            if rows is not None and count is not None:
                step = rows.stride if skipped else min(rows.stride, rows.span)
                found[rows.dim] = (count - 1) * step + rows.span if read else count
        return found

    def words(name: str, found: dict[int, np.ndarray]) -> np.ndarray:
        """Words of a part of a value."""
        shape = problem.values[name].shape
        rest = prod(extent for dim, extent in enumerate(shape) if dim not in found)
        return np.asarray(rest * size_of(problem.values[name].dtype) / WORD * np.prod([one, *found.values()], axis=0))

    def reads(region: int, name: str) -> np.ndarray:
        """Words of a value that a tile of a region reads at most, one for each evaluation of a load: windows may leave out more than they read."""
        part = cuts[region]
        counts = {axis: column(region, place) for place, axis in enumerate(part.axes) if axis is not None}
        points = [
            np.asarray(prod((count if (count := counts.get(axis)) is not None else axis.extent or 0 for axis in variables(*load.index)), start=one))
            for load in loads(*(body for step in part.region.steps for body in step.bodies))
            if load.buffer == name and not loads(*load.index)
        ]
        return np.asarray(np.min(points, axis=0) * size_of(problem.values[name].dtype) / WORD if points else inf * one)

    one = np.ones(len(places[0]))
    readers = readers_in(cuts)
    stored = {part.result: extents(number, part.result, False, True) for number, part in enumerate(cuts) if readers[number]}
    inside = next(number for number, windows in enumerate(along[-1][0]) if not chunked or windows is not None)
    summed = cuts[-1].axes[-1]
    chunks = one if not chunked or summed is None else (summed.extent or 1) / np.array(sizes[-1])[places[-1]]
    held = [WORD * words(part.result, stored[part.result]) if part.result in stored else 0 * one for part in cuts]
    shared = np.max([np.sum([held[at] for at in live], axis=0) + 0 * one for live in in_use(readers, inside)], axis=0)
    clock, level_2 = machine.clock_hz, machine.cache(2)
    assert level_2 is not None
    work, turns = np.zeros(len(one)), np.zeros(len(one))
    least: list[np.ndarray] = []
    waiting: list[np.ndarray] = []
    for number, part in enumerate(cuts):
        whole = problem.values[part.result].shape
        mine = extents(number, part.result, False)
        share = np.prod([one, *(count / whole[dim] for dim, count in mine.items())], axis=0)
        repeats = chunks if number >= inside else one
        share = share * (repeats if number < len(cuts) - 1 else 1)  # the last region's are those of all chunks
        operations = part.region.flops() * share * machine.processors / _rate(part, problem, machine, numerics.tf32)
        outputs = words(part.result, mine)
        wavefronts, sectors = np.zeros(len(one)), np.zeros(len(one))
        if part.result in problem.region.outputs and number < len(cuts) - 1:
            sectors += words(part.result, mine) / SECTOR_WORDS
        for name in (*part.region.inputs, *([part.result] if number == len(cuts) - 1 else [])):
            found = extents(number, name, name != part.result)
            times = repeats if number < len(cuts) - 1 or part.span(name, len(sizes) - 1) is not None else one
            if name in problem.constants:  # packed
                sectors += times * words(name, found) / SECTOR_WORDS
                continue
            shape = problem.values[name].shape
            fastest, *outer = [dim for dim, _ in reversed(problem.layouts[name].order) if shape[dim] > 1] or [0]
            run = found.get(fastest, one * (shape[fastest] if shape else 1))
            if name not in stored:
                sectors += times * words(name, found) * np.maximum(SECTOR_WORDS / run, 1) / SECTOR_WORDS
            if part.region.kind == "window" and name != part.result and found:
                spans = {rows.dim: rows for rows in part.spans[name] if rows is not None}
                pitch = stored[name].get(fastest, run) if name in stored else one * shape[fastest]
                step = spans[outer[0]].stride if outer and outer[0] in spans else 1
                conflicts = np.maximum(np.gcd((pitch * step).astype(np.int64), BANKS) / run, 1)
                wavefronts += times * outputs / WARP * prod(rows.span for rows in spans.values()) * conflicts
        traffic = sectors * SECTOR_WORDS * WORD / (level_2.bandwidth * clock)
        work += operations + wavefronts / clock + traffic
        accessed = {name: name != part.result for name in (*part.region.inputs, part.result)}
        sizes_of = {name: words(name, extents(number, name, read)) for name, read in accessed.items()}
        near = sum((size for name, size in sizes_of.items() if name in stored), 0 * one) / sum(sizes_of.values())
        distinct = words(part.result, mine)
        for name in part.region.inputs:
            distinct = distinct + np.minimum(words(name, extents(number, name, True, skipped=False)), reads(number, name))
        passing = WORD * distinct * (near / machine.shared_bytes_per_cycle + (1 - near) / level_2.bandwidth) / clock
        arithmetic = product_seconds(part.region, problem, machine, numerics) * machine.processors * share
        least.append(np.maximum(arithmetic, (part.region.kind in PASSING) * repeats * passing))
        found_product = anchor(part.region.steps, problem.constants) if part.region.kind == "contraction" else None
        waits = np.zeros(len(one), bool)
        if found_product is not None:
            rows = outputs * WORD / size_of(problem.values[part.result].dtype) / (found_product.size_batch * found_product.size_n)  # of any part
            cut = [(axis, column(number, place)) for place, axis in enumerate(part.axes) if axis in found_product.n]
            columns = prod((count / (axis.extent or 1) for axis, count in cut if axis and count is not None), start=one * found_product.size_n)
            waits = (rows > GEMV_ROWS) & (columns > 1)  # with one column the factors change places, and there is one row
        waiting.append(repeats * np.where(waits, product_latency(machine), 0.0))
        turns += repeats
    last = cuts[-1].result
    blocks = np.prod([(problem.values[last].shape[dim] // count) for dim, count in extents(len(cuts) - 1, last, False).items()], axis=0)
    resident = np.clip(machine.shared_bytes_per_processor // np.maximum(shared, 1), 1, MOST_RESIDENT)
    rounds, waves = np.ceil(blocks / machine.processors), np.ceil(blocks / (machine.processors * resident))
    latencies = waves * turns * 2 * level_2.latency_cycles / clock
    grid = np.stack([np.array(each)[place] for each, place in zip(sizes, places, strict=True)], axis=1)
    return TileWork(grid, rounds * work + latencies, np.stack(least, axis=1), np.stack(waiting, axis=1), shared, outputs)


def product_seconds(region: Region, problem: Problem, machine: Machine, numerics: Numerics) -> float:
    """Seconds that kernels of a region, or of its parts together, are predicted to take at least: those of the multiply-adds of a sum of products at
    the rate that schemas assume of CUDA cores, or, with factors that tensor cores take, at the peak of these. `problem` is that of the chain. 0 for
    other regions, of which estimates let other work hide the arithmetic."""
    if region.kind != "contraction":
        return 0.0
    (first, *_), kinds = region.steps, {problem.values[name].dtype for name in (*region.inputs, *region.outputs)}
    kinds |= {"tf32"} if numerics.tf32 or numerics.tf32_pairs else set()
    rate = max([_cuda_rate(machine), *(machine.peak_flops.get(PEAKS[kind], 0.0) for kind in kinds if kind in PEAKS)])
    return 2 * prod(axis.extent or 0 for axis in (*first.axes, *first.reduction)) / rate


def product_latency(machine: Machine) -> float:
    """Seconds that each kernel of a sum of products of more than GEMV_ROWS rows on a processor is predicted to take besides its multiply-adds: until
    its first factors are there, and its last results stored. The data come from level 2, or from nearer."""
    fitted, level_2 = gpu_calibration(machine), machine.cache(2)
    assert level_2 is not None
    return min(fitted.steps.end_latencies, fitted.warpgroups.end_latencies) * level_2.latency_cycles / machine.clock_hz


def _rate(part: Cut, problem: Problem, machine: Machine, tf32: bool) -> float:
    """flop/s of the whole machine that large regions of this kind reach."""
    kind = problem.values[part.region.inputs[0]].dtype
    kind = "tf32" if kind == FLOAT32 and tf32 else kind
    if part.region.kind == "contraction" and machine.compute_capability in TENSOR_CORES and kind in PEAKS:
        return mma_flops(machine, kind)
    return _cuda_rate(machine)


def _cuda_rate(machine: Machine) -> float:
    """flop/s that large products reach on CUDA cores."""
    return machine.sustained_flops.get("fp32", 0.8 * machine.peak_flops["fp32"])
