"""Models whose sizes may differ from call to call, of every kind that `compile` reads: each is bound to the sizes of a call as a graph of its own."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from tilewright.errors import InvalidInput, InvalidModel, UnsupportedOption
from tilewright.frontend.copies import Copies
from tilewright.frontend.imported import Imported
from tilewright.frontend.sizes import NUMBER
from tilewright.frontend.symbolic import SymbolicProgram
from tilewright.frontend.torch_export import by_parameter, exported, tensors_of
from tilewright.system.autocast import autocast_types

Key = tuple[int, ...]
_HINTS = (torch.export.Dim.AUTO, torch.export.Dim.DYNAMIC)


class SizedModel(Protocol):
    """A model with free sizes. Methods other than `bind` may be called by several threads at once."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the free sizes, in the order of a key."""
        ...

    @property
    def dimensions(self) -> tuple[int, ...]:
        """For each free size the first dimension of an input that has it, or `NUMBER`."""
        ...

    def sizes(self, key: Key) -> dict[str, int]:
        """A key in words: numbers by the names of sizes."""
        ...

    def example(self, key: Key) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Uninitialised inputs, (positional, keywords), of these sizes."""
        ...

    def key(self, leaves: Sequence[Any]) -> Key:
        """The free sizes of a call with these inputs. Raises InvalidInput if an input has no such size."""
        ...

    def check(self, leaves: Sequence[Any]) -> None:
        """Raises InvalidInput, which says why, if the model has no program for these inputs."""
        ...

    def check_sizes(self, key: Key) -> None:
        """Raises InvalidInput, which says why, if the model has no program for these sizes."""
        ...

    def is_special(self, key: Key) -> bool:
        """Whether the model may be another one for these sizes, because some are 0 or 1, or a relation is not that of other sizes."""
        ...

    def is_affine(self, position: int) -> bool:
        """Whether all sizes and numbers of the model are affine in the free size at this position of a key: two sizes determine the others."""
        ...

    def bind(self, key: Key) -> Imported:
        """The model for these sizes, which were checked. Raises InvalidInput if this shows that it does not allow them."""
        ...


class DeclaredModel(SizedModel, Protocol):
    """A model that declares its free sizes itself: an exported program or a file."""

    @property
    def declared(self) -> Mapping[str, Mapping[int, int | None]]:
        """The inputs in order by name, of each its dimensions (`NUMBER` for a Python number): the position in a key of the free size that it is, None
        for any other size."""
        ...


SMALL = 8
"""Smaller sizes may be special: half of 2 is 1, and 3 entries are all of a slice of 4. An example is exported with SMALL times as many entries."""


Place = tuple[int, int]
"""A leaf of (inputs, keywords), and a dimension of it or `NUMBER`."""

KNOWN = 4096
"""Keys of which it is kept what sizes follow from them."""


def _without_small(size: int) -> int:
    return SMALL * max(size, 1) if size < SMALL else size


class ModuleModel:
    """A module, exported once with symbolic sizes, if possible for an example without small sizes. An export takes a size of 0 or 1 for a constant,
    because broadcasting and squeezing depend on it, and requires each relation of sizes to be what it is for the example: a multiple, two that are
    equal, the side of a branch. For sizes for which it does not hold, the module is exported once more, with these as the example.

    A key has the free sizes of the first export, and where the others that may differ do not follow from these as in that export, also the others.
    `copies` are those of earlier readings of the module; `on_gpu` is as for `functional`.

    Raises InvalidModel if it cannot be exported, and UnsupportedOption for a `dynamic` that does not fit the inputs."""

    def __init__(
        self,
        module: torch.nn.Module,
        inputs: Sequence[Any],
        keywords: Mapping[str, Any] | None,
        dynamic: Any,
        copies: Copies | None = None,
        on_gpu: bool = False,
    ) -> None:
        arguments = (tuple(inputs), dict(keywords or {}))
        self._module = module
        self._copies = copies or Copies()
        self._casts = autocast_types()
        self._on_gpu = on_gpu
        free, self._names = free_sizes(module, *arguments, dynamic)
        self._free, self._base = self._general(arguments, free)
        hints = {(leaf, dim): hint for leaf, dims in self._free.items() for dim, hint in _by_dimension(dims)}
        self._bounds = {place: hint for place, hint in hints.items() if isinstance(hint, torch.export.Dim)}
        common = {name for name, count in Counter(self._names.values()).items() if count > 1}
        promised = {place for place in hints if self._names.get(place) in common or hasattr(hints[place], "root")}
        self._others = tuple(sorted(hints.keys() - promised - {(size.leaf, size.dim) for size in self._base.free}))
        self._following = lru_cache(maxsize=KNOWN)(lambda key: self._base.numbers(self._others, key))
        self._exports: list[SymbolicProgram] = []
        """Those for sizes for which the first one does not hold."""

    def _general(self, arguments: Any, free: Mapping[int, Any]) -> tuple[Mapping[int, Any], SymbolicProgram]:
        """What is free, and the module exported with an example without small sizes if as many of its sizes are free for that as for the given one.
        With `dynamic=True` the first extents of a single entry are free too where all inputs have them: a batch of one."""
        leaves = pytree.tree_leaves(arguments)
        hints = [hint for dims in free.values() for hint in (dims.values() if isinstance(dims, dict) else [dims])]
        asked = frozenset((leaf, dim) for leaf, dims in free.items() if isinstance(dims, dict) for dim in dims)
        given, ways = None, [asked] if self._names else []
        if not self._names and all(hint is torch.export.Dim.AUTO for hint in hints):  # others have bounds, or are Dynamo's, which knows conditions
            given = self._exported(arguments, free)
            found = frozenset((leaf, dim) for leaf, dim in asked if dim in given.symbolic(leaf))
            tensors = [leaf for leaf, value in enumerate(leaves) if isinstance(value, torch.Tensor)]
            batch = frozenset((leaf, 0) for leaf in tensors) if all(leaves[leaf].shape[:1] == (1,) for leaf in tensors) else frozenset()
            ways = [asked | batch, found | batch, found]  # what is not free may only not be free for small examples
        for places in dict.fromkeys(ways):
            if all(leaves[leaf].shape[dim] >= SMALL for leaf, dim in places):
                continue
            wider = dict(free)
            for leaf, dim in places:
                wider[leaf] = {dim: torch.export.Dim.AUTO, **wider.get(leaf, {})}
            try:
                program = self._exported(arguments, wider, places)
            except InvalidModel:
                continue
            if all(dim in program.symbolic(leaf) for leaf, dim in places):
                return wider, program
        try:
            return free, given or self._exported(arguments, free)
        except InvalidModel as error:
            try:  # the model may have a branch for the sizes of this example alone
                return free, self._exported(arguments, free, asked, lambda size: size + 1)
            except InvalidModel:
                raise error from None

    def _exported(
        self, arguments: Any, free: Mapping[int, Any], places: Set[Place] = frozenset(), enlarged: Callable[[int], int] = _without_small
    ) -> SymbolicProgram:
        program = exported(self._module, *_enlarged(arguments, free, places, enlarged), free, self._casts, self._on_gpu)
        return SymbolicProgram(program, tensors_of(self._module), self._names, small=False, copies=self._copies, on_gpu=self._on_gpu)

    @property
    def names(self) -> tuple[str, ...]:
        return self._base.names

    @property
    def dimensions(self) -> tuple[int, ...]:
        return self._base.dimensions

    def sizes(self, key: Key) -> dict[str, int]:
        others = zip(map(self._base.place, self._others), key[len(self._base.free) :], strict=False)
        return {**self._base.sizes(key[: len(self._base.free)]), **dict(others)}

    def example(self, key: Key) -> tuple[tuple[Any, ...], dict[str, Any]]:
        count = len(self._base.free)
        return self._base.example(key[:count], dict(zip(self._others, key[count:], strict=False)))

    def key(self, leaves: Sequence[Any]) -> Key:
        key = self._base.key(leaves)
        if not self._others:
            return key
        found = (_number(leaves[leaf], dim) for leaf, dim in self._others)
        others = tuple(number for number in found if number is not None)
        return key if len(others) < len(self._others) or others == self._following(key) else (*key, *others)

    def check(self, leaves: Sequence[Any]) -> None:
        key = self.key(leaves)
        self.check_sizes(key)
        if not self.is_special(key):
            self._base.check(leaves)

    def check_sizes(self, key: Key) -> None:
        for size, number in zip(self._base.free, key, strict=False):
            hint = self._bounds.get((size.leaf, size.dim))
            if hint is not None:
                check_bounds(size.name, number, hint.min if hint.min > 2 else 0, hint.max)
        self._base.check_names(key[: len(self._base.free)])

    def is_special(self, key: Key) -> bool:
        return len(key) > len(self._base.free) or not self._base.holds(key)

    def is_affine(self, position: int) -> bool:
        return self._base.is_affine(position)

    def bind(self, key: Key) -> Imported:
        if not self.is_special(key):
            return self._base.bind(key)
        inputs, keywords = self.example(key)
        leaves = pytree.tree_leaves((inputs, keywords))
        for program in self._exports:
            if _allows(program, leaves):
                return program.bind(program.key(leaves))
        everything = [(leaf, dim) for leaf, dims in self._free.items() for dim, _ in _by_dimension(dims)]
        for places in (self._small(key), everything):
            try:
                program = self._exported_again(inputs, keywords, set(places))
                program.check(leaves)
            except (InvalidModel, InvalidInput) as error:
                why = error
                continue
            self._exports.append(program)
            return program.bind(program.key(leaves))
        sizes = ", ".join(f"{name} = {size}" for name, size in self.sizes(key).items())
        raise InvalidInput(f"the model cannot be exported for {sizes}: {why.cause}", why.remedy) from why

    def _small(self, key: Key) -> list[Place]:
        """The places of sizes for which the export does not hold, because they are small or make a size that is computed of them 0 or 1."""
        free, numbers, others = self._base.free, key[: len(self._base.free)], key[len(self._base.free) :]
        small = [i for i, (size, number) in enumerate(zip(free, numbers, strict=True)) if number < min(size.least, 2)]
        found = [(free[i].leaf, free[i].dim) for i in small or sorted(self._base.specialised(numbers, SMALL))]
        return found + [place for place, number in zip(self._others, others, strict=False) if number < 2]

    def _exported_again(self, inputs: Sequence[Any], keywords: Mapping[str, Any], fixed: Set[Place]) -> SymbolicProgram:
        leaves = pytree.tree_leaves((inputs, keywords))
        free: dict[int, Any] = {}
        for leaf, dims in self._free.items():
            if not isinstance(dims, dict):
                free.update({} if (leaf, NUMBER) in fixed else {leaf: dims})
                continue
            # other dimensions may be tied to one that is fixed
            left = {dim: torch.export.Dim.AUTO for dim in dims if (leaf, dim) not in fixed and leaves[leaf].shape[dim] > 1}
            free.update({leaf: left} if left else {})
        # while a module is exported its parameters are replaced, which no call of it in another thread may see
        twin = copy.deepcopy(self._module, {id(tensor): tensor for tensor in tensors_of(self._module).values()})
        names = {place: name for place, name in self._names.items() if place not in fixed}
        tensors = tensors_of(self._module)
        program = exported(twin, inputs, keywords, free, self._casts, self._on_gpu)
        return SymbolicProgram(program, tensors, names, small=False, like=self._base, copies=self._copies, on_gpu=self._on_gpu)


def _by_dimension(dims: Any) -> Iterable[tuple[int, Any]]:
    """Pairs (dimension, hint) of what is free of a leaf."""
    return dims.items() if isinstance(dims, dict) else [(NUMBER, dims)]


def _number(value: Any, dim: int) -> int | None:
    """The size of a leaf's dimension, or the number that it is; None if it has none."""
    if dim == NUMBER:
        return value if type(value) is int else None
    return value.shape[dim] if isinstance(value, torch.Tensor) and dim < value.dim() else None


