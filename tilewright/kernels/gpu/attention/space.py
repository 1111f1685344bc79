"""Schedules of the `attention` schema on a GPU: a block computes a tile of queries for one head, and passes over its keys tile by tile.

`block_m` queries x `block_n` keys: a thread has thread_m x thread_n scores in registers. `block_n / thread_n` adjacent threads of one warp share
their rows, and the d columns of the values, so that each also has thread_m x ceil(d / sharing) sums in registers. `stages`: the number of buffers for
keys and for values, which asynchronous copies fill while the block computes; 0: one, filled through registers. `split`: parts of the keys, each with
blocks of its own, which a second kernel puts together.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np

from tilewright.codegen.intrinsics.async_copy import COPIED_BYTES
from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.kernels.attention_form import AttentionFacts
from tilewright.kernels.columns import Columns, ceil_divided, product_of, reject

PADDING = 8
"""Padding in elements of rows of queries and weights in shared memory: vectors stay aligned, and the stores of eight threads, of two adjacent vectors
for each of four keys, hit different banks."""
SPLITS = (1, 2, 4, 8, 16, 32, 64)
"""Parts of the keys."""
AXES = {
    "block_m": (16, 32, 64, 128), "block_n": (16, 32, 64, 128), "thread_m": (1, 2, 4, 8), "thread_n": (1, 2, 4, 8), "stages": (0, 1, 2),
    "split": SPLITS,
}  # fmt: skip


@dataclass(frozen=True)
class AttentionSchedule:
    """One candidate; see the module's docstring."""

    block_m: int
    block_n: int
    thread_m: int
    thread_n: int
    stages: int = 1
    split: int = 1

    @property
    def sharing(self) -> int:
        """Threads that share their rows."""
        return self.block_n // self.thread_n

    @property
    def threads(self) -> int:
        return self.block_m // self.thread_m * self.sharing

    def __str__(self) -> str:
        block, thread = f"{self.block_m} queries x {self.block_n} keys", f"{self.thread_m}x{self.thread_n}"
        return f"attention block={block} thread={thread} stages={self.stages}" + (f" split={self.split}" if self.split > 1 else "")


def splits_to_reject(facts: AttentionFacts, candidates: Columns, machine: Machine) -> list[tuple[str, np.ndarray]]:
    """Divisions of the keys that cannot gain, with the reason: for both schemas of attention."""
    split = candidates["split"]
    blocks = facts.batch * ceil_divided(facts.m, candidates["block_m"])
    tiles = ceil_divided(facts.n, candidates["block_n"])
    return [
        ("a causal mask hides keys that would be a part", (split > 1) & (facts.shift is not None)),
        ("a part of the keys would have no tile", ceil_divided(tiles, ceil_divided(tiles, split)) != split),
        ("half as many parts fill the processors twice", (split > 1) & (blocks * split >= 4 * machine.processors)),
    ]


def sharing_of(candidates: Columns) -> np.ndarray:
    """Threads that share their rows."""
    return candidates["block_n"] // candidates["thread_n"]


def threads_of(candidates: Columns) -> np.ndarray:
    """Threads of a block."""
    threads: np.ndarray = candidates["block_m"] // candidates["thread_m"] * sharing_of(candidates)
    return threads


def columns_of(facts: AttentionFacts, candidates: Columns) -> np.ndarray:
    """Columns of the values that a thread sums."""
    return ceil_divided(facts.d, sharing_of(candidates))


def key_vector(facts: AttentionFacts) -> int:
    """Elements of a key that a thread reads at once from shared memory."""
    return gcd(facts.r, 4)


def key_pitch(facts: AttentionFacts) -> int:
    """Elements from one key to the next in shared memory: an odd number of vectors, so that adjacent keys start in different banks."""
    vectors = facts.r // key_vector(facts)
    return (vectors + (vectors % 2 == 0)) * key_vector(facts)


