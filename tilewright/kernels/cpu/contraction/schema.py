"""The schemas of sums of products in register tiles: with weights packed in float32, or in their 16-bit type, and of pairs of bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from tilewright.codegen.intrinsics.amx import FACTOR
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import NARROW_FLOATS, size_of
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.columns import Columns
from tilewright.kernels.counts import Counts
from tilewright.kernels.cpu.contraction.counts import contraction_counts
from tilewright.kernels.cpu.contraction.estimate import contraction_estimate
from tilewright.kernels.cpu.contraction.features import contraction_features
from tilewright.kernels.cpu.contraction.joining import join_decision
from tilewright.kernels.cpu.contraction.lower import contraction_facts, lower_contraction, lower_pairs
from tilewright.kernels.cpu.contraction.nest import Nest, flat_nest
from tilewright.kernels.cpu.contraction.pairs import PairedNest, paired
from tilewright.kernels.cpu.contraction.space import (
    ACROSS_N,
    CONSTANT,
    CpuContractionFacts,
    CpuContractionSchedule,
    CpuNarrowSchedule,
    CpuPairsSchedule,
    cpu_contraction_space,
    schedule_of,
)
from tilewright.kernels.schema import Form, Schema

Tiled = TypeVar("Tiled", bound=CpuContractionSchedule)


def match(problem: Problem, machine: Machine) -> Form[CpuContractionFacts, Nest]:
    nest = flat_nest(problem)
    return Form(contraction_facts(problem, nest), nest)


CONTRACTION = Schema(
    name="contraction",
    kinds=("contraction",),
    schedule=CpuContractionSchedule,
    match=match,
    space=lambda facts, machine, options: cpu_contraction_space(facts, machine),
    counts=contraction_counts,
    estimate=lambda facts, candidates, counts, machine, options: contraction_estimate(facts, candidates, counts, machine, options.threads),
    lower=lambda problem, form, schedule, machine: lower_contraction(problem, form.parts, schedule, machine),
    made=lambda axes, machine: schedule_of(machine.vector_lanes(), **axes),
    features=lambda facts, candidates, machine, options: contraction_features(facts, candidates, machine, options.threads),
    joins=join_decision,
    scored=True,
)


def match_narrow(problem: Problem, machine: Machine) -> Form[CpuContractionFacts, Nest]:
    """The form for constant weights of 16 bits of which each is used once: such products are bound by reading them. If a weight were used more often,
    it would be widened again for each tile, while one packed in float32 is read again from a cache.

    Raises:
        Unsuitable: for other products.
    """
    form = match(problem, machine)
    facts, stored = form.facts, problem.values[form.parts.found.b.buffer].dtype
    if facts.b != CONSTANT or stored not in NARROW_FLOATS:
        raise Unsuitable("the second factor is no constant of 16 bits")
    if facts.outer * facts.rows * facts.columns != 1:
        raise Unsuitable("weights are used more than once")
    scale = size_of(stored) / facts.element_bytes
    return Form(replace(facts, b_bytes=int(facts.b_bytes * scale), element_bytes=size_of(stored)), form.parts)


def made_as(kind: type[Tiled]) -> Callable[[Mapping[str, int], Machine], Tiled]:
    """The `made` of a schema whose schedules are of this type."""

    def made(axes: Mapping[str, int], machine: Machine) -> Tiled:
        plain = schedule_of(machine.vector_lanes(), **axes)
        return kind(plain.tile_rows, plain.tile_columns, plain.vectors, plain.lanes, plain.order)

    return made


NARROW_WEIGHTS = replace(
    CONTRACTION, name="narrow weights", schedule=CpuNarrowSchedule, match=match_narrow, made=made_as(CpuNarrowSchedule), features=None, joins=None
)


def match_pairs(problem: Problem, machine: Machine) -> Form[CpuContractionFacts, PairedNest]:
    """The form of products of pairs, whose facts count pairs as elements. Raises Unsuitable like `paired`."""
    form = match(problem, machine)
    nest = paired(problem, form.parts, machine)
    pair = 2 * size_of(FACTOR)
    b = CONSTANT if form.facts.b == CONSTANT else ACROSS_N  # what is computed is packed first
    b_bytes = form.facts.b_bytes // (form.facts.element_bytes * form.facts.r) * pair * nest.steps
    return Form(replace(form.facts, r=nest.steps, element_bytes=pair, b_bytes=b_bytes, b=b), nest)


def multiplying_pairs(machine: Machine) -> Machine:
    """The machine with the rate of products of pairs as that of its multiply-adds: where no peak of bfloat16 tells it, or that of tile registers, one
    vector a cycle."""
    known = "amx_bf16" not in machine.isa and "bf16" in machine.peak_flops
    ports = machine.fma_ports * machine.peak_flops["bf16"] / (2 * machine.peak_flops["fp32"]) if known else 1.0
    return replace(machine, fma_ports=ports)


def pairs_counts(facts: CpuContractionFacts, candidates: Columns, machine: Machine) -> Counts:
    counts = contraction_counts(facts, candidates, machine)
    return replace(counts, flops=counts.flops + (counts.flops - facts.row_operations))  # a pair is two multiply-adds


PAIRS = Schema(
    name="pairs",
    kinds=("contraction",),
    schedule=CpuPairsSchedule,
    match=match_pairs,
    space=lambda facts, machine, options: cpu_contraction_space(facts, machine),
    counts=pairs_counts,
    estimate=lambda facts, candidates, counts, machine, options: contraction_estimate(
        facts, candidates, counts, multiplying_pairs(machine), options.threads
    ),
    lower=lambda problem, form, schedule, machine: lower_pairs(problem, form.parts, schedule, machine),
    made=made_as(CpuPairsSchedule),
)
