"""Data movement and resources of GPU kernels, counted from tiles: one entry a candidate, whole columns at once.

`Volumes` is what every schema fills in and what the features and the analytical model of learned ranking are computed from. Counts are exact
where the kernel's text fixes them and expectations where alignment decides (said in each formula); tests/test_models.py enumerates small cases.

CNNOpt is "Effective Performance Modeling and Domain-Specific Compiler Optimization of CNNs for GPUs" (PACT 2022). What its text leaves open of its
kernels (which warps fill shared memory, how results are staged and stored, the compiler's register cap) is read from the sources and scripts of its
artifact, github.com/HPCRL/AE-PACT.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TypeAlias

import numpy as np

from tilewright.cost.gpu import FRAGMENT_WAVEFRONTS, SECTOR_BYTES
from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.ir.estimate import Estimate
from tilewright.schedule.columns import Columns
from tilewright.schedule.gpu_contraction import ContractionProblem, registers_of, shared_bytes_of, threads_of
from tilewright.schedule.gpu_direct import RS, DirectProblem

Problem: TypeAlias = DirectProblem | Columns
"""One problem, or the same fields as columns: one problem a row."""

WORD = 4
"""Bytes of an element."""
SECTOR_WORDS = SECTOR_BYTES // WORD


@dataclass(frozen=True)
class Volumes:
    """Counts of one kernel launch, an array entry a candidate. "A block" is a thread block, "a step" what a block does between two barriers of its
    reduction loop. Sectors are 32 bytes between level 2 and a processor; wavefronts are cycles of one processor's shared memory or L1."""

    flops: np.ndarray
    """Of the problem."""
    padded_flops: np.ndarray
    """Of all threads, with those outside the result."""
    blocks: np.ndarray
    warps: np.ndarray
    """Of a block; the last one may be partly empty."""
    threads: np.ndarray
    """Of a block."""
    steps: np.ndarray
    """Of a block."""
    registers: np.ndarray
    """Of a thread, an estimate."""
    shared_bytes: np.ndarray
    """Of a block."""
    resident: np.ndarray
    """Blocks that a processor holds at once."""
    accumulators: np.ndarray
    """Results that a thread keeps in registers."""
    step_multiply_adds: np.ndarray
    """Of a warp (or thread), in one step: instructions."""
    step_shared_loads: np.ndarray
    """Wavefronts of a warp's loads from shared memory, in one step."""
    step_cached_loads: np.ndarray
    """Wavefronts of a warp's loads by the read-only path, in one step."""
    step_fill: np.ndarray
    """Warp instructions with which a block fills shared memory, in one step (a load and a store count as one)."""
    step_sectors: np.ndarray
    """Sectors that a block reads in one step."""
    drain_wavefronts: np.ndarray
    """Of shared memory in one block after its loop (staging of results)."""
    store_instructions: np.ndarray
    """Warp stores or atomic additions of one block after its loop."""
    store_sectors: np.ndarray
    """Sectors that one block writes after its loop."""
    distinct_bytes: np.ndarray
    """Bytes read at least once."""
    written_bytes: np.ndarray
    """Bytes of the result, every part of a split counted."""
    split: np.ndarray
    stages: np.ndarray
    """Buffers of shared memory that a step's fill alternates between."""
    reuse_bytes: np.ndarray
    """What one block reads in its whole loop, distinct: its working set in level 2."""

    def __len__(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True)
class DirectForm:
    """What the axes of a direct schedule leave open. `channels_last`: input and result have channels innermost, else columns of the image.
    `staged_result`: results pass through shared memory (padded by one column) to be stored in rows. `spare_registers`: a thread's registers
    above those of equations 2 and 3."""

    channels_last: bool = True
    staged_result: bool = False
    spare_registers: int = 24


GENERATED = DirectForm()
PUBLISHED = DirectForm(channels_last=False, staged_result=True, spare_registers=2)
"""CNNOpt's kernels. Their script caps the compiler at equation 2 (3) plus one and two more, so that occupancy follows the equation."""


