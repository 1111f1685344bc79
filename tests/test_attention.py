"""Attention as one region: which steps have its form, when it joins, and its kernels under any schedule against PyTorch in float64."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.attention_cases import attention_case, check_case, regions_of
from tests.compiled import Case, check_native
from tests.draws import draws
from tests.operator_cases import Applied
from tilewright.codegen.cuda import shared_bytes
from tilewright.compile import read
from tilewright.errors import InternalFault
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.ir.region import Program, Region
from tilewright.kernels.attention_form import attention_form
from tilewright.kernels.cpu.rates import within_reach
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.kernels.registry import lower
from tilewright.kernels.schema import JoinDecision
from tilewright.partition.joining import RowJudge
from tilewright.partition.plan import plan_program
from tilewright.selection.choice import rank
from tilewright.tuning.trial_reference import reference_results
from tilewright.zoo import bert, vision_transformer

INFINITY = float("inf")
H200 = machine("h200")
attend = F.scaled_dot_product_attention


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape)


def operands(
    m: int = 20, n: int = 37, size: int = 8, heads: int = 2, keys_heads: int = 2, columns: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    return normal(1, heads, m, size), normal(1, keys_heads, n, size), normal(1, keys_heads, n, columns or size)


def softmax(q: Tensor, k: Tensor, v: Tensor, logit: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.softmax(logit(q @ k.transpose(-1, -2)), -1) @ v


def holes(*shape: int) -> Tensor:
    """A boolean mask with a row that is masked completely, and one of which the first part is."""
    mask = torch.rand(*shape) > 0.4
    mask[..., 3, :] = False
    mask[..., 5, : shape[-1] - 4] = False
    mask[..., 5, -1] = True
    return mask


def alibi(scores: Tensor) -> Tensor:
    heads, m, n = scores.shape[-3:]
    slopes = torch.tensor([2.0 ** -(i + 1) for i in range(heads)], dtype=scores.dtype).view(heads, 1, 1)
    return scores * 0.3 + slopes * (torch.arange(n) - torch.arange(m).view(m, 1))


def spoilt(x: Tensor, *values: float) -> Tensor:
    """The tensor with some elements replaced, each in a row of its own."""
    x = x.clone()
    for place, value in enumerate(values):
        x[0, 0, 2 * place + 1, place] = value
    return x


def of_projections(x: Tensor, heads: int = 2) -> Tensor:
    """q, k and v are slices of one buffer."""
    q, k, v = x.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return attend(q, k, v)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The reference is PyTorch's definition: what its faster kernels make of NaN depends on the machine."""
    if q.dtype == torch.float32:
        return attend(q, k, v, attn_mask=mask)
    with sdpa_kernel(SDPBackend.MATH):
        return attend(q, k, v, attn_mask=mask)


CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "plain": (attend, operands()),
    "one key more than a tile": (attend, operands(17, 33)),
    "one key": (lambda q, k, v: softmax(q, k, v, lambda s: s), operands(9, 2)),
    "no scale": (lambda q, k, v: softmax(q, k, v, lambda s: s), operands()),
    "other size of values": (attend, operands(size=6, columns=20)),
    "odd sizes": (attend, operands(size=5, columns=7)),
    "causal": (partial(attend, is_causal=True), operands()),
    "causal, more queries than keys": (partial(attend, is_causal=True), operands(40, 19)),
    "additive mask": (masked, (*operands(), normal(1, 1, 1, 37))),
    "additive mask of minus infinities": (masked, (*operands(), torch.where(holes(1, 1, 20, 37), 0.5, -INFINITY))),
    "boolean mask": (masked, (*operands(), holes(1, 1, 20, 37))),
    "boolean mask, plain softmax": (
        lambda q, k, v, mask: softmax(q, k, v, lambda s: s.masked_fill(~mask, -INFINITY)), (*operands(), holes(1, 2, 20, 37)),
    ),
    "grouped queries": (partial(attend, enable_gqa=True), operands(heads=6, keys_heads=2)),
    "bias by distance": (lambda q, k, v: softmax(q, k, v, alibi), operands()),
    "soft cap": (lambda q, k, v: softmax(q, k, v, lambda s: torch.tanh(s / 5) * 5), operands()),
    "no batch": (lambda q, k, v: torch.softmax(q @ k.T, -1) @ v, (normal(18, 8), normal(21, 8), normal(21, 12))),
    "one query": (attend, operands(m=1)),
    "slices of one buffer": (of_projections, (normal(2, 19, 3 * 2 * 8),)),
    "epilogue": (lambda q, k, v, x: F.gelu(attend(q, k, v)) + x, (*operands(), normal(1, 2, 20, 8))),
    "large logits": (lambda q, k, v: softmax(q, k, v, lambda s: s * 20), operands()),
    "not finite queries": (attend, (spoilt(operands()[0], INFINITY, -INFINITY, float("nan")), *operands()[1:])),
    "not finite keys": (attend, (operands()[0], spoilt(operands()[1], INFINITY, float("nan")), operands()[2])),
    "not finite values": (attend, (*operands()[:2], spoilt(operands()[2], INFINITY, -INFINITY, float("nan")))),
    "not finite queries, masked": (masked, (spoilt(operands()[0], INFINITY, 0.5, float("nan")), *operands()[1:], holes(1, 1, 20, 37))),
    "not finite values, masked": (masked, (*operands()[:2], spoilt(operands()[2], INFINITY, float("nan")), holes(1, 1, 20, 37))),
}  # fmt: skip


@pytest.mark.in_turns(9)
@pytest.mark.parametrize("name", CASES)
def test_results_are_pytorchs(name: str) -> None:
    """Under schedules drawn from the spaces of a GPU and of this CPU, in the interpreter."""
    function, inputs = CASES[name]
    case = attention_case(function, inputs)
    for target in ("h200", "native"):
        ranking = rank(case.problem, machine(target))
        check_case(case, ranking.choice(Random(name).randrange(ranking.candidates)).schedule, machine(target))


def test_compiled_results_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowJudge, "in_one", lambda *_: JoinDecision(True, "asked for"))
    names = ("plain", "odd sizes", "causal", "boolean mask", "grouped queries", "slices of one buffer", "epilogue", "not finite queries")
    check_native([Case(name, Applied(CASES[name][0]), CASES[name][1], fixed=True) for name in names])


@settings(deadline=None, max_examples=draws(8), suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 2**32), st.integers(1, 40), st.integers(2, 70), st.integers(1, 24), st.integers(2, 24), st.sampled_from([1, 2, 3]), st.booleans()
)
def test_any_sizes_and_schedules(seed: int, m: int, n: int, size: int, columns: int, group: int, causal: bool) -> None:
    """On a GPU with asynchronous copies, one without, and this CPU."""
    torch.manual_seed(seed)
    q, k, v = operands(m, n, size + 1, 2 * group, 2, columns)
    case = attention_case(partial(attend, is_causal=causal, enable_gqa=group > 1), (q, k, v))
    for target in ("h200", "v100", "native"):
        ranking = rank(case.problem, machine(target))
        check_case(case, ranking.choice(Random(seed).randrange(ranking.candidates)).schedule, machine(target))


DIVIDED = ("plain", "odd sizes", "other size of values", "boolean mask", "additive mask of minus infinities", "grouped queries", "one query",
           "no batch", "epilogue", "large logits", "not finite values, masked")  # fmt: skip


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("name", DIVIDED)
def test_divided_keys_give_the_same(name: str) -> None:
    """Parts of one, two or three tiles, also where all keys of a part are masked."""
    case = attention_case(*CASES[name])
    ranking = rank(case.problem, H200)
    schedules = (ranking.choice(place).schedule for place in range(ranking.candidates))
    divided = sorted({schedule.split: schedule for schedule in schedules if schedule.split > 1}.values(), key=lambda schedule: schedule.split)
    assert len(divided) >= 1
    for schedule in divided:
        assert len(lower(case.problem, schedule, H200).kernels) == 2
        check_case(case, schedule, H200)


