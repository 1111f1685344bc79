"""Compares ways of running one model: checks each against float64, then times them in fair, interleaved turns."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.runtime.verify import errors
from tilewright.stages import Progress

Run = Callable[..., Any]


class Unavailable(Exception):
    """A contender cannot run here; the message says why."""


@dataclass(frozen=True)
class Contender:
    """One way of running a module: `prepare(module, example_inputs)` returns a callable of the inputs.

    `prepare` receives its own copy of the module and may change it; it raises Unavailable if a package is missing.
    """

    name: str
    prepare: Callable[[nn.Module, tuple[Tensor, ...]], Run]


@dataclass(frozen=True)
class Outcome:
    """The result of one contender on one network; times are in seconds, None unless `status` is "measured"."""

    network: str
    contender: str
    status: str  # measured, unavailable, failed, or wrong
    reason: str = ""
    median_seconds: float | None = None
    quartile_seconds: tuple[float, float] | None = None
    minimum_seconds: float | None = None
    calls: int = 0
    preparation_seconds: float | None = None
    relative_error: float | None = None


def as_list(outputs: Any) -> list[Tensor]:
    """The tensors in the result of a module, session or executable."""
    values = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    return [torch.as_tensor(value) for value in values]


def double_precision_outputs(module: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of PyTorch in float64 on the device of the inputs."""
    exact = copy.deepcopy(module).double()
    with torch.inference_mode():
        return as_list(exact(*(x.double() if x.is_floating_point() else x for x in inputs)))


def relative_error(outputs: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """The largest relative error (`runtime.verify.errors`) of the outputs; infinite if shapes differ."""
    if [x.shape for x in outputs] != [x.shape for x in reference]:
        return math.inf
    return max((errors(x.to(exact.device), exact)[1] for x, exact in zip(outputs, reference, strict=True)), default=0.0)


def seconds_of_call(call: Callable[[], object]) -> float:
    """Wall-clock seconds of one synchronous call (CPU)."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def seconds_of_device_call(call: Callable[[], object]) -> float:
    """Seconds between two events around one call on the current CUDA stream."""
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    call()
    after.record()
    after.synchronize()
    milliseconds: float = before.elapsed_time(after)
    return milliseconds / 1e3


def interleaved_seconds(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    seconds_per_turn: float,
    seconds_of: Callable[[Callable[[], object]], float] = seconds_of_call,
    report: Progress = lambda stage, done, total: None,
    failed: Callable[[str, Exception], object] | None = None,
) -> dict[str, list[float]]:
    """Seconds of every timed call, by contender. `report` learns of each turn before it begins. A contender that raises has no further turn and no
    seconds, and `failed` learns of it; without `failed` nobody has one.

    In each round every contender has one turn of at least `seconds_per_turn`, so that machine drift affects all equally; the order rotates. A turn
    starts with two untimed calls, during which the previous contender's threads go to sleep and caches fill. `seconds_of` times one call; a GPU needs
    one that uses events.
    """
    names = list(calls)
    done = 0
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_index in range(rounds):
        shift = round_index % len(names) if names else 0
        for name in names[shift:] + names[:shift]:
            if name not in seconds:
                continue
            report("measuring in turns", done, rounds * len(names))
            done += 1
            try:
                seconds[name] += _turn(calls[name], seconds_per_turn, seconds_of)
            except Exception as error:
                if failed is None:
                    raise
                del seconds[name]
                failed(name, error)
    return seconds


def _turn(call: Callable[[], object], least_seconds: float, seconds_of: Callable[[Callable[[], object]], float]) -> list[float]:
    call()
    call()
    seconds: list[float] = []
    while sum(seconds) < least_seconds:
        seconds.append(seconds_of(call))
    return seconds


def _failed(outcome: Outcome, reason: Exception) -> Outcome:
    first_line = (str(reason).strip() or "no message").splitlines()[0][:300]
    return dataclasses.replace(outcome, status="failed", reason=f"{type(reason).__name__}: {first_line}")


def compare(
    network: str,
    module: nn.Module,
    example_inputs: tuple[Tensor, ...],
    fresh_inputs: tuple[Tensor, ...],
    contenders: Sequence[Contender],
    tolerance: float,
    rounds: int,
    seconds_per_turn: float,
    seconds_of: Callable[[Callable[[], object]], float] = seconds_of_call,
    report: Progress = lambda stage, done, total: None,
    release: Callable[[], object] = lambda: None,
) -> list[Outcome]:
    """Prepares every contender with the example inputs, checks it on the fresh inputs, and times those with correct results. `release` is called
    after each that failed, when nothing refers to what it held, such as a GPU's memory, which the next may need."""
    reference = double_precision_outputs(module, fresh_inputs)
    outcomes: dict[str, Outcome] = {}
    calls: dict[str, Callable[[], object]] = {}
    for number, contender in enumerate(contenders):
        report(f"preparing {contender.name}", number, len(contenders))
        outcome = Outcome(network, contender.name, "measured")
        start = time.perf_counter()
        run = outputs = None
        try:
            run = contender.prepare(copy.deepcopy(module), example_inputs)
            outputs = as_list(run(*fresh_inputs))  # the first call counts as preparation: some contenders compile in it
            error = relative_error(outputs, reference)
        except Unavailable as reason:
            outcome = dataclasses.replace(outcome, status="unavailable", reason=str(reason))
        except Exception as reason:  # a peer's failure is a result, not the end of the run
            outcome = _failed(outcome, reason)
        else:
            outcome = dataclasses.replace(outcome, preparation_seconds=time.perf_counter() - start, relative_error=error)
            if error <= tolerance:
                calls[contender.name] = partial(run, *fresh_inputs)
            else:
                outcome = dataclasses.replace(outcome, status="wrong", reason=f"relative error {error:.2e} > {tolerance:.0e}")
        outcomes[contender.name] = outcome
        run = outputs = None
        if contender.name not in calls:
            release()

    def failed(name: str, reason: Exception) -> None:
        outcomes[name] = _failed(outcomes[name], reason)
        del calls[name]

    for name, seconds in interleaved_seconds(calls, rounds, seconds_per_turn, seconds_of, report, failed).items():
        lower, median, upper = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
        outcomes[name] = dataclasses.replace(
            outcomes[name], median_seconds=median, quartile_seconds=(lower, upper), minimum_seconds=min(seconds),
            calls=len(seconds),
        )  # fmt: skip
    return list(outcomes.values())
