"""A child process that checks and times candidates on one GPU: `python -m tilewright.tuning.trial_worker --device N`.

Requests (see `tilewright.tuning.workers`), in this order:

    {"do": "start", "machine": plain form}             -> {"gpu", "driver", "torch"}
    {"do": "problem", "problem": plain form, "seed"}    -> {"sets"}: draws inputs, computes the reference in float64, copies the inputs
    {"do": "trial", "program", "mode", "limit"}         -> {"times": seconds of a call, one for each replay, "relative_error"} or {"error"}
    {"do": "remeasure", "programs", "mode", "rounds"}   -> {"times": [those of each program]}

A candidate runs once on poisoned memory and is checked before it is timed. Replays of CUDA graphs that call it repeatedly are timed, in mode

    "cold"     with separate buffers for each call, and level 2 filled with other data before each replay: inputs and weights come from memory;
    "network"  with separate weights and code for each call, as in a network, where the previous kernel has just written the
               activations and other kernels have filled the instruction caches;
    "warm"     with one set of buffers.

An error that leaves the GPU's context unusable ends the process.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tilewright.errors import TilewrightError
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import ELEMENT_TYPES, of_torch, size_of
from tilewright.ir.graph import Value
from tilewright.ir.layout import Layout
from tilewright.ir.library import LibraryCall
from tilewright.ir.problem import Problem
from tilewright.ir.region import Storage
from tilewright.runtime.captured import captured, handle_of
from tilewright.runtime.driver import Driver, system_driver
from tilewright.runtime.encoding import decode_kernel
from tilewright.runtime.fields import Field
from tilewright.runtime.gpu_kernels import ParameterBlock, node_params, parameter_block
from tilewright.runtime.library import prepared as prepared_call
from tilewright.runtime.library import viewed
from tilewright.runtime.loadable import LoadableKernel
from tilewright.runtime.packing import prepared, torch_dtype, unpack, write
from tilewright.runtime.verify import AS_TF32, TOLERANCES, errors, narrow_tolerance
from tilewright.tuning import serialisation
from tilewright.tuning.trial_reference import reference_results
from tilewright.tuning.workers import Fatal, Message, serve

CACHE_SIZES = 4
"""Memory traffic between two uses of the same buffers, in multiples of the level-2 cache size."""
MOST_SETS = 256
MOST_CALLS = 192
"""Maximum calls of one replay."""
ALIGNMENT = 256
"""Alignment of each buffer in bytes."""
CODE_COPIES = 24
"""Copies of a candidate's code in mode "network", in place of the kernels of other layers that run between two of its calls."""
PROBE_CALLS = 6
"""Calls of the replay that determines the number of calls of the timed replays: a single launched call takes several times as long."""
COARSE_SECONDS, COARSE_REPLAYS = 1e-3, 4
FINE_SECONDS = 2e-3
"""Target time of one replay: its start costs some microseconds, amortised over many calls."""


