"""``Signature``: how an executable is called. It holds only what a call needs, all of it representable in JSON.

A `Tree` is the structure of nested arguments: tuples, lists, dictionaries and named tuples over leaves, as in `torch.utils._pytree`. Other registered
containers keep their type within the process, and become dictionaries when read from JSON.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from tilewright.errors import InvalidArtifact, InvalidInput
from tilewright.frontend.imported import Imported, Output, Tail
from tilewright.frontend.tensor_memory import is_nowhere
from tilewright.ir.dtypes import ELEMENT_TYPES, of_torch
from tilewright.runtime.fields import Field

CONSTANT_TYPES = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Tree:
    """kind: "leaf", "tuple", "list", "dict", "namedtuple" or "registered". `keys` are those of a dictionary, or the field names."""

    kind: str
    children: tuple[Tree, ...] = ()
    keys: tuple[Any, ...] = ()
    type_name: str = ""
    registered: Any = field(default=None, compare=False)
    """(type, context) of another container registered with `torch.utils._pytree`."""

    @property
    def leaves(self) -> int:
        return 1 if self.kind == "leaf" else sum(child.leaves for child in self.children)


LEAF = Tree("leaf")


def tree_of(spec: Any) -> Tree:
    """The tree of a `torch.utils._pytree.TreeSpec`."""
    if spec.is_leaf():
        return LEAF
    specs = spec.children_specs if not callable(getattr(spec, "children", None)) else spec.children()
    children = tuple(tree_of(child) for child in specs)
    kind, context = spec.type, spec.context
    if kind is tuple:
        return Tree("tuple", children)
    if kind is list:
        return Tree("list", children)
    if kind in (dict, OrderedDict):
        return Tree("dict", children, tuple(context), registered=kind)
    if kind is defaultdict:
        return Tree("dict", children, tuple(context[1]), registered=dict)
    if kind is namedtuple or hasattr(context, "_fields"):
        named = context if hasattr(context, "_fields") else kind
        return Tree("namedtuple", children, tuple(named._fields), named.__name__, registered=named)
    keys = _field_names(context, len(children))
    return Tree("registered", children, keys, f"{kind.__module__}.{kind.__qualname__}", registered=(kind, context))


def _field_names(context: Any, count: int) -> tuple[str, ...]:
    for candidate in (context, *(context if isinstance(context, (tuple, list)) else ())):
        if isinstance(candidate, (tuple, list)) and len(candidate) == count and all(isinstance(k, str) for k in candidate):
            return tuple(candidate)
    return tuple(str(i) for i in range(count))


def unflatten(tree: Tree, leaves: Iterator[Any]) -> Any:
    """The nested value with a tree's structure and the given leaves, in order."""
    if tree.kind == "leaf":
        return next(leaves)
    values = [unflatten(child, leaves) for child in tree.children]
    if tree.kind == "tuple":
        return tuple(values)
    if tree.kind == "list":
        return values
    if tree.kind == "namedtuple":
        named = tree.registered or namedtuple(tree.type_name, tree.keys)
        return named(*values)
    if tree.kind == "registered" and tree.registered is not None:
        from torch.utils._pytree import SUPPORTED_NODES

        kind, context = tree.registered
        return SUPPORTED_NODES[kind].unflatten_fn(values, context)
    return (tree.registered or dict)(zip(tree.keys, values, strict=True))


