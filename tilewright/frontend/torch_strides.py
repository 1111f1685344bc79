"""`as_strided`: a tensor of elements at given places in another's memory. Kernels know no strides but those of row-major tensors, so that it becomes
a gather, by the strides that PyTorch gives the tensor. Those of a computed tensor follow from the inputs', which calls then have to repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilewright.errors import InvalidModel
from tilewright.frontend.places import place_of
from tilewright.frontend.reading import LARGEST_COMPUTED
from tilewright.frontend.sizes import Sizes, is_symbolic
from tilewright.frontend.torch_call import bound
from tilewright.frontend.torch_views import numbers, step

STRIDED = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_copy.default, torch.ops.aten.as_strided_scatter.default)


def gathered(node: torch.fx.Node, sizes: Sizes) -> tuple[torch.fx.Node, torch.Tensor]:
    """The node of whose result `as_strided` reads elements, and the position of each of these, counted along its rows: the operand, or if that lacks
    some of them the tensor of which it is a view.

    Raises InvalidModel for elements that are in neither, and for `as_strided_scatter`."""
    place = place_of(node) or "an unknown place"
    if node.target is STRIDED[-1]:
        raise InvalidModel(f"{node.target} at {place} writes by strides", "write to a slice, or by indices")
    base, size, stride, offset = numbers(bound(node.target, node.args, node.kwargs), sizes)  # type: ignore[arg-type]
    _check_table(torch.Size(size).numel(), place)
    wanted = _places(size, stride, _memory(base, sizes)[1] if offset is None else offset)
    while True:
        shape = sizes.shape(base.meta["val"], base.name)
        strides, start = _memory(base, sizes)
        _check_table(torch.Size(shape).numel(), place)
        held, order = _places(shape, strides, start).flatten().sort()
        at = torch.searchsorted(held, wanted).clamp_(max=max(held.numel() - 1, 0))
        if not wanted.numel() or (held.numel() and torch.equal(held[at], wanted)):
            return base, order[at] if wanted.numel() else wanted
        source = step(base, sizes)
        if source is None:
            raise InvalidModel(f"{node.target} at {place} reads memory outside of its tensor", "give it the tensor to which that memory belongs")
        base = source[0]


def _check_table(elements: int, place: str) -> None:
    if 8 * elements > LARGEST_COMPUTED:
        raise InvalidModel(f"as_strided at {place} needs a table of {elements:,} places", "read slices, or windows by unfold")


def _memory(node: torch.fx.Node, sizes: Sizes) -> tuple[tuple[int, ...], int]:
    """The strides of a node's result and the place of its first element, in elements."""
    value = node.meta["val"]
    *strides, start = (int(sizes.number(n, node.name)) if is_symbolic(n) else n for n in (*value.stride(), value.storage_offset()))
    return tuple(strides), start


def _places(shape: Sequence[int], strides: Sequence[int], start: int) -> torch.Tensor:
    """The place in memory of each element."""
    places = torch.full(tuple(shape), start, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        places += (torch.arange(size) * stride).reshape(-1, *(1,) * (len(shape) - dim - 1))
    return places


def fixed(base: torch.fx.Node, node: torch.fx.Node, leaves: dict[torch.fx.Node, int], sizes: Sizes) -> dict[int, tuple[tuple[int, ...], int | None]]:
    """For user inputs, by their numbers, the strides that calls have to repeat, and the place of the first element if that matters too: those of the
    tensor that `as_strided` reads, or of all where it is computed."""
    if base.op == "placeholder" and base not in leaves:
        return {}
    absolute = bound(node.target, node.args, node.kwargs)[3] is not None  # type: ignore[arg-type]
    tensors: dict[torch.fx.Node, Any] = {base: None} if base in leaves else {n: None for n in leaves}
    memory = {leaves[n]: _memory(n, sizes) for n in tensors}
    return {leaf: (strides, start if absolute and base in leaves else None) for leaf, (strides, start) in memory.items()}
