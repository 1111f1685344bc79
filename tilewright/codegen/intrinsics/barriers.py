"""Barriers of the threads of a block (PTX: bar.sync), of a cluster of blocks (PTX: barrier.cluster, compute capability 9.0) or of a grid whose
blocks are all resident (PTX: red.release and ld.acquire on a counter in memory).

Every thread of the scope reaches a barrier the same number of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from tilewright.ir.dtypes import ELEMENT_TYPES, FLOAT32, NARROW_FLOATS, size_of
from tilewright.ir.expr import Expr
from tilewright.ir.intrinsic import Array, Intrinsic, Operand, Text, moved
from tilewright.ir.kernel import Invoke, Place

COUNTER = "i32"
"""Type of the counter of a grid's barriers."""

_BLOCK = Intrinsic("block barrier", "block", text={"CUDA": Text("__syncthreads();")}, key="bar.sync", order="barrier")
_CLUSTER = Intrinsic(
    "cluster barrier",
    "cluster",
    text={"CUDA": Text('asm volatile("barrier.cluster.arrive;\\n\\tbarrier.cluster.wait;" ::: "memory");')},
    key="barrier.cluster",
    requires=("sm_90",),
    order="barrier",
)
_CLUSTER_ARRIVE = Intrinsic(
    "arrival at a cluster barrier",
    "cluster",
    text={"CUDA": Text('asm volatile("barrier.cluster.arrive;" ::: "memory");')},
    key="barrier.cluster.arrive",
    requires=("sm_90",),
    order="arrive",
)
_CLUSTER_WAIT = Intrinsic(
    "end of a cluster barrier",
    "cluster",
    text={"CUDA": Text('asm volatile("barrier.cluster.wait;" ::: "memory");')},
    key="barrier.cluster.wait",
    requires=("sm_90",),
    order="barrier",
)
_CLUSTER_STORE = Intrinsic(
    "store to a block of the cluster",
    "thread",
    (Operand("target", "shared", "write", FLOAT32, (1,)), Operand("value", "value")),
    lambda value: value[:, None],
    {"CUDA": Text("*({target}) = {value};")},
    "st.shared::cluster",
    ("sm_90",),
)

_GRID = Intrinsic(
    "grid barrier",
    "grid",
    (Operand("counter", "global", "update", COUNTER), Operand("arrivals", "value", dtype="i64")),
    lambda counter: counter + 1,
    {
        "CUDA": Text(
            "tw_grid_barrier({counter}, {arrivals});",
            "tw_grid_barrier",
            """static __device__ __forceinline__ void tw_grid_barrier(int *counter, int arrivals) {
    __syncthreads();
    if (threadIdx.x == 0) {
        int arrived;
        asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(__cvta_generic_to_global(counter)) : "memory");
        do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(arrived) : "l"(__cvta_generic_to_global(counter)) : "memory");
        while (arrived < arrivals);
    }
    __syncthreads();
}""",
        )
    },
    "barrier.grid",
    ("sm_70",),
    "barrier",
)


@lru_cache(maxsize=8)
def _shared_load(dtype: str, count: int) -> Intrinsic:
    """`dtype`: float32, or a 16-bit float, whose bits are loaded, one or two (`count`) in one instruction."""
    narrow = dtype in NARROW_FLOATS
    function, kind, register = ("tw_load_relaxed_16", "u16", "h") if narrow else ("tw_load_relaxed", FLOAT32, "f")  # PTX uses the same word
    element = ELEMENT_TYPES[dtype].cuda
    if count == 2:
        function, kind, register = "tw_load_relaxed_2x16", "u32", "r"
    target = "*target" if count == 1 else "pair"
    load = f'asm volatile("ld.relaxed.gpu.global.{kind} %0, [%1];" : "={register}"({target}) : "l"(__cvta_generic_to_global(source)) : "memory");'
    if count == 2:
        load = f"unsigned pair;\n    {load}\n    target[0] = pair & 0xffff;\n    target[1] = pair >> 16;"
    return Intrinsic(
        "load of what other blocks stored" + f" as {dtype}" * narrow + " in pairs" * (count == 2),
        "thread",
        (Operand("target", "fragment", "write", dtype, (count,)), Operand("source", "global", "read", dtype, (count,))),
        moved,
        {
            "CUDA": Text(
                f"{function}({{target}}, {{source}});",
                function,
                f"""static __device__ __forceinline__ void {function}({element} *target, const {element} *source) {{
    {load}
}}""",
            )
        },
        "ld.relaxed",
        ("sm_70",),
    )


