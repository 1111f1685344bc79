"""`tilewright calibrate` of a GPU: what a minute's kernels decide, the file that holds it, and what plans make of it. No GPU is needed but by the last."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tilewright
from bench.adapted import TRAIN, fewer, minute, neutral
from tests.measured_layers import H200, layer, some
from tests.stand_ins import processes
from tilewright import hardware
from tilewright.cli import main
from tilewright.errors import CacheError, InvalidInput, UnsupportedOption
from tilewright.hardware import calibration_file, host_gpu, identified_machine, machine, measured_order
from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.measured_order import CONSTANTS, CORRECTED, PRESENT
from tilewright.ir.space import Comparison
from tilewright.kernels.schema import USUAL
from tilewright.report.explanation import explanation
from tilewright.selection.choice import rank
from tilewright.selection.learned import gpu as learned
from tilewright.tuning import adapting, calibrate_gpu, choices, dataset, trials
from tilewright.tuning.adapting import RECIPE, Adaptation, Order, adapted, cross_validated, seconds_of
from tilewright.tuning.calibrate_gpu import as_stored, calibrate
from tilewright.tuning.problems import convolution_problem
from tilewright.tuning.refit import Group, groups_of
from tilewright.tuning.training import with_trees

MADE_UP = replace(H200, name="made-up-gpu", processors=100)
"""A GPU that the catalogue lacks, and that has no model."""
UNREAD = replace(MADE_UP, calibration="0123456789ab", uncalibrated=MADE_UP.digest)
"""The same GPU, which names a calibration that this process has not read."""
SMALL = convolution_problem(32, 32, 8, 8, 3)
PACKAGED = len(learned.SUFFIXES)
"""Models of the H200 in the package."""


def quick(patch: pytest.MonkeyPatch) -> None:
    """Few layers are enough; fits to two, and few trees."""
    patch.setattr(adapting, "LEAST_LAYERS", 6)
    patch.setattr(adapting, "EVALUATIONS", 1)
    patch.setattr(adapting, "MOST_FITTED", 2)
    patch.setattr(adapting, "RECIPE", with_trees(RECIPE, 20))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hardware, "host_gpu", lambda: MADE_UP)
    quick(monkeypatch)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def recorded() -> list[dataset.MeasuredLayer]:
    """Kernels of a few layers that were measured on an H200."""
    return [fewer(measured, 20, number) for number, measured in enumerate(islice(dataset.each_line(TRAIN), 9))]


@pytest.fixture(scope="module")
def adaptation() -> Adaptation:
    """To small layers for which one schema takes three times its predicted time (`measured_layers`)."""
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        return adapted(some(9, 60), MADE_UP, Order(gpu_calibration(MADE_UP)))


@pytest.fixture
def stored(adaptation: Adaptation) -> Iterator[Path]:
    yield calibration_file.store(as_stored(adaptation, MADE_UP), MADE_UP)


# The decision


def test_what_ranks_layers_left_out_best_is_chosen(adaptation: Adaptation) -> None:
    assert set(adaptation.qualities) == {PRESENT, CONSTANTS, CORRECTED} and adaptation.layers == 9 and adaptation.kernels > 400
    loss = {name: row["lop@1"] for name, row in adaptation.qualities.items()}
    assert loss[CORRECTED] < 0.5 * loss[PRESENT], "one schema's error is learned from other layers"
    assert adaptation.chosen == CORRECTED == min(loss, key=lambda name: loss[name]) and len(adaptation.order.models) == 1
    assert adaptation.environment == {"gpu": "made up"}


def test_layers_are_predicted_from_others(recorded: Sequence[dataset.MeasuredLayer], monkeypatch: pytest.MonkeyPatch) -> None:
    groups = groups_of(recorded, H200, np.inf)
    trained: list[set[int]] = []
    judged: list[set[int]] = []

    def refitted(training: Sequence[Group], *_: Any) -> Any:
        trained.append({group.layer for group in training})
        return gpu_calibration(H200)

    def seconds(held: Sequence[Group], machine: Any, order: Order) -> list[np.ndarray]:
        judged.append({group.layer for group in held})
        return seconds_of(held, machine, order)

    monkeypatch.setattr(adapting, "refitted", refitted)
    monkeypatch.setattr(adapting, "seconds_of", seconds)
    found = cross_validated(groups, H200, Order(gpu_calibration(H200)))
    assert len(trained) == 3 and len(judged) == 9 and set.union(*judged) == set(range(len(recorded)))
    assert not any(train & held for number, train in enumerate(trained) for held in judged[3 * number : 3 * number + 3])
    assert found[PRESENT] == found[CONSTANTS], "the same constants"


def test_an_order_that_is_right_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where times are those predicted, nothing ranks better, and the present order is kept as it is."""
    exact = []
    for measured in some(9, 40):
        (groups, times) = (
            groups_of([measured], MADE_UP, np.inf),
            seconds_of(groups_of([measured], MADE_UP, np.inf), MADE_UP, Order(gpu_calibration(MADE_UP))),
        )
        schemas = {group.kind: {**measured.schemas[group.kind], "seconds": own} for group, own in zip(groups, times, strict=True)}
        exact.append(replace(measured, schemas=schemas))
    found = adapted(exact, MADE_UP, Order(gpu_calibration(MADE_UP)))
    assert found.chosen == PRESENT and found.order == Order(gpu_calibration(MADE_UP)) and found.qualities[PRESENT]["lop@1"] == 0


