"""Models of several machines: what is learned on one GPU holds on another if times depend on the same relative quantities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.transfer import ANALYTICAL, compare, conclusions, direct, generally, layers_of, with_rows
from tilewright.hardware import machine as find_machine
from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.kernels.gpu.counted import counted_cost
from tilewright.kernels.gpu.direct.counts import variant_counts
from tilewright.kernels.gpu.direct.features import NUMBER as DIRECT
from tilewright.kernels.gpu.features import described as columns_of
from tilewright.selection.learned.hybrid import Recipe, Samples, join, train, train_together

QUICK = Recipe("gradient_boosting", "relative", "correction", 1.0, options={"max_iter": 60, "min_samples_leaf": 5})


def measured(machine: Machine, seed: int, problems: int = 12, each: int = 50) -> Samples:
    """Direct kernels whose times differ from the analytical ones by a factor that depends on the fraction of useful work."""
    generator = np.random.default_rng(seed)
    parts = []
    for number in range(problems):
        extent = int(generator.choice([14, 28, 56]))
        problem = {"outputs": int(generator.choice([32, 64, 128])), "height": extent, "width": extent, "channels": 64, "filter_y": 3, "filter_x": 3}
        problem |= {"stride_y": 1, "stride_x": 1}
        axes = {"slice": [1, 2], "register_k": [1, 2, 4], "register_y": [1, 2], "register_x": [1, 2, 4, 7], "warp_k": [4, 8], "block_k": [1, 2]}
        axes |= {"warp_y": [1, 2], "warp_x": [2, 4], "block_y": [1, 2, 4], "block_x": [1, 2], "channels": [2, 4, 8], "split": [1, 2, 4]}
        rows = {name: generator.choice(values, each) for name, values in axes.items()}
        volumes = variant_counts(rows, {name: np.full(each, value) for name, value in problem.items()}, machine)
        wrong = np.exp(1.5 * (1 - volumes.flops / volumes.padded_flops) + 0.02 * generator.standard_normal(each))
        seconds = counted_cost(volumes, machine, gpu_calibration(machine).counted).seconds * wrong
        parts.append(Samples(columns_of(DIRECT, rows, problem), volumes, seconds, np.full(each, number)))
    return join(parts)


@pytest.mark.slow
def test_a_correction_of_relative_quantities_holds_on_another_machine() -> None:
    first, second = find_machine("v100"), find_machine("h200")
    sources = {"v100": [(measured(first, 0), first)], "both": [(measured(first, 0), first), (measured(second, 1), second)]}
    results = compare(sources, {"h200 layers": (measured(second, 2), second)}, {"correction": QUICK})
    by = {row["trained"]: row for row in results}
    assert list(by) == [ANALYTICAL, "v100", "both"]
    assert by[ANALYTICAL]["lop@1"] > 0.02 and by[ANALYTICAL]["spearman"] < 0.97
    for name in ("v100", "both"):
        assert by[name]["lop@1"] < by[ANALYTICAL]["lop@1"] / 2 and by[name]["spearman"] > by[ANALYTICAL]["spearman"]
    shown = compare(sources, {"h200 layers": (measured(second, 1, 3), second)}, {"correction": QUICK}, {"h200 layers": ["both"]})
    assert [row["trained"] for row in shown] == [ANALYTICAL, "v100"]
    assert by["both"]["rows"] == 2 * by["v100"]["rows"] == 1200


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("target", ["time", "correction", "rank"])
def test_two_parts_of_one_machine_train_the_same_model_as_all_rows(target: str) -> None:
    machine = find_machine("h200")
    one, two = measured(machine, 3, 4), measured(machine, 4, 4)
    recipe = replace(QUICK, target=target)
    together = train_together([(one, machine), (two, machine)], recipe, gpu_calibration(machine).counted)
    apart = train(join([one, replace(two, problem=two.problem + 100)]), machine, recipe, gpu_calibration(machine).counted)
    expected = one.expected(machine, gpu_calibration(machine).counted)
    one_by_one, joined = [model.predicted(one.described, one.counts, machine, expected) for model in (together, apart)]
    np.testing.assert_array_equal(one_by_one, joined)


def test_rows_that_are_compared() -> None:
    rows = measured(find_machine("h200"), 5, 3, 10)
    schema = rows.described["schema"].copy()
    schema[::3] = 2
    mixed = replace(rows, described={**rows.described, "schema": schema}, analytical=rows.seconds)
    assert generally(mixed).analytical is None and len(direct(mixed)) == 20
    layers = layers_of({"a": {"rs": rows.where(np.arange(4)), "s": rows.where(np.arange(4, 9))}, "b": {"rs": rows.where(np.arange(9, 12))}})
    assert layers.problem.tolist() == [0] * 9 + [1] * 3 and (layers.seconds == rows.seconds[:12]).all()


def test_problems_with_few_rows_are_left_out() -> None:
    rows = measured(find_machine("h200"), 6, 2, 8)
    few = with_rows(rows.where(np.arange(13)), 6)
    assert len(few) == 8 and set(few.problem) == {0}


def test_conclusions_say_whether_the_model_helps() -> None:
    rows = [("no", ANALYTICAL, None, 0.10), ("no", "near", "rank", 0.05), ("no", "far", "rank", 0.2), ("yes", ANALYTICAL, None, 0.1)]
    rows += [("yes", "near", "rank", 0.02), ("yes", "far", "rank", 0.03)]
    results = [dict(zip(("judged", "trained", "target", "lop@1"), row, strict=True)) for row in rows]
    first, second = conclusions(results, {"no": ("near", "far"), "yes": ("near", "far")})
    assert "LoP@1 20.0 %, worse than without (10.0 %); trained on near 5.0 %" in first
    assert "LoP@1 3.0 %, better than without (10.0 %)" in second
