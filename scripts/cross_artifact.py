"""Artifacts made on a machine without the GPU, loaded and checked on one with it.

    python scripts/cross_artifact.py make FOLDER mobilenet_v2 densenet121    anywhere with NVRTC
    python scripts/cross_artifact.py run FOLDER                              on the GPU: writes bench/results/cross_artifact_h200.json

The check compares the artifact's results on fresh inputs with PyTorch in float64; the module is built again from the same seed. Exits with 1 if one
is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

import tilewright
from bench.common import as_list, double_precision_outputs, relative_error, write_results
from tilewright import zoo
from tilewright.hardware import is_present, machine

TARGET = "h200"
TOLERANCE = 1e-4


def make(folder: Path, networks: list[str]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    if is_present(machine(TARGET)):
        print(f"the {TARGET} is here: this shows nothing")
    for name in networks:
        module, inputs = zoo.build(name, 1)
        start = time.perf_counter()
        executable = tilewright.compile(module.eval(), inputs, target=TARGET)
        executable.save(folder / f"{name}.zip")
        print(f"{name}: {time.perf_counter() - start:.1f} s, {(folder / f'{name}.zip').stat().st_size / 1e6:.1f} MB", flush=True)
    return 0


def run(folder: Path) -> int:
    results = []
    for path in sorted(folder.glob("*.zip")):
        module, _ = zoo.build(path.stem, 1)
        fresh = zoo.NETWORKS[path.stem].example_inputs(1)
        start = time.perf_counter()
        executable = tilewright.load(path)
        seconds = time.perf_counter() - start
        found = [tensor.cpu() for tensor in as_list(executable(*(x.cuda() for x in fresh)))]
        error = relative_error(found, double_precision_outputs(module.eval(), fresh))
        results.append({"network": path.stem, "load_seconds": seconds, "relative_error": error, "right": bool(error < TOLERANCE)})
        print(results[-1], flush=True)
    print(write_results(f"cross_artifact_{TARGET}", {"gpu": torch.cuda.get_device_name()}, results))
    return 0 if results and all(result["right"] for result in results) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("make", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("networks", nargs="*")
    options = parser.parse_args()
    return make(options.folder, options.networks) if options.what == "make" else run(options.folder)


if __name__ == "__main__":
    sys.exit(main())
