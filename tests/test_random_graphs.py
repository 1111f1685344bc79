"""Random graphs against float64: some on this CPU, some planned for a GPU and interpreted; and properties of the generator."""

from __future__ import annotations

import pytest
import torch

from tests.random_graphs import Growth, RandomCase, random_case, shrunk, trimmed
from tests.random_operators import call
from tests.random_runs import compiled_faults, interpreted_faults

TOGETHER = 10


def described(cases: list[RandomCase], faults: list[list[str]]) -> str:
    return "\n\n".join("\n".join([str(case), *own]) for case, own in zip(cases, faults, strict=True) if own)


@pytest.mark.parametrize("first", [0, TOGETHER, *(pytest.param(first, marks=pytest.mark.slow) for first in (2 * TOGETHER, 3 * TOGETHER))])
def test_on_this_cpu(first: int) -> None:
    cases = [random_case(seed) for seed in range(first, first + TOGETHER)]
    assert not (wrong := described(cases, compiled_faults(cases, "native", threads=1 + first // TOGETHER % 2))), wrong


@pytest.mark.parametrize("first", [40, pytest.param(46, marks=pytest.mark.slow)])
def test_planned_for_a_gpu(first: int) -> None:
    cases = [random_case(seed) for seed in range(first, first + 6)]
    assert not (wrong := described(cases, interpreted_faults(cases, "h200"))), wrong


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, 200, TOGETHER))
def test_on_the_gpu(first: int) -> None:
    cases = [random_case(seed) for seed in range(first, first + TOGETHER)]
    assert not (wrong := described(cases, compiled_faults(cases, "cuda"))), wrong


def test_a_seed_says_everything() -> None:
    for seed in range(20):
        one, other = random_case(seed), random_case(seed)
        assert str(one) == str(other)
        assert all(torch.equal(a, b) for a, b in zip(one.inputs, other.inputs, strict=True))
        assert all(torch.equal(a.exact, b.exact) for a, b in zip(one.values, other.values, strict=True))
        assert 0 < len(one.nodes) <= 9


def test_pytorch_passes_and_a_small_error_does_not() -> None:
    """The bound is between the errors of float32 and those of a wrong kernel: PyTorch stays within it, an error of a thousandth does not."""
    caught = 0
    for seed in range(60):
        case = random_case(seed)
        with torch.no_grad():
            results = case.module(*case.inputs)
        assert case.wrong(results) == [], case
        spoilt = [x.clone(memory_format=torch.contiguous_format) for x in results]
        for x in spoilt:
            if x.is_floating_point() and x.numel() and float(x.abs().max()) > 0:
                flat = x.view(-1)
                flat[int(x.abs().argmax())] *= 1.001
                caught += bool(case.wrong(spoilt))
                break
        nothing = [torch.full_like(x, float("nan")) if x.is_floating_point() else x + 1 if x.dtype != torch.bool else ~x for x in results]
        assert len(case.wrong(nothing)) == sum(bool(x.numel()) for x in results)
    assert caught > 40


def test_badly_conditioned_operators_are_refused() -> None:
    growth = Growth(0)
    growth.add_input(torch.ones(4, 8) * 0.3 + torch.arange(4)[:, None])
    (value,) = growth.values
    assert growth.add(call("norm of rows that are equal", (value,), lambda x: torch.nn.functional.layer_norm(x, (8,))))
    assert growth.add(call("thirds", (value,), lambda x: x / 3 * 3))
    thirds = growth.values[-1]
    assert not growth.add(call("norm of rows that are nearly equal", (thirds,), lambda x: torch.nn.functional.layer_norm(x, (8,))))
    assert not growth.add(call("comparison of neighbours", (thirds,), lambda x: x > 0.3))
    assert growth.add(call("comparison of what is far apart", (thirds,), lambda x: x > 0.7))


def test_shrinking_leaves_what_fails() -> None:
    """Shrinking a fault of one operator leaves that operator, with an input in place of the operators before it."""
    case = next(c for c in map(random_case, range(200)) if len(c.nodes) > 5 and any("cat" in node.text for node in c.nodes[2:]))
    small = shrunk(case, lambda one: any("cat" in node.text for node in one.nodes))
    assert len(small.nodes) < len(case.nodes) and len(small.nodes) <= 3 and any("cat" in node.text for node in small.nodes)
    assert small.wrong(small.module(*small.inputs)) == []
    assert str(trimmed(small)) == str(small)
