"""Which comparisons of networks in 16 bits a result file already has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from bench import common, gpu_half, half
from tilewright import zoo


def test_the_figure_has_networks_of_the_zoo_and_others() -> None:
    assert len(gpu_half.FIGURE) == len(set(gpu_half.FIGURE)) == 13
    assert [name in zoo.NETWORKS for name in gpu_half.FIGURE] == [True] * 8 + [False] * 5


def test_comparisons_are_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(common, "git_commit", lambda: "c0")
    label = gpu_half.label_of("resnet50", "float16", 64)
    rows = [{"network": label, "contender": name} for name in ("tilewright", "inductor")]
    settings = {"rounds": 5, "seconds": 0.01}
    document = {"commit": "c0", "settings": settings, "results": rows}
    (tmp_path / "one.json").write_text(json.dumps(document))
    assert common.rows_to_resume("none", settings) == []
    found = common.rows_to_resume("one", settings)
    assert gpu_half.is_done(found, label, ["tilewright", "inductor"]) and not gpu_half.is_done(found, label, ["tilewright", "eager"])
    assert not gpu_half.is_done(found, gpu_half.label_of("resnet50", "float16", 1), ["tilewright"])
    assert common.rows_to_resume("one", {**settings, "rounds": 7}) == [], "measured otherwise"
    monkeypatch.setattr(common, "git_commit", lambda: "c1")
    assert common.rows_to_resume("one", settings) == [], "another commit"


def test_every_type_has_a_tolerance() -> None:
    assert half.TOLERANCES.keys() == {"float32", "float16", "bfloat16", gpu_half.TF32} >= set(half.TYPES)
    assert half.TOLERANCES["float16"] < half.TOLERANCES["bfloat16"]


def small_weights(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A network like torchvision's GoogLeNet, whose output its weights alone determine."""
    layers = [layer for _ in range(8) for layer in (nn.Conv2d(16, 16, 1), nn.ReLU())]
    for layer in layers[::2]:
        nn.init.trunc_normal_(layer.weight, std=0.01)  # type: ignore[arg-type]
    return nn.Sequential(*layers), (torch.zeros(batch, 16, 4, 4),)


def test_outputs_depend_on_inputs() -> None:
    """Else no error would be seen."""

    def change(module: nn.Module) -> float:
        first, second = (module(torch.randn(1, 16, 4, 4)) for _ in range(2))
        return float((first - second).abs().max() / first.abs().max())

    with torch.no_grad():
        assert change(small_weights(1)[0]) < 1e-6
        assert change(gpu_half.network(f"{__name__}:small_weights", 1)[0]) > 0.1
