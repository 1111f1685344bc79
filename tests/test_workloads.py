"""Workloads: their descriptions, and problems equal to those of the same operators in exported PyTorch modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

from tests.stand_ins import H200, deciding
from tilewright.compile import read
from tilewright.graph.passes import simplify
from tilewright.partition import prologues, siblings
from tilewright.selection.choice import rank
from tilewright.tuning.problems import key_of
from tilewright.tuning.sampling import CLASSES, random_workloads
from tilewright.tuning.tuning import distinct_problems
from tilewright.tuning.workloads import (
    COMPUTED,
    Attention,
    Convolution,
    Elementwise,
    GlobalMean,
    Linear,
    Pool,
    Product,
    Rows,
    Workload,
    numerics_of,
    problem_of,
    text_of,
    workload_of,
)

CONVOLUTIONS: tuple[Callable[..., nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED: tuple[Callable[..., nn.Module], ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
FUNCTIONS = {"relu": torch.relu, "residual": torch.relu, "silu": nn.functional.silu, "gelu": nn.functional.gelu}


class Block(nn.Module):
    """An operator between pointwise layers, with what follows it."""

    def __init__(self, before: nn.Module | None, operator: nn.Module, branch: nn.Module | None, after: nn.Module | None, then: str) -> None:
        super().__init__()
        self.before, self.operator, self.branch, self.after, self.then = before, operator, branch, after, then

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        y: Tensor = self.operator(self.before(x) if self.before is not None else x)
        if self.branch is not None:
            y = y + self.branch(z)
        if self.then in FUNCTIONS:
            y = FUNCTIONS[self.then](y)
        return self.after(y) if self.after is not None else y


def convolution(workload: Convolution) -> tuple[nn.Module, tuple[Tensor, ...]]:
    rank, w = len(workload.size), workload
    padding = [w.dilation * (f // 2) if f % 2 else 0 for f in w.filter]
    extents = [s * w.stride if f % 2 else (s - 1) * w.stride + w.dilation * (f - 1) + 1 for s, f in zip(w.size, w.filter, strict=True)]
    make, bias = CONVOLUTIONS[rank - 1], w.then != "nothing"
    operator = make(w.channels, w.outputs, w.filter, w.stride, padding, w.dilation, w.groups, bias=bias)
    grown = list(w.size)
    if w.transposed:
        extents, grown = list(w.size), [s * w.stride for s in w.size]
        more = [(w.stride - 1) * (f % 2) for f in w.filter]
        padding = [(f - 1) // 2 for f in w.filter]
        operator = TRANSPOSED[rank - 1](w.channels, w.outputs, w.filter, w.stride, padding, more, w.groups, bias, w.dilation)
    before = nn.Sequential(make(8, w.channels, 1, bias=False), nn.ReLU()) if w.channels > 4 else None
    branch = nn.Sequential(make(8, w.outputs, 1, bias=False), nn.ReLU()) if w.then == "residual" else None
    x = torch.zeros(w.batch, 8 if before else w.channels, *extents)
    inputs = (x, torch.zeros(w.batch, 8, *grown)) if branch else (x,)
    return Block(before, operator, branch, make(w.outputs, 8, 1, bias=False), w.then), inputs


def linear(workload: Linear) -> tuple[nn.Module, tuple[Tensor, ...]]:
    w = workload
    branch = nn.Linear(8, w.outputs, bias=False) if w.then == "residual" else None
    operator = nn.Linear(w.channels, w.outputs, bias=w.then != "nothing")
    x = torch.zeros(w.rows, 8)
    block = Block(nn.Linear(8, w.channels, bias=False), operator, branch, nn.Linear(w.outputs, 8, bias=False), w.then)
    return block, (x, x.clone()) if branch else (x,)


class Multiplied(nn.Module):
    def __init__(self, swapped: int) -> None:
        super().__init__()
        self.swapped = swapped

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a, b.transpose(1, 2) if self.swapped else b)


class Added(nn.Module):
    def __init__(self, swapped: int) -> None:
        super().__init__()
        self.swapped = swapped

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(x + (y.permute(0, 2, 3, 1) if self.swapped else y))


class Computing(nn.Module):
    """Pointwise layers, the second of which reads what is computed of the first's result, and what else reads that."""

    def __init__(self, workload: Convolution | Linear) -> None:
        super().__init__()
        w = workload

        def make(inputs: int, outputs: int, bias: bool = False) -> nn.Module:
            return nn.Conv2d(inputs, outputs, 1, bias=bias) if isinstance(w, Convolution) else nn.Linear(inputs, outputs, bias)

        self.computed, self.then, self.last = w.computed, w.then, nn.ReLU() if isinstance(w, Convolution) else nn.Identity()
        stored = 2 * w.channels if w.computed == "gate" and isinstance(w, Linear) else w.channels
        self.before, self.another = (make(8, stored) for _ in range(2))
        self.norm = (nn.BatchNorm2d if isinstance(w, Convolution) else nn.BatchNorm1d)(w.channels)
        self.gate = make(w.channels, w.channels)
        self.operator = make(w.channels, w.outputs, w.then != "nothing")
        self.after, self.beside, self.other = (make(n, 8) for n in (w.outputs, w.channels, w.channels))
        self.both = make(w.channels + 8, 8)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        x = self.last(self.before(x))
        if self.computed == "norm":
            return self.both(torch.cat([x, self.finish(torch.relu(self.norm(x)))], 1))
        if self.computed == "gate" and len(x.shape) == 2:
            first, second = x.chunk(2, 1)
            return self.finish(nn.functional.silu(first) * second)
        if self.computed == "gate":
            return self.finish(x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True))))
        if self.computed == "sum":
            z = self.last(self.another(z))
            return self.finish(x + z) + self.beside(x) + self.other(z)
        return self.finish(FUNCTIONS[self.computed](x)) + self.beside(x)

    def finish(self, x: Tensor) -> Tensor:
        y = self.operator(x)
        return self.after(FUNCTIONS[self.then](y) if self.then in FUNCTIONS else y)


