"""ONNX models and files become an `Imported`.

Nodes whose operands are all known (weights, shapes) are evaluated at import with ONNX's reference implementation, so that computations on shapes
disappear; every other node goes through a handler (`onnx_*.py`) that adds nodes of the operator table. An operator without a handler that ONNX, or
the model itself, defines by a function is replaced by that function's body.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator
from torch.utils import _pytree as pytree

from tilewright.errors import InvalidModel, TilewrightError, UnsupportedOperator
from tilewright.frontend import onnx_neural, onnx_pointwise, onnx_recurrent, onnx_reduction, onnx_resize, onnx_shape
from tilewright.frontend.handlers import Unsupported
from tilewright.frontend.imported import Imported, Output, Parameter, UnsupportedNode
from tilewright.frontend.onnx_file import DEFAULT_DOMAIN, load
from tilewright.frontend.onnx_node import Known, NodeCall, NodeHandler, dtype_of, numpy_dtype
from tilewright.frontend.onnx_pointwise import element_type
from tilewright.frontend.reading import LARGEST_COMPUTED, printable, reading, said
from tilewright.graph.builder import GraphBuilder
from tilewright.graph.divisors import division_by_zero
from tilewright.ir.dtypes import BY_TORCH_NAME, COMPUTED
from tilewright.ir.graph import Value

HANDLERS: Mapping[str, NodeHandler] = MappingProxyType(
    {
        name: handler
        for family in (onnx_pointwise, onnx_shape, onnx_resize, onnx_reduction, onnx_neural, onnx_recurrent)
        for name, handler in family.HANDLERS.table.items()
    }
)

_GROWING = ("ConstantOfShape", "Expand", "Tile")  # operators whose results may be far larger than their operands
_LARGEST_FOLDED = 1 << 16  # elements of a result of `_GROWING` that is stored as a constant
_NEVER_FOLDED = frozenset(
    "If Loop Scan SequenceMap ImageDecoder RandomNormal RandomUniform RandomNormalLike RandomUniformLike Multinomial Bernoulli".split()
)
# attributes that have no effect if a handler does not read them: statistics kept in training, a precision that is at least met, the order of unused
# positions, parameters of other modes of interpolation or padding
_HARMLESS = frozenset(
    "momentum stash_type storage_order seed saturate round_mode precision softmax_precision activation_alpha activation_beta hidden_size sorted "
    "training_mode kernel_shape nearest_mode cubic_coeff_a extrapolation_value exclude_outside antialias pads".split()
)
_DEEPEST = 32  # nesting depth of functions
_MOST_INLINED = 100_000  # nodes of functions' bodies
_LISTED = 20  # nodes that an error names
_LARGEST_OPERAND = 64  # elements of an operand that may be a shape and is passed to ONNX's shape inference
# operators whose result sizes are values of operands, which shape inference does not always know
_SIZED_BY_VALUES = frozenset(
    "Range OneHot Pad Resize Upsample HannWindow HammingWindow BlackmanWindow MelWeightMatrix EyeLike Col2Im MaxUnpool CenterCropPad AffineGrid "
    "ConvTranspose Conv AveragePool MaxPool LpPool STFT DFT RoiAlign MaxRoiPool Trilu Gather Einsum".split()
)


def import_onnx(source: onnx.ModelProto | str | Path, example_inputs: Sequence[Any] | None = None) -> Imported:
    """Reads a model, whose inputs become positional tensors in the order of the file; one output is returned as a tensor, several as a
    tuple. Dynamic sizes are taken from the example inputs.

    Raises InvalidModel for a damaged or invalid file, an unknown operator set or an undetermined size, and UnsupportedOperator with every node that
    cannot be compiled."""
    with reading(None if isinstance(source, onnx.ModelProto) else source, "export it again, or run onnx.checker on it"):
        return _Importer(load(source), example_inputs).run()


class _Missing:
    """Stands for the results of an unsupported node, so that one reading finds all unsupported nodes."""


_MISSING = _Missing()
_Environment = MutableMapping[str, Any]  # tensor name -> Known, None or _MISSING


class _Importer:
    """State of importing one model."""

    def __init__(self, model: onnx.ModelProto, example_inputs: Sequence[Any] | None) -> None:
        self.model = model
        self.examples = None if example_inputs is None else list(example_inputs)
        self.builder = GraphBuilder()
        self.functions = {(f.domain, f.name): f for f in model.functions}
        self.arrays: dict[int, tuple[np.ndarray, Value]] = {}
        self.names: dict[int, str] = {}
        self.parameters: list[Parameter] = []
        self.unsupported: list[UnsupportedNode] = []
        self.inlined = 0

    def run(self) -> Imported:
        graph = self.model.graph
        environment: _Environment = {"": None}
        self._initializers(graph, environment)
        inputs = [i for i in graph.input if i.name not in environment]
        if self.examples is not None and len(self.examples) != len(inputs):
            names = ", ".join(i.name for i in inputs)
            raise InvalidModel(f"{len(self.examples)} example inputs for a model of {len(inputs)} inputs", f"pass {names}")
        for position, info in enumerate(inputs):
            environment[info.name] = self._input(position, info)
        opsets = {entry.domain: entry.version for entry in self.model.opset_import}
        self._nodes(graph.node, environment, opsets, {o.name for o in graph.output}, 0)
        if self.unsupported:
            reasons = list(dict.fromkeys(map(str, self.unsupported)))
            listed = "; ".join(reasons[:_LISTED]) + (f"; and {len(reasons) - _LISTED} more" if len(reasons) > _LISTED else "")
            count = "1 node is" if len(self.unsupported) == 1 else f"{len(self.unsupported)} nodes are"
            raise UnsupportedOperator(f"{count} not supported: {listed}", "replace them, or run that part of the model elsewhere")
        return self._outputs([environment[o.name] for o in graph.output], len(inputs))

    # --- inputs and constants -----------------------------------------------------------------------------------------

    def _initializers(self, graph: onnx.GraphProto, environment: _Environment) -> None:
        if graph.sparse_initializer:
            raise UnsupportedOperator("the model has sparse weights", "store them as dense tensors")
        for tensor in graph.initializer:
            try:
                array = numpy_helper.to_array(tensor)
            except Exception as error:
                raise InvalidModel(f"the data of {tensor.name} is damaged: {error}", "export the model again") from error
            environment[tensor.name] = array
            self.names[id(array)] = tensor.name

    def _input(self, position: int, info: onnx.ValueInfoProto) -> Value:
        if not info.type.HasField("tensor_type"):
            raise UnsupportedOperator(f"the input {info.name} is not a tensor", "sequences, maps and optional inputs are not supported")
        kind = info.type.tensor_type
        try:
            dtype = element_type(kind.elem_type)
        except (Unsupported, KeyError, TypeError) as error:
            raise UnsupportedOperator(f"the input {info.name} has an element type that is not supported: {error}", "convert the model") from error
        example = self.examples[position] if self.examples is not None else None
        if example is not None and (not isinstance(example, torch.Tensor) or BY_TORCH_NAME.get(str(example.dtype).removeprefix("torch.")) != dtype):
            found = example.dtype if isinstance(example, torch.Tensor) else type(example).__name__
            raise InvalidModel(f"the example for the input {info.name} is {found}, and the model takes {dtype}", "pass a tensor of the model's type")
        given = None if example is None else tuple(example.shape)
        if not kind.HasField("shape"):
            if given is None:
                raise InvalidModel(f"the input {info.name} has no shape", "pass example_inputs: their shapes are taken")
            return self.builder.input(info.name, given, dtype)
        if given is not None and len(given) != len(kind.shape.dim):
            found = f"has {len(given)} dimensions, not {len(kind.shape.dim)}"
            raise InvalidModel(f"the example for the input {info.name} {found}", "pass an example of the model's shape")
        shape = []
        for k, dim in enumerate(kind.shape.dim):
            fixed = dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else None
            if fixed is None and given is None:
                label = f" ({dim.dim_param})" if dim.dim_param else ""
                raise InvalidModel(
                    f"dimension {k}{label} of the input {info.name} has no size",
                    "pass example_inputs (--input on the command line): their sizes are taken",
                )
            if fixed is not None and given is not None and fixed != given[k]:
                found = f"is {fixed}, and {given[k]} in the example"
                raise InvalidModel(f"dimension {k} of the input {info.name} {found}", "pass an example of the model's shape")
            shape.append(given[k] if fixed is None else fixed)  # type: ignore[index]
        return self.builder.input(info.name, shape, dtype)

    def _materialise(self, array: np.ndarray) -> Value:
        known = self.arrays.get(id(array))
        if known is not None:
            return known[1]
        name = self.names.get(id(array))
        if array.dtype.name not in BY_TORCH_NAME or BY_TORCH_NAME[array.dtype.name] not in COMPUTED:
            raise Unsupported(f"a constant of type {array.dtype.name}")
        value = self.builder.constant(torch.from_numpy(np.array(array, order="C")), name or "constant")
        if name is not None:
            self.parameters.append(Parameter(name, value.name, None))
        self.arrays[id(array)] = (array, value)
        return value

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _nodes(self, nodes: Iterable[onnx.NodeProto], environment: _Environment, opsets: Mapping[str, int], wanted: set[str], depth: int) -> None:
        """Adds the nodes that the wanted tensors depend on."""
        needed: set[str] = set(wanted)
        kept: list[onnx.NodeProto] = []
        for node in reversed(list(nodes)):
            if needed.intersection(node.output):
                needed.update(_read_names(node))
                kept.append(node)
        for node in reversed(kept):
            used = [bool(name) and name in needed for name in node.output]
            results = self._node(node, environment, opsets, used, depth)
            for name, result in zip(node.output, results, strict=False):
                environment[name] = result

    def _node(self, node: onnx.NodeProto, environment: _Environment, opsets: Mapping[str, int], used: Sequence[bool], depth: int) -> Sequence[Any]:
        operands = [environment.get(name, _MISSING) for name in node.input]
        missing = any(operand is _MISSING for operand in operands)
        try:
            if node.domain in DEFAULT_DOMAIN and node.op_type == "If":
                return self._branch(node, operands, environment, opsets, depth)
            handler = HANDLERS.get(node.op_type) if node.domain in DEFAULT_DOMAIN else None
            if (node.domain, node.op_type) in self.functions:
                handler = None
            if missing:
                if handler is None and not self._function(node, None, opsets):
                    raise Unsupported("no definition in the operator table")
                return [_MISSING] * len(node.output)
            folded = self._fold(node, operands, opsets)
            if folded is not None:
                return folded
            return self._compiled(node, handler, operands, opsets, used, depth)
        except TilewrightError:
            raise
        except Exception as error:  # the handlers check little: a malformed model shows up here
            reason = str(error) if isinstance(error, Unsupported) else said(error)
            label = printable(node.op_type if node.domain in DEFAULT_DOMAIN else f"{node.domain}.{node.op_type}")
            self.unsupported.append(UnsupportedNode(_label(node), label, printable(node.name) or f"the node of {_label(node)}", reason))
            return [_MISSING] * len(node.output)

    def _compiled(
        self, node: onnx.NodeProto, handler: NodeHandler | None, operands: Sequence[Any], opsets: Mapping[str, int], used: Sequence[bool], depth: int
    ) -> Sequence[Known | None]:
        """Results from the operator's handler, or from the function that defines it."""
        reason = Unsupported("no definition in the operator table")
        marks = len(self.builder.nodes)
        if handler is not None:
            try:
                return self._handled(node, handler, operands, opsets, used)
            except Unsupported as error:
                reason = error
                del self.builder.nodes[marks:]
        function = self._function(node, operands, opsets) if depth < _DEEPEST else None
        if function is None:
            raise reason
        before = len(self.unsupported)
        results = self._inlined(node, function, operands, opsets, used, depth)
        if len(self.unsupported) > before and handler is not None:
            del self.unsupported[before:], self.builder.nodes[marks:]
            raise reason
        return results

    def _handled(
        self, node: onnx.NodeProto, handler: NodeHandler, operands: Sequence[Any], opsets: Mapping[str, int], used: Sequence[bool]
    ) -> Sequence[Known | None]:
        if node.op_type not in ("Shape", "Size") and not (node.op_type == "CastLike" and isinstance(operands[0], np.ndarray)):
            self._check_types(operands)
        opset = opsets.get("", opsets.get("ai.onnx", 0))
        call = NodeCall(self.builder, node.op_type, opset, operands, _attributes(node), used, self._materialise)
        with self.builder.at(node.name or f"{node.op_type}_{_label(node)}", printable(node.name) or f"the {node.op_type} of {_label(node)}"):
            results = handler(call)
        unread = [name for name in sorted(set(call.attributes) - call.read) if not _is_neutral(node.op_type, opset, name, call.attributes[name])]
        if unread:
            raise Unsupported(f"the attribute {', '.join(unread)}")
        listed = results if isinstance(results, tuple) else (results,)
        if len(listed) < len(used) and any(used[len(listed) :]):
            raise Unsupported(f"output {len(listed)} of {node.op_type}")
        self._check_types(listed)
        return listed

    def _check_types(self, operands: Iterable[Any]) -> None:
        bad = sorted({v.dtype for v in operands if isinstance(v, Value)} - COMPUTED)
        if bad:
            raise Unsupported(f"it computes with {', '.join(bad)}")

    def _fold(self, node: onnx.NodeProto, operands: Sequence[Any], opsets: Mapping[str, int]) -> Sequence[np.ndarray | None] | None:
        """Results of a node whose operands are all known; None if it must stay in the graph."""
        if any(isinstance(v, Value) for v in operands) or node.domain not in DEFAULT_DOMAIN or node.op_type in _NEVER_FOLDED:
            return None
        if node.op_type in _GROWING:
            factors = operands[0 if node.op_type == "ConstantOfShape" else 1]
            if prod(max(int(n), 0) for n in factors) * (1 if node.op_type == "ConstantOfShape" else operands[0].size) > _LARGEST_FOLDED:
                return None
        opset = opsets.get("", opsets.get("ai.onnx", 0))
        if _folded_elements(node, operands, opset) * 8 > LARGEST_COMPUTED:
            return None
        if node.op_type in ("Div", "Mod") and all(v.dtype.kind in "iu" and v.size for v in operands) and not operands[1].all():
            raise division_by_zero(f"{node.op_type} {_label(node)}")
        try:
            evaluator = ReferenceEvaluator(node, opsets={"": opset})
            with np.errstate(all="ignore"):
                results = evaluator.run(None, {name: v for name, v in zip(node.input, operands, strict=True) if name})
        except Exception:
            return None  # the handler decides and gives the reason
        if not all(r is None or isinstance(r, (np.ndarray, np.generic)) for r in results):
            return None
        return [None if r is None else np.asarray(r) for r in results]

    def _branch(
        self, node: onnx.NodeProto, operands: Sequence[Any], environment: _Environment, opsets: Mapping[str, int], depth: int
    ) -> Sequence[Any]:
        """The branch that a known condition chooses."""
        if not isinstance(operands[0], np.ndarray):
            raise Unsupported("a condition that depends on the model's inputs")
        taken = "then_branch" if operands[0].all() else "else_branch"
        graph = next(a.g for a in node.attribute if a.name == taken)
        inner = ChainMap({}, environment)
        self._initializers(graph, inner)
        outputs = [o.name for o in graph.output]
        self._nodes(graph.node, inner, opsets, set(outputs), depth + 1)
        return [inner[name] for name in outputs]

    # --- functions ----------------------------------------------------------------------------------------------------

    def _function(self, node: onnx.NodeProto, operands: Sequence[Any] | None, opsets: Mapping[str, int]) -> onnx.FunctionProto | None:
        """The function that defines an operator: one of the model, or of the ONNX standard. With `operands` None, only whether one may exist."""
        own = self.functions.get((node.domain, node.op_type))
        if own is not None or node.domain not in DEFAULT_DOMAIN:
            return own
        opset = opsets.get("", opsets.get("ai.onnx", 0))
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
        types = [_type_of(v).SerializeToString() if v is not None else b"" for v in operands]
        versions = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
        try:
            version = max(versions, default=opset)
            text = schema.get_context_dependent_function_with_opset_version(version, node.SerializeToString(), types)
        except Exception:
            return None
        function = onnx.FunctionProto()
        function.ParseFromString(text)
        return function if function.node else None

    def _inlined(
        self,
        node: onnx.NodeProto,
        function: onnx.FunctionProto,
        operands: Sequence[Any],
        opsets: Mapping[str, int],
        used: Sequence[bool],
        depth: int,
    ) -> Sequence[Any]:
        """The results of a function's body, with the caller's operands and attributes."""
        given = {a.name: a for a in node.attribute}
        given = {**{a.name: a for a in function.attribute_proto}, **given}
        if node.domain in DEFAULT_DOMAIN:
            schema = onnx.defs.get_schema(node.op_type, opsets.get("", opsets.get("ai.onnx", 0)), "")
            defaults = {name: a.default_value for name, a in schema.attributes.items() if a.default_value.type}
            given = {**defaults, **given}
        inner: _Environment = {"": None}
        inner.update(zip(function.input, [*operands, *[None] * (len(function.input) - len(operands))], strict=True))
        own = {entry.domain: entry.version for entry in function.opset_import}
        self.inlined += len(function.node)
        if self.inlined > _MOST_INLINED:
            raise InvalidModel(f"the functions of the model are more than {_MOST_INLINED:,} nodes, all calls together", "export it without functions")
        wanted = {name for name, use in zip(function.output, used, strict=False) if use}
        place = _label(node)
        self._nodes([_bound(n, given, place) for n in function.node], inner, own or opsets, wanted, depth + 1)
        return [inner.get(name) for name in function.output]

    # --- outputs ------------------------------------------------------------------------------------------------------

    def _outputs(self, results: Sequence[Any], inputs: int) -> Imported:
        values: list[Value] = []
        outputs: list[Output] = []
        for result in results:
            if result is None:
                raise InvalidModel("an output of the model is not computed", "export the model again")
            try:
                value = result if isinstance(result, Value) else self._materialise(result)
            except Unsupported as error:
                raise UnsupportedOperator(f"an output of the model is {error}", "convert it to a supported type") from error
            if value.name in self.builder.inputs or value.name in self.builder.constants:
                with self.builder.at(f"{value.name}_copy", ""):
                    value = self.builder.op("copy", value)
            if value not in values:
                values.append(value)
            outputs.append(Output("value", values.index(value)))
        _, in_spec = pytree.tree_flatten((tuple(range(inputs)), {}))
        _, out_spec = pytree.tree_flatten(0 if len(outputs) == 1 else tuple(range(len(outputs))))
        return Imported(
            self.builder.finish(values), in_spec, out_spec, tuple(range(inputs)), (None,) * inputs, tuple(outputs), parameters=tuple(self.parameters)
        )


