"""The learned correction of chains in 16 bits: what it is told, where it counts, and that no correction makes a chain faster."""

from __future__ import annotations

from math import log, prod
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
from tilewright.partition import tile_features, tile_judge
from tilewright.partition.tile_features import NAMES, SUFFIX, VERSION, chain_model, corrections
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
        assert found["log work"] == pytest.approx(log(tiles.parts.parts / np.exp(found["log rounds"])))
        results = 64 * prod(tiles.schedule.sizes[-2:]) / tiles.schedule.threads  # of the depthwise convolution, for each pixel of the tile
        chunks = 64 // tiles.schedule.chunk if tiles.schedule.chunk else 1
        assert np.expm1(found["windows log results"]) == pytest.approx(results / chunks)
        assert np.expm1(found["windows log operations"]) >= 2 * 9 * results / chunks
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


@pytest.mark.parametrize("filters", [(3, 3), (5, 3)])
def test_a_limit_that_no_tiles_keep_is_not_remembered_as_their_time(filters: tuple[int, int]) -> None:
    """A bound below a limit does not say that the corrected time is: what is asked again with more time finds the best tiles."""
    module = torch.nn.Sequential(*(conv(24 if size == filters[0] else 48, 48, size, 1, size // 2) for size in dict.fromkeys(filters)))
    problem = chain_problem(torch.nn.Sequential(conv(24, 24, 1), *module).half(), torch.randn(1, 24, 14, 14).half())
    best = TileJudge(machine("h200"), USUAL).predicted(problem)[0]
    judge = TileJudge(machine("h200"), USUAL)
    for share in (0.5, 0.8, 0.95, 0.999):
        assert judge.best(problem, [], share * best.seconds) == share * best.seconds
    assert judge.best(problem, [], 2 * best.seconds) == best
    assert judge.ranked(problem, [])[0] == best


def test_a_users_calibration_has_its_own_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model does not know them, so that nothing is corrected and no chain is taken without a measurement."""
    monkeypatch.setattr(tile_judge, "in_use", lambda _: object())
    judge, problem = TileJudge(machine("h200"), USUAL), residual_block()
    ranked = judge.ranked(problem, [])
    assert not isinstance(ranked, str) and all(CORRECTED not in tiles.terms for tiles in ranked)
    assert not judge.decides(problem.region.stages, problem.values, problem.constants, 1e-6)
    monkeypatch.undo()
    assert TileJudge(machine("h200"), USUAL).decides(problem.region.stages, problem.values, problem.constants, 1e-6)


def constant(value: float) -> Forest:
    return forest.fit("random_forest", np.zeros((4, len(NAMES))), np.full(4, value), None, NAMES, VERSION, {"n_estimators": 2})


def test_no_correction_makes_a_chain_faster() -> None:
    rows = np.random.default_rng().normal(size=(5, len(NAMES)))
    assert corrections(constant(-1.0), rows) == [1.0] * 5
    assert corrections(constant(log(3)), rows) == pytest.approx([3.0] * 5)
    model = chain_model("h200")
    assert model is not None and min(corrections(model, 20 * rows)) >= 1


@pytest.mark.parametrize("names", [NAMES[:-1], NAMES[::-1]])
def test_a_chain_model_other_features_is_rejected(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tile_features, "MODELS", tmp_path)
    path = tmp_path / f"some{SUFFIX}.npz"
    forest.save(forest.fit("random_forest", np.zeros((4, len(names))), np.zeros(4), None, names, VERSION, {"n_estimators": 2}), path)
    with pytest.raises(InvalidModel, match="trained with other features"):
        chain_model("some")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InvalidModel, match="train it again"):
        chain_model("some")
    assert chain_model("none such") is None
