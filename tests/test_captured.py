"""Graphs of Dynamo that are read with the tensors that Dynamo found, against their exports and eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright.frontend import torch_export
from tilewright.frontend.captured import CapturedModule, captured_program
from tilewright.frontend.symbolic import SymbolicProgram
from tilewright.frontend.torch_import import import_exported


class Function(nn.Module):
    """A product, so that the graph is worth compiling, and a function of it."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


def in_place(x: Tensor) -> Tensor:
    y = x * 2
    y.add_(1).relu_()
    return y.mul_(x)


def ends(x: Tensor) -> Tensor:
    """Of the first slice one column is left, so that nothing is left to the second if that is taken for its result."""
    return x[:, :1] - x[:, 1:][:, -1:]


def sizes(x: Tensor) -> Tensor:
    rows = x.shape[0]
    return x.reshape(rows * 2, -1) * rows + torch.arange(rows * 2)[:, None]


def turned_in_place(x: Tensor) -> Tensor:
    return (x + 1).t_() * 2


def parts(x: Tensor) -> list[Tensor]:
    first, second = x.split(4, dim=1)
    values, places = x.max(dim=1)
    return [first * second, *x.unbind(1)[:2], values, places]


RECORDED: dict[str, Callable[[Tensor], Any]] = {
    "in C++": lambda x: torch.sigmoid(x).matmul(x.t()) / 2,
    "in Python": lambda x: F.layer_norm(F.normalize(F.dropout(x, 0.5, False)), (8,)),
    "arithmetic": lambda x: 1 / (2 - x) + x**2 - 3 // (x + 9),
    "in place": in_place,
    "slices": ends,
    "indices": lambda x: x[None, :, 2:6, None],
    "sizes": sizes,
    "parts": parts,
    "made of numbers": lambda x: x + torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8]),
    "grown": lambda x: F.interpolate(x[:, None], scale_factor=2.0),
    "returned twice": lambda x: (x, x),
    "numbers returned": lambda x: (x * 2, x.shape[0], 3),
}
EXPORTED: dict[str, Callable[[Tensor], Any]] = {"turned in place": turned_in_place}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[CapturedModule, Any, Any]]:
    """Collects the graphs that are read, with the arguments of the call."""
    found = []

    def noted(*arguments: Any) -> Any:
        found.append(arguments)
        return captured_program(*arguments)

    monkeypatch.setattr(torch_export, "captured_program", noted)
    return found


def check(module: nn.Module) -> None:
    """Calls of two sizes, of which Dynamo captures the first as numbers and the second as a symbol, and one more."""
    torch._dynamo.reset()
    compiled = torch.compile(module.eval(), backend="tilewright", options={"wait": True})
    with torch.no_grad():
        for rows in (4, 6, 9):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)


def test_what_shares_memory_with_data_is_recorded(read: list[tuple[CapturedModule, Any, Any]]) -> None:
    """A graph with `.data` as Dynamo captures it cannot be exported."""
    check(Function(lambda x: x.data * 2))
    assert all(captured_program(*arguments) is not None for arguments in read)


def graph_of(program: Any, sizes: Any, inputs: Any) -> list[tuple[Any, ...]]:
    """The nodes of a program's graph, without names."""
    if sizes:
        symbolic = SymbolicProgram(program, small=False)
        graph = symbolic.bind(symbolic.key(inputs)).graph
    else:
        graph = import_exported(program).graph
    numbers = {name: number for number, name in enumerate((*graph.inputs, *graph.constants, *(o for node in graph.nodes for o in node.outputs)))}
    return [(n.operator, [numbers[i] for i in n.inputs], [graph.values[o] for o in n.outputs], dict(n.attributes), n.place) for n in graph.nodes]


@pytest.mark.filterwarnings("ignore::tilewright.NotCompiled")
@pytest.mark.parametrize("name", [*RECORDED, *EXPORTED])
def test_results_and_graphs_are_those_of_an_export(name: str, read: list[tuple[CapturedModule, Any, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    check(Function({**RECORDED, **EXPORTED}[name]))
    graphs = list(read)
    assert graphs
    for module, inputs, free in graphs:
        program = captured_program(module, inputs, free)
        assert (program is not None) is (name in RECORDED)
        if program is not None:
            monkeypatch.setattr(torch_export, "captured_program", lambda *_: None)
            assert graph_of(program, free, inputs) == graph_of(torch_export.exported(module, inputs, {}, free), free, inputs)


def in_a_region(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.t()
    return y.float() * x.sum()


def without_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        y = x @ x.t()
    return y * x.sum()


def without_autocast_to_the_end(x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        y = turned_in_place(x).t() @ x.t()
    return (y @ x) * 2


def batched(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row * 2 + turned_in_place(row[None])[:, 0])(x)


@pytest.mark.filterwarnings("ignore::tilewright.NotCompiled")
@pytest.mark.parametrize("function", [in_a_region, without_autocast, without_autocast_to_the_end, batched])
def test_the_reading_leaves_the_state_of_pytorch(function: Callable[[Tensor], Any], read: list[tuple[CapturedModule, Any, Any]]) -> None:
    """Else what follows would be computed in the autocast region, or at the level of vmap, in which the reading ended."""

    def state() -> tuple[Any, ...]:
        return torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch._C._functorch.peek_interpreter_stack()

    torch._dynamo.reset()
    module = Function(function).eval()
    compiled = torch.compile(module, backend="tilewright", options={"wait": True})
    with torch.no_grad():
        for rows in (4, 6):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(compiled(x), module(x), rtol=2e-2, atol=2e-2)
    assert read
    for arguments in read:
        before = state()
        recorded = captured_program(*arguments) is not None
        assert recorded is (function is without_autocast) and state() == before
