"""Implicit GEMM on tensor cores: candidates of its space over random layers in the interpreter, against PyTorch in float64; NVRTC compiles them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.draws import draws
from tests.interpreted import run_program
from tests.on_device import cuda_binary
from tests.test_gpu_half import check, planned
from tests.test_half_modules import EACH_TYPE, TYPES, in_type
from tilewright.analysis.gpu.warps import accesses
from tilewright.codegen.cuda import print_cuda
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Program, Unsuitable
from tilewright.kernels.columns import length
from tilewright.kernels.gpu.tensor_cores.schema import TENSOR_CORES
from tilewright.kernels.gpu.tensor_cores.space import TensorCoreSchedule
from tilewright.kernels.registry import lower
from tilewright.kernels.schema import USUAL, Numerics
from tilewright.partition.context import Chooser
from tilewright.selection.choice import choose, rank
from tilewright.selection.ranking import Choice
from tilewright.toolchain.binary import SourceFile
from tilewright.toolchain.compilers import NvrtcCompiler
from tilewright.tuning.problems import convolution_problem

H200, A100, RTX4090, RTX2080, V100 = map(machine, ("h200", "a100", "rtx4090", "rtx2080", "v100"))


def with_schedule(pick: Callable[[int], int] | TensorCoreSchedule, used: list[TensorCoreSchedule], numerics: Numerics = USUAL) -> Chooser:
    """Chooses for each region that has candidates of the schema a given one (without copies where a factor has none), or the one that `pick` picks of
    their number."""

    def chooser(problem: Problem, machine: Machine, threads: int) -> Choice:
        ranking = rank(problem, machine, threads, numerics)
        own = next((number for number, part in enumerate(ranking.parts) if part.schema is TENSOR_CORES), None)
        if own is None:
            return ranking.first()
        begin, end = map(int, ranking.starts[own : own + 2])
        if isinstance(pick, TensorCoreSchedule):
            facts = ranking.parts[own].facts
            choice = replace(ranking.choice(begin), schedule=pick if facts.copies else replace(pick, stages=1))
        else:
            choice = ranking.choice(begin + pick(end - begin))
        used.append(choice.schedule)
        return choice

    return chooser


class Product(nn.Module):
    """Of two computed factors, either transposed."""

    def __init__(self, transposed: tuple[bool, bool]) -> None:
        super().__init__()
        self.transposed = transposed

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = (x.mT if turned else x for x, turned in zip((a, b), self.transposed, strict=True))
        return a @ b


class Block(nn.Module):
    """A convolution, an activation and a residual that is a view of a concatenation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 3, padding=1)
        self.last = nn.Conv2d(2 * channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.first(x), self.second(x)], 1)
        result: torch.Tensor = torch.relu(self.last(both)) + both[:, : x.shape[1]]
        return result


FORMS = ("first layer", "1-D", "2-D", "3-D", "groups", "few channels a group", "transposed", "linear", "few rows", "product")


