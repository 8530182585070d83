"""The bridge over a template itself: what it adds, and when it is off."""

from __future__ import annotations

import pytest

from polar_mitm.conversation import Message, Text, ToolCall, ToolResult
from polar_mitm.tokens.chat_template import ChatTemplate
from polar_mitm.tokens.difference import Difference, find
from tests.mitm.tokens.chatml import CHATML, COUNTING, FORGETFUL, REFUSING, byte_tokenizer

STOPS = frozenset({257})
CALLING = CHATML.replace(
    "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}{% endfor %}"
)
MOVING = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}" + CHATML.replace(
    "for m in messages %}<", "for m in messages if m.role != 'system' %}<"
)
"""A template that gathers all system messages at its head."""
ASKED = Message("user", (Text("Look."),))
SAID = Message("assistant", (Text("Hello."),))
CALLED = Message("assistant", (ToolCall("call_1", "peek", '{"path": "oats"}'),))
RESULT = Message("tool", (ToolResult("call_1", "barley"),))
MORE = Message("user", (Text("and\n now?"),))


def bridge_of(template: str) -> Difference | None:
    return find(ChatTemplate(byte_tokenizer(template)), STOPS)


def added(template: str, history: tuple[Message, ...], output: str) -> str | None:
    bridge = bridge_of(template)
    assert bridge is not None
    ids = bridge.extend(bridge.chat.encode(output), history, 2, ())
    return None if ids is None else bridge.chat.decode(ids)


@pytest.mark.parametrize(
    ("template", "works"), [(CHATML, True), (CALLING, True), (COUNTING, False), (FORGETFUL, False), (REFUSING, False)]
)
def test_the_bridge_works_only_where_a_longer_history_extends_a_shorter_one(template: str, *, works: bool) -> None:
    """A template that re-writes what stood before is found by the probe, and one that refuses it is no error."""
    assert (bridge_of(template) is not None) is works


def test_a_tokenizer_without_a_template_has_no_bridge() -> None:
    """A base model's tokenizer cannot render a conversation."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    assert find(ChatTemplate(tokenizer), STOPS) is None


def test_what_follows_an_ended_reply_are_the_new_messages_and_the_next_head() -> None:
    """The sample holds its end of turn."""
    assert added(CHATML, (ASKED, SAID, MORE), "Hello.<|im_end|>") == (
        "\n<|im_start|>user\nand\n now?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_follows_a_cut_reply_begins_with_its_end() -> None:
    """A length ending leaves the end of turn to the bridge."""
    assert added(CHATML, (ASKED, SAID, MORE), "Hel") == (
        "<|im_end|>\n<|im_start|>user\nand\n now?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_result_follows_the_call_that_asked_for_it() -> None:
    """The stand-in for the reply calls, too: templates look at it to place a result."""
    assert added(CALLING, (ASKED, CALLED, RESULT), "<call>{}<|im_end|>") == (
        "\n<|im_start|>tool\nbarley<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_says_no_calls_is_not_extended_after_one() -> None:
    """What fails its probe is off for that kind; texts are extended all the same."""
    bridge = bridge_of(CHATML)
    assert bridge is not None
    assert not bridge.after_calls
    assert bridge.extend([257], (ASKED, CALLED, RESULT), 2, ()) is None


def test_a_new_message_that_changes_the_head_is_not_lost() -> None:
    """A reminder which the template moves before the reply has no bridge: it would be missing from the suffix."""
    reminder = Message("system", (Text("Remember."),))
    assert added(MOVING, (ASKED, SAID, MORE), "Hello.<|im_end|>") is not None
    assert added(MOVING, (ASKED, SAID, reminder, MORE), "Hello.<|im_end|>") is None
