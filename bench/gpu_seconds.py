"""Predicted time of analysed GPU kernels: by a linear combination of a processor's busy cycles, and by named terms that overlap.

The coefficients of an architecture family are data (`constants.json`), fitted once by `python -m bench.gpu_score` to measured kernels.
Source: Tuna (2021), equation 2, for the linear combination; waves and the tail as in CNNOpt (PACT 2022), section 3.2, for the terms.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import ceil
from pathlib import Path

import numpy as np

from tilewright.analysis.gpu.transactions import INTEGER_LANES, KernelAnalysis
from tilewright.analysis.gpu.warps import SECTOR_BYTES
from tilewright.hardware.machine import Machine

CONSTANTS = Path(__file__).parent / "gpu_seconds.json"
FAMILIES: Mapping[int, str] = {7: "hopper", 8: "hopper", 9: "hopper", 10: "hopper", 12: "hopper"}
"""The family whose coefficients an architecture uses, by the first digit of its compute capability: only Hopper was measured."""
KERNEL_COLUMNS = (
    "blocks", "resident", "warps", "multiply_add", "integer", "shared", "level_2", "barriers", "alone", "waits", "spills", "memory",
)  # fmt: skip


@dataclass(frozen=True)
class TimeConstants:
    """Constants of the named terms. `launch` and `fill`: cycles of a kernel, and of each round of resident blocks. Factors of a block's cycles:
    `multiply_add`, `integer`, `shared`, `level_2`; of one warp's: `alone`, `waits`; `barrier` and `barrier_warp`: cycles of each barrier, and for
    each warp that waits at it; `spill`: cycles per warp and byte of spill code; `memory`: factor of the time of the distinct bytes at the nominal
    bandwidth. `overlap`: the exponent of the p-norm; `imbalance`: share of the schedulers' idle time due to uneven numbers of warps."""

    launch: float
    fill: float
    multiply_add: float
    integer: float
    shared: float
    level_2: float
    barrier: float
    barrier_warp: float
    alone: float
    waits: float
    spill: float
    memory: float
    overlap: float
    imbalance: float


def constants_of(machine: Machine) -> tuple[dict[str, float], TimeConstants]:
    """(coefficients of the linear combination of `busy_cycles`, constants of the terms) of the machine's family."""
    found = json.loads(CONSTANTS.read_text())[FAMILIES[machine.compute_capability[0]]]
    return found["linear"], TimeConstants(**found["terms"])


def kernel_columns(analyses: Sequence[KernelAnalysis], machine: Machine) -> dict[str, list[float]]:
    """The inputs of the terms for each kernel: cycles of a processor for one block, of one warp alone, and counts (KERNEL_COLUMNS)."""
    cache = machine.cache(2)
    assert cache is not None
    found: dict[str, list[float]] = {name: [] for name in KERNEL_COLUMNS}
    for one in analyses:
        moved, warps = one.transactions, ceil(one.threads / machine.warp_size)

        def executed(*kinds: str, one: KernelAnalysis = one) -> float:
            return sum(one.instructions.get(kind, 0.0) for kind in kinds) / one.blocks

        row = (
            one.blocks,
            one.resident,
            warps,
            executed("fma", "float") * machine.warp_size / machine.fp32_lanes_per_processor,
            executed("integer", "compare", "convert") * machine.warp_size / INTEGER_LANES,
            moved.shared / one.blocks * machine.warp_size * 4 / machine.shared_bytes_per_cycle,
            (moved.global_loads + moved.global_stores) / one.blocks * SECTOR_BYTES / cache.bandwidth,
            one.of_a_thread.get("barrier", 0.0),
            one.alone,
            one.waits,
            one.resources.spill_bytes * one.threads / machine.warp_size,
            one.distinct_bytes / machine.memory_bandwidth * machine.clock_hz,
        )
        for name, value in zip(KERNEL_COLUMNS, row, strict=True):
            found[name].append(float(value))
    return found


def term_cycles(columns: Mapping[str, np.ndarray], machine: Machine, constants: TimeConstants) -> np.ndarray:
    """Cycles of each kernel: launch + max(memory, rounds). A round of n blocks takes fill + spills + (multiply-adds^p + integer^p + shared^p + level
    2^p + warp^p)^(1/p), where all terms but the last are those of n blocks, the first two increased by idle schedulers, and warp = alone + waits +
    barriers. Full rounds have all resident blocks, the last one the rest."""
    k, o = {name: np.asarray(column, dtype=np.float64) for name, column in columns.items()}, constants
    warp = o.alone * k["alone"] + o.waits * k["waits"] + k["barriers"] * (o.barrier + o.barrier_warp * k["warps"])
    schedulers = machine.schedulers_per_processor

    def of_a_round(count: np.ndarray) -> np.ndarray:
        warps = count * k["warps"]
        uneven = 1 + o.imbalance * (np.ceil(warps / schedulers) * schedulers / warps - 1)
        parts = [uneven * o.multiply_add * k["multiply_add"], uneven * o.integer * k["integer"], o.shared * k["shared"], o.level_2 * k["level_2"]]
        together = sum((count * part) ** o.overlap for part in parts) + warp**o.overlap
        return together ** (1 / o.overlap) + o.fill + o.spill * count * k["spills"]

    each = np.ceil(k["blocks"] / machine.processors)
    full = np.floor(each / k["resident"])
    rest = each - full * k["resident"]
    rounds = full * of_a_round(k["resident"]) + np.where(rest > 0, of_a_round(np.maximum(rest, 1)), 0)
    cycles: np.ndarray = o.launch + np.maximum(o.memory * k["memory"], rounds)
    return cycles


def predicted_seconds(analyses: Sequence[KernelAnalysis], machine: Machine) -> float:
    """The time of the calls of a region, one after another, by the terms."""
    columns = {name: np.array(values) for name, values in kernel_columns(analyses, machine).items()}
    return float(term_cycles(columns, machine, constants_of(machine)[1]).sum()) / machine.clock_hz


def as_constants(numbers: Sequence[float]) -> TimeConstants:
    """The constants from numbers in the order of the fields."""
    return TimeConstants(**dict(zip((spec.name for spec in fields(TimeConstants)), map(float, numbers), strict=True)))


def as_numbers(constants: TimeConstants) -> list[float]:
    return list(asdict(constants).values())
