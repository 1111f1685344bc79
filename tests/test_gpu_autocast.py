"""Autocast regions of a GPU, torch.autocast("cuda"): for GPU targets they have the types that they have there, whatever machine compiles."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tilewright
from tests.test_gpu_half import check, planned
from tests.test_half_modules import EACH_TYPE
from tilewright.frontend.gpu_autocast import FLOAT32, LOWERED, WIDEST
from tilewright.frontend.symbolic import SymbolicProgram
from tilewright.frontend.torch_export import exported, functional
from tilewright.frontend.torch_import import import_module
from tilewright.hardware import machine
from tilewright.ir.graph import Graph


@contextmanager
def a_gpu() -> Iterator[None]:
    """PyTorch as on a machine with a GPU, as far as autocast asks."""
    with patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False), patch("torch.cuda.is_bf16_supported", lambda: True):
        yield


class Operators(nn.Module):
    """Operators of every list and of none, in regions within regions."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.linear, self.norm, self.groups, self.batches = nn.Linear(8, 8), nn.LayerNorm(8), nn.GroupNorm(2, 4), nn.BatchNorm2d(4)
        self.convolution, self.same = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3, padding="same")

    def forward(self, x: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cuda", self.dtype):
            y, convolved = self.linear(x), self.convolution(image)
            product = y @ y.transpose(0, 1)
            with torch.autocast("cuda", enabled=False):
                apart = self.linear(x), F.softmax(y, -1)
                with torch.autocast("cuda", torch.bfloat16):
                    within = self.linear(x)
            lowered: tuple[torch.Tensor, ...] = (product, convolved, self.same(image), self.linear(x.double()))
            raised: tuple[torch.Tensor, ...] = (
                F.softmax(y, -1),
                self.norm(y),
                self.groups(convolved),
                y.exp(),
                y**2,
                y.sum(-1),
                y.cumsum(0),
                F.mse_loss(y, y),
                y.norm(),
            )
            raised = *raised, F.interpolate(convolved, scale_factor=2.0), F.interpolate(convolved, scale_factor=2.0, mode="bilinear")
            raised = *raised, F.cross_entropy(y, y.argmax(-1)), y.square(), torch.linalg.norm(y)
            typed = F.softmax(y, -1, dtype=torch.float64), y.sum(dtype=self.dtype)
            lowered = *lowered, torch.linalg.matmul(x, x.mT)
            raised = *raised, torch.special.expm1(y), torch.special.softmax(y, -1), torch.arccos(y), F.pairwise_distance(y, y + 1)
            cast = self.linear(x).float(), (y + 1).to(x.dtype), y.double(), y.long(), F.softmax((y + 2).float(), -1).half()
            widest = torch.inner(x, y), torch.addcmul(y, y, y), torch.addcmul(x, y, y), torch.atan2(y, x), torch.cat([x, y]), y + x
            same = F.relu(y), F.gelu(y), y.mean(-1), self.batches(convolved), F.max_pool2d(convolved, 2), F.avg_pool2d(convolved, 2), y.sigmoid()
        return *apart, within, *lowered, *raised, *typed, *cast, *widest, *same, x.long().sum(), self.linear(x), y.half(), y.float()


NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64", torch.int64: "i64"}
INPUTS = torch.randn(6, 8), torch.randn(2, 3, 8, 8)


def types_on_a_gpu(module: nn.Module, inputs: Sequence[torch.Tensor]) -> list[torch.dtype]:
    """PyTorch's own, of tensors without memory."""
    held = module.state_dict()
    with torch.no_grad(), a_gpu(), FakeTensorMode(), torch.device("cuda"):
        state = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in held.items()}
        return [value.dtype for value in torch.func.functional_call(module, state, tuple(torch.empty(x.shape) for x in inputs))]


def types_of(graph: Graph, results: int) -> list[str]:
    """Of a model's results, without the states that follow them."""
    return [graph.values[name].dtype for name in graph.outputs[:results]]


