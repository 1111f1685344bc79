"""Recurrent layers in one kernel on a CPU: against PyTorch in float64, under any schedule and number of threads, and what is not of that form."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from onnx import helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

import tilewright
from tests.compiled import Case, check_native, compare
from tests.draws import IN_THIRDS, draws
from tests.interpreted import returned, run_program
from tests.sample_artifacts import Stepwise
from tilewright.codegen.c import print_c
from tilewright.codegen.interpreter import run
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.kernel import For, Kernel
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Program
from tilewright.partition.context import Chooser
from tilewright.partition.plan import plan_program
from tilewright.selection.choice import choose, rank
from tilewright.selection.ranking import Choice

KINDS: dict[str, Callable[..., nn.Module]] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "tanh": nn.RNN,
    "relu": partial(nn.RNN, nonlinearity="relu"),
}
TARGETS = tuple(machine(name) for name in ("neoverse-n1", "x86-avx2", "x86-avx512"))
once = settings(max_examples=draws(25), deadline=None, derandomize=True, phases=(Phase.generate,))


def planned(module: nn.Module, x: Tensor, target: Machine, threads: int, chooser: Chooser = choose, persistent: bool | None = None) -> Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan_program(simplify(import_module(module.eval(), (x,)).graph)[0], target, threads, chooser, persistent=persistent)


def loops(program: Program) -> list[Lowered]:
    return [lowered for lowered in program.regions if lowered.region.kind == "loop"]


def interpreted(module: nn.Module, x: Tensor, target: Machine, threads: int, chooser: Chooser = choose, persistent: bool | None = None) -> Program:
    """The program, after a comparison with PyTorch in float64 and without reports of the interpreter."""
    program = planned(module, x, target, threads, chooser, persistent)
    results, faults = run_program(program, {program.graph.inputs[0]: x.numpy()})
    assert not faults, "\n".join(faults)
    imported = import_module(module, (x,))
    compare(Case("recurrence", module, (x,)), returned(imported, [results[name] for name in program.graph.outputs], (x,)), (x,))
    return program


@st.composite
def layers(draw: st.DrawFn, features: Sequence[int] = (1, 3, 16), hidden: Sequence[int] = (3, 4, 16, 19, 40)) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(draw(st.integers(0, 1000)))
    batch_first, directions = draw(st.booleans()), draw(st.booleans())
    length, batch, wide = draw(st.sampled_from([2, 3, 5])), draw(st.sampled_from([1, 2, 3, 7])), draw(st.sampled_from(features))
    kind = KINDS[draw(st.sampled_from(list(KINDS)))]
    module = kind(
        wide,
        draw(st.sampled_from(hidden)),
        num_layers=draw(st.integers(1, 2)),
        bias=draw(st.booleans()),
        batch_first=batch_first,
        bidirectional=directions,
    )
    return module, torch.randn(batch, length, wide) if batch_first else torch.randn(length, batch, wide)


@once
@given(layer=layers(), target=st.sampled_from(TARGETS), threads=st.sampled_from([1, 2, 3, 8]), seed=st.integers(0, 10_000))
def test_any_schedule_without_races(layer: Any, target: Machine, threads: int, seed: int) -> None:
    """Whatever the models would prefer: each loop takes a random candidate of its space."""

    def chosen(problem: Problem, target: Machine, threads: int) -> Choice:
        ranking = rank(problem, target, threads)
        if problem.region.kind != "loop":
            return ranking.first()
        return replace(ranking.choice(seed % ranking.candidates), seconds=0.0)

    module, x = layer
    program = interpreted(module, x, target, threads, chosen)
    assert all("in one kernel" in lowered.schedule and lowered.repeat == 1 for lowered in loops(program)) and loops(program)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("kind", KINDS)
def test_models_choose_one_kernel(kind: str) -> None:
    """Loops of layers of usual sizes are one kernel, with the predictions for both ways as the reason."""
    for hidden, batch in ((128, 1), (512, 1), (512, 16)):
        for target in TARGETS:
            for lowered in loops(planned(KINDS[kind](hidden, hidden), torch.randn(20, batch, hidden), target, 4)):
                (reason,) = (text for text in lowered.region.reasons if text.startswith("predicted"))
                one, each = (
                    float(part.split()[-2]) for part in reason.partition(" for kernels")[0].replace(" for all steps in one kernel", "").split(", ")
                )
                assert "in one kernel" in lowered.schedule and one < each and len(lowered.kernels) == 1


@IN_THIRDS
def test_native(third: int) -> None:
    """Compiled, over poisoned memory, on two threads: several shapes, states as inputs, units that fill no vector."""
    cases = []
    for kind, make in KINDS.items():
        torch.manual_seed(4)
        for hidden, batch in ((19, 1), (64, 1), (33, 5)):
            cases.append(Case(f"{kind} {hidden} {batch}", make(7, hidden, bidirectional=True), (torch.randn(6, batch, 7),)))
    check_native([case for number, case in enumerate(cases) if (number + number // 3) % 3 == third])  # each kind, and each shape


@pytest.mark.parametrize("hidden", [19, 96])
def test_any_number_of_threads(hidden: int) -> None:
    """A kernel planned for three threads gives the same bits on fewer and on more."""
    torch.manual_seed(5)
    module, x = nn.LSTM(8, hidden).eval(), torch.randn(9, 2, 8)
    executable = tilewright.compile(module, (x,), threads=3)
    found, _ = executable(x)
    compare(Case("three threads", module, (x,)), executable(x), (x,))
    for threads in (1, 2, 3, 5):
        executable.threads = threads
        assert torch.equal(executable(x)[0], found)


# --- the team of threads ------------------------------------------------------------------------------------------------


def kernel_of(module: nn.Module, x: Tensor, threads: int = 2) -> Kernel:
    def shared(problem: Problem, target: Machine, threads: int) -> Choice:
        ranking = rank(problem, target, threads)
        if problem.region.kind != "loop":
            return ranking.first()
        return replace(next(choice for choice in ranking if choice.schedule.workers == threads), seconds=0.0)

    (lowered,) = loops(planned(module, x, machine("x86-avx512"), threads, shared))
    (kernel,) = lowered.kernels
    return kernel


def faults(kernel: Kernel) -> tuple[str, ...]:
    arguments = [np.zeros(buffer.size, np.float32) for buffer in kernel.parameters]
    return run(kernel, arguments, (), [buffer.name for buffer in kernel.parameters]).faults


def test_one_parallel_region_around_all_steps() -> None:
    kernel = kernel_of(nn.LSTM(16, 64), torch.randn(5, 1, 16))
    text = print_c([kernel])
    assert text.count("#pragma omp parallel\n") == 1 and text.count("#pragma omp for schedule(static)\n") == 1
    assert text.index("#pragma omp parallel\n") < text.index("< 5; ++t") < text.index("#pragma omp for")
    assert not faults(kernel)


def test_a_missing_barrier_is_a_race() -> None:
    """Threads that pass over all steps without meeting read states that others may not have stored."""
    kernel = kernel_of(nn.LSTM(16, 64), torch.randn(5, 1, 16))
    steps = kernel.body
    assert isinstance(steps, For) and steps.kind == "team" and isinstance(steps.body, For) and steps.body.kind == "parallel"
    apart = replace(steps.body, body=replace(steps, kind="serial", body=steps.body.body))
    assert any("race" in fault for fault in faults(replace(kernel, body=apart)))


def test_stores_of_a_whole_team_are_refused() -> None:
    kernel = kernel_of(nn.LSTM(16, 64), torch.randn(5, 1, 16))
    steps = kernel.body
    assert isinstance(steps, For) and isinstance(steps.body, For)
    with pytest.raises(ValueError, match="every thread of a team would store to out"):
        print_c([replace(kernel, body=replace(steps, body=replace(steps.body, kind="serial")))])


# --- what keeps a kernel for each step ------------------------------------------------------------------------------------


def reasons(program: Program) -> str:
    return " ".join(reason for lowered in loops(program) for reason in lowered.region.reasons)


def test_computed_weights() -> None:
    module = Stepwise()
    x = torch.randn(5, 2, 4)
    assert "kernels for each step: its weights are computed" in reasons(interpreted(module, x, machine("x86-avx512"), 2))


def test_a_product_of_a_product() -> None:
    """ONNX's GRU with linear_before_reset = 0: the candidate state multiplies weights by what another product gates."""
    hidden, features = 5, 3
    generator = np.random.default_rng(1)
    weights: dict[str, Any] = {
        name: generator.standard_normal(shape).astype(np.float32) for name, shape in (("W", (1, 15, features)), ("R", (1, 15, hidden)))
    }
    node = helper.make_node("GRU", ["X", "W", "R"], ["Y"], hidden_size=hidden)
    info = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in (("X", (4, 2, features)), ("Y", None))]
    graph = helper.make_graph([node], "gru", info[:1], info[1:], [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    executable = tilewright.compile(model, threads=2)
    (loop,) = (row for row in executable.plan.rows if row.kind == "loop")
    assert any("a sum of products reads another of the same step" in reason for reason in loop.reasons) and loop.repeat == 4
    x = generator.standard_normal((4, 2, features)).astype(np.float32)
    (found,) = torch.utils._pytree.tree_leaves(executable(torch.from_numpy(x)))
    reference: Any
    (reference,) = ReferenceEvaluator(model).run(None, {"X": x})
    np.testing.assert_allclose(found.numpy(), reference, rtol=1e-5, atol=1e-5)


def test_slower_in_one_kernel() -> None:
    """If the models predict so, each step has its kernels; the reason states both times."""

    def chosen(problem: Problem, target: Machine, threads: int) -> Choice:
        found = choose(problem, target, threads)
        return replace(found, seconds=1.0) if problem.region.kind == "loop" else found

    program = interpreted(nn.LSTM(4, 19), torch.randn(3, 2, 4), machine("x86-avx2"), 2, chosen)
    assert "predicted 1e+06 us for all steps in one kernel" in reasons(program)
    (decision,) = program.search
    assert not decision.taken and "predicted 1e+06 us for all steps in one kernel" in decision.text and "for kernels of one step" in decision.text
    assert all(lowered.repeat == 3 for lowered in loops(program))


def test_on_a_gpu_steps_stay_apart_until_barriers_are_measured() -> None:
    program = planned(nn.LSTM(4, 19), torch.randn(3, 2, 4), machine("a100"), 1)
    assert "kernels for each step: a barrier of all blocks was not measured on a100" in reasons(program) and all(
        lowered.repeat == 3 for lowered in loops(program)
    )
    assert [decision.taken for decision in program.search] == [False]
