"""The back end of `torch.compile(module, backend="tilewright")`.

A graph captured by Dynamo is compiled at its first call, when real tensors are available. The module's parameters and buffers, which Dynamo
passes as inputs, are frozen: they become constants of the executable. Each call checks that they are the same, unchanged tensors; if not, the graph
is compiled again for the new ones. A parameter that is written to behind autograd's back (`p.data.add_(1)`) keeps its version, so that such a change
goes unnoticed; changes by `p.add_(1)` under `no_grad`, optimisers and `load_state_dict` are noticed. A graph that cannot be compiled runs eagerly,
and the log gives the reason: it needs gradients, has symbolic sizes, or the compiler rejects it.
"""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.compile import check_options, default_target
from tilewright.compile import compile as compile_model
from tilewright.errors import TargetNotPresent, TilewrightError, UnsupportedOption
from tilewright.hardware import is_present
from tilewright.hardware import machine as find_machine
from tilewright.partition.precision import check_precision
from tilewright.runtime.executable import Executable

LOG = logging.getLogger(__name__)

_OPTIONS = frozenset({"target", "precision", "trials", "vendor", "unsupported", "threads", "records", "deterministic", "winograd", "check"})
_CHANGES_IN_A_ROW = 3  # parameters that change in this many successive calls are no longer frozen
_GRAD_SWITCHES = (torch._C._set_grad_enabled, torch.set_grad_enabled)

Inputs = Sequence[Any]


