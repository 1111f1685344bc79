"""Parts of a sum whose blocks are a cluster and meet in it, of products by warpgroups: variants in the interpreter, against PyTorch in float64, and
which of them are ranked where."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, pairwise
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.draws import draws
from tests.statements import without
from tests.test_gpu_half import check
from tests.test_gpu_warpgroup import LAYERS, TF32, check_tf32, compiles, made_of, program_of
from tests.test_half_modules import EACH_TYPE, TYPES, in_type
from tilewright.codegen.interpreter import run
from tilewright.hardware import machine
from tilewright.hardware.calibration import UNCONFIRMED_VARIANTS, gpu_variants
from tilewright.ir.dtypes import ELEMENT_TYPES
from tilewright.ir.kernel import Invoke, Kernel, statements
from tilewright.ir.region import Program
from tilewright.kernels.columns import length
from tilewright.kernels.gpu.counts import LaunchCounts
from tilewright.kernels.gpu.warpgroup.schema import WARPGROUP
from tilewright.kernels.gpu.warpgroup.space import WarpgroupSchedule
from tilewright.kernels.schema import USUAL
from tilewright.selection.choice import rank
from tilewright.selection.ranking import Choice, variants_of
from tilewright.selection.variants import VARIED, believed, shares_of, with_variants
from tilewright.tuning.problems import convolution_problem
from tilewright.tuning.workloads import Convolution, numerics_of, problem_of

H200, A100 = machine("h200"), machine("a100")

MEETING = (
    WarpgroupSchedule(32, 1, 2, split=2, meeting=1),
    WarpgroupSchedule(96, 2, 3, split=4, meeting=1),
    WarpgroupSchedule(16, 1, 4, swapped=1, split=2, meeting=1),
    WarpgroupSchedule(48, 2, 2, swapped=1, split=8, meeting=1),
)
"""Blocks of a split that are a cluster: each size, both orders of the factors, one consumer and two, equal shares and others."""


def deep(dtype: torch.dtype) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A convolution with 15 steps of 128 bytes."""
    torch.manual_seed(0)
    channels = 320 * 2 // dtype.itemsize
    layers = nn.Sequential(nn.Conv2d(16, channels, 1), nn.Conv2d(channels, 72, (1, 3), padding=1), nn.Hardswish()).to(dtype)
    return layers, (torch.randn(2, 16, 3, 7).to(dtype),)


def meeting(program: Program, split: int) -> Kernel:
    """The last region's only kernel, whose clusters are the blocks of a split."""
    (kernel,) = program.regions[-1].kernels
    assert kernel.cluster == split
    return kernel


@pytest.mark.in_turns(2)
@EACH_TYPE
@pytest.mark.parametrize("schedule", MEETING, ids=str)
def test_parts_that_meet(schedule: WarpgroupSchedule, dtype: torch.dtype) -> None:
    module, inputs = deep(dtype)
    program = program_of(module, inputs, schedule, [])
    meeting(program, schedule.split)
    check(module, inputs, program)
    compiles(program)


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("schedule", MEETING[1:3], ids=str)
def test_parts_that_meet_in_tf32(schedule: WarpgroupSchedule) -> None:
    module, inputs = deep(torch.float32)
    program = program_of(module, inputs, schedule, [], TF32)
    meeting(program, schedule.split)
    check_tf32(module, inputs, program)
    compiles(program)


@pytest.mark.in_turns(1)
@EACH_TYPE
def test_parts_of_groups_that_meet(dtype: torch.dtype) -> None:
    module, inputs = made_of(LAYERS["groups"], dtype)
    program = program_of(module, inputs, MEETING[0], [])
    meeting(program, MEETING[0].split)
    check(module, inputs, program)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    "left_out, position, found", [("cluster barrier", 0, "race"), ("cluster barrier", -1, "may have ended"), ("wait of a warpgroup", 0, "race")]
)
def test_what_is_left_out_where_parts_meet_is_reported(left_out: str, position: int, found: str) -> None:
    """The meetings before parts are added and at the end, and the wait for a tile."""
    module, inputs = deep(torch.float16)
    kernel = meeting(program_of(module, inputs, MEETING[0], []), 2)
    of_it = [s for s in statements(kernel.body) if isinstance(s, Invoke) and left_out in s.intrinsic.name]
    arrays = [np.zeros(buffer.size, ELEMENT_TYPES[buffer.dtype].array) for buffer in kernel.parameters]
    assert not run(kernel, arrays).faults
    faults = run(replace(kernel, body=without(kernel.body, lambda s: s is of_it[position])), arrays).faults
    assert any(found in fault for fault in faults), faults


