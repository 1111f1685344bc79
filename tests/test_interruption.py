"""Ctrl-C, SIGTERM and kill -9 at every stage: the program ends soon, with one line of output, and leaves no process, partial file or folder
behind."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

import tilewright
from bench.processes import MARK, PATIENCE, ended, processes_left, processes_of, start, words_of
from tests import interrupted
from tilewright.system.scratch import Scratch
from tilewright.tuning.records import Records, default_path

Stage = tuple[signal.Signals, int, str]
"""The signal, how often it is sent, and the function before whose first call it is sent."""
ROOT = str(Path(tilewright.__file__).parents[1])
LAYERS = [{"name": f"layer {k}", "outputs": 16, "channels": 8, "height": 6 + k, "width": 5, "filter": 3} for k in range(3)]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder as in `bench.processes`."""
    monkeypatch.syspath_prepend(ROOT)  # where forked processes find the package `bench`
    (tmp_path / "home" / "tmp").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "layers.json").write_text(json.dumps(LAYERS))
    (tmp_path / "small_models.py").write_text("import torch\ndef linear():\n    return torch.nn.Linear(4, 4), torch.randn(1, 4)\n")
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "home" / "cache"))
    return tmp_path


def commands(place: Path) -> dict[int, str]:
    """The commands of processes started by those that work in the folder."""
    found = {}
    for number in processes_of(place):
        with suppress(OSError):
            found[number] = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    return found


def slow_compiler(place: Path) -> dict[str, str]:
    """An environment with a compiler that does not end."""
    path = place / "cc"
    path.write_text('#!/bin/sh\n[ "$1" = --version ] && exec gcc "$@"\nsleep 1000\nexec gcc "$@"\n')
    path.chmod(0o755)
    return {"TILEWRIGHT_CC": str(path)}


def started(place: Path, arguments: tuple[str, ...], stage: Stage | None = None, environment: Mapping[str, str] | None = None) -> Any:
    """Runs the command in a process that leads a process group and has imported everything."""
    return start(place, interrupted.command, place, {"PYTHONPATH": str(place), **(environment or {})}, arguments, stage)


def result(place: Path, process: Any) -> tuple[int, str]:
    """Exit status and output of a process after it has ended; checks that no other process is left."""
    code = ended(process)
    assert processes_left(place) == []
    return code, words_of(place, process)


COMPILE = ("compile", "small_models:linear", "-o", "out/model.zip")
BATCH = ("batch", "small_models:linear", "--targets", "native,x86-avx2", "-o", "out", "--workers", "2")
TUNE = ("tune", "layers.json", "--target", "native", "--trials", "3")
STAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "importing the command line": ("tilewright.cli_tune:", COMPILE),
    "importing PyTorch": ("torch:", COMPILE),
    "exporting": ("torch.export:export", COMPILE),
    "planning": ("tilewright.partition.predictions:regions_of", COMPILE),
    "building": ("tilewright.toolchain.cache:KernelCache.get_or_build", COMPILE),
    "saving": ("zipfile:ZipFile.writestr", COMPILE),
    "explaining": ("tilewright.report.explanation:explanation", ("explain", "small_models:linear", "--html", "out/page.html")),
    "reading code": ("tilewright.report.code_cpu:disassembled", ("explain", "small_models:linear", "--code", "--html", "out/page.html")),
    "measuring": ("tilewright.tuning.tuning:measurement_of", TUNE),
    "exporting records": ("tilewright.tuning.records:asdict", ("tune", "--export", "out/lines.jsonl.gz")),
    "importing records": ("tilewright.tuning.records:checked", ("tune", "--import", "lines.jsonl")),
    "a batch": ("tilewright.tuning.batch:run_all", BATCH),
}


def ours_in(place: Path) -> list[str]:
    """Our remaining temporary files; PyTorch and Dask have folders of their own."""
    return [str(path) for path in (place / "home" / "tmp").rglob("*") if path.name.startswith(("tilewright", "kernel"))]


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_is_interrupted_in_order(stage: str, place: Path) -> None:
    where, command = STAGES[stage]
    if "records" in stage:
        from tests.stand_ins import filled

        filled(default_path(), 20)
        with Records() as records:
            records.export_lines(place / "lines.jsonl")
    number, times = signal.SIGTERM if stage in ("saving", "measuring") else signal.SIGINT, 1 + len(stage) % 3
    if "import" in stage or command is BATCH:  # importing is itself a stage, and Dask's processes import the main module
        line = [sys.executable, interrupted.__file__, number.name, str(times), where, *command]
        environment = {**os.environ, MARK: str(place), "TMPDIR": str(place / "home" / "tmp"), "PYTHONPATH": os.pathsep.join((ROOT, str(place)))}
        fresh = subprocess.run(line, cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=PATIENCE, env=environment)
        found = fresh.returncode, fresh.stderr
        assert processes_left(place) == []
    else:
        found = result(place, started(place, command, (number, times, where)))
    assert found == (128 + number, "tilewright: interrupted\n") and (place / "stage").read_text() == "begins\n"
    assert list((place / "out").iterdir()) == [] and ours_in(place) == []
    if default_path().exists():
        sound(default_path())
        with Records() as records:
            assert len(records) == 20 or (stage == "measuring" and len(records) <= 1)


@pytest.mark.parametrize("command", [COMPILE, pytest.param(BATCH, marks=pytest.mark.slow), TUNE], ids=lambda command: command[0])
def test_a_compiler_that_hangs_is_ended_with_the_program(command: tuple[str, ...], place: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)[:: 2 if command is TUNE else 1]:
        process = started(place, command, environment=slow_compiler(place))
        wait_for(lambda: any("sleep 1000" in line for line in commands(place).values()) or not process.is_alive())
        if number == signal.SIGINT:  # a terminal sends it to every process of the group
            os.killpg(process.pid, number)
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid, number)
        killed = number == signal.SIGKILL
        assert result(place, process) == ((-9, "") if killed else (128 + number, "tilewright: interrupted\n"))
        assert list((place / "out").iterdir()) == [] and (killed or ours_in(place) == [])
    if command is TUNE:
        assert ours_in(place) != []
        Scratch(str(place / "home" / "tmp")).close()  # the next one removes what the killed one has left
        assert ours_in(place) == []


def test_workers_that_are_killed_cost_their_candidates(place: Path) -> None:
    process, killed_ones = started(place, TUNE), 0
    for worker in ("cpu_trial_worker", "compile_worker"):
        before = known()
        wait_for(lambda: known() > before or not process.is_alive())
        for number, line in commands(place).items():
            if worker in line and process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
                    killed_ones += 1
    assert result(place, process) == (0, "")
    with Records() as records:
        entries = list(records.all())
        failed = [entry for entry in entries if entry.status == "failed"]
        assert len({(entry.region, entry.schedule) for entry in entries}) == 3 * len(LAYERS)
        assert len(failed) <= killed_ones and all("process ended (status -9)" in entry.reason for entry in failed), failed


def known() -> int:
    """The number of recorded measurements."""
    if not default_path().exists():
        return 0
    with Records(write=False) as records:
        return len(records)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    assert condition()


def sound(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
