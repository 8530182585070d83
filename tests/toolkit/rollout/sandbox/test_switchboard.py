"""The relay between a sandbox and the interceptor, with a small interceptor that answers as it is told."""

from __future__ import annotations

import asyncio
import base64
import resource
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from polar_toolkit.rollout.sandbox import Network, inside
from polar_toolkit.rollout.sandbox.switchboard import Switchboard
from tests.bench.netns import Namespace
from tests.toolkit.rollout.sandbox.test_names import query

NAME = "api.openai.com"
Conduct = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""What the interceptor does once it has granted a connection."""


class Interceptor:
    """Grants a CONNECT with the right credentials; what it was asked is in `asked`."""

    def __init__(self, conduct: Conduct, *, answer: bytes = b"HTTP/1.1 200 Connection established\r\n\r\n") -> None:
        self.asked: list[bytes] = []
        self._conduct = conduct
        self._answer = answer

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncGenerator[int]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            server.close_clients()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(self._answer)
        await self._conduct(reader, writer)
        writer.close()


class Sandbox:
    """Stands for one, in the network namespace of the test, where every address is local as it is in a sandbox."""

    def __init__(self, interceptor_port: int) -> None:
        *listeners, queries = inside.listeners()
        bundle = Path("bundle.pem")
        network = Network(("127.0.0.1", interceptor_port), "s1", "hush", (NAME, "*.example.com"), bundle, bundle)
        self.switchboard = Switchboard(network, listeners, queries)

    async def __aenter__(self) -> Sandbox:
        await self.switchboard.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.switchboard.close()

    async def look_up(self, name: str) -> str:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(asking, (inside.RESOLVER, 53))
            await loop.sock_sendall(asking, query(name))
            return socket.inet_ntoa((await loop.sock_recv(asking, 512))[-4:])

    async def connect(self, name: str = NAME, port: int = 443) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(await self.look_up(name), port)


@pytest.fixture(autouse=True)
def network() -> Generator[None]:
    with Namespace() as namespace, namespace.entered():
        yield


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


async def said(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """All that comes until the other side ends; nothing when it breaks off."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(("port", "name"), [(443, NAME), (80, NAME), (443, "a.example.com")])
def test_the_interceptor_learns_the_name_the_port_and_the_session(port: int, name: str):
    """A connection to the address of a name is asked for by that name, with the credentials of the session."""
    interceptor = Interceptor(echo)

    async def scene() -> bytes:
        async with interceptor.serving() as at, Sandbox(at) as sandbox:
            reader, writer = await sandbox.connect(name, port)
            writer.write(b"hello")
            writer.write_eof()
            return await said(reader, writer)

    assert asyncio.run(scene()) == b"hello"
    (asked,) = interceptor.asked
    assert asked.startswith(f"CONNECT {name}:{port} HTTP/1.1\r\n".encode())
    assert b"\r\nProxy-Authorization: Basic " + base64.b64encode(b"s1:hush") + b"\r\n" in asked


def test_what_follows_the_grant_at_once_is_not_lost():
    """The interceptor's first words may come in one piece with its answer."""
    interceptor = Interceptor(echo, answer=b"HTTP/1.1 200 OK\r\nVia: x\r\n\r\nwelcome")

    async def scene() -> bytes:
        async with interceptor.serving() as at, Sandbox(at) as sandbox:
            reader, writer = await sandbox.connect()
            writer.write_eof()
            return await said(reader, writer)

    assert asyncio.run(scene()) == b"welcome"


def test_an_end_is_passed_on_while_the_other_direction_goes_on():
    """A program that stops sending still gets its answer, and one that got all may go on sending."""
    got: list[bytes] = []

    async def conduct(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"asked: " + await reader.read())  # to the end of what is sent

    async def conduct_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"all of it")
        writer.write_eof()
        got.append(await reader.read())

    async def ask_then_hear() -> bytes:
        async with Interceptor(conduct).serving() as at, Sandbox(at) as sandbox:
            reader, writer = await sandbox.connect()
            writer.write(b"this")
            writer.write_eof()
            return await said(reader, writer)

    async def hear_then_say() -> bytes:
        async with Interceptor(conduct_first).serving() as at, Sandbox(at) as sandbox:
            reader, writer = await sandbox.connect()
            heard = await reader.read()
            writer.write(b"thanks")
            writer.write_eof()
            while not got:
                await asyncio.sleep(0)
            writer.close()
            return heard

    assert asyncio.run(ask_then_hear()) == b"asked: this"
    assert asyncio.run(hear_then_say()) == b"all of it"
    assert got == [b"thanks"]


