"""Canonical values as chat templates take them."""

from __future__ import annotations

from polar_mitm.conversation import Message, Reasoning, Text, Tool, ToolCall, ToolResult
from polar_mitm.tokens import plain

ASKED = Message("user", (Text("one"), Text("two")))
CALLED = Message("assistant", (Reasoning("hm"), ToolCall("c1", "run", '{"a": 1}'), ToolCall("c2", "patch", "x", True)))
RESULTS = Message("tool", (ToolResult("c1", "yes"), ToolResult("c2", "no")))


def test_a_message_of_several_results_becomes_several() -> None:
    """Each with the name of the tool that was called, also when the call stands before the start."""
    assert plain.chat((ASKED, CALLED, RESULTS), 2) == [
        {"role": "tool", "content": "yes", "tool_call_id": "c1", "name": "run"},
        {"role": "tool", "content": "no", "tool_call_id": "c2", "name": "patch"},
    ]


def test_an_assistants_turn_has_reasoning_and_calls() -> None:
    """The input of a free-form tool is its only argument."""
    _, said = plain.chat((ASKED, CALLED))
    assert (said["content"], said["reasoning_content"]) == ("", "hm")
    assert [c["function"]["arguments"] for c in said["tool_calls"]] == [{"a": 1}, {"input": "x"}]


def test_a_free_form_tool_is_a_function_of_one_string() -> None:
    """No tools are None, which templates take for none."""
    (spec,) = plain.specs((Tool("patch", "patches", "", custom=True),)) or []
    assert spec["function"]["parameters"]["required"] == ["input"]
    assert plain.specs(()) is None
