"""Attention on tensor cores: candidates over random sizes and masks in the interpreter, against PyTorch in float64; NVRTC compiles them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.attention_cases import regions_of
from tests.draws import draws
from tests.gpu_cases import Case, execute
from tests.on_device import cuda_binary
from tests.statements import without
from tests.test_attention import INFINITY, attend, holes, masked, of_projections, operands, softmax
from tests.test_half_modules import array_of
from tilewright.analysis.gpu.warps import accesses
from tilewright.codegen.cuda import print_cuda, shared_bytes
from tilewright.compile import read
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.kernel import Invoke, Kernel
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.gpu.bounds import lower_bound
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.kernels.gpu.tensor_attention.schema import TENSOR_ATTENTION
from tilewright.kernels.gpu.tensor_attention.space import TensorAttentionSchedule
from tilewright.kernels.registry import lower
from tilewright.kernels.schema import Numerics
from tilewright.partition.canonical import canonical
from tilewright.partition.plan import plan_program
from tilewright.selection.choice import choose, rank
from tilewright.selection.ranking import Choice, Ranking
from tilewright.text import seconds_text
from tilewright.toolchain.binary import SourceFile
from tilewright.toolchain.compilers import NvrtcCompiler
from tilewright.tuning.trials import Job, Trials
from tilewright.zoo import bert

H200, A100, V100, RTX2080 = map(machine, ("h200", "a100", "v100", "rtx2080"))
KINDS = {"f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32}
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
ERRORS = {"f16": 2.0**-9, "bf16": 2.0**-6, "tf32": 2.0**-8}
"""Largest errors relative to the largest value: weights and the result (and in TF32 all factors, of which a score of 10 is off by 2^-8) are rounded
once."""


def case_of(function: Callable[..., Tensor], inputs: Sequence[Tensor], kind: str) -> Case:
    """The only region of a function, which is attention, of inputs in the type; what is expected is PyTorch's in float64 of the rounded inputs."""
    inputs = [x.to(KINDS[kind]) if x.is_floating_point() else x for x in inputs]
    graph, laid_out, names = regions_of(function, inputs)
    (region,) = laid_out.regions
    assert region.kind == "attention", region.reasons
    expected = function(*(x.double() if x.is_floating_point() else x for x in inputs)).numpy()
    tensors = {**graph.constants, **dict(zip(names, inputs, strict=True))}
    arrays = {name: array_of(tensors[name].contiguous()) for name in region.inputs}
    return Case(region, laid_out.layouts, laid_out.values, arrays, expected)


def ranking_of(case: Case, kind: str, target: Machine = H200) -> Ranking:
    """All candidates; those of tensor cores are its last part."""
    ranking = rank(case.problem, target, numerics=Numerics(tf32=kind == "tf32"), learned=False)
    assert ranking.parts[-1].schema is TENSOR_ATTENTION, ranking.rejections
    return ranking


def picked(ranking: Ranking, random: Random) -> TensorAttentionSchedule:
    schedule: TensorAttentionSchedule = ranking.choice(random.randrange(*map(int, ranking.starts[-2:]))).schedule
    return schedule


def check_case(case: Case, schedule: TensorAttentionSchedule, kind: str, target: Machine = H200) -> None:
    """Interprets the region under a schedule, and compares with the expected result, NaN included."""
    found = execute(case, lower(case.problem, schedule, target))
    if kind == "bf16":
        found = (found.astype(np.uint32) << 16).view(np.float32)
    scale = max(1.0, float(np.abs(case.expected[np.isfinite(case.expected)]).max(initial=0.0)))
    np.testing.assert_allclose(found.astype(np.float64), case.expected, rtol=0, atol=ERRORS[kind] * scale, err_msg=str(schedule))


CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "plain": (attend, operands(40, 75, 16)),
    "one key more than a tile": (attend, operands(17, 33)),
    "no scale": (lambda q, k, v: softmax(q, k, v, lambda s: s), operands()),
    "negative scale": (partial(attend, scale=-0.5), operands()),
    "other size of values": (attend, operands(size=6, columns=20)),
    "odd sizes": (attend, operands(size=5, columns=7)),
    "causal": (partial(attend, is_causal=True), operands(40, 75)),
    "causal, more queries than keys": (partial(attend, is_causal=True), operands(70, 37)),
    "additive mask": (masked, (*operands(), torch.randn(1, 1, 1, 37))),
    "additive mask of minus infinities": (masked, (*operands(), torch.where(holes(1, 1, 20, 37), 0.5, -INFINITY))),
    "additive mask of least numbers": (masked, (*operands(), torch.where(torch.rand(1, 1, 20, 37) > 0.3, 0.5, -6e4))),
    "boolean mask": (masked, (*operands(), holes(1, 1, 20, 37))),
    "boolean mask, plain softmax": (
        lambda q, k, v, mask: softmax(q, k, v, lambda s: s.masked_fill(~mask, -INFINITY)), (*operands(), holes(1, 2, 20, 37)),
    ),
    "grouped queries": (partial(attend, enable_gqa=True), operands(heads=6, keys_heads=2)),
    "soft cap": (lambda q, k, v: softmax(q, k, v, lambda s: torch.tanh(s / 5) * 5), operands()),
    "no batch": (lambda q, k, v: torch.softmax(q @ k.T, -1) @ v, (torch.randn(18, 8), torch.randn(21, 8), torch.randn(21, 12))),
    "one query": (attend, operands(m=1)),
    "slices of one buffer": (of_projections, (torch.randn(2, 19, 3 * 2 * 8),)),
    "epilogue": (lambda q, k, v, x: F.gelu(attend(q, k, v)) + x, (*operands(), torch.randn(1, 2, 20, 8))),
    "heads of 128": (partial(attend, is_causal=True), operands(33, 33, 128, 1, 1)),
    "heads of 256": (attend, operands(16, 40, 256, 1, 1)),
}  # fmt: skip


@pytest.mark.in_turns(7)
@EACH_KIND
@pytest.mark.parametrize("name", CASES)
def test_results_are_pytorchs(name: str, kind: str) -> None:
    case = case_of(*CASES[name], kind)
    ranking = ranking_of(case, kind)
    for number in range(2):
        check_case(case, picked(ranking, Random(f"{name} {number}")), kind)


def test_turing_has_attention_in_float16() -> None:
    for name in ("plain", "odd sizes", "causal"):
        case = case_of(*CASES[name], "f16")
        ranking = ranking_of(case, "f16", RTX2080)
        assert set(ranking.parts[-1].candidates["stages"]) == {1}
        schedule = picked(ranking, Random(name))
        check_case(case, schedule, "f16", RTX2080)
        passed, log = cuda_binary(print_cuda(lower(case.problem, schedule, RTX2080).kernels), RTX2080.architecture)
        assert passed, log
    with pytest.raises(Unsuitable, match="no mma.sync of bf16 with float32 sums, which needs sm_80"):
        TENSOR_ATTENTION.match(case_of(*CASES["plain"], "bf16").problem, RTX2080)


@pytest.mark.in_turns(3)
@EACH_KIND
@pytest.mark.parametrize("name", ["plain", "odd sizes", "boolean mask", "additive mask of minus infinities", "one query", "epilogue", "soft cap"])
def test_divided_keys_give_the_same(name: str, kind: str) -> None:
    """Also where scores have a scale of their own, which the parts share."""
    case = case_of(*CASES[name], kind)
    ranking = ranking_of(case, kind)
    begin, end = map(int, ranking.starts[-2:])
    divided = {schedule.split: schedule for place in range(begin, end) if (schedule := ranking.choice(place).schedule).split > 1}
    assert divided
    for schedule in divided.values():
        assert len(lower(case.problem, schedule, H200).kernels) == 2
        check_case(case, schedule, kind)


@settings(deadline=None, max_examples=draws(15), suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 2**32), st.sampled_from(list(KINDS)), st.integers(1, 70), st.integers(2, 140), st.integers(1, 40), st.integers(1, 40),
    st.sampled_from([1, 3]), st.booleans(), st.sampled_from([H200, A100]),
)  # fmt: skip
def test_any_sizes_and_schedules(seed: int, kind: str, m: int, n: int, size: int, columns: int, group: int, causal: bool, target: Machine) -> None:
    torch.manual_seed(seed)
    case = case_of(partial(attend, is_causal=causal, enable_gqa=group > 1), operands(m, n, size + 1, 2 * group, 2, columns + 1), kind)
    check_case(case, picked(ranking_of(case, kind, target), Random(seed)), kind, target)


