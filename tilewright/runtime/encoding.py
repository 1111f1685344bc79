"""Programs, graphs, layouts and machines as plain JSON, and back.

Encoding is explicit, field by field, and decoding makes only these types. Decoders read typed fields (`fields.Field`) within limits, and raise
ValueError with the place for data that no encoder produced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from math import prod
from types import MappingProxyType
from typing import Any

import torch

from tilewright.errors import InvalidArtifact
from tilewright.hardware import Cache, Machine
from tilewright.ir.dtypes import ELEMENT_TYPES
from tilewright.ir.graph import Graph, Node, Value
from tilewright.ir.intrinsic import SWIZZLES
from tilewright.ir.kernel import GridOfTrips
from tilewright.ir.layout import Layout
from tilewright.ir.library import OPERATORS, Attention, Convolution, LibraryCall, Operator, Pooling, Product, Recurrent, Softmax, View
from tilewright.ir.region import KINDS, NUMBERS, WITHIN, Call, IndexCheck, MergeDecision, Storage
from tilewright.ir.space import Candidate, Comparison, SpaceCounts
from tilewright.ir.stage import LEVELS, Edge, Flow, Stage
from tilewright.ir.tensor_map import MOST_PIXELS, MOST_STEP, TensorMap
from tilewright.runtime.fields import CONTROL, Field
from tilewright.runtime.loadable import LoadableKernel, LoadableProgram, LoadableRegion, check

Weights = dict[str, torch.Tensor]
MOST_ELEMENTS = 1 << 40
"""Limit on the elements of one value, along any dimension and in all: larger than any machine's memory, while products stay far below 2^63."""
MOST_RANK = 32
MOST_REPEATS = 1 << 20
"""Limit on the steps of a loop."""
MOST_SCALARS = 16
MOST_PARAMETERS = 1 << 12
LARGEST_MATRIX = 1024
"""Limit on the rows or columns of a matrix applied to a constant; those of Fourier transforms have at most 864."""


