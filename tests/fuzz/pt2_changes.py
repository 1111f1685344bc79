"""Changes of .pt2 files that pass the first checks: one thing in a program replaced by another of its kind."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch

from tilewright.errors import TilewrightError
from tilewright.frontend.permitted_operators import PERMITTED
from tilewright.frontend.torch_operators import permitted_operator

UNARY = tuple(
    "relu tanh sigmoid neg abs exp sin cos erf silu gelu floor ceil round sqrt rsqrt log sign reciprocal softplus mish hardswish selu expm1 log1p atan trunc "
    "isnan isinf logical_not square elu celu leaky_relu clone contiguous detach flatten sort argmax sum mean max min all any amax prod std var numpy_T cumsum "
    "ones_like zeros_like rand_like dropout nonzero tril flip".split()
)
FAMILIES = (
    tuple(f"torch.ops.aten.{name}.default" for name in UNARY),
    tuple(f"torch.ops.aten.{name}.Tensor" for name in "add sub mul div remainder fmod eq lt ge ne bitwise_and".split())
    + tuple(f"torch.ops.aten.{name}.default" for name in "maximum minimum atan2 matmul logical_and outer mm bmm fmax copysign".split())
    + ("torch.ops.aten.pow.Tensor_Tensor",),
    tuple(f"torch.ops.aten.{name}" for name in "softmax.int log_softmax.int sum.dim_IntList mean.dim amax.default cumsum.default unsqueeze.default squeeze.dim".split()),
    tuple(f"torch.ops.aten.{name}" for name in "max_pool2d.default avg_pool2d.default adaptive_avg_pool2d.default adaptive_max_pool2d.default".split()),
    tuple(f"torch.ops.aten.{name}" for name in "topk.default kthvalue.default sort.default narrow.default select.int split.Tensor chunk.default".split()),
)  # fmt: skip
"""Operators that may replace each other."""
INTEGERS = (0, 1, -1, 2, 3, 5, 8, 31, 1 << 31, 1 << 40, -(1 << 63))


def graphs(value: Any) -> Iterator[Any]:
    """The graph of a program, and its subgraphs."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            if "nodes" in item and "tensor_values" in item:
                yield item
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)


def changed(members: dict[str, bytes], chance: random.Random) -> None:
    """One or two changes of the program, or of its tensors' contents."""
    for _ in range(chance.choice((1, 1, 2))):
        if chance.random() < 0.15:
            _contents(members, chance)
            continue
        name = next(name for name in members if name.endswith("models/model.json"))
        document = json.loads(members[name])
        within = [graph for graph in graphs(document["graph_module"]["graph"]) if graph["nodes"]]
        chance.choice(_CHANGES)(chance.choice(within), document, chance)
        members[name] = json.dumps(document).encode()


