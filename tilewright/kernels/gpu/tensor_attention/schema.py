"""The schema of attention on tensor cores."""

from __future__ import annotations

from tilewright.kernels.gpu.tensor_attention.bound import tensor_attention_bound
from tilewright.kernels.gpu.tensor_attention.counts import tensor_attention_counts
from tilewright.kernels.gpu.tensor_attention.estimate import tensor_attention_estimate
from tilewright.kernels.gpu.tensor_attention.features import tensor_attention_features
from tilewright.kernels.gpu.tensor_attention.form import tensor_attention_form
from tilewright.kernels.gpu.tensor_attention.lower import lower_tensor_attention
from tilewright.kernels.gpu.tensor_attention.space import TensorAttentionSchedule, tensor_attention_space
from tilewright.kernels.schema import Schema

TENSOR_ATTENTION = Schema(
    name="attention on tensor cores",
    kinds=("attention",),
    schedule=TensorAttentionSchedule,
    match=tensor_attention_form,
    space=lambda facts, machine, options: tensor_attention_space(facts, machine, options.numerics.tf32),
    counts=tensor_attention_counts,
    estimate=lambda facts, candidates, counts, machine, options: tensor_attention_estimate(facts, candidates, counts, machine),
    features=lambda facts, candidates, machine, options: tensor_attention_features(facts, candidates, machine),
    bound=tensor_attention_bound,
    lower=lambda problem, form, schedule, machine: lower_tensor_attention(problem, form.parts, schedule, machine),
)
