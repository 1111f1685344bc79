"""Features of register tiles for learned models, in addition to axes and terms."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, length
from tilewright.kernels.cpu.contraction.counts import panels_of, parts_of, tiles_of
from tilewright.kernels.cpu.contraction.space import ACROSS_N, ALONG_N, CONSTANT, ORDERS, CpuContractionFacts
from tilewright.kernels.cpu.features import balance, of_factors, of_level, of_registers, read_by_thread

NUMBER = 0


def contraction_features(facts: CpuContractionFacts, candidates: Columns, machine: Machine, threads: int) -> dict[str, np.ndarray] | None:
    """The features by name; sizes are binary logarithms. None for products of a single row, which are bound by memory, for products followed by
    reductions of rows or pixels, and for empty sums: no model was trained on these."""
    if facts.whole_rows or facts.images or facts.r == 0 or facts.outer * facts.rows * facts.columns == 1:
        return None
    lanes = machine.vector_lanes()
    height, width, vectors = candidates["tile_rows"], candidates["tile_columns"], candidates["vectors"]
    pixels, panel = height * width, vectors * lanes
    panels, tiles = panels_of(facts, candidates, machine), tiles_of(facts, candidates)
    shared = candidates["order"] == ORDERS.index("m")
    tasks = np.where(shared, facts.outer * parts_of(facts, candidates), panels)
    a_row = facts.a_bytes / (facts.outer * facts.rows)
    a, b = read_by_thread(facts.a_bytes, facts.b_bytes, shared & (tasks > 1), threads)
    panel_bytes = float(facts.element_bytes) * facts.r * panel
    results = float(facts.result_bytes) * facts.outer * facts.rows * facts.columns * facts.n
    problem = {
        "problem outer": np.log2(facts.outer), "problem rows": np.log2(facts.rows), "problem columns": np.log2(facts.columns),
        "problem panels": np.log2(facts.n / lanes), "problem r": np.log2(facts.r), "problem b": (CONSTANT, ALONG_N, ACROSS_N).index(facts.b),
        "problem reuse": np.log2(facts.outer * facts.rows * facts.columns * facts.r * facts.element_bytes / facts.a_bytes),
        "problem epilogue": np.log2(1 + facts.epilogue_bytes / results), "schema": NUMBER,
    }  # fmt: skip
    return {name: np.full(length(candidates), float(value)) for name, value in problem.items()} | {
        **of_factors(machine, threads, a, b),
        "results, level 2": of_level(machine, 2, threads, np.full(length(candidates), results / threads)),
        "pixels": pixels.astype(np.float64),
        "accumulators": of_registers(machine, pixels * vectors),
        "chain": pixels * vectors / (machine.fma_latency_cycles * machine.fma_ports),
        "loads": (pixels + vectors) / (pixels * vectors) * machine.fma_ports / machine.load_ports,
        "channels filled": facts.n / (panels * panel),
        "pixels filled": facts.rows * facts.columns / (tiles * pixels),
        "last column": (facts.columns % width) / width,
        "last row": (facts.rows % height) / height,
        "panel, level 1": of_level(machine, 1, 1, panel_bytes),
        "panel, level 2": of_level(machine, 2, threads, panel_bytes),
        "tile, level 1": of_level(machine, 1, 1, a_row * height * width / facts.columns),
        "panel and tile, level 1": of_level(machine, 1, 1, panel_bytes + a_row * height * width / facts.columns),
        "rows, level 1": of_level(machine, 1, 1, a_row * height),
        "rows, level 2": of_level(machine, 2, threads, a_row * height),
        "panels": np.log2(panels),
        "tiles": np.log2(facts.outer * tiles),
        "tasks": np.log2(tasks / threads),
        "balance": balance(tasks, threads),
    }
