"""Result files: the measured outcomes, the command, the machine, versions and settings."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tilewright.tuning.measure import Contender as Contender
from tilewright.tuning.measure import Outcome as Outcome
from tilewright.tuning.measure import Run as Run
from tilewright.tuning.measure import Unavailable as Unavailable
from tilewright.tuning.measure import as_list as as_list
from tilewright.tuning.measure import compare as compare
from tilewright.tuning.measure import double_precision_outputs as double_precision_outputs
from tilewright.tuning.measure import interleaved_seconds as interleaved_seconds
from tilewright.tuning.measure import relative_error as relative_error
from tilewright.tuning.measure import seconds_of_call as seconds_of_call

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "triton", "onnxruntime", "onnx", "onnxscript", "openvino", "numpy", "tilewright")


def earlier_results(name: str) -> dict[str, Any] | None:
    """The document that `write_results` wrote under a name; None if there is none."""
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return found


def rows_to_resume(name: str, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of the result file of that name, if it is of this commit and was measured with these settings; none otherwise."""
    before = earlier_results(name)
    if before is None or before["commit"] != git_commit() or any(before["settings"].get(key) != value for key, value in settings.items()):
        return []
    found: list[dict[str, Any]] = before["results"]
    return found


def machine_description() -> dict[str, Any]:
    """Identity of this machine: processor model, cores this process may use, threads, GPU."""
    model = platform.processor() or platform.machine()
    cpu_information = Path("/proc/cpuinfo")
    if cpu_information.exists():
        for line in cpu_information.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    description: dict[str, Any] = {
        "cpu": model,
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
    }
    if torch.cuda.is_available():
        description["gpu"] = torch.cuda.get_device_name()
        description["cuda"] = torch.version.cuda
    return description


def versions() -> dict[str, str]:
    """Versions of Python and of the relevant installed packages."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit(folder: Path = Path(__file__).parent) -> str:
    """The commit of the source tree of a folder of `bench`, with "+changes" if tracked files differ; "unknown" outside a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no", "--", "..", ":(exclude)results")
        return git("rev-parse", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _without_folder(argument: str) -> str:
    """An argument of the command; of an absolute path, which is one machine's, the folder is left open."""
    path = Path(argument)
    if not path.is_absolute():
        return argument
    return "FOLDER" if path.is_dir() else f"FOLDER/{path.name}"


def write_results(name: str, settings: Mapping[str, Any], results: Sequence[Outcome | Mapping[str, Any]], commit: str | None = None) -> Path:
    """Writes bench/results/NAME.json with everything needed to assess and reproduce the figures; returns its path. `commit`: that of the source tree
    when measurements began, if they append to files of it; otherwise it is asked for now."""
    document = {
        "command": ["python", *map(_without_folder, sys.orig_argv[1:])],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or git_commit(),
        "machine": machine_description(),
        "versions": versions(),
        "settings": {name: _without_folder(str(value)) if isinstance(value, str | Path) else value for name, value in settings.items()},
        "results": [dataclasses.asdict(result) if isinstance(result, Outcome) else dict(result) for result in results],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(document, indent=1, default=str) + "\n")
    return path
