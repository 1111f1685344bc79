"""`tilewright calibrate`: facts from samples, the file that holds them, what changes with it and what does not, and the benchmarks themselves."""

from __future__ import annotations

import ctypes
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tilewright
from tests.machine_facts import clauses_without_origin, missing_facts
from tests.stand_ins import measurement
from tilewright import settings
from tilewright.cli import main
from tilewright.errors import CacheError, CompilerMissing, KernelFailed, UnsupportedOption
from tilewright.hardware import Machine, catalogue, host_cpu, identified_cpu, machine
from tilewright.hardware import calibration_file as files
from tilewright.hardware.measured_facts import Calibration, assumed_facts, calibrated, with_facts
from tilewright.hardware.measured_facts import stored as stored_facts
from tilewright.kernels.schema import USUAL
from tilewright.report.explanation import explanation
from tilewright.runtime.encoding import decode_machine, encode_machine
from tilewright.runtime.fields import parsed
from tilewright.selection.choice import rank
from tilewright.toolchain import CCompiler, compile_kernels
from tilewright.tuning import calibrate as measuring
from tilewright.tuning import choices, serialisation
from tilewright.tuning.calibrate import calibrate, facts_of
from tilewright.tuning.calibration_worker import LEAST_ROUNDS, WINDOW, Benchmarks, measured, memory_bytes, working_sets
from tilewright.tuning.micro_benchmarks import STEPS, multiply_adds, source
from tilewright.tuning.problems import convolution_problem, key_of
from tilewright.tuning.records import Records
from tilewright.tuning.tuning import current_code, from_records, recorded_as
from tilewright.tuning.workers import WorkerLost

AVX512 = catalogue()["x86-avx512"]
SMALL = convolution_problem(32, 32, 9, 10, 3)
CYCLE = 0.25e-9
EMPTY: Mapping[str, float] = {}


def samples(cpu: Machine, others: Mapping[str, float] = EMPTY) -> dict[str, list[float]]:
    """What the benchmarks would give on a machine of 4 GHz with two ports: 100, 50 and 10 bytes a cycle of the caches, 10 GB/s of memory for each core,
    loads of 5, 15 and 50 cycles and of 100 ns, regions of 2 us. One in five repetitions is disturbed."""
    times = {"multiply-add": CYCLE / 2, "step": CYCLE, "parallel region": 2e-6, "memory byte": 1e-10, "memory load": 1e-7}
    times |= {"multiply-add of one core": CYCLE / 2.2, "memory byte of one core": 8e-11}
    for cache, (rate, cycles) in zip(cpu.caches, ((100, 5), (50, 15), (10, 50)), strict=False):
        times |= {f"level {cache.level} byte": CYCLE / rate, f"level {cache.level} load": cycles * CYCLE}
    return {name: [each, each, 9 * each, each, each] for name, each in (times | dict(others)).items()}


def calibration(cpu: Machine, threads: int = 2, others: Mapping[str, float] = EMPTY) -> Calibration:
    """A calibration of the machine from `samples`."""
    facts = facts_of(samples(cpu, others), cpu, threads)
    return Calibration(cpu.identity, cpu.description, threads, "2026-11-22T12:00:00+00:00", "gcc 12", "libgomp.so.1", facts)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def stored(cache: Path) -> Iterator[Path]:
    """The file of a calibration of this CPU."""
    host = identified_cpu()
    yield files.store(calibration(host), host)


# Facts


def test_facts_follow_from_the_samples() -> None:
    facts = {name: fact.value for name, fact in facts_of(samples(AVX512), AVX512, 2).items()}
    assert set(assumed_facts(AVX512)) | {"clock of one core", "memory bandwidth of one core"} == set(facts)
    assert facts == pytest.approx(
        {
            "clock": 4e9, "multiply-add ports": 2, "memory bandwidth": 2e10, "memory latency": 400, "parallel region": 2e-6, "clock of one core": 4.4e9,
            "memory bandwidth of one core": 1.25e10, "level 1 bandwidth": 100, "level 1 latency": 5, "level 2 bandwidth": 50, "level 2 latency": 15,
            "level 3 bandwidth": 10, "level 3 latency": 50,
        }
    )  # fmt: skip


