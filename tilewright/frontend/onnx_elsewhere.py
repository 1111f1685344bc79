"""Nodes without an entry in the operator table: they run through ONNX Runtime or ONNX's reference evaluator (`graph.onnx_call`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference

from tilewright.frontend.handlers import Unsupported
from tilewright.frontend.onnx_node import Known, dtype_of
from tilewright.frontend.onnx_pointwise import element_type
from tilewright.frontend.onnx_proto import type_of
from tilewright.graph.builder import GraphBuilder
from tilewright.graph.onnx_call import CONTROL, PREFIX, REFUSED, encoded, runner_of
from tilewright.ir.dtypes import FLOAT32
from tilewright.ir.graph import Value

LARGEST_KNOWN = 1 << 10  # elements of a known operand that becomes part of the node
NOT_PASSED = frozenset({"bf16", "c64", "c128"})  # NumPy or ONNX Runtime has no such arrays


class DependsOnData(Unsupported):
    """The shapes of a node's results depend on data."""


def widened(g: GraphBuilder, node: onnx.NodeProto, operands: Sequence[Any], opset: int) -> list[Any]:
    """The operands of a node with those of bfloat16 in float32, which holds the same numbers, unless a result has their type: runtimes are given no
    bfloat16."""
    if not any(isinstance(operand, Value) and operand.dtype == "bf16" for operand in operands) or not onnx.defs.has(node.op_type, ""):
        return list(operands)
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    made = {result.type_str for result in schema.outputs}
    taken = [schema.inputs[min(k, len(schema.inputs) - 1)].type_str for k in range(len(operands))]
    return [
        g.cast(operand, FLOAT32) if isinstance(operand, Value) and operand.dtype == "bf16" and kind not in made else operand
        for operand, kind in zip(operands, taken, strict=True)
    ]


def elsewhere(
    g: GraphBuilder, node: onnx.NodeProto, operands: Sequence[Known | None], opset: int, reason: str, materialise: Callable[[np.ndarray], Value]
) -> tuple[Value | None, ...]:
    """The results of a node that something else computes; `reason` is why our kernels do not.

    Raises Unsupported with the reason if the node cannot be run, and DependsOnData if the shapes of its results are not known."""
    if node.op_type in REFUSED | CONTROL:
        raise Unsupported(reason)
    operands = widened(g, node, operands, opset)
    single = onnx.NodeProto()
    single.CopyFrom(node)
    single.name = single.domain = ""
    inputs: list[Value] = []
    infos: list[onnx.ValueInfoProto] = []
    known: list[onnx.TensorProto] = []
    for k, operand in enumerate(operands):
        if operand is None:
            single.input[k] = ""
            continue
        single.input[k] = f"x{k}"
        if isinstance(operand, np.ndarray) and operand.size <= LARGEST_KNOWN:
            known.append(numpy_helper.from_array(operand, f"x{k}"))
            continue
        value = materialise(operand) if isinstance(operand, np.ndarray) else operand
        if dtype_of(value) in NOT_PASSED:
            raise Unsupported(reason)
        infos.append(helper.make_value_info(f"x{k}", type_of(value)))
        inputs.append(value)
    made = [k for k, name in enumerate(single.output) if name]
    for k in made:
        single.output[k] = f"y{k}"
    types = _result_types(single, infos, known, opset, reason)
    results = [helper.make_tensor_value_info(f"y{k}", code, shape) for k, (code, shape) in zip(made, types, strict=True)]
    graph = helper.make_graph([single], "node", infos, results, known)
    ir_version = helper.find_min_ir_version_for([helper.make_opsetid("", opset)])
    try:
        text = encoded(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version))
        runner = runner_of(text)
    except Exception as error:
        raise Unsupported(reason) from error
    recipe = (("list", tuple(("input", k) for k in range(len(inputs)))), ("value", text)), ()
    attributes = {"target": PREFIX + node.op_type, "call": recipe, "reason": f"{reason}; {runner} computes it"}
    values = iter(g.structural("torch", inputs, [(shape, element_type(code)) for code, shape in types], attributes))
    return tuple(next(values) if name else None for name in single.output)


def _result_types(
    node: onnx.NodeProto, infos: Sequence[onnx.ValueInfoProto], known: Sequence[onnx.TensorProto], opset: int, reason: str
) -> list[tuple[int, tuple[int, ...]]]:
    """The element type and the shape of each result, by ONNX's shape inference."""
    types = {info.name: info.type for info in infos}
    types |= {t.name: helper.make_tensor_type_proto(t.data_type, t.dims) for t in known}
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        found = shape_inference.infer_node_outputs(schema, node, types, {t.name: t for t in known}, opset_imports=[helper.make_opsetid("", opset)])
    except Exception as error:
        raise Unsupported(reason) from error
    results = []
    for name in filter(None, node.output):
        tensor = found[name].tensor_type if name in found else None
        dims = [] if tensor is None else [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim]
        if tensor is None or not tensor.HasField("shape") or min(dims, default=0) < 0:
            raise DependsOnData(f"{reason}, and the shapes of its results depend on data")
        if element_type(tensor.elem_type) in NOT_PASSED:
            raise Unsupported(reason)
        results.append((tensor.elem_type, tuple(dims)))
    return results