def _contents(members: dict[str, bytes], chance: random.Random) -> None:
    held = [name for name in members if "/weights/weight_" in name or "/constants/tensor_" in name]
    if not held:
        return
    name = chance.choice(held)
    generator = np.random.default_rng(chance.randrange(1 << 30))
    data = members[name]
    kind = chance.randrange(3)
    if kind == 0 or len(data) % 4:
        members[name] = generator.bytes(len(data))
        return
    numbers = generator.normal(size=len(data) // 4).astype(np.float32)
    if kind == 1:
        numbers[chance.randrange(len(numbers))] = chance.choice((np.nan, np.inf, 1e30, -0.0, 1e-40))
    members[name] = numbers.tobytes()


def _before(graph: Any, position: int) -> list[str]:
    """Values that exist before a node."""
    names = [given["as_tensor"]["name"] for given in graph["inputs"] if "as_tensor" in given]
    for node in graph["nodes"][:position]:
        for result in node["outputs"]:
            names += [result["as_tensor"]["name"]] if "as_tensor" in result else [part["name"] for part in result.get("as_tensors", ())]
    return [name for name in names if name in graph["tensor_values"]]


def _alike(graph: Any, names: list[str], name: str) -> list[str]:
    meta = graph["tensor_values"].get(name)
    return [other for other in names if meta is not None and graph["tensor_values"][other]["sizes"] == meta["sizes"]] or names


def _target(graph: Any, document: Any, chance: random.Random) -> None:
    nodes = [(node, family) for node in graph["nodes"] for family in FAMILIES if node["target"] in family]
    if nodes:
        node, family = chance.choice(nodes)
        node["target"] = chance.choice(family)


def _argument(graph: Any, document: Any, chance: random.Random) -> None:
    """Changes a number in a call."""
    held = [
        given["arg"]
        for node in graph["nodes"]
        for given in node["inputs"]
        if next(iter(given["arg"])) in ("as_int", "as_ints", "as_float", "as_bool")
    ]
    if not held:
        return
    argument = chance.choice(held)
    ((kind, value),) = argument.items()
    if kind == "as_int":
        argument[kind] = chance.choice((value + 1, value - 1, -value, *INTEGERS))
    elif kind == "as_ints" and value:
        value[chance.randrange(len(value))] += chance.choice((1, -1, 2, 1, -1, 1 << 40))
    elif kind == "as_float":
        argument[kind] = chance.choice((0.0, -1.0, 0.5, 1e30, "NaN", "Infinity", 1e-30))
    elif kind == "as_bool":
        argument[kind] = not value


def _edge(graph: Any, document: Any, chance: random.Random) -> None:
    position = chance.randrange(len(graph["nodes"]))
    tensors = [given["arg"]["as_tensor"] for given in graph["nodes"][position]["inputs"] if "as_tensor" in given["arg"]]
    before = _before(graph, position)
    if tensors and before:
        tensor = chance.choice(tensors)
        tensor["name"] = chance.choice(_alike(graph, before, tensor["name"]) if chance.random() < 0.8 else before)


def _between(graph: Any, document: Any, chance: random.Random) -> None:
    """Inserts a node before another, which reads its result."""
    position = chance.randrange(len(graph["nodes"]))
    tensors = [given["arg"]["as_tensor"] for given in graph["nodes"][position]["inputs"] if "as_tensor" in given["arg"]]
    if tensors:
        tensor = chance.choice(tensors)
        _insert(
            graph, position, f"torch.ops.aten.{chance.choice(UNARY)}.default", [("self", {"as_tensor": {"name": tensor["name"]}})], tensor["name"]
        )
        tensor["name"] = graph["nodes"][position]["outputs"][0]["as_tensor"]["name"]


def _insert(graph: Any, position: int, target: str, arguments: list[tuple[str, Any]], like: str) -> str:
    name = f"added_{len(graph['nodes'])}"
    inputs = [{"name": parameter, "arg": argument, "kind": 1} for parameter, argument in arguments]
    node: dict[str, Any] = {
        "target": target,
        "inputs": inputs,
        "outputs": [{"as_tensor": {"name": name}}],
        "metadata": {},
        "is_hop_single_tensor_return": None,
        "name": name,
    }
    graph["nodes"].insert(position, node)
    meta = graph["tensor_values"].get(like) or next(iter(graph["tensor_values"].values()))
    graph["tensor_values"][name] = copy.deepcopy(meta)
    return name


@cache
def _operators() -> tuple[Any, ...]:
    """Permitted overloads that return one tensor."""
    found = []
    for word in sorted(PERMITTED):
        name, _, only = word.partition(".")
        for overload in getattr(torch.ops.aten, name).overloads():
            try:
                operator: Any = permitted_operator(f"aten.{name}.{overload}")
            except TilewrightError:
                continue
            if only in ("", overload) and [str(result.type) for result in operator._schema.returns] == ["Tensor"]:
                found.append(operator)
    return tuple(found)


def _any_operator(graph: Any, document: Any, chance: random.Random) -> None:
    """Adds any operator that a file may name, with arguments of the right types, as a result of the program."""
    position = chance.randrange(len(graph["nodes"]) + 1)
    before = _before(graph, position)
    operator = chance.choice(_operators())
    made: dict[str, Callable[[], Any]] = {
        "Tensor": lambda: {"as_tensor": {"name": chance.choice(before)}},
        "List[Tensor]": lambda: {"as_tensors": [{"name": chance.choice(before)} for _ in range(2)]},
        "int": lambda: {"as_int": chance.choice((0, 1, 1, 2, -1, chance.choice(INTEGERS)))},
        "List[int]": lambda: {"as_ints": [chance.choice((0, 1, 1, 2, 3)) for _ in range(chance.randrange(1, 4))]},
        "float": lambda: {"as_float": chance.choice((0.5, 0.0, 1e-5, 1e30))},
        "number": lambda: chance.choice(({"as_int": 2}, {"as_float": 0.5}, {"as_int": 0})),
        "bool": lambda: {"as_bool": chance.random() < 0.5},
        "str": lambda: {"as_string": chance.choice(("mean", "sum", "amax", "reflect", "trunc", "floor", "fro"))},
    }
    arguments = []
    for parameter in operator._schema.arguments:
        kind = str(parameter.type).replace("SymInt", "int")
        if parameter.has_default_value() and (parameter.kwarg_only or chance.random() < 0.6):
            break
        plain = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional") else kind
        if plain not in made or not before:
            return
        arguments.append((parameter.name, made[plain]()))
    if before:
        name = _insert(graph, position, f"torch.ops.{operator}".replace("aten::", "aten."), arguments, chance.choice(before))
        _returned(graph, document, chance, name)


def _returned(graph: Any, document: Any, chance: random.Random, name: str = "") -> None:
    """Returns another value."""
    top = document["graph_module"]["graph"]
    if graph is not top:
        return
    name = name or chance.choice(_before(graph, len(graph["nodes"])))
    outputs = [position for position, result in enumerate(graph["outputs"]) if "as_tensor" in result]
    if outputs:
        position = chance.choice(outputs)
        old = graph["outputs"][position]["as_tensor"]["name"]
        graph["outputs"][position]["as_tensor"]["name"] = name
        for spec in document["graph_module"]["signature"]["output_specs"][position].values():
            if spec.get("arg", {}).get("as_tensor", {}).get("name") == old:
                spec["arg"]["as_tensor"]["name"] = name


def _sizes(graph: Any, document: Any, chance: random.Random) -> None:
    """Changes the size or type of a value as stated in the file."""
    meta = chance.choice(list(graph["tensor_values"].values()))
    if meta["sizes"] and chance.random() < 0.7:
        meta["sizes"][chance.randrange(len(meta["sizes"]))]["as_int"] = chance.choice((0, 1, 2, 3, 8, 16, 1 << 20))
    else:
        meta["dtype"] = chance.choice((5, 7, 8, 12, 4, 13, 6, 1, 10))


def _batch(graph: Any, document: Any, chance: random.Random) -> None:
    """Changes the first extent of an input."""
    names = [given["as_tensor"]["name"] for given in graph["inputs"] if "as_tensor" in given]
    own = [
        name for name in names if name in graph["tensor_values"] and not name.startswith(("p_", "b_", "c_")) and graph["tensor_values"][name]["sizes"]
    ]
    if own:
        graph["tensor_values"][chance.choice(own)]["sizes"][0]["as_int"] = chance.choice((0, 1, 2, 3, 7))


_CHANGES: tuple[Callable[[Any, Any, random.Random], None], ...] = (
    _target, _target, _target, _argument, _argument, _edge, _edge, _between, _between, _any_operator, _any_operator, _any_operator, _returned, _sizes, _batch,
)  # fmt: skip
