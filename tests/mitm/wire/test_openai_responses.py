"""OpenAI Responses, judged by OpenAI's SDK."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import DefaultHttpxClient, OpenAI

from polar_mitm.conversation import Message, Reasoning, Reply, Sampling, Text, Tool, ToolCall, ToolResult
from polar_mitm.errors import BadRequest, ContextOverflow, EngineError
from polar_mitm.wire.openai_responses import OpenAIResponses
from tests.mitm.wire.replies import CORE, REQUEST, began, events, golden, replies, serve, streamed, streams

RESPONSES = OpenAIResponses()
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def _client(transport):
    return OpenAI(api_key="k", base_url="http://x/v1", http_client=DefaultHttpxClient(transport=transport))


def _decode(headers=None, **body):
    return RESPONSES.decode({"model": "m", "input": "hi", **body}, headers or {})


@given(data=st.data())
def test_the_sdk_rebuilds_the_plain_answer_from_the_stream(data):
    """The response of the terminal event is the plain answer, and the deltas add up to its items."""
    reply = data.draw(replies())
    plain = RESPONSES.encode(REQUEST, reply)
    with _client(serve(json.dumps(plain).encode(), "application/json")) as client:
        answer = client.responses.create(model="m", input="hi")
    body = b"".join(data.draw(streams(RESPONSES, reply)))
    with _client(serve(body)) as client, client.responses.stream(model="m", input="hi") as stream:
        last = list(stream)[-1]
    assert last.response.model_dump(exclude_unset=True, warnings=False, exclude=PARSED) == answer.model_dump(
        exclude_unset=True, warnings=False, exclude=PARSED
    )
    assert _rebuilt(body) == plain["output"]


PARSED = {"output": {"__all__": {"content": {"__all__": {"parsed"}}, "parsed_arguments": True}}}
"""What the SDK's stream helper adds to the items."""


def _rebuilt(body):
    """The output as a client that trusts only `added` items, deltas and `done` items in their order."""
    output, open_items = [], {}
    for _, event in events(body):
        kind, index = event["type"], event.get("output_index")
        if kind == "response.output_item.added":
            assert not open_items, "an item opened inside another"
            assert index == len(output)
            open_items[index] = [event["item"], ""]
        elif kind.endswith(".delta"):
            assert event["item_id"] == open_items[index][0]["id"]
            open_items[index][1] += event["delta"]
        elif kind == "response.output_item.done":
            opening, text = open_items.pop(index)
            assert opening["id"] == event["item"]["id"]
            assert text == _text_of(event["item"])
            output.append(event["item"])
    assert not open_items
    return output


def _text_of(item):
    texts = item.get("summary") or item.get("content") or []
    return "".join(part["text"] for part in texts) + item.get("arguments", "") + item.get("input", "")


@given(data=st.data())
def test_sequence_numbers_count_the_events(data):
    """Pings repeat number 1; the others have no gap."""
    reply = data.draw(replies())
    numbers = [value["sequence_number"] for _, value in events(b"".join(data.draw(streams(RESPONSES, reply))))]
    assert [n for i, n in enumerate(numbers) if i < 2 or n != 1] == list(range(max(numbers) + 1))


def test_an_answer_without_reasoning_begins_with_an_empty_reasoning_item():
    """Harnesses return its encrypted_content on text-only turns."""
    first, message = RESPONSES.encode(REQUEST, Reply(CORE, (Text("x"),), "stop"))["output"]
    assert first["summary"] == []
    assert first["encrypted_content"] == CORE
    assert message["content"][0]["text"] == "x"


def test_reasoning_is_closed_before_text_opens():
    """The reasoning item is done when the first text comes."""
    encoder = began(RESPONSES.encoder(REQUEST, CORE))
    encoder.delta("reasoning", "hm")
    kinds = [name for name, _ in events(encoder.delta("text", "x"))]
    assert kinds == [
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
    ]


def test_a_reply_cut_by_length_is_incomplete():
    """The terminal event and the message say so."""
    reply = Reply(CORE, (Text("x"),), "length")
    name, last = events(streamed(RESPONSES, reply))[-1]
    assert name == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][1]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ContextOverflow(2, 1), "context_length_exceeded"),
        (EngineError("odd"), "server_error"),
        (BadRequest("n: 2"), "invalid_prompt"),
    ],
)
def test_a_failed_response_has_a_code(error, code):
    """Codex decides by the code whether to try again."""
    ((name, value),) = events(RESPONSES.encoder(REQUEST, CORE).fail(error))
    assert name == "response.failed"
    assert value["response"]["status"] == "failed"
    assert value["response"]["error"]["code"] == code


