"""Who of a run's containers has run out of memory, as the engine tells it.

Invariant: one stream of events serves all containers of a run, and an engine that went away is listened to again as
soon as it is needed. It kills nothing.
"""

from __future__ import annotations

import asyncio

from polar_toolkit.rollout.sandbox import SandboxError
from polar_toolkit.rollout.sandbox.docker_engine import Engine


class OutOfMemory:
    """The news of all containers with a label."""

    def __init__(self, engine: Engine, label: str) -> None:
        self._engine = engine
        self._label = label
        self._exhausted: dict[str, asyncio.Event] = {}
        self._watching: asyncio.Task[None] | None = None

    async def watch(self) -> None:
        """Begin to listen, or again after the engine was gone. Raises SandboxError."""
        if self._watching is None or self._watching.done():
            listens: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._watching = asyncio.create_task(self._listen(listens))
            await listens

    async def exhausted(self, container: str) -> None:
        """Wait until the kernel had to kill in a container."""
        await self._of(container).wait()

    def forget(self, container: str) -> None:
        """Begin anew, or it is gone."""
        self._exhausted.pop(container, None)

    async def close(self) -> None:
        """Listen no more."""
        if self._watching:
            self._watching.cancel()
            await asyncio.wait({self._watching})

    async def _listen(self, listens: asyncio.Future[None]) -> None:
        try:
            async with self._engine.events(["oom"], self._label) as events:
                listens.set_result(None)
                async for event in events:
                    self._of(event["Actor"]["ID"]).set()
        except (SandboxError, ConnectionError) as error:  # the engine is gone: `watch` begins again
            if not listens.done():
                listens.set_exception(error)

    def _of(self, container: str) -> asyncio.Event:
        return self._exhausted.setdefault(container, asyncio.Event())
