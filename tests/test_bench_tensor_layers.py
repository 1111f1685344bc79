"""The benchmark of layers on tensor cores, without a GPU: its problems and candidates, and the tables of what it measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from bench.gpu_tensor_layers import candidates, layer_problem, measured_or_error, ranking_of, summary, tables
from tests.emulated_gpu import EmulatedServer
from tilewright.errors import KernelFailed
from tilewright.hardware import machine
from tilewright.kernels.registry import lower
from tilewright.tuning import serialisation

H200 = machine("h200")


@pytest.mark.in_turns
@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
@pytest.mark.parametrize("name, batch", [("R12", 1), ("R1", 64), ("Y0", 1)])
def test_layers_have_candidates_of_each_schema(name: str, batch: int, precision: str) -> None:
    problem = layer_problem(name, batch, precision)
    assert serialisation.decode(serialisation.encode(problem)).values == problem.values
    found = candidates(ranking_of(problem, H200, precision), 3)
    assert len(found["tensor cores"]) == 3 and len(found["contraction"]) == 3
    for choices in found.values():
        text = serialisation.schedule_text(choices[0].schedule)
        assert serialisation.schedule_of(text) == choices[0].schedule and lower(problem, choices[0].schedule, H200).kernels


def test_candidates_with_an_axis_are_apart() -> None:
    found = candidates(ranking_of(layer_problem("R12", 1, "fp16"), H200, "fp16"), 2, "meeting")
    for name in ("warpgroups", "warpgroup patches"):
        assert [choice.schedule.meeting for choice in found[name]] == [0, 0]
        assert [choice.schedule.meeting for choice in found[f"{name}, meeting"]] == [1, 1]
    assert "tensor cores, meeting" not in found
    assert set(found) == {
        *candidates(ranking_of(layer_problem("R12", 1, "fp16"), H200, "fp16"), 2),
        "warpgroups, meeting",
        "warpgroup patches, meeting",
    }


@pytest.mark.parametrize("failure", [RuntimeError("wrong"), KernelFailed("cuFuncSetAttribute: invalid argument\nmore")])
def test_a_candidate_that_fails_is_a_row(failure: Exception) -> None:
    def fails() -> float:
        raise failure

    assert measured_or_error(fails) == {"measured": None, "error": str(failure).splitlines()[0]}
    assert measured_or_error(lambda: 2e-6) == {"measured": 2e-6}


def test_tables() -> None:
    contenders = [
        {"contender": "cudnn nhwc", "median_us": 6.0},
        {"contender": "cudnn nchw", "median_us": None},
        {"contender": "ours", "median_us": 4.0},
        {"contender": "ours, late", "median_us": 4.5},
        {"contender": "ours, best direct", "median_us": 4.25},
    ]
    rows = [
        {"schema": "tensor cores", "schedule": "text", "predicted": 4e-6, "measured": 5e-6},
        {"schema": "direct", "schedule": "other", "predicted": 9e-6, "measured": None, "error": "wrong"},
    ]
    result = {"layer": "R2", "batch": 1, "precision": "fp16", "contenders": contenders, "candidates": rows}
    assert summary(result) == {"cudnn": 6.0, "ours": 4.0, "best of ours": 4.25}
    console = Console(width=200, record=True, file=Path("/dev/null").open("w"))
    for table in tables([result]):
        console.print(table)
    text = console.export_text()
    assert "1.50" in text and "direct us" in text and "4.25" in text and "0.80" in text and "mean" in text


@pytest.mark.parametrize("precision", ["fp16", "tf32"])
def test_a_trial_of_a_small_layer(precision: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The measuring process accepts the errors of the precision, which are beyond those of float32."""
    monkeypatch.setattr("bench.gpu_tensor_layers.LAYERS", {"small": (16, 8, 6, 3, 1)})
    problem = layer_problem("small", 2, precision)
    server = EmulatedServer(problem, H200, seconds=0.05)  # so long that few launches are made
    choice = candidates(ranking_of(problem, H200, precision), 1)["tensor cores"][0]
    answer = server.trial({"program": server.program(choice.schedule, tmp_path), "mode": "cold"})
    assert "error" not in answer, answer
    assert answer["times"]
    assert answer["relative_error"] > 1e-4
