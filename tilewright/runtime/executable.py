"""``Executable``: a compiled model, callable like the module it was made from.

One call at a time: a lock serialises callers of one executable; `clone` gives another that shares the constants and has memory of its own. Results
are fresh tensors that no later call overwrites; the memory of large ones is reused once nothing refers to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch
from torch.autograd import profiler

from tilewright import settings
from tilewright.errors import ExecutableBusy, ExecutableClosed, InvalidInput, TargetNotPresent, UnsupportedOption
from tilewright.frontend.imported import Imported
from tilewright.hardware import Machine, is_present
from tilewright.ir.kernel import Kernel
from tilewright.ir.region import Program
from tilewright.runtime.admission import Admission
from tilewright.runtime.buffers import Buffers, SharedConstants, allocation
from tilewright.runtime.cpu import Compiled, cpu_engine
from tilewright.runtime.examination import profiled, verified
from tilewright.runtime.library import BoundCall, bound_calls
from tilewright.runtime.loadable import LoadableProgram, loadable
from tilewright.runtime.module_stamp import ModuleStamp
from tilewright.runtime.packing import torch_dtype
from tilewright.runtime.plan import Plan, plan_of
from tilewright.runtime.profile import Profile
from tilewright.runtime.results import Results
from tilewright.runtime.signature import Signature, signature_of
from tilewright.runtime.torch_nodes import check_nodes, run_region
from tilewright.runtime.verify import Verification
from tilewright.text import number_of

T = TypeVar("T")


@dataclass(frozen=True)
class Image:
    """All parts of an executable. An artifact stores all but `kernels`. `sources` maps file names to the kernels' text."""

    program: LoadableProgram
    signature: Signature
    machine: Machine
    binaries: tuple[Compiled, ...]
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    states: Mapping[str, torch.Tensor] = field(default_factory=lambda: MappingProxyType({}))
    """The tensors of the signature's states by name: a live module's own buffers, which calls change as PyTorch would."""
    kernels: Mapping[str, Kernel] = field(default_factory=lambda: MappingProxyType({}))
    """The kernels' IR, for explaining them. Artifacts do not store it."""


class Engine(Protocol):
    """The interface of the CPU and GPU engines, which run the kernels of a program over its buffers."""

    buffers: Buffers
    input_alignment: int
    threads: int

    def in_place(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]: ...
    def bind(self, pointers: Sequence[int]) -> None: ...
    def run(self, first: int, last: int) -> None: ...
    def run_timed(self, first: int, last: int) -> Sequence[Any]: ...
    def idle(self, launches: int) -> None: ...
    def moment(self) -> Any: ...
    def seconds(self, start: Any, end: Any) -> float: ...
    def clock_seconds(self) -> float: ...
    def finish(self) -> None: ...
    def check_indices(self, wait: bool) -> None: ...
    def abandon(self) -> None: ...
    def close(self) -> None: ...


