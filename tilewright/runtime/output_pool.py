"""Memory of large outputs on a CPU, taken back when the caller has dropped them and handed out again.

A fresh block of many megabytes costs a page fault for each of its pages at the first write: for a small convolution over a large image a
third of the whole call. A block that is handed out is wrapped in an array of its own, the lease; the tensor's storage holds the only reference
to the lease. Whatever still sees the memory (views, detached tensors, `.numpy()`, DLPack, graphs of autograd, other threads) holds that
storage, so when the lease is finalised nobody does, and the block is free.
"""

from __future__ import annotations

import weakref
from collections import deque
from math import prod

import numpy as np
import torch

LEAST_BYTES = 1 << 20
"""Smaller outputs come from PyTorch's allocator, whose memory is mostly mapped already."""
KEPT = 2
"""Free blocks kept for one output: a caller that holds the last result while it asks for the next needs one, and one more is spare."""
ALIGNMENT = 64  # bytes, as PyTorch's allocator aligns


class OutputPool:
    """Makes tensors of one shape and dtype, uninitialised; calling it from several threads at a time is safe.

    Memory comes back while other code runs, in any thread and possibly while this thread is inside `__call__` (garbage collection), so
    there is no lock: appending to a deque and taking from it are atomic. Its length bounds what is kept; the oldest block goes.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self.bytes = prod(shape) * dtype.itemsize
        self.free: deque[np.ndarray] = deque(maxlen=KEPT)

    def __call__(self) -> torch.Tensor:
        """A row-major tensor over a block that nobody else sees."""
        try:
            block = self.free.pop()
        except IndexError:
            block = _aligned(self.bytes)
        lease = block.view()
        returned = weakref.finalize(lease, _take_back, weakref.ref(self), block)
        returned.atexit = False
        # resize_ gives the shape without making the result a view of another tensor
        return torch.frombuffer(lease, dtype=self.dtype).resize_(self.shape)


def _take_back(pool: weakref.ref[OutputPool], block: np.ndarray) -> None:
    alive = pool()
    if alive is not None:
        alive.free.append(block)


def _aligned(size: int) -> np.ndarray:
    memory = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]
