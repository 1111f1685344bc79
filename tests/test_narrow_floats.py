"""float16 and bfloat16 as types of kernel IR: stored, moved, cast and loaded as float32, in C, in CUDA C++ and in the interpreter."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.on_device import cuda_binary, launch
from tests.operator_cases import samples
from tests.standalone import FLAGS
from tilewright.codegen.assemble import block
from tilewright.codegen.c import print_c
from tilewright.codegen.conversions import bits_of
from tilewright.codegen.cuda import print_cuda
from tilewright.codegen.interpreter import run
from tilewright.hardware import host_cpu
from tilewright.ir.expr import Apply, Expr, Load, Var, cast, compare, const, index_const, select
from tilewright.ir.kernel import Allocate, Buffer, For, Kernel, Launch, Let, Statement, Store, thread_variable

TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


def conversion(source: str, target: str, size: int, lanes: int, gpu: bool = False, explicit: bool = False) -> Kernel:
    """target[i] = source[i] for these types; `explicit`: loaded in their own type and cast, instead of loaded and stored as float32."""
    launch_ = Launch((size // lanes // 32, 1, 1), (32, 1, 1)) if gpu else None
    i = Var("block_x", size // lanes // 32) * 32 + thread_variable(launch_) if launch_ else Var("i", size // lanes)
    value: Expr = Load("source", (i * lanes,), source if explicit else "f32", lanes)
    body: Statement = Store("target", i * lanes, cast(value, target) if explicit else value)
    if isinstance(i, Var):
        body = For(i, index_const(size // lanes), body)
    return Kernel(
        f"convert_{source}_{target}_{lanes}_{int(explicit)}",
        (Buffer("source", source, size), Buffer("target", target, size, writable=True)),
        block(body),
        launch_,
    )


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's elements in the interpreter's representation."""
    array = tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    return array.copy()


def words(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)


def inputs(source: str) -> torch.Tensor:
    """Every 16-bit float; for float32 the midpoints between values of either type and their neighbours, including subnormal numbers, infinities and
    NaN, and random bits."""
    if source != "f32":
        return torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(TORCH[source])
    half = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.float16)).float().numpy().view(np.uint32)
    near = [(half.astype(np.int64) + step).clip(0, 2**32 - 1).astype(np.uint32) for step in (0, 0xFFF, 0x1000, 0x1001, 0x1FFF)]
    near.append(np.random.default_rng(0).integers(1 << 32, size=1 << 16, dtype=np.uint32))
    return torch.cat([samples(), torch.from_numpy(np.concatenate(near).view(np.float32).copy())])


def expected(x: torch.Tensor, target: str) -> np.ndarray:
    return bits(x.to(TORCH[target]))


def assert_same(found: np.ndarray, wanted: np.ndarray, dtype: str) -> None:
    """Asserts equal bits, or NaN in both."""
    mask, infinity = {"f16": (0x7FFF, 0x7C00), "bf16": (0x7FFF, 0x7F80), "f32": (0x7FFFFFFF, 0x7F800000)}[dtype]
    nan = words(wanted) & mask > infinity
    np.testing.assert_array_equal(words(found) & mask > infinity, nan)
    np.testing.assert_array_equal(words(found)[~nan], words(wanted)[~nan])


PAIRS = [("f16", "f32"), ("f32", "f16"), ("bf16", "f32"), ("f32", "bf16")]


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("lanes", [1, 4, 8, 16])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_in_the_interpreter(source: str, target: str, lanes: int, gpu: bool, explicit: bool) -> None:
    x = inputs(source)
    found = np.zeros_like(expected(x, target))
    assert run(conversion(source, target, x.numel(), lanes, gpu, explicit), [bits(x), found]).is_clean
    assert_same(found, expected(x, target), target)


@pytest.mark.parametrize("flags", [(), ("-mavx2",), ("-mavx2", "-mf16c"), ("-march=native",)], ids=["any", "avx2", "f16c", "native"])
@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_as_compiled(source: str, target: str, lanes: int, flags: tuple[str, ...], tmp_path: Path) -> None:
    if flags[-1:] == ("-mf16c",) and "f16c" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no F16C")
    check_compiled(conversion(source, target, len(inputs(source)), lanes), source, target, flags, tmp_path)


