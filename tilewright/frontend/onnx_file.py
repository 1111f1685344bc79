"""Reading ONNX files: loading, external data that stays inside the model's folder, validity and version.

The file is only data: none of it runs as code, and no path that it names may lead out of its folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, EncodeError
from onnx import external_data_helper, shape_inference, version_converter

from tilewright.errors import InvalidModel, UnsupportedOperator
from tilewright.frontend.onnx_resize import SIMPLE
from tilewright.frontend.reading import printable

OLDEST_OPSET, NEWEST_OPSET = 7, 28
"""The operator sets that are read."""
HANDLED_OPSET = 13
"""The oldest operator set that the importer knows; models of older ones are converted to it."""
DEFAULT_DOMAIN = ("", "ai.onnx")
_DAMAGED = "the file is damaged or of another format; export it again"
_BESIDE = "keep the data files in the model's folder"


def load(source: onnx.ModelProto | str | Path) -> onnx.ModelProto:
    """A valid model with all weights in memory, of operator set HANDLED_OPSET or later.

    Raises InvalidModel if the file is missing, damaged or not valid ONNX, if its external data is missing or outside the model's folder, or if its
    operator-set version is not known or cannot be converted; UnsupportedOperator if it uses only other operator sets."""
    if isinstance(source, onnx.ModelProto):
        model, place = source, "the model"
        if any(external_data_helper.uses_external_data(t) for t in _tensors(model)):
            raise InvalidModel("the model's weights are in other files", "pass the path of the model file, or load it with onnx.load")
    else:
        path = Path(source)
        place = str(path)
        model = _read(path)
    version = opset_of(model, place)
    same = version < HANDLED_OPSET and _is_unchanged(model, version)
    if version < OLDEST_OPSET and not same:
        cause = f"{place} uses operator set {version}, and {OLDEST_OPSET} is the oldest that is read"
        raise InvalidModel(cause, f"export it with operator set {HANDLED_OPSET} or later")
    try:
        onnx.checker.check_model(_with_shapes(model))
    except onnx.checker.ValidationError as error:
        raise InvalidModel(f"{place} is not valid ONNX: {_first_line(error)}", "export it again, or run onnx.checker on it") from error
    except (ValueError, EncodeError) as error:
        # the checker takes serialised models, which protocol buffers limit to 2 GB; larger ones are read without it
        if isinstance(error, ValueError) and "2GB" not in str(error) and "exceeds" not in str(error).lower():
            raise InvalidModel(f"{place} cannot be checked: {_first_line(error)}", "export it again") from error
    return model if version >= HANDLED_OPSET else _as_handled(model, version, place, same)


def _is_unchanged(model: onnx.ModelProto, version: int) -> bool:
    """Whether every operator of a model has the same definition in its operator set and in HANDLED_OPSET."""
    names = {node.op_type for node in _nodes(model) if node.domain in DEFAULT_DOMAIN}
    try:
        return all(onnx.defs.get_schema(n, version, "").since_version == onnx.defs.get_schema(n, HANDLED_OPSET, "").since_version for n in names)
    except onnx.defs.SchemaError:
        return False


def _as_handled(model: onnx.ModelProto, version: int, place: str, same: bool) -> onnx.ModelProto:
    """The model in operator set HANDLED_OPSET; with `same` only the number changes."""
    if same:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        next(entry for entry in copy.opset_import if entry.domain in DEFAULT_DOMAIN).version = HANDLED_OPSET
        return copy
    try:
        # some conversions depend on ranks
        inferred = shape_inference.infer_shapes(model)
        if len(model.functions) > 0:
            raise ValueError("it leaves out functions of the model's own")
        if any(_is_flattened_hardmax(node, inferred) for node in _nodes(inferred)):
            raise ValueError("it leaves Hardmax, which meant all dimensions from its axis on, as it is")
        converted = version_converter.convert_version(inferred, HANDLED_OPSET)
        if version <= 10:
            _resize_as_before(converted)
        if any(old.type != new.type for old, new in zip(model.graph.input, converted.graph.input, strict=True)):
            raise ValueError("its inputs would have other shapes")
        return converted
    except Exception as error:
        why = printable(_first_line(error))
        cause = f"{place} uses operator set {version}, which ONNX's version converter cannot convert to {HANDLED_OPSET}: {why}"
        raise InvalidModel(cause, f"export it with operator set {HANDLED_OPSET} or later") from error


def _resize_as_before(converted: onnx.ModelProto) -> None:
    """States in every Resize what Upsample and Resize meant until set 10; the converter leaves it to the defaults of set 11, which are others. The
    standard did not say how positions between pixels are rounded; ONNX Runtime rounds them as no mode of set 11 does (`onnx_resize.SIMPLE`)."""
    meant = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": SIMPLE}
    for node in _nodes(converted):
        if node.op_type == "Resize" and node.domain in DEFAULT_DOMAIN:
            kept = [attribute for attribute in node.attribute if attribute.name not in meant]
            del node.attribute[:]
            node.attribute.extend([*kept, *(onnx.helper.make_attribute(name, value) for name, value in meant.items())])


def _is_flattened_hardmax(node: onnx.NodeProto, inferred: onnx.ModelProto) -> bool:
    """Whether a node is a Hardmax of a set before 13 over several dimensions, or over a number that is not known."""
    if node.op_type != "Hardmax" or node.domain not in DEFAULT_DOMAIN:
        return False
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), None)
    infos = (*inferred.graph.input, *inferred.graph.value_info)
    ranks = {info.name: len(info.type.tensor_type.shape.dim) for info in infos if info.type.tensor_type.HasField("shape")}
    last = ranks.get(node.input[0], 0) - 1
    return axis != -1 and (1 if axis is None else axis) != last


def _with_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model for the checker, with a rank for every input and output that has none; a missing rank is allowed here."""
    infos = [*model.graph.input, *model.graph.output]
    if all(not info.type.HasField("tensor_type") or info.type.tensor_type.HasField("shape") for info in infos):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for info in (*copy.graph.input, *copy.graph.output):
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.shape.SetInParent()
    return copy


