"""Anthropic Messages, judged by Anthropic's SDK."""

import json

import pytest
from anthropic import Anthropic, DefaultHttpxClient
from hypothesis import given
from hypothesis import strategies as st

from polar_mitm.conversation import Message, Reasoning, Reply, Sampling, Text, Tool, ToolCall, ToolResult, Usage
from polar_mitm.errors import (
    BadRequest,
    ContextOverflow,
    EngineError,
    EngineUnavailable,
    NotFound,
    PolarError,
    Unauthorized,
)
from polar_mitm.wire.anthropic import AnthropicMessages
from tests.mitm.wire.replies import CORE, REQUEST, began, events, golden, replies, serve, streamed, streams

ANTHROPIC = AnthropicMessages()
HI = {"role": "user", "content": "hi"}
SEARCHABLE = {"name": "later", "input_schema": {}, "defer_loading": True}


def _client(transport):
    return Anthropic(api_key="k", base_url="http://x", http_client=DefaultHttpxClient(transport=transport))


def _decode(headers=None, **body):
    return ANTHROPIC.decode({"model": "m", "max_tokens": 9, "messages": [HI], **body}, headers or {})


@given(data=st.data())
def test_the_sdk_rebuilds_the_plain_answer_from_the_stream(data):
    """Every block, the stop reason and the usage are the same in both forms."""
    reply = data.draw(replies("toolu", custom=False))
    plain = json.dumps(ANTHROPIC.encode(REQUEST, reply)).encode()
    asked = {"model": "m", "max_tokens": 100, "messages": [HI]}
    with _client(serve(plain, "application/json")) as client:
        answer = client.messages.create(**asked)
    body = b"".join(data.draw(streams(ANTHROPIC, reply)))
    with _client(serve(body)) as client, client.messages.stream(**asked) as stream:
        rebuilt = stream.get_final_message()
    assert _plain(rebuilt) == _plain(answer)


def _plain(message):
    return message.model_dump(exclude_none=True, warnings=False)


@given(data=st.data())
def test_blocks_open_and_close_one_after_another(data):
    """Indices count up, each block is closed before the next, and thinking is signed last."""
    reply = data.draw(replies("toolu", custom=False))
    opened, last, closed = None, None, -1
    for name, value in events(b"".join(data.draw(streams(ANTHROPIC, reply)))):
        assert name == value["type"]
        if name == "content_block_start":
            assert opened is None
            assert value["index"] == closed + 1
            opened = value["content_block"]["type"]
        elif name == "content_block_delta":
            last = value["delta"]
        elif name == "content_block_stop":
            assert opened != "thinking" or last == {"type": "signature_delta", "signature": CORE}
            opened, closed = None, value["index"]


def test_an_answer_without_thinking_begins_with_redacted_thinking():
    """opencode and Pi return its data on text-only turns."""
    blocks = ANTHROPIC.encode(REQUEST, Reply(CORE, (Text("x"),), "stop"))["content"]
    assert blocks == [{"type": "redacted_thinking", "data": CORE}, {"type": "text", "text": "x"}]


def test_cached_tokens_are_counted_beside_the_input():
    """The three input counts add up to the prompt, in both forms."""
    reply = Reply(CORE, (Text("x"),), "stop", Usage(10, 4, 3))
    usage = {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 3,
    }
    assert ANTHROPIC.encode(REQUEST, reply)["usage"] == usage
    assert events(streamed(ANTHROPIC, reply))[-2][1]["usage"] == usage


@pytest.mark.parametrize(
    ("finish", "reason"), [("stop", "end_turn"), ("length", "max_tokens"), ("tool_calls", "tool_use")]
)
def test_each_finish_has_its_stop_reason(finish, reason):
    """A call cut by length is not a tool use."""
    assert ANTHROPIC.encode(REQUEST, Reply(CORE, (), finish))["stop_reason"] == reason


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BadRequest("x"), 400, "invalid_request_error"),
        (Unauthorized("x"), 401, "authentication_error"),
        (NotFound("x"), 404, "not_found_error"),
        (EngineError("x"), 500, "api_error"),
        (EngineUnavailable("x"), 529, "overloaded_error"),
    ],
)
def test_an_error_has_anthropics_shape(error: PolarError, status: int, kind: str):
    """Plain and in a stream."""
    assert ANTHROPIC.status(error) == status
    assert ANTHROPIC.error(error) == {"type": "error", "error": {"type": kind, "message": "x"}}
    assert events(began(ANTHROPIC.encoder(REQUEST, CORE)).fail(error)) == [("error", ANTHROPIC.error(error))]


