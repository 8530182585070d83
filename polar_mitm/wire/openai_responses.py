"""OpenAI Responses: `POST .../responses`, as Codex, Pi and opencode speak it.

Invariant: an answer begins with one reasoning item whose `encrypted_content` is the reply's id, also when the model did
not think, since that is what harnesses return on text-only turns. An item is closed before the next opens, and a
tool call is sent whole. State at the provider (previous_response_id, conversations, compaction) is refused.
`created_at` is 0, for want of a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
)
from polar_mitm.errors import PolarError
from polar_mitm.wire import openai, sse
from polar_mitm.wire import responses_items as items
from polar_mitm.wire.answer import Answer, Sent
from polar_mitm.wire.dialect import Kind
from polar_mitm.wire.fields import Fields
from polar_mitm.wire.history import History, fidelity, joined, text_parts

_TEXT = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_SUMMARY = {"summary_text": "text", "reasoning_text": "text"}


class OpenAIResponses:
    """The dialect; see `wire.dialect.Dialect`."""

    name = "openai_responses"

    def matches(self, method: str, path: str) -> bool:
        """Whether this is a generation call; `/v1/responses/compact` is not."""
        return method == "POST" and path.endswith("/responses")

    def decode(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Conversation:  # Any: JSON
        """The canonical request. Raises BadRequest."""
        request, history = Fields(body), History()
        _refuse(request)
        instructions = request.maybe_text("instructions")
        if instructions:
            history.add(Message("system", (Text(instructions),)))
        given = _items(request)
        tools = _tools(request, given, history)
        for item in given:
            _read_item(item, tools, history)
        return Conversation(
            model=request.text("model"),
            messages=history.messages("input"),
            tools=() if openai.no_tools(request) else tools,
            sampling=_sampling(request, history),
            stream=request.flag("stream"),
            thread=headers.get("thread-id") or request.maybe_text("prompt_cache_key"),
            echoes=history.echoes,
            fidelity=fidelity(history, request, ("include",)),
        )

    def encoder(self, request: Conversation, reply_id: str) -> ResponseStream:
        """A fresh encoder."""
        return ResponseStream(request, reply_id)

    def encode(self, request: Conversation, reply: Reply) -> dict[str, Any]:  # Any: JSON
        """The plain answer."""
        return items.finished(request, reply)

    def error(self, error: PolarError) -> dict[str, Any]:  # Any: JSON
        """The body of a plain error."""
        return openai.body(error)

    def status(self, error: PolarError) -> int:
        """The HTTP status of a plain error."""
        return error.status


# --- requests -----------------------------------------------------------------------------------------------------


def _refuse(request: Fields) -> None:
    request.refuse("previous_response_id", "send the whole history as input")
    request.refuse("conversation", "send the whole history as input")
    request.refuse("prompt", "send the prompt's text as input")
    request.refuse("background", "ask for the answer itself")
    request.refuse("top_logprobs", "logprobs are recorded by the proxy, not returned")
    if "message.output_text.logprobs" in request.items("include"):
        raise request.wrong("include", "logprobs are recorded by the proxy, not returned")


def _items(request: Fields) -> list[Fields]:
    if isinstance(request.value("input"), str):
        return [Fields({"role": "user", "content": request.text("input")}, "input")]
    return request.children("input")


def _read_item(item: Fields, tools: tuple[Tool, ...], history: History) -> None:
    kind = item.maybe_text("type") or "message"
    if kind == "additional_tools":  # read by _tools
        return
    history.echo(item.maybe_text("id"))
    history.echo(item.maybe_text("call_id"))
    if kind == "message":
        history.add(_message(item))
    elif kind == "reasoning":
        history.echo(item.maybe_text("encrypted_content"))
        history.add(Message("assistant", _reasoning(item)))
    elif kind in ("function_call", "custom_tool_call"):
        history.add(Message("assistant", (_decode_call(item, kind, tools),)))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        result = ToolResult(item.text("call_id"), joined(text_parts(item, "output", _TEXT)))
        history.add(Message("tool", (result,)))
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
    texts = [part.text for name in ("summary", "content") for part in text_parts(item, name, _SUMMARY)]
    reasoning = "\n".join(texts)
    return (Reasoning(reasoning),) if reasoning else ()


def _decode_call(item: Fields, kind: str, tools: tuple[Tool, ...]) -> ToolCall:
    name = _known_name(tools, item.maybe_text("namespace") or "", item.text("name"))
    if kind == "custom_tool_call":
        return ToolCall(item.text("call_id"), name, item.text("input"), custom=True)
    return ToolCall(item.text("call_id"), name, item.text("arguments"))


def _tools(request: Fields, given: Iterable[Fields], history: History) -> tuple[Tool, ...]:
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
        return
    if kind not in ("function", "custom"):
        history.ignore(f"tools.{kind}")  # runs at the provider
        return
    name = _free_name(tools, namespace, tool.text("name"))
    description = tool.maybe_text("description") or ""
    if kind == "custom":
        if tool.value("format") is not None:
            history.ignore("tools.format")
        tools.append(Tool(name, description, "", custom=True, namespace=namespace))
    else:
        schema = tool.schema("parameters") or openai.NO_PARAMETERS
        tools.append(Tool(name, description, schema, namespace=namespace))


def _free_name(tools: Iterable[Tool], namespace: str, name: str) -> str:
    """The name by which the model calls a tool: its own, made longer when an earlier tool has it."""
    return f"{namespace}.{name}" if namespace and any(tool.name == name for tool in tools) else name


def _known_name(tools: Iterable[Tool], namespace: str, name: str) -> str:
    """The tool's name for the model, from the name space and name of a call in the history."""
    known = (tool.name for tool in tools if (namespace, name) in items.spaced_names(tool))
    return next(known, name)


