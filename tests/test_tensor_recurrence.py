"""Recurrent layers of many sequences on tensor cores: against PyTorch in float64 under any schedule, in the interpreter, and without races."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import tilewright
from tests.compiled import Case, compare
from tests.draws import draws
from tests.interpreted import returned, run_program
from tests.statements import without
from tests.test_gpu_half import check as check_half
from tests.test_half_modules import array_of, assert_as_good_as_eager
from tests.test_recurrence import KINDS, loops, planned, reasons
from tilewright.codegen.cuda import print_cuda, shared_bytes
from tilewright.codegen.interpreter import run
from tilewright.codegen.intrinsics.barriers import COUNTER
from tilewright.compile import source_files
from tilewright.frontend.torch_import import import_module
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import ELEMENT_TYPES
from tilewright.ir.kernel import Invoke, Statement
from tilewright.ir.problem import Problem
from tilewright.ir.region import Program
from tilewright.kernels.gpu.tensor_recurrence import estimate
from tilewright.kernels.gpu.tensor_recurrence.form import TensorRecurrenceFacts
from tilewright.kernels.gpu.tensor_recurrence.schema import TENSOR_RECURRENCE
from tilewright.kernels.gpu.tensor_recurrence.space import TensorRecurrenceSchedule, shared_bytes_of
from tilewright.kernels.recurrence_form import RecurrenceFacts
from tilewright.kernels.schema import USUAL, Options
from tilewright.partition.context import Chooser
from tilewright.selection.choice import choose, rank
from tilewright.selection.ranking import Choice
from tilewright.toolchain.binary import Binary
from tilewright.toolchain.build import compile_kernels

H200 = machine("h200")
TF32 = USUAL.at("tf32")
EACH_TYPE = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)


def on_tensor_cores(seed: int, seen: list[Problem] | None = None, keep: Callable[[TensorRecurrenceSchedule], bool] = lambda _: True) -> Chooser:
    """Each loop takes a random candidate of the schema, of those to keep if there are any."""

    def chosen(problem: Problem, target: Machine, threads: int) -> Choice:
        if problem.region.kind != "loop":
            return choose(problem, target, threads)
        if seen is not None:
            seen.append(problem)
        every = [choice for choice in rank(problem, target, threads, TF32) if isinstance(choice.schedule, TensorRecurrenceSchedule)]
        found = [choice for choice in every if keep(choice.schedule)] or every
        return replace(found[seed % len(found)], seconds=0.0)

    return chosen


def layer(kind: str, hidden: int, batch: int, dtype: torch.dtype, wide: int = 5, length: int = 3, **options: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(hidden + batch)
    return KINDS[kind](wide, hidden, **options).to(dtype).eval(), torch.randn(length, batch, wide).to(dtype)


def check(module: nn.Module, x: Tensor, program: Program) -> None:
    """Interprets the program, and compares it with PyTorch in float64: float32 with the accuracy of TF32."""
    if x.dtype != torch.float32:
        return check_half(module, (x,), program)
    results, faults = run_program(program, {program.graph.inputs[0]: array_of(x)})
    assert not faults, "\n".join(faults)
    found = returned(import_module(module, (x,)), [results[name] for name in program.graph.outputs], (x,))
    compare(Case("recurrence", module, (x,), tolerance=4e-3), found, (x,))
    return None


@settings(max_examples=draws(24), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    kind=st.sampled_from(list(KINDS)), hidden=st.sampled_from([32, 64, 96]), batch=st.sampled_from([1, 5, 16, 23, 40]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]), both=st.booleans(), first=st.booleans(), seed=st.integers(0, 10_000),
)  # fmt: skip
def test_any_schedule_without_races(kind: str, hidden: int, batch: int, dtype: torch.dtype, both: bool, first: bool, seed: int) -> None:
    module, x = layer(kind, hidden, batch, dtype, bidirectional=both, batch_first=first)
    x = x.transpose(0, 1).contiguous() if first else x
    program = planned(module, x, H200, 1, on_tensor_cores(seed), True)
    assert loops(program) and all("tensor cores" in lowered.schedule and lowered.repeat == 1 for lowered in loops(program))
    check(module, x, program)


@pytest.mark.in_turns(1)
@EACH_TYPE
def test_parts_of_blocks(dtype: torch.dtype) -> None:
    """Sequences and units that the blocks do not divide, more rows than are computed at a time, and warps without a last pair of fragments."""
    module, x = layer("LSTM", 96, 37, dtype, length=2)
    seen: list[Problem] = []
    schedule = TensorRecurrenceSchedule(units=20, rows=32, together=16, warps=2)

    def chosen(problem: Problem, target: Machine, threads: int) -> Choice:
        choice = on_tensor_cores(0, seen)(problem, target, threads) if problem.region.kind == "loop" else choose(problem, target, threads)
        return replace(choice, schedule=schedule) if problem.region.kind == "loop" else choice

    program = planned(module, x, H200, 1, chosen, True)
    (lowered,) = loops(program)
    kernel = lowered.kernels[-1]
    assert kernel.cooperative and kernel.launch is not None and kernel.launch.grid == (10, 1, 1)
    check(module, x, program)


def test_models_choose_tensor_cores() -> None:
    """Of many sequences in 16 bits, and in float32 where it may be rounded; one sequence stays on CUDA cores."""
    for dtype, numerics, batch, expected in (
        (torch.float16, USUAL, 64, True), (torch.float16, USUAL, 1, False), (torch.float32, USUAL, 64, False), (torch.float32, TF32, 64, True),
    ):  # fmt: skip
        module, x = layer("LSTM", 512, batch, dtype, 512, 20)
        (lowered,) = loops(planned(module, x, H200, 1, partial(choose, numerics=numerics), persistent=True))
        assert ("steps in one kernel: tensor cores" in lowered.schedule) == expected, (dtype, batch, lowered.schedule)


@pytest.mark.parametrize(("hidden", "target", "reason"), [(40, H200, "no multiple of 32"), (64, machine("v100"), "which needs sm_80")])
def test_what_does_not_suit(hidden: int, target: Machine, reason: str) -> None:
    problems: list[Problem] = []

    def seen(problem: Problem, target: Machine, threads: int) -> Choice:
        problems.extend([problem] * (problem.region.kind == "loop"))
        return choose(problem, target, threads)

    module, x = layer("LSTM", hidden, 4, torch.float16)
    planned(module, x, target, 1, seen, True)
    with pytest.raises(Exception, match=reason):
        TENSOR_RECURRENCE.match(problems[-1], target)


def test_float32_is_not_rounded_unasked() -> None:
    seen: list[Problem] = []
    module, x = layer("GRU", 64, 16, torch.float32)
    planned(module, x, H200, 1, on_tensor_cores(0, seen), True)
    form = TENSOR_RECURRENCE.match(seen[-1], H200)
    candidates, reasons = TENSOR_RECURRENCE.space(form.facts, H200, Options(1, USUAL))
    assert not len(candidates["units"]) and "float32 may not be rounded to TF32" in reasons


def test_shared_memory_is_as_counted() -> None:
    seen: list[Problem] = []
    module, x = layer("GRU", 64, 40, torch.float16)
    planned(module, x, H200, 1, on_tensor_cores(0, seen), True)
    form = TENSOR_RECURRENCE.match(seen[-1], H200)
    candidates, _ = TENSOR_RECURRENCE.space(form.facts, H200, Options(1, USUAL))
    counted = shared_bytes_of(form.facts, candidates)
    assert len(counted) > 10
    for position in range(0, len(counted), 5):
        schedule = TENSOR_RECURRENCE.schedule_of({name: int(column[position]) for name, column in candidates.items()}, H200)
        kernel = TENSOR_RECURRENCE.lower(seen[-1], form, schedule, H200).kernels[-1]
        assert shared_bytes(kernel) == counted[position], schedule


def test_layers_race_without_their_barriers() -> None:
    module, x = layer("GRU", 64, 20, torch.float16)
    (lowered,) = loops(planned(module, x, H200, 1, on_tensor_cores(5), True))
    kernel = lowered.kernels[-1]

    def faults(body: Statement) -> tuple[str, ...]:
        types = {COUNTER: np.int32, "f16": np.float16}
        arguments = [np.zeros(buffer.size, types.get(buffer.dtype, ELEMENT_TYPES[buffer.dtype].array)) for buffer in kernel.parameters]
        return run(replace(kernel, body=body), arguments, (), [buffer.name for buffer in kernel.parameters]).faults

    assert not faults(kernel.body)
    assert any(
        "race between blocks" in fault for fault in faults(without(kernel.body, lambda s: isinstance(s, Invoke) and s.intrinsic.scope == "grid"))
    )


def test_worked_example() -> None:
    """The cycles of one step that `kernels.gpu.tensor_recurrence.estimate` states."""
    sizes = RecurrenceFacts(steps=64, rows=64, units=512, products=((4, 512),), flops=114.0, stream_bytes=0)
    facts = TensorRecurrenceFacts(sizes, "f16")
    candidate = {name: np.array([value]) for name, value in {"units": 16, "rows": 16, "together": 16, "warps": 8, "divided": 0}.items()}
    counts = estimate.tensor_recurrence_counts(facts, candidate, H200)
    terms = estimate.tensor_recurrence_estimate(facts, candidate, counts, H200).terms
    found = tuple(round(float(terms[name][0]) / 64 * H200.clock_hz) for name in ("states", "products", "sums"))
    assert counts.blocks[0] == 128
    assert found == (263 + 742, 440, 594)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("target", ["h200", "a100"])
@pytest.mark.parametrize(("kind", "hidden", "batch", "dtype"), [
    ("LSTM", 512, 64, torch.float16), ("LSTM", 1024, 64, torch.bfloat16), ("GRU", 800, 64, torch.float16), ("LSTM", 512, 64, torch.float32),
])  # fmt: skip
def test_kernels_compile_without_spills(kind: str, hidden: int, batch: int, dtype: torch.dtype, target: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    module, x = layer(kind, hidden, batch, dtype, hidden, 16)
    program = planned(module, x, machine(target), 1, partial(choose, numerics=TF32), persistent=True)
    (lowered,) = loops(program)
    assert "tensor cores" in lowered.schedule, reasons(program)
    assert "ld.relaxed.gpu.global.v4" in print_cuda([lowered.kernels[-1]])
    sources = [source for source in source_files(program, machine(target)) if set(source.entries) & {kernel.name for kernel in lowered.kernels}]
    for built in compile_kernels(sources, machine(target)):
        assert isinstance(built, Binary)
        assert all(found.spill_bytes == 0 and found.stack_bytes == 0 for found in built.resources.values())


@pytest.mark.gpu
@EACH_TYPE
@pytest.mark.parametrize(("kind", "hidden", "batch"), [("LSTM", 512, 64), ("GRU", 800, 64), ("LSTM", 256, 16), ("tanh", 96, 23)])
def test_layers_on_the_gpu(kind: str, hidden: int, batch: int, dtype: torch.dtype) -> None:
    module, x = layer(kind, hidden, batch, dtype, hidden, 24)
    module, x = module.cuda(), x.cuda()
    executable = tilewright.compile(module, (x,), "cuda", precision="tf32" if dtype == torch.float32 else "fp32")
    assert "tensor cores" in " ".join(row.schedule for row in executable.plan.rows if row.kind == "loop")
    for _ in range(3):  # the counter of arrivals is zero again in every call
        found = [result.cpu() for result in tree_leaves(executable(x))]
        if dtype == torch.float32:
            compare(Case("recurrence", module.cpu(), (x.cpu(),), tolerance=4e-3), found, (x.cpu(),))
        else:
            assert_as_good_as_eager(module.cpu(), (x.cpu(),), found)
        module.cuda()
