"""precision= on GPUs: float32 modules in TF32, float16 and bfloat16, interpreted, against PyTorch in float64; inputs and results stay float32."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import tilewright
from tests.interpreted import returned, run_program
from tests.test_bf16_models import model_cases
from tests.test_gpu_tensor_cores import Block, with_schedule
from tilewright.errors import UnsupportedOption
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.ir.kernel import Invoke, statements
from tilewright.ir.region import Program
from tilewright.kernels.gpu.tensor_cores.space import TensorCoreSchedule
from tilewright.kernels.schema import USUAL
from tilewright.partition.plan import plan_program
from tilewright.partition.precision import precision_of
from tilewright.selection.choice import choose

H200 = machine("h200")
ERRORS = {"fp32-tensor": 2.0**-19, "fp32-tensor-fp16": 2.0**-19, "tf32": 2.0**-9, "fp16": 2.0**-8, "bf16": 2.0**-5}
"""Largest errors of these small networks against float64, relative to the largest result: a few units of rounding."""
EACH_PRECISION = pytest.mark.parametrize("precision", ERRORS)


def planned(module: nn.Module, inputs: Sequence[torch.Tensor], precision: str, chains: bool | None = None) -> Program:
    graph, _ = simplify(import_module(module, inputs).graph)
    numerics = USUAL.at(precision)
    return plan_program(graph, H200, 1, partial(choose, numerics=numerics), precision, numerics, chains=chains)


def computed(module: nn.Module, inputs: Sequence[torch.Tensor], program: Program) -> list[torch.Tensor]:
    imported = import_module(module, inputs)
    results, faults = run_program(program, {name: x.numpy() for name, x in zip(program.graph.inputs, inputs, strict=True)})
    assert not faults
    return tree_leaves(returned(imported, [results[name] for name in program.graph.outputs], inputs))


def products_of(program: Program) -> set[str]:
    """The types of factors that tensor cores multiply."""
    invoked = (s for lowered in program.regions for kernel in lowered.kernels for s in statements(kernel.body) if isinstance(s, Invoke))
    return {key.split(".")[-1] for key in (one.intrinsic.key for one in invoked) if key.startswith(("mma.", "wgmma.m64"))}


class Shared(nn.Module):
    """A weight that an embedding reads too, products of two inputs and of an input with itself, and a sum that stays float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        words = self.embedding(torch.arange(20))
        return nn.functional.linear(words, self.embedding.weight), x @ y, x @ x.mT, x.sum(-1)


class Large(nn.Module):
    """Its middle is 40 * 64 * 64 = 163,840."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.avg_pool2d(nn.functional.max_pool2d((x * 40) * x, 2), 2) * 1e-4


CASES = [*model_cases()[:2], (Shared().eval(), (torch.randn(9, 24), torch.randn(24, 16)))]


@pytest.mark.in_turns(2)
@EACH_PRECISION
@pytest.mark.parametrize("number", range(len(CASES)))
def test_networks_are_accurate(number: int, precision: str) -> None:
    module, inputs = CASES[number]
    found = computed(module, inputs, planned(module, inputs, precision))
    with torch.no_grad():
        exact = tree_leaves(copy.deepcopy(module).double()(*(x.double() for x in inputs)))
    for ours, wanted in zip(found, exact, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - wanted).abs().max() <= ERRORS[precision] * wanted.abs().max()


def layers() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Two layers that are faster on tensor cores, between which a value is stored, and a normalisation."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.LayerNorm(256)).eval()
    return module, (torch.randn(512, 256),)


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
def test_a_residual_that_is_a_view_of_a_concatenation(precision: str) -> None:
    """Convolution, activation and residual in one kernel on tensor cores, where the residual is a slice of the convolution's concatenated input."""
    torch.manual_seed(0)
    module, inputs = Block(16).eval(), (torch.randn(1, 16, 6, 7),)
    used: list[TensorCoreSchedule] = []
    numerics = USUAL.at(precision)
    chooser = with_schedule(TensorCoreSchedule(32, 16, 32, 2, 1, 2), used, numerics)
    graph, _ = simplify(import_module(module, inputs).graph)
    everywhere = replace(precision_of(precision, graph, H200), by_region=False)
    program = plan_program(graph, H200, 1, chooser, everywhere, numerics)
    assert len(used) == 3 and program.aliases
    (found,) = computed(module, inputs, program)
    with torch.no_grad():
        exact = copy.deepcopy(module).double()(inputs[0].double())
    assert (found - exact).abs().max() <= ERRORS[precision] * exact.abs().max()


@pytest.mark.parametrize(
    "precision, multiplied, stored",
    [("fp32-tensor", "tf32", "f32"), ("tf32", "tf32", "f32"), ("fp16", "f16", "f16"), ("bf16", "bf16", "bf16"), ("fp32", "", "f32")],
)
def test_types_of_products_and_values(precision: str, multiplied: str, stored: str) -> None:
    program = planned(*layers(), precision)
    # regions for which 16 bits do not pay may have float32 factors, rounded to TF32
    kept = {"tf32"} if stored != "f32" else set()
    assert products_of(program) - kept == ({multiplied} if multiplied else set())
    outside = {*program.graph.inputs, *program.graph.outputs}
    assert all(program.storage[name].value.dtype == "f32" for name in outside)
    middle = {storage.value.dtype for name, storage in program.storage.items() if name not in outside and storage.source is None}
    assert stored in middle and middle <= {"f32", stored}
    weights = {s.value.dtype for lowered in program.regions for s in lowered.storage.values() if s.source is not None}
    assert stored in weights and weights <= ({"f32", stored} if kept else {stored})
    # what products do not multiply keeps its type
    assert {program.storage[name].value.dtype for name in program.graph.constants if "bias" in name} == {"f32"}


def test_float16_overflows_where_a_stored_value_does() -> None:
    x = torch.full((1, 2, 8, 8), 64.0)
    for precision, finite in (("fp16", False), ("bf16", True), ("tf32", True)):
        (found,) = computed(Large(), (x,), planned(Large(), (x,), precision))
        assert bool(found.isfinite().all()) == finite, precision


def test_machines_without_them() -> None:
    module, x = nn.Linear(8, 8), torch.zeros(4, 8)
    with pytest.raises(UnsupportedOption, match=r"needs the tensor cores of sm_80.*v100.*fp32"):
        tilewright.compile(module, x, "v100", precision="tf32")
    for precision in ("fp32-tensor", "fp32-tensor-fp16", "tf32", "fp16"):
        with pytest.raises(UnsupportedOption, match="is for GPUs, and x86-avx2 is a CPU"):
            tilewright.compile(module, x, "x86-avx2", precision=precision)
    assert tilewright.compile(module, x, "rtx2080", precision="fp16").plan.rows


@pytest.mark.in_turns(2)
@EACH_PRECISION
def test_executables(precision: str) -> None:
    module, inputs = layers()
    executable = tilewright.compile(module, inputs, "a100", precision=precision, unsupported="error")
    assert any("tensor cores" in row.schedule for row in executable.plan.rows)
