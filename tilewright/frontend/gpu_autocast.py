"""Autocast of a GPU, applied to tensors on a CPU, which PyTorch's own leaves as they are: while a module is traced, so that its Python code sees the
types, and while a program that was traced elsewhere is decomposed.

Operators and types are those of PyTorch for "cuda" (`ATen/autocast_mode.h`), with the operators that call them, since a program names only those.
Operators that are in no list take what they are given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

LOWERED = frozenset(
    "_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution "
    "cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul "
    "linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
    "_scaled_dot_product_flash_attention scaled_dot_product_attention "
    "conv1d.padding conv2d.padding conv3d.padding "
    "linalg_matmul linalg_matrix_power "
    "lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data".split()
)
"""Operators whose operands are cast to the type of the region. The last three lines are not in PyTorch's list: they call operators that are, the last
one cuDNN's."""
FLOAT32 = frozenset(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus "
    "layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim norm.Scalar norm.ScalarOpt_dim "
    "cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss "
    "mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits "
    "dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d "
    "_upsample_bicubic2d_aa prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList "
    "cross_entropy_loss nll_loss_nd square linalg_norm linalg_norm.ord_str trapz.x trapz.dx trapezoid.x trapezoid.dx cumulative_trapezoid.x "
    "cumulative_trapezoid.dx arccos arcsin special_expm1 special_log1p special_softmax special_log_softmax special_logsumexp pairwise_distance "
    "upsample_nearest1d.vec _upsample_nearest_exact1d.vec upsample_nearest2d.vec _upsample_nearest_exact2d.vec upsample_nearest3d.vec "
    "_upsample_nearest_exact3d.vec upsample_linear1d.vec upsample_bilinear2d.vec _upsample_bilinear2d_aa.vec upsample_trilinear3d.vec "
    "upsample_bicubic2d.vec _upsample_bicubic2d_aa.vec".split()
)
"""Operators computed in float32, unless the call says in which type. The last five lines are not in PyTorch's list, but call operators that are."""
WIDEST = frozenset("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add inner".split())
"""Operators whose operands are cast to the widest type among them. The last one calls `tensordot`."""


class GpuAutocast(TorchFunctionMode):
    """While entered, casts the operands of ATen's operators as a GPU does in an autocast region of type `dtype`; None: outside of regions. Checks of
    types, which an export records at casts, are left out: on a CPU it has seen other types."""

    dtype: torch.dtype | None = None

    @contextmanager
    def region(self, dtype: torch.dtype | None) -> Iterator[None]:
        """A region of this type, perhaps within another; None: one in which autocast is off."""
        around, self.dtype = self.dtype, dtype
        try:
            yield
        finally:
            self.dtype = around

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._assert_tensor_metadata.default:
            return None
        args, keywords = as_cast(function, args, kwargs or {}, self.dtype)
        return function(*args, **keywords)


def as_cast(function: Any, args: tuple[Any, ...], keywords: dict[str, Any], region: torch.dtype | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The operands of a function, cast if it is an operator of ATen that a GPU casts for in a region of this type; None: outside of regions."""
    if region is None or not isinstance(function, torch._ops.OpOverload):
        return args, keywords
    dtype = _type(function.name().removeprefix("aten::"), args, keywords, region)
    if dtype is None:
        return args, keywords
    cast: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(lambda leaf: leaf.to(dtype) if _is_cast(leaf) else leaf, (args, keywords))
    return cast


def _type(name: str, args: tuple[Any, ...], keywords: Mapping[str, Any], region: torch.dtype) -> torch.dtype | None:
    """The type to which an operator's operands are cast; None: they stay."""
    if name in LOWERED:
        return region
    if name in FLOAT32:
        return torch.float32 if keywords.get("dtype") is None else None
    if name in WIDEST:
        return reduce(torch.promote_types, (leaf.dtype for leaf in pytree.tree_leaves((args, keywords)) if _is_cast(leaf)), region)
    return None


def _is_cast(operand: Any) -> bool:
    return isinstance(operand, torch.Tensor) and operand.is_floating_point() and operand.dtype != torch.float64
