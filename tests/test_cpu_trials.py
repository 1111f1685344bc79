"""Trials on this CPU: candidates compiled, checked and timed by child processes, recorded, and chosen by later compilations."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tilewright
from tilewright.errors import TargetNotPresent
from tilewright.hardware import machine
from tilewright.selection.choice import rank
from tilewright.toolchain import SourceFile
from tilewright.toolchain.compilers import CCompiler
from tilewright.tuning import serialisation
from tilewright.tuning.compile_worker import Server as Compiler
from tilewright.tuning.cpu_trial_worker import CpuServer, Loaded, Replay
from tilewright.tuning.problems import convolution_problem, key_of
from tilewright.tuning.records import Records
from tilewright.tuning.trials import Job, Trials
from tilewright.tuning.tuning import from_records, recorded_as, tune

NATIVE = machine("native")
SMALL = convolution_problem(32, 32, 9, 10, 3)


def spread(count: int) -> list[object]:
    """Schedules from all over the ranking, of every schema."""
    ranking = rank(SMALL, NATIVE, threads=2)
    positions = [int(start) + at for start in ranking.starts[:-1] for at in range(count)]
    return [ranking.choice(position).schedule for position in positions]


def prepared(schedule: object, folder: Path) -> tuple[CpuServer, dict[str, Any]]:
    """A measuring server with the problem SMALL, and the compiling server's answer for the schedule."""
    compiler, server = Compiler(), CpuServer(1)
    problem = serialisation.encode(SMALL)
    compiler({"do": "machine", "machine": serialisation.encode(NATIVE)})
    compiler({"do": "problem", "problem": problem})
    server({"do": "start", "machine": serialisation.encode(NATIVE)})
    server({"do": "problem", "problem": problem, "seed": 3})
    return server, compiler({"do": "compile", "schedule": serialisation.schedule_text(schedule), "folder": str(folder)})


def test_candidates_are_checked_and_timed() -> None:
    schedules = spread(2)
    with Trials(NATIVE, threads=2) as trials:
        outcomes = {id(outcome.job.schedule): outcome for outcome in trials.measure([Job(SMALL, schedule) for schedule in schedules], "network")}
        assert len(outcomes) == len(schedules)
        for outcome in outcomes.values():
            assert outcome.status == "measured", outcome.reason
            assert outcome.timing is not None and outcome.relative_error is not None
            assert 0 < outcome.timing.lower <= outcome.timing.median and outcome.relative_error < 1e-5
            assert "2 threads" in outcome.environment["gpu"] and outcome.environment["compiler"]
        again = trials.remeasure([Job(SMALL, schedule) for schedule in schedules[:2]], rounds=3)
        assert [outcome.timing and outcome.timing.count for outcome in again] == [3, 3]


