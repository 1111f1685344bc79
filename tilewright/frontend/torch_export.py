"""PyTorch modules and .pt2 files become functional exported programs.

The module is exported by `torch.export` as it is (training or evaluation mode) and only made functional, unless it can be read as it is
(`functional.py`): operators such as convolution, attention, LSTM and the norms are not decomposed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from functools import cache, wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch._higher_order_ops.wrap import WrapWithAutocast
from torch.export import ExportedProgram
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tilewright.errors import InvalidModel
from tilewright.frontend import aten_neural, aten_pointwise, aten_recurrent, aten_reduction, aten_scatter, aten_shape, aten_sorting
from tilewright.frontend.captured import CapturedModule, captured_program
from tilewright.frontend.fan_out import FanOut
from tilewright.frontend.functional import TRACED, check_writes, is_readable, trains
from tilewright.frontend.functional_forms import with_aliases, with_functions
from tilewright.frontend.gpu_autocast import GpuAutocast, as_cast
from tilewright.frontend.handlers import Handler
from tilewright.frontend.quiet import quiet_exporter
from tilewright.frontend.reading import reading, said
from tilewright.frontend.torch_indices import ALONG_A_DIMENSION
from tilewright.frontend.torch_strides import with_copies
from tilewright.system.autocast import autocast, autocast_types

HANDLERS: Mapping[str, Handler] = MappingProxyType(
    {
        target: handler
        for family in (aten_pointwise, aten_shape, aten_scatter, aten_reduction, aten_sorting, aten_neural, aten_recurrent)
        for target, handler in family.HANDLERS.table.items()
    }
)

FILE = "tilewright.file"
"""Key in a program's metadata for the file from which it was read."""


@cache
def _decompositions(training: bool) -> Mapping[Any, Any]:
    """PyTorch's decompositions of the operators that have no handler; with `training` also of norms in training mode. Not decomposed are operators
    whose decomposition would accept negative indices that the operator rejects, or has a scale in addition to a size, which PyTorch does not
    check."""
    handled = HANDLERS.keys() - ({"instance_norm.default"} if training else set())

    def stays(name: str) -> bool:
        return name in handled or name.partition(".")[0] in ALONG_A_DIMENSION or name.endswith("_aa.vec")

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


def _code_where_called() -> AbstractContextManager[None]:
    """While exporting, generates the code of a graph where it is called. PyTorch does so after each of its passes, which takes an eighth of the time;
    graphs are read, not called. On this thread only."""
    here = threading.get_ident()

    def replacement_of(original: Callable[[torch.fx.GraphModule], Any]) -> Callable[[torch.fx.GraphModule], Any]:
        def recompile(graph_module: torch.fx.GraphModule) -> Any:
            if threading.get_ident() != here:
                return original(graph_module)

            def forward(self: torch.fx.GraphModule, *arguments: Any, **keywords: Any) -> Any:
                original(self)  # which replaces this function
                return type(self).forward(self, *arguments, **keywords)

            type(graph_module).forward = forward  # PyTorch makes a class for each graph
            return None

        return recompile

    return _replaced(torch.fx.GraphModule, "recompile", replacement_of)


