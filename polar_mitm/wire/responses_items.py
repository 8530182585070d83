"""The JSON values that make up a Responses answer: the response object and its items.

Invariant: each value is a pure function of the request and the reply, used by the plain and the streamed form alike. An
answer begins with one reasoning item whose `encrypted_content` is the reply's id, also when the model did not think,
since that is what harnesses return on text-only turns; a compaction is one item that holds the summary itself.
"""

from __future__ import annotations

from typing import Any

from polar_mitm.conversation import Conversation, Reply, Usage, joined_text
from polar_mitm.wire import openai
from polar_mitm.wire.answer import Answer
from polar_mitm.wire.responses_input import packed
from polar_mitm.wire.responses_tools import Item, call_item


def finished(request: Conversation, reply: Reply) -> dict[str, Any]:  # Any: JSON
    """The finished response: the plain answer, and what the terminal event carries."""
    cut = message_status(reply) == "incomplete" and not request.compacts
    output = [compaction_item(reply)] if request.compacts else _output(request, reply)
    whole = {**response(request, reply.id, "incomplete" if cut else "completed", output), "usage": _usage(reply.usage)}
    if cut:
        whole["incomplete_details"] = {"reason": "max_output_tokens"}
    return whole


def _output(request: Conversation, reply: Reply) -> list[Item]:
    answer = Answer.of(reply)
    output = [reasoning_item(answer.reasoning, reply.id)]
    if has_message(answer):
        said = message_item(answer.text, reply.id, scored(request, reply))
        output.append({**said, "status": message_status(reply)})
    return output + call_items(request, reply)


def compacted(request: Conversation, reply: Reply) -> dict[str, Any]:  # Any: JSON
    """The answer of `/responses/compact`: what the user said, without our own request for a summary, and the item."""
    said = [message for message in request.messages[:-1] if message.role == "user"]
    users: list[Item] = [
        {
            "id": f"msg_{reply.id}{index:02x}",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_text", "text": joined_text(message)}],
        }
        for index, message in enumerate(said)
    ]
    return {
        "id": f"resp_{reply.id}",
        "object": "response.compaction",
        "created_at": request.asked_at,
        "output": [*users, compaction_item(reply)],
        "usage": _usage(reply.usage),
    }


def compaction_item(reply: Reply) -> Item:
    """The item that stands for the history from now on."""
    answer = Answer.of(reply)
    summary = answer.text or answer.reasoning
    return {"id": f"cmp_{reply.id}", "type": "compaction", "encrypted_content": packed(reply.id, summary)}


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
        "created_at": request.asked_at,
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
        "previous_response_id": request.continues,
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


def message_item(text: str, reply_id: str, logprobs: list[Item]) -> Item:
    """The message item."""
    content = [output_text(text, logprobs)]
    return {"id": f"msg_{reply_id}", "type": "message", "status": "completed", "role": "assistant", "content": content}


def call_items(request: Conversation, reply: Reply) -> list[Item]:
    """The items of the tool calls."""
    calls = Answer.of(reply).calls
    return [call_item(request.tools, call, f"{reply.id}{index}") for index, call in enumerate(calls)]


def summary_text(text: str) -> Item:
    """The part of a reasoning item that holds its text."""
    return {"type": "summary_text", "text": text}


def output_text(text: str, logprobs: list[Item]) -> Item:
    """The part of a message item that holds its text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def scored(request: Conversation, reply: Reply) -> list[Item]:
    """The logprobs of the visible text, when they are wanted."""
    return openai.logprobs(reply.scored) if request.sampling.logprobs else []


def _usage(usage: Usage) -> dict[str, Any]:  # Any: JSON
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }
