"""Schedules of convolutions by warpgroups over patches.

A block computes a tile of height x width positions of one image. Rows of the product are successive pixels of the patch in shared memory: the lines
of the tile, and between them the pixels that the filter reaches beyond it, whose results are not stored. All taps read the one patch, each from
another first pixel on, so that a pixel is copied once instead of once for each tap. Results that are pooled are those of pixels on wgmma's columns
(`swapped`), of which a thread has pairs of neighbours, and of lines above each other the same ones: lines of the patch are whole multiples of eight
pixels, or products take eight pixels of each line, so that none between the lines are multiplied. Parts of a split are stored as they are, and pooled
by the kernel that adds them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import numpy as np

from tilewright.codegen.intrinsics.wgmma import M
from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.ir.intrinsic import LANES
from tilewright.ir.tensor_map import MOST_IN_BOX
from tilewright.kernels.columns import Columns, ceil_divided, joined, length, product_of, reject, take, times
from tilewright.kernels.gpu.warpgroup.space import (
    ALIGNMENT,
    BARRIER_BYTES,
    in_whole_clusters,
    marks_of,
    no_candidates,
    parts_bytes_of,
    registers_of,
    sent_bytes_of,
    staged_bytes_of,
    stages_of,
    threads_of,
    ways_of,
)
from tilewright.kernels.gpu.warpgroup_patch.form import EIGHT, PatchFacts

ROWS = 8
"""Rows after which a swizzle repeats; buffers of tiles are whole multiples."""


@dataclass(frozen=True)
class PatchSchedule:
    """One candidate. `consumers` warpgroups multiply 64 rows each by `columns` columns: rows are pixels, or output channels if `swapped` (0 or 1).
    A block stores the positions of height x width. `stages` tiles of the filter and `patches` patches are in shared memory at once. `split` blocks
    share the channels of one output tile. `cluster` blocks of the same output channels each copy a part of the filter, to all of them. `staged`,
    `persistent`, `meeting`, `sent` (0 or 1): as in `WarpgroupSchedule`. `lines` (0 or 1): products take eight pixels of each line of the patch."""

    columns: int
    consumers: int
    stages: int
    patches: int
    height: int
    width: int
    swapped: int = 0
    split: int = 1
    cluster: int = 1
    staged: int = 0
    persistent: int = 0
    meeting: int = field(default=0, metadata={"omitted": 0})
    sent: int = field(default=0, metadata={"omitted": 0})
    lines: int = field(default=0, metadata={"omitted": 0})

    @property
    def pixels(self) -> int:
        """Successive pixels of the patch that are multiplied."""
        return self.columns if self.swapped else M * self.consumers

    @property
    def channels(self) -> int:
        """Output channels of a block."""
        return M * self.consumers if self.swapped else self.columns

    @property
    def threads(self) -> int:
        return LANES["warpgroup"] * self.consumers + LANES["warp"]

    def __str__(self) -> str:
        return (
            f"warpgroup patches tile={self.height}x{self.width} block={self.pixels}x{self.channels} stages={self.stages} "
            f"patches={self.patches} split={self.split}{marks_of(self)}{' lines' * self.lines}"
        )


TILE_AXES = {
    "columns": (16, 32, 64, 96, 128, 160, 192, 224, 256),
    "consumers": (1, 2, 3, 4),
    "stages": (2, 3, 4, 6, 8),
    "patches": (1, 2),
    "pieces": (1, 2, 3, 4, 6, 8),
    "swapped": (0, 1),
}
"""`pieces`: into which lines of the output are divided."""
LINES = "lines"
LEAST_USEFUL = 0.5
"""Part of the multiplied pixels whose results are stored."""
MOST_PARTS = 8
"""Parts of a split that are added for each pixel of a window when they are pooled."""


def patch_space(facts: PatchFacts, machine: Machine, tf32: bool) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The candidates, and the number rejected for each reason (a rejected tile counts once for each way to share and store it). `tf32`: whether
    float32 factors may be rounded to TF32."""
    if facts.base.kind == "tf32" and not tf32:
        return no_candidates(PatchSchedule), {"float32 may not be rounded to TF32": 1}
    tiles, ways = product_of(TILE_AXES), ways_of(facts.base)
    if not facts.windows:
        return _space(facts, machine, tiles, ways)
    split, kinds = ways["split"], {LINES: np.array([0, 1] if len(facts.outputs) > 1 else [0])}
    pooled, rejected = _space(facts, machine, times(take(tiles, tiles["swapped"] > 0), kinds), take(ways, (split == 1) & (ways["staged"] == 0)))
    if facts.base.taps == 1:  # patches gain nothing but the pooling
        return pooled, rejected
    parts, more = _space(replace(facts, windows=()), machine, tiles, take(ways, (split > 1) & (split <= MOST_PARTS)))
    parts[LINES] = np.zeros(length(parts), np.int64)
    return joined([pooled, parts]), {reason: rejected.get(reason, 0) + more.get(reason, 0) for reason in {**rejected, **more}}


