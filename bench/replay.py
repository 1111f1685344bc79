"""Compares what two commits choose and print for the same models: every schedule, every prediction and every kernel, as text.

    python -m bench.replay --against COMMIT                 # `make replay BASE=COMMIT`
    python -m bench.replay --against COMMIT --models resnet50 --targets h200,native

Each commit plans the zoo's networks and the operator cases of its tests for `TARGETS`, most of which are not present: nothing is compiled or called,
and stored choices are not read. For each region it writes the space, the schedule, the predicted time and its terms, the models' first few candidates
(whose code is analysed on some CPUs), the calls, the storage and the text of the kernels. The other commit's output is cached beside the kernels and
reused. Kernel names are digests of their code; a difference only in the comments of a kernel's text is a kind of its own. The exit status is 1 if
anything differs. If names changed between the commits, `--renamed` substitutes the new ones in the other commit's output, so that only other
differences remain.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parents[1]
FAVOURITES = 8
"""Number of a ranking's first candidates that are written."""
TARGETS: Mapping[str, tuple[str, int, str]] = {
    "h200": ("h200", 1, "fp32"),
    "a100": ("a100", 1, "fp32"),
    "v100": ("v100", 1, "fp32"),
    "x86-avx2": ("x86-avx2", 4, "fp32"),
    "x86-avx512": ("x86-avx512", 8, "fp32"),
    "cortex-a53": ("cortex-a53", 4, "fp32"),
    "native": ("native", 2, "fp32"),
    "native-models": ("native", 2, "fp32"),
    "learned": ("xeon-sapphire-rapids", 2, "fp32"),
    "bf16": ("xeon-sapphire-rapids", 2, "bf16"),
}
"""By name: a target, the number of threads to plan for, and the precision. "native" is this CPU, whose learned part is left out in "native-models";
"learned" is a core that has a learned part, on whatever machine this runs."""
LINES, WIDTH = 40, 240
"""Printed lines of a difference, and characters per line."""
KINDS = ("regions", "spaces", "schedules", "predictions", "favourites", "calls and storage", "kernel bodies", "kernel headers")
"""The aspects that are compared, each depending on those before it."""
CASES = "operators: "
SEED = 20

Plain = dict[str, Any]


# --- one commit --------------------------------------------------------------------------------------------------------


def cases() -> list[str]:
    """Names of the models: the zoo's, largest first, then the families of operators."""
    from tests.operator_cases import FAMILIES
    from tilewright import zoo

    first = ("vgg16", "inception_v4", "bert_base", "densenet121", "deepcam")
    return [*first, *(name for name in zoo.NETWORKS if name not in first), *(CASES + name for name in FAMILIES)]


def graphs(unit: str) -> Iterator[tuple[str, Any]]:
    """(name, simplified graph) of a model, or of each case of a family."""
    import torch

    from tilewright import zoo
    from tilewright.compile import read
    from tilewright.graph.passes import simplify

    torch.manual_seed(SEED)
    if unit.startswith(CASES):
        from tests.operator_cases import FAMILIES

        for number, case in enumerate(FAMILIES[unit.removeprefix(CASES)](random.Random(SEED))):
            yield f"{number} {case.name}", simplify(read(case.module.eval(), case.inputs).graph)[0]
    else:
        module, _ = zoo.build(unit, 1)
        yield unit, simplify(read(module.eval(), zoo.NETWORKS[unit].example_inputs(1)).graph)[0]


