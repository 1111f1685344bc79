"""Every operator of the table, through the front end, against PyTorch in float64 over random shapes and attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.pointwise_functions import ANYWHERE, BINARY, INTEGER, WITHIN_ONE
from tilewright.frontend.imported import unsupported
from tilewright.frontend.torch_import import import_module
from tilewright.frontend.torch_operators import replayed
from tilewright.graph.passes import simplify
from tilewright.graph.reference import evaluate

few = settings(max_examples=2, phases=(Phase.explicit, Phase.generate), deadline=None, suppress_health_check=list(HealthCheck), database=None)


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def check(model: nn.Module | Callable[..., Any], *inputs: torch.Tensor, tolerance: float = 1e-10) -> None:
    """Imports the model, evaluates its graph as imported and simplified, and compares each output with PyTorch's."""
    module = (model if isinstance(model, nn.Module) else Function(model)).eval()
    imported = import_module(module, inputs)
    assert not unsupported(imported.graph), unsupported(imported.graph)
    fresh = [torch.randn_like(x) if x.is_floating_point() and not getattr(x, "fixed", False) else x for x in inputs]
    with torch.no_grad():
        expected = torch.utils._pytree.tree_leaves(module(*[x.clone() for x in fresh]))
    for graph in (imported.graph, simplify(imported.graph)[0]):
        computed = evaluate(graph, [x for x in fresh])
        results = []
        for output in imported.outputs:
            if output.kind == "value":
                results.append(replayed(torch.from_numpy(computed[output.index]), output.calls).numpy())
            elif output.kind == "input":
                results.append(replayed(fresh[output.index], output.calls).numpy())
            else:
                results.append(output.value)
        assert len(results) == len(expected)
        for k, (result, wanted) in enumerate(zip(results, expected, strict=True)):
            if isinstance(wanted, torch.Tensor):
                assert result.shape == tuple(wanted.shape) and result.dtype == wanted.numpy().dtype, k
                np.testing.assert_allclose(result, wanted.numpy(), rtol=tolerance, atol=tolerance, err_msg=f"output {k}")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def positive(*shape: int) -> torch.Tensor:
    """Values that `check` does not replace, for operators with a limited domain."""
    x = torch.rand(*shape, dtype=torch.float64) * 0.8 + 0.1
    x.fixed = True  # type: ignore[attr-defined]
    return x


# --- elementwise ------------------------------------------------------------------------------------------------------


@few
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_unary(shape: list[int]) -> None:
    shape = [*shape, 4]
    check(lambda x, y: [f(x) for f in ANYWHERE] + [f(y) for f in WITHIN_ONE], random(*shape), positive(*shape), tolerance=1e-6)


@few
@given(st.sampled_from([((3, 4), (3, 4)), ((3, 1), (1, 4)), ((2, 3, 4), (3, 4)), ((2, 1, 4), (3, 1))]))
def test_binary(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    check(lambda a, b: [f(a, b) for f in BINARY], random(*shapes[0]), random(*shapes[1]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_integers(dtype: torch.dtype) -> None:
    a, b = torch.randint(-9, 9, (3, 5), dtype=dtype), torch.randint(1, 9, (5,), dtype=dtype) * torch.tensor([1, -1, 1, -1, 1], dtype=dtype)
    check(lambda a, b: [f(a, b) for f in INTEGER], a, b, tolerance=1e-6)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32])
def test_integers_and_booleans_are_finite(dtype: torch.dtype) -> None:
    check(lambda x: [x.isfinite(), x.isinf(), x.isnan()], torch.tensor([0, 1, 1], dtype=dtype), tolerance=0)


def test_special_values() -> None:
    """NaN and infinities propagate as in PyTorch."""
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0], dtype=torch.float64)
    x.fixed = True  # type: ignore[attr-defined]
    check(
        lambda x: [
            x.relu(),
            x.clamp(-1, 1),
            torch.maximum(x, x * 0),
            x.isnan(),
            x.isinf(),
            x.isfinite(),
            x.amax(),
            x.max(0),
            x.argmin(),
            x.nan_to_num(),
            F.max_pool1d(x[None], 2),
            x == x,
            torch.sigmoid(x),
            F.softplus(x),
            x.bool(),
        ],
        x,
    )


# --- convolution and products -----------------------------------------------------------------------------------------


@few
@given(st.data())
def test_convolution(data: st.DataObject) -> None:
    draw = data.draw
    rank = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    c, k = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    window, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    stride = draw(st.integers(1, 2))
    padding: Any = draw(st.sampled_from([0, 1, 2] + ([] if stride > 1 else ["same"])))
    module = kind(c, k, window, stride, padding, dilation, groups, bias=draw(st.booleans())).double()
    check(module, random(2, c, *(draw(st.integers(5, 7)) for _ in range(rank))))


