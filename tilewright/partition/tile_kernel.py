"""One GPU kernel of several regions: a block computes a tile of the last result, and what it needs of the results before in shared memory.

    block: for each region in order:
               for each block of the region's kernel for its part of the tile:      (one after another, by all threads)
                   part = region                                                   (in shared memory; the last one in global memory)
               barrier
               the tile's own rows of the part to global memory                    (if other regions need them too)

If the last region sums over what is between, such as the middle channels of an inverted residual, it may be in chunks:

    block: sums = 0                                                                (in registers)
           for each chunk of middle channels:
               part = each region for these channels, as above
               sums += last region over these channels
               barrier
           store the last region's elements of the sums

Rows that several tiles need are computed by each of them, or exchanged by the blocks of a cluster (`tile_exchange`). The first of the tiles that
compute a row stores it where other regions need it.

The part of a region is a problem like any other (`partition.tiles`), and its code that of its schema with addresses moved by where the tile begins.
All kernels have the same number of threads per block. Their shared buffers, and the parts that are not needed any more, have the same places
(`codegen.cuda.shared_offsets`). Asynchronous copies from global memory are ordinary ones where the source is in shared memory.

This is shared-memory-level fusion (DeepCuts, Jung et al., PLDI 2021, section 4.4; FCM, arXiv 2404.19331), for any regions that can be cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from types import MappingProxyType

from tilewright.codegen.access import divide_linear
from tilewright.codegen.assemble import assemble
from tilewright.codegen.cuda import shared_bytes
from tilewright.codegen.describe import described
from tilewright.codegen.intrinsics.barriers import block_barrier, cluster_barrier
from tilewright.codegen.intrinsics.mma import is_product
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import FLOAT32
from tilewright.ir.expr import TRUE, ZERO, Apply, Const, Expr, Load, Var, as_lanes, compare, const, index_const, loads, logical_and, variables
from tilewright.ir.intrinsic import moved
from tilewright.ir.kernel import (
    Allocate,
    AtomicAdd,
    Block,
    Buffer,
    For,
    If,
    Invoke,
    Kernel,
    Launch,
    Let,
    Statement,
    Store,
    block_variable,
    expressions,
    statements,
    substitute_in,
    thread_variable,
)
from tilewright.ir.layout import Layout
from tilewright.ir.region import Call, Lowered, Storage, Unsuitable
from tilewright.ir.stage import tile_of
from tilewright.partition.embedding import embedded
from tilewright.partition.strips import fill_of
from tilewright.partition.tile_exchange import exchange, offers
from tilewright.partition.tiles import Shift, Tiling

TILE, PART, BEGIN, ELEMENT, STORED = "chain_tile", "chain_part", "chain_begin", "chain_element", "chain_stored"
"""Variables of a chain's own code. They occur in the addresses of embedded kernels, so no schema may bind these names."""
FILL_LANES = 4


@dataclass(frozen=True)
class TileSchedule:
    """How a chain is cut: tiles of `sizes` rows along the dimensions of its result in which it can be cut, by `threads` threads each, of which the
    schedules leave room for `resident` blocks on a processor. `chunk`: channels over which the last region sums at a time; 0: all. `exchanged`: the
    dimension along which the tiles belong to the blocks of a cluster, which exchange rows; 0: none. The schedules of its regions follow."""

    sizes: tuple[int, ...]
    threads: int
    resident: int
    chunk: int = 0
    exchanged: int = 0

    def __str__(self) -> str:
        return f"{self.described[3:]} by {self.threads} threads, {self.resident} at a time"

    @property
    def described(self) -> str:
        said = f"in tiles of {' x '.join(map(str, self.sizes))}" + (f" and chunks of {self.chunk} channels" if self.chunk else "")
        return said + (f" that clusters exchange along dimension {self.exchanged}" if self.exchanged else "")


