"""``tilewright calibrate``: measures this CPU in about a second, or its GPU in about a minute, and stores what later choices use."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tilewright.cli_options import amount, whole
from tilewright.cli_output import progress_bar
from tilewright.errors import TargetNotPresent, UnsupportedOption
from tilewright.settings import MOST_THREADS

if TYPE_CHECKING:
    from rich.console import Console

    from tilewright.hardware import Machine
    from tilewright.hardware.measured_facts import Calibration
    from tilewright.hardware.measured_order import MeasuredOrder
    from tilewright.tuning.adapting import Adaptation

DESCRIPTION = "measure this CPU or its GPU, so that choices use what is measured"
DISTURBED = 0.25
"""Spread from which a fact counts as disturbed by other work."""
MINUTE = 60.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--target", default="native", help="native, this CPU (the default), or cuda, its GPU, also by its name")
    threads = "CPU only: threads that measure at once (default: those planned for)"
    parser.add_argument("--threads", type=whole(1, MOST_THREADS), metavar="N", help=threads)
    parser.add_argument("--seconds", type=amount, help="GPU only: stop beginning layers after this many seconds (default: 60)")
    parser.add_argument("--force", action="store_true", help="GPU only: calibrate it even if the package has a model of it")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--show", action="store_true", help="show what is stored, and measure nothing")
    action.add_argument("--remove", action="store_true", help="remove what is stored: choices are as before")


def run(options: argparse.Namespace, console: Console) -> int:
    """Measures and stores, shows, or removes what is known of this CPU or its GPU."""
    from tilewright.hardware import identified_cpu
    from tilewright.hardware.calibration_file import place, remove

    machine = identified_cpu() if options.target == "native" else _gpu(options.target, options.show or options.remove)
    kind = "GPU" if machine.is_gpu else "CPU"
    if options.threads is not None and machine.is_gpu:
        raise UnsupportedOption("--threads is for a CPU", "leave it out")
    if (options.seconds is not None or options.force) and not machine.is_gpu:
        raise UnsupportedOption("--seconds and --force are for a GPU", "leave them out, or add --target cuda")
    if options.remove:
        path = remove(machine)
        console.print(f"removed {path}" if path else f"there is no calibration of this {kind}: {place(machine)}", soft_wrap=True)
        return 0
    return (_run_gpu if machine.is_gpu else _run_cpu)(machine, options, console)


def _gpu(target: str, absent: bool) -> Machine:
    """The identified GPU of this host, without what is stored of it; with `absent` also another one of the catalogue.

    Raises:
        TargetNotPresent, UnknownTarget: if it is not here, or there is none of this name.
        UnsupportedOption: for another CPU of the catalogue.
    """
    from tilewright.hardware import catalogue, host_gpu, machine

    present = host_gpu()
    named = catalogue().get(target)
    if named is not None and not named.is_gpu:
        raise UnsupportedOption(f"--target {target} is a description in the catalogue, and only this CPU can be calibrated", "leave --target out")
    if named is not None and (absent or present == named):
        return named
    if present is None or target not in ("cuda", present.name):
        if target == "cuda" or named is None:
            machine(target)  # raises the error of an unknown or absent target
        here = f"the GPU here is {present.name}" if present is not None else "the driver shows none"
        raise TargetNotPresent(f"calibrating {target} needs that GPU, and {here}", "run there")
    return present


def _run_cpu(machine: Machine, options: argparse.Namespace, console: Console) -> int:
    from tilewright.hardware.calibration_file import place, store
    from tilewright.hardware.measured_facts import stored

    if options.show:
        calibration = stored(machine)
        path = place(machine)
        if calibration is None:
            console.print(f"there is no calibration of this CPU: {path}; the assumed facts serve", soft_wrap=True)
            return 0
    else:
        from tilewright.files import check_place

        check_place(place(machine))
        with progress_bar("loading PyTorch") as show:
            from tilewright.hardware import planned_threads
            from tilewright.tuning.calibrate import calibrate

            show("measuring this CPU", 0, 0)
            calibration = calibrate(machine, planned_threads(machine, options.threads))
        path = store(calibration, machine)
    _print_facts(machine, calibration, console)
    console.print(f"calibration {calibration.name} in {path}", soft_wrap=True)
    return 0


def _run_gpu(machine: Machine, options: argparse.Namespace, console: Console) -> int:
    from tilewright.hardware.calibration_file import place, remove, store
    from tilewright.hardware.measured_order import PRESENT, stored

    path = place(machine)
    if options.show:
        content = stored(machine)
        if content is None:
            console.print(f"there is no calibration of this GPU: {path}; the models of the package serve", soft_wrap=True)
            return 0
    else:
        from tilewright.files import check_place
        from tilewright.tuning.calibrate_gpu import as_stored

        check_place(path)
        found = _measured(machine, MINUTE if options.seconds is None else options.seconds, options.force, console)
        content = as_stored(found, machine)
        if found.chosen == PRESENT:
            earlier = f", and {path} was removed" if remove(machine) else ""
            _print_qualities(content, console)
            console.print(f"neither ranks better than the present order: nothing was stored{earlier}", soft_wrap=True)
            return 0
        store(content, machine)
    _print_qualities(content, console)
    console.print(f"calibration {content.name} in {path}", soft_wrap=True)
    return 0


def _measured(machine: Machine, seconds: float, force: bool, console: Console) -> Adaptation:
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    from tilewright.tuning.calibrate_gpu import calibrate

    with Progress(TextColumn("{task.description}", markup=False), TimeElapsedColumn(), console=console, refresh_per_second=1, transient=True) as bar:
        task = bar.add_task("measuring")

        def progress(_: str, measured: int, failed: int, complete: int) -> None:
            bar.update(task, description=f"{measured} kernels of {complete} layers measured, {failed} failed; then constants are fitted")

        return calibrate(machine, seconds, force, progress)


def _print_qualities(content: MeasuredOrder, console: Console) -> None:
    from rich.table import Table

    from tilewright.hardware.measured_order import SHOWN

    environment = ", ".join(content.environment.values())
    table = Table("order", title=f"{content.machine}: {content.kernels} kernels of {content.layers} layers, {content.date}, {environment}")
    for heading in ("loss of the first %", "rank correlation", "error of logarithms"):
        table.add_column(heading, justify="right")
    for name, row in content.qualities.items():
        marked = f"{name} (chosen)" if name == content.chosen else name
        loss, correlation, error = (row[shown] for shown in SHOWN)
        table.add_row(marked, f"{100 * loss:.1f}", f"{correlation:.3f}", f"{error:.3f}")
    console.print(table)
    console.print("means over layers, each left out of what ranks it, among its measured candidates", soft_wrap=True)


def _print_facts(machine: Machine, calibration: Calibration, console: Console) -> None:
    from rich.table import Table

    from tilewright.hardware.measured_facts import assumed_facts
    from tilewright.text import scaled, seconds_text

    def shown(value: float | None, unit: str) -> str:
        if value is None:
            return "-"
        return seconds_text(value) if unit == "s" else scaled(value, unit) if unit in ("Hz", "B/s") else f"{value:.4g} {unit}"

    title = f"{calibration.machine}: measured by {calibration.threads} threads, {calibration.date}, {calibration.compiler}, {calibration.openmp}"
    table = Table("fact", title=title)
    for heading in ("assumed", "measured", "spread"):
        table.add_column(heading, justify="right")
    assumed = {name: value for name, (value, _) in assumed_facts(machine).items()}
    for name, fact in calibration.facts.items():
        spread = f"{100 * fact.spread:.0f} %" if fact.spread < 10 else "> 999 %"
        table.add_row(name, shown(assumed.get(name), fact.unit), shown(fact.value, fact.unit), spread)
    console.print(table)
    disturbed = [name for name, fact in calibration.facts.items() if fact.spread > DISTURBED]
    if disturbed:
        console.print(f"other work disturbed {', '.join(disturbed)}: calibrate again while the machine is idle", soft_wrap=True)
