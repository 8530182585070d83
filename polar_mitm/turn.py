"""The whole path of a call: decode, find the parent, make the prompt, sample, read, record, answer.

Invariant: nothing that completes a tool call and no terminal event is given out before the finished call is durable,
and every call that reached the engine ends as a row. This module knows neither mitmproxy nor HTTP.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from polar_mitm.conversation import (
    Conversation,
    Finish,
    Part,
    Reasoning,
    Reply,
    ToolCall,
    Usage,
    extend_key,
    history_keys,
    part_json,
    tools_key,
)
from polar_mitm.desk import Answered, Desk
from polar_mitm.engine import Description
from polar_mitm.errors import BadRequest, ContextOverflow, EngineUnavailable, JournalError, PolarError
from polar_mitm.generation import Generation
from polar_mitm.identity import Parent, RootReason, Tip, mint, new_call_id
from polar_mitm.record import Incoming, Row, first_row, prompt_row, refused_row, request_row
from polar_mitm.tokens import Reading, Tokens

_FLUSH_SECONDS = 0.05
_PING_SECONDS = 10.0


async def open_call(desk: Desk, incoming: Incoming) -> Call:
    """Decode a request and start sampling its answer. Raises PolarError, already recorded, when it cannot begin."""
    row = first_row(desk.run_id, incoming, new_call_id(), time.time_ns())
    row["kind"] = desk.fingerprints.kind(incoming.session, incoming.headers)
    try:
        body = parse_body(incoming.body)
        request = incoming.dialect.decode(body, incoming.headers)
        row |= request_row(request)
        prompt = await _prompt(desk, incoming, request)
        if desk.described:
            check_fits(prompt.ids, desk.described)
    except PolarError as error:
        await _record_refusal(desk, row, error, incoming.body)
        raise
    row |= prompt_row(prompt.ids, prompt.parent, prompt.root_reason, request, body)
    call = Call(desk, incoming, request, prompt, row=row, body=body)
    call.start()
    return call


async def refuse(desk: Desk, incoming: Incoming, error: PolarError) -> None:
    """Record a request that is turned away before it is read."""
    row = first_row(desk.run_id, incoming, new_call_id(), time.time_ns())
    await _record_refusal(desk, row, error, incoming.body)


def parse_body(body: bytes) -> dict[str, Any]:  # Any: JSON
    """The request body as a JSON object; raises BadRequest."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRequest(f"the request body is not a JSON object but {type(value).__name__}")
    return value


def check_fits(prompt: Tokens, described: Description) -> None:
    """Raises ContextOverflow when no token could be sampled after this prompt."""
    if _room(prompt, described) < 1:
        raise ContextOverflow(len(prompt), described.context)


def _room(prompt: Tokens, described: Description) -> int:
    """How many tokens may be sampled: SGLang keeps one position of the context free."""
    return described.context - len(prompt) - 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and where it comes from."""

    ids: Tokens
    parent: Parent | None
    root_reason: RootReason | None


async def _prompt(desk: Desk, incoming: Incoming, request: Conversation) -> Prompt:
    """The parent's tokens extended by the new messages; a full render when there is no parent or no bridge."""
    found = await desk.find_parent(incoming.session, request)
    if isinstance(found, Parent):
        tip, history = found.tip, request.messages
        bridge = desk.template.bridge
        ids = await desk.tokens(bridge, tip.prompt_ids, tip.output_ids, history, found.messages, request.tools)
        if ids is not None:
            return Prompt(ids, found, None)
        found = "bridge_refused"
    return Prompt(await desk.tokens(desk.template.render, request.messages, request.tools), None, found)


async def _record_refusal(desk: Desk, row: Row, error: PolarError, body: bytes) -> None:
    begun = desk.journal.begin(row)
    await desk.journal.finish([begun | refused_row(error, body) | {"ended_ns": time.time_ns()}])