class Attending(nn.Module):
    def __init__(self, workload: Attention) -> None:
        super().__init__()
        self.workload = workload

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        causal, grouped = bool(self.workload.causal), self.workload.sharing > 1
        q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).permute(0, 2, 1, 3)


def module_of(workload: Workload) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The same operator and neighbours as a PyTorch module."""
    w = workload
    if isinstance(w, Convolution):
        return convolution(w)
    if isinstance(w, Linear):
        return linear(w)
    if isinstance(w, Product):
        b = torch.zeros(w.batch, *((w.outputs, w.channels) if w.swapped else (w.channels, w.outputs)))
        return Multiplied(w.swapped), (torch.zeros(w.batch, w.rows, w.channels), b)
    if isinstance(w, Pool):
        padding = (w.window - 1) // 2
        x = torch.zeros(w.batch, 8, *((s - 1) * w.stride + w.window - 2 * padding for s in w.size))
        operator = (nn.AvgPool2d if w.mean else nn.MaxPool2d)(w.window, w.stride, padding)
        before = nn.Sequential(nn.Conv2d(8, w.channels, 1, bias=False), nn.ReLU())
        return Block(before, operator, None, nn.Conv2d(w.channels, 8, 1, bias=False), "nothing"), (x,)
    if isinstance(w, GlobalMean):
        rank = len(w.size)
        make, mean = CONVOLUTIONS[rank - 1], (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)[rank - 1](1)
        before = nn.Sequential(make(8, w.channels, 1, bias=False), nn.ReLU())
        return Block(before, mean, None, make(w.channels, 8, 1, bias=False), "nothing"), (torch.zeros(w.batch, 8, *w.size),)
    if isinstance(w, Attention):
        k = torch.zeros(w.batch, w.keys, w.heads // w.sharing, w.size)
        return Attending(w), (torch.zeros(w.batch, w.queries, w.heads, w.size), k, k.clone())
    if isinstance(w, Rows):
        return nn.Softmax(1) if w.softmax else nn.LayerNorm(w.columns, elementwise_affine=False), (torch.zeros(w.rows, w.columns),)
    x = torch.zeros(w.batch, *w.size, w.channels)
    return Added(w.swapped), (x, torch.zeros(w.batch, w.channels, *w.size) if w.swapped else x.clone())


CASES = [
    Convolution(2, 16, 24, (9, 7), (3, 3), then="residual"), Convolution(1, 3, 16, (10, 10), (7, 7), 2, then="relu"),
    Convolution(2, 32, 32, (8, 8), (3, 3), 2, groups=32, then="silu"), Convolution(1, 32, 64, (8, 8), (3, 3), groups=4, then="bias"),
    Convolution(1, 16, 16, (40,), (5,), dilation=3), Convolution(1, 16, 24, (3, 8, 8), (3, 1, 3), then="gelu"),
    Convolution(1, 3, 96, (6, 6), (4, 4), 4, then="bias"), Convolution(1, 16, 16, (6, 6), (4, 4), 2, transposed=1, then="relu"),
    Convolution(1, 16, 32, (6, 6), (3, 3), 2, transposed=1), Linear(12, 64, 96, "gelu"), Linear(3, 64, 96, "residual"), Linear(5, 64, 80),
    Product(3, 12, 16, 20), Product(3, 12, 16, 20, 1), Pool(2, 16, (6, 6), 3, 2), Pool(1, 16, (6, 5), 2, 2, 1),
    GlobalMean(2, 24, (7, 5)), GlobalMean(1, 16, (12,)),
    Attention(2, 8, 128, 128, 64), Attention(1, 8, 1, 512, 64, 2), Attention(1, 12, 512, 512, 64, causal=1),
    Rows(40, 96), Rows(40, 96, 1), Elementwise(2, 16, (6, 5)), Elementwise(2, 16, (6, 5), 1),
]  # fmt: skip


@pytest.mark.in_turns(7)
@pytest.mark.parametrize("workload", CASES, ids=text_of)
def test_a_problem_is_that_of_a_compiled_module(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "find_siblings", lambda graph: [])  # the parts of a transposed convolution may be merged
    module, inputs = module_of(workload)
    graph, _ = simplify(read(module.eval(), inputs).graph)
    assert key_of(problem_of(workload)) in {key_of(problem) for problem in distinct_problems(graph, H200, 1)}


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("computed", COMPUTED[1:])
@pytest.mark.parametrize("workload", [Convolution(2, 32, 24, (9, 7), (1, 1), then="relu"), Linear(50, 64, 96)], ids=text_of)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_computed_factor_is_that_of_a_compiled_module(
    workload: Convolution | Linear, computed: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prologues, "compared", deciding(True))
    wanted = replace(workload, computed=computed, precision=precision)
    x = torch.zeros(2, 8, 9, 7) if isinstance(workload, Convolution) else torch.zeros(50, 8)
    graph, _ = simplify(read(Computing(wanted).eval(), (x, x.clone())).graph)
    assert key_of(problem_of(wanted)) in {key_of(problem) for problem in distinct_problems(graph, H200, 1, precision, numerics_of(wanted))}


def test_a_factor_that_cannot_be_computed_is_rejected() -> None:
    with pytest.raises(ValueError, match="stride 1"):
        Convolution(1, 16, 16, (8, 8), (1, 1), 2, computed="norm")
    with pytest.raises(ValueError, match="'tanh': one of nothing, norm"):
        workload_of("linear rows=3 channels=4 outputs=5 computed=tanh")


def test_every_class_has_problems_with_candidates_and_a_text() -> None:
    assert {type(workload) for workload in islice(random_workloads(7, tuple(CLASSES)), len(CLASSES))} == {type(case) for case in CASES}
    for workload in islice(random_workloads(7, tuple(CLASSES)), len(CLASSES)):
        assert workload_of(text_of(workload)) == workload
        assert rank(problem_of(workload), H200, learned=False).candidates > 1


@pytest.mark.parametrize(
    "text",
    [
        "", "sum rows=3", "rows rows=3", "rows rows=3 columns=0", "rows rows=3 columns=9999999", "rows rows=3 columns=4x4", "rows rows=3 columns=4 rows=3",
        "rows rows=3 columns=4 softmax=2", "rows rows=3  columns=4", "linear rows=3 channels=4 outputs=5 then=tanh", "linear rows=3 channels=4 outputs=-5",
        "linear rows=3 channels=1000000 outputs=1000000", "attention batch=1 heads=6 queries=8 keys=8 size=16 sharing=4",
        "attention batch=1 heads=6 queries=8 keys=8 size=16 causal=2", "attention batch=1 heads=6 queries=80000 keys=80000 size=16",
        "convolution batch=1 channels=8 outputs=8 size=4x4 filter=3", "convolution batch=1 channels=8 outputs=8 size=4x4 filter=3x3 groups=3",
        "convolution batch=1 channels=8 outputs=8 size=4x4x4x4 filter=3x3x3x3",
    ],
)  # fmt: skip
def test_other_text_is_rejected(text: str) -> None:
    with pytest.raises(ValueError):
        workload_of(text)
