"""Schedules of products by warpgroups: the tile of a block and the stages of its pipeline.

C[batch, m, n] = sum over taps and channels of A[batch, m, tap, channel] * B[batch, n, tap, channel]. One warp copies, each of `consumers` warpgroups
multiplies 64 rows of one factor by `columns` rows of the other. If `swapped` the 64 are of B: few pixels waste less of a multiple of 8 than of 64.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeVar

import numpy as np

from tilewright.codegen.intrinsics.wgmma import M
from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.ir.dtypes import FLOAT32, size_of
from tilewright.ir.intrinsic import LANES
from tilewright.kernels.columns import Columns, ceil_divided, length, product_of, reject, take, times
from tilewright.kernels.gpu.gemm.space import SPLITS
from tilewright.kernels.gpu.tensor_cores.space import FEWEST_OF_PAIRS
from tilewright.kernels.gpu.warpgroup.form import WarpgroupFacts
from tilewright.kernels.gpu.warpgroup.result_matrix import ELEMENT_BYTES
from tilewright.kernels.schema import Numerics

S = TypeVar("S", int, np.ndarray)
BARRIER_BYTES = 8
ALIGNMENT = 1024
"""Of buffers of swizzled tiles and boxes in shared memory, in bytes."""
MEETING, SENT, PAIRS = "meeting", "sent", "pairs"
IN_PARTS, PARTS_HELD = 2, 2
"""`sent` in parts, of which so many are in shared memory at once."""
VARIANT_AXES = {MEETING, SENT}
"""Axes that only variants have (`variants.py`)."""


@dataclass(frozen=True)
class WarpgroupSchedule:
    """One candidate. A block computes 64 * consumers x columns elements of m x n, or of n x m if `swapped` (0 or 1); `stages` parts of the reduction
    are in shared memory at once. `split` blocks share the reduction of one output tile, whose parts a second kernel adds in order; if they are
    `meeting` (0 or 1), they are a cluster and add them themselves, through shared memory. `cluster` blocks of the same columns of n each copy a part
    of B, to all of them. `staged` (0 or 1): without a split, sums go through shared memory, so that adjacent threads store (and read operands of the
    epilogue in) adjacent vectors. `persistent` (0 or 1): without a split, there are only as many blocks as fit at once; each computes several tiles,
    and copies for the next one while it stores. `sent`: in persistent blocks, sums go through shared memory as results of 16 bits, which the copy
    engine stores: those of a tile at once (1), or part by part (2). `pairs`: float32 factors are pairs of TF32 numbers (1), or of numbers of float16
    (2; `pairs.py`)."""

    columns: int
    consumers: int
    stages: int
    swapped: int = 0
    split: int = 1
    cluster: int = 1
    staged: int = 0
    persistent: int = 0
    meeting: int = field(default=0, metadata={"omitted": 0})
    sent: int = field(default=0, metadata={"omitted": 0})
    pairs: int = field(default=0, metadata={"omitted": 0})

    @property
    def rows(self) -> int:
        return M * self.consumers

    @property
    def block_m(self) -> int:
        return self.columns if self.swapped else self.rows

    @property
    def block_n(self) -> int:
        return self.rows if self.swapped else self.columns

    @property
    def threads(self) -> int:
        return LANES["warpgroup"] * self.consumers + LANES["warp"]

    def __str__(self) -> str:
        return f"warpgroups block={self.block_m}x{self.block_n} stages={self.stages} split={self.split}{marks_of(self)}"


class Consuming(Protocol):
    """What both schedules of warpgroups say: a warpgroup has sums of 64 rows by `columns`, of n by m if `swapped`."""

    @property
    def columns(self) -> int: ...
    @property
    def consumers(self) -> int: ...
    @property
    def swapped(self) -> int: ...
    @property
    def split(self) -> int: ...
    @property
    def meeting(self) -> int: ...
    @property
    def cluster(self) -> int: ...
    @property
    def staged(self) -> int: ...
    @property
    def persistent(self) -> int: ...
    @property
    def sent(self) -> int: ...
    @property
    def threads(self) -> int: ...


def marks_of(schedule: Consuming) -> str:
    """The end of a schedule's text: what most candidates go without."""
    taken = ("meeting", "swapped", "staged", "sent", "persistent")
    marks = "".join(f" {name}" * (getattr(schedule, name) > 0) for name in taken) + " in parts" * (schedule.sent == IN_PARTS)
    marks += ("", " pairs", " pairs of float16")[getattr(schedule, "pairs", 0)]
    return f" cluster={schedule.cluster}" * (schedule.cluster > 1) + marks


