"""The whole path of a call: decode, find the parent, make the prompt, sample, read, record, answer.

Invariant: nothing that completes a tool call and no terminal event is given out before the finished call is durable,
and every call that reached the engine ends as a row. This module knows neither mitmproxy nor HTTP.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

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
    message_json,
    part_json,
    tools_key,
)
from polar_mitm.engine import PROBE, Description, Engine, Sample, Span
from polar_mitm.errors import BadRequest, ContextOverflow, EngineError, EngineUnavailable, JournalError, PolarError
from polar_mitm.identity import (
    Fingerprints,
    Parent,
    RootReason,
    Session,
    Tip,
    Tips,
    load_key,
    mint,
    new_call_id,
    read_pointer,
)
from polar_mitm.journal import read_calls, shrink
from polar_mitm.rows import full_prompts, token_hash
from polar_mitm.sampling import Sampling
from polar_mitm.tokens import Reading, Template, Tokens
from polar_mitm.wire import Dialect

_FLUSH_SECONDS = 0.05
_PING_SECONDS = 10.0


class Recorder(Protocol):
    """What a turn needs of the journal."""

    def begin(self, row: dict[str, Any]) -> dict[str, Any]:  # Any: a row
        """Leave a trace of a call before the engine is called; returns the stamped row."""
        ...

    async def finish(self, rows: Sequence[dict[str, Any]]) -> None:  # Any: rows
        """Return once the rows are durable. Raises JournalError."""
        ...


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request as the gateway hands it over: its session is known, its credentials are gone."""

    dialect: Dialect
    session: Session
    host: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes
    """Decompressed."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A finished call: its reply and the row that is on disk."""

    reply: Reply
    row: dict[str, Any]  # Any: a row


class Desk:
    """What the calls of one run share."""

    def __init__(
        self,
        run: Path,
        run_id: str,
        *,
        engine: Engine,
        template: Template,
        journal: Recorder,
        sampling: Sampling,
        wait: float,
    ) -> None:
        self.run, self.run_id = run, run_id
        self.engine, self.template, self.journal = engine, template, journal
        self.sampling, self.wait = sampling, wait
        self.key = load_key(run)
        self.tips = Tips()
        self.fingerprints = Fingerprints()
        self.described: Description | None = None
        self.undelivered: OrderedDict[bytes, Answered] = OrderedDict()
        self.running: set[asyncio.Task[Answered]] = set()
        self.noting: set[asyncio.Task[None]] = set()
        self.ordinals: dict[str, int] = {}
        self._restored = False
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokens")  # fast tokenizers are not re-entrant

    async def tokens[T](self, work: Callable[..., T], *args: Any) -> T:  # Any: the work's own arguments
        """Run tokenizer work off the event loop, one piece at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work, *args)

    async def ready(self) -> Description:
        """The engine's description, once its tokenizer was seen to agree with ours. Waits up to `wait` seconds."""
        deadline = time.monotonic() + self.wait
        while self.described is None:
            try:
                described = await self.engine.describe()
                from_probe = await self.tokens(self.template.encode, PROBE)
                await self.engine.check_tokenizer(from_probe, self.template.vocabulary)
                self.described = described
            except EngineUnavailable:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(min(0.5, self.wait / 10))
        return self.described

    def find_parent(self, session: Session, request: Conversation) -> Parent | RootReason:
        """The call that a request continues; calls of an earlier process are reloaded when one is named."""
        named = [p for echo in request.echoes if (p := read_pointer(self.key, session.session_id, echo))]
        unknown = any(not self.tips.knows(session.session_id, *pointer) for pointer in named)
        if not self._restored and (unknown or (named == [] and any(m.role == "assistant" for m in request.messages))):
            self._restored = True
            restore_tips(self.run, self.tips)
        return self.tips.find(session.session_id, request, named)

    def ordinal(self, session_id: str) -> int:
        """How many calls of this session came before."""
        self.ordinals[session_id] = self.ordinals.get(session_id, -1) + 1
        return self.ordinals[session_id]

    async def close(self) -> None:
        """End and record what is in flight."""
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, *self.noting, return_exceptions=True)
        self._tokenizing.shutdown(wait=False)


def restore_tips(run: Path, tips: Tips) -> None:
    """Make the completed calls of a run's tables and journals available as parents."""
    table = read_calls(run)
    prompts = full_prompts(table)
    names = ["session_id", "call_id", "choice", "status", "history_key", "tools_key"]
    rows = table.select(names).to_pylist()
    outputs = table.column("output_ids").combine_chunks()
    for index, row in enumerate(rows):
        prompt = prompts.get((row["call_id"], row["choice"]))
        if row["status"] == "completed" and prompt is not None and row["history_key"]:
            output = outputs[index].values.to_numpy(zero_copy_only=False).astype(np.int32)
            tip = Tip(row["call_id"], row["choice"], prompt, output, row["history_key"], row["tools_key"])
            tips.add(row["session_id"], tip)


