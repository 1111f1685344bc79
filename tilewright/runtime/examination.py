"""An executable examined: each stored value compared with float64, each region's time within whole calls, and the times of whole calls.

Nothing else uses the executable meanwhile: `Executable.verify` and `Executable.profile` see to that.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tilewright.runtime.profile import Profile, Span, profile_of
from tilewright.runtime.slices import completions
from tilewright.runtime.verify import AS_TF32, Verification, compare, narrow_tolerance, reference_values, stored_types
from tilewright.system.counters import Counters

if TYPE_CHECKING:
    from tilewright.runtime.executable import Engine, Executable

T = TypeVar("T")
WARM_UP_CALLS = 2
"""Untimed calls at the start of a profile."""
COUNTED_CALLS = 5
"""Calls in which a profile counts events of the processor, region by region."""


def verified(executable: Executable, engine: Engine, leaves: Sequence[Any], tolerance: float | None) -> Verification:
    """Every stored value compared with the graph in float64, see `Executable.verify`."""
    program, buffers = executable.image.program, engine.buffers
    inputs, outputs = _unchanged(executable, leaves), executable._allocate()
    addresses = executable._admission.addresses(inputs, outputs)
    # a value that several regions write (a loop's final state, a concatenation) is complete only after the last of them
    last = completions(program)
    names = {name for name in last if buffers.is_stored(name)}
    # results of PyTorch operators that nobody reads may not even be unique (the signs of singular vectors)
    read = {name for node in program.graph.nodes for name in node.inputs} | set(program.graph.outputs)
    names -= {name for node in program.graph.nodes if node.operator == "torch" for name in node.outputs if name not in read}
    if tolerance is None:
        types = stored_types(program.storage.values())
        rounded = {AS_TF32} if any(kernel.tf32 for kernel in program.kernels.values()) else set()
        tolerance = narrow_tolerance(types | rounded) or None
    expected = reference_values(program.graph, inputs, frozenset(names))
    rows = []
    complete: dict[int, list[str]] = {}
    for name, index in last.items():
        complete.setdefault(index, []).append(name)
    for index, region in enumerate(program.regions):
        try:
            engine.bind(addresses)
            executable._run_region(engine, index, inputs, outputs)
            engine.finish()
        except BaseException:
            engine.abandon()
            raise
        for name in complete.get(index, ()):
            if name in expected and (region.calls or region.library is not None or region.kind == "torch"):
                got = buffers.value(name, inputs, outputs)
                rows.append(compare(region.name, index, program.graph.values[name], got, expected[name], tolerance))
    return Verification(tuple(rows))


def _unchanged(executable: Executable, leaves: Sequence[Any]) -> list[torch.Tensor]:
    """The inputs of a call, with copies of those that it would update in place."""
    program = executable.image.program
    admitted = zip(program.graph.inputs, executable._admission.admit(leaves), strict=True)
    return [tensor.clone() if name in program.updated else tensor for name, tensor in admitted]


def _called(executable: Executable, engine: Engine, inputs: Sequence[torch.Tensor], run: Callable[..., T]) -> tuple[Any, Any, T, list[torch.Tensor]]:
    """Runs one call on the graph's inputs by the function `run`: the moments at which it began and ended, what the function returned, and the
    results."""
    start = engine.moment()
    outputs = executable._allocate()
    try:
        engine.bind(executable._admission.addresses(inputs, outputs))
        found = run(engine, inputs, outputs)
        engine.finish()
    except BaseException:
        engine.abandon()
        raise
    return start, engine.moment(), found, outputs


class WholeCalls:
    """Calls of an executable on the same inputs of its graph, which are changed where calls update them.

    Its methods raise IndexOutOfRange for an index out of range."""

    def __init__(self, executable: Executable, inputs: Sequence[torch.Tensor]) -> None:
        self._executable, self._engine, self._inputs = executable, executable._require_engine(), inputs

    def results(self) -> dict[str, torch.Tensor]:
        """The graph's results of one call, by name."""
        *_, outputs = _called(self._executable, self._engine, self._inputs, self._executable._run_segments)
        self._engine.check_indices(True)
        names = self._executable.image.program.graph.outputs
        return {name: self._engine.buffers.value(name, self._inputs, outputs) for name in names}

    def seconds(self, count: int, before: Callable[[], object] = lambda: None) -> list[float]:
        """The seconds of each of `count` successive calls, all of which the host has enqueued when a GPU begins the first. `before` runs before each
        of them, untimed."""
        self._engine.idle(count * (len(self._executable._segments) + 2))
        moments = []
        for _ in range(count):
            before()
            moments.append(_called(self._executable, self._engine, self._inputs, self._executable._run_segments)[:2])
        self._engine.check_indices(True)
        return [self._engine.seconds(*both) for both in moments]


