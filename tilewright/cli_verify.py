"""``tilewright verify``: each region's output against PyTorch in float64."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tilewright import cli_artifact
from tilewright.cli_model import MODEL_HELP, check_subjects, is_artifact, runnable
from tilewright.cli_options import WRONG_CODE, amount, seed
from tilewright.cli_output import progress_bar
from tilewright.errors import UnsupportedOption

if TYPE_CHECKING:
    from rich.console import Console

DESCRIPTION = "check each region's output against PyTorch in float64, worst first"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options, besides those of building."""
    parser.add_argument("model", metavar="PATH|MODEL", help=f"an artifact, or {MODEL_HELP}")
    parser.add_argument("--all", action="store_true", help="list every value, not the 20 worst")
    parser.add_argument("--seed", type=seed, default=1, help="of the random inputs (default 1)")
    parser.add_argument("--tolerance", type=amount, help="replaces the tolerance that each dtype implies")
    parser.add_argument("--no-run", action="store_true", help="look at an artifact, for any machine, and run nothing of it")


def run(options: argparse.Namespace, console: Console) -> int:
    """Runs an artifact, or a model that is compiled first; the exit code is WRONG_CODE if a region is wrong."""
    check_subjects(options, [options.model], () if options.no_run else ("threads",))
    if options.no_run:
        if not is_artifact(options.model):
            raise UnsupportedOption(f"--no-run looks at artifacts, and {options.model} is none", "leave it out")
        return cli_artifact.inspect(options.model, console)
    executable, arguments, keywords = runnable(options, options.seed)
    with progress_bar("comparing with float64"):
        verification = executable.verify(*arguments, tolerance=options.tolerance, **keywords)
    from tilewright.report.tables import verification_lines

    shown = None if options.all else 20
    for line in verification_lines(verification, shown, console.width):
        console.print(line, soft_wrap=True)
    if shown is not None and len(verification.values) > shown:
        console.print(f"the {shown} worst of {len(verification.values)} values; --all lists every one")
    first = verification.first_wrong
    if first is None:
        console.print(f"{verification.agreement} with float64")
        return 0
    console.print(f"first wrong: region {first.region}, value {first.value}")
    return WRONG_CODE
