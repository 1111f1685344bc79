"""From measured layers to a model and back into the ranking: samples, quality, a model's order, and `tilewright train`."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import bare_schemas
from tests.measured_layers import H200, layer, measured, slow, some
from tests.stand_ins import processes
from tilewright.cli import main
from tilewright.errors import InvalidInput, InvalidModel
from tilewright.hardware import is_present, machine
from tilewright.hardware.calibration import gpu_calibration
from tilewright.kernels.columns import length, take
from tilewright.kernels.gpu.counts import LaunchCounts
from tilewright.kernels.gpu.features import MISSING, RECORDS, features
from tilewright.kernels.registry import schedule_types
from tilewright.selection.choice import rank
from tilewright.selection.learned import gpu as learned
from tilewright.selection.learned.gpu import ATTENTION_SUFFIX, STREAMS_SUFFIX, described, model_of, refined
from tilewright.selection.learned.hybrid import Learned, Samples, load, train
from tilewright.selection.ranking import Ranking
from tilewright.tuning import dataset, trials
from tilewright.tuning.collecting import ranking_of
from tilewright.tuning.refit import TILED
from tilewright.tuning.sampling import random_workloads
from tilewright.tuning.training import (
    ATTENTIVE,
    RECIPE,
    STREAMED,
    held_out,
    measured_parts,
    part_of,
    quality,
    samples,
    samples_by_model,
    samples_of,
    with_trees,
)
from tilewright.tuning.workloads import Attention, Elementwise, Linear, Pool, Rows, Workload, numerics_of, problem_of, text_of

SMALL = layer(32, 32, 8)
FEW = with_trees(RECIPE, 12)


@pytest.fixture(scope="module")
def layers() -> list[dataset.MeasuredLayer]:
    return list(some(10, 60))


@pytest.fixture(scope="module")
def rows(layers: list[dataset.MeasuredLayer]) -> Samples:
    return samples(layers, H200)[0]


@pytest.fixture(scope="module")
def model(rows: Samples) -> Learned:
    return train(rows, H200, FEW, gpu_calibration(H200).counted)


# Samples


def test_samples_are_what_the_ranking_says_of_the_same_schedules() -> None:
    known = measured(SMALL, 80)
    rows = samples_of(measured_parts(known, H200), 7)
    assert rows is not None
    found, schemas = rows
    assert len(found) == len(schemas) == 80 and (found.problem == 7).all() and found.analytical is not None
    ranking = ranking_of(dataset.layer_problem(SMALL), H200)
    at = 0
    for kind, columns in known.schemas.items():
        part = next(part for part in ranking.parts if part.schema.schedule is schedule_types()[kind])
        axes = {name: column for name, column in columns.items() if name not in dataset.MEASURES}
        for number, seconds in enumerate(columns["seconds"]):
            choice = ranking.find(part.schema.schedule(**{name: int(column[number]) for name, column in axes.items()}))
            assert choice is not None and schemas[at] == kind
            assert found.analytical[at] == pytest.approx(choice.seconds, rel=1e-9) and found.seconds[at] == seconds
            at += 1
    assert at == 80


def test_rows_of_a_part_need_not_be_in_its_space() -> None:
    problem = dataset.layer_problem(SMALL)
    ranking = ranking_of(problem, H200)
    for part in ranking.parts:
        again = part_of(problem, part.schema.schedule.__name__, part.candidates, H200)
        assert again is not None and again.schema is part.schema
        np.testing.assert_allclose(again.estimate.seconds, part.estimate.seconds, rtol=1e-12)
    first = ranking.parts[0]
    outside = {**take(first.candidates, np.arange(3)), "split": np.array([7, 7, 7])}
    elsewhere = part_of(problem, first.schema.schedule.__name__, outside, H200)
    assert elsewhere is not None and length(elsewhere.candidates) == 3 and (elsewhere.estimate.seconds > 0).all()
    assert part_of(problem, "WindowSchedule", outside, H200) is None
    strided = dataset.layer_problem(layer(32, 32, 8, stride=2))
    assert part_of(strided, "WinogradSchedule", outside, H200) is None, "the algorithm does not suit it"


def test_schemas_that_the_model_does_not_know_are_left_out() -> None:
    known = measured(SMALL, 40)
    count = len(known.schemas["DirectSchedule"]["seconds"])
    windows = {"threads": np.array([64]), "each": np.array([1]), **{name: np.array([1]) for name in dataset.MEASURES}}
    more = replace(known, schemas={**known.schemas, "WindowSchedule": windows})
    found = samples_of(measured_parts(more, H200), 0)
    assert found is not None and len(found[0]) == 40
    direct = replace(known, schemas={"DirectSchedule": known.schemas["DirectSchedule"]})
    found = samples_of(measured_parts(direct, H200), 0)
    assert found is not None and found[1] == ["DirectSchedule"] * count
    only = replace(known, schemas={"WindowSchedule": windows})
    assert samples_of(measured_parts(only, H200), 0) is None and len(samples([only, known], H200)[0]) == 40
    with pytest.raises(InvalidInput, match="no measured candidate"):
        samples([only], H200)


def test_quality_by_hand(rows: Samples) -> None:
    some_rows = rows.where(np.array([0, 1, 2, 3, 4, 5]))
    seconds = np.array([4.0, 1.0, 2.0, 1.0, 3.0, 6.0])
    made = replace(some_rows, seconds=seconds, problem=np.array([0, 0, 0, 1, 1, 1]))
    assert quality(made, seconds) == {"lop@1": 0.0, "lop@10": 0.0, "lop@30": 0.0, "spearman": 1.0}
    # the first layer's favourite takes twice the best time, the other's six times; ranks 1,0,2 instead of 2,0,1: 0.5; the other's are reversed
    found = quality(made, np.array([2.5, 2.0, 1.0, 9.0, 8.0, 7.0]))
    assert found["lop@1"] == pytest.approx((1.0 + 5.0) / 2) and found["lop@10"] == 0.0
    assert found["spearman"] == pytest.approx((0.5 - 1.0) / 2)


def test_a_recipe_of_few_trees() -> None:
    assert FEW.options["max_iter"] == 12 and RECIPE.options["max_iter"] != 12
    assert with_trees(replace(RECIPE, learner="random_forest", options={}), 5).options == {"n_estimators": 5}


def test_training_sees_what_the_analytical_models_miss(rows: Samples) -> None:
    """One schema takes three times its predicted time, which is learned from other layers."""
    analytical = quality(rows, rows.expected(H200, gpu_calibration(H200).counted))
    found = quality(rows, held_out(rows, H200, FEW, gpu_calibration(H200).counted, 5))
    assert found["lop@1"] < 0.5 * analytical["lop@1"] and found["spearman"] > analytical["spearman"]


# The model in the ranking


def test_without_a_model_the_ranking_is_the_analytical_one() -> None:
    ranking = ranking_of(dataset.layer_problem(SMALL), H200)
    assert refined(ranking, H200, ()) is ranking
    assert model_of("no machine of this name") is None


def test_the_candidates_kept_have_the_models_times_and_others_come_behind(model: Learned) -> None:
    ranking = ranking_of(dataset.layer_problem(SMALL), H200)
    seconds = ranking.seconds
    found = refined(ranking, H200, (model,), kept=300, stages=())
    assert found.predicted is not None and found.candidates == ranking.candidates
    expected = []
    for part in ranking.parts:
        known = described(part, H200)
        assert known is not None
        expected.append(model.predicted(known.columns, known.counts, H200, known.analytical))
    kept = np.isclose(found.seconds, np.concatenate(expected), rtol=1e-9)
    starts = np.cumsum([0, *(length(part.candidates) for part in ranking.parts)])
    for number, part in enumerate(ranking.parts):
        mine = kept[starts[number] : starts[number + 1]]
        assert mine.sum() >= min(learned.KEPT_EACH, length(part.candidates))
        assert part.estimate.seconds[mine].max() <= part.estimate.seconds[~mine].min(initial=np.inf)
    assert kept[seconds <= np.sort(seconds)[300]].all() and not kept.all()
    assert found.seconds[~kept].min() > found.seconds[kept].max()
    # in the analytical order among themselves
    order = np.argsort(seconds[~kept], kind="stable")
    assert (np.diff(found.seconds[~kept][order]) >= 0).all()


def test_stages_drop_what_the_first_trees_find_slow(model: Learned) -> None:
    ranking = ranking_of(dataset.layer_problem(SMALL), H200)
    whole = refined(ranking, H200, (model,), stages=())
    found = refined(ranking, H200, (model,), stages=((4, 600), (8, 200)))
    passed = found.seconds == whole.seconds
    assert passed.sum() == 200
    assert found.seconds[~passed].min() > found.seconds[passed].max()
    # the predictions of four trees of twelve for all candidates
    known = [described(part, H200) for part in ranking.parts]
    tables = [features(model.record, one.columns, one.counts, H200, model.overheads) for one in known if one is not None]
    some = np.concatenate(
        [part.estimate.seconds * np.exp(model.forest.predict(table, 0, 4)) for part, table in zip(ranking.parts, tables, strict=True)]
    )
    assert some[passed].max() <= np.sort(some)[599] * (1 + 1e-6)


def test_the_models_correction_is_a_term_of_the_choice(model: Learned) -> None:
    ranking = ranking_of(dataset.layer_problem(SMALL), H200)
    found = refined(ranking, H200, (model,))
    for choice in islice(found, 5):
        analytical = ranking.find(choice.schedule)
        assert analytical is not None
        assert choice.terms["learned correction"] == pytest.approx(choice.seconds - analytical.seconds)
    before, after = ranking.first().schema, found.first().schema
    assert before is slow() is not after, "it was measured to be three times slower than predicted"


def test_models_together_share_one_limit_and_one_scale(streams: list[dataset.MeasuredLayer], model: Learned) -> None:
    """Each model's times are those that it gives alone, and what was not looked at stays behind in its analytical order, multiplied once."""
    own = train(samples(streams, H200, STREAMED.record)[0], H200, with_trees(STREAMED, 8), gpu_calibration(H200).counted)
    tiled, streaming = (ranking_of(problem, H200).parts for problem in (dataset.layer_problem(SMALL), problem_of(STREAMING[0])))
    ranking = Ranking(H200, (*tiled, *streaming))
    together, other_order = (refined(ranking, H200, models, kept=300, stages=()) for models in ((model, own), (own, model)))
    np.testing.assert_array_equal(together.seconds, other_order.seconds)
    seconds, border = ranking.seconds, int(ranking.starts[len(tiled)])
    limit = np.sort(seconds)[300]
    first, second = (refined(ranking, H200, (each,), kept=300, stages=()).seconds for each in (model, own))
    best = seconds <= limit
    assert best[:border].any() and best[border:].any()
    np.testing.assert_array_equal(together.seconds[:border][best[:border]], first[:border][best[:border]])
    np.testing.assert_array_equal(together.seconds[border:][best[border:]], second[border:][best[border:]])
    each_best = [np.sort(part.estimate.seconds)[: learned.KEPT_EACH].max() for part in ranking.parts]
    behind = np.concatenate([part.estimate.seconds > max(limit, last) for part, last in zip(ranking.parts, each_best, strict=True)])
    factors = together.seconds[behind] / seconds[behind]
    assert behind.any() and factors.max() == pytest.approx(factors.min()) and together.seconds[behind].min() > together.seconds[~behind].max()


