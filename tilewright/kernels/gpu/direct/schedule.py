"""Schedules of the `direct` schema on a GPU: direct convolution with tiles of output channels, rows and columns at every level.

The RS and S kernels of CNNOpt (PACT 2022, section 3): a thread keeps register_k x register_y x register_x outputs in registers. In the RS kernel it
holds the two-dimensional slice of the input that they need, in the S kernel one row of it at a time. `warp_*` are the threads of a warp along each
dimension (their product is 32), `block_*` the warps of a block; `channels` input channels at a time are staged in shared memory; `split` blocks
share the sum over input channels (split-C).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import DEFAULT_FLOAT, size_of
from tilewright.kernels.columns import Columns

RS, S = 2, 1
"""Values of `slice`: dimensions of the input slice that a thread holds in registers."""
SHARED, CACHED, REGISTERS = 0, 1, 2
"""Values of `filters`."""
BANKS = 32
"""Banks of shared memory, each of four bytes; as many as a warp has threads."""
UNROLLED_PRODUCTS = 1024
"""Multiply-adds that one unrolled stretch of channels holds at most."""
PADDINGS = 8
"""Paddings of a row of the patch that are tried."""


@dataclass(frozen=True)
class DirectProblem:
    """A convolution as the schema sees it: extents of the output, filter and reduction, and how operands and result are accessed.

    `outputs` and `channels` are those of one of the `groups`. `*_lanes`: widest vectors along input channels of the input, along output
    channels of the filters and of the result (1, 2 or 4). Bytes are distinct bytes in memory."""

    images: int
    groups: int
    outputs: int
    channels: int
    height: int
    width: int
    filter_y: int
    filter_x: int
    stride_y: int = 1
    stride_x: int = 1
    dilation_y: int = 1
    dilation_x: int = 1
    input_lanes: int = 1
    filter_lanes: int = 1
    store_lanes: int = 1
    bytes_read: int = 0
    filter_bytes: int = 0
    bytes_written: int = 0
    epilogue_bytes: int = 0
    epilogue_flops: float = 0.0
    element_bytes: int = size_of(DEFAULT_FLOAT)

    @property
    def flops(self) -> float:
        points = self.images * self.groups * self.outputs * self.height * self.width
        return 2.0 * points * self.channels * self.filter_y * self.filter_x


@dataclass(frozen=True)
class DirectSchedule:
    """One candidate. `slice` is RS or S; `filters`: 0 staged in shared memory, 1 by the read-only path where they are used, 2 by the read-only
    path into registers one channel ahead. `stages`, `cluster` as in `ContractionSchedule`; `atomics` (0 or 1): the parts of a split are added by
    atomic operations, in no fixed order, only where a caller asks for it."""

    slice: int
    register_k: int
    register_y: int
    register_x: int
    warp_k: int
    warp_y: int
    warp_x: int
    block_k: int
    block_y: int
    block_x: int
    channels: int
    split: int = 1
    stages: int = 1
    filters: int = 0
    cluster: int = 0
    atomics: int = 0

    @property
    def threads(self) -> int:
        return self.warp_k * self.warp_y * self.warp_x * self.block_k * self.block_y * self.block_x

    def __str__(self) -> str:
        return (
            f"direct {'rs' if self.slice == RS else 's'} register={self.register_k}x{self.register_y}x{self.register_x} "
            f"warp={self.warp_k}x{self.warp_y}x{self.warp_x} block={self.block_k}x{self.block_y}x{self.block_x} channels={self.channels} "
            f"split={self.split} stages={self.stages} filters={('shared', 'cached', 'registers')[self.filters]}"
            + " cluster" * self.cluster
            + " atomics" * self.atomics
        )


AXES = tuple(field.name for field in fields(DirectSchedule))


def extents_of(rows: Columns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output channels, rows and columns that a block computes."""
    k, y, x = (rows[f"register_{d}"] * rows[f"warp_{d}"] * rows[f"block_{d}"] for d in "kyx")
    return k, y, x


def patch_of(rows: Columns, problem: DirectProblem) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the input, halo included, that a block needs of each channel."""
    _, y, x = extents_of(rows)
    return (
        (y - 1) * problem.stride_y + (problem.filter_y - 1) * problem.dilation_y + 1,
        (x - 1) * problem.stride_x + (problem.filter_x - 1) * problem.dilation_x + 1,
    )


def slice_of(rows: Columns, problem: DirectProblem) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the input that a thread needs of each channel."""
    return (
        (rows["register_y"] - 1) * problem.stride_y + (problem.filter_y - 1) * problem.dilation_y + 1,
        (rows["register_x"] - 1) * problem.stride_x + (problem.filter_x - 1) * problem.dilation_x + 1,
    )


