"""Schedules of the `amx` schema on a CPU: contractions of bfloat16 factors on tile registers (Intel AMX).

A tile of A is up to 16 pixels by a chunk of the reduction, read as it lies in memory; one of B as many steps by 16 output channels, packed when
compiling; their product is added to a tile of 16 x 16 float32 sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.codegen.intrinsics.amx import TILE_CHANNELS, TILE_PIXELS, TILES
from tilewright.kernels.columns import product_of, reject

FLAGS = ("over_rows", "pixels_first")
CHUNK = 32
"""Most bfloat16 of the reduction in a tile's row."""


@dataclass(frozen=True)
class CpuAmxFacts:
    """What the choice depends on: the two innermost M extents, all outside of them, N; `steps` of the reduction outside of its innermost `depth`
    adjacent elements, of which a tile takes `chunk`.

    `row_pixels`: pixels from one row to the next as A is stored, so that a tile may go on over the end of a row; 0 where it may not. `a_bytes`,
    `b_bytes`: all of each factor once; `epilogue_bytes`: all else that is read; `single_stores`: results do not lie along N."""

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

    def run(self, over_rows: np.ndarray | int) -> np.ndarray:
        """Neighbouring pixels that tiles divide: of a row, or of all rows and what lies between them."""
        return np.where(over_rows, (self.rows - 1) * self.row_pixels + self.columns, self.columns)

    def tiles(self, over_rows: np.ndarray | int, pixels: np.ndarray | int) -> np.ndarray:
        """Tiles of `pixels` pixels that cover the pixels of one outer index."""
        return -(-self.run(over_rows) // pixels) * np.where(over_rows, 1, self.rows)


@dataclass(frozen=True)
class CpuAmxSchedule:
    """`pixel_tiles` tiles of `pixels` pixels by `channel_tiles` tiles of 16 channels are summed side by side. `over_rows`: tiles go on over the ends
    of rows. With `pixels_first` a block of pixels meets all panels of channels before the next does, else a panel meets all pixels. `pixel_parts`
    threads share the pixels, `channel_parts` the channels; `lanes` float32 are a vector."""

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


def cpu_amx_space(facts: CpuAmxFacts, threads: int) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with columns named as the schedule's fields but `lanes`; and how many were rejected by reason. Of many threads
    some may have no work."""
    splits = [part for part in range(1, threads + 1) if threads % part == 0]
    candidates = product_of(
        {
            "pixels": range(1, TILE_PIXELS + 1),
            "pixel_tiles": range(1, 5),
            "channel_tiles": range(1, 5),
            "over_rows": (0, 1) if facts.row_pixels and facts.rows > 1 else (0,),
            "pixels_first": (0, 1),
            "pixel_parts": splits,
        }
    )
    candidates["channel_parts"] = threads // candidates["pixel_parts"]
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
            ("the same in the other order", (candidates["pixels_first"] == 1) & ((panels <= n) | (tiles <= m))),
        ],
    )


def schedule_of(lanes: int, **axes: int) -> CpuAmxSchedule:
    """The schedule of one row of the space on a machine with vectors of so many lanes."""
    return CpuAmxSchedule(**{name: bool(value) if name in FLAGS else value for name, value in axes.items()}, lanes=lanes)  # type: ignore[arg-type]
