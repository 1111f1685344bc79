"""`as_strided`: a tensor of elements at given places in another's memory. Kernels know no strides but those of row-major tensors, so that it becomes
an affine map of indices, or if that is not possible a gather, by the strides that PyTorch gives the tensor. Those of a computed tensor follow from
the inputs', which calls then have to repeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tilewright.errors import InvalidModel
from tilewright.frontend.places import place_of
from tilewright.frontend.reading import LARGEST_COMPUTED
from tilewright.frontend.schema_memory import copied_graph, memory_of, rebuilt, written_by
from tilewright.frontend.sizes import Sizes, is_symbolic
from tilewright.frontend.torch_call import bound
from tilewright.frontend.torch_views import numbers, step

READ = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_copy.default)
WRITTEN = torch.ops.aten.as_strided_scatter.default
STRIDED = (*READ, WRITTEN)


@dataclass(frozen=True)
class Memory:
    """Shape, strides and the place of the first element, in elements of the storage."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    def places(self) -> torch.Tensor:
        """The place of each element."""
        places = torch.full(self.shape, self.start, dtype=torch.int64)
        for dim, (size, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            places += (torch.arange(size) * stride).reshape(-1, *(1,) * (len(self.shape) - dim - 1))
        return places


@dataclass(frozen=True)
class Affine:
    """An index map: of a tensor with its dimensions in this order, and reshaped to `shape`, the element at `starts` + `steps` i."""

    order: tuple[int, ...]
    shape: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]


@dataclass(frozen=True)
class Elements:
    """What `as_strided` reads: of the result of a node, which lies at `held`, the elements at `wanted`."""

    base: torch.fx.Node
    held: Memory
    wanted: Memory
    place: str

    @cached_property
    def positions(self) -> torch.Tensor | None:
        """The positions of the elements, counted along the base's rows; None if it lacks some of them."""
        for memory in (self.held, self.wanted):
            if 8 * prod(memory.shape) > LARGEST_COMPUTED:
                raise InvalidModel(f"as_strided at {self.place} needs a table of {prod(memory.shape):,} places", "read slices, or windows by unfold")
        wanted = self.wanted.places()
        held, order = self.held.places().flatten().sort()
        at = torch.searchsorted(held, wanted).clamp_(max=max(held.numel() - 1, 0))
        if wanted.numel() and not (held.numel() and torch.equal(held[at], wanted)):
            return None
        return order[at] if wanted.numel() else wanted

    @cached_property
    def affine(self) -> Affine | None:
        """The map, if each stride is so many steps along each dimension of the base, and none leads beyond the end of one; dimensions that are one
        run of memory are one for that where necessary."""
        held, wanted = self.held, self.wanted
        order = sorted(range(len(held.shape)), key=lambda dim: (-held.strides[dim], -held.shape[dim]))
        dims = [(held.shape[dim], held.strides[dim]) for dim in order if held.shape[dim] != 1]
        inner = 1
        for extent, stride in reversed(dims):
            if stride < inner:
                return None
            inner = stride * extent

        def counted(distance: int) -> list[int] | None:
            """Steps along each dimension."""
            steps = []
            for _, stride in dims:
                count, distance = divmod(distance, stride)
                steps.append(count)
            return steps if not distance else None

        empty = not prod(wanted.shape)
        if wanted.start < held.start and not empty:
            return None
        while True:
            starts = counted(0 if empty else wanted.start - held.start)
            columns = [counted(0 if size <= 1 or empty else stride) for size, stride in zip(wanted.shape, wanted.strides, strict=True)]
            if starts is None or any(column is None for column in columns):
                return None
            rows = tuple(tuple(column[j] for column in columns if column is not None) for j in range(len(dims)))
            ends = [
                start + sum(step * (size - 1) for step, size in zip(row, wanted.shape, strict=True)) for start, row in zip(starts, rows, strict=True)
            ]
            beyond = [j for j, (extent, _) in enumerate(dims) if ends[j] >= extent and not empty]
            if not beyond:
                return Affine(tuple(order), tuple(extent for extent, _ in dims), rows, tuple(starts))
            j = beyond[-1]
            if j == 0 or dims[j - 1][1] != prod(dims[j]):
                return None
            dims[j - 1 : j + 1] = [(dims[j - 1][0] * dims[j][0], dims[j][1])]


