"""Profiles: what they measure and say, their traces, names in PyTorch's profiler, and the events of GPUs."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tilewright
from tests import test_library
from tests.runtime_programs import ProgramBuilder, chain
from tests.test_gpu_runtime import FakeStream, fake_engine, stream
from tilewright.cli import main
from tilewright.cli_model import runnable
from tilewright.errors import InvalidInput, UnsupportedOption
from tilewright.ir.region import Program
from tilewright.runtime.examination import WholeCalls
from tilewright.runtime.executable import Executable
from tilewright.runtime.loadable import loadable
from tilewright.runtime.profile import Profile, RegionProfile, Span, profile_of

__all__ = ["stream"]


def mixed() -> Executable:
    """Two kernels, of which one runs three times, an operator of PyTorch, and an alias without code."""
    builder = ProgramBuilder({"x": (64,)})
    builder.kernel("relu", ("x",), "a", (64,), "for (int i = 0; i < 64; i++) y[i] = x0[i] > 0 ? x0[i] : 0;", repeat=3, scalars=1)
    builder.alias("view", "a", (8, 8))
    builder.torch("aten.sin.default", ((("input", 0),), {}), ("a",), {"b": ((64,), "f32")})
    builder.kernel("neg", ("b",), "c", (64,), "for (int i = 0; i < 64; i++) y[i] = -x0[i];")
    return builder.executable(("c",))


@pytest.mark.parametrize("compiled", [True, False])
def test_a_profile_of_kernels_and_operators(compiled: bool) -> None:
    exe = mixed()
    if not compiled:
        exe._engine.library.runner = None  # type: ignore[union-attr]  # as without a C compiler
    x = torch.randn(64)
    expected = exe(x)
    profile = exe.profile(x, repetitions=5)
    assert [(region.number, region.name, region.kind) for region in profile.regions] == [
        (1, "region0", "map"), (2, "region1", "alias"), (3, "region2", "torch"), (4, "region3", "map"),
    ]  # fmt: skip
    assert all(len(region.seconds) == 5 and min(region.seconds) >= 0 for region in profile.regions)
    assert profile.regions[0].median_seconds > 0 and profile.regions[2].median_seconds > 0 and len(profile.call_seconds) == 5
    assert profile.regions[2].operators == ("aten.sin.default",) and profile.regions[0].kernels == ("kernel0",)
    moments = [moment for span in profile.timeline for moment in (span.start, span.end)]
    assert moments == sorted(moments) and moments[0] >= 0
    assert torch.equal(exe(x), expected)  # the clock is off again, and nothing has changed


def test_nothing_is_changed_and_bad_arguments_are_refused() -> None:
    builder = ProgramBuilder({"x": (4,)})
    builder.kernel("add", ("x",), "y", (4,), "for (int i = 0; i < 4; i++) y[i] = x0[i] + 1;")
    exe = builder.executable(("y",), builder.signature(1, [(0, 0)]))
    x = torch.zeros(4)
    exe.profile(x, repetitions=2)
    assert not x.any()
    exe(x)
    assert x.eq(1).all()  # a call changes its input
    with pytest.raises(UnsupportedOption, match="repetitions = 0"):
        exe.profile(x, repetitions=0)
    with pytest.raises(InvalidInput):
        exe.profile(torch.zeros(5))


def example(names: tuple[str, ...] = ("first", "a long name of some region in a network")) -> Profile:
    regions = tuple(
        RegionProfile(i + 1, name, "map", ("relu",), "plain", ("k",), 0.05 * i, (2e-6 + i / 10, 4e-6 + i / 10, 3e-6 + i / 10))
        for i, name in enumerate(names)
    )
    timeline = (Span(0, 0.1, 0.2), Span(1, 0.2, 1.2), Span(1, 1.3, 1.4))
    return Profile("machine", regions, (0.11, 0.13, 0.12), timeline, (0.15, 0.14, 0.19))


def test_the_table_has_80_columns_and_says_what_is_outside_of_regions() -> None:
    profile = example()
    text = str(profile)
    slow = replace(profile, regions=tuple(replace(region, kind="row reduction", predicted_seconds=1e-7) for region in profile.regions))
    assert max(map(len, [*text.splitlines(), *str(slow).splitlines()])) <= 80
    assert [region.number for region in profile.hottest] == [2, 1]
    assert profile.region_seconds == pytest.approx(0.1 + 6e-6) and profile.outside_seconds == pytest.approx(0.05 - 4e-6)
    assert "calls without clocks 120,000.0 us (+- 4.2 %)" in text and "calls with clocks 150,000.0 us" in text
    assert "outside of regions 49,996.0 us (33.3 %)" in text  # of the same calls, whatever those without clocks took
    assert profile.regions[0].quartile_seconds == pytest.approx((2.5e-6, 3.5e-6))


def test_nothing_negative_is_outside_of_a_gpus_regions() -> None:
    profile = replace(example(), clocked_seconds=(), clock_seconds=2e-6)
    assert profile.outside_seconds == pytest.approx(0.02 - 6e-6)
    assert "outside of regions 19,994.0 us (16.7 %)" in str(profile) and "each region: 2.0 us, an empty pair of events" in str(profile)
    overlapping = replace(profile, call_seconds=(0.06, 0.08, 0.07))
    assert overlapping.outside_seconds == 0
    assert "clocks cost 30,006.0 us: without them regions overlap" in str(overlapping) and "outside" not in str(overlapping)
    assert max(map(len, str(overlapping).splitlines())) <= 80


def test_the_time_of_clocks_is_no_regions() -> None:
    program = loadable(chain(1).program(("r0",)))
    calls = [[Span(0, 0.0, 5.0), Span(2, 5.0, 6.0)], [Span(0, 0.0, 4.0), Span(2, 4.0, 7.0)]]
    profile = profile_of(program, "machine", (9.0, 9.0), calls, clock_seconds=2.0)
    assert [region.seconds for region in profile.regions] == [(3.0, 2.0), (0.0, 1.0)]


def test_what_is_outside_is_of_the_same_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls without clocks may take as long as they like, as they do on a machine with other work."""
    exe = mixed()
    run = exe._run_segments

    def slow(*arguments: Any) -> None:
        time.sleep(0.02)
        run(*arguments)

    monkeypatch.setattr(exe, "_run_segments", slow)
    profile = exe.profile(torch.randn(64), repetitions=3)
    assert min(profile.call_seconds) > 0.02 and len(profile.clocked_seconds) == 3
    assert 0 < profile.outside_seconds < max(profile.clocked_seconds)


