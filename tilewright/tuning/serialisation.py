"""Conversion of problems, schedules and machines to plain JSON values and back.

A value becomes a table: each dataclass instance is one row, [type, field to value], and occurrences of it are {"row": number}; shared subexpressions
share a row. Tuples become lists, sets {"set": sorted}, mappings {"map": pairs}. Decoding instantiates only the dataclasses listed here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from tilewright.files import json_of
from tilewright.hardware.machine import Cache, Machine
from tilewright.ir.computation import Step
from tilewright.ir.expr import Apply, Const, Load, Var
from tilewright.ir.graph import Value
from tilewright.ir.layout import Layout
from tilewright.ir.library import Attention, Convolution, LibraryCall, Pooling, Product, Softmax, View
from tilewright.ir.problem import Problem
from tilewright.ir.region import Region, Storage
from tilewright.kernels.registry import schedule_types
from tilewright.partition.apart import Apart
from tilewright.partition.judges import SCHEDULES

_PROBLEMS = (Apply, Const, Load, Var, Step, Value, Layout, Region, Storage, Problem, Machine, Cache)
_LIBRARY = (LibraryCall, View, Convolution, Product, Attention, Pooling, Softmax)
_TYPES: Mapping[str, type] = MappingProxyType({kind.__name__: kind for kind in (*_PROBLEMS, *_LIBRARY)})
MOST_PARAMETERS = 64
"""Maximum parameters of a schedule, and elements of a parameter."""


def encode(value: Any) -> dict[str, Any]:
    """The value as {"rows": table, "root": the value in terms of the table}.

    Raises:
        TypeError: for an object that is neither plain nor one of the known dataclasses.
    """
    rows: list[list[Any]] = []
    known: dict[int, int] = {}
    kept: list[Any] = []  # keeps the objects alive, so that their ids stay unique

    def encoded(item: Any) -> Any:
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        if isinstance(item, (tuple, list)):
            return [encoded(part) for part in item]
        if isinstance(item, frozenset):
            return {"set": [encoded(part) for part in sorted(item)]}
        if isinstance(item, Mapping):
            return {"map": [[encoded(key), encoded(part)] for key, part in item.items()]}
        name = type(item).__name__
        if not is_dataclass(item) or _type_of(name) is not type(item):
            raise TypeError(f"a {name} has no plain form")
        if id(item) not in known or isinstance(item, Const):  # equal constants may be one object or not, which digests must not tell
            content = {field.name: encoded(getattr(item, field.name)) for field in fields(item) if field.init and not _omitted(item, field)}
            known[id(item)] = len(rows)
            kept.append(item)
            rows.append([name, content])
        return {"row": known[id(item)]}

    root = encoded(value)
    return {"rows": rows, "root": root}


def _omitted(item: Any, field: Field[Any]) -> bool:
    """Whether the field is left out: it was added after the first digests were recorded, and has the value that those items had."""
    return "omitted" in field.metadata and getattr(item, field.name) == field.metadata["omitted"]


def decode(data: Any) -> Any:
    """Inverse of `encode`; lists become tuples.

    Raises:
        ValueError, KeyError, TypeError: for data that `encode` did not produce.
    """
    made: list[Any] = []

    def decoded(item: Any) -> Any:
        if isinstance(item, list):
            return tuple(decoded(part) for part in item)
        if not isinstance(item, dict):
            return item
        ((kind, content),) = item.items()
        if kind == "row":
            return made[content]
        return frozenset(decoded(content)) if kind == "set" else {decoded(key): decoded(part) for key, part in content}

    for name, content in data["rows"]:
        kind = _type_of(name)
        if kind is None:
            raise ValueError(f"the type {name!r} is not known")
        made.append(kind(**{field: decoded(part) for field, part in content.items()}))
    return decoded(data["root"])


def _type_of(name: str) -> type | None:
    return _TYPES.get(name) or schedule_types().get(name)


def _schedule_types() -> Mapping[str, type]:
    """The types of schedules by name: those of regions, and those of chains."""
    return {**schedule_types(), **{kind.__name__: kind for kind in SCHEDULES}}


def schedule_text(schedule: Any) -> str:
    """One line of JSON with the schedule's type and its parameters; equal schedules have equal texts. An axis that came after schedules were
    recorded is left out at the value that these had."""
    return json.dumps(_content(schedule))


def _content(schedule: Any) -> dict[str, Any]:
    if isinstance(schedule, Apart):
        return {"type": Apart.__name__, "schedules": [_content(part) for part in schedule.schedules]}
    content = {field.name: getattr(schedule, field.name) for field in fields(schedule) if not _omitted(schedule, field)}
    return {"type": type(schedule).__name__, **content}


def schedule_of(text: str) -> Any:
    """Inverse of `schedule_text`.

    Raises:
        ValueError, KeyError, TypeError: if the text is not a schedule, or its schema or a parameter no longer exists.
    """
    return _schedule(json_of(text))


def _schedule(content: dict[str, Any]) -> Any:
    name = content.pop("type")
    if name == Apart.__name__:
        return Apart(tuple(map(_schedule, content["schedules"])))
    kind = _schedule_types()[name]
    return kind(**{name: tuple(item) if isinstance(item, list) else item for name, item in content.items()})


def least_parameters(name: str) -> Mapping[str, int]:
    """The minimum value of each parameter of the schedule type `name` in any space. It is 0 if the default is 0 (feature off) or the parameter is a
    boolean, otherwise 1. Empty for an unknown type."""
    known = _schedule_types().get(name)
    return {} if known is None else _least(known)


@lru_cache
def _least(kind: type) -> Mapping[str, int]:
    return MappingProxyType({field.name: int(field.default != 0 and field.type != "bool") for field in fields(kind)})


def check_schedule_text(text: str) -> None:
    """Rejects text that is not a schedule, and parameters that no space contains: empty tiles, negative counts or counts beyond 32 bits. For an
    unknown schema or parameter only the form is checked: another release may know it.

    Raises:
        ValueError: names the parameter.
    """
    content = json_of(text)
    parts = content.get("schedules") if isinstance(content, dict) and content.get("type") == Apart.__name__ else None
    for part in parts if isinstance(parts, list) and 0 < len(parts) <= MOST_PARAMETERS else [content]:
        _check_content(part)  # refuses objects among parameters, and so an `Apart` of others


def _check_content(content: Any) -> None:
    """Rejects what is no schedule by itself; see `check_schedule_text`."""
    if not isinstance(content, dict) or not isinstance(content.get("type"), str) or len(content) > MOST_PARAMETERS:
        raise ValueError("the schedule is no object with a type")
    least_values = least_parameters(content["type"])
    for name, value in content.items():
        parts = value if isinstance(value, list) else [value]
        least = least_values.get(name, 0)
        good = (isinstance(part, (bool, str)) or (type(part) is int and least <= part < 1 << 31) for part in parts)
        if len(parts) > MOST_PARAMETERS or not all(good):
            raise ValueError(f"the schedule's {name[:40]} is {str(value)[:40]}")


def digest(value: Any) -> str:
    """Twenty hexadecimal digits that identify the value's plain form."""
    return hashlib.sha256(json.dumps(encode(value), sort_keys=True).encode()).hexdigest()[:20]
