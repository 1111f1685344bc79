"""The schema of convolutions by transforms of blocks in three kernels."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.gpu.winograd.bound import winograd_bound
from tilewright.kernels.gpu.winograd.counts import winograd_counts
from tilewright.kernels.gpu.winograd.estimate import winograd_estimate
from tilewright.kernels.gpu.winograd.features import winograd_features
from tilewright.kernels.gpu.winograd.lower import lower_winograd, winograd_facts
from tilewright.kernels.gpu.winograd.space import WinogradFacts, WinogradSchedule, winograd_space
from tilewright.kernels.gpu.winograd.variants import winograd_variants
from tilewright.kernels.schema import Form, Schema
from tilewright.kernels.winograd_form import WinogradForm, winograd_form


def match(problem: Problem, machine: Machine) -> Form[WinogradFacts, WinogradForm]:
    """Raises Unsuitable like `winograd_form`."""
    form = winograd_form(problem)
    return Form(winograd_facts(problem, form), form)


WINOGRAD = Schema(
    name="winograd",
    kinds=("contraction",),
    schedule=WinogradSchedule,
    match=match,
    space=lambda facts, machine, options: winograd_space(facts, machine),
    counts=lambda facts, candidates, machine: winograd_counts(facts, candidates, machine),
    estimate=lambda facts, candidates, counts, machine, options: winograd_estimate(facts, candidates, counts, machine),
    lower=lambda problem, form, schedule, machine: lower_winograd(problem, form.parts, schedule, machine),
    bound=winograd_bound,
    variants=winograd_variants,
    features=lambda facts, candidates, machine, options: winograd_features(facts, candidates),
    transforms=True,
)
