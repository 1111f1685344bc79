"""Schedules of the `recurrence` schema on a CPU: how many threads share the units, and the register tile of a panel of units."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import ceil_divided, product_of, reject
from tilewright.kernels.recurrence_form import RecurrenceFacts

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28)
VECTORS = (1, 2, 3, 4, 6)
CHAINS = (1, 2, 3, 4)


@dataclass(frozen=True)
class CpuRecurrenceSchedule:
    """Each of `workers` threads owns a range of panels, of `vectors` vectors of `lanes` units each. A register tile is `gates` gates of a panel for
    `rows` sequences; the sum of each is divided into `chains` sums that do not wait for one another."""

    workers: int
    rows: int
    gates: int
    vectors: int
    chains: int
    lanes: int

    @property
    def panel(self) -> int:
        return self.vectors * self.lanes

    def __str__(self) -> str:
        chains = f" in {self.chains} chains" if self.chains > 1 else ""
        return f"{self.workers} threads own units; tiles of {self.rows} sequences by {self.gates} gates of {self.vectors}x{self.lanes} units{chains}"


def recurrence_space(facts: RecurrenceFacts, machine: Machine, threads: int) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with the columns workers, rows, gates, vectors and chains; and the number rejected for each reason."""
    workers = sorted({1 << bit for bit in range(threads.bit_length())} | {threads})
    most = min(gates for gates, _ in facts.products)
    groups = [count for count in range(most, 0, -1) if not any(gates % count for gates, _ in facts.products)]
    candidates = product_of({"workers": workers, "rows": ROWS, "gates": groups, "vectors": VECTORS, "chains": CHAINS})
    rows, vectors, chains = candidates["rows"], candidates["vectors"], candidates["chains"]
    lanes, registers = machine.vector_lanes(), machine.vector_registers
    wide = candidates["gates"] * vectors
    return reject(
        candidates,
        [
            # accumulators, the gates' weights, and the broadcast element
            (f"more than {registers} vector registers", (rows * chains + 1) * wide + 1 > registers),
            ("more rows than sequences", (rows > 1) & (rows > facts.rows)),
            ("a vector more than there are units", (vectors > 1) & ((vectors - 1) * lanes >= facts.units)),
            ("chains longer than a sum", (chains > 1) & (chains > min(r for _, r in facts.products))),
            ("more threads than panels", (candidates["workers"] > 1) & (candidates["workers"] > ceil_divided(facts.units, vectors * lanes))),
        ],
    )
