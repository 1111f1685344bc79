"""Attention of few queries on CPUs, split over keys: results under any schedule against PyTorch in float64, and which shapes are computed so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import tilewright
from tests.attention_cases import attention_case, check_case
from tests.compiled import Case, check_native
from tests.draws import draws
from tests.operator_cases import Applied
from tilewright.hardware import machine
from tilewright.ir.region import Unsuitable
from tilewright.kernels.cpu.few_queries.schema import FEW_QUERIES
from tilewright.kernels.cpu.few_queries.space import FewQueriesSchedule, few_queries_space
from tilewright.kernels.schema import form_of
from tilewright.selection.choice import choose

INFINITY, NAN = float("inf"), float("nan")
THREADS = 8
AVX512 = machine("x86-avx512")
TARGETS = ("x86-avx512", "x86-avx2", "cortex-a53")
attend = F.scaled_dot_product_attention


def operands(
    m: int = 1, n: int = 200, size: int = 32, heads: int = 2, keys_heads: int = 2, columns: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, heads, m, size), torch.randn(1, keys_heads, n, size), torch.randn(1, keys_heads, n, columns or size)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((q @ k.transpose(-1, -2)).masked_fill(~mask, -INFINITY), -1) @ v


def holes(m: int, n: int) -> Tensor:
    """A mask with a row of which the first half is masked, and, after the first row, one that is masked completely."""
    mask = torch.rand(m, n) > 0.4
    mask[0, : n // 2] = False
    if m > 1:
        mask[1] = False
    return mask


def spoilt(x: Tensor, *values: float) -> Tensor:
    x = x.clone()
    for at, value in enumerate(values):
        x.flatten()[(at * 577 + 91) % x.numel()] = value
    return x


CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "one query": (attend, operands()),
    "whole tiles": (attend, operands(n=256)),
    "one key": (lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2), -1) @ v, operands(n=2)),
    "eight queries": (attend, operands(m=8, n=130)),
    "grouped queries": (partial(attend, enable_gqa=True), operands(m=2, heads=6)),
    "more columns than registers": (attend, operands(m=2, columns=160)),
    "batch": (attend, tuple(torch.randn(3, 2, size, 16) for size in (2, 90, 90))),
    "no batch": (lambda q, k, v: torch.softmax(q @ k.T, -1) @ v, (torch.randn(3, 16), torch.randn(70, 16), torch.randn(70, 48))),
    "causal": (partial(attend, is_causal=True), operands(m=5)),
    "mask": (masked, (*operands(m=3), holes(3, 200))),
    "mask, zeros": (lambda q, k, v, mask: attend(q, k, v, attn_mask=mask), (*operands(m=3), holes(3, 200))),
    "bias": (lambda q, k, v, bias: attend(q, k, v, attn_mask=bias), (*operands(m=2), torch.randn(1, 1, 1, 200))),
    "bias by distance": (
        lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) - 0.1 * (200 - torch.arange(200)).to(q.dtype), -1) @ v, operands(m=2),
    ),
    "epilogue": (lambda q, k, v, x: F.gelu(attend(q, k, v)) + x, (*operands(m=2), torch.randn(1, 2, 2, 32))),
    "slices of one buffer": (
        lambda q, both: attend(q, *both.unflatten(2, (2, 2, 16)).permute(2, 0, 3, 1, 4)), (torch.randn(1, 2, 2, 16), torch.randn(1, 90, 64)),
    ),
    "large logits": (lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) * 20, -1) @ v, operands(m=2)),
    "not finite": (masked, (spoilt(operands(m=3)[0], INFINITY), *operands()[1:], holes(3, 200))),
    "not finite keys": (attend, (operands()[0], spoilt(operands()[1], INFINITY, NAN), operands()[2])),
    "not finite values": (attend, (*operands()[:2], spoilt(operands()[2], INFINITY, -INFINITY))),
}  # fmt: skip


@pytest.mark.in_turns(7)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_results_are_pytorchs(name: str, target: str) -> None:
    """In one part and in several, with vectors of three lengths, in the interpreter."""
    function, inputs = CASES[name]
    case = attention_case(function, inputs)
    form = form_of(FEW_QUERIES, case.problem, machine(target))
    assert not isinstance(form, Unsuitable), str(form)
    space, _ = few_queries_space(form.facts, machine(target), THREADS)
    schedules = [
        FewQueriesSchedule(int(keys), int(parts), machine(target).vector_lanes()) for keys, parts in zip(space["keys"], space["parts"], strict=True)
    ]
    several = [schedule for schedule in schedules if schedule.parts > 1]
    for schedule in (schedules[0], *several[:: max(len(several) // 2, 1)]):
        check_case(case, schedule, machine(target))


@settings(deadline=None, max_examples=draws(10), suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 2**32), st.integers(1, 8), st.integers(2, 600), st.integers(1, 4), st.integers(1, 9), st.sampled_from([1, 3]), st.integers(1, 64)
)
def test_any_sizes_and_schedules(seed: int, m: int, n: int, size: int, columns: int, group: int, parts: int) -> None:
    torch.manual_seed(seed)
    case = attention_case(partial(attend, enable_gqa=group > 1), operands(m, n, 16 * size, 2 * group, 2, 16 * columns))
    schedule = FewQueriesSchedule(Random(seed).choice((64, 128, 256)), 1, AVX512.vector_lanes())
    tiles = -(-n // schedule.keys)
    parts = -(-tiles // -(-tiles // min(parts, tiles)))  # none is empty
    check_case(case, FewQueriesSchedule(schedule.keys, parts, schedule.lanes), AVX512)


def test_compiled_results_are_pytorchs() -> None:
    """Whatever is chosen, on two threads."""
    names = [name for name in CASES if not name.startswith("not finite")]
    check_native([Case(name, Applied(CASES[name][0]), CASES[name][1], fixed=True) for name in names])


@pytest.mark.parametrize(
    ("why", "function", "inputs"),
    [
        ("9 queries of a head are more than 8", attend, operands(m=9)),
        ("no whole vectors of 16 elements", attend, operands(size=24)),
        (
            "no whole vectors of 16 elements",
            lambda q, k, v: torch.softmax(q @ k, -1) @ v,
            (torch.randn(2, 32), torch.randn(32, 70), torch.randn(70, 32)),
        ),
    ],
)
def test_unsuitable_problems(why: str, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    form = form_of(FEW_QUERIES, attention_case(function, inputs).problem, AVX512)
    assert isinstance(form, Unsuitable) and why in str(form)


def test_choices() -> None:
    """A single head's keys are divided among the threads, many heads' are not; many queries have vectors of queries."""
    one, many, more = (
        attention_case(attend, inputs).problem
        for inputs in (operands(n=4096, heads=1, keys_heads=1), operands(heads=32, keys_heads=32), operands(m=64))
    )
    alone = choose(one, AVX512, THREADS).schedule
    assert isinstance(alone, FewQueriesSchedule) and alone.parts >= THREADS
    heads = choose(many, AVX512, THREADS).schedule
    assert isinstance(heads, FewQueriesSchedule) and heads.parts == 1
    assert not isinstance(choose(more, AVX512, THREADS).schedule, FewQueriesSchedule)


def test_decoding_is_one_region() -> None:
    executable = tilewright.compile(Applied(attend), operands(n=2048, heads=1, keys_heads=1), target="x86-avx512", threads=4, unsupported="error")
    (row,) = executable.plan.rows
    assert row.kind == "attention" and row.schedule.startswith("few queries") and len(executable.image.program.regions[0].calls) == 2