def test_too_few_kernels_are_an_error(recorded: Sequence[dataset.MeasuredLayer]) -> None:
    for few in (recorded[:5], []):
        with pytest.raises(InvalidInput, match=f"kernels of {len(few)} layers were measured, which are too few to adapt to; .* more --seconds"):
            adapted(few, H200, Order(gpu_calibration(H200)))


def test_neutral_constants_owe_nothing_to_the_machine() -> None:
    """The benchmark's unknown H200: every constant of the package's file is replaced."""
    own, found = gpu_calibration(H200), neutral(H200)
    assert found.counted == own.counted == gpu_calibration(machine("v100")).counted
    values = {name for part in vars(found).values() if part is not found.counted for name in vars(part).values()}
    assert values == {1.0, 3.0, 4.0, own.counted.step_instructions, own.counted.overlap}
    first = minute(60, 12)
    assert [measured.count for measured in first] == [12] * 5 and [dataset.as_line(one) for one in first] == [
        dataset.as_line(one) for one in minute(60, 12)
    ]


# The file


def test_a_file_is_used_until_it_is_removed(stored: Path, adaptation: Adaptation) -> None:
    assert stored.stat().st_mode & 0o077 == 0 and stored.parent.stat().st_mode & 0o077 == 0
    found = machine("cuda")
    content = measured_order.stored(MADE_UP)
    assert content is not None and found.calibration == content.name and found.identity == MADE_UP.digest and found.digest == MADE_UP.digest
    assert gpu_calibration(found) == adaptation.order.constants != gpu_calibration(MADE_UP)
    assert identified_machine("cuda") == MADE_UP, "training for the package ignores it"
    (model,) = learned.models_for(found)
    (trained,) = adaptation.order.models
    assert model.overheads == trained.overheads
    np.testing.assert_array_equal(model.forest.value, trained.forest.value)
    exact = rank(SMALL, found)
    plain = rank(SMALL, MADE_UP)
    assert (
        exact.first().seconds != plain.first().seconds
        and "learned correction" in exact.first().terms
        and "learned correction" not in plain.first().terms
    )
    assert calibration_file.remove(MADE_UP) == stored and calibration_file.remove(MADE_UP) is None
    assert machine("cuda") == MADE_UP and learned.models_for(MADE_UP) == ()
    assert rank(SMALL, found).first() == exact.first(), "a machine that was identified before keeps what it names"


def test_constants_alone_rank_without_any_model(adaptation: Adaptation) -> None:
    h200 = hardware.catalogue()["h200"]
    calibration_file.store(as_stored(replace(adaptation, chosen=CONSTANTS, order=Order(adaptation.order.constants)), h200), h200)
    found = machine("h200")
    assert found.calibration and learned.models_for(found) == () and len(learned.models_for(h200)) == PACKAGED
    assert "learned correction" not in rank(SMALL, found).first().terms
    assert machine("a100").calibration == "", "another GPU has another file"


