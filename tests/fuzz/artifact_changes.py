"""Changes of artifacts that pass the first checks: the files stay complete, and often true. `rewordings` keep the meaning, so that results must be
those of the graph; `exchanges` change it in one place, like an attacker who knows the format.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from math import prod
from typing import Any

import hypothesis.strategies as st
import safetensors.torch
import torch

from tests.fuzz.harness import Case
from tests.sample_artifacts import WEIGHTS, manifest_of, signed, with_weights
from tilewright.frontend.permitted_operators import PERMITTED

MEANT = "same-meaning"
"""A file in a case that marks it: results must be those of the graph."""
NAMES = ("v", "x y", "é", "../x", "%s", "0", "a@b", "n" * 300, "*/", "\u2028", "x.faults")
WORDS = ("", "loops lanes=16", "PyTorch", "why", "é" * 50, "a\nb")
UNARY = ("relu", "tanh", "sigmoid", "exp", "neg", "abs", "sqrt", "erf", "silu", "gelu", "sin", "cos", "log")
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "pow")


@st.composite
def rewordings(draw: st.DrawFn, held: Case) -> Case:
    """One or two changes that keep the computation; changed weights are the graph's weights too."""
    manifest, files = manifest_of(held), dict(held)
    for _ in range(draw(st.integers(1, 2))):
        kind = draw(st.sampled_from(("weights", "weights", "name", "order", "words", "again", "unused", "view")))
        files, manifest = _KEEPING[kind](draw, files, manifest)
    return {**signed(files, manifest), MEANT: b""}


@st.composite
def exchanges(draw: st.DrawFn, held: Case) -> Case:
    """One or two things replaced by others of their kind."""
    manifest = manifest_of(held)
    for _ in range(draw(st.sampled_from((1, 1, 1, 2)))):
        _LOSING[draw(st.sampled_from(sorted(_LOSING)))](draw, manifest["program"], manifest)
    return signed(held, manifest)


# Changes that keep the meaning


