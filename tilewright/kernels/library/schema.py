"""The schema of library kernels: one candidate for each operator that computes what a region begins with, followed by a kernel for its epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from types import MappingProxyType

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.ir.library import OPERATORS
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.kernels.columns import Columns, length, product_of, row
from tilewright.kernels.counts import Counts, counted
from tilewright.kernels.library.form import FINDERS, LibraryForm, library_form
from tilewright.kernels.schema import AnySchema, Form, Matching, Options, Schema, form_of

NAMES = tuple(OPERATORS)
"""Operators by their numbers in columns."""


@dataclass(frozen=True)
class LibrarySchedule:
    """What a region begins with by a library's operator (`ir.library.OPERATORS`), through PyTorch."""

    operator: str

    def __str__(self) -> str:
        return f"library {self.operator}"


Facts = tuple[str, ...]
LibrarySchema = Schema[Facts, LibraryForm, LibrarySchedule, Counts]


def library(operators: Sequence[str], epilogues: Sequence[AnySchema]) -> LibrarySchema:
    """The schema for a kind of machine: operators that its libraries have, and its schemas for maps and row reductions. Nothing predicts a library's
    time, so that estimates are infinite, and only a measured time can choose a candidate."""

    def lower(problem: Problem, form: Form[Facts, LibraryForm], schedule: LibrarySchedule, machine: Machine) -> Lowered:
        operation = form.parts.operations.get(schedule.operator)
        if operation is None:
            raise Unsuitable(f"the region is no {schedule.operator} of a library")
        if operation.epilogue is None or operation.product is None:
            return Lowered(problem.region, str(schedule), (), (), library=operation.call)
        after = lowered_epilogue(operation.epilogue, epilogues, machine)
        storage = MappingProxyType({operation.product.value.name: operation.product, **after.storage})
        return replace(after, region=problem.region, schedule=f"{schedule}, then {after.schedule}", storage=storage, library=operation.call)

    return Schema(
        name="library",
        kinds=tuple(FINDERS),
        schedule=LibrarySchedule,
        match=Matching(partial(library_form, operators=operators)),
        space=_space,
        counts=lambda facts, candidates, machine: counted(length(candidates), 0, 0, 0),
        estimate=_unknown,
        lower=lower,
        made=lambda axes, machine: LibrarySchedule(NAMES[axes["operator"]]),
    )


def _space(facts: Facts, machine: Machine, options: Options) -> tuple[Columns, dict[str, int]]:
    """Every operator; those by transforms only where Winograd's algorithm is allowed, as their errors depend on the largest element of an image."""
    allowed = [name for name in facts if options.numerics.winograd or not name.startswith("fft")]
    return product_of({"operator": [NAMES.index(name) for name in allowed]}), {}


def _unknown(facts: Facts, candidates: Columns, counts: Counts, machine: Machine, options: Options) -> Estimate:
    return Estimate({"library": np.full(len(counts), inf)})


def lowered_epilogue(problem: Problem, schemas: Sequence[AnySchema], machine: Machine) -> Lowered:
    """The epilogue under its candidate with the shortest estimate. Raises Unsuitable if it has none."""
    for schema in schemas:
        form = form_of(schema, problem, machine) if problem.region.kind in schema.kinds else Unsuitable("another kind")
        if isinstance(form, Unsuitable):
            continue
        candidates, _ = schema.space(form.facts, machine, Options())
        if length(candidates):
            counts = schema.counts(form.facts, candidates, machine)
            seconds = schema.estimate(form.facts, candidates, counts, machine, Options()).seconds
            schedule = schema.schedule_of(row(candidates, int(np.argmin(seconds))), machine)
            return schema.lower(problem, form, schedule, machine)
    raise Unsuitable(f"no kernel computes the rest of the region, a {problem.region.kind}")
