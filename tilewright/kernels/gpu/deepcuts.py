"""DeepCuts' performance upper limit (PLDI 2021, section 4), for comparison with our own bound (`kernels.gpu.bounds`) only.

PUL = GMRatio * SMRatio * WBRatio * COEF_r is the claimed maximum share of the peak that an operation reaches, from the formulas of tables 6 to 8 for
the tiles of a block and of a thread. It is not a bound: WBRatio as printed gives 0.008 for 131 blocks on 132 processors, where blocks / (processors *
ceil(blocks / processors)) gives 0.99; SMRatio ignores that other warps hide a load's latency; and the halo of tables 7 and 8 is right only for 3 x 3
filters. Formulas are as printed, except for the transactions of rows in table 8 (see `rows`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tilewright.hardware.machine import Machine

TRANSACTION_ELEMENTS = 32
"""TRANS_global: elements of the largest transaction with global memory (128 bytes)."""
ELEMENT_BYTES = 4
"""SIZE_element, of single precision."""

Number = np.ndarray | float


@dataclass(frozen=True)
class Tile:
    """What a block or a thread computes: images, output channels, rows and columns (table 4: N, K, H, W)."""

    n: Number = 1
    k: Number = 1
    h: Number = 1
    w: Number = 1

    @property
    def points(self) -> Number:
        return self.n * self.k * self.h * self.w


@dataclass(frozen=True)
class Window:
    """A filter or a pooling window, along H and W. A padding of None is that of the same extents: (filter - 1) / 2."""

    height: int
    width: int
    stride_h: int = 1
    stride_w: int = 1
    pad_h: int | None = None
    pad_w: int | None = None

    @property
    def area(self) -> int:
        return self.height * self.width

    def inputs(self, tile: Tile) -> Number:
        """Elements of one channel that a tile's windows cover, as tables 7 and 8 count them."""
        pad_h = (self.height - 1) // 2 if self.pad_h is None else self.pad_h
        pad_w = (self.width - 1) // 2 if self.pad_w is None else self.pad_w
        return ((tile.h + self.height - 2 * pad_h) // self.stride_h + 1) * ((tile.w + self.width - 2 * pad_w) // self.stride_w + 1)


@dataclass(frozen=True)
class Operation:
    """COMP_block, NUM_trans, COMP_thread and N_load of an operation, or of several that are fused."""

    block_flops: Number
    transactions: Number
    thread_flops: Number
    loads: Number

    def then(self, second: Operation) -> Operation:
        """Fusion in registers (section 4.4): the second operation adds its arithmetic; it loads nothing."""
        return replace(self, block_flops=self.block_flops + second.block_flops, thread_flops=self.thread_flops + second.thread_flops)

    def after(self) -> Operation:
        """The second of two operations that are fused in shared memory (section 4.4), where the first leaves what it reads: no transactions."""
        return replace(self, transactions=0)


def convolution(block: Tile, thread: Tile, channels: Number, window: Window) -> Operation:
    """Direct convolution."""
    transactions = block.n * channels * window.inputs(block) / TRANSACTION_ELEMENTS + -(-block.k * channels * window.area // TRANSACTION_ELEMENTS)
    loads = thread.n * channels * window.inputs(thread) + thread.k * channels * window.area / TRANSACTION_ELEMENTS
    return Operation(2 * block.points * channels * window.area, transactions, 2 * thread.points * channels * window.area, loads)


def matrix_product(block: Tile, thread: Tile, reduced: Number, steps: Number = 1, thread_reduced: Number | None = None) -> Operation:
    """N x K results, from `reduced` (C_block) elements of both factors in each of `steps` steps, of which a thread has `thread_reduced` (C_thread) if
    they are divided among threads."""
    transactions = block.n * -(-reduced // TRANSACTION_ELEMENTS) + reduced * -(-block.k // TRANSACTION_ELEMENTS)
    own = reduced if thread_reduced is None else thread_reduced
    each = 2 * block.n * reduced * block.k, transactions, 2 * thread.n * own * thread.k, own * (thread.n + thread.k)
    return Operation(*(steps * count for count in each))


def winograd_transform(block: Tile, thread: Tile) -> Operation:
    """A transform of inputs or of outputs."""
    return Operation(2.25 * block.points, rows(block), 2.25 * thread.points, thread.points)


def pooling(block: Tile, thread: Tile, window: Window) -> Operation:
    """One operation for each element of a window."""
    transactions = block.n * block.k * window.inputs(block) / TRANSACTION_ELEMENTS
    return Operation(block.points * window.area, transactions, thread.points * window.area, thread.points * window.area)


def elementwise(block: Tile, thread: Tile, operands: int = 1, operations: Number = 1, parameters: int = 0) -> Operation:
    """One operation for an element of `operands` operands; more than one if several are fused. `parameters`: numbers for a channel. A normalisation
    of batches has three operations, and three parameters."""
    transactions = operands * rows(block) + parameters * (block.k / TRANSACTION_ELEMENTS)
    return Operation(operations * block.points, transactions, operations * thread.points, operands * thread.points + parameters * thread.k)


def rows(block: Tile) -> Number:
    """Transactions of rows of W elements: N K H ceil(W / TRANS). Table 8 prints N K H W / (W / TRANS), by which a row of any width would take TRANS
    transactions."""
    return block.n * block.k * block.h * -(-block.w // TRANSACTION_ELEMENTS)


@dataclass(frozen=True)
class Launch:
    """N_TB, NUM_thread and SIZE_shared of a kernel."""

    blocks: Number
    threads: Number
    shared_bytes: Number


@dataclass(frozen=True)
class PrintedLimit:
    """The four factors, one number in [0, 1] per candidate."""

    memory: np.ndarray
    shared: np.ndarray
    balance: np.ndarray
    resources: np.ndarray

    @property
    def share_of_peak(self) -> np.ndarray:
        """PUL, section 4.3."""
        share: np.ndarray = self.memory * self.shared * self.balance * self.resources
        return share

    def flops(self, machine: Machine) -> np.ndarray:
        """The claimed maximum of operations per second."""
        return self.share_of_peak * machine.peak_flops["fp32"]


def limit(operation: Operation, launch: Launch, machine: Machine, conflicts: Number = 1.0) -> PrintedLimit:
    """The limit of section 4.2 to 4.3; `conflicts` is COEF_bc, 1 without bank conflicts."""
    needed = ELEMENT_BYTES * TRANSACTION_ELEMENTS * machine.peak_flops["fp32"] / machine.memory_bandwidth * operation.transactions
    cache = machine.cache(1)
    latency = cache.latency_cycles if cache else 30.0
    waves = -(-launch.blocks // machine.processors)
    return PrintedLimit(
        memory=np.minimum(1, operation.block_flops / np.maximum(needed, operation.block_flops)),
        shared=np.minimum(1, operation.thread_flops / np.asarray(operation.loads, dtype=float) / (latency * conflicts)),
        balance=np.asarray(1 - launch.blocks % machine.processors / machine.processors / waves),
        resources=np.asarray((launch.threads < machine.threads_per_block) & (launch.shared_bytes < machine.shared_bytes_per_block), dtype=float),
    )
