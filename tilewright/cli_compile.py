"""``tilewright compile``: a model compiled, its plan printed, and saved."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from tilewright.cli_model import MODEL_HELP, compiled_model
from tilewright.cli_output import progress_bar
from tilewright.files import check_place
from tilewright.stages import STAGES

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_SECONDS = 0.05
"""Stages that took less are not shown."""
DESCRIPTION = "compile a model, print its plan, and save it"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `compile`, besides those of building."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("-o", "--output", metavar="PATH", help="write an artifact: a directory, or one file that ends in .zip")


def run(options: argparse.Namespace, console: Console) -> int:
    """Compiles the model, prints its plan, and saves it if requested."""
    start = time.perf_counter()
    if options.output is not None:
        check_place(options.output)
        with progress_bar("loading PyTorch"):
            from tilewright.runtime.artifact import check_path
        check_path(options.output)
    _, executable = compiled_model(options)
    from tilewright.runtime.plan_text import plan_text

    console.print(plan_text(executable.plan, options.model, console.width), soft_wrap=True)
    seconds = time.perf_counter() - start
    known = {name: executable.compile_seconds[name] for name in STAGES if name in executable.compile_seconds}
    stages = {"PyTorch and the model": seconds - sum(known.values()), **known}
    text = ", ".join(f"{name} {took:.1f} s" for name, took in stages.items() if took >= SHOWN_SECONDS)
    for line in wrap(f"compiled in {seconds:.1f} s: {text}", console.width):
        console.print(line, soft_wrap=True)
    if options.output is not None:
        with progress_bar(f"writing {Path(options.output).name}"):
            digest = executable.save(options.output)
        console.print(f"written to {options.output}, digest {digest}", soft_wrap=True)
    return 0
