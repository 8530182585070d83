"""Anthropic Messages: `POST /v1/messages`, as Claude Code, Pi and opencode speak it.

Invariant: what changes from turn to turn and says nothing (Claude Code's billing block, cache marks) is not in the
history. Message threads are refused in words by which Pi falls back to sending the whole history. This module reads
requests, with `anthropic_blocks` and `anthropic_tools`; `anthropic_answers` writes the answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polar_mitm.conversation import Conversation, Message, Reply, Sampling
from polar_mitm.errors import BadRequest
from polar_mitm.wire import anthropic_answers as answers
from polar_mitm.wire import frame
from polar_mitm.wire.anthropic_blocks import PROVIDER_BLOCKS, read_message
from polar_mitm.wire.anthropic_tools import choose, read_tools
from polar_mitm.wire.dialect import Support
from polar_mitm.wire.fields import Fields
from polar_mitm.wire.history import History, kind_of, text_parts

_BILLING = "x-anthropic-billing-header:"
_THREAD = "Extra inputs are not permitted"
_PREFILL = "This model does not support assistant message prefill. The conversation must end with a user message."
_ONLY_TEXT = "only text is read"
_CACHES = "the engine caches by itself"
_AT_PROVIDER = "runs at the provider"

SUPPORT = Support(
    supported=(
        *("model", "messages", "system", "tools", "tool_choice", "stream", "max_tokens", "temperature", "top_p"),
        *("top_k", "stop_sequences", "output_config.format", "output_format", "diagnostics.previous_message_id"),
        *("tools[bash_20250124]", "tools[text_editor_20250728]", "tools[memory_20250818]", "tools.defer_loading"),
        *("messages.content[text]", "messages.content[tool_use]", "messages.content[tool_result]"),
        *("messages.content[thinking]", "messages.content[redacted_thinking]", "messages.content[search_result]"),
        *("messages.content[document]", "messages.content[compaction]"),
    ),
    ignored={
        "thinking": "the model thinks as its template has it",
        "output_config.effort": "the model has no such setting",
        "messages.output_config": "the model has no such setting",
        "tool_choice.disable_parallel_tool_use": "the model may call several tools at once",
        "context_management": "the history is used as it is sent",
        "compaction": "the history is used as it is sent",
        "metadata": "for the provider's own records",
        "service_tier": "there is one",
        "speed": "there is one",
        "inference_geo": "the engine is where it is",
        "fallbacks": "there is one model",
        "container": _AT_PROVIDER,
        "mcp_servers": _AT_PROVIDER,
        "cache_control": _CACHES,
        "system.cache_control": _CACHES,
        "tools.cache_control": _CACHES,
        "messages.content.cache_control": _CACHES,
        "messages.content.content.cache_control": _CACHES,
        "messages.content.citations": "answers cite nothing",
        "tools.strict": "arguments are sampled freely",
        **{f"messages.content[{kind}]": _AT_PROVIDER for kind in PROVIDER_BLOCKS},
        **{
            f"tools[{kind}]": _AT_PROVIDER
            for kind in ("web_search_20250305", "web_fetch_20250910", "code_execution_20250825")
        },
    },
    refused={
        "thread": _THREAD,
        "n": "this protocol has one answer",
        "messages.content[image]": _ONLY_TEXT,
        "messages.content.content[image]": _ONLY_TEXT,
        **{
            f"{place}.source[{kind}]": _ONLY_TEXT
            for place in ("messages.content", "messages.content.content")
            for kind in ("base64", "url", "file")
        },
    },
)


class AnthropicMessages:
    """The dialect; see `wire.dialect.Dialect`."""

    name = "anthropic"
    call_prefix = "toolu_"
    support = SUPPORT
    error = staticmethod(answers.error_body)
    status = staticmethod(answers.status)

    def decode(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Conversation:  # Any: JSON
        """The canonical request. Raises BadRequest."""
        if Fields(body).value("thread") is not None:
            raise BadRequest(f"thread: {_THREAD}", field="thread")  # Pi 1.6.0 resends without it on these words
        request, history = frame.opened(body, SUPPORT, lambda part, remedy: _unsupported(part, remedy, body))
        _read_system(request, history)
        for message in request.children("messages"):
            read_message(message, history)
        if history.ends_with("assistant"):
            raise BadRequest(_PREFILL, field="messages")
        diagnostics = request.child("diagnostics")
        history.echo(diagnostics.maybe_text("previous_message_id") if diagnostics else None)
        return frame.conversation(
            request,
            history,
            messages="messages",
            choice=choose(request, read_tools(request, history)),
            sampling=_sampling(request, history),
            thread=headers.get("x-claude-code-agent-id"),
        )

    def encoder(self, request: Conversation, reply_id: str) -> answers.MessageStream:
        """A fresh encoder."""
        return answers.MessageStream(request.model, reply_id)

    def encode(self, request: Conversation, reply: Reply) -> dict[str, Any]:  # Any: JSON
        """The plain answer."""
        return answers.message(request.model, reply)

    def counted(self, tokens: int) -> dict[str, Any]:  # Any: JSON
        """The answer of `/v1/messages/count_tokens`."""
        return {"input_tokens": tokens}

    def model(self, name: str, context: int) -> dict[str, Any]:  # Any: JSON
        """One model; nothing is known of its release."""
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": "1970-01-01T00:00:00Z",
            "lifecycle": "active",
            "max_input_tokens": context,
            "max_tokens": context,
        }

    def models(self, names: Sequence[str], context: int) -> dict[str, Any]:  # Any: JSON
        """The list of models, on one page."""
        ends = {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": None, "last_id": None}
        return {"data": [self.model(name, context) for name in names], "has_more": False, **ends}


def _unsupported(part: Fields, remedy: str, body: Mapping[str, Any]) -> BadRequest:  # Any: JSON
    """In Anthropic's words for a model that only reads text."""
    kind = "image" if part.value("type") == "image" else "document"
    return BadRequest(f"{part.path}: {body.get('model')!r} does not support {kind} input; {remedy}", field=part.path)


def _read_system(request: Fields, history: History) -> None:
    parts = text_parts(request, "system", {"text": "text"})
    # Claude Code 2.1.332 changes its billing block on every turn
    parts = tuple(part for part in parts if not part.text.startswith(_BILLING))
    if parts:
        history.add(Message("system", parts))


def _sampling(request: Fields, history: History) -> Sampling:
    output = request.child("output_config")
    wanted = (output.child("format") if output else None) or request.child("output_format")
    if output:
        history.ignore(*(output.at(name) for name in output.unread()))
    stops = request.texts("stop_sequences")
    if not all(stop.strip() for stop in stops):
        raise request.wrong("stop_sequences", "each stop sequence must contain non-whitespace")
    return Sampling(
        temperature=request.number("temperature"),
        top_p=request.number("top_p"),
        top_k=request.integer("top_k"),
        max_tokens=request.integer("max_tokens", least=1),
        json_schema=_schema(wanted) if wanted else None,
        stop=stops,
    )


def _schema(wanted: Fields) -> str:
    """The schema of a JSON output format. Raises BadRequest when there is none."""
    kind_of(wanted, ("json_schema",))
    schema = wanted.schema("schema")
    if schema is None:
        raise wanted.wrong("schema", "expected an object")
    return schema
