"""A Docker engine, spoken to without holding up the event loop: the SDK in threads, streams in the loop itself.

Invariant: whatever an engine does - refuse, fail, stand still, die - comes out as a SandboxError that names it, and
within the time that a call may take. It knows no sandbox.

The streams of commands are read here and not through the SDK, which reads them from under a buffered reader, so that a
beginning that comes together with the head of the answer is lost, and blocks a thread for each of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import docker
from docker.errors import APIError, DockerException
from docker.tls import TLSConfig
from docker.utils import kwargs_from_env, parse_host
from requests.exceptions import RequestException
from urllib3.exceptions import HTTPError

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.sandbox import SandboxError
from polar_toolkit.rollout.sandbox.capture import CappedFile

CALL_S = 60
"""The longest silence of an engine within one call."""
_THREADS = 16
_PIECE = 1 << 16
_HEAD = 8  # of each frame: 1 byte for the stream, 3 unused, 4 for the length
_STDERR = 2
_FAULTS = (DockerException, RequestException, HTTPError, OSError)  # HTTPError: of urllib3, in the middle of a stream


class Engine:
    """The engine that DOCKER_HOST names, else the one of this machine."""

    def __init__(self) -> None:
        """Asks nothing yet. Raises Refusal for a DOCKER_HOST that cannot be used."""
        self.host = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        self._pool = ThreadPoolExecutor(_THREADS, "docker")
        self._client: docker.DockerClient | None = None
        try:
            settings = kwargs_from_env()
            self._tls: TLSConfig | None = settings.get("tls")
            self._address = urlsplit(str(parse_host(self.host, tls=self._tls is not None)))
        except DockerException as error:
            raise Refusal(f"DOCKER_HOST {self.host!r} cannot be used: {error}") from error
        if self._address.scheme not in ("http+unix", "http", "https"):
            raise Refusal(f"DOCKER_HOST {self.host!r} cannot be used: give unix://PATH or tcp://HOST:PORT")

    @property
    def is_socket(self) -> bool:
        """Whether it is spoken to through a file of this machine."""
        return self._address.scheme == "http+unix"

    async def do[T](self, work: Callable[[docker.APIClient], T]) -> T:
        """Do something with the SDK's plain client in a thread. Raises SandboxError."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._done, work)

    async def start(self, execution: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Start an exec that was created; its streams, in frames, and its standard input. Raises SandboxError."""
        return await self._request("POST", f"/exec/{execution}/start", {"Detach": False, "Tty": False})

    @asynccontextmanager
    async def events(self, kinds: Sequence[str], label: str) -> AsyncGenerator[AsyncGenerator[dict[str, Any]]]:
        """The events of these kinds of containers with a label, from now on. Raises SandboxError."""
        filters = json.dumps({"type": ["container"], "event": list(kinds), "label": [label]})
        query = filters.translate({ord(letter): f"%{ord(letter):02X}" for letter in ' "{}[]:,='})
        reader, writer = await self._request("GET", f"/events?filters={query}", None)
        try:
            yield _objects(reader)
        finally:
            writer.close()

    def close(self) -> None:
        """Let go of the connections."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._client:
            self._client.close()

    def _done[T](self, work: Callable[[docker.APIClient], T]) -> T:
        try:
            self._try_socket()
            return work(self._connected().api)
        except _FAULTS as error:
            raise self._fault(error) from error

    def _connected(self) -> docker.DockerClient:
        if self._client is None:  # two threads may both make one: the later is kept
            self._client = docker.DockerClient(
                base_url=self.host, tls=self._tls or False, timeout=CALL_S, max_pool_size=_THREADS
            )
        return self._client

    def _try_socket(self) -> None:
        """The SDK leaves a socket open that it could not connect."""
        if self.is_socket:
            with socket.socket(socket.AF_UNIX) as trial:
                trial.connect(self._address.path)

    def _fault(self, error: Exception) -> SandboxError:
        if isinstance(error, APIError):
            return SandboxError(f"the Docker engine refused: {error.explanation or error}")
        return SandboxError(
            f"the Docker engine at {self.host} does not answer: {error}; start it, or set DOCKER_HOST to another"
        )

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        version = await self.do(lambda api: api.api_version)
        try:
            async with asyncio.timeout(CALL_S):
                reader, writer = await self._opened()
                try:
                    return await _asked(reader, writer, method, f"/v{version}{path}", body)
                except BaseException:  # refused or cancelled: the connection must not outlive us
                    writer.close()
                    raise
        except (OSError, EOFError) as error:  # TimeoutError is one
            raise self._fault(error) from error

    async def _opened(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.is_socket:
            return await asyncio.open_unix_connection(self._address.path)
        context = _context(self._tls) if self._tls else None
        return await asyncio.open_connection(self._address.hostname, self._address.port, ssl=context)


async def sort_frames(reader: asyncio.StreamReader, out: CappedFile, err: CappedFile) -> None:
    """Write the two streams of a command to their files, to the end."""
    try:
        while True:
            head = await reader.readexactly(_HEAD)
            left = int.from_bytes(head[4:])
            while left:
                piece = await reader.read(min(left, _PIECE))
                if not piece:
                    return
                (err if head[0] == _STDERR else out).write(piece)
                left -= len(piece)
    except (asyncio.IncompleteReadError, ConnectionError):  # the end, in order or not: what ended says why
        return


async def _asked(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str, path: str, body: dict[str, Any] | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    content = json.dumps(body).encode() if body is not None else b""
    upgrade = "Connection: Upgrade\r\nUpgrade: tcp\r\n" if body is not None else ""
    head = f"{method} {path} HTTP/1.1\r\nHost: docker\r\nContent-Type: application/json\r\n{upgrade}"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()
    answer = await reader.readuntil(b"\r\n\r\n")
    if answer.split(b" ", 2)[1] not in (b"101", b"200"):
        said = (await reader.read(_PIECE)).decode(errors="replace")
        raise SandboxError(f"the Docker engine refused: {said or answer.decode(errors='replace')}")
    return reader, writer


async def _objects(reader: asyncio.StreamReader) -> AsyncGenerator[dict[str, Any]]:  # Any: JSON
    """The JSON objects of a chunked stream of lines, each of which the engine sends in a chunk of its own."""
    while line := await reader.readline():
        if line.startswith(b"{"):  # else the length of a chunk, or the end of one
            yield json.loads(line)


def _context(tls: TLSConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.ca_cert or None)
    if not tls.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if tls.cert:
        context.load_cert_chain(*tls.cert)
    return context
