"""The ASGI face of the run: each request gets its route's treatment, in its protocol's own shape.

Invariant: every request gets an answer of its own protocol and, if it is a model call, a row; a stream that has begun
ends with the protocol's terminal event, whatever happens. The addon runs this app inside the proxy;
`python -m polar_mitm.gateway` runs the same without TLS, for harnesses that take a base URL.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hmac import compare_digest
from pathlib import PurePath
from typing import Any
from urllib.parse import parse_qs

from polar_mitm.asgi import Gone, Receive, Scope, Send, listen, read_body, send_json, server, until_gone
from polar_mitm.compression import decompress
from polar_mitm.desk import Desk
from polar_mitm.engine import Description
from polar_mitm.errors import BadRequest, EngineUnavailable, NotFound, PolarError, TooLarge, Unauthorized
from polar_mitm.identity import Session, Sessions, figures_token
from polar_mitm.options import OPTIONS, Options, open_run, write_json
from polar_mitm.record import Incoming
from polar_mitm.routes import Match, Treatment, find
from polar_mitm.turn import Call, count, open_call, refuse
from polar_mitm.wire import Dialect

SECRET_HEADERS = frozenset({"authorization", "x-api-key", "api-key", "x-goog-api-key", "cookie", "proxy-authorization"})
CALL_HEADER = "x-polar-call"
FIGURES = "/polar/figures"
"""For a runner on this machine: what the run and some of its sessions have used. `?sessions=a,b`, a bearer token."""
_KEY_HEADERS = ("x-api-key", "x-goog-api-key", "api-key", "authorization")
_DESCRIBE_SECONDS = 5.0
"""How long a list of models waits for an engine that was not met yet: harnesses ask for it while they start."""
_LOG = logging.getLogger("polar")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request without its body."""

    method: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    host: str
    """The provider's."""
    address: str
    """The IP address of who connected to the gateway itself."""
    match: Match


class Gateway:
    """Answers model calls. Headers `x-polar-*` are believed only beside the per-process secret."""

    def __init__(self, desk: Desk, secret: str) -> None:
        self._desk, self._secret = desk, secret
        self._sessions = Sessions(desk.run)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        host = headers.get("x-polar-host", "") if self._is_proxy(headers) else headers.get("host", "")
        method, path, query = scope["method"], scope["path"], scope["query_string"].decode("latin-1")
        match = find(method, host.partition(":")[0], path, query, headers)
        address = str((scope.get("client") or ("",))[0])
        if (method, path) == ("GET", FIGURES) and self._is_runner(headers, address):
            await send_json(send, 200, self._figures(parse_qs(query).get("sessions", [""])[-1]))
            return
        asked = Asked(method, path, headers, host, address, match)
        begun = False

        async def sent(message: Scope) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._treat(asked, receive, sent)
        except Gone:
            return
        except Exception as error:  # noqa: BLE001 - the last boundary: a client must be told of any fault, as must the log
            known = error if isinstance(error, PolarError) else PolarError("the interceptor failed: see its log")
            if known is not error:
                _LOG.exception("polar: %s %s failed", method, path)
            if not begun:
                await send_json(send, match.dialect.status(known), match.dialect.error(known))

    async def _treat(self, asked: Asked, receive: Receive, send: Send) -> None:
        match asked.match.treatment:
            case Treatment.GENERATE:
                await self._generate(asked, receive, send)
            case Treatment.WEBSOCKET:
                await send_json(send, 426, upgrade_required())
            case Treatment.REFUSE:
                error = not_found(asked.method, asked.path)
                await send_json(send, asked.match.dialect.status(error), asked.match.dialect.error(error))
            case _:
                await until_gone(self._tell(asked, await read_body(receive), send), receive)

    # -- the runner

    def _is_runner(self, headers: Mapping[str, str], address: str) -> bool:
        """Whether somebody on this machine asks who can read the run's key; through the proxy nobody does."""
        given, wanted = headers.get("authorization", ""), f"Bearer {figures_token(self._desk.key)}"
        local = bool(address) and ipaddress.ip_address(address).is_loopback
        return local and "x-polar-gateway" not in headers and compare_digest(given.encode(), wanted.encode())

    def _figures(self, names: str) -> dict[str, Any]:  # Any: JSON
        usage, shown = self._desk.usage, ("calls", "running", "sampled", "refused", "turns")
        sessions = {name: usage.of(name) for name in names.split(",") if name}
        return {
            "calls": usage.total.calls,
            "running": usage.total.running,
            "waiting": usage.waiting,
            "sampled": usage.total.sampled,
            "sessions": {name: {field: getattr(u, field) for field in shown} for name, u in sessions.items()},
        }

    # -- what is asked

    async def _generate(self, asked: Asked, receive: Receive, send: Send) -> None:
        call = await self._open(asked, receive)
        try:
            named = _naming(send, call.call_id) if self._is_proxy(asked.headers) else send
            await until_gone(_deliver(call, asked.match.dialect, named), receive)
        finally:
            call.leave()

    async def _open(self, asked: Asked, receive: Receive) -> Call:
        """The call of a request. Raises PolarError, already recorded."""
        incoming = self._incoming(asked)
        try:
            incoming = replace(incoming, body=await read_body(receive))
            incoming = replace(incoming, session=self._identify(asked))
            body = decompress(incoming.body, asked.headers.get("content-encoding", ""))
        except (Unauthorized, BadRequest, TooLarge) as error:
            await refuse(self._desk, incoming, error)
            raise
        return await open_call(self._desk, replace(incoming, body=body))

    async def _tell(self, asked: Asked, body: bytes, send: Send) -> None:
        """The answers that need no sample and leave no row."""
        dialect, fields = asked.match.dialect, asked.match.fields
        match asked.match.treatment:
            case Treatment.COUNT:
                body = decompress(body, asked.headers.get("content-encoding", ""))
                incoming = replace(self._incoming(asked), session=self._identify(asked), body=body)
                answer = dialect.counted(await count(self._desk, incoming))
            case Treatment.MODELS:
                described = await self._described()
                answer = dialect.models([model_name(described)], described.context)
            case Treatment.MODEL:
                answer = dialect.model(fields["model"], (await self._described()).context)
            case _:
                session = self._identify(asked)
                stored = self._desk.delete_answer if asked.method == "DELETE" else self._desk.answer
                answer = await stored(session, fields["answer"])
        await send_json(send, 200, answer)

    async def _described(self) -> Description:
        try:
            return await asyncio.wait_for(self._desk.ready(), _DESCRIBE_SECONDS)
        except TimeoutError:
            raise EngineUnavailable("the engine does not answer yet: its model is not known") from None

    # -- who asks

    def _incoming(self, asked: Asked) -> Incoming:
        """The request before its session and its body are known."""
        kept = {k: v for k, v in asked.headers.items() if k not in SECRET_HEADERS and not k.startswith("x-polar-")}
        claimed = Session(self._claims(asked)[0] or "unknown")
        return Incoming(asked.match.dialect, claimed, asked.host, asked.path, kept, b"", asked.match.fields)

    def _identify(self, asked: Asked) -> Session:
        """Raises Unauthorized."""
        name, secret = self._claims(asked)
        mode, address = asked.headers.get("x-polar-mode", ""), asked.headers.get("x-polar-address", "")
        if not self._is_proxy(asked.headers):
            mode, address = "", asked.address
        return self._sessions.identify(name, secret, mode=mode, address=address)

    def _claims(self, asked: Asked) -> tuple[str | None, str | None]:
        """Session name and secret: the proxy URL's user, else an API key that was made for a session."""
        behind_proxy = self._is_proxy(asked.headers)
        if behind_proxy and (name := asked.headers.get("x-polar-user")):
            return name, asked.headers.get("x-polar-password")
        key = asked.headers.get("x-polar-key", "") if behind_proxy else session_key(asked.headers)
        name, _, secret = key.partition(":")
        if not name or (behind_proxy and not self._sessions.registered(name)):
            return None, None  # behind the proxy, a key may be the user's own
        return name, secret

    def _is_proxy(self, headers: Mapping[str, str]) -> bool:
        return bool(self._secret) and compare_digest(headers.get("x-polar-gateway", "").encode(), self._secret.encode())


