"""The relay of a container's network, run as it is run there, before a small interceptor that answers as it is told."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import ssl
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from typing import Any

import pytest

from polar_toolkit.rollout.sandbox import relay
from tests.toolkit.rollout.sandbox.test_names import query

NAME, OTHER = "api.openai.com", "elsewhere.example"
GRANTED = b"HTTP/1.1 200 Connection established\r\n\r\n"
REQUEST = b"GET / HTTP/1.1\r\nHost: %s\r\n\r\n"
Conduct = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""What the interceptor does once it has answered."""
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Place:
    """Where the relay listens, what it says, and what the interceptor was asked."""

    tls: int
    web: int
    names: int
    said: asyncio.StreamReader
    asked: list[bytes] = field(default_factory=list[bytes])

    async def line(self) -> str:
        return (await asyncio.wait_for(self.said.readline(), 20)).decode().strip()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


@asynccontextmanager
async def relayed(
    conduct: Conduct = echo, *, answer: bytes = GRANTED, within: str = "127.0.0.0/8"
) -> AsyncGenerator[Place]:
    """A relay while inside the block, and the interceptor that it leads to."""
    asked: list[bytes] = []

    async def interceptor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(answer)
            await conduct(reader, writer)

    server = await asyncio.start_server(interceptor, "127.0.0.1", 0)
    setting = {
        "proxy": server.sockets[0].getsockname(), "session": "s1", "secret": "hush", "names": [NAME],
        "within": within, "ports": {"443": 0, "80": 0, "53": 0},
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", relay.__file__, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "POLAR_RELAY": json.dumps(setting)},
    )  # fmt: skip
    assert process.stdout
    word, *ports = (await process.stdout.readline()).split()
    assert word == b"listening"
    try:
        tls, web, names = map(int, ports)
        yield Place(tls, web, names, process.stdout, asked)
    finally:
        process.kill()
        await process.communicate()
        server.close()


async def exchanged(port: int, sent: bytes, *, end: bool = False) -> bytes:
    """All that comes back; nothing when the relay breaks off."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with closing(writer):
        writer.write(sent)
        if end:
            writer.write_eof()
        try:
            return await asyncio.wait_for(reader.read(), 20)
        except ConnectionResetError:
            return b""


def hello(name: str | None, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> bytes:
    """The first bytes of a TLS client that asks for a name."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.maximum_version = newest
    outgoing = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def test_a_request_reaches_the_interceptor_as_the_session_s():
    """With the name from its head and the session's credentials; every byte is passed on, both ways."""

    async def scene() -> None:
        async with relayed() as place:
            sent = REQUEST % NAME.encode() + b"x" * 300_000
            assert await exchanged(place.web, sent, end=True) == sent
            credentials = base64.b64encode(b"s1:hush").decode()
            head = f"CONNECT {NAME}:80 HTTP/1.1\r\nHost: {NAME}:80\r\nProxy-Authorization: Basic {credentials}"
            assert place.asked == [f"{head}\r\n\r\n".encode()]

    asyncio.run(scene())


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_the_name_is_read_from_a_tls_hello(newest: ssl.TLSVersion):
    """Of each version, in any case, also when it comes byte by byte; and the hello is passed on whole."""

    async def scene() -> None:
        async with relayed() as place:
            sent = hello(NAME.upper(), newest)
            reader, writer = await asyncio.open_connection("127.0.0.1", place.tls)
            with closing(writer):
                for at in range(len(sent)):
                    writer.write(sent[at : at + 1])
                    await writer.drain()
                writer.write_eof()
                assert await reader.read() == sent
            assert place.asked[0].startswith(f"CONNECT {NAME}:443 ".encode())

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("kind", "sent", "wanted"),
    [
        ("tls", hello(OTHER), f"{OTHER}:443"),
        ("tls", hello(None), "(no name):443"),
        ("tls", REQUEST % NAME.encode(), "(no name):443"),
        ("web", REQUEST % OTHER.encode(), f"{OTHER}:80"),
        ("web", REQUEST % b"192.0.2.7:80", "192.0.2.7:80"),
        ("web", b"GET / HTTP/1.0\r\n\r\n", "(no name):80"),
        ("web", b"GET / HTTP/1.1\r\nHost: api.openai.com\r\nHost: elsewhere.example\r\n\r\n", "(no name):80"),
        ("web", b"\xff" * (1 << 17), "(no name):80"),
    ],
)  # fmt: skip
def test_another_name_or_none_is_refused(kind: str, sent: bytes, wanted: str):
    """The connection ends without an answer, it is said, and the interceptor hears nothing of it."""

    async def scene() -> None:
        async with relayed() as place:
            assert await exchanged(getattr(place, kind), sent) == b""
            assert await place.line() == f"refused {wanted}"
            assert place.asked == []

    asyncio.run(scene())


def test_a_connection_from_another_network_is_refused():
    """The relay stands in two networks, and serves one."""

    async def scene() -> None:
        async with relayed(within="198.18.0.0/29") as place:
            assert await exchanged(place.web, REQUEST % NAME.encode()) == b""
            assert await place.line() == "refused (no name):80"

    asyncio.run(scene())


def test_each_side_may_stop_sending_first():
    """An end is passed on, and what the other side still says comes through."""

    async def conduct(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        read = await reader.read()
        writer.write(str(len(read)).encode())

    async def scene() -> None:
        async with relayed(conduct) as place:
            sent = REQUEST % NAME.encode()
            assert await exchanged(place.web, sent, end=True) == str(len(sent)).encode()

    asyncio.run(scene())


def test_a_connection_that_the_interceptor_does_not_grant_is_closed():
    """At once, and its answer is not shown inside."""

    async def scene() -> None:
        async with relayed(answer=b"HTTP/1.1 403 Forbidden\r\n\r\nno") as place:
            assert await exchanged(place.web, REQUEST % NAME.encode()) == b""
            assert len(place.asked) == 1

    asyncio.run(scene())


def test_an_interceptor_that_is_being_restarted_is_asked_again():
    """It closed the first connection without a word."""
    tries: list[int] = []

    async def scene() -> None:
        async def interceptor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with closing(writer):
                tries.append(1)
                await reader.readuntil(b"\r\n\r\n")
                if len(tries) > 1:
                    writer.write(GRANTED + b"welcome")

        server = await asyncio.start_server(interceptor, "127.0.0.1", 0)
        made = relay.Relay(
            {"proxy": server.sockets[0].getsockname(), "session": "s", "secret": "s", "names": [NAME],
             "within": "127.0.0.0/8"}
        )  # fmt: skip
        async with served(lambda reader, writer: made.serve(reader, writer, 80)) as port:
            assert await exchanged(port, REQUEST % NAME.encode()) == b"welcome"
        server.close()

    asyncio.run(scene())


def test_no_name_exists_for_who_asks_the_relay():
    """The engine answers look-ups of allowed names, and hands on the others."""

    async def scene() -> None:
        async with relayed() as place:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
                asking.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(asking, ("127.0.0.1", place.names))
                await loop.sock_sendall(asking, b"no query")
                await loop.sock_sendall(asking, query(OTHER))
                answer = await asyncio.wait_for(loop.sock_recv(asking, 512), 20)
            assert answer[:2] == query(OTHER)[:2]
            assert answer[2] & 0x80
            assert answer[3] & 0xF == 3
            assert answer[4:12] == b"\0\1" + bytes(6)
            assert await place.line() == f"refused {OTHER}"

    asyncio.run(scene())


@asynccontextmanager
async def served(serve: Callable[..., Coroutine[Any, Any, None]]) -> AsyncGenerator[int]:
    """A port at which it serves while inside the block."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
