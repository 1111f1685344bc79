"""Symbolic sizes in .pt2 files: files that are read, conditions that are kept, and texts that are not accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
import sympy
import torch
from torch import nn

import tilewright
from tilewright.errors import InvalidInput
from tilewright.frontend.pt2_sizes import condition, expression, guard


class Mixed(nn.Module):
    """Sizes in sums, products, quotients, and conditions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.shape[0]
        joined = torch.cat([x, y], 0).reshape(-1, 4)[: rows * 2 - 1]
        if rows % 2 == 0 and rows > 3:
            joined = joined * (rows // 2 + 1)
        return joined, self.linear(y).sum(0) + max(rows, 5)


def test_files_with_free_sizes(tmp_path: Path) -> None:
    module, path = Mixed().eval(), tmp_path / "m.pt2"
    free = {0: torch.export.Dim.DYNAMIC}
    torch.export.save(torch.export.export(module, (torch.randn(4, 8), torch.randn(6, 8)), dynamic_shapes=(free, free)), path)
    executable = tilewright.compile(path, (torch.randn(6, 8), torch.randn(3, 8)), dynamic=True)
    with torch.no_grad():
        for a, b in ((6, 3), (4, 6), (8, 2), (6, 1)):
            x, y = torch.randn(a, 8), torch.randn(b, 8)
            torch.testing.assert_close(executable(x, y), module(x, y))
        with pytest.raises(InvalidInput, match="and x.shape.0. = 5"):
            executable(torch.randn(5, 8), torch.randn(6, 8))
        fixed = tilewright.compile(path, (torch.randn(4, 8), torch.randn(7, 8)))
        x, y = torch.randn(4, 8), torch.randn(7, 8)
        torch.testing.assert_close(fixed(x, y), module(x, y))
    loaded = tilewright.compile(torch.export.load(path), (torch.randn(6, 8), torch.randn(3, 8)), dynamic=True)
    with pytest.raises(InvalidInput, match="requires"):
        loaded(torch.randn(5, 8), torch.randn(6, 8))


def test_expressions() -> None:
    size = "Symbol('s77', positive=True, integer=True)"
    for text in (
        size,
        "Integer(-3)",
        f"Add(Mul(Integer(2), {size}), Integer(-1))",
        f"FloorDiv({size}, Integer(2))",
        f"Max({size}, Integer(5))",
        f"Mul(Integer(3), Pow(Add({size}, Integer(1)), Integer(2)))",
        "true",
    ):
        assert expression(text, "here") == text


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')", "Symbol('x')", "Symbol('s1', real=True)", "Symbol('s1', integer=open('f'))", "Symbol(name='s1')", "Integer('2')",
        "Integer(2, evaluate=False)", "Add(*(1,))", "Add(x=1)", "Pow(Integer(9), Integer(9))", "Pow(Integer(9), Integer(-1))",
        "Pow(Pow(Integer(9), Integer(8)), Integer(8))", "Pow(Add(Integer(1), Pow(Integer(9), Integer(8))), Integer(8))", "Pow(Integer(9), Integer(True))",
        "Lambda(Symbol('s1'), Integer(1))", "s1", "2", "(",
        "Add.__class__", "sympy.Add(Integer(1))", f"Integer({1 << 70})", "Add(" * 300 + ")" * 300, "x" * 20_000, 5, None,
    ],
)  # fmt: skip
def test_other_texts_are_no_expressions(text: object) -> None:
    with pytest.raises(ValueError, match="here is not an expression"):
        expression(text, "here")


def test_conditions() -> None:
    s = sympy.Symbol("s0", integer=True, positive=True)
    program = torch.export.export(nn.ReLU(), (torch.randn(4, 3),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    inputs = {"x": next(iter(program.graph.nodes)).meta["val"]}
    assert condition("3 < L['x'].size()[0] <= 9", None, "here") == sympy.And(sympy.Lt(3, s), s <= 9)
    (symbol,) = condition(guard("L['x'].size()[0] > 3", "here"), inputs, "here").free_symbols
    for text, holds in (
        ("(2*L['x'].size()[0]) % 4 == 0 and not L['x'].size()[1] == 5", {2: True, 3: False}),
        ("-L['x'].size()[0] // 2 == -2", {4: True}),
    ):
        for number, wanted in holds.items():
            assert bool(condition(text, inputs, "here").xreplace({symbol: sympy.Integer(number)})) is wanted


@pytest.mark.parametrize(
    "text",
    [
        "L['x'].size()[0]", "L['x'].data > 3", "M['x'].size()[0] > 3", "L[x].size()[0] > 3", "f(3) > 2", "L['x'].size()[0] ** 9 > 1", "open('f')",
        "1 if 2 > 1 else 3", "L['x'].size(0)[0] > 1", "3 in L['x']", "3.5 > 2", "L['x'].size()[0] // 0 == 1", None,
    ],
)  # fmt: skip
def test_other_texts_are_no_conditions(text: object) -> None:
    with pytest.raises(ValueError, match="here is not a"):
        guard(text, "here")