def test_lists_have_all_operators_that_pytorch_casts() -> None:
    """Except one that it refuses, and cuDNN's, which stands for the layers that call it."""
    cast = {name for name in torch._C._dispatch_get_all_op_names() if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")}
    names = {name.removeprefix("aten::") for name in cast if name.startswith("aten::")}
    assert names - {"binary_cross_entropy", "_cudnn_rnn"} <= LOWERED | FLOAT32 | WIDEST


@EACH_TYPE
def test_types_are_those_of_a_gpu(dtype: torch.dtype) -> None:
    """In a program that was exported where there is a GPU, and in a module that is exported here."""
    module = Operators(dtype).eval()
    expected = types_on_a_gpu(module, INPUTS)
    assert {torch.float32, dtype, torch.bfloat16} <= set(expected)
    with a_gpu():
        program = torch.export.export(module, INPUTS)
    (outputs,) = [node.args[0] for node in functional(program, on_gpu=True).graph.nodes if node.op == "output"]
    assert [output.meta["val"].dtype for output in outputs] == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        imported = import_module(module, INPUTS, on_gpu=True)
    assert [imported.graph.values[name].dtype for name in imported.graph.outputs] == [NAMES[dtype] for dtype in expected]


@EACH_TYPE
@pytest.mark.parametrize("layer", ["LSTM", "GRU", "RNN", "attention"])
def test_what_libraries_compute_has_the_type_of_the_region(layer: str, dtype: torch.dtype) -> None:
    """PyTorch chooses a library only where there is a GPU."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = None if layer == "attention" else getattr(nn, layer)(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", dtype):
                result: torch.Tensor = F.scaled_dot_product_attention(x[None], x[None], x[None]) if self.recurrent is None else self.recurrent(x)[0]
                return result

    graph = import_module(Layer(), INPUTS[:1], on_gpu=True).graph
    assert [graph.values[name].dtype for name in graph.outputs] == [NAMES[dtype]]


class Asking(nn.Module):
    """Python code that asks for types, within regions and after them, and a state."""

    seen: torch.Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cuda", self.dtype):
            y = self.first(x)
            wide = y.float()
            after = y * 2, wide + 1
            made = torch.zeros(x.shape[0], dtype=y.dtype), torch.full_like(y, 2), y.new_ones(3), torch.arange(4, dtype=y.dtype)
            branch = y + 1 if y.dtype == self.dtype else y.double()
            back = (y + 1).to(x.dtype), self.norm(y).type_as(y), x.to(y), y.to(self.norm(y).dtype)
            promoted = torch.promote_types(y.dtype, torch.bfloat16)
            with torch.autocast("cuda", enabled=False):
                apart = self.last(wide), self.last(y.to(self.last.weight.dtype)), y * 1
                with torch.autocast("cuda", torch.bfloat16):
                    within = self.last(y)
                    within = within + torch.ones_like(within)
            asked = x.to(torch.float64 if torch.is_autocast_enabled("cuda") else torch.float32)
        self.seen.add_(y.to(self.seen.dtype).mean(0))
        outside = torch.cat([y, torch.ones(1, 8, dtype=y.dtype)]), y.to(promoted) * 3
        return *after, *made, branch, *back, *apart, within, asked, *outside


ASKED = (torch.randn(6, 8),)


@EACH_TYPE
def test_python_code_sees_the_types_of_a_gpu(dtype: torch.dtype) -> None:
    module = Asking(dtype).eval()
    expected = [NAMES[asked] for asked in types_on_a_gpu(module, ASKED)]
    assert not module.seen.any()
    assert types_of(import_module(module, ASKED, on_gpu=True).graph, len(expected)) == expected


@EACH_TYPE
def test_python_code_sees_the_types_of_a_region_around_it(dtype: torch.dtype) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.first(x)
            return y.float(), y + 1, torch.zeros(2, dtype=y.dtype)

    with a_gpu(), torch.autocast("cuda", dtype):
        graph = import_module(Plain(), ASKED, on_gpu=True).graph
    assert types_of(graph, 3) == ["f32", NAMES[dtype], NAMES[dtype]]


@EACH_TYPE
def test_free_sizes(dtype: torch.dtype) -> None:
    module = Asking(dtype).eval()
    expected = [NAMES[asked] for asked in types_on_a_gpu(module, ASKED)]
    program = SymbolicProgram(exported(module, ASKED, free={0: {0: torch.export.Dim.DYNAMIC}}, on_gpu=True), on_gpu=True)
    for rows in (6, 9):
        graph = program.bind(program.key((torch.randn(rows, 8),))).graph
        assert types_of(graph, len(expected)) == expected
        assert graph.values[graph.outputs[0]].shape == (rows, 8)


@EACH_TYPE
def test_other_threads_trace_as_before(dtype: torch.dtype) -> None:
    """PyTorch's tracer, which is one for all threads, casts on the one that exports alone."""
    found: list[torch.dtype] = []

    def trace() -> None:
        with a_gpu(), torch.autocast("cuda", dtype):
            traced = make_fx(torch.mm, tracing_mode="fake", pre_dispatch=True)(torch.randn(2, 2), torch.randn(2, 2))
        found.extend(node.meta["val"].dtype for node in traced.graph.nodes if node.target is torch.ops.aten.mm.default)

    class Tracing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = Thread(target=trace)
            thread.start()
            thread.join()
            return x + 1

    import_module(Tracing(), ASKED, on_gpu=True)
    assert found == [torch.float32]


class Regions(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.first, self.norm, self.last = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cuda", self.dtype):
            y = F.softmax(self.norm(self.first(x)), -1)
            return self.last(y), y


class Casts(Regions):
    """The same with the casts in the model; of float64 there are none."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        to = self.dtype if x.dtype == torch.float32 else x.dtype
        first, last = ((layer.weight.to(to), layer.bias.to(to)) for layer in (self.first, self.last))
        y = F.softmax(self.norm(F.linear(x.to(to), *first).to(x.dtype)), -1)
        return F.linear(y.to(to), *last), y


class Choosing(Regions):
    """Computes with a number chosen by a type, and widens a value of which it reads more afterwards."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cuda", self.dtype):
            y = self.first(x)
            wide = y.float()
            factor = torch.full((64,), 3.0 if y.dtype == self.dtype else 5.0, dtype=y.dtype)
            return self.last(y * factor), self.norm(wide)


class Chosen(Regions):
    """The same with the casts in the model; of float64 there are none."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        to = self.dtype if x.dtype == torch.float32 else x.dtype
        first, last = ((layer.weight.to(to), layer.bias.to(to)) for layer in (self.first, self.last))
        y = F.linear(x.to(to), *first)
        return F.linear(y * 3, *last), self.norm(y.to(x.dtype))


@EACH_TYPE
def test_results_of_code_that_asks_for_types(dtype: torch.dtype) -> None:
    module, explicit, inputs = Choosing(dtype).eval(), Chosen(dtype).eval(), (torch.randn(6, 32),)
    explicit.load_state_dict(module.state_dict())
    check(explicit, inputs, planned(module, inputs, machine("h200")))


@pytest.mark.in_turns(1)
@EACH_TYPE
def test_results(dtype: torch.dtype, tmp_path: Path) -> None:
    """From a file that was written where there is a GPU too."""
    module, explicit, inputs = Regions(dtype).eval(), Casts(dtype).eval(), (torch.randn(6, 32),)
    explicit.load_state_dict(module.state_dict())
    check(explicit, inputs, planned(module, inputs, machine("h200")))
    with a_gpu():
        torch.export.save(torch.export.export(module, inputs), tmp_path / "model.pt2")
    for model in (module, str(tmp_path / "model.pt2")):
        executable = tilewright.compile(model, inputs, "h200", unsupported="error")
        graph = executable.image.program.graph
        assert [graph.values[name].dtype for name in graph.outputs] == [NAMES[dtype], "f32"]


def test_a_region_of_a_gpu_changes_nothing_on_a_cpu() -> None:
    module, inputs = Regions(torch.float16).eval(), (torch.randn(6, 32),)
    with a_gpu():
        program = torch.export.export(module, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that there is no GPU
        found = tilewright.compile(program, inputs)(*inputs)
        wanted = module(*inputs)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
