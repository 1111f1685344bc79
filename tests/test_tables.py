"""Generated tables of the documentation: they match the result files, and a changed figure is detected."""

from __future__ import annotations

import pytest

from bench import tables


def test_the_documentation_has_what_the_files_say() -> None:
    assert not list(tables.differences()), "run `python -m bench.tables`"


def test_every_table_is_in_a_page_once() -> None:
    names = [match["name"] for page in tables.PAGES for match in tables.BLOCK.finditer(page.read_text())]
    assert sorted(names) == sorted(tables.TABLES)


def test_a_changed_figure_is_found_and_mended() -> None:
    text = f"before\n<!-- table spaces -->\n{tables.markdown(tables.spaces())}<!-- end -->\nafter\n"
    assert tables.rewritten(text) == (text, [])
    changed = text.replace("12,100", "12,101")
    assert changed != text and tables.rewritten(changed) == (text, ["spaces"])


def test_an_unknown_table_is_named() -> None:
    with pytest.raises(SystemExit, match="no table tabel: known are spaces"):
        tables.rewritten("<!-- table tabel -->\n<!-- end -->")


def test_cells() -> None:
    assert tables.power(6.3e-2) == "6.3e-2" and tables.power(1e-6) == "1.0e-6" and tables.percent(0.1234) == "12.3"
    assert tables.markdown([["a", "b"], ["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |\n"
