"""Artifacts with false contents and valid hashes: each gives one error before anything is mapped, and accepted ones are harmless."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import tilewright
from tests.sample_artifacts import MANIFEST, WEIGHTS, files, manifest_of, put, signed, with_weights
from tilewright.cli import main
from tilewright.errors import InvalidArtifact, KernelFailed
from tilewright.runtime import artifact, cpu
from tilewright.runtime.encoding import decode_machine
from tilewright.runtime.fields import MOST_DEPTH, parsed

Change = Callable[[Any], object]


def refused(path: Path) -> str:
    """The error of loading, raised before anything is mapped; one line that names the artifact."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InvalidArtifact) as caught:
        patch.setattr(cpu, "Library", lambda *_: pytest.fail("a binary was mapped"))
        artifact.load(path)
    assert "\n" not in str(caught.value) and path.name in str(caught.value)
    return str(caught.value)


def changed(name: str, change: Change, path: Path) -> Path:
    manifest = manifest_of(files(name))
    change(manifest)
    return put(signed(files(name), manifest), path / "artifact")


def shift(manifest: Any, elements: int) -> None:
    """Lets the first call begin that many elements behind the start of its arguments."""
    call = manifest["program"]["regions"][0]["calls"][0]
    call[3] = [elements] * len(call[1])


def storage(manifest: Any, name: str) -> Any:
    return manifest["program"]["storage"][name]


def values(manifest: Any) -> dict[str, Any]:
    return {value[0]: value for value in manifest["program"]["graph"]["values"]}


def reshape(manifest: Any, name: str, shape: list[int], dtype: str = "f32") -> None:
    """Replaces the shape and type of a value everywhere."""
    values(manifest)[name][1:] = [shape, dtype]
    entry = storage(manifest, name)
    entry.update(value=[name, shape, dtype], shape=shape, order=[[i, 0] for i in range(len(shape))], halo=[[0, 0]] * len(shape))
    for leaf in manifest["signature"]["inputs"]:
        if leaf["name"] == name:
            leaf.update(shape=shape, dtype=dtype)


def call(manifest: Any, region: int, argument: int, name: str) -> None:
    manifest["program"]["regions"][region]["calls"][0][1][argument] = name


def counted(manifest: Any) -> Any:
    """A kernel that takes its trips from the call."""
    return next(kernel for kernel in manifest["program"]["kernels"] if kernel["trips"])


def trips_of(manifest: Any) -> Any:
    """A call of that kernel, [kernel, arguments, trips]."""
    name = counted(manifest)["name"]
    return next(call for region in manifest["program"]["regions"] for call in region["calls"] if call[0] == name)


