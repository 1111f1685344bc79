"""Variants of the code of products by warpgroups, which trials measure and predictions choose as far as measurements confirm it
(`selection/variants.py`); as axes of the space they would multiply it, and the learned models were trained without them.

`meeting`: the blocks of a split meet in a cluster and add their parts themselves, through shared memory. That takes no second kernel and no parts in
level 2 (docs/kernels.md). `sent`: the copy engine stores the results of a block, which goes on with its next tile meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, take
from tilewright.kernels.gpu.gemm.space import CLUSTERS
from tilewright.kernels.gpu.warpgroup.form import WarpgroupFacts
from tilewright.kernels.gpu.warpgroup.space import MEETING, SENT, TILE_AXES

Variants = tuple[dict[str, np.ndarray], np.ndarray]
"""Candidates, and the position of the one that each varies."""
MOST_READ = 0.25
"""Bytes that what follows the sum may read, over those of the result, if the copy engine stores it: threads that do not store adjacent results do not
read adjacent elements either."""


def warpgroup_variants(facts: WarpgroupFacts, candidates: Columns, shared_bytes: Callable[[Columns], np.ndarray], machine: Machine) -> Variants:
    """Both kinds. `shared_bytes`: of a block of each candidate."""
    variants, origins = zip(*(kind(facts, candidates, shared_bytes, machine) for kind in (meeting_variants, sent_variants)), strict=True)
    return {name: np.concatenate([part[name] for part in variants]) for name in variants[0]}, np.concatenate(origins)


def meeting_variants(facts: WarpgroupFacts, candidates: Columns, shared_bytes: Callable[[Columns], np.ndarray], machine: Machine) -> Variants:
    """The candidates with a split whose blocks can meet. They share no copies, and store their parts by a block for each tile, and they fit in shared
    memory beside the tiles."""
    plain = (candidates["cluster"] == 1) & (candidates["staged"] == 0) & (candidates["persistent"] == 0)
    which = np.flatnonzero(plain & np.isin(candidates["split"], CLUSTERS))
    rows = _varied(candidates, which, MEETING)
    fits = shared_bytes(rows) <= machine.shared_bytes_per_block
    return take(rows, fits), which[fits]


def sent_variants(facts: WarpgroupFacts, candidates: Columns, shared_bytes: Callable[[Columns], np.ndarray], machine: Machine) -> Variants:
    """The candidates without a split, with as many stages as fit beside the results, where these are a matrix in memory and little is read with
    them."""
    product = facts.product
    possible = facts.result_bytes > 0 and product.epilogue_bytes <= MOST_READ * product.bytes_written
    left = np.flatnonzero((candidates["split"] == 1) & possible)
    found: list[Variants] = []
    for stages in sorted(TILE_AXES["stages"], reverse=True):
        which = left[candidates["stages"][left] >= stages]
        rows = _varied(candidates, which, SENT) | {"staged": np.zeros(len(which), np.int64), "stages": np.full(len(which), stages)}
        fits = shared_bytes(rows) <= machine.shared_bytes_per_block
        found.append((take(rows, fits), which[fits]))
        left = np.setdiff1d(left, which[fits])
    variants, origins = zip(*found, strict=True)
    return {name: np.concatenate([part[name] for part in variants]) for name in variants[0]}, np.concatenate(origins)


def _varied(candidates: Columns, which: np.ndarray, axis: str) -> dict[str, np.ndarray]:
    """Some of the candidates with an axis of variants that is 1, and the others 0."""
    return {**take(candidates, which), **{name: np.full(len(which), int(name == axis)) for name in (MEETING, SENT)}}
