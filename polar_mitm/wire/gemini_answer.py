"""A Reply as Gemini answers it: plain, as server-sent events, as one JSON array written piece by piece; and errors.

Invariant: every function call and the first text part carry a thought signature with the reply's id inside, so that a
harness which returns signatures (Pi 1.6.0, Gemini CLI 0.61.0) names the reply. A stream says nothing before its first
chunk and has no keep-alive: Gemini CLI fails on comments, and events without a candidate are no answer.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from polar_mitm.conversation import Conversation, Reply, Scored, ToolCall
from polar_mitm.errors import BudgetUsed, ContextOverflow, PolarError
from polar_mitm.wire import sse
from polar_mitm.wire.answer import Answer, Sent, arguments_value
from polar_mitm.wire.dialect import Kind
from polar_mitm.wire.gemini_request import RAW_ARGUMENTS

Json = dict[str, Any]  # Any: JSON

_FINISH_REASONS = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS"}
_STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
}
"""Google's names; every other mistake of a client is an INVALID_ARGUMENT."""

_NO_QUOTA = (
    "You exceeded your current quota, please check your plan and billing details. For more information on this error, "
    "head to: https://ai.google.dev/gemini-api/docs/rate-limits."
)
_DAY_IS_OVER: Json = {
    "@type": "type.googleapis.com/google.rpc.QuotaFailure",
    "violations": [
        {
            "quotaMetric": "generativelanguage.googleapis.com/generate_requests_per_model_per_day",
            "quotaId": "GenerateRequestsPerDayPerProjectPerModel",
        }
    ],
}
"""A quota of a minute would be waited out: Gemini CLI 0.61.0 looks for `PerDay`."""


def whole(request: Conversation, reply: Reply) -> Json:
    """The plain answer."""
    candidates: list[Json] = []
    for index, choice in enumerate(reply.choices):
        answer = Answer.of(choice)
        parts = [_thought(answer.reasoning)] if answer.reasoning and request.shows_reasoning else []
        parts += [_text(answer.text, choice.id)] if answer.text or not answer.calls else []
        parts += [_call(call, choice.id) for call in answer.calls]
        candidates.append(_candidate(index, parts) | _end(choice))
    return {"candidates": candidates, "usageMetadata": _usage(reply), **_envelope(request, reply.id)}


def failure(error: PolarError) -> Json:
    """The body of an error, plain or in a stream; an overflow and a used budget in Google's words."""
    message = str(error)
    if isinstance(error, ContextOverflow):
        counts = f"({error.prompt_tokens}) exceeds the maximum number of tokens allowed ({error.limit})"
        message = f"The input token count {counts}."
    if isinstance(error, BudgetUsed):
        message = _NO_QUOTA
    status = _STATUSES.get(error.status, "INVALID_ARGUMENT")
    details = {"details": [_DAY_IS_OVER]} if isinstance(error, BudgetUsed) else {}
    return {"error": {"code": error.status, "message": message, "status": status, **details}}


