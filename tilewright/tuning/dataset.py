"""Files of measured schedules of layers: compressed JSON lines, one per layer, with the candidates of each schema as columns.

A line holds {"layer": {name}, "machine", "environment", "mode", "schemas": {schedule type: {axis: [numbers]..., "seconds": [median], "spread": [upper
minus lower quartile], "rounds": [replays]}}, "failures": [[schedule, reason]...]}. A layer's name is the text of a workload (`tuning.workloads`); if
the layer also has outputs, channels, height, width, filter and stride, it is a convolution of these sizes and the name is arbitrary. Candidates that
were measured again have the times of the last, interleaved measurement, and more rounds.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.errors import InvalidInput
from tilewright.files import first_line, json_of, lines_of, reading, regular, written
from tilewright.ir.problem import Problem
from tilewright.kernels.registry import schedule_types
from tilewright.kernels.schema import Numerics
from tilewright.tuning import serialisation
from tilewright.tuning.problems import convolution_problem
from tilewright.tuning.trials import Outcome
from tilewright.tuning.workloads import Convolution, Workload, numerics_of, problem_of, text_of, workload_of

LAYER_FIELDS = ("outputs", "channels", "height", "width", "filter", "stride")
MEASURES = ("seconds", "spread", "rounds")
LEAST = {"seconds": 1e-12, "spread": 0.0, "rounds": 1}
MOST_SECONDS, MOST_COUNT = 1e6, (1 << 31) - 1
LARGEST = 1 << 20
"""Maximum extent of a layer."""
MOST_MEMBER_BYTES = 1 << 28
"""Maximum uncompressed bytes that `append` writes at once."""
REMEDY = "give a file that `tilewright train --collect` made"


def layer_problem(layer: Mapping[str, Any]) -> Problem:
    """The layer as a problem to measure."""
    if not _has_sizes(layer):
        return problem_of(workload_of(str(layer["name"])))
    outputs, channels, height, width, filter_size, stride = (int(layer[name]) for name in LAYER_FIELDS)
    return convolution_problem(outputs, channels, height, width, filter_size, stride)


def layer_workload(layer: Mapping[str, Any]) -> Workload:
    """The workload that the layer describes by its name or by its sizes."""
    if not _has_sizes(layer):
        return workload_of(str(layer["name"]))
    outputs, channels, height, width, size, stride = (int(layer[name]) for name in LAYER_FIELDS)
    return Convolution(1, channels, outputs, (height, width), (size, size), stride)


def layer_numerics(layer: Mapping[str, Any]) -> Numerics:
    """The kinds of rounding that the layer's schedules may have."""
    return numerics_of(layer_workload(layer))


def layer_of(workload: Workload) -> dict[str, Any]:
    """The workload as a layer."""
    return {"name": text_of(workload)}


def _has_sizes(layer: Mapping[str, Any]) -> bool:
    return not layer.keys().isdisjoint(LAYER_FIELDS)


@dataclass(frozen=True)
class MeasuredLayer:
    """One line of the file. `schemas` maps each schedule type to columns: its axes, and MEASURES (seconds, seconds, replays)."""

    layer: Mapping[str, Any]
    machine: str
    schemas: Mapping[str, Mapping[str, np.ndarray]]
    failures: Sequence[tuple[str, str]] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    mode: str = "cold"

    @property
    def count(self) -> int:
        return sum(len(columns["seconds"]) for columns in self.schemas.values())

    @property
    def best(self) -> float:
        """Seconds of the fastest candidate measured."""
        return min(float(columns["seconds"].min()) for columns in self.schemas.values() if len(columns["seconds"]))

    def times(self) -> dict[str, float]:
        """Seconds, keyed by the schedule's text (`serialisation.schedule_text`)."""
        found: dict[str, float] = {}
        for kind, columns in self.schemas.items():
            made = schedule_types()[kind]
            axes = [entry.name for entry in fields(made)]
            for at, seconds in enumerate(columns["seconds"]):
                found[serialisation.schedule_text(made(*(int(columns[axis][at]) for axis in axes)))] = float(seconds)
        return found


