"""Memory of large outputs on a CPU, reclaimed once the caller has dropped them and handed out again.

A fresh block of many megabytes costs a page fault for each of its pages at the first write: a third of the whole call for a small convolution over a
large image. A block that is handed out is wrapped in an array of its own, the lease; the tensor's storage holds the only reference to the lease.
Everything that can still access the memory (views, detached tensors, `.numpy()`, DLPack, autograd graphs, other threads) holds that storage, so once
the lease is finalised nothing does, and the block is free.
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
"""Free blocks kept per output: a caller that holds the last result while it requests the next needs one, and one more is spare."""
ALIGNMENT = 64  # in bytes, as in PyTorch's allocator


class OutputPool:
    """Makes uninitialised tensors of one shape and dtype; it may be called from several threads at the same time.

    Memory is returned while other code runs, in any thread and possibly while this thread is inside `__call__` (garbage collection), so there is no
    lock: appending to and taking from a deque are atomic. Its maximum length limits what is kept; the oldest block is dropped.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self.bytes = prod(shape) * dtype.itemsize
        self.free: deque[np.ndarray] = deque(maxlen=KEPT)

    def __call__(self) -> torch.Tensor:
        """A row-major tensor over a block that nothing else can access."""
        try:
            block = self.free.pop()
        except IndexError:
            block = _aligned(self.bytes)
        lease = block.view()
        returned = weakref.finalize(lease, _take_back, weakref.ref(self), block)
        returned.atexit = False
        # resize_ sets the shape without making the result a view of another tensor
        return torch.frombuffer(lease, dtype=self.dtype).resize_(self.shape)


def _take_back(pool: weakref.ref[OutputPool], block: np.ndarray) -> None:
    alive = pool()
    if alive is not None:
        alive.free.append(block)


def _aligned(size: int) -> np.ndarray:
    memory = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]