def _folded_elements(node: onnx.NodeProto, operands: Sequence[np.ndarray | None], opset: int) -> int:
    """Number of elements in the results of a node whose operands are known, or an upper bound."""
    named = [(name, v) for name, v in zip(node.input, operands, strict=True) if name and v is not None]
    product = prod(max(v.size, 1) for _, v in named)
    if node.op_type not in _SIZED_BY_VALUES and product * 8 <= LARGEST_COMPUTED:
        return product
    try:
        types = {name: _type_of(v) for name, v in named}
        values = {name: numpy_helper.from_array(v, name) for name, v in named if v.size <= _LARGEST_OPERAND and v.dtype.kind != "O"}
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        inferred = shape_inference.infer_node_outputs(schema, node, types, values, opset_imports=[helper.make_opsetid("", opset)])
        dims = [dim for kind in inferred.values() for dim in kind.tensor_type.shape.dim]
        if len(inferred) == sum(map(bool, node.output)) and all(dim.HasField("dim_value") and dim.dim_value >= 0 for dim in dims):
            return sum(prod(dim.dim_value for dim in kind.tensor_type.shape.dim) for kind in inferred.values())
    except Exception:  # its errors are not informative; the handler's are
        pass
    return LARGEST_COMPUTED if node.op_type in _SIZED_BY_VALUES else product


