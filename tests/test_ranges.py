"""Programs that serve a range of sizes: which models have them, that results do not depend on padding, and frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tilewright
from tests.draws import draws
from tests.emulated_gpu import emulated
from tests.operator_cases import Function
from tilewright.errors import InvalidInput
from tilewright.frontend.ranged import LEAST, Ranges, ranges_of
from tilewright.frontend.sized import ModuleModel
from tilewright.runtime.dynamic import DynamicExecutable


class Encoder(nn.Module):
    """A layer of a transformer with merged dimensions, positions, a mask that depends on them, and a bias of the caller's."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.positions = nn.Embedding(64, 16)
        self.project, self.norm, self.feed = nn.Linear(16, 48), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, tokens: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, length = tokens.shape
        at = torch.arange(length, device=tokens.device)
        x = self.positions(tokens) + self.positions(at)
        q, k, v = self.project(self.norm(x).reshape(-1, 16)).reshape(batch, length, 3, 4, 4).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) + bias
        if self.causal:
            scores = scores.masked_fill(at[None] > at[:, None], float("-inf"))
        x = x + self.feed((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return torch.nn.functional.gelu(x), scores


@pytest.fixture(scope="module", params=[False, True], ids=["all keys", "causal"])
def encoder(request: pytest.FixtureRequest) -> tuple[Encoder, DynamicExecutable]:
    torch.manual_seed(0)
    module = Encoder(request.param).eval()
    dynamic = {"tokens": {0: "batch", 1: "length"}, "bias": {0: "length", 1: "length"}}
    inputs = torch.randint(64, (2, 20)), torch.randn(20, 20)
    return module, tilewright.compile(module, inputs, dynamic=dynamic, wait=True)


@settings(max_examples=draws(10), deadline=None)
@given(batch=st.sampled_from([2, 3]), length=st.integers(2, 32))
def test_results_do_not_depend_on_padding(encoder: tuple[Encoder, DynamicExecutable], batch: int, length: int) -> None:
    module, executable = encoder
    tokens, bias = torch.randint(64, (batch, length)), torch.randn(length, length)
    with torch.no_grad():
        wanted = module.double()(tokens, bias.double())
        module.float()
    got = executable(tokens, bias)
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)
    served = executable.sizes[-1]
    assert isinstance(served["length"], range)
    assert length in served["length"]
    assert len(executable.sizes) <= 2 * 4


def _band(least: int, most: int) -> Callable[[int], torch.Tensor]:
    def mask(length: int) -> torch.Tensor:
        apart = torch.arange(length)[:, None] - torch.arange(length)
        return torch.where((apart >= least) & (apart <= most), 0.0, float("-inf"))

    return mask


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("mask", [_band(0, 2), _band(-64, 0), _band(-1, 1)], ids=["window", "later keys", "neighbours"])
def test_padded_rows_without_keys_that_count_spoil_nothing(mask: Callable[[int], torch.Tensor]) -> None:
    """Of such rows a softmax is NaN, which the next layer multiplies by 0."""
    project, back = nn.Linear(8, 24), nn.Linear(8, 8)

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.back = project, back

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                q, k, v = self.project(x).chunk(3, -1)
                x = x + self.back((q @ k.mT + mask(x.shape[1])).softmax(-1) @ v)
            return x

    module = Layers().eval()
    executable = tilewright.compile(module, (torch.randn(1, 20, 8),), dynamic={"x": {1: "length"}}, wait=True)
    for length in (17, 19, 24, 5):
        x = torch.randn(1, length, 8)
        with torch.no_grad():
            torch.testing.assert_close(executable(x), module(x), atol=1e-5, rtol=1e-5)
    assert all(isinstance(sizes["length"], range) for sizes in executable.sizes)


def test_products_of_what_may_be_infinite_have_both_factors_masked() -> None:
    class Weighted(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x @ (y / (20 - torch.arange(y.shape[0]))[:, None])

    module, x, y = Weighted(), torch.randn(3, 18), torch.randn(18, 4)
    executable = tilewright.compile(module, (x, y), dynamic={"x": {1: "length"}, "y": {0: "length"}}, wait=True)
    torch.testing.assert_close(executable(x, y), module(x, y))


class Positions(nn.Module):
    """Positions from where the caller begins, in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(22, 8)

    def forward(self, x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return x + self.table(start + torch.arange(x.shape[1])) + self.table(torch.arange(x.shape[1]))


def test_padding_has_no_positions_beyond_a_table() -> None:
    module = Positions().eval().requires_grad_(False)
    executable = tilewright.compile(module, (torch.randn(2, 12, 8), torch.tensor([0])), dynamic={"x": {1: "length"}}, wait=True)
    for length, start in ((12, 10), (16, 6), (20, 2), (22, 0), (5, 0)):
        x = torch.randn(2, length, 8)
        torch.testing.assert_close(executable(x, torch.tensor([start])), module(x, torch.tensor([start])))
    assert executable.verify(torch.randn(2, 21, 8), torch.tensor([0])).passed


class Hidden(nn.Module):
    """Quotients that are infinite where a position hides them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        apart = x[:, :, None, 0] - x[:, None, :, 0]
        positions = torch.arange(x.shape[1])
        return x.mT @ torch.where(positions[:, None] == positions, torch.zeros(()), 1 / apart)


class Masks(nn.Module):
    """Finite masks whose sum is infinite in rows that do not count."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        least, positions = torch.finfo(x.dtype).min, torch.arange(x.shape[1])
        window = torch.where(positions[:, None] - positions < 3, 0.0, least)
        for _ in range(2):
            x = (0.2 * x @ x.mT + window + window + torch.where(positions[:, None] >= positions, 0.0, least)).softmax(-1) @ x
        return x


class Growing(nn.Module):
    """A factor that is infinite from some position on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT).softmax(-1) @ (torch.exp(4.6 * torch.arange(x.shape[1]))[:, None] * 1e-36 * x)


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("module", [Hidden(), Masks(), Growing()], ids=lambda module: type(module).__name__)
def test_what_is_infinite_only_where_nothing_counts(module: nn.Module) -> None:
    executable = tilewright.compile(module, (torch.randn(2, 12, 8),), dynamic={"x": {1: "length"}}, wait=True)
    for length in (17, 18, 7):
        x = torch.randn(2, length, 8)
        torch.testing.assert_close(executable(x), module(x), atol=1e-4, rtol=1e-4)
    assert any(isinstance(sizes["length"], range) for sizes in executable.sizes)


def test_programs_of_ranges(encoder: tuple[Encoder, DynamicExecutable]) -> None:
    module, executable = encoder
    tokens, bias = torch.randint(64, (2, 18)), torch.randn(18, 18)
    assert executable.verify(tokens, bias).passed
    assert executable.profile(tokens, bias, repetitions=2).regions
    assert {"batch": 2, "length": 18} not in executable.sizes
    assert executable.program(tokens, bias)(tokens, bias)[0].shape == (2, 18, 16)
    assert {"batch": 2, "length": 18} in executable.sizes
    with pytest.raises(InvalidInput, match=r"input bias: .*\[length, length\] = \[18, 18\]"):
        executable(tokens, torch.randn(18, 17))
    with pytest.raises(InvalidInput):
        executable(tokens, torch.randn(18))
    with torch.no_grad():
        torch.testing.assert_close(executable(tokens[:, :1], bias[:1, :1])[0], module(tokens[:, :1], bias[:1, :1])[0], atol=1e-5, rtol=1e-5)


def test_the_next_range_is_built_before_it_is_needed() -> None:
    torch.manual_seed(0)
    module = Encoder(True).eval()
    dynamic = {"tokens": {0: "batch", 1: "length"}, "bias": {0: "length", 1: "length"}}
    executable = tilewright.compile(module, (torch.randint(64, (2, 10)), torch.randn(10, 10)), dynamic=dynamic, wait=True)
    first, second = ({"batch": 2, "length": lengths} for lengths in (range(2, 17), range(17, 25)))

    def call(length: int) -> None:
        tokens, bias = torch.randint(64, (2, length)), torch.randn(length, length)
        with torch.no_grad():
            torch.testing.assert_close(executable(tokens, bias)[0], module(tokens, bias)[0], atol=1e-5, rtol=1e-5)

    with mock.patch.object(executable._builds, "request", wraps=executable._builds.request) as request:
        for length in (15, 14, 2, 16, 11, 12):  # shorter, much longer, or far from the end
            call(length)
        request.assert_not_called()
        call(13)
        request.assert_called_once()
        made = executable._builds.request(request.call_args.args[0])
        made.done.wait()
        assert made.error is None
        assert executable.sizes == (second, first)  # in the order of their uses
        for length in (14, 15, 16, 17, 18):
            call(length)
        assert request.call_count == 2
        assert executable.sizes == (first, second)


def test_a_range_that_cannot_be_built_ahead_is_requested_once() -> None:
    module = Positions().eval().requires_grad_(False)
    executable = tilewright.compile(module, (torch.randn(2, 12, 8), torch.tensor([0])), dynamic={"x": {1: "length"}}, wait=True)
    with mock.patch.object(executable._builds, "request", wraps=executable._builds.request) as request:
        for length in range(12, 20):
            x = torch.randn(2, length, 8)
            torch.testing.assert_close(executable(x, torch.tensor([0])), module(x, torch.tensor([0])))
            assert length != 16 or request.call_count == 1


def ranges(function: Callable[..., Any], *inputs: torch.Tensor) -> Ranges | None:
    model = ModuleModel(Function(function), inputs, None, [[{1: "length"}, *[None] * (len(inputs) - 1)]])
    return ranges_of(model, model.key(inputs))


X = torch.randn(2, 12, 4)
INDEX = torch.tensor([0, 1])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.mean(1),
        lambda x: x.sum(1),
        lambda x: x / x.shape[1],
        lambda x: x[:, -1],
        lambda x: x[:, : x.shape[1] // 2],
        lambda x: x.flip(1),
        lambda x: x.roll(1, 1),
        lambda x: x.amax(1),
        lambda x: nn.functional.layer_norm(x, x.shape[1:]),
        lambda x: x.transpose(1, 2).log_softmax(-1),
        lambda x: x.cumsum(1).flip(1),
        lambda x: torch.nn.functional.conv1d(x.transpose(1, 2), torch.ones(4, 4, 3), padding=1),
        lambda x: x * (torch.arange(x.shape[1]) - x.shape[1])[:, None],
        lambda x: x * min(x.shape[1], 5),
        lambda x: x.reshape(-1, 2, 4),
        lambda x: x.reshape(-1).softmax(0).reshape(x.shape),
        lambda x: torch.cat([x, x], 1),
        lambda x: (x, x.flatten(0, 1)),
        lambda x: torch.eye(x.shape[1]) @ x,
        lambda x: x.reshape(-1, 4)[:, None].tril(),
    ],
)
def test_models_that_mix_entries_have_a_program_for_each_size(function: Callable[..., Any]) -> None:
    found = ranges(function, X)
    if found is None:
        return
    for count in (5, 11):  # a range may serve them all the same, if it is right
        x = torch.randn(2, count, 4)
        executable = tilewright.compile(Function(function), x, dynamic=[[{1: "length"}]], wait=True)
        torch.testing.assert_close(executable(x), Function(function)(x), atol=1e-5, rtol=1e-5)