def test_an_unknown_schema_keeps_its_times(model: Learned) -> None:
    ranking = ranking_of(dataset.layer_problem(SMALL), H200)
    other = bare_schemas.part(dict, {"number": np.arange(4)}, [1e-9, 1e-6, 1e-3, 1.0])
    found = refined(replace(ranking, parts=(*ranking.parts, other)), H200, (model,), kept=100)
    assert found.seconds[-4:].tolist() == [1e-9, 1e-6, 1e-3, 1.0]
    assert refined(Ranking(H200), H200, (model,)).predicted is None


def test_models_of_the_package(model: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "MODELS", tmp_path)
    model.save(tmp_path / "made-up.npz")
    (tmp_path / "damaged.npz").write_bytes((tmp_path / "made-up.npz").read_bytes()[:-100])
    (tmp_path / "foreign.npz").write_bytes(b"not a model")
    learned.model_of.cache_clear()
    try:
        found = model_of("made-up")
        assert found is not None and found.forest.names == RECORDS[RECIPE.record].names
        for name in ("damaged", "foreign"):
            with pytest.raises(InvalidModel):
                model_of(name)
    finally:
        learned.model_of.cache_clear()


# The command


def test_train_command(layers: list[dataset.MeasuredLayer], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, where = tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz", tmp_path / "deep" / "model.npz"
    dataset.write(first, layers[:6])
    dataset.write(second, layers[6:])
    command = ["train", str(first), str(second), "--folds", "3", "--trees", "8"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "formed: 600 kernels of 10 layers on h200" in printed and "streams" not in printed and "analytical" in printed and "LoP@10" in printed
    assert main([*command, "--model", str(where)]) == 0
    found = load(where)
    assert len(found.forest.roots) == 8 and found.record == RECIPE.record
    ranking = refined(ranking_of(dataset.layer_problem(SMALL), H200), H200, (found,))
    assert ranking.first().schema is not slow()


def test_collect_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "Trials", lambda machine, devices: processes())
    path = tmp_path / "data" / "random.jsonl.gz"
    command = ["train", "--collect", str(path), "--target", "h200", "--each", "2", "--seed", "3"]
    assert main([*command, "--layers", "1"]) == 0
    first = path.read_bytes()
    with open(path, "ab") as file:  # as if the next layer had been interrupted
        file.write(first[:50])
    assert main([*command, "--layers", "2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "50 bytes removed" in printed and "holds 2 layers" in printed
    assert path.read_bytes().startswith(first)
    found = dataset.read(path)
    assert [entry.count for entry in found] == [2, 2]
    assert [entry.layer["name"] for entry in found] == [text_of(workload) for workload in islice(random_workloads(3), 2)]
    assert main([*command, "--layers", "2"]) == 0 and path.read_bytes().count(b"\x1f\x8b\x08\x00\x00\x00\x00") == 2


def error(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main(["train", *map(str, arguments)]) == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_train_command_errors(layers: list[dataset.MeasuredLayer], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few, mixed, foreign, siblings = (tmp_path / name for name in ("few", "mixed", "foreign", "siblings"))
    dataset.write(few, layers[:3])
    dataset.write(mixed, [*layers[:9], replace(layers[9], machine="a100")])
    dataset.write(foreign, [replace(entry, machine="abacus") for entry in layers])
    dataset.write(siblings, [*layers[:9], replace(layers[9], machine="h100")])
    assert "nothing to train with" in error(capsys)
    assert "cannot be read" in error(capsys, tmp_path / "none")
    assert "3 layers are too few" in error(capsys, few)
    assert "measurements of h200 and of a100" in error(capsys, mixed)
    assert "abacus" in error(capsys, foreign)
    assert "CUDA cores of several machines" in error(capsys, siblings)
    assert "no whole number from 2 up" in error(capsys, few, "--folds", "1")
    for name in ("--layers", "--each", "--trees"):
        assert "no whole number from 1 up" in error(capsys, few, name, "0")
    collecting = ("--collect", tmp_path / "new", "--target", "h200")
    assert "no list of indices" in error(capsys, *collecting, "--devices", "first")
    assert "no classes '3x3,round'" in error(capsys, *collecting, "--classes", "3x3,round")
    assert "there are none" in error(capsys, *collecting, "--favourites", tmp_path / "model")
    assert "model" in error(capsys, *collecting, few, "--favourites", tmp_path / "model")
    if not is_present(H200):
        assert "needs that machine" in error(capsys, *collecting)
    (tmp_path / f"m{STREAMS_SUFFIX}.npz").mkdir()
    assert f"m{STREAMS_SUFFIX}.npz is a directory" in error(capsys, tmp_path / "none", "--model", tmp_path / "m.npz")
    (tmp_path / f"f{STREAMS_SUFFIX}.npz").write_bytes(few.read_bytes())
    assert "is read by the same command" in error(capsys, tmp_path / f"f{STREAMS_SUFFIX}.npz", "--model", tmp_path / "f.npz")
    (tmp_path / "text").write_text("layers")
    assert "is no measured layer" in error(capsys, "--collect", tmp_path / "text", "--target", "h200")


# The model of schemas that stream

STREAMING: tuple[Workload, ...] = tuple(
    workload
    for size in (20, 28, 40)
    for workload in (Pool(2, 32, (size, size), 2, 2), Rows(32 * size, 96 + size), Elementwise(2, 32, (size, size)), Linear(2, 8 * size, 96))
)


@pytest.fixture(scope="module")
def streams() -> list[dataset.MeasuredLayer]:
    """Layers of which vectors of one element, and a split of few rows' products, take twice the predicted time."""
    found = []
    for workload in STREAMING:
        own = measured(dataset.layer_of(workload), 40)
        slowed = {}
        for kind, columns in own.schemas.items():
            slow = columns["split"] > 1 if kind == "GemvSchedule" else columns.get("vector_width") == 1
            slowed[kind] = {**columns, "seconds": columns["seconds"] * np.where(slow, 2.0, 1.0)}
        found.append(replace(own, schemas={kind: columns for kind, columns in slowed.items() if kind not in TILED}))
    return found


def test_schemas_that_stream_have_a_model_of_their_own(streams: list[dataset.MeasuredLayer], layers: list[dataset.MeasuredLayer]) -> None:
    rows, kinds = samples(streams, H200, STREAMED.record)
    assert set(kinds) == {"WindowSchedule", "MapSchedule", "RowReductionSchedule", "GemvSchedule"} and type(rows.counts) is LaunchCounts
    assert samples_of(measured_parts(streams[0], H200), 0) is None and samples_of(measured_parts(layers[0], H200), 0, STREAMED.record) is None
    both = samples_by_model([*layers, *streams], H200)
    assert len(both[""]) == len(samples(layers, H200)[0]) and len(both[STREAMS_SUFFIX]) == len(rows)
    table = features(STREAMED.record, rows.described, rows.counts, H200, gpu_calibration(H200).counted)
    assert table.shape == (len(rows), len(RECORDS[STREAMED.record].names)) and np.isfinite(table).all()
    assert not (table == MISSING).all(axis=0).any(), "some schema has each feature"


def test_it_learns_what_the_formulas_miss(streams: list[dataset.MeasuredLayer]) -> None:
    rows, _ = samples(streams, H200, STREAMED.record)
    overheads = gpu_calibration(H200).counted
    analytical, found = quality(rows, rows.expected(H200, overheads)), quality(rows, held_out(rows, H200, with_trees(STREAMED, 60), overheads, 3))
    assert found["lop@1"] <= 0.5 * analytical["lop@1"] and found["spearman"] > analytical["spearman"]


ATTENDED = [Attention(1, heads, 32 * heads, 64 + 16 * heads, 64, causal=heads % 2, precision="fp16") for heads in (2, 3, 4, 6, 8, 12)]


@pytest.fixture(scope="module")
def attended() -> list[dataset.MeasuredLayer]:
    """Attention whose warps take twice the predicted time if there are fewer than four."""
    found = []
    for workload in ATTENDED:
        own = measured(dataset.layer_of(workload), 40)
        columns = own.schemas["TensorAttentionSchedule"]
        found.append(
            replace(own, schemas={"TensorAttentionSchedule": {**columns, "seconds": columns["seconds"] * np.where(columns["warps"] < 4, 2, 1)}})
        )
    return found


def test_attention_on_tensor_cores_has_a_model_of_its_own(
    attended: list[dataset.MeasuredLayer], layers: list[dataset.MeasuredLayer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert samples_of(measured_parts(attended[0], H200), 0) is None and samples_of(measured_parts(layers[0], H200), 0, ATTENTIVE.record) is None
    rows, kinds = samples(attended, H200, ATTENTIVE.record)
    assert set(kinds) == {"TensorAttentionSchedule"} and samples_by_model(attended, H200).keys() == {ATTENTION_SUFFIX}
    overheads = gpu_calibration(H200).counted
    table = features(ATTENTIVE.record, rows.described, rows.counts, H200, overheads)
    assert table.shape == (len(rows), len(RECORDS[ATTENTIVE.record].names)) and np.isfinite(table).all() and not (table == MISSING).any()
    analytical, found = quality(rows, rows.expected(H200, overheads)), quality(rows, held_out(rows, H200, with_trees(ATTENTIVE, 60), overheads, 3))
    assert found["lop@1"] <= 0.5 * analytical["lop@1"] and found["spearman"] > analytical["spearman"]
    train(rows, H200, with_trees(ATTENTIVE, 20), overheads).save(tmp_path / f"h200{ATTENTION_SUFFIX}.npz")
    monkeypatch.setattr(learned, "MODELS", tmp_path)
    model_of.cache_clear()
    try:
        ranking = learned.corrected(ranking_of(problem_of(ATTENDED[0]), H200), H200)
        corrected = {choice.schema.name for choice in ranking if "learned correction" in choice.terms}
        assert corrected == {"attention on tensor cores"} and next(iter(ranking)).schedule.warps >= 4
    finally:
        model_of.cache_clear()


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
@pytest.mark.parametrize(("target", "known"), [("h200", True), ("h100", True), ("a100", False), ("rtx4090", False)])
def test_the_package_ranks_attention_on_tensor_cores_by_a_model_where_it_was_measured(precision: str, target: str, known: bool) -> None:
    workload = Attention(1, 12, 197, 197, 64, precision=precision)
    here, numerics = machine(target), numerics_of(workload)
    learned_order, formulas = (rank(problem_of(workload), here, numerics=numerics, learned=learned) for learned in (True, False))
    assert learned_order.first().schema.name == formulas.first().schema.name == "attention on tensor cores"
    assert "learned correction" not in formulas.first().terms and ("learned correction" in learned_order.first().terms) == known
    assert (learned_order.first().seconds == formulas.first().seconds) != known


def test_each_model_corrects_the_schemas_that_it_covers(
    streams: list[dataset.MeasuredLayer], model: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = train(samples(streams, H200, STREAMED.record)[0], H200, with_trees(STREAMED, 20), gpu_calibration(H200).counted)
    own.save(tmp_path / f"h200{STREAMS_SUFFIX}.npz")
    pooling, convolution = (ranking_of(problem, H200) for problem in (problem_of(STREAMING[0]), dataset.layer_problem(SMALL)))
    monkeypatch.setattr(learned, "MODELS", tmp_path)
    learned.model_of.cache_clear()
    try:
        assert [found.record for found in learned.models_for(H200)] == [STREAMED.record]
        assert learned.corrected(pooling, H200).predicted is not None and learned.corrected(convolution, H200).predicted is None
        model.save(tmp_path / "h200.npz")
        learned.model_of.cache_clear()
        assert [found.record for found in learned.models_for(H200)] == [RECIPE.record, STREAMED.record]
        assert learned.corrected(convolution, H200).predicted is not None
        (part,) = pooling.parts
        known = described(part, H200, STREAMED.record)
        assert known is not None and described(part, H200) is None
        expected = own.predicted(known.columns, known.counts, H200, known.analytical)
        np.testing.assert_allclose(learned.corrected(pooling, H200).seconds, expected)
    finally:
        learned.model_of.cache_clear()


@pytest.mark.slow
def test_train_command_writes_both_models(
    streams: list[dataset.MeasuredLayer], layers: list[dataset.MeasuredLayer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset.write(tmp_path / "data", [*layers, *streams])
    assert main(["train", str(tmp_path / "data"), "--folds", "2", "--trees", "4", "--model", str(tmp_path / "m.npz")]) == 0
    printed = capsys.readouterr().out
    assert (
        "formed: 600 kernels of 10 layers" in printed
        and f"streams: {sum(entry.count for entry in streams)} kernels of {len(streams)} layers" in printed
    )
    stale = (tmp_path / f"m{STREAMS_SUFFIX}.npz").read_bytes()
    dataset.write(tmp_path / "few", [*layers, *streams[:3]])
    assert main(["train", str(tmp_path / "few"), "--folds", "2", "--trees", "5", "--model", str(tmp_path / "m.npz")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"m{STREAMS_SUFFIX}.npz of an earlier training" in printed and printed.count("wrote") == 1
    assert (tmp_path / f"m{STREAMS_SUFFIX}.npz").read_bytes() == stale and len(load(tmp_path / "m.npz").forest.roots) == 5
    assert (load(tmp_path / "m.npz").record, load(tmp_path / f"m{STREAMS_SUFFIX}.npz").record) == (RECIPE.record, STREAMED.record)


def test_a_training_that_writes_nothing_is_an_error(
    streams: list[dataset.MeasuredLayer], layers: list[dataset.MeasuredLayer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset.write(tmp_path / "data", [*layers[:4], *streams[:3]])
    found = error(capsys, tmp_path / "data", "--folds", "3", "--model", tmp_path / "m.npz")
    assert "no model covers more than 4 layers, which are too few" in found and "measure 6 at least" in found
    assert not list(tmp_path.glob("*.npz"))
