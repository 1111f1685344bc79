"""PyTorch modules, exported programs and .pt2 files become an `Imported`.

The module is exported by `torch.export` as it is (training or evaluation mode) and only made functional, unless it can be read as it is
(`functional.py`): operators such as convolution, attention, LSTM and the norms are not decomposed. Each ATen operator then goes through a handler
(`aten_*.py`) that adds nodes of the operator table. An operator without a handler, or with a type in which kernels do not compute, becomes a node
that runs through PyTorch.
"""

from __future__ import annotations

import operator
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from tilewright.errors import InvalidArtifact, InvalidModel, UnsupportedOperator, contained
from tilewright.frontend import aten_neural, aten_pointwise, aten_recurrent, aten_reduction, aten_scatter, aten_shape
from tilewright.frontend.fan_out import FanOut
from tilewright.frontend.functional import STATEMENTS, is_readable, out_of_place, written
from tilewright.frontend.handlers import Handler, Unsupported, torch_dtype
from tilewright.frontend.imported import Imported, Output, Parameter, State
from tilewright.frontend.quiet import quiet_exporter
from tilewright.frontend.reading import printable, reading, said
from tilewright.frontend.sizes import NO_SIZES, Sizes, is_symbolic
from tilewright.frontend.tensor_memory import is_nowhere
from tilewright.frontend.torch_call import call_recipe
from tilewright.frontend.torch_indices import ALONG_A_DIMENSION, checked_arguments
from tilewright.frontend.torch_operators import VIEWS, permitted_operator, resolve_operator
from tilewright.graph.builder import GraphBuilder
from tilewright.ir.dtypes import BY_TORCH_NAME, COMPLEX, COMPUTED, of_torch
from tilewright.ir.graph import Value

HANDLERS: Mapping[str, Handler] = MappingProxyType(
    {
        target: handler
        for family in (aten_pointwise, aten_shape, aten_scatter, aten_reduction, aten_neural, aten_recurrent)
        for target, handler in family.HANDLERS.table.items()
    }
)

_FILE = "tilewright.file"
"""Key in a program's metadata for the file from which it was read."""
_TRACED = "tilewright.traced"
"""Key in a program's metadata that says that it was traced in this process."""


@cache
def _decompositions() -> Mapping[Any, Any]:
    """PyTorch's decompositions of the operators that have no handler. Not decomposed are operators whose decomposition would accept negative indices
    that the operator rejects, or has a scale in addition to a size, which PyTorch does not check."""

    def stays(name: str) -> bool:
        return name in HANDLERS or name.partition(".")[0] in ALONG_A_DIMENSION or name.endswith("_aa.vec")

    table = torch.export.default_decompositions()
    return MappingProxyType({op: how for op, how in table.items() if not stays(str(op).removeprefix("aten."))})


@contextmanager
def _replaced(module: Any, name: str, replacement_of: Callable[[Any], Any]) -> Iterator[None]:
    """While it lasts, the replacement of the module's function of this name, if there is one. For use within `quiet_exporter`, on one thread: another
    must not take the replacement for the original."""
    original = getattr(module, name, None)
    if original is None:
        yield
        return
    setattr(module, name, replacement_of(original))
    try:
        yield
    finally:
        setattr(module, name, original)


def _lstm_states_in_shape() -> AbstractContextManager[None]:
    """While exporting and decomposing, gives an LSTM's final states the shapes of its initial ones, as at run time.

    Up to release 2.11, PyTorch's decomposition, from which export takes the shapes, leaves an extra dimension of one.
    """

    def replacement_of(select: Any) -> Any:
        def selected(*arguments: Any) -> Any:
            layer = select(*arguments)

            def run(sequence: Any, states: Any, *rest: Any, **options: Any) -> Any:
                output, final = layer(sequence, states, *rest, **options)
                return output, tuple(after.reshape(before.shape) for before, after in zip(states, final, strict=True))

            return run

        return selected

    return _replaced(torch._decomp.decompositions, "select_one_layer_lstm_function", replacement_of)


