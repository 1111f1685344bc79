"""Attention on tile registers (AMX): its vector instructions, results under any schedule against PyTorch in float64, and which problems it suits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tilewright
from tests.compiled import poison
from tests.draws import draws
from tests.gpu_cases import Case, execute
from tests.instruction_values import assert_bits
from tests.operator_cases import Applied
from tests.test_attention import CASES as FLOAT32_CASES
from tests.test_attention import attend, holes, masked, operands, softmax
from tests.test_half_modules import assert_as_good_as_eager, in_type
from tests.test_tensor_attention import CASES as TENSOR_CASES
from tests.test_tensor_attention import ERRORS, case_of
from tilewright.codegen.c import print_c
from tilewright.codegen.interpreter import run
from tilewright.codegen.intrinsics import vectors
from tilewright.compile import read
from tilewright.graph.passes import simplify
from tilewright.hardware import host_cpu, machine
from tilewright.ir.expr import Load, Var, index_const
from tilewright.ir.kernel import Allocate, Block, Buffer, For, Kernel, Place, Store
from tilewright.ir.region import Unsuitable
from tilewright.kernels.cpu.tile_attention.form import has_tiles
from tilewright.kernels.cpu.tile_attention.schema import TILE_ATTENTION
from tilewright.kernels.cpu.tile_attention.space import TileAttentionSchedule, tile_attention_space
from tilewright.kernels.registry import lower
from tilewright.kernels.schema import JoinDecision, form_of
from tilewright.partition.joining import RowJudge
from tilewright.partition.plan import plan_program
from tilewright.selection.choice import choose
from tilewright.toolchain import SourceFile
from tilewright.toolchain.compilers import CCompiler

XEON = machine("xeon-sapphire-rapids")
INFINITY, NAN = float("inf"), float("nan")
here = pytest.mark.skipif(not has_tiles(host_cpu()), reason="this CPU has no AMX for bfloat16")


# --- instructions ------------------------------------------------------------------------------------------------------


def instructions() -> Kernel:
    """greatest[i] = greater(a[i], b[i]), powers[i] = 2^a[i], pairs[i] = a[i] and b[i] in bfloat16, turned: 16 x 16 pairs transposed."""
    lanes, zero, i = vectors.LANES, index_const(0), Var("i", 4)
    at = i * lanes
    each = Block(
        (
            *(Allocate(Buffer(name, "f32", 2 * lanes, "register", lanes)) for name in ("x", "y")),
            *(Store(name, zero, Load(source, (at,), "f32", lanes)) for name, source in (("x", "a"), ("y", "b"))),
            vectors.pair(Place("pairs", at * 2), Place("x", zero), Place("y", zero)),
            vectors.greater(Place("y", zero), Place("x", zero)),
            vectors.power_of_two(Place("x", zero)),
            Store("greatest", at, Load("y", (zero,), "f32", lanes)),
            Store("powers", at, Load("x", (zero,), "f32", lanes)),
        )
    )
    read = (Buffer("a", "f32", 64), Buffer("b", "f32", 64), Buffer("rows", "bf16", 512))
    sizes = (("greatest", "f32", 64), ("powers", "f32", 64), ("pairs", "bf16", 128), ("turned", "bf16", 512))
    written = tuple(Buffer(name, dtype, size, writable=True) for name, dtype, size in sizes)
    turned = vectors.transpose_pairs(Place("turned", zero), Place("rows", zero))
    return Kernel("vectors", (*read, *written), Block((For(i, index_const(4), each), turned)))


def instruction_arrays() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    a, b = generator.uniform(-150, 3, 64).astype(np.float32), generator.standard_normal(64).astype(np.float32)
    a[:8], b[:8] = (0, -1, -126, -149.5, -INFINITY, INFINITY, NAN, 1), (1, 2, -INFINITY, INFINITY, 0, 1, 5, NAN)
    a[8:10] = np.array([0x3F808000, 0x3F807FFF], np.uint32).view(np.float32)  # halfway between two bfloat16, and below
    rows = generator.integers(0, 2**16, 512).astype(np.uint16)
    return [a, b, rows, *(np.zeros(size, kind) for size, kind in ((64, np.float32), (64, np.float32), (128, np.uint16), (512, np.uint16)))]


def test_instructions_in_the_interpreter() -> None:
    arrays = instruction_arrays()
    assert run(instructions(), arrays).is_clean
    a, b, rows, greatest, powers, pairs, turned = arrays
    np.testing.assert_array_equal(greatest[:8], [1, 2, -126, INFINITY, 0, INFINITY, NAN, 1])  # the new one if either is NaN
    with np.errstate(all="ignore"):
        exact = np.exp2(a.astype(np.float64))
    normal = (exact >= np.finfo(np.float32).tiny) & np.isfinite(exact)
    np.testing.assert_allclose(powers[normal], exact[normal], rtol=2.0**-13)
    np.testing.assert_array_equal(powers[[0, 1, 2, 4, 5, 6, 7]], [1, 0.5, 2.0**-126, 0, INFINITY, NAN, 2])
    both = torch.from_numpy(np.stack([a, b], -1)).bfloat16().double().numpy().ravel()
    held = (pairs.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    known = ~np.isnan(both)
    assert held[16] == 1.0078125 and held[18] == 1 and known.sum() == 126
    np.testing.assert_allclose(held[known], both[known], rtol=2.0**-7)
    np.testing.assert_array_equal(turned.reshape(16, 16, 2), rows.reshape(16, 16, 2).swapaxes(0, 1))


@here
def test_instructions_are_those_of_the_machine(tmp_path: Path) -> None:
    """Equal bit for bit."""
    kernel, arrays = instructions(), instruction_arrays()
    expected = [array.copy() for array in arrays]
    assert run(kernel, expected).is_clean
    source = SourceFile("kernel", print_c([kernel]), "c", ("vectors",))
    (tmp_path / CCompiler.source_name).write_text(source.text)
    outcome = CCompiler.find(host_cpu()).compile(source, tmp_path)
    assert outcome.succeeded, outcome.log
    ctypes.CDLL(str(tmp_path / CCompiler.binary_name)).vectors((ctypes.c_void_p * 7)(*(array.ctypes.data for array in arrays)), None)
    for found, wanted in zip(arrays[3:5], expected[3:5], strict=True):
        np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
        assert_bits(np.nan_to_num(found), np.nan_to_num(wanted))
    for found, wanted in zip(arrays[5:], expected[5:], strict=True):
        np.testing.assert_array_equal(found, wanted)


# --- attention ---------------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    **{name: case for name, case in TENSOR_CASES.items() if name != "odd sizes"},
    **{name: case for name, case in FLOAT32_CASES.items() if name.startswith(("not finite", "bias", "large"))},
    "rows of least numbers": (masked, (*operands(), torch.where(holes(1, 1, 20, 37), 0.5, torch.finfo(torch.bfloat16).min))),
    "sixteen keys": (attend, operands(5, 16, 32)),
    "more columns than a vector": (attend, operands(40, 70, 40, columns=72)),
    "values across": (lambda q, k, v: softmax(q, k, v.transpose(-1, -2), lambda s: s), (*operands()[:2], torch.randn(1, 2, 24, 37))),
}


def schedules_of(case: Case) -> list[TileAttentionSchedule]:
    form = form_of(TILE_ATTENTION, case.problem, XEON)
    assert not isinstance(form, Unsuitable), str(form)
    space, _ = tile_attention_space(form.facts, XEON)
    return [TileAttentionSchedule(int(several), int(keys)) for several, keys in zip(space["vectors"], space["keys"], strict=True)]


def check(case: Case, schedule: TileAttentionSchedule) -> None:
    """Interprets the region, and compares with the expected result, NaN included."""
    found = (execute(case, lower(case.problem, schedule, XEON)).astype(np.uint32) << 16).view(np.float32)
    scale = max(1.0, float(np.abs(case.expected[np.isfinite(case.expected)]).max(initial=0.0)))
    np.testing.assert_allclose(found.astype(np.float64), case.expected, rtol=0, atol=ERRORS["bf16"] * scale, err_msg=str(schedule))


@pytest.mark.in_turns(9)
@pytest.mark.parametrize("name", CASES)
def test_results_are_pytorchs(name: str) -> None:
    case = case_of(*CASES[name], "bf16")
    schedules = schedules_of(case)
    for number in range(2):
        check(case, Random(f"{name} {number}").choice(schedules))


@settings(deadline=None, max_examples=draws(15), suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 2**32), st.integers(1, 70), st.integers(16, 200), st.integers(1, 40), st.integers(2, 40), st.sampled_from([1, 3]), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_any_sizes_and_schedules(seed: int, m: int, n: int, half: int, columns: int, group: int, causal: bool, masked: bool) -> None:
    torch.manual_seed(seed)
    mask = {"attn_mask": torch.rand(m, n) > 0.3} if masked and not causal else {"is_causal": causal}
    inputs = operands(m, n, 2 * half, 2 * group, 2, columns)
    case = case_of(partial(attend, enable_gqa=group > 1, **mask), inputs, "bf16")
    check(case, Random(seed).choice(schedules_of(case)))


@pytest.mark.in_turns(9)
@here
@pytest.mark.parametrize("name", CASES)
def test_compiled_results_are_as_good_as_pytorchs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two threads, over poisoned memory, whether or not the region is predicted to be faster in one kernel."""
    monkeypatch.setattr(RowJudge, "in_one", lambda *_: JoinDecision(True, "asked for"))
    function, inputs = CASES[name]
    rounded = in_type(inputs, torch.bfloat16)
    executable = tilewright.compile(Applied(function), rounded, threads=2, unsupported="error")
    assert [row.kind for row in executable.plan.rows].count("attention") == 1
    poison(executable)
    assert_as_good_as_eager(Exact(function), rounded, executable(*rounded))