SHAPES: dict[str, Change] = {
    "a result of no elements": lambda m: reshape(m, "relu", [0, 0]),
    "a result of one element": lambda m: reshape(m, "relu", [1, 1]),
    "a result of booleans": lambda m: reshape(m, "relu", [1, 8, 8, 8], "bool"),
    "an input of one element": lambda m: reshape(m, "x", [1, 1, 1, 1]),
    "an input of booleans": lambda m: reshape(m, "x", [1, 3, 8, 8], "bool"),
    "an output of one element": lambda m: reshape(m, "softmax", [1, 1]),
    "a layout smaller than its value": lambda m: storage(m, "relu").update(shape=[1, 1, 1, 1]),
    "no halo": lambda m: storage(m, "x.padded").update(halo=[[0, 0]] * 4),
    "an order of too few dimensions": lambda m: storage(m, "relu").update(order=[[0, 0]]),
    "a factor of a dimension that is not there": lambda m: storage(m, "relu")["order"].append([77, 4]),
    "a factor before its dimension": lambda m: storage(m, "relu").update(order=[[1, 4], [0, 0], [1, 0], [2, 0], [3, 0]]),
    "a signature with another shape": lambda m: m["signature"]["inputs"][0].update(shape=[1, 3, 4, 4]),
    "a signature with another type": lambda m: m["signature"]["inputs"][0].update(dtype="f64"),
    "a constant for a value": lambda m: storage(m, "relu").update(source="p_head_bias"),
    "a view beyond its constant": lambda m: storage(m, "p_body_0_weight@relu").update(view=[[3, 3, 3, 8], [9, 3, 1, 270], 0]),
    "a view from beyond": lambda m: storage(m, "p_body_0_weight@relu")["view"].__setitem__(2, 1),
    "a view with negative strides": lambda m: storage(m, "p_body_0_weight@relu").update(view=[[3, 3, 3, 8], [-9, 3, 1, 27], 0]),
    "a view of another rank": lambda m: storage(m, "p_body_0_weight@relu").update(view=[[216], [1, 1], 0]),
    "a view that is no view": lambda m: storage(m, "p_body_0_weight@relu").update(view=[1, 2]),
    "an unknown source": lambda m: storage(m, "p_body_0_weight@relu").update(source="nothing"),
    "a source that is a number": lambda m: storage(m, "p_body_0_weight@relu").update(source=7),
    "a matrix of no rows": lambda m: storage(m, "p_body_0_weight@relu").update(matrix=[]),
    "a matrix that does not fit": lambda m: storage(m, "p_body_0_weight@relu").update(matrix=[[1.0, 2.0, 3.0]]),
    "a rounded value that is no constant": lambda m: storage(m, "relu").update(numbers="tf32"),
    "parts of a matrix that does not fit": lambda m: storage(m, "p_body_0_weight@relu").update(numbers="tf32 pair", matrix=[[1.0]]),
    "numbers by a truth": lambda m: storage(m, "p_body_0_weight@relu").update(numbers=True),
    "unknown numbers": lambda m: storage(m, "p_body_0_weight@relu").update(numbers="f8 pair"),
    "parts without a dimension": lambda m: storage(m, "p_body_0_weight@relu").update(numbers="tf32 pair"),
    "parts of another type": lambda m: storage(m, "p_body_0_weight@relu").update(numbers="f16 pair"),
    "a unit of many elements": lambda m: storage(m, "p_body_0_weight@relu").update(numbers="f16 scale"),
    "a product of extents beyond 64 bits": lambda m: reshape(m, "relu", [1 << 31, 1 << 31, 1 << 31]),
    "an extent that is no whole number": lambda m: values(m)["relu"].__setitem__(1, [1.5]),
    "an extent that is true": lambda m: values(m)["relu"].__setitem__(1, [True, 8, 8, 8]),
}
MEMORY: dict[str, Change] = {
    "an output on a constant": lambda m: m["program"]["aliases"].update(softmax="p_head_bias"),
    "an output on a small constant": lambda m: m["program"]["aliases"].update(softmax="conv2d_reshape"),
    "a value that is an alias of a small constant": lambda m: m["program"]["aliases"].update(relu="p_head_bias"),
    "a value that is an alias of an input": lambda m: m["program"]["aliases"].update(relu="x"),
    "an input that is an alias": lambda m: m["program"]["aliases"].update(x="relu"),
    "a circle of aliases": lambda m: m["program"]["aliases"].update(relu="mean", mean="relu"),
    "an alias of nothing": lambda m: m["program"]["aliases"].update(relu="nothing"),
    "a kernel that writes to an input": lambda m: call(m, 2, 1, "x"),
    "a kernel that writes to a constant": lambda m: call(m, 3, 3, "p_head_bias"),
    "a kernel that writes to a packed constant": lambda m: call(m, 1, 3, "p_body_0_weight@relu"),
    "a kernel that reads more than there is": lambda m: call(m, 1, 1, "mean"),
    "a kernel that writes what it reads": lambda m: call(m, 2, 0, "max_pool2d"),
    "a kernel that reads what nothing wrote": lambda m: m["program"]["regions"].pop(0),
    "calls in another order": lambda m: m["program"]["regions"].reverse(),
    "an output that nothing writes": lambda m: m["program"]["regions"].pop(),
    "extents that are smaller": lambda m: m["program"]["kernels"][1].update(extents=[4, 4, 4, 4]),
    "extents of fewer arguments": lambda m: m["program"]["kernels"][1]["extents"].pop(),
    "a kernel that is said to write nothing": lambda m: m["program"]["kernels"][1].update(writes=[False] * 4),
    "a kernel with scalars": lambda m: m["program"]["kernels"][1].update(scalars=1),
    "a kernel that requires what its binary does not say": lambda m: m["program"]["kernels"][1].update(requires=m["machine"]["isa"][:1]),
    "a kernel that requires what its machine lacks": lambda m: m["program"]["kernels"][1].update(requires=["sm_90"]),
    "a grid on a CPU": lambda m: m["program"]["kernels"][1].update(grid=[2, 1, 1]),
    "a kernel by another name": lambda m: m["program"]["kernels"][1].update(name="_init"),
    "a kernel that no binary has": lambda m: m["binaries"].pop(),
    "a binary with a function that it does not have": lambda m: m["binaries"][0]["entries"].append("printf"),
    "more arguments than parameters": lambda m: m["program"]["regions"][0]["calls"][0][1].append("x"),
    "a call beyond the end of its arguments": lambda m: shift(m, 1),
    "a call before the start of its arguments": lambda m: shift(m, -1),
    "a call far beyond its arguments": lambda m: shift(m, 1 << 62),
    "more shifts than arguments": lambda m: m["program"]["regions"][0]["calls"][0][3].extend([0] * 9),
    "a call without shifts": lambda m: m["program"]["regions"][0]["calls"][0].pop(),
}
TRIPS: dict[str, Change] = {
    "more trips than there are": lambda m: trips_of(m).__setitem__(2, 64),
    "a kernel without its trips": lambda m: trips_of(m).__setitem__(2, 0),
    "trips that add less": lambda m: [counted(m).update(growths=[0] * len(counted(m)["growths"])), trips_of(m).__setitem__(2, 64)],
    "trips of fewer arguments": lambda m: counted(m)["growths"].pop(),
}
LOOPS: dict[str, Change] = {
    "more steps than kernels were made for": lambda m: loop(m).update(repeat=6),
    "a thousand million steps": lambda m: loop(m).update(repeat=10**9),
    "no steps": lambda m: loop(m).update(repeat=0),
    "more steps in the kernels too": lambda m: [loop(m).update(repeat=6), *(k.update(steps=6) for k in m["program"]["kernels"])],
}
HISTORIES: dict[str, Change] = {
    "a shorter history": lambda m: [storage(m, "lstm_scan.state0").update(value=["lstm_scan.state0", [5, 2, 6], "f32"], shape=[5, 2, 6])],
    "a loop whose body differs": lambda m: node(m, "lstm_scan")["attributes"].update(length=6),
    "a loop without directions": lambda m: node(m, "lstm_scan")["attributes"].pop("reverse"),
    "a direction too few": lambda m: node(m, "lstm_scan")["attributes"].update(reverse=[True]),
    "a direction that is a number": lambda m: node(m, "lstm_scan")["attributes"].update(reverse=[True, 1]),
    "a loop without a body": lambda m: node(m, "lstm_scan")["attributes"].update(body=None),
    "a body that reads what is not there": lambda m: node(m, "lstm_scan")["attributes"]["body"]["graph"]["nodes"].pop(0),
}
EMBEDDED: dict[str, Change] = {
    "indices of another type": lambda m: reshape(m, "tokens", [2, 4], "i32"),
    "a smaller table": lambda m: reshape(m, "p_table_weight", [1, 6]),
    "a fault that is an alias": lambda m: m["program"]["aliases"].update({"embedding.faults": "embedding"}),
    "a result on a fault": lambda m: m["program"]["aliases"].update({"cummax": "embedding.faults"}),
    "faults of no checks": lambda m: m["program"]["faults"].update({"embedding.faults": []}),
    "a node that saves": lambda m: node(m, "cummax")["attributes"].update(target="aten.save.default"),
    "a node that reads a file": lambda m: node(m, "cummax")["attributes"].update(target="aten.from_file.default"),
    "a node that calls Python": lambda m: node(m, "cummax")["attributes"].update(target="os.system"),
    "a node with an input that is not there": lambda m: node(m, "cummax")["attributes"].update(call=[[["input", 1]], []]),
    "a node with an argument of another kind": lambda m: node(m, "cummax")["attributes"].update(call=[[["eval", "1"]], []]),
    "a node with half a call": lambda m: node(m, "cummax")["attributes"].update(call=[[]]),
    "an unknown operator": lambda m: node(m, "cummax").update(operator="system"),
    "an operator that makes another shape": lambda m: node(m, "sum_1")["attributes"].update(axes=[0]),
    "an operator with an axis that is not there": lambda m: node(m, "sum_1")["attributes"].update(axes=[9]),
    "an unknown kind of region": lambda m: m["program"]["regions"][2].update(kind="python"),
    "a region of PyTorch's that calls kernels": lambda m: m["program"]["regions"][1].update(kind="torch"),
    "a region of unknown nodes": lambda m: m["program"]["regions"][2].update(nodes=["nothing"]),
    "a region that does not make its output": lambda m: m["program"]["regions"][2].update(nodes=[]),
    "a region of PyTorch's that writes to an input": lambda m: m["program"]["regions"][2].update(outputs=["tokens"]),
}
CALLED: dict[str, Change] = {
    "output 99": lambda m: m["signature"]["outputs"][0].update(index=99),
    "output -1": lambda m: m["signature"]["outputs"][0].update(index=-1),
    "input 99": lambda m: m["signature"]["outputs"][1].update(index=99),
    "an unknown kind of output": lambda m: m["signature"]["outputs"][0].update(kind="code"),
    "a view by an operator that is none": lambda m: m["signature"]["outputs"][1].update(calls=[["aten.add.Tensor", [1]]]),
    "a view by an operator that changes": lambda m: m["signature"]["outputs"][1].update(calls=[["aten.transpose_.default", [0, 1]]]),
    "a view of dimensions that are not there": lambda m: m["signature"]["outputs"][1].update(calls=[["aten.transpose.int", [0, 7]]]),
    "a view that is many": lambda m: m["signature"]["outputs"][1].update(calls=[["aten.unbind.int", [0]]]),
    "a view by strides": lambda m: m["signature"]["outputs"][1].update(calls=[["aten.as_strided.default", [[2], [1], 0]]]),
    "a view of nothing": lambda m: m["signature"]["outputs"][1].update(calls=3),
    "an unknown parameter": lambda m: m["signature"]["outputs"][3].update(value="nothing"),
    "a parameter that is a list": lambda m: m["signature"]["outputs"][3].update(value=[1]),
    "a change of another shape": lambda m: [reshape(m, "y", [4, 1]), reshape(m, "mul", [4, 3])],  # type: ignore[func-returns-value]
    "a change of input 9": lambda m: m["signature"].update(mutations=[[9, 1]]),
    "a change by output 9": lambda m: m["signature"].update(mutations=[[1, 9]]),
    "a state of another output": lambda m: m["signature"]["states"][0].__setitem__(2, 77),
    "a state by another name": lambda m: m["signature"]["states"][0].__setitem__(0, "other"),
    "two states of one input": lambda m: m["signature"]["states"].append(m["signature"]["states"][0]),
    "fewer inputs": lambda m: m["signature"]["inputs"].pop(),
    "one input twice": lambda m: m["signature"]["inputs"][1].update(name="x"),
    "a tree of more leaves": lambda m: m["signature"]["input_tree"]["children"][0]["children"].append("leaf"),
    "a tree that is a number": lambda m: m["signature"].update(input_tree=5),
    "a named tuple of a keyword": lambda m: m["signature"]["output_tree"].update(kind="namedtuple", type="T", keys=["a", "b", "class", "d"]),
    "a named tuple with a field twice": lambda m: m["signature"]["output_tree"].update(kind="namedtuple", type="T", keys=["a", "a", "b", "c"]),
    "a dictionary whose keys are lists": lambda m: m["signature"]["output_tree"].update(kind="dict", keys=[[], [1], [2], [3]]),
    "an infinite prediction": lambda m: m["program"]["regions"][0].update(predicted_seconds=1e301),
    "a prediction that is a text": lambda m: m["program"]["regions"][0].update(predicted_seconds="1"),
    "an escape sequence as a reason": lambda m: m["program"]["regions"][0].update(reasons=["\x1b[2J"]),
    "a name of two lines": lambda m: m["program"]["regions"][0].update(name="a\nb"),
    "half a surrogate pair": lambda m: m["program"]["regions"][0].update(reasons=["\ud800"]),
    "an unknown field": lambda m: m["program"]["regions"][0].update(more=1),
    "no machine": lambda m: m.pop("machine"),
    "a machine of lists": lambda m: m.update(machine=[]),
    "a machine with a cache that is a number": lambda m: m["machine"].update(caches=[3]),
    "a machine with fewer instructions than the kernels have": lambda m: require_less(m),
    "another machine": lambda m: m["requires"].update(architecture="aarch64"),
    "a weight that is not there": lambda m: m["program"]["graph"]["constants"].append("nothing"),
    "a node twice": lambda m: m["program"]["graph"]["nodes"].append(m["program"]["graph"]["nodes"][0]),
    "a value twice": lambda m: m["program"]["graph"]["values"].append(m["program"]["graph"]["values"][0]),
}


