"""Saved executables: loaded ones compute the same, and every kind of damage is refused with a specific error."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilewright
from tests.runtime_programs import ProgramBuilder, chain, chain_reference
from tests.sample_artifacts import rewrite, rewrite_manifest
from tilewright.errors import CompilerMissing, InvalidArtifact, TargetNotPresent
from tilewright.hardware import host_cpu, machine
from tilewright.ir.graph import Graph, Node, Value
from tilewright.ir.layout import Layout, channels_last
from tilewright.runtime import artifact
from tilewright.runtime.encoding import decode_graph, encode_graph
from tilewright.runtime.executable import Executable
from tilewright.runtime.fields import parsed
from tilewright.runtime.signature import LEAF, OutputLeaf, Signature, StateLeaf, Tree


def test_the_documented_format_is_the_written_one() -> None:
    docs = (Path(__file__).parents[1] / "docs" / "usage.md").read_text()
    assert f"format version ({artifact.FORMAT_VERSION});" in docs


@pytest.fixture(params=["model", "model.tw.zip"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    chain(2).executable(("r1",)).save(tmp_path / request.param)
    return tmp_path / request.param


def test_a_loaded_executable_computes_the_same(saved: Path) -> None:
    original = chain(2).executable(("r1",))
    loaded = artifact.load(saved)
    for _ in range(2):
        x = torch.randn(6, 7)
        assert torch.equal(loaded(x), original(x))
    assert str(loaded.plan) == str(original.plan)
    assert loaded.verify(torch.randn(6, 7)).passed
    assert [p for p in saved.parent.iterdir() if p.name.startswith(".")] == []


def test_a_loaded_executable_can_be_saved_again(saved: Path, tmp_path: Path) -> None:
    loaded = artifact.load(saved)
    loaded.save(tmp_path / "again")
    first, second = artifact.read(saved), artifact.read(tmp_path / "again")
    assert first.program.storage == second.program.storage and first.machine == second.machine
    x = torch.randn(6, 7)
    assert torch.equal(artifact.load(tmp_path / "again")(x), loaded(x))
    loaded.save(saved)  # overwrites itself
    assert torch.equal(artifact.load(saved)(x), loaded(x))


def test_layouts_views_states_and_pytorch_nodes_survive(tmp_path: Path) -> None:
    layout = channels_last((1, 4, 2, 2)).with_halo(((0, 0), (0, 0), (1, 1), (1, 1)))
    builder = ProgramBuilder({"x": (1, 4, 2, 2), "total": (1, 4, 2, 2)}, {"w": torch.randn(5, 3)})
    packed = Layout((3, 5), ((0, 0), (1, 0), (0, 4)))
    builder.value("w.packed", (3, 5), packed, source="w")
    builder.storage["w.packed"] = replace(builder.storage["w.packed"], view=((3, 5), (1, 3), 0))  # transposed
    body = (
        "for (int c = 0; c < 4; c++) for (int h = 0; h < 2; h++) for (int v = 0; v < 2; v++) {"
        " int i = (c * 2 + h) * 2 + v; y[((h + 1) * 4 + v + 1) * 4 + c] = x0[i] + x1[i] + x2[1]; }"
    )
    builder.kernel("add", ("x", "total"), "a", (1, 4, 2, 2), body, layout=layout, arguments=("x", "total", "w.packed"))
    call = ((("input", 0), ("value", -1), ("value", False)), ())
    builder.torch("aten.sort.default", call, ("a",), {"s": ((1, 4, 2, 2), "f32"), "i": ((1, 4, 2, 2), "i64")})
    specs = builder.signature(1)
    signature = Signature(
        specs.inputs[:1],
        Tree("tuple", (Tree("tuple", (LEAF,)), Tree("dict"))),
        (OutputLeaf("value", 0), OutputLeaf("constant", value=math.inf), OutputLeaf("parameter", value="w")),
        Tree("dict", (LEAF, Tree("tuple", (LEAF, LEAF))), ("sorted", "rest")),
        states=(StateLeaf("total", "total", 0),),
    )
    image = replace(builder.image(("s", "i"), signature), states={"total": torch.zeros(1, 4, 2, 2)})
    artifact.save(image, tmp_path / "m.tw.zip")
    loaded, original = artifact.load(tmp_path / "m.tw.zip"), Executable(image)
    x = torch.randn(1, 4, 2, 2)
    for _ in range(3):
        ours, theirs = loaded(x), original(x)
        assert torch.equal(ours["sorted"], theirs["sorted"]) and ours["rest"][0] == math.inf
        assert torch.equal(ours["rest"][1], builder.constants["w"])
    assert torch.equal(original.image.states["total"], theirs["sorted"])
    first = (x + builder.constants["w"][0, 1]).sort(-1).values
    torch.testing.assert_close(artifact.load(tmp_path / "m.tw.zip")(x)["sorted"], first)


def test_graphs_with_bodies_and_every_attribute_survive() -> None:
    v, k = Value("v", (2, 3), "f32"), Value("k", (2, 3), "f32")
    body = Graph((Node("n", "full", (), ("v",), {"value": -math.inf, "shape": (2, 3)}),), (), ("v",), {"v": v, "k": k}, {"k": torch.ones(2, 3)})
    attributes = {"body": body, "flags": (True, None, 1, 1.5, "text", (2, ())), "of": torch.float16, "reverse": False}
    graph = Graph((Node("loop", "scan", (), ("v",), attributes, "model.rnn"),), (), ("v",), {"v": v, "k": k}, {"k": torch.zeros(2, 3)})
    weights: dict[str, torch.Tensor] = {}
    again = decode_graph(parsed(json.dumps(encode_graph(graph, "", weights)).encode(), "graph"), "", weights)
    node = again.nodes[0]
    assert {k: a for k, a in node.attributes.items() if k != "body"} == {k: a for k, a in attributes.items() if k != "body"}
    assert dict(node.attributes["body"].nodes[0].attributes) == {"value": -math.inf, "shape": (2, 3)}
    assert torch.equal(node.attributes["body"].constants["k"], torch.ones(2, 3)) and not again.constants["k"].any()
    with pytest.raises(InvalidArtifact, match="object"):
        encode_graph(Graph((Node("n", "x", (), (), {"a": object()}),), (), (), {}), "", {})


@pytest.mark.parametrize("name", ["manifest.json", "manifest.sha256", "weights.safetensors", "binaries/0000.so", "sources/0000_kernels.c"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "empty"])
def test_damage_is_named(saved: Path, name: str, damage: str) -> None:
    def change(files: dict[str, bytes]) -> None:
        data = files[name]
        middle = len(data) // 2
        if damage == "remove":
            del files[name]
        elif damage == "flip":
            files[name] = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        else:
            files[name] = data[:middle] if damage == "truncate" else b""

    rewrite(saved, change)
    with pytest.raises(InvalidArtifact) as caught:
        artifact.load(saved)
    assert name.replace("sha256", "json") in str(caught.value) or name in str(caught.value)


def test_a_surplus_file_is_refused(saved: Path) -> None:
    rewrite(saved, lambda files: files.update({"binaries/evil.so": b"x"}))
    with pytest.raises(InvalidArtifact, match="evil.so"):
        artifact.load(saved)


def test_a_truncated_or_damaged_zip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.zip"
    chain(1).executable(("r0",)).save(path)
    data = path.read_bytes()
    for count in (0, 10, len(data) // 2, len(data) - 5):
        path.write_bytes(data[:count])
        with pytest.raises(InvalidArtifact, match="m.zip"):
            artifact.load(path)
    step = max(len(data) // 40, 1)
    for position in range(0, len(data), step):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x55]) + data[position + 1 :])
        try:
            artifact.read(path)  # a byte of the zip's padding may be insignificant
        except InvalidArtifact:
            pass
    path.unlink()
    with pytest.raises(InvalidArtifact, match="no artifact"):
        artifact.load(path)


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "binaries/../../evil", "a/b", "binaries\\x", ".hidden"])
def test_names_that_leave_the_artifact_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "inner" / "m.zip"
    chain(1).executable(("r0",)).save(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, b"x")
    with pytest.raises(InvalidArtifact, match="file named"):
        artifact.load(path)
    directory = tmp_path / "inner" / "m"
    chain(1).executable(("r0",)).save(directory)
    rewrite_manifest(directory, lambda m: m["files"].update({name: "0"}))
    with pytest.raises(InvalidArtifact, match="names the file"):
        artifact.load(directory)
    assert not (tmp_path / "evil").exists()


def test_links_are_refused(tmp_path: Path) -> None:
    chain(1).executable(("r0",)).save(tmp_path / "m")
    binary = tmp_path / "m" / "binaries" / "0000.so"
    binary.rename(tmp_path / "elsewhere.so")
    binary.symlink_to(tmp_path / "elsewhere.so")
    with pytest.raises(InvalidArtifact, match="link"):
        artifact.load(tmp_path / "m")


def test_other_versions_machines_and_contents_are_refused(saved: Path) -> None:
    newer = artifact.FORMAT_VERSION + 1
    earlier = ((number, f"version {number}, .*compile the model again") for number in (0, 2, 4))
    others = (*earlier, ("1", "version '1'"), (True, "version True"), (None, "None"))
    for version, words in ((newer, f"version {newer}.*newer release"), *others):
        rewrite_manifest(saved, lambda m: m.update(version=version))
        with pytest.raises(InvalidArtifact, match=words):
            artifact.load(saved)
    rewrite_manifest(saved, lambda m: m.update(version=artifact.FORMAT_VERSION))
    artifact.load(saved)
    rewrite_manifest(saved, lambda m: m["machine"].update(processors=4096))
    with pytest.raises(InvalidArtifact, match="digest"):
        artifact.load(saved)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["program"]["regions"][0]["calls"][0].__setitem__(0, "nothing"),
        lambda m: m["program"]["regions"][0]["calls"][0][1].append("x"),
        lambda m: m["program"].pop("storage"),
        lambda m: m["program"]["storage"]["x"].update(order=[[0, 0]]),
        lambda m: m["program"]["graph"]["values"].append(["z", [-1], "f32"]),
        lambda m: m["program"]["graph"]["constants"].append("nothing"),
        lambda m: m["program"].update(aliases={"p0": "q0", "q0": "p0"}),
        lambda m: m["signature"].update(inputs=[]),
        lambda m: m["binaries"][0].update(file="weights.safetensors"),
        lambda m: m["machine"].update(surprise=1),
        lambda m: m.update(files=[]),
    ],
)
def test_an_inconsistent_manifest_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    chain(1).executable(("r0",)).save(tmp_path / "m")
    rewrite_manifest(tmp_path / "m", change)
    with pytest.raises(InvalidArtifact):
        artifact.load(tmp_path / "m")


def test_only_functional_aten_operators_come_from_an_artifact(tmp_path: Path) -> None:
    builder = ProgramBuilder({"x": (3,)})
    builder.torch("aten.relu.default", ((("input", 0),), ()), ("x",), {"y": ((3,), "f32")})
    exe = builder.executable(("y",))
    exe.save(tmp_path / "m")
    x = torch.randn(3)
    assert torch.equal(artifact.load(tmp_path / "m")(x), x.relu())
    for target in ("aten.from_file.default", "os.system", "aten.relu_.default"):
        rewrite_manifest(tmp_path / "m", lambda m: m["program"]["graph"]["nodes"][0]["attributes"].update(target=target))
        with pytest.raises(InvalidArtifact):
            artifact.load(tmp_path / "m")


@pytest.mark.parametrize("target", ["h200", "cortex-a53"])
def test_saving_for_an_absent_machine(tmp_path: Path, target: str) -> None:
    try:
        exe = tilewright.compile(torch.nn.Sequential(torch.nn.Linear(7, 6), torch.nn.ReLU()), (torch.randn(6, 7),), target=target)
    except CompilerMissing as missing:
        pytest.skip(str(missing))
    image = exe.image
    with pytest.raises(TargetNotPresent, match=machine(target).name):
        exe(torch.randn(6, 7))
    exe.save(tmp_path / "m.tw.zip")
    again = artifact.read(tmp_path / "m.tw.zip")
    assert again.machine == image.machine and again.program.kernels == image.program.kernels
    with pytest.raises(TargetNotPresent if target == "h200" else InvalidArtifact, match=machine(target).name):
        artifact.load(tmp_path / "m.tw.zip")


def test_a_missing_instruction_set_is_named(tmp_path: Path) -> None:
    host = host_cpu()
    image = chain(1).image(("r0",), machine=replace(host, isa=(*host.isa, "avx4096")))
    Executable(image).save(tmp_path / "m")
    with pytest.raises(InvalidArtifact, match="avx4096"):
        artifact.load(tmp_path / "m")


def test_nothing_half_written_and_nothing_foreign_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exe = chain(1).executable(("r0",))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("keep")
    with pytest.raises(InvalidArtifact, match="no artifact"):
        exe.save(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "keep"
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        archive.writestr("photo.jpg", b"keep")
    with pytest.raises(InvalidArtifact, match="no artifact"):
        exe.save(tmp_path / "photos.zip")
    (tmp_path / "photos.zip").unlink()
    exe.save(tmp_path / "m")

    def broken(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", broken)
    with pytest.raises(InvalidArtifact, match="m cannot be written: disk full"):
        exe.save(tmp_path / "m")
    monkeypatch.undo()
    x = torch.randn(6, 7)
    torch.testing.assert_close(artifact.load(tmp_path / "m")(x), chain_reference(x, chain(1).constants["w"], 1))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "mine"]


def test_an_older_driver_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The required release is the one that the artifact names, not the one that this version would require."""
    rewrite_manifest(saved, lambda m: m["requires"].update(cuda_driver="13.5"))
    monkeypatch.setattr(artifact, "system_driver", lambda: SimpleNamespace(version=(13, 0)))
    with pytest.raises(TargetNotPresent, match=r"needs a driver of CUDA 13\.5, and this one is of 13\.0"):
        artifact.load(saved)
    monkeypatch.setattr(artifact, "system_driver", lambda: SimpleNamespace(version=(13, 5)))
    artifact.load(saved)
    rewrite_manifest(saved, lambda m: m["requires"].update(cuda_driver="soon"))
    with pytest.raises(InvalidArtifact, match="driver of CUDA 'soon'"):
        artifact.load(saved)
