"""Random workloads and samples of schedules: within their bounds, reproducible, and none of the workloads on which models are evaluated."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import prod

import numpy as np
import pytest

from bench.attention import SHAPES
from bench.layers import LAYERS
from bench.operators import DEPTHWISE, PRODUCTS
from tests.bare_schemas import part, ranking_of
from tilewright.selection.ranking import Ranking
from tilewright.tuning.sampling import (
    CLASSES,
    FEW_ROWS,
    JUDGED,
    LEAST_FLOPS,
    LEAST_MANY,
    LEAST_SHALLOW,
    MOST_ELEMENTS,
    MOST_FLOPS,
    MOST_HEAVY_FLOPS,
    MOST_MANY_WORK,
    MOST_SHALLOW,
    MOST_WIDE_ELEMENTS,
    TRAINING,
    bare,
    evenly,
    has_small_factors,
    random_workloads,
    towards_the_best,
    towards_the_first,
)
from tilewright.tuning.workloads import COMPUTED, Attention, Convolution, Linear, Product, Workload, text_of


def drawn(name: str, count: int = 60) -> list[Workload]:
    return list(itertools.islice(random_workloads(3, [name]), count))


def convolutions(name: str) -> list[Convolution]:
    found = drawn(name)
    return [workload for workload in found if isinstance(workload, Convolution)]


def test_workloads_keep_their_bounds() -> None:
    assert {*TRAINING, "heavy", "wide", "attention", "computed", "shallow", "dense"} == CLASSES.keys()
    for name in CLASSES:
        found = drawn(name)
        assert len({bare(workload) for workload in found}) == len(found)
        for workload in found:
            assert MOST_ELEMENTS < workload.elements <= MOST_WIDE_ELEMENTS if name == "wide" else workload.elements <= MOST_ELEMENTS
            if isinstance(workload, Convolution) and workload.groups == 1 or isinstance(workload, Linear | Product):
                few = isinstance(workload, Linear) and workload.rows <= FEW_ROWS
                least, most = MOST_FLOPS if name == "heavy" else LEAST_FLOPS, MOST_HEAVY_FLOPS if name in ("heavy", "wide", "shallow") else MOST_FLOPS
                assert few or workload.flops >= least
                assert workload.flops <= most
            if isinstance(workload, Convolution) and len(workload.size) == 2:
                assert all(map(has_small_factors, workload.size))


def test_classes_have_the_forms_of_their_names() -> None:
    plain = {name: convolutions(name) for name in ("3x3", "1x1", "large", "batch", "groups", "forms", "first", "transposed")}
    assert all(len(found) == 60 for found in plain.values())
    assert {one.filter for one in plain["3x3"]} == {(3, 3)} and {one.filter for one in plain["1x1"]} == {(1, 1)}
    for name in ("3x3", "1x1", "large"):
        assert {(one.batch, one.groups, one.dilation) for one in plain[name]} == {(1, 1, 1)}
        assert {one.then for one in plain[name]} >= {"nothing", "relu", "residual"} and {one.stride for one in plain[name]} == {1, 2}
    assert min(max(one.filter) for one in plain["large"]) == 5 and any(min(one.filter) == 1 for one in plain["large"])
    batches = {one.batch for one in plain["batch"]}
    assert min(batches) == 2 and max(batches) > 64 and any(batch & (batch - 1) for batch in batches)
    assert all(one.groups > 1 for one in plain["groups"]) and {one.groups == one.channels for one in plain["groups"]} == {True, False}
    assert all(one.dilation > 1 or len(one.size) != 2 for one in plain["forms"]) and {len(one.size) for one in plain["forms"]} == {1, 2, 3}
    assert {one.channels for one in plain["first"]} <= {1, 3, 4} and any(one.stride == one.filter[0] for one in plain["first"])
    assert all(one.transposed for one in plain["transposed"]) and not any(
        one.transposed for name in plain if name != "transposed" for one in plain[name]
    )


def test_small_networks_have_classes_of_their_own() -> None:
    few = [workload for workload in drawn("few") if isinstance(workload, Linear)]
    assert len(few) == 60 and {1, 8} <= {one.rows for one in few} and any(one.flops < LEAST_FLOPS for one in few)
    assert any(8 < one.rows <= FEW_ROWS for one in few) and all(one.rows <= FEW_ROWS for one in few)
    narrow = convolutions("narrow")
    assert (
        {one.filter for one in narrow} == {(1, 1)}
        and min(one.channels for one in narrow) < 16
        and {one.batch == 1 for one in narrow} == {True, False}
    )


def test_attention_has_one_or_many_queries_masks_and_shared_keys() -> None:
    found = [workload for workload in drawn("attention", 120) if isinstance(workload, Attention)]
    assert len(found) == 120 and {one.causal for one in found} == {0, 1} and {one.sharing == 1 for one in found} == {True, False}
    assert {one.queries == 1 for one in found} == {one.queries == one.keys for one in found} == {True, False}
    assert all(one.queries == one.keys for one in found if one.causal) and min(one.size for one in found) == 16


def test_layers_of_few_channels_and_of_dense_blocks_have_classes() -> None:
    shallow = convolutions("shallow")
    assert len(shallow) == 60 and {one.filter for one in shallow} == {(1, 1), (3, 3)}
    assert all(LEAST_SHALLOW / 2 < one.batch * prod(one.size) < 2 * MOST_SHALLOW for one in shallow)
    assert all(min(one.channels, one.outputs) <= 96 and max(one.channels, one.outputs) <= 768 for one in shallow)
    assert {max(one.channels, one.outputs) > 96 for one in shallow} == {one.batch == 1 for one in shallow} == {True, False}
    dense = convolutions("dense")
    assert len(dense) == 60 and {one.filter for one in dense} == {(1, 1)} and {one.batch == 1 for one in dense} == {True, False}
    assert all(49 <= one.batch * prod(one.size) <= 6272 and 64 <= one.channels <= 1024 and 32 <= one.outputs <= 256 for one in dense)
    assert {one.computed for one in dense} == {*COMPUTED} - {"nothing"}


def test_first_factors_are_computed_in_two_classes_alone() -> None:
    found = drawn("computed", 120)
    convolutions = [one for one in found if isinstance(one, Convolution)]
    linear = [one for one in found if isinstance(one, Linear)]
    assert len(convolutions) + len(linear) == 120 and 60 < len(convolutions) < 110
    assert {one.filter for one in convolutions} == {(1, 1)} and {one.batch == 1 for one in convolutions} == {True, False}
    for some in (convolutions, linear):
        assert {one.computed for one in some} == {*COMPUTED} - {"nothing"}
    others = [one for name in CLASSES if name not in ("computed", "dense") for one in drawn(name, 20)]
    assert {one.computed for one in others if isinstance(one, Convolution | Linear)} == {"nothing"}


def test_draws_are_those_of_data_sets() -> None:
    """Files of measured layers know them by their text, and the same seed goes on where a file ends."""
    found = list(itertools.islice(random_workloads(271, ("3x3", "linear", "narrow"), precisions=("fp16", "tf32")), 3))
    assert list(map(text_of, found)) == [
        "convolution batch=1 channels=32 outputs=16 size=55x55 filter=3x3 stride=1 dilation=1 groups=1 transposed=0 then=relu precision=fp16",
        "linear rows=577 channels=288 outputs=272 then=nothing precision=tf32",
        "convolution batch=1 channels=8 outputs=352 size=108x108 filter=1x1 stride=1 dilation=1 groups=1 transposed=0 then=nothing precision=fp16",
    ]


def test_workloads_are_those_of_their_seed() -> None:
    first, again, other = (list(itertools.islice(random_workloads(seed), 50)) for seed in (5, 5, 6))
    assert first == again and not set(first) & set(other)


def test_judged_workloads_are_the_benchmarks_and_never_drawn() -> None:
    layers = {Convolution(1, c, k, (size, size), (f, f), stride) for k, c, size, f, stride in LAYERS.values()}
    # depthwise convolutions are listed by their input
    depthwise = {Convolution(1, c, c, (size // stride,) * 2, (f, f), stride, groups=c) for c, size, f, stride in DEPTHWISE.values()}
    attention = {workload for workload in JUDGED if isinstance(workload, Attention)}
    assert layers | depthwise | {Product(*sizes) for sizes in PRODUCTS.values()} == JUDGED - attention
    shapes = ((s.batch, s.heads, s.queries, s.keys, s.size, s.heads // s.keys_heads, int(s.causal)) for s in SHAPES.values())
    assert {Attention(*shape) for shape in shapes} <= attention
    first = next(random_workloads(3, ["linear"]))
    assert isinstance(first, Linear)
    excluded = {replace(first, then="gelu" if first.then != "gelu" else "bias")}
    again = list(itertools.islice(random_workloads(3, ["linear"], excluded), 5))
    assert first not in again and again == drawn("linear", 6)[1:]


@pytest.mark.parametrize("judged", sorted(JUDGED, key=str)[::7], ids=str)
def test_what_follows_does_not_make_a_judged_workload_another(judged: Workload) -> None:
    if isinstance(judged, Attention):
        assert bare(replace(judged, precision="fp16")) == judged
        return
    assert isinstance(judged, Convolution | Product)
    assert bare(replace(judged, swapped=1) if isinstance(judged, Product) else replace(judged, then="relu")) == judged
    if isinstance(judged, Convolution) and judged.stride == judged.groups == 1:
        assert bare(replace(judged, computed="norm")) == judged


def ranking(sizes: tuple[int, ...]) -> Ranking:
    generator = np.random.default_rng(0)
    parts = []
    for size in sizes:
        parts.append(part(dict, {"number": np.arange(size)}, generator.uniform(1, 2, size)))
    return ranking_of(*parts)


def test_many_images_are_more_than_fifteen() -> None:
    many = convolutions("many")
    assert len(many) == 60 and min(one.batch for one in many) >= LEAST_MANY
    assert {"depthwise" if one.groups == one.channels else "groups" if one.groups > 1 else one.filter for one in many} >= {
        "depthwise",
        "groups",
        (1, 1),
    }
    assert max(one.flops for one in many if one.groups == one.channels) <= MOST_MANY_WORK


def test_evenly_takes_as_many_of_each_schema() -> None:
    space = ranking((1000, 5, 400))
    positions = evenly(space, 65, seed=1)
    assert len(set(positions)) == 65
    counts = np.histogram(positions, [0, 1000, 1005, 1405])[0]
    assert counts.tolist() == [30, 5, 30]


def test_towards_the_best_prefers_fast_candidates_of_each_schema() -> None:
    space = ranking((2000, 2000))
    positions = towards_the_best(space, 100, seed=2)
    assert len(set(positions)) == 100
    ranks = np.concatenate([np.argsort(np.argsort(part.estimate.seconds)) for part in space.parts])
    assert np.median(ranks[positions]) < 200 < ranks[positions].max()
    assert 30 < (positions < 2000).sum() < 70


def test_towards_the_first_follows_the_ranking() -> None:
    space = ranking((2000, 2000))
    corrected = replace(space, predicted=space.seconds[::-1].copy())
    positions = towards_the_first(corrected, 100, seed=2)
    assert len(set(positions)) == 100 and len(towards_the_first(ranking((5, 3)), 100, seed=2)) == 8
    ranks = np.argsort(np.argsort(corrected.seconds))
    assert np.median(ranks[positions]) < 400 < ranks[positions].max()