def _space(
    facts: PatchFacts, machine: Machine, tiles: dict[str, np.ndarray], ways: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The feasible candidates of some tiles and ways to share and store them, and the number rejected for each reason. All blocks pool their results
    if the facts have windows."""
    pieces, lines = tiles.pop("pieces"), lines_of(tiles)
    height, width = _tiles(facts, pixels_of(tiles), pieces, lines)
    product, pixels, channels = facts.base.product, pixels_of(tiles), channels_of(tiles)
    extents, pitches = facts.patch(pixels, height, width, lines, bool(facts.windows))
    least = np.where(tiles["swapped"] > 0, M, 16)
    tiles, rejected = reject(
        tiles | {"height": height, "width": width},
        [
            ("a line is not divided into so many pieces", (pieces - 1) * width >= facts.outputs[-1]),
            ("fewer pieces give the same tile", (pieces > 1) & (_tiles(facts, pixels_of(tiles), _fewer(pieces), lines)[1] == width)),
            ("lines have fewer than eight pixels", (lines > 0) & (facts.outputs[-1] < EIGHT)),
            ("lines of the patch have eight pixels", (lines > 0) & (pitches[-2:][0] == EIGHT)),
            ("a line of the tile is longer than the rows of a block", width > pixels),
            ("a block has no whole windows", height == 0),
            ("most rows of a block are not stored", height * width < LEAST_USEFUL * pixels),
            ("a patch is larger than a box of the copy engine", np.maximum.reduce([np.broadcast_to(e, len(pixels)) for e in extents]) > MOST_IN_BOX),
            ("registers exceed a processor's", registers_of(tiles) * threads_of(tiles) > machine.registers_per_processor),
            ("tile of channels is more than twice the extent", (channels >= 2 * np.maximum(product.n, least)) & (channels > least)),
        ],
    )
    candidates = times(tiles, ways)
    split, cluster, blocks, goes_on = candidates["split"], candidates["cluster"], blocks_of(facts, candidates), candidates["persistent"] > 0
    each, channels = chunks_each(facts, candidates), channels_of(candidates)
    candidates, more = reject(
        candidates,
        [
            ("shared memory exceeds a block's", shared_bytes_of(facts, candidates) > machine.shared_bytes_per_block),
            ("more stages than steps", (candidates["stages"] > 2) & (candidates["stages"] > each * facts.base.taps) & ~goes_on),
            ("more patches than parts of the channels", (candidates["patches"] > 1) & (candidates["patches"] > each) & ~goes_on),
            ("a split would have nothing to reduce", (split > 1) & ((split - 1) * each >= facts.chunks)),
            ("no block would have several tiles", goes_on & (blocks <= at_once_of(facts, candidates, machine))),
            ("parts of the filter that no swizzle repeats in", (cluster > 1) & (channels % (ROWS * cluster) > 0)),
            ("clusters leave processors idle", (cluster > 1) & (blocks < machine.processors)),
            ("a cluster has blocks without pixels", (cluster > 1) & (tiles_of(facts, candidates) < cluster)),
        ],
    )
    return candidates, {**{reason: number * length(ways) for reason, number in rejected.items()}, **more}


def _tiles(facts: PatchFacts, pixels: np.ndarray, pieces: np.ndarray, lines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Height and width of tiles whose lines are divided into so many pieces, or with `lines` have eight pixels: as high as fits, and all of about one
    height."""
    down, across = facts.window
    width = np.where(lines > 0, EIGHT, ceil_divided(facts.outputs[-1] // across, pieces) * across)
    if len(facts.outputs) == 1:
        return np.ones_like(width), np.minimum(width, pixels // across * across)
    _, pitches = facts.patch(pixels, np.ones_like(width), width, 0, bool(facts.windows))
    windows = facts.outputs[-2] // down
    fitting = np.clip(np.where(lines > 0, pixels // EIGHT, (pixels - width) // pitches[-2] + 1), 1, facts.outputs[-2]) // down
    return ceil_divided(windows, ceil_divided(windows, np.maximum(fitting, 1))) * np.minimum(fitting, 1) * down, width


def _fewer(pieces: np.ndarray) -> np.ndarray:
    """The next smaller numbers of `pieces`; one for one."""
    axis = np.asarray(TILE_AXES["pieces"])
    fewer: np.ndarray = axis[np.maximum(np.searchsorted(axis, pieces) - 1, 0)]
    return fewer


def lines_of(candidates: Columns) -> np.ndarray:
    """Whether products take eight pixels of each line. Only results that are pooled have the axis."""
    lines: np.ndarray = candidates[LINES] if LINES in candidates else np.zeros(length(candidates), np.int64)
    return lines


def pixels_of(candidates: Columns) -> np.ndarray:
    """Pixels that a block multiplies."""
    pixels: np.ndarray = np.where(candidates["swapped"] > 0, candidates["columns"], M * candidates["consumers"])
    return pixels


def channels_of(candidates: Columns) -> np.ndarray:
    """Output channels of a block."""
    channels: np.ndarray = np.where(candidates["swapped"] > 0, M * candidates["consumers"], candidates["columns"])
    return channels


def chunks_each(facts: PatchFacts, candidates: Columns) -> np.ndarray:
    """Parts of the channels that a block reduces at most."""
    return ceil_divided(facts.chunks, candidates["split"])


def patch_rows(facts: PatchFacts, candidates: Columns) -> np.ndarray:
    """Pixels of a patch."""
    lines, pools = lines_of(candidates), facts.pools(candidates["split"])
    extents, _ = facts.patch(pixels_of(candidates), candidates["height"], candidates["width"], lines, pools)
    rows: np.ndarray = np.prod(np.broadcast_arrays(*extents), axis=0)
    return rows


def shared_bytes_of(facts: PatchFacts, candidates: Columns) -> np.ndarray:
    """Bytes of shared memory per block: tiles of the filter, patches, two barriers for each, and sums on their way."""
    each = chunks_each(facts, candidates)
    stages = stages_of(candidates, each * facts.base.taps)
    patches = np.where(candidates["persistent"] > 0, candidates["patches"], np.minimum(candidates["patches"], each))
    rows = stages * channels_of(candidates) + patches * ceil_divided(patch_rows(facts, candidates), ROWS) * ROWS
    tiles, barriers = rows * facts.base.row_bytes + 2 * ALIGNMENT, 2 * BARRIER_BYTES * (stages + patches)
    sums = staged_bytes_of(candidates) + parts_bytes_of(candidates, pixels_of(candidates), channels_of(candidates))
    needed: np.ndarray = tiles + barriers + sums + sent_bytes_of(candidates)
    return needed


def tiles_of(facts: PatchFacts, candidates: Columns) -> np.ndarray:
    """Tiles of all images."""
    along = [ceil_divided(extent, tile) for extent, tile in zip(facts.outputs, facts.tile(candidates["height"], candidates["width"]), strict=True)]
    tiles: np.ndarray = facts.images * np.prod(np.broadcast_arrays(*along), axis=0)
    return tiles


def blocks_of(facts: PatchFacts, candidates: Columns) -> np.ndarray:
    """Blocks of the grid."""
    cluster = candidates["cluster"]
    positions = ceil_divided(tiles_of(facts, candidates), cluster) * cluster
    product = facts.base.product
    blocks: np.ndarray = positions * product.batch * ceil_divided(product.n, channels_of(candidates)) * candidates["split"]
    return blocks


def at_once_of(facts: PatchFacts, candidates: Columns, machine: Machine) -> np.ndarray:
    """Blocks that are resident at once on the whole GPU, in whole clusters."""
    resident = resident_blocks(machine, threads_of(candidates), registers_of(candidates), shared_bytes_of(facts, candidates))
    return in_whole_clusters(resident, candidates["cluster"], machine)


def blocks_to_ask_for(schedule: PatchSchedule, facts: PatchFacts, machine: Machine) -> int:
    """The occupancy to request from the assembler: what shared memory and the estimated registers allow."""
    candidates = {entry.name: np.array([getattr(schedule, entry.name)]) for entry in fields(schedule)}
    return max(1, int(resident_blocks(machine, schedule.threads, registers_of(candidates), shared_bytes_of(facts, candidates))[0]))
