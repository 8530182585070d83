"""What a decoded request says, in a few lines: the expectation that stands beside a golden request.

Invariant: everything that decides how a call is answered and where it belongs is in it; texts are not.
"""

from __future__ import annotations

from typing import Any

from polar_mitm.conversation import Conversation, Message, Text, ToolCall, ToolResult
from polar_mitm.routes import Match, find

Json = dict[str, Any]  # Any: requests


def route(request: Json) -> Match:
    """What becomes of a golden request."""
    path, _, query = request["path"].partition("?")
    return find(request["method"], request["host"], path, query, request["headers"])


def decoded(request: Json) -> Conversation:
    """The conversation of a golden request. Raises BadRequest as its dialect does."""
    found = route(request)
    return found.dialect.decode({**request["body"], **found.fields}, request["headers"])


def summary(conversation: Conversation) -> Json:
    """Messages by role and parts, tools by name, and what else was asked for where it was."""
    asked = {
        "stream": conversation.stream,
        "thread": conversation.thread,
        "continues": conversation.continues,
        "compacts": conversation.compacts,
        "forced_tool": conversation.forced_tool,
        "json_schema": conversation.sampling.json_schema,
        "max_tokens": conversation.sampling.max_tokens,
    }
    return {
        "model": conversation.model,
        "messages": [_message(message) for message in conversation.messages],
        "tools": [f"{tool.namespace}.{tool.name}".lstrip(".") for tool in conversation.tools],
        "echoes": list(conversation.echoes),
        "fidelity": list(conversation.fidelity),
        **{name: value for name, value in asked.items() if value is not None},
    }


def _message(message: Message) -> str:
    return f"{message.role}: {', '.join(map(_part, message.parts))}"


def _part(part: object) -> str:
    if isinstance(part, ToolCall):
        return f"{'custom ' * part.custom}call of {part.name}"
    if isinstance(part, ToolResult):
        return "error" if part.is_error else "result"
    return "text" if isinstance(part, Text) else "reasoning"
