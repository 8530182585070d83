"""Canonical values as the plain JSON that chat templates take: OpenAI's chat messages and function specifications.

Invariant: what is said is not changed; a free-form tool becomes a function of one string, `input`, and back only in
`parsed`. This module knows no token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from polar_mitm.conversation import Message, Reasoning, Tool, ToolCall, ToolResult, joined_text

_FREE_FORM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@dataclass(frozen=True, slots=True)
class Shape:
    """Where chat templates differ in the JSON that they take."""

    arguments: Literal["object", "text"] = "object"
    """A call's arguments as an object, or as the JSON text of one: DeepSeek-V3's template adds them to a string."""


OBJECTS = Shape()
"""What most templates, and all typed renderers, take."""


@lru_cache(maxsize=64)
def specs(tools: tuple[Tool, ...]) -> list[Any] | None:  # Any: OpenAI function specifications
    """The offered tools; None when there are none. The list is shared: do not change it."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": _FREE_FORM if tool.custom else json.loads(tool.parameters or "{}"),
            },
        }
        for tool in tools
    ] or None


def chat(
    messages: tuple[Message, ...], start: int = 0, shape: Shape = OBJECTS
) -> list[Any]:  # Any: chat messages as JSON
    """messages[start:] as chat messages; a message of several tool results becomes several."""
    names = {p.id: p.name for m in messages for p in m.parts if isinstance(p, ToolCall)}
    return [plain for message in messages[start:] for plain in _message(message, names, shape)]


def _message(message: Message, names: dict[str, str], shape: Shape) -> list[dict[str, Any]]:  # Any: JSON
    results = [p for p in message.parts if isinstance(p, ToolResult)]
    if results:
        return [
            {"role": "tool", "content": r.text, "tool_call_id": r.call_id, "name": names.get(r.call_id, "")}
            for r in results
        ]
    plain: dict[str, Any] = {"role": message.role, "content": joined_text(message)}
    calls = [_call(p, shape) for p in message.parts if isinstance(p, ToolCall)]
    reasoning = "".join(p.text for p in message.parts if isinstance(p, Reasoning))
    if reasoning:
        plain["reasoning_content"] = reasoning
    if calls:
        plain["tool_calls"] = calls
    return [plain]


def _call(call: ToolCall, shape: Shape) -> dict[str, Any]:  # Any: JSON
    try:
        arguments = {"input": call.arguments} if call.custom else json.loads(call.arguments)
        if shape.arguments == "text":
            arguments = json.dumps(arguments, ensure_ascii=False)
    except ValueError:
        arguments = call.arguments  # a harness may send back arguments that are no JSON: shown as they are
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
