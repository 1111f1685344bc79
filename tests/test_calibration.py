"""Fitted constants: every one states its origin, damage is named, and each kind of machine has files that serve it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tilewright.errors import InvalidModel
from tilewright.hardware import calibration
from tilewright.hardware.calibration import (
    CpuCalibration,
    GpuCalibration,
    GpuVariants,
    assumed,
    cpu_calibration,
    fallbacks,
    gpu_calibration,
    gpu_chains,
    gpu_recurrence,
    gpu_variants,
    parts_of,
)
from tilewright.hardware.catalogue import catalogue
from tilewright.hardware.machine import Machine
from tilewright.selection.learned.gpu import SUFFIXES, models_for

ROOT = Path(__file__).parent.parent
FILES = sorted(path for path in calibration.FOLDER.glob("*.json") if path.stem != calibration.FALLBACKS)
H200, RTX, XEON, A53 = (catalogue()[name] for name in ("h200", "rtx2080", "xeon-sapphire-rapids", "cortex-a53"))
OWN = {"chains", "half_chains", "recurrent", "variants"}
"""Parts that only a GPU's own file has: no other stands in for them."""
PARTS = {entry.name for kind in (GpuCalibration, CpuCalibration) for entry in fields(kind)} | OWN


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_constant_says_where_it_is_from(path: Path) -> None:
    content = json.loads(path.read_text())
    assert content["measured_on"]
    used = {entry["fit"] for entries in content["parts"].values() for entry in entries.values()}
    assert used == set(content["fits"]), "a fit that is missing or found nothing"
    for fit in content["fits"].values():
        assert fit["command"] and fit["data_note"] and len(fit["commit"]) >= 7 and int(fit["commit"], 16)
        assert all((ROOT / name).is_file() for name in fit["data"])
    for entries in content["parts"].values():
        for entry in entries.values():
            assert entry["unit"] and entry["meaning"] and isinstance(entry["value"], int | float)
    assert set(content["parts"]) <= PARTS
    assert parts_of(path) == {part: {name: entry["value"] for name, entry in entries.items()} for part, entries in content["parts"].items()}


@pytest.mark.parametrize("machine", catalogue().values(), ids=lambda machine: machine.name)
def test_every_machine_has_constants(machine: Machine) -> None:
    found = gpu_calibration(machine) if machine.is_gpu else cpu_calibration(machine)
    assert all(value > 0 for part in asdict(found).values() for value in part.values())


def test_a_machine_without_a_file_has_the_stated_ones() -> None:
    assert fallbacks() == {"gpu": ("h200", "v100"), "cpu": ("golden-cove",)}
    h200, v100, core = (parts_of(calibration.FOLDER / f"{name}.json") for name in ("h200", "v100", "golden-cove"))
    assert h200 is not None and v100 is not None and core is not None
    unknown, shared = asdict(gpu_calibration(RTX)), {part: values for part, values in h200.items() if part not in OWN}
    assert unknown["counted"] == v100["counted"] and {**unknown, "counted": None} == {**shared, "counted": None}
    assert calibration.gpu_recurrence(RTX) is None is calibration.gpu_chains(RTX)
    assert asdict(cpu_calibration(A53)) == core == asdict(cpu_calibration(replace(XEON, name="native")))


def test_machines_of_one_chip_share_what_was_measured() -> None:
    known = catalogue()
    h100, h200 = known["h100"], known["h200"]
    assert h100.measured_as == h200.measured_as == "h200" and h100.digest != h200.digest
    assert gpu_calibration(h100) == gpu_calibration(h200)
    assert gpu_variants(h100) == gpu_variants(h200) == GpuVariants(0.0, 0.0, 0.0, meeting=0.31, sent=0.75)
    for part in (gpu_chains, partial(gpu_chains, half=True), gpu_recurrence):
        assert part(h100) == part(h200) and part(h200) is not None, str(part)
    assert models_for(h100) == models_for(h200)
    assert len(models_for(h200)) == len(SUFFIXES)
    for machine in known.values():
        assert machine.measured_as in known and not (known[machine.measured_as].chip), machine.name
        same = known[machine.measured_as]
        assert (machine.architecture, machine.processors, machine.clock_hz) == (same.architecture, same.processors, same.clock_hz), machine.name
    assert models_for(known["a100"]) == () and gpu_recurrence(known["a100"]) is None


