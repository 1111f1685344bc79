"""Schedules of the `contraction` schema on a GPU: implicit GEMM with block, thread and reduction tiles, and split reduction.

C[batch, m, n] = sum over r of A[batch, m, r] * B[batch, n, r]. A block computes block_m x block_n elements, a thread thread_m x thread_n
of them in registers; block_k elements along r at a time are in shared memory, double-buffered. Variants of the code of a candidate are in
`gemm/variants.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import DEFAULT_FLOAT, size_of
from tilewright.kernels.columns import Columns, product_of, reject, take, times

PADDING = 4
"""Padding in elements between the rows of a transposed tile in shared memory: four keeps vectors aligned and halves bank conflicts."""
PADDED, SWIZZLED, TRANSPOSED, MATRICES = 0, 1, 2, 3
"""Values of `layout`: how a factor that is read along r is stored in shared memory (see `ContractionSchedule`). MATRICES, of tensor cores, is no
value of that schedule."""
AHEAD, PREFETCHED, PLAIN = 0, 1, 2
"""Values of `loop`: how the tiles of the next step are fetched (see `ContractionSchedule`)."""


@dataclass(frozen=True)
class Operand:
    """How a factor is read: vectors of `vector_width` along "own" (m or n) or along "r". `bytes` are distinct bytes in memory.

    `taps` counts index divisions per load; `guarded`: zero padding is checked at each load. `plain`: the factor is a load without arithmetic, so it
    can be copied to shared memory without registers. `element_bytes`: bytes of an element in memory. `tabled`: its address is a sum of a part without
    r and a part of r alone that takes divisions, which a table can hold. `streamed`: the widest vectors in which a thread can load it without tiles,
    up to 16 bytes; at least `vector_width`. `arithmetic`: operations that compute an element from what is loaded; `others`: loads besides the
    first."""

    along: str
    vector_width: int
    bytes: int
    taps: int = 0
    guarded: bool = False
    plain: bool = True
    element_bytes: int = size_of(DEFAULT_FLOAT)
    tabled: bool = False
    streamed: int = 0
    arithmetic: float = 0.0
    others: int = 0

    @property
    def stream_width(self) -> int:
        return max(self.streamed, self.vector_width)

    def computing(self, width: np.ndarray | int, address: float) -> np.ndarray | float:
        """Instructions that compute a vector of `width` elements, besides its first load; each further one takes `address` instructions."""
        return self.others * (1 + address) + self.arithmetic * width


@dataclass(frozen=True)
class ContractionFacts:
    """Sizes of the matrix product, and how its operands and result are accessed; `store_vector`: width of stores along n."""

    batch: int
    m: int
    n: int
    r: int
    a: Operand
    b: Operand
    store_vector: int
    bytes_written: int
    epilogue_bytes: int = 0
    epilogue_flops: float = 0.0
    row_stages: int = 0
    """Number of reductions of whole rows of n, and maps before them, that the kernel applies to its result; if any, a block must hold whole rows."""
    element_bytes: int = size_of(DEFAULT_FLOAT)
    """Bytes of a sum."""

    def staged_bytes(self, operand: Operand, copies: np.ndarray) -> np.ndarray:
        """Bytes of a factor's element in shared memory: copies leave it as it is in memory."""
        return np.where(copies, operand.element_bytes, self.element_bytes)

    def is_narrow(self, operand: Operand) -> bool:
        """Whether elements of the factor are widened before they are multiplied."""
        return operand.element_bytes < self.element_bytes

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.r