def encode_attribute(value: Any, prefix: str, weights: Weights) -> Any:
    """Sequences become lists, floats {"float": text} (infinities included), complex numbers {"complex": text}, body graphs {"graph": ...}."""
    if isinstance(value, Graph):
        return {"graph": encode_graph(value, prefix, weights)}
    if isinstance(value, (tuple, list)):
        return [encode_attribute(item, prefix, weights) for item in value]
    if isinstance(value, float):
        return {"float": repr(value)}
    if isinstance(value, complex):
        return {"complex": repr(value)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    raise InvalidArtifact(f"an attribute of type {type(value).__name__} cannot be saved", "report this model")


def decode_attribute(data: Field, prefix: str, weights: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(data.value, list):
        return tuple(decode_attribute(item, prefix, weights) for item in data.items())
    if not isinstance(data.value, dict):
        return data.integer(-(1 << 63), (1 << 64) - 1) if type(data.value) is int else data.text() if isinstance(data.value, str) else data.value
    kind = next(iter(data.value), "")
    content = data.only(kind)[kind]
    if kind == "float":
        return float(content.text())
    if kind == "complex":
        return complex(content.text())
    if kind == "graph":
        return decode_graph(content, prefix, weights)
    found = getattr(torch, content.text(), None) if kind == "torch" else None
    if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
        raise data.wrong("an attribute")
    return found


def _prose(text: str) -> str:
    """Text for people, without the control characters that compiler messages may contain."""
    return CONTROL.sub("?", text)


def _encode_value(value: Value) -> list[Any]:
    return [value.name, list(value.shape), value.dtype]


def _decode_shape(data: Field) -> tuple[int, ...]:
    shape = data.integers(0, MOST_ELEMENTS, MOST_RANK)
    if prod(max(extent, 1) for extent in shape) > MOST_ELEMENTS:
        raise data.wrong(f"a shape of at most {MOST_ELEMENTS} elements")
    return shape


def _decode_value(data: Field) -> Value:
    name, shape, dtype = data.exactly(3)
    return Value(name.name(), _decode_shape(shape), dtype.choice(*ELEMENT_TYPES))


def encode_graph(graph: Graph, prefix: str, weights: Weights) -> dict[str, Any]:
    """The graph as JSON; its constants are added to `weights` under `prefix` and their names."""
    weights.update({prefix + name: tensor for name, tensor in graph.constants.items()})
    return {
        "nodes": [
            {
                "name": node.name,
                "operator": node.operator,
                "inputs": list(node.inputs),
                "outputs": list(node.outputs),
                "attributes": {key: encode_attribute(value, f"{prefix}{node.name}/", weights) for key, value in node.attributes.items()},
                "place": _prose(node.place),
            }
            for node in graph.nodes
        ],
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        "values": [_encode_value(value) for value in graph.values.values()],
        "constants": list(graph.constants),
    }


def decode_graph(data: Field, prefix: str, weights: Mapping[str, torch.Tensor]) -> Graph:
    data.only("nodes", "inputs", "outputs", "values", "constants")
    nodes = []
    for entry in data["nodes"].items():
        entry.only("name", "operator", "inputs", "outputs", "attributes", "place")
        name = entry["name"].name()
        attributes = {key: decode_attribute(value, f"{prefix}{name}/", weights) for key, value in entry["attributes"].entries()}
        operator, place = entry["operator"].name(), entry["place"].prose()
        nodes.append(Node(name, operator, entry["inputs"].names(), entry["outputs"].names(), MappingProxyType(attributes), place))
    values = _by_name(data["values"], (_decode_value(value) for value in data["values"].items()))
    constants = {name: _weight(data["constants"], prefix + name, weights) for name in data["constants"].names()}
    inputs, outputs = data["inputs"].names(), data["outputs"].names()
    return Graph(tuple(nodes), inputs, outputs, values, MappingProxyType(constants))


def _by_name(data: Field, values: Iterable[Any]) -> Mapping[str, Any]:
    """Values by name; the names must be distinct."""
    found: dict[str, Any] = {}
    for value in values:
        if value.name in found:
            raise ValueError(f"{data.place} has two entries {value.name!a}")
        found[value.name] = value
    return MappingProxyType(found)


def _weight(data: Field, name: str, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if name not in weights:
        raise ValueError(f"{data.place}: there is no weight {name!a}")
    return weights[name]


def _encode_storage(storage: Storage) -> dict[str, Any]:
    layout = storage.layout
    return {
        "value": _encode_value(storage.value),
        "shape": list(layout.shape),
        "order": [list(pair) for pair in layout.order],
        "halo": [list(pair) for pair in layout.halo],
        "around": [list(pair) for pair in layout.around],
        "source": storage.source,
        "view": None if storage.view is None else [list(storage.view[0]), list(storage.view[1]), storage.view[2]],
        "matrix": None if storage.matrix is None else [list(row) for row in storage.matrix],
        "numbers": storage.numbers,
    }


def _decode_storage(data: Field) -> Storage:
    data.only("value", "shape", "order", "halo", "around", "source", "view", "matrix", "numbers")
    layout = Layout(_decode_shape(data["shape"]), *(_decode_pairs(data[pairs]) for pairs in ("order", "halo", "around")))
    if len(layout.halo) != len(layout.shape) or prod(max(extent, 1) for extent in layout.extents) > MOST_ELEMENTS:
        raise data.wrong("a layout within the limits")
    source = data["source"].optional()
    view, matrix = _decode_view(data["view"].optional()), _decode_matrix(data["matrix"].optional())
    return Storage(_decode_value(data["value"]), layout, None if source is None else source.name(), view, matrix, data["numbers"].choice(*NUMBERS))


def _decode_pairs(data: Field) -> tuple[tuple[int, int], ...]:
    pairs = tuple(pair.integers(0, MOST_ELEMENTS, 2) for pair in data.items(2 * MOST_RANK))
    if any(len(pair) != 2 for pair in pairs):
        raise data.wrong("a list of pairs")
    return tuple((first, second) for first, second in pairs)


def _decode_view(data: Field | None) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    if data is None:
        return None
    sizes, strides, offset = data.exactly(3)
    return _decode_shape(sizes), strides.integers(0, MOST_ELEMENTS, MOST_RANK), offset.integer(0, MOST_ELEMENTS)


def _decode_matrix(data: Field | None) -> tuple[tuple[float, ...], ...] | None:
    """Matrix rows of equal length."""
    if data is None:
        return None
    matrix = tuple(tuple(entry.number() for entry in row.items(LARGEST_MATRIX, 1)) for row in data.items(LARGEST_MATRIX, 1))
    if len({len(row) for row in matrix}) != 1:
        raise data.wrong("a matrix")
    return matrix


def encode_program(program: LoadableProgram, weights: Weights) -> dict[str, Any]:
    """The program as JSON; its graph's constants are added to `weights`."""
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
                "calls": [[call.kernel, list(call.arguments), call.trips, list(call.shifts)] for call in region.calls],
                "repeat": region.repeat,
                "schedule": _prose(region.schedule),
                "reasons": list(map(_prose, region.reasons)),
                "predicted_seconds": float(region.predicted_seconds),
                "terms": {name: float(seconds) for name, seconds in region.terms.items()},
                "space": {"feasible": region.space.feasible, "rejected": dict(region.space.rejected)},
                "measured_seconds": region.measured_seconds,
                "bounds": {name: float(seconds) for name, seconds in region.bounds.items()},
                "library": None if region.library is None else asdict(region.library),
                "comparison": _encode_comparison(region.comparison),
                "flow": {
                    "stages": [[list(stage.what), stage.within] for stage in region.flow.stages],
                    "edges": [[edge.producer, edge.consumer, edge.level, edge.bytes] for edge in region.flow.edges],
                },
            }
            for region in program.regions
        ],
        "kernels": [asdict(kernel) for kernel in program.kernels.values()],
        "storage": {name: _encode_storage(storage) for name, storage in program.storage.items()},
        "aliases": dict(program.aliases),
        "faults": {name: [[_prose(check.place), check.least, check.extent] for check in checks] for name, checks in program.faults.items()},
        "search": list(map(_encode_decision, program.search)),
        "partitions": list(map(_encode_decision, program.partitions)),
    }


