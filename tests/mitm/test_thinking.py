"""Reasoning that a harness left out, put back; and beside it what is never touched."""

from __future__ import annotations

from polar_mitm.conversation import Message, Reasoning, Text, ToolCall
from polar_mitm.thinking import is_trimmed, restored, thought

ASKED = Message("user", (Text("Look."),))
CALL = ToolCall("call_1", "run", "{}")
REPLY = (Reasoning("Hm, a file."), Text("I look."), CALL)
BARE = Message("assistant", REPLY[1:])
WHOLE = Message("assistant", REPLY)


def test_a_reply_at_its_place_gets_its_reasoning_back() -> None:
    """The history up to there is ours."""
    assert restored((ASKED, BARE, ASKED), {1: REPLY}, ()) == ((ASKED, WHOLE, ASKED), 1)


def test_a_reply_that_an_id_names_gets_its_reasoning_back() -> None:
    """Wherever it stands in an edited history, re-serialised and trimmed as harnesses do."""
    sent = Message("assistant", (Text(" I look.\n"), ToolCall("toolu_1", "run", "{ }")))
    (_, message), count = restored((ASKED, sent), {}, [REPLY])
    assert count == 1
    assert message.parts == (REPLY[0], *sent.parts)


def test_equal_replies_get_their_own_reasoning_in_order() -> None:
    """Ids come in the order of the history."""
    other = (Reasoning("Again."), *REPLY[1:])
    messages, count = restored((BARE, ASKED, BARE), {}, [REPLY, other])
    assert count == 2
    assert [thought(m.parts) for m in messages] == ["Hm, a file.", "", "Again."]


def test_a_trimmed_reasoning_is_whole_again() -> None:
    """A part of ours is ours."""
    sent = Message("assistant", (Reasoning(" Hm,"), *REPLY[1:]))
    assert restored((sent,), {0: REPLY}, ()) == ((WHOLE,), 1)


def test_a_changed_reasoning_stays_as_it_was_sent() -> None:
    """The harness means it: the model must see it."""
    sent = Message("assistant", (Reasoning("No file."), *REPLY[1:]))
    assert restored((sent,), {0: REPLY}, [REPLY]) == ((sent,), 0)


def test_another_message_gets_no_reasoning() -> None:
    """What was edited is not what the reasoning led to, and what the user says is never ours."""
    edited = Message("assistant", (Text("I looked."), CALL))
    said = Message("user", REPLY[1:])
    assert restored((edited, said), {}, [REPLY]) == ((edited, said), 0)


def test_a_message_that_has_it_all_is_not_counted() -> None:
    """Nothing was put back."""
    assert restored((WHOLE,), {0: REPLY}, [REPLY]) == ((WHOLE,), 0)


def test_white_space_does_not_count_in_a_part_of_a_reasoning() -> None:
    """Harnesses join and trim it; any other change is one."""
    assert is_trimmed("Hm,\n\na  file.", "Hm, a file.")
    assert is_trimmed("", "Hm.")
    assert not is_trimmed("Hm!", "Hm.")