SLICES: dict[str, Change] = {
    "a slice beyond its buffer": lambda m: storage(m, "relu_1").update(around=[[0, 0], [20, -1], [0, 0], [0, 0]]),
    "a slice at the end of a buffer, and beyond": lambda m: place(m, "relu_1", 20, 0),
    "a slice with a wider buffer than its own": lambda m: place(m, "relu_1", 8, 40),
    "a slice so far away that a product overflows": lambda m: place(m, "relu_1", 1 << 40, 1 << 40),
    "a slice that overlaps another": lambda m: place(m, "relu_1", 4, 15),
    "a slice in the place of another": lambda m: place(m, "relu_2", 0, 27),
    "a slice in the halo": lambda m: storage(m, "relu_1").update(halo=[[0, 0]] * 4, around=[[0, 0], [8, 11], [0, 2], [1, 1]]),
    "a slice without a halo": lambda m: storage(m, "relu_1").update(halo=[[0, 0]] * 4),
    "a slice of another order": lambda m: storage(m, "relu_1")["order"].reverse(),
    "a slice of other dimensions": lambda m: storage(m, "relu_1").update(around=[[8, 11]]),
    "a slice of split dimensions": lambda m: storage(m, "relu_1")["order"].append([1, 4]),
    "a slice of nothing": lambda m: m["program"]["aliases"].pop("relu_1"),
    "a slice of a result": lambda m: m["program"]["aliases"].update(relu_1="conv2d_3_add"),
    "a slice of an input": lambda m: m["program"]["aliases"].update(relu_1="x"),
    "a slice of a slice of nothing": lambda m: m["program"]["aliases"].update(relu_1="cat", cat="nothing"),
    "a concatenation that lacks a part": lambda m: m["program"]["regions"].pop(0),
    "a concatenation that lacks its copied part": lambda m: m["program"]["regions"].pop(part_of(m, "cat.24")),
    "a kernel that writes to all of what it reads a slice of": lambda m: m["program"]["regions"][part_of(m, "relu_2")]["calls"][0][1].__setitem__(
        -1, "cat_1"
    ),
}


