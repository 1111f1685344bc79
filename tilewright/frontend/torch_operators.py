"""Which of PyTorch's operators a node may run: ATen's, found by name in `torch.ops.aten` and nowhere else.

A module in memory may use all that change no argument (`resolve_operator`). A file, .pt2 or artifact, may only name those that compute tensors from
tensors and numbers and look where they read and write (`permitted_operator`): many operators, made for autograd to call, trust their arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from tilewright.errors import InvalidArtifact

TARGET = re.compile(r"aten\.([A-Za-z_][A-Za-z0-9_]*)\.([A-Za-z_][A-Za-z0-9_]*)")
ARGUMENT_TYPES = re.compile(r"((Optional|List)\[)*(Tensor|int|SymInt|float|SymFloat|bool|SymBool|number|Scalar|str|Device)\]*|Optional\[Generator\]")
"""What a permitted operator takes: no files, streams, storages or objects."""
REFUSED = re.compile(
    r".*_backward.*|.*sparse.*|.*nested.*|(?!fake_).*quantize.*|q_.*|fbgemm_.*|.*mkldnn.*|.*cudnn.*|miopen_.*|.*_jvp|segment_reduce|from_file|"
    r"record_stream|.*vulkan.*|.*pin_memory|set(_.*)?|as_strided.*|ctc_loss|(native_)?batch_norm|instance_norm|_(?!_).*"
)
"""Operators that believe what they are told about memory (indices that another operator made, packed or compressed tensors, strides, targets of a
loss), that write to arguments which their schemas do not name (running statistics), and internal ones but for the following."""
REFUSED_OVERLOADS = frozenset({"repeat_interleave.Tensor", "repeat_interleave.self_Tensor"})
"""Those of otherwise permitted operators that believe a number of elements."""
INTERNAL = re.compile(
    r"(?!.*_backward)_(adaptive_avg_pool\dd|aminmax|cdist_forward|conj(_physical|_copy)?|convolution|embedding_bag(_forward_only)?|fft_[cr]2[cr]|int_mm|"
    r"linalg_\w+|log_softmax|logcumsumexp|native_batch_norm_legit\w*|native_multi_head_attention|neg_view(_copy)?|pdist_forward|prelu_kernel|"
    r"reshape_copy|safe_softmax|scaled_dot_product_(?!.*mps)\w+|scaled_mm|grouped_mm|softmax|stack|thnn_fused_\w+_cell|to_copy|trilinear|"
    r"transformer_encoder_layer_fwd|unique2?|unsafe_index|unsafe_index_put|unsafe_view|upsample_\w+|weight_norm(_interface)?|local_scalar_dense|"
    r"pad_(circular|enum))"
)
"""What PyTorch's exporter makes of public functions."""
VIEWS = frozenset(
    "view.default transpose.int permute.default slice.Tensor select.int unsqueeze.default squeeze.dim squeeze.dims squeeze.default "
    "expand.default t.default alias.default detach.default diagonal.default unfold.default narrow.default".split()
)
"""What makes one view of a tensor, inside of it."""


@cache
def resolve_operator(target: str) -> Callable[..., Any]:
    """The ATen operator of a name such as "aten.sort.default".

    Raises:
        InvalidArtifact: for a name outside ATen, an operator that this PyTorch does not have, or one that changes its
        arguments.
    """
    match = TARGET.fullmatch(target)
    if match is None:
        raise InvalidArtifact(f"{target!r} is no ATen operator that may run through PyTorch", "compile the model again")
    packet = getattr(torch.ops.aten, match[1], None)
    known = isinstance(packet, torch._ops.OpOverloadPacket) and match[2] in packet.overloads()
    overload = getattr(packet, match[2]) if known else None
    if not isinstance(overload, torch._ops.OpOverload):
        raise InvalidArtifact(f"PyTorch {torch.__version__} has no operator {target}", "use the release that saved the executable")
    if overload._schema.is_mutable:
        raise InvalidArtifact(f"operator {target} changes its arguments", "compile the model again")
    return overload


def permitted_operator(target: str, view: bool = False) -> Callable[..., Any]:
    """The operator of a name that a file gives; `view`: one of `VIEWS`.

    Raises:
        InvalidArtifact: as `resolve_operator`, and for operators that reach beyond tensors: files, streams, memory that they do not check.
    """
    operator = resolve_operator(target)
    schema = operator._schema  # type: ignore[attr-defined]
    name = schema.name.removeprefix("aten::")
    overload = target.removeprefix("aten.")
    plain = (INTERNAL.fullmatch(name) or not REFUSED.fullmatch(name)) and overload not in REFUSED_OVERLOADS
    plain = plain and torch._C._dispatch_has_kernel(operator.name())  # type: ignore[attr-defined]
    types = [str(argument.type) for argument in schema.arguments]
    fits = all(ARGUMENT_TYPES.fullmatch(kind) for kind in types) and not any("filename" in argument.name for argument in schema.arguments)
    tensors = bool(schema.returns) and all("Tensor" in str(result.type) or str(result.type) == "number" for result in schema.returns)
    if not (plain and fits and tensors) or (view and overload not in VIEWS):
        raise InvalidArtifact(f"operator {target} is none that a file may name", "give the module itself, where it is trusted")
    return operator