def problem_columns(problem: Problem, count: int) -> dict[str, np.ndarray]:
    """The fields of a problem as columns of `count` rows of float64."""
    fields: Mapping[str, object] = asdict(problem) if isinstance(problem, DirectProblem) else problem
    ones = np.ones(count)
    plain = asdict(DirectProblem(1, 1, 1, 1, 1, 1, 1, 1))
    return {name: np.asarray(fields.get(name, default), dtype=np.float64) * ones for name, default in plain.items()}


def ceil_div(a: np.ndarray, b: np.ndarray | float) -> np.ndarray:
    """Whole parts of size b that hold a; exact for the sizes here (well below 2**53)."""
    parts: np.ndarray = -np.floor_divide(-a, b)
    return parts


def row_sectors(words: np.ndarray) -> np.ndarray:
    """Sectors that a run of words touches, on average over where it starts: (words + 7) / 8."""
    return (words + SECTOR_WORDS - 1) / SECTOR_WORDS


def input_extent(outputs: np.ndarray, filter_size: np.ndarray, stride: np.ndarray, dilation: np.ndarray) -> np.ndarray:
    """Input points along one dimension under so many outputs: (outputs - 1) stride + (filter - 1) dilation + 1. The paper prints the case of
    stride and dilation 1, outputs + filter - 1."""
    inputs: np.ndarray = (outputs - 1) * stride + (filter_size - 1) * dilation + 1
    return inputs


def direct_registers(rows: Columns, problem: Problem, form: DirectForm) -> np.ndarray:
    """Registers of a thread: its results, its slice of the input, one filter element, and the form's spare ones.

    CNNOpt's equations 2 and 3, a thread's part. Equation 2 is printed with (Ry + Fy - 1) + (Rx + Fx - 1) for the slice; a two-dimensional slice
    holds the product (the text before it, and the script of the paper's artifact, have the product)."""
    p = problem_columns(problem, len(rows["slice"]))
    along_y = input_extent(rows["register_y"], p["filter_y"], p["stride_y"], p["dilation_y"])
    along_x = input_extent(rows["register_x"], p["filter_x"], p["stride_x"], p["dilation_x"])
    held = np.where(rows["slice"] == RS, along_y * along_x, along_x)
    accumulators = rows["register_k"] * rows["register_y"] * rows["register_x"]
    return accumulators + held + 1 + form.spare_registers


