"""Decisions about chains on a GPU: which predictions take, and how benchmarks draw, fit and judge them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from bench import gpu_chain_model, gpu_chains
from tests.stand_ins import merges_of
from tests.test_chains import chain_problem, conv, graph_of, inverted
from tests.test_gpu_chains import H200
from tilewright.hardware import machine
from tilewright.ir.region import Unsuitable
from tilewright.partition.merges import CHAIN, WHOLE, Policy
from tilewright.partition.plan import chains_by_prediction, plan_program
from tilewright.partition.poolings import POOLING
from tilewright.partition.tile_cuts import cut_along, in_chunks
from tilewright.partition.tile_features import NAMES
from tilewright.partition.tile_judge import TileParts, Tiles
from tilewright.partition.tile_kernel import TileSchedule


def test_chains_are_planned_where_they_are_asked_for() -> None:
    graph = graph_of(inverted(16, 96), torch.randn(1, 16, 56, 56))
    for asked, expected in ((None, False), (False, False), (True, True)):
        program = plan_program(graph, machine(H200), 1, chains=asked)
        assert bool(merges_of(program)) == expected
    assert all("us apart" in str(merge) or "cannot" in str(merge) for merge in merges_of(program))


@pytest.mark.parametrize(
    "half, target, expected",
    [(True, "h200", True), (True, "h100", True), (False, "h200", False), (True, "rtx4090", False)],
    ids=["16 bits", "of the same chip", "float32", "not fitted"],
)
def test_predictions_take_chains_of_the_type_that_their_constants_were_fitted_to(half: bool, target: str, expected: bool) -> None:
    dtype = torch.float16 if half else torch.float32
    graph = graph_of(inverted(16, 96).to(dtype), torch.randn(1, 16, 56, 56).to(dtype))
    found = merges_of(plan_program(graph, machine(target), 1))
    assert any(decision.kind == CHAIN and decision.taken for decision in found) == expected


class Scaled(nn.Module):
    """An average of products with a constant that is the same for all of its terms."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(96, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.avg_pool2d(torch.relu(x * self.scale), 3, 1, 1)


LAST = {"mean": nn.AdaptiveAvgPool2d(1), "largest": nn.MaxPool2d(3, 1, 1), "average": nn.AvgPool2d(3, 1, 1), "scaled": Scaled()}


@pytest.mark.parametrize("name", LAST)
def test_predictions_take_no_chains_of_regions_to_which_no_constants_were_fitted(name: str) -> None:
    """The random chains have convolutions alone; a chain with another region is predicted where it is asked for."""
    layers = nn.Sequential(conv(16, 96), conv(96, 96, 3, 1, 1, 96), LAST[name]).half()
    graph = graph_of(layers, torch.randn(1, 16, 14, 14).half())
    asked, default = (
        [decision for decision in merges_of(plan_program(graph, machine(H200), 1, chains=chains)) if decision.kind == CHAIN]
        for chains in (True, None)
    )
    assert any(decision.results[-1] == graph.outputs[0] for decision in asked)
    assert default and not any(decision.results[-1] == graph.outputs[0] for decision in default)


def test_predictions_take_no_chains_whose_regions_take_long() -> None:
    """None of the random chains of 7 us and more was faster as one kernel; chains that may not be taken are not considered."""
    found = []
    for extent in (14, 224):
        graph = graph_of(inverted(16, 96).half(), torch.randn(1, 16, extent, extent).half())
        found.append(len([decision for decision in merges_of(plan_program(graph, machine(H200), 1)) if decision.kind == CHAIN]))
    assert found[0] > 0 == found[1]


def test_chains_that_none_has_measured_are_predicted_to_be_explained() -> None:
    graph = graph_of(inverted(16, 96), torch.randn(1, 16, 56, 56))
    plan, predicted = (plan_program(graph, machine(H200), 1, chains=asked) for asked in (None, True))
    found = chains_by_prediction(plan.graph, machine(H200), plan.search)
    assert found == tuple(merges_of(predicted)) and any(decision.taken for decision in found)
    measured = next(decision for decision in found if decision.taken)
    assert [*chains_by_prediction(plan.graph, machine(H200), (measured,))] == [decision for decision in found if decision != measured]


