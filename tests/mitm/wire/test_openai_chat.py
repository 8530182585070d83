"""OpenAI Chat Completions, judged by OpenAI's SDK."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import DefaultHttpxClient, OpenAI

from polar_mitm.conversation import Message, Reasoning, Reply, Sampling, Text, Tool, ToolCall, ToolResult, Usage
from polar_mitm.errors import BadRequest, EngineError
from polar_mitm.wire.openai_chat import OpenAIChat
from tests.mitm.wire.replies import CORE, REQUEST, events, golden, replies, serve, streamed, streams

CHAT = OpenAIChat()
HI = {"role": "user", "content": "hi"}


def _client(transport):
    return OpenAI(api_key="k", base_url="http://x/v1", http_client=DefaultHttpxClient(transport=transport))


def _decode(headers=None, **body):
    return CHAT.decode({"model": "m", "messages": [HI], **body}, headers or {})


@given(data=st.data())
def test_the_sdk_rebuilds_the_plain_answer_from_the_stream(data):
    """Content, reasoning, calls, finish reason, usage and id are the same in both forms."""
    reply = data.draw(replies(custom=False))
    plain = json.dumps(CHAT.encode(REQUEST, reply)).encode()
    with _client(serve(plain, "application/json")) as client:
        answer = client.chat.completions.create(model="m", messages=[HI])
    with (
        _client(serve(b"".join(data.draw(streams(CHAT, reply))))) as client,
        client.chat.completions.stream(model="m", messages=[HI]) as stream,
    ):
        list(stream)
        rebuilt = stream.current_completion_snapshot
    assert _said(rebuilt) == _said(answer)


def _said(completion):
    (choice,) = completion.choices
    message = choice.message
    calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or []]
    reasoning = (message.model_extra or {}).get("reasoning_content")
    usage = completion.usage.model_dump()
    return completion.id, completion.model, message.role, message.content, reasoning, calls, choice.finish_reason, usage


def test_a_custom_tool_call_keeps_its_raw_input():
    """Free-form input is sent as it was sampled, in one chunk and in the plain answer."""
    reply = Reply(CORE, (ToolCall("call_1", "edit", "*** raw\n", custom=True),), "tool_calls")
    call = {"id": "call_1", "type": "custom", "custom": {"name": "edit", "input": "*** raw\n"}}
    assert CHAT.encode(REQUEST, reply)["choices"][0]["message"]["tool_calls"] == [call]
    deltas = [value["choices"][0]["delta"] for _, value in events(streamed(CHAT, reply))[:-2]]
    assert [delta["tool_calls"] for delta in deltas if "tool_calls" in delta] == [[{"index": 0, **call}]]


def test_a_stream_ends_with_finish_reason_usage_and_done():
    """The last choice chunk, a chunk of usage alone, and the end marker."""
    reply = Reply(CORE, (Text("x"),), "length", Usage(3, 1, 2))
    (_, last), (_, usage), (_, done) = events(streamed(CHAT, reply))[-3:]
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 5
    assert done == "[DONE]"


def test_a_failed_stream_is_an_error_without_done():
    """The SDKs raise on an error event."""
    assert events(CHAT.encoder(REQUEST, CORE).fail(EngineError("odd")))[0][1]["error"]["message"] == "odd"


def test_messages_become_canonical():
    """Roles, content parts, reasoning, calls and results, in order."""
    conversation = _decode(
        messages=[
            {"role": "developer", "content": "be good"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "x"},
            {
                "role": "assistant",
                "content": None,
                "reasoning": "hm",
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{ "a": 1 }'}}
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "out"}]},
        ]
    )
    assert conversation.messages == (
        Message("system", (Text("be good"),)),
        Message("user", (Text("a"), Text("b"))),
        Message("assistant", (Reasoning("hm"), ToolCall("call_1", "f", '{ "a": 1 }'))),
        Message("tool", (ToolResult("call_1", "out"),)),
    )
    assert conversation.echoes == ("call_1", "call_1")
    assert conversation.fidelity == ("messages.name",)


def test_tools_sampling_and_thread_are_read():
    """What the harness asked for, field by field."""
    conversation = _decode(
        tools=[
            {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},
            {"type": "custom", "custom": {"name": "g", "format": {"type": "text"}}},
        ],
        temperature=0,
        top_p=0.5,
        top_k=3,
        seed=7,
        max_tokens=10,
        max_completion_tokens=20,
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "array"}}},
        stream=True,
        prompt_cache_key="key",
        frequency_penalty=1,
    )
    assert conversation.tools == (Tool("f", "d", '{"type":"object"}'), Tool("g", "", "", custom=True))
    assert conversation.sampling == Sampling(0.0, 0.5, 3, 20, 7, '{"type":"array"}')
    assert (conversation.stream, conversation.thread) == (True, "key")
    assert conversation.fidelity == ("frequency_penalty", "tools.format")


def test_a_session_header_names_the_thread():
    """OpenRouter's clients send it where others send a cache key."""
    assert _decode({"x-session-id": "s"}).thread == "s"


def test_a_function_without_parameters_takes_none():
    """Qwen Code declares get_goal so."""
    tools = CHAT.decode(golden("qwen-code-0.24.4.tool-turn")["body"], {}).tools
    assert next(tool for tool in tools if tool.name == "get_goal").parameters == '{"type":"object","properties":{}}'


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("stop", ["x"]),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("logit_bias", {"1": 2}),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("modalities", ["text", "audio"]),
        ("max_tokens", 0),
        ("messages", []),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
    ],
)
def test_what_would_change_the_meaning_is_refused(field, value):
    """The error names the field."""
    with pytest.raises(BadRequest, match=field):
        _decode(**{field: value})


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
        {"role": "function", "content": "x", "name": "f"},
        {"role": "tool", "content": "x"},
        {"role": "assistant", "content": "x", "audio": {"id": "a"}},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "other"}]},
    ],
)
def test_messages_that_are_not_text_are_refused(message):
    """Images, audio, legacy functions and unknown calls."""
    with pytest.raises(BadRequest, match=r"messages\[0\]"):
        _decode(messages=[message])
