"""The table of what trials gain on networks: rows, failures, means, and continuing an interrupted run, without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import tuned_compile

GAINS = {("a", 1): 0.01, ("a", 8): 0.03, ("b", 8): 0.05}


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Calls of a stand-in for `measure`, in which network "b" fails at batch 1."""
    found: list[tuple[str, int]] = []
    empty = torch.empty

    def measure(name: str, batch: int, dtype: str, trials: int, rounds: int, scratch: torch.Tensor) -> dict[str, Any]:
        found.append((name, batch))
        if (name, batch) not in GAINS:
            raise ValueError("wrong result (tuned), relative error 1.0e+00")
        medians = {"planned": 100.0 * (1 + GAINS[name, batch]), "tuned": 100.0}
        return {"compile_seconds": 9.0, "planned_compile_seconds": 1.0, "measurements": 20, "median_us": medians, "gain": GAINS[name, batch]}

    monkeypatch.setattr(tuned_compile, "measure", measure)
    monkeypatch.setattr(torch, "empty", lambda *shape, device=None: empty(1))
    monkeypatch.setattr("bench.common.RESULTS", tmp_path)
    monkeypatch.setattr("bench.common.git_commit", lambda: "0123")
    return found


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "a", "b", "--name=gains", *arguments])
    tuned_compile.main()


def test_gains_and_failures(
    calls: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--batch=1,8")
    assert calls == [("a", 1), ("b", 1), ("a", 8), ("b", 8)]
    first, second, whole, *rows = json.loads((tmp_path / "gains.json").read_text())["results"]
    assert [(row["network"], row["batch"]) for row in rows] == calls
    assert rows[1]["failed"] == "ValueError: wrong result (tuned), relative error 1.0e+00"
    assert (first["batch"], first["networks"], first["failed"], first["mean gain"]) == (1, 1, 1, 0.01)
    assert (second["batch"], second["networks"], second["failed"], second["mean gain"], second["largest gain"]) == (
        8,
        2,
        0,
        pytest.approx(0.04),
        0.05,
    )
    assert (whole["batch"], whole["networks"], whole["mean gain"]) == ("all", 3, pytest.approx(0.03))
    assert "wrong result" in capsys.readouterr().out


def test_an_interrupted_table_goes_on(calls: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "--batch=1")
    run(monkeypatch, "--batch=1,8", "--resume", "--seconds=-1")
    assert calls == [("a", 1), ("b", 1)]
    run(monkeypatch, "--batch=1,8", "--resume")
    assert calls == [("a", 1), ("b", 1), ("a", 8), ("b", 8)]
    assert len(json.loads((tmp_path / "gains.json").read_text())["results"]) == 3 + 4
    run(monkeypatch, "--batch=1", "--resume", "--trials=10")
    assert len(calls) == 6, "figures of other trials are not continued"
