"""Operators that need no machinery: written as PyTorch modules, they are compiled and fused like all others (DeepCuts, PLDI 2021, section 8)."""

from __future__ import annotations

from inspect import getsource
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.compiled import Case, check_native
from tests.draws import draws
from tests.interpreted import check_interpreted
from tests.new_operators import OctaveConvolution, ShiftConvolutions
from tests.operator_cases import randomised
from tilewright.compile import read
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.ir.region import Region
from tilewright.partition.plan import plan_program

sizes = st.integers(3, 11)


@st.composite
def shifts(draw: st.DrawFn) -> Case:
    kernel, expansion = draw(st.sampled_from((1, 3, 5))), draw(st.sampled_from((1, 2)))
    channels = draw(st.one_of(st.sampled_from((1, 2)).map(lambda count: count * kernel**2), st.integers(kernel**2, kernel**2 + 24)))
    x = torch.randn(draw(st.integers(1, 2)), channels, draw(sizes), draw(sizes))
    return Case(f"shifts of {kernel}x{kernel}", randomised(ShiftConvolutions(channels, expansion, kernel)), (x,))


@st.composite
def octaves(draw: st.DrawFn) -> Case:
    high, low, high_out, low_out = (draw(st.integers(1, 24)) for _ in range(4))
    images, height, width, kernel = draw(st.integers(1, 2)), draw(sizes), draw(sizes), draw(st.sampled_from((1, 3)))
    inputs = torch.randn(images, high, 2 * height, 2 * width), torch.randn(images, low, height, width)
    return Case("octave", OctaveConvolution(high, low, high_out, low_out, kernel), inputs)


few = settings(max_examples=draws(3), deadline=None, suppress_health_check=list(HealthCheck), database=None, phases=(Phase.explicit, Phase.generate))


@few
@given(st.lists(st.one_of(shifts(), octaves()), min_size=2, max_size=3))
def test_on_a_cpu(cases: list[Case]) -> None:
    check_native(cases)


@few
@given(st.lists(st.one_of(shifts(), octaves()), min_size=1, max_size=2))
def test_on_a_gpu(cases: list[Case]) -> None:
    check_interpreted(cases, machine("h200"))


def regions(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], target: str) -> list[Region]:
    graph, _ = simplify(read(module.eval(), inputs).graph)
    return [lowered.region for lowered in plan_program(graph, machine(target), 2, chains=False).regions]


@pytest.mark.parametrize("target", ["x86-avx512", "h200"])
def test_regions_of_shifts(target: str) -> None:
    """Convolutions read through the shifts; normalisations, activations and the residual are epilogues. The model's input gets a halo by a copy."""
    found = regions(ShiftConvolutions(36), (torch.randn(1, 36, 14, 14),), target)
    assert [region.kind for region in found] == ["map", "contraction", "contraction"] and not found[0].nodes
    for region in found[1:]:
        assert {"pad", "slice", "concatenate", "convolution"} <= {node.operator for node in region.nodes}
        assert region.nodes[-1].operator == "relu"


@pytest.mark.parametrize("target", ["x86-avx512", "h200"])
def test_regions_of_uneven_shifts(target: str) -> None:
    """Groups of different sizes are at no regular distances: a shift is one kernel, the convolution after it another, unless it is predicted faster
    that these read through the shift, as on a GPU."""
    found = regions(ShiftConvolutions(40), (torch.randn(1, 40, 14, 14),), target)
    shifts = [{"pad", "slice", "concatenate"} <= {node.operator for node in region.nodes} for region in found]
    assert [region.kind for region in found] == ["map", "contraction", "contraction"] if target == "h200" else ["map", "contraction"] * 2
    assert shifts == ([False, True, True] if target == "h200" else [True, False] * 2)


@pytest.mark.parametrize("target", ["x86-avx512", "h200"])
def test_regions_of_octaves(target: str) -> None:
    """The upsampling is computed where the other convolution's epilogue adds it; both sums are epilogues."""
    inputs = torch.randn(1, 32, 28, 28), torch.randn(1, 32, 14, 14)
    found = [region for region in regions(OctaveConvolution(32, 32, 32, 32), inputs, target) if region.nodes]
    assert sorted(region.kind for region in found) == ["contraction"] * 4 + ["window"]
    operators = [[node.operator for node in region.nodes] for region in found]
    assert ["convolution", "add", "nearest", "add", "relu"] in operators
    assert ["convolution", "add", "add", "relu"] in operators


def test_documented_example() -> None:
    assert getsource(OctaveConvolution) in (Path(__file__).parents[1] / "docs" / "kernels.md").read_text()
