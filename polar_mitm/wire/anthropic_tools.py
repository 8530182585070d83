"""The tools of an Anthropic request, and which of them must be called.

Invariant: a tool that the harness itself runs is offered to the model, also when Anthropic defines it by its type
alone. Tools that run at the provider are left out and listed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from polar_mitm.conversation import Tool
from polar_mitm.errors import BadRequest
from polar_mitm.wire.fields import Fields, compact
from polar_mitm.wire.frame import Choice
from polar_mitm.wire.history import History

_TEXT = {"type": "string"}
_EDIT = {"path": _TEXT, "insert_line": {"type": "integer"}, "old_str": _TEXT, "new_str": _TEXT}
_DATED = re.compile(r"([a-z_]+)_\d{8}")

_HARNESS_RUN: Mapping[str, tuple[str, dict[str, Any]]] = {  # Any: JSON schema
    "bash": (
        "Runs a command in a shell that stays open.",
        {"command": _TEXT, "restart": {"type": "boolean", "description": "Start the shell anew"}},
    ),
    "text_editor": (
        "Views, creates and edits files.",
        {
            "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
            **_EDIT,
            "view_range": {"type": "array", "items": {"type": "integer"}},
            "file_text": _TEXT,
            "insert_text": _TEXT,
        },
    ),
    "memory": (
        "Keeps notes in files under /memories.",
        {
            "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
            **_EDIT,
            "file_text": _TEXT,
            "insert_text": _TEXT,
            "old_path": _TEXT,
            "new_path": _TEXT,
        },
    ),
}
"""Description and parameters of the tools that are declared by their type, without its date, and run by the harness."""


def read_tools(request: Fields, history: History) -> tuple[Tool, ...]:
    """The tools that the model is offered. Raises BadRequest."""
    declared = request.children("tools")
    found = _referenced(request) if any(tool.value("defer_loading") for tool in declared) else set[str]()
    tools: list[Tool] = []
    for tool in declared:
        kind = tool.maybe_text("type") or "custom"
        dated = _DATED.fullmatch(kind)
        if kind == "custom" and tool.flag("defer_loading") and tool.text("name") not in found:
            history.ignore("tools.defer_loading")  # not in the prompt until a tool search has found it
        elif kind == "custom":
            tools.append(_declared(tool))
        elif dated and dated[1] in _HARNESS_RUN:
            description, properties = _HARNESS_RUN[dated[1]]
            schema = compact({"type": "object", "properties": properties})
            tools.append(Tool(tool.text("name"), description, schema))
        else:
            history.ignore(f"tools[{kind}]")  # runs at the provider
    return tuple(tools)


def _declared(tool: Fields) -> Tool:
    schema = tool.schema("input_schema")
    if schema is None:
        raise tool.wrong("input_schema", "expected an object")
    return Tool(tool.text("name"), tool.maybe_text("description") or "", schema)


def _referenced(request: Fields) -> set[str]:
    """Names of the deferred tools that tool results refer to (Claude Code's ToolSearch)."""
    references = request.found("messages.content[tool_result].content[tool_reference]")
    return {part.text("tool_name") for part, _ in references}


def choose(request: Fields, tools: tuple[Tool, ...]) -> Choice:
    """What `tool_choice` leaves of the tools. Raises BadRequest."""
    choice = request.child("tool_choice")
    kind = choice.text("type") if choice else "auto"
    if kind == "auto":
        return Choice(tools)
    if kind == "none":
        return Choice(())
    if kind not in ("any", "tool") or choice is None:
        raise request.wrong("tool_choice", "expected type auto, any, tool or none")
    if not tools:
        raise request.wrong("tool_choice", "may only be specified while providing tools that the harness runs")
    if kind == "any":
        return Choice(tools, "")
    name = choice.text("name")
    if name not in [tool.name for tool in tools]:
        raise BadRequest(f"tool_choice: Tool {name!r} not found in provided tools", field="tool_choice")
    return Choice(tools, name)