def _encode_comparison(comparison: Comparison) -> dict[str, Any]:
    others = [
        {
            "schema": other.schema,
            "schedule": _prose(other.schedule),
            "predicted_seconds": other.predicted_seconds,
            "terms": dict(other.terms),
            "measured_seconds": other.measured_seconds,
        }
        for other in comparison.others
    ]
    return {"schema": comparison.schema, "others": others, "unsuitable": {name: _prose(why) for name, why in comparison.unsuitable.items()}}


def _decode_comparison(data: Field) -> Comparison:
    data.only(*(spec.name for spec in fields(Comparison)))
    unsuitable = {name: why.prose() for name, why in data["unsuitable"].entries()}
    return Comparison(data["schema"].name(), tuple(map(_decode_candidate, data["others"].items())), MappingProxyType(unsuitable))


def _decode_candidate(data: Field) -> Candidate:
    data.only(*(spec.name for spec in fields(Candidate)))
    predicted, measured = data["predicted_seconds"].optional(), data["measured_seconds"].optional()
    return Candidate(
        data["schema"].name(),
        data["schedule"].prose(),
        None if predicted is None else predicted.number(),
        MappingProxyType({name: seconds.number() for name, seconds in data["terms"].entries()}),
        None if measured is None else measured.number(),
    )


def _encode_decision(decision: MergeDecision) -> list[Any]:
    return [list(decision.results), decision.taken, _prose(decision.text)]


def _decode_decision(data: Field) -> MergeDecision:
    results, taken, text = data.exactly(3)
    return MergeDecision(results.names(), taken.flag(), text.prose())


def _decode_flow(data: Field) -> Flow:
    data.only(*(spec.name for spec in fields(Flow)))
    stages = tuple(map(_decode_stage, data["stages"].items()))
    return Flow(stages, tuple(_decode_edge(edge, len(stages)) for edge in data["edges"].items()))


def _decode_stage(data: Field) -> Stage:
    what, within = data.exactly(2)
    names = what.names()
    if not names:
        raise what.wrong("a list of names")
    return Stage(names, within.choice(*WITHIN))


def _decode_edge(data: Field, stages: int) -> Edge:
    producer, consumer, level, count = data.exactly(4)
    begin, end = producer.integer(0, stages - 1), consumer.optional()
    return Edge(begin, None if end is None else end.integer(begin + 1, stages - 1), level.choice(*LEVELS), count.integer(0, 1 << 62))