@pytest.mark.parametrize(("rate", "ports", "clock"), [(0.9, 1, 3.6e9), (1.1, 1, 4.4e9), (1.8, 2, 3.6e9), (0.5, 0.5, 4e9), (3.7, 4, 3.7e9)])
def test_ports_are_a_power_of_two_and_their_product_with_the_clock_is_what_was_measured(rate: float, ports: float, clock: float) -> None:
    facts = facts_of(samples(AVX512, {"multiply-add": CYCLE / rate}), AVX512, 2)
    assert facts["multiply-add ports"].value == ports and facts["clock"].value == pytest.approx(clock)


def test_a_few_disturbed_repetitions_show_in_the_spread_alone() -> None:
    calm, disturbed = samples(AVX512), samples(AVX512)
    disturbed["memory load"] = [1e-7, 1e-7, 1e-7, 5e-7, 5e-7, 5e-7]
    before, after = (facts_of(each, AVX512, 2)["memory latency"] for each in (calm, disturbed))
    assert after.value == before.value and before.spread == 0 and after.spread == pytest.approx(4)


def test_cores_that_two_threads_share_count_once() -> None:
    two = replace(AVX512, processors=2)
    assert facts_of(samples(two), two, 4)["memory bandwidth"].value == pytest.approx(2e10)


@pytest.mark.parametrize("name", ["x86-avx2", "xeon-sapphire-rapids", "cortex-a53", "neoverse-n1"])
def test_the_machine_has_the_facts_and_says_so(name: str) -> None:
    plain = catalogue()[name]
    found = calibration(plain, 3, {"multiply-add": CYCLE})  # one port
    cpu = with_facts(plain, found)
    assert {name: value for name, (value, _) in assumed_facts(cpu).items()} == {name: found.facts[name].value for name in assumed_facts(plain)}
    assert cpu.peak_flops["fp32"] == pytest.approx(2 * cpu.processors * cpu.clock_hz * cpu.fma_ports * cpu.vector_lanes())
    if "bf16" in plain.peak_flops:  # of tile registers: by the clock alone
        assert cpu.peak_flops["bf16"] / plain.peak_flops["bf16"] == pytest.approx(cpu.clock_hz / plain.clock_hz)
    assert missing_facts(cpu) == () and [text for text in cpu.sources.values() if clauses_without_origin(text)] == []
    told = {field for field, text in cpu.sources.items() if f"measured by tilewright calibrate: {found.name}, 3 threads" in text}
    assert told == {"clock_hz", "fma_ports", "peak_flops", "memory_bandwidth", "memory_latency_cycles", "dispatch_seconds", "caches"}
    assert (cpu.identity, cpu.calibration) == (plain.digest, found.name) and cpu.digest != plain.digest
    different = {field for field in vars(plain) if getattr(plain, field) != getattr(cpu, field)}
    assert different <= told | {"sources", "calibration", "uncalibrated"}
    assert [(c.level, c.bytes, c.ways) for c in cpu.caches] == [(c.level, c.bytes, c.ways) for c in plain.caches]


# The file


def test_a_file_is_used_until_it_is_removed(stored: Path) -> None:
    plain = identified_cpu()
    found = host_cpu()
    assert found == machine("native") == machine(None) == with_facts(plain, calibration(plain)) and found.clock_hz == 4e9
    assert stored.stat().st_mode & 0o077 == 0 and stored.parent.stat().st_mode & 0o077 == 0
    assert stored_facts(plain) == calibration(plain) and json.loads(stored.read_text())["sha256"].startswith(found.calibration)
    assert files.remove(plain) == stored and files.remove(plain) is None
    assert host_cpu() == plain and plain.calibration == "" and plain.identity == plain.digest


