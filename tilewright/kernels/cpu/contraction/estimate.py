"""Predicted times of CPU schedules, from the instructions of inner loops and the bytes that each cache level supplies.

Contractions: per register tile and step of the reduction the inner loop issues t * v multiply-adds (t pixels, v vectors), v loads of B and t
broadcasts of A. Cycles are the maximum over the multiply-add ports, the load ports, the latency of the accumulators' dependency chains, and the
transfer of B's panel and A's cache lines from the level that holds them (the data-movement volume of CNNOpt, section 4, for two levels). Results that
are written one panel at a time, and leave L2 before their pixel is complete, add the time to write them to memory. Worked example, AVX-512, tile 14 x
2 vectors: 28 multiply-adds on 2 ports take 14 cycles, 16 loads on 2 ports 8, so the tile runs at the arithmetic peak.
"""

from __future__ import annotations

import numpy as np

from tilewright.hardware.calibration import cpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns, ceil_divided
from tilewright.kernels.counts import Counts
from tilewright.kernels.cpu.contraction.counts import a_passes, b_reads, panels_of, tiles_of
from tilewright.kernels.cpu.contraction.space import ALONG_N, CONSTANT, CpuContractionFacts


def contraction_estimate(facts: CpuContractionFacts, candidates: Columns, counts: Counts, machine: Machine, threads: int) -> Estimate:
    """Seconds of each candidate. Partial tiles are charged for the pixels they hold, partial vectors as whole vectors."""
    lanes = machine.vector_lanes()
    tile_rows, columns, vectors, order = candidates["tile_rows"], candidates["tile_columns"], candidates["vectors"], candidates["order"]
    tile = tile_rows * columns

    def cycles(pixels: np.ndarray) -> np.ndarray:
        multiply_adds = pixels * vectors / machine.fma_ports
        loads = (pixels + vectors) / machine.load_ports
        chain = np.full_like(multiply_adds, machine.fma_latency_cycles)
        return np.maximum(np.maximum(multiply_adds, loads), chain)

    full_x, rest_x = facts.columns // columns, facts.columns % columns
    full_y, rest_y = facts.rows // tile_rows, facts.rows % tile_rows
    per_panel = np.zeros(len(tile))
    for count_y, height in ((full_y, tile_rows), (np.minimum(rest_y, 1), rest_y)):
        for count_x, width in ((full_x, columns), (np.minimum(rest_x, 1), rest_x)):
            per_panel += count_y * count_x * np.where(height * width > 0, cycles(np.maximum(height * width, 1)), 0.0)
    tiles, panels = tiles_of(facts, candidates), panels_of(facts, candidates, machine)
    tasks = panels * (facts.images or facts.outer * ceil_divided(facts.rows, tile_rows))
    balance = ceil_divided(tasks, threads) * threads / tasks
    arithmetic = per_panel * facts.outer * panels * facts.r / threads * balance / machine.clock_hz
    once = cpu_calibration(machine).contraction.tile_overhead_cycles
    overhead = tiles * facts.outer * panels * (once + tile * vectors) / threads / machine.clock_hz

    l2 = machine.cache(2)
    assert l2 is not None, f"{machine.name} lacks the facts about its caches"
    panel_bytes = vectors * lanes * facts.r * float(facts.element_bytes)
    # B's panel is read once per tile
    of_thread = panel_bytes * tiles * facts.outer * panels / threads
    b_beyond = np.where(panel_bytes > 0.75 * l2.bytes, of_thread, 0.0)
    # A is read once per panel (n outermost) or once (m outermost; then every panel of B is read for each tile row)
    b_passes = np.where(order == 0, 1.0, facts.outer * ceil_divided(facts.rows, tile_rows))
    passing = facts.a_bytes * a_passes(facts, candidates, machine)
    # if threads share the panels, each thread reads all of A; if they share the pixels, only its part
    a_of_thread = np.where((order == 0) & (panels > 1), facts.a_bytes, facts.a_bytes / threads)
    a_beyond = np.where(a_of_thread > 0.5 * l2.bytes, passing, facts.a_bytes)
    b_total = np.where(facts.b_bytes / np.where(order == 0, threads, 1) > 0.5 * l2.bytes, facts.b_bytes * b_passes, facts.b_bytes)
    memory = (a_beyond + b_total + b_beyond) / machine.memory_bandwidth
    # with n outermost a pixel's channels are written panel by panel, far apart in time, so prefetchers, which follow adjacent lines, do not help
    result_bytes = 0.0 if facts.images else counts.result_bytes
    scattered = (order == 0) & (panels > 1) & ((facts.a_bytes + result_bytes) / threads > 0.5 * l2.bytes)
    row_vectors = facts.row_operations / lanes / machine.fma_ports / threads
    level_2 = (b_reads(facts, candidates, machine) / threads + passing / threads) / (machine.cache_bandwidth(2) / machine.processors)
    return Estimate(
        {
            "arithmetic": arithmetic,
            "tile overhead": overhead,
            "L2 to registers": level_2,
            "memory": memory,
            "scattered results": np.where(scattered, result_bytes / machine.memory_bandwidth, 0.0),
            **({"row reductions": np.full(len(tile), row_vectors / machine.clock_hz)} if facts.whole_rows else {}),
            **({"pixel sums": row_vectors / machine.clock_hz * balance} if facts.images else {}),
            **({"copy of B": _copied(facts, vectors * lanes, machine, threads)} if facts.b != CONSTANT else {}),
            "dispatch": np.full(len(tile), machine.dispatch_seconds),
        },
        overlapped=("arithmetic", "L2 to registers", "memory"),
    )


def _copied(facts: CpuContractionFacts, panel: np.ndarray, machine: Machine, threads: int) -> np.ndarray:
    """Seconds of the kernel that copies B into panels; 0 if no copy is needed."""
    fitted = cpu_calibration(machine).contraction
    cycles = fitted.copy_cycles_along_n if facts.b == ALONG_N else fitted.copy_cycles_across_n
    seconds = facts.b_bytes / facts.element_bytes * cycles / threads / machine.clock_hz + machine.dispatch_seconds
    return np.where((facts.b == ALONG_N) & (facts.n % panel == 0), 0.0, seconds)


def stored_between(facts: CpuContractionFacts, machine: Machine, threads: int) -> dict[str, float]:
    """Cost of a separate kernel for the rows of a contraction's result, beyond its arithmetic, as named terms in seconds. The result is written and
    read back (through L2 if the threads' caches can hold it), and one more parallel region starts."""
    moved = 2.0 * facts.element_bytes * facts.outer * facts.rows * facts.columns * facts.n
    level_2 = machine.cache(2)
    assert level_2 is not None, f"{machine.name} lacks the facts about its caches"
    if moved / 2 <= 0.5 * level_2.bytes * min(threads, machine.processors):
        transfer = {"L2": moved / (machine.cache_bandwidth(2) / machine.processors * min(threads, machine.processors))}
    else:
        transfer = {"memory": moved / machine.memory_bandwidth}
    return {**transfer, "dispatch": machine.dispatch_seconds}
