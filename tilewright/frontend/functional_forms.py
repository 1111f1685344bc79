"""Operators that packages and users register with PyTorch, and that write to arguments or return views of them, become functions: registered ones,
which copy what the operator writes to and return the copies, and copies back to the arguments, of which PyTorch makes a functional program. Dropouts
that return their argument itself become views of it.
"""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from tilewright.errors import UnsupportedOperator
from tilewright.frontend.places import described
from tilewright.frontend.schema_memory import Memory, arguments_of, copied_graph, letters, memory_of, nodes_in, rebuilt, writes, written_by
from tilewright.frontend.sizes import is_symbolic

NAMESPACE = "functional"
"""Of the registered functions, which have their operators' names: functional.package__store.default."""
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_FUNCTIONS: dict[str, torch._ops.OpOverload] = {}
"""By the operators' schemas."""
_DROPOUTS = tuple(getattr(torch.ops.aten, name).default for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"))


def with_aliases(program: ExportedProgram) -> ExportedProgram:
    """The program with views in the place of dropouts outside of training, which return their argument itself, or itself if nothing is written in it.
    Their schemas do not say so, and PyTorch's functional program takes their results for other tensors."""
    if not any(map(_is_identity, program.graph.nodes)) or not any(map(written_by, program.graph.nodes)):
        return program
    graph = copied_graph(program)
    for node in filter(_is_identity, graph.nodes):
        same = arguments_of(node)[0][1]
        node.target, node.args, node.kwargs = torch.ops.aten.alias.default, (same,), {}
        node.meta["val"] = same.meta["val"]  # a trace may describe it as a tensor of its own
    return rebuilt(program, graph)


def _is_identity(node: torch.fx.Node) -> bool:
    return node.target in _DROPOUTS and not arguments_of(node)[2][1]


def with_functions(program: ExportedProgram) -> ExportedProgram:
    """The program with functions in the place of such operators, or itself if it has none.

    Raises UnsupportedOperator for an operator that gets an argument to which it writes twice, whose result is no tensor or another view of what it
    writes, or of whose view a copy would show: something is written to its memory, or it is returned."""
    if not any(map(_is_foreign, program.graph.nodes)):
        return program
    graph = copied_graph(program)
    memory = memory_of(graph)
    for node in list(graph.nodes):
        if _is_foreign(node):
            _check_arguments(node, memory)
            _check_view(node, memory)
            _replace(node)
    return rebuilt(program, graph)


def _is_foreign(node: torch.fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in ("aten", "prims", "prim", NAMESPACE):
        return False
    return target._schema.is_mutable or any(map(letters, target._schema.returns))


def _check_arguments(node: torch.fx.Node, memory: Memory) -> None:
    """Raises UnsupportedOperator if memory that the operator writes may be that of two of its tensors, since a function gets copies."""
    tensors = [(writes(argument), leaf) for argument, value in arguments_of(node) for leaf in nodes_in(value)]
    for i, (write, one) in enumerate(tensors):
        others = [other for j, (_, other) in enumerate(tensors) if j != i and memory[one] & memory[other]]
        if write and not all(_are_apart(one.meta["val"], other.meta["val"]) for other in others):
            raise UnsupportedOperator(f"{described(node)} gets memory to which it writes as two arguments", "pass tensors that share no memory")


def _are_apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one of two tensors in one memory ends before the other begins."""
    spans = []
    for tensor in (one, other):
        numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
        if any(map(is_symbolic, numbers)) or tensor.dtype is not one.dtype:
            return False
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append((tensor.storage_offset(), tensor.storage_offset() + last))
    return spans[0][1] < spans[1][0] or spans[1][1] < spans[0][0]


def _check_view(node: torch.fx.Node, memory: Memory) -> None:
    """Raises UnsupportedOperator if a copy could be told from a view that the operator returns of an argument to which it does not write."""
    returned = {letter for result in node.target._schema.returns for letter in letters(result)}  # type: ignore[union-attr]
    if not any(returned & letters(argument) and not writes(argument) for argument, _ in arguments_of(node)):
        return
    nodes = list(node.graph.nodes)
    remedy = "return a clone() of the view"
    for later in nodes[nodes.index(node) + 1 :]:
        if any(memory[leaf] & memory[node] for leaf in written_by(later)):
            raise UnsupportedOperator(f"{described(node)} returns a view of memory that {described(later)} writes", remedy)
    shown = [result for result in nodes[-1].all_input_nodes if memory[result] & memory[node]]
    if shown and (len(shown) > 1 or any(place.op == "placeholder" for place in memory[node])):
        raise UnsupportedOperator(f"{described(node)} returns a view, and the model returns it or its memory", remedy)


def _replace(node: torch.fx.Node) -> None:
    """f(x, y) → made = function(x, y); x.copy_(made[-1]), and in the place of the result made[0] or, where it is x, an alias of x."""
    graph, target, arguments = node.graph, node.target, arguments_of(node)
    assert isinstance(target, torch._ops.OpOverload)
    function = _function(target)
    changed = [(argument, leaf) for argument, value in arguments if writes(argument) for leaf in nodes_in(value)]
    returns, value = target._schema.returns, node.meta.get("val")
    results = list(value) if isinstance(value, (list, tuple)) else [value] if returns else []
    where = {key: described for key, described in node.meta.items() if key != "val"}

    def call(called: Any, *given: Any, value: Any, keywords: Any = None) -> torch.fx.Node:
        made = graph.call_function(called, given, keywords or {})
        made.meta = {**where, "val": value}
        return made

    with graph.inserting_before(node):
        made = call(function, *node.args, keywords=node.kwargs, value=[*results, *(leaf.meta["val"] for _, leaf in changed)])
        for i, (_, leaf) in enumerate(changed, len(results)):
            call(torch.ops.aten.copy_.default, leaf, call(operator.getitem, made, i, value=leaf.meta["val"]), value=leaf.meta["val"])
    several = isinstance(value, (list, tuple))
    for user in list(node.users) if several else [node] if returns else []:
        number: int = user.args[1] if several else 0  # type: ignore[assignment]
        same = _returned(node, number, results[number])
        user.target, user.args = (operator.getitem, (made, number)) if same is None else (torch.ops.aten.alias.default, (same,))
        user.kwargs = {}
    if several or not returns:
        graph.erase_node(node)


def _returned(node: torch.fx.Node, number: int, result: Any) -> torch.fx.Node | None:
    """The argument to which the operator writes and that it returns as this result; None if it shares memory with none. Raises UnsupportedOperator
    for other views of such arguments."""
    returns = node.target._schema.returns  # type: ignore[union-attr]
    returned = letters(returns[min(number, len(returns) - 1)])  # a list is one return
    same = [leaf for argument, value in arguments_of(node) if writes(argument) and letters(argument) & returned for leaf in nodes_in(value)]
    if same and (len(same) > 1 or any(f(same[0].meta["val"]) != f(result) for f in (torch.Tensor.size, torch.Tensor.stride))):
        raise UnsupportedOperator(f"{described(node)} returns a view of an argument to which it writes", "return the argument itself, or a clone()")
    return same[0] if same else None


def _function(target: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """The registered function of the operator's arguments: its results, copied if they are views, and the changed copies of those to which it writes.
    Raises UnsupportedOperator for an operator that returns something else than tensors."""
    schema, text = target._schema, str(target._schema)
    if text in _FUNCTIONS:
        return _FUNCTIONS[text]
    kinds = [str(result.type) for result in schema.returns]
    if kinds != ["List[Tensor]"] and any(kind != "Tensor" for kind in kinds):
        raise UnsupportedOperator(f"{target} writes to an argument and returns {', '.join(kinds)}", "let it return tensors")
    taken = re.sub(r"Tensor\([^)]*\)", "Tensor", text[text.index("(") :].rpartition(" -> ")[0])
    name = re.sub(r"\W+", "__", text[: text.index("(")])
    alike = sum(str(other).split(".")[1].startswith(name) for other in _FUNCTIONS.values())  # registered before with another schema
    name += f"__{alike}" if alike else ""
    _LIBRARY.define(f"{name}{taken} -> Tensor[]")
    views = any(map(letters, schema.returns))
    packet, overload = schema.name.partition("::")[2], schema.overload_name or "default"

    def function(*arguments: Any, **keywords: Any) -> list[torch.Tensor]:
        positional, named, changed = [], {}, []
        for i, argument in enumerate(schema.arguments):
            value = arguments[i] if i < len(arguments) else keywords.get(argument.name, argument.default_value)
            if writes(argument):
                value = pytree.tree_map_only(torch.Tensor, torch.clone, value)
                changed += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            if argument.kwarg_only:
                named[argument.name] = value
            else:
                positional.append(value)
        results = getattr(getattr(getattr(torch.ops, target.namespace), packet), overload)(*positional, **named)
        results = [] if results is None else results if isinstance(results, (list, tuple)) else [results]
        return [*(r.clone() if views else r for r in results), *changed]

    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    _FUNCTIONS[text] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return _FUNCTIONS[text]
