"""Sums and values read through views that permute or shuffle dimensions: results, adjacent reads, and the order in which values are stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compiled import Case, check_native
from tests.interpreted import check_interpreted
from tests.operator_cases import randomised
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.ir.layout import row_major
from tilewright.ir.problem import Problem
from tilewright.kernels.gpu.gemm.form import product_form
from tilewright.partition.canonical import canonical
from tilewright.partition.layouts import LaidOut
from tilewright.partition.regions import lay_out


class HeadsInRows(nn.Module):
    """A linear layer on the results of attention heads, which are stored one head after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(24, 20)

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.relu(x + 1)  # [images, heads, rows, columns]
        return self.project(heads.permute(0, 2, 1, 3).flatten(2))


class Shuffled(nn.Module):
    """A convolution on shuffled channels (Zhang et al., ShuffleNet, 2018)."""

    def __init__(self, filter_size: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 12, 1)
        self.second = nn.Conv2d(12, 20, filter_size, padding=filter_size // 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        shuffled = x.unflatten(1, (3, 4)).transpose(1, 2).flatten(1, 2)
        return self.second(shuffled)


class NormedInRows(nn.Module):
    """A block of ConvNeXt (Liu et al., 2022): pixels become rows of channels, and then an image again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.spread = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm, self.wide, self.narrow = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        rows = self.norm(self.spread(x).permute(0, 2, 3, 1))
        return x + torch.tanh(self.narrow(torch.relu(self.wide(rows)))).permute(0, 3, 1, 2)


CASES = {
    "heads": (HeadsInRows(), (2, 3, 10, 8)),
    "shuffled": (Shuffled(1), (2, 3, 5, 6)),
    "shuffled 3x3": (Shuffled(3), (2, 3, 5, 6)),
    "normed": (NormedInRows(), (2, 8, 5, 6)),
}


def cases() -> list[Case]:
    return [Case(name, randomised(module), (torch.randn(shape),)) for name, (module, shape) in CASES.items()]


def laid_out(name: str) -> tuple[Any, LaidOut]:
    module, shape = CASES[name]
    graph, _ = simplify(import_module(randomised(module), (torch.randn(shape),)).graph)
    return graph, lay_out(graph)


def products(name: str) -> list[Problem]:
    """The contractions of the case, in order."""
    graph, result = laid_out(name)
    constants = frozenset(graph.constants)
    found = (Problem(region, result.layouts, result.values, constants) for region in result.regions if region.kind == "contraction")
    return [canonical(problem).problem for problem in found]


def reduced(product: Problem) -> list[int | None]:
    """The extents that the product sums over, in order."""
    return [axis.extent for axis in product.region.steps[0].reduction if axis.extent != 1]


def test_results_on_this_cpu() -> None:
    check_native(cases(), calls=2)


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("target", ["h200", "v100"])
def test_results_of_interpreted_gpu_kernels(target: str) -> None:
    check_interpreted(cases(), machine(target))


def test_a_sum_over_heads_and_columns_reads_vectors() -> None:
    (product,) = products("heads")
    assert reduced(product) == [3, 8]
    facts = product_form(product).facts
    assert (facts.a.along, facts.a.vector_width) == ("r", 4) and facts.b.vector_width == 4


def test_a_sum_over_shuffled_channels_takes_them_in_the_order_of_memory() -> None:
    _, second = products("shuffled")
    assert reduced(second) == [3, 4], "channel 3 i + j of the shuffle is channel 4 j + i in memory"
    facts = product_form(second).facts
    assert (facts.a.along, facts.a.vector_width) == ("r", 4) and facts.b.vector_width == 4


def test_what_is_read_permuted_is_stored_in_the_order_of_reading() -> None:
    _, result = laid_out("normed")
    (normed,) = (region.outputs[0] for region in result.regions if region.kind == "row reduction")
    assert result.values[normed].shape == (2, 5, 6, 8) and result.layouts[normed] == row_major((2, 5, 6, 8))
    *_, wide, narrow = products("normed")
    for product in (wide, narrow):
        assert product_form(product).facts.a.along == "r" and product_form(product).facts.a.vector_width == 4
