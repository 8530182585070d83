"""Anthropic Messages: `POST /v1/messages`, as Claude Code, Pi and opencode speak it.

Invariant: an answer begins with one reasoning block that carries the reply's id - thinking with it as the signature,
or, when the model did not think, redacted thinking with it as the data: harnesses return both verbatim, also on
text-only turns. Message threads are refused in words by which Pi falls back to sending the whole history.
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
from polar_mitm.errors import BadRequest, ContextOverflow, EngineUnavailable, PolarError
from polar_mitm.wire import sse
from polar_mitm.wire.answer import Answer, Sent, arguments_value
from polar_mitm.wire.dialect import Kind
from polar_mitm.wire.fields import Fields, compact
from polar_mitm.wire.history import History, fidelity, kind_of, text_parts

_BILLING = "x-anthropic-billing-header:"
_TEXT = {"text": "text"}
_RESULT = {"text": "text", "tool_reference": "tool_name"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}


class AnthropicMessages:
    """The dialect; see `wire.dialect.Dialect`."""

    name = "anthropic"

    def matches(self, method: str, path: str) -> bool:
        """Whether this is a generation call; `/v1/messages/count_tokens` is not."""
        return method == "POST" and path.endswith("/v1/messages")

    def decode(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Conversation:  # Any: JSON
        """The canonical request. Raises BadRequest."""
        request, history = Fields(body), History()
        _refuse(request)
        _read_system(request, history)
        for message in request.children("messages"):
            _read_message(message, history)
        tools = _tools(request, history)
        messages = history.messages("messages")
        if messages[-1].role == "assistant":
            raise BadRequest("messages: the conversation must end with a user message, not with a prefilled answer")
        diagnostics = request.child("diagnostics")
        history.echo(diagnostics.maybe_text("previous_message_id") if diagnostics else None)
        return Conversation(
            model=request.text("model"),
            messages=messages,
            tools=() if _no_tools(request) else tools,
            sampling=_sampling(request, history),
            stream=request.flag("stream"),
            thread=headers.get("x-claude-code-agent-id"),
            echoes=history.echoes,
            fidelity=fidelity(history, request, ("diagnostics",)),
        )

    def encoder(self, request: Conversation, reply_id: str) -> MessageStream:
        """A fresh encoder."""
        return MessageStream(request.model, reply_id)

    def encode(self, request: Conversation, reply: Reply) -> dict[str, Any]:  # Any: JSON
        """The plain answer."""
        answer = Answer.of(reply)
        content = [_reasoning_block(answer.reasoning, reply.id)]
        content += [{"type": "text", "text": answer.text}] if answer.text else []
        content += [{**_call_block(call), "input": arguments_value(call.arguments)} for call in answer.calls]
        return _message(request.model, reply.id, content, _STOP_REASONS[reply.finish], _usage(reply.usage))

    def error(self, error: PolarError) -> dict[str, Any]:  # Any: JSON
        """The body of a plain error; an overflow in Anthropic's words."""
        kind = "overloaded_error" if self.status(error) == 529 else _ERROR_TYPES.get(error.status, "api_error")
        message = str(error)
        if isinstance(error, ContextOverflow):
            message = f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum"
        return {"type": "error", "error": {"type": kind, "message": message}}

    def status(self, error: PolarError) -> int:
        """The HTTP status of a plain error; 529, which Claude Code retries least, for an overloaded engine."""
        return 529 if isinstance(error, EngineUnavailable) else error.status


# --- requests -----------------------------------------------------------------------------------------------------


def _refuse(request: Fields) -> None:
    if request.value("thread") is not None:
        raise BadRequest("thread: Extra inputs are not permitted")  # Pi 1.6.0 resends without it on these words
    request.refuse("stop_sequences", "remove the stop sequences")


def _no_tools(request: Fields) -> bool:
    choice = request.child("tool_choice")
    kind = choice.text("type") if choice else "auto"
    if kind not in ("auto", "none"):
        raise request.wrong("tool_choice", "not supported: only 'auto' and 'none' are, a call cannot be forced")
    return kind == "none"


