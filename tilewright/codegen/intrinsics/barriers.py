"""Barriers of the threads of a block (PTX: bar.sync) or of a cluster of blocks (PTX: barrier.cluster, compute capability 9.0).

Every thread of the scope reaches a barrier the same number of times.
"""

from __future__ import annotations

from tilewright.ir.intrinsic import Intrinsic, Text
from tilewright.ir.kernel import Invoke

_BLOCK = Intrinsic("block barrier", "block", text={"CUDA": Text("__syncthreads();")}, key="bar.sync", order="barrier")
_CLUSTER = Intrinsic(
    "cluster barrier",
    "cluster",
    text={"CUDA": Text('asm volatile("barrier.cluster.arrive;\\n\\tbarrier.cluster.wait;" ::: "memory");')},
    key="barrier.cluster",
    requires=("sm_90",),
    order="barrier",
)


def block_barrier() -> Invoke:
    """Barrier of all threads of a block."""
    return Invoke(_BLOCK)


def cluster_barrier() -> Invoke:
    """Barrier of all threads of a cluster's blocks. A block must not end while others read its part of a "cluster" buffer."""
    return Invoke(_CLUSTER)
