"""The frame of a request: what its dialect's table ignores and refuses, and the Conversation that comes of the rest.

Invariant: the table is what happens - a field that it refuses raises BadRequest before anything is read, a field that
it ignores is listed whenever it says something. This module knows no protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from polar_mitm.conversation import Conversation, Sampling, Tool
from polar_mitm.errors import BadRequest
from polar_mitm.wire.dialect import Support
from polar_mitm.wire.fields import Fields
from polar_mitm.wire.history import History, fidelity


@dataclass(frozen=True, slots=True)
class Choice:
    """Which tools the model may call, and which it must."""

    tools: tuple[Tool, ...]
    forced: str | None = None
    """See Conversation.forced_tool."""


def opened(
    body: Mapping[str, Any],  # Any: JSON
    support: Support,
    unsupported: Callable[[Fields, str], BadRequest],
) -> tuple[Fields, History]:
    """The request and an empty history that lists what is ignored.

    `unsupported` words the refusal of a part by its type, as the provider does. Raises BadRequest.
    """
    request, history = Fields(body), History()
    said: set[str] = set()
    _places(support).look(body, said)
    for path, remedy in support.refused.items():
        for owner, name in request.found(path) if path in said else ():
            if path.endswith("]"):
                raise unsupported(owner, remedy)
            owner.refuse(name, remedy)
    history.ignore(*(path for path in support.ignored if path in said))
    return request, history


def conversation(
    request: Fields, history: History, *, messages: str, choice: Choice, sampling: Sampling, thread: str | None
) -> Conversation:
    """The canonical request; `messages` names the field that must have given at least one. Raises BadRequest."""
    return Conversation(
        model=request.text("model"),
        messages=history.messages(messages),
        tools=choice.tools,
        sampling=sampling,
        stream=request.flag("stream"),
        forced_tool=choice.forced,
        thread=thread,
        echoes=history.echoes,
        fidelity=fidelity(history, request),
    )


@cache
def _places(support: Support) -> _Place:
    """What a dialect looks for, from the request itself on."""
    root = _Place()
    for path in (*support.ignored, *support.refused):
        root.add(path.split("."), path)
    return root


class _Place:
    """What to look for in the objects at one place of a request. A history has thousands: no paths are built here."""

    def __init__(self) -> None:
        self._fields: dict[str, str] = {}
        self._types: dict[str, str] = {}
        self._inner: dict[str, _Place] = {}

    def add(self, steps: list[str], path: str) -> None:
        """Look for the field, or the type of object, at the end of these steps."""
        name, _, kind = steps[0].removesuffix("]").partition("[")
        if len(steps) > 1:
            self._inner.setdefault(name, _Place()).add(steps[1:], path)
        elif kind:
            self._inner.setdefault(name, _Place())._types[kind] = path
        else:
            self._fields[name] = path

    def look(self, value: Mapping[str, Any], found: set[str]) -> None:  # Any: JSON
        """Add what this object says."""
        kind = value.get("type") if self._types else None
        if isinstance(kind, str) and kind in self._types:
            found.add(self._types[kind])
        for name, path in self._fields.items():
            if value.get(name) is not None:
                found.add(path)
        for name, place in self._inner.items():
            inner = value.get(name)
            for item in cast("list[Any]", inner) if isinstance(inner, list) else (inner,):
                if isinstance(item, dict):
                    place.look(cast("dict[str, Any]", item), found)