class Executable:
    """A model compiled for one machine. Calling it needs that machine; `plan` and `save` do not.

    Raises, when called:
        InvalidInput: for inputs whose number, nesting, shape, dtype or device differ from what it was compiled for.
        TargetNotPresent: if the machine is not present.
        ExecutableClosed: after `close`.
        ExecutableBusy: if called from inside one of its own calls.
        IndexOutOfRange: for an index out of range. On a CPU the call itself raises it. On a GPU a call with `check` waits for its kernels and raises
        it; without `check` the next call or `synchronize` raises it, and the results of the call that used the index are wrong (they contain no data
        from outside the tensors).
    """

    def __init__(
        self,
        image: Image,
        stamp: ModuleStamp | None = None,
        threads: int | None = None,
        live: Mapping[str, Callable[[], torch.Tensor | None]] | None = None,
        check: bool = False,
        shared_constants: SharedConstants | None = None,
    ) -> None:
        """`live` returns the module's own parameter for a graph constant, for models that return a parameter itself. `shared_constants` are those
        of the programs for other sizes."""
        self.image = image
        self.check = check
        self._stamp = stamp
        self._threads = threads
        self._live = dict(live or {})
        self._shared_constants = shared_constants
        self._lock = threading.RLock()
        self._busy = False
        self._closed = False
        self.compile_seconds: Mapping[str, float] = {}
        """Seconds that each stage of its compilation took (`stages.STAGES`); empty if it was loaded."""
        self._engine: Engine | None = None
        self._libraries: dict[int, BoundCall] = {}
        program, signature = image.program, image.signature
        check_nodes(program)
        # source of each graph input: an input leaf, or (below zero) a state
        sources = {leaf.name: i for i, leaf in enumerate(signature.inputs) if leaf.name}
        sources.update({state.input: -1 - i for i, state in enumerate(signature.states)})
        missing = [name for name in program.graph.inputs if name not in sources]
        missing += [state.name for state in signature.states if state.name not in image.states]
        if missing:
            raise InvalidInput(f"the signature lacks the inputs {missing}", "compile the model again")
        self._sources = tuple(sources[name] for name in program.graph.inputs)
        self._states = [image.states[state.name] for state in signature.states]
        arguments = signature.input_tree.children[0]
        flat = all(child.kind == "leaf" for child in arguments.children) and not signature.input_tree.children[1].children
        in_order = self._sources == tuple(range(len(signature.inputs)))
        self._simple_count = len(arguments.children) if flat and in_order else -1
        if is_present(image.machine):
            self._start()

    # Construction

    def _start(self, shared: Executable | None = None) -> None:
        """Builds the engine and everything about a call that stays the same between calls."""
        image = self.image
        if not is_present(image.machine):
            raise TargetNotPresent(
                f"this executable is for {image.machine.name} ({image.machine.architecture}), which is not here",
                "run it there: save() it, and tilewright.load() it on that machine",
            )
        model: Any = shared._engine if shared is not None else None
        if image.machine.is_gpu:
            from tilewright.runtime.gpu import gpu_engine

            level2 = image.machine.cache(2)
            cache_bytes = level2.bytes if level2 is not None else 1
            # it runs library calls itself
            self._engine = gpu_engine(image.program, image.binaries, model, self._shared_constants, cache_bytes=cache_bytes)
        else:
            self._engine = cpu_engine(image.program, image.binaries, self._threads, model, self._shared_constants)
            self._libraries = bound_calls(self._engine.buffers, shared._libraries if shared is not None else None)
        self._prepare(self._engine)

    def _prepare(self, engine: Engine) -> None:
        program, signature, places = self.image.program, self.image.signature, engine.buffers.places
        self._device = engine.buffers.device
        values = program.graph.values
        expected = tuple((torch.Size(values[name].shape), torch_dtype(values[name].dtype)) for name in program.graph.inputs)
        self._states = [state if state.device == self._device else state.to(self._device) for state in self._states]
        self._admission = Admission(signature, self._sources, expected, tuple(self._states), self._device, engine.input_alignment)
        self._gpu = self._device.index if self._device.type == "cuda" else None
        self._allocations = []
        for root in places.outputs:
            storage = program.storage[root]
            shape = storage.value.shape if storage.layout.is_row_major else (storage.layout.size,)
            self._allocations.append(allocation(tuple(shape), torch_dtype(storage.value.dtype), self._device, storage.layout.is_padded))
        self._results = Results(program, signature, engine.buffers, tuple(self._states), self._live)
        self._segments: list[tuple[str, int, int]] = []
        first = 0
        for index, region in enumerate(program.regions):
            if region.kind == "torch" or index in self._libraries:
                if self._in_engine(first, index):
                    self._segments.append(("kernels", first, index))
                self._segments.append(("torch" if region.kind == "torch" else "library", index, index + 1))
                first = index if region.calls else index + 1  # kernels follow a library's operator
        if self._in_engine(first, len(program.regions)):
            self._segments.append(("kernels", first, len(program.regions)))
        self._only_kernels = len(self._segments) == 1 and self._segments[0][0] == "kernels"
        wanted = {
            name
            for region in program.regions
            if region.kind == "torch"
            for node in region.nodes
            for name in program.nodes[node].inputs
            if name in program.graph.constants
        }
        self._torch_constants = {name: program.graph.constants[name].to(self._device) for name in wanted}

    def _in_engine(self, first: int, last: int) -> bool:
        """Whether the engine runs anything of the regions `first` to `last` (excluded)."""
        regions = self.image.program.regions
        return any(regions[i].calls or (regions[i].library is not None and i not in self._libraries) for i in range(first, last))

    # Calling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._engine is None:
            self._require_engine()
        leaves: Sequence[Any] = args
        if len(args) != self._simple_count or kwargs:
            leaves = self.image.signature.leaves(args, kwargs)
        return self._alone(self._call, leaves)

    def _call(self, leaves: Sequence[Any]) -> Any:
        inputs = self._admission.admit(leaves)
        engine = self._engine
        if engine is None:
            engine = self._require_engine()
        if self._gpu is not None:
            engine.check_indices(False)
        outputs = self._allocate()
        addresses = self._admission.addresses(inputs, outputs)
        try:
            engine.bind(addresses)
            if profiler._is_profiler_enabled:
                for index in range(len(self.image.program.regions)):
                    self._run_region(engine, index, inputs, outputs)
            elif self._only_kernels:
                engine.run(self._segments[0][1], self._segments[0][2])
            else:
                self._run_segments(engine, inputs, outputs)
            engine.finish()
        except BaseException:
            engine.abandon()
            raise
        if self.check:
            engine.check_indices(True)
        return self._results.of(leaves, inputs, outputs)

    def _alone(self, use: Callable[..., T], *arguments: Any) -> T:
        """The result of a use of the working memory, one at a time."""
        with self._lock:
            self._require_idle()
            try:
                self._busy = True
                return use(*arguments)
            finally:
                self._busy = False

    def _require_idle(self) -> None:
        """Rejects a call from a signal handler or a finalizer during a call: the lock does not stop its own thread, and both would use the same
        memory."""
        if self._busy:
            raise ExecutableBusy("this executable is used inside of a call of its own, by a signal's handler or a finalizer", "use a clone() there")

    def _allocate(self) -> list[torch.Tensor]:
        """Fresh outputs; outputs with a halo are zeroed."""
        if self._gpu is not None and torch.cuda.current_device() != self._gpu:
            with torch.cuda.device(self._device):
                return [allocate() for allocate in self._allocations]
        return [allocate() for allocate in self._allocations]

    def _require_engine(self) -> Engine:
        if self._closed:
            raise ExecutableClosed("this executable is closed", "compile or load it again")
        with self._lock:
            if self._engine is None:
                self._start()
            assert self._engine is not None
            return self._engine

    def _run_segments(self, engine: Engine, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        for kind, first, last in self._segments:
            if kind == "kernels":
                engine.run(first, last)
            else:
                self._run_operators(engine, first, inputs, outputs)

    def _run_operators(self, engine: Engine, region: int, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """A region's library call (on a CPU), or its nodes that run through PyTorch."""
        if region in self._libraries:
            self._libraries[region](inputs, outputs, engine.threads)
        else:
            run_region(self.image.program.regions[region], engine.buffers, *engine.in_place(inputs, outputs), self._torch_constants)

    def _run_region(self, engine: Engine, index: int, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """One region alone, under its name where PyTorch's profiler is active."""
        region = self.image.program.regions[index]
        with profiler.record_function(region.name):
            if region.kind == "torch" or index in self._libraries:
                self._run_operators(engine, index, inputs, outputs)
            if self._in_engine(index, index + 1):
                engine.run(index, index + 1)

    # Everything else

    def __repr__(self) -> str:
        state = "closed" if self._closed else number_of(len(self.image.program.regions), "region")
        return f"<Executable for {self.image.machine.name}: {state}>"

    @property
    def plan(self) -> Plan:
        """What each region does, its times, and why; `str()` gives a summary and a table."""
        return plan_of(self.image.program, self.image.machine, self._engine.buffers.plan if self._engine is not None else None)

    @property
    def signature(self) -> Signature:
        return self.image.signature

    @property
    def threads(self) -> int:
        """OpenMP threads of CPU kernels."""
        return self._require_engine().threads

    @threads.setter
    def threads(self, count: int) -> None:
        check_threads(count)
        with self._lock:
            self._threads = count
            self._require_engine().threads = count

    def clone(self) -> Executable:
        """Another executable of the same model, with shared constants and kernels but its own working memory and lock."""
        if self._closed:
            raise ExecutableClosed("this executable is closed", "compile or load it again")
        other = Executable.__new__(Executable)
        with self._lock:
            other.__dict__.update(self.__dict__)
            other._lock, other._busy = threading.RLock(), False
            other._states = [state.clone() for state in self._states]
            other._engine = None
            if self._engine is not None:
                other._start(shared=self)
        return other

    __copy__ = clone

    def __deepcopy__(self, memo: dict[int, Any]) -> Executable:
        return self.clone()

    def __reduce__(self) -> str:
        raise UnsupportedOption("an executable cannot be pickled", "save() it, and tilewright.load() it in the other process")

    def synchronize(self) -> None:
        """Waits for all work enqueued on the GPU, and raises errors that no call has raised yet. On a CPU there is nothing to wait for.

        Raises:
            IndexOutOfRange: if a call, or a replay of a CUDA graph that captured one, had an index out of range.
        """
        engine = self._require_engine()
        if self._gpu is not None:
            torch.cuda.synchronize(self._device)
        with self._lock:
            engine.check_indices(False)

    def verify(self, *args: Any, tolerance: float | None = None, **kwargs: Any) -> Verification:
        """Compares every stored value of each region with the graph evaluated in float64 for the same inputs.

        `tolerance` replaces those of `verify.TOLERANCES` for floating-point values; a model compiled for a lower precision than its tensors' dtype
        has the tolerance of the types in which values are stored, and where kernels round to TF32 that of float16. Inputs are not changed, even if
        a call would change them.
        """
        engine = self._require_engine()
        leaves = self.image.signature.leaves(args, kwargs)
        return self._alone(verified, self, engine, leaves, tolerance)

    def profile(self, *args: Any, repetitions: int = 30, **kwargs: Any) -> Profile:
        """Measures each region within whole calls: `repetitions` calls with a clock between regions, in turns with as many without. Changes no input
        and no buffer of the module, even if a call would.

        Raises:
            InvalidInput: for inputs as in a call.
            UnsupportedOption: if `repetitions` is less than 1.
        """
        if repetitions < 1:
            raise UnsupportedOption(f"repetitions = {repetitions} measures nothing", "pass a number from 1 up")
        engine = self._require_engine()
        leaves = self.image.signature.leaves(args, kwargs)
        return self._alone(profiled, self, engine, leaves, repetitions)

    def is_stale(self, module: torch.nn.Module) -> bool:
        """Whether any of the module's parameters or buffers were replaced or changed in place since compilation.

        Raises:
            UnsupportedOption: for an executable that was not compiled in this process.
        """
        if self._stamp is None:
            raise UnsupportedOption("this executable knows of no module: it was loaded from a file", "compile the module here")
        return self._stamp.differs(module)

    def save(self, path: str | Path) -> str:
        """Writes an artifact: a directory, or one file if the path ends in ".zip". Returns its digest, for `tilewright.load`."""
        from tilewright.runtime.artifact import save

        return save(self.image, path)

    def close(self) -> None:
        """Releases the working memory and kernels; later calls raise. Closing twice is harmless."""
        with self._lock:
            self._require_idle()
            self._closed = True
            if self._engine is not None:
                self._engine.close()
                self._engine = None
                self._allocations, self._libraries = [], {}

    def __enter__(self) -> Executable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def image_of(
    program: Program,
    imported: Imported,
    machine: Machine,
    binaries: Sequence[Compiled],
    sources: Mapping[str, str] | None = None,
    parameters: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> Image:
    """All parts of the executable of a program; arguments and errors are those of `executable_of`."""
    signature = signature_of(imported, parameters, defaults)
    ready = loadable(program)
    # a parameter that is only returned is in no region, and simplifying passes may have dropped it
    returned = {leaf.value for leaf in signature.outputs if leaf.kind == "parameter"} - set(ready.graph.constants)
    if returned:
        graph = ready.graph
        constants = {**graph.constants, **{name: imported.graph.constants[name] for name in returned}}
        values = {**graph.values, **{name: imported.graph.values[name] for name in returned}}
        ready = replace(ready, graph=replace(graph, constants=constants, values=values))
    states = {}
    for state in imported.states:
        live = state.source() if state.source is not None else None
        states[state.name] = live if live is not None else state.initial.detach().clone()
    kernels = MappingProxyType(program.kernels())
    return Image(ready, signature, machine, tuple(binaries), MappingProxyType(dict(sources or {})), states, kernels)


def executable_of(
    program: Program,
    imported: Imported,
    machine: Machine,
    binaries: Sequence[Compiled],
    sources: Mapping[str, str] | None = None,
    module: torch.nn.Module | None = None,
    parameters: Sequence[str] = (),
    threads: int | None = None,
    defaults: Mapping[str, Any] | None = None,
    check: bool = False,
    shared_constants: SharedConstants | None = None,
) -> Executable:
    """The executable of a program from a front end's model, with its kernels compiled.

    `sources` maps file names to kernel text; `module` is the live module, for `is_stale`; `parameters` names the positional parameters of its forward
    function, and `defaults` maps those that have a default to its value. Calls change the module's buffers as PyTorch would. `shared_constants`:
    as for `Executable`.

    Raises:
        ValueError: if the program is inconsistent.
        KernelFailed: if a binary cannot be loaded or lacks a kernel.
    """
    image = image_of(program, imported, machine, binaries, sources, parameters, defaults)
    sources_of_parameters = {p.value: p.source for p in imported.parameters if p.source is not None}
    stamp = ModuleStamp.of(module, image.states) if module is not None else None
    return Executable(image, stamp, threads, sources_of_parameters, check, shared_constants)


def check_threads(count: Any) -> None:
    """Raises UnsupportedOption for anything that is not a number of threads that a process can start."""
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= settings.MOST_THREADS:
        raise UnsupportedOption(f"threads = {count!r} is no number of threads", f"pass a whole number from 1 to {settings.MOST_THREADS}")
