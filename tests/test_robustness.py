"""Kills, interrupts, crowds, full disks and repetitions, a few of each (`python -m bench.robustness` has more), and unwritable places."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

import tilewright
from bench import robustness
from bench.tuning_kills import tuning_kills
from tilewright import settings
from tilewright.errors import CacheError, CompilerMissing, UnsupportedOption
from tilewright.hardware import machine
from tilewright.tuning.trials import Trials
from tilewright.tuning.workers import Worker, WorkerLost

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None and shutil.which("clang") is None, reason="no C compiler")


@pytest.fixture(autouse=True, scope="module")
def path() -> None:
    """Lets forked processes find the package `bench`."""
    root = str(Path(__file__).parents[1])
    if root not in sys.path:
        sys.path.insert(0, root)


def test_killed_while_compiling(tmp_path: Path) -> None:
    report = robustness.kills_of_compiling(tmp_path, 3)
    assert report["faults"] == [] and report.get("killed", 0) + report.get("had ended", 0) == 3


def test_killed_while_tuning(tmp_path: Path) -> None:
    """Measurements are kept and not repeated."""
    report = tuning_kills(tmp_path, 3, seed=5)
    assert report["faults"] == [] and report["killed"] == 3 and report["measurements"] >= 8


def test_interrupted_while_compiling(tmp_path: Path) -> None:
    report = robustness.interrupts(tmp_path, 2)
    assert report["faults"] == [] and report.get("interrupted", 0) + report.get("had ended", 0) == 2


def test_a_crowd_on_one_cache(tmp_path: Path) -> None:
    report = robustness.crowd(tmp_path, 6)
    assert report["faults"] == [] and report["right"] == 6


def test_files_that_cannot_grow(tmp_path: Path) -> None:
    report = robustness.starved(tmp_path, (0, 6 << 10))
    assert report["faults"] == [] and report["sizes"][0] == "refused"


def test_full_file_systems(tmp_path: Path) -> None:
    """In a mount namespace of their own, if this user may create one."""
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    code = "import sys; from pathlib import Path; from bench.robustness import starved; print(starved(Path(sys.argv[1]), (4096,), True))"
    script = f"if __name__ == '__main__': {code}"
    inside = ["unshare", "-rm", sys.executable, "-c", script, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(inside, capture_output=True, text=True, env=environment, timeout=500, check=False)
    assert "'faults': []" in done.stdout and "4096: 'refused'" in done.stdout, done.stdout + done.stderr


def test_compiling_many_times_holds_no_more(tmp_path: Path) -> None:
    assert robustness.repeats(tmp_path, 12)["faults"] == []


def test_footprints_that_grow_are_seen(tmp_path: Path) -> None:
    """Tests the check itself: descriptors that are left open are a fault."""
    report = robustness.repeats(tmp_path, 3, leak=True)
    assert any(line.startswith("descriptors") for line in report["faults"])


# Unwritable places


def model() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 5), nn.ReLU()).eval(), torch.randn(2, 7)


def right() -> bool:
    module, x = model()
    with tilewright.compile(module, x) as executable, torch.no_grad():
        torch.testing.assert_close(executable(x), module(x))
    return True


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    """A path at which not even the superuser can make a folder."""
    (tmp_path / "file").write_text("in the way")
    return tmp_path / "file" / "folder"


def test_no_temporary_folder_is_needed(nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert right()  # PyTorch's exporter needs a writable folder when it is imported
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(nowhere))
    monkeypatch.setenv("TMPDIR", str(nowhere))
    assert right()
    worker = Worker(("-c", "print('{}', flush=True); input()"))
    assert worker.ask({}, 60) == {}
    worker.close()
    with pytest.raises(CacheError, match="TMPDIR"):
        Trials(machine("native"), threads=1)


def test_no_cache_is_needed(nowhere: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(nowhere))
    assert right()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "cannot be written" in line and str(nowhere) in line


def test_without_both_there_is_one_clear_error(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(nowhere))
    monkeypatch.setattr(tempfile, "tempdir", str(nowhere))
    monkeypatch.setattr("tilewright.toolchain.cache._private_folder", lambda: Path(tempfile.mkdtemp()))
    with pytest.raises(CacheError, match="set TILEWRIGHT_CACHE or TMPDIR"):
        right()


def test_a_home_that_cannot_be_written_or_is_not_there(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TILEWRIGHT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(nowhere))
    assert right()

    def without_name() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", without_name)
    assert settings.cache_directory() == Path(tempfile.gettempdir()) / f"tilewright-{os.getuid()}"


def test_a_cache_in_the_home_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", "~nobody-of-that-name/cache")
    with pytest.raises(UnsupportedOption, match="TILEWRIGHT_CACHE='~nobody-of-that-name/cache'"):
        right()


def test_processes_in_other_folders_have_the_same_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEWRIGHT_CACHE", "relative")
    monkeypatch.setenv("TILEWRIGHT_CC", "./compiler")
    program = "from tilewright import settings; from tilewright.tuning.workers import serve; serve(lambda message: {'found': [str(settings.cache_directory()), settings.c_compiler()]})"
    worker = Worker(("-c", program))
    try:
        assert worker.ask({}, 60)["found"] == [str(tmp_path / "relative"), str(tmp_path / "compiler")]
    finally:
        worker.close()


def test_a_process_that_does_not_read_is_not_waited_for() -> None:
    worker = Worker(("-c", "import time; time.sleep(30)"))
    try:
        with pytest.raises(WorkerLost, match="no answer within 0.3 s"):
            worker.ask({"long": "x" * (1 << 20)}, 0.3)
    finally:
        worker.close()


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("TILEWRIGHT_CC", raising=False)
    with pytest.raises(CompilerMissing, match="looked for gcc, clang, cc"):
        right()
    assert not list(tmp_path.rglob("kernel.c"))
