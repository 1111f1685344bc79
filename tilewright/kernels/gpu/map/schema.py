"""The schema for maps."""

from __future__ import annotations

from tilewright.kernels.gpu.bounds import bound_of_stored
from tilewright.kernels.gpu.map.counts import map_counts
from tilewright.kernels.gpu.map.estimate import map_estimate
from tilewright.kernels.gpu.map.features import map_features
from tilewright.kernels.gpu.map.lower import lower_map, map_form
from tilewright.kernels.gpu.map.space import MapSchedule, map_space
from tilewright.kernels.schema import Matching, Schema

MAP = Schema(
    name="map",
    kinds=("map",),
    schedule=MapSchedule,
    match=Matching(map_form),
    space=lambda facts, machine, options: map_space(facts, machine),
    counts=lambda facts, candidates, machine: map_counts(facts, candidates, machine),
    estimate=lambda facts, candidates, counts, machine, options: map_estimate(facts, candidates, counts, machine),
    features=lambda facts, candidates, machine, options: map_features(facts, candidates),
    bound=bound_of_stored,
    lower=lambda problem, form, schedule, machine: lower_map(problem, form.parts, schedule),
)
