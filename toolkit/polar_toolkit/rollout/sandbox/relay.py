"""The way out of a container on an `--internal` network: its connections, led to the interceptor as its session's.

Invariant: only connections from the one network are served, only names that are allowed are asked for, and nothing is
contacted but the interceptor. It runs in a container of its own, so the credentials are not in the harness's. It is run
by whatever Python that container has (3.9 or later), from this one file, and so uses nothing but the standard library.
It looks into a connection only as far as the name in its beginning. The engine answers look-ups of allowed names, and
asks us about the others: none of them exists.

POLAR_RELAY holds a JSON object: `proxy` ([host, port]), `session`, `secret`, `names`, `within` (the network, such as
172.18.0.0/16), `ports` ({"443": port to listen on, "80": ..., "53": ...}). It says `listening PORT ...`, then
`refused NAME` or `refused NAME:PORT` for each look-up and connection in vain.

    POLAR_RELAY=... python3 -I relay.py
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import io
import ipaddress
import json
import os
import ssl
import sys
from typing import Any, cast

_PIECE = 1 << 16
"""Bytes; of one direction of one connection, the most that is held here."""
_LONGEST_BEGINNING = 1 << 16
_BEGINNING_S = 30.0
_RETRY_S = 20.0
"""How long an interceptor that does not answer is asked again: it is being restarted on the same port."""
_PAUSE_S = 0.1
_BACKLOG = 256
_DNS_HEADER = 12
_LINGER_S = 10.0
"""What a program may still send after the interceptor has said its last word."""


class Relay:
    """Serves one sandbox."""

    def __init__(self, setting: dict[str, Any]) -> None:  # Any: JSON
        """See the module."""
        self._proxy: tuple[str, int] = tuple(setting["proxy"])
        userinfo = f"{setting['session']}:{setting['secret']}"
        self._credentials = base64.b64encode(userinfo.encode()).decode()
        self._names = frozenset(name.lower() for name in setting["names"])
        self._within = ipaddress.ip_network(setting["within"])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        """One connection, to its end. `port` is the one that the program inside meant."""
        try:
            name, beginning = await self._beginning(reader, writer, port)
            if name not in self._names:
                _say(f"refused {name or '(no name)'}:{port}")
                return
            with contextlib.suppress(OSError):  # the interceptor is down, or does not want it
                outer_reader, outer_writer = await self._connect(f"{name}:{port}")
                with contextlib.closing(outer_writer):
                    outer_writer.write(beginning)
                    await _relay((reader, writer), (outer_reader, outer_writer))
        finally:
            writer.close()

    async def _beginning(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> tuple[str, bytes]:
        """The name that is asked for, and what was read to learn it."""
        ends = (writer.get_extra_info("sockname")[0], writer.get_extra_info("peername")[0])
        if not all(ipaddress.ip_address(end) in self._within for end in ends):  # it stands in a second network
            return "", b""
        find = Hello() if port == 443 else Head()
        read = b""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            while find.name is None and len(read) < _LONGEST_BEGINNING:
                piece = await asyncio.wait_for(reader.read(_PIECE), _BEGINNING_S)
                if not piece:
                    break
                read += piece
                find.feed(piece)
        return (find.name or "").lower().rstrip("."), read

    async def _connect(self, destination: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which the destination was asked for and granted. Raises OSError."""
        deadline = asyncio.get_running_loop().time() + _RETRY_S
        while True:
            try:
                return await asyncio.wait_for(self._ask(destination), _RETRY_S)
            except PermissionError:
                raise
            except (OSError, EOFError, asyncio.TimeoutError) as error:  # noqa: UP041  # another class before Python 3.11
                if asyncio.get_running_loop().time() >= deadline:
                    raise ConnectionRefusedError("the interceptor does not answer") from error
                await asyncio.sleep(_PAUSE_S)

    async def _ask(self, destination: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self._proxy)
        try:
            head = f"CONNECT {destination} HTTP/1.1\r\nHost: {destination}\r\n"
            writer.write(f"{head}Proxy-Authorization: Basic {self._credentials}\r\n\r\n".encode())
            answer = await reader.readuntil(b"\r\n\r\n")
            if answer.split(b" ", 2)[1:2] != [b"200"]:
                raise PermissionError(f"the interceptor does not lead to {destination}")
        except BaseException:  # refused or cancelled: the connection must not outlive us
            writer.close()
            raise
        return reader, writer