@dataclass(frozen=True)
class _Stage:
    """A region's kernel, the names of its arguments, and where its tile begins in each of them."""

    kernel: Kernel
    arguments: tuple[str, ...]
    shifts: Mapping[str, Shift]


def lower_tiles(tiling: Tiling, stages: Sequence[Lowered], schedule: TileSchedule, machine: Machine) -> Lowered:
    """One kernel of the regions' kernels for their parts of a tile (`Tiling.part`), which have the schedule's number of threads per block.

    Raises:
        Unsuitable: if a region needs several kernels, memory of its own or another block size, if its vectors would not be aligned, or if the parts
            do not fit into shared memory.
    """
    launch = Launch((tiling.blocks, 1, 1), (schedule.threads, 1, 1))
    tiles = [Var(f"{TILE}{axis}", count) for axis, count in enumerate(tiling.tiles)]
    storage: dict[str, Storage] = {}
    parts = [_stage(tiling, number, lowered, launch, tiles, storage) for number, lowered in enumerate(stages)]
    grid = sorted(range(len(tiling.grid)), key=lambda axis: axis == tiling.exchanged)  # the blocks of a cluster are adjacent
    places = divide_linear(block_variable(launch), [tiling.grid[axis] for axis in grid])
    emitter = _Emitter(tiling, parts, launch, tiles)
    code = emitter.in_chunks(tiles[-1]) if tiling.chunked else emitter.code(0, len(parts) - 1)
    met = [cluster_barrier()] if tiling.exchanges else []  # others read what a block offers
    body = Block((*(Let(tiles[axis], place) for axis, place in zip(grid, places, strict=True)), *offers(tiling), *code, *met))
    problem = tiling.problem.with_storage(storage)
    said = f"{schedule}: " + "; ".join(f"{part.region.kind} ({lowered.schedule})" for part, lowered in zip(tiling.cuts, stages, strict=True))
    header = f"{described(problem)}\n{said}"
    kernel, arguments = assemble("chain", body, problem, problem.region.outputs, header=header, launch=launch, cluster=tiling.cluster)
    if (needed := shared_bytes(kernel)) > machine.shared_bytes_per_block:
        raise Unsuitable(f"shared memory {needed} B > {machine.shared_bytes_per_block} B")
    within = tuple(level for lowered in stages for level in lowered.within)
    return Lowered(problem.region, said, (kernel,), (Call(kernel.name, arguments),), MappingProxyType(storage), within=within)


def _stage(tiling: Tiling, number: int, lowered: Lowered, launch: Launch, tiles: Sequence[Var], storage: dict[str, Storage]) -> _Stage:
    """A region's kernel with what it needs; constants packed for it are added to the storage."""
    result = tiling.cuts[number].result
    if len(lowered.kernels) != 1 or len(lowered.calls) != 1 or any(entry.source is None for entry in lowered.storage.values()):
        raise Unsuitable(f"{result} takes {len(lowered.kernels)} kernels or memory of its own under {lowered.schedule}")
    (kernel,), (call,) = lowered.kernels, lowered.calls
    assert kernel.launch is not None
    if tiling.chunked and number == len(tiling.cuts) - 1 and kernel.launch.grid[0] > 1:
        raise Unsuitable(f"the sums of a tile of {result} are more than a block's under {lowered.schedule}")
    if kernel.scalars or kernel.cluster > 1 or kernel.launch.block != launch.block or kernel.launch.grid[1:] != (1, 1):
        raise Unsuitable(f"the kernel of {result} has other blocks under {lowered.schedule}")
    if any(isinstance(statement, AtomicAdd) for statement in statements(kernel.body)):
        raise Unsuitable(f"{result} is summed by atomic additions under {lowered.schedule}")
    if kernel.maps:
        raise Unsuitable(f"the copy engine reads the factors of {result} in memory under {lowered.schedule}")
    shifts = {name: tiling.shift(number, name, tiles) for name in call.arguments if name not in lowered.storage}
    arguments = []
    for name in call.arguments:
        if name in lowered.storage:
            entry, shift = _sliced(tiling, number, lowered.storage[name], tiles)
            name = f"{name}.{number}"
            storage[name], shifts[name] = replace(entry, value=replace(entry.value, name=name)), shift
        arguments.append(name)
    for parameter, name in zip(kernel.parameters, arguments, strict=True):
        if shifts[name].step % _widest(kernel, parameter.name):
            raise Unsuitable(f"vectors of {name} are not aligned in all tiles under {lowered.schedule}")
    return _Stage(kernel, tuple(arguments), shifts)


