"""What the gateway needs of ASGI and uvicorn: bodies in, JSON out, work that ends when the client leaves, a server.

Invariant: a body larger than the bound is never held. It knows no protocol and no session.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping
from typing import Any

import uvicorn

from polar_mitm.compression import check_size

Scope = MutableMapping[str, Any]  # Any: ASGI's own message values
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]


class Gone(Exception):
    """The client left before its request was whole."""


async def read_body(receive: Receive) -> bytes:
    """The whole request body. Raises Gone, or TooLarge as soon as it is."""
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        check_size(size)
        if not message.get("more_body"):
            return b"".join(chunks)


async def send_json(send: Send, status: int, value: dict[str, Any]) -> None:  # Any: JSON
    """A whole answer."""
    body = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def until_gone(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run `work`, cancelled as soon as the client disconnects. Raises what it raises."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(receive())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for pending in (task, gone):
            pending.cancel()
    with contextlib.suppress(asyncio.CancelledError):  # the client left; a call's own task records that
        await task


class Server(uvicorn.Server):
    """uvicorn inside somebody else's event loop: it leaves the signals alone, and is idle when nobody calls."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopped = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Signals belong to the process."""
        yield

    async def main_loop(self) -> None:
        """Wait for the end, where uvicorn would wake ten times a second to look for it."""
        await self._stopped.wait()

    def stop(self) -> None:
        """End serving without waiting for open connections."""
        self.should_exit = self.force_exit = True
        self._stopped.set()


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, so that the port is known before the server runs."""
    listener = socket.create_server((host, port), backlog=512)
    # asyncio sets it only where the protocol is named, which `create_server` does not do: a delta waited up to 40 ms
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def server(app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> Server:
    """A server for the app; run it with `serve(sockets=[...])`."""
    return Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            date_header=False,  # a matter of `main_loop`
            server_header=False,
            timeout_keep_alive=3600,
        )
    )
