"""ONNX models and files become an `Imported`.

Nodes whose operands are all known (weights, shapes) are evaluated at import with ONNX's reference implementation, so that computations on shapes
disappear (`onnx_folding`); every other node goes through a handler (`onnx_*.py`) that adds nodes of the operator table. An operator without a handler
that ONNX, or the model itself, defines by a function is replaced by that function's body.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch.utils import _pytree as pytree

from tilewright.errors import InvalidModel, TilewrightError, UnsupportedOperator
from tilewright.frontend import (
    onnx_neural,
    onnx_pointwise,
    onnx_pooling,
    onnx_quantised,
    onnx_recurrent,
    onnx_reduction,
    onnx_resize,
    onnx_sampling,
    onnx_shape,
)
from tilewright.frontend.handlers import Unsupported
from tilewright.frontend.imported import Imported, Output, Parameter, UnsupportedNode
from tilewright.frontend.onnx_control import Environment, control
from tilewright.frontend.onnx_elsewhere import DependsOnData, elsewhere, widened
from tilewright.frontend.onnx_file import DEFAULT_DOMAIN, load
from tilewright.frontend.onnx_folding import folded
from tilewright.frontend.onnx_node import Known, NodeCall, NodeHandler, Unspecialised
from tilewright.frontend.onnx_pointwise import element_type
from tilewright.frontend.onnx_proto import attributes_of, bound, is_neutral, label, opset_number, read_names, size_of, standard_function
from tilewright.frontend.onnx_tail import Later, TailBuilder, read_by
from tilewright.frontend.reading import printable, reading, said
from tilewright.graph.builder import GraphBuilder
from tilewright.graph.onnx_call import CONTROL, PREFIX
from tilewright.ir.dtypes import BY_TORCH_NAME, COMPUTED, ELEMENT_TYPES, is_float
from tilewright.ir.graph import Value

HANDLERS: Mapping[str, NodeHandler] = MappingProxyType(
    {
        name: handler
        for family in (
            onnx_pointwise,
            onnx_shape,
            onnx_resize,
            onnx_reduction,
            onnx_neural,
            onnx_pooling,
            onnx_quantised,
            onnx_recurrent,
            onnx_sampling,
        )
        for name, handler in family.HANDLERS.table.items()
    }
)

_DEEPEST = 32  # nesting depth of functions
_MOST_INLINED = 100_000  # nodes of functions' bodies
_LISTED = 20  # nodes that an error names
_LARGEST_SPECIALISED = 1 << 10  # elements of an input whose values may be taken from its example
_MOST_READINGS = 32  # readings of a model, each with more inputs specialised
_LARGEST_SCALE = 8  # elements of a floating-point tensor from which a shape may be computed: more are data
_LARGEST_FLAG = 8  # elements of an input that decides control flow and is specialised: more are data
_MOST_ORIGINS = 16  # inputs from which one shape is computed


def import_onnx(source: onnx.ModelProto | str | Path, example_inputs: Sequence[Any] | None = None) -> Imported:
    """Reads a model, whose inputs become positional tensors in the order of the file; one output is returned as a tensor, several as a
    tuple. Dynamic sizes are taken from the example inputs, and so are the values of inputs that must be known: shapes, axes, scales, counts. Such an
    input is a literal of the result, and only its example value is accepted at a call. Nodes on types on which no kernel computes are refused.

    Raises InvalidModel for a damaged or invalid file, an unknown operator set or an undetermined size, and UnsupportedOperator with every node that
    cannot be compiled."""
    with reading(None if isinstance(source, onnx.ModelProto) else source, "export it again, or run onnx.checker on it"):
        model = load(source)
        specialised: frozenset[str] = frozenset()
        for _ in range(_MOST_READINGS):
            importer = _Importer(model, example_inputs, specialised)
            imported = importer.run()
            if imported is not None:
                return imported
            specialised |= importer.wanted
        raise UnsupportedOperator("its shapes depend on the values of too many inputs", "make them constants of the model")


Made = TypeVar("Made")


class _Missing:
    """Stands for the results of an unsupported node, so that one reading finds all unsupported nodes."""


_MISSING = _Missing()


@dataclass
class Inlined:
    """How many nodes of functions' and iterations' bodies were added, and how many control nodes and functions of ONNX's own are around the current
    one."""

    nodes: int = 0
    within: int = 0
    standard: int = 0


class _Importer:
    """State of importing one model."""

    def __init__(self, model: onnx.ModelProto, example_inputs: Sequence[Any] | None, specialised: Set[str]) -> None:
        """`specialised` names the inputs that are constants with the values of their examples."""
        self.model = model
        self.specialised = specialised
        self.opset = 0
        self.wanted: set[str] = set()  # inputs without whose values a node cannot be compiled
        self.given: dict[str, Value] = {}  # the inputs that are not specialised
        self.origins: dict[str, Set[str]] = {}  # value -> the inputs that it is computed from, none if these are not to be specialised
        self.examples = None if example_inputs is None else list(example_inputs)
        self.builder = GraphBuilder()
        self.functions = {(f.domain, f.name): f for f in model.functions}
        self.arrays: dict[int, tuple[np.ndarray, Value]] = {}
        self.names: dict[int, tuple[np.ndarray, str]] = {}  # the arrays are kept, so that no other gets their identity
        self.parameters: list[Parameter] = []
        self.unsupported: list[UnsupportedNode] = []
        self.inlined = Inlined()
        self.by_name: dict[str, torch.Tensor] = {}  # examples by the names of their inputs; those on the device "meta" have no values
        self.tail: TailBuilder | None = TailBuilder(self.materialise)  # bodies have none: their tensors have fixed shapes
        self.around: tuple[_Importer, Mapping[str, Value]] | None = None  # of a body: the importer around it, and its values by the body's inputs

    def run(self) -> Imported | None:
        """The model; None if it has to be read again with the inputs `wanted` specialised."""
        graph = self.model.graph
        environment: Environment = {"": None}
        self._initializers(graph, environment)
        inputs = [i for i in graph.input if i.name not in environment]
        if self.examples is not None and len(self.examples) != len(inputs):
            names = ", ".join(i.name for i in inputs)
            raise InvalidModel(f"{len(self.examples)} example inputs for a model of {len(inputs)} inputs", f"pass {names}")
        self.by_name = {info.name: example for info, example in zip(inputs, self.examples or (), strict=False)}
        leaves: list[int | None] = []
        literals: list[torch.Tensor | None] = []
        for position, info in enumerate(inputs):
            shape, dtype = self._input(position, info)
            literal = self.examples[position].detach().cpu().clone() if self.examples is not None and info.name in self.specialised else None
            if literal is None:
                value = self.builder.input(info.name, shape, dtype)
                self.origins[value.name] = {info.name} if value.elements <= _LARGEST_SPECIALISED else set()
                environment[info.name] = self.given[info.name] = value
            else:
                environment[info.name] = literal.numpy()
            leaves.append(len(self.builder.inputs) - 1 if literal is None else None)
            literals.append(literal)
        opsets = {entry.domain: entry.version for entry in self.model.opset_import}
        self.opset = opset_number(opsets)
        self._nodes(graph.node, environment, opsets, {o.name for o in graph.output}, 0)
        if self.wanted:
            return None
        if self.unsupported:
            reasons = list(dict.fromkeys(map(str, self.unsupported)))
            listed = "; ".join(reasons[:_LISTED]) + (f"; and {len(reasons) - _LISTED} more" if len(reasons) > _LISTED else "")
            count = "1 node is" if len(self.unsupported) == 1 else f"{len(self.unsupported)} nodes are"
            raise UnsupportedOperator(f"{count} not supported: {listed}", "replace them, or run that part of the model elsewhere")
        return self._outputs([environment[o.name] for o in graph.output], leaves, literals)

    # --- inputs and constants -----------------------------------------------------------------------------------------

    def _initializers(self, graph: onnx.GraphProto, environment: Environment) -> None:
        if graph.sparse_initializer:
            raise UnsupportedOperator("the model has sparse weights", "store them as dense tensors")
        for tensor in graph.initializer:
            try:
                array = numpy_helper.to_array(tensor)
            except Exception as error:
                raise InvalidModel(f"the data of {tensor.name} is damaged: {error}", "export the model again") from error
            environment[tensor.name] = array
            self.names[id(array)] = (array, tensor.name)

    def _input(self, position: int, info: onnx.ValueInfoProto) -> tuple[tuple[int, ...], str]:
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
            return given, dtype
        if given is not None and len(given) != len(kind.shape.dim):
            found = f"has {len(given)} dimensions, not {len(kind.shape.dim)}"
            raise InvalidModel(f"the example for the input {info.name} {found}", "pass an example of the model's shape")
        shape = []
        for k, dim in enumerate(kind.shape.dim):
            fixed = size_of(dim)
            if fixed is None and given is None:
                named = f" ({dim.dim_param})" if dim.dim_param else ""
                raise InvalidModel(
                    f"dimension {k}{named} of the input {info.name} has no size",
                    "pass example_inputs (--batch or --input on the command line): their sizes are taken",
                )
            if fixed is not None and given is not None and fixed != given[k]:
                found = f"is {fixed}, and {given[k]} in the example"
                raise InvalidModel(f"dimension {k} of the input {info.name} {found}", "pass an example of the model's shape")
            shape.append(given[k] if fixed is None else fixed)  # type: ignore[index]
        return tuple(shape), dtype

    def materialise(self, array: np.ndarray) -> Value:
        """A known tensor as a constant of the graph. Raises Unsupported for types in which kernels do not compute."""
        known = self.arrays.get(id(array))
        if known is not None:
            return known[1]
        _, name = self.names.get(id(array), (None, None))
        element = ELEMENT_TYPES.get(BY_TORCH_NAME.get(array.dtype.name, ""))
        if element is None or element.name not in COMPUTED:
            raise Unsupported(f"a constant of type {array.dtype.name}")
        bits = torch.from_numpy(np.array(array, order="C").view(element.array))  # NumPy has no bfloat16 of its own
        value = self.builder.constant(bits.view(getattr(torch, element.torch)), name or "constant")
        if name is not None:
            self.parameters.append(Parameter(name, value.name, None))
        self.arrays[id(array)] = (array, value)
        return value

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _nodes(self, nodes: Iterable[onnx.NodeProto], environment: Environment, opsets: Mapping[str, int], wanted: set[str], depth: int) -> None:
        """Adds the nodes that the wanted tensors depend on."""
        needed: set[str] = set(wanted)
        kept: list[onnx.NodeProto] = []
        for node in reversed(list(nodes)):
            if needed.intersection(node.output):
                needed.update(read_names(node))
                kept.append(node)
        for node in reversed(kept):
            used = [bool(name) and name in needed for name in node.output]
            results = self._node(node, environment, opsets, used, depth)
            for name, result in zip(node.output, results, strict=False):
                environment[name] = result

    def _node(self, node: onnx.NodeProto, environment: Environment, opsets: Mapping[str, int], used: Sequence[bool], depth: int) -> Sequence[Any]:
        operands = [environment.get(name, _MISSING) for name in node.input]
        missing = any(operand is _MISSING for operand in operands)
        try:
            handler = HANDLERS.get(node.op_type) if node.domain in DEFAULT_DOMAIN else None
            controls = node.domain in DEFAULT_DOMAIN and node.op_type in CONTROL
            if (node.domain, node.op_type) in self.functions:
                handler, controls = None, False
            if missing:
                if handler is None and not controls and not self._function(node, None, opsets):
                    raise Unsupported("no definition in the operator table")
                return [_MISSING] * len(node.output)
            if any(isinstance(operand, Later) for operand in operands) and (node.domain, node.op_type) not in self.functions:
                return self._later(node, environment, opsets, None)
            if controls:
                return self._controlled(node, operands, environment, opsets, depth + 1)
            known = folded(node, operands, opset_number(opsets))
            if known is not None:
                return known
            try:
                return self._compiled(node, handler, operands, opsets, used, depth)
            except DependsOnData as error:
                return self._later(node, environment, opsets, error)
        except TilewrightError:
            raise
        except Exception as error:  # the handlers check little: a malformed model shows up here
            reason = str(error) if isinstance(error, Unsupported) else said(error)
            operator = printable(node.op_type if node.domain in DEFAULT_DOMAIN else f"{node.domain}.{node.op_type}")
            self.unsupported.append(UnsupportedNode(label(node), operator, printable(node.name) or f"the node of {label(node)}", reason))
            return [_MISSING] * len(node.output)

    def _compiled(
        self, node: onnx.NodeProto, handler: NodeHandler | None, operands: Sequence[Any], opsets: Mapping[str, int], used: Sequence[bool], depth: int
    ) -> Sequence[Known | None]:
        """Results from the operator's handler, or from the function that defines it, or by what else runs ONNX."""
        reason = Unsupported("no definition in the operator table")
        marks, wanted = len(self.builder.nodes), frozenset(self.wanted)
        if handler is not None:
            try:
                return self._handled(node, handler, operands, opsets, used)
            except Unsupported as error:
                reason = error
                del self.builder.nodes[marks:]
        function = self._function(node, operands, opsets) if depth < _DEEPEST else None
        if function is None:
            return self._elsewhere(node, operands, opsets, reason)
        asked = self.wanted - wanted
        self.wanted -= asked
        before = len(self.unsupported)
        results = self._inlined(node, function, operands, opsets, used, depth)
        if len(self.unsupported) > before and handler is not None:
            del self.unsupported[before:], self.builder.nodes[marks:]
            self.wanted |= asked
            return self._elsewhere(node, operands, opsets, reason)
        return results

    def _elsewhere(self, node: onnx.NodeProto, operands: Sequence[Any], opsets: Mapping[str, int], reason: Unsupported) -> Sequence[Known | None]:
        if node.domain not in DEFAULT_DOMAIN or (node.domain, node.op_type) in self.functions:
            raise reason
        with self._at(node):
            try:
                return elsewhere(self.builder, node, operands, opset_number(opsets), str(reason), self.materialise)
            except DependsOnData:
                if isinstance(reason, Unspecialised):  # or, with that value, the shapes are known
                    raise reason from None
                raise

    def _controlled(
        self, node: onnx.NodeProto, operands: Sequence[Any], environment: Environment, opsets: Mapping[str, int], depth: int
    ) -> Sequence[Any]:
        """Results of control flow: of the nodes that it runs, if these are known and all are supported, else of the tail."""
        wanted, before, marks, inlined = frozenset(self.wanted), len(self.unsupported), len(self.builder.nodes), self.inlined.nodes
        # of an operator that ONNX defines by a function the tail has the operator itself
        tail = self.tail if opset_number(opsets) == self.opset and not self.inlined.standard else None
        collected = tail.mark() if tail is not None else ()
        self.inlined.within += 1
        try:
            results = control(self, node, operands, environment, opsets, depth)
            if len(self.unsupported) == before or tail is None:
                return results
            reason = Unsupported(f"it runs a node that is not supported: {self.unsupported[before].reason}")
        except Unsupported as error:
            if tail is None or isinstance(error, Unspecialised) and self.examples is None:
                raise
            reason = error
        finally:
            self.inlined.within -= 1
        if self.wanted != wanted:  # they are read again
            return [_MISSING] * len(node.output)
        found = self.unsupported[before:]
        del self.unsupported[before:], self.builder.nodes[marks:]
        tail.undo(collected)
        if not self.inlined.within:  # or what is around this node, of which there are too many iterations, is for the tail, too
            self.inlined.nodes = inlined
        try:
            return self._later(node, environment, opsets, reason)
        except Unsupported as error:
            self.unsupported += found  # they say more
            if found:
                return [_MISSING] * len(node.output)
            raise reason from error

    def _later(self, node: onnx.NodeProto, environment: Environment, opsets: Mapping[str, int], reason: Unsupported | None) -> Sequence[Any]:
        """The results of a node of the model's tail, which begins with it for a `reason`."""
        if self.tail is None:
            raise reason or Unsupported("it reads a tensor whose shape depends on data")
        read = {name: environment.get(name, _MISSING) for name in read_by(node)}
        if any(operand is _MISSING for operand in read.values()):
            return [_MISSING] * len(node.output)
        with self._at(node):
            read |= zip(node.input, widened(self.builder, node, [read[name] for name in node.input], opset_number(opsets)), strict=True)
        place = printable(node.name) or f"the {node.op_type} of {label(node)}"
        begins = None if reason is None else UnsupportedNode(label(node), PREFIX + node.op_type, place, str(reason))
        return self.tail.add(node, read, opset_number(opsets), begins)

    def _at(self, node: onnx.NodeProto) -> AbstractContextManager[None]:
        return self.builder.at(node.name or f"{node.op_type}_{label(node)}", printable(node.name) or f"the {node.op_type} of {label(node)}")

    def _handled(
        self, node: onnx.NodeProto, handler: NodeHandler, operands: Sequence[Any], opsets: Mapping[str, int], used: Sequence[bool]
    ) -> Sequence[Known | None]:
        if node.op_type not in ("Shape", "Size") and not (node.op_type == "CastLike" and isinstance(operands[0], np.ndarray)):
            self._check_types(operands)
        opset = opset_number(opsets)
        call = NodeCall(self.builder, node.op_type, opset, operands, attributes_of(node), used, self.materialise, self.specialise)
        with self._at(node):
            results = handler(call)
        unread = [name for name in sorted(set(call.attributes) - call.read) if not is_neutral(node.op_type, opset, name, call.attributes[name])]
        if unread:
            raise Unsupported(f"the attribute {', '.join(unread)}")
        listed = results if isinstance(results, tuple) else (results,)
        if len(listed) < len(used) and any(used[len(listed) :]):
            raise Unsupported(f"output {len(listed)} of {node.op_type}")
        self._check_types(listed)
        origins = self._origins(operands)
        self.origins.update((v.name, origins) for v in listed if isinstance(v, Value) and v.name not in self.origins)
        return listed

    def _origins(self, operands: Iterable[Any]) -> Set[str]:
        """The inputs from which a node's results are computed, if all of them may be specialised: integers, truth values and a few numbers."""
        found: set[str] = set()
        for operand in operands:
            if isinstance(operand, Value) and operand.name not in self.builder.constants:
                origins = self._origins_of(operand)
                if not origins or (is_float(operand.dtype) and operand.elements > _LARGEST_SCALE):
                    return set()
                found |= origins
        return found if len(found) <= _MOST_ORIGINS else set()

    def _origins_of(self, value: Value) -> Set[str]:
        if self.around is not None and value.name in self.around[1]:
            return self.around[0]._origins_of(self.around[1][value.name])
        return self.origins.get(value.name, set())

    def specialise(self, operand: Value, what: str) -> Unsupported:
        """Asks for another reading in which this operand is known; returns why it is not in this one."""
        origins = self._origins_of(operand)
        if not origins:
            return Unsupported(f"{what} is computed from the model's inputs, not constant")
        names = ", ".join(sorted(origins))
        if self.examples is None:
            return Unspecialised(f"{what} depends on the values of the input {names}: pass example_inputs, and their values are taken")
        if any(self.by_name[name].is_meta for name in origins):
            return Unspecialised(f"{what} depends on the values of the input {names}: compile the model for one set of sizes, with example inputs")
        self.wanted |= origins
        return Unspecialised(f"{what} depends on the values of the input {names}")

    def specialise_flag(self, operand: Value, what: str) -> Unsupported:
        """As `specialise`, for a condition, on which no shape need depend: only inputs of a few integers or truth values are specialised, since
        ONNX's runtimes run what data decide."""
        given = [self.given[name] for name in self._origins_of(operand)]
        if all(len(value.shape) <= 1 and value.elements <= _LARGEST_FLAG and not is_float(value.dtype) for value in given):
            return self.specialise(operand, what)
        return Unsupported(f"{what} is computed from the model's inputs, not constant")

    def _check_types(self, operands: Iterable[Any]) -> None:
        bad = sorted({v.dtype for v in operands if isinstance(v, Value)} - COMPUTED)
        if bad:
            raise Unsupported(f"it computes with {', '.join(bad)}")

    # --- bodies -------------------------------------------------------------------------------------------------------

    def results_of(self, graph: onnx.GraphProto, environment: Environment, opsets: Mapping[str, int], depth: int) -> list[Any]:
        """The outputs of a subgraph whose inputs are in the environment."""
        self._initializers(graph, environment)
        self._nodes(graph.node, environment, opsets, {output.name for output in graph.output}, depth)
        return [environment[output.name] for output in graph.output]

    def inside(self, builder: GraphBuilder, outer: Mapping[str, Value]) -> _Importer:
        """The importer of a body that becomes a graph of its own; `outer` maps its inputs to the values around it that they stand for."""
        body = copy.copy(self)
        body.builder, body.arrays, body.parameters = builder, {}, []
        body.origins, body.around, body.tail = {}, (self, outer), None
        return body

    @property
    def in_body(self) -> bool:
        """Whether this is the importer of a body that becomes a graph of its own."""
        return self.around is not None

    def attempted(self, make: Callable[[], Made]) -> Made | None:
        """What `make` returns; None if what it reads is not all supported, or only with more inputs specialised, and then nothing is read."""
        wanted, before, marks, inlined = frozenset(self.wanted), len(self.unsupported), len(self.builder.nodes), self.inlined.nodes
        try:
            made = make()
            if len(self.unsupported) == before and self.wanted == wanted:
                return made
        except Unsupported:
            pass
        del self.unsupported[before:], self.builder.nodes[marks:]
        self.wanted &= wanted
        self.inlined.nodes = inlined
        return None

    def count_inlined(self, nodes: int, finite: bool) -> None:
        """Counts the nodes of a function's body or of iterations. If they are too many, raises Unsupported within control flow that is `finite`, so
        that ONNX's runtimes may run it, and otherwise InvalidModel."""
        self.inlined.nodes += nodes
        if self.inlined.nodes > _MOST_INLINED:
            cause = f"the functions and loops of the model are more than {_MOST_INLINED:,} nodes, all calls and iterations together"
            if finite and self.inlined.within:
                raise Unsupported(cause)
            raise InvalidModel(cause, "export it without functions and with shorter loops")

    def _function(self, node: onnx.NodeProto, operands: Sequence[Any] | None, opsets: Mapping[str, int]) -> onnx.FunctionProto | None:
        """The function that defines an operator: one of the model, or of the ONNX standard. With `operands` None, only whether one may exist."""
        own = self.functions.get((node.domain, node.op_type))
        if own is not None or node.domain not in DEFAULT_DOMAIN:
            return own
        return standard_function(node, operands, opset_number(opsets))

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
            schema = onnx.defs.get_schema(node.op_type, opset_number(opsets), "")
            defaults = {name: a.default_value for name, a in schema.attributes.items() if a.default_value.type}
            given = {**defaults, **given}
        inner: Environment = {"": None}
        inner.update(zip(function.input, [*operands, *[None] * (len(function.input) - len(operands))], strict=True))
        own = {entry.domain: entry.version for entry in function.opset_import}
        self.count_inlined(len(function.node), finite=True)
        wanted = {name for name, use in zip(function.output, used, strict=False) if use}
        place = label(node)
        is_standard = (node.domain, node.op_type) not in self.functions
        self.inlined.standard += is_standard
        self._nodes([bound(n, given, place) for n in function.node], inner, own or opsets, wanted, depth + 1)
        self.inlined.standard -= is_standard
        return [inner.get(name) for name in function.output]

    # --- outputs ------------------------------------------------------------------------------------------------------

    def _outputs(self, results: Sequence[Any], leaves: Sequence[int | None], literals: Sequence[torch.Tensor | None]) -> Imported:
        values: list[Value] = []
        outputs: list[Output] = []
        later = [*dict.fromkeys(result for result in results if isinstance(result, Later))]

        def position(value: Value) -> int:
            if value.name in self.builder.inputs or value.name in self.builder.constants:
                with self.builder.at(f"{value.name}_copy", ""):
                    value = self.builder.op("copy", value)
            if value not in values:
                values.append(value)
            return values.index(value)

        for result in results:
            if result is None:
                raise InvalidModel("an output of the model is not computed", "export the model again")
            if isinstance(result, Later):
                outputs.append(Output("tail", later.index(result)))
                continue
            try:
                value = result if isinstance(result, Value) else self.materialise(result)
            except Unsupported as error:
                raise UnsupportedOperator(f"an output of the model is {error}", "convert it to a supported type") from error
            outputs.append(Output("value", position(value)))
        try:
            tail = self.tail.finish(later, position) if self.tail is not None else None
        except Unsupported as error:
            raise UnsupportedOperator(str(error), "end the model before that result, and run the rest elsewhere") from error
        _, in_spec = pytree.tree_flatten((tuple(range(len(leaves))), {}))
        _, out_spec = pytree.tree_flatten(0 if len(outputs) == 1 else tuple(range(len(outputs))))
        return Imported(
            self.builder.finish(values),
            in_spec,
            out_spec,
            tuple(leaves),
            tuple(literals),
            tuple(outputs),
            parameters=tuple(self.parameters),
            tail=tail,
        )
