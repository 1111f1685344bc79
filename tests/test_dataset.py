"""Data sets of measured layers: round trips, merging, interruptions, rejected files; and collecting them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fake_workers import seconds as seconds_of
from tests.measured_layers import H200, layer, measured, outcome
from tests.stand_ins import processes
from tilewright.errors import InvalidInput
from tilewright.kernels.gpu.gemm.space import ContractionSchedule
from tilewright.kernels.registry import schedule_types
from tilewright.selection.learned.gpu import described
from tilewright.tuning import dataset, serialisation
from tilewright.tuning.collecting import collect, favourites_of, ranking_of, sample_of
from tilewright.tuning.dataset import MEASURES, MeasuredLayer
from tilewright.tuning.problems import key_of
from tilewright.tuning.trials import Job, Outcome
from tilewright.tuning.workloads import Convolution, Pool, problem_of, text_of

SMALL = layer(32, 32, 8)
OTHER = layer(16, 16, 5, 1)


def same(first: MeasuredLayer, second: MeasuredLayer) -> bool:
    """Whether two layers are equal up to the digits that a file keeps."""
    plain_facts = [(m.layer, m.machine, m.mode, tuple(m.failures), dict(m.environment), sorted(m.schemas)) for m in (first, second)]
    if plain_facts[0] != plain_facts[1]:
        return False
    for kind, columns in first.schemas.items():
        if set(columns) != set(second.schemas[kind]):
            return False
        for name, column in columns.items():
            tolerance = 1e-4 if name in ("seconds", "spread") else 0.0
            if not np.allclose(column, second.schemas[kind][name], rtol=tolerance, atol=0):
                return False
    return True


def one(schedule: ContractionSchedule, seconds: float, rounds: int = 4) -> MeasuredLayer:
    return dataset.from_outcomes(SMALL, "h200", [outcome(Job(dataset.layer_problem(SMALL), schedule), seconds, rounds)])


# Files


def test_layers_come_back(tmp_path: Path) -> None:
    job = Job(dataset.layer_problem(SMALL), ContractionSchedule(16, 16, 8, 2, 2, 1, 2))
    first = replace(measured(SMALL, 30), failures=(("a schedule", "failed: made up"),))
    second = measured(OTHER, 10)
    dataset.write(tmp_path / "deep" / "all.jsonl.gz", [first, second])
    found = dataset.read(tmp_path / "deep" / "all.jsonl.gz")
    assert len(found) == 2 and same(found[0], first) and same(found[1], second)
    assert found[0].count == 30 and len(found[0].times()) == 30 and found[0].best == min(found[0].times().values())
    texts = set(found[0].times())
    assert texts == {serialisation.schedule_text(serialisation.schedule_of(text)) for text in texts}
    wrong = Outcome(job, "wrong", "relative error 1", schedule="a schedule")
    assert dataset.from_outcomes(SMALL, "h200", [wrong]).failures == (("a schedule", "wrong: relative error 1"),)


def test_workloads_are_layers_named_by_their_text(tmp_path: Path) -> None:
    workload = Convolution(2, 16, 24, (9, 7), (3, 3), groups=2, then="residual")
    known = measured(dataset.layer_of(workload), 12)
    dataset.write(tmp_path / "file", [known, measured(SMALL, 12)])
    found = dataset.read(tmp_path / "file")
    assert same(found[0], known) and found[0].layer == {"name": text_of(workload)}
    assert key_of(dataset.layer_problem(found[0].layer)) == key_of(problem_of(workload))
    assert dataset.layer_workload(found[0].layer) == workload
    assert dataset.layer_workload(layer(32, 16, 8, 1, 2)) == Convolution(1, 16, 32, (8, 8), (1, 1), 2)


def test_the_same_layers_are_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        dataset.write(tmp_path / name, [measured(SMALL, 20)])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_what_was_replayed_more_often_counts() -> None:
    schedule, another = ContractionSchedule(16, 16, 8, 2, 2, 1, 2), ContractionSchedule(32, 16, 8, 2, 2, 1, 2)
    text = serialisation.schedule_text(schedule)
    rough, careful, later = one(schedule, 3e-6, 4), one(schedule, 2e-6, 9), one(schedule, 2.5e-6, 9)
    for order, expected in (((rough, careful), 2e-6), ((careful, rough), 2e-6), ((careful, later), 2.5e-6), ((later, careful), 2e-6)):
        assert dataset.merged(*order).times() == {text: expected}
    both = dataset.merged(rough, one(another, 1e-6))
    assert both.times() == {text: 3e-6, serialisation.schedule_text(another): 1e-6}
    failing = replace(rough, failures=(("a", "failed"),))
    assert dataset.merged(failing, replace(careful, failures=(("a", "failed"), ("b", "failed")))).failures == (("a", "failed"), ("b", "failed"))
    later_counts = dataset.from_outcomes(SMALL, "h200", [outcome(Job(dataset.layer_problem(SMALL), schedule), s) for s in (1e-6, 5e-6)])
    assert later_counts.times() == {text: 5e-6}


def test_lines_of_one_layer_are_merged_and_machines_are_not(tmp_path: Path) -> None:
    first, again_, elsewhere = (
        one(ContractionSchedule(16, 16, 8, 2, 2, 1, 2), 3e-6),
        one(ContractionSchedule(32, 16, 8, 2, 2, 1, 2), 2e-6),
        measured(OTHER, 8),
    )
    a, b = tmp_path / "a", tmp_path / "b"
    dataset.write(a, [first, elsewhere])
    dataset.append(b, again_)
    dataset.append(b, replace(first, machine="a100"))
    found = dataset.read(a, b)
    assert [(m.layer["name"], m.machine, m.count) for m in found] == [
        (SMALL["name"], "h200", 2), (OTHER["name"], "h200", 8), (SMALL["name"], "a100", 1)
    ]  # fmt: skip


def test_an_interrupted_layer_is_cut_off_and_the_next_goes_behind(tmp_path: Path) -> None:
    path = tmp_path / "growing"
    first, second = measured(SMALL, 12), measured(OTHER, 8)
    dataset.append(path, first)
    whole = path.read_bytes()
    dataset.append(path, second)
    full = path.read_bytes()
    assert dataset.without_remains(path) == 0 and path.read_bytes() == full
    for end in (len(whole) + 1, len(whole) + 40, len(full) - 9, len(full) - 1):
        path.write_bytes(full[:end])
        with pytest.raises(InvalidInput, match="cannot be read"):
            dataset.read(path)
        assert dataset.without_remains(path) == end - len(whole)
        assert path.read_bytes() == whole
        dataset.append(path, second)
        assert path.read_bytes() == full and [m.count for m in dataset.read(path)] == [12, 8]
    path.write_bytes(full[:30])
    assert dataset.without_remains(path) == 30 and dataset.read(path) == []


def test_other_damage_is_not_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "file"
    dataset.write(path, [measured(SMALL, 12), measured(OTHER, 8)])
    for content in (path.read_bytes()[:-6], b"no gzip at all", path.read_bytes()[:30] + b"\xff" * 8 + path.read_bytes()[38:]):
        path.write_bytes(content)
        assert dataset.without_remains(path) == 0 and path.read_bytes() == content
        with pytest.raises(InvalidInput, match="cannot be read|line 1 of .* is no measured layer"):
            dataset.read(path)
    for place in (tmp_path / "nothing", tmp_path, Path("/dev/zero")):
        for read in (dataset.read, dataset.without_remains):
            with pytest.raises(InvalidInput, match=f"{place} cannot be read"):
                read(place)


def changed(change: Callable[[dict[str, Any]], Any]) -> str:
    content = json.loads(dataset.as_line(measured(SMALL, 12)))
    result = change(content)
    return json.dumps(content if result is None else result)


BROKEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no object": lambda line: [1, 2],
    "no layer": lambda line: {name: value for name, value in line.items() if name != "layer"},
    "no width": lambda line: line["layer"].pop("width") and None,
    "a width": lambda line: line["layer"].update(width="wide"),
    "a schema": lambda line: line["schemas"].update(AbacusSchedule={"beads": [1]}),
    "an axis": lambda line: line["schemas"]["ContractionSchedule"].update(colour=[1] * 12),
    "no tile": lambda line: line["schemas"]["ContractionSchedule"].pop("block_m") and None,
    "no times": lambda line: line["schemas"]["ContractionSchedule"].pop("seconds") and None,
    "too few times": lambda line: line["schemas"]["ContractionSchedule"]["seconds"].pop() and None,
    "a time of nothing": lambda line: line["schemas"]["ContractionSchedule"]["seconds"].__setitem__(0, 0.0),
    "a negative time": lambda line: line["schemas"]["ContractionSchedule"]["seconds"].__setitem__(0, -1.0),
    "no number": lambda line: line["schemas"]["ContractionSchedule"]["seconds"].__setitem__(0, "fast"),
    "a time of 2^70": lambda line: line["schemas"]["ContractionSchedule"]["seconds"].__setitem__(0, 1 << 70),
    "a time of 1e-300": lambda line: line["schemas"]["ContractionSchedule"]["seconds"].__setitem__(0, 1e-300),
    "a time that is no number": lambda line: line["schemas"]["ContractionSchedule"]["seconds"].__setitem__(0, float("nan")),
    "an endless time": lambda line: line["schemas"]["ContractionSchedule"]["seconds"].__setitem__(0, float("inf")),
    "a truth for a time": lambda line: line["schemas"]["ContractionSchedule"]["seconds"].__setitem__(0, True),
    "a tile of 0": lambda line: line["schemas"]["ContractionSchedule"]["block_m"].__setitem__(0, 0),
    "a tile of 2^70": lambda line: line["schemas"]["ContractionSchedule"]["block_m"].__setitem__(0, 1 << 70),
    "a tile of 1.5": lambda line: line["schemas"]["ContractionSchedule"]["block_m"].__setitem__(0, 1.5),
    "a tile of text": lambda line: line["schemas"]["ContractionSchedule"]["block_m"].__setitem__(0, "16"),
    "tiles in lists": lambda line: line["schemas"]["ContractionSchedule"].update(block_m=[[1]] * 12),
    "no replays": lambda line: line["schemas"]["ContractionSchedule"]["rounds"].__setitem__(0, 0),
    "a width of 2^70": lambda line: line["layer"].update(width=1 << 70),
    "a width of 0": lambda line: line["layer"].update(width=0),
    "a width of 1e400": lambda line: line["layer"].update(width=10**400),
    "no sizes": lambda line: line.update(layer={"name": line["layer"]["name"]}),
    "no workload": lambda line: line.update(layer={"name": "linear rows=3 channels=0 outputs=4"}),
    "a name": lambda line: line["layer"].update(name=["one"]),
    "half a surrogate pair": lambda line: line["layer"].update(name="\ud800"),
    "an escape": lambda line: line.update(machine="\x1b[2J"),
    "an environment": lambda line: line.update(environment={"gpu": 3}),
    "no schemas": lambda line: line.update(schemas=[]),
    "failures": lambda line: line.update(failures=[["one"]]),
    "another layer of this name": lambda line: line["layer"].update(outputs=999),
}


@pytest.mark.parametrize("how", BROKEN)
def test_bad_lines_are_named(how: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    good = dataset.as_line(measured(SMALL, 12))
    path.write_bytes(gzip.compress(f"{good}\n{changed(BROKEN[how])}\n{good}\n".encode()))
    with pytest.raises(InvalidInput, match=r"^line 2 of .*file is no measured layer"):
        dataset.read(path)


@pytest.mark.parametrize("text", [b"{", b"[" * 100_000, b'{"schemas":' * 20_000, b"\xff", b"null", b"9" * 10_000])
def test_lines_that_are_no_json_are_named(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(text + b"\n"))
    with pytest.raises(InvalidInput, match="line 1 of"):
        dataset.read(path)


def test_axes_that_came_later_have_their_defaults(tmp_path: Path) -> None:
    def older(line: dict[str, Any]) -> None:
        for columns in line["schemas"].values():
            for name in ("atomics", "cluster"):
                columns.pop(name, None)

    path = tmp_path / "file"
    path.write_bytes(gzip.compress(f"{changed(older)}\n".encode()))
    (found,) = dataset.read(path)
    for kind, columns in found.schemas.items():
        defaults = {axis.name: axis.default for axis in fields(schedule_types()[kind])}
        assert set(columns) == {*defaults, *MEASURES}
    assert all((found.schemas["ContractionSchedule"][name] == 0).all() for name in ("atomics", "cluster"))
    assert set(dataset.merged(measured(SMALL, 12), found).times()) >= set(found.times())


# Collecting


def test_collecting_goes_on_where_it_ended(tmp_path: Path) -> None:
    path, layers = tmp_path / "data", [SMALL, OTHER, dataset.layer_of(Pool(2, 16, (6, 6), 3, 2))]
    choose = sample_of(6, 7, H200)
    seen: list[tuple[str, int, int, int]] = []
    with processes() as trials:
        assert collect(trials, H200, layers, choose, path, seconds=-1.0) == 0 and not path.exists()
        counted = collect(trials, H200, layers[:1], choose, path, progress=lambda *state: seen.append(state))
        known = {m.layer["name"] for m in dataset.read(path)}
        counted += collect(trials, H200, [one for one in layers if one["name"] not in known], choose, path)
    found = dataset.read(path)
    assert [m.layer for m in found] == layers and sum(m.count for m in found) == counted == 18
    assert seen[0] == (SMALL["name"], 1, 0, 0) and seen[-1] == (SMALL["name"], 6, 0, 1)
    for entry in found:
        schedules = {serialisation.schedule_text(schedule) for schedule in choose(entry.layer, dataset.layer_problem(entry.layer))}
        assert set(entry.times()) == schedules and len(schedules) == 6
        for text, seconds in entry.times().items():
            assert seconds == pytest.approx(seconds_of(text), rel=0.01)
        assert entry.environment["gpu"] == "fake gpu" and entry.machine == "h200"


def test_failures_are_collected_too(tmp_path: Path) -> None:
    choose = sample_of(6, 7, H200)
    texts = [serialisation.schedule_text(schedule) for schedule in choose(SMALL, dataset.layer_problem(SMALL))]
    faults = {texts[0]: "crash", texts[1]: "wrong", texts[2]: "refuse", texts[3]: "hang"}
    with processes(faults, trial_seconds=2.0) as trials:
        assert collect(trials, H200, [SMALL], choose, tmp_path / "data") == 2
    (found,) = dataset.read(tmp_path / "data")
    assert set(found.times()) == set(texts[4:])
    reasons = sorted(reason for _, reason in found.failures)
    assert len(reasons) == 4 and reasons[-1].startswith("wrong: ") and all(reason.startswith("failed: ") for reason in reasons[:3])


def test_samples_are_the_same_for_the_same_seed() -> None:
    problem = dataset.layer_problem(SMALL)
    first, second, other = (sample_of(20, seed, H200)(SMALL, problem) for seed in (1, 1, 2))
    assert first == second != other and len(set(first)) == len(first) == 20
    assert {type(schedule).__name__ for schedule in first} >= {"ContractionSchedule", "DirectSchedule"}


class Backwards:
    """A model that reverses the analytical order."""

    record = "formed"

    def predicted(self, columns: Any, volumes: Any, machine: Any, analytical: np.ndarray, stages: Any) -> np.ndarray:
        return 1e-12 / analytical


def test_favourites_are_the_models_first_that_were_not_measured() -> None:
    problem = dataset.layer_problem(SMALL)
    ranking = ranking_of(problem, H200)
    learnable = [part for part in ranking.parts if described(part, H200) is not None]
    assert len(learnable) > 1
    worst_first = sorted(ranking, key=lambda choice: -choice.seconds)
    unknown = favourites_of(Backwards(), 5, [], H200)(SMALL, problem)  # type: ignore[arg-type]
    known = dataset.from_outcomes(SMALL, "h200", [outcome(Job(problem, schedule), 1e-6) for schedule in unknown])
    further = favourites_of(Backwards(), 5, [known], H200)(SMALL, problem)  # type: ignore[arg-type]
    assert {ranking.find(schedule).seconds for schedule in unknown} <= {choice.seconds for choice in worst_first[:5]}  # type: ignore[union-attr]
    assert len(further) == 5 and not set(further) & set(unknown)
