"""Results that share memory with each other share it as in PyTorch: a write to one of them reaches the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tilewright
from tests.draws import draws
from tests.operator_cases import once
from tests.random_sharing import Program, problem, random_program, sharing
from tilewright import dynamo
from tilewright.errors import InvalidInput, InvalidModel, UnsupportedOperator
from tilewright.frontend.torch_import import import_module
from tilewright.runtime.executable import Executable


class Returning(nn.Module):
    """Returns views of twice its input."""

    def __init__(self, *views: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.views = views

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(x) * 2
        return tuple(view(y) for view in self.views)


def kinds(module: nn.Module, x: Tensor) -> list[str]:
    return [output.kind + " calls" * bool(output.calls) for output in import_module(module, (x,)).outputs]


def check_writes(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Both are equal, also after each in turn is written to."""
    for k in range(len(wanted) + 1):
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b)
        if k < len(wanted) and 0 not in wanted[k].stride():
            for results in (got, wanted):
                results[k].mul_(3 + k).add_(1)


def made(program: Program) -> tuple[Executable, list[Tensor]]:
    return tilewright.compile(program, program.examples, target="native", threads=1), list(program.buffers())


def made_by_dynamo(program: Program) -> tuple[Callable[..., object], list[Tensor]]:
    torch._dynamo.reset()
    return torch.compile(program, backend="tilewright", options={"threads": 1}), list(program.buffers())


def made_of_an_artifact(program: Program) -> tuple[Executable, list[Tensor]]:
    """Only with the buffers that calls change: a loaded model returns copies of others."""
    with TemporaryDirectory() as folder:
        made(program)[0].save(f"{folder}/saved.zip")
        loaded = tilewright.load(f"{folder}/saved.zip")
    assume(len(loaded.signature.states) == program.count)
    return loaded, [loaded.image.states[name] for name, _ in program.named_buffers()]


