"""The learned part of the ranking on CPUs: how far the models' times are off, from their terms, the problem's sizes, the axes of the schedule, and
what follows from both: how much of tiles, panels and threads is filled, and what a register tile loads.

A forest for a core (`Machine.pipeline`) and a number of threads, trained on measured schedules of random problems (`bench/cpu_learned.py`), predicts
the logarithm of measured over modelled time. Where there is no forest for core and threads, and for regions unlike those it was trained with, the
models' times stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.cost.cpu import ceil_divided
from tilewright.cost.forest import Forest, load
from tilewright.cost.ranking import Part, Ranking
from tilewright.hardware.machine import Machine
from tilewright.schedule.columns import Columns, length
from tilewright.schedule.cpu_contraction import ACROSS_N, ALONG_N, CONSTANT, ORDERS, CpuContractionProblem
from tilewright.schedule.cpu_depthwise import ORDERS as DEPTHWISE_ORDERS
from tilewright.schedule.cpu_depthwise import CpuDepthwiseProblem, reach
from tilewright.schedule.cpu_winograd import CpuWinogradProblem, working_bytes
from tilewright.schedule.gpu_winograd import FILTER

MODELS = Path(__file__).parent / "models"
VERSION = 2
"""Raised with every change of what `record` gives; a forest of another version is not used."""
SCHEMAS = (CpuContractionProblem, CpuWinogradProblem, CpuDepthwiseProblem)
MISSING = -64.0
"""In place of what a schema does not have."""


def record(part: Part, machine: Machine, threads: int) -> dict[str, np.ndarray] | None:
    """Features by name, a column for each; None for a part that the forest does not know. Sizes and times are logarithms (base 2)."""
    problem, rows = part.problem, part.rows
    if not isinstance(problem, SCHEMAS) or (isinstance(problem, CpuContractionProblem) and _is_special(problem)):
        return None
    total, count, lanes = part.estimate.seconds, length(rows), machine.vector_lanes()
    columns = {"schema": np.full(count, float(SCHEMAS.index(type(problem)))), "seconds": np.log2(total)}
    columns |= {f"problem {name}": np.full(count, np.log2(max(size, 2.0**-10))) for name, size in _sizes(problem)}
    columns |= {f"axis {name}": np.asarray(column, dtype=np.float64) for name, column in rows.items()}
    columns |= {f"term {name}": np.log2(np.maximum(term, 1e-12) / total) for name, term in part.estimate.terms.items()}
    if isinstance(problem, CpuContractionProblem):
        return columns | _of_contraction(problem, rows, lanes, threads)
    if isinstance(problem, CpuWinogradProblem):
        return columns | _of_winograd(problem, rows, lanes)
    return columns | _of_depthwise(problem, rows, lanes, threads)


def _is_special(problem: CpuContractionProblem) -> bool:
    """Products of a single row take what memory takes; the others reduce rows or pixels as well. None of these was trained with."""
    return problem.whole_rows or bool(problem.images) or problem.outer * problem.rows * problem.columns == 1


def _sizes(problem: Any) -> Iterator[tuple[str, float]]:
    for field in fields(problem):
        value = getattr(problem, field.name)
        if isinstance(value, str):
            yield field.name, float(1 + (CONSTANT, ALONG_N, ACROSS_N).index(value))
        elif isinstance(value, tuple):
            yield from ((f"{field.name} {number}", float(one)) for number, one in enumerate(value))
        else:
            yield field.name, float(value)


def _balance(units: np.ndarray, threads: int) -> np.ndarray:
    """Mean over most work of the threads that share so many units."""
    balance: np.ndarray = units / (ceil_divided(units, threads) * threads)
    return balance


def _read_by_thread(a_bytes: float, b_bytes: float, share_pixels: np.ndarray, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of the bytes of both factors that each thread reads: threads share the pixels, or else the channels."""
    return np.log2(np.where(share_pixels, a_bytes / threads, a_bytes)), np.log2(np.where(share_pixels, b_bytes, b_bytes / threads))


def _of_contraction(problem: CpuContractionProblem, rows: Columns, lanes: int, threads: int) -> dict[str, np.ndarray]:
    height, width, vectors = rows["tile_rows"], rows["tile_columns"], rows["vectors"]
    pixels, panel = height * width, vectors * lanes
    panels, down, across = ceil_divided(problem.n, panel), ceil_divided(problem.rows, height), ceil_divided(problem.columns, width)
    units = np.where(rows["order"] == ORDERS.index("n"), panels, problem.outer * (down if problem.rows > 1 else across))
    a_row = problem.a_bytes / (problem.outer * problem.rows)
    a, b = _read_by_thread(problem.a_bytes, problem.b_bytes, (rows["order"] == ORDERS.index("m")) & (units > 1), threads)
    return {
        "first factor of a thread": a,
        "second factor of a thread": b,
        "factors of a thread": np.logaddexp2(a, b),
        "pixels": pixels.astype(np.float64),
        "accumulators": (pixels * vectors).astype(np.float64),
        "loads": (pixels + vectors) / (pixels * vectors),
        "channels filled": problem.n / (panels * panel),
        "pixels filled": problem.rows * problem.columns / (down * across * pixels),
        "last column": (problem.columns % width) / width,
        "last row": (problem.rows % height) / height,
        "panel bytes": np.log2(4.0 * problem.r * panel),
        "bytes of a tile": np.log2(a_row * height * width / problem.columns),
        "bytes of its rows": np.log2(a_row * height),
        "panels": np.log2(panels),
        "tiles": np.log2(problem.outer * down * across),
        "units": np.log2(units),
        "balance": _balance(units, threads),
    }


