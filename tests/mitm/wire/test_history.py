"""Building the history of a request."""

import pytest

from polar_mitm.conversation import Message, Text
from polar_mitm.errors import BadRequest
from polar_mitm.wire.fields import Fields
from polar_mitm.wire.history import History, fidelity, joined, kind_of, text_parts

KINDS = {"text": "text", "refusal": "refusal"}


def test_adjacent_assistant_messages_are_one():
    """Only the assistant's are joined."""
    history = History()
    for role, text in [("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"), ("user", "e")]:
        history.add(Message(role, (Text(text),)))
    assert [message.role for message in history.messages("x")] == ["user", "user", "assistant", "user"]
    assert history.messages("x")[2].parts == (Text("c"), Text("d"))


def test_an_empty_history_is_refused():
    """The field that gave no message is named."""
    with pytest.raises(BadRequest, match="input: at least one"):
        History().messages("input")


def test_text_comes_from_a_string_or_from_parts():
    """Each kind of part holds its text in its own field; null says nothing."""
    owner = Fields({"a": "x", "b": [{"type": "text", "text": "y"}, {"type": "refusal", "refusal": "z"}], "c": None})
    assert text_parts(owner, "a", KINDS) == (Text("x"),)
    assert joined(text_parts(owner, "b", KINDS)) == "yz"
    assert text_parts(owner, "c", KINDS) == ()


def test_a_part_that_is_no_text_is_refused():
    """Images and the like are named with their path."""
    with pytest.raises(BadRequest, match=r"content\[0\]\.type: only text, refusal is supported here, got 'image'"):
        text_parts(Fields({"content": [{"type": "image"}]}), "content", KINDS)


def test_the_kind_of_a_part_must_be_a_string():
    """A part without a type is refused."""
    with pytest.raises(BadRequest, match="type: missing"):
        kind_of(Fields({}), KINDS)


def test_echoes_keep_their_order_and_ignored_names_are_listed_once():
    """Missing ids are no echoes."""
    history = History()
    for item_id in ("b", None, "a", "", "b"):
        history.echo(item_id)
    history.ignore("x", "y", "x")
    assert history.echoes == ("b", "a", "b")
    assert fidelity(history, Fields({"z": 1, "x": 2})) == ("z", "x", "y")
