"""Products on tile registers and the learned part of the ranking on CPUs: collected, trained with, judged, and fitted to; times are made up."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import cpu_choice, cpu_constants, operators
from bench import cpu_learned as training
from bench.layers import LAYERS
from tests.measured_layers import outcome
from tilewright.errors import InvalidModel
from tilewright.hardware import calibration, machine
from tilewright.hardware.calibration import cpu_calibration
from tilewright.ir.problem import Problem
from tilewright.kernels.cpu.amx.schema import AMX
from tilewright.kernels.cpu.contraction.schema import CONTRACTION
from tilewright.kernels.schema import Form, Options, form_of
from tilewright.selection.choice import candidates, rank
from tilewright.selection.learned import cpu as learned
from tilewright.selection.learned.cpu import build_of, corrected, record, share_for, units_of
from tilewright.selection.learned.forest import Forest, fit, save
from tilewright.selection.ranking import Ranking
from tilewright.tuning import serialisation
from tilewright.tuning.trials import Job, Outcome

XEON = machine("xeon-sapphire-rapids")
NAMES = ("block:64,32,14,1,1,1", "linear:49,64,96,0", "product:4,49,32,64", "conv2d:48,16,14,14,3,1")


@lru_cache(maxsize=16)
def problem(name: str) -> Problem:
    return cpu_choice.problem(name, XEON, 2, "bf16")


def ranking_of(name: str, threads: int = 2) -> Ranking:
    return rank(problem(name), XEON, threads, learned=False)


def line(name: str, factor: Any = 1.0, precision: str = "bf16") -> dict[str, Any]:
    """Times of all candidates of a problem: the modelled ones by a factor."""
    ranking = ranking_of(name) if precision == "bf16" else rank(cpu_choice.problem(name, XEON, 2), XEON, 2, learned=False)
    times = dict(zip(map(serialisation.schedule_text, ranking.schedules()), (ranking.seconds * factor).tolist(), strict=True))
    return {"layer": name, "machine": serialisation.encode(XEON), "threads": 2, "beside": 1, "precision": precision, "times": times}


def written(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_bytes(gzip.compress("".join(json.dumps(each) + "\n" for each in lines).encode()))
    return path


def more_for_few_channels(name: str) -> np.ndarray:
    """Twice the modelled time for blocks of one tile of channels."""
    return np.where(ranking_of(name).parts[0].candidates["channel_tiles"] == 1, 2.0, 1.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small forests."""
    monkeypatch.setattr(training, "OPTIONS", {"max_iter": 25, "learning_rate": 0.3, "max_leaf_nodes": 6, "min_samples_leaf": 2})
    monkeypatch.setattr(training, "FORESTS", 1)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The place of the forest, in a folder of the test's own."""
    for module in (learned, cpu_choice):
        monkeypatch.setattr(module, "MODEL", tmp_path / "cpu.npz")
    yield tmp_path / "cpu.npz"
    learned.trained.cache_clear()


def stored(forest: Forest, builds: Sequence[Sequence[Any]]) -> None:
    """Puts the forest, with the builds that it was trained for, where it is read."""
    save(forest, learned.MODEL, {"builds": builds})
    learned.trained.cache_clear()


def any_forest() -> Forest:
    return fit("gradient_boosting", np.zeros((8, 1), np.float32), np.arange(8.0), None, ("calls",), learned.VERSION, {"max_iter": 2})


@pytest.mark.parametrize("name", NAMES)
def test_problems_in_bfloat16_have_candidates_on_tile_registers_alone(name: str) -> None:
    assert units_of(ranking_of(name)) == {"AMX"} and units_of(rank(cpu_choice.problem(name, XEON, 2), XEON, 2)) == {""}
    assert problem(name).values[problem(name).region.outputs[0]].dtype == "bf16"


def test_a_forest_of_vectors_leaves_tile_registers_to_the_models(model: Path) -> None:
    stored(any_forest(), [["golden-cove", 512, ""]])
    assert share_for(XEON, ("",)) == 1 and share_for(XEON, ("AMX",)) == share_for(XEON, ("", "AMX")) == 0
    for name in NAMES:
        ranking = rank(problem(name), XEON, 2)
        assert ranking.predicted is None and record(ranking.parts[0], XEON, 2) is not None
        assert cpu_choice.favourites_of_forest(ranking, XEON, 2, 3) == []


@pytest.mark.parametrize("name", NAMES)
def test_features_are_finite_and_tell_candidates_apart(name: str) -> None:
    for threads in (1, 3, 16):
        (part,) = ranking_of(name, threads).parts
        columns = record(part, XEON, threads)
        assert columns is not None and all(np.isfinite(column).all() for column in columns.values())
        table = learned.table(columns, tuple(columns))
        assert len(np.unique(table, axis=0)) == len(table)
        assert (columns["tile registers"] <= 1).all() and (columns["rows filled"] <= 1).all() and (columns["channels filled"] <= 1).all()


def test_products_of_one_row_and_empty_sums_are_left_to_the_models() -> None:
    (part,) = ranking_of(NAMES[0]).parts
    for facts in (replace(part.facts, outer=1, rows=1, columns=1), replace(part.facts, steps=0)):
        assert record(replace(part, facts=facts), XEON, 2) is None


def test_filters_that_fill_a_cache_are_told_from_small_ones() -> None:
    """Features in units of caches follow the caches."""
    (part,) = ranking_of(NAMES[0]).parts
    larger = replace(XEON, caches=tuple(replace(cache, bytes=4 * cache.bytes) for cache in XEON.caches))
    one, other = record(part, XEON, 2), record(part, larger, 2)
    assert one is not None and other is not None
    for name in ("panel, level 1", "panel, level 2", "second factor, level 2", "tile, level 1", "rows, level 2"):
        assert np.allclose(one[name], other[name] + 2), name


def test_a_forest_learns_what_the_models_are_off_by_on_tile_registers(quick: None, model: Path) -> None:
    layers = [training.measured(line(name, more_for_few_channels(name))) for name in NAMES]
    assert {layer.build for layer in layers} == {build_of(XEON, "AMX")}
    stored(training.trained(layers), [build_of(XEON, "AMX")])
    assert share_for(XEON, ("AMX",)) == 1 and share_for(XEON, ("",)) == 0
    for name in NAMES:
        ranking, found = ranking_of(name), corrected(ranking_of(name), XEON, 2)
        ratio = found.seconds / ranking.seconds
        few = more_for_few_channels(name) > 1
        if few.all():
            continue
        assert ratio[few].mean() / ratio[~few].mean() == pytest.approx(2.0, rel=0.1)
    other = replace(XEON, pipeline="zen4")
    assert share_for(other, ("AMX",)) == 0 and corrected(ranking_of(NAMES[0]), other, 2).predicted is None
    forest = training.trained(layers)
    stored(forest, [build_of(XEON, "AMX"), ("zen5", 512, "AMX")])
    assert share_for(other, ("AMX",)) == learned.SHARE_ELSEWHERE and corrected(ranking_of(NAMES[0]), other, 2).predicted is not None


def without_alone(name: str) -> Ranking:
    """The candidates on tile registers beside those on vectors."""
    form = form_of(CONTRACTION, problem(name), XEON)
    assert isinstance(form, Form)
    return candidates(ranking_of(name), CONTRACTION, form.facts, Options(2))


def test_candidates_of_both_units_compare_where_both_were_measured(quick: None, model: Path) -> None:
    """Kernels on vectors take a hundredth of the modelled time: the forest ranks them before those on tile registers."""
    names = (NAMES[0], NAMES[1], NAMES[3])  # not the smallest, for which the models rank vectors first
    layers = []
    for name in names:
        both = without_alone(name)
        seconds = both.seconds * np.repeat([1.0, 0.01], [len(part.estimate.seconds) for part in both.parts])
        layers.append(replace(training.measured(line(name)), ranking=both, seconds=seconds))
    forest = training.trained(layers)
    stored(forest, [["golden-cove", 512, ""], ["golden-cove", 512, "AMX"]])
    for name in names:
        both = without_alone(name)
        assert units_of(both) == {"", "AMX"} and both.first().schema is AMX
        assert corrected(both, XEON, 2).first().schema is CONTRACTION
    stored(forest, [["golden-cove", 512, ""]])
    assert corrected(without_alone(NAMES[0]), XEON, 2).predicted is None


def test_builds_of_other_forms_are_refused(model: Path) -> None:
    for builds in ([["golden-cove", 512, "AMX", "more"]], [["golden-cove"]], [["golden-cove", "wide"]]):
        stored(any_forest(), builds)
        with pytest.raises(InvalidModel):
            share_for(XEON, ("",))


