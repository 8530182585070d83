"""A sandbox's only way out: its connections, led to the interceptor with the credentials of its session.

Invariant: the credentials stay outside of the sandbox, and the name of a destination is the one that was looked up, so
nothing that happens inside can be taken for another session or another host. Memory is bounded: what one side does not
read is not taken from the other. It looks into no connection and speaks to nobody but the one interceptor.

The listening sockets were made inside the sandbox's network, where every address is local: what a connection's own
address is, is where the program inside meant to go.
"""

from __future__ import annotations

import asyncio
import base64
import socket
from collections import Counter
from collections.abc import Sequence

from polar_toolkit.rollout.sandbox import Network
from polar_toolkit.rollout.sandbox.inside import PORTS as PORTS  # the sandbox listens on them, we accept
from polar_toolkit.rollout.sandbox.names import Names

_PIECE = 1 << 16
"""Bytes; of one direction of one connection, the most that is held here."""
_MOST_CONNECTIONS = 256
"""At once and of one sandbox; more wait to be accepted."""
_RETRY_S = 20.0
"""How long an interceptor that does not answer is asked again: it is being restarted on the same port."""
_PAUSE_S = 0.1
_LINGER_S = 10.0
"""What a program inside may still send after the interceptor has said its last word."""
_LONGEST_HEAD = 16384


class Switchboard:
    """The relay and the name service of one sandbox."""

    def __init__(self, network: Network, listeners: Sequence[socket.socket], names: socket.socket) -> None:
        """Takes over listening TCP sockets and a bound UDP socket."""
        self._network = network
        self._listeners = tuple(listeners)
        self._queries = names
        self._names = Names(network.names)
        self._relays: set[asyncio.Task[None]] = set()
        self._full = self._closed = False

    @property
    def refused(self) -> Counter[str]:
        """Names that were asked for and not answered, and destinations (ADDRESS:PORT) that nobody looked up."""
        return self._names.refused

    async def start(self) -> None:
        """Answer from now on."""
        self._queries.setblocking(False)
        asyncio.get_running_loop().add_reader(self._queries, self._answer)
        for listener in self._listeners:
            listener.setblocking(False)
        self._listen()

    async def close(self) -> None:
        """Cut every connection and let go of the sockets. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._ignore()
        asyncio.get_running_loop().remove_reader(self._queries)
        for task in self._relays:
            task.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)
        self._relays.clear()
        for each in (*self._listeners, self._queries):
            each.close()

    def _listen(self) -> None:
        for listener in () if self._closed else self._listeners:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _ignore(self) -> None:
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)

    def _answer(self) -> None:
        try:
            query, sender = self._queries.recvfrom(_PIECE)
            answer = self._names.answer(query)
            if answer:
                self._queries.sendto(answer, sender)
        except OSError:  # no query, or the asker is gone, or it reads nothing: it asks again
            return

    def _accept(self, listener: socket.socket) -> None:
        try:
            inner, _ = listener.accept()
        except BlockingIOError:  # gone again
            return
        except OSError:  # no descriptor left, most likely: leave it waiting for a moment
            self._ignore()
            asyncio.get_running_loop().call_later(_PAUSE_S, self._listen)
            return
        task = asyncio.get_running_loop().create_task(self._serve(inner))
        self._relays.add(task)
        task.add_done_callback(self._ended)
        if len(self._relays) >= _MOST_CONNECTIONS:
            self._full = True
            self._ignore()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._relays.discard(task)
        if self._full and len(self._relays) < _MOST_CONNECTIONS:
            self._full = False
            self._listen()

    async def _serve(self, inner: socket.socket) -> None:
        with inner:
            inner.setblocking(False)
            address, port = inner.getsockname()[:2]
            name = self._names.name_at(address)
            if name is None:
                return self._names.refuse(f"{address}:{port}")
            try:
                outer, rest = await self._connect(f"{name}:{port}")
            except OSError:  # the interceptor is down or does not want it: for the program inside, a closed connection
                return None
            with outer:
                await _relay(inner, outer, rest)

    async def _connect(self, destination: str) -> tuple[socket.socket, bytes]:
        """A connection on which the destination was asked for and granted, and what came after that already.

        Raises OSError. As long as the interceptor says nothing at all it is asked again, which is seen by nobody: of
        the program inside nothing was sent yet.
        """
        deadline = asyncio.get_running_loop().time() + _RETRY_S
        while True:
            outer = socket.socket(socket.AF_INET6 if ":" in self._network.proxy[0] else socket.AF_INET)
            try:
                outer.setblocking(False)
                async with asyncio.timeout_at(deadline):
                    head, rest = await self._ask(outer, destination)
            except OSError:  # TimeoutError is one
                outer.close()
                if asyncio.get_running_loop().time() >= deadline:
                    raise
                await asyncio.sleep(_PAUSE_S)
                continue
            except BaseException:  # cancelled: the socket must not outlive us
                outer.close()
                raise
            if head.split(b" ", 2)[1:2] == [b"200"]:
                return outer, rest
            outer.close()
            raise ConnectionRefusedError(f"the interceptor does not lead to {destination}")

    async def _ask(self, outer: socket.socket, destination: str) -> tuple[bytes, bytes]:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(outer, self._network.proxy)
        credentials = base64.b64encode(f"{self._network.session}:{self._network.secret}".encode()).decode()
        request = f"CONNECT {destination} HTTP/1.1\r\nHost: {destination}\r\nProxy-Authorization: Basic {credentials}"
        await loop.sock_sendall(outer, f"{request}\r\n\r\n".encode())
        answer = b""
        while b"\r\n\r\n" not in answer:
            piece = await loop.sock_recv(outer, _PIECE)
            if not piece or len(answer) > _LONGEST_HEAD:
                raise ConnectionResetError("the interceptor ended before it answered")
            answer += piece
        head, _, rest = answer.partition(b"\r\n\r\n")
        return head, rest


async def _relay(inner: socket.socket, outer: socket.socket, first: bytes) -> None:
    """Carry both directions to their ends. An end is passed on, so that each side may stop sending before the other."""
    for each in (inner, outer):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    asking = asyncio.create_task(_carry(inner, outer, b""))
    answering = asyncio.create_task(_carry(outer, inner, first))
    try:
        await asyncio.wait((asking, answering), return_when=asyncio.FIRST_COMPLETED)
        if asking.done() and asking.result():
            await answering
        elif answering.done() and answering.result():
            await asyncio.wait((asking,), timeout=_LINGER_S)
    finally:
        await _cancel(asking, answering)


async def _cancel(*tasks: asyncio.Task[bool]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _carry(source: socket.socket, target: socket.socket, first: bytes) -> bool:
    """Pass on what comes, and its end; False when either side broke off."""
    loop = asyncio.get_running_loop()
    piece = first
    try:
        while piece or (piece := await loop.sock_recv(source, _PIECE)):
            await loop.sock_sendall(target, piece)
            piece = b""  # a connection that waits holds nothing
        target.shutdown(socket.SHUT_WR)
    except OSError:  # reset by a side that is gone: the caller ends the other
        return False
    return True
