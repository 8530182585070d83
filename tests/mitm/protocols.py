"""What a harness of each protocol sends, sends next, and reads: the least that a faithful one does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.mitm.wire.replies import events

Json = dict[str, Any]
_SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}


@dataclass(frozen=True, slots=True)
class Protocol:
    """One dialect as its harness speaks it."""

    name: str
    path: str
    done: bytes
    """In the bytes of a stream that ended well, and in no other's."""
    failed: bytes
    """In the bytes of a stream that ended in an error."""

    def at(self, *, stream: bool) -> str:
        """The path of a call, which is another for a stream of Gemini's."""
        return self.path.replace("generateContent", "streamGenerateContent?alt=sse") if stream else self.path

    def ask(self, text: str, **more: Any) -> Json:
        """A first request with one tool."""
        run = {"name": "run", "description": "runs"}
        if self.name == "gemini":
            tools = [{"functionDeclarations": [{**run, "parametersJsonSchema": _SCHEMA}]}]
            return {"contents": [{"role": "user", "parts": [{"text": text}]}], "tools": tools, **more}
        if self.name == "openai_responses":
            given: Json = {"input": [{"role": "user", "content": text}]}
            given["tools"] = [{"type": "function", **run, "parameters": _SCHEMA}]
        else:
            given = {"messages": [{"role": "user", "content": text}]}
            tool: Json = {"type": "function", "function": {**run, "parameters": _SCHEMA}}
            given["tools"] = [tool if self.name == "openai_chat" else {**run, "input_schema": _SCHEMA}]
        if self.name == "anthropic":
            given["max_tokens"] = 1000
        return {"model": "some-model", **given, **more}

    def follow(self, body: Json, answer: Json, result: str) -> Json:
        """The request after an answer: its tool calls with this result, or a user's words when it has none."""
        if self.name == "gemini":
            content = answer["candidates"][0]["content"]
            calls = [part["functionCall"] for part in content["parts"] if "functionCall" in part]
            given = {"response": {"output": result}}
            parts = [{"functionResponse": {"id": c["id"], "name": c["name"], **given}} for c in calls]
            return body | {
                "contents": [*body["contents"], content, {"role": "user", "parts": parts or [{"text": result}]}]
            }
        if self.name == "openai_responses":
            calls = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
            results = [{"type": "function_call_output", "call_id": c, "output": result} for c in calls]
            return body | {"input": body["input"] + answer["output"] + (results or _says(result))}
        if self.name == "openai_chat":
            said = answer["choices"][0]["message"]
            results = [
                {"role": "tool", "tool_call_id": c["id"], "content": result} for c in said.get("tool_calls") or []
            ]
            return body | {"messages": [*body["messages"], said, *(results or _says(result))]}
        ids = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
        blocks = [{"type": "tool_result", "tool_use_id": i, "content": result} for i in ids]
        said = {"role": "assistant", "content": answer["content"]}
        next_ = [{"role": "user", "content": blocks}] if blocks else _says(result)
        return body | {"messages": [*body["messages"], said, *next_]}

    def said(self, answer: Json) -> tuple[str, list[tuple[str, Any]]]:
        """Text and tool calls of a plain answer."""
        if self.name == "gemini":
            parts: list[Json] = answer["candidates"][0]["content"].get("parts", [])
            calls = [p["functionCall"] for p in parts if "functionCall" in p]
            text = "".join(p["text"] for p in parts if "text" in p and not p.get("thought"))
            return text, [(c["name"], c["args"]) for c in calls]
        if self.name == "openai_responses":
            items: list[Json] = answer["output"]
            text = "".join(p["text"] for i in items if i["type"] == "message" for p in i["content"])
            return text, [(i["name"], json.loads(i["arguments"])) for i in items if i["type"] == "function_call"]
        if self.name == "openai_chat":
            said = answer["choices"][0]["message"]
            calls = [c["function"] for c in said.get("tool_calls") or []]
            return said["content"] or "", [(c["name"], json.loads(c["arguments"])) for c in calls]
        blocks: list[Json] = answer["content"]
        text = "".join(b["text"] for b in blocks if b["type"] == "text")
        return text, [(b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]

    def said_in(self, stream: bytes) -> tuple[str, list[tuple[str, Any]]]:
        """Text and tool calls of a streamed answer."""
        values: list[Json] = [value for _, value in events(stream) if isinstance(value, dict)]
        if self.name == "gemini":
            said = [self.said(value) for value in values if value.get("candidates")]
            return "".join(text for text, _ in said), [call for _, calls in said for call in calls]
        if self.name == "openai_responses":
            return self.said(values[-1]["response"])
        if self.name == "openai_chat":
            deltas: list[Json] = [v["choices"][0]["delta"] for v in values if v["choices"]]
            calls = [c["function"] for d in deltas for c in d.get("tool_calls", [])]
            text = "".join(d.get("content") or "" for d in deltas)
            return text, [(c["name"], json.loads(c["arguments"])) for c in calls]
        blocks = [v["content_block"] for v in values if v["type"] == "content_block_start"]
        deltas = [v["delta"] for v in values if v["type"] == "content_block_delta"]
        text = "".join(d["text"] for d in deltas if d["type"] == "text_delta")
        inputs = [d["partial_json"] for d in deltas if d["type"] == "input_json_delta" and d["partial_json"]]
        names = [b["name"] for b in blocks if b["type"] == "tool_use"]
        return text, [(name, json.loads(given)) for name, given in zip(names, inputs, strict=True)]


def _says(text: str) -> list[Json]:
    return [{"role": "user", "content": text}]


CHAT = Protocol("openai_chat", "/v1/chat/completions", b"[DONE]", b'data: {"error"')
RESPONSES = Protocol("openai_responses", "/v1/responses", b"response.completed", b"response.failed")
ANTHROPIC = Protocol("anthropic", "/v1/messages", b"message_stop", b"event: error")
PROTOCOLS = (CHAT, RESPONSES, ANTHROPIC)
GEMINI = Protocol("gemini", "/v1beta/models/some-model:generateContent", b'"finishReason"', b'data: {"error"')
EVERY = (*PROTOCOLS, GEMINI)
