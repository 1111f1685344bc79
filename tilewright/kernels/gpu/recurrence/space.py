"""Schedules of the `recurrence` schema on a GPU: units and threads of a block, sequences at a time, where weights stay, and where states meet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, ceil_divided, product_of, reject
from tilewright.kernels.gpu.counts import WORD
from tilewright.kernels.recurrence_form import RecurrenceFacts

UNITS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32)
GROUPS = (1, 2, 4, 8, 16)
THREADS = (32, 64, 128, 256, 512)
ROWS = (1, 2, 4, 8)
CLUSTERS = (0, 1, 2, 4, 8)
"""Blocks that exchange states through shared memory: up to eight are portable (CUDA C++ Programming Guide, thread block clusters)."""
OTHER_REGISTERS = 56
"""Registers per thread besides weights, sums and states: addresses, and what gates are computed from."""
HALVES_REGISTERS = 48
"""Those that NVRTC takes in addition where each half of the blocks has buffers of its own."""


@dataclass(frozen=True)
class GpuRecurrenceSchedule:
    """The `threads` of a block form `groups`. A group owns `units` hidden units with all their gates; its threads divide the reduction, and each
    computes its part of the sums of `rows` sequences at a time. `shared`: the block's weights stay in shared memory instead of registers. `cluster`:
    the number of blocks, which form one cluster (or are a single block) and exchange states through shared memory; 0: blocks of a grid, which do so
    through level 2. `divided`: of joint loops each half of the blocks computes one, instead of every block both."""

    units: int
    groups: int
    threads: int
    rows: int
    shared: int
    cluster: int
    divided: int = 0

    def __str__(self) -> str:
        place = "shared memory" if self.shared else "registers"
        units = f"{self.groups} x {self.units}" if self.groups > 1 else f"{self.units}"
        met = "" if not self.cluster else "; one block" if self.cluster == 1 else f"; a cluster of {self.cluster} blocks"
        threads = f"{self.threads // self.groups} threads divide sums of {self.rows} sequences"
        return f"{units} units per block, weights in {place}; {threads}{met}{'; half of the blocks for each loop' if self.divided else ''}"


def blocks_of(facts: RecurrenceFacts, candidates: Columns) -> np.ndarray:
    blocks: np.ndarray = ceil_divided(facts.units, candidates["units"] * candidates["groups"]) * loops_apart(candidates)
    return blocks


def loops_apart(candidates: Columns) -> np.ndarray:
    """The number of joint loops among which the blocks are divided, 1 if each computes all."""
    loops: np.ndarray = 1 + candidates["divided"]
    return loops


def slices(facts: RecurrenceFacts, r: int, candidates: Columns) -> np.ndarray:
    """Reduced elements per thread: whole words of states that come from memory, so that a warp reads whole lines."""
    together = np.where(candidates["cluster"] > 0, 1, facts.together)
    elements: np.ndarray = ceil_divided(r, candidates["threads"] // candidates["groups"] * together) * together
    return elements


def sums_of(facts: RecurrenceFacts, candidates: Columns) -> np.ndarray:
    """Sums of a tile of rows: each thread of a group holds a part of all of them."""
    sums: np.ndarray = facts.gates // loops_apart(candidates) * candidates["units"] * candidates["rows"]
    return sums


def padded(sums: np.ndarray) -> np.ndarray:
    """The next power of two: an exchange halves the sums that a lane holds."""
    powers: np.ndarray = 1 << np.ceil(np.log2(sums)).astype(np.int64)
    return powers


def thread_weights(facts: RecurrenceFacts, candidates: Columns) -> np.ndarray:
    """Weights that a thread multiplies with in every step."""
    each = sum((gates * slices(facts, r, candidates) for gates, r in facts.products), np.zeros(1, np.int64))
    weights: np.ndarray = each // loops_apart(candidates) * candidates["units"]
    return weights


def registers_of(facts: RecurrenceFacts, candidates: Columns) -> np.ndarray:
    """Estimated registers per thread. States in level 2 are all loaded before the first is used, those in shared memory one after another."""
    states = candidates["rows"] * sum(slices(facts, r, candidates) for _, r in facts.products) // loops_apart(candidates)
    kept = np.where(candidates["shared"] > 0, 0, thread_weights(facts, candidates))
    registers: np.ndarray = (
        OTHER_REGISTERS
        + HALVES_REGISTERS * candidates["divided"]
        + kept
        + sums_of(facts, candidates)
        + np.where(candidates["cluster"] > 0, 0, states)
    )
    return registers


def shared_bytes_of(facts: RecurrenceFacts, candidates: Columns, warp_size: int) -> np.ndarray:
    """Shared memory per block: the parts of all sums by warp, the weights if they stay there, and states of two steps if they are exchanged there."""
    tiles = ceil_divided(facts.rows, candidates["rows"])
    parts = tiles * padded(sums_of(facts, candidates)) * (candidates["threads"] // warp_size)
    weights = np.where(candidates["shared"] > 0, thread_weights(facts, candidates) * candidates["threads"], 0)
    states = np.where(candidates["cluster"] > 0, 2 * facts.states * facts.rows * facts.units, 0)
    size: np.ndarray = WORD * (parts + weights + states)
    return size


def recurrence_space(facts: RecurrenceFacts, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with the fields of the schedule as columns; and the number rejected for each reason."""
    clusters = CLUSTERS if machine.compute_capability >= (9, 0) else (0, 1)
    ways = {"units": UNITS, "groups": GROUPS, "threads": THREADS, "rows": ROWS, "shared": (0, 1), "cluster": clusters}
    candidates = product_of({**ways, "divided": (0, 1) if facts.parts == 2 else (0,)})
    groups, threads, rows, cluster = candidates["groups"], candidates["threads"], candidates["rows"], candidates["cluster"]
    blocks, units, each = blocks_of(facts, candidates), candidates["units"] * groups, threads // groups
    longest = max(r for _, r in facts.products)
    admitted = np.minimum(machine.registers_per_processor // threads // 8 * 8, machine.registers_per_thread_max)
    return reject(
        candidates,
        [
            ("groups are no whole warps", each % machine.warp_size != 0),
            ("more blocks than processors, which could not all be resident", blocks > machine.processors),
            ("other blocks than those of the cluster", np.where(cluster > 0, blocks != cluster, blocks == 1)),
            ("joint loops of one cluster", (cluster > 0) & (candidates["divided"] > 0)),
            ("more units than there are", (units > 1) & (units >= 2 * facts.units)),
            ("more rows than sequences", (rows > 1) & (rows >= 2 * facts.rows)),
            ("more threads than reduced elements", (each > machine.warp_size) & (each >= 2 * longest)),
            ("registers exceed a thread's", registers_of(facts, candidates) > admitted),
            ("shared memory exceeds a block's", shared_bytes_of(facts, candidates, machine.warp_size) > machine.shared_bytes_per_block),
        ],
    )
