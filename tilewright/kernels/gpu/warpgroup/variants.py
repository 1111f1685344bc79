"""Variants of the code of products by warpgroups, which trials measure and predictions choose as far as measurements confirm it
(`selection/variants.py`); as axes of the space they would multiply it, and the learned models were trained without them.

`meeting`: the blocks of a split meet in a cluster and add their parts themselves, through shared memory. That takes no second kernel and no parts in
level 2. Measurements confirmed a third of the logarithm of the gains that formulas predict (docs/models.md). `sent`: the copy engine stores
the results of a block, which goes on with its next tile meanwhile; in parts, where all of them would take the place of stages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.kernels.columns import Columns, joined, take
from tilewright.kernels.gpu.gemm.space import CLUSTERS
from tilewright.kernels.gpu.warpgroup.form import WarpgroupFacts
from tilewright.kernels.gpu.warpgroup.result_matrix import ELEMENT_BYTES
from tilewright.kernels.gpu.warpgroup.space import (
    IN_PARTS,
    MEETING,
    PARTS_HELD,
    SENT,
    TILE_AXES,
    part_columns,
    registers_of,
    shared_bytes_of,
    threads_of,
)

Variants = tuple[dict[str, np.ndarray], np.ndarray]
"""Candidates, and the position of the one that each varies."""

ROW_BYTES = 128
"""Of the boxes that are sent; records may name variants with shorter ones."""
LEAST_STAGES = 3
"""Stages that a variant keeps of more."""


def warpgroup_variants(facts: WarpgroupFacts, candidates: Columns, machine: Machine) -> Variants:
    """Both kinds. The copy engine stores rows of 128 bytes: with shorter ones it was hardly faster than threads."""
    sendable = facts.sendable & ((candidates["swapped"] > 0) | (candidates["columns"] * ELEMENT_BYTES % ROW_BYTES == 0))
    return both_variants(candidates, sendable, partial(shared_bytes_of, facts), machine, in_parts=True)


def both_variants(
    candidates: Columns, sendable: np.ndarray, shared_bytes: Callable[[Columns], np.ndarray], machine: Machine, in_parts: bool = False
) -> Variants:
    """Those that meet, and of the `sendable` candidates those that the copy engine stores, which may do so `in_parts`."""
    meeting, first = meeting_variants(candidates, shared_bytes, machine)
    sent, second = sent_variants(candidates, sendable, shared_bytes, machine, in_parts)
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


def sent_variants(
    candidates: Columns, sendable: np.ndarray, shared_bytes: Callable[[Columns], np.ndarray], machine: Machine, in_parts: bool = False
) -> Variants:
    """The persistent ones of candidates whose results the copy engine can store (`sendable`), with as many stages as theirs: all results of a tile at
    once, or `in_parts` if all of them would take the place of stages or of a block on a processor. If neither fits, with as many stages as do, but
    at least three: with two, copies no longer hide behind products. None leaves a processor fewer blocks."""
    which = np.flatnonzero((candidates["persistent"] > 0) & sendable)
    base = take(candidates, which)
    taken = {**base, SENT: np.ones(len(which), np.int64), "staged": np.zeros(len(which), np.int64)}
    own, columns, most = base["stages"], base["columns"], np.zeros(len(which), np.int64)

    def resident(rows: Columns) -> np.ndarray:
        return resident_blocks(machine, threads_of(rows), registers_of(rows), shared_bytes(rows))

    before = resident(base)

    def fits(rows: Columns) -> np.ndarray:
        return (shared_bytes(rows) <= machine.shared_bytes_per_block) & (resident(rows) >= before)

    for stages in sorted(TILE_AXES["stages"]):
        allowed = (own == stages) | (own > stages) & (stages >= LEAST_STAGES)
        most = np.where(allowed & fits(taken | {"stages": np.full(len(which), stages)}), stages, most)
    if in_parts:
        width = part_columns(columns)
        several = (columns % width == 0) & (columns > PARTS_HELD * width)
        needed = several & (most < own) & fits(taken | {SENT: np.full(len(which), IN_PARTS)})
        taken, most = taken | {SENT: np.where(needed, IN_PARTS, 1)}, np.where(needed, own, most)
    return take(taken | {"stages": most}, most > 0), which[most > 0]
