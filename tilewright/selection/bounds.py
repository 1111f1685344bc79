"""Lower bounds on the time of a chosen schedule, which explanations print beside its prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from math import isfinite
from types import MappingProxyType

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.gpu.bounds import lower_bound
from tilewright.kernels.gpu.deepcuts_limits import limit_seconds
from tilewright.kernels.schema import form_of
from tilewright.selection.ranking import Choice

DEEPCUTS = "DeepCuts' limit"
"""The name of the limit of `kernels.gpu.deepcuts`, which good kernels exceed."""


def bounds_of(problem: Problem, choice: Choice, machine: Machine) -> Mapping[str, float]:
    """Seconds that no kernel of the schedule can beat on a GPU, under the name of their longest term, and DeepCuts' limit. Calls are repeated: what
    level 2 cannot hold of their distinct bytes goes through memory. A schema without a bound, or without formulas in the paper, has none, nor has a
    CPU."""
    form = form_of(choice.schema, problem, machine) if machine.is_gpu else None
    if form is None or isinstance(form, Unsuitable):
        return MappingProxyType({})
    candidate = {entry.name: np.array([getattr(choice.schedule, entry.name)]) for entry in fields(choice.schedule)}
    found: dict[str, float] = {}
    if choice.schema.bound is not None:
        moved = choice.schema.counts(form.facts, candidate, machine).memory_bytes
        terms = lower_bound(choice.schema, form.facts, candidate, machine, float(moved[0])).terms
        name = max(terms, key=lambda term: float(terms[term][0]))
        found[name] = float(terms[name][0])
    try:
        limit = float(np.ravel(limit_seconds(choice.schema, form.facts, candidate, machine))[0])
    except Unsuitable:
        return MappingProxyType(found)
    return MappingProxyType({**found, DEEPCUTS: limit} if isfinite(limit) else found)
