"""The table of workloads on a GPU: batches, failures, slices, what is said of plans, and the table, without a GPU."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tilewright
from bench import common, gpu_networks, gpu_time_tables
from bench.common import Contender, Outcome
from tests.stand_ins import H200, record_libraries
from tests.test_gpu_chains import any_tiles
from tilewright import zoo
from tilewright.compile import read
from tilewright.graph.passes import simplify
from tilewright.ir.library import Attention, Convolution, LibraryCall, Pooling, Product, Recurrent, View
from tilewright.partition.plan import plan_program
from tilewright.selection.bounds import is_claim
from tilewright.zoo.bert import EncoderLayer

SECONDS = {"tilewright": 2e-3, "eager": 4e-3, "vendor": 1e-3, "none": 8e-3}

NAME = gpu_time_tables.WORKLOADS.removesuffix(".json").replace("*", "1")
"""The result file, which the table must find."""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, tuple[str, ...]]]:
    """Calls of a stand-in for `compare`, which runs out of memory for the network "b" at batch 64."""
    found: list[tuple[str, int, tuple[str, ...]]] = []

    def compare(network: str, module: nn.Module, example: Any, fresh: Any, contenders: Any, *_: Any, **__: Any) -> list[Outcome]:
        found.append((network, len(fresh[0]), tuple(contender.name for contender in contenders)))
        if found[-1][:2] == ("b", 64):
            raise torch.OutOfMemoryError("CUDA out of memory")
        measured = [Outcome(network, c.name, "measured", median_seconds=SECONDS[c.name], quartile_seconds=(1e-3, 3e-3)) for c in contenders]
        return [Outcome(network, "none", "failed", "no kernel") if each.contender == "none" else each for each in measured]

    empty = torch.empty
    monkeypatch.setattr(gpu_networks, "compare", compare)
    monkeypatch.setattr(zoo, "build", lambda name, batch, seed: (nn.Identity(), (torch.zeros(batch),)))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(nn.Module, "cuda", lambda self: self)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "empty", lambda *shape, device=None: empty(1))
    for place in (common, gpu_time_tables):
        monkeypatch.setattr(place, "RESULTS", tmp_path)
    monkeypatch.setattr("bench.cells.RESULTS", tmp_path)
    monkeypatch.setattr(common, "git_commit", lambda: "0123")
    return found


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[dict[str, Any]]:
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    monkeypatch.setattr(sys, "argv", ["x", *arguments, f"--name={NAME}"])
    try:
        gpu_networks.main()
    finally:
        torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = before
    rows: list[dict[str, Any]] = json.loads((common.RESULTS / f"{NAME}.json").read_text())["results"]
    return rows


Calls = list[tuple[str, int, tuple[str, ...]]]


def test_the_figure_has_32_workloads(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "--against=eager")
    assert len({(name, batch) for name, batch, _ in calls}) == len(calls) == 32
    assert {name for name, _, _ in calls} <= set(zoo.NETWORKS)


def test_failures_are_rows(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run(monkeypatch, "a", "b", "--batch=1,64", "--against=none,eager")
    assert [call[:2] for call in calls] == [("a", 1), ("a", 64), ("b", 1), ("b", 64)]
    assert len(rows) == 4 * 3 and [row["run"] for row in rows[::3]] == [1, 2, 3, 4]
    assert [(row["contender"], row["status"]) for row in rows[:3]] == [("tilewright", "measured"), ("none", "failed"), ("eager", "measured")]
    assert {f"{row['status']}: {row['reason']}" for row in rows[-3:]} == {"failed: OutOfMemoryError: CUDA out of memory"}


def test_slices(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "a", "--batch=1", "--against=eager")
    run(monkeypatch, "a", "b", "--batch=1", "--against=eager", "--resume", "--seconds=-1")
    assert len(calls) == 1
    rows = run(monkeypatch, "a", "b", "--batch=1", "--against=eager", "--resume")
    assert [call[:2] for call in calls] == [("a", 1), ("b", 1)] and len(rows) == 4
    rows = run(monkeypatch, "a", "--batch=1", "--against=vendor", "--resume")
    assert calls[-1] == ("a", 1, ("tilewright", "vendor")) and len(rows) == 6 and {row["run"] for row in rows} == {1, 2, 3}
    run(monkeypatch, "a", "--batch=1", "--against=vendor,eager", "--resume")
    assert ("tilewright", "vendor", "eager") in {names for *_, names in calls}, "contenders of two runs are not one run"
    count = len(calls)
    run(monkeypatch, "a", "--batch=1", "--against=vendor", "--resume")
    assert len(calls) == count
    run(monkeypatch, "a", "--batch=1", "--against=vendor", "--resume", "--trials=9")
    assert len(calls) == count + 1, "figures of other trials are not continued"


def test_a_lost_gpu_ends_the_command(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run(monkeypatch, "a", "--batch=1", "--against=eager")

    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(SystemExit, match="b at batch 1 left the GPU unusable"):
        run(monkeypatch, "b", "a", "--batch=1", "--against=eager", "--resume")
    assert json.loads((common.RESULTS / f"{NAME}.json").read_text())["results"] == rows


def test_kernels_are_compiled_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["x", "lenet5", "--batch=1,2", "--against=none,eager,vendor", "--compile-for=h200"])
    gpu_networks.main()
    said = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert said == [f"lenet5 {batch} {way}" for batch in (1, 2) for way in ("tilewright", "none")]
    assert any(path.suffix == ".cubin" for path in (tmp_path / "kernels").rglob("*"))


def test_unknown_contenders(calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "a", "--against=cudnn")
    assert "unknown contenders cudnn; choose from tilewright, late, ahead, reused, unfetched, stored" in capsys.readouterr().err


def test_what_a_row_says_of_a_plan(tmp_path: Path) -> None:
    module, inputs = EncoderLayer(32, 2, 64).eval(), (torch.randn(2, 40, 32),)
    own = gpu_networks.facts(tilewright.compile(module, inputs, "h200"))
    assert own["libraries"] == own["library_flops"] == 0 and own["bound_seconds"] >= own["regions"] * H200.launch_seconds
    record_libraries(tmp_path / "records", module, inputs, H200)
    mixed = gpu_networks.facts(tilewright.compile(module, inputs, "h200", vendor=True, records=tmp_path / "records"))
    assert mixed["libraries"] >= 2 and 0 < mixed["library_flops"] < mixed["flops"] == own["flops"]
    assert mixed["bound_seconds"] < own["bound_seconds"], "libraries have no bound"


def test_kinds_of_kernels() -> None:
    kinds = {"contraction": ["reshape", "linear"], "window": ["convolution", "add"], "map": ["add"], "row reduction": ["softmax", "mul"]}
    assert [gpu_networks.kind_of(operators, kind) for kind, operators in kinds.items()] == ["complex", "simple fused", "simple", "simple fused"]
    assert gpu_networks.kind_of(["matmul", "softmax", "matmul"], "attention") == "complex fused"
    assert gpu_networks.kind_of(["scan"], "loop") == "complex" and gpu_networks.kind_of(["aten.sort.default"], "torch") == "simple"


def test_what_is_noted_of_a_contender() -> None:
    """Also where the profile fails: the contender stays."""
    module, inputs = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), (torch.randn(4, 8),)
    noted: dict[str, dict[str, Any]] = {}
    for target in ("native", "h200"):
        contender = Contender(target, partial(lambda target, module, inputs: tilewright.compile(module, inputs, target), target))
        gpu_networks.noting(contender, noted, True).prepare(module, inputs)
    seconds = noted["native"]["kernel_seconds"]
    assert set(seconds) == set(gpu_networks.KINDS) and seconds["complex fused"] > 0 == seconds["simple"]
    assert noted["native"]["prepare_seconds"] > 0 and "unknown" not in noted["native"]
    assert noted["h200"]["regions"] == 1 and "not here" in noted["h200"]["unknown"]


def test_operators_of_eager_pytorch_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that counts what was recorded: one millisecond between successive events."""

    class Event:
        count = 0

        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None:
            Event.count += 1
            self.time = Event.count * (1.0 if Event.count > 2 else 0.25)

        def elapsed_time(self, other: Event) -> float:
            return other.time - self.time

    for name, value in {"Event": Event, "_sleep": lambda cycles: None, "synchronize": lambda: None}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(gpu_networks, "PROFILED_CALLS", 1)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4), nn.Tanh())
    found = gpu_networks.eager_kernel_seconds(module, (torch.randn(1, 3, 4, 4),))
    each = 1e-3 * (1 - 0.25)
    assert found["complex"] == pytest.approx(2 * each), "a convolution and a product with its bias"
    assert found["simple"] >= 2 * each - 1e-12 and found["complex fused"] == found["simple fused"] == 0


