"""OpenAI Responses: `POST .../responses`, as Codex, Pi and opencode speak it.

Invariant: whatever a harness sends back of an answer is understood. This module reads requests, with `responses_input`
for the items and `responses_tools` for the tools; `responses_items` and `responses_stream` write the answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from polar_mitm.conversation import Compaction, Conversation, Message, Reply, Sampling, Text
from polar_mitm.errors import BadRequest
from polar_mitm.wire import frame, openai
from polar_mitm.wire import responses_input as given
from polar_mitm.wire import responses_items as items
from polar_mitm.wire.dialect import Support
from polar_mitm.wire.fields import Fields
from polar_mitm.wire.history import History
from polar_mitm.wire.responses_stream import ResponseStream
from polar_mitm.wire.responses_tools import chosen, read_tools

_LOGPROBS = "message.output_text.logprobs"
_ALWAYS_INCLUDED = "reasoning.encrypted_content"
_READ_AS_TEXT = "only text is read"
_AT_PROVIDER = "runs at the provider"

SUPPORT = Support(
    supported=(
        *("model", "input", "instructions", "tools", "tool_choice", "stream", "temperature", "top_p", "text.format"),
        *("max_output_tokens", "include", "prompt_cache_key", "previous_response_id", "input[additional_tools]"),
        *("input[compaction]", "input[compaction_trigger]", "input[reasoning]", "input[local_shell_call]"),
        *("input[function_call]", "input[function_call_output]", "input[custom_tool_call]", "input[shell_call]"),
        *("input[custom_tool_call_output]", "input[local_shell_call_output]", "input[shell_call_output]"),
        *("input[apply_patch_call]", "input[apply_patch_call_output]"),
    ),
    ignored={
        "parallel_tool_calls": "the model may call several tools at once",
        "reasoning": "the model thinks as its template has it",
        "text.verbosity": "the model has no such setting",
        "store": "every answer is recorded by the run",
        "truncation": "a prompt that does not fit is answered as OpenAI does without it",
        "context_management": "the history is used as it is sent",
        "max_tool_calls": "counts tools that run at the provider",
        "metadata": "for the provider's own records",
        "client_metadata": "for the provider's own records",
        "user": "for the provider's own records",
        "safety_identifier": "for the provider's own records",
        "service_tier": "there is one",
        "moderation": "nothing is moderated",
        "prompt_cache_retention": "the engine caches by itself",
        "prompt_cache_options": "the engine caches by itself",
        "stream_options": "only pads",
        "tools.format": "the input of a free-form tool is sampled freely",
        "tools.tools.format": "the input of a free-form tool is sampled freely",
        "input.tools.tools.format": "the input of a free-form tool is sampled freely",
        "tools.strict": "arguments are sampled freely",
        **{f"input[{kind}]": _AT_PROVIDER for kind in given.PROVIDER_ITEMS},
        **{
            f"tools[{kind}]": _AT_PROVIDER
            for kind in ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "computer")
        },
    },
    refused={
        "conversation": "send the whole history as input",
        "prompt": "send the prompt's text as input",
        "background": "ask for the answer itself",
        "top_logprobs": "only the sampled tokens have logprobs: include message.output_text.logprobs alone",
        "n": "this protocol has one answer",
        "input[item_reference]": "send the item itself",
        "input.content[input_image]": _READ_AS_TEXT,
        "input.content[input_file]": _READ_AS_TEXT,
        "input.content[input_audio]": _READ_AS_TEXT,
        "input.output[input_image]": _READ_AS_TEXT,
        "input.output[input_file]": _READ_AS_TEXT,
    },
)


class OpenAIResponses:
    """The dialect; see `wire.dialect.Dialect`."""

    name = "openai_responses"
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
        instructions = request.maybe_text("instructions")
        if instructions:
            history.add(Message("system", (Text(instructions),)))
        item_fields = _items(request)
        tools = read_tools(request, item_fields, history)
        for item in item_fields:
            given.read_item(item, tools, history)
        compacts = _compacts(request, item_fields)
        if compacts:
            history.add(Message("user", (Text(given.COMPACT),)))
        key, continues = request.maybe_text("prompt_cache_key"), request.maybe_text("previous_response_id")
        decoded = frame.conversation(
            request,
            history,
            messages="input",
            choice=openai.choose(request, tools, lambda choice: chosen(tools, choice)),
            sampling=_sampling(request, history),
            thread=headers.get("thread-id") or key,
        )
        return replace(decoded, continues=continues or None, compacts=compacts)

    def encoder(self, request: Conversation, reply_id: str) -> ResponseStream:
        """A fresh encoder."""
        return ResponseStream(request, reply_id)

    def encode(self, request: Conversation, reply: Reply) -> dict[str, Any]:  # Any: JSON
        """The plain answer."""
        return items.compacted(request, reply) if request.compacts == "history" else items.finished(request, reply)


def _unsupported(part: Fields, remedy: str) -> BadRequest:
    """In OpenAI's words: an item that it does not have, or a kind of content that a model does not read."""
    kind = part.text("type")
    if kind == "item_reference":
        words = f"Item with id {part.value('id')!r} not found. Items are not persisted when `store` is set to false."
        return BadRequest(f"{words} Here {remedy} (item_reference).", field="input")
    words = f"Invalid value: {kind!r}. Supported values are: 'input_text', 'output_text' and 'refusal'."
    return BadRequest(f"{words} Here {remedy}.", field=part.at("type"), code="invalid_value")


def _items(request: Fields) -> list[Fields]:
    if isinstance(request.value("input"), str):
        return [Fields({"role": "user", "content": request.text("input")}, "input")]
    return request.children("input")


def _compacts(request: Fields, item_fields: Sequence[Fields]) -> Compaction | None:
    """`compacts` is what the route of `/responses/compact` adds to the request."""
    if request.flag("compacts"):
        return "history"
    return "item" if any(item.value("type") == "compaction_trigger" for item in item_fields) else None


def _sampling(request: Fields, history: History) -> Sampling:
    text = request.child("text")
    wanted = text.child("format") if text else None
    included = request.items("include")
    others = (str(name) for name in included if name not in (_LOGPROBS, _ALWAYS_INCLUDED))
    history.ignore(*(f"include[{name}]" for name in others))
    return Sampling(
        temperature=request.number("temperature"),
        top_p=request.number("top_p"),
        max_tokens=request.integer("max_output_tokens", least=1),
        json_schema=openai.json_schema(wanted, wanted) if wanted else None,
        logprobs=_LOGPROBS in included,
    )