def from_outcomes(layer: Mapping[str, Any], machine: str, outcomes: Iterable[Outcome]) -> MeasuredLayer:
    """A layer's outcomes as columns; if a schedule occurs twice, the later outcome counts."""
    last: dict[str, Outcome] = {serialisation.schedule_text(outcome.job.schedule): outcome for outcome in outcomes}
    schemas: dict[str, dict[str, list[float]]] = {}
    failures: list[tuple[str, str]] = []
    environment: Mapping[str, str] = {}
    for outcome in last.values():
        if outcome.timing is None:
            failures.append((outcome.schedule, f"{outcome.status}: {outcome.reason}"))
            continue
        environment = outcome.environment
        schedule = outcome.job.schedule
        columns = schemas.setdefault(type(schedule).__name__, {})
        for entry in fields(schedule):
            columns.setdefault(entry.name, []).append(getattr(schedule, entry.name))
        for name, number in zip(MEASURES, (outcome.timing.median, outcome.timing.spread, outcome.timing.count), strict=True):
            columns.setdefault(name, []).append(number)
    arrays = {kind: {name: np.array(column) for name, column in sorted(schemas[kind].items())} for kind in sorted(schemas)}
    return MeasuredLayer(dict(layer), machine, arrays, tuple(failures), dict(environment), "cold")


def merged(first: MeasuredLayer, second: MeasuredLayer) -> MeasuredLayer:
    """Both measurements of one layer. For a schedule in both, the one with more replays counts, or the second if they are equal."""
    schemas: dict[str, dict[str, np.ndarray]] = {}
    for kind in sorted({*first.schemas, *second.schemas}):
        parts = [layer.schemas[kind] for layer in (first, second) if kind in layer.schemas]
        names = parts[-1].keys()
        together = {name: np.concatenate([part[name] for part in parts]) for name in names}
        axes = np.stack([together[name] for name in names if name not in MEASURES], axis=1)
        order = np.lexsort((np.arange(len(axes)), together["rounds"]))[::-1]
        _, kept = np.unique(axes[order], axis=0, return_index=True)
        which = np.sort(order[kept])
        schemas[kind] = {name: column[which] for name, column in together.items()}
    failures = tuple(dict.fromkeys((*first.failures, *second.failures)))
    return MeasuredLayer(first.layer, first.machine, schemas, failures, {**first.environment, **second.environment}, first.mode)


def as_line(measured: MeasuredLayer) -> str:
    """The layer's line without a newline; times are in seconds with five digits."""
    schemas = {
        kind: {name: [float(f"{x:.5g}") if name in ("seconds", "spread") else int(x) for x in column] for name, column in columns.items()}
        for kind, columns in measured.schemas.items()
    }
    content = {
        "layer": dict(measured.layer), "machine": measured.machine, "environment": dict(measured.environment), "mode": measured.mode,
        "schemas": schemas, "failures": [list(entry) for entry in measured.failures],
    }  # fmt: skip
    return json.dumps(content, separators=(",", ":"))


def append(path: Path, measured: MeasuredLayer) -> None:
    """Adds a layer as a separate compressed member: an interruption damages only the last member, see `without_remains`."""
    with open(path, "ab") as file:
        file.write(gzip.compress((as_line(measured) + "\n").encode(), 9, mtime=0))


def without_remains(path: Path) -> int:
    """Removes an incomplete last member, left by an interrupted `append`. Returns the number of bytes removed. A file damaged in another way is not
    changed."""
    with reading(path, InvalidInput, REMEDY):
        regular(path)
        data = path.read_bytes()
    start = 0
    while start < len(data):
        member = zlib.decompressobj(wbits=31)
        try:
            content = member.decompress(data[start:], MOST_MEMBER_BYTES)
        except zlib.error:
            return 0
        if not member.eof:
            if content.count(b"\n") > 1 or member.unconsumed_tail:  # `append` never writes this much at once
                return 0
            with open(path, "r+b") as file:
                file.truncate(start)
            return len(data) - start
        start = len(data) - len(member.unused_data)
    return 0


