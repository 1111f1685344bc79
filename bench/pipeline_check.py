"""Cycles of inner loops by the pipeline model and by llvm-mca, for kernels of several layers, schedules and targets.

    python -m bench.pipeline_check [--name pipeline_check]

Compiles, for each target, kernels of five of the twenty layers (the models' two favourites and three evenly spaced schedules of each) and of the
cases of bench/instruction_counts.py, and compares all their single-block loops. llvm-mca reads 200 iterations of the same instructions. The result
notes where its machine model is known to differ from the core: it does not fuse micro-operations that Intel's cores fuse, and its tables of the Arm
cores have no accumulator forwarding (LLVM 19).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from bench.common import write_results
from bench.instruction_counts import cases, compiled, kernels_of
from bench.layers import layer
from tilewright.analysis.cpu.assembly import BasicBlock, Instruction, parse
from tilewright.analysis.cpu.pipeline import block_cycles
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.hardware.pipelines import PIPELINES
from tilewright.ir.kernel import Kernel
from tilewright.kernels.registry import lower
from tilewright.selection.choice import rank
from tilewright.tuning import dataset
from tilewright.tuning.sampling import evenly

CORES = MappingProxyType({
    "haswell": "haswell", "skylake-server": "skylake-avx512", "neoverse-n1": "neoverse-n1", "cortex-a53": "cortex-a53",
})  # fmt: skip
"""Maps our tables' names to llvm-mca's."""
TARGETS = ("x86-avx512", "x86-avx2", "neoverse-n1", "cortex-a53")
LAYERS = ("R1", "R2", "R9", "D5", "D6")
ITERATIONS = 200
NEWEST = 17
"""LLVM knows the Neoverse N1 from this version on."""


def llvm_mca() -> str | None:
    """The newest installed llvm-mca of a version that knows all cores, or None."""
    for name in ("llvm-mca", *(f"llvm-mca-{version}" for version in range(30, NEWEST - 1, -1))):
        path = shutil.which(name)
        if path is None:
            continue
        found = re.search(r"LLVM version (\d+)", subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout)
        if found and int(found[1]) >= NEWEST:
            return path
    return None


def as_text(instruction: Instruction, architecture: str) -> str:
    """The instruction as text for llvm-mca, with arbitrary code addresses."""
    operands = list(instruction.operands)
    if architecture == "aarch64" and re.match(r"b\.|b$|cbn?z|tbn?z", instruction.mnemonic):
        operands[-1] = "#0"
    elif instruction.mnemonic == "adrp":
        operands[-1] = "symbol"
    elif instruction.mnemonic[0] == "j":
        operands = ["0"]
    return f"{instruction.mnemonic} {', '.join(operands)}"


def mca_cycles(tool: str, loops: Sequence[Sequence[Instruction]], target: Machine) -> list[float]:
    """Cycles per iteration of each loop by llvm-mca."""
    parts = []
    for number, instructions in enumerate(loops):
        lines = "\n".join(as_text(instruction, target.architecture) for instruction in instructions)
        parts.append(f"# LLVM-MCA-BEGIN loop{number}\n{lines}\n# LLVM-MCA-END loop{number}\n")
    triple = target.architecture.replace("-", "_")
    options = [f"-mcpu={CORES[target.pipeline]}", f"-mtriple={triple}", f"-iterations={ITERATIONS}"]
    command = [tool, *options, "-instruction-info=0", "-resource-pressure=0"]
    answer = subprocess.run(command, input="".join(parts), capture_output=True, text=True, check=True).stdout
    found = [int(total) / ITERATIONS for total in re.findall(r"Total Cycles:\s+(\d+)", answer)]
    if len(found) != len(loops):
        raise ValueError(f"llvm-mca answered for {len(found)} of {len(loops)} loops")
    return found


def inner_loops(assembly: str, target: Machine) -> list[BasicBlock]:
    """The distinct single-block loops."""
    blocks = parse(assembly, target.architecture).blocks
    return list({block.instructions: block for block in blocks if block.number in block.successors}.values())


def kernels(target: Machine) -> list[Kernel]:
    found: dict[str, Kernel] = {}
    for name in LAYERS:
        problem = dataset.layer_problem(layer(name))
        ranking = rank(problem, target, threads=2)
        places = [*np.argsort(ranking.seconds, kind="stable")[:2], *evenly(ranking, 3, seed=1)]
        for place in map(int, places):
            lowered = lower(problem, ranking.choice(place).schedule, target)
            found |= {kernel.name: kernel for kernel in lowered.kernels}
    for module, inputs in cases().values():
        found |= {kernel.name: kernel for kernel in kernels_of(module, inputs, target, 2)}
    return list(found.values())


def judged(ours: np.ndarray, theirs: np.ndarray) -> dict[str, Any]:
    ratio = ours / theirs
    quantiles = np.quantile(ratio, [0.05, 0.25, 0.5, 0.75, 0.95])
    return {
        "loops": len(ratio), "median error": float(np.median(np.abs(ratio - 1))), "rank correlation": float(spearmanr(ours, theirs)[0]),
        "ours / theirs, quantiles 5 25 50 75 95": [round(float(value), 4) for value in quantiles],
    }  # fmt: skip


def compare(target: Machine, tool: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Figures of one target, and its loops."""
    made = kernels(target)
    with tempfile.TemporaryDirectory() as folder:
        loops = inner_loops(compiled(made, target, Path(folder)), target)
    start = time.perf_counter()
    ours = np.array([block_cycles(loop.instructions, target.architecture, PIPELINES[target.pipeline], True).steady for loop in loops])
    seconds = time.perf_counter() - start
    theirs = np.array(mca_cycles(tool, [loop.instructions for loop in loops], target))
    products = np.array([loop.counts.fma > 0 for loop in loops])
    figures = {
        "target": target.name, "kernels": len(made), "milliseconds a loop": round(1e3 * seconds / len(loops), 2),
        "all": judged(ours, theirs), "with multiply-adds": judged(ours[products], theirs[products]),
    }  # fmt: skip
    rows = [
        {"target": target.name, "instructions": len(loop.instructions), "multiply-adds": loop.counts.fma, "ours": round(float(a), 3), "llvm-mca": b}
        for loop, a, b in zip(loops, ours, theirs, strict=True)
    ]
    return figures, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("targets", nargs="*", default=TARGETS)
    parser.add_argument("--name", default="pipeline_check")
    options = parser.parse_args()
    tool = llvm_mca()
    if tool is None:
        raise SystemExit(f"llvm-mca of LLVM {NEWEST} or later is not installed")
    figures, rows = [], []
    for target in map(machine, options.targets):
        found, loops = compare(target, tool)
        print(found, flush=True)
        figures.append(found)
        rows += loops
    print(write_results(options.name, {"figures": figures, "iterations": ITERATIONS}, rows))


if __name__ == "__main__":
    main()
