"""Spaces of products by warpgroups and over patches: their candidates and variants, what is counted and estimated of them, and what they do not suit."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.draws import draws
from tests.test_gpu_half import planned
from tests.test_gpu_warpgroup import A100, FEW, H200, TF32
from tilewright.codegen.cuda import shared_bytes
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.columns import Columns, length, row, take
from tilewright.kernels.gpu.tensor_cores.schema import TENSOR_CORES
from tilewright.kernels.gpu.warpgroup.schema import WARPGROUP
from tilewright.kernels.gpu.warpgroup.space import WarpgroupSchedule, at_once_of, blocks_of, shared_bytes_of
from tilewright.kernels.gpu.warpgroup_patch.schema import WARPGROUP_PATCH
from tilewright.kernels.schema import AnySchema, Options, form_of
from tilewright.partition.judges import lower
from tilewright.selection.choice import choose
from tilewright.selection.ranking import Choice
from tilewright.tuning.problems import convolution_problem


@pytest.mark.parametrize("target", [FEW, H200], ids=["few processors", "h200"])
def test_candidates(target: Machine) -> None:
    """Clusters of two where there are blocks enough for all processors; sums through shared memory, and tiles in turns, without a split."""
    form = form_of(WARPGROUP, convolution_problem(64, 64, 28, 28, 3, batch=16), target)
    assert not isinstance(form, Unsuitable), form
    candidates, _ = WARPGROUP.space(form.facts, target, Options(numerics=TF32))
    assert set(candidates["cluster"].tolist()) == {1, 2}
    assert (blocks_of(form.facts, candidates)[candidates["cluster"] > 1] >= target.processors).all()
    for name in ("staged", "persistent"):
        assert set(candidates[name].tolist()) == {0, 1} and (candidates["split"][candidates[name] > 0] == 1).all()
    assert "meeting" not in candidates
    assert WARPGROUP.variants is not None
    meet, origins = WARPGROUP.variants(form.facts, candidates, target)
    assert set(meet["split"].tolist()) <= {2, 4, 8} and set(meet["cluster"].tolist()) == {1} and (meet["meeting"] == 1).all()
    assert all((take(candidates, origins)[name] == meet[name]).all() for name in candidates)
    assert (shared_bytes_of(form.facts, meet) <= target.shared_bytes_per_block).all()
    several = candidates["persistent"] > 0
    assert (blocks_of(form.facts, candidates)[several] > at_once_of(form.facts, candidates, target)[several]).all()
    assert (shared_bytes_of(form.facts, candidates) <= target.shared_bytes_per_block).all()


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("schema", [WARPGROUP, WARPGROUP_PATCH, TENSOR_CORES], ids=lambda schema: schema.name)
@settings(max_examples=draws(12), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(seed=st.integers(0, 2**31))
def test_kernels_have_the_shared_memory_that_is_counted(schema: AnySchema, dtype: str, seed: int) -> None:
    """As they are launched, of any candidate or variant: the count of warpgroups is above by what aligns their buffers, and by stages of which the
    few tiles of persistent blocks have no steps. Sums of `mma.sync` on their way have the places of the tiles."""
    random = Random(seed)
    channels, size = random.choice((64, 128, 512)), random.choice((7, 17, 34, 68))
    problem = convolution_problem(random.choice((32, 128, 256)), channels, size, size, random.choice((2, 3)))
    problem = replace(problem, values={name: replace(value, dtype=dtype) for name, value in problem.values.items()})
    form = form_of(schema, problem, H200)
    assert not isinstance(form, Unsuitable), form
    candidates: Columns = schema.space(form.facts, H200, Options(numerics=TF32))[0]
    if schema.variants is not None and random.random() < 0.4:
        candidates = schema.variants(form.facts, candidates, H200)[0]
    kind = random.choice(("any", "staged", "largest"))
    counted = schema.counts(form.facts, candidates, H200).shared_bytes
    possible = np.flatnonzero({"any": counted > 0, "staged": candidates["staged"] > 0, "largest": counted > 0.8 * counted.max(initial=0)}[kind])
    for at in random.sample(possible.tolist(), min(2, len(possible))):
        schedule = schema.schedule_of(row(candidates, at), H200)
        kernel = lower(problem, schedule, H200).kernels[0]
        least = counted[at] if schema is TENSOR_CORES else 0 if schedule.persistent else counted[at] - 2 * 1024
        assert least <= shared_bytes(kernel) <= counted[at] <= H200.shared_bytes_per_block, schedule


def test_parts_of_a_split_are_not_staged() -> None:
    problem = convolution_problem(64, 64, 28, 28, 3)
    form = form_of(WARPGROUP, problem, H200)
    assert not isinstance(form, Unsuitable), form
    with pytest.raises(Unsuitable, match="parts of a split"):
        WARPGROUP.lower(problem, form, WarpgroupSchedule(32, 1, 2, split=2, staged=1), H200)
    with pytest.raises(Unsuitable, match="have no tile in common"):
        WARPGROUP.lower(problem, form, WarpgroupSchedule(32, 1, 2, split=2, cluster=2, meeting=1), H200)


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("schema", [WARPGROUP, WARPGROUP_PATCH], ids=lambda schema: schema.name)
def test_estimates_are_above_the_bounds(schema: AnySchema, batch: int) -> None:
    problem = convolution_problem(128, 64, 28, 28, 3, batch=batch)
    form = form_of(schema, problem, H200)
    assert not isinstance(form, Unsuitable), form
    assert schema.space(form.facts, H200, Options())[1] == {"float32 may not be rounded to TF32": 1}
    options = Options(numerics=TF32)
    candidates, rejected = schema.space(form.facts, H200, options)
    assert length(candidates) > 20 and rejected
    counts = schema.counts(form.facts, candidates, H200)
    assert schema.bound is not None
    bound = schema.bound(form.facts, candidates, counts, H200, 1.0).seconds
    seconds = schema.estimate(form.facts, candidates, counts, H200, options).seconds
    assert (bound > 0).all() and (bound < seconds).all() and seconds.max() < 0.1
    assert (counts.level2_bytes >= counts.read_bytes).all()


def reason(module: nn.Module, inputs: tuple[torch.Tensor, ...], target: Machine = H200, schema: AnySchema = WARPGROUP) -> str:
    """Why the schema does not suit the last region."""
    found: list[str] = []

    def chooser(problem: Problem, machine: Machine, threads: int) -> Choice:
        if problem.region.kind == "contraction":
            form = form_of(schema, problem, machine)
            found.append(str(form) if isinstance(form, Unsuitable) else "")
        return choose(problem, machine, threads)

    planned(module, inputs, target, chooser)
    return found[-1]


def test_reasons() -> None:
    def convolution(channels: int, groups: int = 1) -> nn.Module:
        return nn.Sequential(nn.Conv2d(16, channels, 1), nn.Conv2d(channels, 32, 3, groups=groups)).half()

    x = torch.randn(2, 16, 9, 8).half()
    assert "has no wgmma" in reason(nn.Linear(64, 32).half(), (torch.randn(5, 64).half(),), A100)
    assert "innermost dimension is not one that is reduced" in reason(convolution(16, 16), (x,))
    assert "the channels of a group are not whole 32 bytes" in reason(convolution(16, 2), (x,))
    assert "no multiples of 16 bytes" in reason(convolution(12), (x,))
    far = nn.Sequential(nn.Conv3d(16, 16, 1), nn.Conv3d(16, 8, (1, 1, 2), dilation=31)).half()
    assert "further than 30 pixels" in reason(far, (torch.randn(2, 16, 2, 2, 40).half(),))
    assert reason(convolution(16), (x,)) == ""
