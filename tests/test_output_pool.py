"""Large outputs come from a pool: memory that is still referenced is never reused, unreferenced memory is, and few blocks are kept."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.runtime_programs import ProgramBuilder
from tilewright.runtime.buffers import allocation
from tilewright.runtime.executable import Executable
from tilewright.runtime.output_pool import ALIGNMENT, KEPT, LEAST_BYTES, OutputPool

SHAPE = (512, 600)  # 1.2 MB of float32
CPU = torch.device("cpu")


def pool() -> OutputPool:
    return OutputPool(SHAPE, torch.float32)


def executable() -> Executable:
    builder = ProgramBuilder({"x": SHAPE})
    builder.kernel("neg", ("x",), "y", SHAPE, f"for (int64_t i = 0; i < {SHAPE[0] * SHAPE[1]}; i++) y[i] = -x0[i];")
    return builder.executable(("y",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_tensor_like_any_other(dtype: torch.dtype) -> None:
    tensor = OutputPool((3, 5, 7), dtype)()
    assert tensor.shape == (3, 5, 7) and tensor.dtype is dtype and tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0
    assert not tensor._is_view() and tensor.is_leaf and not tensor.requires_grad
    tensor.fill_(1)
    assert tensor.sum() == 105


def test_dropped_memory_is_handed_out_again() -> None:
    make = pool()
    address = make().data_ptr()
    assert make().data_ptr() == address


def test_the_last_result_may_be_held_while_the_next_is_made() -> None:
    make = pool()
    addresses = set()
    for _ in range(10):
        tensor = make()  # the name still refers to the previous tensor
        addresses.add(tensor.data_ptr())
    assert len(addresses) == 2


def saved_by_autograd(tensor: torch.Tensor) -> Any:
    return (torch.ones(SHAPE, requires_grad=True) * tensor).sum()


def required_gradient(tensor: torch.Tensor) -> Any:
    return tensor.requires_grad_().exp()


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda t: t,
    "view": lambda t: t[3:, 1],
    "empty view": lambda t: t[:0],
    "detached": lambda t: t.detach(),
    "same data": lambda t: torch.empty(0).set_(t),  # type: ignore[call-overload]
    "data": lambda t: t.data,
    "other dtype": lambda t: t.view(torch.int32),
    "array": lambda t: t.numpy(),
    "part of an array": lambda t: t.numpy()[1:, ::7],
    "memoryview": lambda t: memoryview(t.numpy()),  # type: ignore[arg-type]
    "storage": lambda t: t.untyped_storage(),
    "DLPack": torch.from_dlpack,  # type: ignore[attr-defined]
    "array by DLPack": np.from_dlpack,
    "capsule": lambda t: t.__dlpack__(),
    "saved by autograd": saved_by_autograd,
    "needs a gradient": required_gradient,
    "parameter": torch.nn.Parameter,
    "closure": lambda t: lambda: t,
    "in a cycle": lambda t: (lambda box: box.append(box) or box)([t]),  # type: ignore[arg-type, func-returns-value]
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_that_somebody_sees_is_not_handed_out(holder: str) -> None:
    make = pool()
    tensor = make()
    tensor.fill_(7)
    address, contents = tensor.data_ptr(), (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    held = HOLDERS[holder](tensor)
    del tensor
    gc.collect()
    others = [make().fill_(-1) for _ in range(3)]
    assert address not in {other.data_ptr() for other in others}
    assert (np.ctypeslib.as_array(contents) == 7).all()
    del held, contents
    gc.collect()
    assert make().data_ptr() == address


def test_gradients_of_a_saved_result() -> None:
    make = pool()
    tensor = make().fill_(3)
    weight = torch.ones(SHAPE, requires_grad=True)
    loss = (weight * tensor).sum()
    del tensor
    for _ in range(4):
        make().fill_(-1)
    loss.backward()
    assert weight.grad is not None and (weight.grad == 3).all()


def test_memory_moved_to_other_processes_stays_theirs() -> None:
    make = pool()
    tensor = make().fill_(5)
    tensor.share_memory_()
    assert tensor.is_shared()
    others = [make().fill_(-1) for _ in range(3)]
    assert (tensor == 5).all() and tensor.data_ptr() not in {other.data_ptr() for other in others}


def test_few_blocks_are_kept() -> None:
    make = pool()
    held = [make() for _ in range(10)]
    assert len({tensor.data_ptr() for tensor in held}) == 10 and not make.free
    del held
    assert len(make.free) == KEPT


def test_memory_outlives_its_pool_and_is_freed_after_it() -> None:
    make = pool()
    tensor = make().fill_(2)
    kept = make()
    del kept
    block = weakref.ref(make.free[0])
    del make
    gc.collect()
    assert block() is None and (tensor == 2).all()


def test_small_outputs_and_zeroed_ones_have_no_pool() -> None:
    elements = LEAST_BYTES // 4
    assert isinstance(allocation((elements,), torch.float32, CPU), OutputPool)
    assert not isinstance(allocation((elements - 1,), torch.float32, CPU), OutputPool)
    assert not isinstance(allocation((elements,), torch.float32, CPU, zeroed=True), OutputPool)


def test_threads_that_take_and_drop_never_share_a_block() -> None:
    make = OutputPool((4096,), torch.int64)
    wrong: list[int] = []

    def work(mark: int) -> None:
        for turn in range(300):
            tensor = make().fill_(mark)
            if turn % 3 == 0:
                kept = tensor.numpy()[5:]
                del tensor
                wrong.extend([mark] * int((kept != mark).any()))
            else:
                wrong.extend([mark] * int((tensor != mark).any()))

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(make.free) <= KEPT


def test_results_of_an_executable() -> None:
    exe = executable()
    inputs = [torch.randn(SHAPE) for _ in range(4)]
    held = [exe(x) for x in inputs]
    views = [exe(x)[7:9].numpy() for x in inputs]
    exe(torch.randn(SHAPE))
    for x, y, view in zip(inputs, held, views, strict=True):
        assert torch.equal(y, -x) and np.array_equal(view, -x[7:9].numpy())
    assert len({y.data_ptr() for y in held}) == 4
    del held, views, y, view
    addresses = {exe(inputs[0]).data_ptr() for _ in range(4)}
    assert len(addresses) == 1, "dropped memory is used again"


def test_callers_on_several_threads() -> None:
    exe = executable()
    failures: list[int] = []

    def work(seed: int) -> None:
        x = torch.full(SHAPE, float(seed))
        for _ in range(30):
            failures.extend([seed] * int((exe(x) != -seed).any()))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_inference_mode_and_a_closed_executable() -> None:
    exe = executable()
    x = torch.randn(SHAPE)
    with torch.inference_mode():
        inside = exe(x)
        assert inside.is_inference()
    outside = exe(x)
    assert not outside.is_inference()
    exe.close()
    gc.collect()
    assert torch.equal(inside, -x) and torch.equal(outside, -x)
