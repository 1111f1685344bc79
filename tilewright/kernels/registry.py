"""The schemas for a machine, both the package's and registered ones, and lowering by the schema of a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from tilewright.errors import UnsupportedOption
from tilewright.hardware.machine import Machine
from tilewright.ir.expr import INDEX
from tilewright.ir.graph import Value
from tilewright.ir.kernel import FAULTS, Invoke, Kernel, statements
from tilewright.ir.layout import row_major
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Storage, Unsuitable
from tilewright.kernels.cpu.registry import LIBRARY as CPU_LIBRARY
from tilewright.kernels.cpu.registry import SCHEMAS as CPU
from tilewright.kernels.gpu.early import beginning_early
from tilewright.kernels.gpu.registry import LIBRARY as GPU_LIBRARY
from tilewright.kernels.gpu.registry import SCHEMAS as GPU
from tilewright.kernels.gpu.trips import with_trips
from tilewright.kernels.images import lowered_for_images
from tilewright.kernels.schema import AnySchema, form_of

_registered: dict[bool, tuple[AnySchema, ...]] = {False: (), True: ()}
"""Registered schemas, keyed by whether they are for GPUs."""


def schemas(machine: Machine, kind: str) -> tuple[AnySchema, ...]:
    """The schemas that may serve a region of the kind on the machine, in the order in which they are asked."""
    return tuple(schema for schema in (*(GPU if machine.is_gpu else CPU), *_registered[machine.is_gpu]) if kind in schema.kinds)


def library(machine: Machine) -> AnySchema:
    """The schema of library kernels, whose candidates have no predicted time."""
    return GPU_LIBRARY if machine.is_gpu else CPU_LIBRARY


@contextmanager
def registered(schema: AnySchema, gpu: bool = False) -> Iterator[None]:
    """Inside the context, the schema is asked after the package's own, on CPUs or on GPUs. Only this process knows it: processes that measure do not
    lower its candidates.

    Raises:
        UnsupportedOption: if another schema of these machines has its name, or its schedule type for the same kind of region.
    """
    for other in (*(GPU if gpu else CPU), *_registered[gpu]):
        if other.name == schema.name or (other.schedule is schema.schedule and set(other.kinds) & set(schema.kinds)):
            raise UnsupportedOption(f"the schema {schema.name!r} has the name or the schedules of the schema {other.name!r}", "give it its own")
    if schedule_types().get(schema.schedule.__name__, schema.schedule) is not schema.schedule:
        raise UnsupportedOption(f"other schedules than those of the schema {schema.name!r} are called {schema.schedule.__name__}", "rename its own")
    _registered[gpu] = (*_registered[gpu], schema)
    try:
        yield
    finally:
        _registered[gpu] = tuple(other for other in _registered[gpu] if other is not schema)


def has_registered(machine: Machine, kind: str) -> bool:
    """Whether a registered schema is asked for such regions. The keys of stored choices do not cover such schemas."""
    return any(kind in schema.kinds for schema in _registered[machine.is_gpu])


def schedule_types() -> Mapping[str, type]:
    """The schedule types of all schemas by class name, under which records and artifacts refer to them."""
    every = (*CPU, *GPU, CPU_LIBRARY, GPU_LIBRARY, *_registered[False], *_registered[True])
    return MappingProxyType({schema.schedule.__name__: schema.schedule for schema in sorted(every, key=lambda schema: schema.schedule.__name__)})


def schema_of(schedule: Any, machine: Machine, kind: str) -> AnySchema:
    """The schema that a schedule belongs to.

    Raises:
        Unsuitable: if no schema of the machine has this type of schedule for this kind of region.
    """
    for schema in (*schemas(machine, kind), library(machine)):
        if type(schedule) is schema.schedule and kind in schema.kinds:
            return schema
    raise Unsuitable(f"no {type(schedule).__name__} lowers a region of kind {kind}")


def lower(problem: Problem, schedule: Any, machine: Machine) -> Lowered:
    """Kernels, calls and extra storage of a problem under a schedule of one of its schemas.

    Raises:
        Unsuitable: if the problem does not have the form of the schedule's schema, or the schedule does not fit it.
    """
    schema = schema_of(schedule, machine, problem.region.kind)
    form = form_of(schema, problem, machine)
    if isinstance(form, Unsuitable):
        raise Unsuitable(str(form))
    lowered = schema.lower(problem, form, schedule, machine)
    for kernel in lowered.kernels:
        require_instructions(kernel, machine)
    return replace(with_faults(lowered), within=(schema.within(form.facts, schedule),))


def lower_for_images(problem: Problem, schedule: Any, machine: Machine, sizes: bool = False) -> Lowered:
    """As `lower`; on a CPU the kernels of one image are those of any number of images where that is possible (`kernels.images`), and on a GPU they
    begin early (`kernels.gpu.early`), and with `sizes` serve any number of images or rows where that is possible (`kernels.gpu.trips`).

    Raises:
        Unsuitable: as `lower` does.
    """
    exact = partial(lower, schedule=schedule, machine=machine)
    if not machine.is_gpu:
        return lowered_for_images(problem, exact)
    lowered = exact(problem)
    return beginning_early(with_trips(problem, lowered, exact) if sizes else lowered, problem, machine)


def require_instructions(kernel: Kernel, machine: Machine) -> None:
    """Raises Unsuitable if the kernel has an instruction that the machine lacks."""
    for statement in statements(kernel.body):
        if isinstance(statement, Invoke) and not all(map(machine.has, statement.intrinsic.requires)):
            raise Unsuitable(f"{machine.name} has no {statement.intrinsic.name}, which needs {', '.join(statement.intrinsic.requires)}")


def with_faults(lowered: Lowered) -> Lowered:
    """Adds storage for the indices that the kernels find out of range."""
    sizes = [buffer.size for kernel in lowered.kernels for buffer in kernel.parameters if buffer.name == FAULTS]
    if not sizes:
        return lowered
    faults = Storage(Value(FAULTS, (max(sizes),), INDEX), row_major((max(sizes),)))
    return replace(lowered, storage=MappingProxyType({**lowered.storage, FAULTS: faults}))
