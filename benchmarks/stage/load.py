"""The load: keep-alive HTTP/1.1 connections, straight to the engine or through an intercepting proxy.

Invariant: every answer is read to its end and must be a 200. Bare asyncio, because the client shares the cores with
what is measured and httpx would cost more than the proxy.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.stage.processes import Process

Json = dict[str, Any]  # Any: request bodies


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered request; times in seconds since it was sent."""

    first: float
    """When the first piece that holds `marker` was there."""
    total: float
    body: bytes


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader, self._writer, self._host = reader, writer, host

    @classmethod
    async def straight(cls, server: Process) -> Client:
        """To a server without TLS."""
        return cls(*await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 26), "127.0.0.1")

    @classmethod
    async def through(cls, proxy: Process, host: str = "api.openai.com") -> Client:
        """To a provider, through an intercepting proxy whose certificates are trusted."""
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port, limit=1 << 26)
        writer.write(f"CONNECT {host}:443 HTTP/1.1\r\nhost: {host}:443\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise RuntimeError(f"CONNECT {host} was answered {head!r}")
        await writer.start_tls(ssl.create_default_context(cafile=str(proxy.ca)), server_hostname=host)
        return cls(reader, writer, host)

    async def post(self, path: str, body: Json, *, marker: bytes = b"") -> Answer:
        """POST and read the whole answer. Raises RuntimeError when it is not a 200."""
        return await self._ask("POST", path, json.dumps(body).encode(), marker)

    async def warm(self) -> None:
        """Ask for something small, so that the connection is open to its very end."""
        await self._ask("GET", "/v1/models", b"", b"")

    async def _ask(self, method: str, path: str, data: bytes, marker: bytes) -> Answer:
        head = f"{method} {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        began = time.perf_counter()
        self._writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        answered = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        first, pieces = 0.0, list[bytes]()
        async for piece in self._pieces(answered):
            if not first and marker in piece:
                first = time.perf_counter() - began
            pieces.append(piece)
        if " 200 " not in answered.split("\r\n", 1)[0]:
            raise RuntimeError(f"{path} was answered {answered!r} {b''.join(pieces)[:500]!r}")
        return Answer(first, time.perf_counter() - began, b"".join(pieces))

    async def _pieces(self, head: str) -> AsyncGenerator[bytes]:
        if "transfer-encoding: chunked" not in head:
            length = next(int(h[15:]) for h in head.split("\r\n") if h.startswith("content-length:"))
            yield await self._reader.readexactly(length)
            return
        while size := int(await self._reader.readline(), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readline()

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


async def together(
    parallel: int,
    calls: int,
    connect: Callable[[], Awaitable[Client]],
    post: Callable[[Client, int], Awaitable[Answer]],
) -> tuple[float, list[Answer]]:
    """`calls` requests over `parallel` connections that are open already; returns (seconds, answers)."""
    clients = await asyncio.gather(*(connect() for _ in range(parallel)))
    for client in clients:
        await client.warm()
    numbers = iter(range(calls))

    async def work(client: Client) -> list[Answer]:
        return [await post(client, number) for number in numbers]

    began = time.perf_counter()
    answers = await asyncio.gather(*(work(client) for client in clients))
    seconds = time.perf_counter() - began
    for client in clients:
        client.close()
    return seconds, [answer for some in answers for answer in some]
