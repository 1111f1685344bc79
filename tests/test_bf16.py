"""precision="bf16": conversions, contractions on tile registers against float64 (in the interpreter), and their models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.draws import draws
from tests.gpu_cases import Case, convolution_case, matmul_case, offsets
from tests.operator_cases import samples
from tilewright.analysis.cpu.assembly import Instruction
from tilewright.analysis.cpu.caches import cache_misses
from tilewright.analysis.cpu.pipeline import block_cycles
from tilewright.codegen.assemble import block
from tilewright.codegen.c import print_c
from tilewright.codegen.interpreter import run
from tilewright.codegen.intrinsics.amx import configuration, tile
from tilewright.hardware import host_cpu, machine
from tilewright.hardware.pipelines import PIPELINES
from tilewright.ir.expr import Load, Var, index_const
from tilewright.ir.kernel import Buffer, For, Kernel, Store
from tilewright.ir.layout import Layout, row_major
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.kernels.columns import length, row
from tilewright.kernels.cpu.amx.lower import amx_form
from tilewright.kernels.cpu.amx.schema import AMX
from tilewright.kernels.cpu.amx.space import CpuAmxFacts, CpuAmxSchedule, cpu_amx_space, schedule_of
from tilewright.kernels.registry import lower
from tilewright.partition.precision import BFLOAT16_ISA
from tilewright.runtime.packing import pack, prepared, unpack
from tilewright.selection.choice import rank

XEON = machine("xeon-sapphire-rapids")
here = pytest.mark.skipif(not set(BFLOAT16_ISA) <= set(host_cpu().isa), reason="this CPU has no AMX for bfloat16")


# --- conversions ---


def conversion(source: str, target: str, size: int, lanes: int) -> Kernel:
    """target[i] = source[i] for these types, in vectors."""
    i = Var("i", size // lanes)
    copied = Store("target", i * lanes, Load("source", (i * lanes,), "f32", lanes))
    buffers = (Buffer("source", source, size), Buffer("target", target, size, writable=True))
    return Kernel("convert", buffers, block(For(i, index_const(size // lanes), copied)))


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts equal bits, or NaN in both."""
    nan = torch.isnan(expected)
    assert torch.equal(torch.isnan(found), nan)
    assert torch.equal(found.view(torch.int16)[~nan], expected.view(torch.int16)[~nan])


@pytest.mark.parametrize("lanes", [1, 8, 16])
def test_rounding_in_the_interpreter(lanes: int) -> None:
    values = samples()
    result = np.zeros(values.numel(), np.uint16)
    assert run(conversion("f32", "bf16", values.numel(), lanes), [values.numpy(), result]).is_clean
    assert_same(torch.from_numpy(result.view(np.int16)).view(torch.bfloat16), values.bfloat16())


@pytest.mark.parametrize("lanes", [1, 8, 16])
def test_widening_is_exact(lanes: int) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    result = np.zeros(1 << 16, np.float32)
    assert run(conversion("bf16", "f32", 1 << 16, lanes), [bits, result]).is_clean
    np.testing.assert_array_equal(result.view(np.uint32), bits.astype(np.uint32) << 16)


@here
@pytest.mark.parametrize("lanes", [1, 16])
def test_rounding_as_compiled(lanes: int, tmp_path: Path) -> None:
    import ctypes

    from tilewright.toolchain import SourceFile
    from tilewright.toolchain.compilers import CCompiler

    values = samples()
    result = torch.zeros(values.numel(), dtype=torch.bfloat16)
    source = SourceFile("kernel", print_c([conversion("f32", "bf16", values.numel(), lanes)]), "c", ("convert",))
    (tmp_path / CCompiler.source_name).write_text(source.text)
    outcome = CCompiler.find(XEON).compile(source, tmp_path)
    assert outcome.succeeded, outcome.log
    function = ctypes.CDLL(str(tmp_path / CCompiler.binary_name)).convert
    function((ctypes.c_void_p * 2)(values.data_ptr(), result.data_ptr()), None)
    assert_same(result, values.bfloat16())


# --- contractions, in the interpreter ---