def _weights(draw: st.DrawFn, files: dict[str, bytes], manifest: Any) -> tuple[dict[str, bytes], Any]:
    tensors = safetensors.torch.load(files[WEIGHTS])
    name = draw(st.sampled_from(sorted(tensors)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    if tensors[name].is_floating_point():
        factor = draw(st.sampled_from((0.0, 1e-42, 1e-3, 1.0, 1.0, 30.0)))
        tensors[name] = torch.randn(tensors[name].shape, generator=generator).to(tensors[name].dtype) * factor
    return dict(with_weights(files, tensors)), manifest


def _name(draw: st.DrawFn, files: dict[str, bytes], manifest: Any) -> tuple[dict[str, bytes], Any]:
    """Renames a value everywhere."""
    program = manifest["program"]
    taken = {node["operator"] for node in program["graph"]["nodes"]} | {region["kind"] for region in program["regions"]}
    old, new = draw(st.sampled_from(sorted({*program["storage"]} - taken))), draw(st.sampled_from(NAMES))

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {renamed(key): renamed(item) for key, item in value.items()}
        if isinstance(value, list):
            return [renamed(item) for item in value]
        return new if value == old else value

    tensors = safetensors.torch.load(files[WEIGHTS])
    changed = {**manifest, "program": renamed(program), "signature": renamed(manifest["signature"])}
    return dict(with_weights(files, {renamed(name): tensor for name, tensor in tensors.items()})), changed


def _touched(region: Any, program: Any) -> tuple[set[str], set[str]]:
    """The values that a region reads or writes, and those that it writes."""
    kernels = {kernel["name"]: kernel for kernel in program["kernels"]}
    roots = lambda names: {program["aliases"].get(name, name) for name in names}  # noqa: E731
    written = {a for name, arguments, *_ in region["calls"] for a, writes in zip(arguments, kernels[name]["writes"], strict=True) if writes}
    named = {a for _, arguments, *_ in region["calls"] for a in arguments}
    return roots({*named, *region["inputs"], *region["outputs"]}), roots(written | {*region["outputs"]})


def _order(draw: st.DrawFn, files: dict[str, bytes], manifest: Any) -> tuple[dict[str, bytes], Any]:
    """Exchanges independent adjacent regions."""
    program = manifest["program"]
    regions = program["regions"]
    for i in range(len(regions) - 1):
        (first, written), (second, also) = _touched(regions[i], program), _touched(regions[i + 1], program)
        if not written & second and not also & first and draw(st.booleans()):
            regions[i : i + 2] = regions[i + 1], regions[i]
    return files, manifest


def _words(draw: st.DrawFn, files: dict[str, bytes], manifest: Any) -> tuple[dict[str, bytes], Any]:
    region = draw(st.sampled_from(manifest["program"]["regions"]))
    region["schedule"], region["reasons"] = draw(st.sampled_from(WORDS)), draw(st.lists(st.sampled_from(WORDS), max_size=3))
    region["predicted_seconds"], region["measured_seconds"] = draw(st.sampled_from((0.0, 1e-9, 1e300))), draw(st.sampled_from((None, 1.0, 0.0)))
    draw(st.sampled_from(manifest["program"]["graph"]["nodes"]))["place"] = draw(st.sampled_from(WORDS))
    return files, manifest


def _again(draw: st.DrawFn, files: dict[str, bytes], manifest: Any) -> tuple[dict[str, bytes], Any]:
    """Computes a map twice."""
    maps = [region for region in manifest["program"]["regions"] if region["kind"] == "map" and region["repeat"] == 1]
    for region in maps[:1]:
        region["calls"] = region["calls"] * draw(st.integers(1, 3))
    return files, manifest


def _unused(draw: st.DrawFn, files: dict[str, bytes], manifest: Any) -> tuple[dict[str, bytes], Any]:
    """Adds unused storage, or an unused alias."""
    program = manifest["program"]
    name = draw(st.sampled_from(sorted(program["storage"])))
    stored = copy.deepcopy(program["storage"][name])
    if name not in program["faults"] and (stored["around"] or draw(st.booleans())):
        program["aliases"]["nobody"] = name
    stored["value"][0] = "nobody"
    program["storage"]["nobody"] = stored
    return files, manifest


def _view(draw: st.DrawFn, files: dict[str, bytes], manifest: Any) -> tuple[dict[str, bytes], Any]:
    """Makes a constant a view of all of itself."""
    program = manifest["program"]
    constants = [stored for stored in program["storage"].values() if stored["source"] is not None and stored["view"] is None]
    shapes = {name: shape for name, shape, _ in program["graph"]["values"]}
    for stored in constants:
        shape = shapes[stored["source"]]
        if draw(st.booleans()) and shape:
            stored["view"] = [shape, [prod(shape[i + 1 :]) for i in range(len(shape))], 0]
    return files, manifest


_KEEPING: dict[str, Callable[..., tuple[dict[str, bytes], Any]]] = {
    "weights": _weights, "name": _name, "order": _order, "words": _words, "again": _again, "unused": _unused, "view": _view,
}  # fmt: skip


# Changes that do not


def _alike(program: Any, name: str) -> list[str]:
    """Stored values of the same shape and type."""
    kind = program["storage"][name]["value"][1:]
    return sorted(other for other, stored in program["storage"].items() if stored["value"][1:] == kind)


def _arguments(draw: st.DrawFn, program: Any, manifest: Any) -> None:
    region = draw(st.sampled_from(program["regions"]))
    if region["calls"]:
        arguments = draw(st.sampled_from(region["calls"]))[1]
        position = draw(st.integers(0, len(arguments) - 1))
        arguments[position] = draw(st.sampled_from(_alike(program, arguments[position])))


def _operator(draw: st.DrawFn, program: Any, manifest: Any) -> None:
    node = draw(st.sampled_from(program["graph"]["nodes"]))
    for alike in (UNARY, BINARY):
        if node["operator"] in alike:
            node["operator"] = draw(st.sampled_from(alike))
    if node["operator"] == "torch":
        words = sorted(word for word in PERMITTED if "." not in word)
        node["attributes"]["target"] = (
            f"aten.{draw(st.sampled_from(words))}.{draw(st.sampled_from(('default', 'default', 'dim', 'Tensor', 'Scalar', 'int')))}"
        )


def _attribute(draw: st.DrawFn, program: Any, manifest: Any) -> None:
    nodes = [node for node in program["graph"]["nodes"] if any(isinstance(v, (int, float)) for v in node["attributes"].values())]
    if nodes:
        attributes = draw(st.sampled_from(nodes))["attributes"]
        key = draw(st.sampled_from(sorted(key for key, value in attributes.items() if isinstance(value, (int, float)))))
        value = attributes[key]
        attributes[key] = not value if isinstance(value, bool) else draw(st.sampled_from((value + 1, value - 1, 0, value * 2)))


def _torch_call(draw: st.DrawFn, program: Any, manifest: Any) -> None:
    for node in program["graph"]["nodes"]:
        if node["operator"] == "torch":
            further = draw(st.sampled_from((0, 1, -1, 2, 99, 1 << 40, True, False, 0.5, None, "mean")))
            node["attributes"]["call"][0].append(["value", further])


def _outputs(draw: st.DrawFn, program: Any, manifest: Any) -> None:
    outputs = program["graph"]["outputs"]
    position = draw(st.integers(0, len(outputs) - 1))
    if outputs[position] in program["storage"]:
        outputs[position] = draw(st.sampled_from(_alike(program, outputs[position])))


def _returned(draw: st.DrawFn, program: Any, manifest: Any) -> None:
    leaf = draw(st.sampled_from(manifest["signature"]["outputs"]))
    kind = draw(st.sampled_from(("value", "input", "view", "shared", "constant", "parameter")))
    leaf["kind"], leaf["index"] = kind, draw(st.integers(0, 2))
    size = draw(st.sampled_from((0, 1, -1, 2, 3, 12, 1 << 40)))
    views = ["aten.transpose.int", [0, 1]], ["aten.select.int", [0, size]], ["aten.view.default", [[size]]], ["aten.unfold.default", [0, size, 1]]
    if kind in ("view", "shared"):
        leaf["value"] = draw(st.lists(st.sampled_from(views), max_size=2))


def _repeat(draw: st.DrawFn, program: Any, manifest: Any) -> None:
    region = draw(st.sampled_from(program["regions"]))
    region["repeat"] = draw(st.sampled_from((1, 2, 3, 4, 5)))


def _source(draw: st.DrawFn, program: Any, manifest: Any) -> None:
    constants = sorted(name for name, stored in program["storage"].items() if stored["source"] is not None)
    if constants:
        stored = program["storage"][draw(st.sampled_from(constants))]
        stored["source"] = draw(st.sampled_from(sorted(program["graph"]["constants"])))


def _strides(draw: st.DrawFn, program: Any, manifest: Any) -> None:
    constants = [stored for stored in program["storage"].values() if stored["source"] is not None]
    if constants:
        stored = draw(st.sampled_from(constants))
        shape = stored["value"][1]
        stored["view"] = [shape, [draw(st.sampled_from((0, 0, 1, 2))) for _ in shape], draw(st.sampled_from((0, 1, 5)))]


def _layout(draw: st.DrawFn, program: Any, manifest: Any) -> None:
    stored = program["storage"][draw(st.sampled_from(sorted(program["storage"])))]
    if draw(st.booleans()):
        stored["order"] = draw(st.permutations(stored["order"]))
    elif stored["around"] and draw(st.booleans()):
        stored["around"][draw(st.integers(0, len(stored["around"]) - 1))] = [
            draw(st.sampled_from((0, 1, 8, 1 << 40))),
            draw(st.sampled_from((0, 3, 16))),
        ]
    elif stored["halo"]:
        stored["halo"][draw(st.integers(0, len(stored["halo"]) - 1))] = [draw(st.integers(0, 2)), draw(st.integers(0, 2))]


def _alias(draw: st.DrawFn, program: Any, manifest: Any) -> None:
    name = draw(st.sampled_from(sorted(program["storage"])))
    other = draw(st.sampled_from(_alike(program, name)))
    if other != name:
        program["aliases"][name] = other


def _faults(draw: st.DrawFn, program: Any, manifest: Any) -> None:
    for name in program["faults"]:
        entry = ["index_select embedding at table", draw(st.sampled_from((0, -3, 5))), draw(st.sampled_from((0, 1, 11, 1 << 40)))]
        program["faults"][name] = [entry] * draw(st.integers(1, 3))


def _twice(draw: st.DrawFn, program: Any, manifest: Any) -> None:
    regions = program["regions"]
    region = copy.deepcopy(draw(st.sampled_from(regions)))
    region["name"] += "."
    regions.insert(draw(st.integers(0, len(regions))), region)


def _states(draw: st.DrawFn, program: Any, manifest: Any) -> None:
    signature = manifest["signature"]
    for state in signature["states"]:
        state[-1] = draw(st.integers(0, len(program["graph"]["outputs"]) - 1))
    signature["mutations"] = json.loads(json.dumps([[draw(st.integers(0, 2)), draw(st.integers(0, 3))] for _ in signature["mutations"]]))


_LOSING: dict[str, Callable[[st.DrawFn, Any, Any], None]] = {
    "arguments": _arguments, "operator": _operator, "attribute": _attribute, "torch call": _torch_call, "outputs": _outputs, "returned": _returned,
    "repeat": _repeat, "source": _source, "strides": _strides, "layout": _layout, "alias": _alias, "faults": _faults, "twice": _twice, "states": _states,
}  # fmt: skip
