"""Copies of boxes of tensors between global and shared memory by the copy engine (PTX: cp.async.bulk.tensor, compute capability 9.0).

One thread starts a copy, whose bytes count for the phase of a barrier (`mbarrier`); who waited for that phase may read the box. Before a box is
overwritten, all that read it have arrived at another barrier, for which the thread waits. The map (`ir.tensor_map`) says what a box is.

    copy_box(target, map, barrier, ...)     from global to shared memory
    store_box(source, map, target, ...)     from shared to global memory, after those that wrote the box published it (`mbarrier.publish`)
    commit_stores()                         the thread's stores since the last commit are a group
    await_stores(n)                         all but the n youngest groups of the thread have read shared memory, which may be overwritten

What was stored is in global memory when the kernel has ended. A block awaits its stores before it ends; one thread of a warpgroup starts all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from tilewright.codegen.intrinsics.mbarrier import BARRIER, REQUIRES, shared_address
from tilewright.ir.expr import Expr, index_const
from tilewright.ir.intrinsic import Intrinsic, Operand, Text, moved
from tilewright.ir.kernel import Invoke, Place
from tilewright.ir.tensor_map import TensorMap


@lru_cache(maxsize=256)
def _copying(described: TensorMap, many: bool) -> Intrinsic:
    """`many`: to several blocks."""
    rank, offsets = len(described.extents), len(described.corners)
    kind = "column" if offsets else "box"
    function = f"tw_copy_{kind}_{rank}" + "_to_all" * many
    at = [f"at{i}" for i in range(rank)] + [f"filter{i}" for i in range(offsets)]
    at += ["blocks"] * many
    given = ", ".join(f"int {name}" for name in at)
    coordinates = ", ".join(f"%{3 + i}" for i in range(rank))
    inputs = "".join(f', "r"({name})' for name in at[:rank]) + "".join(f', "h"((unsigned short){name})' for name in at[rank : rank + offsets])
    inputs += ', "h"((unsigned short)((1 << blocks) - 1))' * many
    filters = f", {{{', '.join(f'%{3 + rank + i}' for i in range(offsets))}}}" if offsets else ""
    mode = "im2col" if offsets else "tile"
    mask, cluster = (f", %{3 + rank + offsets}", ".multicast::cluster") if many else ("", "")
    source = f"""static __device__ __forceinline__ void {function}(void *target, const void *map, unsigned long long *barrier, {given}) {{
    asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global.{mode}.mbarrier::complete_tx::bytes{cluster} "
                 "[%0], [%1, {{{coordinates}}}], [%2]{filters}{mask};"
                 :: "r"({shared_address("target")}), "l"(map), "r"({shared_address("barrier")}){inputs} : "memory");
}}"""
    operands = (
        Operand("target", "shared", "begin", described.dtype, (prod(described.box),), swizzle=described.swizzle),
        Operand("map", "map", "address", described.dtype),
        Operand("barrier", "barrier", "address", BARRIER),
        *(Operand(name, "value", dtype="i64") for name in at),
    )
    line = f"{function}({{target}}, {{map}}, {{barrier}}, {', '.join(f'{{{name}}}' for name in at)});"
    return Intrinsic(
        f"copy of a {kind} of {described.name}" + " to all blocks of the cluster" * many,
        "thread",
        operands,
        moved,
        {"CUDA": Text(line, function, source)},
        "cp.async.bulk.tensor",
        REQUIRES,
        engine="copies",
    )


def copy_box(
    target: Place, described: TensorMap, barrier: Place, coordinates: Sequence[Expr], filters: Sequence[Expr] = (), blocks: int = 1
) -> Invoke:
    """Starts to copy a box to shared memory (aligned to 128 bytes, with a swizzle to 8 times its bytes). `coordinates`: of the first element,
    innermost dimension first; may lie outside of the tensor. `filters`: for columns of pixels the offsets of the filter, innermost dimension first,
    from 0. `blocks` > 1: the size of the cluster; the box is copied to all of them, to the same place as here, and the bytes count for the
    barrier in the same place of each."""
    if len(coordinates) != len(described.extents) or len(filters) != len(described.corners):
        raise ValueError(f"{described.name} has {len(described.extents)} coordinates and {len(described.corners)} offsets of a filter")
    operands = (target, Place(described.name, index_const(0)), barrier, *coordinates, *filters)
    return Invoke(_copying(described, blocks > 1), (*operands, *([index_const(blocks)] if blocks > 1 else [])))


@lru_cache(maxsize=256)
def _storing(described: TensorMap) -> Intrinsic:
    rank = len(described.extents)
    function = f"tw_store_box_{rank}"
    at = [f"at{i}" for i in range(rank)]
    given = ", ".join(f"int {name}" for name in at)
    coordinates = ", ".join(f"%{2 + i}" for i in range(rank))
    inputs = "".join(f', "r"({name})' for name in at)
    source = f"""static __device__ __forceinline__ void {function}(const void *source, const void *map, {given}) {{
    asm volatile("cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group [%0, {{{coordinates}}}], [%1];"
                 :: "l"(map), "r"({shared_address("source")}){inputs} : "memory");
}}"""
    operands = (
        Operand("source", "shared", "read", described.dtype, (prod(described.box),), swizzle=described.swizzle),
        Operand("map", "map", "address", described.dtype),
        Operand("target", "global", "write", described.dtype),
        *(Operand(name, "value", dtype="i64") for name in at),
    )
    line = f"{function}({{source}}, {{map}}, {', '.join(f'{{{name}}}' for name in at)});"
    text = {"CUDA": Text(line, function, source)}
    return Intrinsic(f"store of a box of {described.name}", "thread", operands, moved, text, "cp.async.bulk.tensor", REQUIRES, engine="stores")


_COMMIT = Intrinsic(
    "commit stores",
    "thread",
    text={"CUDA": Text('asm volatile("cp.async.bulk.commit_group;" ::: "memory");')},
    key="cp.async.bulk.commit_group",
    requires=REQUIRES,
    order="commit",
    engine="stores",
)
_AWAIT = Intrinsic(
    "await stores",
    "thread",
    (Operand("pending", "value", dtype="i64"),),
    text={"CUDA": Text('asm volatile("cp.async.bulk.wait_group.read {pending};" ::: "memory");')},
    key="cp.async.bulk.wait_group",
    requires=REQUIRES,
    order="await",
    engine="stores",
)


def store_box(source: Place, described: TensorMap, coordinates: Sequence[Expr]) -> Invoke:
    """Starts to store a box of shared memory (aligned as in `copy_box`) to the map's buffer, without what is beyond the end of the tensor.
    `coordinates`: of the first element, innermost dimension first; an H200 stops the kernel (illegal instruction) if one is negative."""
    if described.corners or len(coordinates) != len(described.extents):
        raise ValueError(f"{described.name}: boxes are stored through a tiled map, at {len(described.extents)} coordinates")
    target = Place(described.buffer, index_const(described.offset))
    return Invoke(_storing(described), (source, Place(described.name, index_const(0)), target, *coordinates))


def commit_stores() -> Invoke:
    """Makes the thread's stores since the last commit a group."""
    return Invoke(_COMMIT)


def await_stores(pending: int) -> Invoke:
    """Waits until at most `pending` of the thread's youngest groups may still read shared memory."""
    return Invoke(_AWAIT, (index_const(pending),))