def _sliced(tiling: Tiling, number: int, entry: Storage, tiles: Sequence[Expr]) -> tuple[Storage, Shift]:
    """A packed constant with the parts of all tiles one after another, and where the tile's begins."""
    assert entry.source is not None
    slices = [(axis, *rest) for axis, *rest in tiling.slices(number, entry.source) if tiling.tiles[axis] > 1 or rest[1]]
    if not slices:
        return entry, Shift(ZERO, 0)
    if entry.view is None or entry.matrix is not None:
        raise Unsuitable(f"{entry.source} is transformed as a whole")
    counts = tuple(tiling.tiles[axis] for axis, _, _ in slices)
    sizes, strides, offset = entry.view
    view = ((*counts, *sizes), (*(distance for _, distance, _ in slices), *strides), offset + sum(first for _, _, first in slices))
    old, outer = entry.layout, len(counts)
    order = (*((dim, 0) for dim in range(outer)), *((dim + outer, factor) for dim, factor in old.order))
    layout = Layout((*counts, *old.shape), order, (*((0, 0),) * outer, *old.halo))
    shift = ZERO
    for (axis, _, _), stride in zip(slices, layout.strides[:outer], strict=True):
        shift = shift + tiles[axis] * stride
    return replace(entry, value=replace(entry.value, shape=layout.shape), layout=layout, view=view), Shift(shift, old.size)


def _widest(kernel: Kernel, name: str) -> int:
    """Elements of the widest vector that a kernel accesses in a buffer."""
    found = [load.lanes for load in loads(*expressions(kernel.body)) if load.buffer == name]
    for statement in statements(kernel.body):
        if isinstance(statement, Store) and statement.buffer == name:
            found.append(statement.value.lanes)
        elif isinstance(statement, Invoke):
            found += [operand.row for operand, place in statement.places if place.buffer == name]
    return max(found, default=1)


