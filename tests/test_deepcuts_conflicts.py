"""COEF_bc of DeepCuts' limit: as in the code by the static analysis, in the limit, and in what explanations print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from tests.attention_cases import attention_case
from tests.direct_cases import Convolution, convolution
from tests.draws import draws
from tests.gpu_cases import Case, convolution_case, matmul_case
from tilewright.analysis.gpu.warps import accesses
from tilewright.hardware import machine
from tilewright.ir.kernel import Kernel
from tilewright.ir.region import Unsuitable
from tilewright.kernels import registry
from tilewright.kernels.columns import length, row, take
from tilewright.kernels.gpu.attention.schema import ATTENTION
from tilewright.kernels.gpu.attention.space import attention_space
from tilewright.kernels.gpu.deepcuts import Launch, Operation, limit
from tilewright.kernels.gpu.deepcuts_conflicts import conflicts
from tilewright.kernels.gpu.deepcuts_limits import Part, fused_seconds, limit_seconds, printed_limit, stages_of, worst_conflicts
from tilewright.kernels.gpu.direct.schedule import CACHED, ORDERS, RS, SHARED, DirectSchedule, S
from tilewright.kernels.gpu.direct.schema import DIRECT
from tilewright.kernels.gpu.gemm.schema import GEMM
from tilewright.kernels.gpu.gemm.space import PADDED, PLAIN, PREFETCHED, SWIZZLED, TRANSPOSED, ContractionSchedule
from tilewright.kernels.gpu.shared_access import SharedLoads, conflict_coefficient
from tilewright.kernels.gpu.winograd.schema import WINOGRAD
from tilewright.kernels.gpu.winograd_fused.schema import WINOGRAD_FUSED
from tilewright.kernels.gpu.winograd_fused.space import fused_winograd_space
from tilewright.kernels.schema import AnySchema, Options, form_of
from tilewright.selection.bounds import as_columns, bounds_of, claimed, is_claim
from tilewright.selection.choice import rank

H200 = machine("h200")


def facts_of(schema: AnySchema, case: Case) -> Any:
    form = form_of(schema, case.problem, H200)
    assert not isinstance(form, Unsuitable), form
    return form.facts


def in_code(kernel: Kernel, buffers: Sequence[str]) -> float:
    """Wavefronts of all warps' loads from buffers in shared memory over those without bank conflicts, by the static analysis."""
    found = [access for access in accesses(kernel) if access.buffer in buffers and access.kind == "load" and access.space == "shared"]
    assert found
    return sum(access.transactions for access in found) / sum(access.ideal for access in found)


def coefficient(schema: AnySchema, case: Case, schedule: object, operations: int = 1, which: int = 0) -> float:
    return float(conflicts(schema, facts_of(schema, case), as_columns(schedule), operations)[which][0])


def test_a_coefficient_by_hand() -> None:
    """32 lanes read words 16 apart: 16 words in each of two banks. Beside three loads without conflicts that is (16 + 3) / 4."""
    lane = np.arange(32)[None, :]
    apart, adjacent = SharedLoads(16 * lane, 1), SharedLoads(lane, 1, 3)
    assert conflict_coefficient([apart]) == 16 and conflict_coefficient([adjacent]) == 1 and conflict_coefficient([]) == 1
    assert conflict_coefficient([apart, adjacent]) == 19 / 4


@settings(max_examples=draws(40), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    blocks=st.tuples(st.sampled_from((16, 32, 64)), st.sampled_from((16, 32, 64)), st.sampled_from((8, 16, 32))),
    threads=st.tuples(st.sampled_from((2, 4, 8)), st.sampled_from((2, 4, 8))),
    stages=st.sampled_from((1, 2)),
    layout=st.sampled_from((PADDED, SWIZZLED, TRANSPOSED)),
    loop=st.sampled_from((0, PREFETCHED, PLAIN)),
    transpose=st.booleans(),
)
def test_products(blocks: Any, threads: Any, stages: int, layout: int, loop: int, transpose: bool) -> None:
    (bm, bn, bk), (tm, tn) = blocks, threads
    schedule = ContractionSchedule(bm, bn, bk, tm, tn, 1, stages, layout=layout, loop=loop)
    assume(schedule.threads % 32 == 0 and schedule.threads <= 512)
    case = matmul_case(m=128, n=128, r=64, transpose_a=transpose)
    try:
        (kernel,) = registry.lower(case.problem, schedule, H200).kernels
    except Unsuitable:
        return
    assert coefficient(GEMM, case, schedule) == pytest.approx(in_code(kernel, ("a_tile", "b_tile")))


