"""One choice of a call's answer: sampled, told as it comes, and read into a reply and a row.

Invariant: everything that was sampled is in the row, with what of it the reply stands for; what was told is how the
reply begins. This module answers nobody and makes nothing durable: `turn` does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from polar_mitm.conversation import (
    Conversation,
    Finish,
    Part,
    Reply,
    Scored,
    ToolCall,
    Usage,
    extend_key,
    part_json,
)
from polar_mitm.desk import Desk
from polar_mitm.engine import Description
from polar_mitm.errors import PolarError
from polar_mitm.generation import Generation
from polar_mitm.prompting import Prompt, room
from polar_mitm.record import Row
from polar_mitm.tokens import Finished, Kind, Reading

News = tuple[Kind, str, int]
"""More "reasoning" or "text" of a choice: kind, text, index of the choice."""
Tell = Callable[[News], None]

_SHORT = 2000
"""Ids that are read in a millisecond: less than what another thread would cost."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be sampled."""

    request: Conversation
    prompt: Prompt
    seed: str
    """What the seed of the call is derived from, when the run has one."""
    most: int | None
    """How many tokens the session may still use for one choice; None: as many as fit."""
    call_prefix: str
    """What stands before a reply's id in the ids of its tool calls."""


class Choice:
    """One choice; `sample` it, then take its `reply` and its rows."""

    def __init__(self, desk: Desk, order: Order, reply_id: str, row: Row) -> None:
        """`row` is the begun one."""
        self._desk, self._order, self._reply_id, self._row = desk, order, reply_id, row
        self.index: int = row["choice"]
        stop = order.request.sampling.stop
        prompt = order.prompt
        self._reading = Reading(desk.template, prompt.ids, order.request.tools, forced=prompt.forced, stop=stop)
        self._generation: Generation | None = None
        self._finished: Finished | None = None
        self.failed = False
        """Whether its own sampling ended in an error."""

    async def sample(self, described: Description, tell: Tell | None) -> None:
        """Sample to the end, or to the first stop string. `tell` hears what is said; None when nobody listens.

        Raises PolarError.
        """
        generation = self._begin(described)
        listens = tell is not None or bool(self._order.request.sampling.stop)
        try:
            async with aclosing(generation.pieces()) as pieces:
                async for ids in pieces:
                    self._desk.usage.speaks(self._row)
                    self._reading.take(ids)
                    if listens:
                        await self._tell(tell)
                    if self._reading.stopped:
                        return
        except PolarError:
            self.failed = True
            raise

    async def reply(self) -> Reply:
        """The reply of the whole sample."""
        request, generation = self._order.request, self._sampled
        scored = request.sampling.logprobs
        finished = self._finished = await self._read(lambda: self._reading.finish(scored=scored))
        parts = self._minted(finished.parts)
        return Reply(
            self._reply_id,
            parts,
            "stop" if finished.stopped_by else finish_of(generation.finish, parts),
            self._usage(finished),
            stopped_by=finished.stopped_by,
            scored=self._scored(finished) if scored else (),
        )

    def completed(self, reply: Reply, history: bytes) -> Row:
        """The row of a finished choice; `history` is the key of the request's history."""
        generation, finished = self._sampled, self._finished
        assert finished is not None
        reason = self._untrainable(generation)
        return self._row | generation.columns() | {
            "status": "completed",
            "trainable": reason is None,
            "untrainable_reason": reason,
            "finish": reply.finish,
            "kept_len": finished.kept,
            "reply_faults": [*finished.faults],
            "client_delivered": False,
            "history_key": extend_key(history, reply.message) if finished.extendable else None,
            "reply": json.dumps([part_json(p) for p in reply.parts]),
            "ended_ns": time.time_ns(),
        }  # fmt: skip

    def cut_short(self, error: PolarError | None) -> Row:
        """The row of a choice that is given up: failed by an error, else aborted."""
        status = "failed" if error else "aborted"
        row = self._row | (self._generation.columns() if self._generation else {})
        row |= {"status": status, "untrainable_reason": status, "client_delivered": False, "ended_ns": time.time_ns()}
        return row | {"error_kind": error.kind, "error": str(error)} if error else row

    # -- sampling

    @property
    def _sampled(self) -> Generation:
        assert self._generation is not None
        return self._generation

    def _begin(self, described: Description) -> Generation:
        desk, order = self._desk, self._order
        seed = f"{order.seed}\0{self.index}" if self.index else order.seed
        left = room(order.prompt.ids, described)
        left = left if order.most is None else min(left, order.most)
        applied = desk.sampling.applied(order.request.sampling, left, desk.template.stop_ids, seed)
        self._generation = Generation(desk.engine, order.prompt.ids, applied, desk.wait)
        return self._generation

    async def _tell(self, tell: Tell | None) -> None:
        news = await self._read(self._reading.read)
        if tell:
            for kind, text in news:
                tell((kind, text, self.index))

    async def _read[T](self, work: Callable[[], T]) -> T:
        return await self._desk.tokens(work, quick=len(self._reading.output_ids) <= _SHORT)

    def _untrainable(self, generation: Generation) -> str | None:
        if self._row["kind"] == "foreign":
            return "foreign"
        asked = self._order.request.sampling
        return self._desk.sampling.untrainable(asked) or ("mixed_kv" if generation.mixed_kv else None)

    # -- reading

    def _minted(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """Give the tool calls the ids that the harness must echo."""
        return tuple(
            replace(part, id=f"{self._order.call_prefix}{self._reply_id}{index:02x}")
            if isinstance(part, ToolCall)
            else part
            for index, part in enumerate(parts)
        )

    def _usage(self, finished: Finished) -> Usage:
        """Counted in ids; what was sampled behind a stop string is no part of the answer."""
        prompt, generation = len(self._order.prompt.ids), self._sampled
        sampled = len(generation.output_ids) if finished.kept is None else finished.kept
        return Usage(prompt, min(prompt, generation.cached_tokens), sampled, min(finished.reasoning, sampled))

    def _scored(self, finished: Finished) -> tuple[Scored, ...]:
        start, end = finished.text
        ids, logprobs = self._sampled.output_ids[start:end], self._sampled.logprobs[start:end]
        bytes_of = self._desk.template.bytes_of
        return tuple(Scored(bytes_of(i), p) for i, p in zip(ids.tolist(), logprobs.tolist(), strict=True))


def finish_of(engine: dict[str, Any] | None, parts: tuple[Part, ...]) -> Finish:  # Any: JSON
    """What the harness is told: a cut reply is `length` even when a tool call stands in it."""
    if engine is not None and engine.get("type") == "length":
        return "length"
    return "tool_calls" if any(isinstance(p, ToolCall) for p in parts) else "stop"