@pytest.mark.in_turns
@EACH_KIND
@pytest.mark.parametrize("name", ["plain", "odd sizes", "causal", "heads of 128"])
def test_counts_are_those_of_the_kernel(name: str, kind: str) -> None:
    """Blocks, threads and shared memory."""
    case = case_of(*CASES[name], kind)
    ranking = ranking_of(case, kind)
    begin, end = map(int, ranking.starts[-2:])
    counts = ranking.parts[-1].counts
    assert isinstance(counts, TileCounts)
    for position in Random(name).sample(range(end - begin), 6):
        kernel, *_ = lower(case.problem, ranking.choice(begin + position).schedule, H200).kernels
        assert kernel.launch is not None
        assert counts.blocks[position] == kernel.launch.grid[0]
        assert counts.threads[position] == kernel.launch.block[0]
        assert counts.shared_bytes[position] == shared_bytes(kernel)


def best_of(ranking: Ranking, wide: int) -> TensorAttentionSchedule:
    """The candidate predicted fastest, with warpgroups or without."""
    found = [choice for choice in map(ranking.choice, range(*map(int, ranking.starts[-2:]))) if choice.schedule.wide == wide]
    schedule: TensorAttentionSchedule = min(found, key=lambda choice: choice.seconds).schedule
    return schedule


@pytest.mark.in_turns(1)
@EACH_KIND
@pytest.mark.parametrize("size", [64, 128])
def test_compiled_code_has_the_instructions_and_no_spills(kind: str, size: int) -> None:
    inputs = [torch.zeros(1, 2, 512, size) for _ in range(3)]
    case = case_of(partial(attend, is_causal=True), inputs, kind)
    ranking = ranking_of(case, kind)
    chosen = best_of(ranking, 0)
    for target in (H200, A100):
        (kernel,) = lower(case.problem, chosen, target).kernels
        ptx = ptx_of(kernel, target)
        assert "mma.sync.aligned" in ptx and "ldmatrix" in ptx and "ex2.approx.ftz.f32" in ptx
        assert (".trans" in ptx) == (kind != "tf32")
        assert ("cp.async.cg.shared.global" in ptx) == (chosen.stages > 1 or ranking.parts[-1].facts.copies)


def ptx_of(kernel: Kernel, target: Machine) -> str:
    """The PTX of a kernel that assembles without spills."""
    text = print_cuda([kernel])
    passed, log = cuda_binary(text, target.architecture)
    assert passed and " 0 bytes spill stores, 0 bytes spill loads" in log, log
    assert "serialized" not in log, log  # what the assembler says if products wait for one another
    outcome, ptx, _ = NvrtcCompiler.find(target).translated(SourceFile("attention", text, "cuda", (kernel.name,)))
    assert outcome.succeeded
    return ptx


WIDE = [
    TensorAttentionSchedule(64, 64, 4, 2, 0, 1, 1), TensorAttentionSchedule(128, 32, 8, 3, 0, 1, 1, 1), TensorAttentionSchedule(64, 128, 4, 1, 0, 1, 1),
    TensorAttentionSchedule(128, 16, 8, 2, 0, 2, 1),
]  # fmt: skip
WIDE_CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "several tiles": (attend, operands(70, 150, 64, 1, 1)),
    "causal, heads of 128": (partial(attend, is_causal=True), operands(130, 200, 128, 1, 1)),
    "other size of values": (attend, operands(40, 70, 64, 1, 2, columns=128)),
    "boolean mask": (masked, (*operands(70, 90, 64, 1, 2), holes(1, 1, 70, 90))),
    "grouped queries": (partial(attend, enable_gqa=True), operands(66, 80, 64, heads=4, keys_heads=2)),
}


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", WIDE_CASES)
def test_warpgroups(name: str, kind: str) -> None:
    """Products of four warps together in the interpreter, which knows what is not awaited or published."""
    case = case_of(*WIDE_CASES[name], kind)
    for schedule in WIDE:
        if schedule.split == 1 or "causal" not in name:
            check_case(case, schedule, kind)