def flatten(tree: Tree, value: Any, place: str) -> Iterator[Any]:
    """The leaves of a nested value that has the tree's structure.

    Raises:
        InvalidInput: if it differs; the message names the place.
    """
    if tree.kind == "leaf":
        yield value
        return
    if tree.kind == "registered":
        from torch.utils._pytree import SUPPORTED_NODES

        node = SUPPORTED_NODES.get(type(value))
        values = list(node.flatten_fn(value)[0]) if node is not None else None
    elif tree.kind == "dict":
        values = [value[key] for key in tree.keys] if isinstance(value, Mapping) and set(value) == set(tree.keys) else None
    else:
        wanted = list if tree.kind == "list" else tuple
        values = list(value) if isinstance(value, wanted) else None
    if values is None or len(values) != len(tree.children):
        expected = tree.kind + (f" with keys {list(tree.keys)}" if tree.keys else f" of {len(tree.children)}")
        got = type(value).__name__
        if isinstance(value, Mapping):
            got += f" with keys {list(value)}"
        elif isinstance(value, (tuple, list)):
            got += f" of {len(value)}"
        raise InvalidInput(f"input {place}: expected a {expected}, got a {got}", "pass inputs nested as at compilation")
    for index, (child, item) in enumerate(zip(tree.children, values, strict=True)):
        key = repr(tree.keys[index]) if tree.kind == "dict" else index
        yield from flatten(child, item, f"{place}[{key}]")


@dataclass(frozen=True)
class InputLeaf:
    """One leaf of the arguments: the graph input `name`, or, if `name` is empty, a `constant` for which the model was compiled. With a `dtype` the
    constant is a tensor, whose elements `constant` lists in order.

    `place` is the leaf in the caller's terms, such as "args[0]" or "kwargs['mask']". `strides`: those that a tensor has to have, with `offset` its
    place in its storage, if the model depends on them (`as_strided`)."""

    place: str
    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    constant: Any = None
    strides: tuple[int, ...] | None = None
    offset: int | None = None

    @classmethod
    def of_constant(cls, place: str, value: Any) -> InputLeaf:
        if not isinstance(value, torch.Tensor):
            return cls(place, constant=value)
        return cls(place, "", tuple(value.shape), of_torch(value.dtype), tuple(value.flatten().tolist()))

    def example(self) -> Any:
        """The constant as a caller passes it."""
        if not self.dtype:
            return self.constant
        return torch.tensor(self.constant, dtype=getattr(torch, ELEMENT_TYPES[self.dtype].torch)).reshape(self.shape)

    def admits(self, value: Any) -> bool:
        """Whether a caller's value is the constant."""
        if not self.dtype:
            return type(value) is type(self.constant) and _same(value, self.constant)
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or is_nowhere(value):
            return False
        if tuple(value.shape) != self.shape or str(value.dtype).removeprefix("torch.") != ELEMENT_TYPES[self.dtype].torch:
            return False
        return all(map(_same, value.detach().flatten().tolist(), self.constant))

    def lies_as(self, value: torch.Tensor) -> bool:
        """Whether a tensor of the shape has the strides and the place that the model depends on."""
        if self.strides is None:
            return True
        dims = [(own, stride) for own, stride, size in zip(self.strides, value.stride(), self.shape, strict=True) if size > 1]
        return all(own == stride for own, stride in dims) and self.offset in (None, value.storage_offset())

    def expected(self) -> str:
        """The constant for a message, shortened."""
        shown = repr(list(self.constant) if self.dtype and self.shape else self.constant[0] if self.dtype else self.constant)
        return shown if len(shown) <= 200 else f"{shown[:200]}..."


def _same(value: Any, constant: Any) -> bool:
    return bool(value == constant or (value != value and constant != constant))


@dataclass(frozen=True)
class OutputLeaf:
    """One leaf of the result: a tensor after the ATen view calls in `calls`, pairs (operator, further arguments).

    The tensor is by `kind` "value": graph output number `index`, each of which has memory of its own; "input": the caller's tensor at input leaf
    `index`; "state": the buffer of the state number `index`; "parameter": the parameter that is the graph constant named by `value`; "tail":
    result number `index` of the tail. "constant" is the number, string or None in `value`. Leaves are one tensor if they are equal; `twin` tells
    others apart that are made alike.
    """

    kind: str = "value"
    index: int = -1
    value: Any = None
    calls: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    twin: int = 0


@dataclass(frozen=True)
class StateLeaf:
    """A buffer of the module, read by each call as the graph input `input` and replaced by the graph output `output`."""

    name: str
    input: str
    output: int


