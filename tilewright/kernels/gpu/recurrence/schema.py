"""The schema of loops that are recurrences on a GPU: all steps in one kernel."""

from __future__ import annotations

from tilewright.kernels.gpu.recurrence.estimate import recurrence_counts, recurrence_estimate
from tilewright.kernels.gpu.recurrence.lower import lower_recurrence
from tilewright.kernels.gpu.recurrence.space import GpuRecurrenceSchedule, recurrence_space
from tilewright.kernels.gpu.recurrence.steps import shared_form
from tilewright.kernels.schema import Matching, Schema

RECURRENCE = Schema(
    name="recurrence",
    kinds=("loop",),
    schedule=GpuRecurrenceSchedule,
    match=Matching(shared_form),
    space=lambda facts, machine, options: recurrence_space(facts, machine),
    counts=recurrence_counts,
    estimate=lambda facts, candidates, counts, machine, options: recurrence_estimate(facts, candidates, counts, machine),
    lower=lambda problem, form, schedule, machine: lower_recurrence(problem, form.parts, schedule, machine),
)
