"""Counts of configurations by schema, and their tables."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
from rich.console import Console

from bench.configurations import PAPER, beyond, counts, layer_table, measured, reason_table
from bench.layers import LAYERS, layer
from bench.regions import ranking_of
from tilewright.hardware import machine
from tilewright.kernels.gpu.direct.schedule import DirectSchedule


def test_counts_are_those_of_the_ranking() -> None:
    ranking = ranking_of(layer("R9"), machine("h200"))
    found = counts(ranking)
    assert found["contraction"]["feasible"] > 100 and "shared memory exceeds a block's" not in found["gemv"]["rejected"]
    assert sum(entry["feasible"] for entry in found.values()) == ranking.candidates
    assert sum(sum(entry["rejected"].values()) for entry in found.values()) == sum(ranking.rejected.values())
    assert all(entry["generated"] == entry["feasible"] + sum(entry["rejected"].values()) for entry in found.values())


def test_tables() -> None:
    assert set(PAPER) == set(LAYERS)
    results = [measured(layer(name), "h200", 1) for name in ("R12", "D1")]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(layer_table(results))
    console.print(reason_table(results))
    text = console.export_text()
    entry = results[0]["schemas"]["contraction"]
    assert f"{entry['feasible']:,} of {entry['generated']:,}" in text and "159" in text and "842" in text
    assert "threads below two warps or above 512" in text


def test_first_candidates_beyond_what_models_were_trained_with_are_counted() -> None:
    ranking = ranking_of(layer("R1"), machine("h200"))
    seconds = np.where([schedule_threads(schedule) > 256 for schedule in ranking.schedules()], 1.0, 2.0)
    assert beyond(replace(ranking, predicted=seconds)) == 30 and beyond(replace(ranking, predicted=-seconds)) == 0


def schedule_threads(schedule: object) -> int:
    return 32 * schedule.block_k * schedule.block_y * schedule.block_x if isinstance(schedule, DirectSchedule) else 0
