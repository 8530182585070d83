"""Request bodies as parent + suffix, so that a session costs its length and not the sum over its turns.

Invariant: grow(shrink(body, parent), parent) == body for all JSON objects, to the type of every number. Pure.
This module does not look inside list items or nested objects: histories grow at the end of a top-level list.
"""

from __future__ import annotations

import json
from typing import Any

Body = dict[str, Any]  # Any: JSON values


def shrink(body: Body, parent: Body | None) -> Body:
    """A request body without what it shares with its parent's body; `grow` puts that back.

    Under `$same` stand the keys whose values are the parent's, under `$shared` how many leading items of a list
    are. A key of the body that itself starts with `$` gets a second one.
    """
    parent = parent or {}
    same: list[str] = []
    shared: dict[str, int] = {}
    rest: Body = {}
    for key, value in body.items():
        if key in parent and _identical(value, parent[key]):
            same.append(key)
            continue
        n = _common(value, parent.get(key))
        if n:
            shared[key] = n
        rest[_escaped(key)] = value[n:] if n else value
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


def _identical(one: Any, other: Any) -> bool:  # Any: JSON values
    """Equal as JSON text: unlike `==`, tells true from 1 and 1 from 1.0."""
    return one == other and json.dumps(one) == json.dumps(other)


def _common(one: Any, other: Any) -> int:  # Any: JSON values
    """How many leading items two lists share; 0 when either is no list."""
    if not isinstance(one, list) or not isinstance(other, list):
        return 0
    n = 0
    for mine, theirs in zip(one, other, strict=False):
        if not _identical(mine, theirs):
            break
        n += 1
    return n
