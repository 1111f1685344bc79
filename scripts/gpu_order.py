"""In which order the assembler put the instructions of a GPU kernel that access memory, multiply matrices, wait or branch.

    python scripts/gpu_order.py zoo:resnet50 contraction_62d0 --target h200 --precision tf32 --batch 64

Shows whether loads are issued ahead of what waits for them. The GPU need not be here; `tilewright explain --code` says more of the kernels, and their
names. It needs nvdisasm, of the CUDA toolkit or the package nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import tilewright

SHOWN = re.compile(r"\b(LD[GSL.]|ST|RED|ATOM|UTMA|UBLKCP|[HIDB]G?MMA|BAR|UCGABAR|\w*DEPBAR|SYNCS|ACQBULK|BRA|EXIT)")
"""Instructions of SASS that are shown."""
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+((?:@!?U?P\w+ +)?[A-Z][A-Za-z0-9_.]*)")


def ordered(sass: str) -> Iterator[tuple[str, int]]:
    """Instructions with their predicates, in order, and how many equal ones follow each other."""
    shown = (found[1] for found in map(INSTRUCTION.search, sass.splitlines()) if found is not None and SHOWN.search(found[1]))
    return ((name, len(list(equal))) for name, equal in groupby(shown))


def sass_of(cubin: bytes) -> str:
    """The code as text. Raises SystemExit if nvdisasm is not here."""
    packaged = Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/nvdisasm")
    disassembler = shutil.which("nvdisasm") or next(map(str, packaged), None)
    if disassembler is None:
        raise SystemExit("nvdisasm is not here: pip install nvidia-cuda-nvdisasm, or install the CUDA toolkit")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([disassembler, "-c", file.name], capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as on the command line of tilewright, such as zoo:resnet18")
    parser.add_argument("kernel", help="the beginning of a kernel's name")
    parser.add_argument("--target", default="h200", help="a GPU of `tilewright targets`")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--batch", type=int, help="first extent of the example inputs")
    options = parser.parse_args()
    image = tilewright.compile(options.model, target=options.target, precision=options.precision, batch=options.batch).image
    chosen = next((one for one in image.binaries if any(entry.startswith(options.kernel) for entry in one.entries)), None)
    if not image.machine.is_gpu or chosen is None:
        raise SystemExit(f"no kernel of {options.model} for {options.target} on a GPU begins with {options.kernel}")
    for name, count in ordered(sass_of(chosen.content)):
        print(f"{count:4} {name}")


if __name__ == "__main__":
    main()