def test_an_overflow_is_worded_as_anthropic_does():
    """Claude Code compacts by these words."""
    error = ANTHROPIC.error(ContextOverflow(5000, 4096))["error"]
    assert error == {"type": "invalid_request_error", "message": "prompt is too long: 5000 tokens > 4096 maximum"}


def test_a_claude_code_turn_is_canonical():
    """System blocks first, a system message where it stood, thinking, text, call, result."""
    request = golden("claude-code-2.1.332.tool-turn")
    conversation = ANTHROPIC.decode(request["body"], request["headers"])
    assert [message.role for message in conversation.messages] == ["system", "user", "system", "assistant", "tool"]
    reasoning, text, call = conversation.messages[3].parts
    assert isinstance(reasoning, Reasoning)
    assert text == Text("  I'll write the file now.\n\n")
    assert json.loads(call.arguments)["command"].startswith("printf 'hello hé")
    assert conversation.messages[4].parts == (ToolResult(call.id, 'hello hé "q" <b>'),)
    assert conversation.echoes == ("stubSignature==", call.id, call.id, "msg_56920f02aabb46cb93ba259b")
    assert {"metadata", "thinking", "diagnostics", "cache_control", "output_config.effort"} <= set(
        conversation.fidelity
    )


def test_the_agent_id_is_the_thread():
    """Claude Code names its sub-agents in a header."""
    request = golden("claude-code-2.1.332.subagent")
    assert ANTHROPIC.decode(request["body"], request["headers"]).thread == "a5070606f13df22ea"


def test_the_billing_block_is_dropped():
    """It changes on every turn; with it gone the system prompt is the same."""
    blocks = [{"type": "text", "text": text} for text in ("x-anthropic-billing-header: cch=1;", "You are", "good")]
    assert _decode(system=blocks).messages[0] == Message("system", (Text("You are"), Text("good")))
    assert _decode(system=blocks[:1]).messages == (Message("user", (Text("hi"),)),)


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


def test_a_deferred_tool_is_offered_once_a_search_has_found_it():
    """Claude Code's ToolSearch answers with references."""
    assert _decode(tools=[SEARCHABLE]).tools == ()
    reference = {"type": "tool_reference", "tool_name": "later"}
    found = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [reference]}]}
    conversation = _decode(tools=[SEARCHABLE], messages=[HI, found])
    assert conversation.tools == (Tool("later", "", "{}"),)
    assert conversation.messages[1].parts == (ToolResult("t", "later"),)


def test_tools_and_sampling_are_read():
    """Server tools are left out and listed; the output format is a schema."""
    conversation = _decode(
        tools=[
            {"name": "f", "description": "d", "input_schema": {"b": 1, "a": 2}},
            {"type": "web_search_20250305", "name": "s"},
        ],
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        stream=True,
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
    )
    assert conversation.tools == (Tool("f", "d", '{"b":1,"a":2}'),)
    assert conversation.sampling == Sampling(0.5, 0.9, 4, 9, None, '{"type":"object"}')
    assert conversation.stream
    assert conversation.fidelity == ("tools.web_search_20250305",)
    assert _decode(tools=[{"name": "f", "input_schema": {}}], tool_choice={"type": "none"}).tools == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_sequences", ["x"]),
        ("tool_choice", {"type": "any"}),
        ("tool_choice", {"type": "tool", "name": "f"}),
        ("tool_choice", "auto"),
        ("max_tokens", 0),
        ("messages", []),
        ("messages", [HI, {"role": "assistant", "content": "I"}]),
        ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}]),
        ("messages", [{"role": "user", "content": [{"type": "document", "source": {}}]}]),
        ("messages", [{"role": "tool", "content": "x"}]),
        ("output_config", {"format": {"type": "json_schema"}}),
        ("output_config", {"format": {"type": "xml"}}),
        ("tools", [{"name": "f"}]),
    ],
)
def test_what_would_change_the_meaning_is_refused(field, value):
    """The error names the field."""
    with pytest.raises(BadRequest, match=field):
        _decode(**{field: value})


def test_a_thread_is_refused_in_the_words_that_pi_understands():
    """It then sends the whole history."""
    with pytest.raises(BadRequest, match=r"^thread: Extra inputs are not permitted$"):
        _decode(thread={"type": "create"})


def test_arguments_that_are_no_json_survive_the_round_trip():
    """They travel as a string, so that the harness can object and the history still matches."""
    call = ToolCall("toolu_1", "f", "{not json")
    answer = ANTHROPIC.encode(REQUEST, Reply(CORE, (call,), "tool_calls"))
    assert answer["content"][1]["input"] == "{not json"
    assert _decode(messages=[HI, {"role": "assistant", "content": answer["content"]}, HI]).messages[1].parts == (call,)