@few
@given(st.data())
def test_transposed_convolution(data: st.DataObject) -> None:
    draw = data.draw
    rank = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 2]))
    stride = draw(st.integers(1, 3))
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1]
    window, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    padding = draw(st.integers(0, min(1, dilation * (window - 1))))
    extra = draw(st.integers(0, stride - 1))
    module = kind(2 * groups, 3 * groups, window, stride, padding, extra, groups, draw(st.booleans()), dilation).double()
    check(module, random(2, 2 * groups, *(draw(st.integers(2, 4)) for _ in range(rank))))


def test_unbatched_convolution() -> None:
    check(nn.Conv2d(2, 3, 3).double(), random(2, 5, 5))
    check(nn.Conv2d(2, 3, 3, padding=2, padding_mode="circular").double(), random(1, 2, 5, 5))
    check(nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect").double(), random(1, 2, 5, 5))


def test_products() -> None:
    a, b, v, w = random(3, 4), random(4, 5), random(4), random(2, 1, 4, 5)
    check(
        lambda a, b, v, w, c: [
            a @ b,
            a @ v,
            v @ b,
            v @ v,
            a @ w,
            torch.mm(a, b),
            torch.mv(a, v),
            torch.dot(v, v),
            torch.outer(v, v),
            torch.bmm(c, c),
            w.mT @ v,
            torch.addmm(b[:3], a, b),
            torch.addmm(b[0], a, b, beta=0.5, alpha=2),
            torch.baddbmm(c, c, c),
            F.linear(a, b.T),
            F.linear(a, b.T, b[0]),
            torch.einsum("ij,jk->ik", a, b),
            torch.einsum("ij,jk->ki", a, b),
            torch.einsum("bij,bjk->bik", c, c),
            torch.einsum("i,j->ij", v, v),
            torch.einsum("ij->j", a),
            torch.einsum("bij,bkj->bik", c, c),
            torch.einsum("ij,ij->", a, a),
            torch.einsum("ij,jk,lk->il", a, b, b),
            torch.einsum("bij,bij->bij", c, c),
            F.bilinear(a, a, w.new_ones(2, 4, 4)),
            torch.linalg.multi_dot([a, b, b.T]),
            torch.tensordot(a, b, 1),
        ],
        a,
        b,
        v,
        w,
        random(2, 3, 3),
    )


# --- normalisation, pooling, resampling -------------------------------------------------------------------------------


def test_softmax() -> None:
    check(
        lambda x: [
            F.softmax(x, 1),
            F.log_softmax(x, -1),
            torch.logsumexp(x, (0, 2)),
            torch.logsumexp(x, 1, True),
            F.softmin(x, 0),
            F.softmax(x[0, 0, 0], 0),
        ],
        random(2, 3, 4),
    )


class Norms(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [
                nn.BatchNorm2d(channels),
                nn.BatchNorm2d(channels, affine=False),
                nn.GroupNorm(2, channels),
                nn.GroupNorm(1, channels, affine=False),
                nn.InstanceNorm2d(channels, affine=True),
                nn.InstanceNorm2d(channels, track_running_stats=True),
                nn.LayerNorm([5]),
                nn.LayerNorm([4, 5]),
                nn.LayerNorm([5], bias=False),
                nn.LayerNorm([5], elementwise_affine=False),
                nn.RMSNorm([5]),
                nn.LocalResponseNorm(2),
            ]
        )
        for tensor in [*self.parameters(), *(b for b in self.buffers() if b.is_floating_point())]:
            nn.init.uniform_(tensor, 0.5, 1.5)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        scaled = [torch._weight_norm(x, length, axis) for axis, length in ((0, x[:, :1, :1, :1]), (3, x[:1, :1, :1]), (1, x[:1, :, :1, :1]))]
        distances = [F.normalize(x, dim=1), F.cosine_similarity(x, x * x + 1), F.pairwise_distance(x, x * 2)]
        return [part(x) for part in self.parts] + distances + scaled + [torch._weight_norm(x, x[0, 0, 0, 0], -1)]


def test_norms() -> None:
    check(Norms(4).double(), random(2, 4, 4, 5), tolerance=1e-9)


@few
@given(st.data())
def test_pooling(data: st.DataObject) -> None:
    draw = data.draw
    rank = draw(st.integers(1, 3))
    window, stride = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    padding, ceil = draw(st.integers(0, window // 2)), draw(st.booleans())
    dilation = draw(st.integers(1, 2))
    output = draw(st.integers(1, 4))
    greatest = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]
    mean = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[rank - 1]
    adaptive = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[rank - 1]
    adaptive_greatest = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)[rank - 1]
    divisor: dict[str, Any] = {} if rank == 1 else {"divisor_override": 5}
    check(
        lambda x: [
            greatest(x, window, stride, padding, dilation, ceil),
            greatest(x, window, stride, padding, 1, ceil, return_indices=True),
            mean(x, window, stride, padding, ceil),
            mean(x, window, stride, padding, ceil, False),
            mean(x, window, stride, padding, ceil, **divisor),
            adaptive(x, output),
            adaptive_greatest(x, output),
            adaptive(x, 1),
            F.lp_pool1d(x, 2, 2) if rank == 1 else x + 1,
        ],
        random(2, 3, *(draw(st.integers(6, 8)) for _ in range(rank))),
    )


@few
@given(st.integers(2, 5), st.integers(2, 9), st.booleans())
def test_resampling(size: int, output: int, align: bool) -> None:
    x = random(1, 2, size, size + 1)
    check(
        lambda x: [
            F.interpolate(x, (output, output), mode="nearest"),
            F.interpolate(x, (output, output + 1), mode="bilinear", align_corners=align),
            F.interpolate(x, (output, output), mode="bicubic", align_corners=align),
            F.interpolate(x, scale_factor=2, mode="nearest"),
            F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=align),
            F.interpolate(x, scale_factor=1.7, mode="bilinear"),
            F.interpolate(x[0], output, mode="linear", align_corners=align),
            F.interpolate(x[None], (2, output, output), mode="trilinear", align_corners=align),
            F.pixel_shuffle(x.expand(1, 2, size, size + 1).repeat(1, 4, 1, 1), 2),
            F.interpolate(x[0], output),
        ],
        x,
        tolerance=1e-7,
    )