@dataclass(frozen=True)
class _Emitter:
    """Emits the code of a block. `tiles`: the numbers of its tile along each axis."""

    tiling: Tiling
    parts: Sequence[_Stage]
    launch: Launch
    tiles: Sequence[Var]

    def code(self, first: int, number: int) -> list[Statement]:
        """The regions from `first` to `number` in order, with barriers between. The result of the last has its place already. What the one before
        stores is allocated inside, so that its place is free afterwards."""
        rank = ZERO if self.tiling.exchanged is None else self.tiles[self.tiling.exchanged]
        own = [*_blocks(self.tiling, self.parts, number), *exchange(self.tiling, number, rank, self.launch), *self.stored(number)]
        if number == first:
            return own
        needed = [part for at in self.tiling.last_of(number) if at >= first for part in _allocated(self.tiling, at, self.launch, at == first)]
        return [Block((*needed, *self.code(first, number - 1), *own))]

    def stored(self, number: int) -> list[Statement]:
        """Stores the tile's own rows of a region's result, those that no tile before it computes, if other regions need them."""
        result = self.tiling.cuts[number].result
        if result not in self.tiling.storage or result not in self.tiling.problem.region.outputs:
            return []
        value, layout, tile = self.tiling.problem.values[result], self.tiling.problem.layouts[result], self.tiling.storage[result]
        target, source = layout.dense_strides(), tile.dense_strides()
        if target is None or source is None:
            raise Unsuitable(f"{result} is stored in blocks")
        order = [dim for dim, _ in layout.order]
        threads, total = prod(self.launch.block), prod(tile.shape)
        element = Var(STORED, -(-total // threads))
        linear = element * threads + thread_variable(self.launch)
        places = dict(zip(order, divide_linear(linear, [tile.shape[dim] for dim in order]), strict=True))
        own, begins = [compare("lt", linear, index_const(total))] if total % threads else [], dict.fromkeys(order, ZERO)
        for number_of, rows, window in zip(self.tiles, self.tiling.cuts[number].spans[result], self.tiling.windows[number], strict=True):
            if rows is None or window is None:  # all tiles along this axis compute the same
                own.append(compare("eq", number_of, ZERO))
                continue
            firsts = [window.first(at) for at in range(window.tiles)]
            if firsts[0] or firsts[-1] + window.count < window.extent or any(b > a + window.count for a, b in pairwise(firsts)):
                raise Unsuitable(f"its tiles do not compute all rows of {result}")
            begins[rows.dim] = window.first_of(number_of)
            if any(b < a + window.count for a, b in pairwise(firsts)):
                before = window.first_of(number_of - 1) + window.count
                first = compare("ge", begins[rows.dim] + places[rows.dim], before)
                own.append(Apply("or", (compare("eq", number_of, ZERO), first), "bool"))
        at, to = ZERO + 0, ZERO + 0
        for dim in order:
            at = at + (places[dim] + tile.halo[dim][0]) * source[dim]
            to = to + (places[dim] + begins[dim] + (layout.halo[dim][0] + layout.outside(dim)[0])) * target[dim]
        copy: Statement = Store(result, to, Load(tile_of(result), (at,), value.dtype))
        return [For(element, index_const(element.extent or 1), If(logical_and(*own), copy) if own else copy)]

    def in_chunks(self, chunk: Var) -> list[Statement]:
        """The regions before `Tiling.inside`, and the others for each chunk."""
        tiling, last, inside = self.tiling, len(self.parts) - 1, self.tiling.inside
        begins, (before, adding, after) = _begins(self.parts, last), split_sums(_body(tiling, self.parts, last))
        fixed = [begin for begin in begins if chunk not in variables(begin.value)]
        moving = [begin for begin in begins if begin not in fixed]
        if not {chunk, *(begin.variable for begin in moving)}.isdisjoint(_used(*before, *after)):
            raise Unsuitable("what follows the sums depends on the chunk")
        own = [*_allocated(tiling, last - 1, self.launch, last - 1 == inside), *self.code(inside, last - 1), *moving, *adding]
        # the next chunk's storage is in the places that the sums have read
        met = cluster_barrier() if any(number >= inside for number in tiling.exchanges) else block_barrier()
        loop = For(chunk, index_const(tiling.tiles[-1]), Block((*own, met)))
        whole: list[Statement] = [*fixed, *before, loop, *after]
        if not inside:
            return whole
        return [Block((*_allocated(tiling, inside - 1, self.launch, inside == 1), *self.code(0, inside - 1), *whole))]


def split_sums(body: Sequence[Statement]) -> tuple[Sequence[Statement], Sequence[Statement], Sequence[Statement]]:
    """The statements of a kernel that set its sums to zero, that add to them, and that follow. The second may run for each of several parts of the
    factors, since they only add.

    Raises:
        Unsuitable: if the kernel has no such sums in registers.
    """
    zeroed = next((place for place, statement in enumerate(body) if _zeroes(statement)), None)
    if zeroed is None:
        raise Unsuitable("its kernel keeps no sums in registers")
    store = next(statement for statement in statements(body[zeroed]) if isinstance(statement, Store))
    sums = store.buffer
    written = [place for place, statement in enumerate(body) if any(_stores(member, sums) for member in statements(statement))]
    end = max(written) + 1
    fixed = [member for member in body[zeroed + 1 : end] if isinstance(member, Let) and not any(loads(member.value))]
    before, adding, after = [*body[: zeroed + 1], *fixed], [member for member in body[zeroed + 1 : end] if member not in fixed], body[end:]
    others = [member for statement in adding for member in statements(statement) if not _adds(member, sums)]
    if any(_stores(member, sums) or any(load.buffer == sums for load in loads(*_own(member))) for member in others):
        raise Unsuitable("its kernel does more with its sums than to add to them")
    local = {member.buffer.name for statement in body for member in statements(statement) if isinstance(member, Allocate)}
    if any(load.buffer not in local for statement in before for load in loads(*expressions(statement))):
        raise Unsuitable("its kernel reads before it sums")
    bound = {member.variable for member in adding if isinstance(member, Let)}
    made = {member.buffer.name for member in adding if isinstance(member, Allocate)}
    if not bound.isdisjoint(_used(*after)) or any(load.buffer in made for statement in after for load in loads(*expressions(statement))):
        raise Unsuitable("its kernel uses after its sums what it computes before")
    return before, adding, after


def _zeroes(statement: Statement) -> bool:
    """Whether a statement is a loop that sets a buffer to zero."""
    return isinstance(statement, For) and isinstance(statement.body, Store) and statement.body.value == Const(0.0, statement.body.value.dtype)


def _adds(statement: Statement, sums: str) -> bool:
    """Whether a statement adds something to a sum that depends on none."""
    if isinstance(statement, Invoke) and is_product(statement.intrinsic):
        updated, *factors = (place.buffer for _, place in statement.places)
        return updated == sums and sums not in factors
    if not isinstance(statement, Store) or statement.buffer != sums:
        return False
    value = statement.value
    if not isinstance(value, Apply) or value.operation != "add" or value.args[0] != Load(sums, (statement.offset,), value.dtype, value.lanes):
        return False
    return all(load.buffer != sums for load in loads(value.args[1]))


def _stores(statement: Statement, buffer: str) -> bool:
    if isinstance(statement, Invoke):
        return any(operand.writes and place.buffer == buffer for operand, place in statement.places)
    return isinstance(statement, (Store, AtomicAdd)) and statement.buffer == buffer


def _own(statement: Statement) -> Iterator[Expr]:
    """The expressions of a statement without those of its inner statements."""
    if isinstance(statement, For):
        return expressions(replace(statement, body=Block(())))
    if isinstance(statement, If):
        return expressions(replace(statement, then=Block(()), otherwise=None))
    return iter(()) if isinstance(statement, Block) else expressions(statement)


def _used(*roots: Statement) -> frozenset[Var]:
    """The variables in the expressions of statements."""
    return variables(*(expr for root in roots for expr in expressions(root)))


def _allocated(tiling: Tiling, number: int, launch: Launch, first: bool) -> list[Statement]:
    """Allocates the storage of an inner result, and fills it if it has a halo. `first`: nothing is computed before it is stored to."""
    result = tiling.cuts[number].result
    name = tile_of(result)
    value, layout = tiling.problem.values[result], tiling.storage[result]
    allocated = Allocate(Buffer(name, value.dtype, layout.size, "shared"))
    if not layout.is_padded:
        return [allocated]
    outside = fill_of(tiling.cuts, number) or const(0, value.dtype)
    cut = {rows.dim for rows in tiling.cuts[number].spans[result] if rows is not None}
    if outside.value and any(any(halo) for dim, halo in enumerate(layout.halo) if dim not in cut):
        raise Unsuitable(f"{result} is padded with {outside.value}, and with zeros")
    lanes = FILL_LANES if value.dtype == FLOAT32 and layout.size % FILL_LANES == 0 else 1
    rounds = -(-layout.size // (lanes * prod(launch.block)))
    element = Var(ELEMENT, rounds)
    place = (element * prod(launch.block) + thread_variable(launch)) * lanes
    fill: Statement = Store(name, place, as_lanes(Const(outside.value, value.dtype), lanes))
    if layout.size % (lanes * prod(launch.block)):
        fill = If(compare("lt", place, index_const(layout.size)), fill)
    # a first region stores before any other barrier
    return [allocated, For(element, index_const(rounds), fill), *([block_barrier()] if first else [])]


def _begins(parts: Sequence[_Stage], number: int) -> list[Let]:
    """The variables that hold where a region's tile begins in what it reads and stores, where that is an expression."""
    stage = parts[number]
    offsets = {parameter.name: stage.shifts[name].offset for parameter, name in zip(stage.kernel.parameters, stage.arguments, strict=True)}
    return [Let(_begin(number, name), offset) for name, offset in offsets.items() if not isinstance(offset, (Const, Var))]


def _begin(number: int, parameter: str) -> Var:
    return Var(f"{BEGIN}{number}_{parameter}")


def _body(tiling: Tiling, parts: Sequence[_Stage], number: int) -> tuple[Statement, ...]:
    """The statements of a region's kernel, at the place of the tile; the number of its block is a variable, unless it has one."""
    stage = parts[number]
    kernel = stage.kernel
    assert kernel.launch is not None
    places = {}
    for parameter, name in zip(kernel.parameters, stage.arguments, strict=True):
        offset = stage.shifts[name].offset
        at = offset if isinstance(offset, (Const, Var)) else _begin(number, parameter.name)
        places[parameter.name] = (tile_of(name) if name in tiling.storage else name, at)
    body = _copied(embedded(kernel, places, str(number)), frozenset(tile_of(name) for name in tiling.storage))
    count = kernel.launch.grid[0]
    body = substitute_in(body, {block_variable(kernel.launch): Var(f"{PART}{number}", count) if count > 1 else ZERO})
    return body.statements if isinstance(body, Block) else (body,)


def _blocks(tiling: Tiling, parts: Sequence[_Stage], number: int) -> list[Statement]:
    """The blocks of a region's kernel, one after another, and a barrier unless it is the last region."""
    kernel = parts[number].kernel
    assert kernel.launch is not None
    count = kernel.launch.grid[0]
    begins, members = _begins(parts, number), _body(tiling, parts, number)
    part = Var(f"{PART}{number}", count)
    shared = any(isinstance(member, Allocate) and member.buffer.space == "shared" for statement in members for member in statements(statement))
    last = number == len(parts) - 1
    # the next block reuses the shared buffers
    inside, after = shared and (count > 1 or not last), not shared and not last
    loop = For(part, index_const(count), Block((*members, block_barrier()) if inside else members))
    return [*begins, loop, *([block_barrier()] if after else [])]


def _copied(root: Statement, tiles: frozenset[str]) -> Statement:
    """The statement with asynchronous copies from a tile as loads and stores: these have taken place when others are awaited."""
    if isinstance(root, Block):
        return Block(tuple(_copied(member, tiles) for member in root.statements))
    if isinstance(root, For):
        return replace(root, body=_copied(root.body, tiles))
    if isinstance(root, If):
        return replace(root, then=_copied(root.then, tiles), otherwise=_copied(root.otherwise, tiles) if root.otherwise is not None else None)
    if not isinstance(root, Invoke) or all(place.buffer not in tiles for _, place in root.places):
        return root
    if root.intrinsic.meaning is not moved or [operand.access for operand, _ in root.places] != ["begin", "read"]:
        raise Unsuitable(f"{root.intrinsic.name} reads global memory")
    (operand, target), (source, place) = root.places
    guard = root.guard(source)
    copy = Store(target.buffer, target.offset, Load(place.buffer, (place.offset,), operand.dtype, operand.row))
    zeros = Store(target.buffer, target.offset, as_lanes(const(0, operand.dtype), operand.row))
    return copy if guard == TRUE else If(guard, copy, zeros)
