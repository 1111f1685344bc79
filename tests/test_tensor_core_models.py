"""Models of products on tensor cores: training problems, features of both families of instructions, the learned part, DeepGEMM's closed form."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from bench import closed_form, sealed_set
from bench.model_comparison import main as compare
from tests.measured_layers import measured
from tests.stand_ins import H200, processes
from tilewright.cli import main
from tilewright.hardware import machine
from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.kernels.gpu.counts import TensorCounts
from tilewright.kernels.gpu.features import RECORDS, TENSOR
from tilewright.kernels.gpu.warpgroup_patch.form import PatchFacts
from tilewright.selection.learned.gpu import TENSOR_SUFFIX, described, refined
from tilewright.selection.learned.hybrid import load, train
from tilewright.selection.ranking import Part
from tilewright.tuning import dataset, trials
from tilewright.tuning.collecting import ranking_of, sample_of, to_sample
from tilewright.tuning.sampling import JUDGED, bare, random_workloads
from tilewright.tuning.training import TENSOR as RECIPE
from tilewright.tuning.training import measured_parts, samples_by_model, samples_of, with_trees
from tilewright.tuning.workloads import Convolution, Linear, numerics_of, problem_of, text_of, workload_of

PRECISIONS = ("fp16", "bf16", "tf32")
LAYER = Convolution(2, 64, 72, (14, 14), (3, 3), then="relu")


def parts_of(precision: str, workload: Convolution | Linear = LAYER) -> list[Part]:
    """The candidates on tensor cores of either family."""
    typed = replace(workload, precision=precision)
    ranking = ranking_of(problem_of(typed), H200, numerics_of(typed))
    return [part for part in ranking.parts if isinstance(part.counts, TensorCounts)]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_workloads_have_types(precision: str) -> None:
    typed = replace(LAYER, precision=precision)
    assert text_of(typed).endswith(f"then=relu precision={precision}") and workload_of(text_of(typed)) == typed
    assert "precision" not in text_of(LAYER) and bare(typed) == bare(LAYER)
    stored = {"fp16": "f16", "bf16": "bf16", "tf32": "f32"}[precision]
    assert {value.dtype for value in problem_of(typed).values.values()} == {stored}
    with pytest.raises(ValueError, match="precision is 'fp8'"):
        workload_of(text_of(LAYER) + " precision=fp8")


def test_random_problems_of_all_types() -> None:
    found = list(islice(random_workloads(1, precisions=PRECISIONS), 60))
    assert {one.precision for one in found} == {*PRECISIONS} and found == list(islice(random_workloads(1, precisions=PRECISIONS), 60))
    plain = list(islice(random_workloads(1), 60))
    assert [replace(one, precision="fp32") for one in found] == plain and not {bare(one) for one in found} & JUDGED


@pytest.mark.parametrize("precision", (*PRECISIONS, "fp32-tensor", "fp32-tensor-fp16"))
def test_samples_are_of_tensor_cores(precision: str) -> None:
    layer = dataset.layer_of(replace(LAYER, precision=precision))
    problem = dataset.layer_problem(layer)
    names = {"tensor cores", "warpgroups", *([] if precision.startswith("fp32") else ["warpgroup patches"])}
    assert {part.schema.name for part in to_sample(layer, problem, H200).parts} == names
    records = {part.schema.schedule for part in to_sample(layer, problem, H200).parts}
    assert {type(schedule) for schedule in sample_of(24, 0, H200)(layer, problem)} == records
    alone = dataset.layer_of(Convolution(1, 32, 32, (8, 8), (3, 3), groups=32, precision=precision))
    assert to_sample(alone, dataset.layer_problem(alone), H200).candidates > 0
    assert len(to_sample(dataset.layer_of(LAYER), problem_of(LAYER), H200).parts) > 1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_samples_of_computed_factors_go_through_registers(precision: str) -> None:
    """Neither copies nor warpgroups can read what no memory holds."""
    for one in islice(random_workloads(5, ["computed"], precisions=(precision,)), 6):
        layer = dataset.layer_of(one)
        problem = dataset.layer_problem(layer)
        (part,) = to_sample(layer, problem, H200).parts
        assert part.schema.name == "tensor cores" and {*part.candidates["stages"].tolist()} == {1} and not part.facts.product.a.plain
        schedules = sample_of(24, 0, H200)(layer, problem)
        assert len(set(schedules)) == min(24, len(part.counts)) and schedules == sample_of(24, 0, H200)(layer, problem)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("workload", [LAYER, Linear(100, 64, 80, "residual")], ids=text_of)
def test_counts_and_features(workload: Convolution | Linear, precision: str) -> None:
    parts = parts_of(precision, workload)
    patches = {"warpgroup patches"} if isinstance(workload, Convolution) else set()
    assert {part.schema.name for part in parts} == {"tensor cores", "warpgroups"} | patches
    for part in parts:
        counts = part.counts
        assert isinstance(counts, TensorCounts)
        assert (counts.padded_flops >= counts.flops).all() and (counts.resident >= 1).all()
        assert np.allclose(counts.accumulators * counts.warps * 32 * 2 * counts.blocks * counts.steps * depth_of(part), counts.padded_flops)
        known = described(part, H200, "tensor")
        assert known is not None and {*TENSOR} <= known.columns.keys()
        assert all(np.isfinite(known.columns[name]).all() and len(known.columns[name]) == len(counts) for name in TENSOR)
        assert described(part, H200, "formed") is None


def depth_of(part: Part) -> np.ndarray:
    """Elements of the reduction in a step."""
    if "block_k" in part.candidates:
        return part.candidates["block_k"]
    facts = part.facts.base if isinstance(part.facts, PatchFacts) else part.facts
    return np.array(facts.row_bytes // facts.element_bytes)


def test_types_and_epilogues_differ() -> None:
    def first(precision: str, then: str) -> dict[str, float]:
        (part,) = (part for part in parts_of(precision, replace(LAYER, then=then)) if part.schema.name == "tensor cores")
        known = described(part, H200, "tensor")
        assert known is not None
        return {name: float(known.columns[name][0]) for name in TENSOR}

    plain, residual, single = first("fp16", "relu"), first("fp16", "residual"), first("tf32", "relu")
    assert {"fact epilogue_bytes", "fact epilogue_flops"} <= {name for name in plain if plain[name] != residual[name]}
    assert {"fact factor bytes", "fact result bytes", "step products"} <= {name for name in plain if plain[name] != single[name]}


# --- the learned part -------------------------------------------------------------------------------------------------


def layers(count: int) -> list[dataset.MeasuredLayer]:
    """Random layers with stand-in times."""
    classes = ("3x3", "batch", "linear", "1x1")
    found = islice(random_workloads(2, classes, precisions=PRECISIONS), count)
    return [measured(dataset.layer_of(one), 40) for one in found]


def test_a_model_is_trained_and_corrects_both_families(tmp_path: Path) -> None:
    known = layers(10)
    rows = samples_by_model(known, H200)[TENSOR_SUFFIX]
    found = samples_of(measured_parts(known[0], H200), 0, "tensor")
    assert found is not None and "TensorCoreSchedule" in found[1]
    model = train(rows, H200, with_trees(RECIPE, 8), gpu_calibration(H200).counted)
    model.save(tmp_path / "m.npz")
    assert load(tmp_path / "m.npz").record == "tensor" and RECORDS["tensor"].names == TENSOR
    typed = replace(LAYER, precision="fp16")
    ranking = ranking_of(problem_of(typed), H200)
    corrected = refined(ranking, H200, (model,))
    for number, part in enumerate(ranking.parts):
        own = slice(int(ranking.starts[number]), int(ranking.starts[number + 1]))
        assert np.array_equal(corrected.seconds[own], part.estimate.seconds) == (not isinstance(part.counts, TensorCounts)), part.schema.name


def test_each_layer_has_the_facts_of_the_machine_of_the_chip_that_measured_it() -> None:
    first, second = layers(2)

    def by_formulas(entry: dataset.MeasuredLayer, target: Machine) -> list[float]:
        found = samples_of(measured_parts(entry, target), 0, "tensor")
        assert found is not None and found[0].analytical is not None
        return list(found[0].analytical.tolist())

    rows = samples_by_model([first, replace(second, machine="h100")], H200)[TENSOR_SUFFIX]
    assert rows.analytical is not None
    assert rows.analytical.tolist() == by_formulas(first, H200) + by_formulas(second, machine("h100"))
    assert by_formulas(second, machine("h100")) != by_formulas(second, H200)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "Trials", lambda machine, devices: processes())
    path, models = tmp_path / "typed.jsonl.gz", tmp_path / "m.npz"
    command = ["train", "--collect", str(path), "--target", "h200", "--each", "2", "--layers", "2", "--precisions", "bf16"]
    assert main(command) == 0
    assert all(str(entry.layer["name"]).endswith("precision=bf16") for entry in dataset.read(path))
    computed = tmp_path / "computed.jsonl.gz"
    assert main([*command[:2], str(computed), *command[3:], "--classes", "computed"]) == 0
    assert all("computed=" in str(entry.layer["name"]) and {*entry.schemas} == {"TensorCoreSchedule"} for entry in dataset.read(computed))
    assert main([*command[:-1], "fp8"]) == 2 and "'fp8' is not supported" in capsys.readouterr().err
    dataset.write(path, layers(10))
    assert main(["train", str(path), "--folds", "2", "--trees", "4", "--model", str(models)]) == 0
    assert "tensor: " in capsys.readouterr().out and load(tmp_path / f"m{TENSOR_SUFFIX}.npz").record == "tensor" and not models.exists()
    monkeypatch.setattr("bench.common.RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["x", str(path), "--tensor", "--folds", "2", "--only", "boosted rank"])
    compare()
    assert "closed form" in capsys.readouterr().out


# --- DeepGEMM's closed form -------------------------------------------------------------------------------------------


def test_the_closed_form_by_hand() -> None:
    """1024 x 1024 x 512 in float16: 128 x 128 by warpgroups are 64 blocks of 132 processors; each loads 2 * 128 * 512 * 2 bytes, and its consumers read
    as much, and 128 columns for each of two of them."""
    (part,) = (part for part in parts_of("fp16", Linear(1024, 512, 1024)) if part.schema.name == "warpgroups")
    seconds = closed_form.closed_form_seconds(part.counts, H200)  # type: ignore[arg-type]
    wanted = {"columns": 128, "consumers": 2, "stages": 4, "swapped": 0, "split": 1, "cluster": 1, "staged": 0}
    (at,) = np.flatnonzero(np.all([part.candidates[name] == value for name, value in wanted.items()], axis=0))
    tiles, result = 64 * 2 * 128 * 512 * 2, 1024 * 1024 * 2
    read = 64 * 2 * (64 + 128) * 512 * 2
    expected = max((tiles + read + result) / (128 * 132), (tiles + result) / (8e6 / 1.3e3)) / (64 / 132) / H200.clock_hz
    assert seconds[at] == pytest.approx(expected)
    (few,) = np.flatnonzero(np.all([part.candidates[name] == value for name, value in {**wanted, "stages": 2}.items()], axis=0))
    whole, stages = part.candidates["split"] == 1, part.candidates["stages"]
    assert seconds[few] > seconds[whole].max() / 2 and (seconds[whole & (stages == 2)] > seconds[whole & (stages == 4)].max()).all()


def test_the_sealed_set_judges_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.common.RESULTS", tmp_path)
    monkeypatch.setattr("bench.common.git_commit", lambda: "0123456789")
    monkeypatch.setattr(sealed_set, "Trials", lambda machine: processes(trial_seconds=60.0))
    monkeypatch.setattr(sealed_set, "LAYERS", ("R12",))
    dataset.write(tmp_path / "train.jsonl.gz", [measured(dataset.layer_of(LAYER), 4)])
    options = ["--precisions=fp16", "--top=3", "--evenly=4", "--again=3", "--rounds=5", "--batches=8", f"--trained={tmp_path / 'train.jsonl.gz'}"]
    monkeypatch.setattr(sys, "argv", ["x", "--seed=7", f"--data={tmp_path / 'data.jsonl.gz'}", "--name=judged", "--unsealed", *options])
    sealed_set.main()
    (entry,) = dataset.read(tmp_path / "data.jsonl.gz")
    assert "batch=8" in str(entry.layer["name"]) and "precision=fp16" in str(entry.layer["name"]) and "TensorCoreSchedule" in entry.schemas
    text = (tmp_path / "judged.json").read_text()
    assert closed_form.CLOSED_FORM in text and "those of benchmarks" in text
