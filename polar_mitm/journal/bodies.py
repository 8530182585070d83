"""Request bodies as parent + suffix, so that a session costs its length and not the sum over its turns.

Invariant: grow(shrink(body, outline(parent)), parent) == body for all JSON objects, to the type of every number. Pure.
This module does not look inside list items or nested objects: histories grow at the end of a top-level list.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

Body = dict[str, Any]  # Any: JSON values
Outline = dict[str, bytes]
"""What can be told of a body by hashes: for each key the value's, or those of a list's items one after the other."""

_MARK = 16  # bytes of a hash
_LIST = b"["  # before the hashes of a list's items


def outline(body: Body) -> Outline:
    """The outline of a body, 16 bytes for each key or item of a list: enough to `shrink` the bodies that follow it."""
    return {key: _LIST + b"".join(map(_mark, v)) if isinstance(v, list) else _mark(v) for key, v in body.items()}


def shrink(body: Body, parent: Outline | None, own: Outline | None = None) -> Body:
    """A request body without what it shares with its parent's body; `grow` puts that back. `own` is its own outline.

    Under `$same` stand the keys whose values are the parent's, under `$shared` how many leading items of a list
    are. A key of the body that itself starts with `$` gets a second one.
    """
    parent = parent or {}
    same: list[str] = []
    shared: dict[str, int] = {}
    rest: Body = {}
    for key, marks in (own or outline(body)).items():
        if key not in parent:
            continue
        if marks == parent[key]:
            same.append(key)
        elif n := _common(marks, parent[key]):
            shared[key] = n
    for key in (key for key in body if key not in same):
        rest[_escaped(key)] = body[key][shared[key] :] if key in shared else body[key]
    return ({"$same": same} if same else {}) | ({"$shared": shared} if shared else {}) | rest


def grow(shrunk: Body, parent: Body | None) -> Body:
    """The body that `shrink` was given with this `parent`, itself grown; its keys may come in another order.

    Raises ValueError when `parent` lacks what the body shares with it.
    """
    parent = parent or {}
    same, shared = shrunk.get("$same", []), shrunk.get("$shared", {})
    missing = [key for key in (*same, *shared) if key not in parent]
    if missing:
        raise ValueError(
            f"the body takes {missing!r} from its parent's, which has no such keys: give the parent's body"
        )
    rest = {key.removeprefix("$"): value for key, value in shrunk.items() if key not in ("$same", "$shared")}
    lists = {key: parent[key][:n] + rest[key] for key, n in shared.items()}
    return {key: parent[key] for key in same} | rest | lists


def _escaped(key: str) -> str:
    return f"${key}" if key.startswith("$") else key


def _mark(value: Any) -> bytes:  # Any: a JSON value
    """Hash of its JSON text: unlike `==`, tells true from 1 and 1 from 1.0."""
    return blake2b(json.dumps(value).encode(), digest_size=_MARK).digest()


def _common(one: bytes, other: bytes) -> int:
    """How many leading items two lists share; 0 when either is no list."""
    if len(one) == _MARK or len(other) == _MARK:
        return 0
    places = range(len(_LIST), min(len(one), len(other)), _MARK)
    return next((n for n, i in enumerate(places) if one[i : i + _MARK] != other[i : i + _MARK]), len(places))