def test_measurements_for_the_package_ignore_it(adaptation: Adaptation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = hardware.catalogue()["h200"]
    calibration_file.store(as_stored(adaptation, h200), h200)
    assert machine("h200") != identified_machine("h200") == h200
    asked: list[Any] = []

    def made(machine: Any, devices: Any) -> trials.Trials:
        asked.append(machine)
        return processes()

    monkeypatch.setattr(trials, "Trials", made)
    assert main(["train", "--collect", str(tmp_path / "data"), "--target", "h200", "--layers", "1", "--each", "2"]) == 0
    assert asked == [h200] and asked[0].calibration == ""


def test_kept_choices_depend_on_it(stored: Path, adaptation: Adaptation) -> None:
    first = machine("cuda")
    calibration_file.store(as_stored(replace(adaptation, chosen=CONSTANTS, order=Order(adaptation.order.constants)), MADE_UP), MADE_UP)
    places = {choices.place(SMALL, each, USUAL) for each in (MADE_UP, first, machine("cuda"))}
    assert len(places) == 3 and choices.place(SMALL, first, USUAL) in places


def test_plans_name_it(stored: Path) -> None:
    pytest.importorskip("cuda.bindings")
    module, x = nn.Linear(64, 64).eval(), torch.randn(32, 64)
    found = machine("cuda")
    line = f"order of candidates measured by tilewright calibrate: {found.calibration}"
    for target, named in ((found, found), (MADE_UP, MADE_UP), (UNREAD, MADE_UP)):
        with tilewright.compile(module, (x,), target=target) as executable:
            assert executable.image.machine == named
            assert (line in explanation(executable.image)) == (target is found)
            assert "tilewright calibrate" not in explanation(replace(executable.image, machine=UNREAD)), "an artifact of another process"


def test_only_a_calibration_that_is_in_use_counts(adaptation: Adaptation) -> None:
    """The machine of a loaded artifact names what this process has not read."""
    content = replace(as_stored(adaptation, MADE_UP), date="of no other test")
    calibration_file.store(content, MADE_UP)
    unread = replace(MADE_UP, calibration=content.name, uncalibrated=MADE_UP.digest)
    assert machine(unread) == MADE_UP and choices.place(SMALL, unread, USUAL) == choices.place(SMALL, MADE_UP, USUAL)
    assert "learned correction" not in choices.remembered()(SMALL, unread, 1).terms
    found = machine("cuda")
    assert found == unread and machine(found) == found, "the same machine, in use from now on"
    chosen = choices.remembered()(SMALL, found, 1)
    assert replace(chosen, comparison=Comparison()) == rank(SMALL, found).first(), "not what was kept before"


def test_every_damage_is_an_error_that_names_file_and_remedy(stored: Path) -> None:
    text = stored.read_text()
    content = json.loads(text)
    changes: list[dict[str, Any]] = [
        {"constants": {**content["constants"], "gemm": {"fragment_wavefronts": -1.0}}}, {"constants": []}, {"identity": "0"},
        {"model": "no base64"}, {"model": 1}, {"model": ""}, {"chosen": CONSTANTS}, {"chosen": "another"}, {"chosen": [CORRECTED]},
        {"machine": None}, {"date": 2026}, {"environment": ["made up"]}, {"environment": {"gpu": 1}}, {"kernels": "9"}, {"kernels": 0}, {"layers": 9.0},
        {"qualities": []}, {"qualities": {}}, {"qualities": {**content["qualities"], PRESENT: "good"}},
    ]  # fmt: skip
    rows = [{name: value for name, value in content["qualities"][PRESENT].items() if name != left_out} for left_out in measured_order.SHOWN]
    rows += [{**content["qualities"][PRESENT], name: value} for name in measured_order.SHOWN for value in ("0.1", None, float("nan"), float("inf"))]
    changes += [{"qualities": {**content["qualities"], PRESENT: row}} for row in rows]
    damaged = [text[:-9], "", "[]", "{}", text.replace('"lop@1"', '"lop@2"'), json.dumps({**content, "version": 2})]
    damaged += [json.dumps({name: value for name, value in content.items() if name != left_out}) for left_out in content]
    forged = [{**content, **change} for change in changes]
    damaged += [json.dumps({**other, "sha256": calibration_file.digest_of(other)}) for other in forged]
    for other in damaged:
        stored.write_text(other)
        with pytest.raises(
            CacheError, match=r"calibration .*is damaged or not .*; run `tilewright calibrate --target made-up-gpu` again, or .* --remove`"
        ) as caught:
            machine("cuda")
        assert str(stored) in str(caught.value)
    with pytest.raises(CacheError):
        tilewright.compile(nn.Linear(7, 6), (torch.randn(6, 7),), target="cuda")


def test_a_model_that_is_no_forest_is_an_error(adaptation: Adaptation) -> None:
    calibration_file.store(replace(as_stored(adaptation, MADE_UP), model="AAAA"), MADE_UP)
    with pytest.raises(CacheError, match="does not serve: .*; run `tilewright calibrate --target made-up-gpu` again"):
        rank(SMALL, machine("cuda"))


# The command


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["calibrate", "--target", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_stores_shows_and_removes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, adaptation: Adaptation, recorded: Sequence[dataset.MeasuredLayer]
) -> None:
    place = str(calibration_file.place(MADE_UP))
    assert run(capsys, "cuda", "--show") == (0, f"there is no calibration of this GPU: {place}; the models of the package serve\n", "")
    monkeypatch.setattr(calibrate_gpu, "measured", lambda machine, seconds, progress: recorded if (machine, seconds) == (MADE_UP, 60.0) else [])
    monkeypatch.setattr(calibrate_gpu, "adapted", lambda layers, machine, present: {id(recorded): adaptation}[id(layers)])
    code, first, err = run(capsys, "cuda")
    content = measured_order.stored(MADE_UP)
    assert code == 0 and err == "" and content is not None and content.chosen == CORRECTED and f"calibration {content.name} in {place}\n" in first
    assert all(name in first for name in (PRESENT, CONSTANTS, f"{CORRECTED} (chosen)"))
    assert run(capsys, "made-up-gpu", "--show")[:2] == (0, first.lstrip("\n"))
    assert run(capsys, "cuda", "--remove") == (0, f"removed {place}\n", "")
    assert run(capsys, "cuda", "--remove") == (0, f"there is no calibration of this GPU: {place}\n", "")


def test_nothing_is_stored_that_ranks_no_better(
    stored: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, adaptation: Adaptation
) -> None:
    kept = replace(adaptation, chosen=PRESENT, order=Order(gpu_calibration(MADE_UP)))
    monkeypatch.setattr(calibrate_gpu, "calibrate", lambda *_: kept)
    told = "neither ranks better than the present order: nothing was stored"
    for earlier in (f", and {stored} was removed", ""):
        code, out, _ = run(capsys, "cuda")
        assert code == 0 and out.endswith(f"{told}{earlier}\n") and measured_order.stored(MADE_UP) is None


def test_a_damaged_file_can_be_removed(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored.write_text("{")
    code, _, err = run(capsys, "cuda", "--show")
    assert code == 2 and str(stored) in err and "--remove" in err
    assert run(capsys, "cuda", "--remove")[0] == 0 and not stored.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("h200",), "calibrating h200 needs that GPU, and the GPU here is made-up-gpu"), (("nonsense",), "unknown target"),
        (("cortex-a53",), "description in the catalogue, and only this CPU"), (("cuda", "--threads", "2"), "--threads is for a CPU"),
        (("cuda", "--seconds", "nan"), "no number"),
    ],
)  # fmt: skip
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and words in err and err.count("\n") == 1


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "host_gpu", lambda: None)
    assert "target 'cuda' is the GPU of this machine; the driver shows none" in run(capsys, "cuda")[2]
    assert "calibrating h200 needs that GPU, and the driver shows none" in run(capsys, "h200")[2]
    assert run(capsys, "h200", "--show")[0] == 0


