"""A model with symbolic sizes, read once and bound to the sizes of each call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges

from tilewright.errors import InvalidInput, InvalidModel
from tilewright.frontend.copies import Copies
from tilewright.frontend.imported import Imported
from tilewright.frontend.pt2_sizes import condition
from tilewright.frontend.sizes import NUMBER, Sizes, is_symbolic
from tilewright.frontend.torch_export import functional
from tilewright.frontend.torch_import import import_exported, import_functional

NO_OTHERS: Mapping[tuple[int, int], int] = MappingProxyType({})


@dataclass(frozen=True)
class FreeSize:
    """A size of a call: dimension `dim` of input leaf `leaf` (`NUMBER`: the leaf itself), called `name` in messages, from `least` to `most`."""

    symbol: sympy.Symbol
    leaf: int
    dim: int
    name: str
    least: int
    most: int | None

    def allows(self, number: int) -> bool:
        return self.least <= number and (self.most is None or number <= self.most)


class SymbolicProgram:
    """An exported program whose inputs have symbolic sizes, made functional once.

    `sources` are the live parameters and buffers, `names` the user's names for (leaf, dimension); sizes of one name must be equal. `small`: sizes of
    0 and 1 are served although the export assumed at least 2, as PyTorch does for exported programs. All graphs that the program is bound to share
    the copies of its parameters, also with the program `like`, another export of the same module; `copies` are those of earlier readings; `on_gpu` is
    as for `functional`.

    Raises InvalidModel if it cannot be made functional."""

    def __init__(
        self,
        program: ExportedProgram,
        sources: Mapping[str, torch.Tensor] | None = None,
        names: Mapping[tuple[int, int], str] | None = None,
        small: bool = True,
        like: SymbolicProgram | None = None,
        copies: Copies | None = None,
        on_gpu: bool = False,
    ) -> None:
        # a program that was loaded has its guards only as text
        self._code = [] if _guards_of(program) else list(getattr(program, "_guards_code", None) or ())
        self.program = functional(program, on_gpu)
        states = set(self.program.graph_signature.buffers_to_mutate.values())
        # without a live module the programs of all sizes share these buffers
        owned = {name: self.program.state_dict[name].detach().clone() for name in states if name in self.program.state_dict}
        self._sources = dict(owned if sources is None else sources)
        # names of other constants may stand for different tensors in different exports
        shared: Mapping[str, torch.Tensor] = {} if like is None else like._held
        self._held: dict[str, torch.Tensor] = {name: tensor for name, tensor in shared.items() if name in self.program.state_dict}
        self._copies = copies or Copies()
        specs = zip((n for n in self.program.graph.nodes if n.op == "placeholder"), self.program.graph_signature.input_specs, strict=True)
        self._inputs = [(node.name, node.meta.get("val")) for node, spec in specs if spec.kind == InputKind.USER_INPUT]
        self._names = dict(names or {})
        self._small = small
        self.free = self._free_sizes()
        self._alike = self._names_alike()
        self._guards = self._all_guards()

    def _free_sizes(self) -> tuple[FreeSize, ...]:
        found: dict[sympy.Symbol, FreeSize] = {}
        for leaf, (_, value) in enumerate(self._inputs):
            for dim, size in enumerate(value.shape) if isinstance(value, torch.Tensor) else [(NUMBER, value)]:
                symbol = size.node.expr if is_symbolic(size) else None  # type: ignore[union-attr]
                if isinstance(symbol, sympy.Symbol) and symbol not in found:
                    name = self.place((leaf, dim))
                    least, most = _bounds(self.program.range_constraints.get(symbol))
                    found[symbol] = FreeSize(symbol, leaf, dim, name, 0 if self._small and least <= 2 else least, most)
        return tuple(found.values())

    def _names_alike(self) -> dict[sympy.Basic, str]:
        """That sizes of one name are equal, with the reason."""
        alike: dict[sympy.Basic, str] = {}
        for (leaf, dim), name in self._names.items():
            first = next((size.symbol for size in self.free if size.name == name), None)
            value = self._inputs[leaf][1]
            other = value if dim == NUMBER else value.shape[dim]
            if first is not None and is_symbolic(other) and other.node.expr != first:
                alike.setdefault(sympy.Eq(other.node.expr, first), f"both are called {name}")
        return alike

    def _all_guards(self) -> tuple[tuple[sympy.Basic, str], ...]:
        """What must hold of the sizes, each with its place in the model: conditions that the export met, and relations between dimensions."""
        guards = dict(self._alike)
        known = {size.symbol for size in self.free}
        for guard in _guards_of(self.program):
            if guard.expr.free_symbols <= known:
                line = guard.sloc.maybe_user_loc
                guards.setdefault(guard.expr, str(line) if line else "")
        inputs = dict(self._inputs)
        for number, text in enumerate(self._code):
            try:
                guards.setdefault(condition(text, inputs, f"guard {number}"), "")
            except (ValueError, KeyError, AttributeError, IndexError) as error:
                raise InvalidModel(f"the program's condition {text[:200]} is not understood", "export it with plain tensors as inputs") from error
        for node in self.program.graph.nodes:
            if str(node.target) == "aten._assert_scalar.default" and isinstance(node.args[0], torch.fx.Node):
                asserted = node.args[0].meta.get("val")
                if isinstance(asserted, torch.SymBool) and asserted.node.expr.free_symbols <= known:
                    guards.setdefault(asserted.node.expr, "")
        return tuple(guards.items())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the free sizes, in the order of a key."""
        return tuple(size.name for size in self.free)

    @property
    def dimensions(self) -> tuple[int, ...]:
        """For each free size the first dimension of an input that has it, or `NUMBER`."""
        return tuple(size.dim for size in self.free)

    @property
    def declared(self) -> Mapping[str, Mapping[int, int | None]]:
        """The inputs in order by name, of each its dimensions (`NUMBER` for a Python number): the position of the free size that it is, else None."""
        positions = {size.symbol: position for position, size in enumerate(self.free)}

        def of(value: Any) -> dict[int, int | None]:
            sizes: list[tuple[int, Any]] = list(enumerate(value.shape)) if isinstance(value, torch.Tensor) else [(NUMBER, value)]
            return {dim: positions.get(size.node.expr) if is_symbolic(size) else None for dim, size in sizes}

        return {name: of(value) for name, value in self._inputs}

    def place(self, place: tuple[int, int]) -> str:
        """The name of a dimension (`NUMBER` for a Python number) of an input leaf."""
        leaf, dim = place
        name = self._inputs[leaf][0]
        return self._names.get(place) or (name if dim == NUMBER else f"{name}.shape[{dim}]")

    def sizes(self, key: Sequence[int]) -> dict[str, int]:
        """A key in words: numbers by the names of sizes."""
        return dict(zip(self.names, key, strict=True))

    def numbers(self, places: Sequence[tuple[int, int]], key: Sequence[int]) -> tuple[bool | int | float | None, ...]:
        """The sizes that dimensions (`NUMBER`: Python numbers) of input leaves have according to a key."""
        sizes = self._sizes(key)
        inputs = ((self._inputs[leaf][1], dim) for leaf, dim in places)
        found = (value if dim == NUMBER else value.shape[dim] for value, dim in inputs)
        return tuple(sizes.value(size.node.expr) if is_symbolic(size) else size for size in found)

    def key(self, leaves: Sequence[Any]) -> tuple[int, ...]:
        """The numbers of the free sizes for a call with these inputs. Raises InvalidInput if one of them has no such size."""
        if len(leaves) != len(self._inputs):
            raise InvalidInput(f"{len(leaves)} inputs for a model of {len(self._inputs)}", f"pass {', '.join(name for name, _ in self._inputs)}")
        numbers = []
        for size in self.free:
            value = leaves[size.leaf]
            if size.dim == NUMBER:
                number = value if type(value) is int else None
            else:
                number = value.shape[size.dim] if isinstance(value, torch.Tensor) and size.dim < value.dim() else None
            if number is None:
                name, expected = self._inputs[size.leaf]
                raise InvalidInput(f"input {name} has no size {size.name}", f"pass {_described(expected)}")
            numbers.append(number)
        return tuple(numbers)

    def check(self, leaves: Sequence[Any]) -> None:
        """Raises InvalidInput, which names the relation or range, if the program does not hold for the sizes of these inputs."""
        key = self.key(leaves)
        self.check_sizes(key)
        sizes = self._sizes(key)
        for leaf, (name, expected) in enumerate(self._inputs):
            if isinstance(expected, torch.Tensor):
                self._check_tensor(name, expected, leaves[leaf], sizes)
            elif type(expected) is int and leaves[leaf] != expected:
                raise InvalidInput(f"input {name} is {leaves[leaf]!r}, and the model was exported for {expected} alone", "export it for that")

    def check_sizes(self, key: Sequence[int]) -> None:
        """Raises InvalidInput, which names the relation or range, if the program does not hold for these sizes."""
        for size, number in zip(self.free, key, strict=True):
            if not size.allows(number):
                upper = "" if size.most is None else f" to {size.most}"
                raise InvalidInput(
                    f"{size.name} is {number}, and the model was exported for {size.least}{upper or ' and more'}", "export it for that"
                )
        self._require(key, self._guards)

    def check_names(self, key: Sequence[int]) -> None:
        """Raises InvalidInput for sizes that have one name and are not equal."""
        self._require(key, self._alike.items())

    def _require(self, key: Sequence[int], guards: Iterable[tuple[sympy.Basic, str]]) -> None:
        for expression, place in self._violated(key, guards):
            values = ", ".join(f"{s.name} = {n}" for s, n in zip(self.free, key, strict=True) if s.symbol in expression.free_symbols)
            raise InvalidInput(f"the model requires {self._text(expression)}, and {values}{f' ({place})' if place else ''}", "pass such sizes")

    def _violated(self, key: Sequence[int], guards: Iterable[tuple[sympy.Basic, str]]) -> Iterator[tuple[sympy.Basic, str]]:
        """The conditions that do not hold for these sizes, each with its place in the model."""
        sizes = self._sizes(key)
        return (guard for guard in guards if sizes.value(guard[0]) is False)

    def holds(self, key: Sequence[int]) -> bool:
        """Whether the program is that for these sizes."""
        within = all(size.allows(number) for size, number in zip(self.free, key, strict=True))
        return within and not any(self._violated(key, self._guards))

    def symbolic(self, leaf: int) -> frozenset[int]:
        """The dimensions of an input that have a symbolic size."""
        return free_dims(self._inputs[leaf][1])

    def specialised(self, key: Sequence[int], small: int) -> frozenset[int]:
        """The positions of sizes in expressions that the export took for neither 0 nor 1, as it does because of broadcasting, and that are for these
        sizes; and of sizes below `small` for which a condition does not hold that concerns no other size. The model may be another one for them."""
        violated = [guard for guard, _ in self._violated(key, self._guards)]
        special = {symbol for guard in violated if isinstance(guard, sympy.Ne) and guard.rhs in (0, 1) for symbol in guard.free_symbols}
        alone = {symbol for guard in violated if len(guard.free_symbols) == 1 for symbol in guard.free_symbols}
        return frozenset(
            position
            for position, (size, number) in enumerate(zip(self.free, key, strict=True))
            if size.symbol in special or number < small and (size.symbol in alone or number < size.least)
        )

    def is_special(self, key: Sequence[int]) -> bool:
        """Whether a size is 0 or 1, for which the export need not be right in every operator."""
        return any(number < 2 for number in key)

    def is_affine(self, position: int) -> bool:
        """Whether all sizes and numbers of the program are affine in the free size at this position of a key: two sizes determine the others."""
        symbol = self.free[position].symbol
        read = (n for n in self.program.graph.nodes if not n.users or any(not str(user.target).startswith("aten._assert") for user in n.users))
        values = [node.meta.get("val") for node in read]
        sizes = [size for value in pytree.tree_leaves(values) for size in _sizes_of(value) if is_symbolic(size)]
        used = {size.node.expr for size in sizes if symbol in size.node.expr.free_symbols}
        return all(isinstance(each, sympy.Expr) and each.is_polynomial(symbol) and sympy.degree(each, symbol) <= 1 for each in used)

    def _check_tensor(self, name: str, expected: torch.Tensor, value: Any, sizes: Sizes) -> None:
        shape = sizes.shape(expected, name)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape or value.dtype is not expected.dtype:
            if isinstance(value, torch.Tensor) and value.dim() == expected.dim() and value.dtype is expected.dtype:
                _require_free(name, expected, value)
            got = f"a {value.dtype} tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            relation = ", ".join(size if isinstance(size, str) else str(size) for size in map(self._size_text, expected.shape))
            raise InvalidInput(f"input {name}: expected {expected.dtype} of shape [{relation}] = {list(shape)}, got {got}", "pass such a tensor")

    def _size_text(self, size: Any) -> str:
        return self._text(size.node.expr) if is_symbolic(size) else str(size)

    def _text(self, expression: sympy.Basic) -> str:
        names = {size.symbol: sympy.Symbol(size.name) for size in self.free}
        return str(PythonPrinter().doprint(expression.xreplace(names)))

    def example(self, key: Sequence[int], others: Mapping[tuple[int, int], int] = NO_OTHERS) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Uninitialised inputs, (positional, keywords), of these sizes; `others` replace those of dimensions (`NUMBER`: numbers) of input leaves."""
        sizes = self._sizes(key)

        def of(leaf: int, name: str, value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                shape = (others.get((leaf, dim), size) for dim, size in enumerate(sizes.shape(value, name)))
                return torch.empty(tuple(shape), dtype=value.dtype, device=value.device)
            return others.get((leaf, NUMBER), sizes.number(value, name) if is_symbolic(value) else value)

        assert self.program.call_spec.in_spec is not None
        leaves = [of(leaf, name, value) for leaf, (name, value) in enumerate(self._inputs)]
        arguments, keywords = pytree.tree_unflatten(leaves, self.program.call_spec.in_spec)
        return tuple(arguments), keywords

    def _sizes(self, key: Sequence[int]) -> Sizes:
        return Sizes({size.symbol: number for size, number in zip(self.free, key, strict=True)})

    def bind(self, key: Sequence[int]) -> Imported:
        """The model for these numbers of the free sizes, which `check` has accepted. Raises as `import_functional`."""
        return import_functional(self.program, self._sources, self._sizes(key), self._held, self._copies)


def _require_free(name: str, expected: torch.Tensor, value: torch.Tensor) -> None:
    """Raises InvalidInput for a size of an input that differs from the only one that a program was exported for."""
    for dim, (size, number) in enumerate(zip(expected.shape, value.shape, strict=True)):
        if dim not in free_dims(expected) and size != number:
            raise InvalidInput(
                f"dimension {dim} of {name} is {number}, and the model was compiled for {size} alone: `dynamic` does not name it, the model allows "
                "no other size, or PyTorch's exporter took it for a constant, as every size of 1",
                f'name it, as in dynamic={{"{name}": {{{dim}: "size"}}}}, and give an example of at least two entries, or compile for that size',
            )


def free_dims(value: Any) -> frozenset[int]:
    """The dimensions of a traced tensor that are expressions in free sizes."""
    sizes: Sequence[Any] = value.shape if isinstance(value, torch.Tensor) else ()
    return frozenset(dim for dim, size in enumerate(sizes) if is_symbolic(size) and size.node.expr.free_symbols)


def _guards_of(program: ExportedProgram) -> Sequence[Any]:
    """The guards of the shapes that the program was exported with, each with a place in the model."""
    values = (node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder")
    environment = next((size.node.shape_env for value in values for size in _sizes_of(value) if is_symbolic(size)), None)
    return () if environment is None else list(environment.guards)


def _sizes_of(value: Any) -> Sequence[Any]:
    return value.shape if isinstance(value, torch.Tensor) else (value,)


def _bounds(span: ValueRanges[Any] | None) -> tuple[int, int | None]:
    if span is None:
        return 0, None
    least, most = span.lower, span.upper
    return (max(int(least), 0) if least.is_Integer else 0), (int(most) if most.is_Integer else None)


def _described(value: Any) -> str:
    return f"a tensor of {value.dim()} dimensions" if isinstance(value, torch.Tensor) else "a whole number"


def is_free(program: ExportedProgram) -> bool:
    """Whether an exported program has symbolic sizes."""
    values = (node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder")
    return any(is_symbolic(size) for value in values for size in _sizes_of(value))


def import_program(
    program: ExportedProgram,
    inputs: Sequence[Any] = (),
    keywords: Mapping[str, Any] | None = None,
    copies: Copies | None = None,
    on_gpu: bool = False,
) -> Imported:
    """Reads an exported program; symbolic sizes are bound to those of the inputs, or else of its example inputs. `copies` are those of earlier
    readings; `on_gpu` is as for `functional`.

    Raises InvalidModel for symbolic sizes without either, and InvalidInput for inputs that it does not allow."""
    leaves = pytree.tree_leaves((tuple(inputs), dict(keywords or {}))) or pytree.tree_leaves(program.example_inputs or ())
    if not leaves or not is_free(program):
        return import_exported(program, copies=copies, on_gpu=on_gpu)
    model = SymbolicProgram(program, copies=copies, on_gpu=on_gpu)
    model.check(leaves)
    return model.bind(model.key(leaves))
