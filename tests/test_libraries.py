"""Mapping of shared objects: by content, once, and independent of later changes to files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tilewright.system.libraries import Libraries, mapped

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")


def shared_object(folder: Path, value: int) -> bytes:
    """A shared object whose function `answer` returns the value."""
    (folder / "k.c").write_text(f"int answer(void) {{ return {value}; }}\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,same.so", "-o", "k.so", "k.c"], cwd=folder, check=True)
    return (folder / "k.so").read_bytes()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_each_content_is_mapped_once_and_apart(tmp_path: Path) -> None:
    contents = [shared_object(tmp_path, value) for value in range(5)]
    before = open_files()
    loaded = [mapped(content, f"kernel/{value}") for value, content in enumerate(contents)]
    assert [library.answer() for library in loaded] == [0, 1, 2, 3, 4]  # descriptors, and so file names, were reused
    assert all(mapped(bytes(bytearray(content)), "another") is library for content, library in zip(contents, loaded, strict=True))
    assert open_files() == before
    maps = Path("/proc/self/maps").read_text()
    assert all(f"/memfd:kernel_{value} " in maps for value in range(5))


def test_garbage_is_an_error_and_leaves_nothing_open() -> None:
    before = open_files()
    for content in (b"", b"garbage", b"\x7fELF" + b"\0" * 200):
        with pytest.raises(OSError):
            mapped(content, "garbage")
    assert open_files() == before


def test_without_anonymous_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> int:
        raise PermissionError(13, "vm.memfd_noexec")

    monkeypatch.setattr(os, "memfd_create", denied)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = Libraries()
    assert [own.of(shared_object(tmp_path, value), "kernel").answer() for value in (31, 32, 33)] == [31, 32, 33]


SCRIPT = """
import os, sys, torch, tilewright
from pathlib import Path
torch.manual_seed(0)
model, x = torch.nn.Sequential(torch.nn.Linear(9, 7), torch.nn.ReLU()).eval(), torch.randn(3, 9)
for length in (0, 1, 5000):
    folder = os.environ["TILEWRIGHT_CACHE"] = f"{sys.argv[1]}/{length}"
    executable = tilewright.compile(model, x)
    binaries = list(Path(folder).rglob("kernel.so"))
    assert len(binaries) >= 2
    for binary in binaries:
        with open(binary, "r+b") as file:  # in place: the inode stays
            file.truncate(length) if length else file.write(os.urandom(binary.stat().st_size))
    torch.testing.assert_close(executable(x), model(x))
    again = tilewright.compile(model, x)  # built again, the same name and content as before
    torch.testing.assert_close(again(x), model(x))
print("right")
"""


def test_entries_that_are_damaged_in_place_harm_no_process_that_uses_them(tmp_path: Path) -> None:
    """Whether they are overwritten, or cut to a byte or to a part."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == "right\n", done.stderr
    assert done.stderr.count("building it again") >= 3 * 2
