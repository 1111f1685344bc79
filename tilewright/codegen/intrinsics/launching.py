"""Registers of warpgroups (PTX: setmaxnreg, sm_90a), and kernels that begin before the ones they depend on have ended (PTX: griddepcontrol, compute
capability 9.0: programmatic dependent launch)."""

from __future__ import annotations

from functools import lru_cache

from tilewright.ir.intrinsic import Intrinsic, Text
from tilewright.ir.kernel import Invoke, Kernel, statements

LEAST_REGISTERS, MOST_REGISTERS = 24, 256

# The assembler moves loads that it takes for loads of constants (ld.global.nc) ahead of the first instruction, but not ahead of the second.
_WAIT = Intrinsic(
    "wait for earlier kernels",
    "thread",
    text={"CUDA": Text('asm volatile("griddepcontrol.wait; fence.acq_rel.cta;" ::: "memory");')},
    key="griddepcontrol.wait",
    requires=("sm_90",),
)
_LAUNCH = Intrinsic(
    "launch of dependent kernels",
    "thread",
    text={"CUDA": Text('asm volatile("griddepcontrol.launch_dependents;");')},
    key="griddepcontrol.launch_dependents",
    requires=("sm_90",),
)


@lru_cache(maxsize=64)
def _registers(count: int, more: bool) -> Intrinsic:
    if count % 8 or not LEAST_REGISTERS <= count <= MOST_REGISTERS:
        raise ValueError(f"a thread has {LEAST_REGISTERS} to {MOST_REGISTERS} registers, in steps of 8, not {count}")
    change = "inc" if more else "dec"
    return Intrinsic(
        f"{change} of registers to {count}",
        "warpgroup",
        text={"CUDA": Text(f'asm volatile("setmaxnreg.{change}.sync.aligned.u32 {count};");')},
        key="setmaxnreg",
        requires=("sm_90a",),
    )


def more_registers(count: int) -> Invoke:
    """Waits until each thread of the warpgroup can have `count` registers, which others of the block released."""
    return Invoke(_registers(count, True))


def fewer_registers(count: int) -> Invoke:
    """Releases all but `count` registers of each thread of the warpgroup."""
    return Invoke(_registers(count, False))


def wait_for_earlier_kernels() -> Invoke:
    """Waits until the kernels that this one depends on have ended and what they wrote can be read. Without effect if they had ended before."""
    return Invoke(_WAIT)


def launch_dependents() -> Invoke:
    """Allows kernels that depend on this one to begin once all its blocks have come here or ended. What they read of it they wait for."""
    return Invoke(_LAUNCH)


def awaits_earlier_kernels(kernel: Kernel) -> bool:
    """Whether the kernel itself waits for those that it depends on."""
    return any(isinstance(statement, Invoke) and statement.intrinsic == _WAIT for statement in statements(kernel.body))