# --- reductions -------------------------------------------------------------------------------------------------------


def test_reductions() -> None:
    check(
        lambda x: [
            x.sum(),
            x.sum(1),
            x.sum((0, 2), True),
            x.mean(),
            x.mean(-1),
            x.prod(),
            x.prod(1),
            x.amax(1),
            x.amin((0, 1)),
            x.max(),
            x.min(),
            x.max(1),
            x.min(2, True),
            x.argmax(),
            x.argmax(1),
            x.argmin(0, True),
            (x > 0).any(),
            (x > -9).all(1),
            x.var(),
            x.var(1),
            x.std(2, True),
            x.var(1, correction=0),
            torch.var_mean(x, 1),
            torch.std_mean(x, (0, 1)),
            x.norm(),
            x.norm(1, 1),
            x.norm(float("inf"), 2),
            torch.linalg.vector_norm(x, 3, (0, 1)),
            x.cumsum(1),
            x.cumsum(0),
            x.cumprod(-1),
            torch.count_nonzero(x > 0, 1),
            x[0, 0, 0].sum(0),
            x[0, 0, 0].argmax(),
            torch.aminmax(x, dim=1),
            (x * 3).int().sum(1),
            (x * 3).int().cumsum(0),
            x.sum(1, dtype=torch.float32),
            x.std(unbiased=False),
            x.norm(dim=1),
            torch.linalg.vector_norm(x, 0),
        ],
        random(2, 3, 4),
        tolerance=1e-6,
    )


# --- shapes and indices -----------------------------------------------------------------------------------------------