def direct_volumes(rows: Columns, problem: Problem, machine: Machine, form: DirectForm = GENERATED) -> Volumes:
    """Direct convolution, RS and S kernels (CNNOpt, sections 3 and 4.3). Columns `slice`, `register_*`, `warp_*`, `block_*`, `channels`, `split`,
    `stages`, `filters` as in `DirectSchedule`.

    Global to shared memory, a step of a block: the input tile of `channels` channels, row by row, each a run of words (`row_sectors`; with
    channels innermost a pixel's channels are the run), and the filters of the block's outputs. The paper prints ceil(tile / 32) as the
    transactions of one tile in one channel; times blocks and channels it is a count. We count sectors and rows, because a row of a tile
    starts anywhere and a tile is not contiguous. Shared memory to registers, a warp: every element of its input slice once, as many wavefronts
    as it has distinct words in the widest bank (threads along K read one word together), and the filter elements F F register_k. The paper
    multiplies these by warps, blocks and channels, as we do; it counts a filter read as one transaction, which it is only for 32 words."""
    count = len(rows["slice"])
    p = problem_columns(problem, count)
    r = {name: np.asarray(column, dtype=np.float64) for name, column in rows.items()}
    one = np.ones(count)
    stages, filters = r.get("stages", one), r.get("filters", 0 * one)
    tile_k, tile_y, tile_x = (r[f"register_{axis}"] * r[f"warp_{axis}"] * r[f"block_{axis}"] for axis in ("k", "y", "x"))
    warp_threads = r["warp_k"] * r["warp_y"] * r["warp_x"]
    threads = warp_threads * r["block_k"] * r["block_y"] * r["block_x"]
    warps = ceil_div(threads, machine.warp_size)
    filter_size = p["filter_y"] * p["filter_x"]

    tiles = ceil_div(p["outputs"], tile_k) * ceil_div(p["height"], tile_y) * ceil_div(p["width"], tile_x) * p["images"] * p["groups"]
    blocks = tiles * r["split"]
    each = ceil_div(p["channels"], r["split"])
    steps = ceil_div(each, r["channels"])
    in_y = input_extent(tile_y, p["filter_y"], p["stride_y"], p["dilation_y"])
    in_x = input_extent(tile_x, p["filter_x"], p["stride_x"], p["dilation_x"])
    tile_words = in_y * in_x * r["channels"]
    filter_words = tile_k * filter_size * r["channels"]

    # fill of shared memory
    if form.channels_last:
        runs, run = in_y * in_x, r["channels"]
        fill = ceil_div(tile_words / p["input_lanes"], machine.warp_size)
    else:
        runs, run = in_y * r["channels"], in_x
        # a row is a warp's work in RS; in S, whose tiles span the image, the tile is one run of pairs
        fill = np.where(r["slice"] == RS, runs * ceil_div(in_x, machine.warp_size), ceil_div(tile_words, 2 * machine.warp_size))
    staged_filters = filters == 0
    fill = fill + np.where(staged_filters, r["channels"] * filter_size * ceil_div(tile_k, machine.warp_size * p["filter_lanes"]), 0)
    filter_sectors = r["channels"] * filter_size * row_sectors(tile_k)
    sectors = runs * row_sectors(run) + filter_sectors

    # a warp's reads
    slice_x = input_extent(r["register_x"], p["filter_x"], p["stride_x"], p["dilation_x"])
    slice_y = input_extent(r["register_y"], p["filter_y"], p["stride_y"], p["dilation_y"])
    rows_read = np.where(r["slice"] == RS, slice_y, p["filter_y"] * r["register_y"])
    conflicts = bank_conflicts(r["register_x"] * p["stride_x"], r["warp_x"])
    input_loads = r["channels"] * rows_read * slice_x * conflicts
    # staged filters: a thread's register_k words follow each other and are read in pairs, so that the threads along K are register_k words apart
    pairs = ceil_div(r["register_k"], 2) * bank_conflicts(r["register_k"], r["warp_k"])
    filter_loads = r["channels"] * filter_size * np.where(staged_filters, pairs, 0)
    cached = r["channels"] * filter_size * np.where(staged_filters, 0, r["register_k"] * ceil_div(r["warp_k"], machine.warp_size))
    accumulators = r["register_k"] * r["register_y"] * r["register_x"]
    multiply_adds = accumulators * filter_size * r["channels"]

    # after the loop: results through shared memory, one register_k at a time
    tile_points = tile_y * tile_x
    if form.staged_result:
        across_k = r["warp_k"] * r["block_k"]
        shared_result = np.where(r["slice"] == RS, tile_points * (across_k + 1), tile_points * across_k)
        # RS stores rows of the tile; in S the tile spans the image's width and is one run
        lines = np.where(r["slice"] == RS, tile_y, 1.0)
        line = np.where(r["slice"] == RS, tile_x, tile_points)
        store_instructions = tile_k * lines * ceil_div(line, machine.warp_size)
        store_sectors = tile_k * lines * row_sectors(line)
        drain = accumulators * warps + store_instructions
    else:
        shared_result = 0 * one
        store_instructions = warps * accumulators / np.minimum(p["store_lanes"], r["register_k"])
        store_sectors = tile_points * row_sectors(tile_k)
        drain = 0 * one
    shared_words = stages * (tile_words + np.where(staged_filters, filter_words, 0)) + shared_result
    registers = direct_registers(rows, problem, form)
    shared_bytes = WORD * shared_words
    height = input_extent(p["height"], p["filter_y"], p["stride_y"], p["dilation_y"])
    width = input_extent(p["width"], p["filter_x"], p["stride_x"], p["dilation_x"])
    read = WORD * p["groups"] * (p["images"] * p["channels"] * height * width + p["outputs"] * p["channels"] * filter_size)
    written = WORD * p["images"] * p["groups"] * p["outputs"] * p["height"] * p["width"]
    points = p["images"] * p["groups"] * p["outputs"] * p["height"] * p["width"]
    return Volumes(
        flops=2 * points * p["channels"] * filter_size,
        padded_flops=2 * blocks * tile_k * tile_points * steps * r["channels"] * filter_size,
        blocks=blocks,
        warps=warps,
        threads=threads,
        steps=steps,
        registers=registers,
        shared_bytes=shared_bytes,
        resident=resident_blocks(machine, threads, registers, shared_bytes),
        accumulators=accumulators,
        step_multiply_adds=multiply_adds,
        step_shared_loads=input_loads + filter_loads,
        step_cached_loads=cached,
        step_fill=fill,
        step_sectors=sectors,
        drain_wavefronts=drain,
        store_instructions=store_instructions,
        store_sectors=store_sectors,
        distinct_bytes=read + p["epilogue_bytes"],
        written_bytes=written * r["split"],
        split=r["split"],
        stages=stages,
        reuse_bytes=WORD * each * (in_y * in_x + tile_k * filter_size),
    )


