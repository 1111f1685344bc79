"""The learned correction of chains in 16 bits: what it is told, where it counts, and that no correction makes a chain faster."""

from __future__ import annotations

from math import log
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.test_chains import chain_problem, conv, inverted
from tilewright.errors import InvalidModel
from tilewright.hardware import machine
from tilewright.hardware.calibration import UNFITTED_CHAINS
from tilewright.ir.problem import Problem
from tilewright.kernels.schema import USUAL
from tilewright.partition import tile_features
from tilewright.partition.tile_features import NAMES, SUFFIX, VERSION, corrections, model_of
from tilewright.partition.tile_judge import TileJudge
from tilewright.selection.learned import forest
from tilewright.selection.learned.forest import Forest

CORRECTED = "learned correction"


def residual_block(dtype: torch.dtype = torch.float16, images: int = 1) -> Problem:
    return chain_problem(inverted(16, 64).to(dtype), torch.randn(images, 16, 14, 14).to(dtype))


def test_features_say_what_tiles_are_made_of() -> None:
    problem, judge = residual_block(), TileJudge(machine("h200"), USUAL)
    ranked = judge.ranked(problem, [])
    assert not isinstance(ranked, str)
    for tiles in ranked:
        found = dict(zip(NAMES, judge.features_of(problem, tiles.schedule), strict=True))
        assert all(map(np.isfinite, found.values()))
        assert found["log threads"] == pytest.approx(log(tiles.schedule.threads)) and found["regions"] == 3
        assert (
            found["turns"]
            == found["windows turns"] + found["products turns"] + found["others turns"]
            == tiles.parts.turns / np.exp(found["log rounds"])
        )
        assert found["windows turns"] >= 1 and found["windows share"] + found["products share"] + found["others share"] == pytest.approx(1)
        assert found["chunked"] == (tiles.schedule.chunk > 0) and found["exchanging"] == (tiles.schedule.exchanged > 0)
        formulas = tiles.parts.seconds(UNFITTED_CHAINS, judge.machine.clock_hz)
        assert found["log seconds"] == pytest.approx(log(formulas)) and 0 < found["filled"] <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_chains_of_16_bits_are_corrected_where_they_were_measured(dtype: torch.dtype) -> None:
    ranked = TileJudge(machine("h200"), USUAL).ranked(residual_block(dtype), [])
    assert not isinstance(ranked, str)
    for tiles in ranked:
        assert tiles.terms[CORRECTED] == pytest.approx(tiles.seconds - tiles.parts.seconds(UNFITTED_CHAINS, machine("h200").clock_hz))
        assert tiles.terms[CORRECTED] >= 0
    assert [tiles.seconds for tiles in ranked] == sorted(tiles.seconds for tiles in ranked)


@pytest.mark.parametrize(("name", "dtype"), [("h200", torch.float32), ("a100", torch.float16), ("rtx4090", torch.float16)])
def test_other_chains_are_not(name: str, dtype: torch.dtype) -> None:
    ranked = TileJudge(machine(name), USUAL).ranked(residual_block(dtype), [])
    assert not isinstance(ranked, str) and all(CORRECTED not in tiles.terms for tiles in ranked)


@pytest.mark.parametrize("images", [1, 8])
def test_bounds_hold_for_corrected_times(images: int) -> None:
    """What the search leaves out is slower: it finds the tiles that are the best of all."""
    problem = chain_problem(torch.nn.Sequential(conv(16, 48), conv(48, 48, 3, 1, 1, 48)).half(), torch.randn(images, 16, 28, 28).half())
    every = TileJudge(machine("h200"), USUAL).predicted(problem)
    first = TileJudge(machine("h200"), USUAL).predicted(problem, count=1)
    assert first[0] == every[0]
    limit = every[0].seconds * 1.0001
    assert TileJudge(machine("h200"), USUAL).predicted(problem, limit)[0] == every[0]


def constant(value: float) -> Forest:
    return forest.fit("random_forest", np.zeros((4, len(NAMES))), np.full(4, value), None, NAMES, VERSION, {"n_estimators": 2})


def test_no_correction_makes_a_chain_faster() -> None:
    rows = np.random.default_rng().normal(size=(5, len(NAMES)))
    assert corrections(constant(-1.0), rows) == [1.0] * 5
    assert corrections(constant(log(3)), rows) == pytest.approx([3.0] * 5)
    model = model_of("h200")
    assert model is not None and min(corrections(model, 20 * rows)) >= 1


@pytest.mark.parametrize("names", [NAMES[:-1], NAMES[::-1]])
def test_a_model_of_other_features_is_rejected(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tile_features, "MODELS", tmp_path)
    path = tmp_path / f"some{SUFFIX}.npz"
    forest.save(forest.fit("random_forest", np.zeros((4, len(names))), np.zeros(4), None, names, VERSION, {"n_estimators": 2}), path)
    with pytest.raises(InvalidModel, match="trained with other features"):
        model_of("some")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InvalidModel, match="cannot be read|damaged|some"):
        model_of("some")
    assert model_of("none such") is None
