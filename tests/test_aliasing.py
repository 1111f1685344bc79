"""Inputs and outputs that share memory, or have unusual strides or storage: results are PyTorch's, or the call is refused with a remedy."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tilewright
from tilewright.errors import InvalidInput
from tilewright.runtime.executable import Executable


class Function(nn.Module):
    """A module of one function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Tensor) -> Any:
        return self.function(*arguments)


def mixed(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A product, an elementwise kernel and a sum, all of which read both inputs."""
    return a @ b.T, (a - b).relu() * b, (a * b).sum(1)


def added(a: Tensor, b: Tensor) -> Tensor:
    """Writes to its first input."""
    a.add_(b)
    return a * 2


def passed_through(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Results that are inputs, or views of them."""
    return a, b.T, a + b


FUNCTIONS = {"mixed": mixed, "added": added, "passed through": passed_through}


@lru_cache
def compiled(name: str) -> Executable:
    with torch.no_grad():
        return tilewright.compile(Function(FUNCTIONS[name]), (torch.randn(6, 6), torch.randn(6, 6)))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def of_numpy() -> tuple[Tensor, Tensor]:
    array = np.arange(200, dtype=np.float32)
    return torch.from_numpy(array[3:39].reshape(6, 6)), torch.from_numpy(array[40:112:2].reshape(6, 6))


def of_one_array() -> tuple[Tensor, Tensor]:
    """Two storages over the same memory."""
    array = np.arange(200, dtype=np.float32)
    return torch.from_numpy(array[:36].reshape(6, 6)), torch.from_numpy(array[6:42].reshape(6, 6))


def unaligned() -> tuple[Tensor, Tensor]:
    data = torch.frombuffer(bytearray(numbers(80).numpy().tobytes()), dtype=torch.uint8)
    return data[4:148].view(torch.float32).reshape(6, 6), data[152:296].view(torch.float32).reshape(6, 6)


def same() -> tuple[Tensor, Tensor]:
    x = numbers(6, 6)
    return x, x


def views(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> Callable[[], tuple[Tensor, Tensor]]:
    def made() -> tuple[Tensor, Tensor]:
        base = numbers(20, 20)
        return first(base), second(base)

    return made


def inference() -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        return numbers(6, 6), numbers(7, 6)[1:]


INPUTS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "the same tensor twice": same,
    "rows that overlap": views(lambda x: x.flatten()[:36].view(6, 6), lambda x: x.flatten()[6:42].view(6, 6)),
    "transposed": views(lambda x: x[:6, :6].contiguous().T, lambda x: x[6:12, 6:12].T),
    "a view of the other": views(lambda x: x[:6, :6], lambda x: x[:6, :6].T),
    "steps": views(lambda x: x[::3, ::3][:6, :6], lambda x: x[1:13:2, 1:13:2]),
    "negative strides by flip": views(lambda x: x[:6, :6].flip(0), lambda x: x[:6, :6].flip(0, 1)),
    "stride 0": views(lambda x: x[:1, :6].expand(6, 6), lambda x: x[:6, :1].expand(6, 6)),
    "one element": views(lambda x: x[:1, :1].expand(6, 6), lambda x: x[1, 1].expand(6, 6)),
    "windows that overlap": views(lambda x: x.flatten().as_strided((6, 6), (1, 1)), lambda x: x.flatten().unfold(0, 6, 2)[:6]),
    "an offset": views(lambda x: x.flatten()[1:37].view(6, 6), lambda x: x.flatten()[41:77].view(6, 6)),
    "of NumPy": of_numpy,
    "of one array": of_one_array,
    "unaligned": unaligned,
    "inference tensors": inference,
    "parameters": views(lambda x: nn.Parameter(x[:6, :6].clone()), lambda x: nn.Parameter(x[:6, :6].clone(), requires_grad=False)),
    "a negated view": views(lambda x: torch.complex(x[:6, :6], x[6:12, :6]).conj().imag, lambda x: x[:6, :6]),
}


def agree(ours: Any, theirs: Any) -> None:
    ours, theirs = (value if isinstance(value, tuple) else (value,) for value in (ours, theirs))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.detach().clone(), other.detach().clone(), rtol=1e-5, atol=1e-5)


@pytest.mark.in_turns
@pytest.mark.parametrize("how", INPUTS)
@pytest.mark.parametrize("name", ["mixed", "passed through"])
def test_inputs_that_share_memory(how: str, name: str) -> None:
    arguments, other = INPUTS[how](), INPUTS[how]()
    with torch.no_grad():
        for _ in range(2):
            ours = compiled(name)(*arguments)
            agree(ours, FUNCTIONS[name](*other))
            agree(arguments, other)  # nothing was written
    if name == "mixed":
        assert not {x.untyped_storage().data_ptr() for x in ours} & {x.untyped_storage().data_ptr() for x in arguments}


@pytest.mark.parametrize("how", INPUTS)
def test_an_input_that_is_written(how: str) -> None:
    """PyTorch writes, refuses, or (if elements of the written tensor share memory) does not define the result."""
    arguments, other = INPUTS[how](), INPUTS[how]()
    shares = arguments[0].untyped_storage().data_ptr() == arguments[1].untyped_storage().data_ptr() or how == "of one array"
    with torch.no_grad():
        try:
            expected = added(*other)
        except RuntimeError:
            expected = None  # a single memory location written twice, or an inference tensor
        if shares:
            with pytest.raises(InvalidInput, match="share memory"):
                compiled("added")(*arguments)
        elif expected is None:
            before = arguments[0].clone()
            with pytest.raises(InvalidInput, match="several elements lie in the same memory|an inference tensor"):
                compiled("added")(*arguments)
            assert torch.equal(arguments[0], before)
        else:
            agree(compiled("added")(*arguments), expected)
            agree(arguments, other)