def _decode_space(data: Field) -> SpaceCounts:
    rejected = {reason: count.integer(0, 1 << 62) for reason, count in data.only("feasible", "rejected")["rejected"].entries()}
    return SpaceCounts(data["feasible"].integer(0, 1 << 62), MappingProxyType(rejected))


def _decode_call(data: Field) -> Call:
    kernel, arguments, trips, shifts = data.exactly(4)
    return Call(kernel.name(), arguments.names(), trips.integer(0, MOST_ELEMENTS), shifts.integers(0, MOST_ELEMENTS))


def _decode_view_of(data: Field) -> View:
    data.only(*(spec.name for spec in fields(View)))
    sizes, strides = (data[key].integers(0, MOST_ELEMENTS, MOST_RANK) for key in ("sizes", "strides"))
    return View(data["name"].name(), sizes, strides, data["offset"].integer(0, MOST_ELEMENTS))


def _decode_library_call(data: Field) -> LibraryCall:
    data.only(*(spec.name for spec in fields(LibraryCall)))
    inputs, outs = (tuple(map(_decode_view_of, data[key].items())) for key in ("inputs", "outs"))
    return LibraryCall(_decode_operator(data["operator"]), inputs, outs)


def _decode_operator(data: Field) -> Operator:
    name = data["name"].choice(*OPERATORS)
    data.only(*(spec.name for spec in fields(OPERATORS[name])))

    def sizes(key: str, least: int = 1) -> tuple[int, ...]:
        return data[key].integers(least, MOST_ELEMENTS, MOST_RANK)

    kind = OPERATORS[name]
    if kind is Convolution:
        return Convolution(name, sizes("stride"), sizes("dilation"), data["groups"].integer(1, MOST_ELEMENTS))
    if kind is Attention:
        shift = data["shift"].optional()
        return Attention(name, data["scale"].number(), None if shift is None else shift.integer(0, MOST_ELEMENTS))
    if kind is Pooling:
        divisor = data["divisor"].optional()
        return Pooling(
            name,
            sizes("window"),
            sizes("stride"),
            sizes("dilation"),
            sizes("padding", least=0),
            data["ceiling"].flag(),
            None if divisor is None else divisor.integer(1, MOST_ELEMENTS),
            data["padded"].flag(),
        )
    if kind is Softmax:
        return Softmax(name, data["dim"].integer(0, MOST_RANK))
    if kind is Recurrent:
        return Recurrent(name, data["bidirectional"].flag())
    return Product(name)


def _decode_region(data: Field) -> LoadableRegion:
    data.only(*(spec.name for spec in fields(LoadableRegion)))
    measured, library = data["measured_seconds"].optional(), data["library"].optional()
    return LoadableRegion(
        data["name"].name(),
        data["kind"].choice(*KINDS),
        data["nodes"].names(),
        data["inputs"].names(),
        data["outputs"].names(),
        tuple(map(_decode_call, data["calls"].items())),
        data["repeat"].integer(1, MOST_REPEATS),
        data["schedule"].prose(),
        tuple(reason.prose() for reason in data["reasons"].items()),
        data["predicted_seconds"].number(),
        MappingProxyType({name: seconds.number() for name, seconds in data["terms"].entries()}),
        _decode_space(data["space"]),
        None if measured is None else measured.number(),
        MappingProxyType({name: seconds.number() for name, seconds in data["bounds"].entries()}),
        None if library is None else _decode_library_call(library),
        _decode_comparison(data["comparison"]),
        _decode_flow(data["flow"]),
    )


def _decode_corners(data: Field) -> tuple[int, int]:
    low, high = data.exactly(2)
    return low.integer(-MOST_ELEMENTS, MOST_ELEMENTS), high.integer(-MOST_ELEMENTS, MOST_ELEMENTS)


def _decode_map(data: Field) -> tuple[int, TensorMap]:
    position, described = data.exactly(2)
    described.only(*(spec.name for spec in fields(TensorMap)))
    found = TensorMap(
        described["name"].name(),
        described["buffer"].name(),
        described["dtype"].choice(*ELEMENT_TYPES),
        described["extents"].integers(1, MOST_ELEMENTS),
        described["strides"].integers(1, MOST_ELEMENTS),
        described["box"].integers(1, MOST_PIXELS),
        described["swizzle"].choice(*SWIZZLES),
        described["offset"].integer(0, MOST_ELEMENTS),
        tuple(_decode_corners(pair) for pair in described["corners"].items()),
        described["steps"].integers(1, MOST_STEP),
    )
    return position.integer(0, MOST_PARAMETERS), found


