"""``tilewright digest`` and ``tilewright verify --no-run``: inspecting an artifact without running any of it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tilewright.cli_options import path
from tilewright.cli_output import reading_artifact

if TYPE_CHECKING:
    from rich.console import Console

DESCRIPTION = "print the digest of an artifact, by which `tilewright.load` knows it again"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `digest`."""
    parser.add_argument("path", type=path, metavar="PATH", help="an artifact, a directory or a .zip file")


def run_digest(options: argparse.Namespace, console: Console) -> int:
    """Prints only the digest, for scripts."""
    with reading_artifact(options.path):
        from tilewright.runtime.artifact import digest

        found = digest(options.path)
    console.print(found, soft_wrap=True)
    return 0


def inspect(location: str, console: Console) -> int:
    """Makes all checks of loading, for an artifact of any machine, and prints what it would run.

    Raises:
        InvalidArtifact: if loading on the artifact's machine would refuse it.
    """
    from tilewright.text import number_of

    with reading_artifact(location):
        from tilewright.runtime.artifact import open_artifact

        opened = open_artifact(location)
    program, machine = opened.image.program, opened.image.machine
    calls = sum(region.repeat * len(region.calls) for region in program.regions)
    through = sorted({node.attributes["target"] for node in program.graph.nodes if node.operator == "torch"})
    console.print(f"digest {opened.digest}", soft_wrap=True)
    console.print(f"for {machine.name} ({machine.architecture}){f', a driver of CUDA {opened.driver} or newer' if opened.driver else ''}")
    files = number_of(len(opened.image.binaries), "compiled file")
    console.print(f"{number_of(len(program.kernels), 'kernel')} in {files}, run by {number_of(calls, 'call')}")
    console.print(f"through PyTorch: {', '.join(through) or 'nothing'}")
    console.print("hashes, sizes, layouts, lifetimes, signature and binaries agree; nothing was mapped or run")
    return 0
