"""The two interfaces of a protocol: `Dialect` (requests, plain answers, errors) and `StreamEncoder` (streamed answers).

Invariant: an implementation is pure - no I/O, no clock, no randomness. Decoding refuses (BadRequest) what would change
the meaning and is not supported, and names in `Conversation.fidelity` what it ignores. No implementation lives here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from polar_mitm.conversation import Conversation, Reply
from polar_mitm.errors import PolarError

Kind = Literal["reasoning", "text"]


class StreamEncoder(Protocol):
    """The streamed form of one answer. Every method returns the bytes to send now (possibly none)."""

    content_type: str
    """Of the streamed answer."""
    ping: bytes
    """A data-bearing keep-alive that the protocol's clients accept at any point after `begin`; b"" where none is."""

    def begin(self) -> bytes:
        """What can be said before the first token."""
        ...

    def delta(self, kind: Kind, text: str, choice: int = 0) -> bytes:
        """More of the current reasoning or text of a choice. Reasoning always comes before text."""
        ...

    def finish(self, reply: Reply) -> bytes:
        """What of `reply` and its other choices was not sent yet (tool calls whole), then the terminal event.

        The concatenation of the deltas of a kind is a prefix of the reply's text of that kind.
        """
        ...

    def fail(self, error: PolarError) -> bytes:
        """A terminal error in the protocol's own shape, in the middle of a stream."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Support:
    """What becomes of the fields of a request; docs/protocols.md is made of it, and `wire.frame` acts on it.

    Fields are dotted paths, as the provider's reference names them, through objects and arrays alike; `a.b[kind]` are
    the objects in `a.b` whose `type` is `kind`. A field in none of the tables is listed as ignored.
    """

    supported: tuple[str, ...]
    """Fields that are honoured."""
    ignored: Mapping[str, str]
    """Fields that are listed in `Conversation.fidelity` and not honoured, each with why that is harmless."""
    refused: Mapping[str, str]
    """Fields answered with the provider's 400, each with the remedy."""


class Dialect(Protocol):
    """One protocol."""

    name: str
    """Recorded in the calls' `dialect` column: openai_chat, openai_responses, anthropic, gemini."""
    call_prefix: str
    """What stands before the minted core in the id of a tool call."""
    support: Support

    def decode(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Conversation:
        """The canonical request; `body` also holds what the route read from the path. Header names are lower case.

        Also for a request that only wants its tokens counted. Raises BadRequest.
        """
        ...

    def encoder(self, request: Conversation, reply_id: str) -> StreamEncoder:
        """A fresh encoder for the streamed answer whose ids carry `reply_id`."""
        ...

    def encode(self, request: Conversation, reply: Reply) -> dict[str, Any]:
        """The plain answer."""
        ...

    def counted(self, tokens: int) -> dict[str, Any]:
        """The answer to a request that wants its tokens counted."""
        ...

    def model(self, name: str, context: int) -> dict[str, Any]:
        """One model as the provider describes it; `context` in tokens."""
        ...

    def models(self, names: Sequence[str], context: int) -> dict[str, Any]:
        """The list of models."""
        ...

    def error(self, error: PolarError) -> dict[str, Any]:
        """The body of a plain error."""
        ...

    def status(self, error: PolarError) -> int:
        """The HTTP status of a plain error (Anthropic: 529 for an overloaded engine)."""
        ...
