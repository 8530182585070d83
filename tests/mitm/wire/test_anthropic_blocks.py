"""The messages of an Anthropic request."""

import pytest

from polar_mitm.conversation import Message, Text, ToolCall, ToolResult
from polar_mitm.errors import BadRequest
from polar_mitm.wire.anthropic import AnthropicMessages
from tests.mitm.wire.replies import CORE

ANTHROPIC = AnthropicMessages()
HI = {"role": "user", "content": "hi"}


def _decode(headers=None, **body):
    return ANTHROPIC.decode({"model": "m", "max_tokens": 9, "messages": [HI], **body}, headers or {})


def test_a_string_is_one_text_block():
    """Claude Code sends the same message now as a string, now as a block."""
    block = {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}
    assert _decode(messages=[block]).messages == _decode().messages


def test_results_and_text_of_one_message_are_two():
    """A tool message with the results in their order, then what the user says."""
    results = [{"type": "tool_result", "tool_use_id": name, "content": name, "is_error": True} for name in ("a", "b")]
    mixed = {"role": "user", "content": [results[0], {"type": "text", "text": "go on"}, results[1]]}
    assert _decode(messages=[HI, mixed]).messages[1:] == (
        Message("tool", (ToolResult("a", "a", is_error=True), ToolResult("b", "b", is_error=True))),
        Message("user", (Text("go on"),)),
    )


def test_redacted_thinking_says_nothing_and_is_echoed():
    """Its data is an id of ours."""
    answer = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": CORE}]}
    conversation = _decode(messages=[HI, answer, HI])
    assert conversation.messages[1] == Message("assistant", ())
    assert conversation.echoes == (CORE,)


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (
            {"type": "search_result", "title": "T", "source": "S", "content": [{"type": "text", "text": "a"}]},
            "T\nS\na",
        ),
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}, "a"),
        ({"type": "document", "title": "T", "context": "C", "source": {"type": "text", "data": "a"}}, "T\nC\na"),
        ({"type": "document", "source": {"type": "content", "content": "a"}}, "a"),
        ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "a"}]}}, "a"),
    ],
)
def test_search_results_and_text_documents_are_read(block, text):
    """From the user, and as what a tool found."""
    assert _decode(messages=[{"role": "user", "content": [block]}]).messages[0].parts == (Text(text),)
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block, {"type": "text", "text": "b"}]}
    parts = _decode(messages=[HI, {"role": "user", "content": [result]}]).messages[1].parts
    assert parts == (ToolResult("t", f"{text}\nb"),)


def test_blocks_of_the_providers_tools_are_left_out():
    """A session that was begun at Anthropic can go on here."""
    content = [
        {"type": "text", "text": "Let me search."},
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
        {"type": "text", "text": "Found."},
    ]
    conversation = _decode(messages=[HI, {"role": "assistant", "content": content}, HI])
    assert conversation.messages[1].parts == (Text("Let me search."), Text("Found."))
    assert "messages.content[server_tool_use]" in conversation.fidelity


def test_a_compaction_block_is_the_text_that_it_holds():
    """Anthropic gives summaries in the clear."""
    content = [{"type": "compaction", "content": "so far"}, {"type": "text", "text": "x"}]
    messages = _decode(messages=[HI, {"role": "assistant", "content": content}, HI]).messages
    assert messages[1].parts == (Text("so far"), Text("x"))


def test_a_tool_use_keeps_its_order_of_keys():
    """As compact JSON."""
    use = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"b": 1, "a": "\u00e9"}}
    messages = _decode(messages=[HI, {"role": "assistant", "content": [use]}, HI]).messages
    assert messages[1].parts == (ToolCall("toolu_1", "f", '{"b":1,"a":"\u00e9"}'),)


def test_system_messages_stay_where_they_are():
    """Claude Code puts them between the turns."""
    turns = [HI, {"role": "system", "content": "be brief"}, HI]
    assert [message.role for message in _decode(messages=turns).messages] == ["user", "system", "user"]
    assert _decode(messages=turns).messages[1] == Message("system", (Text("be brief"),))


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ({"type": "image", "source": {"type": "base64"}}, "'m' does not support image input"),
        ({"type": "document", "source": {"type": "url"}}, "'m' does not support document input"),
    ],
)
def test_an_image_is_refused_in_anthropics_words(block, problem):
    """With the place as Anthropic writes it, with dots."""
    with pytest.raises(BadRequest) as caught:
        _decode(messages=[HI, {"role": "user", "content": [{"type": "text", "text": "see"}, block]}])
    error = ANTHROPIC.error(caught.value)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("messages.1.content.1")
    assert problem in error["message"]
