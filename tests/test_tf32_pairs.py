"""Products of float32 as pairs of TF32 or of float16: errors against float64 in the interpreter, also where sums are truncated as tensor cores do."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import nn

import tilewright
from bench.gpu_tensor_layers import layer_problem, ranking_of
from bench.pair_errors import UNIT, of_multiply_adds, truncated_product
from tests.draws import draws
from tests.interpreted import returned, run_program
from tests.on_device import cuda_binary
from tests.test_gpu_half import planned
from tests.test_gpu_tensor_cores import FORMS, drawn
from tests.test_gpu_warpgroup import ONE
from tests.test_gpu_warpgroup import drawn as drawn_for_warpgroups
from tilewright.codegen.cuda import print_cuda
from tilewright.codegen.intrinsics import mma, wgmma
from tilewright.frontend.torch_import import import_module
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Program, Unsuitable
from tilewright.kernels.gpu.counts import HalfPairCounts, PairCounts
from tilewright.kernels.gpu.tensor_cores import space
from tilewright.kernels.gpu.tensor_cores.schema import TENSOR_CORES
from tilewright.kernels.gpu.tensor_cores.space import TensorCoreSchedule
from tilewright.kernels.gpu.warpgroup import space as warpgroup_space
from tilewright.kernels.gpu.warpgroup.schema import WARPGROUP
from tilewright.kernels.gpu.warpgroup.space import WarpgroupSchedule
from tilewright.kernels.schema import AnySchema, Numerics, form_of
from tilewright.partition.context import Chooser
from tilewright.runtime import packing
from tilewright.runtime.loadable import loadable_kernel
from tilewright.runtime.verify import TOLERANCES, narrow_tolerance, stored_types
from tilewright.selection.choice import choose, rank
from tilewright.selection.ranking import Choice
from tilewright.tuning.trials import Job, Trials
from tilewright.tuning.workloads import Convolution, Product, problem_of

Scheduled: TypeAlias = TensorCoreSchedule | WarpgroupSchedule
H200, A100 = machine("h200"), machine("a100")
PAIRS, HALF_PAIRS = Numerics(tf32_pairs=True), Numerics(tf32_pairs=True, f16_pairs=True)
EACH_PAIRS = pytest.mark.parametrize("numerics", [PAIRS, HALF_PAIRS], ids=["tf32", "f16"])
USUAL_PRODUCT, USUAL_WIDE = mma._mma, wgmma._multiplying


def picking(pick: Any, used: list[Any], schema: AnySchema = TENSOR_CORES, numerics: Numerics = PAIRS) -> Chooser:
    """Chooses a given candidate of its schema for each region that has some, or the one of `schema` that `pick` picks of their number."""
    given = None if callable(pick) else pick
    kind = schema.schedule if given is None else type(given)

    def chooser(problem: Problem, machine: Machine, threads: int) -> Choice:
        ranking = rank(problem, machine, threads, numerics, learned=False)
        own = next((number for number, part in enumerate(ranking.parts) if part.schema.schedule is kind), None)
        if own is None:
            return ranking.first()
        begin, end = map(int, ranking.starts[own : own + 2])
        choice = ranking.choice(begin + (pick(end - begin) if callable(pick) else 0))
        if isinstance(given, TensorCoreSchedule) and not ranking.parts[own].facts.copies:
            choice = replace(choice, schedule=replace(given, stages=1))
        elif given is not None:
            choice = replace(choice, schedule=given)
        used.append(choice.schedule)
        return choice

    return chooser


def results(module: nn.Module, inputs: tuple[torch.Tensor, ...], program: Program) -> torch.Tensor:
    imported = import_module(module, inputs)
    found, faults = run_program(program, {name: x.numpy() for name, x in zip(program.graph.inputs, inputs, strict=True)})
    assert not faults, faults
    (result,) = returned(imported, [found[name] for name in program.graph.outputs], inputs)
    return result


def exact(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = module.double()(*(x.double() for x in inputs))
    module.float()
    return result


@settings(max_examples=draws(12), deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**31), target=st.sampled_from([H200, A100]))
def test_any_candidate_is_as_accurate_as_float32(seed: int, target: Machine) -> None:
    """Of random layers, also of sums that are too short to be candidates."""
    random = Random(seed)
    with torch.random.fork_rng(devices=[]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(space, "FEWEST_OF_PAIRS", 1)
        torch.manual_seed(seed)
        module, inputs = drawn(random.choice(FORMS), random)
        used: list[Scheduled] = []
        program = planned(module.eval(), inputs, target, picking(random.randrange, used))
    assert all(schedule.pairs for schedule in used)
    expected = exact(module, inputs)
    error = (results(module, inputs, program).double() - expected).abs().max()
    assert error <= 16 * UNIT * max(1.0, float(expected.abs().max())), used


@settings(max_examples=draws(12), deadline=None, derandomize=True, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
@EACH_PAIRS
@given(seed=st.integers(0, 2**31), target=st.sampled_from([H200, ONE]))
def test_any_candidate_of_warpgroups_is_as_accurate_as_float32(numerics: Numerics, seed: int, target: Machine) -> None:
    random = Random(seed)
    with torch.random.fork_rng(devices=[]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(warpgroup_space, "FEWEST_OF_PAIRS", 1)
        torch.manual_seed(seed)
        module, inputs = drawn_for_warpgroups(random)
        used: list[Scheduled] = []
        program = planned(module.eval(), inputs, target, picking(lambda count: random.randrange(max(count, 1)), used, WARPGROUP, numerics))
    assume(used)
    assert all(schedule.pairs for schedule in used) and (numerics is HALF_PAIRS or all(schedule.pairs == 1 for schedule in used))
    expected = exact(module, inputs)
    error = (results(module, inputs, program).double() - expected).abs().max()
    assert error <= 16 * UNIT * max(1.0, float(expected.abs().max())), used


@pytest.mark.in_turns(3)
@pytest.mark.parametrize(
    "schedule",
    [
        TensorCoreSchedule(32, 32, 16, 1, 2, 2, pairs=1),
        TensorCoreSchedule(64, 16, 32, 2, 1, 3, pairs=1),
        TensorCoreSchedule(32, 32, 32, 2, 2, 1, pairs=1),
        TensorCoreSchedule(64, 32, 16, 2, 4, 2, 3, pairs=1),
        TensorCoreSchedule(32, 64, 16, 2, 2, 2, 4, 1, pairs=1),
        TensorCoreSchedule(32, 32, 16, 1, 2, 2, staged=1, pairs=1),
        WarpgroupSchedule(16, 1, 2, pairs=1),
        WarpgroupSchedule(128, 2, 3, pairs=1),
        WarpgroupSchedule(32, 2, 3, cluster=2, pairs=1),
        WarpgroupSchedule(48, 2, 2, split=3, pairs=1),
        WarpgroupSchedule(32, 1, 4, split=2, meeting=1, pairs=1),
        WarpgroupSchedule(64, 1, 3, staged=1, persistent=1, pairs=1),
        WarpgroupSchedule(16, 1, 2, pairs=2),
        WarpgroupSchedule(128, 2, 3, pairs=2),
        WarpgroupSchedule(32, 2, 3, cluster=2, pairs=2),
        WarpgroupSchedule(48, 2, 2, split=3, pairs=2),
        WarpgroupSchedule(32, 1, 4, split=2, meeting=1, pairs=2),
        WarpgroupSchedule(64, 1, 3, staged=1, persistent=1, pairs=2),
    ],
    ids=str,
)
def test_schedules(schedule: Scheduled) -> None:
    torch.manual_seed(0)
    module, inputs = nn.Conv2d(32, 40, (2, 4), padding=1).eval(), (torch.randn(1, 32, 7, 9),)
    used: list[Scheduled] = []
    program = planned(module, inputs, ONE, picking(schedule, used))
    found = results(module, inputs, program)
    expected = exact(module, inputs)
    assert used == [schedule]
    assert not any(loadable_kernel(kernel).tf32 for lowered in program.regions for kernel in lowered.kernels)
    assert (found.double() - expected).abs().max() <= 8 * UNIT * expected.abs().max()


def truncating(kind: str) -> Any:
    """The product with the sums that tensor cores truncate."""
    original, shape = USUAL_PRODUCT(kind), mma.SHAPES[kind]

    def meaning(sums: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        left, right = shape.a.matrix(mma.exact(a, kind)), shape.b.matrix(mma.exact(b, kind))
        return shape.sums.of(truncated_product(shape.sums.matrix(sums), left[:, None], right.T[None]))

    return replace(original, name=f"{original.name}, truncating", meaning=meaning)


def truncating_wide(kind: str, n: int, a: Any, b: Any) -> Any:
    """The product by a warpgroup, of rows in registers, with the sums that tensor cores truncate."""
    original, shape = USUAL_WIDE(kind, n, a, b), mma.SHAPES[kind]

    def meaning(add: np.ndarray, sums: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        fragment = wgmma.sums_fragment(n)
        left = np.concatenate([shape.a.matrix(part) for part in mma.exact(a, kind).reshape(-1, 32, shape.a.size)])
        return fragment.of(truncated_product(fragment.matrix(sums), left[:, None], mma.exact(b, kind).reshape(n, -1)[None]))

    return replace(original, name=f"{original.name}, truncating", meaning=meaning)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    "schedule",
    [TensorCoreSchedule(32, 32, 32, 2, 1, 2, pairs=1), WarpgroupSchedule(32, 1, 2, pairs=1), WarpgroupSchedule(32, 1, 2, pairs=2)],
    ids=str,
)
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("products", [space.FEWEST_OF_PAIRS, 520, 2048])
def test_errors_are_those_of_float32_where_sums_are_truncated(
    products: int, positive: bool, schedule: Scheduled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mma, "_mma", truncating)
    monkeypatch.setattr(wgmma, "_multiplying", truncating_wide)
    torch.manual_seed(products)
    module, x = nn.Linear(products, 32, bias=False).eval(), torch.randn(64, products)
    if positive:
        x, module.weight.data = x.abs(), module.weight.data.abs()
    expected = exact(module, (x,)).numpy()
    weight = module.weight.detach().numpy()
    usual = of_multiply_adds(x.numpy()[:, None], weight[None])
    found = results(module, (x,), planned(module, (x,), H200, picking(schedule, []))).numpy()
    error, usual_error = (np.sqrt(((values - expected) ** 2).mean()) for values in (found, usual))
    assert error <= 1.05 * usual_error


@pytest.mark.parametrize("pairs", [1, 2])
def test_weights_make_good_what_tensor_cores_cut_off(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slope of errors over results is nearer to zero with enlarged weights (`packing.CUT_OFF`), and so are the errors."""
    monkeypatch.setattr(wgmma, "_multiplying", truncating_wide)
    torch.manual_seed(0)
    module, x = nn.Linear(256, 64, bias=False).eval(), torch.rand(256, 256)
    module.weight.data = torch.randn(64, 256).abs()
    expected, biases, errors = exact(module, (x,)), [], []
    for cut_off in (packing.CUT_OFF, dict.fromkeys(packing.CUT_OFF, 0.0)):
        monkeypatch.setattr(packing, "CUT_OFF", cut_off)
        found = results(module, (x,), planned(module, (x,), H200, picking(WarpgroupSchedule(32, 1, 2, pairs=pairs), []))).double()
        biases.append(float(((found - expected) * expected).mean() / expected.square().mean()) / UNIT)
        errors.append(float((found - expected).square().mean()))
    assert biases[0] - biases[1] == pytest.approx({1: 1.2, 2: 0.75}[pairs], abs=0.2)
    assert abs(biases[0]) < abs(biases[1]) and errors[0] < errors[1]


