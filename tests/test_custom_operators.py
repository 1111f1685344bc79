"""Operators that users and packages register with PyTorch: they run where they are, between our kernels, and no file may name them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tilewright
from tilewright.errors import InvalidArtifact, UnsupportedOperator
from tilewright.frontend.torch_operators import permitted_operator, resolve_operator

CALLED: list[tuple[int, ...]] = []


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    with torch.library._scoped_library("tilewright_tests", "FRAGMENT") as library, torch.library._scoped_library("sort", "FRAGMENT") as evil:
        library.define("halves(Tensor x, int at, float scale) -> (Tensor, Tensor)")
        library.define("negate_(Tensor(a!) x) -> Tensor(a!)")
        library.define("store(Tensor(a!) x, Tensor y) -> ()")
        library.define("stored(Tensor(a!) x, Tensor y) -> Tensor")
        evil.define("sort(Tensor x) -> Tensor")

        def halves(x: Tensor, at: int, scale: float) -> tuple[Tensor, Tensor]:
            CALLED.append(tuple(x.shape))
            return x[:, :at] * scale, x[:, at:].sort(1).values

        library.impl("halves", halves, "CPU")
        torch.library.register_fake(
            "tilewright_tests::halves", lambda x, at, scale: (torch.empty_like(x[:, :at]), torch.empty_like(x[:, at:])), lib=library
        )
        library.impl("store", lambda x, y: [x.copy_(y)] and None, "CPU")
        library.impl("stored", lambda x, y: x.copy_(y) + 1, "CPU")
        torch.library.register_fake("tilewright_tests::store", lambda x, y: None, lib=library)
        torch.library.register_fake("tilewright_tests::stored", lambda x, y: torch.empty_like(x), lib=library)
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


class Changing(nn.Module):
    """A map, and an operator that changes its result or, of `inputs`, the model's input."""

    def __init__(self, name: str, inputs: bool) -> None:
        super().__init__()
        self.name, self.inputs = name, inputs

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.inputs else x * 2
        getattr(torch.ops.tilewright_tests, self.name)(y, x + 3)
        return y * 5


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("name", ["store", "stored"])
def test_operators_that_change_arguments_are_refused_by_name(name: str, inputs: bool) -> None:
    """Also those without a result; torch.compile runs them eagerly."""
    module, x = Changing(name, inputs), torch.randn(3, 4)
    with pytest.raises(UnsupportedOperator, match=rf"^tilewright_tests\.{name}\.default at .+ changes its arguments"):
        tilewright.compile(module, (x,), target="native", threads=1)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.warns(tilewright.NotCompiled, match="changes its arguments"):
        found = torch.compile(module, backend="tilewright", options={"wait": True})(y := x.clone())
    assert torch.equal(found, (x + 3) * 5) and torch.equal(y, x + 3 if inputs else x)