def test_nothing_is_measured_or_stored_without_the_command(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "Worker", None)
    with tilewright.compile(nn.Linear(7, 6), (torch.randn(6, 7),), target="native") as executable:
        assert executable.image.machine == identified_cpu() and "calibrate" not in explanation(executable.image)
    assert not (cache / "calibration").exists()


def test_every_damage_is_an_error_that_names_file_and_remedy(stored: Path) -> None:
    text = stored.read_text()
    content = json.loads(text)
    damaged = [
        text.replace("4000000000.0", "4000000001.0"),
        text.replace("2 us", "").replace("B/s", "B/h"),
        text[:-9],
        "",
        "[]",
        "{}",
        "[" * 10_000,
        "\udce9",
    ]
    damaged += [json.dumps({field: value for field, value in content.items() if field != left_out}) for left_out in content]
    damaged += [json.dumps({**content, "version": 2}), json.dumps({**content, "more": 1})]
    assert len(set(damaged) - {text}) == len(damaged)
    for other in damaged:
        stored.write_bytes(other.encode(errors="surrogateescape"))
        with pytest.raises(
            CacheError, match=r"calibration .*is (damaged|not).*; run `tilewright calibrate` again, or `tilewright calibrate --remove`"
        ) as caught:
            host_cpu()
        assert str(stored) in str(caught.value)
    with pytest.raises(CacheError):
        tilewright.compile(nn.Linear(7, 6), (torch.randn(6, 7),), target="native")


def test_a_file_of_another_machine_or_without_a_fact_is_refused(stored: Path) -> None:
    host = identified_cpu()
    for other in (calibration(replace(host, processors=host.processors + 1)), replace(calibration(host), facts={})):
        other = replace(other, identity=other.identity)
        stored.write_text(
            json.dumps({"version": Calibration.version, **vars(other), "facts": {n: vars(f) for n, f in other.facts.items()}, "sha256": other.digest})
        )
        with pytest.raises(CacheError, match="it is of the machine|it has no valid clock"):
            host_cpu()


def test_other_cores_have_another_file(stored: Path) -> None:
    host = identified_cpu()
    assert calibrated(replace(host, processors=host.processors + 1)).calibration == ""


def test_a_file_that_others_may_write_is_not_used(stored: Path) -> None:
    stored.chmod(0o666)
    with pytest.warns(UserWarning, match="is not used: .* can be written by other users"):
        assert host_cpu() == identified_cpu()


