"""Sums of products whose factors the copy engine can bring to shared memory with their reduced dimension innermost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewright.codegen.access import storage_order
from tilewright.codegen.common import reduce_and_final
from tilewright.codegen.intrinsics.wgmma import DEPTHS, STORED
from tilewright.graph.contraction import anchor
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import FLOAT32, size_of
from tilewright.ir.expr import Var, substitute
from tilewright.ir.expr import index_const as at
from tilewright.ir.problem import Problem
from tilewright.ir.region import F16_PAIR, Storage, Unsuitable
from tilewright.kernels.gpu.gemm.form import ProductForm
from tilewright.kernels.gpu.gemm.schema import GEMM
from tilewright.kernels.gpu.gemm.space import ContractionFacts
from tilewright.kernels.gpu.warpgroup.result_matrix import result_matrix
from tilewright.kernels.gpu.warpgroup.tensors import Pixels, Rows, factor, in_pairs, packed
from tilewright.kernels.schema import Form, form_of

ROW_BYTES = (32, 64, 128)
"""Bytes of channels that a step can multiply."""


@dataclass(frozen=True)
class WarpgroupFacts:
    """The sizes of a product, the type of its factors (a key of `wgmma.DEPTHS`), and its reduction: taps, and channels within each. `ordered`:
    whether rows and columns are in memory in the order of the region's axes, as parts of a split are. `grouped`: the channels of another product
    follow in memory, which a step must not read: they may be infinite, and then are no zeros after a product with zeros. `pooled`: results that are
    combined into one that is stored. `sendable`: whether the copy engine can store the results. `constant`: whether the second
    factor is a constant, which is packed."""

    product: ContractionFacts
    kind: str
    taps: int
    channels: int
    ordered: bool
    grouped: bool = False
    pooled: int = 1
    sendable: bool = False
    constant: bool = False

    @property
    def element_bytes(self) -> int:
        return size_of(STORED[self.kind])

    @property
    def row_bytes(self) -> int:
        """Bytes of channels in a step: all of them if they fit, else 128; or as many as divide them if they are `grouped`."""
        count = self.channels * self.element_bytes
        if self.grouped:
            return max(part for part in ROW_BYTES if count % part == 0)
        return next((part for part in ROW_BYTES if count <= part), ROW_BYTES[-1])

    @property
    def splits_to_f16(self) -> bool:
        """Whether a step has channels enough for a product of float16."""
        return self.row_bytes // self.element_bytes >= DEPTHS["f16"]

    @property
    def steps(self) -> int:
        """Steps of the reduction: parts of the channels at each tap."""
        return self.taps * -(-self.channels * self.element_bytes // self.row_bytes)


@dataclass(frozen=True)
class WarpgroupForm:
    """A product, and its factors as tensors."""

    product: ProductForm
    facts: WarpgroupFacts
    a: Rows | Pixels
    b: Rows
    storage: dict[str, Storage]

    def in_pairs(self, numbers: str) -> WarpgroupForm:
        """The product of float32 whose weights are stored as pairs of such numbers. Raises Unsuitable if it has no packed float32 weights, or a step
        multiplies too few channels."""
        if self.facts.kind != "tf32" or not self.storage:
            raise Unsuitable("only float32 factors are pairs, the second of them a constant")
        if numbers == F16_PAIR and not self.facts.splits_to_f16:
            raise Unsuitable("a product of float16 multiplies more channels than there are")
        b, storage = in_pairs(self.b, self.storage[self.b.buffer], numbers)
        return replace(self, b=b, storage=storage, product=replace(self.product, storage=storage))


def warpgroup_form(problem: Problem, machine: Machine) -> Form[WarpgroupFacts, WarpgroupForm]:
    """The form of a region for this schema, which reads images by im2col maps.

    Raises:
        Unsuitable: like `factors_form`; and for images whose pixels overlap, since no GPU has run such a map yet (a tiled one with overlaps has run).
    """
    form = factors_form(problem, machine)
    if isinstance(form.parts.a, Pixels) and form.parts.a.strides[-2] < form.parts.a.extents[-1]:
        raise Unsuitable("pixels that overlap are read in patches alone")
    return form


def factors_form(problem: Problem, machine: Machine, spatial: frozenset[Var] = frozenset()) -> Form[WarpgroupFacts, WarpgroupForm]:
    """The form of a region whose factors the copy engine reads. `spatial`: as in `tensors.factor`.

    Raises:
        Unsuitable: if the machine lacks the instructions, or the region is not a sum of products of such factors without row reductions after it.
    """
    if not machine.has("sm_90a"):
        raise Unsuitable(f"{machine.name} has no wgmma, which needs sm_90a")
    found = form_of(GEMM, problem, machine)
    if isinstance(found, Unsuitable):
        raise Unsuitable(str(found))
    product = found.parts
    if product.row_stages:
        raise Unsuitable("rows of the result are reduced, which warpgroups do not hold")
    sum_ = anchor(problem.region.steps, problem.constants)
    assert sum_ is not None
    ones = {axis: at(0) for axis in (*product.step.axes, *product.step.reduction) if axis.extent == 1}
    offset = substitute(problem.layouts[product.output].offset(reduce_and_final(problem.region)[2]), ones)
    batch, m, n = (storage_order([axis for axis in axes if axis.extent != 1], offset) for axes in (sum_.batch, sum_.m, sum_.n))
    ordered = [*batch, *m, *n] == [axis for axes in (sum_.batch, sum_.m, sum_.n) for axis in axes if axis.extent != 1]
    r = [axis for axis in sum_.r if axis.extent != 1]
    first = factor(problem, sum_.a, m, batch, r, spatial)
    storage: dict[str, Storage] = {}
    if sum_.b.buffer in problem.constants:
        second, storage = packed(problem, sum_, n, batch, first)
    else:
        other = factor(problem, sum_.b, n, batch, r)
        if not isinstance(other.tensor, Rows) or other.channel != first.channel or first.taps:
            raise Unsuitable("the second factor is not a matrix in memory")
        second = other.tensor
    kind = next((kind for kind, stored in STORED.items() if {first.tensor.dtype, second.dtype} == {stored}), None)
    if kind is None or product.dtype != FLOAT32:
        raise Unsuitable("the factors are not of one type, float32 or of 16 bits")
    grouped = isinstance(first.tensor, Pixels) and first.tensor.groups > 1
    sendable = result_matrix(product) is not None
    facts = WarpgroupFacts(product.facts, kind, second.extents[2], second.extents[3], ordered, grouped, sendable=sendable, constant=bool(storage))
    if grouped and facts.channels * facts.element_bytes % ROW_BYTES[0]:
        raise Unsuitable(f"the channels of a group are not whole {ROW_BYTES[0]} bytes")
    try:
        for tensor in (first.tensor, second):
            tensor.map("map", 64, facts.row_bytes)
    except ValueError as error:
        raise Unsuitable(f"the copy engine cannot read a factor: {error}") from error
    return Form(facts, WarpgroupForm(replace(product, storage=storage), facts, first.tensor, second, storage))