@pytest.mark.parametrize("scale", [1e-28, 1e18])
def test_range(scale: float) -> None:
    """Factors of 2^-102 and more keep their low parts, which are normal numbers then, up to the largest ones that do not round to infinity."""
    torch.manual_seed(0)
    module, x = nn.Linear(128, 32, bias=False).eval(), torch.randn(32, 128)
    found = results(module, (x * scale,), planned(module, (x * scale,), H200, picking(TensorCoreSchedule(32, 32, 32, 2, 1, 2, pairs=1), [])))
    expected = exact(module, (x * scale,))
    assert (found.double() - expected).abs().max() <= 8 * UNIT * expected.abs().max()
    found = results(module, (x / 0,), planned(module, (x / 0,), H200, picking(TensorCoreSchedule(32, 32, 32, 2, 1, 2, pairs=1), [])))
    assert found.isnan().all()


@pytest.mark.parametrize("scale, accurate", [(2.0**-12, True), (1.0, True), (65_000 / 4, True), (2.0**-24, False)])
def test_range_of_float16(scale: float, accurate: bool) -> None:
    """First factors below 65,520 keep 2^-22 of themselves, or 2^-36; weights have a unit of their own."""
    torch.manual_seed(0)
    module, x = nn.Linear(128, 32, bias=False).eval(), torch.rand(32, 128) * 4 * scale
    module.weight.data *= 1e4
    schedule = WarpgroupSchedule(32, 1, 2, pairs=2)
    found, expected = results(module, (x,), planned(module, (x,), H200, picking(schedule, []))), exact(module, (x,))
    error = (found.double() - expected).abs().max()
    assert (error <= 8 * UNIT * expected.abs().max()) == accurate
    assert error <= 8 * UNIT * expected.abs().max() + 2.0**-36 * module.weight.abs().sum(1).max()
    for beyond in (65_520.0, torch.inf):
        x[0, 0] = beyond
        found = results(module, (x,), planned(module, (x,), H200, picking(schedule, [])))
        assert found[0].isnan().all() and found[1:].isfinite().all()