def is_converted(facts: AttentionFacts, candidates: Columns, at_reads: bool) -> np.ndarray:
    """Whether keys and values, stored in a narrower type, are widened by all threads that read them from shared memory, where copies have brought
    them; or (not `at_reads`) once, on their way there through registers."""
    converted: np.ndarray = (facts.stored_bytes < facts.element_bytes) & ((candidates["stages"] > 0) == at_reads)
    return converted


def shared_bytes_of(facts: AttentionFacts, candidates: Columns) -> np.ndarray:
    """Bytes of shared memory per block: queries and weights with their rows transposed, and one buffer per stage of keys and of values.

    For 64 queries x 64 keys of 64 elements, 16 threads a row, one stage: 4 * (64 * 72 + 64 * (72 + 68 + 64)) = 70656."""
    pitch = candidates["block_m"] + PADDING
    values = columns_of(facts, candidates) * sharing_of(candidates)
    staged = np.maximum(candidates["stages"], 1) * (key_pitch(facts) + values)
    staged = staged * np.where(candidates["stages"] > 0, facts.stored_bytes, facts.element_bytes)
    needed: np.ndarray = facts.element_bytes * pitch * (facts.r + candidates["block_n"]) + candidates["block_n"] * staged
    return needed


def registers_of(facts: AttentionFacts, candidates: Columns) -> np.ndarray:
    """Estimated 32-bit registers per thread: scores, sums, the state of the rows, fragments of both products, and addresses. Of 50 random candidates
    for heads of 64 and 128 elements, ptxas 13.0 allocates on sm_90a mostly between nine tenths and five quarters of it, and spills few."""
    tm, tn, columns = candidates["thread_m"], candidates["thread_n"], columns_of(facts, candidates)
    fragments = np.maximum(tm + key_vector(facts) * tn, tm + columns)
    registers: np.ndarray = 48 + tm * (tn + columns + 2) + 3 * fragments // 2
    return registers


def attention_space(facts: AttentionFacts, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with the columns AXES, and the number rejected for each reason."""
    candidates = product_of(AXES)
    threads, sharing = threads_of(candidates), sharing_of(candidates)
    registers = registers_of(facts, candidates)
    bm, bn, tm, tn = (candidates[name] for name in ("block_m", "block_n", "thread_m", "thread_n"))
    stages, narrow = candidates["stages"], facts.stored_bytes < facts.element_bytes
    copies = machine.compute_capability >= (8, 0) and min(facts.k_vector, facts.v_vector) * facts.stored_bytes >= COPIED_BYTES[0]
    quad = machine.warp_size * machine.schedulers_per_processor
    return reject(
        candidates,
        [
            ("copies where the machine has them, and otherwise only to widen", np.where(stages > 0, not copies, copies and not narrow)),
            ("two buffers for one tile of keys", (candidates["stages"] > 1) & (bn >= facts.n)),
            ("fewer than 4 or more than a warp's threads share a row", (sharing < 4) | (sharing > machine.warp_size)),
            ("threads below two warps, above 512, or not whole warps", (threads < 64) | (threads > 512) | (threads % machine.warp_size != 0)),
            ("more than twice as many queries or keys as there are", ((bm >= 2 * facts.m) & (bm > 16)) | ((bn >= 2 * facts.n) & (bn > 16))),
            ("more threads share a row than values have columns", (sharing >= 2 * facts.d) & (sharing > 4)),
            *splits_to_reject(facts, candidates, machine),
            ("shared memory exceeds a block's", shared_bytes_of(facts, candidates) > machine.shared_bytes_per_block),
            ("registers exceed a thread's", registers > machine.registers_per_thread_max),
            ("registers exceed a processor's", registers * (-(-threads // quad) * quad) > machine.registers_per_processor),
            ("a thread has fewer than four scores", tm * tn < 4),
        ],
    )


def blocks_to_ask_for(schedule: AttentionSchedule, facts: AttentionFacts, machine: Machine) -> int:
    """The occupancy to request from the assembler: the blocks that are resident with the estimated registers, so that it uses what is left."""
    candidate = {name: np.array([getattr(schedule, name)]) for name in AXES}
    return int(resident_blocks(machine, threads_of(candidate), registers_of(facts, candidate), shared_bytes_of(facts, candidate))[0])
