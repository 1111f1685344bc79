"""Plans: what they say of each region, as data and as text of a given width, and what a choice was made from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tilewright
from tilewright.compile import read
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.ir.problem import Problem
from tilewright.kernels.registry import schemas
from tilewright.kernels.schema import Numerics
from tilewright.report.explanation import candidate_lines, explanation, term_lines
from tilewright.runtime import artifact
from tilewright.runtime.plan import Plan, PlanRow
from tilewright.runtime.plan_text import plan_text, summary_lines
from tilewright.selection.bounds import ARITHMETIC
from tilewright.selection.choice import choose, rank
from tilewright.text import aligned
from tilewright.tuning.tuning import distinct_problems

X86 = "x86-avx512"
INPUT = torch.randn(1, 32, 28, 28)


def network() -> nn.Module:
    """A convolution that Winograd's algorithm suits too, pooling, and a linear layer."""
    return nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 14 * 14, 10))


@pytest.fixture(scope="module")
def executable() -> tilewright.Executable:
    return tilewright.compile(network(), (INPUT,), X86, threads=1)


def row_of(plan: Plan, operator: str = "convolution") -> PlanRow:
    return next(row for row in plan.rows if any(found == operator for _, found, _ in row.nodes))


@pytest.fixture(scope="module")
def problem() -> Problem:
    """The convolution."""
    graph, _ = simplify(read(network(), (INPUT,)).graph)
    return next(found for found in distinct_problems(graph, machine(X86), 1) if rank(found, machine(X86)).candidates > 1)


def test_every_schema_is_compared(problem: Problem) -> None:
    """Of each schema the best candidate, and the second of all, as the ranking has them."""
    ordered = list(rank(problem, machine(X86)))
    chosen = choose(problem, machine(X86))
    assert (chosen.comparison.schema, chosen.schedule) == (ordered[0].schema.name, ordered[0].schedule)
    best = {choice.schema.name: choice for choice in reversed(ordered)}
    assert set(best) == {"contraction", "winograd"}
    expected = {str(choice.schedule): choice.seconds for choice in (*best.values(), ordered[1]) if choice.schedule != chosen.schedule}
    others = chosen.comparison.others
    assert {other.schedule: other.predicted_seconds for other in others} == expected
    assert [other.predicted_seconds for other in others] == sorted(expected.values())
    assert chosen.comparison.unsuitable["amx"] == "x86-avx512 has no AMX for bfloat16"
    assert {*best, *chosen.comparison.unsuitable} == {schema.name for schema in schemas(machine(X86), "contraction")}
    direct = choose(problem, machine(X86), numerics=Numerics(winograd=False))
    assert direct.comparison.schema == "contraction" and "not allowed" in direct.comparison.unsuitable["winograd"]


def test_a_schema_without_a_feasible_candidate_says_why(problem: Problem) -> None:
    ranking = rank(problem, machine(X86))
    first, second = ranking.parts
    emptied = replace(
        ranking, parts=(first,), predicted=None, rejections={first.schema.name: {}, second.schema.name: {"too large": 3, "too small": 9}}
    )
    assert emptied.compared(emptied.first()).comparison.unsuitable[second.schema.name] == "no schedule is feasible: too small"


def test_the_limit_of_a_cpu_is_its_peak(executable: tilewright.Executable) -> None:
    """On one of its threads; Winograd's algorithm needs fewer products than the sums that it replaces."""
    facts, row = machine(X86), row_of(executable.plan)
    peak = facts.peak_flops["fp32"] / facts.processors
    direct = 2 * 32 * 32 * 9 * 28 * 28
    assert 0 < row.bounds[ARITHMETIC] <= direct / peak
    assert row.limit == (ARITHMETIC, row.bounds[ARITHMETIC]) and row.limit[1] < row.seconds
    assert row.bound_by in row.terms


def test_rows_say_what_is_measured() -> None:
    row = tilewright.compile(nn.Linear(8, 8), (torch.randn(2, 8),), X86, threads=1).plan.rows[-1]
    predicted = row.predicted_seconds
    assert row.seconds == predicted and not row.is_mispredicted
    for ratio, wrong in ((0.4, True), (0.6, False), (1.9, False), (2.1, True)):
        measured = replace(row, measured_seconds=ratio * predicted)
        assert measured.is_mispredicted is wrong and measured.seconds == ratio * predicted
    limited = replace(row, bounds=MappingProxyType({"near": 0.9 * predicted, "far": 0.1 * predicted, "above": 2 * predicted}))
    assert limited.limit == ("near", 0.9 * predicted)
    assert replace(limited, terms=MappingProxyType({})).bound_by == "near"


