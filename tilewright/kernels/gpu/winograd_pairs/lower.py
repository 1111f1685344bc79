"""Lowering of the `winograd pairs` schema: the transforms of `winograd`, and a batched product by warpgroups, whose filters are packed as pairs."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2

from tilewright.hardware.machine import Machine
from tilewright.ir.layout import Layout
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered
from tilewright.kernels.block_transforms import transforms_of
from tilewright.kernels.gpu.warpgroup.form import WarpgroupForm, warpgroup_form
from tilewright.kernels.gpu.warpgroup.lower import lower_as
from tilewright.kernels.gpu.warpgroup.pairs import FLOAT16, PAIRS
from tilewright.kernels.gpu.winograd.lower import between_transforms, filters_storage, product_problem, winograd_facts
from tilewright.kernels.gpu.winograd_pairs.space import PairedWinogradFacts, PairedWinogradSchedule
from tilewright.kernels.schema import Form
from tilewright.kernels.winograd_form import WinogradForm, winograd_form


def along_inputs(shape: tuple[int, ...]) -> Layout:
    """[point, output channel, input channel]: rows of the second factor, given the shape [point, input, output channel]."""
    return Layout(shape, ((0, 0), (2, 0), (1, 0)))


def match(problem: Problem, machine: Machine) -> Form[PairedWinogradFacts, WinogradForm]:
    """Raises Unsuitable like `winograd_form`, or if warpgroups cannot multiply the points."""
    form = winograd_form(problem)
    products = (
        warpgroup_form(product_problem(form.output, form, transform, along_inputs), machine) for transform in transforms_of(form.filter_shape)
    )
    return Form(PairedWinogradFacts(winograd_facts(problem, form), tuple(replace(product.facts, constant=True) for product in products)), form)


def lower_paired_winograd(problem: Problem, form: WinogradForm, schedule: PairedWinogradSchedule, machine: Machine) -> Lowered:
    """Three kernels (four if the product is split), workspaces for the points and their sums, and the filters transformed and packed."""
    product = product_problem(problem.region.name, form, schedule.transform, along_inputs)
    _, filters = product.region.inputs
    packed = filters_storage(filters, form, schedule.transform, along_inputs)

    def paired(part: Problem) -> WarpgroupForm:
        return replace(warpgroup_form(part, machine).parts, storage={filters: packed}).in_pairs(PAIRS[schedule.pairs].numbers)

    made = paired(product)
    multiplied = lower_as(product, made, schedule.product, machine, paired)
    # points have the range of the input then
    raised = ceil(log2(schedule.transform.growth)) if PAIRS[schedule.pairs] is FLOAT16 else 0
    return between_transforms(problem, form, schedule, product, multiplied, made.storage[filters], raised)
