"""OpenAI Chat Completions: `POST .../chat/completions`, as Qwen Code, Pi (OpenRouter) and mini-swe-agent speak it.

Invariant: messages keep their order and their roles, wherever a harness puts its system messages. This module reads
requests; `chat_answers` writes the answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
from polar_mitm.errors import BadRequest
from polar_mitm.wire import chat_answers, frame, openai
from polar_mitm.wire.dialect import Support
from polar_mitm.wire.fields import Fields
from polar_mitm.wire.history import History, joined, kind_of, text_parts

SUPPORT = Support(
    supported=(
        *("model", "messages", "tools", "tool_choice", "stream", "stream_options.include_usage", "response_format"),
        *("temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "seed", "stop", "n", "logprobs"),
        *("modalities", "prompt_cache_key", "messages.reasoning_content", "messages.reasoning"),
        *("messages.reasoning_details", "messages.refusal", "messages.tool_calls", "messages.tool_call_id"),
    ),
    ignored={
        "frequency_penalty": "the distribution belongs to the run",
        "presence_penalty": "the distribution belongs to the run",
        "repetition_penalty": "the distribution belongs to the run",
        "min_p": "the distribution belongs to the run",
        "parallel_tool_calls": "the model may call several tools at once",
        "reasoning_effort": "the model thinks as its template has it",
        "reasoning": "the model thinks as its template has it",
        "verbosity": "the model has no such setting",
        "prediction": "only speeds up",
        "stream_options.include_obfuscation": "only pads",
        "store": "every answer is recorded by the run",
        "metadata": "for the provider's own records",
        "user": "for the provider's own records",
        "safety_identifier": "for the provider's own records",
        "service_tier": "there is one",
        "moderation": "nothing is moderated",
        "prompt_cache_retention": "the engine caches by itself",
        "prompt_cache_options": "the engine caches by itself",
        "messages.content.cache_control": "the engine caches by itself",
        "web_search_options": "runs at the provider",
        "messages.name": "the templates have no names",
        "tools.custom.format": "the input of a free-form tool is sampled freely",
        "tools.function.strict": "arguments are sampled freely",
    },
    refused={
        "top_logprobs": "only the sampled tokens have logprobs: set logprobs alone",
        "logit_bias": "sampling belongs to the run",
        "functions": "declare them in tools",
        "function_call": "use tool_choice",
        "audio": "only text can be generated",
        "messages.function_call": "use tool_calls",
        "messages.audio": "only text is read",
        "messages.content[image_url]": "only text is read",
        "messages.content[input_audio]": "only text is read",
        "messages.content[file]": "only text is read",
    },
)
_TEXT = {"text": "text", "refusal": "refusal"}
_MAX_CHOICES = 128


class OpenAIChat:
    """The dialect; see `wire.dialect.Dialect`."""

    name = "openai_chat"
    call_prefix = "call_"
    support = SUPPORT
    counted = staticmethod(openai.counted)
    model = staticmethod(openai.model)
    models = staticmethod(openai.models)
    error = staticmethod(openai.body)
    status = staticmethod(openai.status)

    def decode(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Conversation:  # Any: JSON
        """The canonical request. Raises BadRequest."""
        request, history = frame.opened(body, SUPPORT, _unsupported)
        if request.value("modalities") not in (None, [], ["text"]):
            raise request.wrong("modalities", "only text can be generated")
        for message in request.children("messages"):
            history.add(_message(message, history))
        tools = _tools(request, history)
        options = request.child("stream_options")
        thread = request.maybe_text("prompt_cache_key")
        decoded = frame.conversation(
            request,
            history,
            messages="messages",
            choice=openai.choose(request, tools, _named),
            sampling=_sampling(request),
            thread=thread or headers.get("x-session-id"),
        )
        return replace(decoded, stream_usage=options.flag("include_usage") if options else False)

    def encoder(self, request: Conversation, reply_id: str) -> chat_answers.ChatStream:
        """A fresh encoder."""
        return chat_answers.ChatStream(request, reply_id)

    def encode(self, request: Conversation, reply: Reply) -> dict[str, Any]:  # Any: JSON
        """The plain answer."""
        return chat_answers.completion(request, reply)


def _unsupported(part: Fields, remedy: str) -> BadRequest:
    """In OpenAI's words for a model that only reads text, which name the place with dots."""
    words = f"Invalid content type. {part.text('type')} is only supported by certain models."
    return BadRequest(f"{words} Here {remedy}.", field=part.at("type").replace("[", ".["))


def _message(message: Fields, history: History) -> Message:
    role = message.text("role")
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
    details = _reasoning_details(message, history)
    # Qwen Code 0.24.4 sends the same text under both names; Pi 1.6.0 sends only the details when it got some
    reasoning = message.maybe_text("reasoning_content") or message.maybe_text("reasoning") or details
    refusal = message.maybe_text("refusal")
    parts: list[Part] = [Reasoning(reasoning)] if reasoning else []
    parts += [part for part in text_parts(message, "content", _TEXT) if part.text]
    parts += [Text(refusal)] if refusal else []
    parts += [_decode_call(call, history) for call in message.children("tool_calls")]
    return tuple(parts)


def _reasoning_details(message: Fields, history: History) -> str:
    """The text of OpenRouter's reasoning details, whose ids may be ours.

    litellm 1.110.2 (mini-swe-agent) moves fields that it does not know to `provider_specific_fields`.
    """
    moved = message.child("provider_specific_fields")
    texts: list[str] = []
    for detail in [d for owner in (message, moved) if owner for d in owner.children("reasoning_details")]:
        for name in ("id", "data", "signature"):
            history.echo(detail.maybe_text(name))
        texts.append(detail.maybe_text("text") or detail.maybe_text("summary") or "")
    return "".join(texts)


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


def _tools(request: Fields, history: History) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    for tool in request.children("tools"):
        kind = tool.text("type")
        if kind not in ("function", "custom"):
            history.ignore(f"tools[{kind}]")  # runs at the provider
            continue
        declared = tool.wanted_child(kind)
        name, description = declared.text("name"), declared.maybe_text("description") or ""
        schema = "" if kind == "custom" else declared.schema("parameters") or openai.NO_PARAMETERS
        tools.append(Tool(name, description, schema, custom=kind == "custom"))
    return tuple(tools)


def _named(choice: Fields) -> str:
    """The tool that a `tool_choice` means."""
    return choice.wanted_child(kind_of(choice, ("function", "custom"))).text("name")


def _sampling(request: Fields) -> Sampling:
    wanted = request.child("response_format")
    limits = [request.integer(name, least=1) for name in ("max_completion_tokens", "max_tokens")]
    choices = request.integer("n", least=1) or 1
    if choices > _MAX_CHOICES:
        raise request.wrong("n", f"must be at most {_MAX_CHOICES}")
    one_stop = isinstance(request.value("stop"), str)
    return Sampling(
        temperature=request.number("temperature"),
        top_p=request.number("top_p"),
        top_k=request.integer("top_k"),
        max_tokens=limits[0] or limits[1],
        seed=request.integer("seed"),
        json_schema=openai.json_schema(wanted, wanted.child("json_schema")) if wanted else None,
        stop=tuple(filter(None, [request.text("stop")])) if one_stop else request.texts("stop"),
        choices=choices,
        logprobs=request.flag("logprobs"),
    )