def place(manifest: Any, name: str, before: int, after: int) -> None:
    """Moves a slice to another channel."""
    storage(manifest, name)["around"][1] = [before, after]


def part_of(manifest: Any, name: str) -> int:
    """The number of the region that stores a value."""
    return next(number for number, region in enumerate(manifest["program"]["regions"]) if region["outputs"] == [name])


def loop(manifest: Any) -> Any:
    return next(region for region in manifest["program"]["regions"] if region["kind"] == "loop")


def require_less(manifest: Any) -> None:
    """Lets every CPU of the architecture load it."""
    manifest["machine"]["isa"] = manifest["requires"]["isa"] = []
    manifest["machine_digest"] = decode_machine(parsed(json.dumps(manifest["machine"]).encode(), "it")).digest


def node(manifest: Any, name: str) -> Any:
    return next(entry for entry in manifest["program"]["graph"]["nodes"] if entry["name"] == name)


CASES = {
    **{what: ("convolutions", change) for what, change in {**SHAPES, **MEMORY}.items()},
    **{what: ("batched", change) for what, change in TRIPS.items()},
    **{f"{what}, {name}": (name, change) for name, changes in (("stepwise", LOOPS), ("recurrent", HISTORIES)) for what, change in changes.items()},
    **{what: ("embedded", change) for what, change in EMBEDDED.items()},
    **{what: ("stateful", change) for what, change in CALLED.items()},
    **{what: ("joined", change) for what, change in SLICES.items()},
}