def backend(graph_module: torch.fx.GraphModule, example_inputs: Inputs, *, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Compiles one graph captured by Dynamo; registered with PyTorch under the name "tilewright".

    `options` are those of `tilewright.compile`: target, precision, trials, vendor, unsupported, threads, records, deterministic, winograd,
    check.

    Raises UnsupportedOption and UnknownTarget for unknown options, and TargetNotPresent for a target that is not this machine. A graph that cannot be
    compiled is returned unchanged, with the reason in the log."""
    chosen = dict(options or {})
    unknown = sorted(set(chosen) - _OPTIONS)
    if unknown:
        raise UnsupportedOption(f"the options {', '.join(unknown)} are not known", f"use {', '.join(sorted(_OPTIONS))}")
    check_options(**{name: value for name, value in chosen.items() if name != "target"})
    machine = find_machine(default_target(example_inputs) if chosen.get("target") is None else chosen["target"])
    check_precision(chosen.get("precision", "fp32"), machine)
    if not is_present(machine):
        raise TargetNotPresent(f"torch.compile runs the model here, and {machine.name} is not here", "use tilewright.compile and save")
    reason = _reason_to_decline(graph_module, example_inputs)
    if reason is not None:
        LOG.info("a graph runs eager: %s", reason)
        return graph_module.forward
    return _CompiledGraph(graph_module, example_inputs, chosen)


def _reason_to_decline(graph_module: torch.fx.GraphModule, example_inputs: Inputs) -> str | None:
    if any(not isinstance(value, torch.Tensor) for value in example_inputs):
        return "it takes numbers that are not known in advance (symbolic sizes)"
    if any(not isinstance(size, int) for value in example_inputs for size in value.shape) or _has_symbolic_sizes(graph_module):
        return "it has symbolic sizes; call torch.compile with dynamic=False"
    if _needs_gradients(graph_module, example_inputs):
        return "it needs gradients; compiled graphs have none"
    devices = {value.device.type for value in example_inputs}
    if len(devices) > 1 or not devices <= {"cpu", "cuda"}:
        return f"its inputs are on {', '.join(sorted(devices))}"
    return None


def _has_symbolic_sizes(graph_module: torch.fx.GraphModule) -> bool:
    for node in graph_module.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return True
        if isinstance(value, torch.Tensor) and any(not isinstance(size, int) for size in value.shape):
            return True
    return False


def _needs_gradients(graph_module: torch.fx.GraphModule, inputs: Inputs) -> bool:
    """Whether a result may require gradients: one is known to, or grad mode is on, an input requires gradients, and some result is not known to need
    none."""
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    results = [node.meta.get("example_value") for node in output.all_input_nodes]
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in results):
        return True
    if not torch.is_grad_enabled() or not any(value.requires_grad for value in inputs):
        return False
    # an input changed in place may come to require gradients without being a result
    return not results or any(not isinstance(value, torch.Tensor) for value in results) or _writes(graph_module)


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


class _Frozen(torch.nn.Module):
    """The captured graph with some of its inputs bound to tensors; it is called with the others."""

    def __init__(self, graph_module: torch.fx.GraphModule, bound: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self.graph_module = _without_grad_switches(graph_module)
        self.names: dict[int, str] = {}
        for position, tensor in bound.items():
            self.names[position] = f"frozen{position}"
            if isinstance(tensor, torch.nn.Parameter):
                self.register_parameter(self.names[position], tensor)
            else:
                self.register_buffer(self.names[position], tensor)

    def forward(self, *inputs: torch.Tensor) -> Any:
        rest = iter(inputs)
        count = len(inputs) + len(self.names)
        return self.graph_module(*(getattr(self, self.names[i]) if i in self.names else next(rest) for i in range(count)))


def _without_grad_switches(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy without the nodes that switch grad mode: the graph runs without gradients altogether."""
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
        self._captured = torch.is_grad_enabled(), tuple(value.requires_grad for value in example_inputs)
        self._options = dict(options)
        placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        self._static = tuple(i for i, node in enumerate(placeholders) if _is_static(node))
        self._lock = threading.RLock()
        self._executable: Executable | None = None
        self._guards: dict[int, _Guard] = {}
        self._free: tuple[int, ...] = ()
        self._declined = False
        self._calls = 0
        self._changes = 0

    def __call__(self, *inputs: Any) -> Any:
        if self._declined or self._may_require_gradients(inputs):
            return self._eager(*inputs)
        with self._lock:
            if self._executable is None or not all(guard.holds(inputs[i]) for i, guard in self._guards.items()):
                self._prepare(inputs)
            executable, free = self._executable, self._free
            self._calls += 1
        if executable is None:
            return self._eager(*inputs)
        if executable.signature.mutations and _share_memory(inputs):
            LOG.info("a graph runs eager: it writes to inputs that share memory")
            return self._eager(*inputs)
        with torch.no_grad():
            return executable(*(inputs[i] for i in free))

    def _may_require_gradients(self, inputs: Inputs) -> bool:
        """Whether results may require gradients unlike at capture. Dynamo captures the graph again then; if it does not, the graph runs eagerly
        rather than lose gradients."""
        if not torch.is_grad_enabled() or not any(value.requires_grad for value in inputs):
            return False
        grad_mode, required = self._captured
        return not grad_mode or any(v.requires_grad and not r for v, r in zip(inputs, required, strict=True)) or _needs_gradients(self._eager, inputs)

    def _prepare(self, inputs: Inputs) -> None:
        """Compiles for the current parameters; those that keep changing are passed as inputs from then on."""
        if self._executable is not None:
            self._changes = self._changes + 1 if self._calls <= 1 else 0
            LOG.info("a graph is compiled again: a parameter has changed")
        self._executable, self._calls = None, 0
        if self._changes >= _CHANGES_IN_A_ROW:
            self._static = ()
        bound = {i: inputs[i] for i in self._static if not inputs[i].is_inference()}
        guards = {i: _Guard.of(tensor) for i, tensor in bound.items()}
        free = tuple(i for i in range(len(inputs)) if i not in bound)
        options = {**self._options}
        if options.get("target") is None:
            options["target"] = "cuda" if any(v.device.type == "cuda" for v in inputs) else "native"
        try:
            # outside inference mode: tensors made in it have no versions, and export rejects them
            with torch.inference_mode(False), torch.no_grad():
                model = _Frozen(self._eager, bound)
                executable = compile_model(model, tuple(_plain(inputs[i]) for i in free), **options)
        except TilewrightError as error:
            warnings.warn(f"a graph runs eager, because tilewright cannot compile it: {error}", stacklevel=4)
            self._declined = True
            return
        if executable.signature.states:
            LOG.info("a graph runs eager: it changes the module's buffers")
            self._declined = True
            return
        self._executable, self._guards, self._free = executable, guards, free


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of an example input that is not an inference tensor and requires no gradients."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


def _is_static(node: torch.fx.Node) -> bool:
    """Whether an input is a parameter or buffer of a module, which Dynamo marks."""
    described = node.meta.get("tensor_dict") or {}
    return "_dynamo_static_input_type" in described


def _share_memory(inputs: Inputs) -> bool:
    storages = [value.untyped_storage().data_ptr() for value in inputs if isinstance(value, torch.Tensor) and value.numel()]
    return len(set(storages)) < len(storages)