async def open_call(desk: Desk, incoming: Incoming) -> Call:
    """Decode a request and start sampling its answer. Raises PolarError, already recorded, when it cannot begin."""
    call_id = new_call_id()
    row = _first_row(desk, incoming, call_id)
    row["kind"] = desk.fingerprints.kind(incoming.session.session_id, incoming.headers)
    try:
        body = parse_body(incoming.body)
        request = incoming.dialect.decode(body, incoming.headers)
        row |= _request_row(desk, request)
        call = await _prepare(desk, incoming, request, body, row)
    except PolarError as error:
        await _record_refusal(desk, row, error, incoming.body)
        raise
    call.start()
    return call


async def refuse(desk: Desk, incoming: Incoming, error: PolarError) -> None:
    """Record a request that is turned away before it is read."""
    await _record_refusal(desk, _first_row(desk, incoming, new_call_id()), error, incoming.body)


async def _record_refusal(desk: Desk, row: dict[str, Any], error: PolarError, body: bytes) -> None:  # Any: a row
    request = json.dumps(body.decode("utf-8", "replace"))
    refused = {"status": "refused", "untrainable_reason": "failed", "error_kind": error.kind, "error": str(error)}
    begun = desk.journal.begin(row | {"request": request})
    await desk.journal.finish([begun | refused | {"ended_ns": time.time_ns()}])


