"""Functional exported programs become an `Imported`.

Each ATen operator goes through a handler (`aten_*.py`) that adds nodes of the operator table. An operator without a handler, or with a type in which
kernels do not compute, becomes a node that runs through PyTorch.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from tilewright.errors import InvalidArtifact, InvalidModel, UnsupportedOperator, contained
from tilewright.frontend.copies import Copies
from tilewright.frontend.functional import STATEMENTS, out_of_place, written
from tilewright.frontend.handlers import Handler, Unsupported
from tilewright.frontend.imported import Imported, Parameter, State
from tilewright.frontend.places import described, names_of, place_of
from tilewright.frontend.reading import printable, reading
from tilewright.frontend.sizes import NO_SIZES, Sizes, is_symbolic
from tilewright.frontend.tensor_memory import is_nowhere, location_of
from tilewright.frontend.torch_call import bound, call_recipe
from tilewright.frontend.torch_export import FILE, HANDLERS, exported, functional, tensors_of
from tilewright.frontend.torch_indices import checked_arguments
from tilewright.frontend.torch_operators import permitted_operator
from tilewright.frontend.torch_outputs import OutputReader
from tilewright.frontend.torch_strides import STRIDED, fixed, read_by
from tilewright.graph.builder import GraphBuilder
from tilewright.ir.dtypes import BY_TORCH_NAME, COMPUTED, of_torch
from tilewright.ir.graph import Value

FUNCTIONALIZED = (torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2)
"""What PyTorch makes of operators of packages and users that change an argument: functions of such an operator, their first argument."""
CHANGES = "replace it by operations that do not"


def import_module(
    module: torch.nn.Module,
    example_inputs: Sequence[Any],
    example_keywords: Mapping[str, Any] | None = None,
    copies: Copies | None = None,
    on_gpu: bool = False,
) -> Imported:
    """Exports a module, called as module(*example_inputs, **example_keywords), and reads it. Sizes are those of the example inputs. Operators on
    tensors of types on which no kernel computes become nodes that run through PyTorch. `copies` are those of earlier readings; `on_gpu` says where
    the model is to run, for its autocast regions.

    Raises InvalidModel if the module cannot be exported (for example because its control flow depends on tensor values)."""
    return import_exported(exported(module, example_inputs, example_keywords, on_gpu=on_gpu), tensors_of(module), copies, on_gpu)


def import_exported(
    program: ExportedProgram, sources: Mapping[str, torch.Tensor] | None = None, copies: Copies | None = None, on_gpu: bool = False
) -> Imported:
    """Reads an exported program. `sources` are the module's live parameters and buffers by name, watched for changes; `copies` those of earlier
    readings; `on_gpu` is as for `functional`.

    Raises InvalidModel for symbolic sizes, and UnsupportedOperator for quantised tensors."""
    return import_functional(functional(program, on_gpu), sources, copies=copies)


def import_functional(
    program: ExportedProgram,
    sources: Mapping[str, torch.Tensor] | None = None,
    sizes: Sizes = NO_SIZES,
    held: dict[str, torch.Tensor] | None = None,
    copies: Copies | None = None,
) -> Imported:
    """Reads a functional program, its symbolic sizes bound to numbers. `held` collects copies of the parameters by name, which further readings of
    the same program then share, whatever became of the parameters; `copies` are those of other programs, shared where the values are the same.

    Raises InvalidModel for a symbolic size that has no number, and UnsupportedOperator for complex or quantised tensors."""
    file = program.graph_module.meta.get(FILE)
    with reading(file, "export the module again with this PyTorch release") if file else nullcontext():
        return _Importer(program, sources or {}, sizes, {} if held is None else held, copies or Copies(), file).run()


def _held(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A copy of a parameter, buffer or constant. Raises InvalidModel if it has no memory to copy."""
    if is_nowhere(tensor):
        raise InvalidModel(
            f"{printable(name)}, a {type(tensor).__name__} of shape {list(tensor.shape)}, has no memory that holds its elements",
            "give a module of plain tensors, and compile it outside of modes that make others",
        )
    return tensor


