"""Barriers in shared memory (PTX: mbarrier, compute capability 9.0), fences between threads and engines, and barriers of parts of a block.

An array of barriers is a shared buffer of the type BARRIER, of which only instructions access the elements. A barrier has phases, numbered from 0. A
phase completes when as many arrivals as it was initialised with have taken place and as many bytes as these expected have been copied; then the next
one begins. A wait is for a phase of a parity: one for parity 1 of a barrier in its first phase, which has completed none, passes. What precedes an
arrival is ordered before what follows the wait for its phase.

    initialise(barrier, arrivals)   by one thread; then publish(), and a barrier of the block
    arrive(barrier)                 by one thread
    expect(barrier, bytes)          an arrival, and the bytes that the phase waits for besides
    wait(barrier, parity, scope)    by each thread of a warp or warpgroup together, or of one thread (in a branch of its own)
    arrive_in(barrier, block)       by one thread, at the barrier in the same place of a block of its cluster
    publish()                       what the thread wrote in shared memory may be accessed by the copy engine and tensor cores
    group_barrier(number)           barrier of a warpgroup (PTX: bar.sync with a number from 1 to 15, one for each warpgroup)
"""

from __future__ import annotations

from functools import lru_cache

from tilewright.ir.expr import Expr, index_const
from tilewright.ir.intrinsic import LANES, Intrinsic, Operand, Text
from tilewright.ir.kernel import Buffer, Invoke, Place

BARRIER = "u64"
"""Type of an element of an array of barriers."""
REQUIRES = ("sm_90",)

_QUALIFIER = "static __device__ __forceinline__"
_AT = Operand("barrier", "barrier", "address", BARRIER)


def barriers(name: str, count: int) -> Buffer:
    """An array of barriers."""
    return Buffer(name, BARRIER, count, "shared")


def shared_address(pointer: str) -> str:
    """CUDA C++ text of an address of shared memory as 32 bits."""
    return f"(unsigned)__cvta_generic_to_shared({pointer})"


_INITIALISE = Intrinsic(
    "initialisation of a barrier",
    "thread",
    (_AT, Operand("arrivals", "value", dtype="i64")),
    text={
        "CUDA": Text(
            "tw_barrier_initialise({barrier}, {arrivals});",
            "tw_barrier_initialise",
            f"""{_QUALIFIER} void tw_barrier_initialise(unsigned long long *barrier, int arrivals) {{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"({shared_address("barrier")}), "r"(arrivals) : "memory");
}}""",
        )
    },
    key="mbarrier.init",
    requires=REQUIRES,
    order="initialise",
)
_ARRIVE = Intrinsic(
    "arrival at a barrier",
    "thread",
    (_AT,),
    text={
        "CUDA": Text(
            "tw_barrier_arrive({barrier});",
            "tw_barrier_arrive",
            f"""{_QUALIFIER} void tw_barrier_arrive(unsigned long long *barrier) {{
    asm volatile("{{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }}" :: "r"({shared_address("barrier")}) : "memory");
}}""",
        )
    },
    key="mbarrier.arrive",
    requires=REQUIRES,
    order="signal",
)
# A release of scope .cluster would be a fence of all memory, which takes longer than a step of a pipeline. Who has read shared memory releases
# nothing that others read.
_ARRIVE_IN = Intrinsic(
    "arrival at a barrier of a block of the cluster",
    "thread",
    (_AT, Operand("block", "value", dtype="i64")),
    text={
        "CUDA": Text(
            "tw_barrier_arrive_in({barrier}, {block});",
            "tw_barrier_arrive_in",
            f"""{_QUALIFIER} void tw_barrier_arrive_in(unsigned long long *barrier, int block) {{
    asm volatile("{{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there]; }}"
                 :: "r"({shared_address("barrier")}), "r"(block) : "memory");
}}""",
        )
    },
    key="mbarrier.arrive",
    requires=REQUIRES,
    order="signal",
)
_EXPECT = Intrinsic(
    "arrival at a barrier that expects bytes",
    "thread",
    (_AT, Operand("bytes", "value", dtype="i64")),
    text={
        "CUDA": Text(
            "tw_barrier_expect({barrier}, {bytes});",
            "tw_barrier_expect",
            f"""{_QUALIFIER} void tw_barrier_expect(unsigned long long *barrier, int bytes) {{
    asm volatile("{{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }}"
                 :: "r"({shared_address("barrier")}), "r"(bytes) : "memory");
}}""",
        )
    },
    key="mbarrier.arrive.expect_tx",
    requires=REQUIRES,
    order="signal",
)
_PUBLISH_IN_CLUSTER = Intrinsic(
    "publication to engines of the cluster",
    "thread",
    text={"CUDA": Text('asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");')},
    key="fence.proxy.async",
    requires=REQUIRES,
    order="publish",
)
_PUBLISH = Intrinsic(
    "publication to engines",
    "thread",
    text={"CUDA": Text('asm volatile("fence.proxy.async.shared::cta;" ::: "memory");')},
    key="fence.proxy.async",
    requires=REQUIRES,
    order="publish",
)