def _is_neutral(operator: str, opset: int, name: str, value: Any) -> bool:
    """Whether an attribute that the handler did not read has no effect: it is harmless, or has the standard's default value."""
    if name in _HARMLESS:
        return True
    described = onnx.defs.get_schema(operator, opset, "").attributes.get(name)
    if described is None or not described.default_value.type:
        return False
    default = helper.get_attribute_value(described.default_value)
    return bool(value == (default.decode() if isinstance(default, bytes) else default))


def _label(node: onnx.NodeProto) -> str:
    """A node's name, or the name of its first result."""
    return printable(node.name or next((name for name in node.output if name), node.op_type))


def _read_names(node: onnx.NodeProto) -> set[str]:
    """Names that a node reads, including those read in its branches."""
    names = set(node.input)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                names |= _read_names(inner)
            names.update(output.name for output in graph.output)
    return names


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
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


def _bound(node: onnx.NodeProto, given: Mapping[str, onnx.AttributeProto], place: str) -> onnx.NodeProto:
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
                graph.node[k].CopyFrom(_bound(inner, given, place))
    return result


def _type_of(operand: Known) -> onnx.TypeProto:
    """The ONNX type of an operand, for functions that depend on it."""
    dtype = operand.dtype if isinstance(operand, np.ndarray) else numpy_dtype(dtype_of(operand))
    return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(dtype), tuple(operand.shape))
