"""The two interfaces of a protocol: `Dialect` (requests, plain answers, errors) and `StreamEncoder` (streamed answers).

Invariant: an implementation is pure - no I/O, no clock, no randomness. Decoding refuses (BadRequest) what would change
the meaning and is not supported, and names in `Conversation.fidelity` what it ignores. No implementation lives here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from polar_mitm.conversation import Conversation, Reply
from polar_mitm.errors import PolarError

Kind = Literal["reasoning", "text"]


class StreamEncoder(Protocol):
    """The streamed form of one answer. Every method returns the bytes to send now (possibly none)."""

    ping: bytes
    """A data-bearing keep-alive that the protocol's clients accept at any point after `begin`."""

    def begin(self) -> bytes:
        """What can be said before the first token."""
        ...

    def delta(self, kind: Kind, text: str) -> bytes:
        """More of the current reasoning or text. Reasoning always comes before text."""
        ...

    def finish(self, reply: Reply) -> bytes:
        """Everything of `reply` that was not sent yet (tool calls whole), then the terminal event.

        The concatenation of the deltas of a kind is a prefix of the reply's text of that kind.
        """
        ...

    def fail(self, error: PolarError) -> bytes:
        """A terminal error in the protocol's own shape, in the middle of a stream."""
        ...


class Dialect(Protocol):
    """One protocol."""

    name: str
    """Recorded in the calls' `dialect` column: openai_chat, openai_responses, anthropic."""

    def matches(self, method: str, path: str) -> bool:
        """Whether this request (path without query) is a generation call of this protocol."""
        ...

    def decode(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Conversation:
        """The canonical request. Header names are lower case. Raises BadRequest."""
        ...

    def encoder(self, request: Conversation, reply_id: str) -> StreamEncoder:
        """A fresh encoder for the streamed answer whose ids carry `reply_id`."""
        ...

    def encode(self, request: Conversation, reply: Reply) -> dict[str, Any]:
        """The plain answer."""
        ...

    def error(self, error: PolarError) -> dict[str, Any]:
        """The body of a plain error."""
        ...

    def status(self, error: PolarError) -> int:
        """The HTTP status of a plain error (Anthropic: 529 for an overloaded engine)."""
        ...
