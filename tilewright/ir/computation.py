"""What an operator computes: steps, each a map, a reduction or a scan over index expressions.

Grammar::

    Computation = steps, output names
    Step        = map      out[index(axes)] = body
                | reduce   out[index(axes)] = combine over `reduction` of bodies     (a combiner over tuples)
                       | scan     like reduce, but element i of axis `scan` combines only positions 0..i of the (single) reduction variable

A load inside a body names a graph value or an earlier step. A reduction over a tuple (argmax: value and index) defines one result per component,
named `step`, `step.1`, ... Fusion, generated code, operation counts and the reference implementation all follow from steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType

from tilewright.ir.dtypes import DEFAULT_FLOAT, ELEMENT_TYPES, is_float
from tilewright.ir.expr import INDEX, Apply, Expr, Load, Operand, Var, binary, compare, const, logical_and, rewrite, select, unary, walk, wrap
from tilewright.ir.scalar import OPERATIONS


@dataclass(frozen=True)
class Combiner:
    """An associative, commutative operator over tuples, with its identity; `components` is the length of the tuple."""

    name: str
    components: int
    identity: Callable[[tuple[str, ...]], tuple[Expr, ...]]
    combine: Callable[[tuple[Expr, ...], tuple[Expr, ...]], tuple[Expr, ...]]


def lowest(dtype: str) -> Expr:
    """The identity of max: minus infinity, or the lowest integer."""
    if is_float(dtype):
        return const(float("-inf"), dtype)
    return const(ELEMENT_TYPES[dtype].lowest, dtype)


def highest(dtype: str) -> Expr:
    """The identity of min: infinity, or the highest integer."""
    if is_float(dtype):
        return const(float("inf"), dtype)
    return const(ELEMENT_TYPES[dtype].highest, dtype)


def _fold(operation: str) -> Callable[[tuple[Expr, ...], tuple[Expr, ...]], tuple[Expr, ...]]:
    return lambda a, b: (Apply(operation, (a[0], b[0]), a[0].dtype, max(a[0].lanes, b[0].lanes)),)


def _pick(better: str, nan: str = "lt") -> Callable[[tuple[Expr, ...], tuple[Expr, ...]], tuple[Expr, ...]]:
    """(value, index): the better value, or the lower index on ties. NaN beats any number; `nan` compares the indices of two NaNs."""

    def combine(a: tuple[Expr, ...], b: tuple[Expr, ...]) -> tuple[Expr, ...]:
        wins = compare(better, b[0], a[0])
        tie = logical_and(compare("eq", b[0], a[0]), Apply("lt", (b[1], a[1]), "bool"))
        take: Expr = Apply("or", (wins, tie), "bool")
        if is_float(a[0].dtype):
            a_nan, b_nan = unary("isnan", a[0], "bool"), unary("isnan", b[0], "bool")
            nan_wins = logical_and(b_nan, Apply("or", (Apply("not", (a_nan,), "bool"), Apply(nan, (b[1], a[1]), "bool")), "bool"))
            take = Apply("or", (nan_wins, logical_and(Apply("not", (a_nan,), "bool"), take)), "bool")
        return select(take, b[0], a[0]), select(take, b[1], a[1])

    return combine


COMBINERS: Mapping[str, Combiner] = MappingProxyType(
    {
        "sum": Combiner("sum", 1, lambda t: (const(0, t[0]),), _fold("add")),
        "prod": Combiner("prod", 1, lambda t: (const(1, t[0]),), _fold("mul")),
        "max": Combiner("max", 1, lambda t: (lowest(t[0]),), _fold("max")),
        "min": Combiner("min", 1, lambda t: (highest(t[0]),), _fold("min")),
        "any": Combiner("any", 1, lambda t: (const(0, t[0]),), _fold("or")),
        "all": Combiner("all", 1, lambda t: (const(1, t[0]),), _fold("and")),
        "argmax": Combiner("argmax", 2, lambda t: (lowest(t[0]), const(2**62, INDEX)), _pick("gt")),
        "pooled_argmax": Combiner("pooled_argmax", 2, lambda t: (lowest(t[0]), const(2**62, INDEX)), _pick("gt", nan="gt")),
        "argmin": Combiner("argmin", 2, lambda t: (highest(t[0]), const(2**62, INDEX)), _pick("lt")),
    }
)


@dataclass(frozen=True)
class Step:
    """One map, reduction or scan. `shape` is the shape of the result(s); `index` maps `axes` to the result element that is written (default: `axes`
    itself)."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[Var, ...]
    bodies: tuple[Expr, ...]
    reduction: tuple[Var, ...] = ()
    combiner: str | None = None
    scan: Var | None = None
    index: tuple[Expr, ...] = ()

    def __post_init__(self) -> None:
        if not self.index and self.shape:  # a scalar result has no index, whatever axes of extent 1 it is computed over
            object.__setattr__(self, "index", tuple(self.axes))

    @property
    def kind(self) -> str:
        return "scan" if self.scan is not None else "reduce" if self.combiner else "map"

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(body.dtype for body in self.bodies)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the results, one per component."""
        return (self.name, *(f"{self.name}.{i}" for i in range(1, len(self.bodies))))

    @property
    def identity_index(self) -> bool:
        return self.index == self.axes

    def flops(self) -> int:
        """Arithmetic operations: those of the bodies, plus one combination per reduced element."""
        points = prod(axis.extent or 1 for axis in (*self.axes, *self.reduction))
        if any(axis.extent == 0 for axis in (*self.axes, *self.reduction)):
            return 0
        return points * (arithmetic(*self.bodies) + (len(self.bodies) if self.combiner else 0))


def arithmetic(*bodies: Expr) -> int:
    """Arithmetic operations of an element: those that compute values, not addresses."""
    return sum(OPERATIONS[node.operation].flops for node in walk(*bodies) if isinstance(node, Apply) and not _is_addressing(node))


def _is_addressing(node: Apply) -> bool:
    """Whether the operation computes where an element is stored (index arithmetic, bounds checks) rather than its value."""
    if node.operation == "select":
        node = node.args[0]  # type: ignore[assignment]
    return node.dtype == INDEX or (node.dtype == "bool" and not any(isinstance(part, Load) for part in walk(node)))


@dataclass(frozen=True)
class Computation:
    """The steps of an operator or a region, in order, and the names of its results."""

    steps: tuple[Step, ...]
    outputs: tuple[str, ...]

    def flops(self) -> int:
        return sum(step.flops() for step in self.steps)


@dataclass(frozen=True)
class Tensor:
    """A tensor inside an operator's definition: calling it with index expressions loads one element."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __call__(self, *index: Operand) -> Expr:
        if len(index) != len(self.shape):
            raise ValueError(f"{self.name} has {len(self.shape)} dimensions, indexed with {len(index)}")
        return Load(self.name, tuple(wrap(i) for i in index), self.dtype)

    @property
    def rank(self) -> int:
        return len(self.shape)


