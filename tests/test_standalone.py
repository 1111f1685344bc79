"""Whole networks as stand-alone C programs: under sanitizers, and cross-compiled for other machines."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import tilewright
from tests.compiled import Case
from tests.operator_cases import Dense, Inverted, Residual, case, normal, randomised
from tests.standalone import FLAGS, run_standalone
from tilewright import zoo
from tilewright.hardware import machine
from tilewright.hardware.host import host_cpu


def lenet() -> Case:
    module, inputs = zoo.build("lenet5")
    return Case("lenet5", module, inputs)


NETWORKS: dict[str, Callable[[], Case]] = {
    "lenet5": lenet,
    "residual": lambda: case("residual", randomised(nn.Sequential(Residual(3, 16, 1), Residual(16, 19, 2))), normal(2, 3, 11, 9)),
    "inverted": lambda: case("inverted", randomised(nn.Sequential(Inverted(5, 20), nn.Conv2d(5, 7, 3, 2))), normal(1, 5, 9, 10)),
    "dense": lambda: case("dense", randomised(Dense(5, 4, 2)), normal(1, 5, 8, 7)),
    "lstm": lambda: case("lstm", nn.LSTM(5, 19, bidirectional=True, num_layers=2), normal(4, 2, 5)),
    "transformer": lambda: case("transformer", nn.TransformerEncoderLayer(24, 3, 50, batch_first=True), normal(2, 7, 24)),
}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_sanitizers_find_nothing(name: str, tmp_path: Path) -> None:
    """Compiled without optimisation: every access in the source is checked, and gcc is seconds faster than for unrolled tiles with checks."""
    torch.manual_seed(1)
    host = host_cpu()
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("no gcc")
    command = (gcc, "-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", *FLAGS, *host.compiler_flags)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ASAN_OPTIONS": "detect_leaks=0"}
    assert "ERROR" not in run_standalone(NETWORKS[name](), host, command, tmp_path, environment=environment)


EMULATED = ("lenet5", "residual", "inverted", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mobilenet_v2", "resnet18", "resnet50")))


@pytest.mark.in_turns
@pytest.mark.parametrize("target", ["cortex-a53", "neoverse-n1"])
@pytest.mark.parametrize("name", EMULATED)
def test_aarch64_under_emulation(name: str, target: str, tmp_path: Path) -> None:
    """Includes whole networks as passed to `compile`."""
    gcc, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if gcc is None or emulator is None:
        pytest.skip("needs aarch64-linux-gnu-gcc and qemu-aarch64")
    torch.manual_seed(2)
    chosen = machine(target)
    command = (gcc, "-O2", "-static", *FLAGS, *chosen.compiler_flags)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    example = NETWORKS[name]() if name in NETWORKS else Case(name, *zoo.build(name))
    run_standalone(example, chosen, command, tmp_path, emulator=(emulator,), environment=environment)


@pytest.mark.parametrize("threads", [4, 16, 64])
def test_many_threads_under_emulation(threads: int, tmp_path: Path) -> None:
    """Plans for machines with many cores, run on that number of threads."""
    gcc, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if gcc is None or emulator is None:
        pytest.skip("needs aarch64-linux-gnu-gcc and qemu-aarch64")
    torch.manual_seed(3)
    chosen = machine("neoverse-n1")
    layers = nn.Sequential(
        nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.Conv2d(64, 48, 1), nn.Softmax(1)
    )
    command = (gcc, "-O2", "-static", "-fopenmp", *FLAGS, *chosen.compiler_flags)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    example = case("layers", randomised(layers), normal(1, 16, 28, 28))
    run_standalone(example, chosen, command, tmp_path, emulator=(emulator,), environment=environment, threads=threads)


@pytest.mark.slow
def test_an_artifact_for_aarch64_under_emulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared objects in an artifact themselves, with their OpenMP threads."""
    gcc, emulator, system = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64"), Path("/usr/aarch64-linux-gnu")
    if gcc is None or emulator is None or not system.is_dir():
        pytest.skip("needs aarch64-linux-gnu-gcc with its libraries and qemu-aarch64")
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    module, inputs = zoo.build("mobilenet_v2")
    saved = tmp_path / "model"
    tilewright.compile(module, inputs, "neoverse-n1", threads=1).save(saved)  # planned as by `run_standalone`
    binaries = sorted((saved / "binaries").iterdir())
    command = (gcc, "-O2", "-fopenmp", f"-Wl,-rpath-link,{system}/lib")
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    run_standalone(
        Case("mobilenet_v2", module, inputs),
        machine("neoverse-n1"),
        command,
        tmp_path,
        (emulator, "-L", str(system)),
        environment,
        lambda _: binaries,
    )


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_avx2_on_this_host(name: str, tmp_path: Path) -> None:
    if "avx2" not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("this host has no AVX2")
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("no gcc")
    torch.manual_seed(3)
    chosen = machine("x86-avx2")
    run_standalone(NETWORKS[name](), chosen, (gcc, "-O2", *FLAGS, *chosen.compiler_flags), tmp_path)
