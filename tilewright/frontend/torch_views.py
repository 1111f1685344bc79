"""How results of a functional program are views of one another: the calls of ATen's view operators that lead from the memory to the view.

PyTorch's way to a functional program makes every view of what was written again, from the tensor that holds the memory, so that the program's own
nodes say what shares memory with what at its end.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tilewright.frontend.sizes import Sizes, is_symbolic
from tilewright.frontend.tensor_memory import storage_of
from tilewright.frontend.torch_call import bound
from tilewright.frontend.torch_operators import VIEWS, replayed

_FLAT = frozenset({torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default})
"""Views that a call makes again by torch.reshape. The second one is what torch.reshape makes of its own copy, which what is written to a part of the
result changes too."""
Calls = tuple[tuple[str, tuple[Any, ...]], ...]
"""Calls of view operators, one after another: the operator's name and its arguments after the tensor, element types by their names."""


def view_of(node: torch.fx.Node, sizes: Sizes, ends: Collection[torch.fx.Node] = ()) -> tuple[torch.fx.Node, Calls]:
    """The node that holds the memory of a node's result, or the nearest one of `ends`, and the calls that make the result of that node's."""
    calls: list[tuple[str, tuple[Any, ...]]] = []
    while node not in ends and (made := step(node, sizes)) is not None:
        node, call = made
        calls.insert(0, call)
    return node, tuple(calls)


def step(node: torch.fx.Node, sizes: Sizes) -> tuple[torch.fx.Node, tuple[str, tuple[Any, ...]]] | None:
    """The node of which this one is a view, and the call that makes it; None if it has memory of its own."""
    source, *rest = node.args if node.op == "call_function" and node.args else (None,)
    if not isinstance(source, torch.fx.Node):
        return None
    if node.target is operator.getitem:
        return _piece(source, int(rest[0]), sizes)  # type: ignore[arg-type]
    if not isinstance(node.target, torch._ops.OpOverload) or node.target not in _FLAT and str(node.target).removeprefix("aten.") not in VIEWS:
        return None
    if storage_of(node.meta["val"]) != storage_of(source.meta["val"]):
        return None  # a copy, as torch.reshape may make
    arguments = numbers(rest, sizes)
    if any(isinstance(leaf, torch.fx.Node) for leaf in pytree.tree_leaves(arguments)):
        return None  # select, for example, takes a tensor as its position
    # a view of a caller's tensor with other strides than the example's is a copy for some shapes, as of torch.reshape
    name = "aten.reshape.default" if node.target in _FLAT else str(node.target)
    return source, (name, tuple(tuple(a) if isinstance(a, (list, tuple)) else a for a in arguments))


def _piece(pieces: torch.fx.Node, number: int, sizes: Sizes) -> tuple[torch.fx.Node, tuple[str, tuple[Any, ...]]] | None:
    """One result of an operator that returns several views of its first argument."""
    if pieces.target not in (torch.ops.aten.split.Tensor, torch.ops.aten.split_with_sizes.default, torch.ops.aten.unbind.int):
        return None
    source = pieces.args[0]
    assert isinstance(source, torch.fx.Node)
    dim = bound(pieces.target, pieces.args, pieces.kwargs)[-1]
    if pieces.target is torch.ops.aten.unbind.int:
        return source, ("aten.select.int", (dim, number))
    ends = [0, *accumulate(sizes.shape(piece, pieces.name)[dim] for piece in pieces.meta["val"])]
    return source, ("aten.slice.Tensor", (dim, *list(pairwise(ends))[number]))


def numbers(arguments: Any, sizes: Sizes) -> Any:
    """Arguments of a call with numbers for symbolic ones, and names for element types; nodes of tensors stay."""

    def plain(argument: Any) -> Any:
        value = argument.meta.get("val") if isinstance(argument, torch.fx.Node) else argument
        if isinstance(value, torch.dtype):
            return str(value).removeprefix("torch.")
        return sizes.number(value, "a view") if is_symbolic(value) else argument

    return pytree.tree_map(plain, arguments)


def is_view(of: torch.Tensor, calls: Sequence[tuple[str, tuple[Any, ...]]], wanted: tuple[tuple[int, ...], torch.dtype]) -> bool:
    """Whether the calls make a view of this shape and type of a tensor with these strides, rather than a copy or an error."""
    try:
        view = replayed(of, calls)
    except RuntimeError:
        return False
    return (tuple(view.shape), view.dtype) == wanted and storage_of(view) == storage_of(of)
