"""Products of pairs of bfloat16 in vectors (AVX512-BF16): in the interpreter, on this CPU bit for bit, in contractions, and in whole models."""

from __future__ import annotations

import copy
import ctypes
import importlib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import tilewright
from tests.compiled import poison
from tests.draws import draws
from tests.gpu_cases import Case, convolution_case
from tests.instruction_values import as_factor, assert_bits, stored
from tests.test_bf16 import CONVOLUTIONS, check, convolution, execute, product
from tests.test_bf16_models import Attention, Small
from tilewright.codegen.c import print_c
from tilewright.codegen.interpreter import run
from tilewright.codegen.intrinsics import pairs
from tilewright.hardware import host_cpu, machine
from tilewright.ir.expr import Load, Var, index_const
from tilewright.ir.kernel import Allocate, Block, Buffer, For, Kernel, Place, Store
from tilewright.ir.region import Unsuitable
from tilewright.kernels.columns import length, row
from tilewright.kernels.cpu.contraction.pairs import paired
from tilewright.kernels.cpu.contraction.schema import PAIRS, match, multiplying_pairs
from tilewright.kernels.cpu.contraction.space import CpuPairsSchedule, cpu_contraction_space
from tilewright.kernels.registry import lower
from tilewright.selection.choice import rank

ZEN5 = machine("epyc-9655")
here = pytest.mark.skipif(not set(pairs.REQUIRES) <= set(host_cpu().isa), reason="this CPU has no AVX512-BF16")


def one_product() -> Kernel:
    """out = c + the products of a pair with 16 pairs."""
    v, zero = Var("v", 1), index_const(0)
    body = (
        Allocate(Buffer("acc", "f32", 32, "register", 16)),
        Store("acc", index_const(16), Load("c", (zero,), "f32", 16)),
        For(v, index_const(1), pairs.multiply(Place("acc", v + 16), Place("a", zero), Place("b", zero)), "unroll"),
        Store("out", zero, Load("acc", (index_const(16),), "f32", 16)),
    )
    parameters = (Buffer("c", "f32", 16), Buffer("a", "bf16", 2), Buffer("b", "bf16", 32), Buffer("out", "f32", 16, writable=True))
    return Kernel("pairs", parameters, Block(body))


@here
@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**62])
def test_pairs_are_multiplied_as_by_the_machine(scale: float, tmp_path: Path) -> None:
    """Equal bit for bit, including intermediate rounding and subnormal numbers."""
    from tilewright.toolchain import SourceFile
    from tilewright.toolchain.compilers import CCompiler

    generator = np.random.default_rng(3)
    c = (generator.standard_normal(16) * min(scale, 1.0) ** 2).astype(np.float32)
    a, b = (stored(generator.standard_normal(count) * scale, "bf16") for count in (2, 32))
    expected, found = np.zeros(16, np.float32), np.zeros(16, np.float32)
    assert run(one_product(), [c, a, b, expected]).is_clean
    source = SourceFile("kernel", print_c([one_product()]), "c", ("pairs",))
    (tmp_path / CCompiler.source_name).write_text(source.text)
    outcome = CCompiler.find(host_cpu()).compile(source, tmp_path)
    assert outcome.succeeded, outcome.log
    pointers = (ctypes.c_void_p * 4)(*(array.ctypes.data for array in (c, a, b, found)))
    ctypes.CDLL(str(next(tmp_path.glob("*.so")))).pairs(pointers, None)
    assert_bits(found, expected)
    if scale == 1.0:
        x, y = as_factor(a, "bf16").astype(np.float64), as_factor(b, "bf16").reshape(16, 2).astype(np.float64)
        np.testing.assert_allclose(found, c + y @ x, rtol=1e-5, atol=1e-6)


def examine(case: Case, seed: int) -> None:
    """Checks one schedule of the case's space."""
    facts = PAIRS.match(case.problem, ZEN5).facts
    candidates, _ = cpu_contraction_space(facts, ZEN5)
    assert length(candidates)
    position = int(np.random.default_rng(seed).integers(length(candidates)))
    check(case, lower(case.problem, PAIRS.schedule_of(row(candidates, position), ZEN5), ZEN5))


