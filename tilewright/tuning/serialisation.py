"""Problems, schedules and machines as plain JSON values and back, whatever dataclasses they are made of.

A value becomes a table: each dataclass instance is one row, [type, field to value], and is named where it occurs as {"row": number}; expressions that
share a part share its row. Tuples become lists, sets {"set": sorted}, mappings {"map": pairs}. Decoding makes nothing but the dataclasses listed
here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from tilewright.files import json_of
from tilewright.hardware.machine import Cache, Machine
from tilewright.ir.computation import Step
from tilewright.ir.expr import Apply, Const, Load, Var
from tilewright.ir.graph import Value
from tilewright.ir.layout import Layout
from tilewright.ir.problem import Problem
from tilewright.ir.region import Region, Storage
from tilewright.kernels.registry import schedule_types

_TYPES: Mapping[str, type] = MappingProxyType(
    {kind.__name__: kind for kind in (Apply, Const, Load, Var, Step, Value, Layout, Region, Storage, Problem, Machine, Cache)}
)
MOST_PARAMETERS = 64
"""Of a schedule."""


def encode(value: Any) -> dict[str, Any]:
    """The value as {"rows": table, "root": what it is in terms of the table}.

    Raises:
        TypeError: for what is neither plain nor one of the known dataclasses.
    """
    rows: list[list[Any]] = []
    known: dict[int, int] = {}
    kept: list[Any] = []  # an identity stays its own as long as the object lives

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
        if id(item) not in known:
            content = {field.name: encoded(getattr(item, field.name)) for field in fields(item) if field.init}
            known[id(item)] = len(rows)
            kept.append(item)
            rows.append([name, content])
        return {"row": known[id(item)]}

    root = encoded(value)
    return {"rows": rows, "root": root}


def decode(data: Any) -> Any:
    """What `encode` was given, lists as tuples.

    Raises:
        ValueError, KeyError, TypeError: for data that `encode` did not make.
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


def schedule_text(schedule: Any) -> str:
    """One line of JSON that names the schedule's type and every parameter; equal schedules have equal texts."""
    return json.dumps({"type": type(schedule).__name__, **{field.name: getattr(schedule, field.name) for field in fields(schedule)}})


def schedule_of(text: str) -> Any:
    """The schedule of a text of `schedule_text`.

    Raises:
        ValueError, KeyError, TypeError: where it is none, or of a schema or a parameter that no longer exists.
    """
    content = json_of(text)
    kind = schedule_types()[content.pop("type")]
    return kind(**{name: tuple(item) if isinstance(item, list) else item for name, item in content.items()})


def least_parameters(name: str) -> Mapping[str, int]:
    """The least value of each parameter of a schema in any space, by the name of its schedules: 0 where that is the default and turns something off,
    else 1. Nothing for a schema that there is not."""
    known = schedule_types().get(name)
    return {} if known is None else _least(known)


@lru_cache
def _least(kind: type) -> Mapping[str, int]:
    return MappingProxyType({field.name: int(field.default != 0 and field.type != "bool") for field in fields(kind)})


def check_schedule_text(text: str) -> None:
    """Refuses what no schedule is written as, and parameters that no space holds: a tile of nothing, counts below zero or beyond 32 bits. A text
    with a schema or parameter that there is not only has to be of that form: another release may know it.

    Raises:
        ValueError: naming the parameter.
    """
    content = json_of(text)
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
    """Twenty hexadecimal digits of the value's plain form."""
    return hashlib.sha256(json.dumps(encode(value), sort_keys=True).encode()).hexdigest()[:20]
