"""Schedules of the `direct` schema on a GPU: direct convolution with tiles of output channels, rows and columns at every level.

The RS and S kernels of CNNOpt (PACT 2022, section 3): a thread keeps register_k x register_y x register_x outputs in registers. In the RS kernel it
holds the two-dimensional slice of the input that these need, in the S kernel one row of it at a time. `warp_*` are the threads of a warp along each
dimension (their product is 32), `block_*` the warps of a block; `channels` input channels are staged in shared memory at a time; `split` blocks share
the sum over input channels (split-C).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import DEFAULT_FLOAT, size_of
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.gemm.space import AHEAD, PLAIN

RS, S = 2, 1
"""Values of `slice`: dimensions of the input slice that a thread holds in registers."""
SHARED, CACHED, REGISTERS = 0, 1, 2
"""Values of `filters`: how the filters reach a thread (see `DirectSchedule`)."""
BANKS = 32
"""Shared-memory banks of four bytes each; equals the threads of a warp."""
UNROLLED_PRODUCTS = 1024
"""Maximum multiply-adds in one unrolled run of channels."""
PADDINGS = 8
"""Number of paddings tried for a row of the patch."""


@dataclass(frozen=True)
class DirectFacts:
    """A convolution as the schema sees it: extents of the output, filter and reduction, and how operands and result are accessed.

    `outputs` and `channels` are per group. `input_vector`, `filter_vector`, `store_vector`: widest vectors (1, 2 or 4) along the input channels of
    the input, and along the output channels of the filters and of the result. Bytes are distinct bytes in memory.
    `element_bytes`: of an element in shared memory and of a sum; `stored_bytes`: of one of the input in memory."""

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
    input_vector: int = 1
    filter_vector: int = 1
    store_vector: int = 1
    bytes_read: int = 0
    filter_bytes: int = 0
    bytes_written: int = 0
    epilogue_bytes: int = 0
    epilogue_flops: float = 0.0
    element_bytes: int = size_of(DEFAULT_FLOAT)
    stored_bytes: int = size_of(DEFAULT_FLOAT)

    def copies(self, machine: Machine) -> bool:
        """Whether asynchronous copies, of at least four bytes, can bring single elements."""
        return machine.compute_capability >= (8, 0) and self.stored_bytes == self.element_bytes

    @property
    def flops(self) -> float:
        points = self.images * self.groups * self.outputs * self.height * self.width
        return 2.0 * points * self.channels * self.filter_y * self.filter_x


@dataclass(frozen=True)
class DirectSchedule:
    """One candidate. `slice` is RS or S. `filters`: 0 staged in shared memory, 1 read through the read-only path at each use, 2 through the read-only
    path into registers one channel ahead. `stages`, `cluster`: as in `ContractionSchedule`. `atomics` (0 or 1): the parts of a split are added by
    atomic operations, in no fixed order; only if a caller asks for it. `loop`: AHEAD or PLAIN as in `ContractionSchedule`, a variant
    (`direct/variants.py`)."""

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
    loop: int = field(default=AHEAD, metadata={"omitted": AHEAD})

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
            + " plain loop" * (self.loop == PLAIN)
        )


AXES = tuple(entry.name for entry in fields(DirectSchedule) if entry.name != "loop")
"""Axes of the space, without that of variants."""


def extents_of(candidates: Columns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output channels, rows and columns that a block computes."""
    k, y, x = (candidates[f"register_{d}"] * candidates[f"warp_{d}"] * candidates[f"block_{d}"] for d in "kyx")
    return k, y, x


