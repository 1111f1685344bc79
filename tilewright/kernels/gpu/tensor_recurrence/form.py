"""Recurrences whose sums tensor cores can compute: products of stored states with weights, all of one type, 16-bit floats or float32 rounded to TF32;
one product, or of joint loops one for each, of equal sizes."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.intrinsics.mma import SHAPES
from tilewright.hardware.machine import Machine
from tilewright.ir.expr import Load
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.gpu.recurrence.steps import exchanged_states, shared_form, units_adjacent
from tilewright.kernels.gpu.tensor_cores.factors import Factors
from tilewright.kernels.recurrence_form import RecurrenceFacts, RecurrenceForm
from tilewright.kernels.schema import Form

ROW_BYTES = 16
"""Bytes of a row that a lane loads at a time."""
LANES_OF_ROW = 4
"""Lanes of a warp that hold elements of one row of a fragment."""


@dataclass(frozen=True)
class TensorRecurrenceFacts(Factors):
    """The sizes of a recurrence, and the type of its factors, a key of `mma.SHAPES`."""

    sizes: RecurrenceFacts
    kind: str

    @property
    def vector(self) -> int:
        """Elements that a lane loads at a time."""
        return ROW_BYTES // self.element_bytes

    @property
    def deep(self) -> int:
        """Elements along what is reduced that the lanes of a row load at a time: those of two fragments."""
        return LANES_OF_ROW * self.vector

    @property
    def reduced(self) -> int:
        """Products that are summed for each gate."""
        return self.sizes.products[0][1]

    @property
    def products(self) -> int:
        """The number of products, each of a state and the weights of `product_gates` gates."""
        return len(self.sizes.products)

    @property
    def product_gates(self) -> int:
        return self.sizes.products[0][0]

    @property
    def gates(self) -> int:
        return self.sizes.gates

    @property
    def weight_bytes(self) -> int:
        return self.element_bytes * self.gates * self.reduced * self.sizes.units


@dataclass(frozen=True)
class TensorRecurrenceForm:
    """A recurrence, and the type of its factors."""

    recurrence: RecurrenceForm
    facts: TensorRecurrenceFacts


def tensor_recurrence_form(problem: Problem, machine: Machine) -> Form[TensorRecurrenceFacts, TensorRecurrenceForm]:
    """The form of a loop.

    Raises:
        Unsuitable: as `shared_form`, and if the machine lacks the instructions, or the sums are no products of equal sizes of states as they are
            stored.
    """
    form = shared_form(problem)
    if not machine.has("sm_80"):
        raise Unsuitable(f"{machine.name} has no mma.sync with float32 sums of these shapes, which needs sm_80")
    if len(set(form.facts.products)) != 1:
        raise Unsuitable("its gates are sums of several products of different sizes")
    states = exchanged_states(form)
    stored = {problem.values[name].dtype for name in (*states, *(product.b for product in form.products))}
    kind = next((kind for kind, shape in SHAPES.items() if {shape.stored} == stored), None)
    if kind is None or not all(_is_plain(product.a) for product in form.products):
        raise Unsuitable("states and weights are not of one type, float32 or of 16 bits")
    facts = TensorRecurrenceFacts(form.facts, kind)
    if facts.reduced != form.facts.units or facts.reduced % facts.deep:
        raise Unsuitable(f"{facts.reduced} elements of a state are no multiple of {facts.deep}")
    if not all(units_adjacent(form, state, facts.vector) for state in states):
        raise Unsuitable("states of a sequence are not adjacent, or vectors of them not aligned")
    return Form(facts, TensorRecurrenceForm(form, facts))


def _is_plain(a: object) -> bool:
    """Whether a factor is what is stored, maybe converted."""
    return isinstance(a, Load) and a.lanes == 1
