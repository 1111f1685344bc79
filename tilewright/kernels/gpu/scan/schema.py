"""The schema for cumulative sums and the like."""

from __future__ import annotations

from tilewright.kernels.gpu.bounds import bound_of_stored
from tilewright.kernels.gpu.scan.counts import scan_counts
from tilewright.kernels.gpu.scan.estimate import scan_estimate
from tilewright.kernels.gpu.scan.lower import lower_scan, scan_form
from tilewright.kernels.gpu.scan.space import ScanSchedule, scan_space
from tilewright.kernels.schema import Matching, Schema

SCAN = Schema(
    name="scan",
    kinds=("scan",),
    schedule=ScanSchedule,
    match=Matching(scan_form),
    space=lambda facts, machine, options: scan_space(facts, machine),
    counts=lambda facts, candidates, machine: scan_counts(facts, candidates, machine),
    estimate=lambda facts, candidates, counts, machine, options: scan_estimate(facts, candidates, counts, machine),
    bound=bound_of_stored,
    lower=lambda problem, form, schedule, machine: lower_scan(problem, form.parts, schedule),
)
