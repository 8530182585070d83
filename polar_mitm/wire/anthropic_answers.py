"""The answers of Anthropic Messages: plain, as a stream of blocks, and errors.

Invariant: an answer begins with one reasoning block that carries the reply's id - thinking with it as the signature,
or, when the model did not think, redacted thinking with it as the data: harnesses return both verbatim, also on
text-only turns. The input of a tool use is always an object.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polar_mitm.conversation import Reply, ToolCall, Usage
from polar_mitm.errors import BadRequest, BudgetUsed, ContextOverflow, EngineUnavailable, PolarError
from polar_mitm.wire import sse
from polar_mitm.wire.answer import Answer, Sent, arguments_value
from polar_mitm.wire.dialect import Kind
from polar_mitm.wire.fields import compact

Json = dict[str, Any]  # Any: JSON
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    529: "overloaded_error",
}

_NO_CREDIT = (
    "Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing to upgrade or purchase "
    "credits."
)


def message(model: str, reply: Reply) -> Json:
    """The plain answer."""
    answer = _executable(Answer.of(reply))
    content = [_reasoning_block(answer.reasoning, reply.id)]
    content += [{"type": "text", "text": answer.text}] if answer.text else []
    content += [{**_call_block(call), "input": arguments_value(call.arguments)} for call in answer.calls]
    return {**_empty_message(model, reply.id, _usage(reply.usage)), "content": content, **_stop(reply, answer)}


class MessageStream:
    """The streamed answer; see `wire.dialect.StreamEncoder`. Claude Code and Pi need the `event:` lines."""

    content_type = "text/event-stream; charset=utf-8"

    def __init__(self, model: str, reply_id: str) -> None:
        self._model, self._id = model, reply_id
        self._sent = Sent()
        self._open: Kind | None = None
        self._index = -1
        self.ping: bytes = sse.event({"type": "ping"})

    def begin(self) -> bytes:
        """The empty message; its usage is counted in `finish`, which Claude Code and Pi take over."""
        usage = {"input_tokens": 0, "output_tokens": 0}
        return sse.event({"type": "message_start", "message": _empty_message(self._model, self._id, usage)})

    def delta(self, kind: Kind, text: str, choice: int = 0) -> bytes:
        """More thinking or text; thinking is closed, with its signature, before text opens."""
        assert choice == 0, "this protocol has one answer"
        if not text:
            return b""
        self._sent.add(kind, text)
        out = self._enter(kind)
        if kind == "reasoning":
            return out + self._delta({"type": "thinking_delta", "thinking": text})
        return out + self._delta({"type": "text_delta", "text": text})

    def finish(self, reply: Reply) -> bytes:
        """The rest, the tool calls whole, the stop reason with the usage, and the end."""
        answer = _executable(Answer.of(reply))
        out = self.delta("reasoning", self._sent.rest("reasoning", answer.reasoning))
        out += self.delta("text", self._sent.rest("text", answer.text))
        out += self._leave()
        out += b"" if self._index >= 0 else self._redacted()
        for call in answer.calls:
            out += self._start({**_call_block(call), "input": {}})
            arguments = compact(arguments_value(call.arguments))
            out += self._delta({"type": "input_json_delta", "partial_json": arguments}) + self._stop()
        ended = {"type": "message_delta", "delta": _stop(reply, answer), "usage": _usage(reply.usage)}
        return out + sse.event(ended) + sse.event({"type": "message_stop"})

    def fail(self, error: PolarError) -> bytes:
        """An error event."""
        return sse.event(error_body(error))

    def _enter(self, kind: Kind) -> bytes:
        if self._open == kind:
            return b""
        out = self._leave()
        if kind == "text" and self._index < 0:
            out += self._redacted()
        self._open = kind
        if kind == "reasoning":
            return out + self._start({"type": "thinking", "thinking": "", "signature": ""})
        return out + self._start({"type": "text", "text": ""})

    def _leave(self) -> bytes:
        if self._open is None:
            return b""
        signature = b""
        if self._open == "reasoning":
            signature = self._delta({"type": "signature_delta", "signature": self._id})
        self._open = None
        return signature + self._stop()

    def _redacted(self) -> bytes:
        return self._start(_reasoning_block("", self._id)) + self._stop()

    def _start(self, block: Mapping[str, Any]) -> bytes:  # Any: JSON
        self._index += 1
        return sse.event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: Mapping[str, str]) -> bytes:
        return sse.event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _stop(self) -> bytes:
        return sse.event({"type": "content_block_stop", "index": self._index})


def _executable(answer: Answer) -> Answer:
    """The answer with calls whose arguments are no object given as text: the harness could not run them."""
    calls = tuple(call for call in answer.calls if isinstance(arguments_value(call.arguments), dict))
    others = [f"{call.name}({call.arguments})" for call in answer.calls if call not in calls]
    return replace(answer, text="\n".join([*filter(None, [answer.text]), *others]), calls=calls) if others else answer


def _empty_message(model: str, reply_id: str, usage: Json) -> Json:
    return {
        "id": f"msg_{reply_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _stop(reply: Reply, answer: Answer) -> Json:
    if reply.finish == "stop" and reply.stopped_by is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stopped_by}
    finish = "stop" if reply.finish == "tool_calls" and not answer.calls else reply.finish
    return {"stop_reason": _STOP_REASONS[finish], "stop_sequence": None}


def _reasoning_block(reasoning: str, reply_id: str) -> Json:
    if reasoning:
        return {"type": "thinking", "thinking": reasoning, "signature": reply_id}
    return {"type": "redacted_thinking", "data": reply_id}


def _call_block(call: ToolCall) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _usage(usage: Usage) -> Json:
    """Anthropic counts cached tokens beside the input, not inside it."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


# --- errors -------------------------------------------------------------------------------------------------------


def error_body(error: PolarError) -> Json:
    """The body of a plain error, and the event of one in a stream."""
    kind = _ERROR_TYPES.get(status(error), "api_error")
    return {"type": "error", "error": {"type": kind, "message": _worded(error)}}


def status(error: PolarError) -> int:
    """The HTTP status of a plain error.

    529, which Claude Code retries least, for an overloaded engine; 400, as for an account without credit, for a session
    without budget: Claude Code 2.1.332 retries a 429 for minutes.
    """
    if isinstance(error, EngineUnavailable):
        return 529
    return 400 if isinstance(error, BudgetUsed) else error.status


def _worded(error: PolarError) -> str:
    """The error's text; an overflow and a used budget in Anthropic's words, and places in a request with dots only."""
    if isinstance(error, ContextOverflow):
        return f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum"
    if isinstance(error, BudgetUsed):
        return _NO_CREDIT
    field = (isinstance(error, BadRequest) and error.field) or ""
    if not field or not str(error).startswith(field):
        return str(error)
    return re.sub(r"\[(\d+)\]", r".\1", field) + str(error).removeprefix(field)
