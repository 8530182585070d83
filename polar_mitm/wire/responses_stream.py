"""The streamed form of a Responses answer.

Invariant: an item is closed before the next opens, a tool call is sent whole, and the items that were streamed are
those of the terminal event. Codex and Pi need the `*.done` items and the terminal event, opencode the `*.added` items
and the text deltas too.
"""

from __future__ import annotations

from typing import Any

from polar_mitm.conversation import Conversation, Reply
from polar_mitm.errors import PolarError
from polar_mitm.wire import openai, sse
from polar_mitm.wire import responses_items as items
from polar_mitm.wire.answer import Answer, Sent
from polar_mitm.wire.dialect import Kind
from polar_mitm.wire.responses_tools import Item

_PIECES = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
"""Of the items that are streamed in pieces: the field that is, and what its events are called."""


class ResponseStream:
    """The streamed answer; see `wire.dialect.StreamEncoder`."""

    content_type = "text/event-stream; charset=utf-8"

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

    def delta(self, kind: Kind, text: str, choice: int = 0) -> bytes:
        """More reasoning or text; the reasoning item is closed before the message opens. A compaction has no deltas."""
        assert choice == 0, "this protocol has one answer"
        if not text or self._request.compacts:
            return b""
        return self._say(kind, text, [])

    def finish(self, reply: Reply) -> bytes:
        """The rest, the tool calls whole, and the whole response."""
        out = self._whole(items.compaction_item(reply)) if self._request.compacts else self._rest(reply)
        response = items.finished(self._request, reply)
        return out + self._event(f"response.{response['status']}", response=response)

    def fail(self, error: PolarError) -> bytes:
        """The failed response. Codex tries again on `server_error` and gives up on the other codes."""
        failure = {"code": openai.code(error) or "invalid_prompt", "message": openai.message(error)}
        return self._event("response.failed", response={**self._response("failed"), "error": failure})

    def _rest(self, reply: Reply) -> bytes:
        answer, scored = Answer.of(reply), items.scored(self._request, reply)
        out = self.delta("reasoning", self._sent.rest("reasoning", answer.reasoning))
        rest = self._sent.rest("text", answer.text)
        if rest or (answer.text and scored):
            out += self._say("text", rest, scored)
        if self._open != "text":
            out += self._enter("text" if items.has_message(answer) else "reasoning")
        out += self._leave(items.message_status(reply), scored)
        return out + b"".join(self._whole(item) for item in items.call_items(self._request, reply))

    def _say(self, kind: Kind, text: str, logprobs: list[Item]) -> bytes:
        first = not self._sent[kind]
        self._sent.add(kind, text)
        out = self._enter(kind)
        if kind == "text":
            return out + self._part(kind, "response.output_text.delta", delta=text, logprobs=logprobs)
        if first:
            out += self._part(kind, "response.reasoning_summary_part.added", part=items.summary_text(""))
        return out + self._part(kind, "response.reasoning_summary_text.delta", delta=text)

    def _enter(self, kind: Kind) -> bytes:
        if self._open == kind:
            return b""
        out = self._enter("reasoning") if kind == "text" and self._index < 0 else b""
        out += self._leave()
        self._open = kind
        self._index += 1
        item = items.reasoning_item("", self._id) if kind == "reasoning" else items.message_item("", self._id, [])
        opening = {**item, "status": "in_progress", **({"content": []} if kind == "text" else {})}
        out += self._event("response.output_item.added", output_index=self._index, item=opening)
        if kind == "text":
            out += self._part(kind, "response.content_part.added", part=items.output_text("", []))
        return out

    def _leave(self, status: str = "completed", scored: list[Item] | None = None) -> bytes:
        if self._open is None:
            return b""
        kind, self._open = self._open, None
        text, logprobs = self._sent[kind], scored or []
        out = b""
        if kind == "text":
            item = {**items.message_item(text, self._id, logprobs), "status": status}
            out += self._part(kind, "response.output_text.done", text=text, logprobs=logprobs)
            out += self._part(kind, "response.content_part.done", part=items.output_text(text, logprobs))
        else:
            item = items.reasoning_item(text, self._id)
            if text:
                out += self._part(kind, "response.reasoning_summary_text.done", text=text)
                out += self._part(kind, "response.reasoning_summary_part.done", part=items.summary_text(text))
        return out + self._event("response.output_item.done", output_index=self._index, item=item)

    def _whole(self, item: Item) -> bytes:
        """An item that was not streamed before."""
        self._index += 1
        key, name = _PIECES.get(item["type"], ("", ""))
        opening = {**item, **({"status": "in_progress"} if "status" in item else {}), **({key: ""} if key else {})}
        out = self._event("response.output_item.added", output_index=self._index, item=opening)
        if key:
            place = {"item_id": item["id"], "output_index": self._index}
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
