"""``tilewright verify``: each region's output against PyTorch in float64."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tilewright import cli_artifact
from tilewright.cli_model import MODEL_HELP, check_options, compiled, inputs_on_target, is_artifact, resolved
from tilewright.cli_options import WRONG_CODE, amount, seed
from tilewright.errors import UnsupportedOption

if TYPE_CHECKING:
    from rich.console import Console

    from tilewright.runtime.executable import Executable

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
    from tilewright.report.tables import verification_table

    if options.no_run:
        if not is_artifact(options.model):
            raise UnsupportedOption(f"--no-run looks at artifacts, and {options.model} is none", "leave it out")
        return cli_artifact.inspect(options.model, console)
    if is_artifact(options.model):
        from tilewright.runtime.artifact import load

        executable, model = load(options.model), None
    else:
        check_options(options)
        model = resolved(options)
        executable = compiled(model, options)
    arguments, keywords = _drawn_inputs(executable, options.seed)
    if model is not None and model.inputs is not None:
        arguments = inputs_on_target(model, options, options.seed)
    verification = executable.verify(*arguments, tolerance=options.tolerance, **keywords)
    shown = None if options.all else 20
    console.print(verification_table(verification, shown))
    if shown is not None and len(verification.values) > shown:
        console.print(f"the {shown} worst of {len(verification.values)} values; --all lists every one")
    first = verification.first_wrong
    if first is None:
        console.print(f"all {len(verification.values)} values agree with float64")
        return 0
    console.print(f"first wrong: region {first.region}, value {first.value}")
    return WRONG_CODE


def _drawn_inputs(executable: Executable, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random inputs that fit the signature; integers are 0 or 1."""
    import torch

    from tilewright.models import random_tensor
    from tilewright.runtime.buffers import torch_dtype
    from tilewright.runtime.signature import unflatten

    generator = torch.Generator().manual_seed(seed)
    device = "cuda" if executable.image.machine.is_gpu else "cpu"
    leaves = [
        random_tensor(leaf.shape, torch_dtype(leaf.dtype), generator).to(device) if leaf.name else leaf.constant
        for leaf in executable.signature.inputs
    ]
    arguments, keywords = unflatten(executable.signature.input_tree, iter(leaves))
    return tuple(arguments), dict(keywords)
