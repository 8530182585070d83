"""The news of containers that ran out of memory, as an engine of ten lines tells it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from polar_toolkit.rollout.sandbox import SandboxError
from polar_toolkit.rollout.sandbox.out_of_memory import OutOfMemory


class Telling:
    """An engine that tells of containers by their names; "" ends the stream."""

    def __init__(self) -> None:
        self.news: asyncio.Queue[str] = asyncio.Queue()
        self.listened = 0
        self.gone = False

    @asynccontextmanager
    async def events(self, kinds: Sequence[str], label: str) -> AsyncGenerator[AsyncGenerator[dict[str, Any]]]:
        if self.gone:
            raise SandboxError("gone")
        assert (kinds, label) == (["oom"], "polar.run=1")
        self.listened += 1
        yield self._told()

    async def _told(self) -> AsyncGenerator[dict[str, Any]]:
        while name := await self.news.get():
            yield {"Actor": {"ID": name}}


def listening(engine: Telling) -> OutOfMemory:
    return OutOfMemory(engine, "polar.run=1")  # pyright: ignore[reportArgumentType]  # all it needs is `events`


def test_each_hears_of_itself_alone():
    """Over one stream, however many listen."""

    async def scene() -> tuple[bool, int]:
        engine = Telling()
        memory = listening(engine)
        await memory.watch()
        await memory.watch()
        one, other = (asyncio.create_task(memory.exhausted(name)) for name in ("one", "other"))
        await engine.news.put("one")
        await one
        heard = other.done()
        other.cancel()
        await memory.close()
        return heard, engine.listened

    assert asyncio.run(scene()) == (False, 1)


def test_what_was_forgotten_counts_no_more():
    """A container that goes on begins anew."""

    async def scene() -> bool:
        engine = Telling()
        memory = listening(engine)
        await memory.watch()
        await engine.news.put("one")
        await memory.exhausted("one")
        memory.forget("one")
        waiting = asyncio.create_task(memory.exhausted("one"))
        await asyncio.sleep(0)
        done = waiting.done()
        waiting.cancel()
        await memory.close()
        return done

    assert not asyncio.run(scene())


def test_an_engine_that_came_back_is_listened_to_again():
    """And one that is gone is an error for who wants to listen."""

    async def scene() -> int:
        engine = Telling()
        memory = listening(engine)
        await memory.watch()
        await engine.news.put("one")
        await engine.news.put("")
        await memory.exhausted("one")
        await asyncio.sleep(0)
        engine.gone = True
        with pytest.raises(SandboxError, match="gone"):
            await again(memory)
        engine.gone = False
        await memory.watch()
        await memory.close()
        return engine.listened

    assert asyncio.run(scene()) == 2


async def again(memory: OutOfMemory) -> None:
    """Until the end of the stream was seen."""
    for _ in range(10):
        await memory.watch()
        await asyncio.sleep(0)
