"""The number of threads for which code is planned: an absent CPU has its own number of cores, among all of which work is divided."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil, prod
from typing import Any

import pytest
import torch
from torch import nn

import tilewright
from tilewright import zoo
from tilewright.compile import read
from tilewright.graph.passes import simplify
from tilewright.hardware import is_present, machine, planned_threads
from tilewright.ir.expr import Const
from tilewright.ir.kernel import TRIPS, For, statements
from tilewright.partition.plan import plan_program

WORTH_SECONDS = 2e-5
"""Kernels with a shorter predicted time are not checked: some are one row of a small map."""


def absent() -> list[str]:
    return [name for name in ("neoverse-n1", "cortex-a53", "xeon-sapphire-rapids") if not is_present(machine(name))]


def test_whose_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")  # PyTorch has read it when it was loaded
    monkeypatch.delenv("TILEWRIGHT_THREADS", raising=False)
    with pytorch_threads(3):
        assert planned_threads(machine("native")) == planned_threads(machine("h200")) == 3
    for name in absent():
        assert planned_threads(machine(name)) == machine(name).processors
        assert planned_threads(machine(name), 5) == 5
    monkeypatch.setenv("TILEWRIGHT_THREADS", "7")
    assert {planned_threads(machine(name)) for name in ("native", *absent())} == {7}


@contextmanager
def pytorch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("first", "later"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("dynamic", [None, {"input": {0: "batch"}}])
def test_a_plan_runs_with_the_threads_that_it_is_for(first: int, later: int, dynamic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number that PyTorch has at compilation counts for planning and running, of programs for other sizes too, whatever it is changed to."""
    planned: list[int] = []

    def plan(graph: Any, target: Any, threads: int, *others: Any, **keywords: Any) -> Any:
        planned.append(threads)
        return plan_program(graph, target, threads, *others, **keywords)

    monkeypatch.setenv("OMP_NUM_THREADS", str(later))
    monkeypatch.delenv("TILEWRIGHT_THREADS", raising=False)
    monkeypatch.setattr(sys.modules["tilewright.compile"], "plan_program", plan)
    with pytorch_threads(first):
        executable: Any = tilewright.compile(nn.Linear(4, 3).eval(), (torch.randn(2, 4),), dynamic=dynamic, wait=True)
    with pytorch_threads(later):
        for count in (2, 5) if dynamic else (2,):
            x = torch.randn(count, 4)
            executable(x)
            assert (executable.program(x) if dynamic else executable).threads == first
    assert set(planned) == {first}


class Planned(Exception):
    """Ends planning with the number of threads."""


def test_compilation_asks_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(graph: object, target: object, threads: int, *others: object, **keywords: object) -> None:
        raise Planned(threads)

    monkeypatch.delenv("TILEWRIGHT_THREADS", raising=False)
    monkeypatch.setattr(sys.modules["tilewright.compile"], "plan_program", plan)
    module, x = nn.Conv2d(16, 16, 3).eval(), torch.randn(1, 16, 9, 9)
    for asked, wanted in ((None, machine("neoverse-n1").processors), (6, 6)):
        with pytest.raises(Planned, match=f"^{wanted}$"):
            tilewright.compile(module, (x,), "neoverse-n1", threads=asked)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("threads", [4, 16, 64])
def test_parallel_loops_have_work_for_all(threads: int) -> None:
    """Nested parallel loops count as one; the thread with the most iterations has at most twice the mean."""
    module, inputs = zoo.build("resnet18")
    graph = simplify(read(module.eval(), inputs).graph)[0]
    looked_at = 0
    for part in plan_program(graph, machine("neoverse-n1"), threads).regions:
        if part.predicted_seconds < WORTH_SECONDS:
            continue
        for kernel in part.kernels:
            loops = [s.extent for s in statements(kernel.body) if isinstance(s, For) and s.kind == "parallel"]
            extents = [
                extent.value if isinstance(extent, Const) else kernel.trips for extent in loops if isinstance(extent, Const) or extent == TRIPS
            ]
            assert extents, (part.schedule, kernel.name)
            count = prod(map(int, extents))
            assert ceil(count / threads) * threads <= 2 * count, (part.schedule, extents)
            looked_at += 1
    assert looked_at > 10