def test_profiled_times_replace_predictions(executable: tilewright.Executable) -> None:
    plan = executable.plan
    assert not plan.measured and sum(map(plan.share, plan.rows)) == pytest.approx(1)
    last = plan.rows[-1]
    times = {last.number: 3 * plan.predicted_seconds}
    profiled = plan.with_times(times)
    assert profiled.hottest(1) == profiled.measured and profiled.measured[0].number == last.number
    assert profiled.seconds == pytest.approx(4 * plan.predicted_seconds - last.predicted_seconds)
    text = plan_text(profiled)
    assert f"predicted wrong by more than 2 times: region {last.number}" in text and " !" in text and "measured" in text


def test_a_plan_is_plain_data(executable: tilewright.Executable) -> None:
    data = json.loads(json.dumps(executable.plan.data()))
    assert len(data["rows"]) == len(executable.plan.rows) and data["kernels"] == executable.plan.kernels
    row, own = row_of(executable.plan), next(row for row in data["rows"] if ["convolution"] in [node[1:2] for node in row["nodes"]])
    assert own["comparison"]["others"][0]["schedule"] == row.comparison.others[0].schedule
    assert own["share"] == executable.plan.share(row) and own["limit"] == list(row.limit) and own["work"]["flops"] == row.work.flops


def test_an_artifact_explains_the_same(executable: tilewright.Executable, tmp_path: Path) -> None:
    executable.save(tmp_path / "model.zip")
    image = artifact.read(tmp_path / "model.zip")
    assert explanation(image) == explanation(executable.image)
    assert tilewright.runtime.plan.plan_of(image.program, image.machine) == executable.plan


def test_the_choice_is_explained(executable: tilewright.Executable) -> None:
    row = row_of(executable.plan)
    head, chosen, *others = candidate_lines(row)
    assert (
        head.split() == ["schema", "schedule", "predicted", "loses", "by"] and chosen.startswith(row.comparison.schema) and chosen.endswith("chosen")
    )
    loss = 100 * ((row.comparison.others[0].predicted_seconds or 0) / row.predicted_seconds - 1)
    assert any(line.endswith(f"{loss:.1f} %") for line in others) and any(line.startswith("amx: ") for line in others)
    head, *terms = term_lines(row)
    assert head.split() == ["longest", "terms", "chosen", "runner-up"] and any(line.startswith(row.bound_by) for line in terms)
    text = explanation(executable.image)
    assert text.splitlines()[0].endswith("kernel calls") and "hottest: " in text and all(line in text for line in others)


def test_refused_merges_are_told_of_the_regions_that_stay_apart(executable: tilewright.Executable) -> None:
    plan = executable.plan
    refused = [decision for decision in plan.search if not decision.taken]
    assert refused
    for decision in refused:
        concerned = [row for row in plan.rows if set(row.outputs) & set(decision.results)]
        assert len(concerned) == 1 or all(decision.text in row.separate for row in concerned)


@pytest.mark.parametrize("width", [60, 80, 132, 200])
def test_no_line_is_wider_than_the_terminal(executable: tilewright.Executable, width: int) -> None:
    plan = executable.plan.with_times({row.number: 9 * row.predicted_seconds + 1e-6 for row in executable.plan.rows})
    for text in (plan_text(plan, "a model with a long name " * 9, width), "\n".join(summary_lines(plan, "", width))):
        assert max(map(len, text.splitlines())) <= width
    rows = plan_text(plan, "", width).splitlines()[-len(plan.rows) - 1 :]
    assert [line.split()[0] for line in rows if line.split()[0].isdigit()] == [str(row.number) for row in plan.rows]


@pytest.mark.parametrize("width", [60, 80])
def test_explanations_are_folded_and_lose_no_word(executable: tilewright.Executable, width: int) -> None:
    whole, folded = (explanation(executable.image, "model", executable.plan, columns) for columns in (None, width))
    regions = folded.partition("1. ")[2].splitlines()
    assert max(map(len, whole.splitlines())) > 80 >= max(map(len, regions)) and folded.split() == whole.split()


TEXTS = st.lists(st.lists(st.text("abc ", max_size=40), min_size=4, max_size=4), max_size=5)


@given(TEXTS, st.integers(60, 120), st.floats(0.1, 0.9))
def test_flexible_columns_take_what_the_others_leave(rows: list[list[str]], width: int, share: float) -> None:
    cells = [[text[:10], wide, other, text[:10]] for text, wide, other, _ in rows]
    lines = list(aligned(("a", "wide", "other", "d"), cells, ("wide", "other"), width, {"wide": share, "other": 1 - share}))
    assert len(lines) == len(rows) + 1 and all(len(line) <= width for line in lines)
    folded = " ".join(aligned(("a", "wide", "other", "d"), cells, ("wide", "other"), width, {"wide": share, "other": 1 - share}, folded=True))
    assert all(
        folded.replace(" ", "").count(letter) == sum(cell.count(letter) for row in [["a", "wide", "other", "d"], *cells] for cell in row)
        for letter in "abc"
    )
    unlimited = list(aligned(("a", "wide", "other", "d"), cells, ("wide", "other")))
    if max(map(len, unlimited)) <= width and all(not line.endswith(" ") for line in unlimited):
        assert lines == unlimited
