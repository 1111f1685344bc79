"""Kernels that begin before the ones that they depend on have ended (programmatic dependent launch, compute capability 9.0).

Without it a kernel begins when the one before it has ended, what that wrote can be read, and the launch has gone through the GPU. With it the blocks
of the next kernel are placed on the processors as soon as every block of this one has ended, and wait there for what it wrote. A kernel that waits
before its first access of global memory is right wherever it runs: its predecessors have ended by then, and so have theirs, since they waited too.

Kernels do not allow their dependents to begin any sooner (`launch_dependents`): measured on an H100, ResNet-50 at batch 1 takes 1.3 times as long if
they do so before they compute. Blocks that wait take the places of blocks that could compute, so that the latter share processors.

With `AHEAD` a kernel does whatever it can before it waits: it computes indices, fills tables, and copies the first tiles of constants, such as packed
filters, which no kernel writes (`gemm.staging` has these copies first).

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from tilewright.codegen.intrinsics.launching import awaits_earlier_kernels, wait_for_earlier_kernels
from tilewright.hardware.machine import Machine
from tilewright.ir.expr import Load, walk
from tilewright.ir.kernel import Block, Invoke, Kernel, Statement, expressions, statements, written_by
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered

AHEAD = False
"""Whether kernels wait as late as they may, which gains nothing on an H100 (`gpu_ahead_h100`, `gpu_half_ahead_h100`)."""


def beginning_early(lowered: Lowered, problem: Problem, machine: Machine) -> Lowered:
    """The kernels of a problem, which begin early if the machine has the instructions. Kernels that wait at a place of their own stay as they are,
    and so do those whose blocks all have to be resident at once."""
    if not machine.has("sm_90"):
        return lowered
    packed = {name for name, storage in lowered.storage.items() if storage.source is not None}
    return replace(lowered, kernels=tuple(_early(kernel, changing(lowered, kernel, problem.constants | packed)) for kernel in lowered.kernels))


def changing(lowered: Lowered, kernel: Kernel, constants: Set[str]) -> frozenset[str]:
    """The parameters of a kernel that stand for other than constants in any of its calls."""
    calls = [call for call in lowered.calls if call.kernel == kernel.name]
    return frozenset(
        buffer.name for call in calls for buffer, argument in zip(kernel.parameters, call.arguments, strict=True) if argument not in constants
    )


def _early(kernel: Kernel, changing: Set[str]) -> Kernel:
    if kernel.cooperative or awaits_earlier_kernels(kernel):
        return kernel
    return replace(kernel, body=_waiting(kernel.body, changing))


def _waiting(body: Statement, changing: Set[str]) -> Block:
    """The statements with the wait among them. Scopes stay what they are: shared buffers of one have the places of those of another."""
    inside = body.statements if isinstance(body, Block) else (body,)
    at = next((k for k, statement in enumerate(inside) if accessed(statement) & changing), len(inside)) if AHEAD else 0
    if AHEAD and at < len(inside) and isinstance(inside[at], Block):
        return Block((*inside[:at], _waiting(inside[at], changing), *inside[at + 1 :]))
    return Block((*inside[:at], wait_for_earlier_kernels(), *inside[at:]))


def accessed(root: Statement) -> frozenset[str]:
    """The buffers that a statement reads or writes."""
    found = {node.buffer for one in expressions(root) for node in walk(one) if isinstance(node, Load)}
    for statement in statements(root):
        found.update(written_by(statement))
        found.update(place.buffer for _, place in (statement.places if isinstance(statement, Invoke) else ()))
    return frozenset(found)
