"""Requests that come again: which are repeats of an earlier one and are given its sample, and which are samples anew.

Invariant: a repeat is given an earlier sample only when the earlier connection is closed or the repeat declares itself,
and when it is clear which sample is meant; parallel samples of one prompt are legitimate. A client that leaves aborts
the engine at once, unless its repeat came first: nothing is sampled on for a client that may come back.

What changes in a repeat, as seen, and so does not count:

| harness | what changes |
|---|---|
| Codex 0.171.0, Pi 1.6.0, Gemini CLI 0.61.0, opencode 1.18.33 | nothing: after an error or a cut, the same bytes |
| Qwen Code 0.24.4, mini-swe-agent 2.4.6 (OpenAI's SDK) | the header x-stainless-retry-count, which declares it |
| Claude Code 2.1.332 | the header x-client-request-id, and its billing block in `system` |
| Claude Code 2.1.332, after a stream that it could not read | no `stream`; a lower `max_tokens` and thinking budget |
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from polar_mitm.conversation import Reply
from polar_mitm.journal import Outline, outline
from polar_mitm.shelf import Shelf

Body = Mapping[str, Any]  # Any: JSON

_UNCOUNTED = frozenset(
    {
        "stream", "stream_options", "metadata", "client_metadata", "diagnostics",
        "max_tokens", "max_completion_tokens", "max_output_tokens", "thinking",
    }
)  # fmt: skip
_BILLING = "x-anthropic-billing-header:"
_SMALL = 500  # bytes of an entry without a reply


@dataclass(frozen=True, slots=True)
class Answered:
    """A finished call: its reply and the rows that are on disk, one for each choice."""

    reply: Reply
    rows: list[dict[str, Any]]  # Any: a row

    @property
    def size(self) -> int:
        """What it takes in memory, in bytes, near enough."""
        return 2_000 + sum(_size(value) for row in self.rows for value in row.values())


@dataclass(frozen=True, slots=True)
class Asked:
    """What tells a request from others and a repeat from a first try."""

    digest: bytes
    """Of session, protocol and the body without what changes in a repeat."""
    stream: bool
    bound: int | None
    """Most tokens that the request wants."""
    declared: bool
    """Whether the client counts it as a retry."""


@dataclass(slots=True)
class Take[News]:
    """One sampling, and the connections that listen to it."""

    asked: Asked
    reply_id: str
    task: asyncio.Task[Answered] | None = None
    sampled: bool = False
    """Whether the engine is done: what is left is writing it down."""
    repeats: int = 0
    """How many more requests were given this sample."""
    heard: list[News] = field(default_factory=list[Any])  # Any: News
    listeners: list[asyncio.Queue[News | None]] = field(default_factory=list[Any])  # Any: such queues

    def tell(self, news: News) -> None:
        """Something new, for everybody who listens."""
        self.heard.append(news)
        for listener in self.listeners:
            listener.put_nowait(news)

    def join(self, listener: asyncio.Queue[News | None]) -> None:
        """Listen from the beginning; the end of the task is None."""
        assert self.task is not None
        for news in self.heard:
            listener.put_nowait(news)
        self.listeners.append(listener)
        self.task.add_done_callback(lambda _: listener.put_nowait(None))

    def leave(self, listener: asyncio.Queue[News | None]) -> bool:
        """Listen no more. Whether nobody is left who does."""
        if listener in self.listeners:
            self.listeners.remove(listener)
        return not self.listeners


class Retries[News]:
    """The samples that a repeat may be given."""

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        """`max_bytes` bounds the finished replies; half of it is for those that nobody received."""
        self._running: dict[bytes, list[Take[News]]] = {}
        self.undelivered: Shelf[bytes, Take[News]] = Shelf(max_bytes // 2)
        """Finished replies whose clients left."""
        self._delivered: Shelf[bytes, Take[News] | None] = Shelf(max_bytes // 2)

    def find(self, asked: Asked) -> Take[News] | None:
        """The sample that this request is to be given; None when it is to be sampled."""
        take = self._earlier(asked)
        if take is not None:
            take.repeats += 1
        return take

    def _earlier(self, asked: Asked) -> Take[News] | None:
        kept = self.undelivered.get(asked.digest)
        if kept is not None and _same_bound(kept, asked):
            return self.undelivered.pop(asked.digest)
        running = [take for take in self._running.get(asked.digest, []) if _same_bound(take, asked)]
        left = [take for take in running if not take.listeners]
        if left:
            return left[-1]
        if running:
            return running[0] if len(running) == 1 and _declared(asked, running[0]) else None  # of several: any
        delivered = self._delivered.get(asked.digest)
        if delivered is None or not _same_bound(delivered, asked) or not _declared(asked, delivered):
            return None
        if not asked.declared:
            delivered.asked = replace(delivered.asked, stream=False)  # the client has both forms now: once is enough
        return delivered

    def run(self, take: Take[News]) -> None:
        """A sampling began."""
        self._running.setdefault(take.asked.digest, []).append(take)

    def stop(self, take: Take[News]) -> None:
        """It ended, or is being ended: nobody may join it any more."""
        running = [other for other in self._running.pop(take.asked.digest, []) if other is not take]
        if running:
            self._running[take.asked.digest] = running

    def failed(self, take: Take[News]) -> None:
        """It gave no answer: a retry is of this one, not of an equal request that was answered before."""
        self.stop(take)
        if take.asked.digest in self._delivered:
            self._delivered.put(take.asked.digest, None, _SMALL)

    def delivered(self, take: Take[News], answered: Answered) -> None:
        """The whole answer reached its client; it may still ask again."""
        digest = take.asked.digest
        another = digest in self._delivered and self._delivered.get(digest) is not take
        self._delivered.put(digest, None if another else take, _SMALL if another else answered.size)

    def missed(self, take: Take[News], answered: Answered) -> None:
        """The reply is finished and its client has left."""
        self.undelivered.put(take.asked.digest, take, answered.size)


def asked(session_id: str, dialect: str, body: Body, marks: Outline, headers: Mapping[str, str]) -> Asked:
    """What tells this request from others. `marks` is the outline of `body`; header names are in lower case."""
    counted = {key: mark for key, mark in marks.items() if key not in _UNCOUNTED}
    if isinstance(system := body.get("system"), list):
        counted |= outline({"system": [block for block in system if not _is_billing(block)]})
    digest = blake2b(repr((session_id, dialect, sorted(counted.items()))).encode(), digest_size=16).digest()
    bounds = (body.get(name) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"))
    bound = next((value for value in bounds if isinstance(value, int)), None)
    return Asked(digest, bool(body.get("stream")), bound, headers.get("x-stainless-retry-count", "0") not in ("", "0"))


def _is_billing(block: Any) -> bool:  # Any: JSON
    return isinstance(block, dict) and str(block.get("text", "")).startswith(_BILLING)


def _declared(asked: Asked, earlier: Take[Any] | None) -> bool:
    return earlier is not None and (asked.declared or _fallback(earlier, asked))


def _fallback(earlier: Take[Any], asked: Asked) -> bool:
    """Whether this is what was streamed before, asked for in one piece."""
    return earlier.asked.stream and not asked.stream


def _same_bound(earlier: Take[Any], asked: Asked) -> bool:
    """Whether the reply may be as long as the earlier one: a fallback asks for less."""
    one, other = earlier.asked.bound, asked.bound
    return one == other or (_fallback(earlier, asked) and one is not None and other is not None and other < one)


def _size(value: Any) -> int:  # Any: a column's value
    return value.nbytes if isinstance(value, np.ndarray) else len(value) if isinstance(value, str | bytes) else 0