class NoSuchNames(asyncio.DatagramProtocol):
    """Answers each DNS query: there is no such name."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where to answer."""
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        """One query; what is none is ignored."""
        if len(data) <= _DNS_HEADER or data[2] & 0xF8:  # too short, an answer, or no look-up
            return
        _say(f"refused {_queried(data)}")
        flags = bytes([0x80 | data[2] & 1, 0x83])  # an answer; recursion is available; no such name
        self._transport.sendto(data[:2] + flags + data[4:6] + bytes(6) + data[_DNS_HEADER:], addr)


class Hello:
    """Finds the name in the beginning of a TLS connection."""

    def __init__(self) -> None:
        """The TLS library reads the hello, and stops at the name."""
        self.name: str | None = None
        """None while it is not known; "" when there is none."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.sni_callback = self._found
        self._incoming = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, ssl.MemoryBIO(), server_side=True)

    def feed(self, piece: bytes) -> None:
        """What came next."""
        self._incoming.write(piece)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError:  # always, for we have no certificate and want none
            self.name = self.name or ""

    def _found(self, _tls: ssl.SSLObject, name: str | None, _context: ssl.SSLContext) -> int:
        self.name = name or ""
        return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME


class Head:
    """Finds the name in the beginning of an HTTP/1 connection."""

    def __init__(self) -> None:
        """Nothing was read yet."""
        self.name: str | None = None
        """None while it is not known; "" when there is none."""
        self._read = b""

    def feed(self, piece: bytes) -> None:
        """What came next."""
        self._read += piece
        head, end, _ = self._read.partition(b"\r\n\r\n")
        if not end:
            return
        try:
            fields = http.client.parse_headers(io.BytesIO(head.partition(b"\r\n")[2] + end))
        except http.client.HTTPException:
            self.name = ""
        else:
            hosts = fields.get_all("Host", [])
            self.name = hosts[0].strip().rpartition(":")[0] or hosts[0].strip() if len(hosts) == 1 else ""


async def _relay(
    inner: tuple[asyncio.StreamReader, asyncio.StreamWriter], outer: tuple[asyncio.StreamReader, asyncio.StreamWriter]
) -> None:
    """Carry both directions to their ends. An end is passed on, so that each side may stop sending before the other."""
    asking = asyncio.ensure_future(_carry(inner[0], outer[1]))
    answering = asyncio.ensure_future(_carry(outer[0], inner[1]))
    try:
        await asyncio.wait((asking, answering), return_when=asyncio.FIRST_COMPLETED)
        if asking.done() and asking.result():
            await answering
        elif answering.done() and answering.result():
            await asyncio.wait((asking,), timeout=_LINGER_S)
    finally:
        asking.cancel()
        answering.cancel()
        await asyncio.gather(asking, answering, return_exceptions=True)


async def _carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> bool:
    """Pass on what comes, and its end; False when either side broke off."""
    try:
        while piece := await source.read(_PIECE):
            target.write(piece)
            await target.drain()
        target.write_eof()
    except OSError:  # reset by a side that is gone: the caller ends the other
        return False
    return True


def _queried(query: bytes) -> str:
    labels: list[str] = []
    rest = query[_DNS_HEADER:]
    while rest and 0 < rest[0] < 64:
        labels.append(rest[1 : 1 + rest[0]].decode("ascii", "replace"))
        rest = rest[1 + rest[0] :]
    return ascii(".".join(labels).lower())[1:-1]


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def main(setting: dict[str, Any]) -> None:  # Any: JSON
    """Serve until killed."""
    relay = Relay(setting)
    ports: dict[str, int] = setting["ports"]
    loop = asyncio.get_running_loop()
    names, _ = await loop.create_datagram_endpoint(NoSuchNames, ("0.0.0.0", ports["53"]))

    async def serve(port: int) -> asyncio.Server:
        return await asyncio.start_server(
            lambda reader, writer: relay.serve(reader, writer, port), "0.0.0.0", ports[str(port)], backlog=_BACKLOG
        )

    servers = [await serve(443), await serve(80)]
    _say(" ".join(["listening", *(str(each.sockets[0].getsockname()[1]) for each in servers),
                   str(names.get_extra_info("sockname")[1])]))  # fmt: skip
    await asyncio.gather(*(each.serve_forever() for each in servers))


if __name__ == "__main__":
    asyncio.run(main(json.loads(os.environ.pop("POLAR_RELAY"))))
