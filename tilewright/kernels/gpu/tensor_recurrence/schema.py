"""The schema of loops that are recurrences of many sequences on tensor cores: all steps in one kernel."""

from __future__ import annotations

from tilewright.kernels.gpu.tensor_recurrence.estimate import tensor_recurrence_counts, tensor_recurrence_estimate
from tilewright.kernels.gpu.tensor_recurrence.form import tensor_recurrence_form
from tilewright.kernels.gpu.tensor_recurrence.lower import lower_tensor_recurrence
from tilewright.kernels.gpu.tensor_recurrence.space import TensorRecurrenceSchedule, tensor_recurrence_space
from tilewright.kernels.schema import Schema

TENSOR_RECURRENCE = Schema(
    name="recurrence on tensor cores",
    kinds=("loop",),
    schedule=TensorRecurrenceSchedule,
    match=tensor_recurrence_form,
    space=lambda facts, machine, options: tensor_recurrence_space(facts, machine, options.numerics.tf32),
    counts=tensor_recurrence_counts,
    estimate=lambda facts, candidates, counts, machine, options: tensor_recurrence_estimate(facts, candidates, counts, machine),
    lower=lambda problem, form, schedule, machine: lower_tensor_recurrence(problem, form.parts, schedule, machine),
)
