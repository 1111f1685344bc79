"""Programs for new sizes that have the schedules of others, the better ones that take their places, and what makes both in the background."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import tilewright
from tests.batches import check
from tilewright.compile import read, source_files
from tilewright.errors import UnsupportedOption
from tilewright.frontend.sized import ModuleModel
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.partition import merges
from tilewright.partition.merges import Memory
from tilewright.partition.plan import divide, plan_program
from tilewright.runtime.builds import Builds, wait_for_all
from tilewright.runtime.dynamic import DynamicExecutable
from tilewright.toolchain.cache import kernel_key
from tilewright.toolchain.compilers import compiler_for


def network() -> nn.Module:
    """Chains, Winograd, rows and products on all images, and a value of each image."""
    layers = [
        nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.ReLU(), nn.Conv2d(16, 32, 1), nn.GELU(),
        nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 20), nn.LayerNorm(20), nn.Softmax(-1),
    ]  # fmt: skip
    return nn.Sequential(*layers).eval()


def test_nothing_is_predicted_for_sizes_planned_as_before() -> None:
    cpu, memory = machine("x86-avx512"), Memory()
    model = ModuleModel(network(), (torch.randn(4, 3, 40, 40),), None, [{0: "batch"}])
    compiler = compiler_for(cpu, "c")

    def planned(batch: int, **options: Any) -> tuple[list[str], set[str]]:
        program = plan_program(simplify(model.bind((batch,)).graph)[0], cpu, 2, memory=memory, **options)
        return [region.schedule for region in program.regions], {kernel_key(source, compiler) for source in source_files(program, cpu)}

    schedules, kernels = planned(4)
    assert any(schedule.startswith("strips") for schedule in schedules)
    fault = mock.Mock(side_effect=AssertionError("something is predicted"))
    with mock.patch("tilewright.partition.strip_judge.StripJudge.best", fault):
        again, same = planned(6, as_before=True, chooser=fault, models=fault)
    assert not fault.called
    assert again == schedules
    assert len(same - kernels) <= 2  # of few images, whose loops are for one thread


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("kept", [0.0, 10.0])
def test_attention_of_another_size_joins_as_before_where_that_is_nearly_as_fast(kept: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions of both ways are often close, and what is decided otherwise for the next size has other regions, whose kernels no size had."""
    monkeypatch.setattr(merges, "KEPT", kept)
    queries = [torch.randn(batch, 6, 197, 64) for batch in (1, 3)]
    graphs = [simplify(read(Attention(), (x, x, x)).graph)[0] for x in queries]
    memory = Memory()
    divide(graphs[0], machine("x86-avx2"), 1, memory=memory)
    results, taken = max(memory.joins.items(), key=lambda item: len(item[0]))
    memory.joins[results] = not taken
    (decision,) = (each for each in divide(graphs[1], machine("x86-avx2"), 1, memory=memory).search if each.results == results)
    (alone,) = (each for each in divide(graphs[1], machine("x86-avx2"), 1).search if each.results == results)
    assert decision.taken == (alone.taken if kept == 0 else not taken)
    assert ("as for another size" in decision.text) == (decision.taken != alone.taken)
    assert memory.joins[results] == decision.taken


def test_rows_longer_than_a_tile_of_the_size_before() -> None:
    """Softmax in the tiles of a product, whose rows are longer for the next size: the product has another schedule."""

    class Scores(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x @ x.transpose(-1, -2), -1)

    cpu, memory = machine("x86-avx512"), Memory()
    model = ModuleModel(Scores(), (torch.randn(5, 40, 64),), None, [{1: "rows"}])
    for rows in (40, 96):
        program = plan_program(simplify(model.bind((rows,)).graph)[0], cpu, 1, memory=memory, as_before=rows != 40)
        assert any(name.startswith("contraction") for name in program.kernels())
        assert not any(lowered.region.kind == "torch" for lowered in program.regions)


@pytest.mark.better_programs
def test_a_better_program_takes_the_place_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.runtime.dynamic.REST_SECONDS", 0.0)
    begin, make = threading.Event(), DynamicExecutable._make_better

    def once_begun(executable: DynamicExecutable, served: Any) -> Any:
        begin.wait()
        return make(executable, served)

    monkeypatch.setattr(DynamicExecutable, "_make_better", once_begun)
    module = network()
    executable = tilewright.compile(module, torch.randn(2, 3, 40, 40), dynamic=[{0: "batch"}], wait=True, threads=1)
    inputs = [torch.randn(batch, 3, 40, 40) for batch in (2, 9, 1)]
    for x in inputs:
        check(module, executable, x)
    programs = dict(executable._programs)
    assert [program.as_before for program in programs.values()] == [False, True, True]
    assert "has the schedule of other sizes; not predicted for these" in str(executable.plan.rows)
    begin.set()
    wait_for_all()
    assert not any(program.as_before for program in executable._programs.values())
    assert executable._programs.keys() == programs.keys()
    replaced = [program for served, program in programs.items() if executable._programs[served] is not program]
    assert len(replaced) == 2 and all(program.evicted for program in replaced)
    for x in inputs:
        check(module, executable, x)
    assert "not predicted" not in str(executable.plan.rows)


def test_a_program_of_its_own_is_predicted() -> None:
    module = network()
    executable = tilewright.compile(module, torch.randn(2, 3, 40, 40), dynamic=[{0: "batch"}], wait=True, threads=1)
    x = torch.randn(5, 3, 40, 40)
    check(module, executable, x)
    rows = executable.program(x).plan.rows
    assert "not predicted" not in str(rows) and all(row.predicted_seconds for row in rows if row.kernels)
    check(module, executable, x)


def test_programs_that_are_not_quick_are_predicted_at_once() -> None:
    module = network()
    executable = tilewright.compile(module, torch.randn(2, 3, 40, 40), dynamic=[{0: "batch"}], wait=True, threads=1, quick=False)
    check(module, executable, torch.randn(5, 3, 40, 40))
    assert not any(program.as_before for program in executable._programs.values())
    with pytest.raises(UnsupportedOption, match="quick is 1"):
        options: Any = {"quick": 1}
        tilewright.compile(module, torch.randn(2, 3, 40, 40), dynamic=[{0: "batch"}], **options)


# Builds


def test_builds_begin_after_a_rest() -> None:
    begun: list[tuple[int, float]] = []
    builds: Builds[int, None] = Builds(lambda key: begun.append((key, time.monotonic())), 4, rest=0.3)
    builds.request(1)
    time.sleep(0.1)
    last = time.monotonic()
    builds.request(2)
    builds.wait()
    assert [key for key, _ in begun] == [2, 1]
    assert all(at >= last + 0.3 for _, at in begun)


def test_what_is_made_may_be_given_up() -> None:
    begun = threading.Event()

    def endless(key: int) -> None:
        begun.set()
        while True:
            try:
                builds.check("stage", 0, 0)
            except Exception as fault:  # as one part of what is made contains the faults of another
                raise AssertionError("it is no fault") from fault
            time.sleep(0.01)

    builds: Builds[int, None] = Builds(endless, 4)
    build = builds.request(1)
    assert begun.wait(60)
    builds.finish()
    assert build.done.is_set() and build.made is None and build.error is None
    builds.wait()
    assert builds.request(2).done.is_set()


def test_nothing_is_begun_once_closed() -> None:
    begun: list[int] = []
    builds: Builds[int, None] = Builds(begun.append, 4, rest=60)
    build = builds.request(1)
    builds.finish()
    assert build.done.wait(60)
    builds.wait()
    assert not begun
