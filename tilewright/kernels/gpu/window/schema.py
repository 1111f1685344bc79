"""The schema for small reductions."""

from __future__ import annotations

from tilewright.kernels.gpu.bounds import bound_of_stored
from tilewright.kernels.gpu.window.counts import window_counts
from tilewright.kernels.gpu.window.estimate import window_estimate
from tilewright.kernels.gpu.window.features import window_features
from tilewright.kernels.gpu.window.lower import lower_window, window_form
from tilewright.kernels.gpu.window.space import WindowSchedule, window_space
from tilewright.kernels.schema import Matching, Schema

WINDOW = Schema(
    name="window",
    kinds=("window",),
    schedule=WindowSchedule,
    match=Matching(window_form),
    space=lambda facts, machine, options: window_space(facts, machine),
    counts=lambda facts, candidates, machine: window_counts(facts, candidates, machine),
    estimate=lambda facts, candidates, counts, machine, options: window_estimate(facts, candidates, counts, machine),
    features=lambda facts, candidates, machine, options: window_features(facts, candidates),
    bound=bound_of_stored,
    lower=lambda problem, form, schedule, machine: lower_window(problem, form.parts, schedule, machine),
)
