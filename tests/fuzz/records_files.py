"""Records, as lines and as SQLite files, and the other files of measurements: imported, opened, and used for choices. Whatever they hold, no earlier
measurement is lost, and only candidates are chosen."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
import tempfile
import warnings
from contextlib import closing
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.harness import Broken, Case
from tilewright.cli_tune import read_layers
from tilewright.errors import CacheError
from tilewright.hardware import machine
from tilewright.ir.problem import Problem
from tilewright.kernels.registry import lower
from tilewright.selection.choice import rank
from tilewright.selection.ranking import Ranking
from tilewright.tuning import dataset, serialisation, tuning
from tilewright.tuning.measurement import COLUMNS, Measurement
from tilewright.tuning.problems import code_of, convolution_problem, key_of, text_of
from tilewright.tuning.record_file import VERSION
from tilewright.tuning.records import Records, default_path
from tilewright.tuning.tuning import chooser_for, from_records

PROBLEM: Problem = convolution_problem(16, 8, 6, 5, 3)
H200 = machine("h200")
KNOWN = 3
"""Number of measurements that are in the store beforehand, of the candidates after those in the files."""


@lru_cache
def ranking() -> Ranking:
    return rank(PROBLEM, H200)


@lru_cache
def measurements(count: int = 2 * KNOWN) -> tuple[Measurement, ...]:
    """Measurements of the models' favourites."""
    found = []
    for number, choice in enumerate(islice(ranking(), count)):
        code = code_of(lower(PROBLEM, choice.schedule, H200))
        found.append(
            Measurement(
                key_of(PROBLEM), "contraction", text_of(PROBLEM), serialisation.schedule_text(choice.schedule), str(choice.schedule), "h200", "GPU", "13.0", "nvrtc",
                "network", code, "of another day", "measured", "", 1e-5 + 1e-7 * number, 9e-6, 1.1e-4, 4, False, 1e-7, '{"kernel": {"registers": 32}}',
                "2026-01-02T03:04:05.678+00:00",
            )
        )  # fmt: skip
    return tuple(found)


@lru_cache
def store() -> bytes:
    """A sound file of the measurements in the store beforehand."""
    with tempfile.TemporaryDirectory() as folder:
        with Records(Path(folder) / "records") as records:
            records.add(measurements()[KNOWN:])
            records.add(replace(measurements()[0], reason=f"{number}" * 50, count=1) for number in range(20))
        return (Path(folder) / "records").read_bytes()


# Contents of files

NUMBERS = st.sampled_from(
    [0, 1, -1, 7, 16, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 70, 10**400, 0.0, -0.0, 0.5, 1e-320, 1e6, 1e308, -1e308, float("nan"), float("inf")]
)
TEXTS = st.sampled_from(
    ["", " ", "\0", "\n", "\x1b[2J", "\ud800", "\udfff\ud800", "é", "a" * 200_000, "{", "[" * 60_000, "[" * 900, "NaN", "1e999", "h200", "'; DROP TABLE x",
     '{"type": "ContractionSchedule"}', '{"type": "os.system"}', "2026-01-02", "../../etc/passwd", "%s%n", "[/bold]"]
) | st.text(max_size=20)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6,
)  # fmt: skip


@st.composite
def changed(draw: Any, content: Any) -> Any:
    """A JSON value with one or several places changed."""
    content = json.loads(json.dumps(content))
    for _ in range(draw(st.integers(1, 3))):
        holder, key = content, None
        while isinstance(holder if key is None else holder[key], (dict, list)) and (holder if key is None else holder[key]):
            holder = holder if key is None else holder[key]
            key = draw(st.sampled_from(list(holder) if isinstance(holder, dict) else range(len(holder))))
            if draw(st.booleans()) and draw(st.booleans()):
                break
        if key is None:
            return draw(VALUES)
        what = draw(st.sampled_from(["value", "value", "number", "remove", "more"]))
        if what == "remove":
            del holder[key]
        elif what == "more" and isinstance(holder, dict):
            holder[draw(st.text(max_size=5))] = draw(VALUES)
        else:
            holder[key] = draw(NUMBERS if what == "number" else VALUES)
    return content


def sound_line(entry: Measurement) -> dict[str, Any]:
    """A measurement as `Records.export_lines` writes it."""
    return {"version": VERSION, **asdict(entry)}


