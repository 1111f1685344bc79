"""Progress and times of a compilation, and how the command line shows them."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

import tilewright
from tilewright import cli, cli_compile, cli_output
from tilewright.cli import main
from tilewright.stages import STAGES, Stages
from tilewright.text import stacked


def test_time_inside_a_stage_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    stages = Stages()
    with stages.stage("partition"):
        now[0] += 1
    now[0] += 100  # between stages
    with stages.stage("code generation"):
        now[0] += 2
        for _ in range(2):
            with stages.stage("choice"):
                now[0] += 10
        now[0] += 4
        with pytest.raises(KeyError), stages.stage("choice"):
            now[0] += 1
            raise KeyError
    assert stages.seconds == {"partition": 1, "code generation": 6, "choice": 21}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    return nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 1)), (torch.randn(1, 8, 12, 12),)


def test_progress_counts_candidates_and_kernels(model: tuple[nn.Module, tuple[torch.Tensor, ...]]) -> None:
    said: list[tuple[str, int, int]] = []
    start = time.perf_counter()
    executable = tilewright.compile(*model, threads=1, progress=lambda *state: said.append(state))
    took = time.perf_counter() - start
    assert list(dict.fromkeys(stage for stage, _, _ in said)) == ["export", "partition", "choice", "compile", "packing"]
    ranked = [done for stage, done, total in said if stage == "choice" and total == 0]
    assert ranked == sorted(ranked) and ranked[-1] >= sum(row.space.generated for row in executable.plan.rows) > 0
    built = [(done, total) for stage, done, total in said if stage == "compile"]
    assert built[-1] == (len(executable.image.program.kernels),) * 2
    assert set(executable.compile_seconds) == set(STAGES) - {"measure", "partitions"}
    assert sum(executable.compile_seconds.values()) <= took and min(executable.compile_seconds.values()) >= 0


@pytest.mark.slow
def test_measured_candidates_are_counted(model: tuple[nn.Module, tuple[torch.Tensor, ...]], tmp_path: Path) -> None:
    said: list[tuple[str, int, int]] = []
    executable = tilewright.compile(*model, threads=1, trials=2, records=tmp_path / "records.sqlite", progress=lambda *state: said.append(state))
    measured = [(done, total) for stage, done, total in said if stage == "measure"]
    assert [done for done, _ in measured] == list(range(len(measured))) and len(measured) > 2
    totals = [total for _, total in measured]
    assert totals == sorted(totals) and totals[-1] == measured[-1][0]  # the regions of a chain one after another are added once these are measured
    assert executable.compile_seconds["measure"] > 0


def test_compile_says_what_took_how_long(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cli_output, "PIPE_COLUMNS", 80)
    monkeypatch.setattr(cli_compile, "SHOWN_SECONDS", 0.0)
    assert main(["compile", "zoo:lenet5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (start,) = (number for number, line in enumerate(lines) if line.startswith("compiled in "))
    text = " ".join(lines[start:])
    assert "PyTorch and the model " in text and "export " in text and "compile " in text and text.index("export") < text.index("compile ")
    assert all(len(line) <= 80 for line in lines) and "hottest: " in lines[3]


MODEL = "zoo:lenet5"
COMMANDS = [
    "", "compile", "bench", "explain", "profile", "verify", "digest", "batch", "tune", "records", "train", "calibrate", "targets", "cache",
]  # fmt: skip


@pytest.mark.in_turns(9)
@pytest.mark.parametrize(
    "command",
    [
        ["verify", MODEL],
        ["bench", MODEL, "--against", "eager,nothing-like-this"],
        ["targets"],
        ["targets", "h200", "--sources"],
        ["bench", MODEL, "--against", "eager", "--rounds", "2", "--seconds", "0.001"],
        ["explain", MODEL, "--against", MODEL],
        ["explain", MODEL, "--fusion"],
        ["explain", MODEL, "--code"],
        *(["explain", MODEL, "--code", number] for number in ("1", "2", "4")),
        ["explain", MODEL, "--target", "h200", "--code=2"],
        *([*name.split(), "--help"] for name in COMMANDS),
    ],
    ids=" ".join,
)
def test_tables_fit_80_columns(command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def terminal() -> Console:
        return Console(file=sys.stdout, force_terminal=True, color_system=None, width=80, highlight=False, markup=False)

    monkeypatch.setattr(cli, "output_console", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    code = main(command)
    printed = capsys.readouterr()
    assert (code == 2) == ("nothing-like-this" in command[-1])
    assert all(len(line) <= 80 for line in printed.out.splitlines()), printed.out


def test_the_display_counts_with_and_without_a_total(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(cli_output, "output_console", lambda error: Console(file=screen, force_terminal=True, width=80))
    with cli_output.progress_bar("loading PyTorch") as show:
        show("compiling kernels [1]", 3, 12)
        time.sleep(0.3)
        show("ranking candidates", 123456, 0)
        time.sleep(0.3)
    text = screen.getvalue()
    assert "loading PyTorch" in text and "compiling kernels [1]" in text and "3/12" in text and "123,456" in text and "123,456/" not in text


def test_the_display_is_drawn_without_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import, or measurements on all cores, may keep the thread that draws from running."""
    screen = io.StringIO()
    monkeypatch.setattr(cli_output, "output_console", lambda error: Console(file=screen, force_terminal=True, width=80))
    monkeypatch.setattr("rich.live._RefreshThread.run", lambda thread: None)
    with cli_output.progress_bar("loading PyTorch") as show:
        assert "loading PyTorch" in screen.getvalue()
        show("measuring in turns", 1, 20)
        assert "measuring in turns" in screen.getvalue() and "1/20" in screen.getvalue()
        monkeypatch.setattr(cli_output, "REFRESH_SECONDS", 0.0)
        show("measuring in turns", 2, 20)
        assert "2/20" in screen.getvalue()