@lru_cache(maxsize=4)
def _wait(scope: str) -> Intrinsic:
    return Intrinsic(
        f"wait of a {scope} at a barrier",
        scope,
        (_AT, Operand("parity", "value", dtype="i64")),
        text={
            "CUDA": Text(
                "tw_barrier_wait({barrier}, {parity});",
                "tw_barrier_wait",
                f"""{_QUALIFIER} void tw_barrier_wait(unsigned long long *barrier, int parity) {{
    unsigned completed;
    do  // each attempt suspends the thread for a while
        asm volatile("{{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, done; }}"
                     : "=r"(completed) : "r"({shared_address("barrier")}), "r"(parity) : "memory");
    while (!completed);
}}""",
            )
        },
        key="mbarrier.try_wait",
        requires=REQUIRES,
        order="wait",
    )


_GROUP_BARRIER = Intrinsic(
    "warpgroup barrier",
    "warpgroup",
    (Operand("number", "value", dtype="i64"),),
    text={"CUDA": Text(f'asm volatile("bar.sync %0, {LANES["warpgroup"]};" :: "r"({{number}}) : "memory");')},
    key="bar.sync",
    order="barrier",
)


def initialise(barrier: Place, arrivals: int) -> Invoke:
    """Sets how many arrivals complete a phase, and begins phase 0."""
    return Invoke(_INITIALISE, (barrier, index_const(arrivals)))


def arrive(barrier: Place) -> Invoke:
    """One arrival."""
    return Invoke(_ARRIVE, (barrier,))


def arrive_in(barrier: Place, block: Expr) -> Invoke:
    """One arrival at the barrier in that place of a block of the cluster. The cluster's blocks have met since it was initialised, and meet before it
    ends."""
    return Invoke(_ARRIVE_IN, (barrier, block))


def expect(barrier: Place, count: int) -> Invoke:
    """Adds `count` bytes to those that the phase waits for, then arrives."""
    return Invoke(_EXPECT, (barrier, index_const(count)))


def wait(barrier: Place, parity: Expr, scope: str) -> Invoke:
    """Waits until the phase of that parity (0 or 1), the barrier's current or previous one, has completed. `scope`: the threads that wait together,
    "thread", "warp" or "warpgroup"."""
    return Invoke(_wait(scope), (barrier, parity))


def publish(cluster: bool = False) -> Invoke:
    """A fence between the thread's accesses of shared memory and those of engines which later synchronisation orders behind. `cluster`: also between
    initialisations of barriers and what other blocks of the cluster do with them."""
    return Invoke(_PUBLISH_IN_CLUSTER if cluster else _PUBLISH)


def group_barrier(number: Expr) -> Invoke:
    """Barrier of the 128 threads of a warpgroup. `number`: one of 1 to 15, different for each warpgroup of the block."""
    return Invoke(_GROUP_BARRIER, (number,))