@pytest.mark.parametrize("flags", [("-mavx2",), ("-march=native",)], ids=["avx2", "native"])
@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("target", ["f16", "bf16"])
def test_two_vectors_are_converted_and_joined(target: str, lanes: int, flags: tuple[str, ...], tmp_path: Path) -> None:
    size = len(inputs("f32"))
    assert size % (2 * lanes) == 0
    i = Var("i", size // (2 * lanes))
    first, second = (Load("source", (i * (2 * lanes) + start,), "f32", lanes) for start in (0, lanes))
    body = For(i, index_const(size // (2 * lanes)), Store("target", i * (2 * lanes), Apply("join", (first, second), "f32", 2 * lanes)))
    kernel = Kernel("convert_halves", (Buffer("source", "f32", size), Buffer("target", target, size, writable=True)), body)
    check_compiled(kernel, "f32", target, flags, tmp_path)


def check_compiled(kernel: Kernel, source: str, target: str, flags: tuple[str, ...], folder: Path) -> None:
    """Asserts that the kernel, compiled with these flags, stores the inputs in the target type."""
    (folder / "kernel.c").write_text(print_c([kernel]))
    subprocess.run(["gcc", "-O2", *FLAGS, *flags, "-Wno-psabi", "-shared", "-fPIC", "-o", "kernel.so", "kernel.c", "-lm"], cwd=folder, check=True)
    x = inputs(source)
    given, found = bits(x), np.zeros_like(expected(x, target))
    getattr(ctypes.CDLL(str(folder / "kernel.so")), kernel.name)((ctypes.c_void_p * 2)(given.ctypes.data, found.ctypes.data), None)
    assert_same(found, expected(x, target), target)


def values(gpu: bool) -> Kernel:
    """16-bit floats in variables, registers, choices, constants and casts of other types; 64 elements."""
    grid = Launch((1, 1, 1), (32, 1, 1)) if gpu else None
    i = thread_variable(grid) if grid else Var("i", 32)
    kept = Var("kept", None, "f16", 2)
    chosen = select(compare("lt", i, 16), Load("pair", (index_const(0),), "f16", 2), Apply("broadcast", (const(1.0009765625, "f16"),), "f16", 2))
    body = block(
        Allocate(Buffer("pair", "f16", 2, "register", 2)),
        Let(kept, Load("x", (i * 2,), "f16", 2)),
        Store("pair", index_const(0), kept),
        Store("out", i * 2, chosen),
        Store("sums", i, cast(Load("x", (i * 2,), "f16"), "f32") + Load("pair", (index_const(1),), "f32")),
        Store("other", i, cast(Load("x", (i * 2,), "f16"), "bf16")),
        Store("whole", i, cast(Load("x", (i * 2,), "f16"), "i32")),
        Store("halved", i, cast(cast(i, "f64") / 3.0, "f16")),
        Store("third", i * 2, Load("x", (i * 2,), "f32", 2) * (1 / 3)),
    )
    parameters = (
        Buffer("x", "f16", 64), Buffer("out", "f16", 64, writable=True), Buffer("sums", "f32", 32, writable=True), Buffer("other", "bf16", 32, writable=True),
        Buffer("whole", "i32", 32, writable=True), Buffer("halved", "f16", 32, writable=True), Buffer("third", "f16", 64, writable=True),
    )  # fmt: skip
    return Kernel("narrow", parameters, block(body if grid else For(i, index_const(32), body)), grid)


def values_arrays() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Arrays for `values`, and their contents afterwards."""
    x = torch.linspace(-70, 70, 64).half()
    even, i = x[::2], torch.arange(32)
    wanted = [
        torch.where(torch.arange(64) < 32, x, torch.tensor(1.0009765625).half()),
        even.float() + x[1::2].float(),
        even.float().bfloat16(),
        even.float().int(),
        (i.double() / 3).float().half(),
        (x.float() * float(np.float32(1 / 3))).half(),
    ]
    arrays = [bits(tensor) for tensor in wanted]
    return [bits(x), *map(np.zeros_like, arrays)], arrays


@pytest.mark.parametrize("gpu", [False, True])
def test_values_in_the_interpreter(gpu: bool) -> None:
    arrays, wanted = values_arrays()
    report = run(values(gpu), arrays)
    assert report.is_clean and not report.unwritten, report
    for found, one in zip(arrays[1:], wanted, strict=True):
        np.testing.assert_array_equal(found, one)


def test_values_as_compiled(tmp_path: Path) -> None:
    (tmp_path / "kernel.c").write_text(print_c([values(False)]))
    flags = ("-Werror", "-Wall", "-Wno-psabi", "-Wno-unused-function", *host_cpu().compiler_flags)
    subprocess.run(["gcc", "-O2", *FLAGS, *flags, "-shared", "-fPIC", "-o", "kernel.so", "kernel.c", "-lm"], cwd=tmp_path, check=True)
    arrays, wanted = values_arrays()
    ctypes.CDLL(str(tmp_path / "kernel.so")).narrow((ctypes.c_void_p * 7)(*(array.ctypes.data for array in arrays)), None)
    for found, one in zip(arrays[1:], wanted, strict=True):
        np.testing.assert_array_equal(found, one)


def gpu_conversions(size: int = 1024) -> list[Kernel]:
    return [
        conversion(source, target, size, lanes, True, explicit) for source, target in PAIRS for lanes in (1, 2, 4, 8) for explicit in (False, True)
    ]


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_75"])
def test_nvrtc_compiles_them_without_headers(architecture: str) -> None:
    text = print_cuda([values(True), *gpu_conversions()])
    assert "#include" not in text
    passed, log = cuda_binary(text, architecture)
    assert passed and "warning" not in log, log


def test_arithmetic_on_them_is_refused() -> None:
    x = Load("x", (Var("i", 4),), "f16")
    body = For(Var("i", 4), index_const(4), Store("x", Var("i", 4), Apply("add", (x, x), "f16")))
    kernel = Kernel("k", (Buffer("x", "f16", 4, writable=True),), body)
    with pytest.raises(ValueError, match="add is no operation on f16: kernels compute with it as float32"):
        print_c([kernel])


def test_constants_are_rounded() -> None:
    everything = inputs("f32")[::101].tolist()
    for dtype in ("f16", "bf16"):
        found = np.array([bits_of(value, dtype) for value in everything], np.uint16)
        assert_same(found, bits(torch.tensor(everything).to(TORCH[dtype])), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("lanes", [1, 2, 4])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_on_the_gpu(source: str, target: str, lanes: int, explicit: bool) -> None:
    x = inputs(source)
    found = np.zeros_like(expected(x, target))
    launch(conversion(source, target, x.numel(), lanes, True, explicit), [bits(x), found])
    assert_same(found, expected(x, target), target)


@pytest.mark.gpu
def test_values_on_the_gpu() -> None:
    arrays, wanted = values_arrays()
    launch(values(True), arrays)
    for found, one in zip(arrays[1:], wanted, strict=True):
        np.testing.assert_array_equal(found, one)
