"""Choices kept beside the kernels: equal to ranking again, never another problem's, and no harm if the file is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import tilewright
from tilewright.errors import InvalidModel
from tilewright.hardware import machine
from tilewright.kernels.schema import USUAL, Numerics
from tilewright.selection import choice
from tilewright.selection.choice import choose
from tilewright.selection.learned import cpu
from tilewright.tuning import choices, problems
from tilewright.tuning.problems import convolution_problem

H200 = machine("h200")


def never(*_: object) -> None:
    raise AssertionError("ranked again")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    return tmp_path / "choices"


def test_a_choice_is_made_once(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = convolution_problem(32, 16, 20, 20, 3)
    first = choices.remembered()(problem, H200, 1)
    assert first == choose(problem, H200, 1) and len(list(kept.iterdir())) == 1
    monkeypatch.setattr(choice, "choose", never)
    assert choices.remembered()(problem, H200, 1) == first
    for other, atomics in ((convolution_problem(32, 16, 20, 21, 3), False), (problem, True)):
        with pytest.raises(AssertionError, match="ranked again"):
            choices.remembered(Numerics(atomics=atomics))(other, H200, 1)


def test_problems_that_schemas_see_alike_are_ranked_once() -> None:
    """The places of results in wider buffers make no difference, other sizes and machines do."""
    problem = convolution_problem(32, 16, 20, 20, 3)
    (result,) = problem.region.outputs
    wider = replace(problem.layouts[result], around=((0, 0), (0, 0), (0, 0), (0, 32)))
    beside = replace(problem, layouts={**problem.layouts, result: wider})
    with mock.patch.object(choice, "choose", side_effect=choose) as asked:
        chosen = choice.choosing()
        found = [chosen(each, H200, 1) for each in (problem, beside, convolution_problem(32, 16, 20, 21, 3), problem)]
        half = replace(H200, processors=H200.processors // 2)
        assert chosen(problem, half, 1) == choose(problem, half, 1)
    assert asked.call_count == 3 and found[0] is found[1] is found[3] and found[1] == choose(beside, H200, 1)


def test_choices_for_gpus_do_not_need_the_forest_of_cpus(kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    damaged = tmp_path / "cpu.npz"
    damaged.write_text("no forest")
    monkeypatch.setattr(cpu, "MODEL", damaged)
    choices.remembered()(convolution_problem(16, 16, 9, 9, 3), H200, 1)
    with pytest.raises(InvalidModel, match="npz"):
        choices.remembered()(convolution_problem(16, 16, 9, 9, 3), machine("x86-avx2"), 1)


def test_a_choice_by_a_forest_is_kept(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by the analytical models alone is as quick to make again."""
    problem = convolution_problem(32, 16, 20, 20, 3)
    for target, files in (("neoverse-n1", 0), ("x86-avx2", 1)):
        first = choices.remembered()(problem, machine(target), 2)
        assert first == choose(problem, machine(target), 2) and len(list(kept.glob("*"))) == files
    monkeypatch.setattr(choice, "choose", never)
    assert choices.remembered()(problem, machine("x86-avx2"), 2) == first


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, '{"schedule": "{}"}', '{"schedule": "{\\"type\\": \\"os.system\\"}", "terms": {}, "rejected": {}}']
)
def test_a_damaged_file_is_made_again(kept: Path, text: str) -> None:
    problem = convolution_problem(16, 16, 9, 9, 3)
    first = choices.remembered()(problem, H200, 1)
    (path,) = kept.iterdir()
    path.write_text(text)
    assert choices.remembered()(problem, H200, 1) == first
    path.write_text(path.read_text().replace("16", "17"))  # still a valid choice, but not the one that was written
    assert choices.remembered()(problem, H200, 1) == first
    path.unlink()
    kept.rmdir()
    kept.write_text("no folder")
    assert choices.remembered()(problem, H200, 1) == first


# Dependences of a kept choice

CPU = machine("x86-avx512")
PROBLEM = convolution_problem(16, 16, 9, 9, 3)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Clears the digests of sources, which are computed once per process."""
    yield
    choices._models.cache_clear()
    problems._sources.cache_clear()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    "name",
    [
        "hardware/occupancy.py", "hardware/pipelines.py", "hardware/calibration/golden-cove.json", "selection/ranking.py",
        "selection/models/cpu.npz", "analysis/cpu/assembly.py", "tuning/code_choice.py", "runtime/kernel_source.py", "toolchain/compilers.py",
        "ir/expr.py", "graph/table.py", "kernels/columns.py", "codegen/c.py", "kernels/cpu/contraction/lower.py",
    ],
)  # fmt: skip
def test_sources_and_models_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    changed = Path(tilewright.__file__).parent / name
    assert changed.is_file()
    before, read = choices.place(PROBLEM, CPU, USUAL, 2), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path == changed))
    choices._models.cache_clear()
    problems._sources.cache_clear()
    assert choices.place(PROBLEM, CPU, USUAL, 2) != before


@pytest.mark.usefixtures("fresh")
def test_arguments_and_numpy_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [
        choices.place(PROBLEM, CPU, USUAL, 2),
        choices.place(PROBLEM, CPU, USUAL, 3),
        choices.place(PROBLEM, CPU, Numerics(atomics=True), 2),
        choices.place(convolution_problem(16, 16, 9, 10, 3), CPU, USUAL, 2),
        choices.place(PROBLEM, replace(CPU, memory_bandwidth=2 * CPU.memory_bandwidth), USUAL, 2),
        choices.place(PROBLEM, replace(CPU, pipeline="golden-cove"), USUAL, 2),
        choices.place(PROBLEM, H200, USUAL, 2),
    ]
    monkeypatch.setattr(np, "__version__", "0.1")
    choices._models.cache_clear()
    keys.append(choices.place(PROBLEM, CPU, USUAL, 2))
    assert len(set(keys)) == len(keys)


def test_programs_are_part_of_the_key_of_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def program(name: str, words: str) -> Path:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\necho {words}\n")
        path.chmod(0o755)
        return path

    def keys() -> tuple[Path, Path]:
        assert choices.place(PROBLEM, CPU, USUAL, 2) == by_models
        return choices.place(PROBLEM, CPU, USUAL, 2, by_code=True), choices.place(PROBLEM, H200, USUAL)

    by_models = choices.place(PROBLEM, CPU, USUAL, 2)
    found = [keys()]
    for words in ("compiler 1.0", "compiler 1.0.1"):
        monkeypatch.setenv("TILEWRIGHT_CC", str(program(f"{words.split()[1]}-cc", words)))
        found.append(keys())
    program("objdump", "objdump 9")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    program("x86_64-linux-gnu-objdump", "objdump 10")
    found.append(keys())
    monkeypatch.setenv("PATH", "")
    found.append(keys())
    assert len({cpu for cpu, _ in found}) == 5 and len({gpu for _, gpu in found}) == 1
