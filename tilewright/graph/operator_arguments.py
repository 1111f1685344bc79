"""Arguments with which operators of `frontend.permitted_operators` crash or never end: they are rejected before the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Any

import torch

LARGEST_WINDOW = 1 << 16
"""Largest extent of a pooling window."""
LARGEST_STEP = 1 << 31
"""Largest extent, stride, dilation or padding of the patches of `im2col`."""
LARGEST_CHOICE = 64
"""Largest number of elements in a combination: each is a dimension of an intermediate tensor."""
LARGEST_POOLED = 1 << 24
"""Largest extent of a result of adaptive pooling, over which PyTorch loops even if there is nothing to compute."""


def _dimensions(arguments: Mapping[str, Any]) -> bool:
    rank, dims = arguments["self"].dim(), arguments["dim"]
    return all(0 <= dim < rank for dim in dims) and len(set(dims)) == len(dims)


def _circular(arguments: Mapping[str, Any]) -> bool:
    return arguments.get("mode") in ("constant", 0) or all(extent >= 0 for extent in arguments["pad"])


def _power(arguments: Mapping[str, Any]) -> bool:
    return bool(abs(arguments["n"]) < 1 << 62)


def _window(arguments: Mapping[str, Any]) -> bool:
    kernel = arguments["kernel_size"]
    return all(extent <= LARGEST_WINDOW for extent in (kernel if isinstance(kernel, Sequence) else (kernel,)))


def _pooled(arguments: Mapping[str, Any]) -> bool:
    return all(extent <= LARGEST_POOLED for extent in arguments["output_size"])


def _chosen(arguments: Mapping[str, Any]) -> bool:
    return bool(arguments.get("r", 2) <= LARGEST_CHOICE)


def _start(arguments: Mapping[str, Any]) -> bool:
    return bool(arguments.get("from", 0) < (1 << 63) - 1)


def _patches(arguments: Mapping[str, Any]) -> bool:
    return all(abs(extent) < LARGEST_STEP for name in ("kernel_size", "dilation", "padding", "stride") for extent in arguments[name])


def _groups(arguments: Mapping[str, Any]) -> bool:
    """Whether the sizes are those of the input: PyTorch compares only their product, in 64 bits, which may overflow."""
    x, sizes = arguments["input"], [arguments[name] for name in ("N", "C", "HxW")]
    return sizes == [*x.shape[:2], prod(x.shape[2:])] or (min(sizes) > 0 and prod(sizes) == x.numel())


def _rows(arguments: Mapping[str, Any]) -> bool:
    return bool(arguments["self"].dim() == 2)


def _pivots(arguments: Mapping[str, Any]) -> bool:
    *batch, rows, columns = arguments["LU_data"].shape
    return tuple(arguments["LU_pivots"].shape) == (*batch, min(rows, columns))


def _finite(arguments: Mapping[str, Any]) -> bool:
    return bool(arguments["self"].is_meta) or bool(torch.isfinite(arguments["self"]).all())


def _quotient(arguments: Mapping[str, Any]) -> bool:
    """Whether no quotient overflows: the least integer divided by -1 with truncation kills the process."""
    if arguments.get("rounding_mode") != "trunc":
        return True
    a, b = (torch.as_tensor(arguments[name]) for name in ("self", "other"))
    kind = torch.result_type(arguments["self"], arguments["other"])
    if a.is_meta or b.is_meta or kind.is_floating_point or kind.is_complex or kind in (torch.bool, torch.uint8):
        return True
    return not bool(((a.to(kind) == torch.iinfo(kind).min) & (b.to(kind) == -1)).any())


_CHECKS: Mapping[str, tuple[Callable[[Mapping[str, Any]], bool], str]] = MappingProxyType(
    {
        **dict.fromkeys(("_fft_c2c", "_fft_c2r", "_fft_r2c"), (_dimensions, "a dimension that is not the tensor's, negative, or there twice")),
        **dict.fromkeys(("pad", "_pad_circular", "_pad_enum"), (_circular, "a negative extent of padding")),
        **dict.fromkeys(("matrix_power", "linalg_matrix_power"), (_power, "an exponent beyond 62 bits")),
        **dict.fromkeys(
            (f"{kind}_pool{rank}d{more}" for kind in ("max", "avg") for rank in (1, 2, 3) for more in ("", "_with_indices")),
            (_window, f"a window beyond {LARGEST_WINDOW}"),
        ),
        **dict.fromkeys((f"adaptive_max_pool{rank}d" for rank in (1, 2, 3)), (_pooled, f"a result beyond {LARGEST_POOLED}")),
        "random": (_start, "numbers from the greatest integer on"),
        "combinations": (_chosen, f"combinations of more than {LARGEST_CHOICE}"),
        **dict.fromkeys(("im2col", "col2im"), (_patches, f"an extent of patches beyond {LARGEST_STEP}")),
        "_pdist_forward": (_rows, "rows of a tensor that has not two dimensions"),
        "lu_unpack": (_pivots, "pivots of another shape than the matrix"),
        "native_group_norm": (_groups, "sizes other than the tensor's"),
        **dict.fromkeys(("linalg_eigvals", "_linalg_eigvals"), (_finite, "a matrix that is not finite")),
        **dict.fromkeys(("div", "divide"), (_quotient, "the least integer divided by -1")),
    }
)


def _spread(value: Any) -> Any:
    """The argument; a tensor with repeated (expanded) elements is copied to contiguous storage, because some kernels take the first element's address
    for that of an array."""
    repeats = isinstance(value, torch.Tensor) and value.layout == torch.strided and 0 in value.stride() and value.numel() > 1
    return value.contiguous() if repeats else value


def _spread_all(value: Any) -> Any:
    return [_spread(item) for item in value] if isinstance(value, list) else _spread(value)


@cache
def _names_and_kinds(operator: Any) -> Mapping[str, bool]:
    """The operator's arguments in order, and whether each is an element type, a layout or a memory format."""
    kinds = ("ScalarType", "Layout", "MemoryFormat")
    return {argument.name: str(argument.real_type).removeprefix("Optional[").removesuffix("]") in kinds for argument in operator._schema.arguments}


def checked_call(operator: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """The operator's result.

    Raises:
        ValueError: for arguments with which the call would kill the process or never end. Errors of PyTorch pass through.
    """
    arguments = [_spread_all(argument) for argument in arguments]
    keywords = {name: _spread_all(argument) for name, argument in keywords.items()}
    names = _names_and_kinds(operator)
    given = {**dict(zip(names, arguments, strict=False)), **keywords}
    if any(names.get(name) and isinstance(argument, int) for name, argument in given.items()):
        raise ValueError("a number where a type of elements, a layout or a memory format belongs")  # PyTorch interprets any number as one
    check = _CHECKS.get(operator._schema.name.removeprefix("aten::"))
    if check is not None:
        try:
            fits = check[0](given)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"arguments of other kinds than {operator} takes") from error
        if not fits:
            raise ValueError(check[1])
    return operator(*arguments, **keywords)
