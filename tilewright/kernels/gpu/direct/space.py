"""The space of the `direct` schema: candidates built dimension by dimension, with infeasible and dominated ones rejected in between.

The register tile has one input channel, so that is not an axis of the space, by dominance (CNNOpt, section 3.2): for each channel a thread reads Fy
Fx Rk filters and (Ry + Fy - 1) (Rx + Fx - 1) inputs, however many channels it holds at once; more channels take registers from the tiles of the other
dimensions, all of which reduce reads.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, length, pairs, product_of, reject, take, times
from tilewright.kernels.gpu.direct.patch_layout import read_vector_of
from tilewright.kernels.gpu.direct.resources import registers_of, shared_bytes_of
from tilewright.kernels.gpu.direct.schedule import (
    AXES,
    BANKS,
    REGISTERS,
    RS,
    SHARED,
    UNROLLED_PRODUCTS,
    DirectFacts,
    S,
    blocks_of,
    extents_of,
    multiply_adds_of,
    patch_of,
    slice_of,
    threads_of,
    tiles_of,
)

REGISTER_K = (1, 2, 4, 8, 16)
REGISTER_PIXELS = (1, 2, 3, 4, 5, 6, 7, 8)
SUMS = (8, 128)
"""Minimum and maximum number of sums per thread."""
LEAST_THREADS = 64
MUCH_MORE = 1.03
"""Maximum cost of a tile relative to the best with the same register tile and number of threads."""
MORE_LOADS = 2.0
"""Maximum vector loads per multiply-add of a register tile relative to the best, after scaling by the square root of its size."""
HELD_FILTERS = 48
"""Maximum registers for the filters of two channels."""
CHANNELS = (1, 2, 3, 4, 8, 16)
STAGES = (1, 2, 3)
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
CLUSTERS = (2, 4, 8)
S_REGISTERS = 80
"""Registers for sums, slice and filters up to which the RS kernel's occupancy is so high that the S kernel has nothing to gain."""
PARTS, CLUSTER, ATOMICS = 0, 1, 2

Rules = list[tuple[str, np.ndarray]]
Space = tuple[dict[str, np.ndarray], dict[str, int]]


def direct_space(facts: DirectFacts, machine: Machine, atomics: bool = False) -> Space:
    """Candidates with the columns AXES, and the number rejected for each reason. A candidate rejected before all of its dimensions are chosen counts
    once. `atomics`: also offers splits whose parts are added by atomic operations, in no fixed order."""
    rejected: dict[str, int] = {}

    def keep(candidates: Columns, rules: Rules) -> dict[str, np.ndarray]:
        left, counts = reject(candidates, rules)
        for reason, count in counts.items():
            rejected[reason] = rejected.get(reason, 0) + count
        return left

    register = _register_tiles()
    candidates, threads = keep(register, register_rules(facts, register)), _threads(machine.threads_per_block)
    beyond = _beyond(facts, candidates, threads)
    if beyond.any():
        rejected["the block tile is twice the extent"] = int(beyond.sum())
    candidates = pairs(candidates, threads, ~beyond)
    candidates = keep(candidates, block_rules(candidates, machine))
    candidates = keep(candidates, waste_rules(facts, candidates))
    candidates = keep(candidates, [("level 2 brings a tile more slowly than it is multiplied", _too_slow(facts, candidates, machine))])
    candidates = keep(candidates, [("another arrangement of the same threads reads less shared memory", _arranged_worse(facts, candidates))])
    candidates = keep(candidates, [("the block tile reads or wastes more than another of its size", _shaped_worse(facts, candidates, machine))])
    own = (facts.channels,) if facts.channels <= CHANNELS[-1] else ()
    candidates = times(candidates, product_of({"channels": sorted({*CHANNELS, *own})}))
    candidates = keep(candidates, channel_rules(facts, candidates))
    candidates = times(candidates, product_of({"stages": STAGES if facts.copies(machine) else (1,), "filters": (SHARED, 1, REGISTERS)}))
    candidates = keep(candidates, stage_rules(facts, candidates, machine))
    candidates = times(candidates, _splits(machine, atomics))
    candidates = keep(candidates, split_rules(facts, candidates, machine))
    candidates = keep(candidates, [("shared memory exceeds a block's", shared_bytes_of(facts, candidates) > machine.shared_bytes_per_block)])
    return {name: candidates[name] for name in AXES}, rejected


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(limit.bit_length()) if 2**i <= limit]


@lru_cache(maxsize=1)
def _register_tiles() -> Columns:
    """Register tiles of all sizes."""
    return product_of({"slice": (RS, S), "register_k": REGISTER_K, "register_y": REGISTER_PIXELS, "register_x": REGISTER_PIXELS})


