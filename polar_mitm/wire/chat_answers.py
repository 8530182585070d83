"""The answers of OpenAI Chat Completions: plain, and as a stream of chunks.

Invariant: a tool call is sent in one chunk, and text and reasoning of its choice are never sent after it. The id of a
choice stands in one encrypted reasoning detail (OpenRouter's form), which Pi and mini-swe-agent return on text-only
turns, besides the ids of its tool calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polar_mitm.conversation import Conversation, Reply, ToolCall
from polar_mitm.errors import PolarError
from polar_mitm.wire import openai, sse
from polar_mitm.wire.answer import Answer, Sent
from polar_mitm.wire.dialect import Kind

Json = dict[str, Any]  # Any: JSON
_FIELDS: dict[Kind, str] = {"reasoning": "reasoning_content", "text": "content"}


def completion(request: Conversation, reply: Reply) -> Json:
    """The plain answer."""
    choices = [_choice(request, index, choice) for index, choice in enumerate(reply.choices)]
    return {**_envelope("chat.completion", request, reply.id), "choices": choices, "usage": _usage(reply)}


def _choice(request: Conversation, index: int, reply: Reply) -> Json:
    answer = Answer.of(reply)
    message: Json = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [_call(call) for call in answer.calls]
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    message["reasoning_details"] = _details(answer, reply.id)
    scored = _logprobs(reply) if request.sampling.logprobs else None
    return {"index": index, "message": message, "logprobs": scored, "finish_reason": reply.finish}


class ChatStream:
    """The streamed answer; see `wire.dialect.StreamEncoder`."""

    content_type = "text/event-stream; charset=utf-8"

    def __init__(self, request: Conversation, reply_id: str) -> None:
        self._request = request
        self._envelope = _envelope("chat.completion.chunk", request, reply_id)
        if request.stream_usage:
            self._envelope["usage"] = None
        self._sent = [Sent() for _ in range(request.sampling.choices)]
        self.ping: bytes = self._chunk(0, {})

    def begin(self) -> bytes:
        """The roles."""
        return b"".join(self._chunk(index, {"role": "assistant"}) for index in range(len(self._sent)))

    def delta(self, kind: Kind, text: str, choice: int = 0) -> bytes:
        """More reasoning or text of a choice."""
        if not text:
            return b""
        self._sent[choice].add(kind, text)
        return self._chunk(choice, {_FIELDS[kind]: text})

    def finish(self, reply: Reply) -> bytes:
        """The rest of every choice, the usage when it is wanted, and the end of the stream."""
        out = b"".join(self._end(index, choice) for index, choice in enumerate(reply.choices))
        if self._request.stream_usage:
            out += sse.data({**self._envelope, "choices": [], "usage": _usage(reply)})
        return out + sse.DONE

    def fail(self, error: PolarError) -> bytes:
        """An error event; a failed stream has no [DONE]."""
        return sse.data(openai.body(error))

    def _end(self, index: int, reply: Reply) -> bytes:
        answer, sent = Answer.of(reply), self._sent[index]
        out = self.delta("reasoning", sent.rest("reasoning", answer.reasoning), index)
        out += self._chunk(index, {"reasoning_details": _details(answer, reply.id)})
        out += self.delta("text", sent.rest("text", answer.text), index)
        if not answer.text and not answer.calls:
            out += self._chunk(index, {"content": ""})
        if self._request.sampling.logprobs:
            out += self._chunk(index, {}, logprobs=_logprobs(reply))
        for place, call in enumerate(answer.calls):
            out += self._chunk(index, {"tool_calls": [{"index": place, **_call(call)}]})
        return out + self._chunk(index, {}, finish=reply.finish)

    def _chunk(
        self, index: int, delta: Mapping[str, Any], finish: str | None = None, logprobs: Json | None = None
    ) -> bytes:  # Any: JSON
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return sse.data({**self._envelope, "choices": [choice]})


def _envelope(kind: str, request: Conversation, reply_id: str) -> Json:
    return {"id": f"chatcmpl-{reply_id}", "object": kind, "created": request.asked_at, "model": request.model}


def _details(answer: Answer, reply_id: str) -> list[Json]:
    """OpenRouter's reasoning details. Pi 1.6.0 returns them instead of the reasoning, so its text stands here too."""
    text: Json = {"type": "reasoning.text", "text": answer.reasoning, "signature": reply_id}
    opaque: Json = {"type": "reasoning.encrypted", "data": reply_id}
    details = [text, opaque] if answer.reasoning else [opaque]
    return [{**detail, "id": f"rs_{reply_id}", "format": "unknown", "index": i} for i, detail in enumerate(details)]


def _logprobs(reply: Reply) -> Json:
    return {"content": openai.logprobs(reply.scored), "refusal": None}


def _call(call: ToolCall) -> Json:
    if call.custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(reply: Reply) -> Json:
    """The prompt once, the output of all choices."""
    prompt, output = reply.usage.prompt_tokens, sum(choice.usage.output_tokens for choice in reply.choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": reply.usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.usage.reasoning_tokens for choice in reply.choices)
        },
    }