@settings(max_examples=draws(12), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(seed=st.integers(0, 2**31), dtype=st.sampled_from(TYPES))
def test_any_candidate_whose_parts_meet_is_as_good_as_pytorch(seed: int, dtype: torch.dtype) -> None:
    random = Random(seed)
    channels, outputs, taps = random.choice((128, 200, 256)), random.choice((5, 24, 80)), random.choice((1, 2, 4))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        last = nn.Conv2d(channels, outputs, (taps, 2), stride=random.choice((1, 2)), padding=random.choice((0, 1)))
        module: nn.Module = nn.Sequential(nn.Conv2d(8, channels, 1), last, nn.SiLU())
        inputs: tuple[torch.Tensor, ...] = (torch.randn(random.choice((1, 3)), 8, random.choice((6, 9)), random.choice((5, 8))),)
        if random.random() < 0.4:
            width = random.choice((320, 512, 640))
            module, inputs = nn.Sequential(nn.Linear(width, outputs), nn.SiLU()), (torch.randn(random.choice((1, 17, 150)), width),)
    module, inputs = module.to(dtype).eval(), in_type(inputs, dtype)
    used: list[WarpgroupSchedule] = []
    program = program_of(module, inputs, random.randrange, used, axis="meeting")
    assert used[-1].meeting
    meeting(program, used[-1].split)
    check(module, inputs, program)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("precision", ["fp16", "tf32"])
@pytest.mark.parametrize("target", ["h100", "h200"])
def test_parts_meet_where_measurements_confirmed_it(target: str, precision: str) -> None:
    """By predictions where the GPU's constants say so; without them directly behind what they vary, where only trials reach them."""
    on, seen, chosen = machine(target), 0, 0
    for outputs, channels, size in ((256, 256, 14), (512, 512, 7), (320, 200, 9)):
        problem = convolution_problem(outputs, channels, size, size, 3)
        values = {name: replace(value, dtype="f16" if precision == "fp16" else "f32") for name, value in problem.values.items()}
        ranking = rank(replace(problem, values=values), on, numerics=USUAL.at(precision))
        chosen += getattr(ranking.first().schedule, "meeting", 0)
        bare = replace(ranking, parts=tuple(part for part in ranking.parts if "meeting" not in part.candidates))
        bare = replace(bare, predicted=ranking.seconds[: bare.candidates])
        unconfirmed = list(islice(with_variants(bare, UNCONFIRMED_VARIANTS), 2 * VARIED))
        assert not getattr(unconfirmed[0].schedule, "meeting", 0) and ranking.first().seconds <= unconfirmed[0].seconds
        for before, choice in pairwise(unconfirmed):
            if getattr(choice.schedule, "meeting", 0):
                assert before.schedule == replace(choice.schedule, meeting=0) and before.seconds == choice.seconds
                seen += 1
    assert seen >= 2 and chosen


def test_predictions_choose_parts_that_meet_on_an_h200() -> None:
    workload = Convolution(1, 256, 256, (14, 14), (3, 3), then="relu", precision="fp16")
    problem, numerics = problem_of(workload), numerics_of(workload)
    ranking = rank(problem, H200, numerics=numerics)
    first = ranking.first()
    assert isinstance(first.schedule, WarpgroupSchedule) and first.schedule.meeting
    apart = next(choice for choice in ranking if choice.schedule == replace(first.schedule, meeting=0))
    analytical = {choice.schedule: sum_of(choice) for choice in (first, apart)}
    confirmed = gpu_variants(H200)
    assert confirmed is not None and 0 < confirmed.meeting < 1
    ratio = analytical[first.schedule] / analytical[apart.schedule]
    assert first.seconds == pytest.approx(apart.seconds * ratio**confirmed.meeting)
    assert gpu_variants(A100) is None
    assert not any(getattr(choice.schedule, "meeting", 0) for choice in islice(rank(problem, A100, numerics=numerics), 200))


def sum_of(choice: Choice) -> float:
    """Analytical seconds of a candidate."""
    terms = {name: value for name, value in choice.terms.items() if name != "learned correction"}
    return max(terms.pop("compute"), terms.pop("memory")) + sum(terms.values())


def test_parts_that_meet_alone_on_a_processor_are_not_predicted_to_gain() -> None:
    """A variant of which a processor holds one block takes the time of what it varies, however much formulas say that it gains."""
    problem = convolution_problem(512, 512, 14, 14, 3)
    ranking = rank(problem, H200, numerics=USUAL.at("tf32"), learned=False)
    number = next(number for number, part in enumerate(ranking.parts) if part.schema is WARPGROUP)
    found = variants_of(ranking.parts[number], np.arange(length(ranking.parts[number].candidates)), H200)
    assert found is not None
    variants, _, ratios = found
    assert isinstance(variants.counts, LaunchCounts)
    alone, meets = variants.counts.resident == 1, variants.candidates["meeting"] > 0
    gains = believed(variants, ratios)
    assert (
        (ratios[alone & meets] < 0.99).any()
        and (gains[alone & meets] == 0).all()
        and (gains[~alone & meets] == -np.log(ratios[~alone & meets])).all()
    )
    assert (shares_of(variants, replace(UNCONFIRMED_VARIANTS, meeting=0.5))[meets] == 0.5).all()
