"""What the calls of one run share: engine, template, journal, parents, and the replies nobody received.

Invariant: tokenizer work runs off the event loop, one piece at a time; closing ends and records what is in flight.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from polar_mitm.conversation import Conversation, Message
from polar_mitm.earlier import earlier_calls
from polar_mitm.engine import PROBE, Description, Engine
from polar_mitm.errors import BadRequest, EngineUnavailable, NotFound
from polar_mitm.identity import Session, load_key, read_pointer
from polar_mitm.journal import Outline, sealed_sessions
from polar_mitm.kinds import Kinds, Verdict
from polar_mitm.retries import Answered, Retries
from polar_mitm.sampling import Sampling
from polar_mitm.shelf import Shelf
from polar_mitm.tips import Kept, Parent, Past, Place, RootReason, Tips
from polar_mitm.tokens import Template
from polar_mitm.usage import Recorder, Usage, Used

__all__ = ["Answered", "Desk", "Recorder"]

_LAST_WORDS_SECONDS = 0.2
_UNDECIDED_BYTES = 8 << 20  # of the bodies of calls whose kind may still change
_UNDECIDED_CALLS = 4  # of a session


class Undecided(Protocol):
    """A call whose kind depends on what its session shows later."""

    def reconsider(self) -> None:
        """Judge it again, and correct its row."""
        ...


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
        memory: int = 512 << 20,
        earlier: Mapping[str, Used] | None = None,
    ) -> None:
        """`wait`: seconds; `memory`: bytes that finished calls may take in memory, near enough; `earlier`: what the
        run's sessions used before this process."""
        self.run, self.run_id = run, run_id
        self.engine, self.template = engine, template
        self.journal = self.usage = Usage(journal, earlier)
        self.sampling, self.wait = sampling, wait
        self.key = load_key(run)
        self.tips = Tips(memory * 3 // 4)
        self.retries: Retries[Any] = Retries(memory // 4)  # Any: what a turn tells its listeners
        self.kinds = Kinds()
        self.described: Description | None = None
        self.running: set[asyncio.Task[Answered]] = set()
        self.ordinals: dict[str, int] = {}
        self._undecided: Shelf[str, tuple[tuple[Undecided, int], ...]] = Shelf(_UNDECIDED_BYTES)
        self._deleted: set[str] = set()
        self._unread: set[str] | None = None
        self._reading = asyncio.Lock()
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokens")
        self._tokenizer = Lock()  # fast tokenizers are not re-entrant

    async def tokens[T](self, work: Callable[..., T], *args: Any, quick: bool = False) -> T:  # Any: the work's own
        """Run tokenizer work, one piece at a time, off the event loop; quick work at once when nothing else runs."""
        if not quick or not self._tokenizer.acquire(blocking=False):
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, self._alone, work, *args)
        try:
            return work(*args)
        finally:
            self._tokenizer.release()

    def _alone[T](self, work: Callable[..., T], *args: Any) -> T:  # Any: the work's own arguments
        with self._tokenizer:
            return work(*args)

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

    # -- what a request continues

    async def find_parent(self, session: Session, request: Conversation) -> Parent | RootReason:
        """The call that a request continues; calls that are not in memory are read again when one may be meant."""
        session_id = session.session_id
        named = self._named(session_id, request)
        if any(self.tips.get(session_id, place) is None for place in named) or (
            not named and any(m.role == "assistant" for m in request.messages)
        ):
            await self._read_again(session_id)
        return self.tips.find(session_id, request, named)

    def past(self, session: Session, request: Conversation) -> Past:
        """What is known of the calls that a request without a parent comes from, once its parent was looked for."""
        return self.tips.past(session.session_id, request, self._named(session.session_id, request))

    def _named(self, session_id: str, request: Conversation) -> list[Place]:
        """The calls that the ids of a request name, in their order."""
        return [place for echo in request.echoes if (place := read_pointer(self.key, session_id, echo))]

    async def continued(self, session: Session, request: Conversation, *, instructed: bool) -> Conversation:
        """The request with the history and the reply of the answer that it names (`Conversation.continues`) in it.

        `instructed`: whether its first message are its own instructions, which stay first; those of the earlier
        request are not taken over. Raises BadRequest, in OpenAI's words, when there is no such answer.
        """
        if request.continues is None:
            return request
        place = await self._place(session.session_id, request.continues)
        history = self.tips.history(session.session_id, place) if place else None
        if history is None:
            raise BadRequest(
                f"Previous response with id {request.continues!r} not found.",
                field="previous_response_id",
                code="previous_response_not_found",
            )
        own = 1 if instructed else 0
        messages = _joined(history, request.messages[own:])
        echoes = (request.continues, *request.echoes)
        return replace(request, messages=request.messages[:own] + messages, echoes=echoes)

    async def answer(self, session: Session, response_id: str) -> dict[str, Any]:  # Any: JSON
        """The plain form of an earlier answer (Responses: GET /responses/ID). Raises NotFound."""
        place = await self._place(session.session_id, response_id)
        call = self.tips.get(session.session_id, place) if place else None
        if call is None or call.said is None or call.said.answer is None:
            raise NotFound(f"Response with id {response_id!r} not found.")
        return json.loads(call.said.answer)

    async def delete_answer(self, session: Session, response_id: str) -> dict[str, Any]:  # Any: JSON
        """Answer no more for an earlier answer, until this process ends; its row stays. Raises NotFound."""
        await self.answer(session, response_id)
        self._deleted.add(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    def keep(self, row: dict[str, Any], outline: Outline, *, instructed: bool) -> None:  # Any: a row
        """Make a completed call a possible parent. `instructed`: see `continued`."""
        self.tips.add(row["session_id"], Kept.of(row, outline, instructed=instructed))

    async def _place(self, session_id: str, response_id: str) -> Place | None:
        """The call that an answer's id names; None when it is not ours, or deleted."""
        place = read_pointer(self.key, session_id, response_id)
        if place is None or response_id in self._deleted:
            return None
        if self.tips.get(session_id, place) is None:
            await self._read_again(session_id)
        return place

    async def _read_again(self, session_id: str) -> None:
        """Take up the calls of a session that an earlier process recorded, or that were forgotten, once for each."""
        async with self._reading:
            if self._unread is None:
                self._unread = await asyncio.to_thread(sealed_sessions, self.run)
            if session_id in self._unread or session_id in self.tips.forgotten:
                for call in await asyncio.to_thread(earlier_calls, self.run, session_id):
                    self.tips.add(session_id, call)
                self._unread.discard(session_id)
                self.tips.forgotten.discard(session_id)

    # -- kinds

    def judge(self, session_id: str, request: Conversation, declared: Verdict, parent: Parent | None) -> Verdict:
        """What kind of call this is; the first call with tools of a session has the earlier ones judged again."""
        before = self.kinds.shows_tools(session_id)
        verdict = self.kinds.judge(session_id, request, declared, parent)
        if self.kinds.shows_tools(session_id) and not before:
            for call, _ in self._undecided.pop(session_id) or ():
                call.reconsider()
        return verdict

    def await_evidence(self, session_id: str, call: Undecided, size: int) -> None:
        """Have a call, of a body of `size` bytes, judged again once its session shows tools."""
        calls = ((*(self._undecided.get(session_id) or ()), (call, size)))[-_UNDECIDED_CALLS:]
        self._undecided.put(session_id, calls, sum(size for _, size in calls))

    def ordinal(self, session_id: str) -> int:
        """How many calls of this session came before."""
        self.ordinals[session_id] = self.ordinals.get(session_id, -1) + 1
        return self.ordinals[session_id]

    async def close(self) -> None:
        """End and record what is in flight, and leave its listeners the time to tell their clients."""
        ended = [*self.running]
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
        await asyncio.sleep(_LAST_WORDS_SECONDS if ended else 0)
        self._tokenizing.shutdown(wait=False)


def _joined(history: tuple[Message, ...], new: tuple[Message, ...]) -> tuple[Message, ...]:
    """Two histories as one; adjacent assistant messages are one."""
    if history and new and history[-1].role == new[0].role == "assistant":
        return (*history[:-1], Message("assistant", history[-1].parts + new[0].parts), *new[1:])
    return history + new