@settings(max_examples=draws(40), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    kernel=st.sampled_from((RS, S)),
    sizes=st.tuples(st.sampled_from((1, 2, 4, 8)), st.integers(1, 4), st.integers(1, 5)),
    warp=st.sampled_from([(k, y, 32 // k // y) for k in (1, 2, 4, 8) for y in (1, 2, 4, 8) if k * y <= 32]),
    filters=st.sampled_from((SHARED, CACHED)),
    order=st.integers(0, len(ORDERS) - 1),
    stride=st.tuples(st.integers(1, 2), st.integers(1, 2)),
)
def test_direct_convolutions(kernel: int, sizes: Any, warp: Any, filters: int, order: int, stride: Any) -> None:
    case = convolution(Convolution(8, 32, (12, 12), stride=stride, epilogue=False))
    (rk, ry, rx), (wk, wy, wx) = sizes, warp
    schedule = DirectSchedule(kernel, rk, ry, rx, wk, wy, wx, 1, 1, 1, channels=8, stages=2, filters=filters, order=order)
    try:
        (first, *_) = registry.lower(case.problem, schedule, H200).kernels
    except Unsuitable:
        return
    assert coefficient(DIRECT, case, schedule) == pytest.approx(in_code(first, ("patch", "filter_tile")))


@pytest.mark.parametrize("seed", range(6))
def test_winograd_in_one_kernel(seed: int) -> None:
    case = convolution_case(channels=16, outputs=32, size=(12, 12))
    candidates, _ = fused_winograd_space(facts_of(WINOGRAD_FUSED, case), H200)
    chosen = row(candidates, int(np.random.default_rng(seed).integers(length(candidates))))
    schedule = WINOGRAD_FUSED.schedule_of(chosen, H200)
    (kernel,) = registry.lower(case.problem, schedule, H200).kernels
    assert coefficient(WINOGRAD_FUSED, case, schedule, 3, 1) == pytest.approx(in_code(kernel, ("v_tile", "u_tile")))
    assert coefficient(WINOGRAD_FUSED, case, schedule, 3, 2) == 1 == in_code(kernel, ("sums",))


@pytest.mark.parametrize("seed", range(4))
def test_products_of_winograd_s_algorithm(seed: int) -> None:
    case = convolution_case(channels=32, outputs=32, size=(16, 16))
    facts = facts_of(WINOGRAD, case)
    candidates, _ = WINOGRAD.space(facts, H200, Options())
    schedule = WINOGRAD.schedule_of(row(candidates, int(np.random.default_rng(seed).integers(length(candidates)))), H200)
    kernels = registry.lower(case.problem, schedule, H200).kernels
    product = next(kernel for kernel in kernels if any(access.buffer == "a_tile" for access in accesses(kernel)))
    assert coefficient(WINOGRAD, case, schedule, 3, 1) == pytest.approx(in_code(product, ("a_tile", "b_tile")))


@pytest.mark.parametrize("size", [32, 36, 20], ids=lambda size: f"heads of {size}")
def test_attention(size: int) -> None:
    case = attention_case(F.scaled_dot_product_attention, [torch.randn(1, 2, 64, size) for _ in range(3)])
    facts = facts_of(ATTENTION, case)
    candidates, _ = attention_space(facts, H200)
    some = take(candidates, np.flatnonzero(candidates["split"] == 1))
    for at in np.random.default_rng(size).choice(length(some), 6, replace=False):
        schedule = ATTENTION.schedule_of(row(some, int(at)), H200)
        (kernel,) = registry.lower(case.problem, schedule, H200).kernels
        found = accesses(kernel)
        for which, buffers in enumerate((("queries", "keys"), ("weights", "values"))):
            assert {access.buffer for access in found} >= set(buffers)
            assert coefficient(ATTENTION, case, schedule, 2, which) == pytest.approx(in_code(kernel, buffers)), schedule


def test_conflicts_lower_the_limit() -> None:
    """Section 4.2: the latency of a load is multiplied by COEF_bc."""
    operation, launch = Operation(1e9, 1.0, np.array([10.0]), 1.0), Launch(np.array([132]), np.array([64]), np.array([0]))
    assert limit(operation, launch, H200, 2.0).shared == limit(operation, launch, H200).shared / 2
    case = convolution(Convolution(16, 32, (16, 16), stride=(2, 2), epilogue=False))
    free, crowded = (DirectSchedule(RS, 2, 1, 4, *warp, 1, 1, 1, channels=8) for warp in ((8, 4, 1), (1, 1, 32)))
    facts = facts_of(DIRECT, case)
    found = {schedule: coefficient(DIRECT, case, schedule) for schedule in (free, crowded)}
    assert found[free] == 1 < found[crowded]
    for schedule, times in found.items():
        rows = as_columns(schedule)
        (stage,) = stages_of(DIRECT, facts, rows)
        shown, plain = printed_limit(DIRECT, facts, rows, H200), limit(stage.operation, stage.launch, H200)
        assert shown.shared == pytest.approx(plain.shared / times) and worst_conflicts(DIRECT, facts, rows) == times
        seconds = float(np.ravel(limit_seconds(DIRECT, facts, rows, H200))[0])
        assert seconds == pytest.approx(float(stage.flops / plain.flops(H200)[0]) * times)
        whole = Launch(*(float(np.ravel(number)[0]) for number in vars(stage.launch).values()))
        assert fused_seconds([Part(DIRECT, facts, rows, 1)], whole, H200) == pytest.approx(seconds * float(whole.blocks))


def test_claims_state_conflicts() -> None:
    assert claimed(1e-6, 1.0) == {"DeepCuts' limit": 1e-6} and claimed(float("inf"), 2.0) == {}
    assert claimed(1e-6, 1.3333) == {"DeepCuts' limit with COEF_bc 1.33": 1e-6}
    assert is_claim("DeepCuts' limit with COEF_bc 1.33") and not is_claim("issue")
    case = convolution(Convolution(16, 32, (16, 16), stride=(2, 2), epilogue=False))
    ranking = rank(case.problem, H200)
    crowded = ranking.find(next(choice.schedule for choice in ranking if choice.schema is DIRECT and coefficient(DIRECT, case, choice.schedule) > 1))
    assert crowded is not None
    (name,) = (name for name in bounds_of(case.problem, crowded, H200) if is_claim(name))
    assert name == f"DeepCuts' limit with COEF_bc {coefficient(DIRECT, case, crowded.schedule):.2f}"
