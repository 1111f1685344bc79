"""Schedules of the `amx` schema on a CPU: contractions of bfloat16 factors on tile registers (Intel AMX).

A tile of A is up to 16 pixels by one chunk of the reduction, read from memory as stored. A tile of B is one chunk by 16 output channels, packed at
compile time. Their product is added to a tile of 16 x 16 float32 sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.codegen.intrinsics.amx import TILE_CHANNELS, TILE_PIXELS, TILES
from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import product_of, reject
from tilewright.kernels.cpu.contraction.space import CONSTANT

FLAGS = ("over_rows", "pixels_first")
PARTS_EACH = (1, 2, 4, 8, 16, 32)
"""Parts of the pixels that one thread computes, one after the other."""
CHUNK = 32
"""Maximum number of bfloat16 elements of the reduction in a tile's row."""


def chunk_of(depth: int) -> int:
    """The largest even divisor of `depth` up to CHUNK: all tiles then have one shape. 0 if there is none."""
    return next((size for size in range(CHUNK, 0, -2) if depth % size == 0), 0)


@dataclass(frozen=True)
class CpuAmxFacts:
    """Facts that the choice depends on: the extents of the two innermost M axes (`rows`, `columns`), the product of all others (`outer`), and N. The
    reduction has `steps` iterations outside its innermost `depth` adjacent elements; a tile covers `chunk` of these.

    `row_pixels`: distance between rows of A in pixels, if tiles may continue past the end of a row; otherwise 0. `a_bytes`, `b_bytes`: each factor
    read once; `epilogue_bytes`: everything else that is read; `single_stores`: results are not contiguous along N. `b`: how B is stored, as in
    `CpuContractionFacts`; unless it is CONSTANT, it is copied into panels first."""

    outer: int
    rows: int
    columns: int
    n: int
    steps: int
    depth: int
    chunk: int
    row_pixels: int
    a_bytes: int
    b_bytes: int
    epilogue_bytes: int = 0
    single_stores: bool = False
    b: str = CONSTANT

    def run(self, over_rows: np.ndarray | int) -> np.ndarray:
        """Length in pixels of a run that tiles divide: one row, or all rows and the gaps between them."""
        return np.where(over_rows, (self.rows - 1) * self.row_pixels + self.columns, self.columns)

    def tiles(self, over_rows: np.ndarray | int, pixels: np.ndarray | int) -> np.ndarray:
        """Tiles of `pixels` pixels that cover the pixels of one outer index."""
        return -(-self.run(over_rows) // pixels) * np.where(over_rows, 1, self.rows)


@dataclass(frozen=True)
class CpuAmxSchedule:
    """A block computes `pixel_tiles` tiles of `pixels` pixels by `channel_tiles` tiles of 16 channels. `over_rows`: tiles continue past the ends of
    rows. `pixels_first`: the loop over pixel blocks is outside the loop over channel panels. The pixels are divided into `pixel_parts`,
    the channels into `channel_parts`; each thread has equally many parts. With several, a part's pixels stay in level 2 while all channels pass. A
    vector is `lanes` float32."""

    pixels: int
    pixel_tiles: int
    channel_tiles: int
    over_rows: bool
    pixels_first: bool
    pixel_parts: int
    channel_parts: int
    lanes: int

    @property
    def panel(self) -> int:
        """Output channels of a block."""
        return self.channel_tiles * TILE_CHANNELS

    def __str__(self) -> str:
        rows = ", over rows" if self.over_rows else ""
        blocks = f"{self.pixel_tiles}x{self.channel_tiles} tiles of {self.pixels} pixels by {TILE_CHANNELS} channels{rows}"
        first = "pixels" if self.pixels_first else "channels"
        return f"amx {blocks}, {first} outermost, threads {self.pixel_parts}x{self.channel_parts}"


def cpu_amx_space(facts: CpuAmxFacts, machine: Machine, threads: int) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with a column for each field of the schedule except `lanes`, and the number rejected for each reason. Some threads may have no
    work."""
    splits = [part for part in range(1, threads + 1) if threads % part == 0]
    candidates = product_of(
        {
            "pixels": range(1, TILE_PIXELS + 1),
            "pixel_tiles": range(1, 5),
            "channel_tiles": range(1, 5),
            "over_rows": (0, 1) if facts.row_pixels and facts.rows > 1 else (0,),
            "pixels_first": (0, 1),
            "pixel_parts": splits,
            "parts_each": PARTS_EACH,
        }
    )
    candidates["channel_parts"] = threads // candidates["pixel_parts"]
    parts_each, level2 = candidates.pop("parts_each"), machine.cache(2)
    assert level2 is not None, f"{machine.name} lacks the facts about its caches"
    share = facts.a_bytes / candidates["pixel_parts"]
    candidates["pixel_parts"] = candidates["pixel_parts"] * parts_each
    run = facts.run(candidates["over_rows"])
    tiles = facts.outer * facts.tiles(candidates["over_rows"], candidates["pixels"])
    panels = -(-facts.n // TILE_CHANNELS)
    m, n = candidates["pixel_tiles"], candidates["channel_tiles"]
    even = -(-run // -(-run // TILE_PIXELS))
    return reject(
        candidates,
        [
            ("more pixels a tile than there are", candidates["pixels"] > run),
            ("tiles that are neither full nor equal", (candidates["pixels"] != np.minimum(run, TILE_PIXELS)) & (candidates["pixels"] != even)),
            (f"more than {TILES} tiles", m * n + m + n > TILES),
            ("more tiles in a block than there are", (m > facts.tiles(candidates["over_rows"], candidates["pixels"])) | (n > panels)),
            ("several parts of the pixels for one pass of the channels", (parts_each > 1) & ((candidates["pixels_first"] == 1) | (panels <= n))),
            ("several parts of pixels that stay in level 2", (parts_each > 1) & (share <= level2.bytes / 2)),
            ("more parts than blocks", (parts_each > 1) & (candidates["pixel_parts"] * m > tiles)),
            ("the same in the other order", (candidates["pixels_first"] == 1) & ((panels <= n) | (tiles <= m))),
        ],
    )


def schedule_of(lanes: int, **axes: int) -> CpuAmxSchedule:
    """The schedule of one row of the space on a machine with vectors of `lanes` elements."""
    return CpuAmxSchedule(**{name: bool(value) if name in FLAGS else value for name, value in axes.items()}, lanes=lanes)  # type: ignore[arg-type]
