"""The bits of numbers as another type: exactly those of every number, infinity and NaN, alone and inside of other arithmetic."""

from __future__ import annotations

import pytest
import torch

import tilewright
from tests.interpreted import run_program
from tilewright.compile import read
from tilewright.frontend.imported import unsupported
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.partition.plan import plan_program

KINDS = (torch.int32, torch.uint32, torch.float32, torch.float32, torch.int64, torch.float64, torch.int16)


class Bits(torch.nn.Module):
    """The bits of each input as another type, rows in reverse so that a kernel copies them, and float32 numbers taken apart."""

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, word = inputs[0], inputs[0].view(torch.int32)
        parts = (word & 0x7FFFFFFF).view(torch.float32) * 1.5, (word & 0x7F800000).view(torch.float32), (x + 1).view(torch.int32) >> 23
        return (*(x.view(kind).flip(0) for x, kind in zip(inputs, KINDS, strict=True)), *parts)


def inputs() -> tuple[torch.Tensor, ...]:
    """Random words, and among them infinities, zeros of both signs and NaN with a payload."""
    words = torch.randint(-(2**31), 2**31 - 1, (3, 202), generator=torch.Generator().manual_seed(0)).int()
    words[0, :8] = torch.tensor([0x7F800000, -0x800000, 0, -(2**31), 0x7FC01234, 0x7F801234, -0x3FEDCC, 0x00000001]).int()
    long = words.view(torch.int64)
    usual, short = torch.randn(3, 202, generator=torch.Generator().manual_seed(1)), words.view(torch.uint16)
    return usual, words.view(torch.float32), words, words.view(torch.uint32), long.view(torch.float64), long, short


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[wanted.element_size()]
    return found.dtype == wanted.dtype and torch.equal(found.view(kind), wanted.view(kind))


def test_on_a_cpu() -> None:
    executable = tilewright.compile(Bits(), inputs(), "native", unsupported="error")
    for found, wanted in zip(executable(*inputs()), Bits()(*inputs()), strict=True):
        assert same(found, wanted)


@pytest.mark.parametrize("target", ["h200", "x86-avx2"])
def test_in_the_interpreter(target: str) -> None:
    graph, _ = simplify(read(Bits(), inputs()).graph)
    assert not unsupported(graph)
    results, faults = run_program(plan_program(graph, machine(target), 1), {n: x.numpy() for n, x in zip(graph.inputs, inputs(), strict=True)})
    assert not faults
    for name, wanted in zip(graph.outputs, Bits()(*inputs()), strict=True):
        assert same(torch.from_numpy(results[name]), wanted)


def test_of_constants() -> None:
    """Which are computed when the model is compiled, arithmetic in float64 but not the bits."""

    class Held(torch.nn.Module):
        floats: torch.Tensor
        words: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("floats", torch.randn(5))
            self.register_buffer("words", torch.randint(0, 2**30, (5,), dtype=torch.int32))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x.int() + self.floats.view(torch.int32), x + self.words.view(torch.float32) * 2

    module, x = Held(), torch.randn(5)
    graph, _ = simplify(read(module, (x,)).graph)
    assert not any(node.operator == "bit_cast" for node in graph.nodes)
    for found, wanted in zip(tilewright.compile(module, (x,), "native")(x), module(x), strict=True):
        assert same(found, wanted)


class Viewed(torch.nn.Module):
    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(self.kind)


@pytest.mark.parametrize(
    "kinds", [(torch.float16, torch.int16), (torch.int16, torch.bfloat16), (torch.float32, torch.int16), (torch.uint8, torch.bool)]
)
def test_what_runs_through_pytorch(kinds: tuple[torch.dtype, torch.dtype]) -> None:
    """16-bit floats, whose NaN kernels do not keep, other sizes, and bytes as truth values."""
    assert [node.target for node in unsupported(read(Viewed(kinds[1]), (torch.ones(4, dtype=kinds[0]),)).graph)] == ["aten.view.dtype"]
