"""``tilewright explain``: a compiled model explained region by region, as text and as a page for browsers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from tilewright.cli_model import MODEL_HELP, check_subjects, image_of, runnable
from tilewright.cli_options import numerics_of
from tilewright.cli_output import progress_bar, quiet
from tilewright.errors import UnsupportedOption
from tilewright.files import check_output, written

if TYPE_CHECKING:
    from rich.console import Console

    from tilewright.report.page.data import Subject

DESCRIPTION = "explain region by region what a compiled model does, and why"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options, besides those of building."""
    parser.add_argument("model", metavar="PATH|MODEL", help=f"an artifact, or {MODEL_HELP}")
    parser.add_argument(
        "--code",
        nargs="?",
        const=True,
        metavar="REGION",
        help="what can be read of the compiled code without running it: a table of all kernels, or one region (its number, its name, or a kernel's)",
    )
    parser.add_argument("--fusion", action="store_true", help="the search for regions that run together, step by step, with the predicted times")
    parser.add_argument("--profile", action="store_true", help="measure each region on this machine, as `tilewright profile` does")
    parser.add_argument("--html", metavar="FILE", help="write a page for browsers: network, times, choices, and the code of all kernels")
    parser.add_argument("--against", metavar="PATH|MODEL", help="compare with this artifact or model, region by region; with --html also on the page")


def run(options: argparse.Namespace, console: Console) -> int:
    """Prints the explanation of an artifact, or of a model that is compiled first, and writes the page if requested."""
    if options.fusion and options.code is not None:
        raise UnsupportedOption("--fusion and --code are two explanations", "give one of them")
    used = ("threads",) if options.profile or options.html is not None or options.code is not None else ()
    check_subjects(options, [subject for subject in (options.model, options.against) if subject is not None], used)
    if options.html is not None:
        check_output(options.html, options.model)
    subject = _subject(options)
    from tilewright.report.explanation import explanation, search_lines

    width = console.width if console.is_terminal else None
    if options.fusion:
        from tilewright.partition.predictions import operators_apart

        image, apart = subject.image, None
        if image.kernels:  # an artifact, which has none, does not know for which precision it was planned
            numerics = numerics_of(options).at(options.precision)
            with progress_bar("ranking operators by themselves"), quiet(options.debug):
                apart = operators_apart(image.program.graph, image.machine, subject.threads, options.precision, numerics)
        text = "\n".join(search_lines(image, options.model, apart, width, subject.unmeasured))
    elif options.code is None:
        text = explanation(subject.image, options.model, subject.plan, width)
    else:
        text = _code(subject, options, width)
    console.print(text, soft_wrap=True)
    subjects = [subject]
    if options.against is not None:
        from tilewright.report.tables import comparison_lines

        subjects.append(_subject(argparse.Namespace(**{**vars(options), "model": options.against})))
        console.print("")
        for line in comparison_lines((subject.name, subject.plan), (subjects[1].name, subjects[1].plan), console.width):
            console.print(line, soft_wrap=True)
    if options.html is not None:
        _write_page(subjects, options)
        console.print(f"page written to {options.html}", soft_wrap=True)
    return 0


def _subject(options: argparse.Namespace) -> Subject:
    """The program that the options name, measured if they say so, with the chains that no trial measured if these are shown."""
    subject = _measured(options)
    image = subject.image
    shown = options.fusion or options.html is not None
    if not shown or not image.machine.is_gpu or not image.kernels:  # an artifact does not know for which precision it was planned
        return subject
    from tilewright.partition.plan import chains_by_prediction

    numerics = numerics_of(options).at(options.precision)
    with progress_bar("predicting chains"), quiet(options.debug):
        unmeasured = chains_by_prediction(image.program.graph, image.machine, image.program.search, options.precision, numerics)
    return replace(subject, unmeasured=unmeasured)


def _measured(options: argparse.Namespace) -> Subject:
    """The program that the options name, measured if they say so."""
    if not options.profile:
        image = image_of(options)  # imports PyTorch, and shows it
        from tilewright.hardware import planned_threads
        from tilewright.report.page.data import Subject

        return Subject(options.model, image, planned_threads(image.machine, options.threads))
    executable, arguments, keywords = runnable(options)
    from tilewright.report.page.data import Subject

    with progress_bar("measuring regions"):
        profile = executable.profile(*arguments, **keywords)
    return Subject(options.model, executable.image, executable.threads, profile)


def _code(subject: Subject, options: argparse.Namespace, width: int | None) -> str:
    """What was read of the code of all kernels, or of one region."""
    from tilewright.report.code import code_lines, code_table

    with _reading_code(options) as report:
        if options.code is not True:
            return "\n".join(code_lines(subject.image, subject.threads, options.code, report, width))
        return "\n".join(code_table(subject.image, subject.threads, options.model, report, width))


def _write_page(subjects: list[Subject], options: argparse.Namespace) -> None:
    from tilewright.report.page.html import page

    with _reading_code(options) as report:
        text = page(subjects, report)
    with written(options.html) as file:
        file.write(text.encode(errors="replace"))


@contextmanager
def _reading_code(options: argparse.Namespace) -> Iterator[Callable[[int, int], None]]:
    """Gives a function that shows how many kernels of how many have been read."""
    with quiet(options.debug), progress_bar("reading code") as show:
        yield lambda done, total: show("reading code", done, total)