def test_a_gpu_with_a_model_of_the_package_is_refused_unless_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedOption, match="the package has a model of h200, trained with many more kernels than a minute measures; --force"):
        calibrate(H200, 1.0)
    compared: list[Order] = []

    def compare(layers: Any, machine: Any, present: Order) -> None:
        compared.append(present)

    monkeypatch.setattr(calibrate_gpu, "measured", lambda *_: [])
    monkeypatch.setattr(calibrate_gpu, "adapted", compare)
    calibrate(H200, 1.0, force=True)
    assert compared == [Order(gpu_calibration(H200), learned.models_for(H200))] and len(compared[0].models) == PACKAGED, (
        "the order of today includes the package's models"
    )


@pytest.mark.parametrize(("module", "name"), [("scipy", "SciPy"), ("sklearn", "scikit-learn")])
def test_what_fitting_needs_is_named_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    monkeypatch.setattr(calibrate_gpu, "find_spec", lambda asked: None if asked == module else object())
    with pytest.raises(UnsupportedOption, match=f"calibrating a GPU needs {name}; .*tilewright\\[train\\]"):
        calibrate(MADE_UP, 1.0)


def test_the_fixed_set_is_measured_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """By processes that stand in for compiler and GPU; wrong and failed kernels are left out."""
    monkeypatch.setattr(calibrate_gpu, "Trials", lambda machine: processes())
    wanted = [layer(32, 32, 8), layer(40, 32, 10)]
    monkeypatch.setattr(calibrate_gpu, "layers_to_measure", lambda: iter(wanted))
    found = calibrate_gpu.measured(H200, 60.0)
    assert [measured.layer for measured in found] == wanted and [measured.count for measured in found] == [adapting.EACH] * 2
    assert calibrate_gpu.measured(H200, -1.0) == []
    monkeypatch.setattr(calibrate_gpu, "Trials", lambda machine: processes({"": "refuse"}))
    with pytest.raises(InvalidInput, match="no candidate of 2 layers could be measured, the first: failed: does not compile: .*; nothing was stored"):
        calibrate_gpu.measured(H200, 60.0)
    names = [str(one["name"]) for one in islice(adapting.layers_to_measure(), 24)]
    assert len(set(names)) == 24 and names == [str(one["name"]) for one in islice(adapting.layers_to_measure(), 24)]


@pytest.mark.gpu
def test_on_this_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "host_gpu", host_gpu)
    monkeypatch.setattr(adapting, "LEAST_LAYERS", 3)
    code, out, err = run(capsys, "cuda", "--seconds", "5", "--force")
    assert code == 0 and err == "" and "layers" in out and ("nothing was stored" in out) == (machine("cuda").calibration == "")