def test_a_machine_is_added_by_a_file(folder: Path) -> None:
    own = changed("h200", lambda content: content["parts"]["steps"]["overlap"].update(value=2.5))
    (folder / "rtx2080.json").write_text(json.dumps({**own, "parts": {"steps": own["parts"]["steps"]}}))
    found = gpu_calibration(RTX)
    assert found.steps.overlap == 2.5 and found.direct == gpu_calibration(H200).direct
    assert gpu_calibration(H200).steps.overlap != 2.5
    (folder / "neoverse-n1.json").write_text(
        json.dumps(changed("golden-cove", lambda content: content["parts"]["winograd"]["streamed_share"].update(value=1)))
    )
    assert cpu_calibration(catalogue()["neoverse-n1"]).winograd.streamed_share == 1.0


@pytest.mark.parametrize(("machine", "present"), [(H200, gpu_calibration), (XEON, cpu_calibration)])
def test_assumed_constants_hold_inside(machine: Machine, present: Callable[[Machine], Any]) -> None:
    before, elsewhere = present(machine), (gpu_calibration(RTX), cpu_calibration(A53))
    other = replace(before, winograd=replace(before.winograd, **dict.fromkeys(asdict(before.winograd), 7.0)))
    with assumed(machine, other):
        assert present(machine) is other
        assert (gpu_calibration(RTX), cpu_calibration(A53)) == elsewhere
    assert present(machine) is before


def first_fit(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(iter(content["fits"].values()))
    return found


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no value": (lambda c: c["parts"]["steps"]["overlap"].pop("value"), "steps.overlap has no number"),
    "a text as value": (lambda c: c["parts"]["steps"]["overlap"].update(value="3"), "steps.overlap has no number"),
    "no unit": (lambda c: c["parts"]["gemm"]["fragment_wavefronts"].pop("unit"), "gemm.fragment_wavefronts lacks unit"),
    "another fit": (lambda c: c["parts"]["steps"]["unhidden"].update(fit="guess"), "steps.unhidden was found by 'guess'"),
    "no commit": (lambda c: first_fit(c).pop("commit"), "fit '.*' lacks commit"),
    "no command": (lambda c: first_fit(c).update(command=" "), "fit '.*' lacks command"),
    "a constant too few": (lambda c: c["parts"]["steps"].pop("overlap"), "overlap"),
    "a constant too many": (lambda c: c["parts"]["steps"].update(more=c["parts"]["steps"]["overlap"]), "more"),
    "no part": (lambda c: c["parts"].pop("window"), "no file .* has the part 'window'"),
    "no parts": (lambda c: c.pop("parts"), "parts"),
    "a list for a part": (lambda c: c["parts"].update(steps=[]), "h200.json"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(name: str, folder: Path) -> None:
    damage, said = DAMAGES[name]
    (folder / "h200.json").write_text(json.dumps(changed("h200", damage)))
    with pytest.raises(InvalidModel, match=said):
        gpu_calibration(H200)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[]", b'{"fits": {}, "fits": {}}'])
def test_a_file_that_is_none_is_named(text: bytes, folder: Path) -> None:
    (folder / "golden-cove.json").write_bytes(text)
    with pytest.raises(InvalidModel, match=r"golden-cove\.json"):
        cpu_calibration(XEON)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package's files that is read instead."""
    copy = tmp_path / "calibration"
    shutil.copytree(calibration.FOLDER, copy)
    monkeypatch.setattr(calibration, "FOLDER", copy)
    return copy


def changed(name: str, change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The content of a file of the package, changed."""
    content: dict[str, Any] = json.loads((ROOT / "tilewright" / "hardware" / "calibration" / f"{name}.json").read_text())
    change(content)
    return content