def planned(graph: Any, name: str) -> Plain:
    """All decisions for a graph on one of `TARGETS`."""
    from tilewright.compile import source_files
    from tilewright.errors import UnsupportedOption
    from tilewright.hardware import machine
    from tilewright.partition.plan import plan_program
    from tilewright.selection.choice import rank
    from tilewright.selection.ranking import Choice

    target, threads, precision = TARGETS[name]
    here = machine(target)
    if name == "native-models":
        here = replace(here, pipeline="")  # learned parts are found by this name
    favourites: dict[str, list[str]] = {}

    def chosen(problem: Any, *arguments: Any) -> Choice:
        ranking, region = rank(problem, *arguments), problem.region
        listing = [f"{choice.seconds!r} {choice.schedule}" for choice in islice(ranking, FAVOURITES)]
        favourites.setdefault(f"{region.kind} {' '.join(node.operator for node in region.nodes)}", []).append("\n".join(listing))
        return ranking.first()

    try:
        program = plan_program(graph, here, threads, chosen, precision)
    except UnsupportedOption as error:
        return {"refused": str(error)}
    regions = [
        {
            "region": f"{part.region.kind}: {' '.join(node.operator for node in part.region.nodes)} -> {' '.join(part.region.outputs)}",
            "schedule": part.schedule,
            "space": "\n".join([f"{part.space.feasible} feasible", *(f"{count} {why}" for why, count in part.space.rejected.items())]),
            "prediction": "\n".join([repr(part.predicted_seconds), *(f"{term} {value!r}" for term, value in part.terms.items())]),
            "calls": "\n".join([f"{part.repeat} times", *(f"{call.kernel}({', '.join(call.arguments)})" for call in part.calls)]),
        }
        for part in program.regions
    ]
    storage = {
        buffer: f"{entry.value.shape} {entry.value.dtype} {entry.layout.order} {entry.layout.halo} {entry.source} {entry.view} {entry.matrix}"
        + (f" in {entry.layout.around}" if entry.layout.around else "")
        for buffer, entry in program.storage.items()
    }
    kernels = {source.name: source.text for source in source_files(program, here)}
    return {"regions": regions, "storage": storage, "aliases": dict(program.aliases), "favourites": favourites, "kernels": kernels}


def dump(unit: str, targets: Sequence[str], folder: str) -> str:
    """Writes the decisions for each graph of a unit; see `dump_all`."""
    warnings.simplefilter("ignore")
    found = {name: {target: planned(graph, target) for target in targets} for name, graph in graphs(unit)}
    path = Path(folder) / f"{hashlib.sha256(unit.encode()).hexdigest()[:16]}.json"
    path.with_suffix(".part").write_text(json.dumps({"unit": unit, "graphs": found}))
    path.with_suffix(".part").rename(path)
    return unit


def dump_all(folder: Path, wanted: Sequence[str], targets: Sequence[str]) -> None:
    """Writes one file per unit, with as many processes as cores."""
    from tilewright import settings

    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(settings.available_cores()) as pool:
        for unit in pool.map(dump, wanted, [targets] * len(wanted), [str(folder)] * len(wanted)):
            print(unit, file=sys.stderr, flush=True)


# --- two commits ------------------------------------------------------------------------------------------------------


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The files of a commit, in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="tilewright-replay-", ignore_cleanup_errors=True) as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=HERE, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder)


def replayed(tree: Path, folder: Path, wanted: Sequence[str], targets: Sequence[str]) -> dict[str, Plain]:
    """The decisions of a tree's package, made by its own version of this file if it has one; decisions already in the folder are reused."""
    known = loaded(folder)
    missing = [unit for unit in wanted if unit not in known or any(set(targets) - of.keys() for of in known[unit].values())]
    if missing:
        own = tree / "bench" / "replay.py"
        script = own if own.exists() else Path(__file__).resolve()
        environment = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'tests'}", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        arguments = ["--dump", str(folder), "--targets", ",".join(targets), "--models", ",".join(missing)]
        subprocess.run([sys.executable, str(script), *arguments], cwd=tree, env=environment, check=True)
        known = loaded(folder)
    return {unit: known[unit] for unit in wanted}


def kept(commit: str) -> Path:
    """The folder for the decisions of a commit, which depend on this CPU and on this file as well."""
    from tilewright import settings
    from tilewright.hardware import host_cpu

    key = f"{commit} {host_cpu().digest} {sys.version} {Path(__file__).read_text()}"
    return settings.cache_directory() / "replay" / hashlib.sha256(key.encode()).hexdigest()[:24]


def loaded(folder: Path) -> dict[str, Plain]:
    """The decisions in a folder, by unit."""
    files = (json.loads(path.read_text()) for path in sorted(folder.glob("*.json")))
    return {content["unit"]: content["graphs"] for content in files}


def header_and_body(text: str) -> tuple[str, str]:
    """The comments of a kernel's text, and the rest."""
    lines = text.splitlines()
    comments = [line for line in lines if line.lstrip().startswith("//")]
    return "\n".join(comments), "\n".join(line for line in lines if not line.lstrip().startswith("//"))