def profiled(executable: Executable, engine: Engine, leaves: Sequence[Any], repetitions: int) -> Profile:
    """Calls without and with clocks between regions, in turns, see `Executable.profile`."""
    inputs = _unchanged(executable, leaves)

    def call(run: Callable[..., Any]) -> tuple[Any, Any, Any]:
        start, end, found, _ = _called(executable, engine, inputs, run)
        engine.check_indices(True)
        return start, end, found

    def clocked(engine: Engine, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[tuple[int, Sequence[Any]]]:
        """Runs everything; returns the first regions of segments, each with the moment at which it began and those at which each region ended."""
        found = []
        for kind, first, last in executable._segments:
            if kind == "kernels":
                moments = engine.run_timed(first, last)
            else:
                begin = engine.moment()
                executable._run_operators(engine, first, inputs, outputs)
                moments = [begin, engine.moment()]
            found.append((first, moments))
        return found

    plain, calls, clocked_seconds, clocks = [], [], [], []
    for number in range(-WARM_UP_CALLS, repetitions):
        start, end, _ = call(executable._run_segments)
        whole = engine.seconds(start, end)
        start, end, found = call(clocked)
        spans = []
        for first, moments in found:
            seconds = [engine.seconds(start, moment) for moment in moments]
            spans += [Span(region, *pair) for region, pair in enumerate(pairwise(seconds), first)]
        if number >= 0:
            plain.append(whole)
            calls.append(spans)
            clocked_seconds.append(engine.seconds(start, end))
            clocks.append(engine.clock_seconds())
    machine = executable.image.machine
    counts, uncounted = ({}, {}) if machine.is_gpu else _counted(executable, engine, inputs, sorted({span.region for span in calls[0]}))
    # before its clocks a GPU idles, so that the duration of such a call says nothing
    whole_seconds = () if machine.is_gpu else clocked_seconds
    return profile_of(executable.image.program, machine.name, plain, calls, whole_seconds, statistics.median(clocks), counts, uncounted)


def _counted(
    executable: Executable, engine: Engine, inputs: Sequence[torch.Tensor], regions: Sequence[int]
) -> tuple[dict[int, dict[str, float]], dict[str, str]]:
    """How often each event occurs in each of these regions, the median of several calls, without what it takes to run nothing; and why other events
    are not counted. Threads are those that the calls before have started."""
    with Counters() as counters:
        if not counters.events:
            return {}, counters.missing
        found: dict[int, list[dict[str, float]]] = {region: [] for region in regions}
        nothing: list[dict[str, float]] = []

        def during(run: Callable[[], object]) -> dict[str, float]:
            before = counters.read()
            run()
            after = counters.read()
            return {event: after[event] - before[event] for event in before}

        def call(engine: Engine, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
            nothing.append(during(partial(engine.run, 0, 0)))
            for region in regions:
                found[region].append(during(partial(executable._run_region, engine, region, inputs, outputs)))

        for _ in range(COUNTED_CALLS):
            _called(executable, engine, inputs, call)
        idle = {event: min(count[event] for count in nothing) for event in counters.events}
        medians = {
            region: {event: max(statistics.median(count[event] for count in counts) - idle[event], 0.0) for event in counters.events}
            for region, counts in found.items()
        }
        return medians, counters.missing
