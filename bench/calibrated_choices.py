"""What calibrated facts change: losses of first choices on measured layers, with assumed facts and with those of `tilewright calibrate`.

    python -m bench.calibrated_choices [--data FILE] [--facts RESULTS.json]

The layers were measured on this kind of CPU (`bench.cpu_choice --data`). `--facts` takes the calibration from an earlier result file, otherwise it is
the one that is stored for this CPU. Loss is the time of the first choice that was measured over the least measured time, less 1.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Set
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common import write_results
from bench.cpu_choice import kind_of, lines, problem
from bench.cpu_learned import DATA, JUDGED
from tilewright.hardware import Machine, identified_cpu
from tilewright.hardware.measured_facts import Calibration, Fact, assumed_facts, stored, with_facts
from tilewright.selection.choice import rank
from tilewright.tuning import serialisation

LAYERS = DATA / JUDGED[0]
LEVEL_3 = "level 3 bandwidth"


def calibration_of(path: Path | None) -> Calibration:
    """The stored calibration, or that of a result file."""
    if path is None:
        found = stored(identified_cpu())
        if found is None:
            raise SystemExit("this CPU has no calibration: run tilewright calibrate")
        return found
    content: dict[str, Any] = json.loads(path.read_text())["settings"]["calibration"]
    return Calibration(**{**content, "facts": {name: Fact(**fact) for name, fact in content["facts"].items()}})


def with_some(machine: Machine, calibration: Calibration, names: Set[str]) -> Machine:
    """The machine with those of the calibration's facts that are named, and its own otherwise."""
    facts = {name: calibration.facts[name] if name in names else Fact(value, unit, 0.0) for name, (value, unit) in assumed_facts(machine).items()}
    return with_facts(machine, replace(calibration, identity=machine.identity, facts=facts))


def loss(line: Mapping[str, Any], machine: Machine, learned: bool) -> float:
    """The loss of the first choice that was measured."""
    times: dict[str, float] = line["times"]
    threads: int = line["threads"]
    ranking = rank(problem(line["layer"], machine, threads), machine, threads, learned=learned)
    for choice in ranking:
        seconds = times.get(serialisation.schedule_text(choice.schedule))
        if seconds is not None:
            return seconds / min(times.values()) - 1
    return float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=LAYERS)
    parser.add_argument("--facts", type=Path)
    parser.add_argument("--name", default="calibrated_choices")
    options = parser.parse_args()
    calibration = calibration_of(options.facts)
    found: dict[tuple[str, str, str], list[float]] = {}
    for line in lines(options.data):
        if line.get("only"):
            continue
        plain: Machine = serialisation.decode(line["machine"])
        every = set(assumed_facts(plain))
        for facts, names in (
            ("assumed", set[str]()), ("measured", every), ("only level 3 measured", {LEVEL_3}), ("all but level 3 measured", every - {LEVEL_3})
        ):  # fmt: skip
            machine = with_some(plain, calibration, names)
            for learned in (False, True):
                key = (kind_of(line["layer"]), "models and learned part" if learned else "models", facts)
                found.setdefault(key, []).append(loss(line, machine, learned))
    rows = []
    shown = Table("kind", "ranked by", "facts", "layers", "loss", box=None)
    for (kind, ranked, facts), losses in found.items():
        rows.append({"kind": kind, "ranked by": ranked, "facts": facts, "layers": len(losses), "loss": float(np.nanmean(losses)), "losses": losses})
        shown.add_row(kind, ranked, facts, str(len(losses)), f"{np.nanmean(losses):.3f}")
    Console(width=150).print(shown)
    print(write_results(options.name, {"judged on": options.data.name, "calibration": asdict(calibration)}, rows))


if __name__ == "__main__":
    main()