def _sampling(request: Fields, history: History) -> Sampling:
    text = request.child("text")
    wanted = text.child("format") if text else None
    schema = openai.json_schema(wanted, wanted) if wanted else None
    if text:
        history.ignore(*(text.at(name) for name in text.unread()))
    return Sampling(
        temperature=request.number("temperature"),
        top_p=request.number("top_p"),
        max_tokens=request.integer("max_output_tokens", least=1),
        json_schema=schema,
    )


# --- answers ------------------------------------------------------------------------------------------------------


class ResponseStream:
    """The streamed answer; see `wire.dialect.StreamEncoder`.

    Codex and Pi need the `*.done` items and the terminal event, opencode the `*.added` items and the text deltas too.
    """

    def __init__(self, request: Conversation, reply_id: str) -> None:
        self._request, self._id = request, reply_id
        self._sent = Sent()
        self._open: Kind | None = None
        self._index = -1
        self._sequence = 0
        # the bytes of begin()'s second event once more, so that the numbers of the others stay without a gap
        self.ping: bytes = sse.event(
            {"type": "response.in_progress", "sequence_number": 1, "response": self._response("in_progress")}
        )

    def begin(self) -> bytes:
        """The empty response."""
        started = self._response("in_progress")
        out = self._event("response.created", response=started)
        return out + self._event("response.in_progress", response=started)

    def delta(self, kind: Kind, text: str) -> bytes:
        """More reasoning or text; the reasoning item is closed before the message opens."""
        if not text:
            return b""
        first = not self._sent[kind]
        self._sent.add(kind, text)
        out = self._enter(kind)
        if kind == "reasoning":
            if first:
                out += self._part(kind, "response.reasoning_summary_part.added", part=items.summary_text(""))
            out += self._part(kind, "response.reasoning_summary_text.delta", delta=text)
        else:
            out += self._part(kind, "response.output_text.delta", delta=text, logprobs=[])
        return out

    def finish(self, reply: Reply) -> bytes:
        """The rest, the tool calls whole, and the whole response."""
        answer = Answer.of(reply)
        out = self.delta("reasoning", self._sent.rest("reasoning", answer.reasoning))
        out += self.delta("text", self._sent.rest("text", answer.text))
        if self._open != "text":
            out += self._enter("text" if items.has_message(answer) else "reasoning")
        out += self._leave(items.message_status(reply))
        for index, call in enumerate(answer.calls):
            out += self._call(items.call_item(self._request, call, f"{reply.id}{index}"))
        response = items.finished(self._request, reply)
        return out + self._event(f"response.{response['status']}", response=response)

    def fail(self, error: PolarError) -> bytes:
        """The failed response. Codex tries again on `server_error` and gives up on the other codes."""
        failure = {"code": openai.code(error) or "invalid_prompt", "message": openai.message(error)}
        return self._event("response.failed", response={**self._response("failed"), "error": failure})

    def _enter(self, kind: Kind) -> bytes:
        if self._open == kind:
            return b""
        out = self._enter("reasoning") if kind == "text" and self._index < 0 else b""
        out += self._leave()
        self._open = kind
        self._index += 1
        item = items.reasoning_item("", self._id) if kind == "reasoning" else items.message_item("", self._id)
        opening = {**item, "status": "in_progress", **({"content": []} if kind == "text" else {})}
        out += self._event("response.output_item.added", output_index=self._index, item=opening)
        if kind == "text":
            out += self._part(kind, "response.content_part.added", part=items.output_text(""))
        return out

    def _leave(self, status: str = "completed") -> bytes:
        if self._open is None:
            return b""
        kind, self._open = self._open, None
        text = self._sent[kind]
        out = b""
        if kind == "text":
            item = {**items.message_item(text, self._id), "status": status}
            out += self._part(kind, "response.output_text.done", text=text, logprobs=[])
            out += self._part(kind, "response.content_part.done", part=items.output_text(text))
        else:
            item = items.reasoning_item(text, self._id)
            if text:
                out += self._part(kind, "response.reasoning_summary_text.done", text=text)
                out += self._part(kind, "response.reasoning_summary_part.done", part=items.summary_text(text))
        return out + self._event("response.output_item.done", output_index=self._index, item=item)

    def _call(self, item: items.Item) -> bytes:
        self._index += 1
        custom = item["type"] == "custom_tool_call"
        key, name = ("input", "custom_tool_call_input") if custom else ("arguments", "function_call_arguments")
        opening = {**item, "status": "in_progress", key: ""}
        place = {"item_id": item["id"], "output_index": self._index}
        out = self._event("response.output_item.added", output_index=self._index, item=opening)
        out += self._event(f"response.{name}.delta", **place, delta=item[key])
        out += self._event(f"response.{name}.done", **place, **{key: item[key]})
        return out + self._event("response.output_item.done", output_index=self._index, item=item)

    def _part(self, kind: Kind, event: str, **fields: Any) -> bytes:  # Any: JSON
        item_id, part = ("rs", "summary_index") if kind == "reasoning" else ("msg", "content_index")
        place = {"item_id": f"{item_id}_{self._id}", "output_index": self._index, part: 0}
        return self._event(event, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:  # Any: JSON
        value = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return sse.event(value)

    def _response(self, status: str) -> dict[str, Any]:  # Any: JSON
        return items.response(self._request, self._id, status, [])
