"""Sums of products whose factors tensor cores can multiply: loads of 16-bit floats, or of float32 rounded to TF32. The first factor may be computed
from such loads, and is rounded to that type on its way to shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewright.codegen.common import guarded_load
from tilewright.codegen.intrinsics.mma import SHAPES
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import FLOAT32, NARROW_FLOATS
from tilewright.ir.expr import Apply, Const, Expr, loads
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.gpu.gemm.form import ProductForm
from tilewright.kernels.gpu.gemm.schema import GEMM
from tilewright.kernels.gpu.gemm.space import ContractionFacts, Operand
from tilewright.kernels.gpu.tensor_cores.factors import Factors, check_multiplies, copies_asynchronously
from tilewright.kernels.schema import Form, form_of


@dataclass(frozen=True)
class TensorCoreFacts(Factors):
    """The sizes of a product, whose factors are read in vectors of up to 16 bytes, and the type of its factors, a key of `mma.SHAPES`. asynchronous:
    whether the machine copies to shared memory asynchronously."""

    product: ContractionFacts
    kind: str
    asynchronous: bool = True

    @property
    def copies(self) -> bool:
        """Whether asynchronous copies can bring both factors to shared memory."""
        return self.asynchronous and self.product.a.plain and self.product.b.plain


@dataclass(frozen=True)
class TensorCoreForm:
    """A product, and the type of its factors."""

    product: ProductForm
    facts: TensorCoreFacts


def tensor_core_form(problem: Problem, machine: Machine) -> Form[TensorCoreFacts, TensorCoreForm]:
    """The form of a region.

    Raises:
        Unsuitable: if the machine lacks the instructions, or the region is not a sum of products of such factors without row reductions after it.
    """
    found = form_of(GEMM, problem, machine)
    if isinstance(found, Unsuitable):
        raise Unsuitable(str(found))
    product = found.parts
    if product.row_stages:
        raise Unsuitable("rows of the result are reduced, which tiles of fragments do not hold")
    stored = {product.stored(product.b), *_first_types(problem, product)}
    kind = next((kind for kind, shape in SHAPES.items() if {shape.stored} == stored), None)
    if kind is None or product.dtype != FLOAT32 or guarded_load(product.b) is None:
        raise Unsuitable("the factors are not of one type, float32 or of 16 bits")
    check_multiplies(machine, kind)
    facts = TensorCoreFacts(with_wide_vectors(product.facts), kind, copies_asynchronously(machine))
    return Form(facts, TensorCoreForm(product, facts))


def _first_types(problem: Problem, product: ProductForm) -> set[str]:
    """The types of what the first factor is loaded from, or the type that it is rounded to. One that is computed from values of 16 bits, and
    constants of any type, may be rounded to that type if the result is: the type of the map's result, which is no value of the region, would be no
    other."""
    if guarded_load(product.a) is not None:
        return {product.stored(product.a)}
    if (rounded := _rounded_to(product.a)) is not None:
        return {rounded}
    types = {product.types[load.buffer] for load in loads(product.a) if load.buffer not in problem.constants}
    narrow = types - {FLOAT32}
    return types | ({product.types[product.output]} if narrow else set())


def _rounded_to(expr: Expr) -> str | None:
    """The type of 16 bits to which a factor is rounded, maybe behind zero guards; None if it is not."""
    if not isinstance(expr, Apply):
        return None
    if expr.operation == "select":
        _, value, otherwise = expr.args
        return _rounded_to(value) if isinstance(otherwise, Const) and otherwise.value == 0 else None
    inner = expr.args[0]
    rounds = expr.operation == "cast" and isinstance(inner, Apply) and inner.operation == "cast" and inner.dtype in NARROW_FLOATS
    return inner.dtype if rounds else None


def with_wide_vectors(facts: ContractionFacts) -> ContractionFacts:
    """The facts with factors that are read in the widest vectors, up to 16 bytes."""

    def wide(operand: Operand) -> Operand:
        return replace(operand, vector_width=operand.stream_width)

    return replace(facts, a=wide(facts.a), b=wide(facts.b))