def session_key(headers: Mapping[str, str]) -> str:
    """An API key of the form NAME:SECRET, which is made for a session; "" when there is another one or none."""
    key = next((headers[name] for name in _KEY_HEADERS if headers.get(name)), "").removeprefix("Bearer ")
    return key if ":" in key else ""


def not_found(method: str, path: str) -> NotFound:
    """The answer to every other request for a provider: the quickest one for all harnesses (seen 2026-11-29)."""
    return NotFound(f"{method} {path} is not answered here: this is not a model call")


def upgrade_required() -> dict[str, Any]:  # Any: JSON
    """The body of a 426."""
    return {"error": {"message": "no WebSocket here: use POST", "type": "upgrade_required"}}


def model_name(described: Description) -> str:
    """The served model's name; of a model that is a folder, the folder's name."""
    return PurePath(described.model).name if described.model.startswith("/") else described.model


def _naming(send: Send, call_id: str) -> Send:
    """Tells the addon, which takes it off again, which call an answer is of."""

    async def named(message: Scope) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (CALL_HEADER.encode(), call_id.encode())]
        await send(message)

    return named


async def _deliver(call: Call, dialect: Dialect, send: Send) -> None:
    if call.request.stream:
        await _stream(call, dialect, send)
        return
    answer = await call.plain()
    await send_json(send, 200, answer)
    call.delivered()


async def _stream(call: Call, dialect: Dialect, send: Send) -> None:
    encoder = dialect.encoder(call.request, "")
    headers = [(b"content-type", encoder.content_type.encode()), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    try:
        async with contextlib.aclosing(call.stream()) as chunks:
            async for chunk in chunks:
                if chunk:  # a protocol without pings has nothing to say while it waits
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except Exception:  # noqa: BLE001 - harnesses loop without end after a stream without its terminal event
        _LOG.exception("polar: a stream failed")
        failed = encoder.fail(PolarError("the interceptor failed: see its log"))
        await send({"type": "http.response.body", "body": failed, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


# --- serving alone ------------------------------------------------------------------------------------------------


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
