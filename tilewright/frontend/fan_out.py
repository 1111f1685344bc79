"""A limit on the number of tensors that one operator of a file makes, whatever sizes the file gives. The tensors are counted before the operator is
traced, because tracing makes them all: `unbind` of an expanded element is a few bytes of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

MOST_PARTS = 1 << 14


def _extent(a: Mapping[str, Any]) -> int:
    shape = a["self"].shape
    return int(shape[a.get("dim", 0)]) if shape else 0


def _steps(a: Mapping[str, Any]) -> int:
    shape = a["input"].shape
    return int(shape[1 if a["batch_first"] else 0] * a["num_layers"]) if len(shape) > 1 else 0


_PARTS: Mapping[str, Callable[[Mapping[str, Any]], int]] = MappingProxyType(
    {
        **dict.fromkeys(("unbind.int", "unbind_copy.int"), _extent),
        **dict.fromkeys(("split.Tensor", "split_copy.Tensor", "unsafe_split.Tensor"), lambda a: -(-_extent(a) // max(a["split_size"], 1))),
        **dict.fromkeys(("chunk.default", "unsafe_chunk.default"), lambda a: min(_extent(a), a["chunks"])),
        **dict.fromkeys(("tensor_split.sections", "hsplit.int", "vsplit.int", "dsplit.int"), lambda a: a["sections"]),
        **dict.fromkeys(("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input"), _steps),
    }
)
"""Overload → the number of results, or of steps of a loop that is traced step by step, from the operator's arguments."""


class FanOut(TorchFunctionMode):
    """Raises ValueError in the block for an operator that would make more than `MOST_PARTS` tensors."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if isinstance(function, OpOverload) and (count := _PARTS.get(str(function).removeprefix("aten."))) is not None:
            names = (argument.name for argument in function._schema.arguments)
            parts = count({**dict(zip(names, args, strict=False)), **keywords})
            if parts > MOST_PARTS:
                raise ValueError(f"{function} makes {parts:,} tensors of one, and at most {MOST_PARTS:,} are read")
        return function(*args, **keywords)
