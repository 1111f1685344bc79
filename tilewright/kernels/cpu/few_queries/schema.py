"""The schema of attention of few queries."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.attention_form import AttentionFacts, AttentionForm, attention_form
from tilewright.kernels.cpu.few_queries.estimate import few_queries_counts, few_queries_estimate
from tilewright.kernels.cpu.few_queries.lower import lower_few_queries, vectors_of
from tilewright.kernels.cpu.few_queries.space import MOST_QUERIES, FewQueriesSchedule, few_queries_space
from tilewright.kernels.schema import Form, Schema, in_tile_if


def match(problem: Problem, machine: Machine) -> Form[AttentionFacts, AttentionForm]:
    """Raises Unsuitable for many queries, and if keys or values are no whole vectors in memory."""
    form = attention_form(problem)
    if form.facts.m > MOST_QUERIES:
        raise Unsuitable(f"{form.facts.m} queries of a head are more than {MOST_QUERIES}")
    if vectors_of(form, machine.vector_lanes()) is None:
        raise Unsuitable(f"keys or values are no whole vectors of {machine.vector_lanes()} elements in memory")
    return Form(form.facts, form)


FEW_QUERIES = Schema(
    name="few queries",
    kinds=("attention",),
    schedule=FewQueriesSchedule,
    match=match,
    space=lambda facts, machine, options: few_queries_space(facts, machine, options.threads),
    counts=few_queries_counts,
    estimate=lambda facts, candidates, counts, machine, options: few_queries_estimate(facts, candidates, counts, machine, options.threads),
    lower=lambda problem, form, schedule, machine: lower_few_queries(problem, form.parts, schedule),
    within=in_tile_if(lambda facts, schedule: True),
    made=lambda axes, machine: FewQueriesSchedule(lanes=machine.vector_lanes(), **axes),
)
