"""Runs networks on the GPU present under compute-sanitizer's checkers and records their findings.

    python scripts/gpu_sanitize.py                      every network under every tool
    python scripts/gpu_sanitize.py --tools memcheck --networks lenet5

Kernels are compiled beforehand, outside the checker. Each network is called twice under it, on fresh inputs, and its results are compared with
PyTorch in float64 on the CPU, which shows that the checked kernels ran. `tests/test_gpu_sanitize.py` says for which schedules each network is here.
Writes bench/results/compute_sanitizer_DEVICE.json, and exits with 1 if anything was found or a network was wrong.
"""

from __future__ import annotations

import argparse
import copy
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import tilewright
from bench.common import write_results
from tilewright import zoo
from tilewright.runtime.executable import Executable

TOOLS = {
    "memcheck": ("--leak-check", "no"),
    "racecheck": ("--racecheck-report", "all"),
    "initcheck": (),
    "synccheck": (),
}
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")

ERRORS = {"fp32": 1e-3, "fp32-tensor": 1e-4, "tf32": 5e-3}
"""The largest error of float32 results, relative and of the largest result, by precision."""
HALF_ERROR = 2e-2

Built = tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]


@dataclass(frozen=True)
class Network:
    """How to build a module and draw its inputs, and the precision in which it is compiled."""

    build: Callable[[], Built]
    precision: str = "fp32"


class Tagger(nn.Module):
    """A bidirectional LSTM over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(100, 32), nn.LSTM(32, 40, bidirectional=True), nn.Linear(80, 17)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.lstm(self.embedding(tokens))[0])
        return result


class Sums(nn.Module):
    """Long reductions to few results, split over blocks: products, sums, extremes, prefix sums."""

    def __init__(self) -> None:
        super().__init__()
        self.long = nn.Linear(20000, 24)

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [self.long(x), y.mT @ y, y.sum(), y.amax(0), y.argmax(), y.softmax(0), y.cumsum(0), y.var(1)]


def inverted() -> nn.Module:
    """MobileNet's block: expansion, strided depthwise convolution, projection."""
    parts = (nn.Conv2d(8, 48, 1), nn.BatchNorm2d(48), nn.ReLU6(), nn.Conv2d(48, 48, 3, 2, 1, groups=48), nn.BatchNorm2d(48), nn.ReLU6())
    return nn.Sequential(*parts, nn.Conv2d(48, 24, 1), nn.BatchNorm2d(24))


class Recurrent(nn.Module):
    """An LSTM of many sequences, which on tensor cores is one kernel with barriers of the grid."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.lstm(x)[0]
        return result


def convolutions() -> nn.Module:
    """Products for `mma.sync` and for warpgroups, with asynchronous copies and copies by the copy engine."""
    first, last = nn.Conv2d(16, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1, stride=2)
    return nn.Sequential(first, nn.ReLU(), nn.Conv2d(64, 64, 1), nn.SiLU(), last)


class Beside(nn.Module):
    """Layers, each of an input of its own."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]


def paired_products() -> Built:
    """Pairs of TF32 by warpgroups: sums of one block, staged, of parts added by a second kernel, and of parts that meet."""
    layers = nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(2048, 128), nn.Linear(512, 512)
    return drawn(Beside(*layers), (1024, 256), (2048, 256), (128, 2048), (512, 512))


def paired_convolutions() -> Built:
    """Pairs of TF32 between Winograd's transforms, also with clusters and in loops over tiles, and in an implicit product."""
    layers = convolution(128, 128), convolution(128, 128), convolution(128, 128), convolution(64, 64)
    return drawn(Beside(*layers), (4, 128, 14, 14), (8, 128, 14, 14), (24, 128, 14, 14), (8, 64, 28, 28))


def meeting(dtype: torch.dtype = torch.float32) -> Built:
    """Parts of sums that meet in a cluster: of products by warpgroups, over patches, and by `mma.sync`."""
    rows = (128, 1024)
    if dtype == torch.float32:
        return drawn(Beside(nn.Linear(1024, 256), convolution(128, 128), nn.Linear(1024, 64)), (256, 1024), (1, 128, 28, 28), rows)
    layers = convolution(256, 128), convolution(256, 128), nn.Linear(1024, 128)
    return drawn(Beside(*layers), (1, 256, 14, 14), (1, 256, 28, 28), rows, dtype=dtype)


def convolution(channels: int, filters: int) -> nn.Module:
    return nn.Conv2d(channels, filters, 3, padding=1)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(128, 2, 256, batch_first=True)


