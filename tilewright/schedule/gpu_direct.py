"""Schedules of the `direct` schema on a GPU: direct convolution with tiles of output channels, rows and columns at every level.

The RS and S kernels of CNNOpt (PACT 2022, section 3): a thread keeps register_k x register_y x register_x outputs in registers. In the RS kernel it
holds the two-dimensional slice of the input that they need, in the S kernel one row of it at a time. `warp_*` are the threads of a warp along each
dimension (their product is 32), `block_*` the warps of a block; `channels` input channels at a time are staged in shared memory; `split` blocks
share the sum over input channels (split-C).
"""

from __future__ import annotations

from dataclasses import dataclass

RS, S = 2, 1
"""Values of `slice`: dimensions of the input slice that a thread holds in registers."""


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
            f"split={self.split} stages={self.stages} filters={('shared', 'cached', 'registers')[self.filters]}" + " cluster" * self.cluster + " atomics" * self.atomics
        )