def test_a_chain_is_bounded_by_the_peak_of_the_whole_gpu() -> None:
    module, inputs = nn.Sequential(nn.Conv2d(32, 64, 1), nn.Conv2d(64, 64, 3, padding=1, groups=64)).eval(), (torch.randn(1, 32, 56, 56),)
    with any_tiles(1):
        program = plan_program(simplify(read(module, inputs).graph)[0], H200, 1, chains=True)
    (chain,) = (lowered for lowered in program.regions if lowered.region.kind == "chain")
    bound = max(seconds for name, seconds in chain.bounds.items() if not is_claim(name))
    assert chain.region.flops() / H200.peak_flops["fp32"] <= bound < float("inf")


def test_operations_of_libraries() -> None:
    image, filters, result = View("a", (2, 8, 6, 5), (1,) * 4, 0), View("b", (12, 4, 3, 3), (1,) * 4, 0), View("o", (2, 12, 4, 3), (1,) * 4, 0)
    convolution = Convolution("convolution", (1, 1), (1, 1), 2)
    assert gpu_networks.flops_of(LibraryCall(convolution, (image, filters), (result,))) == 2 * (2 * 12 * 4 * 3) * (4 * 3 * 3)
    a, b, out = View("a", (2, 3, 4), (1,) * 3, 0), View("b", (2, 4, 5), (1,) * 3, 0), View("o", (2, 3, 5), (1,) * 3, 0)
    assert gpu_networks.flops_of(LibraryCall(Product("matmul"), (a, b), (out,))) == 2 * (2 * 3 * 5) * 4
    pooled = LibraryCall(Pooling("max_pooling", (3, 3), (1, 1), (1, 1), (0, 0)), (image,), (View("o", (2, 8, 4, 3), (1,) * 4, 0),))
    assert gpu_networks.flops_of(pooled) == (2 * 8 * 4 * 3) * 9
    q, k, v = (View(name, (1, 2, extent, width), (1,) * 4, 0) for name, extent, width in (("q", 5, 4), ("k", 7, 4), ("v", 7, 3)))
    attention = LibraryCall(Attention("attention", 0.5), (q, k, v), (View("o", (1, 2, 5, 3), (1,) * 4, 0),))
    assert gpu_networks.flops_of(attention) == 2 * (2 * 5 * 7) * (4 + 3)
    sizes = ((7, 2, 3), (2, 5), (15, 3), (15, 5), (15,), (15,))
    layer = LibraryCall(
        Recurrent("gru", False), tuple(View("x", shape, (1,) * len(shape), 0) for shape in sizes), (View("o", (7, 2, 5), (1,) * 3, 0),)
    )
    assert gpu_networks.flops_of(layer) == 2 * (7 * 2) * 15 * (3 + 5)


