"""What learned models read of Winograd's algorithm on a CPU besides sizes, axes and terms."""

from __future__ import annotations

import numpy as np

from tilewright.kernels.columns import Columns, ceil_divided, length
from tilewright.kernels.cpu.winograd.space import CpuWinogradProblem, working_bytes
from tilewright.kernels.winograd_transform import FILTER

NUMBER = 1


def winograd_features(problem: CpuWinogradProblem, rows: Columns, lanes: int) -> dict[str, np.ndarray]:
    size, tile, vectors = rows["output_tile"], rows["tile"], rows["vectors"]
    tiles, panel = problem.tiles(size), vectors * lanes
    panels, own = ceil_divided(problem.outputs, panel), ceil_divided(tiles, rows["tile_parts"])
    filters = float(problem.element_bytes) * problem.channels * panel
    all_filters = filters * panels * (size + FILTER - 1) ** 2
    image = float(problem.element_bytes) * problem.images * problem.height * problem.width * problem.channels
    a, b = np.log2(image / rows["tile_parts"]), np.log2(all_filters / rows["panel_parts"])
    return {
        "schema": np.full(length(rows), float(NUMBER)),
        "first factor of a thread": a,
        "second factor of a thread": b,
        "factors of a thread": np.logaddexp2(a, b),
        "accumulators": (tile * vectors).astype(np.float64),
        "loads": (tile + vectors) / (tile * vectors),
        "channels filled": problem.outputs / (panels * panel),
        "pixels filled": problem.images * problem.height * problem.width / (tiles * size**2),
        "last column": (own % tile) / tile,
        "last row": (own % (tile * rows["blocks"])) / (tile * rows["blocks"]),
        "panel bytes": np.log2(filters),
        "bytes of a tile": np.log2(float(problem.element_bytes) * tile * problem.channels),
        "bytes of a block": np.log2(working_bytes(rows, problem, lanes)),
        "bytes of all filters": np.log2(all_filters),
        "units": own / (tile * rows["blocks"]),
        "balance": panels / (ceil_divided(panels, rows["panel_parts"]) * rows["panel_parts"]),
    }
