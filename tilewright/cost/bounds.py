"""Times that no kernel of a GPU schedule can beat: true lower bounds for whole columns of candidates, and pruning by them.

A bound is the largest of named terms, each of which holds alone. Rates are the machine's peaks at its highest clock, never what something was
seen to sustain; work that might be avoided (reads that a cache may serve, addresses, conflicts of banks, barriers) counts as nothing. Kernels that
wait for each other do not overlap: what another kernel takes at least is part of every term of this one, but not of what memory moves for both.

Work is given to processors in whole blocks, and to schedulers in whole warps, which stay where they started. So of u units of work on p
places some place does ceil(u / p) of them (the pigeonhole principle); `_busiest` applies it. DeepCuts (PLDI 2021, section 4) multiplies ratios
of the same kind; as they are printed, good kernels exceed the result (`cost.deepcuts`).

There is no term for level 2: its peak is not published for every machine, what was measured of it is no bound, and level 1 may serve what several
blocks of a processor read. What comes into shared memory is counted at the rate of that memory instead, which is that of level 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.ir.region import Unsuitable
from tilewright.schedule.columns import Columns, length, reject, take
from tilewright.schedule.gpu_contraction import ContractionProblem, threads_of
from tilewright.schedule.gpu_direct import SHARED, DirectProblem, extents_of, patch_of
from tilewright.schedule.gpu_winograd import FILTER, OUTPUT_TILES, WinogradProblem
from tilewright.schedule.gpu_winograd_fused import fused_threads_of, points_of, tiles_there

ELEMENT_BYTES = 4
WIDEST = 4
"""Elements that one instruction loads at most (16 bytes: PTX ISA, vector loads)."""


def lower_bound(rows: Columns, problem: Any, machine: Machine, rotated_bytes: float = 0.0) -> Estimate:
    """Seconds below which no call under these candidates runs, in a chain of dependent kernels: the longest of the terms.

    `rotated_bytes`: bytes that are touched between two calls with the same buffers, those of one call included; where that is more than level 2
    holds, at least the share 1 - level 2 / rotated of them goes through memory. 0: everything may already be in level 2.

    Raises:
        Unsuitable: for a problem whose schema has no bound.
    """
    for kind, bound in _BOUNDS.items():
        if isinstance(problem, kind):
            return bound(rows, problem, machine, memory_share(machine, rotated_bytes))
    raise Unsuitable(f"no bound for a {type(problem).__name__}")


def memory_share(machine: Machine, rotated_bytes: float) -> float:
    """The least share of the bytes of calls in rotation that memory moves.

    Of R distinct bytes a round at most the S that level 2 holds are still there in the next: at least R - S were evicted, so they are read
    again, or were written back. Of 220 MB on an h200 (60 MiB) that is 71 %."""
    level2 = machine.cache(2)
    if level2 is None or rotated_bytes <= level2.bytes:
        return 0.0
    return 1.0 - level2.bytes / rotated_bytes


def prune(rows: Columns, bound_seconds: np.ndarray, best_known_seconds: float, margin: float = 1.0) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The rows that may still be the fastest, and how many cannot be, by reason: those whose bound exceeds `best_known_seconds` * margin.

    With the *measured* time of any candidate and a margin of 1 the best is never pruned: it takes at most what that candidate took, and at
    least its own bound. With a *predicted* time it is safe as long as some candidate really runs within prediction * margin: the margin has to
    cover by how much the model underestimates the candidate that it likes best."""
    return reject(rows, [("cannot beat the best known time", bound_seconds > best_known_seconds * margin)])


def _busiest(units: np.ndarray, places: int) -> np.ndarray:
    """Units of the place that has most of them, at least."""
    return -(-units // places)


def _estimate(
    machine: Machine,
    *,
    fma: np.ndarray,
    issue: np.ndarray,
    chain: np.ndarray | float,
    shared: np.ndarray | float,
    moved: np.ndarray | float,
    others: np.ndarray,
) -> Estimate:
    """From cycles, and bytes through memory, to seconds; `others`: what the call's other kernels take at least.

    launch: a kernel in a chain of dependent ones takes no less than an empty one there (`Machine.launch_seconds`, measured). Its work may overlap
    the launch, so the two are not added."""
    count = len(fma)

    def full(value: np.ndarray | float) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, dtype=float), count)

    terms = {
        "fma": fma / machine.clock_hz + others,
        "issue": issue / machine.clock_hz + others,
        "chain": full(chain) / machine.clock_hz + others,
        "shared": full(shared) / machine.clock_hz + others,
        "memory": full(moved / machine.memory_bandwidth),
        "launch": machine.launch_seconds + others,
    }
    return Estimate(MappingProxyType(terms), overlapped=tuple(terms))


