"""The tools of an Anthropic request."""

import json

import pytest

from polar_mitm.conversation import Tool, ToolResult
from polar_mitm.errors import BadRequest
from polar_mitm.wire.anthropic import AnthropicMessages

ANTHROPIC = AnthropicMessages()
HI = {"role": "user", "content": "hi"}
SEARCHABLE = {"name": "later", "input_schema": {}, "defer_loading": True}
FUNCTION = {"name": "f", "input_schema": {}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}


def _decode(headers=None, **body):
    return ANTHROPIC.decode({"model": "m", "max_tokens": 9, "messages": [HI], **body}, headers or {})


def test_a_deferred_tool_is_offered_once_a_search_has_found_it():
    """Claude Code's ToolSearch answers with references."""
    assert _decode(tools=[SEARCHABLE]).tools == ()
    reference = {"type": "tool_reference", "tool_name": "later"}
    found = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [reference]}]}
    conversation = _decode(tools=[SEARCHABLE], messages=[HI, found])
    assert conversation.tools == (Tool("later", "", "{}"),)
    assert conversation.messages[1].parts == (ToolResult("t", "later"),)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("bash_20250124", "bash"),
        ("text_editor_20250728", "str_replace_based_edit_tool"),
        ("text_editor_20250124", "str_replace_editor"),
        ("memory_20250818", "memory"),
    ],
)
def test_a_tool_that_anthropic_defines_and_the_harness_runs_is_offered(kind, name):
    """Of whatever date, under the name that it was given, with parameters that the model can see."""
    (tool,) = _decode(tools=[{"type": kind, "name": name}]).tools
    assert tool.name == name
    assert "command" in json.loads(tool.parameters)["properties"]


@pytest.mark.parametrize(
    ("choice", "offered", "forced"),
    [
        ({"type": "auto", "disable_parallel_tool_use": False}, ["f"], None),
        ({"type": "none"}, [], None),
        ({"type": "any"}, ["f"], ""),
        ({"type": "tool", "name": "f"}, ["f"], "f"),
    ],
)
def test_a_tool_choice_says_what_may_and_must_be_called(choice, offered, forced):
    """In each of the protocol's forms."""
    conversation = _decode(tools=[FUNCTION, SEARCH], tool_choice=choice)
    assert [tool.name for tool in conversation.tools] == offered
    assert conversation.forced_tool == forced


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        ([SEARCH], {"type": "any"}),
        ([FUNCTION], {"type": "tool", "name": "web_search"}),
        ([FUNCTION], {"type": "tool"}),
        ([FUNCTION], {"type": "some"}),
    ],
)
def test_a_call_that_cannot_be_forced_is_refused(tools, choice):
    """Of a tool that runs at the provider, or that was not declared."""
    with pytest.raises(BadRequest, match="tool_choice"):
        _decode(tools=tools, tool_choice=choice)
