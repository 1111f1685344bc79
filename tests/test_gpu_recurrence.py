"""Recurrent layers in one kernel of a GPU: against PyTorch in float64 under any schedule, in the interpreter; and barriers of a grid."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves

import tilewright
from tests.compiled import Case, compare
from tests.draws import draws
from tests.runtime_programs import ProgramBuilder
from tests.statements import without
from tests.test_gpu_half import check as check_half
from tests.test_gpu_runtime import FakeStream, fake_engine
from tests.test_gpu_runtime import stream as stream
from tests.test_recurrence import KINDS, interpreted, layers, loops, planned, reasons
from tilewright.analysis.gpu.warps import accesses
from tilewright.codegen.cuda import print_cuda, shared_bytes
from tilewright.codegen.interpreter import run
from tilewright.codegen.intrinsics.barriers import COUNTER, cluster_arrive, cluster_barrier, cluster_store, cluster_wait, grid_barrier
from tilewright.compile import source_files
from tilewright.hardware import machine
from tilewright.hardware.calibration import GpuRecurrence
from tilewright.hardware.machine import Machine
from tilewright.ir.expr import ZERO, Const, Load, Var, index_const, unary
from tilewright.ir.kernel import Allocate, Block, Buffer, For, If, Invoke, Kernel, Launch, Let, Place, Statement, Store, block_variable, statements
from tilewright.ir.problem import Problem
from tilewright.kernels.gpu.recurrence import estimate
from tilewright.kernels.gpu.recurrence.schema import RECURRENCE
from tilewright.kernels.gpu.recurrence.space import GpuRecurrenceSchedule, shared_bytes_of, thread_weights
from tilewright.kernels.gpu.recurrence.steps import without_division
from tilewright.kernels.recurrence_form import RecurrenceFacts
from tilewright.partition.context import Chooser
from tilewright.partition.plan import plan_program
from tilewright.runtime.driver import LAUNCH_COOPERATIVE
from tilewright.runtime.loadable import LoadableProgram, loadable, loadable_kernel
from tilewright.selection.choice import choose, rank
from tilewright.selection.ranking import Choice
from tilewright.toolchain.binary import Binary
from tilewright.toolchain.build import compile_kernels

H200 = machine("h200")
FEW = replace(H200, processors=4)
"""So few that blocks own several units, and the interpreter has few blocks."""


def drawn(seed: int, keep: Callable[[Any], bool] = lambda schedule: True) -> Chooser:
    """Each loop takes a random candidate of its space, whatever the models prefer."""

    def chosen(problem: Problem, target: Machine, threads: int) -> Choice:
        if problem.region.kind != "loop":
            return choose(problem, target, threads)
        found = [choice for choice in rank(problem, target, threads) if keep(choice.schedule)]
        return replace(found[seed % len(found)], seconds=0.0)

    return chosen


@settings(max_examples=draws(12), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(layer=layers(hidden=(3, 4, 16, 19, 40)), target=st.sampled_from([FEW, H200]), seed=st.integers(0, 10_000))
def test_any_schedule_without_races(layer: Any, target: Machine, seed: int) -> None:
    module, x = layer
    program = interpreted(module, x, target, 1, drawn(seed), persistent=True)
    assert all("in one kernel" in lowered.schedule and lowered.repeat == 1 for lowered in loops(program)) and loops(program)


@settings(max_examples=draws(12), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(layer=layers(hidden=(16, 22, 40)), seed=st.integers(0, 10_000), cluster=st.sampled_from([1, 2, 4, 8]))
def test_any_cluster_without_races(layer: Any, seed: int, cluster: int) -> None:
    """Blocks read states from their own shared memory only."""
    module, x = layer
    program = interpreted(module, x, H200, 1, drawn(seed, lambda schedule: schedule.cluster == cluster), persistent=True)
    for lowered in loops(program):
        (kernel,) = lowered.kernels
        code = print_cuda([kernel])
        assert kernel.cluster == cluster and not kernel.cooperative and "tw_cluster_load" not in code
        assert {access.space for access in accesses(kernel) if access.buffer == "states" and access.kind == "load"} == {"shared"}
        assert ("tw_cluster_address(states + " in code) == (cluster > 1) and ("barrier.cluster" in code) == (cluster > 1)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind, hidden", [("LSTM", 64), ("GRU", 64), ("GRU", 96), ("LSTM", 33)])
def test_states_of_16_bits_are_read_in_pairs(kind: str, hidden: int, dtype: torch.dtype) -> None:
    """Where a state has whole pairs, which 32 threads need not divide evenly. Operands of the next step are converted behind the barrier."""
    torch.manual_seed(hidden)
    module, x = KINDS[kind](24, hidden).to(dtype).eval(), torch.randn(4, 2, 24).to(dtype)

    def divided(schedule: Any) -> bool:
        return isinstance(schedule, GpuRecurrenceSchedule) and schedule.threads == 32 * schedule.groups > 32 and not schedule.cluster

    program = planned(module, x, replace(H200, processors=9), 1, drawn(0, divided), True)
    (lowered,) = loops(program)
    kernel = lowered.kernels[-1]
    code = print_cuda([kernel])
    assert kernel.cooperative and ("tw_load_relaxed_2x16" in code) == (hidden % 2 == 0) and ("tw_load_relaxed_16" in code) == hidden % 2
    operands = {s.buffer.dtype for s in statements(kernel.body) if isinstance(s, Allocate) and s.buffer.name.startswith("operand_")}
    assert operands == {{torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]}
    check_half(module, (x,), program)


@pytest.mark.parametrize("shared", [0, 1])
def test_weights_in_registers_or_shared_memory(shared: int) -> None:
    torch.manual_seed(3)
    wide = drawn(0, lambda schedule: schedule.shared == shared and schedule.threads == 64 and schedule.units > 2 and not schedule.cluster)
    program = interpreted(nn.LSTM(5, 33), torch.randn(4, 2, 5), replace(H200, processors=9), 1, wide, persistent=True)
    (lowered,) = loops(program)
    assert ("shared memory" in lowered.schedule) == bool(shared) and lowered.kernels[-1].cooperative


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_models_choose_one_kernel(kind: str) -> None:
    """Of usual sizes, with the predictions for both ways as the reason; all blocks are resident; small layers are clusters, which need no counter."""
    for hidden, batch in ((128, 1), (256, 1), (512, 1), (512, 4)):
        program = planned(KINDS[kind](hidden, hidden), torch.randn(20, batch, hidden), H200, 1, persistent=True)
        (lowered,) = loops(program)
        assert "for all steps in one kernel" in reasons(program) and lowered.repeat == 1
        assert len(lowered.calls) == (1 if hidden <= 256 else 2)
        kernel = lowered.kernels[-1]
        assert kernel.launch is not None and kernel.launch.grid[0] <= H200.processors and kernel.cooperative == (hidden > 256)
        assert kernel.cluster == (8 if hidden <= 256 else 1)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "hidden"), [("LSTM", 128), ("GRU", 256), ("LSTM", 512), ("GRU", 800)])
def test_layers_on_the_gpu(kind: str, hidden: int) -> None:
    """Small layers are a cluster, where there are any, others a grid, whose counter of arrivals is zero again in every call."""
    clusters = hidden <= 256 and machine("cuda").compute_capability >= (9, 0)
    torch.manual_seed(hidden)
    module, x = KINDS[kind](hidden, hidden).eval(), torch.randn(24, 1, hidden)
    with mock.patch.object(import_module("tilewright.compile"), "plan_program", partial(plan_program, persistent=True)):
        executable = tilewright.compile(module, (x,), "cuda")
    (schedule,) = (row.schedule for row in executable.plan.rows if row.kind == "loop")
    assert "steps in one kernel" in schedule and ("a cluster of" in schedule) == clusters
    assert any(kernel.cooperative for kernel in executable.image.program.kernels.values()) != clusters
    for _ in range(3):
        given = torch.randn_like(x)
        found = [result.cpu() for result in tree_leaves(executable(given.cuda()))]
        compare(Case("recurrence", module, (given,)), found, (given,))
    executable.close()


def test_gates_do_not_branch() -> None:
    """A sigmoid is the square of a reciprocal square root, whose error is small relative to values far from 1 too."""
    program = planned(nn.LSTM(4, 16), torch.randn(3, 1, 4), H200, 1, persistent=True)
    (lowered,) = loops(program)
    code = print_cuda([lowered.kernels[-1]])
    assert code.count("rsqrtf(") == 3 and "1.0f / " not in code
    x = Var("x", None, "f32")
    plain = Const(1.0, "f32") / (Const(1.0, "f32") + unary("exp", -x))
    points = torch.linspace(-80, 80, 4001)
    out, at = np.zeros(4001, np.float32), Var("at", 4001)
    body = For(at, index_const(4001), Block((Let(x, Load("points", (at,), "f32")), Store("out", at, without_division(plain)))))
    run(Kernel("sigmoid", (Buffer("points", "f32", 4001), Buffer("out", "f32", 4001, writable=True)), body), [points.numpy(), out], ())
    np.testing.assert_allclose(out, torch.sigmoid(points.double()).numpy(), rtol=1e-6)


def test_shared_memory_is_as_counted() -> None:
    problems: list[Problem] = []

    def seen(problem: Problem, target: Machine, threads: int) -> Choice:
        problems.extend([problem] * (problem.region.kind == "loop"))
        return choose(problem, target, threads)

    planned(nn.GRU(8, 24), torch.randn(3, 5, 8), FEW, 1, seen, persistent=True)
    problem = problems[-1]
    form = RECURRENCE.match(problem, FEW)
    candidates, _ = RECURRENCE.space(form.facts, FEW, None)  # type: ignore[arg-type]
    counted = shared_bytes_of(form.facts, candidates, 32)
    for position in range(0, len(counted), 7):
        schedule = RECURRENCE.schedule_of({name: int(column[position]) for name, column in candidates.items()}, FEW)
        kernel = RECURRENCE.lower(problem, form, schedule, FEW).kernels[-1]
        assert shared_bytes(kernel) - 16 * 3 < counted[position] <= shared_bytes(kernel), schedule


def cycles_of_step(hidden: int, weights: int, **schedule: int) -> tuple[int, ...]:
    """Cycles of states, products, sums, gates and barrier in one step of an LSTM whose threads hold so many weights."""
    facts = RecurrenceFacts(steps=64, rows=1, units=hidden, products=((4, hidden),), flops=114.0, stream_bytes=32 * hidden)
    candidate = {name: np.array([value]) for name, value in {**schedule, "divided": 0}.items()}
    assert thread_weights(facts, candidate)[0] == weights
    with mock.patch.object(estimate, "gpu_recurrence", lambda machine: GpuRecurrence(1.2e-6, 0.25e-6)):
        terms = estimate.recurrence_estimate(facts, candidate, estimate.recurrence_counts(facts, candidate, H200), H200).terms
    return tuple(round(float(terms[name][0]) / 64 * H200.clock_hz) for name in ("states", "products", "sums", "gates", "barriers"))


def test_worked_examples() -> None:
    """The cycles of one step that `kernels.gpu.recurrence.estimate` states."""
    assert cycles_of_step(512, 32, units=4, groups=1, threads=256, rows=1, shared=0, cluster=0) == (263 + 93, 64, 543, 497, 2376)
    assert cycles_of_step(128, 64, units=4, groups=4, threads=128, rows=1, shared=0, cluster=8) == (180 + 57, 64, 403, 497, 495)


def test_one_block_needs_no_barrier_of_the_grid() -> None:
    program = interpreted(nn.RNN(4, 6), torch.randn(4, 1, 4), replace(H200, processors=1), 1, drawn(0), persistent=True)
    (lowered,) = loops(program)
    assert len(lowered.kernels) == 1 and not lowered.kernels[0].cooperative


def test_weights_that_do_not_fit() -> None:
    program = planned(nn.LSTM(16, 2048), torch.randn(3, 1, 16), H200, 1, persistent=True)
    assert "kernels for each step: no schedule is feasible" in reasons(program) and "registers exceed a thread's" in reasons(program)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("target", ["h200", "a100"])
@pytest.mark.parametrize(("kind", "hidden"), [("LSTM", 256), ("LSTM", 1024), ("GRU", 512)])
def test_kernels_compile_without_spills(kind: str, hidden: int, target: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    program = planned(KINDS[kind](hidden, hidden), torch.randn(64, 1, hidden), machine(target), 1, persistent=True)
    (lowered,) = loops(program)
    sources = [source for source in source_files(program, machine(target)) if set(source.entries) & {kernel.name for kernel in lowered.kernels}]
    for built in compile_kernels(sources, machine(target)):
        assert isinstance(built, Binary)
        assert all(found.spill_bytes == 0 and found.stack_bytes == 0 for found in built.resources.values())


# --- barriers of a grid ---------------------------------------------------------------------------------------------------


def ring(blocks: int, steps: int, meets: bool = True, awaited: int = 0) -> Kernel:
    """In each step a block reads what the next one stored in the step before."""
    launch = Launch((blocks, 1, 1), (32, 1, 1))
    step, own = Var("step", steps), block_variable(launch)
    other = Load("x", (step * blocks + (own + 1) % blocks,), "f32")
    body: list[Statement] = [If(Var("thread_x", 32) < 1, Store("x", (step + 1) * blocks + own, other + Const(1.0, "f32")))]
    if meets:
        body.append(grid_barrier(Place("counter", ZERO), (step + 1) * (awaited or blocks)))
    parameters = (Buffer("x", "f32", blocks * (steps + 1), writable=True), Buffer("counter", COUNTER, 1, writable=True))
    return Kernel("ring", parameters, For(step, index_const(steps), Block(tuple(body))), launch)


def told(kernel: Kernel, counter: int = 0, known: bool = True) -> tuple[np.ndarray, tuple[str, ...]]:
    x, arrivals = np.zeros(kernel.parameters[0].size, np.float32), np.array([counter], np.int32)
    x[:3] = 1, 2, 3
    found = run(kernel, [x, arrivals], (), ["x", *(["counter"] if known else [])])
    return x.reshape(-1, 3), found.faults


def test_blocks_meet() -> None:
    x, faults = told(ring(3, 4))
    assert not faults
    np.testing.assert_array_equal(x[4], np.roll([1, 2, 3], -4) + 4)


def test_without_a_barrier_blocks_race() -> None:
    assert any("race between blocks" in fault for fault in told(ring(3, 4, meets=False))[1])


def test_a_counter_that_was_not_zero() -> None:
    (fault,) = told(ring(3, 4), counter=1)[1]
    assert "the counter of the grid's barriers is 4 where 3 arrivals are awaited" in fault
    assert any("uninitialised" in fault for fault in told(ring(3, 4), known=False)[1])


def test_too_many_arrivals_awaited() -> None:
    assert "is 3 where 5 arrivals are awaited" in told(ring(3, 4, awaited=5))[1][0]


@pytest.mark.parametrize("cluster", [0, 4])
def test_layers_race_without_their_barriers(cluster: int) -> None:
    program = planned(nn.GRU(4, 12), torch.randn(4, 1, 4), FEW, 1, drawn(5, lambda schedule: schedule.cluster == cluster), persistent=True)
    (lowered,) = loops(program)
    kernel = lowered.kernels[-1]

    def faults(kernel: Kernel) -> tuple[str, ...]:
        arguments = [np.zeros(buffer.size, np.int32 if buffer.dtype == COUNTER else np.float32) for buffer in kernel.parameters]
        return run(kernel, arguments, (), [buffer.name for buffer in kernel.parameters]).faults

    assert not faults(kernel)
    assert any(
        "race between blocks" in fault
        for fault in faults(replace(kernel, body=without(kernel.body, lambda s: isinstance(s, Invoke) and s.intrinsic.scope in ("grid", "cluster"))))
    )


# --- barriers of a cluster ------------------------------------------------------------------------------------------------


def exchange(late: bool) -> tuple[str, ...]:
    """Two blocks store in each other's shared memory before or after their arrival at a barrier, and read behind it."""
    launch = Launch((2, 1, 1), (32, 1, 1))
    own, thread = block_variable(launch), Var("thread_x", 32)
    store, arrive = cluster_store(Place("part", (1 - own) * 32 + thread), Const(1.0, "f32")), cluster_arrive()
    read = Store("x", own * 32 + thread, Load("part", (own * 32 + (thread + 1) % 32,), "f32"))
    halves = (arrive, store) if late else (store, arrive)
    body: list[Statement] = [Allocate(Buffer("part", "f32", 64, "cluster")), cluster_barrier(), *halves, cluster_wait(), read]
    x = np.zeros(64, np.float32)
    faults = run(Kernel("exchange", (Buffer("x", "f32", 64, writable=True),), Block(tuple(body)), launch, cluster=2), [x], (), []).faults
    assert (x == 1).all()
    return faults