@settings(max_examples=draws(6), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], phases=(Phase.generate,))
@given(
    m=st.integers(33, 140), n=st.integers(17, 140), r=st.sampled_from([64, 128, 192]), d=st.sampled_from([64, 128, 256]), causal=st.booleans(),
    kind=st.sampled_from(["f16", "bf16"]), seed=st.integers(0, 10_000),
)  # fmt: skip
def test_warpgroups_of_random_sizes(m: int, n: int, r: int, d: int, causal: bool, kind: str, seed: int) -> None:
    torch.manual_seed(seed)
    case = case_of(partial(attend, is_causal=causal), operands(m, n, r, 1, 1, columns=d), kind)
    ranking = ranking_of(case, kind)
    found = [choice for choice in map(ranking.choice, range(*map(int, ranking.starts[-2:]))) if choice.schedule.wide]
    check_case(case, found[seed % len(found)].schedule, kind)


def test_what_threads_copy_is_published() -> None:
    """Without the fence before the barrier, the tensor cores may not see what the threads' copies stored."""
    case = case_of(*WIDE_CASES["several tiles"], "f16")
    lowered = lower(case.problem, WIDE[0], H200)
    (kernel,) = lowered.kernels

    body = without(kernel.body, lambda s: isinstance(s, Invoke) and s.intrinsic.order == "publish")
    with pytest.raises(AssertionError, match="not published"):
        execute(case, replace(lowered, kernels=(replace(kernel, body=body),)))


@pytest.mark.parametrize("size", [64, 128])
def test_compiled_code_of_warpgroups(size: int) -> None:
    case = case_of(attend, [torch.zeros(1, 16, 2048, size) for _ in range(3)], "f16")
    ranking = ranking_of(case, "f16")
    (kernel,) = lower(case.problem, best_of(ranking, 1), H200).kernels
    ptx = ptx_of(kernel, H200)
    assert "wgmma.mma_async.sync.aligned.m64n" in ptx and "mma.sync.aligned" not in ptx and "fence.proxy.async" in ptx
    assert ranking.first().schedule.wide and not ranking.first().schedule.turns


def test_warpgroups_need_their_instructions_and_whole_panels() -> None:
    case = case_of(*WIDE_CASES["several tiles"], "f16")
    with pytest.raises(Unsuitable, match="no warpgroups multiply such factors on a100"):
        lower(case.problem, WIDE[0], A100)
    assert not rank(case.problem, A100, learned=False).parts[-1].candidates["wide"].any()
    with pytest.raises(Unsuitable, match="warpgroups read queries from shared memory"):
        lower(case.problem, replace(WIDE[0], held=1), H200)
    wide = ranking_of(case, "f16").parts[-1].candidates
    assert wide["wide"].any() and not (wide["wide"] & wide["held"]).any()
    narrow = case_of(attend, operands(70, 80, 48, 1, 1), "f16")
    assert not ranking_of(narrow, "f16").parts[-1].candidates["wide"].any()
    with pytest.raises(Unsuitable, match="no warpgroups multiply"):
        lower(narrow.problem, WIDE[0], H200)


@pytest.mark.parametrize("size", [32, 64, 96, 128])
@pytest.mark.parametrize("kind", ["f16", "tf32"])
def test_shared_memory_has_no_bank_conflicts(kind: str, size: int) -> None:
    case = case_of(attend, [torch.zeros(1, 1, 64, size) for _ in range(3)], kind)
    (kernel,) = lower(case.problem, TensorAttentionSchedule(32, 32, 2, 2), H200).kernels
    found = [access for access in accesses(kernel) if access.space == "shared" and access.kind == "load"]
    assert {access.buffer for access in found} == {"queries", "keys", "values"}
    for access in found:
        assert access.transactions == access.lanes * access.bytes / 128, access


def test_what_tensor_cores_cannot_do_is_refused() -> None:
    case = case_of(*CASES["plain"], "f16")
    with pytest.raises(Unsuitable, match="needs sm_75"):
        TENSOR_ATTENTION.match(case.problem, V100)
    kept = replace(case, values={name: replace(value, dtype="f32") if name in case.region.outputs else value for name, value in case.values.items()})
    with pytest.raises(Unsuitable, match="not stored in one type"):
        TENSOR_ATTENTION.match(kept.problem, H200)
    narrow = case_of(*CASES["odd sizes"], "f16")
    with pytest.raises(Unsuitable, match="too narrow"):
        lower(narrow.problem, TensorAttentionSchedule(16, 16, 1, 2), H200)
    ranking = rank(case_of(*CASES["plain"], "tf32").problem, H200)
    assert all(part.schema is not TENSOR_ATTENTION for part in ranking.parts)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
