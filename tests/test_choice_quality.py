"""Figures of choices: handmade orders and times with known losses and trials, unmeasured or failed candidates, and the command."""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import choice_quality
from bench.choice_quality import figures, judge_pool, judge_space, places, summaries
from bench.model_comparison import file_of
from tests.bare_schemas import part
from tests.bare_schemas import ranking_of as bare_ranking
from tilewright.hardware import machine as find_machine
from tilewright.hardware.calibration import gpu_calibration
from tilewright.kernels.gpu.direct.schedule import DirectSchedule
from tilewright.kernels.gpu.gemm.space import ContractionSchedule
from tilewright.kernels.gpu.gemv.space import GemvSchedule
from tilewright.selection.learned.hybrid import Recipe, train
from tilewright.selection.ranking import Ranking
from tilewright.tuning import dataset
from tilewright.tuning.collecting import ranking_of
from tilewright.tuning.training import samples

NAN, INF = float("nan"), float("inf")


def test_an_order_of_what_was_all_measured() -> None:
    seconds = np.array([2.0, 1.0, 1.04, 4.0, 1.005])
    found = figures(np.array([3, 0, 2, 4, 1]), seconds, 1.0)
    assert [found[f"lop@{top}"] for top in (1, 10, 30, 100)] == [3.0, 0.0, 0.0, 0.0]
    assert [found[f"trials_{share}"] for share in (95, 99, 100)] == [3, 4, 5]
    assert (found["last"], found["sure"], found["not measured of 30"], found["not measured of 100"]) == (5, 5, 0, 0)


def test_what_was_not_measured_or_failed_reaches_nothing() -> None:
    seconds = np.array([NAN, INF, 1.2, NAN, 1.04, NAN])
    found = figures(np.arange(6), seconds, 1.0)
    assert found["lop@1"] is None and found["lop@10"] == pytest.approx(0.04)
    assert (found["trials_95"], found["trials_99"], found["trials_100"]) == (5, None, None)
    assert (found["last"], found["sure"], found["not measured of 30"]) == (5, 0, 3)
    failed_first = figures(np.array([1, 2, 0, 3, 4, 5]), seconds, 1.0)
    assert failed_first["lop@1"] is None and failed_first["sure"] == 2


def test_missing_candidates_are_counted_within_the_first_only() -> None:
    seconds = np.r_[np.full(20, 2.0), np.full(30, NAN), 1.0, np.full(60, NAN)]
    found = figures(np.arange(111), seconds, 1.0)
    assert (found["not measured of 30"], found["not measured of 100"]) == (10, 79)
    assert (found["lop@10"], found["lop@30"], found["lop@100"]) == (1.0, 1.0, 0.0)
    assert (found["trials_95"], found["sure"]) == (51, 20)


def schedule_columns(kind: type, count: int, **axes: list[int]) -> dict[str, np.ndarray]:
    """Columns of all axes; those not given are 1."""
    return {name: np.array(axes.get(name, [1] * count)) for name in (field.name for field in fields(kind))}


def synthetic() -> tuple[Ranking, dataset.MeasuredLayer]:
    """Two schemas of six and four candidates; five measured, one of them outside the space and faster than all others."""
    one = schedule_columns(ContractionSchedule, 6, block_m=[8, 16, 32, 8, 16, 32], block_n=[8, 8, 8, 16, 16, 16])
    two = schedule_columns(DirectSchedule, 4, register_k=[1, 2, 4, 8])
    ranking = bare_ranking(
        part(ContractionSchedule, one, [5.0, 1.0, 6.0, 7.0, 3.0, 8.0]),
        part(GemvSchedule, schedule_columns(GemvSchedule, 1), [99.0]),
        part(DirectSchedule, two, [2.0, 9.0, 4.0, 10.0]),
    )
    measured = {
        "ContractionSchedule": schedule_columns(ContractionSchedule, 3, block_m=[32, 16, 64], block_n=[16, 8, 64]),
        "DirectSchedule": schedule_columns(DirectSchedule, 2, register_k=[4, 1]),
    }
    times = {"ContractionSchedule": [8e-6, 4e-6, 1e-6], "DirectSchedule": [2e-6, 3e-6]}
    for kind, columns in measured.items():
        count = len(times[kind])
        columns |= {"seconds": np.array(times[kind]), "spread": np.zeros(count), "rounds": np.ones(count, dtype=np.int64)}
    layer = {"name": "L", "outputs": 1, "channels": 1, "height": 1, "width": 1, "filter": 1, "stride": 1}
    failed = str(ranking.choice(4).schedule)
    return ranking, dataset.MeasuredLayer(layer, "h200", measured, ((failed, "wrong: result"),))


def test_measured_candidates_are_found_in_the_space() -> None:
    ranking, measured = synthetic()
    assert places(ranking, measured).tolist() == [5, 1, -1, 9, 7]


