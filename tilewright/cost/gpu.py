"""Predicted times of GPU schedules from data movement, issue slots, latency and occupancy, for whole columns of candidates at once.

Every constant of a machine comes from `Machine`. The constants below count instructions or shares, whatever the machine. Sources of the
form of the model: the bound by global memory, shared memory, balance and resources multiplies as in DeepCuts (PLDI 2021); waves and the tail
as in CNNOpt (PACT 2022); bytes in flight by Little's law (Volkov, Better Performance at Lower Occupancy, 2010).
"""

from __future__ import annotations

import numpy as np

from tilewright.cost.gpu_steps import LOADED_LATENCY, BlockStep, on_processors, split_seconds
from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.ir.estimate import Estimate
from tilewright.schedule.columns import Columns
from tilewright.schedule.gpu_contraction import ContractionProblem, registers_of, shared_bytes_of, threads_of
from tilewright.schedule.gpu_map import PointProblem
from tilewright.schedule.gpu_prefix import PrefixProblem
from tilewright.schedule.gpu_rows import RowsProblem

ADDRESS_INSTRUCTIONS = 8
"""Integer instructions for the address of one load whose index needs no division."""
DIVISION_INSTRUCTIONS = 8
"""Instructions of a division by a constant (multiply high, shift, correction)."""
STEP_INSTRUCTIONS = 19
"""Loop control, buffer switch and barrier of one step of a tiled contraction."""
LOADS_IN_FLIGHT = 4
"""Independent loads of a thread that the compiler issues ahead in a serial loop."""
SIMPLE_REGISTERS = 40
"""Registers of a thread of the map, window, rows and prefix schemas."""
FRAGMENT_WAVEFRONTS = 1.65
"""Cycles of shared memory for a warp's vector load of four: four without merging of equal addresses, one where all threads read one vector."""
SECTOR_BYTES = 32
"""Least that a memory transaction moves."""


def bandwidth(machine: Machine) -> float:
    """Bytes a second from memory that copies reach: measured where known, else 85 % of nominal."""
    return machine.sustained_memory_bandwidth or 0.85 * machine.memory_bandwidth


def l2_bandwidth(machine: Machine) -> float:
    """Bytes a second of all processors together."""
    return machine.cache_bandwidth(2)


def _latency_seconds(machine: Machine) -> float:
    return machine.memory_latency_cycles / machine.clock_hz


def _issue_seconds(machine: Machine, warp_instructions: np.ndarray) -> np.ndarray:
    """Seconds in which all schedulers issue so many warp instructions."""
    return warp_instructions / (machine.schedulers_per_processor * machine.processors * machine.clock_hz)


def _streaming(
    machine: Machine, bytes_moved: np.ndarray | float, threads_at_once: np.ndarray, bytes_each: np.ndarray
) -> np.ndarray:
    """Seconds to move bytes when each of the threads has `bytes_each` under way: Little's law, capped by the bandwidth."""
    reachable = threads_at_once * bytes_each / _latency_seconds(machine)
    seconds: np.ndarray = bytes_moved / np.minimum(reachable, bandwidth(machine))
    return seconds


