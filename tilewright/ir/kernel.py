"""Kernel IR: what the printers print, the static analysis reads and the interpreter runs.

Grammar::

    Kernel    = name, parameters (global buffers), scalars, maps (of tensors), launch (None on a CPU), body, header
    Statement = Block(statements) | Let(variable, value) | Store(buffer, offset, value) | Allocate(buffer)
              | For(variable, extent, body, kind) | If(condition, then, otherwise) | Comment(text)
              | AtomicAdd(buffer, offset, value) | Invoke(intrinsic, operands) | With(context, buffers, body)
    Operand   = Place(buffer, offset) | Expr

Everything else that a machine can do is an `Invoke` of an instruction, which is data (`ir.intrinsic`). So is the context that some instructions need,
which `With` sets up.

The last parameter of a kernel with checked indices (`ir.expr.checked`) is FAULTS: 64-bit integers, one per site. An index that is out of range is
stored there; this is the only buffer where several threads may store to one element. The kernel never reads it; 0 is never out of range and means no
fault.

A load, or the value of a store, may have a wider type than its buffer: an f32 loaded from an f16 or bf16 buffer is widened, an f32 stored to it is
rounded. Values of the narrow types are only moved, selected and cast.

Offsets count elements (scalars, even if a vector is loaded or stored). A GPU kernel's body is what one thread does; `block_x`.. and
`thread_x`.. are its variables. On a CPU a `parallel` loop is divided among threads. Kernels are frozen and cheap to build: one is built for each
candidate that is lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from tilewright.ir.expr import TRUE, Expr, Load, Var, floordiv, substitute
from tilewright.ir.intrinsic import Context, Intrinsic, Operand
from tilewright.ir.tensor_map import TensorMap

FAULTS = "faults"
"""Name of the parameter where kernels report indices that are out of range."""
TRIPS = Var("trips")
"""The extent along the outermost dimension of a kernel's result, such as the images of a batch; an argument of the call."""
RANGE_BYTES = 1 << 29
"""Bytes of a buffer up to which the code of a GPU kernel with trips is known to be that of every number of them."""
SERIAL_WORK = 1 << 14
"""Element operations up to which a parallel region costs more than it saves."""


@dataclass(frozen=True)
class Buffer:
    """Storage of `size` scalars. space: "global", "shared" (of a GPU block), "cluster" (in equal parts in the shared memory of the blocks of a
    cluster, in their order; a `Store` is to the block's own part) or "register" (locals of one thread). `lanes` > 1 (register only): an array of
    size/lanes vectors, or in a context a register of size/lanes rows. `writable` applies to global parameters, and so does `growth`: the scalars by
    which each of the kernel's `trips` but the first adds to `size`. `alignment` (shared only): of its first element, in bytes; 16 at least."""

    name: str
    dtype: str
    size: int
    space: str = "global"
    lanes: int = 1
    writable: bool = False
    growth: int = 0
    alignment: int = 16


@dataclass(frozen=True)
class Block:
    statements: tuple[Statement, ...]


@dataclass(frozen=True)
class Let:
    """A named scalar or vector that does not change."""

    variable: Var
    value: Expr


@dataclass(frozen=True)
class Store:
    """buffer[offset : offset + value.lanes] = value"""

    buffer: str
    offset: Expr
    value: Expr


@dataclass(frozen=True)
class AtomicAdd:
    """buffer[offset : offset + value.lanes] += value, in global memory; each element is added separately, and other threads may add to it at the same
    time."""

    buffer: str
    offset: Expr
    value: Expr


@dataclass(frozen=True)
class Allocate:
    """A register or shared buffer that lives to the end of the enclosing block; not initialised."""

    buffer: Buffer


@dataclass(frozen=True)
class For:
    """kind: "serial", "unroll" (fully, by the compiler), "simd" (iterations in vector lanes; `reductions` pairs each register scalar that is combined
    across lanes with its combiner), "parallel" (divided among CPU threads) or "team" (one team of CPU threads runs all iterations together: the
    parallel loops inside divide their iterations in the same way every time and end with a barrier; nothing else inside stores to memory).
    `work`: of parallel loops that may be too small for several threads, the element operations of one of the kernel's trips; threads divide them
    where all trips have more than SERIAL_WORK. 0: they always do."""

    variable: Var
    extent: Expr
    body: Statement
    kind: str = "serial"
    reductions: tuple[tuple[str, str], ...] = ()
    work: int = 0


