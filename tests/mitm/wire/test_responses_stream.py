"""The streamed form of a Responses answer, judged by OpenAI's SDK."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import DefaultHttpxClient, OpenAI

from polar_mitm.conversation import Reasoning, Reply, Sampling, Scored, Text, ToolCall
from polar_mitm.errors import BadRequest, ContextOverflow, EngineError
from polar_mitm.wire.openai_responses import OpenAIResponses
from tests.mitm.wire.replies import CORE, REQUEST, began, events, replies, serve, streamed, streams

RESPONSES = OpenAIResponses()
PARSED = {"output": {"__all__": {"content": {"__all__": {"parsed"}}, "parsed_arguments": True}}}
"""What the SDK's stream helper adds to the items."""


def _client(transport):
    return OpenAI(api_key="k", base_url="http://x/v1", http_client=DefaultHttpxClient(transport=transport))


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


def test_a_compaction_is_one_item():
    """Codex 0.171.0 demands exactly one; the summary is not streamed as text, even when it was cut."""
    request = replace(REQUEST, compacts="item")
    encoder = RESPONSES.encoder(request, CORE)
    reply = Reply(CORE, (Reasoning("hm"), Text("a summary")), "length")
    body = encoder.begin() + encoder.delta("reasoning", "hm") + encoder.delta("text", "a sum") + encoder.finish(reply)
    kinds = [name.removeprefix("response.") for name, _ in events(body)]
    assert kinds == ["created", "in_progress", "output_item.added", "output_item.done", "completed"]
    assert events(body)[-1][1]["response"]["output"] == [events(body)[-2][1]["item"]]
    with _client(serve(body)) as client, client.responses.stream(model="m", input="hi") as stream:
        item = list(stream)[-1].response.output[0]
    assert (item.type, item.encrypted_content) == ("compaction", f"{CORE}.YSBzdW1tYXJ5")


def test_a_built_in_call_has_no_deltas():
    """A local shell's call is an item of its own kind, whole."""
    request = RESPONSES.decode({"model": "m", "input": "hi", "tools": [{"type": "local_shell"}]}, {})
    reply = Reply(CORE, (ToolCall("call_1", "local_shell", '{"command":["ls"]}'),), "tool_calls")
    body = streamed(RESPONSES, reply, request)
    assert not [name for name, _ in events(body) if name.endswith("delta")]
    with _client(serve(body)) as client, client.responses.stream(model="m", input="hi") as stream:
        item = list(stream)[-1].response.output[1]
    assert (item.type, item.call_id, item.action.command) == ("local_shell_call", "call_1", ["ls"])


@pytest.mark.parametrize("sent", ["", "a", "ab"])
def test_logprobs_come_with_the_text_when_they_are_wanted(sent):
    """On the last delta, the done event and the item; the SDK reads them from all three."""
    request = replace(REQUEST, sampling=Sampling(logprobs=True))
    reply = Reply(CORE, (Text("ab"),), "stop", scored=(Scored(b"a", -0.5), Scored(b"b", -1.5)))
    encoder = RESPONSES.encoder(request, CORE)
    body = encoder.begin() + encoder.delta("text", sent) + encoder.finish(reply)
    with _client(serve(body)) as client, client.responses.stream(model="m", input="hi") as stream:
        seen = list(stream)
    deltas = [token.logprob for event in seen if event.type == "response.output_text.delta" for token in event.logprobs]
    (done,) = (event for event in seen if event.type == "response.output_text.done")
    part = seen[-1].response.output[1].content[0]
    assert deltas == [token.logprob for token in done.logprobs] == [token.logprob for token in part.logprobs]
    assert deltas == [-0.5, -1.5]
    assert RESPONSES.encode(request, reply)["output"][1]["content"][0]["logprobs"] == part.model_dump()["logprobs"]