def drawn(form: str, random: Random) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A convolution with an epilogue, or a product, of random sizes."""

    def size(*choices: int) -> int:
        return random.choice(choices)

    if form == "product":
        batch, m, n, r = size(1, 3), size(1, 9, 16, 20), size(8, 16, 21), size(7, 16, 24)
        turned = random.random() < 0.5, random.random() < 0.5
        shapes = ((batch, *((r, m) if turned[0] else (m, r))), (batch, *((n, r) if turned[1] else (r, n))))
        return Product(turned), tuple(torch.randn(shape) for shape in shapes)
    if form in ("linear", "few rows"):
        width, rows = size(8, 20, 33, 64), size(17, 40) if form == "linear" else size(1, 2, 5, 8)
        return nn.Sequential(nn.Linear(width, size(5, 8, 24)), nn.GELU()), (torch.randn(rows, width),)
    groups = {"groups": size(2, 3), "few channels a group": size(4, 6)}.get(form, 1)
    each, outputs = {"first layer": (size(1, 3, 4), size(8, 24)), "few channels a group": (size(1, 2, 4), size(2, 4))}.get(
        form, (size(4, 8, 12, 16), size(5, 8, 16))
    )
    channels, outputs, taps, stride, dilation = groups * each, groups * outputs, size(1, 2, 3), size(1, 2), size(1, 1, 2)
    if form == "transposed":
        image, groups = torch.randn(1, channels, 5, 6), size(1, groups)
        return nn.ConvTranspose2d(channels, outputs, 2 * stride, stride, stride // 2, groups=groups), (image,)
    options = {"stride": stride, "dilation": dilation, "padding": size(0, taps // 2 * dilation), "groups": groups}
    if form == "1-D":
        return nn.Sequential(nn.Conv1d(channels, outputs, taps, **options), nn.SiLU()), (torch.randn(2, channels, size(9, 20)),)  # type: ignore[arg-type]
    if form == "3-D":
        return nn.Conv3d(channels, outputs, taps, **options), (torch.randn(1, channels, 5, 6, 5),)  # type: ignore[arg-type]
    first = nn.Conv2d(channels, channels, 1) if form != "first layer" and random.random() < 0.5 else nn.Identity()
    return nn.Sequential(first, nn.Conv2d(channels, outputs, taps, **options), nn.ReLU()), (torch.randn(size(1, 2), channels, size(6, 9), 8),)  # type: ignore[arg-type]


@pytest.mark.in_turns(5)
@settings(max_examples=draws(5), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(seed=st.integers(0, 2**31), dtype=st.sampled_from([*TYPES, torch.float32]), target=st.sampled_from([H200, A100]))
@pytest.mark.parametrize("form", FORMS)
def test_any_candidate_is_as_good_as_pytorch(form: str, seed: int, dtype: torch.dtype, target: Machine) -> None:
    random = Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, inputs = drawn(form, random)
    module, inputs, used = module.to(dtype).eval(), in_type(inputs, dtype), list[TensorCoreSchedule]()
    program = planned(module, inputs, target, with_schedule(random.randrange, used, Numerics(tf32=dtype == torch.float32)))
    assert used
    (check_tf32 if dtype == torch.float32 else check)(module, inputs, program)


def check_tf32(module: nn.Module, inputs: Sequence[torch.Tensor], program: Program) -> None:
    """10 bits of mantissa, rounded: an error of 2^-11 per factor, in up to two products one after the other."""
    results, faults = run_program(program, {name: x.numpy() for name, x in zip(program.graph.inputs, inputs, strict=True)})
    assert not faults
    expected = copy.deepcopy(module).double()(*(x.double() for x in inputs)).detach().numpy()
    assert abs(results[program.graph.outputs[0]].reshape(expected.shape) - expected).max() <= 4 * 2.0**-10 * abs(expected).max()


SCHEDULES = (
    TensorCoreSchedule(32, 32, 16, 1, 2, 2),
    TensorCoreSchedule(64, 16, 32, 2, 1, 3),
    TensorCoreSchedule(16, 64, 64, 1, 4, 4),
    TensorCoreSchedule(32, 32, 32, 2, 2, 1),
    TensorCoreSchedule(64, 32, 16, 2, 4, 2, 3),
    TensorCoreSchedule(32, 64, 16, 2, 2, 2, 4, 1),
    TensorCoreSchedule(64, 64, 16, 2, 1, 4, 2, 1),
    TensorCoreSchedule(32, 32, 16, 1, 2, 2, staged=1),
    TensorCoreSchedule(64, 128, 16, 4, 2, 2, staged=1),
)
"""Each number of stages, warps along each direction, an odd number of matrices along n, parts of a sum in two kernels and in a cluster, and results
through shared memory that exceed the tiles, or not."""


@pytest.mark.in_turns(5)
@EACH_TYPE
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_schedules(schedule: TensorCoreSchedule, dtype: torch.dtype) -> None:
    used: list[TensorCoreSchedule] = []
    torch.manual_seed(0)
    module, inputs = nn.Sequential(nn.Conv2d(32, 40, (2, 4), padding=1), nn.Hardswish()).to(dtype), (torch.randn(1, 32, 7, 9).to(dtype),)
    check(module, inputs, planned(module, inputs, H200, with_schedule(schedule, used)))
    assert used == [schedule]


@pytest.mark.in_turns(1)
@EACH_TYPE
def test_a_residual_that_is_a_view_of_a_concatenation(dtype: torch.dtype) -> None:
    used: list[TensorCoreSchedule] = []
    torch.manual_seed(0)
    module, inputs = Block(16).to(dtype), (torch.randn(1, 16, 6, 7).to(dtype),)
    check(module, inputs, planned(module, inputs, H200, with_schedule(TensorCoreSchedule(32, 16, 32, 2, 1, 2), used)))
    assert len(used) == 3


class Epilogue(nn.Module):
    """A product with a bias, followed by a scale for each channel, a chain of functions, a residual, and a result of another type."""

    def __init__(self, product: nn.Module, channels: int, wide: bool) -> None:
        super().__init__()
        self.product, self.wide = product, wide
        self.scale = nn.Parameter(torch.rand(channels, *(1, 1) if isinstance(product, nn.Conv2d) else ()) + 0.5)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y = nn.functional.hardtanh(nn.functional.silu(self.product(x) * self.scale)) + residual
        return y.float() if self.wide else y


@pytest.mark.in_turns
@EACH_TYPE
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("schedule", [TensorCoreSchedule(32, 16, 16, 2, 1, 2), TensorCoreSchedule(32, 16, 16, 2, 1, 2, staged=1)], ids=str)
def test_epilogues_are_in_the_kernel_of_the_product(schedule: TensorCoreSchedule, wide: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cases = ((nn.Linear(40, 24), (37, 40), (37, 24)), (nn.Conv2d(24, 16, 1), (1, 24, 6, 7), (1, 16, 6, 7)))
    for product, *shapes in cases:
        used: list[TensorCoreSchedule] = []
        module, inputs = Epilogue(product, shapes[1][1], wide).to(dtype).eval(), in_type(tuple(map(torch.randn, shapes)), dtype)
        program = planned(module, inputs, H200, with_schedule(schedule, used))
        check(module, inputs, program)
        (made,) = (lowered for lowered in program.regions if lowered.region.kind == "contraction")
        assert len(used) == len(made.kernels) == 1 and made.region.outputs == tuple(program.graph.outputs)


def chosen(module: nn.Module, inputs: Sequence[torch.Tensor], target: Machine) -> list[str]:
    """The schemas of a program's contractions."""
    found: list[str] = []

    def chooser(problem: Problem, machine: Machine, threads: int) -> Choice:
        choice = choose(problem, machine, threads)
        found.extend([choice.schema.name] * (problem.region.kind == "contraction"))
        return choice

    planned(module, inputs, target, chooser)
    return found


