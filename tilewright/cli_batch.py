"""``tilewright batch``: compiles models for targets in parallel, on this machine or on the workers of a Dask scheduler."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewright.cli_options import add_numerics, numerics_arguments, path, whole
from tilewright.cli_output import progress_bar
from tilewright.errors import UnsupportedOption

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tilewright.tuning.batch import Compiled

DESCRIPTION = "compile several models for several targets, into one artifact each"
HERE = ("native", "cuda")
"""Targets that mean a different machine on each worker."""
FAILED_CODE = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("models", nargs="+", metavar="MODEL", help="models as for `compile`; files are sent to the workers")
    parser.add_argument("--targets", required=True, metavar="LIST", help="names of `tilewright targets`, such as neoverse-n1,x86-avx512,h200")
    parser.add_argument("-o", "--output", required=True, type=path, metavar="FOLDER", help="where the artifacts MODEL-TARGET.zip are written")
    parser.add_argument("--scheduler", metavar="ADDRESS", help="of a Dask scheduler, such as tcp://host:8786 (default: processes on this machine)")
    parser.add_argument("--workers", type=whole(), metavar="N", help="processes on this machine (default: one a core)")
    parser.add_argument("--limit", type=whole(), metavar="SECONDS", help="of compiling one model, which is then ended and has failed (default 3600)")
    parser.add_argument("--batch", type=whole(), metavar="N", help="first extent of the example inputs (default 1)")
    parser.add_argument("--threads", type=whole(), metavar="N", help="threads of CPU code (default: as `compile` here)")
    parser.add_argument("--precision", metavar="P", help="as for `compile`")
    add_numerics(parser)
    parser.add_argument("--strict", action="store_true", help="refuse a model of which a part would run through PyTorch")


def run(options: argparse.Namespace, console: Console) -> int:
    """Compiles everything; failures are listed and make the exit code 1.

    Raises:
        UnknownTarget, UnsupportedOption, InvalidArtifact: before anything is compiled.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from tilewright import settings

    with progress_bar("loading PyTorch"):
        from tilewright.hardware import machine, planned_threads
        from tilewright.partition.precision import check_precision
        from tilewright.runtime.artifact import check_path
        from tilewright.tuning.batch import LIMIT_SECONDS, Job, check_jobs, compile_all, connected
    check_precision(options.precision or "fp32")
    targets = read_targets(options.targets, options.scheduler is not None)
    if options.workers is not None and options.scheduler:
        raise UnsupportedOption("--workers counts processes on this machine, and --scheduler names others", "leave it out")
    arguments: list[str] = []
    for name in ("batch", "precision"):
        if getattr(options, name) is not None:
            arguments += [f"--{name}", str(getattr(options, name))]
    arguments += numerics_arguments(options)
    arguments += ["--strict"] if options.strict else []
    # workers may have other cores: the same artifact wherever it is made
    threads = {target: planned_threads(machine(target), options.threads) for target in targets}
    jobs = [Job(model, target, ("--threads", str(threads[target]), *arguments)) for model in dict.fromkeys(options.models) for target in targets]
    check_jobs(jobs)
    for job in jobs:
        check_path(options.output / job.file_name)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    workers = min(options.workers or settings.available_cores(), len(jobs))
    with (
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
        connected(options.scheduler, workers) as client,
    ):
        task = progress.add_task("compiling", total=len(jobs))

        def report(compiled: Compiled) -> None:
            progress.advance(task)
            for note in compiled.notes:
                progress.console.print(f"{compiled.job.model} for {compiled.job.target}: {note}", soft_wrap=True)

        results = compile_all(client, jobs, options.output, report, options.limit or LIMIT_SECONDS)
    console.print(_table(results))
    failed = sum(compiled.path is None for compiled in results)
    console.print(f"{len(results) - failed} of {len(results)} artifacts written to {options.output}", soft_wrap=True)
    return FAILED_CODE if failed else 0


def read_targets(text: str, elsewhere: bool) -> Sequence[str]:
    """The names of a list such as "h200,neoverse-n1", each once.

    Raises:
        UnknownTarget: for an unknown name.
        UnsupportedOption: for "native" and "cuda" if the workers are `elsewhere`.
    """
    from tilewright.hardware import machine

    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if elsewhere and name in HERE:
            raise UnsupportedOption(f"{name!r} is another machine on each worker", "give a name of `tilewright targets`")
        machine(name)
    return names


def _table(results: Sequence[Compiled]) -> Table:
    from rich.table import Table

    table = Table("model", "target", "artifact, or what is wrong")
    table.add_column("seconds", justify="right")
    for compiled in results:
        what = compiled.path.name if compiled.path is not None else compiled.error
        cells = (compiled.job.model, compiled.job.target, what, f"{compiled.seconds:.1f}")
        table.add_row(*cells, style=None if compiled.path else "red")
    return table