@dataclass(frozen=True)
class If:
    condition: Expr
    then: Statement
    otherwise: Statement | None = None


@dataclass(frozen=True)
class With:
    """A body during which a context is set up. The buffers, in registers and not initialised, belong to the context: only instructions access them,
    by the names in the context's text."""

    context: Context
    buffers: tuple[Buffer, ...]
    body: Statement


@dataclass(frozen=True)
class Place:
    """Where in a buffer an operand of an instruction begins."""

    buffer: str
    offset: Expr


@dataclass(frozen=True)
class Invoke:
    """An instruction applied to operands in the order of its description: expressions for values, places for all others. All threads of its scope
    must reach it together and equally often."""

    intrinsic: Intrinsic
    operands: tuple[Place | Expr, ...] = ()

    def __post_init__(self) -> None:
        described = self.intrinsic.operands
        if [isinstance(given, Place) for given in self.operands] != [operand.storage != "value" for operand in described]:
            raise ValueError(f"{self.intrinsic.name} takes {[operand.name for operand in described]}, not {self.operands}")

    @property
    def places(self) -> tuple[tuple[Operand, Place], ...]:
        return tuple((operand, given) for operand, given in zip(self.intrinsic.operands, self.operands, strict=True) if isinstance(given, Place))

    @property
    def values(self) -> dict[str, Expr]:
        """The expressions by operand name."""
        pairs = zip(self.intrinsic.operands, self.operands, strict=True)
        return {operand.name: given for operand, given in pairs if not isinstance(given, Place)}

    def guard(self, operand: Operand) -> Expr:
        """The condition under which an operand's place is read."""
        return self.values[operand.guard] if operand.guard else TRUE


@dataclass(frozen=True)
class Comment:
    text: str


Statement: TypeAlias = Block | Let | Store | AtomicAdd | Allocate | For | If | Invoke | With | Comment


@dataclass(frozen=True)
class Launch:
    """Blocks of the grid and threads per block, as (x, y, z). `tiles`: pairs (extent, each), where grid[0] is a multiple of the product of all
    ceil(extent / each), the tiles along dimensions of the result; empty if that is not stated. A kernel with `trips` has one pair: the tiles of the
    rows that its trips are of."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    tiles: tuple[tuple[int, int], ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Kernel:
    """`parameters` are in the order of the call's arguments; `scalars` are index parameters that vary between calls (a scan's step).
    `blocks_per_processor` is the occupancy requested from the GPU compiler (0: no request). Groups of `cluster` neighbouring blocks along x run at
    the same time and can access one another's shared memory (compute capability 9.0 or higher; 8 is the largest portable size).

    `trips`: the iterations along the outermost dimension of its result, an argument that follows the scalars, so that the code is that of every
    number of them. The body defines TRIPS by a Let, and its parameters have the sizes for them. On a GPU `launch.tiles` says how the grid follows
    from them (`kernels.gpu.trips`). 0: it has no such argument.

    `maps`: descriptions of parameters for the copy engine; the last arguments of the call."""

    name: str
    parameters: tuple[Buffer, ...]
    body: Statement
    launch: Launch | None = None
    scalars: tuple[Var, ...] = ()
    header: str = ""
    blocks_per_processor: int = 0
    cluster: int = 1
    trips: int = 0
    maps: tuple[TensorMap, ...] = ()

    @property
    def is_gpu(self) -> bool:
        return self.launch is not None

    @property
    def cooperative(self) -> bool:
        """Whether all blocks have to be resident at once, because they meet at barriers."""
        return any(isinstance(statement, Invoke) and statement.intrinsic.scope == "grid" for statement in statements(self.body))


@dataclass(frozen=True)
class GridOfTrips:
    """How the grid of a kernel with trips follows from their number: blocks of `across` for each of the tiles of `each` rows, of which a trip has
    `rows`. `whole`: its code is that of whole tiles alone, which the rows must divide into; otherwise that of a partial last one."""

    rows: int
    each: int
    across: int
    whole: bool

    def blocks(self, trips: int) -> int:
        """Blocks along x."""
        return -(-trips * self.rows // self.each) * self.across


def grid_of_trips(kernel: Kernel) -> GridOfTrips:
    """How the grid of a GPU kernel with trips follows from them."""
    assert kernel.launch is not None and kernel.trips
    ((extent, each),) = kernel.launch.tiles
    return GridOfTrips(extent // kernel.trips, each, kernel.launch.grid[0] // -(-extent // each), extent % each == 0)


def thread_variable(launch: Launch, axis: str = "x") -> Var:
    return Var(f"thread_{axis}", launch.block["xyz".index(axis)])


def block_variable(launch: Launch, axis: str = "x") -> Var:
    return Var(f"block_{axis}", launch.grid["xyz".index(axis)])


def is_own_part(buffer: Buffer, offset: Expr, cluster: int) -> bool:
    """Whether a place in a "cluster" buffer is known to be in the block's own part: in a grid of one cluster, whose ranks are the blocks' numbers."""
    return floordiv(offset, buffer.size // cluster) == Var("block_x", cluster)


def statements(root: Statement) -> Iterator[Statement]:
    """Every statement, parents first."""
    waiting = [root]
    while waiting:
        statement = waiting.pop()
        yield statement
        if isinstance(statement, Block):
            waiting += reversed(statement.statements)
        elif isinstance(statement, (For, With)):
            waiting.append(statement.body)
        elif isinstance(statement, If):
            waiting += [statement.then] if statement.otherwise is None else [statement.otherwise, statement.then]


def required_features(kernel: Kernel) -> tuple[str, ...]:
    """The machine features that the kernel's instructions need (`Intrinsic.requires`), sorted."""
    return tuple(sorted({name for statement in statements(kernel.body) if isinstance(statement, Invoke) for name in statement.intrinsic.requires}))