def bank_conflicts(stride_words: np.ndarray, distinct: np.ndarray, banks: int = 32) -> np.ndarray:
    """Wavefronts of one load in which `distinct` groups of threads read words `stride_words` apart: words that share a bank take turns.

    The words fall on banks / gcd(stride, banks) banks, so ceil(distinct gcd / banks)."""
    shared = np.gcd(np.asarray(stride_words, dtype=np.int64), banks)
    return ceil_div(np.asarray(distinct, dtype=np.float64) * shared, banks)


def contraction_volumes(rows: Columns, problem: ContractionProblem, machine: Machine) -> Volumes:
    """Implicit GEMM: the tiles of a `ContractionSchedule`, counted as `tilewright.cost.gpu.contraction_cost` counts them.

    A step is block_k elements of the sum. A warp reads thread_m + thread_n words of each element in vectors of four."""
    bm, bn, bk, tm, tn, split = (np.asarray(rows[k], dtype=np.float64) for k in ("block_m", "block_n", "block_k", "thread_m", "thread_n", "split"))
    one = np.ones(len(bm))
    threads = threads_of(rows)
    warps = ceil_div(threads * one, machine.warp_size)
    blocks = ceil_div(problem.m * one, bm) * ceil_div(problem.n * one, bn) * problem.batch * split
    steps = ceil_div(ceil_div(problem.r * one, bk), split)
    sectors = 0 * one
    fill = 0 * one
    for operand, extent in ((problem.a, bm), (problem.b, bn)):
        run, runs = (bk, extent) if operand.along == "r" else (extent, bk)
        sectors = sectors + runs * np.maximum(run / SECTOR_WORDS, 1.0)
        fill = fill + extent * bk / operand.lanes / machine.warp_size
    copies = rows["stages"] > 1
    loads = bk * sum(np.where(size >= 4, FRAGMENT_WAVEFRONTS * np.floor(size / 4), 1.5) for size in (tm, tn))
    registers = registers_of(rows, problem)
    shared_bytes = shared_bytes_of(rows, problem)
    store_instructions = warps * tm * tn / np.minimum(problem.store_lanes, tn)
    return Volumes(
        flops=problem.flops * one,
        padded_flops=2.0 * blocks * bm * bn * steps * bk,
        blocks=blocks,
        warps=warps,
        threads=threads * one,
        steps=steps,
        registers=registers * one,
        shared_bytes=shared_bytes * one,
        resident=resident_blocks(machine, threads, registers, shared_bytes) * one,
        accumulators=tm * tn,
        step_multiply_adds=bk * tm * tn,
        step_shared_loads=loads,
        step_cached_loads=0 * one,
        step_fill=fill,
        step_sectors=sectors,
        drain_wavefronts=0 * one,
        store_instructions=store_instructions,
        store_sectors=bm * np.maximum(bn / SECTOR_WORDS, 1.0),
        distinct_bytes=one * (problem.a.bytes + problem.b.bytes + problem.epilogue_bytes),
        written_bytes=one * problem.bytes_written * split,
        split=split,
        stages=np.where(copies, rows["stages"], 2) * one,
        reuse_bytes=WORD * (bm + bn) * steps * bk,
    )