def test_the_table(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(gpu_time_tables.workloads()) == 1, "before anything is measured"
    rows = run(monkeypatch, "a", "b", "--batch=1,64", "--against=none,vendor,eager")
    for row in rows:
        row |= {"bound_seconds": 5e-4, "flops": 100, "library_flops": 25, "prepare_seconds": 4.0}
    other = [{**row, "run": 99, "median_seconds": 3 * row["median_seconds"]} for row in rows if row["run"] == 1 and row["status"] == "measured"]
    slower = [{**row, "median_seconds": row["median_seconds"] * (4 if row["contender"] == "eager" else 1)} for row in other]
    (common.RESULTS / f"{NAME}.json").write_text(json.dumps({"results": [*rows, *slower]}))
    table = {tuple(cells[:2]): dict(zip(gpu_time_tables.workloads()[0], cells, strict=True)) for cells in gpu_time_tables.workloads()}
    assert table["a", "64"]["ours, fused in registers"] == "2.00" and table["a", "64"]["ours or a library, by trials"] == "4.00"
    assert table["a", "64"]["ours, nothing fused"] == "–" and table["a", "64"]["fastest peer / ours or a library"] == "4.00"
    assert (
        table["a", "64"]["bound / ours"] == "25 %" and table["a", "64"]["operations by libraries"] == "25 %" and table["a", "64"]["eager, ms"] == "4"
    )
    assert table["a", "1"]["ours, fused in registers"] == "8.00", "over eager in the same run"
    assert table["b", "64"]["fastest peer / ours or a library"] == "–" and table["b", "64"]["eager, ms"] == "–"
    assert table["**geometric mean, batch 1**", ""]["ours, fused in registers"] == "4.00"
    assert table["**geometric mean, batch 64 and more**", ""]["ours, fused in registers"] == "2.00"
    assert table["**no peer is faster, of**", "4"]["ours or a library, by trials"] == "3"
    assert table["**mean time to prepare, s**", ""]["ours, fused in registers"] == "4.0"
    seconds = {"complex": 1e-5, "complex fused": 2e-5, "simple": 0.0, "simple fused": 4e-6}
    named = [{**row, "network": "resnet50", "kernel_seconds": seconds} for row in rows if row["run"] == 1]
    (common.RESULTS / f"{NAME}.json").write_text(json.dumps({"results": named}))
    assert gpu_time_tables.kernel_kinds()[1:] == [
        ["resnet50", words, "10", "20", "0", "4"] for words in ("eager", "ours, fused in registers", "ours or a library, by trials")
    ]