def test_a_call_names_the_name_space_that_the_tool_was_declared_in():
    """`functions` is the default and is left out; a custom tool's input is raw."""
    calls = (ToolCall("call_1", "spawn", "{}"), ToolCall("call_2", "exec", "js()", custom=True))
    _, spawn, execute = RESPONSES.encode(REQUEST, Reply(CORE, calls, "tool_calls"))["output"]
    assert (spawn["type"], spawn["namespace"], spawn["name"]) == ("function_call", "agents", "spawn")
    assert (execute["type"], execute["name"], execute["input"]) == ("custom_tool_call", "exec", "js()")
    assert "namespace" not in execute


def test_tools_of_one_name_in_two_name_spaces_stay_apart():
    """The later one gets a longer name for the model, and its own back for the harness."""
    spaces = [{"type": "namespace", "name": name, "tools": [FUNCTION]} for name in ("a", "b")]
    call = {"type": "function_call", "call_id": "call_1", "namespace": "b", "name": "f", "arguments": "{}"}
    request = _decode(tools=spaces, input=[{"role": "user", "content": "hi"}, call])
    assert [tool.name for tool in request.tools] == ["f", "b.f"]
    assert request.messages[1].parts[0].name == "b.f"
    *_, item = RESPONSES.encode(request, Reply(CORE, (ToolCall("call_2", "b.f", "{}"),), "tool_calls"))["output"]
    assert (item["namespace"], item["name"]) == ("b", "f")


def test_items_of_one_turn_are_one_assistant_message():
    """Reasoning, text and call come back as three items and were one reply."""
    request = golden("codex-0.171.0.tool-turn")
    conversation = RESPONSES.decode(request["body"], request["headers"])
    assert [message.role for message in conversation.messages] == [
        *("system", "system", "user", "user"),
        *("assistant", "tool"),
    ]
    reasoning, text, call = conversation.messages[4].parts
    assert reasoning == Reasoning("\nThinking about it: the user wants hello.txt.  \n")
    assert text == Text("  I'll write the file now.\n\n")
    assert call.arguments.startswith('{ "cmd" : "printf')


def test_tools_come_from_the_top_from_name_spaces_and_from_items():
    """Server tools are left out and listed."""
    plain = golden("codex-0.171.0.tool-turn")
    conversation = RESPONSES.decode(plain["body"], plain["headers"])
    assert ("spawn_agent", "multi_agent_v1") in [(tool.name, tool.namespace) for tool in conversation.tools]
    assert "tools.web_search" in conversation.fidelity
    lite = golden("codex-0.171.0.custom-tool-turn")
    conversation = RESPONSES.decode(lite["body"], lite["headers"])
    assert next(tool for tool in conversation.tools if tool.custom).name == "exec"
    assert conversation.messages[-1].parts[0].text.startswith("Script completed\nWall time 0.2 seconds\nOutput:\nhello")


def test_ids_are_read_in_the_order_of_the_history():
    """Item ids, call ids and encrypted contents."""
    request = golden("opencode-1.18.33.tool-turn")
    conversation = RESPONSES.decode(request["body"], request["headers"])
    call = "call_20a624e00d73410591c54c49"
    assert conversation.echoes == ("gAAAA-stub-encrypted", call, call)


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
    assert conversation.fidelity == ("prompt_cache_key", "store", "include", "reasoning", "text.verbosity")
    assert _decode(prompt_cache_key="key", tools=[FUNCTION]).tools == (Tool("f", "", '{"type":"object"}'),)
    assert _decode(prompt_cache_key="key").thread == "key"


def test_outputs_are_tool_messages():
    """A string, or a list of text parts."""
    item = {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "a"}]}
    assert _decode(input=[item]).messages == (Message("tool", (ToolResult("call_1", "a"),)),)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("prompt", {"id": "p"}),
        ("background", True),
        ("top_logprobs", 2),
        ("include", ["message.output_text.logprobs"]),
        ("tool_choice", {"type": "function", "name": "f"}),
        ("max_output_tokens", 0),
        ("input", []),
        ("input", [{"type": "compaction_trigger"}]),
        ("input", [{"type": "item_reference", "id": "x"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        ("input", [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]),
        ("input", [{"role": "tool", "content": "x"}]),
        ("text", {"format": {"type": "json_schema"}}),
    ],
)
def test_what_would_change_the_meaning_is_refused(field, value):
    """The error names the field."""
    with pytest.raises(BadRequest, match=field):
        _decode(**{field: value})
