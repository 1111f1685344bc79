"""The learned part of the ranking on CPUs: where it applies and where it does not, and its training."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import cpu_choice, operators
from bench import cpu_learned as training
from bench.layers import LAYERS as ALL_LAYERS
from tests import bare_schemas
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.selection.choice import rank
from tilewright.selection.learned import cpu as cpu_learned
from tilewright.selection.learned.cpu import SHARE_ELSEWHERE, corrected, decided, predicted, record, share_for, table
from tilewright.selection.learned.forest import fit, save
from tilewright.selection.ranking import Ranking
from tilewright.tuning import serialisation
from tilewright.tuning.problems import convolution_problem

SAPPHIRE_RAPIDS = machine("xeon-sapphire-rapids")
LAYERS = ((64, 32, 20, 20, 3), (96, 64, 14, 14, 3), (32, 16, 28, 28, 3))
POINTWISE = (96, 64, 14, 14, 1)
OPERATORS = (("depthwise", (48, 14, 3, 1)), ("product", (4, 49, 32, 64)), ("block", (64, 32, 14, 1, 1, 1)), ("linear", (16, 64, 96, 1)))


def both(sizes: tuple[int, ...], target: Machine, threads: int = 2) -> tuple[Ranking, Ranking]:
    """Rankings of a convolution by the models alone, and with the learned part."""
    return of_problem(convolution_problem(*sizes), target, threads)


def of_problem(problem: Problem, target: Machine, threads: int = 2) -> tuple[Ranking, Ranking]:
    """Like `both`, for a problem."""
    return rank(problem, target, threads, learned=False), rank(problem, target, threads)


@pytest.mark.parametrize("sizes", (*LAYERS, POINTWISE))
def test_the_core_it_was_trained_for_is_corrected(sizes: tuple[int, ...]) -> None:
    before, after = both(sizes, SAPPHIRE_RAPIDS)
    assert after.predicted is not None
    assert (after.predicted > 0).all()
    assert not np.allclose(before.seconds, after.seconds)
    choice = after.first()
    assert choice.seconds == after.seconds.min()
    assert "learned correction" in choice.terms


@pytest.mark.parametrize(("kind", "sizes"), OPERATORS)
def test_every_schema_is_corrected(kind: str, sizes: tuple[int, ...]) -> None:
    before, after = of_problem(operators.problem_of(kind, sizes, SAPPHIRE_RAPIDS, 2), SAPPHIRE_RAPIDS)
    assert after.predicted is not None
    assert len(after.predicted) == before.candidates
    assert not np.allclose(before.seconds, after.seconds)


@pytest.mark.parametrize("threads", (1, 3, 16, 64))
def test_other_numbers_of_threads_are_corrected(threads: int) -> None:
    before, after = both(LAYERS[0], SAPPHIRE_RAPIDS, threads)
    assert after.predicted is not None and np.isfinite(after.predicted).all() and (after.predicted > 0).all()
    assert not np.allclose(before.seconds, after.seconds)
    assert share_for(SAPPHIRE_RAPIDS, {""}) == 1 and decided(after)


@pytest.mark.parametrize("name", ("x86-avx2", "x86-avx512", "xeon-8124m"))
def test_half_of_the_correction_counts_on_cores_that_were_not_measured(name: str) -> None:
    before, after = both(LAYERS[0], machine(name))
    known = cpu_learned.trained(cpu_learned.MODEL)
    assert known is not None and share_for(machine(name), {""}) == SHARE_ELSEWHERE == 0.5 and not decided(after)
    whole = predicted(known.forest, before, machine(name), 2)
    assert whole is not None and not np.allclose(whole, before.seconds)
    assert np.allclose(after.seconds, np.sqrt(whole * before.seconds))


@pytest.mark.parametrize("name", ("neoverse-n1", "cortex-a53"))
def test_other_architectures_are_left_to_the_models(name: str) -> None:
    before, after = both(LAYERS[0], machine(name))
    assert after.predicted is None and share_for(machine(name), {""}) == 0
    assert (before.seconds == after.seconds).all()


def test_features_are_relative_to_the_machine() -> None:
    """Twice the clock, bandwidths and half the dispatch: the same work in half the time, and the same features."""
    fast = replace(
        SAPPHIRE_RAPIDS,
        clock_hz=2 * SAPPHIRE_RAPIDS.clock_hz,
        memory_bandwidth=2 * SAPPHIRE_RAPIDS.memory_bandwidth,
        dispatch_seconds=SAPPHIRE_RAPIDS.dispatch_seconds / 2,
    )
    on_tiles = operators.problem_of("block", (64, 32, 14, 3, 1, 1), SAPPHIRE_RAPIDS, 2, "bf16")
    for problem in (convolution_problem(*LAYERS[0]), operators.problem_of("depthwise", (48, 14, 3, 1), SAPPHIRE_RAPIDS, 2), on_tiles):
        slow_parts, fast_parts = (rank(problem, target, 2, learned=False).parts for target in (SAPPHIRE_RAPIDS, fast))
        for one, other in zip(slow_parts, fast_parts, strict=True):
            before, after = record(one, SAPPHIRE_RAPIDS, 2), record(other, fast, 2)
            assert before is not None and after is not None and before.keys() == after.keys()
            assert np.allclose(one.estimate.seconds, 2 * other.estimate.seconds)
            for name in before:
                assert np.allclose(before[name], after[name]), name


def test_what_follows_a_convolution_is_told_apart() -> None:
    """A residual addition reads another input, as large as the result."""
    alone, added = (operators.problem_of("block", (64, 32, 14, 1, 1, residual), SAPPHIRE_RAPIDS, 2) for residual in (0, 1))
    first, second = (record(of_problem(one, SAPPHIRE_RAPIDS)[0].parts[0], SAPPHIRE_RAPIDS, 2) for one in (alone, added))
    assert first is not None and second is not None
    assert 2.0 ** second["problem epilogue"][0] - 2.0 ** first["problem epilogue"][0] == pytest.approx(1)


def test_what_it_has_not_seen_is_no_part() -> None:
    before, _ = both(LAYERS[1], SAPPHIRE_RAPIDS)
    part = before.parts[0]
    assert record(part, SAPPHIRE_RAPIDS, 2) is not None
    special = (replace(part.facts, whole_rows=True), replace(part.facts, images=4), replace(part.facts, outer=1, rows=1, columns=1))
    for unknown in (*(replace(part, facts=facts) for facts in special), bare_schemas.part(dict, part.candidates, part.estimate.seconds)):
        assert record(unknown, SAPPHIRE_RAPIDS, 2) is None
        assert corrected(Ranking(SAPPHIRE_RAPIDS, (part, unknown)), SAPPHIRE_RAPIDS, 2).predicted is None


def test_a_forest_learns_what_the_models_are_off_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take twice the modelled time if a tile has few vectors."""
    monkeypatch.setattr(cpu_learned, "MODEL", tmp_path / "cpu.npz")
    rankings = [both(sizes, SAPPHIRE_RAPIDS)[0] for sizes in LAYERS]
    columns = [record(part, SAPPHIRE_RAPIDS, 2) for ranking in rankings for part in ranking.parts[:1]]
    names = tuple(sorted({name for own in columns if own is not None for name in own}))
    features = np.concatenate([table(own, names) for own in columns if own is not None])
    few = features[:, names.index("axis vectors")] < 2
    forest = fit("gradient_boosting", features, few.astype(float), None, names, cpu_learned.VERSION, {"max_iter": 60, "learning_rate": 0.2})
    save(forest, cpu_learned.MODEL, {"builds": [["golden-cove", 512, ""]]})
    cpu_learned.trained.cache_clear()
    found = corrected(rankings[1], SAPPHIRE_RAPIDS, 5)
    count = len(rankings[1].parts[0].estimate.seconds)
    expected = np.where(rankings[1].parts[0].candidates["vectors"] < 2, 2.0, 1.0)
    assert np.allclose(found.seconds[:count] / rankings[1].seconds[:count], expected, rtol=0.05)


