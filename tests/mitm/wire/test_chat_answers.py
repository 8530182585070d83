"""The answers of OpenAI Chat Completions, judged by OpenAI's SDK."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import DefaultHttpxClient, OpenAI

from polar_mitm.conversation import Reasoning, Reply, Sampling, Scored, Text, ToolCall, Usage
from polar_mitm.errors import EngineError
from polar_mitm.wire.openai_chat import OpenAIChat
from tests.mitm.wire.replies import CORE, REQUEST, events, replies, serve, streamed, streams

CHAT = OpenAIChat()
HI = {"role": "user", "content": "hi"}
SECOND = CORE.replace("00", "01")
ASKED = replace(REQUEST, asked_at=1_700_000_000)


def _client(transport):
    return OpenAI(api_key="k", base_url="http://x/v1", http_client=DefaultHttpxClient(transport=transport))


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


def test_every_chunk_and_the_plain_answer_say_when_it_was_asked():
    """`created` is the arrival of the request."""
    reply = Reply(CORE, (Text("x"),), "stop")
    assert CHAT.encode(ASKED, reply)["created"] == 1_700_000_000
    stamps = {value["created"] for _, value in events(streamed(CHAT, reply, ASKED)) if value != "[DONE]"}
    assert stamps == {1_700_000_000}


def test_usage_is_streamed_only_when_it_is_wanted():
    """Pi and Qwen Code ask for it; then every other chunk has a null, as at OpenAI."""
    reply = Reply(CORE, (Text("x"),), "stop", Usage(3, 1, 2))
    without = [value for _, value in events(streamed(CHAT, reply, replace(REQUEST, stream_usage=False)))]
    assert not [value for value in without if "usage" in value]
    assert without[-2]["choices"][0]["finish_reason"] == "stop"
    *chunks, last, _ = [value for _, value in events(streamed(CHAT, reply))]
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert last["usage"]["prompt_tokens"] == 3


def test_choices_are_told_apart_by_their_index():
    """Each has its own text, calls and finish; the prompt counts once."""
    other = Reply(SECOND, (Text("b"), ToolCall(f"call_{SECOND}00", "run", "{}")), "tool_calls", Usage(3, 1, 5))
    reply = Reply(CORE, (Reasoning("r"), Text("a")), "length", Usage(3, 1, 2), others=(other,))
    asked = replace(REQUEST, sampling=Sampling(choices=2))
    plain = CHAT.encode(asked, reply)
    assert [choice["index"] for choice in plain["choices"]] == [0, 1]
    assert [choice["finish_reason"] for choice in plain["choices"]] == ["length", "tool_calls"]
    assert plain["usage"]["completion_tokens"] == 7
    assert plain["usage"]["total_tokens"] == 10
    encoder = CHAT.encoder(asked, CORE)
    body = encoder.begin() + encoder.delta("text", "b", 1) + encoder.delta("reasoning", "r") + encoder.finish(reply)
    with (
        _client(serve(body)) as client,
        client.chat.completions.stream(model="m", messages=[HI], n=2) as stream,
    ):
        list(stream)
        rebuilt = stream.current_completion_snapshot
    assert [choice.message.content for choice in rebuilt.choices] == ["a", "b"]
    assert [choice.finish_reason for choice in rebuilt.choices] == ["length", "tool_calls"]
    assert rebuilt.choices[1].message.tool_calls[0].id == f"call_{SECOND}00"


def test_logprobs_come_with_the_text_when_they_are_wanted():
    """The SDK reads the same tokens from both forms; half a character is spelled in bytes."""
    scored = (Scored(b"a", -0.5), Scored(b"\xf0\x9f", -1.0), Scored(b"\x98\x80", float("-inf")))
    reply = Reply(CORE, (Text("a\U0001f600"),), "stop", scored=scored)
    asked = replace(REQUEST, sampling=Sampling(logprobs=True))
    with _client(serve(json.dumps(CHAT.encode(asked, reply)).encode(), "application/json")) as client:
        plain = client.chat.completions.create(model="m", messages=[HI], logprobs=True).choices[0].logprobs
    with (
        _client(serve(streamed(CHAT, reply, asked))) as client,
        client.chat.completions.stream(model="m", messages=[HI], logprobs=True) as stream,
    ):
        list(stream)
        rebuilt = stream.current_completion_snapshot.choices[0].logprobs
    assert rebuilt == plain
    assert [token.token for token in plain.content] == ["a", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80"]
    assert [token.logprob for token in plain.content] == [-0.5, -1.0, -9999.0]
    assert plain.content[1].bytes == [0xF0, 0x9F]
    assert CHAT.encode(REQUEST, reply)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(("parts", "kinds"), [((Text("x"),), 1), ((Reasoning("hm"), Text("x")), 2)])
def test_one_encrypted_detail_carries_the_id(parts, kinds):
    """Pi returns the details instead of the reasoning, so its text stands there too, signed."""
    reply = Reply(CORE, parts, "stop")
    details = CHAT.encode(REQUEST, reply)["choices"][0]["message"]["reasoning_details"]
    assert len(details) == kinds
    assert details[-1] == {
        "type": "reasoning.encrypted",
        "data": CORE,
        "id": f"rs_{CORE}",
        "format": "unknown",
        "index": kinds - 1,
    }
    streamed_details = [
        value["choices"][0]["delta"]["reasoning_details"]
        for _, value in events(streamed(CHAT, reply))[:-2]
        if "reasoning_details" in value["choices"][0]["delta"]
    ]
    assert streamed_details == [details]
