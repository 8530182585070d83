"""Replies, streams and harnesses for the tests of the wire: what a model may say, and how it is cut."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2  # the HTTP library of the providers' SDKs
from hypothesis import strategies as st

from polar_mitm.conversation import (
    Conversation,
    Message,
    Reasoning,
    Reply,
    Sampling,
    Text,
    Tool,
    ToolCall,
    Usage,
)
from polar_mitm.wire import Dialect, StreamEncoder

CORE = "abcdefghij234567klmn00qrstuvwx"
"""A reply id as identity mints them: 30 characters."""
REQUEST = Conversation(
    model="m",
    messages=(Message("user", (Text("hi"),)),),
    tools=(
        Tool("run", "runs", '{"type":"object"}'),
        Tool("edit", "edits", "", custom=True),
        Tool("spawn", "spawns", '{"type":"object"}', namespace="agents"),
        Tool("exec", "runs code", "", custom=True, namespace="functions"),
    ),
    sampling=Sampling(max_tokens=100),
)
GOLDEN = Path(__file__).parent / "golden"

_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def _call(draw: st.DrawFn, prefix: str, index: int, *, custom: bool) -> ToolCall:
    if custom and draw(st.booleans()):
        return ToolCall(f"{prefix}_{CORE}{index}", draw(st.sampled_from(["edit", "exec"])), draw(_text), custom=True)
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : ")]))
    # an object: the core gives a function's arguments that are none back as text
    given = draw(st.dictionaries(_text, _json, max_size=3))
    arguments = json.dumps(given, separators=separators, ensure_ascii=draw(st.booleans()))
    return ToolCall(f"{prefix}_{CORE}{index}", draw(st.sampled_from(["run", "spawn"])), arguments)


@st.composite
def replies(draw: st.DrawFn, prefix: str = "call", *, custom: bool = True) -> Reply:
    """Any reply: reasoning or not, text of any number of parts, tool calls, any finish."""
    parts = [Reasoning(draw(_text))] if draw(st.booleans()) else []
    parts += [Text(text) for text in draw(st.lists(_text, max_size=2))]
    calls = [draw(_call(prefix, index, custom=custom)) for index in range(draw(st.integers(0, 3)))]
    finish = draw(st.sampled_from(["length", "tool_calls" if calls else "stop"]))
    cached = draw(st.integers(0, 100))
    usage = Usage(cached + draw(st.integers(0, 100)), cached, draw(st.integers(0, 100)), draw(st.integers(0, 9)))
    return Reply(CORE, (*parts, *calls), finish, usage)


@st.composite
def streams(draw: st.DrawFn, dialect: Dialect, reply: Reply, request: Conversation = REQUEST) -> list[bytes]:
    """The reply streamed, cut at arbitrary places, part of it left to `finish`, with pings between."""
    encoder = dialect.encoder(request, reply.id)
    out = [encoder.begin()]
    reasoning = "".join(part.text for part in reply.parts if isinstance(part, Reasoning))
    text = "".join(part.text for part in reply.parts if isinstance(part, Text))
    text = text[: draw(st.integers(0, len(text)))]
    reasoning = reasoning if text else reasoning[: draw(st.integers(0, len(reasoning)))]
    for kind, whole in (("reasoning", reasoning), ("text", text)):
        cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=4)))
        for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            out.append(encoder.delta(kind, whole[start:end]))
            out += [encoder.ping] if draw(st.booleans()) else []
    return [*out, encoder.finish(reply)]


def streamed(dialect: Dialect, reply: Reply, request: Conversation = REQUEST) -> bytes:
    """The reply streamed without a delta before the end."""
    encoder = dialect.encoder(request, reply.id)
    return encoder.begin() + encoder.finish(reply)


def serve(body: bytes, media: str = "text/event-stream") -> httpx2.MockTransport:
    """A provider that answers every request with `body`."""
    return httpx2.MockTransport(lambda _: httpx2.Response(200, content=body, headers={"content-type": media}))


def events(stream: bytes) -> list[tuple[str, dict[str, object] | str]]:
    """(event name, value) of each event of a stream; fails on anything that is not the grammar."""
    assert stream.endswith(b"\n\n")
    found: list[tuple[str, dict[str, object] | str]] = []
    for block in stream.decode().removesuffix("\n\n").split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        assert set(lines) in ({"data"}, {"event", "data"})
        data = lines["data"]
        found.append((lines.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found


def golden(name: str) -> dict[str, object]:
    """A captured request."""
    return json.loads((GOLDEN / f"{name}.json").read_text())


def began(encoder: StreamEncoder) -> StreamEncoder:
    """The encoder after `begin`."""
    encoder.begin()
    return encoder
