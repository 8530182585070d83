"""The values of a Responses answer."""

import json
from dataclasses import replace

from openai import DefaultHttpxClient, OpenAI

from polar_mitm.conversation import Reasoning, Reply, Text, ToolCall, Usage
from polar_mitm.wire import responses_items as items
from polar_mitm.wire.answer import Answer
from tests.mitm.wire.replies import CORE, REQUEST, serve


def test_usage_is_whole():
    """Input, cached, output, reasoning and total."""
    usage = items.finished(REQUEST, Reply(CORE, (Text("x"),), "stop", Usage(10, 4, 3, 1)))["usage"]
    assert usage == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 13,
    }


def test_an_empty_reply_still_has_a_message():
    """So its id can come back; a reply of calls alone has none."""
    assert items.has_message(Answer("", "", ()))
    assert not items.has_message(Answer("r", "", (ToolCall("call_1", "run", "{}"),)))


def test_an_answer_without_reasoning_begins_with_an_empty_reasoning_item():
    """Harnesses return its encrypted_content on text-only turns."""
    first, message = items.finished(REQUEST, Reply(CORE, (Text("x"),), "stop"))["output"]
    assert first["summary"] == []
    assert first["encrypted_content"] == CORE
    assert message["content"][0]["text"] == "x"


def test_a_compaction_without_text_keeps_what_was_thought():
    """Better a summary of thoughts than none."""
    item = items.compaction_item(Reply(CORE, (Reasoning("hm"),), "length"))
    assert item == {"id": f"cmp_{CORE}", "type": "compaction", "encrypted_content": f"{CORE}.aG0="}


def test_the_sdk_reads_a_compacted_history():
    """OpenAI's SDK posts to `/responses/compact` and gets the messages and one compaction item."""
    asked = replace(REQUEST, messages=(*REQUEST.messages, *REQUEST.messages), compacts="history")
    body = json.dumps(items.compacted(asked, Reply(CORE, (Text("a summary"),), "stop", Usage(10, 4, 3, 1)))).encode()
    transport = serve(body, "application/json")
    with OpenAI(api_key="k", base_url="http://x/v1", http_client=DefaultHttpxClient(transport=transport)) as client:
        compacted = client.responses.compact(model="m", input="hi")
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    assert compacted.object == "response.compaction"
    assert compacted.usage.total_tokens == 13
