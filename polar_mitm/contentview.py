"""The content view of mitmproxy and mitmweb that shows a call as a conversation, and its answer as sampled tokens.

Invariant: it shows what is recorded - the answer's tokens come from the call's row, never from its text. It looks only
at flows that the addon marked as calls; it changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from mitmproxy import http
from mitmproxy.contentviews import Contentview, Metadata

from polar_mitm.conversation import Message, Part, Reasoning, Text, ToolCall, ToolResult, part_from_json
from polar_mitm.errors import PolarError
from polar_mitm.record import Row
from polar_mitm.routes import find
from polar_mitm.turn import parse_body

CALL = "polar_call"
"""Key in the metadata of a flow that is a call: its call id, "" as long as it is not known."""


class PolarContentview(Contentview):
    """A call, for people."""

    def __init__(self, row: Callable[[str], Row | None], token: Callable[[int], bytes]) -> None:
        """`row` finds the finished row of a call id, `token` gives a token's bytes."""
        self._row, self._token = row, token

    @property
    def name(self) -> str:
        """As it stands in mitmweb's list of views."""
        return "polar"

    def render_priority(self, data: bytes, metadata: Metadata) -> float:
        """Before every other view of a call, behind every other view of anything else."""
        return 2 if data and metadata.flow is not None and CALL in metadata.flow.metadata else -1

    def prettify(self, data: bytes, metadata: Metadata) -> str:
        """The conversation that a request asks to be continued, or the tokens of the answer."""
        flow = metadata.flow
        if flow is None or CALL not in flow.metadata:
            raise ValueError("this is not a model call that was answered here")
        if isinstance(metadata.http_message, http.Request):
            return _conversation(data, metadata.http_message)
        row = self._row(flow.metadata[CALL])
        return data.decode("utf-8", "replace") if row is None else self._answer(row)

    def _answer(self, row: Row) -> str:
        ids, logprobs = row.get("output_ids", ()), row.get("logprobs", ())
        head = (
            f"call {row['call_id']}, session {row['session_id']}, {row.get('kind')}: {row['status']}\n"
            f"{row.get('prompt_len')} prompt tokens, {len(ids)} sampled, "
            f"{'trained' if row.get('trainable') else 'not trained: ' + str(row.get('untrainable_reason'))}"
        )
        said = [_part(part_from_json(part)) for part in json.loads(row.get("reply") or "[]")]
        return "\n\n".join([head, *said, self._tokens(ids, logprobs)])

    def _tokens(self, ids: Sequence[int], logprobs: Sequence[float]) -> str:
        lines = [
            f"{token:>8} {logprob:>9.4f}  {self._token(int(token)).decode('utf-8', 'backslashreplace')!r}"
            for token, logprob in zip(ids, logprobs, strict=True)
        ]
        return "\n".join([f"{'token':>8} {'logprob':>9}", *lines])


def _conversation(data: bytes, request: http.Request) -> str:
    headers = {name.lower(): value for name, value in request.headers.items()}
    path, _, query = request.path.partition("?")
    match = find(request.method, request.pretty_host, path, query, headers)
    try:
        asked = match.dialect.decode(parse_body(data) | dict(match.fields), headers)
    except PolarError as error:
        return f"refused: {error}\n\n{data.decode('utf-8', 'replace')}"
    tools = [f"[tools] {', '.join(tool.name for tool in asked.tools)}"] if asked.tools else []
    return "\n\n".join([f"[model] {asked.model}", *tools, *map(_message, asked.messages)])


def _message(message: Message) -> str:
    return "\n".join([f"[{message.role}]", *map(_part, message.parts)])


def _part(part: Part) -> str:
    match part:
        case Text(text):
            return text
        case Reasoning(text):
            return f"<thinking> {text}"
        case ToolCall(id, name, arguments):
            return f"<call> {name} {arguments}  ({id})"
        case ToolResult(call_id, text):
            return f"<result> {text}  ({call_id})"