def _read_system(request: Fields, history: History) -> None:
    _note_cache_control(request, "system", history)
    parts = text_parts(request, "system", _TEXT)
    # Claude Code 2.1.332 changes its billing block on every turn
    parts = tuple(part for part in parts if not part.text.startswith(_BILLING))
    if parts:
        history.add(Message("system", parts))


def _read_message(message: Fields, history: History) -> None:
    role = message.text("role")
    _note_cache_control(message, "content", history)
    if role == "system":
        history.add(Message("system", text_parts(message, "content", _TEXT)))
    elif role == "user":
        _read_user(message, history)
    elif role == "assistant":
        history.add(Message("assistant", _assistant_parts(message, history)))
    else:
        raise message.wrong("role", "expected user, assistant or system")


def _note_cache_control(owner: Fields, name: str, history: History) -> None:
    """List `cache_control` when a block of this content has it."""
    content = owner.value(name)
    if isinstance(content, list) and any(block.value("cache_control") for block in owner.children(name)):
        history.ignore("cache_control")


def _read_user(message: Fields, history: History) -> None:
    results: list[Part] = []
    texts: list[Part] = []
    if isinstance(message.value("content"), str):
        texts.append(Text(message.text("content")))
    else:
        for block in message.children("content"):
            if kind_of(block, {"text": "", "tool_result": ""}) == "tool_result":
                results.append(_tool_result(block, history))
            else:
                texts.append(Text(block.text("text")))
    if results:
        history.add(Message("tool", tuple(results)))
    if texts or not results:
        history.add(Message("user", tuple(texts)))


def _tool_result(block: Fields, history: History) -> ToolResult:
    call_id = block.text("tool_use_id")
    history.echo(call_id)
    _note_cache_control(block, "content", history)
    texts = [part.text for part in text_parts(block, "content", _RESULT)]
    return ToolResult(call_id, "\n".join(texts), block.flag("is_error"))


def _assistant_parts(message: Fields, history: History) -> tuple[Part, ...]:
    if isinstance(message.value("content"), str):
        return (Text(message.text("content")),)
    parts = (_assistant_part(block, history) for block in message.children("content"))
    return tuple(part for part in parts if part is not None)


def _assistant_part(block: Fields, history: History) -> Part | None:
    kind = kind_of(block, {"text": "", "thinking": "", "redacted_thinking": "", "tool_use": ""})
    if kind == "text":
        return Text(block.text("text"))
    if kind == "thinking":
        history.echo(block.maybe_text("signature"))
        return Reasoning(text) if (text := block.text("thinking")) else None
    if kind == "redacted_thinking":
        history.echo(block.maybe_text("data"))
        return None
    call_id = block.text("id")
    history.echo(call_id)
    given = block.value("input")
    arguments = given if isinstance(given, str) else compact(given)  # see answer.arguments_value
    return ToolCall(call_id, block.text("name"), arguments)


def _tools(request: Fields, history: History) -> tuple[Tool, ...]:
    found = _referenced(request)
    tools: list[Tool] = []
    for tool in request.children("tools"):
        kind = tool.maybe_text("type")
        if kind not in (None, "custom"):
            history.ignore(f"tools.{kind}")  # runs at the provider
        elif tool.flag("defer_loading") and tool.text("name") not in found:
            history.ignore("tools.defer_loading")  # not in the prompt until a tool search has found it
        else:
            schema = tool.schema("input_schema")
            if schema is None:
                raise tool.wrong("input_schema", "expected an object")
            tools.append(Tool(tool.text("name"), tool.maybe_text("description") or "", schema))
    return tuple(tools)


def _referenced(request: Fields) -> set[str]:
    """Names of the deferred tools that tool results refer to (Claude Code's ToolSearch)."""
    names: set[str] = set()
    for message in request.children("messages"):
        if not isinstance(message.value("content"), list):
            continue
        for block in message.children("content"):
            if block.value("type") == "tool_result" and isinstance(block.value("content"), list):
                references = (p for p in block.children("content") if p.value("type") == "tool_reference")
                names.update(part.text("tool_name") for part in references)
    return names