class Call:
    """One call: sampled by a task of its own, listened to by the gateway."""

    def __init__(
        self, desk: Desk, incoming: Incoming, request: Conversation, prompt: Prompt, *, row: Row, body: dict[str, Any]
    ) -> None:  # Any: JSON
        self.request = request
        self._desk, self._incoming, self._prompt, self._row, self._body = desk, incoming, prompt, row, body
        self._session_id = incoming.session.session_id
        self._reply_id = mint(desk.key, self._session_id, row["call_id"])
        self._digest = _digest(self._session_id, incoming.dialect.name, body)
        self._seed = f"{self._session_id}\0{desk.ordinal(self._session_id)}"
        self._news: asyncio.Queue[tuple[str, str] | None] = asyncio.Queue()
        self._reading = Reading(desk.template, prompt.ids, request.tools)
        self._generation: Generation | None = None
        self._task: asyncio.Task[Answered] | None = None
        self._sampled = self._delivered = False

    # -- for the gateway

    def start(self) -> None:
        """Begin sampling, or take the reply that an earlier connection did not live to receive."""
        earlier = self._desk.undelivered.pop(self._digest, None)
        if earlier is not None:
            self._reply_id = earlier.reply.id
        self._task = asyncio.create_task(self._sample() if earlier is None else _given(earlier))
        self._task.add_done_callback(lambda _: self._news.put_nowait(None))
        self._desk.running.add(self._task)
        self._task.add_done_callback(self._desk.running.discard)

    async def stream(self) -> AsyncGenerator[bytes]:
        """The streamed answer, pings included; the last item is the terminal event, or a terminal error."""
        encoder = self._incoming.dialect.encoder(self.request, self._reply_id)
        yield encoder.begin()
        try:
            async for news in self._listen():
                yield b"".join(encoder.delta(kind, text) for kind, text in news) if news else encoder.ping  # pyright: ignore[reportArgumentType]
            answered = await self._result()
        except PolarError as error:
            yield encoder.fail(error)
            return
        yield encoder.finish(answered.reply)
        self.delivered()

    async def plain(self) -> dict[str, Any]:  # Any: JSON
        """The plain answer. Raises PolarError."""
        return self._incoming.dialect.encode(self.request, (await self._result()).reply)

    def delivered(self) -> None:
        """The whole answer was written to the client."""
        assert self._task is not None
        self._delivered = True
        self._desk.note(self._note(self._task.result().row | {"client_delivered": True}))

    def leave(self) -> None:
        """The client is gone: stop sampling, or keep a sampled reply for its next try."""
        task = self._task
        if self._delivered or task is None:
            return
        if self._sampled or task.done():
            task.add_done_callback(self._keep)
        else:
            task.cancel()

    def _keep(self, task: asyncio.Task[Answered]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._desk.keep_undelivered(self._digest, task.result())

    # -- listening

    async def _listen(self) -> AsyncIterator[list[tuple[str, str]]]:
        """Batches of news, at most one every 50 ms; an empty batch when there was none for too long."""
        last, open_ = 0.0, True
        while open_:
            try:
                news = [await asyncio.wait_for(self._news.get(), _PING_SECONDS)]
            except TimeoutError:
                yield []
                continue
            await asyncio.sleep(max(0.0, last + _FLUSH_SECONDS - time.monotonic()))
            while not self._news.empty():
                news.append(self._news.get_nowait())
            open_, last = None not in news, time.monotonic()
            if said := [n for n in news if n is not None]:
                yield said

    async def _result(self) -> Answered:
        task, me = self._task, asyncio.current_task()
        assert task is not None
        assert me is not None
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if me.cancelling() or not task.cancelled():
                raise
            raise EngineUnavailable("the interceptor is being stopped: this call was ended and recorded") from None

    async def _note(self, row: Row) -> None:
        with suppress(JournalError):  # the row stands as undelivered; the next call is told that the journal is broken
            await self._desk.journal.finish([row])

    # -- sampling

    async def _sample(self) -> Answered:
        desk, audit = self._desk, None
        self._row = desk.journal.begin(self._row)
        try:
            described = await desk.ready()
            check_fits(self._prompt.ids, described)
            if self._prompt.parent is not None:
                audit = asyncio.ensure_future(self._rerendered())
            generation = self._begin(described)
            async with aclosing(generation.pieces()) as pieces:
                async for ids in pieces:
                    for news in await desk.tokens(self._reading.push, ids):
                        self._news.put_nowait(news)
            self._sampled = True
            return await self._record_reply(generation, await audit if audit else None)
        except PolarError as error:
            await self._record_end("failed", error)
            raise
        except asyncio.CancelledError:
            await self._record_end("aborted", None)
            raise

    def _begin(self, described: Description) -> Generation:
        desk, room = self._desk, _room(self._prompt.ids, described)
        applied = desk.sampling.applied(self.request.sampling, room, desk.template.stop_ids, self._seed)
        self._generation = Generation(desk.engine, self._prompt.ids, applied, desk.wait)
        return self._generation

    async def _rerendered(self) -> Tokens | None:
        """What a plain re-render of the harness's history gives; made while the engine samples."""
        try:
            return await self._desk.tokens(self._desk.template.render, self.request.messages, self.request.tools)
        except BadRequest:
            return None  # the template refuses the history that the bridge could extend

    # -- recording

    async def _record_reply(self, generation: Generation, rendered: Tokens | None) -> Answered:
        desk, request = self._desk, self.request
        parts = self._minted(await desk.tokens(self._reading.finish))
        usage = self._usage(generation, parts)
        reply = Reply(self._reply_id, parts, finish_of(generation.finish, parts), usage)
        history = history_keys(request.messages)
        key = extend_key(history[-1] if history else b"", reply.message)
        reason = self._untrainable(generation)
        row = self._row | generation.columns()
        row |= {
            "status": "completed",
            "trainable": reason is None,
            "untrainable_reason": reason,
            "finish": reply.finish,
            "client_delivered": False,
            "rerender_shared": None if rendered is None else shared_prefix(rendered, self._prompt.ids),
            "history_key": key,
            "reply": json.dumps([part_json(p) for p in parts]),
            "answer": json.dumps(self._incoming.dialect.encode(request, reply)),
            "ended_ns": time.time_ns(),
        }
        await desk.journal.finish([row])
        tools, ids = tools_key(request.tools), self._prompt.ids
        tip = Tip(row["call_id"], 0, ids, generation.output_ids, key, tools, self._body)
        desk.tips.add(self._session_id, tip)
        return Answered(reply, row)

    async def _record_end(self, status: str, error: PolarError | None) -> None:
        row = self._row | (self._generation.columns() if self._generation else {})
        row |= {"status": status, "untrainable_reason": status, "client_delivered": False, "ended_ns": time.time_ns()}
        if error is not None:
            row |= {"error_kind": error.kind, "error": str(error)}
        with suppress(JournalError):  # a broken journal keeps the begin record: the call is found as lost
            await asyncio.shield(self._desk.journal.finish([row]))

    def _untrainable(self, generation: Generation) -> str | None:
        if self._row["kind"] == "foreign":
            return "foreign"
        return self._desk.sampling.untrainable(self.request.sampling) or ("mixed_kv" if generation.mixed_kv else None)

    def _minted(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """Give the tool calls the ids that the harness must echo."""
        prefix = "toolu_" if self._incoming.dialect.name == "anthropic" else "call_"
        return tuple(
            replace(part, id=f"{prefix}{self._reply_id}{index:02x}") if isinstance(part, ToolCall) else part
            for index, part in enumerate(parts)
        )

    def _usage(self, generation: Generation, parts: tuple[Part, ...]) -> Usage:
        reasoning = "".join(p.text for p in parts if isinstance(p, Reasoning))
        sampled = len(generation.output_ids)
        spent = len(self._desk.template.encode(reasoning)) if reasoning else 0
        return Usage(len(self._prompt.ids), generation.cached_tokens, sampled, min(spent, sampled))


async def _given(answered: Answered) -> Answered:
    return answered


def _digest(session_id: str, dialect: str, body: dict[str, Any]) -> bytes:  # Any: JSON
    """What makes a request the repeat of another: everything but whether it is streamed."""
    asked = {k: v for k, v in body.items() if k != "stream"}
    return blake2b(json.dumps([session_id, dialect, asked], sort_keys=True).encode(), digest_size=16).digest()


def finish_of(engine: dict[str, Any] | None, parts: tuple[Part, ...]) -> Finish:  # Any: JSON
    """What the harness is told: a cut reply is `length` even when a tool call stands in it."""
    if engine is not None and engine.get("type") == "length":
        return "length"
    return "tool_calls" if any(isinstance(p, ToolCall) for p in parts) else "stop"


def shared_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens two sequences share."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