@lru_cache(maxsize=8)
def _threads(most_threads: int) -> Columns:
    """Shapes of warps, and of blocks of at most so many threads, in powers of two."""
    axes = {f"warp_{axis}": _powers(BANKS) for axis in "kyx"}
    warps = product_of(axes)
    warps = take(warps, warps["warp_k"] * warps["warp_y"] * warps["warp_x"] == BANKS)
    most = most_threads // BANKS
    blocks = product_of({f"block_{axis}": _powers(most) for axis in "kyx"})
    count = blocks["block_k"] * blocks["block_y"] * blocks["block_x"]
    return times(warps, take(blocks, (count <= most) & (count >= LEAST_THREADS // BANKS)))


def _splits(machine: Machine, atomics: bool) -> dict[str, np.ndarray]:
    ways = [PARTS] + [CLUSTER] * (machine.compute_capability >= (9, 0)) + [ATOMICS] * atomics
    candidates = product_of({"split": SPLITS, "way": ways})
    clustered = (candidates["way"] == CLUSTER) & np.isin(candidates["split"], CLUSTERS)
    possible = (candidates["way"] == PARTS) | clustered | ((candidates["way"] == ATOMICS) & (candidates["split"] > 1))
    candidates = take(candidates, possible)
    way = candidates.pop("way")
    return candidates | {"cluster": (way == CLUSTER).astype(np.int64), "atomics": (way == ATOMICS).astype(np.int64)}


def _wasted(extent: int, tile: np.ndarray) -> np.ndarray:
    """Work along a dimension relative to what is needed, at least one."""
    work: np.ndarray = -(-extent // tile) * tile / extent
    return work


def _odd(extent: int, tile: np.ndarray) -> np.ndarray:
    """Mask of tiles that neither divide the extent, nor are powers of two, nor have at least 5 % less padded work than a tile of four."""
    wasted = _wasted(extent, tile)
    odd: np.ndarray = ((tile & (tile - 1)) > 0) & (extent % tile > 0) & (wasted > 0.95 * _wasted(extent, np.full_like(tile, 4)))
    return odd


def register_rules(facts: DirectFacts, candidates: Columns) -> Rules:
    """Reasons for which a register tile is infeasible or certainly wasteful."""
    k, y, x = (candidates[f"register_{axis}"] for axis in "kyx")
    sums = k * y * x
    all_sums = min(SUMS[0], facts.outputs * facts.height * facts.width)
    taps = facts.filter_y * facts.filter_x
    slice_rows, slice_columns = slice_of(facts, candidates)
    rs = candidates["slice"] == RS
    held = sums + np.where(rs, slice_rows * slice_columns + k, slice_columns + facts.filter_x * k)
    lanes = np.where(x * facts.stride_x % 4 == 0, 4, np.where(x * facts.stride_x % 2 == 0, 2, 1))
    vectors = slice_columns // lanes + slice_columns % lanes // 2 + slice_columns % 2 * (lanes > 1)
    read = np.where(rs, slice_rows, y * facts.filter_y) * vectors + taps * -(-k // 4)
    products = sums * np.where(rs, taps, facts.filter_x)
    # loads per multiply-add fall with the square root of a tile's size
    each = read / (sums * taps) * np.sqrt(sums)
    odd = _odd(facts.height, y) | _odd(facts.width, x)
    beyond = (k >= 2 * facts.outputs) & (k > 1) | (y > facts.height) | (x > facts.width)
    wasteful = _wasted(facts.height, y) * _wasted(facts.width, x) > 1.25
    least = float(each[~odd & ~beyond & ~wasteful & (sums <= SUMS[1])].min(initial=np.inf))
    return [
        ("the register tile exceeds the extent", beyond),
        ("the register tile wastes more than a fifth of its work", wasteful),
        ("the register tile neither divides the extent nor is a power of two, nor wastes little", odd),
        (f"a thread holds fewer than {SUMS[0]} or more than {SUMS[1]} sums", (sums < all_sums) | (sums > SUMS[1])),
        ("the S kernel with one row of taps and outputs is the RS kernel", ~rs & (y == 1) & (facts.filter_y == 1)),
        ("the multiply-adds of a channel are too many to unroll", products > 1.5 * UNROLLED_PRODUCTS),
        ("registers exceed a thread's", held + 24 > 255),
        ("the S kernel where the RS kernel's registers do", ~rs & (sums + slice_rows * slice_columns + k <= S_REGISTERS)),
        ("a thread makes more loads than with another shape of its tile", each > MORE_LOADS * least),
    ]


def _beyond(facts: DirectFacts, candidates: Columns, threads: Columns) -> np.ndarray:
    """[register tiles, shapes of warps and blocks]: whether the tile of a block is twice an extent."""
    beyond = np.zeros((length(candidates), length(threads)), dtype=bool)
    for axis, extent in zip("kyx", (facts.outputs, facts.height, facts.width), strict=True):
        lone = candidates[f"register_{axis}"][:, None]
        many = threads[f"warp_{axis}"] * threads[f"block_{axis}"]
        beyond |= (many > 1) & (lone * many >= 2 * np.maximum(extent, lone))
    return beyond


def block_rules(candidates: Columns, machine: Machine) -> Rules:
    """Reasons for which a shape of warps and blocks, whose tile is no more than twice the extents, is infeasible or certainly wasteful."""
    k, threads = extents_of(candidates)[0], threads_of(candidates)
    vectors = k // np.minimum(4, k)
    estimate = candidates["register_k"] * candidates["register_y"] * candidates["register_x"] * threads
    return [
        ("sums exceed a processor's registers", estimate > machine.registers_per_processor * 3 // 4),
        ("loads of filters do not divide among the threads", (vectors > threads) | (threads % vectors != 0)),
    ]


def waste_rules(facts: DirectFacts, candidates: Columns) -> Rules:
    """Reasons for which partial tiles are too wasteful, compared with those of other candidates."""
    k, y, x = extents_of(candidates)
    wasted = _wasted(facts.outputs, k) * _wasted(facts.height, y) * _wasted(facts.width, x)
    limit = max(1.25, 1.2 * float(wasted.min(initial=np.inf)))
    return [("partial tiles waste more than a quarter of the work, and a fifth more than others", wasted > limit)]


def _level2_cycles(facts: DirectFacts, candidates: Columns, machine: Machine) -> np.ndarray:
    """Cycles in which level 2 supplies a block's patch and filters of one channel."""
    patch_rows, patch_columns = patch_of(facts, candidates)
    cache = machine.cache(2)
    assert cache is not None
    elements = patch_rows * patch_columns + extents_of(candidates)[0] * facts.filter_y * facts.filter_x
    cycles: np.ndarray = facts.stored_bytes * elements / cache.bandwidth
    return cycles


def _too_slow(facts: DirectFacts, candidates: Columns, machine: Machine) -> np.ndarray:
    """Mask of tiles whose data take over 1.25 times as long as their multiply-adds, and over 1.1 times the best such ratio."""
    k, y, x = extents_of(candidates)
    taps = facts.filter_y * facts.filter_x
    slower = _level2_cycles(facts, candidates, machine) / (k * y * x * taps / machine.fp32_lanes_per_processor)
    too_slow: np.ndarray = slower > max(1.25, 1.1 * float(slower.min(initial=np.inf)))
    return too_slow


def _read_wavefronts(facts: DirectFacts, candidates: Columns) -> np.ndarray:
    """Cycles of shared memory in which a warp reads its filters and slices of one channel, without bank conflicts."""
    taps = facts.filter_y * facts.filter_x
    width = np.minimum(4, candidates["register_k"])
    lanes = read_vector_of(facts, candidates)
    slice_rows, slice_columns = slice_of(facts, candidates)
    read_rows = np.where(candidates["slice"] == RS, slice_rows, candidates["register_y"] * facts.filter_y)
    filters = taps * (candidates["register_k"] // width) * np.maximum(1.0, candidates["warp_k"] * width / BANKS)
    inputs = read_rows * -(-slice_columns // lanes) * np.maximum(1.0, candidates["warp_y"] * candidates["warp_x"] * lanes / BANKS)
    wavefronts: np.ndarray = filters + inputs
    return wavefronts


def _first_of_best(key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Mask of all rows except, for each key, the first with the smallest value."""
    order = np.lexsort((np.arange(len(key)), value, key))
    first = np.ones(len(key), dtype=bool)
    first[1:] = key[order][1:] != key[order][:-1]
    worse = np.ones(len(key), dtype=bool)
    worse[order[first]] = False
    return worse


def _key(*columns: np.ndarray) -> np.ndarray:
    key = np.zeros_like(columns[0])
    for column in columns:
        key = key * (int(column.max(initial=0)) + 1) + column
    return key


def _arranged_worse(facts: DirectFacts, candidates: Columns) -> np.ndarray:
    names = ("slice", "register_k", "register_y", "register_x")
    return _first_of_best(_key(*(candidates[name] for name in names), *extents_of(candidates)), _read_wavefronts(facts, candidates))


def _channel_cycles(facts: DirectFacts, candidates: Columns, machine: Machine) -> np.ndarray:
    """Cycles of a block for one channel: multiply-adds, plus half its reads from shared memory and level 2 (the other half is hidden)."""
    k, y, x = extents_of(candidates)
    fma = k * y * x * facts.filter_y * facts.filter_x / machine.fp32_lanes_per_processor
    reads = _read_wavefronts(facts, candidates) * threads_of(candidates) / BANKS
    cycles: np.ndarray = fma + (reads + _level2_cycles(facts, candidates, machine)) / 2
    return cycles


def _shaped_worse(facts: DirectFacts, candidates: Columns, machine: Machine) -> np.ndarray:
    """Mask of tiles that exceed MUCH_MORE times the best with the same register tile and number of threads. The measure is `_channel_cycles` times
    the waste of partial tiles."""
    k, y, x = extents_of(candidates)
    wasted = _wasted(facts.outputs, k) * _wasted(facts.height, y) * _wasted(facts.width, x)
    value = wasted * _channel_cycles(facts, candidates, machine)
    names = ("slice", "register_k", "register_y", "register_x")
    key = _key(*(candidates[name] for name in names), threads_of(candidates))
    _, group = np.unique(key, return_inverse=True)
    least = np.full(int(group.max(initial=0)) + 1, np.inf)
    np.minimum.at(least, group, value)
    worse: np.ndarray = value > MUCH_MORE * least[group]
    return worse


def channel_rules(facts: DirectFacts, candidates: Columns) -> Rules:
    """Reasons for which a chunk of channels is wasteful."""
    channels = candidates["channels"]
    products = multiply_adds_of(facts, candidates) * channels
    padded = -(-facts.channels // channels) * channels
    longest = channels[(channels <= facts.channels) & (padded <= 1.25 * facts.channels)].max(initial=1)
    return [
        ("a chunk has more channels than there are", (channels > facts.channels) & (channels > 1)),
        ("the last chunk of channels is mostly empty", padded > 1.25 * facts.channels),
        ("a step is too short for its barrier", (products < 400) & (channels < longest)),
        ("a step is longer than it need be", (products > 4000) & (channels > 2)),
    ]


def stage_rules(facts: DirectFacts, candidates: Columns, machine: Machine) -> Rules:
    """Reasons for which stages, or a way of reading filters, are infeasible or dominated."""
    taps = facts.filter_y * facts.filter_x
    threads, registers = threads_of(candidates), registers_of(facts, candidates)
    steps = -(-facts.channels // candidates["channels"])
    held = 2 * taps * candidates["register_k"]
    too_many = multiply_adds_of(facts, candidates) > 1.5 * UNROLLED_PRODUCTS
    usual = 2 if facts.copies(machine) else 1
    single = {**candidates, "split": np.ones_like(threads), "cluster": np.zeros_like(threads)}
    rs = registers_of(facts, {**candidates, "slice": np.full_like(threads, RS)})
    return [
        ("more stages than steps", (candidates["stages"] > 2) & (candidates["stages"] > steps)),
        ("filters outside of shared memory with other than two stages", (candidates["filters"] != SHARED) & (candidates["stages"] != usual)),
        ("filters of a channel do not fit in registers", (candidates["filters"] == REGISTERS) & (too_many | (held > HELD_FILTERS))),
        ("registers exceed a thread's", registers > machine.registers_per_thread_max),
        ("registers exceed a processor's", registers * threads > machine.registers_per_processor),
        (
            "the S kernel lets no more blocks reside than the RS kernel",
            (candidates["slice"] == S)
            & (rs <= machine.registers_per_thread_max)
            & (machine.registers_per_processor // (registers * threads) <= machine.registers_per_processor // (rs * threads)),
        ),
        ("shared memory exceeds a block's", shared_bytes_of(facts, single) > machine.shared_bytes_per_block),
    ]


def split_rules(facts: DirectFacts, candidates: Columns, machine: Machine) -> Rules:
    """Reasons for which a split is infeasible or certainly wasteful."""
    split = candidates["split"]
    steps = -(-facts.channels // candidates["channels"])
    each = -(-steps // split)
    tiles = tiles_of(facts, candidates)
    k, y, x = extents_of(candidates)
    share = k * y * x % (split * np.minimum(facts.store_vector, k))
    # a small split may even out the tail of many tiles; a large one fills idle processors
    most = np.where(split <= 3, 16, 3)
    further = min(SPLITS[-1], facts.channels) // 4
    return [
        ("a split would have nothing to reduce", (split > 1) & ((split - 1) * each >= steps)),
        ("a split reduces fewer than two steps", (split > 1) & (each < 2)),
        ("more stages than steps", (candidates["stages"] > 2) & (candidates["stages"] > each)),
        ("a split makes more blocks than even out the processors' load", (split > 1) & (tiles * split > most * machine.processors)),
        ("too few blocks, though the channels could be split further", (tiles * split * 2 < machine.processors) & (split < further)),
        ("a cluster does not divide the steps or the tile evenly", (candidates["cluster"] > 0) & ((steps % split != 0) | (share != 0))),
        ("more blocks than a grid has", blocks_of(facts, candidates) >= 2**31),
    ]
