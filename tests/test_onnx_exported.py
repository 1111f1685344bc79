"""Modules as both of PyTorch's exporters write them to ONNX, compiled for fixed and free sizes, against the modules in float64."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tilewright

pytestmark = pytest.mark.filterwarnings("ignore")  # what the exporters say, and which nodes run through PyTorch


class Applied(nn.Module):
    """A function of some modules and of its inputs."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(modules)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self.parts, *inputs)


@dataclass(frozen=True)
class Case:
    """`inputs` are shapes of float32 tensors, or functions of sizes that make a tensor; sizes that are text are free. `sizes` has their values at the
    export, and then those of further calls. `opsets`: what the older exporter writes."""

    module: Callable[[], nn.Module]
    inputs: Sequence[Any]
    sizes: Mapping[str, Sequence[int]]
    opsets: Sequence[int] = (17,)
    new: bool = True
    """Whether the newer exporter takes it."""
    old_is_free: bool = True
    """Whether the older exporter leaves sizes free: it takes those that Python computes as constants."""
    tolerance: float = 2e-5
    float: torch.dtype = torch.float32


def integers(most: int) -> Callable[..., torch.Tensor]:
    return lambda shape: torch.randint(0, most, tuple(shape))


def some(shape: Sequence[int]) -> torch.Tensor:
    """Truth values, of which the first of each row is false."""
    mask = torch.rand(*shape) > 0.5
    mask[..., 0] = False
    return mask


