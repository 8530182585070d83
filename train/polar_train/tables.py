"""A table of a TOML file as a dataclass, whose fields are the keys and whose types say what may stand there.

Invariant: what is wrong is refused with file, key, value and remedy; no value is guessed or converted, but that a path
is relative to the file. It knows no particular dataclass.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from polar_train.errors import BadInput

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FROM_ZERO = ("seed", "max")
"""Keys whose whole number may be 0; any other is at least 1. Numbers that need not be whole are at least 0."""
_UNIONS = (UnionType, Union)


@dataclass(frozen=True, slots=True)
class Table:
    """Some keys of a file and their values."""

    file: Path
    name: str
    """"" for the keys above all tables."""
    values: Mapping[str, Any]  # Any: TOML

    def table(self, key: str) -> Table:
        """A table within; empty where there is none."""
        name = f"{self.name}.{key}" if self.name else key
        return Table(self.file, name, self.value(key, Mapping[str, Any]) if key in self.values else {})

    def fill[T: DataclassInstance](self, kind: type[T], *, beside: Collection[str] = (), **made: object) -> T:
        """A dataclass of the values here, and of `made`, fields that are no keys.

        `beside` are keys that somebody else reads. Raises BadInput for any other that is no field, and for a missing
        one that has no default.
        """
        hints = get_type_hints(kind)
        keys = [one for one in fields(kind) if one.name not in made]
        self.allow([*(one.name for one in keys), *beside])
        read = {
            one.name: self.value(one.name, hints[one.name])
            for one in keys
            if one.name in self.values or (one.default is MISSING and one.default_factory is MISSING)
        }
        return kind(**made, **read)

    def allow(self, keys: Collection[str]) -> None:
        """Raises BadInput for a key that is none of these."""
        for key in self.values:
            if key not in keys:
                raise BadInput(f"{self._where(key)} is no key: {self.name or 'the file'} has {', '.join(sorted(keys))}")

    def value(self, key: str, kind: Any) -> Any:  # Any: a type, and a value of it
        """The value of a key. Raises BadInput when it is missing or not of that type."""
        if key not in self.values:
            raise BadInput(f"{self._where(key)} is missing: add {_meaning(kind, key)}")
        return self._read(key, self.values[key], kind)

    def wrong(self, key: str, remedy: str) -> BadInput:
        """The error to raise for the value of a key."""
        return BadInput(f"{self._where(key)} is {_short(self.values.get(key))}: {remedy}")

    def _where(self, key: str) -> str:
        return f"{str(self.file)!r}: {f'[{self.name}] ' if self.name else ''}{key}"

    def _read(self, key: str, value: Any, kind: Any) -> Any:  # Any: TOML, a type, and a value of it
        origin, inner = get_origin(kind), get_args(kind)
        if origin in _UNIONS:  # TOML has no null: an optional value is left out
            return self._read(key, value, next(one for one in inner if one is not NoneType))
        if origin is None and _fits(key, value, kind):
            return self.file.parent / value if kind is Path else kind(value) if _is_choice(kind) else value
        if origin is tuple and isinstance(value, list) and all(isinstance(one, str) for one in cast(list[Any], value)):
            return tuple(cast(list[str], value))
        if origin is Mapping and isinstance(value, dict):
            table = Table(self.file, f"{self.name}.{key}" if self.name else key, cast(dict[str, Any], value))
            return {name: table.value(name, inner[1]) for name in table.values}
        if origin is Literal and value in inner:
            return value
        raise self.wrong(key, f"write {_meaning(kind, key)}")


def load(file: Path) -> Table:
    """The keys of a file. Raises BadInput when it cannot be read or is no TOML."""
    try:
        return Table(file, "", tomllib.loads(file.read_text("utf-8")))
    except (OSError, ValueError) as error:  # no such file, no UTF-8, or no TOML: said as one sentence
        raise BadInput(f"{str(file)!r} cannot be read as TOML: {error}") from error


def _fits(key: str, value: object, kind: Any) -> bool:  # Any: a type
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind in (bool, Any)
    if kind is int:
        return isinstance(value, int) and value >= _least(key)
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value) and value >= 0
    if _is_choice(kind):
        return value in [one.value for one in kind]
    return kind is Any or (isinstance(value, str) and (kind is str or value != ""))


def _is_choice(kind: Any) -> bool:  # Any: a type
    return isinstance(kind, type) and issubclass(kind, StrEnum)


def _least(key: str) -> int:
    return 0 if key in FROM_ZERO else 1


def _meaning(kind: Any, key: str) -> str:  # Any: a type
    """What may stand in a place of this type, for people."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in _UNIONS:
        return _meaning(next(one for one in inner if one is not NoneType), key)
    if origin is Literal or _is_choice(kind):
        return f"one of {', '.join(repr(str(one)) for one in inner or kind)}"
    plain = {
        tuple: "a list of strings",
        Mapping: "a table",
        bool: "true or false",
        int: f"a whole number of at least {_least(key)}",
        float: "a number of at least 0",
        str: "a string",
        Path: "a path, relative to this file",
    }
    return plain[origin or kind]


def _short(value: object) -> str:
    said = repr(value)
    return said if len(said) <= 200 else f"{said[:197]}..."
