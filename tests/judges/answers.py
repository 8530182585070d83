"""What a judge is shown: generated replies, and the bytes of their plain and streamed answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import httpx2  # the HTTP library of the providers' SDKs
from hypothesis import strategies as st

from polar_mitm.conversation import Conversation, Part, Reasoning, Reply, Sampling, Scored, Text, ToolCall
from polar_mitm.wire import Dialect
from tests.mitm.wire.replies import CORE, REQUEST, replies


class Provider:
    """Answers every request with the bytes that it was last given; the SDKs' own HTTP clients parse them."""

    def __init__(self) -> None:
        self.transport = httpx2.MockTransport(self._answer)
        self.asked = httpx2.Request("GET", "http://x")
        """The last request."""
        self.give(b"")

    def give(self, body: bytes, media: str = "application/json", *, status: int = 200, size: int = 1000) -> None:
        """Answer with `body` from now on, in pieces of `size` bytes."""
        self.body, self.media, self.status, self.size = body, media, status, size

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        self.asked = request
        return httpx2.Response(self.status, content=self._pieces(), headers={"content-type": self.media})

    def _pieces(self) -> Iterator[bytes]:
        for start in range(0, len(self.body), self.size):
            yield self.body[start : start + self.size]


@st.composite
def answers(draw: st.DrawFn, prefix: str, *, choices: bool, scored: bool, custom: bool) -> Reply:
    """Any reply: reasoning before and after text, several tools, several choices, told logprobs, a stop string."""
    several = draw(st.integers(1, 3)) if choices else 1
    each = [_choice(draw, draw(replies(prefix, custom=custom)), index, scored=scored) for index in range(several)]
    return replace(each[0], others=tuple(each[1:]))


def asked(reply: Reply) -> Conversation:
    """The request for this reply, with everything that an answer can tell."""
    sampling = Sampling(max_tokens=100, stop=("END",), choices=len(reply.choices), logprobs=True)
    return replace(REQUEST, sampling=sampling)


def _choice(draw: st.DrawFn, reply: Reply, index: int, *, scored: bool) -> Reply:
    core = f"{CORE[:20]}{index:02x}{CORE[22:]}"
    said = [part for part in reply.parts if not isinstance(part, ToolCall)]
    calls = [replace(part, id=part.id.replace(CORE, core)) for part in reply.parts if isinstance(part, ToolCall)]
    parts: list[Part] = [*draw(st.permutations(said)), *calls]
    visible = "".join(part.text for part in parts if isinstance(part, Text)).encode()
    stopped = "END" if reply.finish == "stop" and draw(st.booleans()) else None
    tokens = _tokens(draw, visible) if scored else ()
    return replace(reply, id=core, parts=tuple(parts), stopped_by=stopped, scored=tokens)


def _tokens(draw: st.DrawFn, visible: bytes) -> tuple[Scored, ...]:
    """The text cut at arbitrary bytes, also inside a character."""
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(visible) - 1)), max_size=4)))
    pieces = [visible[start:end] for start, end in zip([0, *cuts], [*cuts, len(visible)], strict=True)]
    return tuple(Scored(piece, -draw(st.floats(0, 20))) for piece in pieces if piece)


@st.composite
def streams(draw: st.DrawFn, dialect: Dialect, reply: Reply) -> bytes:
    """The reply streamed: the choices take turns, cut at arbitrary places, empty deltas and pings between."""
    encoder = dialect.encoder(asked(reply), reply.id)
    left = {(index, kind): _whole(choice, kind) for index, choice in enumerate(reply.choices) for kind in _KINDS}
    out = encoder.begin()
    for index in draw(st.lists(st.integers(0, len(reply.others)), max_size=12)):
        kind = "reasoning" if left[index, "reasoning"] else "text"
        cut = draw(st.integers(0, len(left[index, kind])))
        out += encoder.delta(kind, left[index, kind][:cut], *([index] if index else []))
        left[index, kind] = left[index, kind][cut:]
        out += encoder.ping if draw(st.booleans()) else b""
    return out + encoder.finish(reply)


_KINDS = ("reasoning", "text")


def _whole(reply: Reply, kind: str) -> str:
    wanted = Reasoning if kind == "reasoning" else Text
    return "".join(part.text for part in reply.parts if isinstance(part, wanted))