def _values_without_metadata() -> AbstractContextManager[None]:
    """While exporting, describes each value by a fake tensor alone. PyTorch adds a record of its shape, strides and contiguity, which nothing here
    reads, and which takes a twelfth of the time where sizes are symbolic. On this thread only: other compilers read it."""
    here = threading.get_ident()

    def replacement_of(original: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        return lambda value: None if threading.get_ident() == here else original(value)

    return _replaced(proxy_tensor, "_extract_tensor_metadata", replacement_of)


class _DataIsTraced(TorchFunctionMode):
    """Reads `x.data` as `x.detach()`, which shares the memory too: the export does not trace `.data`. Raises InvalidModel for `x.data = y`, which it
    would silently leave out."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        if function == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise InvalidModel("the model assigns to .data of a tensor, which gives it other memory", "copy to the tensor instead: x.copy_(y)")
        return function(*args, **(kwargs or {}))


def _copies_kept() -> AbstractContextManager[None]:
    """While decomposing, keeps the copies to buffers: without them a result that is copied to a buffer, and stays apart from it, is the same node as
    the buffer that is returned."""
    return _replaced(torch.export.exported_program, "_remove_unnecessary_copy_op_pass", lambda original: lambda *program: program)


@contextmanager
def _autocast_as_region(module: torch.nn.Module, types: Mapping[str, torch.dtype]) -> Iterator[torch.nn.Module]:
    """The module, to be exported while this lasts, with autocast to these types inside `forward`, and off around it: an export records the casts of
    regions in the model, but not those of a region around it."""
    if not types:
        yield module
        return
    whole = copy(module)  # shares parameters, buffers and modules
    forward = whole.forward

    @wraps(forward)
    def cast(*arguments: Any, **keywords: Any) -> Any:
        with autocast(types):
            return forward(*arguments, **keywords)

    whole.forward = cast
    with autocast(types, False):
        yield whole


@contextmanager
def _autocast_of_a_gpu() -> Iterator[None]:
    """While exporting, makes regions of autocast("cuda") what they are where there is a GPU, and records them and their casts, so that the module's
    Python code sees their types. Without a GPU, PyTorch records that they are off. On this thread only."""
    here = threading.get_ident()

    def answers(answer: bool) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
        return lambda original: lambda *arguments: answer if threading.get_ident() == here else original(*arguments)

    def casting(record: Callable[..., Any]) -> Callable[..., Any]:
        def call(tracer: Any, function: Any, above_autograd: bool, args: Any, keywords: Any) -> Any:
            if above_autograd and torch.is_autocast_enabled("cuda") and threading.get_ident() == here:
                with tracer:  # which is off while it records
                    args, keywords = as_cast(function, args, keywords, torch.get_autocast_dtype("cuda"))
            return record(tracer, function, above_autograd, args, keywords)

        return call

    missing = _replaced(torch.cuda.amp.common, "amp_definitely_not_available", answers(False))
    supported, recorded = _replaced(torch.cuda, "is_bf16_supported", answers(True)), _replaced(proxy_tensor, "proxy_call", casting)
    with missing, supported, recorded:
        yield


@contextmanager
def _regions_of_a_gpu() -> Iterator[None]:
    """While decomposing, makes regions of autocast("cuda") cast as on a GPU. PyTorch's cast no tensors on a CPU, and are off without a GPU. On this
    thread only."""
    here = threading.get_ident()
    mode = GpuAutocast()

    def replacement_of(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, device: str, dtype: torch.dtype | None, enabled: bool, cached: bool | None, body: Any, *operands: Any) -> Any:
            if device != "cuda" or threading.get_ident() != here:
                return original(self, device, dtype, enabled, cached, body, *operands)
            with mode.region((dtype or torch.get_autocast_dtype(device)) if enabled else None):
                return body(*operands)

        return call

    with mode, _replaced(WrapWithAutocast, "__call__", replacement_of):
        yield


def exported(
    module: torch.nn.Module,
    example_inputs: Sequence[Any],
    example_keywords: Mapping[str, Any] | None = None,
    free: Mapping[int, Any] | None = None,
    casts: Mapping[str, torch.dtype] | None = None,
    on_gpu: bool = False,
) -> ExportedProgram:
    """The program of a module, called as module(*example_inputs, **example_keywords), under autocast to the types `casts` by device (None: as here).
    `on_gpu`: it is to run on a GPU, whether or not there is one here.

    `free` says which sizes are symbolic: for leaves of (inputs, keywords) a `torch.export` dimension or hint for each such dimension of a tensor,
    or one for a Python number.

    Raises InvalidModel if the module cannot be exported, for example because its control flow depends on tensor values, or it allows only one value
    of a size that is to be symbolic."""
    types = autocast_types() if casts is None else casts
    if isinstance(module, CapturedModule) and not types:
        with torch.no_grad(), quiet_exporter(), _code_where_called():
            found = captured_program(module, example_inputs, free or {})
        if found is not None and is_readable(found, HANDLERS.keys()):
            return found
    try:
        with torch.no_grad(), quiet_exporter(), ExitStack() as replaced, _DataIsTraced():
            always = _lstm_states_in_shape, _exporting_here_alone, _code_where_called, _values_without_metadata
            for replacement in (*always, *([_autocast_of_a_gpu] if on_gpu else [])):
                replaced.enter_context(replacement())
            arguments, keywords = _distinct((tuple(example_inputs), dict(example_keywords or {})))
            shapes = None
            if free:
                leaves, tree = pytree.tree_flatten((arguments, keywords))
                given = pytree.tree_unflatten([free.get(leaf) for leaf in range(len(leaves))], tree)
                shapes = by_parameter(module, *given)
            with _autocast_as_region(module, types) as whole:
                program = torch.export.export(whole, arguments, keywords, dynamic_shapes=shapes, strict=False)
            program.graph_module.meta[TRACED] = True
            return program
    except InvalidModel:
        raise
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
        if free and first[0].startswith("Constraints violated") and len(first) > 1:  # of a `torch.export.Dim`
            why = first[1].strip(" -")
            remedy = "give a name instead of a torch.export.Dim: then sizes that are related otherwise are exported for themselves"
            raise InvalidModel(f"{type(module).__name__} cannot be exported with these sizes free: {why}", remedy) from error
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
        exported.graph_module.meta[FILE] = str(file)
        return exported


def functional(program: ExportedProgram, on_gpu: bool = False) -> ExportedProgram:
    """The program without writes to tensors that others see, and with those operators decomposed that have no handler. `on_gpu`: its autocast regions
    are those of a GPU. Raises InvalidModel if PyTorch cannot, or would make another program of it."""
    program = with_copies(with_functions(with_aliases(program)))
    check_writes(program)
    if program.graph_module.meta.get(TRACED) and is_readable(program, HANDLERS.keys()):
        return program
    file = program.graph_module.meta.get(FILE)
    again = "export the module again with this PyTorch release"
    with reading(file, again) if file else nullcontext():
        try:
            with torch.no_grad(), quiet_exporter(), ExitStack() as replaced, FanOut() if file else nullcontext():
                for replacement in (_lstm_states_in_shape, _operators_registered_once, _copies_kept, *([_regions_of_a_gpu] if on_gpu else [])):
                    replaced.enter_context(replacement())
                result: ExportedProgram = program.run_decompositions(dict(_decompositions(any(map(trains, program.graph.nodes)))))
        except Exception as error:
            remedy = "register it as a buffer" if "is mutated in the forward method" in str(error) else again
            raise InvalidModel(f"{file or 'the exported program'} cannot be made functional: {said(error)}", remedy) from error
    result.graph_module.meta[FILE] = file
    return result
