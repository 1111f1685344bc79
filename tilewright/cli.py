"""The command line: ``tilewright compile | batch | bench | explain | verify | digest | tune | train | targets | cache``.

PyTorch and the compiler are imported by the commands that need them, so that help, targets and cache answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright import cli_artifact, cli_batch, cli_train, cli_tune
from tilewright.cli_options import ERROR_CODE, Parser, amount, error_line, seed, whole
from tilewright.errors import InvalidModel, TilewrightError, UnsupportedOption
from tilewright.files import check_output, check_place, first_line, written
from tilewright.system.interruption import WORDS

if TYPE_CHECKING:
    from rich.console import Console

    from tilewright.models import Model
    from tilewright.runtime.executable import Executable, Image

WRONG_CODE = 1
"""`verify` found a wrong region, or `cache check` a problem."""
INTERRUPTED_CODE = 130
STAGES = {"read": "reading the model", "plan": "planning", "measure": "measuring candidates", "build": "compiling kernels"}

MODEL_HELP = "FILE.onnx, FILE.pt2, zoo:NAME, torchvision:NAME, timm:NAME, or package.module:callable that returns (module, inputs)"
EXAMPLES = """examples:
  tilewright compile zoo:resnet18 -o resnet18.zip      compile for this CPU and save
  tilewright compile model.onnx --target h200          compile for a GPU that need not be here
  tilewright explain zoo:mobilenet_v2                  what runs as which kernel, how long it should take, and why
  tilewright verify resnet18.zip                       every region against float64
  tilewright bench zoo:resnet18 --against eager,onnxruntime
  tilewright tune zoo:resnet18 --trials 10             measure on the GPU here; later compilations take the best
  tilewright targets h200 --sources                    facts about a target, and where they are from
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. Errors are one line on the standard error stream, unless --debug is given."""
    options = argparse.Namespace(debug=False)
    try:
        _parser().parse_args(argv, options)
        code: int = options.command(options)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse has printed help or what is wrong
        return stop.code if isinstance(stop.code, int) else ERROR_CODE
    except KeyboardInterrupt:
        print(WORDS, file=sys.stderr)
        return INTERRUPTED_CODE
    except BrokenPipeError:  # the reader of a pipe has seen enough
        _silence_output()
        return 0
    except Exception as error:
        if options.debug:
            raise
        print(error_line(_message(error, getattr(options, "model", None))), file=sys.stderr)
        if isinstance(error, OSError):
            _silence_output()
        return ERROR_CODE


def _silence_output() -> None:
    """What is still to be written to a standard output that fails is dropped, instead of failing again when the process ends."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        return
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _message(error: Exception, subject: object) -> str:
    """Cause and remedy of any error; one that nobody foresaw names what the command was about."""
    if isinstance(error, TilewrightError):
        return str(error)
    about = f" with {subject}" if subject else ""
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return f"the memory does not suffice{about}; use a smaller batch or fewer processes"
    if isinstance(error, OSError):
        return f"{error.filename or 'the system'}: {error.strerror or error}; check the path and the free space"
    return f"unexpected {type(error).__name__}{about}: {first_line(error)}; this is a fault in tilewright, --debug shows where"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tilewright",
        description="A deep-learning compiler that plans instead of searching.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    common = Parser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show tracebacks, warnings and log messages")
    building = Parser(add_help=False, parents=[common])
    building.add_argument("--target", metavar="T", help="native (this CPU, the default), cuda (the GPU here), or a name of `tilewright targets`")
    building.add_argument("--batch", type=whole(), metavar="N", help="first extent of the example inputs (default 1)")
    building.add_argument("--input", action="append", default=[], metavar="SHAPE", help="an example input, as 1x3x224x224 or 1x128:int64; repeat")
    building.add_argument("--threads", type=whole(), metavar="N", help="threads of CPU code")
    building.add_argument("--precision", default="fp32", metavar="P", help="fp32 (default), or bf16 on a CPU with AMX")
    building.add_argument("--trials", type=whole(0), default=0, metavar="N", help="candidates of each region to measure first, on a GPU (default 0)")
    building.add_argument("--records", metavar="FILE", help="measurements that decide before the models do (default: the user's)")
    building.add_argument("--nondeterministic", action="store_true", help="a GPU may add the parts of a sum in any order, where that is faster")
    building.add_argument("--vendor", action="store_true", help="consider library kernels too (not offered yet)")
    building.add_argument("--strict", action="store_true", help="refuse a model of which a part would run through PyTorch")

    def command(name: str, function: Any, text: str, parent: Parser = building) -> Parser:
        added = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", parents=[parent])
        added.set_defaults(command=function)
        return added

    compile_ = command("compile", _compile, "compile a model, print its plan, and save it")
    compile_.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    compile_.add_argument("-o", "--output", metavar="PATH", help="write an artifact: a directory, or one file that ends in .zip")
    bench = command("bench", _bench, "time a model against other ways of running it, in turns")
    bench.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    bench.add_argument("--against", default="eager,eager_cl", metavar="NAMES", help="of eager, eager_cl, inductor, onnxruntime, openvino")
    bench.add_argument("--rounds", type=whole(), default=10, help="turns of each contender (default 10)")
    bench.add_argument("--seconds", type=amount, default=0.3, help="least time of one turn (default 0.3)")
    bench.add_argument("--tolerance", type=amount, help="largest error relative to the largest output (default 1e-3, of bf16 5e-2)")
    explain = command("explain", _explain, "explain region by region what a compiled model does, and why")
    explain.add_argument("model", metavar="PATH|MODEL", help=f"an artifact, or {MODEL_HELP}")
    explain.add_argument("--html", metavar="FILE", help="write the explanation as a web page too")
    verify = command("verify", _verify, "check each region's output against PyTorch in float64, worst first")
    verify.add_argument("model", metavar="PATH|MODEL", help=f"an artifact, or {MODEL_HELP}")
    verify.add_argument("--all", action="store_true", help="list every value, not the 20 worst")
    verify.add_argument("--seed", type=seed, default=1, help="of the random inputs (default 1)")
    verify.add_argument("--tolerance", type=amount, help="replaces the tolerance that each dtype implies")
    verify.add_argument("--no-run", action="store_true", help="look at an artifact, for any machine, and run nothing of it")
    cli_artifact.add_options(command("digest", cli_artifact.run_digest, cli_artifact.DESCRIPTION, common))
    cli_batch.add_options(command("batch", _batch, cli_batch.DESCRIPTION, common))
    cli_tune.add_options(command("tune", _tune, cli_tune.DESCRIPTION, common))
    cli_train.add_options(command("train", _train, cli_train.DESCRIPTION, common))
    targets = command("targets", _targets, "list the targets that code can be generated for", common)
    targets.add_argument("names", nargs="*", metavar="NAME", help="show every fact about these targets")
    targets.add_argument("--sources", action="store_true", help="show where each fact is from")
    cache = command("cache", _cache, "show, check or prune the cache of compiled kernels", common)
    cache.add_argument("action", choices=("show", "check", "prune"), nargs="?", default="show")
    cache.add_argument("--older-than", type=amount, metavar="DAYS", help="prune: entries older than this")
    cache.add_argument("--limit", type=amount, metavar="MB", help="prune: the oldest entries beyond this size")
    cache.add_argument("--all", action="store_true", help="prune: every entry")
    return parser


