"""One measurement of a candidate, and the validation of measurements from text and rows."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Any

from tilewright.files import json_of
from tilewright.hardware.machine import Machine
from tilewright.tuning import serialisation
from tilewright.tuning.problems import generator, key_of, text_of
from tilewright.tuning.trials import MODES, Outcome

STATUSES = ("measured", "wrong", "failed")
MOST_CHARACTERS = 100_000
"""Maximum characters of a text field."""
MOST_REASON = 2000
MOST_SECONDS, MOST_REPLAYS, MOST_ERROR = 1e6, 10**9, 1e308
REGION, NAME = re.compile(r"[0-9a-f]{8,64}"), re.compile(r"[ -~]{1,200}")


@dataclass(frozen=True)
class Measurement:
    """One measurement of one candidate. `region` is `problems.key_of`, `schedule` the text of `serialisation.schedule_text`; `problem` and
    `description` are their readable forms. `code` names the generated code, `generator` identifies what generated it (`problems.generator`);
    `resources` is the compiler's report by kernel, as JSON. Times are seconds per call, None unless `status` is "measured"; `stopped`: timed only
    once. `date` is UTC."""

    region: str
    kind: str
    problem: str
    schedule: str
    description: str
    machine: str
    gpu: str
    driver: str
    compiler: str
    mode: str
    code: str
    generator: str
    status: str
    reason: str
    median: float | None
    lower: float | None
    upper: float | None
    count: int
    stopped: bool
    relative_error: float | None
    resources: str
    date: str

    @property
    def identity(self) -> str:
        """A digest of all fields: equal measurements are stored once."""
        return hashlib.sha256(json.dumps(list(asdict(self).values())).encode()).hexdigest()[:32]

    @property
    def seconds(self) -> float:
        return self.median if self.median is not None else math.inf


COLUMNS = tuple(field.name for field in fields(Measurement))
NUMBERS = ("median", "lower", "upper", "relative_error")
"""Columns that hold float64 or None."""


def measurement_of(outcome: Outcome, machine: Machine, name: str, date: str | None = None) -> Measurement:
    """The record of an outcome; `date` has the format of `now`."""
    problem, timing, known = outcome.job.problem, outcome.timing, outcome.environment
    error = outcome.relative_error
    return Measurement(
        region=key_of(problem),
        kind=problem.region.kind,
        problem=text_of(problem),
        schedule=serialisation.schedule_text(outcome.job.schedule),
        description=outcome.schedule,
        machine=name,
        gpu=known.get("gpu", ""),
        driver=known.get("driver", ""),
        compiler=known.get("compiler", ""),
        mode=outcome.mode,
        code=outcome.code,
        generator=generator(machine, problem.region.kind == "chain"),
        status=outcome.status,
        reason=printable(outcome.reason)[:MOST_REASON],  # text of a compiler, or of whatever failed
        median=timing.median if timing else None,
        lower=timing.lower if timing else None,
        upper=timing.upper if timing else None,
        count=timing.count if timing else 0,
        stopped=outcome.stopped,
        relative_error=error if error is not None and error <= MOST_ERROR else None,
        resources=json.dumps({name: dict(found) for name, found in outcome.resources.items()}, sort_keys=True),
        date=date or now(),
    )


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def checked(values: Mapping[str, Any]) -> Measurement:
    """The measurement with these values, which may come from an untrusted source.

    Raises:
        ValueError: if they are not a valid measurement: fields, types, numbers, times, date or schedule that no measurement has.
    """
    if set(values) != set(COLUMNS):
        raise ValueError(f"fields missing or unknown: {', '.join(map(repr, sorted(set(values) ^ set(COLUMNS))))[:200]}")
    for name in COLUMNS:
        if not _fits(name, values[name]):
            raise ValueError(f"{name} is {ascii(values[name])[:80]}")
    numbers = {name: float(values[name]) for name in NUMBERS if values[name] is not None}
    entry = Measurement(**{**values, **numbers})
    if entry.status not in STATUSES or entry.mode not in MODES:
        raise ValueError(f"status {entry.status[:40]!r}, mode {entry.mode[:40]!r}")
    if not REGION.fullmatch(entry.region) or not NAME.fullmatch(entry.machine):
        raise ValueError(f"region {entry.region[:40]!r}, machine {entry.machine[:40]!r}")
    serialisation.check_schedule_text(entry.schedule)
    if not isinstance(json_of(entry.resources), dict):
        raise ValueError("resources are no JSON object")
    datetime.fromisoformat(entry.date)
    times = (entry.lower, entry.median, entry.upper)
    if entry.status != "measured":
        if times != (None, None, None):
            raise ValueError("times of what was not measured")
    elif entry.lower is None or entry.median is None or entry.upper is None or not 0 < entry.lower <= entry.median <= entry.upper or entry.count < 1:
        raise ValueError(f"times {times} of {entry.count} replays")
    return entry


def _fits(name: str, value: Any) -> bool:
    """Whether a column can hold the value."""
    if name == "stopped":
        return isinstance(value, bool)
    if name == "count":
        return type(value) is int and 0 <= value <= MOST_REPLAYS
    if name in NUMBERS:  # integers of any size can be compared, but not all can be converted
        return value is None or (type(value) in (int, float) and 0 <= value <= (MOST_ERROR if name == "relative_error" else MOST_SECONDS))
    return isinstance(value, str) and len(value) <= MOST_CHARACTERS and (value.isprintable() or printable(value) == value)


def printable(text: str) -> str:
    """The text as records may hold it: without lone surrogates and terminal control characters."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)