def parse_body(body: bytes) -> dict[str, Any]:  # Any: JSON
    """The request body as a JSON object; raises BadRequest."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRequest(f"the request body is not a JSON object but {type(value).__name__}")
    return value


async def _prepare(
    desk: Desk,
    incoming: Incoming,
    request: Conversation,
    body: dict[str, Any],
    row: dict[str, Any],  # Any: JSON, a row
) -> Call:
    session_id = incoming.session.session_id
    digest = blake2b(
        json.dumps([session_id, incoming.dialect.name, {k: v for k, v in body.items() if k != "stream"}]).encode()
    ).digest()
    found = desk.find_parent(incoming.session, request)
    prompt: Tokens | None = None
    if isinstance(found, Parent):
        tip = found.tip
        prompt = await desk.tokens(
            desk.template.bridge, tip.prompt_ids, tip.output_ids, request.messages, found.messages, request.tools
        )
    root: RootReason | None = "bridge_refused" if isinstance(found, Parent) else found
    if prompt is not None and isinstance(found, Parent):
        root, parent = None, found
    else:
        parent = None
        prompt = await desk.tokens(desk.template.render, request.messages, request.tools)
    row |= _prompt_row(prompt, parent, root, request, body)
    call = Call(desk, incoming, request, prompt=prompt, parent=parent, row=row, body=body, digest=digest)
    if desk.described:
        call.check_fits(desk.described)
    return call


class Call:
    """One call: sampled by a task of its own, listened to by the gateway."""

    def __init__(
        self,
        desk: Desk,
        incoming: Incoming,
        request: Conversation,
        *,
        prompt: Tokens,
        parent: Parent | None,
        row: dict[str, Any],  # Any: a row
        body: dict[str, Any],  # Any: JSON
        digest: bytes,
    ) -> None:
        self.request = request
        self._desk, self._incoming, self._prompt, self._parent = desk, incoming, prompt, parent
        self._row, self._body, self._digest = row, body, digest
        self._call_id: str = row["call_id"]
        self._reply_id = mint(desk.key, incoming.session.session_id, self._call_id)
        self._news: asyncio.Queue[tuple[str, str] | None] = asyncio.Queue()
        self._reading = Reading(desk.template, prompt, request.tools)
        self._logprobs: list[np.ndarray[Any, np.dtype[np.float32]]] = []
        self._spans: list[Span] = []
        self._mixed = self._delivered = False
        self._finish: dict[str, Any] | None = None  # Any: JSON
        self._cached = 0
        self._ordinal = desk.ordinal(incoming.session.session_id)
        self._first_ns: int | None = None
        self._task: asyncio.Task[Answered] | None = None

    # -- for the gateway

    def start(self) -> None:
        """Begin sampling, or take the reply that an earlier connection did not live to receive."""
        earlier = self._desk.undelivered.pop(self._digest, None)
        if earlier is not None:
            self._reply_id = earlier.reply.id
        work = self._sample() if earlier is None else _given(earlier)
        self._task = asyncio.create_task(work)
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
        note = asyncio.create_task(self._note(self._task.result().row | {"client_delivered": True}))
        self._desk.noting.add(note)
        note.add_done_callback(self._desk.noting.discard)

    def leave(self) -> None:
        """The client is gone: stop sampling, or keep a finished reply for its next try."""
        task = self._task
        if self._delivered or task is None:
            return
        if not task.done():
            task.cancel()
        elif not task.cancelled() and task.exception() is None:
            self._desk.undelivered[self._digest] = task.result()
            while len(self._desk.undelivered) > 1000:
                self._desk.undelivered.popitem(last=False)

    def check_fits(self, described: Description) -> None:
        """Raises ContextOverflow when no token could be sampled after this prompt."""
        if len(self._prompt) >= described.context:
            raise ContextOverflow(len(self._prompt), described.context)

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
        assert self._task is not None
        return await asyncio.shield(self._task)

    async def _note(self, row: dict[str, Any]) -> None:  # Any: a row
        with suppress(JournalError):  # the row stands as undelivered; the next call is told that the journal is broken
            await self._desk.journal.finish([row])

    # -- sampling

    async def _sample(self) -> Answered:
        desk = self._desk
        self._row = desk.journal.begin(self._row)
        audit = None
        try:
            self.check_fits(await desk.ready())
            if self._parent is not None:
                audit = asyncio.ensure_future(self._rerendered())
            async with aclosing(self._resumed()) as samples:
                async for sample in samples:
                    self._take(sample)
                    for news in await desk.tokens(self._reading.push, sample.ids):
                        self._news.put_nowait(news)
            return await self._record_reply(await audit if audit else None)
        except PolarError as error:
            await self._record_end("failed", error)
            raise
        except asyncio.CancelledError:
            await self._record_end("aborted", None)
            raise

    async def _resumed(self) -> AsyncGenerator[Sample]:
        """Samples of the engine; goes on from what is there when a weight update or a restart cut it short."""
        desk, applied = self._desk, dict(self._applied)
        budget, deadline = int(applied["max_new_tokens"]), time.monotonic() + desk.wait
        while True:
            done = self._reading.output_ids
            rid = new_call_id() + new_call_id()[:12]
            applied["max_new_tokens"] = budget - len(done)
            try:
                async with aclosing(desk.engine.generate(np.concatenate([self._prompt, done]), applied, rid)) as pieces:
                    async for sample in pieces:
                        deadline = time.monotonic() + desk.wait
                        yield _shifted(sample, len(done))
                        if sample.finish and sample.finish.get("type") != "abort":
                            return
                reason = EngineError("the engine aborted the generation")
            except EngineUnavailable as error:
                reason = error
            finally:
                if self._finish is None or self._finish.get("type") == "abort":
                    await asyncio.shield(desk.engine.abort(rid))
            constrained = "json_schema" in applied
            if time.monotonic() > deadline or (constrained and len(self._reading.output_ids)):
                raise reason
            await asyncio.sleep(min(0.2, desk.wait / 10))

    @property
    def _applied(self) -> dict[str, Any]:  # Any: JSON
        room = self._desk.described.context - len(self._prompt) if self._desk.described else 1
        seed = f"{self._incoming.session.session_id}\0{self._ordinal}"
        return self._desk.sampling.applied(self.request.sampling, room, self._desk.template.stop_ids, seed)

    def _take(self, sample: Sample) -> None:
        if len(sample.ids) and self._first_ns is None:
            self._first_ns = time.time_ns()
        self._logprobs.append(sample.logprobs)
        self._cached = max(self._cached, sample.cached_tokens)
        if sample.finish is not None:
            self._finish = sample.finish
            self._spans += sample.versions
            self._mixed |= len({span.version for span in sample.versions}) > 1

    async def _rerendered(self) -> Tokens | None:
        """What a plain re-render of the harness's history gives; made while the engine samples."""
        try:
            return await self._desk.tokens(self._desk.template.render, self.request.messages, self.request.tools)
        except BadRequest:
            return None  # the template refuses the history that the bridge could extend

    # -- recording

    async def _record_reply(self, rendered: Tokens | None) -> Answered:
        desk = self._desk
        parts = self._minted(await desk.tokens(self._reading.finish))
        output = self._reading.output_ids
        finish = _finish(self._finish, parts)
        reply = Reply(self._reply_id, parts, finish, self._usage(output, parts))
        history = history_keys(self.request.messages)
        key = extend_key(history[-1] if history else b"", reply.message)
        reason = desk.sampling.untrainable(self.request.sampling) or ("mixed_kv" if self._mixed else None)
        if self._row["kind"] == "foreign":
            reason = "foreign"
        row = (
            self._row
            | self._sampled_row()
            | {
                "status": "completed",
                "trainable": reason is None,
                "untrainable_reason": reason,
                "finish": finish,
                "history_key": key,
                "rerender_shared": None if rendered is None else shared_prefix(rendered, self._prompt),
                "reply": json.dumps([part_json(p) for p in parts]),
                "answer": json.dumps(self._incoming.dialect.encode(self.request, reply)),
            }
        )
        await desk.journal.finish([row])
        tip = Tip(self._call_id, 0, self._prompt, output, key, tools_key(self.request.tools), self._body)
        desk.tips.add(self._incoming.session.session_id, tip)
        return Answered(reply, row)

    async def _record_end(self, status: str, error: PolarError | None) -> None:
        row = self._row | self._sampled_row() | {"status": status, "trainable": False, "untrainable_reason": status}
        if error is not None:
            row |= {"error_kind": error.kind, "error": str(error)}
        if error is None or error.kind != "journal_error":
            await asyncio.shield(self._desk.journal.finish([row]))

    def _sampled_row(self) -> dict[str, Any]:  # Any: a row
        output = self._reading.output_ids
        logprobs = np.concatenate(self._logprobs) if self._logprobs else np.empty(0, np.float32)
        applied = self._applied if self._desk.described else {}
        return {
            "output_ids": output,
            "logprobs": logprobs,
            "versions": [asdict(span) for span in self._spans],
            "temperature": applied.get("temperature"),
            "sampling_applied": json.dumps(applied),
            "engine_finish": json.dumps(self._finish) if self._finish else None,
            "cached_tokens": self._cached,
            "client_delivered": False,
            "first_token_ns": self._first_ns,
            "ended_ns": time.time_ns(),
        }

    def _minted(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """Give the tool calls the ids that the harness must echo."""
        prefix = "toolu_" if self._incoming.dialect.name == "anthropic" else "call_"
        return tuple(
            replace(part, id=f"{prefix}{self._reply_id}{index:02x}") if isinstance(part, ToolCall) else part
            for index, part in enumerate(parts)
        )

    def _usage(self, output: Tokens, parts: tuple[Part, ...]) -> Usage:
        reasoning = "".join(p.text for p in parts if isinstance(p, Reasoning))
        spent = len(self._desk.template.encode(reasoning)) if reasoning else 0
        return Usage(len(self._prompt), self._cached, len(output), min(spent, len(output)))


async def _given(answered: Answered) -> Answered:
    return answered


def _shifted(sample: Sample, offset: int) -> Sample:
    """A sample of a resumed generation, its spans counted from the beginning of the whole output."""
    spans = tuple(Span(s.start + offset, s.end + offset, s.version) for s in sample.versions)
    return replace(sample, versions=spans)


def _finish(engine: dict[str, Any] | None, parts: tuple[Part, ...]) -> Finish:  # Any: JSON
    if engine is not None and engine.get("type") == "length":
        return "length"
    return "tool_calls" if any(isinstance(p, ToolCall) for p in parts) else "stop"


def shared_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens two sequences share."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


# --- rows ---------------------------------------------------------------------------------------------------------


def _first_row(desk: Desk, incoming: Incoming, call_id: str) -> dict[str, Any]:  # Any: a row
    return {
        "run_id": desk.run_id,
        "call_id": call_id,
        "choice": 0,
        "session_id": incoming.session.session_id,
        "group_id": incoming.session.group_id,
        "dialect": incoming.dialect.name,
        "host": incoming.host,
        "path": incoming.path,
        "user_agent": incoming.headers.get("user-agent"),
        "began_ns": time.time_ns(),
    }


def _request_row(desk: Desk, request: Conversation) -> dict[str, Any]:  # Any: a row
    return {
        "model": request.model,
        "stream": request.stream,
        "thread_id": request.thread,
        "sampling_asked": json.dumps(asdict(request.sampling)),
        "fidelity": list(request.fidelity),
        "tools_key": tools_key(request.tools),
    }


def _prompt_row(
    prompt: Tokens, parent: Parent | None, root: RootReason | None, request: Conversation, body: dict[str, Any]
) -> dict[str, Any]:  # Any: JSON, a row
    shared = parent.tip.tokens if parent else 0
    known = parent.messages if parent else 0
    return {
        "parent_call_id": parent.tip.call_id if parent else None,
        "parent_choice": parent.tip.choice if parent else None,
        "parent_evidence": parent.evidence if parent else None,
        "root_reason": root,
        "prompt_len": len(prompt),
        "prompt_shared": shared,
        "prompt_suffix": prompt[shared:],
        "prompt_hash": token_hash(prompt),
        "messages": json.dumps([message_json(m) for m in request.messages[known:]]),
        "tools": None if parent else json.dumps([asdict(t) for t in request.tools]),
        "request": json.dumps(shrink(body, parent.tip.body if parent else None)),
    }
