"""What a family's parser made of a sample, as canonical parts; what is no proper call of an offered tool, as text.

Invariant: nothing is repaired and nothing is lost. A call that cannot be given to the harness as one stands in the text
as it was sampled, and `faults` says why. This module knows no token ids beyond the spans that the parser names.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from renderers import ParsedResponse, ParsedToolCall, ToolCallParseStatus

from polar_mitm.conversation import Part, Reasoning, Text, Tool, ToolCall

Fault = Literal["malformed_tool_call", "truncated_tool_call", "unknown_tool"]


@dataclass(frozen=True, slots=True)
class Parsed:
    """A sample, read."""

    parts: tuple[Part, ...]
    """Reasoning, Text, ToolCall; the ids of tool calls are empty, the caller mints them."""
    reasoning_open: bool = False
    """Whether the sample ends inside its reasoning."""
    has_tool_call: bool = False
    """Whether a tool call, well-formed or not, begins in the sample."""
    faults: tuple[Fault, ...] = ()
    """Why calls of the sample stand in its text, one for each."""
    spoken: str = ""
    """The visible text without calls of any kind, trimmed."""
    calls_at: int | None = None
    """Where in the sample the first call begins, as far as the family's parser says."""

    def of(self, kind: type[Reasoning | Text]) -> str:
        """The text of the parts of a kind."""
        return "".join(part.text for part in self.parts if isinstance(part, kind))


def from_renderer(read: ParsedResponse, tools: tuple[Tool, ...], sampled: Callable[[tuple[int, int]], str]) -> Parsed:
    """The canonical form of what a typed renderer read; `sampled` gives the text of a span of the sample."""
    offered = {tool.name: tool for tool in tools}
    reasoning, text = (read.reasoning_content or "").strip(), [read.content.strip()]
    starts = [call.token_span[0] for call in read.tool_calls if call.token_span]
    calls: list[ToolCall] = []
    faults: list[Fault] = []
    for call in read.tool_calls:
        made = _call(call, offered)
        if isinstance(made, ToolCall):
            calls.append(made)
        else:
            faults.append(made)
            text.append(sampled(call.token_span) if call.token_span else _raw(call))
    said = "\n".join(text).strip()
    parts = ([Reasoning(reasoning)] if reasoning else []) + ([Text(said)] if said else []) + calls
    return Parsed(
        tuple(parts),
        reasoning_open=read.reasoning_complete is False,
        has_tool_call=bool(read.tool_calls),
        faults=tuple(faults),
        spoken=text[0],
        calls_at=min(starts, default=None),
    )


def _call(call: ParsedToolCall, offered: dict[str, Tool]) -> ToolCall | Fault:
    if call.status == ToolCallParseStatus.UNCLOSED_BLOCK:
        return "truncated_tool_call"
    if call.status == ToolCallParseStatus.UNKNOWN_TOOL or (call.name and call.name not in offered):
        return "unknown_tool"
    if call.status != ToolCallParseStatus.OK or not call.name:
        return "malformed_tool_call"
    arguments = {} if call.arguments is None else call.arguments
    if not isinstance(arguments, dict):
        return "malformed_tool_call"
    if offered[call.name].custom:
        given = arguments.get("input")
        return ToolCall("", call.name, given, custom=True) if isinstance(given, str) else "malformed_tool_call"
    try:
        return ToolCall("", call.name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except ValueError:  # NaN and Infinity, which Python reads and no harness does
        return "malformed_tool_call"


def _raw(call: ParsedToolCall) -> str:
    """For the families whose parser names no span."""
    cut = call.status == ToolCallParseStatus.UNCLOSED_BLOCK
    return f"<tool_call>\n{call.raw}" if cut else f"<tool_call>\n{call.raw}\n</tool_call>"
