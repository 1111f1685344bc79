"""``tilewright profile``: the measured time of each region within whole calls, hottest first."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tilewright.cli_model import MODEL_HELP, check_subjects, runnable
from tilewright.cli_options import seed, whole
from tilewright.cli_output import progress_bar
from tilewright.files import check_output

if TYPE_CHECKING:
    from rich.console import Console

DESCRIPTION = "measure each region of a model within whole calls, hottest first, beside its predicted time"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options, besides those of building."""
    parser.add_argument("model", metavar="PATH|MODEL", help=f"an artifact, or {MODEL_HELP}")
    parser.add_argument("--repetitions", type=whole(), default=30, metavar="N", help="calls with and without clocks (default 30)")
    parser.add_argument("--trace", metavar="FILE", help="write one call as JSON for the trace viewers of browsers, such as ui.perfetto.dev")
    parser.add_argument("--seed", type=seed, default=1, help="of the random inputs (default 1)")


def run(options: argparse.Namespace, console: Console) -> int:
    """Runs an artifact, or a model that is compiled first, on this machine."""
    if options.trace is not None:
        check_output(options.trace, options.model)
    check_subjects(options, [options.model], ("threads",))
    executable, arguments, keywords = runnable(options, options.seed)
    with progress_bar("measuring regions"):
        profile = executable.profile(*arguments, repetitions=options.repetitions, **keywords)
    console.print(str(profile), soft_wrap=True)
    if options.trace is not None:
        profile.save_trace(options.trace)
        console.print(f"the call of median duration is written to {options.trace}", soft_wrap=True)
    return 0