def test_they_are_chosen_where_they_pay() -> None:
    layer, x = nn.Linear(512, 512), torch.zeros(1024, 512)
    for target, name in ((H200, "warpgroups"), (A100, "tensor cores"), (RTX4090, "tensor cores"), (RTX2080, "tensor cores")):
        assert set(chosen(layer.half(), (x.half(),), target)) == {name}, target.name
    assert "tensor cores" not in chosen(layer.half(), (x.half(),), V100)
    assert "tensor cores" not in chosen(layer.float(), (x,), H200)


def test_what_is_no_product_of_stored_values_is_refused() -> None:
    problems: list[Problem] = []

    def chooser(problem: Problem, machine: Machine, threads: int) -> Choice:
        problems.extend([problem] * (problem.region.kind == "contraction"))
        return choose(problem, machine, threads)

    types = {"value0": "f16"}
    layer = convolution_problem(16, 16, 8, 8, 3)
    mixed = replace(layer, values={name: replace(value, dtype=types.get(name, value.dtype)) for name, value in layer.values.items()})
    planned(nn.Sequential(nn.Linear(24, 16), nn.Softmax(-1)).half(), (torch.zeros(19, 24).half(),), A100, chooser)
    with pytest.raises(Unsuitable, match="rows of the result are reduced"):
        TENSOR_CORES.match(problems[-1], H200)
    planned(nn.Linear(24, 16).half(), (torch.zeros(19, 24).half(),), A100, chooser)
    with pytest.raises(Unsuitable, match="no mma.sync of f16 with float32 sums, which needs sm_75"):
        TENSOR_CORES.match(problems[-1], V100)
    assert TENSOR_CORES.match(problems[-1], RTX2080).facts.copies is False
    planned(nn.Linear(24, 16).bfloat16(), (torch.zeros(19, 24).bfloat16(),), A100, chooser)
    with pytest.raises(Unsuitable, match="no mma.sync of bf16 with float32 sums, which needs sm_80"):
        TENSOR_CORES.match(problems[-1], RTX2080)
    with pytest.raises(Unsuitable, match="not of one type"):
        TENSOR_CORES.match(mixed, H200)
    narrow = planned(nn.Conv2d(3, 16, 3).half(), (torch.zeros(1, 3, 9, 9).half(),), H200, chooser)
    assert narrow.regions
    with pytest.raises(Unsuitable, match="too narrow"):
        lower(problems[-1], TensorCoreSchedule(32, 16, 16, 2, 1, 2), H200)
    with pytest.raises(Unsuitable, match="no whole matrices"):
        lower(problems[-1], TensorCoreSchedule(16, 16, 16, 2, 1, 1), H200)