def test_tile_registers_are_left_out_as_a_machine_of_their_own(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """No forest without the judged layer's machine has seen tile registers, so that none is judged."""
    monkeypatch.setattr(training, "MODEL", model)
    monkeypatch.setattr("bench.common.RESULTS", tmp_path)
    seen: list[set[Any]] = []
    real = training.trained

    def watched(layers: Sequence[training.Measured]) -> Forest:
        seen.append({layer.build for layer in layers})
        return real(layers)

    monkeypatch.setattr(training, "trained", watched)
    vectors = [line(name, precision="fp32") for name in NAMES[:2]]
    data = written(tmp_path / "random.jsonl.gz", *vectors, *(line(name, more_for_few_channels(name)) for name in NAMES))
    judge = written(tmp_path / "judged.jsonl.gz", line("B7"))
    arguments = ["cpu_learned", "--data", str(data), "--judge", str(judge), "--name", "found"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--write"])
    training.main()
    assert seen == [{build_of(XEON), build_of(XEON, "AMX")}]
    means = [row for row in json.loads((tmp_path / "found.json").read_text())["results"] if row["layer"] == "all"]
    assert {row["machine"] for row in means} == {"golden-cove (AMX), 2 threads"}
    assert {row["ranked by"] for row in means} == {"models", "models and forest"}
    learned.trained.cache_clear()
    assert share_for(XEON, ("", "AMX")) == 1
    monkeypatch.setattr(sys, "argv", [*arguments, "--folds", "2"])
    training.main()
    rows = json.loads((tmp_path / "found.json").read_text())["results"]
    assert {(row["machine"], row["problems"]) for row in rows if row["machine"].endswith("all")} == {
        ("golden-cove, all", 2),
        ("golden-cove (AMX), all", 4),
    }


class Instead:
    """In place of trials: candidates take the modelled time, and those of a `broken` problem fail."""

    broken = ""

    def __init__(self, target: object, threads: int) -> None:
        self.threads = threads

    def __enter__(self) -> Instead:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def measure(self, jobs: Sequence[Job], mode: str) -> Iterator[Outcome]:
        choices = rank(jobs[0].problem, XEON, self.threads, learned=False)
        for job in jobs:
            choice = choices.find(job.schedule)
            assert choice is not None
            fails = self.broken and job.problem.region.flops() == problem(self.broken).region.flops()
            yield Outcome(job, "failed", "no permission", schedule=str(job.schedule)) if fails else outcome(job, choice.seconds)

    def remeasure(self, jobs: Sequence[Job], rounds: int, mode: str) -> list[Outcome]:
        return list(self.measure(jobs, mode))


@pytest.fixture
def collect(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cpu_choice, "Trials", Instead)
    monkeypatch.setattr(cpu_choice, "find_machine", lambda name: XEON)

    def called(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["cpu_choice", "--top", "3", "--evenly", "3", "--again", "2", *arguments])
        cpu_choice.main()

    return called


def test_measurements_on_tile_registers_are_collected_in_parts(collect: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiles.jsonl.gz"
    common = ("--precision", "bf16", "--data", str(path), "--resume")
    collect(*NAMES[:2], *common)
    collect(*NAMES[:3], *common, "--seconds", "0")
    assert "1 problems are left" in capsys.readouterr().out
    collect(*NAMES[:3], *common)
    lines = cpu_choice.lines(path)
    assert [line["layer"] for line in lines] == list(NAMES[:3]) and {line["precision"] for line in lines} == {"bf16"}
    for entry in lines:
        layer = training.measured(entry)
        assert layer.unit == "AMX" and np.isfinite(layer.seconds).sum() == len(entry["times"]) >= 3
    for arguments in (("--threads", "1"), ("--precision", "fp32")):
        with pytest.raises(SystemExit):
            collect(*NAMES[:3], *common, *arguments)
        assert "has lines with other options" in capsys.readouterr().err
    assert cpu_choice.lines(path) == lines


def test_several_problems_are_measured_at_a_time(collect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[set[int]] = []
    monkeypatch.setattr(cpu_choice, "separate_cores", lambda: [2, 4, 6, 8])
    monkeypatch.setattr("os.sched_setaffinity", lambda process, cores: given.append(cores))
    path = tmp_path / "tiles.jsonl.gz"
    collect(*NAMES, "--precision", "bf16", "--beside", "2", "--data", str(path))
    assert {line["layer"] for line in cpu_choice.lines(path)} == set(NAMES) and {line["beside"] for line in cpu_choice.lines(path)} == {2}
    assert 1 <= len(given) <= 2 and all(cores in ({2, 4}, {6, 8}) for cores in given)
    with pytest.raises(SystemExit):
        collect(NAMES[0], "--precision", "bf16", "--beside", "3")


def test_a_problem_of_which_nothing_runs_is_reported_and_has_no_line(
    collect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Instead, "broken", NAMES[0])
    path = tmp_path / "tiles.jsonl.gz"
    collect(*NAMES[:2], "--precision", "bf16", "--data", str(path))
    assert f"{NAMES[0]}: nothing could be measured: no permission" in capsys.readouterr().out
    assert [line["layer"] for line in cpu_choice.lines(path)] == [NAMES[1]]


def test_what_tile_registers_do_not_suit_is_refused_or_left_out(
    collect: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = "conv2d:32,1,14,14,3,1"
    for arguments, reason in (
        (["W1"], "no candidates on tile registers for W1"),
        ([odd], "no candidates on tile registers"),
        (["R2", "--only", "direct"], "--only is for float32"),
    ):
        with pytest.raises(SystemExit):
            collect(*arguments, "--precision", "bf16")
        assert reason in capsys.readouterr().err
    monkeypatch.setattr(cpu_choice, "drawn_names", lambda *_: [odd, NAMES[1]])
    collect("--random", "2", "--precision", "bf16")
    assert f"{odd}: left out" in capsys.readouterr().out
    monkeypatch.setattr(cpu_choice, "find_machine", lambda name: machine("x86-avx512"))
    with pytest.raises(SystemExit):
        collect(NAMES[0], "--precision", "bf16")
    assert "needs AVX512-BF16" in capsys.readouterr().err


def test_judged_problems_are_convolutions_and_products() -> None:
    judged = {**operators.PRODUCTS, **LAYERS}
    assert len(judged) == 28
    for name in ("R1", "R12", "B6"):  # three channels, and an odd extent of the sum
        assert units_of(rank(cpu_choice.problem(name, XEON, 2, "bf16"), XEON, 2)) == {"AMX"}


def test_constants_are_found_again() -> None:
    present = cpu_calibration(XEON)
    wanted = {("amx", "product_cycles"): 24.0, ("amx", "epilogue_cycles"): 7.0, ("amx", "block_cycles"): 160.0, ("amx", "strided"): 2.5}
    layers = []
    for name in NAMES:
        (part,) = ranking_of(name).parts
        layer = training.measured(line(name))
        sample = cpu_constants.Sample(layer, part, layer.seconds, np.ones(len(layer.seconds)))
        layers.append(replace(layer, seconds=sample.predicted(wanted)))
    samples = cpu_constants.samples_of(layers, "amx")
    assert samples and cpu_constants.samples_of(layers, "contraction") == []
    found = cpu_constants.fitted(samples, "amx", 1e-5, 60)
    for sample in samples:
        np.testing.assert_allclose(sample.predicted(found), sample.seconds, rtol=0.03)
        assert np.abs(np.log(sample.seconds / sample.predicted({}))).max() > 0.1
    assert found["amx", "block_cycles"] == pytest.approx(160.0, rel=0.3)
    kept = cpu_constants.fitted(samples, "amx", 1e3, 20)
    assert kept == {("amx", name): pytest.approx(value, rel=0.02) for name, value in asdict(present.amx).items()}


def test_fitted_constants_are_judged_and_written_with_their_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = written(tmp_path / "data.jsonl.gz", *(line(name, 1.5) for name in NAMES))
    folder = Path(shutil.copytree(calibration.FOLDER, tmp_path / "calibration"))
    original = json.loads((folder / "golden-cove.json").read_text())
    monkeypatch.setattr("bench.common.RESULTS", tmp_path)
    monkeypatch.setattr(cpu_constants, "git_commit", lambda: "0123456789abcdef")
    common = ["cpu_constants", "--fit", "amx", "--data", str(data), "--evaluations", "4"]
    monkeypatch.setattr(sys, "argv", [*common, "--folds", "2"])
    cpu_constants.main()
    present, fitted, *folds = json.loads((tmp_path / "cpu_constants_amx.json").read_text())["results"]
    assert present["problems"] == fitted["problems"] == 4 and present["loss"] == 0 and sum(fold["problems"] for fold in folds) == 4
    monkeypatch.setattr(calibration, "FOLDER", folder)
    monkeypatch.setattr(sys, "argv", [*common, "--write"])
    cpu_constants.main()
    content = json.loads((folder / "golden-cove.json").read_text())
    assert content["fits"]["amx"]["commit"] == "0123456789ab" and content["fits"]["amx"]["data"] == [str(data)]
    assert content["parts"]["amx"] != original["parts"]["amx"] and content["parts"]["contraction"] == original["parts"]["contraction"]
    written(tmp_path / "judged.jsonl.gz", line("B7"))
    monkeypatch.setattr(sys, "argv", [*common[:-3], str(tmp_path / "judged.jsonl.gz")])
    with pytest.raises(SystemExit):
        cpu_constants.main()
    assert "on which models are evaluated" in capsys.readouterr().err
