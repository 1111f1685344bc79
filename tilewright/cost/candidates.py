"""What the learned model reads of a ranking's candidates, whatever their schema: sizes, axes, counts, and their schema's own prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from tilewright.cost.features import describe
from tilewright.cost.gpu import resident_blocks
from tilewright.cost.ranking import Part
from tilewright.cost.volumes import Volumes, contraction_volumes, direct_volumes
from tilewright.hardware.machine import Machine
from tilewright.schedule import gpu_direct
from tilewright.schedule.columns import Columns, length, take
from tilewright.schedule.gpu_contraction import ContractionProblem
from tilewright.schedule.gpu_direct import DirectProblem
from tilewright.schedule.gpu_winograd import OUTPUT_TILES, WinogradProblem


@dataclass(frozen=True)
class Described:
    """Columns of candidates of one schema: what `features.describe` gives, counts, and the analytical seconds of the schema's own model."""

    columns: Columns
    volumes: Volumes
    analytical: np.ndarray


def described(part: Part, machine: Machine) -> Described | None:
    """The candidates of one part of a ranking; None for a schema that the learned model does not know."""
    known = _SCHEMAS.get(type(part.problem).__name__)
    if known is None or "block_m" not in part.rows and "register_k" not in part.rows:
        return None
    columns, volumes = known(part.rows, part.problem, machine)
    columns["own seconds"] = part.estimate.seconds
    return Described(columns, volumes, part.estimate.seconds)


def _contraction(rows: Columns, problem: ContractionProblem, machine: Machine) -> tuple[dict[str, np.ndarray], Volumes]:
    sizes = {"outputs": problem.n, "height": problem.batch, "width": problem.m, "channels": problem.r}
    return _product("contraction", rows, sizes, machine, [(np.ones(length(rows), dtype=bool), problem)])


def _winograd(rows: Columns, problem: WinogradProblem, machine: Machine) -> tuple[dict[str, np.ndarray], Volumes]:
    sizes = {
        "outputs": problem.outputs, "height": problem.images * problem.height, "width": problem.width, "channels": problem.channels,
        "filter_y": 3, "filter_x": 3,
    }  # fmt: skip
    parts = [(rows["output_tile"] == size, product) for size, product in zip(OUTPUT_TILES, problem.products, strict=True)]
    return _product("winograd", rows, sizes, machine, parts)


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
    return describe(schema, tiles, {name: np.asarray(size) for name, size in sizes.items()}, length(rows)), Volumes(**found)


def _direct(rows: Columns, problem: DirectProblem, machine: Machine) -> tuple[dict[str, np.ndarray], Volumes]:
    sizes = {entry.name: np.asarray(getattr(problem, entry.name)) for entry in fields(problem)}
    sizes["height"] = sizes["height"] * problem.images * problem.groups
    volumes = direct_volumes(rows, problem, machine)
    # our kernels' own figures, where the general count only estimates
    registers = gpu_direct.registers_of(rows, problem).astype(np.float64)
    shared = gpu_direct.shared_bytes_of(rows, problem).astype(np.float64)
    resident = resident_blocks(machine, gpu_direct.threads_of(rows), registers, shared).astype(np.float64)
    return describe("direct", rows, sizes, length(rows)), replace(volumes, registers=registers, shared_bytes=shared, resident=resident)


_SCHEMAS: Mapping[str, Callable[[Columns, Any, Machine], tuple[dict[str, np.ndarray], Volumes]]] = MappingProxyType(
    {"ContractionProblem": _contraction, "WinogradProblem": _winograd, "DirectProblem": _direct}
)
"""By the class of the problem, which says the schema."""
