"""Schedules of recurrent layers on tensor cores: units and sequences of a block, and warps that divide what is reduced."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.codegen.intrinsics.mma import M, N
from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, ceil_divided, product_of, reject
from tilewright.kernels.gpu.counts import WORD
from tilewright.kernels.gpu.recurrence.space import HALVES_REGISTERS, loops_apart
from tilewright.kernels.gpu.tensor_recurrence.form import TensorRecurrenceFacts

UNITS = (2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
ROWS = (16, 32, 48, 64, 96, 128)
TOGETHER = (16, 32, 64)
WARPS = (1, 2, 4, 8, 16)
WARP = 32
PADDING = 8
"""Floats between rows of sums in shared memory, so that the pairs of eight rows that a warp stores do not conflict."""
OTHER_REGISTERS = 48
"""Registers per thread besides weights, sums and fragments of states."""


@dataclass(frozen=True)
class TensorRecurrenceSchedule:
    """A block has `units` hidden units with all their gates and `rows` sequences, of which it computes the sums of `together` at a time; its `warps`
    divide what is reduced. `divided`: of joint loops each half of the blocks computes one, instead of every block both."""

    units: int
    rows: int
    together: int
    warps: int
    divided: int = 0

    @property
    def threads(self) -> int:
        return WARP * self.warps

    def __str__(self) -> str:
        own = f"{self.units} units of {self.rows} sequences per block, weights in registers"
        halves = "; half of the blocks for each loop" if self.divided else ""
        return f"tensor cores, {own}; {self.warps} warps divide sums of {self.together} sequences{halves}"


def blocks_of(facts: TensorRecurrenceFacts, candidates: Columns) -> np.ndarray:
    sizes = facts.sizes
    blocks: np.ndarray = ceil_divided(sizes.units, candidates["units"]) * ceil_divided(sizes.rows, candidates["rows"]) * loops_apart(candidates)
    return blocks


def products_of(facts: TensorRecurrenceFacts, candidates: Columns) -> np.ndarray:
    """Products that a block computes."""
    products: np.ndarray = facts.products // loops_apart(candidates)
    return products


def rounds_of(facts: TensorRecurrenceFacts, candidates: Columns) -> np.ndarray:
    """Pairs of fragments along what is reduced that each warp multiplies."""
    return ceil_divided(facts.reduced // facts.deep, candidates["warps"])


def matrices_of(facts: TensorRecurrenceFacts, candidates: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Matrices of 16 sequences that are computed at a time, and of 8 gates of a product and units of a block."""
    return candidates["together"] // M, candidates["units"] * facts.product_gates // N


def registers_of(facts: TensorRecurrenceFacts, candidates: Columns) -> np.ndarray:
    """Estimated registers per thread: weights; of the sequences computed at a time sums of a product, and all states, as they are loaded before the
    first product."""
    rows, columns = matrices_of(facts, candidates)
    rounds = rounds_of(facts, candidates)
    # 16 bytes of each row of a pair of fragments: four registers
    registers: np.ndarray = (
        OTHER_REGISTERS
        + HALVES_REGISTERS * candidates["divided"]
        + products_of(facts, candidates) * rounds * (4 * columns + 8 * rows)
        + 4 * rows * columns
    )
    return registers


def shared_bytes_of(facts: TensorRecurrenceFacts, candidates: Columns) -> np.ndarray:
    """Shared memory per block: each warp's part of all sums."""
    size: np.ndarray = (
        WORD * candidates["warps"] * candidates["rows"] * (candidates["units"] * facts.product_gates * products_of(facts, candidates) + PADDING)
    )
    return size


def tensor_recurrence_space(facts: TensorRecurrenceFacts, machine: Machine, tf32: bool) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with the fields of the schedule as columns; and the number rejected for each reason. `tf32`: whether float32 factors may be rounded
    to TF32."""
    divided = (0, 1) if facts.sizes.parts == 2 else (0,)
    candidates = product_of({"units": UNITS, "rows": ROWS, "together": TOGETHER, "warps": WARPS, "divided": divided})
    if facts.kind == "tf32" and not tf32:
        return {name: column[:0] for name, column in candidates.items()}, {"float32 may not be rounded to TF32": len(candidates["units"])}
    blocks, threads = blocks_of(facts, candidates), WARP * candidates["warps"]
    admitted = np.minimum(machine.registers_per_processor // threads // 8 * 8, machine.registers_per_thread_max)
    return reject(
        candidates,
        [
            ("gates and units are no whole matrices", candidates["units"] * facts.product_gates % N != 0),
            ("more blocks than processors, which could not all be resident", blocks > machine.processors),
            ("a single block has no others to meet", blocks == 1),
            ("more units than there are", (candidates["units"] >= 2 * facts.sizes.units) & (candidates["units"] > 2)),
            ("more rows than sequences", (candidates["rows"] > M) & (candidates["rows"] >= 2 * facts.sizes.rows)),
            ("sequences are no multiple of those at a time", candidates["rows"] % candidates["together"] != 0),
            ("more warps than fragments", candidates["warps"] > facts.reduced // facts.deep),
            ("registers exceed a thread's", registers_of(facts, candidates) > admitted),
            ("shared memory exceeds a block's", shared_bytes_of(facts, candidates) > machine.shared_bytes_per_block),
        ],
    )
