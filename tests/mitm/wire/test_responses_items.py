"""The values of a Responses answer."""

from polar_mitm.conversation import Reply, Text, Tool, ToolCall, Usage
from polar_mitm.wire import responses_items as items
from polar_mitm.wire.answer import Answer
from tests.mitm.wire.replies import CORE, REQUEST


def test_a_tool_is_called_by_its_own_name_in_its_name_space():
    """The default name space may be left out, unless the tool had to be renamed."""
    assert items.spaced_names(Tool("f", "", "{}")) == (("", "f"),)
    assert items.spaced_names(Tool("f", "", "{}", namespace="a")) == (("a", "f"),)
    assert items.spaced_names(Tool("f", "", "{}", namespace="functions")) == (("", "f"), ("functions", "f"))
    assert items.spaced_names(Tool("functions.f", "", "{}", namespace="functions")) == (("functions", "f"),)


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