def head(m: Any, x: torch.Tensor) -> Any:
    """Boxes on a grid, the best five of them, and the numbers of all with some score."""
    y = m[0](x)
    high, wide = y.shape[-2:]
    grid = torch.stack(torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij"), -1).to(x.dtype)
    y = y.permute(0, 2, 3, 1)
    boxes = torch.cat((y[..., :2].sigmoid() * 2 - 0.5 + grid, (y[..., 2:4].sigmoid() * 2) ** 2), -1).flatten(1, 2)
    scores = y[..., 4:].sigmoid().flatten(1, 2).amax(-1)
    best, where = scores.topk(5, 1)
    return torch.gather(boxes, 1, where.unsqueeze(-1).expand(-1, -1, 4)), best, (scores > 0.5).nonzero()


def kept(m: Any, x: torch.Tensor) -> Any:
    """Rows with a high score."""
    rows = m[0](x).flatten(2).transpose(1, 2)[0]
    found = rows[:, 4].sigmoid() > 0.5
    return rows[found], found.sum()


def windows(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Attention in shifted windows of 2 x 2 pixels, with a bias for each distance."""
    batch, high, wide, channels = x.shape
    x = torch.roll(x, (-1, -1), (1, 2)).view(batch, high // 2, 2, wide // 2, 2, channels).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, channels)
    q, k, v = m[0](x).reshape(-1, 4, 3, 2, channels // 2).permute(2, 0, 3, 1, 4).unbind(0)
    at = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
    index = ((at[:, :, None] - at[:, None]) + 1).permute(1, 2, 0) @ torch.tensor([3, 1])
    bias = m[1].weight[index.view(-1)].view(4, 4, 2).permute(2, 0, 1)
    x = ((q @ k.transpose(-2, -1) * 0.5 + bias).softmax(-1) @ v).transpose(1, 2).reshape(batch, high // 2, wide // 2, 2, 2, channels)
    return torch.roll(x.permute(0, 1, 3, 2, 4, 5).reshape(batch, high, wide, channels), (1, 1), (1, 2))


def rotary(m: Any, x: torch.Tensor) -> torch.Tensor:
    angles = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), 1 / 10000 ** (torch.arange(0, 8, 2) / 8))
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()), -1).flatten(-2)


def causal(m: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in m[0](x).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def cached(m: Any, x: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    x = m[0](x)
    k, v = torch.cat((k, x), 1), torch.cat((v, x), 1)
    return (x @ k.transpose(1, 2) / 4).softmax(-1) @ v, k, v


def within(m: Any, x: torch.Tensor, lengths: torch.Tensor) -> Any:
    """Masked means, and a masked softmax."""
    mask = torch.arange(x.shape[1])[None] < lengths[:, None] + 1
    mean = (x * mask[..., None]).sum(1) / (lengths[:, None] + 1)
    return mean, x.sum(-1).masked_fill(~mask, float("-inf")).softmax(-1), torch.where(x > 0, x, 0.1 * x).clamp(-1, 1)


def scattered(m: Any, x: torch.Tensor, index: torch.Tensor) -> Any:
    zeros = x.new_zeros(x.shape[0], 7)
    return zeros.scatter_add(1, index, x), zeros.scatter(1, index, 1.0), x.cumsum(1), x.gather(1, index % 5)


def reshaped(m: Any, x: torch.Tensor) -> torch.Tensor:
    batch, _, high, wide = x.shape
    return m[0](x).reshape(batch, 2, -1, high * wide).permute(0, 3, 1, 2).reshape(batch, high, wide, -1).mean((1, 2))


def repeated(m: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x + m[0](x).tanh()
    return x


def packed(m: Any, x: torch.Tensor) -> torch.Tensor:
    lengths = torch.tensor([6, 4, 1])
    sequences = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(m[0](sequences)[0], batch_first=True)[0]


def edges(m: Any, x: torch.Tensor) -> Any:
    return F.pad(x, (1, 2, 0, 1), mode="reflect"), F.pad(x, (1, 1, 1, 1), value=2.0), F.pad(x, (1, 0, 1, 0), mode="replicate")


def counted(m: Any, x: torch.Tensor) -> Any:
    """Arithmetic of integers: quotients and remainders of both signs."""
    return torch.div(x - 5, 3, rounding_mode="floor"), (x - 5) % 3, (x == 2).sum(1), x.bool(), x.to(torch.int32) * 2


@torch.jit.script
def halved(x: torch.Tensor) -> torch.Tensor:
    """A loop whose number of iterations data decide."""
    done = 0
    while bool(x.abs().sum() > 1.0) and done < 10:
        x = x * 0.5
        done += 1
    return x


@torch.jit.script
def steps(x: torch.Tensor) -> torch.Tensor:
    """A loop of as many iterations as rows."""
    state = torch.zeros_like(x[0])
    rows = []
    for k in range(x.size(0)):
        state = torch.tanh(state + x[k])
        rows.append(state)
    return torch.stack(rows)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1, groups=4), nn.BatchNorm2d(16),
        nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def resized(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.interpolate(m[0](x), size=y.shape[2:], mode="bilinear", align_corners=False) + y


def recurrent(m: Any, x: torch.Tensor) -> Any:
    return m[0](x)


IMAGE = ["b", 3, "h", "w"]
PIXELS = {"b": (2, 1, 3), "h": (16, 12, 21), "w": (16, 20, 11)}
ROWS = {"b": (2, 3, 4), "t": (6, 5, 9)}
BATCH = {"b": (2, 1, 5)}
CASES = {
    "convolutional network": Case(network, [IMAGE], PIXELS, (9, 11, 17)),
    "detection": Case(lambda: Applied(head, nn.Conv2d(3, 7, 3, 2, 1)), [IMAGE], PIXELS, (11, 17)),
    "selection": Case(lambda: Applied(kept, nn.Conv2d(3, 7, 3, 2, 1)), [[1, *IMAGE[1:]]], PIXELS, (11, 17)),
    "resizing to a size": Case(
        lambda: Applied(resized, nn.Conv2d(3, 4, 3, 2, 1)), [IMAGE, ["b", 4, "H", "W"]], {**PIXELS, "H": (13, 6, 21), "W": (11, 13, 4)}, (11, 17)
    ),
    "bicubic": Case(lambda: nn.Upsample(scale_factor=1.5, mode="bicubic"), [IMAGE], PIXELS, (11, 18)),
    "nearest": Case(lambda: nn.Upsample(scale_factor=2), [IMAGE], PIXELS, (9, 11, 18)),
    "transposed convolution": Case(lambda: nn.ConvTranspose2d(3, 4, 3, 2, 1, output_padding=1), [IMAGE], PIXELS, (9, 17)),
    "shapes": Case(lambda: Applied(reshaped, nn.Conv2d(3, 6, 3, padding=1)), [IMAGE], PIXELS, (9, 13)),
    "group normalisation": Case(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU()), [IMAGE], PIXELS, (9, 18, 20)),
    "pixel shuffle": Case(lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.PixelShuffle(2)), [IMAGE], PIXELS, (11, 17)),
    "edges": Case(lambda: Applied(edges), [IMAGE], PIXELS, (11, 17)),
    "LSTM": Case(lambda: Applied(recurrent, nn.LSTM(5, 7, 2, batch_first=True, bidirectional=True)), [["b", "t", 5]], ROWS, (9, 17), new=False),
    "GRU": Case(lambda: Applied(recurrent, nn.GRU(5, 7)), [["t", "b", 5]], ROWS, (9, 17), new=False),
    "packed LSTM": Case(lambda: Applied(packed, nn.LSTM(5, 7, batch_first=True, bidirectional=True)), [[3, 6, 5]], {}, (11, 17), new=False),
    "encoder": Case(
        lambda: Applied(lambda m, x, mask: m[0](x, src_key_padding_mask=mask), nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)),
        [["b", "t", 16], (some, ["b", "t"])], ROWS, (17, 20), old_is_free=False,
    ),
    "causal attention": Case(lambda: Applied(causal, nn.Linear(16, 48)), [["b", "t", 16]], ROWS, (14, 17)),
    "windows": Case(lambda: Applied(windows, nn.Linear(8, 24), nn.Embedding(9, 2)), [["b", 4, 6, 8]], BATCH, (14, 17)),
    "rotary": Case(lambda: Applied(rotary), [["b", "t", 8]], ROWS, (12, 17)),
    "cache": Case(lambda: Applied(cached, nn.Linear(16, 16)), [["b", 1, 16], ["b", "t", 16], ["b", "t", 16]], ROWS, (11, 17)),
    "lengths": Case(lambda: Applied(within), [["b", "t", 4], (integers(5), ["b"])], ROWS, (11, 17)),
    "einsum": Case(lambda: Applied(lambda m, x, y: torch.einsum("bhid,bhjd->bhij", x, y)), [["b", 3, "t", 5], ["b", 3, 4, 5]], ROWS, (12, 17)),
    "scatter": Case(lambda: Applied(scattered), [["b", 5], (integers(7), ["b", 5])], BATCH, (16, 18)),
    "embedding": Case(
        lambda: Applied(lambda m, i: m[0](i) + m[1](torch.arange(i.shape[1])), nn.Embedding(20, 8), nn.Embedding(32, 8)),
        [(integers(20), ["b", "t"])], ROWS, (9, 17),
    ),
    "integers": Case(lambda: Applied(counted), [(integers(11), ["b", 5])], BATCH, (13, 17)),
    "repetition": Case(lambda: Applied(repeated, nn.Linear(6, 6)), [["b", 6]], BATCH, (9, 17)),
    "a loop that data decide": Case(lambda: Applied(lambda m, x: halved(x)), [["b", 3]], BATCH, (11, 17), new=False),
    "a loop over rows": Case(lambda: Applied(lambda m, x: steps(x)), [["t", 3]], ROWS, (11, 17), new=False),
    "float16": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(2), nn.LayerNorm(24), nn.Linear(24, 5), nn.Softmax(-1)),
        [["b", 3, 6, 8]], BATCH, (17, 20), tolerance=5e-3, float=torch.float16,
    ),
}  # fmt: skip


@contextmanager
def float64() -> Iterator[None]:
    """In which modules make their own tensors."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@dataclass(frozen=True)
class Exported:
    """A case's module, and its file."""

    case: Case
    module: nn.Module
    file: onnx.ModelProto = field(repr=False)

    def check(self, executable: Any, call: int) -> None:
        """A call with the sizes of this number."""
        inputs = inputs_of(self.case, call)
        with float64(), torch.no_grad():
            wanted = leaves(copy.deepcopy(self.module).double()(*(x.double() if x.is_floating_point() else x for x in inputs)))
        got = leaves(executable(*inputs))
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert one.dtype == (self.case.float if other.is_floating_point() else other.dtype)
            torch.testing.assert_close(one.to(other.dtype), other, rtol=self.case.tolerance, atol=self.case.tolerance)


def inputs_of(case: Case, call: int) -> tuple[torch.Tensor, ...]:
    def tensor(each: Any) -> torch.Tensor:
        make, shape = each if isinstance(each, tuple) else (lambda s: torch.randn(*s, dtype=case.float), each)
        made: torch.Tensor = make([case.sizes[size][call] if isinstance(size, str) else size for size in shape])
        return made

    return tuple(map(tensor, case.inputs))


def leaves(results: Any) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else [leaf for result in results for leaf in leaves(result)]


def exported(name: str, opset: int | None, is_free: bool) -> Exported:
    """What the older exporter writes in an operator set, or with `opset` None the newer one."""
    case = CASES[name]
    torch.manual_seed(sum(name.encode()))
    module = case.module().eval().to(case.float)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d) and part.running_mean is not None and part.running_var is not None:
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2)
    shapes = [each[1] if isinstance(each, tuple) else each for each in case.inputs]
    free = [{axis: size for axis, size in enumerate(shape) if isinstance(size, str)} if is_free else {} for shape in shapes]
    inputs = inputs_of(case, 0)
    if opset is not None:
        file, names = io.BytesIO(), [f"x{k}" for k in range(len(inputs))]
        axes = dict(zip(names, free, strict=True))
        torch.onnx.export(module, inputs, file, input_names=names, dynamic_axes=axes, opset_version=opset, dynamo=False)  # type: ignore[arg-type]
        return Exported(case, module, onnx.load_from_string(file.getvalue()))
    pytest.importorskip("onnxscript")
    dynamic = tuple({axis: torch.export.Dim.DYNAMIC for axis in axes} for axes in free)
    shapes_given = ((dynamic,) if isinstance(module, Applied) else dynamic) if is_free else None
    program = torch.onnx.export(module, inputs, dynamo=True, verbose=False, dynamic_shapes=shapes_given)
    assert program is not None
    return Exported(case, module, program.model_proto)


