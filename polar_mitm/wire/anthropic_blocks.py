"""The messages of an Anthropic request: content blocks of every kind that harnesses send, read into a history.

Invariant: a string and one text block are the same; the results in a user message become one tool message before what
the user says. Blocks of tools that run at the provider are left out.
"""

from __future__ import annotations

from polar_mitm.conversation import Message, Part, Reasoning, Text, ToolCall, ToolResult
from polar_mitm.wire.fields import Fields, compact
from polar_mitm.wire.history import History, kind_of, text_parts

PROVIDER_BLOCKS = (
    *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
    *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result"),
    *("mcp_tool_use", "mcp_tool_result", "advisor_tool_result", "container_upload", "fallback"),
)
"""What tools that run at the provider leave in a history."""
_TEXT = {"text": "text"}
_SHOWN = ("text", "tool_reference", "search_result", "document")
_USER = (*_SHOWN, "tool_result")
_ASSISTANT = ("text", "thinking", "redacted_thinking", "tool_use", "compaction")


def read_message(message: Fields, history: History) -> None:
    """Add one message to the history. Raises BadRequest."""
    role = message.text("role")
    if role == "system":
        history.add(Message("system", text_parts(message, "content", _TEXT)))
    elif role == "user":
        _read_user(message, history)
    elif role == "assistant":
        history.add(Message("assistant", _assistant_parts(message, history)))
    else:
        raise message.wrong("role", "expected user, assistant or system")


def _blocks(owner: Fields) -> list[Fields]:
    """The content as blocks, without those of the provider's tools."""
    if isinstance(owner.value("content"), str):
        return [Fields({"type": "text", "text": owner.text("content")}, owner.at("content"))]
    return [block for block in owner.children("content") if block.value("type") not in PROVIDER_BLOCKS]


def _read_user(message: Fields, history: History) -> None:
    results: list[Part] = []
    texts: list[Part] = []
    for block in _blocks(message):
        if kind_of(block, _USER) == "tool_result":
            results.append(_tool_result(block, history))
        else:
            texts.append(Text(_shown(block)))
    if results:
        history.add(Message("tool", tuple(results)))
    if texts or not results:
        history.add(Message("user", tuple(texts)))


def _tool_result(block: Fields, history: History) -> ToolResult:
    call_id = block.text("tool_use_id")
    history.echo(call_id)
    return ToolResult(call_id, "\n".join(_shown(inner) for inner in _blocks(block)), block.flag("is_error"))


def _shown(block: Fields) -> str:
    """What the model reads of a block that a user or a tool gives."""
    kind = kind_of(block, _SHOWN)
    if kind == "text":
        return block.text("text")
    if kind == "tool_reference":
        return block.text("tool_name")
    if kind == "search_result":
        return "\n".join([block.text("title"), block.text("source"), *map(_shown, _blocks(block))])
    return _document(block)


def _document(block: Fields) -> str:
    """A document that is text; any other was refused before."""
    source = block.wanted_child("source")
    head = [text for name in ("title", "context") if (text := block.maybe_text(name))]
    if kind_of(source, ("text", "content")) == "text":
        return "\n".join([*head, source.text("data")])
    return "\n".join([*head, *map(_shown, _blocks(source))])


def _assistant_parts(message: Fields, history: History) -> tuple[Part, ...]:
    parts = (_assistant_part(block, history) for block in _blocks(message))
    return tuple(part for part in parts if part is not None)


def _assistant_part(block: Fields, history: History) -> Part | None:
    kind = kind_of(block, _ASSISTANT)
    if kind == "text":
        return Text(block.text("text"))
    if kind == "compaction":
        return Text(text) if (text := block.maybe_text("content")) else None
    if kind == "thinking":
        history.echo(block.maybe_text("signature"))
        return Reasoning(text) if (text := block.text("thinking")) else None
    if kind == "redacted_thinking":
        history.echo(block.maybe_text("data"))
        return None
    call_id = block.text("id")
    history.echo(call_id)
    block.wanted_child("input")
    return ToolCall(call_id, block.text("name"), compact(block.value("input")))