def in_bfloat16(case: Case, expected: torch.Tensor, *kept: str) -> Case:
    """The case with its stored values (except constants and `kept`) in bfloat16. `expected`: the result for factors rounded to bfloat16."""
    values = {name: v if name in (*case.constants, *kept) else replace(v, dtype="bf16") for name, v in case.values.items()}
    inputs = {name: array if name in ("bias", *kept) else nearest(array) for name, array in case.inputs.items()}
    return replace(case, values=values, inputs=inputs, expected=expected.numpy())


def nearest(array: np.ndarray) -> np.ndarray:
    return torch.from_numpy(array).bfloat16().float().numpy()


def convolution(*, stride: int = 1, padding: int = 1, groups: int = 1, epilogue: bool = True, **others: Any) -> Case:
    case = convolution_case(stride=stride, padding=padding, groups=groups, epilogue=epilogue, **others)
    double = {name: torch.from_numpy(array if name == "bias" else nearest(array)).double() for name, array in case.inputs.items()}
    expected = nn.functional.conv2d(double["x"], double["w"], None, stride, padding, 1, groups)
    if epilogue:
        expected = torch.relu(expected + double["bias"][None, :, None, None] + double["residual"])
    return in_bfloat16(case, expected)


def product(*, transpose_a: bool = False, transpose_b: bool = False, **others: Any) -> Case:
    case = matmul_case(transpose_a=transpose_a, transpose_b=transpose_b, **others)
    a, b = (torch.from_numpy(nearest(case.inputs[name])).double() for name in "ab")
    return in_bfloat16(case, (a.mT if transpose_a else a) @ (b.mT if transpose_b else b), "out")


def stored(array: np.ndarray, layout: Layout, dtype: str) -> np.ndarray:
    if dtype != "bf16":
        return pack(torch.from_numpy(array), layout).numpy()
    return pack(torch.from_numpy(array).bfloat16(), layout).view(torch.uint16).numpy()


def blank(layout: Layout, dtype: str) -> np.ndarray:
    """NaN, with zeros in halo and alignment padding."""
    flat = np.zeros(layout.size, np.uint16 if dtype == "bf16" else np.float32)
    flat[offsets(layout).ravel()] = 0x7FC0 if dtype == "bf16" else np.nan
    return flat


def execute(case: Case, lowered: Lowered) -> torch.Tensor:
    """Runs the kernels in the interpreter, fails on any report, and returns the output."""
    memory = {name: stored(array, case.layouts[name], case.values[name].dtype) for name, array in case.inputs.items()}
    memory["out"] = blank(case.layouts["out"], case.values["out"].dtype)
    for name, item in lowered.storage.items():
        if item.source is None:
            memory[name] = blank(item.layout, item.value.dtype)
        else:
            memory[name] = stored(prepared(torch.from_numpy(case.inputs[item.source]), item).float().numpy(), item.layout, item.value.dtype)
    kernels = {kernel.name: kernel for kernel in lowered.kernels}
    for call in lowered.calls:
        report = run(kernels[call.kernel], [memory[name] for name in call.arguments])
        assert report.is_clean, report.faults
    flat = (
        torch.from_numpy(memory["out"].view(np.int16)).view(torch.bfloat16) if case.values["out"].dtype == "bf16" else torch.from_numpy(memory["out"])
    )
    return unpack(flat, case.layouts["out"])


def check(case: Case, lowered: Lowered) -> None:
    """Compares results. Factors are exact and sums are float32, so that only the stored result is rounded."""
    found, expected = execute(case, lowered).double().numpy(), case.expected
    once = 2.0**-8 if case.values["out"].dtype == "bf16" else 0.0
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(found, expected, rtol=once + 2e-5, atol=2e-5 * scale)


def examine(case: Case, threads: int, seed: int) -> None:
    """Checks one schedule of the case's space."""
    _, problem = amx_form(case.problem, XEON)
    candidates, _ = cpu_amx_space(problem, XEON, threads)
    if length(candidates):
        position = int(np.random.default_rng(seed).integers(length(candidates)))
        check(case, lower(case.problem, schedule_of(16, **row(candidates, position)), XEON))


CONVOLUTIONS = dict(
    batch=st.sampled_from([1, 1, 2]),
    channels=st.sampled_from([2, 6, 16, 24, 40, 64]),
    outputs=st.sampled_from([3, 8, 16, 24, 33, 48]),
    size=st.tuples(st.integers(3, 19), st.integers(3, 19)),
    filter_size=st.sampled_from([1, 2, 3, 5]),
    stride=st.sampled_from([1, 1, 2]),
    padding=st.sampled_from([0, 1, 2]),
    epilogue=st.booleans(),
)


