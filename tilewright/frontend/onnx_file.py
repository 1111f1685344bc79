"""Reading ONNX files: loading, external data that stays inside the model's folder, validity and version.

The file is only data: none of it runs as code, and no path that it names may lead out of its folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, EncodeError
from onnx import external_data_helper

from tilewright.errors import InvalidModel, UnsupportedOperator

OLDEST_OPSET, NEWEST_OPSET = 13, 28
DEFAULT_DOMAIN = ("", "ai.onnx")
_DAMAGED = "the file is damaged or of another format; export it again"
_BESIDE = "keep the data files in the model's folder"


def load(source: onnx.ModelProto | str | Path) -> onnx.ModelProto:
    """A valid model with all weights in memory.

    Raises InvalidModel if the file is missing, damaged or not valid ONNX, if its external data is missing or outside the model's folder, or if its
    operator-set version is not known; UnsupportedOperator if it uses only other operator sets."""
    if isinstance(source, onnx.ModelProto):
        model, place = source, "the model"
        if any(external_data_helper.uses_external_data(t) for t in _tensors(model)):
            raise InvalidModel("the model's weights are in other files", "pass the path of the model file, or load it with onnx.load")
    else:
        path = Path(source)
        place = str(path)
        model = _read(path)
    version = opset_of(model, place)
    try:
        onnx.checker.check_model(_with_shapes(model))
    except onnx.checker.ValidationError as error:
        raise InvalidModel(f"{place} is not valid ONNX: {_first_line(error)}", "export it again, or run onnx.checker on it") from error
    except (ValueError, EncodeError) as error:
        # the checker takes serialised models, which protocol buffers limit to 2 GB; larger ones are read without it
        if isinstance(error, ValueError) and "2GB" not in str(error) and "exceeds" not in str(error).lower():
            raise InvalidModel(f"{place} cannot be checked: {_first_line(error)}", "export it again") from error
    assert OLDEST_OPSET <= version <= NEWEST_OPSET
    return model


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
    if version < OLDEST_OPSET:
        raise InvalidModel(
            f"{place} uses operator set {version}, and {OLDEST_OPSET} is the oldest that is read",
            f"convert it with onnx.version_converter.convert_version(model, {OLDEST_OPSET})",
        )
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