def _fma_cycles(machine: Machine) -> float:
    """Cycles for which a warp's multiply-add occupies the lanes of its scheduler: 1 with 32 lanes a scheduler, 2 with 16."""
    return machine.warp_size * machine.schedulers_per_processor / machine.fp32_lanes_per_processor


def _steps(machine: Machine, tiles: np.ndarray, split: np.ndarray, steps: np.ndarray, warps: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(steps of one full part, block steps of the busiest processor, warp steps of the busiest scheduler), the last two at least.

    A tile has `steps`, which `split` blocks divide: s each, and the last the t that remain. Full blocks are pieces of s steps, all blocks of t at
    least, and all steps together could be spread evenly: of each the share of the busiest place."""
    places, schedulers = machine.processors, machine.schedulers_per_processor
    each = -(-steps // split)
    last = np.maximum(steps - (split - 1) * each, 0)
    full = tiles * np.where(last == each, split, split - 1)
    kinds = ((full, each), (tiles * split, last), (tiles * steps, 1))
    blocks = np.maximum.reduce([_busiest(count, places) * size for count, size in kinds])
    whole = [_busiest(_busiest(count, places) * warps, schedulers) * size for count, size in kinds[:2]]
    return each, blocks, np.maximum.reduce([*whole, _busiest(tiles * steps * warps, places * schedulers)])


def _live(extent: int, tile: np.ndarray, per_thread: np.ndarray) -> np.ndarray:
    """Elements of a thread's `per_thread` along one dimension that must be computed: where the tile is longer than the extent, the compiler may leave
    out what no thread stores, but tile / per_thread threads have to cover the extent."""
    return _busiest(np.minimum(extent, tile), tile // per_thread)


def contraction_bound(rows: Columns, problem: ContractionProblem, machine: Machine, share: float) -> Estimate:
    """Implicit GEMM: tiles of block_m x block_n, of which `split` blocks each reduce some of the steps of block_k.

    Padding is computed like the rest (rows past the end repeat the last, and the reduction is padded with zeros in shared memory), so that every step
    of every block is whole, but for what `_live` leaves out of thread_m and thread_n. With the warp steps of the busiest scheduler (`_steps`):

    fma: BK TM TN a warp step, 32 lanes a scheduler.  issue: those, one load of at most four elements of shared memory for each four
    of a thread's BK (TM + TN), and the loads or copies of A and B that fall to every warp; a scheduler issues one instruction a cycle.
    chain: an element's multiply-adds depend on each other: BK for each step of a part, with the latency of one.  shared: a processor serves one load
    a cycle (all equal addresses merged), and what is written into the tiles at its bandwidth.  memory: distinct bytes (a stored value counts
    whole, at most its evaluations).  A split without a cluster needs a second kernel, and so a launch more.

    Worked example, h200: 64 x 64 x 16, thread 4 x 4, m = n = 1024, r = 1024: 256 blocks of 8 warps, two for some processor, 64 steps:
    ceil(2 * 8 / 4) * 64 * 16 * 16 = 65536 cycles, 33 us; spread evenly it would be 32."""
    if "block_m" not in rows:
        return _few_rows_bound(rows, problem, machine, share)
    bm, bn, bk, tm, tn, split = (rows[k] for k in ("block_m", "block_n", "block_k", "thread_m", "thread_n", "split"))
    threads = threads_of(rows)
    warps = -(-threads // machine.warp_size)
    tiles = -(-problem.m // bm) * -(-problem.n // bn) * problem.batch
    steps, block_steps, warp_steps = _steps(machine, tiles, split, -(-problem.r // bk), warps)
    live_m, live_n = _live(problem.m, bm, tm), _live(problem.n, bn, tn)
    products = bk * live_m * live_n
    reads = -(-bk * (live_m + live_n) // WIDEST)
    fetches = bm * bk // (problem.a.lanes * threads) + bn * bk // (problem.b.lanes * threads)
    written = (bm + bn) * bk * ELEMENT_BYTES / machine.shared_bytes_per_cycle
    distinct = problem.a.bytes + problem.b.bytes + problem.bytes_written + problem.epilogue_bytes
    return _estimate(
        machine,
        fma=warp_steps * products * _fma_cycles(machine),
        issue=warp_steps * (products + reads + fetches),
        chain=steps * bk * machine.fma_latency_cycles,
        shared=block_steps * (warps * reads + written),
        moved=share * distinct,
        others=machine.launch_seconds * ((split > 1) & (rows["cluster"] == 0)),
    )


def _few_rows_bound(rows: Columns, problem: ContractionProblem, machine: Machine, share: float) -> Estimate:
    """Few rows of m: the products, and one load of at most `lanes` elements of B, spread evenly; no shared memory is certain."""
    count, split = length(rows), rows["split"]
    schedulers = machine.processors * machine.schedulers_per_processor
    products = problem.batch * problem.m * problem.n * problem.r / machine.warp_size / schedulers
    loads = problem.batch * problem.n * problem.r / (problem.b.lanes * machine.warp_size) / schedulers
    distinct = problem.a.bytes + problem.b.bytes + problem.bytes_written + problem.epilogue_bytes
    return _estimate(
        machine,
        fma=np.full(count, products * _fma_cycles(machine)),
        issue=np.full(count, products + loads),
        chain=0.0,
        shared=0.0,
        moved=share * distinct,
        others=machine.launch_seconds * (split > 1),
    )


def direct_bound(rows: Columns, problem: DirectProblem, machine: Machine, share: float) -> Estimate:
    """Direct convolution: a thread computes register_k x register_y x register_x outputs, of `channels` input channels in each step.

    Tiles and chunks of channels that reach past the end are computed whole, as in `contraction_bound`, whose terms these are, with F filter elements
    and c channels a step. fma: c F outputs a warp step.  issue: those, one load of at most four for each four inputs of a channel that a
    thread's outputs need, and for each four of its c F register_k weights.  chain: c F a step.  shared: the loads of inputs, and of weights where
    they are staged; what is written is the patch of the block with its halo, and the staged weights."""
    k, y, x = extents_of(rows)
    split, channels = rows["split"], rows["channels"]
    warps = -(-(k // rows["register_k"] * (y // rows["register_y"]) * (x // rows["register_x"])) // machine.warp_size)
    tiles = -(-problem.outputs // k) * -(-problem.height // y) * -(-problem.width // x) * problem.images * problem.groups
    steps, block_steps, warp_steps = _steps(machine, tiles, split, -(-problem.channels // channels), warps)
    area = problem.filter_y * problem.filter_x
    live_k = _live(problem.outputs, k, rows["register_k"])
    live_y, live_x = _live(problem.height, y, rows["register_y"]), _live(problem.width, x, rows["register_x"])
    products = channels * area * live_k * live_y * live_x
    needed_y = _inputs_needed(live_y, problem.filter_y, problem.stride_y, problem.dilation_y)
    needed_x = _inputs_needed(live_x, problem.filter_x, problem.stride_x, problem.dilation_x)
    inputs, weights = -(-channels * needed_y * needed_x // WIDEST), -(-channels * area * live_k // WIDEST)
    staged = rows["filters"] == SHARED
    patch_y, patch_x = patch_of(rows, problem)
    written = channels * (patch_y * patch_x + np.where(staged, area * k, 0)) * ELEMENT_BYTES / machine.shared_bytes_per_cycle
    distinct = problem.bytes_read + problem.filter_bytes + problem.bytes_written + problem.epilogue_bytes
    return _estimate(
        machine,
        fma=warp_steps * products * _fma_cycles(machine),
        issue=warp_steps * (products + inputs + weights),
        chain=steps * channels * area * machine.fma_latency_cycles,
        shared=block_steps * (warps * (inputs + np.where(staged, weights, 0)) + written),
        moved=share * distinct,
        others=machine.launch_seconds * ((split > 1) & (rows["cluster"] == 0) & (rows["atomics"] == 0)),
    )


def _inputs_needed(outputs: np.ndarray, filter_size: int, stride: int, dilation: int) -> np.ndarray:
    """Distinct inputs along one dimension that so many neighbouring outputs read; with a dilation at least the larger of outputs and filter."""
    needed: np.ndarray
    if dilation > 1:
        needed = np.maximum(outputs, filter_size)
    else:
        needed = np.minimum(outputs * filter_size, (outputs - 1) * stride + filter_size)
    return needed


def winograd_bound(rows: Columns, problem: WinogradProblem, machine: Machine, share: float) -> Estimate:
    """Winograd's F(m x m, 3 x 3): three kernels that wait for each other, of which the product is bounded as any (`contraction_bound`).

    A transform takes a launch at least, and the time in which all schedulers issue what a tile needs for each channel: an addition for each of its
    (m + 2)^2 points, and loads and stores by fours of the points and of m^2 inputs (others serve several tiles) or outputs. memory: input,
    transformed filters and output; what lies between the kernels may stay in level 2."""
    if "tiles" in rows:
        return _fused_winograd_bound(rows, problem, machine, share)
    count = length(rows)
    terms: dict[str, np.ndarray] = {}
    for size, product in zip(OUTPUT_TILES, problem.products, strict=True):
        which = rows["output_tile"] == size
        points = (size + FILTER - 1) ** 2
        tiles = problem.images * -(-problem.height // size) * -(-problem.width // size)
        issued = points + (points + size * size) / WIDEST
        inputs, sums = (_spread(machine, tiles * channels * issued) for channels in (problem.channels, problem.outputs))
        estimate = contraction_bound(take(rows, which), product, machine, 0.0)
        moved = share * _winograd_bytes(problem, points) / machine.memory_bandwidth
        for name, seconds in estimate.terms.items():
            terms.setdefault(name, np.zeros(count))[which] = moved if name == "memory" else seconds + inputs + sums
    return Estimate(MappingProxyType(terms), overlapped=tuple(terms))


def _winograd_bytes(problem: WinogradProblem, points: Any) -> Any:
    """Distinct bytes: input, transformed filters of so many points, output."""
    filters = ELEMENT_BYTES * points * problem.channels * problem.outputs
    return problem.bytes_read + filters + problem.bytes_written + problem.epilogue_bytes


def _fused_winograd_bound(rows: Columns, problem: WinogradProblem, machine: Machine, share: float) -> Estimate:
    """Winograd's algorithm in one kernel: as `contraction_bound`, for (m + 2)^2 points of `tiles` x `outputs` sums and `channels` a step.

    Sums go through shared memory, so that all of them are computed. issue: besides products and their loads, what every thread does to bring in
    a step: copies of filters by fours, and for the tiles that it transforms an addition for each point, and loads and stores by fours."""
    threads, points, split = fused_threads_of(rows), points_of(rows), rows["split"]
    warps = -(-threads // machine.warp_size)
    tiles, outputs, channels = rows["tiles"], rows["outputs"], rows["channels"]
    blocks = -(-tiles_there(rows, problem) // tiles) * -(-problem.outputs // outputs)
    steps, block_steps, warp_steps = _steps(machine, blocks, split, -(-problem.channels // channels), warps)
    products = channels * rows["thread_m"] * rows["thread_n"]
    reads = -(-channels * (rows["thread_m"] + rows["thread_n"]) // WIDEST)
    transforms = tiles * channels // threads * points * (1 + 2 / WIDEST)
    copies = points * channels * outputs // (WIDEST * threads)
    written = points * channels * (tiles + outputs) * ELEMENT_BYTES / machine.shared_bytes_per_cycle
    return _estimate(
        machine,
        fma=warp_steps * products * _fma_cycles(machine),
        issue=warp_steps * (products + reads + transforms + copies),
        chain=steps * channels * machine.fma_latency_cycles,
        shared=block_steps * (warps * reads + written),
        moved=share * _winograd_bytes(problem, points),
        others=np.zeros(length(rows)),
    )


def _spread(machine: Machine, instructions: float) -> float:
    """Seconds of a kernel of so many instructions of a thread, evenly spread over all schedulers, but a launch at least."""
    cycles = instructions / machine.warp_size / (machine.processors * machine.schedulers_per_processor)
    return max(machine.launch_seconds, cycles / machine.clock_hz)


_BOUNDS: Mapping[type, Callable[[Columns, Any, Machine, float], Estimate]] = MappingProxyType(
    {ContractionProblem: contraction_bound, DirectProblem: direct_bound, WinogradProblem: winograd_bound}
)
