"""``tilewright tune``: measures the models' favourite schedules of a network or a list of layers, and copies records between files."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.cli_model import in_words
from tilewright.cli_options import add_numerics, is_count, numerics_arguments, numerics_of, path, whole
from tilewright.cli_output import progress_bar
from tilewright.errors import CacheError, InvalidInput, UnsupportedOption
from tilewright.files import check_output, content_of, json_of, reading
from tilewright.stages import Progress, Stages
from tilewright.system.scratch import Scratch
from tilewright.text import aligned, number_of, seconds_text

if TYPE_CHECKING:
    from rich.console import Console

    from tilewright.hardware.machine import Machine
    from tilewright.ir.problem import Problem
    from tilewright.kernels.schema import Numerics
    from tilewright.tuning.records import Records

DESCRIPTION = "measure the models' favourite schedules on the target, and record the times for later compilations"
REQUIRED = ("name", "outputs", "channels", "height", "width", "filter")
OPTIONAL = ("stride", "batch", "dilation", "groups")
PARTS_A_WORKER = 3
"""Parts of a model per worker: a worker that is lost loses only one part, and fast workers take more."""
FAILED_CODE = 1
LARGEST = 1 << 20
"""Largest extent in a list of layers: typing errors are found before memory is allocated."""
MOST_ELEMENTS = 1 << 36
"""Limit on the elements of a layer's input, output or filters: larger than any machine's memory."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("model", nargs="?", metavar="MODEL|LAYERS.json", help="a model as for `compile`, or a list of convolutions (docs/usage.md)")
    parser.add_argument("--target", metavar="T", help="cuda (the GPU here), its name, or native (this CPU); default: the GPU, or the CPU without one")
    parser.add_argument("--trials", type=whole(), default=10, metavar="N", help="candidates measured of each region (default %(default)s)")
    parser.add_argument("--again", action="store_true", help="measure what is recorded too; the new times count, and not the earlier ones")
    parser.add_argument("--records", type=path, metavar="FILE", help="the file of records (default: the user's, in the cache folder)")
    parser.add_argument("--devices", default="0", metavar="LIST", help="indices of the GPUs to measure on, such as 0,1,2,3")
    parser.add_argument("--scheduler", metavar="ADDRESS", help="measure on the workers of a Dask scheduler, such as tcp://host:8786, one a GPU")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="measure only every Nth region, from the Ith on (default: all)")
    add_numerics(parser)
    parser.add_argument("--batch", type=whole(), metavar="N", help="first extent of the model's example inputs")
    parser.add_argument("--input", action="append", default=[], metavar="SHAPE", help="an example input, as 1x3x224x224; repeat")
    parser.add_argument("--import", dest="imported", type=path, metavar="FILE", help="add the records of a file of JSON lines (.gz too) first")
    parser.add_argument("--export", type=path, metavar="FILE", help="write all records as JSON lines (compressed where FILE ends in .gz) at the end")


def run(options: argparse.Namespace, console: Console) -> int:
    """Imports, tunes and exports as requested; the exit code is 1 if workers could not measure a part.

    Raises:
        UnsupportedOption, InvalidInput: for invalid options or an invalid list of layers.
        TargetNotPresent: if candidates have to be measured and the GPU is not present.
        CacheError: for records that cannot be read or written.
    """
    if options.model is None and options.imported is None and options.export is None:
        raise UnsupportedOption("nothing to tune", "name a model or a list of layers, or use --import or --export")
    with progress_bar("loading PyTorch"):
        from tilewright.tuning.records import Records
    if options.export is not None:
        check_output(options.export, options.imported, options.records, options.model)
    code = 0
    with Records(options.records) as records:
        if options.imported is not None:
            count = records.import_lines(options.imported)
            console.print(f"{count} new measurements from {options.imported}, {len(records)} in {records.path}", soft_wrap=True)
        if options.model is not None:
            code = _tune(options, records, console)
        if options.export is not None:
            console.print(f"{records.export_lines(options.export)} measurements written to {options.export}", soft_wrap=True)
    return code


