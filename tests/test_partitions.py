"""Partitions of a whole graph: which are compared, what their times decide, and what records and reports have of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tilewright
from tests.test_chain_trials import INPUT, MODULE, recorded
from tests.test_chains import conv, graph_of
from tests.test_page import data_of
from tilewright.cli import main
from tilewright.errors import InternalFault
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.region import MergeDecision, Program, Ways
from tilewright.kernels.schema import USUAL, Numerics
from tilewright.partition.merges import BY_MERGES, CHAIN, LEAST_GAIN, MEASURED_LOSS, Memory, Policy
from tilewright.partition.plan import plan_program
from tilewright.report.explanation import search_lines
from tilewright.report.page.data import Subject
from tilewright.report.page.html import page
from tilewright.runtime import artifact
from tilewright.runtime.executable import Executable
from tilewright.tuning import partition_trials, partitions, serialisation
from tilewright.tuning.measurement import Measurement
from tilewright.tuning.partition_trials import WholeOutcome
from tilewright.tuning.partitions import CHOSEN, MOST, Network, Partition, Planning, alternatives, compared, is_faster, program_code
from tilewright.tuning.records import Records
from tilewright.tuning.trials import Timing
from tilewright.tuning.tuning import from_records, recorded_chains

NATIVE, H200 = machine("native"), machine("h200")
PIPELINE: Any = sys.modules["tilewright.compile"]


# Which are compared


def decision(name: str, taken: bool, predicted: tuple[float, float], measured: tuple[float, float] | None = None, kind: str = CHAIN) -> MergeDecision:
    return MergeDecision((name, f"{name}.1"), taken, name, kind, Ways(predicted, measured))


def refusing(*names: str, kind: str = CHAIN) -> frozenset[tuple[str, tuple[str, ...]]]:
    return frozenset((kind, (name, f"{name}.1")) for name in names)


def test_partitions_that_leave_doubt_are_compared() -> None:
    search = (
        decision("near", True, (0.96, 1.0)),
        decision("clear", True, (0.5, 1.0)),
        decision("like near", True, (0.96, 1.0)),
        decision("nearest", False, (0.9, 1.0), (1.01, 1.0)),
        decision("other", False, (1.05, 1.0), kind="siblings"),
        MergeDecision(("impossible", "b"), False, "cannot be one kernel", CHAIN),
    )
    found = alternatives(search, 100.0, 9)
    assert [(partition.name, partition.policy) for partition in found] == [
        ("without chains", Policy(refused=refusing("near", "clear", "like near", "nearest"))),
        ("merges by predictions", Policy(predicted=True)),
        ("chain nearest -> nearest.1 together", Policy(taken=refusing("nearest"))),
        ("chain near -> near.1 and 1 like it apart", Policy(refused=refusing("near", "like near"))),
        ("siblings other -> other.1 together", Policy(taken=refusing("other", kind="siblings"))),
    ]
    assert alternatives(search, 100.0, 2) == found[:2] and alternatives((), 1.0, 3) == []
    assert [partition.name for partition in alternatives(search, 150.0, 9)[2:]] == ["chain near -> near.1 and 1 like it apart"]


TIMES = st.floats(1e-6, 1e-3)


@given(
    st.lists(st.tuples(st.booleans(), TIMES, TIMES, st.none() | st.tuples(TIMES, TIMES), st.sampled_from((CHAIN, "join"))), max_size=8),
    st.integers(0, 5),
)
def test_partitions_differ_and_are_few(items: Sequence[tuple[bool, float, float, Any, str]], most: int) -> None:
    search = [decision(f"n{i}", taken, (one, two), measured, kind) for i, (taken, one, two, measured, kind) in enumerate(items)]
    found = alternatives(search, 1e-4, most)
    assert len(found) <= most and len({partition.policy for partition in found} | {BY_MERGES}) == len(found) + 1
    assert len({partition.text for partition in (*found, CHOSEN)}) == len(found) + 1
    by_key = {item.key: item for item in search}
    for partition in found:
        serialisation.check_schedule_text(partition.text)
        for taken, keys in ((True, partition.policy.taken), (False, partition.policy.refused)):
            flipped = {by_key[key].taken for key in keys}
            assert partition.name == "without chains" or flipped <= {not taken}
        if partition.policy.taken:
            ((together, apart),) = {by_key[key].ways.measured or by_key[key].ways.predicted for key in partition.policy.taken}  # type: ignore[union-attr]
            assert abs(together - apart) <= MEASURED_LOSS * apart


# What their times decide


class Planned:
    """A network of which chains were recorded to take `ratio` of the time of their regions, on a machine; and what measured its partitions."""

    def __init__(self, records: Records, here: Machine, ratio: float = 0.5) -> None:
        self.records, self.here, self.graph = records, here, graph_of(MODULE, INPUT)
        if not len(records):
            recorded(records, ratio, here)
        self.chooser, self.chains = from_records(records), recorded_chains(records)
        self.network = Network(self.graph, here, 1, "fp32", USUAL)
        self.chosen = self.plan()
        self.policies: list[Policy] = []
        self.programs: list[Program] = []

    def plan(self, memory: Memory | None = None, policy: Policy = BY_MERGES) -> Program:
        return plan_program(self.graph, self.here, 1, self.chooser, recorded=self.chains, memory=memory, policy=policy)

    def replan(self, memory: Memory, policy: Policy) -> Program:
        self.policies.append(policy)
        return self.plan(memory, policy)

    def decided(self, seconds: Callable[[Program], WholeOutcome] | None, trials: int = MOST) -> Program:
        """The program, where trials find these outcomes; None: nothing is measured."""

        def measure(programs: Sequence[Program]) -> list[WholeOutcome]:
            assert seconds is not None
            self.programs += programs
            return [seconds(program) for program in programs]

        planning = Planning(self.replan, Memory(), Memory())
        return compared(self.network, self.chosen, planning, self.records, trials, None if seconds is None else measure)


def took(median: float, spread: float = 0.001) -> WholeOutcome:
    return WholeOutcome("measured", "", Timing(median, median * (1 - spread), median * (1 + spread), 9), 1e-7, {"gpu": "g", "driver": "1"})


def has_chain(program: Program) -> bool:
    return any(lowered.region.kind == "chain" for lowered in program.regions)


def by_chain(with_chain: WholeOutcome, without: WholeOutcome) -> Callable[[Program], WholeOutcome]:
    return lambda program: with_chain if has_chain(program) else without


def outcomes(seconds: Callable[[Program], WholeOutcome], programs: Sequence[Program]) -> list[WholeOutcome]:
    return [seconds(program) for program in programs]


def never(_: Program) -> WholeOutcome:
    raise AssertionError("measured")


@pytest.fixture
def records(tmp_path: Path) -> Any:
    with Records(tmp_path / "records.sqlite") as store:
        yield store


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("here", [NATIVE, H200], ids=lambda here: here.name)
def test_the_time_of_the_whole_overrules_those_of_its_merges(here: Machine, records: Records) -> None:
    """The chain took half of its regions' time by itself. A second compilation takes what was recorded, and measures nothing."""
    case = Planned(records, here)
    assert has_chain(case.chosen)
    program = case.decided(by_chain(took(2.0), took(1.0)))
    assert not has_chain(program) and 1 < len(case.programs) <= MOST
    (taken,) = [partition for partition in program.partitions if partition.taken]
    assert taken.text.startswith("without chains: predicted ") and taken.text.endswith("measured 1 s (999 ms to 1 s)")
    first = program.partitions[0]
    assert first.text.startswith(f"{CHOSEN.name}: predicted ") and "measured 2 s" in first.text and not first.taken
    assert [decision.text for decision in program.search if "decided by the time of the whole network" in decision.text]
    again = Planned(records, here)
    other = again.decided(never)
    assert (program_code(other), other.partitions) == (program_code(program), program.partitions)
    assert len(again.policies) == 1  # only the one that is taken was planned again
    later = Planned(records, here).decided(None, trials=0)
    assert (program_code(later), later.partitions) == (program_code(program), program.partitions)


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("here", [NATIVE, H200], ids=lambda here: here.name)
def test_merges_that_lose_by_themselves_may_win_as_a_whole(here: Machine, records: Records) -> None:
    case = Planned(records, here, ratio=1.05)
    assert not has_chain(case.chosen)
    program = case.decided(by_chain(took(1.0), took(2.0)))
    assert has_chain(program) and sum(partition.taken for partition in program.partitions) == 1


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    ("chosen", "other"),
    [
        (took(1.0), took(1.0 - LEAST_GAIN / 2)),  # too little
        (took(1.0, 0.2), took(0.9)),  # the middle halves overlap
        (took(1.0), took(0.9, 0.2)),
        (took(1.0), took(1.5)),
    ],
)
def test_within_noise_the_merges_own_times_decide(chosen: WholeOutcome, other: WholeOutcome, records: Records) -> None:
    case = Planned(records, NATIVE)
    program = case.decided(by_chain(chosen, other))
    assert program_code(program) == program_code(case.chosen)
    assert [partition.taken for partition in program.partitions] == [True] + [False] * (len(program.partitions) - 1)