@st.composite
def line(draw: Any) -> bytes:
    """A record's line, possibly changed."""
    content: Any = sound_line(draw(st.sampled_from(measurements()[:KNOWN])))
    what = draw(st.sampled_from(["sound", "fields", "schedule", "schedule", "resources", "text", "deep"]))
    if what == "fields":
        content = draw(changed(content))
    elif what in ("schedule", "resources"):
        content[what] = json.dumps(draw(changed(json.loads(content[what]))))
    elif what == "deep":
        return b'{"a":' * draw(st.integers(1, 50_000)) + b"["
    data = json.dumps(content, ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")
    return draw(torn(data)) if what == "text" else data


@st.composite
def torn(draw: Any, data: bytes) -> bytes:
    """Bytes with some flipped, cut off, repeated, or replaced."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        length = draw(st.sampled_from([1, 1, 2, 4, 16, 512, 4096]))
        what = draw(st.sampled_from(["flip", "flip", "cut", "drop", "repeat", "fill", "insert"]))
        if what == "flip" and data:
            data = data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]
        elif what == "cut":
            data = data[:at]
        elif what == "drop":
            data = data[:at] + data[at + length :]
        elif what == "repeat":
            data = data[:at] + data[at : at + length] * draw(st.integers(2, 30)) + data[at + length :]
        elif what == "fill":
            data = data[:at] + draw(st.sampled_from([b"\0", b"\xff", b"\x5a", b"9", b'"'])) * length + data[at + length :]
        else:
            data = data[:at] + draw(st.binary(max_size=16)) + data[at:]
    return data


@st.composite
def packed(draw: Any, data: bytes) -> bytes:
    """The bytes unchanged, or compressed, possibly in several members, and then possibly damaged."""
    if draw(st.booleans()):
        return data
    middle = draw(st.integers(0, len(data)))
    data = b"".join(gzip.compress(part, 1) for part in ((data,) if draw(st.booleans()) else (data[:middle], data[middle:])))
    return draw(torn(data)) if draw(st.booleans()) else data


@st.composite
def lines(draw: Any) -> Case:
    """A file to import."""
    return {"lines": draw(packed(b"\n".join(draw(st.lists(line(), min_size=1, max_size=4)))))}


@st.composite
def pages(draw: Any) -> Case:
    """A file of records, damaged: mostly in the headers of the file and its pages, which hold lengths and page numbers."""
    data = bytearray(store())
    for _ in range(draw(st.integers(1, 6))):
        page = draw(st.integers(0, len(data) // 4096 - 1))
        at = 4096 * page + draw(st.integers(0, 120) | st.integers(0, 4095) | st.integers(3900, 4095))
        part = draw(st.binary(min_size=1, max_size=4) | st.sampled_from([b"\xff" * 9, b"\0" * 100, b"\x80" * 9]))
        data[at : at + len(part)] = part
    return {"records.sqlite": draw(torn(bytes(data))) if draw(st.integers(0, 3)) == 0 else bytes(data)}


SQL_VALUES = st.sampled_from(
    ["NULL", "0", "-1", "1e999", "-9223372036854775808", "9223372036854775807", "1e-320", "''", "x'00'", "x'ff'", "CAST(x'ff' AS TEXT)", "zeroblob(100000)",
     "hex(zeroblob(300000))", "hex(zeroblob(4500000))", "char(27) || '[2J'", "char(0)", "replace(schedule, '16', '0')", "replace(schedule, '8', '1.5')",
     "replace(schedule, '1', '99999999999999999999')", "'{\"type\": \"RowReductionSchedule\"}'", "replace(hex(zeroblob(40000)), '0', '[')", "date || 'x'", "schedule", "reason"]
)  # fmt: skip
SCHEMAS = (
    "CREATE VIEW more AS SELECT * FROM measurements", "CREATE TABLE sqlite_stat9 (a)", "CREATE TABLE music (name TEXT)", "ANALYZE",
    "CREATE TRIGGER t AFTER INSERT ON measurements BEGIN DELETE FROM measurements; END", "CREATE VIRTUAL TABLE f USING fts5(a)", "DROP INDEX of_a_region",
    "CREATE TRIGGER t BEFORE INSERT ON measurements BEGIN SELECT RAISE(ABORT, 'no'); END", "ALTER TABLE measurements ADD COLUMN more TEXT",
    "CREATE INDEX other ON measurements (abs(count))", "PRAGMA user_version=0", "PRAGMA user_version=1", "PRAGMA user_version=99", "PRAGMA user_version=-1", "PRAGMA application_id=9",
    "PRAGMA journal_mode=DELETE", "PRAGMA auto_vacuum=FULL", "VACUUM", "DROP TABLE measurements", "DELETE FROM measurements",
    "UPDATE sqlite_master SET sql = replace(sql, 'TEXT NOT NULL', 'BLOB') WHERE name = 'measurements'",
    "UPDATE sqlite_master SET sql = replace(sql, 'reason TEXT', 'reason TEXT AS (hex(zeroblob(1000000000)))') WHERE name = 'measurements'",
    "UPDATE sqlite_master SET rootpage = 1 WHERE name = 'measurements'", "UPDATE sqlite_master SET rootpage = 3", "UPDATE sqlite_master SET rootpage = 99999",
    "UPDATE sqlite_master SET type = 'view' WHERE name = 'measurements'", "DELETE FROM sqlite_master WHERE name = 'of_a_region'",
    "UPDATE sqlite_master SET sql = 'CREATE TABLE measurements (' WHERE name = 'measurements'", "UPDATE sqlite_master SET name = 'x' || char(0)",
)  # fmt: skip


@st.composite
def statements(draw: Any) -> Case:
    """A file of records changed by SQL statements of a stranger."""
    update = st.builds(
        "UPDATE measurements SET {} = {} WHERE count = {}".format, st.sampled_from(("identity", *COLUMNS)), SQL_VALUES, st.sampled_from([1, 4])
    )
    done = draw(st.lists(update, min_size=1, max_size=3) | st.lists(st.sampled_from(SCHEMAS), min_size=1, max_size=2))
    return {"statements": json.dumps(done).encode()}


LAYER = {"name": "one", "outputs": 16, "channels": 8, "height": 6, "width": 5, "filter": 3, "stride": 1, "batch": 2, "groups": 2, "dilation": 1}


@lru_cache
def measured_layer() -> Any:
    layer = {name: LAYER[name] for name in ("name", *dataset.LAYER_FIELDS)}
    schedule = json.loads(measurements()[0].schedule)
    kind = schedule.pop("type")
    columns = {**{name: [value] * 2 for name, value in schedule.items()}, "seconds": [1e-5, 2e-5], "spread": [1e-7, 0.0], "rounds": [4, 9]}
    return {
        "layer": layer,
        "machine": "h200",
        "environment": {"gpu": "GPU"},
        "mode": "cold",
        "schemas": {kind: columns},
        "failures": [["one", "why"]],
    }


@st.composite
def layers(draw: Any) -> Case:
    """A list of layers, or a file of measured layers."""
    if draw(st.booleans()):
        data = json.dumps(draw(changed([LAYER, {**LAYER, "name": "two"}]))).encode()
        return {"layers.json": draw(torn(data)) if draw(st.booleans()) else data}
    found = [json.dumps(draw(changed(measured_layer()) | st.just(measured_layer()))).encode() for _ in range(draw(st.integers(1, 3)))]
    return {"measured": draw(packed(b"\n".join(found)))}


def cases() -> st.SearchStrategy[Case]:
    return lines() | pages() | statements() | layers()


# Reading them


def prepare() -> None:
    """Prepares what every case needs once: ranking and lowering take most of the time."""
    store()
    warnings.simplefilter("ignore")
    known, lowered = {entry.schedule: entry.code for entry in measurements()}, tuning.current_code
    tuning.rank = lambda *problem: ranking()  # type: ignore[attr-defined]
    tuning.current_code = lambda problem, schedule, target: known.get(serialisation.schedule_text(schedule)) or lowered(problem, schedule, target)  # type: ignore[assignment]


def run() -> None:
    os.environ["TILEWRIGHT_CACHE"] = str(Path("cache").absolute())
    default_path().parent.mkdir()
    if Path("lines").exists():
        imported()
    elif Path("layers.json").exists():
        read_layers(Path("layers.json"))
    elif Path("measured").exists():
        dataset.without_remains(Path("measured"))
        dataset.read(Path("measured"))
    else:
        if Path("statements").exists():
            default_path().write_bytes(store())
            with closing(sqlite3.connect(default_path(), isolation_level=None)) as connection:
                connection.execute("PRAGMA writable_schema=ON")
                for statement in json.loads(Path("statements").read_bytes()):
                    try:
                        connection.execute(statement)
                    except sqlite3.Error:  # two statements that conflict
                        continue
        else:
            os.rename("records.sqlite", default_path())
        opened()


def imported() -> None:
    default_path().write_bytes(store())
    with Records() as records:
        before = list(records.all())
        try:
            new = records.import_lines("lines")
        except CacheError:
            new = 0
            if list(records.all()) != before:
                raise Broken("a refused file was imported in part") from None
            raise
        finally:
            if missing := set(before) - set(records.all()):
                raise Broken(f"lost: {missing}")
        if len(set(records.all())) != len(records) or len(records) != len(before) + new:
            raise Broken("what was imported is not what is there")
        choose(records)


def opened() -> None:
    """Opens the file as a compilation does, as tuning does, and by name."""
    content = default_path().read_bytes()
    known = readable()
    with chooser_for(H200, None) as (chooser, _):
        check(chooser(PROBLEM, H200, 1))
    kept = [path.read_bytes() for path in default_path().parent.glob("records.sqlite*") if not path.name.endswith(("-wal", "-shm"))]
    if content not in kept:
        raise Broken("the file is neither where it was nor set aside")
    new = measurements()[0]
    with Records() as records:
        aside = [path for path in default_path().parent.glob("*damaged-*") if path.read_bytes() == content]
        records.add([new])
        found = list(records.all())
        if new not in found:
            raise Broken("what was added is not there")
        if not aside and (missing := set(known) - set(found)):
            raise Broken(f"lost: {missing}")
        choose(records)


def readable() -> list[Measurement]:
    """The readable measurements of a copy."""
    Path("copy").write_bytes(default_path().read_bytes())
    try:
        with Records("copy", write=False) as records:
            return list(records.all())
    except CacheError:
        return []


def choose(records: Records) -> None:
    check(from_records(records)(PROBLEM, H200, 1))
    records.export_lines("exported")
    with Records("other.sqlite") as other:
        other.import_lines("exported")
        if set(other.all()) != set(records.all()):
            raise Broken("what was exported does not come back")


def check(choice: Any) -> None:
    if ranking().find(choice.schedule) is None:
        raise Broken(f"chosen and no candidate: {choice.schedule}")