class Exact(nn.Module):
    """The function, computed in float64 and rounded to the type of the inputs: PyTorch's own kernels give other results for masked rows and NaN."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*(x.double() if x.is_floating_point() else x for x in inputs)).to(inputs[0].dtype)


# --- choices -----------------------------------------------------------------------------------------------------------


def planned(inputs: tuple[Tensor, ...], dtype: torch.dtype, target: str) -> list[tuple[str, str, list[str]]]:
    """The kind and schedule of each region, and the types of what it reads."""
    graph, _ = simplify(read(Applied(attend).eval(), in_type(inputs, dtype)).graph)
    program = plan_program(graph, machine(target), 1)
    return [(each.region.kind, each.schedule, [program.storage[name].value.dtype for name in each.region.inputs]) for each in program.regions]


def test_long_sequences_in_bfloat16_are_computed_so() -> None:
    """Factors stay in bfloat16 there, and become float32 where vectors multiply them."""
    inputs = operands(512, 512, 64, 12, 12)
    ((kind, schedule, types),) = planned(inputs, torch.bfloat16, "xeon-sapphire-rapids")
    assert kind == "attention" and schedule.startswith("attention on tile registers") and types == ["bf16"] * 3
    for dtype, target in ((torch.float16, "xeon-sapphire-rapids"), (torch.float32, "xeon-sapphire-rapids"), (torch.bfloat16, "x86-avx512")):
        regions = planned(inputs, dtype, target)
        assert not any("tile registers" in schedule for _, schedule, _ in regions)
        (own,) = [types for kind, _, types in regions if kind == "attention"]
        assert own[1:] == ["f32", "f32"]


def test_single_queries_pass_over_keys_as_vectors() -> None:
    case = case_of(attend, operands(1, 2048, 64), "bf16")
    assert str(choose(case.problem, XEON, 1).schedule).startswith("few queries")


@pytest.mark.parametrize(
    ("why", "kind", "inputs"),
    [
        ("15 keys do not fill a tile", "bf16", operands(20, 15)),
        ("keys are no even number of adjacent elements", "bf16", operands(size=7)),
        ("are not all stored in bfloat16", "f16", operands()),
    ],
)
def test_unsuitable_problems(why: str, kind: str, inputs: tuple[Tensor, ...]) -> None:
    form = form_of(TILE_ATTENTION, case_of(attend, inputs, kind).problem, XEON)
    assert isinstance(form, Unsuitable) and why in str(form)


def test_other_machines_have_no_tiles() -> None:
    form = form_of(TILE_ATTENTION, case_of(attend, operands(), "bf16").problem, machine("epyc-9655"))
    assert isinstance(form, Unsuitable) and "no AMX" in str(form)
