"""External programs end in time, together with all processes that they started; files that another user may have written are not read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tilewright.system.private_files import NotPrivate, make_folder, read_private, require_private, write_private
from tilewright.system.programs import ProgramHung, Programs, ProgramStopped, run_program
from tilewright.tuning.workers import Worker, WorkerLost

SHELL = ("/bin/sh", "-c")
PATIENCE = 60.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def gone(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def number_in(path: Path) -> int:
    until(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


def test_what_a_program_writes_and_how_it_ends(tmp_path: Path) -> None:
    done = run_program([*SHELL, "pwd; echo words >&2; cat; exit 3"], PATIENCE, tmp_path)  # cat finds no input
    assert (done.status, done.output, done.errors, done.cut) == (3, f"{tmp_path}\n", "words\n", False)
    done = run_program([*SHELL, "head -c 3000000 /dev/zero; head -c 5 /dev/zero >&2; kill -9 $$"], PATIENCE, output_bytes=1000)
    assert (done.status, len(done.output), len(done.errors), done.cut) == (-9, 1000, 5, True)
    assert run_program([*SHELL, "exec >&- 2>&-; sleep 0.2; exit 4"], PATIENCE).status == 4  # it closes its output first
    with pytest.raises(FileNotFoundError):
        run_program(["/no/such/program"], PATIENCE)


def test_a_program_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    with pytest.raises(ProgramHung, match=r"sh did not end within 0.5 s"):
        run_program([*SHELL, f"sleep 1000 & echo $! > {tmp_path}/child; trap '' TERM; sleep 1000"], 0.5)
    until(lambda: gone(number_in(tmp_path / "child")))
    with pytest.raises(ProgramHung):
        run_program([*SHELL, "while :; do echo words; done"], 0.5, output_bytes=100)


def test_what_is_left_behind_is_not_waited_for(tmp_path: Path) -> None:
    done = run_program([*SHELL, f"sleep 1000 & echo $! > {tmp_path}/child; echo done"], PATIENCE)  # the child holds the pipes
    assert done.output == "done\n"
    until(lambda: gone(number_in(tmp_path / "child")))


def test_programs_are_stopped_from_another_thread(tmp_path: Path) -> None:
    programs, found = Programs(), []

    def work(number: int) -> None:
        try:
            programs.run([*SHELL, f"echo $$ > {tmp_path}/{number}; sleep 1000"], PATIENCE)
        except ProgramStopped as error:
            found.append(str(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    numbers = [number_in(tmp_path / str(number)) for number in range(3)]
    programs.stop()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(found) == 3 and all(map(gone, numbers))
    with pytest.raises(ProgramStopped):
        programs.run([*SHELL, "true"], PATIENCE)


KILLED = """
import sys, threading
from tilewright.system.programs import run_program
threading.Thread(target=run_program, args=(["/bin/sh", "-c", "trap '' TERM HUP; (echo $$ > first; sleep 1000) & sleep 1000 & echo $! > second; wait"], 1000.0)).start()
"""


def test_a_program_does_not_outlive_the_process_that_runs_it(tmp_path: Path) -> None:
    """The process is killed with SIGKILL, which allows no clean-up; the thread that started the program does not matter."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", KILLED], cwd=tmp_path, env=environment)
    numbers = [number_in(tmp_path / name) for name in ("first", "second")]
    assert not any(map(gone, numbers))
    process.kill()
    process.wait()
    for number in numbers:
        until(partial(gone, number))


CHILD = """
import subprocess, sys, time
from tilewright.tuning.workers import serve
from tilewright.system.programs import run_program
def answer(message):
    run_program(["/bin/sh", "-c", f"echo $$ > {message['path']}; sleep 1000"], 1000.0)
serve(answer)
"""


def test_a_worker_is_ended_with_the_programs_that_it_runs(tmp_path: Path) -> None:
    worker = Worker(("-c", CHILD))
    with pytest.raises(WorkerLost, match="no answer within 3 s"):
        worker.ask({"path": str(tmp_path / "number")}, 3)
    assert gone(number_in(tmp_path / "number"))
    worker.close()


INTERRUPTED = """
import sys, tilewright.toolchain
from pathlib import Path
from tilewright.hardware import machine
from tilewright.toolchain import KernelCache, SourceFile, compile_kernels
sources = [SourceFile("k", f"int k(void) {{ return {i}; }}", "c", ("k",)) for i in range(3)]
compile_kernels(sources, machine("native"), KernelCache(Path(sys.argv[1])), workers=int(sys.argv[2]))
"""


@pytest.mark.parametrize("workers", ["1", "2"])
def test_an_interruption_ends_the_compilers_and_leaves_nothing(tmp_path: Path, workers: str) -> None:
    slow = tmp_path / "slow-cc"
    slow.write_text(f'#!/bin/sh\ncase "$1" in --version) echo slow 1.0;; *) echo $$ > {tmp_path}/number; sleep 1000;; esac\n')
    slow.chmod(0o755)
    environment = {**os.environ, "TILEWRIGHT_CC": str(slow)}
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path / "kernels"), workers], env=environment, stderr=subprocess.PIPE, text=True
    )
    number = number_in(tmp_path / "number")
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=PATIENCE)[1]
    assert gone(number)
    assert not [path for path in (tmp_path / "kernels").rglob("*") if path.is_file()]


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o277])
def test_folders_are_the_users_alone_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        make_folder(tmp_path / "a" / "b")
        make_folder(tmp_path / "a" / "b" / "c")
        make_folder(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")} == {0o700}
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        make_folder(tmp_path / "file" / "inside")


def test_what_others_may_have_written_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, folder = tmp_path / "root", tmp_path / "root" / "folder"
    make_folder(folder)
    path = folder / "file"
    path.write_bytes(b"content")
    path.chmod(0o444)
    assert read_private(path, root) == b"content"
    for place in (path, folder, root):
        before = place.stat().st_mode
        for mode in (0o720, 0o702):
            place.chmod(mode)
            with pytest.raises(NotPrivate, match="can be written by other users") as caught:
                read_private(path, root)
            assert caught.value.place == place
        place.chmod(before)
    (tmp_path / "link").symlink_to(root)
    assert read_private(tmp_path / "link" / "folder" / "file", tmp_path / "link") == b"content"  # the root may be a link
    (root / "way").symlink_to(folder)
    with pytest.raises(NotPrivate, match="is a link"):
        read_private(root / "way" / "file", root)
    (folder / "link").symlink_to(path)
    with pytest.raises(OSError):
        read_private(folder / "link", root)
    os.mkfifo(folder / "pipe", 0o600)
    for wrong in ("pipe", "missing", "."):
        with pytest.raises(OSError):
            read_private(folder / wrong, root)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(NotPrivate, match="belongs to another user"):
        require_private(root, root)


def test_files_are_written_whole_or_not_at_all_and_for_their_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "file"
    before = os.umask(0)
    try:
        write_private(path, b"first")
        write_private(path, b"second")
    finally:
        os.umask(before)
    assert read_private(path, path.parent) == b"second" and path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700

    def full(*_: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="no space"):
            write_private(path, b"third")
    assert [entry.name for entry in path.parent.iterdir()] == ["file"] and path.read_bytes() == b"second"
    path.parent.chmod(0o777)
    with pytest.raises(NotPrivate, match="can be written by other users"):
        write_private(path, b"third")
