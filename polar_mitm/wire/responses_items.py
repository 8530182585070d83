"""The JSON values that make up a Responses answer: the response object and its items.

Invariant: each value is a pure function of the request and the reply, used by the plain and the streamed form alike.
"""

from __future__ import annotations

from typing import Any

from polar_mitm.conversation import Conversation, Reply, Tool, ToolCall, Usage
from polar_mitm.wire.answer import Answer

DEFAULT_NAMESPACE = "functions"
"""The name space that Codex 0.171.0 leaves out of the calls it sends back."""

Item = dict[str, Any]  # Any: JSON


def spaced_names(tool: Tool) -> tuple[tuple[str, str], ...]:
    """The (name space, name) pairs by which a harness may call a tool; the first is the one to answer with."""
    own_name = tool.name.removeprefix(f"{tool.namespace}.") if tool.namespace else tool.name
    full = (tool.namespace, own_name)
    return (("", own_name), full) if tool.namespace == DEFAULT_NAMESPACE and own_name == tool.name else (full,)


def finished(request: Conversation, reply: Reply) -> dict[str, Any]:  # Any: JSON
    """The finished response: the plain answer, and what the terminal event carries."""
    answer = Answer.of(reply)
    output = [reasoning_item(answer.reasoning, reply.id)]
    if has_message(answer):
        output.append({**message_item(answer.text, reply.id), "status": message_status(reply)})
    output += [call_item(request, call, f"{reply.id}{index}") for index, call in enumerate(answer.calls)]
    status = "incomplete" if reply.finish == "length" else "completed"
    whole = {**response(request, reply.id, status, output), "usage": _usage(reply.usage)}
    if reply.finish == "length":
        whole["incomplete_details"] = {"reason": "max_output_tokens"}
    return whole


def has_message(answer: Answer) -> bool:
    """Whether the answer has a message item: when it says something, or nothing at all."""
    return bool(answer.text) or not answer.calls


def message_status(reply: Reply) -> str:
    """Status of the message item."""
    return "incomplete" if reply.finish == "length" else "completed"


def response(request: Conversation, reply_id: str, status: str, output: list[Item]) -> dict[str, Any]:  # Any: JSON
    """A response object, without usage."""
    return {
        "id": f"resp_{reply_id}",
        "object": "response",
        "created_at": 0,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": request.sampling.max_tokens,
        "metadata": {},
        "model": request.model,
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": request.sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def reasoning_item(reasoning: str, reply_id: str) -> Item:
    """The reasoning item, whose `encrypted_content` is never empty."""
    return {
        "id": f"rs_{reply_id}",
        "type": "reasoning",
        "status": "completed",
        "summary": [summary_text(reasoning)] if reasoning else [],
        "encrypted_content": reply_id,
    }


def message_item(text: str, reply_id: str) -> Item:
    """The message item."""
    content = [output_text(text)]
    return {"id": f"msg_{reply_id}", "type": "message", "status": "completed", "role": "assistant", "content": content}


def call_item(request: Conversation, call: ToolCall, part_id: str) -> Item:
    """A tool call, named as the harness declared the tool."""
    tool = next((tool for tool in request.tools if tool.name == call.name), None)
    namespace, name = spaced_names(tool)[0] if tool else ("", call.name)
    item: Item = {"status": "completed", "call_id": call.id, "name": name}
    if namespace:
        item["namespace"] = namespace
    if call.custom:
        return {"id": f"ctc_{part_id}", "type": "custom_tool_call", **item, "input": call.arguments}
    return {"id": f"fc_{part_id}", "type": "function_call", **item, "arguments": call.arguments}


def summary_text(text: str) -> Item:
    """The part of a reasoning item that holds its text."""
    return {"type": "summary_text", "text": text}


def output_text(text: str) -> Item:
    """The part of a message item that holds its text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, Any]:  # Any: JSON
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }
