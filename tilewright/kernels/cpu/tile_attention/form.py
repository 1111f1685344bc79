"""Attention whose keys, values and weights tile registers can multiply: stored in bfloat16, with elements of a key adjacent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from tilewright.codegen.intrinsics import vectors
from tilewright.codegen.intrinsics.amx import FACTOR, TILE_CHANNELS, TILE_PIXELS
from tilewright.graph.attention import Attention
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import FLOAT32, size_of
from tilewright.ir.expr import Expr, Var, coefficient, linear, range_of, variables
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.attention_form import AttentionFacts, AttentionForm, scale_apart
from tilewright.kernels.cpu.amx.space import CHUNK, chunk_of
from tilewright.kernels.cpu.attention.schema import ATTENTION
from tilewright.kernels.schema import Form, form_of


@dataclass(frozen=True)
class TileAttentionFacts:
    """`chunk`: elements of a key in a tile. `copied`: distinct elements of the values, which are copied; `adjacent`: whether those of a value are
    adjacent, at least a vector of them."""

    attention: AttentionFacts
    chunk: int
    copied: int
    adjacent: bool

    @property
    def key_blocks(self) -> int:
        """Blocks of CHUNK keys, the last filled up with zeros."""
        return -(-self.attention.n // CHUNK)

    @property
    def columns(self) -> int:
        """Lines of values and sums, up to whole tiles."""
        return -(-self.attention.d // TILE_PIXELS) * TILE_PIXELS


@dataclass(frozen=True)
class TileAttentionForm:
    """`attention`: with queries as they are loaded; its logits are to be multiplied by `scale`, and are `bare` if they are scores (`scale_apart`).
    `places`: what the address of a value depends on besides the key and the element, each an axis or an axis divided by the heads that share values;
    `copies`: an axis for each."""

    attention: AttentionForm
    facts: TileAttentionFacts
    scale: float
    bare: bool
    places: tuple[Expr, ...]
    copies: tuple[Var, ...]


def has_tiles(machine: Machine) -> bool:
    """Whether the machine has the instructions: tile registers and vectors of 16 float32."""
    return {"amx_tile", "amx_bf16", *vectors.REQUIRES} <= set(machine.isa) and machine.vector_lanes() == vectors.LANES


def fills_tiles(found: Attention) -> bool:
    """Whether the sizes suit tile registers: pairs of elements of a key, and at least a tile of keys."""
    return prod(axis.extent or 0 for axis in found.r) % 2 == 0 and (found.n.extent or 0) >= TILE_PIXELS


def tile_attention_form(problem: Problem, machine: Machine) -> Form[TileAttentionFacts, TileAttentionForm]:
    """The form of a region.

    Weights are rounded to bfloat16, which is only done where the result is stored in that type as well: its rounding errors are then of the same
    size.

    Raises:
        Unsuitable: if the machine lacks the instructions, or the region is not attention over such factors.
    """
    if not has_tiles(machine):
        raise Unsuitable(f"{machine.name} has no AMX for bfloat16")
    found = form_of(ATTENTION, problem, machine)
    if isinstance(found, Unsuitable):
        raise Unsuitable(str(found))
    form: AttentionForm = found.parts
    if {*form.stored, problem.values[form.output].dtype} != {FACTOR} or form.dtype != FLOAT32:
        raise Unsuitable("keys, values and results are not all stored in bfloat16")
    form, scale, bare = scale_apart(form)
    chunk = chunk_of(form.facts.r)
    if len(form.r) != 1 or not chunk or coefficient(form.k.index[0], form.r[0]) != 1 or not (coefficient(form.k.index[0], form.n) or 0):
        raise Unsuitable("keys are no even number of adjacent elements at a distance")
    if form.facts.n < TILE_PIXELS:
        raise Unsuitable(f"{form.facts.n} keys do not fill a tile")
    if len(form.d) != 1:
        raise Unsuitable("values have several axes of elements")
    own = {form.n, *form.d}
    places = tuple(atom for atom, _ in linear(form.v.index[0]).terms if atom not in own)
    if any(variables(place) & own for place in places):
        raise Unsuitable("the offset of the values is not linear")
    copies = tuple(Var(f"copy{number}", int(range_of(place)[1]) + 1) for number, place in enumerate(places))
    adjacent = coefficient(form.v.index[0], form.d[0]) == 1 and form.facts.d >= vectors.LANES
    copied = prod(axis.extent or 0 for axis in copies) * form.facts.n * form.facts.d
    facts = TileAttentionFacts(replace(form.facts, element_bytes=size_of(FLOAT32)), chunk, copied, adjacent)
    return Form(facts, TileAttentionForm(form, facts, scale, bare, places, copies))


assert vectors.LANES == TILE_CHANNELS