def test_the_fastest_of_several_is_taken(records: Records) -> None:
    case = Planned(records, NATIVE, ratio=0.95)
    codes: dict[str, int] = {}

    def seconds(program: Program) -> WholeOutcome:
        return took(4.0 - codes.setdefault(program_code(program), len(codes)))

    program = case.decided(seconds)
    assert len(codes) > 2 and codes[program_code(program)] == len(codes) - 1


FAILED = {
    "wrong": WholeOutcome("wrong", "wrong result: y has the relative error 1.00e+00 > 1e-04"),
    "failed": WholeOutcome("failed", "a kernel does not compile: error: made up"),
}


@pytest.mark.parametrize("status", FAILED)
def test_partitions_that_fail_are_dropped_with_the_reason(status: str, records: Records) -> None:
    """They are recorded, and not tried again."""
    case = Planned(records, NATIVE)
    program = case.decided(by_chain(took(1.0), FAILED[status]))
    assert has_chain(program) and program.partitions[0].taken
    assert any(partition.text.endswith(f"; {status}: {FAILED[status].reason}") and not partition.taken for partition in program.partitions)
    assert Planned(records, NATIVE).decided(never).partitions == program.partitions


def test_without_a_time_of_the_chosen_one_nothing_is_decided(records: Records) -> None:
    case = Planned(records, NATIVE)
    program = case.decided(by_chain(FAILED["failed"], took(1e-9)))
    assert program_code(program) == program_code(case.chosen) and program.partitions[0].taken
    assert "failed: a kernel does not compile" in program.partitions[0].text


