"""Kernels that begin before the ones that they depend on have ended (programmatic dependent launch, compute capability 9.0).

Without it a kernel begins when the one before it has ended, what that wrote can be read, and the launch has gone through the GPU. With it the blocks
of the next kernel are placed on the processors as soon as every block of this one has ended, and wait there for what it wrote. A kernel that waits
before its first access of global memory is right wherever it runs: its predecessors have ended by then, and so have theirs, since they waited too.

Kernels do not allow their dependents to begin any sooner (`launch_dependents`): measured on an H100, ResNet-50 at batch 1 takes 1.3 times as long if
they do so before they compute. Blocks that wait take the places of blocks that could compute, so that the latter share processors.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.codegen.assemble import block
from tilewright.codegen.intrinsics.launching import awaits_earlier_kernels, wait_for_earlier_kernels
from tilewright.hardware.machine import Machine
from tilewright.ir.kernel import Kernel
from tilewright.ir.region import Lowered


def beginning_early(lowered: Lowered, machine: Machine) -> Lowered:
    """The kernels, which begin early if the machine has the instructions. Kernels that wait at a place of their own stay as they are, and so do those
    whose blocks all have to be resident at once."""
    if not machine.has("sm_90"):
        return lowered
    return replace(lowered, kernels=tuple(map(_early, lowered.kernels)))


def _early(kernel: Kernel) -> Kernel:
    if kernel.cooperative or awaits_earlier_kernels(kernel):
        return kernel
    return replace(kernel, body=block(wait_for_earlier_kernels(), kernel.body))
