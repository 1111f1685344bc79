"""``tilewright calibrate``: measures this CPU in about a second, and stores the facts that later choices use."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tilewright.cli_options import whole
from tilewright.errors import UnsupportedOption
from tilewright.settings import MOST_THREADS

if TYPE_CHECKING:
    from rich.console import Console

    from tilewright.hardware import Machine
    from tilewright.hardware.measured_facts import Calibration

DESCRIPTION = "measure this CPU, so that choices use its own facts"
DISTURBED = 0.25
"""Spread from which a fact counts as disturbed by other work."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--target", default="native", help="only native: this CPU")
    parser.add_argument("--threads", type=whole(1, MOST_THREADS), metavar="N", help="threads that measure at once (default: those planned for)")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--show", action="store_true", help="show what is stored, and measure nothing")
    action.add_argument("--remove", action="store_true", help="remove what is stored: the assumed facts serve again")


def run(options: argparse.Namespace, console: Console) -> int:
    """Measures and stores, shows, or removes the facts of this CPU."""
    from tilewright.hardware import identified_cpu, planned_threads
    from tilewright.hardware.measured_facts import place, remove, store, stored

    _require_native(options.target)
    machine = identified_cpu()
    if options.remove:
        path = remove(machine)
        console.print(f"removed {path}" if path else f"there is no calibration of this CPU: {place(machine)}", soft_wrap=True)
        return 0
    if options.show:
        calibration = stored(machine)
        path = place(machine)
        if calibration is None:
            console.print(f"there is no calibration of this CPU: {path}; the assumed facts serve", soft_wrap=True)
            return 0
    else:
        from tilewright.files import check_place
        from tilewright.tuning.calibrate import calibrate

        check_place(place(machine))
        calibration = calibrate(machine, planned_threads(machine, options.threads))
        path = store(calibration, machine)
    _print_facts(machine, calibration, console)
    console.print(f"calibration {calibration.name} in {path}", soft_wrap=True)
    return 0


def _require_native(target: str) -> None:
    """Raises UnsupportedOption, or UnknownTarget, for any target but this CPU."""
    if target != "native":
        from tilewright.hardware import machine

        kind = "a GPU" if target == "cuda" or machine(target).is_gpu else "a description in the catalogue"
        raise UnsupportedOption(f"--target {target} is {kind}, and only this CPU can be calibrated", "leave --target out")


def _print_facts(machine: Machine, calibration: Calibration, console: Console) -> None:
    from rich.table import Table

    from tilewright.hardware.measured_facts import assumed_facts
    from tilewright.report.units import scaled, seconds_text

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