def test_candidates_are_those_that_the_caller_allows() -> None:
    problems: list[Problem] = []

    def chooser(problem: Problem, machine: Machine, threads: int) -> Choice:
        problems.append(problem)
        return choose(problem, machine, threads)

    for width in (512, space.FEWEST_OF_PAIRS - 4):
        planned(nn.Linear(width, 512), (torch.zeros(1024, width),), H200, chooser)
    for numerics, pairs in ((Numerics(), None), (Numerics(tf32=True), 0), (PAIRS, 1), (Numerics(tf32=True, tf32_pairs=True), 0)):
        ranking = rank(problems[0], H200, numerics=numerics, learned=False)
        own = [part for part in ranking.parts if part.schema in (TENSOR_CORES, WARPGROUP)]
        assert [set(part.candidates["pairs"].tolist()) for part in own] == ([] if pairs is None else [{pairs}] * 2)
        assert all((type(part.counts) is PairCounts) == bool(pairs) for part in own)
    assert ranking.first().schema in (TENSOR_CORES, WARPGROUP)  # in TF32
    of_half = {part.schema.name: part for part in rank(problems[0], H200, numerics=HALF_PAIRS).parts}
    assert set(of_half[WARPGROUP.name].candidates["pairs"]) == {2} and set(of_half[TENSOR_CORES.name].candidates["pairs"]) == {1}
    assert type(of_half[WARPGROUP.name].counts) is HalfPairCounts
    rejections = rank(problems[1], H200, numerics=PAIRS).rejections
    assert all("a sum of so few products is more accurate on CUDA cores" in rejections[schema.name] for schema in (TENSOR_CORES, WARPGROUP))


