"""Variants of the code of products by warpgroups, which trials measure and predictions choose as far as measurements confirm it
(`selection/variants.py`); as axes of the space they would multiply it, and the learned models were trained without them.

`meeting`: the blocks of a split meet in a cluster and add their parts themselves, through shared memory. That takes no second kernel and no parts in
level 2. Measurements confirmed a third of the logarithm of the gains that formulas predict (docs/models.md). `sent`: the copy engine stores
the results of a block, which goes on with its next tile meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, joined, length, take
from tilewright.kernels.gpu.gemm.space import CLUSTERS
from tilewright.kernels.gpu.warpgroup.form import WarpgroupFacts
from tilewright.kernels.gpu.warpgroup.space import MEETING, SENT, TILE_AXES, shared_bytes_of

Variants = tuple[dict[str, np.ndarray], np.ndarray]
"""Candidates, and the position of the one that each varies."""

LEAST_STAGES = 3
"""Stages that a variant keeps of more."""


def warpgroup_variants(facts: WarpgroupFacts, candidates: Columns, machine: Machine) -> Variants:
    """Both kinds."""
    sendable = np.full(length(candidates), facts.sendable)
    return both_variants(candidates, sendable, partial(shared_bytes_of, facts), machine)


def both_variants(candidates: Columns, sendable: np.ndarray, shared_bytes: Callable[[Columns], np.ndarray], machine: Machine) -> Variants:
    """Those that meet, and of the `sendable` candidates those that the copy engine stores."""
    meeting, first = meeting_variants(candidates, shared_bytes, machine)
    sent, second = sent_variants(candidates, sendable, shared_bytes, machine)
    meeting[SENT], sent[MEETING] = np.zeros(len(first), np.int64), np.zeros(len(second), np.int64)
    return joined([meeting, sent]), np.concatenate([first, second])


def meeting_variants(candidates: Columns, shared_bytes: Callable[[Columns], np.ndarray], machine: Machine) -> Variants:
    """The candidates with a split whose blocks can meet. They share no copies, and store their parts by a block for each tile. `shared_bytes`: of a
    block of each candidate, where the parts have to fit beside the tiles."""
    plain = (candidates["cluster"] == 1) & (candidates["staged"] == 0) & (candidates["persistent"] == 0)
    which = np.flatnonzero(plain & np.isin(candidates["split"], CLUSTERS))
    rows = {**take(candidates, which), MEETING: np.ones(len(which), np.int64)}
    fits = shared_bytes(rows) <= machine.shared_bytes_per_block
    return take(rows, fits), which[fits]


def sent_variants(candidates: Columns, sendable: np.ndarray, shared_bytes: Callable[[Columns], np.ndarray], machine: Machine) -> Variants:
    """The persistent ones of candidates whose results the copy engine can store (`sendable`), with as many stages as fit beside these, but at least
    as many as theirs or three: with two, copies no longer hide behind products."""
    which = np.flatnonzero((candidates["persistent"] > 0) & sendable)
    taken = {**take(candidates, which), SENT: np.ones(len(which), np.int64), "staged": np.zeros(len(which), np.int64)}
    own, most = taken["stages"], np.zeros(len(which), np.int64)
    for stages in sorted(TILE_AXES["stages"]):
        allowed = (own == stages) | (own > stages) & (stages >= LEAST_STAGES)
        rows = taken | {"stages": np.full(len(which), stages)}
        most = np.where(allowed & (shared_bytes(rows) <= machine.shared_bytes_per_block), stages, most)
    return take(taken | {"stages": most}, most > 0), which[most > 0]
