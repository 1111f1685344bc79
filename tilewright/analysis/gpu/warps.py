"""Memory transactions of a GPU kernel, by evaluating the addresses of its warps over the kernel IR.

Every access to shared or global memory is evaluated at once for all lanes of all warps of many blocks, over all iterations of the surrounding loops:
an index expression becomes an array with one axis for each surrounding loop (the innermost first), then blocks, warps and lanes. An axis on which an
expression does not depend has length 1 and only multiplies the count. Terms that are equal in all lanes of a warp shift all addresses together (in
global memory, if they are whole sectors), do not change conflicts, and are left out, which keeps the arrays small.

    shared memory   32 banks of 4 bytes. A warp's access takes as many wavefronts as the largest number of distinct words in one bank among lanes
                    that are served together: all 32 for accesses of 4 bytes, half a warp for 8 bytes, a quarter for 16 bytes, and twice as
                    many if each lane's address equals that of the lane whose number differs in bit 0, or of the lane whose number differs
                    in bit 1.
    global memory   as many sectors of 32 bytes as the active lanes touch.
    asynchronous    of 4 and 8 bytes: one wavefront per sector read. Of 16 bytes: no wavefront, as they bypass level 1, and as many sectors as
    copies          they touch in shared memory, if these are more (rows that begin in the middle of a sector).
    matrices        ldmatrix: like loads of 16 bytes by the lanes that give an address (not compared with counters).
    clusters        one in `cluster` loads from a cluster's shared memory reads the block's own part, unless all of them are known to do so.

Source: Tuna (2021), section III.B, "Shared memory bank conflict", which evaluates the first warp; CUDA C++ Programming Guide, "Compute Capability
5.x", shared memory, for the banks. The treatment of wide accesses and copies is not documented: these rules were found by comparison with counters of
an H200 and reproduce its counts (bench/gpu_analysis.py). Dead loads that the compiler removes are counted here, unless the number of executed loads
is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from tilewright.errors import TilewrightError
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import INDEX, Apply, Const, Expr, Load, Var, linear
from tilewright.ir.intrinsic import Operand
from tilewright.ir.kernel import (
    Allocate,
    AtomicAdd,
    Block,
    Buffer,
    For,
    If,
    Invoke,
    Kernel,
    Let,
    Place,
    Statement,
    Store,
    With,
    expressions,
    is_own_part,
    statements,
    written_by,
)
from tilewright.ir.scalar import OPERATIONS

WARP = 32
BANKS = 32
BANK_BYTES = 4
SECTOR_BYTES = 32
MOST_BLOCKS = 256
"""Maximum number of blocks of a grid that are evaluated; counts are scaled to the grid."""
_GOLDEN = 0.6180339887498949


class NotStatic(TilewrightError):
    """An address depends on data, or is an engine's (`ir.intrinsic.Intrinsic.engine`)."""


@dataclass(frozen=True)
class Access:
    """One place in a kernel that touches memory, summed over the whole grid.

    `kind`: "load", "store", "copy" (asynchronous, from global to shared: one access of each), "atomic". `bytes`: per lane. `requests`: warp
    instructions with at least one active lane; `lanes`: their active lanes in total; `transactions`: wavefronts of shared memory (not counted here
    for copies), sectors of global memory; `ideal`: wavefronts of shared memory without bank conflicts, the sectors of global memory again."""

    buffer: str
    space: str
    kind: str
    bytes: int
    requests: float
    lanes: float
    transactions: float
    ideal: float


@dataclass(frozen=True)
class Transactions:
    """A kernel's memory transactions in one launch: wavefronts of shared and sectors of global memory. `shared` includes asynchronous copies, which
    `shared_stores` does not; global loads include them. `ideal_loads` and `ideal_stores`: wavefronts of shared memory without bank conflicts;
    `load_requests` and `store_requests`: warp instructions that access global memory."""

    shared_loads: float
    shared_stores: float
    shared: float
    global_loads: float
    global_stores: float
    ideal_loads: float
    ideal_stores: float
    load_requests: float
    store_requests: float


