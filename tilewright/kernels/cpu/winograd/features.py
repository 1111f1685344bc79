"""Features of Winograd's algorithm on a CPU for learned models, in addition to axes and terms."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.block_transforms import points_of
from tilewright.kernels.columns import Columns, ceil_divided, length
from tilewright.kernels.cpu.features import of_factors, of_level, of_registers
from tilewright.kernels.cpu.winograd.space import CpuWinogradFacts, working_bytes

NUMBER = 1


def winograd_features(facts: CpuWinogradFacts, candidates: Columns, machine: Machine, threads: int) -> dict[str, np.ndarray] | None:
    """The features by name; sizes are binary logarithms. None for filters that are not 3 x 3, because no model was trained on their transforms."""
    if facts.filter_shape != (3, 3):
        return None
    lanes = machine.vector_lanes()
    size, tile, vectors = candidates["output_tile"], candidates["tile"], candidates["vectors"]
    tiles, panel = facts.tiles(candidates), vectors * lanes
    panels, own = ceil_divided(facts.outputs, panel), ceil_divided(tiles, candidates["tile_parts"])
    filters = float(facts.element_bytes) * facts.channels * panel
    all_filters = filters * panels * points_of(candidates)
    pixels = facts.images * facts.height * facts.width
    image = float(facts.input_bytes) * pixels * facts.channels
    results = float(facts.result_bytes) * pixels * facts.outputs
    a, b = image / candidates["tile_parts"], all_filters / candidates["panel_parts"]
    problem = {
        "problem outer": np.log2(facts.images), "problem rows": np.log2(facts.height), "problem columns": np.log2(facts.width),
        "problem panels": np.log2(facts.outputs / lanes), "problem r": np.log2(facts.channels),
        "problem epilogue": np.log2(1 + facts.epilogue_bytes / results), "schema": NUMBER,
    }  # fmt: skip
    return {name: np.full(length(candidates), float(value)) for name, value in problem.items()} | {
        **of_factors(machine, threads, a, b),
        "second factor, level 3": of_level(machine, 3, threads, b),
        "accumulators": of_registers(machine, tile * vectors),
        "chain": tile * vectors / (machine.fma_latency_cycles * machine.fma_ports),
        "loads": (tile + vectors) / (tile * vectors) * machine.fma_ports / machine.load_ports,
        "channels filled": facts.outputs / (panels * panel),
        "pixels filled": pixels / (tiles * size**2),
        "last column": (own % tile) / tile,
        "last row": (own % (tile * candidates["blocks"])) / (tile * candidates["blocks"]),
        "panel, level 1": of_level(machine, 1, 1, filters),
        "panel, level 2": of_level(machine, 2, threads, filters),
        "tile, level 1": of_level(machine, 1, 1, float(facts.element_bytes) * tile * facts.channels),
        "block, level 2": of_level(machine, 2, threads, working_bytes(facts, candidates, lanes)),
        "tasks": own / (tile * candidates["blocks"]),
        "balance": panels / (ceil_divided(panels, candidates["panel_parts"]) * candidates["panel_parts"]),
    }
