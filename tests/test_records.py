"""Records: round trips, rejected rows, their use in plans, and resuming tuning."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tilewright
from tests.compiled import without_chains
from tests.fake_workers import seconds as seconds_of
from tests.stand_ins import FAILURE, H200, OTHER, SMALL, example, measurement, problems_of_network, stand_ins
from tilewright.cli import main
from tilewright.cli_tune import read_layers
from tilewright.compile import read
from tilewright.errors import CacheError, InvalidInput, TargetNotPresent, UnsupportedOption
from tilewright.graph.passes import simplify
from tilewright.hardware import is_present
from tilewright.kernels.gpu.bounds import lower_bound
from tilewright.kernels.gpu.gemm.schema import GEMM
from tilewright.partition.plan import plan_program
from tilewright.selection.choice import rank
from tilewright.tuning import serialisation, trials
from tilewright.tuning.measurement import Measurement
from tilewright.tuning.problems import generator, key_of
from tilewright.tuning.records import Records, default_path
from tilewright.tuning.trials import Trials
from tilewright.tuning.tuning import chooser_for, from_records, is_current, may_beat, tune

absent = pytest.mark.skipif(is_present(H200), reason="the target is here")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    with without_chains():
        yield


@pytest.fixture()
def some() -> list[Measurement]:
    return [measurement(), measurement(position=1, seconds=8e-6), measurement(position=2, **FAILURE), measurement(OTHER, stopped=True, mode="warm")]


# The file


def test_measurements_come_back(tmp_path: Path, some: list[Measurement]) -> None:
    with Records(tmp_path / "deep" / "records.sqlite") as records:
        assert records.add(some) == 4 and records.add(some[:2]) == 0 and len(records) == 4
    with Records(tmp_path / "deep" / "records.sqlite") as records:
        assert sorted(records.all(), key=lambda entry: entry.identity) == sorted(some, key=lambda entry: entry.identity)
        assert {entry.identity for entry in records.of(key_of(SMALL), "h200")} == {entry.identity for entry in some[:3]}
        assert records.of(key_of(OTHER), "h200") == [] and records.of(key_of(OTHER), "h200", "warm") == some[3:]
        assert records.of(key_of(SMALL), "a100") == []


def test_the_latest_measurement_stands(tmp_path: Path) -> None:
    rough = measurement(seconds=1e-5, count=4)
    careful = measurement(seconds=1.2e-5, count=9)
    later = measurement(seconds=1.1e-5, count=4, date="2026-01-03T00:00:00+00:00")
    second, failed = measurement(position=1, seconds=1.15e-5), measurement(position=2, **FAILURE)
    for order in ([rough, careful, later, second, failed], [failed, later, second, careful, rough]):
        with Records(tmp_path / f"{order[0].count}.sqlite") as records:
            records.add(order)
            assert records.standing(key_of(SMALL), "h200") == [later, second, failed]


def test_lines_come_back(tmp_path: Path, some: list[Measurement]) -> None:
    with Records(tmp_path / "first.sqlite") as first, Records(tmp_path / "second.sqlite") as second, Records(tmp_path / "third.sqlite") as third:
        first.add(some)
        for name in ("lines.jsonl", "lines.jsonl.gz"):
            assert first.export_lines(tmp_path / name) == 4
        assert second.import_lines(tmp_path / "lines.jsonl") == 4 and second.import_lines(tmp_path / "lines.jsonl") == 0
        assert third.import_lines(tmp_path / "lines.jsonl.gz") == 4
        assert list(first.all()) == list(second.all()) == list(third.all())
        second.export_lines(tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "lines.jsonl").read_bytes()
    assert gzip.decompress((tmp_path / "lines.jsonl.gz").read_bytes()) == (tmp_path / "lines.jsonl").read_bytes()


BROKEN: dict[str, Any] = {
    "no JSON": lambda line: line[:-20],
    "a list": lambda line: "[1, 2]",
    "another version": lambda line: json.dumps({**json.loads(line), "version": 99}),
    "a field missing": lambda line: json.dumps({k: v for k, v in json.loads(line).items() if k != "code"}),
    "a field too many": lambda line: json.dumps({**json.loads(line), "more": 1}),
    "a status": lambda line: json.dumps({**json.loads(line), "status": "excellent"}),
    "a mode": lambda line: json.dumps({**json.loads(line), "mode": "tepid"}),
    "text for a time": lambda line: json.dumps({**json.loads(line), "median": "1e-5"}),
    "a time of nothing": lambda line: json.dumps({**json.loads(line), "median": None}),
    "quartiles": lambda line: json.dumps({**json.loads(line), "lower": 1.0}),
    "infinity": lambda line: json.dumps({**json.loads(line), "upper": float("inf")}),
    "a count": lambda line: json.dumps({**json.loads(line), "count": 0}),
    "a negative count": lambda line: json.dumps({**json.loads(line), "count": -3}),
    "a truth": lambda line: json.dumps({**json.loads(line), "stopped": 1}),
    "a schedule": lambda line: json.dumps({**json.loads(line), "schedule": "{"}),
    "a nameless schedule": lambda line: json.dumps({**json.loads(line), "schedule": "{}"}),
    "a list of resources": lambda line: json.dumps({**json.loads(line), "resources": "[]"}),
    "a date": lambda line: json.dumps({**json.loads(line), "date": "yesterday"}),
    "a time of a failure": lambda line: json.dumps({**json.loads(line), "status": "failed"}),
}


@pytest.mark.parametrize("how", BROKEN)
def test_malformed_lines_are_named_and_nothing_is_stored(how: str, tmp_path: Path, some: list[Measurement]) -> None:
    path = tmp_path / "lines.jsonl"
    with Records(tmp_path / "first.sqlite") as first:
        first.add([replace(entry, stopped=False) for entry in some[:2]])
        first.export_lines(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], BROKEN[how](lines[1]), ""]))
    with Records(tmp_path / "second.sqlite") as second:
        with pytest.raises(CacheError, match=r"no measurements: line 2: .*nothing was imported"):
            second.import_lines(path)
        assert len(second) == 0


def test_many_malformed_lines_are_not_all_shown(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("x\n" * 40)
    with Records(tmp_path / "records.sqlite") as records, pytest.raises(CacheError, match="line 5: .*and 35 more"):
        records.import_lines(tmp_path / "lines")


def test_files_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"{}\n" * 1000)[:-12])
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with Records(tmp_path / "records.sqlite") as records:
        for name in ("missing", "cut.gz", "bytes"):
            with pytest.raises(CacheError, match=name):
                records.import_lines(tmp_path / name)


def test_two_may_write_at_once(tmp_path: Path) -> None:
    with Records(tmp_path / "records.sqlite") as first, Records(tmp_path / "records.sqlite") as second:
        for k in range(5):
            first.add([measurement(seconds=1e-5 + 2e-7 * k)])
            second.add([measurement(seconds=1.01e-5 + 2e-7 * k)])
        assert len(first) == len(second) == 10


# Plans


def programs(path: Path | None) -> list[tuple[str, str]]:
    """Schedules and generated text of the network for an H200."""
    module, inputs = example()
    graph, _ = simplify(read(module, inputs).graph)
    with chooser_for(H200, path) as (chooser, _):
        program = plan_program(graph, H200, 1, chooser, chains=False)
    from tilewright.codegen.source import source_text

    return [(region.schedule, source_text(kernel)) for region in program.regions for kernel in region.kernels]


def test_plans_take_the_best_that_was_measured(tmp_path: Path) -> None:
    problem = problems_of_network()[1]
    best = measurement(problem, 5, 2e-6)
    with Records(tmp_path / "records.sqlite") as records:
        records.add([measurement(problem, 0, 9e-6), best, measurement(problem, 3, 4e-6)])
    before, after = programs(None), programs(tmp_path / "records.sqlite")
    changed = [at for at, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    assert [after[at][0] for at in changed] == [best.description]
    assert "// measured 2 us" in after[changed[0]][1] and not any("// measured" in text for _, text in before)
    assert programs(tmp_path / "records.sqlite") == after


def test_records_of_other_code_or_schemas_are_not_used(tmp_path: Path) -> None:
    problem = problems_of_network()[1]
    tiled = next(choice.schedule for choice in rank(problem, H200) if choice.schema is GEMM)
    with Records(tmp_path / "records.sqlite") as records:
        records.add(
            [
                measurement(problem, 4, 1e-6, code="contraction_000000000000"),
                measurement(problem, 5, 1e-6, schedule='{"type": "AbacusSchedule", "beads": 10}'),
                measurement(problem, 6, 1e-6, schedule='{"type": "ContractionSchedule", "colour": 3}'),
                measurement(problem, 7, 1e-6, schedule=serialisation.schedule_text(replace(tiled, block_m=77))),
                measurement(problem, 8, 1e-6, machine="a100"),
                measurement(problem, 9, 1e-6, mode="warm"),
            ]
        )
    assert programs(tmp_path / "records.sqlite") == programs(None)


def test_code_is_compared_where_its_generator_has_changed(tmp_path: Path) -> None:
    problem = problems_of_network()[1]
    same, other = measurement(problem, 2), measurement(problem, 2, code="contraction_000000000000")
    assert is_current(problem, same, H200) and not is_current(problem, other, H200)
    assert is_current(problem, replace(same, generator=generator(H200)), H200)
    assert not is_current(problem, replace(same, schedule='{"type": "AbacusSchedule"}'), H200)
    assert generator(H200) != generator(replace(H200, shared_bytes_per_block=1 << 14)) and len(generator(H200)) == 20


def test_candidates_that_failed_are_not_chosen(tmp_path: Path) -> None:
    problem = problems_of_network()[1]
    ranking = list(islice(rank(problem, H200), 3))
    with Records(tmp_path / "records.sqlite") as records:
        records.add([measurement(problem, 0, **FAILURE), measurement(problem, 1, **{**FAILURE, "status": "wrong"})])
        found = from_records(records)(problem, H200, 1)
        assert found.schedule == ranking[2].schedule and found.measured_seconds is None
        records.add([measurement(problem, 0, code="contraction_000000000000", **FAILURE)])
    with Records(tmp_path / "old.sqlite") as records:
        records.add([measurement(problem, 0, **{**FAILURE, "code": "contraction_000000000000"})])
        found = from_records(records)(problem, H200, 1)
        assert found.schedule == ranking[0].schedule


def test_the_users_records_are_taken_where_there_are_some() -> None:
    problem = problems_of_network()[1]
    best = measurement(problem, 5, 2e-6)
    before = programs(None)
    assert not default_path().exists()
    with Records() as records:
        records.add([best])
    assert best.description in [schedule for schedule, _ in programs(None)] and before != programs(None)


def test_compile_with_records(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    module, inputs = example()
    problem = problems_of_network()[1]
    best = measurement(problem, 5, 2e-6)
    with Records(tmp_path / "records.sqlite") as records:
        records.add([best])
    first, second = (tilewright.compile(module, inputs, "h200", records=tmp_path / "records.sqlite") for _ in range(2))
    rows = [row for row in first.plan.rows if row.measured_seconds is not None]
    assert [(row.schedule, row.measured_seconds) for row in rows] == [(best.description, 2e-6)]
    assert "measured 2 us in 1 region" in str(first.plan)
    assert first.image.sources == second.image.sources
    assert [binary.path.read_bytes() for binary in first.image.binaries] == [binary.path.read_bytes() for binary in second.image.binaries]
    without = tilewright.compile(module, inputs, "h200")
    assert "measured" not in str(without.plan) and without.image.sources != first.image.sources
    first.save(tmp_path / "saved")
    from tilewright.runtime.artifact import read as read_artifact

    assert [region.measured_seconds for region in read_artifact(tmp_path / "saved").program.regions] == [
        row.measured_seconds for row in first.plan.rows
    ]


def test_options_that_mean_nothing(tmp_path: Path) -> None:
    module, inputs = example()
    for wrong in (-1, True, "3", 2.0):
        with pytest.raises(UnsupportedOption, match="no number of candidates"):
            tilewright.compile(module, inputs, "h200", trials=wrong)  # type: ignore[arg-type]
    with pytest.raises(TargetNotPresent, match="not here"):
        tilewright.compile(module, inputs, "neoverse-n1", trials=2)
    with pytest.raises(UnsupportedOption, match="no records at"):
        tilewright.compile(module, inputs, "h200", records=tmp_path / "none.sqlite")
    with pytest.raises(UnsupportedOption, match="records is"):
        tilewright.compile(module, inputs, "h200", records=3)  # type: ignore[call-overload]


@absent
def test_trials_need_the_target(tmp_path: Path) -> None:
    module, inputs = example()
    with pytest.raises(TargetNotPresent, match="h200 needs that machine"):
        tilewright.compile(module, inputs, "h200", trials=2, records=tmp_path / "records.sqlite")


# Tuning


def test_what_cannot_beat_a_record_is_not_measured(tmp_path: Path) -> None:
    ranking = rank(SMALL, H200)
    bounds = np.concatenate([lower_bound(part.schema, part.facts, part.candidates, H200).seconds for part in ranking.parts])
    first = np.argsort(ranking.seconds, kind="stable")[:12]
    known = float(np.median(bounds[first]))
    np.testing.assert_array_equal(may_beat(ranking, H200, known), bounds < known)
    assert may_beat(ranking, H200, float("inf")).all()
    with Records(tmp_path / "records.sqlite") as records:
        records.add([measurement(position=11, seconds=known)])
        tuned = tune([SMALL], H200, 12, records, start=stand_ins)
        assert tuned.bounded_out == (bounds[first] >= known).sum() > 0
        measured = {entry.schedule for entry in records.of(key_of(SMALL), "h200")}
        for at in first[:11]:
            assert (serialisation.schedule_text(ranking.choice(int(at)).schedule) in measured) == (bounds[at] < known)


def test_tuning_measures_records_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    problems = problems_of_network()
    assert len({key_of(problem) for problem in problems}) == len(problems)

    class Stop(Exception):
        pass

    def interrupt(done: int, total: int, outcome: Any) -> None:
        if done == 5:
            raise Stop

    with Records(tmp_path / "records.sqlite") as records:
        with pytest.raises(Stop):
            tune(problems, H200, 4, records, report=interrupt, start=stand_ins)
        assert len({(entry.region, entry.schedule) for entry in records.all()}) == 5
        reports: list[tuple[int, int]] = []
        tuned = tune(problems, H200, 4, records, report=lambda done, total, _: reports.append((done, total)), start=stand_ins)
        total = tuned.known + tuned.measured
        assert tuned.failed == 0 and tuned.known == 5 and tuned.problems == len(problems)
        assert reports[0] == (5, total) and reports[-1] == (total, total) and len(reports) == total - 5 + 1
        for problem in problems:
            standing = records.standing(key_of(problem), "h200")
            wanted = {serialisation.schedule_text(choice.schedule) for choice in islice(rank(problem, H200), 4)}
            assert {entry.schedule for entry in standing} == wanted
            near = [entry for entry in standing[:4] if seconds_of(entry.schedule) < 1.05 * seconds_of(standing[0].schedule)]
            assert len(near) == 1 or all(entry.count == 9 for entry in near)
        again = tune(problems, H200, 4, records, start=never)
        assert (again.known, again.measured) == (total, 0)
        more = tune(problems[1:2], H200, 6, records, start=stand_ins)
        assert (more.known, more.measured) == (4, 2)
    fastest = {min((serialisation.schedule_text(c.schedule) for c in islice(rank(p, H200), 4)), key=seconds_of) for p in problems[2:]}
    with Records(tmp_path / "records.sqlite") as records:
        chosen = {serialisation.schedule_text(from_records(records)(p, H200, 1).schedule) for p in problems[2:]}
    assert chosen == fastest


def never() -> Trials:
    raise AssertionError("everything is known")


def test_failures_are_recorded_and_not_tried_again(tmp_path: Path) -> None:
    texts = [serialisation.schedule_text(choice.schedule) for choice in islice(rank(SMALL, H200), 3)]
    faults = {texts[0]: "crash", texts[1]: "refuse", texts[2]: "wrong"}
    with Records(tmp_path / "records.sqlite") as records:
        tuned = tune([SMALL], H200, 3, records, start=partial(stand_ins, faults))
        assert (tuned.measured, tuned.failed) == (0, 3)
        assert {entry.schedule: entry.status for entry in records.all()} == {texts[0]: "failed", texts[1]: "failed", texts[2]: "wrong"}
        assert all(entry.reason and entry.seconds == float("inf") for entry in records.all())
        assert tune([SMALL], H200, 3, records, start=never).known == 3


# The command


@pytest.fixture()
def commands(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trials, "Trials", lambda machine, devices, threads: stand_ins())
    yield


LAYERS = [
    {"name": "one", "outputs": 16, "channels": 8, "height": 6, "width": 5, "filter": 3},
    {"name": "two", "outputs": 16, "channels": 8, "height": 4, "width": 4, "filter": 3, "stride": 2, "batch": 2, "groups": 2, "dilation": 1},
]


def test_tune_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], commands: None) -> None:
    path, store, lines = tmp_path / "layers.json", tmp_path / "records.sqlite", tmp_path / "lines.jsonl.gz"
    path.write_text(json.dumps(LAYERS))
    command = ["tune", str(path), "--target", "h200", "--trials", "3", "--records", str(store)]
    assert main([*command, "--export", str(lines)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 regions: 6 candidates measured, 0 failed, 0 known before" in printed and "one" in printed and "measurements written to" in printed
    assert main(command) == 0
    assert "0 candidates measured, 0 failed, 6 known before" in " ".join(capsys.readouterr().out.split())
    with Records(store) as records:
        assert {entry.region for entry in records.all()} == {key_of(problem) for problem in read_layers(path).values()}
    other = tmp_path / "other.sqlite"
    assert main(["tune", "--records", str(other), "--import", str(lines)]) == 0
    with Records(store) as first, Records(other) as second:
        assert list(first.all()) == list(second.all())


def test_tune_command_with_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], commands: None) -> None:
    command = ["tune", "zoo:lenet5", "--target", "h200", "--trials", "1", "--records", str(tmp_path / "records.sqlite")]
    assert main(command) == 0
    assert "candidates measured, 0 failed, 0 known before" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read"),
        ("{}", "no list of layers"),
        ("[]", "no list of layers"),
        ("", "cannot be read"),
        ("[" * 100_000, "nested too deeply"),
        ('[{"name": "one", "outputs": NaN}]', "NaN is no number"),
        ('[{"name": "one", "outputs": 1e999}]', "beyond the numbers"),
        ('[{"name": "\\ud800"}]', "surrogate"),
        ("[" + "9" * 10_000 + "]", "cannot be read"),
        ([{**LAYERS[0], "filter": 1 << 70}], "filter is 1180591620717411303424"),
        ([{**LAYERS[0], "filter": 3.0}], "filter is 3.0"),
        ([{**LAYERS[0], "outputs": 1 << 20, "channels": 1 << 20}], "more than 68719476736 elements"),
        ([{**LAYERS[0], "name": "a\x1b[2J"}], "the name"),
        ([{**LAYERS[0], "name": ["one"]}], "the name"),
        ("[3]", "entry 1: no object"),
        ([{**LAYERS[0], "filter": 0}], "entry 1: filter is 0"),
        ([{**LAYERS[0], "height": "6"}], "height is '6'"),
        ([{**LAYERS[0], "width": True}], "width is True"),
        ([{**LAYERS[0], "width": 1 << 40}], "width is 1099511627776"),
        ([{**LAYERS[0], "name": ""}], "the name ''"),
        ([{**LAYERS[0], "padding": 1}], "unknown 'padding'"),
        ([{**LAYERS[0], "two\nlines\u0085": 1}], r"unknown 'two\\nlines\\x85'"),
        ([{"name": "one", "outputs": 3}], "missing channels, filter, height, width"),
        ([LAYERS[0], LAYERS[0]], "entry 2: a second layer is called one"),
        ([{**LAYERS[0], "groups": 3}], "in 3 groups"),
    ],
)
def test_lists_of_layers_are_checked(content: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InvalidInput, match=words):
        read_layers(path)


def test_tune_command_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def line(*arguments: str) -> str:
        assert main(["tune", *arguments]) == 2
        error = capsys.readouterr().err.strip()
        assert "\n" not in error
        return error

    assert "nothing to tune" in line()
    assert "no whole number from 1 up" in line("zoo:lenet5", "--trials", "0")
    assert "no list of indices" in line("zoo:lenet5", "--target", "h200", "--devices", "first")
    assert "cannot be read" in line(str(tmp_path / "none.json"), "--target", "h200")
    assert "cannot be read" in line("--import", str(tmp_path / "none.jsonl"))
    if not is_present(H200):
        assert "needs that machine" in line("zoo:lenet5", "--target", "h200")


@pytest.mark.gpu
def test_trials_on_the_gpu(tmp_path: Path) -> None:
    module, inputs = example()
    module, inputs = module.cuda(), tuple(x.cuda() for x in inputs)
    path = tmp_path / "records.sqlite"
    executable = tilewright.compile(module, inputs, trials=3, records=path)
    assert all(row.measured_seconds for row in executable.plan.rows if row.kernels)
    fresh = torch.randn(1, 3, 8, 8, device="cuda")
    with torch.no_grad():
        expected = module.double()(fresh.double())
    torch.testing.assert_close(executable(fresh).double(), expected, rtol=0, atol=1e-5)
    with Records(path) as records:
        count = len(records)
        assert count and all(entry.status == "measured" for entry in records.all())
    again = tilewright.compile(module.float(), inputs, trials=3, records=path)
    assert again.image.sources == executable.image.sources
    with Records(path) as records:
        assert len(records) == count