class _Importer:
    """State of importing one exported program."""

    def __init__(
        self,
        program: ExportedProgram,
        sources: Mapping[str, torch.Tensor],
        sizes: Sizes,
        held: dict[str, torch.Tensor],
        copies: Copies,
        file: str | None = None,
    ) -> None:
        self.program = program
        self.names = names_of(program.graph)
        self.sizes = sizes
        self.held = held
        self.copies = copies
        self.file = file
        self.sources = sources
        self.builder = GraphBuilder()
        self.environment: dict[torch.fx.Node, Any] = {}
        self.parameters: list[Parameter] = []
        self.leaves: list[int | None] = []
        self.literals: list[Any] = []
        self.leaf_of: dict[torch.fx.Node, int] = {}
        self.state_inputs: dict[str, int] = {}
        self.named: dict[torch.fx.Node, str] = {}
        self.strides: dict[int, tuple[tuple[int, ...], int | None]] = {}

    def run(self) -> Imported:
        placeholders = [n for n in self.program.graph.nodes if n.op == "placeholder"]
        self._inputs(placeholders)
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                result = self._call(node)
                place: torch.fx.Node | None = node
                while place is not None:  # what is written in place, and what that was written in place of
                    self.environment[place] = result
                    place = written(place)
            elif node.op == "get_attr":
                raise UnsupportedOperator(f"the program holds a sub-program ({node.target})", "replace torch.cond and similar control flow")
        return self._outputs()

    # --- inputs -------------------------------------------------------------------------------------------------------

    def _inputs(self, placeholders: Sequence[torch.fx.Node]) -> None:
        signature = self.program.graph_signature
        mutated = set(signature.buffers_to_mutate.values())
        known: dict[Any, Value] = {}
        buffers: list[tuple[torch.fx.Node, str]] = []
        for node, spec in zip(placeholders, signature.input_specs, strict=True):
            if spec.kind == InputKind.USER_INPUT:
                self._user_input(node)
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
                name = str(spec.target)
                self.named[node] = name
                if name in mutated:
                    buffers.append((node, name))
                elif node.users:
                    self.environment[node] = self._parameter(node, name, known)
            else:
                raise UnsupportedOperator(f"the program takes an input of kind {spec.kind.name.lower()}", "pass tensors and Python numbers")
        for node, name in buffers:  # buffers that change follow the user's inputs
            value = self.builder.input(node.name, *self._type_of(node.meta["val"], name))
            self.state_inputs[name] = len(self.builder.inputs) - 1
            self.environment[node] = value

    def _user_input(self, node: torch.fx.Node) -> None:
        leaf = len(self.leaves)
        example = node.meta.get("val")
        if isinstance(example, torch.Tensor):
            self.environment[node] = self.builder.input(node.name, *self._type_of(example, node.name))
            self.leaves.append(len(self.builder.inputs) - 1)
            self.leaf_of[node] = leaf
            self.literals.append(None)
        else:
            self.environment[node] = self.sizes.number(example, node.name) if is_symbolic(example) else example
            self.leaves.append(None)
            self.literals.append(self.environment[node])

    def _tensor(self, name: str) -> torch.Tensor:
        stored = self.program.state_dict.get(name)
        return _held(self.program.constants[name] if stored is None else stored, name)

    def _parameter(self, node: torch.fx.Node, name: str, known: dict[Any, Value]) -> Value:
        tensor = self._tensor(name)
        self._type_of(tensor, name)
        key = location_of(tensor) if tensor.numel() else name
        if key not in known:
            if name not in self.held:
                self.held[name] = _held(self.copies.of(tensor), name)
            known[key] = self.builder.constant(self.held[name], node.name)
        live = self.sources.get(name)
        self.parameters.append(Parameter(name, known[key].name, None if live is None else weakref.ref(live)))
        return known[key]

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _call(self, node: torch.fx.Node) -> Any:
        if node.target is operator.getitem:
            source, index = node.args
            return self.environment[source][index]  # type: ignore[index]
        if is_symbolic(node.meta.get("val")):
            return self.sizes.number(node.meta["val"], described(node))
        where = place_of(node) or "an unknown place"
        if node.target in FUNCTIONALIZED:
            raise UnsupportedOperator(f"{node.args[0]} at {where} was made functional before", "give the program as torch.export.export made it")
        if not isinstance(node.target, torch._ops.OpOverload):
            raise UnsupportedOperator(f"{node.target} at {where} is no operator of PyTorch", "replace it by tensor operations")
        called = out_of_place(node.target)
        if called is None:
            raise UnsupportedOperator(f"{node.target} at {where} changes its arguments", CHANGES)
        target = str(called).removeprefix("aten.")
        if target.startswith(STATEMENTS):
            return None
        if called in STRIDED:
            return self._strided(node)
        expected = self._expected(node)
        values = pytree.tree_map(lambda a: self.environment[a] if isinstance(a, torch.fx.Node) else a, (node.args, dict(node.kwargs)))
        handler = HANDLERS.get(target)
        place = place_of(node)
        with self.builder.at(self.names[node], place, [t for t in expected if t is not None]):
            reason = _uncomputed(values, expected) or (None if handler else "no definition in the operator table")
            if handler and not reason:
                marks = len(self.builder.nodes)
                subject = f"{target} at {place or 'an unknown place'}"
                handled = partial(_handled, handler, self.builder, bound(called, *values), expected)
                result, reason = contained(subject, "runs through PyTorch", handled, _lost)
                if reason is None:
                    return result
                del self.builder.nodes[marks:]
            return self._through_torch(node, called, values, reason or "")

    def _strided(self, node: torch.fx.Node) -> Value:
        read = read_by(node, self.sizes)
        self.strides.update(fixed(read.base, node, self.leaf_of, self.sizes))
        x, view = self.environment[read.base], read.affine
        with self.builder.at(self.names[node], place_of(node)):
            if x.dtype in COMPUTED and view is not None:
                rows = self.builder.reshape(self.builder.permute(x, view.order), view.shape)
                return self.builder.op("strided", rows, shape=read.wanted.shape, steps=view.steps, starts=view.starts)
            assert read.positions is not None
            index = self.builder.constant(read.positions, "positions")
            if x.dtype in COMPUTED:
                return self.builder.op("index_select", self.builder.reshape(x, (-1,)), index, axis=0)
            reason = _uncomputed(x, ())
            result: Value = self._through_torch(node, torch.ops.aten.take.default, ((x, index), {}), reason or "")
            return result

    def _through_torch(self, node: torch.fx.Node, called: torch._ops.OpOverload, values: Any, reason: str) -> Any:
        if self.file:
            try:
                permitted_operator(str(called))
            except InvalidArtifact as error:
                raise InvalidModel(f"{self.file}: {error.cause}", error.remedy) from error
        arguments, keywords = values
        with self.builder.at(f"{self.names[node]}_index", place_of(node)):
            arguments = checked_arguments(self.builder, str(called), arguments)
        inputs, call = call_recipe(arguments, keywords)
        attributes = {"target": str(called), "call": call, "reason": reason}
        # every tensor that PyTorch returns is a result, used or not, because callers address results by position
        value = node.meta.get("val")
        everything = list(value) if isinstance(value, (list, tuple)) else [value]
        types = [self._type_of(r, node.name) if isinstance(r, torch.Tensor) else None for r in everything]
        results = iter(self.builder.structural("torch", inputs, [t for t in types if t is not None], attributes))
        mapped = tuple(None if t is None else next(results) for t in types)
        return mapped if isinstance(value, (list, tuple)) else mapped[0] if mapped else None

    def _type_of(self, tensor: torch.Tensor, name: str) -> tuple[tuple[int, ...], str]:
        shape = self.sizes.shape(tensor, name)
        if str(tensor.dtype).removeprefix("torch.") not in BY_TORCH_NAME:
            raise UnsupportedOperator(f"{name} has the element type {tensor.dtype}", "use floating-point, complex, integer or boolean tensors")
        return shape, of_torch(tensor.dtype)

    def _expected(self, node: torch.fx.Node) -> list[tuple[tuple[int, ...], str] | None]:
        """(shape, dtype) of each tensor that a node returns; None for those that are never used."""
        value = node.meta.get("val")
        results = list(value) if isinstance(value, (list, tuple)) else [value]
        if isinstance(value, (list, tuple)):
            read = {user.args[1] for user in node.users if user.target is operator.getitem and user.users}
            results = [r if i in read else None for i, r in enumerate(results)]
        return [self._type_of(r, node.name) if isinstance(r, torch.Tensor) else None for r in results]

    # --- outputs ------------------------------------------------------------------------------------------------------

    def _outputs(self) -> Imported:
        results = OutputReader(self.program, self.environment, self.leaf_of, self.named, self.sizes, self.builder).read()
        in_spec, out_spec = self.program.call_spec.in_spec, self.program.call_spec.out_spec
        assert in_spec is not None and out_spec is not None
        return Imported(
            self.builder.finish(results.values),
            in_spec,
            out_spec,
            tuple(self.leaves),
            tuple(self.literals),
            tuple(results.outputs),
            tuple(results.mutations),
            tuple(self._state(name, output) for name, output in results.states),
            tuple(self.parameters),
            MappingProxyType(self.strides),
        )

    def _state(self, name: str, output: int) -> State:
        live = self.sources.get(name)
        initial = self._tensor(name).detach().cpu().clone()
        return State(name, self.state_inputs[name], output, None if live is None else weakref.ref(live), initial)


