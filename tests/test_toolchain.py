"""Toolchain: building for CPUs and GPUs, failures as values, and a cache that survives damage."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tilewright.errors import CacheError, CompilerMissing, KernelFailed, UnsupportedOption
from tilewright.hardware import Machine, machine
from tilewright.system.programs import ProgramStopped
from tilewright.toolchain import Binary, Early, KernelCache, SourceFile, cache, compile_kernels, compilers, default_cache
from tilewright.toolchain.binary import parse_resources
from tilewright.toolchain.cache import kernel_key
from tilewright.toolchain.compilers import CCompiler, NvrtcCompiler, compiler_for

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None and shutil.which("clang") is None, reason="no C compiler")
needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None,
    reason="cuda.bindings is not installed",
)
needs_aarch64 = pytest.mark.skipif(shutil.which("aarch64-linux-gnu-gcc") is None, reason="no aarch64 cross compiler")

CUDA = """
extern "C" __global__ void __launch_bounds__(256) reverse(float* y, const float* x) {
  __shared__ float tile[256];
  tile[threadIdx.x] = x[blockIdx.x * 256 + threadIdx.x];
  __syncthreads();
  y[blockIdx.x * 256 + threadIdx.x] = tile[255 - threadIdx.x];
}
extern "C" __global__ void scale(float* y, float a) { y[threadIdx.x] *= a; }
"""


def c_source(constant: int = 3, name: str = "scale") -> SourceFile:
    text = f"""void scale(float *y, long n) {{
#pragma omp parallel for
  for (long i = 0; i < n; i++) y[i] *= {constant}.0f;
}}
"""
    return SourceFile(name, text, "c", ("scale",))


def scaled(binary: Binary | KernelFailed) -> list[float]:
    assert isinstance(binary, Binary), binary
    values = (ctypes.c_float * 5)(1, 2, 3, 4, 5)
    function = getattr(ctypes.CDLL(str(binary.path)), binary.entries[0])
    function(values, ctypes.c_long(5))
    return list(values)


@pytest.fixture
def native() -> Machine:
    return machine("native")


@pytest.fixture
def kernels(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "kernels")


def build(source: SourceFile, target: Machine, kernels: KernelCache) -> Binary | KernelFailed:
    (result,) = compile_kernels([source], target, kernels)
    return result


def forbid_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, source: SourceFile, folder: Path) -> compilers.Outcome:
        raise AssertionError("the compiler was called")

    monkeypatch.setattr(CCompiler, "compile", fail)
    monkeypatch.setattr(NvrtcCompiler, "compile", fail)


def test_c_kernel_runs_and_is_cached(native: Machine, kernels: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(c_source(), native, kernels)
    assert scaled(first) == [3, 6, 9, 12, 15]
    assert isinstance(first, Binary) and first.kind == "so" and first.resources == {}
    assert set(native.compiler_flags) <= set(first.command)
    files = {path.name for path in first.path.parent.iterdir()}
    assert files == {"kernel.c", "kernel.so", "command", "log", "metadata.json"}
    metadata = json.loads((first.path.parent / "metadata.json").read_text())
    assert metadata["machine_digest"] == native.digest and metadata["schema"] == cache.SCHEMA
    forbid_compiling(monkeypatch)
    assert build(c_source(), native, kernels) == first
    assert build(c_source(name="another name"), native, kernels) == first
    with pytest.raises(AssertionError):
        build(c_source(4), native, kernels)
    assert kernels.check() == []


def test_the_key_holds_text_flags_compiler_and_target(native: Machine) -> None:
    source = c_source()
    compiler = compiler_for(native, "c")
    assert isinstance(compiler, CCompiler)
    variants = {
        kernel_key(source, compiler),
        kernel_key(replace(source, text=source.text + "\n"), compiler),
        kernel_key(replace(source, extra_flags=("-g",)), compiler),
        kernel_key(source, replace(compiler, machine_flags=())),
        kernel_key(source, replace(compiler, path="/bin/true")),
        kernel_key(source, NvrtcCompiler("sm_90a", "cuda13")) if importlib.util.find_spec("cuda") else "",
        kernel_key(source, NvrtcCompiler("sm_80", "cuda13")) if importlib.util.find_spec("cuda") else "-",
    }
    assert len(variants) == 7
    assert kernel_key(replace(source, name="x"), compiler) in variants


def test_many_kernels_keep_their_order_and_failures_are_values(native: Machine, kernels: KernelCache) -> None:
    broken = SourceFile("broken", "void broken(void) { return undeclared_name; }\n", "c", ("broken",))
    sources = [c_source(2), broken, c_source(5), c_source(2, name="again"), c_source(7)]
    seen: list[tuple[int, int]] = []
    results = compile_kernels(sources, native, kernels, workers=2, progress=lambda *counts: seen.append(counts))
    assert [scaled(results[i])[0] for i in (0, 2, 3, 4)] == [2, 5, 2, 7]
    failure = results[1]
    assert isinstance(failure, KernelFailed)
    assert "undeclared_name" in str(failure) and "broken" in str(failure)
    assert failure.log_path is not None and "undeclared_name" in failure.log_path.read_text()
    assert (failure.log_path.parent / "kernel.c").read_text() == broken.text
    assert seen[-1] == (5, 5) and [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(kernels.entries()) == 3
    assert isinstance(build(broken, native, kernels), KernelFailed)


def test_entries_of_two_sources_with_one_text(native: Machine, kernels: KernelCache) -> None:
    text = "void one(void) {}\nvoid two(void) {}\n"
    sources = [SourceFile("a", text, "c", ("one",)), SourceFile("b", text, "c", ("two",))]
    first, second = compile_kernels(sources, native, kernels)
    assert isinstance(first, Binary) and isinstance(second, Binary)
    assert (first.entries, second.entries) == (("one",), ("two",)) and first.path == second.path


def test_what_was_begun_early_is_compiled_once(native: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    compiled: list[str] = []
    compile_one = CCompiler.compile

    def recorded(self: CCompiler, source: SourceFile, folder: Path) -> compilers.Outcome:
        compiled.append(source.name)
        return compile_one(self, source, folder)

    monkeypatch.setattr(CCompiler, "compile", recorded)
    broken = SourceFile("broken", "void broken(void) { return undeclared_name; }\n", "c", ("broken",))
    sources = [c_source(number, f"times {number}") for number in range(2, 8)]
    with Early(native) as early:
        for source in (*sources[:4], broken, sources[0]):
            early.begin(source)
        *results, failure = compile_kernels([*sources, broken], native, early=early)
    assert [scaled(result)[0] for result in results] == [2, 3, 4, 5, 6, 7]
    assert isinstance(failure, KernelFailed) and "undeclared_name" in str(failure)
    assert sorted(compiled) == sorted(source.name for source in (*sources, broken))
    with Early(native) as early:
        early.begin(sources[0])  # in the cache
        assert early.begun(kernel_key(sources[0], CCompiler.find(native))) is None
    assert len(default_cache().entries()) == 6


def test_what_was_begun_early_ends_with_an_error(native: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    fake_compiler(tmp_path, monkeypatch, "sleep 1000")
    with pytest.raises(ZeroDivisionError), Early(native) as early:
        for number in range(9):
            early.begin(c_source(number))
        raise ZeroDivisionError
    assert default_cache().entries() == []


@needs_aarch64
@pytest.mark.parametrize("target", ["cortex-a53", "neoverse-n1"])
def test_aarch64_shared_object(target: str, kernels: KernelCache) -> None:
    binary = build(c_source(), machine(target), kernels)
    assert isinstance(binary, Binary)
    header = binary.path.read_bytes()[:20]
    assert header[:4] == b"\x7fELF" and int.from_bytes(header[18:20], "little") == 183  # EM_AARCH64
    assert "aarch64-linux-gnu-gcc" in binary.command[0]


@needs_nvrtc
def test_nvrtc_makes_a_cubin_and_reports_resources(kernels: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SourceFile("reverse", CUDA, "cuda", ("reverse", "scale"))
    binary = build(source, machine("h200"), kernels)
    assert isinstance(binary, Binary), binary
    assert binary.kind == "cubin" and binary.path.read_bytes()[:4] == b"\x7fELF"
    assert "--gpu-architecture=sm_90a" in binary.command
    reverse, scale = binary.resources["reverse"], binary.resources["scale"]
    assert reverse.shared_bytes == 1024 and reverse.barriers == 1 and reverse.registers >= 4
    assert scale.shared_bytes == 0 and scale.spill_bytes == 0
    forbid_compiling(monkeypatch)
    assert build(source, machine("h200"), kernels) == binary
    assert build(source, machine("h100"), kernels) == binary  # the same architecture


@needs_nvrtc
def test_nvrtc_reports_spills_and_many_kernels(kernels: KernelCache) -> None:
    body = "".join(f"  float a{i} = x[{i} * n];\n" for i in range(64))
    use = "".join(f"    a{i} = a{i} * x[{i}] + a{(i + 1) % 64};\n" for i in range(64))
    store = "".join(f"  y[{i} * n] = a{i};\n" for i in range(64))
    head = 'extern "C" __global__ void __maxnreg__(32) spilling(float* y, const float* x, int n) {\n'
    loop = f"  for (int t = 0; t < n; t++) {{\n{use}  }}\n"
    sources = [
        SourceFile("spilling", head + body + loop + store + "}\n", "cuda", ("spilling",)),
        SourceFile("reverse", CUDA, "cuda", ("reverse",)),
        SourceFile("wrong", 'extern "C" __global__ void wrong() { nothing(); }', "cuda", ("wrong",)),
        SourceFile("wrong ptx", 'extern "C" __global__ void p() { asm("nonsense.f32 %r1;"); }', "cuda", ("p",)),
    ]
    spilling, reverse, wrong, wrong_ptx = compile_kernels(sources, machine("a100"), kernels, workers=2)
    assert isinstance(spilling, Binary) and spilling.resources["spilling"].spill_bytes > 0
    assert spilling.resources["spilling"].registers <= 32
    assert isinstance(reverse, Binary)
    for failure, words in ((wrong, "nothing"), (wrong_ptx, "nonsense")):
        assert isinstance(failure, KernelFailed) and failure.log_path is not None
        assert words in failure.log_path.read_text()


@needs_nvrtc
def test_volta_asks_for_the_cuda12_extra(kernels: KernelCache) -> None:
    if 70 in compilers._nvrtc_architectures():
        pytest.skip("the installed NVRTC has sm_70")
    with pytest.raises(CompilerMissing, match="sm_70.*cuda12"):
        compile_kernels([SourceFile("reverse", CUDA, "cuda", ("reverse",))], machine("v100"), kernels)


def test_resources_of_a_log_with_dynamic_and_constant_memory() -> None:
    log = """ptxas info    : 0 bytes gmem, 24 bytes cmem[3]
