"""The model or artifact that a command names: options for compiling it, reading and compiling."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.cli_options import add_numerics, whole
from tilewright.cli_output import progress_bar, quiet, reading_artifact
from tilewright.errors import TargetNotPresent, UnsupportedOption
from tilewright.stages import Progress

if TYPE_CHECKING:
    from tilewright.models import Model
    from tilewright.runtime.executable import Executable, Image

STAGES = {
    "export": "reading the model", "partition": "deciding what runs together", "choice": "ranking candidates", "measure": "measuring candidates",
    "partitions": "comparing partitions", "compile": "compiling kernels", "packing": "packing constants",
}  # fmt: skip
MODEL_HELP = "FILE.onnx, FILE.pt2, zoo:NAME, torchvision:NAME, timm:NAME, or package.module:callable that returns (module, inputs)"


def add_building_options(parser: argparse.ArgumentParser) -> None:
    """The options of every command that compiles a model."""
    parser.add_argument("--target", metavar="T", help="native (this CPU, the default), cuda (the GPU here), or a name of `tilewright targets`")
    parser.add_argument("--batch", type=whole(), metavar="N", help="first extent of the example inputs (default 1)")
    parser.add_argument(
        "--input", action="append", default=[], metavar="SHAPE", help="an example input, as 1x3x224x224, 1x128:int64 or 2:int64=5,7; repeat"
    )
    parser.add_argument("--threads", type=whole(), metavar="N", help="threads of CPU code")
    on_gpu = "fp32 (default), fp32-tensor, fp32-tensor-fp16, tf32, fp16 or bf16 on a GPU"
    parser.add_argument("--precision", default="fp32", metavar="P", help=f"{on_gpu}; fp32, or bf16 on a CPU with AVX512-BF16")
    parser.add_argument("--trials", type=whole(0), default=0, metavar="N", help="candidates of each region to measure first (default 0)")
    parser.add_argument("--records", metavar="FILE", help="measurements that decide before the models do (default: the user's)")
    add_numerics(parser)
    parser.add_argument("--strict", action="store_true", help="refuse a model of which a part would run through PyTorch")


def check_options(options: argparse.Namespace) -> None:
    """Rejects at once options that `compile` would reject after minutes of building a model."""
    from tilewright.hardware import machine
    from tilewright.partition.precision import check_precision

    check_precision(options.precision, machine(options.target))


def is_artifact(text: str) -> bool:
    """Whether a command's subject is an artifact rather than a model."""
    path = Path(text)
    return path.suffix == ".zip" or (path.is_dir() and path.suffix not in (".onnx", ".pt2"))


def check_subjects(options: argparse.Namespace, subjects: Sequence[str], used: Sequence[str] = ()) -> None:
    """Rejects options of building if all subjects are artifacts, which are built already; those in `used` have a meaning for an artifact too."""
    if not all(map(is_artifact, subjects)):
        return
    parser = argparse.ArgumentParser(add_help=False)
    add_building_options(parser)
    defaults = vars(parser.parse_args([]))
    given = [f"--{name.replace('_', '-')}" for name, default in defaults.items() if name not in used and getattr(options, name) != default]
    if given:
        what = "is an artifact, which is compiled already" if len(subjects) == 1 else "are artifacts, which are compiled already"
        cause = f"{' and '.join(subjects)} {what}: nothing here would use {', '.join(given)}"
        raise UnsupportedOption(cause, f"leave {'it' if len(given) == 1 else 'them'} out, or name the model, to compile it with such options")


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


def in_words(show: Progress) -> Progress:
    """A function that shows stages of a compilation in words."""
    return lambda stage, done, total: show(STAGES.get(stage, stage), done, total)


def compiled_model(options: argparse.Namespace) -> tuple[Model, Executable]:
    """The model that the options name, and the same compiled, with progress on the standard error stream."""
    with quiet(options.debug), progress_bar("loading PyTorch") as show:
        check_options(options)
        from tilewright.models import resolve

        show("making the model", 0, 0)
        model = resolve(options.model, options.batch, options.input)
        return model, compiled(model, options, show)


def compiled(model: Model, options: argparse.Namespace, show: Progress) -> Executable:
    """The model compiled; `show` receives what is done in words."""
    from tilewright.compile import compile

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
        progress=in_words(show),
    )


def image_of(options: argparse.Namespace) -> Image:
    """The image of an artifact, or of a model that is compiled first."""
    if is_artifact(options.model):
        with reading_artifact(options.model):
            from tilewright.runtime.artifact import read

            return read(options.model)
    return compiled_model(options)[1].image


def runnable(options: argparse.Namespace, seed: int = 1) -> tuple[Executable, tuple[Any, ...], dict[str, Any]]:
    """An artifact loaded, or a model compiled, with arguments for a call, which `seed` draws.

    Raises:
        TargetNotPresent: if it cannot run on this machine.
    """
    if is_artifact(options.model):
        with reading_artifact(options.model):
            from tilewright.runtime.artifact import load

            executable, model = load(options.model), None
        if options.threads:
            executable.threads = options.threads
    else:
        from tilewright.hardware import is_present, machine

        if not is_present(machine(options.target)):
            raise TargetNotPresent(f"{options.target} is not here", "compile for it, and run the artifact on that machine")
        model, executable = compiled_model(options)
    arguments, keywords = _drawn_inputs(executable, seed)
    if model is not None and model.inputs is not None:
        arguments = inputs_on_target(model, options, seed)
    return executable, arguments, keywords


def _drawn_inputs(executable: Executable, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random inputs that fit the signature; integers are 0 or 1."""
    import torch

    from tilewright.models import random_tensor
    from tilewright.runtime.packing import torch_dtype
    from tilewright.runtime.signature import unflatten

    generator = torch.Generator().manual_seed(seed)
    device = "cuda" if executable.image.machine.is_gpu else "cpu"
    leaves = [
        random_tensor(leaf.shape, torch_dtype(leaf.dtype), generator).to(device) if leaf.name else leaf.example()
        for leaf in executable.signature.inputs
    ]
    arguments, keywords = unflatten(executable.signature.input_tree, iter(leaves))
    return tuple(arguments), dict(keywords)
