"""Inputs and buffers that calls change: updated in place where nothing reads the old value afterwards, otherwise copied (`partition.updates`)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright
from tests.draws import draws
from tilewright.errors import IndexOutOfRange, InvalidInput
from tilewright.ir.region import Program
from tilewright.partition.without_kernels import through_torch
from tilewright.runtime.executable import Executable

Update = Callable[..., Any]


class Model(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Update) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def compiled(function: Update, *inputs: torch.Tensor) -> Executable:
    return tilewright.compile(Model(function), tuple(x.clone() for x in inputs), target="native")


def in_place(executable: Executable) -> frozenset[str]:
    return executable.image.program.updated


def check(executable: Executable, function: Update, *inputs: torch.Tensor) -> None:
    """Results and changed inputs are those of PyTorch in float64."""
    ours = [x.clone(memory_format=torch.preserve_format) for x in inputs]
    wanted = [x.double() if x.is_floating_point() else x.clone() for x in inputs]
    results, expected = executable(*ours), function(*wanted)
    for got, want in zip((*_leaves(results), *ours), (*_leaves(expected), *wanted), strict=True):
        torch.testing.assert_close(got.to(want.dtype), want, rtol=1e-5, atol=1e-5)


def _leaves(results: Any) -> tuple[torch.Tensor, ...]:
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def _index_copy(dim: int) -> Update:
    def function(cache: torch.Tensor, values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(dim, at, values)
        return cache.cos().sum(-1)

    return function


@settings(max_examples=draws(25), deadline=None)
@given(data=st.data())
def test_index_copy_of_any_rank(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    dim = data.draw(st.integers(0, len(shape) - 1))
    count = data.draw(st.integers(1, min(3, shape[dim])))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.float16]))
    torch.manual_seed(prod(shape))
    cache = torch.randn(shape).to(dtype)
    values = torch.randn([count if k == dim else extent for k, extent in enumerate(shape)]).to(dtype)
    function = _index_copy(dim)
    executable = compiled(function, cache, values, torch.arange(count))
    if count == 1 and shape[dim] > 1:
        assert in_place(executable) == {executable.signature.inputs[0].name}
    for _ in range(2):
        at = torch.randperm(shape[dim])[:count]
        ours, wanted = cache.clone(), cache.clone()
        result = executable(ours, values, at)
        wanted.index_copy_(dim, at, values)
        assert torch.equal(ours, wanted)
        tolerance = 1e-2 if dtype is torch.float16 else 1e-5
        torch.testing.assert_close(result.double(), wanted.double().cos().sum(-1), rtol=tolerance, atol=tolerance)


@settings(max_examples=draws(15), deadline=None)
@given(batch=st.integers(1, 5), heads=st.integers(1, 3), positions=st.integers(1, 20), size=st.integers(1, 20), negative=st.booleans())
def test_a_position_of_each_batch(batch: int, heads: int, positions: int, size: int, negative: bool) -> None:
    """index_put with two indices, one of them data, of which the last of equal ones would decide."""

    def function(cache: torch.Tensor, values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        cache[torch.arange(batch), :, at] = values
        return cache * 2

    cache, values = torch.randn(batch, heads, positions, size), torch.randn(batch, heads, size)
    executable = compiled(function, cache, values, torch.zeros(batch, dtype=torch.int64))
    at = torch.randint(0, positions, (batch,))
    check(executable, function, cache, values, at - positions if negative else at)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_scatter(dim: int, count: int) -> None:
    """Also with an index that is smaller than the buffer along other dimensions."""
    cache = torch.randn(5, 7, 4)
    shape = [count if k == dim else extent - 1 for k, extent in enumerate(cache.shape)]

    def function(cache: torch.Tensor, values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        cache.scatter_(dim, at, values)
        return cache.exp()

    values, at = torch.randn(shape), torch.randint(0, cache.shape[dim], shape)
    if count > 1:
        at = torch.rand(*shape[:dim], cache.shape[dim], *shape[dim + 1 :]).argsort(dim).narrow(dim, 0, count).contiguous()
    executable = compiled(function, cache, values, at)
    assert bool(in_place(executable)) == (count == 1)
    check(executable, function, cache, values, at)


def test_masked_and_sliced_writes() -> None:
    def masked(cache: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        cache.copy_(torch.where(mask, values, cache))
        return cache + 1

    cache = torch.randn(3, 40, 8)
    masks, values = torch.rand(3, 40, 1) < 0.3, torch.randn(3, 1, 8)
    executable = compiled(masked, cache, masks, values)
    assert in_place(executable)
    check(executable, masked, cache, masks, values)

    def sliced(cache: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        cache[:, 4:6] = values.sin()
        return cache + 1

    rows = torch.randn(3, 2, 8)
    check(compiled(sliced, cache, rows), sliced, cache, rows)


def test_attention_over_a_cache_as_in_generate() -> None:
    """A loop over positions, whose caches are read by attention; several positions come first."""
    heads, length, size = 3, 24, 16

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at, v)
        mask = torch.arange(length)[None] <= at[:, None]
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, mask)

    executables = {}
    ours = [torch.zeros(1, heads, length, size) for _ in range(2)]
    wanted = [x.double() for x in ours]
    for at in (torch.arange(5), *torch.arange(5, 20)[:, None]):
        q, k, v = (torch.randn(1, heads, len(at), size) for _ in range(3))
        if len(at) not in executables:
            executables[len(at)] = compiled(function, q, k, v, *ours, at)
            assert len(in_place(executables[len(at)])) == 2
        before = [x.data_ptr() for x in ours]
        got = executables[len(at)](q, k, v, *ours, at)
        expected = function(q.double(), k.double(), v.double(), wanted[0], wanted[1], at)
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
        assert before == [x.data_ptr() for x in ours]
        for x, want in zip(ours, wanted, strict=True):
            assert torch.equal(x.double(), want)


def test_two_updates_of_one_input() -> None:
    def function(cache: torch.Tensor, a: torch.Tensor, b: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, i, a)
        cache.index_copy_(0, j, b)
        return cache.sum(0)

    inputs = (torch.randn(9, 6), torch.randn(1, 6), torch.randn(1, 6))
    executable = compiled(function, *inputs, torch.tensor([1]), torch.tensor([2]))
    assert in_place(executable)
    for i, j in ((1, 2), (4, 4), (0, 8)):
        check(executable, function, *inputs, torch.tensor([i]), torch.tensor([j]))


@pytest.mark.parametrize("failing", [1, 2])
def test_kernels_that_fail(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either of two updates of one input runs through PyTorch."""

    def function(cache: torch.Tensor, a: torch.Tensor, b: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, i, a)
        cache.index_copy_(0, j, b)
        return cache.sum(0)

    def lost(program: Program, *others: Any) -> Any:
        at = [number for number, lowered in enumerate(program.regions) if lowered.region.kind == "map"]
        assert len(at) == 2
        return build(through_torch(program, {at[failing - 1]: ["a test"]}), *others)

    pipeline = import_module("tilewright.compile")
    build = pipeline.build
    monkeypatch.setattr(pipeline, "build", lost)
    inputs = (torch.randn(9, 6), torch.randn(1, 6), torch.randn(1, 6))
    executable = compiled(function, *inputs, torch.tensor([1]), torch.tensor([2]))
    assert in_place(executable) and any(region.kind == "torch" for region in executable.image.program.regions)
    for i, j in ((1, 2), (4, 4)):
        check(executable, function, *inputs, torch.tensor([i]), torch.tensor([j]))