def _tune(options: argparse.Namespace, records: Records, console: Console) -> int:
    from tilewright.hardware import host_gpu, planned_threads
    from tilewright.hardware import machine as find_machine
    from tilewright.tuning.trials import Outcome, Trials
    from tilewright.tuning.tuning import tune

    devices = read_devices(options.devices)
    unnamed = options.target in (None, "cuda")
    if options.scheduler is not None and (unnamed or options.part != "1/1"):
        what = "there may be another GPU on each worker" if unnamed else "--part is for one machine, and --scheduler names others"
        raise UnsupportedOption(what, "name the GPU as --target" if unnamed else "leave it out")
    machine = find_machine(options.target or ("native" if host_gpu() is None else "cuda"))
    if options.scheduler is not None and not machine.is_gpu:  # CPU workers would each have different cores and threads
        raise UnsupportedOption(f"workers of a scheduler measure on GPUs, and {machine.name} is a CPU", "tune on that machine itself")
    threads = planned_threads(machine)
    first, parts = read_part(options.part)
    with progress_bar("making the model") as show:
        problems = dict(list(_problems(options, machine, in_words(show)).items())[first - 1 :: parts])
    if options.scheduler is not None:
        failures = _measured_by_workers(options, len(problems), records, console)
        _print(_table(problems, machine, records, numerics_of(options), threads, console.width), console)
        for failure in failures:
            console.print(f"not measured: {failure}", soft_wrap=True)
        return FAILED_CODE if failures else 0
    with progress_bar("starting processes") as show:

        def report(done: int, total: int, outcome: Outcome | None) -> None:
            show("measuring candidates", done, total)
            if outcome is not None and outcome.status != "measured":
                console.print(f"{outcome.status}: {outcome.schedule}: {outcome.reason}", soft_wrap=True)

        wanted, numerics = list(problems.values()), numerics_of(options)
        start, compiled = partial(Trials, machine, devices, threads=threads), partial(show, "compiling candidates")
        tuned = tune(
            wanted, machine, options.trials, records,
            threads=threads, numerics=numerics, again=options.again, report=report, compiled=compiled, start=start,
        )  # fmt: skip
    _print(_table(problems, machine, records, numerics, threads, console.width), console)
    console.print(
        f"{number_of(tuned.problems, 'region')}: {number_of(tuned.measured, 'candidate')} measured, {tuned.failed} failed, {tuned.known} known "
        f"before, {tuned.bounded_out} that cannot beat what is known; {tuned.repeated} measured again in turns; records in {records.path}",
        soft_wrap=True,
    )
    return 0


def _print(lines: Iterable[str], console: Console) -> None:
    for line in lines:
        console.print(line, soft_wrap=True)


