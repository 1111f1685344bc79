"""The printers: golden text, every scalar operation against its reference in C (scalars and vectors), and CUDA C++ through NVRTC."""

from __future__ import annotations

import ctypes
import subprocess
from functools import lru_cache
from math import prod
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from tests.on_device import cuda_binary
from tests.standalone import FLAGS
from tilewright.codegen.c import print_c
from tilewright.codegen.cuda import dynamic_shared_bytes, index_dtype, print_cuda, shared_bytes
from tilewright.codegen.interpreter import run
from tilewright.codegen.intrinsics.barriers import block_barrier
from tilewright.ir.dtypes import ELEMENT_TYPES, is_float, size_of
from tilewright.ir.expr import (
    INDEX,
    Apply,
    Const,
    Expr,
    Load,
    Var,
    binary,
    cast,
    compare,
    const,
    floordiv,
    logical_and,
    mod,
    select,
    substitute,
    unary,
)
from tilewright.ir.kernel import (
    Allocate,
    Block,
    Buffer,
    Comment,
    For,
    If,
    Kernel,
    Launch,
    Let,
    Statement,
    Store,
    block_variable,
    thread_variable,
)
from tilewright.ir.scalar import NARROW, OPERATIONS, REINTERPRETED

GOLDEN = Path(__file__).parent / "golden"
COUNT = 4096
INTEGERS = ("i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8")
FLOATS = ("f32", "f64")
FLOAT_ONLY = frozenset(
    """div atan2 sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh
    erf isnan isinf nearest_tf32""".split()
)
EXACT = frozenset("floordiv mod fmod truncdiv min max reinterpret nearest_tf32".split())
INTEGER_ONLY = frozenset("bitwise_and bitwise_or bitwise_xor bitwise_not shift_left shift_right".split())
INEXACT_ULP = {"pow": 4, "tan": 4, "sinh": 4, "cosh": 4, "log1p": 5, "log2": 5, "log10": 5, "erf": 5, "tanh": 5, "expm1": 4, "log": 4}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def at(index: int) -> Const:
    return Const(index, INDEX)


