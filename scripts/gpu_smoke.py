"""Checks the GPU engine on a GPU: results, fresh outputs, streams, threads, clones, verification, and the overhead of a call.

    python scripts/gpu_smoke.py prepare build/gpu_smoke      anywhere with NVRTC: compiles hand-written kernels into artifacts
    python scripts/gpu_smoke.py run build/gpu_smoke          on the machine with the GPU: loads and checks them

Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.runtime_programs import positional_signature
from tilewright.hardware import machine
from tilewright.ir.expr import Var
from tilewright.ir.graph import Graph, Node, Value
from tilewright.ir.kernel import Allocate, Block, Buffer, Kernel, Launch
from tilewright.ir.layout import row_major
from tilewright.ir.region import Call, Lowered, Program, Region, Storage
from tilewright.runtime.artifact import load, save
from tilewright.runtime.executable import Executable, Image
from tilewright.runtime.loadable import loadable
from tilewright.runtime.memory_plan import GPU_ALIGNMENT
from tilewright.toolchain import Binary, SourceFile, compile_kernels

N = 1 << 16
BLOCK = 256
SHARED_FLOATS = 25_600
STEPS, WIDTH = 40, 512
ELEMENTWISE = """extern "C" __global__ void __launch_bounds__(256) {name}({parameters}, float *__restrict__ y) {{
    const int i = blockIdx.x * 256 + threadIdx.x;
    y[i] = {expression};
}}
"""
SHARED = """extern "C" __global__ void __launch_bounds__(256) reversed(const float *__restrict__ x, float *__restrict__
y) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    float *s = reinterpret_cast<float *>(shared_memory);
    const int n = 25600;  // 100 KiB: every block reverses its part of x through shared memory
    for (int i = threadIdx.x; i < n; i += 256) s[i] = x[blockIdx.x * n + i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += 256) y[blockIdx.x * n + i] = s[n - 1 - i];
}
"""
SCAN = """extern "C" __global__ void __launch_bounds__(256) step(const float *__restrict__ x, float *__restrict__ y, int
t) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    y[t * 512 + i] = x[t * 512 + i] + (t ? y[(t - 1) * 512 + i] : 0.0f);
}
"""


class Builder:
    """Builds a program with one kernel per region."""

    def __init__(self, inputs: dict[str, tuple[int, ...]], constants: dict[str, torch.Tensor]) -> None:
        self.inputs, self.constants = tuple(inputs), constants
        self.values: dict[str, Value] = {}
        self.nodes: list[Node] = []
        self.regions: list[Lowered] = []
        self.text = ""
        for name, shape in (*inputs.items(), *((n, tuple(t.shape)) for n, t in constants.items())):
            self.values[name] = Value(name, tuple(shape), "f32")

    def kernel(
        self,
        operator: str,
        inputs: tuple[str, ...],
        output: str,
        shape: tuple[int, ...],
        launch: Launch,
        text: str,
        name: str,
        attributes: dict[str, object] | None = None,
        shared: int = 0,
        repeat: int = 1,
        scalars: int = 0,
    ) -> None:
        self.values[output] = Value(output, shape, "f32")
        node = Node(f"node_{output}", operator, inputs, (output,), attributes or {})
        parameters = [Buffer(f"a{i}", "f32", self.values[x].elements) for i, x in enumerate(inputs)]
        parameters.append(Buffer("y", "f32", self.values[output].elements, writable=True))
        body = Block((Allocate(Buffer("s", "f32", shared, "shared")),) if shared else ())
        variables = tuple(Var(f"t{i}", repeat) for i in range(scalars))
        region = Region(f"region{len(self.regions)}", "map", (node,), (), inputs, (output,))
        kernel = Kernel(name, tuple(parameters), body, launch, variables)
        self.regions.append(Lowered(region, "by hand", (kernel,), (Call(name, (*inputs, output)),), repeat=repeat))
        self.nodes.append(node)
        self.text += text

    def elementwise(self, operator: str, inputs: tuple[str, ...], output: str, expression: str) -> None:
        name = f"kernel{len(self.regions)}"
        parameters = ", ".join(f"const float *__restrict__ x{i}" for i in range(len(inputs)))
        text = ELEMENTWISE.format(name=name, parameters=parameters, expression=expression)
        shape = self.values[inputs[0]].shape
        blocks = self.values[inputs[0]].elements // BLOCK
        self.kernel(operator, inputs, output, shape, Launch((blocks, 1, 1), (BLOCK, 1, 1)), text, name)

    def torch(self, target: str, call: object, inputs: tuple[str, ...], output: str, shape: tuple[int, ...]) -> None:
        self.values[output] = Value(output, shape, "f32")
        node = Node(f"node_{output}", "torch", inputs, (output,), {"target": target, "call": call})
        region = Region(f"region{len(self.regions)}", "torch", (node,), (), inputs, (output,))
        self.regions.append(Lowered(region, "", (), ()))
        self.nodes.append(node)

    def image(self, outputs: tuple[str, ...], target: str) -> Image:
        storage = {name: Storage(value, row_major(value.shape)) for name, value in self.values.items()}
        graph = Graph(tuple(self.nodes), self.inputs, outputs, self.values, self.constants)
        program = Program(graph, target, tuple(self.regions), storage)
        entries = tuple(kernel.name for region in self.regions for kernel in region.kernels)
        built = compile_kernels([SourceFile("smoke", self.text, "cuda", entries)], machine(target))[0]
        if not isinstance(built, Binary):
            raise built
        specs = [(name, self.values[name].shape, "f32") for name in self.inputs]
        signature = positional_signature(specs, len(outputs))
        return Image(loadable(program), signature, machine(target), (built,), {"smoke.cu": self.text})


def single(target: str) -> Image:
    """One small kernel: the overhead of a call."""
    builder = Builder({"x": (BLOCK,)}, {})
    builder.elementwise("relu", ("x",), "y", "x0[i] > 0.0f ? x0[i] : 0.0f")
    return builder.image(("y",), target)


def chain(target: str) -> Image:
    """A chain of thirty kernels with reused memory, and a second output from the middle."""
    builder = Builder({"x": (N,)}, {"w": torch.linspace(-1, 1, N)})
    before = "x"
    for i in range(10):
        builder.elementwise("mul", (before, "w"), f"p{i}", "x0[i] * x1[i]")
        builder.elementwise("add", (f"p{i}", "w"), f"q{i}", "x0[i] + x1[i]")
        builder.elementwise("relu", (f"q{i}",), f"r{i}", "x0[i] > 0.0f ? x0[i] : 0.0f")
        before = f"r{i}"
    return builder.image(("r9", "q4"), target)


def branches(target: str) -> Image:
    """Eight independent branches that join."""
    builder = Builder({"x": (N,)}, {})
    for i in range(8):
        builder.elementwise("relu" if i % 2 else "neg", ("x",), f"a{i}", "fmaxf(x0[i], 0.0f)" if i % 2 else "-x0[i]")
        builder.elementwise("neg", (f"a{i}",), f"b{i}", "-x0[i]")
    total = "b0"
    for i in range(1, 8):
        builder.elementwise("add", (total, f"b{i}"), f"t{i}", "x0[i] + x1[i]")
        total = f"t{i}"
    return builder.image((total,), target)


def shared(target: str) -> Image:
    """100 KiB of dynamic shared memory."""
    builder = Builder({"x": (3, SHARED_FLOATS)}, {})
    launch = Launch((3, 1, 1), (BLOCK, 1, 1))
    shape = (3, SHARED_FLOATS)
    builder.kernel("flip", ("x",), "y", shape, launch, SHARED, "reversed", {"axes": (1,)}, shared=SHARED_FLOATS)
    return builder.image(("y",), target)


def scan(target: str) -> Image:
    """Forty iterations with their number as a parameter: input and output are staged."""
    builder = Builder({"x": (STEPS, WIDTH)}, {})
    launch = Launch((WIDTH // BLOCK, 1, 1), (BLOCK, 1, 1))
    shape = (STEPS, WIDTH)
    builder.kernel("cumsum", ("x",), "y", shape, launch, SCAN, "step", {"axis": 0}, repeat=STEPS, scalars=1)
    return builder.image(("y",), target)


def through_torch(target: str) -> Image:
    """A node through PyTorch between two segments."""
    builder = Builder({"x": (N,)}, {})
    builder.elementwise("neg", ("x",), "a", "-x0[i]")
    builder.torch("aten.flip.default", ((("input", 0), ("list", (("value", 0),))), ()), ("a",), "s", (N,))
    builder.elementwise("add", ("a", "s"), "y", "x0[i] + x1[i]")
    return builder.image(("y",), target)


def chain_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    w, middle = torch.linspace(-1, 1, N, device=x.device), x
    for i in range(10):
        sums = x * w + w
        middle = sums if i == 4 else middle
        x = sums.relu()
    return x, middle


def branches_reference(x: torch.Tensor) -> torch.Tensor:
    return 4 * x - 4 * x.relu()


CASES: dict[str, tuple[Callable[[str], Image], Callable[[torch.Tensor], object], tuple[int, ...]]] = {
    "single": (single, torch.relu, (BLOCK,)),
    "chain": (chain, chain_reference, (N,)),
    "branches": (branches, branches_reference, (N,)),
    "shared": (shared, lambda x: x.flip(1), (3, SHARED_FLOATS)),
    "scan": (scan, lambda x: x.cumsum(0), (STEPS, WIDTH)),
    "through_torch": (through_torch, lambda x: -x - x.flip(0), (N,)),
}


def close(got: object, expected: object) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def check_results(exe: Executable, reference: Callable[[torch.Tensor], object], shape: tuple[int, ...]) -> None:
    """Fresh inputs at new addresses, strided and misaligned ones, and results that later calls do not change."""
    kept = []
    for _ in range(5):
        x = torch.randn(shape, device="cuda")
        kept.append((x, exe(x)))
    for x, got in kept:
        close(got, reference(x))
    wide = torch.randn((*shape, 2), device="cuda")[..., 0]
    close(exe(wide), reference(wide))
    elements = wide.numel()
    shifted = torch.randn(elements + 1, device="cuda")[1:].view(shape)
    close(exe(shifted), reference(shifted))
    report = exe.verify(torch.randn(shape, device="cuda"))
    assert report.passed, str(report)


def check_streams(exe: Executable, reference: Callable[[torch.Tensor], object], shape: tuple[int, ...]) -> None:
    """Alternate calls on several streams without synchronisation share one arena."""
    streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(3))]
    inputs = [torch.randn(shape, device="cuda") for _ in range(40)]
    torch.cuda.synchronize()
    results = []
    for i, x in enumerate(inputs):
        with torch.cuda.stream(streams[i % 4]):
            results.append(exe(x))
    torch.cuda.synchronize()
    for x, got in zip(inputs, results, strict=True):
        close(got, reference(x))


def check_clones(exe: Executable, reference: Callable[[torch.Tensor], object], shape: tuple[int, ...]) -> None:
    """Threads on their own streams, two for each of two executables."""
    both, failures = [exe, exe.clone()], []

    def work(which: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(30):
                    x = torch.randn(shape, device="cuda")
                    close(both[which % 2](x), reference(x))
        except Exception:  # reported below, from the main thread
            failures.append(traceback.format_exc())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    both[1].close()


def overhead(exe: Executable, shape: tuple[int, ...], fresh: bool, calls: int = 2000) -> float:
    """Host microseconds per call, with the GPU lagging behind; `fresh`: outputs are kept, so that addresses change."""
    x = torch.randn(shape, device="cuda")
    for _ in range(50):
        exe(x)
    torch.cuda.synchronize()
    kept: list[object] = []
    best = float("inf")
    for _ in range(5):
        kept.clear()
        start = time.perf_counter()
        for _ in range(calls // 5):
            result = exe(x)
            if fresh:
                kept.append(result)
        best = min(best, (time.perf_counter() - start) / (calls // 5) * 1e6)
        torch.cuda.synchronize()
    return best


def prepare(folder: Path, target: str) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (build, _, _) in CASES.items():
        save(build(target), folder / f"{name}.tw.zip")
        print(f"{folder / name}.tw.zip")
    return 0


def run(folder: Path) -> int:
    failed = 0
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, arena alignment {GPU_ALIGNMENT}")
    for name, (_, reference, shape) in CASES.items():
        for check in (check_results, check_streams, check_clones):
            try:
                exe = load(folder / f"{name}.tw.zip")
                check(exe, reference, shape)
                exe.close()
                print(f"{name:14} {check.__name__:14} passed")
            except Exception:  # every case runs, and each failure is shown
                failed += 1
                print(f"{name:14} {check.__name__:14} FAILED")
                traceback.print_exc()
    for name in ("single", "chain", "branches"):
        exe, shape = load(folder / f"{name}.tw.zip"), CASES[name][2]
        same, fresh = overhead(exe, shape, False), overhead(exe, shape, True)
        print(f"{name:14} host time of a call: {same:.1f} us, with outputs at new addresses {fresh:.1f} us")
    print("all passed" if not failed else f"{failed} failed")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["prepare", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="h200", help="catalogue name to compile for (prepare)")
    arguments = parser.parse_args()
    return prepare(arguments.folder, arguments.target) if arguments.command == "prepare" else run(arguments.folder)


if __name__ == "__main__":
    sys.exit(main())
