"""Choices kept beside the kernels: the same as ranking again, never another problem's, and no harm where the file is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewright.cost.choice import choose
from tilewright.hardware import machine
from tilewright.runtime import choices
from tilewright.runtime.problems import Problem, convolution_problem

H200 = machine("h200")


def arguments(problem: Problem) -> tuple:
    return problem.region, problem.layouts, problem.values, problem.constants, H200, 1


def never(*_: object) -> None:
    raise AssertionError("ranked again")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    return tmp_path / "choices"


def test_a_choice_is_made_once(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = convolution_problem(32, 16, 20, 20, 3)
    first = choices.remembered()(*arguments(problem))
    assert first == choose(*arguments(problem)) and len(list(kept.iterdir())) == 1
    monkeypatch.setattr(choices, "choose", never)
    assert choices.remembered()(*arguments(problem)) == first
    for other, atomics in ((convolution_problem(32, 16, 20, 21, 3), False), (problem, True)):
        with pytest.raises(AssertionError, match="ranked again"):
            choices.remembered(atomics)(*arguments(other))


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"schedule": "{}"}', '{"schedule": "{\\"type\\": \\"os.system\\"}", "terms": {}, "rejected": {}}'])
def test_a_damaged_file_is_made_again(kept: Path, text: str) -> None:
    problem = convolution_problem(16, 16, 9, 9, 3)
    first = choices.remembered()(*arguments(problem))
    (path,) = kept.iterdir()
    path.write_text(text)
    assert choices.remembered()(*arguments(problem)) == first
    path.write_text(path.read_text().replace("16", "17"))  # still a choice, and not the one that was written
    assert choices.remembered()(*arguments(problem)) == first
    path.unlink()
    kept.rmdir()
    kept.write_text("no folder")
    assert choices.remembered()(*arguments(problem)) == first