@pytest.mark.parametrize("what", CASES)
def test_a_lie_is_refused(what: str, tmp_path: Path) -> None:
    refused(changed(*CASES[what], tmp_path))


@pytest.mark.parametrize("name", ["convolutions", "batched", "chained", "recurrent", "stepwise", "embedded", "stateful", "joined", "returned"])
def test_the_truth_is_accepted(name: str, tmp_path: Path) -> None:
    artifact.load(put(signed(files(name)), tmp_path / "artifact"))


def test_slices_of_results(tmp_path: Path) -> None:
    """They are stored as PyTorch receives them, and are no results themselves."""

    def permute(manifest: Any) -> None:
        for name in ("cat", "relu", "relu_1"):
            storage(manifest, name).update(order=[[0, 0], [2, 0], [3, 0], [1, 0]])

    assert "relu is a slice of the result cat, which is not stored as it is passed" in refused(changed("returned", permute, tmp_path))
    shutil.rmtree(tmp_path / "artifact")
    assert "relu is a slice of cat, and a result" in refused(changed("returned", lambda m: m["program"]["graph"]["outputs"].append("relu"), tmp_path))


TEXTS = {
    "NaN": (f'"version": {artifact.FORMAT_VERSION}'.encode(), b'"version": NaN'),
    "a number beyond all": (b'"repeat": 1', b'"repeat": 1e999'),
    "a number of ten thousand digits": (b'"repeat": 1', b'"repeat": ' + b"1" * 10_000),
    "two fields of one name": (b'"repeat": 1', b'"repeat": 1, "repeat": 2'),
    "bytes that are no text": (b'"repeat": 1', b'"repeat": "\xff\xfe"'),
    "lists in lists": (b'"reasons": [', b'"reasons": [' + b"[" * 5000 + b"]" * 5000 + b", "),
    "a hundred thousand lists in lists": (b'"reasons": [', b'"reasons": [' + b"[" * 100_000 + b"]" * 100_000 + b", "),
}


