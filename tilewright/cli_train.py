"""``tilewright train``: collects measured schedules of random layers, and trains the learned model from such files."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.cli_options import amount, path, seed, whole
from tilewright.cli_output import progress_bar
from tilewright.errors import InvalidInput
from tilewright.files import check_output, reading

if TYPE_CHECKING:
    from rich.console import Console

    from tilewright.selection.learned.hybrid import Learned

DESCRIPTION = "collect measurements of random layers on a GPU, and train the model that ranks schedules"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("files", nargs="*", type=path, metavar="FILE", help="measured layers (.jsonl.gz) to train with")
    parser.add_argument("--target", default="cuda", help="the machine measured, or trained for: a name of `tilewright targets`")
    parser.add_argument("--collect", type=path, metavar="FILE", help="measure random layers and append them to FILE; what it holds already is kept")
    parser.add_argument("--layers", type=whole(), default=1000, help="random layers that FILE is to hold in the end (default %(default)s)")
    parser.add_argument("--each", type=whole(), default=30, help="schedules measured of each layer (default %(default)s)")
    parser.add_argument("--classes", help="of the random layers, drawn in turn, such as 3x3,batch,groups (default: all, see docs/learned.md)")
    parser.add_argument("--precisions", default="fp32", help="of the random layers, such as fp16,bf16,tf32 (default %(default)s)")
    parser.add_argument("--favourites", type=path, metavar="MODEL", help="collect what this model likes best of the layers in FILES, not samples")
    parser.add_argument("--seconds", type=amount, default=float("inf"), help="begin no further layer after so many seconds; run again to go on")
    parser.add_argument("--seed", type=seed, default=0, help="of the layers and their schedules; the same seed goes on where a file ends")
    parser.add_argument("--devices", default="0", help="indices of the GPUs to measure on, such as 0,1,2,3")
    parser.add_argument("--model", type=path, metavar="X.npz", help="where models go: X.npz, and X-NAME.npz of others; without it only evaluated")
    parser.add_argument("--folds", type=whole(2), default=5, help="parts of the layers, each predicted from the others, for the evaluation")
    parser.add_argument("--trees", type=whole(), help="of the models (default: as the models that come with the package)")


def run(options: argparse.Namespace, console: Console) -> int:
    """Collects, trains, or both.

    Raises:
        InvalidInput: if neither is requested, or a file holds no measurements.
    """
    if not options.files and options.collect is None:
        raise InvalidInput("nothing to train with", "give files of measured layers, or --collect FILE on a machine with the GPU")
    with progress_bar("loading PyTorch"):
        outputs = _model_files(options.model) if options.model is not None else {}
    if options.collect is not None:
        check_output(options.collect, *outputs.values(), options.favourites)
    for output in outputs.values():
        check_output(output, *options.files, options.favourites)
    files = list(options.files)
    if options.collect is not None:
        _collect(options, console)
        files.append(options.collect)
    if options.collect is None or options.model is not None:
        _train(files, outputs, options, console)
    return 0


def _model_files(path: Path) -> dict[str, Path]:
    """The file of each model, by the suffix that its name has (`RECIPES`)."""
    from tilewright.tuning.training import RECIPES

    return {suffix: path.parent / f"{path.stem}{suffix}{path.suffix}" for suffix in RECIPES}


def _collect(options: argparse.Namespace, console: Console) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tilewright.cli_tune import read_devices
    from tilewright.hardware import identified_machine

    with progress_bar("loading PyTorch"):
        from tilewright.partition.precision import check_precision
        from tilewright.selection.learned.hybrid import load
        from tilewright.tuning import dataset
        from tilewright.tuning.collecting import collect, favourites_of, sample_of
        from tilewright.tuning.sampling import CLASSES, TRAINING, random_workloads
        from tilewright.tuning.trials import Trials
    machine = identified_machine(options.target)
    devices = read_devices(options.devices)
    path: Path = options.collect
    if path.exists() and (lost := dataset.without_remains(path)):
        console.print(f"the last layer of {path} was incomplete: {lost} bytes removed")
    known = {str(measured.layer["name"]) for measured in dataset.read(path) if measured.machine == machine.name} if path.exists() else set()
    if options.favourites is not None:
        if not options.files:
            raise InvalidInput("--favourites looks at the layers of files, and there are none", "name the files that the model was trained with")
        measured = dataset.read(*options.files)[: options.layers]
        layers = [dict(entry.layer) for entry in measured]
        choose = favourites_of(load(options.favourites), options.each, measured, machine)
    else:
        classes = options.classes.split(",") if options.classes else TRAINING
        if not set(classes) <= CLASSES.keys():
            raise InvalidInput(f"there are no classes {options.classes!r} of layers", f"some of {', '.join(CLASSES)}")
        precisions = options.precisions.split(",")
        for precision in precisions:
            check_precision(precision, machine)
        drawn = random_workloads(options.seed, classes, precisions=precisions)
        layers = [dataset.layer_of(workload) for workload in itertools.islice(drawn, options.layers)]
        choose = sample_of(options.each, options.seed, machine)
    wanted = [layer for layer in layers if layer["name"] not in known]
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Trials(machine, devices) as trials, Progress(*columns, console=console, refresh_per_second=1) as bar:
        task = bar.add_task("layers", total=len(wanted))

        def progress(name: str, measured: int, failed: int, complete: int) -> None:
            bar.update(task, completed=complete, description=f"{measured} measured, {failed} failed; {name}")

        count = collect(trials, machine, wanted, choose, path, options.seconds, progress)
    console.print(f"{count} schedules measured; {path} holds {len(dataset.read(path))} layers")


def _train(files: list[Path], outputs: Mapping[str, Path], options: argparse.Namespace, console: Console) -> None:
    from rich.table import Table

    from tilewright.hardware import identified_machine
    from tilewright.hardware.calibration import gpu_calibration

    with progress_bar("loading PyTorch"):
        from tilewright.selection.learned.hybrid import train
        from tilewright.tuning import dataset
        from tilewright.tuning.training import RECIPES, TOPS, held_out, quality, samples_by_model, with_trees
    layers = dataset.read(*files)
    least = 2 * options.folds
    if len(layers) < least:
        raise InvalidInput(f"{len(layers)} layers are too few to train and judge a model", f"measure {least} at least")
    machine = identified_machine(layers[0].machine)
    others = {name for name in {measured.machine for measured in layers} if identified_machine(name).measured_as != machine.measured_as}
    if others:
        raise InvalidInput(f"the files hold measurements of {machine.name} and of {', '.join(sorted(others))}", "train a model for each chip")
    overheads = gpu_calibration(machine).counted
    with reading(", ".join(map(str, files)), InvalidInput, dataset.REMEDY):
        known = samples_by_model(layers, machine)
    if "" in known and len({measured.machine for measured in layers}) > 1:
        if len(known) == 1:
            raise InvalidInput("tiles on CUDA cores of several machines cannot train one model", "name files of one machine")
        console.print("tiles on CUDA cores are left out, since the formulas that their model corrects are of one machine")
        del known[""]
    counts = {suffix: len(set(rows.problem.tolist())) for suffix, rows in known.items()}
    if (most := max(counts.values())) < least:
        raise InvalidInput(f"no model covers more than {most} layers, which are too few to train and judge it", f"measure {least} at least")
    models: dict[str, Learned] = {}
    for suffix, rows in known.items():
        whole = RECIPES[suffix]
        recipe = whole if options.trees is None else with_trees(whole, options.trees)
        console.print(f"{recipe.record}: {len(rows)} kernels of {counts[suffix]} layers on {machine.name}")
        if counts[suffix] < least:
            console.print(f"too few to train and judge this model: {least} at least")
            continue
        table = Table("model", *(f"LoP@{top} %" for top in TOPS), "rank correlation", box=None, title="of each layer's measured kernels")
        predictions = {
            "analytical": rows.expected(machine, overheads), "learned, layer left out": held_out(rows, machine, recipe, overheads, options.folds),
        }  # fmt: skip
        for name, predicted in predictions.items():
            found = quality(rows, predicted)
            table.add_row(name, *(f"{100 * found[f'lop@{top}']:.1f}" for top in TOPS), f"{found['spearman']:.3f}")
        console.print(table)
        if outputs:
            models[suffix] = train(rows, machine, recipe, overheads)
    for suffix, output in outputs.items():
        if suffix in models:
            output.parent.mkdir(parents=True, exist_ok=True)
            models[suffix].save(output)
            console.print(f"wrote {output}", soft_wrap=True)
        elif output.exists():
            console.print(f"kept {output} of an earlier training: these files have too few layers for a new one", soft_wrap=True)