def aspects(decided: Plain) -> dict[str, dict[str, str]]:
    """The texts to compare for each of `KINDS`, by the object that they describe."""
    if "refused" in decided:
        return {kind: {"": decided["refused"]} for kind in KINDS[:1]}
    regions, kernels = decided["regions"], decided["kernels"]
    places = [f"region {number}, {part['region']}" for number, part in enumerate(regions)]
    texts = {name: header_and_body(text) for name, text in kernels.items()}
    return {
        "regions": {"all": "\n".join(part["region"] for part in regions)},
        "spaces": {place: part["space"] for place, part in zip(places, regions, strict=True)},
        "schedules": {place: part["schedule"] for place, part in zip(places, regions, strict=True)},
        "predictions": {place: part["prediction"] for place, part in zip(places, regions, strict=True)},
        "favourites": {place: "\n\n".join(listing) for place, listing in decided["favourites"].items()},
        "calls and storage": {
            **{place: part["calls"] for place, part in zip(places, regions, strict=True)},
            "storage": "\n".join(f"{name}: {text}" for name, text in sorted(decided["storage"].items())),
            "aliases": "\n".join(f"{name}: {root}" for name, root in sorted(decided["aliases"].items())),
        },
        "kernel bodies": {name: body for name, (_, body) in texts.items()},
        "kernel headers": {name: header for name, (header, _) in texts.items()},
    }


def differences(before: Mapping[str, Plain], after: Mapping[str, Plain], targets: Sequence[str]) -> Iterator[tuple[str, str, str, str]]:
    """(kind, place, text before, text after) of everything that differs; a missing text is empty."""
    for unit in after:
        for name in {**before[unit], **after[unit]}:
            for target in targets:
                sides = [aspects(side[unit][name][target]) if name in side[unit] else {} for side in (before, after)]
                for kind in KINDS:
                    old, new = (side.get(kind, {}) for side in sides)
                    for place in {**old, **new}:
                        if old.get(place, "") != new.get(place, ""):
                            yield kind, f"{target}, {name}, {place}", old.get(place, ""), new.get(place, "")


def renamed(decided: dict[str, Plain], pairs: Sequence[tuple[str, str]]) -> dict[str, Plain]:
    """The decisions with regular expressions replaced in all texts, one after another."""
    text = json.dumps(decided)
    for pattern, new in pairs:
        text = re.sub(pattern, new, text)
    result: dict[str, Plain] = json.loads(text)
    return result


def compare(before: Mapping[str, Plain], after: Mapping[str, Plain], targets: Sequence[str], shown: int) -> dict[str, int]:
    """Prints the number of differing texts by kind and the first few differences; returns the counts."""
    counts = dict.fromkeys(KINDS, 0)
    for kind, place, old, new in differences(before, after, targets):
        counts[kind] += 1
        if counts[kind] <= shown:
            print(f"\n== {kind}: {place}")
            lines = difflib.unified_diff(old.splitlines(), new.splitlines(), "before", "after", lineterm="", n=2)
            print("\n".join(line[:WIDTH] for line in islice(lines, LINES)))
    compared = [aspects(decided[target]) for graphs in after.values() for decided in graphs.values() for target in targets]
    table = Table("", "compared", "differ")
    for kind, count in counts.items():
        table.add_row(kind, str(sum(len(of.get(kind, ())) for of in compared)), str(count))
    Console().print(table)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", metavar="COMMIT", help="what this tree is compared with")
    parser.add_argument("--models", help="some of the networks and families, separated by commas (default: all)")
    parser.add_argument("--targets", help=f"some of {', '.join(TARGETS)} (default: all)")
    parser.add_argument("--show", type=int, default=2, help="differences of each kind that are printed (default: %(default)s)")
    parser.add_argument("--dump", type=Path, metavar="FOLDER", help="write down what this tree decides, and compare nothing")
    parser.add_argument(
        "--renamed", nargs=2, action="append", default=[], metavar=("REGEX", "TEXT"), help="replaced in what the other commit wrote, as JSON"
    )
    options = parser.parse_args()
    sys.path.append(str(HERE))
    wanted = options.models.split(",") if options.models else cases()
    targets = options.targets.split(",") if options.targets else list(TARGETS)
    if unknown := {*(set(wanted) - set(cases())), *(set(targets) - set(TARGETS))}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if options.dump:
        dump_all(options.dump, wanted, targets)
        return
    if not options.against:
        parser.error("name a commit: --against COMMIT")
    found = subprocess.run(["git", "rev-parse", "--verify", f"{options.against}^{{commit}}"], cwd=HERE, capture_output=True, text=True)
    if found.returncode:
        parser.error(f"{options.against} is no commit of this repository")
    with checkout(found.stdout.strip()) as tree, tempfile.TemporaryDirectory() as fresh:
        before = replayed(tree, kept(found.stdout.strip()), wanted, targets)
        after = replayed(HERE, Path(fresh), wanted, targets)
    before = renamed(before, options.renamed)
    sys.exit(any(compare(before, after, targets, options.show).values()))


if __name__ == "__main__":
    main()
