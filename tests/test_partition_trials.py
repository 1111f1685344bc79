"""Whole programs measured in turns: failures of one cost only it, the process that checks and times them, and what is left of an interruption."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tilewright
from tests.emulated_gpu import emulated
from tests.test_chain_trials import INPUT, MODULE, recorded
from tilewright.hardware import machine
from tilewright.runtime import artifact
from tilewright.runtime.examination import WholeCalls
from tilewright.runtime.executable import Executable, Image
from tilewright.runtime.gpu import GpuEngine
from tilewright.runtime.verify import TOLERANCES
from tilewright.tuning import partition_trials, partition_worker, serialisation
from tilewright.tuning.partition_trials import Measurer, WholeOutcome, measured
from tilewright.tuning.partition_worker import SPREAD, Server, longest_path
from tilewright.tuning.records import Records
from tilewright.tuning.trials import ROUNDS
from tilewright.tuning.workers import Worker

NATIVE = machine("native")
FAKE = str(Path(__file__).with_name("fake_partition_worker.py"))


def image(module: nn.Module, *inputs: torch.Tensor) -> Image:
    return tilewright.compile(module.eval(), inputs, "native", threads=1).image


@pytest.fixture(scope="module")
def linear() -> Image:
    torch.manual_seed(0)
    return image(nn.Linear(4, 3), torch.randn(2, 4))


def measurer(faults: dict[str, str], seconds: float = 5.0) -> Measurer:
    return Measurer(NATIVE, 1, command=(FAKE, json.dumps(faults)), seconds=seconds)


def outcomes(images: list[Image | str], faults: dict[str, str], seconds: float = 5.0) -> list[WholeOutcome]:
    return measured(images, measurer(faults, seconds))


def test_programs_are_timed_in_turns(linear: Image) -> None:
    told: list[int] = []
    found = measured([linear] * 3, measurer({}), told.append)
    assert [outcome.status for outcome in found] == ["measured"] * 3 and told == [1, 2, 3]
    assert [outcome.timing.median for outcome in found if outcome.timing is not None] == [1.0, 2.0, 3.0]
    assert all(outcome.timing is not None and outcome.timing.count == ROUNDS for outcome in found)
    assert all(outcome.environment["gpu"] == "fake" and outcome.relative_error == 1e-7 for outcome in found)


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("hang", "failed", "no answer within"),
        ("crash", "failed", "the process ended"),
        ("fatal", "failed", "a kernel failed: an illegal memory access"),
        ("error", "failed", "made up"),
        ("wrong", "wrong", "wrong result"),
    ],
)
def test_a_program_that_fails_costs_only_itself(fault: str, status: str, words: str, linear: Image, tmp_path: Path) -> None:
    log = tmp_path / "log"
    first, second, third = outcomes([linear] * 3, {"1": fault, "log": str(log)}, 3.0)
    assert (second.status, second.timing) == (status, None) and words in second.reason
    assert [outcome.timing.median for outcome in (first, third) if outcome.timing is not None] == [1.0, 3.0]
    restarted = fault in ("hang", "crash", "fatal")
    again = ["start none", "load 0"] if restarted else []
    assert log.read_text().splitlines() == ["start none", "load 0", "load 1", *again, "load 2", "time none"]


def test_a_program_that_cannot_be_made_or_stored_is_told(linear: Image) -> None:
    node = replace(linear.program.graph.nodes[0], attributes={**linear.program.graph.nodes[0].attributes, "odd": object()})
    graph = replace(linear.program.graph, nodes=(node, *linear.program.graph.nodes[1:]))
    unstorable = replace(linear, program=replace(linear.program, graph=graph))
    first, second, third = outcomes([linear, "a kernel does not compile: made up", unstorable], {})
    assert first.status == "measured" and second == WholeOutcome("failed", "a kernel does not compile: made up", None, None, second.environment)
    assert third.status == "failed" and "it cannot be stored" in third.reason and "object" in third.reason


def test_without_the_first_none_is_timed(linear: Image, tmp_path: Path) -> None:
    log = tmp_path / "log"
    first, second = outcomes([linear] * 2, {"0": "wrong", "log": str(log)})
    assert first.status == "wrong" and (second.status, second.reason) == ("failed", "there is no time to compare it with")
    assert "time" not in log.read_text() and "load 1" not in log.read_text()


@pytest.mark.parametrize("fault", ["crash", "error"])
def test_a_failure_while_they_are_timed_is_everyones(fault: str, linear: Image) -> None:
    assert [outcome.status for outcome in outcomes([linear] * 2, {"time": fault})] == ["failed"] * 2


def test_what_is_wrong_after_the_turns_is_not_measured(linear: Image) -> None:
    first, second = outcomes([linear] * 2, {"time": "wrong later"})
    assert first.timing is not None and (second.status, second.reason, second.timing) == ("wrong", "made up", None)


def test_a_process_that_cannot_start_is_a_reason(linear: Image) -> None:
    first, second = outcomes([linear] * 2, {"start": "error"})
    assert first.status == "failed" and "made up" in first.reason and second.status == "failed"


def test_an_interruption_leaves_nothing(linear: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers: list[Any] = []

    class Kept(Worker):
        def __init__(self, command: Any) -> None:
            super().__init__(command)
            workers.append(self)

    def interrupt(done: int) -> None:
        assert any(tmp_path.iterdir()) and workers[0].alive
        raise KeyboardInterrupt

    monkeypatch.setattr(partition_trials, "Worker", Kept)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        measured([linear] * 2, measurer({}), interrupt)
    assert len(workers) == 1 and not workers[0].alive and not any(tmp_path.iterdir())


# The process


class Counter(nn.Module):
    """Adds what it was called with to a buffer, which its result depends on."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x
        return self.total * x