def test_an_interrupted_call_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a simulated clock: calls of 3 s, except for a second one of 50; writing activations before each takes 7."""
    now = [0.0]
    lengths = iter((3.0, 50.0, 3.0, 3.0, 3.0))

    class Written:
        def mul_(self, factor: int) -> None:
            now[0] += 7.0

    def call(*_: object) -> None:
        now[0] += next(lengths)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    loaded = Loaded([(call, [(), ()], None)], [Written()], [])  # type: ignore[list-item]
    assert Replay(loaded, 5, 2).seconds() == 3.0
    assert now[0] == 62.0 + 5 * 7.0


@pytest.mark.parametrize(("mode", "writes"), [("network", 3), ("warm", 0), ("cold", 0)])
def test_activations_are_written_before_each_call_as_in_a_network(tmp_path: Path, mode: str, writes: int) -> None:
    """Weights are not written, and no value changes."""
    server, good = prepared(spread(1)[0], tmp_path)
    loaded = server.load(good["program"], mode)
    assert server.problem is not None
    rows = {name: server.problem.rows(name, {"storage": {}}) for name in SMALL.region.inputs}
    before = {name: (own.clone(), own._version) for name, own in rows.items()}
    assert server.make_replay(loaded, 3).seconds() > 0
    (activation,) = {name for name in SMALL.region.inputs if name not in SMALL.constants}
    for name, own in rows.items():
        value, version = before[name]
        assert own._version - version == (writes if name == activation else 0)
        assert torch.equal(own, value)


def test_a_wrong_candidate_is_rejected(tmp_path: Path) -> None:
    """The code of a convolution with one row of taps fewer runs, but is not timed."""
    server, good = prepared(spread(1)[0], tmp_path)
    assert server({"do": "trial", "program": good["program"], "mode": "cold"})["times"]
    source = tmp_path / "kernel.c"
    text = source.read_text()
    assert "< 3; " in text
    source.write_text(text.replace("< 3; ", "< 2; ", 1))
    made = tmp_path / "wrong"
    made.mkdir()
    (made / "kernel.c").write_text(source.read_text())
    c_compiler = CCompiler.find(NATIVE)
    assert c_compiler.compile(SourceFile("trial", "", "c", ()), made).succeeded
    wrong = {**good["program"], "binary": str(made / c_compiler.binary_name)}
    answer = server({"do": "trial", "program": wrong, "mode": "cold"})
    assert answer["wrong"] and "relative error" in answer["error"] and "times" not in answer


def test_records_decide_and_are_those_of_this_cpu_and_these_threads(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()).eval()
    x = torch.randn(1, 3, 12, 13)
    path = tmp_path / "records.sqlite"
    tuned = tilewright.compile(module, (x,), target="native", threads=2, trials=2, records=path)
    with torch.no_grad():
        torch.testing.assert_close(tuned(x), module(x), rtol=1e-4, atol=1e-5)
    tuned.close()
    with Records(path) as records:
        entries = list(records.all())
        assert entries and {entry.machine for entry in entries} == {recorded_as(NATIVE, 2)} != {recorded_as(NATIVE, 1)}
        assert {entry.status for entry in entries} == {"measured"}
        known = len(entries)
    again = tilewright.compile(module, (x,), target="native", threads=2, trials=2, records=path)
    again.close()
    with Records(path) as records:
        assert len(records) == known


def test_tuning_takes_what_was_fastest(tmp_path: Path) -> None:
    with Records(tmp_path / "records.sqlite") as records:
        counts: list[tuple[str, int, int]] = []
        done = tune(
            [SMALL], NATIVE, 3, records, threads=2,
            report=lambda done, total, _: counts.append(("measured", done, total)), compiled=lambda done, total: counts.append(("compiled", done, total)),
        )  # fmt: skip
        assert (done.problems, done.failed) == (1, 0) and done.measured == 3
        assert counts == [("measured", 0, 3), *(("compiled", n, 3) for n in (1, 2, 3)), *(("measured", n, 3) for n in (1, 2, 3))]
        standing = records.standing(key_of(SMALL), recorded_as(NATIVE, 2))
        assert len(standing) == 3 and [entry.seconds for entry in standing] == sorted(entry.seconds for entry in standing)
        ranking = rank(SMALL, NATIVE, threads=2)
        assert all(ranking.find(serialisation.schedule_of(entry.schedule)) is not None for entry in standing)
        chosen = from_records(records)(SMALL, NATIVE, 2)
        assert chosen.measured_seconds == standing[0].seconds and serialisation.schedule_text(chosen.schedule) == standing[0].schedule
        assert from_records(records)(SMALL, NATIVE, 1).measured_seconds is None


def test_compilers_that_hang_on_three_candidates_do_not_stop_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"
    calls.mkdir()
    hanging = tmp_path / "hanging-cc"
    hanging.write_text(f"""#!/bin/sh
case $1 in --version) echo 1.0; exit;; esac
touch {calls}/$$
[ $(ls {calls} | wc -l) -le 3 ] && sleep 1000
exec {CCompiler.find(NATIVE).path} "$@"
""")
    hanging.chmod(0o755)
    monkeypatch.setenv("TILEWRIGHT_CC", str(hanging))
    monkeypatch.setenv("TILEWRIGHT_COMPILE_SECONDS", "2")
    with Records(tmp_path / "records.sqlite") as records:
        done = tune([SMALL], NATIVE, 5, records, start=lambda: Trials(NATIVE, compile_workers=1, threads=1))
        assert (done.measured, done.failed) == (2, 3)
        reasons = [entry.reason for entry in records.all() if entry.status == "failed"]
        assert all("does not compile" in reason and "did not end within 2 s" in reason for reason in reasons)


def test_another_cpu_cannot_be_measured_here() -> None:
    with pytest.raises(TargetNotPresent, match="not here"):
        Trials(machine("neoverse-n1"))
