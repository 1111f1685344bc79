"""`as_strided` reads the elements that PyTorch reads, whatever the strides of its tensor, or is refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tilewright
from tests.draws import draws
from tests.operator_cases import once
from tilewright import dynamo
from tilewright.errors import InvalidInput, InvalidModel

pytestmark = pytest.mark.filterwarnings("ignore::tilewright.errors.NotCompiled")


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def compiled(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    return tilewright.compile(Function(function), (x,), target="native", threads=1)


TYPES = [torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64]


@settings(once, max_examples=draws(25))
@given(data=st.data())
def test_any_places_within_a_tensor(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    order = data.draw(st.permutations(range(len(shape))))
    x = torch.arange(torch.Size(shape).numel()).reshape(shape).permute(order).to(data.draw(st.sampled_from(TYPES)))
    size = data.draw(st.lists(st.integers(0, 4), max_size=3))
    strides, offset, last = [], data.draw(st.integers(0, x.numel() - 1)), x.numel() - 1
    room = last - offset
    for extent in size:
        stride = data.draw(st.integers(0, room // max(extent - 1, 1)))
        strides.append(stride)
        room -= stride * max(extent - 1, 0)

    def function(x: Tensor) -> Any:
        y = torch.where(x == 1, x, x)
        return x.as_strided(size, strides, offset), y.as_strided(size, strides), y[x.shape[0] // 2 :].as_strided(size, strides, offset)

    with compiled(function, x) as executable:
        for found, wanted in zip(executable(x), function(x), strict=True):
            assert found.dtype == wanted.dtype and torch.equal(found, wanted)


def test_strides_that_differ_are_refused() -> None:
    x = torch.randn(6, 10)
    with compiled(lambda x: x.t().sin().as_strided((3, 4), (1, 2)), x) as executable:
        torch.testing.assert_close(executable(x[:]), x.t().sin().as_strided((3, 4), (1, 2)))
        with pytest.raises(InvalidInput, match=r"args\[0\].*strides \(10, 1\).*got strides \(1, 6\)"):
            executable(x.t().contiguous().t())
    wide = torch.randn(7, 10)
    with compiled(lambda x: x.as_strided((3, 4), (10, 1), 10), wide[1:]) as executable:
        torch.testing.assert_close(executable(wide[1:]), wide[1:4, :4])
        with pytest.raises(InvalidInput, match="storage offset 10.* and 0"):
            executable(wide[:6])
    with compiled(lambda x: (x @ x.t()).as_strided((3,), (7,)), torch.randn(1, 4)[[0] * 6]) as executable:
        y = torch.randn(6, 4)
        torch.testing.assert_close(executable(y), (y @ y.t()).diagonal()[:3])


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "memory outside": (lambda x: x[:, 1].as_strided((6, 11), (10, 1)), "outside of its tensor"),
    "a tensor that is written later": (
        lambda x: [y := x * 2, z := y.as_strided((3, 4), (1, 2)), y.add_(1), z * 1][3],
        "writes to a tensor that as_st",
    ),
    "a write to what is read": (
        lambda x: (x * 2).as_strided((3, 4), (1, 2))[1:].add_(1),
        "add_.Tensor at .* writes to a tensor that as_strided reads",
    ),
    "a write by strides": (lambda x: torch.as_strided_scatter(x, x[0, :3], (3,), (2,)), "writes by strides"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(InvalidModel, match=message):
        compiled(function, torch.randn(7, 10)[:6])


@settings(once, max_examples=draws(12))
@given(data=st.data())
def test_a_tensor_that_was_written(data: st.DataObject) -> None:
    """Its strides are kept, whatever those of what was written are."""
    shape = data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=3))
    order = data.draw(st.permutations(range(len(shape))))
    x = torch.randn(shape).permute(order)
    last = x.numel() - 1
    rows = data.draw(st.integers(1, 4))
    stride = data.draw(st.integers(0, last // rows))
    part = data.draw(st.booleans())

    def function(x: Tensor) -> Tensor:
        y = x.sin()
        y[0].mul_(2)
        y.copy_(y.flip(-1).contiguous() + y)
        return (y[-1:] if part else y).as_strided((rows, 2), (stride, 1 if stride * rows < last else 0), 0) + 1

    with compiled(function, x) as executable:
        torch.testing.assert_close(executable(x), function(x))


def test_what_a_view_lacks_is_read_of_its_base() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        y[0].mul_(2)
        return y[-1:].as_strided((2, 2), (3, 1), 1) + 1

    x = torch.randn(2, 4)
    with compiled(function, x) as executable:
        torch.testing.assert_close(executable(x), function(x))


def test_windows_are_read_by_a_map() -> None:
    """Halves of chunks that overlap, as in Longformer, which cross the dimension of the chunks."""

    def function(x: Tensor) -> Tensor:
        x = x.transpose(0, 1) * 1
        x /= 3
        chunks = x.view(x.shape[0], 3, x.shape[1] // 3, x.shape[2])
        size, strides = list(chunks.shape), list(chunks.stride())
        size[1], strides[1] = size[1] * 2 - 1, strides[1] // 2
        windows = chunks.as_strided(size, strides)
        return torch.einsum("bcxd,bcyd->bcxy", windows, windows)

    x = torch.randn(24, 2, 5)
    with tilewright.compile(Function(function), (x,), target="native", threads=1, dynamic={"x": {1: "batch"}}, wait=True) as executable:
        for batch in (2, 3):
            x = torch.randn(24, batch, 5)
            graph = executable.program(x).image.program.graph
            assert any(node.operator == "strided" for node in graph.nodes) and not graph.constants
            torch.testing.assert_close(executable(x).double(), function(x.double()), rtol=1e-5, atol=1e-6)


def test_an_artifact_and_an_exported_program(tmp_path: Path) -> None:
    def function(x: Tensor) -> Tensor:
        return torch.relu(x).as_strided((2, 3, 4), (3, 2, 1), 1)

    x = torch.randn(10, 6).t()
    compiled(function, x).save(tmp_path / "strided.zip")
    torch.export.save(torch.export.export(Function(function), (x,)), tmp_path / "strided.pt2")
    for executable in (tilewright.load(tmp_path / "strided.zip"), tilewright.compile(tmp_path / "strided.pt2", target="native", threads=1)):
        assert torch.equal(executable(x), function(x))
        with pytest.raises(InvalidInput, match="strides"):
            executable(x.contiguous())


def test_sizes_that_change() -> None:
    def function(x: Tensor) -> Tensor:
        return (x * 2).as_strided((x.shape[0] - 1, 2, 3), (x.stride(0), 3, 1)) + 1

    x = torch.randn(4, 6)
    with tilewright.compile(Function(function), (x,), target="native", threads=1, dynamic={"x": {0: "rows"}}, wait=True) as executable:
        for rows in (4, 7, 2):
            x = torch.randn(rows, 6)
            torch.testing.assert_close(executable(x), function(x))


def test_torch_compile_runs_eager_for_other_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "_reason_to_discard", lambda _: None)
    torch._dynamo.reset()

    def function(x: Tensor) -> Tensor:
        return x.as_strided((3, 4), (10, 1), 10) * 2

    fast, wide = torch.compile(function, backend="tilewright", options={"threads": 1}), torch.randn(7, 10)
    for x in (wide, wide[:], wide[1:], wide[:6], wide.t().contiguous().t()):
        torch.testing.assert_close(fast(x), function(x))