def test_an_encoder_in_a_lower_precision_has_one_kernel(precision: str) -> None:
    """The prediction by formulas that decides about the region knows the types in which its values are stored."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph, _ = simplify(read(bert.EncoderLayer(128, 2, 256).eval(), (torch.randn(2, 128, 128),)).graph)
    numerics = Numerics(tf32=precision == "tf32")
    chosen: list[Problem] = []

    def noted(problem: Problem, machine: Machine, threads: int) -> Choice:
        if problem.region.kind == "attention":
            chosen.append(problem)
        return choose(problem, machine, threads, numerics)

    program = plan_program(graph, H200, 1, noted, precision, numerics)
    (made,) = (lowered for lowered in program.regions if lowered.region.kind == "attention")
    assert made.schedule.startswith("tensor attention") and made.predicted_seconds is not None
    (reason,) = (reason for reason in made.region.reasons if "predicted in one kernel" in reason)
    (problem,) = chosen
    formulas = rank(problem, H200, numerics=numerics, learned=False).first().seconds
    assert f"{seconds_text(formulas)} predicted in one kernel" in reason


def test_bound_by_hand() -> None:
    case = case_of(attend, [torch.zeros(1, 16, 2048, 64) for _ in range(3)], "f16")
    form = TENSOR_ATTENTION.match(case.problem, H200)
    rows = {
        name: np.array([value])
        for name, value in {"block_m": 64, "block_n": 64, "warps": 4, "stages": 2, "held": 0, "split": 1, "wide": 0, "turns": 0}.items()
    }
    terms = lower_bound(TENSOR_ATTENTION, form.facts, rows, H200).terms
    scores = 16 * 2048 * 2048
    assert terms["fma"] == pytest.approx(scores * 4 * 64 / H200.peak_flops["fp16"])
    assert terms["issue"] == pytest.approx((scores * 128 / 2048 + scores / 32) / 528 / H200.clock_hz)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", WIDE_CASES)
def test_warpgroups_on_a_gpu(name: str, kind: str) -> None:
    here, case = machine("cuda"), case_of(*WIDE_CASES[name], kind)
    with Trials(here) as trials:
        jobs = [Job(canonical(case.problem).problem, schedule, name) for schedule in WIDE if schedule.split == 1 or "causal" not in name]
        outcomes = list(trials.measure(jobs))
    assert not [(str(outcome.job.schedule), outcome.reason) for outcome in outcomes if outcome.status != "measured"]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128])
def test_candidates_of_warpgroups_on_a_gpu(size: int) -> None:
    """Many of one shape: what the assembler makes of registers depends on how many the tiles take."""
    here, case = machine("cuda"), case_of(attend, operands(197, 197, size), "f16")
    ranking = ranking_of(case, "f16", here)
    wide = [choice.schedule for choice in map(ranking.choice, range(*map(int, ranking.starts[-2:]))) if choice.schedule.wide]
    with Trials(here) as trials:
        outcomes = list(trials.measure([Job(canonical(case.problem).problem, schedule, "wide") for schedule in wide]))
    assert not [(str(outcome.job.schedule), outcome.reason) for outcome in outcomes if outcome.status != "measured"]


@pytest.mark.gpu
@EACH_KIND
@pytest.mark.parametrize("name", CASES)
def test_candidates_on_a_gpu(name: str, kind: str) -> None:
    """The measuring process compares each with float64 before it times it."""
    here, case = machine("cuda"), case_of(*CASES[name], kind)
    ranking, random = ranking_of(case, kind, machine("cuda")), Random(name)
    with Trials(here) as trials:
        outcomes = list(trials.measure([Job(canonical(case.problem).problem, picked(ranking, random), name) for _ in range(8)]))
    assert not [(str(outcome.job.schedule), outcome.reason) for outcome in outcomes if outcome.status != "measured"]