def opset_of(model: onnx.ModelProto, place: str = "the model") -> int:
    """The version of ONNX's operator set. Raises InvalidModel outside the known versions."""
    versions: list[int] = [entry.version for entry in model.opset_import if entry.domain in DEFAULT_DOMAIN]
    if not versions and model.opset_import:
        domains = ", ".join(entry.domain for entry in model.opset_import)
        raise UnsupportedOperator(f"{place} uses only operators of {domains}", "only ONNX's own operators are supported")
    if not versions:
        raise InvalidModel(f"{place} does not import ONNX's operator set", "export it again; an empty or damaged file reads like this")
    version = versions[0]
    if version > NEWEST_OPSET:
        raise InvalidModel(
            f"{place} uses operator set {version}, and {NEWEST_OPSET} is the newest that is read", f"export it with opset {NEWEST_OPSET} or older"
        )
    return version


LARGEST_MESSAGE = (1 << 31) - 1
"""Maximum bytes of a serialised model, the limit of protocol buffers."""
SHARED = 4
"""How often a model may read its external data on average: tensors may share equal data."""


def _read(path: Path) -> onnx.ModelProto:
    if not path.is_file():
        raise InvalidModel(f"{path} is not a file", "give the path of an .onnx file")
    if (size := path.stat().st_size) > LARGEST_MESSAGE:
        external = "store its weights as external data: onnx.save(model, path, save_as_external_data=True)"
        raise InvalidModel(f"{path} has {size:,} bytes, and protocol buffers have at most {LARGEST_MESSAGE:,}", external)
    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, ValueError, RuntimeError, OSError) as error:
        raise InvalidModel(f"{path} cannot be read as ONNX: {_first_line(error)}", _DAMAGED) from error
    if not model.HasField("graph") or not model.opset_import:
        raise InvalidModel(f"{path} holds no ONNX model", _DAMAGED)
    folder = path.resolve().parent
    sizes: dict[Path, int] = {}
    taken = 0
    for tensor in _tensors(model):
        if external_data_helper.uses_external_data(tensor):
            length = _bytes_of(tensor)
            file = _checked_location(tensor, length, folder, path)
            sizes[file] = file.stat().st_size
            taken += length
            if taken > SHARED * sum(sizes.values()):
                raise InvalidModel(f"{path} reads its data files more than {SHARED} times over", "export the model again")
            try:
                external_data_helper.load_external_data_for_tensor(tensor, str(folder))
            except Exception as error:
                raise InvalidModel(f"the data of {tensor.name} cannot be read: {_first_line(error)}", _BESIDE) from error
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]
    return model


