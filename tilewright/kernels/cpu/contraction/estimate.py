"""Predicted times of CPU schedules, from the instructions of inner loops and the bytes that each cache level supplies.

Contractions: per register tile and step of the reduction the inner loop issues t * v multiply-adds (t pixels, v vectors), v loads of B and t
broadcasts of A. Its cycles are a p-norm of those of the multiply-add ports, the load ports, and the latency of the accumulators' dependency chains.
The transfer of B's panel and A's cache lines from the level that holds them overlaps with these only in part, another p-norm (the data-movement
volume of CNNOpt, section 4, for two levels); what is read again, after it has left level 2, comes from level 3. Results that are written one panel at
a time, and leave level 2 before their pixel is complete, add the time to write their lines to memory. Worked example, AVX-512, tile 14 x 2 vectors:
28 multiply-adds on 2 ports take 14 cycles, 16 loads on 2 ports 8, chains 4; with the exponent 3 the tile takes 14.9 cycles.
"""

from __future__ import annotations

import numpy as np

from tilewright.hardware.calibration import cpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import DEFAULT_FLOAT, size_of
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns, ceil_divided
from tilewright.kernels.counts import Counts
from tilewright.kernels.cpu.contraction.counts import a_passes, b_reads, one_b, panels_of, parts_of, tiles_of
from tilewright.kernels.cpu.contraction.space import ALONG_N, CONSTANT, ORDERS, CpuContractionFacts
from tilewright.kernels.cpu.rates import overlapping, reread_bandwidth


def contraction_estimate(facts: CpuContractionFacts, candidates: Columns, counts: Counts, machine: Machine, threads: int) -> Estimate:
    """Seconds of each candidate. Partial tiles are charged for the pixels they hold, partial vectors as whole vectors."""
    lanes = machine.vector_lanes()
    tile_rows, columns, vectors, order = candidates["tile_rows"], candidates["tile_columns"], candidates["vectors"], candidates["order"]
    tile = tile_rows * columns

    widened = facts.element_bytes < size_of(DEFAULT_FLOAT)  # each vector of B is converted, on the ports of multiply-adds

    def cycles(pixels: np.ndarray) -> np.ndarray:
        # an element of A that is not stored is computed again for each panel, on the ports of multiply-adds
        multiply_adds = ((pixels + widened) * vectors + pixels * facts.a_instructions) / machine.fma_ports
        loads = (pixels + vectors) / machine.load_ports
        return overlapping(machine, multiply_adds, loads, np.full_like(multiply_adds, machine.fma_latency_cycles))

    full_x, rest_x = facts.columns // columns, facts.columns % columns
    full_y, rest_y = facts.rows // tile_rows, facts.rows % tile_rows
    per_panel = np.zeros(len(tile))
    for count_y, height in ((full_y, tile_rows), (np.minimum(rest_y, 1), rest_y)):
        for count_x, width in ((full_x, columns), (np.minimum(rest_x, 1), rest_x)):
            per_panel += count_y * count_x * np.where(height * width > 0, cycles(np.maximum(height * width, 1)), 0.0)
    tiles, panels = tiles_of(facts, candidates), panels_of(facts, candidates, machine)
    down = parts_of(facts, candidates)
    tasks = panels * (facts.images or facts.outer * down)
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
    # A is read once per panel (n outermost) or once (m outermost; then every panel of B is read for each row of tiles, or each tile of a single row)
    b_passes = np.where(order == 0, 1.0, facts.outer * down)
    passing = facts.a_bytes * a_passes(facts, candidates, machine)
    # if threads share the panels, each thread reads all of A; if they share the pixels, only its part
    a_of_thread = np.where((order == 0) & (panels > 1), facts.a_bytes, facts.a_bytes / threads)
    a_beyond = np.where(a_of_thread > 0.5 * l2.bytes, passing, facts.a_bytes)
    own_b = one_b(facts)
    b_total = np.maximum(np.where(own_b / np.where(order == 0, threads, 1) > 0.5 * l2.bytes, own_b * b_passes, 0.0), facts.b_bytes)
    memory = np.full(len(tile), (facts.a_bytes + facts.b_bytes) / machine.memory_bandwidth)
    again = (a_beyond - facts.a_bytes) / reread_bandwidth(machine, facts.a_bytes, threads)
    again += (b_total - facts.b_bytes + b_beyond) / reread_bandwidth(machine, facts.b_bytes, threads)
    # with n outermost a pixel's channels are written panel by panel, far apart in time, so prefetchers, which follow adjacent lines, do not help
    result_bytes = 0.0 if facts.images else counts.result_bytes
    scattered = (order == 0) & (panels > 1) & ((facts.a_bytes + result_bytes) / threads > 0.5 * l2.bytes)
    line = machine.caches[0].line_bytes
    panel_results = vectors * lanes * float(facts.result_bytes)
    # a line that two panels share is moved for each
    in_lines = result_bytes * ceil_divided(panel_results, line) * line / panel_results
    row_vectors = facts.row_operations / lanes / machine.fma_ports / threads
    level_2 = (b_reads(facts, candidates, machine) / threads + passing / threads) / (machine.cache_bandwidth(2) / machine.processors)
    return Estimate(
        {
            "arithmetic": arithmetic,
            "tile overhead": overhead,
            "L2 to registers": level_2,
            "read again": again,
            "memory": memory,
            "scattered results": np.where(scattered, in_lines / machine.memory_bandwidth, 0.0),
            "shared lines": shared_lines(facts, candidates, machine, threads),
            **({"row reductions": np.full(len(tile), row_vectors / machine.clock_hz)} if facts.whole_rows else {}),
            **({"pixel sums": row_vectors / machine.clock_hz * balance} if facts.images else {}),
            **({"copy of B": _copied(facts, vectors * lanes, machine, threads)} if facts.b != CONSTANT else {}),
            "dispatch": np.full(len(tile), machine.dispatch_seconds),
        },
        overlapped=("arithmetic", "L2 to registers", "read again", "memory"),
        exponent=cpu_calibration(machine).contraction.transfers,
    )


