"""OpenAI Chat Completions: `POST .../chat/completions`, as Qwen Code, Pi (OpenRouter) and mini-swe-agent speak it.

Invariant: a tool call is sent in one chunk, and text and reasoning are never sent after it. The reply's id stands in
`id` and nowhere else: no client was seen to return more than `tool_calls[].id`. `created` is 0, for want of a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polar_mitm.conversation import (
    Conversation,
    Message,
    Part,
    Reasoning,
    Reply,
    Sampling,
    Text,
    Tool,
    ToolCall,
    ToolResult,
    Usage,
)
from polar_mitm.errors import PolarError
from polar_mitm.wire import openai, sse
from polar_mitm.wire.answer import Answer, Sent
from polar_mitm.wire.dialect import Kind
from polar_mitm.wire.fields import Fields
from polar_mitm.wire.history import History, fidelity, joined, kind_of, text_parts

_TEXT = {"text": "text", "refusal": "refusal"}
_FIELDS: dict[Kind, str] = {"reasoning": "reasoning_content", "text": "content"}


class OpenAIChat:
    """The dialect; see `wire.dialect.Dialect`."""

    name = "openai_chat"

    def matches(self, method: str, path: str) -> bool:
        """Whether this is a generation call, on whatever host and base path."""
        return method == "POST" and path.endswith("/chat/completions")

    def decode(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Conversation:  # Any: JSON
        """The canonical request. Raises BadRequest."""
        request, history = Fields(body), History()
        _refuse(request)
        for message in request.children("messages"):
            history.add(_message(message, history))
        tools = tuple(_tool(tool, history) for tool in request.children("tools"))
        return Conversation(
            model=request.text("model"),
            messages=history.messages("messages"),
            tools=() if openai.no_tools(request) else tools,
            sampling=_sampling(request),
            stream=request.flag("stream"),
            thread=request.maybe_text("prompt_cache_key") or headers.get("x-session-id"),
            echoes=history.echoes,
            fidelity=fidelity(history, request),
        )

    def encoder(self, request: Conversation, reply_id: str) -> ChatStream:
        """A fresh encoder."""
        return ChatStream(request.model, reply_id)

    def encode(self, request: Conversation, reply: Reply) -> dict[str, Any]:  # Any: JSON
        """The plain answer."""
        answer = Answer.of(reply)
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}  # Any: JSON
        if answer.calls:
            message["content"] = answer.text or None
            message["tool_calls"] = [_call(call) for call in answer.calls]
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish}
        envelope = _envelope("chat.completion", request.model, reply.id)
        return {**envelope, "choices": [choice], "usage": _usage(reply.usage)}

    def error(self, error: PolarError) -> dict[str, Any]:  # Any: JSON
        """The body of a plain error."""
        return openai.body(error)

    def status(self, error: PolarError) -> int:
        """The HTTP status of a plain error."""
        return error.status


# --- requests -----------------------------------------------------------------------------------------------------


def _refuse(request: Fields) -> None:
    request.refuse("stop", "remove the stop sequences")
    request.refuse("logprobs", "logprobs are recorded by the proxy, not returned")
    request.refuse("top_logprobs", "logprobs are recorded by the proxy, not returned")
    request.refuse("logit_bias", "sampling belongs to the run")
    request.refuse("functions", "declare them in tools")
    request.refuse("function_call", "use tool_choice 'auto' or 'none'")
    request.refuse("audio", "only text can be generated")
    if request.value("modalities") not in (None, [], ["text"]):
        raise request.wrong("modalities", "only text can be generated")
    if request.integer("n") not in (None, 1):
        raise request.wrong("n", "not supported: ask for one choice at a time")


def _message(message: Fields, history: History) -> Message:
    role = message.text("role")
    if message.value("name") is not None:
        history.ignore("messages.name")
    if role in ("system", "developer"):
        return Message("system", text_parts(message, "content", _TEXT))
    if role == "user":
        return Message("user", text_parts(message, "content", _TEXT))
    if role == "assistant":
        return Message("assistant", _assistant_parts(message, history))
    if role == "tool":
        call_id = message.text("tool_call_id")
        history.echo(call_id)
        return Message("tool", (ToolResult(call_id, joined(text_parts(message, "content", _TEXT))),))
    raise message.wrong("role", "expected system, developer, user, assistant or tool")


def _assistant_parts(message: Fields, history: History) -> tuple[Part, ...]:
    message.refuse("audio", "only text is supported")
    message.refuse("function_call", "use tool_calls")
    # Qwen Code 0.24.4 sends the same text under both names
    reasoning = message.maybe_text("reasoning_content") or message.maybe_text("reasoning")
    refusal = message.maybe_text("refusal")
    parts: list[Part] = [Reasoning(reasoning)] if reasoning else []
    parts += [part for part in text_parts(message, "content", _TEXT) if part.text]
    parts += [Text(refusal)] if refusal else []
    parts += [_decode_call(call, history) for call in message.children("tool_calls")]
    return tuple(parts)


def _decode_call(call: Fields, history: History) -> ToolCall:
    call_id = call.text("id")
    history.echo(call_id)
    kind = call.maybe_text("type")
    if kind == "custom":
        custom = call.wanted_child("custom")
        return ToolCall(call_id, custom.text("name"), custom.text("input"), custom=True)
    if kind not in (None, "function"):
        raise call.wrong("type", "expected function or custom")
    function = call.wanted_child("function")
    return ToolCall(call_id, function.text("name"), function.maybe_text("arguments") or "")


def _tool(tool: Fields, history: History) -> Tool:
    kind = kind_of(tool, {"function": "", "custom": ""})
    declared = tool.wanted_child(kind)
    name, description = declared.text("name"), declared.maybe_text("description") or ""
    if kind == "custom":
        if declared.value("format") is not None:
            history.ignore("tools.format")
        return Tool(name, description, "", custom=True)
    return Tool(name, description, declared.schema("parameters") or openai.NO_PARAMETERS)


def _sampling(request: Fields) -> Sampling:
    wanted = request.child("response_format")
    limits = [request.integer(name, least=1) for name in ("max_completion_tokens", "max_tokens")]
    return Sampling(
        temperature=request.number("temperature"),
        top_p=request.number("top_p"),
        top_k=request.integer("top_k"),
        max_tokens=limits[0] or limits[1],
        seed=request.integer("seed"),
        json_schema=openai.json_schema(wanted, wanted.child("json_schema")) if wanted else None,
    )


# --- answers ------------------------------------------------------------------------------------------------------


class ChatStream:
    """The streamed answer; see `wire.dialect.StreamEncoder`."""

    def __init__(self, model: str, reply_id: str) -> None:
        self._envelope = _envelope("chat.completion.chunk", model, reply_id)
        self._sent = Sent()
        self.ping: bytes = self._chunk({})

    def begin(self) -> bytes:
        """The role."""
        return self._chunk({"role": "assistant"})

    def delta(self, kind: Kind, text: str) -> bytes:
        """More reasoning or text."""
        if not text:
            return b""
        self._sent.add(kind, text)
        return self._chunk({_FIELDS[kind]: text})

    def finish(self, reply: Reply) -> bytes:
        """The rest, the tool calls, the finish reason, the usage, and the end of the stream."""
        answer = Answer.of(reply)
        out = self.delta("reasoning", self._sent.rest("reasoning", answer.reasoning))
        out += self.delta("text", self._sent.rest("text", answer.text))
        if not answer.text and not answer.calls:
            out += self._chunk({"content": ""})
        for index, call in enumerate(answer.calls):
            out += self._chunk({"tool_calls": [{"index": index, **_call(call)}]})
        out += self._chunk({}, reply.finish)
        return out + sse.data({**self._envelope, "choices": [], "usage": _usage(reply.usage)}) + sse.DONE

    def fail(self, error: PolarError) -> bytes:
        """An error event; a failed stream has no [DONE]."""
        return sse.data(openai.body(error))

    def _chunk(self, delta: Mapping[str, Any], finish: str | None = None) -> bytes:  # Any: JSON
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return sse.data({**self._envelope, "choices": [choice]})


def _envelope(kind: str, model: str, reply_id: str) -> dict[str, Any]:  # Any: JSON
    return {"id": f"chatcmpl-{reply_id}", "object": kind, "created": 0, "model": model}


def _call(call: ToolCall) -> dict[str, Any]:  # Any: JSON
    if call.custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(usage: Usage) -> dict[str, Any]:  # Any: JSON
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
