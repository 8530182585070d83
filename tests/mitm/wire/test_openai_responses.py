"""Requests of OpenAI Responses."""

from dataclasses import replace

import pytest

from polar_mitm.conversation import Message, Reply, Sampling, Text, Tool, ToolCall
from polar_mitm.errors import BadRequest
from polar_mitm.wire.openai_responses import OpenAIResponses
from polar_mitm.wire.responses_input import COMPACT
from tests.mitm.wire.replies import CORE, REQUEST

RESPONSES = OpenAIResponses()
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def _decode(headers=None, **body):
    return RESPONSES.decode({"model": "m", "input": "hi", **body}, headers or {})


def test_instructions_come_first_and_a_string_is_a_user_message():
    """The shortest request."""
    conversation = _decode(instructions="be good")
    assert conversation.messages == (Message("system", (Text("be good"),)), Message("user", (Text("hi"),)))


def test_sampling_thread_and_ignored_fields_are_read():
    """The thread's header goes before the cache key."""
    conversation = _decode(
        {"thread-id": "t"},
        max_output_tokens=5,
        temperature=1,
        top_p=0.9,
        text={"format": {"type": "json_object"}, "verbosity": "low"},
        tools=[FUNCTION],
        tool_choice="none",
        prompt_cache_key="key",
        store=False,
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "low"},
    )
    assert conversation.sampling == Sampling(1.0, 0.9, None, 5, None, '{"type":"object"}')
    assert (conversation.thread, conversation.tools) == ("t", ())
    assert conversation.fidelity == ("store", "reasoning", "text.verbosity")
    assert _decode(prompt_cache_key="key", tools=[FUNCTION]).tools == (Tool("f", "", '{"type":"object"}'),)
    assert _decode(prompt_cache_key="key").thread == "key"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("conversation", "conv_1"),
        ("prompt", {"id": "p"}),
        ("background", True),
        ("top_logprobs", 2),
        ("tool_choice", {"type": "function", "name": "f"}),
        ("max_output_tokens", 0),
        ("input", []),
        ("tool_choice", {"type": "web_search"}),
        ("input", [{"type": "item_reference", "id": "x"}]),
        ("input", [{"type": "compaction", "encrypted_content": "gAAAA"}]),
        ("input", [{"type": "invented"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        ("input", [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]),
        ("input", [{"role": "tool", "content": "x"}]),
        ("text", {"format": {"type": "json_schema"}}),
    ],
)
def test_what_would_change_the_meaning_is_refused(field, value):
    """The error names the field."""
    with pytest.raises(BadRequest) as caught:
        _decode(**{field: value})
    assert field in f"{caught.value.field} {caught.value}"


SPACED = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]}


@pytest.mark.parametrize(
    ("choice", "offered", "forced"),
    [
        ("required", ["f", "shell", "spawn"], ""),
        ({"type": "function", "name": "f"}, ["f", "shell", "spawn"], "f"),
        ({"type": "function", "name": "spawn", "namespace": "agents"}, ["f", "shell", "spawn"], "spawn"),
        ({"type": "shell"}, ["f", "shell", "spawn"], "shell"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}, [], None),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "f"}, {"type": "mcp"}],
            },
            ["f"],
            "",
        ),
    ],
)
def test_a_tool_choice_says_what_may_and_must_be_called(choice, offered, forced):
    """In each of the protocol's forms; tools that run at the provider are nothing to choose from."""
    conversation = _decode(tools=[FUNCTION, {"type": "shell"}, {"type": "mcp"}, SPACED], tool_choice=choice)
    assert [tool.name for tool in conversation.tools] == offered
    assert conversation.forced_tool == forced


def test_a_required_call_of_a_tool_that_is_not_here_is_refused():
    """The model could call none of the allowed ones."""
    with pytest.raises(BadRequest, match="tool_choice: a call is required"):
        _decode(tools=[{"type": "mcp"}], tool_choice="required")


def test_an_earlier_answer_is_continued_by_its_id():
    """The new items are all that the request holds; the answer names what it continues."""
    conversation = _decode(previous_response_id=f"resp_{CORE}")
    assert conversation.continues == f"resp_{CORE}"
    answer = RESPONSES.encode(conversation, Reply(CORE, (Text("x"),), "stop"))
    assert answer["previous_response_id"] == f"resp_{CORE}"


def test_a_compaction_trigger_asks_for_a_summary():
    """Codex sends it as the last item and wants one compaction item, which holds the summary and expands again."""
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    request = _decode(input=[*history, {"type": "compaction_trigger"}])
    assert request.compacts == "item"
    assert request.messages[-1] == Message("user", (Text(COMPACT),))
    answer = RESPONSES.encode(request, Reply(CORE, (Text("We said h\u00e9llo."),), "stop"))
    assert [item["type"] for item in answer["output"]] == ["compaction"]
    assert answer["status"] == "completed"
    after = _decode(input=[*answer["output"], {"role": "user", "content": "go on"}])
    assert after.messages[0].role == "user"
    assert after.messages[0].parts[0].text.endswith("it replaces:\n\nWe said h\u00e9llo.")
    assert after.echoes == (f"cmp_{CORE}",)


def test_the_compact_route_answers_with_the_whole_history():
    """What the user said, then the compaction item; our own request for a summary is not among it."""
    request = replace(_decode(compacts=True), asked_at=7)
    assert request.compacts == "history"
    answer = RESPONSES.encode(request, Reply(CORE, (Text("a summary"),), "length"))
    assert (answer["object"], answer["created_at"]) == ("response.compaction", 7)
    user, compaction = answer["output"]
    assert user["content"] == [{"type": "input_text", "text": "hi"}]
    assert compaction["type"] == "compaction"
    assert _decode(input=answer["output"]).messages[0] == Message("user", (Text("hi"),))


def test_an_image_is_refused_in_openais_words():
    """With the place and the code by which the SDKs tell it from others."""
    image = {"type": "input_image", "image_url": "data:,"}
    with pytest.raises(BadRequest, match="Invalid value: 'input_image'") as caught:
        _decode(input=[{"role": "user", "content": [image]}])
    error = RESPONSES.error(caught.value)["error"]
    assert (error["param"], error["code"]) == ("input[0].content[0].type", "invalid_value")


def test_what_runs_at_the_provider_is_left_out_and_listed():
    """A session that was begun at OpenAI can go on here."""
    items = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "mcp_call", "id": "mcp_1", "name": "f", "arguments": "{}", "output": "x"},
        {"role": "user", "content": "hi"},
    ]
    conversation = _decode(input=items, tools=[{"type": "web_search"}, {"type": "mcp", "server_label": "x"}])
    assert conversation.messages == (Message("user", (Text("hi"),)),)
    assert conversation.tools == ()
    assert set(conversation.fidelity) == {
        *("input[web_search_call]", "input[mcp_call]", "tools[web_search]", "tools[mcp]"),
    }


def test_a_model_that_calls_nothing_that_was_declared_is_answered_all_the_same():
    """The name goes out as it was sampled."""
    call = RESPONSES.encode(REQUEST, Reply(CORE, (ToolCall("call_1", "web_search", "{}"),), "tool_calls"))["output"][1]
    assert (call["type"], call["name"]) == ("function_call", "web_search")