def patch_of(facts: DirectFacts, candidates: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the input, halo included, that a block needs per channel."""
    _, y, x = extents_of(candidates)
    return (
        (y - 1) * facts.stride_y + (facts.filter_y - 1) * facts.dilation_y + 1,
        (x - 1) * facts.stride_x + (facts.filter_x - 1) * facts.dilation_x + 1,
    )


def slice_of(facts: DirectFacts, candidates: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the input that a thread needs per channel."""
    return (
        (candidates["register_y"] - 1) * facts.stride_y + (facts.filter_y - 1) * facts.dilation_y + 1,
        (candidates["register_x"] - 1) * facts.stride_x + (facts.filter_x - 1) * facts.dilation_x + 1,
    )


def read_vector_of(facts: DirectFacts, candidates: Columns) -> np.ndarray:
    """Width of a thread's vector loads of the patch along x: threads start at multiples of register_x * stride_x."""
    start = np.where(candidates["warp_x"] * candidates["block_x"] == 1, 4, candidates["register_x"] * facts.stride_x)
    _, columns = slice_of(facts, candidates)
    aligned = np.where(start % 4 == 0, 4, np.where(start % 2 == 0, 2, 1))
    return np.minimum(aligned, np.where(columns >= 4, 4, np.where(columns >= 2, 2, 1)))


def pitch_of(facts: DirectFacts, candidates: Columns) -> np.ndarray:
    """Elements between rows of the patch in shared memory: a multiple of the vector width. Among paddings of fewer than eight vectors, the smallest
    of those with the fewest bank conflicts within a warp."""
    return _padded(facts, candidates)[0]


def wavefronts_of(facts: DirectFacts, candidates: Columns) -> np.ndarray:
    """Shared-memory cycles of a warp's vector load of the patch: the maximum number of distinct vectors in one bank."""
    return _padded(facts, candidates)[1]


def plane_of(facts: DirectFacts, candidates: Columns) -> np.ndarray:
    """Elements between channels of the patch in shared memory. Vectors stay aligned, and, as far as that allows, adjacent threads store adjacent
    channels of adjacent pixels to different banks."""
    least = patch_of(facts, candidates)[0] * pitch_of(facts, candidates)
    wanted = np.maximum(4, BANKS // np.maximum(candidates["channels"], 1) // 4 * 4)
    elements: np.ndarray = least + (wanted - least) % BANKS * (candidates["channels"] > 1) + (-least % 4) * (candidates["channels"] == 1)
    return elements


def _padded(facts: DirectFacts, candidates: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Pitch and bank conflicts, computed once for all rows with equal inputs."""
    names = ("register_y", "register_x", "warp_y", "warp_x", "block_x")
    key = np.zeros_like(candidates["register_y"])
    for name in names:
        key = key * 64 + candidates[name]
    _, first, where = np.unique(key, return_index=True, return_inverse=True)
    candidates = {name: candidates[name][first] for name in (*names, "register_k", "warp_k", "block_y", "block_k")}
    lanes = read_vector_of(facts, candidates)
    _, columns = patch_of(facts, candidates)
    least = -(-columns // lanes) * lanes
    step_x = candidates["register_x"] * facts.stride_x
    step_y = candidates["register_y"] * facts.stride_y
    best_pitch, best = least, _conflicts(candidates, step_x, step_y * least, lanes)
    for more in range(1, PADDINGS):
        pitch = least + more * lanes
        found = _conflicts(candidates, step_x, step_y * pitch, lanes)
        better = found < best
        best_pitch, best = np.where(better, pitch, best_pitch), np.where(better, found, best)
    return best_pitch[where], best[where]


def _conflicts(candidates: Columns, step_x: np.ndarray, step_y: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    """The maximum number of distinct vectors of `lanes` elements that a warp reads from one group of banks; threads along k read the same ones."""
    key = (((candidates["warp_x"] * 64 + candidates["warp_y"]) * 64 + step_x % BANKS) * 64 + step_y % BANKS) * 8 + lanes
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


def buffer_elements_of(facts: DirectFacts, candidates: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Elements of one buffer of the patch, and of one buffer of the filters (0 if they are not staged)."""
    taps = facts.filter_y * facts.filter_x
    channels = candidates["channels"]
    filters: np.ndarray = np.where(candidates["filters"] == SHARED, channels * taps * extents_of(candidates)[0], 0)
    return channels * plane_of(facts, candidates), filters


def columns_of(schedule: DirectSchedule) -> dict[str, np.ndarray]:
    """One schedule as columns of a single row."""
    return {entry.name: np.array([getattr(schedule, entry.name)]) for entry in fields(schedule)}


def multiply_adds_of(facts: DirectFacts, candidates: Columns) -> np.ndarray:
    """Multiply-adds per thread and channel."""
    return candidates["register_k"] * candidates["register_y"] * candidates["register_x"] * facts.filter_y * facts.filter_x


def taps_are_unrolled(facts: DirectFacts, candidates: Columns) -> np.ndarray:
    """Whether all rows of taps are unrolled. The RS kernel and filters in registers require it: registers cannot be indexed."""
    few = multiply_adds_of(facts, candidates) <= UNROLLED_PRODUCTS
    unrolled: np.ndarray = (candidates["slice"] == RS) | (candidates["filters"] == REGISTERS) | few
    return unrolled


def stretch_of(facts: DirectFacts, candidates: Columns) -> np.ndarray:
    """Channels that are unrolled together: the largest power of two that divides the chunk and that UNROLLED_PRODUCTS allows, at least one."""
    stretch = np.ones_like(candidates["channels"])
    products = multiply_adds_of(facts, candidates)
    for count in (2, 4, 8, 16):
        stretch = np.where((candidates["channels"] % count == 0) & (products * count <= UNROLLED_PRODUCTS), count, stretch)
    return stretch


def threads_of(candidates: Columns) -> np.ndarray:
    """Threads of a block."""
    return BANKS * candidates["block_k"] * candidates["block_y"] * candidates["block_x"]


def fetches_of(facts: DirectFacts, candidates: Columns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a thread fetches per step: elements of the patch, channels per load of these, and vectors of filters."""
    threads, channels = threads_of(candidates), candidates["channels"]
    lanes = np.where(candidates["stages"] == 1, np.gcd(facts.input_vector, channels), 1)
    patch_rows, patch_columns = patch_of(facts, candidates)
    pixels = threads // (channels // lanes)
    at_once = np.minimum(patch_columns, pixels)
    lines = np.minimum(patch_rows, pixels // at_once)
    elements = lanes * -(-patch_rows // lines) * -(-patch_columns // at_once)
    size_k = extents_of(candidates)[0]
    vectors = size_k // np.minimum(facts.filter_vector, size_k)
    filters = -(-channels * facts.filter_y * facts.filter_x * vectors // threads)
    return elements, lanes, np.where(candidates["filters"] == SHARED, filters, 0)


def registers_of(facts: DirectFacts, candidates: Columns) -> np.ndarray:
    """Estimated 32-bit registers per thread: sums, slice, filters, data fetched through registers, and addresses. CNNOpt's equations 2 and 3 count
    sums, slice and one register for each filter element held, times the threads of a block. Fitted to the registers that ptxas 13.0 allocated for 144
    random candidates of twelve layers on sm_90a: four in five are within 25 %."""
    sums = candidates["register_k"] * candidates["register_y"] * candidates["register_x"]
    slice_rows, slice_columns = slice_of(facts, candidates)
    held = np.where(candidates["slice"] == RS, slice_rows, 1) * slice_columns
    taps = facts.filter_y * facts.filter_x
    filters = np.where(candidates["slice"] == RS, 1, facts.filter_x) * candidates["register_k"]
    filters = np.where(candidates["filters"] == REGISTERS, 2 * taps * candidates["register_k"], filters)
    elements, lanes, vectors = fetches_of(facts, candidates)
    fetched = np.where(candidates["stages"] == 1, elements + 4 * vectors, (elements // lanes + vectors) // 2)
    addresses = 28 + np.where(candidates["filters"] == SHARED, 0, 12)
    used = (115 * sums + 60 * held + 110 * filters) // 100 + fetched
    if "loop" in candidates:  # nothing is held for the next step while slices and filters are
        alone = 115 * sums // 100 + np.maximum((60 * held + 110 * filters) // 100, fetched)
        used = np.where(candidates["loop"] == PLAIN, alone, used)
    registers: np.ndarray = np.minimum(used + addresses, 10_000)
    return registers


def blocks_to_ask_for(schedule: DirectSchedule, facts: DirectFacts, machine: Machine) -> int:
    """The occupancy to request from the assembler, which caps a thread's registers at 1.2 times the estimate. Without a cap the assembler reads
    filters and slices too far ahead."""
    estimate = int(registers_of(facts, columns_of(schedule))[0])
    return max(1, machine.registers_per_processor // (schedule.threads * (estimate * 6 // 5)))


def tiles_of(facts: DirectFacts, candidates: Columns) -> np.ndarray:
    """Tiles of the whole output."""
    k, y, x = extents_of(candidates)
    tiles: np.ndarray = facts.images * facts.groups * -(-facts.outputs // k) * -(-facts.height // y) * -(-facts.width // x)
    return tiles


def steps_of(facts: DirectFacts, candidates: Columns) -> np.ndarray:
    """Chunks of channels that a block reduces."""
    chunks = -(-facts.channels // candidates["channels"])
    return -(-chunks // candidates["split"])


def blocks_of(facts: DirectFacts, candidates: Columns) -> np.ndarray:
    """Blocks of the main kernel."""
    return tiles_of(facts, candidates) * candidates["split"]


def shared_bytes_of(facts: DirectFacts, candidates: Columns) -> np.ndarray:
    """Bytes of shared memory per block: buffers of the patch and of the filters, and, in a cluster, the block's sums.

    For 64 outputs, 8 x 16 pixels, 3 x 3 taps and 4 channels with three stages, the patch is 10 x 18, with a row pitch of 20 and 200 per channel:
    3 * 4 * (4 * 200 + 4 * 9 * 64) = 37248."""
    buffers = np.minimum(np.maximum(candidates["stages"], 2), steps_of(facts, candidates))
    if "loop" in candidates:
        buffers = np.where(candidates["loop"] == PLAIN, 1, buffers)
    k, y, x = extents_of(candidates)
    needed: np.ndarray = facts.element_bytes * (buffers * sum(buffer_elements_of(facts, candidates)) + candidates["cluster"] * k * y * x)
    return needed