@settings(max_examples=draws(25), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(threads=st.sampled_from([1, 2, 4]), seed=st.integers(0, 1000), drawn=st.fixed_dictionaries(CONVOLUTIONS))
def test_random_convolutions_and_schedules(threads: int, seed: int, drawn: dict[str, Any]) -> None:
    least = max(drawn["filter_size"] - 2 * drawn["padding"], 1)
    size = tuple(max(extent, least) for extent in drawn["size"])
    examine(convolution(**{**drawn, "size": size}, seed=seed), threads, seed)


@settings(max_examples=draws(15), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    batch=st.sampled_from([(), (2,), (2, 3)]),
    m=st.integers(1, 40),
    n=st.integers(2, 40),
    r=st.sampled_from([2, 10, 32, 48, 64, 96]),
    constant=st.booleans(),
    transpose_b=st.booleans(),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
def test_random_products_and_schedules(threads: int, seed: int, **drawn: Any) -> None:
    examine(product(**drawn, seed=seed), threads, seed)


@pytest.mark.parametrize("channels", [3, 5])
def test_few_channels_are_walked_with_the_columns_of_the_filter(channels: int) -> None:
    """An odd number of channels is followed by a zero in storage, in both factors: NaN beside the window does not spread."""
    case = convolution(channels=channels, outputs=16, size=(11, 13), filter_size=5, stride=2, padding=2)
    halo = ((0, 0), (0, 1), (2, 2), (2, 2))
    case = replace(case, layouts=dict(case.layouts) | {"x": case.layouts["x"].with_halo(halo)})
    form, problem = amx_form(case.problem, XEON)
    assert problem.depth == 5 * (channels + 1) and problem.steps == 5
    x = case.inputs["x"].copy()
    x[:, :, :, -1] = np.nan
    with_nan = replace(case, inputs=dict(case.inputs) | {"x": x})
    lowered = lower(case.problem, CpuAmxSchedule(7, 2, 1, False, False, 2, 1, 16), XEON)
    check(case, lowered)
    found = execute(with_nan, lowered)
    double = {name: torch.from_numpy(array).double() for name, array in with_nan.inputs.items()}
    touched = nn.functional.conv2d(double["x"], double["w"], None, 2, 2).isnan()
    assert torch.equal(found.isnan(), touched) and touched.any() and not touched.all()


def test_tiles_over_rows_do_not_store_what_lies_between() -> None:
    case = convolution(channels=32, outputs=32, size=(7, 7))
    layouts = dict(case.layouts) | {"out": case.layouts["out"].with_halo(((0, 0), (0, 0), (1, 1), (1, 1)))}
    case = replace(case, layouts=layouts)
    check(case, lower(case.problem, CpuAmxSchedule(16, 2, 2, True, False, 2, 1, 16), XEON))


def test_the_output_may_be_row_major() -> None:
    case = convolution(channels=32, outputs=24, size=(6, 9))
    case = replace(case, layouts=dict(case.layouts) | {"out": row_major(case.values["out"].shape)})
    _, problem = amx_form(case.problem, XEON)
    assert problem.single_stores
    check(case, lower(case.problem, CpuAmxSchedule(9, 2, 2, False, False, 2, 1, 16), XEON))


@pytest.mark.parametrize(
    ("case", "target", "why"),
    [
        (convolution(channels=32), "x86-avx512", "no AMX"),
        (convolution_case(channels=32), "xeon-sapphire-rapids", "no value is stored in bfloat16"),
        (convolution(channels=3), "xeon-sapphire-rapids", "no even number"),
        (convolution(channels=32, last=False), "xeon-sapphire-rapids", "no even number"),
        (product(transpose_a=True), "xeon-sapphire-rapids", "not adjacent"),
        (convolution(channels=32, halo=False), "xeon-sapphire-rapids", "A is no value stored in bfloat16"),
    ],
)
def test_what_is_no_case_for_it(case: Case, target: str, why: str) -> None:
    with pytest.raises(Unsuitable, match=why):
        amx_form(case.problem, machine(target))


def test_tiles_that_do_not_fit_are_refused() -> None:
    assert configuration([tile("a", 16, 16, "f32")]).startswith("1, 0")
    with pytest.raises(ValueError, match="do not fit"):
        configuration([tile("a", 17, 16, "f32")])
    with pytest.raises(ValueError, match="do not fit"):
        configuration([tile(f"a{i}", 1, 1, "f32") for i in range(9)])


def test_the_space_keeps_its_rules() -> None:
    facts = CpuAmxFacts(1, 14, 14, 256, 3, 768, 32, 16, 0, 0)
    candidates, rejected = cpu_amx_space(facts, XEON, 2)
    m, n = candidates["pixel_tiles"], candidates["channel_tiles"]
    assert length(candidates) and np.all(m * n + m + n <= 8) and np.all(candidates["pixel_parts"] * candidates["channel_parts"] == 2)
    assert "more than 8 tiles" in rejected
    over = candidates["over_rows"] == 1
    assert set(candidates["pixels"][~over]) == {14} and set(candidates["pixels"][over]) == {16}


def test_pixels_beyond_level_2_may_be_several_parts() -> None:
    """Each of which a thread computes with all channels, before the next."""
    facts = CpuAmxFacts(1, 1, 2048, 256, 1, 1024, 32, 0, 2 * 2048 * 1024, 2 * 1024 * 256)
    candidates, _ = cpu_amx_space(facts, XEON, 1)
    several = candidates["pixel_parts"] > 1
    assert set(candidates["pixel_parts"]) == {1, 2, 4, 8, 16, 32} and not np.any(candidates["pixels_first"][several])
    one, _ = cpu_amx_space(replace(facts, a_bytes=2**20), XEON, 1)
    assert set(one["pixel_parts"]) == {1}
    case = product(batch=(), m=70, n=40, r=64, constant=True, seed=0)
    for parts in (2, 3):
        check(case, lower(case.problem, CpuAmxSchedule(16, 2, 2, False, False, parts, 1, 16), XEON))


def test_more_threads_than_blocks_are_no_obstacle() -> None:
    case = convolution(channels=32, outputs=24, size=(5, 5))
    _, problem = amx_form(case.problem, XEON)
    candidates, _ = cpu_amx_space(problem, XEON, 56)
    assert length(candidates)
    at = int(np.argmax(candidates["channel_parts"]))
    check(case, lower(case.problem, schedule_of(16, **row(candidates, at)), XEON))


def test_tiles_take_the_place_of_vectors_where_factors_are_bfloat16() -> None:
    case = convolution(channels=64, outputs=64, size=(28, 28))
    choice = rank(case.problem, XEON, 2).first()
    assert choice.schema is AMX
    assert rank(convolution_case(channels=64, outputs=64, size=(28, 28)).problem, XEON, 2).find(choice.schedule) is None


def test_the_cache_model_sees_tile_loads() -> None:
    """With one thread every line of both factors is loaded once, since everything fits the second level."""
    case = convolution(channels=64, outputs=64, size=(28, 28), epilogue=False)
    kernel = lower(case.problem, CpuAmxSchedule(14, 2, 2, False, False, 1, 1, 16), XEON).kernels[0]
    second = cache_misses(kernel, XEON, 1).levels[1]
    lines = {"in0": 9 * 64 * 64 // 32, "in1": 30 * 30 * 64 // 32, "out": 28 * 28 * 64 // 32}
    assert {name: round(count) for name, count in second.misses.items()} == lines


def test_the_pipeline_model_knows_tiles() -> None:
    """A block of 2x2 tiles is bound by its four products, one of 1x1 by the product's latency."""
    loads = [Instruction("tileloadd", ("(%rax,%rbx,1)", f"%tmm{number}")) for number in (4, 5, 6, 7)]
    products = [Instruction("tdpbf16ps", (f"%tmm{6 + j}", f"%tmm{4 + i}", f"%tmm{2 * i + j}")) for i in range(2) for j in range(2)]
    pipeline = PIPELINES[XEON.pipeline]
    assert block_cycles([*loads, *products], "x86-64", pipeline, True).steady == pytest.approx(64, abs=2)
    assert block_cycles([loads[0], loads[2], products[0]], "x86-64", pipeline, True).steady == pytest.approx(52, abs=2)