LOADING = """
import importlib.abc, io, os, sys
from rich.console import Console
from tilewright import cli, cli_output
screen, made = io.StringIO(), cli_output.output_console
cli_output.output_console = lambda error=False: Console(file=screen, force_terminal=True, width=80) if error else made()
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            os.write(1, b"shown" if screen.getvalue() else b"silent")  # `print` would go to the display
            os._exit(0)
sys.meta_path.insert(0, Finder())
print("not imported", cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", ["compile zoo:lenet5", "compile zoo:lenet5 -o OUT.zip", "explain zoo:lenet5", "explain zoo:lenet5 --profile", "explain A.zip",
                                     "profile A.zip", "verify A.zip", "verify A.zip --no-run", "digest A.zip", "bench zoo:lenet5", "tune zoo:lenet5",
                                     "batch zoo:lenet5 --targets native -o OUT", "train --target h200 --collect OUT.gz", "calibrate"])  # fmt: skip
def test_no_command_loads_pytorch_in_silence(command: str, tmp_path: Path) -> None:
    """Loading takes more than a second."""
    done = subprocess.run([sys.executable, "-c", LOADING, *command.split()], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "shown", (done.stdout, done.stderr)


def test_listing_records_does_without_pytorch(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LOADING, "records"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.endswith("not imported 0\n"), (done.stdout, done.stderr)


def test_artifacts_are_written_and_read_with_progress(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    screen, place = io.StringIO(), tmp_path / "made.zip"
    made = cli_output.output_console
    monkeypatch.setattr(cli_output, "output_console", lambda error=False: Console(file=screen, force_terminal=True, width=80) if error else made())
    assert main(["compile", "zoo:lenet5", "-o", str(place)]) == 0 and "writing made.zip" in screen.getvalue()
    for command in (["digest"], ["explain"], ["verify"], ["verify", "--no-run"], ["profile", "--repetitions", "1"]):
        screen.seek(0)
        screen.truncate()
        assert main([command[0], str(place), *command[1:]]) == 0 and "reading made.zip" in screen.getvalue()


LENGTHS = st.lists(st.tuples(*[st.integers(1, 4), st.integers(1, 10), *[st.integers(1, 30)] * 5]), max_size=4)


@given(LENGTHS, st.integers(80, 120))
def test_a_wide_table_is_stacked(rows: list[tuple[int, ...]], width: int) -> None:
    cells = [[letter * length for letter, length in zip("abcdefg", row, strict=True)] for row in rows]
    headings = [f"column{number}" for number in range(7)]
    lines = list(stacked(headings, cells, ("column1",), width, keys=2))
    assert all(len(line) <= width for line in lines)
    words = " ".join(lines).split()
    assert all(words.count(cell) >= 1 for row in cells for cell in row) and all(heading in words for heading in headings)
    unlimited = list(stacked(headings, cells, ("column1",), None, keys=2))
    assert len(unlimited) == len(rows) + 1 and (lines == unlimited or max(map(len, unlimited)) > width)
