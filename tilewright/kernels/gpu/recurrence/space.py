"""Schedules of the `recurrence` schema on a GPU: units and threads of a block, sequences at a time, and where the weights stay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, ceil_divided, product_of, reject
from tilewright.kernels.gpu.counts import WORD
from tilewright.kernels.recurrence_form import RecurrenceFacts

UNITS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32)
THREADS = (32, 64, 128, 256, 512)
ROWS = (1, 2, 4, 8)
OTHER_REGISTERS = 56
"""Registers per thread besides weights, sums and states: addresses, and what gates are computed from."""


@dataclass(frozen=True)
class GpuRecurrenceSchedule:
    """A block owns `units` hidden units with all their gates. Its `threads` divide the reduction, and each computes its part of the sums of `rows`
    sequences at a time. `shared`: the block's weights stay in shared memory instead of registers."""

    units: int
    threads: int
    rows: int
    shared: int

    def __str__(self) -> str:
        place = "shared memory" if self.shared else "registers"
        return f"{self.units} units per block, weights in {place}; {self.threads} threads divide sums of {self.rows} sequences"


def slices(r: int, threads: np.ndarray | int) -> np.ndarray:
    """Reduced elements per thread."""
    return ceil_divided(r, threads)


def sums_of(facts: RecurrenceFacts, candidates: Columns) -> np.ndarray:
    """Sums of a tile of rows: each thread holds a part of all of them."""
    sums: np.ndarray = facts.gates * candidates["units"] * candidates["rows"]
    return sums


def padded(sums: np.ndarray) -> np.ndarray:
    """The next power of two: an exchange halves the sums that a lane holds."""
    powers: np.ndarray = 1 << np.ceil(np.log2(sums)).astype(np.int64)
    return powers


def thread_weights(facts: RecurrenceFacts, candidates: Columns) -> np.ndarray:
    """Weights that a thread multiplies with in every step."""
    return sum((gates * slices(r, candidates["threads"]) for gates, r in facts.products), np.zeros(1, np.int64)) * candidates["units"]


def registers_of(facts: RecurrenceFacts, candidates: Columns) -> np.ndarray:
    """Estimated registers per thread."""
    states = candidates["rows"] * max(slices(r, candidates["threads"]).max(initial=0) for _, r in facts.products)
    kept = np.where(candidates["shared"] > 0, 0, thread_weights(facts, candidates))
    registers: np.ndarray = OTHER_REGISTERS + kept + sums_of(facts, candidates) + states
    return registers


def shared_bytes_of(facts: RecurrenceFacts, candidates: Columns, warp_size: int) -> np.ndarray:
    """Shared memory per block: the parts of all sums by warp, and the weights if they stay there."""
    tiles = ceil_divided(facts.rows, candidates["rows"])
    parts = tiles * padded(sums_of(facts, candidates)) * (candidates["threads"] // warp_size)
    weights = np.where(candidates["shared"] > 0, thread_weights(facts, candidates) * candidates["threads"], 0)
    size: np.ndarray = WORD * (parts + weights)
    return size


def recurrence_space(facts: RecurrenceFacts, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with the columns units, threads, rows and shared; and the number rejected for each reason."""
    candidates = product_of({"units": UNITS, "threads": THREADS, "rows": ROWS, "shared": (0, 1)})
    units, threads, rows = candidates["units"], candidates["threads"], candidates["rows"]
    longest = max(r for _, r in facts.products)
    admitted = np.minimum(machine.registers_per_processor // threads // 8 * 8, machine.registers_per_thread_max)
    return reject(
        candidates,
        [
            ("more blocks than processors, which could not all be resident", ceil_divided(facts.units, units) > machine.processors),
            ("more units than there are", (units > 1) & (units > facts.units)),
            ("more rows than sequences", (rows > 1) & (rows >= 2 * facts.rows)),
            ("more threads than reduced elements", (threads > machine.warp_size) & (threads >= 2 * longest)),
            ("registers exceed a thread's", registers_of(facts, candidates) > admitted),
            ("shared memory exceeds a block's", shared_bytes_of(facts, candidates, machine.warp_size) > machine.shared_bytes_per_block),
        ],
    )
