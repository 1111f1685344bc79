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
ORDERS = ("cyx", "ycx", "yxc", "cxy", "xcy", "xyc")
"""Values of `order`: channels, rows and columns of the patch in shared memory, outermost first."""


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
    atomic operations, in no fixed order; only if a caller asks for it.

    The other fields are variants of the code (`direct/variants.py`). `loop`: AHEAD or PLAIN as in `ContractionSchedule`. `order`: position in ORDERS
    of the order of the patch's dimensions in shared memory."""

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
    order: int = field(default=0, metadata={"omitted": 0})

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
            + f" patch {ORDERS[self.order]}" * (self.order > 0)
        )


VARIANT_AXES = ("loop", "order")
"""Axes that only variants have: without them candidates have their default values."""
AXES = tuple(entry.name for entry in fields(DirectSchedule) if entry.name not in VARIANT_AXES)
"""Axes of the space."""


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