def point_cost(rows: Columns, problem: PointProblem, machine: Machine) -> Estimate:
    """Map: seconds = launch + latency of the waves + max(memory, issue).

    memory = bytes / min(bandwidth, bytes in flight / latency); issue = warp instructions / schedulers."""
    threads, items, lanes = rows["threads"], rows["items"], rows["lanes"]
    vectors = -(-problem.points // (lanes * items))
    blocks = -(-vectors // threads)
    resident = resident_blocks(machine, threads, SIMPLE_REGISTERS, 0)
    at_once = np.minimum(blocks, resident * machine.processors) * threads
    waves = -(-blocks // (resident * machine.processors))
    loads = max(problem.requests - 1, 1)
    in_flight = items * lanes * 4 * min(loads, 8)
    memory = _streaming(machine, float(problem.bytes_read + problem.bytes_written), at_once, in_flight)
    instructions = problem.requests * (1 + ADDRESS_INSTRUCTIONS / 2) + problem.flops * lanes + 2 * DIVISION_INSTRUCTIONS
    issue = _issue_seconds(machine, blocks * threads * items * instructions / machine.warp_size)
    rounds = -(-loads // (8 * 4))
    latency = waves * rounds * _latency_seconds(machine)
    terms = {
        "launch": np.full(len(threads), machine.launch_seconds),
        "latency": latency,
        "memory": memory,
        "issue": issue,
    }
    return Estimate(terms, overlapped=("memory", "issue"))


def rows_cost(rows: Columns, problem: RowsProblem, machine: Machine) -> Estimate:
    """Rows: seconds = launch + waves * (turns of loads and the tree's barriers, for each stage) + max(memory, level 2, issue).

    memory counts the data once, level 2 once more for every later stage, each raised by the share of a sector that neighbours leave unused."""
    owned, sharers = rows["rows"], rows["sharers"]
    lanes = np.minimum(rows["lanes"], problem.lanes)
    threads = owned * sharers
    blocks = -(-problem.rows // owned)
    resident = resident_blocks(machine, threads, SIMPLE_REGISTERS, threads * problem.accumulator_bytes)
    waves = -(-blocks // (resident * machine.processors))
    at_once = np.minimum(blocks, resident * machine.processors) * threads
    adjacent = (owned if problem.row_contiguous else sharers * lanes) * 4
    waste = np.maximum(1.0, SECTOR_BYTES / adjacent)
    moved = waste * problem.bytes_read + problem.bytes_written
    turns = -(-problem.columns // (sharers * lanes))
    flight = np.minimum(turns, LOADS_IN_FLIGHT)
    memory = _streaming(machine, moved, at_once, flight * lanes * 4)
    level2 = problem.stages * waste * problem.bytes_read / l2_bandwidth(machine)
    cache = machine.cache(1)
    shared_latency = (cache.latency_cycles if cache else 30.0) / machine.clock_hz
    tree = np.log2(sharers) * 2 * shared_latency * np.maximum(1, threads / 256)
    latency = waves * (
        (problem.stages + 1) * -(-turns // LOADS_IN_FLIGHT) * _latency_seconds(machine) / 2 + problem.stages * tree
    )
    padded = blocks * owned / max(problem.rows, 1) * (turns * sharers * lanes / max(problem.columns, 1))
    work = problem.flops * problem.rows * padded + problem.rows * padded * problem.columns / lanes * 8 * (
        problem.stages + 1
    )
    issue = _issue_seconds(machine, work / machine.warp_size)
    terms = {
        "launch": np.full(len(threads), machine.launch_seconds),
        "latency": latency,
        "memory": memory,
        "l2": level2,
        "issue": issue,
    }
    return Estimate(terms, overlapped=("memory", "l2", "issue"))


def prefix_cost(rows: Columns, problem: PrefixProblem, machine: Machine) -> Estimate:
    """Prefix: seconds = launch + waves * turns of the serial scans + memory."""
    owned, sharers = rows["rows"], rows["sharers"]
    blocks = -(-problem.rows // owned)
    resident = resident_blocks(machine, owned * sharers, SIMPLE_REGISTERS, owned * sharers * problem.accumulator_bytes)
    waves = -(-blocks // (resident * machine.processors))
    chunk = -(-problem.columns // sharers)
    passes = np.where(sharers > 1, 2, 1)
    latency = waves * (
        passes * -(-chunk // LOADS_IN_FLIGHT) * _latency_seconds(machine) + sharers * 4 / machine.clock_hz
    )
    memory = np.full(len(owned), (problem.bytes_read + problem.bytes_written) / bandwidth(machine))
    terms = {"launch": np.full(len(owned), machine.launch_seconds), "latency": latency, "memory": memory}
    return Estimate(terms)


def contraction_cost(rows: Columns, problem: ContractionProblem, machine: Machine) -> Estimate:
    """Implicit GEMM. For one step of one block, in cycles of a processor:

    fma = BM BN BK / lanes;  issue = warps (BK (TM TN + LDS) + loads, stores, addresses) / schedulers;  shared = wavefronts of LDS and STS;
    l2 = (BM + BN) BK 4 / bytes a cycle;  through(n) = n blocks at once: these n-fold, overlapped, the first two raised by what n * warps leaves
    uneven among the schedulers and by what few warps leave unhidden;  alone = max(through(1), memory latency / steps ahead) + barrier.

    A processor gets b = ceil(blocks / processors) blocks, r of them at once (occupancy): floor(b / r) waves of max(through(r), alone) a step
    and a last one with the rest (the tail). Fill and drain of the pipeline cost some memory latencies a wave. The sum is bounded from below
    by the distinct bytes from memory. A split adds its parts' traffic through level 2 and one more launch, or as a cluster two
    barriers and the traffic between its blocks.

    Worked example, fma alone: 64 x 64 x 16 on an h200 takes 64 * 64 * 16 / 128 = 512 cycles a step at peak; 3 blocks of two warps give the four
    schedulers 6 warps, of which two schedulers have two: a third more, less what SCHEDULER_IMBALANCE leaves.
    The constants were fitted to measured kernels of the 20 convolutions of scripts/gpu_lowering_check.py, 60 schedules each, on an h200."""
    bm, bn, bk, tm, tn, split = (rows[k] for k in ("block_m", "block_n", "block_k", "thread_m", "thread_n", "split"))
    copies = rows["stages"] > 1
    threads = threads_of(rows)
    warps = -(-threads // machine.warp_size)
    tiles = -(-problem.m // bm) * -(-problem.n // bn) * problem.batch
    blocks = tiles * split
    steps_in_all = -(-problem.r // bk)
    steps = -(-steps_in_all // split)
    efficiency = machine.sustained_flops.get("fp32", 0.8 * machine.peak_flops["fp32"]) / machine.peak_flops["fp32"]
    fma = bm * bn * bk / machine.fp32_lanes_per_processor / efficiency
    reads = -(-tm // 4) + -(-tn // 4)
    fetch = np.zeros(len(threads))
    stores = np.zeros(len(threads))
    for operand, extent in ((problem.a, bm), (problem.b, bn)):
        vectors = extent * bk / (threads * operand.lanes)
        address = ADDRESS_INSTRUCTIONS + operand.taps * DIVISION_INSTRUCTIONS / 2 + (8 if operand.guarded else 0)
        pieces = np.where(copies, 0, operand.lanes if operand.along == "r" else 1)
        fetch = fetch + vectors * (1 + address + pieces)
        # a transposed store is scalar, and half of its banks collide
        transposed = (operand.along == "r") & ~copies
        stores = stores + extent * bk / machine.warp_size * np.where(transposed, 2.0, 1.0)
    issue = warps * (bk * (tm * tn + reads) + fetch + STEP_INSTRUCTIONS) / machine.schedulers_per_processor
    wavefronts = warps * bk * sum(np.where(size >= 4, FRAGMENT_WAVEFRONTS * (size // 4), 1.5) for size in (tm, tn))
    shared = (wavefronts + stores) * 128 / machine.shared_bytes_per_cycle
    cache2 = machine.cache(2)
    cache1 = machine.cache(1)
    assert cache1 is not None and cache2 is not None
    sectors_a = SECTOR_BYTES / np.minimum(SECTOR_BYTES, (bk if problem.a.along == "r" else bm) * 4)
    sectors_b = SECTOR_BYTES / np.minimum(SECTOR_BYTES, (bk if problem.b.along == "r" else bn) * 4)
    level2 = (bm * sectors_a + bn * sectors_b) * bk * 4 / cache2.bandwidth
    latency = LOADED_LATENCY * machine.memory_latency_cycles
    barrier = 2.3 * cache1.latency_cycles + 2 * warps
    # a warp alone waits for its first fragments and for its own chain of multiply-adds
    inner = bk * np.maximum(tm * tn * 1.8, 0.8 * cache1.latency_cycles) + cache1.latency_cycles
    least = np.maximum(inner, latency / np.maximum(rows["stages"] - 1, 1))
    resident = resident_blocks(machine, threads, registers_of(rows, problem), shared_bytes_of(rows, problem))
    step = BlockStep(fma, issue, shared, level2, least, barrier)
    ends = 4 * machine.memory_latency_cycles + tm * tn * warps / 4
    work = on_processors(step, steps, ends, blocks, warps, resident, split, rows["cluster"], machine)
    distinct = problem.a.bytes + problem.b.bytes + problem.bytes_written + problem.epilogue_bytes
    memory = np.full(len(threads), distinct / bandwidth(machine))
    results = problem.batch * problem.m * problem.n
    atomics = rows["atomics"] if "atomics" in rows else np.zeros_like(split)
    combine = split_seconds(split, rows["cluster"], atomics, results, bm * bn, work, resident, machine)
    terms = {
        "launch": np.full(len(threads), machine.launch_seconds),
        "compute": work.compute_seconds,
        "memory": memory,
        "drain": work.drain_seconds,
        "split": combine,
    }
    return Estimate(terms, overlapped=("compute", "memory"))


def gemv_cost(rows: Columns, problem: ContractionProblem, machine: Machine) -> Estimate:
    """Few rows: seconds = launch + latency of the turns + tree + max(memory, issue), and the parts of a split as in `contraction_cost`."""
    columns, sharers, split = rows["columns"], rows["sharers"], rows["split"]
    threads = columns * sharers
    along_n = problem.b.along == "own"
    lanes = problem.b.lanes
    width = columns * (lanes if along_n else 1)
    blocks = -(-problem.n // width) * problem.batch * split
    steps = -(-problem.r // ((1 if along_n else lanes) * split))
    turns = -(-steps // sharers)
    size = problem.m * (lanes if along_n else 1)
    registers = SIMPLE_REGISTERS + size + 8 * (lanes + problem.m)
    resident = resident_blocks(machine, threads, np.full(len(threads), registers), threads * size * 4)
    at_once = np.minimum(blocks, resident * machine.processors) * threads
    waves = -(-blocks // (resident * machine.processors))
    adjacent = (columns * lanes if along_n else np.minimum(sharers * lanes, problem.r)) * 4
    waste = np.maximum(1.0, SECTOR_BYTES / adjacent)
    moved = waste * problem.b.bytes + problem.a.bytes + problem.bytes_written + problem.epilogue_bytes
    memory = _streaming(machine, moved, at_once, np.minimum(turns, 8) * lanes * 4)
    instructions = turns * (1 + 4 + problem.m * (2 + lanes))
    issue = _issue_seconds(machine, blocks * threads * instructions / machine.warp_size)
    cache1, cache2 = machine.cache(1), machine.cache(2)
    assert cache1 is not None and cache2 is not None
    tree = np.log2(sharers) * (2 * cache1.latency_cycles + size * threads / machine.warp_size / 4) / machine.clock_hz
    latency = waves * (-(-turns // 8) * _latency_seconds(machine) + tree)
    part_bytes = 4.0 * problem.batch * problem.m * problem.n * split
    combine = np.where(
        split > 1, machine.launch_seconds + 2 * part_bytes / l2_bandwidth(machine) + 2 * _latency_seconds(machine), 0.0
    )
    terms = {
        "launch": np.full(len(threads), machine.launch_seconds),
        "latency": latency,
        "memory": memory,
        "issue": issue,
        "split": combine,
    }
    return Estimate(terms, overlapped=("memory", "issue"))
