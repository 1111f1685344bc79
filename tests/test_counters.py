"""Counters of the processor and the kernel, and what profiles make of them."""

from __future__ import annotations

import mmap
import os
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import tilewright
from tilewright.runtime import examination
from tilewright.runtime.profile import Profile
from tilewright.system import counters
from tilewright.system.counters import EVENTS, Counters, is_hardware

PAGES = 1 << 12


def touched() -> None:
    """Writes to so many pages that the process did not have before."""
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE) as memory:
        for page in range(PAGES):
            memory[page * mmap.PAGESIZE] = 1


def in_a_thread() -> None:
    thread = threading.Thread(target=touched)
    thread.start()
    thread.join()


@pytest.mark.parametrize("run", [touched, in_a_thread])
def test_page_faults_of_all_threads_are_counted(run: object) -> None:
    assert callable(run)
    with Counters() as found:
        if "page faults" in found.missing:
            pytest.skip(f"page faults are not counted here: {found.missing['page faults']}")
        before = found.read()["page faults"]
        run()
        assert found.read()["page faults"] - before >= PAGES / 512  # pages may be large ones
    assert set(found.events) | set(found.missing) == set(EVENTS)


def test_threads_that_run_already_are_counted_too() -> None:
    begin, done = threading.Event(), threading.Event()

    def wait() -> None:
        begin.wait()
        touched()
        done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        with Counters() as found:
            if "page faults" in found.missing:
                pytest.skip(f"page faults are not counted here: {found.missing['page faults']}")
            before = found.read()["page faults"]
            begin.set()
            done.wait()
            assert found.read()["page faults"] - before >= PAGES / 512
    finally:
        begin.set()
        thread.join()


def test_what_cannot_be_counted_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(event: str, thread: int) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(counters, "_open", refused)
    with Counters() as found:
        assert not found.events and found.read() == {}
    assert found.missing["cycles"] == "Permission denied; sysctl kernel.perf_event_paranoid=2 allows them"
    monkeypatch.undo()
    monkeypatch.setattr(sys, "platform", "sunos5")
    with Counters() as found:
        assert "has no perf events" in found.missing["cycles"]


def test_a_share_of_the_time_is_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "read", lambda file, size: np.array([30, 200, 50], np.uint64).tobytes())
    assert counters._Counter("cycles", 0).read() == 120.0
    monkeypatch.setattr(os, "read", lambda file, size: np.array([0, 200, 0], np.uint64).tobytes())
    assert counters._Counter("cycles", 0).read() == 0.0


class Counting:
    """Counters that each reading moves on by 7."""

    def __init__(self, events: tuple[str, ...]) -> None:
        self.events, self.missing = events, {event: "hidden" for event in EVENTS if event not in events}
        self.count = 0.0

    def read(self) -> dict[str, float]:
        self.count += 7.0
        return dict.fromkeys(self.events, self.count)

    def __enter__(self) -> Counting:
        return self

    def __exit__(self, *_: object) -> None: ...


def profile_with(monkeypatch: pytest.MonkeyPatch, *events: str) -> Profile:
    counting = Counting(events)
    monkeypatch.setattr(examination, "Counters", lambda: counting)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10), nn.Softmax(-1))
    executable = tilewright.compile(module, torch.randn(1, 3, 8, 8), "native")
    run = executable._run_region

    def counted(*given: object) -> None:
        counting.count += 5.0
        run(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(executable, "_run_region", counted)
    return executable.profile(torch.randn(1, 3, 8, 8), repetitions=2)


def test_a_profile_lists_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = profile_with(monkeypatch, *EVENTS)
    assert all(dict(region.counts) == dict.fromkeys(EVENTS, 5.0) for region in profile.regions)  # without the 7 of reading
    lines = str(replace(profile, regions=tuple(replace(r, name="a long name of some region") for r in profile.regions))).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.split()[-1] == "1.00" and line.count("5") >= len(EVENTS) for line in lines)
    assert "not counted" not in str(profile)
    arguments = [event["args"] for event in profile.trace()["traceEvents"] if event["ph"] == "X" and event["tid"] == 1]
    assert arguments and all(argument["cycles"] == 5.0 for argument in arguments)


def test_a_profile_says_what_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = profile_with(monkeypatch, "page faults")
    text = str(profile)
    assert f"page faults of a call: {5 * len(profile.regions)}" in text and "per cycle" not in text
    assert "not counted here: instructions, cycles, L1 misses, last-level misses, branch misses\n   (hidden)" in text
    assert [event for event in EVENTS if not is_hardware(event)] == ["page faults"]
    assert str(profile_with(monkeypatch)).count("not counted here") == 1