class _Version(argparse.Action):
    """Reads the version only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import tilewright

        print(f"tilewright {tilewright.__version__}")
        parser.exit()


def _console(error: bool = False) -> Console:
    """A console that does not fold tables where its output goes into a file or pipe, and takes no text for markup: names come from files."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    console = Output(stderr=error, highlight=False, markup=False)
    return console if console.is_terminal else Output(stderr=error, highlight=False, markup=False, width=160)


def _check_options(options: argparse.Namespace) -> None:
    """Refuses at once what `compile` would refuse after minutes of building a model."""
    if options.vendor:
        raise UnsupportedOption("--vendor: library kernels are not offered yet", "leave it out")
    from tilewright.hardware import machine
    from tilewright.partition.storage import check_precision

    check_precision(options.precision, machine(options.target))


# Compiling


@contextmanager
def _quiet(debug: bool) -> Iterator[None]:
    """Without the warnings of PyTorch's exporter; our own are shown, in one line each."""
    import logging

    if debug:
        logging.basicConfig(level=logging.INFO)
        yield
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        finally:
            ours = [str(w.message) for w in caught if "tilewright" in str(w.filename) or "hrough PyTorch" in str(w.message)]
            for message in dict.fromkeys(ours):
                print(f"tilewright: warning: {message}", file=sys.stderr)


def _resolve(options: argparse.Namespace) -> Model:
    from tilewright.models import resolve

    return resolve(options.model, options.batch, options.input)


def _is_artifact(text: str) -> bool:
    path = Path(text)
    return path.suffix == ".zip" or (path.is_dir() and path.suffix not in (".onnx", ".pt2"))


def _inputs_on_target(model: Model, options: argparse.Namespace, seed: int = 0) -> tuple[Any, ...]:
    import torch

    inputs = model.inputs(seed) if model.inputs is not None else ()
    device = "cuda" if _runs_on_gpu(options.target) else "cpu"
    return tuple(x.to(device) if isinstance(x, torch.Tensor) else x for x in inputs)