def layer_program(target: Machine, schedule: TensorCoreSchedule, dtype: torch.dtype = torch.float16) -> Program:
    """Of a convolution whose products are bound by tensor cores."""
    return planned(nn.Conv2d(128, 128, 3, padding=1).to(dtype), (torch.zeros(8, 128, 28, 28, dtype=dtype),), target, with_schedule(schedule, []))


@pytest.mark.in_turns(1)
@pytest.mark.parametrize(
    "schedule",
    [TensorCoreSchedule(128, 128, 32, 2, 4, 4), TensorCoreSchedule(64, 64, 64, 2, 2, 3), TensorCoreSchedule(64, 128, 32, 1, 4, 1)],
    ids=str,
)
def test_compiled_code_has_the_instructions_and_no_spills(schedule: TensorCoreSchedule) -> None:
    for target, dtype in ((H200, torch.float16), (A100, torch.bfloat16), (RTX4090, torch.float16)):
        (made,) = (lowered for lowered in layer_program(target, schedule, dtype).regions if lowered.schedule == str(schedule))
        text = print_cuda(list(made.kernels))
        passed, log = cuda_binary(text, target.architecture)
        assert passed and " 0 bytes spill stores, 0 bytes spill loads" in log, log
        outcome, ptx, _ = NvrtcCompiler.find(target).translated(SourceFile("products", text, "cuda", (made.kernels[0].name,)))
        assert outcome.succeeded
        products = schedule.block_m * schedule.block_n * schedule.block_k // (16 * 8 * 16 * schedule.threads // 32)
        assert ptx.count("mma.sync.aligned.m16n8k16") == products and "ldmatrix" in ptx
        assert ("cp.async.cg.shared.global" in ptx) == (schedule.stages > 1)


@pytest.mark.parametrize("schedule", [TensorCoreSchedule(64, 64, 32, 2, 2, 1), TensorCoreSchedule(32, 8, 16, 2, 1, 1)], ids=str)
def test_turing_multiplies_halves(schedule: TensorCoreSchedule) -> None:
    """Products of 16 are two of 8 there, tiles are filled through registers, and an odd column is two matrices, with valid addresses of all lanes."""
    torch.manual_seed(0)
    module, inputs = nn.Sequential(nn.Conv2d(24, 40, 3, padding=1), nn.ReLU()).half(), (torch.randn(2, 24, 9, 11).half(),)
    program = planned(module, inputs, RTX2080, with_schedule(schedule, []))
    check(module, inputs, program)
    (made,) = (lowered for lowered in program.regions if lowered.schedule == str(schedule))
    text = print_cuda(made.kernels)
    passed, log = cuda_binary(text, RTX2080.architecture)
    outcome, ptx, _ = NvrtcCompiler.find(RTX2080).translated(SourceFile("products", text, "cuda", (made.kernels[0].name,)))
    assert passed and outcome.succeeded, log
    assert "m16n8k8" in ptx and "m16n8k16" not in ptx and "ldmatrix" in ptx and "cp.async" not in ptx


@pytest.mark.parametrize("block_k", [16, 32, 64])
def test_matrices_are_loaded_and_tiles_filled_without_bank_conflicts(block_k: int) -> None:
    (made,) = (
        lowered
        for lowered in layer_program(H200, TensorCoreSchedule(64, 64, block_k, 2, 2, 2)).regions
        if lowered.schedule.startswith("tensor cores")
    )
    found = [access for access in accesses(made.kernels[0]) if access.space == "shared" and access.kind == "load"]
    assert {access.buffer for access in found} == {"a_tile", "b_tile"}
    for access in found:
        assert access.transactions == access.lanes * access.bytes / 128, access


def test_candidates_have_reasons() -> None:
    problems: list[Problem] = []

    def chooser(problem: Problem, machine: Machine, threads: int) -> Choice:
        problems.extend([problem] * (problem.region.kind == "contraction"))
        return choose(problem, machine, threads)

    planned(nn.Linear(64, 64).half(), (torch.zeros(64, 64).half(),), H200, chooser)
    ranking = rank(problems[0], H200)
    (part,) = (part for part in ranking.parts if part.schema is TENSOR_CORES)
    assert length(part.candidates) > 100
    assert {"tile of m is more than twice the extent", "a thread holds too many sums"} <= set(ranking.rejections["tensor cores"])