def drawn(value: Value, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """Random elements: normally distributed, or zeros and ones for integers and booleans, which are valid indices wherever any are."""
    if ELEMENT_TYPES[value.dtype].kind == "float":
        return torch.randn(value.shape, generator=generator, device=device).to(torch_dtype(value.dtype))
    return torch.randint(0, 2, value.shape, generator=generator, device=device).to(torch_dtype(value.dtype))


def poison(flat: torch.Tensor, layout: Layout) -> None:
    """Fills all elements with NaN (integers: the minimum, booleans: true), and halo and padding with zeros, as in an engine's memory."""
    worst: Any = math.nan if flat.is_floating_point() else True if flat.dtype is torch.bool else torch.iinfo(flat.dtype).min
    if not layout.is_padded:
        flat.fill_(worst)
        return
    if not layout.around:  # around a slice is what others store
        flat.zero_()
    write(flat, layout, torch.full(layout.shape, worst, dtype=flat.dtype, device=flat.device))


@dataclass
class Loaded:
    """A candidate on the device: copies of its module, their functions, and the argument addresses of each call for each set of buffers. `operators`:
    its library call, if it has one, as a graph for each set of buffers."""

    modules: Sequence[int]
    functions: Sequence[Mapping[str, int]]
    kernels: Mapping[str, LoadableKernel]
    calls: Sequence[tuple[str, list[list[int]]]]
    """Kernel name and, for each set of buffers, the addresses of its arguments."""
    kept: Sequence[object]
    """Buffers, and the library's runs, whose reordered filters the captured graphs read."""
    operators: Sequence[torch.cuda.CUDAGraph] = ()


class Replay:
    """A CUDA graph of `count` successive calls of a candidate, which rotate over sets of buffers; it keeps the buffers. `early`: kernels begin before
    those ahead of them have ended, as in a program (`runtime.gpu`)."""

    def __init__(self, driver: Driver, loaded: Loaded, count: int, sets: int, early: bool = False) -> None:
        self._driver, self._loaded = driver, loaded
        self._blocks: list[ParameterBlock] = []
        self.count = count
        self._graph = driver.create_graph()
        before: list[int] = []
        for number in range(count):
            if loaded.operators:
                before = [driver.add_child_graph_node(self._graph, before, handle_of(loaded.operators[number % sets]))]
            for place, (kernel_name, addresses) in enumerate(loaded.calls):
                kernel = loaded.kernels[kernel_name]
                arguments = addresses[number % sets]
                block = parameter_block(driver, kernel, [0] * len(arguments), arguments, 0)
                self._blocks.append(block)
                function = loaded.functions[number % len(loaded.functions)][kernel_name]
                follows_operator = bool(loaded.operators) and place == 0
                soon = early and kernel.waits and not follows_operator
                before = [driver.add_kernel_node(self._graph, before, node_params(function, kernel, block), early=soon)]
        self._executable = driver.instantiate(self._graph)

    def launch(self, stream: int) -> None:
        self._driver.launch(self._executable, stream)

    def destroy(self) -> None:
        with suppress(TilewrightError):  # it fails after a fault
            self._driver.destroy_executable(self._executable)
            self._driver.destroy_graph(self._graph)


def copies(bytes_: int, cold_bytes: int) -> int:
    """Number of copies of buffers with `bytes_` bytes for which `cold_bytes` are touched between two uses of one copy."""
    return max(2, min(MOST_SETS, -(-cold_bytes // max(bytes_, 1))))


class DeviceProblem:
    """A problem on the device: random inputs, the expected outputs, and as many copies of every buffer as mode "cold" needs.

    `sets`: number of calls after which all buffers are reused; activations are reused earlier, after enough bytes of others."""

    def __init__(self, problem: Problem, seed: int, device: torch.device, cold_bytes: int) -> None:
        region, layouts, values = problem.region, problem.layouts, problem.values
        self.region, self.values, self.constants = region, values, problem.constants
        self.layouts = {name: layout.from_base() for name, layout in layouts.items()}
        self.bases = {name: layouts[name].base for name, _ in region.wholes}
        self.device = device
        generator = torch.Generator(device).manual_seed(seed)
        self.inputs = {name: drawn(values[name], generator, device) for name in region.inputs}
        for name, whole in region.wholes:
            if name in self.inputs:
                self.inputs[name] = self.inputs[whole][problem.place_of(name)]
        self.expected = reference_results(problem, self.inputs)
        sizes = {name: layouts[name].size * size_of(values[name].dtype) for name in (*region.inputs, *region.outputs)}
        self.activation_sets = copies(sum(sizes.values()), cold_bytes)
        constant_bytes = sum(sizes[name] for name in self.constants if name in sizes)
        self.sets = copies(constant_bytes, cold_bytes) if constant_bytes else self.activation_sets
        self._rows: dict[Any, torch.Tensor] = {}

    def rows(self, name: str, program: Mapping[str, Any]) -> torch.Tensor:
        """The copies of a buffer, one per row; the contents of outputs and workspaces are arbitrary."""
        if name in program["storage"]:
            entry: Storage = program["storage"][name]
            dtype = entry.value.dtype
            if entry.source is None:
                return self._blank(dtype, entry.layout, 1)
            key = (entry.source, entry.view, entry.matrix, entry.numbers, entry.layout, dtype)
            if key not in self._rows:
                self._rows[key] = self._copies(prepared(self.inputs[entry.source], entry), entry.layout, self.sets)
            return self._rows[key]
        if name in self.bases:  # a part of another value
            return self.rows(self.region.memory_of(name), program)[:, self.bases[name] : self.bases[name] + self.layouts[name].size]
        if name not in self._rows:
            count = self.sets if name in self.constants else self.activation_sets
            if name in self.inputs:
                self._rows[name] = self._copies(self.inputs[name], self.layouts[name], count)
            else:
                self._rows[name] = self._blank(self.values[name].dtype, self.layouts[name], count)
        return self._rows[name]

    def is_weight(self, name: str, program: Mapping[str, Any]) -> bool:
        """Whether a buffer holds constants, either unchanged or packed."""
        return name in self.constants or (name in program["storage"] and program["storage"][name].source is not None)

    def _blank(self, dtype: str, layout: Layout, count: int) -> torch.Tensor:
        element = size_of(dtype)
        width = -(-layout.size * element // ALIGNMENT) * ALIGNMENT // element
        whole = torch.zeros(count, max(width, 1), dtype=torch_dtype(dtype), device=self.device)
        return whole[:, : layout.size]

    def _copies(self, tensor: torch.Tensor, layout: Layout, count: int) -> torch.Tensor:
        blank = self._blank(of_torch(tensor.dtype), layout, count)
        write(blank[0], layout, tensor.reshape(layout.shape))
        blank[1:] = blank[0]
        return blank


class Server:
    """State of the process: its device, and the problem of the following requests."""

    coarse_seconds, fine_seconds = COARSE_SECONDS, FINE_SECONDS
    early = False
    """As in `Replay`."""

    def __init__(self, device: int) -> None:
        self.device = torch.device("cuda", device)
        self.problem: DeviceProblem | None = None

    def __call__(self, message: Message) -> Message:
        answers = {"start": self.start, "problem": self.set_problem, "trial": self.trial, "remeasure": self.remeasure}
        try:
            return answers[message["do"]](message)
        except (RuntimeError, TilewrightError) as error:
            self.recover(error)
            raise

    def recover(self, error: BaseException) -> None:
        """Called after an error: raises Fatal if it has left the GPU's context unusable."""
        try:
            self.finish()
        except RuntimeError as fault:
            raise Fatal(f"{(str(error).strip() or 'no message').splitlines()[0]} ({str(fault).splitlines()[0]})") from error

    def finish(self) -> None:
        """Waits until the device has finished."""
        torch.cuda.synchronize(self.device)

    def start(self, message: Message) -> Message:
        machine: Machine = serialisation.decode(message["machine"])
        torch.cuda.set_device(self.device)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.cuda.set_stream(torch.cuda.Stream(self.device))
        self.stream = torch.cuda.current_stream().cuda_stream
        self.driver = system_driver()
        level2 = machine.cache(2)
        self.cold_bytes = CACHE_SIZES * (level2.bytes if level2 is not None else torch.cuda.get_device_properties(self.device).L2_cache_size)
        self.other = torch.zeros(self.cold_bytes // 4, device=self.device)
        for _ in range(200):  # raises the clocks
            self.other.sum()
        self.finish()
        return {"gpu": torch.cuda.get_device_name(self.device), "driver": "{}.{}".format(*self.driver.version), "torch": torch.__version__}

    def set_problem(self, message: Message) -> Message:
        self.problem = None  # frees its memory before the next problem allocates
        self.problem = DeviceProblem(serialisation.decode(message["problem"]), message["seed"], self.device, self.cold_bytes)
        self.finish()
        return {"sets": self.problem.sets}

    def trial(self, message: Message) -> Message:
        assert self.problem is not None
        loaded = self.load(message["program"], message["mode"])
        types = [self.problem.values[name].dtype for name in self.problem.region.outputs]
        tolerance = min((TOLERANCES[dtype] for dtype in types if dtype in TOLERANCES), default=0.0)
        # tile products round packed constants too
        narrow = {value.dtype for value in self.problem.values.values()} | ({AS_TF32} if message["program"]["tf32"] else set())
        tolerance = max(tolerance, narrow_tolerance(narrow))
        try:
            self.once(loaded)
            error = self.error(0)
            if not error <= tolerance:
                return {"error": f"wrong result: relative error {error:.2e} > {tolerance:.0e}", "wrong": True}
            times, stopped = self.coarse(loaded, message["mode"], message.get("limit") or math.inf)
            again = self.error(1 if message["mode"] == "cold" else 0)  # checks a set that the replays have written
            if not again <= tolerance:
                return {"error": f"wrong result when repeated: relative error {again:.2e} > {tolerance:.0e}", "wrong": True}
            return {"times": times, "stopped": stopped, "relative_error": max(error, again)}
        finally:
            self.unload(loaded)

    def remeasure(self, message: Message) -> Message:
        loaded = [self.load(program, message["mode"]) for program in message["programs"]]
        replays = [self.replay(item, self.probe(item, message["mode"]), self.fine_seconds) for item in loaded]
        cold = message["mode"] != "warm"
        times: list[list[float]] = [[] for _ in replays]
        try:
            for replay in replays:
                self.seconds(replay, cold)
            for number in range(message["rounds"]):
                for at in range(len(replays)):
                    which = (at + number) % len(replays)
                    times[which].append(self.seconds(replays[which], cold))
        finally:
            for replay, item in zip(replays, loaded, strict=True):
                replay.destroy()
                self.unload(item)
        return {"times": times}

    def unload(self, loaded: Loaded) -> None:
        with suppress(TilewrightError):  # after a fault every call fails, and the fault itself should be reported
            for module in loaded.modules:
                self.driver.unload_module(module)

    def load(self, data: Mapping[str, Any], mode: str) -> Loaded:
        """Loads a candidate's binary, determines the addresses of its arguments for the mode, and poisons its workspaces and first outputs."""
        assert self.problem is not None
        program, rows = self.buffers(data)
        kernels = {name: decode_kernel(Field(facts, name)) for name, facts in data["kernels"].items()}
        image = Path(data["binary"]).read_bytes() if kernels else b""
        modules = [self.driver.load_module(image) for _ in range(CODE_COPIES if mode == "network" else 1)] if kernels else []
        functions = [{name: self.driver.function(module, name) for name in kernels} for module in modules]
        for own in functions:
            for name, kernel in kernels.items():
                if kernel.shared_bytes:
                    self.driver.allow_shared_bytes(own[name], kernel.shared_bytes)
        runs = self.library(rows, program, mode)
        operators = captured(runs, self.device) if runs else []
        self.poison(rows, program)
        return Loaded(modules, functions, kernels, self.addresses(rows, program, mode), [*rows.values(), *runs], operators)

    def buffers(self, data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The program with its storage, and the copies of every buffer."""
        assert self.problem is not None
        program = {**data, "storage": serialisation.decode(data["storage"]), "library": serialisation.decode(data["library"])}
        library: LibraryCall | None = program["library"]
        used = [view.name for view in library.views] if library is not None else []
        return program, {name: self.problem.rows(name, program) for name in (*used, *(name for _, names, _ in data["calls"] for name in names))}

    def poison(self, rows: Mapping[str, torch.Tensor], program: Mapping[str, Any]) -> None:
        """Poisons workspaces and first outputs."""
        assert self.problem is not None
        for name, entry in rows.items():
            if name in program["storage"] and program["storage"][name].source is None:
                poison(entry[0], program["storage"][name].layout)
        for name in self.problem.region.outputs:
            for row in self.problem.rows(name, program)[:2]:
                poison(row, self.problem.layouts[name])

    def addresses(self, rows: Mapping[str, torch.Tensor], program: Mapping[str, Any], mode: str) -> list[tuple[str, list[list[int]]]]:
        """For every call of a program, its kernel and, for each set of buffers, the addresses of its arguments."""
        assert self.problem is not None
        return [
            (kernel, [[self.row(rows, name, number, mode, program).data_ptr() for name in names] for number in range(self.problem.sets)])
            for kernel, names, _ in program["calls"]
        ]

    def library(self, rows: Mapping[str, torch.Tensor], program: Mapping[str, Any], mode: str) -> list[Callable[[], object]]:
        """For each set of buffers, what runs the program's library call over it; empty if there is none."""
        assert self.problem is not None
        call: LibraryCall | None = program["library"]
        if call is None:
            return []
        sets = [[viewed(self.row(rows, view.name, number, mode, program), view) for view in call.views] for number in range(self.problem.sets)]
        runs: dict[tuple[int, ...], Callable[..., object]] = {}
        calls: list[Callable[[], object]] = []
        for tensors in sets:
            constants = tensors[: len(call.inputs)][call.operator.constants]
            key = tuple(constant.data_ptr() for constant in constants)
            if key not in runs:
                runs[key] = prepared_call(call, tensors[0].dtype, self.device, constants)
            calls.append(partial(runs[key], *tensors))
        return calls

    def row(self, rows: Mapping[str, torch.Tensor], name: str, number: int, mode: str, program: Mapping[str, Any]) -> torch.Tensor:
        """The copy of a buffer that call number `number` uses in the mode."""
        assert self.problem is not None
        moving = mode == "cold" or (mode == "network" and self.problem.is_weight(name, program))
        return rows[name][number % len(rows[name]) if moving else 0]

    def once(self, loaded: Loaded) -> None:
        """Runs one call on the first set of buffers."""
        replay = self.make_replay(loaded, 1)
        try:
            replay.launch(self.stream)
            self.finish()
        finally:
            replay.destroy()

    def error(self, number: int) -> float:
        """The largest relative error of the outputs in one set of buffers; infinite if integers or truth values differ."""
        assert self.problem is not None
        problem = self.problem

        def error_of(name: str) -> float:
            _, relative = errors(unpack(problem.rows(name, {"storage": {}})[number], problem.layouts[name]), problem.expected[name])
            return relative if problem.values[name].dtype in TOLERANCES or not relative else math.inf

        return max(map(error_of, problem.region.outputs))

    def replay(self, loaded: Loaded, once: float, seconds: float) -> Replay:
        count = max(2, min(MOST_CALLS, math.ceil(seconds / max(once, 1e-6))))
        return self.make_replay(loaded, count)

    def make_replay(self, loaded: Loaded, count: int) -> Replay:
        """A replay of `count` calls, ready to be launched."""
        assert self.problem is not None
        return Replay(self.driver, loaded, count, self.problem.sets, self.early)

    def probe(self, loaded: Loaded, mode: str) -> float:
        """Approximate seconds of one call within a replay."""
        assert self.problem is not None
        replay = self.make_replay(loaded, PROBE_CALLS)
        try:
            return self.seconds(replay, mode != "warm")  # the launch also uploads the graph
        finally:
            replay.destroy()

    def coarse(self, loaded: Loaded, mode: str, limit: float) -> tuple[list[float], bool]:
        """Seconds per call for each replay, and False; or a single time, and True, if the candidate takes more than `limit` seconds."""
        first = self.probe(loaded, mode)
        if first > limit:
            first = min(first, self.probe(loaded, mode))  # the host may have been delayed by milliseconds
        if first > limit:
            return [first], True
        replay = self.replay(loaded, first, self.coarse_seconds)
        try:
            self.seconds(replay, mode != "warm")
            return [self.seconds(replay, mode != "warm") for _ in range(COARSE_REPLAYS)], False
        finally:
            replay.destroy()

    def seconds(self, replay: Replay, cold: bool) -> float:
        """Seconds per call in one replay. The preceding work also keeps the GPU busy until the replay is enqueued."""
        if cold:
            self.other.sum()
        else:
            replay.launch(self.stream)
        return self.timed(partial(replay.launch, self.stream)) / replay.count

    @staticmethod
    def timed(launch: Callable[[], None]) -> float:
        """Seconds between two events around the launched work."""
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        launch()
        after.record()
        after.synchronize()
        milliseconds: float = before.elapsed_time(after)
        return milliseconds / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description="Checks and times candidates; see the module's text.")
    parser.add_argument("--device", type=int, default=0)
    serve(Server(parser.parse_args().device))


if __name__ == "__main__":
    main()
