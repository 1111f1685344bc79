"""The space of the `direct` schema: candidates made dimension by dimension, with what cannot or need not be tried thrown out in between.

The register tile of input channels is one and no axis of the space, by dominance (CNNOpt, section 3.2): for each channel a thread reads
Fy Fx Rk filters and (Ry + Fy - 1) (Rx + Fx - 1) inputs, whatever the number of channels that it holds at once; more of them take registers from
the tiles of the other dimensions, which all reduce what is read.
"""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, length, product_of, reject, take
from tilewright.kernels.gpu.direct.schedule import (
    AXES,
    BANKS,
    REGISTERS,
    RS,
    SHARED,
    UNROLLED_PRODUCTS,
    DirectProblem,
    S,
    blocks_of,
    extents_of,
    multiply_adds_of,
    patch_of,
    read_lanes_of,
    registers_of,
    shared_bytes_of,
    slice_of,
    steps_of,
    threads_of,
    tiles_of,
)

REGISTER_K = (1, 2, 4, 8, 16)
REGISTER_PIXELS = (1, 2, 3, 4, 5, 6, 7, 8)
SUMS = (8, 128)
"""Least and most sums that a thread holds."""
THREADS = (64, 256)
MUCH_MORE = 1.03
"""By how much a tile may need more data, or more cycles of shared memory, than the best of its size."""
MORE_LOADS = 2.0
"""By how much a register tile may need more vector loads for each multiply-add than the best there is, but for its size."""
HELD_FILTERS = 48
"""Registers for two channels' filters at most."""
CHANNELS = (1, 2, 3, 4, 8, 16)
STAGES = (1, 2, 3)
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
CLUSTERS = (2, 4, 8)
MOST = 12_000
"""Candidates of a problem: of more, those with the least cycles on the busiest processor by a count without latencies and occupancy."""
STEP_CYCLES = 60
"""What a step costs a block in that count besides its work."""
S_REGISTERS = 80
"""Sums, slice and filters of the RS kernel that let so many threads reside that the S kernel has nothing to gain."""
PARTS, CLUSTER, ATOMICS = 0, 1, 2

Rules = list[tuple[str, np.ndarray]]
Space = tuple[dict[str, np.ndarray], dict[str, int]]


def direct_space(problem: DirectProblem, machine: Machine, atomics: bool = False) -> Space:
    """Candidates with the columns AXES; and how many were rejected by reason. A candidate that is rejected before all of its dimensions are chosen
    counts once. `atomics`: splits whose parts are added by atomic operations, in no fixed order, are offered too."""
    rejected: dict[str, int] = {}

    def keep(rows: Columns, rules: Rules) -> dict[str, np.ndarray]:
        left, counts = reject(rows, rules)
        for reason, count in counts.items():
            rejected[reason] = rejected.get(reason, 0) + count
        return left

    register = product_of({"slice": (RS, S), "register_k": REGISTER_K, "register_y": REGISTER_PIXELS, "register_x": REGISTER_PIXELS})
    rows = keep(register, register_rules(register, problem))
    rows = _times(rows, _threads(machine))
    rows = keep(rows, block_rules(rows, problem, machine))
    rows = keep(rows, waste_rules(rows, problem))
    rows = keep(rows, [("level 2 brings a tile more slowly than it is multiplied", _too_slow(rows, problem, machine))])
    rows = keep(rows, [("another arrangement of the same threads reads less shared memory", _arranged_worse(rows, problem))])
    rows = keep(rows, [("the block tile reads or wastes more than another of its size", _shaped_worse(rows, problem, machine))])
    own = (problem.channels,) if problem.channels <= CHANNELS[-1] else ()
    rows = _times(rows, product_of({"channels": sorted({*CHANNELS, *own})}))
    rows = keep(rows, channel_rules(rows, problem))
    copies = machine.compute_capability >= (8, 0)
    rows = _times(rows, product_of({"stages": STAGES if copies else (1,), "filters": (SHARED, 1, REGISTERS)}))
    rows = keep(rows, stage_rules(rows, problem, machine))
    rows = _times(rows, _splits(machine, atomics))
    rows = keep(rows, split_rules(rows, problem, machine))
    rows = keep(rows, [(f"{MOST} others have less to do on the busiest processor", _beyond_most(rows, problem, machine))])
    rows = keep(rows, [("shared memory exceeds a block's", shared_bytes_of(rows, problem) > machine.shared_bytes_per_block)])
    return {name: rows[name] for name in AXES}, rejected


def _times(rows: Columns, more: Columns) -> dict[str, np.ndarray]:
    """Every row with every one of the others."""
    each, count = length(more), length(rows)
    return {name: np.repeat(column, each) for name, column in rows.items()} | {name: np.tile(column, count) for name, column in more.items()}


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(limit.bit_length()) if 2**i <= limit]


