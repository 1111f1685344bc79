"""The schema for reductions over whole rows."""

from __future__ import annotations

from tilewright.kernels.gpu.bounds import bound_of_stored
from tilewright.kernels.gpu.row_reduction.counts import row_reduction_counts
from tilewright.kernels.gpu.row_reduction.estimate import row_reduction_estimate
from tilewright.kernels.gpu.row_reduction.features import row_reduction_features
from tilewright.kernels.gpu.row_reduction.lower import lower_row_reduction, row_reduction_form
from tilewright.kernels.gpu.row_reduction.space import RowReductionSchedule, row_reduction_space
from tilewright.kernels.schema import Matching, Schema, in_tile_if

ROW_REDUCTION = Schema(
    name="row reduction",
    kinds=("row reduction",),
    schedule=RowReductionSchedule,
    match=Matching(row_reduction_form),
    space=lambda facts, machine, options: row_reduction_space(facts, machine),
    counts=lambda facts, candidates, machine: row_reduction_counts(facts, candidates, machine),
    estimate=lambda facts, candidates, counts, machine, options: row_reduction_estimate(facts, candidates, counts, machine),
    features=lambda facts, candidates, machine, options: row_reduction_features(facts, candidates),
    bound=bound_of_stored,
    lower=lambda problem, form, schedule, machine: lower_row_reduction(problem, form.parts, schedule),
    within=in_tile_if(lambda facts, schedule: schedule.threads_per_row > 1),
)
