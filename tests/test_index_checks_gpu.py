"""Indices out of range on a GPU: nothing outside is read, and the error is raised at the runtime's next check, or at once with `check`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import tilewright
from tests.index_cases import CASES, COLUMNS, NAMES, RIGHT, ROWS, TABLE, Operators, of_torch, values_of, with_index
from tilewright.dynamo import backend
from tilewright.errors import IndexOutOfRange
from tilewright.runtime.executable import Executable

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def operators() -> Executable:
    return tilewright.compile(Operators(), tuple(with_index(0, RIGHT)), "cuda", unsupported="error", check=True)


@pytest.mark.parametrize("position", range(len(CASES)), ids=NAMES)
def test_an_index_is_taken_or_refused_as_by_pytorch_on_a_cpu(operators: Executable, position: int) -> None:
    case = CASES[position]
    for value in values_of(case):
        index = RIGHT.clone()
        index[1] = value
        wanted = of_torch(case, index)
        inputs = [tensor.cuda() for tensor in with_index(position, index)]
        if wanted is None:
            with pytest.raises(IndexOutOfRange, match=r"is out of range for a dimension of .* at .*index_cases\.py"):
                operators(*inputs)
        else:
            torch.testing.assert_close(operators(*inputs)[position].cpu(), wanted)


class Layers(nn.Module):
    """Two layers that share a kernel, followed by arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(50, 64), nn.Embedding(50, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm(self.first(a)), self.norm(self.second(b))


GOOD = torch.arange(32)


def wrong(value: int) -> torch.Tensor:
    index = GOOD.clone()
    index[17] = value
    return index.cuda()


@pytest.fixture
def layers() -> Iterator[tuple[Layers, Executable]]:
    model = Layers().cuda().eval()
    with torch.no_grad(), tilewright.compile(model, (GOOD.cuda(), GOOD.cuda()), "cuda") as executable:
        yield model, executable


def right(model: Layers, executable: Executable) -> None:
    for found, wanted in zip(executable(GOOD.cuda(), GOOD.cuda()), model(GOOD.cuda(), GOOD.cuda()), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("value", [50, -1, 2**32, 2**62, -(2**63)])
def test_the_next_call_says_so(layers: tuple[Layers, Executable], value: int) -> None:
    model, executable = layers
    executable(GOOD.cuda(), wrong(value))  # no error yet: nothing waits
    torch.cuda.synchronize()
    with pytest.raises(IndexOutOfRange, match=f"index {value} .*embedding.* at second"):
        executable(GOOD.cuda(), GOOD.cuda())
    right(model, executable)
    executable(wrong(value), GOOD.cuda())
    with pytest.raises(IndexOutOfRange, match=f"index {value} .*embedding.* at first"):
        executable.synchronize()
    executable.synchronize()
    right(model, executable)


def test_check_waits(layers: tuple[Layers, Executable]) -> None:
    model, executable = layers
    executable.check = True
    with pytest.raises(IndexOutOfRange, match="at first"):
        executable(wrong(50), GOOD.cuda())
    right(model, executable)
    clone = executable.clone()
    with pytest.raises(IndexOutOfRange, match="at second"):
        clone(GOOD.cuda(), wrong(-1))
    right(model, executable)
    right(model, clone)


def test_other_streams(layers: tuple[Layers, Executable]) -> None:
    model, executable = layers
    executable.check = True
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        a, b = GOOD.cuda(), wrong(999)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), pytest.raises(IndexOutOfRange, match="index 999 .* at second"):
            executable(a, b)
        right(model, executable)


def test_in_a_captured_graph_nothing_waits(layers: tuple[Layers, Executable]) -> None:
    model, executable = layers
    executable.check = True
    a, b = GOOD.cuda(), GOOD.cuda()
    executable(a, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = executable(a, b)
    for value in (3, 50, 7, -1, 9):
        b[5] = value
        graph.replay()
        if 0 <= value < 50:
            executable.synchronize()
            torch.testing.assert_close(found[1], model(a, b)[1], atol=1e-5, rtol=1e-4)
        else:
            with pytest.raises(IndexOutOfRange, match=f"index {value} .* at second"):
                executable.synchronize()
    right(model, executable)


def test_verify_and_artifacts(layers: tuple[Layers, Executable], tmp_path: object) -> None:
    model, executable = layers
    assert executable.verify(GOOD.cuda(), GOOD.cuda()).passed
    with pytest.raises(IndexOutOfRange, match="at second"):
        executable.verify(GOOD.cuda(), wrong(50))
    right(model, executable)
    executable.save(f"{tmp_path}/layers.zip")
    loaded = tilewright.load(f"{tmp_path}/layers.zip")
    loaded.check = True
    with pytest.raises(IndexOutOfRange, match="at first"):
        loaded(wrong(50), GOOD.cuda())
    right(model, loaded)


def test_torch_compile(layers: tuple[Layers, Executable]) -> None:
    model, _ = layers
    fast = torch.compile(model, backend=backend, options={"check": True})
    with torch.no_grad():
        fast(GOOD.cuda(), GOOD.cuda())
        with pytest.raises(IndexError, match="index 50 "):
            fast(GOOD.cuda(), wrong(50))
        for found, wanted in zip(fast(GOOD.cuda(), GOOD.cuda()), model(GOOD.cuda(), GOOD.cuda()), strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_inputs_that_the_model_changes_stay_as_they_were_with_check() -> None:
    class Counting(nn.Module):
        def forward(self, seen: torch.Tensor, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            seen.add_(1)
            return x[i] + seen

    seen, table = torch.zeros(COLUMNS, device="cuda"), TABLE.cuda()
    executable = tilewright.compile(Counting(), (seen.clone(), table, RIGHT.cuda()), "cuda", check=True)
    with pytest.raises(IndexOutOfRange):
        executable(seen, table, torch.tensor([0, 1, ROWS, 2], device="cuda"))
    assert not seen.any()
    executable(seen, table, RIGHT.cuda())
    assert bool((seen == 1).all())


def test_writing_by_index_through_pytorch_leaves_the_gpu_usable() -> None:
    """PyTorch alone would fail with a device-side assertion."""

    class Writes(nn.Module):
        def forward(self, x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.scatter_add(0, i[:, None].expand(4, COLUMNS), s), x.index_put((i,), s)

    x, i, s = TABLE.cuda(), RIGHT.cuda(), torch.ones(4, COLUMNS, device="cuda")
    executable = tilewright.compile(Writes(), (x, i, s), "cuda", check=True)
    for value in (ROWS, 2**62, -(2**63)):
        i[1] = value
        with pytest.raises(IndexOutOfRange, match=f"index {value} "):
            executable(x, i, s)
    for found, wanted in zip(executable(x, RIGHT.cuda(), s), Writes()(TABLE, RIGHT, s.cpu()), strict=True):
        torch.testing.assert_close(found.cpu(), wanted)