def test_the_trace_is_of_the_median_call(tmp_path: Path) -> None:
    calls = [[Span(0, 0.0, end / 2), Span(2, end / 2, end)] for end in (3.0, 9.0, 5.0)]
    program = loadable(chain(1).program(("r0",)))
    profile = profile_of(program, "machine", (1.0,), calls)
    assert [(region.number, region.seconds) for region in profile.regions] == [(1, (1.5, 4.5, 2.5)), (3, (1.5, 4.5, 2.5))]
    profile.save_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    measured = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] == 1]
    assert [(event["name"], event["ts"], event["dur"]) for event in measured] == [("region0", 0, 2.5e6), ("region2", 2.5e6, 2.5e6)]
    assert measured[0]["args"]["predicted us"] == pytest.approx(1) and measured[0]["args"]["operators"] == "mul"
    assert {event["name"] for event in trace["traceEvents"] if event["ph"] == "M"} == {"process_name", "thread_name"}


def test_regions_have_names_in_pytorchs_profiler() -> None:
    exe = mixed()
    x = torch.randn(64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        result = exe(x)
    names = [event.name for event in sorted(profiler.events() or (), key=lambda event: event.time_range.start) if event.name.startswith("region")]
    assert names == ["region0", "region1", "region2", "region3"]
    assert torch.equal(result, exe(x))


def test_a_network_with_a_loop_and_an_operator_of_pytorch() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.linear = nn.LSTM(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cummax(self.linear(self.lstm(x)[0]), -1)[0]

    inputs = (torch.randn(5, 2, 8),)
    exe = tilewright.compile(Net().eval(), inputs, unsupported="warn")
    profile = exe.profile(*inputs, repetitions=3)
    ran = {number for number, region in enumerate(exe.image.program.regions, 1) if region.calls or region.kind == "torch"}
    assert ran <= {region.number for region in profile.regions}
    assert all(region.median_seconds > 0 for region in profile.regions if region.number in ran)
    assert profile.region_seconds > 0


def test_a_librarys_operator_and_the_kernels_after_it_are_one_region(tmp_path: Path) -> None:
    module, inputs = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval(), (torch.randn(4, 16),)
    exe = test_library.compiled(module, inputs, tmp_path / "records.jsonl", "linear")
    program = exe.image.program
    both = next(number for number, region in enumerate(program.regions, 1) if region.library is not None and region.calls)
    profile = exe.profile(*inputs, repetitions=3)
    numbers = [region.number for region in profile.regions]
    assert both in numbers and len(numbers) == len(set(numbers))
    assert sum(span.region + 1 == both for span in profile.timeline) == 2
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        exe(*inputs)
    name = program.regions[both - 1].name
    assert [event.name for event in profiler.events() or ()].count(name) == 1


class FakeEvent:
    """An event of a GPU whose clock counts milliseconds."""

    clock = count()

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.time: int | None = None

    def record(self) -> None:
        self.time = next(FakeEvent.clock)

    def synchronize(self) -> None:
        assert self.time is not None

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.time is not None and end.time is not None
        return float(end.time - self.time)


def test_a_gpu_runs_region_after_region_between_events(stream: FakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    program: Program = chain(1).program(("r0",))
    engine, library = fake_engine(loadable(program))
    idle: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "_sleep", idle.append)
    engine.bind([0x1000, 0x2000])
    library.calls.clear()
    moments = engine.run_timed(0, 3)
    assert library.names().count("cuGraphLaunch") == 3 and len(idle) == 1 and idle[0] > 0
    assert [engine.seconds(start, end) for start, end in zip(moments, moments[1:], strict=False)] == [1e-3] * 3
    engine.finish()
    assert engine.clock_seconds() == 1e-3 and len(idle) == 2


def test_whole_calls_of_a_gpu_are_enqueued_before_it_begins(stream: FakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the clock's ticks are between the events of a call: what runs before it is not timed."""
    engine, library = fake_engine(loadable(chain(1).program(("r0",))))
    order: list[str] = []
    launch = engine.run

    def run(first: int, last: int) -> None:
        order.append("run")
        next(FakeEvent.clock)
        launch(first, last)

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("idle"))
    monkeypatch.setattr(engine, "run", run)
    monkeypatch.setattr(engine, "check_indices", lambda wait: order.append(f"checked {wait}"))
    executable: Any = SimpleNamespace(
        _require_engine=lambda: engine,
        _allocate=lambda: [],
        _admission=SimpleNamespace(addresses=lambda inputs, outputs: [0x1000, 0x2000]),
        _run_segments=lambda engine, inputs, outputs: engine.run(0, 3),
        _segments=[("kernels", 0, 3)],
    )

    def before() -> None:
        order.append("before")
        for _ in range(5):
            next(FakeEvent.clock)

    assert WholeCalls(executable, []).seconds(2, before) == [2e-3, 2e-3]
    assert order == ["idle", "before", "run", "before", "run", "checked True"] and library.names().count("cuGraphLaunch") == 2


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "profiled_model.py").write_text("import torch\ndef model():\n    return torch.nn.Linear(6, 4), torch.randn(2, 6)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    artifact, trace = tmp_path / "linear.zip", tmp_path / "trace.json"
    try:
        assert main(["compile", "profiled_model:model", "-o", str(artifact)]) == 0
    finally:
        sys.modules.pop("profiled_model", None)
    capsys.readouterr()
    assert runnable(Namespace(model=str(artifact), threads=2))[0].threads == 2
    assert main(["profile", str(artifact), "--repetitions", "3", "--trace", str(trace)]) == 0
    out = capsys.readouterr().out
    assert "medians of 3 calls" in out and "linear" in out and str(trace) in out
    assert {event["ph"] for event in json.loads(trace.read_text())["traceEvents"]} == {"M", "X"}
    assert main(["profile", "zoo:lenet5", "--target", "h200"]) == 2
    assert "not here" in capsys.readouterr().err
