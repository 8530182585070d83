"""Requests of the four protocols, and ways to spoil them: values, structure, bytes, encodings.

Invariant: a spoiled request is a function of the seed request and the random generator alone, so a failure can be
replayed by its number.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
_SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
_RUN = {"name": "run", "description": "runs a command"}

SEEDS: dict[str, tuple[str, Json]] = {
    "openai_chat": ("/v1/chat/completions", {
        "model": "m", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 9, "temperature": 0.5,
        "top_p": 0.9, "n": 1, "stop": ["never this"], "seed": 1, "user": "u", "tool_choice": "auto", "logprobs": True,
        "response_format": {"type": "text"},
        "tools": [{"type": "function", "function": {**_RUN, "parameters": _SCHEMA}},
                  {"type": "custom", "custom": {"name": "edit", "description": "edits", "format": {"type": "text"}}}],
        "messages": [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm.", "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "run", "arguments": "{\"command\": \"ls\"}"}},
            ]},
            {"role": "tool", "tool_call_id": "call_1", "content": "a b"}, {"role": "user", "content": "And now?"},
        ],
    }),
    "openai_responses": ("/v1/responses", {
        "model": "m", "stream": True, "max_output_tokens": 9, "instructions": "Be brief.", "store": False,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "parallel_tool_calls": True,
        "reasoning": {"effort": "low", "summary": "auto"}, "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tools": [{"type": "function", **_RUN, "parameters": _SCHEMA}, {"type": "web_search"},
                  {"type": "custom", "name": "edit", "format": {"type": "grammar", "syntax": "lark"}},
                  {"type": "namespace", "name": "agents", "tools": [{"type": "function", **_RUN}]}],
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}],
             "encrypted_content": "e"},
            {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "run", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "a b"},
            {"type": "custom_tool_call", "call_id": "call_2", "name": "edit", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "call_2", "output": "done"},
        ],
    }),
    "anthropic": ("/v1/messages", {
        "model": "m", "stream": True, "max_tokens": 9, "temperature": 0.5, "top_k": 5, "stop_sequences": ["never this"],
        "thinking": {"type": "adaptive"}, "metadata": {"user_id": "{}"}, "tool_choice": {"type": "auto"},
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "tools": [{**_RUN, "input_schema": _SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}],
        "messages": [
            {"role": "user", "content": "Hi"}, {"role": "system", "content": "More."},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "Wait."},
                {"type": "tool_use", "id": "toolu_1", "name": "run", "input": {"command": "ls"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "a b"}]},
                {"type": "text", "text": "And now?"},
            ]},
        ],
    }),
    "gemini": ("/v1beta/models/m:streamGenerateContent", {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "generationConfig": {"temperature": 0.5, "maxOutputTokens": 9, "stopSequences": ["never this"],
                             "thinkingConfig": {"includeThoughts": True}, "candidateCount": 1},
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}}, "safetySettings": [],
        "tools": [{"functionDeclarations": [{**_RUN, "parameters": {"type": "OBJECT", "properties": {
            "command": {"type": "STRING"}}}}]}, {"googleSearch": {}}],
        "contents": [
            {"role": "user", "parts": [{"text": "Hi"}]},
            {"role": "model", "parts": [{"text": "Hm.", "thought": True}, {"text": "Wait."}, {
                "functionCall": {"id": "c1", "name": "run", "args": {"command": "ls"}}, "thoughtSignature": "AAAA"}]},
            {"role": "user", "parts": [
                {"functionResponse": {"id": "c1", "name": "run", "response": {"output": "a b"}}}]},
        ],
    }),
}  # fmt: skip
"""A request of each protocol, with the path it goes to, that uses most of what the protocol has."""

_STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, 1e308, -0.0, 0.5, "", " ", "\x00", "\ud800", "\u2028",
    "💥" * 50, "x" * 5000, [], [None], [[]], {}, {"type": None}, {"": ""}, {"type": "text"}, "auto", "none", "required",
    ["a"], {"type": "function"}, {"type": "image_url", "image_url": {"url": "data:"}}, {"role": "user"}, "<|im_end|>",
    "<tool_call>", float("inf"), float("nan"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spoiled:
    """A request as it goes over the wire."""

    dialect: str
    path: str
    body: bytes
    encoding: str = ""


def spoiled(number: int) -> Spoiled:
    """The spoiled request of this number."""
    random_ = random.Random(number)
    dialect = random_.choice([*SEEDS])
    path, seed = SEEDS[dialect]
    body = copy.deepcopy(seed)
    for _ in range(random_.choice([0, 1, 1, 1, 2, 3, 8])):
        random_.choice(_SPOIL_VALUES)(body, random_)
    data = json.dumps(body).encode()
    data = random_.choice(_SPOIL_BYTES)(data, random_) if random_.random() < 0.2 else data
    encoding = random_.choice(["gzip", "deflate", "br", "zstd", "gzip, gzip", "nonsense"])
    if random_.random() < 0.9:
        encoding = ""
    elif random_.random() < 0.5:
        data = {"gzip": gzip.compress, "deflate": zlib.compress}.get(encoding, bytes)(data)
    return Spoiled(dialect, path, data, encoding)


# --- values -------------------------------------------------------------------------------------------------------


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    places: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        holder = todo.pop()
        keys: list[Any] = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        places += [(holder, key) for key in keys]
        todo += [holder[key] for key in keys if isinstance(holder[key], dict | list)]
    return places


def _replace(body: Json, random_: random.Random) -> None:
    if places := _places(body):
        holder, key = random_.choice(places)
        holder[key] = copy.deepcopy(random_.choice(_STRANGE))


def _remove(body: Json, random_: random.Random) -> None:
    if places := _places(body):
        holder, key = random_.choice(places)
        del holder[key]


def _add(body: Json, random_: random.Random) -> None:
    holders = [body, *(h[k] for h, k in _places(body) if isinstance(h[k], dict))]
    names = ["type", "id", "content", "n", "previous_response_id", "stop", "thread", "logprobs", "zzz", "name", "role"]
    random_.choice(holders)[random_.choice(names)] = copy.deepcopy(random_.choice(_STRANGE))


def _repeat(body: Json, random_: random.Random) -> None:
    if lists := [h[k] for h, k in _places(body) if isinstance(h[k], list) and h[k]]:
        chosen = random_.choice(lists)
        chosen.insert(random_.randrange(len(chosen) + 1), copy.deepcopy(random_.choice(chosen)))


def _swap(body: Json, random_: random.Random) -> None:
    """One value where another belongs."""
    if places := _places(body):
        (holder, key), (other, place) = random_.choice(places), random_.choice(places)
        holder[key] = copy.deepcopy(other[place])


def _nest(body: Json, random_: random.Random) -> None:
    if places := _places(body):
        holder, key = random_.choice(places)
        for _ in range(random_.choice([1, 20, 50])):
            holder[key] = [holder[key]]


_SPOIL_VALUES: tuple[Callable[[Json, random.Random], None], ...] = (
    _replace, _replace, _replace, _remove, _add, _repeat, _swap, _nest,
)  # fmt: skip


# --- bytes --------------------------------------------------------------------------------------------------------


def _cut(data: bytes, random_: random.Random) -> bytes:
    return data[: random_.randrange(len(data) + 1)]


def _flip(data: bytes, random_: random.Random) -> bytes:
    spoilt = bytearray(data)
    for _ in range(random_.choice([1, 3, 30])):
        spoilt[random_.randrange(len(spoilt))] = random_.randrange(256)
    return bytes(spoilt)


def _wrap(data: bytes, random_: random.Random) -> bytes:
    depth = random_.choice([1, 3000, 100_000])
    return b"[" * depth + data + b"]" * depth


def _other(_: bytes, random_: random.Random) -> bytes:
    return random_.choice([b"", b"null", b"[]", b'"x"', b"\xff\xfe", b"{}", b"{}{}", b"\xef\xbb\xbf{}", b"a=b&c=d"])


_SPOIL_BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (_cut, _flip, _wrap, _other)