@dataclass(frozen=True)
class ContractionSchedule:
    """One candidate. `split` blocks share the reduction of one output tile, and a second kernel adds their parts in order. `stages` > 1: number of
    buffers, filled by asynchronous copies that run `stages` - 1 steps ahead; 1: two buffers, filled through registers. `cluster` (0 or 1): the blocks
    of a split are a cluster that adds the parts through its shared memory, without a second kernel. `atomics` (0 or 1): the parts are added by atomic
    operations, in no fixed order; only if a caller asks for it.

    The other fields are variants of the code (`gemm/variants.py`). `layout`, of factors read along r: PADDED rows; SWIZZLED, without padding, groups
    of four elements change places instead; TRANSPOSED, [k][m] by copies of single elements. `loop`: AHEAD as `stages` says; PREFETCHED through
    registers to a second buffer; PLAIN, one buffer that is filled and then read. `table` (0 or 1): offsets along r come from a table that each block
    computes once, instead of divisions at each load."""

    block_m: int
    block_n: int
    block_k: int
    thread_m: int
    thread_n: int
    split: int = 1
    stages: int = 1
    cluster: int = 0
    atomics: int = 0
    layout: int = field(default=PADDED, metadata={"omitted": PADDED})
    loop: int = field(default=AHEAD, metadata={"omitted": AHEAD})
    table: int = field(default=0, metadata={"omitted": 0})

    @property
    def copies(self) -> bool:
        """Whether asynchronous copies fill the tiles."""
        return self.stages > 1 and self.loop != PREFETCHED

    @property
    def threads(self) -> int:
        return (self.block_m // self.thread_m) * (self.block_n // self.thread_n)

    def __str__(self) -> str:
        return (
            f"contraction block={self.block_m}x{self.block_n}x{self.block_k} "
            f"thread={self.thread_m}x{self.thread_n} split={self.split} stages={self.stages}"
            + " cluster" * self.cluster
            + " atomics" * self.atomics
            + ("", " swizzled", " transposed")[self.layout]
            + ("", " through registers", " plain loop")[self.loop]
            + " table" * self.table
        )


TILE_AXES = {
    "block_m": (16, 32, 64, 128),
    "block_n": (16, 32, 64, 128),
    "block_k": (8, 16, 32),
    "thread_m": (2, 4, 8),
    "thread_n": (2, 4, 8),
}
LARGE_TILE_AXES = {**TILE_AXES, "block_m": (*TILE_AXES["block_m"], 256), "thread_m": (*TILE_AXES["thread_m"], 16)}
LARGE_FLOPS = 2e10
"""From this number of operations on, tiles may be those of LARGE_TILE_AXES and rows SWIZZLED, both without a split: with 16 x 8 sums a thread reads
fewer factors from shared memory for each product than with 8 x 8, which counts where multiplications are all that is left."""
MOST_OF_LARGE = 255
"""Registers of a thread with these tiles, at most, where asynchronous copies fill rows: the assembler holds fewer fragments beside 128 sums, and
spills none."""
SPLITS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 18, 24, 32, 48, 64)
STAGES = (2, 4)
"""Stages with asynchronous copies; 1 is tried if the machine has none, a factor is computed while it is read, or it is narrower than the sums: then
registers widen each element once, and with copies each thread that reads it does."""
CLUSTERS = (2, 4, 8)
"""Blocks of a cluster: up to eight are portable (CUDA C++ Programming Guide, thread block clusters), and parts of a tile must be whole vectors."""
AXES = (*TILE_AXES, "split", "stages", "cluster", "atomics")
TABLE_ENTRY_BYTES = size_of("i32")
WORD = 4
"""Bytes of a bank of shared memory, and the least that an asynchronous copy copies."""
VARIANT_AXES = ("layout", "loop", "table")
"""Axes of variants: without them candidates have their default values. Spaces of large products have the layout too."""


def is_large(facts: ContractionFacts) -> bool:
    """Whether tiles for many operations are candidates: of words, which are copied."""
    words = all(operand.plain and operand.element_bytes == facts.element_bytes == WORD for operand in (facts.a, facts.b))
    return facts.flops >= LARGE_FLOPS and words and not facts.row_stages