def _exporting_here_alone() -> AbstractContextManager[None]:
    """While exporting, says so on this thread only. PyTorch's flag is global: calls of compiled graphs on other threads would annotate the trace, and
    modules there would leave their fast paths."""
    here = threading.get_ident()
    return _replaced(torch.compiler, "is_exporting", lambda original: lambda: threading.get_ident() == here and original())


def _operators_registered_once() -> AbstractContextManager[None]:
    """While decomposing, registers PyTorch's composite operators once rather than for each of some twenty namespaces, which takes a quarter of the
    time of reading a small module."""
    return _replaced(torch._export.utils, "_materialize_cpp_cia_ops", cache)


def import_module(
    module: torch.nn.Module,
    example_inputs: Sequence[Any],
    example_keywords: Mapping[str, Any] | None = None,
) -> Imported:
    """Exports a module, called as module(*example_inputs, **example_keywords), and reads it. Sizes are those of the example inputs. Operators on
    tensors of types on which no kernel computes become nodes that run through PyTorch.

    Raises InvalidModel if the module cannot be exported (for example because its control flow depends on tensor values)."""
    return import_exported(exported(module, example_inputs, example_keywords), tensors_of(module))


def exported(
    module: torch.nn.Module,
    example_inputs: Sequence[Any],
    example_keywords: Mapping[str, Any] | None = None,
    free: Mapping[int, Any] | None = None,
) -> ExportedProgram:
    """The program of a module, called as module(*example_inputs, **example_keywords).

    `free` says which sizes are symbolic: for leaves of (inputs, keywords) a `torch.export` dimension or hint for each such dimension of a tensor,
    or one for a Python number.

    Raises InvalidModel if the module cannot be exported, for example because its control flow depends on tensor values, or it allows only one value
    of a size that is to be symbolic."""
    try:
        with torch.no_grad(), quiet_exporter(), _lstm_states_in_shape(), _exporting_here_alone():
            arguments, keywords = _distinct((tuple(example_inputs), dict(example_keywords or {})))
            shapes = None
            if free:
                leaves, tree = pytree.tree_flatten((arguments, keywords))
                given = pytree.tree_unflatten([free.get(leaf) for leaf in range(len(leaves))], tree)
                shapes = by_parameter(module, *given)
            program = torch.export.export(module, arguments, keywords, dynamic_shapes=shapes, strict=False)
            program.graph_module.meta[_TRACED] = True
            return program
    except Exception as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        data_dependent = "DataDependent" in type(error).__name__ or "data-dependent" in str(error)
        remedy = (
            "remove control flow that depends on tensor values, or compile the parts of the module around it"
            if data_dependent
            else "check that the module runs with these example inputs"
        )
        if free and "marked" in str(error):
            why = " ".join(line.strip(" -") for line in first[1:3])
            raise InvalidModel(f"{type(module).__name__} cannot be exported with these sizes free: {why}", "leave that size out") from error
        raise InvalidModel(f"{type(module).__name__} cannot be exported: {first[0]}", remedy) from error


def by_parameter(module: torch.nn.Module, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call by the names of the module's parameters, as `torch.export` names them."""
    named: dict[str, Any] = torch.export.dynamic_shapes._combine_args(module, tuple(arguments), dict(keywords))
    return named


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's live parameters and buffers by all their names."""
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}


