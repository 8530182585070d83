"""The providers' own SDKs as judges: each reads an answer of one protocol, plain and streamed, to the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx2
from anthropic import Anthropic
from anthropic import DefaultHttpxClient as AnthropicHttpClient
from google import genai
from google.genai import types
from openai import DefaultHttpxClient, OpenAI

from polar_mitm.wire import DIALECTS, Dialect
from tests.judges.answers import Provider

Json = dict[str, Any]  # Any: JSON
PROVIDER = Provider()
"""Whom all the SDKs below ask."""
HI = [{"role": "user", "content": "hi"}]
MORE = [{"role": "user", "content": "go on"}]
RESPONSES, CHAT, ANTHROPIC, GEMINI = DIALECTS
PREFIXES = {RESPONSES.name: "call", CHAT.name: "call", ANTHROPIC.name: "toolu", GEMINI.name: ""}
"""What stands before the core in the ids of tool calls."""


@dataclass(frozen=True, slots=True)
class Judge:
    """One protocol's SDK."""

    dialect: Dialect
    plain: Callable[[], Json]
    """What the SDK makes of a plain answer."""
    streamed: Callable[[], Json]
    """What the SDK makes of a streamed answer, accumulated."""
    carried_on: Callable[[], None]
    """Asks, reads the streamed answer, and asks again with the SDK's own objects in the history."""
    choices: bool = False
    """Whether the protocol knows several choices."""
    scored: bool = False
    """Whether the protocol tells logprobs."""
    custom: bool = False
    """Whether the SDK's stream helper knows free-form tools: for Chat it takes their calls for functions."""


def _dump(answer: Any) -> Json:  # Any: a model of an SDK
    return answer.model_dump(mode="json", exclude_none=True, warnings=False)


# --- OpenAI -------------------------------------------------------------------------------------------------------


@cache
def openai_client() -> OpenAI:
    """OpenAI's SDK, which asks PROVIDER."""
    http = DefaultHttpxClient(transport=PROVIDER.transport)
    return OpenAI(api_key="k", base_url="http://x/v1", http_client=http, max_retries=0)


def responses_plain() -> Json:
    """A response as it was parsed."""
    return _dump(openai_client().responses.create(model="m", input="hi"))


def responses_streamed() -> Json:
    """The response of the terminal event, without what the SDK's helper parses out of the items."""
    with openai_client().responses.stream(model="m", input="hi") as stream:
        last = list(stream)[-1]
    return _without(_dump(last.response), {"parsed", "parsed_arguments"})


def responses_carried_on() -> None:
    """The items of the output are input, as OpenAI's examples do it."""
    with openai_client().responses.stream(model="m", input=HI) as stream:
        output = list(stream)[-1].response.output
    with openai_client().responses.stream(model="m", input=[*HI, *output, *MORE]) as stream:
        list(stream)


def chat_plain() -> Json:
    """A completion as it was parsed."""
    return _dump(openai_client().chat.completions.create(model="m", messages=HI))


def chat_streamed() -> Json:
    """The snapshot; the place of a call in its list, which only chunks have, is checked and dropped."""
    with openai_client().chat.completions.stream(model="m", messages=HI) as stream:
        list(stream)
        whole = _dump(stream.current_completion_snapshot)
    for choice in whole["choices"]:
        calls = choice["message"].get("tool_calls", [])
        assert [call.pop("index") for call in calls] == list(range(len(calls)))
    return _without(whole, {"parsed", "parsed_arguments"})


def chat_carried_on() -> None:
    """The first choice's message is the next in the history."""
    with openai_client().chat.completions.stream(model="m", messages=HI) as stream:
        list(stream)
        message = stream.current_completion_snapshot.choices[0].message
    with openai_client().chat.completions.stream(model="m", messages=[*HI, message, *MORE]) as stream:
        list(stream)


def _without(value: Any, names: set[str]) -> Any:  # Any: JSON
    if isinstance(value, list):
        return [_without(item, names) for item in value]
    if isinstance(value, dict):
        return {name: _without(item, names) for name, item in value.items() if name not in names}
    return value