TILE_AXES = {
    "columns": (16, 32, 48, 64, 96, 128, 160, 192, 224, 256),
    "consumers": (1, 2),
    "stages": (2, 3, 4, 6, 8, 12),
    "swapped": (0, 1),
}
STAGED_COLUMNS = 32
"""Columns of a warpgroup that go through shared memory at once, or half as many if these do not divide the columns."""
SENT_COLUMNS = 64
"""Columns of a part of a warpgroup's results that is sent, or half as many if these do not divide the columns."""
STAGED_PADDING = (8, 4)
"""Elements between the rows of a part of the sums in shared memory, as they are and `swapped`: the stores of a warp are in different banks."""
MOST_OF_PAIRS = 128
"""Columns of products of pairs: beside the sums a thread has those of a part of the reduction, and its rows."""
OTHER_REGISTERS = 72
"""Registers of a consumer besides its sums: for addresses, and elements of the epilogue that are read ahead; assumed."""


def warpgroup_space(facts: WarpgroupFacts, machine: Machine, numerics: Numerics) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The candidates, and the number rejected for each reason (a rejected tile counts once for each way to share and store it)."""
    pairs = facts.kind == "tf32" and not numerics.tf32
    if pairs and not (numerics.tf32_pairs and facts.constant):
        return no_candidates(WarpgroupSchedule), {"float32 may not be rounded to TF32": 1}
    tiles, product, ways = product_of(TILE_AXES), facts.product, ways_of(facts)
    if pairs:
        tiles = take(tiles, tiles["swapped"] == 0)
    tiles[PAIRS] = np.full(length(tiles), pairs * (2 if numerics.f16_pairs and facts.splits_to_f16 else 1))
    bm, bn = block_of(tiles)
    least_m, least_n = (np.where(tiles["swapped"] == side, M, 16) for side in (0, 1))
    tiles, rejected = reject(
        tiles,
        [
            ("tile of m is more than twice the extent", (bm >= 2 * np.maximum(product.m, least_m)) & (bm > least_m)),
            ("tile of n is more than twice the extent", (bn >= 2 * np.maximum(product.n, least_n)) & (bn > least_n)),
            ("a thread holds too many sums beside pairs", (tiles[PAIRS] > 0) & (tiles["columns"] > MOST_OF_PAIRS)),
            ("a sum of so few products is more accurate on CUDA cores", (tiles[PAIRS] > 0) & (product.r < FEWEST_OF_PAIRS)),
        ],
    )
    candidates = times(tiles, ways)
    stages, bm, bn = candidates["stages"], *block_of(candidates)
    split, each, cluster, blocks = candidates["split"], steps_each(facts, candidates), candidates["cluster"], blocks_of(facts, candidates)
    candidates, more = reject(
        candidates,
        [
            ("shared memory exceeds a block's", shared_bytes_of(facts, candidates) > machine.shared_bytes_per_block),
            ("more stages than steps", (stages > 2) & (stages > each) & (candidates["persistent"] == 0)),
            ("a split would have nothing to reduce", (split > 1) & ((split - 1) * each >= facts.steps)),
            ("a split reduces fewer than two steps", (split > 1) & (each < 2)),
            ("no block would have several tiles", (candidates["persistent"] > 0) & (blocks <= at_once_of(facts, candidates, machine))),
            ("parts of B that no swizzle repeats in", (cluster > 1) & (bn % (8 * cluster) > 0)),
            ("a cluster has blocks without rows", (cluster > 1) & (bm * (cluster - 1) >= product.m)),
            ("clusters leave processors idle", (cluster > 1) & (blocks < machine.processors)),
        ],
    )
    return candidates, {**{reason: number * length(ways) for reason, number in rejected.items()}, **more}


def ways_of(facts: WarpgroupFacts) -> dict[str, np.ndarray]:
    """How blocks share the reduction of a tile and copies, and how they store results: parts of a split, which in memory are in the order of the
    result, are stored as they are, by a block for each tile; staged results are vectors."""
    ways = product_of({"split": SPLITS, "cluster": (1, 2), "staged": (0, 1), "persistent": (0, 1)})
    alone, plain = ways["split"] == 1, (ways["staged"] == 0) & (ways["persistent"] == 0)
    return take(ways, (alone | (plain & facts.ordered)) & ((ways["staged"] == 0) | (facts.product.store_vector > 1)))


def no_candidates(schedule: Any) -> dict[str, np.ndarray]:
    """The columns of an empty space of a type of schedules."""
    return {entry.name: np.zeros(0, np.int64) for entry in fields(schedule) if entry.name not in VARIANT_AXES}


def meeting_of(candidates: Columns) -> np.ndarray:
    """Whether the blocks of a split meet."""
    return _taken(candidates, MEETING)


def pairs_of(candidates: Columns) -> np.ndarray:
    """Whether factors are pairs: a thread has two sums of each result then, one of them of a run, and there are three products."""
    return _taken(candidates, PAIRS)


def weights_of(candidates: Columns) -> np.ndarray | float:
    """Bytes of an element of the second factor, over those of one of the first: two of TF32, or three of float16, if they are pairs."""
    weights: np.ndarray | float = np.array([1.0, 2.0, 1.5])[candidates[PAIRS]] if PAIRS in candidates else 1.0
    return weights


def kind_of(facts: WarpgroupFacts, candidates: Columns) -> str:
    """The type of the products (a key of `wgmma.DEPTHS`): one for all candidates of a space."""
    return "f16" if PAIRS in candidates and np.any(candidates[PAIRS] == 2) else facts.kind


def sent_of(candidates: Columns) -> np.ndarray:
    """Whether the copy engine stores the results."""
    return _taken(candidates, SENT)


def _taken(candidates: Columns, axis: str) -> np.ndarray:
    taken: np.ndarray = candidates[axis] > 0 if axis in candidates else np.zeros(length(candidates), bool)
    return taken


def steps_each(facts: WarpgroupFacts, candidates: Columns) -> np.ndarray:
    """Steps of a block at most."""
    return ceil_divided(facts.steps, candidates["split"])


def block_of(candidates: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Elements of m and of n that a block computes."""
    rows, columns, swapped = M * candidates["consumers"], candidates["columns"], candidates["swapped"] > 0
    return np.where(swapped, columns, rows), np.where(swapped, rows, columns)