def contraction_space(
    facts: ContractionFacts, machine: Machine, atomics: bool = False, large: bool = False
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with the columns AXES, and the number rejected for each reason (a rejected tile counts once for each split and stage). `atomics`:
    also offers splits by atomic additions. `large`: also those for many operations, with the column "layout", where there are asynchronous copies."""
    copies = machine.compute_capability >= (8, 0) and facts.a.plain and facts.b.plain
    narrow = facts.is_narrow(facts.a) or facts.is_narrow(facts.b)
    stages = (*((1,) if narrow or not copies else ()), *(STAGES if copies else ()))
    rest = product_of({"split": SPLITS, "stages": stages, "cluster": (0, 1), "atomics": (0, 1) if atomics else (0,)})
    possible = (rest["cluster"] == 0) | (np.isin(rest["split"], CLUSTERS) & (machine.compute_capability >= (9, 0)))
    possible &= (rest["atomics"] == 0) | ((rest["split"] > 1) & (rest["cluster"] == 0))
    rest = {name: column[possible] for name, column in rest.items()}
    large = large and copies
    if large:
        rest = times(rest, {"layout": np.array((PADDED, SWIZZLED) if "r" in (facts.a.along, facts.b.along) else (PADDED,))})
        rest = take(rest, (rest["split"] == 1) | (rest["layout"] == PADDED))
    each = len(rest["split"])
    tiles = product_of(LARGE_TILE_AXES if large else TILE_AXES)
    tiles, rejected = reject(tiles, tile_rules(facts, tiles, machine))
    candidates = times(tiles, rest)
    candidates, more = reject(candidates, contraction_rules(facts, candidates, machine))
    return candidates, {**{reason: number * each for reason, number in rejected.items()}, **more}


def tile_rules(facts: ContractionFacts, candidates: Columns, machine: Machine) -> list[tuple[str, np.ndarray]]:
    """Reasons for which tiles are infeasible or certainly wasteful with any split, and a mask of the rows that each rejects."""
    bm, bn, bk = (candidates[k] for k in ("block_m", "block_n", "block_k"))
    threads = threads_of(candidates)
    a_width, b_width = fetched_width(facts.a, candidates), fetched_width(facts.b, candidates)
    a_vectors, b_vectors = bm * bk // a_width, bn * bk // b_width
    a_run = np.where(facts.a.along == "r", bk, bm) // a_width
    b_run = np.where(facts.b.along == "r", bk, bn) // b_width
    return [
        ("a block would hold a part of a row that is reduced", (bn < facts.n) & (facts.row_stages > 0)),
        ("threads below two warps or above 512", (threads < 64) | (threads > min(512, machine.threads_per_block))),
        ("tile of m is more than twice the extent", (bm >= 2 * max(facts.m, 8)) & (bm > 16)),
        ("tile of n is more than twice the extent", (bn >= 2 * max(facts.n, 8)) & (bn > 16)),
        ("tile of r is more than twice the extent", (bk >= 2 * max(facts.r, 4)) & (bk > 8)),
        (
            "loads of a tile do not divide among the threads",
            ((a_vectors % threads != 0) & (a_vectors > threads))
            | ((b_vectors % threads != 0) & (b_vectors > threads))
            | (threads % a_run != 0)
            | (threads % b_run != 0),
        ),
    ]


def contraction_rules(facts: ContractionFacts, candidates: Columns, machine: Machine) -> list[tuple[str, np.ndarray]]:
    """Reasons for which candidates with feasible tiles are infeasible or certainly wasteful, and a mask of the rows that each rejects."""
    threads = threads_of(candidates)
    registers = registers_of(facts, candidates)
    split, stages = candidates["split"], candidates["stages"]
    steps, steps_each = steps_of(facts, candidates)
    return [
        ("shared memory exceeds a block's", shared_bytes_of(facts, candidates) > machine.shared_bytes_per_block),
        ("registers exceed a thread's", registers > machine.registers_per_thread_max),
        ("registers exceed a processor's", registers * threads > machine.registers_per_processor),
        ("a split block would hold parts of the sums of a row that is reduced", (split > 1) & (facts.row_stages > 0)),
        ("more stages than steps", (stages > 2) & (stages > steps_each)),
        ("a cluster does not divide the steps evenly", (candidates["cluster"] > 0) & (steps % split != 0)),
        ("a split would have nothing to reduce", (split > 1) & ((split - 1) * steps_each >= steps)),
        ("a split reduces fewer than four steps", (split > 1) & (steps_each < 4)),
        ("tiles for many operations are not split", (split > 1) & is_of_large(candidates)),
    ]


def columns_of(schedule: ContractionSchedule) -> dict[str, np.ndarray]:
    """One schedule as columns of a single row."""
    return {entry.name: np.array([getattr(schedule, entry.name)]) for entry in fields(schedule)}


def threads_of(candidates: Columns) -> np.ndarray:
    """Threads of a block."""
    threads: np.ndarray = (candidates["block_m"] // candidates["thread_m"]) * (candidates["block_n"] // candidates["thread_n"])
    return threads


def axis_of(candidates: Columns, name: str) -> np.ndarray | int:
    """The column of a variant's axis, or its default value."""
    return candidates.get(name, 0)


def is_of_large(candidates: Columns) -> np.ndarray:
    """Whether a tile is one that only problems of many operations have."""
    found: np.ndarray = (candidates["thread_m"] > max(TILE_AXES["thread_m"])) | (candidates["block_m"] > max(TILE_AXES["block_m"]))
    return found


def copied(candidates: Columns) -> np.ndarray:
    """Whether asynchronous copies fill the tiles."""
    copies: np.ndarray = (candidates["stages"] > 1) & (axis_of(candidates, "loop") != PREFETCHED)
    return copies


def is_deep(operand: Operand, candidates: Columns) -> np.ndarray:
    """Whether the operand's tile is [m][k]: a row holds all of k."""
    deep: np.ndarray = copied(candidates) & (operand.along == "r") & (axis_of(candidates, "layout") != TRANSPOSED)
    return deep


def fetched_width(operand: Operand, candidates: Columns) -> np.ndarray | int:
    """Elements of one load or copy from global memory."""
    if "layout" not in candidates or operand.along != "r":
        return operand.vector_width
    return np.where(candidates["layout"] == TRANSPOSED, 1, operand.vector_width)


def steps_of(facts: ContractionFacts, candidates: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Steps of a tile, and of each of the blocks that share it."""
    steps = -(-facts.r // candidates["block_k"])
    return steps, -(-steps // candidates["split"])


def table_entries(facts: ContractionFacts, candidates: Columns) -> np.ndarray:
    """Entries of the table of offsets: one for each vector along r that a block reads of the first factor; 0 without a table."""
    if "table" not in candidates:
        return np.zeros(1, np.int64)
    positions = steps_of(facts, candidates)[1] * candidates["block_k"]
    return np.where(candidates["table"] > 0, positions // (fetched_width(facts.a, candidates) if facts.a.along == "r" else 1), 0)


def shared_bytes_of(facts: ContractionFacts, candidates: Columns) -> np.ndarray:
    """Bytes of shared memory per block: for both tiles one buffer per stage (at least two), but no more than there are steps, and one in a plain
    loop; and the table of offsets."""
    bm, bn, bk, stages = (candidates[k] for k in ("block_m", "block_n", "block_k", "stages"))
    buffers = np.minimum(np.maximum(stages, 2), steps_of(facts, candidates)[1])
    if "loop" in candidates:
        buffers = np.where(candidates["loop"] == PLAIN, 1, buffers)
    padding = np.where(candidates["layout"] == SWIZZLED, 0, PADDING) if "layout" in candidates else PADDING
    staged = np.zeros_like(bm)
    for operand, extent in ((facts.a, bm), (facts.b, bn)):
        flat = bk * (extent + (padding if operand.along == "r" else 0))
        staged = staged + facts.staged_bytes(operand, copied(candidates)) * np.where(is_deep(operand, candidates), extent * (bk + padding), flat)
    row_elements = (bm * (facts.n + 1) + facts.row_stages * (bm + threads_of(candidates))) * (facts.row_stages > 0)
    tables = TABLE_ENTRY_BYTES * table_entries(facts, candidates)
    needed: np.ndarray = buffers * staged + facts.element_bytes * (candidates["cluster"] * bm * bn + row_elements) + tables
    return needed


def registers_of(facts: ContractionFacts, candidates: Columns) -> np.ndarray:
    """Estimated 32-bit registers per thread: accumulators, prefetched fragments, staged loads, and addresses. Fitted to the registers that ptxas 13.0
    allocated for thirty random candidates of three convolutions on sm_90a: mostly within 20 %. A plain loop does not hold staged loads and fragments
    at once."""
    threads = threads_of(candidates)
    accumulators = 13 * candidates["thread_m"] * candidates["thread_n"] // 10
    fragments = 2 * (candidates["thread_m"] + candidates["thread_n"])
    for operand, per_thread in ((facts.a, candidates["thread_m"]), (facts.b, candidates["thread_n"])):
        fragments = fragments + np.where(is_deep(operand, candidates), 2 * per_thread, 0)
    staged_a = -(-candidates["block_m"] * candidates["block_k"] // threads)
    staged_b = -(-candidates["block_n"] * candidates["block_k"] // threads)
    a_width, b_width = fetched_width(facts.a, candidates), fetched_width(facts.b, candidates)
    addresses = 36 + staged_a // a_width * (3 if facts.a.guarded else 1) + staged_b // b_width
    staged = np.where(copied(candidates), 0, staged_a + staged_b)
    held = fragments + staged
    if "loop" in candidates:
        held = np.where(candidates["loop"] == PLAIN, np.maximum(fragments, staged), held)
    registers: np.ndarray = np.minimum(accumulators + held + addresses, 10_000)
    ahead = is_of_large(candidates) & (axis_of(candidates, "loop") == AHEAD) & (axis_of(candidates, "layout") != TRANSPOSED)
    return np.where(ahead, np.minimum(registers, MOST_OF_LARGE), registers)


def blocks_to_ask_for(schedule: ContractionSchedule, facts: ContractionFacts, machine: Machine) -> int:
    """The occupancy to request from the assembler, which caps a thread's registers at 1.5 times the estimate. Without a cap the assembler loads a
    whole tile's fragments ahead; without a request it spills accumulators for occupancy that gains nothing."""
    estimate = registers_of(facts, columns_of(schedule))
    return max(1, machine.registers_per_processor // (schedule.threads * (int(estimate[0]) * 3 // 2)))