@pytest.mark.hypothesis  # the properties are inside, so that all draws are those of `make test-slow`
@pytest.mark.in_turns(1)
@pytest.mark.parametrize("how", [made, made_by_dynamo, made_of_an_artifact])
def test_random_programs(how: Callable[[Program], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "_reason_to_discard", lambda _: None)

    @settings(once, max_examples=draws(12))
    @given(seed=st.integers(0, 1 << 30))
    @example(seed=1_000_000_001)  # windows of a scalar
    def check(seed: int) -> None:
        program = random_program(seed)
        try:
            different = problem(program, how)
        except (InvalidModel, InvalidInput) as error:
            assume(not re.search("several elements lie in the same memory|internal overlap", str(error)))
            raise
        assert not different, f"{different}\n{program}"

    check()


def test_which_results_are_views_of_others() -> None:
    x = torch.randn(4, 6)
    assert kinds(Returning(lambda y: y, lambda y: y.t()), x) == ["value", "value calls"]
    assert kinds(Returning(lambda y: y[1:], lambda y: y.t()), x) == ["value calls", "value calls"]
    assert kinds(Returning(lambda y: y.t(), lambda y: y + 1), x) == ["value", "value"]  # the only one of its memory
    assert kinds(Returning(*(lambda y, k=k: y.chunk(3, 1)[k] for k in range(3))), x) == ["value calls"] * 3
    assert kinds(Returning(lambda y: y.t(), lambda y: y.clone()), x) == ["value", "value"]


def test_a_view_returned_twice_is_one_tensor() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = x * 2
            turned = y.t()
            return y, turned, turned, y.t()

    x = torch.randn(3, 4)
    y, first, second, third = tilewright.compile(Twice(), (x,), target="native", threads=1)(x)
    assert first is second and third is not first and first.data_ptr() == third.data_ptr() == y.data_ptr() and torch.equal(first, 2 * x.t())


def test_what_reshape_copied_is_shared_with_a_part_that_is_written() -> None:
    class Written(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            whole = x.reshape(-1)
            part = whole[7:]
            part.neg_()
            return whole, part

    x = torch.randn(3, 3, 2).transpose(1, 2)
    whole, part = tilewright.compile(Written(), (x,), target="native", threads=1)(x)
    part.mul_(2)
    assert torch.equal(whole[7:], part) and torch.equal(part, -2 * x.reshape(-1)[7:])


def test_views_in_an_artifact(tmp_path: Path) -> None:
    module, x = Returning(lambda y: y[:, 1:3], lambda y: y.t().unsqueeze(0)), torch.randn(4, 6)
    tilewright.compile(module, (x,), target="native", threads=1).save(tmp_path / "views.zip")
    with tilewright.load(tmp_path / "views.zip") as loaded:
        check_writes(loaded(x), module(x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_write_after_a_graph_break(dynamic: bool) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.softmax(x @ x.transpose(-1, -2), -1)
        first, second = y[:, 0], y.transpose(0, 1)
        torch._dynamo.graph_break()
        first.mul_(2)
        return first + 1, second * 2

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="tilewright", dynamic=dynamic, options={"wait": True})
    with torch.no_grad():
        for size in (96, 128, 96):
            x = torch.randn(size, size, 64)
            for got, wanted in zip(compiled(x), function(x), strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_sizes_that_change() -> None:
    module, x = Returning(lambda y: y, lambda y: y[1:], lambda y: y.view(-1)).eval(), torch.randn(4, 6)
    with tilewright.compile(module, (x,), target="native", threads=1, dynamic={"x": {0: "rows"}}, wait=True) as executable:
        for rows in (4, 7, 3):
            x = torch.randn(rows, 6)
            check_writes(executable(x), module(x))


def test_a_program_for_a_range_returns_copies() -> None:
    module, x = Returning(lambda y: torch.softmax(y, -1), lambda y: y, lambda y: y.transpose(1, 2)).eval(), torch.randn(2, 20, 8)
    with tilewright.compile(module, (x,), target="native", threads=1, dynamic={"x": {1: "length"}}, wait=True) as executable:
        for length in (20, 19, 24):
            x = torch.randn(2, length, 8)
            for got, wanted in zip(executable(x), module(x), strict=True):
                torch.testing.assert_close(got, wanted)
        (sizes,) = executable.sizes
        assert isinstance(sizes["length"], range)


class Stateful(nn.Module):
    """A function of the module, which has a buffer, and its input."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("kept", torch.arange(12.0).reshape(3, 4))
        self.weight = nn.Parameter(torch.ones(3, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def copied_and_changed(m: Any, x: Tensor) -> Any:
    y = x * 2
    m.kept.copy_(y)
    return y, m.kept, m.kept.t(), y.clone(), y


def replaced(m: Any, x: Tensor) -> Any:
    y = m.kept + x
    m.kept = y
    return m.kept[1:] + 1, x.add_(1), x.t()[1:], x[0].mul_(2)


def through_data(m: Any, x: Tensor) -> Any:
    m.kept.data.mul_(x)
    x.data.copy_(m.kept.data + 1)
    return m.kept.data, x.data[0]


def complex_views(m: Any, x: Tensor) -> Any:
    y = torch.complex(x, -x)
    z = y.t().conj_physical()
    return y, y.real, y.imag, y.conj(), y.conj().t(), torch.view_as_real(y), y.view(torch.float32), z, z.t().view(-1)


def in_memory_order(m: Any, x: Tensor) -> Any:
    y = x.t().sin()
    return y, y.t().view(-1), y.t().flatten()[2:]


def copies(m: Any, x: Tensor) -> Any:
    y = x + 1
    return y, torch.cat([y]), y.to(y.dtype, copy=True), y.t().contiguous(), y.clone().view(-1), y.contiguous()


def unchanged(m: Any, x: Tensor) -> Any:
    return m.weight.t(), m.kept[1:], x.view(-1), x[..., None], x.clone()


def dropouts(m: Any, x: Tensor) -> Any:
    """They return their argument itself, which their schemas do not say."""
    y, z = x + 1, torch.nn.functional.dropout(x, 0.5, False)
    torch.nn.functional.dropout(y, 0.5, False).mul_(2)
    kept = torch.nn.functional.alpha_dropout(m.kept, 0.5, False)
    m.kept.add_(z)
    return y, kept + 1, z.mul_(3)


@pytest.mark.parametrize("function", [copied_and_changed, replaced, through_data, complex_views, in_memory_order, copies, unchanged, dropouts])
def test_what_shares_memory(function: Callable[[Any, Tensor], Any]) -> None:
    ours, theirs = Stateful(function), Stateful(function)
    x, z = torch.rand(3, 4), torch.rand(3, 4)
    with tilewright.compile(ours, (x,), target="native", threads=1) as executable:
        for given_ in (x, z):
            a, b = given_.clone(), given_.clone()
            found, wanted = [*executable(a), a, ours.weight], [*theirs(b), b, theirs.weight]
            for f, w in zip(found, wanted, strict=True):
                torch.testing.assert_close(f, w)
            assert sharing(found) == sharing(wanted)
            torch.testing.assert_close(ours.kept, theirs.kept)


class NamedAsFunctions(nn.Module):
    """Its inputs are called as functions of Python are, like that of a `Sequential`."""

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, input: Tensor, filter: Tensor) -> Tensor:
        return self.compute(input, filter)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, y: torch.nn.functional.dropout(torch.relu_(x + y), 0.5, False) * 2,
        lambda x, y: torch.relu_(x + y).as_strided((2, 3), (4, 1)) * 2,
    ],
)
def test_inputs_called_like_functions(compute: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Copies of graphs, which such modules need, keep the names of inputs."""
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    torch.testing.assert_close(tilewright.compile(NamedAsFunctions(compute), (x, y), target="native", threads=1)(x, y), compute(x, y))


def test_a_sequence_with_a_write_and_a_dropout() -> None:
    module, x = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Dropout()).eval(), torch.randn(3, 4)
    torch.testing.assert_close(tilewright.compile(module, (x,), target="native", threads=1)(x), module(x))


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "a write to an expanded tensor": (lambda m, x: (x * 2).unsqueeze(0).expand(2, 3, 4).zero_(), "several elements lie in the same memory"),
    "a write to what was unfolded": (lambda m, x: (x * 2).unfold(0, 2, 2)[0].zero_(), "writes to windows of a tensor that leave"),
    "a write to an einsum's view": (lambda m, x: torch.einsum("ij->ji", x * 2).zero_(), "an einsum of one tensor takes or returns"),
    "a write behind an einsum's view": (lambda m, x: (torch.einsum("ij->ji", x), x.zero_())[0], "an einsum of one tensor takes or returns"),
    "an assignment to .data": (lambda m, x: setattr(m.kept, "data", x), "assigns to .data"),
    "a parameter that changes": (lambda m, x: m.weight.data.add_(x), "changes its parameter weight.*make it a buffer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises((InvalidModel, UnsupportedOperator), match=message):
        tilewright.compile(Stateful(function), (torch.rand(3, 4),), target="native", threads=1)