def shared_bytes_of(facts: WarpgroupFacts, candidates: Columns) -> np.ndarray:
    """Bytes of shared memory per block: tiles, two barriers a stage, and sums or results on their way."""
    bm, bn = block_of(candidates)
    rows = bm + bn * weights_of(candidates)
    stages = stages_of(candidates, steps_each(facts, candidates))
    needed: np.ndarray = stages * ((rows * facts.row_bytes).astype(np.int64) + 2 * BARRIER_BYTES) + ALIGNMENT
    needed = needed + staged_bytes_of(candidates) + parts_bytes_of(candidates, *block_of(candidates)) + sent_bytes_of(candidates)
    return needed


def staged_columns(columns: S) -> S:
    """Columns of a warpgroup's sums that go through shared memory at once."""
    return STAGED_COLUMNS // (1 + (columns % STAGED_COLUMNS > 0))


def staged_bytes_of(candidates: Columns) -> np.ndarray:
    """Bytes of shared memory for float32 sums on their way, without a split."""
    width, swapped = staged_columns(candidates["columns"]), candidates["swapped"] > 0
    rows, across, padding = (np.where(swapped, *pair) for pair in ((width, M), (M, width), STAGED_PADDING[::-1]))
    needed: np.ndarray = candidates["staged"] * candidates["consumers"] * rows * (across + padding) * size_of(FLOAT32)
    return needed


