"""What `explain --code` shows: figures of kernels with known counts, of artifacts, and the reason where code cannot be read."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import tilewright
from tilewright.analysis.cpu.assembly import instruction_of
from tilewright.analysis.cpu.pipeline import block_bounds
from tilewright.analysis.gpu.reading import translated
from tilewright.analysis.gpu.warps import shared_wavefronts
from tilewright.cli import main
from tilewright.hardware import machine
from tilewright.hardware.occupancy import block_limits, resident_blocks
from tilewright.hardware.pipelines import PIPELINES
from tilewright.report import code_cpu, code_gpu
from tilewright.report.code import ARTIFACT, LONGER, code_lines, code_table
from tilewright.report.code_cpu import cpu_code
from tilewright.report.code_gpu import gpu_code
from tilewright.runtime.artifact import read
from tilewright.runtime.executable import Image

CPUS = ("x86-avx2", "x86-avx512", "cortex-a53")
PRODUCTS = 40 * 64 * 7 * 9 * 9
"""Multiplications of the first layer of `Layers`."""


class Layers(nn.Module):
    """A strided convolution, a depthwise one, and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(64, 40, 3, 2, 1)
        self.second = nn.Conv2d(40, 40, 3, groups=40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.second(torch.relu(self.first(x))), 1)