def test_few_queries_divide_the_keys() -> None:
    """A query for each of 16 heads would leave most processors idle; a causal mask, and as many queries as keys, divide nothing."""
    few, many, causal = (
        rank(attention_case(partial(attend, is_causal=mask), operands(m, 2048, 64, 16, 16)).problem, H200)
        for m, mask in ((1, False), (2048, False), (2048, True))
    )
    assert few.first().schedule.split >= 4
    assert many.first().schedule.split == 1
    assert all(causal.choice(place).schedule.split == 1 for place in range(causal.candidates))


@pytest.mark.parametrize("name", ["plain", "odd sizes", "causal", "one query"])
def test_counts_are_those_of_the_kernel(name: str) -> None:
    """Blocks, threads and shared memory; and with a causal mask the tiles of keys over which the blocks pass."""
    case = attention_case(*CASES[name])
    ranking = rank(case.problem, H200)
    (part,) = ranking.parts
    for position in Random(name).sample(range(ranking.candidates), 8):
        kernel, *_ = lower(case.problem, ranking.choice(position).schedule, H200).kernels
        assert isinstance(part.counts, TileCounts) and kernel.launch is not None
        assert part.counts.blocks[position] == kernel.launch.grid[0]
        assert part.counts.threads[position] == kernel.launch.block[0]
        assert part.counts.shared_bytes[position] == shared_bytes(kernel)


def test_passes_are_tiles_of_keys_that_queries_see() -> None:
    facts = attention_form(attention_case(*CASES["causal, more queries than keys"]).problem).facts
    assert (facts.m, facts.n, facts.shift) == (40, 19, 0)
    # queries 0 to 15 see 16 keys or fewer, the others up to 19
    assert facts.passes(np.array([16, 40, 16]), np.array([8, 8, 32])).tolist() == [(2 + 3 + 3) / 3, 3, 1]
    assert replace(facts, shift=None).passes(np.array([16]), np.array([8])).tolist() == [3]


@pytest.mark.parametrize("name", ["boolean mask", "grouped queries", "slices of one buffer", "epilogue"])
def test_reference_of_trials(name: str) -> None:
    """Candidates are checked against sums of products by PyTorch, not by the expanded definition."""
    case = attention_case(*CASES[name])
    (result,) = reference_results(case.problem, {name: torch.from_numpy(x.copy()) for name, x in case.inputs.items()}).values()
    torch.testing.assert_close(result, torch.from_numpy(case.expected), rtol=1e-9, atol=1e-9)


def planned(module: nn.Module, *inputs: Tensor, target: str = "h200") -> list[Region]:
    return [lowered.region for lowered in program_of(module, *inputs, target=target).regions]


def program_of(module: nn.Module, *inputs: Tensor, target: str) -> Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph, _ = simplify(read(module.eval(), inputs).graph)
    return plan_program(graph, machine(target), 2)


ENCODERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "bert": lambda: (bert.EncoderLayer(128, 2, 256), normal(2, 128, 128)),
    "vit": lambda: (vision_transformer.EncoderLayer(128, 2, 256), normal(1, 197, 128)),
}


@pytest.mark.parametrize("target", ["h200", "x86-avx2"])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_have_one_region_of_attention(name: str, target: str) -> None:
    """Which replaces the scale, both products and the softmax, and says what both ways are predicted to take."""
    program = program_of(*ENCODERS[name](), target=target)
    regions = [lowered.region for lowered in program.regions]
    (region,) = [region for region in regions if region.kind == "attention"]
    assert {"matmul", "softmax"} <= {node.operator for node in region.nodes}
    assert not any({"matmul", "softmax"} & {node.operator for node in other.nodes} for other in regions if other is not region)
    (reason,) = region.reasons
    times = re.search(r"attention takes ([\d.]+) ([um]s) predicted in one kernel, ([\d.]+) ([um]s) with stored scores", reason)
    assert times is not None, reason
    scale = {"us": 1.0, "ms": 1e3}
    assert float(times[1]) * scale[times[2]] < float(times[3]) * scale[times[4]]
    assert [decision.text for decision in program.search if decision.taken and "attention takes" in decision.text] == [reason]