def _allows(program: SymbolicProgram, leaves: Sequence[Any]) -> bool:
    try:
        program.check(leaves)
    except InvalidInput:
        return False
    return True


def check_bounds(name: str, number: int, least: int, most: int | None) -> None:
    """Raises InvalidInput for a size beyond the bounds that `dynamic` gives."""
    if number < least or (isinstance(most, int) and number > most):
        upper = f" to {most}" if isinstance(most, int) else " and more"
        raise InvalidInput(f"{name} is {number}, and `dynamic` gives {least}{upper}", "change its bounds")


def free_sizes(
    module: torch.nn.Module, inputs: Sequence[Any], keywords: Mapping[str, Any], dynamic: Any
) -> tuple[dict[int, Any], dict[tuple[int, int], str]]:
    """What of a call's inputs is free: for leaves of (inputs, keywords) a `torch.export` dimension or hint for each free dimension (or one, for a
    Python number), and the user's names for (leaf, dimension).

    `dynamic` is True (every dimension that the module leaves free and whose example is at least 2), or as `dynamic_shapes` of `torch.export`, where a
    text also names a dimension: {"x": {0: "batch"}}. Inputs that it leaves out are fixed. Raises UnsupportedOption if it does not fit."""
    leaves, tree = pytree.tree_flatten((tuple(inputs), dict(keywords)))
    if dynamic is True:
        wide = {leaf: [dim for dim, size in enumerate(x.shape) if size > 1] for leaf, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
        return {leaf: dict.fromkeys(dims, torch.export.Dim.AUTO) for leaf, dims in wide.items() if dims}, {}
    return named_sizes(by_parameter(module, *pytree.tree_unflatten(range(len(leaves)), tree)), leaves, dynamic)


def named_sizes(places: Mapping[str, Any], leaves: Sequence[Any], dynamic: Any) -> tuple[dict[int, Any], dict[tuple[int, int], str]]:
    """As `free_sizes`, of a `dynamic` that names dimensions: `places` nests the numbers of the leaves as the inputs of each name are nested."""
    if isinstance(dynamic, (tuple, list)):
        dynamic = dict(zip(places, dynamic, strict=False))
    if not isinstance(dynamic, Mapping) or not dynamic:
        raise UnsupportedOption(f"dynamic={dynamic!r} names no sizes", 'use True, or name dimensions of inputs: {"x": {0: "batch"}}')
    unknown = [str(name) for name in dynamic if name not in places]
    if unknown:
        raise UnsupportedOption(f"dynamic names the inputs {', '.join(unknown)}", f"the inputs are {', '.join(places)}")
    free: dict[int, Any] = {}
    names: dict[tuple[int, int], str] = {}
    for name, spec in dynamic.items():
        for leaf, entry in _entries(places[name], spec, name):
            value = leaves[leaf]
            listed = _dimensions(entry, value, name)
            chosen = {dim: hint for dim, (hint, _) in listed.items()}
            names.update({(leaf, dim): text for dim, (_, text) in listed.items() if text})
            if chosen:
                free[leaf] = chosen if isinstance(value, torch.Tensor) else chosen[NUMBER]
    return free, names


def _entries(places: Any, spec: Any, name: str) -> Iterator[tuple[int, Any]]:
    """Pairs (leaf, its entry) of a nested specification."""
    if spec is None:
        return
    if isinstance(places, int):
        yield places, spec
        return
    if isinstance(places, Mapping) and isinstance(spec, Mapping):
        for key, entry in spec.items():
            if key not in places:
                raise UnsupportedOption(f"dynamic names {name}[{key!r}], which is no input", f"its keys are {', '.join(map(repr, places))}")
            yield from _entries(places[key], entry, f"{name}[{key!r}]")
        return
    children = pytree.tree_leaves(places, is_leaf=lambda part: part is not places)
    if not isinstance(spec, (tuple, list)) or len(spec) != len(children):
        raise UnsupportedOption(f"dynamic gives {spec!r} for {name}, which has {len(children)} parts", "nest it as the inputs are")
    for index, (part, entry) in enumerate(zip(children, spec, strict=True)):
        yield from _entries(part, entry, f"{name}[{index}]")


def _dimensions(entry: Any, value: Any, name: str) -> dict[int, tuple[Any, str]]:
    """Free dimensions of one input: (dimension or hint for `torch.export`, the user's name)."""
    if isinstance(value, torch.Tensor):
        if isinstance(entry, (tuple, list)):
            entry = dict(enumerate(entry))
        if not isinstance(entry, Mapping) or not all(isinstance(dim, int) and -value.dim() <= dim < value.dim() for dim in entry):
            raise UnsupportedOption(f"dynamic gives {entry!r} for {name}, a tensor of {value.dim()} dimensions", 'write {0: "batch"}')
        listed = {dim % value.dim(): size for dim, size in entry.items()}
    else:
        listed = {NUMBER: entry}
    result = {}
    for dim, size in listed.items():
        if isinstance(size, str):
            result[dim] = (torch.export.Dim.DYNAMIC, size)
        elif isinstance(size, torch.export.Dim) or size in _HINTS:
            result[dim] = (size, getattr(size, "__name__", ""))
        elif size is not None and size is not torch.export.Dim.STATIC and not isinstance(size, int):
            raise UnsupportedOption(f"dynamic gives {size!r} for a dimension of {name}", "name it, or use torch.export.Dim")
    return result


def _enlarged(arguments: Any, free: Mapping[int, Any], places: Set[Place], enlarged: Callable[[int], int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs, with two entries where a free size is 0 or 1, which an export would take for a constant. Sizes at `places` are `enlarged` instead:
    those that were equal still are."""
    leaves, tree = pytree.tree_flatten(arguments)
    for leaf, dims in free.items():
        value = leaves[leaf]
        if isinstance(value, torch.Tensor):
            shape = [max(size, 2) if dim in dims else size for dim, size in enumerate(value.shape)]
            shape = [enlarged(size) if (leaf, dim) in places else shape[dim] for dim, size in enumerate(value.shape)]
            leaves[leaf] = value if list(value.shape) == shape else value.new_zeros(shape)
        else:
            leaves[leaf] = max(value, 2)
    positional, named = pytree.tree_unflatten(leaves, tree)
    return positional, named


class OnnxModel:
    """An ONNX model whose inputs have dimensions without a size; it is read again for each set of sizes.

    Raises InvalidModel for a damaged file, and for an input that declares no dimensions."""

    def __init__(self, source: Any) -> None:
        from tilewright.frontend.onnx_file import load
        from tilewright.frontend.onnx_pointwise import element_type
        from tilewright.frontend.onnx_proto import size_of

        self._model = load(source)
        known = {tensor.name for tensor in self._model.graph.initializer}
        inputs = [info for info in self._model.graph.input if info.name not in known]
        for info in inputs:
            if not info.type.tensor_type.HasField("shape"):
                cause = f"the input {info.name} declares no dimensions, of which some could be free"
                raise InvalidModel(cause, "compile it for the sizes of example_inputs alone, or export it with that input's dimensions")
        self._inputs = tuple(info.name for info in inputs)
        self._types = [element_type(info.type.tensor_type.elem_type) for info in inputs]
        self._sizes: dict[str, tuple[int, int]] = {}
        """The free sizes by name, each with the first (input, dimension) that has it."""
        self._shapes: list[list[int | str]] = []
        """The dimensions of each input: a number, or the name of a free size."""
        for leaf, info in enumerate(inputs):
            shape: list[int | str] = []
            for k, dim in enumerate(info.type.tensor_type.shape.dim):
                fixed = size_of(dim)
                shape.append((dim.dim_param or f"{info.name}.shape[{k}]") if fixed is None else fixed)
                if fixed is None:
                    self._sizes.setdefault(str(shape[k]), (leaf, k))
            self._shapes.append(shape)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._sizes)

    @property
    def dimensions(self) -> tuple[int, ...]:
        return tuple(dim for _, dim in self._sizes.values())

    def sizes(self, key: Key) -> dict[str, int]:
        return dict(zip(self._sizes, key, strict=True))

    @property
    def declared(self) -> Mapping[str, Mapping[int, int | None]]:
        positions = {name: position for position, name in enumerate(self._sizes)}
        shapes = zip(self._inputs, self._shapes, strict=True)
        return {name: {k: positions[size] if isinstance(size, str) else None for k, size in enumerate(shape)} for name, shape in shapes}

    def key(self, leaves: Sequence[Any]) -> Key:
        if len(leaves) != len(self._inputs):
            raise InvalidInput(f"{len(leaves)} inputs for a model of {len(self._inputs)}", f"pass {', '.join(self._inputs)}")
        for name, shape, value in zip(self._inputs, self._shapes, leaves, strict=True):
            if not isinstance(value, torch.Tensor) or value.dim() != len(shape):
                raise InvalidInput(f"input {name} is no tensor of {len(shape)} dimensions", "pass such a tensor")
        return tuple(leaves[leaf].shape[dim] for leaf, dim in self._sizes.values())

    def check(self, leaves: Sequence[Any]) -> None:
        key = self.key(leaves)
        for leaf, (name, value) in enumerate(zip(self._inputs, leaves, strict=True)):
            expected = self._shape(leaf, key)
            if list(value.shape) != expected:
                relation = ", ".join(map(str, self._shapes[leaf]))
                raise InvalidInput(f"input {name}: expected the shape [{relation}] = {expected}, got {list(value.shape)}", "pass such a tensor")

    def check_sizes(self, key: Key) -> None:
        """Sizes of ONNX models have no conditions that are known."""

    def is_special(self, key: Key) -> bool:
        return False

    def is_affine(self, position: int) -> bool:
        return False  # not known: computations on shapes are evaluated

    def _shape(self, leaf: int, key: Key) -> list[int]:
        sizes = self.sizes(key)
        return [sizes[size] if isinstance(size, str) else size for size in self._shapes[leaf]]

    def bind(self, key: Key) -> Imported:
        from tilewright.frontend.onnx_import import import_onnx

        shapes = [tensor.to("meta") for tensor in self.example(key)[0]]  # tensors without values, so that none is specialised
        return import_onnx(self._model, shapes)

    def example(self, key: Key) -> tuple[tuple[Any, ...], dict[str, Any]]:
        from tilewright.frontend.handlers import torch_dtype

        return tuple(torch.empty(self._shape(leaf, key), dtype=torch_dtype(dtype)) for leaf, dtype in enumerate(self._types)), {}