def test_a_reader_between_two_updates() -> None:
    def function(cache: torch.Tensor, a: torch.Tensor, b: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = cache @ w
        cache.index_copy_(0, i, a)
        between = cache @ w
        cache.index_copy_(0, i + 1, b)
        return before, between, cache @ w

    inputs = (torch.randn(9, 6), torch.randn(1, 6), torch.randn(1, 6), torch.tensor([3]), torch.randn(6, 6))
    check(compiled(function, *inputs), function, *inputs)


def test_old_values_that_are_needed_afterwards() -> None:
    """A result that is computed of the old value, one that is the old value, and one of which every element changes."""

    def late(cache: torch.Tensor, a: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        old = cache * 3
        cache.index_copy_(0, i, a)
        return cache @ w + old

    def returned(cache: torch.Tensor, a: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        old = cache.clone()
        cache.index_copy_(0, i, a @ w)
        return old

    def whole(cache: torch.Tensor, a: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        cache.mul_(2)
        return cache.index_select(0, i) + a

    inputs = (torch.randn(6, 6), torch.randn(1, 6), torch.tensor([3]), torch.randn(6, 6))
    functions: tuple[Update, ...] = (late, returned, whole)
    for function in functions:
        executable = compiled(function, *inputs)
        assert not in_place(executable), function
        check(executable, function, *inputs)


def test_values_that_depend_on_old_ones() -> None:
    """They are computed before anything is stored, also those of another element or of one that is written before."""

    def added(cache: torch.Tensor, a: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        cache.index_add_(0, i, a, alpha=2)
        return cache.sum(0)

    def scattered(cache: torch.Tensor, a: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        cache.scatter_add_(0, i.expand(1, cache.shape[1]), a)
        return cache.sum(0)

    def by_index(cache: torch.Tensor, a: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        cache[i] += a
        return cache.sum(0)

    def rolled(cache: torch.Tensor, a: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, i, cache.flip(0)[2:3] + a)
        return cache.sum(0)

    def fixed(cache: torch.Tensor, a: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        cache[2].mul_(3).add_(a[0])
        return cache.sum(0)

    def twice(cache: torch.Tensor, a: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        cache.index_add_(0, i, a)
        cache.index_add_(0, i * 0, cache[2:3].clone())
        return cache.sum(0)

    for columns in (3, 37):  # more than full vectors, of which the last overlaps the one before
        inputs = (torch.randn(6, columns), torch.randn(1, columns))
        functions: tuple[Update, ...] = (added, scattered, by_index, rolled, fixed, twice)
        for function in functions:
            executable = compiled(function, *inputs, torch.tensor([3]))
            assert in_place(executable), function
            for at in (3, 0, 5):
                check(executable, function, *inputs, torch.tensor([at]))


def test_the_new_value_is_returned_too() -> None:
    def function(cache: torch.Tensor, a: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache.index_copy_(0, i, a)
        return cache, cache.clone()

    inputs = (torch.randn(6, 6), torch.randn(1, 6), torch.tensor([3]))
    executable = compiled(function, *inputs)
    check(executable, function, *inputs)
    cache = inputs[0].clone()
    _, other = executable(cache, *inputs[1:])
    assert other.data_ptr() != cache.data_ptr()


def test_inputs_that_kernels_cannot_write_to() -> None:
    function = _index_copy(1)
    inputs = (torch.randn(4, 6, 8), torch.randn(4, 1, 8), torch.tensor([2]))
    executable = compiled(function, *inputs)
    assert in_place(executable)
    strided = torch.randn(4, 12, 8)[:, ::2]
    wanted = strided.clone().index_copy_(1, inputs[2], inputs[1])
    executable(strided, *inputs[1:])
    assert torch.equal(strided, wanted)
    storage = torch.randn(4 * 6 * 8 + 32)
    with pytest.raises(InvalidInput, match="share memory"):
        executable(storage[: 4 * 6 * 8].view(4, 6, 8), storage[-32:].view(4, 1, 8), inputs[2])


def test_versions_and_failed_calls() -> None:
    """PyTorch learns of the change; an index out of range changes nothing, neither where a kernel writes nor where an earlier one found it."""

    def function(cache: torch.Tensor, table: torch.Tensor, i: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, i, table[token] @ table)
        return cache + 1

    inputs = (torch.randn(6, 6), torch.randn(6, 6))
    good = torch.tensor([3])
    executable = compiled(function, *inputs, good, good)
    assert in_place(executable)
    cache = inputs[0].clone()
    version = cache._version
    executable(cache, inputs[1], good, good)
    assert cache._version > version
    for i, token in ((6, 3), (3, 6), (-1, 3)):
        cache = inputs[0].clone()
        with pytest.raises(IndexOutOfRange):
            executable(cache, inputs[1], torch.tensor([i]), torch.tensor([token]))
        assert torch.equal(cache, inputs[0])
    with torch.inference_mode():
        cache = inputs[0].clone()
        executable(cache, inputs[1], good, good)
        torch.testing.assert_close(cache, inputs[0].clone().index_copy_(0, good, inputs[1][good] @ inputs[1]))


class Buffered(torch.nn.Module):
    """A module with a cache of its own."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(10, 4))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.cache.index_copy_(0, at, x)
        return self.cache.sum(0)


def test_buffers_of_modules_and_files(tmp_path: Path) -> None:
    module, twin = Buffered(), Buffered().double()
    executable = tilewright.compile(module, (torch.randn(1, 4), torch.tensor([0])), target="native")
    assert in_place(executable)
    loaded = tilewright.load(tmp_path / "model.zip", executable.save(tmp_path / "model.zip"))
    other = copy.copy(executable)
    for at in (3, 5, 3):
        x = torch.randn(1, 4)
        want = twin(x.double(), torch.tensor([at]))
        for each in (executable, loaded, other):
            torch.testing.assert_close(each(x, torch.tensor([at])).double(), want, rtol=1e-5, atol=1e-6)
        assert torch.equal(module.cache.double(), twin.cache)
    before = module.cache.clone()
    assert executable.verify(torch.randn(1, 4), torch.tensor([1])).passed
    executable.profile(torch.randn(1, 4), torch.tensor([1]), repetitions=1)
    assert torch.equal(module.cache, before)
