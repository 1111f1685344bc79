"""Operators that users and packages register with PyTorch: they run where they are, between our kernels, and no file may name them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewright
from tilewright import dynamo
from tilewright.errors import InvalidArtifact, UnsupportedOperator
from tilewright.frontend.torch_operators import permitted_operator, resolve_operator

operators = torch.ops.tilewright_tests
CALLED: list[tuple[int, ...]] = []


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    with torch.library._scoped_library("tilewright_tests", "FRAGMENT") as library, torch.library._scoped_library("sort", "FRAGMENT") as evil:
        library.define("halves(Tensor x, int at, float scale) -> (Tensor, Tensor)")
        library.define("negate_(Tensor(a!) x) -> Tensor(a!)")
        library.define("store(Tensor(a!) x, Tensor y) -> ()")
        library.define("stored(Tensor(a!) x, Tensor y, Tensor(b!)? z=None) -> Tensor")
        library.define("increased(Tensor(a!)[] tensors, *, int by) -> Tensor")
        library.define("both(Tensor(a!) x, Tensor(b!) y, Tensor z) -> (Tensor, Tensor(b!))")
        library.define("last(Tensor(a) x) -> Tensor(a)")
        library.define("turned(Tensor(a!) x) -> Tensor(a!)")
        library.define("counted(Tensor(a!) x) -> (Tensor, int)")
        evil.define("sort(Tensor x) -> Tensor")

        def halves(x: Tensor, at: int, scale: float) -> tuple[Tensor, Tensor]:
            CALLED.append(tuple(x.shape))
            return x[:, :at] * scale, x[:, at:].sort(1).values

        library.impl("halves", halves, "CPU")
        torch.library.register_fake(
            "tilewright_tests::halves", lambda x, at, scale: (torch.empty_like(x[:, :at]), torch.empty_like(x[:, at:])), lib=library
        )
        implemented: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
            "store": (lambda x, y: [x.copy_(y)] and None, lambda x, y: None),
            "stored": (lambda x, y, z=None: x.copy_(y) + 1, lambda x, y, z=None: torch.empty_like(x)),
            "increased": (lambda tensors, by: sum(t.add_(by).sum() for t in tensors), lambda tensors, by: tensors[0].new_empty(())),
            "both": (lambda x, y, z: (x.mul_(z) + 2, y.sub_(z)), lambda x, y, z: (torch.empty_like(x), y)),
            "negate_": (lambda x: x.neg_(), lambda x: x),
            "last": (lambda x: x[:, -1], lambda x: x[:, -1]),
            "turned": (lambda x: x.neg_().t(), lambda x: x.t()),
            "counted": (lambda x: (x.neg_() + 1, 3), lambda x: (torch.empty_like(x), 3)),
        }
        for name, (real, fake) in implemented.items():
            library.impl(name, real, "CPU")
            torch.library.register_fake(f"tilewright_tests::{name}", fake, lib=library)
        evil.impl("sort", torch.neg, "CPU")
        yield


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.ops.tilewright_tests.halves(torch.relu(self.first(x)), 3, 0.5)
        result: Tensor = self.last(left) + right[:, :4].exp()
        return result


def exact(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = module.double()(x.double())
    module.float()
    return result


def test_a_registered_operator_runs_between_kernels() -> None:
    module, x = Halves().eval(), torch.randn(2, 3, 9, 11)
    wanted = exact(module, x)
    with pytest.warns(tilewright.NotCompiled, match=r"1 operator runs through PyTorch:\s+tilewright_tests.halves.default"):
        executable = tilewright.compile(module, (x,), target="native", threads=1)
    with executable:
        CALLED.clear()
        torch.testing.assert_close(executable(x).double(), wanted, rtol=1e-4, atol=1e-5)
        assert CALLED == [(2, 8, 7, 9)] and len(executable.image.program.kernels) > 1


def test_free_sizes() -> None:
    module = Halves().eval()
    with pytest.warns(tilewright.NotCompiled):
        executable = tilewright.compile(module, (torch.randn(2, 3, 9, 11),), target="native", threads=1, dynamic={"x": {0: "batch"}}, wait=True)
    with executable:
        for batch in (2, 5, 1):
            x = torch.randn(batch, 3, 9, 11)
            wanted = exact(module, x)
            torch.testing.assert_close(executable(x).double(), wanted, rtol=1e-4, atol=1e-5)


def test_torch_compile() -> None:
    module, x = Halves().eval(), torch.randn(2, 3, 9, 11)
    wanted = exact(module, x)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.warns(tilewright.NotCompiled, match="runs through PyTorch"):
        found = torch.compile(module, backend="tilewright", fullgraph=True, options={"wait": True})(x)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::tilewright.NotCompiled")
def test_no_artifact_names_it(tmp_path: Path) -> None:
    with tilewright.compile(Halves().eval(), (torch.randn(2, 3, 9, 11),), target="native", threads=1) as executable:
        with pytest.raises(InvalidArtifact, match="operator tilewright_tests.halves.default is none that a file may name"):
            executable.save(tmp_path / "halves.zip")
    assert not list(tmp_path.iterdir())


def test_no_program_file_names_it(tmp_path: Path) -> None:
    module, x = Halves().eval(), torch.randn(2, 3, 9, 11)
    torch.export.save(torch.export.export(module, (x,)), tmp_path / "halves.pt2")
    with pytest.raises(UnsupportedOperator, match="halves.default is no operator that is read from a file"):
        tilewright.compile(tmp_path / "halves.pt2", target="native", threads=1)
    with pytest.warns(tilewright.NotCompiled):  # what the error recommends
        executable = tilewright.compile(torch.export.load(tmp_path / "halves.pt2"), target="native", threads=1)
    with executable:
        torch.testing.assert_close(executable(x).double(), exact(module, x), rtol=1e-4, atol=1e-5)


def test_a_namespace_with_the_name_of_an_operator() -> None:
    """`sort` is on the list of ATen's operators that files may name, and `sort.sort.default` is not."""
    assert resolve_operator("sort.sort.default")(torch.ones(1)) == -1
    with pytest.raises(InvalidArtifact, match="none that a file may name"):
        permitted_operator("sort.sort.default")


