"""Schedules of the `map` schema on a GPU: threads per block, elements per thread, and the width of loads and stores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import product_of, reject, vector_widths
from tilewright.kernels.gpu.counts import WORD


@dataclass(frozen=True)
class MapFacts:
    """Facts that the cost of a map depends on.

    `points` counts scalar elements of the output; `vector_width` is the widest vector that every access allows; `flops` is per element. Bytes are
    distinct bytes; `requests` counts a thread's loads and stores per element or vector. `scattered`: bytes read by loads that touch different
    sectors for adjacent elements of the output (a transposed operand), and adjacent words for elements `inner` apart.
    `element_bytes`: of the narrowest floats in memory."""

    points: int
    vector_width: int
    bytes_read: int
    bytes_written: int
    flops: float
    requests: int
    scattered: int
    inner: int
    element_bytes: int = WORD


@dataclass(frozen=True)
class MapSchedule:
    """`items` elements or vectors per thread; adjacent threads have adjacent ones."""

    threads: int
    items: int
    vector_width: int

    def __str__(self) -> str:
        return f"map threads={self.threads} items={self.items} vector_width={self.vector_width}"


def map_space(facts: MapFacts, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with columns threads, items, vector_width; and the number rejected for each reason."""
    candidates = product_of({"threads": (64, 128, 256, 512), "items": (1, 2, 4, 8), "vector_width": vector_widths(facts.vector_width)})
    vectors = -(-facts.points // candidates["vector_width"])
    blocks = -(-vectors // (candidates["threads"] * candidates["items"]))
    return reject(
        candidates,
        [
            ("threads exceed a block", candidates["threads"] > machine.threads_per_block),
            ("accesses are not adjacent or aligned for vectors this wide", candidates["vector_width"] > facts.vector_width),
            ("several items a thread leave processors idle", (candidates["items"] > 1) & (blocks < 4 * machine.processors)),
        ],
    )
