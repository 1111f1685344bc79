"""The back end of `torch.compile(module, backend="tilewright")`.

A graph captured by Dynamo is compiled at its first call, when real tensors are available. The module's parameters and buffers, which Dynamo
passes as inputs, are frozen: they become constants of the executable. Each call checks that they are the same, unchanged tensors; if not, the graph
is compiled again for the new ones. A parameter that is written to behind autograd's back (`p.data.add_(1)`) keeps its version, so that such a change
goes unnoticed; changes by `p.add_(1)` under `no_grad`, optimisers and `load_state_dict` are noticed. A graph that cannot be compiled, or that would
not gain by it, runs eagerly. Each graph warns (`NotCompiled`) once of each cause.
"""

from __future__ import annotations

import logging
import re
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from tilewright.compile import Family, check_options, default_target
from tilewright.compile import compile as compile_model
from tilewright.dynamo_sizes import free_inputs
from tilewright.errors import (
    InvalidInput,
    TargetNotPresent,
    TilewrightError,
    UnsupportedOperator,
    UnsupportedOption,
    contained,
    warn_at_users_line,
    warn_not_compiled,
)
from tilewright.frontend.captured import CapturedModule
from tilewright.frontend.places import place_of
from tilewright.hardware import is_present
from tilewright.hardware import machine as find_machine
from tilewright.partition.precision import check_precision
from tilewright.runtime.dynamic import DynamicExecutable
from tilewright.runtime.executable import Executable
from tilewright.system.collection import collection_paused

LOG = logging.getLogger(__name__)

_OPTIONS = frozenset({"target", *signature(check_options).parameters})
_AUTOTUNE: Mapping[str, Any] = MappingProxyType({"trials": 10})
_MODES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"default": {}, "lite": {}, "reduce-overhead": {}, "max-autotune": _AUTOTUNE, "max-autotune-no-cudagraphs": _AUTOTUNE}
)
"""The options that a `mode` of torch.compile stands for. Calls have little overhead in any."""
_CHANGES_IN_A_ROW = 3  # parameters that change in this many successive calls are no longer frozen
_GRAD_SWITCHES = (torch._C._set_grad_enabled, torch.set_grad_enabled)
_CALL_SECONDS, _OPERATOR_SECONDS, _TORCH_NODE_SECONDS = 5e-6, 2e-6, 16e-6
"""Host time of a call of an executable, of an operator in eager PyTorch, and of a node of an executable that runs through PyTorch
(`call_overhead_cpu`)."""
_FROZEN = "frozen"
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""What norms of PyTorch change in training mode."""
_GRADIENTS = "wrap the call in torch.no_grad() or torch.inference_mode(), or freeze the parameters by requires_grad_(False)"

Inputs = Sequence[Any]


@dataclass(frozen=True)
class _Eager:
    """Why something runs eagerly, and what the user can do about it. `small`: because the sizes of a call are small."""

    cause: str
    remedy: str
    small: bool = False


def backend(
    graph_module: torch.fx.GraphModule, example_inputs: Inputs, *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compiles one graph captured by Dynamo; registered with PyTorch under the name "tilewright".

    `options` are those of `tilewright.compile`: target, precision, trials, vendor, unsupported, threads, records, deterministic, winograd,
    check, wait, programs, quick. `mode` is one of those of torch.compile: "max-autotune" measures candidates (trials), as Inductor's option
    `max_autotune` does; the other modes change nothing, and other options of Inductor are ignored, with a warning.

    Raises UnsupportedOption and UnknownTarget for unknown modes and options, and TargetNotPresent for a target that is not this machine. A graph that
    cannot be compiled is returned unchanged, with a warning."""
    if mode is not None and mode not in _MODES:
        raise UnsupportedOption(f"mode={mode!r} is not known", f"use {', '.join(_MODES)}")
    chosen = {**_MODES[mode or "default"], **_own(options or {})}
    check_options(**{name: value for name, value in chosen.items() if name != "target"})
    machine = find_machine(default_target(example_inputs) if chosen.get("target") is None else chosen["target"])
    check_precision(chosen.get("precision", "fp32"), machine)
    if not is_present(machine):
        raise TargetNotPresent(f"torch.compile runs the model here, and {machine.name} is not here", "use tilewright.compile and save")
    reason = _reason_to_decline(graph_module, example_inputs)
    if reason is not None:
        _warn(graph_module, "the graph", reason)
        return graph_module.forward
    return _CompiledGraph(graph_module, example_inputs, chosen)


