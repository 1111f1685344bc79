"""Sums added in no fixed order: offered and chosen only on request, named in the plan, and right."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

import tilewright
from tests.compiled import without_chains
from tests.interpreted import run_program
from tests.stand_ins import H200, example, measurement, problems_of_network, stand_ins
from tilewright.cli import main
from tilewright.compile import check_options, read
from tilewright.errors import UnsupportedOption
from tilewright.graph.passes import simplify
from tilewright.hardware import is_present
from tilewright.hardware.machine import Machine
from tilewright.ir.kernel import AtomicAdd, statements
from tilewright.ir.problem import Problem
from tilewright.kernels.gpu.direct.schema import DIRECT
from tilewright.kernels.gpu.gemm.schema import GEMM
from tilewright.kernels.schema import AnySchema, Numerics
from tilewright.partition.lowering import IN_NO_ORDER
from tilewright.partition.plan import plan_program
from tilewright.report.explanation import explanation
from tilewright.runtime.artifact import read as read_artifact
from tilewright.selection.choice import choose, rank
from tilewright.selection.choice import rank as gpu_rank
from tilewright.selection.ranking import Choice, Ranking
from tilewright.tuning import serialisation, trials
from tilewright.tuning.measurement import Measurement
from tilewright.tuning.problems import convolution_problem, key_of
from tilewright.tuning.records import Records
from tilewright.tuning.tuning import chooser_for, current_code, from_records, tune

SPLIT = convolution_problem(32, 256, 4, 4, 3)
"""Few results of long sums, so that splitting is among the best candidates."""
BOTH = convolution_problem(24, 64, 4, 4, 5, 2)
"""A problem for which direct convolution also splits its channels."""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))


def atomic(ranking: Ranking) -> list[Choice]:
    return [choice for choice in ranking if choice.schema.unordered(choice.schedule)]


def trials_to_atomic(problem: Problem) -> int:
    """The number of first candidates in the ranking that includes one with atomic additions."""
    return 1 + next(at for at, choice in enumerate(rank(problem, H200, numerics=Numerics(atomics=True))) if choice.schema.unordered(choice.schedule))


def record_of(problem: Problem, choice: Choice, seconds: float) -> Measurement:
    text = serialisation.schedule_text(choice.schedule)
    code = current_code(problem, choice.schedule, H200) or ""
    return replace(measurement(problem), schedule=text, description=str(choice.schedule), code=code, median=seconds, lower=seconds, upper=seconds)


def test_candidates_that_add_atomically_are_offered_on_request_alone() -> None:
    for problem in (SPLIT, BOTH, *problems_of_network()[1:]):
        assert not atomic(rank(problem, H200))
    free = rank(BOTH, H200, numerics=Numerics(atomics=True))
    assert {choice.schema for choice in atomic(free)} == {GEMM, DIRECT}
    fixed, free = (gpu_rank(BOTH, H200, numerics=Numerics(atomics=allowed), learned=False) for allowed in (False, True))
    expected = {str(choice.schedule): choice.seconds for choice in fixed}
    assert expected == {str(choice.schedule): choice.seconds for choice in free if not choice.schema.unordered(choice.schedule)}


def test_a_schedule_is_found_only_where_it_is_offered() -> None:
    """A schedule with atomic additions is not in the space without them, whatever its other axes."""
    fixed, free = rank(BOTH, H200), rank(BOTH, H200, numerics=Numerics(atomics=True))
    for choice in atomic(free)[::10]:
        assert fixed.find(choice.schedule) is None and free.find(choice.schedule) == choice
        ordered = replace(choice.schedule, atomics=0)
        found = fixed.find(ordered)
        assert found is None or found.schedule == ordered


@pytest.mark.parametrize("schema", [GEMM, DIRECT], ids=lambda schema: schema.name)
def test_records_of_atomic_additions_wait_for_permission(schema: AnySchema, tmp_path: Path) -> None:
    quick = next(choice for choice in atomic(rank(BOTH, H200, numerics=Numerics(atomics=True))) if choice.schema is schema)
    steady = rank(BOTH, H200).first()
    with Records(tmp_path / "records.sqlite") as records:
        records.add([record_of(BOTH, quick, 1e-6)])
        assert from_records(records)(BOTH, H200, 1).measured_seconds is None
        records.add([record_of(BOTH, steady, 2e-6)])
        fixed, free = from_records(records)(BOTH, H200, 1), from_records(records, numerics=Numerics(atomics=True))(BOTH, H200, 1)
    assert (fixed.schedule, fixed.measured_seconds) == (steady.schedule, 2e-6)
    assert (free.schedule, free.measured_seconds) == (quick.schedule, 1e-6)
    with chooser_for(H200, tmp_path / "records.sqlite") as (chooser, _):
        assert chooser(BOTH, H200, 1).schedule == steady.schedule


def test_tuning_measures_them_on_request_alone(tmp_path: Path) -> None:
    for atomics, name in ((False, "fixed"), (True, "free")):
        with Records(tmp_path / name) as records:
            tune([SPLIT], H200, trials_to_atomic(SPLIT), records, numerics=Numerics(atomics=atomics), start=stand_ins)
            measured = {entry.schedule for entry in records.standing(key_of(SPLIT), "h200")}
        wanted = list(islice(rank(SPLIT, H200, numerics=Numerics(atomics=atomics)), trials_to_atomic(SPLIT)))
        assert measured == {serialisation.schedule_text(choice.schedule) for choice in wanted}
        assert any(choice.schema.unordered(choice.schedule) for choice in wanted) == atomics


def first_atomic(problem: Problem, machine: Machine, threads: int) -> Choice:
    """The best predicted candidate with atomic additions, if there is one."""
    if problem.region.kind == "contraction":
        found = atomic(rank(problem, machine, numerics=Numerics(atomics=True)))
        if found:
            return found[0]
    return choose(problem, machine, threads)


def test_a_network_of_atomic_additions_is_right() -> None:
    module, inputs = example()
    graph, _ = simplify(read(module, inputs).graph)
    program = plan_program(graph, H200, 1, first_atomic, chains=False)
    adding = [lowered for lowered in program.regions if any(isinstance(s, AtomicAdd) for k in lowered.kernels for s in statements(k.body))]
    assert len(adding) >= 2 and all("atomics" in lowered.schedule and IN_NO_ORDER in lowered.region.reasons for lowered in adding)
    assert not any(IN_NO_ORDER in lowered.region.reasons for lowered in program.regions if lowered not in adding)
    fresh = torch.randn(1, 3, 8, 8)
    results, faults = run_program(program, {graph.inputs[0]: fresh.numpy()})
    with torch.no_grad():
        expected = module.double()(fresh.double()).numpy()
    assert faults == []
    np.testing.assert_allclose(results[graph.outputs[0]], expected, rtol=0, atol=1e-5)


def test_compile_with_and_without_a_fixed_order(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    module, inputs = example()
    store = tmp_path / "records.sqlite"
    with Records(store) as records:
        for problem in problems_of_network()[2:]:
            records.add([record_of(problem, atomic(rank(problem, H200, numerics=Numerics(atomics=True)))[0], 1e-6)])
    with without_chains():
        fixed = tilewright.compile(module, inputs, "h200", records=store)
        free = tilewright.compile(module, inputs, "h200", records=store, deterministic=False)
    assert not any("atomicAdd" in text for text in fixed.image.sources.values()) and any("atomicAdd" in text for text in free.image.sources.values())
    said = [row.name for row in free.plan.rows if IN_NO_ORDER in row.reasons]
    assert said and said == [row.name for row in free.plan.rows if "atomics" in row.schedule]
    assert IN_NO_ORDER in explanation(free.image) and IN_NO_ORDER not in explanation(fixed.image)
    free.save(tmp_path / "saved")
    assert [region.name for region in read_artifact(tmp_path / "saved").program.regions if IN_NO_ORDER in region.reasons] == said


def test_a_cpu_has_one_order_anyway() -> None:
    module, inputs = torch.nn.Linear(24, 8).eval(), (torch.randn(3, 24),)
    fixed, free = (tilewright.compile(module, inputs, "native", deterministic=choice) for choice in (True, False))
    assert fixed.image.sources == free.image.sources


def test_the_option_is_true_or_false() -> None:
    check_options(deterministic=False)
    for wrong in (None, 1, "no"):
        with pytest.raises(UnsupportedOption, match="deterministic is"):
            check_options(deterministic=wrong)  # type: ignore[arg-type]


def test_torch_compile_takes_the_option() -> None:
    module = torch.nn.Linear(6, 4).eval()
    fast = torch.compile(module, backend="tilewright", options={"deterministic": False})
    x = torch.randn(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), module(x))


def test_the_commands_take_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "Trials", lambda machine, devices, threads: stand_ins())
    layers, store = tmp_path / "layers.json", tmp_path / "records.sqlite"
    layers.write_text(json.dumps([{"name": "one", "outputs": 32, "channels": 256, "height": 4, "width": 4, "filter": 3}]))
    command = ["tune", str(layers), "--target", "h200", "--trials", str(trials_to_atomic(SPLIT)), "--records", str(store)]
    assert main(command) == 0
    with Records(store) as records:
        assert not any('"atomics": 1' in entry.schedule for entry in records.all())
    assert main([*command, "--nondeterministic"]) == 0
    with Records(store) as records:
        assert any('"atomics": 1' in entry.schedule for entry in records.all())
    assert "region" in capsys.readouterr().out
    seen: list[bool] = []

    def compiled(*arguments: object, deterministic: bool, **options: object) -> None:
        seen.append(deterministic)
        raise UnsupportedOption("far enough", "stop here")

    monkeypatch.setattr(sys.modules["tilewright.compile"], "compile", compiled)
    for more in ([], ["--nondeterministic"]):
        assert main(["compile", "zoo:lenet5", "--target", "h200", *more]) == 2
    assert seen == [True, False]


@pytest.mark.gpu
@pytest.mark.skipif(not is_present(H200), reason="the records are for an h200")
def test_atomic_additions_on_the_gpu(tmp_path: Path) -> None:
    module, inputs = example()
    store = tmp_path / "records.sqlite"
    with Records(store) as records:
        for problem in problems_of_network()[2:]:
            records.add([record_of(problem, atomic(rank(problem, H200, numerics=Numerics(atomics=True)))[0], 1e-6)])
    executable = tilewright.compile(module.cuda(), tuple(x.cuda() for x in inputs), "h200", records=store, deterministic=False)
    assert any(IN_NO_ORDER in row.reasons for row in executable.plan.rows)
    expecting = module.double()
    for _ in range(3):  # one call's sums must not remain in the next
        fresh = torch.randn(1, 3, 8, 8, device="cuda")
        with torch.no_grad():
            torch.testing.assert_close(executable(fresh).double(), expecting(fresh.double()), rtol=0, atol=1e-5)
