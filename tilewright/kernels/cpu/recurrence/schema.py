"""The schema of loops that are recurrences: all steps in one kernel."""

from __future__ import annotations

from typing import Any

from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.cpu.recurrence.estimate import recurrence_counts, recurrence_estimate
from tilewright.kernels.cpu.recurrence.lower import lower_recurrence, vector_form
from tilewright.kernels.cpu.recurrence.space import CpuRecurrenceSchedule, recurrence_space
from tilewright.kernels.recurrence_form import RecurrenceFacts, RecurrenceForm
from tilewright.kernels.schema import Form, Schema


def match(problem: Problem, machine: Machine) -> Form[RecurrenceFacts, RecurrenceForm]:
    form = vector_form(problem, machine.vector_lanes())
    return Form(form.facts, form)


def schedule_of(axes: Any, machine: Machine) -> CpuRecurrenceSchedule:
    return CpuRecurrenceSchedule(lanes=machine.vector_lanes(), **axes)


RECURRENCE = Schema(
    name="recurrence",
    kinds=("loop",),
    schedule=CpuRecurrenceSchedule,
    match=match,
    space=lambda facts, machine, options: recurrence_space(facts, machine, options.threads),
    counts=recurrence_counts,
    estimate=lambda facts, candidates, counts, machine, options: recurrence_estimate(facts, candidates, counts, machine, options.threads),
    lower=lambda problem, form, schedule, machine: lower_recurrence(problem, form.parts, schedule, machine),
    made=schedule_of,
)