def decode_kernel(data: Field) -> LoadableKernel:
    data.only(*(spec.name for spec in fields(LoadableKernel)))
    grid, block = (data[key].exactly(3) for key in ("grid", "block"))
    return LoadableKernel(
        data["name"].name(),
        tuple(write.flag() for write in data["writes"].items()),
        data["scalars"].integer(0, MOST_SCALARS),
        (grid[0].integer(1, 1 << 31), grid[1].integer(1, 1 << 16), grid[2].integer(1, 1 << 16)),
        (block[0].integer(1, 1024), block[1].integer(1, 1024), block[2].integer(1, 64)),
        data["shared_bytes"].integer(0, 1 << 30),
        data["scalar_bytes"].choice(4, 8),
        data["extents"].integers(0, 8 * MOST_ELEMENTS),
        data["steps"].integer(1, MOST_REPEATS),
        data["requires"].names(),
        data["cooperative"].flag(),
        data["trips"].integer(0, MOST_ELEMENTS),
        data["growths"].integers(0, 8 * MOST_ELEMENTS),
        tuple(map(_decode_map, data["maps"].items())),
        data["waits"].flag(),
        data["tf32"].flag(),
        _decode_tiles(data["tiles"]) if data["tiles"].value is not None else None,
    )


def _decode_tiles(data: Field) -> GridOfTrips:
    data.only(*(spec.name for spec in fields(GridOfTrips)))
    rows, each, across = (data[name].integer(1, MOST_ELEMENTS) for name in ("rows", "each", "across"))
    return GridOfTrips(rows, each, across, data["whole"].flag())


def _decode_check(data: Field) -> IndexCheck:
    place, least, extent = data.exactly(3)
    return IndexCheck(place.prose(), least.integer(-MOST_ELEMENTS, 0), extent.integer(0, MOST_ELEMENTS))


def decode_program(data: Field, weights: Mapping[str, torch.Tensor]) -> LoadableProgram:
    data.only(*(spec.name for spec in fields(LoadableProgram)))
    program = LoadableProgram(
        decode_graph(data["graph"], "", weights),
        data["target"].name(),
        tuple(map(_decode_region, data["regions"].items())),
        _by_name(data["kernels"], map(decode_kernel, data["kernels"].items())),
        MappingProxyType({name: _decode_storage(entry) for name, entry in data["storage"].entries()}),
        MappingProxyType({name: root.name() for name, root in data["aliases"].entries()}),
        MappingProxyType({name: tuple(map(_decode_check, checks.items())) for name, checks in data["faults"].entries()}),
        tuple(map(_decode_decision, data["search"].items())),
        tuple(map(_decode_decision, data["partitions"].items())),
    )
    check(program)
    return program


def encode_machine(machine: Machine) -> dict[str, Any]:
    return asdict(machine)


def decode_machine(data: Field) -> Machine:
    """Raises ValueError for facts whose names or types are not a machine's."""
    data.only(*(spec.name for spec in fields(Machine)))
    return Machine(**{spec.name: _decode_fact(data[spec.name], str(spec.type)) for spec in fields(Machine)})


def _decode_fact(data: Field, kind: str) -> Any:
    """A field of a machine, decoded by its annotation."""
    if kind == "int":
        return data.integer(0, 1 << 60)
    if kind == "float":
        return data.number() if isinstance(data.value, float) else data.integer(0, 1 << 60)
    if kind == "tuple[Cache, ...]":
        return tuple(Cache(**{spec.name: _decode_fact(cache[spec.name], str(spec.type)) for spec in fields(Cache)}) for cache in data.items())
    if kind == "tuple[str, ...]":
        return data.names()
    if kind == "Mapping[str, float]":
        return {name: _decode_fact(fact, "float") for name, fact in data.entries()}
    if kind == "Mapping[str, str]":
        return {name: fact.text() for name, fact in data.entries()}
    return data.text()