def compiled(source: str, folder: Path) -> ctypes.CDLL:
    (folder / "kernels.c").write_text(source)
    command = ["gcc", "-O2", *FLAGS, "-march=native", "-Wall", "-Werror", "-Wno-psabi", "-Wno-unused-variable", "-shared", "-fPIC"]
    done = subprocess.run([*command, "-o", "kernels.so", "kernels.c", "-lm"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(folder / "kernels.so"))


def call(library: ctypes.CDLL, name: str, arrays: list[np.ndarray], scalars: tuple[int, ...] = ()) -> None:
    pointers = (ctypes.c_void_p * max(len(arrays), 1))(*(a.ctypes.data for a in arrays))
    getattr(library, name)(pointers, (ctypes.c_int64 * max(len(scalars), 1))(*scalars))


def cases() -> list[tuple[str, str]]:
    """Every defined (operation, operand type)."""
    chosen = []
    for name in OPERATIONS:
        if name in ("broadcast", "cast", "checked", "zip_low", "zip_high", "join"):
            continue
        types: tuple[str, ...] = FLOATS + INTEGERS
        if name in NARROW:
            types = ("f32",)
        elif name in FLOAT_ONLY:
            types = FLOATS
        elif name in INTEGER_ONLY:
            types = INTEGERS
        elif name in ("and", "or", "not"):
            types = ("bool", "f32")
        elif name == "reinterpret":
            types = tuple(REINTERPRETED)
        chosen += [(name, dtype) for dtype in types]
    return chosen


def result_type(name: str, dtype: str) -> str:
    return "bool" if OPERATIONS[name].boolean else REINTERPRETED[dtype] if name == "reinterpret" else dtype


def operation_kernel(name: str, dtype: str, lanes: int) -> Kernel:
    """out[i] = operation(a[i], b[i], ...), `lanes` elements at a time."""
    arity = OPERATIONS[name].arity
    out = result_type(name, dtype)
    position = Var("i", COUNT // lanes)
    offset = position * lanes
    names = ["c", "a", "b"] if name == "select" else ["a", "b"][:arity]
    operands: list[Expr] = [Load(n, (offset,), "bool" if n == "c" else dtype, lanes) for n in names]
    value = Apply(name, tuple(operands), out, lanes)
    parameters = [Buffer(n, "bool" if n == "c" else dtype, COUNT) for n in names]
    parameters.append(Buffer("out", out, COUNT, writable=True))
    body = For(position, at(COUNT // lanes), Store("out", offset, value), "simd" if lanes == 1 else "serial")
    return Kernel(f"{name}_{dtype}_x{lanes}", tuple(parameters), body)


def vector_lanes(dtype: str) -> int:
    return 64 // size_of(dtype)


@lru_cache(maxsize=1)
def operations_library() -> ctypes.CDLL:
    kernels = [operation_kernel(name, dtype, lanes) for name, dtype in cases() for lanes in (1, vector_lanes(dtype))]
    with TemporaryDirectory() as folder:
        return compiled(print_c(kernels), Path(folder))


def operands(name: str, dtype: str, generator: np.random.Generator) -> list[np.ndarray]:
    """Random values and, for floating point, every pair of edge cases; within the operation's domain if it is undefined elsewhere."""
    arity = OPERATIONS[name].arity
    numpy_type = np.dtype(ELEMENT_TYPES[dtype].numpy)
    if dtype == "bool":
        return [generator.integers(0, 2, COUNT).astype(bool) for _ in range(arity)]
    if is_float(dtype):
        info = np.finfo(numpy_type)
        edges = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, np.inf, -np.inf, np.nan, info.tiny, -info.tiny, info.tiny / 4, info.max, 88.5]
        edges += [-88.5, -103.5, 1e-8, -1e-8, 1e4, -1e4, 0.92, 0.625]
        columns = []
        for position in range(arity):
            scale = 10 ** generator.uniform(-6, 3 if name != "pow" else 1, COUNT)
            values = generator.standard_normal(COUNT) * scale
            values[: COUNT // 2] = generator.uniform(-4, 4, COUNT // 2)
            grid = np.repeat(edges, len(edges)) if position == 0 else np.tile(edges, len(edges))
            values[-len(grid) :] = grid
            columns.append(values.astype(numpy_type))
        return columns if name != "select" else [columns[0] > 0, *columns[1:]]
    limits = np.iinfo(numpy_type)
    reach = min(limits.max, 10**6)
    low = max(limits.min, -reach)
    columns = [generator.integers(low, reach, COUNT, endpoint=True).astype(numpy_type) for _ in range(arity)]
    if name in ("add", "sub", "mul", "neg", "reinterpret"):  # wrap around, or are infinite or NaN
        columns = [generator.integers(limits.min, limits.max, COUNT, endpoint=True, dtype=numpy_type) for _ in range(arity)]
    if name in ("floordiv", "mod", "fmod", "truncdiv"):
        columns[1][columns[1] == 0] = 3
        columns[1][columns[1] == -1] = 5  # the least integer divided by -1 does not fit
    if name == "pow":
        columns[1] = np.abs(columns[1] % 7).astype(numpy_type)
    if name.startswith("shift"):
        columns[1] = (np.abs(columns[1].astype(np.int64)) % (8 * size_of(dtype))).astype(numpy_type)
    if name == "select":
        columns[0] = columns[0] > 0
    return columns


def expected(name: str, dtype: str, arrays: list[np.ndarray]) -> np.ndarray:
    with np.errstate(all="ignore"):
        if is_float(dtype) and not OPERATIONS[name].boolean and name not in EXACT:
            arrays = [a.astype(np.float64) if a.dtype != bool else a for a in arrays]
        if name == "truncdiv" and not is_float(dtype):
            return (np.sign(arrays[0]) * np.sign(arrays[1]) * (abs(arrays[0].astype(np.int64)) // abs(arrays[1].astype(np.int64)))).astype(
                arrays[0].dtype
            )
        result = np.asarray(OPERATIONS[name].reference(*arrays))
        return result.astype(ELEMENT_TYPES[result_type(name, dtype)].numpy)


@pytest.mark.parametrize(("low", "high"), [(-2.0, 2.0), (-106.0, -85.0), (85.0, 90.0)])
def test_instructions_for_vectors_give_the_numbers_of_scalars(low: float, high: float) -> None:
    """Where results are usual, become subnormal, and become infinite; on a CPU without these instructions both are the same code."""
    x = np.random.default_rng(0).uniform(low, high, COUNT).astype(np.float32)
    scalars, vectors = np.zeros(COUNT, np.float32), np.zeros(COUNT, np.float32)
    for out, lanes in ((scalars, 1), (vectors, 16)):
        call(operations_library(), f"exp_f32_x{lanes}", [x, out])
    np.testing.assert_array_equal(scalars.view(np.int32), vectors.view(np.int32))


def test_headers_are_there_where_they_are_needed(tmp_path: Path) -> None:
    kernels = [operation_kernel(name, dtype, lanes) for name, dtype in cases() for lanes in (1, vector_lanes(dtype))]
    bare = [kernel for kernel in kernels if "#include <math.h>" not in print_c([kernel])]
    assert len(kernels) // 10 < len(bare) < len(kernels)
    (tmp_path / "kernels.c").write_text(print_c(bare))
    assert "#include <math.h>" not in (tmp_path / "kernels.c").read_text()
    command = ["gcc", *FLAGS, "-march=native", "-Wall", "-Werror", "-Wno-psabi", "-Wno-unused-variable", "-fsyntax-only", "kernels.c"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]


@pytest.mark.parametrize("form", ["scalar", "vector"])
@pytest.mark.parametrize(("name", "dtype"), [case for case in cases() if case[0] not in NARROW])  # test_narrow_results.py has those
def test_c_operation(name: str, dtype: str, form: str) -> None:
    generator = np.random.default_rng([len(name), *map(ord, name + dtype)])
    arrays = operands(name, dtype, generator)
    lanes = 1 if form == "scalar" else vector_lanes(dtype)
    out = np.zeros(COUNT, ELEMENT_TYPES[result_type(name, dtype)].numpy)
    call(operations_library(), f"{name}_{dtype}_x{lanes}", [*arrays, out])
    want = expected(name, dtype, arrays)
    if not is_float(result_type(name, dtype)) or name == "reinterpret":
        np.testing.assert_array_equal(out, want)
        return
    if name in ("sin", "cos", "tan"):  # for larger arguments, range reduction in double precision loses accuracy
        sane = ~(np.abs(arrays[0]) > 1e6) | np.isinf(arrays[0])
        out, want = out[sane], want[sane]
    np.testing.assert_array_equal(np.isnan(out), np.isnan(want))
    np.testing.assert_array_equal(out[np.isinf(want)], want[np.isinf(want)])
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isfinite(out), finite)
    with np.errstate(over="ignore"):
        spacing = np.spacing(np.maximum(np.abs(want[finite]), np.finfo(want.dtype).tiny)).astype(np.float64)
    units = np.abs(out[finite].astype(np.float64) - want[finite].astype(np.float64)) / spacing
    assert units.size == 0 or units.max() <= INEXACT_ULP.get(name, 3), (units.max(), [a[: out.size][finite][units.argmax()] for a in arrays])


@pytest.mark.parametrize("lanes", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ["zip_low", "zip_high", "join"])
def test_shuffled_vectors(name: str, lanes: int) -> None:
    size = 2 * lanes if name == "join" else lanes
    a, b = (Load(buffer, (at(0),), "f32", lanes) for buffer in "ab")
    parameters = (*(Buffer(buffer, "f32", lanes) for buffer in "ab"), Buffer("out", "f32", size, writable=True))
    kernel = Kernel(name, parameters, Store("out", at(0), Apply(name, (a, b), "f32", size)))
    values = np.random.default_rng(lanes).standard_normal((2, lanes)).astype(np.float32)
    out = np.zeros(size, np.float32)
    with TemporaryDirectory() as folder:
        call(compiled(print_c([kernel]), Path(folder)), name, [*values, out])
    merged = values.T.reshape(-1)  # a0 b0 a1 b1...
    np.testing.assert_array_equal(out, {"zip_low": merged[:lanes], "zip_high": merged[lanes:], "join": values.reshape(-1)}[name])
    np.testing.assert_array_equal(out, OPERATIONS[name].reference(*values))


# --- casts and mixtures ------------------------------------------------------------------------------------------------

TYPES = (*FLOATS, *INTEGERS, "bool")


def cast_kernel(source: str, target: str, lanes: int) -> Kernel:
    position = Var("i", COUNT // lanes)
    value = Apply("cast", (Load("a", (position * lanes,), source, lanes),), target, lanes)
    body = For(position, at(COUNT // lanes), Store("out", position * lanes, value))
    parameters = (Buffer("a", source, COUNT), Buffer("out", target, COUNT, writable=True))
    return Kernel(f"cast_{source}_{target}_x{lanes}", parameters, body)


@lru_cache(maxsize=1)
def casts_library() -> ctypes.CDLL:
    kernels = [cast_kernel(s, t, lanes) for s in TYPES for t in TYPES if s != t for lanes in (1, 8)]
    with TemporaryDirectory() as folder:
        return compiled(print_c(kernels), Path(folder))


@pytest.mark.parametrize("lanes", [1, 8])
@pytest.mark.parametrize("source", TYPES)
def test_c_cast(source: str, lanes: int) -> None:
    generator = np.random.default_rng(5)
    low, high = (0, 1) if source == "bool" else (0, 127) if source == "u8" else (-128, 127)
    values = generator.integers(low, high, COUNT, endpoint=True)
    array = (values / 1.0 if is_float(source) else values).astype(ELEMENT_TYPES[source].numpy)
    if is_float(source):
        array += generator.uniform(0, 0.99, COUNT).astype(array.dtype) * np.sign(array)
    for target in TYPES:
        if target == source or (is_float(source) and target[0] == "u" and low < 0):  # of negative numbers, C defines none
            continue
        out = np.zeros(COUNT, ELEMENT_TYPES[target].numpy)
        call(casts_library(), f"cast_{source}_{target}_x{lanes}", [array, out])
        np.testing.assert_array_equal(out, array.astype(out.dtype), err_msg=target)


def test_vector_masks_of_different_widths() -> None:
    """Booleans from comparisons of 4- and 8-byte types, from memory and from scalars in one expression."""
    i = Var("i", COUNT // 8)
    offset = i * 8
    single = compare("lt", Load("x", (offset,), "f32", 8), const(0.25, "f32"))
    double = compare("gt", Load("y", (offset,), "f64", 8), const(-0.25, "f64"))
    stored = Load("z", (offset,), "bool", 8)
    scalar = compare("ne", mod(i, 3), 1)
    kept = logical_and(logical_and(single, double), Apply("or", (stored, Apply("broadcast", (scalar,), "bool", 8)), "bool", 8))
    negative = Apply("not", (kept,), "bool", 8)
    flag = Var("flag", None, "bool", 8)
    chosen = Apply("select", (negative, Load("x", (offset,), "f32", 8), const(7.0, "f32")), "f32", 8)
    wide = Apply("select", (kept, Load("y", (offset,), "f64", 8), Apply("cast", (chosen,), "f64", 8)), "f64", 8)
    body = For(
        i,
        at(COUNT // 8),
        Block((Let(flag, kept), Store("out", offset, wide), Store("mask", offset, Apply("bitwise_xor", (flag, stored), "bool", 8)))),
    )
    parameters = (
        Buffer("x", "f32", COUNT),
        Buffer("y", "f64", COUNT),
        Buffer("z", "bool", COUNT),
        Buffer("out", "f64", COUNT, writable=True),
        Buffer("mask", "bool", COUNT, writable=True),
    )
    generator = np.random.default_rng(3)
    x, y = generator.standard_normal(COUNT).astype(np.float32), generator.standard_normal(COUNT)
    z = generator.integers(0, 2, COUNT).astype(bool)
    out, mask = np.zeros(COUNT), np.zeros(COUNT, bool)
    with TemporaryDirectory() as folder:
        call(compiled(print_c([Kernel("masks", parameters, body)]), Path(folder)), "masks", [x, y, z, out, mask])
    keep = (x < 0.25) & (y > -0.25) & (z | (np.repeat(np.arange(COUNT // 8), 8) % 3 != 1))
    np.testing.assert_array_equal(mask, keep ^ z)
    np.testing.assert_array_equal(out, np.where(keep, y, np.where(~keep, x, np.float32(7.0)).astype(np.float64)))


def test_guarded_load_is_not_evaluated() -> None:
    """An out-of-bounds load guarded by a select, even one used twice, reads nothing: the page after the array is not mapped."""
    import mmap

    i = Var("i", 2 * 1024)
    guarded = Load("x", (i,), "f32")
    value = select(compare("lt", i, 1024), binary("mul", guarded, guarded), 0.0)
    assert isinstance(value, Apply)
    body = For(i, at(2 * 1024), Store("out", i, value), "simd")
    kernel = Kernel("guarded", (Buffer("x", "f32", 1024), Buffer("out", "f32", 2048, writable=True)), body)
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    x = np.frombuffer(pages, np.float32)[:1024]
    x[:] = np.arange(1024)
    libc = ctypes.CDLL(None)
    if libc.mprotect(ctypes.c_void_p(x.ctypes.data + 4096), ctypes.c_size_t(4096), 0) != 0:
        pytest.skip("pages cannot be protected here")
    out = np.ones(2048, np.float32)
    with TemporaryDirectory() as folder:
        call(compiled(print_c([kernel]), Path(folder)), "guarded", [x, out])
    np.testing.assert_array_equal(out, np.concatenate([x * x, np.zeros(1024, np.float32)]))
    libc.mprotect(ctypes.c_void_p(x.ctypes.data + 4096), ctypes.c_size_t(4096), 3)


@pytest.mark.parametrize("lanes", [1, 2])
def test_long_chain_behind_a_guard_stays_short(lanes: int) -> None:
    """x sigmoid(x) applied twelve times to a load guarded by two conditions: as a tree it would have thousands of leaves."""
    i = Var("i", 64 // lanes)
    offset = i * lanes
    inside = logical_and(compare("ge", offset, 8), compare("lt", offset, 40))
    value: Expr = Load("x", (offset - 8,), "f32", lanes)
    for _ in range(12):
        value = value * binary("div", const(1.0, "f32"), unary("exp", unary("neg", value)) + 1.0)
    guarded = select(inside, value, const(-1.0, "f32") if lanes == 1 else Apply("broadcast", (const(-1.0, "f32"),), "f32", lanes))
    kernel = Kernel(
        "chain",
        (Buffer("x", "f32", 32), Buffer("out", "f32", 64, writable=True)),
        For(i, at(64 // lanes), Store("out", offset, guarded)),
    )
    text = print_c([kernel])
    assert text.count("tw_exp_f32") < 40
    x = np.random.default_rng(0).standard_normal(32).astype(np.float32)
    out = np.zeros(64, np.float32)
    report = run(kernel, [x, out])
    assert report.faults == ()  # nothing is read outside of x
    want = x.astype(np.float64)
    for _ in range(12):
        want = want / (1 + np.exp(-want))
    np.testing.assert_allclose(out, np.concatenate([np.full(8, -1), want, np.full(24, -1)]), rtol=1e-5)
    on_gpu = Kernel(
        "chain",
        kernel.parameters,
        Store(
            "out",
            substitute(offset, {i: thread_variable(Launch((1, 1, 1), (64 // lanes, 1, 1)))}),
            substitute(guarded, {i: thread_variable(Launch((1, 1, 1), (64 // lanes, 1, 1)))}),
        ),
        Launch((1, 1, 1), (64 // lanes, 1, 1)),
    )
    passed, log = cuda_binary(print_cuda([on_gpu]))
    assert passed, log
    assert len(print_cuda([on_gpu])) < 6000


def padded_copy(lanes: int, launch: Launch | None = None) -> Kernel:
    """Vectors shifted right by 8 and padded with zeros: a vector load guarded by a scalar condition."""
    i: Expr = Var("i", 64 // lanes) if launch is None else thread_variable(launch)
    offset = i * lanes
    inside = logical_and(compare("ge", offset, 8), compare("lt", offset, 40))
    value = select(inside, Load("x", (offset - 8,), "f32", lanes), Apply("broadcast", (const(0.0, "f32"),), "f32", lanes))
    body: Statement = Store("out", offset, value)
    if launch is None:
        assert isinstance(i, Var)
        body = For(i, at(64 // lanes), body)
    return Kernel("padded", (Buffer("x", "f32", 32), Buffer("out", "f32", 64, writable=True)), body, launch)


def test_guarded_vector_load() -> None:
    x = np.arange(1, 33, dtype=np.float32)
    want = np.concatenate([np.zeros(8), x, np.zeros(24)])
    on_gpu = padded_copy(4, Launch((1, 1, 1), (16, 1, 1)))
    for kernel in (padded_copy(8), padded_copy(4), on_gpu):
        out = np.full(64, np.nan, np.float32)
        assert run(kernel, [x, out]).faults == ()
        np.testing.assert_array_equal(out, want)
    out = np.full(64, np.nan, np.float32)
    with TemporaryDirectory() as folder:
        call(compiled(print_c([padded_copy(8)]), Path(folder)), "padded", [x, out])
    np.testing.assert_array_equal(out, want)
    passed, log = cuda_binary(print_cuda([on_gpu]))
    assert passed, log


@pytest.mark.skipif(not (which("aarch64-linux-gnu-gcc") and which("qemu-aarch64")), reason="needs the aarch64 cross compiler and qemu-user")
def test_operations_on_aarch64(tmp_path: Path) -> None:
    """Vectors wider than the machine's, and our mathematical functions, give the same results there: one program prints them."""
    names = ["exp", "tanh", "erf", "log", "max", "round", "select", "isnan", "sin"]
    kernels = [operation_kernel(name, "f32", lanes) for name in names for lanes in (1, 16)]
    calls, arrays = [], {}
    for kernel in kernels:
        name = kernel.name.split("_")[0]
        inputs = operands(name, "f32", np.random.default_rng(1))
        for buffer, array in zip(kernel.parameters, inputs, strict=False):
            array.tofile(tmp_path / f"{name}.{buffer.name}")
        arrays[kernel.name] = (name, inputs)
        reads = " ".join(f'take("{name}.{b.name}", p[{i}]);' for i, b in enumerate(kernel.parameters[:-1]))
        calls.append(f'{reads} {kernel.name}(p, 0); give("{kernel.name}.out", p[{len(kernel.parameters) - 1}]);')
    main = f"""
#include <stdio.h>
static void take(const char *n, void *p) {{ FILE *f = fopen(n, "rb"); (void)!fread(p, 1, 4 * {COUNT}, f); fclose(f); }}
static void give(const char *n, void *p) {{ FILE *f = fopen(n, "wb"); fwrite(p, 1, 4 * {COUNT}, f); fclose(f); }}
static float space[4][{COUNT}];
int main(void) {{ void *p[4] = {{space[0], space[1], space[2], space[3]}}; {" ".join(calls)} return 0; }}
"""
    (tmp_path / "main.c").write_text(print_c(kernels) + main)
    command = ["aarch64-linux-gnu-gcc", "-O2", *FLAGS, "-mcpu=neoverse-n1", "-w", "-static", "-o", "program", "main.c", "-lm"]
    subprocess.run(command, cwd=tmp_path, check=True)
    subprocess.run(["qemu-aarch64", "./program"], cwd=tmp_path, check=True)
    for kernel_name, (name, inputs) in arrays.items():
        out_type = result_type(name, "f32")
        out = np.fromfile(tmp_path / f"{kernel_name}.out", ELEMENT_TYPES[out_type].numpy)[:COUNT]
        want = expected(name, "f32", inputs)
        sane = ~(np.abs(inputs[0]) > 1e6) if name == "sin" else np.ones(COUNT, bool)
        np.testing.assert_allclose(out[sane], want[sane], rtol=5e-7, atol=1e-38, err_msg=kernel_name)


@pytest.mark.parametrize("combiner", ["sum", "max", "min"])
def test_simd_reduction(combiner: str) -> None:
    """NaN survives the combination of lanes."""
    i = Var("i", COUNT)
    operation = {"sum": "add"}.get(combiner, combiner)
    start = {"sum": 0.0, "max": -np.inf, "min": np.inf}[combiner]
    total = Load("total", (at(0),), "f32")
    body = Block(
        (
            Allocate(Buffer("total", "f32", 1, "register")),
            Store("total", at(0), const(start, "f32")),
            For(i, at(COUNT), Store("total", at(0), binary(operation, total, Load("x", (i,), "f32"))), "simd", (("total", combiner),)),
            Store("out", at(0), total),
        )
    )
    kernel = Kernel("reduce", (Buffer("x", "f32", COUNT), Buffer("out", "f32", 1, writable=True)), body)
    x = np.random.default_rng(1).standard_normal(COUNT).astype(np.float32)
    reference = {"sum": np.sum, "max": np.max, "min": np.min}[combiner]
    with TemporaryDirectory() as folder:
        library = compiled(print_c([kernel]), Path(folder))
        for _ in range(2):
            out = np.zeros(1, np.float32)
            call(library, "reduce", [x, out])
            np.testing.assert_allclose(out[0], reference(x.astype(np.float64)), rtol=1e-5, atol=1e-4)  # type: ignore[operator]
            x[COUNT // 3] = np.nan


# --- golden text ------------------------------------------------------------------------------------------------------


def micro_kernel() -> Kernel:
    """Two vectors of columns by four rows of a matrix product, then a maximum with zero, as emitted by the contraction's lowering."""
    m, n, k, row, column = Var("m", 8), Var("n", 4), Var("k", 64), Var("i", 4), Var("j", 2)
    acc, x = (row * 2 + column) * 16, Var("x", None, "f32")
    zero = Apply("broadcast", (const(0.0, "f32"),), "f32", 16)

    def each(body: Store) -> For:
        return For(row, at(4), For(column, at(2), body, "unroll"), "unroll")

    step = Block(
        (
            Allocate(Buffer("w", "f32", 32, "register", 16)),
            For(column, at(2), Store("w", column * 16, Load("b", (n * 2048 + k * 32 + column * 16,), "f32", 16)), "unroll"),
            For(
                row,
                at(4),
                Block(
                    (
                        Let(x, Load("a", (m * 256 + row * 64 + k,), "f32")),
                        For(
                            column,
                            at(2),
                            Store("acc", acc, Load("acc", (acc,), "f32", 16) + x * Load("w", (column * 16,), "f32", 16)),
                            "unroll",
                        ),
                    )
                ),
                "unroll",
            ),
        )
    )
    body = Block(
        (
            Allocate(Buffer("acc", "f32", 128, "register", 16)),
            each(Store("acc", acc, zero)),
            For(k, at(64), step),
            each(Store("c", m * 512 + row * 128 + n * 32 + column * 16, binary("max", Load("acc", (acc,), "f32", 16), 0.0))),
        )
    )
    loops = For(m, at(8), For(n, at(4), body, "parallel"), "parallel")
    parameters = (Buffer("a", "f32", 8 * 256), Buffer("b", "f32", 4 * 2048), Buffer("c", "f32", 8 * 512, writable=True))
    return Kernel("micro", parameters, loops, header="C = max(A B, 0), 32 x 64 x 128\nregister tile 4 x 32")


def row_sums() -> Kernel:
    """Sums of rows of 256 elements on a GPU: vector loads, a tree in shared memory."""
    launch = Launch((128, 1, 1), (64, 1, 1))
    thread, block, level = thread_variable(launch), block_variable(launch), Var("level", 6)
    value, half = Var("v", None, "f32", 4), Var("half", 33)
    pieces = [Load("piece", (at(i),), "f32") for i in range(4)]
    tree = Block(
        (
            Let(half, Apply("shift_right", (at(32), level), INDEX)),
            block_barrier(),
            If(compare("lt", thread, half), Store("sums", thread, Load("sums", (thread,), "f32") + Load("sums", (thread + half,), "f32"))),
        )
    )
    body = Block(
        (
            Allocate(Buffer("sums", "f32", 64, "shared")),
            Allocate(Buffer("piece", "f32", 4, "register")),
            Let(value, Load("x", (block * 256 + thread * 4,), "f32", 4)),
            Store("piece", at(0), value),
            Comment("four elements a thread, then halves"),
            Store("sums", thread, (pieces[0] + pieces[1]) + (pieces[2] + pieces[3])),
            For(level, at(6), tree),
            If(compare("eq", thread, 0), Store("out", block, Load("sums", (at(0),), "f32"))),
        )
    )
    parameters = (Buffer("x", "f32", 128 * 256), Buffer("out", "f32", 128, writable=True))
    return Kernel("row_sums", parameters, body, launch, header="sums of 128 rows of 256")


@pytest.mark.parametrize("name", ["micro.c", "row_sums.cu"])
def test_golden(name: str, request: pytest.FixtureRequest) -> None:
    text = print_c([micro_kernel()]) if name == "micro.c" else print_cuda([row_sums()])
    path = GOLDEN / name
    if request.config.getoption("--update-golden", False):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), "printed text changed: if that is meant, run pytest --update-golden"


def test_micro_kernel_is_right_and_stays_in_registers() -> None:
    generator = np.random.default_rng(0)
    a = generator.standard_normal((32, 64)).astype(np.float32)
    b = generator.standard_normal((64, 128)).astype(np.float32)
    packed = np.ascontiguousarray(b.reshape(64, 4, 32).transpose(1, 0, 2))
    c = np.zeros((32, 128), np.float32)
    source = print_c([micro_kernel()])
    with TemporaryDirectory() as folder:
        call(compiled(source, Path(folder)), "micro", [a, packed, c])
        command = ["gcc", "-O2", *FLAGS, "-march=skylake-avx512", "-mprefer-vector-width=512", "-S", "-o", "-", "kernels.c"]
        assembly = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    np.testing.assert_allclose(c, np.maximum(a.astype(np.float64) @ b, 0), rtol=1e-4, atol=1e-4)
    if assembly.returncode == 0:  # a compiler for x86
        lines = assembly.stdout.splitlines()
        products = [i for i, line in enumerate(lines) if "vfmadd" in line]
        assert len(products) == 8
        hot = lines[products[0] : products[-1] + 1]
        assert not [line for line in hot if "zmm" in line and "%rsp" in line]


# --- CUDA C++ ---------------------------------------------------------------------------------------------------------


def cuda_operations(dtype: str) -> Kernel:
    """Every operation on this type, one element per thread, and as vectors if the type has them."""
    launch = Launch((COUNT // 128, 1, 1), (128, 1, 1))
    position = block_variable(launch) * 128 + thread_variable(launch)
    stores, parameters = [], [Buffer(n, dtype, COUNT) for n in "ab"] + [Buffer("c", "bool", COUNT)]
    for name, of in cases():
        if of != dtype:
            continue
        for lanes in (1, 2):
            arity = OPERATIONS[name].arity
            names = ["c", "a", "b"] if name == "select" else ["a", "b"][:arity]
            offset = position * lanes if lanes == 1 else mod(position, COUNT // 2) * 2
            value = Apply(
                name,
                tuple(Load(n, (offset,), "bool" if n == "c" else dtype, lanes) for n in names),
                result_type(name, dtype),
                lanes,
            )
            out = f"out_{name}_{lanes}"
            parameters.append(Buffer(out, result_type(name, dtype), COUNT, writable=True))
            stores.append(Store(out, offset, value))
    for target in TYPES:
        parameters.append(Buffer(f"cast_{target}", target, COUNT, writable=True))
        stores.append(Store(f"cast_{target}", position, cast(Load("a", (position,), dtype), target)))
    return Kernel(f"operations_{dtype}", tuple(parameters), Block(tuple(stores)), launch)


@pytest.mark.parametrize("architecture", ["sm_90a", pytest.param("sm_75", marks=pytest.mark.slow)])
def test_cuda_compiles_every_operation(architecture: str) -> None:
    passed, log = cuda_binary(print_cuda([cuda_operations(t) for t in (*FLOATS, *INTEGERS, "bool")]), architecture)
    assert passed, log
    assert "warning" not in log, log


def test_cuda_golden_compiles_without_spills() -> None:
    passed, log = cuda_binary(print_cuda([row_sums()]))
    assert passed, log
    assert "0 bytes stack frame, 0 bytes spill stores" in log


def test_dynamic_shared_memory_and_index_types() -> None:
    launch = Launch((1, 1, 1), (32, 1, 1))
    thread = thread_variable(launch)
    body = Block(
        (
            Allocate(Buffer("first", "i8", 3, "shared")),
            Allocate(Buffer("second", "f32", 16 * 1024, "shared")),
            Store("second", thread, Load("x", (thread,), "f32")),
            block_barrier(),
            Store("out", thread + 2**31, Load("second", (31 - thread,), "f32")),
        )
    )
    small = Kernel("small", (Buffer("x", "f32", 32), Buffer("out", "f32", 2**31 + 32, writable=True)), body, launch, (Var("step", 4),))
    assert shared_bytes(small) == dynamic_shared_bytes(small) == 16 + 64 * 1024
    assert index_dtype(small) == "i64"
    text = print_cuda([small])
    assert "extern __shared__" in text and "shared_memory + 16" in text and "long long step" in text
    passed, log = cuda_binary(text)
    assert passed, log
    assert prod(launch.block) == 32
    assert floordiv(thread, 32) == at(0)


def test_data_that_exceeds_32_bits_is_computed_in_64() -> None:
    launch = Launch((1, 1, 1), (32, 1, 1))
    big = thread_variable(launch) * (2**30)
    kernel = Kernel("wide", (Buffer("out", "i64", 32, writable=True),), Store("out", thread_variable(launch), big), launch)
    assert "(long long)thread_x * 1073741824" in print_cuda([kernel])
    assert unary("neg", const(1.0, "f32")).operation == "neg"  # type: ignore[union-attr]