def _of_winograd(problem: CpuWinogradProblem, rows: Columns, lanes: int) -> dict[str, np.ndarray]:
    size, tile, vectors = rows["output_tile"], rows["tile"], rows["vectors"]
    tiles, panel = problem.tiles(size), vectors * lanes
    panels, own = ceil_divided(problem.outputs, panel), ceil_divided(tiles, rows["tile_parts"])
    filters = 4.0 * problem.channels * panel
    all_filters = filters * panels * (size + FILTER - 1) ** 2
    image = 4.0 * problem.images * problem.height * problem.width * problem.channels
    a, b = np.log2(image / rows["tile_parts"]), np.log2(all_filters / rows["panel_parts"])
    return {
        "first factor of a thread": a,
        "second factor of a thread": b,
        "factors of a thread": np.logaddexp2(a, b),
        "accumulators": (tile * vectors).astype(np.float64),
        "loads": (tile + vectors) / (tile * vectors),
        "channels filled": problem.outputs / (panels * panel),
        "pixels filled": problem.images * problem.height * problem.width / (tiles * size**2),
        "last column": (own % tile) / tile,
        "last row": (own % (tile * rows["blocks"])) / (tile * rows["blocks"]),
        "panel bytes": np.log2(filters),
        "bytes of a tile": np.log2(4.0 * tile * problem.channels),
        "bytes of a block": np.log2(working_bytes(rows, problem, lanes)),
        "bytes of all filters": np.log2(all_filters),
        "units": own / (tile * rows["blocks"]),
        "balance": panels / (ceil_divided(panels, rows["panel_parts"]) * rows["panel_parts"]),
    }


def _of_depthwise(problem: CpuDepthwiseProblem, rows: Columns, lanes: int, threads: int) -> dict[str, np.ndarray]:
    height, width, vectors = rows["tile_rows"], rows["tile_columns"], rows["vectors"]
    pixels, taps = height * width, problem.taps[0] * problem.taps[1]
    span, lines = reach(problem.input_columns, width), reach(problem.input_rows, height)
    down, across = ceil_divided(problem.rows, height), ceil_divided(problem.columns, width)
    units = problem.images * np.where(rows["order"] == DEPTHWISE_ORDERS.index("c"), problem.vectors // vectors, down)
    return {
        "accumulators": pixels.astype(np.float64),
        "registers": (pixels + span + 1).astype(np.float64),
        "registers with filters": (pixels + span + taps).astype(np.float64),
        "loads": (lines * span + height * taps) / (pixels * taps),
        "multiply-adds of a tile": np.log2(pixels * taps),
        "pixels filled": problem.rows * problem.columns / (down * across * pixels),
        "last column": (problem.columns % width) / width,
        "last row": (problem.rows % height) / height,
        "bytes of a tile": np.log2(4.0 * lanes * vectors * span),
        "bytes of its rows": np.log2(4.0 * lanes * vectors * lines * problem.columns * max(problem.input_columns[0], 1)),
        "units": np.log2(units),
        "balance": _balance(units, threads),
    }


def table(columns: Mapping[str, np.ndarray], names: tuple[str, ...]) -> np.ndarray:
    """[candidates, names] float32."""
    missing = np.full(len(columns["seconds"]), MISSING)
    return np.stack([np.broadcast_to(columns.get(name, missing), missing.shape) for name in names], axis=1).astype(np.float32)


def file_of(machine: Machine, threads: int) -> Path:
    return MODELS / f"cpu_{machine.pipeline}_{threads}.npz"


@lru_cache(maxsize=8)
def forest_of(path: Path) -> Forest | None:
    """Raises InvalidModel where the file is damaged."""
    forest = load(path)[0] if path.exists() else None
    return forest if forest is not None and forest.version == VERSION else None


def predicted(forest: Forest, ranking: Ranking, machine: Machine, threads: int) -> np.ndarray | None:
    """Seconds of all candidates; None where there is a part that the forest does not know."""
    seconds = []
    for part in ranking.parts:
        columns = record(part, machine, threads)
        if columns is None:
            return None
        seconds.append(part.estimate.seconds * np.exp2(forest.predict(table(columns, forest.names))))
    return np.concatenate(seconds)


def corrected(ranking: Ranking, machine: Machine, threads: int) -> Ranking:
    """The ranking with the times that the forest for the machine's core and so many threads predicts, where it knows such regions."""
    forest = forest_of(file_of(machine, threads)) if machine.pipeline and ranking.candidates else None
    return ranking if forest is None else replace(ranking, predicted=predicted(forest, ranking, machine, threads))