def test_operators_that_change_arguments_or_do_not_exist() -> None:
    for target in ("tilewright_tests.negate_.default", "tilewright_tests.halves.out", "tilewright_tests.nothing.default", "nowhere.halves.default"):
        with pytest.raises(InvalidArtifact):
            resolve_operator(target)


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("total", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        return self.function(x) if self.function.__code__.co_argcount == 1 else self.function(x, self.total)  # type: ignore[call-arg]


def changed(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    operators.store(y, x + 3)
    return y * 5, operators.stored(y, x) - y


def the_input(x: Tensor) -> Tensor:
    operators.store(x, x + 3)
    return x * 5


def parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Views of what lives on, in a list and as keywords."""
    y = x.sin()
    total = operators.increased([y[:2, 1:3], y[2]], by=2)
    return y.t() + 1, total


def itself(x: Tensor) -> tuple[Tensor, Tensor]:
    """The result is the argument: what is written to it later is written to this."""
    y = x.exp()
    z = operators.negate_(y[1:])
    z.mul_(3)
    return y, operators.negate_(z) + 1


def of_two(x: Tensor) -> Tensor:
    y, z = x + 1, x.cos()
    a, b = operators.both(y, z, x)
    b.add_(1)
    return torch.cat([a, b * 2, y, z])


def seen(x: Tensor) -> Tensor:
    """A view that no one tells from a copy."""
    result: Tensor = operators.last(x.exp()) * 3
    return result


def of_a_buffer(x: Tensor, total: Tensor) -> Tensor:
    operators.store(total, x.sum(0))
    return x + total


CHANGING = (changed, the_input, parts, itself, of_two, seen, of_a_buffer)


@pytest.mark.in_turns(5)
@pytest.mark.filterwarnings("ignore::tilewright.NotCompiled")
@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("function", CHANGING)
def test_operators_that_change_arguments(function: Callable[..., Any], free: bool) -> None:
    module, eager = Function(function), Function(function)
    dynamic = {"x": {0: "rows"}} if free else None
    with tilewright.compile(module, (torch.randn(3, 4),), target="native", threads=1, dynamic=dynamic, wait=True) as executable:
        for rows in (3, 6, 4) if free else (3, 3):
            x = torch.randn(rows, 4)
            mine = x.clone()
            torch.testing.assert_close(executable(mine), eager(x))
            torch.testing.assert_close(mine, x)


@pytest.mark.in_turns(3)
@pytest.mark.filterwarnings("ignore::tilewright.NotCompiled")
@pytest.mark.parametrize("function", CHANGING[:-1])
def test_torch_compile_of_operators_that_change_arguments(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "_reason_to_discard", lambda _: None)
    torch._dynamo.reset()
    fast = torch.compile(Function(function), backend="tilewright", options={"wait": True})
    for rows in (3, 6):
        x = torch.randn(rows, 4)
        mine = x.clone()
        with torch.no_grad():
            torch.testing.assert_close(fast(mine), function(x))
        torch.testing.assert_close(mine, x)


def overlapping(x: Tensor) -> Tensor:
    y = x * 2
    operators.stored(y[0], x[0], y[0])
    return y


def twice(x: Tensor) -> Tensor:
    y = x * 2
    operators.increased([y[1:], y.t()], by=2)
    return y


def written_view(x: Tensor) -> Tensor:
    y = x * 2
    last = operators.last(y)
    y.add_(1)
    result: Tensor = last * 3
    return result


def returned_view(x: Tensor) -> Tensor:
    result: Tensor = operators.last(x)
    return result


REFUSED = {
    overlapping: "stored.default at .+ gets memory to which it writes as two arguments; pass tensors that share no memory",
    twice: "increased.default at .+ gets memory to which it writes as two arguments",
    written_view: "last.default at .+ returns a view of memory that aten.add_.Tensor at .+ writes; return a clone",
    returned_view: "last.default at .+ returns a view, and the model returns it or its memory; return a clone",
    lambda x: operators.turned(x * 2) + 1: "turned.default at .+ returns a view of an argument to which it writes; return the argument itself",
    lambda x: operators.counted(x * 2): "counted.default writes to an argument and returns Tensor, int; let it return tensors",
}


@pytest.mark.parametrize("function", REFUSED)
def test_what_copies_would_show_is_refused(function: Callable[[Tensor], Any]) -> None:
    """torch.compile runs it eagerly."""
    x = torch.randn(3, 4)
    with pytest.raises(UnsupportedOperator, match=REFUSED[function]):
        tilewright.compile(Function(function), (x,), target="native", threads=1)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.warns(tilewright.NotCompiled, match=REFUSED[function].partition(" at ")[0]):
        found = torch.compile(function, backend="tilewright", options={"wait": True})(x.clone())
    torch.testing.assert_close(found, function(x))


@pytest.mark.filterwarnings("ignore::tilewright.NotCompiled")
def test_exported_programs_and_artifacts_of_operators_that_change_arguments(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    program = torch.export.export(Function(parts), (x,))
    before = str(program.graph)
    with tilewright.compile(program, target="native", threads=1) as executable:
        torch.testing.assert_close(executable(x), parts(x))
        with pytest.raises(InvalidArtifact, match=r"operator functional.tilewright_tests__increased.default is none that a file may name"):
            executable.save(tmp_path / "parts.zip")
    assert str(program.graph) == before
    with pytest.raises(UnsupportedOperator, match="was made functional before; give the program as torch.export.export made it"):
        tilewright.compile(program.run_decompositions({}), target="native", threads=1)