def _sampling(request: Fields, history: History) -> Sampling:
    output = request.child("output_config")
    wanted = (output.child("format") if output else None) or request.child("output_format")
    if output:
        history.ignore(*(output.at(name) for name in output.unread()))
    schema = None
    if wanted is not None:
        kind_of(wanted, {"json_schema": ""})
        schema = _schema(wanted)
    return Sampling(
        temperature=request.number("temperature"),
        top_p=request.number("top_p"),
        top_k=request.integer("top_k"),
        max_tokens=request.integer("max_tokens", least=1),
        json_schema=schema,
    )


def _schema(wanted: Fields) -> str:
    """The schema of a JSON output format. Raises BadRequest when there is none."""
    schema = wanted.schema("schema")
    if schema is None:
        raise wanted.wrong("schema", "expected an object")
    return schema


# --- answers ------------------------------------------------------------------------------------------------------


class MessageStream:
    """The streamed answer; see `wire.dialect.StreamEncoder`. Claude Code and Pi need the `event:` lines."""

    def __init__(self, model: str, reply_id: str) -> None:
        self._model, self._id = model, reply_id
        self._sent = Sent()
        self._open: Kind | None = None
        self._index = -1
        self.ping: bytes = sse.event({"type": "ping"})

    def begin(self) -> bytes:
        """The empty message; its usage is counted in `finish`, which Claude Code and Pi take over."""
        usage = {"input_tokens": 0, "output_tokens": 0}
        return sse.event({"type": "message_start", "message": _message(self._model, self._id, [], None, usage)})

    def delta(self, kind: Kind, text: str) -> bytes:
        """More thinking or text; thinking is closed, with its signature, before text opens."""
        if not text:
            return b""
        self._sent.add(kind, text)
        out = self._enter(kind)
        if kind == "reasoning":
            return out + self._delta({"type": "thinking_delta", "thinking": text})
        return out + self._delta({"type": "text_delta", "text": text})

    def finish(self, reply: Reply) -> bytes:
        """The rest, the tool calls whole, the stop reason with the usage, and the end."""
        answer = Answer.of(reply)
        out = self.delta("reasoning", self._sent.rest("reasoning", answer.reasoning))
        out += self.delta("text", self._sent.rest("text", answer.text))
        out += self._leave()
        out += b"" if self._index >= 0 else self._redacted()
        for call in answer.calls:
            out += self._start({**_call_block(call), "input": {}})
            arguments = compact(arguments_value(call.arguments))
            out += self._delta({"type": "input_json_delta", "partial_json": arguments}) + self._stop()
        delta = {"stop_reason": _STOP_REASONS[reply.finish], "stop_sequence": None}
        out += sse.event({"type": "message_delta", "delta": delta, "usage": _usage(reply.usage)})
        return out + sse.event({"type": "message_stop"})

    def fail(self, error: PolarError) -> bytes:
        """An error event."""
        return sse.event(AnthropicMessages().error(error))

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


def _message(
    model: str,
    reply_id: str,
    content: list[dict[str, Any]],  # Any: JSON
    stop_reason: str | None,
    usage: dict[str, int],
) -> dict[str, Any]:
    return {
        "id": f"msg_{reply_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": None,
        "usage": usage,
    }


def _reasoning_block(reasoning: str, reply_id: str) -> dict[str, Any]:  # Any: JSON
    if reasoning:
        return {"type": "thinking", "thinking": reasoning, "signature": reply_id}
    return {"type": "redacted_thinking", "data": reply_id}


def _call_block(call: ToolCall) -> dict[str, Any]:  # Any: JSON
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _usage(usage: Usage) -> dict[str, int]:
    """Anthropic counts cached tokens beside the input, not inside it."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    }
