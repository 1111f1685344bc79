"""Data movement and resources of direct convolutions: our kernels, and those published with CNNOpt."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TypeAlias

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import TileCounts, ceil_div, row_sectors
from tilewright.kernels.gpu.direct.resources import registers_of, shared_bytes_of
from tilewright.kernels.gpu.direct.schedule import RS, DirectFacts
from tilewright.kernels.gpu.rates import SECTOR_BYTES

Problem: TypeAlias = DirectFacts | Columns
"""One problem, or the same fields as columns with one problem per row."""


@dataclass(frozen=True)
class Variant:
    """Properties of a direct kernel that its schedule does not determine. `channels_last`: input and result have channels innermost, otherwise
    columns of the image. `staged_result`: results pass through shared memory (padded by one column) to be stored in rows. `spare_registers`:
    registers per thread beyond equations 2 and 3."""

    channels_last: bool = True
    staged_result: bool = False
    spare_registers: int = 24


GENERATED = Variant()


def problem_columns(problem: Problem, count: int) -> dict[str, np.ndarray]:
    """The fields of a problem as float64: columns of `count` rows, or single numbers if all rows share one problem."""
    if isinstance(problem, DirectFacts):
        return {name: np.asarray(value, dtype=np.float64) for name, value in asdict(problem).items()}
    plain = asdict(DirectFacts(1, 1, 1, 1, 1, 1, 1, 1))
    return {name: np.asarray(problem.get(name, default), dtype=np.float64) * np.ones(count) for name, default in plain.items()}


def input_extent(outputs: np.ndarray, filter_size: np.ndarray, stride: np.ndarray, dilation: np.ndarray) -> np.ndarray:
    """Input points along one dimension for `outputs` adjacent outputs: (outputs - 1) stride + (filter - 1) dilation + 1. The paper prints the case of
    stride and dilation 1, outputs + filter - 1."""
    inputs: np.ndarray = (outputs - 1) * stride + (filter_size - 1) * dilation + 1
    return inputs


def direct_registers(candidates: Columns, problem: Problem, form: Variant) -> np.ndarray:
    """Registers per thread: its results, its slice of the input, one filter element, and the variant's spare registers.

    CNNOpt's equations 2 and 3, per thread. Equation 2 is printed with (Ry + Fy - 1) + (Rx + Fx - 1) for the slice; a two-dimensional slice holds the
    product, as in the text before the equation and in the artifact's script."""
    p = problem_columns(problem, len(candidates["slice"]))
    along_y = input_extent(candidates["register_y"], p["filter_y"], p["stride_y"], p["dilation_y"])
    along_x = input_extent(candidates["register_x"], p["filter_x"], p["stride_x"], p["dilation_x"])
    held = np.where(candidates["slice"] == RS, along_y * along_x, along_x)
    accumulators = candidates["register_k"] * candidates["register_y"] * candidates["register_x"]
    return accumulators + held + 1 + form.spare_registers


