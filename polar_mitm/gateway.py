"""The ASGI face of a turn: headers at once, pings, errors in the provider's shape, abort when the client leaves.

Invariant: every request gets an answer of its own protocol and, if it is a model call, a row. The addon runs this app
inside the proxy; `python -m polar_mitm.gateway` runs the same without TLS, for harnesses that take a base URL.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import sys
import zlib
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from dataclasses import replace
from hmac import compare_digest
from typing import Any

import uvicorn

from polar_mitm.desk import Desk
from polar_mitm.errors import BadRequest, NotFound, PolarError, Unauthorized
from polar_mitm.identity import Session, Sessions
from polar_mitm.options import OPTIONS, Options, open_run, write_json
from polar_mitm.record import Incoming
from polar_mitm.turn import Call, open_call, refuse
from polar_mitm.wire import DIALECTS, Dialect

Scope = MutableMapping[str, Any]  # Any: ASGI's own message values
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]

SECRET_HEADERS = frozenset({"authorization", "x-api-key", "api-key", "x-goog-api-key", "cookie", "proxy-authorization"})


class Gateway:
    """Answers model calls. Headers `x-polar-*` are believed only beside the per-process secret."""

    def __init__(self, desk: Desk, secret: str) -> None:
        self._desk, self._secret = desk, secret
        self._sessions = Sessions(desk.run)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        dialect = find_dialect(scope["method"], scope["path"])
        if headers.get("upgrade", "").lower() == "websocket":
            await _send_json(
                send, 426, {"error": {"message": "no WebSocket here: use POST", "type": "upgrade_required"}}
            )
        elif dialect is None:
            await _send_json(send, 404, not_found(scope["method"], scope["path"]))
        else:
            await self._answer(dialect, scope["path"], headers, receive, send)

    async def _answer(self, dialect: Dialect, path: str, headers: dict[str, str], receive: Receive, send: Send) -> None:
        body = await _read_body(receive)
        if body is None:
            return
        try:
            call = await self._open(dialect, path, headers, body)
        except PolarError as error:
            await _send_json(send, dialect.status(error), dialect.error(error))
            return
        await _until_gone(_deliver(call, dialect, send), receive)
        call.leave()

    async def _open(self, dialect: Dialect, path: str, headers: dict[str, str], body: bytes) -> Call:
        """The call of a request. Raises PolarError, already recorded."""
        name, secret, host = self._claims(headers)
        kept = {k: v for k, v in headers.items() if k not in SECRET_HEADERS and not k.startswith("x-polar-")}
        incoming = Incoming(dialect, Session(name or "unknown"), host, path, kept, body)
        try:
            session = self._sessions.identify(name, secret)
            plain = _decompress(body, headers.get("content-encoding", ""))
        except (Unauthorized, BadRequest) as error:
            await refuse(self._desk, incoming, error)
            raise
        return await open_call(self._desk, replace(incoming, session=session, body=plain))

    def _claims(self, headers: dict[str, str]) -> tuple[str | None, str | None, str]:
        """Session name, session secret and provider host that a request claims."""
        if self._secret and compare_digest(headers.get("x-polar-gateway", "").encode(), self._secret.encode()):
            return headers.get("x-polar-user"), headers.get("x-polar-password"), headers.get("x-polar-host", "")
        key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        name, colon, secret = key.partition(":")
        return (name, secret, headers.get("host", "")) if colon else (None, None, headers.get("host", ""))


def find_dialect(method: str, path: str) -> Dialect | None:
    """The protocol of a generation call, None for any other request."""
    return next((d for d in DIALECTS if d.matches(method, path)), None)


def not_found(method: str, path: str) -> dict[str, Any]:  # Any: JSON
    """The answer to every other request for a provider: the quickest one for all harnesses (seen 2026-11-29)."""
    error = NotFound(f"{method} {path} is not answered here: this is not a model call")
    return {"type": "error", "error": {"type": "not_found_error", "message": str(error), "code": error.kind}}


async def _deliver(call: Call, dialect: Dialect, send: Send) -> None:
    if call.request.stream:
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        async with contextlib.aclosing(call.stream()) as chunks:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        return
    try:
        answer = await call.plain()
    except PolarError as error:
        await _send_json(send, dialect.status(error), dialect.error(error))
        return
    await _send_json(send, 200, answer)
    call.delivered()


async def _until_gone(work: Any, receive: Receive) -> None:  # Any: a coroutine
    """Run `work`, cancelled as soon as the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(receive())
    await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    for pending in (task, gone):
        pending.cancel()
    with contextlib.suppress(asyncio.CancelledError):  # the client left; the call's own task records it
        await task


async def _read_body(receive: Receive) -> bytes | None:
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(chunks)


def _decompress(body: bytes, encoding: str) -> bytes:
    """Undo gzip and deflate; the addon has undone every encoding before."""
    if encoding in {"", "identity"}:
        return body
    if encoding not in {"gzip", "deflate"}:
        raise BadRequest(f"content-encoding {encoding!r} is not read here: send gzip, deflate or none")
    try:
        return zlib.decompress(body, wbits=47 if encoding == "gzip" else 15)
    except zlib.error as error:
        raise BadRequest(f"the body is not {encoding}: {error}") from error


async def _send_json(send: Send, status: int, value: dict[str, Any]) -> None:  # Any: JSON
    body = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


# --- serving ------------------------------------------------------------------------------------------------------


class Server(uvicorn.Server):
    """uvicorn inside somebody else's event loop: it leaves the signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Signals belong to the process."""
        yield

    def stop(self) -> None:
        """End serving without waiting for open connections."""
        self.should_exit = self.force_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, so that the port is known before the server runs."""
    return socket.create_server((host, port), backlog=512)


def server(gateway: Gateway) -> Server:
    """A server for the app; run it with `serve(sockets=[...])`."""
    return Server(
        uvicorn.Config(
            gateway, lifespan="off", log_level="warning", access_log=False, ws="none", timeout_keep_alive=3600
        )
    )


async def serve(options: Options, host: str, port: int) -> None:
    """Serve the gateway alone until SIGINT or SIGTERM; what is in flight then is ended and recorded."""
    opened = await open_run(options)
    try:
        await opened.desk.ready()
        listener = listen(host, port)
        url = f"http://{host}:{listener.getsockname()[1]}"
        write_json(options.run / "proxy.json", {"gateway": url, "host": "", "port": 0, "ca": "", "pid": 0})
        sys.stdout.write(f"gateway {url} -> {options.polar_engine}, run {options.run}\n")
        sys.stdout.flush()
        served = server(Gateway(opened.desk, ""))
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, served.stop)
        await served.serve(sockets=[listener])
    finally:
        await opened.close()


def main() -> None:
    """`python -m polar_mitm.gateway`."""
    parser = argparse.ArgumentParser(prog="python -m polar_mitm.gateway", description=__doc__)
    for name, kind, default, text in OPTIONS:
        parser.add_argument(f"--{name.removeprefix('polar_')}", dest=name, type=kind, default=default, help=text)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=30080, help="port to listen on (30080; 0: any)")
    given = vars(parser.parse_args())
    host, port = given.pop("host"), given.pop("port")
    try:
        asyncio.run(serve(Options(**given), host, port))
    except (PolarError, OSError, ValueError) as error:
        sys.exit(f"polar: {error}")


if __name__ == "__main__":
    main()