def write(path: Path, layers: Iterable[MeasuredLayer]) -> None:
    """Replaces the file atomically."""
    with written(path) as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        for measured in layers:
            file.write((as_line(measured) + "\n").encode())


def read(*paths: Path) -> list[MeasuredLayer]:
    """The layers of files, in order of first occurrence; lines for the same layer on the same machine are merged.

    Raises:
        InvalidInput: for an invalid file, with the line's number.
    """
    found: dict[tuple[str, str], MeasuredLayer] = {}
    for path in paths:
        for number, measured in enumerate(each_line(path), 1):
            key = (measured.machine, str(measured.layer["name"]))
            if key in found and found[key].layer != measured.layer:
                raise InvalidInput(f"line {number} of {path} is no measured layer: another layer is called {key[1]}", REMEDY)
            found[key] = merged(found[key], measured) if key in found else measured
    return list(found.values())


def each_line(path: Path) -> Iterator[MeasuredLayer]:
    """The layer of each line of a file, not merged. Raises InvalidInput as `read`."""
    for number, line in _lines(path):
        try:
            yield _parsed(json_of(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(f"line {number} of {path} is no measured layer: {first_line(error)}", REMEDY) from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with reading(path, InvalidInput, REMEDY):
        yield from lines_of(path)


def _parsed(content: Mapping[str, Any]) -> MeasuredLayer:
    """The layer in a line's content. Raises ValueError, KeyError, TypeError or AttributeError if it is not a measured layer."""
    schemas: dict[str, dict[str, np.ndarray]] = {}
    for kind, columns in content["schemas"].items():
        axes = {entry.name: entry.default for entry in fields(schedule_types()[kind])}
        least = {**serialisation.least_parameters(kind), **LEAST}
        arrays = {name: _column(name, column, least.get(name, 0)) for name, column in columns.items()}
        # an axis introduced after this measurement had its default value
        arrays |= {name: np.full(arrays["seconds"].shape, value) for name, value in axes.items() if name not in arrays and value is not MISSING}
        if set(arrays) != {*axes, *MEASURES}:
            raise ValueError(f"columns of {kind} are {sorted(arrays)}")
        if len({column.shape for column in arrays.values()}) != 1:
            raise ValueError(f"columns of {kind} differ in length")
        schemas[kind] = arrays
    sizes = {name: content["layer"][name] for name in LAYER_FIELDS} if _has_sizes(content["layer"]) else {}
    if not all(type(size) is int and 1 <= size <= LARGEST for size in sizes.values()):
        raise ValueError(f"the layer's sizes are {str(sizes)[:200]}")
    reasons = [text for schedule, reason in content["failures"] for text in (schedule, reason)]
    texts = (content["layer"]["name"], content["machine"], content["mode"], *content["environment"].values(), *reasons)
    if not all(isinstance(text, str) and text.isprintable() for text in texts):
        raise ValueError("a name or reason is no text")
    if not sizes:
        workload_of(content["layer"]["name"])
    layer = {"name": content["layer"]["name"], **sizes}
    failures = tuple((schedule, reason) for schedule, reason in content["failures"])
    return MeasuredLayer(layer, content["machine"], schemas, failures, dict(content["environment"]), content["mode"])


def _column(name: str, column: Any, least: float) -> np.ndarray:
    """The column as an array of its numbers' type. Raises ValueError unless all are numbers of at least `least`."""
    kinds, most = ((int, float), MOST_SECONDS) if name in ("seconds", "spread") else ((int,), MOST_COUNT)
    if not isinstance(column, list) or not all(type(number) in kinds and least <= number <= most for number in column):
        raise ValueError(f"{name} holds other things than numbers from {least:g} to {most:g}")
    return np.asarray(column, dtype=np.float64 if len(kinds) > 1 else np.int64)
