"""Predicted instruction counts against the counts of QEMU and cachegrind."""

from __future__ import annotations

import pytest

from bench.instruction_counts import available, cases, compare, compiled, executed, kernels_of
from tilewright.analysis.cpu.assembly import parse
from tilewright.analysis.cpu.instructions import CLASSES
from tilewright.hardware import machine

DATA = ("largest pooling",)
"""Kernels without a guaranteed count because of data-dependent branches: a maximum, or the underflow of an exponential."""


def need(target: str) -> None:
    missing = available(machine(target))
    if missing:
        pytest.skip(f"not installed: {missing}")


TARGETS = [pytest.param("neoverse-n1"), pytest.param("cortex-a53", marks=pytest.mark.slow)]


@pytest.mark.in_turns(16)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [name for name in cases() if name not in DATA])
def test_aarch64_counts_are_exact(name: str, target: str) -> None:
    """FMAs, loads and stores in every case; branches and the total if nothing depends on data."""
    need(target)
    for row in compare(name, machine(target), threads=2):
        predicted = row.predicted
        assert (predicted.fma, predicted.loads, predicted.stores) == tuple(row.counted[kind] for kind in ("fma", "load", "store")), row.kernel
        assert row.is_exact or predicted.undecided, row
        assert abs(row.error) < 0.002, row
        assert row.counted["total"] > 500


@pytest.mark.in_turns(8)
@pytest.mark.parametrize("name", cases())
def test_avx2_totals(name: str) -> None:
    """Within 2 % of cachegrind's totals."""
    need("x86-avx2")
    for row in compare(name, machine("x86-avx2"), threads=2):
        assert row.counted["total"] > 500
        assert abs(row.error) < (0.25 if name in DATA else 0.02), row


@pytest.mark.parametrize("name", DATA)
def test_what_data_decides_is_said(name: str) -> None:
    need("neoverse-n1")
    (row,) = compare(name, machine("neoverse-n1"))
    assert row.predicted.undecided > 0
    assert abs(row.error) < 0.1


@pytest.mark.parametrize(("target", "lanes"), [("x86-avx2", 8), ("x86-avx512", 16), ("neoverse-n1", 4)])
def test_threads_share_the_work(target: str, lanes: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The FMAs of several threads add up to those of the layer."""
    need("neoverse-n1" if target == "neoverse-n1" else "x86-avx2")
    chosen = machine(target)
    module, inputs = cases()["resnet 3x3/2 64-128"]
    kernels = kernels_of(module, inputs, chosen, 2)
    code = parse(compiled(kernels, chosen, tmp_path_factory.mktemp("code")), chosen.architecture)
    (kernel,) = (kernel for kernel in kernels if kernel.name.startswith("contraction"))
    alone = executed(kernel, code)
    assert alone.fma >= 7 * 7 * 128 * 64 * 9 / lanes
    for threads in (2, 3):
        parts = [executed(kernel, code, threads=threads, thread=thread) for thread in range(threads)]
        assert sum(part.fma for part in parts) == alone.fma
        assert all(part.fma > 0 for part in parts)
        both = executed(kernel, code, threads=threads)
        assert all(getattr(both, kind) == sum(getattr(part, kind) for part in parts) for kind in CLASSES)