def read_lanes_of(rows: Columns, problem: DirectProblem) -> np.ndarray:
    """Width of a thread's vector loads of the patch along x: threads start at multiples of register_x * stride_x."""
    start = np.where(rows["warp_x"] * rows["block_x"] == 1, 4, rows["register_x"] * problem.stride_x)
    _, columns = slice_of(rows, problem)
    aligned = np.where(start % 4 == 0, 4, np.where(start % 2 == 0, 2, 1))
    return np.minimum(aligned, np.where(columns >= 4, 4, np.where(columns >= 2, 2, 1)))


def pitch_of(rows: Columns, problem: DirectProblem) -> np.ndarray:
    """Elements between rows of the patch in shared memory: a multiple of the vectors that are read. Of paddings up to eight vectors the one with
    the fewest bank conflicts among the threads of a warp, the least of equal ones."""
    return _padded(rows, problem)[0]


def wavefronts_of(rows: Columns, problem: DirectProblem) -> np.ndarray:
    """Cycles of shared memory in which a warp gets one vector load of the patch: the most distinct vectors that share a bank."""
    return _padded(rows, problem)[1]


def plane_of(rows: Columns, problem: DirectProblem) -> np.ndarray:
    """Elements between channels of the patch in shared memory: vectors stay aligned, and what neighbouring threads store, neighbouring channels
    of neighbouring pixels, lies in different banks as far as that allows."""
    least = patch_of(rows, problem)[0] * pitch_of(rows, problem)
    wanted = np.maximum(4, BANKS // np.maximum(rows["channels"], 1) // 4 * 4)
    elements: np.ndarray = least + (wanted - least) % BANKS * (rows["channels"] > 1) + (-least % 4) * (rows["channels"] == 1)
    return elements


def _padded(rows: Columns, problem: DirectProblem) -> tuple[np.ndarray, np.ndarray]:
    """Pitch and conflicts, found once for all rows that agree in what they depend on."""
    names = ("register_y", "register_x", "warp_y", "warp_x", "block_x")
    key = np.zeros_like(rows["register_y"])
    for name in names:
        key = key * 64 + rows[name]
    _, first, where = np.unique(key, return_index=True, return_inverse=True)
    rows = {name: rows[name][first] for name in (*names, "register_k", "warp_k", "block_y", "block_k")}
    lanes = read_lanes_of(rows, problem)
    _, columns = patch_of(rows, problem)
    least = -(-columns // lanes) * lanes
    step_x = rows["register_x"] * problem.stride_x
    step_y = rows["register_y"] * problem.stride_y
    best_pitch, best = least, _conflicts(rows, step_x, step_y * least, lanes)
    for more in range(1, PADDINGS):
        pitch = least + more * lanes
        found = _conflicts(rows, step_x, step_y * pitch, lanes)
        better = found < best
        best_pitch, best = np.where(better, pitch, best_pitch), np.where(better, found, best)
    return best_pitch[where], best[where]


def _conflicts(rows: Columns, step_x: np.ndarray, step_y: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    """The most distinct vectors of `lanes` that a warp reads in one group of banks; threads along k read the same."""
    key = (((rows["warp_x"] * 64 + rows["warp_y"]) * 64 + step_x % BANKS) * 64 + step_y % BANKS) * 8 + lanes
    distinct, where = np.unique(key, return_inverse=True)
    width, rest = distinct % 8, distinct // 8
    y, x, warp_y, warp_x = rest % 64, rest // 64 % 64, rest // 64**2 % 64, rest // 64**3
    lane = np.arange(BANKS)
    inside = lane < (warp_x * warp_y)[:, None]
    word = lane % warp_x[:, None] * x[:, None] + lane // warp_x[:, None] * y[:, None]
    group = word % BANKS // width[:, None]
    slots = (np.arange(len(distinct))[:, None] * BANKS + group)[inside]
    counts = np.bincount(slots, minlength=len(distinct) * BANKS).reshape(-1, BANKS)
    most: np.ndarray = counts.max(axis=1)[where]
    return most


def buffer_elements_of(rows: Columns, problem: DirectProblem) -> tuple[np.ndarray, np.ndarray]:
    """Elements of one buffer of the patch, and of one of the filters (none where they are not staged)."""
    taps = problem.filter_y * problem.filter_x
    return rows["channels"] * plane_of(rows, problem), np.where(rows["filters"] == SHARED, rows["channels"] * taps * extents_of(rows)[0], 0)


def columns_of(schedule: DirectSchedule) -> dict[str, np.ndarray]:
    """One schedule as columns of a single row."""
    return {name: np.array([getattr(schedule, name)]) for name in AXES}


def multiply_adds_of(rows: Columns, problem: DirectProblem) -> np.ndarray:
    """Multiply-adds of a thread for one channel."""
    return rows["register_k"] * rows["register_y"] * rows["register_x"] * problem.filter_y * problem.filter_x


def taps_are_unrolled(rows: Columns, problem: DirectProblem) -> np.ndarray:
    """Whether all rows of taps are straight code. In the RS kernel and with filters in registers they have to be: registers have no index."""
    unrolled: np.ndarray = (rows["slice"] == RS) | (rows["filters"] == REGISTERS) | (multiply_adds_of(rows, problem) <= UNROLLED_PRODUCTS)
    return unrolled


def stretch_of(rows: Columns, problem: DirectProblem) -> np.ndarray:
    """Channels whose multiply-adds are straight code: as many as UNROLLED_PRODUCTS allows, a power of two that divides the chunk, at least one."""
    stretch = np.ones_like(rows["channels"])
    products = multiply_adds_of(rows, problem)
    for count in (2, 4, 8, 16):
        stretch = np.where((rows["channels"] % count == 0) & (products * count <= UNROLLED_PRODUCTS), count, stretch)
    return stretch


def threads_of(rows: Columns) -> np.ndarray:
    """Threads of a block."""
    return BANKS * rows["block_k"] * rows["block_y"] * rows["block_x"]


def fetches_of(rows: Columns, problem: DirectProblem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a thread fetches in each step: elements of the patch, channels among them that one load brings, and vectors of filters."""
    threads, channels = threads_of(rows), rows["channels"]
    lanes = np.where(rows["stages"] == 1, np.gcd(problem.input_lanes, channels), 1)
    patch_rows, patch_columns = patch_of(rows, problem)
    pixels = threads // (channels // lanes)
    at_once = np.minimum(patch_columns, pixels)
    lines = np.minimum(patch_rows, pixels // at_once)
    elements = lanes * -(-patch_rows // lines) * -(-patch_columns // at_once)
    size_k = extents_of(rows)[0]
    vectors = size_k // np.minimum(problem.filter_lanes, size_k)
    filters = -(-channels * problem.filter_y * problem.filter_x * vectors // threads)
    return elements, lanes, np.where(rows["filters"] == SHARED, filters, 0)


def registers_of(rows: Columns, problem: DirectProblem) -> np.ndarray:
    """Estimated 32-bit registers of a thread: sums, slice and filters (CNNOpt's equations 2 and 3 count these, times the threads of a block, and
    one for each filter element that is held), what is fetched through registers, and addresses. Fitted to what ptxas 13.0 took for 144 random
    candidates of twelve layers on sm_90a: four of five within 25 %."""
    sums = rows["register_k"] * rows["register_y"] * rows["register_x"]
    slice_rows, slice_columns = slice_of(rows, problem)
    held = np.where(rows["slice"] == RS, slice_rows, 1) * slice_columns
    taps = problem.filter_y * problem.filter_x
    filters = np.where(rows["slice"] == RS, 1, problem.filter_x) * rows["register_k"]
    filters = np.where(rows["filters"] == REGISTERS, 2 * taps * rows["register_k"], filters)
    elements, lanes, vectors = fetches_of(rows, problem)
    fetched = np.where(rows["stages"] == 1, elements + 4 * vectors, (elements // lanes + vectors) // 2)
    addresses = 28 + np.where(rows["filters"] == SHARED, 0, 12)
    registers: np.ndarray = np.minimum((115 * sums + 60 * held + 110 * filters) // 100 + fetched + addresses, 10_000)
    return registers


def blocks_to_ask_for(schedule: DirectSchedule, problem: DirectProblem, machine: Machine) -> int:
    """The occupancy to ask of the assembler, which caps a thread's registers: what the estimate allows, and a fifth. With no cap the assembler
    reads filters and slices further ahead than pays."""
    estimate = int(registers_of(columns_of(schedule), problem)[0])
    return max(1, machine.registers_per_processor // (schedule.threads * (estimate * 6 // 5)))


def tiles_of(rows: Columns, problem: DirectProblem) -> np.ndarray:
    """Tiles of the whole output."""
    k, y, x = extents_of(rows)
    tiles: np.ndarray = problem.images * problem.groups * -(-problem.outputs // k) * -(-problem.height // y) * -(-problem.width // x)
    return tiles


def steps_of(rows: Columns, problem: DirectProblem) -> np.ndarray:
    """Chunks of channels that a block adds up."""
    chunks = -(-problem.channels // rows["channels"])
    return -(-chunks // rows["split"])


def blocks_of(rows: Columns, problem: DirectProblem) -> np.ndarray:
    """Blocks of the kernel that multiplies."""
    return tiles_of(rows, problem) * rows["split"]


def shared_bytes_of(rows: Columns, problem: DirectProblem) -> np.ndarray:
    """Bytes of shared memory of a block: buffers of the patch and of the filters, and of a cluster the block's sums.

    Of 64 outputs, 8 x 16 pixels, 3 x 3 taps and 4 channels with three stages: a patch of 10 x 18, rows 20 apart, 200 a channel:
    3 * 4 * (4 * 200 + 4 * 9 * 64) = 37248."""
    buffers = np.minimum(np.maximum(rows["stages"], 2), steps_of(rows, problem))
    k, y, x = extents_of(rows)
    needed: np.ndarray = problem.element_bytes * (buffers * sum(buffer_elements_of(rows, problem)) + rows["cluster"] * k * y * x)
    return needed