def _checked_location(tensor: onnx.TensorProto, length: int, folder: Path, path: Path) -> Path:
    """The file with the tensor's `length` bytes of data. Raises InvalidModel unless the file is below the model's folder and holds the data."""
    entries: dict[str, str] = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if not location.isprintable() or not location or Path(location).is_absolute() or ".." in Path(location).parts:
        raise InvalidModel(f"{path} takes {tensor.name} from {location!r}, outside its folder", _BESIDE)
    file = (folder / location).resolve()
    if not file.is_relative_to(folder):
        raise InvalidModel(f"{path} takes {tensor.name} from {location!r}, a link out of its folder", _BESIDE)
    if not file.is_file():
        raise InvalidModel(f"{path} needs the data file {location!r}, which is missing", _BESIDE)
    if not all(entries.get(key, "0").isdecimal() and len(entries.get(key, "0")) < 20 for key in ("offset", "length")):
        raise InvalidModel(f"{path} gives no place for {tensor.name} in {location!r}", "export the model again")
    offset = int(entries.get("offset", 0))
    if "length" in entries and int(entries["length"]) != length:
        raise InvalidModel(f"{path} takes {entries['length']} bytes of {location!r} for {tensor.name}, which has {length}", "export the model again")
    if offset + length > file.stat().st_size:
        raise InvalidModel(f"the data file {location!r} is shorter than {path} says", "export the model again")
    if "length" not in entries:  # without a length everything to the end of the file would be read
        tensor.external_data.add(key="length", value=str(length))
    return file


def _bytes_of(tensor: onnx.TensorProto) -> int:
    """Bytes of a tensor's data by its type; elements smaller than a byte are packed. Raises InvalidModel for a type that has no size."""
    try:
        bits = 8 * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidModel(f"{tensor.name} has the unknown type {tensor.data_type}", "export the model again") from error
    name = onnx.TensorProto.DataType.Name(tensor.data_type)
    narrow = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}
    elements: int = prod(tensor.dims)
    return -(-elements * narrow.get(name, bits) // 8)


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of a model: initializers and attributes, subgraphs, functions and the parts of sparse tensors included."""
    yield from _graph_tensors(model.graph)
    for function in model.functions:
        yield from _node_tensors(function.node)
        yield from _attribute_tensors(function.attribute_proto)


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every node of a model, those of subgraphs and functions included."""
    lists = [model.graph.node, *(function.node for function in model.functions)]
    while lists:
        for node in lists.pop():
            yield node
            lists += [graph.node for a in node.attribute for graph in (*((a.g,) if a.HasField("g") else ()), *a.graphs)]


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        yield from _attribute_tensors(node.attribute)


def _attribute_tensors(attributes: Iterable[onnx.AttributeProto]) -> Iterator[onnx.TensorProto]:
    for attribute in attributes:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        for sparse in (*((attribute.sparse_tensor,) if attribute.HasField("sparse_tensor") else ()), *attribute.sparse_tensors):
            yield from (sparse.values, sparse.indices)
        for graph in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
            yield from _graph_tensors(graph)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