@pytest.mark.in_turns(4)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.relu() * 2 + torch.arange(x.shape[1])[:, None],
        lambda x: (x.reshape(-1, 4) @ torch.ones(4, 3)).reshape(2, -1, 3),
        lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
        lambda x: x.transpose(1, 2) @ x,
        lambda x: (x.transpose(1, 2) @ x.exp()).softmax(-1),
        lambda x: torch.cat([x, x], 2)[:, :, 1:5].permute(1, 2, 0).contiguous(),
        lambda x: x.reshape(2, -1, 2, 2).transpose(1, 2).expand(2, 2, x.shape[1], 2) + 1,
    ],
)
def test_models_that_keep_entries_apart_have_ranges(function: Callable[..., Any]) -> None:
    found = ranges(function, X)
    assert found is not None
    assert found.rounded((12,)) == (LEAST,)
    executable = tilewright.compile(Function(function), X, dynamic=[[{1: "length"}]], wait=True)
    for count in (2, 5, 15, 16):
        x = torch.randn(2, count, 4)
        torch.testing.assert_close(executable(x), function(x), atol=1e-4, rtol=1e-4)
    assert len(executable.sizes) == 1


def test_what_is_tried_is_not_bound_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[tuple[int, ...]] = []
    original = ModuleModel.bind
    monkeypatch.setattr(ModuleModel, "bind", lambda model, key: bound.append(key) or original(model, key))  # type: ignore[func-returns-value]
    tilewright.compile(Function(lambda x: x.relu() + 1), X, dynamic=[[{1: "length"}]])
    assert bound == [(12,), (LEAST,), (LEAST - 1,)]


