"""Schedules of the `contraction` schema on a GPU: implicit GEMM with block, thread and reduction tiles, and split reduction.

C[batch, m, n] = sum over r of A[batch, m, r] * B[batch, n, r]. A block computes block_m x block_n elements, a thread thread_m x thread_n
of them in registers; block_k reduced elements at a time lie in shared memory, twice (double buffering).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.schedule.gpu_columns import Columns, product_of, reject

PADDING = 4
"""Elements between the rows of a shared tile that is stored transposed: four keep vectors aligned and halve bank conflicts."""


@dataclass(frozen=True)
class Operand:
    """How a factor is read: vectors of `lanes` along "own" (m or n) or along "r". `bytes` are distinct bytes in memory.

    `taps` counts index divisions for one load; `guarded`: zero padding is checked at each load."""

    along: str
    lanes: int
    bytes: int
    taps: int = 0
    guarded: bool = False


@dataclass(frozen=True)
class ContractionProblem:
    """Sizes of the matrix product and how its operands and result are accessed; `store_lanes`: width of stores along n."""

    batch: int
    m: int
    n: int
    r: int
    a: Operand
    b: Operand
    store_lanes: int
    bytes_written: int
    epilogue_bytes: int = 0
    epilogue_flops: float = 0.0

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.r


@dataclass(frozen=True)
class ContractionSchedule:
    """One candidate; `split` blocks share the reduction of one output tile, a second kernel adds their parts in order."""

    block_m: int
    block_n: int
    block_k: int
    thread_m: int
    thread_n: int
    split: int = 1

    @property
    def threads(self) -> int:
        return (self.block_m // self.thread_m) * (self.block_n // self.thread_n)

    def __str__(self) -> str:
        return (
            f"contraction block={self.block_m}x{self.block_n}x{self.block_k} "
            f"thread={self.thread_m}x{self.thread_n} split={self.split}"
        )


def contraction_space(problem: ContractionProblem, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with columns block_m, block_n, block_k, thread_m, thread_n, split; and how many were rejected by reason."""
    rows = product_of(
        {
            "block_m": (16, 32, 64, 128),
            "block_n": (16, 32, 64, 128),
            "block_k": (8, 16, 32),
            "thread_m": (2, 4, 8),
            "thread_n": (2, 4, 8),
            "split": (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 18, 24, 32, 48, 64),
        }
    )
    return reject(rows, contraction_rules(rows, problem, machine))