def _threads(machine: Machine) -> dict[str, np.ndarray]:
    """Shapes of warps and blocks in powers of two."""
    axes = {f"warp_{axis}": _powers(BANKS) for axis in "kyx"}
    warps = product_of(axes)
    warps = take(warps, warps["warp_k"] * warps["warp_y"] * warps["warp_x"] == BANKS)
    most = min(THREADS[1], machine.threads_per_block) // BANKS
    blocks = product_of({f"block_{axis}": _powers(most) for axis in "kyx"})
    count = blocks["block_k"] * blocks["block_y"] * blocks["block_x"]
    return _times(warps, take(blocks, (count <= most) & (count >= THREADS[0] // BANKS)))


def _splits(machine: Machine, atomics: bool) -> dict[str, np.ndarray]:
    ways = [PARTS] + [CLUSTER] * (machine.compute_capability >= (9, 0)) + [ATOMICS] * atomics
    rows = product_of({"split": SPLITS, "way": ways})
    clustered = (rows["way"] == CLUSTER) & np.isin(rows["split"], CLUSTERS)
    possible = (rows["way"] == PARTS) | clustered | ((rows["way"] == ATOMICS) & (rows["split"] > 1))
    rows = take(rows, possible)
    way = rows.pop("way")
    return rows | {"cluster": (way == CLUSTER).astype(np.int64), "atomics": (way == ATOMICS).astype(np.int64)}


def _wasted(extent: int, tile: np.ndarray) -> np.ndarray:
    """Work along a dimension over what is needed, at least one."""
    work: np.ndarray = -(-extent // tile) * tile / extent
    return work


def _odd(extent: int, tile: np.ndarray) -> np.ndarray:
    """Tiles that neither divide the extent, nor are powers of two, nor waste a twentieth less than four do."""
    wasted = _wasted(extent, tile)
    odd: np.ndarray = ((tile & (tile - 1)) > 0) & (extent % tile > 0) & (wasted > 0.95 * _wasted(extent, np.full_like(tile, 4)))
    return odd


def register_rules(rows: Columns, problem: DirectProblem) -> Rules:
    """Why a register tile is infeasible or certainly wasteful."""
    k, y, x = (rows[f"register_{axis}"] for axis in "kyx")
    sums = k * y * x
    all_sums = min(SUMS[0], problem.outputs * problem.height * problem.width)
    taps = problem.filter_y * problem.filter_x
    slice_rows, slice_columns = slice_of(rows, problem)
    rs = rows["slice"] == RS
    held = sums + np.where(rs, slice_rows * slice_columns + k, slice_columns + problem.filter_x * k)
    lanes = np.where(x * problem.stride_x % 4 == 0, 4, np.where(x * problem.stride_x % 2 == 0, 2, 1))
    vectors = slice_columns // lanes + slice_columns % lanes // 2 + slice_columns % 2 * (lanes > 1)
    read = np.where(rs, slice_rows, y * problem.filter_y) * vectors + taps * -(-k // 4)
    products = sums * np.where(rs, taps, problem.filter_x)
    # larger tiles read less for each multiply-add, as the root of their size
    each = read / (sums * taps) * np.sqrt(sums)
    odd = _odd(problem.height, y) | _odd(problem.width, x)
    beyond = (k >= 2 * problem.outputs) & (k > 1) | (y > problem.height) | (x > problem.width)
    wasteful = _wasted(problem.height, y) * _wasted(problem.width, x) > 1.25
    least = float(each[~odd & ~beyond & ~wasteful & (sums <= SUMS[1])].min(initial=np.inf))
    return [
        ("the register tile exceeds the extent", beyond),
        ("the register tile wastes more than a fifth of its work", wasteful),
        ("the register tile neither divides the extent nor is a power of two, nor wastes little", odd),
        (f"a thread holds fewer than {SUMS[0]} or more than {SUMS[1]} sums", (sums < all_sums) | (sums > SUMS[1])),
        ("the S kernel with one row of taps and outputs is the RS kernel", ~rs & (y == 1) & (problem.filter_y == 1)),
        ("the multiply-adds of a channel are too many to unroll", products > 1.5 * UNROLLED_PRODUCTS),
        ("registers exceed a thread's", held + 24 > 255),
        ("the S kernel where the RS kernel's registers do", ~rs & (sums + slice_rows * slice_columns + k <= S_REGISTERS)),
        ("a thread makes more loads than with another shape of its tile", each > MORE_LOADS * least),
    ]


def block_rules(rows: Columns, problem: DirectProblem, machine: Machine) -> Rules:
    """Why a shape of warps and blocks is infeasible or certainly wasteful."""
    k = extents_of(rows)[0]
    beyond = np.zeros(len(k), dtype=bool)
    for axis, extent in zip("kyx", (problem.outputs, problem.height, problem.width), strict=True):
        lone = rows[f"register_{axis}"]
        many = rows[f"warp_{axis}"] * rows[f"block_{axis}"]
        beyond |= (many > 1) & (lone * many >= 2 * np.maximum(extent, lone))
    vectors = k // np.minimum(4, k)
    estimate = rows["register_k"] * rows["register_y"] * rows["register_x"] * threads_of(rows)
    return [
        ("the block tile is twice the extent", beyond),
        ("sums exceed a processor's registers", estimate > machine.registers_per_processor * 3 // 4),
        ("loads of filters do not divide among the threads", (vectors > threads_of(rows)) | (threads_of(rows) % vectors != 0)),
    ]


def waste_rules(rows: Columns, problem: DirectProblem) -> Rules:
    """Why partial tiles are too wasteful, beside those of other tiles."""
    k, y, x = extents_of(rows)
    wasted = _wasted(problem.outputs, k) * _wasted(problem.height, y) * _wasted(problem.width, x)
    limit = max(1.25, 1.2 * float(wasted.min(initial=np.inf)))
    return [("partial tiles waste more than a quarter of the work, and a fifth more than others", wasted > limit)]


def _level2_cycles(rows: Columns, problem: DirectProblem, machine: Machine) -> np.ndarray:
    """Cycles in which level 2 brings a block's patch and filters of one channel."""
    patch_rows, patch_columns = patch_of(rows, problem)
    cache = machine.cache(2)
    assert cache is not None
    elements = patch_rows * patch_columns + extents_of(rows)[0] * problem.filter_y * problem.filter_x
    cycles: np.ndarray = problem.element_bytes * elements / cache.bandwidth
    return cycles


def _too_slow(rows: Columns, problem: DirectProblem, machine: Machine) -> np.ndarray:
    """Tiles whose data take a quarter longer than their multiply-adds, where others' do not."""
    k, y, x = extents_of(rows)
    taps = problem.filter_y * problem.filter_x
    slower = _level2_cycles(rows, problem, machine) / (k * y * x * taps / machine.fp32_lanes_per_processor)
    too_slow: np.ndarray = slower > max(1.25, 1.1 * float(slower.min(initial=np.inf)))
    return too_slow


def _read_wavefronts(rows: Columns, problem: DirectProblem) -> np.ndarray:
    """Cycles of shared memory in which a warp reads its filters and slices of one channel, were there no bank conflicts."""
    taps = problem.filter_y * problem.filter_x
    width = np.minimum(4, rows["register_k"])
    lanes = read_lanes_of(rows, problem)
    slice_rows, slice_columns = slice_of(rows, problem)
    read_rows = np.where(rows["slice"] == RS, slice_rows, rows["register_y"] * problem.filter_y)
    filters = taps * (rows["register_k"] // width) * np.maximum(1.0, rows["warp_k"] * width / BANKS)
    inputs = read_rows * -(-slice_columns // lanes) * np.maximum(1.0, rows["warp_y"] * rows["warp_x"] * lanes / BANKS)
    wavefronts: np.ndarray = filters + inputs
    return wavefronts


def _first_of_best(key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """A mask of the rows that are not the first with the least value among those of their key."""
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


def _arranged_worse(rows: Columns, problem: DirectProblem) -> np.ndarray:
    names = ("slice", "register_k", "register_y", "register_x")
    return _first_of_best(_key(*(rows[name] for name in names), *extents_of(rows)), _read_wavefronts(rows, problem))


def _channel_cycles(rows: Columns, problem: DirectProblem, machine: Machine) -> np.ndarray:
    """Cycles of a block for one channel: multiply-adds, and half of the time of its reads of shared memory and of level 2 (the rest is hidden)."""
    k, y, x = extents_of(rows)
    fma = k * y * x * problem.filter_y * problem.filter_x / machine.fp32_lanes_per_processor
    reads = _read_wavefronts(rows, problem) * threads_of(rows) / BANKS
    cycles: np.ndarray = fma + (reads + _level2_cycles(rows, problem, machine)) / 2
    return cycles


def _shaped_worse(rows: Columns, problem: DirectProblem, machine: Machine) -> np.ndarray:
    """Tiles that take longer than the best with the same register tile and number of threads: their multiply-adds, and half of the time of their
    reads of shared memory and of level 2 (the rest of it is hidden), times the work that partial tiles waste."""
    k, y, x = extents_of(rows)
    wasted = _wasted(problem.outputs, k) * _wasted(problem.height, y) * _wasted(problem.width, x)
    value = wasted * _channel_cycles(rows, problem, machine)
    names = ("slice", "register_k", "register_y", "register_x")
    key = _key(*(rows[name] for name in names), threads_of(rows))
    _, group = np.unique(key, return_inverse=True)
    least = np.full(int(group.max(initial=0)) + 1, np.inf)
    np.minimum.at(least, group, value)
    worse: np.ndarray = value > MUCH_MORE * least[group]
    return worse


def channel_rules(rows: Columns, problem: DirectProblem) -> Rules:
    """Why a chunk of channels is wasteful."""
    channels = rows["channels"]
    products = multiply_adds_of(rows, problem) * channels
    padded = -(-problem.channels // channels) * channels
    longest = channels[(channels <= problem.channels) & (padded <= 1.25 * problem.channels)].max(initial=1)
    return [
        ("a chunk has more channels than there are", (channels > problem.channels) & (channels > 1)),
        ("the last chunk of channels is mostly empty", padded > 1.25 * problem.channels),
        ("a step is too short for its barrier", (products < 400) & (channels < longest)),
        ("a step is longer than it need be", (products > 4000) & (channels > 2)),
    ]


def stage_rules(rows: Columns, problem: DirectProblem, machine: Machine) -> Rules:
    """Why stages, or a way of reading filters, are infeasible or dominated."""
    taps = problem.filter_y * problem.filter_x
    threads, registers = threads_of(rows), registers_of(rows, problem)
    steps = -(-problem.channels // rows["channels"])
    held = 2 * taps * rows["register_k"]
    too_many = multiply_adds_of(rows, problem) > 1.5 * UNROLLED_PRODUCTS
    usual = 2 if machine.compute_capability >= (8, 0) else 1
    single = {**rows, "split": np.ones_like(threads), "cluster": np.zeros_like(threads)}
    rs = registers_of({**rows, "slice": np.full_like(threads, RS)}, problem)
    return [
        ("more stages than steps", (rows["stages"] > 2) & (rows["stages"] > steps)),
        ("filters outside of shared memory with other than two stages", (rows["filters"] != SHARED) & (rows["stages"] != usual)),
        ("filters of a channel do not fit in registers", (rows["filters"] == REGISTERS) & (too_many | (held > HELD_FILTERS))),
        ("registers exceed a thread's", registers > machine.registers_per_thread_max),
        ("registers exceed a processor's", registers * threads > machine.registers_per_processor),
        (
            "the S kernel lets no more blocks reside than the RS kernel",
            (rows["slice"] == S)
            & (rs <= machine.registers_per_thread_max)
            & (machine.registers_per_processor // (registers * threads) <= machine.registers_per_processor // (rs * threads)),
        ),
        ("shared memory exceeds a block's", shared_bytes_of(single, problem) > machine.shared_bytes_per_block),
    ]


def _beyond_most(rows: Columns, problem: DirectProblem, machine: Machine) -> np.ndarray:
    """All but the MOST candidates with the least cycles on the busiest processor, empty parts of tiles and chunks included: multiply-adds, and half
    of the reads of shared memory and level 2, as in `_shaped_worse`."""
    if length(rows) <= MOST:
        return np.zeros(length(rows), dtype=bool)
    each = -(-tiles_of(rows, problem) * rows["split"] // machine.processors)
    cycles = each * steps_of(rows, problem) * (rows["channels"] * _channel_cycles(rows, problem, machine) + STEP_CYCLES)
    beyond = np.ones(length(rows), dtype=bool)
    beyond[np.argpartition(cycles, MOST)[:MOST]] = False
    return beyond


def split_rules(rows: Columns, problem: DirectProblem, machine: Machine) -> Rules:
    """Why a split is infeasible or certainly wasteful."""
    split = rows["split"]
    steps = -(-problem.channels // rows["channels"])
    each = -(-steps // split)
    tiles = tiles_of(rows, problem)
    k, y, x = extents_of(rows)
    share = k * y * x % (split * np.minimum(problem.store_lanes, k))
    # a small split may even out the tail of many tiles, a large one fills processors that had none
    most = np.where(split <= 3, 16, 3)
    further = min(SPLITS[-1], problem.channels) // 4
    return [
        ("a split would have nothing to reduce", (split > 1) & ((split - 1) * each >= steps)),
        ("a split reduces fewer than two steps", (split > 1) & (each < 2)),
        ("more stages than steps", (rows["stages"] > 2) & (rows["stages"] > each)),
        ("a split makes more blocks than even out the processors' load", (split > 1) & (tiles * split > most * machine.processors)),
        ("too few blocks, though the channels could be split further", (tiles * split * 2 < machine.processors) & (split < further)),
        ("a cluster does not divide the steps or the tile evenly", (rows["cluster"] > 0) & ((steps % split != 0) | (share != 0))),
        ("more blocks than a grid has", blocks_of(rows, problem) >= 2**31),
    ]

