"""Programs, graphs, layouts and machines as plain JSON, and back. Explicit field by field: decoding makes nothing but
these types.

Decoders raise ValueError, KeyError or TypeError for data that no encoder made; `artifact` turns them into its own
error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from math import isfinite
from types import MappingProxyType
from typing import Any

import torch

from tilewright.errors import InvalidArtifact
from tilewright.hardware import Cache, Machine
from tilewright.ir.dtypes import ELEMENT_TYPES
from tilewright.ir.graph import Graph, Node, Value
from tilewright.ir.layout import Layout
from tilewright.ir.region import Call, IndexCheck, Storage
from tilewright.ir.space import SpaceCounts
from tilewright.runtime.loadable import LoadableKernel, LoadableProgram, LoadableRegion, check

Weights = dict[str, torch.Tensor]
LARGEST_MATRIX = 64
"""Rows or columns of a matrix that maps a constant; Winograd's have at most 36."""


def encode_attribute(value: Any, prefix: str, weights: Weights) -> Any:
    """Sequences become lists, floats {"float": text} (infinities included), body graphs {"graph": ...}."""
    if isinstance(value, Graph):
        return {"graph": encode_graph(value, prefix, weights)}
    if isinstance(value, (tuple, list)):
        return [encode_attribute(item, prefix, weights) for item in value]
    if isinstance(value, float):
        return {"float": repr(value)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    raise InvalidArtifact(f"an attribute of type {type(value).__name__} cannot be saved", "report this model")


def decode_attribute(data: Any, prefix: str, weights: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(data, list):
        return tuple(decode_attribute(item, prefix, weights) for item in data)
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "float":
        return float(content)
    if kind == "graph":
        return decode_graph(content, prefix, weights)
    found = getattr(torch, content, None) if kind == "torch" and isinstance(content, str) else None
    if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
        raise ValueError(f"an attribute {data!r}")
    return found


def _encode_value(value: Value) -> list[Any]:
    return [value.name, list(value.shape), value.dtype]


def _decode_value(data: Any) -> Value:
    name, shape, dtype = data
    if dtype not in ELEMENT_TYPES or not all(isinstance(extent, int) and extent >= 0 for extent in shape):
        raise ValueError(f"a value {data!r}")
    return Value(str(name), tuple(shape), dtype)


def encode_graph(graph: Graph, prefix: str, weights: Weights) -> dict[str, Any]:
    """The graph as JSON; its constants go into `weights` under `prefix` and their names."""
    weights.update({prefix + name: tensor for name, tensor in graph.constants.items()})
    return {
        "nodes": [
            {
                "name": node.name,
                "operator": node.operator,
                "inputs": list(node.inputs),
                "outputs": list(node.outputs),
                "attributes": {key: encode_attribute(value, f"{prefix}{node.name}/", weights) for key, value in node.attributes.items()},
                "place": node.place,
            }
            for node in graph.nodes
        ],
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        "values": [_encode_value(value) for value in graph.values.values()],
        "constants": list(graph.constants),
    }


def decode_graph(data: Mapping[str, Any], prefix: str, weights: Mapping[str, torch.Tensor]) -> Graph:
    nodes = []
    for entry in data["nodes"]:
        name = str(entry["name"])
        attributes = {str(key): decode_attribute(value, f"{prefix}{name}/", weights) for key, value in entry["attributes"].items()}
        nodes.append(
            Node(
                name,
                str(entry["operator"]),
                tuple(entry["inputs"]),
                tuple(entry["outputs"]),
                MappingProxyType(attributes),
                str(entry["place"]),
            )
        )
    values = [_decode_value(value) for value in data["values"]]
    constants = {name: weights[prefix + name] for name in data["constants"]}
    return Graph(
        tuple(nodes),
        tuple(data["inputs"]),
        tuple(data["outputs"]),
        MappingProxyType({value.name: value for value in values}),
        MappingProxyType(constants),
    )


def _encode_storage(storage: Storage) -> dict[str, Any]:
    layout = storage.layout
    return {
        "value": _encode_value(storage.value),
        "shape": list(layout.shape),
        "order": [list(pair) for pair in layout.order],
        "halo": [list(pair) for pair in layout.halo],
        "source": storage.source,
        "view": None if storage.view is None else [list(storage.view[0]), list(storage.view[1]), storage.view[2]],
        "matrix": None if storage.matrix is None else [list(row) for row in storage.matrix],
    }


def _decode_storage(data: Mapping[str, Any]) -> Storage:
    order = tuple((int(dim), int(factor)) for dim, factor in data["order"])
    halo = tuple((int(before), int(after)) for before, after in data["halo"])
    shape = tuple(map(int, data["shape"]))
    if len(halo) != len(shape) or any(factor < 0 for _, factor in order) or any(min(pair) < 0 for pair in halo):
        raise ValueError(f"a layout {data!r}")
    view = None
    if data["view"] is not None:
        sizes, strides, offset = data["view"]
        view = (tuple(map(int, sizes)), tuple(map(int, strides)), int(offset))
    return Storage(_decode_value(data["value"]), Layout(shape, order, halo), data["source"], view, _decode_matrix(data.get("matrix")))


def _decode_matrix(data: Any) -> tuple[tuple[float, ...], ...] | None:
    """Rows of one length, of finite numbers; artifacts made before constants were mapped have none."""
    if data is None:
        return None
    matrix = tuple(tuple(float(entry) for entry in row) for row in data)
    sizes = {len(row) for row in matrix}
    if len(matrix) > LARGEST_MATRIX or len(sizes) != 1 or not 0 < max(sizes) <= LARGEST_MATRIX or not all(isfinite(e) for row in matrix for e in row):
        raise ValueError(f"a matrix of {len(matrix)} rows of {sorted(sizes)} entries")
    return matrix


def encode_program(program: LoadableProgram, weights: Weights) -> dict[str, Any]:
    """The program as JSON; the constants of its graph go into `weights`."""
    return {
        "graph": encode_graph(program.graph, "", weights),
        "target": program.target,
        "regions": [
            {
                "name": region.name,
                "kind": region.kind,
                "nodes": list(region.nodes),
                "inputs": list(region.inputs),
                "outputs": list(region.outputs),
                "calls": [[call.kernel, list(call.arguments)] for call in region.calls],
                "repeat": region.repeat,
                "schedule": region.schedule,
                "reasons": list(region.reasons),
                "predicted_seconds": float(region.predicted_seconds),
                "terms": {name: float(seconds) for name, seconds in region.terms.items()},
                "space": {"feasible": region.space.feasible, "rejected": dict(region.space.rejected)},
                "measured_seconds": region.measured_seconds,
            }
            for region in program.regions
        ],
        "kernels": [asdict(kernel) for kernel in program.kernels.values()],
        "storage": {name: _encode_storage(storage) for name, storage in program.storage.items()},
        "aliases": dict(program.aliases),
        "faults": {name: [[check.place, check.least, check.extent] for check in checks] for name, checks in program.faults.items()},
    }


def _decode_space(data: Any) -> SpaceCounts:
    """Nothing for artifacts made before candidates were counted."""
    if data is None:
        return SpaceCounts()
    space = SpaceCounts(int(data["feasible"]), MappingProxyType({str(reason): int(count) for reason, count in data["rejected"].items()}))
    if min(space.feasible, *space.rejected.values(), 0) < 0:
        raise ValueError("a negative number of candidates")
    return space


def decode_program(data: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> LoadableProgram:
    regions = tuple(
        LoadableRegion(
            str(entry["name"]),
            str(entry["kind"]),
            tuple(entry["nodes"]),
            tuple(entry["inputs"]),
            tuple(entry["outputs"]),
            tuple(Call(str(kernel), tuple(arguments)) for kernel, arguments in entry["calls"]),
            int(entry["repeat"]),
            str(entry["schedule"]),
            tuple(map(str, entry["reasons"])),
            float(entry["predicted_seconds"]),
            MappingProxyType({str(name): float(seconds) for name, seconds in entry["terms"].items()}),
            _decode_space(entry.get("space")),
            None if entry.get("measured_seconds") is None else float(entry["measured_seconds"]),
        )
        for entry in data["regions"]
    )
    kernels = {}
    for entry in data["kernels"]:
        grid, block = tuple(map(int, entry["grid"])), tuple(map(int, entry["block"]))
        if len(grid) != 3 or len(block) != 3 or entry["scalar_bytes"] not in (4, 8):
            raise ValueError(f"a kernel {entry!r}")
        kernels[str(entry["name"])] = LoadableKernel(
            str(entry["name"]),
            tuple(map(bool, entry["writes"])),
            int(entry["scalars"]),
            (grid[0], grid[1], grid[2]),
            (block[0], block[1], block[2]),
            int(entry["shared_bytes"]),
            entry["scalar_bytes"],
        )
    program = LoadableProgram(
        decode_graph(data["graph"], "", weights),
        str(data["target"]),
        regions,
        MappingProxyType(kernels),
        MappingProxyType({str(name): _decode_storage(entry) for name, entry in data["storage"].items()}),
        MappingProxyType({str(name): str(root) for name, root in data["aliases"].items()}),
        MappingProxyType(
            {
                str(name): tuple(IndexCheck(str(place), int(least), int(extent)) for place, least, extent in checks)
                for name, checks in data.get("faults", {}).items()  # artifacts made before indices were checked have none
            }
        ),
    )
    check(program)
    return program


def encode_machine(machine: Machine) -> dict[str, Any]:
    return asdict(machine)


def decode_machine(data: Mapping[str, Any]) -> Machine:
    known = {spec.name for spec in fields(Machine)}
    if not set(data) <= known:
        raise ValueError(f"unknown facts of a machine: {sorted(set(data) - known)}")
    facts: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    facts["caches"] = tuple(Cache(**cache) for cache in data["caches"])
    return Machine(**facts)