class Picks(nn.Module):
    """Rows by position, and a part that runs through PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 6)

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(self.rows(positions) + x), torch.linalg.det(x.reshape(3, 2, 3)[:, :, :2])


MODELS = {
    "rows and PyTorch": (Picks(), (torch.tensor([3, 1, 4]), torch.randn(3, 6))),
    "a buffer that changes": (Counter(), (torch.randn(4),)),
    "no result of kernels": (nn.Identity(), (torch.randn(4),)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::tilewright.errors.NotCompiled")
def test_programs_are_checked_and_timed(name: str, tmp_path: Path) -> None:
    module, inputs = MODELS[name]
    server = Server(0, 1)
    assert server({"do": "start", "machine": serialisation.encode(NATIVE)})["gpu"].endswith("1 threads")
    saved = image(module, *inputs)
    for number in range(2):
        path = tmp_path / str(number)
        with tilewright.compile(module.eval(), inputs, "native", threads=1) as executable:
            executable.save(path)
        answer = server({"do": "load", "path": str(path), "seed": 3, "tf32": False})
        assert 0 <= answer["relative_error"] < 1e-5
    answer = server({"do": "time", "rounds": 3})
    assert [len(times) for times in answer["times"]] == [3, 3] and all(second > 0 for times in answer["times"] for second in times)
    assert answer["wrong"] == ["", ""]
    if isinstance(module, Counter):
        assert torch.equal(module.total, torch.full((4,), 2.0)) and torch.equal(saved.states["total"], module.total)


def test_a_program_with_other_results_is_wrong(tmp_path: Path) -> None:
    server = Server(0, 1)
    server({"do": "start", "machine": serialisation.encode(NATIVE)})
    answers = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        tilewright.compile(nn.Linear(4, 3), (torch.randn(2, 4),), "native", threads=1).save(tmp_path / "artifact")
        answers.append(server({"do": "load", "path": str(tmp_path / "artifact"), "seed": 0, "tf32": False}))
    assert "error" not in answers[0] and "error" not in answers[1]
    assert answers[2]["wrong"] and "has the relative error" in answers[2]["error"]
    assert len(server({"do": "time", "rounds": 1})["times"]) == 2


def noisy(server: Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Has the results that the process checks be off by "share" of their largest magnitude."""
    off, results = {"share": 0.0}, WholeCalls.results

    def changed(calls: WholeCalls) -> dict[str, torch.Tensor]:
        found = results(calls)
        return {name: (value.double() + off["share"] * value.double().abs().max()).to(value.dtype) for name, value in found.items()}

    monkeypatch.setattr(WholeCalls, "results", changed)
    server({"do": "start", "machine": serialisation.encode(NATIVE)})
    return off