def drawn(module: nn.Module, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Built:
    """The module in this type, of normal inputs."""
    return module.to(dtype), lambda: tuple(torch.randn(shape).to(dtype) for shape in shapes)


def from_zoo(name: str) -> Built:
    module, _ = zoo.build(name)
    return module, lambda: zoo.NETWORKS[name].example_inputs(1)


NETWORKS: dict[str, Network] = {
    "lenet5": Network(lambda: from_zoo("lenet5")),
    "resnet18": Network(lambda: from_zoo("resnet18")),
    "defonet": Network(lambda: from_zoo("defonet")),
    "inverted": Network(lambda: drawn(inverted(), (1, 8, 23, 23))),
    "tagger": Network(lambda: (Tagger(), lambda: (torch.randint(0, 100, (9, 2)),))),
    "transformer": Network(lambda: drawn(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), (2, 33, 64))),
    "half convolutions": Network(lambda: drawn(convolutions(), (3, 16, 30, 30), dtype=torch.float16)),
    "half attention": Network(lambda: drawn(encoder(), (4, 512, 128), dtype=torch.float16)),
    "half recurrent": Network(lambda: drawn(Recurrent(), (6, 20, 32), dtype=torch.float16)),
    "half meeting": Network(lambda: meeting(torch.float16)),
    "bf16 convolutions": Network(lambda: drawn(convolutions(), (3, 16, 30, 30), dtype=torch.bfloat16)),
    "bf16 attention": Network(lambda: drawn(encoder(), (4, 512, 128), dtype=torch.bfloat16)),
    "bf16 recurrent": Network(lambda: drawn(Recurrent(), (6, 20, 32), dtype=torch.bfloat16)),
    "bf16 meeting": Network(lambda: meeting(torch.bfloat16)),
    "tf32 convolutions": Network(lambda: drawn(convolutions(), (3, 16, 30, 30)), "tf32"),
    "tf32 attention": Network(lambda: drawn(encoder(), (4, 512, 128)), "tf32"),
    "tf32 recurrent": Network(lambda: drawn(Recurrent(), (6, 20, 32)), "tf32"),
    "tf32 meeting": Network(meeting, "tf32"),
    "paired products": Network(paired_products, "fp32-tensor"),
    "paired convolutions": Network(paired_convolutions, "fp32-tensor"),
    "sums": Network(lambda: drawn(Sums(), (3, 20000), (6000, 20))),
}
TESTS = {"atomic sums": "tests/test_deterministic.py", "sent results": "tests/test_sent_results.py"}
"""GPU tests that compare with float64 themselves."""


def compiled(name: str, target: str = "cuda") -> tuple[Executable, nn.Module, Callable[[], tuple[Tensor, ...]]]:
    torch.manual_seed(7)
    network = NETWORKS[name]
    module, inputs = network.build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tilewright.compile(module.eval(), inputs(), target, precision=network.precision, unsupported="error"), module, inputs


def check(name: str) -> None:
    """Calls a network twice; raises AssertionError for a wrong result."""
    torch.set_num_threads(1)  # many such processes run concurrently
    executable, module, inputs = compiled(name)
    exact = copy.deepcopy(module).double()
    for _ in range(2):
        given = inputs()
        found = executable(*(x.cuda() for x in given))
        torch.cuda.synchronize()
        with torch.no_grad():
            expected = exact(*(x.double() if x.is_floating_point() else x for x in given))
        compare(found, expected, NETWORKS[name].precision)
    print(f"{name} is right")


def compare(found: object, expected: object, precision: str) -> None:
    """Raises AssertionError if results are further from float64's than the precision allows."""
    for ours, theirs in zip(*map(torch.utils._pytree.tree_leaves, (found, expected)), strict=True):
        scale = max(1.0, float(theirs.abs().max()))
        error = ERRORS[precision] if ours.dtype == torch.float32 else HALF_ERROR
        torch.testing.assert_close(ours.cpu().double(), theirs.double(), rtol=error, atol=error * scale)


def under(tool: str, name: str, seconds: float) -> dict[str, object]:
    """The tool's report on a network; `errors` is None if there was no summary within the time limit."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        program = ["-m", "pytest", "-q", "-m", "gpu", TESTS[name]] if name in TESTS else [__file__, "--check", name]
        command = ["compute-sanitizer", "--tool", tool, *TOOLS[tool], "--log-file", str(log), sys.executable, *program]
        start = time.perf_counter()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
            shown, failure = done.stdout, done.stderr
        except subprocess.TimeoutExpired:
            shown, failure = "", f"stopped after {seconds} s"
        text = log.read_text() if log.exists() else ""
    found = SUMMARY.search(text)
    errors = int(found[1] or found[2]) if found else None
    right = re.search(r"^\d+ passed" if name in TESTS else f"^{name} is right", shown, re.MULTILINE) is not None
    result: dict[str, object] = {
        "network": name, "tool": tool, "errors": errors, "right": right,
        "seconds": round(time.perf_counter() - start, 1), "output": "" if errors == 0 else text[:2000] + failure[-1000:],
    }  # fmt: skip
    print(f"{tool:10} {name:19} errors {errors}, right {result['right']}, {result['seconds']} s\n{result['output']}".rstrip(), flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=[*NETWORKS, *TESTS], choices=[*NETWORKS, *TESTS])
    parser.add_argument("--tools", nargs="*", default=list(TOOLS), choices=list(TOOLS))
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=600, help="for one network under one tool")
    parser.add_argument("--device", default="h200", help="the device's name in the result file's")
    parser.add_argument("--check", metavar="NETWORK", help="only run one network, here")
    options = parser.parse_args()
    if options.check:
        check(options.check)
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not here: it comes with the CUDA toolkit")
        return 1
    schedules = {}
    for name in set(options.networks) - set(TESTS):
        executable = compiled(name)[0]
        schedules[name] = sorted({region.schedule for region in executable.image.program.regions if region.calls})
        executable.close()
    version = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True, check=True).stdout.strip().splitlines()[-1]
    with ThreadPoolExecutor(options.jobs) as pool:
        pairs = [(tool, name) for tool in options.tools for name in options.networks]
        results = list(pool.map(lambda pair: under(pair[0], pair[1], options.seconds), pairs))
    write_results(f"compute_sanitizer_{options.device}", {"tool_version": version, "schedules": schedules}, results)
    return 0 if all(result["errors"] == 0 and result["right"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