def test_results_are_fed_back() -> None:
    """An output is the next input, whole and as a view, while earlier results are kept."""
    executable, module = compiled("mixed"), Function(mixed)
    a, b = numbers(6, 6), numbers(6, 6) / 10
    mine, theirs = (a, b), (a, b)
    held: list[tuple[Any, Any]] = []
    with torch.no_grad():
        for step in range(6):
            ours, expected = executable(*mine), module(*theirs)
            held.append((ours, expected))
            mine, theirs = ((r[0] / 10, r[1].T if step % 2 else r[1]) for r in (ours, expected))
            mine, theirs = ((r[0].T, r[0]) if step == 3 else r for r in (mine, theirs))
    for ours, expected in held:
        agree(ours, expected)


def test_large_results_of_the_pool_are_not_written_while_a_view_lives() -> None:
    """Results of a megabyte or more use memory that returns to the executable when nothing refers to it."""
    with torch.no_grad():
        executable = tilewright.compile(Function(lambda x: x * 2 + 1), torch.zeros(1024, 512))
        x = torch.zeros(1024, 512)
        views: list[Any] = []
        for step in range(8):
            result = executable(x)
            views.append((result[step::7].T.numpy() if step % 2 else result.view(-1)[step:], float(result[0, 0])))
            x = result  # read by the next call
            del result
            gc.collect()
        for view, value in views:
            assert (np.asarray(view) == value).all()
        assert [value for _, value in views] == [float(2 ** (k + 1) - 1) for k in range(8)]


def test_a_result_that_is_written_by_its_owner_changes_no_other() -> None:
    with torch.no_grad():
        executable = compiled("passed through")
        a, b = numbers(6, 6), numbers(6, 7)[:, 1:]
        first = executable(a, b)
        assert first[0] is a and first[1].data_ptr() == b.data_ptr()  # as in PyTorch
        total = first[2].clone()
        first[1].zero_()
        assert float(b.abs().sum()) == 0.0 and torch.equal(first[2], total)
        agree(executable(a, b), passed_through(a, b))


def test_clones_and_threads_share_inputs() -> None:
    """Several threads read the same tensor, a view of it, and results of one another."""
    x, start = numbers(6, 6), threading.Barrier(6)
    executable = compiled("mixed")
    clones = [executable.clone() for _ in range(3)]
    with torch.no_grad():
        expected = mixed(x, x.T)

    def work(number: int) -> None:
        start.wait()
        with torch.no_grad():
            for _ in range(30):
                held = [clones[number % 3](x, x.T), executable(x, x.T)]
                for ours in held:
                    agree(ours, expected)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


def test_clones_write_inputs_of_their_own_at_once() -> None:
    executable = compiled("added")
    clones = [executable.clone() for _ in range(4)]
    tensors = [torch.zeros(6, 6) for _ in clones]
    one = torch.ones(6, 6)

    def work(number: int) -> None:
        with torch.no_grad():
            for _ in range(50):
                clones[number](tensors[number], one)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert all((tensor == 50).all() for tensor in tensors)


def test_states_and_inputs_that_share_memory() -> None:
    """A buffer that calls change is also passed as an input."""

    class Counter(nn.Module):
        total: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.total.add_(x)
            return self.total + x

    ours, theirs = Counter(), Counter()
    with torch.no_grad():
        executable = tilewright.compile(ours, torch.ones(4))
        for call in (executable, theirs):
            call(torch.ones(4))
        for x in (ours.total, ours.total[:]):
            with pytest.raises(InvalidInput, match="buffer .*total and input .* share memory"):
                executable(x)
        agree(executable(ours.total.clone()), theirs(theirs.total.clone()))
        agree(ours.total, theirs.total)


def test_a_sparse_tensor_is_refused() -> None:
    with torch.no_grad(), pytest.raises(InvalidInput, match="expected a float32 tensor"):
        compiled("added")(torch.zeros(6, 6).to_sparse(), torch.zeros(6, 6))


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize(
    "pieces", [lambda x, d: x.split(2, d), lambda x, d: x.split([1, 3, 2], d), lambda x, d: x.chunk(4, d), lambda x, d: x.unbind(d)]
)
def test_results_that_are_pieces_of_an_input_are_views_of_it(pieces: Callable[[Tensor, int], Any], dim: int) -> None:
    torch._dynamo.reset()
    x = numbers(6, 6)
    with torch.no_grad():
        module = Function(lambda x: (*pieces(x.T, dim), x + 1))
        for executable in (tilewright.compile(module, (x,)), torch.compile(module, backend="tilewright", fullgraph=True)):
            ours, theirs = executable(x)[:-1], module(x)[:-1]
            assert [piece.data_ptr() for piece in ours] == [piece.data_ptr() for piece in theirs]
            assert [(piece.shape, piece.stride()) for piece in ours] == [(piece.shape, piece.stride()) for piece in theirs]