@pytest.mark.parametrize("layers", [1, 24])
def test_rounding_may_add_up_over_a_deep_network(layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the tolerance of one value is wrong for one layer, and is not for many. The other programs may have a few times what the first reaches,
    whatever the depth allows."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))).half()
    path, server = tmp_path / "artifact", Server(0, 1)
    tilewright.compile(module.eval(), (torch.randn(2, 8).half(),), "native", threads=1).save(path)
    off = noisy(server, monkeypatch)
    request = {"do": "load", "path": str(path), "seed": 0, "tf32": False}
    one = TOLERANCES["f16"]
    off["share"] = 2 * one
    answer = server(request)
    assert answer.get("wrong", False) == (layers == 1)
    off["share"] = 0.0 if layers == 1 else 2 * one
    if layers == 1:
        assert server(request)["relative_error"] < one / SPREAD
    for share, wrong in ((one / 2, False), (1.5 * one, layers == 1), (4 * SPREAD * one, True)):
        off["share"] = share
        answer = server(request)
        assert answer.get("wrong", False) == wrong and ("error" in answer) == wrong


def test_the_longest_path_counts_regions_and_steps() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three, self.steps = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.LSTM(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = torch.cat([self.two(self.one(x)), self.three(x)], -1)
            return y, self.steps(x)[0]

    paths = [longest_path(image(Two(), torch.randn(steps, 2, 8)).program) for steps in (1, 30, 60)]
    assert paths[2] - paths[1] == 30 and 2 <= paths[0] < 30


def test_programs_on_a_gpu_are_checked_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over an emulated one: a chain and its regions apart; then one that lacks memory, which is told, and costs nothing else."""
    here, programs = machine("h200"), []
    with Records(tmp_path / "records.sqlite") as records:
        for ratio in (0.5, 1.2):
            records.forget()
            recorded(records, ratio, here)
            programs.append(tilewright.compile(MODULE.eval(), (INPUT,), "h200", records=records.path))
    kinds = [[region.kind for region in executable.image.program.regions] for executable in programs]
    assert ["chain" in own for own in kinds] == [True, False]
    every: Any = SimpleNamespace(image=SimpleNamespace(kernels={name: kernel for one in programs for name, kernel in one.image.kernels.items()}))
    server = Server(0, 1)
    server.other = torch.zeros(16)  # `start` would ask PyTorch for the GPU
    monkeypatch.setattr(partition_worker, "load", lambda path: Executable(artifact.read(path)))
    monkeypatch.setattr(GpuEngine, "idle", lambda engine, launches: None)
    monkeypatch.setattr(GpuEngine, "moment", lambda engine: time.perf_counter())
    monkeypatch.setattr(GpuEngine, "seconds", lambda engine, start, end: end - start)
    with emulated(every) as driver:
        answers = []
        for number, executable in enumerate(programs):
            executable.save(tmp_path / str(number))
            answers.append(server({"do": "load", "path": str(tmp_path / str(number)), "seed": 1, "tf32": False}))
        assert all(0 < answer["relative_error"] < 1e-5 for answer in answers), answers

        def lacking(*_: object) -> Executable:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

        with monkeypatch.context() as patch:
            patch.setattr(partition_worker, "load", lacking)
            with pytest.raises(torch.OutOfMemoryError):
                server({"do": "load", "path": str(tmp_path / "0"), "seed": 1, "tf32": False})
        monkeypatch.setattr(partition_worker, "ROUND_SECONDS", 0.0)
        answer = server({"do": "time", "rounds": 2})
    assert [len(times) for times in answer["times"]] == [2, 2] and answer["wrong"] == ["", ""] and driver.launches


def test_a_lack_of_memory_is_the_reason(linear: Image) -> None:
    """Of the program that lacks it; and of all if the process cannot start for it."""
    lacking = "OutOfMemoryError: CUDA out of memory"
    first, second, third = outcomes([linear] * 3, {"1": "memory"})
    assert (first.status, second.status, third.status) == ("measured", "failed", "measured") and second.reason.startswith(lacking)
    for outcome in outcomes([linear], {"start": "memory"}):
        assert outcome.status == "failed" and lacking in outcome.reason


def test_whole_programs_in_a_process_of_their_own(linear: Image) -> None:
    torch.manual_seed(1)
    other = image(nn.Linear(4, 3), torch.randn(2, 4))
    right, same, wrong = measured([linear, linear, other], Measurer(NATIVE, 1))
    assert right.timing is not None and same.timing is not None and 0 < right.timing.lower <= right.timing.median
    assert right.environment["gpu"].endswith("1 threads") and (wrong.status, wrong.timing) == ("wrong", None)