@dataclass(frozen=True)
class Signature:
    """How an executable is called.

    `inputs` are the leaves of (args, kwargs) in order. `parameters` names the positional parameters, which a caller may also pass by keyword.
    `mutations` are pairs (input leaf, graph output): the output is copied back to the input after each call.
    """

    inputs: tuple[InputLeaf, ...]
    input_tree: Tree
    outputs: tuple[OutputLeaf, ...]
    output_tree: Tree
    mutations: tuple[tuple[int, int], ...] = ()
    states: tuple[StateLeaf, ...] = ()
    parameters: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Parameters that were omitted at compilation, by name, with the default values for which the model was compiled; a caller may pass these values
    too."""
    tail: Tail | None = None

    def leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of a call's arguments, in order.

        Raises:
            InvalidInput: for arguments whose number or nesting differs.
        """
        positional = self.input_tree.children[0]
        if self.defaults:
            args, kwargs = self._without_defaults(args, kwargs, len(positional.children))
        if len(args) < len(positional.children) and self.parameters:
            args, kwargs = list(args), dict(kwargs)
            for name in self.parameters[len(args) : len(positional.children)]:
                if name not in kwargs:
                    break
                args.append(kwargs.pop(name))
        if len(args) != len(positional.children):
            expected = ", ".join(leaf.place for leaf in self.inputs)
            named = f" and {', '.join(kwargs)}" if kwargs else ""
            raise InvalidInput(
                f"expected {len(positional.children)} positional inputs, got {len(args)}{named}",
                f"the inputs are {expected or 'none'}",
            )
        keywords = self.input_tree.children[1]
        if set(kwargs) != set(keywords.keys):
            raise InvalidInput(
                f"expected keyword inputs {sorted(keywords.keys)}, got {sorted(kwargs)}",
                "pass the inputs as at compilation",
            )
        result: list[Any] = []
        for index, (child, value) in enumerate(zip(positional.children, args, strict=True)):
            result.extend(flatten(child, value, f"args[{index}]"))
        for child, key in zip(keywords.children, keywords.keys, strict=True):
            result.extend(flatten(child, kwargs[key], f"kwargs[{key!r}]"))
        return result

    def _without_defaults(self, args: Sequence[Any], kwargs: Mapping[str, Any], count: int) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments without those that repeat the defaults for which the model was compiled."""
        surplus = dict(zip(self.parameters[count:], args[count:], strict=False))
        if len(args) > count and len(surplus) == len(args) - count and not surplus.keys() & kwargs.keys():
            args = args[:count]
            kwargs = {**surplus, **kwargs}
        for name in self.defaults.keys() & kwargs.keys():
            value, default = kwargs[name], self.defaults[name]
            if type(value) is not type(default) or (value != default and value == value):
                raise InvalidInput(
                    f"input {name}: compiled without it, for its default {default!r}, got {described(value)}",
                    "compile the model with it as an example input",
                )
        return args, {name: value for name, value in kwargs.items() if name not in self.defaults}


def described(value: Any) -> str:
    """Description of what a caller passed, for a message."""
    if value is None:
        return "None"
    if isinstance(value, (int, float, str, bool)):
        return f"{value!r} of type {type(value).__name__}"
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")
    name = str(value.dtype).removeprefix("torch.")
    layout = "" if value.layout is torch.strided else f" and layout {value.layout}"
    return f"a {name} tensor of shape {list(value.shape)} on {value.device}{layout}"


def places(tree: Tree, place: str = "") -> Iterator[str]:
    """The leaves of a tree in the caller's terms, such as "[0]['mask']"."""
    if tree.kind == "leaf":
        yield place
    for index, child in enumerate(tree.children):
        yield from places(child, f"{place}[{tree.keys[index]!r}]" if tree.kind == "dict" else f"{place}[{index}]")