def _measured_by_workers(options: argparse.Namespace, regions: int, records: Records, console: Console) -> list[str]:
    """Gives each worker parts of the regions to measure, with their existing records, and adds the results to the records. Returns the problems.

    Raises:
        UnsupportedOption: as `tuning.batch.connected`.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tilewright.tuning.batch import connected, content_of, is_file, run_all

    known, measured = "known.jsonl.gz", "measured.jsonl.gz"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Scratch() as folder,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
        connected(options.scheduler, 0) as client,
    ):
        records.export_lines(folder / known)
        files, model = {known: (folder / known).read_bytes()}, options.model
        if is_file(model) or model.endswith(".json"):
            files[Path(model).name], model = content_of(model), f"{{folder}}/{Path(model).name}"
        arguments = ["tune", model, "--target", options.target, "--trials", str(options.trials), "--devices", options.devices]
        arguments += ["--import", f"{{folder}}/{known}", "--export", f"{{folder}}/{measured}", "--records", "{folder}/records.sqlite"]
        arguments += [*numerics_arguments(options), *(["--again"] if options.again else [])]
        arguments += ["--batch", str(options.batch)] if options.batch is not None else []
        arguments += [text for shape in options.input for text in ("--input", shape)]
        parts = min(regions, PARTS_A_WORKER * len(client.scheduler_info()["workers"]))
        task = progress.add_task("measuring parts", total=parts)
        failures, new = [], 0
        for number, answer in run_all(client, [([*arguments, "--part", f"{part}/{parts}"], files, measured) for part in range(1, parts + 1)]):
            progress.advance(task)
            if answer["content"] is None:
                failures.append(f"part {number + 1} of {parts}: {answer['error']}")
                continue
            (folder / measured).write_bytes(answer["content"])
            try:
                new += records.import_lines(folder / measured)
            except CacheError as error:  # data from a worker is trusted no more than a file
                failures.append(f"part {number + 1} of {parts}: {error}")
    console.print(f"{regions} regions in {parts} parts: {new} new measurements, {len(records)} in {records.path}", soft_wrap=True)
    return failures


def _problems(options: argparse.Namespace, machine: Machine, report: Progress) -> dict[str, Problem]:
    """The problems to tune, by name."""
    if str(options.model).endswith(".json"):
        return read_layers(Path(options.model))
    from tilewright.compile import read
    from tilewright.graph.passes import simplify
    from tilewright.hardware import planned_threads
    from tilewright.models import resolve
    from tilewright.tuning.tuning import distinct_problems

    model = resolve(options.model, options.batch, options.input)
    stages = Stages(report)
    stages.report("export")
    imported = read(model.module, model.inputs(0) if model.inputs is not None else (), on_gpu=machine.is_gpu)
    graph, _ = simplify(imported.graph)
    numerics = numerics_of(options)
    found = distinct_problems(graph, machine, planned_threads(machine), numerics=numerics, stages=stages, updates=imported.updates)
    return {f"{number} {problem.region.kind}": problem for number, problem in enumerate(found, 1)}


def read_layers(path: Path) -> dict[str, Problem]:
    """The convolutions of a list of layers by name, see docs/usage.md. `height` and `width` are those of the output.

    Raises:
        InvalidInput: names the malformed entry.
    """
    from tilewright.tuning.problems import convolution_problem

    with reading(path, InvalidInput, "give a JSON list of layers"):
        entries = json_of(content_of(path))
    if not isinstance(entries, list) or not entries:
        raise InvalidInput(f"{path} holds no list of layers", "give a JSON list of objects")
    problems: dict[str, Problem] = {}
    for number, entry in enumerate(entries, 1):
        try:
            name, sizes = _layer(entry)
            if name in problems:
                raise ValueError(f"a second layer is called {name}")
            problems[name] = convolution_problem(
                sizes["outputs"], sizes["channels"], sizes["height"], sizes["width"], sizes["filter"], sizes.get("stride", 1),
                batch=sizes.get("batch", 1), dilation=sizes.get("dilation", 1), groups=sizes.get("groups", 1),
            )  # fmt: skip
        except ValueError as error:
            remedy = f"a layer has {', '.join(REQUIRED)}, and may have {', '.join(OPTIONAL)}"
            raise InvalidInput(f"{path}, entry {number}: {error}", remedy) from error
    return problems


def _layer(entry: Any) -> tuple[str, dict[str, int]]:
    """Name and sizes of an entry. Raises ValueError if it is malformed."""
    if not isinstance(entry, dict):
        raise ValueError("no object")
    missing, unknown = sorted(set(REQUIRED) - set(entry)), [repr(name)[:40] for name in sorted(set(entry) - {*REQUIRED, *OPTIONAL})]
    if missing or unknown:
        raise ValueError("; ".join(f"{what} {', '.join(names)}" for what, names in (("missing", missing), ("unknown", unknown)) if names))
    name = entry["name"]
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ValueError(f"the name {str(name)[:40]!r}")
    sizes = {key: value for key, value in entry.items() if key != "name"}
    wrong = [f"{key} is {repr(value)[:40]}" for key, value in sizes.items() if type(value) is not int or not 1 <= value <= LARGEST]
    if wrong:
        raise ValueError("; ".join(wrong))
    filters = sizes["outputs"] * sizes["channels"] * sizes["filter"] ** 2
    pixels = sizes.get("batch", 1) * sizes["height"] * sizes["width"]
    if max(filters, pixels * sizes["outputs"], pixels * sizes["channels"] * sizes.get("stride", 1) ** 2) > MOST_ELEMENTS:
        raise ValueError(f"a tensor has more than {MOST_ELEMENTS} elements")
    return name, sizes


def read_part(text: str) -> tuple[int, int]:
    """I and N of "I/N", where I counts from 1.

    Raises:
        UnsupportedOption: for any other text.
    """
    first, slash, parts = text.partition("/")
    if not (slash and is_count(first) and is_count(parts) and 1 <= int(first) <= int(parts)):
        raise UnsupportedOption(f"--part {text} is no part", "use 1/4 for the first of four parts")
    return int(first), int(parts)


def read_devices(text: str) -> Sequence[int]:
    """The indices of a list such as "0,1".

    Raises:
        UnsupportedOption: for any other text.
    """
    parts = text.split(",")
    if not all(is_count(part.strip()) for part in parts):
        raise UnsupportedOption(f"--devices {text} is no list of indices", "use a list such as 0,1")
    return [int(part) for part in parts]


def _table(problems: dict[str, Problem], machine: Machine, records: Records, numerics: Numerics, threads: int, width: int) -> Iterator[str]:
    """The best schedule of each problem beside the models' favourite."""
    from tilewright.tuning.problems import key_of
    from tilewright.tuning.tuning import expectations, recorded_as

    rows: list[tuple[str, ...]] = []
    for name, problem in problems.items():
        measured = [entry for entry in records.standing(key_of(problem), recorded_as(machine, threads)) if entry.status == "measured"]
        favourite, predicted = expectations(problem, machine, threads, measured, numerics)
        standing = [entry for entry in measured if entry.schedule in predicted]
        if not standing:
            rows.append((name, "0", "-", "-", "-", "-", "-"))
            continue
        best = standing[0]
        own = next((entry.seconds for entry in standing if entry.schedule == favourite), None)
        loss = "-" if own is None else f"{100 * (own / best.seconds - 1):.1f} %"
        times = [seconds_text(seconds or 0.0) for seconds in (predicted[best.schedule], best.seconds, own)]
        rows.append((name, str(len(standing)), best.description, *times, loss))
    yield f"measured on {machine.name}"
    headings = ("region", "measured", "best schedule", "predicted", "best", "favourite", "loss")
    yield from aligned(headings, rows, ("region", "best schedule"), width, {"region": 0.3, "best schedule": 0.7})
