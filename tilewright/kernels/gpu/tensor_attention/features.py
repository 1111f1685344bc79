"""Features of attention on tensor cores for learned models, in addition to counts and estimate."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.hardware.tensor_cores import PEAKS
from tilewright.kernels.columns import Columns, length
from tilewright.kernels.gpu.tensor_attention.counts import tensor_attention_counts
from tilewright.kernels.gpu.tensor_attention.form import TensorAttentionFacts
from tilewright.kernels.gpu.tensor_cores.features import of_steps


def tensor_attention_features(facts: TensorAttentionFacts, candidates: Columns, machine: Machine) -> dict[str, np.ndarray]:
    """Sizes, how queries, keys and values are read, and what is done to scores; steps and what a step moves; the share of the work that is not
    padding; the time of the padded work at the peak over that of all distinct bytes."""
    counts, sizes, one = tensor_attention_counts(facts, candidates, machine), facts.attention, np.ones(length(candidates))
    known: dict[str, float] = {
        "batch": sizes.batch, "queries": sizes.m, "keys": sizes.n, "key elements": sizes.r, "value elements": sizes.d, "q vector": sizes.q_vector,
        "k vector": sizes.k_vector, "v vector": sizes.v_vector, "store vector": sizes.store_vector, "logit operations": sizes.logit_flops,
        "epilogue operations": sizes.epilogue_flops, "factor bytes": facts.element_bytes,
        "keys of a head": sizes.k_bytes / (sizes.batch * sizes.n * sizes.r * facts.element_bytes),
    }  # fmt: skip
    return {f"fact {name}": value * one for name, value in known.items()} | {
        "causal": (sizes.shift is not None) * one,
        **of_steps(counts),
        "work over bytes": counts.padded_flops / machine.peak_flops[PEAKS[facts.kind]] / (counts.memory_bytes / machine.memory_bandwidth),
    }
