"""The whole path of a call: decode, find the parent, make the prompt, sample, read, record, answer.

Invariant: nothing that completes a tool call and no terminal event is given out before the finished call is durable,
and every call that reached the engine ends as a row. This module knows neither mitmproxy nor HTTP.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

from polar_mitm.choice import Choice, News, Order
from polar_mitm.conversation import Conversation, Reasoning, history_keys
from polar_mitm.desk import Answered, Desk
from polar_mitm.errors import BadRequest, EngineUnavailable, JournalError, PolarError, Sealed
from polar_mitm.identity import CALL_ID_LENGTH, mint, new_call_id
from polar_mitm.journal import Outline, outline
from polar_mitm.kinds import AGENT, Verdict
from polar_mitm.prompting import Evidence, Prompt, check_fits, evidence, is_audited, prompt_of
from polar_mitm.record import Incoming, Row, first_row, prompt_row, refused_row, request_row
from polar_mitm.retries import Take, asked
from polar_mitm.tips import Parent

_PING_SECONDS = 10.0


async def open_call(desk: Desk, incoming: Incoming) -> Call:
    """Decode a request and start sampling its answer. Raises PolarError, already recorded, when it cannot begin."""
    row = first_row(desk.run_id, incoming, new_call_id(), time.time_ns())
    declared = desk.kinds.declared(incoming.session, incoming.headers)
    row |= declared.columns
    try:
        return await _begin(desk, incoming, row, declared)
    except PolarError as error:
        await _record_refusal(desk, row, error, incoming.body)
        raise


async def _begin(desk: Desk, incoming: Incoming, row: Row, declared: Verdict) -> Call:
    """The started call; `row` is given what the request says. Raises PolarError."""
    session = incoming.session
    if session.sealed:
        raise Sealed(f"session {session.session_id!r} is over: its calls are no longer answered")
    body, request = await _read(desk, incoming)
    request = replace(request, asked_at=row["began_ns"] // 1_000_000_000)
    row |= request_row(request)
    prompt = await prompt_of(desk, session, request)
    if desk.described:
        check_fits(prompt.ids, desk.described)
    marks = outline(body)
    begun = row | prompt_row(prompt.ids, prompt.parent, prompt.root_reason, request, body, marks=marks)
    begun |= desk.judge(session.session_id, request, declared, prompt.parent).columns
    begun["thread_id"] = begun["thread_id"] or _thread(begun, prompt.parent)
    if (begun["root_reason"], begun["kind"]) == ("first", "subagent"):
        begun["root_reason"] = "subagent"
    call = Call(desk, incoming, request, prompt, row=begun, body=body, marks=marks, declared=declared)
    call.start()
    return call


async def refuse(desk: Desk, incoming: Incoming, error: PolarError) -> None:
    """Record a request that is turned away before it is read."""
    row = first_row(desk.run_id, incoming, new_call_id(), time.time_ns())
    await _record_refusal(desk, row, error, incoming.body)


async def count(desk: Desk, incoming: Incoming) -> int:
    """The exact number of prompt tokens that a generation call with this body has. No sample, no row."""
    _, request = await _read(desk, incoming)
    return len((await prompt_of(desk, incoming.session, request)).ids)


async def _read(desk: Desk, incoming: Incoming) -> tuple[dict[str, Any], Conversation]:  # Any: JSON
    """The body with what the route adds to it, and the whole conversation that it asks to go on with."""
    body = parse_body(incoming.body) | dict(incoming.fields)
    request = incoming.dialect.decode(body, incoming.headers)
    return body, uncut(await desk.continued(incoming.session, request, instructed=bool(body.get("instructions"))))


def parse_body(body: bytes) -> dict[str, Any]:  # Any: JSON
    """The request body as a JSON object; raises BadRequest."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRequest(f"the request body is not a JSON object but {type(value).__name__}")
    return value


def uncut(request: Conversation) -> Conversation:
    """Without the reasoning of a reply that was cut off: the model begins that reply anew.

    Codex 0.171.0 keeps the items that were finished before a cut and posts again; a reasoning item alone is no turn.
    """
    messages = request.messages
    if len(messages) < 2 or messages[-1].role != "assistant":
        return request
    if not all(isinstance(part, Reasoning) for part in messages[-1].parts):
        return request
    return replace(request, messages=messages[:-1], fidelity=(*request.fidelity, "reasoning of a reply cut off"))


