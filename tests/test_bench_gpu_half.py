"""Which comparisons of networks in 16 bits a result file already has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import common, gpu_half
from tilewright import zoo


def test_the_figure_has_networks_of_the_zoo_and_others() -> None:
    assert len(gpu_half.FIGURE) == len(set(gpu_half.FIGURE)) == 13
    assert [name in zoo.NETWORKS for name in gpu_half.FIGURE] == [True] * 8 + [False] * 5


def test_comparisons_are_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu_half, "git_commit", lambda: "c0")
    label = gpu_half.label_of("resnet50", "float16", 64)
    rows = [{"network": label, "contender": name} for name in ("tilewright", "inductor")]
    document = {"commit": "c0", "settings": {"rounds": 5, "seconds": 0.01}, "results": rows}
    (tmp_path / "one.json").write_text(json.dumps(document))
    assert gpu_half.done_before("none", 5, 0.01) == []
    found = gpu_half.done_before("one", 5, 0.01)
    assert gpu_half.is_done(found, label, ["tilewright", "inductor"]) and not gpu_half.is_done(found, label, ["tilewright", "eager"])
    assert not gpu_half.is_done(found, gpu_half.label_of("resnet50", "float16", 1), ["tilewright"])
    assert gpu_half.done_before("one", 7, 0.01) == [], "measured otherwise"
    monkeypatch.setattr(gpu_half, "git_commit", lambda: "c1")
    assert gpu_half.done_before("one", 5, 0.01) == [], "another commit"