def variant_counts(
    candidates: Columns, problem: Problem, machine: Machine, form: Variant = GENERATED, resources: tuple[np.ndarray, np.ndarray] | None = None
) -> TileCounts:
    """Counts of the RS and S kernels of direct convolution (CNNOpt, sections 3 and 4.3). Columns `slice`, `register_*`, `warp_*`, `block_*`,
    `channels`, `split`, `stages`, `filters` are as in `DirectSchedule`. `resources`: registers per thread and bytes of shared memory per block, if
    known.

    Global to shared memory, per step of a block: the input tile of `channels` channels, in rows that are runs of words (`row_sectors`; with channels
    innermost the run is a pixel's channels), and the filters of the block's outputs. The paper prints ceil(tile / 32) as the transactions of one tile
    in one channel, and multiplies by blocks and channels. We count sectors and rows, because a row of a tile may start anywhere and a tile is not
    contiguous. Shared memory to registers, per warp: every element of its input slice once, with as many wavefronts as distinct words in the most
    loaded bank (threads along K share a word), and the F F register_k filter elements. Like the paper, we multiply these by warps, blocks and
    channels; the paper counts a filter read as one transaction, which holds only up to 32 words."""
    count = len(candidates["slice"])
    p = problem_columns(problem, count)
    r = {name: np.asarray(column, dtype=np.float64) for name, column in candidates.items()}
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

    # filling shared memory
    if form.channels_last:
        runs, run = in_y * in_x, r["channels"]
        fill = ceil_div(tile_words / p["input_vector"], machine.warp_size)
    else:
        runs, run = in_y * r["channels"], in_x
        # in RS a warp fills one row; in S, whose tiles span the image, the tile is one run of pairs
        fill = np.where(r["slice"] == RS, runs * ceil_div(in_x, machine.warp_size), ceil_div(tile_words, 2 * machine.warp_size))
    staged_filters = filters == 0
    fill = fill + np.where(staged_filters, r["channels"] * filter_size * ceil_div(tile_k, machine.warp_size * p["filter_vector"]), 0)
    filter_sectors = r["channels"] * filter_size * row_sectors(tile_k)
    sectors = runs * row_sectors(run) + filter_sectors

    # reads of a warp
    slice_x = input_extent(r["register_x"], p["filter_x"], p["stride_x"], p["dilation_x"])
    slice_y = input_extent(r["register_y"], p["filter_y"], p["stride_y"], p["dilation_y"])
    rows_read = np.where(r["slice"] == RS, slice_y, p["filter_y"] * r["register_y"])
    conflicts = bank_conflicts(r["register_x"] * p["stride_x"], r["warp_x"])
    input_loads = r["channels"] * rows_read * slice_x * conflicts
    # staged filters: a thread's register_k words are contiguous and read in pairs, so threads along K are register_k words apart
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
        # RS stores the tile in rows; in S the tile spans the image's width and is one run
        lines = np.where(r["slice"] == RS, tile_y, 1.0)
        line = np.where(r["slice"] == RS, tile_x, tile_points)
        store_instructions = tile_k * lines * ceil_div(line, machine.warp_size)
        store_sectors = tile_k * lines * row_sectors(line)
        drain = accumulators * warps + store_instructions
    else:
        shared_result = 0 * one
        store_instructions = warps * accumulators / np.minimum(p["store_vector"], r["register_k"])
        store_sectors = tile_points * row_sectors(tile_k)
        drain = 0 * one
    shared_words = stages * (tile_words + np.where(staged_filters, filter_words, 0)) + shared_result
    registers, shared_bytes = resources or (direct_registers(candidates, problem, form), p["element_bytes"] * shared_words)
    height = input_extent(p["height"], p["filter_y"], p["stride_y"], p["dilation_y"])
    width = input_extent(p["width"], p["filter_x"], p["stride_x"], p["dilation_x"])
    read = one * p["element_bytes"] * p["groups"] * (p["images"] * p["channels"] * height * width + p["outputs"] * p["channels"] * filter_size)
    written = one * p["element_bytes"] * p["images"] * p["groups"] * p["outputs"] * p["height"] * p["width"]
    points = p["images"] * p["groups"] * p["outputs"] * p["height"] * p["width"]
    return TileCounts(
        flops=one * 2 * points * p["channels"] * filter_size,
        read_bytes=read + p["epilogue_bytes"],
        result_bytes=written,
        level2_bytes=blocks * steps * sectors * SECTOR_BYTES + p["epilogue_bytes"],
        padded_flops=2 * blocks * tile_k * tile_points * steps * r["channels"] * filter_size,
        blocks=blocks,
        warps=warps,
        threads=threads,
        steps=steps,
        tile_steps=ceil_div(p["channels"], r["channels"]),
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
        reuse_bytes=p["element_bytes"] * each * (in_y * in_x + tile_k * filter_size),
    )


def direct_counts(facts: DirectFacts, candidates: Columns, machine: Machine) -> TileCounts:
    """`variant_counts` with the actual values for our kernels: resources of a block, and distinct bytes as stored in memory."""
    one = np.ones(len(candidates["slice"]))
    resources = registers_of(facts, candidates) * one, shared_bytes_of(facts, candidates) * one
    counts = variant_counts(candidates, facts, machine, GENERATED, resources)
    narrow = facts.stored_bytes / facts.element_bytes
    return replace(
        counts,
        level2_bytes=(counts.level2_bytes - facts.epilogue_bytes) * narrow + facts.epilogue_bytes,
        step_sectors=counts.step_sectors * narrow,
        reuse_bytes=counts.reuse_bytes * narrow,
        read_bytes=one * (facts.bytes_read + facts.filter_bytes + facts.epilogue_bytes),
        result_bytes=one * facts.bytes_written,
    )


def bank_conflicts(stride_words: np.ndarray, distinct: np.ndarray, banks: int = 32) -> np.ndarray:
    """Wavefronts of one load in which `distinct` groups of threads read words `stride_words` apart: words in the same bank are serialised.

    The words occupy banks / gcd(stride, banks) banks, so the result is ceil(distinct gcd / banks)."""
    shared = np.gcd(np.asarray(stride_words, dtype=np.int64), banks)
    return ceil_div(np.asarray(distinct, dtype=np.float64) * shared, banks)
