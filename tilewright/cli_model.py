"""The model or artifact that a command names: options for compiling it, reading and compiling."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.cli_options import add_numerics, whole
from tilewright.cli_output import progress_bar, quiet

if TYPE_CHECKING:
    from tilewright.models import Model
    from tilewright.runtime.executable import Executable, Image

STAGES = {"read": "reading the model", "plan": "planning", "measure": "measuring candidates", "build": "compiling kernels"}
MODEL_HELP = "FILE.onnx, FILE.pt2, zoo:NAME, torchvision:NAME, timm:NAME, or package.module:callable that returns (module, inputs)"


def add_building_options(parser: argparse.ArgumentParser) -> None:
    """The options of every command that compiles a model."""
    parser.add_argument("--target", metavar="T", help="native (this CPU, the default), cuda (the GPU here), or a name of `tilewright targets`")
    parser.add_argument("--batch", type=whole(), metavar="N", help="first extent of the example inputs (default 1)")
    parser.add_argument("--input", action="append", default=[], metavar="SHAPE", help="an example input, as 1x3x224x224 or 1x128:int64; repeat")
    parser.add_argument("--threads", type=whole(), metavar="N", help="threads of CPU code")
    parser.add_argument("--precision", default="fp32", metavar="P", help="fp32 (default), or bf16 on a CPU with AMX")
    parser.add_argument("--trials", type=whole(0), default=0, metavar="N", help="candidates of each region to measure first, on a GPU (default 0)")
    parser.add_argument("--records", metavar="FILE", help="measurements that decide before the models do (default: the user's)")
    add_numerics(parser)
    parser.add_argument("--strict", action="store_true", help="refuse a model of which a part would run through PyTorch")


def check_options(options: argparse.Namespace) -> None:
    """Rejects at once options that `compile` would reject after minutes of building a model."""
    from tilewright.hardware import machine
    from tilewright.partition.precision import check_precision

    check_precision(options.precision, machine(options.target))


def resolved(options: argparse.Namespace) -> Model:
    """The model that the options name."""
    from tilewright.models import resolve

    return resolve(options.model, options.batch, options.input)


def is_artifact(text: str) -> bool:
    """Whether a command's subject is an artifact rather than a model."""
    path = Path(text)
    return path.suffix == ".zip" or (path.is_dir() and path.suffix not in (".onnx", ".pt2"))


def runs_on_gpu(target: str | None) -> bool:
    """Whether the target is a GPU present on this machine."""
    import torch

    from tilewright.hardware import is_present, machine

    found = machine(target)
    return found.is_gpu and is_present(found) and torch.cuda.is_available()


def inputs_on_target(model: Model, options: argparse.Namespace, seed: int = 0) -> tuple[Any, ...]:
    """The model's example inputs, on the target's device."""
    import torch

    inputs = model.inputs(seed) if model.inputs is not None else ()
    device = "cuda" if runs_on_gpu(options.target) else "cpu"
    return tuple(x.to(device) if isinstance(x, torch.Tensor) else x for x in inputs)


def compiled(model: Model, options: argparse.Namespace) -> Executable:
    """The model compiled, with its progress on the standard error stream."""
    from tilewright.compile import compile

    with quiet(options.debug), progress_bar(STAGES["read"]) as show:

        def report(stage: str, done: int, total: int) -> None:
            show(STAGES.get(stage, stage), done, total)

        return compile(
            model.module,
            model.inputs(0) if model.inputs is not None else None,
            options.target or "native",
            precision=options.precision,
            trials=options.trials,
            vendor=options.vendor,
            unsupported="error" if options.strict else "warn",
            threads=options.threads,
            records=options.records,
            deterministic=not options.nondeterministic,
            winograd=not options.no_winograd,
            progress=report,
        )


def image_of(options: argparse.Namespace) -> Image:
    """The image of an artifact, or of a model that is compiled first."""
    if is_artifact(options.model):
        from tilewright.runtime.artifact import read

        return read(options.model)
    check_options(options)
    return compiled(resolved(options), options).image
