"""Requests of OpenAI Chat Completions."""

import pytest

from polar_mitm.conversation import Message, Reasoning, Sampling, Text, Tool, ToolCall, ToolResult
from polar_mitm.errors import BadRequest
from polar_mitm.wire.openai_chat import OpenAIChat
from tests.mitm.wire.replies import CORE, golden

CHAT = OpenAIChat()
HI = {"role": "user", "content": "hi"}


def _decode(headers=None, **body):
    return CHAT.decode({"model": "m", "messages": [HI], **body}, headers or {})


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
    assert conversation.fidelity == ("frequency_penalty", "tools.custom.format")


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
        ("n", 0),
        ("n", 129),
        ("stop", ["x", ""]),
        ("stop", 3),
        ("top_logprobs", 3),
        ("logit_bias", {"1": 2}),
        ("tool_choice", "required"),
        ("tool_choice", "always"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{}]),
        ("modalities", ["text", "audio"]),
        ("max_tokens", 0),
        ("messages", []),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
    ],
)
def test_what_would_change_the_meaning_is_refused(field, value):
    """The error names the field."""
    with pytest.raises(BadRequest) as caught:
        _decode(**{field: value})
    assert field in f"{caught.value.field} {caught.value}"


def test_an_image_is_refused_in_openais_words():
    """And OpenAI's way to name the place, from which clients tell that the model cannot see."""
    parts = [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(BadRequest, match="image_url is only supported by certain models") as caught:
        _decode(messages=[HI, {"role": "user", "content": parts}])
    error = CHAT.error(caught.value)["error"]
    assert (error["param"], error["type"]) == ("messages.[1].content.[1].type", "invalid_request_error")


TOOLS = [
    {"type": "function", "function": {"name": "f"}},
    {"type": "custom", "custom": {"name": "g"}},
    {"type": "openrouter:web_search"},
]
FUNCTION_F, CUSTOM_G = {"type": "function", "function": {"name": "f"}}, {"type": "custom", "custom": {"name": "g"}}


@pytest.mark.parametrize(
    ("choice", "offered", "forced"),
    [
        ("auto", ["f", "g"], None),
        ("none", [], None),
        ("required", ["f", "g"], ""),
        (FUNCTION_F, ["f", "g"], "f"),
        (CUSTOM_G, ["f", "g"], "g"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CUSTOM_G]}}, ["g"], None),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [FUNCTION_F]}}, ["f"], ""),
    ],
)
def test_a_tool_choice_says_what_may_and_must_be_called(choice, offered, forced):
    """In each of the protocol's forms; a tool that runs at the provider is left out and listed."""
    conversation = _decode(tools=TOOLS, tool_choice=choice)
    assert [tool.name for tool in conversation.tools] == offered
    assert conversation.forced_tool == forced
    assert conversation.fidelity == ("tools[openrouter:web_search]",)


def test_reasoning_details_come_back_as_reasoning_and_as_pointers():
    """Pi returns them as they were, mini-swe-agent (litellm) under another name."""
    details = [
        {"type": "reasoning.text", "text": "hm", "signature": CORE, "index": 0},
        {"type": "reasoning.encrypted", "data": CORE, "id": f"rs_{CORE}", "index": 1},
    ]
    for fields in ({"reasoning_details": details}, {"provider_specific_fields": {"reasoning_details": details}}):
        conversation = _decode(messages=[HI, {"role": "assistant", "content": "x", **fields}, HI])
        assert conversation.messages[1].parts == (Reasoning("hm"), Text("x"))
        assert conversation.echoes == (CORE, f"rs_{CORE}", CORE)


def test_usage_in_a_stream_is_asked_for():
    """Not by default, as at OpenAI."""
    assert not _decode().stream_usage
    assert _decode(stream_options={"include_usage": True}).stream_usage


@pytest.mark.parametrize(
    "message",
    [
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