def _distinct(inputs: Any) -> Any:
    """The inputs with repeated tensors copied: a model must not be specialised to inputs that happen to be the same tensor."""
    seen: set[int] = set()

    def fresh(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or id(leaf) not in seen:
            seen.add(id(leaf))
            return leaf
        return leaf.clone()

    return pytree.tree_map(fresh, inputs)


def load_exported(path: str | Path) -> ExportedProgram:
    """The exported program in a .pt2 file, with no example inputs. Nothing in the file is run, imported or unpickled: the archive is read by
    `pt2_archive`, and PyTorch's deserialiser receives what `pt2_program` has checked and rebuilt.

    Raises InvalidModel, which names the file, if it is missing, truncated, damaged, not an exported program, or has pickled tensors;
    UnsupportedOperator for operators and containers that are not accepted from files."""
    from torch._export.serde import schema, serialize

    from tilewright.frontend import pt2_archive

    file = Path(path)
    if not file.is_file():
        raise InvalidModel(f"{file} is not a file", "give the path of a file written by torch.export.save")
    with reading(file, pt2_archive.AGAIN), quiet_exporter():
        archive = pt2_archive.read(file)
        program = serialize._dict_to_dataclass(schema.ExportedProgram, archive.program)
        exported = serialize.ExportedProgramDeserializer().deserialize(program, dict(archive.weights), dict(archive.constants))
        exported.graph_module.meta[_FILE] = str(file)
        return exported


def import_exported(program: ExportedProgram, sources: Mapping[str, torch.Tensor] | None = None) -> Imported:
    """Reads an exported program. `sources` are the module's live parameters and buffers by name, watched for changes.

    Raises InvalidModel for symbolic sizes, and UnsupportedOperator for quantised tensors."""
    return import_functional(functional(program), sources)


def functional(program: ExportedProgram) -> ExportedProgram:
    """The program without writes to tensors that others see, and with those operators decomposed that have no handler. Raises InvalidModel if PyTorch
    cannot."""
    if program.graph_module.meta.get(_TRACED) and is_readable(program, HANDLERS.keys()):
        return program
    file = program.graph_module.meta.get(_FILE)
    again = "export the module again with this PyTorch release"
    with reading(file, again) if file else nullcontext():
        try:
            with torch.no_grad(), quiet_exporter(), _lstm_states_in_shape(), _operators_registered_once(), FanOut() if file else nullcontext():
                result: ExportedProgram = program.run_decompositions(dict(_decompositions()))
        except Exception as error:
            raise InvalidModel(f"{file or 'the exported program'} cannot be made functional: {said(error)}", again) from error
    result.graph_module.meta[_FILE] = file
    return result


def import_functional(
    program: ExportedProgram,
    sources: Mapping[str, torch.Tensor] | None = None,
    sizes: Sizes = NO_SIZES,
    held: dict[str, torch.Tensor] | None = None,
) -> Imported:
    """Reads a functional program, its symbolic sizes bound to numbers. `held` collects copies of the parameters by name, which further readings of
    the same program then share.

    Raises InvalidModel for a symbolic size that has no number, and UnsupportedOperator for complex or quantised tensors."""
    file = program.graph_module.meta.get(_FILE)
    with reading(file, "export the module again with this PyTorch release") if file else nullcontext():
        return _Importer(program, sources or {}, sizes, {} if held is None else held, file).run()


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
        file: str | None = None,
    ) -> None:
        self.program = program
        self.sizes = sizes
        self.held = held
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
        self.views: dict[torch.fx.Node, tuple[torch.fx.Node, tuple[Any, ...]]] = {}
        self.pieces: dict[Any, list[tuple[torch.fx.Node, tuple[Any, ...]]]] = {}

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
        return self._outputs(next(n for n in self.program.graph.nodes if n.op == "output"))

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
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        if key not in known:
            if name not in self.held:
                self.held[name] = _held(tensor.detach().cpu().contiguous().clone(), name)
            known[key] = self.builder.constant(self.held[name], node.name)
        live = self.sources.get(name)
        self.parameters.append(Parameter(name, known[key].name, None if live is None else weakref.ref(live)))
        return known[key]

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _call(self, node: torch.fx.Node) -> Any:
        if node.target is operator.getitem:
            source, index = node.args
            if source in self.pieces:
                self.views[node] = self.pieces[source][index]  # type: ignore[index]
            return self.environment[source][index]  # type: ignore[index]
        if is_symbolic(node.meta.get("val")):
            return self.sizes.number(node.meta["val"], f"{node.target} at {place_of(node) or 'an unknown place'}")
        if not isinstance(node.target, torch._ops.OpOverload):
            raise UnsupportedOperator(f"{node.target} at {place_of(node)} is not an ATen operator", "replace it by tensor operations")
        called = out_of_place(node.target)
        if called is None:
            raise UnsupportedOperator(f"{node.target} at {place_of(node)} changes its arguments", "replace it by operations that do not")
        target = str(called).removeprefix("aten.")
        if target.startswith(STATEMENTS):
            return None
        expected = self._expected(node)
        values = pytree.tree_map(lambda a: self.environment[a] if isinstance(a, torch.fx.Node) else a, (node.args, dict(node.kwargs)))
        self._note_view(node, called, values)
        handler = HANDLERS.get(target)
        with self.builder.at(node.name, place_of(node), [t for t in expected if t is not None]):
            reason = _uncomputed(values, expected) or (None if handler else "no definition in the operator table")
            if handler and not reason:
                marks = len(self.builder.nodes)
                subject = f"{target} at {place_of(node) or 'an unknown place'}"
                handled = partial(_handled, handler, self.builder, _bound(called, *values), expected)
                result, reason = contained(subject, "runs through PyTorch", handled, _lost)
                if reason is None:
                    return result
                del self.builder.nodes[marks:]
            return self._through_torch(node, called, values, reason or "")

    def _note_view(self, node: torch.fx.Node, called: torch._ops.OpOverload, values: Any) -> None:
        """Notes how a node's result, or each of several, is a view of another node's."""
        source = node.args[0] if node.args else None
        if not isinstance(source, torch.fx.Node):
            return
        (_, *arguments), target = values[0], str(called).removeprefix("aten.")
        root, calls = self._view_of(source)
        if target in VIEWS and not any(isinstance(value, Value) for value in pytree.tree_leaves(arguments)):
            self.views[node] = (root, (*calls, (str(called), tuple(_plain(a) for a in arguments))))
        elif target in ("split.Tensor", "split_with_sizes.default", "unbind.int"):
            dim = _bound(called, *values)[-1]
            if target == "unbind.int":
                views: list[tuple[str, tuple[Any, ...]]] = [("aten.select.int", (dim, i)) for i in range(len(node.meta["val"]))]
            else:
                ends = list(accumulate(self.sizes.shape(piece, node.name)[dim] for piece in node.meta["val"]))
                views = [("aten.slice.Tensor", (dim, *between)) for between in pairwise([0, *ends])]
            self.pieces[node] = [(root, (*calls, view)) for view in views]

    def _view_of(self, node: torch.fx.Node) -> tuple[torch.fx.Node, tuple[Any, ...]]:
        """The node that holds the memory of a node's result, and the view calls in between."""
        return self.views.get(node, (node, ()))

    def _shared(self, results: Collection[torch.fx.Node]) -> dict[torch.fx.Node, tuple[Any, ...]]:
        """Of results of the program those that are views of a node's result, with the calls that make them, and share memory with another result.
        Those of inputs and parameters are not among them."""
        roots = {node: self._view_of(node)[0] for node in results if isinstance(self.environment[node], Value)}
        count = Counter(roots.values())
        several = {node: self._view_of(node)[1] for node, root in roots.items() if count[root] > 1 and root is not node and root.op != "placeholder"}
        return {node: calls for node, calls in several.items() if self._makes(node, roots[node], calls)}

    def _makes(self, node: torch.fx.Node, root: torch.fx.Node, calls: Sequence[Any]) -> bool:
        """Whether the calls make a node's result of the root's if that is row-major, as outputs of graphs are."""
        value, base = self.environment[node], self.environment[root]
        view = torch.empty(base.shape, dtype=torch_dtype(base.dtype), device="meta")
        try:
            for target, further in calls:
                view = resolve_operator(target)(view, *further)
        except RuntimeError:
            return False
        return bool(tuple(view.shape) == value.shape)

    def _through_torch(self, node: torch.fx.Node, called: torch._ops.OpOverload, values: Any, reason: str) -> Any:
        if self.file:
            try:
                permitted_operator(str(called))
            except InvalidArtifact as error:
                raise InvalidModel(f"{self.file}: {error.cause}", error.remedy) from error
        arguments, keywords = values
        with self.builder.at(f"{node.name}_index", place_of(node)):
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

    def _cloned(self, value: Value) -> Value:
        inputs, call = call_recipe((value,), {})
        attributes = {"target": "aten.clone.default", "call": call, "reason": f"copies {value.dtype}"}
        return self.builder.structural("torch", inputs, [(value.shape, value.dtype)], attributes)[0]

    # --- outputs ------------------------------------------------------------------------------------------------------

    def _outputs(self, node: torch.fx.Node) -> Imported:
        graph_outputs: list[Value] = []
        outputs: list[Output] = []
        mutations: list[tuple[int, int]] = []
        states: list[State] = []
        leaf_names = {n.name: leaf for n, leaf in self.leaf_of.items()}
        mutated_leaves = {
            leaf_names[str(spec.target)] for spec in self.program.graph_signature.output_specs if spec.kind == OutputKind.USER_INPUT_MUTATION
        }

        def produced(value: Value) -> int:
            """The number of the graph output that holds a value; inputs and constants are copied by a node."""
            if value.name in self.builder.inputs or value.name in self.builder.constants:
                with self.builder.at(f"{value.name}_copy", ""):
                    value = self.builder.op("copy", value) if value.dtype not in COMPLEX else self._cloned(value)
            if value not in graph_outputs:
                graph_outputs.append(value)
            return graph_outputs.index(value)

        returned: Any = node.args[0]
        user = [spec.kind == OutputKind.USER_OUTPUT for spec in self.program.graph_signature.output_specs]
        shared = self._shared({result for result, its in zip(returned, user, strict=True) if its and isinstance(result, torch.fx.Node)})
        for spec, argument in zip(self.program.graph_signature.output_specs, returned, strict=True):
            value = self.environment[argument] if isinstance(argument, torch.fx.Node) else argument
            if spec.kind == OutputKind.BUFFER_MUTATION:
                name = str(spec.target)
                live = self.sources.get(name)
                initial = self._tensor(name).detach().cpu().clone()
                states.append(State(name, self.state_inputs[name], produced(value), weakref.ref(live) if live is not None else None, initial))
            elif spec.kind == OutputKind.USER_INPUT_MUTATION:
                mutations.append((leaf_names[str(spec.target)], produced(value)))
            elif spec.kind != OutputKind.USER_OUTPUT:
                raise UnsupportedOperator(f"the program has an output of kind {spec.kind.name.lower()}", "export it for inference")
            elif not isinstance(value, Value):
                outputs.append(Output("constant", value=value))
            elif argument in self.leaf_of:
                outputs.append(Output("input", self.leaf_of[argument]))
            elif (root := self._view_of(argument)[0]) in self.leaf_of and self.leaf_of[root] not in mutated_leaves:
                outputs.append(Output("view", self.leaf_of[root], self._view_of(argument)[1]))
            elif argument in shared:
                outputs.append(Output("shared", produced(self.environment[root]), shared[argument], value.name))
            elif argument in self.named and value.name in self.builder.constants:
                outputs.append(Output("parameter", value=self.named[argument]))
            else:
                outputs.append(Output("value", produced(value)))
        in_spec, out_spec = self.program.call_spec.in_spec, self.program.call_spec.out_spec
        assert in_spec is not None and out_spec is not None
        return Imported(
            self.builder.finish(graph_outputs),
            in_spec,
            out_spec,
            tuple(self.leaves),
            tuple(self.literals),
            tuple(outputs),
            tuple(mutations),
            tuple(states),
            tuple(self.parameters),
        )


def place_of(node: torch.fx.Node) -> str:
    """A node's origin in the user's model: module path, file and line, as far as the export kept them."""
    modules = node.meta.get("nn_module_stack") or {}
    path = next((entry[0] for entry in reversed(list(modules.values())) if entry and entry[0]), "")
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return printable(" ".join(part for part in (path, f"({lines[-1][0]}:{lines[-1][1]})" if lines else "") if part))


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


def _bound(target: torch._ops.OpOverload, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
    """All arguments in the order of the schema, defaults filled in, without those that only concern the storage of results."""
    storage = {"device", "pin_memory", "layout", "memory_format", "generator", "non_blocking", "copy"}
    bound = []
    for i, argument in enumerate(target._schema.arguments):
        if argument.name in storage and argument.kwarg_only:
            continue
        if i < len(arguments):
            bound.append(arguments[i])
        elif argument.name in keywords:
            bound.append(keywords[argument.name])
        else:
            bound.append(argument.default_value if argument.has_default_value() else None)
    return bound


def _plain(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, (list, tuple)) else argument
