"""Features of depthwise register tiles for learned models, in addition to axes and terms."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, ceil_divided, length
from tilewright.kernels.cpu.depthwise.space import ORDERS, CpuDepthwiseFacts, reach
from tilewright.kernels.cpu.features import balance, of_level, of_registers

NUMBER = 2


def depthwise_features(facts: CpuDepthwiseFacts, candidates: Columns, machine: Machine, threads: int) -> dict[str, np.ndarray]:
    """The features by name; sizes are binary logarithms."""
    height, width, vectors = candidates["tile_rows"], candidates["tile_columns"], candidates["vectors"]
    pixels, taps = height * width, facts.taps[0] * facts.taps[1]
    span, lines = reach(facts.input_columns, width), reach(facts.input_rows, height)
    down, across = ceil_divided(facts.rows, height), ceil_divided(facts.columns, width)
    by_channels = candidates["order"] == ORDERS.index("c")
    tasks = facts.images * np.where(by_channels, facts.vectors // vectors, down)
    vector = float(facts.element_bytes) * machine.vector_lanes()
    rows_bytes = vector * vectors * lines * facts.columns * max(facts.input_columns[0], 1)
    problem = {
        "problem images": np.log2(facts.images), "problem rows": np.log2(facts.rows), "problem columns": np.log2(facts.columns),
        "problem panels": np.log2(facts.vectors), "problem taps": np.log2(taps), "problem stride": np.log2(max(facts.input_columns[0], 1)),
        "schema": NUMBER,
    }  # fmt: skip
    return {name: np.full(length(candidates), float(value)) for name, value in problem.items()} | {
        "first factor, level 2": of_level(machine, 2, threads, np.full(length(candidates), facts.bytes_read / threads)),
        "results, level 2": of_level(machine, 2, threads, np.full(length(candidates), facts.bytes_written / threads)),
        "accumulators": of_registers(machine, pixels),
        "registers": of_registers(machine, pixels + span + 1),
        "registers with filters": of_registers(machine, pixels + span + taps),
        "loads": (lines * span + height * taps) / (pixels * taps) * machine.fma_ports / machine.load_ports,
        "multiply-adds of a tile": np.log2(pixels * taps),
        "pixels filled": facts.rows * facts.columns / (down * across * pixels),
        "last column": (facts.columns % width) / width,
        "last row": (facts.rows % height) / height,
        "block": vectors / facts.vectors,
        "tile, level 1": of_level(machine, 1, 1, vector * vectors * span * lines),
        "rows, level 1": of_level(machine, 1, 1, rows_bytes),
        "rows, level 2": of_level(machine, 2, threads, rows_bytes),
        "tasks": np.log2(tasks / threads),
        "balance": balance(tasks, threads),
    }