@settings(max_examples=draws(25), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(seed=st.integers(0, 1000), drawn=st.fixed_dictionaries(CONVOLUTIONS))
def test_random_convolutions_and_schedules(seed: int, drawn: dict[str, Any]) -> None:
    least = max(drawn["filter_size"] - 2 * drawn["padding"], 1)
    size = tuple(max(extent, least) for extent in drawn["size"])
    examine(convolution(**{**drawn, "size": size}, seed=seed), seed)


@settings(max_examples=draws(15), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    batch=st.sampled_from([(), (2,), (2, 3)]), m=st.integers(1, 40), n=st.integers(2, 40), r=st.sampled_from([2, 10, 32, 48, 64, 96]),
    constant=st.booleans(), transpose_b=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_random_products_and_schedules(seed: int, **drawn: Any) -> None:
    examine(product(**drawn, seed=seed), seed)


def test_few_channels_are_walked_with_the_columns_of_the_filter() -> None:
    """An odd number of channels is followed by a zero in storage, in both factors: NaN beside the window does not spread."""
    case = convolution(channels=3, outputs=16, size=(11, 13), filter_size=5, stride=2, padding=2)
    case = replace(case, layouts=dict(case.layouts) | {"x": case.layouts["x"].with_halo(((0, 0), (0, 1), (2, 2), (2, 2)))})
    form = paired(case.problem, match(case.problem, ZEN5).parts, ZEN5)
    assert form.depth == 5 * 4 and form.steps == 5 * 5 * 2
    x = case.inputs["x"].copy()
    x[:, :, :, -1] = np.nan
    lowered = lower(case.problem, CpuPairsSchedule(1, 7, 1, 16, "n"), ZEN5)
    check(case, lowered)
    found = execute(replace(case, inputs=dict(case.inputs) | {"x": x}), lowered)
    touched = nn.functional.conv2d(torch.from_numpy(x).double(), torch.from_numpy(case.inputs["w"]).double(), None, 2, 2).isnan()
    assert torch.equal(found.isnan(), touched) and touched.any() and not touched.all()


@pytest.mark.parametrize(
    ("case", "target", "why"),
    [
        (convolution(channels=32), "x86-avx512", "no AVX512-BF16"),
        (convolution_case(channels=32), "epyc-9655", "A is no value stored in bfloat16"),
        (convolution(channels=3), "epyc-9655", "no even number"),
        (product(transpose_a=True), "epyc-9655", "not adjacent"),
    ],
)
def test_what_is_no_case_for_it(case: Case, target: str, why: str) -> None:
    with pytest.raises(Unsuitable, match=why):
        PAIRS.match(case.problem, machine(target))


def test_pairs_are_predicted_by_their_own_rate() -> None:
    """The same tiles take half of the steps: half of the time if a vector of pairs takes as long as one of float32, all of it if twice as long."""
    assert multiplying_pairs(ZEN5).fma_ports == 1.0 == multiplying_pairs(machine("xeon-sapphire-rapids")).fma_ports
    twice = replace(ZEN5, peak_flops={**ZEN5.peak_flops, "bf16": 2 * ZEN5.peak_flops["fp32"]})
    assert multiplying_pairs(twice).fma_ports == ZEN5.fma_ports
    case = convolution(channels=64, outputs=64, size=(28, 28))
    ranking = rank(case.problem, ZEN5, 2, learned=False)
    number = next(at for at, part in enumerate(ranking.parts) if part.schema is PAIRS)
    assert int(ranking.parts[number].counts.flops[0]) == 2 * 28 * 28 * 64 * 64 * 9
    facts = PAIRS.match(case.problem, ZEN5).facts
    assert (facts.r, facts.element_bytes, facts.b_bytes) == (9 * 32, 4, 2 * 9 * 64 * 64)


class Encoder(nn.Module):
    """A pooled convolution, and products whose results are normalised in the same tile."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(48, 64), nn.LayerNorm(64), nn.Linear(64, 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.second(torch.nn.functional.gelu(self.norm(self.first(x)))), -1)


MODELS = {"small": (Small, (2, 3, 33, 29)), "attention": (Attention, (2, 20, 64)), "encoder": (Encoder, (3, 7, 48))}


@pytest.mark.in_turns(2)
@here
@pytest.mark.parametrize("name", MODELS)
def test_a_bfloat16_module_as_on_a_cpu_without_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64 of the same rounded weights: errors are those of eager, of which each operator rounds its result too."""
    make, shape = MODELS[name]
    torch.manual_seed(5)
    module, x = make().eval().bfloat16(), torch.randn(*shape).bfloat16()
    native = machine("native")
    peaks = {name: peak for name, peak in native.peak_flops.items() if name != "bf16"}
    without = replace(native, isa=tuple(flag for flag in native.isa if not flag.startswith("amx")), peak_flops=peaks)
    monkeypatch.setattr(importlib.import_module("tilewright.compile"), "find_machine", lambda target: without)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        executable = tilewright.compile(module, x, winograd=False)
        assert any("pairs of bfloat16" in row.schedule for row in executable.plan.rows)
        poison(executable)
        found = executable(x)
        expected = copy.deepcopy(module).double()(x.double())
        eager = module(x)
    error, usual = ((each.double() - expected).abs().max() for each in (found, eager))
    assert found.dtype == torch.bfloat16 and error <= 1.5 * usual + 1e-3
    executable.close()