@pytest.mark.parametrize("what", TEXTS)
def test_json_that_no_encoder_writes_is_refused(what: str, tmp_path: Path) -> None:
    text = files("convolutions")[MANIFEST]
    found, instead = TEXTS[what]
    compact = json.dumps(json.loads(text)).encode()
    assert found in compact
    refused(put(signed(files("convolutions"), compact.replace(found, instead, 1)), tmp_path / "artifact"))


def test_trees_are_not_nested_without_end(tmp_path: Path) -> None:
    def nest(manifest: Any) -> None:
        tree: Any = "leaf"
        for _ in range(MOST_DEPTH):
            tree = {"kind": "tuple", "children": [tree]}
        manifest["signature"]["output_tree"] = tree

    assert "nested" in refused(changed("convolutions", nest, tmp_path))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_weights_of_another_type_or_shape_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = safetensors.torch.load(files("stateful")[WEIGHTS])
    for name in ("p_scale", "state:total"):
        other = {**weights, name: weights[name].to(dtype)}
        assert "weight" in refused(put(signed(with_weights(files("stateful"), other)), tmp_path / f"{name[:3]}type")) or name
        other = {**weights, name: weights[name][:1].clone()}
        refused(put(signed(with_weights(files("stateful"), other)), tmp_path / f"{name[:3]}shape"))


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    data = files("stateful")[WEIGHTS]
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])

    def with_header(text: bytes) -> bytes:
        return struct.pack("<Q", len(text)) + text + data[8 + struct.unpack("<Q", data[:8])[0] :]

    overlapping = {name: {**entry, "data_offsets": [0, 12]} for name, entry in header.items()}
    huge = {name: {**entry, "shape": [1 << 62, 1 << 62]} for name, entry in header.items()}
    bad = [b"", data[:7], data[:20], struct.pack("<Q", 1 << 62) + data[8:], with_header(b"[" * 1000), with_header(b"{}"), with_header(b"\xff" * 10)]
    bad += [with_header(json.dumps(value).encode()) for value in (overlapping, huge)]
    for index, damaged in enumerate(bad):
        refused(put(signed({**files("stateful"), WEIGHTS: damaged}), tmp_path / f"artifact{index}"))