class Looked(nn.Module):
    """Rows of a table, which data choose."""

    def forward(self, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return table[index] + 1


def nothing(done: int, total: int) -> None:
    """A progress report that nobody reads."""


@cache
def image(target: str) -> Image:
    torch.manual_seed(0)
    return tilewright.compile(Layers(), torch.randn(1, 64, 13, 17), target, threads=2).image


def need(target: str) -> None:
    chosen = machine(target)
    if chosen.is_gpu:
        pytest.importorskip("cuda.bindings.nvrtc")
        return
    missing = [tool for tool in (f"{chosen.target_triple}-gcc", f"{chosen.target_triple}-objdump") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def cells(image: Image, threads: int = 2) -> list[list[str]]:
    """Region, kernel, and the other cells of the table's lines."""
    return [line.split() for line in code_table(image, threads, "layers", nothing) if line.strip()[0].isdigit()]


@pytest.mark.parametrize("target", CPUS)
def test_cpu_kernels(target: str) -> None:
    need(target)
    made, chosen = image(target), machine(target)
    name = next(name for name in made.program.kernels if name.startswith("contraction"))
    one, both = (cpu_code(made, [name], threads, nothing)[name] for threads in (1, 2))
    reading = one.reading
    assert reading is not None and both.reading is not None and one.misses is not None
    assert PRODUCTS <= reading.counts.fma * chosen.vector_lanes() < 1.6 * PRODUCTS  # tiles at the edges compute more
    assert 0.4 * reading.counts.fma < both.reading.counts.fma < reading.counts.fma
    inner = max((loop for loop in reading.loops if loop.is_innermost), key=lambda loop: loop.cycles * loop.iterations)
    assert inner.iterations * inner.counts.fma > 0.5 * reading.counts.fma and inner.depth > 0
    assert inner.cycles >= inner.counts.fma / chosen.fma_ports
    assert reading.vectors.bits == chosen.vector_bits and inner.counts.fma < reading.vectors.registers <= chosen.vector_registers
    assert sum(loop.cycles * loop.iterations for loop in reading.loops) <= reading.cycles.steady == pytest.approx(sum(reading.limits.values()))
    assert one.misses.level(1).bytes_moved > 4 * 40 * 63 and set(one.terms) >= {"pipeline", "memory", "dispatch"}

    rows = cells(made)
    assert [row[1] for row in rows] == list(dict.fromkeys(call.kernel for region in made.program.regions for call in region.calls))
    assert not any("analysed" in row for row in rows)
    text = "\n".join(code_lines(made, 2, name, nothing))
    for words in (
        "predicted",
        "multiply-adds",
        "vector registers",
        "cycles",
        "times        ",
        "into L1",
        "iterations, entered",
        "busiest of 2 threads",
    ):
        assert words in text


def test_gpu_kernels() -> None:
    need("h200")
    made, chosen = image("h200"), machine("h200")
    names = list(made.program.kernels)
    found = gpu_code(made, names, nothing)
    first = found[next(name for name in names if name.startswith("contraction"))]
    reading, resources, occupancy = first.reading, first.resources, first.occupancy
    assert reading is not None and resources is not None and occupancy is not None and reading.movement is not None
    assert PRODUCTS <= reading.instructions["fma"] * chosen.warp_size < 3 * PRODUCTS
    in_loops = sum(loop.iterations * loop.instructions.get("fma", 0) for loop in reading.loops)
    assert 0.5 * reading.of_a_thread["fma"] < in_loops < 1.001 * reading.of_a_thread["fma"]
    assert 16 < resources.registers <= 255 and resources.spill_bytes == 0
    assert occupancy.resident == min(occupancy.admitted.values()) and set(occupancy.limits) <= set(occupancy.admitted)
    movement = reading.movement.transactions
    assert movement.shared_loads >= movement.ideal_loads > 0 and movement.shared_stores >= movement.ideal_stores
    assert 1 <= movement.global_loads / movement.load_requests <= 32
    assert reading.movement.traffic.level_2 >= reading.movement.traffic.memory > 0
    text = "\n".join(code_lines(made, 1, first.kernel.name, nothing))
    for words in ("registers", "local memory", "occupancy", "traffic", "limit", "iterations", "sectors"):
        assert words in text
    assert len(cells(made)) == len(names)


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("target", ["x86-avx2", "h200"])
def test_artifacts(target: str, tmp_path: Path) -> None:
    """Everything that is in the code; what needs the kernel IR is absent."""
    need(target)
    made = image(target)
    tilewright.Executable(made).save(tmp_path / "layers.zip")
    stored = read(tmp_path / "layers.zip")
    assert not stored.kernels
    own, its = cells(made), cells(stored)
    assert len(own) == len(its) and "-" in its[0]
    for mine, theirs in zip(own, its, strict=True):
        assert mine[:4] == theirs[:4]
    assert ARTIFACT in list(code_table(stored, 2, "layers", nothing)) and ARTIFACT not in list(code_table(made, 2, "layers", nothing))
    name = next(iter(stored.program.kernels))
    assert "executed" in "\n".join(code_lines(stored, 1, name, nothing))


def test_loops_are_shown_where_they_cannot_be_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    need("x86-avx2")
    made = image("x86-avx2")
    monkeypatch.setattr(code_cpu, "COMPARISONS", -1)
    name = next(name for name in made.program.kernels if name.startswith("contraction"))
    lines = list(code_lines(made, 2, name, nothing))
    assert any("not analysed: " in line and line.endswith("too many different iterations") for line in lines)
    assert any("unknown iterations" in line and "multiply-adds" in line for line in lines)
    table = list(code_table(made, 2, "layers", nothing))
    assert any(name in line and "not analysed: " in line for line in table) and LONGER in table


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    need("x86-avx2")
    made = image("x86-avx2")
    monkeypatch.setattr("tilewright.analysis.cpu.assembly.shutil.which", lambda _: None)
    lines = list(code_table(made, 2, "layers", nothing))
    assert sum(line.endswith("not analysed: no objdump for x86_64-linux-gnu") for line in lines) == len(made.program.kernels)
    assert any(" MB" in line or " kB" in line for line in lines)  # cache misses need no compiled code


def test_nvrtc_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    need("h200")
    made = image("h200")
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    lines = list(code_table(made, 2, "layers", nothing))
    assert sum("not analysed: NVRTC compiles kernels for NVIDIA GPUs" in line for line in lines) == len(made.program.kernels)


def test_addresses_that_data_decide() -> None:
    """Instructions are counted, accesses are not."""
    need("h200")
    made = tilewright.compile(Looked(), (torch.randn(9, 64), torch.tensor([3, 1, 8])), "h200").image
    (code,) = gpu_code(made, list(made.program.kernels), nothing).values()
    assert code.resources is not None and code.reading is not None and code.reading.movement is None
    text = "\n".join(code_lines(made, 1, "1", nothing))
    assert "memory       not analysed: an address depends on what is loaded" in text and "warp instructions" in text


def test_kernels_of_a_loop() -> None:
    """They are read for its first repetition; the prediction is for all. A kernel without a parallel region starts no threads."""
    need("h200")
    need("x86-avx2")
    small, inputs = nn.LSTM(8, 8), torch.randn(3, 1, 8)
    with mock.patch("tilewright.partition.plan.gpu_recurrence", return_value=None):  # one persistent kernel otherwise
        on_gpu = tilewright.compile(small, inputs, "h200").image
    on_cpu = tilewright.compile(small, inputs, "x86-avx2").image
    assert all(code.reading is not None and code.reading.movement for code in gpu_code(on_gpu, list(on_gpu.program.kernels), nothing).values())
    assert any("for 6 calls" in line for line in code_table(on_gpu, 1, "loop", nothing))
    serial = [code for code in cpu_code(on_cpu, list(on_cpu.program.kernels), 2, nothing).values() if code.reading and not code.reading.is_parallel]
    assert serial and not any("dispatch" in code.terms for code in serial)


def test_a_binary_of_another_compiler_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC does not always make the same of one source, so one translation stands for all."""
    need("h200")
    made = image("h200")
    name, *_ = made.program.kernels
    binaries: tuple[Any, ...] = made.binaries
    once = translated(code_gpu._source(made, name), made.machine)
    monkeypatch.setattr(code_gpu, "translated", lambda source, machine: once)
    same, other = (replace(made, binaries=tuple(replace(one, content=content) for one in binaries)) for content in (once.cubin, b"other"))
    assert not gpu_code(same, [name], nothing)[name].differs and gpu_code(other, [name], nothing)[name].differs
    words = "these figures are of the source"
    assert words in "\n".join(code_lines(other, 1, name, nothing)) and words not in "\n".join(code_lines(same, 1, name, nothing))


def test_bounds_of_a_block() -> None:
    """Two ports multiply and add 512 bits, two load, and four instructions enter in a cycle."""
    pipeline = PIPELINES["skylake-server"]
    code = [f"vfmadd231ps %zmm0,%zmm1,%zmm{number}" for number in range(2, 8)] + ["vmovups (%rax),%zmm9"] * 2 + ["add $0x40,%rax"]
    bounds = block_bounds([instruction_of(line) for line in code], "x86-64", pipeline)
    assert bounds["ports 0 5 (fma)"] == 3 and bounds["ports 2 3 (vector load)"] == 1 and bounds["issue"] == 9 / 4
    assert max(bounds, key=lambda name: bounds[name]) == "ports 0 5 (fma)"


def test_wavefronts_without_conflicts() -> None:
    """Words two banks apart conflict in pairs; rows of a quarter warp at a multiple of 32 words conflict completely."""
    lanes, active = np.arange(32)[None], np.ones((1, 32), bool)
    for addresses, size, expected in ((lanes * 4, 4, (1, 1)), (lanes * 8, 4, (2, 1)), (lanes * 16, 16, (4, 4)), (lanes * 128, 16, (32, 4))):
        assert tuple(int(shared_wavefronts(addresses, active, size, conflicts)[0]) for conflicts in (True, False)) == expected


def test_what_limits_occupancy() -> None:
    """128 threads of 96 registers: 65,536 / (4 warps of 3,072) = 5 blocks; 100 KiB of shared memory: two."""
    limits = {name: int(blocks) for name, blocks in block_limits(machine("h200"), 128, 96, 100 << 10).items()}
    assert limits == {"registers": 5, "threads": 16, "shared memory": 2, "block slots": 32}
    assert int(resident_blocks(machine("h200"), 128, 96, 100 << 10)) == 2


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    need("x86-avx2")
    (tmp_path / "layers_to_explain.py").write_text("import torch\n\ndef model():\n    return torch.nn.Linear(40, 30), (torch.randn(5, 40),)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    model = ("explain", "layers_to_explain:model", "--target", "x86-avx2")
    assert main([*model, "--code", "--html", str(tmp_path / "page.html")]) == 0
    table = capsys.readouterr().out
    assert "into L1" in table and "because" not in table and "into L1" in (tmp_path / "page.html").read_text()
    assert main([*model, "--code", "1"]) == 0
    text = capsys.readouterr().out
    assert "iterations, entered" in text and "predicted" in text and "row-major" in text
    assert main([*model, "--code", "7"]) == 2
    assert "--code: '7' is no region or kernel" in capsys.readouterr().err


def test_an_instruction_that_no_compiler_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    need("x86-avx2")
    made = image("x86-avx2")
    for line, reason in (("movsq  %ds:(%rsi),%es:(%rdi)", "the instruction movsq %ds:(%rsi), %es:(%rdi) is not understood"), ("nop", "no symbol")):
        listing = f"0000000000001000 <k>:\n    1000:\t{line}\n    1001:\tret\n"
        monkeypatch.setattr(code_cpu, "disassembled", lambda *_, listing=listing: listing)
        assert reason in "\n".join(code_table(made, 2, "layers", nothing))
