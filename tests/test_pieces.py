"""Concatenations of slices of one value at regular distances: which become one load, what reads through it, and results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.compiled import Case, check_native
from tests.draws import IN_THIRDS, draws
from tests.interpreted import check_interpreted
from tests.operator_cases import Applied
from tilewright.compile import read
from tilewright.graph.passes import simplify
from tilewright.graph.table import OPERATORS
from tilewright.hardware import machine
from tilewright.ir.expr import Load
from tilewright.partition.pieces import as_one_load
from tilewright.partition.regions import lay_out


def phases(x: Tensor) -> Tensor:
    """The four phases of an image as channels (YOLOv5's first layer)."""
    return torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1)


def merged_patches(x: Tensor) -> Tensor:
    """The same along the last dimension (Swin's patches)."""
    return torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)


def shifted(x: Tensor) -> Tensor:
    """Thirds of the channels, one row up, in place, and one row down."""
    padded, third = F.pad(x, (0, 0, 1, 1)), x.shape[1] // 3
    return torch.cat([padded[:, at * third : (at + 1) * third, at : at + x.shape[2]] for at in range(3)], 1)


def shifted_along(x: Tensor) -> Tensor:
    """A window of four columns, moved by three each time, twelve times."""
    return torch.cat([F.pad(x, (3, 40))[..., 3 * at : 3 * at + 4] for at in range(12)], 3)


def reversed_groups(x: Tensor) -> Tensor:
    return torch.cat(list(reversed(x.split(2, 1))), 1)


def repeated(x: Tensor) -> Tensor:
    return torch.cat([x, x, x], 2)


def irregular(x: Tensor) -> Tensor:
    return torch.cat([x[:, :2], x[:, 1:3], x[:, 3:5]], 1)


def unequal(x: Tensor) -> Tensor:
    return torch.cat([x[:, :2], x[:, 2:5]], 1)


def of_two(x: Tensor) -> Tensor:
    return torch.cat([x[:, :2], x.mul(2)[:, 2:4]], 1)


def other_fill(x: Tensor) -> Tensor:
    padded = F.pad(x, (0, 0, 1, 1), value=1.0)
    return torch.cat([padded[:, :3, :-2], padded[:, 3:, 2:]], 1)


def cropped(x: Tensor) -> Tensor:
    """Zeros where the value has elements."""
    padded = F.pad(x[:, :, 1:-1], (0, 0, 1, 1))
    return torch.cat([padded[:, :3], padded[:, 3:]], 1)


REGULAR = [phases, merged_patches, shifted, shifted_along, reversed_groups, repeated, other_fill, cropped]
OTHERS = [irregular, unequal, of_two]


def image(function: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.randn(2, 8, 10, 6) if function is merged_patches else torch.randn(2, 6, 8, 10)


@pytest.mark.parametrize("function", [*REGULAR, *OTHERS])
def test_which_maps_become_one_load(function: Callable[[Tensor], Tensor]) -> None:
    graph, _ = simplify(read(Applied(function).eval(), (image(function),)).graph)
    found = lay_out(graph)
    (last,) = (region for region in found.regions if region.outputs[0] in graph.outputs)
    buffers = [load.buffer for body in last.steps[-1].bodies for load in _all_loads(body)]
    assert (len(buffers) == 1) == (function in REGULAR), buffers
    assert as_one_load(last.steps[-1]) == last.steps[-1]  # nothing is left to do


def _all_loads(body: object) -> list[Load]:
    """Every load, as often as it occurs."""
    args = getattr(body, "args", ())
    return [body] if isinstance(body, Load) else [load for arg in args for load in _all_loads(arg)]


class ThenConvolution(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor, size: int) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Conv2d(x.shape[1], x.shape[1], 1)
        self.last = nn.Conv2d(function(x).shape[1], 12, size, padding=size // 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.last(self.function(self.first(x))))


@pytest.mark.parametrize("target", ["h200", "x86-avx2"])
@pytest.mark.parametrize("function", [phases, shifted, reversed_groups])
def test_convolutions_read_through_it(function: Callable[[Tensor], Tensor], target: str) -> None:
    x = image(function)
    graph, _ = simplify(read(ThenConvolution(function, x, 1).eval(), (x,)).graph)
    regions = lay_out(graph).regions
    assert [region.kind for region in regions] == ["contraction"] * 2
    assert "concatenate" in OPERATORS and "concatenate" in [node.operator for node in regions[-1].nodes]


def cases() -> list[Case]:
    alone = [Case(f.__name__, Applied(f), (image(f),)) for f in (*REGULAR, *OTHERS)]
    within = [Case(f"{f.__name__}, maps", Applied(lambda x, f=f: f(x * 2).exp() + 1), (image(f),)) for f in REGULAR]
    read_by = [
        Case(f"{f.__name__}, {size}", ThenConvolution(f, image(f), size), (image(f),))
        for f in (phases, shifted, reversed_groups, repeated, irregular, other_fill)
        for size in (1, 3)
    ]
    normed = Case("patches, normalised", Applied(lambda x: F.layer_norm(merged_patches(x), (24,))), (image(merged_patches),))
    return [*alone, *within, *read_by, normed]


@IN_THIRDS
def test_results_on_this_cpu(third: int) -> None:
    check_native(cases()[third::3])


@IN_THIRDS
def test_results_of_interpreted_kernels(third: int) -> None:
    check_interpreted(cases()[third::3], machine("h200"))


@settings(deadline=None, max_examples=draws(4), suppress_health_check=list(HealthCheck), database=None)
@given(st.data())
def test_random_slices(data: st.DataObject) -> None:
    """Windows of one size at random or regular places of a padded value, along a random dimension."""
    found = []
    for number in range(4):
        shape = [data.draw(st.integers(4, 7)) for _ in range(3)]
        count, dim = data.draw(st.integers(2, 6)), data.draw(st.integers(0, 2))
        steps = [data.draw(st.integers(0, 1)) for _ in range(3)]
        regular = data.draw(st.booleans())
        starts = [[data.draw(st.integers(0, 2)) if not regular else (at * step) % 3 for step in steps] for at in range(count)]
        size = [data.draw(st.integers(1, extent)) for extent in shape]

        def function(x: Tensor, starts: list[list[int]] = starts, size: list[int] = size, dim: int = dim) -> Tensor:
            padded = F.pad(x, (1, 1) * 3)
            return torch.cat([padded[tuple(slice(a, a + s) for a, s in zip(start, size, strict=True))] for start in starts], dim)

        found.append(Case(f"{number}: {starts} {size} {dim}", Applied(function), (torch.randn(*shape),)))
    check_interpreted(found, machine("h200"))
