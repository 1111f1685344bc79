"""The sealed set: its problems, the guard, and a whole run with stand-in processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import sealed_set
from bench.choice_quality import SHIPPED
from tests.fake_workers import seconds as seconds_of
from tests.measured_layers import layer, measured
from tests.stand_ins import H200, processes
from tilewright.selection.choice import rank
from tilewright.tuning import dataset, serialisation
from tilewright.tuning.sampling import JUDGED, bare
from tilewright.tuning.workloads import Convolution, text_of, workload_of

COMMIT = "0123456789"


@pytest.fixture
def frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of training data, in a folder that takes the place of bench/results; the tree is at COMMIT."""
    monkeypatch.setattr("bench.common.RESULTS", tmp_path)
    monkeypatch.setattr("bench.common.git_commit", lambda: COMMIT)
    monkeypatch.setattr(sealed_set, "Trials", lambda machine: processes(trial_seconds=60.0))
    path = tmp_path / "train.jsonl.gz"
    dataset.write(path, [measured(layer(32, 32, 8), 4), measured(dataset.layer_of(Convolution(1, 16, 16, (5, 5), (1, 1), then="relu")), 4)])
    return path


def run(monkeypatch: pytest.MonkeyPatch, path: Path, *arguments: str) -> dict[str, Any]:
    small = ["--classes=groups,first", "--each=1", "--top=3", "--evenly=4", "--again=3", "--rounds=5"]
    place = ["--trained", str(path), "--data", str(path.parent / "sealed.jsonl.gz"), "--name=sealed"]
    monkeypatch.setattr(sys, "argv", ["x", "--seed=7", *place, *small, *arguments])
    sealed_set.main()
    found: dict[str, Any] = json.loads((path.parent / "sealed.json").read_text())
    return found


def test_ten_of_each_class_and_none_that_was_trained_with(frozen: Path) -> None:
    first = sealed_set.drawn(3, [frozen], sealed_set.CLASSES, 10)
    assert len(first) == 60 and {list(first.values()).count(name) for name in sealed_set.CLASSES} == {10}
    assert not {bare(workload_of(text)) for text in first} & JUDGED
    text = next(text for text, name in first.items() if name == "3x3")
    dataset.append(frozen, measured({"name": text}, 4))
    again = sealed_set.drawn(3, [frozen], sealed_set.CLASSES, 10)
    assert text not in again and len(again) == 60


def test_a_run_measures_the_first_of_every_ranking_and_judges_them(frozen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch, frozen)
    assert found["settings"]["seed"] == 7 and found["settings"]["not sealed because"] is None and found["commit"] == COMMIT
    rows = {(row["class"], row["layer"], row["way"]): row for row in found["results"]}
    entries = dataset.read(frozen.parent / "sealed.jsonl.gz")
    assert len(entries) == 2
    losses = []
    for entry in entries:
        name = str(entry.layer["name"])
        times = entry.times()
        first = rank(dataset.layer_problem(entry.layer), H200).first().schedule
        loss = seconds_of(serialisation.schedule_text(first)) / min(map(seconds_of, times)) - 1
        row = next(row for (_, text, way), row in rows.items() if text == name and way == SHIPPED)
        assert row["lop@1"] == pytest.approx(loss, rel=1e-2, abs=1e-2)
        losses.append(row["lop@1"])
        assert max(columns["rounds"].max() for columns in entry.schemas.values()) == 5
    assert rows["all", "all", SHIPPED]["lop@1"] == pytest.approx(sum(losses) / 2)
    assert rows["all", "all", SHIPPED]["worst lop@1"] == max(losses) and rows["groups", "all", SHIPPED]["layers"] == 1


def test_a_seed_is_used_once(frozen: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, frozen)
    data = frozen.parent / "sealed.jsonl.gz"
    before = data.read_bytes()
    for arguments, reason in (
        ((), f"were measured at commit {COMMIT}"),
        (("--seed=8",), "holds measurements"),
        (("--seed=8", "--resume"), "no run of seed 8"),
    ):
        with pytest.raises(SystemExit):
            run(monkeypatch, frozen, *arguments)
        assert reason in capsys.readouterr().err
    monkeypatch.setattr("bench.common.git_commit", lambda: f"{COMMIT}+changes")
    with pytest.raises(SystemExit):
        run(monkeypatch, frozen, f"--data={data.parent / 'other'}", "--seed=9")
    assert "not frozen" in capsys.readouterr().err
    assert data.read_bytes() == before
    assert "not frozen" in run(monkeypatch, frozen, "--unsealed")["settings"]["not sealed because"]


@pytest.mark.slow
def test_an_interrupted_run_goes_on(frozen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(monkeypatch, frozen)["results"]
    data = frozen.parent / "sealed.jsonl.gz"
    entries = dataset.read(data)
    for kept in (data.read_bytes()[:-40], data.read_bytes()[:300]):  # in the last repetition, in the first problem
        data.write_bytes(kept)
        assert run(monkeypatch, frozen, "--resume")["results"] == whole
        assert [(entry.layer, entry.times()) for entry in dataset.read(data)] == [(entry.layer, entry.times()) for entry in entries]
    assert text_of(workload_of(str(entries[0].layer["name"]))) == entries[0].layer["name"]
