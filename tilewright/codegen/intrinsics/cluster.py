"""What the blocks of a cluster do together (PTX: barrier.cluster, compute capability 9.0)."""

from __future__ import annotations

from tilewright.ir.intrinsic import Intrinsic, Text
from tilewright.ir.kernel import Invoke

_BARRIER = Intrinsic(
    "cluster barrier",
    "cluster",
    text={"CUDA": Text('asm volatile("barrier.cluster.arrive;\\n\\tbarrier.cluster.wait;" ::: "memory");')},
    key="barrier.cluster",
    requires=("sm_90",),
    order="barrier",
)


def cluster_barrier() -> Invoke:
    """All threads of the blocks of a cluster meet. A block must not end while others read its part of a "cluster" buffer."""
    return Invoke(_BARRIER)
