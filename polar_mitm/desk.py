"""What the calls of one run share: engine, template, journal, parents, and the replies nobody received.

Invariant: tokenizer work runs off the event loop, one piece at a time; closing ends and records what is in flight.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from polar_mitm.conversation import Conversation, Reply
from polar_mitm.engine import PROBE, Description, Engine
from polar_mitm.errors import EngineUnavailable
from polar_mitm.identity import Fingerprints, Parent, RootReason, Session, Tip, Tips, load_key, read_pointer
from polar_mitm.journal import read_calls
from polar_mitm.rows import full_prompts
from polar_mitm.sampling import Sampling
from polar_mitm.tokens import Template

_MAX_UNDELIVERED = 1000
_LAST_WORDS_SECONDS = 0.2


class Recorder(Protocol):
    """What a turn needs of the journal."""

    def begin(self, row: dict[str, Any]) -> dict[str, Any]:  # Any: a row
        """Leave a trace of a call before the engine is called; returns the stamped row."""
        ...

    async def finish(self, rows: Sequence[dict[str, Any]]) -> None:  # Any: rows
        """Return once the rows are durable. Raises JournalError."""
        ...


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
        self._noting: set[asyncio.Task[None]] = set()
        self.ordinals: dict[str, int] = {}
        self._restored = False
        self._restoring = asyncio.Lock()
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

    async def find_parent(self, session: Session, request: Conversation) -> Parent | RootReason:
        """The call that a request continues; calls of an earlier process are reloaded when one is named."""
        named = [p for echo in request.echoes if (p := read_pointer(self.key, session.session_id, echo))]
        unknown = any(not self.tips.knows(session.session_id, *pointer) for pointer in named)
        if not self._restored and (unknown or (named == [] and any(m.role == "assistant" for m in request.messages))):
            await self._restore()
        return self.tips.find(session.session_id, request, named)

    async def _restore(self) -> None:
        """Take up the calls of earlier processes, once; requests that need them wait for it, the others do not."""
        async with self._restoring:
            if not self._restored:
                for session_id, tip in await asyncio.to_thread(earlier_tips, self.run):
                    self.tips.add(session_id, tip)
                self._restored = True

    def ordinal(self, session_id: str) -> int:
        """How many calls of this session came before."""
        self.ordinals[session_id] = self.ordinals.get(session_id, -1) + 1
        return self.ordinals[session_id]

    def keep_undelivered(self, digest: bytes, answered: Answered) -> None:
        """Keep a finished reply whose client left, for the same request's next try; the oldest of many go."""
        self.undelivered[digest] = answered
        while len(self.undelivered) > _MAX_UNDELIVERED:
            self.undelivered.popitem(last=False)

    def note(self, work: Coroutine[None, None, None]) -> None:
        """Do something that nobody waits for; `close` does."""
        task = asyncio.ensure_future(work)
        self._noting.add(task)
        task.add_done_callback(self._noting.discard)

    async def close(self) -> None:
        """End and record what is in flight, and leave its listeners the time to tell their clients."""
        ended = [*self.running]
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, *self._noting, return_exceptions=True)
        await asyncio.sleep(_LAST_WORDS_SECONDS if ended else 0)
        self._tokenizing.shutdown(wait=False)


def earlier_tips(run: Path) -> list[tuple[str, Tip]]:
    """The completed calls of a run's tables and journals, as (session id, tip)."""
    table = read_calls(run)
    prompts = full_prompts(table)
    names = ["session_id", "call_id", "choice", "status", "history_key", "tools_key"]
    outputs = table.column("output_ids").combine_chunks()
    tips: list[tuple[str, Tip]] = []
    for index, row in enumerate(table.select(names).to_pylist()):
        prompt = prompts.get((row["call_id"], row["choice"]))
        if row["status"] == "completed" and prompt is not None and row["history_key"]:
            output = outputs[index].values.to_numpy(zero_copy_only=False).astype(np.int32)
            tip = Tip(row["call_id"], row["choice"], prompt, output, row["history_key"], row["tools_key"])
            tips.append((row["session_id"], tip))
    return tips
