"""What regions say of their stages, and what operators are predicted to take in one region and by themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tilewright
from tests.operator_cases import Applied, randomised
from tests.test_siblings import graph_of
from tilewright.cli import main
from tilewright.hardware import machine
from tilewright.ir.region import REGISTERS, TILE
from tilewright.ir.stage import MEMORY, Edge, Flow, Stage, flow_of
from tilewright.kernels.registry import lower
from tilewright.kernels.schema import Numerics
from tilewright.partition.plan import plan_program
from tilewright.partition.predictions import operators_apart
from tilewright.report.explanation import stage_lines
from tilewright.runtime import artifact
from tilewright.runtime.plan import PlanRow
from tilewright.selection.choice import rank
from tilewright.tuning.problems import convolution_problem

SEPARABLE = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU(), nn.Conv2d(16, 24, 1), nn.ReLU(), nn.Conv2d(24, 16, 3, padding=1))
IMAGE = torch.randn(1, 16, 56, 56)


def rows_of(module: nn.Module, image: torch.Tensor, target: str) -> tuple[PlanRow, ...]:
    return tilewright.compile(randomised(module).eval(), (image,), target, threads=1).plan.rows


def test_operators_of_one_kernel_are_one_stage() -> None:
    (row,) = [row for row in rows_of(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), torch.randn(8, 64), "h200") if row.kernels]
    assert row.flow == Flow((Stage(("linear", "add", "relu")),))
    assert list(stage_lines(row)) == ["linear > add > relu in registers"]


def test_chains_pass_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.partition.merges.LEAST_GAIN", -1e9)
    chain = next(row for row in rows_of(SEPARABLE, IMAGE, "x86-avx512") if row.kind == "chain")
    assert len(chain.flow.edges) == len(chain.flow.stages) - 1 > 0 and chain.flow.is_path
    assert all(edge.level == TILE and edge.bytes >= 4 * 16 * 56 * 56 for edge in chain.flow.edges)
    assert list(stage_lines(chain))[0].endswith("through tiles on the chip")
    assert sum(len(stage.what) for stage in chain.flow.stages) == len(chain.nodes)


def test_kernels_of_one_region_pass_workspaces(tmp_path: Path) -> None:
    """Winograd's transforms; also in an artifact."""
    module, image = nn.Conv2d(256, 256, 3, padding=1), torch.randn(1, 256, 56, 56)
    executable = tilewright.compile(module, (image,), "h200")
    row = next(row for row in executable.plan.rows if len(row.kernels) == 3)
    assert [stage.what for stage in row.flow.stages] == [("winograd_input",), ("contraction",), ("winograd_output",)]
    assert [(edge.producer, edge.consumer, edge.level) for edge in row.flow.edges] == [(0, 1, MEMORY), (1, 2, MEMORY)]
    assert all(edge.bytes > 4 * image.numel() for edge in row.flow.edges)
    executable.save(tmp_path / "one.tw")
    loaded = artifact.read(tmp_path / "one.tw")
    assert [region.flow for region in loaded.program.regions] == [row.flow for row in executable.plan.rows]


@pytest.mark.parametrize("target", ["h200", "x86-avx2"])
def test_winograd_in_one_kernel_passes_tiles(target: str) -> None:
    """Its transforms leave their results in shared memory, or in the cache of a thread; the direct kernels pass sums to the epilogue in registers."""
    problem = convolution_problem(32, 32, 14, 14, 3)
    ranking = rank(problem, machine(target))
    ranked = [ranking.choice(place) for place in np.argsort(ranking.seconds)]
    for transforms, within in ((True, TILE), (False, REGISTERS)):
        made = (lower(problem, choice.schedule, machine(target)) for choice in ranked if choice.schema.transforms == transforms)
        (stage,) = flow_of(next(lowered for lowered in made if len(lowered.kernels) == 1)).stages
        assert stage.within == within


SOFTMAX = nn.Sequential(nn.Linear(24, 48), nn.Softmax(-1))


@pytest.mark.parametrize("target, within", [("h200", "tiles on the chip"), ("x86-avx2", "registers")])
def test_rows_pass_what_their_kernel_holds_them_in(target: str, within: str) -> None:
    """A block of a GPU spills a product's rows to shared memory; a register tile holds them on a CPU."""
    (row,) = [row for row in rows_of(SOFTMAX, torch.randn(19, 24), target) if row.kernels]
    assert list(stage_lines(row)) == [f"linear > add > softmax in {within}"]


@pytest.mark.parametrize("dtype, within", [(torch.float32, TILE), (torch.float16, REGISTERS)])
def test_attention_passes_its_weights_where_its_schema_says(dtype: torch.dtype, within: str) -> None:
    """On CUDA cores in shared memory, on tensor cores in the fragments of the next product."""
    tokens = torch.randn(64, 128, 64, dtype=dtype)  # so many that keys are not divided
    graph = graph_of(Applied(lambda x: F.scaled_dot_product_attention(x, x, x)), tokens)
    (lowered,) = [lowered for lowered in plan_program(graph, machine("h200"), 1).regions if lowered.region.kind == "attention"]
    assert [stage.within for stage in flow_of(lowered).stages] == [within]


def test_what_pytorch_runs_has_no_stages() -> None:
    with pytest.warns(UserWarning, match="through PyTorch"):
        rows = rows_of(Applied(lambda x: torch.cummax(x, 0)[0] + 1), torch.randn(4, 4), "h200")
    assert any(row.kind == "torch" and not row.flow.stages for row in rows)


def test_operators_by_themselves_take_longer() -> None:
    graph, target = graph_of(SEPARABLE, IMAGE), machine("h200")
    apart = operators_apart(graph, target, 1)
    program = plan_program(graph, target, 1)
    regions = [lowered for lowered in program.regions if len(lowered.region.nodes) > 1]
    assert len(regions) == 3
    for lowered in regions:
        alone = [apart[node.name] for node in lowered.region.nodes]
        assert len(alone) > 1 and min(alone) > 0 and lowered.predicted_seconds < sum(alone)


def test_both_times_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a model; an artifact does not know the precision that it was planned for."""
    assert main(["explain", "zoo:lenet5", "--target", "h200", "--precision", "tf32", "--fusion"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(" that no trial measured and predictions do not decide about; they would take " in line for line in lines)
    start = lines.index("operators in one region, as planned, and each by itself:")
    assert len(lines[start + 1 :]) >= 4 and all(" us predicted, " in line and line.endswith(" us apart") for line in lines[start + 1 :])
    tilewright.compile(randomised(SEPARABLE).eval(), (IMAGE,), "h200", precision="tf32").save(tmp_path / "one.tw")
    assert main(["explain", str(tmp_path / "one.tw"), "--fusion"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("is predicted for models, not for artifacts")


def test_a_result_that_another_kernel_prepares_is_passed() -> None:
    problem = convolution_problem(256, 64, 7, 7, 1)
    ranking = rank(problem, machine("h200"), numerics=Numerics(atomics=True))
    schedules = (ranking.choice(place).schedule for place in range(ranking.candidates))
    schedule = next(schedule for schedule in schedules if getattr(schedule, "atomics", 0) and schedule.split > 1)
    flow = flow_of(lower(problem, schedule, machine("h200")))
    assert len(flow.stages) == 2 and flow.edges == (Edge(0, 1, MEMORY, 4 * 256 * 7 * 7),)