def accesses(kernel: Kernel, most_blocks: int = MOST_BLOCKS) -> tuple[Access, ...]:
    """All accesses to shared, cluster-shared and global memory of a GPU kernel, in the order of the code.

    Raises:
        ValueError: for a kernel without a launch.
        NotStatic: if an address depends on loaded data.
    """
    if kernel.launch is None:
        raise ValueError(f"kernel {kernel.name} has no launch: it is for a CPU")
    return tuple(KernelWalk(kernel, chosen_blocks(prod(kernel.launch.grid), most_blocks)).found)


def transactions_of(kernel: Kernel, most_blocks: int = MOST_BLOCKS, executed: Mapping[int, float] | None = None) -> Transactions:
    """The sums of a kernel's accesses. `executed`: the number of shared-memory loads that all warps really execute, by the bytes that a lane reads,
    if known: loads that the compiler removed are then not counted. Raises like `accesses`."""
    found = accesses(kernel, most_blocks)

    def total(of: str, space: str, *kinds: str) -> float:
        return float(sum(getattr(access, of) for access in found if access.space == space and access.kind in kinds))

    kept = 1.0
    if executed is not None:
        written = sum(access.requests * access.bytes for access in found if access.space != "global" and access.kind == "load")
        # the compiler splits some loads, which are merged again: executed loads never exceed written ones
        kept = min(1.0, sum(size * times for size, times in executed.items()) / written) if written else 1.0

    def shared(of: str) -> tuple[float, float]:
        loads = total(of, "shared", "load") + total(of, "cluster", "load") / kernel.cluster
        return loads * kept, total(of, "shared", "store") + total(of, "cluster", "store")

    (loads, stores), (ideal_loads, ideal_stores) = shared("transactions"), shared("ideal")
    copies = sum(a.transactions for a in found if a.space == "global" and a.kind == "copy" and a.bytes < 16)
    reads, writes = ("load", "copy"), ("store", "atomic")
    return Transactions(
        loads, stores, loads + stores + copies, total("transactions", "global", *reads), total("transactions", "global", *writes),
        ideal_loads, ideal_stores, total("requests", "global", *reads), total("requests", "global", *writes),
    )  # fmt: skip


def chosen_blocks(count: int, most: int) -> np.ndarray:
    """All blocks of a grid, or `most` of them that follow no pattern of its tiles: multiples of the golden ratio."""
    if count <= most:
        return np.arange(count)
    return np.unique((np.arange(most) * _GOLDEN % 1.0 * count).astype(np.int64))


