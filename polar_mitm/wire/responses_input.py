"""The input of a Responses request: items of every kind that harnesses send back, read into a history.

Invariant: the items of one turn become one assistant message, and every id that we may have minted is echoed in their
order. A compaction item of ours holds its summary itself and becomes a user message; nothing is looked up.
"""

from __future__ import annotations

import base64

from polar_mitm.conversation import Message, Part, Reasoning, Text, Tool, ToolCall, ToolResult
from polar_mitm.errors import BadRequest
from polar_mitm.wire.fields import Fields, compact
from polar_mitm.wire.history import History, joined, text_parts
from polar_mitm.wire.responses_tools import BUILT_IN_CALLS, BUILT_INS, known_name

PROVIDER_ITEMS = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_list_tools"),
    *("mcp_call", "mcp_approval_request", "mcp_approval_response", "computer_call", "computer_call_output"),
    *("tool_search_call", "tool_search_output", "program", "program_output"),
)
"""What tools that run at the provider leave in a history."""
SUMMARY = "This is a summary of the conversation so far, which it replaces:\n\n"
"""What stands before the summary of a compaction item."""
COMPACT = (
    "Summarise this conversation so far. Your summary will replace it: whoever continues will see the summary and "
    "nothing else. State the task in the user's own terms, what was done and decided, what was learnt about files, "
    "commands and errors (with names and exact values), what is left to do, and what comes next. Call no tool; answer "
    "with the summary alone."
)
"""What a compaction asks the model for."""
_TEXT = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_REASONING = {"summary_text": "text", "reasoning_text": "text", "text": "text"}


def read_item(item: Fields, tools: tuple[Tool, ...], history: History) -> None:
    """Add one item to the history. Raises BadRequest."""
    kind = item.maybe_text("type") or "message"
    if kind in ("additional_tools", "compaction_trigger", *PROVIDER_ITEMS):
        return
    history.echo(item.maybe_text("id"))
    history.echo(item.maybe_text("call_id"))
    if kind == "message":
        history.add(_message(item))
    elif kind == "reasoning":
        history.echo(item.maybe_text("encrypted_content"))
        history.add(Message("assistant", _reasoning(item)))
    elif kind in ("compaction", "compaction_summary"):
        history.add(Message("user", (Text(SUMMARY + _unpacked(item)),)))
    elif kind in ("function_call", "custom_tool_call") or kind in BUILT_IN_CALLS:
        history.add(Message("assistant", (_call(item, kind, tools),)))
    elif kind.removesuffix("_output") in ("function_call", "custom_tool_call", *BUILT_IN_CALLS):
        history.add(Message("tool", (_result(item),)))
    else:
        raise item.wrong("type", "this kind of item is not supported")


def _message(item: Fields) -> Message:
    role = item.text("role")
    content = text_parts(item, "content", _TEXT)
    if role in ("system", "developer"):
        return Message("system", content)
    if role == "user":
        return Message("user", content)
    if role == "assistant":
        return Message("assistant", content)
    raise item.wrong("role", "expected system, developer, user or assistant")


def _reasoning(item: Fields) -> tuple[Part, ...]:
    texts = [part.text for name in ("summary", "content") for part in text_parts(item, name, _REASONING)]
    reasoning = "\n".join(texts)
    return (Reasoning(reasoning),) if reasoning else ()


def _call(item: Fields, kind: str, tools: tuple[Tool, ...]) -> ToolCall:
    if kind in BUILT_IN_CALLS:
        name = BUILT_IN_CALLS[kind]
        return ToolCall(item.maybe_text("call_id") or item.text("id"), name, BUILT_INS[name].arguments(item))
    name = known_name(tools, item.maybe_text("namespace") or "", item.text("name"))
    if kind == "custom_tool_call":
        return ToolCall(item.text("call_id"), name, item.text("input"), custom=True)
    return ToolCall(item.text("call_id"), name, item.text("arguments"))


def _result(item: Fields) -> ToolResult:
    """A result: text, text parts, or what a shell printed, which is shown as JSON."""
    call_id = item.maybe_text("call_id") or item.text("id")  # a local shell's result has only `id`
    failed = item.maybe_text("status") == "failed"
    if item.text("type") == "shell_call_output":
        return ToolResult(call_id, compact(item.items("output")), failed)
    return ToolResult(call_id, joined(text_parts(item, "output", _TEXT)), failed)


def packed(reply_id: str, summary: str) -> str:
    """The `encrypted_content` of a compaction item: the reply's id and the summary itself."""
    return f"{reply_id}.{base64.urlsafe_b64encode(summary.encode('utf-8', 'surrogatepass')).decode()}"


def _unpacked(item: Fields) -> str:
    sealed = item.text("encrypted_content")
    try:
        if "." not in sealed:
            raise ValueError("no summary behind the id")
        packed_summary = sealed.partition(".")[2]
        return base64.b64decode(packed_summary, altchars=b"-_", validate=True).decode("utf-8", "surrogatepass")
    except ValueError as error:  # binascii's and Unicode's are kinds of it; nobody tries again
        where = item.at("encrypted_content")
        problem = f"not compacted here, so it cannot be read ({error}): send the messages themselves"
        raise BadRequest(f"{where}: {problem}", field=where) from error