def _handled(handler: Handler, builder: GraphBuilder, arguments: Sequence[Any], expected: Sequence[Any]) -> tuple[Any, str | None]:
    """A handler's result for a node, or the reason why it has none."""
    try:
        result = handler(builder, *arguments)
    except (Unsupported, ValueError) as error:
        return None, str(error)
    return result, _mismatch(result, expected)


def _lost(why: str) -> tuple[Any, str | None]:
    return None, f"a fault inside Tilewright: {why}"


def _uncomputed(values: Any, expected: Sequence[tuple[tuple[int, ...], str] | None]) -> str | None:
    """The reason why a node's types rule out generated code, or None."""
    types = [leaf.dtype for leaf in pytree.tree_leaves(values) if isinstance(leaf, Value)] + [t[1] for t in expected if t is not None]
    bad = sorted(set(types) - COMPUTED)
    return f"computes with {', '.join(bad)}, which kernels do not" if bad else None


def _mismatch(result: Any, expected: Sequence[tuple[tuple[int, ...], str] | None]) -> str | None:
    """How a handler's result differs in type from PyTorch's, or None."""
    results = list(result) if isinstance(result, (list, tuple)) else [result]
    for wanted, value in zip(expected, results, strict=False):
        if wanted is not None and (not isinstance(value, Value) or (value.shape, value.dtype) != wanted):
            return f"the definition gives {value}, PyTorch {wanted[1]}{list(wanted[0])}"
    return None
