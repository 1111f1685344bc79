"""The schema of the implicit GEMM on tensor cores."""

from __future__ import annotations

from tilewright.kernels.gpu.tensor_cores.bound import tensor_core_bound
from tilewright.kernels.gpu.tensor_cores.counts import tensor_core_counts
from tilewright.kernels.gpu.tensor_cores.estimate import tensor_core_estimate
from tilewright.kernels.gpu.tensor_cores.features import tensor_core_features
from tilewright.kernels.gpu.tensor_cores.form import tensor_core_form
from tilewright.kernels.gpu.tensor_cores.lower import lower_tensor_cores
from tilewright.kernels.gpu.tensor_cores.space import TensorCoreSchedule, tensor_core_space
from tilewright.kernels.schema import Schema, in_tile_if

TENSOR_CORES = Schema(
    name="tensor cores",
    kinds=("contraction",),
    schedule=TensorCoreSchedule,
    match=tensor_core_form,
    space=lambda facts, machine, options: tensor_core_space(facts, machine, options.numerics),
    counts=tensor_core_counts,
    estimate=lambda facts, candidates, counts, machine, options: tensor_core_estimate(facts, candidates, counts, machine),
    lower=lambda problem, form, schedule, machine: lower_tensor_cores(problem, form.parts, schedule, machine),
    within=in_tile_if(lambda facts, schedule: schedule.staged),
    bound=tensor_core_bound,
    features=lambda facts, candidates, machine, options: tensor_core_features(facts, candidates, machine),
    sums=True,
)