def test_partitions_are_measured_again_if_the_chosen_one_has_no_time(records: Records) -> None:
    """What failed then, such as for lack of memory beside other processes, need not fail now."""
    Planned(records, NATIVE).decided(by_chain(FAILED["failed"], took(1.0)))
    program = Planned(records, NATIVE).decided(by_chain(took(2.0), took(1.0)))
    assert not has_chain(program) and all("measured" in partition.text or "its kernels are" in partition.text for partition in program.partitions)
    assert Planned(records, NATIVE).decided(never).partitions == program.partitions


def test_few_trials_remain_few(records: Records) -> None:
    for trials in (0, 1):
        program = Planned(records, NATIVE, ratio=0.95).decided(never, trials)
        assert program.partitions == ()
    case = Planned(records, NATIVE)
    two = case.decided(by_chain(took(1.0), took(2.0)), 2)
    assert len(two.partitions) == 2 == len(case.programs)
    assert Planned(records, NATIVE).decided(never, 2).partitions == two.partitions
    more = Planned(records, NATIVE)
    assert len(more.decided(by_chain(took(1.0), took(2.0)), 9).partitions) > 2 and len(more.programs) > 2


def test_partitions_with_one_plan_are_measured_once(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    same = Partition("the same", Policy(refused=refusing("nothing")))
    monkeypatch.setattr(partitions, "alternatives", lambda search, seconds, most: [same])
    case = Planned(records, NATIVE)
    program = case.decided(lambda _: took(1.0))
    assert len(case.programs) == 1
    assert program.partitions[1].text.endswith(f"failed: its kernels are those of the partition {CHOSEN.name}")
    assert Planned(records, NATIVE).decided(never).partitions == program.partitions


def test_records_of_other_code_do_not_decide(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither if what the merges choose has changed, nor if the fastest partition would be planned otherwise today."""
    case = Planned(records, NATIVE)
    case.decided(by_chain(took(2.0), took(1.0)))
    changed = Planned(records, NATIVE)
    changed.chosen = replace(changed.chosen, regions=changed.chosen.regions[:-1])
    program = changed.decided(None, trials=0)
    assert program.partitions == () and program_code(program) == program_code(changed.chosen)
    other = Planned(records, NATIVE)
    monkeypatch.setattr(other, "replan", lambda memory, policy: replace(other.plan(memory, policy), regions=()))
    program = other.decided(None, trials=0)
    assert program_code(program) == program_code(other.chosen)
    assert [partition.taken for partition in program.partitions].index(True) == 0


def test_the_memory_is_that_of_the_partition_that_is_taken(records: Records) -> None:
    for seconds in (by_chain(took(2.0), took(1.0)), by_chain(took(1.0), took(2.0))):
        case = Planned(records, NATIVE)
        before, memory = Memory(), Memory()
        case.plan(memory)
        with_chain = any(len(results) > 1 for results in memory.chains.values())
        planning = Planning(case.replan, before, memory)
        program = compared(case.network, case.chosen, planning, records, MOST, partial(outcomes, seconds))
        assert with_chain and any(len(results) > 1 for results in memory.chains.values()) == has_chain(program)
        assert before == Memory()
        records.forget()
        recorded(records, 0.5, NATIVE)


def entry(lower: float, median: float, upper: float) -> Measurement:
    return replace(SAMPLE, lower=lower, median=median, upper=upper)


SAMPLE = Measurement(
    "ab" * 10, "network", "p", CHOSEN.text, "d", "m", "", "", "", "network", "c", "g", "measured", "", 1.0, 1.0, 1.0, 9, False, None, "{}", "2026-01-01"
)  # fmt: skip


@given(st.lists(TIMES, min_size=3, max_size=3).map(sorted), st.lists(TIMES, min_size=3, max_size=3).map(sorted))
def test_of_two_only_one_is_faster(first: list[float], second: list[float]) -> None:
    one, other = entry(*first), entry(*second)
    assert not (is_faster(one, other) and is_faster(other, one)) and not is_faster(one, one)
    assert not is_faster(one, other) or one.seconds < other.seconds
    missing = replace(one, status="failed", median=None, lower=None, upper=None)
    assert not is_faster(missing, other) and not is_faster(one, missing)


def test_an_interruption_records_nothing(records: Records) -> None:
    def interrupt(_: Program) -> WholeOutcome:
        raise KeyboardInterrupt

    case = Planned(records, NATIVE)
    known = len(records)
    with pytest.raises(KeyboardInterrupt):
        case.decided(interrupt)
    assert len(records) == known


def test_a_network_is_known_by_what_determines_its_partitions() -> None:
    """Not by the values of its constants."""
    graph, other = graph_of(conv(4, 8), torch.randn(1, 4, 6, 6)), graph_of(conv(4, 8), torch.randn(1, 4, 6, 6))
    network = Network(graph, NATIVE, 1, "fp32", USUAL)
    assert network.key == Network(other, NATIVE, 1, "fp32", USUAL).key
    networks = [
        network,
        Network(graph_of(conv(4, 8), torch.randn(1, 4, 6, 7)), NATIVE, 1, "fp32", USUAL),
        Network(graph_of(nn.Conv2d(4, 8, 1), torch.randn(1, 4, 6, 6)), NATIVE, 1, "fp32", USUAL),
        replace(network, precision="bf16"),
        replace(network, numerics=Numerics(winograd=False)),
        replace(network, updates=((0, 0),)),
    ]
    assert len({one.key for one in networks}) == len(networks)
    assert replace(network, threads=2).key == network.key and replace(network, threads=2).place != network.place
    assert str(network).startswith("network of ") and "1x4x6x6" in str(network)


# Compilations


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Executable, Path, list[tuple[str, int, int]]]]:
    """A network compiled with trials of whole programs alone, times of chains and regions being recorded, with the records, and what its progress
    said."""
    path, said = tmp_path_factory.mktemp("tuned") / "records.sqlite", []
    with Records(path) as store:
        recorded(store, 0.95, NATIVE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PIPELINE, "measure", lambda *_: None)
        yield compiled(path, 3, progress=lambda *state: said.append(state)), path, said


def compiled(path: Path, trials: int, module: nn.Module = MODULE, **options: Any) -> Executable:
    return tilewright.compile(module.eval(), (INPUT,), "native", trials=trials, records=path, threads=1, **options)


def test_whole_programs_are_compared_in_a_compilation(tuned: Any) -> None:
    executable, path, said = tuned
    with torch.no_grad():
        torch.testing.assert_close(executable(INPUT).double(), MODULE.double()(INPUT.double()), rtol=1e-5, atol=1e-5)
        MODULE.float()
    told = executable.plan.partitions
    assert 2 <= len(told) <= 3 and sum(partition.taken for partition in told) == 1 and "measured" in told[0].text
    counted = [(done, total) for stage, done, total in said if stage == "partitions"]
    assert counted == [(done, counted[0][1]) for done in range(1, counted[0][1] + 1)] and executable.compile_seconds["partitions"] > 0
    with Records(path) as store:
        entries = [one for one in store.all() if one.kind == "network"]
        count = len(store)
        assert len(entries) == len(told) and len({one.date for one in entries}) == 1
        assert all(one.problem.startswith("network of ") and one.machine.endswith("with 1 threads") for one in entries)
        assert store.export_lines(path.with_name("lines.jsonl")) == count
    with Records(path.with_name("other.sqlite")) as copied:
        assert copied.import_lines(path.with_name("lines.jsonl")) == count
    for trials in (3, 0):
        again = compiled(path, trials)
        assert again.plan.partitions == told and again.image.sources == executable.image.sources
    with Records(path) as store:
        assert len(store) == count


def test_what_was_compared_is_told(tuned: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    executable, path, _ = tuned
    told = executable.plan.partitions
    chosen = next(partition for partition in told if partition.taken)
    assert f"of {len(told)} partitions compared: {chosen.text}" in " ".join(str(executable.plan).split())
    assert json.loads(json.dumps(executable.plan.data()))["partitions"][0]["text"] == told[0].text
    executable.save(tmp_path / "model.zip")
    image = artifact.read(tmp_path / "model.zip")
    assert image.program.partitions == told
    lines = list(search_lines(image, "model"))
    start = lines.index(f"{len(told)} partitions of the whole network measured in turns:")
    assert lines[start + 1 : start + 1 + len(told)] == [f"{number:>5}. {partition}" for number, partition in enumerate(told, 1)]
    shown = data_of(page([Subject("model", image, 1)], lambda done, total: None))["subjects"][0]
    assert shown["partitions"] == [str(partition) for partition in told]
    assert main(["records", "show", "--records", str(path), "--machine", "native"]) == 0
    assert "network" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::tilewright.errors.NotCompiled")
def test_networks_with_parts_through_pytorch_are_compared(tuned: Any, tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = MODULE

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inside(x)
            return torch.linalg.svdvals(y.flatten(2)) + y.mean()

    module = Both().eval()
    path = without_networks(tuned[1], tmp_path / "records.sqlite")
    executable = compiled(path, 2, module)
    assert any(lowered.kind == "torch" for lowered in executable.image.program.regions)
    assert len(executable.plan.partitions) == 2 and all("measured" in partition.text for partition in executable.plan.partitions)
    torch.testing.assert_close(executable(INPUT), module(INPUT), rtol=1e-4, atol=1e-4)


def test_other_sizes_follow_the_partition_of_the_first(tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which here is that without chains, whatever the models predict."""
    built = partition_trials.measured
    path = without_networks(tuned[1], tmp_path / "records.sqlite")

    def measured(images: Any, *given: Any) -> list[WholeOutcome]:
        assert all(outcome.timing is not None for outcome in built(images, *given))
        return [took(1.0 if not any(region.kind == "chain" for region in image.program.regions) else 2.0) for image in images]

    monkeypatch.setattr(partitions, "measured", measured)
    with tilewright.compile(MODULE.eval(), (INPUT,), "native", dynamic={"input": {0: "batch"}}, trials=2, records=path, threads=1) as dynamic:
        first, other = dynamic.program(INPUT), dynamic.program(INPUT.repeat(3, 1, 1, 1))
        assert next(partition for partition in first.plan.partitions if partition.taken).text.startswith("without chains")
        assert [row.kind for row in first.plan.rows] == [row.kind for row in other.plan.rows] and other.plan.partitions == ()
        x = torch.randn(3, 16, 20, 20)
        torch.testing.assert_close(dynamic(x), MODULE(x), rtol=1e-4, atol=1e-5)


def test_a_graph_that_cannot_be_stored_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records.sqlite"
    with Records(path):
        pass
    case = graph_of(MODULE, INPUT)
    odd = replace(case.nodes[0], attributes={**case.nodes[0].attributes, "odd": object()})
    network = Network(replace(case, nodes=(odd, *case.nodes[1:])), NATIVE, 1, "fp32", USUAL)
    program = plan_program(case, NATIVE, 1)
    planning = Planning(lambda **_: program, Memory(), Memory())
    for trials in (2, 0):
        found = partitions.fastest(network, program, planning, never, trials, path, lambda *_: None)  # type: ignore[arg-type]
        assert found.regions == program.regions and bool(found.partitions) == bool(trials)
    said = partitions.fastest(network, program, planning, never, 2, path, lambda *_: None).partitions[0]  # type: ignore[arg-type]
    assert said.taken and "not compared with others: an attribute of type object" in said.text


def without_networks(path: Path, other: Path) -> Path:
    """A file with the records of regions and chains alone."""
    with Records(path) as store, Records(other) as own:
        own.add(one for one in store.all() if one.kind != "network")
    return other


def test_a_fault_leaves_the_plan_of_the_merges(tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*_: object) -> Program:
        raise IndexError("made up")

    monkeypatch.setattr(partitions, "compared", fault)
    with pytest.warns(InternalFault, match="made up"):
        executable = compiled(without_networks(tuned[1], tmp_path / "r"), 2)
    assert executable.plan.partitions == ()
    torch.testing.assert_close(executable(INPUT), MODULE(INPUT), rtol=1e-4, atol=1e-5)


def test_a_kernel_that_does_not_compile_is_a_reason(tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the partition that needs it is dropped; without a warning, since the program has none of it."""
    built, calls = PIPELINE.binaries_of, []

    def failing(program: Program, *given: Any, **named: Any) -> Any:
        calls.append(program)
        binaries, faults = built(program, *given, **named)
        return (binaries, {next(iter(program.kernels())): "error: made up\nmore"}) if len(calls) == 2 else (binaries, faults)

    monkeypatch.setattr(PIPELINE, "binaries_of", failing)
    executable = compiled(without_networks(tuned[1], tmp_path / "r"), 2)
    first, second = executable.plan.partitions
    assert first.taken and second.text.endswith("failed: a kernel does not compile: error: made up")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_whole_programs_on_the_gpu(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = (
        nn.Sequential(conv(16, 48), conv(48, 48, 3, 1, 1, 48), conv(48, 16)).eval().cuda().to(dtype),
        torch.randn(1, 16, 20, 20).cuda().to(dtype),
    )

    def compared(search: Sequence[MergeDecision], seconds: float, most: int) -> list[Partition]:
        """All chains apart, and each chain that was measured together, whatever times say of them."""
        keys = [(CHAIN, decision.results) for decision in search if decision.ways is not None and decision.kind == CHAIN]
        return [Partition("apart", Policy(refused=frozenset(keys))), *(Partition(f"with {key}", Policy(taken=frozenset({key}))) for key in keys)][
            :most
        ]

    monkeypatch.setattr(partitions, "alternatives", compared)
    path = tmp_path / "records.sqlite"
    executable = tilewright.compile(module, (x,), trials=4, records=path)
    told = executable.plan.partitions
    with Records(path) as store:
        failed = [(one.problem, one.schedule, one.status, one.reason) for one in store.all() if one.status != "measured"]
    assert len(told) > 2 and all("measured" in partition.text or "its kernels are those" in partition.text for partition in told), (told, failed)
    again = tilewright.compile(module, (x,), records=path)
    assert again.plan.partitions == told and again.image.sources == executable.image.sources
    expected = module.double()(x.double())
    torch.testing.assert_close(executable(x).double(), expected, rtol=1e-2, atol=1e-2 if dtype is torch.float16 else 1e-4)
