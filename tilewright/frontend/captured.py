"""Graphs that Dynamo captured become exported programs of ATen's operators, with the tensors that Dynamo found.

Dynamo describes the result of each call in its graph by a fake tensor, whose sizes may be symbolic. `torch.export` would compute all of them again,
which takes most of its time. Here each call is made once, and a mode records the operators that it dispatches to, where `torch.export` records them:
above autograd, so that convolutions or attention are not decomposed. Most calls are of functions in C++ that call one operator and return its result:
that operator's result is the tensor that Dynamo found for the call, and is not computed. Where a call turns out to do more, it is made again, and its
operators compute fake tensors, as they do in calls of functions in Python.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._export.verifier import TrainingIRVerifier
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymIntArgument,
    TensorArgument,
)
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, PythonKeyTracer
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from tilewright.frontend.functional import TRACED
from tilewright.frontend.sizes import NO_SIZES, NUMBER, is_symbolic

LOG = logging.getLogger(__name__)

DYNAMIC = torch.export.Dim.DYNAMIC
_DETACH = torch.ops.aten.detach_.default
"""The one operator that PyTorch counts among those that change a tensor's shape in place and that changes nothing of it."""
_INDEXING = (operator.getitem, operator.setitem)
_ENTER, _EXIT = _REGION = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
_STATES = ("torch._functorch", "torch._C._functorch", "torch.autograd")
"""How the modules of functions begin that change PyTorch's state."""


class Fraction:
    """Stands for a tensor in which Dynamo passes a Python float."""

    def __init__(self, value: float) -> None:
        self.value = value

    def item(self) -> float:
        return self.value


class CapturedModule(torch.nn.Module):
    """A graph that Dynamo captured, called with the inputs at `positions` alone: those at the positions of `bound` are parameters and buffers, called
    `prefix` and a number, those of `fractions` Python floats, and those of `derived` are sizes, each of a dimension of the tensor at a position."""

    def __init__(
        self,
        graph_module: torch.fx.GraphModule,
        bound: Mapping[int, torch.Tensor],
        positions: Sequence[int],
        fractions: Mapping[int, float],
        derived: Mapping[int, tuple[int, int]],
        prefix: str,
    ) -> None:
        super().__init__()
        self.graph_module, self.positions, self.derived = graph_module, tuple(positions), derived
        self.fractions = {i: Fraction(value) for i, value in fractions.items()}
        self.names: dict[int, str] = {}
        for number, (position, tensor) in enumerate(bound.items()):  # Dynamo puts free sizes before them: positions differ between graphs
            self.names[position] = f"{prefix}{number}"
            if isinstance(tensor, torch.nn.Parameter):
                self.register_parameter(self.names[position], tensor)
            else:
                self.register_buffer(self.names[position], tensor)

    def forward(self, *inputs: Any) -> Any:
        given: dict[int, Any] = {**self.fractions, **dict(zip(self.positions, inputs, strict=True))}
        given.update({i: getattr(self, name) for i, name in self.names.items()})
        given.update({i: given[tensor].shape[dim] for i, (tensor, dim) in self.derived.items()})
        arguments = [given.get(i) for i, _ in enumerate(self.placeholders())]
        with torch.fx.traceback.preserve_node_meta():  # places in the user's model
            return _Interpreter(self.graph_module).run(*arguments)

    def placeholders(self) -> list[torch.fx.Node]:
        return [node for node in self.graph_module.graph.nodes if node.op == "placeholder"]