def test_decisions_that_trials_made_about_other_merges_are_no_chains() -> None:
    """They say something else than predictions do, such as which layouts or poolings were measured."""

    class Pooled(Policy):
        def about(self, kind: str, results: tuple[str, ...]) -> bool | None:
            return kind == POOLING or None

    graph = graph_of(nn.Sequential(conv(16, 32, 3, 1, 1), nn.MaxPool2d(2), conv(32, 16)).half(), torch.randn(1, 16, 16, 16).half())
    search = plan_program(graph, machine(H200), 1, policy=Pooled()).search
    assert [decision.kind for decision in search if decision.text.endswith(WHOLE)] == [POOLING]
    found = chains_by_prediction(graph, machine(H200), search)
    assert found and not any("pooled" in decision.text for decision in found)


def test_constants_are_those_whose_decisions_take_least() -> None:
    """The faster of two kernels by prediction is compared with separate ones."""

    def row(apart: float, **ways: tuple[float, float]) -> dict[str, Any]:
        told = {name: {"parts": vars(TileParts(0.0, 0.0, parts, 3))} for name, (parts, _) in ways.items()}
        seconds = {"separate": 10e-6, **{name: seconds for name, (_, seconds) in ways.items()}}
        return {"predicted": {"apart": apart, "ways": told}, "seconds": seconds, "programs": seconds}

    rows = [
        row(10e-6, whole=(12e-6, 20e-6), chunks=(6e-6, 9e-6)),  # merged only where predictions are scaled by less than 1.67
        row(10e-6, whole=(8e-6, 12e-6), chunks=(20e-6, 30e-6)),  # separate only where they are scaled by 1.25 or more
        {"chain": "impossible", "predicted": {"apart": 1.0, "ways": {}}},
    ]
    constants, mean = gpu_chains.fitted(rows, 1e9)
    assert 1.2 < constants.work < 1.67 and mean == pytest.approx(0.9**0.5)


def tiles_with(seconds: float, rows: int, chunk: int = 0) -> Tiles:
    return Tiles(TileSchedule((rows,), 64, 1, chunk), seconds, TileParts(0.0, 0.0, seconds, 1))


def test_drawn_tiles_are_others_than_the_first_of_each_way() -> None:
    found = [tiles_with(1.0, 1), tiles_with(1.5, 2), tiles_with(1.6, 3, 16), tiles_with(1.9, 4), tiles_with(1.95, 5, 16), tiles_with(2.5, 6)]
    links = gpu_chains.WIDE["ConvNeXt-T 1"]

    def way(name: str) -> list[Tiles]:
        return gpu_chains.with_way(found, name, links)

    assert way("separate") == found and way("whole") == [found[0], found[1], found[3], found[5]] and way("chunks") == [found[2], found[4]]
    drawn = [way(f"tiles {number}") for number in (1, 2, 3)]
    assert sorted(tiles.seconds for (tiles,) in drawn) == [1.5, 1.9, 1.95]  # neither the first of a way nor more than twice the fastest
    for name in ("exchanged", "tiles 4"):
        with pytest.raises(Unsuitable, match=f"no tiles for {name}"):
            way(name)


def test_a_decision_is_judged_by_the_times_of_programs() -> None:
    row = {"predicted": {"apart": 5e-6}, "programs": {"separate": 10e-6, "whole": 9e-6, "tiles 1": 8e-6}}
    chain = gpu_chain_model.Measured(row, ("whole", "tiles 1"), np.zeros((2, len(NAMES))))
    assert chain.seconds == pytest.approx([4e-6, 3e-6]) and chain.formulas == pytest.approx([1.0, 1.0])
    wrong = chain.judged(np.array([4e-6, 4.5e-6]), 7e-6)
    assert wrong == {"loss": pytest.approx(1 / 8), "taken": True, "ratio": pytest.approx(0.9)}
    for predicted, longest in ((4.95e-6, 7e-6), (4e-6, 5e-6)):  # gains too little; too long
        assert not chain.judged(np.array([9e-6, predicted]), longest)["taken"]


def test_wide_random_chains_can_be_cut_into_chunks() -> None:
    drawn = list(gpu_chains.drawn_wide(1, 6))
    assert drawn == list(gpu_chains.drawn_wide(1, 6)) and not set(drawn) & set(gpu_chains.WIDE.values())
    for links in (*drawn, *gpu_chains.WIDE.values()):
        layers = list(links.module().children())[1:-1]
        problem = chain_problem(nn.Sequential(*layers), torch.empty(links.batch, links.channels, links.extent, links.extent))
        assert in_chunks(problem, cut_along(problem))
