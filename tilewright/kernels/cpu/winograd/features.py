"""Features of Winograd's algorithm on a CPU for learned models, in addition to sizes, axes and terms."""

from __future__ import annotations

import numpy as np

from tilewright.kernels.columns import Columns, ceil_divided, length
from tilewright.kernels.cpu.winograd.space import CpuWinogradFacts, working_bytes
from tilewright.kernels.winograd_transform import FILTER

NUMBER = 1


def winograd_features(facts: CpuWinogradFacts, candidates: Columns, lanes: int) -> dict[str, np.ndarray]:
    size, tile, vectors = candidates["output_tile"], candidates["tile"], candidates["vectors"]
    tiles, panel = facts.tiles(size), vectors * lanes
    panels, own = ceil_divided(facts.outputs, panel), ceil_divided(tiles, candidates["tile_parts"])
    filters = float(facts.element_bytes) * facts.channels * panel
    all_filters = filters * panels * (size + FILTER - 1) ** 2
    image = float(facts.element_bytes) * facts.images * facts.height * facts.width * facts.channels
    a, b = np.log2(image / candidates["tile_parts"]), np.log2(all_filters / candidates["panel_parts"])
    return {
        "schema": np.full(length(candidates), float(NUMBER)),
        "first factor of a thread": a,
        "second factor of a thread": b,
        "factors of a thread": np.logaddexp2(a, b),
        "accumulators": (tile * vectors).astype(np.float64),
        "loads": (tile + vectors) / (tile * vectors),
        "channels filled": facts.outputs / (panels * panel),
        "pixels filled": facts.images * facts.height * facts.width / (tiles * size**2),
        "last column": (own % tile) / tile,
        "last row": (own % (tile * candidates["blocks"])) / (tile * candidates["blocks"]),
        "panel bytes": np.log2(filters),
        "bytes of a tile": np.log2(float(facts.element_bytes) * tile * facts.channels),
        "bytes of a block": np.log2(working_bytes(facts, candidates, lanes)),
        "bytes of all filters": np.log2(all_filters),
        "tasks": own / (tile * candidates["blocks"]),
        "balance": panels / (ceil_divided(panels, candidates["panel_parts"]) * candidates["panel_parts"]),
    }
