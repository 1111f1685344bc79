"""``tilewright tune`` on this machine, and ``tilewright records``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import tilewright
from tests.stand_ins import FAILURE, OTHER, SMALL, measurement
from tilewright import cli_output
from tilewright.cli import main
from tilewright.cli_tune import _table
from tilewright.compile import read
from tilewright.graph.passes import simplify
from tilewright.hardware import host_gpu, machine
from tilewright.kernels.schema import USUAL
from tilewright.partition.judges import ways_of
from tilewright.runtime.plan_text import plan_text
from tilewright.tuning import serialisation
from tilewright.tuning.problems import key_of
from tilewright.tuning.records import Records
from tilewright.tuning.tuning import distinct_problems, expectations, recorded_as

LAYERS = '[{"name": "first", "outputs": 32, "channels": 16, "height": 9, "width": 9, "filter": 3}]'
NATIVE = "native 0123456789ab with 4 threads"


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A terminal of 80 columns, and records and kernels of this test alone."""
    monkeypatch.setattr(cli_output, "PIPE_COLUMNS", 80)
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    place = tmp_path / "records.sqlite"
    with Records(place) as records:
        records.add([measurement(), measurement(position=1, seconds=2e-5, date="2025-01-02T03:04:05.678+00:00")])
        records.add([measurement(position=2, **FAILURE), replace(measurement(OTHER, seconds=3e-6), machine=NATIVE)])
    return place


def out(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines that a command prints; all but those that name a file fit into 80 columns."""
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines if "records.sqlite" not in line), lines
    return lines


def test_records_are_shown_by_machine_region_and_candidate(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, *rows, last = out(capsys, "records", "--records", str(file))
    assert head.split() == ["machine", "regions", "measurements", "failed", "wrong", "first", "last"]
    assert [row.split() for row in rows if row.startswith("h200")] == [["h200", "1", "3", "1", "0", "2025-01-02", "2026-01-02"]]
    assert len(rows) == 2 and last.startswith("4 measurements in ")
    machine, head, row, last = out(capsys, "records", "show", "--machine", "h200", "--records", str(file))
    assert machine == "h200" and row.split()[:3] == [key_of(SMALL)[:12], "contraction", "3"] and row.endswith("10 us        4")
    title, head, *rows, last = out(capsys, "records", "show", "--region", key_of(SMALL)[:8], "--records", str(file))
    assert title == f"{key_of(SMALL)[:12]} (contraction) on h200"
    assert [" ".join(row.split()[-4:-2]) if " us " in row else row.split()[-3] for row in rows] == ["10 us", "20 us", "failed"]
    assert out(capsys, "records", "--records", str(file), "--machine", "a100")[0].startswith("0 measurements in ")


def test_nothing_was_recorded_yet(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["records"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("0 measurements in ") and not shown.err


@pytest.mark.parametrize(
    ("condition", "left"),
    [(["--machine", "native"], 3), (["--region", key_of(SMALL)], 1), (["--failed"], 3), (["--older-than", "30", "--machine", "h200"], 1), (["--all"], 0),
     (["--older-than", "1e9"], 4), (["--machine", "h200", "--failed"], 3)],
)  # fmt: skip
def test_what_is_named_is_forgotten(file: Path, condition: list[str], left: int, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = out(capsys, "records", "forget", *condition, "--records", str(file))
    assert line.startswith(f"{4 - left} measurement{'s' if left != 3 else ''} forgotten, {left} left in ")
    with Records(file) as records:
        assert len(records) == left


def test_nothing_is_forgotten_by_mistake(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["forget"], ["forget", "--all", "--failed"], ["show", "--failed"], ["show", "--all"]):
        assert main(["records", *arguments, "--records", str(file)]) == 2
    assert main(["records", "--records", str(file) + ".missing"]) == 2
    capsys.readouterr()
    with Records(file) as records:
        assert len(records) == 4


@pytest.mark.slow
def test_tuning_takes_the_machine_that_is_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if host_gpu() is not None:
        pytest.skip("there is a GPU here")
    layers = tmp_path / "layers.json"
    layers.write_text(LAYERS)
    lines = out(capsys, "tune", str(layers), "--trials", "2")
    assert lines[0] == "measured on native" and lines[1].split() == [
        "region",
        "measured",
        "best",
        "schedule",
        "predicted",
        "best",
        "favourite",
        "loss",
    ]
    assert lines[2].split()[:2] == ["first", "2"] and lines[3].startswith("1 region: 2 candidates measured, ") and "0 known before" in lines[3]
    assert "2 known before" in out(capsys, "tune", str(layers), "--trials", "2")[-1]
    assert "2 candidates measured" in out(capsys, "tune", str(layers), "--trials", "1", "--again")[-1]


def test_a_tuned_plan_has_measured_times(tmp_path: Path) -> None:
    module, inputs = nn.Conv2d(16, 32, 3, padding=1), (torch.randn(1, 16, 12, 12),)
    executable = tilewright.compile(module, inputs, trials=2, threads=2, records=tmp_path / "records.sqlite")
    row = next(row for row in executable.plan.measured if row.kind == "contraction")
    text = plan_text(executable.plan)
    assert "measured" in text and f"{row.number}  contraction" in text and row.comparison.others[0].measured_seconds is not None
    with Records(tmp_path / "records.sqlite") as records:
        best = next(entry for entry in records.all() if entry.seconds == row.measured_seconds)
        assert best.machine == recorded_as(machine("native"), 2)


def test_strips_of_chains_are_candidates_in_the_table(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Conv2d(32, 96, 1), nn.ReLU(), nn.Conv2d(96, 96, 3, padding=1, groups=96), nn.ReLU(), nn.Conv2d(96, 32, 1))
    graph, _ = simplify(read(module, (torch.randn(1, 32, 56, 56),)).graph)
    here = machine("x86-avx512")
    chain = next(problem for problem in distinct_problems(graph, here, 1) if problem.region.kind == "chain")
    first, second = ways_of(chain, here, 1)[:2]
    texts = [serialisation.schedule_text(strips.schedule) for strips in (first, second)]
    entries = [
        replace(measurement(seconds=seconds), region=key_of(chain), kind="chain", machine=recorded_as(here, 1), schedule=text, description=name)
        for text, name, seconds in zip(texts, ("first", "second"), (3e-4, 2e-4), strict=True)
    ]
    favourite, predicted = expectations(chain, here, 1, entries)
    assert favourite == texts[0] and [predicted[text] for text in texts] == [first.seconds, second.seconds]
    with Records(tmp_path / "records.sqlite") as records:
        records.add(entries)
        *_, line = _table({"1 chain": chain}, here, records, USUAL, 1, 80)
    assert line.split()[:4] == ["1", "chain", "2", "second"] and line.endswith("200 us     300 us  50.0 %")