class _Interpreter(torch.fx.Interpreter):
    """Runs a captured graph within its autocast regions. PyTorch would record them in a trace, but not enter them: tensors would have other types
    there."""

    def __init__(self, graph_module: torch.fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.regions: list[torch.autocast] = []

    def run(self, *arguments: Any, **keywords: Any) -> Any:
        try:
            return super().run(*arguments, **keywords)
        finally:
            while self.regions:
                self._leave()

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is _EXIT:
            return self._leave()
        if target is not _ENTER:
            return super().call_function(target, args, kwargs)
        self.regions.append(torch.autocast(*args))
        return self.regions[-1].__enter__()

    def _leave(self) -> None:
        self.regions.pop().__exit__(None, None, None)


def captured_program(module: CapturedModule, inputs: Sequence[Any], free: Mapping[int, Any]) -> ExportedProgram | None:
    """The program of a captured graph, called with these inputs; None if only `torch.export` can tell what it is: if the sizes that are `free`, given
    as for `exported`, are not those that Dynamo took for symbolic, or if the graph does what is not recorded, such as to change the shape of a tensor
    in place, or to call a part of itself."""
    found = [node.meta.get("example_value") for node in module.placeholders()]
    symbolic = {leaf: dims for leaf, position in enumerate(module.positions) if (dims := _symbolic_dims(found[position]))}
    if {leaf: dict(_hints(dims)) for leaf, dims in free.items()} != {leaf: dict.fromkeys(dims, DYNAMIC) for leaf, dims in symbolic.items()}:
        return None
    given = [(getattr(module, name), found[position]) for position, name in module.names.items()]
    given += [(inputs[leaf], found[position]) for leaf, position in enumerate(module.positions) if leaf not in free]
    if not all(_described(mine) == _described(value) for mine, value in given) or any(map(_switches, module.graph_module.graph.nodes)):
        return None
    try:
        return _Reader(module, found).program()
    except Exception as error:  # of PyTorch's, for what it can trace but not record
        LOG.debug("a graph of Dynamo is exported: %s: %s", type(error).__name__, error)
        return None


def _switches(node: torch.fx.Node) -> bool:
    """Whether a call changes a state of PyTorch's in which operators are others than the graph shows: it enters an autocast region, a level of
    `torch.func`, or inference mode. Regions without autocast, which only end that of a caller, are none of these; there is none to end."""
    if node.target is _REGION[0]:
        return bool(node.args[2])
    return node.op == "call_function" and (getattr(node.target, "__module__", None) or "").startswith(_STATES)


def _hints(dims: Any) -> Any:
    return dims if isinstance(dims, dict) else {NUMBER: dims}


def _symbolic_dims(value: Any) -> list[int]:
    """The symbolic dimensions of a tensor; `NUMBER` for a symbolic number."""
    sizes: Any = enumerate(value.shape) if isinstance(value, torch.Tensor) else [(NUMBER, value)]
    return [dim for dim, size in sizes if is_symbolic(size) and size.node.expr.free_symbols]


def _described(value: Any) -> Any:
    """Type, shape and strides of a tensor, symbolic ones by their expressions, since to compare their symbols would make conditions of them."""
    if not isinstance(value, torch.Tensor):
        return type(value), value
    numbers = (number.node.expr if is_symbolic(number) else number for number in (*value.shape, *value.stride()))
    return value.dtype, value.device, value.dim(), *numbers


class _Unrecorded(Exception):
    """What a graph does cannot be recorded."""


class _Several(Exception):
    """A call has more than one operator."""


class _Recorder(ProxyTorchDispatchMode):
    """Passes each operator that is called to `record`."""

    def __init__(self, record: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__(PythonKeyTracer(), "symbolic", pre_dispatch=True)
        self.record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.record(func, args, kwargs or {})

    def __sym_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


class _Reader:
    """State of reading one graph."""

    def __init__(self, module: CapturedModule, found: Sequence[Any]) -> None:
        self.module, self.found = module, found
        self.graph = torch.fx.Graph()
        self.nodes: dict[int, torch.fx.Node] = {}
        """The latest node of each tensor, by its identity."""
        self.tensors: list[torch.Tensor] = []
        """All of them, none of which may be freed, since another one could then have its identity."""
        self.numbers: dict[Any, torch.fx.Node] = {}
        """The nodes of symbolic numbers, by their expressions."""
        self.computed: dict[Any, Callable[[], torch.fx.Node]] = {}
        """How to make the nodes of those that a call computed."""
        self.constants: dict[str, torch.Tensor] = {}
        self.last: torch.fx.Node | None = None
        """The last placeholder that is no input."""
        self.place: dict[str, Any] = {}
        """Where the call in progress is in the user's model."""
        self.given: Any = None
        """Dynamo's result of the call in progress, for its first operator; None if operators compute their results."""
        self.only: tuple[Any, Any, Any, Any] | None = None
        """That operator, its arguments and its result."""
        self.writes = False
        """Whether an operator of the call in progress wrote to memory."""
        self.mode = next(value.fake_mode for value in found if isinstance(value, FakeTensor))
        self.symbols: Any = self.mode.shape_env

    def program(self) -> ExportedProgram:
        inputs = self._placeholders()
        environment = dict(zip(self.module.placeholders(), self._arguments(), strict=True))
        with _recording_guards(self.symbols), enable_python_dispatcher(), _Recorder(self._record):
            for node in self.module.graph_module.graph.nodes:
                if node.target in _REGION:
                    continue
                if node.op in ("call_function", "call_method"):
                    environment[node] = self._call(node, environment)
                elif node.op == "output":
                    returned = torch.fx.map_arg(node.args[0], environment.__getitem__)
                elif node.op != "placeholder":
                    raise _Unrecorded(f"the graph has a node {node.op}")
        self.place = {}
        leaves, out_spec = pytree.tree_flatten(returned)
        results = [self._argument(leaf) for leaf in leaves]
        self.graph.output(tuple(results))
        outputs = [OutputSpec(OutputKind.USER_OUTPUT, _argument_spec(result), None) for result in results]
        constants = [InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(f"c_{name}"), name) for name in self.constants]
        first = next((i for i, spec in enumerate(inputs) if spec.kind == InputKind.USER_INPUT), len(inputs))
        given = [None] * len(self.module.positions)
        in_spec = pytree.tree_flatten((tuple(given), {}))[1]
        symbols = {symbol for value in self.found for size in _sizes(value) for symbol in size.node.expr.free_symbols}
        program = ExportedProgram(
            root=torch.nn.Module(),
            graph=self.graph,
            graph_signature=ExportGraphSignature([*inputs[:first], *constants, *inputs[first:]], outputs),
            state_dict=dict(self.module.state_dict(keep_vars=True)),
            range_constraints={symbol: self.symbols.var_to_range[symbol] for symbol in symbols},
            module_call_graph=[ModuleCallEntry("", ModuleCallSignature([], [], in_spec, out_spec))],
            constants=dict(self.constants),
            verifiers=[TrainingIRVerifier],
        )
        program.graph_module.meta[TRACED] = True
        return program

    def _placeholders(self) -> list[InputSpec]:
        """Makes the placeholders: parameters, buffers and inputs, as an export does."""
        specs = []
        positions = {name: position for position, name in self.module.names.items()}
        parameters = [name for name, _ in self.module.named_parameters()]
        buffers = [name for name, _ in self.module.named_buffers()]
        for kind, prefix, names in ((InputKind.PARAMETER, "p", parameters), (InputKind.BUFFER, "b", buffers)):
            for name in names:
                self.last = self._placeholder(f"{prefix}_{name}", self.found[positions[name]])
                specs.append(InputSpec(kind, TensorArgument(self.last.name), name, True if kind == InputKind.BUFFER else None))
        for leaf, position in enumerate(self.module.positions):
            node = self._placeholder(f"inputs_{leaf}", self.found[position])
            specs.append(InputSpec(InputKind.USER_INPUT, _argument_spec(node), None))
        return specs

    def _placeholder(self, name: str, value: Any) -> torch.fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        if isinstance(value, torch.Tensor):
            self._hold(value, node)
        elif is_symbolic(value):
            self.numbers[value.node.expr] = node
        return node

    def _arguments(self) -> list[Any]:
        """What the captured graph is called with."""
        return [self.module.fractions.get(position, value) for position, value in enumerate(self.found)]

    # --- calls --------------------------------------------------------------------------------------------------------

    def _call(self, node: torch.fx.Node, environment: Mapping[torch.fx.Node, Any]) -> Any:
        """The result of a call of the captured graph, of which the operators are recorded."""
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), environment.__getitem__)
        function: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
        call = partial(function, *(args[1:] if node.op == "call_method" else args), **kwargs)
        expected = node.meta.get("example_value")
        tensors = _tensors(expected)
        self.place = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
        if tensors and _is_binding(node):
            self.given, self.only = expected, None
            try:
                result = call()
            except _Several:
                result = None
            self.given = None
            if self.only is None and result is not None:
                return result  # an argument, or a part of one
            if self.only is not None and _same(_tensors(result), _tensors(self.only[-1])):
                self._add(*self.only)
                return result
        self.writes, before = False, len(self.tensors)
        result = call()
        if tensors:
            self._rename(_tensors(result), tensors, self.tensors[before:])
            return expected
        if is_symbolic(result) and node.op == "call_function" and function not in _INDEXING:
            self.computed.setdefault(result.node.expr, partial(self._node, function, args, kwargs, result))
        return result

    def _record(self, function: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator."""
        if not isinstance(function, torch._ops.OpOverload) or torch.Tag.inplace_view in function.tags and function is not _DETACH:
            raise _Unrecorded(f"{function} is called")
        if not _has_tensors(function):
            return self._computed(function, args, kwargs)
        if self.given is None:
            result = self._computed(function, args, kwargs)
            self._add(function, args, kwargs, result)
            return result
        if self.only is not None:
            raise _Several
        self.only = function, args, kwargs, args[0] if function._schema.is_mutable else self.given
        return self.only[-1]

    def _computed(self, function: Any, args: Any, kwargs: Any) -> Any:
        with self.mode:
            return function(*args, **kwargs)

    def _add(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Adds an operator to the program."""
        self.writes = self.writes or (function._schema.is_mutable and function is not _DETACH)
        if function is torch.ops.aten.lift_fresh.default and not isinstance(args[0], FakeTensor):
            function, args = torch.ops.aten.lift_fresh_copy.default, (self._constant(args[0]),)
        self._found(self._node(function, args, kwargs, result), result)

    def _found(self, node: torch.fx.Node, result: Any) -> None:
        if isinstance(result, (list, tuple)):
            for number, part in enumerate(result):
                self._found(self._node(operator.getitem, (node, number), {}, part), part)
        elif isinstance(result, FakeTensor):
            self._hold(result, node)
        elif result is not None:
            raise _Unrecorded(f"{node.target} returns a {type(result).__name__}")

    def _node(self, function: Any, args: Any, kwargs: Any, value: Any) -> torch.fx.Node:
        given, named = map_aggregate(args, self._argument), map_aggregate(kwargs, self._argument)
        name = self.graph._target_to_str(getattr(function, "overloadpacket", function).__name__)
        node = self.graph.create_node("call_function", function, given, named, name=name)
        node.meta = {**self.place, "val": value}
        return node

    def _hold(self, tensor: torch.Tensor, node: torch.fx.Node) -> None:
        self.nodes[id(tensor)] = node
        self.tensors.append(tensor)

    def _constant(self, tensor: torch.Tensor) -> torch.fx.Node:
        """The placeholder of a tensor that the graph makes of numbers."""
        name = f"lifted_tensor_{len(self.constants)}"
        self.constants[name] = tensor
        with self.graph.inserting_after(self.last) if self.last else self.graph.inserting_before(None):
            self.last = self.graph.placeholder(f"c_{name}")
        self.last.meta["val"] = self.mode.from_tensor(tensor, static_shapes=True)
        return self.last

    def _rename(self, results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """Gives the nodes of what a call computed, and made, Dynamo's tensors, of which later ones may be views."""
        for mine, dynamos in zip(results, expected, strict=True):
            if mine is not dynamos:
                node = self.nodes.get(id(mine))
                if node is None or not any(mine is one for one in made) or self.writes or _described(mine) != _described(dynamos):
                    raise _Unrecorded("a call makes another tensor than Dynamo found")
                node.meta["val"] = dynamos
                self._hold(dynamos, node)

    # --- arguments ----------------------------------------------------------------------------------------------------

    def _argument(self, value: Any) -> Any:
        """An argument of an operator in the program: the node of a tensor or of a symbolic number."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self.nodes:
                raise _Unrecorded("an operator gets a tensor that no operator made")
            return self.nodes[id(value)]
        if not is_symbolic(value):
            return value
        expression = value.node.expr
        if not expression.free_symbols:
            return NO_SIZES.number(value, "a size")
        if expression not in self.numbers:
            self.numbers[expression] = self._size(value) or self._result(value)
        return self.numbers[expression]

    def _size(self, number: Any) -> torch.fx.Node | None:
        """The node of a size of a tensor, the first that has it."""
        for tensor in self.tensors:
            sizes: Sequence[Any] = tensor.shape
            for dim, size in enumerate(sizes):
                if is_symbolic(size) and size.node.expr == number.node.expr:
                    node = self.graph.call_function(torch.ops.aten.sym_size.int, (self.nodes[id(tensor)], dim))
                    node.meta = {**self.place, "val": number}
                    return node
        return None

    def _result(self, number: Any) -> torch.fx.Node:
        if number.node.expr not in self.computed:
            raise _Unrecorded(f"the origin of the number {number} is not known")
        return self.computed[number.node.expr]()


def _is_binding(node: torch.fx.Node) -> bool:
    """Whether a call is one of PyTorch's C++ functions other than indexing. What they do does not depend on the sizes that an operator's result has,
    as it may in Python, or where a slice of everything is left out."""
    if node.op == "call_method":
        return isinstance(getattr(torch.Tensor, str(node.target), None), MethodDescriptorType)
    return isinstance(node.target, BuiltinFunctionType) and node.target.__module__ != "builtins" and node.target not in _INDEXING


@cache
def _has_tensors(function: torch._ops.OpOverload) -> bool:
    """Whether an operator returns tensors or nothing, rather than numbers."""
    return not function._schema.returns or any("Tensor" in str(result.type) for result in function._schema.returns)


@contextmanager
def _recording_guards(environment: Any) -> Iterator[None]:
    """While it lasts, the environment of a graph's symbols records the conditions that operators require of them. Dynamo ended that when it had
    captured the graph."""
    frozen = environment.frozen if environment is not None else None
    if frozen:
        environment.frozen = False
    try:
        yield
    finally:
        if frozen:
            environment.frozen = True


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def _sizes(value: Any) -> list[Any]:
    """The symbolic numbers that are, or describe, an input."""
    return [size for size in (value.shape if isinstance(value, torch.Tensor) else (value,)) if is_symbolic(size)]


def _argument_spec(value: Any) -> Any:
    """How a signature describes an input or a result: a node, or a constant."""
    if not isinstance(value, torch.fx.Node):
        return ConstantArgument("", value)
    kind = TensorArgument if isinstance(value.meta["val"], torch.Tensor) else SymIntArgument if is_symbolic(value.meta["val"]) else None
    return ConstantArgument(value.name, value.meta["val"]) if kind is None else kind(value.name)