@dataclass(frozen=True)
class Overheads:
    """What the counts do not say, in cycles and instructions or as shares of a machine's facts: constants of the analytical model.

    The defaults were fitted to the training files of CNNOpt's published measurements on a V100 (`fit_overheads`); no benchmark layer among them."""

    multiply_add_share: float = 0.66
    """Of the peak that multiply-adds reach with all else hidden."""
    step_instructions: float = 126.0
    """Of a warp in one step besides multiply-adds and loads: addresses, loop, barriers."""
    fill_instructions: float = 24.0
    """For each warp instruction that fills shared memory: addresses, guards, the store."""
    shared_cycles: float = 0.3
    """Of a processor for one wavefront of shared memory (below one: vector loads fetch several of the counted words)."""
    cached_cycles: float = 6.1
    """For one wavefront by the read-only path: mostly level 2's."""
    fill_cycles: float = 5.0
    overlap: float = 5.5
    """Exponent with which the pipelines of a processor overlap."""
    latency: float = 3.5
    """Global memory latencies that a step waits for where its fill is not ahead of it."""
    latency_ahead: float = 1.6
    """The same where it is (two stages and more)."""
    multiply_add_latency: float = 3.3
    """Cycles that a warp by itself needs for one multiply-add; likewise for one load from shared memory, one by the read-only path, one filling
    instruction, and for a barrier for each warp that meets there."""
    shared_latency: float = 0.2
    cached_latency: float = 24.0
    fill_latency: float = 113.0
    barrier_latency: float = 22.0
    hiding: float = 4.3
    """Exponent with which throughput and the latency of a step overlap."""
    wave_latency: float = 0.1
    """Global memory latencies before and after the loop, a wave of blocks."""
    drain_cycles: float = 0.54
    """Of a processor for each wavefront, store instruction and stored sector after the loop."""
    store_cycles: float = 9.3
    sector_cycles: float = 2.9
    write_factor: float = 2.3
    """Time of a written byte over that of a read one: an atomic addition reads and writes."""
    launch: float = 16.0
    """Launches of a kernel in a chain; the published times are of events around one."""


DEFAULTS = Overheads()
MEMORY_SHARE = 0.85
"""Of the nominal bandwidth that copies reach."""
MEMORY_OVERLAP = 4.0
"""Exponent with which memory traffic and the processors' work overlap."""


