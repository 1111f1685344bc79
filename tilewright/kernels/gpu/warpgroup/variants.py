"""Variants of the code of products by warpgroups: the blocks of a split meet in a cluster and add their parts themselves, through shared memory.

That takes no second kernel and no parts in level 2. The gain that the models predict was not confirmed on an H100 (docs/kernels.md), so that it is no
axis of the space, which prediction would choose, but one that trials measure (`selection/variants.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, take
from tilewright.kernels.gpu.gemm.space import CLUSTERS
from tilewright.kernels.gpu.warpgroup.space import MEETING


def meeting_variants(
    candidates: Columns, shared_bytes: Callable[[Columns], np.ndarray], machine: Machine
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The candidates with a split whose blocks can meet, and the position of the one that each varies. They share no copies, and store their parts by
    a block for each tile. `shared_bytes`: of a block of each candidate, where the parts have to fit beside the tiles."""
    plain = (candidates["cluster"] == 1) & (candidates["staged"] == 0) & (candidates["persistent"] == 0)
    which = np.flatnonzero(plain & np.isin(candidates["split"], CLUSTERS))
    rows = {**take(candidates, which), MEETING: np.ones(len(which), np.int64)}
    fits = shared_bytes(rows) <= machine.shared_bytes_per_block
    return take(rows, fits), which[fits]