def _own(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options in our terms. Raises UnsupportedOption for names that neither we nor Inductor know."""
    foreign = sorted(set(options) - _OPTIONS)
    own = {name: value for name, value in options.items() if name in _OPTIONS}
    if not foreign:
        return own
    from torch._inductor import list_options

    unknown = [name for name in foreign if name.replace("-", "_") not in list_options()]
    if unknown:
        raise UnsupportedOption(f"the options {', '.join(unknown)} are not known", f"use {', '.join(sorted(_OPTIONS))}")
    ignored = [name for name in foreign if name.replace("-", "_") != "max_autotune"]
    if ignored:
        _warn_ignored(tuple(ignored))
    tuned = any(options[name] for name in foreign if name not in ignored)
    return {**(_AUTOTUNE if tuned else {}), **own}


@cache
def _warn_ignored(names: tuple[str, ...]) -> None:
    """Warns once, not for each graph, of which Dynamo may capture many with the same options."""
    what = f"{', '.join(names)} {'is an option' if len(names) == 1 else 'are options'} of Inductor without a meaning for tilewright, and ignored"
    warn_at_users_line(f"{what}; leave {'it' if len(names) == 1 else 'them'} out, or use {', '.join(sorted(_OPTIONS))}")


def _warn(graph_module: torch.fx.GraphModule, what: str, why: _Eager) -> None:
    """Warns that a graph, named by the place of its first operator, or a call of it runs eagerly."""
    places = (place_of(node) for node in graph_module.graph.nodes if node.op not in ("placeholder", "get_attr", "output"))
    at = next(filter(None, places), "an unknown place")
    at = re.sub(r"L\['(\w+)'\]", r"\1", at)
    warn_not_compiled(f"{what} that begins at {at} runs eagerly: {why.cause}; {why.remedy}")


def _reason_to_decline(graph_module: torch.fx.GraphModule, example_inputs: Inputs) -> _Eager | None:
    if any(not isinstance(value, (torch.Tensor, torch.SymInt, int)) for value in example_inputs):
        return _Eager("it takes fractions that differ from call to call", "pass them as tensors")
    if _needs_gradients(graph_module, example_inputs):
        return _Eager("it needs gradients, which compiled graphs do not compute", _GRADIENTS)
    held = free_inputs(graph_module).fractions  # Dynamo keeps these on the CPU, whatever the model is on
    devices = {value.device.type for i, value in enumerate(example_inputs) if isinstance(value, torch.Tensor) and i not in held}
    if len(devices) > 1 or not devices <= {"cpu", "cuda"}:
        return _Eager(f"its inputs are on {', '.join(sorted(devices))}", "move the module and its inputs to one CPU or GPU")
    return None


def _reason_to_discard(executable: Executable | DynamicExecutable) -> _Eager | None:
    """Why a compiled graph is not worth calling: PyTorch computes all of it, or our kernels take less time, as measured or predicted, together
    with that of the calls of operators that they replace, than calling the executable costs, which is known if all have a prediction."""
    rows = executable.plan.rows
    ours = [row for row in rows if row.kind != "torch"]
    rest = sum(len(row.nodes) for row in rows if row.kind == "torch")
    if not ours:
        return _Eager("none of its operators has a kernel", "the list of operators says why")
    if any((row.kernels or row.has_library) and not row.seconds for row in ours):  # those of other sizes, whose graph was worth calling
        return None
    at_stake = sum(row.seconds + _OPERATOR_SECONDS * len(row.nodes) for row in ours)
    overhead = _CALL_SECONDS + _TORCH_NODE_SECONDS * rest
    if at_stake >= overhead:
        return None
    few = f"what would be compiled takes some {at_stake * 1e6:.0f} us, less than the {overhead * 1e6:.0f} us of calling it"
    return _Eager(few, "compile a larger part of the model, without graph breaks and operators that run through PyTorch", True)


def _not_compiled(error: TilewrightError) -> _Eager:
    return _Eager(f"tilewright cannot compile it: {error.cause}", error.remedy or "report this model")


def _fault(why: str) -> _Eager:
    return _Eager(f"a fault inside Tilewright: {why}", "report it, please")


def _needs_gradients(graph_module: torch.fx.GraphModule, inputs: Inputs) -> bool:
    """Whether a result may require gradients: one is known to, or grad mode is on, an input requires gradients, and some result is not known to need
    none."""
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    results = [node.meta.get("example_value") for node in output.all_input_nodes]
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in results):
        return True
    if not torch.is_grad_enabled() or not any(map(_requires_gradients, inputs)):
        return False
    # an input changed in place may come to require gradients without being a result
    return not results or any(not isinstance(value, torch.Tensor) for value in results) or _writes(graph_module)


def _requires_gradients(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _writes(graph_module: torch.fx.GraphModule) -> bool:
    """Whether the graph may write into a tensor in place: by the conventional trailing underscore, `out=`, or item assignment."""
    for node in graph_module.graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.op in ("call_method", "call_function"):
            written = name.endswith("_") and not name.startswith("_")
            if written or "out" in node.kwargs or name in ("setitem", "iadd", "isub", "imul", "itruediv", "iand", "ior", "ixor", "ipow"):
                return True
            if node.kwargs.get("inplace"):
                return True
    return False


@dataclass(frozen=True)
class _Guard:
    """Identity and version of one frozen tensor."""

    source: weakref.ReferenceType[torch.Tensor]
    version: int
    data_pointer: int

    @staticmethod
    def of(tensor: torch.Tensor) -> _Guard:
        return _Guard(weakref.ref(tensor), tensor._version, tensor.data_ptr())

    def holds(self, tensor: torch.Tensor) -> bool:
        return self.source() is tensor and tensor._version == self.version and tensor.data_ptr() == self.data_pointer


def _without_grad_switches(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph without nodes that switch grad mode, a copy if it has any: it runs without gradients altogether."""
    if not any(node.target in _GRAD_SWITCHES for node in graph_module.graph.nodes):
        return graph_module
    graph = torch.fx.Graph()
    mapping: dict[torch.fx.Node, Any] = {}
    for node in graph_module.graph.nodes:
        if node.op == "output":
            graph.output(torch.fx.map_arg(node.args[0], lambda n: mapping[n]))
        elif node.target not in _GRAD_SWITCHES:
            mapping[node] = graph.node_copy(node, lambda n: mapping[n])
    return torch.fx.GraphModule(graph_module, graph)


class _CompiledGraph:
    """One captured graph, called by Dynamo with every input, including parameters."""

    def __init__(self, graph_module: torch.fx.GraphModule, example_inputs: Inputs, options: Mapping[str, Any]) -> None:
        self._eager = graph_module
        # the gradient state for which the graph was captured
        self._captured = torch.is_grad_enabled(), tuple(map(_requires_gradients, example_inputs))
        self._options = dict(options)
        placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        self._sizes = free_inputs(graph_module)
        self._static = tuple(i for i, node in enumerate(placeholders) if _is_static(node))
        self._lock = threading.RLock()
        self._executable: Executable | DynamicExecutable | None = None
        self._guards: dict[int, _Guard] = {}
        self._fractions: dict[int, float] = {}
        self._free: tuple[int, ...] = ()
        self._declined = False
        self._too_small = 0
        self._calls = 0
        self._changes = 0
        self._told: set[_Eager] = set()

    def __call__(self, *inputs: Any) -> Any:
        if self._declined:
            return self._eager(*inputs)
        if self._may_require_gradients(inputs):
            self._tell(_Eager("its inputs require gradients, unlike when it was compiled", _GRADIENTS), "a call of the graph")
            return self._eager(*inputs)
        with self._lock:
            if self._executable is None or not self._holds(inputs):
                # no call that says whether compiling is worth while, or one that says that it is not
                if self._sizes.is_empty(inputs):
                    self._tell(_Eager("a size is 0, and it is compiled for the first sizes above", "call it with such sizes"), "a call of the graph")
                    return self._eager(*inputs)
                if self._too_small >= self._sizes.total(inputs) > 0:
                    return self._eager(*inputs)
                self._prepare(inputs)
            executable, free = self._executable, self._free
            self._calls += 1
        if executable is None:
            return self._eager(*inputs)
        if executable.signature.mutations and _share_memory(inputs):
            self._tell(_Eager("it writes to inputs that share memory", "pass copies of them"), "a call of the graph")
            return self._eager(*inputs)
        try:
            with torch.no_grad():
                return executable(*(inputs[i] for i in free))
        except InvalidInput as error:
            if isinstance(executable, Executable) and all(leaf.strides is None for leaf in executable.signature.inputs):
                raise
            remedy = error.remedy if isinstance(executable, Executable) else "call torch.compile with dynamic=False"
            self._tell(_Eager(error.cause, remedy), "a call of the graph")
            return self._eager(*inputs)
        except UnsupportedOperator as error:
            self._tell(_not_compiled(error), "a call of the graph")
            return self._eager(*inputs)

    def _holds(self, inputs: Inputs) -> bool:
        """Whether what the executable has frozen is unchanged."""
        same = all(inputs[i].item() == value for i, value in self._fractions.items())
        return same and all(guard.holds(inputs[i]) for i, guard in self._guards.items())

    def _may_require_gradients(self, inputs: Inputs) -> bool:
        """Whether results may require gradients unlike at capture. Dynamo captures the graph again then; if it does not, the graph runs eagerly
        rather than lose gradients."""
        if not torch.is_grad_enabled() or not any(map(_requires_gradients, inputs)):
            return False
        grad_mode, required = self._captured
        return (
            not grad_mode
            or any(_requires_gradients(v) and not r for v, r in zip(inputs, required, strict=True))
            or _needs_gradients(self._eager, inputs)
        )

    def _prepare(self, inputs: Inputs) -> None:
        """Compiles for the current parameters; those that keep changing are passed as inputs from then on."""
        if self._executable is not None:
            self._changes = self._changes + 1 if self._calls <= 1 else 0
            LOG.warning("a graph is compiled again: a parameter has changed")
        self._executable, self._calls = None, 0
        fractions = {i: inputs[i].item() for i in self._sizes.fractions}
        if self._changes >= _CHANGES_IN_A_ROW:
            self._static = ()
            if fractions != self._fractions:
                self._decline(_Eager("a Python float that it takes differs from call to call", "pass it as a tensor"))
                return
        bound = {i: inputs[i] for i in self._static if not inputs[i].is_inference()}
        guards = {i: _Guard.of(tensor) for i, tensor in bound.items()}
        free = tuple(i for i in range(len(inputs)) if i not in bound and i not in self._sizes.omitted)
        options = {**self._options}
        if options.get("target") is None:
            options["target"] = default_target(inputs)
        families, choices = _families_of(next(iter(bound.values()), None)), repr(sorted(options.items()))
        family = families.get(choices) or Family()

        def attempt() -> Executable | DynamicExecutable | _Eager:
            try:
                # outside inference mode: tensors made in it have no versions, and export rejects them
                with torch.inference_mode(False), torch.no_grad():
                    with collection_paused():
                        model = CapturedModule(_without_grad_switches(self._eager), bound, free, fractions, self._sizes.derived, _FROZEN)
                    sizes = self._sizes.dynamic(free)
                    return compile_model(model, tuple(_plain(inputs[i]) for i in free), dynamic=sizes, family=family, **options)
            except TilewrightError as error:
                return _not_compiled(error)

        executable = contained("a graph of torch.compile", "it runs eagerly", attempt, _fault)
        if isinstance(executable, _Eager):
            self._decline(executable)
            return
        if executable.signature.states:
            changed = [list(bound)[int(state.name.rpartition(_FROZEN)[2])] for state in executable.signature.states]
            self._decline(_changes(self._eager, changed))
            executable.close()
        elif (why := _reason_to_discard(executable)) is not None:
            executable.close()
            if why.small and isinstance(executable, DynamicExecutable):  # a call with larger sizes is judged when it comes
                self._too_small, first = self._sizes.total(inputs), not self._too_small
                if first:
                    self._tell(why)
            else:
                self._decline(why)
        else:
            families[choices] = family
            self._executable, self._guards, self._free, self._fractions = executable, guards, free, fractions

    def _decline(self, why: _Eager) -> None:
        self._declined = True
        self._tell(why)

    def _tell(self, why: _Eager, what: str = "the graph") -> None:
        """Warns of a cause once."""
        if why not in self._told:
            self._told.add(why)
            _warn(self._eager, what, why)


_FAMILIES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The families of graphs that Dynamo captured of one model and that are worth calling, by their first parameter and their options."""


def _families_of(parameter: torch.Tensor | None) -> dict[str, Family]:
    """The families of a graph: Dynamo captures a graph of its own for the first sizes of a model and another one for all further sizes."""
    found: dict[str, Family] = {} if parameter is None else _FAMILIES.setdefault(parameter, {})
    return found


def _changes(graph_module: torch.fx.GraphModule, positions: Sequence[int]) -> _Eager:
    """Why a graph runs eagerly that changes buffers: its inputs at these positions."""
    nodes = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    changed = [_name_of(nodes[position]) for position in positions]
    if all(name.rpartition(".")[2] in _STATISTICS for name in changed):
        remedy = "call eval() on the module"
    else:
        remedy = "pass them as inputs and return their new values, or change them outside of what is compiled"
    shown = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
    return _Eager(f"it changes buffers of the module: {shown}", remedy)


def _name_of(node: torch.fx.Node) -> str:
    """A parameter's or buffer's name in the user's module, as far as Dynamo says where it found it."""
    parts = re.findall(r"\['(\w+)'\]", str(getattr(getattr(node, "_dynamo_source", None), "name", "")))
    return ".".join(part for part in parts[1:] if part not in ("_modules", "_parameters", "_buffers")) or node.name


def _plain(tensor: Any) -> Any:
    """A copy of an example input that is not an inference tensor and requires no gradients; numbers are returned unchanged. All memory from the first
    element to the last is copied, because elements of an expanded tensor share theirs."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    return tensor.detach().as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


def _is_static(node: torch.fx.Node) -> bool:
    """Whether an input is a parameter or buffer of a module, which Dynamo marks."""
    described = node.meta.get("tensor_dict") or {}
    return "_dynamo_static_input_type" in described


def _share_memory(inputs: Inputs) -> bool:
    storages = [value.untyped_storage().data_ptr() for value in inputs if isinstance(value, torch.Tensor) and value.numel()]
    return len(set(storages)) < len(storages)
