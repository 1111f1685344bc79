"""Generated tables of the documentation: they match the result files, and a changed figure is detected."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench import cells, chart, history, tables


def test_the_documentation_has_what_the_files_say() -> None:
    assert not list(tables.differences()), "run `python -m bench.tables`"


def test_the_chart_was_drawn_from_the_files() -> None:
    assert f"figures {chart.digest(chart.figures())}" in chart.PICTURE.read_text(), "run `python -m bench.chart`"


def test_speed_ups_are_over_the_fastest_form_of_a_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = {"tilewright": 2.0, "eager": 8.0, "eager_cl": 5.0, "onnxruntime": 3.0}
    entries = [{"network": "n", "contender": name, "status": "measured", "median_seconds": time} for name, time in measured.items()]
    entries.append({"network": "n", "contender": "openvino", "status": "wrong", "median_seconds": None})
    entries.append({"network": "without ours", "contender": "eager", "status": "measured", "median_seconds": 1.0})
    (tmp_path / "file.json").write_text(json.dumps({"results": entries}))
    monkeypatch.setattr(chart, "RESULTS", tmp_path)
    assert chart.speed_ups("file") == {"n": {"PyTorch": 2.5, "onnxruntime": 1.5}}


def test_every_table_is_in_a_page_once() -> None:
    names = [match["name"] for page in tables.PAGES for match in tables.BLOCK.finditer(page.read_text())]
    assert sorted(names) == sorted(tables.TABLES)


def test_a_changed_figure_is_found_and_mended() -> None:
    text = f"before\n<!-- table spaces -->\n{tables.markdown(tables.TABLES['spaces']() or [])}<!-- end -->\nafter\n"
    assert tables.rewritten(text) == (text, [])
    changed = text.replace("12,100", "12,101")
    assert changed != text and tables.rewritten(changed) == (text, ["spaces"])


def test_a_table_that_cannot_be_known_here_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "TABLES", {"spaces": lambda: None})
    text = "<!-- table spaces -->\n| as it was |\n<!-- end -->"
    assert tables.rewritten(text) == (text, [])


def test_files_whose_commits_are_not_in_the_history_are_listed(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    first = git("rev-parse", "HEAD")
    absent = "0" * 39 + "1"
    for name, commit in (("b", absent), ("a", absent), ("c", first), ("d", first + "+changes")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"commit": commit, "date": "2026-11-2" + str(len(name)) + "T10:00"}))
    rows = history.absent_commits(tmp_path, first) or []
    assert [row[-1] for row in rows] == ["files", "`a`, `b`", "`d`"] and rows[1][:2] == ["0000000", "2026-11-21"]
    assert history.absent_commits(tmp_path, absent) is None


def test_an_unknown_table_is_named() -> None:
    with pytest.raises(SystemExit, match="no table tabel: known are spaces"):
        tables.rewritten("<!-- table tabel -->\n<!-- end -->")


def test_cells() -> None:
    assert cells.power(6.3e-2) == "6.3e-2" and cells.power(1e-6) == "1.0e-6" and cells.percent(0.1234) == "12.3"
    assert tables.markdown([["a", "b"], ["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |\n"
