"""Nodes whose operands are all known (weights, shapes), evaluated at import with ONNX's reference implementation."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator

from tilewright.frontend.onnx_file import DEFAULT_DOMAIN
from tilewright.frontend.onnx_proto import label, type_of
from tilewright.frontend.reading import LARGEST_COMPUTED
from tilewright.graph.divisors import division_by_zero
from tilewright.ir.graph import Value

_GROWING = ("ConstantOfShape", "Expand", "Tile")  # operators whose results may be far larger than their operands
_LARGEST_FOLDED = 1 << 16  # elements of a result of `_GROWING` that is stored as a constant
_NEVER_FOLDED = frozenset(
    "If Loop Scan SequenceMap ImageDecoder RandomNormal RandomUniform RandomNormalLike RandomUniformLike Multinomial Bernoulli".split()
)
_LARGEST_OPERAND = 64  # elements of an operand that may be a shape and is passed to ONNX's shape inference
# operators whose result sizes are values of operands, which shape inference does not always know
_SIZED_BY_VALUES = frozenset(
    "Range OneHot Pad Resize Upsample HannWindow HammingWindow BlackmanWindow MelWeightMatrix EyeLike Col2Im MaxUnpool CenterCropPad AffineGrid "
    "ConvTranspose Conv AveragePool MaxPool LpPool STFT DFT RoiAlign MaxRoiPool Trilu Gather Einsum".split()
)


def folded(node: onnx.NodeProto, operands: Sequence[Any], opset: int) -> Sequence[np.ndarray | None] | None:
    """Results of a node whose operands are all known; None if it must stay in the graph."""
    if any(isinstance(v, Value) for v in operands) or node.domain not in DEFAULT_DOMAIN or node.op_type in _NEVER_FOLDED:
        return None
    if node.op_type in _GROWING:
        factors = operands[0 if node.op_type == "ConstantOfShape" else 1]
        if prod(max(int(n), 0) for n in factors) * (1 if node.op_type == "ConstantOfShape" else operands[0].size) > _LARGEST_FOLDED:
            return None
    if _folded_elements(node, operands, opset) * 8 > LARGEST_COMPUTED:
        return None
    if node.op_type in ("Div", "Mod") and all(v.dtype.kind in "iu" and v.size for v in operands) and not operands[1].all():
        raise division_by_zero(f"{node.op_type} {label(node)}")
    try:
        evaluator = ReferenceEvaluator(node, opsets={"": opset})
        with np.errstate(all="ignore"):
            results = evaluator.run(None, {name: v for name, v in zip(node.input, operands, strict=True) if name})
    except Exception:
        return None  # the handler decides and gives the reason
    if not all(r is None or isinstance(r, (np.ndarray, np.generic)) for r in results):
        return None
    return [None if r is None else np.asarray(r) for r in results]


def _folded_elements(node: onnx.NodeProto, operands: Sequence[np.ndarray | None], opset: int) -> int:
    """Number of elements in the results of a node whose operands are known, or an upper bound."""
    named = [(name, v) for name, v in zip(node.input, operands, strict=True) if name and v is not None]
    product = prod(max(v.size, 1) for _, v in named)
    if node.op_type not in _SIZED_BY_VALUES and product * 8 <= LARGEST_COMPUTED:
        return product
    try:
        types = {name: type_of(v) for name, v in named}
        values = {name: numpy_helper.from_array(v, name) for name, v in named if v.size <= _LARGEST_OPERAND and v.dtype.kind != "O"}
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        inferred = shape_inference.infer_node_outputs(schema, node, types, values, opset_imports=[helper.make_opsetid("", opset)])
        dims = [dim for kind in inferred.values() for dim in kind.tensor_type.shape.dim]
        if len(inferred) == sum(map(bool, node.output)) and all(dim.HasField("dim_value") and dim.dim_value >= 0 for dim in dims):
            return sum(prod(dim.dim_value for dim in kind.tensor_type.shape.dim) for kind in inferred.values())
    except Exception:  # its errors are not informative; the handler's are
        pass
    return LARGEST_COMPUTED if node.op_type in _SIZED_BY_VALUES else product
