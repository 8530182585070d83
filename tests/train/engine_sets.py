"""Embedded engines in threads of the test's process, real but for the habits a test gives them.

A habit is asked about each request before the engine is: it may answer, change the JSON, kill the engine, or wait.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn
from starlette.responses import JSONResponse

from polar_train.control import Engine as Control
from polar_train.serve import app
from polar_train.served import Engine

Habit = Callable[["Running", str, dict[str, Any]], "JSONResponse | dict[str, Any] | None"]
"""Of an engine, a path and the body: an answer, another body, or None to let the request pass. It may wait."""


@dataclass
class Running:
    """An engine that answers at `url`."""

    folder: Path
    habit: Habit | None
    url: str = ""
    paths: list[str] = field(default_factory=list)
    """What it was asked, in order."""
    server: Any = None

    def die(self) -> None:
        """Close every connection without another answer, and listen no more."""
        self.server.should_exit = self.server.force_exit = True

    def generate(self, ids: list[int], **sampling: Any) -> Any:
        """The JSON of a /generate call, with logprobs."""
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
        return httpx.post(f"{self.url}/generate", json=body, timeout=60, trust_env=False).json()

    def held(self) -> Any:
        """Version, folder and checksums of its weights."""
        control = Control(self.url)
        try:
            return control.held()
        finally:
            control.close()

    def logprobs(self, ids: np.ndarray) -> np.ndarray:
        """Those that it gives to a prompt."""
        control = Control(self.url)
        try:
            return control.logprobs(ids)
        finally:
            control.close()


@contextmanager
def running(folder: Path, habit: Habit | None = None) -> Iterator[Running]:
    """An embedded engine that serves `folder`; it has ended when the context does."""
    engine, told = Engine(folder, incremental=True), Running(folder, habit)
    listener = socket.create_server(("127.0.0.1", 0))
    told.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    told.server = uvicorn.Server(uvicorn.Config(_wayward(app(engine), told), log_level="critical"))
    thread = threading.Thread(target=told.server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield told
    finally:
        engine.scheduler.resume()
        told.server.should_exit = True
        thread.join()
        listener.close()
        engine.close()


def _wayward(inner: Any, told: Running) -> Callable[..., Awaitable[None]]:
    """The engine's application behind its habit."""

    async def asked(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await inner(scope, receive, send)
        told.paths.append(scope["path"])
        message = await receive()
        body = json.loads(message["body"] or b"{}")
        decision = await asyncio.to_thread(told.habit, told, scope["path"], body) if told.habit else None
        if told.server.force_exit:  # uvicorn looks every 0.1 s, in which a push of a tiny model can be through
            for connection in told.server.server_state.connections:
                connection.transport.abort()
            return
        if isinstance(decision, JSONResponse):
            return await decision(scope, receive, send)
        raw = json.dumps(body if decision is None else decision).encode()
        messages = [{"type": "http.request", "body": raw, "more_body": False}]

        async def again() -> Any:
            return messages.pop() if messages else await receive()

        return await inner(scope, again, send)

    return asked