def signature_of(imported: Imported, parameters: Sequence[str] = (), defaults: Mapping[str, Any] | None = None) -> Signature:
    """The signature of a model that a front end has read; `parameters` names its positional parameters, `defaults` maps parameters to their default
    values."""
    graph = imported.graph
    input_tree = tree_of(imported.in_spec)
    words = [*places(input_tree.children[0], "args"), *places(input_tree.children[1], "kwargs")]
    inputs = []
    for leaf_number, (word, number, literal) in enumerate(zip(words, imported.leaves, imported.literals, strict=True)):
        if number is None:
            inputs.append(InputLeaf.of_constant(word, literal))
        else:
            value = graph.values[graph.inputs[number]]
            strides, offset = imported.strides.get(leaf_number, (None, None))
            inputs.append(InputLeaf(word, value.name, value.shape, value.dtype, None, strides, offset))
    constants = {parameter.name: parameter.value for parameter in imported.parameters}
    numbers = {state.name: number for number, state in enumerate(imported.states)}

    def leaf(output: Output) -> OutputLeaf:
        if output.kind == "state":
            return OutputLeaf("state", numbers[output.value], None, output.calls, output.twin)
        value = constants[output.value] if output.kind == "parameter" else output.value
        return OutputLeaf(output.kind, output.index, value, output.calls, output.twin)

    outputs = tuple(map(leaf, imported.outputs))
    states = tuple(StateLeaf(state.name, graph.inputs[state.input], state.output) for state in imported.states)
    output_tree = tree_of(imported.out_spec)
    given = {*parameters[: len(input_tree.children[0].children)], *input_tree.children[1].keys}
    absent = MappingProxyType({name: value for name, value in (defaults or {}).items() if name not in given})
    tail = None if imported.tail is None else replace(imported.tail, nodes=())
    return Signature(tuple(inputs), input_tree, outputs, output_tree, imported.mutations, states, tuple(parameters), absent, tail)


# JSON


def encode_tree(tree: Tree) -> Any:
    if tree.kind == "leaf":
        return "leaf"
    result: dict[str, Any] = {"kind": tree.kind, "children": [encode_tree(child) for child in tree.children]}
    if tree.keys:
        if not all(isinstance(key, (str, int, bool, float)) for key in tree.keys):
            raise InvalidArtifact(f"dictionary keys {tree.keys} of the model's inputs or outputs cannot be saved", "use string keys")
        result["keys"] = list(tree.keys)
    if tree.type_name:
        result["type"] = tree.type_name
    return result


def decode_tree(data: Field) -> Tree:
    """Raises ValueError for anything that `encode_tree` does not produce."""
    if data.value == "leaf":
        return LEAF
    kind = data["kind"].choice("tuple", "list", "dict", "namedtuple", "registered")
    children = tuple(decode_tree(child) for child in data["children"].items())
    data.only("kind", "children", *(key for key in ("keys", "type") if key in data.value))
    keys = tuple(_decode_key(key) for key in data["keys"].items()) if "keys" in data.value else ()
    name = data["type"].name() if "type" in data.value else ""
    if kind in ("dict", "namedtuple", "registered") and (len(keys) != len(children) or len(set(keys)) != len(keys)):
        raise data.wrong(f"a tree with {len(children)} different keys")
    named = namedtuple(name, keys) if kind == "namedtuple" else None  # raises ValueError for names that Python does not accept
    return Tree(kind, children, keys, name, registered=named)


def _decode_key(data: Field) -> Any:
    return data.text() if isinstance(data.value, str) else data.flag() if isinstance(data.value, bool) else _decode_number(data)


def _decode_number(data: Field) -> int | float:
    return data.integer(-(1 << 63), (1 << 64) - 1) if isinstance(data.value, int) else data.number()


def encode_literal(value: Any) -> Any:
    """A number, string, bool, None or a tuple of these as JSON; raises InvalidArtifact for anything else."""
    if isinstance(value, (tuple, list)):
        return [encode_literal(item) for item in value]
    if isinstance(value, float):
        return {"float": repr(value)}
    if not isinstance(value, CONSTANT_TYPES):
        raise InvalidArtifact(f"a constant of type {type(value).__name__} cannot be saved", "use numbers and strings")
    return value


