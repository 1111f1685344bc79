"""Lower bounds on the time of a chosen schedule, which explanations print beside its prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from math import isfinite
from types import MappingProxyType
from typing import Any

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.bounds import lower_bound
from tilewright.kernels.gpu.deepcuts_limits import limit_seconds, worst_conflicts
from tilewright.kernels.schema import form_of
from tilewright.selection.ranking import Choice

DEEPCUTS = "DeepCuts' limit"
"""The name of the limit of `kernels.gpu.deepcuts`, which good kernels exceed; with bank conflicts their coefficient follows (`claimed`)."""
ARITHMETIC = "arithmetic at peak"
"""The name of the limit of a CPU."""

NO_BOUNDS: Mapping[str, float] = MappingProxyType({})


def bounds_of(problem: Problem, choice: Choice, machine: Machine, threads: int = 1) -> Mapping[str, float]:
    """Seconds that no kernel of the schedule can beat, under the name of what limits them. On a GPU that is the longest term of the lower bound,
    beside DeepCuts' limit (`claimed`). Calls are repeated: what level 2 cannot hold of their distinct bytes goes through memory. A schema without a
    bound, or without formulas in the paper, has none. On a CPU it is the schedule's arithmetic at the peak of `threads` threads."""
    if not machine.is_gpu:
        narrow = "bf16" in problem.dtypes.values()
        return MappingProxyType({ARITHMETIC: arithmetic_seconds(choice.flops, machine, threads, narrow)} if choice.flops else {})
    form = form_of(choice.schema, problem, machine)
    if isinstance(form, Unsuitable):
        return MappingProxyType({})
    candidate = as_columns(choice.schedule)
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
    return MappingProxyType({**found, **claimed(limit, worst_conflicts(choice.schema, form.facts, candidate))})


def claimed(seconds: float, conflicts: float) -> dict[str, float]:
    """DeepCuts' limit under its name, which states the largest COEF_bc of its operations unless that is 1; nothing if the limit is infinite."""
    return {DEEPCUTS + (f" with COEF_bc {conflicts:.2f}" if conflicts > 1 else ""): seconds} if isfinite(seconds) else {}


def is_claim(name: str) -> bool:
    """Whether a bound of this name is DeepCuts' limit, which is no bound."""
    return name.startswith(DEEPCUTS)


def as_columns(schedule: Any) -> Columns:
    """A schedule as the only candidate of a space."""
    return {entry.name: np.array([getattr(schedule, entry.name)]) for entry in fields(schedule)}


def arithmetic_seconds(flops: float, machine: Machine, threads: int, narrow: bool = False) -> float:
    """Seconds of so many operations at a machine's peak, a CPU's on that many threads; `narrow`: in bfloat16, where the machine is faster in that."""
    peak = max(machine.peak_flops[dtype] for dtype in ("fp32", *(("bf16",) if narrow else ())) if dtype in machine.peak_flops)
    return flops / peak if machine.is_gpu else flops / (peak * min(threads, machine.processors) / machine.processors)
