"""The schema of the implicit GEMM."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.ir.problem import Problem
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.kernels.gpu.gemm.bound import contraction_bound
from tilewright.kernels.gpu.gemm.counts import contraction_counts
from tilewright.kernels.gpu.gemm.estimate import contraction_cost
from tilewright.kernels.gpu.gemm.features import contraction_features
from tilewright.kernels.gpu.gemm.form import ProductForm, product_form
from tilewright.kernels.gpu.gemm.lower import lower_contraction
from tilewright.kernels.gpu.gemm.row_estimate import with_row_stages
from tilewright.kernels.gpu.gemm.space import ContractionProblem, ContractionSchedule, contraction_space
from tilewright.kernels.schema import Form, Schema


def match(problem: Problem, machine: Machine) -> Form[ContractionProblem, ProductForm]:
    """Raises Unsuitable as `product_form`."""
    form = product_form(problem)
    return Form(form.problem, form)


def estimate(facts: ContractionProblem, rows: Columns, counts: TileCounts, machine: Machine) -> Estimate:
    """Of the product, and of the reductions of rows behind it."""
    product = contraction_cost(rows, facts, counts, machine)
    return with_row_stages(product, rows, facts, counts, machine) if facts.row_stages else product


GEMM = Schema(
    name="contraction",
    kinds=("contraction",),
    schedule=ContractionSchedule,
    match=match,
    space=lambda facts, machine, options: contraction_space(facts, machine, options.atomics),
    counts=lambda facts, rows, machine: contraction_counts(rows, facts, machine),
    estimate=lambda facts, rows, counts, machine, options: estimate(facts, rows, counts, machine),
    lower=lambda problem, form, schedule, machine: lower_contraction(problem, form.parts, schedule, machine),
    bound=lambda facts, rows, counts, machine, share: contraction_bound(rows, facts, counts, machine, share),
    features=lambda facts, rows, machine, options: contraction_features(facts, rows),
    unordered=lambda schedule: bool(schedule.atomics),
)
