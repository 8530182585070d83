"""The fields of one task as they stand in a file: each is taken once, by its type, and what is left is told.

Invariant: a wrong value is refused with file, field, value and remedy; nothing is guessed or converted silently. It
knows no format.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Never

from polar_toolkit.errors import Refusal

_ID = re.compile(r"[A-Za-z0-9._-]{1,80}")
_LONGEST_ID = 80


class Fields:
    """A table of a file."""

    def __init__(self, where: str, values: Mapping[str, Any], table: str = "") -> None:  # Any: TOML or JSON
        """`where` names the file, and the row. A null of JSON or Parquet is a field that is not there."""
        self.where = where
        self._values = {name: value for name, value in values.items() if value is not None}
        self._table = table
        self._tables: list[Fields] = []

    def text(self, *names: str, default: str | None = None) -> str:
        """A string, under the first of several names that is there."""
        return self._of(str, "write a string", default, *names)

    def number(self, name: str, default: float) -> float:
        """A finite number, more than 0."""
        value = self._of((int, float), "write a number more than 0", default, name)
        if isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            self.refuse(name, value, "write a number more than 0")
        return value

    def count(self, name: str, default: int | None) -> int | None:
        """A whole number, more than 0."""
        if name not in self._values and default is None:
            return None
        value = self._of(int, "write a whole number more than 0", default, name)
        if isinstance(value, bool) or value <= 0:
            self.refuse(name, value, "write a whole number more than 0")
        return value

    def words(self, *names: str, default: tuple[str, ...] | None = ()) -> tuple[str, ...]:
        """A list of strings."""
        found = self._of((list, tuple), "write a list of strings", default, *names)
        for word in found:
            if not isinstance(word, str):
                self.refuse(names[0], word, "write a list of strings")
        return tuple(found)

    def texts(self, name: str) -> dict[str, str]:
        """A table of strings."""
        found = self._of(dict, "write a table of strings", {}, name)
        for key, text in found.items():
            if not isinstance(text, str):
                self.refuse(f"{name}.{key}", text, "write a string")
        return found

    def one_of(self, name: str, choices: tuple[str, ...], default: str) -> str:
        """One of a few words."""
        value = self.text(name, default=default)
        return value if value in choices else self.refuse(name, value, f"it is one of {', '.join(choices)}")

    def table(self, name: str) -> Fields:
        """A table within; empty where there is none."""
        path = f"{self._table}.{name}" if self._table else name
        inner = Fields(self.where, self._of(dict, "write a table", {}, name), path)
        self._tables.append(inner)
        return inner

    def tables(self, name: str) -> list[Fields]:
        """A list of tables within."""
        found = self._of(list, "write a list of tables", [], name)
        if not all(isinstance(values, dict) for values in found):
            self.refuse(name, found, "write a list of tables")
        path = f"{self._table}.{name}" if self._table else name
        inner = [Fields(self.where, values, f"{path}[{n}]") for n, values in enumerate(found)]
        self._tables += inner
        return inner

    def take(self, name: str) -> Any:  # Any: TOML or JSON
        """A value of whatever type; None where there is none."""
        return self._values.pop(name, None)

    def has(self, name: str) -> bool:
        """Whether it is there and was not taken."""
        return name in self._values

    def rest(self) -> dict[str, Any]:  # Any: TOML or JSON
        """All that nobody took, of this table alone; it is taken by this."""
        rest, self._values = self._values, {}
        return rest

    def left(self) -> list[str]:
        """The paths of what nobody took, here and in the tables within."""
        own = [f"{self._table}.{name}" if self._table else name for name in self._values]
        return own + [path for inner in self._tables for path in inner.left()]

    def refuse(self, name: str, value: object, remedy: str) -> Never:
        """Raise the Refusal."""
        path = f"{self._table}.{name}" if self._table else name
        said = "is missing" if value is None else f"is {_short(value)}"
        raise Refusal(f"{self.where}: {path} {said}: {remedy}")

    def _of(self, kind: Any, remedy: str, default: Any, *names: str) -> Any:  # Any: types, TOML or JSON
        name = next((name for name in names if name in self._values), names[0])
        value = self._values.pop(name, None)
        if value is None and default is not None:
            return default
        return value if isinstance(value, kind) else self.refuse(name, value, remedy)


def task_id(name: str, fields: Fields) -> str:
    """A task's id as it was given. Raises Refusal when it cannot be one."""
    if not _ID.fullmatch(name):
        fields.refuse("id", name, f"1 to {_LONGEST_ID} letters, digits, '.', '_' or '-'")
    return name


def made_id(name: str) -> str:
    """A task's id made of a foreign name: what cannot stand in one becomes '-', and one too long ends in a digest."""
    made = re.sub(r"[^A-Za-z0-9._-]", "-", name) or "-"
    if len(made) <= _LONGEST_ID:
        return made
    return f"{made[: _LONGEST_ID - 9]}-{blake2b(name.encode(), digest_size=4).hexdigest()}"


def plain(value: Any) -> Any:  # Any: TOML or JSON
    """Metadata as JSON can hold it: dates of TOML become text."""
    return json.loads(json.dumps(value, default=str))


def _short(value: object) -> str:
    said = repr(value)
    return said if len(said) <= 80 else f"{said[:77]}..."