def _runs_on_gpu(target: str | None) -> bool:
    import torch

    from tilewright.hardware import is_present, machine

    found = machine(target)
    return found.is_gpu and is_present(found) and torch.cuda.is_available()


def _compiled(model: Model, options: argparse.Namespace, console: Console) -> Executable:
    """The model compiled, with its progress on the console."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from tilewright.compile import compile

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _quiet(options.debug), Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(STAGES["read"], total=None)

        def report(stage: str, done: int, total: int) -> None:
            progress.update(task, description=STAGES.get(stage, stage), completed=done, total=total)

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
            progress=report,
        )


def _compile(options: argparse.Namespace) -> int:
    from tilewright.report.tables import plan_table

    _check_options(options)
    if options.output is not None:
        from tilewright.runtime.artifact import check_path

        check_path(options.output)
        check_place(options.output)
    console = _console()
    start = time.perf_counter()
    executable = _compiled(_resolve(options), options, _console(error=True))
    image = executable.image
    console.print(plan_table(image, f"{options.model} for {image.machine.name} ({image.machine.architecture})"))
    console.print(f"compiled in {time.perf_counter() - start:.1f} s: {len(image.program.kernels)} kernels")
    if options.output is not None:
        digest = executable.save(options.output)
        console.print(f"written to {options.output}, digest {digest}", soft_wrap=True)
    return 0


def _image(options: argparse.Namespace) -> Image:
    """The image of an artifact, or of a model that is compiled first."""
    if _is_artifact(options.model):
        from tilewright.runtime.artifact import read

        return read(options.model)
    _check_options(options)
    return _compiled(_resolve(options), options, _console(error=True)).image


def _batch(options: argparse.Namespace) -> int:
    with _quiet(options.debug):
        return cli_batch.run(options, _console())


def _tune(options: argparse.Namespace) -> int:
    with _quiet(options.debug):
        return cli_tune.run(options, _console())


def _train(options: argparse.Namespace) -> int:
    with _quiet(options.debug):
        return cli_train.run(options, _console())


def _explain(options: argparse.Namespace) -> int:
    from tilewright.report.explanation import explanation

    if options.html is not None:
        check_output(options.html, options.model)
    text = explanation(_image(options), options.model)
    _console().print(text, soft_wrap=True)
    if options.html is not None:
        import html

        page = f"<!doctype html>\n<meta charset=utf-8>\n<title>{html.escape(options.model)}</title>\n<pre>{html.escape(text)}</pre>\n"
        with written(options.html) as file:
            file.write(page.encode(errors="replace"))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from tilewright.report.tables import verification_table

    console = _console()
    if options.no_run:
        if not _is_artifact(options.model):
            raise UnsupportedOption(f"--no-run looks at artifacts, and {options.model} is none", "leave it out")
        return cli_artifact.inspect(options.model, console)
    if _is_artifact(options.model):
        from tilewright.runtime.artifact import load

        executable, model = load(options.model), None
    else:
        _check_options(options)
        model = _resolve(options)
        executable = _compiled(model, options, _console(error=True))
    arguments, keywords = _drawn_inputs(executable, options.seed)
    if model is not None and model.inputs is not None:
        arguments = _inputs_on_target(model, options, options.seed)
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


def _without_guards(program: Any) -> Any:
    """The program as a module that does not compare its inputs' sizes in Python at each call: a plain module would not either."""
    import inspect

    optional = "check_guards" in inspect.signature(program.module).parameters
    return program.module(check_guards=False) if optional else program.module()