@pytest.mark.parametrize("status", [b"407 Proxy Authentication Required", b"403 Forbidden", b"502 Bad Gateway"])
def test_a_refusal_ends_the_connection_at_once(status: bytes):
    """What the interceptor does not grant is a closed connection, and is asked for once."""
    interceptor = Interceptor(echo, answer=b"HTTP/1.1 " + status + b"\r\n\r\n")

    async def scene() -> float:
        async with interceptor.serving() as at, Sandbox(at) as sandbox:
            reader, writer = await sandbox.connect()
            began = time.monotonic()
            assert await said(reader, writer) == b""
            return time.monotonic() - began

    assert asyncio.run(scene()) < 1
    assert len(interceptor.asked) == 1


def test_an_interceptor_that_is_being_restarted_is_waited_for():
    """The program inside sees a slow connection, and no reset."""

    async def scene() -> bytes:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        async with Sandbox(port) as sandbox:
            reader, writer = await sandbox.connect()
            writer.write(b"hello")
            writer.write_eof()
            await asyncio.sleep(0.5)  # it is asked several times meanwhile
            assert not reader.at_eof()
            async with Interceptor(echo).serving(port):
                return await said(reader, writer)

    assert asyncio.run(scene()) == b"hello"


def test_an_address_that_nobody_looked_up_is_refused_and_counted():
    """A connection to a bare address leads nowhere, the interceptor hears nothing of it."""
    interceptor = Interceptor(echo)

    async def scene() -> Mapping[str, int]:
        async with interceptor.serving() as at, Sandbox(at) as sandbox:
            for _ in range(2):
                reader, writer = await asyncio.open_connection("203.0.113.9", 443)
                assert await said(reader, writer) == b""
            return sandbox.switchboard.refused

    assert asyncio.run(scene()) == {"203.0.113.9:443": 2}
    assert not interceptor.asked


def test_a_slow_reader_holds_the_other_side_back():
    """What is not read is not taken: the sender stands still long before a hundred megabytes are on their way."""
    sent = 0

    async def conduct(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.transport.set_write_buffer_limits(0)
        for _ in range(1600):
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1 << 16

    async def scene() -> int:
        async with Interceptor(conduct).serving() as at, Sandbox(at) as sandbox:
            address = await sandbox.look_up(NAME)
            with socket.socket() as slow:
                slow.setblocking(False)
                slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                await asyncio.get_running_loop().sock_connect(slow, (address, 443))
                stood = -1
                while stood != sent:  # until nothing has moved for a while
                    stood = sent
                    await asyncio.sleep(0.2)
            return stood

    assert 0 < asyncio.run(scene()) < 16 << 20


def test_more_connections_than_are_served_at_once_wait_for_their_turn():
    """The 257th is accepted when one of the others ends; none is refused."""
    interceptor = Interceptor(echo)

    async def scene() -> int:
        async with interceptor.serving() as at, Sandbox(at) as sandbox:
            held = [await sandbox.connect() for _ in range(300)]
            while len(interceptor.asked) < 256:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            at_once = len(interceptor.asked)
            for reader, writer in held:
                writer.write_eof()
                assert await said(reader, writer) == b""
            return at_once

    assert asyncio.run(scene()) == 256
    assert len(interceptor.asked) == 300


def test_closing_leaves_no_connection_and_no_descriptor():
    """Relays in any state are cut: open, being asked for, and not yet accepted."""

    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async def scene() -> None:
        async with Interceptor(silent).serving() as at, Sandbox(at) as sandbox:
            opened = [await sandbox.connect() for _ in range(3)]
            await asyncio.sleep(0.1)
            opened.append(await sandbox.connect())
            await sandbox.switchboard.close()
            await sandbox.switchboard.close()
            for reader, writer in opened:
                assert await said(reader, writer) == b""

    before = len([*Path("/proc/self/fd").iterdir()])
    asyncio.run(scene())
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_megabyte_costs_little():
    """Relaying takes less than 20 ms of CPU per megabyte, both ends in this process included."""
    size = 64 << 20

    async def conduct(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(size >> 16):
            writer.write(bytes(1 << 16))
            await writer.drain()

    async def scene() -> float:
        async with Interceptor(conduct).serving() as at, Sandbox(at) as sandbox:
            reader, writer = await sandbox.connect()
            before = resource.getrusage(resource.RUSAGE_SELF)
            received = 0
            while data := await reader.read(1 << 18):
                received += len(data)
            after = resource.getrusage(resource.RUSAGE_SELF)
            writer.close()
            assert received == size
            return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    per_megabyte = asyncio.run(scene()) / (size >> 20)
    print(f"\n{per_megabyte * 1000:.2f} ms of CPU per MB")
    assert per_megabyte < 0.02
