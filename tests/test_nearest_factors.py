"""Values that products may read as TF32: which stores round them, what the operation computes, and how much smaller results are without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.interpreted import run_program
from tests.on_device import cuda_binary, launch
from tests.test_gpu_precision import ERRORS, computed
from tests.test_gpu_warpgroup import with_schedule
from tilewright.codegen.assemble import block
from tilewright.codegen.c import print_c
from tilewright.codegen.cuda import print_cuda
from tilewright.codegen.interpreter import run
from tilewright.codegen.intrinsics.mma import rounds_to_tf32
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.ir.dtypes import nearest_tf32
from tilewright.ir.expr import Apply, Const, Load, unary, walk
from tilewright.ir.kernel import Buffer, Kernel, Launch, Store, block_variable, expressions, thread_variable
from tilewright.ir.region import Program
from tilewright.ir.scalar import NEAREST_TF32, OPERATIONS
from tilewright.kernels.schema import USUAL
from tilewright.partition import predictions
from tilewright.partition.context import Chooser
from tilewright.partition.layouts import STORED, Storing, assign_layouts
from tilewright.partition.nearest_factors import with_nearest_factors
from tilewright.partition.plan import plan_program
from tilewright.partition.regions import regions_of
from tilewright.selection.choice import choosing

TF32 = USUAL.at("tf32")


def planned(
    module: nn.Module, inputs: Sequence[torch.Tensor], target: str = "h200", precision: str = "tf32", chooser: Chooser | None = None, **options: Any
) -> Program:
    graph, _ = simplify(import_module(module.eval(), inputs).graph)
    numerics = USUAL.at(precision)
    return plan_program(graph, machine(target), 1, chooser or choosing(numerics), precision, numerics, **options)


def rounds(kernel: Kernel) -> bool:
    return any(isinstance(node, Apply) and node.operation == NEAREST_TF32 for node in walk(*expressions(kernel.body)))


def rounding(program: Program) -> list[str]:
    """The results that kernels round, in order."""
    return [lowered.region.outputs[0] for lowered in program.regions if any(map(rounds, lowered.kernels))]


# --- the operation ----------------------------------------------------------------------------------------------------


def bits() -> np.ndarray:
    """Float32 numbers of every exponent, ties, and special values."""
    words = np.random.default_rng(0).integers(0, 2**32, 4096, np.uint32)
    words[:1024] = words[:1024] & 0xFFFFE000 | 0x1000  # ties
    words[1024:1032] = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7F7FFFFF, 1]
    return words.view(np.float32)


def kernel_of(count: int, lanes: int) -> Kernel:
    grid = Launch((count // (32 * lanes), 1, 1), (32, 1, 1))
    at = (block_variable(grid) * 32 + thread_variable(grid)) * lanes
    store = Store("out", at, unary(NEAREST_TF32, Load("x", (at,), "f32", lanes)))
    return Kernel(f"nearest_x{lanes}", (Buffer("x", "f32", count), Buffer("out", "f32", count, writable=True)), block([store]), grid)


def test_the_reference_is_exact_in_float64() -> None:
    reference = OPERATIONS[NEAREST_TF32].reference
    x = bits()
    assert np.array_equal(reference(x), nearest_tf32(x), equal_nan=True)
    wide = np.random.default_rng(0).standard_normal(64)
    assert np.array_equal(reference(wide), wide)
    with pytest.raises(ValueError, match="nearest_tf32 of i32"):
        unary(NEAREST_TF32, Const(1, "i32"))


@pytest.mark.parametrize("lanes", [1, 4])
def test_the_interpreter_rounds_as_the_reference(lanes: int) -> None:
    x, found = bits(), np.zeros(4096, np.float32)
    assert run(kernel_of(x.size, lanes), [x, found]).is_clean
    wanted = nearest_tf32(x)
    special = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found), special)
    np.testing.assert_array_equal(found[~special].view(np.uint32), wanted[~special].view(np.uint32))


def test_printed() -> None:
    cuda = print_cuda([kernel_of(256, 4)])
    assert 'asm("cvt.rna.tf32.f32 %0, %1;"' in cuda and cuda.count("tw_nearest_tf32_f32(") == 5  # its definition, and each lane
    first = Const(0, "i64")
    buffers = (Buffer("x", "f32", 1), Buffer("out", "f32", 1, writable=True))
    kernel = Kernel("one", buffers, Store("out", first, unary(NEAREST_TF32, Load("x", (first,), "f32"))))
    assert "tw_nearest_tf32_f32(x" in print_c([kernel])
    assert rounds_to_tf32(kernel_of(256, 1))


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_75"])
def test_compiles_without_warnings(architecture: str) -> None:
    passed, log = cuda_binary(print_cuda([kernel_of(256, lanes) for lanes in (1, 4)]), architecture)
    assert passed and "warning" not in log, log


@pytest.mark.gpu
def test_a_gpu_agrees_with_the_reference() -> None:
    x, found = bits(), np.zeros(4096, np.float32)
    launch(kernel_of(x.size, 4), [x, found])
    finite = np.isfinite(nearest_tf32(x))
    np.testing.assert_array_equal(found[finite], nearest_tf32(x)[finite])


# --- which stores round -----------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Convolutions with a residual connection, whose sum a depthwise convolution reads; a product reads what that stores."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(32, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
        self.depthwise, self.last = nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.Conv2d(64, 48, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        last: torch.Tensor = self.last(self.depthwise(self.second(y) + y))
        return last


IMAGE = torch.randn(1, 32, 12, 10, generator=torch.Generator().manual_seed(0))


def test_stores_of_factors_round() -> None:
    """The copy of the input and both factors of convolutions, but not what the depthwise convolution reads, nor the result."""
    program = planned(Residual(), (IMAGE,))
    stored = {lowered.region.outputs[0]: lowered.region for lowered in program.regions}
    assert rounding(program) == [name for name in stored if name.endswith(".padded") or name == "relu" or stored[name].kind == "window"]
    assert len(rounding(program)) == 3 and "add" in stored and program.graph.outputs[0] in stored
    said = [region.outputs[0] for region in stored.values() if any("nearest TF32" in reason for reason in region.reasons)]
    assert said == rounding(program)
    assert all(rounds_to_tf32(kernel) for lowered in program.regions if lowered.region.outputs[0] == "relu" for kernel in lowered.kernels)


def test_folded_images_round() -> None:
    """Their pixels overlap, so that no index is that of a channel alone."""
    program = planned(nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU()), (torch.randn(1, 3, 224, 224),))
    assert [lowered.region.kind for lowered in program.regions] == ["map", "contraction"]
    assert rounding(program) == [program.regions[0].region.outputs[0]]


@pytest.mark.parametrize("multiplier", [1, 2])
def test_factors_of_depthwise_convolutions_are_exact(multiplier: int) -> None:
    module = nn.Sequential(nn.Conv2d(32, 64, 1), nn.ReLU(), nn.Conv2d(64, 64 * multiplier, 3, groups=64))
    program = planned(module, (IMAGE,))
    assert "relu" in {lowered.region.outputs[0] for lowered in program.regions} - {*rounding(program)}


@pytest.mark.parametrize("target, precision", [("h200", "fp32"), ("h200", "fp32-tensor"), ("a100", "tf32"), ("b200", "tf32")])
def test_nothing_rounds_without_wgmma_or_permission(target: str, precision: str) -> None:
    assert not rounding(planned(Residual(), (IMAGE,), target, precision))


def test_results_of_the_model_are_exact() -> None:
    """Also where products read them, or are parts of the memory of a result."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(128, 64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = torch.cat((torch.relu(self.first(x)), torch.sigmoid(self.second(x))), 1)
            return y, self.last(y)

    program = planned(Two(), (torch.randn(256, 64),))
    assert not rounding(program)


