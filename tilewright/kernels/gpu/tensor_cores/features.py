"""Features of products on tensor cores for learned models, in addition to counts and estimate: the same for all instructions."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.hardware.tensor_cores import PEAKS
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import TensorCounts
from tilewright.kernels.gpu.gemm.space import ContractionFacts
from tilewright.kernels.gpu.tensor_cores.counts import tensor_core_counts
from tilewright.kernels.gpu.tensor_cores.form import TensorCoreFacts


def tensor_core_features(facts: TensorCoreFacts, candidates: Columns, machine: Machine) -> dict[str, np.ndarray]:
    """The features of candidates for `mma.sync`."""
    return of_product(facts.product, facts.kind, tensor_core_counts(facts, candidates, machine), machine)


def of_product(product: ContractionFacts, kind: str, counts: TensorCounts, machine: Machine) -> dict[str, np.ndarray]:
    """What distinguishes products and their tiles: sizes, how factors are read, what follows the sum; steps and what a step moves; the share of the
    work that is not padding; the time of the padded work at the peak over that of all distinct bytes."""
    results, moved = product.batch * product.m * product.n, counts.memory_bytes / machine.memory_bandwidth
    level2 = machine.cache(2)
    assert level2 is not None
    facts: dict[str, float] = {
        "batch": product.batch, "m": product.m, "n": product.n, "r": product.r, "a vector": product.a.vector_width,
        "b vector": product.b.vector_width, "a along r": product.a.along == "r", "b along r": product.b.along == "r",
        "a guarded": product.a.guarded, "a taps": product.a.taps, "a arithmetic": product.a.arithmetic, "a others": product.a.others,
        "store vector": product.store_vector, "epilogue_bytes": product.epilogue_bytes / results, "epilogue_flops": product.epilogue_flops,
        "factor bytes": product.a.element_bytes, "result bytes": product.bytes_written / results,
    }  # fmt: skip
    one = np.ones(len(counts))
    return {f"fact {name}": value * one for name, value in facts.items()} | {
        **of_steps(counts),
        "store sectors": counts.store_sectors,
        "work over bytes": counts.padded_flops / machine.peak_flops[PEAKS[kind]] / moved,
        "reuse over level 2": counts.reuse_bytes * np.minimum(counts.blocks, counts.resident * machine.processors) / level2.bytes,
    }


def of_steps(counts: TensorCounts) -> dict[str, np.ndarray]:
    """Steps and what a step moves, and the share of the work that is not padding."""
    return {
        "steps": counts.steps,
        "accumulators": counts.accumulators,
        "shared bytes": counts.shared_bytes,
        "step sectors": counts.step_sectors,
        "step products": counts.step_multiply_adds,
        "step wavefronts": counts.warps * counts.step_shared_loads,
        "useful work": counts.flops / counts.padded_flops,
    }
