"""Reading a request's JSON: every field with its type, every mistake a BadRequest that names the field and the value.

Invariant: whatever JSON comes in, reading raises BadRequest or nothing. A `Fields` remembers what was asked for, so
that what nobody read can be listed. This module knows no protocol.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

from polar_mitm.errors import BadRequest


class Fields:
    """A JSON object with the path to it; null and absent are the same."""

    def __init__(self, value: object, path: str = "") -> None:
        """Raises BadRequest when `value` is not an object."""
        if not isinstance(value, Mapping):
            raise BadRequest(f"{path or 'body'}: expected an object, got {_shown(value)}", field=path or None)
        self._values = cast("Mapping[str, Any]", value)  # Any: JSON enters here
        self._read: set[str] = set()
        self.path = path
        """Where the object stands in the request; '' for the request itself."""

    def at(self, name: str) -> str:
        """The path of a field of this object."""
        return f"{self.path}.{name}" if self.path else name

    def value(self, name: str) -> Any:  # Any: JSON; the callers below give it a type
        """The field as it came; None when absent."""
        self._read.add(name)
        return self._values.get(name)

    def text(self, name: str) -> str:
        """A string that must be there."""
        return self._wanted(name, self.maybe_text(name), "a string")

    def maybe_text(self, name: str) -> str | None:
        """A string, or None."""
        value = self.value(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "expected a string")
        return value

    def flag(self, name: str) -> bool:
        """A boolean; False when absent."""
        value = self.value(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "expected true or false")
        return bool(value)

    def integer(self, name: str, least: int | None = None) -> int | None:
        """An integer of at least `least`, or None."""
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, "expected an integer")
        if least is not None and value < least:
            raise self.wrong(name, f"must be at least {least}")
        return value

    def number(self, name: str) -> float | None:
        """A finite number, or None."""
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise self.wrong(name, "expected a number")
        return float(value)

    def child(self, name: str) -> Fields | None:
        """An object, or None."""
        value = self.value(name)
        return None if value is None else Fields(value, self.at(name))

    def wanted_child(self, name: str) -> Fields:
        """An object that must be there."""
        return self._wanted(name, self.child(name), "an object")

    def items(self, name: str) -> list[Any]:  # Any: JSON
        """An array as it came; empty when absent."""
        value = self.value(name)
        if value is not None and not isinstance(value, list):
            raise self.wrong(name, "expected an array")
        return cast("list[Any]", value or [])

    def children(self, name: str) -> list[Fields]:
        """An array of objects; empty when absent."""
        return [Fields(item, f"{self.at(name)}[{index}]") for index, item in enumerate(self.items(name))]

    def texts(self, name: str) -> tuple[str, ...]:
        """An array of strings, none of them empty; empty when absent."""
        items = self.items(name)
        if not all(isinstance(item, str) and item for item in items):
            raise self.wrong(name, "expected strings that are not empty")
        return tuple(items)

    def found(self, path: str) -> Iterator[tuple[Fields, str]]:
        """Where a dotted path says something: the objects, through objects and arrays, and the field's name in each.

        A part `name[kind]` stands for the objects in `name` whose `type` is `kind`; at the end of the path it gives
        these objects themselves, with "type". Looking counts as no reading. What has another shape is not found.
        """
        head, _, rest = path.partition(".")
        name, _, kind = head.removesuffix("]").partition("[")
        if not rest and not kind:
            if self._values.get(name) is not None:
                yield self, name
            return
        wanted = rest.partition(".")[0].partition("[")[0] if rest else "type"
        for child in self._inner(name, kind, wanted):
            yield from child.found(rest) if rest else ((child, "type"),)

    def _inner(self, name: str, kind: str, wanted: str) -> Iterator[Fields]:
        """The objects of a field that are of a kind ('' for any) and have the field `wanted`."""
        value = self._values.get(name)
        if isinstance(value, list):
            several = ((f"[{i}]", item) for i, item in enumerate(cast("list[Any]", value)))  # Any: JSON
        else:
            several = iter((("", value),))
        for place, item in several:
            if isinstance(item, Mapping) and wanted in item and (not kind or item.get("type") == kind):
                yield Fields(item, f"{self.at(name)}{place}")

    def schema(self, name: str) -> str | None:
        """An object as compact JSON text with its keys in their order, or None."""
        child = self.child(name)
        return None if child is None else compact(self._values[name])

    def refuse(self, name: str, remedy: str) -> None:
        """Refuse the field unless it is null, absent, false, zero or empty."""
        if self.value(name):
            raise self.wrong(name, f"not supported: {remedy}")

    def wrong(self, name: str, problem: str) -> BadRequest:
        """The error to raise about a field."""
        return BadRequest(f"{self.at(name)}: {problem}, got {_shown(self._values.get(name))}", field=self.at(name))

    def unread(self, ignored: Collection[str] = ()) -> tuple[str, ...]:
        """Names of the fields that say something and were never asked for, and of those in `ignored`."""
        return tuple(n for n, v in self._values.items() if v is not None and (n in ignored or n not in self._read))

    def _wanted[T](self, name: str, value: T | None, kind: str) -> T:
        if value is None:
            raise BadRequest(f"{self.at(name)}: missing, expected {kind}", field=self.at(name))
        return value


def compact(value: object) -> str:
    """JSON text without spaces, keys in their order, non-ASCII as it is."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float: no parameter of a request is one
        return False


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."
