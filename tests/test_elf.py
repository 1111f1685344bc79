"""Checks of binaries before loading: ours pass; any that would crash the loader or run code during loading do not."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tilewright.hardware import host_cpu, machine
from tilewright.toolchain.compilers import C_FLAGS
from tilewright.toolchain.elf import check_cubin, check_shared_object

KERNEL = """
#include <math.h>
#include <stdint.h>
static float scale = 2;
float *table[1] = {&scale};
void k(void *const *arguments, const int64_t *scalars) {
    float *y = arguments[0];
#pragma omp parallel for
    for (int64_t i = 0; i < scalars[0]; i++) y[i] = scale * expf(y[i]);
}
"""
LOAD = """
import ctypes, sys
from pathlib import Path
for path in sorted(Path(sys.argv[1]).iterdir()):
    print(path.name, flush=True)
    try:
        ctypes.CDLL(str(path))
    except OSError:
        pass
"""


def built(folder: Path, text: str = KERNEL, *flags: str, compiler: str = "gcc") -> bytes:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    (folder / "k.c").write_text(text)
    command = [compiler, *C_FLAGS, "-o", "k.so", "k.c", *flags, "-lm"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return (folder / "k.so").read_bytes()


def segment_header(data: bytes, kind: int) -> int:
    """File offset of the header of the first segment of a kind."""
    offset, count = struct.unpack_from("<Q", data, 32)[0], struct.unpack_from("<H", data, 56)[0]
    return next(at for at in range(offset, offset + 56 * count, 56) if struct.unpack_from("<I", data, at)[0] == kind)


def dynamic_entry(data: bytes, tag: int) -> int:
    """File offset of an entry of the dynamic section."""
    _, _, start, _, _, size = struct.unpack_from("<IIQQQQ", data, segment_header(data, 2))
    return next(entry for entry in range(start, start + size, 16) if struct.unpack_from("<Q", data, entry)[0] == tag)


def value_of(data: bytes, tag: int) -> int:
    return struct.unpack_from("<Q", data, dynamic_entry(data, tag) + 8)[0]


def changed(data: bytes, at: int, form: str, value: int) -> bytes:
    return data[:at] + struct.pack("<" + form, value) + data[at + struct.calcsize("<" + form) :]


def test_kernels_pass(tmp_path: Path) -> None:
    host = host_cpu()
    check_shared_object(built(tmp_path), host.architecture, ["k"])
    for flags in ("--hash-style=sysv", "--hash-style=both", "-z,now", "-z,noseparate-code", "-z,max-page-size=0x200000", "-z,norelro"):
        check_shared_object(built(tmp_path, KERNEL, f"-Wl,{flags}"), host.architecture, ["k"])
    check_shared_object(built(tmp_path, "void k(void *const *a) { *(float *)a[0] = 1; }"), host.architecture, ["k"])
    with pytest.raises(ValueError, match="no function kk"):
        check_shared_object(built(tmp_path), host.architecture, ["k", "kk"])
    with pytest.raises(ValueError, match="scale is no function"):
        check_shared_object(built(tmp_path, KERNEL.replace("static", "")), host.architecture, ["scale"])


def test_kernels_for_aarch64_pass(tmp_path: Path) -> None:
    data = built(tmp_path, compiler="aarch64-linux-gnu-gcc")
    check_shared_object(data, "aarch64", ["k"])
    with pytest.raises(ValueError, match="machine 183"):
        check_shared_object(data, "x86-64", ["k"])


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        ("__attribute__((constructor)) void f(void) { scale = 3; }", (), "0x19|0x1b"),
        ("__attribute__((destructor)) void f(void) { scale = 3; }", (), "0x1a|0x1c"),
        ("void _init(void) {}", ("-Wl,-init,_init",), "0xc"),
        ("__thread int x; int *f(void) { return &x; }", (), "kind 0x7|relocation|kernels do not have"),
        ('static void g(void) {} static void *f(void) { return g; } void h(void) __attribute__((ifunc("f")));', (), "kernels do not have"),
        ("", ("-Wl,--no-as-needed", "-lresolv"), "library libresolv"),
        ("", ("-Wl,-rpath,/tmp",), "entry 0x"),
        ("", ("-Wl,-z,execstack",), "stack"),
        ("", ("-Wl,-soname,libnvrtc.so.13",), "entry 0xe"),
        ("", ("-Wl,-z,nodelete",), "loaded in a way"),
        ("", ("-Wl,-z,initfirst",), "loaded in a way"),
        ("static char big[1 << 29]; char *f(int i) { return big + i; }", (), "larger"),
    ],
)
def test_what_runs_or_reaches_out_is_refused(tmp_path: Path, text: str, flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_shared_object(built(tmp_path, KERNEL + text, *flags), host_cpu().architecture, ["k"])


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    data, architecture = built(tmp_path), host_cpu().architecture
    for length in (*range(0, len(data), 97), len(data) - 1):
        with pytest.raises(ValueError, match=r"ends beyond|no ELF|no string"):
            check_shared_object(data[:length], architecture, ["k"])


def test_tables_that_the_loader_follows_stay_inside(tmp_path: Path) -> None:
    data, architecture = built(tmp_path), host_cpu().architecture
    gnu_hash, strings, size, symbols, relocations, versions = (dynamic_entry(data, tag) + 8 for tag in (0x6FFFFEF5, 5, 10, 6, 23, 0x6FFFFFFE))
    for at in (gnu_hash, strings, size, symbols, relocations, versions):
        for value in (1, 1 << 20, 1 << 40, (1 << 64) - 8):
            with pytest.raises(ValueError):
                check_shared_object(changed(data, at, "Q", value), architecture, ["k"])
    table = struct.unpack_from("<Q", data, gnu_hash)[0]  # of the first segment, which begins the file
    for word, value in ((0, 0), (0, 1 << 31), (1, 1 << 31), (2, 3), (2, 0), (2, 1 << 30), (3, 64)):
        with pytest.raises(ValueError):
            check_shared_object(changed(data, table + 4 * word, "I", value), architecture, ["k"])
    first = struct.unpack_from("<Q", data, relocations)[0]
    for at, form, value in ((0, "Q", 0), (0, "Q", 1 << 30), (8, "I", 37), (12, "I", 1 << 20)):
        with pytest.raises(ValueError):
            check_shared_object(changed(data, first + at, form, value), architecture, ["k"])


def refused(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_shared_object(data, host_cpu().architecture, ["k"])


def symbols_of(data: bytes) -> dict[bytes, tuple[int, int]]:
    """Number and address of each symbol of a file whose tables are in its first segment."""
    symbols, strings = value_of(data, 6), value_of(data, 5)
    found = {}
    for index in range(1, (strings - symbols) // 24):
        name, _, address = struct.unpack_from("<IIQ", data, symbols + 24 * index)
        found[data[strings + name : data.index(b"\0", strings + name)]] = index, address
    return found


def test_relocations_write_to_nothing_that_the_loader_reads(tmp_path: Path) -> None:
    data = built(tmp_path)
    _, _, _, dynamic, _, size = struct.unpack_from("<IIQQQQ", data, segment_header(data, 2))
    for table in (7, 23):
        for where in (dynamic, dynamic + size - 1):
            refused(changed(data, value_of(data, table), "Q", where), "what a relocation writes lies in the dynamic section")
    refused(changed(data, dynamic_entry(data, 3) + 8, "Q", dynamic), "table of addresses lies in the dynamic section")


def test_tables_that_the_loader_follows_are_not_written(tmp_path: Path) -> None:
    data = built(tmp_path, KERNEL + "char room[4096] __attribute__((aligned(16))) = {1};", "-Wl,-z,separate-code")
    refused(changed(data, segment_header(data, 1) + 4, "I", 6), "table of segments lies outside of the first one, or may be written")
    (_, _, start, dynamic, _, _), address = struct.unpack_from("<IIQQQQ", data, segment_header(data, 2)), symbols_of(data)[b"room"][1]
    room = start + address - dynamic
    for tag in (0x6FFFFEF5, 5, 6, 7, 23, 0x6FFFFFF0, 0x6FFFFFFE):
        table = value_of(data, tag)  # all of them are in the first segment, which begins the file
        copied = data[:room] + data[table : table + 1024] + data[room + 1024 :]
        refused(changed(copied, dynamic_entry(data, tag) + 8, "Q", address), "outside of what is loaded and may not be written")


def test_segments_do_not_share_the_largest_page_that_one_asks_for(tmp_path: Path) -> None:
    data = built(tmp_path, KERNEL, "-Wl,-z,separate-code,-z,max-page-size=4096")
    check_shared_object(data, host_cpu().architecture, ["k"])
    refused(changed(data, segment_header(data, 1) + 48, "Q", 1 << 16), "segments overlap")


def test_what_the_loader_takes_for_granted_is_there(tmp_path: Path) -> None:
    data = built(tmp_path)
    for tag in (9, 20, 0x6FFFFFFF):  # RELAENT, PLTREL, VERNEEDNUM; FLAGS_1 of 0 in its place says nothing
        at = dynamic_entry(data, tag)
        refused(data[:at] + struct.pack("<QQ", 0x6FFFFFFB, 0) + data[at + 16 :], "incomplete")
    within = changed(data, dynamic_entry(data, 7) + 8, "Q", value_of(data, 23) + value_of(data, 2) - value_of(data, 8))
    refused(changed(within, dynamic_entry(data, 0x6FFFFFF9) + 8, "Q", 0), "relocations overlap")


def test_versions_end_where_their_counts_say(tmp_path: Path) -> None:
    data = built(tmp_path)
    needs, number = value_of(data, 0x6FFFFFFE), dynamic_entry(data, 0x6FFFFFFF) + 8  # in the first segment, which begins the file
    count, aside, onwards = struct.unpack_from("<H4xII", data, needs + 2)
    assert struct.unpack_from("<Q", data, number)[0] == 2 and onwards
    for damaged in (
        changed(changed(data, needs + 2, "H", 0), needs + 8, "I", 0x7FFFFF00),
        changed(data, needs + 2, "H", count + 1),
        changed(data, needs + 12, "I", 0),
        changed(data, needs + onwards + 12, "I", 16),
        changed(data, needs + aside + 12, "I", 16 if count == 1 else 0),
        changed(data, needs + aside + 6, "H", 1),
        changed(data, number, "Q", 1),
        changed(data, number, "Q", 1 << 40),
    ):
        refused(damaged, "versions are malformed")


def test_versions_of_all_exported_symbols_are_there(tmp_path: Path) -> None:
    data = built(tmp_path)
    place = value_of(data, 0x6FFFFFF0) + 2 * symbols_of(data)[b"table"][0]
    refused(changed(data, place, "H", 0x7FF0), "has a version that is not there")


def test_a_second_table_of_segments_is_the_first(tmp_path: Path) -> None:
    data = built(tmp_path)
    offset, count = struct.unpack_from("<Q", data, 32)[0], struct.unpack_from("<H", data, 56)[0]
    at, size = segment_header(data, 0x6474E550), 56 * count  # in place of the tables of unwinding

    def table(place: int, in_file: int, in_memory: int) -> bytes:
        return data[:at] + struct.pack("<IIQQQQQQ", 6, 4, place, place, place, in_file, in_memory, 8) + data[at + 56 :]

    check_shared_object(table(offset, size, size), host_cpu().architecture, ["k"])
    for place, in_file, in_memory in ((offset, 0, 0), (offset, 0, size), (offset, size - 56, size - 56), (offset + 8, size, size)):
        refused(table(place, in_file, in_memory), "second table of segments")


def test_changed_bytes_never_end_the_process_that_loads(tmp_path: Path) -> None:
    data, architecture = built(tmp_path), host_cpu().architecture
    folder = tmp_path / "accepted"
    folder.mkdir()
    draw = random.Random(1)
    refused = 0
    for number in range(1500):
        # three quarters of the changes are in parts that the loader reads: the beginning, with headers and tables, and the dynamic section
        start, end = draw.choice(((0, 2048), (0, 2048), (dynamic_entry(data, 5) - 256, dynamic_entry(data, 5) + 256), (0, len(data))))
        at = draw.randrange(start, end)
        damaged = changed(data, at, "B", draw.choice((data[at] ^ 1 << draw.randrange(8), draw.randrange(256), 0, 255)))
        try:
            check_shared_object(damaged, architecture, ["k"])
        except ValueError:
            refused += 1
        else:
            (folder / f"{number:04}.so").write_bytes(damaged)
    assert 100 < refused < 1400
    done = subprocess.run([sys.executable, "-c", LOAD, str(folder)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, (done.returncode, done.stdout.splitlines()[-1:], done.stderr[-300:])


def test_cubins(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from tilewright.errors import CompilerMissing
    from tilewright.toolchain.binary import SourceFile
    from tilewright.toolchain.compilers import NvrtcCompiler

    for target in ("v100", "a100", "h200"):
        chosen = machine(target)
        compiler = NvrtcCompiler.find(chosen)
        try:
            _, _, data = compiler.translated(SourceFile("k", 'extern "C" __global__ void k(float *x) { x[threadIdx.x] = 1; }', "cuda", ("k",)))
        except CompilerMissing:  # this release of CUDA has dropped the architecture
            continue
        check_cubin(data, chosen.architecture, ["k"])
        with pytest.raises(ValueError, match="no kernel kk"):
            check_cubin(data, chosen.architecture, ["kk"])
        with pytest.raises(ValueError, match="not sm_10"):
            check_cubin(data, "sm_10", ["k"])
        for length in (*range(0, len(data), 53), len(data) - 1):
            with pytest.raises(ValueError):
                check_cubin(data[:length], chosen.architecture, ["k"])