QUICK = frozenset({"resizing to a size", "lengths"})
"""Cases of which the newer exporter's file is tested in each run."""
LATER = frozenset({"transposed convolution", "group normalisation", "float16", "selection", "cache", "GRU"})
"""Cases that are tested by the slow tests only; other tests of ONNX models have their operators."""


def written() -> Iterator[Any]:
    """Names of cases and operator sets; slow are some cases, operator sets beyond the first, and most files of the newer exporter."""
    for name, case in CASES.items():
        yield pytest.param(name, case.opsets[0], id=f"{name}, set {case.opsets[0]}", marks=pytest.mark.slow if name in LATER else ())
        yield from (pytest.param(name, opset, id=f"{name}, set {opset}", marks=pytest.mark.slow) for opset in case.opsets[1:])
        if case.new:
            yield pytest.param(name, None, id=f"{name}, newer", marks=() if name in QUICK else pytest.mark.slow)


@pytest.mark.parametrize(("name", "opset"), [*written()])
def test_modules_as_they_are_exported(name: str, opset: int | None) -> None:
    """Free sizes in the first operator set and by the newer exporter, fixed sizes otherwise."""
    case = CASES[name]
    is_free = bool(case.sizes) and (opset is None or case.old_is_free and opset == case.opsets[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = exported(name, opset, is_free)
    inputs = inputs_of(found.case, 0)
    if not is_free:
        executable = tilewright.compile(found.file, inputs, "native")
        found.check(executable, 0)
        return
    dynamic = tilewright.compile(found.file, inputs, "native", dynamic=True, wait=True)
    for call in range(3):
        found.check(dynamic, call)