def test_what_follows_arrival_is_not_ordered() -> None:
    assert not exchange(False)
    assert any("race" in fault and "part" in fault for fault in exchange(True))


# --- launches -------------------------------------------------------------------------------------------------------------


def together() -> LoadableProgram:
    """x -> a, b, whose kernels have barriers of the grid, and c, whose kernel has none."""
    builder = ProgramBuilder({"x": (4,)})
    for name, operator in (("a", "relu"), ("b", "neg"), ("c", "exp")):
        builder.kernel(operator, ("x",), name, (4,), "")
    program = loadable(builder.program(("a", "b", "c")))
    kernels = {name: replace(kernel, cooperative=number < 2) for number, (name, kernel) in enumerate(program.kernels.items())}
    return replace(program, kernels=kernels)


def test_cooperative_launches(stream: FakeStream) -> None:
    """Such kernels are launched with all blocks at once, and never two of them side by side, in graphs and while a caller captures."""
    engine, library = fake_engine(together())
    engine.bind([0x1000, 0x2000, 0x3000, 0x4000])
    engine.run(0, 3)
    engine.finish()
    attributes = [arguments for name, arguments in library.calls if name == "cuGraphKernelNodeSetAttribute"]
    first, second, third = library.nodes
    assert [arguments[0] for arguments in attributes] == [first, second]
    assert all(arguments[1] == LAUNCH_COOPERATIVE and arguments[2]._obj.cooperative == 1 for arguments in attributes)
    assert [before for before, _ in library.nodes.values()] == [[], [first], []]
    stream.capturing = True
    engine.bind([0x1000, 0x2000, 0x3000, 0x4000])
    engine.run(0, 3)
    names = library.names()
    assert names.count("cuLaunchCooperativeKernel") == 2 and names.count("cuLaunchKernel") == 1


def test_the_drivers_structures() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    assert int(driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE) == LAUNCH_COOPERATIVE
    from tilewright.runtime.driver import LaunchAttributeValue

    assert ctypes.sizeof(LaunchAttributeValue) == 64 and LaunchAttributeValue.cooperative.offset == 0


def test_loadable_kernels_say_that_they_are_cooperative() -> None:
    assert loadable_kernel(ring(3, 4)).cooperative and not loadable_kernel(ring(3, 4, meets=False)).cooperative
