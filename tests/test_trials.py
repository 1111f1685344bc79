"""Measuring candidates: the worker's checks and replays over an emulated GPU, and the parent with processes that hang, crash or are wrong."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.emulated_gpu import EmulatedServer
from tests.fake_workers import seconds
from tests.stand_ins import FAKES, H200, OTHER, SMALL, processes
from tilewright.compile import read
from tilewright.errors import CompilerMissing, KernelFailed, TargetNotPresent
from tilewright.graph.passes import simplify
from tilewright.hardware import is_present, machine
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import StepBuilder, Tensor, maximum
from tilewright.ir.expr import cast, unary
from tilewright.ir.graph import Value
from tilewright.ir.layout import channels_last, row_major
from tilewright.ir.problem import Problem
from tilewright.ir.region import Region
from tilewright.kernels.gpu.tensor_cores.space import TensorCoreSchedule
from tilewright.partition.canonical import canonical
from tilewright.runtime.verify import errors
from tilewright.selection.choice import rank
from tilewright.tuning import serialisation, trial_processes, trial_reference
from tilewright.tuning.problems import convolution_problem, key_of
from tilewright.tuning.records import Records
from tilewright.tuning.trial_reference import reference_results
from tilewright.tuning.trial_worker import drawn, poison
from tilewright.tuning.trials import FAR, Job, Outcome, Timing, Trials, doubtful
from tilewright.tuning.tuning import distinct_problems, from_records, tune
from tilewright.tuning.workers import Worker, WorkerLost
from tilewright.tuning.workloads import COMPUTED, Convolution, Linear, numerics_of, problem_of, text_of


def jobs_of(problem: Problem, count: int) -> list[Job]:
    return [Job(problem, choice.schedule, number) for number, choice in enumerate(islice(rank(problem, H200), count))]


def text(job: Job) -> str:
    return serialisation.schedule_text(job.schedule)


# Plain forms and problems


def test_plain_forms_come_back() -> None:
    data = json.loads(json.dumps(serialisation.encode(SMALL)))
    problem = serialisation.decode(data)
    for part in ("region", "layouts", "values", "constants"):
        assert getattr(problem, part) == getattr(SMALL, part)
    assert serialisation.decode(serialisation.encode(H200)).digest == H200.digest
    shared = len({id(node) for step in SMALL.region.steps for node in step.axes})
    assert sum(name == "Var" for name, _ in data["rows"]) >= shared
    with pytest.raises(TypeError, match="no plain form"):
        serialisation.encode(object())
    with pytest.raises(ValueError, match="not known"):
        serialisation.decode({"rows": [["Popen", {}]], "root": {"row": 0}})


def test_schedules_come_back() -> None:
    for choice in islice(rank(SMALL, H200), 0, 3000, 500):
        assert serialisation.schedule_of(serialisation.schedule_text(choice.schedule)) == choice.schedule
    with pytest.raises(KeyError):
        serialisation.schedule_of('{"type": "AbacusSchedule"}')


def test_equal_problems_have_equal_keys_whatever_their_names() -> None:
    assert key_of(canonical(renamed_copy(SMALL, "layer7_")).problem) == key_of(SMALL)
    keys = {
        key_of(SMALL),
        key_of(OTHER),
        key_of(convolution_problem(16, 8, 6, 5, 3, 2)),
        key_of(convolution_problem(16, 8, 6, 5, 3, batch=2)),
        key_of(replace(SMALL, constants=frozenset())),
        key_of(replace(SMALL, layouts={**SMALL.layouts, "value2": row_major((1, 16, 6, 5))})),
    }
    assert len(keys) == 6


def renamed_copy(problem: Problem, prefix: str) -> Problem:
    data = json.dumps(serialisation.encode(problem))
    for name in (*problem.region.inputs, *problem.region.outputs):
        data = data.replace(f'"{name}"', f'"{prefix}{name}"')
    return serialisation.decode(json.loads(data))


# The reference


@pytest.mark.parametrize(
    ("sizes", "options"),
    [((10, 6, 5, 4, 3, 2), {}), ((8, 3, 5, 7, 7, 2), {}), ((8, 6, 6, 6, 1, 1), {}), ((12, 8, 5, 6, 3, 1), {"groups": 4, "batch": 2}),
     ((8, 6, 6, 7, 3, 1), {"dilation": 2}), ((8, 8, 6, 6, 3, 2), {"groups": 8})],
)  # fmt: skip
def test_reference_of_convolutions(sizes: tuple[int, ...], options: dict[str, int]) -> None:
    problem = convolution_problem(*sizes, **options)
    (data,), (weights,) = sorted(set(problem.region.inputs) - problem.constants), sorted(problem.constants)
    generator = torch.Generator().manual_seed(3)
    inputs = {name: drawn(problem.values[name], generator, torch.device("cpu")) for name in problem.region.inputs}
    (result,) = reference_results(problem, inputs).values()
    dilation = options.get("dilation", 1)
    padding = dilation * (sizes[4] // 2)
    expected = F.conv2d(inputs[data].double(), inputs[weights].double(), None, sizes[5], padding, dilation, options.get("groups", 1))
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("groups", [2, 8])
def test_reference_of_grouped_convolutions_with_an_epilogue(groups: int) -> None:
    """Their sums have more axes than the stored value has dimensions, and the epilogue reads them at those axes."""
    module = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3, 1, 1, groups=groups), torch.nn.ReLU())
    graph, _ = simplify(read(module, (torch.zeros(2, 8, 5, 6),)).graph)
    (problem,) = (one for one in distinct_problems(graph, H200, 1) if one.region.kind in ("window", "contraction"))
    assert len(problem.region.steps) == 2
    generator = torch.Generator().manual_seed(3)
    inputs = {name: drawn(problem.values[name], generator, torch.device("cpu")) for name in problem.region.inputs}
    (result,) = reference_results(problem, inputs).values()
    by_shape = {tuple(tensor.shape): tensor.double() for tensor in inputs.values()}
    bias = next(tensor for shape, tensor in by_shape.items() if 16 in shape and tensor.numel() == 16)
    expected = F.conv2d(by_shape[2, 8, 5, 6], by_shape[16, 8 // groups, 3, 3], bias.reshape(16), 1, 1, 1, groups).relu()
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def test_reference_of_a_softmax_over_channels_that_joined_its_convolution() -> None:
    """Its row reductions store nothing, and the steps after them read them at four dimensions, of which they reduced one."""
    module = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 1), torch.nn.ReLU(), torch.nn.Softmax(1))
    graph, _ = simplify(read(module, (torch.zeros(1, 8, 6, 6),)).graph)
    (problem,) = (one for one in distinct_problems(graph, machine("x86-avx2"), 1) if one.region.kind == "contraction")
    assert len(problem.region.steps) > 3
    generator = torch.Generator().manual_seed(3)
    inputs = {name: drawn(problem.values[name], generator, torch.device("cpu")) for name in problem.region.inputs}
    (result,) = reference_results(problem, inputs).values()
    by_size = {tensor.numel(): tensor.double() for tensor in inputs.values()}
    expected = F.conv2d(by_size[8 * 36].reshape(1, 8, 6, 6), by_size[8 * 16].reshape(16, 8, 1, 1), by_size[16].reshape(16)).relu().softmax(1)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def computed_by_definition(computed: str, values: list[torch.Tensor]) -> torch.Tensor:
    """The first factor, of pixels or rows by channels, from the values that it is computed of, in their order."""
    x, *others = values
    if computed == "norm":
        return torch.relu(x * others[0].flatten() + others[1].flatten())
    if computed == "sum":
        return x + others[0]
    if computed == "gate" and not others:
        first, second = x.chunk(2, -1)
        return F.silu(first) * second
    if computed == "gate":
        return x * others[0]
    return F.silu(x) if computed == "silu" else F.gelu(x)


@pytest.mark.parametrize("precision", ["fp16", "tf32"])
@pytest.mark.parametrize("computed", COMPUTED[1:])
@pytest.mark.parametrize("workload", [Convolution(2, 32, 24, (5, 4), (1, 1), then="bias"), Linear(21, 32, 24, "bias")], ids=text_of)
def test_products_that_compute_their_first_factor(workload: Convolution | Linear, computed: str, precision: str, tmp_path: Path) -> None:
    """The reference is that of the definitions, and kernels on tensor cores are right."""
    typed = replace(workload, computed=computed, precision=precision)
    problem = problem_of(typed)
    server = EmulatedServer(problem, H200)
    # values are named in the order in which the region reads them: those of the first factor, the weights, the bias
    *first, weights, bias = (server.problem.inputs[name].double() for name in problem.region.inputs)
    if isinstance(workload, Convolution):
        first = [x.movedim(1, -1) if x.dim() == 4 else x for x in first]
    expected = computed_by_definition(computed, first) @ weights.reshape(24, 32).T + bias.flatten()
    (output,) = problem.region.outputs
    found = server.problem.expected[output]
    # functions for results of 16 bits are no more exact than those need
    torch.testing.assert_close(found.movedim(1, -1) if found.dim() == 4 else found, expected, rtol=0, atol=2e-4 if precision == "fp16" else 1e-12)
    ranking = rank(problem, H200, numerics=numerics_of(typed))
    choice = next(choice for choice in ranking if isinstance(choice.schedule, TensorCoreSchedule))
    answer = server.trial({"program": server.program(choice.schedule, tmp_path), "mode": "cold"})
    assert "error" not in answer, answer


def test_reference_on_the_host_where_the_device_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = biased_problem()
    inputs = {name: drawn(problem.values[name], torch.Generator(), torch.device("cpu")) for name in problem.region.inputs}
    expected = reference_results(problem, inputs)
    asked: list[int] = []

    def results(*arguments: Any, found: Callable[..., Any] = trial_reference._results) -> Any:
        asked.append(1)
        if len(asked) == 1:
            raise torch.cuda.OutOfMemoryError("made up")
        return found(*arguments)

    monkeypatch.setattr(trial_reference, "_results", results)
    again = reference_results(problem, inputs)
    assert len(asked) == 2 and all(torch.equal(again[name], tensor) for name, tensor in expected.items())


def biased_problem() -> Problem:
    """A 1x1 convolution with bias and ReLU, its result stored with a halo."""
    x, w, b = Tensor("x", (1, 8, 5, 4), "f32"), Tensor("w", (12, 8), "f32"), Tensor("b", (12,), "f32")
    builder = StepBuilder("product")
    (total,) = builder.reduce("sum", (1, 12, 5, 4), (8,), lambda n, k, i, j, c: x(n, c, i, j) * w(k, c))
    result = builder.map((1, 12, 5, 4), lambda n, k, i, j: maximum(total(n, k, i, j) + b(k), 0))
    steps = builder.finish([result], ["out"]).steps
    values = {t.name: Value(t.name, t.shape, "f32") for t in (x, w, b)} | {"out": Value("out", (1, 12, 5, 4), "f32")}
    halo = ((0, 0), (0, 0), (1, 1), (1, 1))
    layouts = {"x": channels_last(x.shape), "w": row_major(w.shape), "b": row_major(b.shape), "out": channels_last((1, 12, 5, 4)).with_halo(halo)}
    region = Region("out", "contraction", (), steps, ("x", "w", "b"), ("out",))
    return canonical(Problem(region, layouts, values, frozenset({"w", "b"}))).problem


def test_reference_with_an_epilogue_and_a_halo(tmp_path: Path) -> None:
    problem = biased_problem()
    server = EmulatedServer(problem, H200)
    by_shape = {tuple(tensor.shape): tensor.double() for tensor in server.problem.inputs.values()}
    expected = torch.relu(torch.einsum("ncij,kc->nkij", by_shape[1, 8, 5, 4], by_shape[12, 8]) + by_shape[12,][:, None, None])
    (output,) = problem.region.outputs
    torch.testing.assert_close(server.problem.expected[output], expected, rtol=0, atol=1e-12)
    answer = server.trial({"program": server.program(rank(problem, H200).first().schedule, tmp_path), "mode": "cold"})
    assert "error" not in answer and answer["relative_error"] < 1e-6


def test_reference_of_bits_and_of_results_without_dimensions() -> None:
    """What PyTorch does not compute alike: its results have the shapes of the steps, and bits are those of the type of the region."""
    b = StepBuilder("y")
    x = Tensor("x", (7,), "f32")
    position = b.reduce("argmax", (), (7,), lambda r: (x(r), r))[1]
    result = b.map((7,), lambda i: unary("reinterpret", x(i), "i32") + cast(position(), "i32"))
    computation = b.finish([result], ["y"])
    values = {"x": Value("x", (7,), "f32"), "y": Value("y", (7,), "i32")}
    region = Region("y", "map", (), computation.steps, ("x",), ("y",))
    problem = Problem(region, {name: row_major((7,)) for name in values}, values, frozenset())
    given = torch.tensor([0.5, -1.0, 3.25, 0.0, 1e-20, 3.0, -7.0])
    assert torch.equal(reference_results(problem, {"x": given})["y"], given.view(torch.int32) + 2)


def test_integers_are_exact_whatever_types_stand_beside_them(tmp_path: Path) -> None:
    """The least error of float16 would be several positions."""
    graph, _ = simplify(read(Positions(), (torch.zeros(6, 300, dtype=torch.float16),)).graph)
    whole = {one.values[name].dtype: (one, name) for one in distinct_problems(graph, H200, 1) for name in one.region.outputs}
    problem, output = whole["i64"]
    server = EmulatedServer(problem, H200)
    program = server.program(rank(problem, H200).first().schedule, tmp_path)
    assert "times" in server.trial({"program": program, "mode": "cold"})
    right = server.problem.expected[output]
    server.problem.expected[output] = torch.where(right == right.max(), right - 1, right)
    assert server.trial({"program": program, "mode": "cold"})["wrong"]


class Positions(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.max(1)


def test_errors_are_seen() -> None:
    exact = torch.randn(4, 5, dtype=torch.float64)
    assert errors(exact.float(), exact)[1] < 1e-6
    assert errors(exact + 0.5 * exact.abs().max(), exact)[1] == pytest.approx(0.5)
    assert errors(torch.where(exact > 0, exact, torch.nan), exact)[1] == float("inf")
    assert errors(torch.full((3,), torch.nan), torch.full((3,), torch.nan))[1] == 0.0
    assert errors(torch.tensor([1, 2]), torch.tensor([1, 3]))[1] > 0


def test_poison_spares_halo_and_rounding() -> None:
    layout = channels_last((1, 3, 2, 2)).with_halo(((0, 0), (0, 0), (1, 1), (1, 1)))
    flat = torch.ones(layout.size)
    poison(flat, layout)
    assert flat.isnan().sum() == 12 and (flat == 0).sum() == layout.size - 12
    counts = torch.ones(5, dtype=torch.int64)
    poison(counts, row_major((5,)))
    assert (counts == torch.iinfo(torch.int64).min).all()


# The measuring process


@pytest.mark.parametrize(
    "problem", [convolution_problem(10, 6, 5, 4, 3, 2), convolution_problem(16, 8, 6, 6, 3, batch=2), OTHER], ids=lambda p: key_of(p)[:4]
)
def test_right_candidates_are_timed(problem: Problem, tmp_path: Path) -> None:
    server = EmulatedServer(problem, H200, seconds=40e-6)
    schemas = {type(choice.schedule): choice for choice in islice(rank(problem, H200), 4000)}  # keeps the last of each type
    for choice in (rank(problem, H200).first(), *schemas.values()):
        program = json.loads(json.dumps(server.program(choice.schedule, tmp_path)))
        calls = len(program["calls"])
        answer = server.trial({"program": program, "mode": "cold", "limit": None})
        assert answer["times"] == pytest.approx([calls * 40e-6] * 4) and not answer["stopped"]
        assert answer["relative_error"] < 1e-5
    assert server.driver.loaded == 0


def test_slow_candidates_are_timed_once(tmp_path: Path) -> None:
    server = EmulatedServer(OTHER, H200)
    program = server.program(rank(OTHER, H200).first().schedule, tmp_path)
    answer = server.trial({"program": program, "mode": "warm", "limit": 1e-6})
    assert answer["stopped"] and len(answer["times"]) == 1


def test_wrong_candidates_are_not_timed(tmp_path: Path) -> None:
    server = EmulatedServer(OTHER, H200)
    program = server.program(rank(OTHER, H200).first().schedule, tmp_path)
    right = dict(server.problem.expected)
    server.problem.expected = {name: tensor + 1e-2 for name, tensor in right.items()}
    answer = server.trial({"program": program, "mode": "cold"})
    assert answer["wrong"] and "wrong result" in answer["error"] and "times" not in answer
    server.problem.expected = right
    assert "times" in server.trial({"program": program, "mode": "cold"})
    server.driver.launch_kernel = lambda params, stream: None  # a kernel that writes nothing leaves the poison
    assert server.trial({"program": program, "mode": "cold"})["wrong"]


def test_candidates_are_measured_again_in_turns(tmp_path: Path) -> None:
    server = EmulatedServer(SMALL, H200)
    order: list[Any] = []
    choices = [choice for choice in islice(rank(SMALL, H200), 4)]
    programs = [server.program(choice.schedule, tmp_path) for choice in choices]
    times = server.remeasure({"programs": programs, "mode": "cold", "rounds": 3})["times"]
    assert [len(entry) for entry in times] == [3] * len(choices) and server.driver.loaded == 0
    original: Callable[..., float] = server.seconds

    def seen(replay: Any, cold: bool) -> float:
        order.append(replay)
        return original(replay, cold)

    server.seconds = seen  # type: ignore[method-assign]
    server.remeasure({"programs": programs, "mode": "cold", "rounds": 2})
    del order[: len(programs)]  # the calls that determined the length of a replay
    assert [order.index(replay) for replay in order] == [0, 1, 2, 3, 0, 1, 2, 3, 1, 2, 3, 0]


# The parent


def test_timings() -> None:
    first = Timing.of([1.0, 1.1, 1.2, 1.3, 1.4])
    assert (first.median, first.lower, first.upper, first.count) == (1.2, 1.1, 1.3, 5)
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0, 1)


def test_outcomes_of_every_kind() -> None:
    jobs = jobs_of(SMALL, 8) + jobs_of(OTHER, 4)
    faults = {text(jobs[1]): "crash", text(jobs[2]): "fatal", text(jobs[3]): "wrong", text(jobs[4]): "refuse", text(jobs[5]): "kill compiler"}
    with processes(faults) as trials:
        outcomes = {id(outcome.job): outcome for outcome in trials.measure(jobs)}
    found: list[Outcome] = [outcomes[id(job)] for job in jobs]
    assert [o.status for o in found] == ["measured", "failed", "failed", "wrong", "failed", "failed", *["measured"] * 6]
    assert "status 9" in found[1].reason and "made-up fault" in found[1].reason
    assert "an illegal memory access" in found[2].reason
    assert "wrong result" in found[3].reason and "does not compile" in found[4].reason and "while compiling" in found[5].reason
    for job, outcome in zip(jobs, found, strict=True):
        if outcome.status == "measured":
            assert outcome.seconds == pytest.approx(1.0015 * seconds(text(job)))
            assert outcome.timing is not None and outcome.timing.count == 4 and outcome.code and outcome.relative_error == 1e-7
            assert dict(outcome.environment) == {"compiler": "fake compiler", "gpu": "fake gpu", "driver": "0.0", "torch": "0"}
        else:
            assert outcome.timing is None and outcome.seconds == float("inf")


def test_a_candidate_that_hangs_is_killed_and_the_next_ones_are_measured() -> None:
    jobs = jobs_of(SMALL, 3)
    with processes({text(jobs[0]): "hang"}, trial_seconds=0.5, compile_workers=1) as trials:
        outcomes = list(trials.measure(jobs))
    assert [outcome.status for outcome in outcomes] == ["failed", "measured", "measured"]
    assert "no answer within 0.5 s" in outcomes[0].reason


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    ("fault", "words"),
    [("hang", "while measuring no answer within 0.5 s"), ("crash", "while measuring the process ended (status 9)"),
     ("hang compiler", "while compiling no answer within 1.5 s"), ("kill compiler", "while compiling the process ended (status 7)")],
)  # fmt: skip
def test_three_in_a_row_that_fail_do_not_stop_tuning(fault: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_processes, "COMPILE_SECONDS", 1.5)
    jobs = jobs_of(SMALL, 6)
    faults = {text(job): fault for job in jobs[:3]}
    with Records(tmp_path / "records.sqlite") as records:
        tuned = tune([SMALL], H200, 6, records, start=lambda: processes(faults, trial_seconds=0.5))
        assert (tuned.measured, tuned.failed) == (3, 3)
        failed = {entry.schedule: entry.reason for entry in records.all() if entry.status == "failed"}
        assert failed.keys() == faults.keys() and all(words in reason for reason in failed.values())
        chosen = from_records(records)(SMALL, H200, 1)
        assert chosen.measured_seconds is not None and serialisation.schedule_text(chosen.schedule) not in faults


def test_several_gpus_share_the_problems() -> None:
    jobs = [job for problem in (SMALL, OTHER, convolution_problem(8, 8, 4, 4, 3)) for job in jobs_of(problem, 5)]
    with processes(devices=(0, 1)) as trials:
        outcomes = list(trials.measure(iter(jobs)))
    assert {id(outcome.job) for outcome in outcomes} == {id(job) for job in jobs} and len(outcomes) == len(jobs)
    assert all(outcome.status == "measured" for outcome in outcomes)


def test_a_problem_is_set_up_once(tmp_path: Path) -> None:
    log = tmp_path / "questions"
    with processes({"log": str(log)}) as trials:
        list(trials.measure(jobs_of(SMALL, 6) + jobs_of(OTHER, 2)))
        list(trials.measure(jobs_of(OTHER, 2)))
    questions = log.read_text().split()
    assert questions.count("start") == 1 and questions.count("problem") == 2 and questions.count("trial") == 10


def test_stopping_early_ends_the_processes() -> None:
    trials = processes()
    outcomes = trials.measure(jobs_of(SMALL, 30))
    next(outcomes)
    outcomes.close()  # type: ignore[attr-defined]
    workers = [child._worker for child in (*trials._compilers, *trials._devices) if child._worker is not None]
    trials.close()
    assert workers and not any(worker.alive for worker in workers)
    assert not trials._scratch.path.exists()


def test_measuring_again_keeps_the_order() -> None:
    jobs = jobs_of(SMALL, 5)
    with processes({text(jobs[2]): "refuse"}) as trials:
        outcomes = trials.remeasure(jobs, rounds=5)
        with pytest.raises(ValueError, match="several problems"):
            trials.remeasure([*jobs, *jobs_of(OTHER, 1)])
    assert [outcome.job for outcome in outcomes] == jobs
    assert [outcome.status for outcome in outcomes] == ["measured"] * 2 + ["failed"] + ["measured"] * 2
    assert all(o.timing is None or (o.timing.count == 5 and o.seconds == pytest.approx(seconds(text(o.job)))) for o in outcomes)


def test_those_near_the_best_are_measured_again_at_once(tmp_path: Path) -> None:
    log = tmp_path / "questions"
    jobs = jobs_of(SMALL, 40) + jobs_of(OTHER, 1)
    with processes({"log": str(log)}) as trials:
        outcomes = list(trials.measure(jobs, finals=True))
    finals = [outcome for outcome in outcomes if outcome.final]
    fastest = sorted(jobs[:40], key=lambda job: seconds(text(job)))
    near = [job.key for job in fastest[:4] if seconds(text(job)) <= 1.1 * seconds(text(fastest[0]))]
    assert len(outcomes) == 41 + len(finals) and len(finals) > 1
    assert sorted(outcome.job.key for outcome in finals) == sorted(near)  # type: ignore[type-var]
    assert all(outcome.timing is not None and outcome.timing.count == 9 and outcome.code for outcome in finals)
    assert log.read_text().split().count("remeasure") == 1


def test_processes_that_cannot_start() -> None:
    trouble = ("-c", "raise SystemExit('out of order')")
    with processes() as trials:
        trials._devices[0].command = trouble
        with pytest.raises(KernelFailed, match="out of order"):
            list(trials.measure(jobs_of(SMALL, 2)))
    with (
        Trials(H200, compile_workers=1, measurer=(FAKES, "measure"), compiler=trouble) as trials,
        pytest.raises(CompilerMissing, match="out of order"),
    ):
        list(trials.measure(jobs_of(SMALL, 2)))


def test_machines_that_cannot_be_measured() -> None:
    if not is_present(H200):
        with pytest.raises(TargetNotPresent, match="h200 needs that machine"):
            Trials(H200)


def test_a_worker_that_answers_nonsense() -> None:
    worker = Worker(("-c", "input(); print('[1]', flush=True); input()"))
    with pytest.raises(WorkerLost):
        worker.ask({"do": "anything"}, 10)
    assert not worker.alive
    worker.close()


def test_real_candidates_compile(tmp_path: Path) -> None:
    """The real compiling process, and a measuring process that cannot run them."""
    pytest.importorskip("cuda.bindings.nvrtc")
    with Trials(H200, compile_workers=1, measurer=(FAKES, "measure")) as trials:
        answer = trials._compile(jobs_of(SMALL, 1)[0])
        assert Path(answer["program"]["binary"]).read_bytes()[:4] == b"\x7fELF"
        assert all(found["registers"] > 0 for found in answer["resources"].values())
        assert "+".join(dict.fromkeys(kernel for kernel, *_ in answer["program"]["calls"])) == answer["code"]


@pytest.mark.gpu
def test_candidates_on_the_gpu() -> None:
    here: Machine = machine("cuda")
    jobs = [Job(SMALL, choice.schedule) for choice in islice(rank(SMALL, here), 6)]
    with Trials(here, compile_workers=4) as trials:
        outcomes = list(trials.measure(jobs))
        assert [outcome.reason for outcome in outcomes] == [""] * 6
        assert all(0 < outcome.seconds < 1e-3 and (outcome.relative_error or 0) < 1e-5 for outcome in outcomes)
        again = trials.remeasure(jobs, mode="warm")
    assert all(outcome.timing is not None and outcome.timing.count == 9 for outcome in again)


# What is measured again


def test_candidates_far_from_their_predictions_are_doubted() -> None:
    predicted = [1.0, 1.0, 1.0, 1.0, 1.0]
    assert doubtful([1.0, 1.5, 1.6, 1.7, 1.9], predicted) == []
    assert doubtful([1.0, 1.5, 1.6, 1.7, 4.0], predicted) == [0, 4]
    assert doubtful([0.5, 1.5, 1.6, 1.7, 1.8], predicted) == [0]
    assert doubtful([3.0, 4.0, 5.0, 6.0, 7.0], predicted) == [0]  # all are slower than predicted: the first decides
    assert doubtful([9.0, 10.0, 11.0, 12.0, 13.0], [10.0] * 5) == []  # alike, and like the predictions
    assert doubtful([1.0, 1.05, 3.0], [0.0, 0.0, 0.0]) == [0, 1]
    assert doubtful([1.0, 9.0], [1.0, 0.0]) == [] and doubtful([], []) == []


@given(st.lists(st.tuples(st.floats(1e-6, 1e-3), st.floats(0.3, 3.0)), min_size=1, max_size=9))
def test_every_candidate_far_from_the_usual_ratio_is_doubted(entries: list[tuple[float, float]]) -> None:
    ordered = sorted(entries)
    ratios = [ratio for _, ratio in ordered]
    found = doubtful([seconds for seconds, _ in ordered], [seconds / ratio for seconds, ratio in ordered])
    usual = statistics.median(ratios)
    assert {place for place, ratio in enumerate(ratios) if not 0.999 / FAR < ratio / usual < 1.001 * FAR} <= set(found)
    assert not found or found[0] == 0


def test_a_delayed_candidate_is_measured_again_and_its_new_time_counts(tmp_path: Path) -> None:
    """The stand-in delays the first measurement of one candidate, as other work on the machine would."""
    choices = list(islice(rank(SMALL, H200), 5))
    late = serialisation.schedule_text(choices[2].schedule)
    with Records(tmp_path / "records.sqlite") as records:
        tune([SMALL], H200, 5, records, start=lambda: processes({late: "delay"}))
        rough, careful = (entry for entry in records.of(key_of(SMALL), "h200") if entry.schedule == late)
        assert rough.seconds > 100 * careful.seconds and (rough.count, careful.count) == (4, 9)
        assert next(entry for entry in records.standing(key_of(SMALL), "h200") if entry.schedule == late) == careful


def test_again_measures_what_is_recorded(tmp_path: Path) -> None:
    log = tmp_path / "questions"
    with Records(tmp_path / "records.sqlite") as records:
        tune([SMALL], H200, 6, records, start=processes)
        before = {entry.schedule: entry.date for entry in records.standing(key_of(SMALL), "h200")}
        done = tune([SMALL], H200, 2, records, again=True, start=lambda: processes({"log": str(log)}))
        after = {entry.schedule: entry.date for entry in records.standing(key_of(SMALL), "h200")}
    assert (done.known, done.measured) == (0, 6) and log.read_text().split().count("trial") == 6
    assert before.keys() == after.keys() and all(after[schedule] > date for schedule, date in before.items())
