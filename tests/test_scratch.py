"""Folders for temporary files: exclusive while the process lives, and removed by the next process if it was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tilewright.system.scratch import PREFIX, Scratch

HELD = "import sys; from tilewright.system.scratch import Scratch; held = Scratch(sys.argv[1]); print(held.path, flush=True); sys.stdin.read()"


def holder(place: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a folder until its input ends."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", HELD, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_goes_with_its_use(tmp_path: Path) -> None:
    with Scratch(str(tmp_path)) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_leaves_is_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "other")
    (tmp_path / f"{PREFIX}file").write_text("")
    with Scratch(str(tmp_path)) as own:
        process, folder = holder(tmp_path)
        (folder / "file").write_text("")
        Scratch(str(tmp_path)).close()
        assert own.is_dir() and (folder / "file").exists()  # both processes live
        process.kill()
        process.communicate()
        assert folder.is_dir()
        Scratch(str(tmp_path)).close()
        assert own.is_dir() and not folder.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"other", f"{PREFIX}link", f"{PREFIX}file"}


def test_folders_of_other_users_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{PREFIX}theirs").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        Scratch(str(tmp_path)).close()
    assert (tmp_path / f"{PREFIX}theirs").is_dir()
    Scratch(str(tmp_path)).close()
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_made_at_once_are_not_taken_for_abandoned(tmp_path: Path) -> None:
    missing = []

    def work() -> None:
        for _ in range(50):
            with Scratch(str(tmp_path)) as folder:
                try:
                    (folder / "file").write_text("")
                except FileNotFoundError as error:
                    missing.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert missing == [] and list(tmp_path.iterdir()) == []
