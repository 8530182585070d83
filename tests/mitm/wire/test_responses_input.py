"""The items of a Responses request."""

import pytest

from polar_mitm.conversation import Message, Reasoning, Text, ToolCall, ToolResult
from polar_mitm.errors import BadRequest
from polar_mitm.wire.fields import Fields
from polar_mitm.wire.history import History
from polar_mitm.wire.openai_responses import OpenAIResponses
from polar_mitm.wire.responses_input import packed, read_item
from tests.mitm.wire.replies import CORE, golden

RESPONSES = OpenAIResponses()


def _decode(**body):
    return RESPONSES.decode({"model": "m", "input": "hi", **body}, {})


def test_items_of_one_turn_are_one_assistant_message():
    """Reasoning, text and call come back as three items and were one reply."""
    request = golden("codex-0.171.0.tool-turn")
    conversation = RESPONSES.decode(request["body"], request["headers"])
    assert [message.role for message in conversation.messages] == [
        *("system", "system", "user", "user"),
        *("assistant", "tool"),
    ]
    reasoning, text, call = conversation.messages[4].parts
    assert reasoning == Reasoning("The file has to hold a greeting.")
    assert text == Text("I will write it.")
    assert call.arguments.startswith('{"cmd": "printf')


def test_ids_are_read_in_the_order_of_the_history():
    """Item ids, call ids and encrypted contents."""
    request = golden("opencode-1.18.33.tool-turn")
    conversation = RESPONSES.decode(request["body"], request["headers"])
    sealed, call, again = conversation.echoes
    assert call == again == f"call_{sealed}02"


def test_outputs_are_tool_messages():
    """A string, or a list of text parts."""
    item = {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "a"}]}
    assert _decode(input=[item]).messages == (Message("tool", (ToolResult("call_1", "a"),)),)


def test_a_local_shells_result_names_its_call_by_its_own_id():
    """OpenAI's form of it has no other."""
    call = {"type": "local_shell_call", "id": "lsh_1", "call_id": "call_1", "action": {"type": "exec", "command": []}}
    result = {"type": "local_shell_call_output", "id": "call_1", "output": '{"stdout":"x"}'}
    messages = _decode(input=[call, result]).messages
    assert messages[0].parts == (ToolCall("call_1", "local_shell", '{"command":[]}'),)
    assert messages[1].parts == (ToolResult("call_1", '{"stdout":"x"}'),)


def test_reasoning_is_read_from_its_summary_and_its_content():
    """Open models give the text itself as content."""
    item = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    assert _decode(input=[item]).messages == (Message("assistant", (Reasoning("hm"),)),)


@pytest.mark.parametrize("summary", ["", "a", "h\u00e9 \U0001f600 \n", "\ud800"])
def test_a_compaction_item_expands_to_its_summary(summary):
    """Whatever was written in it, without a store."""
    history = History()
    item = {"type": "compaction", "id": f"cmp_{CORE}", "encrypted_content": packed(CORE, summary)}
    read_item(Fields(item), (), history)
    (message,) = history.messages("input")
    assert message.role == "user"
    assert message.parts[0].text.endswith("which it replaces:\n\n" + summary)
    assert isinstance(message.parts[0], Text)


@pytest.mark.parametrize("sealed", ["gAAAA", f"{CORE}.%%", f"{CORE}.gA==", "x.\u00e9"])
def test_a_compaction_item_of_another_is_refused(sealed):
    """It cannot be read, so the model would miss the history."""
    with pytest.raises(BadRequest, match=r"input\[0\]\.encrypted_content: not compacted here"):
        _decode(input=[{"type": "compaction", "encrypted_content": sealed}])