def parts_bytes_of(candidates: Columns, bm: np.ndarray, bn: np.ndarray) -> np.ndarray:
    """Bytes of shared memory for a block's part of bm x bn float32 sums, if the blocks of a split meet."""
    needed: np.ndarray = meeting_of(candidates) * bm * (bn + np.asarray(STAGED_PADDING)[candidates["swapped"]]) * size_of(FLOAT32)
    return needed


def sent_bytes_of(candidates: Columns) -> np.ndarray:
    """Bytes of shared memory for results that the copy engine stores."""
    if SENT not in candidates:
        return np.zeros(length(candidates), np.int64)
    columns, in_parts = candidates["columns"], candidates[SENT] == IN_PARTS
    held = np.where(in_parts, PARTS_HELD * part_columns(columns), columns)
    needed: np.ndarray = sent_of(candidates) * (M * candidates["consumers"] * held * ELEMENT_BYTES + ALIGNMENT)
    return needed


def part_columns(columns: S) -> S:
    """Columns of a warpgroup's results that are sent at once, in parts, if they divide the columns."""
    return SENT_COLUMNS // (1 + (columns % SENT_COLUMNS > 0))


def blocks_of(facts: WarpgroupFacts, candidates: Columns) -> np.ndarray:
    """Blocks of the grid."""
    product, (bm, bn) = facts.product, block_of(candidates)
    clusters = product.batch * ceil_divided(product.m, bm * candidates["cluster"]) * ceil_divided(product.n, bn) * candidates["split"]
    blocks: np.ndarray = clusters * candidates["cluster"]
    return blocks


def at_once_of(facts: WarpgroupFacts, candidates: Columns, machine: Machine) -> np.ndarray:
    """Blocks that are resident at once on the whole GPU, in whole clusters."""
    resident = resident_blocks(machine, threads_of(candidates), registers_of(candidates), shared_bytes_of(facts, candidates))
    return in_whole_clusters(resident, candidates["cluster"], machine)


def threads_of(candidates: Columns) -> np.ndarray:
    """Threads of a block: those that multiply, and a warp that copies."""
    threads: np.ndarray = LANES["warpgroup"] * candidates["consumers"] + LANES["warp"]
    return threads


def in_whole_clusters(resident: np.ndarray | int, cluster: np.ndarray | int, machine: Machine) -> np.ndarray:
    """Blocks at once on the whole GPU, given those of a processor."""
    blocks: np.ndarray = machine.processors * np.maximum(resident, 1) // cluster * cluster
    return blocks


def stages_of(candidates: Columns, steps: np.ndarray) -> np.ndarray:
    """Stages of a pipeline of tiles with so many steps each: those of persistent blocks go on with the next tile."""
    stages: np.ndarray = np.where(candidates["persistent"] > 0, candidates["stages"], np.minimum(candidates["stages"], steps))
    return stages


def registers_of(candidates: Columns) -> np.ndarray:
    """Estimated 32-bit registers per thread."""
    registers: np.ndarray = candidates["columns"] // 2 * (1 + pairs_of(candidates)) + OTHER_REGISTERS
    return registers


def blocks_to_ask_for(schedule: WarpgroupSchedule, facts: WarpgroupFacts, machine: Machine) -> int:
    """The occupancy to request from the assembler: what shared memory and the estimated registers allow."""
    candidates = {entry.name: np.array([getattr(schedule, entry.name)]) for entry in fields(schedule)}
    return max(1, int(resident_blocks(machine, schedule.threads, registers_of(candidates), shared_bytes_of(facts, candidates))[0]))