JUDGED: dict[str, set[tuple[int, ...]]] = {
    "conv2d": {(k, c, size, size, f, stride) for k, c, size, f, stride in ALL_LAYERS.values()},
    "block": {(k, c, size, f, stride) for k, c, size, f, stride in ALL_LAYERS.values()},
    "depthwise": set(operators.DEPTHWISE.values()),
    "product": set(operators.PRODUCTS.values()),
}


def kind_and_sizes(name: str) -> tuple[str, tuple[int, ...]]:
    kind, _, text = name.partition(":")
    sizes = tuple(map(int, text.split(",")))
    return kind, sizes[:5] if kind == "block" else sizes


def test_what_judges_is_not_trained_with() -> None:
    for name in (*training.RANDOM, training.TILED_RANDOM):
        for line in cpu_choice.lines(training.DATA / name):
            kind, sizes = kind_and_sizes(line["layer"])
            assert sizes not in JUDGED.get(kind, ()), line["layer"]


@pytest.mark.parametrize(("kind", "judges"), [("depthwise", "DEPTHWISE"), ("product", "PRODUCTS"), ("conv2d", "LAYERS"), ("block", "LAYERS")])
def test_what_judges_is_not_drawn(kind: str, judges: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A problem that would be drawn is not drawn once it is a test problem."""
    before = cpu_choice.drawn_names(30, 5, (kind,))
    sizes = kind_and_sizes(before[7])[1]
    judging = sizes if kind != "conv2d" else (*sizes[:3], *sizes[4:])
    monkeypatch.setattr(cpu_choice if judges == "LAYERS" else operators, judges, {"it": judging})
    after = cpu_choice.drawn_names(30, 5, (kind,))
    assert before[:7] == after[:7] and len(after) == 30
    assert sizes not in {kind_and_sizes(name)[1] for name in after}


def test_a_line_gives_the_times_of_candidates_that_there_are_still() -> None:
    ranking, _ = both(LAYERS[0], SAPPHIRE_RAPIDS)
    texts = [serialisation.schedule_text(ranking.choice(position).schedule) for position in range(12)]
    stranger = texts[0].replace("16", "17")
    assert stranger not in texts
    times = {text: 1e-3 + 1e-5 * number for number, text in enumerate(texts)} | {stranger: 1.0}
    layer = training.measured({"layer": "conv2d:64,32,20,20,3,1", "machine": serialisation.encode(SAPPHIRE_RAPIDS), "threads": 2, "times": times})
    assert np.flatnonzero(np.isfinite(layer.seconds)).tolist() == list(range(12))
    assert layer.seconds[3] == pytest.approx(1.03e-3)
    right, wrong = (training.judged(layer, order)[0] for order in (np.arange(1.0, 1 + ranking.candidates), -np.arange(float(ranking.candidates))))
    assert right["kind"] == "conv2d" and right["ratio of 10"] == pytest.approx(1) and right["loss"] == right["loss of ten"] == 0
    assert wrong["ratio of 10"] == pytest.approx(sum(range(100, 110)) / sum(range(102, 112))) and wrong["loss of ten"] == pytest.approx(0.02)


def test_a_random_problem_is_left_out_wherever_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, in parts and with its core: no forest has seen a measurement of the problem that it ranks."""
    targets = (SAPPHIRE_RAPIDS, machine("epyc-7763"))
    names = [f"conv2d:{k},{c},{h},{w},{f},1" for k, c, h, w, f in LAYERS] + ["conv2d:96,64,14,14,1,1"]
    text = serialisation.schedule_text(both(POINTWISE, SAPPHIRE_RAPIDS)[0].first().schedule)
    lines = [{"layer": name, "machine": serialisation.encode(target), "threads": 2, "times": {text: 1e-3}} for target in targets for name in names]
    alone = {**lines[-1], "layer": "conv2d:80,64,14,14,1,1"}  # what a forest without the other core has seen
    layers = [training.measured(line) for line in (*lines, lines[0], alone)]
    name_of = {id(layer.ranking): layer.name for layer in layers}
    asked: list[str] = []
    shares: set[float] = set()

    def ranked(taught: list[training.Measured], ranking: Ranking, target: Machine, threads: int, share: float) -> np.ndarray:
        asked.append(name_of[id(ranking)])
        shares.add(share)
        assert asked[-1] not in {layer.name for layer in taught}
        return ranking.seconds

    monkeypatch.setattr(training, "trained", list)
    monkeypatch.setattr(training, "predicted", ranked)
    rows = training.on_random_problems([replace(layer, seconds=np.ones(layer.ranking.candidates)) for layer in layers], 2)
    assert set(asked) == {*names, alone["layer"]} and shares == {*training.SHARES, 1.0}
    every = {(row["machine"], row["ranked by"]): row["problems"] for row in rows}
    assert every["golden-cove, all", "models and forest"] == 5 and every["zen3, all", "models and forest"] == 5
    assert every["golden-cove, all", "core left out, 0.5 of the correction"] == 5


def test_the_forest_is_asked_on_cores_without_measurements_too() -> None:
    ranking = both(LAYERS[0], machine("x86-avx2"))[0]
    assert ranking.predicted is None
    liked = cpu_choice.favourites_of_forest(ranking, machine("x86-avx2"), 2, 5)
    assert len(set(liked)) == 5 and liked != [int(position) for position in np.argsort(ranking.seconds, kind="stable")[:5]]


def test_ways_to_convolve_alone() -> None:
    ranking = both(LAYERS[0], SAPPHIRE_RAPIDS)[1]
    own = cpu_choice.winograd(ranking)
    assert 0 < own.sum() < ranking.candidates
    for way, expected in (("winograd", own), ("direct", ~own)):
        alone = cpu_choice.of_way(ranking, way)
        assert (alone.seconds == ranking.seconds[expected]).all() and cpu_choice.winograd(alone).all() == (way == "winograd")
    assert cpu_choice.of_way(ranking, None) is ranking
    with pytest.raises(ValueError, match="no candidates for winograd conv2d"):
        cpu_choice.of_way(both(POINTWISE, SAPPHIRE_RAPIDS)[1], "winograd")


def test_lines_of_one_way_are_judged_and_not_trained_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    direct = cpu_choice.of_way(both(LAYERS[0], SAPPHIRE_RAPIDS)[0], "direct")
    times = {serialisation.schedule_text(direct.choice(position).schedule): 1e-3 + 1e-5 * position for position in range(12)}
    line = {"layer": "conv2d:64,32,20,20,3,1", "machine": serialisation.encode(SAPPHIRE_RAPIDS), "threads": 2, "only": "direct", "times": times}
    layer = training.measured(line)
    (row,) = training.judged(layer, direct.seconds)
    assert row["kind"] == "direct conv2d" and np.isfinite(layer.seconds).sum() == 12
    file = tmp_path / "lines.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps(line).encode()))
    for path, reason in ((file, "for judging"), (tmp_path / "none", "there is no file")):
        monkeypatch.setattr(sys, "argv", ["cpu_learned", "--data", str(path)])
        with pytest.raises(SystemExit):
            training.main()
        assert reason in capsys.readouterr().err


def test_wrong_questions_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "there.jsonl.gz"
    file.write_bytes(b"what took hours")
    for arguments, reason in (
        (["R2", "--data", str(file)], "is there already"),
        (["R2", "W1", "--only", "direct"], "is for convolutions"),
        (["R2", "X1"], "there is no problem 'X1'"),
    ):
        monkeypatch.setattr(sys, "argv", ["cpu_choice", *arguments])
        with pytest.raises(SystemExit):
            cpu_choice.main()
        assert reason in capsys.readouterr().err
    assert file.read_bytes() == b"what took hours"


def test_transforms_that_it_has_not_seen_keep_the_analytical_times() -> None:
    """Direct sums are in the forest's order, and their first has its analytical time, with which it is compared."""
    before, after = both((64, 64, 28, 28, 7), SAPPHIRE_RAPIDS)
    names = [part.schema.name for part in before.parts]
    assert names == ["contraction", "winograd"] and after.predicted is not None
    direct, transforms = (slice(before.starts[number], before.starts[number + 1]) for number in range(2))
    np.testing.assert_array_equal(after.seconds[transforms], before.seconds[transforms])
    assert after.seconds[direct].min() == pytest.approx(before.seconds[direct].min())
    assert not np.allclose(after.seconds[direct], before.seconds[direct])
