"""The page of an explanation: its data, its drawing, and what a browser makes of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tilewright
from tests.browser import CHROMIUM, Browser
from tests.runtime_programs import ProgramBuilder
from tilewright.cli import main
from tilewright.hardware import machine
from tilewright.ir.region import MergeDecision
from tilewright.report.explanation import stage_lines, unmeasured_chains
from tilewright.report.page.connections import connections, matched
from tilewright.report.page.data import Subject, subject_data
from tilewright.report.page.drawing import HEIGHT, RISE, WIDTH, drawn
from tilewright.report.page.html import embedded, page
from tilewright.report.tables import comparison_lines
from tilewright.runtime.artifact import read
from tilewright.runtime.loadable import loadable
from tilewright.runtime.plan import plan_of

HOSTILE = "</script><script>alert(1)</script><!--\"'&\u2028<b>"


class Branches(nn.Module):
    """Two branches that are concatenated, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.last = nn.Conv2d(16, 8, 3, padding=1)  # rows that strips of its input share: no chain with the branches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([torch.relu(self.first(x)), torch.relu(self.second(x))], 1)
        return torch.softmax(self.last(joined) + x, 1)


@pytest.fixture(scope="module")
def subject() -> Subject:
    module, inputs = Branches().eval(), (torch.randn(1, 8, 12, 12),)
    executable = tilewright.compile(module, inputs, threads=1)
    return Subject(f"branches {HOSTILE}", executable.image, 1, executable.profile(*inputs, repetitions=3))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same network for a GPU that is not here."""
    path = tmp_path_factory.mktemp("artifact") / "branches.zip"
    tilewright.compile(Branches().eval(), (torch.randn(1, 8, 12, 12),), "h200").save(path)
    return path


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def silent(done: int, total: int) -> None:
    assert 0 <= done <= total


# What the page is made of


def test_everything_is_in_the_page(subject: Subject) -> None:
    text = page([subject], silent)
    assert len(text) < 500_000
    shown = data_of(text)["subjects"][0]
    program = subject.image.program
    assert shown["name"] == subject.name and len(shown["rows"]) == len(program.regions)
    assert set(shown["kernels"]) == set(program.kernels)
    for name, kernel in shown["kernels"].items():
        assert name in kernel["source"] and len(kernel["cells"]) == len(shown["columns"])
        assert any(line.startswith(("executed", "not analysed")) for line in kernel["lines"])
    numbers = {node.get("number") for node in shown["graph"]["nodes"]} - {None}
    assert numbers == {number for number, region in enumerate(program.regions, 1) if region.calls}
    assert [span[0] for span in shown["timeline"]] == sorted(numbers) and shown["measured"]
    assert all(row["measured_seconds"] for row in shown["rows"] if row["number"] in numbers)
    assert any(other["loses_by"].endswith("%") for row in shown["rows"] for other in row["comparison"]["others"])
    assert shown["search"] == [str(decision) for decision in program.search] and any("softmax" in text for text in shown["search"])
    stages = [list(stage_lines(row)) for row in subject.plan.rows]
    assert any(stages) and [dict(row["entries"]).get("stages", []) for row in shown["rows"]] == stages


@pytest.mark.slow
def test_chains_that_no_trial_measured_are_listed_as_in_the_explanation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """For a GPU, of a model and not of an artifact, in the page and beside its search."""
    file = tmp_path / "page.html"
    assert main(["explain", "zoo:lenet5", "--target", "h200", "--fusion", "--html", str(file)]) == 0
    said, chains = data_of(file.read_text())["subjects"][0]["unmeasured"]
    lines = capsys.readouterr().out.splitlines()
    first = lines.index(f"{said}:")
    assert chains and said.startswith(f"{len(chains)} chain") and "no trial measured" in said
    assert [line.partition(". ")[2] for line in lines[first + 1 : first + 1 + len(chains)]] == chains
    assert all(chain.startswith(("would be taken: ", "refused: ")) for chain in chains)


def test_programs_for_cpus_have_no_unmeasured_chains(subject: Subject) -> None:
    assert subject_data(subject, silent)["unmeasured"] == ["", []]


def test_nothing_in_the_page_comes_from_elsewhere(subject: Subject) -> None:
    text = page([subject], silent)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None and policy[1].startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    addresses = set(re.findall(r"(?:https?:)?//[\w.]+", re.sub(r'id="data">.*?</script>', "", text, flags=re.DOTALL)))
    assert addresses == {"http://www.w3.org"}  # the name of SVG


def test_names_do_not_end_the_data() -> None:
    text = embedded({"name": HOSTILE})
    assert "<" not in text and json.loads(text)["name"] == HOSTILE
    with pytest.raises(ValueError):
        embedded([float("nan")])


# The drawing


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[str], list[tuple[str, str]], set[str]]:
    count = draw(st.integers(0, 14))
    pairs = [(a, b) for b in range(count) for a in range(b)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=30)) if pairs else []
    nodes = [str(node) for node in range(count)]
    return nodes, [(str(a), str(b)) for a, b in chosen], {node for node in nodes if draw(st.integers(0, 4)) == 0}


@settings(deadline=None)
@given(graphs())
def test_boxes_are_apart_and_edges_lead_down_to_their_readers(graph: tuple[list[str], list[tuple[str, str]], set[str]]) -> None:
    nodes, edges, points = graph
    drawing = drawn(nodes, edges, points)
    assert sorted(name for layer in drawing.layers for name in layer) == sorted(nodes)
    for layer in drawing.layers:
        assert len({drawing.places[name][1] for name in layer}) <= 1
        centres = [drawing.places[name][0] for name in layer if name not in points]
        assert all(b - a >= WIDTH for a, b in zip(centres, centres[1:], strict=False))
        assert all(WIDTH / 2 - 1e-6 <= x <= drawing.width - WIDTH / 2 + 1e-6 for x in centres)
    for source, target in edges:
        assert drawing.places[target][1] >= drawing.places[source][1] + HEIGHT + RISE
        x, top = drawing.places[source]
        reached = {(x, top + HEIGHT)}
        for start, end, _ in sorted((segment for segment in drawing.segments if segment[2] == source), key=lambda segment: segment[0][1]):
            reached |= {end} if start in reached else set()
        assert drawing.places[target] in reached
    assert len(drawing.segments) >= len(set(edges))


def test_a_chain_is_a_straight_line() -> None:
    drawing = drawn(["a", "b", "c"], [("a", "b"), ("b", "c")])
    assert {x for x, _ in drawing.places.values()} == {WIDTH / 2} and drawing.width == WIDTH


def test_edges_follow_slices_of_buffers() -> None:
    """The regions that write a and b write slices of c. If the second reads a, the reader of c follows it alone, otherwise both."""
    for chained in (True, False):
        builder = ProgramBuilder({"x": (4,)})
        builder.value("c", (8,))
        builder.aliases.update(a="c", b="c")
        builder.kernel("relu", ("x",), "a", (4,), "")
        builder.kernel("add", ("x", "a" if chained else "x"), "b", (4,), "")
        builder.kernel("neg", ("c",), "r", (8,), "")
        builder.kernel("neg", ("a",), "s", (4,), "")
        program = loadable(builder.program(("r", "s")))
        found = connections(program, plan_of(program, machine("native")))
        always = {("in x", "1"), ("in x", "2"), ("2", "3"), ("1", "4"), ("3", "out r"), ("4", "out s")}
        assert set(found.direct) == always | {("1", "2") if chained else ("1", "3")}
        assert len(found.joins) == (0 if chained else 1)
        assert all(found.nodes.index(a) < found.nodes.index(b) for a, b in found.edges)


def test_a_loop_follows_those_who_store_its_first_states() -> None:
    executable = tilewright.compile(nn.LSTM(8, 8).eval(), (torch.randn(5, 2, 8),))
    found = connections(executable.image.program, executable.plan)
    loop = next(str(row.number) for row in executable.plan.rows if row.kind == "loop")
    states = {str(row.number) for row in executable.plan.rows if ".state" in row.name and row.kind == "map"}
    assert states and states <= {source for source, target in found.direct if target == loop}
    assert {target for source, target in found.direct if source in states} == {loop}


def test_regions_of_two_plans_match_by_operators() -> None:
    def plan(groups: list[list[str]]) -> Any:
        builder = ProgramBuilder({"x": (4,)})
        for number in range(4):
            builder.kernel("relu", (f"v{number - 1}" if number else "x",), f"v{number}", (4,), "")
        whole = plan_of(loadable(builder.program(("v3",))), machine("native"))
        rows = [
            replace(whole.rows[i], number=i + 1, nodes=tuple((name, "relu", "") for name in names), name=f"r{i}") for i, names in enumerate(groups)
        ]
        return replace(whole, rows=tuple(rows))

    first, second = plan([["a"], ["b", "c"], ["d"], []]), plan([["a", "b"], ["c"], ["e"], []])
    pairs = [(match.first, match.second) for match in matched(first, second)]
    assert pairs == [((1, 2), (1, 2)), ((3,), ()), ((4,), (4,)), ((), (3,))]
    assert [(match.first, match.second) for match in matched(first, first)] == [((number,), (number,)) for number in (1, 2, 3, 4)]


def test_two_plans_compared_as_text() -> None:
    builder = ProgramBuilder({"x": (4,)})
    for number in range(3):
        builder.kernel("relu", (f"v{number - 1}" if number else "x",), f"v{number}", (4,), "")
    whole = plan_of(loadable(builder.program(("v2",))), machine("native"))

    def plan(*regions: tuple[str, float]) -> Any:
        rows = (
            replace(row, nodes=tuple((name, name, "") for name in names), predicted_seconds=seconds, measured_seconds=None)
            for row, (names, seconds) in zip(whole.rows, regions, strict=True)
        )
        return replace(whole, rows=tuple(rows))

    lines = list(comparison_lines(("a", plan(("b", 1e-6), ("cd", 3e-6), ("e", 5e-6))), ("z", plan(("b", 2e-6), ("c", 1e-6), ("d", 6e-6))), 80))
    assert lines[0] == "first a, 9 us; second z, 9 us; first / second 1.00"
    assert [line.split() for line in lines[2:]] == [
        ["e", "3", "5", "us", "none", "-", "predicted"],
        ["c,", "d", "2", "2,", "3", "3", "us", "7", "us", "0.43", "predicted"],
        ["b", "1", "1", "1", "us", "2", "us", "0.50", "predicted"],
    ]


def test_measured_times_are_not_compared_with_predicted_ones(artifact: Path) -> None:
    plan = plan_of(read(artifact).program, machine("native"))
    second = plan.with_times({plan.rows[0].number: 7e-6})
    both = plan.with_times({row.number: 1e-6 * row.number for row in plan.rows})
    for match in matched(plan, second):
        assert not match.measured and match.seconds[0] == match.seconds[1]  # the same program
    measured = [match for match in matched(both, second) if match.measured]
    assert [(match.first, match.seconds) for match in measured] == [((plan.rows[0].number,), (1e-6 * plan.rows[0].number, 7e-6))]


# The command


def test_the_command_writes_the_page_beside_the_text(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.html"
    assert main(["explain", str(artifact), "--html", str(file)]) == 0
    out = capsys.readouterr().out
    assert "regions" in out and out.endswith(f"page written to {file}\n")
    shown = data_of(file.read_text())["subjects"]
    assert [subject["name"] for subject in shown] == [str(artifact)] and not shown[0]["measured"] and shown[0]["timeline"] == []
    assert main(["explain", str(artifact), "--against", str(artifact)]) == 0
    out = capsys.readouterr().out
    assert f"first {artifact}, " in out and "first / second 1.00" in out
    assert main(["explain", str(artifact), "--profile"]) == 2
    assert "there is none here" in capsys.readouterr().err


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def file(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "page.html"
    path.write_text(page([subject], silent))
    return path


FOCUSED = "document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"


@pytest.mark.in_turns
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_asks_for_nothing_and_has_no_errors(browser: Browser, file: Path, width: int, theme: str) -> None:
    browser.open(file, width, 800, theme)
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert [section for section in browser.value("[...document.querySelectorAll('section')].map((s) => s.id)")] == [
        "network", "timeline", "regions", "kernels", "predictions", "choices",
    ]  # fmt: skip
    assert HOSTILE in browser.value("document.querySelector('h1').textContent") and HOSTILE in browser.value("document.title")
    assert browser.value("/\\[object|undefined|NaN/.test(document.querySelector('main').textContent)") is False
    assert len(browser.requests) == 1 and browser.problems == []
    shade = browser.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
    assert (shade < 128) == (theme == "dark")
    browser.value("document.querySelector('header button').click()")
    assert browser.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]") != shade


def test_the_graph_is_walked_by_keys_and_opens_a_region(browser: Browser, file: Path) -> None:
    browser.open(file)
    browser.value("document.querySelector('.node').focus()")
    assert browser.value(FOCUSED).startswith("input")
    browser.press("ArrowDown")
    first = browser.value(FOCUSED)
    assert first.startswith("region 1")
    for _ in range(3):
        browser.press("ArrowDown")
    assert browser.value(FOCUSED) != first
    assert browser.value("document.querySelectorAll('.node[tabindex=\"0\"]').length") == 1
    browser.press("Home")
    browser.press("ArrowDown")
    browser.press("Enter")
    assert browser.value("document.querySelector('dialog').open") is True
    assert browser.value("location.hash") == "#region-1"
    assert browser.value("document.querySelector('#detail-title').textContent").startswith("1. ")
    browser.value("document.querySelector('[aria-label=\"next region\"]').focus()")
    for number in (2, 3):
        browser.press("Enter")
        assert browser.value("document.querySelector('#detail-title').textContent").startswith(f"{number}. ")
        assert browser.value(FOCUSED) == "next region"
    assert "#include" in browser.value("[...document.querySelectorAll('dialog pre')].map((p) => p.textContent).join('')")
    browser.press("Escape")
    assert browser.value("document.querySelector('dialog').open") is False
    assert browser.value(FOCUSED) == first
    assert browser.value("new Promise((resolve) => setTimeout(() => resolve(location.hash), 200))") == ""  # the event of closing comes later
    assert browser.problems == []


def test_tables_sort_by_their_headings(browser: Browser, file: Path) -> None:
    browser.open(file)
    numbers = "[...document.querySelectorAll('#regions tbody tr')].map((row) => Number(row.cells[0].textContent))"
    by_time = browser.value(numbers)
    browser.value("document.querySelector('#regions th button').focus()")
    browser.press("Enter")
    assert browser.value(numbers) == sorted(by_time, reverse=True)
    browser.press("Enter")
    assert browser.value(numbers) == sorted(by_time)
    assert browser.value("document.querySelector('#regions th').getAttribute('aria-sort')") == "ascending"


def test_points_and_spans_open_regions(browser: Browser, file: Path) -> None:
    browser.open(file)
    for selector in ("#timeline .span", "#predictions circle"):
        browser.value(f"document.querySelector('{selector}').focus()")
        before = browser.value(FOCUSED)
        browser.press("ArrowRight")
        assert browser.value(FOCUSED) != before and browser.value(FOCUSED).startswith("region")
        browser.press("Enter")
        assert browser.value("document.querySelector('dialog').open") is True
        browser.press("Escape")
    assert browser.problems == []


def test_everything_that_can_be_clicked_has_a_name_and_is_in_the_order_of_tabs(browser: Browser, file: Path) -> None:
    browser.open(file)
    nameless = "[...document.querySelectorAll('button, a, select, input, [role=button]')].filter((e) => !(e.getAttribute('aria-label') || e.textContent.trim()))"
    assert browser.value(f"{nameless}.length") == 0
    seen = []
    for _ in range(12):
        browser.press("Tab")
        seen.append(browser.value("document.activeElement.closest('section, nav')?.id || document.activeElement.closest('section, nav')?.tagName"))
    assert "NAV" in seen and "network" in seen and seen.index("NAV") < seen.index("network")


def test_a_region_of_an_address_is_opened(browser: Browser, file: Path) -> None:
    browser.open(file, fragment="#region-2")
    assert browser.value("document.querySelector('#detail-title').textContent").startswith("2. ")
    browser.open(file, fragment="#region-999")
    assert browser.value("document.querySelector('dialog').open") is False
    assert browser.problems == []


def test_merges_and_stages_are_shown(browser: Browser, file: Path, subject: Subject) -> None:
    row = next(row for row in subject.plan.rows if list(stage_lines(row)))
    browser.open(file, fragment=f"#region-{row.number}")
    shown = browser.value("[...document.querySelectorAll('li')].map((item) => item.textContent)")
    assert subject.plan.search and {str(decision) for decision in subject.plan.search} <= set(shown)
    assert set(stage_lines(row)) <= set(browser.value("[...document.querySelectorAll('dialog dd div')].map((line) => line.textContent)"))


def test_two_programs_are_compared(browser: Browser, subject: Subject, artifact: Path, tmp_path: Path) -> None:
    from tilewright.runtime.artifact import read

    file = tmp_path / "comparison.html"
    chain = MergeDecision(("a", "b"), True, "a -> b predicted 3 us <b>")
    file.write_text(page([subject, Subject("on a GPU", read(artifact), 1, unmeasured=(chain,))], silent))
    browser.open(file)
    assert browser.value("document.querySelector('section').id") == "comparison"
    assert browser.value("document.querySelectorAll('#comparison tbody tr').length") >= 3
    browser.value("(() => { const s = document.querySelector('select'); s.value = '1'; s.dispatchEvent(new Event('change')); })()")
    assert browser.value("document.querySelector('h1').textContent").startswith("on a GPU for h200")
    said, chains = unmeasured_chains((chain,))
    assert said in browser.value("[...document.querySelectorAll('summary')].map((item) => item.textContent)")
    assert set(chains) <= set(browser.value("[...document.querySelectorAll('li')].map((item) => item.textContent)"))
    assert browser.value("document.querySelector('#kernels thead').textContent").count("registers") == 1
    browser.value("document.querySelector('#comparison td:nth-child(3) button').click()")
    assert "occupancy" in browser.value("document.querySelector('dialog').textContent")
    assert browser.problems == []