def test_shapes() -> None:
    check(
        lambda x: [
            y + 0
            for y in [
                x.view(6, 4),
                x.reshape(-1),
                x.flatten(1),
                x.permute(2, 0, 1),
                x.transpose(0, 2),
                x[None, :, None].squeeze(),
                x.unsqueeze(-1).expand(2, 3, 4, 5),
                x.repeat(2, 1, 1, 2),
                x[:, 1:],
                x[..., ::2],
                x[1],
                x[:, -1, 1:-1],
                x.select(1, 2),
                x.narrow(2, 1, 2),
                *x.split(2, 2),
                *x.split([1, 2], 1),
                *x.chunk(3, 1),
                torch.cat([x, x * 2, x[:, :1]], 1),
                torch.stack([x, x + 1], -1),
                *x.unbind(1),
                F.pad(x, (1, 2)),
                F.pad(x, (1, -1, 0, 2), value=3.0),
                F.pad(x, (2, 1), mode="reflect"),
                F.pad(x, (2, 1), mode="replicate"),
                F.pad(x, (2, 1), mode="circular"),
                x.flip(0, 2),
                x.roll(1, 0),
                x.roll((1, -2), (1, 2)),
                x.roll(3),
                x.tril(),
                x.triu(1),
                x.diagonal(0, 1, 2),
                x.diagonal(-1, 0, 1),
                x.unfold(2, 2, 1),
                torch.arange(5),
                torch.arange(1, 7, 2),
                torch.arange(0, 1, 0.25),
                torch.full((2, 3), 7.0),
                torch.zeros(3),
                torch.ones_like(x),
                x.new_full((2,), 3),
                torch.eye(3),
                x.T,
                x.repeat_interleave(2, 1),
                torch.linspace(0, 1, 5),
                x.movedim(0, 1),
                x.swapaxes(0, 1),
                torch.tile(x, (2,)),
                x.unflatten(2, (2, 2)),
                F.pixel_unshuffle(x.view(1, 3, 2, 4), 2),
                F.channel_shuffle(x.view(1, 6, 2, 2), 2),
                F.unfold(x.view(1, 2, 3, 4), (2, 3), 1, 1, (1, 2)),
                x.mT,
                torch.meshgrid(x[0, 0], x[0, 1], indexing="ij")[0],
                torch.atleast_2d(x[0, 0]),
                torch.hstack([x, x]),
                torch.cat([x[:0], x]),
                x.contiguous().view(-1),
            ]
        ],
        random(2, 3, 4),
    )


def test_indexing() -> None:
    index = torch.tensor([[2, 0], [1, -1]])
    inside = torch.tensor([[2, 0, 1], [1, 1, 0]])
    check(
        lambda x, i, j: [
            x[i],
            x[:, i],
            x[i, i],
            x[:, i, :2],
            x[i[0], :, i[1]],
            x.index_select(1, j[0]),
            torch.gather(x, 0, j[None, :, :2].clamp(max=1)),
            torch.take(x, j),
            F.embedding(j, x[0]),
            F.one_hot(j, 4),
            torch.take_along_dim(x[0], j[:1], 1),
            x[j.clamp(max=1), 1],
            x[..., j],
            x.index_select(-1, j[1]),
            x[torch.tensor(1)],
            x[:, [0, 2]],
        ],
        random(3, 3, 4),
        index,
        inside,
    )
    check(lambda x, i: F.embedding_bag(i, x, mode="mean"), random(5, 3), inside)
    for mode in ("sum", "mean", "max"):
        offsets = torch.tensor([0, 2, 2, 5])
        check(lambda x, i, o, mode=mode: F.embedding_bag(i, x, o, mode=mode), random(5, 3), torch.tensor([1, 0, 4, 4, 2, 3]), offsets)
    check(
        lambda x, i, o, w: F.embedding_bag(i, x, o, mode="sum", per_sample_weights=w),
        random(5, 3),
        torch.tensor([1, 0, 4]),
        torch.tensor([0, 2]),
        random(3),
    )


def test_writes_through_views() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[:, 0] = 0
        y[0, ::2] += 1
        y[:, 1:3].mul_(3)
        y.t()[0].fill_(5)
        return y

    check(function, random(3, 4))


# --- attention and recurrent networks ---------------------------------------------------------------------------------


def test_attention() -> None:
    q, k, v = random(2, 2, 3, 4), random(2, 2, 5, 4), random(2, 2, 5, 6)
    mask, bias = torch.rand(3, 5) > 0.3, random(2, 1, 3, 5)
    mask[1] = False
    attend = F.scaled_dot_product_attention
    check(
        lambda q, k, v, m, b: [attend(q, k, v), attend(q, k, v, b), attend(q, k, v, is_causal=True), attend(q, k, v, scale=0.3), attend(q, k, v, m)],
        q,
        k,
        v,
        mask,
        bias,
    )
    check(lambda q, k, v: attend(q, k, v, enable_gqa=True), random(1, 4, 3, 4), random(1, 2, 5, 4), random(1, 2, 5, 4))
    check(nn.MultiheadAttention(8, 2, batch_first=True).double(), *[random(2, 3, 8)] * 3)


def test_transformer_layer() -> None:
    check(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double(), random(2, 3, 8), tolerance=1e-9)


@pytest.mark.in_turns
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k)])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False}])
def test_recurrent(kind: Callable[..., nn.Module], options: dict[str, Any]) -> None:
    check(kind(3, 4, **options).double(), random(5, 2, 3))


def test_recurrent_states_and_cells() -> None:
    lstm = nn.LSTM(3, 4).double()
    check(lambda x, h, c: lstm(x, (h, c)), random(5, 2, 3), random(1, 2, 4), random(1, 2, 4))
    check(nn.GRU(3, 4).double(), random(5, 3))
    for cell in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        check(cell(3, 4).double(), random(2, 3))
