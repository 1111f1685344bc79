"""Predicted and counted instructions of CPU kernels: AArch64 under QEMU with a counting plugin, x86-64 with AVX2 under cachegrind.

    python -m bench.instruction_counts

Every kernel of a set of small networks is called once from a C main, on buffers of random numbers. QEMU's plugin (`tests/qemu_counts.c`) counts
FMAs, loads, stores, branches and all instructions of the kernel's own functions; cachegrind counts all of them. The prediction (`executed`) reads the
assembly of the compiler with the toolchain's flags.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from bench.common import write_results
from tilewright.analysis.cpu.assembly import Assembly, disassembled, parse
from tilewright.analysis.cpu.instructions import InstructionCounts, total
from tilewright.analysis.cpu.loops_execution import UNDECIDED, executions
from tilewright.codegen.c import print_c
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import size_of
from tilewright.ir.kernel import Kernel
from tilewright.partition.plan import plan_program
from tilewright.runtime.loadable import loadable_kernel
from tilewright.toolchain.binary import SourceFile
from tilewright.toolchain.compilers import C_FLAGS, CCompiler

PLUGIN = Path(__file__).parent.parent / "tests" / "qemu_counts.c"
MAIN = """
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
static uint32_t state = 1;
static void *buffer(long bytes, int is_float) {
    void *memory = NULL;
    if (posix_memalign(&memory, 64, bytes)) exit(1);
    for (long i = 0; i < bytes; ++i) ((char *)memory)[i] = 0;
    if (is_float)
        for (long i = 0; i < bytes / 4; ++i) ((float *)memory)[i] = (float)((state = state * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1.0f;
    return memory;
}
"""


class Product(nn.Module):
    """A product of two matrices that are both inputs."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b


class Sum(nn.Module):
    """An elementwise map of two inputs."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(a + b * 0.5)


def executed(kernel: Kernel, assembly: Assembly | str, architecture: str = "", threads: int = 1, thread: int | None = None) -> InstructionCounts:
    """Instructions executed by one call of a kernel, in its own functions (without those of libraries), by class.

    `assembly` is the result of `assembly.disassembled`, as text or parsed; the counts are of all `threads` together, or of one `thread`.

    Raises:
        Unanalysable: if the control flow cannot be followed.
    """
    code = parse(assembly, architecture) if isinstance(assembly, str) else assembly
    result = InstructionCounts()
    each = {block.number: block.counts for block in code.blocks}
    for number in range(threads) if thread is None else (thread,):
        found = executions(loadable_kernel(kernel), code, threads, number)
        blocks = {key: count for key, count in found.items() if isinstance(key, int)}
        result = result + total(blocks, each, found.get(UNDECIDED, 0))
    return result


def _layer(channels: int, outputs: int, size: int, stride: int = 1, groups: int = 1, activation: nn.Module | None = None) -> nn.Module:
    convolution = nn.Conv2d(channels, outputs, size, stride, size // 2, groups=groups)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), activation or nn.ReLU())


def cases() -> Mapping[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    """Layers of ResNet-18, MobileNetV2 and others, on small images so that emulation is quick."""

    def image(channels: int, size: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(1, channels, size, size),)

    relu6 = nn.ReLU6
    return MappingProxyType({
        "resnet stem 7x7/2": (_layer(3, 64, 7, 2), image(3, 30)),
        "resnet 3x3 64": (_layer(64, 64, 3), image(64, 14)),
        "resnet 3x3/2 64-128": (_layer(64, 128, 3, 2), image(64, 14)),
        "resnet 3x3 128": (_layer(128, 128, 3), image(128, 7)),
        "resnet 1x1/2 64-128": (nn.Conv2d(64, 128, 1, 2), image(64, 14)),
        "resnet 3x3 256": (_layer(256, 256, 3), image(256, 5)),
        "resnet 3x3 odd": (_layer(19, 37, 3), image(19, 11)),
        "mobilenet 1x1 32-16": (nn.Conv2d(32, 16, 1), image(32, 14)),
        "mobilenet 1x1 16-96": (_layer(16, 96, 1, activation=relu6()), image(16, 14)),
        "mobilenet 3x3 depthwise 96": (_layer(96, 96, 3, 1, 96, relu6()), image(96, 14)),
        "mobilenet 3x3/2 depthwise 96": (_layer(96, 96, 3, 2, 96, relu6()), image(96, 15)),
        "mobilenet 1x1 96-24": (nn.Conv2d(96, 24, 1), image(96, 9)),
        "grouped 3x3": (_layer(32, 64, 3, 1, 4), image(32, 9)),
        "average pooling": (nn.AvgPool2d(2), image(32, 14)),
        "largest pooling": (nn.MaxPool2d(3, 2, 1), image(16, 15)),
        "global pooling": (nn.AdaptiveAvgPool2d(1), image(64, 7)),
        "linear 512-100": (nn.Linear(512, 100), (torch.randn(1, 512),)),
        "linear 64-37, 9 rows": (nn.Linear(64, 37), (torch.randn(9, 64),)),
        "matrix product": (Product(), (torch.randn(30, 41), torch.randn(41, 50))),
        "batched matrix product": (Product(), (torch.randn(4, 17, 24), torch.randn(4, 24, 19))),
        "map": (Sum(), (torch.randn(3, 1111), torch.randn(3, 1111))),
        "long map": (Sum(), (torch.randn(50000), torch.randn(50000))),
        "softmax": (nn.Softmax(-1), (torch.randn(7, 37),)),
        "layer normalisation": (nn.LayerNorm(50), (torch.randn(6, 50),)),
        "gelu": (nn.GELU(), (torch.randn(3, 500),)),
    })  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """One kernel: predicted and counted instructions (total, and under QEMU fma, load, store, branch)."""

    case: str
    kernel: str
    predicted: InstructionCounts
    counted: Mapping[str, int]
    seconds: float

    @property
    def is_exact(self) -> bool:
        """Whether all counts are as predicted."""
        names = {"total": "total", "fma": "fma", "load": "loads", "store": "stores", "branch": "branch"}
        return all(getattr(self.predicted, names[name]) == count for name, count in self.counted.items())

    @property
    def error(self) -> float:
        """Relative error of the total."""
        return self.predicted.total / self.counted["total"] - 1


def kernels_of(module: nn.Module, inputs: tuple[torch.Tensor, ...], target: Machine, threads: int) -> list[Kernel]:
    """The kernels of the compiled module."""
    graph, _ = simplify(import_module(module.eval(), inputs).graph)
    return list(plan_program(graph, target, threads).kernels().values())


def compiled(kernels: Sequence[Kernel], target: Machine, folder: Path) -> str:
    """The disassembly of the kernels as compiled by the toolchain; an object file of the same code is left in the folder as kernels.o."""
    compiler = CCompiler.find(target)
    source = SourceFile("kernels", print_c(kernels), "c", tuple(kernel.name for kernel in kernels))
    (folder / compiler.source_name).write_text(source.text)
    outcome = compiler.compile(source, folder)
    assert outcome.succeeded, outcome.log
    flags = [flag for flag in C_FLAGS if flag != "-shared"]
    subprocess.run([compiler.path, *flags, *target.compiler_flags, "-c", "-o", "kernels.o", compiler.source_name], cwd=folder, check=True)
    return disassembled(folder / compiler.binary_name, target)


def program(kernels: Sequence[Kernel], target: Machine, folder: Path, *options: str) -> Path:
    """An executable that calls every kernel of kernels.o once."""
    compiler = CCompiler.find(target)
    lines = []
    for kernel in kernels:
        buffers = ", ".join(f"buffer({max(1, p.size) * size_of(p.dtype)}, {int(p.dtype == 'f32')})" for p in kernel.parameters)
        lines.append(f"    extern void {kernel.name}(void *const *, const int64_t *);")
        scalars = ", ".join([*["0"] * len(kernel.scalars), str(kernel.trips)])
        lines.append(f"    {kernel.name}((void *[]){{{buffers}}}, (int64_t[]){{{scalars}}});")
    (folder / "main.c").write_text(MAIN + "int main(void) {\n" + "\n".join(lines) + "\n    return 0;\n}\n")
    command = [compiler.path, "-O1", "-fopenmp", "-no-pie", *options, "-o", "program", "main.c", "kernels.o", "-lm"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "program"


def own(kernel: str, function: str) -> bool:
    """Whether a function belongs to a kernel: the kernel itself, or a part that the compiler outlined."""
    return function == kernel or function.startswith(kernel + ".")


def counted_by_qemu(kernels: Sequence[Kernel], target: Machine, folder: Path) -> dict[str, dict[str, int]]:
    """Executed instructions of each kernel by class."""
    plugin = folder / "plugin.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(plugin), str(PLUGIN)], check=True)
    executable = program(kernels, target, folder, "-static")
    symbols = subprocess.run([f"{target.target_triple}-nm", "-S", str(executable)], capture_output=True, text=True, check=True).stdout
    wanted = [line.split() for line in symbols.splitlines() if len(line.split()) == 4]
    lines = [f"{start} {size} {name}\n" for start, size, _, name in wanted if any(own(kernel.name, name) for kernel in kernels)]
    (folder / "functions").write_text("".join(lines))
    command = ["qemu-aarch64", "-plugin", f"{plugin},functions={folder / 'functions'}", "-d", "plugin", "-D", str(folder / "log"), str(executable)]
    subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "1"})
    result: dict[str, dict[str, int]] = {}
    for line in (folder / "log").read_text().splitlines():
        function, *numbers = line.split()
        kernel = next(k.name for k in kernels if own(k.name, function))
        sums = result.setdefault(kernel, dict.fromkeys(("total", "fma", "load", "store", "branch"), 0))
        for name, number in zip(tuple(sums), numbers, strict=True):
            sums[name] += int(number)
    return result


def counted_by_cachegrind(kernels: Sequence[Kernel], target: Machine, folder: Path, threads: int = 1) -> dict[str, dict[str, int]]:
    """Executed instructions of each kernel."""
    executable = program(kernels, target, folder)
    command = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--branch-sim=no", "--cachegrind-out-file=counts", str(executable)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env={"OMP_NUM_THREADS": str(threads), "PATH": "/usr/bin:/bin"})
    result = {kernel.name: {"total": 0} for kernel in kernels}
    current: str | None = None
    for line in (folder / "counts").read_text().splitlines():
        if line.startswith("fn="):
            current = next((kernel.name for kernel in kernels if own(kernel.name, line[3:])), None)
        elif current is not None and re.match(r"\d", line):
            result[current]["total"] += int(line.split()[1])
    return result


def compare(name: str, target: Machine, threads: int = 1) -> Iterator[Compared]:
    """The kernels of one case, predicted and counted on one thread. `threads`: the number for which the kernels are planned."""
    torch.manual_seed(1)
    module, inputs = cases()[name]
    kernels = kernels_of(module, inputs, target, threads)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        text = compiled(kernels, target, folder)
        counted = (counted_by_qemu if target.architecture == "aarch64" else counted_by_cachegrind)(kernels, target, folder)
        for kernel in kernels:
            start = time.perf_counter()
            predicted = executed(kernel, text, target.architecture)
            yield Compared(name, kernel.name, predicted, counted[kernel.name], time.perf_counter() - start)


def available(target: Machine) -> str:
    """The tool that is missing to count on this machine, or an empty text."""
    tools = ("gcc", "aarch64-linux-gnu-gcc", "qemu-aarch64") if target.architecture == "aarch64" else ("gcc", "valgrind")
    return ", ".join(tool for tool in tools if shutil.which(tool) is None)


def main() -> None:
    """Compares every case on two AArch64 machines and on AVX2, and writes bench/results/instruction_counts.json."""
    rows = []
    for target in map(machine, ("neoverse-n1", "cortex-a53", "x86-avx2")):
        if available(target):
            print(f"{target.name}: not compared, missing: {available(target)}")
            continue
        found = []
        for name in cases():
            found += list(compare(name, target, threads=2))
        decided = [row for row in found if not row.predicted.undecided]
        errors = [abs(row.error) for row in decided]
        print(
            f"{target.name}: {len(found)} kernels, {len(decided)} without branches that depend on data, "
            f"of these {sum(r.is_exact for r in decided)} exact, "
            f"largest error of the total {max(errors):.2%}; all: {max(abs(r.error) for r in found):.2%}; "
            f"median {1e3 * statistics.median(r.seconds for r in found):.0f} ms a kernel"
        )
        for row in found:
            counts = {name: getattr(row.predicted, name) for name in ("fma", "loads", "stores", "branch", "total", "undecided")}
            rows.append({
                "target": target.name, "case": row.case, "kernel": row.kernel, "predicted": counts, "counted": dict(row.counted),
                "exact": row.is_exact, "error_of_total": round(row.error, 6),
            })  # fmt: skip
    path = write_results("instruction_counts", {"threads_planned_for": 2, "threads_run": 1}, rows)
    print(path)


if __name__ == "__main__":
    main()