class GeminiStream:
    """The streamed answer; see `wire.dialect.StreamEncoder`."""

    def __init__(self, request: Conversation, reply_id: str) -> None:
        self._request, self._id = request, reply_id
        self._array = request.framing == "array"
        self._sent: defaultdict[int, Sent] = defaultdict(Sent)
        self._chunks = 0
        self.content_type: str = "application/json; charset=UTF-8" if self._array else "text/event-stream"
        self.ping: bytes = b""

    def begin(self) -> bytes:
        """Nothing: the headers are all that can be said before the first token."""
        return b""

    def delta(self, kind: Kind, text: str, choice: int = 0) -> bytes:
        """More thought or text; the first text carries the signature, which for further choices only `finish` knows."""
        if not text or (kind == "reasoning" and not self._request.shows_reasoning):
            return b""
        sent = self._sent[choice]
        signs = not (choice or sent["text"])
        sent.add(kind, text)
        part = _thought(text) if kind == "reasoning" else _text(text, self._id) if signs else {"text": text}
        return self._chunk({"candidates": [_candidate(choice, [part])]})

    def finish(self, reply: Reply) -> bytes:
        """For each choice one chunk with the rest, the calls and the finish reason; the last also has the usage."""
        out = b""
        for index, choice in enumerate(reply.choices):
            candidate = _candidate(index, self._rest(index, choice)) | _end(choice)
            last = index == len(reply.choices) - 1
            out += self._chunk({"candidates": [candidate], **({"usageMetadata": _usage(reply)} if last else {})})
        return out + self._end()

    def fail(self, error: PolarError) -> bytes:
        """The error as the last event."""
        return self._frame(failure(error)) + self._end()

    def _rest(self, index: int, reply: Reply) -> list[Json]:
        answer, sent = Answer.of(reply), self._sent[index]
        reasoning = sent.rest("reasoning", answer.reasoning) if self._request.shows_reasoning else ""
        text = sent.rest("text", answer.text)
        parts = [_thought(reasoning)] if reasoning else []
        unsigned = bool(index and sent["text"])
        if text or unsigned or not (sent["text"] or answer.calls):
            parts.append(_text(text, reply.id) if unsigned or not sent["text"] else {"text": text})
        parts += [_call(call, reply.id) for call in answer.calls]
        return parts or [{"text": ""}]

    def _chunk(self, value: Json) -> bytes:
        return self._frame(value | _envelope(self._request, self._id))

    def _frame(self, value: Json) -> bytes:
        if not self._array:
            return sse.data(value)
        self._chunks += 1
        return (b"[" if self._chunks == 1 else b",\r\n") + sse.json_bytes(value)

    def _end(self) -> bytes:
        return b"]" if self._array else b""


def _envelope(request: Conversation, reply_id: str) -> Json:
    return {"modelVersion": request.model, "responseId": reply_id}


def _candidate(index: int, parts: list[Json]) -> Json:
    return {"content": {"parts": parts, "role": "model"}, "index": index}


def _thought(text: str) -> Json:
    return {"text": text, "thought": True}


def _text(text: str, reply_id: str) -> Json:
    return {"text": text, "thoughtSignature": _signature(reply_id)}


def _call(call: ToolCall, reply_id: str) -> Json:
    value = arguments_value(call.arguments)
    if not isinstance(value, dict) or set(value) == {RAW_ARGUMENTS}:
        value = {RAW_ARGUMENTS: call.arguments}
    return {
        "functionCall": {"id": call.id, "name": call.name, "args": value},
        "thoughtSignature": _signature(reply_id),
    }


def _signature(reply_id: str) -> str:
    """The id as base64 text of whole bytes: upper-case letters, which no id begins with, fill it up."""
    return reply_id + "A" * (-len(reply_id) % 4)


def _end(reply: Reply) -> Json:
    end: Json = {"finishReason": _FINISH_REASONS[reply.finish]}
    if reply.scored:
        chosen = [_scored(token) for token in reply.scored]
        end["avgLogprobs"] = sum(token.logprob for token in reply.scored) / len(reply.scored)
        end["logprobsResult"] = {"chosenCandidates": chosen}
    return end


def _scored(token: Scored) -> Json:
    return {"token": token.text.decode("utf-8", "replace"), "logProbability": token.logprob}


def _usage(reply: Reply) -> Json:
    """Google counts cached tokens inside the prompt, and thoughts beside the candidates."""
    usage = reply.usage
    output = sum(choice.usage.output_tokens for choice in reply.choices)
    thoughts = sum(choice.usage.reasoning_tokens for choice in reply.choices)
    return {
        "promptTokenCount": usage.prompt_tokens,
        "cachedContentTokenCount": usage.cached_tokens,
        "candidatesTokenCount": output - thoughts,
        "thoughtsTokenCount": thoughts,
        "totalTokenCount": usage.prompt_tokens + output,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": usage.prompt_tokens}],
    }
