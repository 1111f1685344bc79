"""What the learned model reads of a ranking's candidates, whatever their schema: sizes, axes, counts, and their schema's own prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from tilewright.cost.features import describe
from tilewright.cost.gpu import FRAGMENT_WAVEFRONTS, contraction_cost
from tilewright.cost.gpu_direct import direct_cost
from tilewright.cost.gpu_winograd import winograd_cost
from tilewright.cost.gpu_winograd_fused import fused_winograd_cost
from tilewright.cost.ranking import Part
from tilewright.cost.volumes import Volumes, contraction_volumes, direct_volumes
from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.ir.estimate import Estimate
from tilewright.schedule import gpu_direct
from tilewright.schedule.columns import Columns, length, take
from tilewright.schedule.gpu_contraction import ContractionProblem
from tilewright.schedule.gpu_direct import DirectProblem
from tilewright.schedule.gpu_winograd import FILTER, OUTPUT_TILES, WinogradProblem
from tilewright.schedule.gpu_winograd_fused import (
    fused_registers_of,
    fused_shared_bytes_of,
    fused_threads_of,
    points_of,
    tiles_there,
)


@dataclass(frozen=True)
class Described:
    """Columns of candidates of one schema: what `features.describe` gives, counts, and the analytical seconds of the schema's own model."""

    columns: Columns
    volumes: Volumes
    analytical: np.ndarray


def joined(parts: list[Described]) -> Described:
    """The candidates of several schemas one after another."""
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns}
    counts = {entry.name: np.concatenate([getattr(part.volumes, entry.name) for part in parts]) for entry in fields(Volumes)}
    return Described(columns, Volumes(**counts), np.concatenate([part.analytical for part in parts]))


def part_of(part: Part, rows: Columns, machine: Machine) -> Part | None:
    """Other rows of the part's schema and problem, whether its space has them or not; None for a schema that the learned model does not know."""
    cost = _COSTS.get(getattr(part.schedule, "__name__", ""))
    return None if cost is None else Part(part.schedule, rows, cost(rows, part.problem, machine), part.problem)


def described(part: Part, machine: Machine) -> Described | None:
    """The candidates of one part of a ranking; None for a schema that the learned model does not know."""
    known = _SCHEMAS.get(getattr(part.schedule, "__name__", ""))
    if known is None:
        return None
    columns, volumes = known(part.rows, part.problem, machine)
    columns["own seconds"] = part.estimate.seconds
    return Described(columns, volumes, part.estimate.seconds)


def _contraction(rows: Columns, problem: ContractionProblem, machine: Machine) -> tuple[dict[str, np.ndarray], Volumes]:
    sizes = {"outputs": problem.n, "height": problem.batch, "width": problem.m, "channels": problem.r}
    return _product("contraction", rows, sizes, machine, [(np.ones(length(rows), dtype=bool), problem)])


def _winograd(rows: Columns, problem: WinogradProblem, machine: Machine) -> tuple[dict[str, np.ndarray], Volumes]:
    parts = [(rows["output_tile"] == size, product) for size, product in zip(OUTPUT_TILES, problem.products, strict=True)]
    return _product("winograd", rows, _winograd_sizes(problem), machine, parts)


def _winograd_sizes(problem: WinogradProblem) -> dict[str, int]:
    return {
        "outputs": problem.outputs, "height": problem.images * problem.height, "width": problem.width, "channels": problem.channels,
        "filter_y": FILTER, "filter_x": FILTER,
    }  # fmt: skip


def _product(
    schema: str, rows: Columns, sizes: Mapping[str, int], machine: Machine, parts: list[tuple[np.ndarray, ContractionProblem]]
) -> tuple[dict[str, np.ndarray], Volumes]:
    """Candidates with the axes of a `ContractionSchedule`; `parts` are masks of rows with the product that they compute."""
    tiles = {
        **rows,
        "register_k": rows["thread_n"],
        "register_x": rows["thread_m"],
        "block_k": rows["block_n"] // rows["thread_n"],
        "block_x": rows["block_m"] // rows["thread_m"],
        "channels": rows["block_k"],
    }
    found: dict[str, np.ndarray] = {}
    for which, product in parts:
        volumes = contraction_volumes(take(rows, which), product, machine)
        for entry in fields(Volumes):
            found.setdefault(entry.name, np.zeros(length(rows)))[which] = getattr(volumes, entry.name)
    return describe(schema, tiles, sizes, length(rows)), Volumes(**found)


