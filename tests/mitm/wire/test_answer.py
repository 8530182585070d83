"""A reply in sending order."""

import pytest

from polar_mitm.conversation import Reasoning, Reply, Text, ToolCall
from polar_mitm.wire.answer import Answer, Sent, arguments_value


def test_an_answer_is_reasoning_then_text_then_calls():
    """Parts of one kind are joined, whatever stood between them."""
    call = ToolCall("call_1", "run", "{}")
    reply = Reply("core", (Reasoning("a"), Text("b"), call, Text("c")), "tool_calls")
    assert Answer.of(reply) == Answer("a", "bc", (call,))


def test_the_rest_is_what_was_not_sent():
    """The deltas are a prefix of the whole."""
    sent = Sent()
    sent.add("text", "ab")
    assert sent.rest("text", "abc") == "c"
    assert sent.rest("reasoning", "r") == "r"


def test_deltas_that_are_no_prefix_are_a_mistake():
    """What was sent cannot be taken back."""
    sent = Sent()
    sent.add("text", "ab")
    with pytest.raises(ValueError, match="no prefix"):
        sent.rest("text", "xb")


def test_reasoning_after_text_is_a_mistake():
    """No protocol can order it."""
    sent = Sent()
    sent.add("text", "ab")
    with pytest.raises(ValueError, match="after text"):
        sent.add("reasoning", "r")


@pytest.mark.parametrize("text", ["{not json", "", '{"a":NaN}', '{"a":1e999}', '"text"', "[" * 100_000])
def test_arguments_that_are_no_strict_json_or_a_string_stay_text(text):
    """The harness sees what was sampled instead of a value that was made up."""
    assert arguments_value(text) == text


def test_arguments_that_are_json_become_a_value():
    """Any JSON value, not only objects."""
    assert arguments_value('{ "a" : [1, null] }') == {"a": [1, None]}
