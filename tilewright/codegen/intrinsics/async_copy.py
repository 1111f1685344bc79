"""Asynchronous copies from global to shared memory without registers (PTX: cp.async).

A thread may read what it copied once the copy's group has been awaited; other threads need a barrier as well.
"""

from __future__ import annotations

from functools import lru_cache

from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import Apply, Const, Expr, Load, index_const
from tilewright.ir.intrinsic import Intrinsic, Operand, Text, moved
from tilewright.ir.kernel import Invoke, Place

REQUIRES = ("sm_80",)

_COMMIT = Intrinsic(
    "commit copies",
    "thread",
    text={"CUDA": Text('asm volatile("cp.async.commit_group;" ::: "memory");')},
    key="cp.async.commit_group",
    requires=REQUIRES,
    order="commit",
)
_AWAIT = Intrinsic(
    "await copies",
    "thread",
    (Operand("pending", "value", dtype="i64"),),
    text={"CUDA": Text('asm volatile("cp.async.wait_group {pending};" ::: "memory");')},
    key="cp.async.wait_group",
    requires=REQUIRES,
    order="await",
)


COPIED_BYTES = (4, 8, 16)


@lru_cache(maxsize=64)
def copying(dtype: str, lanes: int, guarded: bool) -> Intrinsic:
    """A copy of 4, 8 or 16 bytes; with a guard, zeros are written if it is false. Copies of 16 bytes bypass the level-1 cache."""
    count = lanes * size_of(dtype)
    if count not in COPIED_BYTES:
        raise ValueError(f"there is no asynchronous copy of {lanes} {dtype}")
    function = f"tw_copy{count}"
    source = f"""static __device__ __forceinline__ void {function}(void *target, const void *source, int filled) {{
    asm volatile("cp.async.{"cg" if count == 16 else "ca"}.shared.global [%0], [%1], {count}, %2;"
                 :: "r"((unsigned)__cvta_generic_to_shared(target)), "l"(source), "r"(filled) : "memory");
}}"""
    inside = (Operand("inside", "value", dtype="bool"),) if guarded else ()
    return Intrinsic(
        f"copy {lanes} {dtype}{', guarded' if guarded else ''}",
        "thread",
        (
            Operand("target", "shared", "begin", dtype, (lanes,)),
            *inside,
            Operand("source", "global", "read", dtype, (lanes,), guard="inside" if guarded else ""),
        ),
        moved,
        {"CUDA": Text(f"{function}({{target}}, {{source}}, {f'{{inside}} ? {count} : 0' if guarded else count});", function, source)},
        f"cp.async {count}",
        REQUIRES,
    )


def copy(buffer: str, offset: Expr, value: Expr, dtype: str) -> Invoke:
    """Starts to copy a value to shared memory. The value is a load or `select(condition, load, 0)`; raises ValueError for any other. `dtype`: the
    type in which both buffers hold the elements, which may be narrower than that of the value."""
    target = Place(buffer, offset)
    if isinstance(value, Load):
        return Invoke(copying(dtype, value.lanes, False), (target, Place(value.buffer, value.index[0])))
    if isinstance(value, Apply) and value.operation == "select":
        condition, load, otherwise = value.args
        zero = otherwise.args[0] if isinstance(otherwise, Apply) and otherwise.operation == "broadcast" else otherwise
        if isinstance(load, Load) and isinstance(zero, Const) and zero.value == 0 and condition.lanes == 1:
            return Invoke(copying(dtype, load.lanes, True), (target, condition, Place(load.buffer, load.index[0])))
    raise ValueError(f"an asynchronous copy copies a load, or zero: {value}")


def commit() -> Invoke:
    """Makes the thread's copies since the last commit a group, which may be empty."""
    return Invoke(_COMMIT)


def await_groups(pending: int) -> Invoke:
    """Waits until at most `pending` of the thread's youngest groups of copies are incomplete."""
    return Invoke(_AWAIT, (index_const(pending),))