# --- Anthropic ----------------------------------------------------------------------------------------------------


@cache
def anthropic_client() -> Anthropic:
    """Anthropic's SDK, which asks PROVIDER."""
    http = AnthropicHttpClient(transport=PROVIDER.transport)
    return Anthropic(api_key="k", base_url="http://x", http_client=http, max_retries=0)


def anthropic_plain() -> Json:
    """A message as it was parsed."""
    return _dump(anthropic_client().messages.create(model="m", max_tokens=100, messages=HI))


def anthropic_streamed() -> Json:
    """The message that the SDK's stream adds up to."""
    with anthropic_client().messages.stream(model="m", max_tokens=100, messages=HI) as stream:
        return _dump(stream.get_final_message())


def anthropic_carried_on() -> None:
    """The blocks of the message are the assistant's content."""
    asked = {
        "model": "m",
        "max_tokens": 100,
        "tools": [{"name": name, "input_schema": {}} for name in ("run", "spawn")],
    }
    with anthropic_client().messages.stream(**asked, messages=HI) as stream:
        said = {"role": "assistant", "content": stream.get_final_message().content}
    with anthropic_client().messages.stream(**asked, messages=[*HI, said, *MORE]) as stream:
        stream.get_final_message()


# --- Google -------------------------------------------------------------------------------------------------------


@cache
def google_client() -> genai.Client:
    """Google's SDK, which asks PROVIDER."""
    http = httpx2.Client(transport=PROVIDER.transport)
    return genai.Client(api_key="k", http_options=types.HttpOptions(base_url="http://x", httpx_client=http))


def gemini_plain() -> Json:
    """A response as it was parsed."""
    whole = _dump(google_client().models.generate_content(model="m", contents="hi"))
    assert whole.pop("automatic_function_calling_history") == []  # the SDK's own, only in plain answers
    return _joined([whole])


def gemini_streamed() -> Json:
    """The chunks added up, which the SDK leaves to its users."""
    return _joined(_dump(chunk) for chunk in google_client().models.generate_content_stream(model="m", contents="hi"))


def gemini_carried_on() -> None:
    """The SDK's chat keeps every chunk as a content of its own."""
    chat = google_client().chats.create(model="m")
    list(chat.send_message_stream("hi"))
    list(chat.send_message_stream("go on"))


def _joined(chunks: Iterable[Json]) -> Json:
    """Later fields win, contents are one after another; pieces of one text are one part with its only signature."""
    whole: Json = {}
    candidates: dict[int, Json] = {}
    for chunk in chunks:
        del chunk["sdk_http_response"]  # the HTTP headers
        for candidate in chunk.pop("candidates"):
            known = candidates.setdefault(candidate["index"], {"content": {"role": "model", "parts": []}})
            content = candidate.pop("content")
            assert content["role"] == "model"
            for part in content["parts"]:
                _append(known["content"]["parts"], part)
            known |= candidate
        whole |= chunk
    return whole | {"candidates": [candidates[index] for index in sorted(candidates)]}


def _append(parts: list[Json], part: Json) -> None:
    before = parts[-1] if parts else {}
    if "text" in part and "text" in before and part.get("thought") == before.get("thought"):
        assert not {"thought_signature"} <= set(part) & set(before), "a text with two signatures"
        parts[-1] = before | part | {"text": before["text"] + part["text"]}
    elif part != {"text": ""}:
        parts.append(part)


JUDGES = (
    Judge(RESPONSES, responses_plain, responses_streamed, responses_carried_on, scored=True, custom=True),
    Judge(CHAT, chat_plain, chat_streamed, chat_carried_on, choices=True, scored=True),
    Judge(ANTHROPIC, anthropic_plain, anthropic_streamed, anthropic_carried_on),
    Judge(GEMINI, gemini_plain, gemini_streamed, gemini_carried_on, choices=True, scored=True),
)