def test_what_warpgroups_do_not_split_is_refused() -> None:
    constant, computed = layer_problem("R7", 4, "fp32-tensor"), problem_of(Product(2, 256, 256, 256, swapped=1, precision="fp32-tensor"))
    whole = WarpgroupSchedule(64, 1, 2, pairs=1)
    narrow = problem_of(Convolution(1, 8, 64, (16, 16), (3, 3), precision="fp32-tensor"))
    for problem, schedule, why in (
        (constant, replace(whole, swapped=1), "split rows of the first factor alone"),
        (computed, whole, "the second of them a constant"),
        (narrow, replace(whole, pairs=2), "more channels than there are"),
    ):
        form = form_of(WARPGROUP, problem, H200)
        assert not isinstance(form, Unsuitable)
        with pytest.raises(Unsuitable, match=why):
            WARPGROUP.lower(problem, form, schedule, H200)
    ranking = rank(computed, H200, numerics=PAIRS, learned=False)
    assert all(part.schema is not WARPGROUP for part in ranking.parts)
    own = next(part for part in rank(narrow, H200, numerics=HALF_PAIRS, learned=False).parts if part.schema is WARPGROUP)
    assert set(own.candidates["pairs"]) == {1}


def test_compiled_code_has_three_products_and_no_spills() -> None:
    module, inputs = nn.Linear(512, 512), (torch.zeros(4096, 512),)
    tf32, float16, warps = (f"tw_{name}\\(part" for name in ("wgmma_[0-9]+_tf32_held_k128", "wgmma_[0-9]+_f16_held_k64", "mma_tf32"))
    for target, numerics, product, depth in ((H200, PAIRS, tf32, 32), (H200, HALF_PAIRS, float16, 16), (A100, PAIRS, warps, 8)):
        program = planned(module, inputs, target, partial(choose, numerics=numerics))
        (made,) = (lowered for lowered in program.regions if "pairs" in lowered.schedule)
        text = print_cuda(list(made.kernels))
        passed, log = cuda_binary(text, target.architecture)
        assert passed and " 0 bytes spill stores, 0 bytes spill loads" in log, log
        assert "warning" not in log and "serialized" not in log
        assert len(re.findall(product, text)) == 3 * depth // 8 * len(re.findall(r"float part\[\d+\];", text))


