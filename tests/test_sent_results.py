"""Results of products by warpgroups that the copy engine stores: variants in the interpreter, against PyTorch in float64; which candidates have them,
and where predictions choose them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from random import Random
from typing import TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.draws import draws
from tests.statements import without
from tests.test_gpu_half import check, planned
from tests.test_gpu_warpgroup import FEW, H200, ONE, as_interpreted, compiles, program_of
from tests.test_half_modules import EACH_TYPE, TYPES, in_type
from tilewright.codegen.interpreter import run
from tilewright.hardware import machine
from tilewright.hardware.calibration import gpu_variants
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import ELEMENT_TYPES
from tilewright.ir.kernel import Invoke, Kernel, statements
from tilewright.ir.problem import Problem
from tilewright.ir.region import Program, Unsuitable
from tilewright.kernels.columns import length
from tilewright.kernels.gpu.warpgroup.estimate import warpgroup_counts, warpgroup_estimate
from tilewright.kernels.gpu.warpgroup.result_matrix import result_matrix
from tilewright.kernels.gpu.warpgroup.schema import WARPGROUP
from tilewright.kernels.gpu.warpgroup.space import WarpgroupSchedule, at_once_of, shared_bytes_of
from tilewright.kernels.gpu.warpgroup.variants import LEAST_STAGES, sent_variants, warpgroup_variants
from tilewright.kernels.gpu.warpgroup_patch.schema import WARPGROUP_PATCH
from tilewright.kernels.gpu.warpgroup_patch.space import PatchSchedule
from tilewright.kernels.schema import AnySchema, Options, form_of
from tilewright.runtime.encoding import decode_kernel
from tilewright.runtime.fields import Field
from tilewright.runtime.loadable import loadable_kernel
from tilewright.selection.choice import rank
from tilewright.selection.ranking import Choice
from tilewright.tuning.workloads import Convolution, Linear, Workload, numerics_of, problem_of

Sending: TypeAlias = WarpgroupSchedule | PatchSchedule
AT_ONCE, THREE_PARTS = WarpgroupSchedule(128, 2, 3, persistent=1, sent=1), WarpgroupSchedule(192, 2, 3, swapped=1, persistent=1, sent=2)
SENT: tuple[tuple[Sending, Machine], ...] = (
    (AT_ONCE, ONE),
    (WarpgroupSchedule(256, 2, 3, swapped=1, persistent=1, sent=1), ONE),
    (WarpgroupSchedule(96, 1, 4, persistent=1, sent=1), ONE),
    (WarpgroupSchedule(48, 1, 2, persistent=1, sent=1), ONE),
    (WarpgroupSchedule(64, 2, 3, swapped=1, cluster=2, persistent=1, sent=1), FEW),
    (WarpgroupSchedule(256, 1, 4, persistent=1, sent=2), ONE),
    (THREE_PARTS, ONE),
    (WarpgroupSchedule(96, 2, 3, cluster=2, persistent=1, sent=2), FEW),
    (WarpgroupSchedule(224, 1, 4, swapped=1, persistent=1, sent=2), ONE),
    (PatchSchedule(96, 1, 3, 2, 4, 17, swapped=1, persistent=1, sent=1), ONE),
    (PatchSchedule(160, 2, 3, 1, 14, 9, swapped=1, persistent=1, sent=1), ONE),
    (PatchSchedule(64, 2, 2, 2, 3, 17, swapped=1, cluster=2, persistent=1, sent=1), FEW),
)
"""Both orders of the factors, rows of a box of 128, 64 and 32 bytes, and a cluster; parts of 64 and of 32 columns, an even and an odd number of them;
lines of patches."""


def layers(dtype: torch.dtype) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A convolution between others, so that its channels are innermost: of several tiles, partial ones in both dimensions."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(16, 64, 1), nn.Conv2d(64, 136, 3, padding=1), nn.Hardswish(), nn.Conv2d(136, 16, 1)).to(dtype)
    return module.eval(), (torch.randn(3, 16, 19, 17).to(dtype),)


def with_largest(module: nn.Module, inputs: tuple[torch.Tensor, ...], schedule: Sending, target: Machine) -> Program:
    """The program whose region of most operations has the schedule."""
    sizes: list[float] = []

    def chooser(most: float) -> Callable[[Problem, Machine, int], Choice]:
        def choose(problem: Problem, on: Machine, threads: int) -> Choice:
            ranking = rank(problem, on, threads)
            sizes.append(problem.region.flops())
            if sizes[-1] != most:
                return ranking.first()
            return replace(next(choice for choice in ranking if choice.schema.schedule is type(schedule)), schedule=schedule)

        return choose

    planned(module, inputs, target, chooser(0))
    return planned(module, inputs, target, chooser(max(sizes)))


def stores_of(kernel: Kernel) -> list[Invoke]:
    return [s for s in statements(kernel.body) if isinstance(s, Invoke) and s.intrinsic.engine == "stores"]


def sending(program: Program) -> Kernel:
    """The only kernel whose results the copy engine stores."""
    (kernel,) = [kernel for lowered in program.regions for kernel in lowered.kernels if stores_of(kernel)]
    assert len(kernel.maps) == 3 and kernel.maps[2].buffer == "out"
    return kernel


@pytest.mark.in_turns(2)
@EACH_TYPE
@pytest.mark.parametrize("schedule, target", SENT, ids=lambda value: "" if isinstance(value, Machine) else str(value))
def test_results_that_are_sent(schedule: Sending, target: Machine, dtype: torch.dtype) -> None:
    module, inputs = layers(dtype)
    program = with_largest(module, inputs, schedule, target)
    sending(program)
    check(module, inputs, program)
    compiles(program)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    ("schedule", "left_out", "position", "found"),
    [
        (AT_ONCE, "await stores", 0, "race: .* writes shared buffer sent .* stores of the copy engine"),
        (AT_ONCE, "await stores", 1, "stores: the block of .* may end while the copy engine reads"),
        (AT_ONCE, "publication to engines", 1, "not published: .* sent"),
        (AT_ONCE, "warpgroup barrier", 0, "race: .* writes shared buffer sent"),
        (AT_ONCE, "warpgroup barrier", 1, "race: .* reads shared buffer sent"),
        (AT_ONCE, "commit stores", 0, "stores: the block of"),
        (THREE_PARTS, "await stores", 0, "race: .* writes shared buffer sent .* stores of the copy engine"),
        (THREE_PARTS, "await stores", 1, "race: .* writes shared buffer sent .* stores of the copy engine"),
        (THREE_PARTS, "await stores", 2, "stores: the block of .* may end while the copy engine reads"),
    ],
    ids=str,
)
def test_what_is_left_out_of_a_store_is_reported(schedule: WarpgroupSchedule, left_out: str, position: int, found: str) -> None:
    module, inputs = layers(torch.float16)
    kernel = sending(with_largest(module, inputs, schedule, ONE))
    of_it = [s for s in statements(kernel.body) if isinstance(s, Invoke) and s.intrinsic.name == left_out]
    arrays = [np.zeros(buffer.size, ELEMENT_TYPES[buffer.dtype].array) for buffer in kernel.parameters]
    whole = run(kernel, arrays)
    assert whole.is_clean and not whole.unwritten
    report = run(replace(kernel, body=without(kernel.body, lambda s: s is of_it[position])), arrays)
    assert any(re.search(found, fault) for fault in report.faults), report.faults


@settings(max_examples=draws(12), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(seed=st.integers(0, 2**31), dtype=st.sampled_from(TYPES), schema=st.sampled_from((WARPGROUP, WARPGROUP_PATCH)))
def test_any_candidate_that_sends_is_as_good_as_pytorch(seed: int, dtype: torch.dtype, schema: AnySchema) -> None:
    random = Random(seed)
    channels, outputs = random.choice((16, 24, 40, 72)), random.choice((40, 64, 72, 136, 200))
    target = random.choice((ONE, FEW))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        after = random.choice((nn.ReLU, nn.Hardswish, nn.Identity))()
        if schema is WARPGROUP and random.random() < 0.3:
            first: list[nn.Module] = [nn.Linear(channels, 64), nn.Linear(64, outputs, bias=random.random() < 0.5), after, nn.Linear(outputs, 16)]
            inputs: tuple[torch.Tensor, ...] = (torch.randn(random.choice((1, 3)), random.randint(150, 400), channels),)
        else:
            size, dilation = (random.choice((1, 3)), 1) if schema is WARPGROUP else (random.choice((2, 3)), random.choice((1, 1, 2)))
            middle = nn.Conv2d(channels, outputs, size, padding=random.choice((0, size // 2)), dilation=dilation, bias=random.random() < 0.5)
            first = [nn.Conv2d(16, channels, 1), middle, after, nn.Conv2d(outputs, 16, 1)]
            inputs = (torch.randn(random.choice((1, 2)), 16, random.randint(14, 24), random.randint(14, 24)),)
    module, inputs = nn.Sequential(*first).to(dtype).eval(), in_type(inputs, dtype)
    used: list[Sending] = []
    program = program_of(module, inputs, lambda count: random.randrange(max(count, 1)), used, schema=schema, target=target, axis="sent")
    assert any(schedule.sent for schedule in used)
    check(module, inputs, program)


class Joined(nn.Module):
    """Two convolutions, one by a matrix product, whose results are joined, and read by a third with filters of `last`."""

    def __init__(self, first: int, second: int, last: int = 1) -> None:
        super().__init__()
        self.before, self.wide, self.narrow = nn.Conv2d(16, 24, 1), nn.Conv2d(24, first, 3, padding=1), nn.Conv2d(24, second, 1)
        self.after = nn.Conv2d(first + second, 16, last, padding=last // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        return self.after(torch.cat([torch.relu(self.wide(x)), torch.tanh(self.narrow(x))], 1))


class Scaled(nn.Module):
    """What follows the sum differs from column to column, of which the last tile has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(136, 1, 1))
        self.before, self.wide, self.after = nn.Conv2d(16, 24, 1), nn.Conv2d(24, 136, 3, padding=1), nn.Conv2d(136, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(torch.nn.functional.gelu(self.wide(self.before(x))) * self.scale)


class Batched(nn.Module):
    """Products of a batch, and of groups."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ x.transpose(1, 2)).sum(2)


def grouped() -> nn.Module:
    return nn.Sequential(nn.Conv2d(16, 64, 1), nn.Conv2d(64, 128, 3, padding=1, groups=2), nn.ReLU(), nn.Conv2d(128, 16, 1))


FORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "a slice of a concatenation": (lambda: Joined(40, 72), (2, 16, 17, 15), 1),
    "both slices": (lambda: Joined(64, 64), (2, 16, 17, 15), 1),
    "slices with a halo": (lambda: Joined(24, 88, 3), (2, 16, 17, 15), 0),
    "slices at no whole 16 bytes": (lambda: Joined(20, 44), (2, 16, 17, 15), 0),
    "a scale for each column": (Scaled, (3, 16, 19, 17), 1),
    "a batch": (Batched, (3, 200, 64), 0),
    "groups": (grouped, (2, 16, 17, 15), 0),
    "1-D": (lambda: nn.Sequential(nn.Conv1d(16, 64, 1), nn.Conv1d(64, 72, 5, padding=2), nn.Conv1d(72, 16, 1)), (2, 16, 300), 1),
    "transposed": (lambda: nn.Sequential(nn.Conv2d(16, 64, 1), nn.ConvTranspose2d(64, 72, 2, 2), nn.Conv2d(72, 16, 1)), (2, 16, 17, 15), 0),
}
"""Modules with products whose results are elsewhere than in a matrix of their own, the shape of their input, and least kernels that send."""
PATCHES = {"a slice of a concatenation": 1, "both slices": 1, "a scale for each column": 1, "1-D": 1}
"""Where convolutions over patches send."""


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("schema, target", [(WARPGROUP, ONE), (WARPGROUP, FEW), (WARPGROUP_PATCH, ONE)], ids=["one", "few", "patches"])
@pytest.mark.parametrize("name", FORMS)
def test_results_elsewhere(name: str, schema: AnySchema, target: Machine) -> None:
    make, shape, least = FORMS[name]
    if schema is WARPGROUP_PATCH:
        least = PATCHES.get(name, 0)
    torch.manual_seed(0)
    module, inputs = make().half().eval(), (torch.randn(shape).half(),)
    random = Random(name)
    program = program_of(module, inputs, lambda count: random.randrange(max(count, 1)), [], schema=schema, target=target, axis="sent")
    assert len([kernel for lowered in program.regions for kernel in lowered.kernels if stores_of(kernel)]) >= least
    check(module, inputs, program)


def test_what_cannot_be_sent_is_refused() -> None:
    problem = problem_of(Linear(4096, 256, 512, precision="fp16"))
    form = form_of(WARPGROUP, problem, H200)
    assert not isinstance(form, Unsuitable)
    whole = WarpgroupSchedule(128, 2, 3, persistent=1, sent=1)
    WARPGROUP.lower(problem, form, whole, H200)
    for changes in ({"persistent": 0}, {"staged": 1}, {"persistent": 0, "split": 2}, {"persistent": 0, "split": 2, "meeting": 1}):
        with pytest.raises(Unsuitable, match="the copy engine stores results of persistent blocks"):
            WARPGROUP.lower(problem, form, replace(whole, **changes), H200)
    for columns, width in ((80, 32), (64, 64), (128, 64)):
        with pytest.raises(Unsuitable, match=f"{columns} columns are not more than 2 parts of {width}"):
            WARPGROUP.lower(problem, form, replace(whole, columns=columns, sent=2), H200)
    patches = PatchSchedule(96, 1, 3, 2, 4, 15, swapped=1, persistent=1, sent=1)
    for groups, changes, why in (
        (2, {}, "those of one product"),
        (1, {"persistent": 0}, "pixels on columns, of persistent blocks"),
        (1, {"swapped": 0}, "pixels on columns, of persistent blocks"),
        (1, {"staged": 1}, "neither staged nor pooled"),
        (1, {"sent": 2}, "lines of a tile are sent at once"),
    ):
        problem = problem_of(Convolution(2, 128, 256, (17, 15), (3, 3), groups=groups, precision="fp16"))
        image = form_of(WARPGROUP_PATCH, problem, H200)
        assert not isinstance(image, Unsuitable)
        with pytest.raises(Unsuitable, match=why):
            WARPGROUP_PATCH.lower(problem, image, replace(patches, **changes), H200)


def test_a_ranking_has_every_variant_once() -> None:
    """A staged candidate and one that is not have the same variant."""
    for workload in (Convolution(64, 64, 128, (112, 112), (3, 3), then="relu", precision="fp16"), Linear(8192, 512, 512, precision="bf16")):
        ranking = rank(problem_of(workload), H200, numerics=numerics_of(workload))
        varied = [part for part in ranking.parts if "sent" in part.candidates]
        assert varied
        schedules = [str(choice.schedule) for choice in islice(ranking, 64)]
        assert len(schedules) == len(set(schedules))


def test_an_artifact_keeps_the_map_of_a_result() -> None:
    module, inputs = layers(torch.float16)
    kernel = loadable_kernel(sending(with_largest(module, inputs, *SENT[0])))
    (position, described) = kernel.maps[2]
    assert kernel.writes[position] and described.name == "map_sent"
    assert decode_kernel(Field(json.loads(json.dumps(asdict(kernel))), "kernel")) == kernel


def test_which_candidates_have_the_variant() -> None:
    problem = problem_of(Convolution(64, 64, 128, (56, 56), (3, 3), then="relu", precision="fp16"))
    form = form_of(WARPGROUP, problem, H200)
    assert not isinstance(form, Unsuitable) and form.facts.sendable
    candidates, _ = WARPGROUP.space(form.facts, H200, Options())
    shared_bytes = partial(shared_bytes_of, form.facts)
    variants, origins = sent_variants(candidates, np.ones(length(candidates), bool), shared_bytes, H200)
    assert length(variants) and len(set(origins.tolist())) == len(origins)
    assert (variants["sent"] == 1).all() and (variants["persistent"] == 1).all() and not variants["staged"].any()
    assert (shared_bytes_of(form.facts, variants) <= H200.shared_bytes_per_block).all()
    before = candidates["stages"][origins]
    assert (variants["stages"] <= before).all() and ((variants["stages"] == before) | (variants["stages"] >= LEAST_STAGES)).all()
    resident = partial(at_once_of, form.facts, machine=H200)
    assert (resident(variants) >= resident({name: column[origins] for name, column in candidates.items()})).all()
    fewer = np.flatnonzero(variants["stages"] < before)
    assert len(fewer)  # and only because more do not fit, or leave a processor fewer blocks
    more = {name: column[fewer] for name, column in variants.items()} | {"stages": before[fewer]}
    too_large = shared_bytes_of(form.facts, more) > H200.shared_bytes_per_block
    assert too_large.any() and (too_large | (resident(more) < resident(variants)[fewer])).all()
    again, its_origins = sent_variants(candidates, np.ones(length(candidates), bool), shared_bytes, H200, in_parts=True)
    parts = again["sent"] == 2
    # of those alone whose results at once would take the place of stages, or of a block on a processor
    stages_of = dict(zip(origins.tolist(), variants["stages"].tolist(), strict=True))
    assert parts.any() and all(stages_of.get(at, 0) < candidates["stages"][at] for at in its_origins[parts].tolist())
    assert (again["stages"][parts] == candidates["stages"][its_origins[parts]]).all()
    assert (shared_bytes_of(form.facts, again) <= H200.shared_bytes_per_block).all()
    for number in np.flatnonzero(parts)[:: max(1, int(parts.sum()) // 8)]:
        WARPGROUP.lower(problem, form, WarpgroupSchedule(**{name: int(column[number]) for name, column in again.items() if name != "meeting"}), H200)


@pytest.mark.parametrize(
    ("workload", "sendable"),
    [
        (Linear(4096, 256, 512, precision="fp16"), True),
        (Linear(4096, 256, 512, precision="bf16", then="gelu"), True),
        (Linear(4096, 256, 512, precision="tf32"), False),  # float32 results
        (Linear(4096, 256, 516, precision="fp16"), False),  # rows of 1032 bytes
        (Convolution(8, 64, 128, (28, 28), (3, 3), then="residual", precision="fp16"), False),  # reads as much as it stores
    ],
    ids=str,
)
def test_results_that_the_copy_engine_can_store(workload: Workload, sendable: bool) -> None:
    form = form_of(WARPGROUP, problem_of(workload), H200)
    assert not isinstance(form, Unsuitable)
    assert form.facts.sendable == sendable == (result_matrix(form.parts.product) is not None)


def test_variants_send_whole_rows_and_count_what_follows_the_sums() -> None:
    """None has rows of fewer than 128 bytes in a box; what is computed of each sum takes as long as in the stores of threads."""
    times: dict[str, np.ndarray] = {}
    for then in ("nothing", "silu"):
        form = form_of(WARPGROUP, problem_of(Convolution(64, 64, 128, (56, 56), (3, 3), then=then, precision="fp16")), H200)
        assert not isinstance(form, Unsuitable)
        candidates, _ = WARPGROUP.space(form.facts, H200, Options())
        variants, _ = warpgroup_variants(form.facts, candidates, H200)
        sent = variants["sent"] > 0
        assert sent.any() and ((variants["swapped"] > 0) | (variants["columns"] % 64 == 0))[sent].all()
        counts = warpgroup_counts(form.facts, variants, H200)
        times[then] = warpgroup_estimate(form.facts, variants, counts, H200).terms["drain"][sent]
    assert (times["silu"] > times["nothing"]).all()


def test_predictions_choose_it_on_an_h200() -> None:
    """A candidate that sends its results takes the time of the one that it varies, times as much of the predicted gain as was confirmed."""
    workload = Convolution(64, 64, 128, (112, 112), (3, 3), then="relu", precision="fp16")
    problem, numerics = problem_of(workload), numerics_of(workload)
    ranking = rank(problem, H200, numerics=numerics)
    first = ranking.first()
    assert isinstance(first.schedule, WarpgroupSchedule) and first.schedule.sent
    confirmed = gpu_variants(H200)
    assert confirmed is not None and 0 < confirmed.sent < 1
    a100 = rank(problem, machine("a100"), numerics=numerics)
    assert not any(getattr(choice.schedule, "sent", 0) for choice in islice(a100, 200))


def test_a_result_without_a_matrix_is_refused() -> None:
    problem = problem_of(Linear(4096, 256, 516, precision="fp16"))
    form = form_of(WARPGROUP, problem, H200)
    assert not isinstance(form, Unsuitable)
    with pytest.raises(Unsuitable, match="the copy engine cannot store"):
        WARPGROUP.lower(problem, form, WarpgroupSchedule(128, 2, 3, persistent=1, sent=1), H200)


@pytest.mark.gpu
@EACH_TYPE
def test_results_that_are_sent_on_the_gpu(dtype: torch.dtype) -> None:
    module, inputs = layers(dtype)
    for schedule, target in SENT:
        program = with_largest(module, inputs, schedule, target)
        kernel = sending(program)
        (lowered,) = [lowered for lowered in program.regions if kernel in lowered.kernels]
        as_interpreted(replace(program, regions=(lowered,)))
