"""The PyTorch operators that a node may run, looked up by name in `torch.ops` only. A module in memory may use all that change no argument, those of
ATen and those that packages and users register (`resolve_operator`). A file, .pt2 or artifact, may only name those of ATen listed in
`permitted_operators`: others may do anything, and many of ATen, meant to be called by autograd, trust their arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from tilewright.errors import InvalidArtifact
from tilewright.frontend.permitted_operators import PERMITTED
from tilewright.graph import onnx_call
from tilewright.ir.dtypes import BY_TORCH_NAME

TARGET = re.compile(r"([A-Za-z_]\w*)\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)", re.ASCII)
ONNX_TARGET = re.compile(r"onnx\.[A-Za-z][A-Za-z0-9]*")
VIEWS = frozenset(
    "view.default reshape.default view.dtype view_as_real.default view_as_complex.default _conj.default _neg_view.default transpose.int "
    "permute.default slice.Tensor select.int unsqueeze.default squeeze.dim squeeze.dims squeeze.default expand.default t.default alias.default "
    "detach.default diagonal.default unfold.default narrow.default".split()
)
"""Operators that return one view within a tensor; of `reshape` this is so for most strides."""


@cache
def resolve_operator(target: str) -> Callable[..., Any]:
    """The operator of a name such as "aten.sort.default"; for all of ONNX's ("onnx.DFT") one that runs nodes (`graph.onnx_call`).

    Raises:
        InvalidArtifact: for a name of another form, an operator that is not registered in this process, or one that changes its arguments.
    """
    if ONNX_TARGET.fullmatch(target):
        return onnx_call.OPERATOR
    match = TARGET.fullmatch(target)
    if match is None:
        raise InvalidArtifact(f"{target!r} is no operator of PyTorch", "compile the model again")
    packet = getattr(getattr(torch.ops, match[1]), match[2], None)
    known = isinstance(packet, torch._ops.OpOverloadPacket) and match[3] in packet.overloads()
    overload = getattr(packet, match[3]) if known else None
    if not isinstance(overload, torch._ops.OpOverload):
        raise InvalidArtifact(f"PyTorch {torch.__version__} has no operator {target}", "use the release that saved the executable")
    if overload._schema.is_mutable:
        raise InvalidArtifact(f"operator {target} changes its arguments", "compile the model again")
    return overload


def permitted_operator(target: str, view: bool = False) -> Callable[..., Any]:
    """The operator that a file names; with `view` it must be one of `VIEWS`.

    Raises:
        InvalidArtifact: as `resolve_operator`, and for operators that are not listed in `permitted_operators`.
    """
    operator = resolve_operator(target)
    if operator is onnx_call.OPERATOR and not view:
        return operator
    overload = target.removeprefix("aten.")
    listed = overload != target and not PERMITTED.isdisjoint((overload, overload.partition(".")[0]))
    # TorchScript's overloads on lists and numbers share the names of operators
    tensors = all("Tensor" in str(result.type) for result in operator._schema.returns)  # type: ignore[attr-defined]
    known = torch._C._dispatch_has_kernel(operator.name())  # type: ignore[attr-defined]
    if not (listed and tensors and known) or (view and overload not in VIEWS):
        raise InvalidArtifact(f"operator {target} is none that a file may name", "give the module itself, where it is trusted")
    return operator


def replayed(tensor: torch.Tensor, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> torch.Tensor:
    """The tensor after view calls. Raises InvalidArtifact for operators and element types that PyTorch does not have."""
    for target, further in calls:
        tensor = resolve_operator(target)(tensor, *map(_argument, further))
    return tensor


def _argument(argument: Any) -> Any:
    if not isinstance(argument, str):
        return argument
    if argument not in BY_TORCH_NAME:
        raise InvalidArtifact(f"{argument!r} is no element type", "compile the model again")
    return getattr(torch, argument)
