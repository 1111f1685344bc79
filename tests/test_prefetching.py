"""Nodes of a CUDA graph that bring constants to level 2: each constant once, not too far ahead, and code that the assembler takes."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tilewright
from tests.runtime_programs import ProgramBuilder
from tests.test_gpu_runtime import FakeLibrary
from tilewright.errors import KernelFailed
from tilewright.runtime import gpu, prefetching
from tilewright.runtime.artifact import SavedBinary
from tilewright.runtime.buffers import Buffers
from tilewright.runtime.driver import Driver
from tilewright.runtime.gpu import GpuEngine
from tilewright.runtime.gpu_kernels import GpuLibrary
from tilewright.runtime.loadable import loadable
from tilewright.runtime.prefetching import MOST_PIECES, PIECE, PTX, SHARE_AHEAD, SHARE_OF_NODE, UNIT, prefetches

LEVEL_2 = 50 << 20


@st.composite
def reading(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """For each call the address and the bytes of the constants that it reads, some of which others read too."""
    sizes = draw(st.lists(st.integers(0, 1 << 14) | st.integers(1 << 16, 1 << 22) | st.just(LEVEL_2), min_size=1, max_size=40))
    starts = [512 + 2 * start // UNIT * UNIT for start in accumulate(size + UNIT for size in [0, *sizes[:-1]])]
    constants = st.sampled_from(list(zip(starts, sizes, strict=True)))
    return draw(st.lists(st.lists(constants, max_size=4), max_size=30))


def first_uses(calls: list[list[tuple[int, int]]]) -> dict[int, int]:
    """The first call that reads each address."""
    found: dict[int, int] = {}
    for number, read in enumerate(calls):
        for address, _ in read:
            found.setdefault(address, number)
    return found


@given(reading())
def test_what_calls_read_is_brought_once_and_in_time(calls: list[list[tuple[int, int]]]) -> None:
    found = prefetches(calls, LEVEL_2)
    first_use = first_uses(calls)
    sizes = {address: size for read in calls for address, size in read}
    ahead = LEVEL_2 // SHARE_AHEAD
    wanted = {address: min(sizes[address], ahead) // UNIT * UNIT for address, number in first_use.items() if number}
    brought = [(address, size, one.after) for one in found for address, size in one.pieces]
    assert all(0 < size <= PIECE and size % UNIT == 0 for _, size, _ in brought) and all(0 < len(one.pieces) <= MOST_PIECES for one in found)
    bytes_of = {address: 0 for address, size in wanted.items() if size}
    for address, size, after in brought:
        start = max(known for known in bytes_of if known <= address)
        assert address == start + bytes_of[start], "pieces follow one another"
        bytes_of[start] += size
        assert after is None or after < first_use[start], "no node waits for the call that reads what it brings"
    assert bytes_of == {address: size for address, size in wanted.items() if size}


@given(reading())
def test_no_more_than_a_share_of_level_2_is_ahead(calls: list[list[tuple[int, int]]]) -> None:
    found = prefetches(calls, LEVEL_2)
    first_use = first_uses(calls)
    pieces = [(address, size, one.after) for one in found for address, size in one.pieces]
    starts = sorted(first_use)
    reader = {address: first_use[max(start for start in starts if start <= address)] for address, _, _ in pieces}
    for now in range(len(calls)):  # while call `now` runs: what was asked for and is read later
        waiting = sum(size for address, size, after in pieces if (after is None or after < now) and reader[address] > now)
        assert waiting <= LEVEL_2 // SHARE_AHEAD * 2 + LEVEL_2 // SHARE_OF_NODE


def test_short_calls_gain() -> None:
    assert prefetching.are_short(50, 150e-6) and not prefetching.are_short(50, 300e-6)


def test_nothing_is_brought_for_the_first_call() -> None:
    assert prefetches([], LEVEL_2) == []
    assert prefetches([[(512, 4096)]], LEVEL_2) == []
    assert prefetches([[(512, 4096)], [(512, 4096), (8192, 40), (16384, 8)]], LEVEL_2) == [prefetching.Prefetch(None, ((8192, 32),))]


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="there is no assembler for PTX (ptxas)")
@pytest.mark.parametrize("architecture", ["sm_90", "sm_90a", "sm_100", "sm_120"])
def test_the_assembler_takes_the_kernel(architecture: str, tmp_path: Path) -> None:
    source = tmp_path / "prefetch.ptx"
    source.write_text(PTX)
    made = subprocess.run(["ptxas", f"-arch={architecture}", str(source), "-o", str(tmp_path / "prefetch.cubin")], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "current_stream", lambda device: 0)
    monkeypatch.setattr(gpu, "is_capturing", lambda: False)
    monkeypatch.setattr(GpuEngine, "_adopt", lambda self, handle: True)


def engine_of(constants: int, refusing: bool = False, seconds: float = 1e-6) -> tuple[GpuEngine, FakeLibrary]:
    """An engine over a driver that logs, of a chain of calls, each of which adds a constant."""
    builder = ProgramBuilder({"x": (4096,)}, {f"w{number}": torch.zeros(4096) for number in range(constants)})
    for number in range(constants):
        builder.kernel("add", ("x" if number == 0 else f"y{number - 1}", f"w{number}"), f"y{number}", (4096,), "")
    built = builder.program((f"y{constants - 1}",))
    program = loadable(replace(built, regions=tuple(replace(region, predicted_seconds=seconds) for region in built.regions)))
    library = FakeLibrary()
    driver = Driver(library)
    library._read = lambda params: {"func": params.func, "blocks": params.gridDimX}  # type: ignore[method-assign]
    if refusing:
        real = driver.load_module

        def load(image: bytes) -> int:
            if b".target" in image:
                raise KernelFailed("there is no assembler", "install one")
            return real(image)

        driver.load_module = load  # type: ignore[method-assign]
    loaded = GpuLibrary(driver, [SavedBinary(Path("0.cubin"), tuple(program.kernels), "cubin", b"cubin")], program.kernels, 5, prefetches=True)
    return GpuEngine(Buffers(program, torch.device("cpu"), 256), loaded), library


def call(engine: GpuEngine, calls: int) -> None:
    x, y = torch.zeros(4096), torch.zeros(4096)
    engine.bind([x.data_ptr(), y.data_ptr()])
    engine.run(0, calls)
    engine.finish()


def test_nodes_of_a_graph(without_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16,384 bytes each, of which 32,768 may be ahead: the first three at once, each other one after the call that reads what is so far before."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=SHARE_AHEAD * 32768))
    monkeypatch.setattr(prefetching, "SHARE_OF_NODE", SHARE_AHEAD * 2)
    engine, library = engine_of(6)
    call(engine, 6)
    handles = [handle for handle, (_, read) in library.nodes.items() if read["func"] != engine.library.prefetch]
    nodes = [(before, read["blocks"]) for before, read in library.nodes.values() if read["func"] == engine.library.prefetch]
    assert len(handles) == 6 and nodes == [([], 1), ([], 1), ([handles[1]], 1), ([handles[2]], 1), ([handles[3]], 1)]


@pytest.mark.parametrize(("refusing", "seconds"), [(True, 1e-6), (False, 1e-5), (False, 0.0)])
def test_graphs_without_nodes(refusing: bool, seconds: float, without_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No assembler, long calls, and calls of which nothing is predicted."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=LEVEL_2))
    engine, library = engine_of(4, refusing, seconds)
    call(engine, 4)
    assert len(library.nodes) == 4


class Layers(nn.Module):
    """Products whose weights are some megabytes each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.layers(x))


@pytest.mark.gpu
def test_results_on_a_gpu_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Layers().eval().cuda(), torch.randn(16, 1024, device="cuda")
    fetched = tilewright.compile(module, (x,))
    first = fetched(x)
    monkeypatch.setattr(gpu, "PREFETCH", False)
    without = tilewright.compile(module, (x,))
    assert torch.equal(first, without(x)) and torch.equal(first, fetched(x))
