"""The shared measuring code: checks before timing, fair interleaving, and the contents of result files. Time is simulated."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bench import common
from bench.common import Contender, Outcome, Run, Unavailable


def constant_time(call: Callable[[], object]) -> float:
    call()
    return 0.25


def test_relative_error() -> None:
    reference = [torch.tensor([1.0, -4.0]).double()]
    assert common.relative_error([torch.tensor([1.0, -4.0])], reference) == 0
    assert common.relative_error([torch.tensor([2.0, -4.0])], reference) == 0.25
    assert common.relative_error([torch.tensor([float("nan"), -4.0])], reference) == float("inf")
    assert common.relative_error([torch.tensor([1.0])], reference) == float("inf")
    assert common.relative_error([], reference) == float("inf")
    zeros = [torch.zeros(2, 3, dtype=torch.float64)]
    assert common.relative_error([torch.zeros(2, 3)], zeros) == 0  # a ReLU of only negative sums
    assert common.relative_error([torch.full((2, 3), 1e-3)], zeros) > 1


def test_turns_rotate_and_are_equally_long() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = common.interleaved_seconds(calls, rounds=3, seconds_per_turn=0.5, seconds_of=constant_time)
    assert {name: len(times) for name, times in seconds.items()} == {"a": 6, "b": 6, "c": 6}
    assert "".join(order[::4]) == "abcbcacab"  # two untimed and two timed calls per turn


def test_only_right_contenders_are_timed() -> None:
    def right(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
        return module

    def wrong(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
        remembered = module(*inputs)
        return lambda *values: remembered

    def absent(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
        raise Unavailable("not installed")

    def broken(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
        raise ValueError("no such layout\nsecond line")

    functions = (right, wrong, absent, broken)
    contenders = [Contender(function.__name__, function) for function in functions]
    example, fresh = (torch.randn(2, 3),), (torch.randn(2, 3),)
    outcomes = common.compare("net", nn.Linear(3, 4), example, fresh, contenders, 1e-5, 2, 0.5, constant_time)
    assert [outcome.status for outcome in outcomes] == ["measured", "wrong", "unavailable", "failed"]
    assert outcomes[0].median_seconds == 0.25 and outcomes[0].calls == 4
    assert all(outcome.median_seconds is None for outcome in outcomes[1:])
    assert outcomes[3].reason == "ValueError: no such layout"


def test_a_contender_that_fails_stops_nobody_and_holds_nothing() -> None:
    """In its preparation, or in a turn."""
    held: list[weakref.ref[Tensor]] = []

    def exhausting(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
        kept = torch.zeros(4)
        held.append(weakref.ref(kept))
        raise torch.OutOfMemoryError(f"no memory beside {kept.numel()} elements")

    def tiring(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
        calls = iter(range(6))  # one for the check, four in the first turn
        return lambda *values: (next(calls), module(*values))[1]

    def right(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
        return module

    released: list[list[object]] = []
    contenders = [Contender(function.__name__, function) for function in (exhausting, tiring, right)]
    given = (torch.randn(2, 3),)
    outcomes = common.compare(
        "net", nn.Linear(3, 4), given, given, contenders, 1e-5, 3, 0.5, constant_time, release=lambda: released.append([each() for each in held])
    )
    assert released == [[None]], "the memory of what failed is free when it is released"
    assert [(outcome.contender, outcome.status, outcome.calls) for outcome in outcomes] == [
        ("exhausting", "failed", 0), ("tiring", "failed", 0), ("right", "measured", 6),
    ]  # fmt: skip
    assert outcomes[0].reason == "OutOfMemoryError: no memory beside 4 elements" and outcomes[1].reason.startswith("StopIteration")
    assert outcomes[1].median_seconds is None


def test_result_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(
        "sys.orig_argv", ["/usr/bin/python3", "scripts/check.py", "run", str(tmp_path), "--data", str(tmp_path / "a.json"), "--name", "x"]
    )
    path = common.write_results("trial", {"rounds": 2}, [Outcome("net", "eager", "measured", median_seconds=0.5)])
    document = json.loads(path.read_text())
    assert document["results"][0]["median_seconds"] == 0.5
    assert document["command"] == ["python", "scripts/check.py", "run", "FOLDER", "--data", "FOLDER/a.json", "--name", "x"]
    assert document["machine"]["cpu"] and document["versions"]["torch"] == torch.__version__
    assert set(document) == {"command", "date", "commit", "machine", "versions", "settings", "results"}
