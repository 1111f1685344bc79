"""The reproduction of published measurements: the command, folders that it refuses, and the data as counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.cnnopt import printed_cost
from tilewright.hardware import machine as find_machine
from tilewright.kernels.gpu.counted import counted_cost
from tilewright.kernels.gpu.direct.schedule import S
from tilewright.selection.learned import hybrid
from tilewright.tuning.training import with_trees

V100 = find_machine("v100")
ROOT = Path(__file__).parent.parent


def write_folder(folder: Path) -> None:
    """A folder in the published format: a few problems, times by a rule, and some failed launches."""
    random = np.random.default_rng(3)
    header = "K,H,W,C,R,TK,TH,TW,BK,BH,BW,CMult,Time"

    def lines(k: int, h: int, c: int, r: int) -> list[str]:
        made = []
        for tk in (1, 2, 4):
            for tw in (1, 2, 7, 14):
                for bh in (1, 2):
                    milliseconds = 2 * k * h * h * c * r * r / 5e9 * (1 + 0.3 * tk + 2 / tw + 0.1 * bh) + 0.02
                    made.append(f"{k}, {h}, {h}, {c}, {r}, {tk}, 1, {tw}, 32, {bh}, 1, 1, {milliseconds:.6f}")
        return made

    (folder / "rs").mkdir(parents=True)
    (folder / "s").mkdir()
    (folder / "rs_stride2").mkdir()
    training = [header]
    for _ in range(12):
        training += lines(
            int(random.choice([128, 256])), int(random.choice([14, 28, 56])), int(random.choice([32, 64, 96, 128])), int(random.choice([1, 3]))
        )
        training.append("Error: too many resources requested for launch")
    (folder / "rs" / "train.csv").write_text("\n".join(training) + "\n")
    for name, sizes in (("rs/layer_128x42x42_64_3", (128, 42, 64, 3)), ("rs_stride2/layer_128x14x14_96_3", (128, 14, 96, 3))):
        (folder / f"{name}.csv").write_text("\n".join([header, *lines(*sizes)]) + "\n")
    s_lines = [
        f"128,42,42,64,3,1,{tw},{tk},1,2,16,1,{42 // tw // 2},{bk},{0.2 + 0.01 * tk + 0.5 / tw}"
        for tw in (3, 7, 21)
        for tk in (2, 4)
        for bk in (1, 2)
    ]
    (folder / "s" / "layer_128x42x42_64_3.csv").write_text("\n".join(["K,H,W,C,R,TH,TW,TK,WH,WW,WK,BH,BW,BK,Time", *s_lines]) + "\n")


def test_published_data_on_a_small_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.published_data import RECIPES, reproduce

    for name, recipe in RECIPES.items():
        monkeypatch.setitem(RECIPES, name, with_trees(recipe, 20))
    write_folder(tmp_path / "data")
    settings, results = reproduce(tmp_path / "data", find_machine("rtx2080ti"))
    keys = {"lop@1", "lop@10", "lop@30", "trials_95", "trials_99", "trials_100"}
    models = ["analytical as printed", "analytical", *RECIPES]
    layers = ["128x42x42_64_3", "128x14x14_96_3"]
    assert [(entry["model"], entry["layer"]) for entry in results] == [(model, layer) for model in models for layer in (*layers, "all")]
    for model in models:
        *figures, mean = (entry for entry in results if entry["model"] == model)
        for entry in figures:
            assert entry["lop@1"] >= entry["lop@10"] >= entry["lop@30"] >= 0
            assert 1 <= entry["trials_95"] <= entry["trials_99"] <= entry["trials_100"]
        for key in keys:
            assert mean[key] == pytest.approx(np.mean([entry[key] for entry in figures]))
    both = next(entry for entry in results if entry["model"] == "detailed" and entry["layer"] == "128x42x42_64_3")
    assert both["rs"]["trials_100"] <= 24 and both["s"]["trials_100"] <= 12
    assert settings["lines skipped"]["rs/train.csv"] == 13


def test_an_error_between_the_kernels_shows_beside_each_other_alone(tmp_path: Path) -> None:
    from bench.published_data import held_out, read

    random = np.random.default_rng(1)
    splits, tiles = (1, 2, 4, 8), ((1, 1), (1, 2), (2, 2), (1, 4), (2, 4), (1, 7), (2, 7), (7, 7), (2, 14), (1, 14), (7, 14), (14, 14))
    rs = [f"128,14,14,64,3,1,{y},{x},32,1,1,{split},{random.uniform(0.1, 0.5)}" for split in splits for y, x in tiles]
    s = [f"64,28,28,32,3,1,{x},{k},1,1,32,{y},1,1,{random.uniform(0.1, 0.5)}" for x in (1, 2, 4, 7) for k in (1, 2) for y in (1, 2)]
    (tmp_path / "rs.csv").write_text("\n".join(rs))
    (tmp_path / "s.csv").write_text("\n".join(s))
    samples = hybrid.join([read(tmp_path / f"{kind}.csv", kind, 1, V100).samples for kind in ("rs", "s")])
    exact = held_out(samples, samples.seconds)
    assert {kind: found["problems"] for kind, found in exact.items()} == {"all": 1, "like the layers": 1, "whole space": 1, "S beside RS": 1}
    assert all(found["lop@1"] == 0 for found in exact.values())
    of_s = samples.described["tile slice"] == S
    apart = held_out(samples, samples.seconds * np.where(of_s, 2.0, 1.0))
    assert {kind for kind, found in apart.items() if found["lop@1"] > 0} == {"S beside RS"}
    within = held_out(samples, np.where(of_s, 1.0, 1 / samples.seconds))
    assert within["all"]["lop@1"] > 0 and within["whole space"]["lop@1"] > 0


def broken(folder: Path, name: str) -> None:
    write_folder(folder)
    layer = folder / "rs" / "layer_128x42x42_64_3.csv"
    if name == "no training":
        (folder / "rs" / "train.csv").unlink()
    elif name == "no layers":
        for path in folder.glob("*/layer_*.csv"):
            path.unlink()
    elif name == "too few numbers":
        layer.write_text("1,2,3\n")
    elif name == "a negative time":
        layer.write_text("128,42,42,64,3,1,1,1,32,1,1,1,-0.5\n")
    elif name == "half a tile":
        layer.write_text("128,42,42,64,3,1.5,1,1,32,1,1,1,0.5\n")
    elif name == "no number":
        layer.write_text("128,42,42,64,3,1,1,1,32,1,1,1,nan\n")
    elif name == "an empty file":
        layer.write_text("")


@pytest.mark.parametrize(
    "name, message",
    [
        ("no training", "no training file"), ("no layers", "no layer"), ("too few numbers", "line 1: not a measurement"),
        ("a negative time", "line 1"), ("half a tile", "line 1"), ("no number", "line 1"), ("an empty file", "no measurement"),
    ],
)  # fmt: skip
def test_published_data_refuses_other_folders(name: str, message: str, tmp_path: Path) -> None:
    from bench.published_data import read_folder
    from tilewright.errors import InvalidInput

    broken(tmp_path / "data", name)
    with pytest.raises(InvalidInput, match=message):
        read_folder(tmp_path / "data", V100)


@pytest.mark.parametrize(("arguments", "words"), [(("absent",), "is no folder"), (("data", "--machine", "v1000"), "v1000")])
def test_published_data_says_what_is_wrong(arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.published_data import main

    write_folder(tmp_path / "data")
    folder, *options = arguments
    monkeypatch.setattr("sys.argv", ["published_data", str(tmp_path / folder), *options])
    with pytest.raises(SystemExit, match=words):
        main()


@pytest.fixture
def published(request: pytest.FixtureRequest) -> Path:
    folder = request.config.getoption("--published-data")
    if not folder:
        pytest.skip("needs the published measurements: --published-data FOLDER")
    return Path(folder)


def test_the_published_measurements_are_as_counted(published: Path) -> None:
    from bench.published_data import evaluate, read_folder

    training, layers, skipped = read_folder(published, V100)
    assert len(training) > 70_000 and len(layers) == 20 and skipped["rs/train.csv"] == 148
    for samples in (training, *(samples for kinds in layers.values() for samples in kinds.values())):
        # only whole tiles: the meaning of the columns
        np.testing.assert_allclose(samples.counts.padded_flops, samples.counts.flops)
        product = np.prod([samples.described[f"tile warp_{axis}"] for axis in "kyx"], 0)
        assert (product == 32).all()
    printed = {entry["layer"]: entry for entry in evaluate(layers, lambda samples: printed_cost(samples.counts, V100).seconds)}
    # table 9, analytical on a V100: R12, D2, D3, D5 and D6
    expected = {"512x7x7_512_3": 5.4, "32x108x108_32_3": 15.8, "64x54x54_32_3": 31.9, "128x27x27_64_3": 50.0, "128x27x27_128_3": 6.3}
    assert {name: round(100 * printed[name]["lop@30"], 1) for name in expected} == expected
    *_, ours = evaluate(layers, lambda samples: counted_cost(samples.counts, V100).seconds)
    assert ours["layer"] == "all" and ours["lop@30"] < 0.01
