"""Row reductions that run on the tiles of the contraction they reduce: which join, and results of compiled programs."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiled import Case, check_native
from tests.draws import IN_THIRDS
from tests.interpreted import check_interpreted
from tests.operator_cases import Applied, after
from tilewright.compile import read
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.ir.region import Program, Region
from tilewright.partition.plan import plan_program


def scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.3, -1)


def masked(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / 4 + mask, -1)


def excluded(q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
    return torch.softmax((q @ k.transpose(-1, -2)).masked_fill(allowed < 0, float("-inf")), -1)


def cases() -> list[Case]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape)

    rows: list[Case] = []
    for count in (2, 7, 10, 16, 17, 33, 48, 65, 150):
        rows.append(Case(f"softmax of {count}", Applied(after(lambda y: torch.softmax(y, -1)), nn.Linear(24, count)), (normal(19, 24),)))
    log = after(lambda y: F.log_softmax(y, -1))
    rows += [
        Case("log softmax", Applied(log, nn.Linear(84, 10)), (normal(5, 84),)),
        Case("one row", Applied(log, nn.Linear(84, 10)), (normal(1, 84),)),
        Case("layer norm", Applied(lambda p, n, x: n(p(x)), nn.Linear(40, 29), nn.LayerNorm(29)), (normal(3, 11, 40),)),
        Case("norm of a residual", Applied(lambda p, n, x, y: n(p(x) + y), nn.Linear(40, 32), nn.LayerNorm(32)), (normal(9, 40), normal(9, 32))),
        Case("activation before", Applied(after(lambda y: torch.softmax(F.gelu(y), -1)), nn.Linear(20, 12)), (normal(6, 20),)),
        Case("activation after", Applied(after(lambda y: torch.softmax(y, -1).sqrt() + 1), nn.Linear(20, 12)), (normal(6, 20),)),
        Case("greatest", Applied(after(lambda y: y.amax(-1)), nn.Linear(20, 12)), (normal(6, 20),)),
        Case("mean", Applied(after(lambda y: y.mean(-1, keepdim=True) * 2), nn.Linear(20, 12)), (normal(6, 20),)),
        Case("to bool", Applied(after(lambda y: torch.softmax(y, -1) > 0.1), nn.Linear(20, 12)), (normal(6, 20),)),
        Case("channels of pixels", Applied(after(lambda y: torch.softmax(y, 1)), nn.Conv2d(5, 11, 3, padding=1)), (normal(2, 5, 9, 13),)),
        Case("several heads", Applied(scores), (normal(2, 3, 13, 8), normal(2, 3, 21, 8))),
        Case("additive mask", Applied(masked), (normal(2, 3, 13, 8), normal(2, 3, 37, 8), normal(2, 1, 13, 37))),
        Case("boolean mask", Applied(excluded), (normal(4, 18, 8), normal(4, 18, 8), normal(18, 18) + torch.eye(18) * 9), fixed=True),
    ]
    return rows


JOINING = {case.name: case for case in cases()}
APART = {
    "long": Case("long", Applied(after(lambda y: torch.softmax(y, -1)), nn.Linear(8, 3072)), (torch.randn(4, 8),)),
    "read twice": Case("read twice", Applied(after(lambda y: torch.softmax(y, -1) * y), nn.Linear(8, 20)), (torch.randn(64, 8),)),
    "other axis": Case("other axis", Applied(after(lambda y: torch.softmax(y, 0)), nn.Linear(8, 20)), (torch.randn(64, 8),)),
    "best index": Case("best index", Applied(after(lambda y: y.argmax(-1)), nn.Linear(8, 20)), (torch.randn(64, 8),)),
    "groups": Case("groups", Applied(after(lambda y: torch.softmax(y, 1)), nn.Conv2d(4, 12, 3, groups=2)), (torch.randn(1, 4, 9, 9),)),
    "regrouped": Case(
        "regrouped", Applied(after(lambda y: torch.softmax(y.reshape(8, 8, 20), -1)), nn.Linear(8, 20)), (torch.randn(64, 8),)
    ),
}  # fmt: skip
TIME = r"([\d.]+) [mu]s"
WHY = {
    "long": "a row of 3072 does not fit one tile",
    "read twice": "is also read by",
    "other axis": "reduces 64 pixels",
    "best index": "a tile does not reduce with argmax",
    "groups": "stored in another order",
    "regrouped": "row by row",
}


def planned(case: Case, target: str = "xeon-8124m") -> Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph, _ = simplify(read(case.module.eval(), case.inputs).graph)
    return plan_program(graph, machine(target), 1)


def joined(regions: list[Region]) -> list[Region]:
    return [region for region in regions if region.kind == "contraction" and any(step.kind == "reduce" for step in region.steps[1:])]


@pytest.mark.parametrize("name", JOINING)
def test_one_kernel_computes_product_and_rows(name: str) -> None:
    regions = [lowered.region for lowered in planned(JOINING[name]).regions]
    (region,) = joined(regions)
    assert not any(other.kind in ("row reduction", "window") for other in regions)
    assert any("one tile owns the row of" in reason for reason in region.reasons)


@pytest.mark.parametrize("name", APART)
def test_what_does_not_join_says_why(name: str) -> None:
    regions = [lowered.region for lowered in planned(APART[name]).regions]
    assert not joined(regions)
    assert any("not joined" in reason and WHY[name] in reason for region in regions for reason in region.reasons)


def test_a_tile_holds_whole_rows() -> None:
    for name in ("softmax of 48", "additive mask"):
        (lowered,) = [part for part in planned(JOINING[name]).regions if joined([part.region])]
        extent = next(step.reduction[0].extent for step in lowered.region.steps[1:] if step.combiner)
        assert extent is not None
        vectors, lanes = lowered.schedule.split(" by ")[1].split(" channels")[0].split("x")
        assert int(vectors) * int(lanes) >= extent
        assert "row reductions" in lowered.terms


@pytest.mark.parametrize(("target", "rows", "columns"), [("x86-avx2", 600, 1024), ("h200", 1, 84)])
def test_a_machine_that_gains_nothing_keeps_rows_apart(target: str, rows: int, columns: int) -> None:
    case = Case("wide", Applied(after(lambda y: F.log_softmax(y, -1)), nn.Linear(columns, 29)), (torch.randn(rows, columns),))
    program = planned(case, target)
    regions = [lowered.region for lowered in program.regions]
    assert not joined(regions)
    assert any("a row of 29 fits one" in text for region in regions for text in region.reasons)
    (decision,) = [decision for decision in program.search if "a row of 29" in decision.text]  # others are about chains
    assert not decision.taken and re.search(f"{TIME} predicted in one kernel, {TIME} with a stored result", decision.text)


@pytest.mark.parametrize("target", ["x86-avx2", "h200"])
def test_joins_are_in_the_search_with_both_times(target: str) -> None:
    (decision,) = planned(JOINING["softmax of 48"], target).search
    assert decision.taken and decision.results[-1] == "softmax"
    times = re.search(f"{TIME} predicted in one kernel, {TIME} with a stored result", decision.text)
    assert times is not None and float(times[1]) < float(times[2]), decision.text


def test_blocks_hold_whole_rows_and_do_not_split_the_sum() -> None:
    region = planned(JOINING["additive mask"], "h200").regions[0]
    assert joined([region.region]) and "split=1" in region.schedule and "rows" in region.terms
    assert int(region.schedule.split("block=")[1].split("x")[1]) >= 37
    regions = [lowered.region for lowered in planned(JOINING["softmax of 150"], "h200").regions]
    assert any("a block would hold a part of a row" in text for other in regions for text in other.reasons)


@IN_THIRDS
def test_interpreted_blocks(third: int) -> None:
    check_interpreted([*JOINING.values()][third::3], machine("h200"))


@IN_THIRDS
def test_interpreted(third: int) -> None:
    check_interpreted([*JOINING.values()][third::3], machine("xeon-8124m"))


@IN_THIRDS
def test_compiled(third: int) -> None:
    check_native([*JOINING.values(), *APART.values()][third::3])