class KernelWalk:
    """Walks a kernel once, with the values of variables as arrays over the surrounding loops, the `chosen` blocks, warps and lanes. Its scalar
    parameters are 0, the number of the first repetition."""

    def __init__(self, kernel: Kernel, chosen: np.ndarray) -> None:
        assert kernel.launch is not None
        grid, block = kernel.launch.grid, kernel.launch.block
        blocks = chosen.reshape(-1, 1, 1)
        warps = -(-prod(block) // WARP)
        threads = np.arange(warps * WARP).reshape(1, warps, WARP)
        self.scale = prod(grid) / blocks.size
        self.extents: tuple[int, ...] = (blocks.size, warps, WARP)
        self.values: dict[str, np.ndarray] = {variable.name: np.zeros((1, 1, 1), np.int64) for variable in kernel.scalars}
        for name, extents, numbers in (("block", grid, blocks), ("thread", block, threads)):
            self.values[f"{name}_x"] = numbers % extents[0]
            self.values[f"{name}_y"] = numbers // extents[0] % extents[1]
            self.values[f"{name}_z"] = numbers // (extents[0] * extents[1])
        self.buffers: dict[str, Buffer] = {buffer.name: buffer for buffer in kernel.parameters}
        self.cluster = kernel.cluster
        self.found: list[Access] = []
        # the evaluated node is kept with its value, so that its identity is not reused
        self.known: dict[int, tuple[Expr, np.ndarray]] = {}
        self.visit(kernel.body, threads < prod(block))

    # --- statements ---

    def visit(self, root: Statement, mask: np.ndarray) -> None:
        """Counts the accesses of a statement in the lanes of the mask."""
        if isinstance(root, Block):
            for statement in root.statements:
                self.visit(statement, mask)
        elif isinstance(root, Allocate):
            self.buffers[root.buffer.name] = root.buffer
        elif isinstance(root, Let):
            self.reads(root.value, mask)
            if root.variable.dtype in (INDEX, "bool"):
                if root.variable.name in self.values:  # drop values computed with the variable's old value
                    self.known = {}
                self.values[root.variable.name] = self.evaluated(root.value)
        elif isinstance(root, (Store, AtomicAdd)):
            self.reads(root.value, mask)
            self.touch(root.buffer, root.offset, root.value.lanes, "store" if isinstance(root, Store) else "atomic", mask)
        elif isinstance(root, Invoke):
            self.invoke(root, mask)
        elif isinstance(root, With):
            self.buffers |= {buffer.name: buffer for buffer in root.buffers}
            self.visit(root.body, mask)
        elif isinstance(root, If):
            holds = self.evaluated(root.condition)
            self.visit(root.then, mask & holds)
            if root.otherwise is not None:
                self.visit(root.otherwise, mask & ~holds)
        elif isinstance(root, For):
            self.loop(root, mask)

    def invoke(self, root: Invoke, mask: np.ndarray) -> None:
        """Counts the memory reads of an instruction, then its writes."""
        if root.intrinsic.engine:
            raise NotStatic(f"{root.intrinsic.name}: what the copy engine and warpgroups access is not counted", "measure the kernel")
        copied = next(((operand, place) for operand, place in root.places if operand.access == "begin"), None)
        target = None
        if copied is not None and copied[0].size * size_of(copied[0].dtype) == 16:
            # copies of sixteen bytes bypass level 1, sector by sector of their destination
            target = self.varying(copied[1].offset, SECTOR_BYTES // size_of(copied[0].dtype)) * size_of(copied[0].dtype)
        kind = "copy" if copied is not None else "load"
        for value in root.values.values():
            self.reads(value, mask)
        for operand, place in root.places:
            if operand.reads:
                taken = mask & self.evaluated(root.guard(operand)) if operand.guard else mask
                self.rows(operand, place, kind, taken, target)
        for operand, place in root.places:
            if operand.writes:
                self.rows(operand, place, "copy" if copied is not None else "store", mask)

    def rows(self, operand: Operand, place: Place, kind: str, mask: np.ndarray, target: np.ndarray | None = None) -> None:
        """Counts the rows of an operand in the lanes that give an address."""
        if operand.lanes:
            mask = mask & (np.arange(WARP) < operand.lanes)
        for row in range(operand.rows if self.buffers[place.buffer].space != "register" else 0):
            self.touch(place.buffer, place.offset + row * operand.row_stride, operand.row, kind, mask, target)

    def loop(self, root: For, mask: np.ndarray) -> None:
        """Counts all iterations at once, along a new first axis."""
        if not self.touches_memory(root.body):
            return
        extent = self.evaluated(root.extent)
        most = int(extent.max())
        if most <= 0:
            return
        outer = self.extents, self.values, self.known
        self.extents, self.values, self.known = (most, *self.extents), dict(self.values), {}
        position = np.arange(most).reshape(-1, *[1] * (len(self.extents) - 1))
        self.values[root.variable.name] = position
        self.visit(root.body, mask if extent.min() == most else mask & (position < extent))
        self.extents, self.values, self.known = outer

    def touches_memory(self, root: Statement) -> bool:
        """Whether a statement accesses anything but registers."""
        registers = {name for name, buffer in self.buffers.items() if buffer.space == "register"}
        registers |= {s.buffer.name for s in statements(root) if isinstance(s, Allocate) and s.buffer.space == "register"}
        registers |= {buffer.name for s in statements(root) if isinstance(s, With) for buffer in s.buffers}
        if any(name not in registers for s in statements(root) for name in written_by(s)):
            return True
        return any(load.buffer not in registers for expr in expressions(root) for load, _ in _loads(expr))

    # --- memory ---

    def reads(self, value: Expr, mask: np.ndarray, kind: str = "load", target: np.ndarray | None = None) -> None:
        """Counts the loads of an expression, each under the conditions that guard it."""
        for load, conditions in _loads(value):
            if self.buffers[load.buffer].space != "register":
                taken = mask
                for condition, side in conditions:
                    holds = self.evaluated(condition)
                    taken = taken & (holds if side else ~holds)
                self.touch(load.buffer, load.index[0], load.lanes, kind, taken, target)

    def touch(self, name: str, offset: Expr, lanes: int, kind: str, mask: np.ndarray, target: np.ndarray | None = None) -> None:
        """Counts one access; `target`: for the global side of a copy, its addresses in shared memory without whole sectors."""
        buffer = self.buffers[name]
        if buffer.space == "register":
            return
        size = size_of(buffer.dtype)
        shared = buffer.space in ("shared", "cluster")
        sides = [self.varying(offset, 0 if shared else SECTOR_BYTES // size) * size]
        if target is not None:
            sides.append(target)
        *addresses, active = np.broadcast_arrays(*sides, mask)
        have = (1,) * (len(self.extents) - active.ndim) + active.shape
        repeated = prod(extent for extent, length in zip(self.extents[:-1], have[:-1], strict=True) if length == 1)
        *addresses, active = (np.broadcast_to(array, (*array.shape[:-1], WARP)).reshape(-1, WARP) for array in (*addresses, active))
        if shared and kind == "copy":
            count, ideal = np.zeros((2, len(active)))
        elif shared:
            count = shared_wavefronts(addresses[0], active, size * lanes)
            ideal = shared_wavefronts(addresses[0], active, size * lanes, conflicts=False)
        else:
            count = ideal = np.max([distinct(side // SECTOR_BYTES, active) for side in addresses], axis=0)
        times = self.scale * repeated
        figures = (times * float(figure) for figure in (active.any(axis=1).sum(), active.sum(), count.sum(), ideal.sum()))
        own = buffer.space == "cluster" and is_own_part(buffer, offset, self.cluster)
        self.found.append(Access(name, "shared" if own else buffer.space, kind, size * lanes, *figures))

    def varying(self, offset: Expr, period: int) -> np.ndarray:
        """The offset without terms that are equal in all lanes of a warp; with a period, only those that are multiples of it are left out."""
        form = linear(offset)
        total = np.zeros((1,) * 3, np.int64) + (form.constant % period if period else 0)
        for atom, coefficient in form.terms:
            value = self.evaluated(atom)
            if value.shape[-1] > 1 or period and coefficient % period:
                total = total + value * coefficient
        return total

    # --- values ---

    def evaluated(self, root: Expr) -> np.ndarray:
        """The value of an index or a condition over the axes on which it depends.

        Raises:
            NotStatic: if it depends on data.
        """
        if isinstance(root, Const):
            return np.asarray(root.value).reshape(1, 1, 1)
        if isinstance(root, Var):
            if root.name not in self.values:
                raise NotStatic(f"the variable {root.name} has no value that is known before the kernel runs", "analyse it for given scalars")
            return self.values[root.name]
        if isinstance(root, Load):
            raise NotStatic(f"an address depends on what is loaded from {root.buffer}", "its transactions are not known before the kernel runs")
        if id(root) not in self.known:
            operands = [self.evaluated(child) for child in root.args]
            self.known[id(root)] = (root, np.asarray(OPERATIONS[root.operation].reference(*operands)))
        return self.known[id(root)][1]


def _loads(root: Expr) -> Iterator[tuple[Load, tuple[tuple[Expr, bool], ...]]]:
    """The distinct loads of an expression, each with the conditions (and their truth values) under which it is first evaluated."""
    seen: set[int] = set()

    def visit(node: Expr, conditions: tuple[tuple[Expr, bool], ...]) -> Iterator[tuple[Load, tuple[tuple[Expr, bool], ...]]]:
        if id(node) in seen:
            return
        seen.add(id(node))
        if isinstance(node, Load):
            yield node, conditions
            for child in node.index:
                yield from visit(child, conditions)
        elif isinstance(node, Apply) and node.operation == "select" and node.args[0].lanes == 1:
            condition, yes, no = node.args
            yield from visit(condition, conditions)
            yield from visit(yes, (*conditions, (condition, True)))
            yield from visit(no, (*conditions, (condition, False)))
        elif isinstance(node, Apply):
            for child in node.args:
                yield from visit(child, conditions)

    yield from visit(root, ())


# --- transactions of a warp's addresses -------------------------------------------------------------------------------


def distinct(values: np.ndarray, active: np.ndarray) -> np.ndarray:
    """Number of distinct values among the active ones of each row. values and active: [requests, lanes]."""
    least = np.iinfo(np.int64).min
    ordered = np.sort(np.where(active, values, least), axis=1)
    fresh = np.concatenate([ordered[:, :1] != least, ordered[:, 1:] != ordered[:, :-1]], axis=1)
    counts: np.ndarray = fresh.sum(axis=1)
    return counts


def shared_wavefronts(addresses: np.ndarray, active: np.ndarray, bytes_each: int, conflicts: bool = True) -> np.ndarray:
    """Wavefronts of each request; without conflicts, one for each group of lanes that are served together. addresses: [requests, 32] bytes, aligned
    to the access of `bytes_each`; active: the same shape."""
    words = max(1, bytes_each // BANK_BYTES)
    served = _wide if conflicts else _any_active
    if words == 1:
        return served(addresses, active, words)
    group = WARP // words  # lanes whose accesses fill the banks once
    wide = 2 * group
    rows, held = addresses.reshape(-1, wide), active.reshape(-1, wide)
    together = np.zeros(len(rows), bool)
    for bit in (1, 2):
        other = np.arange(wide) ^ bit
        together |= ((rows == rows[:, other]) | ~held | ~held[:, other]).all(axis=1)
    result = np.empty(len(rows), np.int64)
    result[together] = served(rows[together], held[together], words)
    apart_rows, apart_held = (a[~together].reshape(-1, group) for a in (rows, held))
    result[~together] = served(apart_rows, apart_held, words).reshape(-1, 2).sum(axis=1)
    wavefronts: np.ndarray = result.reshape(len(addresses), -1).sum(axis=1)
    return wavefronts


def _any_active(addresses: np.ndarray, active: np.ndarray, words: int) -> np.ndarray:
    """One wavefront if a lane is active."""
    return np.asarray(active.any(axis=1), np.int64)


def _wide(addresses: np.ndarray, active: np.ndarray, words: int) -> np.ndarray:
    """Wavefronts of lanes that are served together, each with several adjacent words."""
    parts = (addresses // BANK_BYTES)[..., None] + np.arange(words)
    held = np.broadcast_to(active[..., None], parts.shape)
    shape = (len(addresses), addresses.shape[1] * words)
    return _most_of_a_bank(parts.reshape(shape), held.reshape(shape))


def _most_of_a_bank(words: np.ndarray, active: np.ndarray) -> np.ndarray:
    """The largest number of distinct words in one bank, for each row."""
    if not len(words):
        return np.zeros(0, np.int64)
    least = np.iinfo(np.int64).min
    ordered = np.sort(np.where(active, words, least), axis=1)
    fresh = ordered != least
    fresh[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    number = np.arange(len(words))[:, None] * BANKS + ordered % BANKS
    counts = np.bincount(number.ravel(), weights=fresh.ravel(), minlength=len(words) * BANKS)
    most: np.ndarray = counts.reshape(len(words), BANKS).max(axis=1)
    return most.astype(np.int64)