def shared_lines(facts: CpuContractionFacts, candidates: Columns, machine: Machine, threads: int) -> np.ndarray:
    """Seconds for lines of results that two threads write, one of each pixel: threads share the panels (n outermost), and the last channel of one is
    in the line of the next one's first."""
    last, line = machine.caches[-1], machine.caches[0].line_bytes
    panels = panels_of(facts, candidates, machine)
    boundary = ceil_divided(panels, threads) * candidates["vectors"] * machine.vector_lanes() * facts.result_bytes
    apart = (boundary % line == 0) & (facts.n * facts.result_bytes % line == 0)
    shared = (candidates["order"] == ORDERS.index("n")) & (panels > 1) & (threads > 1) & ~apart & (facts.images == 0)
    cycles = cpu_calibration(machine).contraction.shared_line * last.latency_cycles
    return np.where(shared, facts.outer * facts.rows * facts.columns * cycles / machine.clock_hz, 0.0)


def _copied(facts: CpuContractionFacts, panel: np.ndarray, machine: Machine, threads: int) -> np.ndarray:
    """Seconds of the kernel that copies B into panels; 0 if no copy is needed."""
    seconds = copy_seconds(facts.b_bytes / facts.element_bytes, facts.b, machine, threads)
    return np.where((facts.b == ALONG_N) & (facts.n % panel == 0), 0.0, seconds)


def copy_seconds(elements: float, lies: str, machine: Machine, threads: int) -> float:
    """Seconds of a kernel that copies this number of elements of B, which lie along N or across it, into panels."""
    fitted = cpu_calibration(machine).contraction
    cycles = fitted.copy_cycles_along_n if lies == ALONG_N else fitted.copy_cycles_across_n
    return elements * cycles / threads / machine.clock_hz + machine.dispatch_seconds


def stored_between(facts: CpuContractionFacts, machine: Machine, threads: int) -> dict[str, float]:
    """Cost of a separate kernel for the rows of a contraction's result, beyond its arithmetic, as named terms in seconds. The result is written and
    read back (through L2 if the threads' caches can hold it), and one more parallel region starts."""
    moved = 2.0 * facts.result_bytes * facts.outer * facts.rows * facts.columns * facts.n
    level_2 = machine.cache(2)
    assert level_2 is not None, f"{machine.name} lacks the facts about its caches"
    if moved / 2 <= 0.5 * level_2.bytes * min(threads, machine.processors):
        transfer = {"L2": moved / (machine.cache_bandwidth(2) / machine.processors * min(threads, machine.processors))}
    else:
        transfer = {"memory": moved / machine.memory_bandwidth}
    return {**transfer, "dispatch": machine.dispatch_seconds}