@pytest.mark.parametrize("precision", ["fp32-tensor", "fp32-tensor-fp16"])
def test_results_are_verified_as_float32(precision: str) -> None:
    """Weights as pairs of float16 are as exact as float32; other values of 16 bits are not."""
    x = torch.zeros(4096, 512)
    with tilewright.compile(nn.Linear(512, 512), x, "h200", precision=precision) as executable:
        assert any("pairs" in row.schedule for row in executable.plan.rows)
        storage = executable.image.program.storage.values()
    assert any(one.value.dtype == "f16" for one in storage) == precision.endswith("fp16")
    assert narrow_tolerance(stored_types(storage)) == 0
    with tilewright.compile(nn.Linear(512, 512).half(), x.half(), "h200") as executable:
        assert narrow_tolerance(stored_types(executable.image.program.storage.values())) == TOLERANCES["f16"]


@pytest.mark.gpu
@pytest.mark.parametrize("schema, precision", [(TENSOR_CORES, "fp32-tensor"), (WARPGROUP, "fp32-tensor"), (WARPGROUP, "fp32-tensor-fp16")])
@pytest.mark.parametrize("name", ["D6", "R7", "R12"])
def test_candidates_on_a_gpu(name: str, schema: AnySchema, precision: str) -> None:
    """The measuring process compares each with float64, with the tolerance of float32, before it times it."""
    here = machine("cuda")
    problem = layer_problem(name, 2, precision)
    ranking = ranking_of(problem, here, precision)
    number = next(number for number, part in enumerate(ranking.parts) if part.schema is schema)
    positions = Random(name).sample(range(*map(int, ranking.starts[number : number + 2])), 20)
    with Trials(here) as trials:
        outcomes = list(trials.measure([Job(problem, ranking.choice(position).schedule, name) for position in positions]))
    assert not [(str(outcome.job.schedule), outcome.reason) for outcome in outcomes if outcome.status != "measured"]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32-tensor", "fp32-tensor-fp16"])
def test_errors_on_a_gpu_are_at_most_those_of_its_library(precision: str) -> None:
    """Root mean squares over a layer of 4,608 products a sum, against float64."""
    torch.manual_seed(0)
    layer, x = nn.Conv2d(512, 512, 3, padding=1).cuda().eval(), torch.randn(8, 512, 14, 14, device="cuda")
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    with torch.no_grad():
        theirs = layer(x)
        expected = layer.double()(x.double())
    torch.backends.cudnn.allow_tf32 = before
    with tilewright.compile(layer.float(), (x,), precision=precision, winograd=False) as executable:
        assert any("pairs" in row.schedule for row in executable.plan.rows)
        ours = executable(x)
    error, usual = ((found.double() - expected).square().mean().sqrt() for found in (ours, theirs))
    assert error <= 1.05 * usual
