"""Pixels that would map to few sets of the first-level cache are padded by one cache line."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tilewright
from tilewright.compile import read
from tilewright.graph.passes import simplify
from tilewright.hardware import machine as find_machine
from tilewright.partition.cache_padding import with_cache_padding
from tilewright.partition.regions import lay_out


def pitches(channels: int, target: str) -> set[int]:
    """The distance in elements between pixels of the value between two pointwise convolutions."""
    module = nn.Sequential(nn.Conv2d(16, channels, 1), nn.ReLU(), nn.Conv2d(channels, 16, 1))
    graph, _ = simplify(read(module, (torch.zeros(1, 16, 7, 7),)).graph)
    laid_out = with_cache_padding(graph, lay_out(graph), find_machine(target))
    return {layout.strides[-2] for name, layout in laid_out.layouts.items() if laid_out.values[name].shape == (1, channels, 7, 7)}


@pytest.mark.parametrize(
    ("channels", "target", "pitch"),
    [
        (512, "x86-avx512", 528),  # 2,048 bytes: two sets of a way of 4,096 bytes, eight lines in each of 8 ways
        (256, "x86-avx512", 256),  # four lines in each
        (496, "x86-avx512", 496),
        (512, "neoverse-n1", 512),  # a way has 16 KB: two lines in each of 4 ways
        (2048, "neoverse-n1", 2064),
    ],
)
def test_a_line_more_where_few_sets_would_hold_a_tile(channels: int, target: str, pitch: int) -> None:
    assert pitches(channels, target) == {pitch}


def test_results_are_the_same() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(8, 1024, 1), nn.ReLU(), nn.Conv2d(1024, 512, 3, padding=1), nn.Conv2d(512, 8, 1), nn.AdaptiveAvgPool2d(1)).eval()
    x = torch.randn(2, 8, 5, 6)
    expected = module.double()(x.double())
    got = tilewright.compile(module.float(), (x,), target="native")(x)
    assert (got.double() - expected).abs().max() <= 2e-5 * expected.abs().max()