LARGEST_SPACE = 1 << 40
"""Limit on the points of an operator's result or reduction: anything larger fits in no machine's memory and would overflow the counters."""


@dataclass
class StepBuilder:
    """Collects the steps of one operator; passed to operator definitions as their first argument."""

    prefix: str
    steps: list[Step] = field(default_factory=list)

    def _axes(self, extents: Sequence[int], letter: str) -> tuple[Var, ...]:
        if any(extent < 0 for extent in extents) or prod(extents) > LARGEST_SPACE:
            raise ValueError(f"no tensor has the extents {', '.join(map(str, extents))}")
        return tuple(Var(f"{letter}{i}", int(extent)) for i, extent in enumerate(extents))

    def _name(self) -> str:
        return f"{self.prefix}.s{len(self.steps)}"

    def map(self, shape: Sequence[int], body: Callable[..., Expr], dtype: str | None = None) -> Tensor:
        """out[i0, i1, ...] = body(i0, i1, ...)"""
        axes = self._axes(shape, "i")
        value = wrap(body(*axes), dtype or DEFAULT_FLOAT)
        step = Step(self._name(), tuple(shape), axes, (value,))
        self.steps.append(step)
        return Tensor(step.name, step.shape, value.dtype)

    def reduce(
        self,
        combiner: str,
        shape: Sequence[int],
        extents: Sequence[int],
        body: Callable[..., Expr | tuple[Expr, ...]],
        *,
        axes: Sequence[int] | None = None,
        index: Callable[..., tuple[Expr, ...]] | None = None,
    ) -> tuple[Tensor, ...]:
        """out[index(i...)] = combine over r0 < extents[0], ... of body(i0, ..., r0, ...).

        `axes` gives the extents of the iteration space if they differ from the result's shape; `index` then maps that space one to one onto the
        result. Returns one tensor per component of the combiner.
        """
        space = self._axes(shape if axes is None else axes, "i")
        reduced = self._axes(extents, "r")
        bodies = body(*space, *reduced)
        bodies = bodies if isinstance(bodies, tuple) else (bodies,)
        assert len(bodies) == COMBINERS[combiner].components, combiner
        where = tuple(index(*space)) if index else space
        step = Step(self._name(), tuple(shape), space, bodies, reduced, combiner, None, where)
        self.steps.append(step)
        return tuple(Tensor(name, step.shape, b.dtype) for name, b in zip(step.names, bodies, strict=True))

    def scan(self, combiner: str, shape: Sequence[int], axis: int, body: Callable[..., Expr | tuple[Expr, ...]]) -> tuple[Tensor, ...]:
        """Inclusive scan along `axis`: out[..., s, ...] = combine over r <= s of body(..., r, ...)."""
        space = self._axes(shape, "i")
        reduced = (Var("r0", int(shape[axis])),)
        at = tuple(reduced[0] if i == axis else v for i, v in enumerate(space))
        bodies = body(*at)
        bodies = bodies if isinstance(bodies, tuple) else (bodies,)
        step = Step(self._name(), tuple(shape), space, bodies, reduced, combiner, space[axis])
        self.steps.append(step)
        return tuple(Tensor(name, step.shape, b.dtype) for name, b in zip(step.names, bodies, strict=True))

    def finish(self, results: Sequence[Tensor], names: Sequence[str]) -> Computation:
        """The computation with its results renamed to graph values. A result that is an input, or is returned twice, gets a step that copies it."""
        renamed: dict[str, str] = {}
        defined = {name for step in self.steps for name in step.names}
        for result, name in zip(results, names, strict=True):
            if result.name not in defined or result.name in renamed:
                copy = self.map(result.shape, result)
                renamed[copy.name] = name
            else:
                renamed[result.name] = name
        return rename(Computation(tuple(self.steps), tuple(names)), renamed)