def _bench(options: argparse.Namespace) -> int:
    import torch

    _check_options(options)
    from tilewright.runtime.verify import TOLERANCES
    from tilewright.tuning.measure import Contender, compare, seconds_of_call, seconds_of_device_call
    from tilewright.tuning.peers import PEERS, on_device

    names = list(dict.fromkeys(name for name in options.against.split(",") if name))
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise UnsupportedOption(f"--against {', '.join(unknown)} is not known", f"choose from {', '.join(PEERS)}")
    if _is_artifact(options.model):
        raise InvalidModel(f"{options.model} holds no PyTorch module to time PyTorch with", "give the module that it was made from")
    model = _resolve(options)
    module = _without_guards(model.module) if isinstance(model.module, torch.export.ExportedProgram) else model.module
    if not isinstance(module, torch.nn.Module) or model.inputs is None:
        raise InvalidModel(f"{options.model} holds no PyTorch module to time PyTorch with", "give the module that it was made from")
    console, messages = _console(), _console(error=True)
    if options.threads:
        torch.set_num_threads(options.threads)
    on_gpu = _runs_on_gpu(options.target)
    if on_gpu:
        module = module.to("cuda")

    def ours(copied: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Executable:
        from tilewright.models import Model

        return _compiled(Model(options.model, copied, lambda seed: inputs), options, messages)

    contenders = [Contender("tilewright", ours), *(on_device(PEERS[name], "cuda" if on_gpu else "cpu") for name in names)]
    examples, fresh = (_inputs_on_target(model, options, seed) for seed in (0, 1))
    usual = TOLERANCES["bf16"] if options.precision == "bf16" else 1e-3
    tolerance = options.tolerance if options.tolerance is not None else usual
    with _quiet(options.debug):
        outcomes = compare(
            options.model, module, examples, fresh, contenders, tolerance, options.rounds, options.seconds,
            seconds_of_device_call if on_gpu else seconds_of_call,
        )  # fmt: skip
    from tilewright.report.tables import outcome_table

    where = "GPU" if on_gpu else f"{torch.get_num_threads()} threads"
    console.print(outcome_table(outcomes, f"{options.model}, batch {options.batch or 1}, {where}"))
    return 0 if outcomes[0].status == "measured" else WRONG_CODE


# Facts and cache


def _targets(options: argparse.Namespace) -> int:
    from rich.table import Table

    from tilewright.hardware import catalogue, host_cpu, host_gpu, is_present, machine
    from tilewright.report.units import scaled

    console = _console()
    if options.names:
        for name in options.names:
            _print_facts(machine(name), options.sources, console)
        return 0
    table = Table("name", "architecture", "processors", "clock", "fp32 peak", "memory bandwidth", "here", "description")
    gpu = host_gpu()
    entries = {"native": host_cpu(), **({"cuda": gpu} if gpu is not None else {}), **catalogue()}
    for name, entry in entries.items():
        table.add_row(
            name, entry.architecture, str(entry.processors), scaled(entry.clock_hz, "Hz"), scaled(entry.peak_flops.get("fp32", 0.0), "flop/s"),
            scaled(entry.memory_bandwidth, "B/s"), "yes" if is_present(entry) else "", entry.description,
        )  # fmt: skip
    console.print(table)
    if options.sources:
        for entry in entries.values():
            _print_facts(entry, True, console)
    else:
        console.print("`tilewright targets NAME --sources` shows every fact about a target and where it is from")
    return 0


def _print_facts(machine: Any, sources: bool, console: Console) -> None:
    from dataclasses import fields

    from rich.table import Table

    table = Table("fact", "value", *(("source",) if sources else ()), title=f"{machine.name}: {machine.description}")
    for field in fields(machine):
        value = getattr(machine, field.name)
        if field.name in ("name", "description", "sources") or not value:
            continue
        items = value if field.name == "caches" else [value]
        for item in items:
            text = str(dict(item)) if hasattr(item, "items") else " ".join(map(str, item)) if isinstance(item, tuple) else f"{item}"
            table.add_row(field.name, text, *((machine.sources.get(field.name, ""),) if sources else ()))
    console.print(table)


def _cache(options: argparse.Namespace) -> int:
    from rich.table import Table

    from tilewright.report.units import scaled
    from tilewright.toolchain import default_cache

    console, cache = _console(), default_cache()
    if options.action != "prune" and (options.older_than is not None or options.limit is not None or options.all):
        raise UnsupportedOption(f"--older-than, --limit and --all have no meaning with `cache {options.action}`", "use them with `cache prune`")
    if options.action == "check":
        problems = cache.check()
        for problem in problems:
            console.print(problem, soft_wrap=True)
        console.print(f"{len(problems)} problems in {cache.root}", soft_wrap=True)
        return WRONG_CODE if problems else 0
    if options.action == "prune":
        size = None if options.limit is None else int(options.limit * 1e6)
        removed = cache.prune(options.older_than, size, options.all)
        console.print(f"removed {removed} kernels from {cache.root}", soft_wrap=True)
        return 0
    entries = cache.entries()
    table = Table("target", "kind", "kernels", "size")
    groups = sorted({(entry.target, entry.kind) for entry in entries})
    for target, kind in groups:
        own = [entry for entry in entries if (entry.target, entry.kind) == (target, kind)]
        table.add_row(target, kind, str(len(own)), scaled(sum(entry.bytes for entry in own), "B"))
    if groups:
        console.print(table)
    console.print(f"{len(entries)} kernels, {scaled(sum(entry.bytes for entry in entries), 'B')} in {cache.root}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
