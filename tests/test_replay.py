"""`bench.replay`: the decisions of two commits for the same graphs, compared as text."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from bench import replay
from tilewright.compile import read
from tilewright.graph.passes import simplify
from tilewright.partition import plan

TARGETS = ("h200", "x86-avx2")


@pytest.fixture(scope="module")
def decided() -> dict[str, replay.Plain]:
    graph = simplify(read(nn.Sequential(nn.Linear(24, 40), nn.Softmax(-1)).eval(), (torch.ones(8, 24),)).graph)[0]
    with mock.patch.object(plan, "plan_program", partial(plan.plan_program, chains=False)):
        return {"unit": {"graph": {target: replay.planned(graph, target) for target in TARGETS}}}


def test_equal_decisions(decided: dict[str, replay.Plain], capsys: pytest.CaptureFixture[str]) -> None:
    again = json.loads(json.dumps(decided))
    assert not any(replay.compare(decided, again, TARGETS, 2).values())
    assert "==" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", replay.KINDS)
def test_each_difference_is_shown(decided: dict[str, replay.Plain], kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    other = copy.deepcopy(decided)
    plain = other["unit"]["graph"]["h200"]
    region, kernel = plain["regions"][0], next(iter(plain["kernels"]))
    if kind == "regions":
        del plain["regions"][0]
    elif kind in ("spaces", "schedules", "predictions"):
        region[kind.removesuffix("s")] += " changed"
    elif kind == "favourites":
        next(iter(plain[kind].values()))[0] += "\nchanged"
    elif kind == "calls and storage":
        region["calls"] += "\nchanged"
    elif kind == "kernel bodies":
        plain["kernels"][kernel] += "\nchanged();"
    else:
        plain["kernels"][kernel] = "// changed\n" + plain["kernels"][kernel]
    counts = replay.compare(decided, other, TARGETS, 2)
    assert counts[kind] == 1 and (kind == "regions" or sum(counts.values()) == 1)
    out = capsys.readouterr().out
    assert f"== {kind}: h200, graph" in out and (kind == "regions" or "changed" in out)


def test_a_dump_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = simplify(read(nn.ReLU(), (torch.ones(4, 4),)).graph)[0]
    monkeypatch.setattr(replay, "graphs", lambda unit: iter([(unit, graph)]))
    replay.dump("one", TARGETS, str(tmp_path))
    assert replay.loaded(tmp_path) == {"one": {"one": {target: replay.planned(graph, target) for target in TARGETS}}}


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["replay", "--against", "HEAD", "--targets", "h201"])
    with pytest.raises(SystemExit):
        replay.main()
    assert "unknown: h201" in capsys.readouterr().err
