"""The schema for products of few rows."""

from __future__ import annotations

from tilewright.kernels.gpu.gemm.schema import GEMM
from tilewright.kernels.gpu.gemv.bound import gemv_bound
from tilewright.kernels.gpu.gemv.counts import gemv_counts
from tilewright.kernels.gpu.gemv.estimate import gemv_estimate
from tilewright.kernels.gpu.gemv.features import gemv_features
from tilewright.kernels.gpu.gemv.lower import lower_gemv
from tilewright.kernels.gpu.gemv.space import GemvSchedule, gemv_space
from tilewright.kernels.schema import Schema

GEMV = Schema(
    name="gemv",
    kinds=("contraction",),
    schedule=GemvSchedule,
    match=GEMM.match,
    space=lambda facts, machine, options: gemv_space(facts, machine),
    counts=lambda facts, candidates, machine: gemv_counts(facts, candidates, machine),
    estimate=lambda facts, candidates, counts, machine, options: gemv_estimate(facts, candidates, counts, machine),
    lower=lambda problem, form, schedule, machine: lower_gemv(problem, form.parts, schedule, machine),
    bound=gemv_bound,
    features=lambda facts, candidates, machine, options: gemv_features(facts, candidates),
)
