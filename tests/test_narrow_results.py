"""Cheaper GELU and sigmoid where results are rounded to 16 bits: errors over all float16 numbers, where they are used, and their CUDA C++."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from tests.draws import draws
from tests.interpreted import run_program
from tests.on_device import cuda_binary, launch
from tests.test_gpu_half import H200, check, planned
from tests.test_half_modules import EACH_TYPE, TYPES, in_type
from tilewright.codegen.assemble import block
from tilewright.codegen.cuda import print_cuda
from tilewright.codegen.interpreter import run
from tilewright.graph.operators.pointwise import gelu, gelu_tanh, sigmoid
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.expr import Apply, Load, Var, unary, walk
from tilewright.ir.kernel import Buffer, Kernel, Launch, Store, block_variable, expressions, statements, thread_variable
from tilewright.ir.region import Program
from tilewright.ir.scalar import NARROW
from tilewright.partition.narrow_results import narrow

EVERY = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
ABSOLUTE = {"gelu": 1.3e-7, "gelu_tanh": 1e-36, "silu": 1e-36, "sigmoid": 1e-36}
"""Largest absolute errors before rounding, besides the relative ones: of 1/2 - F in float32, as of 1 + erf, and of e^-x beyond its range."""
RELATIVE = {"gelu": 4e-5, "gelu_tanh": 1e-6, "silu": 1e-6, "sigmoid": 1e-6}
X = Load("x", (Var("i", 8),), "f32")


class Applied(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.name.startswith("gelu"):
            return functional.gelu(x, approximate="tanh" if self.name == "gelu_tanh" else "none")
        result: torch.Tensor = getattr(functional, self.name)(x)
        return result


def narrow_functions_of(program: Program) -> set[str]:
    every = [e for lowered in program.regions for kernel in lowered.kernels for s in statements(kernel.body) for e in expressions(s)]
    return {node.operation for node in walk(*every) if isinstance(node, Apply)} & NARROW


@EACH_TYPE
@pytest.mark.parametrize("name", ABSOLUTE)
def test_all_float16_numbers(name: str, dtype: torch.dtype) -> None:
    """Within half a unit in the last place, besides the stated errors before rounding; special values are those of PyTorch."""
    module, x = Applied(name), EVERY.to(dtype)
    program = planned(module, (x,), H200)
    assert narrow_functions_of(program)
    given_x = x.view(torch.uint16).numpy() if dtype == torch.bfloat16 else x.numpy()
    results, faults = run_program(program, {program.graph.inputs[0]: given_x})
    assert not faults
    (found,) = (torch.from_numpy(result).view(dtype).double() for result in results.values())
    exact = module(x.double())
    if name.startswith("gelu"):  # the tail of float64's 1 + erf, 1 + tanh
        tail = exact.clone()
        exact = torch.where(x.double() < -1, x.double() * torch.special.ndtr(x.double()) if name == "gelu" else _tanh_tail(x.double()), tail)
    special = ~exact.isfinite() | ~x.isfinite()
    torch.testing.assert_close(found[special], module(x.double())[special], equal_nan=True, rtol=0, atol=0)
    found, exact = found[~special], exact[~special]
    unit = torch.finfo(dtype).eps * torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=torch.finfo(dtype).tiny))))
    allowed = unit / 2 + RELATIVE[name] * exact.abs() + ABSOLUTE[name]
    beyond = (found - exact).abs() - allowed
    worst = int(beyond.argmax())
    assert beyond[worst] <= 0, (x[~special][worst], found[worst], exact[worst], beyond[worst])


def _tanh_tail(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))


def test_rewritten_are_functions_of_float32_alone() -> None:
    assert narrow(gelu(X)) == unary("narrow_gelu", X)
    assert narrow(sigmoid(X)) == unary("narrow_sigmoid", X)
    assert {node.operation for node in walk(narrow(gelu_tanh(X))) if isinstance(node, Apply)} >= {"narrow_sigmoid"}
    double = Load("x", X.index, "f64")
    for kept in (
        gelu(double),
        sigmoid(double),
        X * 0.5 * (1.0 + unary("erf", X)),
        X * 0.5 * (1.0 + unary("tanh", X)),
        1.0 / (2.0 + unary("exp", -X)),
    ):
        assert narrow(kept) == kept


@pytest.mark.parametrize("target", [H200, machine("x86-avx512")], ids=lambda m: m.name)
def test_used_where_all_results_are_rounded(target: Machine) -> None:
    """On GPUs, in 16-bit modules and where a float32 module stores 16 bits; float32 results keep the exact function."""

    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = functional.gelu(x.float())
            return y.half(), y

    module, x = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)), torch.randn(4, 16)
    wanted = {"narrow_gelu"} if target.is_gpu else set()
    assert narrow_functions_of(planned(module.half(), (x.half(),), target)) == wanted
    assert not narrow_functions_of(planned(module.float(), (x,), target))
    assert not narrow_functions_of(planned(Two(), (x.half(),), target))


@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(TYPES), name=st.sampled_from(sorted(ABSOLUTE)))
@settings(max_examples=draws(6), deadline=None)
def test_random_products(seed: int, dtype: torch.dtype, name: str) -> None:
    random = Random(seed)
    torch.manual_seed(seed)
    rows, depth, columns = random.choice([1, 5, 33]), random.choice([8, 24, 40]), random.choice([7, 16, 48])
    module = nn.Sequential(nn.Linear(depth, columns), Applied(name)).to(dtype).eval()
    inputs = in_type((torch.randn(rows, depth) * random.choice([0.1, 1, 8]),), dtype)
    program = planned(module, inputs, H200)
    assert narrow_functions_of(program)
    check(module, inputs, program)


def every_function(count: int, lanes: int) -> Kernel:
    grid = Launch((count // (32 * lanes), 1, 1), (32, 1, 1))
    at = (block_variable(grid) * 32 + thread_variable(grid)) * lanes
    stores = [Store(name, at, unary(name, Load("x", (at,), "f32", lanes))) for name in sorted(NARROW)]
    outputs = [Buffer(name, "f32", count, writable=True) for name in sorted(NARROW)]
    return Kernel(f"functions_x{lanes}", (Buffer("x", "f32", count), *outputs), block(stores), grid)


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_75"])
def test_compile_without_warnings(architecture: str) -> None:
    passed, log = cuda_binary(print_cuda([every_function(256, lanes) for lanes in (1, 4)]), architecture)
    assert passed and "warning" not in log, log


@pytest.mark.gpu
def test_a_gpu_agrees_with_the_interpreter() -> None:
    x = EVERY.float().numpy()
    kernel = every_function(x.size, 4)
    ours, theirs = ([x, *(np.zeros_like(x) for _ in NARROW)] for _ in range(2))
    assert run(kernel, ours).is_clean
    launch(kernel, theirs)
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        np.testing.assert_allclose(one, other, rtol=4e-6, atol=2e-7)