def rename(computation: Computation, names: Mapping[str, str]) -> Computation:
    """The computation with values renamed, in loads and definitions. Component 0 of a tuple is named after its step; other components of renamed
    steps keep their own names through a copying step."""

    def fix(expr: Expr) -> Expr:
        return rewrite(expr, lambda n: replace(n, buffer=names[n.buffer]) if isinstance(n, Load) and n.buffer in names else n, plain=False)

    steps: list[Step] = []
    for step in computation.steps:
        bodies = tuple(fix(body) for body in step.bodies)
        steps.append(replace(step, name=names.get(step.name, step.name), bodies=bodies))
        for old, new in zip(step.names[1:], steps[-1].names[1:], strict=True):
            target = names.get(old)
            if target is not None and target != new:
                axes = tuple(Var(f"i{i}", extent) for i, extent in enumerate(step.shape))
                component = step.bodies[step.names.index(old)]
                steps.append(Step(target, step.shape, axes, (Load(new, axes, component.dtype),)))
            elif old != new:
                names = {**names, old: new}
    return Computation(tuple(steps), tuple(names.get(o, o) for o in computation.outputs))


def maximum(a: Operand, b: Operand) -> Expr:
    return binary("max", a, b)


def minimum(a: Operand, b: Operand) -> Expr:
    return binary("min", a, b)
