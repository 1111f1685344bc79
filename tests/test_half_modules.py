"""float16 and bfloat16 modules on CPUs: computed by kernels, in float32 inside, whatever instructions the target has."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves

import tilewright
from tests.compiled import poison
from tests.draws import draws
from tests.interpreted import run_program
from tests.random_graphs import NOISE, RandomCase, _magnitude, _spread, random_case
from tests.test_bf16_models import model_cases
from tilewright import NotCompiled, zoo
from tilewright.frontend.imported import unsupported
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import host_cpu, machine
from tilewright.hardware.machine import Machine
from tilewright.partition.plan import plan_program
from tilewright.tuning.peers import export_onnx

TYPES = [torch.bfloat16, torch.float16]
EACH_TYPE = pytest.mark.parametrize("dtype", TYPES, ids=["bf16", "f16"])
AVX2, AVX512 = machine("x86-avx2"), machine("x86-avx512")
TARGETS = [target for target in ("native", "x86-avx512", "x86-avx2") if target == "native" or set(machine(target).isa) <= set(host_cpu().isa)]


class Casts(nn.Module):
    """Explicit casts to both types, which round even where a kernel keeps everything."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rounded = (x * 3).half().float()
        return rounded + 1, (x - 1).bfloat16().float() * 2, (x * 3).half() == rounded.half(), (x * 7).half().bfloat16()


class Unusual(nn.Module):
    """Operators that select, count, move and compare 16-bit values."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        padded = nn.functional.pad(x, (1, 2), value=-1.5)
        return (
            x.argmax(-1), x.amax(0), torch.cat([x, padded], -1), x.flip(0), x > x.mean(), x.masked_fill(x < 0, float("-inf")), x.cumsum(-1),
            x.to(torch.int32), torch.where(x > 0, x, 2.0), (x * torch.arange(6)).clamp(-3, 3), x.new_full((2, 3), 0.1), x.std(-1), x[..., 1::2],
        )  # fmt: skip


class Decoding(nn.Module):
    """One query of each head."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


def other_cases() -> list[tuple[nn.Module, Sequence[torch.Tensor]]]:
    torch.manual_seed(0)
    embedding = nn.Sequential(nn.Embedding(20, 16), nn.GRU(16, 16, batch_first=True))
    return [
        (nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.ConvTranspose2d(16, 4, 2, 2)), (torch.randn(2, 3, 14, 15),)),
        (nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 10), nn.Softmax(-1)), (torch.randn(6, 24),)),
        (nn.Sequential(nn.Conv1d(8, 8, 3, padding=1, groups=8), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv1d(8, 12, 1)), (torch.randn(2, 8, 19),)),
        (embedding, (torch.randint(20, (2, 5)),)),
        (Unusual(), (torch.randn(5, 4, 6),)),
        (Decoding(), (torch.randn(2, 4, 1, 32), torch.randn(2, 4, 70, 32), torch.randn(2, 4, 70, 32))),
    ]  # fmt: skip


CASES = [*model_cases(), *other_cases()]


def in_type(inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)


def assert_as_good_as_eager(module: nn.Module, inputs: Sequence[torch.Tensor], found: object) -> None:
    """No more than twice the error of PyTorch in the same type against float64, or two units of rounding of the largest result; types as in PyTorch."""
    with torch.no_grad():
        exact = tree_leaves(copy.deepcopy(module).double()(*in_type(inputs, torch.float64)))
        eager = tree_leaves(module(*inputs))
    for ours, theirs, wanted in zip(tree_leaves(found), eager, exact, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        if not theirs.is_floating_point():
            assert torch.equal(ours, theirs)
            continue
        finite = theirs.isfinite()
        assert torch.equal(ours.isfinite(), finite)
        difference, scale = ((x.double() - wanted)[finite].abs().max() for x in (ours, theirs)), wanted[finite].abs().max()
        error, allowed = (float(d / scale) for d in difference)
        assert error <= max(2 * allowed, 2 * torch.finfo(theirs.dtype).eps), (error, allowed)


@pytest.mark.in_turns(5)
@EACH_TYPE
@pytest.mark.parametrize("number", range(len(CASES)))
def test_modules_are_as_good_as_pytorch(number: int, dtype: torch.dtype) -> None:
    module, inputs = copy.deepcopy(CASES[number][0]).to(dtype).eval(), in_type(CASES[number][1], dtype)
    for target in TARGETS:
        executable = tilewright.compile(module, inputs, target, threads=2)
        poison(executable)
        assert not [row for row in executable.plan.rows if row.kind == "torch"]
        assert_as_good_as_eager(module, inputs, executable(*inputs))
        if not any(row.kind == "loop" for row in executable.plan.rows):
            verified = executable.verify(*inputs)
            assert verified.first_wrong is None, str(verified)


@pytest.mark.slow
@EACH_TYPE
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "bert_base"])
def test_networks_are_as_good_as_pytorch(name: str, dtype: torch.dtype) -> None:
    module, inputs = zoo.build(name)
    module, inputs = module.to(dtype), in_type(inputs, dtype)
    torch._dynamo.reset()
    with torch.no_grad():
        for compiled in (tilewright.compile(module, inputs), torch.compile(module, backend="tilewright")):
            assert_as_good_as_eager(module, inputs, compiled(*inputs))