ptxas info    : Compiling entry function 'k' for 'sm_80'
ptxas info    : Function properties for k
    16 bytes stack frame, 20 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 2 barriers, 49152 bytes smem, 400 bytes cmem[0]
"""
    found = parse_resources(log)["k"]
    assert (found.registers, found.shared_bytes, found.spill_bytes, found.stack_bytes, found.barriers) == (
        255, 49152, 44, 16, 2,
    )  # fmt: skip


def test_compiler_missing_says_what_was_looked_for(native: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompilerMissing, match=r"gcc, clang.*install"):
        compiler_for(native, "c")
    with pytest.raises(CompilerMissing, match="riscv64-linux-gnu-gcc"):
        compiler_for(replace(native, target_triple="riscv64-linux-gnu"), "c")
    monkeypatch.setenv("TILEWRIGHT_CC", "no-such-compiler")
    with pytest.raises(CompilerMissing, match="no-such-compiler"):
        compiler_for(native, "c")


def test_language_must_fit_the_machine(native: Machine) -> None:
    with pytest.raises(UnsupportedOption):
        compiler_for(native, "cuda")


DAMAGES = ("binary", "metadata", "truncated", "missing log", "missing binary", "missing source")


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entry_is_found_and_rebuilt(native: Machine, kernels: KernelCache, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    first = build(c_source(), native, kernels)
    assert isinstance(first, Binary)
    folder = first.path.parent
    if damage == "binary":
        content = bytearray(first.path.read_bytes())
        content[len(content) // 2] ^= 1
        first.path.write_bytes(content)
    elif damage == "metadata":
        (folder / "metadata.json").write_text("{}")
    elif damage == "truncated":
        first.path.write_bytes(b"")
    else:
        (folder / {"missing log": "log", "missing binary": "kernel.so", "missing source": "kernel.c"}[damage]).unlink()
    assert len(kernels.check()) == 1
    if damage == "missing source":  # reported, but no reason to build again
        assert build(c_source(), native, kernels) == first
        return
    with caplog.at_level(logging.WARNING):
        again = build(c_source(), native, kernels)
    assert "building it again" in caplog.text
    assert again == first and scaled(again) == [3, 6, 9, 12, 15]
    assert kernels.check() == []
    assert not list(kernels.root.glob("building-*"))


def test_full_disk_costs_the_cache_and_not_the_kernel(
    native: Machine, kernels: KernelCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build(c_source(2), native, kernels)
    write_text = Path.write_text

    def full(self: Path, *arguments: object, **options: object) -> int:
        if kernels.root in self.parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return write_text(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "write_text", full)
    with caplog.at_level(logging.WARNING):
        binary = build(c_source(11), native, kernels)
    assert "cannot be written" in caplog.text and "No space left" in caplog.text
    assert isinstance(binary, Binary) and kernels.root not in binary.path.parents
    assert scaled(binary) == [11, 22, 33, 44, 55]
    assert build(c_source(11), native, kernels) == binary  # from the private folder
    assert scaled(build(c_source(2), native, kernels))[0] == 2 and len(kernels.entries()) == 1


def test_compiler_that_finds_the_disk_full_is_not_a_kernel_failure(native: Machine, kernels: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_really = CCompiler.compile

    def full(self: CCompiler, source: SourceFile, folder: Path) -> compilers.Outcome:
        if kernels.root in folder.parents:
            return compilers.Outcome(False, "fatal error: error writing to kernel.so: No space left on device")
        return compile_really(self, source, folder)

    monkeypatch.setattr(CCompiler, "compile", full)
    assert scaled(build(c_source(13), native, kernels))[0] == 13
    monkeypatch.setattr(cache, "_private_folder", lambda: kernels.root / "inside")
    with pytest.raises(CacheError, match="TILEWRIGHT_CACHE"):
        build(c_source(17), native, kernels)


def test_cache_that_cannot_be_created(native: Machine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    binary = build(c_source(19), native, KernelCache(tmp_path / "file" / "kernels"))
    assert scaled(binary)[0] == 19


def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Makes the user's C compiler a shell script, in which $real is a real compiler, and which is called only for sources."""
    path = tmp_path / "fake-cc"
    version = f"case $1 in --version) echo {tmp_path}; exit;; esac"
    path.write_text(f"#!/bin/sh\n{version}\nreal={shutil.which('gcc') or shutil.which('clang')}\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("TILEWRIGHT_CC", str(path))


def test_a_compiler_that_hangs_costs_its_kernel(native: Machine, kernels: KernelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(tmp_path, monkeypatch, 'grep -q "7.0f" kernel.c && { echo busy; echo half > kernel.so; sleep 1000 & sleep 1000; }; exec $real "$@"')
    monkeypatch.setenv("TILEWRIGHT_COMPILE_SECONDS", "5")
    good, hanging, other = compile_kernels([c_source(2), c_source(7), c_source(5)], native, kernels, workers=2)
    assert (scaled(good)[0], scaled(other)[0]) == (2, 5)
    assert isinstance(hanging, KernelFailed) and "did not end within 5 s (TILEWRIGHT_COMPILE_SECONDS)" in str(hanging)
    assert len(kernels.entries()) == 2 and kernels.check() == [] and not list(kernels.root.glob("building-*"))


def test_a_compiler_that_does_not_answer(native: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_COMPILE_SECONDS", "0.5")
    for name, text in (("hangs", "#!/bin/sh\nsleep 1000\n"), ("no program", "words"), ("gone", "#!/no/such/shell\n")):
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o755)
        monkeypatch.setenv("TILEWRIGHT_CC", str(path))
        with pytest.raises(CompilerMissing, match=f"{name} cannot be asked for its version.*TILEWRIGHT_CC"):
            compile_kernels([c_source()], native)
    for wrong in ("0", "-1", "nan", "inf", "five"):
        monkeypatch.setenv("TILEWRIGHT_COMPILE_SECONDS", wrong)
        with pytest.raises(UnsupportedOption, match="TILEWRIGHT_COMPILE_SECONDS"):
            compiler_for(native, "c")


@needs_nvrtc
def test_nvrtc_that_takes_too_long_or_is_stopped(kernels: KernelCache) -> None:
    source = SourceFile("reverse", CUDA, "cuda", ("reverse", "scale"))
    (hung,) = compile_kernels([source], machine("h200"), kernels, seconds=1e-6)
    assert isinstance(hung, KernelFailed) and "NVRTC was stopped" in str(hung) and "TILEWRIGHT_COMPILE_SECONDS" in str(hung)
    compiler = NvrtcCompiler.find(machine("h200"))
    compiler.stop()
    with pytest.raises(ProgramStopped):
        compiler.translated(source)


GARBAGE = {
    "nothing": "true",
    "empty": ": > kernel.so",
    "words": "echo garbage > kernel.so",
    "cut": '$real "$@" && head -c 5000 kernel.so > cut && mv cut kernel.so',
    "other functions": 'sed -i s/scale/other/ kernel.c; $real "$@"',
    "an object file": "$real -c -o kernel.so kernel.c",
    "a constructor": 'echo "__attribute__((constructor)) void first(void) {}" >> kernel.c; $real "$@"',
}


@pytest.mark.parametrize("script", GARBAGE.values(), ids=GARBAGE)
def test_garbage_that_compiles_without_complaint_is_a_failure(
    native: Machine, kernels: KernelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    fake_compiler(tmp_path, monkeypatch, f"{script}; exit 0")
    failure = build(c_source(), native, kernels)
    assert isinstance(failure, KernelFailed) and "ended without an error and left no" in str(failure)
    assert kernels.entries() == [] and failure.log_path is not None and failure.log_path.is_file()


def test_garbage_with_a_fitting_hash_is_not_loaded(native: Machine, kernels: KernelCache, caplog: pytest.LogCaptureFixture) -> None:
    binary = build(c_source(), native, kernels)
    assert isinstance(binary, Binary)
    for content in (b"", b"garbage", binary.content[: len(binary.content) // 2]):
        binary.path.write_bytes(content)
        path = binary.path.parent / "metadata.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "binary_sha256": hashlib.sha256(content).hexdigest()}))
        with caplog.at_level(logging.WARNING):
            assert build(c_source(), native, kernels) == binary
        assert caplog.text.count("building it again") == 1
        caplog.clear()
        cache._warned.cache_clear()


def test_names_in_metadata_lead_nowhere_else(native: Machine, kernels: KernelCache) -> None:
    binary = build(c_source(), native, kernels)
    assert isinstance(binary, Binary)
    path = binary.path.parent / "metadata.json"
    metadata = json.loads(path.read_text())
    (kernels.root / "outside").write_bytes(binary.content)
    for name in ("../../outside", str(kernels.root / "outside"), "..", ""):
        path.write_text(json.dumps({**metadata, "binary": name}))
        assert "is no name of a file" in kernels.check()[0]
    path.write_text("[" * 100_000)
    assert len(kernels.check()) == 1 and kernels.entries() == []
    assert build(c_source(), native, kernels) == binary and kernels.check() == []


def test_the_cache_is_the_users_alone(native: Machine, tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        assert scaled(build(c_source(), native, KernelCache(tmp_path / "a" / "kernels")))[0] == 3
        build(SourceFile("broken", "broken", "c", ("broken",)), native, KernelCache(tmp_path / "a" / "kernels"))
    finally:
        os.umask(mask)
    assert all(not path.stat().st_mode & 0o022 for path in (tmp_path / "a").rglob("*"))
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "a", *(tmp_path / "a").rglob("*")) if path.is_dir()} == {0o700}


FOREIGN = {"open root": "", "open shelf": "*", "open entry": "*/*", "open binary": "*/*/kernel.so", "open metadata": "*/*/metadata.json"}


@pytest.mark.parametrize("how", ["mode", "owner"])
@pytest.mark.parametrize("pattern", FOREIGN.values(), ids=FOREIGN)
def test_what_others_may_have_written_is_not_loaded(
    native: Machine, kernels: KernelCache, pattern: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    if how == "owner" and os.geteuid() != 0:
        pytest.skip("only the superuser can give files away")
    first = build(c_source(), native, kernels)
    assert isinstance(first, Binary)
    place = next(path for path in kernels.root.glob(pattern) if path.name != "failed") if pattern else kernels.root
    if how == "mode":
        place.chmod(place.stat().st_mode | 0o020)
    else:
        os.chown(place, 12345, 12345)
    with caplog.at_level(logging.WARNING):
        again = build(c_source(), native, kernels)
    words = "can be written by other users" if how == "mode" else "belongs to another user (12345)"
    assert f"{place} {words}" in caplog.text and "or set TILEWRIGHT_CACHE to a folder of your own" in caplog.text
    assert scaled(again)[0] == 3 and isinstance(again, Binary)
    if pattern.count("/"):  # the entry is replaced
        assert again.path == first.path and kernels.check() == []
    else:  # nothing is written to a cache that others may write to
        assert kernels.root not in again.path.parents and len(kernels.check()) == 1


@pytest.mark.parametrize("part", ["shelf", "entry"])
def test_links_are_not_followed(native: Machine, kernels: KernelCache, tmp_path: Path, part: str) -> None:
    first = build(c_source(), native, kernels)
    assert isinstance(first, Binary)
    entry = first.path.parent
    place = entry.parent if part == "shelf" else entry
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    again = build(c_source(), native, kernels)
    assert scaled(again)[0] == 3 and isinstance(again, Binary)
    assert kernels.entries() == [] if part == "shelf" else not entry.is_symlink()
    kernels.prune(everything=True)
    assert list((tmp_path / "elsewhere").rglob("kernel.so"))


def test_a_read_only_cache_of_the_user_serves(native: Machine, kernels: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(c_source(), native, kernels)
    for path in (*kernels.root.rglob("*"), kernels.root):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        forbid_compiling(monkeypatch)
        assert build(c_source(), native, kernels) == first
    finally:
        for path in (kernels.root, *kernels.root.rglob("*")):
            path.chmod(0o700)


WORKER = """
import sys
from pathlib import Path
from tilewright.hardware import machine
from tilewright.toolchain import KernelCache, SourceFile, compile_kernels
root, count = Path(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
sources = [SourceFile("k", f"int k(void) {{ return {i}; }}\\n", "c", ("k",)) for i in range(count)]
for binary in compile_kernels(sources, machine("native"), KernelCache(root), workers=1):
    print(binary.path, flush=True)
"""


def worker(root: Path, count: int) -> subprocess.Popen[str]:
    repository = Path(__file__).resolve().parent.parent
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(root), str(count)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=repository, start_new_session=True,
    )  # fmt: skip


def test_parallel_processes_agree_on_one_entry_each(kernels: KernelCache) -> None:
    processes = [worker(kernels.root, 4) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    outputs = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        outputs.append(output)
    assert outputs[0] == outputs[1] == outputs[2]
    paths = outputs[0].split()
    assert [ctypes.CDLL(path).k() for path in paths] == [0, 1, 2, 3]
    assert len(kernels.entries()) == 4 and kernels.check() == []
    assert not list(kernels.root.glob("building-*"))


def test_killed_writer_leaves_nothing_that_matters(native: Machine, kernels: KernelCache, tmp_path: Path) -> None:
    slow = tmp_path / "slow-gcc"
    slow.write_text('#!/bin/sh\ncase "$1" in --version) echo slow 1.0;; *) echo half > kernel.so; sleep 600;; esac\n')
    slow.chmod(0o755)
    os.environ["TILEWRIGHT_CC"] = str(slow)
    try:
        process = worker(kernels.root, 1)
        key = kernel_key(SourceFile("k", "int k(void) { return 0; }\n", "c", ("k",)), compiler_for(native, "c"))
    finally:
        del os.environ["TILEWRIGHT_CC"]
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    deadline = time.monotonic() + 60
    while not list(kernels.root.glob("building-*/kernel.so")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    assert kernels.check() == []  # it is being built
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert kernels.entries() == [] and not kernels.folder(key).exists()
    assert len(kernels.check()) == 1 and "killed" in kernels.check()[0]
    assert scaled(build(c_source(), native, kernels))[0] == 3
    assert kernels.prune() == 0
    assert kernels.check() == [] and not list(kernels.root.glob("building-*"))
    assert len(kernels.entries()) == 1


def test_prune_by_age_by_size_and_all(native: Machine, kernels: KernelCache) -> None:
    binaries = compile_kernels([c_source(i) for i in (1, 2, 3)], native, kernels, workers=1)
    for days, binary in zip((30, 20, 0), binaries, strict=True):
        assert isinstance(binary, Binary)
        path = binary.path.parent / "metadata.json"
        metadata = json.loads(path.read_text())
        metadata["created"] -= days * 86400
        path.write_text(json.dumps(metadata))
    assert kernels.prune(older_than_days=25) == 1
    assert len(kernels.entries()) == 2
    newest = max(kernels.entries(), key=lambda entry: entry.created)
    assert kernels.prune(size_limit_bytes=newest.bytes) == 1
    assert [entry.key for entry in kernels.entries()] == [newest.key]
    assert kernels.prune(everything=True) == 1 and kernels.entries() == []