@pytest.mark.skipif(not set(catalogue()["x86-avx2"].isa) <= set(identified_cpu().isa), reason="this CPU cannot be taken for x86-avx2")
def test_a_cpu_taken_for_another_has_a_file_of_its_own(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWRIGHT_NATIVE", raising=False)
    own = files.place(identified_cpu())
    monkeypatch.setenv("TILEWRIGHT_NATIVE", "x86-avx2")
    taken = identified_cpu()
    assert files.place(taken) != own
    files.remove(taken)
    assert host_cpu() == taken
    files.store(calibration(taken, others={"multiply-add": CYCLE / 2.5}), taken)
    assert host_cpu().clock_hz == pytest.approx(5e9) and host_cpu().vector_bits == 256


# What a calibration changes, and what it does not


def test_choices_depend_on_the_facts_alone() -> None:
    plain = identified_cpu()
    first, same = (with_facts(plain, calibration(plain)) for _ in range(2))
    later = with_facts(plain, replace(calibration(plain), date="2027-01-01T00:00:00+00:00"))
    other = with_facts(plain, calibration(plain, others={"memory byte": 2e-10}))
    places = [choices.place(SMALL, cpu, USUAL, 2) for cpu in (plain, first, same, later, other)]
    assert places[1] == places[2] == places[3] and len(set(places)) == 3
    assert [choice.seconds for choice in rank(SMALL, first, 2)] == [choice.seconds for choice in rank(SMALL, same, 2)]
    assert rank(SMALL, first, 2).first().seconds != rank(SMALL, plain, 2).first().seconds


@pytest.mark.parametrize("recorded_calibrated", [False, True])
def test_recorded_times_are_found_with_and_without(tmp_path: Path, recorded_calibrated: bool) -> None:
    plain = identified_cpu()
    cpu = with_facts(plain, calibration(plain))
    recorded, other = (cpu, plain) if recorded_calibrated else (plain, cpu)
    ranking = rank(SMALL, recorded, 2)
    slow = max(ranking, key=lambda choice: choice.seconds)  # the models would not choose it
    entry = measurement(
        region=key_of(SMALL), machine=recorded_as(recorded, 2), schedule=serialisation.schedule_text(slow.schedule),
        code=current_code(SMALL, slow.schedule, recorded) or "",
    )  # fmt: skip
    with Records(tmp_path / "records.sqlite") as records:
        records.add([entry])
        for each in (recorded, other):
            chosen = from_records(records)(SMALL, each, 2)
            assert (chosen.schedule, chosen.measured_seconds) == (slow.schedule, entry.seconds)
        assert from_records(records)(SMALL, replace(plain, processors=plain.processors + 1), 2).measured_seconds is None


def test_artifacts_load_with_and_without(stored: Path, tmp_path: Path) -> None:
    module, x = nn.Linear(7, 6).eval(), torch.randn(6, 7)
    with tilewright.compile(module, (x,), target="native") as calibrated, torch.no_grad():
        assert calibrated.image.machine == host_cpu() != identified_cpu()
        assert f"measured by tilewright calibrate: {host_cpu().calibration}" in explanation(calibrated.image)
        calibrated.save(tmp_path / "with.zip")
        expected = module(x)
    files.remove(identified_cpu())
    with tilewright.compile(module, (x,), target="native") as plain:
        plain.save(tmp_path / "without")
    manifest = tmp_path / "without" / "manifest.json"
    assert json.loads(manifest.read_text())["machine"]["calibration"] == ""
    for state in ("none", "stored", "damaged"):  # loading does not read it
        if state != "none":
            files.store(calibration(identified_cpu()), identified_cpu())
        if state == "damaged":
            stored.write_text("{")
        for name in ("with.zip", "without"):
            with tilewright.load(tmp_path / name) as loaded:
                torch.testing.assert_close(loaded(x), expected)
                assert bool(loaded.image.machine.calibration) == (name == "with.zip")


def test_machines_of_artifacts_are_whole() -> None:
    plain = catalogue()["cortex-a53"]
    for cpu in (plain, with_facts(plain, calibration(plain))):
        content = encode_machine(cpu)
        assert decode_machine(parsed(json.dumps(content).encode(), "it")) == cpu
        del content["fma_ports"]
        with pytest.raises(ValueError, match="has no 'fma_ports'"):
            decode_machine(parsed(json.dumps(content).encode(), "it"))


# The benchmarks


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    from tilewright.system.libraries import mapped

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEWRIGHT_CACHE", str(tmp_path_factory.mktemp("kernels")))
        (binary,) = compile_kernels([source(identified_cpu())], identified_cpu())
    assert not isinstance(binary, KernelFailed), binary
    return mapped(binary.content, "micro-benchmarks")


@pytest.mark.parametrize("name", ["x86-avx2", "x86-avx512", "xeon-sapphire-rapids", "cortex-a53", "neoverse-n1"])
def test_the_loops_hold_their_multiply_adds_and_nothing_spills(name: str, tmp_path: Path) -> None:
    cpu = catalogue()[name]
    try:
        compiler = CCompiler.find(cpu)
    except CompilerMissing as missing:
        pytest.skip(str(missing))
    text = replace(source(cpu), extra_flags=("-S",))  # the last of several modes counts
    (tmp_path / compiler.source_name).write_text(text.text)
    done = compiler.programs.run(compiler.command(text), 60.0, tmp_path, {"PATH": "/usr/bin:/bin"})
    assert done.status == 0, done.errors
    lines = [line.split() for line in (tmp_path / compiler.binary_name).read_text().splitlines()]
    fused = [words for words in lines if words and words[0].startswith(("vfmadd", "fmla")) and not words[0].endswith("sd")]
    assert len(fused) == multiply_adds(cpu) + STEPS // 2
    assert not [words for words in fused if any("(" in word or "[" in word for word in words[1:])]


@pytest.mark.parametrize("size", [4096, 3 << 16, WINDOW, 3 * WINDOW // 2 + 4096, 3 * WINDOW])
def test_chains_of_pointers_visit_every_place_of_one(library: ctypes.CDLL, size: int) -> None:
    run = Benchmarks(library, identified_cpu(), 2)
    area = run.area(size)
    places = area.windows * area.slots
    assert size - area.windows * area.spacing < places * area.spacing <= size and area.slots * area.spacing <= WINDOW
    for thread in range(2):
        start = area.address + thread * size
        at, seen = start, set[int]()
        while at not in seen:
            assert thread or at == area.chained(len(seen)) == area.chained(len(seen) + places)
            seen.add(at)
            at = ctypes.c_uint64.from_address(at).value
        assert at == start and seen == set(range(start, start + places * area.spacing, area.spacing))


@pytest.mark.parametrize("threads_of_a_core", [1, 2])
def test_working_sets_are_inside_their_level_and_beyond_the_nearer_one(threads_of_a_core: int) -> None:
    for cpu in (entry for entry in (*catalogue().values(), identified_cpu()) if not entry.is_gpu):
        threads, nearer = threads_of_a_core * cpu.processors, 0
        for cache, (level, size) in zip(cpu.caches, working_sets(cpu, threads).items(), strict=True):
            own = cache.bytes // min(cache.shared_by, cpu.processors) // threads_of_a_core
            assert level == cache.level and nearer < size < nearer + own and size % 4096 == 0
            nearer = own
        assert memory_bytes(cpu, threads) * threads <= cpu.memory_bytes // 4


def test_every_benchmark_gives_a_time_in_every_round(library: ctypes.CDLL) -> None:
    cpu = replace(identified_cpu(), memory_bytes=64 << 20)
    found = measured(Benchmarks(library, cpu, 2), 0.0)
    assert set(found) == set(samples(cpu)) and {len(times) for times in found.values()} == {LEAST_ROUNDS}
    assert all(0 < seconds < 1 for times in found.values() for seconds in times)
    assert all(fact.value > 0 for fact in facts_of(found, cpu, 2).values())


# The command


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["calibrate", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_measures_stores_shows_and_removes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, as for a user, but for a tenth of the time and with little memory."""
    host = identified_cpu()
    monkeypatch.setattr(measuring, "SECONDS", 0.1)
    encode = serialisation.encode
    monkeypatch.setattr(serialisation, "encode", lambda cpu: encode(replace(cpu, memory_bytes=64 << 20)))
    place = str(files.place(host))
    assert run(capsys, "--show") == (0, f"there is no calibration of this CPU: {place}; the assumed facts serve\n", "")
    code, first, err = run(capsys, "--threads", "1")
    found = stored_facts(host)
    assert code == 0 and err == "" and found is not None and found.threads == 1 and found.identity == host.digest
    assert all(name in first for name in assumed_facts(host)) and f"calibration {found.name} in {place}\n" in first
    code, second, _ = run(capsys, "--show")
    assert code == 0 and second == first and host_cpu().calibration == found.name
    assert main(["targets", "native", "--sources"]) == 0 and found.name in capsys.readouterr().out
    assert run(capsys, "--remove") == (0, f"removed {place}\n", "")
    assert run(capsys, "--remove") == (0, f"there is no calibration of this CPU: {place}\n", "")
    assert host_cpu() == host


def test_what_the_command_shows_of_a_disturbed_machine(capsys: pytest.CaptureFixture[str]) -> None:
    host = identified_cpu()
    disturbed = calibration(host)
    facts: dict[str, Any] = {**disturbed.facts, "memory latency": replace(disturbed.facts["memory latency"], spread=0.5)}
    facts["clock"] = replace(disturbed.facts["clock"], spread=2000.0)
    files.store(replace(disturbed, facts=facts), host)
    _, out, _ = run(capsys, "--show")
    assert (
        "other work disturbed clock, memory latency: calibrate again" in out
        and "> 999 %" in out
        and "4 GHz" in out
        and "20 GB/s" in out
        and "50 %" in out
    )


def test_a_damaged_file_can_be_removed_and_replaced(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored.write_text("{")
    code, _, err = run(capsys, "--show")
    assert code == 2 and str(stored) in err and "--remove" in err
    files.store(calibration(identified_cpu()), identified_cpu())
    assert host_cpu().calibration
    stored.write_text("{")
    assert run(capsys, "--remove")[0] == 0 and not stored.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--seconds", "5"), "--seconds and --force are for a GPU"), (("--force",), "--seconds and --force are for a GPU"),
        (("--target", "cortex-a53"), "description in the catalogue, and only this CPU"), (("--target", "nonsense"), "unknown target"),
        (("--threads", "1024"), "1024 threads cannot be measured at once on"), (("--threads", "0"), "no whole number"),
        (("--show", "--remove"), "not allowed with"),
    ],
)  # fmt: skip
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and words in err and err.count("\n") == 1
    assert stored_facts(identified_cpu()) is None


def test_no_compiler_and_no_place_to_write(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILEWRIGHT_CC", "/no/such/compiler")
    assert "no C compiler" in run(capsys)[2]
    monkeypatch.delenv("TILEWRIGHT_CC")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "file"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code, _, err = run(capsys)
    assert code == 2 and "cannot be written" in err and err.count("\n") == 1
    with pytest.raises(CacheError, match="cannot be written"):
        files.store(calibration(identified_cpu()), identified_cpu())


class Lost:
    """A process that hangs, or cannot run the benchmarks."""

    answer: dict[str, Any] | None = None

    def __init__(self, command: list[str]) -> None:
        assert command[0] == "-m"

    def ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        if self.answer is None:
            raise WorkerLost(f"no answer within {timeout:g} s")
        return self.answer

    def close(self) -> None: ...


@pytest.mark.parametrize(("answer", "words"), [(None, "were lost: no answer within"), ({"error": "OSError: no"}, "failed: OSError: no")])
def test_a_lost_process_is_an_error_and_stores_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any] | None, words: str
) -> None:
    monkeypatch.setattr(measuring, "Worker", Lost)
    monkeypatch.setattr(Lost, "answer", answer)
    with pytest.raises(KernelFailed, match=words):
        calibrate(identified_cpu(), 1)
    code, _, err = run(capsys, "--threads", "1")
    assert code == 2 and "nothing was stored" in err and stored_facts(identified_cpu()) is None


def test_a_busy_machine_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "Worker", Lost)
    monkeypatch.setattr(Lost, "answer", {"samples": samples(identified_cpu(), {"parallel region": 4e-3}), "openmp": ""})
    with pytest.raises(KernelFailed, match="too busy to measure 1 threads at once; calibrate while it is idle"):
        calibrate(identified_cpu(), 1)


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "available_cores", lambda: 3)
    with pytest.raises(UnsupportedOption, match="4 threads cannot be measured at once on 3 cores; measure with at most 3"):
        calibrate(identified_cpu(), 4)
