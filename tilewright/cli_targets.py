"""``tilewright targets``: the targets for which code can be generated, and every fact about them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

DESCRIPTION = "list the targets that code can be generated for"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="show every fact about these targets")
    parser.add_argument("--sources", action="store_true", help="show where each fact is from")


def run(options: argparse.Namespace, console: Console) -> int:
    """Prints the list, or the facts about the targets that are named."""
    from rich.table import Table

    from tilewright.hardware import catalogue, host_cpu, host_gpu, is_present, machine
    from tilewright.text import scaled

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
