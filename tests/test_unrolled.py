"""Loops that Python unrolled: many small operators that read a few values which all steps share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import tilewright
from tilewright.compile import read
from tilewright.graph.passes import simplify
from tilewright.partition.chains import LONGEST
from tilewright.partition.paths import Uses, sections
from tilewright.partition.regions import lay_out


class Unrolled(nn.Module):
    """A weighted mean over the steps so far, as RWKV computes it: every step reads its part of the keys and of the values."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        keys, values = self.keys(x), self.values(x)
        above, below, most = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), torch.full_like(x[:, 0], -1e38)
        results = []
        for step in range(x.shape[1]):
            higher = torch.maximum(most - 0.1, keys[:, step])
            old, new = torch.exp(most - 0.1 - higher), torch.exp(keys[:, step] - higher)
            above, below, most = old * above + new * values[:, step], old * below + new, higher
            results.append(above / below)
        return torch.stack(results, 1)


def segments(steps: int) -> int:
    graph = simplify(read(Unrolled().eval(), (torch.randn(2, steps, 16),)).graph)[0]
    return sum(len(section.segments) for section in sections(Uses(graph, lay_out(graph)), LONGEST))


def test_segments_grow_with_the_steps_and_not_with_their_square() -> None:
    few, more, most = segments(6), segments(12), segments(24)
    assert few > 0 and most - more <= 2.1 * (more - few)


def test_results() -> None:
    module, x = Unrolled().eval(), torch.randn(3, 12, 16)
    with torch.no_grad(), tilewright.compile(module, (x,), target="native", threads=1) as executable:
        found, wanted = executable(x), module.double()(x.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