def contraction_rules(rows: Columns, problem: ContractionProblem, machine: Machine) -> list[tuple[str, np.ndarray]]:
    """The reasons for which candidates are infeasible or certainly wasteful, with the rows that each rejects."""
    bm, bn, bk, tm, tn, split = (rows[k] for k in ("block_m", "block_n", "block_k", "thread_m", "thread_n", "split"))
    threads = threads_of(rows)
    registers = registers_of(rows, problem)
    steps = -(-problem.r // bk)
    steps_each = -(-steps // split)
    a_vectors, b_vectors = bm * bk // problem.a.lanes, bn * bk // problem.b.lanes
    a_run = np.where(problem.a.along == "r", bk, bm) // problem.a.lanes
    b_run = np.where(problem.b.along == "r", bk, bn) // problem.b.lanes
    return [
        ("threads below two warps or above 512", (threads < 64) | (threads > min(512, machine.threads_per_block))),
        ("tile of m is more than twice the extent", (bm >= 2 * max(problem.m, 8)) & (bm > 16)),
        ("tile of n is more than twice the extent", (bn >= 2 * max(problem.n, 8)) & (bn > 16)),
        ("tile of r is more than twice the extent", (bk >= 2 * max(problem.r, 4)) & (bk > 8)),
        (
            "loads of a tile do not divide among the threads",
            ((a_vectors % threads != 0) & (a_vectors > threads))
            | ((b_vectors % threads != 0) & (b_vectors > threads))
            | (threads % a_run != 0)
            | (threads % b_run != 0),
        ),
        ("shared memory exceeds a block's", shared_bytes_of(rows, problem) > machine.shared_bytes_per_block),
        ("registers exceed a thread's", registers > machine.registers_per_thread_max),
        ("registers exceed a processor's", registers * threads > machine.registers_per_processor),
        ("a split would have nothing to reduce", (split > 1) & ((split - 1) * steps_each >= steps)),
        ("a split reduces fewer than four steps", (split > 1) & (steps_each < 4)),
    ]


def threads_of(rows: Columns) -> np.ndarray:
    """Threads of a block."""
    return (rows["block_m"] // rows["thread_m"]) * (rows["block_n"] // rows["thread_n"])


def shared_bytes_of(rows: Columns, problem: ContractionProblem) -> np.ndarray:
    """Bytes of shared memory of a block: two buffers of both tiles, or one where there is a single step."""
    pad_a = PADDING if problem.a.along == "r" else 0
    pad_b = PADDING if problem.b.along == "r" else 0
    steps = -(-problem.r // rows["block_k"])
    buffers = np.where(-(-steps // rows["split"]) > 1, 2, 1)
    return buffers * 4 * rows["block_k"] * (rows["block_m"] + pad_a + rows["block_n"] + pad_b)


def registers_of(rows: Columns, problem: ContractionProblem) -> np.ndarray:
    """Estimated 32-bit registers of a thread: accumulators, fragments that are read ahead, staged loads, and addresses. Fitted to what
    ptxas 13.0 took for thirty random candidates of three convolutions on sm_90a: mostly within 20 %."""
    threads = threads_of(rows)
    accumulators = 13 * rows["thread_m"] * rows["thread_n"] // 10
    fragments = 2 * (rows["thread_m"] + rows["thread_n"])
    staged_a = -(-rows["block_m"] * rows["block_k"] // threads)
    staged_b = -(-rows["block_n"] * rows["block_k"] // threads)
    addresses = 36 + staged_a // problem.a.lanes * (3 if problem.a.guarded else 1) + staged_b // problem.b.lanes
    return np.minimum(accumulators + fragments + staged_a + staged_b + addresses, 10_000)


def blocks_to_ask_for(schedule: ContractionSchedule, problem: ContractionProblem, machine: Machine) -> int:
    """The occupancy to ask of the assembler: it caps a thread's registers, at half as much again as the estimate. With no cap the assembler
    loads a whole tile's fragments ahead; left to itself it spills accumulators for occupancy that gains nothing."""
    axes = ("block_m", "block_n", "block_k", "thread_m", "thread_n", "split")
    estimate = registers_of({name: np.array([getattr(schedule, name)]) for name in axes}, problem)
    return max(1, machine.registers_per_processor // (schedule.threads * (int(estimate[0]) * 3 // 2)))


@dataclass(frozen=True)
class GemvSchedule:
    """For a few rows of m: `columns` threads along n (each with a vector), `sharers` threads that divide r, `split` blocks that do."""

    columns: int
    sharers: int
    split: int = 1

    @property
    def threads(self) -> int:
        return self.columns * self.sharers

    def __str__(self) -> str:
        return f"gemv columns={self.columns} sharers={self.sharers} split={self.split}"


GEMV_ROWS = 8
"""The most rows of m that one thread accumulates."""


def gemv_space(problem: ContractionProblem, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with columns columns, sharers, split; and how many were rejected by reason. None for more rows than GEMV_ROWS."""
    powers = [2**i for i in range(11)]
    rows = product_of({"columns": powers, "sharers": powers, "split": (1, 2, 4, 8, 16)})
    threads = rows["columns"] * rows["sharers"]
    along_n = problem.b.along == "own"
    lanes = problem.b.lanes if along_n else 1
    r_lanes = 1 if along_n else problem.b.lanes
    shared = threads * lanes * problem.m * 4 * (rows["sharers"] > 1)
    each = -(-problem.r // (r_lanes * rows["split"]))
    return reject(
        rows,
        [
            ("too many rows of m", np.full(len(threads), problem.m > GEMV_ROWS)),
            ("threads below a warp or above 512", (threads < 32) | (threads > min(512, machine.threads_per_block))),
            ("more columns than n", (rows["columns"] > 1) & (rows["columns"] * lanes >= 2 * problem.n)),
            ("fewer than four reduced elements a thread", (rows["sharers"] > 1) & (rows["sharers"] * 4 > each)),
            ("a split would have nothing to reduce", (rows["split"] - 1) * each * r_lanes >= problem.r),
            ("shared memory exceeds 48 KiB", shared > 48 * 1024),
        ],
    )