def decode_literal(data: Field) -> Any:
    """The inverse of `encode_literal`; raises ValueError for other data."""
    if isinstance(data.value, list):
        return tuple(decode_literal(item) for item in data.items())
    if isinstance(data.value, dict):
        return float(data.only("float")["float"].text())
    if data.value is None or isinstance(data.value, bool):
        return data.value
    return data.text() if isinstance(data.value, str) else _decode_number(data)


def encode_signature(signature: Signature) -> dict[str, Any]:
    """The signature as plain JSON. Raises InvalidArtifact for constants and keys that JSON cannot represent."""
    return {
        "inputs": [
            {
                "place": leaf.place,
                "name": leaf.name,
                "shape": list(leaf.shape),
                "dtype": leaf.dtype,
                "constant": encode_literal(leaf.constant),
                "strides": encode_literal(leaf.strides),
                "offset": leaf.offset,
            }
            for leaf in signature.inputs
        ],
        "input_tree": encode_tree(signature.input_tree),
        "outputs": [
            {"kind": leaf.kind, "index": leaf.index, "value": encode_literal(leaf.value), "calls": encode_literal(leaf.calls), "twin": leaf.twin}
            for leaf in signature.outputs
        ],
        "output_tree": encode_tree(signature.output_tree),
        "mutations": [list(pair) for pair in signature.mutations],
        "states": [[state.name, state.input, state.output] for state in signature.states],
        "parameters": list(signature.parameters),
        "defaults": {name: encode_literal(value) for name, value in signature.defaults.items()},
        "tail": None if signature.tail is None else {"model": signature.tail.model, "inputs": list(signature.tail.inputs)},
    }


def decode_signature(data: Field) -> Signature:
    """The inverse of `encode_signature`; raises ValueError for other data. `soundness` checks whether it fits a program."""
    data.only("inputs", "input_tree", "outputs", "output_tree", "mutations", "states", "parameters", "defaults", "tail")
    inputs = []
    for leaf in data["inputs"].items():
        leaf.only("place", "name", "shape", "dtype", "constant", "strides", "offset")
        shape = leaf["shape"].integers(0, 1 << 40)
        strides = None if leaf["strides"].value is None else leaf["strides"].integers(0, 1 << 40)
        offset = None if leaf["offset"].value is None else leaf["offset"].integer(0, 1 << 40)
        constant = decode_literal(leaf["constant"])
        inputs.append(InputLeaf(leaf["place"].name(), leaf["name"].name(), shape, leaf["dtype"].name(), constant, strides, offset))
    outputs = []
    for leaf in data["outputs"].items():
        leaf.only("kind", "index", "value", "calls", "twin")
        kind = leaf["kind"].choice("value", "input", "state", "parameter", "constant", "tail")
        calls, twin = decode_literal(leaf["calls"]), leaf["twin"].integer(0, 1 << 20)
        outputs.append(OutputLeaf(kind, leaf["index"].integer(-1, 1 << 20), decode_literal(leaf["value"]), calls, twin))
    states = []
    for state in data["states"].items():
        name, value, output = state.exactly(3)
        states.append(StateLeaf(name.name(), value.name(), output.integer(0, 1 << 20)))
    return Signature(
        tuple(inputs),
        decode_tree(data["input_tree"]),
        tuple(outputs),
        decode_tree(data["output_tree"]),
        tuple(map(_pair, data["mutations"].items())),
        tuple(states),
        data["parameters"].names(),
        MappingProxyType({name: decode_literal(value) for name, value in data["defaults"].entries()}),
        None if data["tail"].value is None else _decode_tail(data["tail"]),
    )


def _decode_tail(data: Field) -> Tail:
    data.only("model", "inputs")
    return Tail(data["model"].text(), data["inputs"].integers(0, 1 << 20))


def _pair(data: Field) -> tuple[int, int]:
    first, second = data.exactly(2)
    return first.integer(0, 1 << 20), second.integer(0, 1 << 20)