def test_an_axis_that_the_space_leaves_out_has_its_default() -> None:
    ranking, measured = synthetic()
    first = ranking.parts[0]
    (name, default), *_ = [(axis.name, axis.default) for axis in fields(ContractionSchedule) if axis.default is not MISSING]
    fewer = replace(first, candidates={axis: column for axis, column in first.candidates.items() if axis != name})
    columns = dict(measured.schemas["ContractionSchedule"])
    columns[name] = np.array([default + 1, default, default])
    layer = replace(measured, schemas={"ContractionSchedule": columns})
    assert places(bare_ranking(fewer), layer).tolist() == [-1, 1, -1]


def test_the_order_of_a_space() -> None:
    ranking, measured = synthetic()
    # in the analytical order: measured at 4, 3 us, failed, 2 us, not measured (4), 8 us, not measured (2)
    (row,) = judge_space(measured, ranking, {"one": np.argsort(ranking.seconds)})
    assert row["lop@1"] == pytest.approx(3.0) and row["lop@10"] == pytest.approx(1.0)
    assert (row["trials_95"], row["last"], row["sure"], row["not measured of 100"]) == (None, 8, 4, 6)
    assert (row["chosen schema"], row["best schema"]) == ("bare", "contraction")
    assert (row["chosen us"], row["best us"], row["candidates"], row["tried"]) == (pytest.approx(4), pytest.approx(1), 11, 5)


def test_the_order_of_the_measured_pool() -> None:
    ranking, measured = synthetic()
    order = np.argsort(ranking.seconds)
    rows = {row["way"]: row for row in judge_pool(measured, ranking, {"one": order, "two": order[::-1]})}
    # the best of the four candidates in the space takes 2 us, and is third in the order
    assert rows["one"]["lop@1"] == pytest.approx(1.0) and rows["one"]["trials_100"] == 3 and rows["one"]["candidates"] == 4
    assert rows["two"]["lop@1"] == pytest.approx(3.0) and rows["two"]["trials_100"] == 2
    assert 2 <= rows["random order"]["trials_100"] <= 3 and rows["random order"]["lop@10"] == 0


def test_means_over_layers() -> None:
    common = {"over": "space", "way": "w"}
    first = figures(np.arange(3), np.array([1.1, 1.0, 2.0]), 1.0)
    second = figures(np.arange(3), np.array([NAN, 1.04, 1.0]), 1.0)
    third = figures(np.arange(3), np.array([1.5, 1.2, NAN]), 1.0)
    (mean,) = summaries([{**common, **row} for row in (first, second, third)])
    assert mean["layers"] == 3 and mean["lop@1"] is None and mean["lop@10"] == pytest.approx(0.2 / 3) and mean["median lop@10"] == 0
    # 2, 2, and none of three, of which the second was the last measured
    assert mean["trials_95"] == 2 and mean["unreached trials_95"] == 1 and mean["bounds trials_95"] == 1
    assert mean["trials_100"] == pytest.approx(7 / 3) and mean["median trials_100"] == 2
    assert mean["not measured of 30"] == 2


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    machine = find_machine("h200")
    layer = {"name": "tiny", "outputs": 64, "channels": 16, "height": 7, "width": 7, "filter": 1, "stride": 1}
    ranking = ranking_of(dataset.layer_problem(layer), machine)
    order = np.argsort(ranking.seconds, kind="stable")
    schemas: dict[str, dict[str, list[Any]]] = {}
    for position in (*order[:120], *order[500::400]):  # times of the analytical model: its choice is the best
        choice = ranking.choice(int(position))
        columns = schemas.setdefault(type(choice.schedule).__name__, {})
        values = {name: getattr(choice.schedule, name) for name in choice.schedule.__dataclass_fields__}
        for name, value in {**values, "seconds": choice.seconds, "spread": 0.0, "rounds": 1}.items():
            columns.setdefault(name, []).append(value)
    arrays = {kind: {name: np.array(column) for name, column in columns.items()} for kind, columns in schemas.items()}
    measured = dataset.MeasuredLayer(layer, "h200", arrays)
    dataset.write(tmp_path / "layers.jsonl.gz", [measured])
    rows, _ = samples([measured], machine)
    train(rows, machine, Recipe(record="candidate", options={"max_iter": 3}), gpu_calibration(machine).counted).save(file_of(tmp_path, "ours"))
    monkeypatch.setattr("bench.common.RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path / "layers.jsonl.gz"), "--models", str(tmp_path), "--repeats=1", "--name=found"])
    choice_quality.main()
    results = json.loads((tmp_path / "found.json").read_text())["results"]
    named = {(row["layer"], row["over"], row["way"]): row for row in results}
    for key in (("tiny", "space", "analytical"), ("tiny", "measured", "analytical")):
        assert [named[key][f"lop@{top}"] for top in (1, 10, 30, 100)] == [0.0] * 4
        assert [named[key][f"trials_{share}"] for share in (95, 99, 100)] == [1] * 3 and named[key]["not measured of 100"] == 0
    assert ("tiny", "space", "ours") in named and named["tiny", "space", "analytical"]["milliseconds"] > 0
    assert named["all", "measured", "random order"]["lop@1"] > 0
    assert "random order" in capsys.readouterr().out