def expressions(root: Statement) -> Iterator[Expr]:
    """The expressions of every statement, in order; a buffer operand that an instruction reads is given as a load."""
    for statement in statements(root):
        if isinstance(statement, Let):
            yield statement.value
        elif isinstance(statement, (Store, AtomicAdd)):
            yield statement.offset
            yield statement.value
        elif isinstance(statement, Invoke):
            for operand, given in zip(statement.intrinsic.operands, statement.operands, strict=True):
                if not isinstance(given, Place):
                    yield given
                elif operand.reads:
                    yield Load(given.buffer, (given.offset,), operand.dtype)
                else:
                    yield given.offset
        elif isinstance(statement, For):
            yield statement.extent
        elif isinstance(statement, If):
            yield statement.condition


def written_by(statement: Statement) -> tuple[str, ...]:
    """Names of the buffers that the statement itself writes."""
    if isinstance(statement, (Store, AtomicAdd)):
        return (statement.buffer,)
    if isinstance(statement, Invoke):
        return tuple(place.buffer for operand, place in statement.places if operand.writes)
    return ()


def map_expressions(root: Statement, change: Callable[[Expr], Expr], buffer: Callable[[str], str] = lambda name: name) -> Statement:
    """The statement with `change` applied to every expression, and `buffer` to every buffer name in a statement (not in a load)."""
    if isinstance(root, Block):
        return Block(tuple(map_expressions(statement, change, buffer) for statement in root.statements))
    if isinstance(root, Let):
        return Let(root.variable, change(root.value))
    if isinstance(root, (Store, AtomicAdd)):
        return type(root)(buffer(root.buffer), change(root.offset), change(root.value))
    if isinstance(root, With):
        return replace(root, body=map_expressions(root.body, change, buffer))
    if isinstance(root, Invoke):
        operands = (Place(buffer(x.buffer), change(x.offset)) if isinstance(x, Place) else change(x) for x in root.operands)
        return Invoke(root.intrinsic, tuple(operands))
    if isinstance(root, For):
        return replace(root, extent=change(root.extent), body=map_expressions(root.body, change, buffer))
    if isinstance(root, If):
        otherwise = map_expressions(root.otherwise, change, buffer) if root.otherwise is not None else None
        return If(change(root.condition), map_expressions(root.then, change, buffer), otherwise)
    return root


def substitute_in(root: Statement, mapping: Mapping[Var, Expr]) -> Statement:
    """The statement with variables replaced in every expression; a loop over one of them keeps its variable."""
    return map_expressions(root, lambda expr: substitute(expr, mapping)) if mapping else root