@lru_cache(maxsize=8)
def _shared_loads(dtype: str, rows: int) -> Intrinsic:
    """`rows` rows of 16 bytes, whose words alternate in the target."""
    words = 4
    size = 4 * words // size_of(dtype)
    is_float = dtype == FLOAT32
    held = ELEMENT_TYPES[dtype].cuda if is_float else f"{ELEMENT_TYPES[dtype].cuda_vector}2"
    word = "__uint_as_float(word[j])" if is_float else "make_ushort2(word[j] & 0xffff, word[j] >> 16)"
    function = f"tw_load_relaxed_{rows}_rows_{dtype}"
    registers = ", ".join(f'"=r"(word[{j}])' for j in range(words))
    load = 'asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"' + f" : {registers}"
    source = f"""static __device__ __forceinline__ void {function}({held} *target, {", ".join(f"const void *source{i}" for i in range(rows))}) {{
    const void *sources[] = {{{", ".join(f"source{i}" for i in range(rows))}}};
#pragma unroll
    for (int i = 0; i < {rows}; ++i) {{
        unsigned word[{words}];
        {load} : "l"(__cvta_generic_to_global(sources[i])) : "memory");
#pragma unroll
        for (int j = 0; j < {words}; ++j)
            target[j * {rows} + i] = {word};
    }}
}}"""
    targets = Operand("target", "fragment", "write", dtype, (rows * size,))
    sources = tuple(Operand(f"source{i}", "global", "read", dtype, (size,)) for i in range(rows))

    def meaning(*found: Array) -> Array:
        return np.stack([row.reshape(-1, words, size // words) for row in found], axis=2).reshape(-1, rows * size)

    arguments = ", ".join(f"{{source{i}}}" for i in range(rows))
    text = {"CUDA": Text(f"{function}({{target}}, {arguments});", function, source)}
    name = f"load of {rows} rows that other blocks stored as {dtype}"
    return Intrinsic(name, "thread", (targets, *sources), meaning, text, "ld.relaxed.v4", ("sm_70",))


def block_barrier() -> Invoke:
    """Barrier of all threads of a block."""
    return Invoke(_BLOCK)


def cluster_barrier() -> Invoke:
    """Barrier of all threads of a cluster's blocks. A block must not end while others read its part of a "cluster" buffer."""
    return Invoke(_CLUSTER)


def cluster_arrive() -> Invoke:
    """The first half of a barrier of a cluster: what a thread accesses before is ordered before what others access behind `cluster_wait`. What it
    accesses in between is ordered with neither."""
    return Invoke(_CLUSTER_ARRIVE)


def cluster_wait() -> Invoke:
    """The second half of a barrier of a cluster."""
    return Invoke(_CLUSTER_WAIT)


def cluster_store(target: Place, value: Expr) -> Invoke:
    """Stores a float in any block's part of a "cluster" buffer."""
    return Invoke(_CLUSTER_STORE, (target, value))


def grid_barrier(counter: Place, arrivals: Expr) -> Invoke:
    """Barrier of all threads of a grid, which is one-dimensional and whose blocks are all resident. Each block adds 1 to the counter, and waits until
    it is `arrivals`: the number of blocks times that of barriers so far, this one included. The counter is 0 before the launch."""
    return Invoke(_GRID, (counter, arrivals))


def shared_load(target: Place, source: Place, dtype: str, count: int = 1) -> Invoke:
    """Loads an element that other blocks may have stored before a grid barrier, past the level-1 cache and in the order of the barriers; or two
    (`count`) adjacent ones of 16 bits, of which the first lies at a multiple of 4 bytes."""
    return Invoke(_shared_load(dtype, count), (target, source))


def shared_loads(target: Place, sources: Sequence[Place], dtype: str) -> Invoke:
    """Loads 16 bytes of each of one or two rows, like `shared_load`. In the target 4 bytes of each row alternate: those of two rows of a matrix are
    the registers of two fragments of a first factor (`intrinsics.mma`), whose columns are numbered so that a lane has adjacent ones."""
    return Invoke(_shared_loads(dtype, len(sources)), (target, *sources))
