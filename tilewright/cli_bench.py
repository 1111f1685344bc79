"""``tilewright bench``: times a model against other ways of running it, interleaved."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from tilewright.cli_model import MODEL_HELP, check_options, compiled, inputs_on_target, is_artifact, runs_on_gpu
from tilewright.cli_options import WRONG_CODE, amount, whole
from tilewright.cli_output import progress_bar, quiet
from tilewright.errors import InvalidModel, UnsupportedOption

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from tilewright.runtime.executable import Executable
    from tilewright.stages import Progress
    from tilewright.tuning.measure import Outcome
    from tilewright.tuning.onnx_module import OnnxModule

DESCRIPTION = "time a model against other ways of running it, in turns"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options, besides those of building."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--against", metavar="NAMES", help="of eager, eager_cl, inductor, onnxruntime, openvino (default eager,eager_cl; of an ONNX file onnxruntime)"
    )
    parser.add_argument("--rounds", type=whole(), default=10, help="turns of each contender (default 10)")
    parser.add_argument("--seconds", type=amount, default=0.3, help="least time of one turn (default 0.3)")
    parser.add_argument("--tolerance", type=amount, help="largest error relative to the largest output (default 1e-3, of bf16 5e-2)")


def run(options: argparse.Namespace, console: Console) -> int:
    """Prints the times; the exit code is WRONG_CODE if ours could not be measured or was wrong."""
    with quiet(options.debug), progress_bar("loading PyTorch") as show:
        title, outcomes = _compared(options, show)
    from tilewright.report.tables import outcome_lines

    for line in outcome_lines(outcomes, title, console.width):
        console.print(line, soft_wrap=True)
    return 0 if outcomes[0].status == "measured" else WRONG_CODE


def _compared(options: argparse.Namespace, show: Progress) -> tuple[str, list[Outcome]]:
    """What was compared, and the contenders' times, ours first."""
    import torch

    check_options(options)
    from tilewright.models import Model, resolve
    from tilewright.runtime.verify import AS_TF32, TOLERANCES
    from tilewright.tuning.measure import Contender, compare, seconds_of_call, seconds_of_device_call
    from tilewright.tuning.peers import PEERS, on_device

    is_onnx = options.model.endswith(".onnx")
    against = options.against if options.against is not None else "onnxruntime" if is_onnx else "eager,eager_cl"
    names = list(dict.fromkeys(name for name in against.split(",") if name))
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise UnsupportedOption(f"--against {', '.join(unknown)} is not known", f"choose from {', '.join(PEERS)}")
    if is_artifact(options.model):
        raise InvalidModel(f"{options.model} holds no PyTorch module to time PyTorch with", "give the module that it was made from")
    show("making the model", 0, 0)
    model = resolve(options.model, options.batch, options.input)
    module = _without_guards(model.module) if isinstance(model.module, torch.export.ExportedProgram) else model.module
    if is_onnx:
        from tilewright.tuning.onnx_module import OnnxModule

        module = OnnxModule(model.module, None if model.inputs is None else model.inputs(0))
        model = Model(model.name, model.module, model.inputs or partial(_drawn, module))
    if options.threads:
        torch.set_num_threads(options.threads)
    on_gpu = runs_on_gpu(options.target)
    if on_gpu:
        module = module.to("cuda")

    def ours(copied: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Executable:
        return compiled(Model(options.model, model.module if is_onnx else copied, lambda seed: inputs), options, show)

    contenders = [Contender("tilewright", ours), *(on_device(PEERS[name], "cuda" if on_gpu else "cpu") for name in names)]
    examples, fresh = (inputs_on_target(model, options, seed) for seed in (0, 1))
    usual = {"bf16": TOLERANCES["bf16"], "fp16": TOLERANCES["f16"], "tf32": TOLERANCES[AS_TF32]}.get(options.precision, 1e-3)
    tolerance = options.tolerance if options.tolerance is not None else usual
    outcomes = compare(
        options.model, module, examples, fresh, contenders, tolerance, options.rounds, options.seconds,
        seconds_of_device_call if on_gpu else seconds_of_call, show,
    )  # fmt: skip
    where = "GPU" if on_gpu else f"{torch.get_num_threads()} threads"
    return f"{options.model}, batch {options.batch or 1}, {where}", outcomes


def _drawn(module: OnnxModule, seed: int) -> tuple[torch.Tensor, ...]:
    import torch

    from tilewright.models import random_tensor

    return module.inputs(partial(random_tensor, generator=torch.Generator().manual_seed(seed)))


def _without_guards(program: Any) -> Any:
    """The program as a module without Python checks of its inputs' sizes at each call, which a plain module does not have either."""
    import inspect

    optional = "check_guards" in inspect.signature(program.module).parameters
    return program.module(check_guards=False) if optional else program.module()
