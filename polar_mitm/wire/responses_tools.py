"""The tools of a Responses request: functions, free-form tools, name spaces, and the tools that a harness has built in.

Invariant: every tool that the harness itself runs is offered to the model under one name, and a call of it goes back in
the form in which the harness declared it. Tools that run at the provider are left out and listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polar_mitm.conversation import Tool, ToolCall
from polar_mitm.wire import openai
from polar_mitm.wire.answer import arguments_value
from polar_mitm.wire.fields import Fields, compact
from polar_mitm.wire.history import History

DEFAULT_NAMESPACE = "functions"
"""The name space that Codex 0.171.0 leaves out of the calls it sends back."""
BUILT_IN = "(built-in)"
"""Name space, in no harness's spelling, of the tools that are declared by their type alone."""

Item = dict[str, Any]  # Any: JSON


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A tool that the provider defines and the harness runs."""

    call: str
    """Type of the item that calls it; that of the result is the same with `_output`."""
    prefix: str
    """Of the item's id."""
    field: str
    """Field of the item that holds the arguments."""
    description: str
    properties: Mapping[str, Any]  # Any: JSON schema
    """Its parameters; the first must be given."""
    added: Mapping[str, Any]  # Any: JSON
    """What the field holds besides the arguments."""

    def tool(self, name: str) -> Tool:
        """The function that the model is offered in its place."""
        schema = {"type": "object", "properties": self.properties, "required": [next(iter(self.properties))]}
        return Tool(name, self.description, compact(schema), namespace=BUILT_IN)

    def arguments(self, item: Fields) -> str:
        """The arguments of a call in the history: what the field holds, without what was added to it."""
        held = item.wanted_child(self.field)
        given = {name: held.value(name) for name in (*self.properties, "type")}
        return compact({k: v for k, v in given.items() if v is not None and self.added.get(k) != v})


_LINES = {"type": "array", "items": {"type": "string"}}
_MILLISECONDS = {"type": "integer", "description": "Time limit in milliseconds"}

BUILT_INS: Mapping[str, BuiltIn] = {
    "local_shell": BuiltIn(
        *("local_shell_call", "lsh", "action", "Runs a command on this machine."),
        properties={
            "command": {**_LINES, "description": "The program and its arguments"},
            "working_directory": {"type": "string"},
            "timeout_ms": _MILLISECONDS,
            "env": {"type": "object", "additionalProperties": {"type": "string"}},
        },
        added={"type": "exec", "env": {}},
    ),
    "shell": BuiltIn(
        *("shell_call", "sh", "action", "Runs shell commands on this machine."),
        properties={
            "commands": {**_LINES, "description": "Shell commands, which run side by side"},
            "timeout_ms": _MILLISECONDS,
            "max_output_length": {"type": "integer", "description": "Most characters of output to return"},
        },
        added={},
    ),
    "apply_patch": BuiltIn(
        *("apply_patch_call", "apc", "operation", "Creates, changes or deletes a file."),
        properties={
            "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            "path": {"type": "string"},
            "diff": {"type": "string", "description": "The change, in the V4A diff format"},
        },
        added={},
    ),
}
BUILT_IN_CALLS: Mapping[str, str] = {tool.call: name for name, tool in BUILT_INS.items()}
"""Name of the tool by the type of the item that calls it."""


def read_tools(request: Fields, given: Iterable[Fields], history: History) -> tuple[Tool, ...]:
    """The tools of the request and of its `additional_tools` items. Raises BadRequest."""
    tools: list[Tool] = []
    for owner in (request, *(item for item in given if item.value("type") == "additional_tools")):
        for tool in owner.children("tools"):
            _read_tool(tool, "", tools, history)
    return tuple(tools)


def _read_tool(tool: Fields, namespace: str, tools: list[Tool], history: History) -> None:
    kind = tool.text("type")
    if kind == "namespace" and not namespace:
        for nested in tool.children("tools"):
            _read_tool(nested, tool.text("name"), tools, history)
    elif kind in BUILT_INS:
        tools.append(BUILT_INS[kind].tool(kind))
    elif kind in ("function", "custom"):
        name = _free_name(tools, namespace, tool.text("name"))
        schema = "" if kind == "custom" else tool.schema("parameters") or openai.NO_PARAMETERS
        description = tool.maybe_text("description") or ""
        tools.append(Tool(name, description, schema, custom=kind == "custom", namespace=namespace))
    else:
        history.ignore(f"tools[{kind}]")  # runs at the provider


def _free_name(tools: Iterable[Tool], namespace: str, name: str) -> str:
    """The name by which the model calls a tool: its own, made longer when an earlier tool has it."""
    return f"{namespace}.{name}" if namespace and any(tool.name == name for tool in tools) else name


def spaced_names(tool: Tool) -> tuple[tuple[str, str], ...]:
    """The (name space, name) pairs by which a harness may call a tool; the first is the one to answer with."""
    own_name = tool.name.removeprefix(f"{tool.namespace}.") if tool.namespace else tool.name
    full = (tool.namespace, own_name)
    return (("", own_name), full) if tool.namespace == DEFAULT_NAMESPACE and own_name == tool.name else (full,)


def known_name(tools: Iterable[Tool], namespace: str, name: str) -> str:
    """The tool's name for the model, from the name space and name of a call in the history."""
    known = (tool.name for tool in tools if (namespace, name) in spaced_names(tool))
    return next(known, name)


def chosen(tools: Iterable[Tool], choice: Fields) -> str | None:
    """The tool that a `tool_choice` means; None for one that runs at the provider."""
    kind = choice.text("type")
    if kind in ("function", "custom"):
        return known_name(tools, choice.maybe_text("namespace") or "", choice.text("name"))
    return kind if kind in BUILT_INS else None


def call_item(tools: Iterable[Tool], call: ToolCall, part_id: str) -> Item:
    """A tool call, in the form in which the harness declared the tool."""
    tool = next((tool for tool in tools if tool.name == call.name), None)
    head: Item = {"status": "completed", "call_id": call.id}
    if tool and tool.namespace == BUILT_IN:
        built_in = BUILT_INS[tool.name]
        held = {**built_in.added, **_object(call.arguments, built_in)}
        return {"id": f"{built_in.prefix}_{part_id}", "type": built_in.call, **head, built_in.field: held}
    namespace, name = spaced_names(tool)[0] if tool else ("", call.name)
    head["name"] = name
    if namespace:
        head["namespace"] = namespace
    if call.custom:
        return {"id": f"ctc_{part_id}", "type": "custom_tool_call", **head, "input": call.arguments}
    return {"id": f"fc_{part_id}", "type": "function_call", **head, "arguments": call.arguments}


def _object(arguments: str, built_in: BuiltIn) -> Item:
    """Arguments as an object; anything else as the first argument, which the harness will object to."""
    value = arguments_value(arguments)
    return value if isinstance(value, dict) else {next(iter(built_in.properties)): value}
