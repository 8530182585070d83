"""The answers of Anthropic Messages, judged by Anthropic's SDK."""

import json

import pytest
from anthropic import Anthropic, DefaultHttpxClient
from hypothesis import given
from hypothesis import strategies as st

from polar_mitm.conversation import Reply, Text, ToolCall, Usage
from polar_mitm.wire.anthropic import AnthropicMessages
from tests.mitm.wire.replies import CORE, REQUEST, events, replies, serve, streamed, streams

ANTHROPIC = AnthropicMessages()
HI = {"role": "user", "content": "hi"}


def _client(transport):
    return Anthropic(api_key="k", base_url="http://x", http_client=DefaultHttpxClient(transport=transport))


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
    reply = Reply(CORE, (Text("x"),), "stop", Usage(10, 4, 3, 2))
    usage = {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 3,
        "output_tokens_details": {"thinking_tokens": 2},
    }
    assert ANTHROPIC.encode(REQUEST, reply)["usage"] == usage
    assert events(streamed(ANTHROPIC, reply))[-2][1]["usage"] == usage


@pytest.mark.parametrize(
    ("finish", "reason"), [("stop", "end_turn"), ("length", "max_tokens"), ("tool_calls", "tool_use")]
)
def test_each_finish_has_its_stop_reason(finish, reason):
    """A call cut by length is not a tool use."""
    assert ANTHROPIC.encode(REQUEST, Reply(CORE, (ToolCall("toolu_1", "f", "{}"),), finish))["stop_reason"] == reason


def test_a_stop_sequence_is_named():
    """In both forms, and only when it is what ended the answer."""
    reply = Reply(CORE, (Text("x"),), "stop", stopped_by="END")
    plain = ANTHROPIC.encode(REQUEST, reply)
    assert (plain["stop_reason"], plain["stop_sequence"]) == ("stop_sequence", "END")
    assert events(streamed(ANTHROPIC, reply))[-2][1]["delta"] == {
        "stop_reason": "stop_sequence",
        "stop_sequence": "END",
    }
    assert ANTHROPIC.encode(REQUEST, Reply(CORE, (Text("x"),), "stop"))["stop_sequence"] is None


@pytest.mark.parametrize("arguments", ["{not json", "", "null", "[1]", '"text"', '{"a":NaN}'])
def test_a_call_without_an_object_is_no_tool_use(arguments):
    """Its input must be one: the harness reads the call as text and is not asked to run it."""
    calls = (ToolCall("toolu_1", "f", arguments), ToolCall("toolu_2", "g", "{}"))
    reply = Reply(CORE, (Text("x"), *calls), "tool_calls")
    blocks = ANTHROPIC.encode(REQUEST, reply)["content"][1:]
    assert blocks == [
        {"type": "text", "text": f"x\nf({arguments})"},
        {"type": "tool_use", "id": "toolu_2", "name": "g", "input": {}},
    ]
    alone = Reply(CORE, calls[:1], "tool_calls")
    assert ANTHROPIC.encode(REQUEST, alone)["stop_reason"] == "end_turn"
    assert events(streamed(ANTHROPIC, alone))[-2][1]["delta"]["stop_reason"] == "end_turn"