def busiest(volumes: Volumes, machine: Machine) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks of the busiest processor, the waves in which it takes them, and the blocks of a last wave that is not full (else 0)."""
    each = ceil_div(volumes.blocks, machine.processors)
    full = np.floor_divide(each, volumes.resident)
    rest = each - full * volumes.resident
    return each, full + (rest > 0), rest


def step_cycles(volumes: Volumes, machine: Machine, overheads: Overheads) -> dict[str, np.ndarray]:
    """Cycles of a processor for one step of one block, by what they are spent on: fma, issue, shared, level2, together as `through`; and `alone`,
    how long a block takes that has the processor to itself."""
    v, o = volumes, overheads
    cache2 = machine.cache(2)
    assert cache2 is not None
    fma = v.warps * v.step_multiply_adds * machine.warp_size / machine.fp32_lanes_per_processor / o.multiply_add_share
    loads = v.step_shared_loads + v.step_cached_loads
    issue = (v.warps * (v.step_multiply_adds + loads + o.step_instructions) + v.step_fill * o.fill_instructions) / machine.schedulers_per_processor
    wavefront = 128 / machine.shared_bytes_per_cycle
    shared = wavefront * (v.warps * (v.step_shared_loads * o.shared_cycles + v.step_cached_loads * o.cached_cycles) + v.step_fill * o.fill_cycles)
    level2 = v.step_sectors * SECTOR_BYTES / cache2.bandwidth
    through = (fma**o.overlap + issue**o.overlap + shared**o.overlap + level2**o.overlap) ** (1 / o.overlap)
    alone = (
        np.where(v.stages > 1, o.latency_ahead, o.latency) * machine.memory_latency_cycles
        + o.multiply_add_latency * v.step_multiply_adds
        + o.shared_latency * v.step_shared_loads
        + o.cached_latency * v.step_cached_loads
        + o.fill_latency * v.step_fill / v.warps
        + o.barrier_latency * v.warps
    )
    return {"fma": fma, "issue": issue, "shared": shared, "level2": level2, "through": through, "alone": alone}


def volume_cost(volumes: Volumes, machine: Machine, overheads: Overheads = DEFAULTS) -> Estimate:
    """Analytical model from counts alone, so that it serves every schema. In cycles of a processor, for n blocks side by side:

    through(n) = n (fma^o + issue^o + shared^o + level2^o)^(1/o), with o = `overlap`; alone = latency + warps' own chain of instructions;
    step(n) = (through(n)^h + alone^h)^(1/h), with h = `hiding`. The busiest processor gets b = ceil(blocks / processors) blocks, r at once:
    floor(b / r) waves of steps step(r), and one with the rest (the tail). The sum's loop, then `drain` for each block. `memory` is a bound by
    distinct bytes. Waves and tail as in CNNOpt (section 3.2), overlap as in `tilewright.cost.gpu`."""
    v, o = volumes, overheads
    cycles = step_cycles(v, machine, o)
    one, alone = cycles["through"], cycles["alone"]

    def step(count: np.ndarray) -> np.ndarray:
        total: np.ndarray = ((count * one) ** o.hiding + alone**o.hiding) ** (1 / o.hiding)
        return total

    each, waves, rest = busiest(v, machine)
    full = waves - (rest > 0)
    loop = v.steps * (full * step(v.resident) + np.where(rest > 0, step(np.maximum(rest, 1)), 0))
    drain = o.wave_latency * machine.memory_latency_cycles * waves + each * (
        o.drain_cycles * v.drain_wavefronts + o.store_cycles * v.store_instructions + o.sector_cycles * v.store_sectors
    )
    compute = (loop + drain) / machine.clock_hz
    memory = (v.distinct_bytes + o.write_factor * v.written_bytes) / (MEMORY_SHARE * machine.memory_bandwidth)
    together = (compute**MEMORY_OVERLAP + memory**MEMORY_OVERLAP) ** (1 / MEMORY_OVERLAP)
    launch = np.full(len(v), o.launch * machine.launch_seconds)
    # the terms add up: what memory adds to the processors' own time is its term
    return Estimate({"launch": launch, "loop": loop / machine.clock_hz, "drain": drain / machine.clock_hz, "memory": together - compute})


def printed_cost(volumes: Volumes, machine: Machine) -> Estimate:
    """CNNOpt's analytical model as its section 4.3 and its artifact have it, for comparison: the longer of the two movements, transactions of
    128 bytes over bandwidth. Global: fills of shared memory, filters read by the read-only path, stored results. Shared: reads of the input slice
    (and filters of the S kernel) and the staging of results."""
    v = volumes
    rounds = v.blocks * v.steps
    wide = 32 * WORD
    into_shared = rounds * (v.step_fill + v.warps * v.step_cached_loads) + v.blocks * v.store_instructions
    from_shared = rounds * v.warps * v.step_shared_loads + v.blocks * v.drain_wavefronts
    global_seconds = wide * into_shared / machine.memory_bandwidth
    shared_seconds = wide * from_shared / (machine.shared_bytes_per_cycle * machine.clock_hz * machine.processors)
    return Estimate({"global": global_seconds, "shared": shared_seconds}, overlapped=("global", "shared"))