@pytest.mark.in_turns(2)
@EACH_TYPE
@pytest.mark.parametrize("target", TARGETS)
def test_weights_that_are_used_once_stay_16_bits(target: str, dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(96, 200), nn.ReLU(), nn.Linear(200, 37)).to(dtype).eval()
    for rows in (1, 3):
        inputs = (torch.randn(rows, 96).to(dtype),)
        executable = tilewright.compile(module, inputs, target)
        poison(executable)
        assert_as_good_as_eager(module, inputs, executable(*inputs))
        packed = {
            storage.value.dtype for storage in executable.image.program.storage.values() if storage.source is not None and "@" in storage.value.name
        }
        natively = any("amx" in row.schedule or "pairs of bfloat16" in row.schedule for row in executable.plan.rows)
        assert packed == ({"f32"} if rows > 1 and not natively else {"bf16" if dtype is torch.bfloat16 else "f16"})


def test_explicit_casts_round() -> None:
    x = torch.randn(333)
    found = tilewright.compile(Casts(), (x,))(x)
    for ours, theirs in zip(found, Casts()(x), strict=True):
        assert torch.equal(ours, theirs)


@EACH_TYPE
def test_operators_that_jump_round_their_numbers(dtype: torch.dtype) -> None:
    """Where a value is a number, or a multiple of one, rounded to the type. Remainders jump by the modulus there."""

    class Jumps(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            remainders = torch.remainder(x, 1.7), torch.remainder(1.7, x), torch.fmod(x, 1.7), torch.remainder(x, y), torch.fmod(x, y), x % -0.3
            return *remainders, x == 1.7, x != 1.7, x <= 1.7, x > 1.7, x >= 1.7, x < 1.7

    number = torch.tensor(1.7, dtype=dtype)
    x = torch.cat([number.repeat(3), -number.repeat(3), torch.arange(-40, 41) * number, 20 * torch.randn(900), -1e-4 * torch.rand(40)]).to(dtype)
    x[x == 0] = 1
    y = torch.where(torch.rand(len(x)) < 0.5, x / torch.randint(1, 9, (len(x),)), torch.rand(len(x)) * 3 + 0.1).to(dtype)
    module = Jumps()
    for got, wanted in zip(tilewright.compile(module, (x, y), "native")(x, y), module(x, y), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@EACH_TYPE
def test_autocast_keeps_its_types(dtype: torch.dtype) -> None:
    class Regions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.autocast("cpu", dtype=dtype):
                y = torch.softmax(self.norm(self.first(x)), -1)
                return self.last(y), y

    module, inputs = Regions().eval(), (torch.randn(6, 32),)
    executable = tilewright.compile(module, inputs)
    assert not [row for row in executable.plan.rows if row.kind == "torch"]
    assert_as_good_as_eager(module, inputs, executable(*inputs))
    torch._dynamo.reset()
    with torch.no_grad():
        assert_as_good_as_eager(module, inputs, torch.compile(module, backend="tilewright")(*inputs))


@EACH_TYPE
def test_casts_in_a_captured_autocast_region(dtype: torch.dtype) -> None:
    """What Dynamo found in the region has its types, also where the graph widens a value and reads it again."""

    class Widened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(32, 64), nn.LayerNorm(64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with torch.autocast("cpu", dtype=dtype):
                y = self.first(x)
                wide = y.float()
                with torch.autocast("cpu", enabled=False):
                    normed = self.norm(wide.to(self.norm.weight.dtype))  # in float64 too
                return y + 1, normed, (y * 2).to(x.dtype), torch.full_like(y, 3) * y

    module, inputs = Widened().eval(), (torch.randn(64, 32),)
    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", NotCompiled)
        found = torch.compile(module, backend="tilewright", options={"wait": True})(*inputs)
        assert [value.dtype for value in found] == [value.dtype for value in module(*inputs)]
        assert_as_good_as_eager(module, inputs, found)
    assert not torch.is_autocast_enabled("cpu")


class Scaled(nn.Module):
    """Parameters of its own and of modules; a normalisation, whose result autocast leaves in float32, before a product."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.first, self.norm, self.last = nn.Parameter(torch.rand(32)), nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.last(nn.functional.gelu(self.norm(self.first(x * self.scale))))
        return y, x + y


@pytest.mark.in_turns(1)
@EACH_TYPE
def test_autocast_around_a_model_keeps_its_types(dtype: torch.dtype) -> None:
    module, inputs = Scaled().eval(), (torch.randn(64, 32),)
    torch._dynamo.reset()
    captured = torch.compile(module, backend="tilewright")
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype), warnings.catch_warnings():
        warnings.simplefilter("error", NotCompiled)
        executable = tilewright.compile(module, inputs)
        sized = tilewright.compile(module, inputs, dynamic={"x": {0: "batch"}}, wait=True)
        for run in (executable, sized, captured):
            found, eager = run(*inputs), module(*inputs)
            assert [value.dtype for value in found] == [value.dtype for value in eager] == [dtype, torch.float32]
            assert_as_good_as_eager(module, inputs, found)
    assert not torch.is_autocast_enabled("cpu") and "forward" not in vars(module)
    assert executable(*inputs)[0].dtype == dtype  # the types are those of the compilation
    for batch in (1, 7):  # with a batch of 1 the module is exported once more
        x = torch.randn(batch, 32)
        with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
            assert_as_good_as_eager(module, (x,), sized(x))
        assert sized(x)[0].dtype == dtype
    with torch.no_grad():
        assert captured(*inputs)[0].dtype == torch.float32


def test_autocast_around_a_call_changes_nothing() -> None:
    class Convolution(nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.conv_tbc(torch.relu(x), w, b)

    inputs = torch.randn(5, 2, 8), torch.randn(3, 8, 4), torch.randn(4)
    with pytest.warns(NotCompiled, match="conv_tbc"):
        executable = tilewright.compile(Convolution(), inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = executable(*inputs)
    torch.testing.assert_close(found, Convolution()(*inputs))


def unaffected(case: RandomCase) -> bool:
    """Whether rounding to 16 bits changes no integer and no truth value of the case."""
    return all(value.is_float for value in case.values)


def check_random(seed: int, dtype: torch.dtype, target: str) -> None:
    """A random graph in the type: errors as allowed in float32, in proportion to the unit of rounding. The generator's bounds are for inputs and
    weights as they are, so both are rounded before the reference is computed."""
    case = random_case(seed)
    if not unaffected(case):
        return
    module, inputs = case.module.to(dtype), in_type(case.inputs, dtype)
    with torch.no_grad():
        exact = tree_leaves(copy.deepcopy(module).double()(*in_type(inputs, torch.float64)))
    executable = tilewright.compile(module, inputs, target)
    poison(executable)
    unit = torch.finfo(dtype).eps
    for ours, wanted, number in zip(tree_leaves(executable(*inputs)), exact, case.outputs, strict=True):
        value = case.values[number]
        assert ours.dtype == dtype and ours.shape == wanted.shape
        error, allowed = float((ours.double() - wanted).abs().max()), unit * (2 * _magnitude(wanted) + 4 * _spread(value) / NOISE) + 1e-3 * unit
        assert error <= allowed, f"{case}\n{error} > {allowed}"


@given(seed=st.integers(0, 2**31), dtype=st.sampled_from(TYPES), target=st.sampled_from(TARGETS))
@settings(max_examples=draws(12), deadline=None)
def test_random_graphs(seed: int, dtype: torch.dtype, target: str) -> None:
    check_random(seed, dtype, target)


@pytest.mark.in_turns
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("length", [1, 5, 70])
def test_scores_beyond_float16(length: int, target: str) -> None:
    """Of attention, whose softmax gets them in float32, in one kernel or several."""

    class Scores(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(q, k, v)

    torch.manual_seed(length)
    q, k, v = (torch.randn(2, 1, length, 34) for _ in range(3))
    inputs = (2000 * q).half(), (2000 * k).half(), v.half()
    with torch.no_grad():
        wanted = Scores()(*in_type(inputs, torch.float64))
    scores = inputs[0].double() @ inputs[1].double().transpose(-1, -2) / 34**0.5
    assert float(scores.abs().max()) > torch.finfo(torch.float16).max
    found = tilewright.compile(Scores(), inputs, target)(*inputs)
    assert float((found.double() - wanted).abs().max()) < 5e-3 * float(wanted.abs().max())


class Rows(nn.Module):
    """Functions, reductions and moves along rows of any length."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.norm, self.table = nn.LayerNorm(length), nn.Embedding(7, length)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        f = nn.functional
        return (
            f.gelu(x), x.tanh(), x.softmax(-1), x.softmax(0), x.log_softmax(-1), self.norm(x), x.amax(-1), x.mean(0),
            f.pad(x, (1, 2), value=0.1), self.table.weight[torch.arange(x.shape[0]) % 7], (x.half().float() + x).to(x.dtype),
        )  # fmt: skip


@given(rows=st.integers(1, 70), length=st.integers(2, 70), dtype=st.sampled_from(TYPES), target=st.sampled_from(TARGETS))
@settings(max_examples=draws(8), deadline=None)
@example(rows=9, length=1031, dtype=torch.float16, target="native")
@example(rows=1, length=1 << 14 | 5, dtype=torch.bfloat16, target="native")
def test_rows_of_any_length(rows: int, length: int, dtype: torch.dtype, target: str) -> None:
    torch.manual_seed(length)
    module, inputs = Rows(length).to(dtype).eval(), (torch.randn(rows, length).to(dtype),)
    executable = tilewright.compile(module, inputs, target, threads=2)
    poison(executable)
    assert_as_good_as_eager(module, inputs, executable(*inputs))


class Reductions(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        norm = nn.functional.layer_norm(x, x.shape[1:])
        return x.softmax(-1), x.log_softmax(-1), norm, x.amax(-1), x.amin(-1), x.sum(-1), (1 + x / 64).prod(-1), x.std(-1)


@given(
    rows=st.integers(1, 70), length=st.integers(2, 300), special=st.sampled_from([0.0, float("nan"), float("inf"), -float("inf")]), at=st.integers(0, 299),
    target=st.sampled_from(TARGETS),
)  # fmt: skip
@settings(max_examples=draws(5), deadline=None)
@example(rows=3, length=1031, special=float("nan"), at=1030, target="native")
@example(rows=2, length=64, special=float("nan"), at=17, target="native")
def test_rows_of_float32(rows: int, length: int, special: float, at: int, target: str) -> None:
    """In vectors like those of 16 bits; an element that is special reaches the results that it reaches in PyTorch."""
    torch.manual_seed(length)
    x = torch.randn(rows, length)
    x[-1, at % length] = special
    executable = tilewright.compile(Reductions(), (x,), target, threads=2)
    poison(executable)
    for found, wanted, eager in zip(executable(x), Reductions()(x.double()), Reductions()(x), strict=True):
        torch.testing.assert_close(found.isnan(), eager.isnan())
        torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-6, equal_nan=True)


@given(
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)), channels=st.integers(1, 20), stride=st.integers(1, 2), dtype=st.sampled_from([*TYPES, torch.float32]),
    target=st.sampled_from(TARGETS),
)  # fmt: skip
@settings(max_examples=draws(8), deadline=None)
def test_depthwise_convolutions_of_row_major_images(size: tuple[int, int], channels: int, stride: int, dtype: torch.dtype, target: str) -> None:
    torch.manual_seed(channels)
    module, inputs = nn.Conv2d(channels, channels, 3, stride, 1, groups=channels).to(dtype), (torch.randn(2, channels, *size).to(dtype),)
    executable = tilewright.compile(module, inputs, target, threads=2)
    poison(executable)
    assert_as_good_as_eager(module, inputs, executable(*inputs))


@pytest.mark.in_turns
@EACH_TYPE
@pytest.mark.parametrize("target", [AVX2, AVX512], ids=lambda m: m.name)
@pytest.mark.parametrize("shape", [(1, 4100), (3, 2101), (40, 19), (5, 130)])
def test_vectors_that_overlap_belong_to_one_thread(shape: tuple[int, int], target: Machine, dtype: torch.dtype) -> None:
    class Both(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return nn.functional.gelu(x.exp()), x.softmax(-1)

    module, inputs = Both(), (torch.randn(*shape).to(dtype),)
    graph, _ = simplify(import_module(module, inputs).graph)
    results, faults = run_program(plan_program(graph, target, 2), {name: array_of(x) for name, x in zip(graph.inputs, inputs, strict=True)})
    assert not faults
    found = [torch.from_numpy(results[name].copy()) for name in graph.outputs]
    assert_as_good_as_eager(module, inputs, [x.view(dtype) if x.dtype == torch.uint16 else x for x in found])


def array_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


@pytest.mark.in_turns
@EACH_TYPE
@pytest.mark.parametrize("target", [AVX2, AVX512, machine("xeon-sapphire-rapids"), machine("neoverse-n1")], ids=lambda m: m.name)
@pytest.mark.parametrize("number", [3, 6])
def test_the_interpreter_runs_the_same_kernels(number: int, target: Machine, dtype: torch.dtype) -> None:
    module, inputs = copy.deepcopy(CASES[number][0]).to(dtype).eval(), in_type(CASES[number][1], dtype)
    graph, _ = simplify(import_module(module, inputs).graph)
    assert not unsupported(graph)
    results, faults = run_program(plan_program(graph, target, 1), {name: array_of(x) for name, x in zip(graph.inputs, inputs, strict=True)})
    assert not faults
    found = [torch.from_numpy(results[name].copy()) for name in graph.outputs]
    assert_as_good_as_eager(module, inputs, [x.view(dtype) if x.dtype == torch.uint16 else x for x in found])


@pytest.mark.in_turns(1)
@EACH_TYPE
@pytest.mark.parametrize("number", [0, 5])
def test_artifacts_keep_the_types(number: int, dtype: torch.dtype, tmp_path: Path) -> None:
    module, inputs = copy.deepcopy(CASES[number][0]).to(dtype).eval(), in_type(CASES[number][1], dtype)
    executable = tilewright.compile(module, inputs)
    executable.save(tmp_path / "model.zip")
    assert torch.equal(tilewright.load(tmp_path / "model.zip")(*inputs), executable(*inputs))


@pytest.mark.in_turns(1)
@EACH_TYPE
@pytest.mark.parametrize("number", [0, 1, 6])
def test_onnx_files(number: int, dtype: torch.dtype, tmp_path: Path) -> None:
    module, inputs = copy.deepcopy(CASES[number][0]).to(dtype).eval(), in_type(CASES[number][1], dtype)
    executable = tilewright.compile(export_onnx(module, inputs, str(tmp_path)))
    assert not [row for row in executable.plan.rows if row.kind == "torch"]
    assert_as_good_as_eager(module, inputs, executable(*inputs))


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d(5), nn.BatchNorm2d(5, affine=False), nn.InstanceNorm2d(5, track_running_stats=True)])
def test_norms_in_training_mode(norm: nn.Module, dtype: torch.dtype) -> None:
    """Results and running statistics, which change at each call, are those of float64 with an error of the type's rounding."""
    ours = nn.Sequential(nn.Conv2d(3, 5, 3), copy.deepcopy(norm)).to(dtype).train()
    theirs = copy.deepcopy(ours).double()
    tolerance = 8 * torch.finfo(dtype).eps
    with tilewright.compile(ours, (torch.randn(2, 3, 8, 8).to(dtype),), target="native", threads=1) as executable:
        for _ in range(2):
            x = torch.randn(2, 3, 8, 8).to(dtype)
            torch.testing.assert_close(executable(x).double(), theirs(x.double()), rtol=tolerance, atol=2 * tolerance)
            for found, wanted in zip(ours.buffers(), theirs.buffers(), strict=True):
                torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)