@pytest.mark.parametrize("target", ["x86-avx2", "x86-avx512", "xeon-8124m", "xeon-sapphire-rapids", "epyc-9655"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("heads", "length"), [(16, 2048), (12, 512), (12, 384)])
def test_scores_of_long_sequences_are_not_stored(target: str, threads: int, heads: int, length: int) -> None:
    """Few threads of a large CPU reach a part of its memory's bandwidth, and the scores pass through it several times."""
    graph, _ = simplify(read(Applied(attend).eval(), tuple(torch.zeros(1, heads, length, 64) for _ in range(3))).graph)
    regions = [lowered.region for lowered in plan_program(graph, machine(target), threads).regions]
    assert [region.kind for region in regions] == ["attention"], regions[-1].reasons


def test_bandwidth_within_reach() -> None:
    """The worked example of `kernels.cpu.rates`, and machines of which all cores work."""
    large = machine("xeon-sapphire-rapids")
    assert within_reach(large, 2).memory_bandwidth == pytest.approx(2 * 16 * 64 / (270 / 3e9))
    assert within_reach(large, large.processors) == large == within_reach(large, 2 * large.processors)
    assert within_reach(machine("x86-avx512"), 1).memory_bandwidth == 16e9  # its share is more


def test_a_fault_in_the_judgement_keeps_regions_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*_: object) -> JoinDecision:
        raise IndexError("no such candidate")

    monkeypatch.setattr(RowJudge, "in_one", fault)
    graph, _ = simplify(read(Applied(attend).eval(), operands()).graph)
    with pytest.warns(InternalFault, match="no such candidate"):
        regions = [lowered.region for lowered in plan_program(graph, H200, 1).regions]
    assert not any(region.kind == "attention" for region in regions)
    assert any("a fault inside Tilewright: IndexError" in reason for region in regions for reason in region.reasons)


def test_slower_attention_stays_apart() -> None:
    """A query and few long keys leave most of a tile empty, and the reason has both times."""
    program = program_of(Applied(attend), *operands(1, 64, 256, 1, 1), target="h200")
    regions = [lowered.region for lowered in program.regions]
    assert not any(region.kind == "attention" for region in regions)
    assert any("predicted in one kernel" in reason and "with stored scores" in reason for region in regions for reason in region.reasons)
    (decision,) = [decision for decision in program.search if "attention takes" in decision.text]
    assert not decision.taken and "us with stored scores" in decision.text


@pytest.mark.parametrize(
    ("why", "function"),
    [
        ("the scores are a result", lambda q, k, v: ((s := q @ k.transpose(-1, -2)), torch.softmax(s, -1) @ v)),
        ("the weights are a result", lambda q, k, v: ((w := torch.softmax(q @ k.transpose(-1, -2), -1)), w @ v)),
        ("the weights are read twice", lambda q, k, v: (w := torch.softmax(q @ k.transpose(-1, -2), -1)) @ v + (w @ k).sum()),
        ("softmax over queries", lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2), -2) @ v),
        ("no softmax", lambda q, k, v: torch.sigmoid(q @ k.transpose(-1, -2)) @ v),
        ("squared weights", lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2), -1).square() @ v),
        ("log softmax", lambda q, k, v: torch.log_softmax(q @ k.transpose(-1, -2), -1) @ v),
    ],
)
def test_other_products_are_no_attention(why: str, function: Callable[..., Tensor]) -> None:
    _, laid_out, _ = regions_of(function, operands(24, 24))
    assert not any(region.kind == "attention" for region in laid_out.regions), why
