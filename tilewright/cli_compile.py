"""``tilewright compile`` and ``tilewright explain``: a model compiled and saved, or explained region by region."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from tilewright.cli_model import MODEL_HELP, check_options, compiled, image_of, resolved
from tilewright.files import check_output, check_place, written

if TYPE_CHECKING:
    from rich.console import Console

DESCRIPTION = "compile a model, print its plan, and save it"
EXPLAIN_DESCRIPTION = "explain region by region what a compiled model does, and why"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `compile`, besides those of building."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("-o", "--output", metavar="PATH", help="write an artifact: a directory, or one file that ends in .zip")


def add_explain_options(parser: argparse.ArgumentParser) -> None:
    """The options of `explain`, besides those of building."""
    parser.add_argument("model", metavar="PATH|MODEL", help=f"an artifact, or {MODEL_HELP}")
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
    from tilewright.report.explanation import explanation

    if options.html is not None:
        check_output(options.html, options.model)
    text = explanation(image_of(options), options.model)
    console.print(text, soft_wrap=True)
    if options.html is not None:
        import html

        page = f"<!doctype html>\n<meta charset=utf-8>\n<title>{html.escape(options.model)}</title>\n<pre>{html.escape(text)}</pre>\n"
        with written(options.html) as file:
            file.write(page.encode(errors="replace"))
    return 0