def test_sizes_are_rounded_up_by_a_quarter_at_most() -> None:
    found = ranges(lambda x: x + 1, X)
    assert found is not None
    for size in range(2, 600):
        rounded = found.rounded((size,))
        assert rounded is not None
        assert size <= rounded[0] <= max(LEAST, size + 7, size * 1.25)
        assert found.first(rounded[0]) <= size
    assert len({found.rounded((size,)) for size in range(65, 129)}) == 4
    assert found.rounded((1,)) is None


def test_a_range_on_a_gpu() -> None:
    """One program, whose kernels run in the interpreter, for several lengths; the number of entries that count is made where the inputs are."""
    torch.manual_seed(0)
    module = Encoder(True).eval()
    dynamic = {"tokens": {1: "length"}, "bias": {0: "length", 1: "length"}}
    inputs = torch.randint(64, (2, 14)), torch.randn(14, 14)
    executable = tilewright.compile(module, inputs, "h200", dynamic=dynamic, wait=True)
    (program,) = executable._programs.values()
    assert program.frame is not None
    with emulated(program.executable):
        for length in (14, 16, 9):
            tokens, bias = torch.randint(64, (2, length)), torch.randn(length, length)
            with torch.no_grad():
                wanted = module.double()(tokens, bias.double())
                module.float()
            for found, expected in zip(executable(tokens, bias), wanted, strict=True):
                torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    assert len(executable._programs) == 1


@pytest.mark.gpu
def test_ranges_on_the_gpu() -> None:
    torch.manual_seed(0)
    module = Encoder(False).eval().cuda()
    dynamic = {"tokens": {0: "batch", 1: "length"}, "bias": {0: "length", 1: "length"}}
    inputs = torch.randint(64, (2, 20), device="cuda"), torch.randn(20, 20, device="cuda")
    executable = tilewright.compile(module, inputs, dynamic=dynamic, wait=True)
    for length in (20, 17, 24, 33, 18):
        tokens, bias = torch.randint(64, (2, length), device="cuda"), torch.randn(length, length, device="cuda")
        with torch.no_grad():
            wanted = module.double()(tokens, bias.double())
            module.float()
        for found, expected in zip(executable(tokens, bias), wanted, strict=True):
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    assert len(executable._programs) == 3 and all(program.frame is not None for program in executable._programs.values())  # to 20, 24 and 40
