"""Which traced programs can be read as they are: those whose operators all have handlers, and whose writes in place nothing else sees.

PyTorch's own way to a functional program traces all of it once more, which takes as long as the export. A program that was traced in this process
describes its tensors by stand-ins, and those that share memory in the model share it there. That of a file does not.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from tilewright.errors import InvalidModel
from tilewright.frontend.places import described
from tilewright.frontend.schema_memory import arguments_of, memory_of, writes, written_by
from tilewright.frontend.sizes import is_symbolic
from tilewright.frontend.tensor_memory import storage_of

TRACED = "tilewright.traced"
"""Key in a program's metadata that says that it was traced in this process."""
STATEMENTS = ("_assert_", "sym_constrain")
"""How the names of operators without a result begin."""


def written(node: torch.fx.Node) -> torch.fx.Node | None:
    """The node whose result this one changes in place and returns; None for others."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable or not isinstance(node.args[0], torch.fx.Node):
        return None
    return node.args[0]


def out_of_place(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The operator itself, or for one that changes its first argument and nothing else (add_) the one that returns the result (add)."""
    if not target._schema.is_mutable:
        return target
    if target.namespace != "aten":
        return None
    first, *others = map(writes, target._schema.arguments)
    name, overload = str(target).removeprefix("aten.").split(".")
    if not first or any(others) or not name.endswith("_"):
        return None
    return getattr(getattr(torch.ops.aten, name.removesuffix("_"), None), overload, None)


def is_readable(program: ExportedProgram, handled: Collection[str]) -> bool:
    """Whether a program traced in this process needs no decomposition: every operator, or the one that does the same out of place, is in `handled`;
    what is written in place is a result that no tensor shares memory with yet; and no output shares memory with an input or another output."""
    # first, since what vmap batches, whose operators have no handlers, has no storage to ask for
    if not all(_has_handler(node, handled) for node in program.graph.nodes if node.op not in ("placeholder", "output")):
        return False
    makers: dict[int, list[torch.fx.Node]] = {}
    for node in program.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")) if node.op != "output" else ():
            if isinstance(value, torch.Tensor):
                if value.layout is not torch.strided:
                    return False
                makers.setdefault(storage_of(value), []).append(node)
    outputs = {result for node in program.graph.nodes if node.op == "output" for result in node.all_input_nodes}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if written(node) is not None:
            alike = makers[storage_of(value)]
            if not _is_alone(node, alike[: alike.index(node)]):
                return False
        if node in outputs and node.op != "placeholder" and isinstance(value, torch.Tensor):
            if any(maker.op == "placeholder" or maker in outputs for maker in makers[storage_of(value)] if maker is not node):
                return False
    return True


def _has_handler(node: torch.fx.Node, handled: Collection[str]) -> bool:
    if node.target is operator.getitem or is_symbolic(node.meta.get("val")):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = str(node.target).removeprefix("aten.")
    if name.startswith(STATEMENTS):
        return True
    found = out_of_place(node.target)
    return not trains(node) and found is not None and str(found).removeprefix("aten.") in handled


def check_writes(program: ExportedProgram) -> None:
    """Raises InvalidModel for writes in place of which PyTorch's functional program would make something else: to a tensor of which several elements
    lie in the same memory (one that was expanded), where it would add up what is written to one place; to windows of a tensor, where it would lose
    what is in none of them; and to the factor or the result of an `einsum` of one tensor, whose schema does not say that it is a view."""
    writers = [node for node in program.graph.nodes if written_by(node)]
    for node in writers:
        if written(node) is not None and isinstance(value := node.meta["val"], torch.Tensor) and _overlaps(value):
            cause = f"{described(node)} writes to a tensor of which several elements lie in the same memory"
            raise InvalidModel(cause, "write to it before it is expanded")
    if writers:
        _check_views(program.graph)


def _check_views(graph: torch.fx.Graph) -> None:
    memory = memory_of(graph)
    unfolded: set[torch.fx.Node] = set()
    permuted: frozenset[torch.fx.Node] = frozenset()
    """Whose memory an `einsum` of one factor shares."""
    for node in graph.nodes:
        for tensor in written_by(node):
            if tensor in unfolded:
                raise InvalidModel(f"{described(node)} writes to windows of a tensor that leave parts of it out", "write to slices of it")
            if memory[tensor] & permuted:
                raise InvalidModel(f"{described(node)} writes to what an einsum of one tensor takes or returns", "use permute instead of the einsum")
        if _leaves_out(node) or any(source in unfolded and memory[source] & memory[node] for source in node.all_input_nodes):
            unfolded.add(node)
        if node.target is torch.ops.aten.einsum.default and len(node.all_input_nodes) == 1 and not _sums(node.args[0]):
            permuted = permuted.union(memory[node], memory[node.all_input_nodes[0]])


def _leaves_out(node: torch.fx.Node) -> bool:
    """Whether there may be elements that no window of an `unfold` holds."""
    if node.target is not torch.ops.aten.unfold.default:
        return False
    x, dim, size, step = (value for _, value in arguments_of(node))
    extents = x.meta["val"].shape or (1,)
    numbers = (extents[dim], size, step)
    if any(is_symbolic(number) or isinstance(number, torch.fx.Node) for number in numbers):
        return True
    return bool(step > size or (extents[dim] - size) % step != 0)


def _sums(equation: Any) -> bool:
    """Whether an `einsum` of one tensor sums over an index, and so returns no view."""
    given, arrow, returned = equation.replace(" ", "").partition("->")
    return set(given) != set(returned) if arrow else len(set(given.replace("...", ""))) < len(given.replace("...", ""))


def _overlaps(value: torch.Tensor) -> bool:
    """Whether elements may lie in the same memory; of tensors with symbolic sizes whether one was expanded."""
    pairs = [(stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if is_symbolic(size) or size > 1]
    if any(map(is_symbolic, (*value.stride(), *value.shape))):
        return any(not is_symbolic(stride) and stride == 0 for stride, _ in pairs)
    end = 0
    for stride, size in sorted(pairs):
        if stride <= end:
            return value.numel() > 0
        end += stride * (size - 1)
    return False


def trains(node: torch.fx.Node) -> bool:
    """Whether a norm is in training mode, in which it changes its statistics, although its schema does not say so."""
    schema = getattr(node.target, "_schema", None)
    named = {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)} if schema else {}
    return bool(named.get("training") or (named.get("use_input_stats") and named.get("running_mean") is not None))


def _is_alone(node: torch.fx.Node, makers: list[torch.fx.Node]) -> bool:
    """Whether the memory that a node writes belongs, of those before it that share it, to the result of one operator and to what others made of it in
    place, all of one type."""
    first = [maker for maker in makers if written(maker) is None]
    types = {value.dtype for source in node.all_input_nodes if isinstance(value := source.meta.get("val"), torch.Tensor)}
    return len(first) == 1 and first[0].op == "call_function" and types == {node.meta["val"].dtype}