def test_what_results_are_copied_from_is_exact() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(32, 64, 1), nn.Conv2d(64, 64, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.first(x)
            return y, self.last(y)

    graph, _ = simplify(import_module(Two().eval(), (IMAGE,)).graph)
    result = graph.outputs[0]
    apart = assign_layouts(graph, regions_of(graph), storing=Storing(apart=frozenset({result})))
    assert result + STORED in {name for region in apart.regions for name in region.outputs}
    assert with_nearest_factors(graph, apart).regions == apart.regions


def test_values_of_16_bits_are_not_rounded_again() -> None:
    program = planned(Residual(), (IMAGE,), precision="fp16")
    assert all(program.storage[name].value.dtype == "f32" for name in rounding(program))
    assert any(storage.value.dtype == "f16" for storage in program.storage.values())


class Dense(nn.Module):
    """A concatenation in place that a product reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1), nn.Conv2d(96, 32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        last: torch.Tensor = self.last(torch.cat((y, torch.sigmoid(self.second(y))), 1))
        return last


def test_parts_of_a_concatenation_round() -> None:
    torch.manual_seed(0)
    module = Dense().eval()
    program = planned(module, (IMAGE,))
    assert len(program.aliases) == 2 and {*program.aliases} <= {*rounding(program)}
    check(module, program)


class Steps(nn.Module):
    """Regions of other forms that store factors: of products without a map, of groups, of poolings, rows and attention."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.conv, self.grouped = nn.Conv2d(32, 64, 3, bias=False), nn.Conv2d(32, 64, 3, groups=2, bias=False)
        self.last, self.linear, self.norm = nn.Conv2d(64, 32, 1), nn.Linear(64, 48), nn.LayerNorm(64)
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.form in ("conv", "grouped", "pooled", "average"):
            y = (self.grouped if self.form == "grouped" else self.conv)(x)
            y = functional.max_pool2d(torch.relu(y), 2) if self.form == "pooled" else functional.avg_pool2d(y, 3, 1) if self.form == "average" else y
            result: torch.Tensor = self.last(y)
            return result
        rows = x.flatten(1)[:, :64].expand(16, 64) + x.flatten(1)[0, :16, None]
        if self.form == "norm":
            return self.linear(self.norm(rows))
        q, k, v = self.qkv(rows).reshape(1, 16, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return self.linear(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(16, 64))


@pytest.mark.parametrize("form", ["conv", "grouped", "pooled", "average", "norm", "attention"])
def test_regions_of_every_form_round(form: str) -> None:
    torch.manual_seed(0)
    module = Steps(form).eval()
    program = planned(module, (IMAGE,))
    last = program.graph.outputs[0]
    factors = {name for lowered in program.regions if last in lowered.region.outputs for name in lowered.region.inputs}
    assert factors & {*rounding(program)} and last not in rounding(program)
    check(module, program)


def check(module: nn.Module, program: Program) -> None:
    (found,) = computed(module, (IMAGE,), program)
    with torch.no_grad():
        exact = module.double()(IMAGE.double())
    module.float()
    assert (found - exact).abs().max() <= ERRORS["tf32"] * exact.abs().max()


def test_maxima_of_rounded_values_are_not_rounded_again() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Conv2d(32, 64, 1), nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return self.second(y) + self.third(functional.max_pool2d(y, 3, 1, 1))

    program = planned(Pooled(), (IMAGE,))
    kinds = {lowered.region.outputs[0]: lowered.region.kind for lowered in program.regions}
    assert "window" in kinds.values() and "contraction" in {kinds[name] for name in rounding(program)}
    assert "window" not in {kinds[name] for name in rounding(program)}


def test_chains_round() -> None:
    """Regions of a chain round what they pass each other as what they store."""
    torch.manual_seed(0)
    module = Residual().eval()
    program = planned(module, (IMAGE,), chains=True)
    assert rounding(program)
    check(module, program)


# --- what is gained ---------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Convolutions without biases, so that factors which are too small make results too small in proportion."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def bias(module: nn.Module, x: torch.Tensor) -> float:
    """The relative error of the results of products by warpgroups in their own direction: sum of (y - exact) exact, of the sum of exact exact."""
    used: list[Any] = []
    program = planned(module, (x,), chooser=with_schedule(lambda count: 0, used, TF32))
    assert len(used) == 2
    results, faults = run_program(program, {program.graph.inputs[0]: x.numpy()})
    assert not faults
    with torch.no_grad():
        exact = module.double()(x.double()).numpy().ravel()
    module.float()
    return float(((results[program.graph.outputs[0]].ravel() - exact) * exact).sum() / (exact * exact).sum())


def test_results_are_no_longer_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = Layers().eval()
    assert abs(bias(module, IMAGE)) < 5e-5
    monkeypatch.setattr(predictions, "with_nearest_factors", lambda graph, laid_out: laid_out)
    assert bias(module, IMAGE) < -4e-4  # of two layers that cut one factor off