def _thread(row: Row, parent: Parent | None) -> str | None:
    """The thread of a call whose harness names none: its parent's, its own for a sub-agent's first; else the main."""
    if parent is not None:
        return parent.tip.thread
    return row["call_id"] if row["kind"] == "subagent" else None


async def _record_refusal(desk: Desk, row: Row, error: PolarError, body: bytes) -> None:
    begun = desk.journal.begin(row)
    await desk.journal.finish([begun | refused_row(error, body) | {"ended_ns": time.time_ns()}])


class Call:
    """One call: sampled by a task of its own, listened to by the gateway."""

    def __init__(
        self, desk: Desk, incoming: Incoming, request: Conversation, prompt: Prompt, *,
        row: Row, body: dict[str, Any], marks: Outline, declared: Verdict,
    ) -> None:  # Any: JSON  # fmt: skip
        self.request = request
        self._desk, self._incoming, self._prompt, self._rows = desk, incoming, prompt, [row]
        self._declared, self._outline = declared, marks
        self._left: int | None = None
        self._instructed = bool(body.get("instructions"))
        self._session_id = incoming.session.session_id
        self._reply_id = mint(desk.key, self._session_id, row["call_id"])
        self._asked = asked(self._session_id, incoming.dialect.name, body, self._outline, incoming.headers)
        self._ordinal = desk.ordinal(self._session_id)
        self._news: asyncio.Queue[News | None] = asyncio.Queue()
        self._choices: list[Choice] = []
        self._task: asyncio.Task[Answered] | None = None
        self._take: Take[News] = Take(self._asked, self._reply_id)
        self._delivered = False

    # -- for the gateway

    def start(self) -> None:
        """Begin sampling, or take the sample of an earlier request that this one repeats: that costs nothing more.

        Raises BudgetUsed.
        """
        retries, earlier = self._desk.retries, self._desk.retries.find(self._asked)
        if earlier is None:
            self._left = self._desk.usage.left(self._incoming.session)
            self._task = self._take.task = asyncio.create_task(self._sample())
            self._desk.running.add(self._task)
            self._task.add_done_callback(self._desk.running.discard)
            self._task.add_done_callback(self._settle)
            retries.run(self._take)
        else:
            self._take, self._task, self._reply_id = earlier, earlier.task, earlier.reply_id
        self._take.join(self._news)
        if self._rows[0]["kind"] == AGENT.kind and not self.request.tools and earlier is None:
            self._desk.await_evidence(self._session_id, self, len(self._incoming.body))

    def reconsider(self) -> None:
        """The session has shown more: judge the kind of this call again, and correct a row that is written."""
        verdict = self._desk.kinds.judge(self._session_id, self.request, self._declared, self._prompt.parent)
        for row in self._rows:
            row |= verdict.columns
        if verdict != AGENT and (answered := _answer(self._take.task)):
            self._amend(answered, verdict.columns)

    @property
    def call_id(self) -> str:
        """Of the call whose reply this is."""
        return self._reply_id[:CALL_ID_LENGTH]

    async def stream(self) -> AsyncGenerator[bytes]:
        """The streamed answer, pings included; the last item is the terminal event, or a terminal error."""
        encoder = self._incoming.dialect.encoder(self.request, self._reply_id)
        yield encoder.begin()
        try:
            async for news in self._listen():
                yield b"".join(encoder.delta(kind, text, choice) for kind, text, choice in news) or encoder.ping
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
        self._delivered = True
        self._take.leave(self._news)
        if answered := _answer(self._task):
            self._desk.retries.delivered(self._take, answered)
            self._amend(answered, {"client_delivered": True, "repeats": self._take.repeats})

    def leave(self) -> None:
        """The client is gone: when nobody else listens, stop sampling, or keep a sampled reply for its next try."""
        task = self._task
        if self._delivered or task is None or not self._take.leave(self._news):
            return
        if self._take.sampled or task.done():
            task.add_done_callback(self._keep)
        else:
            self._desk.retries.failed(self._take)
            task.cancel()

    def _keep(self, task: asyncio.Task[Answered]) -> None:
        if not self._take.listeners and (answered := _answer(task)):
            self._desk.retries.missed(self._take, answered)

    def _settle(self, task: asyncio.Task[Answered]) -> None:
        """Sampling ended."""
        self._take.heard.clear()  # the reply has it all
        if _answer(task):
            self._desk.retries.stop(self._take)
        else:
            self._desk.retries.failed(self._take)

    def _amend(self, answered: Answered, columns: Row) -> None:
        """Write the finished rows again, with what is known by now."""
        for row in answered.rows:
            row |= columns
        with suppress(JournalError):  # the row stands as undelivered; the next call is told that the journal is broken
            self._desk.journal.amend(answered.rows)

    # -- listening

    async def _listen(self) -> AsyncIterator[list[News]]:
        """Batches of news; an empty batch when there was none for too long."""
        open_ = True
        while open_:
            try:
                news = [await asyncio.wait_for(self._news.get(), _PING_SECONDS)]
            except TimeoutError:
                yield []
                continue
            while not self._news.empty():
                news.append(self._news.get_nowait())
            open_ = None not in news
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

    # -- sampling

    async def _sample(self) -> Answered:
        desk, begun = self._desk, self._rows[0]
        self._rows = [desk.journal.begin(begun | {"choice": i}) for i in range(self.request.sampling.choices)]
        self._choices = [self._choice(row) for row in self._rows]
        try:
            described = await desk.ready()
            check_fits(self._prompt.ids, described)
            compared = asyncio.ensure_future(self._compared())
            tell = self._take.tell if self.request.stream else None
            await _together([choice.sample(described, tell) for choice in self._choices])
            self._take.sampled = True
            return await self._record_replies(await compared)
        except PolarError as error:
            await self._record_end(error)
            raise
        except asyncio.CancelledError:
            await self._record_end(None)
            raise

    def _choice(self, row: Row) -> Choice:
        reply_id = mint(self._desk.key, self._session_id, row["call_id"], row["choice"])
        seed = f"{self._session_id}\0{self._ordinal}"
        most = None if self._left is None else max(1, self._left // self.request.sampling.choices)
        order = Order(self.request, self._prompt, seed, most, self._incoming.dialect.call_prefix)
        return Choice(self._desk, order, reply_id, row)

    async def _compared(self) -> Evidence:
        """What the prompt is compared with, while the engine samples."""
        audited = is_audited(self._rows[0]["call_id"], self._ordinal, len(self._prompt.ids))
        return await evidence(self._desk, self._prompt, self.request, audited=audited)

    # -- recording

    async def _record_replies(self, compared: Evidence) -> Answered:
        desk, request, parent = self._desk, self.request, self._prompt.parent
        first, *others = [await choice.reply() for choice in self._choices]
        reply = replace(first, others=tuple(others))
        known, start = (parent.messages, parent.tip.history_key) if parent else (0, b"")
        history = [start, *history_keys(request.messages[known:], start)][-1]
        rows = [
            choice.completed(said, history) | compared.columns | {"repeats": self._take.repeats}
            for choice, said in zip(self._choices, reply.choices, strict=True)
        ]
        rows[0]["answer"] = json.dumps(self._incoming.dialect.encode(request, reply))
        await desk.journal.finish(rows)
        for row in rows:
            desk.keep(row, self._outline, instructed=self._instructed)
        for said in reply.choices:
            desk.kinds.spawns(self._session_id, said.parts)
        return Answered(reply, rows)

    async def _record_end(self, error: PolarError | None) -> None:
        """The rows of a call that is not answered: failed where its own error struck, else aborted."""
        struck = [choice for choice in self._choices if choice.failed] or self._choices
        rows = [choice.cut_short(error if choice in struck else None) for choice in self._choices]
        with suppress(JournalError):  # a broken journal keeps the begin records: the call is found as lost
            await asyncio.shield(self._desk.journal.finish(rows))


async def _together(work: list[Coroutine[Any, Any, None]]) -> None:  # Any: what a coroutine exchanges with its loop
    """Run all of them; when one fails, or we are cancelled, end the others before its error goes on."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _answer(task: asyncio.Task[Answered] | None) -> Answered | None:
    """What a task that ended well gave."""
    ended = task is not None and task.done() and not task.cancelled() and task.exception() is None
    return task.result() if task is not None and ended else None