def read_by(node: torch.fx.Node, sizes: Sizes) -> Elements:
    """What an `as_strided` reads: elements of its operand, or if that lacks some of them of the tensor of which it is a view.

    Raises InvalidModel for elements that are in neither, and for `as_strided_scatter`."""
    place = place_of(node) or "an unknown place"
    if node.target is WRITTEN:
        raise InvalidModel(f"{node.target} at {place} writes by strides", "write to a slice, or by indices")
    base, size, stride, offset = numbers(bound(node.target, node.args, node.kwargs), sizes)  # type: ignore[arg-type]
    wanted = Memory(tuple(size), tuple(stride), _memory(base, sizes).start if offset is None else offset)
    while True:
        found = Elements(base, _memory(base, sizes), wanted, place)
        if found.affine is not None or found.positions is not None:
            return found
        source = step(base, sizes)
        if source is None:
            raise InvalidModel(f"{node.target} at {place} reads memory outside of its tensor", "give it the tensor to which that memory belongs")
        base = source[0]


def _memory(node: torch.fx.Node, sizes: Sizes) -> Memory:
    value = node.meta["val"]
    *strides, start = (int(sizes.number(n, node.name)) if is_symbolic(n) else n for n in (*value.stride(), value.storage_offset()))
    return Memory(sizes.shape(value, node.name), tuple(strides), start)


def with_copies(program: ExportedProgram) -> ExportedProgram:
    """The program with a copy for each `as_strided` of memory that was written before, since of such memory PyTorch's functional program keeps the
    elements but not the strides.

    Raises InvalidModel for memory that is written while `as_strided` reads it, and for tensors that do not fill theirs."""
    if not any(node.target in READ for node in program.graph.nodes):
        return program
    graph = copied_graph(program)
    memory = memory_of(graph)
    nodes = list(graph.nodes)
    writes = [(number, node, target) for number, node in enumerate(nodes) for target in written_by(node)]
    changed = False
    for number, node in enumerate(nodes):
        if node.target not in READ:
            continue
        shared = [(later, write) for later, write, target in writes if memory[target] & memory[node]]
        bases = [base for base in (node.args[0], *memory[node]) if isinstance(base, torch.fx.Node)]
        if any(later > number for later, _ in shared) or shared and not any(_read_of_copy(node, base) for base in bases):
            at = place_of(shared[-1][1]) or "an unknown place"
            raise InvalidModel(f"{shared[-1][1].target} at {at} writes to a tensor that as_strided reads", "give as_strided a clone()")
        changed = changed or bool(shared)
    return rebuilt(program, graph) if changed else program


def _read_of_copy(node: torch.fx.Node, base: torch.fx.Node) -> bool:
    """x.as_strided(...) → base.permute(order).clone().as_strided(...), in the order of the memory; False for a base that does not fill its memory, or
    lacks an element that is read."""
    x, size, stride, offset = bound(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    value = base.meta["val"]
    if not isinstance(value, torch.Tensor):
        return False
    offset = x.meta["val"].storage_offset() if offset is None else offset
    if any(is_symbolic(n) or isinstance(n, torch.fx.Node) for n in (offset, value.storage_offset())):
        return False

    def about(number: Any) -> int:
        number = number.meta["val"] if isinstance(number, torch.fx.Node) else number
        return int(number.node.hint if is_symbolic(number) else number)

    first = offset - value.storage_offset()
    if first < 0 or first + sum((about(extent) - 1) * about(distance) for extent, distance in zip(size, stride, strict=True)) >= about(value.numel()):
        return False
    order = sorted(range(value.dim()), key=lambda dim: (-about(value.stride(dim)), -about(value.shape[dim])))
    turned = value.permute(order)
    inner: Any = 1
    for extent, distance in reversed(list(zip(turned.shape, turned.stride(), strict=True))):
        if not statically_known_true(extent == 1):
            if not statically_known_true(distance == inner):
                return False
            inner = inner * extent
    with node.graph.inserting_before(node):
        for target, arguments, made in (
            (torch.ops.aten.permute.default, (order,), turned),
            (torch.ops.aten.clone.default, (), turned.clone(memory_format=torch.contiguous_format)),
        ):
            base = node.graph.call_function(target, (base, *arguments), {} if arguments else {"memory_format": torch.contiguous_format})
            base.meta = {**{key: described for key, described in node.meta.items() if key != "val"}, "val": made}
    node.args, node.kwargs = (base, size, stride, first), {}
    return True


def fixed(base: torch.fx.Node, node: torch.fx.Node, leaves: dict[torch.fx.Node, int], sizes: Sizes) -> dict[int, tuple[tuple[int, ...], int | None]]:
    """For user inputs, by their numbers, the strides that calls have to repeat, and the place of the first element if that matters too: those of the
    tensor that `as_strided` reads, or of all where it is computed."""
    if base.op == "placeholder" and base not in leaves:
        return {}
    absolute = bound(node.target, node.args, node.kwargs)[3] is not None  # type: ignore[arg-type]
    tensors: dict[torch.fx.Node, Any] = {base: None} if base in leaves else {n: None for n in leaves}
    memory = {leaves[n]: _memory(n, sizes) for n in tensors}
    return {leaf: (at.strides, at.start if absolute and base in leaves else None) for leaf, at in memory.items()}
