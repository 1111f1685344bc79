"""The schema of Winograd's algorithm in one kernel."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.gpu.winograd.schema import WINOGRAD
from tilewright.kernels.gpu.winograd.space import WinogradFacts
from tilewright.kernels.gpu.winograd_fused.bound import fused_winograd_bound
from tilewright.kernels.gpu.winograd_fused.counts import fused_winograd_counts
from tilewright.kernels.gpu.winograd_fused.estimate import fused_winograd_estimate
from tilewright.kernels.gpu.winograd_fused.features import fused_winograd_features
from tilewright.kernels.gpu.winograd_fused.lower import lower_fused_winograd
from tilewright.kernels.gpu.winograd_fused.space import FusedWinogradSchedule, fused_winograd_space
from tilewright.kernels.schema import Form, Schema, form_of, in_tile_if
from tilewright.kernels.winograd_form import WinogradForm
from tilewright.kernels.winograd_transform import output_tiles


def match(problem: Problem, machine: Machine) -> Form[WinogradFacts, WinogradForm]:
    """The form of three kernels. Raises Unsuitable like `winograd_form`, and for filters that only Fourier transforms serve."""
    found = form_of(WINOGRAD, problem, machine)
    if isinstance(found, Unsuitable):
        raise found
    if not output_tiles(found.facts.filter_shape):
        rows, columns = found.facts.filter_shape
        raise Unsuitable(f"a tile of one block would have too many points: Winograd's algorithm does not serve filters of {rows} x {columns}")
    return found


WINOGRAD_FUSED = Schema(
    name="winograd fused",
    kinds=("contraction",),
    schedule=FusedWinogradSchedule,
    match=match,
    space=lambda facts, machine, options: fused_winograd_space(facts, machine),
    counts=lambda facts, candidates, machine: fused_winograd_counts(facts, candidates, machine),
    estimate=lambda facts, candidates, counts, machine, options: fused_winograd_estimate(facts, candidates, counts, machine),
    lower=lambda problem, form, schedule, machine: lower_fused_winograd(problem, form.parts, schedule),
    within=in_tile_if(lambda facts, schedule: True),
    bound=fused_winograd_bound,
    features=lambda facts, candidates, machine, options: fused_winograd_features(facts, candidates),
    transforms=True,
)
