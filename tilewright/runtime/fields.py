"""``Field``: a value of parsed JSON that knows its place and is read as one type, within bounds.

Data that no encoder produced raises a ValueError that names the place::

    program = parsed(data, "manifest.json")
    for region in program["regions"].items(MOST_REGIONS): region["repeat"].integer(1, MOST_STEPS)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tilewright.files import json_of

MOST_DEPTH = 100
"""Levels of nesting; trees of arguments and nested loops need about ten."""
MOST_TEXT, MOST_NAME = 1 << 20, 1 << 12
"""Maximum characters of one text, and of one name."""
MOST_ITEMS = 1 << 20
"""Maximum elements of a list or an object."""


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters that text for people must not contain: all except line ends and tabs."""


class Field:
    """One JSON value. `parent` and `key` give its position."""

    __slots__ = ("depth", "key", "parent", "value")

    def __init__(self, value: Any, key: str | int, parent: Field | None = None) -> None:
        self.value, self.key, self.parent = value, key, parent
        self.depth: int = parent.depth + 1 if parent is not None else 0
        if self.depth > MOST_DEPTH:
            raise ValueError(f"it is nested more than {MOST_DEPTH} levels deep")

    @property
    def place(self) -> str:
        """The path of the value, such as `manifest.json: program.regions[3].repeat`."""
        keys = []
        field: Field | None = self
        while field is not None:
            keys.append(field.key)
            field = field.parent
        text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in reversed(keys[:-1]))
        return f"{keys[-1]}{': ' if text else ''}{text.removeprefix('.')}"

    def wrong(self, expected: str) -> ValueError:
        """The error for a value that differs from what is expected."""
        shown = repr(self.value)
        return ValueError(f"{self.place} is {shown if len(shown) <= 60 else shown[:57] + '...'}, not {expected}")

    def _object(self) -> dict[str, Any]:
        if not isinstance(self.value, dict) or len(self.value) > MOST_ITEMS:
            raise self.wrong("an object")
        return self.value

    def __getitem__(self, key: str) -> Field:
        """A field of an object."""
        found = self._object()
        if key not in found:
            raise ValueError(f"{self.place} has no {key!r}")
        return Field(found[key], key, self)

    def only(self, *keys: str) -> Field:
        """This object, after a check that it has exactly these fields."""
        different = set(self._object()) ^ set(keys)
        if different:
            name = min(different)
            raise ValueError(f"{self.place} {'has the unknown field' if name in self.value else 'has no'} {name!a}")
        return self

    def entries(self, most: int = MOST_ITEMS) -> Iterator[tuple[str, Field]]:
        """The fields of an object whose names are arbitrary."""
        if len(self._object()) > most:
            raise ValueError(f"{self.place} has {len(self.value)} fields, more than {most}")
        return ((key, Field(value, key, self)) for key, value in self.value.items())

    def items(self, most: int = MOST_ITEMS, least: int = 0) -> list[Field]:
        """The elements of a list."""
        if not isinstance(self.value, list) or not least <= len(self.value) <= most:
            raise self.wrong(f"a list of {least if least == most else f'{least} to {most}'} elements")
        return [Field(value, index, self) for index, value in enumerate(self.value)]

    def exactly(self, count: int) -> list[Field]:
        """The elements of a list of this length."""
        return self.items(count, count)

    def integer(self, least: int, most: int) -> int:
        if type(self.value) is not int or not least <= self.value <= most:
            raise self.wrong(f"a whole number from {least} to {most}")
        return self.value

    def integers(self, least: int, most: int, count: int = MOST_ITEMS) -> tuple[int, ...]:
        """A list of integers."""
        if not isinstance(self.value, list) or len(self.value) > count or not all(type(x) is int and least <= x <= most for x in self.value):
            raise self.wrong(f"a list of at most {count} whole numbers from {least} to {most}")
        return tuple(self.value)

    def number(self) -> float:
        """A finite number."""
        if type(self.value) not in (int, float) or not -1e300 <= self.value <= 1e300:
            raise self.wrong("a number")
        return float(self.value)

    def flag(self) -> bool:
        if type(self.value) is not bool:
            raise self.wrong("true or false")
        return self.value

    def text(self) -> str:
        if type(self.value) is not str or len(self.value) > MOST_TEXT:
            raise self.wrong("a text")
        return self.value

    def prose(self) -> str:
        """Text for people, without characters that would control a terminal."""
        text = self.text()
        if CONTROL.search(text):
            raise self.wrong("a text without control characters")
        return text

    def name(self) -> str:
        """Text that fits into an error message of one line."""
        text = self.text()
        if not text.isprintable() or len(text) > MOST_NAME:
            raise self.wrong("a name")
        return text

    def names(self) -> tuple[str, ...]:
        return tuple(item.name() for item in self.items())

    def choice(self, *values: Any) -> Any:
        """The value, which must equal one of `values` and have the same type."""
        if not any(self.value == value and type(self.value) is type(value) for value in values):
            raise self.wrong("one of " + ", ".join(map(repr, values)))
        return self.value

    def optional(self) -> Field | None:
        """The field, or None for null."""
        return None if self.value is None else self


def parsed(data: bytes, name: str) -> Field:
    """The JSON of a file. Raises ValueError, as `tilewright.files.json_of` does."""
    try:
        return Field(json_of(data), name)
    except ValueError as error:
        raise ValueError(f"{name} is damaged: {error}") from error