def test_damaged_binaries_are_refused(tmp_path: Path) -> None:
    held = files("convolutions")
    name = "binaries/0001.so"
    data = held[name]
    other = next(d for n, d in held.items() if n.startswith("binaries/") and n != name)
    for index, damaged in enumerate((b"", data[:100], data[: len(data) // 2], data[:-1], other, b"\x7fELF" + bytes(len(data)), b"#!/bin/sh\n")):
        assert name in refused(put(signed({**held, name: damaged}), tmp_path / f"artifact{index}"))


# Members


def packed(held: dict[str, bytes], path: Path, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in held.items():
            archive.writestr(name, data)
    return path


def test_a_compressed_artifact_is_read(tmp_path: Path) -> None:
    artifact.load(packed(dict(files("convolutions")), tmp_path / "m.zip", zipfile.ZIP_DEFLATED))


def test_zip_files_that_no_artifact_is_are_refused(tmp_path: Path) -> None:
    held = dict(files("convolutions"))
    assert "compressed so much" in refused(packed(signed({**held, "sources/x": bytes(300 << 20)}), tmp_path / "bomb.zip", zipfile.ZIP_DEFLATED))
    assert "compressed in a way" in refused(packed(held, tmp_path / "lzma.zip", zipfile.ZIP_LZMA))
    data = packed(held, tmp_path / "good.zip").read_bytes()
    start = data.index(b"PK\x01\x02")  # the first entry of the zip file's directory
    for index, (at, form, value) in enumerate(
        (
            (8, "<H", 1),  # encrypted
            (20, "<I", 0xFFFFFFF0),  # compressed size
            (24, "<I", 0xFFFFFFF0),  # size
            (24, "<I", 5),
            (42, "<I", 0xFFFFFF00),  # offset of the member
            (42, "<I", start),
            (10, "<H", 99),  # method
            (28, "<H", 0xFFFF),  # length of its name
        )
    ):
        path = tmp_path / f"bad{index}.zip"
        path.write_bytes(data[: start + at] + struct.pack(form, value) + data[start + at + struct.calcsize(form) :])
        refused(path)
    second = data.index(b"PK\x01\x02", start + 4)
    (tmp_path / "two.zip").write_bytes(data[: second + 42] + data[start + 42 : start + 46] + data[second + 46 :])  # two members at one offset
    refused(tmp_path / "two.zip")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for _ in range(2):
            with pytest.warns(UserWarning) if _ else pytest.MonkeyPatch.context():
                archive.writestr(MANIFEST, b"{}")
    (tmp_path / "twice.zip").write_bytes(buffer.getvalue())
    assert "two files" in refused(tmp_path / "twice.zip")


def test_only_regular_files_are_members(tmp_path: Path) -> None:
    for number, make in enumerate((os.mkfifo, lambda p: os.symlink("/dev/zero", p), os.mkdir, bind)):
        path = put(files("convolutions"), tmp_path / f"artifact{number}")
        (path / WEIGHTS).unlink()
        make(str(path / WEIGHTS))
        assert WEIGHTS in refused(path)
    path = put(files("convolutions"), tmp_path / "linked")
    shutil.move(path / "binaries", tmp_path / "elsewhere")
    (path / "binaries").symlink_to(tmp_path / "elsewhere")
    assert "link" in refused(path)
    os.mkfifo(tmp_path / "pipe.zip")
    for place in (tmp_path / "pipe.zip", Path("/dev/zero")):
        assert "neither" in refused(place)


def bind(path: str) -> None:
    folder, name = os.path.split(path)
    before = os.getcwd()
    os.chdir(folder)  # a socket's path must be short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(name)
    finally:
        os.chdir(before)


def test_more_memory_than_there_is_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(files("convolutions"), tmp_path / "artifact")
    monkeypatch.setattr(os, "sysconf", lambda name: 1 if name == "SC_PAGE_SIZE" else 1000)
    assert "needs" in refused(path) and artifact.read(path).program


# Digests


def test_a_digest_names_the_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    executable = tilewright.load(put(files("stateful"), tmp_path / "artifact"))
    digest = executable.save(tmp_path / "again")
    assert digest == executable.save(tmp_path / "again.zip") == artifact.digest(tmp_path / "again")
    for path in (tmp_path / "again", tmp_path / "again.zip"):
        tilewright.load(path, expect_digest=digest.upper())
        with pytest.raises(InvalidArtifact, match=digest):
            tilewright.load(path, expect_digest="0" * 64)
        assert main(["digest", str(path)]) == 0
        assert capsys.readouterr().out == f"{digest}\n"
    (tmp_path / "again" / MANIFEST).write_bytes(b"no JSON")
    with pytest.raises(InvalidArtifact, match="has the digest"):  # before anything else is checked
        tilewright.load(tmp_path / "again", expect_digest=digest)


@pytest.mark.parametrize(
    ("target", "recipes", "words"),
    [
        ("aten.topk.default", [["input", 0], ["value", 1]], "made .* and not"),
        ("aten._fft_r2c.default", [["input", 0], ["list", [["value", 100_000]]], ["value", 0], ["value", True]], "a dimension that"),
        ("aten.sort.default", [["value", "x"]], "Expected a value of type 'Tensor'"),
    ],
)
def test_a_call_that_makes_something_else_names_the_node(target: str, recipes: list[Any], words: str, tmp_path: Path) -> None:
    original = files("embedded")
    manifest = manifest_of(original)
    attributes = next(node for node in manifest["program"]["graph"]["nodes"] if node["operator"] == "torch")["attributes"]
    attributes["target"], attributes["call"] = target, [recipes, []]
    executable = tilewright.load(put(signed(original, manifest), tmp_path / "artifact"))
    with pytest.raises(KernelFailed if "made" in words else Exception, match=words) as caught:
        executable(torch.randint(11, (2, 4)), torch.randint(4, (2, 3, 6)))
    assert target in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def test_looking_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = put(files("embedded"), tmp_path / "artifact")
    assert main(["verify", str(path), "--no-run"]) == 0
    shown = capsys.readouterr().out
    assert artifact.digest(path) in shown and "3 kernels" in shown and "aten.cummax.default" in shown
    assert main(["explain", str(path)]) == 0
    changed("embedded", EMBEDDED["a node that saves"], tmp_path / "bad")
    assert main(["verify", str(tmp_path / "bad" / "artifact"), "--no-run"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["verify", "zoo:lenet5", "--no-run"]) == 2
