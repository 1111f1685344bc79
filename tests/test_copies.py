"""Programs of one model for several sizes have one copy of each parameter, with the values that the parameter has when they are made."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tilewright
from tests.draws import draws
from tilewright.compile import Family
from tilewright.frontend.copies import Copies
from tilewright.frontend.tensor_memory import same_bits

TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64, torch.complex128)
PECULIAR = (23, 29)
"""The shape of a weight that no other tensor has."""


class Scaled(nn.Module):
    """The weight is read by a product, the scale by a quotient, where the sign of a zero matters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(*PECULIAR)), nn.Parameter(torch.rand(23) + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight) / self.scale


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def of_shape(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """The tensors of a shape that live, by their addresses, apart from traced ones."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter) and tuple(x.shape) == shape]
    return list({x.data_ptr(): x for x in tensors}.values())


def assert_only_the_parameter_is_left(module: Scaled) -> None:
    deadline = time.monotonic() + 20  # the thread that builds programs lets go of them a moment after they are there
    while len(of_shape(PECULIAR)) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    (left,) = of_shape(PECULIAR)
    assert left.data_ptr() == module.weight.data_ptr()


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


def in_double(module: Scaled, x: torch.Tensor) -> torch.Tensor:
    return (x.double() @ module.weight.detach().double().T) / module.scale.detach().double()


@settings(max_examples=draws(60), deadline=None)
@given(st.data())
def test_a_copy_is_taken_again_while_it_has_the_same_bits(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
    whole = torch.randint(0, 100, (*shape, 3)).to(data.draw(st.sampled_from(TYPES)))
    view = data.draw(
        st.sampled_from(
            [lambda x: x, lambda x: x[..., 1], lambda x: x.transpose(0, -1), lambda x: x.conj(), lambda x: x.conj().imag if x.is_complex() else x]
        )
    )
    tensor = view(whole)
    copies = Copies()
    first = copies.of(tensor)
    assert first.is_contiguous() and first.dtype is tensor.dtype and torch.equal(first, tensor)
    if not tensor.numel():
        return
    assert copies.of(tensor) is first and copies.of(view(whole)) is first
    before = first.clone()
    index = tuple(data.draw(st.integers(0, extent - 1)) for extent in tensor.shape)
    tensor.data[index] = ~tensor[index] if tensor.dtype is torch.bool else tensor[index] + 1
    second = copies.of(tensor)
    assert second is not first and torch.equal(second, tensor) and torch.equal(first, before)
    assert copies.of(tensor) is second


def test_signs_of_zeros_and_nans_are_compared() -> None:
    tensor, copies = torch.tensor([0.0, float("nan"), 1.0]), Copies()
    first = copies.of(tensor)
    assert copies.of(tensor) is first
    tensor[0] = -0.0
    assert same_bits(copies.of(tensor), tensor) and same_bits(first, torch.tensor([0.0, float("nan"), 1.0]))
    assert not same_bits(first, tensor) and not same_bits(first, first.double()) and not same_bits(first, first[:, None])


def test_copies_are_freed_with_what_uses_them() -> None:
    tensor, copies = torch.randn(8), Copies()
    alive = weakref.ref(copies.of(tensor))
    assert alive() is None
    kept = copies.of(tensor)
    assert copies.of(tensor) is kept and len(copies._made) == 1
    del kept
    assert not copies._made


def test_threads_get_the_same_copy() -> None:
    tensors, copies = [torch.randn(64, 64) for _ in range(8)], Copies()
    start, found = threading.Barrier(6), [[torch.empty(0)] * 8 for _ in range(6)]

    def read(number: int) -> None:
        start.wait()
        found[number] = [copies.of(tensor) for tensor in tensors]

    threads = [threading.Thread(target=read, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len({id(copy) for copy in made}) for made in zip(*found, strict=True)] == [1] * 8
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(found[0], tensors, strict=True))


def constants(executable: Any) -> dict[tuple[int, ...], torch.Tensor]:
    """The constants of a program by their shapes."""
    return {tuple(tensor.shape): tensor for tensor in executable.image.program.graph.constants.values()}


@pytest.mark.parametrize("exported", [False, True])
def test_programs_of_a_family_have_one_copy(exported: bool) -> None:
    module, family = Scaled().eval(), Family()
    given = torch.export.export(module, (torch.randn(3, 29),), dynamic_shapes={"x": {0: torch.export.Dim.AUTO}}) if exported else module
    fixed = tilewright.compile(given, torch.randn(3, 29), family=family)
    free = tilewright.compile(given, torch.randn(4, 29), dynamic={"x": {0: "batch"}}, wait=True, family=family)
    for executable, batch in ((fixed, 3), (free, 4), (free, 9)):
        x = torch.randn(batch, 29)
        close(executable(x), in_double(module, x))
    program = free.program(torch.randn(9, 29))
    assert constants(program)[PECULIAR] is constants(fixed)[PECULIAR]
    assert len(of_shape(PECULIAR)) == 2, "the parameter and one copy"
    del fixed, free, program, executable
    assert_only_the_parameter_is_left(module)


@pytest.mark.parametrize("change", ["an element", "the sign of zeros"])
def test_a_parameter_that_changed_has_its_new_values_in_new_programs(change: str) -> None:
    module, family = Scaled().eval(), Family()
    module.scale.data[::2] = 0
    x, y = torch.randn(3, 29), torch.randn(4, 29)
    fixed = tilewright.compile(module, x, family=family)
    before = in_double(module, x)
    if change == "an element":
        module.weight.data[11, 13] += 3
    else:
        module.scale.data[::2] = -0.0
    free = tilewright.compile(module, y, dynamic={"x": {0: "batch"}}, wait=True, family=family)
    assert before.isinf().any()
    close(free(y), in_double(module, y))
    close(free.program(x)(x), in_double(module, x))
    close(fixed(x), before)
    changed, same = (PECULIAR, (23,)) if change == "an element" else ((23,), PECULIAR)
    assert constants(free.program(y))[same] is constants(fixed)[same]
    assert not same_bits(constants(free.program(y))[changed], constants(fixed)[changed])


@pytest.mark.usefixtures("fresh_dynamo")
def test_graphs_of_torch_compile_have_one_copy_which_is_freed_with_them() -> None:
    module = Scaled().eval().requires_grad_(False)
    run = torch.compile(module, backend="tilewright", options={"wait": True})
    for batch in (4000, 5600, 7200):
        x = torch.randn(batch, 29)
        close(run(x), in_double(module, x))
    assert len(of_shape(PECULIAR)) == 2, "the parameter and one copy"
    module.weight.data = module.weight + 1  # other memory, which the guards notice
    x = torch.randn(8800, 29)
    close(run(x), in_double(module, x))
    del run
    torch._dynamo.reset()
    assert_only_the_parameter_is_left(module)
