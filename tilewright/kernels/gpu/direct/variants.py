"""Variants of the code of a direct convolution: the plain loop, with one buffer, and the order of the patch's dimensions (`patch_layout.py`).

The order of the filters in shared memory is no axis: with output channels innermost a thread reads its filters in vectors, and the threads of a warp
read adjacent ones, without conflicts; any other order takes up to four times as many loads. The other code variants of DeepCuts are in the space
(how filters are read) or follow from the tile (padding with the fewest bank conflicts, widest vectors); see `gemm/variants.py`.
"""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, length, product_of, reject, take, times
from tilewright.kernels.gpu.direct.patch_layout import distinct_orders
from tilewright.kernels.gpu.direct.resources import registers_of, shared_bytes_of
from tilewright.kernels.gpu.direct.schedule import ORDERS, DirectFacts, steps_of, threads_of
from tilewright.kernels.gpu.gemm.space import AHEAD, PLAIN

ORIGIN = "origin"


def direct_variants(facts: DirectFacts, candidates: Columns, machine: Machine) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The feasible variants of candidates, with their columns and VARIANT_AXES, and for each the position of the candidate that it varies."""
    kinds = product_of({"loop": (AHEAD, PLAIN), "order": range(len(ORDERS))})
    kinds = take(kinds, np.any(list(kinds.values()), axis=0))
    rows = times({**candidates, ORIGIN: np.arange(length(candidates))}, kinds)
    rows, _ = reject(rows, variant_rules(facts, rows))
    rows, _ = reject(rows, resource_rules(facts, rows, machine))
    origins = rows.pop(ORIGIN)
    return rows, origins


def variant_rules(facts: DirectFacts, candidates: Columns) -> list[tuple[str, np.ndarray]]:
    """Reasons for which variants do not differ from another candidate, and a mask of the rows that each rejects."""
    plain = candidates["loop"] == PLAIN
    return [
        ("a loop with one buffer has no stages", plain & (candidates["stages"] > 2)),
        ("a single step has one buffer anyway", plain & (steps_of(facts, candidates) == 1)),
        ("an earlier order differs only in dimensions of one element", ~distinct_orders(facts, candidates)),
    ]


def resource_rules(facts: DirectFacts, candidates: Columns, machine: Machine) -> list[tuple[str, np.ndarray]]:
    """Reasons for which variants exceed the machine's resources, and a mask of the rows that each rejects."""
    registers = registers_of(facts, candidates)
    return [
        ("shared memory exceeds a block's", shared_bytes_of(facts, candidates) > machine.shared_bytes_per_block),
        ("registers exceed a thread's", registers > machine.registers_per_thread_max),
        ("registers exceed a processor's", registers * threads_of(candidates) > machine.registers_per_processor),
    ]
