"""What an ONNX node says: its name, attributes and the names that it reads; the types of operands, and the functions that define operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tilewright.frontend.onnx_node import Known, dtype_of, numpy_dtype
from tilewright.frontend.reading import printable

# attributes that have no effect if a handler does not read them: statistics kept in training, a precision that is at least met, the order of unused
# positions, parameters of other modes of interpolation or padding
_HARMLESS = frozenset(
    "momentum stash_type storage_order seed saturate round_mode precision softmax_precision activation_alpha activation_beta hidden_size sorted "
    "training_mode kernel_shape nearest_mode cubic_coeff_a extrapolation_value exclude_outside antialias pads".split()
)


def opset_number(opsets: Mapping[str, int]) -> int:
    """The version of ONNX's own operator set among those that a model or function imports."""
    return opsets.get("", opsets.get("ai.onnx", 0))


def label(node: onnx.NodeProto) -> str:
    """A node's name, or the name of its first result."""
    return printable(node.name or next((name for name in node.output if name), node.op_type))


def size_of(dim: onnx.TensorShapeProto.Dimension) -> int | None:
    """The size that a dimension of an input declares; None if it is free. Some exporters write -1 for that."""
    return dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else None


def read_names(node: onnx.NodeProto) -> set[str]:
    """Names that a node reads, including those read in its branches."""
    names = set(node.input)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                names |= read_names(inner)
            names.update(output.name for output in graph.output)
    return names


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Attributes as Python values: strings as text, tensors as arrays."""
    result = {}
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        if isinstance(value, bytes):
            value = value.decode()
        elif isinstance(value, onnx.TensorProto):
            value = numpy_helper.to_array(value)
        elif attribute.type == onnx.AttributeProto.STRINGS:
            value = [v.decode() for v in value]
        elif attribute.type in (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS):
            value = list(value)
        result[attribute.name] = value
    return result


def is_neutral(operator: str, opset: int, name: str, value: Any) -> bool:
    """Whether an attribute that the handler did not read has no effect: it is harmless, or has the standard's default value."""
    if name in _HARMLESS:
        return True
    described = onnx.defs.get_schema(operator, opset, "").attributes.get(name)
    if described is None or not described.default_value.type:
        return False
    default = helper.get_attribute_value(described.default_value)
    return bool(value == (default.decode() if isinstance(default, bytes) else default))


def standard_function(node: onnx.NodeProto, operands: Sequence[Any] | None, opset: int) -> onnx.FunctionProto | None:
    """The function by which the ONNX standard defines a node's operator, if there is one. With `operands` None, only whether one may exist."""
    try:
        schema: Any = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    if schema.has_function:
        standard: onnx.FunctionProto = schema.function_body
        return standard
    if not schema.has_context_dependent_function:
        return None
    if operands is None:
        return onnx.FunctionProto()
    types = [type_of(v).SerializeToString() if v is not None else b"" for v in operands]
    versions = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
    try:
        version = max(versions, default=opset)
        text = schema.get_context_dependent_function_with_opset_version(version, node.SerializeToString(), types)
    except Exception:
        return None
    function = onnx.FunctionProto()
    function.ParseFromString(text)
    return function if function.node else None


def bound(node: onnx.NodeProto, given: Mapping[str, onnx.AttributeProto], place: str) -> onnx.NodeProto:
    """A node of a function's body with the caller's attributes substituted; attributes that the caller omits are omitted."""
    result = onnx.NodeProto()
    result.CopyFrom(node)
    result.name = f"{place}.{node.name or node.op_type}"
    del result.attribute[:]
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            if attribute.ref_attr_name in given:
                result.attribute.add().CopyFrom(given[attribute.ref_attr_name])
                result.attribute[-1].name = attribute.name
            continue
        copy = result.attribute.add()
        copy.CopyFrom(attribute)
        for graph in (copy.g, *copy.graphs):
            for k, inner in enumerate(list(graph.node)):
                graph.node[k].CopyFrom(bound(inner, given, place))
    return result


def type_of(operand: Known) -> onnx.TypeProto:
    """The ONNX type of an operand, for functions that depend on it."""
    dtype = operand.dtype if isinstance(operand, np.ndarray) else numpy_dtype(dtype_of(operand))
    return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(dtype), tuple(operand.shape))
