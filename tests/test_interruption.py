"""Ctrl-C, SIGTERM and kill -9 at every stage: the program ends soon, in one line, and leaves no process, no half of a file and no folder behind."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

import tilewright
from tilewright.runtime.records import Records, default_path

DRIVER = str(Path(__file__).parent / "interrupted.py")
PATIENCE = 300.0
"""Against hangs only: nothing here is timed."""
LAYERS = [{"name": f"layer {k}", "outputs": 16, "channels": 8, "height": 6 + k, "width": 5, "filter": 3} for k in range(4)]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in; every process that is started from here carries its mark."""
    for name, value in (("CACHE", tmp_path / "cache"), ("MARK", uuid.uuid4())):
        monkeypatch.setenv(f"TILEWRIGHT_{name}", str(value))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "layers.json").write_text(json.dumps(LAYERS))
    (tmp_path / "out").mkdir()
    (tmp_path / "small_models.py").write_text("import torch\ndef linear():\n    return torch.nn.Linear(4, 4), torch.randn(1, 4)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(Path(tilewright.__file__).parents[1]), str(tmp_path))))
    return tmp_path


def marked() -> dict[int, str]:
    """The commands of processes that carry this test's mark, without this one."""
    mark, found = f"TILEWRIGHT_MARK={os.environ['TILEWRIGHT_MARK']}".encode(), {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and int(entry) != os.getpid():
            try:
                if mark in Path(f"/proc/{entry}/environ").read_bytes():
                    found[int(entry)] = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
            except OSError:
                continue
    return found


def none_left() -> None:
    """Waits until no process is left; those of a parent that was killed notice it themselves."""
    wait_for(lambda: not marked())


def slow_compiler(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that does not end."""
    path = place / "cc"
    path.write_text('#!/bin/sh\n[ "$1" = --version ] && exec gcc "$@"\nsleep 1000\nexec gcc "$@"\n')
    path.chmod(0o755)
    monkeypatch.setenv("TILEWRIGHT_CC", str(path))


COMPILE = ("compile", "small_models:linear", "-o", "out/model.zip")
BATCH = ("batch", "small_models:linear", "--targets", "native,x86-avx2", "-o", "out", "--workers", "2")
TUNE = ("tune", "layers.json", "--target", "native", "--trials", "3")
STAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "importing the command line": ("tilewright.cli_tune:", COMPILE),
    "importing PyTorch": ("torch:", COMPILE),
    "exporting": ("torch.export:export", COMPILE),
    "planning": ("tilewright.partition.plan:lay_out", COMPILE),
    "building": ("tilewright.toolchain.cache:KernelCache.get_or_build", COMPILE),
    "saving": ("zipfile:ZipFile.writestr", COMPILE),
    "explaining": ("tilewright.report.explanation:explanation", ("explain", "small_models:linear", "--html", "out/page.html")),
    "measuring": ("tilewright.runtime.tuning:measurement_of", TUNE),
    "exporting records": ("tilewright.runtime.records:asdict", ("tune", "--export", "out/lines.jsonl.gz")),
    "importing records": ("tilewright.runtime.records:checked", ("tune", "--import", "lines.jsonl")),
    "a batch": ("tilewright.runtime.batch:run_all", BATCH),
}


def interrupted(place: Path, number: signal.Signals, times: int, where: str, *command: str) -> None:
    process = subprocess.run([sys.executable, DRIVER, number.name, str(times), where, *command], cwd=place, capture_output=True, text=True, timeout=PATIENCE)
    assert process.stdout.count("the stage begins") == 1, process.stderr
    assert process.returncode == 128 + number, process.stderr
    assert process.stderr == "tilewright: interrupted\n"
    none_left()
    assert list((place / "out").iterdir()) == []
    assert ours_in(place / "tmp") == []


def ours_in(folder: Path) -> list[str]:
    """What is left of ours among temporary files; PyTorch and Dask have folders of their own."""
    return [str(path) for path in folder.rglob("*") if path.name.startswith(("tilewright", "kernel"))]


QUICK = ("importing PyTorch", "saving", "measuring", "importing records", "a batch")


@pytest.mark.parametrize("stage", [stage if stage in QUICK else pytest.param(stage, marks=pytest.mark.slow) for stage in STAGES])
def test_every_stage_is_interrupted_in_order(stage: str, place: Path) -> None:
    where, command = STAGES[stage]
    if "records" in stage:
        from test_record_files import filled

        filled(default_path(), 20)
        with Records() as records:
            records.export_lines(place / "lines.jsonl")
    interrupted(place, signal.SIGTERM if stage in ("saving", "measuring") else signal.SIGINT, 1 + len(stage) % 3, where, *command)
    if default_path().exists():
        sound(default_path())
        with Records() as records:
            assert len(records) == 20 or (stage == "measuring" and len(records) <= 1)


def started(place: Path, *command: str) -> subprocess.Popen[str]:
    """The program, in a process group of its own."""
    line = [sys.executable, "-m", "tilewright", *command]
    return subprocess.Popen(line, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)


@pytest.mark.parametrize("command", [COMPILE, pytest.param(BATCH, marks=pytest.mark.slow), TUNE], ids=lambda command: command[0])
def test_a_compiler_that_hangs_is_ended_with_the_program(command: tuple[str, ...], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_compiler(place, monkeypatch)
    for number in (signal.SIGINT, signal.SIGKILL if command is TUNE else signal.SIGTERM):
        process = started(place, *command)
        wait_for(lambda: any("sleep 1000" in line for line in marked().values()) or process.poll() is not None)
        if number == signal.SIGINT:  # a terminal sends it to every process of the group
            os.killpg(process.pid, number)
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE)
        assert (process.returncode, errors) == ((-9, "") if number == signal.SIGKILL else (128 + number, "tilewright: interrupted\n"))
        none_left()
        assert list((place / "out").iterdir()) == [] and (number == signal.SIGKILL or ours_in(place / "tmp") == [])


def test_workers_that_are_killed_cost_their_candidates(place: Path) -> None:
    process, killed_ones = started(place, *TUNE), 0
    for worker in ("cpu_trial_worker", "compile_worker", "cpu_trial_worker"):
        before = known()
        wait_for(lambda before=before: known() > before or process.poll() is not None)
        for number, line in marked().items():
            if worker in line and process.poll() is None:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
                    killed_ones += 1
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (0, "")
    with Records() as records:
        entries = list(records.all())
        failed = [entry for entry in entries if entry.status == "failed"]
        assert len({(entry.region, entry.schedule) for entry in entries}) == 3 * len(LAYERS)
        assert len(failed) <= killed_ones and all("process ended (status -9)" in entry.reason for entry in failed), failed
    none_left()


def known() -> int:
    """Measurements that are recorded."""
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