def _fused(rows: Columns, problem: WinogradProblem, machine: Machine) -> tuple[dict[str, np.ndarray], Volumes]:
    """One kernel for all of Winograd's steps: counts as `cost.gpu_winograd_fused` makes them. Inputs and filters are read a step at a time."""
    r = {name: np.asarray(column, dtype=np.float64) for name, column in rows.items()}
    tiles = {**rows, "register_k": rows["thread_n"], "register_x": rows["thread_m"], "block_k": rows["outputs"] // rows["thread_n"]}
    tiles["block_x"] = rows["tiles"] // rows["thread_m"]
    points, threads = points_of(rows).astype(np.float64), fused_threads_of(rows).astype(np.float64)
    registers, shared = fused_registers_of(rows).astype(np.float64), fused_shared_bytes_of(rows).astype(np.float64)
    one = np.ones(length(rows))
    blocks = -(-tiles_there(rows, problem) // r["tiles"]) * -(-problem.outputs // r["outputs"]) * r["split"]
    steps = problem.channels / (r["channels"] * r["split"])
    sums = points * r["tiles"] * r["outputs"]
    items, filters = r["tiles"] * r["channels"], points * r["channels"] * r["outputs"]
    size = r["output_tile"]
    volumes = Volumes(
        flops=2 * points * tiles_there(rows, problem) * problem.outputs * problem.channels,
        padded_flops=2 * blocks * sums * steps * r["channels"],
        blocks=blocks,
        warps=threads / machine.warp_size,
        threads=threads,
        steps=steps,
        registers=registers,
        shared_bytes=shared,
        resident=resident_blocks(machine, threads, registers, shared) * one,
        accumulators=r["thread_m"] * r["thread_n"],
        step_multiply_adds=r["channels"] * r["thread_m"] * r["thread_n"],
        step_shared_loads=r["channels"] * FRAGMENT_WAVEFRONTS * np.maximum(2, (r["thread_m"] + r["thread_n"]) / 4),
        step_cached_loads=0 * one,
        step_fill=(2 * items * points + filters / 4) / machine.warp_size,
        step_sectors=(points * items + filters) / 8,
        drain_wavefronts=2 * sums / machine.warp_size,
        store_instructions=r["tiles"] * r["outputs"] * size**2 / machine.warp_size,
        store_sectors=r["tiles"] * r["outputs"] * size**2 / 8,
        distinct_bytes=one * (problem.bytes_read + problem.epilogue_bytes) + 4.0 * points * problem.channels * problem.outputs,
        written_bytes=one * problem.bytes_written,
        split=r["split"],
        stages=2 * one,
        reuse_bytes=4 * steps * (points * items + filters),
    )
    return describe("winograd fused", tiles, _winograd_sizes(problem), length(rows)), volumes


def _direct(rows: Columns, problem: DirectProblem, machine: Machine) -> tuple[dict[str, np.ndarray], Volumes]:
    sizes = {entry.name: getattr(problem, entry.name) for entry in fields(problem)}
    sizes["height"] = problem.height * problem.images * problem.groups
    volumes = direct_volumes(rows, problem, machine)
    # our kernels' own figures, where the general count only estimates
    registers = gpu_direct.registers_of(rows, problem).astype(np.float64)
    shared = gpu_direct.shared_bytes_of(rows, problem).astype(np.float64)
    resident = resident_blocks(machine, gpu_direct.threads_of(rows), registers, shared).astype(np.float64)
    return describe("direct", rows, sizes, length(rows)), replace(volumes, registers=registers, shared_bytes=shared, resident=resident)


_SCHEMAS: Mapping[str, Callable[[Columns, Any, Machine], tuple[dict[str, np.ndarray], Volumes]]] = MappingProxyType(
    {"ContractionSchedule": _contraction, "WinogradSchedule": _winograd, "FusedWinogradSchedule": _fused, "DirectSchedule": _direct}
)
"""By the class of the schedule."""
_COSTS: Mapping[str, Callable[[Columns, Any, Machine], Estimate]] = MappingProxyType(
    {
        "ContractionSchedule": contraction_cost,
        "WinogradSchedule": winograd_cost,
        "FusedWinogradSchedule": fused_winograd_cost,
        "DirectSchedule": direct_cost,
    }
)
