"""``tilewright compile`` and ``tilewright explain``: a model compiled and saved, or explained region by region."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from tilewright.cli_model import MODEL_HELP, check_options, compiled, image_of, resolved
from tilewright.cli_output import progress_bar, quiet
from tilewright.errors import UnsupportedOption
from tilewright.files import check_output, check_place, written

if TYPE_CHECKING:
    from rich.console import Console

    from tilewright.runtime.executable import Image

DESCRIPTION = "compile a model, print its plan, and save it"
EXPLAIN_DESCRIPTION = "explain region by region what a compiled model does, and why"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `compile`, besides those of building."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("-o", "--output", metavar="PATH", help="write an artifact: a directory, or one file that ends in .zip")


def add_explain_options(parser: argparse.ArgumentParser) -> None:
    """The options of `explain`, besides those of building."""
    parser.add_argument("model", metavar="PATH|MODEL", help=f"an artifact, or {MODEL_HELP}")
    parser.add_argument(
        "--code",
        nargs="?",
        const=True,
        metavar="REGION",
        help="what can be read of the compiled code without running it: a table of all kernels, or one region (its number, its name, or a kernel's)",
    )
    parser.add_argument("--fusion", action="store_true", help="the search for regions that run together, step by step, with the predicted times")
    parser.add_argument("--html", metavar="FILE", help="write the explanation as a web page too")


def run(options: argparse.Namespace, console: Console) -> int:
    """Compiles the model, prints its plan, and saves it if requested."""
    from tilewright.report.tables import plan_table

    check_options(options)
    if options.output is not None:
        from tilewright.runtime.artifact import check_path

        check_path(options.output)
        check_place(options.output)
    start = time.perf_counter()
    executable = compiled(resolved(options), options)
    image = executable.image
    console.print(plan_table(image, f"{options.model} for {image.machine.name} ({image.machine.architecture})"))
    console.print(f"compiled in {time.perf_counter() - start:.1f} s: {len(image.program.kernels)} kernels")
    if options.output is not None:
        digest = executable.save(options.output)
        console.print(f"written to {options.output}, digest {digest}", soft_wrap=True)
    return 0


def run_explain(options: argparse.Namespace, console: Console) -> int:
    """Prints the explanation of an artifact, or of a model that is compiled first."""
    from tilewright.report.explanation import explanation, search_lines

    if options.fusion and options.code is not None:
        raise UnsupportedOption("--fusion and --code are two explanations", "give one of them")
    if options.html is not None:
        check_output(options.html, options.model)
    image = image_of(options)
    if options.fusion:
        text = "\n".join(search_lines(image, options.model))
    else:
        text = explanation(image, options.model) if options.code is None else _code(image, options)
    console.print(text, soft_wrap=True)
    if options.html is not None:
        import html

        page = f"<!doctype html>\n<meta charset=utf-8>\n<title>{html.escape(options.model)}</title>\n<pre>{html.escape(text)}</pre>\n"
        with written(options.html) as file:
            file.write(page.encode(errors="replace"))
    return 0


def _code(image: Image, options: argparse.Namespace) -> str:
    """What was read of the code of all kernels, or of one region."""
    from tilewright.hardware import planned_threads
    from tilewright.report.code import code_lines, code_table

    threads = planned_threads(image.machine, options.threads)
    with quiet(options.debug), progress_bar("reading code") as show:

        def report(done: int, total: int) -> None:
            show("reading code", done, total)

        everything = options.code is True
        lines = code_table(image, threads, options.model, report) if everything else code_lines(image, threads, options.code, report)
        return "\n".join(lines)
