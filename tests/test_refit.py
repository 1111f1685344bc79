"""Fitting constants of the analytical models: known constants are found again, judged layers are refused, and files keep their form."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import refit as command
from bench.layers import layer as judged_layer
from tests.measured_layers import H200, layer, measured, some
from tilewright.hardware import calibration
from tilewright.hardware.calibration import GpuCalibration, assumed, gpu_calibration, parts_of
from tilewright.tuning import dataset, refit
from tilewright.tuning.collecting import ranking_of
from tilewright.tuning.workloads import Elementwise, Linear, Rows, Workload

PARTS = ("winograd", "gemm")


@pytest.fixture(scope="module")
def groups() -> list[refit.Group]:
    return refit.groups_of(some(6, 60), H200)


def other() -> GpuCalibration:
    """The machine's constants, two of them changed."""
    present = gpu_calibration(H200)
    return replace(present, winograd=replace(present.winograd, later_launch=0.7), gemm=replace(present.gemm, fragment_wavefronts=2.4))


def timed(groups: list[refit.Group], constants: GpuCalibration) -> list[refit.Group]:
    """The groups with the times that the models predict with these constants."""
    times = refit.predicted(groups, H200, constants)
    best = {number: min(float(own.min()) for group, own in zip(groups, times, strict=True) if group.layer == number) for number in range(6)}
    return [replace(group, seconds=own, weight=best[group.layer] / own) for group, own in zip(groups, times, strict=True)]


def test_assumed_constants_hold_inside() -> None:
    before = ranking_of(dataset.layer_problem(layer(32, 32, 8)), H200).seconds
    with assumed(H200, other()):
        assert gpu_calibration(H200) == other()
        assert not np.array_equal(ranking_of(dataset.layer_problem(layer(32, 32, 8)), H200).seconds, before)
        with assumed(H200, gpu_calibration(H200)):
            pass
        assert gpu_calibration(H200) == other()
    assert np.array_equal(ranking_of(dataset.layer_problem(layer(32, 32, 8)), H200).seconds, before)


def test_constants_are_found_again(groups: list[refit.Group]) -> None:
    found = refit.fitted(timed(groups, other()), H200, PARTS, 1e-4, 12)
    wanted = refit.values_of(other(), PARTS)
    assert refit.values_of(found, PARTS) == {name: pytest.approx(value, rel=0.02) for name, value in wanted.items()}
    assert found.steps == gpu_calibration(H200).steps, "parts that were not named stay"
    kept = refit.fitted(timed(groups, other()), H200, PARTS, 1e3, 12)
    assert refit.values_of(kept, PARTS) == {
        name: pytest.approx(value, rel=0.02) for name, value in refit.values_of(gpu_calibration(H200), PARTS).items()
    }


STREAMING: dict[str, Workload] = {"map": Elementwise(2, 64, (28, 28)), "row_reduction": Rows(300, 700), "gemv": Linear(1, 1024, 4096)}


@pytest.mark.parametrize("part", STREAMING)
def test_streaming_schemas_are_fitted_too(part: str) -> None:
    present = gpu_calibration(H200)
    factors = {
        "latency": 1.7,
        "memory": 1.3,
        "issue": 2.2,
        "level_2": 1.5,
        "block_cycles": 1.6,
        "tree": 1.4,
        "kept_share": 0.8,
        "line_cycles": 1.8,
        "split": 1.3,
    }
    slower = refit.with_values(present, {name: factors[name[1]] * value for name, value in refit.values_of(present, [part]).items()})
    found = refit.groups_of([measured(dataset.layer_of(STREAMING[part]), 80)], H200)
    (group,) = [group for group in found if group.kind in refit.USES[part] and len(group.seconds)]
    (times,) = refit.predicted([group], H200, slower)
    exact = replace(group, seconds=times, weight=times.min() / times)
    again = refit.fitted([exact], H200, [part], 1e-6, 30)
    np.testing.assert_allclose(refit.predicted([exact], H200, again)[0], times, rtol=0.05)
    assert np.abs(np.log(times / refit.predicted([exact], H200, present)[0])).max() > 0.1


def test_quality_is_that_of_the_order(groups: list[refit.Group]) -> None:
    exact = timed(groups, other())
    found = command.judged(exact, H200, {"present": gpu_calibration(H200), "right": other()})
    assert found["right, all"]["lop@1"] == 0 and found["right, all"]["error"] == pytest.approx(0)
    assert found["present, all"]["error"] > 0 and found["present, all"]["spearman"] < 1 == pytest.approx(found["right, all"]["spearman"])
    assert found["present, direct"]["error"] == pytest.approx(0), "neither constant concerns it"


def test_samples_are_the_better_candidates(groups: list[refit.Group]) -> None:
    chosen = refit.some_of(groups, 4, 5)
    kinds = [group.kind for group in chosen]
    assert max(kinds.count(kind) for kind in set(kinds)) == 4 and max(len(group.seconds) for group in chosen) == 5
    assert min(group.weight.min() for group in chosen) > refit.LEAST_QUALITY > min(group.weight.min() for group in groups)


def test_judged_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="R9 is a layer on which models are evaluated"):
        command.groups_of([measured(judged_layer("R9"), 8)], H200)


def test_files_keep_their_form() -> None:
    for path in calibration.FOLDER.glob("*00.json"):
        assert command.text_of(json.loads(path.read_text())) == path.read_text()


def run(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["x", *map(str, arguments), "--parts=winograd,gemm", "--layers=4", "--each=8", "--evaluations=4"])
    command.main()


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    data, folder = tmp_path / "data.jsonl.gz", tmp_path / "calibration"
    dataset.write(data, some(6, 40))
    monkeypatch.setattr("bench.common.RESULTS", tmp_path)
    run(monkeypatch, data, "--folds=2", "--name=found")
    *averages, first, second = json.loads((tmp_path / "found.json").read_text())["results"]
    assert (
        "fold 1 of 2" in capsys.readouterr().out and first["layers"] + second["layers"] == 6 and set(first["fitted"]) >= {"gemm.fragment_wavefronts"}
    )
    whole = next(row for row in averages if (row["constants"], row["schema"]) == ("fitted", "all"))
    each = [row["quality"]["fitted, all"]["lop@1"] for row in (first, second)]
    assert whole["lop@1"] == pytest.approx((each[0] * first["layers"] + each[1] * second["layers"]) / 6)
    folder.mkdir()
    for path in calibration.FOLDER.glob("*.json"):
        (folder / path.name).write_text(path.read_text())
    monkeypatch.setattr(calibration, "FOLDER", folder)
    monkeypatch.setattr(command, "git_commit", lambda: "0123456789abcdef+changes")
    with pytest.raises(SystemExit, match="commit the changes first"):
        run(monkeypatch, data, "--write")
    monkeypatch.setattr(command, "git_commit", lambda: "0123456789abcdef")
    before = json.loads((folder / "h200.json").read_text())
    run(monkeypatch, data, "--write")
    after = json.loads((folder / "h200.json").read_text())
    assert after["fits"]["training data of 0123456789ab"]["data"] == [str(data)] and "winograd" not in after["fits"]
    assert {part for part in after["parts"] if after["parts"][part] != before["parts"][part]} == set(PARTS)
    assert parts_of(folder / "h200.json") is not None
