"""Variants of GPU code: right results, resources and conflicts as predicted, and their place among the candidates."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from bench import gpu_variants
from bench.cells import results_of
from tests.draws import draws
from tests.gpu_cases import Case, check, compiled, convolution_case, matmul_case
from tests.stand_ins import processes
from tilewright.analysis.gpu.warps import accesses
from tilewright.codegen.cuda import print_cuda, shared_bytes
from tilewright.hardware import machine
from tilewright.hardware.calibration import UNCONFIRMED_VARIANTS, GpuVariants
from tilewright.ir.kernel import Allocate, statements
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.kernels import registry
from tilewright.kernels.columns import length, row, take
from tilewright.kernels.gpu.gemm.conflicts import transposing_wavefronts
from tilewright.kernels.gpu.gemm.counts import contraction_counts
from tilewright.kernels.gpu.gemm.form import product_form
from tilewright.kernels.gpu.gemm.schema import GEMM
from tilewright.kernels.gpu.gemm.space import (
    AXES,
    PADDED,
    PLAIN,
    PREFETCHED,
    SWIZZLED,
    TRANSPOSED,
    ContractionSchedule,
    columns_of,
    registers_of,
    shared_bytes_of,
)
from tilewright.kernels.gpu.gemm.variants import contraction_variants
from tilewright.kernels.gpu.winograd.schema import WINOGRAD
from tilewright.kernels.gpu.winograd.space import WinogradSchedule
from tilewright.kernels.schema import Options, form_of
from tilewright.selection.choice import candidates, rank
from tilewright.selection.ranking import Ranking, variants_of
from tilewright.selection.variants import LEAST_GAIN, MOST_OF_SENT, with_variants
from tilewright.toolchain.binary import SourceFile
from tilewright.toolchain.compilers import NvrtcCompiler
from tilewright.tuning import dataset, serialisation
from tilewright.tuning.problems import convolution_problem, key_of
from tilewright.tuning.records import Records
from tilewright.tuning.trials import Job
from tilewright.tuning.tuning import from_records, tune
from tilewright.tuning.workloads import Convolution, numerics_of, text_of

H200, A100, V100 = machine("h200"), machine("a100"), machine("v100")
BASES = (
    ContractionSchedule(16, 32, 8, 2, 4, 1, 2),
    ContractionSchedule(32, 32, 16, 4, 4, 1, 4),
    ContractionSchedule(32, 64, 16, 8, 4, 2, 2),
    ContractionSchedule(64, 16, 32, 4, 2, 1, 2),
    ContractionSchedule(32, 32, 16, 4, 4, 1, 1),
    ContractionSchedule(64, 32, 8, 4, 4, 2, 2, 1),
)
KINDS = st.tuples(st.sampled_from((PADDED, SWIZZLED, TRANSPOSED)), st.sampled_from((0, PREFETCHED, PLAIN)), st.sampled_from((0, 1)))


def varied(base: ContractionSchedule, kind: tuple[int, int, int]) -> ContractionSchedule:
    return replace(base, layout=kind[0], loop=kind[1], table=kind[2])


def lower(case: Case, schedule: ContractionSchedule) -> Lowered:
    return registry.lower(case.problem, schedule, H200)


def variants(case: Case, base: ContractionSchedule) -> list[ContractionSchedule]:
    """The feasible variants of a candidate."""
    facts = product_form(case.problem).facts
    rows, origins = contraction_variants(facts, {name: np.array([getattr(base, name)]) for name in AXES}, H200)
    assert (origins == 0).all()
    return [ContractionSchedule(**row(rows, at)) for at in range(length(rows))]


def check_if_possible(case: Case, schedule: ContractionSchedule) -> None:
    """Compares the result with PyTorch's, unless the schedule does not fit the problem: then it is no feasible variant either."""
    facts = product_form(case.problem).facts
    if schedule.split > -(-facts.r // schedule.block_k):
        return
    try:
        lowered = lower(case, schedule)
    except Unsuitable:
        assert schedule not in variants(case, replace(schedule, layout=0, loop=0, table=0))
        return
    check(case, lowered)


@settings(max_examples=draws(60), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    channels=st.sampled_from([2, 3, 4, 6, 16]),
    outputs=st.sampled_from([4, 6, 10, 24]),
    size=st.tuples(st.integers(3, 9), st.integers(3, 9)),
    filter_size=st.sampled_from([1, 3]),
    stride=st.integers(1, 2),
    groups=st.sampled_from([1, 1, 2]),
    batch=st.sampled_from([1, 2]),
    halo=st.booleans(),
    last=st.booleans(),
    constant=st.booleans(),
    base=st.sampled_from(BASES),
    kind=KINDS,
)
def test_convolutions(channels: int, filter_size: int, groups: int, base: ContractionSchedule, kind: Any, **sizes: Any) -> None:
    groups = groups if channels % groups == 0 else 1
    case = convolution_case(channels=channels, filter_size=filter_size, padding=filter_size // 2, groups=groups, **sizes)
    check_if_possible(case, varied(base, kind))


@settings(max_examples=draws(40), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    batch=st.sampled_from([(), (2,), (2, 3)]),
    m=st.sampled_from([1, 5, 16, 36]),
    n=st.sampled_from([2, 7, 16, 40]),
    r=st.sampled_from([1, 8, 21, 32, 64]),
    transpose_a=st.booleans(),
    transpose_b=st.booleans(),
    base=st.sampled_from(BASES),
    kind=KINDS,
)
def test_products(base: ContractionSchedule, kind: Any, **sizes: Any) -> None:
    check_if_possible(matmul_case(**sizes), varied(base, kind))


def test_every_variant_of_a_convolution_is_right() -> None:
    case = convolution_case(channels=16, outputs=40, size=(12, 13), stride=2)
    for base in BASES[:3]:
        found = variants(case, base)
        assert len(found) >= 3 and len(set(found)) == len(found)
        for schedule in found:
            check(case, lower(case, schedule))


def test_first_layers_and_products_have_the_variants_that_make_sense() -> None:
    """Rows of an image in planes are read along the pixels: nothing is transposed. A product's reduction takes no divisions."""
    image = variants(convolution_case(channels=3, outputs=24, size=(17, 17), last=False), ContractionSchedule(32, 32, 8, 4, 4, 1, 2))
    assert {schedule.layout for schedule in image} == {PADDED} and {schedule.table for schedule in image} == {0, 1}
    product = variants(matmul_case(m=64, n=64, r=64), ContractionSchedule(32, 32, 8, 4, 4, 1, 2))
    assert {schedule.table for schedule in product} == {0} and {schedule.layout for schedule in product} == {PADDED, SWIZZLED, TRANSPOSED}
    assert {schedule.loop for schedule in variants(matmul_case(m=64, n=64, r=64), ContractionSchedule(32, 32, 8, 4, 4, 1, 4))} == {0}


@pytest.mark.parametrize("r", [96, 98, 99], ids=lambda r: f"vectors of {4 if r % 4 == 0 else 2 if r % 2 == 0 else 1}")
@pytest.mark.parametrize("layout", [PADDED, SWIZZLED])
@pytest.mark.parametrize("block_k", [8, 16, 32])
@pytest.mark.parametrize("block_m", [16, 32, 128])
def test_predicted_conflicts_of_transposing_stores_are_those_of_the_code(block_m: int, block_k: int, layout: int, r: int) -> None:
    case = matmul_case(m=256, n=64, r=r)
    schedule = ContractionSchedule(block_m, 32, block_k, 4, 2, 1, 1, layout=layout)
    facts = product_form(case.problem).facts
    assert facts.a.along == "r"
    found = [a for a in accesses(lower(case, schedule).kernels[0]) if a.buffer == "a_tile" and a.kind == "store"]
    predicted = transposing_wavefronts(facts.a, np.array([block_m]), columns_of(schedule))
    assert sum(a.transactions for a in found) == float(predicted[0]) * sum(a.requests for a in found)


def test_swizzled_rows_are_read_without_conflicts_and_without_padding() -> None:
    case = matmul_case(m=256, n=64, r=96)
    for block_k in (8, 16, 32):
        base = ContractionSchedule(64, 64, block_k, 4, 4, 1, 2)
        loads = {}
        for schedule in (base, replace(base, layout=SWIZZLED)):
            found = [access for access in accesses(lower(case, schedule).kernels[0]) if access.buffer == "a_tile" and access.kind == "load"]
            loads[schedule.layout] = sum(access.transactions for access in found), sum(access.ideal for access in found)
        assert loads[PADDED] == loads[SWIZZLED] and loads[SWIZZLED][0] == loads[SWIZZLED][1]


def test_predicted_shared_memory_is_that_of_the_code() -> None:
    case = convolution_case(channels=16, outputs=40, size=(12, 12))
    facts = product_form(case.problem).facts
    base = ContractionSchedule(32, 32, 16, 4, 4, 1, 2)
    for schedule in (base, *variants(case, base), *variants(case, replace(base, stages=4)), *variants(case, replace(base, split=2, cluster=1))):
        (kernel, *_) = lower(case, schedule).kernels
        assert shared_bytes(kernel) == shared_bytes_of(facts, columns_of(schedule))[0], schedule
    plain, swizzled = replace(base, loop=PLAIN), replace(base, layout=SWIZZLED)
    sizes = [int(shared_bytes_of(facts, columns_of(schedule))[0]) for schedule in (base, plain, swizzled)]
    assert sizes[1] == sizes[0] / 2 and sizes[2] == sizes[0] - 2 * 4 * 4 * 32


def test_a_table_replaces_divisions() -> None:
    case = convolution_case(channels=3, outputs=24, size=(17, 17), last=False)
    base = ContractionSchedule(32, 32, 8, 4, 4, 1, 2)
    loops = [
        print_cuda(lower(case, schedule).kernels).split("for (int step")[1].split("wait_group")[1] for schedule in (base, replace(base, table=1))
    ]
    copies = [text.split("commit_group")[0] for text in loops]
    assert "/ 9" in copies[0] and "/ 9" not in copies[1] and "offsets[" in copies[1]
    (table,) = (
        s.buffer for s in statements(lower(case, replace(base, table=1)).kernels[0].body) if isinstance(s, Allocate) and s.buffer.name == "offsets"
    )
    assert table.size == 32  # four steps of eight


@pytest.mark.parametrize("target", [H200, A100], ids=lambda target: target.name)
def test_variants_compile(target: Any, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    case = convolution_case(channels=64, outputs=64, size=(28, 28))
    base = ContractionSchedule(64, 64, 16, 4, 4, 1, 2)
    wanted = [replace(base, layout=SWIZZLED), replace(base, layout=TRANSPOSED, table=1), replace(base, loop=PREFETCHED, table=1),
              replace(base, layout=SWIZZLED, loop=PREFETCHED), replace(base, loop=PLAIN)]  # fmt: skip
    kernels = [kernel for schedule in wanted for kernel in registry.lower(case.problem, schedule, target).kernels]
    source = SourceFile("kernel.cu", print_cuda(kernels), "cuda", tuple(kernel.name for kernel in kernels))
    outcome = NvrtcCompiler.find(target).compile(source, tmp_path)
    assert outcome.succeeded, outcome.log


def test_registers_are_estimated_and_nothing_spills(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    case = convolution_case(channels=64, outputs=64, size=(28, 28))
    facts = product_form(case.problem).facts
    base = ContractionSchedule(64, 64, 16, 4, 4, 1, 2)
    for schedule in (replace(base, layout=SWIZZLED), replace(base, layout=TRANSPOSED), replace(base, loop=PREFETCHED), replace(base, loop=PLAIN)):
        lowered = lower(case, schedule)
        (found,) = compiled(lowered, tmp_path).values()
        assert found.spill_bytes == 0
        assert 0.6 < found.registers / registers_of(facts, columns_of(schedule))[0] < 1.5, schedule


def test_variants_the_factors_do_not_allow_are_refused() -> None:
    case = matmul_case(m=64, n=64, r=64)
    with pytest.raises(Unsuitable, match="no copies"):
        lower(case, ContractionSchedule(32, 32, 8, 4, 4, 1, 1, layout=TRANSPOSED))
    with pytest.raises(Unsuitable, match="in no table"):
        lower(case, ContractionSchedule(32, 32, 8, 4, 4, 1, 2, table=1))


# Products of Winograd's algorithm


def winograd_variants(case: Case, count: int, seed: int) -> list[WinogradSchedule]:
    """The variants of a few candidates of the space."""
    form = form_of(WINOGRAD, case.problem, H200)
    assert not isinstance(form, Unsuitable)
    space, _ = WINOGRAD.space(form.facts, H200, Options())
    some = take(space, np.random.default_rng(seed).choice(length(space), count, replace=False))
    assert WINOGRAD.variants is not None
    rows, origins = WINOGRAD.variants(form.facts, some, H200)
    assert all((rows[name] == some[name][origins]).all() for name in some) and (rows["layout"] + rows["loop"] > 0).all()
    return [WinogradSchedule(**row(rows, at)) for at in range(length(rows))]


@settings(max_examples=draws(10), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    channels=st.sampled_from((8, 12, 32)),
    outputs=st.sampled_from((8, 20, 32)),
    size=st.tuples(st.integers(4, 9), st.integers(4, 9)),
    batch=st.sampled_from((1, 2)),
    seed=st.integers(0, 99),
)
def test_winograd_s_products_have_the_variants_of_products(seed: int, **sizes: Any) -> None:
    case = convolution_case(**sizes)
    found = winograd_variants(case, 8, seed)
    choose = np.random.default_rng(seed)
    for at in choose.choice(len(found), min(3, len(found)), replace=False):
        schedule = found[int(at)]
        assert serialisation.schedule_of(serialisation.schedule_text(schedule)) == schedule
        check(case, registry.lower(case.problem, schedule, H200))


def test_variants_of_winograd_s_products_compile(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    case = convolution_case(channels=64, outputs=64, size=(28, 28))
    plain = WinogradSchedule(4, 256, 1, 64, 64, 16, 4, 4, 1, 2)
    assert "layout" not in serialisation.schedule_text(plain)
    for schedule in (replace(plain, layout=SWIZZLED), replace(plain, layout=TRANSPOSED), replace(plain, loop=PLAIN)):
        found = compiled(registry.lower(case.problem, schedule, H200), tmp_path)
        assert len(found) == 3 and all(one.spill_bytes == 0 for one in found.values())


# Prediction and choice


def contraction_ranking(case: Case) -> Ranking:
    """The candidates of the schema alone."""
    ranking = Ranking(H200)
    return candidates(ranking, GEMM, product_form(case.problem).facts, Options())


def first_layer() -> Case:
    """A layer for which a table is predicted to gain: images in planes, seven by seven taps."""
    return convolution_case(channels=3, outputs=64, size=(112, 112), last=False, filter_size=7, padding=3, stride=2)


def test_the_default_values_are_those_of_candidates_without_the_axes() -> None:
    facts = product_form(first_layer().problem).facts
    base = ContractionSchedule(32, 64, 32, 4, 4, 1, 2)
    short, long = ({name: np.array([value]) for name, value in asdict(base).items() if name in names} for names in (AXES, asdict(base)))
    counts = [contraction_counts(facts, columns, H200) for columns in (short, long)]
    assert all(getattr(counts[0], name) == getattr(counts[1], name) for name in vars(counts[0]))
    seconds = [GEMM.estimate(facts, columns, its, H200, Options()).seconds for columns, its in zip((short, long), counts, strict=True)]
    assert seconds[0] == seconds[1]


def test_a_variant_follows_its_candidate_until_measurements_confirm_its_gain() -> None:
    ranking = contraction_ranking(first_layer())
    default = ranking.first()
    unconfirmed = with_variants(ranking, UNCONFIRMED_VARIANTS)
    assert unconfirmed.first().schedule == default.schedule and unconfirmed.first().seconds == default.seconds
    assert unconfirmed.first().terms == default.terms
    order = [choice.schedule for choice, _ in zip(unconfirmed, range(10), strict=False)]
    tabled = [schedule for schedule in order if schedule.table]
    assert tabled and all(order.index(replace(schedule, table=0, layout=0, loop=0)) < order.index(schedule) for schedule in tabled)
    (gain,) = {
        1 - ratio.min() for _, _, ratio in [variants_of(ranking.parts[0], np.array([int(np.argmin(ranking.seconds))]), H200) or (0, 0, np.ones(1))]
    }
    assert gain > LEAST_GAIN
    confirmed = with_variants(ranking, GpuVariants(1.0, 1.0, 1.0)).first()
    assert confirmed.schedule.table == 1 and confirmed.seconds == pytest.approx(default.seconds * (1 - gain))
    half = with_variants(ranking, GpuVariants(1.0, 1.0, 0.5)).first()
    assert half.seconds == pytest.approx(default.seconds * (1 - gain) ** 0.5)


def test_a_variant_keeps_the_learned_correction_of_its_candidate() -> None:
    ranking = contraction_ranking(first_layer())
    doubled = replace(ranking, predicted=2 * ranking.seconds)
    assert (
        with_variants(doubled, GpuVariants(1.0, 1.0, 1.0)).first().seconds == 2 * with_variants(ranking, GpuVariants(1.0, 1.0, 1.0)).first().seconds
    )


def test_without_a_measured_gain_no_variant_is_chosen() -> None:
    for case in (first_layer(), convolution_case(channels=256, outputs=256, size=(28, 28)), matmul_case(m=256, n=256, r=256, constant=True)):
        for target in (H200, V100):
            schedule = rank(case.problem, target).first().schedule
            assert not any(getattr(schedule, axis, 0) for axis in ("layout", "loop", "table"))


def test_recorded_variants_are_found_wherever_their_candidates_are() -> None:
    ranking = contraction_ranking(convolution_case(channels=32, outputs=64, size=(14, 14)))
    last = ranking.choice(int(np.argmax(ranking.seconds)))
    base = replace(last.schedule, stages=2)
    found = ranking.find(replace(base, loop=PLAIN))
    assert found is not None and found.schedule == replace(base, loop=PLAIN) and found.seconds > 0
    assert found.candidates == ranking.candidates
    assert ranking.find(replace(base, loop=7)) is None
    assert ranking.find(replace(base, block_m=48, loop=PLAIN)) is None


def test_records_and_data_from_before_variants_are_the_default() -> None:
    base = ContractionSchedule(32, 32, 8, 4, 4, 1, 2)
    text = ('{"type": "ContractionSchedule", "block_m": 32, "block_n": 32, "block_k": 8, "thread_m": 4, "thread_n": 4, "split": 1, "stages": 2, '
            '"cluster": 0, "atomics": 0}')  # fmt: skip
    assert serialisation.schedule_text(base) == text and serialisation.schedule_of(text) == base
    other = replace(base, layout=SWIZZLED, table=1)
    assert serialisation.schedule_of(serialisation.schedule_text(other)) == other
    serialisation.check_schedule_text(serialisation.schedule_text(other))
    assert str(other) == f"{base} swizzled table"


# The benchmark


def test_the_benchmark_measures_what_is_right_in_turns() -> None:
    problem = convolution_problem(16, 8, 6, 6, 3)
    wanted = list(gpu_variants.varied(problem, H200))
    bases = [entry for entry in wanted if not entry["axes"]]
    assert 1 <= max(Counter(type(entry["schedule"]) for entry in bases).values()) <= gpu_variants.BASES and len(wanted) > len(bases)
    wrong = next(entry["schedule"] for entry in wanted if entry["axes"])
    with processes({serialisation.schedule_text(wrong): "wrong"}) as trials:
        checked = {outcome.job.schedule: outcome for outcome in trials.measure([Job(problem, entry["schedule"]) for entry in wanted])}
        rows = gpu_variants.measured(trials, problem, wanted, checked, 3)
    assert len(rows) == len(wanted) and checked[wrong].status == "wrong"
    for line, entry in zip(rows, wanted, strict=True):
        right = checked[entry["schedule"]].status == "measured"
        assert (line["us"] is not None) == right and ("failed" in line) != right
        assert line["gain"] == 1 or entry["axes"]
    shown = gpu_variants.summary([{"problem": "one", "rows": rows}])
    assert shown[-1]["axis"] == "best of all" and shown[-1]["gain"] >= 1
    assert {line["axis"] for line in shown[:-1]} == {line["axes"][0] for line in rows if len(line["axes"]) == 1 and line["gain"] is not None}


def test_the_benchmark_varies_splits_of_16_bit_products() -> None:
    workload = Convolution(1, 256, 256, (14, 14), (3, 3), then="relu", precision="fp16")
    wanted = list(gpu_variants.varied(dataset.layer_problem(dataset.layer_of(workload)), H200, only=("warpgroups",)))
    assert {axis for entry in wanted for axis in entry["axes"]} == {"warpgroups meeting 1"}
    assert all(entry["base"].split in (2, 4, 8) for entry in wanted) and len([entry for entry in wanted if not entry["axes"]]) == gpu_variants.BASES


def test_the_benchmark_varies_given_axes_alone() -> None:
    workload = Convolution(64, 64, 128, (112, 112), (3, 3), then="relu", precision="fp16")
    problem, numerics = dataset.layer_problem(dataset.layer_of(workload)), numerics_of(workload)
    wanted = list(gpu_variants.varied(problem, H200, numerics, ("warpgroups",), ("sent",)))
    assert {axis for entry in wanted for axis in entry["axes"]} == {"warpgroups sent 1", "warpgroups sent 2"}
    assert all(entry["base"].persistent and bool(entry["schedule"].sent) == bool(entry["axes"]) for entry in wanted)
    assert not list(gpu_variants.varied(problem, H200, numerics, ("warpgroups",), ("layout",)))


def test_the_confirmed_share_is_the_slope_of_measured_gains() -> None:
    lines = [{"axes": ["table 1"], "predicted gain": gain, "gain": gain**0.5, "us": 1.0} for gain in (1.02, 1.1)]
    lines += [{"axes": ["table 1"], "predicted gain": 0.9, "gain": 1.2, "us": 1.0}, {"axes": [], "predicted gain": 1.0, "gain": 1.0, "us": 2.0}]
    table, best = gpu_variants.summary([{"problem": "one", "rows": lines}])
    assert table["confirmed"] == pytest.approx(0.5) and (table["variants"], table["gains predicted"], table["faster by 2 %"]) == (3, 2, 2)
    assert best["gain"] == pytest.approx(2.0)


def test_the_constant_of_an_axis_is_found_again() -> None:
    generator = np.random.default_rng(0)
    predicted = generator.uniform(-0.2, 0.4, 60)
    pairs = gpu_variants.Pairs(np.where(predicted > 0, 0.6 * predicted, generator.uniform(-1, 1, 60)), predicted)
    assert pairs.share == pytest.approx(0.6)
    assert (pairs.chosen == (predicted >= -np.log(1 - LEAST_GAIN))).all()


def test_gains_are_those_over_the_candidate_that_was_varied() -> None:
    """Two candidates, staged and not, have the same variant."""
    workload = Convolution(64, 64, 128, (56, 56), (3, 3), then="relu", precision="fp16")
    ranking = rank(dataset.layer_problem(dataset.layer_of(workload)), H200, numerics=numerics_of(workload), learned=False)
    (part,) = (part for part in ranking.parts if part.schema.name == "warpgroups" and "sent" not in part.candidates)
    found = gpu_variants.variants_with(part, np.arange(length(part.candidates)), H200, ("sent",))
    assert found is not None
    variants, origins, ratios = found
    texts = [str(part.schema.schedule_of(row(variants.candidates, place), H200)) for place in range(len(ratios))]
    first = next(place for place in range(len(ratios)) if texts.count(texts[place]) > 1 and ratios[place] < 0.99)
    both = [place for place in range(len(ratios)) if texts[place] == texts[first]][:2]
    gains = dict(zip(both, (1.1, 1.3), strict=True))
    lines = [
        {"schedule": texts[place], "of": str(part.schema.schedule_of(row(part.candidates, int(origins[place])), H200)), "axes": ["warpgroups sent 1"],
         "gain": gain}
        for place, gain in gains.items()
    ]  # fmt: skip
    pairs = gpu_variants.pairs_of([{"problem": text_of(workload), "rows": lines}], "sent", H200)
    expected = {(round(np.log(gain), 9), round(min(-np.log(ratios[place]), MOST_OF_SENT), 9)) for place, gain in gains.items()}
    assert set(zip(np.round(pairs.gained, 9), np.round(pairs.believed, 9), strict=True)) == expected


@pytest.mark.parametrize(("name", "axis"), [("gpu_variants_tensor_h200", "meeting"), ("gpu_variants_sent_h200_2", "sent")])
def test_the_measured_variants_are_found_in_the_space(name: str, axis: str) -> None:
    """And choosing by predictions gains for the first problems measured."""
    results = [entry for entry in results_of(name) if "problem" in entry][:12]
    pairs = gpu_variants.pairs_of(results, axis, H200)
    measured = [np.log(line["gain"]) for entry in results for line in entry["rows"] if line["axes"] and line["gain"] is not None]
    assert set(np.round(pairs.gained, 9)) <= set(np.round(measured, 9))
    assert len(pairs.gained) == len(measured) if axis == "meeting" else 0 < len(pairs.gained) < len(measured)  # of rows of 64 bytes none are made now
    assert pairs.gained[pairs.chosen].sum() > 0 and 0 < (pairs.believed > 0).sum() < len(measured)
    assert (pairs.believed <= MOST_OF_SENT).all() or axis == "meeting"


def test_trials_measure_variants_and_records_choose_them(tmp_path: Path) -> None:
    problem = dataset.layer_problem(dataset.layer_of(Convolution(1, 1, 86, (40, 40), (5, 5), then="relu")))
    first = [choice.schedule for choice, _ in zip(rank(problem, H200), range(6), strict=False)]
    tabled = [schedule for schedule in first if getattr(schedule, "table", 0)]
    assert tabled and not getattr(first[0], "table", 0)
    with Records(tmp_path / "records.db") as records:
        tune([problem], H200, 6, records, start=processes)
        known = {entry.schedule: entry for entry in records.standing(key_of(problem), H200.name)}
        assert {serialisation.schedule_text(schedule) for schedule in first} <= set(known)
        entry = known[serialisation.schedule_text(tabled[0])]
        records.add([replace(entry, median=1e-9, lower=1e-9, upper=1e-9, date="2099-01-01T00:00:00.000+00:00")])
        chosen = from_records(records)(problem, H200, 1)
        assert chosen.schedule == tabled[0] and chosen.measured_seconds == 1e-9
