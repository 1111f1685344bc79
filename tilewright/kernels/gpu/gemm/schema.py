"""The schema of the implicit GEMM."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.kernels.gpu.gemm.bound import contraction_bound
from tilewright.kernels.gpu.gemm.counts import contraction_counts
from tilewright.kernels.gpu.gemm.estimate import contraction_estimate
from tilewright.kernels.gpu.gemm.features import contraction_features
from tilewright.kernels.gpu.gemm.form import product_form
from tilewright.kernels.gpu.gemm.lower import lower_contraction
from tilewright.kernels.gpu.gemm.row_estimate import with_row_stages
from tilewright.kernels.gpu.gemm.space import ContractionFacts, ContractionSchedule, contraction_space, is_large
from tilewright.kernels.gpu.gemm.variants import contraction_variants
from tilewright.kernels.schema import Matching, Schema, in_tile_if


def estimate(facts: ContractionFacts, candidates: Columns, counts: TileCounts, machine: Machine) -> Estimate:
    """Seconds of the product and of the row reductions that follow it."""
    product = contraction_estimate(facts, candidates, counts, machine)
    return with_row_stages(product, candidates, facts, counts, machine) if facts.row_stages else product


GEMM = Schema(
    name="contraction",
    kinds=("contraction",),
    schedule=ContractionSchedule,
    match=Matching(product_form),
    space=lambda facts, machine, options: contraction_space(facts, machine, options.numerics.atomics, is_large(facts)),
    counts=contraction_counts,
    estimate=lambda facts, candidates, counts, machine, options: estimate(facts, candidates, counts, machine),
    lower=lambda problem, form, schedule, machine: lower_contraction(problem, form.parts, schedule, machine),
    within=in_tile_if(lambda facts, schedule: facts.row_stages),
    bound=contraction_bound,
    variants=contraction_variants,
    features=lambda facts, candidates, machine, options: contraction_features(facts, candidates),
    unordered=lambda schedule: bool(schedule.atomics),
    sums=True,
)
