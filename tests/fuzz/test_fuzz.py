"""Mutated files of each kind: 27, the same in each run, and twenty times as many with the slow tests. ``python -m tests.fuzz.campaign`` runs more."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz import records_files
from tests.fuzz.artifact_changes import MEANT
from tests.fuzz.artifact_files import placed
from tests.fuzz.harness import FAULTS, SUBJECTS, Case, Server
from tests.sample_artifacts import files, manifest_of, signed

CASES = {"pt2_files": 3}  # almost a second each: PyTorch decomposes accepted programs
ELSE = 8


@pytest.mark.parametrize(
    ("what", "verdict"),
    [
        ("nothing", "accepted"),
        ("refuse", "refused"),
        ("lines", "several lines"),
        ("raise", "raw exception"),
        ("memory", "raw exception"),
        ("exit", "raw exception"),
        ("crash", "crash"),
        ("vanish", "crash"),
        ("hang", "hang"),
        ("break", "broken promise"),
        ("payload", "foreign code"),
    ],
)
def test_the_harness_notices(misbehaving: Server, what: str, verdict: str) -> None:
    outcome = misbehaving.run({"do": what.encode()})
    assert outcome.verdict == verdict, outcome
    assert outcome.fault == (verdict in FAULTS)


@pytest.fixture(scope="module")
def misbehaving() -> Iterator[Server]:
    with Server("misbehaving", seconds=3) as server:
        yield server


@pytest.fixture(scope="module")
def served() -> Iterator[Callable[[str], Server]]:
    """The server of a subject, started when a test first asks for it."""
    with ExitStack() as stack:
        yield cache(lambda subject: stack.enter_context(Server(subject)))


def test_results_that_are_not_those_of_the_graph_are_noticed(served: Callable[[str], Server]) -> None:
    held = files("convolutions")
    manifest = manifest_of(held)
    node = next(node for node in manifest["program"]["graph"]["nodes"] if node["operator"] == "relu")
    for operator, verdict in (("relu", "accepted"), ("tanh", "broken promise")):  # the kernel is unchanged
        node["operator"] = operator
        assert served("artifact_files").run(placed({**signed(held, manifest), MEANT: b""})).verdict == verdict


def test_an_unchanged_record_is_imported(served: Callable[[str], Server]) -> None:
    """Otherwise all mutants of lines would be refused for the same reason, and nothing behind it would be tested."""
    data = json.dumps(records_files.sound_line(records_files.measurements()[0])).encode()
    outcome = served("records_files").run({"lines": data})
    assert outcome.verdict == "accepted", outcome


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_mutated_files(subject: str, times: int, served: Callable[[str], Server]) -> None:
    @settings(max_examples=times * CASES.get(subject, ELSE), deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(importlib.import_module(f"tests.fuzz.{subject}").cases())
    def check(case: Case) -> None:
        outcome = served(subject).run(case)
        assert not outcome.fault, f"{outcome.verdict}: {outcome.detail}"

    check()
