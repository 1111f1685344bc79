"""Facts of tensor cores by compute capability: the latency of `mma.sync`, and the share of the peak (`Machine.peak_flops`) that it reaches."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.hardware import documents as named
from tilewright.hardware.machine import Machine


@dataclass(frozen=True)
class TensorCores:
    """latency_cycles: until the sums of m16n8k16 (TF32: m16n8k8) are ready for the next product. share: the part of the peak that `mma.sync` reaches;
    the rest needs newer instructions. source: of both."""

    latency_cycles: float
    share: float
    source: str


TENSOR_CORES = {
    (7, 5): TensorCores(33.0, 1.0, "assumed: two products of m16n8k8 take as long as one of m16n8k16 on 8.0"),
    (8, 0): TensorCores(33.0, 1.0, named.LUO),
    (8, 6): TensorCores(33.0, 1.0, f"assumed: as of 8.0 in {named.LUO}"),
    (8, 7): TensorCores(33.0, 1.0, f"assumed: as of 8.0 in {named.LUO}"),
    (8, 9): TensorCores(33.0, 1.0, f"{named.LUO}; latency assumed: as of 8.0"),
    (9, 0): TensorCores(33.0, 0.63, f"share from {named.LUO}: 62.9 % in the mean; latency assumed: as of 8.0"),
    (10, 0): TensorCores(33.0, 0.5, "assumed: as of 9.0 in relation to the wider instructions"),
    (10, 3): TensorCores(33.0, 0.5, "assumed: as of 10.0"),
    (12, 0): TensorCores(33.0, 1.0, "assumed: as of 8.9, which has the same instructions"),
}
"""By compute capability."""
PEAKS = {"f16": "fp16", "bf16": "bf16", "tf32": "tf32"}
"""Names in `Machine.peak_flops` of the types of factors."""


def mma_flops(machine: Machine, kind: str) -> float:
    """flop/s of the whole machine that `mma.sync` reaches on factors of this type; KeyError if the machine has none."""
    return machine.peak_flops[PEAKS[kind]] * TENSOR_CORES[machine.compute_capability].share
