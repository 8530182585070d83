"""Request bodies stored as parent + suffix."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_mitm.journal import grow, outline, shrink

KEYS = st.sampled_from(["messages", "tools", "model", "$", "$same", "$shared", "$$same", ""]) | st.text(max_size=3)
SCALARS = st.none() | st.booleans() | st.integers(-2, 2) | st.floats(allow_nan=False) | st.text(max_size=3)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=2))
BODIES = st.dictionaries(KEYS, VALUES, max_size=5)


def text(body: dict[str, Any]) -> str:
    return json.dumps({key: body[key] for key in sorted(body)})


@settings(deadline=None)
@given(BODIES, st.none() | BODIES)
def test_grow_undoes_shrink(body: dict[str, Any], parent: dict[str, Any] | None):
    """Any body comes back from any parent, to the type of every number, also through JSON text."""
    assert text(grow(json.loads(json.dumps(shrink(body, outline(parent or {})))), parent)) == text(body)


@settings(deadline=None)
@given(BODIES, *[st.lists(VALUES, max_size=3)] * 3)
def test_grow_undoes_shrink_of_a_history(parent: dict[str, Any], kept: list[Any], old: list[Any], new: list[Any]):
    """A body whose history goes on, or branches off its parent's, comes back."""
    parent, body = parent | {"messages": kept + old}, parent | {"messages": kept + new}
    assert text(grow(shrink(body, outline(parent)), parent)) == text(body)


def test_a_next_turn_costs_its_new_messages():
    """Unchanged keys are named, a longer history is its new items."""
    parent = {"model": "m", "tools": [{"name": "sh"}], "messages": [{"u": 1}, {"a": 2}], "stream": True}
    body = parent | {"messages": [{"u": 1}, {"a": 2}, {"u": 3}], "stream": False}
    assert shrink(body, outline(parent)) == {
        "$same": ["model", "tools"],
        "$shared": {"messages": 2},
        "messages": [{"u": 3}],
        "stream": False,
    }


def test_an_edited_history_shares_what_comes_before_the_edit():
    """A fork stores its history from the first item that differs."""
    body = shrink({"messages": ["a", "b", "X"]}, outline({"messages": ["a", "b", "c", "d"]}))
    assert body == {"$shared": {"messages": 2}, "messages": ["X"]}


def test_true_is_not_one():
    """Values that Python calls equal and JSON does not are not shared."""
    body = {"a": True, "b": 1.0, "c": [1]}
    assert shrink(body, outline({"a": 1, "b": 1, "c": [True]})) == body


def test_grow_needs_the_parent_that_shrink_had():
    """A missing parent is named, not guessed."""
    with pytest.raises(ValueError, match="'model'"):
        grow({"$same": ["model"]}, None)


def test_an_outline_costs_a_hash_for_each_item():
    """A list whose first item is long costs no more than one of a short item."""
    assert {key: len(marks) for key, marks in outline({"m": ["x" * 9_999, "y"], "s": "z", "e": []}).items()} == {
        "m": 33, "s": 16, "e": 1,
    }  # fmt: skip
