"""What a family's parser made of a sample, as canonical parts."""

from __future__ import annotations

import pytest
from renderers import ParsedResponse, ParsedToolCall, ToolCallParseStatus

from polar_mitm.conversation import Reasoning, Text, Tool, ToolCall
from polar_mitm.tokens.parsed import Parsed, from_renderer

TOOLS = (Tool("run", "runs", '{"type":"object"}'), Tool("patch", "patches", "", custom=True))


def read(*calls: ParsedToolCall, reasoning: str | None = None) -> Parsed:
    response = ParsedResponse(content=" I look. ", reasoning_content=reasoning, tool_calls=[*calls])
    return from_renderer(response, TOOLS, lambda span: f"<{span[0]}:{span[1]}>")


def test_parts_stand_in_the_order_of_the_sample() -> None:
    """Trimmed at their ends."""
    call = ParsedToolCall("", "run", {"a": 1}, (5, 9))
    parsed = read(call, reasoning="\nhm\n")
    assert parsed.parts == (Reasoning("hm"), Text("I look."), ToolCall("", "run", '{"a": 1}'))
    assert (parsed.spoken, parsed.calls_at, parsed.faults) == ("I look.", 5, ())


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (ParsedToolCall("x", "run", "ls", (5, 9)), "malformed_tool_call"),
        (ParsedToolCall("x", "run", {"a": float("nan")}, (5, 9)), "malformed_tool_call"),
        (ParsedToolCall("x", "patch", {"text": "x"}, (5, 9)), "malformed_tool_call"),
        (ParsedToolCall("x", None, {}, (5, 9)), "malformed_tool_call"),
        (ParsedToolCall("x", None, None, (5, 9), ToolCallParseStatus.INVALID_JSON), "malformed_tool_call"),
        (ParsedToolCall("x", None, None, (5, 9), ToolCallParseStatus.UNCLOSED_BLOCK), "truncated_tool_call"),
        (ParsedToolCall("x", "fly", {}, (5, 9)), "unknown_tool"),
    ],
)
def test_what_is_no_call_of_an_offered_tool_is_text(call: ParsedToolCall, fault: str) -> None:
    """As it was sampled, behind what was spoken; calls beside it stay calls."""
    parsed = read(call, ParsedToolCall("", "run", None, (10, 12)))
    assert parsed.parts == (Text("I look.\n<5:9>"), ToolCall("", "run", "{}"))
    assert (parsed.faults, parsed.has_tool_call) == ((fault,), True)


def test_a_parser_that_names_no_span_gives_its_raw_text() -> None:
    """In the marks that most families use."""
    parsed = read(ParsedToolCall("{oops", None, None, None, ToolCallParseStatus.INVALID_JSON))
    assert parsed.parts == (Text("I look.\n<tool_call>\n{oops\n</tool_call>"),)
    assert parsed.calls_at is None
