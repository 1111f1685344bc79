"""Attention whose keys, values and weights tensor cores can multiply: stored as 16-bit floats, or float32 rounded to TF32."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewright.codegen.common import widest
from tilewright.codegen.intrinsics.async_copy import COPIED_BYTES
from tilewright.codegen.intrinsics.mma import SHAPES, N
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import FLOAT32, size_of
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.attention_form import AttentionFacts, AttentionForm, loaded_width, scale_apart
from tilewright.kernels.gpu.attention.schema import ATTENTION
from tilewright.kernels.gpu.bounds import WIDEST_BYTES
from tilewright.kernels.gpu.tensor_cores.factors import Factors, check_multiplies, copies_asynchronously
from tilewright.kernels.schema import Form, form_of


@dataclass(frozen=True)
class TensorAttentionFacts(Factors):
    """The sizes, with vectors of up to 16 bytes, stores of pairs, and without operations on logits where these are the scores; and the type of the
    factors, a key of `mma.SHAPES`. asynchronous: whether the machine copies to shared memory asynchronously."""

    attention: AttentionFacts
    kind: str
    asynchronous: bool = True

    @property
    def r(self) -> int:
        """Elements of queries and keys in shared memory, with zeros up to whole products."""
        return -(-self.attention.r // self.shape.depth) * self.shape.depth

    @property
    def d(self) -> int:
        """Elements of values in shared memory."""
        return -(-self.attention.d // N) * N

    @property
    def copies(self) -> bool:
        """Whether asynchronous copies can bring keys and values to shared memory."""
        return self.asynchronous and min(self.attention.k_vector, self.attention.v_vector) * self.element_bytes >= COPIED_BYTES[0]


@dataclass(frozen=True)
class TensorAttentionForm:
    """`attention`: with queries as they are loaded, without the constant that multiplies them: scores are multiplied by it instead. `bare`: its
    logits are scores to be multiplied by `scale`, a positive constant, or minus infinity where they are masked; otherwise they have the scale."""

    attention: AttentionForm
    facts: TensorAttentionFacts
    scale: float
    bare: bool


def tensor_attention_form(problem: Problem, machine: Machine) -> Form[TensorAttentionFacts, TensorAttentionForm]:
    """The form of a region.

    Weights are rounded to the type of keys and values, which is only done where the result is stored in that type as well (or in float32 if TF32 is
    allowed): its rounding errors are then of the same size.

    Raises:
        Unsuitable: if the machine lacks the instructions, or the region is not attention over such factors.
    """
    found = form_of(ATTENTION, problem, machine)
    if isinstance(found, Unsuitable):
        raise Unsuitable(str(found))
    attention = found.parts
    types = {*attention.stored, problem.values[attention.output].dtype}
    kind = next((kind for kind, shape in SHAPES.items() if {shape.stored} == types), None)
    if kind is None or attention.dtype != FLOAT32:
        raise Unsuitable("keys, values and results are not stored in one type, float32 or of 16 bits")
    check_multiplies(machine, kind)
    attention, scale, bare = scale_apart(attention)
    most, layouts = WIDEST_BYTES // size_of(SHAPES[kind].stored), attention.layouts
    sizes = replace(
        attention.facts,
        q_vector=loaded_width(attention.q, attention.r, layouts, most),
        k_vector=loaded_width(attention.k, attention.r, layouts, most),
        v_vector=loaded_width(attention.v, attention.d, layouts, most),
        store_vector=widest(attention.element, attention.d[-1], layouts, attention.offset, 2),
    )
    facts = TensorAttentionFacts(sizes, kind, copies_asynchronously(machine))
    return Form(facts, TensorAttentionForm(replace(attention, facts=sizes), facts, scale, bare))
