"""Counts of candidates, passed from the choice through the program and a saved artifact to the explanation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tilewright
from bench.regions import ranking_of
from tests.sample_artifacts import Stepwise, rewrite_manifest
from tilewright.errors import InvalidArtifact
from tilewright.hardware import machine
from tilewright.ir.space import SpaceCounts
from tilewright.report.explanation import explanation
from tilewright.runtime import artifact


def test_counts_add_up() -> None:
    total = SpaceCounts(2, {"a": 1, "b": 3}) + SpaceCounts(5, {"b": 4})
    assert total == SpaceCounts(7, {"a": 1, "b": 7}) and total.generated == 15
    assert SpaceCounts().generated == 0


@pytest.fixture(scope="module")
def executable() -> tilewright.Executable:
    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten())
    return tilewright.compile(model, (torch.randn(1, 8, 12, 12),), target="h200")


def test_an_explanation_shows_what_the_ranking_counted(executable: tilewright.Executable) -> None:
    shape = {"outputs": 16, "channels": 8, "height": 12, "width": 12, "filter": 3, "stride": 1}
    ranking = ranking_of(shape, machine("h200"))
    row = next(row for row in executable.plan.rows if row.kind == "contraction")
    assert row.space == SpaceCounts(ranking.candidates, ranking.rejected)
    text = explanation(executable.image)
    infeasible = sum(ranking.rejected.values())
    assert f"{ranking.candidates + infeasible:,} candidates: {ranking.candidates:,} feasible, {infeasible:,} rejected" in text
    assert all(f"{count:,}  {reason}" in text for reason, count in ranking.rejected.items())


def test_counts_travel_with_an_artifact(executable: tilewright.Executable, tmp_path: Path) -> None:
    executable.save(tmp_path / "model")
    image = artifact.read(tmp_path / "model")
    assert [region.space for region in image.program.regions] == [row.space for row in executable.plan.rows]
    assert explanation(image) == explanation(executable.image)


@pytest.mark.parametrize(
    ("space", "why"),
    [
        ({"feasible": -1, "rejected": {}}, "space.feasible is -1"),
        ({"feasible": 1, "rejected": {"why": -1}}, "space.rejected.why is -1"),
        ({}, "has no"),
    ],
)
def test_wrong_counts_are_refused(executable: tilewright.Executable, tmp_path: Path, space: dict[str, Any], why: str) -> None:
    executable.save(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "manifest.json").read_text())["program"]["regions"][0]["space"]["feasible"] > 0
    rewrite_manifest(tmp_path / "model", lambda m: m["program"]["regions"][0].update(space=space))
    with pytest.raises(InvalidArtifact, match=why):
        artifact.read(tmp_path / "model")


def test_a_loop_counts_the_spaces_of_its_steps() -> None:
    executable = tilewright.compile(Stepwise(), (torch.randn(5, 2, 4),))
    loop = next(row for row in executable.plan.rows if row.repeat > 1)
    assert loop.space.feasible > 1
